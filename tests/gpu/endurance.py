"""Ten thousand decode steps with sequences that come and go, greedy and sampled: graphs come with
kinds of steps that were not seen before, and end below what is kept; of ten thousand that bring
none, not a byte of device memory is left, and nothing was compiled.

python tests/gpu/endurance.py [--emulator] [--model qwen3.6-moe] [--steps 10000]"""
import time
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

def traffic(e, steps, V, seed, most, span):
    "Serve for at least `steps` decode steps; how many there were and what was said"
    rng = np.random.default_rng(seed)
    n = 0
    counted = 0
    spoke = 0
    lengths = [1+i*span//18 for i in range(6)]  # few, so that their graphs are there in the end
    kinds = (
        {},dict(temperature=.8, seed=7),
        dict(temperature=.9, top_p=.9, top_k=40, seed=3))
    while counted<steps or e.has_work:
        while counted<steps and len(e.scheduler.seqs)<most and rng.random()<.3:
            n += 1
            e.add(greedy(
                f's{seed}-{n}', prompt(int(rng.choice(lengths)), V, n),
                int(rng.integers(2, span//2)),
                **kinds[int(rng.choice(3, p=[.8,.1,.1]))]))
        for ev in e.step():
            spoke += ev.token is not None
            if ev.finish=='error':
                raise SystemExit(f'{ev.id}: {ev.error}')
        counted += e.flying is not None
    return counted,n,spoke

def main():
    a = arguments(__doc__, model=dict(default='qwen3.6-moe'), steps=dict(type=int, default=10_000))
    if a.emulator:
        a.steps = min(a.steps, 30)
    span,most = (100,2) if a.emulator else (400,8)
    llm = toy(a.model, a.emulator, most, span)
    e,V = llm.engine,llm.config.vocab_size
    s = e.stepper
    for i in range(ROUNDS):
        before,graphs = held(s),recorded(s)
        start = time.perf_counter()
        steps,n,spoke = traffic(e, a.steps, V, i, most, span)
        t = time.perf_counter()-start
        after,now = held(s),recorded(s)
        new = [len(b-a) for a,b in zip(graphs, now)]
        print(
            f'  round {i+1}: graphs of steps and prompts {[len(g) for g in now]}, new {new}; '
            f'{after[0]:,} bytes', flush=True)
        if graphs==now:
            break
    bad = [
        f'{what}: {x:,} bytes before, {y:,} after' for what,x,y in zip(HELD, before, after) if y!=x]
    if graphs!=now:
        bad.append(f'graphs are still recorded after {ROUNDS} rounds')
    limits = MOST_STEP_GRAPHS,MOST_PROMPT_GRAPHS
    for kind,kept,limit in zip(('steps','prompts'), now, limits):
        if len(kept)>limit:
            bad.append(f'{len(kept)} graphs of {kind}, where {limit} are kept')
    if compilations.after_ready:
        bad.append(f'compiled late: {compilations.late}')
    blocks,lanes = e.scheduler.pool.used,len(s.lanes)
    if blocks or lanes or len(s.free)!=s.rows.most+1:
        bad.append(f'{blocks} blocks and {lanes} lanes are still taken')
    done = f'{steps:,} decode steps of {a.model}, {n} sequences, {spoke:,} tokens in {t:.1f} s'
    taken = f'{after[0]:,} bytes taken on the card, {after[1]:,} in pools'
    verdict(bad, f'{done}; {taken}')

if __name__=='__main__':
    main()
