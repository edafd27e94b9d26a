"""Quantised checkpoints: the bytes are modelopt's, every reader is told the truth, the engine
computes with them, and whatever goes wrong leaves nothing half-written."""
import errno,fnmatch,json,os,re,shutil,signal,struct,subprocess,sys,threading,tracemalloc
import numpy as np, pytest
from contextlib import ExitStack
from hypothesis import given,settings,strategies as st
from pathlib import Path
from safetensors.numpy import save_file
from typer.testing import CliRunner
from atlas import LLM
from atlas.ground import quantize as Q
from atlas.use.cli import app
from atlas.ground.core import AtlasError,CheckpointError,ConfigError,SourceError,UnsupportedError
from atlas.ground.files import INDEX,read_tensor
from atlas.ground.formats import bf16_to_f32,f32_to_bf16
from atlas.ground.quantize import LAYOUTS,QuantReport,plot_errors,quantize
from helpers.waiting import WAIT

data = Path(__file__).parent/'data'
LAYOUT = {(l.format,l.name):l for l in LAYOUTS}
USUAL = [k for k in LAYOUT if k!=('mxfp4','gpt-oss')]
lay = pytest.mark.parametrize(
    'format,layout', USUAL, ids=['-'.join(k) for k in USUAL])

# ---- a checkpoint, and readers that know nothing of Atlas

CONF = dict(
    model_type='llama', vocab_size=64, hidden_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, intermediate_size=256, max_position_embeddings=256, rms_norm_eps=1e-5,
    rope_theta=10000.0, tie_word_embeddings=False, eos_token_id=2)
SHAPES = {
    'self_attn.q_proj':(128,128), 'self_attn.k_proj':(64,128),
    'self_attn.v_proj':(64,128), 'self_attn.o_proj':(128,128),
    'mlp.gate_proj':(256,128), 'mlp.up_proj':(256,128),
    'mlp.down_proj':(128,256)}

def weights(seed=0, layers=3):
    "Stored name -> uint16 BF16 codes"
    r = np.random.default_rng(seed)
    t = {f'model.layers.{i}.{k}':r.standard_normal(s)*.1*(1+i)
        for i in range(layers)
        for k,s in SHAPES.items()}
    t |= {f'model.layers.{i}.{k}_layernorm':np.ones(128)
        for i in range(layers)
        for k in ('input','post_attention')}
    t |= {
        'model.embed_tokens':r.standard_normal((64,128)),
        'lm_head':r.standard_normal((64,128))*.1,
        'model.norm':np.ones(128)}
    return {k+'.weight':f32_to_bf16(np.float32(v))
        for k,v in t.items()}

def st_bytes(tensors, types={}):
    d,pos = {},0
    for k,a in tensors.items():
        d[k] = dict(
            dtype=types.get(k)
            or {
                'uint16':'BF16', 'float32':'F32', 'float16':'F16',
                'uint8':'U8'}[str(a.dtype)],
            shape=list(a.shape),
            data_offsets=[pos,pos:=pos+a.nbytes])
    h = json.dumps(d).encode()
    return (
        struct.pack('<Q', len(h))+h
        +b''.join(a.tobytes() for a in tensors.values()))

def folder(path, tensors=None, conf=CONF, shards=1):
    tensors = weights() if tensors is None else tensors
    path.mkdir(parents=True)
    (path/'config.json').write_text(json.dumps(conf))
    (path/'merges.txt').write_text('a b')
    (path/'chat_template.jinja').write_text('x')
    if shards==1:
        (path/'model.safetensors').write_bytes(st_bytes(tensors))
    else:
        write_shards(path, tensors, shards)
    return path

def write_shards(path, tensors, shards):
    names = [f'm{i}.safetensors' for i in range(shards)]
    for i,n in enumerate(names):
        (path/n).write_bytes(st_bytes(dict(list(tensors.items())[i::shards])))
    where = {k:names[i%shards] for i,k in enumerate(tensors)}
    (path/INDEX).write_text(json.dumps(dict(weight_map=where)))

def raw_file(p):
    "The same of one file"
    b = p.read_bytes()
    n, = struct.unpack('<Q', b[:8])
    assert n%8==0
    head,data = json.loads(b[8:8+n]),b[8+n:]
    head.pop('__metadata__', None)
    out = {}
    for k,e in head.items():
        a,z = e['data_offsets']
        out[k] = e['dtype'],tuple(e['shape']),data[a:z]
        assert a%{'F32':4, 'BF16':2, 'F16':2}.get(e['dtype'], 1)==0
    return out

def raw(path):
    """Name -> (type, shape, bytes) of all tensors, by the book;
    data must be aligned to its type, and the index must agree"""
    out,where = {},{}
    for p in sorted(path.glob('*.safetensors')):
        found = raw_file(p)
        out |= found
        where |= dict.fromkeys(found, p.name)
    if (path/INDEX).exists():
        assert json.loads((path/INDEX).read_text())['weight_map']==where
    else:
        assert set(where.values())=={'model.safetensors'}
    return out

def tree(path):
    return {str(p.relative_to(path)):p.read_bytes()
        for p in sorted(path.rglob('*')) if p.is_file()}
def hidden(path):
    return [p.name for p in path.iterdir() if p.name.startswith('.')]
def config(path): return json.loads((path/'config.json').read_text())['quantization_config']
def decoded(path):
    with ExitStack() as es:
        return {t.name:read_tensor(t).decode()
            for t in Q._infos(Q._source(path, es)[1]).values()}

# ---- the bytes

E2M1 = np.float32([0, .5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.float32([
    (-1)**(c>>7)
    *(
        (c&7)/8*2**-6 if not c>>3&15
        else (1+(c&7)/8)
        *2.**((c>>3&15)-7))
    for c in range(127)])
def even(x, mags): # nearest of the ascending magnitudes, ties to the even code
    x = np.abs(x)
    c = np.clip(np.searchsorted(mags, x), 1, len(mags)-1)
    lo = mags[c-1].astype(np.float64)
    hi = mags[c].astype(np.float64)
    x = x.astype(np.float64)
    up = (
        (x-lo>hi-x)|(
            (x-lo==hi-x)&(c%2==0)))
    return np.where(
        x>=mags[-1], len(mags)-1,
        np.where(up, c, c-1)).astype(np.uint8)

def nvfp4(w, amax):
    "modelopt's rule, as models.md has it"
    g = np.float32(amax)/np.float32(2688)
    b = w.reshape(len(w),-1,16)
    s = np.abs(b).max(-1)/np.float32(6)/g
    s = np.where(s==0, 1, s).clip(2**-9, 448)
    s = even(s.astype(np.float32), E4M3)
    codes = four_bits(b/(E4M3[s]*g)[...,None], w.shape)
    return codes,s.tobytes(),np.float32(g).tobytes()

def four_bits(x, shape)->bytes:
    "E2M1 codes of `x`, two in a byte"
    c = (even(x, E2M1)+8*(x<0)).reshape(shape).astype(np.uint8)
    return (c[:,1::2]<<4 | c[:,::2]).tobytes()

def fused(k): # what engines multiply as one
    return re.sub(r'(gate|up)_proj', 'gu', re.sub(r'[qkv]_proj', 'qkv', k))

def largest(ms)->dict:
    "The largest magnitude of all that is multiplied as one"
    big = {}
    for k,a in ms.items():
        big[fused(k)] = max(big.get(fused(k), 0), float(np.abs(a).max()))
    return big

def with_small_rows(ws):
    "Some are zero, and some nearly"
    ws['model.layers.1.mlp.down_proj.weight'][:4] = 0
    q = ws['model.layers.1.self_attn.q_proj.weight']
    q[5:] = f32_to_bf16(bf16_to_f32(q[5:])*np.float32(1e-6))
    return ws

def test_nvfp4_bytes(tmp_path):
    "Every packed tensor against the rule written out anew; q, k, v and gate, up share their factor"
    ws = with_small_rows(weights(3))
    quantize(folder(tmp_path/'s', ws), tmp_path/'d', 'nvfp4')
    got = raw(tmp_path/'d')
    ms = {k:bf16_to_f32(a) for k,a in ws.items() if '_proj' in k}
    big = largest(ms)
    for k,a in ms.items():
        of_three = [got[k+end] for end in ('','_scale','_scale_2')]
        types,shapes,parts = zip(*of_three)
        rows,cols = a.shape
        assert list(parts)==list(nvfp4(a, big[fused(k)])), k
        assert types==('U8','F8_E4M3','F32')
        assert shapes==((rows,cols//2), (rows,cols//16), ())
    assert len({got[f'model.layers.0.self_attn.{x}_proj.weight_scale_2'][2] for x in 'qkv'})==1

def mxfp4(w):
    "The smallest power of two that cuts nothing off, by trying"
    b = w.reshape(len(w),-1,32)
    top = np.abs(b).max(-1).astype(np.float64)
    e = np.full(top.shape, -127)
    for k in range(-126, 128):
        e = np.where((top>6*2.**(k-1))&(top<=6*2.**k), k, e)
    x = b.astype(np.float64)/2.**e[...,None]
    return four_bits(x.astype(np.float32), w.shape),(e+127).astype(np.uint8).tobytes()

def e4m3(x):
    "The bytes of E4M3 codes"
    return (even(x, E4M3)+128*np.signbit(x)).astype(np.uint8).tobytes()

def by_tensor(w):
    "Scales of FP8, in each of its layouts, and as they multiply"
    s = np.abs(w).max()/np.float32(448)
    return s,s

def by_block(w):
    s = np.abs(w.reshape(128, 2, 128)).max((0,2))/np.float32(448)
    return s,s.repeat(128)

def by_channel(w):
    s = np.abs(w).max(1)/np.float32(448)
    s[s==0] = 1
    return s,s[:,None]

DOWN = 'model.layers.1.mlp.down_proj.weight'

def one_with_zeros():
    "Weights, one matrix of which begins with rows of zeros"
    ws = weights(4)
    ws[DOWN][:3] = 0
    return ws,bf16_to_f32(ws[DOWN])

def test_mxfp4_bytes(tmp_path):
    ws,w = one_with_zeros()
    quantize(folder(tmp_path/'s', ws), tmp_path/'d', 'mxfp4')
    got = raw(tmp_path/'d')
    assert [got[DOWN+e][2] for e in ('_packed','_scale')]==list(mxfp4(w))

@pytest.mark.parametrize('layout,scales,end', (
    ('tensor', by_tensor, '_scale'),
    ('block', by_block, '_scale_inv'),
    ('channel', by_channel, '_scale')))
def test_fp8_bytes(tmp_path, layout, scales, end):
    ws,w = one_with_zeros()
    quantize(folder(tmp_path/'s', ws), tmp_path/'d', 'fp8', layout)
    got = raw(tmp_path/'d')
    s,spread = scales(w)
    assert [got[DOWN+e][2] for e in ('',end)]==[e4m3(w/spread), s.tobytes()]

@lay
def test_what_is_not_taken_is_copied(tmp_path, format, layout):
    ws = weights()|dict(odd=np.uint8([7]), none=np.zeros((0,3), np.uint8))
    src,d = folder(tmp_path/'s', ws, shards=2),tmp_path/'d'
    quantize(src, d, format, layout, shard_size=40_000)
    got,old = raw(d),raw_any(src)
    for k in ws:
        if '_proj' not in k:
            assert got[k]==old[k]
    sizes = [sum(z-a for a,z in offsets(p)) for p in d.glob('*.safetensors')]
    assert len(sizes)>3 and max(sizes)<=40_000
    assert (d/'merges.txt').read_text()=='a b'
    assert (d/'chat_template.jinja').exists()
    assert not (d/'m0.safetensors').exists()
    assert set(json.loads((d/'config.json').read_text()))=={*CONF,'quantization_config'}

def head(p):
    "Entries of a safetensors file's header"
    b = p.read_bytes()
    n, = struct.unpack('<Q', b[:8])
    return {k:e
        for k,e in json.loads(b[8:8+n]).items() if k!='__metadata__'}

def offsets(p): return [e['data_offsets'] for e in head(p).values()]

def raw_any(path):
    "As `raw`, of any file"
    out = {}
    for p in path.glob('*.safetensors'):
        b = p.read_bytes()
        n, = struct.unpack('<Q', b[:8])
        for k,e in head(p).items():
            a,z = e['data_offsets']
            out[k] = e['dtype'],tuple(e['shape']),b[8+n+a:8+n+z]
    return out

@lay
def test_the_same_whatever_the_threads_slabs_and_shards(tmp_path, monkeypatch, format, layout):
    src = folder(tmp_path/'s')
    quantize(src, tmp_path/'a', format, layout)
    monkeypatch.setattr(Q, 'SLAB', 128)
    monkeypatch.setattr(Q, 'processors', lambda: 1)
    quantize(src, tmp_path/'b', format, layout, shard_size=10_000)
    assert raw(tmp_path/'a')==raw(tmp_path/'b')

def drawn(r, o, i)->dict:
    "Weights with heavy tails, of `o` rows and `i` blocks and multiples of them"
    shapes = dict(q_proj=(o*3,i*32), k_proj=(o,i*32),
        v_proj=(o*40,i*32), o_proj=(7,i*32))
    def some(s): return (r.standard_t(3, s)*10.**r.uniform(-3,1)).astype(np.float32)
    a = {f'model.layers.0.self_attn.{k}.weight': some(s) for k,s in shapes.items()}
    return a|{'model.embed_tokens.weight': np.ones((3,32), np.float32)}

def check_errors(rep, was, now, most):
    "The errors that a report speaks of are those of what can be read back"
    for row in rep.rows:
        x = was[row['name']+'.weight'].astype(np.float64)
        e = np.linalg.norm(now[row['name']+'.weight']-x)/(np.linalg.norm(x) or 1)
        assert abs(e-row['error'])<1e-6
        assert row['error']<most
        assert row['weights']==x.size

def check_bytes(rep, src, dst):
    "And its bytes are those of the files"
    sizes = {k: len(b)
        for k,(_,_,b) in raw(dst).items()}
    assert rep.after==sum(sizes.values())
    assert rep.before==sum(len(b)
        for _,_,b in raw_any(src).values())
    for r in rep.rows:
        assert r['after']==sum(n
            for k,n in sizes.items() if k.startswith(r['name']+'.'))

@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0,10**6),
    key=st.sampled_from(USUAL),
    o=st.integers(1,9),
    i=st.integers(1,9),
    encode=st.sampled_from([f32_to_bf16,np.float16,np.asarray]),
    shard=st.integers(2000,10**6))
def test_any_shape(tmp_path_factory, seed, key, o, i, encode, shard):
    "Errors in the report are those of what can be read back; bytes are those of the files"
    tmp = tmp_path_factory.mktemp('q')
    a = drawn(np.random.default_rng(seed), o, i)
    if seed%3==0:
        a['model.layers.0.self_attn.k_proj.weight'][:] = 0
    src = folder(tmp/'s', {k: encode(v) for k,v in a.items()})
    try:
        rep = quantize(src, tmp/'d', *key, shard_size=shard)
    except UnsupportedError as e:
        assert key==('fp8','block') and 'whole blocks of 128' in str(e)
        return
    was,now = decoded(src),decoded(tmp/'d')
    assert set(was)==set(now)
    check_errors(rep, was, now, dict(nvfp4=.3, mxfp4=.3, fp8=.08)[key[0]])
    check_bytes(rep, src, tmp/'d')

# ---- the engine computes with them

FAMILIES = ['llama32-tied','qwen35-moe-stacked','qwen3-next','gpt-oss','gemma4-moe','nemotron-h',
    'granite-hybrid','minimax-m2','mistral3-wrapped','qwen3-vl-moe','qwen35-dense']
NARROW = {'gpt-oss','nemotron-h','mistral3-wrapped'} # widths that 32 does not divide

def stacked(ws, k, n):
    "`n` experts that have tensors of their own among `ws`, as the one tensor `k`"
    p,leaf = k.rsplit('.', 1)
    names = ('gate_proj','up_proj') if leaf=='gate_up_proj' else (leaf,)
    def expert(e): return np.concatenate([ws[f'{p}.{e}.{name}.weight'] for name in names])
    return np.stack([expert(e) for e in range(n)])

def twin(src, quantised, out):
    """`src` with its weights replaced by what `quantised` holds, in float32 and in the source's
    own layout"""
    shutil.copytree(src, out)
    now,was,new = decoded(quantised),decoded(src),{}
    for k,a in was.items():
        b = now[k] if k in now else stacked(now, k, len(a))
        new[k] = np.ascontiguousarray(b if b.shape==a.shape else b.swapaxes(1,2))
        assert new[k].shape==a.shape
    for p in out.glob('*.safetensors'):
        p.unlink()
    save_file(new, out/'model.safetensors')
    (out/INDEX).unlink(missing_ok=True)
    return out

def logits(path, ids=tuple(range(3, 40))):
    "As the definition has them"
    return LLM(str(path), device='cpu', exact=True).logits(ids)

def far(a, b)->float:
    "How far logits are from others, as a part of the largest"
    return float(np.abs(a-b).max()/np.abs(b).max())

def refusal(name, format)->str:
    "What is said of a family that cannot have a format, or nothing"
    if name=='gpt-oss' and format=='fp8':
        return 'No reader knows the experts'
    return 'whole blocks of 32' if format=='mxfp4' and name in NARROW else ''

@pytest.mark.parametrize('name', FAMILIES)
@pytest.mark.parametrize('format', ['nvfp4','fp8','mxfp4'])
def test_logits_are_those_of_the_decoded_weights(tmp_path, name, format):
    src = data/name
    why = refusal(name, format)
    if why:
        with pytest.raises(UnsupportedError, match=why):
            quantize(src, tmp_path/'q', format)
        return
    assert quantize(src, tmp_path/'q', format).rows
    a,b = logits(tmp_path/'q'),logits(twin(src, tmp_path/'q', tmp_path/'t'))
    was,now = decoded(src),decoded(tmp_path/'t')
    for k,w in was.items():
        assert np.linalg.norm(now[k]-w)<=.2*np.linalg.norm(w), k
    assert far(a, b)<=1e-5
    assert far(logits(src), b)>1e-3 # something was lost: they are not the source's

@lay
def test_layouts_load(tmp_path, format, layout):
    src = folder(tmp_path/'s')
    quantize(src, tmp_path/'q', format, layout)
    a,b = logits(tmp_path/'q'),logits(twin(src, tmp_path/'q', tmp_path/'t'))
    assert far(a, b)<=1e-5

def in_bf16(src, path):
    "A copy of gpt-oss, its experts [in,out] as plain numbers are stored"
    shutil.copytree(src, path)
    c = json.loads((path/'config.json').read_text())
    c.pop('quantization_config')
    (path/'config.json').write_text(json.dumps(c))
    def stored(a): return np.ascontiguousarray(a.swapaxes(1,2)) if a.ndim==3 else a
    ts = {k:f32_to_bf16(stored(a))
        for k,a in decoded(src).items()}
    (path/'model.safetensors').write_bytes(st_bytes(ts))
    return path

def test_gpt_oss_stays_a_stack(tmp_path):
    """Decoded to BF16 and encoded again, gpt-oss's experts are the same numbers, under the same
    names"""
    src = data/'gpt-oss-mxfp4'
    plain = in_bf16(src, tmp_path/'s')
    rep = quantize(plain, tmp_path/'d', 'mxfp4')
    assert rep.layout=='gpt-oss' and rep.error==0
    old,new = raw_any(src),raw(tmp_path/'d')
    assert set(new)==set(old)
    def kinds(ts): return {k:v[:2] for k,v in ts.items() if 'experts' in k}
    assert kinds(new)==kinds(old)
    assert np.array_equal(logits(src), logits(tmp_path/'d'))

def test_head(tmp_path):
    src = folder(tmp_path/'s')
    quantize(src, tmp_path/'q', 'nvfp4', head=True)
    assert 'lm_head.weight_scale_2' in raw(tmp_path/'q')
    assert 'lm_head' not in config(tmp_path/'q')['ignore']
    assert np.isfinite(logits(tmp_path/'q')).all()
    with pytest.raises(ConfigError, match='no reader knows'):
        quantize(src, tmp_path/'x', 'fp8', 'block', head=True)
    tied = {k:v for k,v in weights().items() if 'lm_head' not in k}
    with pytest.raises(ConfigError, match='no output matrix of its own'):
        quantize(
            folder(tmp_path/'t', tied, CONF|dict(tie_word_embeddings=True)), tmp_path/'x',
            'nvfp4', head=True)

# ---- what readers are told

def kept_by_reader(q, m):
    """Does a reader of the config leave module `m` alone? After vLLM 0.33 and compressed-tensors
    0.20"""
    if q['quant_method']=='modelopt':
        return any(fnmatch.fnmatch(m, p) or p in m for p in q['ignore'])
    if q['quant_method']=='fp8':
        return any(m==p or '.experts' in m and m.startswith(p)
            for p in q['modules_to_not_convert'])
    return any(
        re.match(p.removeprefix('re:'), m) if p.startswith('re:')
        else p==m
        for p in q['ignore'])

def modules(path):
    "Module -> is it quantised? of all matrices in the files"
    t = raw(path)
    m = {re.sub(r'\.weight(_packed)?$', '', k):v
        for k,v in t.items()
        if k.endswith(('.weight','.weight_packed'))
        and len(v[1])>1
        and 'embed' not in k
        and 'conv1d' not in k}
    return {k:k+'.weight_scale' in t or k+'.weight_scale_inv' in t for k in m}

GLOBS = [
    '*layers.1.*', '*.o_proj', 'model.layers.0.mlp.down_proj', '*layers.[02].self_attn*',
    '*gate_proj*', '*.layers.2.mlp.up_proj.weight']
@lay
@pytest.mark.parametrize(
    'keep',
    [
        (),
        (GLOBS[0],),
        (GLOBS[1],GLOBS[4]),
        (GLOBS[2],GLOBS[3],GLOBS[5])])
def test_keep_reaches_the_config(tmp_path, format, layout, keep):
    d = tmp_path/'d'
    quantize(folder(tmp_path/'s'), d, format, layout, keep)
    q,ms = config(d),modules(d)
    for m,taken in ms.items():
        assert kept_by_reader(q, m) is not taken, (m,q)
    for g in keep:
        assert not any(t for m,t in ms.items() if matches(m, g))
    check_groups(ms)
    hf = d/'hf_quant_config.json'
    assert hf.exists()==(q['quant_method']=='modelopt')
    if hf.exists():
        h = json.loads(hf.read_text())['quantization']
        assert h['exclude_modules']==q['ignore']
        assert {'quant_algo','group_size','kv_cache_quant_algo'}<=set(h)

def matches(module, glob):
    return fnmatch.fnmatch(module, glob) or fnmatch.fnmatch(module+'.weight', glob)

def check_groups(ms):
    "Modules that readers join are taken together, or not at all"
    for p in {m.rpartition('.')[0] for m in ms}:
        for group in (['q_proj','k_proj','v_proj'],['gate_proj','up_proj']):
            assert len({ms[f'{p}.{x}'] for x in group if f'{p}.{x}' in ms})<2

@pytest.mark.parametrize('name', ['qwen35-moe-stacked','nemotron-h','minimax-m2','gemma4-moe'])
@pytest.mark.parametrize(
    'format,layout',
    [k for k in USUAL if k!=('fp8','block')],
    ids=lambda v: str(v))
def test_lists_of_real_families(tmp_path, name, format, layout):
    if format=='mxfp4' and name in NARROW:
        return
    quantize(data/name, tmp_path/'d', format, layout)
    q,ms = config(tmp_path/'d'),modules(tmp_path/'d')
    assert (
        any(ms.values())
        and not any(
            t for m,t in ms.items()
            if re.search(r'visual|mtp|router|\.gate$|shared_expert_gate|in_proj_[ab]$', m)))
    for m,taken in ms.items():
        assert kept_by_reader(q, m) is not taken, (m,q)

@lay
def test_layers_one_and_ten(tmp_path, format, layout):
    "A prefix of layer 1 must not be taken for one of layer 10; a tied head is told of, too"
    ws = {k:v
        for k,v in weights(layers=11).items() if 'lm_head' not in k}
    quantize(
        folder(tmp_path/'s', ws, CONF|dict(num_hidden_layers=11, tie_word_embeddings=True)),
        tmp_path/'d', format, layout, ['*layers.1.*'])
    q,ms = config(tmp_path/'d'),modules(tmp_path/'d')
    assert (
        ms['model.layers.10.mlp.up_proj']
        and not ms['model.layers.1.mlp.up_proj']
        and kept_by_reader(q, 'lm_head'))
    for m,taken in ms.items():
        assert kept_by_reader(q, m) is not taken, (m,q)

def test_a_glob_that_matches_nothing(tmp_path):
    src = folder(tmp_path/'s')
    with pytest.raises(ConfigError, match='matches no tensor') as e:
        quantize(src, tmp_path/'d', 'fp8', keep=['*qproj*'])
    assert e.value.param=='keep'
    quantize(src, tmp_path/'d', 'fp8', keep=['lm_head'])

SMALL_SHAPES = {
    'self_attn.q_proj': (96,72),
    'self_attn.k_proj': (48,72),
    'self_attn.v_proj': (48,72),
    'self_attn.o_proj': (72,96),
    'mlp.gate_proj': (192,72),
    'mlp.up_proj': (192,72),
    'mlp.down_proj': (72,192)}

def narrow(path):
    "A model of one layer whose widths blocks do not divide"
    sizes = dict(hidden_size=72, head_dim=48, intermediate_size=192, num_hidden_layers=1)
    heads = dict(num_attention_heads=2, num_key_value_heads=1)
    r = np.random.default_rng(0)
    ws = {f'layers.0.{k}': r.standard_normal(v, np.float32) for k,v in SMALL_SHAPES.items()}
    ws['embed_tokens'] = np.ones((64,72), np.float32)
    for k in ('norm','layers.0.input_layernorm','layers.0.post_attention_layernorm'):
        ws[k] = np.ones(72, np.float32)
    ws = {f'model.{k}.weight':f32_to_bf16(a) for k,a in ws.items()}
    ws['lm_head.weight'] = ws['model.embed_tokens.weight']
    return folder(path, ws, CONF|sizes|heads)

def test_widths(tmp_path):
    "What blocks do not divide is kept, with what is fused to it, and said; FP8 takes rows instead"
    src = narrow(tmp_path/'s')
    def taken(rep): return {x['name'][15:] for x in rep.rows}
    rep = quantize(src, tmp_path/'d', 'nvfp4')
    assert taken(rep)=={'self_attn.o_proj','mlp.down_proj'}
    assert {x['why'] for x in rep.kept}=={'rows of 72 are not whole blocks of 16'}
    assert quantize(src, tmp_path/'e', 'fp8').layout=='channel'
    rep = quantize(src, tmp_path/'f', 'fp8', 'block')
    assert taken(rep)=={f'self_attn.{k}_proj' for k in 'qkvo'}
    assert 'not whole blocks of 128' in rep.kept[0]['why']
    for d in 'def':
        assert np.isfinite(LLM(str(tmp_path/d), device='cpu').logits([3,4])).all()

# ---- what was quantised before

def test_requantize(tmp_path):
    fp8,d = tmp_path/'f',tmp_path/'d'
    quantize(folder(tmp_path/'s'), fp8, 'fp8', 'tensor')
    stored = raw(fp8)
    for k in stored:
        assert not k.endswith('input_scale')
    with pytest.raises(UnsupportedError, match='--requantize'):
        quantize(fp8, d, 'nvfp4')
    rep = quantize(fp8, d, 'nvfp4', requantize=True)
    got,k = raw(d),'model.layers.1.mlp.down_proj.weight'
    was = decoded(fp8)[k]
    assert got[k][2]==nvfp4(was, np.abs(was).max())[0]
    first = rep.rows[0]
    parts = [len(v[2]) for n,v in stored.items() if n.startswith(first['name']+'.')]
    assert first['before']==sum(parts)
    assert config(d)['quant_algo']=='W4A16_NVFP4'
    assert {v[0] for k,v in got.items() if k.endswith('weight_scale')}=={'F8_E4M3'}

@pytest.mark.parametrize(
    'name',
    sorted(
        p.name for p in data.iterdir()
        if re.search('fp8|nvfp4|mxfp4|mixed', p.name) and 'gemma4' not in p.name))
def test_requantize_every_stored_format(tmp_path, name):
    "From any format to NVFP4 (gpt-oss: to its own again) and back into the engine"
    oss = 'gpt-oss' in name
    rep = quantize(data/name, tmp_path/'d', 'mxfp4' if oss else 'nvfp4', requantize=True)
    assert rep.rows and all(r['error']<.2 for r in rep.rows)
    a = LLM(str(tmp_path/'d'), device='cpu').logits(range(3,20))
    assert np.isfinite(a).all()
    if oss:
        assert (
            rep.error==0
            and np.array_equal(
                a,
                LLM(str(data/name), device='cpu').logits(range(3,20))))

@pytest.fixture(scope='module')
def in_part():
    "NVIDIA's own: its experts are quantised, its attention is not"
    return next(p for p in sorted(data.iterdir()) if 'nemotron-nvfp4' in p.name)

def test_a_modelopt_checkpoint_requantised(tmp_path, in_part):
    "Scales of inputs go with the matrices that they were for; no other config can name the rest"
    old = raw_any(in_part)
    quantize(in_part, tmp_path/'r', 'nvfp4', requantize=True)
    t = raw(tmp_path/'r')
    for k in t:
        w = k[:-12]+'.weight'
        assert not k.endswith('.input_scale') or t[w][2]==old[w][2]
    assert [k for k in old if k.endswith('.input_scale') and k not in t]
    with pytest.raises(UnsupportedError, match='no config can name them'):
        quantize(in_part, tmp_path/'e', 'fp8')
    quantize(in_part, tmp_path/'e', 'fp8', 'tensor', requantize=True)
    assert not any(t=='U8' for t,_,_ in raw(tmp_path/'e').values())

def test_the_rest_of_a_modelopt_checkpoint(tmp_path, in_part):
    "NVIDIA's experts stay as they are; attention joins them, and the config names each"
    old,d = raw_any(in_part),tmp_path/'d'
    rep = quantize(in_part, d, 'nvfp4')
    got = raw(d)
    assert rep.rows and any(x['why']=='NVFP4 already' for x in rep.kept)
    for k,v in old.items():
        if not any(k.startswith(r['name']+'.') for r in rep.rows):
            assert got[k]==v
    check_modelopt(d)
    assert np.isfinite(LLM(str(d), device='cpu').logits([3,4,5])).all()
    def inputs(ts): return {k for k in ts if k.endswith('input_scale')}
    assert inputs(old) and inputs(got)==inputs(old)

def check_modelopt(d):
    "The config says which modules are left, and how each of the others is stored"
    q = config(d)
    for m,taken in modules(d).items():
        assert kept_by_reader(q, m) is not taken
    if q['quant_algo']=='MIXED_PRECISION':
        algos = {v['quant_algo'] for v in q['quantized_layers'].values()}
        assert algos=={'NVFP4','W4A16_NVFP4'}

# ---- whole or not at all

KILL = '''import os,sys,signal
from atlas.ground import quantize as Q
n,real = int(sys.argv[3]),Q._pwrite; count = [0]
def spy(*a):
    count[0] += 1
    if count[0]==n: os.kill(os.getpid(), signal.SIGKILL)
    return real(*a)
Q._pwrite = spy
Q.quantize(sys.argv[1], sys.argv[2], 'nvfp4', force=len(sys.argv)>4)
print(count[0])'''

def python(code, *args):
    "What comes of `code` in a process of its own"
    cmd = [sys.executable, '-c', code, *map(str, args)]
    return subprocess.run(cmd, capture_output=True, text=True, timeout=WAIT)

def run(src, dst, n, *more): return python(KILL, src, dst, n, *more)

def killed(r): return r.returncode==-signal.SIGKILL

def test_killed_at_any_moment(tmp_path):
    src = folder(tmp_path/'s', weights(layers=1), CONF|dict(num_hidden_layers=1))
    r = run(src, tmp_path/'whole', 0)
    total = int(r.stdout)
    want = tree(tmp_path/'whole')
    out = tmp_path/'out'
    for n in sorted({1, 2, 3, total//2, total-1, total}):
        assert killed(run(src, out, n))
        assert not out.exists()
        assert hidden(tmp_path)==['.out.part']
    quantize(src, out, 'nvfp4')
    assert tree(out)==want and hidden(tmp_path)==[] # what was left behind did not get in the way
    for n in (1,total//2,total):
        assert killed(run(src, out, n, 'force'))
        assert tree(out)==want
    quantize(src, out, 'fp8', force=True)
    assert config(out)['quant_method']=='fp8' and hidden(tmp_path)==[]

def test_ctrl_c(tmp_path):
    code = KILL.split('\nQ.quantize')[0].replace('SIGKILL', 'SIGINT')
    code = code.replace('n,real = int(sys.argv[3])', 'n,real = 12')
    code += '; from atlas.use.cli import main; main()'
    src,out = folder(tmp_path/'s'),tmp_path/'out'
    r = python(code, 'quantize', src, out, '--format', 'fp8')
    assert (
        r.returncode==130
        and 'Traceback' not in r.stderr
        and not (tmp_path/'out').exists()
        and hidden(tmp_path)==[])

def test_power_fails_between_the_renames(tmp_path, monkeypatch):
    src = folder(tmp_path/'s')
    quantize(src, tmp_path/'d', 'nvfp4')
    want = tree(tmp_path/'d')
    real = os.rename
    def rename(a, b):
        if str(b).endswith('/d'):
            raise KeyboardInterrupt
        return real(a, b)
    with monkeypatch.context() as m:
        m.setattr(os, 'rename', rename)
        with pytest.raises(KeyboardInterrupt):
            quantize(src, tmp_path/'d', 'fp8', force=True)
    assert hidden(tmp_path)==['.d.old'] and not (tmp_path/'d').exists()
    with pytest.raises(ConfigError, match='exists'):
        quantize(src, tmp_path/'d', 'fp8')      # put back, and then in the way
    assert tree(tmp_path/'d')==want and hidden(tmp_path)==[]

class Failing:
    "A call of `os` that finds no space the `nth` time; of `open` only those count that create"
    def __init__(self, call, nth):
        self.real,self.opens = getattr(os, call),call=='open'
        self.nth,self.count = nth,0
    def __call__(self, *a, **k):
        counts = not self.opens or len(a)>1 and bool(a[1]&os.O_CREAT)
        self.count += counts
        if counts and self.count==self.nth:
            raise OSError(errno.ENOSPC, 'No space left on device')
        return self.real(*a, **k)

@pytest.mark.parametrize('call', ['posix_fallocate','pwrite','fsync','rename','open'])
@pytest.mark.parametrize('nth', [1,2,5])
def test_full_disk(tmp_path, monkeypatch, call, nth):
    src = folder(tmp_path/'s')
    quantize(src, tmp_path/'d', 'fp8')
    want = tree(tmp_path/'d')
    fails = Failing(call, nth)
    with monkeypatch.context() as m:
        m.setattr(os, call, fails)
        try:
            quantize(src, tmp_path/'d', 'nvfp4', force=True, shard_size=50_000)
        except AtlasError as e:
            assert 'No space left' in str(e)
        else:
            assert fails.count<nth
    if fails.count>=nth:
        assert tree(tmp_path/'d')==want
    assert hidden(tmp_path)==[]

def test_no_room_is_told_before_anything_is_written(tmp_path, monkeypatch):
    src = folder(tmp_path/'s')
    monkeypatch.setattr(
        shutil, 'disk_usage', lambda p: type('U', (), dict(free=1000)))
    monkeypatch.setattr(Q, '_folder', None)
    with pytest.raises(AtlasError, match='1 kB free and the result takes'):
        quantize(src, tmp_path/'deep'/'er'/'d', 'nvfp4')
    assert not (tmp_path/'deep').exists()

def test_read_only(tmp_path):
    (tmp_path/'file').write_text('x')
    with pytest.raises(AtlasError, match='Cannot write'):
        quantize(folder(tmp_path/'s'), tmp_path/'file'/'d', 'nvfp4')

def test_one_writer_at_a_time(tmp_path, monkeypatch):
    src,real = folder(tmp_path/'s'),Q._run
    began,go = threading.Event(),threading.Event()
    def slow(*a):
        began.set()
        go.wait(WAIT)
        return real(*a)
    monkeypatch.setattr(Q, '_run', slow)
    t = threading.Thread(target=quantize, args=(src, tmp_path/'d', 'fp8'))
    t.start()
    began.wait(WAIT)
    try:
        with pytest.raises(AtlasError, match='Another process'):
            quantize(src, tmp_path/'d', 'nvfp4')
    finally:
        go.set()
        t.join()
    assert config(tmp_path/'d')['quant_method']=='fp8' and hidden(tmp_path)==[]

def test_where_it_may_not_write(tmp_path):
    src = folder(tmp_path/'s')
    (tmp_path/'mine').mkdir()
    (tmp_path/'mine'/'thesis.txt').write_text('x')
    (tmp_path/'link').symlink_to(src)
    mine = tmp_path/'mine'
    by_force = [(d,True) for d in (src,tmp_path,tmp_path/'link',mine)]
    for dst,force in [(src/'x',False), (mine,False), *by_force]:
        before = tree(tmp_path)
        with pytest.raises(ConfigError) as e:
            quantize(src, dst, 'fp8', force=force)
        assert e.value.param=='dst' and tree(tmp_path)==before
    (tmp_path/'empty').mkdir()
    quantize(src, tmp_path/'empty', 'fp8', force=True)

def test_nothing_stays_open(tmp_path):
    src = folder(tmp_path/'s', shards=3)
    n = len(os.listdir('/proc/self/fd'))
    quantize(src, tmp_path/'d', 'nvfp4')
    for bad in (
        lambda: quantize(src, tmp_path/'d', 'nvfp4'),
        lambda: quantize(src, tmp_path/'e', 'nvfp4', keep=['*'])):
        with pytest.raises(AtlasError):
            bad()
    assert len(os.listdir('/proc/self/fd'))==n

def test_memory_is_bounded(tmp_path):
    "A matrix of 64 MB passes through much less"
    w = np.tile(
        f32_to_bf16(np.random.default_rng(0).standard_normal(
            (64,4096), np.float32)),
        (128,1))
    src = folder(
        tmp_path/'s', {'model.layers.0.mlp.down_proj.weight':w, 'model.embed_tokens.weight':w[:2]})
    size = w.nbytes
    del w
    for f in ('nvfp4','fp8','mxfp4'):
        tracemalloc.start()
        quantize(src, tmp_path/'d', f, force=True)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak<size*.75, (f,peak)

# ---- damage

def refused(src, *words, exc=CheckpointError, **kw):
    with pytest.raises(exc) as e:
        quantize(src, src.parent/'out', kw.pop('format', 'nvfp4'), **kw)
    for w in words:
        assert w in str(e.value), (w,str(e.value))
    assert not (src.parent/'out').exists() and hidden(src.parent)==[]
    return e.value

def test_numbers_that_are_not(tmp_path):
    for i,x in enumerate((np.nan,np.inf,-np.inf)):
        ws = weights()
        ws['model.layers.2.mlp.up_proj.weight'][-1,-1] = f32_to_bf16(np.float32(x))
        src = folder(tmp_path/str(i)/'s', ws)
        for f in ('nvfp4','fp8','mxfp4'):
            assert (
                refused(src, 'layers.2.mlp.up_proj', 'not finite', format=f).param
                =='model.layers.2.mlp.up_proj.weight')

def test_cut_short(tmp_path):
    src = folder(tmp_path/'s')
    p = src/'model.safetensors'
    b = p.read_bytes()
    p.write_bytes(b[:-100])
    refused(src, 'model.safetensors')
    p.write_bytes(b)
    os.remove(src/'config.json')
    refused(src, 'config.json')

def test_a_source_that_shrinks_meanwhile(tmp_path, monkeypatch):
    src = folder(tmp_path/'s')
    real = Q._run
    def shrink(*a):
        os.truncate(src/'model.safetensors', 100_000)
        return real(*a)
    monkeypatch.setattr(Q, '_run', shrink)
    refused(src, 'bytes short')

def test_sources_that_are_not_there(tmp_path):
    refused(tmp_path/'no', 'There is no', exc=SourceError)
    (tmp_path/'e').mkdir()
    refused(tmp_path/'e', 'config.json')

def test_sources_in_gguf(tmp_path):
    (tmp_path/'m.gguf').write_bytes(b'GGUF')
    refused(tmp_path/'m.gguf', 'GGUF', 'safetensors release', exc=UnsupportedError)
    (tmp_path/'g').mkdir()
    shutil.copy(tmp_path/'m.gguf', tmp_path/'g'/'m.gguf')
    refused(tmp_path/'g', 'GGUF', exc=UnsupportedError)

def test_other_kinds_of_sources(tmp_path):
    awq = CONF|dict(quantization_config=dict(quant_method='awq'))
    refused(folder(tmp_path/'awq', conf=awq), "'awq'", exc=UnsupportedError)
    none = {'model.embed_tokens.weight': weights()['lm_head.weight']}
    refused(folder(tmp_path/'none', none), 'no matrix to quantise', exc=UnsupportedError)

def test_no_format_and_no_layout(tmp_path):
    src = folder(tmp_path/'s')
    refused(src, 'no format', 'nvfp4, fp8, mxfp4', exc=ConfigError, format='int4')
    refused(src, 'no layout', exc=ConfigError, layout='gpt-oss', format='mxfp4')

def test_a_stack_of_another_model(tmp_path):
    src = tmp_path/'s'
    shutil.copytree(data/'qwen35-moe-stacked', src)
    c = json.loads((src/'config.json').read_text())
    (c.get('text_config') or c)['hidden_size'] += 16
    (src/'config.json').write_text(json.dumps(c))
    refused(src, 'experts', 'expected')

def test_double_names(tmp_path):
    ws = weights()
    k = 'model.layers.0.mlp.up_proj.weight'
    refused(
        folder(
            tmp_path/'s',
            ws|{
                k+'_packed':np.zeros((256,64), np.uint8),
                k+'_scale':np.zeros((256,4), np.uint8)}),
        'twice')

# ---- the report, and the command

def test_report(tmp_path):
    import matplotlib
    matplotlib.use('Agg')
    src = folder(tmp_path/'s')
    rep = quantize(src, tmp_path/'d', 'nvfp4', keep=['*.1.mlp.*'])
    again = QuantReport.load(tmp_path/'d')
    assert again==rep
    assert json.loads(json.dumps(rep.to_dict()))==rep.to_dict()
    assert (len(rep.rows),len(rep.kept))==(18,3)
    text = str(rep)
    for said in ('mlp.down_proj', 'kept: 3 × --keep *.1.mlp.*', f'{rep.bits:.3g} bits'):
        assert said in text
    ax = plot_errors(rep)
    assert len(ax.lines)==7
    assert {len(l.get_xdata()) for l in ax.lines}=={2,3}
    assert .08<rep.error<.11
    assert all(r['worst']>=r['error'] for r in rep.rows)

def cli(*a):
    return CliRunner().invoke(
        app, ['quantize', *map(str, a)], prog_name='atlas')
def test_command(tmp_path):
    src,dst = folder(tmp_path/'s'),tmp_path/'d'
    keep = '--keep','*.o_proj','*layers.0.*'
    r = cli(src, dst, '--format', 'nvfp4', *keep, '--json', '--shard-size', '100kB')
    assert r.exit_code==0, r.output
    d = json.loads(r.stdout)
    assert d['path']==str(dst)
    assert {k['why'] for k in d['kept']}=={'--keep *.o_proj','--keep *layers.0.*'}
    assert len(list(dst.glob('*.safetensors')))>1
    fp8 = '--format','fp8'
    assert cli(src, dst, *fp8).exit_code==1
    assert cli(src, dst, *fp8, '--force', '--layout', 'tensor').exit_code==0
    assert config(dst)['quant_method']=='fp8'

WRONG = [
    '--format int4',
    '',
    'more --format fp8',
    '--format fp8 --fast',
    '--format fp8 --shard-size x']

@pytest.mark.parametrize('flags', WRONG)
def test_command_with_a_mistake(tmp_path, flags):
    r = cli(folder(tmp_path/'s'), tmp_path/'x', *flags.split())
    assert r.exit_code==2 and not (tmp_path/'x').exists()
