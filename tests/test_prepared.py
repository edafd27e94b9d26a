"""Rows that experts leave as the next product reads them: nothing differs from rows that
`expert_sum` makes and `gemv_halves` reads, to the bit."""
import numpy as np,pytest
from atlas.card.card import run
from atlas.card.emulator import Emulator,find_cxx
from atlas.card.launch import recording
from atlas.cuda import gemv_wide as many
from atlas.cuda.experts import Mixture
from atlas.cuda.experts_wide import moe_wide
from atlas.cuda.gemv_wide import ExpertParts,NextProduct,gemv_wide,prepared_rows
from atlas.cuda.pack import pack
from atlas.engine.card_stepper import StepShape
from atlas.ground.config import MoEConfig
from atlas.ground.formats import QTensor
from atlas.model.model import Piece,make_batch
from test_card import cache_of,models
from test_speculation_card import engine

pytestmark = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')
card = Emulator() if find_cxx() else None
rng = np.random.default_rng(0)

def normal(*shape): return rng.standard_normal(shape, dtype='f4')
def up(*shape): return card.upload(normal(*shape))
def bits(a): return card.download(a).view('u4')
def matrix(fmt, n, k):
    return pack(QTensor.encode(normal(n, k), fmt), card, exact=True)

def summed(found):
    "Rows [R, k] that `expert_sum` makes of what experts found"
    R,picks,k = found.part.shape
    x,grid = card.empty((R,k)),(-(-k//512),R)
    run('expert_sum', grid, 128, found.share, found.part,
        found.add, x, HIDDEN=k, PICKS=picks)
    return x

def same_tiles(tiles, others):
    "Tiles have the same bits, where they were written: beyond the rows nothing is"
    empty = card.download(card.empty((1,), 'uint8'))[0]
    for a,b in zip(tiles, others):
        if b is None:
            continue
        a,b = (card.download(t).view('u1') for t in (a,b))
        written = a!=empty
        np.testing.assert_array_equal(a[written], b[written])

@pytest.mark.parametrize('extra', (False,True))
def test_experts_leave_their_rows(extra):
    R,picks,k = 17,3,832
    w = matrix('NVFP4', 40, k)
    e = matrix('BF16', 20, k) if extra else None
    found,gain = ExpertParts(up(R, picks), up(R, picks, k), up(R, k)),up(k)
    x,y = summed(found),card.empty((R,k))
    h = prepared_rows(y, NextProduct(w, gain, 1e-6, e), found)
    np.testing.assert_array_equal(bits(y), bits(x))
    same_tiles(h.tiles,
        many._WideProduct(card, w, e, R).halves(x, gain, 1e-6, None, dict(NORM=1)))
    got,want = (bits(gemv_wide(v, w, gain=gain, eps=1e-6, extra=e))
        for v in (h.instead(y),x))
    np.testing.assert_array_equal(got, want)

def test_rows_of_another_product_are_made_anew():
    w = matrix('NVFP4', 40, 256)
    v = matrix('NVFP4', 24, 256)
    x = up(9, 256)
    gain = up(256)
    h = many.Prepared(9, NextProduct(w, gain, 1e-6), (), x)
    assert h.of(w, gain, 1e-6, None) and h.instead(x) is h
    for other in ((v,gain,1e-6,None), (w,up(256),1e-6,None), (w,gain,1e-5,None), (w,gain,1e-6,v)):
        assert not h.of(*other)
    y = up(9, 256)
    assert h.instead(y) is y
    got,want = (bits(gemv_wide(a, v, gain=gain, eps=1e-6))
        for a in (h,x))
    np.testing.assert_array_equal(got, want)

def mixture(E, H, I):
    "Two of `E` experts for a row"
    def bank(*s, **kw): return pack(QTensor.encode(normal(*s), 'NVFP4'), card, **kw)
    router = pack(normal(E, H), card, exact=True)
    banks = bank(E, 2*I, H, pair=True),bank(E, H, I)
    return Mixture(router, *banks, MoEConfig(E, 2, I), 'silu', gain=up(H), eps=1e-6)

def test_experts_leave_them_for_what_they_return():
    "So that the product which reads them next finds them, and makes them no second time"
    H = 64
    mix = mixture(4, H, 32)
    w = matrix('NVFP4', 40, H)
    gain = up(H)
    made = []
    x = up(9, H)
    y = moe_wide(x, mix, x, reader=NextProduct(w, gain, 1e-6), made=made)
    left = made.pop()
    assert left.instead(y) is left and left.of(w, gain, 1e-6, None)
    np.testing.assert_array_equal(bits(y), bits(moe_wide(x, mix, x)))

def launched(m, shape)->list:
    "Names of the kernels of a step"
    with recording(launch=False) as seen:
        engine(m, seqs=16).stepper.body(shape)
    return [n for n,*_ in seen.calls]

@pytest.mark.parametrize('full', (False,True))
def test_the_head_finds_them(full):
    """After the last layer's experts nobody adds up rows by themselves, and logits are those of
    the rows"""
    m = models('qwen3.6-moe', 'nvfp4')[1]
    names = launched(m, StepShape(16, 64, full, False))
    assert 'expert_sum' not in names and names.count('experts_wide')+names.count('expert_strips')
    last = len(names)-1-names[::-1].index('gemv_wide')
    assert names[last-1]=='gemv_halves' and names[last-2]!='gemv_halves'
    c = cache_of(m, 16)
    b = make_batch([Piece([i+5], 0, [i], i) for i in range(9)],
        False, 16, card)
    x = m.trunk(b, c, made=(made := []))
    assert isinstance(h := made[-1].instead(x), many.Prepared)
    got,want = (bits(m.head(r, m.last_norm))
        for r in (h,x))
    np.testing.assert_array_equal(got, want)
