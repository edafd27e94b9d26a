"""Rows that who makes them leaves as the next product reads them: nothing differs from rows that
`gemv_halves` makes of them, to the bit."""
import numpy as np,pytest
from dataclasses import replace
from types import SimpleNamespace as NS
from atlas.card.card import run
from atlas.card.emulator import Emulator,find_cxx
from atlas.cuda import gemv_wide as many
from atlas.cuda.delta import delta_step
from atlas.cuda.gemv_wide import Found,Reader,gemv_wide,halved_rows
from atlas.cuda.pack import pack
from atlas.ground.formats import QTensor

pytestmark = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')
card = Emulator() if find_cxx() else None
rng = np.random.default_rng(0)

def normal(*shape): return rng.standard_normal(shape, dtype='f4')
def up(*shape): return card.upload(normal(*shape))
def ints(a): return card.upload(np.asarray(a, np.int32))
def bits(a): return card.download(a).view('u4')
def matrix(fmt, n, k): return pack(QTensor.encode(normal(n, k), fmt), card, exact=True)

def together(monkeypatch):
    "Four warps multiply together from now on"
    usual = many.tiling.__wrapped__
    def tiling(*args):
        o = usual(*args)
        sizes = args[1],2,1,4,1,o.deep,2
        shared = many._memory(*sizes, True)
        return replace(o, tiles=2, strips=1, down=4, along=1, held=2, span=min(o.span, 64),
            blocks=-(-args[2]//min(o.span, 64)), shared=shared, cores=True)
    monkeypatch.setattr(many, 'tiling', tiling)

class Delta:
    "Ten sequences of one row each and two rows of padding; one begins, one has a NaN"
    kh,vh,d,seqs,rows = 1,2,128,10,12
    def __init__(self):
        C = 2*self.kh*self.d+self.vh*self.d
        x = normal(self.rows, C+self.vh*self.d+2*self.vh)
        x[3] *= 1e4
        x[5,7] = np.nan
        self.x,self.pools = card.upload(x),(up(20, 3, C),up(20, self.vh, self.d, self.d))
        self.w = up(C, 4),card.upload(-np.exp(normal(self.vh))),up(self.vh),up(self.d)
        ids = np.arange(self.seqs)
        self.b = NS(first=ints(range(11)), starts=ints([0]+[9]*9), state_in=ints(ids),
            state_out=ints([*(10+ids),-1,-1]), num_seqs=self.seqs)
    def __call__(self, **kw): return delta_step(self.x, *self.w, *self.pools, self.b, self.kh, **kw)

@pytest.mark.parametrize('fmt,cores', [('NVFP4',False), ('NVFP4',True), ('FP8_CHANNEL',True)])
def test_a_delta_net_leaves_its_rows(fmt, cores, monkeypatch):
    if cores: together(monkeypatch)
    net,w,made = Delta(),matrix(fmt, 40, 256),[]
    plain = net()
    y,parts = net(reader=Reader(w, None, 1e-6), made=made)
    for a,b in zip((y,parts), plain): np.testing.assert_array_equal(bits(a), bits(b))
    norm = dict(eps=1e-6, parts=parts, group=128)
    got,want = (bits(gemv_wide(y, w, **norm, halved=h)) for h in (made[0],None))
    np.testing.assert_array_equal(np.isnan(got.view('f4')), np.isnan(want.view('f4')))
    finite = np.isfinite(want.view('f4')).all(1)
    assert finite.sum()==11
    np.testing.assert_array_equal(got[finite], want[finite])

@pytest.mark.parametrize('extra', (False,True))
def test_experts_leave_their_rows(extra):
    R,picks,k = 17,3,832
    w,e = matrix('NVFP4', 40, k),matrix('BF16', 20, k) if extra else None
    share,part,add,gain = up(R, picks),up(R, picks, k),up(R, k),up(k)
    x,y = card.empty((R,k)),card.empty((R,k))
    run('expert_sum', (-(-k//512),R), 128, share, part, add, x, None, None, 0, 0, HIDDEN=k, PICKS=picks)
    h = halved_rows(y, Reader(w, gain, 1e-6, e), Found(share, part, add))
    np.testing.assert_array_equal(bits(y), bits(x))
    p = many._Product(card, w, e, R)
    for a,b in zip(h.tiles, p.halves(x, gain, 1e-6, None, dict(NORM=1))):
        if b is None: continue
        a,b = (card.download(t).view('u1') for t in (a,b))
        written = a!=card.download(card.empty((1,), 'uint8'))[0]  # beyond the rows nothing is
        np.testing.assert_array_equal(a[written], b[written])
    got,want = (bits(gemv_wide(v, w, gain=gain, eps=1e-6, extra=e, halved=s)) for v,s in ((y,h),(x,None)))
    np.testing.assert_array_equal(got, want)

def test_rows_of_another_product_are_made_anew():
    w,v,x,gain = matrix('NVFP4', 40, 256),matrix('NVFP4', 24, 256),up(9, 256),up(256)
    h = many.Halved(x, Reader(w, gain, 1e-6), ())
    assert h.of(x, w, gain, 1e-6, None)
    others = (up(9, 256),w,gain,1e-6,None), (x,v,gain,1e-6,None), (x,w,up(256),1e-6,None), (x,w,gain,1e-5,None), (x,w,gain,1e-6,v)
    for o in others: assert not h.of(*o)
    got,want = (bits(gemv_wide(x, v, gain=gain, eps=1e-6, halved=a)) for a in (h,None))
    np.testing.assert_array_equal(got, want)
