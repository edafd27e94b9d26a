"""NVIDIA's memory checker over every kernel: `atlas check`, and a prompt and steps of two small
models, each allocation of the card by itself.

python tests/gpu/sanitize.py [--emulator] [--tool memcheck] [--part check|engine] with
--emulator without the checker: the emulator checks bounds and alignment itself"""
import os,re,shutil,subprocess,sys
from toys import arguments,greedy,prompt,serve,toy,verdict

def find():
    "The checker, which comes with the toolkit"
    usual = [
        f'{os.environ.get("CUDA_HOME","/usr/local/cuda")}/{d}/compute-sanitizer'
        for d in ('bin','compute-sanitizer')]
    return (
        shutil.which('compute-sanitizer')
        or next((p for p in usual if os.path.exists(p)), None))

def check(emulator):
    from atlas.use.check import check
    from atlas.card.device import Cuda
    from atlas.card.emulator import Emulator
    if emulator:  # all of them are run by their page
        import atlas.use.check as c
        c._cases[:] = c._cases[::12]
    r = check(Emulator() if emulator else Cuda())
    print(f'check: {len(r)} cases, {r.failures} failed', flush=True)
    return [f'{x.kernel} {x.variant}: {x.verdict}' for x in r.failed]

def engine(emulator):
    bad = []
    for name in ('qwen3.6-moe',) if emulator else ('qwen3.6-moe','gpt-oss','gemma','nemotron'):
        llm = toy(name, emulator, 2, 256)
        V = llm.config.vocab_size
        got = serve(
            llm.engine,
            [
                (greedy('a', prompt(70 if not emulator else 20, V, 1), 4), 0),
                (
                    greedy('b', prompt(9, V, 2), 4, temperature=.7, top_k=20, seed=1),
                    1)])
        print(f'{name}: {got}', flush=True)
        bad += [f'{name} said too little'] if sum(map(len, got.values()))!=8 else []
    return bad

def inside(a):
    "What is run under the checker"
    if not a.emulator:
        import cupy as cp
        cp.cuda.set_allocator(None)  # no pool: an access beside an array hits nobody else's
    bad = [
        b for k,f in dict(check=check, engine=engine).items()
        if a.part in ('',k) for b in f(a.emulator)]
    verdict(bad, 'inside')

def main():
    a = arguments(
        __doc__, tool=dict(default='memcheck'), part=dict(default=''),
        inside=dict(action='store_true'),
        limit=dict(type=float, default=300.))
    if a.inside or a.emulator:
        return inside(a)
    if not (tool := find()):
        print('there is no compute-sanitizer on this machine; it comes with the CUDA toolkit')
        sys.exit(3)
    cmd = [
        tool, '--tool', a.tool, '--print-limit', '20', '--target-processes', 'all', sys.executable,
        __file__, '--inside', '--part', a.part]
    r = subprocess.run(cmd, capture_output=True, text=True, timeout=a.limit)
    print('\n'.join((r.stdout+r.stderr).splitlines()[-40:]))
    found = [int(n) for n in re.findall(r'ERROR SUMMARY: (\d+) error', r.stdout+r.stderr)]
    verdict(
        [f'{sum(found)} errors']*bool(sum(found))+['it did not run to its end']*(
            r.returncode!=0 or not found),
        f'{a.tool}: {sum(found)} errors')

if __name__=='__main__':
    main()
