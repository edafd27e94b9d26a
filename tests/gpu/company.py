"""The same greedy tokens, and log probabilities to the bit, from a sequence alone and among up to
seven others, whoever they are and whenever they come; with --most 128 also among so many.

python tests/gpu/company.py [--emulator] [--models llama,gemma] [--tokens 40] [--most 128]
python tests/gpu/company.py --models qwen3.6-35b-a3b --tokens 32"""
import subprocess,sys
from itertools import product
from toys import TOYS,arguments,greedy,prompt,serve,toy,verdict

def asked(i, vocab, emulator, tokens):
    "A request; of every other one the log probabilities, too"
    n = 5+7*i if emulator else 5+23*i%190
    more = dict(logprobs=1) if i%2 else {}
    return greedy(f'r{i}', prompt(n, vocab, i), tokens-i%4, **more)

def sizes(emulator, most):
    "Pairs of how many come, and how many steps apart"
    if emulator:
        return [(n,3) for n in (2,5,8)]
    wide = [n for n in (16,24,33,64,100,128,200,256) if n<=most]
    return product((*range(2, 9),*wide), (0,3,7))

def among(e, asks, n, late, alone):
    "Which of `n` requests that come `late` steps apart are not answered as alone"
    first = (n*late)%8
    batch = [asks[(first+i)%len(asks)] for i in range(n)]
    if n>8:
        late = late and 1
    got = serve(e, [(r, late*i) for i,r in enumerate(batch)])
    for r in batch:
        mine,want = got[r.id],alone[r.id]
        if mine!=want:
            off = sum(a!=b for a,b in zip(mine, want))
            yield f'{r.id} among {n}, {late} steps apart: {off} of {len(want)} differ'

def one(name, emulator, tokens, most=8):
    "All sizes of batch for one model"
    llm = toy(name, emulator, most)
    e,V = llm.engine,llm.config.vocab_size
    asks = [asked(i, V, emulator, tokens) for i in range(most)]
    alone = {r.id: serve(e, [(r,0)])[r.id] for r in asks}
    said = [t for x in alone.values() for t in x]
    seen = len(set(said))
    bad = []
    if seen<tokens:
        bad.append(
            f'only {seen} different tokens and log probabilities in {most} answers, '
            'which shows little')
    for n,late in sizes(emulator, most):
        bad += among(e, asks, n, late, alone)
    compiled = e.stats()['jit_after_ready_total']
    print(
        f'{name}: {len(bad)} differ; {seen} different ones in {len(said)} tokens, '
        f'{compiled} kernels late', flush=True)
    return [f'{name}: {b}' for b in bad]

if __name__=='__main__':
    a = arguments(
        __doc__, models=dict(default=','.join(TOYS)),
        tokens=dict(type=int, default=40),
        most=dict(type=int, default=8),
        inner=dict(action='store_true'))
    names = a.models.split(',')
    if a.emulator and a.models==','.join(TOYS):
        names,a.tokens = ['llama','qwen3.6-moe'],10
    if len(names)==1 or a.inner or a.emulator:
        verdict(
            [b for n in names for b in one(n, a.emulator, a.tokens, a.most)],
            f'{len(names)} models, batches of 2 to {a.most}')
    ps = [
        subprocess.Popen([
            sys.executable, __file__, '--inner', '--models', n, '--tokens', str(a.tokens),
            '--most', str(a.most)])
        for n in names]  # each compiles for itself, at once
    verdict(
        [n for n,p in zip(names, ps) if p.wait()],
        f'{len(names)} models, batches of 2 to {a.most}')
