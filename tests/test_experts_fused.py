"""Experts by tensor cores, 1 to 8 rows a launch: what the host says, and the same bits in any company, from any number of blocks.

Nets, and both halves in one launch on the emulator, are those of test_experts.py."""
import functools,re,shutil,subprocess
import numpy as np,pytest
import atlas.card.card as card,atlas.card.launch,test_experts as T
from dataclasses import replace
from types import SimpleNamespace as NS
from unittest.mock import patch
from atlas.card.card import _params,limits
from atlas.card.emulator import Emulator,find_cxx

from atlas.card.launch import OPTIONS,Source,find_nvcc,kernel_dir,options_of
from atlas.card.variants import CARDS
from atlas.cuda import experts_fused as F
from atlas.cuda.experts_fused import moe_fused
from atlas.ground.config import ModelConfig
from helpers.nvcc import built
from test_experts import FORMATS,MIXTURES,NETS,Net,bank,same

needs_nvcc = pytest.mark.skipif(not find_nvcc(), reason='no nvcc')
needs_cxx = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')

class Fused(Net):
    "A mixture whose experts are multiplied by experts_fused.cu"
    def __call__(self, x, add, **kw):
        with patch.object(T, 'moe', moe_fused): return super().__call__(x, add, **kw)

# a unit of the second half for each warp, which then waits for nobody
ALONE = dict(H=96, I=512, experts=8, top=3, fmt='NVFP4', shared=2)
MORE = dict(alone=ALONE, shared=ALONE|dict(H=1056, experts=5)) # and teams of four before those of two

@pytest.fixture(scope='module')
def nets(): return {k: Fused(i, Emulator(), **kw) for i,(k,kw) in enumerate((NETS|MORE).items())}

def together(run):
    "`run` with both halves in the second launch, which finds the hidden values of all blocks"
    def _run(name, *a, **kw):
        if name=='experts_fused' and a[-3]==2: a = (*a[:-3],3,*a[-2:])
        run(name, *a, **kw)
    return _run

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
        m.setattr(F, 'run', together(F.run))
        for b in (1,7): assert same(net(x, add, blocks=b), got), f'{b} blocks, both halves in a launch'

@needs_cxx
@pytest.mark.parametrize('name,rows', [('qwen',8), ('oss',3), ('nemotron',2), ('mixed',1), ('integers',5),
    ('alone',1), ('alone',4), ('shared',1)])
def test_a_mixture(name, rows, nets, monkeypatch): check(nets[name], rows, monkeypatch)

@pytest.fixture
def late(tmp_path, monkeypatch):
    "Warps of experts_fused.cu come late, each by a time of its own, wherever they wait for copies or for each other; and every other one is slow afterwards"
    root,put = tmp_path/'kernels',monkeypatch.setattr
    shutil.copytree(kernel_dir(), root)
    p = root/'experts_fused.cu'
    def pause(n): return f'for (int i = 0; i < {n}; i++) {{ emu::progress++; emu::yield(); }}'
    early,after = pause('8 * (warp * 7 % 5) + (warp == 6 ? 300 : 0)'),pause('(warp % 2 ? 0 : 90)')
    text,n = re.subn(r'^ +(?:stage|cp_async_wait|sync_warps)<', rf'{early}\n\g<0>', p.read_text(), flags=re.M)
    text,m = re.subn(r'^ +sync_warps<.*;', rf'\g<0>\n{after}', text, flags=re.M)
    assert (n,m)==(6,2)
    p.write_text(text)
    put(atlas.card.launch, 'kernel_dir', lambda: root)
    put(card, '_variants', {})
    put(card, '_ready', functools.cache(card._ready.__wrapped__))

@needs_cxx
@pytest.mark.parametrize('name,rows', [('qwen',2), ('alone',1), ('shared',1)])
def test_warps_that_come_late(name, rows, late, nets):
    "wait for what they need of each other, and nobody overtakes them"
    n = nets[name]
    x,add = n.x[:rows],n.add[:rows]
    with patch.object(n, 'card', Emulator()), patch.object(F, 'run', together(F.run)):
        y,ids,w = n(x, add, blocks=max(7, n.H//16)) # 16 outputs each
    want,wids,_ = n.host(x)
    assert np.array_equal(ids, wids)
    assert (abs(y-add-want).max(1)<=4e-3*abs(want).max(1)).all()

@needs_cxx
def test_a_block_with_little_room(nets, monkeypatch):
    "has fewer warps, places and rows, and the same bits; more rows than it takes come one launch after the other"
    n,took = nets['oss'],[]
    alone = [n(n.x[i:i+1], n.add[i:i+1]) for i in range(9)]
    run = F.run
    def counted(name, *a, **kw):
        if name=='experts_fused': took.append(kw)
        run(name, *a, **kw)
    monkeypatch.setattr(F, 'run', counted)
    monkeypatch.setattr(F, 'limits', lambda card: replace(limits(card), block=46<<10, third=0, alone=0))
    assert same(n(n.x, n.add), [np.concatenate(a) for a in zip(*alone)])
    assert took[0]['ROWS']<8 and took[0]['DEEP']==1 and len(took)==2*-(-9//took[0]['ROWS'])

@needs_cxx
def test_rows_that_are_no_numbers(nets):
    "leave their neighbours alone, though each expert is multiplied by all rows"
    n = nets['qwen']
    x,add = n.x[:8].copy(),n.add[:8]
    good = n(x, add)
    for i,v in enumerate((np.nan,np.inf,3e38)):
        bad = x.copy()
        bad[i,7] = v
        y,ids,w = got = n(bad, add)
        rest = np.arange(8)!=i
        assert same([a[rest] for a in got], [a[rest] for a in good])
        assert ((ids>=0)&(ids<n.E)).all() and (v==v or np.isnan(y[i]).all())

# Shapes of every family

def plans(name, formats=FORMATS, rows=range(1, 9)):
    "What `_plan` says of a model in each format, on each card, for 1 to 8 rows"
    c = ModelConfig.preset(name)
    m,H,I,pair = c.moe,c.hidden_size,c.moe.intermediate_size,c.act!='relu2'
    for up,down in formats:
        for arch,a in CARDS.items():
            for r in rows:
                for shared in {False, m.shared_size==I}:
                    n = m.num_experts+shared
                    banks = bank(up, I*(1+pair), H, n, pair),bank(down, H, I, n)
                    card,sms = NS(arch=arch, **a),a['multiprocessors']
                    how = c.act,True,shared,False,m.correction,r,sms
                    yield arch,sms,*banks,*F._plan(card, H, *banks, m, *how)

@pytest.mark.parametrize('name', MIXTURES)
def test_every_block_has_a_place(name):
    "Blocks wait for each other: there are no more than multiprocessors, one of each fits, and all outputs belong to somebody"
    for arch,sms,up,down,d,blocks in plans(name):
        large = arch=='sm_90a'
        assert blocks<=sms and d['ROOM']<=(227 if large else 99)<<10
        assert d['ROOM']>(114 if large else 50)<<10
        assert d['ROWS']<=d['WARPS'] and d['WARPS']%4==0 and d['WARPS']<=24 and d['DEEP']>=1
        assert blocks*d['SPAN']>=d['HIDDEN'] and d['SPAN']%4==0
        assert d['WARPS']//F._split(down, 2)<=15 or F._split(down, 2)==1, 'barriers of a block'

def size_of(d, room):
    "Does g++ find that `Shared` has at most `room` bytes?"
    d = options_of(d|dict(ROOM=room))
    own = f'-I{kernel_dir()}',f'-I{kernel_dir()}/emulator','-include','emulate.h'
    cxx = find_cxx(),'-fsyntax-only','-x','c++','-std=c++17','-w','-fpermissive','-DATLAS_EMULATE'
    r = subprocess.run([*cxx, *own, *d, f'{kernel_dir()}/experts_fused.cu'], capture_output=True, text=True)
    assert not r.returncode or 'see the contract' in r.stderr, r.stderr
    return not r.returncode

@needs_cxx
@pytest.mark.parametrize('name,i', [
    ('qwen3.6-35b-a3b',0), ('gpt-oss-20b',1), ('nemotron-3-nano-30b-a3b',2),
    ('gemma-4-26b-a4b',3), ('minimax-m2',4), ('granite-4.0-h-tiny',5)])
def test_bytes_are_those_of_the_struct(name, i):
    found = list(plans(name))
    _,_,up,down,d,_ = found[np.random.default_rng(i).integers(len(found))]
    need = F._bytes(d, up, down)
    assert need<=d['ROOM'] and size_of(d, need), (need,d)
    assert not size_of(d, need-65), 'much more than is needed'

@needs_nvcc
@pytest.mark.parametrize('name,fmt,rows,arch', [
    ('qwen3.6-35b-a3b','nvfp4',8,'sm_90a'), ('gpt-oss-20b','mxfp4',8,'sm_90a'),
    ('qwen3-30b-a3b','int4',1,'sm_90a'), ('qwen3.6-35b-a3b','bf16',8,'sm_121a')])
def test_spills_nothing(name, fmt, rows, arch, cache):
    *_,d,_ = [p for p in plans(name, [(fmt,fmt)], [rows]) if p[0]==arch][-1]
    said = built(cache, 'experts_fused', arch, (*OPTIONS, *options_of(d))).said
    assert re.findall(r'(\d+) bytes stack frame, (\d+) bytes spill stores', said)==[('0','0')], said

@needs_cxx
@pytest.mark.parametrize('name,rows', [('qwen',8), ('mixed',1), ('nemotron',9)])
def test_hidden_values_are_empty_before(name, rows, nets, monkeypatch):
    "The router empties what the launch after it waits for, and no more blocks wait than can run"
    n,emptied,run = nets[name],[],F.run
    def seen(name, grid, block, *a, **kw):
        if name=='experts_fused' and a[-3]==1:
            h = n.card.download(a[kernel.index('h')])
            emptied.append((h.view('u4')==0xFFFFFFFF).all())
        run(name, grid, block, *a, **kw)
    kernel = _params(Source('experts_fused').text, 'experts_fused')
    monkeypatch.setattr(F, 'run', seen)
    n(np.resize(n.x, (rows,n.H)), np.resize(n.add, (rows,n.H)))
    assert emptied==[True]*-(-rows//8)
