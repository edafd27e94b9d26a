"""Experts by tensor cores, 1 to 8 rows a launch: what the host says, and the same bits in any company, from any number of blocks.

Nets, and both halves in one launch on the emulator, are those of test_experts.py."""
from dataclasses import replace
from types import SimpleNamespace as NS
from unittest.mock import patch
import subprocess
import numpy as np,pytest
import test_experts as T
from atlas.card.card import limits
from atlas.card.emulator import Emulator,find_cxx
from atlas.card.launch import kernel_dir,options_of
from atlas.cuda import experts_fused as F
from atlas.cuda.experts_fused import moe_fused
from atlas.ground.config import ModelConfig
from test_experts import NETS,Net,same

needs_cxx = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')

class Fused(Net):
    "A mixture whose experts are multiplied by experts_fused.cu"
    def __call__(self, x, add, **kw):
        with patch.object(T, 'moe', moe_fused): return super().__call__(x, add, **kw)

@pytest.fixture(scope='module')
def nets(): return {k: Fused(i, Emulator(), **kw) for i,(k,kw) in enumerate(NETS.items())}

def together(run, card):
    "`run` with both halves in a launch: what the first of two writes, but for hidden values, is thrown away"
    both = T.together(lambda name, *a, **kw: run('experts_fused' if name=='experts' else name, *a, **kw), card)
    return lambda name, *a, **kw: both('experts' if name=='experts_fused' else name, *a, **kw)

def check(net, rows, monkeypatch):
    "What the host says; the same bits alone, in another order, from any number of blocks, and with both halves in one launch"
    x,add = net.x[:rows].copy(),net.add[:rows]
    x[rows//2] = x[0]  # two rows with the same picks
    got = y,ids,w = net(x, add)
    want,wids,ww = net.host(x)
    assert np.array_equal(ids, wids) and abs(w-ww).max()<=4e-6*abs(ww).max()
    assert (abs(y-add-want).max(1)<=4e-3*abs(want).max(1)).all()
    r = np.random.default_rng(rows)
    one,p = int(r.integers(rows)),r.permutation(rows)
    assert same(net(x[one:one+1], add[one:one+1]), [a[one:one+1] for a in got])
    assert same(net(x[p], add[p]), [a[p] for a in got])
    assert same(net(x, add, blocks=3, then=net.down), got)
    with monkeypatch.context() as m:
        m.setattr(F, 'run', together(F.run, net.card))
        for b in (1,7): assert same(net(x, add, blocks=b), got), f'{b} blocks, both halves in a launch'

@needs_cxx
@pytest.mark.parametrize('name,rows', [('qwen',8), ('oss',3), ('nemotron',2), ('mixed',1), ('integers',5)])
def test_a_mixture(name, rows, nets, monkeypatch): check(nets[name], rows, monkeypatch)
