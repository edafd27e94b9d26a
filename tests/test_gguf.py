"""GGUF files of every family, made as llama.cpp's converter makes them, against the Hugging Face
folders that they are made of: the same arrays, bit for bit,
and the reference's logits."""
from dataclasses import fields,is_dataclass
from pathlib import Path
import gguf, json, numpy as np, pytest
from hypothesis import HealthCheck,given,settings,strategies as st
from atlas import LLM
from atlas.ground.config import ModelConfig
from atlas.ground.core import CheckpointError,UnsupportedError
from atlas.card.device import get_device
from atlas.ground.formats import QTensor
from atlas.model.model import build,plan
from atlas.ground.weights import IGNORE,check_plan,load,open_checkpoint
from helpers.checkpoints import hf_folder,st_bytes
from helpers.gguf_writer import STEPS,convert,hf_read,to_gguf,write

data,host = Path(__file__).parent/'data',get_device('cpu')
FAMILIES = (
    'smollm2-tied', 'mistral-wide-heads', 'mistral3-wrapped', 'linear-rope', 'yarn-rope',
    'llama3-rope-sharded', 'llama32-tied', 'biases', 'qwen3-tied-wide', 'qwen3-vl', 'qwen3-vl-moe',
    'qwen3-next', 'qwen35-dense', 'qwen35-moe-stacked', 'gpt-oss', 'gpt-oss-mxfp4', 'gemma4-moe',
    'gemma4-dense', 'nemotron-h', 'granite-hybrid', 'minimax-m2', 'granite-tied',
    'granite-attention', 'granite-dense', 'granite-moe', 'granite-moe-shared')
each = pytest.mark.parametrize('name', FAMILIES)

def arrays(path):
    "What the model of a checkpoint wants of it, towers left out"
    with open_checkpoint(path) as ck:
        m,wants = plan(ck)
        return (
            ck.config,
            load(
                ck, wants, host, ignore=(*IGNORE, *m.ignore),
                parts=('','mtp')))

def unlike(a, b):
    "Names of arrays that differ"
    return sorted(
        k for k in a.keys()|b.keys()
        if k not in a
        or k not in b
        or a[k].shape!=b[k].shape
        or not np.array_equal(a[k], b[k]))

def seen(folder, path, **kw):
    "Names of arrays that a conversion with `kw` gets wrong"
    return unlike(
        arrays(folder)[1],
        arrays(to_gguf(folder, path, **kw))[1])

def meaning(c):
    """What of a config decides the answer; floats as a file can hold them;
    llama3 scaling and its divisors are one"""
    if isinstance(c, float):
        return float(np.float32(c))
    if not is_dataclass(c):
        return c
    skip = dict(
        ModelConfig=(
            'name', 'dtype', 'quantization', 'norm_plus_one', 'vision', 'max_seq_len', 'bos_id',
            'eos_ids'),
        DeltaConfig=('fused',)).get(type(c).__name__, ())
    if getattr(c, 'kind', '') in ('llama3','factors'):
        skip = ('kind','factor','freq_factors','low_freq_factor','high_freq_factor','original_max')
    return {f.name:meaning(getattr(c, f.name))
        for f in fields(c) if f.name not in skip}

# ---- whole models

@each
def test_the_same_arrays(tmp_path, name):
    path = to_gguf(data/name, tmp_path/'m.gguf')
    (c,a),(g,b) = arrays(data/name),arrays(path)
    assert unlike(a, b)==[] and len(a)>10
    assert meaning(g)==meaning(c)

@each
def test_the_references_logits(tmp_path, name):
    r = dict(np.load(data/name/'ref.npz'))
    got = LLM(
        str(to_gguf(data/name, tmp_path/'m.gguf')),
        device='cpu', max_seq_len=256).logits(r['ids'])
    assert (
        np.abs(got-r['logits']).max()
        < (4e-4 if 'gemma' in name else 1e-4)
        *np.abs(r['logits']).max())

def steps(name):
    "Steps in the conversion of a folder"
    family = (
        name if name=='gpt-oss-mxfp4'
        else json.loads((data/name/'config.json').read_text())['model_type'])
    may = STEPS.get(family.replace('gpt-oss','gpt_oss'), ())
    if name!='qwen35-dense':
        may = [s for s in may if not s.startswith('tile')]
    if name=='granite-attention':
        may = [s for s in may if s!='neg_exp']
    return may

@pytest.mark.parametrize(
    'name,step', [(n,s) for n in FAMILIES for s in steps(n)])
def test_each_step_counts(tmp_path, name, step):
    "A converter that left out one step would give other arrays, or none"
    try:
        assert seen(data/name, tmp_path/'m.gguf', without=(step,))
    except CheckpointError:
        pass

@pytest.mark.parametrize('quant', ('F16','BF16','Q8_0','Q4_0','Q5_1'))
@pytest.mark.parametrize('name', ('qwen35-dense','gpt-oss-mxfp4','gemma4-moe'))
def test_quantised_files(tmp_path, name, quant):
    """Each tensor is what the gguf package makes of its bytes, rows and columns put in order: that
    of the float32 file, as exact as the format"""
    _,_,ts = convert(data/name, quant)
    near = .2 if quant in ('Q4_0','Q5_1') else .02
    plain = to_gguf(data/name, tmp_path/'a.gguf')
    packed = to_gguf(data/name, tmp_path/'b.gguf', quant)
    with open_checkpoint(plain) as f, open_checkpoint(packed) as q:
        assert set(f.tensors)==set(q.tensors)
        assert {t.fmt for t in q.tensors.values()}>={quant,'F32'}
        for k,t in q.tensors.items():
            a,b = f.read(k).decode(),q.read(k).decode()
            want = by_the_package(ts[t.stored])
            assert np.array_equal(np.sort(want.ravel()), np.sort(b.ravel())), k
            assert np.abs(a-b).max()<=near*np.abs(a).max(), k

def by_the_package(raw):
    "What the gguf package makes of a tensor's bytes, or numbers as they are"
    if not isinstance(raw, tuple):
        return raw
    codes,kind = raw
    return gguf.dequantize(codes, gguf.GGMLQuantizationType[kind])

@pytest.mark.parametrize(
    'name,quant',
    (
        ('gpt-oss-mxfp4','Q8_0'), ('qwen35-dense','Q8_0'), ('gemma4-moe','BF16'),
        ('nemotron-h','F16')))
def test_kept_packed(tmp_path, name, quant):
    "What stays as it is stored decodes to what is decoded at once"
    path = to_gguf(data/name, tmp_path/'m.gguf', quant)
    with open_checkpoint(path) as ck:
        m,wants = plan(ck)
        kw = dict(ignore=(*IGNORE, *m.ignore), parts=('','mtp'))
        a = load(ck, wants, host, **kw)
        b = load(ck, wants, host, packed=True, **kw)
    packed = {k:w
        for k,w in b.items() if not isinstance(w, np.ndarray)}
    assert (
        packed
        and unlike(
            a,
            {k:packed[k].decode() if k in packed else w
                for k,w in b.items()})==[])

@pytest.mark.parametrize('n', (7,30))
def test_in_parts(tmp_path, n):
    "As the gguf package splits them; any part stands for all, and so does the folder"
    name = 'qwen35-moe-stacked'
    a,m,ts = convert(data/name)
    write(tmp_path/'m.gguf', a, m, ts, part=n)
    parts = sorted(tmp_path.glob('*.gguf'))
    good = arrays(data/name)[1]
    assert len(parts)==-(-len(ts)//n)
    (tmp_path/'mmproj-m.gguf').write_bytes(b'a vision tower, which is another file')
    for p in (parts[0], parts[-1], tmp_path):
        assert unlike(good, arrays(p)[1])==[]
    parts[1].unlink()
    for p in (parts[0], parts[-1]):
        with pytest.raises(CheckpointError, match=f'{parts[1].name}, part 2 of {len(parts)}'):
            arrays(p)

def test_size_of_the_vocabulary(tmp_path):
    "A key, or else the tokenizer, or else the embedding says it"
    tokens = {'tokenizer.ggml.tokens':[f't{i}' for i in range(120)]}
    for kw in ({}, dict(vocab_size=None), dict(vocab_size=None, **tokens)):
        with open_checkpoint(to_gguf(data/'gpt-oss', tmp_path/'m.gguf', **kw)) as c:
            assert c.config.vocab_size==120

# ---- models that the test data does not have: shapes at random, and families without a folder

def random_folder(path, conf, seed=0):
    "A Hugging Face folder with what the model of `conf` asks for first"
    rng,ts = np.random.default_rng(seed),{}
    for w in build(ModelConfig.from_hf(conf)).wants():
        if w.part=='vision':
            continue
        rows = (
            w.rows
            or ((w.shape[-2] if len(w.shape)>1 else w.shape[0]),)
            * len(w.sources))
        for s,n in zip(w.sources, rows):
            ts[s] = (
                rng.standard_normal((n,*w.shape[1:][-1:]))
                /4).astype(np.float32)
    return hf_folder(path, ts, conf)

BASE = dict(
    vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, intermediate_size=32, max_position_embeddings=128,
    rms_norm_eps=1e-6, rope_theta=1e6, tie_word_embeddings=False, eos_token_id=2, hidden_act='silu')
EXPERTS = BASE|dict(
    model_type='qwen3_moe', num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
    norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[])
QWEN35 = BASE|dict(
    model_type='qwen3_5_text', linear_num_key_heads=2, linear_num_value_heads=6,
    linear_key_head_dim=8, linear_value_head_dim=12, linear_conv_kernel_dim=4,
    full_attention_interval=3, mtp_num_hidden_layers=1,
    rope_parameters=dict(
        rope_type='default', rope_theta=1e6, partial_rotary_factor=.5, mrope_section=[2,1,1],
        mrope_interleaved=True))
QWEN35_MOE = QWEN35|dict(
    model_type='qwen3_5_moe_text', num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=16, shared_expert_intermediate_size=24)

@pytest.mark.parametrize('conf', (QWEN35,QWEN35_MOE), ids=['dense','experts'])
@pytest.mark.parametrize(
    'step',
    (
        None, 'tile_qkv', 'tile_z', 'tile_b', 'tile_a', 'tile_A', 'tile_dt', 'tile_conv',
        'tile_out', 'plus_one', 'neg_exp'))
def test_three_value_heads_for_two_key_heads(tmp_path, conf, step):
    "An order that is not its own inverse, so that undoing it the wrong way round is seen"
    wrong = seen(
        random_folder(tmp_path/'hf', conf), tmp_path/'m.gguf',
        without=(step,) if step else ())
    assert bool(wrong)==bool(step)

@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(1,3), st.integers(1,4),
    st.sampled_from((4,6,10)),
    st.sampled_from((2,4,5)),
    st.integers(0,99))
def test_any_number_of_heads(tmp_path_factory, kh, r, dk, dv, seed):
    tmp = tmp_path_factory.mktemp('heads')
    conf = QWEN35|dict(
        linear_num_key_heads=kh, linear_num_value_heads=kh*r, linear_key_head_dim=dk,
        linear_value_head_dim=dv)
    assert seen(random_folder(tmp/'hf', conf, seed), tmp/'m.gguf')==[]

@pytest.mark.parametrize(
    'conf',
    (
        BASE|dict(model_type='qwen2', head_dim=None),
        BASE|dict(model_type='qwen3'), EXPERTS),
    ids=lambda c: c['model_type'])
def test_qwens_without_delta_nets(tmp_path, conf):
    conf = {k:v for k,v in conf.items() if v is not None}
    folder = random_folder(tmp_path/'hf', conf)
    assert seen(folder, tmp_path/'m.gguf')==[]
    with open_checkpoint(tmp_path/'m.gguf') as g, open_checkpoint(folder) as c:
        assert meaning(g.config)==meaning(c.config)

def test_fused_gate_and_up(tmp_path):
    "convert_hf_to_gguf.py --fuse-gate-up-exps"
    a,m,ts = convert(data/'qwen35-moe-stacked')
    fused = {}
    for k,x in ts.items():
        if 'gate_exps' in k:
            x = np.concatenate([x, ts[k.replace('gate','up')]], 1)
        if 'up_exps' not in k:
            fused[k.replace('gate_exps','gate_up_exps')] = x
    assert unlike(
        arrays(data/'qwen35-moe-stacked')[1],
        arrays(write(tmp_path/'m.gguf', a, m, fused))[1])==[]

def test_older_qwen3_next(tmp_path):
    "Files from before the projections were taken apart have them as Hugging Face does"
    folder = data/'qwen3-next'
    a,m,ts = convert(folder)
    hf = hf_read(folder)[1]
    for k in [k for k in ts if 'attn_qkv' in k]:
        i = k.split('.')[1]
        del ts[k], ts[k.replace('qkv','gate')]
        ts[f'blk.{i}.ssm_in.weight'] = np.ascontiguousarray(
            hf[f'model.layers.{i}.linear_attn.in_proj_qkvz.weight'], np.float32)
    assert unlike(
        arrays(folder)[1],
        arrays(write(tmp_path/'m.gguf', a, m, ts))[1])==[]

def test_dimensions_of_one_are_dropped(tmp_path):
    "llama-quantize writes [1, H] as [H]"
    a,m,ts = convert(data/'qwen35-moe-stacked')
    ts = {k:x.reshape(-1) if 'inp_shexp' in k else x
        for k,x in ts.items()}
    assert unlike(
        arrays(data/'qwen35-moe-stacked')[1],
        arrays(write(tmp_path/'m.gguf', a, m, ts))[1])==[]

def test_a_head_that_drafts_and_that_nobody_asked_for(tmp_path):
    "Nemotron files may have one more block, for drafting, which Atlas leaves out"
    a,m,ts = convert(data/'nemotron-h')
    L = m['block_count']
    m |= (
        {'block_count':L+1, 'nextn_predict_layers':1}|{k:m[k]+[m[k][0]]
            for k in ('attention.head_count_kv','feed_forward_length')})
    ts |= (
        {f'blk.{L}.{k}.weight':np.ones(48, np.float32)
            for k in ('attn_norm','ffn_norm','nextn.hnorm')}
        |{f'blk.{L}.nextn.eh_proj.weight':np.ones((48,96), np.float32)})
    assert unlike(
        arrays(data/'nemotron-h')[1],
        arrays(write(tmp_path/'m.gguf', a, m, ts))[1])==[]

# ---- packed tensors

META = {
    'block_count':1, 'context_length':64, 'embedding_length':256, 'feed_forward_length':256,
    'attention.head_count':4, 'attention.head_count_kv':2, 'attention.layer_norm_rms_epsilon':1e-5,
    'vocab_size':32}
DELTA = META|{
    'ssm.conv_kernel':4, 'ssm.state_size':128, 'ssm.group_count':2, 'ssm.time_step_rank':4,
    'ssm.inner_size':512, 'full_attention_interval':4, 'rope.dimension_count':16,
    'rope.dimension_sections':[4,2,2,0]}
# Bytes of a block where a float16 scale begins
HALVES = {'Q4_K':(0,2), 'Q5_K':(0,2), 'Q6_K':(208,), 'Q8_0':(0,)}

def blocks(rng, t, shape):
    "Random blocks of type `t` whose scales are sane, and what the gguf package makes of them"
    n,size = gguf.GGML_QUANT_SIZES[t]
    b = rng.integers(0, 256,
        (*shape[:-1],shape[-1]//n,size), np.uint8)
    for i in HALVES.get(t.name, ()):
        scales = rng.uniform(.001, .01, (*b.shape[:-1],1))
        b[...,i:i+2] = scales.astype(np.float16).view(np.uint8)
    if t.name=='MXFP4':
        b[...,0] = rng.integers(110, 130, b.shape[:-1])
    if t.name=='NVFP4':
        b[...,:4] &= 127
        b[0,0,:4] = 127,130,0,128  # there is no NaN, and no sign
    raw = b.reshape(*shape[:-1], -1)
    return raw,gguf.dequantize(raw, t)

def exchanged(a, apart, i):
    "`a` seen in the shape `apart`, axes `i` and `i+1` exchanged"
    return a.reshape(apart).swapaxes(i, i+1).reshape(a.shape)

packed_formats = pytest.mark.parametrize('fmt', ('Q4_K','Q5_K','Q6_K','Q8_0','MXFP4','NVFP4'))

@packed_formats
def test_rows_of_packed_heads(tmp_path, fmt):
    "Rows move as they are, as the decoded array's would"
    t,rng = gguf.GGMLQuantizationType[fmt],np.random.default_rng(1)
    q,want = blocks(rng, t, (256,256))
    raw = {'blk.0.attn_q.weight':(q,fmt)}
    with open_checkpoint(write(tmp_path/'l.gguf', 'llama', META, raw)) as c:
        got = c.read('model.layers.0.self_attn.q_proj.weight')
    assert got.fmt==fmt
    assert np.array_equal(exchanged(got.decode(), (4,2,32,256), 1), want)

@packed_formats
def test_rows_and_columns_of_packed_delta_nets(tmp_path, fmt):
    "Columns that a block spans come out decoded"
    t,rng = gguf.GGMLQuantizationType[fmt],np.random.default_rng(1)
    o,want_out = blocks(rng, t, (256,512))
    qkv,want_in = blocks(rng, t, (1024,256))
    raw = {'blk.0.ssm_out.weight':(o,fmt), 'blk.0.attn_qkv.weight':(qkv,fmt)}
    with open_checkpoint(write(tmp_path/'d.gguf', 'qwen35', DELTA, raw)) as c:
        out = c.read('model.layers.0.linear_attn.out_proj.weight')
        got = c.read('model.layers.0.linear_attn.in_proj_qkv.weight')
    assert np.array_equal(exchanged(out.decode(), (256,2,2,128), 1), want_out)
    assert out.fmt==('F32' if fmt[-1]=='K' else fmt)
    qk,v = np.split(got.decode(), 2)
    assert got.fmt==fmt
    assert np.array_equal(np.concatenate([qk, exchanged(v, (2,2,128,256), 0)]), want_in)

def nvfp4_folder(
    path, conf=EXPERTS|dict(hidden_size=64, num_experts=3, moe_intermediate_size=64)):
    "A folder whose linear layers are modelopt's NVFP4, each with a scale of its own"
    folder = random_folder(path, conf)
    ts,types = {},{}
    for k,a in hf_read(folder)[1].items():
        if not any(x in k for x in ('self_attn.q_proj','self_attn.v_proj','experts')):
            ts[k] = a
            continue
        q = QTensor.encode(a, 'NVFP4').parts
        ts |= {
            k:q['data'], k+'_scale':q['scale'],
            k+'_scale_2':q['global']}
        types[k+'_scale'] = 'F8_E4M3'
    (folder/'model.safetensors').write_bytes(st_bytes(ts, dtypes=types))
    return folder

def test_nvfp4_and_its_scales(tmp_path):
    folder = nvfp4_folder(tmp_path/'hf')
    path = to_gguf(folder, tmp_path/'m.gguf')
    assert unlike(arrays(folder)[1], arrays(path)[1])==[]
    with open_checkpoint(path) as c:
        t = c.tensors['model.layers.0.mlp.experts.gate_proj']
        assert (
            (t.fmt,t.shape) == ('NVFP4',(3,64,64))
            and not [k for k in c.tensors if 'scale' in k])
    a,m,ts = convert(folder)
    del ts['blk.1.ffn_up_exps.scale']
    assert unlike(
        arrays(folder)[1],
        arrays(write(tmp_path/'n.gguf', a, m, ts))[1])==['layers.1.mlp.experts.gate_up_proj']
    ts['blk.1.ffn_up_exps.scale'] = np.ones(4, np.float32)
    with pytest.raises(CheckpointError, match='ffn_up_exps.scale is F32 .4., expected F32 .3.'):
        open_checkpoint(write(tmp_path/'o.gguf', a, m, ts))

GEMMA = dict(
    model_type='gemma4_text', vocab_size=64, hidden_size=64, intermediate_size=64,
    num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, num_global_key_value_heads=1,
    head_dim=16, global_head_dim=32, attention_k_eq_v=True, enable_moe_block=True, num_experts=3,
    top_k_experts=2, moe_intermediate_size=64, hidden_size_per_layer_input=0,
    num_kv_shared_layers=0, final_logit_softcapping=30., sliding_window=16,
    layer_types=['sliding_attention','full_attention'], hidden_activation='gelu_pytorch_tanh',
    rms_norm_eps=1e-6, max_position_embeddings=128,
    rope_parameters=dict(
        full_attention=dict(rope_type='proportional', rope_theta=1e6, partial_rotary_factor=.25),
        sliding_attention=dict(rope_type='default', rope_theta=1e4)),
    tie_word_embeddings=True, eos_token_id=1)

def test_gemmas_two_scales(tmp_path):
    """Of Gemma's experts the weight of each and the scale of each are one number in the file, and
    nothing else moves"""
    folder = nvfp4_folder(tmp_path/'hf', conf=GEMMA)
    a = arrays(folder)[1]
    b = arrays(to_gguf(folder, tmp_path/'m.gguf'))[1]
    each,down = 'moe.router.per_expert_scale','moe.experts.down_proj'
    assert unlike(a, b)==sorted(f'layers.{i}.{k}' for i in (0,1)
        for k in (each,down))
    for i in (0,1):
        x,y = (
            w[f'layers.{i}.{down}']*w[f'layers.{i}.{each}'][:,None,None]
            for w in (a,b))
        np.testing.assert_allclose(x, y, rtol=1e-6)

def test_types_that_are_refused_have_names(tmp_path):
    t = gguf.GGMLQuantizationType
    for k in ('IQ4_NL','IQ4_XS','IQ2_XXS','Q2_K','Q3_K','TQ1_0','IQ1_M'):
        raw = np.zeros(
            (
                32,
                gguf.GGML_QUANT_SIZES[t[k]][1]*256
                //gguf.GGML_QUANT_SIZES[t[k]][0]),
            np.uint8)
        path = write(tmp_path/'m.gguf', 'llama', META, {'token_embd.weight':(raw,k)})
        with pytest.raises(UnsupportedError, match=f'{t[k].value} .{k}.'):
            open_checkpoint(path)

# ---- files that are not what they say

def change(tmp_path, name, edit, **keys):
    a,m,ts = convert(data/name)
    edit(ts)
    return arrays(write(tmp_path/'m.gguf', a, m|keys, ts))

@pytest.mark.parametrize(
    'name,tensor,edit,words',
    [
        ('qwen35-dense','blk.0.ssm_out.weight', lambda x: x[:,:-1], 'columns of heads'),
        ('qwen35-dense','blk.0.attn_qkv.weight', lambda x: x[:-1], 'rows of heads'),
        ('qwen35-dense','blk.0.ssm_a', lambda x: x[:-1], 'rows of heads'),
        ('qwen35-dense','blk.0.ssm_a', None, 'linear_attn.A'),
        ('gpt-oss','blk.0.attn_sinks.weight', None, 'sinks'),
        ('gpt-oss','blk.0.ffn_up_exps.bias', None, 'up_proj_bias'),
        ('gemma4-moe','blk.0.ffn_gate_inp.scale', None, 'router.scale'),
        ('gemma4-moe','blk.0.layer_output_scale.weight', None, 'layer_scalar'),
        ('gemma4-moe','rope_freqs.weight', lambda x: x[:-1], 'rope_freqs.weight'),
        (
            'nemotron-h', 'blk.0.ssm_norm.weight', lambda x: x[:-1],
            'blk.0.ssm_norm.weight in m.gguf is .48.'),
        ('minimax-m2','blk.0.exp_probs_b.bias', None, 'e_score_correction_bias'),
        (
            'minimax-m2', 'blk.0.ffn_gate_exps.weight', lambda x: x[:-1],
            'blk.0.ffn_gate_exps.weight in m.gguf is .5, 24, 40.')])
def test_tensors_that_do_not_fit(tmp_path, name, tensor, edit, words):
    def do(ts):
        if edit:
            ts[tensor] = np.ascontiguousarray(edit(ts[tensor]))
        else:
            del ts[tensor]
    with pytest.raises(CheckpointError, match=words):
        change(tmp_path, name, do)

@pytest.mark.parametrize('name', FAMILIES)
def test_strangers(tmp_path, name):
    "A tensor that no table knows is not left out quietly"
    extra = {'blk.0.attn_rel_b.weight':np.zeros((4,4), np.float32)}
    with pytest.raises(CheckpointError, match='blk.0.attn_rel_b'):
        change(tmp_path, name, lambda ts: ts.update(extra))

def test_two_names_for_one(tmp_path):
    "The parts of a drafting head that there is one of, for two heads"
    a,m,ts = convert(data/'qwen35-dense')
    L = m['block_count']
    with pytest.raises(
        CheckpointError, match="two tensors mean 'mtp.pre_fc_norm_embedding.weight'"):
        ts[f'blk.{L}.nextn.enorm.weight'] = ts[f'blk.{L-1}.nextn.enorm.weight']
        arrays(write(
            tmp_path/'m.gguf', a, m|{'block_count':L+1, 'nextn_predict_layers':2}, ts))

ODD = (
    None, 0, 1, 7, 2**32-1, float('nan'),
    1.5,
    'x',
    [1,2],
    ['a'],
    True,
    [True],
    [2**31-1]*5)
@pytest.mark.parametrize('name', ('qwen35-dense','gpt-oss','gemma4-moe','nemotron-h','minimax-m2'))
def test_odd_values(tmp_path, name):
    "Whatever a key holds, the file is read or refused"
    a,m,ts = convert(data/name)
    for k in (
        *m, 'nextn_predict_layers', 'expert_gating_func', 'attention.sliding_window_pattern',
        'attention.recurrent_layers', 'rope.scaling.type', 'rope.dimension_sections'):
        for v in ODD:
            path = write(
                tmp_path/'m.gguf', a,
                {x:y
                    for x,y in (m|{k:v}).items()
                    if y is not None},
                ts)
            try:
                with open_checkpoint(path) as c:
                    check_plan(c, plan(c)[1], ('mtp.*','visual.*',*IGNORE))
            except CheckpointError as e:
                assert str(e)
