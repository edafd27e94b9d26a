"""Experts of many rows: what the host says, the same bits in any company, and slots that hold what they should."""
import numpy as np,pytest
import test_experts
from atlas.card.emulator import Emulator,find_cxx
from atlas.cuda import experts_wide as W
from atlas.cuda.experts_wide import moe_wide
from test_experts import NETS,Net

pytestmark = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')

MORE = dict(
    floats=dict(H=64, I=40, experts=6, top=2, fmt='F16', down='F32', shared=1),
    channels=dict(H=544, I=288, experts=5, top=2, fmt='FP8_CHANNEL', score='sigmoid', correction=True))

@pytest.fixture(scope='module')
def nets(): return {k: Net(i, Emulator(), **kw) for i,(k,kw) in enumerate((NETS|MORE).items())}

@pytest.fixture(autouse=True)
def wide(monkeypatch): monkeypatch.setattr(test_experts, 'moe', moe_wide)

def rows_of(net, R):
    "Rows of very different sizes: some the same, which pick the same experts, and others"
    rng = np.random.default_rng(R)
    x,add = (rng.standard_normal((R,net.H), dtype='f4') for _ in 'xa')
    x *= np.exp(2*rng.standard_normal((R,1), dtype='f4'))
    x[R//2:R//2+R//3] = x[0]
    return x,add

def same(a, b): return all(map(np.array_equal, a, b))

def check(net, R):
    "What the host says; the same bits alone, in another order, in fewer rows, and from any number of blocks"
    x,add = rows_of(net, R)
    got = y,ids,w = net(x, add)
    want,wids,ww = net.host(x)
    assert np.array_equal(ids, wids) and abs(w-ww).max()<=4e-6*abs(ww).max()
    assert (abs(y-add-want).max(1)<=4e-3*abs(want).max(1)).all()
    rng = np.random.default_rng(R)
    for n in (1, 2, R//2+1, R):
        p = rng.permutation(R)[:n]
        assert same(net(x[p], add[p]), [a[p] for a in got]), f'{n} rows'
    for b in (1, 3, 40): assert same(net(x, add, blocks=b, then=net.down), got), f'{b} blocks'

CASES = [('qwen',20), ('oss',33), ('nemotron',9), ('mixed',10), ('integers',17), ('floats',12), ('channels',70)]

@pytest.mark.parametrize('name,rows', CASES)
def test_a_mixture(name, rows, nets): check(nets[name], rows)
