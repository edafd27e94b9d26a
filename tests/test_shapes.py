"""Shapes that no reference has: odd widths, lone experts, one kind of layer only, squares. What
must hold of any of them, and files that leave something open."""
import json,re,shutil
import numpy as np, pytest
from hypothesis import given,settings,strategies as st
from atlas.ground.config import ModelConfig
from atlas.ground.core import CheckpointError,ConfigError,UnsupportedError
from atlas.card.device import get_device
from atlas.model.model import build,load_model
from atlas.ground.weights import dummy_checkpoint,load,open_checkpoint
from helpers.reference import Run,data,rewritten

host = get_device('cpu')

def opened(path, **kw):
    with open_checkpoint(path) as ck:
        return load_model(ck, host, 256, parts=('','mtp','vision'), **kw)
def logits(path, n=70):
    m = opened(path)
    return Run(m).prefill([(5*i+3)%40
        for i in range(n)])

# -- any shape
# --------------------------------------------------------------------------------------------------

_pick = st.sampled_from
KINDS = ('llama','qwen3_moe','qwen3_next','qwen3_5_text','gpt_oss','gemma4_text','nemotron_h',
    'granitemoehybrid','granitemoeshared','granite','minimax_m2')
def _sizes(p, kv, L, E)->dict:
    "Widths and numbers that any of the families may look at; `p` picks one of some"
    plain = dict(
        vocab_size=43,
        hidden_size=p(17,24,65),
        num_hidden_layers=L,
        num_attention_heads=kv*p(1,3,8),
        num_key_value_heads=kv,
        intermediate_size=p(7,32,96),
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        eos_token_id=2,
        sliding_window=p(1,5,64,100))
    return plain|_expert_sizes(p, E)|_recurrent(p)

def _expert_sizes(p, E)->dict:
    return dict(
        num_experts=E,
        num_local_experts=E,
        n_routed_experts=E,
        num_experts_per_tok=p(1,E),
        moe_intermediate_size=p(8,32,33),
        shared_expert_intermediate_size=p(8,33),
        moe_shared_expert_intermediate_size=9)

def _recurrent(p)->dict:
    kh,g = p(1,2),p(1,3)
    return dict(
        linear_num_key_heads=kh,
        linear_num_value_heads=kh*p(1,3),
        linear_key_head_dim=p(4,12),
        linear_value_head_dim=p(6,16),
        linear_conv_kernel_dim=p(2,4,5),
        conv_kernel=p(2,4,5),
        mamba_head_dim=p(4,12),
        n_groups=g,
        mamba_num_heads=g*p(1,2),
        ssm_state_size=p(4,10))

def _gemma(p, kv, E)->dict:
    "What only Gemma's file says"
    return dict(
        global_head_dim=p(8,20), num_global_key_value_heads=kv,
        attention_k_eq_v=p(True,False), hidden_size_per_layer_input=0,
        enable_moe_block=p(True,False), top_k_experts=p(1,E))

def _granite(p, g, E)->dict:
    "What only a hybrid Granite's says"
    return dict(
        hidden_size=12*g, mamba_n_heads=p(1,2)*g, mamba_n_groups=g, mamba_expand=2,
        mamba_d_state=p(4,10), mamba_d_conv=p(2,4), num_local_experts=p(0,E),
        num_experts_per_tok=1, position_embedding_type=p('nope','rope'))

def _any_granite(p)->dict:
    "What every Granite's says"
    return dict(
        embedding_multiplier=3, attention_multiplier=.2, residual_multiplier=.3,
        logits_scaling=2, shared_intermediate_size=p(8,33), tie_word_embeddings=p(True,False))

def _qwen(kind, hd)->dict:
    "How much of a head Qwen's newer files turn, and by which of three positions"
    if kind not in ('qwen3_next','qwen3_5_text'):
        return {}
    d = dict(partial_rotary_factor=1.0)
    if kind=='qwen3_5_text':
        sections = dict(mrope_section=[hd//2,0,0], mrope_interleaved=True)
        d['rope_scaling'] = sections|dict(rope_type='default')
    return d

_TYPES = dict( # Kinds of layers that a family mixes
    qwen3_next=('linear_attention','full_attention'),
    qwen3_5_text=('linear_attention','full_attention'),
    gpt_oss=('sliding_attention','full_attention'),
    gemma4_text=('sliding_attention','full_attention'),
    granitemoehybrid=('mamba','attention'))

@st.composite
def configs(draw):
    "A config.json of any family, of a shape that nobody would publish"
    def p(*xs): return draw(_pick(xs))
    L,kv,hd = p(1,2,3),p(1,2,3),p(8,10,24)
    kind,E = draw(_pick(KINDS)),p(1,2,5)
    d = dict(model_type=kind, head_dim=hd)|_sizes(p, kv, L, E)
    if kind in _TYPES:
        d['layer_types'] = [p(*_TYPES[kind]) for _ in range(L)]
    d |= _qwen(kind, hd)
    if kind=='gemma4_text':
        d |= _gemma(p, kv, E)
    if kind=='nemotron_h':
        blocks = [p('M','E','*','-') for _ in range(L)]
        d |= dict(hybrid_override_pattern=''.join(blocks), sliding_window=None)
    if kind=='granitemoehybrid':
        d |= _granite(p, d['n_groups'], E)
    if kind.startswith('granite'):
        d |= _any_granite(p)
    return ModelConfig.from_hf(d)

def made_up(c, weights, seed)->list:
    "Models of random weights: plain numbers, and the same as they are stored"
    wants = build(c).wants()
    with dummy_checkpoint(c, wants, weights, seed) as ck:
        return [build(c).bind(load(ck, wants, host, packed=packed), host, 256)
            for packed in (False,True)]

@settings(deadline=None, max_examples=60)
@given(
    c=configs(),
    weights=_pick(['bf16','fp8','nvfp4','mxfp4']),
    T=_pick([1,2,63,64,65,129]),
    seed=st.integers(0,9))
def test_any_shape(c, weights, T, seed):
    """Packed weights and plain ones, a prompt at once and in chunks: the same bits. Token by
    token: the same numbers"""
    ids = np.random.default_rng(seed).integers(0, c.vocab_size, T+3).tolist()
    prompt,rest = ids[:T],ids[T:]
    plain,packed = made_up(c, weights, seed)
    a,b = Run(plain),Run(packed)
    whole = a.prefill(prompt)
    assert np.isfinite(whole).all() and whole.shape==(T,c.vocab_size)
    assert (b.prefill(prompt)==whole).all()
    assert (Run(packed).chunks(prompt)==whole).all()
    after = a.steps(rest, T)
    assert (b.steps(rest, T)==after).all()
    got = Run(plain).steps(ids)
    if c.moe and c.moe.top_k<c.moe.num_experts:
        return # a near choice may fall the other way
    far = np.abs(got-np.concatenate([whole, after])).max()
    assert far<3e-4*np.abs(whole).max()

# -- what a file may leave open
# --------------------------------------------------------------------------------------------------

def changed(path, name, fn, **conf):
    "The folder `name` with its tensors changed by `fn`, and keys of its config"
    path.mkdir(exist_ok=True)
    rewritten(name, path, fn)
    c = json.loads((path/'config.json').read_text())
    t = c.get('text_config', c)
    t |= conf
    (path/'config.json').write_text(json.dumps(c))
    return path

def fewer_experts(ts, n)->dict:
    "Tensors of the first `n` experts, and of routers as many rows"
    def there(k):
        m = re.search(r'experts\.(\d+)\.', k)
        return not m or int(m[1])<n
    routers = re.compile(r'(gate|(gate\.)?e_score_correction_bias)(\.weight)?$')
    def cut(k, a): return a[:n] if routers.search(k) and a.shape[0]>1 else a
    return {k:cut(k, a) for k,a in ts.items() if there(k)}

def unpicked(ts)->dict:
    "Two experts, and the same router twice: ties go to the first"
    routers = re.compile(r'(mlp|mixer|block_sparse_moe)\.gate\.weight$|e_score_correction_bias$')
    def twice(k, a): return np.concatenate([a[:1],a[:1]]) if routers.search(k) and len(a)==2 else a
    return {k:twice(k, a) for k,a in fewer_experts(ts, 2).items()}

@pytest.mark.parametrize(
    'name,key',
    [
        ('qwen35-moe-fp8-block','num_experts'), ('minimax-m2','num_local_experts'),
        ('qwen3-moe-ct-nvfp4','num_experts'), ('nemotron-nvfp4','n_routed_experts')])
def test_a_lone_expert(tmp_path, name, key):
    "Stored by itself it is no stack, and of two the second never picked changes nothing"
    def first(ts): return fewer_experts(ts, 1)
    one = changed(tmp_path/'1', name, first, **{key:1, 'num_experts_per_tok':1})
    two = changed(tmp_path/'2', name, unpicked, **{key:2, 'num_experts_per_tok':1})
    a,b = logits(one),logits(two)
    assert np.isfinite(a).all()
    assert np.abs(a-b).max()<1e-5*np.abs(b).max()

def with_head(tmp, name, leaf, head):
    "A model that has one tensor more, which `head` makes of its embedding"
    def more(ts):
        embedding = next(k for k in ts if k.endswith('embed_tokens.weight'))
        return ts|{f'lm_head.{leaf}': head(ts[embedding])}
    return changed(tmp, name, more)

tied = pytest.mark.parametrize('name', ('smollm2-tied','qwen3-vl'))

@tied
def test_tied_and_stored_all_the_same(tmp_path, name):
    """The embedding once more is left unread;
    what is not the embedding is used, as the transformers library does"""
    want = logits(data/name)
    same = with_head(tmp_path, name, 'weight', lambda e: e)
    assert (logits(same)==want).all()
    assert (m := opened(same)).lm_head is m.embed_tokens
    other = with_head(tmp_path, name, 'weight', lambda e: e[::-1].copy())
    assert (logits(other)==want[:,::-1]).all()
    assert (m := opened(other)).lm_head is not m.embed_tokens

@tied
def test_tied_and_stored_otherwise(tmp_path, name):
    bias = with_head(tmp_path, name, 'bias', lambda e: np.ones(3, np.float32))
    with pytest.raises(CheckpointError, match='lm_head.bias'):
        logits(bias)
    short = with_head(tmp_path, name, 'weight', lambda e: e[1:].copy())
    with pytest.raises(CheckpointError, match='lm_head.weight'):
        logits(short)

def _experts(ts, turn=False):
    "Experts of 20: gate and up are as wide together as the model of 40, a square"
    def cut(k, a):
        if k.endswith('experts.gate_up_proj'):
            # (E,H,40), stored [in,out]
            wider = [a[...,:16], a[...,:4], a[...,16:], a[...,16:20]]
            a = np.concatenate(wider, -1)
        elif k.endswith('experts.down_proj'):
            a = np.concatenate([a,a[:,:4]], 1)
        else:
            return a
        return np.ascontiguousarray(a.swapaxes(-1, -2)) if turn else a
    return {k:cut(k, a) for k,a in ts.items()}

def _apart(ts):
    out = {}
    for k,a in _experts(ts, True).items():
        if not re.search(r'experts\.(gate_up|down)_proj$', k):
            out[k] = a
            continue
        for e,x in enumerate(a):
            for n,p in (
                zip(('gate','up'), np.split(x, 2)) if 'gate_up' in k
                else [('down',x)]):
                out[f'{k.rsplit(".", 1)[0]}.{e}.{n}_proj.weight'] = p.copy()
    return out

def test_a_square_stack_is_read_as_the_library_reads_it(tmp_path):
    """Qwen3-VL's stacks may be either way up;
    where the shape does not tell, they are [E,out,in], as the library saves them"""
    kw = dict(moe_intermediate_size=20)
    a,b = (
        logits(changed(tmp_path/str(i), 'qwen3-vl-moe', f, **kw))
        for i,f in enumerate((lambda ts: _experts(ts, True), _apart)))
    assert (a==b).all()

@pytest.mark.parametrize(
    'name,end,bad',
    [
        ('qwen3-nvfp4','weight_scale_2',0), ('qwen3-nvfp4','weight_scale_2',-1),
        ('qwen3-nvfp4','weight_scale_2',np.inf), ('qwen3-moe-ct-nvfp4','weight_global_scale',0),
        ('qwen3-moe-ct-nvfp4','weight_global_scale',-2), ('llama-fp8-tensor','weight_scale',-1),
        ('minimax-fp8-block','weight_scale_inv',-1), ('qwen3-nvfp4','weight_scale',0xB8),
        ('qwen35-moe-fp8-block','weight_scale_inv',0xBF80)])
def test_scales_below_zero(tmp_path, monkeypatch, name, end, bad):
    "Or zero for all, or infinite: refused before anything is allocated"
    def spoil(ts):
        k = next(k for k in ts if k.endswith('.'+end))
        a = ts[k].copy()
        a.reshape(-1)[-1] = bad
        return ts|{k:a}
    f = changed(tmp_path/'m', name, spoil)
    monkeypatch.setattr(type(host), 'carve', lambda *a: pytest.fail('allocated'))
    with pytest.raises(CheckpointError, match='model.safetensors.*scale of .* is not'):
        opened(f)

def test_errors_name_the_file_they_are_about(tmp_path):
    for file,text in (
        ('hf_quant_config.json','{"quantization": {"quant_algo": "INT4"}}'),
        ('generation_config.json','{"eos_token_id": "x"}'),
        ('config.json','{"model_type": "llama"}')):
        shutil.copytree(data/'linear-rope', tmp_path/file)
        (tmp_path/file/file).write_text(text)
        with pytest.raises(
            (CheckpointError,UnsupportedError), match='^'+file.replace('.', r'\.')+': '):
            opened(tmp_path/file)

@pytest.mark.parametrize(
    'name,key',
    [
        ('linear-rope','factor'), ('linear-rope','type'), ('llama3-rope-sharded','factor'),
        ('llama3-rope-sharded','low_freq_factor'), ('llama3-rope-sharded','rope_type'),
        ('gpt-oss','rope_type')])
def test_scalings_that_are_half_told(name, key):
    "Are not filled in"
    c = json.loads((data/name/'config.json').read_text())
    del c['rope_scaling'][key]
    with pytest.raises(ConfigError, match=f"no '{key}'|no 'rope_type'"):
        ModelConfig.from_hf(c)

@pytest.mark.parametrize(
    'name,path',
    [
        ('gpt-oss','num_local_experts'), ('gpt-oss','intermediate_size'),
        ('qwen3-next','num_attention_heads'), ('qwen3-next','linear_value_head_dim'),
        ('qwen3-vl','vision_config.depth')])
def test_sizes_beyond_reason(name, path):
    "Are refused before anybody makes a table or a list of that size"
    c = json.loads((data/name/'config.json').read_text())
    *up,k = path.split('.')
    (c[up[0]] if up else c)[k] = 10**9
    with pytest.raises(ConfigError, match='1,000,000,000|000,000'):
        ModelConfig.from_hf(c)
