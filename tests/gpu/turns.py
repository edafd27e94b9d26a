"""What a tree of prefixes, a second tier and a deadline bring: a long prompt again, forty turns,
a long prompt beside answers, conversations that come back from memory and from a file.

    python tests/gpu/turns.py [--emulator] [--only PARTS] [--folder FOLDER] [--output turns.json]

PARTS are some of long, turns, mixed and spill with commas between them: an output that is there
keeps its others. Times are not judged; that answers are the same and as much was cached as was
kept is."""
import json,tempfile
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
import numpy as np
from toys import arguments,greedy,prompt,toy,verdict
from atlas.engine import spill as tier
from atlas.ops.linear import TILE

# Tokens of prompts and how many of them there are, bytes of the small cache, GB of its second tier;
# prompts are drawn below `vocab`, and `between` are steps
CARD = SimpleNamespace(model='qwen3.6-35b-a3b', vocab=200_000, context=40960, long=32768,
    replays=12, stem=2000, turn=400, turns=40, beside=12288, prompts=3, between=40,
    spilled=24576, conversations=6, cache=2<<30, spill_gb=8)
TINY = SimpleNamespace(model='qwen3.6-drafts', vocab=256, context=512, long=260, replays=2,
    stem=40, turn=40, turns=3, beside=100, prompts=1, between=4,
    spilled=300, conversations=3, cache=372<<10, spill_gb=.05)

class Bench:
    "Engines of one model, requests with names of their own, and what should not have been"
    def __init__(self, emulator):
        self.sizes = TINY if emulator else CARD
        self.emulator = emulator
        self.asked = 0
        self.bad = []

    def load(self, **kw):
        "An engine as it is when nobody has asked for a moment: its graphs of prompts are recorded"
        llm = toy(self.sizes.model, self.emulator, 8, self.sizes.context, show=False, **kw)
        while llm.engine.idle():
            pass
        return llm

    def close(self, llm):
        self.must(not llm.engine.stats()['jit_after_ready_total'], 'something was compiled late')
        llm.close()

    def must(self, holds, what):
        if not holds:
            self.bad.append(what)
    def ids(self, n, seed): return prompt(n, self.sizes.vocab, seed)

    def request(self, ids, answer, ends=()):
        "A greedy request; messages of its prompt end at `ends`"
        self.asked += 1
        return replace(greedy(f'r{self.asked}', ids, answer), boundaries=tuple(ends))

    def ask(self, llm, *what):
        "What a request gets alone: ms to its first token, tokens, and how many were `cached`"
        r,e,said = self.request(*what),llm.engine,[]
        llm.device.synchronize()
        began = perf_counter()
        e.add(r)
        while e.has_work:
            events = [ev for ev in e.step() if ev.token is not None]
            if events and not said:
                ms,cached = (perf_counter()-began)*1e3,events[0].cached
            said += [ev.token for ev in events]
        return SimpleNamespace(ms=ms, tokens=said, cached=cached)

def kept(n): return (n-1)//TILE*TILE

def again(b, llm):
    "A long prompt: cold, warm, with another end, and some more times"
    n,runs = b.sizes.long,b.sizes.replays
    b.ask(llm, b.ids(n, 3), 4)  # the first of its length is slow
    ids = b.ids(n, 2)
    cold,warm = [b.ask(llm, ids, 16) for _ in range(2)]
    tail = b.ask(llm, ids[:-100]+b.ids(100, 4), 4)
    equal = sum(b.ask(llm, ids, 16).tokens==cold.tokens for _ in range(runs))
    b.must(warm.tokens==cold.tokens and equal==runs, f'{runs-equal} replays have another answer')
    found = (cold.cached, warm.cached, tail.cached)
    want = (0, kept(n), kept(n)-2*TILE)
    b.must(found==want, f'of {n} tokens {found} were there, not {want}')
    return dict(tokens=n, cold_ms=cold.ms, warm_ms=warm.ms, tail_ms=tail.ms,
        cached=warm.cached, tail_cached=tail.cached, replays=runs, equal=equal)

def turns(b, tree, whole):
    "A conversation that is sent again with each turn, to an engine with a tree and to one without"
    out = []
    ends = []
    ids = b.ids(b.sizes.stem, 5)
    known = 0
    for i in range(1, b.sizes.turns+1):
        ids += b.ids(b.sizes.turn, 100+i)
        ends.append(n := len(ids))
        warm = b.ask(tree, ids, 1, ends)
        cold = b.ask(whole, ids, 1)
        b.must(warm.tokens==cold.tokens, f'turn {i} has another answer')
        b.must(warm.cached==known, f'turn {i}: {warm.cached} were there, not {known}')
        out.append(dict(
            tokens=n, computed=n-warm.cached, tree_ms=warm.ms,
            whole_ms=cold.ms))
        known = kept(n)
    return out

class Launches:
    """What a stepper launches: when, seconds that the host took for it, tokens of prompts,
    sequences that decode, and whether the card is divided between the two"""
    def __init__(self, stepper):
        self.seen = []
        self.launch,stepper.launch = stepper.launch,self

    def __call__(self, plan, samplers):
        began = perf_counter()
        flight = self.launch(plan, samplers)
        tokens = sum(n for _,_,n in plan.prefill)
        took = perf_counter()-began
        self.seen.append((began, took, tokens, len(plan.decode), plan.apart))
        return flight

    def since(self, began):
        "Those from then on, in milliseconds"
        return [((at-began)*1e3, took*1e3, *what) for at,took,*what in self.seen if at>=began]

class Company:
    "Four answers that are written, and the milliseconds between their tokens"
    def __init__(self, b, llm):
        self.engine,self.last,self.gaps = llm.engine,{},[]
        self.launches = Launches(self.engine.stepper)
        for i in range(4):
            self.engine.add(
                b.request(b.ids(64, 60+i), b.sizes.context//8))

    def step(self):
        "One step; who said something"
        said = [ev.id for ev in self.engine.step() if ev.token is not None]
        now = perf_counter()
        self.gaps += [(now-self.last[i])*1e3 for i in said if i in self.last]
        self.last |= dict.fromkeys(said, now)
        return said

    def prompt(self, r):
        "Milliseconds to the first token of `r`, the gaps meanwhile, and what was launched"
        self.gaps,began = [],perf_counter()
        self.engine.add(r)
        while r.id not in self.step():
            pass
        ms = (perf_counter()-began)*1e3
        return ms,self.gaps,self.launches.since(began)

    def plain(self, n):
        "The gap of `n` steps, in the middle"
        self.gaps = []
        for _ in range(n):
            self.step()
        return np.median(self.gaps)

    def leave(self):
        "All of them"
        for i in self.last:
            self.engine.abort(i)
        while self.engine.has_work:
            self.engine.step()

def mixed(b, policy, deadline=100):
    "Prompts that come, one after the other, while answers are written"
    llm = b.load(scheduling_policy=policy, tbt_deadline_ms=deadline)
    s,rows = b.sizes,[]
    alone = [b.ask(llm, b.ids(s.beside, 40+i), 2).ms for i in range(2*s.prompts)]
    company = Company(b, llm)
    company.plain(12)  # until all of them write
    same = dict(
        policy=policy,
        deadline_ms=deadline,
        tokens=s.beside,
        plain_ms=company.plain(s.between),
        alone_ms=min(alone[s.prompts:]))
    for i in range(s.prompts):
        ms,gaps,launches = company.prompt(b.request(b.ids(s.beside, 70+i), 1))
        quantiles = {f'p{p}_ms': np.percentile(gaps, p) for p in (50,95,99)}
        rows.append(dict(
            **same, beside_ms=ms, **quantiles, most_ms=max(gaps), gaps_ms=gaps,
            launches=launches))
        company.plain(s.between)
    line = list(llm.engine.scheduler.policy.times.line)
    company.leave()
    b.close(llm)
    return [row|dict(line=line) for row in rows]

def spill(b, folder):
    "Conversations for which there is too little room, and which come back"
    n,place = b.sizes.spilled,'file' if folder else 'memory'
    llm = b.load(
        kv_cache_memory=b.sizes.cache, kv_spill_gb=b.sizes.spill_gb, kv_spill_dir=folder)
    tier.KNOWN = np.inf  # all are fetched, however slow that is
    cold,back = both_times(b, llm, n)
    stats = llm.engine.stats()
    read,dropped = [stats[f'kv_spill_{k}_total'] for k in ('read_bytes','dropped')]
    gone = sum(a.cached!=kept(n) for a in back)
    b.must([a.tokens for a in back]==[a.tokens for a in cold], f'other answers from {place}')
    kept_up = not gone and read or folder and dropped  # a disk may be too slow, memory may not
    b.must(kept_up, f'{gone} not back from {place}, {read} B read, {dropped} dropped')
    b.close(llm)
    return dict(
        place=place,
        tokens=n,
        cold_ms=[a.ms for a in cold],
        back_ms=[a.ms for a in back],
        cached=[a.cached for a in back],
        dropped=dropped,
        read=read)

def both_times(b, llm, n):
    "Answers to conversations of `n` tokens, and to the same once their tiles are in the store"
    b.ask(llm, b.ids(n//3, 1), 2)
    prompts = [b.ids(n, 200+i) for i in range(b.sizes.conversations)]
    cold = [b.ask(llm, ids, 2) for ids in prompts]
    llm.tier.store.settle()
    return cold,[b.ask(llm, ids, 2) for ids in prompts]

def again_and_again(b, parts):
    "The two that ask an engine which keeps prefixes, and whose it is"
    tree = b.load()
    out = dict(model=b.sizes.model, machine=tree.device.describe().split(', memory')[0])
    if 'long' in parts:
        out['long'] = again(b, tree)
    if 'turns' in parts:
        whole = b.load(enable_prefix_caching=False)
        out['turns'] = turns(b, tree, whole)
        b.close(whole)
    b.close(tree)
    return out

PARTS = 'long','turns','mixed','spill'

def measured(b, folder, parts):
    out = again_and_again(b, parts)
    if 'mixed' in parts:
        out['mixed'] = [row for policy in ('fifo','slai') for row in mixed(b, policy)]
    if 'spill' in parts:
        out['spill'] = [spill(b, where) for where in (None,folder)]
    return out

def shown(row):
    "A line about a row of numbers: its lists by their lengths"
    return ', '.join(f'{k} {len(v) if isinstance(v, list) else v}' for k,v in row.items())

def rows_of(out):
    "What is shown of all that was measured"
    for part in PARTS:
        found = out.get(part, [])
        yield from [found] if part=='long' and found else found[-1:] if part=='turns' else found

def kept_of(path):
    "What an output already says"
    return json.loads(path.read_text()) if path.exists() else {}

if __name__=='__main__':
    a = arguments(__doc__, folder=dict(help='where the file lies; else a temporary folder'),
        only=dict(default=','.join(PARTS), help='parts, with commas between them'),
        output=dict(help='a file for the numbers'))
    b = Bench(a.emulator)
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        out = measured(b, folder, a.only.split(','))
    out = json.loads(json.dumps(out), parse_float=lambda x: float(f'{float(x):.5g}'))
    for row in rows_of(out):
        print(shown(row))
    if a.output:
        out = kept_of(Path(a.output))|out
        Path(a.output).write_text(json.dumps(out, indent=1)+'\n')
    sizes = [f'{len(out[k])} {k}' for k in PARTS[1:] if k in out]
    verdict(b.bad, ', '.join(sizes))
