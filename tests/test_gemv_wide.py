"Many rows of a step in one product: every row has the bits that `gemv` gives it"
import numpy as np,pytest
from functools import partial
from itertools import product
from types import SimpleNamespace
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

def packed(rng, fmt, n, k, pair=False):
    w = rng.standard_normal((n,k), dtype='f4')*np.exp(rng.standard_normal((n,1), dtype='f4'))
    return pack(w if fmt=='F32' else QTensor.encode(w, fmt), card, pair=pair, exact=True)

def options(rng, w, rows, extra=0, gain=0, group=0, bias=0, add=0, gate=0, **kw):
    "Arguments for `gemv`, on the card"
    def up(*shape): return card.upload(rng.standard_normal(shape, dtype='f4'))
    n = w.n//2 if w.pair else w.n+extra
    if gain:
        kw |= dict(gain=up(w.k), eps=1e-6)
    if group:
        squares = np.abs(rng.standard_normal((rows,w.k//group,3), dtype='f4'))*9+1
        kw |= dict(parts=card.upload(squares), group=group, eps=1e-5)
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

# Rows of x, of weights, columns; neither 16 nor 128 need divide them
CASES = dict(
    nvfp4=('NVFP4', 16, 100, 512, dict(extra=37, gain=1, bias=1, add=1)),
    nvfp4_along=('NVFP4', 33, 36, 2816, dict(extra=20, gain=1)),
    nvfp4_pair=('NVFP4', 128, 70, 208, dict(act='silu', gain=1)),
    nvfp4_long=('NVFP4', 9, 20, 17408, dict(add=1)),
    mxfp4=('MXFP4', 17, 18, 2880, dict(act='swiglu_oai', limit=7., bias=1)),
    int4=('INT4', 33, 36, 160, dict(extra=5, gain=1, add=1)),
    fp8=('FP8_CHANNEL', 16, 20, 1024, dict(group=64, gate=1, add=1)),
    fp8_tiled=('FP8_BLOCK', 9, 40, 320, dict(act='relu2', gain=1)),
    bf16=('BF16', 16, 24, 2688, dict(extra=1, gain=1, bias=1, cap=30.)),
    f16=('F16', 33, 10, 256, dict(act='gelu_tanh', bias=1, gate=1)),
    f32=('F32', 10, 12, 96, dict(extra=7, gain=1, bias=1)))

@pytest.mark.parametrize('name', CASES)
def test_rows_have_the_bits_they_have_alone(name):
    fmt,rows,n,k,kw = CASES[name]
    rng = np.random.default_rng(len(name))
    w = packed(rng, fmt, n, k, kw.get('act') not in (None,'relu2'))
    x = rng.standard_normal((rows,k), dtype='f4')
    x[0,:k//3] *= 1e3
    x[1] *= 1e9
    spoilt = rows//2
    x[spoilt,k//2] = np.nan
    x,kw = card.upload(x),options(rng, w, rows, **kw)
    want = bits(few.gemv(x, w, **kw))
    got = bits(many.gemv_wide(x, w, **kw))
    finite = np.arange(rows)!=spoilt
    np.testing.assert_array_equal(got[finite], want[finite])
    assert np.isfinite(got[finite].view('f4')).all()
    assert np.isnan(got[spoilt].view('f4')).all()

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

# (tiles, strips, down, along, deep, held), of six shares
WAYS = [(1,1,1,1,1,2), (2,2,1,1,2,3), (4,2,1,2,1,2), (3,1,2,3,2,3), (4,1,3,6,1,1), (1,2,2,6,3,1),
    (8,2,2,1,2,2), (5,1,2,1,2,3), (7,2,1,2,2,2), (6,1,1,3,1,2)]
@pytest.mark.parametrize('way', WAYS, ids=lambda w: ''.join(map(str, w)))
def test_however_it_is_shared_out(way, monkeypatch):
    """Pieces of x in a ring or all at once, several groups of rows, several shares a warp
    after each other"""
    rng = np.random.default_rng(3)
    w = packed(rng, 'NVFP4', 84, 2096)
    x = card.upload(rng.standard_normal((35,2096), dtype='f4'))
    monkeypatch.setattr(many, 'tiling', lambda *a: tile(*way, 1, w.rows, w.format))
    monkeypatch.setattr(many, 'plan', lambda f, n, k, sms: (12,6,1,n))
    monkeypatch.setattr(few, 'plan', lambda f, n, k, sms: (12,6,1,32))
    kw = options(rng, w, 35, gain=1, add=1)
    np.testing.assert_array_equal(bits(many.gemv_wide(x, w, **kw)), bits(few.gemv(x, w, **kw)))

# Formats, rows of x and of weights, columns, (tiles, down, along, deep, held); 1040: no whole units
TOGETHER = dict(
    nvfp4=('NVFP4', 35, 200, 1040, (4,4,1,2,3), dict(gain=1, add=1)),
    several=('NVFP4', 64, 200, 2096, (8,8,1,2,3), dict(gain=1, add=1)),
    along=('NVFP4', 33, 100, 1040, (4,4,2,2,2), dict(extra=37, gain=1, bias=1)),
    both=('NVFP4', 30, 300, 2096, (2,4,2,2,4), dict(gain=1, bias=1)),
    all=('INT4', 17, 150, 512, (4,8,1,2,3), dict(gain=1, add=1)),
    mxfp4=('MXFP4', 70, 72, 320, (4,8,1,2,2), dict(act='swiglu_oai', limit=7., bias=1)),
    int4=('INT4', 33, 80, 320, (4,8,1,2,2), dict(gain=1, add=1)),
    fp8=('FP8_CHANNEL', 64, 70, 512, (8,4,2,2,2), dict(group=64, gate=1, add=1)),
    fp8_tiled=('FP8_BLOCK', 20, 40, 320, (2,4,1,1,2), dict(act='relu2', gain=1)),
    f16=('F16', 33, 100, 256, (2,4,1,2,2), dict(act='gelu_tanh', bias=1, gate=1)))

@pytest.mark.parametrize('name', TOGETHER)
def test_four_warps_together(name, monkeypatch):
    fmt,rows,n,k,way,kw = TOGETHER[name]
    rng = np.random.default_rng(3)
    w = packed(rng, fmt, n, k, kw.get('act') not in (None,'relu2'))
    x = card.upload(rng.standard_normal((rows,k), dtype='f4'))
    monkeypatch.setattr(many, 'tiling', lambda *a: together(*way, w.rows, w.format))
    monkeypatch.setattr(many, 'plan', lambda f, n, k, sms: (12,2,1,n))
    monkeypatch.setattr(few, 'plan', lambda f, n, k, sms: (12,2,1,32))
    kw = options(rng, w, rows, **kw)
    with recording(launch=True) as seen:
        got = bits(many.gemv_wide(x, w, **kw))
    assert all(d['CORES'] for _,*_,d in seen.calls)
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
    weights = rng.standard_normal((n,1040), dtype='f4')
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

@pytest.mark.parametrize('name', BESTS)
def test_the_best_of_each_row(name, monkeypatch):
    """is that of its logits: of equals the first, whichever part has it, and none of a row
    that is not finite"""
    rows,n,way = BESTS[name]
    rng = np.random.default_rng(5)
    w = equals(rng, n)
    make = tile if len(way)>5 else together
    blocks = () if make is together else (2,)
    monkeypatch.setattr(many, 'tiling', lambda *a: make(*way, *blocks, w.rows, w.format))
    monkeypatch.setattr(many, 'plan', lambda f, n, k, sms: (12,6 if blocks else 2,1,n))
    x = rng.standard_normal((rows,1040), dtype='f4')
    x[0] = 0
    x[1,0],x[2,5],x[3,6] = np.inf,np.nan,-np.inf
    x = card.upload(x)
    for cap in (None,30.):
        bias = card.upload(-abs(rng.standard_normal(n, dtype='f4')))
        want = check_best(x, w, n, bias=bias, cap=cap)
        assert (want[1:4]==-1).all() and (want[4:]>=0).all()
    gain = card.upload(rng.standard_normal(1040, dtype='f4'))
    assert check_best(x, w, n, gain=gain, eps=1e-6)[0]==0

SHAPES = [(12288,2048), (2048,4096), (248320,2048), (5120,17408), (34816,5120), (96,576)]

def share_beside(at, f, k, W, o):
    "Options and bytes of the rows that a second matrix adds to a product tiled as `o` says"
    fmt = CARD_FORMATS['bf16' if f.parts==1 else 'f32']
    extra,w = SimpleNamespace(format=fmt, n=64),SimpleNamespace(k=k)
    it = SimpleNamespace(card=at, w=w, extra=extra, W=W, o=o, more=1)
    it._extra_ways = partial(many._Product._extra_ways, it)
    return many._Product.extra_share(it)

@pytest.mark.parametrize('arch,sms,most', [('sm_90a',132,227<<10), ('sm_121a',48,99<<10)])
def test_every_product_has_a_way(arch, sms, most):
    "Of true models, for one card and another, and it has room there"
    at = SimpleNamespace(arch=arch)
    for f,(n,k),rows in product(CARD_FORMATS.values(), SHAPES, (9,64,256)):
        W,split,_,_ = few.plan(f, n, k, sms)
        o = many.tiling.__wrapped__(limits(at), f, n, k, sms, split, rows, 4)
        groups = -(-rows//(8*o.tiles))
        assert groups*(o.blocks+-(-4//groups))<=sms or o.blocks==1
        assert o and o.shared<=most and o.warps<=16 and split%o.along==0, (f, n, k)
        assert o.span<=16*o.strips*o.down and o.deep>0<o.held
        assert not o.cores or arch=='sm_90a' and o.down%4==0 and o.warps<=16
        opts,shared = share_beside(at, f, k, W, o)
        assert shared<=most and W%opts['EALONG']==0
        assert opts['EALONG']*opts['EDOWN']<=o.warps

def test_a_step_uses_it():
    "for more than eight rows, and for fewer that are long"
    def kernels(rows, k):
        codes,scales = card.empty((40,k), 'uint8'),card.empty((40,1))
        w,x = Matrix(Packed('fp8', 40, k, codes, scales)),card.empty((rows,k))
        with recording(launch=False) as seen:
            vocabulary.logits(x, w)
        return [k for k,*_ in seen.calls]
    one,two = ['gemv'],['gemv_halves','gemv_wide']
    for k,most in ((256,MAX_ROWS),(2880,MAX_ROWS//2),(4096,MAX_ROWS//2),(6144,2)):
        assert kernels(most, k)==one and kernels(most+1, k)==two, k
