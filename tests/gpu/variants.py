"""The decode kernels by their -D options: each function below gives one variant as a callable, which knows its grid and takes the kernel's arguments.

A variant is compiled on `build()`, all that were asked for at once, by nvcc for the card that is there (sm_90a for compute capability 9.0, sm_121a for
12.1, ...), and kept in `$ATLAS_HOME/gpu` (default `~/.cache/atlas/gpu`) under a name made of source, options and architecture. The split of work over
warps is what measured best on an H200; what lost is in kernels/README.md. Prints the variants that spill registers or do not compile.
"""
import hashlib,os,re,shutil,subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import cupy as cp
from launch import launch,load

kernels = Path(__file__).parents[2]/'kernels'
cache = Path(os.environ.get('ATLAS_HOME') or Path(os.environ.get('XDG_CACHE_HOME') or Path.home()/'.cache')/'atlas')/'gpu'
EPS = 1e-6

def card_arch():
    "`sm_90a` and the like: with the suffix that unlocks what only that generation has"
    c = cp.cuda.Device().compute_capability
    return f'sm_{c}a' if int(c)>=90 else f'sm_{c}'

class Variant:
    "A kernel with its options: compiled and loaded by `build`, then called as `v(grid, block, *arguments)`"
    known,pdl = {},True  # pdl: class-wide switch, for the bench to show what it brings
    def __new__(cls, name, **options):
        key = name,tuple(sorted(options.items()))
        if key not in cls.known:
            self = cls.known[key] = super().__new__(cls)
            self.name,self.defines,self.function = name,[f'-D{k}={v}' for k,v in key[1]],None
        return cls.known[key]
    def __call__(self, grid, block, *args):
        if not self.function: build()
        launch(self.function, grid, block, args, self.pdl)
    def __repr__(self): return ' '.join([self.name, *self.defines])

def compile_variant(v, arch):
    "Path of the cubin, and what is worth saying about it"
    sources = b''.join(p.read_bytes() for p in [kernels/f'{v.name}.cu', *sorted((kernels/'lib').glob('*.cuh'))])
    out = cache/f'{v.name}-{hashlib.sha256(repr((v, arch, sources)).encode()).hexdigest()[:16]}.cubin'
    if out.exists(): return out,''
    nvcc = shutil.which('nvcc') or str(Path(os.environ.get('CUDA_HOME') or '/usr/local/cuda')/'bin'/'nvcc')
    part = out.with_suffix(f'.{os.getpid()}')
    r = subprocess.run([nvcc, '-cubin', '-std=c++17', f'-gencode=arch={arch.replace("sm", "compute")},code={arch}', '-Xptxas', '-v', f'-I{kernels}', *v.defines,
        kernels/f'{v.name}.cu', '-o', part], capture_output=True, text=True)
    if r.returncode: raise RuntimeError(f'{v} does not compile:\n{r.stderr}')
    part.rename(out)
    spilled = re.search(r'([1-9]\d*) bytes spill stores', r.stderr)
    return out,f'{v}: {spilled[0]}' if spilled else ''

def build():
    "Compile and load every variant that was asked for and is not loaded"
    todo,arch = [v for v in Variant.known.values() if not v.function],card_arch()
    cache.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as ex:
        for v,(path,said) in zip(todo, ex.map(lambda v: compile_variant(v, arch), todo)):
            v.function = load(path, v.name)
            if said: print(said, flush=True)

def ceil_div(a, b): return -(-a//b)

def gemv(k, rows, form=0, warps=8, share=1, extra=0):
    "form: the kernel's IN, 0 plain, 1 norm, 2 head norm; `share` warps have a row of W between them"
    v = Variant('gemv', K=k, ROWS=rows, IN=form, W=warps, KW=share, EXTRA=extra)
    def call(w, s, gs, other, x, gain, parts, add, y, n, m=0):
        v((ceil_div(n, 4*warps//share)+ceil_div(m, warps),), 32*warps, w, s, gs, other, x, gain, parts, EPS, add, y, n, m)
    return call

def router(rows, k=2048):
    v = Variant('router', K=k, ROWS=rows)
    return lambda w, gain, x, logits, n: v((ceil_div(n, 2),), 64, w, None, gain, x, EPS, logits, n)

def experts_up(warps=8, i=512, picks=9):
    v = Variant('experts_up', W=warps)
    return lambda w, s, gs, logits, gain, x, h: v((i//(2*warps), picks, len(x)), 32*warps, w, s, gs, logits, None, gain, x, EPS, h, logits.shape[1])

def experts_down(groups=2, picks=9):
    v = Variant('experts_down', M=groups)
    def call(w, s, gs, logits, h, add, y):
        rows,n = y.shape
        v((ceil_div(n, 8*groups), rows), 32*picks, w, s, gs, logits, None, h, add, y, 1., n, logits.shape[1])
    return call

def delta_step(kh=16, vh=32):
    v = Variant('delta_step')
    def call(x, conv_w, decay, bias, norm, conv, rec, first, starts, state_in, state_out, y, parts):
        v((4*vh, len(starts)), 256, x, conv_w, decay, bias, norm, conv, rec, first, starts, state_in, state_out, y, parts, kh, vh, (2*kh+vh)*128)
    return call

def attn_decode(window=0, d=256):
    v = Variant('attn_decode')
    def call(qkv, qn, kn, cos, sin, k_pool, v_pool, tables, seq, pos, o, ml):
        block,most = k_pool.shape[1],tables.shape[1]
        v((o.shape[1], k_pool.shape[2], len(pos)), 256, qkv, qn, kn, cos, sin, k_pool, v_pool, tables, seq, pos, o, ml, EPS, d**-.5, window, block, most)
    return call

def attn_merge(window=0, d=256):
    v = Variant('attn_merge')
    return lambda o, ml, qkv, sinks, pos, y: v((d//32, o.shape[2], len(pos)), 256, o, ml, qkv, sinks, pos, y, window, o.shape[1], qkv.shape[1])

def argmax():
    v = Variant('argmax')
    return lambda logits, best, count, ids: v((64, len(logits)), 256, logits, best, count, ids, logits.shape[1])

def embed():
    v = Variant('embed')
    return lambda ids, w, x, scale=1.: v((ceil_div(w.shape[1], 1024), len(ids)), 128, ids, w, x, scale, w.shape[1], len(w))
