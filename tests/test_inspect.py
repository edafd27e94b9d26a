"""What a token reads, counted from the plans of the models, against sums made by hand from the
shapes alone."""
import json,math
from fnmatch import fnmatchcase
from types import SimpleNamespace
import pytest
from atlas.card.processor import library
from atlas.engine.cache import slot_bytes
from atlas.engine.planning import plan_load
from atlas.ops import vocabulary as host_words
from atlas.ground.config import ModelConfig,PRESETS
from atlas.ground.core import AtlasError
from atlas.ground.formats import FORMATS
from atlas.ground.options import EngineConfig
from atlas.use.inspect import PARTS,Sheet,Strip,devices,fit,look,part_of,tally
from atlas.model.model import build

def nbytes(fmt, shape):
    "Bytes of a tensor of `shape` in `fmt`, scales included"
    size = dict(uint8=1, uint16=2, float16=2, float32=4)
    return sum(
        size[d]*math.prod(s)
        for d,s in FORMATS[fmt].layout(shape).values())

def released(c, rules):
    """The sheet of a release of shape `c` whose arrays have the formats of the first pattern
    that fits, else BF16"""
    tensors = {}
    for w in build(c).wants():
        if len(w.shape)>1 and not w.exact:
            f = next(
                (f for p,f in rules.items() if fnmatchcase(w.name, p)),
                'BF16')
        else:
            f = 'BF16'
        tensors[w.sources[0]] = SimpleNamespace(
            fmt=f, shape=w.shape,
            nbytes=nbytes(f, w.shape))
    ck = SimpleNamespace(config=c, tensors=tensors)
    return Sheet('', c, 'dummy', tally(ck, build(c).wants()))

LINEARS = (
    '*.mixer.qkv_proj.weight','*.mixer.o_proj.weight','*.mixer.in_proj.weight',
    '*.mixer.out_proj.weight')
EXPERTS = ('*.experts.gate_up_proj','*.experts.up_proj','*.experts.down_proj')
MLPS = ('*.mlp.gate_up_proj.weight','*.mlp.up_proj.weight','*.mlp.down_proj.weight')
SHARED = ('*.shared.gate_up_proj.weight','*.shared.up_proj.weight','*.shared.down_proj.weight')
def rule(fmt, *kinds): return {p:fmt for k in kinds for p in k}
FP8 = rule('FP8_BLOCK', LINEARS, EXPERTS, SHARED, MLPS)
NV = rule('NVFP4', LINEARS, EXPERTS, SHARED, MLPS)
NVX = rule('NVFP4', EXPERTS)
MIXED = rule('FP8_TENSOR', LINEARS)|rule('NVFP4', EXPERTS, SHARED, MLPS, ['lm_head.weight'])
WHOLE = 4,5,11,12,18,19,25,26,32,33,41,42 # Layers of Nemotron 3 Nano that are not quantised
NEMO = {f'layers.{i}.mixer.*':'BF16' for i in WHOLE}|NV
BLOCK_ATT = rule('FP8_BLOCK', LINEARS, EXPERTS)

# MB that a token reads, without norms: models.md's sums of the true shapes
TABLE = [
    ('qwen3.6-35b-a3b', {}, 5893),
    ('qwen3.6-35b-a3b', FP8, 3481), ('qwen3.6-35b-a3b', NVX, 4445),
    ('qwen3.6-35b-a3b', MIXED, 2254),
    ('qwen3.6-27b', {}, 51248),
    ('qwen3.6-27b', FP8, 26927), ('qwen3.6-27b', MIXED, 17606),
    ('qwen3-next-80b-a3b', {}, 7127),
    ('qwen3-next-80b-a3b', FP8, 3932), ('qwen3-next-80b-a3b', NVX, 4957),
    ('qwen3-next-80b-a3b', NV, 2533),
    ('qwen3-0.6b', {}, 1192),
    ('qwen3-0.6b', NV, 559),
    ('qwen3-8b', {}, 15136),
    ('qwen3-8b', NV, 5152),
    ('qwen3-14b', {}, 27980),
    ('qwen3-32b', {}, 63967),
    ('qwen3-32b', NV, 19109),
    ('llama-3.1-8b', {}, 15009),
    ('llama-3.1-8b', NV, 4977),
    ('mistral-7b-v0.3', {}, 14227),
    ('mistral-small-24b', NV, 13846),
    ('smollm2-135m', {}, 269),
    ('smollm2-1.7b', {}, 3423),
    ('qwen3-30b-a3b', {}, 6083),
    ('qwen3-coder-30b-a3b', FP8, 3366), ('qwen3-30b-a3b', NV, 2176),
    ('gpt-oss-20b', rule('MXFP4', EXPERTS), 3708),
    ('gpt-oss-120b', rule('MXFP4', EXPERTS), 5002),
    ('gemma-4-26b-a4b', {}, 7644),
    ('gemma-4-26b-a4b', NVX, 5592),
    ('nemotron-3-nano-30b-a3b', {}, 6455),
    ('nemotron-3-nano-30b-a3b', NEMO, 2870), ('minimax-m2', NVX, 10737)]

@pytest.mark.parametrize('name,rules,want', TABLE, ids=[f'{n}-{w}' for n,_,w in TABLE])
def test_bytes_a_token(name, rules, want):
    s = released(ModelConfig.preset(name), rules)
    got = (
        s.token_bytes-sum(r.read for r in s.rows if r.part=='norms'))/1e6
    assert abs(got-want)<max(1.5, want*4e-4), (
        got,
        {k:round(r.read/1e6)
         for k,r in s.by('part').items()})

@pytest.mark.parametrize('name', PRESETS)
def test_the_plan_of_a_shape_has_as_many_weights_as_its_description(name):
    c = ModelConfig.preset(name)
    got = {}
    for w in build(c).wants():
        got[part_of(c, w.name)] = got.get(
            part_of(c, w.name), 0
        )+math.prod(w.shape)
    assert got==c.param_parts

MODELS = (
    'smollm2-135m',
    'qwen3-0.6b',
    'qwen3.6-35b-a3b',
    'gpt-oss-20b',
    'nemotron-3-nano-30b-a3b',
    'gemma-4-26b-a4b')

@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('weights', [None,'bf16','fp8','nvfp4','mxfp4'])
def test_shapes(name, weights):
    s = look(name, weights, on=[])
    d = json.loads(json.dumps(s.to_dict()))
    assert d['kind']=='dummy'
    assert d['path'] is None
    parts = d['parts']
    assert set(parts)<=set(PARTS)-{'unused'}
    assert {k: p['weights'] for k,p in parts.items()}==s.config.param_parts
    of_formats = [f['bytes'] for f in d['formats'].values()]
    assert sum(of_formats)==d['bytes']==sum(r.nbytes for r in s.rows)
    assert d['bytes_per_token']<=d['bytes']
    for part in ('embedding','router','norms'):
        assert set(parts.get(part, {}).get('formats', {}))<={'BF16','F32'}
    assert str(s).count('\n')>8

@pytest.mark.parametrize('name', MODELS)
@pytest.mark.parametrize('weights', ['fp8','nvfp4','mxfp4'])
def test_narrow_weights_are_less_to_read(name, weights):
    plain = look(name, 'bf16', on=[])
    assert look(name, weights, on=[]).token_bytes<plain.token_bytes*.75

class Machine:
    "A device of a given size, whose weights are float32 where that fits"
    as_stored = False
    def __init__(self, gib, kind='cpu'):
        self.name,self.kind,self.n = kind,kind,int(gib*2**30)
    def memory(self): return SimpleNamespace(total=self.n, available=self.n)
    def budget(self): return SimpleNamespace(left=self.n)

@pytest.fixture(scope='module')
def qwen(): return look('qwen3.6-35b-a3b', 'nvfp4', on=[])

def test_what_does_not_fit(qwen):
    no = fit(qwen, Machine(16))
    assert not no['fits'] and no['max_context']==0 and not any(no['sequences'].values())

def held_bytes(s):
    "What a model's weights take, without its draft layers; vectors are widened to float32"
    used = [t for k,t in s.tensors.items() if not k.startswith('mtp.')]
    vectors = [t for t in used if len(t.shape)==1 or t.shape[-2]==1]
    more = [4*math.prod(t.shape)-t.nbytes for t in vectors]
    return sum(t.nbytes for t in used)+sum(more)

def test_what_fits(qwen):
    c,room = qwen.config,64*2**30
    f = fit(qwen, Machine(64))
    kv,st = 4*c.kv_elements_per_token,slot_bytes(c, host_words)
    held = held_bytes(qwen)
    assert f['fits'] and f['packed'] and f['weights']==held and f['kv_bytes_per_token']==kv
    assert list(f['sequences'])==[4096,32768,262144]
    for n,k in f['sequences'].items():
        assert held+k*(kv*n+st)<=room<held+(k+1)*(kv*n+st)
    assert f['max_context']==min(c.max_seq_len, (room-held-st)//kv)

def test_more_fits_on_a_card(qwen):
    f,card = fit(qwen, Machine(64)),fit(qwen, Machine(64, 'cuda'))
    assert card['kv_bytes_per_token']==2*qwen.config.kv_elements_per_token
    assert card['sequences'][32768]>f['sequences'][32768]

def test_what_fits_of_a_small_model():
    small = fit(look('smollm2-135m', on=[]), Machine(4))
    assert not small['packed'] and small['weights']==4*134_515_008 and small['state_bytes']==0
    assert list(small['sequences'])==[4096,8192]

@pytest.mark.parametrize('exact,form', [(False,'as stored'),(True,'as float32')])
def test_the_host_keeps_weights_as_it_says(exact, form):
    "As a start would, but for a table of angles, which is small in a short context"
    if not exact and not library('linear'):
        pytest.skip('no compiler, and no kernel')
    start = plan_load(EngineConfig('tiny', 'cpu', 64, exact=exact))
    f = look('tiny', on=devices(exact)).fits[0]
    assert (f['form'],f['packed'])==(form,not exact)
    assert 0<=start.parts['weights']-f['weights']<=4096+64

def test_strips():
    c = ModelConfig.preset('nemotron-3-nano-30b-a3b')
    lines = Strip(c).text(26).split('\n')
    assert len(lines)==5
    assert ''.join(lines[:4:2])=='M·M·MA·'*5+'M·M·M·MA·M·M·M·M·'
    assert lines[4]=='A attention, M Mamba-2, E experts'
    svg = Strip(c)._repr_svg_()
    assert svg.count('<rect')==2*52+3 and 'Mamba-2' in svg
    for n in PRESETS:
        assert len(
            Strip(ModelConfig.preset(n)).text(10**6).split('\n'))==3

def test_names_that_lead_nowhere(tmp_path):
    for args in (('no-such-model',), ('qwen3-0.6b','int3'), (str(tmp_path),)):
        with pytest.raises(AtlasError):
            look(*args, on=[])
