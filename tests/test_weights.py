"""Checkpoint readers against damage: whatever is wrong with a file comes out as a CheckpointError,
before anything large is allocated."""
import json,os,random,struct,tracemalloc
import gguf, numpy as np, pytest
from hypothesis import HealthCheck,given,settings,strategies as st
from safetensors.numpy import save as st_save
from atlas.ground.core import AtlasError,CheckpointError,SourceError,UnsupportedError
from atlas.card.device import get_device
from atlas.ground.formats import QTensor,bf16_to_f32,f32_to_bf16
from atlas.model.model import build
from atlas.ground import files
from atlas.ground.files import INDEX,File
from atlas.ground.llamacpp import gguf_header
from atlas.ground.weights import check_plan,load,open_checkpoint
from helpers.checkpoints import (
    CONF,GGUF_META,GGUF_NAMES,gguf_file,hf_folder,splice,st_bytes,st_entries,weights)

host = get_device('cpu')
def everything(path):
    "Open, load what the model wants, and give it back"
    with open_checkpoint(path) as c:
        return load(c, build(c.config).wants(), host)

def same(a, b):
    return (
        a.keys()==b.keys()
        and all(np.array_equal(a[k], b[k]) for k in a))

def fails(path, *words, exc=CheckpointError):
    "Loading must fail with `exc`, whose text has all `words`"
    with pytest.raises(exc) as e:
        everything(path)
    for w in words:
        assert w in str(e.value), (w, str(e.value))
    return e.value

@pytest.fixture
def good(tmp_path): return everything(hf_folder(tmp_path/'good'))

# ---- sound files

def test_every_road_gives_the_same_weights(tmp_path, good):
    assert (
        same(everything(hf_folder(tmp_path/'two', shards=2)), good)
        and same(everything(hf_folder(tmp_path/'nine', shards=9)), good))
    assert same(everything(tmp_path/'good'/'model.safetensors'), good)
    assert same(everything(gguf_file(tmp_path/'a.gguf', quant='F32')), good)
    (tmp_path/'dir').mkdir()
    gguf_file(tmp_path/'dir'/'b.gguf', quant='F32')
    assert same(everything(tmp_path/'dir'), good)

@pytest.mark.parametrize(
    'quant', ['F16','BF16','Q8_0','Q4_0','Q4_1','Q5_0','Q5_1'])
def test_gguf_formats(tmp_path, quant):
    with open_checkpoint(gguf_file(tmp_path/'m.gguf', quant=quant)) as c:
        for k,a in weights().items():
            want = a if a.ndim<2 else QTensor.encode(a, quant).decode()
            np.testing.assert_array_equal(c.read(k).decode(), want)

def test_half_precision_safetensors(tmp_path):
    ws = weights()
    half = {
        k:f32_to_bf16(a) if i%2 else a.astype(np.float16)
        for i,(k,a) in enumerate(ws.items())}
    with open_checkpoint(hf_folder(tmp_path/'m', half)) as c:
        for i,(k,a) in enumerate(half.items()):
            np.testing.assert_array_equal(
                c.read(k).decode(),
                bf16_to_f32(a) if i%2 else a.astype(np.float32))

def test_a_file_replaced_after_opening_is_not_mixed_in(tmp_path, good):
    d = hf_folder(tmp_path/'m')
    c = open_checkpoint(d)
    (tmp_path/'new').write_bytes(st_bytes(weights(1)))
    os.replace(tmp_path/'new', d/'model.safetensors')
    assert same(load(c, build(c.config).wants(), host), good)
    c.close()
    assert not same(everything(d), good)

def test_nothing_stays_open(tmp_path):
    d = hf_folder(tmp_path/'m', shards=3)
    (d/'model-00003-of-00003.safetensors').write_bytes(b'short')
    n = len(os.listdir('/proc/self/fd'))
    for _ in range(3):
        fails(d)
    with open_checkpoint(gguf_file(tmp_path/'m.gguf')):
        assert len(os.listdir('/proc/self/fd'))==n+1
    assert len(os.listdir('/proc/self/fd'))==n

_dtype = st.sampled_from(['float32','float16','uint8','int64','int32','bool'])
@settings(deadline=None, max_examples=60)
@given(st.dictionaries(
    st.text(min_size=1, max_size=12),
    st.tuples(_dtype, st.lists(st.integers(0,5), max_size=4)),
    max_size=6))
def test_reads_what_the_safetensors_library_writes(tmp_path_factory, spec):
    spec = {k:v for k,v in spec.items() if k!='__metadata__'}
    arrays = {
        k:np.arange(int(np.prod(s))).reshape(s).astype(d)
        for k,(d,s) in spec.items()}
    d = hf_folder(tmp_path_factory.mktemp('st'))
    (d/'model.safetensors').write_bytes(st_save(arrays, {'format':'pt'}))
    with open_checkpoint(d) as c:
        assert set(c.tensors)==set(arrays)
        for k,a in arrays.items():
            t = c.tensors[k]
            assert (t.shape,t.nbytes)==(a.shape,a.nbytes)
            if t.fmt in ('F32','F16'):
                np.testing.assert_array_equal(c.read(k).decode(), a)

def library_gguf(path, meta, align, tensors):
    "A file as the gguf package writes it"
    g = gguf.GGUFWriter(path, 'llama')
    g.add_custom_alignment(align)
    add = {
        bool:g.add_bool, int:g.add_int32, float:g.add_float32, str:g.add_string,
        list:g.add_array}
    for k,v in meta.items():
        add[type(v)](k, v)
    for k,a in tensors.items():
        g.add_tensor(k, a)
    g.write_header_to_file()
    g.write_kv_data_to_file()
    g.write_tensors_to_file()
    g.close()

_value = st.one_of(
    st.booleans(),
    st.integers(-2**31,2**31-1),
    st.floats(width=32, allow_nan=False),
    st.text(max_size=20),
    st.lists(st.integers(-99,99), min_size=1, max_size=5),
    st.lists(st.text(max_size=6), min_size=1, max_size=5),
    st.lists(st.booleans(), min_size=1, max_size=5))
@settings(deadline=None, max_examples=60)
@given(
    st.dictionaries(st.from_regex(r'[a-z.]{1,12}', fullmatch=True), _value, max_size=8),
    st.sampled_from([8,32,256]))
def test_reads_what_the_gguf_library_writes(tmp_path_factory, meta, align):
    p = tmp_path_factory.mktemp('gg')/'m.gguf'
    meta = {'k.'+k:v for k,v in meta.items()}
    a = np.arange(7, dtype=np.float32)
    library_gguf(p, meta, align, dict(a=a, b=a*2))
    f = File(p)
    got,spans = gguf_header(f)
    own = {'general.architecture':'llama', 'general.alignment':align}
    assert got=={k:v for k,v in meta.items() if v!=''}|own
    assert f.read(28, spans['b'].offset)==(a*2).tobytes()
    assert spans['b'].offset%align==0
    f.close()

# ---- truncation and bit flips

def damaged(tmp_path, good, make, name):
    "Call with bytes: `None` if they were refused, else what they load as"
    d = tmp_path/'bad'
    d.mkdir()
    (d/'config.json').write_text(json.dumps(CONF))
    def go(b):
        (d/name).write_bytes(b)
        try:
            return everything(d)
        except CheckpointError as e:
            assert name in str(e) or str(e).startswith('bad '), str(e)     # the file, or its folder
            return None
    return go

def st_good(tmp_path): return st_bytes(weights()), 'model.safetensors'
def gguf_good(tmp_path): return gguf_file(tmp_path/'g.gguf').read_bytes(), 'm.gguf'
each_kind = pytest.mark.parametrize(
    'kind', [st_good,gguf_good], ids=['safetensors','gguf'])

def header_end(b):
    return (
        8+struct.unpack('<Q', b[:8])[0]
        if b[:4]!=b'GGUF'
        else b.rindex(b'ffn_down.weight')+64)

@each_kind
def test_truncated_at_many_lengths(tmp_path, kind):
    b,name = kind(tmp_path)
    go = damaged(tmp_path, None, kind, name)
    ref = go(b)
    assert ref is not None
    h = header_end(b)
    cuts = {
        *range(0, 40),
        *range(40, h+40, 7),
        *range(h, len(b), 997),
        *range(len(b)-40, len(b))}
    pad = len(b)-len(b.rstrip(b'\0')) if name.endswith('gguf') else 0
    for n in sorted(cuts):
        got = go(b[:n])
        assert (got is None or (n>=len(b)-pad and same(got, ref))), n
    for more in (b'\0', b'\0'*64, b'x'*1000):
        assert go(b+more) is None

@each_kind
def test_every_bit_of_the_header_flipped(tmp_path, kind):
    b,name = kind(tmp_path)
    go = damaged(tmp_path, None, kind, name)
    ref = go(b)
    shapes = {k:a.shape for k,a in ref.items()}
    loaded = changed = 0
    for i in range(header_end(b)):
        for bit in random.Random(i).sample(range(8), 2):
            got = go(splice(b, i, bytes([b[i]^1<<bit])))
            if got is None:
                continue
            loaded += 1
            if not same(got, ref):
                changed += 1
                assert {k:a.shape for k,a in got.items()}==shapes
    # a flip inside a value that is free to vary (GGUF's epsilon, an unused key's letters) loads as
    # well; the weights are never others
    assert changed==0 and loaded<header_end(b)//2

@each_kind
def test_no_length_makes_it_allocate(tmp_path, kind):
    b,name = kind(tmp_path)
    go = damaged(tmp_path, None, kind, name)
    go(b)
    tracemalloc.start()
    try:
        for i in range(0, min(header_end(b), 700)):
            for n,fmt in ((2**40,'<Q'), (10**8,'<I')):
                tracemalloc.reset_peak()
                base = tracemalloc.get_traced_memory()[0]
                go(splice(b, i, struct.pack(fmt, n)))
                assert tracemalloc.get_traced_memory()[1]-base < 4_000_000, (i, n)
    finally:
        tracemalloc.stop()

@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.binary(max_size=200),
    kind=st.sampled_from(['st','gguf']),
    n=st.integers(0,2**64-1))
def test_garbage(tmp_path, data, kind, n):
    p = tmp_path/('x.gguf' if kind=='gguf' else 'x.safetensors')
    (tmp_path/'config.json').write_text(json.dumps(CONF))
    p.write_bytes(
        b'GGUF\3\0\0\0'+data if kind=='gguf'
        else struct.pack('<Q', n%(len(data)+2))+data)
    with pytest.raises(CheckpointError):
        everything(p)

# ---- safetensors headers that lie

@pytest.mark.parametrize(
    'header,words',
    [
        (b'', ['invalid JSON']),
        (b'[]', ['is a list']),
        (b'{"a":1', ['invalid JSON']),
        (b'\xff\xfe{}', ['invalid JSON']),
        (b'['*100_000, ['invalid JSON']),
        (b'{"a":'*100_000, ['invalid JSON']),
        (b'{"n":'+b'9'*5000+b'}', ['invalid JSON']),
        (
            b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},'
            b'"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
            ['double key', "'a'"])])
def test_headers_that_are_no_headers(tmp_path, header, words):
    d = hf_folder(tmp_path/'m')
    (d/'model.safetensors').write_bytes(st_bytes({}, header))
    fails(d, 'model.safetensors', *words)

def compact(h):
    "A header as the safetensors library writes it"
    return json.dumps(h, separators=(',',':'))

NORM,EMB = 'model.norm.weight','model.embed_tokens.weight'
@pytest.mark.parametrize(
    'change,words',
    [
        (dict(data_offsets=[0,128]), ['overlap or leave a hole']),
        (dict(data_offsets=[10**15,10**15+128]), ['overlap or leave a hole']),
        (dict(data_offsets=[4095,4223]), ['overlap or leave a hole']),
        (dict(data_offsets=[4097,4225]), ['overlap or leave a hole']),
        (dict(data_offsets=[4224,4096]), ['cannot take']),
        (dict(data_offsets=[4096]), ['data_offsets']),
        (dict(data_offsets=[4096.,4224.]), ['data_offsets']),
        (dict(data_offsets=[-128,0]), ['data_offsets']),
        (dict(data_offsets=None), ['data_offsets']),
        (dict(data_offsets=[2**70,2**70+128]), ['data_offsets']),
        (dict(shape=[33]), ['cannot take']),
        (dict(shape=[2**32,2**32]), ['cannot take']),
        (dict(shape='32'), ['shape']),
        (dict(shape=[-1]), ['shape']),
        (dict(shape=[32,True]), ['shape']),
        (dict(shape=[1]*40), ['shape']),
        (dict(shape=[1]*8+[32]), ['shape']),
        (dict(shape=[4,8]), ['[4, 8]','asks for [32]']),
        (dict(dtype='F99'), ['F99']),
        (dict(dtype=None), ['None']),
        (dict(dtype=[]), ['[]']),
        (dict(dtype='I32'), ['I32','does not decode'])])
@pytest.mark.parametrize(
    'header', [json.dumps,compact], ids=['spaces','compact'])
def test_entries_that_lie(tmp_path, change, words, header):
    h = st_entries(weights())
    h[NORM].update(change)
    d = hf_folder(tmp_path/'m')
    (d/'model.safetensors').write_bytes(st_bytes(
        weights(), header(h).encode()))
    # of two that overlap either may be named
    fails(
        d, 'model.safetensors', *([] if 'overlap' in words[0] else [NORM]),
        *words)

# What the library writes is read column by column, anything else entry by entry

def header_file(path, text):
    "A file with this header, and what the true one says of its bytes"
    path.write_bytes(st_bytes(weights(), text))
    return File(path)

def both_ways(f, text):
    "Spans of a header as columns, if it is read so; and entry by entry, None where that is refused"
    start = 8+len(text)
    try:
        fast = files._plain_spans(f, text.decode(), start)
    except (ValueError,OverflowError,RecursionError):
        fast = None
    with pytest.MonkeyPatch.context() as mp:
        mp.setattr(files, '_plain_spans', lambda *a: None)
        try:
            return fast,files.st_header(f)
        except AtlasError:
            return fast,None

def test_headers_of_the_library_are_columns(tmp_path):
    text = compact(st_entries(weights())).encode()
    meta = b'{"__metadata__":{"format":"pt"},'+text[1:]
    for t in (
        text, text+b'   ', meta,
        st_save(weights())[8:][
            :struct.unpack('<Q', st_save(weights())[:8])[0]]):
        fast,slow = both_ways(header_file(tmp_path/'a', t), t)
        assert (
            fast==slow
            and list(fast)==list(slow)
            and len(fast)==len(weights()))
        assert (
            {type(v) for s in fast.values() for v in s[1:3]}
            =={int})
    spaces = json.dumps(st_entries(weights())).encode()
    fast,slow = both_ways(header_file(tmp_path/'a', spaces), spaces)
    assert fast is None and slow

# changes of the text that leave its length alone or not
ODD = {
    'a comma':(b'},"', b'} "'), 'an end for a comma':(b']},"', b']}}"'),
    'a second one':(b'},"', b'},,"'), 'a zero before':(b'data_offsets":[', b'data_offsets":[0'),
    'a brace':(b'{"dtype"', b'{{"dtype"'), 'a key':(b'"shape"', b'"shapo"'),
    'a key twice':(b'"shape":[', b'"shape":[1],"shape":['),
    'an escape':(b'{"model', b'{"\\u006dodel'), 'an empty size':(b'shape":[', b'shape":[,'),
    'no end':(b']}}', b']} '), 'more behind':(b']}}', b']}}}'),
    'the metadata as a tensor':(b'model.norm.weight', b'__metadata__'),
    'a line in a name':(b'model.norm', b'model\nnorm'),
    'a plus':(b'data_offsets":[', b'data_offsets":[+'),
    'the same name twice':(
        b'model.layers.0.mlp.gate_proj.weight', b'model.layers.0.mlp.up_proj.weight'),
    'bad metadata':(b'{"model', b'{"__metadata__":{"a":},"model'),
    'metadata with a double key':(b'{"model', b'{"__metadata__":{"a":"b","a":"c"},"model')}
@pytest.mark.parametrize('old,new', ODD.values(), ids=ODD)
def test_what_is_no_header_is_no_columns(tmp_path, old, new):
    "Such a text is looked at entry by entry, which refuses it or reads what it says"
    text = compact(st_entries(weights())).encode()
    assert old in text
    odd = text.replace(old, new, 1)
    fast,slow = both_ways(header_file(tmp_path/'a', odd), odd)
    assert fast is None
    if slow is not None:
        assert old!=new

@settings(
    deadline=None, max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    at=st.floats(0, 1),
    new=st.binary(min_size=0, max_size=3),
    size=st.integers(0, 3))
def test_columns_say_what_entries_say(tmp_path, at, new, size):
    "Whatever is written over a header: columns are refused, or are what a look at each entry finds"
    text = compact(
        dict(__metadata__=dict(a='b'))|st_entries(weights())).encode()
    i = int(at*len(text))
    odd = text[:i]+new+text[i+size:]
    try:
        odd.decode()
    except UnicodeDecodeError:
        return
    fast,slow = both_ways(header_file(tmp_path/'a', odd), odd)
    if fast is not None:
        assert fast==slow

def test_unknown_type_is_unsupported(tmp_path):
    h = st_entries(weights())
    h[NORM]['dtype'] = 'F4'
    d = hf_folder(tmp_path/'m')
    (d/'model.safetensors').write_bytes(st_bytes(weights(), h))
    fails(d, 'F4', exc=UnsupportedError)

V_PROJ = 'model.layers.0.self_attn.v_proj.weight'

def with_fp8(path, codes, scale):
    "A folder in which one matrix has these codes and scales"
    d = hf_folder(path)
    ws = weights()|{V_PROJ:codes, V_PROJ+'_scale':scale}
    (d/'model.safetensors').write_bytes(st_bytes(ws, dtypes={V_PROJ:'F8_E4M3'}))
    return d

MISFITS = [
    (np.zeros((16,32), np.uint8), np.ones(5, np.float32)),
    (np.zeros((16,32), np.uint8), np.ones(1, np.int64)),
    (np.zeros((), np.uint8), np.ones((), np.float32))]

@pytest.mark.parametrize('codes,scale', MISFITS)
def test_packed_parts_that_do_not_fit(tmp_path, codes, scale):
    fails(with_fp8(tmp_path/'m', codes, scale), V_PROJ)

def test_packed_parts_that_fit(tmp_path):
    q = QTensor.encode(weights()[V_PROJ], 'FP8_CHANNEL')
    with open_checkpoint(with_fp8(tmp_path/'m', q.parts['data'], q.parts['scale'])) as c:
        np.testing.assert_array_equal(c.read(V_PROJ).decode(), q.decode())
        check_plan(c, build(c.config).wants())

# ---- models that contradict their config

@pytest.mark.parametrize(
    'kind',
    [
        hf_folder,
        lambda p,ws: gguf_file(p.with_suffix('.gguf'), ws, quant='F32')],
    ids=['safetensors','gguf'])
def test_plan_is_checked(tmp_path, kind):
    ws = weights()
    up = 'model.layers.0.mlp.up_proj.weight'
    less = {k:a for k,a in ws.items() if k!=up}
    fails(kind(tmp_path/'less', less), 'lacks 1 tensor', up)
    def other(k, shape, *said):
        path = kind(tmp_path/k, ws|{k:np.zeros(shape, np.float32)})
        # messages speak of tensors as the file does
        fails(path, k if kind is hf_folder else GGUF_NAMES[k], *said)
    other(up, (40,32), '[40, 32]')
    other(EMB, (31,32), '[31, 32]', 'asks for [32, 32]')
    other(NORM, (2,16), 'asks for [32]')

def test_tensors_nobody_wants(tmp_path):
    ws = weights()
    bias = 'model.layers.0.self_attn.q_proj.bias'
    fails(hf_folder(tmp_path/'a', ws|{bias:np.zeros(32,np.float32)}), 'no use for', bias)
    many = {f'junk.{i}':np.zeros(1,np.float32) for i in range(50)}
    e = fails(hf_folder(tmp_path/'b', ws|many), '50 tensor(s)', 'and 46 more')
    assert len(str(e))<500

def test_tensors_that_may_be_there(tmp_path):
    "A head that is tied, and what can be computed"
    ws = weights()
    more = {
        'model.layers.0.self_attn.rotary_emb.inv_freq': np.zeros(8,np.float32),
        'lm_head.weight': ws[EMB]}
    everything(hf_folder(tmp_path/'c', ws|more))

@pytest.mark.parametrize('name', ['blk.0.attn_q.bias','blk.0.ffn_gate_exps.weight'])
def test_gguf_tensors_nobody_wants(tmp_path, name):
    extra = {name: np.zeros(32,np.float32)}
    fails(gguf_file(tmp_path/'m.gguf', extra=extra), 'no use for', name.removesuffix('.weight'))

def test_nothing_is_read_before_the_plan_holds(tmp_path, monkeypatch):
    d = hf_folder(
        tmp_path/'m',
        {k:a for k,a in weights().items() if k!=NORM})
    c = open_checkpoint(d)
    monkeypatch.setattr('atlas.ground.weights._assemble', lambda *a: pytest.fail('read too early'))
    with pytest.raises(CheckpointError):
        load(c, build(c.config).wants(), host)
    c.close()

def test_file_that_shrinks_while_it_is_read(tmp_path):
    for p in (hf_folder(tmp_path/'m'), gguf_file(tmp_path/'m.gguf')):
        c = open_checkpoint(p)
        t = c.tensors[NORM]
        os.truncate(p/'model.safetensors' if p.is_dir() else p, t.offset+3)
        with pytest.raises(CheckpointError, match='bytes short'):
            load(c, build(c.config).wants(), host)
        c.close()

@pytest.mark.parametrize(
    'conf,words',
    [
        (dict(CONF, model_type='mamba'), ['mamba']),
        (dict(CONF, model_type=None), ['model_type']),
        (dict(CONF, num_hidden_layers=10**9), ['num_hidden_layers']),
        (dict(CONF, num_attention_heads=0), ['num_attention_heads']),
        (dict(CONF, hidden_size='32'), ['hidden_size']),
        (dict(CONF, hidden_size=64), ['asks for']),
        (dict(CONF, num_hidden_layers=2), ['lacks','layers.1.']),
        (dict(CONF, quantization_config={'quant_method':'aqlm'}), ['aqlm'])])
def test_configs_that_do_not_fit(tmp_path, conf, words):
    fails(hf_folder(tmp_path/'m', conf=conf), *words)

ODD_VALUES = (
    None, True, 0, -1, 1.5, 10**30, float('nan'),
    float('inf'),
    'x',
    '',
    [],
    [1],
    {},
    {'rope_type':[]},
    [[]])
@pytest.mark.parametrize(
    'key',
    [
        *CONF, 'head_dim', 'rope_scaling', 'rope_parameters', 'original_max_position_embeddings',
        'sliding_window', 'bos_token_id', 'hidden_act', 'torch_dtype', 'quantization_config',
        'attention_bias', 'partial_rotary_factor'])
def test_odd_config_values(tmp_path, key):
    d = hf_folder(tmp_path/'m')
    for v in ODD_VALUES:
        (d/'config.json').write_text(json.dumps(CONF|{key:v}))
        try:
            everything(d)
        except CheckpointError as e:
            assert str(e)

@pytest.mark.parametrize(
    'key',
    [
        *GGUF_META, 'general.name', 'general.alignment', 'llama.attention.key_length',
        'llama.rope.scaling.type', 'llama.rope.scaling.factor', 'llama.rope.dimension_count',
        'llama.expert_count', 'split.count', 'tokenizer.ggml.tokens', 'tokenizer.ggml.eos_token_id',
        'tokenizer.ggml.bos_token_id'])
def test_odd_gguf_values(tmp_path, key):
    for v in (
        None, 0, 1, 7, 2**32-1, float('nan'), 1.5, 'x',
        [1,2], ['a']):
        p = gguf_file(
            tmp_path/'m.gguf',
            meta={k:w
                for k,w in (GGUF_META|{key:v}).items()
                if w is not None})
        try:
            everything(p)
        except CheckpointError as e:
            assert str(e)

def test_gguf_architecture_that_is_no_name(tmp_path):
    b = gguf_file(tmp_path/'g.gguf').read_bytes()
    name = struct.pack('<IQ', 8, 5)+b'llama'
    # a string becomes an array of one byte, as long as it was
    (tmp_path/'bad.gguf').write_bytes(b.replace(
        name, struct.pack('<IIQB', 9, 0, 1, 7), 1))
    fails(tmp_path/'bad.gguf', 'architecture [7]', exc=UnsupportedError)

def test_config_files(tmp_path):
    d = hf_folder(tmp_path/'m')
    for b in (b'', b'[]', b'{', b'{"a":'*50_000, b'\x80', b'null'):
        (d/'config.json').write_bytes(b)
        fails(d, 'config.json')
    (d/'config.json').unlink()
    fails(d, 'no config.json')
    d = hf_folder(tmp_path/'n')
    (d/'generation_config.json').write_text('{')
    fails(d, 'generation_config.json')

def test_sources(tmp_path):
    assert fails(tmp_path/'nowhere', exc=SourceError).status==404
    (tmp_path/'empty').mkdir()
    fails(tmp_path/'empty', 'no model', exc=SourceError)
    (tmp_path/'x.bin').write_bytes(b'x')
    fails(tmp_path/'x.bin', 'neither', exc=UnsupportedError)
    gguf_file(tmp_path/'a.gguf')
    gguf_file(tmp_path/'b.gguf')
    fails(tmp_path, 'a.gguf, b.gguf', exc=SourceError)
    (tmp_path/'dir.gguf').mkdir()
    fails(tmp_path/'dir.gguf', 'dir.gguf')
    (tmp_path/'tower').mkdir()
    gguf_file(tmp_path/'tower'/'m.gguf')
    gguf_file(tmp_path/'tower'/'mmproj-m.gguf')
    everything(tmp_path/'tower')   # whose vision tower is beside it

# ---- shards

def reindex(d, change):
    m = json.loads((d/INDEX).read_text())
    change(m['weight_map'])
    (d/INDEX).write_text(json.dumps(m))
    return d

@pytest.mark.parametrize(
    'name',
    [
        '../x.safetensors', '/etc/x.safetensors', 'a/../../x.safetensors', '..\\x.safetensors',
        'x\0.safetensors', '..', '.', '', 'config.json', 'x.bin', None, 3, ['x.safetensors']])
def test_index_names_plain_files_only(tmp_path, name):
    hf_folder(tmp_path)
    (tmp_path/'x.safetensors').write_bytes((tmp_path/'model.safetensors').read_bytes())
    fails(
        reindex(
            hf_folder(tmp_path/'m', shards=2),
            lambda m: m.update({NORM:name})),
        NORM,
        'beside it')

def test_shards_that_do_not_match_the_index(tmp_path):
    def changed(n, change): return reindex(hf_folder(tmp_path/n, shards=2), change)
    def swap(m):
        m[NORM] = S1 if m[NORM]==S2 else S2
    other = 'other.safetensors'
    fails(changed('names', lambda m: m.update({NORM:other})), other, 'missing')
    fails(changed('swap', swap), NORM, 'says')
    fails(changed('less', lambda m: m.pop(NORM)), NORM, 'says nothing')
    extra = 'model.extra.weight'
    fails(changed('more', lambda m: m.update({extra:S1})), S1, extra)

S1,S2 = (f'model-{i:05}-of-00002.safetensors' for i in (1,2))

def test_shards_that_are_not_what_they_were(tmp_path):
    def new(n): return hf_folder(tmp_path/n, shards=2)
    d = new('missing')
    (d/S2).unlink()
    fails(d, S2, 'missing')
    d = new('twice')
    (d/S1).write_bytes(st_bytes(weights()))
    fails(d, 'says')
    d = new('damaged')
    (d/S2).write_bytes((d/S2).read_bytes()[:-1])
    fails(d, S2)

@pytest.mark.parametrize('bad', ('{}', '{"weight_map":{}}', '{"weight_map":[]}', '[]', '{'))
def test_an_index_that_is_none(tmp_path, bad):
    d = hf_folder(tmp_path/'m', shards=2)
    (d/INDEX).write_text(bad)
    fails(d, INDEX)

# ---- GGUF headers that lie

def gguf_bytes(tmp_path, **kw): return gguf_file(tmp_path/'g.gguf', **kw).read_bytes()
def info_at(b, name):
    "Where the fields of a tensor's description begin: dimensions, type, offset"
    i = b.rindex(name.encode())+len(name)
    nd = struct.unpack_from('<I', b, i)[0]
    return i, i+4, i+4+8*nd, i+8+8*nd

NORM_G,EMB_G = GGUF_NAMES[NORM],GGUF_NAMES[EMB]
HOLE = 'overlap or leave a hole'
FIELDS = ('dimensions','sizes','type','offset')
LIES = [ # field, what is written there, and what is said of it
    ('dimensions', '<I', (0,), '0 dimensions'), ('dimensions', '<I', (5,), '5 dimensions'),
    ('sizes', '<Q', (0,), 'shape'), ('sizes', '<QQ', (2**32,2**32), 'shape'),
    ('sizes', '<Q', (48,), 'blocks of 32'), ('sizes', '<QQ', (32,2**40), HOLE),
    ('sizes', '<QQ', (64,16), ''), ('type', '<I', (0,), HOLE),
    ('type', '<I', (99,), 'GGML type 99'), ('type', '<I', (10,), 'GGML type 10'), # Q2_K
    *(('offset', '<Q', (n,), HOLE)
        for n in (1, 32, 2**40, 2**64-1, 2**64-32))]

@pytest.mark.parametrize('field,fmt,values,said', LIES)
def test_gguf_descriptions_that_lie(tmp_path, field, fmt, values, said):
    b,p = gguf_bytes(tmp_path),tmp_path/'bad.gguf'
    at = dict(zip(FIELDS, info_at(b, EMB_G)))[field]
    p.write_bytes(splice(b, at, struct.pack(fmt, *values)))
    exc = UnsupportedError if 'GGML' in said else CheckpointError
    fails(p, 'bad.gguf', said, exc=exc)

def test_gguf_names_twice(tmp_path):
    b = gguf_bytes(tmp_path)
    p = tmp_path/'bad.gguf'
    p.write_bytes(b.replace(b'blk.0.attn_v.weight', b'blk.0.attn_k.weight'))
    fails(p, 'blk.0.attn_k.weight', 'twice')
    p.write_bytes(b.replace(
        b'llama.context_length',
        b'llama.xmbedding_size').replace(b'llama.xmbedding_size', b'llama.rope.freq_base'))
    fails(p, 'llama.rope.freq_base', 'twice')

def test_gguf_versions_and_kinds(tmp_path):
    b = gguf_bytes(tmp_path)
    p = tmp_path/'bad.gguf'
    for v in (0, 1, 4, 0x03000000):
        p.write_bytes(splice(b, 4, struct.pack('<I', v)))
        fails(p, 'version', exc=UnsupportedError)
    p.write_bytes(splice(b, 4, struct.pack('<I', 2)))
    everything(p)
    p.write_bytes(b'version https://git-lfs.github.com/spec/v1\n')
    fails(p, 'not a GGUF file', 'LFS')
    fails(gguf_file(tmp_path/'a.gguf', arch='mamba'), 'mamba', exc=UnsupportedError)
    fails(
        gguf_file(tmp_path/'b.gguf', meta=GGUF_META|{'split.count':3}),
        'split',
        exc=UnsupportedError)
    for a in (0, 48, 2**31):
        fails(
            gguf_file(tmp_path/'c.gguf', meta=GGUF_META|{'general.alignment':a}) if a!=0
            else _zero_align(tmp_path),
            'alignment')

def _zero_align(tmp_path):
    b = gguf_bytes(tmp_path, meta=GGUF_META|{'general.alignment':32})
    i = b.index(b'general.alignment')+len('general.alignment')+4
    (tmp_path/'z.gguf').write_bytes(splice(b, i, struct.pack('<I', 0)))
    return tmp_path/'z.gguf'

def test_gguf_strings_and_arrays(tmp_path, monkeypatch):
    meta = GGUF_META|{'words':['alpha','beta'], 'tokenizer.ggml.scores':[1.,2.]}
    b = gguf_bytes(tmp_path, meta=meta)
    p = tmp_path/'bad.gguf'
    w = b.index(b'words')+5
    assert struct.unpack_from('<IIQ', b, w)==(9,8,2)
    def refused(at, new, said):
        p.write_bytes(splice(b, w+at, new))
        fails(p, said)
    for n in (3, 2**20, 2**63):
        refused(8, struct.pack('<Q', n), 'bad.gguf')
    refused(4, struct.pack('<I', 9), 'unknown type 9')       # an array of arrays
    refused(16, struct.pack('<Q', 2**62), 'words would take')
    refused(24, b'\xff', 'UTF-8')
    p.write_bytes(b)
    everything(p)
    monkeypatch.setattr('atlas.ground.llamacpp.MAX_ARRAY', 1)
    fails(p, 'claims 2 elements')

def test_gguf_rope_factors(tmp_path):
    with open_checkpoint(gguf_file(
        tmp_path/'a.gguf',
        extra={'rope_freqs.weight':np.arange(1,9,dtype=np.float32)})) as c:
        assert c.config.attention.rope.freq_factors==tuple(range(1,9))
    for bad in (
        np.arange(8), np.arange(1,8),
        np.ones((2,4)),
        np.full(8,np.nan),
        -np.ones(8)):
        fails(
            gguf_file(tmp_path/'b.gguf', extra={'rope_freqs.weight':bad.astype(np.float32)}),
            'rope_freqs.weight')

@pytest.mark.parametrize('bad', (np.nan, np.inf, -np.inf))
def test_weights_that_are_no_numbers(tmp_path, bad):
    """No checksum tells of a bit that flipped inside a tensor, but one in an exponent makes itself
    known"""
    ws = weights()
    ws['model.layers.0.mlp.down_proj.weight'][3,5] = bad
    with (
        open_checkpoint(hf_folder(tmp_path, ws)) as c,
        pytest.raises(
            CheckpointError,
            match='model.layers.0.mlp.down_proj.weight holds numbers that are not finite')
    ):
        load(c, build(c.config).wants(), get_device('cpu'))
