"""Checkpoints of every family in the layouts that are published: names, prefixes, expert layouts
and storage formats, written without Atlas's readers.

A layout is a row of `LAYOUTS`. Its folder is written twice: as published, and plain: float32, the
numbers that the packed tensors stand for, under the simplest names.
Both must load as the same arrays."""
import json,re
import numpy as np
from dataclasses import dataclass
from atlas.ground.config import ModelConfig
from atlas.ground.formats import E2M1,E4M3,E8M0,QTensor,bf16_to_f32,f32_to_bf16
from atlas.model.model import build
from atlas.ground.weights import dummy_checkpoint,quantizable
from .checkpoints import st_bytes

# ---- configs: widths that end within a tile of 128, and 32 divides

_BASE = dict(
    vocab_size=64, hidden_size=160, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=40, intermediate_size=224, max_position_embeddings=64,
    rms_norm_eps=1e-6, rope_theta=10000.0, tie_word_embeddings=False, eos_token_id=2)
_EXPERTS = dict(num_experts=3, num_experts_per_tok=2, moe_intermediate_size=96, norm_topk_prob=True)
_DELTA = dict(
    layer_types=['linear_attention','full_attention'], linear_num_key_heads=2,
    linear_num_value_heads=4, linear_key_head_dim=16, linear_value_head_dim=24,
    linear_conv_kernel_dim=4, partial_rotary_factor=.4)
_VISION = dict(
    depth=1, hidden_size=16, intermediate_size=24, num_heads=2, in_channels=3,
    num_position_embeddings=16, patch_size=4, spatial_merge_size=2, temporal_patch_size=2,
    out_hidden_size=160, hidden_act='gelu_pytorch_tanh', deepstack_visual_indexes=[])
_MROPE = dict(
    mrope_section=[4,2,2], mrope_interleaved=True, rope_type='default', rope_theta=10000.0)
def _wrap(kind, text, **kw):
    return dict(
        model_type=kind, text_config=text|dict(model_type=kind+'_text'),
        tie_word_embeddings=text['tie_word_embeddings'], **kw)
def _qwen35(kind, **kw):
    return _wrap(
        kind,
        _BASE|_DELTA
        |dict(rope_parameters=_MROPE|dict(partial_rotary_factor=.4), mtp_num_hidden_layers=1)|kw,
        vision_config=_VISION|dict(model_type=kind),
        image_token_id=60)
_GEMMA = _BASE|dict(
    num_global_key_value_heads=1, global_head_dim=48, attention_k_eq_v=True, enable_moe_block=False,
    hidden_size_per_layer_input=0, num_kv_shared_layers=0, final_logit_softcapping=30.0,
    sliding_window=16, layer_types=['sliding_attention','full_attention'],
    hidden_activation='gelu_pytorch_tanh', tie_word_embeddings=True,
    rope_parameters=dict(
        full_attention=dict(rope_type='proportional', rope_theta=1e6, partial_rotary_factor=.5),
        sliding_attention=dict(rope_type='default', rope_theta=1e4)))
_ASSIST = dict(
    model_type='gemma4_assistant', backbone_hidden_size=160, num_centroids=16,
    centroid_intermediate_top_k=4, tie_word_embeddings=True,
    text_config=_GEMMA|dict(
        model_type='gemma4_text', hidden_size=96, num_kv_shared_layers=2,
        final_logit_softcapping=None))

CONFS = dict(
    llama=_BASE|dict(model_type='llama'),
    smollm2=_BASE|dict(model_type='llama', tie_word_embeddings=True),
    mistral=_BASE|dict(model_type='mistral', head_dim=56, sliding_window=None),
    mistral3=dict(
        model_type='mistral3', text_config=_BASE|dict(model_type='mistral'),
        vision_config=dict(model_type='pixtral'), tie_word_embeddings=False),
    qwen3=_BASE|dict(model_type='qwen3'),
    qwen3_tied=_BASE|dict(model_type='qwen3', tie_word_embeddings=True),
    qwen3_moe=_BASE|_EXPERTS
    |dict(model_type='qwen3_moe', decoder_sparse_step=1, mlp_only_layers=[]),
    qwen3_next=_BASE|_EXPERTS|_DELTA|dict(
        model_type='qwen3_next', shared_expert_intermediate_size=64, decoder_sparse_step=1,
        mlp_only_layers=[]),
    qwen3_5=_qwen35('qwen3_5'),
    qwen3_5_moe=_qwen35('qwen3_5_moe', **_EXPERTS, shared_expert_intermediate_size=64),
    qwen3_vl=_wrap(
        'qwen3_vl',
        _BASE|dict(rope_scaling=_MROPE|dict(mrope_section=[8,6,6])),
        vision_config=_VISION|dict(model_type='qwen3_vl', deepstack_visual_indexes=[0]),
        image_token_id=60),
    qwen3_vl_moe=_wrap(
        'qwen3_vl_moe',
        _BASE|_EXPERTS|dict(
            rope_scaling=_MROPE|dict(mrope_section=[8,6,6]),
            decoder_sparse_step=1, mlp_only_layers=[]),
        vision_config=_VISION|dict(model_type='qwen3_vl_moe'),
        image_token_id=60),
    gpt_oss=_BASE|dict(
        model_type='gpt_oss', num_local_experts=3, num_experts_per_tok=2, intermediate_size=160,
        sliding_window=16, layer_types=['sliding_attention','full_attention'], attention_bias=True,
        swiglu_limit=7.0,
        rope_scaling=dict(
            rope_type='yarn', factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=False,
            original_max_position_embeddings=16)),
    gemma4=_wrap(
        'gemma4', _GEMMA|_EXPERTS|dict(enable_moe_block=True, top_k_experts=2), vision_config=None,
        audio_config=None),
    gemma4_dense=_wrap('gemma4', _GEMMA, vision_config=None, audio_config=None),
    gemma4_assistant=_ASSIST|dict(use_ordered_embeddings=False),
    gemma4_ordered=_ASSIST|dict(use_ordered_embeddings=True),
    nemotron_h=_BASE|dict(
        model_type='nemotron_h', hybrid_override_pattern='ME*', num_hidden_layers=3,
        mamba_num_heads=6, mamba_head_dim=16, n_groups=2, ssm_state_size=8, conv_kernel=4,
        use_conv_bias=True, n_routed_experts=3, n_shared_experts=1, num_experts_per_tok=2,
        moe_intermediate_size=96, moe_shared_expert_intermediate_size=64, n_group=1, topk_group=1,
        norm_topk_prob=True, routed_scaling_factor=2.5, mlp_hidden_act='relu2',
        layer_norm_epsilon=1e-5, mlp_bias=False, use_bias=False, attention_bias=False),
    minimax_m2=_BASE|dict(
        model_type='minimax_m2', num_local_experts=3, num_experts_per_tok=2, intermediate_size=96,
        rotary_dim=20, scoring_func='sigmoid', use_routing_bias=True, use_qk_norm=True,
        qk_norm_type='per_layer', shared_intermediate_size=0))

def base(conf)->dict:
    """Canonical names and float32 numbers of a model of this config, its experts stacked
    [E,out,in], each number one that BF16 holds"""
    c = ModelConfig.from_hf(conf)
    with dummy_checkpoint(c, build(c).wants(), 'bf16') as d:
        ws = {k:d.read(k).decode() for k in d.tensors}
    if 'masked_embedding.token_ordering' in ws:
        ws['masked_embedding.token_ordering'] = np.random.default_rng(0).permutation(len(
            ws['masked_embedding.token_ordering']))
    return {
        k:a if a.dtype==np.int64 else bf16_to_f32(f32_to_bf16(a))
        for k,a in ws.items()}

# ---- storage formats: float32 -> what is stored, and the numbers that it stands for

def _tiles(s, shape):
    return s.repeat(128, -2)[
        ..., :shape[-2],
        :].repeat(128, -1)[...,:shape[-1]]
def _bf16(s): return f32_to_bf16(s),bf16_to_f32(f32_to_bf16(s))
def _pow2(s):
    e = np.round(np.log2(s)).astype(int)+127
    return e.astype(np.uint8),E8M0[e]
def _fp8(n, a, name, end, stored, scale, spread):
    return (
        {n:(name['data'],'F8_E4M3'), n+end:stored},
        (E4M3[name['data']]*spread(scale, a.shape)).astype(np.float32))
def _nibbles(b):
    return np.stack(
        [E2M1[b&15],E2M1[b>>4]],
        -1).reshape(*b.shape[:-1],-1)
def _per_tensor(s, shape): return s
def _per_row(s, shape): return s.reshape(shape[:-1])[...,None]

def _fp8_as(
    n,
    a,
    fmt,
    end,
    change=lambda s: (s,s),
    dtype='F32',
    shape=lambda s: s.shape):
    p = QTensor.encode(a, fmt).parts
    stored,scale = change(p['scale'])
    return _fp8(
        n, a, p, end,
        (stored.reshape(shape(p['scale'])),dtype),
        scale,
        dict(FP8_TENSOR=_per_tensor, FP8_CHANNEL=_per_row, FP8_BLOCK=_tiles)[fmt])

def _nvfp4(n, a, ct, one):
    m = n.removesuffix('.weight')
    p = QTensor.encode(a, 'NVFP4').parts
    g = np.float32(1)/p['global'] if ct else p['global']
    s = E4M3[p['scale']]*(np.float32(1)/g if ct else g)
    parts = {
        m+('.weight_packed' if ct else '.weight'):(p['data'],'U8'),
        m+'.weight_scale':(p['scale'],'F8_E4M3'),
        m+('.weight_global_scale' if ct else '.weight_scale_2'):(
            np.float32([g]) if one else np.float32(g), 'F32')}
    return parts,_nibbles(p['data'])*s.repeat(16, -1)

def _mxfp4(n, a, how, dtype='U8'):
    m = n.removesuffix('.weight')
    p = QTensor.encode(a, 'MXFP4').parts
    d,s = p['data'],p['scale']
    if how=='blocks':
        parts = {
            m+'_blocks':(d.reshape(*s.shape,16),'U8'),
            m+'_scales':(s,dtype)}
    else:
        parts = {m+how:(d,'U8'), m+'.weight_scale':(s,dtype)}
    return parts,_nibbles(d)*E8M0[s].repeat(32, -1)

def _stacked(n, a, end, fmt):
    "A stack [E,out,in] in FP8, a scale for each of its matrices"
    ps = [QTensor.encode(x, fmt).parts for x in a]
    d,s = (np.stack([p[k] for p in ps])
        for k in ('data','scale'))
    return (
        {n:(d,'F8_E4M3'), n+end:(s,'F32')},
        (
            E4M3[d]
            *(
                s[:,None,None] if fmt=='FP8_TENSOR'
                else _tiles(s, a.shape))).astype(np.float32))

def _words(q, axis):
    "Eight integers along `axis` in a word of 32 bits, the first one lowest; the last is filled up"
    q = np.asarray(q, np.int64)
    q = np.moveaxis(q, axis, -1)
    fill = np.zeros(
        (*q.shape[:-1],-q.shape[-1]%8),
        int)
    q = np.concatenate([q,fill], -1)
    words = sum(q[...,i::8]<<4*i for i in range(8))
    words = words.astype(np.uint32)
    return np.moveaxis(words.view(np.int32), -1, axis)

@dataclass
class _Groups:
    "A matrix in groups of four-bit integers"
    codes:np.ndarray # (out,inner), columns where they are in the matrix
    zeros:np.ndarray # (out,groups)
    scale:tuple # stored (out,groups), and its type
    group_of:np.ndarray # (inner,) the group of each column
    numbers:np.ndarray # (out,inner) that they stand for

def _limits(b, symmetric):
    "What the least and the greatest integer stand for in each group of `b`"
    if symmetric:
        hi = np.abs(b).max(-1)
        return -hi,hi
    return (
        np.minimum(b.min(-1), 0),
        np.maximum(b.max(-1), 0))

def _half(s, kind):
    "`s` as it is stored in 16 bits, and the numbers that these are"
    stored = s.astype(np.float16) if kind=='F16' else f32_to_bf16(s)
    return stored,stored.astype(np.float32) if kind=='F16' else bf16_to_f32(stored)

def _integers(x): return np.rint(x).clip(0, 15).astype(int)

def _grouped(a, at, group, symmetric, kind):
    "`a` in groups of so many of its columns, taken in the order `at`; scales of this type"
    b = np.ascontiguousarray(a[:,at])
    b = b.reshape(len(a), -1, group)
    lo,hi = _limits(b, symmetric)
    scale = ((hi-lo)/15+1e-6).astype(np.float32)
    stored,scale = _half(scale, kind)
    zeros = np.full(scale.shape, 8) if symmetric else _integers(-lo/scale)
    z,s = zeros[...,None],scale[...,None]
    codes = _integers(np.rint(b/s)+z)
    numbers = ((codes-z)*s).astype(a.dtype)
    back = np.argsort(at)
    codes,numbers = (x.reshape(a.shape)[:,back] for x in (codes,numbers))
    return _Groups(codes, zeros, (stored,kind), back//group, numbers)

def _ct_parts(g, symmetric):
    "compressed-tensors: words along a row, zero points along a column"
    parts = dict(weight_packed=(_words(g.codes, 1),'I32'))
    parts['weight_scale'] = g.scale
    parts['weight_shape'] = np.int64(g.codes.shape),'I64'
    if not symmetric:
        parts['weight_zero_point'] = _words(g.zeros, 0),'I32'
    return parts

def _awq_parts(g):
    "AutoAWQ: all turned, eight columns in an order of its own"
    order = [0,2,4,6,1,3,5,7]
    def mixed(x):
        eights = x.reshape(len(x), -1, 8)
        return eights[...,order].reshape(x.shape)
    codes = mixed(g.codes.T)
    zeros = mixed(g.zeros.T)
    return dict(qweight=_words(codes, 1), qzeros=_words(zeros, 1))

def _gptq_parts(g):
    "AutoGPTQ: all turned, zero points less one"
    codes = g.codes.T
    zeros = (g.zeros.T-1)%16
    parts = dict(qweight=_words(codes, 0), qzeros=_words(zeros, 1))
    return parts|dict(g_idx=g.group_of.astype(np.int32))

def _int4(n, a, how, group=32, symmetric=False, half=True):
    "Four-bit integers in groups as three programs pack them; `group` 0: a row is one"
    inner = a.shape[1]
    at = np.arange(inner)  # columns, group by group
    if how=='gptq-order':
        at = np.random.default_rng(inner).permutation(inner)
    g = _grouped(a, at, group or inner, symmetric, 'F16' if half else 'BF16')
    if how=='ct':
        parts = _ct_parts(g, symmetric)
    else:
        scales,kind = g.scale
        parts = dict(scales=(scales.T.copy(),kind))
        words = _awq_parts(g) if how=='awq' else _gptq_parts(g)
        for k,w in words.items():
            parts[k] = w,'I32'
    m = n.removesuffix('.weight')
    return {f'{m}.{k}':v for k,v in parts.items()},g.numbers

# name, array -> ({stored name: (array, type)}, numbers)
HOW = {
    'f32': lambda n,a: ({n:(a,'F32')},a),
    'bf16': lambda n,a: ({n:(f32_to_bf16(a),'BF16')}, a),
    'f16': lambda n,a: (
        {n:((h := a.astype(np.float16)),'F16')},
        h.astype(np.float32)),
    'fp8-tensor': lambda n,a: _fp8_as(n, a, 'FP8_TENSOR', '_scale'),
    'fp8-tensor-bf16': lambda n,a: _fp8_as(
        n, a, 'FP8_TENSOR', '_scale', _bf16, 'BF16', lambda s: (1,)),
    'fp8-channel': lambda n,a: _fp8_as(
        n, a, 'FP8_CHANNEL', '_scale', _bf16, 'BF16',
        lambda s: (*s.shape,1)),
    'fp8-channel-flat': lambda n,a: _fp8_as(n, a, 'FP8_CHANNEL', '_scale'),
    'fp8-block': lambda n,a: _fp8_as(n, a, 'FP8_BLOCK', '_scale_inv'),
    'fp8-block-bf16': lambda n,a: _fp8_as(n, a, 'FP8_BLOCK', '_scale_inv', _bf16, 'BF16'),
    'fp8-block-f16': lambda n,a: _fp8_as(
        n, a,
        'FP8_BLOCK',
        '_scale_inv',
        lambda s: (
            (h := s.astype(np.float16)),
            h.astype(np.float32)),
        'F16'),
    'fp8-block-e8m0': lambda n,a: _fp8_as(n, a, 'FP8_BLOCK', '_scale_inv', _pow2, 'F8_E8M0'),
    'fp8-pb-wo': lambda n,a: _fp8_as(
        n, a,
        'FP8_BLOCK',
        '_scale',
        shape=lambda s: (s.shape[0], 1, s.shape[1], 1)),
    'nvfp4': lambda n,a: _nvfp4(n, a, False, False),
    'nvfp4-one': lambda n,a: _nvfp4(n, a, False, True),
    'nvfp4-ct': lambda n,a: _nvfp4(n, a, True, True),
    'int4-ct': lambda n,a: _int4(n, a, 'ct', half=False),
    'int4-ct-symmetric': lambda n,a: _int4(n, a, 'ct', 0, True),
    'int4-gptq': lambda n,a: _int4(n, a, 'gptq'),
    'int4-gptq-order': lambda n,a: _int4(n, a, 'gptq-order'),
    'int4-awq': lambda n,a: _int4(n, a, 'awq'),
    'mxfp4': lambda n,a: _mxfp4(n, a, '.weight'),
    'mxfp4-ct': lambda n,a: _mxfp4(n, a, '.weight_packed'),
    'mxfp4-e8m0': lambda n,a: _mxfp4(n, a, '.weight_packed', 'F8_E8M0')}
STACK_HOW = {
    'bf16': HOW['bf16'],
    'mxfp4-blocks': lambda n,a: _mxfp4(n, a, 'blocks'),
    'fp8-stack': lambda n,a: _stacked(n, a, '_scale', 'FP8_TENSOR'),
    'fp8-block-stack': lambda n,a: _stacked(n, a, '_scale_inv', 'FP8_BLOCK')}

# ---- layouts

def split_experts(ws, gate='gate_proj', up='up_proj', down='down_proj'):
    "`ws` with its stacks of experts one by one"
    out = {}
    for k,a in ws.items():
        m = re.fullmatch(r'(.*experts\.)(gate_up_proj|up_proj|down_proj|w2)', k)
        if not m:
            out[k] = a
            continue
        for e,x in enumerate(a):
            halves = (
                {
                    gate:x[:len(x)//2],
                    up:x[len(x)//2:]}
                if m[2]=='gate_up_proj'
                else {up if m[2]=='up_proj' else down:x})
            out |= {f'{m[1]}{e}.{n}.weight':y for n,y in halves.items()}
    return out

def named(k, style):
    "The name that a release of this style gives to the canonical `k`"
    trunk,outer = dict(
        wrapped=('model.language_model.',''), plain=('model.',''),
        mistral3=('language_model.model.','language_model.'), backbone=('backbone.',''),
        bare=('',''), odd=('base.net.','base.'))[style]
    if k.startswith('visual.'):
        return 'model.'+k if style=='wrapped' else k
    if k.startswith('lm_head.'):
        return outer+k
    if not k.startswith('model.'):
        return k
    if style=='backbone':
        k = k.replace(
            'model.embed_tokens.', 'model.embeddings.').replace('model.norm.', 'model.norm_f.')
    return trunk+k[6:]

ALL = r'model\.layers\..*'
EXPERTS = r'model\.layers\..*experts.*'
ATTN = r'model\.layers\..*(attn|mixer\.(in|out))_?.*'
# name: config, prefix, experts ('stack', 'each', 'turned'), [(canonical names, format)] of which
# the first that matches holds for quantisable tensors
LAYOUTS = {
    'llama': ('llama','plain','',[]),
    'mistral': ('mistral','plain','',[]),
    'smollm2': ('smollm2','plain','',[]),
    'mistral3': ('mistral3','mistral3','',[]),
    'llama-bare': ('llama','bare','',[(ALL,'f16')]),
    'qwen3': ('qwen3','plain','',[]),
    'qwen3-tied': ('qwen3_tied','plain','',[]),
    'qwen3-fp8-tensor': ('qwen3','plain','',[(ALL,'fp8-tensor')]),
    'qwen3-fp8-channel': ('qwen3','plain','',[(ALL,'fp8-channel')]),
    'qwen3-fp8-half': ('qwen3','odd','',[(ALL,'fp8-block-f16')]),
    'llama-mxfp4-ct': ('llama','plain','',[(ALL,'mxfp4-ct')]),
    'llama-fp8-pb-wo': ('llama','plain','',[(ALL,'fp8-pb-wo')]),
    'llama-int4-ct': ('llama','plain','',[(ALL,'int4-ct')]),
    'llama-gptq': ('llama','plain','',[(ALL,'int4-gptq')]),
    'qwen3-awq': ('qwen3','plain','',[(ALL,'int4-awq')]),
    'qwen3-moe-int4-ct': ('qwen3_moe','plain','each',[(ALL,'int4-ct-symmetric')]),
    'qwen3-moe': ('qwen3_moe','plain','each',[]),
    'qwen3-moe-nvfp4-ct': ('qwen3_moe','plain','each',[(ALL,'nvfp4-ct')]),
    'qwen3-moe-fp8-block': ('qwen3_moe','plain','each',[(ALL,'fp8-block')]),
    'qwen3-next': ('qwen3_next','plain','each',[]),
    'qwen3-next-fp8-block': ('qwen3_next','plain','each',[(ALL,'fp8-block-bf16')]),
    'qwen3.5': ('qwen3_5','wrapped','',[]),
    'qwen3.5-e8m0': ('qwen3_5','wrapped','',[(ALL,'fp8-block-e8m0')]),
    'qwen3.5-moe': ('qwen3_5_moe','wrapped','stack',[]),
    'qwen3.5-moe-each': ('qwen3_5_moe','plain','each',[]),
    'qwen3.5-moe-fp8-block': ('qwen3_5_moe','wrapped','each',[('.*','fp8-block-bf16')]),
    'qwen3.5-moe-mixed': (
        'qwen3_5_moe', 'wrapped', 'each',
        [(ATTN,'fp8-tensor'),(ALL,'nvfp4'),('lm_head.*','nvfp4')]),
    'qwen3.5-moe-nvfp4-experts': ('qwen3_5_moe','wrapped','each',[(EXPERTS,'nvfp4')]),
    'qwen3.5-moe-fp8-stack': ('qwen3_5_moe','wrapped','stack',[(EXPERTS,'fp8-block-stack')]),
    'qwen3-vl': ('qwen3_vl','wrapped','',[]),
    'qwen3-vl-moe': ('qwen3_vl_moe','wrapped','turned',[]),
    'qwen3-vl-moe-fp8': (
        'qwen3_vl_moe', 'wrapped', 'turned', [(EXPERTS,'fp8-block-stack'),(ALL,'fp8-block-bf16')]),
    'qwen3-vl-moe-fp8-tensor': ('qwen3_vl_moe','plain','turned',[(EXPERTS,'fp8-stack')]),
    'gpt-oss': ('gpt_oss','plain','turned',[]),
    'gpt-oss-mxfp4': ('gpt_oss','plain','stack',[(EXPERTS,'mxfp4-blocks')]),
    'gemma4': ('gemma4','wrapped','stack',[]),
    'gemma4-nvfp4-experts': ('gemma4','wrapped','each',[(EXPERTS,'nvfp4-one')]),
    'gemma4-dense': ('gemma4_dense','wrapped','',[]),
    'gemma4-assistant': ('gemma4_assistant','plain','',[]),
    'gemma4-assistant-ordered': ('gemma4_ordered','plain','',[]),
    'nemotron-h': ('nemotron_h','backbone','each',[]),
    'nemotron-h-nvfp4': ('nemotron_h','backbone','each',[(ALL,'nvfp4')]),
    'minimax-m2': ('minimax_m2','plain','each',[]),
    'minimax-m2-fp8-block': ('minimax_m2','plain','each',[(ALL,'fp8-block')])}

def may_quantise(k):
    return quantizable(re.sub(r'^mtp\.layers', 'model.layers', k)) or k=='lm_head.weight'

def by_rules(rules):
    "What picks the first format whose pattern a name matches"
    def pick(k, a):
        return next((how for pattern,how in rules if re.fullmatch(pattern, k)), 'bf16')
    return pick

def is_stack(k, a): return a.ndim==3 and 'experts' in k and k.split('.')[0]!='visual'

def one_stored(k, a, how, turned):
    "Parts in which the numbers `a` are stored under the name `k`, and the numbers that come of it"
    if is_stack(k, a) and turned:
        parts,x = STACK_HOW[how](k, np.ascontiguousarray(a.swapaxes(1,2)))
        return parts,x.swapaxes(1,2)
    return (STACK_HOW if is_stack(k, a) else HOW)[how](k, a)

def stored(conf, style, experts, rules):
    """({stored name: (array, type)}, {canonical name: numbers}) of a layout;
    `rules` may be a function of name and array"""
    ws = base(CONFS[conf])
    w123 = dict(gate='w1', up='w3', down='w2') if conf=='minimax_m2' else {}
    if experts=='each':
        ws = split_experts(ws, **w123)
    pick = rules if callable(rules) else by_rules(rules)
    turned = conf in ('gpt_oss','qwen3_vl_moe')
    raw,plain = {},{}
    for k,a in ws.items():
        if a.dtype==np.int64:
            raw[k],plain[k] = (a,'I64'),a
            continue
        how = pick(k, a) if a.ndim>1 and may_quantise(k) else 'bf16'
        parts,plain[k] = one_stored(k, a, how, experts=='turned')
        if turned and is_stack(k, a):
            # which store plain numbers [in,out]; gpt-oss's down_proj is square
            plain[k] = np.ascontiguousarray(plain[k].swapaxes(1,2))
        raw |= {named(n, style):v for n,v in (parts|input_scale(k, a, how)).items()}
    return raw,plain

def any_format(seed):
    "A rule for `stored`: any that a tensor can have, but 16 and 32 bits of IEEE"
    rng = np.random.default_rng(seed)
    hows = [h for h in HOW if h not in ('f32','f16')]
    def pick(k, a):
        some = [*STACK_HOW] if a.ndim==3 else hows
        if a.shape[-1]%32 or a.shape[-2]%8:
            some = [h for h in some if 'fp4' not in h and 'int4' not in h]
        return str(rng.choice(some))
    return pick

def input_scale(k, a, how):
    "What some formats have beside each matrix"
    if is_stack(k, a) or how[:3] not in ('nvf','fp8'):
        return {}
    return {k.removesuffix('.weight')+'.input_scale': (np.float32(1),'F32')}

def folder(path, conf, raw, shards=1, **files):
    """A model folder out of {stored name: (array, type)};
    `files` are more JSON files, by name with _ for ."""
    path.mkdir(parents=True, exist_ok=True)
    (path/'config.json').write_text(json.dumps(conf))
    if shards==1:
        write_tensors(path/'model.safetensors', raw)
    else:
        names = [f'model-{i+1:05}-of-{shards:05}.safetensors' for i in range(shards)]
        for i,n in enumerate(names):
            write_tensors(path/n, dict(list(raw.items())[i::shards]))
        where = {k:names[i%shards] for i,k in enumerate(raw)}
        index = path/'model.safetensors.index.json'
        index.write_text(json.dumps(dict(weight_map=where)))
    for n,d in files.items():
        (path/f'{n}.json').write_text(json.dumps(d))
    return path

def write_tensors(file, raw):
    "A file of {stored name: (array, type)}"
    arrays = {k:np.ascontiguousarray(a) for k,(a,_) in raw.items()}
    file.write_bytes(st_bytes(arrays, dtypes={k:t for k,(_,t) in raw.items()}))
