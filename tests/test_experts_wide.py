"""Experts of many rows: what the host says, the same bits in any company, and slots that hold
what they should."""
import subprocess
import numpy as np,pytest
from dataclasses import replace
from types import SimpleNamespace as NS
import test_experts
from atlas.card import card
from atlas.card.emulator import Emulator,find_cxx
from atlas.card.card import _params,limits
from atlas.card.launch import Source,kernel_dir,options_of
from atlas.card.variants import CARDS
from atlas.cuda import experts_wide as W,gemv as G
from atlas.cuda.experts import Mixture
from atlas.cuda.experts_wide import moe_wide
from atlas.cuda.pack import pack
from atlas.ground.config import MoEConfig,ModelConfig
from atlas.ground.formats import QTensor
from test_experts import NETS,Net,bank
from test_races import overlap

pytestmark = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')

# both halves in one launch
WHOLE = dict(H=1024, I=256, experts=24, top=3, fmt='NVFP4', shared=2)
MORE = dict(
    whole=WHOLE,
    beside=WHOLE|dict(I=512, experts=9, top=1, fmt='MXFP4', act='relu2', shared=0, biases=True),
    zeros=WHOLE|dict(H=2048, experts=8, top=1, fmt='INT4', act='swiglu_oai', limit=1.5,
        score='topk_softmax', bias=True, shared=1),
    floats=dict(H=64, I=40, experts=6, top=2, fmt='F16', down='F32', shared=1),
    channels=dict(H=544, I=288, experts=5, top=2, fmt='FP8_CHANNEL', score='sigmoid',
        correction=True))

@pytest.fixture(scope='module')
def nets(): return {k: Net(i, Emulator(), **kw) for i,(k,kw) in enumerate((NETS|MORE).items())}

@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setattr(test_experts, 'moe', moe_wide)

def rows_of(net, R):
    "Rows of very different sizes: some the same, which pick the same experts, and others"
    rng = np.random.default_rng(R)
    x,add = (rng.standard_normal((R,net.H), dtype='f4') for _ in 'xa')
    x *= np.exp(2*rng.standard_normal((R,1), dtype='f4'))
    x[R//2:R//2+R//3] = x[0]
    return x,add

def same(a, b): return all(map(np.array_equal, a, b))

def check(net, R):
    """What the host says; the same bits alone, in another order, in fewer rows, and from any
    number of blocks"""
    x,add = rows_of(net, R)
    got = y,ids,w = net(x, add)
    want,wids,ww = net.host(x)
    assert np.array_equal(ids, wids) and abs(w-ww).max()<=4e-6*abs(ww).max()
    assert (abs(y-add-want).max(1)<=4e-3*abs(want).max(1)).all()
    rng = np.random.default_rng(R)
    for n in (1, 2, R//2+1, R):
        p = rng.permutation(R)[:n]
        assert same(net(x[p], add[p]), [a[p] for a in got]), f'{n} rows'
    for b in (1, 3, 40):
        assert same(net(x, add, blocks=b), got), f'{b} blocks'

CASES = [
    ('qwen',11),
    ('oss',33),
    ('nemotron',9),
    ('mixed',9),
    ('integers',17),
    ('floats',12),
    ('whole',15),
    ('beside',11),
    ('zeros',10),
    ('channels',24)]

@pytest.mark.parametrize('name,rows', CASES)
def test_a_mixture(name, rows, nets):
    check(nets[name], rows)

def apart(monkeypatch):
    monkeypatch.setattr(W, '_whole', lambda *a: None)

def together(run):
    "`run` with both halves in the second launch, which finds the hidden values of all blocks"
    def _run(name, *a, **kw):
        if name=='experts_wide' and a[-1]==2:
            a = (*a[:-1],3)
        run(name, *a, **kw)
    return _run

@pytest.mark.parametrize('rows', [1,9,16,40])
def test_one_launch_has_the_bits_of_two(rows, nets, monkeypatch):
    "On few blocks and many"
    net,used,run = nets['whole'],set(),together(W.run)
    monkeypatch.setattr(W, '_likely', lambda *a: 8)
    x,add = rows_of(net, rows)
    def noted(name, *a, **kw): used.add(name); run(name, *a, **kw)
    monkeypatch.setattr(W, 'run', noted)
    got = [net(x, add, blocks=b) for b in (1,5,40)]
    assert used=={'router','experts_wide','expert_sum'}
    apart(monkeypatch)
    want = net(x, add)
    assert 'expert_strips' in used and all(same(g, want) for g in got)

@pytest.mark.parametrize('rows', [9,40])
def test_words_that_blocks_give_are_empty_before(rows, nets, monkeypatch):
    "The router empties all that a block may wait for: hidden values, and who is picked"
    net,run,empty = nets['whole'],W.run,[]
    monkeypatch.setattr(W, '_likely', lambda *a: 8)
    first,kernel = [_params(Source(k).text, k) for k in ('router','experts_wide')]
    def seen(name, grid, block, *a, **kw):
        if name=='router':
            a[first.index('empty')].fill(0) # memory may happen to look so
        if name=='experts_wide' and a[-1]==1:
            words = [net.card.download(a[kernel.index(k)]) for k in ('h','picked')]
            empty.extend((w.view('u4')==0xFFFFFFFF).all() for w in words)
        run(name, grid, block, *a, **kw)
    monkeypatch.setattr(W, 'run', seen)
    net(*rows_of(net, rows))
    assert empty==[True,True]

@pytest.mark.parametrize('name,rows', [('qwen',11), ('integers',17), ('channels',24)])
def test_who_has_what_changes_no_bits(name, rows, nets, monkeypatch):
    "Rows of one slot staged or of two, on few blocks and many"
    net,got = nets[name],[]
    x,add = rows_of(net, rows)
    for buffers in (1,2):
        monkeypatch.setattr(W, 'BUFFERS', buffers)
        got += [net(x, add, blocks=b) for b in (1,7)]
    assert all(same(g, got[0]) for g in got)

def test_rows_that_are_no_numbers(nets):
    "leave their neighbours alone, in slots that they share with them"
    n = nets['qwen']
    x,add = rows_of(n, 12)
    good = n(x, add)
    for i,v in enumerate((np.nan,np.inf,-np.inf,3e38)):
        bad = x.copy()
        bad[i,7] = v
        y,ids,w = got = n(bad, add)
        rest = np.arange(12)!=i
        assert same([a[rest] for a in got], [a[rest] for a in good])
        assert ((ids>=0)&(ids<n.E)).all() and (v!=v)<=np.isnan(y[i]).all()

@pytest.mark.parametrize('R', [1,40,255,256,300])
def test_any_number_of_rows(R):
    "All rows pick the same experts, or each others; more rows than a launch takes come in two"
    n = Net(3, Emulator(), 32, 32, 12, 2, 'NVFP4', shared=2)
    x,add = rows_of(n, R)
    got = n(x, add)
    for some in ([0], [R-1], range(R//2, min(R//2+9, R))):
        some = list(some)
        assert same(n(x[some], add[some]), [a[some] for a in got])
    x[:] = x[0]
    y,ids,w = n(x, 0*add)
    assert (y==y[0]).all() and (ids==ids[0]).all() and (w==w[0]).all()

# The order of sums

@pytest.mark.parametrize('fmt', ['NVFP4','BF16','FP8_BLOCK','F32'])
def test_bits_of_a_linear_layer(fmt, monkeypatch):
    "One expert, and no norm: what gemv.cu makes of its two matrices, if as many warps share a row"
    c,m,(H,I) = Emulator(),MoEConfig(1, 1, 640),(1152,640)
    rng = np.random.default_rng(0)
    def bank(*s): return QTensor.encode(rng.standard_normal(s, dtype='f4')/s[-1]**.5, fmt)
    first,second = pack(bank(1, 2*I, H), c, pair=True),pack(bank(1, H, I), c)
    router = pack(rng.standard_normal((1,H), dtype='f4'), c, exact=True)
    x = c.upload(rng.standard_normal((5,H), dtype='f4'))
    got = moe_wide(x, None, 0., router, first, second, m, 'silu')
    def layer(x, p, shares, **kw):
        monkeypatch.setattr(G, 'plan', lambda f, n, k, sms: (8,shares,3,128//shares))
        return G.gemv(x, replace(p, experts=0), **kw)
    want = layer(layer(x, first, 4, act='silu'), second, 2)
    assert np.array_equal(c.download(got), c.download(want))
    other = layer(layer(x, first, 2, act='silu'), second, 2)
    assert not np.array_equal(c.download(got), c.download(other)), 'a test must be able to fail'

LOGITS = [('BF16',2048,37,40), ('BF16',2048,257,8), ('BF16',2880,9,9), ('F32',544,12,16), ('BF16',5120,5,11),
    ('BF16',320,257,9), ('F32',4096,170,8)]

@pytest.mark.parametrize('fmt,H,n,R', LOGITS)
def test_bits_of_logits(fmt, H, n, R):
    "Those of a row alone, in steps of few rows and of many"
    c,rng = Emulator(),np.random.default_rng(H)
    w = rng.standard_normal((n,H), dtype='f4')
    router = pack(QTensor.encode(w, fmt), c, exact=True)
    x = rng.standard_normal((R,H), dtype='f4')*np.exp(rng.standard_normal((R,1), dtype='f4'))
    gain,bias = (c.upload(rng.standard_normal(k, dtype='f4')) for k in (H,n-1))
    mix = Mixture(router, None, None, MoEConfig(n-1, 1, 8), 'silu', gain=gain, eps=1e-6, bias=bias)
    got,_ = W._logits(c.upload(x), mix, 132)
    size = got.shape[1]
    def few(first, end):
        y,empty = c.empty((end-first,size)),c.empty((end-first,1,4))
        test_experts.E._route(c.upload(x[first:end]), mix, y, 0, empty)
        return c.download(y)[:,:n]
    want = np.concatenate([few(r, r+1) for r in range(R)])
    assert np.array_equal(c.download(got)[:,:n], want)
    for rows in (2,3,5,8):
        assert np.array_equal(few(0, rows), want[:rows]), rows

# Kernels that start early

@pytest.fixture
def kept(monkeypatch):
    "Nobody gets memory that may still be hidden from kernels"
    kept,empty = [],Emulator.empty
    def keeping(*a, **kw): return kept.append(empty(*a, **kw)) or kept[-1]
    monkeypatch.setattr(Emulator, 'empty', keeping)

def twice(n):
    "Two calls after each other, the second with what the first one made"
    x,gain = (n.card.upload(a) for a in (rows_of(n, 20)[0],n.gain))
    for _ in 'ab':
        x = moe_wide(x, gain, 1e-6, n.router, n.up, n.down, n.m, n.act, shared=True,
            shared_gate=True, add=x)
    return n.card.download(x)

def test_nothing_is_read_before_it_is_written(overlap, kept):
    "Each kernel starts as early as it may, and finds 0xFF where others have yet to write"
    n = Net(0, Emulator(), **NETS['qwen'])
    overlap.on = True
    got = twice(n)
    assert {'router','expert_slots','expert_strips','expert_sum'}<=overlap.names
    overlap.on = False
    assert np.array_equal(got, twice(n))

def test_nothing_is_read_before_it_is_written_in_one_launch(overlap, kept):
    n = Net(0, Emulator(), **WHOLE|dict(experts=40))
    overlap.on = True
    got = twice(n)
    assert 'experts_wide' in overlap.names and 'expert_slots' not in overlap.names
    overlap.on = False
    assert np.array_equal(got, twice(n))

# Without the others somebody would look for slots anywhere
FORGOTTEN = [('expert_strips','if (!UP)\n        pdl_wait();'), ('expert_sum','pdl_wait();')]

@pytest.mark.parametrize('kernel,wait', FORGOTTEN)
def test_a_wait_that_is_forgotten_is_seen(kernel, wait, overlap, kept, tmp_path):
    n = Net(0, Emulator(), 32, 32, 12, 2, 'NVFP4', shared=2)
    want,p = twice(n),tmp_path/'kernels'/f'{kernel}.cu'
    text = p.read_text()
    assert text.count(wait)==1
    p.write_text(text.replace(wait, ''))
    card._variants.clear()
    card._ready.cache_clear()
    overlap.on = True
    with np.errstate(all='ignore'):
        got = twice(n)
    assert not np.array_equal(got, want)

# Slots

def listed(ids, E, shared, entries):
    "The list of slots, in plain Python"
    R,k = ids.shape
    who = {e: [r*(k+shared)+j for r in range(R) for j in range(k) if ids[r,j]==e] for e in range(E)}
    if shared:
        who = {E: [r*(k+1)+k for r in range(R)]}|who
    return [(e,a[i:i+entries]) for e,a in who.items() for i in range(0, len(a), entries)]

LISTS = [(1,5,2,1,8), (33,300,4,0,8), (256,40,16,1,16), (17,12,3,1,2), (16,256,8,1,8)]

@pytest.mark.parametrize('R,E,k,shared,entries', LISTS)
def test_slots(R, E, k, shared, entries):
    "Every pick has its place, by expert and row; the counter that tells the last block is 0 again"
    c,m = Emulator(),MoEConfig(E, k, 8)
    rng = np.random.default_rng(R)
    logits = rng.standard_normal((R,-(-(E+1)//4)*4), dtype='f4')
    logits[R//2:,3] += 9 # a favourite
    logits[1::3] = logits[1::3].round() # equal ones, of which the first come first
    ids,met = c.empty((R,k), 'int32'),c.upload(np.zeros(1, 'i4'))
    mix = Mixture(None, None, None, m, 'silu', shared=shared)
    _,slots = W._slots(c.upload(logits), mix, ids, None, entries, met)
    ids,(which,who,number) = c.download(ids),map(c.download, slots)
    want = np.argsort(-logits[:,:E], 1, kind='stable')[:,:k]
    assert np.array_equal(ids, want) and not c.download(met).any()
    n, = number
    got = [(e,who[:c]) for e,(c,*who) in zip(which[:n].tolist(), who.tolist())]
    assert got==listed(ids, E, shared, entries) and (which[n:]==-1).all()

# Variants

FORMATS = [
    ('nvfp4','nvfp4'),
    ('mxfp4','int4'),
    ('fp8','fp8'),
    ('bf16','f16'),
    ('f32','nvfp4')]

@pytest.mark.parametrize('name', test_experts.MIXTURES)
def test_every_shape_has_room(name):
    "Both halves have slots of the same size, and a block the memory for them"
    c = ModelConfig.preset(name)
    m,H,I = c.moe,c.hidden_size,c.moe.intermediate_size
    pair = c.act!='relu2'
    for up,down in FORMATS:
        for arch,a in CARDS.items():
            on = NS(arch=arch, **a)
            for R in (1,16,256):
                banks = bank(up, I*(1+pair), H, m.num_experts, pair),bank(down, H, I, m.num_experts)
                u,d = W._halves(on, *banks, c.act, True, m.top_k, W._likely(R, m))
                most = limits(on).block
                slots = W._most_slots(R, m, False, u['ENTRIES'])
                for o in (u,d):
                    span = -(-slots//a['multiprocessors'])+2
                    assert o['ROOM']+4*span*(u['ENTRIES']+2)<=most
                    assert o['ENTRIES']==u['ENTRIES'] and o['WARPS']*o['DEEP']>=4

@pytest.mark.parametrize('name', ['qwen','oss','integers'])
def test_rows_of_a_bucket_have_the_same_variants(name, nets, monkeypatch):
    "From one power of two to the next; beyond 16 rows copies bring more to the L2 cache"
    n,used = nets[name],[]
    monkeypatch.setattr(W, 'run', lambda name, *args, shared=0, **kw: used.append((name,kw)))
    def variants(R):
        used.clear()
        n(*rows_of(n, R))
        return used.copy()
    for most in (16,32,64,128,256):
        want = variants(most)
        for R in (most//2+1, most*3//4):
            assert variants(R)==want
        assert [kw['ASIDE'] for name,kw in want if name=='expert_strips']==2*[int(most>16)]

@pytest.mark.parametrize('fmt', ['nvfp4','mxfp4','int4'])
@pytest.mark.parametrize('biased', [False,True])
def test_both_halves_have_room(fmt, biased):
    "On every card, for the most slots that picks can make; bytes are those of the struct"
    m,(H,I) = MoEConfig(256, 8, 512),(2048,512)
    banks = bank(fmt, 2*I, H, 256, True),bank(fmt, H, I, 256)
    for arch,a in CARDS.items():
        on = NS(arch=arch, **a)
        o,slots = W._whole(on, *banks, 'silu', True, biased),W._most_slots(128, m, True, 8)
        span = sum(-(-slots*s//a['multiprocessors'])//s+2 for s in (2*I//16,H//64))
        assert o['ROOM']+40*span<=limits(on).block and o['RING']%o['TEAMS']==0
        o |= Mixture(None, *banks, m, 'silu', shared=True, gated=True).picking
        said = syntax(o, 'experts_wide')
        assert not said, said
        assert 'see the contract' in syntax(o|dict(ROOM=o['ROOM']+16), 'experts_wide')
    for other in (dict(H=2880), dict(I=768), dict(fmt='fp8')):
        h,i,f = other.get('H', H),other.get('I', I),other.get('fmt', fmt)
        assert W._whole(on, bank(f, 2*i, h, 256, True), bank(f, h, i, 256), 'silu', True) is None

@pytest.mark.parametrize('fmt', ['nvfp4','mxfp4','int4','fp8','bf16','f16','f32'])
@pytest.mark.parametrize('R', [16,256])
def test_bytes_are_those_of_the_struct(fmt, R):
    "A static assertion of the kernel compares them"
    m = MoEConfig(64, 8, 704)
    banks = bank(fmt, 1408, 1152, 64, True),bank(fmt, 1152, 704, 64)
    for o in W._halves(Emulator(), *banks, 'silu', True, 8, W._likely(R, m)):
        said = syntax(o)
        assert not said, said
    assert 'see the contract' in syntax(o|dict(ROOM=o['ROOM']+16))

def syntax(o, kernel='expert_strips'):
    "What g++ says of a kernel with options `o`"
    k = kernel_dir()
    flags = '-fsyntax-only -x c++ -std=c++17 -w -fpermissive -DATLAS_EMULATE'.split()
    files = f'-I{k}',f'-I{k}/emulator','-include','emulate.h'
    cmd = [find_cxx(), *flags, *files, *options_of(o), f'{k}/{kernel}.cu']
    return subprocess.run(cmd, capture_output=True, text=True).stderr
