"""Layers with a state of fixed size (pages ops.delta and ops.mamba): recurrent and chunked forms
agree however a text is cut, and a sequence knows nothing but its own slot."""
import numpy as np,pytest
from itertools import pairwise
from hypothesis import given,settings,strategies as st
from atlas.ops.delta import delta_chunk,delta_recurrent,gated_delta
from atlas.ops.linear import TILE,spans
from atlas.ops.mamba import mamba2,ssd_chunk,ssd_recurrent

some = settings(max_examples=40, deadline=None, derandomize=True)
ints = st.integers
def cuts_of(n, cuts): return list(pairwise(sorted({0, n, *(c%(n+1) for c in cuts)})))

# -- the two forms -------------------------------------------------------------------------------------------------------

DECAYS,BETAS = (0., -1e-4, -.1, -1., -30., -1e4, -np.inf),(0., 1., .5)

def gates(rng, n, h, choice, even):
    "[n,h] of values from `choice`: one for each head, or any anywhere"
    return np.array(choice, 'f4')[rng.integers(len(choice), size=(1 if even else n,h))]*np.ones((n,h), 'f4')

def delta_inputs(rng, n, even, repeat, h=3, dk=8, dv=5):
    q,k,v = (rng.standard_normal((n,h,d), dtype='f4') for d in (dk,dk,dv))
    if repeat:
        k[:] = k[:2][np.arange(n)%min(n,2)]  # keys that come again and again: the triangular system at its worst
    q,k = (x/np.linalg.norm(x, axis=-1, keepdims=True) for x in (q,k))
    return (q,k,v,gates(rng, n, h, BETAS, even),gates(rng, n, h, DECAYS, even)),rng.standard_normal((h,dk,dv), dtype='f4')

def ssd_inputs(rng, n, even, repeat, h=3, P=5, N=8):
    X,B,C = (rng.standard_normal((n,h,d), dtype='f4') for d in (P,N,N))
    if repeat:
        B[:] = B[:1]
    return (X,gates(rng, n, h, DECAYS, even),B,C),rng.standard_normal((h,P,N), dtype='f4')

FORMS = [(delta_inputs,delta_recurrent,delta_chunk), (ssd_inputs,ssd_recurrent,ssd_chunk)]

@pytest.mark.parametrize('inputs,recurrent,chunk', FORMS, ids=('delta','ssd'))
@some
@given(n=ints(1,150), cuts=st.lists(ints(0,150), max_size=6), ways=st.lists(st.booleans(), min_size=7, max_size=7),
       even=st.booleans(), repeat=st.booleans(), seed=ints(0,9999))
def test_forms_agree(inputs, recurrent, chunk, n, cuts, ways, even, repeat, seed):
    "Any cut, each piece in either form, any gates: the same as token by token in float64"
    xs,S = inputs(np.random.default_rng(seed), n, even, repeat)
    want,final = recurrent(*(x.astype('f8') for x in xs), S.astype('f8'))
    outs = []
    for (a,b),chunked in zip(cuts_of(n, cuts), ways):
        o,S = (chunk if chunked else recurrent)(*(x[a:b] for x in xs), S)
        outs.append(o)
    got = np.concatenate(outs)
    assert got.dtype==S.dtype==np.float32
    for x,y in ((got,want), (S,final)):
        np.testing.assert_allclose(x, y, rtol=0, atol=3e-6*max(1, np.abs(y).max()))

# -- whole layers --------------------------------------------------------------------------------------------------------

class Delta:
    "A small gated delta layer of random shape"
    def __init__(self, rng):
        self.rng,self.kh,self.K,dk,dv = rng,*rng.integers([1,2,3,2], [3,5,9,9])
        vh = self.kh*int(rng.integers(1, 4))
        self.C = 2*self.kh*dk+vh*dv
        self.rec = vh,dk,dv
        self.cols = self.C,vh*dv,2*vh
        f = lambda *s: rng.standard_normal(s, dtype='f4')
        self.w = f(self.C,self.K)/2,-np.exp(f(vh)*2),f(vh),1+f(dv)/5,1e-6
        self.act = rng.choice(['silu','sigmoid'])
    @property
    def width(self): return sum(self.cols)
    def __call__(self, p, conv, rec, *args):
        return gated_delta(*np.split(p, np.cumsum(self.cols)[:-1], axis=1), *self.w, conv, rec, *args, self.kh, self.act)
    def inputs(self, p): return p[:,:self.C]

class Mamba:
    "A small Mamba-2 layer of random shape"
    def __init__(self, rng):
        self.rng,self.G,self.K,P,N = rng,*rng.integers([1,2,2,2], [3,5,7,9])
        nh = self.G*int(rng.integers(1, 4))
        I = self.I = nh*P
        self.C = I+2*self.G*N
        self.rec = nh,P,N
        self.width = I+self.C+nh
        f = lambda *s: rng.standard_normal(s, dtype='f4')
        self.w = f(self.C,self.K)/2,f(self.C)/5 if rng.random()<.7 else None,-np.exp(f(nh)*2),1+f(nh)/5,f(nh),1+f(I)/5,1e-5
    def __call__(self, p, conv, rec, *args): return mamba2(p, *self.w, conv, rec, *args, self.G)
    def inputs(self, p): return p[:,self.I:self.I+self.C]

layers = pytest.mark.parametrize('kind', (Delta,Mamba))

def tokens(layer, n, wild=False):
    "[n, width] projected tokens; wild ones drive gates to their ends"
    p = layer.rng.standard_normal((n,layer.width), dtype='f4')
    if wild:
        p[layer.rng.random(n)<.3,-max(1, layer.width//8):] *= 1e3
    return p

def pools(layer, n=8, full=()):
    "Pools of NaN, but for random states in the slots `full`"
    ps = np.full((n,layer.K-1,layer.C), np.nan, 'f4'),np.full((n,*layer.rec), np.nan, 'f4')
    for p in ps:
        for s in full:
            p[s] = layer.rng.standard_normal(p.shape[1:], dtype='f4')
    return ps

def step(layer, seqs, tiled, conv, rec, keep_all=False):
    "`seqs`: (tokens, start, slot to read, slot or slots to write). What came out for each; padding is noise"
    starts,counts = [s[1] for s in seqs],[len(s[0]) for s in seqs]
    at = spans(starts, counts, tiled)
    R = max(-(-(r+n)//TILE)*TILE for r,n in at) if tiled else sum(counts)
    p,keep = 100*layer.rng.standard_normal((R,layer.width), dtype='f4'),np.full(R, -1, np.int32)
    for (x,_,_,out),(r,n) in zip(seqs, at):
        p[r:r+n] = x
        if np.ndim(out):
            keep[r:r+n] = out
        else:
            keep[r+n-1] = out
    reads,starts,counts = (np.array(x, np.int32) for x in ([s[2] for s in seqs], starts, counts))
    o = layer(p, conv, rec, reads, keep, starts, counts, tiled)
    pad = np.ones(R, bool)
    for r,n in at:
        pad[r:r+n] = False
    assert not o[pad].any() and np.isfinite(o).all() and o.dtype==np.float32
    return [o[r:r+n] for r,n in at]

def feed(layer, x, plan, slot=3):
    "A whole sequence; `plan`: (a, b, tiled) pieces. Its rows, and its state; nothing else was touched"
    conv,rec = pools(layer)
    o = np.concatenate([step(layer, [(x[a:b],a,slot,slot)], tiled, conv, rec)[0] for a,b,tiled in plan])
    others = np.arange(8)!=slot
    assert np.isnan(conv[others]).all() and np.isnan(rec[others]).all()
    return o,conv[slot].copy(),rec[slot].copy()

def same(a, b): return all(x.tobytes()==y.tobytes() for x,y in zip(a, b, strict=True))

@layers
@some
@given(n=ints(1,200), cuts=st.lists(ints(0,200), max_size=5), ways=st.lists(st.booleans(), min_size=6, max_size=6), wild=st.booleans(), seed=ints(0,9999))
def test_any_schedule(kind, n, cuts, ways, wild, seed):
    "Prefill in any pieces, decode and verification in any order: the numbers of one token at a time, and the inputs' last rows for a tail"
    layer = kind(np.random.default_rng(seed))
    x = tokens(layer, n, wild)
    plan = [(a,b,tiled) for (a,b),tiled in zip(cuts_of(n, cuts), ways)]
    got,want = feed(layer, x, plan),feed(layer, x, [(i,i+1,False) for i in range(n)])
    for g,w in zip(got, want):
        np.testing.assert_allclose(g, w, rtol=0, atol=1e-4*max(1, np.abs(w).max()))
    seen = np.concatenate([np.zeros((layer.K-1,layer.C), 'f4'), layer.inputs(x)])
    assert same([got[1]], [np.ascontiguousarray(seen[n:])])

@layers
@some
@given(n=ints(1,330), cuts=st.lists(ints(0,5), max_size=4), more=ints(0,70), seed=ints(0,9999))
def test_prefill_bits(kind, n, cuts, more, seed):
    "Cut at multiples of 64, or followed by other tokens, a prompt's rows are the same to the last bit"
    layer = kind(np.random.default_rng(seed))
    x = tokens(layer, n+more)
    want = feed(layer, x[:n], [(0,n,True)])
    assert same(feed(layer, x[:n], [(a,b,True) for a,b in cuts_of(n, [min(c*TILE, n) for c in cuts])]), want)
    assert same([feed(layer, x, [(0,n+more,True)])[0][:n]], want[:1])

@layers
@some
@given(counts=st.lists(ints(1,8), min_size=1, max_size=4), tiled=st.booleans(), seed=ints(0,9999))
def test_company(kind, counts, tiled, seed):
    "A sequence's rows and states do not depend, to the last bit, on who shares the step, in which order, and how its rows are bundled"
    rng = np.random.default_rng(seed)
    layer = kind(rng)
    S = len(counts)
    if tiled:
        counts = [c*int(rng.integers(1, 20)) for c in counts]
    starts = [int(s) for s in rng.integers(0, 200, S)*(rng.random(S)<.7)]
    begin = [pools(layer, full=[] if s==0 else [i]) for i,s in enumerate(starts)]
    seqs = [(tokens(layer, n),s,i,i) for i,(n,s) in enumerate(zip(counts, starts))]
    alone = []
    for i,q in enumerate(seqs):
        c,r = (p.copy() for p in begin[i])
        alone.append((step(layer, [q], tiled, c, r)[0],c[i],r[i]))
    order = rng.permutation(S)
    c,r = pools(layer)
    for i in range(S):
        c[i],r[i] = begin[i][0][i],begin[i][1][i]
    outs = step(layer, [seqs[i] for i in order], tiled, c, r)
    for o,i in zip(outs, order):
        assert same((o,c[i],r[i]), alone[i])
    assert np.isnan(c[S:]).all() and np.isnan(r[S:]).all()
    if not tiled:  # one row a step
        for i,(x,s,_,_) in enumerate(seqs):
            c,r = (p.copy() for p in begin[i])
            o = np.concatenate([step(layer, [(x[j:j+1],s+j,i,i)], False, c, r)[0] for j in range(len(x))])
            assert same((o,c[i],r[i]), alone[i])

@layers
@some
@given(n=ints(1,8), start=st.sampled_from([0,1,2,70]), accepted=ints(1,8), seed=ints(0,9999))
def test_rollback(kind, n, start, accepted, seed):
    "After a verify step that kept the state of each row, going on from an accepted row is as if the others had never been"
    layer = kind(np.random.default_rng(seed))
    accepted = min(n, accepted)
    x,y = tokens(layer, n),tokens(layer, 2)
    conv,rec = pools(layer, 12, full=[10] if start else [])
    c1,r1 = conv.copy(),rec.copy()
    step(layer, [(x,start,10,range(n))], False, conv, rec)
    assert np.isnan(rec[n:10]).all() and (not start or same((conv[10],rec[10]), (c1[10],r1[10])))  # the state it began from is still there
    step(layer, [(x[:accepted],start,10,10)], False, c1, r1)
    assert same((conv[accepted-1],rec[accepted-1]), (c1[10],r1[10]))
    a = step(layer, [(y,start+accepted,accepted-1,accepted-1)], False, conv, rec)[0]
    assert same([a], step(layer, [(y,start+accepted,10,10)], False, c1, r1))
