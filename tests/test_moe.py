"""Routing and experts held to their definitions, and to the promise that no row's bits depend
on its company.

Each check takes the function it judges, so that the last test can hand it a broken one and
see it refuse."""
import inspect,math
import numpy as np,pytest
from itertools import product
from hypothesis import Phase,given,settings,strategies as st
from atlas.ground.formats import QTensor
from atlas.ops import moe
from atlas.ops.linear import TILE
from atlas.ops.moe import experts,route

few = settings(max_examples=40, deadline=None)
def floats(rng, *shape): return rng.standard_normal(shape, dtype='f4')

# Routing

def eighths(draw, n, lo, hi):
    "`n` of lo/8 to hi/8"
    some = draw(st.lists(st.integers(lo, hi), min_size=n, max_size=n))
    return np.array(some, 'f4')/8

@st.composite
def ways(draw, E):
    "How `route` scores and weighs `E` experts"
    kw = dict(
        score=draw(st.sampled_from(['softmax','sigmoid','topk_softmax'])),
        renormalise=draw(st.booleans()),
        scaling=draw(st.sampled_from([1.,2.5])))
    if draw(st.booleans()):
        kw['bias'] = eighths(draw, E, -40, 40)
    if kw['score']=='sigmoid' and draw(st.booleans()):
        kw['correction'] = eighths(draw, E, -8, 8)
    if draw(st.booleans()):
        kw['per_expert'] = eighths(draw, E, 1, 16)
    return kw

@st.composite
def routers(draw):
    """x [R,1] of ones and twos, w [E,1] in eighths, so that logits are exact and ties are common;
    and the other arguments of `route`"""
    E = draw(st.integers(1, 40))
    k = draw(st.integers(1, E))
    R = draw(st.integers(1, 5))
    kw = draw(ways(E))
    x = eighths(draw, R, 8, 16)
    w = eighths(draw, E, -80, 80)
    return x[:,None],w[:,None],k,kw

def scores(l, score):
    "What logits `l` of a row score, in float64"
    if score=='sigmoid':
        return [1/(1+math.exp(-v)) for v in l]
    s = [math.exp(v-max(l)) for v in l]
    total = sum(s)
    return [v/total for v in s] if score=='softmax' else s

def picked_by(x, w, score, bias=None, correction=None):
    "Scores of a row, and what its experts are picked by"
    def of(a, e): return 0 if a is None else float(a[e])
    l = [float(x[0]*r[0])+of(bias, e) for e,r in enumerate(w)]
    s = scores(l, score)
    if score=='topk_softmax':
        return s,l
    return s,[v+of(correction, e) for e,v in enumerate(s)]

def define(
    x, w, k, score='softmax', bias=None, correction=None, renormalise=True, scaling=1.,
    per_expert=None):
    """The definition for one row: plain Python, float64 for the weights

    Scores to pick by are compared in float32, where equal means equal."""
    s,by = picked_by(x, w, score, bias, correction)
    ids = sorted(range(len(w)), key=lambda e: (-by[e],e))[:k]
    g = [s[e] for e in ids]
    norm = sum(g) if renormalise or score=='topk_softmax' else 1
    factors = [1]*len(w) if per_expert is None else per_expert.tolist()
    return by,ids,[v/norm*scaling*factors[e] for e,v in zip(ids, g)]

def check_picks(i, ref, by):
    "Picks `i` of a row, where the definition has `ref` by scores `by`"
    assert len(set(i))==len(ref)
    got,best = [by[e] for e in i],[by[e] for e in ref]
    # float32 may see a tie where float64 sees a hair's breadth, never more
    assert np.allclose(got, best, rtol=0, atol=3e-6), 'not the best'
    ties = [(a,b) for a,b in zip(i, i[1:]) if by[a]==by[b]]
    assert all(a<b for a,b in ties), 'of equals, the lower id comes first'
    before = [e for e in range(i[-1]) if by[e]==got[-1]]
    assert all(e in i for e in before), 'of equals, the lower id is picked'

def normed(renormalise, score, per_expert=None, **kw):
    "Is the sum of a row's weights known?"
    return per_expert is None and (renormalise or score=='topk_softmax')

def check_route(route, x, w, k, kw):
    ids,g = route(x, w, k, **kw)
    assert (ids.dtype,g.dtype)==(np.int32,np.float32)
    assert ids.shape==g.shape==(len(x),k)
    for row,i,gi in zip(x, ids.tolist(), g):
        by,ref,rg = define(row, w, k, **kw)
        check_picks(i, ref, by)
        if i==ref:
            np.testing.assert_allclose(gi, rg, rtol=1e-5, atol=1e-30)
    if normed(**kw):
        np.testing.assert_allclose(g.sum(-1), kw['scaling'], rtol=1e-5)

@few
@given(routers())
def test_route_is_its_definition(case):
    check_route(route, *case)

def nearly_equal(by):
    "Are two of these scores the same, or hardly apart?"
    by = np.sort(np.float32(by))
    return len(by)>1 and np.diff(by).min()<1e-6

def reordered(kw, order):
    "Arguments of `route`, with experts in another order"
    return {n:a[order] if isinstance(a, np.ndarray) else a for n,a in kw.items()}

@few
@given(routers(), st.randoms(use_true_random=False))
def test_experts_can_be_renumbered(case, random):
    """Experts in another order are picked all the same, with the same weights, unless equals
    are told apart by number"""
    *given,kw = case
    x,w,k = given
    p = list(range(len(w)))
    random.shuffle(p)
    moved = reordered(kw, p)
    ids,g = route(x, w, k, **kw)
    ids2,g2 = route(x, w[p], k, **moved)
    ids2 = np.array(p)[ids2]
    for r,row in enumerate(x):
        by = define(row, w, k, **kw)[0]
        if nearly_equal(by):
            continue
        assert ids[r].tolist()==ids2[r].tolist()
        np.testing.assert_allclose(g[r], g2[r], rtol=1e-5, atol=1e-30)

@pytest.mark.parametrize('score', moe.SCORES)
def test_logits_far_out(score):
    "Logits as large as float32 holds leave finite weights"
    one = np.ones((1,1), 'f4')
    for s in (0,1e-30,1,10,100,1e30):
        w = np.float32([-s, s, 0, 2*s, -2*s])
        ids,g = route(one, w[:,None], 3, score)
        assert abs(g.sum()-1)<1e-5 and (g>=0).all()
        if 1<=s<=10:
            assert ids.tolist()==[[3,1,2]]

# Experts

class Net:
    "A router, its experts, and rows for them"
    def __init__(self, seed, E=9, k=3, H=20, I=12, R=2*TILE, act='silu', bias=False):
        rng = np.random.default_rng(seed)
        n = I*(1+(act!='relu2'))
        self.k,self.act = k,act
        self.w = floats(rng, E, H)
        self.x = floats(rng, R, H)
        self.up,self.down = floats(rng, E, n, H),floats(rng, E, H, I)
        self.bu,self.bd = (floats(rng, E, n),floats(rng, E, H)) if bias else (None,None)
        self.rng = rng

    def run(self, experts, x, ids, g, **kw):
        "What experts `ids` make of rows `x`, weighed by `g`"
        return experts(x, ids, g, self.up, self.down, self.act, 1.5, self.bu, self.bd, **kw)

    def moved(self, order):
        "Put its experts into another order"
        self.up,self.down = self.up[order],self.down[order]
        if self.bu is not None:
            self.bu,self.bd = self.bu[order],self.bd[order]

    def __call__(self, experts, x, **kw):
        ids,g = route(x, self.w, self.k, 'sigmoid')
        return self.run(experts, x, ids, g, **kw)

ACTS = ['silu','gelu_tanh','swiglu_oai','relu2']
nets = st.builds(
    Net,
    st.integers(0, 2**32),
    E=st.integers(3, 40),
    k=st.integers(1, 3),
    H=st.integers(1, 70),
    I=st.integers(1, 40),
    act=st.sampled_from(ACTS),
    bias=st.booleans())

def tiled(x, start=0, fill=7.):
    "Rows of a prompt, the first at `start`, in tiles; which of the places are real"
    n = start%TILE+len(x)
    T = -(-n//TILE)
    out = np.full((T*TILE,x.shape[1]), fill, 'f4')
    real = np.zeros(T*TILE, bool)
    real[start%TILE:n] = True
    out[real] = x
    return out.reshape(T,TILE,-1),real.reshape(T,TILE)

def check_company(experts, net):
    """A row's bits: alone, in any subset and order, in a tile at any place, with or without
    neighbours, with broken ones"""
    x,y = net.x,net(experts, net.x)
    for n in (1,2,9):
        p = net.rng.permutation(len(x))[:n]
        assert np.array_equal(net(experts, x[p]), y[p])
    p = net.rng.permutation(len(x))[:7]
    bad = x.copy()
    bad[p] = np.nan
    z = net(experts, bad)
    assert np.array_equal(np.delete(z, p, 0), np.delete(y, p, 0)), 'a broken row spread'
    assert np.isnan(z[p]).all()

def chunk(net, a, b, ids, g):
    "Rows a to b in tiles, their picks and weights, and which places are real"
    x,real = tiled(net.x[a:b], a)
    shape = *real.shape,net.k
    some = np.zeros(shape, np.int32)  # padding picks something too
    weights = np.ones(shape, 'f4')
    some[real] = ids.reshape(-1, net.k)[a:b]
    weights[real] = g.reshape(-1, net.k)[a:b]
    return x,some,weights,real

def check_chunks(experts, net):
    "A prompt in tiles, cut anywhere: the routing of a row is its tile's, its experts are its own"
    x,_ = tiled(net.x)
    ids,g = route(x, net.w, net.k)
    whole = net.run(experts, x, ids, g).reshape(len(net.x), -1)
    for cut in (1, 63, 64, 70, 127):
        for a,b in ((0,cut),(cut,len(net.x))):
            *part,real = chunk(net, a, b, ids, g)
            y = net.run(experts, *part, real=real)
            assert np.array_equal(y[real], whole[a:b])
            assert not y[~real].any(), 'padding was computed'

def sig(v): return 1/(1+np.exp(-v))

def bent(act, u, L=1.5):
    "What an activation makes of gate and up, in float64"
    if act=='relu2':
        return np.maximum(u, 0)**2
    a,c = np.split(u, 2)
    if act=='silu':
        return a*sig(a)*c
    if act=='gelu_tanh':
        return a/2*(1+np.tanh((2/np.pi)**.5*(a+.044715*a**3)))*c
    a = np.minimum(a, L)
    return a*sig(1.702*a)*(np.clip(c, -L, L)+1)

def expert_of(net, e, row):
    "What expert `e` makes of a row, in float64"
    u = net.up[e].astype('f8')@row
    if net.bu is not None:
        u = u+net.bu[e]
    y = net.down[e]@bent(net.act, u)
    return y if net.bd is None else y+net.bd[e]

def check_sum(experts, net):
    "The weighted sum, in float64"
    x = net.x[:8]
    ids,g = route(x, net.w, net.k, 'sigmoid')
    y = net(experts, x)
    for r,row in enumerate(x):
        ref = 0
        for e,w in zip(ids[r], g[r].astype('f8')):
            ref = ref+w*expert_of(net, e, row)
        atol = 1e-5*max(1, abs(ref).max())
        np.testing.assert_allclose(y[r], ref, rtol=1e-4, atol=atol)

@few
@given(nets)
def test_rows_in_company(net):
    check_company(experts, net)

@few
@given(nets)
def test_chunks(net):
    check_chunks(experts, net)

@few
@given(nets)
def test_weighted_sum(net):
    check_sum(experts, net)

@few
@given(nets, st.randoms(use_true_random=False))
def test_renumbered(net, random):
    "Experts in another order make the same sum, but for its order of addition"
    x = net.x[:6]
    ids,g = route(x, net.w, net.k)
    y = net.run(experts, x, ids, g)
    p = list(range(len(net.w)))
    random.shuffle(p)
    back = np.argsort(p).astype(np.int32)
    net.moved(p)
    z = net.run(experts, x, back[ids], g)
    np.testing.assert_allclose(y, z, rtol=1e-4, atol=1e-5*max(1, abs(y).max()))

@pytest.mark.parametrize('value', [np.nan,np.inf,-np.inf])
def test_broken_input(value):
    """One number that is not finite makes a row that is not finite, raises nothing, and leaves
    the other rows alone"""
    net = Net(3)
    y = net(experts, net.x)
    bad = net.x.copy()
    bad[11,4] = value
    with np.errstate(all='ignore'):
        z = net(experts, bad)
        t,real = tiled(bad)
        zt = net(experts, t)[real]
    assert not np.isfinite(z[11]).any()
    assert np.array_equal(np.delete(z, 11, 0), np.delete(y, 11, 0))
    assert not np.isfinite(zt[11]).any()
    assert np.isfinite(np.delete(zt, 11, 0)).all()

class Counted:
    "A stack of experts that counts how often each is taken"
    def __init__(self, q):
        self.q,self.taken = q,[]

    def __getitem__(self, e):
        self.taken.append(e)
        return self.q[e]

def packed(experts, fmt):
    return experts if fmt is None else [QTensor.encode(e, fmt) for e in experts]

def decoded(experts, fmt):
    return experts if fmt is None else [e.decode() for e in experts]

@pytest.mark.parametrize('fmt', [None,'BF16','FP8_BLOCK','MXFP4','NVFP4'])
def test_each_expert_is_read_once(fmt):
    "However many rows use it, in rows and in tiles; packed experts give the bits of decoded ones"
    net = Net(5, H=64, I=32, k=2, R=80)
    up,down = packed(net.up, fmt),packed(net.down, fmt)
    plain = decoded(up, fmt),decoded(down, fmt)
    for x in (net.x, tiled(net.x)[0]):
        ids,g = route(x, net.w, 2)
        counted = Counted(up),Counted(down)
        y = experts(x, ids, g, *counted)
        taken = np.unique(ids).tolist()
        assert [c.taken for c in counted]==[taken,taken]
        assert np.array_equal(y, experts(x, ids, g, *plain))

def test_nothing_to_do():
    net = Net(1)
    for x in (net.x[:0], tiled(net.x)[0][:0]):
        assert net(experts, x).shape==x.shape
    x,real = tiled(net.x)
    assert not net(experts, x, real=np.zeros_like(real)).any()
    assert np.array_equal(net(experts, x, real=np.zeros_like(real), add=x), x)

# The checks above can fail

def broken(f, old, new):
    "`f` with a piece of its source exchanged, or of what sorts picks for it"
    src = ''.join(map(inspect.getsource, (moe.picks_by_expert,f)))
    assert src.count(old)==1, (old,src.count(old))
    ns = dict(vars(moe))
    exec(src.replace(old, new), ns)
    return ns[f.__name__]

def some(check, g):
    @settings(max_examples=200, deadline=None, database=None, phases=[Phase.generate],
        report_multiple_bugs=False)
    @given(routers())
    def run(case):
        check(g, *case)
    return run

ROUTING_FAULTS = [
    # the correction is forgotten
    ("-(s+correction)", "-s"),
    # and the other way, weighed in
    ("np.take_along_axis(s, ids, -1)",
        "np.take_along_axis(s if correction is None else s+correction, ids, -1)"),
    # of equals, the higher id
    ("-s if correction is None else -(s+correction), -1, kind='stable')",
        "s if correction is None else s+correction, -1, kind='stable')[...,::-1]"),
    ("/= g.sum(-1, keepdims=True)+1e-20", "/= s.sum(-1, keepdims=True)"),
    ("elif renormalise:", "else:"),
    ("if scaling!=1", "if False"),
    ("if per_expert is not None", "if False"),
    ("linear(x, w, bias)", "linear(x, w)")]

@pytest.mark.parametrize('old,new', ROUTING_FAULTS)
def test_faults_in_routing_are_seen(old, new):
    with pytest.raises(AssertionError):
        some(check_route, broken(route, old, new))()

FAULTS = [
    # shapes that depend on company
    (check_company, "linear(h, down[e], of(down_bias, e))",
        "(h@down[e].T+(0 if down_bias is None else down_bias[e]))"),
    # a sum over company
    (check_company, "y[r] +=", "y[r] += 1e-7*rows[r].sum()+"),
    (check_chunks, "if real is not None:", "if False:"),
    (check_sum, "weights[picks]*", ""),
    (check_sum, "of(down_bias, e)", "None"),
    (check_sum, "of(gate_up_bias, e)", "None"),
    (check_sum, "act, limit)", "act, 7.)"),
    # a pick is lost
    (check_sum, "kind='stable')", "kind='stable')[:-1]")]

@pytest.mark.parametrize('check,old,new', FAULTS)
def test_faults_in_experts_are_seen(check, old, new):
    bad = broken(experts, old, new)
    R = 8 if check==check_sum else 2*TILE
    with pytest.raises(AssertionError):
        for i,act in product(range(3), ('silu','swiglu_oai')):
            check(bad, Net(i, act=act, bias=True, E=4, H=64, I=48, R=R))
