"Many rows of a step in one product: every row has the bits that `gemv` gives it"
import numpy as np,pytest
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import NamedTuple
from atlas.card.emulator import Emulator,find_cxx
from atlas.card.card import limits
from atlas.card.launch import recording
from atlas.cuda import gemv as few,gemv_wide as many,vocabulary
from atlas.cuda.pack import CARD_FORMATS,Packed,pack
from atlas.cuda.sample import SampleTable,sample_rows
from atlas.ground.formats import QTensor
from atlas.ops.linear import MAX_ROWS
from atlas.ops.vocabulary import Matrix

pytestmark = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')
card = Emulator() if find_cxx() else None

def normal(rng, *shape): return rng.standard_normal(shape, dtype='f4')

def packed(rng, fmt, n, k, pair=False):
    w = normal(rng, n, k)*np.exp(normal(rng, n, 1))
    return pack(w if fmt=='F32' else QTensor.encode(w, fmt), card, pair=pair, exact=True)

class Case(NamedTuple):
    "A product; neither 16 nor 128 need divide its sizes"
    fmt:str
    rows:int # Of x
    n:int # Rows of weights
    k:int # Columns
    kw:dict # For `options`
    way:tuple = () # (tiles, down, along, deep, held) of `together`
    def weights(self, rng):
        pair = self.kw.get('act') not in (None,'relu2')
        return packed(rng, self.fmt, self.n, self.k, pair)

def norm_of(rng, w, rows, gain, group):
    "A norm by `gain`, or by squares of groups, for `gemv`"
    kw = {}
    if gain:
        kw |= dict(gain=card.upload(normal(rng, w.k)), eps=1e-6)
    if group:
        squares = np.abs(normal(rng, rows, w.k//group, 3))*9+1
        kw |= dict(parts=card.upload(squares), group=group, eps=1e-5)
    return kw

def options(rng, w, rows, extra=0, gain=0, group=0, bias=0, add=0, gate=0, **kw):
    "Arguments for `gemv`, on the card"
    def up(*shape): return card.upload(normal(rng, *shape))
    n = w.n//2 if w.pair else w.n+extra
    kw |= norm_of(rng, w, rows, gain, group)
    if bias:
        kw['bias'] = up(w.rows if w.pair else n)
    if add:
        kw['add'] = up(rows, n)
    if gate:
        kw['gate'] = up(rows, 5),3
    if extra:
        kw['extra'] = packed(rng, 'F32' if w.fmt=='f32' else 'BF16', extra, w.k)
    return kw

def bits(a): return card.download(a).view('u4')

CASES = dict(
    nvfp4=Case('NVFP4', 16, 100, 512, dict(extra=37, gain=1, bias=1, add=1)),
    nvfp4_along=Case('NVFP4', 33, 36, 2816, dict(extra=20, gain=1)),
    nvfp4_pair=Case('NVFP4', 128, 70, 208, dict(act='silu', gain=1)),
    nvfp4_long=Case('NVFP4', 9, 20, 17408, dict(add=1)),
    mxfp4=Case('MXFP4', 17, 18, 2880, dict(act='swiglu_oai', limit=7., bias=1)),
    int4=Case('INT4', 33, 36, 160, dict(extra=5, gain=1, add=1)),
    fp8=Case('FP8_CHANNEL', 16, 20, 1024, dict(group=64, gate=1, add=1)),
    fp8_tiled=Case('FP8_BLOCK', 9, 40, 320, dict(act='relu2', gain=1)),
    bf16=Case('BF16', 16, 24, 2688, dict(extra=1, gain=1, bias=1, cap=30.)),
    f16=Case('F16', 33, 10, 256, dict(act='gelu_tanh', bias=1, gate=1)),
    f32=Case('F32', 10, 12, 96, dict(extra=7, gain=1, bias=1)))

def hard_rows(rng, rows, k, spoilt):
    "Some are large, and one is not finite"
    x = normal(rng, rows, k)
    x[0,:k//3] *= 1e3
    x[1] *= 1e9
    x[spoilt,k//2] = np.nan
    return card.upload(x)

@pytest.mark.parametrize('name,c', CASES.items(), ids=CASES)
def test_rows_have_the_bits_they_have_alone(name, c):
    rng = np.random.default_rng(len(name))
    w = c.weights(rng)
    spoilt = c.rows//2
    x = hard_rows(rng, c.rows, c.k, spoilt)
    kw = options(rng, w, c.rows, **c.kw)
    want = bits(few.gemv(x, w, **kw))
    got = bits(many.gemv_wide(x, w, **kw))
    assert np.isnan(got[spoilt].view('f4')).all()
    got,want = (np.delete(a, spoilt, 0) for a in (got,want))
    np.testing.assert_array_equal(got, want)
    assert np.isfinite(got.view('f4')).all()

@pytest.mark.parametrize('name,c', CASES.items(), ids=CASES)
def test_rows_have_their_bits_on_a_part(name, c, monkeypatch):
    "Whatever the part: it has a way of its own to share out, and shares of a row as on all of it"
    monkeypatch.setattr(Emulator, 'multiprocessors', 132)
    rng = np.random.default_rng(len(name))
    w,x = c.weights(rng),card.upload(normal(rng, c.rows, c.k))
    kw = options(rng, w, c.rows, **c.kw)
    want = bits(few.gemv(x, w, **kw))
    for n in (2,4,46):
        with card.using(n):
            got = bits(many.gemv_wide(x, w, **kw))
        np.testing.assert_array_equal(got, want)

def test_a_part_has_fewer_and_larger_pieces(monkeypatch):
    "Extra rows have blocks behind the others, which are as many as there are multiprocessors"
    monkeypatch.setattr(Emulator, 'multiprocessors', 132)
    rng = np.random.default_rng(0)
    w,extra = packed(rng, 'NVFP4', 4096, 512),packed(rng, 'BF16', 64, 512)
    whole = many._WideProduct(card, w, extra, 1)
    with card.using(4):
        part = many._WideProduct(card, w, extra, 1)
    assert whole.o.blocks+whole.more<=132 and part.o.blocks==4 and part.more>=1
    assert part.split==whole.split and part.o.span>whole.o.span

def tile(tiles, strips, down, along, deep, held, blocks, n, f):
    "A way to share out that nothing would choose"
    span = 4*-(-n//(4*blocks))
    while span>16*strips*down:
        span = -(-span//8)*4
    shared = many._memory(f, tiles, strips, down*along, along, deep, held)
    return many.Tiling(tiles, strips, down, along, deep, held, blocks, span, shared)

def together(tiles, down, along, deep, held, n, f):
    "The same where four warps multiply together"
    span = min(4*-(-n//4), 16*down)
    shared = many._memory(f, tiles, 1, down*along, along, deep, held, True)
    return many.Tiling(tiles, 1, down, along, deep, held, 1, span, shared, True)

def shared_as(monkeypatch, make, warps, along):
    """Tile wide products as `make` says, with `warps`, of which `along` go along a row;
    `gemv` adds in the same order"""
    monkeypatch.setattr(many, 'tiling', lambda *a: make())
    monkeypatch.setattr(many, 'plan', lambda f, n, k, sms: (warps,along,1,n))
    monkeypatch.setattr(few, 'plan', lambda f, n, k, sms: (warps,along,1,32))

# (tiles, strips, down, along, deep, held), of six shares
WAYS = [
    (1,1,1,1,1,2),
    (2,2,1,1,2,3),
    (4,2,1,2,1,2),
    (3,1,2,3,2,3),
    (4,1,3,6,1,1),
    (1,2,2,6,3,1),
    (8,2,2,1,2,2),
    (5,1,2,1,2,3),
    (7,2,1,2,2,2),
    (6,1,1,3,1,2)]
@pytest.mark.parametrize('way', WAYS, ids=lambda w: ''.join(map(str, w)))
def test_however_it_is_shared_out(way, monkeypatch):
    """Pieces of x in a ring or all at once, several groups of rows, several shares a warp
    after each other"""
    rng = np.random.default_rng(3)
    w = packed(rng, 'NVFP4', 84, 2096)
    x = card.upload(normal(rng, 35, 2096))
    shared_as(monkeypatch, lambda: tile(*way, 1, w.rows, w.format), 12, 6)
    kw = options(rng, w, 35, gain=1, add=1)
    got = bits(many.gemv_wide(x, w, **kw))
    np.testing.assert_array_equal(got, bits(few.gemv(x, w, **kw)))

GPT_OSS = dict(act='swiglu_oai', limit=7., bias=1)
TOGETHER = dict( # 1040: no whole units
    nvfp4=Case('NVFP4', 35, 200, 1040, dict(gain=1, add=1), (4,4,1,2,3)),
    several=Case('NVFP4', 64, 200, 2096, dict(gain=1, add=1), (8,8,1,2,3)),
    along=Case('NVFP4', 33, 100, 1040, dict(extra=37, gain=1, bias=1), (4,4,2,2,2)),
    both=Case('NVFP4', 30, 300, 2096, dict(gain=1, bias=1), (2,4,2,2,4)),
    all=Case('INT4', 17, 150, 512, dict(gain=1, add=1), (4,8,1,2,3)),
    mxfp4=Case('MXFP4', 70, 72, 320, GPT_OSS, (4,8,1,2,2)),
    int4=Case('INT4', 33, 80, 320, dict(gain=1, add=1), (4,8,1,2,2)),
    fp8=Case('FP8_CHANNEL', 64, 70, 512, dict(group=64, gate=1, add=1), (8,4,2,2,2)),
    fp8_tiled=Case('FP8_BLOCK', 20, 40, 320, dict(act='relu2', gain=1), (2,4,1,1,2)),
    f16=Case('F16', 33, 100, 256, dict(act='gelu_tanh', bias=1, gate=1), (2,4,1,2,2)))

@pytest.mark.parametrize('c', TOGETHER.values(), ids=TOGETHER)
def test_four_warps_together(c, monkeypatch):
    rng = np.random.default_rng(3)
    w = c.weights(rng)
    x = card.upload(normal(rng, c.rows, c.k))
    shared_as(monkeypatch, lambda: together(*c.way, w.rows, w.format), 12, 2)
    kw = options(rng, w, c.rows, **c.kw)
    with recording(launch=True) as seen:
        got = bits(many.gemv_wide(x, w, **kw))
    assert all(d['CORES'] for *_,d in seen.calls)
    np.testing.assert_array_equal(got, bits(few.gemv(x, w, **kw)))

def chosen(x, logits, V):
    "The token of each row, of its logits or the best of them"
    ids = card.empty(len(x), 'int32')
    sample_rows(logits, SampleTable(card, len(x), V), ids, greedy=True)
    return card.download(ids)

# Rows of x and of weights, (tiles, strips, down, along, deep, held); or four warps together
BESTS = dict(
    one=(9, 84, (2,1,2,1,1,2)),
    strips=(35, 84, (4,2,1,2,1,2)),
    along=(20, 70, (3,1,2,3,2,3)),
    many=(64, 84, (8,2,2,1,2,2)),
    together=(35, 200, (4,4,1,2,3)),
    more=(70, 150, (8,8,1,2,3)),
    beside=(33, 100, (2,4,2,2,2)),
    whole=(64, 300, (8,4,1,2,3)),
    few=(17, 300, (2,4,1,2,3)))

def equals(rng, n):
    "A matrix of which many rows are the same, and so their logits, and some are 0"
    weights = normal(rng, n, 1040)
    weights[rng.integers(0, n, n//2)] = weights[rng.integers(0, n, n//2)]
    weights[::7] = 0
    return pack(QTensor.encode(weights, 'NVFP4'), card)

def check_best(x, w, n, **how):
    "The best of each row is that of its logits; which these are"
    best = many.best_logits(x, w, **how)
    assert best.shape==(len(x),n)
    want = chosen(x, many.gemv_wide(x, w, **how), n)
    np.testing.assert_array_equal(chosen(x, best, n), want)
    return want

def shared_so(monkeypatch, way, w):
    "As one of `BESTS` says"
    one_by_one = len(way)>5
    make = partial(tile, *way, 2) if one_by_one else partial(together, *way)
    shared_as(monkeypatch, lambda: make(w.rows, w.format), 12, 6 if one_by_one else 2)

def without_a_best(rng, rows):
    "The first row is zeros, and the next three are not finite"
    x = normal(rng, rows, 1040)
    x[0] = 0
    x[1,0],x[2,5],x[3,6] = np.inf,np.nan,-np.inf
    return card.upload(x)

@pytest.mark.parametrize('name', BESTS)
def test_the_best_of_each_row(name, monkeypatch):
    """is that of its logits: of equals the first, whichever part has it, and none of a row
    that is not finite"""
    rows,n,way = BESTS[name]
    rng = np.random.default_rng(5)
    w = equals(rng, n)
    shared_so(monkeypatch, way, w)
    x = without_a_best(rng, rows)
    for cap in (None,30.):
        bias = card.upload(-abs(normal(rng, n)))
        want = check_best(x, w, n, bias=bias, cap=cap)
        assert (want[1:4]==-1).all() and (want[4:]>=0).all()
    gain = card.upload(normal(rng, 1040))
    assert check_best(x, w, n, gain=gain, eps=1e-6)[0]==0

SHAPES = [(12288,2048), (2048,4096), (248320,2048), (5120,17408), (34816,5120), (96,576)]

def share_beside(at, f, k, W, o):
    "Options and bytes of the rows that a second matrix adds to a product tiled as `o` says"
    fmt = CARD_FORMATS['bf16' if f.parts==1 else 'f32']
    extra,w = SimpleNamespace(format=fmt, n=64),SimpleNamespace(k=k)
    it = SimpleNamespace(card=at, w=w, extra=extra, W=W, o=o, more=1)
    it._extra_ways = partial(many._WideProduct._extra_ways, it)
    return many._WideProduct.extra_share(it)

@pytest.mark.parametrize('arch,sms,most', [('sm_90a',132,227<<10), ('sm_121a',48,99<<10)])
def test_every_product_has_a_way(arch, sms, most):
    "Of true models, for one card and another, and it has room there"
    at = SimpleNamespace(arch=arch)
    for f,(n,k),rows in product(CARD_FORMATS.values(), SHAPES, (9,64,256)):
        W,split = few.plan(f, n, k, sms)[:2]
        o = many.tiling.__wrapped__(limits(at), f, n, k, sms, split, rows, 4)
        groups = -(-rows//(8*o.tiles))
        assert groups*(o.blocks+-(-4//groups))<=sms or o.blocks==1
        assert split%o.along==0
        check_tiling(o, arch, most)
        check_beside(at, f, k, W, o, most)

def check_tiling(o, arch, most):
    assert o and o.shared<=most and o.warps<=16
    assert o.span<=16*o.strips*o.down and o.deep>0<o.held
    assert not o.cores or arch=='sm_90a' and o.down%4==0 and o.warps<=16

def check_beside(at, f, k, W, o, most):
    "A second matrix has its share of the warps, and room"
    opts,shared = share_beside(at, f, k, W, o)
    assert shared<=most and W%opts['EALONG']==0
    assert opts['EALONG']*opts['EDOWN']<=o.warps

def kernels(rows, k):
    "What logits of some rows launch"
    w = Packed('fp8', 40, k, card.empty((40,k), 'uint8'), card.empty((40,1)))
    x = card.empty((rows,k))
    with recording(launch=False) as seen:
        vocabulary.logits(x, Matrix(w))
    return [name for name,*_ in seen.calls]

def test_a_step_uses_it():
    "for more than eight rows, and for fewer that are long"
    one,two = ['gemv'],['gemv_halves','gemv_wide']
    limit = {256:MAX_ROWS, 2880:MAX_ROWS//2, 4096:MAX_ROWS//2, 6144:2}
    for k,most in limit.items():
        assert kernels(most, k)==one and kernels(most+1, k)==two, k
