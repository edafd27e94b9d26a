"""Ten thousand decode steps with sequences that come and go, greedy and sampled: graphs come with
kinds of steps that were not seen before, and end below what is kept; of ten thousand that bring
none, not a byte of device memory is left, and nothing was compiled.

python tests/gpu/endurance.py [--emulator] [--model qwen3.6-moe] [--steps 10000]"""
import time
from dataclasses import dataclass
import numpy as np
from toys import arguments,greedy,prompt,toy,verdict
from atlas.card.launch import compilations
from atlas.engine.card_stepper import MOST_PROMPT_GRAPHS,MOST_STEP_GRAPHS

ROUNDS = 10 # At most, each of so many steps
HELD = 'the card','pools','in use','of prompts'

def held(s):
    """Bytes that the card has given away, that CuPy's pools have, and those of them in use; then
    what graphs of prompts have"""
    if s.card.kind!='cuda':
        return 0,0,0,0
    cp = s.card.xp
    s.card.synchronize()
    free,total = cp.cuda.runtime.memGetInfo()
    pools = cp.get_default_memory_pool(),s.stream.memory
    taken = sum(p.total_bytes() for p in pools)
    used = sum(p.used_bytes() for p in pools)
    prompts = s.prompts.scratch.memory.total_bytes() if s.prompts else 0
    return total-free,taken,used,prompts

def recorded(s):
    "Graphs of steps, and those of prompts"
    prompts = s.prompts.kept.values() if s.prompts else ()
    return set(s.graphs.values()),{g for g in prompts if g}

KINDS = (
    {},
    dict(temperature=.8, seed=7),
    dict(temperature=.9, top_p=.9, top_k=40, seed=3))

class Traffic:
    "Requests of a round that come at random, and what is said"
    def __init__(self, llm, seed, most, span):
        self.e,self.vocab = llm.engine,llm.config.vocab_size
        self.seed,self.most,self.span = seed,most,span
        self.rng = np.random.default_rng(seed)
        # few, so that their graphs are there in the end
        self.lengths = [1+i*span//18 for i in range(6)]
        self.came = self.steps = self.tokens = 0

    def come(self):
        "One more"
        self.came += 1
        rng = self.rng
        ids = prompt(int(rng.choice(self.lengths)), self.vocab, self.came)
        n = int(rng.integers(2, self.span//2))
        kind = KINDS[int(rng.choice(3, p=[.8,.1,.1]))]
        self.e.add(greedy(f's{self.seed}-{self.came}', ids, n, **kind))

    def serve(self, steps):
        "For at least so many decode steps"
        e = self.e
        while self.steps<steps or e.has_work:
            while self.steps<steps and len(e.scheduler.seqs)<self.most and self.rng.random()<.3:
                self.come()
            for ev in e.step():
                self.tokens += ev.token is not None
                if ev.finish=='error':
                    raise SystemExit(f'{ev.id}: {ev.error}')
            self.steps += e.flying is not None

@dataclass
class Round:
    "What one came to"
    traffic:Traffic
    seconds:float
    before:tuple # Bytes, as `held` says them
    after:tuple
    settled:bool # Were the graphs there from the beginning?
    kept:list # How many graphs of steps and of prompts there are

def one_round(llm, i, steps, most, span)->Round:
    s = llm.engine.stepper
    before,graphs = held(s),recorded(s)
    t = Traffic(llm, i, most, span)
    start = time.perf_counter()
    t.serve(steps)
    seconds = time.perf_counter()-start
    after,now = held(s),recorded(s)
    kept,new = [len(g) for g in now],[len(b-a) for a,b in zip(graphs, now)]
    print(
        f'  round {i+1}: graphs of steps and prompts {kept}, new {new}; '
        f'{after[0]:,} bytes', flush=True)
    return Round(t, seconds, before, after, graphs==now, kept)

def faults(e, r:Round)->list:
    "What is wrong after the last round"
    bad = [
        f'{what}: {x:,} bytes before, {y:,} after'
        for what,x,y in zip(HELD, r.before, r.after) if y!=x]
    if not r.settled:
        bad.append(f'graphs are still recorded after {ROUNDS} rounds')
    limits = MOST_STEP_GRAPHS,MOST_PROMPT_GRAPHS
    for kind,kept,limit in zip(('steps','prompts'), r.kept, limits):
        if kept>limit:
            bad.append(f'{kept} graphs of {kind}, where {limit} are kept')
    if compilations.after_ready:
        bad.append(f'compiled late: {compilations.late}')
    s = e.stepper
    blocks,lanes = e.scheduler.pool.used,len(s.lanes)
    if blocks or lanes or len(s.free)!=s.rows.most+1:
        bad.append(f'{blocks} blocks and {lanes} lanes are still taken')
    return bad

def main():
    a = arguments(__doc__, model=dict(default='qwen3.6-moe'), steps=dict(type=int, default=10_000))
    if a.emulator:
        a.steps = min(a.steps, 30)
    span,most = (100,2) if a.emulator else (400,8)
    llm = toy(a.model, a.emulator, most, span)
    for i in range(ROUNDS):
        r = one_round(llm, i, a.steps, most, span)
        if r.settled:
            break
    t = r.traffic
    done = f'{t.steps:,} decode steps of {a.model}, {t.came} sequences'
    said = f'{t.tokens:,} tokens in {r.seconds:.1f} s'
    taken = f'{r.after[0]:,} bytes taken on the card, {r.after[1]:,} in pools'
    verdict(faults(llm.engine, r), f'{done}, {said}; {taken}')

if __name__=='__main__':
    main()
