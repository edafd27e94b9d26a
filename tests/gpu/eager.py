"""A step replayed as a graph gives the bits that its kernels give when they are launched one by
one: logits and tokens, for batches of 1, 3 and 8.

python tests/gpu/eager.py [--emulator] [--models llama,gemma]"""
import subprocess,sys
import numpy as np
from toys import arguments,greedy,prompt,toy,verdict

def watch(e, eager):
    "Have `e` keep the logits of its steps; with `eager` without graphs"
    kept,s = {},e.stepper
    logits = s._step_logits
    def keeping(x, shape, made):
        y = logits(x, shape, made)
        kept[shape] = getattr(y, 'keys', y)  # of each block of the head, where that is enough
        return y
    if eager:
        s.replay = s.body
    s.graphs.clear()
    s._step_logits = keeping
    return kept

def serve(e, kept):
    "Logits of each decode step, which are left in `kept`, and all tokens of its sequences"
    s = e.stepper
    logits,tokens = [],{}
    while e.has_work:
        s.last = None
        for ev in e.step():
            tokens.setdefault(ev.id, []).append(ev.token)
        s.card.synchronize()
        if s.last:
            now = s.card.download(kept[s.last])
            logits.append(np.array(now))
    return logits,tokens

def run(llm, n, steps, eager):
    "Logits of each decode step and all tokens of `n` sequences"
    e,V = llm.engine,llm.config.vocab_size
    kept = watch(e, eager)
    for i in range(n):
        e.add(greedy(f'r{i}', prompt(9+31*i, V, i), steps+i))
    found = serve(e, kept)
    s = e.stepper
    for name in ('_step_logits','replay'):
        vars(s).pop(name, None)
    s.graphs.clear()
    return found

def apart(llm, n, steps):
    "What differs between `n` sequences in steps launched one by one, and in graphs"
    a,tokens = run(llm, n, steps, True)
    b,again = run(llm, n, steps, False)
    off = [i for i,(x,y) in enumerate(zip(a, b)) if x.tobytes()!=y.tobytes()]
    if tokens!=again or len(a)!=len(b) or off:
        told = 'equal' if tokens==again else 'differ'
        yield f', {n} rows: tokens {told}, steps that differ: {off[:5]}'
    if not sum(x.size for x in a) or not np.isfinite(a[0][:n]).all():
        yield ': logits that are no numbers'

def one(name, emulator):
    "Both ways for one model"
    llm,bad = toy(name, emulator),[]
    steps = 5 if emulator else 40
    for n in (1,3) if emulator else (1,3,8):
        bad += [name+b for b in apart(llm, n, steps)]
    print(f'{name}: {"equal" if not bad else bad}', flush=True)
    return bad

if __name__=='__main__':
    a = arguments(__doc__, models=dict(default=''), inner=dict(action='store_true'))
    usual = 'llama,qwen3.6-moe' if a.emulator else 'smollm,qwen3.6-moe,gpt-oss,gemma,nemotron'
    names = (a.models or usual).split(',')
    if len(names)==1 or a.inner or a.emulator:
        verdict(
            [b for n in names for b in one(n, a.emulator)], 'a replayed step is the launched step')
    ps = [subprocess.Popen([sys.executable, __file__, '--inner', '--models', n]) for n in names]
    verdict(
        [n for n,p in zip(names, ps) if p.wait()],
        f'{len(names)} models: a replayed step is the launched step')
