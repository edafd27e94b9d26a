"""Every layout in which models are published loads as the same arrays;
whatever contradicts itself is refused before anything is allocated."""
import cProfile,re
import numpy as np, pytest
from fastcore.basics import first
from hypothesis import HealthCheck,given,settings,strategies as st
import atlas.ground.weights
from atlas.ground import files
from atlas.ground.config import ModelConfig
from atlas.ground.core import CheckpointError,OutOfMemoryError,UnsupportedError
from atlas.card.device import Host,Memory,get_device
from atlas.ground.files import File,check_scales,read_tensor,st_header,st_infos
from atlas.ground.formats import QStack,QTensor
from atlas.cuda.pack import pack
from atlas.use.inspect import sheet
from atlas.model.model import build,plan
from atlas.ground.weights import IGNORE,_read_bytes,check_plan,dummy_checkpoint,load,open_checkpoint
from helpers.checkpoints import splice,st_bytes
from helpers.layouts import ALL,CONFS,LAYOUTS,_int4,any_format
from helpers.layouts import folder,named,stored

host = get_device('cpu')
def arrays(path, device=host, **kw):
    "What the model of a folder wants of it"
    with open_checkpoint(path) as ck:
        m,wants = plan(ck)
        return load(ck, wants, device, ignore=(*IGNORE, *m.ignore), **kw)

def decoded(x): return x if isinstance(x, np.ndarray) else x.decode()
def unlike(a, b):
    return sorted(
        k for k in a.keys()|b.keys()
        if k not in a
        or k not in b
        or not np.array_equal(decoded(a[k]), decoded(b[k])))
def plain_folder(path, conf, plain):
    return folder(
        path, CONFS[conf],
        {k:(a,'I64' if a.dtype==np.int64 else 'F32')
            for k,a in plain.items()})

@pytest.fixture(scope='module')
def made():
    "Layouts by name, made once"
    cache = {}
    def get(name):
        if name not in cache:
            cache[name] = stored(*LAYOUTS[name])
        return cache[name]
    return get

each = pytest.mark.parametrize('name', LAYOUTS)

@each
def test_as_published_and_plain_are_the_same(tmp_path, made, name):
    raw,plain = made(name)
    conf = LAYOUTS[name][0]
    want = arrays(plain_folder(tmp_path/'plain', conf, plain))
    assert len(want)>10
    got = folder(tmp_path/'as', CONFS[conf], raw, shards=1+len(name)%3)
    assert unlike(arrays(got), want)==[]
    packed = arrays(got, packed=True)
    assert unlike(packed, want)==[]
    kept = [w for w in packed.values() if isinstance(w, (QTensor,QStack))]
    assert (
        kept
        and sum(w.nbytes for w in kept)
        <=sum(4*np.prod(w.shape) for w in kept)/1.99)

@each
def test_canonical_names_are_those_of_the_plan(tmp_path, made, name):
    "Whatever the prefix, and messages speak of the stored names"
    raw,_ = made(name)
    conf,style = LAYOUTS[name][:2]
    with open_checkpoint(folder(tmp_path, CONFS[conf], raw)) as ck:
        assert (
            {k.split('.')[0] for k in ck.tensors}
            <= {
                'model', 'lm_head', 'mtp', 'visual', 'pre_projection', 'post_projection',
                'masked_embedding'})
        assert (
            {t.stored for t in ck.tensors.values()} <= set(raw)
            and ck.stored('model.layers.9.nothing')==named('model.layers.9.nothing', style))
        assert all(ck.stored(k)==t.stored for k,t in ck.tensors.items())

@settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    conf=st.sampled_from([
        'llama', 'qwen3_moe', 'qwen3_5_moe', 'nemotron_h', 'minimax_m2', 'gemma4', 'qwen3_next']),
    style=st.sampled_from(['plain','wrapped','odd','bare','backbone','mistral3']),
    experts=st.sampled_from(['each','stack']),
    shards=st.integers(1,4),
    seed=st.integers(0,2**32))
def test_any_mixture(tmp_path_factory, conf, style, experts, shards, seed):
    "Each tensor in a format of its own"
    d = tmp_path_factory.mktemp('mix')
    raw,plain = stored(conf, style, experts, any_format(seed))
    want = arrays(plain_folder(d/'plain', conf, plain))
    got = folder(d/'as', CONFS[conf], raw, shards)
    assert unlike(arrays(got), want)==[]
    assert unlike(arrays(got, packed=True), want)==[]

# ---- these tests can fail

def _no_reciprocal(mp):
    real = files._read_part
    def as_it_is(s, *a): return real(s._replace(reciprocal=False), *a)
    mp.setattr(files, '_read_part', as_it_is)

def _never_turned(mp):
    mp.setattr(atlas.ground.weights, '_turned', lambda *a: False)

def _no_order(mp):
    def in_order(qs, order, e):
        if order is not None:
            order = np.arange(len(order))
        return QStack(qs, order, e)
    mp.setattr(atlas.ground.weights, 'QStack', in_order)

def _no_fn(mp):
    real = atlas.ground.weights._fill
    def fill(d, dst, q, fn=None): return real(d, dst, q)
    mp.setattr(atlas.ground.weights, '_fill', fill)

def _tiles_turned(mp):
    def turned(q, idx):
        scale = q.parts['scale'][::-1]
        parts = q.parts|dict(scale=scale)
        return QTensor('FP8_BLOCK', q.shape, parts).decode()[idx]
    mp.setattr('atlas.ground.formats._tile_rows', turned)

def _awq_in_order(mp):
    mp.setattr(files, '_AWQ_ORDER', range(8))

def _gptq_as_it_is(mp):
    real = files._gptq_codes
    def codes(spans, got, n, less=1): return real(spans, got, n, 0)
    mp.setattr(files, '_gptq_codes', codes)

def _one_prefix(mp):
    mp.setattr(files, 'trunk_prefix', lambda names: 'model.')

FAULTS = [
    (_no_reciprocal,'qwen3-moe-nvfp4-ct'),
    (_never_turned,'gpt-oss'),
    (_never_turned,'qwen3-vl-moe'),
    (_no_order,'qwen3-next'),
    (_no_order,'gpt-oss-mxfp4'),
    (_no_fn,'qwen3.5'),
    (_tiles_turned,'minimax-m2-fp8-block'),
    (_one_prefix,'qwen3-fp8-half'),
    (_awq_in_order,'qwen3-awq'),
    (_gptq_as_it_is,'llama-gptq'),
    (_one_prefix,'llama-bare')]

@pytest.mark.parametrize('fault,name', FAULTS)
def test_a_fault_is_noticed(tmp_path, made, monkeypatch, fault, name):
    raw,plain = made(name)
    conf = LAYOUTS[name][0]
    want = arrays(plain_folder(tmp_path/'plain', conf, plain))
    got = folder(tmp_path/'as', CONFS[conf], raw)
    fault(monkeypatch)
    try:
        assert unlike(arrays(got), want)
    except CheckpointError:
        pass

# ---- integers in groups

GROUPS = [  # columns, 0: a whole row; without zero points?; rows
    (32,False,24),
    (64,False,24),
    (128,True,24),
    (0,False,24),
    (0,True,24),
    (32,False,8)]  # as many groups as rows

def tensors_file(path, raw):
    "A safetensors file out of {stored name: (array, type)}"
    plain,dtypes = {},{}
    for k,(a,t) in raw.items():
        plain[k] = np.ascontiguousarray(a)
        dtypes[k] = t
    path.write_bytes(st_bytes(plain, dtypes=dtypes))
    return path

@pytest.mark.parametrize('how', ('ct','gptq','awq'))
def test_groups_of_every_length(tmp_path, how):
    "32 to a whole row, with and without zero points, whoever packed them"
    for group,symmetric,rows in GROUPS:
        rng = np.random.default_rng(group)
        a = rng.standard_normal((rows,256)).astype(np.float32)
        raw,want = _int4('m.weight', a, how, group, symmetric)
        path = tensors_file(tmp_path/'t.safetensors', raw)
        t, = st_infos(st_header(File(path)))
        assert (
            (t.name,t.fmt,t.shape)
            ==('m.weight','INT4',a.shape)), group
        got = read_tensor(t).decode()
        assert np.array_equal(got, want), group

@pytest.mark.parametrize('how', ('ct','gptq','awq'))
def test_scales_below_zero(tmp_path, how):
    "are read, for AutoRound writes them; infinite ones are refused"
    a = np.random.default_rng(1).standard_normal(
        (16,256)).astype(np.float32)
    raw,want = _int4('m.weight', a, how, 64, False)
    scales = key(raw, 'scales' if 'm.scales' in raw else 'weight_scale')
    s,dtype = raw[scales]
    def infos(name, scale):
        path = tensors_file(tmp_path/name, raw|{scales:(scale,dtype)})
        return st_infos(st_header(File(path)))
    negative = infos('negative', -s)
    check_scales(negative)
    assert np.array_equal(read_tensor(negative[0]).decode(), -want)
    with pytest.raises(CheckpointError, match='finite'):
        check_scales(infos('infinite', s+np.inf))

def test_awq_knows_no_order_of_columns(tmp_path):
    a = np.random.default_rng(1).standard_normal(
        (16,256)).astype(np.float32)
    raw,_ = _int4('m.weight', a, 'awq', 64, False)
    raw['m.g_idx'] = np.arange(256, dtype=np.int32)//64,'I32'
    path = tensors_file(tmp_path/'t.safetensors', raw)
    with pytest.raises(CheckpointError, match='contradict'):
        st_infos(st_header(File(path)))

def one_more(x):
    "The eight integers in each word, plus one each"
    words = x.view(np.uint32)
    out = np.zeros(x.shape, np.uint32)
    for at in range(0, 32, 4):
        n = (words>>at)+1&15
        out |= n<<at
    return out.view(np.int32)

def test_zero_points_of_the_second_gptq(tmp_path, made):
    "are what they are, and only the config says so"
    raw,conf = layout(made, 'llama-gptq')
    second = dict(raw)
    for k,(a,t) in raw.items():
        if k.endswith('qzeros'):
            second[k] = one_more(a),t
    def loaded(form, tensors):
        q = dict(quant_method='gptq', bits=4, checkpoint_format=form)
        path = folder(tmp_path/form, conf|dict(quantization_config=q), tensors)
        return arrays(path)
    assert unlike(loaded('gptq_v2', second), loaded('gptq', raw))==[]

REFUSED = [  # layout, end of a part's name, what is done to it, what is said
    ('llama-gptq', 'g_idx', lambda a: a.clip(1), 'not shared out evenly', CheckpointError),
    ('llama-gptq', 'g_idx', lambda a: a[:-1], 'contradict', CheckpointError),
    ('llama-gptq', 'qzeros', lambda a: a[:,:-1], 'contradict', CheckpointError),
    ('qwen3-awq', 'qzeros', lambda a: a[:-1], 'contradict', CheckpointError),
    ('qwen3-awq', 'scales', lambda a: a.astype(np.int32), 'I32', CheckpointError),
    ('llama-int4-ct', 'weight_zero_point', lambda a: a[:-1], 'contradict', CheckpointError),
    ('llama-int4-ct', 'weight_scale', lambda a: a.repeat(2, 1), 'groups of 16', UnsupportedError)]

@pytest.mark.parametrize('name,end,change,words,exc', REFUSED)
def test_packed_integers_that_are_refused(tmp_path, made, name, end, change, words, exc):
    raw,conf = layout(made, name)
    matrix = 'o_proj' if end=='weight_scale' else 'down_proj'
    k = key(raw, f'{matrix}.{end}')
    a,t = raw[k]
    b = change(a)
    if b.dtype==np.int32:
        t = 'I32'
    more = {k:(b,t)}
    if words=='groups of 16':
        z = k.replace('weight_scale', 'weight_zero_point')
        more[z] = raw[z][0].repeat(2, 1),'I32'
    path = folder(tmp_path, conf, raw|more)
    e = refused(path, k.removesuffix('.'+end), words, exc=exc)
    assert e.param

@pytest.fixture(scope='module')
def reordered():
    "A layout whose groups lie apart: what is stored, and the numbers"
    return stored('llama', 'plain', '', [(ALL,'int4-gptq-order')])

def test_an_activation_order(tmp_path, reordered):
    "Columns of a group that lie apart are multiplied out: 16 bits on a card, 32 on the host"
    raw,plain = reordered
    want = arrays(plain_folder(tmp_path/'plain', 'llama', plain))
    path = folder(tmp_path/'as', CONFS['llama'], raw)
    assert unlike(arrays(path), want)==[]
    assert unlike(arrays(path, packed=True), want)==[]
    with open_checkpoint(path) as ck:
        t = ck['model.layers.0.self_attn.q_proj.weight']
        assert t.fmt=='INT4_DESC_ACT'
        assert pack(ck.read(t.name), Host()).fmt=='f16'
        assert _read_bytes(t)==4*np.prod(t.shape)
        assert 'INT4_DESC_ACT' in sheet(ck).to_dict()['formats']

def test_an_activation_order_that_is_the_columns_own(tmp_path, reordered):
    "leaves the groups as they are"
    raw,_ = reordered
    name = next(k for k in raw if k.endswith('g_idx'))
    idx = np.sort(raw[name][0])
    raw = raw|{name:(idx,'I32')}
    with open_checkpoint(folder(tmp_path, CONFS['llama'], raw)) as ck:
        assert ck[name.replace('g_idx', 'weight')].fmt=='INT4'

def test_a_shape_that_lies(tmp_path, made):
    raw,conf = layout(made, 'llama-int4-ct')
    k = key(raw, 'o_proj.weight_shape')
    shape = raw[k][0]+8
    path = folder(tmp_path, conf, raw|{k:(shape,'I64')})
    with pytest.raises(CheckpointError, match='weight_shape says'):
        arrays(path)

# ---- bad input

class Never:
    "A device on which nothing may be allocated"
    def __getattr__(self, name):
        pytest.fail(f'{name} before the plan was checked')

def refused(path, *words, exc=CheckpointError):
    """Loading fails with `exc`, whose text has all `words`, before anything is allocated or any
    weight read"""
    with pytest.raises(exc) as e:
        arrays(path, device=Never())
    for w in words:
        assert w in str(e.value), (w, str(e.value))
    return e.value

def layout(made, name):
    return dict(made(name)[0]),CONFS[LAYOUTS[name][0]]
def key(raw, pattern): return next(k for k in raw if re.search(pattern+'$', k))

QUANTISED = [
    n for n,l in LAYOUTS.items()
    if l[3] and l[3][0][1]!='f16']
quantised = pytest.mark.parametrize('name', QUANTISED)
_SCALE = r'(_scale|_scale_inv|_scale_2|_global_scale|_scales|\.scales)$'
def scales(raw):
    return [
        k for k in raw
        if re.search(_SCALE, k) and 'input_' not in k and 'per_expert' not in k]

@quantised
def test_each_kind_of_part_missing(tmp_path, made, name):
    raw,conf = layout(made, name)
    ends = {re.search(_SCALE, k)[1] for k in scales(raw)}
    for end in (*ends,'_blocks','weight_packed','q_proj.weight','o_proj.weight'):
        k = first(k for k in raw if k.endswith(end) and 'input_' not in k)
        if not k:
            continue
        e = refused(folder(tmp_path/'m', conf, {n:v
            for n,v in raw.items() if n!=k}))
        module = re.sub(r'(_blocks)?(_packed)?(\.weight)?$', '', re.sub(_SCALE, '', k))
        assert module in str(e), (k, str(e))

def one_of_each(raw)->list:
    "A scale of each ending"
    return list({re.search(_SCALE, k)[1]:k for k in scales(raw)}.values())

def other_shapes(a)->list:
    "Arrays of the type of `a` that cannot stand for it"
    flat = a.reshape(-1)
    found = [np.zeros((3,5,7), a.dtype), flat[:0], np.concatenate([flat]*3)]
    if a.ndim>1 and a.shape[0]>1:
        found += [a[:-1], a[...,None,:]]
    return found

@quantised
def test_scales_that_contradict_their_weights(tmp_path, made, name):
    raw,conf = layout(made, name)
    for k in one_of_each(raw):
        a,t = raw[k]
        module = re.sub(_SCALE, '', k)
        for b in other_shapes(a):
            refused(folder(tmp_path/'m', conf, raw|{k:(b,t)}), module)
        integers = np.ones(a.shape, np.int64)
        refused(folder(tmp_path/'m', conf, raw|{k:(integers,'I64')}), module)

@quantised
def test_scales_that_are_no_numbers(tmp_path, made, name, monkeypatch):
    raw,conf = layout(made, name)
    def read(*a):
        pytest.fail('a weight was read')
    monkeypatch.setattr('atlas.ground.weights._assemble', read)
    none = dict(F8_E4M3=0xFF, U8=0xFF, F8_E8M0=0xFF, BF16=0x7FC0)
    for k in one_of_each(raw):
        a,t = np.array(raw[k][0]),raw[k][1]
        a.reshape(-1)[a.size//2] = none.get(t, np.nan)
        path = folder(tmp_path/'m', conf, raw|{k:(a,t)})
        refused(path, re.sub(_SCALE, '', k), 'not a finite number')

@quantised
def test_payloads_that_contradict_the_config(tmp_path, made, name):
    raw,conf = layout(made, name)
    def payload(k):
        return raw[k][1] in ('U8','F8_E4M3','I32') and not re.search(_SCALE, k)
    k = next(k for k in raw if payload(k))
    a,t = raw[k]
    for b in (a[:-1], np.concatenate([a,a]), a.reshape(-1)[:0]):
        refused(folder(tmp_path/'m', conf, raw|{k:(b,t)}))

@each
def test_missing_extra_and_misshapen(tmp_path, made, name):
    raw,conf = layout(made, name)
    norm,changes = wrong_tensors(raw)
    for i,(more,words) in enumerate(changes):
        refused(folder(tmp_path/str(i), conf, raw|more), *words)
    lacking = {k:v for k,v in raw.items() if k!=norm}
    refused(folder(tmp_path/'lacking', conf, lacking), 'lacks 1 tensor', norm)
    whole = np.zeros(raw[norm][0].shape, np.int64)
    integers = folder(tmp_path/'integers', conf, raw|{norm:(whole,'I64')})
    refused(integers, norm, 'I64', exc=UnsupportedError)

def wrong_tensors(raw)->tuple:
    "The name of a norm; and what may be stored instead or beside, with what is said of it"
    norm = key(raw, r'layers\.\d+\.(input_layer)?norm\.weight')
    mat = key(raw, r'(embed_tokens|embeddings)\.weight')
    bias,scale = norm[:-7]+'.bias',norm[:-7]+'.weight_scale'
    a,table = raw[norm][0],raw[mat][0]
    codes = np.zeros(table.shape, np.uint8)
    return norm,[
        ({bias:raw[norm]}, ('no use for', bias)),
        ({norm:(a[:-1],'BF16')}, (norm, 'asks for')),
        ({mat:(table[:,:-1],'BF16')}, (mat, 'asks for')),
        ({mat:(codes,'F8_E4M3')}, (mat, 'no scale')),
        ({scale:(np.float32(1),'F32')}, (scale, 'is a scale', 'takes none'))]

def alias(a, b):
    "Norms of layer 1 whose names begin with `a`, again under `b`"
    def more(raw):
        mine = {k:v
            for k,v in raw.items() if k.startswith(a) and 'layers.1.' in k}
        return {k.replace(a, b, 1):v
            for k,v in mine.items() if 'norm' in k}
    return more

def again(name, stored):
    "The tensor `stored` again as `name`"
    return lambda raw: {name:raw[stored]}

def put(name, shape, dtype='BF16'):
    "A tensor that is not there, of zeros or ones"
    a = np.ones(shape, np.float32) if dtype=='F32' else np.zeros(shape, np.uint16)
    return lambda raw: {name:(a, dtype)}

def both(name):
    "The experts as the layout `name` has them"
    def more(raw):
        return {k:v
            for k,v in stored(*LAYOUTS[name])[0].items() if 'experts' in k}
    return more

def split(raw):
    "A fused projection, apart"
    at = 'model.layers.0.linear_attn.'
    return put(at+'in_proj_qkv.weight', (160,160))(raw)|put(at+'in_proj_z.weight', (96,160))(raw)

Q = 'model.layers.0.self_attn.q_proj.'

@pytest.mark.parametrize('name,more,words', (
    ('llama', alias('model.', 'model.language_model.'),
        ('stored twice','model.language_model.layers.1.')),
    ('qwen3.5', alias('model.language_model.', 'model.'), ('stored twice',)),
    ('qwen3-fp8-half', alias('base.net.', 'model.'), ('stored twice',)),
    ('nemotron-h', again('model.embed_tokens.weight', 'backbone.embeddings.weight'),
        ('stored twice',)),
    ('qwen3.5', again('visual.pos_embed.weight', 'model.visual.pos_embed.weight'),
        ('stored twice',)),
    ('mistral3', again('lm_head.weight', 'language_model.lm_head.weight'),
        ('stored twice','language_model.lm_head.weight')),
    ('qwen3-moe-nvfp4-ct', put(Q+'weight', (160,160)), ('stored twice',Q+'weight_packed')),
    ('qwen3-fp8-tensor', put(Q+'weight_scale_inv', (2,2), 'F32'),
        (Q+'weight_scale','is a scale')),
    ('qwen3.5-moe', both('qwen3.5-moe-nvfp4-experts'),
        ('twice','experts.gate_up_proj','experts.0.gate_proj.weight')),
    ('gpt-oss', both('gpt-oss-mxfp4'), ('stored twice','gate_up_proj_blocks')),
    ('qwen3-next', split, ('twice','in_proj_qkvz','in_proj_qkv.'))))
def test_stored_twice(tmp_path, made, name, more, words):
    raw,conf = layout(made, name)
    refused(folder(tmp_path/'m', conf, raw|more(raw)), *words)

def test_scales_of_no_use_are_left_alone(tmp_path, made):
    raw,conf = layout(made, 'qwen3-fp8-tensor')
    more = {f'model.layers.0.self_attn.{n}':(np.float32(v),'F32')
        for n,v in {
            'k_proj.k_scale':2, 'v_proj.v_scale':np.nan, 'q_scale':1, 'k_proj.output_scale':1,
            'q_proj.activation_scale':1, 'rotary_emb.inv_freq':1}.items()}
    assert unlike(
        arrays(folder(tmp_path/'a', conf, raw|more)),
        arrays(folder(tmp_path/'b', conf, raw)))==[]
    tower = {'vision_tower.x.weight':(np.ones(3, np.float32),'F32')}
    refused(folder(tmp_path/'c', conf, raw|tower), 'no use for', 'vision_tower')
    raw,conf = layout(made, 'mistral3')
    arrays(folder(tmp_path/'d', conf, raw|tower))

def test_what_is_said_beside_the_config(tmp_path, made):
    """hf_quant_config.json beside or instead of quantization_config;
    formats come from the tensors whatever it says"""
    raw,conf = layout(made, 'nemotron-h-nvfp4')
    want = arrays(folder(tmp_path/'a', conf, raw))
    def said(algo, **more):
        q = dict(quant_algo=algo, **more)
        return folder(tmp_path/algo, conf, raw, hf_quant_config=dict(producer={}, quantization=q))
    for algo in ('NVFP4','FP8','MIXED_PRECISION'):
        d = said(algo, exclude_modules=['lm_head'], kv_cache_quant_algo='FP8')
        assert unlike(arrays(d), want)==[]
    for algo in ('W4A8_AWQ','INT4'):
        refused(said(algo), algo, exc=UnsupportedError)
    d = folder(tmp_path/'x', conf, raw)
    (d/'hf_quant_config.json').write_text('{')
    refused(d, 'hf_quant_config.json', 'JSON')

@pytest.mark.parametrize(
    'name', ['qwen3-moe-nvfp4-ct','qwen3-moe-fp8-block','gpt-oss-mxfp4','qwen3.5-moe-mixed'])
def test_bits_flipped_in_the_header(tmp_path, made, name):
    "What is not refused loads as before, but for a type that holds as many bits"
    raw,conf = layout(made, name)
    d = folder(tmp_path/'m', conf, raw)
    f = d/'model.safetensors'
    b = f.read_bytes()
    n = 8+int.from_bytes(b[:8], 'little')
    want = arrays(d)
    rng = np.random.default_rng(1)
    loaded = 0
    for i in rng.integers(0, n, 150):
        f.write_bytes(splice(b, int(i), bytes([b[i]^1<<rng.integers(8)])))
        try:
            got = arrays(d)
        except CheckpointError:
            continue
        loaded += 1
        assert unlike(got, want)==[], int(i)
    assert loaded<15

TYPES = [('F32','f4'), ('BF16','u2'), ('U8','u1'), ('F8_E4M3','u1'), ('F8_E8M0','u1'),
    ('I32','i4'), ('F16','f2')]
OTHERS = ('qwen3-moe-nvfp4-ct','qwen3-fp8-tensor','minimax-m2-fp8-block','gpt-oss-mxfp4',
    'nemotron-h-nvfp4')

def something_else(raw, rng)->dict:
    "A tensor of `raw`, of any type, and half of the time of any shape"
    names = sorted(raw)
    k = names[rng.integers(len(names))]
    t,dtype = TYPES[rng.integers(len(TYPES))]
    shape = raw[k][0].shape
    if rng.random()>=.5:
        shape = rng.choice([0,1,2,3,16,96,160],
            rng.integers(4))
    return {k:(np.ones(shape, dtype),t)}

def test_any_part_of_any_shape_and_type(tmp_path, made):
    "A part replaced by something else is refused, or fits as it is"
    rng = np.random.default_rng(0)
    loaded = 0
    for i in range(150):
        raw,conf = layout(made, OTHERS[i%5])
        try:
            got = arrays(folder(tmp_path/'m', conf, raw|something_else(raw, rng)))
        except CheckpointError as e:
            assert str(e)
            continue
        loaded += 1
        assert all(np.isfinite(a).all() for a in got.values())
    assert 10<loaded<75

# ---- many tensors

def many_experts()->dict:
    "A config.json with as many layers and experts as Qwen3.6-35B-A3B has, in tiny"
    conf = CONFS['qwen3_5_moe']
    text = conf['text_config']|dict(
        num_hidden_layers=40, layer_types=(['linear_attention']*3+['full_attention'])*10,
        num_experts=256, num_experts_per_tok=8, hidden_size=32, moe_intermediate_size=32,
        num_attention_heads=2, num_key_value_heads=1, head_dim=16, linear_key_head_dim=8,
        linear_value_head_dim=8, shared_expert_intermediate_size=32)
    vision = conf['vision_config']|dict(depth=27, out_hidden_size=32)
    return conf|dict(text_config=text, vision_config=vision)

_IN_FP8 = re.compile(
    r'layers\.\d+\.(self_attn|mlp\.(experts|shared_expert)\.'
    r'|linear_attn\.(in_proj_(qkv|z)|out_proj)\.)')

def source_shape(w, rows)->tuple:
    "The shape of a source of `w` that brings so many rows"
    if len(w.shape)==1:
        return (rows,)
    each = len(w.shape)==3 and len(w.sources)>1
    return (rows,*w.shape[-1:]) if each or len(w.shape)==2 else w.shape

def in_fp8(wants)->dict:
    "Zeros for all sources of `wants`: matrices of layers in FP8, with a scale, the rest in BF16"
    raw = {}
    for w in wants:
        for s,rows in zip(w.sources, w.rows or w.shape[:1]):
            shape,name = source_shape(w, rows),named(s, 'wrapped')
            if len(shape)==2 and _IN_FP8.search(s) and 'visual' not in s:
                raw[name] = np.zeros(shape, np.uint8),'F8_E4M3'
                raw[name+'_scale_inv'] = np.zeros((1,1), np.uint16),'BF16'
            else:
                raw[name] = np.zeros(shape, np.uint16),'BF16'
    return raw

def test_a_release_of_64_196_tensors_opens_in_seconds(tmp_path):
    "As many tensors as Qwen3.6-35B-A3B-FP8 has, in tiny: the calls that each costs are counted"
    conf = many_experts()
    raw = in_fp8(build(ModelConfig.from_hf(conf)).wants())
    assert len(raw)==64_196
    d = folder(tmp_path, conf, raw, shards=14)
    pr = cProfile.Profile()
    with pr:
        with open_checkpoint(d) as ck:
            check_plan(ck, plan(ck)[1])
    calls = sum(e.callcount for e in pr.getstats())
    assert calls<600*len(raw), calls/len(raw)  # 420

# ---- made-up weights

@pytest.mark.parametrize('name', CONFS)
@pytest.mark.parametrize('weights', ['bf16','fp8','nvfp4','mxfp4','as-shipped'])
def test_dummies(name, weights):
    c = ModelConfig.from_hf(CONFS[name])
    wants = build(c).wants()
    def loaded(packed=False, **kw):
        with dummy_checkpoint(c, wants, weights, **kw) as d:
            return load(d, wants, host, packed=packed),d.nbytes
    a,nbytes = loaded()
    assert unlike(a, loaded(packed=True)[0])==[]
    assert unlike(a, loaded()[0])==[]
    assert unlike(a, loaded(seed=1)[0])
    assert all(np.isfinite(x).all() for x in a.values())
    assert {w.name:w.shape for w in wants}=={k: x.shape for k,x in a.items()}
    shipped_packed = name in ('gpt_oss','minimax_m2')
    plain = ('bf16',) if shipped_packed else ('bf16','as-shipped')
    small = nbytes<.8*sum(2*x.size for x in a.values())
    assert small==(weights not in plain)

@pytest.mark.parametrize('name', ['qwen3.5-moe-mixed','gpt-oss-mxfp4','nemotron-h-nvfp4'])
def test_dummies_like_a_checkpoint(tmp_path, made, name):
    raw,conf = layout(made, name)
    def kinds(ck):
        "Shapes of tensors, and formats of matrices"
        ts = {k:t for k,t in ck.tensors.items() if 'input_scale' not in k}
        return {k:(t.fmt if len(t.shape)>1 else '', t.shape)
            for k,t in ts.items()}
    with open_checkpoint(folder(tmp_path, conf, raw)) as ck:
        m,wants = plan(ck)
        with dummy_checkpoint(ck.config, wants, 'as-shipped', like=ck) as d:
            assert kinds(d)==kinds(ck)
            assert all(np.isfinite(x).all()
                for x in load(d, wants, host).values())

# ---- memory

class SmallHost(Host):
    "A host with `n` bytes"
    def __init__(self, n):
        self.n = n
    def memory(self): return Memory(self.n, self.n)
    def carve(self, shapes):
        assert self.n>=4*sum(int(np.prod(s)) for s in shapes)
        return super().carve(shapes)

def test_what_does_not_fit_is_refused(tmp_path, made):
    raw,conf = layout(made, 'qwen3-fp8-tensor')
    d = folder(tmp_path, conf, raw)
    def size(packed): return sum(w.nbytes for w in arrays(d, packed=packed).values())
    whole,packed = size(False),size(True)
    assert packed<whole/2
    arrays(d, SmallHost(whole), packed=False)
    arrays(d, SmallHost(whole-1), packed=True)
    for n,p in ((whole-1,False), (packed//2,True)):
        with pytest.raises(OutOfMemoryError, match='need'):
            arrays(d, SmallHost(n), packed=p)

@pytest.mark.parametrize('name', ['llama-int4-ct','llama-gptq','qwen3-awq'])
def test_inspect_shows_integers(tmp_path, made, name):
    raw,conf = layout(made, name)
    part = r'\.(weight_(packed|scale|zero_point|shape)|qweight|qzeros|scales|g_idx)$'
    parts = [
        a for k,(a,_) in raw.items()
        if re.search(part, k)]
    with open_checkpoint(folder(tmp_path, conf, raw)) as ck:
        formats = sheet(ck).to_dict()['formats']
        packed = [t for t in ck.tensors.values() if t.fmt=='INT4']
    assert list(formats)[0]=='INT4'
    assert sum(t.nbytes for t in packed)==sum(a.nbytes for a in parts)
