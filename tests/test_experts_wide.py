"""Experts of many rows: what the host says, the same bits in any company, and slots that hold
what they should."""
import subprocess
import numpy as np,pytest
from dataclasses import replace
from itertools import product
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
from test_races import overlap  # noqa: F401  a fixture

pytestmark = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')

# both halves in one launch
WHOLE = dict(H=1024, I=256, experts=24, top=3, fmt='NVFP4', shared=2)
BESIDE = dict(I=512, experts=9, top=1, fmt='MXFP4', act='relu2', shared=0, biases=True)
ZEROS = dict(
    H=2048,
    experts=8,
    top=1,
    fmt='INT4',
    act='swiglu_oai',
    limit=1.5,
    score='topk_softmax',
    bias=True,
    shared=1)
MORE = dict(
    whole=WHOLE,
    beside=WHOLE|BESIDE,
    zeros=WHOLE|ZEROS,
    floats=dict(H=64, I=40, experts=6, top=2, fmt='F16', down='F32', shared=1),
    channels=dict(
        H=544, I=288, experts=5, top=2, fmt='FP8_CHANNEL', score='sigmoid', correction=True))

@pytest.fixture(scope='module')
def nets():
    every = NETS|MORE
    return {k: Net(i, Emulator(), **every[k]) for i,k in enumerate(every)}

@pytest.fixture(autouse=True)
def wide(monkeypatch):
    monkeypatch.setattr(test_experts, 'moe', moe_wide)

def normal(rng, *shape): return rng.standard_normal(shape, dtype='f4')

def rows_of(net, R):
    "Rows of very different sizes: some the same, which pick the same experts, and others"
    rng = np.random.default_rng(R)
    x,add = normal(rng, R, net.H),normal(rng, R, net.H)
    x *= np.exp(2*normal(rng, R, 1))
    half = R//2
    x[half:half+R//3] = x[0]
    return x,add

def same(a, b): return all(map(np.array_equal, a, b))

def as_the_host_says(net, x, add, got):
    "Results, picks and weights"
    y,ids,w = got
    want,wids,ww = net.host(x)
    assert np.array_equal(ids, wids)
    assert abs(w-ww).max()<=4e-6*abs(ww).max()
    assert (abs(y-add-want).max(1)<=4e-3*abs(want).max(1)).all()

def check(net, R):
    """What the host says; the same bits alone, in another order, in fewer rows, and from any
    number of blocks"""
    x,add = rows_of(net, R)
    got = net(x, add)
    as_the_host_says(net, x, add, got)
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
    def noted(name, *a, **kw):
        used.add(name)
        run(name, *a, **kw)
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
    names = {k: _params(Source(k).text, k) for k in ('router','experts_wide')}
    def seen(name, grid, block, *a, **kw):
        args = dict(zip(names.get(name, ()), a))
        if name=='router':
            args['empty'].fill(0) # memory may happen to look so
        if name=='experts_wide' and a[-1]==1:
            words = [net.card.download(args[k]) for k in ('h','picked')]
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
    for first,end in ((0,1), (R-1,R), (R//2,R//2+9)):
        some = slice(first, end)
        assert same(n(x[some], add[some]), [a[some] for a in got])
    x[:] = x[0]
    y,ids,w = n(x, 0*add)
    assert (y==y[0]).all() and (ids==ids[0]).all() and (w==w[0]).all()

# The order of sums

class OneExpert:
    "A mixture of one, on the emulator"
    H,I = 1152,640
    def __init__(self, fmt):
        self.card,self.fmt = Emulator(),fmt
        self.rng = np.random.default_rng(0)
        self.first = self.bank(2*self.I, self.H, pair=True)
        self.second = self.bank(self.H, self.I)
        self.router = pack(normal(self.rng, 1, self.H), self.card, exact=True)
        self.x = self.card.upload(normal(self.rng, 5, self.H))

    def bank(self, n, k, **how):
        w = QTensor.encode(normal(self.rng, 1, n, k)/k**.5, self.fmt)
        return pack(w, self.card, **how)

    def mixed(self):
        "As a mixture"
        banks = self.router,self.first,self.second
        mix = Mixture(*banks, MoEConfig(1, 1, self.I), 'silu')
        return self.card.download(moe_wide(self.x, mix))

    def linear(self, shares):
        "As two products, whose rows `shares` warps and two share"
        h = self.layer(self.x, self.first, shares, act='silu')
        return self.card.download(self.layer(h, self.second, 2))

    def layer(self, x, p, shares, **kw):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(G, 'plan', lambda f, n, k, sms: (8,shares,3,128//shares))
            return G.gemv(x, replace(p, experts=0), **kw)

@pytest.mark.parametrize('fmt', ['NVFP4','BF16','FP8_BLOCK','F32'])
def test_bits_of_a_linear_layer(fmt):
    "One expert, and no norm: what gemv.cu makes of its two matrices, if as many warps share a row"
    e = OneExpert(fmt)
    got = e.mixed()
    assert np.array_equal(got, e.linear(4))
    assert not np.array_equal(got, e.linear(2)), 'a test must be able to fail'

# Format, columns, rows of the matrix, rows of x
LOGITS = [
    ('BF16',2048,37,40),
    ('BF16',2048,257,8),
    ('BF16',2880,9,9),
    ('F32',544,12,16),
    ('BF16',5120,5,11),
    ('BF16',320,257,9),
    ('F32',4096,170,8)]

def router_of(rng, card, fmt, n, H, R):
    "A mixture that is only asked for its logits, and rows"
    router = pack(QTensor.encode(normal(rng, n, H), fmt), card, exact=True)
    x = normal(rng, R, H)*np.exp(normal(rng, R, 1))
    mix = Mixture(
        router, None, None, MoEConfig(n-1, 1, 8), 'silu',
        gain=card.upload(normal(rng, H)),
        eps=1e-6,
        bias=card.upload(normal(rng, n-1)))
    return mix,x

def by_few(card, x, mix, size):
    "Logits of few rows"
    y = card.empty((len(x),size))
    test_experts.E._route(card.upload(x), mix, y, 0, card.empty((len(x),1,4)))
    return card.download(y)[:,:mix.router.n]

@pytest.mark.parametrize('fmt,H,n,R', LOGITS)
def test_bits_of_logits(fmt, H, n, R):
    "Those of a row alone, in steps of few rows and of many"
    c = Emulator()
    mix,x = router_of(np.random.default_rng(H), c, fmt, n, H, R)
    got,_ = W._logits(c.upload(x), mix, 132)
    size = got.shape[1]
    want = np.concatenate([by_few(c, row[None], mix, size) for row in x])
    assert np.array_equal(c.download(got)[:,:n], want)
    for rows in (2,3,5,8):
        assert np.array_equal(by_few(c, x[:rows], mix, size), want[:rows]), rows

# Kernels that start early

@pytest.fixture
def kept(monkeypatch):
    "Nobody gets memory that may still be hidden from kernels"
    kept,empty = [],Emulator.empty
    def keeping(*a, **kw): return kept.append(empty(*a, **kw)) or kept[-1]
    monkeypatch.setattr(Emulator, 'empty', keeping)

def twice(n):
    "Two calls after each other, the second with what the first one made"
    x,_ = rows_of(n, 20)
    x,mix = n.card.upload(x),n.mix()
    for _ in 'ab':
        x = moe_wide(x, mix, add=x)
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
    card._kernels.clear()
    overlap.on = True
    with np.errstate(all='ignore'):
        got = twice(n)
    assert not np.array_equal(got, want)

# Slots

def listed(ids, E, shared, entries):
    "The list of slots, in plain Python"
    R,k = ids.shape
    who = {E: [r*(k+1)+k for r in range(R)]} if shared else {}
    for e in range(E):
        rows,columns = np.nonzero(ids==e)
        who[e] = (rows*(k+shared)+columns).tolist()
    return [(e,a[i:i+entries]) for e,a in who.items() for i in range(0, len(a), entries)]

LISTS = [(1,5,2,1,8), (33,300,4,0,8), (256,40,16,1,16), (17,12,3,1,2), (16,256,8,1,8)]

def some_logits(R, E):
    "With a favourite, and equal ones, of which the first come first"
    width = -(-(E+1)//4)*4
    logits = normal(np.random.default_rng(R), R, width)
    logits[R//2:,3] += 9
    logits[1::3] = logits[1::3].round()
    return logits

def entries_of(card, slots):
    "Each slot that is used: its expert, and those in it; the others have no expert"
    which,who,(n,) = map(card.download, slots)
    assert (which[n:]==-1).all()
    for e,(count,*places) in zip(which[:n].tolist(), who.tolist()):
        yield e,places[:count]

@pytest.mark.parametrize('R,E,k,shared,entries', LISTS)
def test_slots(R, E, k, shared, entries):
    "Every pick has its place, by expert and row; the counter that tells the last block is 0 again"
    c,logits = Emulator(),some_logits(R, E)
    ids,met = c.empty((R,k), 'int32'),c.upload(np.zeros(1, 'i4'))
    mix = Mixture(None, None, None, MoEConfig(E, k, 8), 'silu', shared=shared)
    _,slots = W._slots(c.upload(logits), mix, ids, None, entries, met)
    ids = c.download(ids)
    want = np.argsort(-logits[:,:E], 1, kind='stable')[:,:k]
    assert np.array_equal(ids, want) and not c.download(met).any()
    assert [*entries_of(c, slots)]==listed(ids, E, shared, entries)

# Variants

FORMATS = [
    ('nvfp4','nvfp4'),
    ('mxfp4','int4'),
    ('fp8','fp8'),
    ('bf16','f16'),
    ('f32','nvfp4')]

def banks_of(c, up, down):
    "Both banks of a model, without weights"
    m,pair = c.moe,c.act!='relu2'
    H,I = c.hidden_size,m.intermediate_size
    first = bank(up, I*(1+pair), H, m.num_experts, pair)
    return first,bank(down, H, I, m.num_experts)

def each_card():
    return [NS(arch=arch, **a) for arch,a in CARDS.items()]

@pytest.mark.parametrize('name', test_experts.MIXTURES)
def test_every_shape_has_room(name):
    "Both halves have slots of the same size, and a block the memory for them"
    c = ModelConfig.preset(name)
    for formats,on,R in product(FORMATS, each_card(), (1,16,256)):
        banks = banks_of(c, *formats)
        u,d = W._halves(on, *banks, c.act, True, c.moe.top_k, W._likely(R, c.moe))
        entries = u['ENTRIES']
        slots = W._most_slots(R, c.moe, False, entries)
        span = -(-slots//on.multiprocessors)+2
        for o in (u,d):
            assert o['ROOM']+4*span*(entries+2)<=limits(on).block
            assert o['ENTRIES']==entries and o['WARPS']*o['DEEP']>=4

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

def qwen_banks(fmt, H=2048, I=512):
    "Of a layer of 256 experts"
    return bank(fmt, 2*I, H, 256, True),bank(fmt, H, I, 256)

QWEN = MoEConfig(256, 8, 512)

@pytest.mark.parametrize('fmt', ['nvfp4','mxfp4','int4'])
@pytest.mark.parametrize('biased', [False,True])
def test_both_halves_have_room(fmt, biased):
    "On every card, for the most slots that picks can make; bytes are those of the struct"
    banks,slots = qwen_banks(fmt),W._most_slots(128, QWEN, True, 8)
    strips = 2*512//16,2048//64 # Of both halves
    for on in each_card():
        o = W._whole(on, *banks, 'silu', True, biased)
        span = sum(-(-slots*s//on.multiprocessors)//s+2 for s in strips)
        assert o['ROOM']+40*span<=limits(on).block and o['RING']%o['TEAMS']==0
        o |= Mixture(None, *banks, QWEN, 'silu', shared=True, gated=True).picking
        said = syntax(o, 'experts_wide')
        assert not said, said
        assert 'see the contract' in syntax(o|dict(ROOM=o['ROOM']+16), 'experts_wide')

@pytest.mark.parametrize('fmt', ['nvfp4','mxfp4','int4'])
def test_others_take_two_launches(fmt):
    on = each_card()[-1]
    for banks in (qwen_banks(fmt, H=2880), qwen_banks(fmt, I=768), qwen_banks('fp8')):
        assert W._whole(on, *banks, 'silu', True) is None

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
