"""Experts at decode: both halves in one launch as on a card, shapes of every family, and whom
a launch may meet.

The emulator runs one block after the other, so blocks cannot wait for each other there.
`together` launches both halves once the first has run: that launch finds the hidden values
of all blocks."""
import re,shutil,subprocess
import numpy as np,pytest
import atlas.card.card as card,atlas.card.launch
from dataclasses import replace
from types import SimpleNamespace as NS
from unittest.mock import patch
from atlas.ground.config import MoEConfig,ModelConfig,PRESETS
from atlas.cuda import experts as E,vocabulary as card_words
from atlas.cuda.experts import moe,row_bias
from atlas.cuda.vocabulary import _look_ahead,packed_in
from atlas.cuda.pack import Packed,pack,unpack
from atlas.card.emulator import Emulator,find_cxx
from atlas.ground.formats import QTensor
from atlas.card.card import _params,limits
from atlas.card.launch import OPTIONS,Source,find_nvcc,kernel_dir,options_of
from atlas.model.layers import Block,Half,MoE,bind
from atlas.model.model import build
from atlas.ops import vocabulary as host_words
from atlas.ops.linear import linear,sigmoid
from atlas.ops.moe import experts,route
from atlas.ops.norm import rmsnorm
from atlas.ops.vocabulary import Step
from atlas.card.variants import CARDS,Dry
from helpers.nvcc import built

needs_nvcc = pytest.mark.skipif(not find_nvcc(), reason='no nvcc')
needs_cxx = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')
MIXTURES = [k for k in PRESETS if ModelConfig.preset(k).moe]

# Random mixtures

def floats(seed):
    "Random float32 of any shape"
    rng = np.random.default_rng(seed)
    return lambda *s: rng.standard_normal(s, dtype='f4')

class Net:
    "A mixture of experts of random shape, format and kind"
    def __init__(
        self, seed, card, H, I, experts, top, fmt, act='silu', score='softmax', shared=0,
        limit=None, down=None, **maybe):
        self.floats = floats(seed)
        self.card,self.E = card,experts
        self.H,self.I = H,I
        self.act,self.limit,self.shared = act,limit,shared
        self.m = MoEConfig(experts, top, I, score=score, scaling=1.5)
        n,rows = experts+(shared>0),I*(1+(act!='relu2'))
        self.pack(n, rows, fmt, down or fmt)
        self.draw(n, rows, maybe)

    def draw(self, n, rows, maybe):
        "What it `maybe` has beside its matrices, and rows"
        kinds = 'bias','correction','per_expert'
        self.more = {k: self.floats(self.E) for k in kinds if maybe.get(k)}
        self.biases = None,None
        if maybe.get('biases'):
            self.biases = self.floats(n, rows),self.floats(n, self.H)
        self.x = self.floats(9, self.H)*np.exp(2*self.floats(9, 1))
        self.add = self.floats(9, self.H)

    def pack(self, n, rows, up, down):
        "The matrices of `n` experts, the norm's gain, and the router"
        f,H,I = self.floats,self.H,self.I
        w = f(n, rows, H)*np.exp(f(H))/H**.5
        self.up = pack(QTensor.encode(w, up), self.card, pair=self.act!='relu2')
        self.down = pack(QTensor.encode(f(n, H, I)/I**.5, down), self.card)
        self.gain = f(H)
        router = f(self.E+(self.shared>1), H)/H**.5
        self.router = pack(router, self.card, exact=True)

    def mix(self):
        "As `moe` takes it, on the card"
        kw = {k: self.card.upload(a) for k,a in self.more.items()}
        if self.biases[0] is not None:
            kw['up_bias'] = row_bias(self.biases[0], self.up, self.card)
            kw['down_bias'] = row_bias(self.biases[1], self.down, self.card)
        kw |= dict(gain=self.card.upload(self.gain), eps=1e-6)
        kw |= dict(shared=self.shared>0, gated=self.shared>1)
        matrices = self.router,self.up,self.down
        return E.Mixture(*matrices, self.m, self.act, self.limit, **kw)

    def __call__(self, x, add, **kw):
        "y, ids and weights of rows `x`"
        up,shape = self.card.upload,(len(x),self.m.top_k)
        routes = self.card.empty(shape, 'int32'),self.card.empty(shape)
        y = moe(up(x), self.mix(), up(add), routes, **kw)
        return [self.card.download(a) for a in (y,*routes)]

    def host(self, x):
        "The same by the host, without the residual"
        h,r = rmsnorm(x, self.gain, 1e-6),unpack(self.router)
        m,gate = self.m,r[self.E:]
        mine = ids,w = route(h, r[:self.E], m.top_k, m.score, scaling=1.5, **self.more)
        if self.shared:
            share = sigmoid(linear(h, gate)) if self.shared>1 else np.ones((len(x),1), 'f4')
            last = np.full(len(x), self.E, 'i4')
            ids,w = np.c_[ids,last],np.c_[w,share]
        banks = unpack(self.up),unpack(self.down)
        return experts(h, ids, w, *banks, self.act, self.limit, *self.biases),*mine

NETS = dict(
    # chunks of a row that no group of lanes divides
    qwen=dict(H=320, I=64, experts=40, top=8,
        fmt='NVFP4', shared=2),
    oss=dict(H=96, I=96, experts=9, top=4,
        fmt='MXFP4', act='swiglu_oai', limit=1.5,
        score='topk_softmax', bias=True, biases=True),
    # outputs that do not fill four rows
    nemotron=dict(H=64, I=27, experts=20, top=3,
        fmt='BF16', act='relu2', score='sigmoid',
        correction=True, shared=1, per_expert=True),
    mixed=dict(H=288, I=160, experts=33, top=16,
        fmt='FP8_BLOCK', down='NVFP4', act='gelu_tanh', biases=True),
    integers=dict(H=160, I=96, experts=12, top=3,
        fmt='INT4', shared=1))

# a unit of the second half for each warp, which then waits for nobody
ALONE = dict(H=96, I=512, experts=8, top=3, fmt='NVFP4', shared=2)
# and teams of four before those of two; warps that have strips to themselves, as many as come
MORE = dict(alone=ALONE, shared=ALONE|dict(H=1056, experts=5), odd=ALONE|dict(H=256, experts=20),
    # long rows of hidden values, of which those of the last picks are waited for apart
    long=dict(H=96, I=800, experts=6, top=4, fmt='MXFP4', biases=True),
    # rows of more than two units a warp: lib/experts_long.cuh
    units=dict(H=2112, I=544, experts=4, top=4,
        fmt='MXFP4', act='swiglu_oai', limit=1.5, biases=True),
    eights=dict(H=1088, I=96, experts=5, top=3, fmt='FP8_BLOCK', shared=2),
    pairs=dict(H=2144, I=288, experts=6, top=3, fmt='NVFP4', act='relu2', shared=1))

@pytest.fixture(scope='module')
def nets(): return {k: Net(i, Emulator(), **kw) for i,(k,kw) in enumerate((NETS|MORE).items())}

def same(a, b): return all(map(np.array_equal, a, b))

def together(run):
    "`run` with both halves in the second launch, which finds the hidden values of all blocks"
    def _run(name, *a, **kw):
        if name=='experts' and a[-3]==2:
            a = (*a[:-3],3,*a[-2:])
        run(name, *a, **kw)
    return _run

def as_the_host_says(net, x, add, y, ids, w):
    "The host's picks, and nearly its weights and sums"
    want,wids,ww = net.host(x)
    assert np.array_equal(ids, wids) and abs(w-ww).max()<=4e-6*abs(ww).max()
    assert (abs(y-add-want).max(1)<=4e-3*abs(want).max(1)).all()

def check(net, rows, monkeypatch):
    """What the host says; the same bits alone, in another order, from any number of blocks,
    and with both halves in one launch"""
    x,add = net.x[:rows].copy(),net.add[:rows]
    x[rows//2] = x[0]  # two rows with the same picks
    got = net(x, add)
    as_the_host_says(net, x, add, *got)
    r = np.random.default_rng(rows)
    one = [int(r.integers(rows))]
    for some in (one,r.permutation(rows)):
        assert same(net(x[some], add[some]), [a[some] for a in got])
    assert same(net(x, add, blocks=3, then=net.down), got)
    with monkeypatch.context() as m:
        m.setattr(E, 'run', together(E.run))
        for b in (1,7):
            assert same(net(x, add, blocks=b), got), f'{b} blocks, both halves in a launch'

@needs_cxx
@pytest.mark.parametrize('name,rows', [
    ('qwen',8), ('oss',3), ('nemotron',2), ('mixed',1), ('integers',5),
    ('alone',1), ('alone',4), ('shared',1), ('odd',8), ('long',1), ('long',2),
    ('units',1), ('units',3), ('eights',1), ('eights',2), ('pairs',1), ('pairs',4)])
def test_a_mixture(name, rows, nets, monkeypatch):
    check(nets[name], rows, monkeypatch)

def pause(n):
    "C++ by which warp `me` waits `n` turns"
    loop = f'for (int i = 0, me = threadIdx.x / 32; i < {n}; i++)'
    return f'{loop} {{ emu::progress++; emu::yield(); }}'

EARLY = pause('8 * (me * 7 % 5) + (me == 6 ? 300 : 0)')
AFTER = pause('(me % 2 ? 0 : 90)')
WAITS = re.compile(r'^ +(?:stage|cp_async_wait|sync_warps)<', re.M)
MEETS = re.compile(r'^ +sync_warps<.*;', re.M)
WAITING = { # Files, and how often each of both is there
    'experts.cu': (2,0),
    'lib/experts_short.cuh': (5,2),
    'lib/experts_long.cuh': (6,2)}

@pytest.fixture
def late(tmp_path, monkeypatch):
    """Warps of experts.cu come late, each by a time of its own, wherever they wait

    For copies, or for each other; and every other one is slow afterwards."""
    root,put = tmp_path/'kernels',monkeypatch.setattr
    shutil.copytree(kernel_dir(), root)
    for name,many in WAITING.items():
        p = root/name
        text,n = WAITS.subn(rf'{EARLY}\n\g<0>', p.read_text())
        text,m = MEETS.subn(rf'\g<0>\n{AFTER}', text)
        assert (n,m)==many
        p.write_text(text)
    put(atlas.card.launch, 'kernel_dir', lambda: root)
    put(card, '_variants', {})
    put(card, '_kernels', {})

@needs_cxx
@pytest.mark.parametrize('name,rows', [('qwen',2), ('alone',1), ('shared',1), ('long',1),
    ('units',1)])
def test_warps_that_come_late(name, rows, late, nets):
    "wait for what they need of each other, and nobody overtakes them"
    n = nets[name]
    x,add = n.x[:rows],n.add[:rows]
    with patch.object(n, 'card', Emulator()), patch.object(E, 'run', together(E.run)):
        y,ids,w = n(x, add, blocks=max(7, n.H//16)) # 16 outputs each
    want,wids,_ = n.host(x)
    assert np.array_equal(ids, wids)
    assert (abs(y-add-want).max(1)<=4e-3*abs(want).max(1)).all()

@needs_cxx
@pytest.mark.parametrize('room', [46<<10, None])
def test_more_rows_than_a_launch_takes(room, nets, monkeypatch):
    """come one launch after the other; a block with little room has fewer warps, places and
    rows, and the same bits"""
    n = nets['oss']
    alone = [n(n.x[i:i+1], n.add[i:i+1]) for i in range(9)]
    took = options_seen(monkeypatch)
    little = dict(block=room, third=0, alone=0)
    if room:
        monkeypatch.setattr(E, 'limits', lambda card: replace(limits(card), **little))
    assert same(n(n.x, n.add), [np.concatenate(a) for a in zip(*alone)])
    first = took[0]
    assert len(took)==2*-(-9//first['ROWS'])>2 and (first['ROWS']<8)==bool(room)
    assert first['DEEP']==1 or not room

def options_seen(monkeypatch):
    "A list that will have the options of each launch of the experts"
    took,run = [],E.run
    def counted(name, *a, **kw):
        if name=='experts':
            took.append(kw)
        run(name, *a, **kw)
    monkeypatch.setattr(E, 'run', counted)
    return took

def test_who_takes_more_rows_than_a_launch(nets, monkeypatch):
    "From five on: `moe` if one launch takes them, else `moe_wide`, which reads an expert once"
    n = nets['oss']
    mix = n.mix()
    def words(): return [card_words._moe_of(r, mix).__name__ for r in (1,4,5,8,9)]
    assert words()==['moe']*4+['moe_wide']
    little = dict(block=46<<10, third=0, alone=0)
    monkeypatch.setattr(E, 'limits', lambda card: replace(limits(card), **little))
    assert words()==['moe']*2+['moe_wide']*3

@needs_cxx
def test_rows_that_are_no_numbers(nets):
    "leave their neighbours alone, though each expert is multiplied by all rows"
    n = nets['qwen']
    x,add = n.x[:8].copy(),n.add[:8]
    good = n(x, add)
    for i,v in enumerate((np.nan,np.inf,-np.inf,3e38)):
        bad = x.copy()
        bad[i,7] = v
        got = n(bad, add)
        assert same([np.delete(a, i, 0) for a in got], [np.delete(a, i, 0) for a in good])
        y,ids,_ = got
        assert ((ids>=0)&(ids<n.E)).all() and (v==v or np.isnan(y[i]).all())
        assert all(len(set(r))==len(r) for r in ids.tolist())

# Shapes of every family

def bank(fmt, n, k, E, pair=False):
    scales = NS(shape=(1,-(-k//128)))
    return Packed(fmt, n, k, None, scales, None, E, pair)

FORMATS = [
    ('nvfp4','nvfp4'),
    ('mxfp4','mxfp4'),
    ('fp8','fp8'),
    ('bf16','bf16'),
    ('f16','nvfp4'),
    ('nvfp4','fp8'),
    ('int4','int4')]

def mixtures(name, formats):
    "The layers of experts that a model may have: in each format, with a shared expert or without"
    c = ModelConfig.preset(name)
    m,H,I = c.moe,c.hidden_size,c.moe.intermediate_size
    pair = c.act!='relu2'
    for up,down in formats:
        for shared in {False, m.shared_size==I}:
            n = m.num_experts+shared
            banks = bank(up, I*(1+pair), H, n, pair),bank(down, H, I, n)
            yield E.Mixture(None, *banks, m, c.act, gain=True, shared=shared)

def plans(name, formats=FORMATS, rows=range(1, 9)):
    "What `_plan` says of a model in each format, on each card, for 1 to 8 rows"
    for mix in mixtures(name, formats):
        for arch,a in CARDS.items():
            card,sms = NS(arch=arch, **a),a['multiprocessors']
            for r in rows:
                d,blocks = E._plan(card, mix, r, sms)
                yield arch,sms,mix.up,mix.down,d,blocks

@pytest.mark.parametrize('name', MIXTURES)
def test_every_block_has_a_place(name):
    """Blocks wait for each other: there are no more than multiprocessors, one of each fits,
    and all outputs belong to somebody"""
    for arch,sms,up,down,d,blocks in plans(name):
        large = arch=='sm_90a'
        assert blocks<=sms and d['ROOM']<=(227 if large else 99)<<10
        assert d['ROOM']>(114 if large else 50)<<10
        assert d['ROWS']<=d['WARPS'] and d['WARPS']%4==0 and d['WARPS']<=24 and d['DEEP']>=1
        assert blocks*d['SPAN']>=d['HIDDEN'] and d['SPAN']%4==0
        assert d['WARPS']//E._split(down, 2)<=15 or E._split(down, 2)==1, 'barriers of a block'

def size_of(d, room):
    "Does g++ find that `Shared` has at most `room` bytes?"
    d = options_of(d|dict(ROOM=room))
    own = f'-I{kernel_dir()}',f'-I{kernel_dir()}/emulator','-include','emulate.h'
    cxx = find_cxx(),'-fsyntax-only','-x','c++','-std=c++17','-w','-fpermissive','-DATLAS_EMULATE'
    cmd = [*cxx, *own, *d, f'{kernel_dir()}/experts.cu']
    r = subprocess.run(cmd, capture_output=True, text=True)
    assert not r.returncode or 'see the contract' in r.stderr, r.stderr
    return not r.returncode

@needs_cxx
@pytest.mark.parametrize('name,i', [
    ('qwen3.6-35b-a3b',0), ('gpt-oss-20b',1), ('nemotron-3-nano-30b-a3b',2),
    ('gemma-4-26b-a4b',3), ('minimax-m2',4), ('granite-4.0-h-tiny',5)])
def test_bytes_are_those_of_the_struct(name, i):
    found = list(plans(name))
    one = found[np.random.default_rng(i).integers(len(found))]
    up,down,d = one[2:5]
    need = E._bytes(d, up, down)
    assert need<=d['ROOM'] and size_of(d, need), (need,d)
    assert not size_of(d, need-65), 'much more than is needed'

@needs_nvcc
@pytest.mark.parametrize('name,fmt,rows,arch', [
    ('qwen3.6-35b-a3b','nvfp4',8,'sm_90a'), ('gpt-oss-20b','mxfp4',8,'sm_90a'),
    ('qwen3-30b-a3b','int4',1,'sm_90a'), ('qwen3.6-35b-a3b','bf16',8,'sm_121a')])
def test_spills_nothing(name, fmt, rows, arch, cache):
    *_,d,_ = [p for p in plans(name, [(fmt,fmt)], [rows]) if p[0]==arch][-1]
    said = built(cache, 'experts', arch, (*OPTIONS, *options_of(d))).said
    assert re.findall(r'(\d+) bytes stack frame, (\d+) bytes spill stores', said)==[('0','0')], said

# What a step launches

def dry_matrices(card, c):
    "Router and banks of a model, without weights"
    m,H = c.moe,c.hidden_size
    def made(E, n, k, pair=False):
        w = card.empty((max(1, E)*-(-n//4)*4,k), 'uint16')
        return Packed('bf16', n, k, w, None, None, E, pair)
    wide = 1 if c.act=='relu2' else 2
    router = made(0, m.num_experts, H)
    up = made(m.num_experts, wide*m.intermediate_size, H, wide>1)
    return router,up,made(m.num_experts, H, m.intermediate_size)

def steps(name, rows, monkeypatch, arch='sm_90a', **kw):
    "The launches that `moe` asks a card for"
    c,card,calls = ModelConfig.preset(name),Dry(arch, 1<<36),[]
    card.kind = 'cuda'
    params = {n: _params(Source(n).text, n) for n in ('router','experts')}
    def seen(name, grid, block, *a, **k):
        calls.append((name,grid,dict(zip(params[name], a)),k))
    monkeypatch.setattr(E, 'run', seen)
    x,gain = card.empty((rows,c.hidden_size)),card.empty(c.hidden_size)
    mix = E.Mixture(*dry_matrices(card, c), c.moe, c.act, gain=gain, eps=1e-6)
    moe(x, mix, **kw)
    return card,calls

@pytest.mark.parametrize('name', ['qwen3-30b-a3b','gpt-oss-20b','nemotron-3-nano-30b-a3b'])
@pytest.mark.parametrize('rows', [1,3,8,17])
def test_each_launch_follows_its_router(name, rows, monkeypatch):
    """Blocks wait for hidden values that the router before has emptied, all of them, with the
    same rows, and are no more than multiprocessors"""
    card,calls = steps(name, rows, monkeypatch)
    assert [n for n,*_ in calls]==['router','experts']*(len(calls)//2)
    assert sum(a['rows'] for n,_,a,_ in calls if n=='router')==rows
    for (_,_,r,_),(_,grid,e,d) in zip(calls[::2], calls[1::2]):
        assert e['halves']==3 and grid<=card.multiprocessors
        assert e['rows']==r['rows']==len(e['h'])<=d['ROWS']
        assert 4*r['fours']==e['h'].size
        for a,b in (('empty','h'), ('logits','logits'), ('x','x')):
            assert r[a].ctypes.data==e[b].ctypes.data

@pytest.mark.parametrize('arch', CARDS)
@pytest.mark.parametrize('rows', [1,2])
@pytest.mark.parametrize('size,scales', [
    (0x300,True), (1<<20,True), (1<<33,True), (5<<30,False), (16<<20,False)])
def test_asked_ahead_is_inside(size, scales, rows, arch):
    card = Dry(arch, 1<<36)
    codes = card.empty((size//16,16), 'uint8')
    more = card.empty((size//128,16), 'uint8') if scales else None
    p = Packed('nvfp4', 4, 32, codes, more)
    (w,s),(n,k) = E._asked(p, card, rows)
    most = min(size, limits(card).ahead)
    assert w.nbytes==size and 0<n*16<=most and n<2**31
    if not scales:
        assert s is None and k==0
        return
    assert k*16<=s.nbytes and abs(k*8-n)<=8, 'as much of the scales as of the weights'

@needs_cxx
@pytest.mark.parametrize('name,rows', [('qwen',8), ('mixed',1), ('nemotron',9)])
def test_hidden_values_are_empty_before(name, rows, nets, monkeypatch):
    "The router empties what the launch after it waits for, and no more blocks wait than can run"
    n,emptied,run = nets[name],[],E.run
    params = {k: _params(Source(k).text, k) for k in ('router','experts')}
    def seen(name, grid, block, *a, **kw):
        args = dict(zip(params[name], a))
        if name=='router' and args['empty'] is not None:
            args['empty'].fill(0)  # memory may happen to look so
        if name=='experts' and args['halves']==1:
            h = n.card.download(args['h'])
            emptied.append((h.view('u4')==0xFFFFFFFF).all())
        run(name, grid, block, *a, **kw)
    monkeypatch.setattr(E, 'run', seen)
    shape = rows,n.H
    n(np.resize(n.x, shape), np.resize(n.add, shape))
    assert emptied==[True]*-(-rows//8)

# What comes next

def shell(name):
    "A model without bytes"
    m = build(ModelConfig.preset(name))
    m.mtp = m._mtp
    for w in m.wants():
        if len(w.shape)>1 and not w.array and not w.name.startswith('visual.'):
            experts = w.shape[0] if len(w.shape)>2 else 0
            codes = NS(nbytes=1, shape=w.shape)
            bind(m, w.name, Packed('bf16', *w.shape[-2:], codes, experts=experts))
        if w.name.endswith(('mixer_norm.weight','mlp_norm.weight')):
            bind(m, w.name, NS(of=w.name))
    if not hasattr(m, 'lm_head'):
        m.lm_head = m.embed_tokens
    return m

FIRST = dict(attention='qkv_proj', sliding='qkv_proj', delta='in_proj', mamba='in_proj')

def matrix_after(m, i):
    "The matrix that is read after layer `i`, if that layer can know it"
    if i==len(m.layers)-1:
        return m.lm_head.weight
    kind = m.c.mixers[i+1]
    return None if kind=='none' else getattr(m.layers[i+1].mixer, FIRST[kind]).weight

def check_reader(m, i, reader, want):
    "It reads `want` with the norm of the layer after `i`"
    after = m.layers[i+1]
    ba = getattr(after.mixer, 'ba_proj', None)
    assert reader.w is want and reader.gain is after.mixer_norm.weight, i
    assert reader.extra is (ba and ba.weight) and reader.eps==m.c.norm_eps, i

@pytest.mark.parametrize('name', MIXTURES)
def test_then_is_what_comes_next(name):
    """The first matrix of the next layer, or the output matrix; weights are counted once all
    the same"""
    m = shell(name)
    def counted(): return [[id(p) for p in packed_in(o)] for o in (m,*m.layers)]
    before = counted()
    _look_ahead(m)
    assert before==counted()
    for i,b in enumerate(m.layers):
        l = next((l for l in vars(b).values() if isinstance(l, MoE)), None)
        if l is None:
            continue
        want = matrix_after(m, i)
        assert l.then is want, i
        if i==len(m.layers)-1 or want is None or not hasattr(b, 'norms'):
            assert l.reader is None, i
            continue
        check_reader(m, i, l.reader, want)

# A shared expert like the others

def pair_of_blocks(experts, gate, card):
    "The same block of experts for the host and for `card`, prepared"
    mixture = MoEConfig(experts, 2, 32, shared_size=32, shared_gate=gate)
    c = ModelConfig('qwen', 97, 64, ('none',), ('moe',), None, moe=mixture)
    host,block = (Block(c, Half(MoE(c), 'mlp', 'mlp', 'norm')) for _ in 'hc')
    rng = np.random.default_rng(experts)
    for w in host.wants('', ''):
        vector = len(w.shape)==1
        numbers = rng.standard_normal(w.shape, 'f4')/w.shape[-1]**.5
        q = QTensor.encode(numbers+vector, 'BF16')
        bind(host, w.name, q.decode())
        there = card.upload(q.decode()) if vector else pack(q, card, w.pair, w.exact)
        bind(block, w.name, there)
    card_words.prepare(NS(layers=[block], mtp=None))
    return host,block

JOINED = [
    (8,True,True),
    (6,True,False),
    (5,True,False),
    (6,False,True)]

@needs_cxx
@pytest.mark.parametrize('experts,gate,joined', JOINED)
def test_shared_expert_like_the_others(experts, gate, joined):
    "In the bank where the router can take its gate, else beside it; rows and tiles are the host's"
    card = Emulator()
    host,block = pair_of_blocks(experts, gate, card)
    assert block.mlp.joined==joined
    assert (block.mlp.shared.gate_up_proj.weight is None)==joined
    for n,tiled in ((3,False), (64,True)):
        # a rounding may flip two experts that are as good as each other
        unlike = share_unlike(host, block, card, n, tiled)
        assert unlike<=.06, (tiled, unlike)

def share_unlike(host, block, card, n, tiled):
    "The share of rows that the card makes other than the host"
    x = np.random.default_rng(1).standard_normal((64,64), 'f4')[:n]
    b = NS(tiled=tiled, num_seqs=1, slots=np.arange(n), seq=card.upload(np.zeros(n, 'i4')))
    want = host(x, Step(b, None, {}, host_words))
    got = block(card.upload(x), Step(b, None, {}, card_words))
    wrong = abs(card.download(got)-want).max(1)
    return (wrong>1e-2*abs(want).max()).mean()
