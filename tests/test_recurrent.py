"""Layers with a state of fixed size (pages ops.delta and ops.mamba): recurrent and chunked forms
agree however a text is cut, and a sequence knows nothing but its own slot."""
from itertools import pairwise
from typing import NamedTuple
import numpy as np,pytest
from hypothesis import given,settings,strategies as st
from atlas.ops.delta import delta_chunk,delta_recurrent,gated_delta
from atlas.ops.linear import TILE,spans
from atlas.ops.mamba import mamba2,ssd_chunk,ssd_recurrent

some = settings(max_examples=40, deadline=None, derandomize=True)
ints = st.integers

def flags(n): return st.lists(st.booleans(), min_size=n, max_size=n)

def cuts_of(n, cuts): return list(pairwise(sorted({0, n, *(c%(n+1) for c in cuts)})))

# -- the two forms ------------------------------------------------------------------------------

DECAYS = 0., -1e-4, -.1, -1., -30., -1e4, -np.inf
BETAS = 0., 1., .5

def gates(rng, n, h, choice, even):
    "[n,h] of values from `choice`: one for each head, or any anywhere"
    found = np.array(choice, 'f4')[rng.integers(len(choice), size=(1 if even else n,h))]
    return found*np.ones((n,h), 'f4')

def normal(rng, *shape): return rng.standard_normal(shape, dtype='f4')

def unit(x):
    "Vectors of length one"
    return x/np.linalg.norm(x, axis=-1, keepdims=True)

def delta_inputs(rng, n, even, repeat, h=3, dk=8, dv=5):
    "q, k, v, beta, g, and a memory"
    q,k,v = (normal(rng, n, h, d) for d in (dk,dk,dv))
    if repeat: # keys that come again and again: the triangular system at its worst
        k[:] = k[:2][np.arange(n)%min(n,2)]
    beta = gates(rng, n, h, BETAS, even)
    g = gates(rng, n, h, DECAYS, even)
    return (unit(q),unit(k),v,beta,g),normal(rng, h, dk, dv)

def ssd_inputs(rng, n, even, repeat, h=3, P=5, N=8):
    "X, a, B, C, and a state"
    X,B,C = (normal(rng, n, h, d) for d in (P,N,N))
    if repeat:
        B[:] = B[:1]
    return (X,gates(rng, n, h, DECAYS, even),B,C),normal(rng, h, P, N)

FORMS = [(delta_inputs,delta_recurrent,delta_chunk), (ssd_inputs,ssd_recurrent,ssd_chunk)]

@pytest.mark.parametrize('inputs,recurrent,chunk', FORMS, ids=('delta','ssd'))
@some
@given(
    n=ints(1,150),
    cuts=st.lists(ints(0,150), max_size=6),
    ways=flags(7),
    even=st.booleans(),
    repeat=st.booleans(),
    seed=ints(0,9999))
def test_forms_agree(inputs, recurrent, chunk, n, cuts, ways, even, repeat, seed):
    "Any cut, each piece in either form, any gates: the same as token by token in float64"
    xs,S = inputs(np.random.default_rng(seed), n, even, repeat)
    want,final = recurrent(*(x.astype('f8') for x in xs), S.astype('f8'))
    outs = []
    for (a,b),chunked in zip(cuts_of(n, cuts), ways):
        form = chunk if chunked else recurrent
        o,S = form(*(x[a:b] for x in xs), S)
        outs.append(o)
    got = np.concatenate(outs)
    assert got.dtype==S.dtype==np.float32
    close(got, want, 3e-6)
    close(S, final, 3e-6)

def close(got, want, share):
    "To a share of the largest value, or of 1"
    np.testing.assert_allclose(got, want, rtol=0, atol=share*max(1, np.abs(want).max()))

# -- whole layers -------------------------------------------------------------------------------

class Layer:
    "A small recurrent layer of random shape"
    def f(self, *s): return self.rng.standard_normal(s, dtype='f4')

class Delta(Layer):
    "A gated delta net"
    def __init__(self, rng):
        self.rng = rng
        kh,self.K,*sizes = rng.integers([1,2,3,2], [3,5,9,9])
        dk,dv = sizes
        vh = kh*int(rng.integers(1, 4))
        self.kh,self.C = kh,2*kh*dk+vh*dv
        self.rec = vh,dk,dv
        self.cols = self.C,vh*dv,2*vh
        conv = self.f(self.C,self.K)/2
        decay = -np.exp(self.f(vh)*2)
        self.w = conv,decay,self.f(vh),1+self.f(dv)/5,1e-6
        self.act = rng.choice(['silu','sigmoid'])
    @property
    def width(self): return sum(self.cols)
    def __call__(self, p, conv, rec, *args):
        parts = np.split(p, np.cumsum(self.cols)[:-1], axis=1)
        return gated_delta(*parts, *self.w, conv, rec, *args, self.kh, self.act)
    def inputs(self, p): return p[:,:self.C]

class Mamba(Layer):
    "A Mamba-2 layer"
    def __init__(self, rng):
        self.rng = rng
        G,self.K,*sizes = rng.integers([1,2,2,2], [3,5,7,9])
        P,N = sizes
        nh = G*int(rng.integers(1, 4))
        I = nh*P
        self.G,self.I,self.C = G,I,I+2*G*N
        self.rec = nh,P,N
        self.width = I+self.C+nh
        self.w = *self.taps(),*self.gates(nh),1+self.f(I)/5,1e-5
    def taps(self):
        "Of the convolution, and perhaps its bias"
        taps = self.f(self.C,self.K)/2
        return taps,self.f(self.C)/5 if self.rng.random()<.7 else None
    def gates(self, nh):
        return -np.exp(self.f(nh)*2),1+self.f(nh)/5,self.f(nh)
    def __call__(self, p, conv, rec, *args):
        return mamba2(p, *self.w, conv, rec, *args, self.G)
    def inputs(self, p): return p[:,self.I:self.I+self.C]

layers = pytest.mark.parametrize('kind', (Delta,Mamba))

def tokens(layer, n, wild=False):
    "[n, width] projected tokens; wild ones drive gates to their ends"
    p = layer.f(n, layer.width)
    if wild:
        p[layer.rng.random(n)<.3,-max(1, layer.width//8):] *= 1e3
    return p

def pools(layer, n=8, full=()):
    "Pools of NaN, but for random states in the slots `full`"
    ps = [np.full((n,*shape), np.nan, 'f4') for shape in ((layer.K-1,layer.C),layer.rec)]
    for p in ps:
        for s in full:
            p[s] = layer.f(*p.shape[1:])
    return ps

class Seq(NamedTuple):
    "A sequence's part of a step"
    x:np.ndarray # Its tokens
    start:int # Position of the first
    read:int # Slot
    write:object # Slot, or one for each row

def laid_out(layer, seqs, at, R):
    "`R` rows with those of `seqs` at their places, what is kept of each, and which are padding"
    p,keep = 100*layer.f(R, layer.width),np.full(R, -1, np.int32)
    pad = np.ones(R, bool)
    for s,(r,n) in zip(seqs, at):
        p[r:r+n] = s.x
        pad[r:r+n] = False
        own = slice(r, r+n) if np.ndim(s.write) else r+n-1
        keep[own] = s.write
    return p,keep,pad

def step(layer, seqs, tiled, conv, rec):
    "What comes out for each of `seqs`; padding is noise"
    starts,counts = [s.start for s in seqs],[len(s.x) for s in seqs]
    at = spans(starts, counts, tiled)
    R = max(-(-(r+n)//TILE)*TILE for r,n in at) if tiled else sum(counts)
    p,keep,pad = laid_out(layer, seqs, at, R)
    reads = [s.read for s in seqs]
    reads,starts,counts = (np.array(x, np.int32) for x in (reads,starts,counts))
    o = layer(p, conv, rec, reads, keep, starts, counts, tiled)
    assert not o[pad].any() and np.isfinite(o).all() and o.dtype==np.float32
    return [o[r:r+n] for r,n in at]

def feed(layer, x, plan, slot=3):
    "Rows and state of a sequence fed in pieces (a, b, tiled); nothing else may be touched"
    conv,rec = pools(layer)
    outs = [step(layer, [Seq(x[a:b], a, slot, slot)], t, conv, rec)[0] for a,b,t in plan]
    others = np.arange(8)!=slot
    assert np.isnan(conv[others]).all() and np.isnan(rec[others]).all()
    return np.concatenate(outs),conv[slot].copy(),rec[slot].copy()

def same(a, b): return all(x.tobytes()==y.tobytes() for x,y in zip(a, b, strict=True))

# -- schedules ----------------------------------------------------------------------------------

@layers
@some
@given(
    n=ints(1,200),
    cuts=st.lists(ints(0,200), max_size=5),
    ways=flags(6),
    wild=st.booleans(),
    seed=ints(0,9999))
def test_any_schedule(kind, n, cuts, ways, wild, seed):
    "Prefill, decode and verification in any pieces: as one token at a time, tails exactly"
    layer = kind(np.random.default_rng(seed))
    x = tokens(layer, n, wild)
    plan = [(a,b,tiled) for (a,b),tiled in zip(cuts_of(n, cuts), ways)]
    got = feed(layer, x, plan)
    want = feed(layer, x, [(i,i+1,False) for i in range(n)])
    for g,w in zip(got, want):
        close(g, w, 1e-4)
    nothing = np.zeros((layer.K-1,layer.C), 'f4')
    seen = np.concatenate([nothing, layer.inputs(x)])
    assert same([got[1]], [np.ascontiguousarray(seen[n:])])

@layers
@some
@given(n=ints(1,330), cuts=st.lists(ints(0,5), max_size=4), more=ints(0,70), seed=ints(0,9999))
def test_prefill_bits(kind, n, cuts, more, seed):
    "Cut at multiples of 64, or followed by others, a prompt's rows are the same to the last bit"
    layer = kind(np.random.default_rng(seed))
    x = tokens(layer, n+more)
    want = feed(layer, x[:n], [(0,n,True)])
    pieces = cuts_of(n, [min(c*TILE, n) for c in cuts])
    assert same(feed(layer, x[:n], [(a,b,True) for a,b in pieces]), want)
    longer = feed(layer, x, [(0,n+more,True)])
    assert same([longer[0][:n]], want[:1])

class Crowd:
    "Sequences that are to share a step, and the states that they begin from"
    def __init__(self, kind, counts, tiled, seed):
        rng = np.random.default_rng(seed)
        self.rng,self.layer,self.tiled = rng,kind(rng),tiled
        if tiled:
            counts = [c*int(rng.integers(1, 20)) for c in counts]
        S = len(counts)
        self.starts = (rng.integers(0, 200, S)*(rng.random(S)<.7)).tolist()
        full = [[i] if s else [] for i,s in enumerate(self.starts)]
        self.begin = [pools(self.layer, full=f) for f in full]
        rows = [tokens(self.layer, n) for n in counts]
        self.seqs = [Seq(x, s, i, i) for i,(x,s) in enumerate(zip(rows, self.starts))]
    def copies(self, i): return [p.copy() for p in self.begin[i]]
    def alone(self, i):
        "Rows and state of sequence `i` by itself"
        c,r = self.copies(i)
        o = step(self.layer, [self.seqs[i]], self.tiled, c, r)[0]
        return o,c[i],r[i]
    def together(self, order):
        "Rows of all, in this order, and the pools"
        c,r = pools(self.layer)
        for i in order:
            c[i],r[i] = (p[i] for p in self.begin[i])
        return step(self.layer, [self.seqs[i] for i in order], self.tiled, c, r),c,r
    def row_by_row(self, i):
        "The same, a row a step"
        c,r = self.copies(i)
        x,start = self.seqs[i].x,self.starts[i]
        one = [Seq(x[j:j+1], start+j, i, i) for j in range(len(x))]
        o = [step(self.layer, [s], self.tiled, c, r)[0] for s in one]
        return np.concatenate(o),c[i],r[i]

@layers
@some
@given(counts=st.lists(ints(1,8), min_size=1, max_size=4), tiled=st.booleans(), seed=ints(0,9999))
def test_company(kind, counts, tiled, seed):
    "Rows and states do not depend, to the last bit, on who shares the step, and in which order"
    crowd,S = Crowd(kind, counts, tiled, seed),len(counts)
    alone = [crowd.alone(i) for i in range(S)]
    order = crowd.rng.permutation(S)
    outs,c,r = crowd.together(order)
    for o,i in zip(outs, order):
        assert same((o,c[i],r[i]), alone[i])
    assert np.isnan(c[S:]).all() and np.isnan(r[S:]).all()
    if not tiled:
        for i in range(S):
            assert same(crowd.row_by_row(i), alone[i])

@layers
@some
@given(n=ints(1,8), start=st.sampled_from([0,1,2,70]), accepted=ints(1,8), seed=ints(0,9999))
def test_rollback(kind, n, start, accepted, seed):
    "Going on from an accepted row of a verify step is as if the others had never been"
    layer = kind(np.random.default_rng(seed))
    accepted = min(n, accepted)
    last = accepted-1
    x,y = tokens(layer, n),tokens(layer, 2)
    many = pools(layer, 12, full=[10] if start else [])
    few = [p.copy() for p in many]
    decode(layer, many, Seq(x, start, 10, range(n)))
    assert np.isnan(many[1][n:10]).all()
    if start: # the state it began from is still there
        assert same(state(many, 10), state(few, 10))
    decode(layer, few, Seq(x[:accepted], start, 10, 10))
    assert same(state(many, last), state(few, 10))
    then = start+accepted
    a = decode(layer, many, Seq(y, then, last, last))
    b = decode(layer, few, Seq(y, then, 10, 10))
    assert same(a, b)

def decode(layer, pools, seq):
    "Rows of one sequence in a step"
    return step(layer, [seq], False, *pools)

def state(pools, slot): return [p[slot] for p in pools]
