"""What a reference does not notice it does not test. Each of these would be a plausible mistake,
and each must be far outside the tolerance."""
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
import numpy as np, pytest
from atlas import LLM
from atlas.ground.config import ModelConfig,PRESETS,RopeConfig
from atlas.ground.core import UnsupportedError
from atlas.ground.weights import open_checkpoint
from atlas.model.model import build
from helpers.reference import TOL,Run,data,drafts,error,having,model,mtp,refs,rewritten,seen

def far(got, want):
    e = error(got, want)
    assert e>20*TOL, f'moves the logits by only {e:.0e}'

# -- another config -------------------------------------------------------------------------------

def of(path='', **kw):
    """A change of the config: fields `kw` of the part at `path`; a value may be a function of what
    was there"""
    def f(c):
        head,_,rest = path.partition('.')
        if head:
            return replace(c, **{head:of(rest, **kw)(getattr(c, head))})
        new = {k:v(getattr(c, k)) if callable(v) else v for k,v in kw.items()}
        return replace(c, **new)
    return f

def both(f, g): return lambda c: f(g(c))
att = partial(of, 'attention')
rope = partial(of, 'attention.rope')
sliding = partial(of, 'sliding')
sliding_rope = partial(of, 'sliding.rope')
delta = partial(of, 'delta')
moe = partial(of, 'moe')

CHANGES = {
    'llama3-rope-sharded': [
        rope(kind='default'), rope(kind='linear'),
        rope(high_freq_factor=2.), rope(low_freq_factor=.5), rope(original_max=128)],
    'llama32-tied': [rope(kind='default'), rope(original_max=64), rope(factor=8.)],
    'mistral-wide-heads': [rope(theta=10000.), of(norm_eps=1e-2)],
    'mistral-window': [att(window=None), att(window=22), att(window=24)],
    'mistral3-wrapped': [rope(theta=10000.)],
    'smollm2-tied': [rope(theta=10000.)],
    'yarn-rope': [
        rope(kind='default'), rope(kind='linear'),
        rope(attention_factor=1.), rope(beta_fast=32.), rope(truncate=False)],
    'linear-rope': [rope(kind='default'), rope(factor=2.)],
    'qwen3-tied-wide': [
        rope(theta=10000.), att(qk_norm='none'),
        of(norm_eps=1e-2), of(norm_plus_one=True)],
    'qwen3-moe-some-layers': [moe(renormalise=True), moe(scaling=2.), moe(score='sigmoid')],
    'qwen3-next': [
        of(norm_plus_one=False), rope(dim=24),
        delta(gate_act='sigmoid'), moe(renormalise=False),
        moe(shared_gate=False), moe(shared_size=0)],
    'qwen35-dense': [of(norm_plus_one=False), rope(dim=32), delta(gate_act='sigmoid')],
    'qwen35-moe-stacked': [
        of(norm_plus_one=False), rope(dim=16),
        moe(renormalise=False), moe(shared_gate=False), moe(shared_size=0)],
    'gpt-oss': [
        att(sinks=False), sliding(sinks=False), sliding(window=500), sliding(window=12),
        sliding(window=14), att(window=13), rope(attention_factor=1.),
        both(rope(truncate=True), sliding_rope(truncate=True)),
        rope(kind='default'), rope(beta_fast=32.),
        rope(beta_slow=1.), of(act_limit=1e9),
        of(act='silu'), moe(score='softmax', renormalise=False),
        moe(router_bias=False), moe(expert_bias=False),
        att(bias=False), sliding(o_bias=False),
        of(mixers=lambda m: m[::-1])],
    'gemma4-moe': [
        att(scale=None), sliding(scale=None), att(v_norm=False), sliding(v_norm=False),
        of(norm_plus_one=True), of(embed_scale=1.), of(act='silu'),
        of(logit_softcap=None), sliding(window=500),
        sliding(window=18), sliding(window=20),
        rope(kind='default'), rope(pairs=12),
        rope(kind='default', dim=12),
        sliding_rope(theta=1e6)],
    'gemma4-dense': [
        att(scale=None), att(v_norm=False),
        of(logit_softcap=5.), sliding(window=18), sliding(window=20)],
    'granite-hybrid': [
        of(embed_scale=1.), of(residual_scale=1.), of(logit_scale=1.),
        att(scale=None), att(rope=RopeConfig(dim=12)), moe(score='sigmoid'),
        of(norm_eps=1e-2)],
    'granite-tied': [
        of(logit_scale=1.), of(embed_scale=1.), of(residual_scale=1.),
        att(scale=None), att(rope=RopeConfig(dim=10)),
        of(norm_eps=1e-2)],
    'granite-attention': [
        of(logit_scale=1.), att(scale=None), att(rope=None),
        rope(theta=10000.)],
    'granite-dense': [
        of(logit_scale=1.), of(residual_scale=1.), att(scale=None),
        att(rope=None)],
    'granite-moe': [
        of(embed_scale=1.), moe(score='sigmoid'), att(rope=None)],
    'granite-moe-shared': [
        of(residual_scale=1.), moe(shared_size=0), att(rope=None)],
    'nemotron-h': [
        att(rope=RopeConfig(dim=12)), moe(correction=False),
        moe(scaling=1.), moe(renormalise=False),
        moe(score='softmax'), moe(shared_size=0)],
    'minimax-m2': [
        rope(dim=16), moe(correction=False),
        moe(score='softmax', correction=False), moe(renormalise=False),
        att(qk_norm='none')],
    'qwen3-vl': [rope(dim=12), att(qk_norm='none')],
    'qwen3-vl-moe': [moe(renormalise=False)]}

def pairs(table):
    return pytest.mark.parametrize(
        'name,wrong',
        [pytest.param(n, f, id=f'{n}-{i}') for n,fs in table.items() for i,f in enumerate(fs)])

@pytest.mark.parametrize('key', ('residual_scale','logit_scale'))
def test_a_scale_that_a_family_ignores_is_refused(key):
    scaled = {key:.1}
    llama = replace(ModelConfig.preset('llama-3.1-8b'), **scaled)
    with pytest.raises(UnsupportedError) as e:
        build(llama)
    assert e.value.param==key
    granite = next(n for n in PRESETS if n.startswith('granite'))
    assert build(replace(ModelConfig.preset(granite), **scaled))

@pairs(CHANGES)
def test_of_the_config(name, wrong):
    r = refs[name]
    far(Run(model(name, wrong)).prefill(r['ids']), r['logits'])

# -- weights misread ------------------------------------------------------------------------------

def put(value, *path):
    "In every layer that has it, what `path` names becomes `value` of what it was"
    def f(m):
        for node in m.layers:
            for a in path[:-1]:
                node = getattr(node, a, None)
            if hasattr(node, path[-1]):
                setattr(node, path[-1], value(getattr(node, path[-1])))
    return f

zeros,ones = partial(put, np.zeros_like),partial(put, np.ones_like)
def plus_one(*path): return put(lambda w: w+1, *path)
def newest_first(*path):
    return put(lambda w: w[:,::-1].copy(), *path)
def mixers(m, attr):
    return [l.mixer for l in m.layers if hasattr(getattr(l, 'mixer', None), attr)]

def gates_after_queries(m):
    "All query rows first and then all gates, where the file has them head by head"
    n,heads = m.c.attention.num_heads*m.c.attention.head_dim,m.c.attention.num_heads
    for a in mixers(m, 'q_norm'):
        w = a.qkv_proj.weight  # gates, queries, keys, values
        # as stored
        rows = w[:2*n].reshape(2, heads, -1, w.shape[1])[::-1].swapaxes(0, 1).reshape(2*n, -1)
        a.qkv_proj.weight = np.concatenate([rows[n:], rows[:n], w[2*n:]])

def ungrouped(dst, src):
    "A fused projection of delta nets taken as it stands in the file"
    def f(m):
        with open_checkpoint(data/'qwen3-next') as ck:
            for i,l in enumerate(m.layers):
                if hasattr(l.mixer, 'A'):
                    getattr(l.mixer, dst).weight = ck.read(
                        f'model.layers.{i}.linear_attn.{src}.weight').decode()
    return f

def each_head_alone(m):
    "MiniMax's norms over one head at a time"
    for a in mixers(m, 'q_norm'):
        a._a = replace(a._a, qk_norm='head')
        for n in (a.q_norm,a.k_norm):
            n.weight = n.weight.reshape(-1, a._a.head_dim)

def halves(m):
    "Gate and up rows taken for halves where they alternate in the file"
    for l in m.layers:
        w = l.mlp.experts.gate_up_proj
        l.mlp.experts.gate_up_proj = w.reshape(
            len(w), 2, -1, w.shape[-1]).swapaxes(1, 2).reshape(w.shape)

FAULTS = {
    'biases': [
        zeros('mixer', 'qkv_proj', 'bias'), zeros('mixer', 'o_proj', 'bias'),
        zeros('mlp', 'gate_up_proj', 'bias'), zeros('mlp', 'down_proj', 'bias')],
    'qwen3-tied-wide': [ones('mixer', 'q_norm', 'weight'), ones('mixer', 'k_norm', 'weight')],
    'qwen3-next': [
        gates_after_queries, ungrouped('in_proj', 'in_proj_qkvz'),
        ungrouped('ba_proj', 'in_proj_ba'), plus_one('mixer', 'norm', 'weight')],
    'qwen35-dense': [
        gates_after_queries, plus_one('mixer', 'norm', 'weight'),
        newest_first('mixer', 'conv1d', 'weight'), zeros('mixer', 'dt_bias')],
    'gpt-oss': [halves],
    'gpt-oss-mxfp4': [halves],
    'gemma4-moe': [
        ones('layer_scalar'), ones('moe', 'router', 'per_expert_scale'),
        ones('moe', 'router', 'norm'), ones('pre_feedforward_layernorm_2', 'weight'),
        ones('post_feedforward_layernorm_1', 'weight')],
    'nemotron-h': [
        zeros('mixer', 'D'), zeros('mixer', 'conv1d', 'bias'),
        newest_first('mixer', 'conv1d', 'weight')],
    'minimax-m2': [each_head_alone]}

@pairs(FAULTS)
def test_of_the_weights(name, wrong):
    r = refs[name]
    m = model(name)
    wrong(m)
    far(Run(m).prefill(r['ids']), r['logits'])

# -- formats misread: the same as reading another file right --------------------------------------

def each_tensor(pattern, f):
    "The tensors whose name ends as `pattern` says become `f` of what they were"
    def change(ts):
        assert any(re.search(pattern+'$', k) for k in ts)
        return {
            k:np.ascontiguousarray(f(a)) if re.search(pattern+'$', k) else a for k,a in ts.items()}
    return change

def one_global(ts):
    "The largest global scale for queries, keys and values"
    def top(k): return max(ts[re.sub('[qkv]_proj', f'{x}_proj', k)] for x in 'qkv')
    of_them = [k for k in ts if re.search(r'[qkv]_proj\.weight_scale_2$', k)]
    return ts|{k:np.array(top(k)) for k in of_them}

def swap(b): return (b>>4)|(b<<4)  # the two elements of a byte
def first_of_row(s): return np.broadcast_to(s[...,:1], s.shape)
def first_of_column(s): return np.broadcast_to(s[:1], s.shape)

FILES = {
    'llama-fp8-tensor': [each_tensor(r'v_proj\.weight_scale', lambda s: s*2)],
    'qwen3-fp8-channel': [each_tensor(r'\.weight_scale', first_of_column)],
    'minimax-fp8-block': [
        each_tensor('scale_inv', first_of_row), each_tensor('scale_inv', first_of_column)],
    'qwen35-moe-fp8-block': [
        each_tensor('scale_inv', first_of_row), each_tensor('scale_inv', first_of_column)],
    'llama-fp8-pb-wo': [
        each_tensor(r'\.weight_scale', lambda s: s[:,:,::-1]),
        each_tensor(r'\.weight_scale', lambda s: s[::-1])],
    'qwen3-nvfp4': [
        one_global, each_tensor(r'_proj\.weight', swap),
        each_tensor(r'\.weight_scale', first_of_row)],
    'gemma4-nvfp4-experts': [
        each_tensor(r'_proj\.weight_scale_2', lambda s: s*2),
        each_tensor(r'experts.*\.weight_scale', first_of_column)],
    'nemotron-nvfp4': [each_tensor(r'in_proj\.weight_scale', first_of_row)],
    'qwen3-moe-ct-nvfp4': [
        each_tensor('weight_packed', swap), each_tensor('weight_global_scale', lambda s: s/2)],
    'gpt-oss-mxfp4': [each_tensor('_blocks', swap), each_tensor('_scales', first_of_row)],
    'llama-ct-mxfp4': [
        each_tensor('weight_packed', swap), each_tensor('weight_scale', lambda s: s+1)],
    'qwen35-mixed': [
        each_tensor(r'lm_head\.weight_scale_2', lambda s: s*2),
        each_tensor(r'lm_head\.weight', swap)]}

@pairs(FILES)
def test_of_formats(tmp_path, name, wrong):
    r = refs[name]
    far(
        LLM(
            str(rewritten(name, tmp_path, wrong)), device='cpu').logits(r['ids']),
        r['logits'])

@pytest.mark.parametrize('name,pattern', [
    ('llama-fp8-tensor','input_scale'), ('llama-fp8-tensor','[kv]_scale'),
    ('qwen3-nvfp4','input_scale'),
    ('qwen3-moe-ct-nvfp4','input_global_scale'), ('qwen35-mixed','[kv]_scale')])
def test_scales_of_activations_and_caches_change_nothing(tmp_path, name, pattern):
    "Weights are multiplied as they are, with activations and caches in full"
    ids = refs[name]['ids']
    other = rewritten(name, tmp_path, each_tensor(pattern, lambda s: s*3))
    want = LLM(str(data/name), device='cpu').logits(ids)
    assert (LLM(str(other), device='cpu').logits(ids)==want).all()

# -- drafts ---------------------------------------------------------------------------------------

@pytest.mark.parametrize('name', having('mtp_draft'))
def test_of_the_head_that_drafts(name):
    "It sees the model's rows after their last norm; several engines gave it those before"
    r = refs[name]
    one,*_ = mtp(name, normed=False)
    far(one[r['rows']], r['mtp_logits'])

def narrower(assistant):
    "A window that counts the query, which is not among the keys"
    for l in assistant.layers:
        l.mixer._window = l.mixer._window and l.mixer._window-1

@pytest.mark.parametrize('name', having('draft_tokens'))
@pytest.mark.parametrize(
    'wrong', (dict(beyond=-1), dict(spoil=narrower)),
    ids=('position','window'))
def test_of_the_assistant(name, wrong):
    far(drafts(name, **wrong)[1], refs[name]['draft_logits'])

# -- images ---------------------------------------------------------------------------------------

def misseen(media, wrong):
    "`media` whose images are seen as (values, levels) -> `wrong(values, levels)`"
    def seen(image): return SimpleNamespace(features=lambda: wrong(*image.features()))
    return replace(media, images=[seen(i) for i in media.images])

def plain_positions(media):
    line = np.arange(media.pos3.shape[1], dtype=np.int32)
    return replace(media, pos3=np.tile(line, (3,1)), delta=0)

def height_for_width(media): return replace(media, pos3=media.pos3[[0,2,1]])

def features_out_of_order(media):
    return misseen(media, lambda values,deep: (values[::-1],deep))

def no_deepstack(media): return misseen(media, lambda values,deep: (values,()))

def deepstack_a_layer_late(media):
    def late(values, deep):
        return values,(np.zeros_like(deep[0]),*deep[:-1])
    return misseen(media, late)

MISTAKES = (
    plain_positions,height_for_width,features_out_of_order,no_deepstack,deepstack_a_layer_late)
IMAGES = {f.__name__:f for f in MISTAKES}

@pytest.mark.parametrize('wrong', IMAGES)
@pytest.mark.parametrize('name', having('pixels'))
def test_of_images(name, wrong):
    r = refs[name]
    m = model(name)
    media = seen(name, m)
    deep = media.images[0].features()[1]
    if 'deepstack' in wrong and not deep:
        pytest.skip('a tower without deepstack')
    far(
        Run(m).prefill(r['image_ids'], IMAGES[wrong](media)),
        r['image_logits'])

@pytest.mark.parametrize('name', having('pixels'))
def test_of_the_position_after_an_image(name):
    r = refs[name]
    m = model(name)
    media = seen(name, m)
    run = Run(m)
    run.prefill(r['image_ids'], media)
    assert media.delta!=0
    far(
        run.steps(
            r['image_next_ids'], len(r['image_ids']),
            replace(media, delta=0)),
        r['image_next_logits'])
