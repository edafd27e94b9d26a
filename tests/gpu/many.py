"""What many sequences and long prompts cost an engine: its start by the number of sequences, steps
with a chunk of a prompt beside answers, prompts by the size of chunks, and memory for each.

python tests/gpu/many.py [--emulator] [--part start|beside|waits|between|chunks|all] [--long
131072]
[--seqs 8,128] [--chunks 2048,8192]

Numbers are shown, not judged."""
from time import perf_counter
from types import SimpleNamespace as NS
import numpy as np
from atlas.use.bench_decode import _blank,measure,pretend
from toys import arguments,greedy,prompt,ready_for,toy,verdict

CARD = NS(
    model='qwen3.6-35b-a3b', seqs=(8,32,128), context=512,
    chunk=2048, vocab=200_000,
    chunks=(2048,4096,8192), prompts=(512,2048,8192,32768), behind=400)
TINY = NS(model='qwen3.6-moe', seqs=(2,4), context=256, chunk=64, vocab=256,
    chunks=(64,128), prompts=(100,200), behind=16)

def say(*what):
    print(*what, flush=True)

def gb(n): return f'{n/1e9:.2f} GB'

def free(llm):
    "Bytes that are free on the device, once what is kept for arrays to come is given back"
    llm.device.synchronize()
    llm.device.tidy()
    return llm.device.memory().available

def start(s, emulator):
    "Seconds of a start by the number of sequences, and what their states take"
    for n in s.seqs:
        began = perf_counter()
        llm = toy(s.model, emulator, n, s.context, show=False)
        took,cache = perf_counter()-began,llm.cache
        began = perf_counter()
        llm.engine.warm()
        again = perf_counter()-began
        states = sum(a.nbytes for p in (cache.conv,cache.rec) for a in p.values())
        say(f'{n:4} sequences: {took:6.2f} s, warm again {again:5.2f} s; '
            f'{cache.num_states} states {gb(states)}, all of the cache {gb(cache.nbytes)}')
        llm.close()

def timed(llm, steps=1):
    "Milliseconds of a step, in the middle"
    out = []
    for _ in range(steps):
        llm.device.synchronize()
        began = perf_counter()
        llm.engine.step()
        llm.engine.land()
        llm.device.synchronize()
        out.append((perf_counter()-began)*1e3)
    return np.median(out)

def clear(llm):
    for rid in list(llm.engine.scheduler.seqs):
        llm.engine.abort(rid)
    while llm.engine.has_work:
        llm.engine.step()
    llm.engine.land()

def chunk(llm, s, n, runs=4):
    "Milliseconds of the steps of prompts of `n` tokens, beside whoever decodes; the first is slow"
    out,e = [],llm.engine
    for i in range(runs):
        rid = f'p{n}-{i}'
        e.add(greedy(rid, prompt(n, s.vocab, i), 2))
        took = 0.
        while rid in e.scheduler.seqs and not e.scheduler.seqs[rid].outputs:
            took += timed(llm)
        e.abort(rid)
        timed(llm)
        out.append(took)
    return min(out[1:])

def beside(s, emulator):
    "A chunk alone, a plain step, and both in one"
    for n in s.seqs[-2:]:
        llm = toy(
            s.model, emulator, n+1, s.behind+s.chunk+512,
            show=False, tbt_deadline_ms=0,
            enable_prefix_caching=False)
        alone = {k: chunk(llm, s, k) for k in (s.chunk//4,s.chunk)}
        pretend(llm, n, s.behind, 300)
        timed(llm, 4)
        plain = timed(llm, 20)
        for k,ms in alone.items():
            both = chunk(llm, s, k)
            say(f'{n} sequences: plain {plain:.2f} ms, chunk of {k} {ms:.2f}, both {both:.2f}: '
                f'{(both-ms)/plain:.2f} plain steps more')
        clear(llm)
        llm.close()

def waits(s):
    "Microseconds of a step, and of a processor's time, by how the host waits for what it says"
    from time import process_time
    from table import steps
    counts = 1,s.seqs[-2]
    with ready_for(steps(counts, 0)):
        llm = toy(s.model, False, max(counts), 2048, show=False)
    e,stream = llm.engine,llm.engine.stepper.stream
    plain = stream.mark
    for n in counts:
        pretend(llm, n, 0, 1900)
        timed(llm, 4)
        for turn in range(3):
            for name,mark in dict(spinning=plain, asleep=lambda: plain(asleep=True)).items():
                stream.mark = mark
                for _ in range(8):
                    e.step()
                began,busy = perf_counter(),process_time()
                for _ in range(200):
                    e.step()
                took,busy = [(t-b)/200*1e6 for t,b in
                    ((perf_counter(),began),(process_time(),busy))]
                say(f'{n} sequences, {name}: {took:.1f} us a step, {busy:.1f} of a core')
        stream.mark = plain
        clear(llm)
    llm.close()

def between(s):
    "Steps of numbers of sequences between two graphs: rows that nobody has are computed, too"
    from table import steps
    counts = 16,17,24,32,33,48,64,65,96,128
    with ready_for(steps([c for c in counts if c&(c-1)==0], 0)):
        llm = toy(s.model, False, max(counts), 2048, show=False)
    _blank(llm)
    for n in counts:
        p = measure(llm, n, 0, 24)
        say(f'{n} sequences: {p.us:.0f} us a step, {p.tokens:.0f} tokens/s')
    llm.close()

def alone(llm, s, n, seed):
    "Seconds to the first token of a prompt of `n` tokens"
    e,rid = llm.engine,f'q{n}-{seed}'
    llm.device.synchronize()
    began = perf_counter()
    e.add(greedy(rid, prompt(n, s.vocab, seed), 1))
    while e.has_work:
        e.step()
    return perf_counter()-began

def chunks(s, emulator, long):
    "Tokens a second by the size of chunks, and the memory that the largest takes"
    most = max(s.prompts[-1], long or 0)
    def passes(stepper):
        sizes = {min(n, max(s.chunks)) for n in (*s.prompts,*s.chunks)}
        for n in sorted(sizes, reverse=True):  # as a start does: the others fit in what it took
            stepper._try_prompt(n)
    with ready_for(passes):
        llm = toy(
            s.model, emulator, 2, most+8, show=False,
            chunk=max(s.chunks),
            enable_prefix_caching=False)
    for k in s.chunks:
        llm.engine.scheduler.chunk,rows = k,[]
        for n in s.prompts:
            took = min(alone(llm, s, n, i) for i in range(4 if n<16384 else 2))
            rows.append(f'{n}: {n/took:,.0f}')
        say(f'chunk {k}: tokens/s {"; ".join(rows)}')
        if not long:
            continue
        before = free(llm)
        took = alone(llm, s, long, 9)
        say(f'  {long} tokens in {took:.2f} s: {long/took:,.0f} tokens/s; '
            f'memory that it took more {gb(before-free(llm))}')
    counted = dict(llm.arena.budget.parts).get('steps', 0)
    say(f'for a step {gb(counted)} were set aside, {gb(llm.arena["steps"].mapped)} taken')
    llm.close()

if __name__=='__main__':
    o = arguments(__doc__, part=dict(default='all'), long=dict(type=int, default=0),
        seqs=dict(default=''), chunks=dict(default=''))
    s = TINY if o.emulator else CARD
    for k in ('seqs','chunks'):
        if given := getattr(o, k):
            setattr(s, k, tuple(map(int, given.split(','))))
    if o.part in ('all','start'):
        start(s, o.emulator)
    if o.part in ('all','beside'):
        beside(s, o.emulator)
    if o.part=='waits':
        waits(s)
    if o.part=='between':
        between(s)
    if o.part in ('all','chunks'):
        chunks(s, o.emulator, o.long)
    verdict([], 'shown')
