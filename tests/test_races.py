"""Kernels of a step overlap on a card: one may start before the ones before it have written what
they write. Here each does, as early as it may: what it could read too early is 0xFF until it
has waited. Which kernels may still run follows from who lets the next one in before its own
wait (lib/pdl.cuh)."""
import ctypes,re,shutil
import numpy as np,pytest
from types import SimpleNamespace
import atlas.card.card as card,atlas.card.launch
from atlas.card.graph import Graph
from atlas.ground.core import kernel_dir
from atlas.card.emulator import Emulator,find_cxx
from atlas.cuda import delta
from atlas.cuda.gemv import rmsnorm
from atlas.cuda.gemv_wide import Prepared,best_logits,gemv_wide
from atlas.cuda.pack import pack
from atlas.cuda.sample import SampleTable,sample_rows
from atlas.ground.formats import QTensor
from test_card import SamplingParams,Request,engine,ids_of,models,serve

pytestmark = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')

class Region(ctypes.Structure):
    _fields_ = [('at',ctypes.c_void_p), ('mask',ctypes.c_void_p), ('n',ctypes.c_size_t)]

def span(a):
    "Bytes from the first of an array to its last"
    if not a.size:
        return 0
    return sum((n-1)*s for n,s in zip(a.shape, a.strides))+a.itemsize

def flat(a):
    "These bytes"
    there = (ctypes.c_char*span(a)).from_address(a.ctypes.data)
    return np.frombuffer(there, np.uint8)

SIGNATURE = r'__global__\s+void\s+(?:__launch_bounds__\([^)]*\)\s*|BOUNDS\s+)?%s\s*\(([^)]*)\)'

def written(src, args):
    "Those of `args` that the kernel of `src` may write to"
    params = re.search(SIGNATURE % src.name, src.text)[1].split(',')
    assert len(params)==len(args)
    def may(p): return '*' in p and not p.strip().startswith('const')
    return [a for a,p in zip(args, params) if may(p) and a is not None]

class Overlap:
    "What kernels may still be writing when the next one starts"
    def __init__(self):
        self.on,self.names,self.hidden = True,set(),0
        self.wait()
        self.alive = [] # The arrays it is in: what `show` writes to must not be freed

    def wait(self):
        "All is written"
        self.open = [] # What may not have been written: (address, bytes that change)

    def hide(self, kernel):
        "Have `kernel` see 0xFF where it does not wait"
        regions = [Region(at, m.ctypes.data, len(m)) for at,m in self.open]
        self.watched = (Region*max(1, len(regions)))(*regions) # the library reads it later
        kernel.k.library.watch(self.watched, len(regions))
        if self.open:
            self.names.add(kernel.src.name)
            self.hidden += sum(len(m) for _,m in self.open)

    def early(self, launch):
        "`launch`, before kernels before it have written"
        def f(kernel, grid, block, args, shared, pdl):
            emulator = card._emulator()
            plain,emulator.plain = getattr(emulator, 'plain', False),False
            if plain or not pdl or not self.on:
                self.open,self.alive = [],[]
            outs = written(kernel.src, args)
            was = [flat(a).copy() for a in outs]
            self.hide(kernel)
            launch(kernel, grid, block, args, shared, pdl)
            self.wrote(kernel, outs, was)
        return f

    def after_all(self, f):
        "`f`, which as all that the host puts into the queue waits for what is before it"
        def g(*a, **kw):
            self.wait()
            r = f(*a, **kw)
            self.wait()
            return r
        return g

    def wrote(self, kernel, outs, was):
        "`kernel` has run, and `outs` were `was` before"
        said = kernel.k.library.said()
        triggered,before = said&1,said&2
        own = []
        for a,b in zip(outs, was):
            changed = flat(a)!=b
            if changed.any():
                own.append((a.ctypes.data, np.where(changed, 255, 0).astype(np.uint8)))
        self.open = (own+(self.open if before else [])) if triggered else []
        self.alive = (outs+(self.alive if before else [])) if triggered else []

@pytest.fixture
def overlap(tmp_path, monkeypatch):
    """Kernels start early from here on; an object whose `on` says so, with the names of kernels
    that did and the bytes that were hidden from them"""
    o,root,put = Overlap(),tmp_path/'kernels',monkeypatch.setattr
    shutil.copytree(kernel_dir(), root)
    put(atlas.card.launch, 'kernel_dir', lambda: root)
    put(card, '_variants', {})
    put(card, '_kernels', {})
    put(card._Ready, '__call__', o.early(card._Ready.__call__))
    for kind,name in [(Emulator,'write'), (Emulator,'upload'), (Graph,'__call__')]:
        put(kind, name, o.after_all(getattr(kind, name)))
    return o

@pytest.mark.parametrize('toy,weights,kernels', [
    ('llama','bf16','gemv attn_decode attn_merge'),
    ('qwen3.6-moe','nvfp4','delta_step router experts'),
    ('qwen3.6-moe','nvfp4','delta_wide'),
    ('gemma','nvfp4','norm_add'),
    ('nemotron','nvfp4','mamba_step')])
def test_nothing_is_read_before_it_is_written(toy, weights, kernels, overlap, monkeypatch):
    if 'delta_wide' in kernels:
        monkeypatch.setattr(delta, '_WIDE', 1)
    _,m = models(toy, weights)
    n = 70 if toy=='llama' else 6
    got = answers(m, n)
    assert {*kernels.split(), 'sample_scan'}<=overlap.names and overlap.hidden>10_000
    overlap.on = False
    assert got==answers(m, n)

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
DRAWN = SamplingParams(
    temperature=.9, top_k=20, seed=3, max_tokens=3, ignore_eos=True, logprobs=2)

def answers(m, n):
    "Tokens and their chances of a greedy request, and of one that comes later and is drawn"
    a = Request('a', tuple(ids_of(n)), GREEDY)
    b = Request('b', tuple(ids_of(20, 1)), DRAWN)
    got = serve(engine(m, seqs=2), [(a,0),(b,2)])
    return [(got[i].tokens,got[i].logprobs) for i in 'ab']

def chain(rng):
    "A norm and two products of many rows, each of what the one before has made"
    card = Emulator()
    def up(*shape): return card.upload(rng.standard_normal(shape, dtype='f4'))
    def matrix(n, k):
        return pack(QTensor.encode(rng.standard_normal((n,k), dtype='f4'), 'NVFP4'), card)
    x = up(17,256)
    gain = up(256)
    first = matrix(64, 256)
    back = matrix(256, 64)
    y = rmsnorm(x, gain, 1e-6)
    h = gemv_wide(y, first, gain=gain, eps=1e-6)
    return card.download(gemv_wide(h, back, add=y))

def test_products_of_many_rows_wait(overlap):
    got = chain(np.random.default_rng(0))
    assert {'gemv_halves','gemv_wide'}<=overlap.names and overlap.hidden>10_000
    overlap.on = False
    want = chain(np.random.default_rng(0))
    assert (got==want).all()

def said(rng):
    "Tokens of many rows, of a head that leaves the best of each of its blocks"
    card = Emulator()
    def up(*shape): return card.upload(rng.standard_normal(shape, dtype='f4'))
    head = pack(QTensor.encode(rng.standard_normal((300,256), dtype='f4'), 'NVFP4'), card)
    x = rmsnorm(up(17,256), up(256), 1e-6)
    gain = up(256)
    ids = card.zeros(17, 'int32')
    best = best_logits(x, head, gain=gain, eps=1e-6)
    sample_rows(best, SampleTable(card, 17, 300), ids, greedy=True)
    return card.download(ids)

def test_the_best_of_a_head_waits(overlap):
    got = said(np.random.default_rng(0))
    assert {'gemv_wide','greedy'}<=overlap.names and overlap.hidden>1000
    overlap.on = False
    assert (got==said(np.random.default_rng(0))).all()

def a_row_each(card, seqs):
    "What a delta net reads of a step in which so many sequences have a row"
    def ids(a): return card.upload(np.asarray(a, 'i4'))
    n = np.arange(seqs)
    return SimpleNamespace(first=ids(range(seqs+1)), starts=ids([9]*seqs), state_in=ids(2*n),
        state_out=ids(2*n+1), num_seqs=seqs)

def left(rng, seqs=8, vh=2):
    "A product, a delta net that leaves its rows as tiles for the next one, and that"
    card = Emulator()
    def normal(*shape): return rng.standard_normal(shape, dtype='f4')
    def up(*shape): return card.upload(normal(*shape))
    def matrix(n, k): return pack(QTensor.encode(normal(n, k), 'NVFP4'), card)
    C = 256+128*vh
    states = delta.as_records(normal(seqs, vh, 128, 128))
    pools = up(2*seqs,3,C),card.upload(states)
    b = a_row_each(card, seqs)
    x = up(seqs,64)
    into = matrix(C+130*vh, 64)
    out = matrix(64, 128*vh)
    net = up(C,4),-abs(up(vh)),up(vh),up(128)
    y = gemv_wide(x, into)
    made = delta.delta_step(y, *net, *pools, b, 1, then=out, eps=1e-6)
    assert isinstance(made, Prepared)
    return card.download(gemv_wide(made, out))

def test_rows_left_as_tiles_wait(overlap):
    got = left(np.random.default_rng(0))
    assert {'delta_wide','gemv_wide'}<=overlap.names and overlap.hidden>10_000
    overlap.on = False
    assert (got==left(np.random.default_rng(0))).all()

def test_a_kernel_that_forgets_to_wait_is_seen(overlap, tmp_path):
    m,p = models('llama', 'bf16')[1],tmp_path/'kernels'/'gemv.cu'
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=1)
    ask = [(Request('a', tuple(ids_of(5)), params),0)]
    s = p.read_text()
    assert s.count('pdl_wait();')==1
    p.write_text(s.replace('pdl_wait();', ''))
    bad = serve(engine(m), ask)['a']
    overlap.on = False
    assert bad.logprobs!=serve(engine(m), ask)['a'].logprobs
