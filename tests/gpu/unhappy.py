"""What cannot be is refused with a typed error that says what was found and what to do, the host
still works, and a card that was asked for too much goes on.

python tests/gpu/unhappy.py [--emulator]"""
import os,shutil,subprocess,sys,tempfile
from pathlib import Path
from toys import arguments,greedy,prompt,serve,toy,verdict
from atlas.ground.core import AtlasError,DeviceError,OutOfMemoryError,kernel_dir

def refused(what, f, kind, *words):
    "A complaint unless `f()` raises a `kind` that says `words` and gives a hint"
    try:
        f()
    except kind as e:
        said = str(e)
        print(f'{what}: {type(e).__name__}: {said}', flush=True)
        return (
            [f'{what}: {w!r} is not said' for w in words if w.lower() not in said.lower()]
            +([] if e.hint else [f'{what}: no hint']))
    except Exception as e:
        return [f'{what}: {type(e).__name__} {e} and not {kind.__name__}']
    return [f'{what} was not refused']

def no_card():
    "In a process that sees no card: the device is refused, 'auto' takes the host, and it answers"
    code = '''
from atlas.ground.core import DeviceError
from atlas.use.llm import LLM
from atlas.ground.config import PRESETS
PRESETS['toy'] = PRESETS['smollm2-135m']|dict(
    hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    head_dim=32, intermediate_size=64, vocab_size=256)
try:
    LLM('toy', 'cuda', 64, 1, load_format='dummy')
    raise SystemExit('a card that is not there was used')
except DeviceError as e:
    assert e.hint, e
    print('no card:', e)
o = LLM('toy', 'auto', 64, 1, load_format='dummy').generate([5,6,7], None)
assert o.token_ids
'''
    r = subprocess.run(
        [sys.executable, '-c', code],
        env=os.environ|dict(CUDA_VISIBLE_DEVICES='', PYTHONPATH=os.pathsep.join(sys.path)),
        capture_output=True, text=True)
    print(r.stdout, end='')
    return [f'no card: {r.stdout[-300:]}{r.stderr[-600:]}']*bool(r.returncode)

def bad_kernel(card):
    "A kernel that does not compile, and one whose arguments are wrong"
    from atlas.card.card import run
    from atlas.card.launch import Source
    with tempfile.TemporaryDirectory() as d:
        body = 'extern "C" __global__ void broken(float* y) { y[0] = nothing; }\n'
        Path(d, 'broken.cu').write_text('// y : [n] f32\n'+body)
        shutil.copytree(kernel_dir()/'emulator', Path(d)/'emulator')
        bad = refused(
            'a kernel that does not compile', lambda: card.load(Source('broken', d)), DeviceError,
            'broken', 'compile', 'nothing')
    x = card.zeros((2,256))
    try:
        run(
            'rmsnorm', 2, 256, x, card.zeros((255,)), 1e-5,
            x, 256, pdl=False)
        bad.append('a short array was not refused')
    except AtlasError as e:
        print(f'a short array: {type(e).__name__}: {e}')
    return bad

def no_numbers(llm):
    """One row's cache is spoiled: that row fails with a typed error and is counted, its neighbour
    goes on"""
    e,V = llm.engine,llm.config.vocab_size
    e.add(greedy('spoiled', prompt(70, V, 1), 30))
    e.add(greedy('whole', prompt(80, V, 2), 30))
    for _ in range(6):
        e.step()
    e.land()
    spoil(e, 'spoiled')
    ends = {}
    while e.has_work:
        ends |= {ev.id: ev for ev in e.step() if ev.finish}
    how = {k: (ev.finish,ev.code,ev.error) for k,ev in ends.items()}
    print('no numbers:', how)
    counted = e.stats()['corrupted_requests_total']
    good = (
        ends.keys()=={'spoiled','whole'}
        and ends['spoiled'].finish=='error'
        and ends['spoiled'].code
        and ends['whole'].finish=='length'
        and counted==1)
    return [] if good else [f'no numbers: {how}, {counted} counted']

def spoil(e, rid):
    "Put NaN into the first block of a sequence"
    victim = next(s for s in e.scheduler.running if s.id==rid)
    pool = next(iter(e.cache.kv.values())).arrays[0]
    first = victim.table.blocks[0]
    with e.stepper.here():
        pool[first] = 0x7FC0
    e.stepper.card.synchronize()

def too_little(llm, emulator):
    "Caches and arrays that do not fit, and the engine afterwards"
    bad = refused(
        'a cache of a page', lambda: toy('llama', emulator, 8, 512, kv_cache_memory=4096),
        AtlasError, 'memory')
    # a bound alone is never an error: so many whole contexts are 128 GiB, on the emulator 16
    many = 1<<14 if emulator else 1<<13
    bad += refused(
        'a cache of a terabyte', lambda: toy('llama', emulator, many, 4096, kv_cache_memory=1<<42),
        OutOfMemoryError, 'The cache was to have', 'iB')
    if not emulator:
        bad += beyond_the_card(llm.device)
    ids = prompt(9, llm.config.vocab_size, 3)
    got = serve(llm.engine, [(greedy('after', ids, 5), 0)])
    if len(got['after'])!=5:
        bad.append('the engine does not go on')
    return bad

def beyond_the_card(card):
    "What no card has room for"
    from atlas.use.llm import LLM
    def cache():
        return LLM(
            'qwen3.6-35b-a3b', 'cuda', 1<<18, 64, load_format='dummy', weights='nvfp4',
            kv_cache_memory=1<<42)
    def weights():
        return LLM('gpt-oss-120b', 'cuda', 4096, 8, load_format='dummy', weights='bf16')
    def array():
        return card.zeros((1<<40,))
    bad = refused(
        'a cache beyond the card', cache, OutOfMemoryError, 'The cache was to have', 'iB')
    bad += refused('weights beyond the card', weights, OutOfMemoryError, 'iB')
    return bad+refused('an array beyond the card', array, OutOfMemoryError)

def main():
    a = arguments(__doc__)
    llm = toy('llama', a.emulator, 2, 256)
    verdict(
        no_card()+bad_kernel(llm.device)+too_little(llm, a.emulator)+no_numbers(llm),
        'typed errors, and work goes on')

if __name__=='__main__':
    main()
