"""Attention held to its formula over random heads, windows, sinks, blocks and cuts, in pools that
are poison wherever a row must not look."""
import inspect
from contextlib import contextmanager
import numpy as np,pytest
from hypothesis import Phase,given,settings,strategies as st
from atlas.ops import attention as page
from atlas.ops.attention import attention,full_attention,write_kv
from atlas.ops.linear import TILE

few = settings(max_examples=30, deadline=None)

class Case:
    "A sequence of T tokens in shuffled blocks"
    def __init__(self, seed, T, B, kv, r, d, window, sinks):
        rng = np.random.default_rng(seed)
        def f(*s): return rng.standard_normal(s, dtype='f4')
        self.T,self.window,self.rng = T,window,rng
        self.q,self.k,self.v = f(T,kv*r,d),f(T,kv,d),f(T,kv,d)
        self.sinks = f(kv*r)*5 if sinks else None
        self.B = B
        self.write(-(-T//B), (B,kv,d))

    def write(self, blocks, shape):
        "Keys and values into blocks of a pool of NaN that has three more"
        self.table = self.rng.permutation(blocks+3)[:blocks]
        self.kp = np.full((blocks+3,*shape), np.nan, 'f4')
        self.vp = self.kp.copy()
        p = np.arange(self.T)
        slots = self.table[p//self.B]*self.B+p%self.B
        write_kv(self.k, self.v, self.kp, self.vp, slots)

    @contextmanager
    def spoiled(self, n):
        "While open, NaN is in its first `n` blocks"
        kv = self.kp.copy(),self.vp.copy()
        self.kp[self.table[:n]] = self.vp[self.table[:n]] = np.nan
        yield
        self.kp,self.vp = kv

    def step(self, attention, x, a, b, tiled, scale):
        where = self.table[None],[a],[b-a],tiled
        return attention(x, self.kp, self.vp, *where, scale, self.window, sinks=self.sinks)

    def rows(self, attention, a, b, scale=.4):
        "Rows a..b-1 as a decode step"
        return self.step(attention, self.q[a:b], a, b, False, scale)

    def tiles(self, attention, a, b, scale=.4):
        "The same as a prefill piece"
        at = np.arange(a, b)-a//TILE*TILE
        tiles = -(-b//TILE)-a//TILE
        x = np.full((tiles*TILE,*self.q.shape[1:]), 3., 'f4')
        x[at] = self.q[a:b]
        return self.step(attention, x, a, b, True, scale)[at]

    def formula(self, scale=.4, causal=True):
        "float64, by whole matrices"
        r = self.q.shape[1]//self.k.shape[1]
        k,v = (np.repeat(a.astype('f8'), r, 1) for a in (self.k,self.v))
        s = np.einsum('qhd,khd->hqk', self.q, k)*scale
        sinks = None
        if causal:
            position = np.arange(self.T)
            gap = position[:,None]-position
            s[:,(gap<0)|(gap>=(self.window or self.T))] = -np.inf
            sinks = self.sinks
        return np.einsum('hqk,khd->qhd', softmax(s, sinks), v)

def softmax(s, sinks=None):
    "Weights of the scores s [heads,q,k], of which a sink takes some"
    if sinks is None:
        sinks = np.full(len(s), -np.inf)
    m = np.maximum(s.max(-1), sinks[:,None])[...,None]
    e = np.exp(s-m)
    return e/(e.sum(-1, keepdims=True)+np.exp(sinks[:,None,None]-m))

cases = st.builds(
    Case,
    st.integers(0, 2**32),
    T=st.integers(1, 260),
    B=st.sampled_from([1,3,16,64,80]),
    kv=st.integers(1, 3),
    r=st.integers(1, 4),
    d=st.integers(1, 20),
    window=st.none()|st.integers(1, 160),
    sinks=st.booleans())

def near(y, ref):
    np.testing.assert_allclose(y, ref, rtol=0, atol=3e-5)

def check_formula(attention, c):
    ref = c.formula()
    near(c.rows(attention, 0, c.T), ref)
    near(c.tiles(attention, 0, c.T), ref)

def check_cuts(attention, c):
    "Bit for bit: prefill in any two pieces, decode row by row"
    tiles,rows = c.tiles(attention, 0, c.T),c.rows(attention, 0, c.T)
    cut = int(c.rng.integers(0, c.T+1))
    parts = [c.tiles(attention, a, b) for a,b in ((0,cut),(cut,c.T)) if b>a]
    assert np.array_equal(np.concatenate(parts), tiles)
    if cut:
        assert np.array_equal(c.rows(attention, cut-1, cut), rows[cut-1:cut])

def check_window(attention, c):
    "Blocks wholly before every window of a step may belong to anybody: they are not read"
    a = c.T//2
    y,t = c.rows(attention, a, c.T),c.tiles(attention, a, c.T)
    if c.window is None:
        return
    with c.spoiled(max(0, a-c.window+1)//c.B):
        assert np.array_equal(c.rows(attention, a, c.T), y)
    first = max(0, a//TILE*TILE-c.window+1)//TILE*TILE  # that tiles read
    with c.spoiled(first//c.B):
        assert np.array_equal(c.tiles(attention, a, c.T), t)

@few
@given(cases)
def test_formula(c):
    check_formula(attention, c)

@few
@given(cases)
def test_cuts(c):
    check_cuts(attention, c)

@few
@given(cases)
def test_before_the_window(c):
    check_window(attention, c)

@few
@given(cases)
def test_full_attention(c):
    near(full_attention(c.q, c.k, c.v, .4), c.formula(causal=False))

def test_scores_far_out():
    "Scores and sinks as large as they come neither overflow nor make NaN"
    c = Case(0, 70, 16, 1, 2, 4, None, True)
    for big in (-1e30,1e30):
        c.sinks = np.float32([big,0])
        for y in (c.rows(attention, 0, 70, 1e4),c.tiles(attention, 0, 70, 1e4)):
            assert np.isfinite(y).all()
            assert (y[:,0]==0).all()==(big>0)

@pytest.mark.parametrize('tiled', [False,True])
def test_broken_row(tiled):
    "A row of NaN is NaN, and is seen only by rows that look at its key"
    c = Case(1, 100, 16, 2, 2, 8, 10, True)
    run = c.tiles if tiled else c.rows
    y = run(attention, 0, 100)
    c.q[40] = np.nan
    z = run(attention, 0, 100)
    assert np.isnan(z[40]).all()
    assert np.array_equal(np.delete(z, 40, 0), np.delete(y, 40, 0))

# -- the checks above can fail ------------------------------------------------------------------

FAULTS = [
    (check_formula, '_mask', 'gap>=window', 'gap>window'),
    (check_formula, '_mask', 'gap<0', 'gap<-1'),
    (check_formula, '_attend', 'np.exp(sink[...,None]-top)', 'np.exp(sink[...,None])'),
    (check_formula, '_gather', 'x[length-lo:] = 0', 'pass'),
    (check_formula, '_first', 'p-window+1', 'p-window+2'),
    (check_formula, '_prefill_tile', 'past.sink(kv, TILE)',
        '(past.sinks if past.sinks is None else np.tile(past.sinks.reshape(kv,-1), (1,TILE)))'),
    (check_cuts, '_prefill_seq', '(q[s],', '(q[s]*np.float32(1+1e-6*len(q)),'),
    (check_window, '_first', '//unit*unit', '//unit*unit//2')]

@pytest.mark.parametrize('check,name,old,new', FAULTS)
def test_faults_are_seen(monkeypatch, check, name, old, new):
    src = inspect.getsource(getattr(page, name))
    assert src.count(old)==1
    ns = dict(vars(page))
    exec(src.replace(old, new), ns)
    monkeypatch.setattr(page, name, ns[name])
    how = dict(max_examples=300, deadline=None, database=None, report_multiple_bugs=False)
    @settings(**how, phases=[Phase.generate])
    @given(cases)
    def run(c):
        check(attention, c)
    with pytest.raises((AssertionError,ValueError)):
        run()
