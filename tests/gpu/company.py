"""The same greedy tokens, and log probabilities to the bit, from a sequence alone and among up to
seven others, whoever they are and whenever they come; with --most 128 also among so many.

python tests/gpu/company.py [--emulator] [--models llama,gemma] [--tokens 40] [--most 128]
python tests/gpu/company.py --models qwen3.6-35b-a3b --tokens 32"""
import subprocess,sys
from toys import TOYS,arguments,greedy,prompt,serve,toy,verdict

def one(name, emulator, tokens, most=8):
    "All sizes of batch for one model"
    llm = toy(name, emulator, most)
    e,V = llm.engine,llm.config.vocab_size
    asks = [
        greedy(
            f'r{i}',
            prompt(5+23*i%190 if not emulator else 5+7*i, V, i),
            tokens-i%4,
            **(dict(logprobs=1) if i%2 else {}))
        for i in range(most)]  # of every other one the log probabilities, too
    alone = {
        r.id: serve(e, [(r,0)])[r.id]
        for r in asks}
    bad = []
    seen = len({t for x in alone.values() for t in x})
    if seen<tokens:
        bad.append(
            f'{name}: only {seen} different tokens and log probabilities in {most} answers, '
            'which shows little')
    wide = [
        n for n in (16,24,33,64,100,128,200,256)
        if n<=most]
    for n in (2, 5, 8) if emulator else (*range(2, 9), *wide):
        for late in (3,) if emulator else (0, 3, 7):
            first = (n*late)%8
            batch = [asks[(first+i)%most] for i in range(n)]
            if n>8:
                late = late and 1
            got = serve(e, [(r, late*i) for i,r in enumerate(batch)])
            for r in batch:
                off = sum(a!=b for a,b in zip(got[r.id], alone[r.id]))
                if got[r.id]!=alone[r.id]:
                    bad.append(
                        f'{name}: {r.id} among {n}, {late} steps apart: '
                        f'{off} of {len(alone[r.id])} differ')
    total = sum(map(len, alone.values()))
    compiled = llm.engine.stats()['jit_after_ready_total']
    print(
        f'{name}: {len(bad)} differ; {seen} different ones in {total} tokens, '
        f'{compiled} kernels late', flush=True)
    return bad

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
