"""Model descriptions of every family: whatever a key holds comes out as a config or as a typed
error, and what is said is honoured."""
import copy,json
from dataclasses import replace
import pytest
from hypothesis import given,settings,strategies as st
from atlas.ground.config import ModelConfig,PRESETS,families
from atlas.ground.core import CheckpointError,ConfigError,UnsupportedError

ODD = (
    None,
    True,
    False,
    0,
    -1,
    1,
    7,
    1.5,
    10**30,
    2**31,
    float('nan'),
    float('inf'),
    'x',
    '',
    [],
    [1],
    [-1],
    ['x'],
    [None],
    {},
    {'rope_type':[]},
    {'a':1},
    [[]],
    [{}])
HEADS = dict(
    hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    intermediate_size=96, vocab_size=256, max_position_embeddings=512, rms_norm_eps=1e-6,
    eos_token_id=1, tie_word_embeddings=False)
MOE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32)
DELTA = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16,
    linear_value_head_dim=16, linear_conv_kernel_dim=4, full_attention_interval=2)
VISION = dict(
    depth=3, hidden_size=64, num_heads=4, intermediate_size=96, out_hidden_size=64,
    num_position_embeddings=64, deepstack_visual_indexes=[0,1], patch_size=16,
    temporal_patch_size=2, spatial_merge_size=2, in_channels=3, hidden_act='gelu_pytorch_tanh')
YARN = dict(
    rope_type='yarn', factor=32., beta_fast=32., beta_slow=1., truncate=False,
    original_max_position_embeddings=64)
MROPE = dict(
    rope_type='default', rope_theta=1e7, partial_rotary_factor=.5, mrope_section=[2,1,1],
    mrope_interleaved=True)
NESTED = dict(
    full_attention=dict(rope_type='proportional', rope_theta=1e6, partial_rotary_factor=.25),
    sliding_attention=dict(rope_type='default', rope_theta=1e4))
GEMMA = (
    HEADS
    |dict(
        model_type='gemma4_text',
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        enable_moe_block=True,
        sliding_window=16,
        rope_parameters=NESTED,
        layer_types=['sliding_attention']*3+['full_attention'],
        hidden_activation='gelu_pytorch_tanh',
        final_logit_softcapping=30.,
        hidden_size_per_layer_input=0,
        num_kv_shared_layers=0,
        use_double_wide_mlp=False,
        use_bidirectional_attention='vision',
        num_experts=8,
        top_k_experts=2,
        moe_intermediate_size=32))
def wrapped(kind, text, **top):
    return (
        dict(
            model_type=kind, text_config=text, image_token_id=250, video_token_id=251,
            vision_start_token_id=248, vision_end_token_id=249)|top)
GRANITE = HEADS|dict(num_local_experts=8, num_experts_per_tok=2, shared_intermediate_size=48,
    embedding_multiplier=12, attention_multiplier=.125, residual_multiplier=.22, logits_scaling=6)
CONFIGS = dict(
    llama=HEADS
    | dict(
        model_type='llama',
        rope_theta=5e5,
        attention_bias=False,
        mlp_bias=False,
        hidden_act='silu',
        rope_scaling=dict(
            rope_type='llama3', factor=8., low_freq_factor=1., high_freq_factor=4.,
            original_max_position_embeddings=64)),
    mistral=HEADS|dict(model_type='mistral', rope_theta=1e6, sliding_window=None),
    mistral3=wrapped(
        'mistral3', HEADS|dict(model_type='mistral', rope_theta=1e6, sliding_window=16)),
    qwen2=HEADS
    | dict(
        model_type='qwen2', rope_theta=1e6, use_sliding_window=True, sliding_window=16,
        max_window_layers=2),
    qwen3=HEADS
    | dict(
        model_type='qwen3', rope_theta=1e6, attention_bias=False, use_sliding_window=False,
        rope_scaling=YARN),
    qwen3_moe=HEADS|MOE
    | dict(
        model_type='qwen3_moe', rope_theta=1e6, norm_topk_prob=True, decoder_sparse_step=2,
        mlp_only_layers=[3]),
    qwen3_next=HEADS|MOE|DELTA
    | dict(
        model_type='qwen3_next', rope_theta=1e7, partial_rotary_factor=.5,
        shared_expert_intermediate_size=32),
    qwen3_5=wrapped(
        'qwen3_5',
        HEADS|DELTA
        | dict(
            model_type='qwen3_5_text',
            rope_parameters=MROPE,
            mtp_num_hidden_layers=1,
            mtp_use_dedicated_embeddings=False,
            attn_output_gate=True,
            output_gate_type='swish',
            layer_types=['linear_attention']*3+['full_attention']),
        vision_config=VISION,
        tie_word_embeddings=False),
    qwen3_5_moe=wrapped(
        'qwen3_5_moe',
        HEADS|MOE|DELTA
        | dict(
            model_type='qwen3_5_moe_text', rope_parameters=MROPE,
            shared_expert_intermediate_size=32, mtp_num_hidden_layers=1),
        vision_config=VISION),
    qwen3_vl=wrapped(
        'qwen3_vl',
        HEADS
        | dict(
            model_type='qwen3_vl_text',
            rope_theta=5e6,
            rope_scaling=dict(
                rope_type='default', mrope_section=[4,2,2], mrope_interleaved=True)),
        vision_config=VISION),
    qwen3_vl_moe=wrapped(
        'qwen3_vl_moe',
        HEADS|MOE|dict(model_type='qwen3_vl_moe_text', rope_theta=5e6),
        vision_config=VISION),
    gpt_oss=HEADS
    | dict(
        model_type='gpt_oss',
        rope_theta=150000.,
        rope_scaling=YARN,
        num_local_experts=8,
        num_experts_per_tok=2,
        sliding_window=16,
        swiglu_limit=7.,
        attention_bias=True,
        layer_types=['sliding_attention','full_attention']*2,
        quantization_config=dict(quant_method='mxfp4', modules_to_not_convert=['lm_head'])),
    gemma4=wrapped('gemma4', GEMMA, vision_config=None, tie_word_embeddings=True),
    gemma4_assistant=wrapped(
        'gemma4_assistant',
        GEMMA|dict(enable_moe_block=False, num_kv_shared_layers=4),
        backbone_hidden_size=128,
        use_ordered_embeddings=True,
        num_centroids=32,
        centroid_intermediate_top_k=8),
    nemotron_h=HEADS
    | dict(
        model_type='nemotron_h', hybrid_override_pattern='MEM*EM-E', num_hidden_layers=8,
        mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=16, conv_kernel=4,
        use_conv_bias=True, use_bias=False, mamba_proj_bias=False, mlp_bias=False,
        mamba_hidden_act='silu', mlp_hidden_act='relu2', n_routed_experts=8, n_shared_experts=1,
        num_experts_per_tok=2, moe_intermediate_size=32, moe_shared_expert_intermediate_size=48,
        n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5,
        layer_norm_epsilon=1e-5),
    granitemoehybrid=GRANITE
    | dict(
        model_type='granitemoehybrid',
        position_embedding_type='nope',
        layer_types=['mamba','mamba','attention','mamba'],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_n_groups=2,
        mamba_d_state=16,
        mamba_d_conv=4,
        mamba_expand=2),
    granitemoeshared=GRANITE|dict(model_type='granitemoeshared', rope_theta=1e6),
    granitemoe=HEADS
    | dict(
        model_type='granitemoe', rope_theta=1e6, num_local_experts=8, num_experts_per_tok=2,
        logits_scaling=6.),
    granite=HEADS
    | dict(
        model_type='granite', rope_theta=1e6, mlp_bias=False, attention_bias=False,
        logits_scaling=6.),
    minimax_m2=HEADS
    | dict(
        model_type='minimax_m2',
        rotary_dim=8,
        rope_theta=5e6,
        num_local_experts=8,
        num_experts_per_tok=2,
        scoring_func='sigmoid',
        use_routing_bias=True,
        use_qk_norm=True,
        qk_norm_type='per_layer',
        shared_intermediate_size=0,
        quantization_config=dict(
            quant_method='fp8', fmt='e4m3', weight_block_size=[128,128],
            activation_scheme='dynamic')))

# Keys that no config above holds, and that mean something somewhere
MORE = (
    'head_dim rope_scaling rope_parameters original_max_position_embeddings sliding_window '
    'bos_token_id hidden_act torch_dtype dtype quantization_config attention_bias '
    'layer_types '
    'partial_rotary_factor text_config vision_config num_local_experts n_group topk_group '
    'moe_latent_size shared_intermediate_size layers_block_type attn_type_list _name_or_path '
    'per_layer_config').split()

def places(d, path=()):
    "Every key of nested objects, as a path"
    for k,v in d.items():
        yield (*path,k)
        if isinstance(v, dict):
            yield from places(v, (*path,k))

def put(d, path, v):
    d = copy.deepcopy(d)
    at = d
    for k in path[:-1]:
        at = at[k]
    at[path[-1]] = v
    return d

def from_hf(d, *a):
    return ModelConfig.from_hf(json.loads(json.dumps(d)), *a)

def translates(d):
    "The config, or None where it was refused in the right manner"
    try:
        c = from_hf(d)
    except CheckpointError as e:
        assert str(e) and type(e) in (ConfigError,UnsupportedError)
        return None
    counts = (
        c.num_params, c.total_params, c.active_params, c.kv_elements_per_token, c.state_elements)
    assert (
        all(isinstance(n, int) and n>=0 for n in counts)
        and c.active_params<=c.num_params<=c.total_params)
    return c

def test_all_families_are_here():
    kinds = {k.removesuffix('_text') for f in families() for k in f.hf}
    assert kinds-{'ministral','ministral3'} <= set(CONFIGS)
    for k,d in CONFIGS.items():
        assert translates(d), k
    for k in PRESETS:
        assert translates(PRESETS[k]), k

@pytest.mark.parametrize('family', CONFIGS)
def test_odd_values(family):
    d = CONFIGS[family]
    text = d.get('text_config', d) is not d
    paths = [
        *places(d),
        *((k,) for k in MORE if k not in d),
        *(('text_config',k) for k in MORE if text and k not in d['text_config'])]
    for path in paths:
        for v in ODD:
            translates(put(d, path, v))

@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(CONFIGS)), st.data())
def test_odd_values_together(family, data):
    d = CONFIGS[family]
    for _ in range(data.draw(st.integers(1, 4))):
        ps = list(places(d))
        if not ps:
            break
        p = data.draw(st.sampled_from(ps))
        d = put(
            d,
            p,
            data.draw(
                st.sampled_from(ODD)|st.integers(-3, 300)
                |st.recursive(
                    st.none()|st.booleans()|st.floats(),
                    lambda s: st.lists(s, max_size=3)
                    |st.dictionaries(
                        st.sampled_from(['rope_type','full_attention','quant_method']), s),
                    max_leaves=4)))
    translates(d)

@pytest.mark.parametrize(
    'family,path,value,word',
    [
        ('llama', ('rope_scaling','rope_type'), 'dynamic', 'dynamic'),
        ('llama', ('rope_scaling','short_factor'), [1.], 'short_factor'),
        ('llama', ('hidden_act',), 'gelu', 'gelu'),
        ('qwen3', ('rope_scaling','llama_4_scaling_beta'), .1, 'llama_4_scaling_beta'),
        (
            'qwen3', ('layer_types',), ['full_attention']*3+['chunked_attention'],
            'chunked_attention'),
        ('qwen3_moe', ('n_group',), 4, 'n_group'),
        ('qwen3_5', ('text_config','output_gate_type'), 'tanh', 'output_gate_type'),
        ('qwen3_5', ('text_config','mtp_use_dedicated_embeddings'), True, 'dedicated'),
        (
            'qwen3_5', ('text_config','rope_parameters','mrope_interleaved'), False,
            'mrope_interleaved'),
        ('qwen3_vl', ('vision_config','hidden_act'), 'silu', 'hidden_act'),
        ('qwen3_vl', ('text_config','model_type'), 'gpt_oss', 'gpt_oss'),
        ('gpt_oss', ('swiglu_alpha',), 2., 'swiglu_alpha'),
        ('gpt_oss', ('quantization_config','quant_method'), 'aqlm', 'aqlm'),
        (
            'gemma4', ('text_config','hidden_size_per_layer_input'), 256,
            'hidden_size_per_layer_input'),
        ('gemma4', ('text_config','num_kv_shared_layers'), 2, 'num_kv_shared_layers'),
        (
            'gemma4', ('text_config','use_bidirectional_attention'), 'all',
            'use_bidirectional_attention'),
        ('gemma4_assistant', ('text_config','num_kv_shared_layers'), 2, 'num_kv_shared_layers'),
        ('nemotron_h', ('hybrid_override_pattern',), 'MEM*EM-X', "'X'"),
        ('nemotron_h', ('moe_latent_size',), 64, 'moe_latent_size'),
        ('nemotron_h', ('mlp_hidden_act',), 'silu', 'silu'),
        (
            'granitemoehybrid', ('layer_types',), ['mamba']*3+['sliding_attention'],
            'sliding_attention'),
        ('granitemoehybrid', ('position_embedding_type',), 'alibi', 'alibi'),
        ('granitemoehybrid', ('time_step_limit',), [0.,.1], 'time_step_limit'),
        ('granitemoehybrid', ('time_step_limit',), [0.,{'__float__':'NaN'}], 'time_step_limit'),
        ('granitemoehybrid', ('hidden_act',), 'gelu_pytorch_tanh', 'hidden_act'),
        ('granitemoehybrid', ('normalization_function',), 'l2', 'normalization_function'),
        ('granite', ('mlp_bias',), True, 'mlp_bias'),
        ('minimax_m2', ('scoring_func',), 'hash', 'hash'),
        ('minimax_m2', ('attn_type_list',), [1,1,0,1], 'attn_type_list'),
        ('minimax_m2', ('shared_intermediate_size',), 64, 'shared_intermediate_size')])
def test_what_is_unknown_is_named(family, path, value, word):
    with pytest.raises(UnsupportedError) as e:
        from_hf(put(CONFIGS[family], path, value))
    assert word in str(e.value)

@pytest.mark.parametrize(
    'family,path,value,get',
    [
        (
            'llama',
            ('attention_bias',),
            True,
            lambda c: (c.attention.bias, c.attention.o_bias)
            ==(True, True)),
        (
            'qwen2',
            ('tie_word_embeddings',),
            False,
            lambda c: (c.attention.bias, c.attention.o_bias)
            ==(True, False)),
        ('mistral', ('sliding_window',), 16, lambda c: c.attention.window==16),
        (
            'qwen2',
            ('max_window_layers',),
            1,
            lambda c: c.mixers==('attention','sliding','sliding','sliding')
            and c.sliding.window==16),
        ('qwen3_moe', ('norm_topk_prob',), False, lambda c: not c.moe.renormalise),
        (
            'qwen3_moe', ('mlp_only_layers',), [1],
            lambda c: c.ffns==('mlp','mlp','mlp','moe')),
        ('qwen3_5', ('text_config','attn_output_gate'), False, lambda c: not c.attention.gate),
        (
            'qwen3_5', ('text_config','output_gate_type'), 'sigmoid',
            lambda c: c.delta.gate_act=='sigmoid'),
        ('qwen3_5', ('tie_word_embeddings',), True, lambda c: c.tie_embeddings),
        ('qwen3_vl', ('text_config','tie_word_embeddings'), True, lambda c: c.tie_embeddings),
        (
            'qwen3_5', ('text_config','rope_parameters','partial_rotary_factor'), .25,
            lambda c: c.attention.rope.dim==4),
        (
            'qwen3_vl_moe', ('text_config','rope_theta'), 5e6,
            lambda c: c.attention.rope.mrope==(24,20,20)),
        (
            'qwen3_vl', ('vision_config','deepstack_visual_indexes'), [2],
            lambda c: c.vision.deepstack==(2,)),
        (
            'gpt_oss', ('layer_types',), None,
            lambda c: c.mixers==('sliding','attention')*2),
        (
            'gemma4', ('text_config','attention_k_eq_v'), False,
            lambda c: not c.attention.k_eq_v and c.attention.num_kv_heads==2),
        (
            'gemma4', ('text_config','final_logit_softcapping'), None,
            lambda c: c.logit_softcap is None),
        (
            'gemma4',
            ('text_config','rope_parameters','full_attention','partial_rotary_factor'),
            .5,
            lambda c: (
                c.attention.rope.pairs, c.attention.rope.dim,
                c.sliding.rope.dim)==(8, 32, 16)),
        (
            'gemma4_assistant',
            ('use_ordered_embeddings',),
            False,
            lambda c: c.drafter==replace(
                c.drafter, ordered=False, num_centroids=0, centroid_top_k=0, backbone_size=128)
            and c.kv_elements_per_token==0),
        ('nemotron_h', ('hybrid_override_pattern',), None, lambda c: False),
        ('nemotron_h', ('use_conv_bias',), False, lambda c: not c.mamba.conv_bias),
        ('nemotron_h', ('n_shared_experts',), 0, lambda c: c.moe.shared_size==0),
        ('minimax_m2', ('rotary_dim',), 16, lambda c: c.attention.rope.dim==16),
        ('minimax_m2', ('qk_norm_type',), 'per_head', lambda c: c.attention.qk_norm=='head'),
        ('minimax_m2', ('use_routing_bias',), False, lambda c: not c.moe.correction)])
def test_what_is_said_is_honoured(family, path, value, get):
    d = put(CONFIGS[family], path, value)
    if path==('hybrid_override_pattern',):
        d |= dict(layers_block_type=['mamba','attention','moe','mlp'], num_hidden_layers=4)
        def get(c):
            return (
                c.mixers==('mamba','attention','none','none')
                and c.ffns==('none','none','moe','mlp'))
    assert get(from_hf(d))

UNCLAMPED = [0.,{'__float__':'Infinity'}]
@pytest.mark.parametrize(
    'key,value,get',
    [
        ('position_embedding_type', 'rope', lambda c: c.attention.rope.dim==16),
        ('position_embedding_type', None, lambda c: not c.attention.rope),
        ('layer_types', ['attention']*4, lambda c: {*c.mixers}=={'attention'}),
        ('layer_types', None, lambda c: {*c.mixers}=={'mamba'}),
        ('shared_intermediate_size', 0, lambda c: c.moe.shared_size==0),
        ('time_step_limit', UNCLAMPED, lambda c: c.mamba),
        ('mamba_proj_bias', True, lambda c: c.mamba.proj_bias),
        ('mamba_conv_bias', False, lambda c: not c.mamba.conv_bias),
        ('attention_bias', True, lambda c: c.attention.bias and c.attention.o_bias),
        ('tie_word_embeddings', True, lambda c: c.tie_embeddings)])
def test_what_a_hybrid_granite_says_is_honoured(key, value, get):
    assert get(from_hf(CONFIGS['granitemoehybrid']|{key:value}))

def test_multipliers_of_granite():
    c = from_hf(CONFIGS['granitemoehybrid']|dict(logits_scaling=4))
    assert (c.embed_scale,c.residual_scale,c.logit_scale)==(12,.22,.25)
    assert c.attention.scale==.125
    c = from_hf(CONFIGS['granite']|dict(attention_multiplier=None))
    assert c.attention.rope and c.attention.scale==1

def test_widths_of_granite():
    "With experts, beside an MLP or not, and without"
    c = from_hf(CONFIGS['granitemoehybrid']|dict(num_local_experts=0))
    assert c.ffns==('mlp',)*4 and c.intermediate_size==48 and c.moe is None
    c = from_hf(CONFIGS['granite']|dict(intermediate_size=40))
    assert c.ffns==('mlp',)*4 and c.intermediate_size==40
    c = from_hf(CONFIGS['granitemoeshared']|dict(shared_intermediate_size=0))
    assert c.moe.shared_size==0
    c = from_hf(CONFIGS['granitemoe']|dict(rope_theta=1e4))
    assert c.moe.shared_size==0 and c.attention.rope.theta==1e4

def test_gemma_in_the_newer_words():
    "transformers 5.23 saves what differs in full layers as exceptions for single layers"
    d = CONFIGS['gemma4']['text_config']
    new = {k:v
        for k,v in d.items() if k not in ('global_head_dim','num_global_key_value_heads')}
    per = dict(head_dim=32, num_key_value_heads=1)
    assert (
        from_hf(new|dict(per_layer_config={'3':per}))==from_hf(d)
        !=from_hf(new))
    for bad in (
        {'2':per}, {'3':per, '2':per},
        {'3':per|dict(hidden_size=8)}, {'3':3}):
        with pytest.raises(UnsupportedError, match='per_layer_config'):
            from_hf(new|dict(per_layer_config=bad))
    with pytest.raises(UnsupportedError, match='per_layer_config'):
        from_hf(CONFIGS['qwen3']|dict(per_layer_config={'0':{}}))

def test_ends_of_sequence_are_gathered():
    d = CONFIGS['qwen3_5']|dict(eos_token_id=[7,2])
    assert (
        from_hf(d, dict(eos_token_id=[5,1])).eos_ids
        ==(5,1,7,2))
    for bad in ({}, {'eos_token_id':[None]}, {'eos_token_id':'x'}):
        try:
            from_hf(d, bad)
        except ConfigError:
            assert bad
    with pytest.raises(ConfigError):
        from_hf(d, [1])

def test_hf_quant_config_beside_and_instead():
    def q(**kw): return dict(producer={}, quantization=kw)
    assert (
        from_hf(CONFIGS['qwen3'], None, q(quant_algo='NVFP4')).quantization['quant_algo']
        =='NVFP4')
    assert (
        from_hf(CONFIGS['gpt_oss'], None, q(quant_algo='NVFP4')).quantization['quant_method']
        =='mxfp4')
    assert (
        from_hf(CONFIGS['qwen3'], None, q(quant_algo=None, kv_cache_quant_algo='FP8')).quantization
        is None)
    with pytest.raises(UnsupportedError, match='W4A8_AWQ'):
        from_hf(CONFIGS['qwen3'], None, q(quant_algo='W4A8_AWQ'))
    for v in ODD:
        for d in (
            v,
            dict(quantization=v),
            q(quant_algo=v),
            q(quant_algo='MIXED_PRECISION', quantized_layers=v),
            q(quant_algo='MIXED_PRECISION', quantized_layers={'a':v})):
            try:
                ModelConfig.from_hf(CONFIGS['qwen3'], None, d)
            except (ConfigError,UnsupportedError) as e:
                assert str(e)

# ---- GGUF

BASE = {
    'embedding_length':64, 'block_count':4, 'context_length':512, 'vocab_size':256,
    'feed_forward_length':96, 'attention.head_count':4, 'attention.head_count_kv':2,
    'attention.key_length':16, 'attention.value_length':16, 'attention.layer_norm_rms_epsilon':1e-6,
    'rope.freq_base':1e6}
EXPERTS = {'expert_count':8, 'expert_used_count':2, 'expert_feed_forward_length':32}
SSM = {
    'ssm.conv_kernel':4,
    'ssm.state_size':16,
    'ssm.group_count':2,
    'ssm.time_step_rank':4,
    'ssm.inner_size':64,
    'full_attention_interval':4,
    'rope.dimension_count':8,
    'rope.dimension_sections':[2,1,1,0]}
META = dict(
    llama=BASE,
    qwen2=BASE,
    qwen3=BASE,
    qwen3moe=BASE|EXPERTS,
    qwen3next=BASE|EXPERTS|SSM
    |{'expert_shared_feed_forward_length':32, 'rope.dimension_sections':[]},
    qwen35=BASE|SSM|{'nextn_predict_layers':1, 'block_count':5},
    qwen35moe=BASE|SSM|EXPERTS|{'expert_shared_feed_forward_length':32},
    gemma4=BASE|EXPERTS
    |{
        'attention.sliding_window':16,
        'attention.sliding_window_pattern':[True,True,True,False],
        'attention.head_count_kv':[2,2,2,1],
        'attention.key_length':32,
        'attention.value_length':32,
        'attention.key_length_swa':16,
        'attention.value_length_swa':16,
        'rope.freq_base_swa':1e4,
        'final_logit_softcapping':30.,
        'attention.shared_kv_layers':0,
        'embedding_length_per_layer_input':0})
META |= {
    'mistral3':BASE,
    'qwen3vl':BASE|{'rope.dimension_sections':[4,2,2,0], 'n_deepstack_layers':3},
    'qwen3vlmoe':BASE|EXPERTS|{'rope.dimension_sections':[4,2,2,0]},
    'minimax-m2':BASE|EXPERTS|{'rope.dimension_count':8, 'expert_gating_func':2}}
META['nemotron_h_moe'] = META['nemotron_h'] = (
    BASE|EXPERTS
    |{k:v for k,v in SSM.items() if k.startswith('ssm')}
    |{
        'attention.head_count_kv':[0,2,0,0],
        'feed_forward_length':[0,0,32,96],
        'expert_shared_count':1,
        'expert_shared_feed_forward_length':48,
        'expert_weights_norm':True,
        'expert_weights_scale':2.5})
SCALED = {'attention.scale':.125, 'embedding_scale':12., 'residual_scale':.22, 'logit_scale':6.}
MAMBA = {k:v for k,v in SSM.items() if k.startswith('ssm')}
META['granitehybrid'] = BASE|MAMBA|SCALED|{'expert_count':8, 'expert_used_count':2,
    'expert_shared_feed_forward_length':48, 'attention.head_count_kv':[0,0,2,0],
    'rope.scaling.finetuned':False}
META['granite'] = BASE|SCALED
META['granitemoe'] = BASE|SCALED|{'expert_count':8, 'expert_used_count':2,
    'expert_shared_feed_forward_length':48}
META['gpt-oss'] = (
    BASE|EXPERTS
    |{
        'attention.sliding_window':16, 'rope.scaling.type':'yarn', 'rope.scaling.factor':32.,
        'rope.scaling.original_context_length':64})
def gguf_meta(arch, **more):
    return (
        {'general.architecture':arch, 'tokenizer.ggml.eos_token_id':1}
        | {f'{arch}.{k}':v for k,v in (META[arch]|more).items()})
FREQS = {'gemma4':[1.]*4+[1e30]*12}

@pytest.mark.parametrize('arch', META)
def test_odd_gguf_values(arch):
    m = gguf_meta(arch)
    c = ModelConfig.from_gguf(m, freq_factors=FREQS.get(arch))
    assert (
        c.num_layers==4
        and c.num_params>0
        and c.mtp_layers==(arch=='qwen35')
        and ('delta' in c.mixers)==(
            'ssm.inner_size' in META[arch] and arch[0]=='q'))
    extra = (
        'attention.scale', 'attention.causal', 'attention.recurrent_layers', 'rope.scaling.type',
        'rope.scaling.attn_factor', 'expert_gating_func', 'expert_weights_norm',
        'expert_weights_scale', 'nextn_predict_layers', 'logit_scale')
    for k in {*m, *(f'{arch}.{k}' for k in extra)}:
        for v in ODD:
            d = {x:y
                for x,y in (m|{k:v}).items()
                if y is not None}
            for names in ((), ('output.weight','blk.3.attn_v.weight','blk.2.ffn_gate_inp.weight')):
                try:
                    c = ModelConfig.from_gguf(d, freq_factors=FREQS.get(arch), tensors=names)
                except (ConfigError,UnsupportedError) as e:
                    assert str(e)
                else:
                    assert c.num_params>0

def from_tensors(arch, *names, **keys):
    "The config of a header of `arch` in a file with tensors of these names"
    meta = gguf_meta(arch, **keys)
    return ModelConfig.from_gguf(meta, freq_factors=FREQS.get(arch), tensors=names)

def test_what_gemmas_tensors_say():
    def g(*names): return from_tensors('gemma4', *names)
    assert g('output.weight','blk.0.attn_v.weight').attention.k_eq_v
    assert not g('blk.3.attn_v.weight').attention.k_eq_v
    assert not g('output.weight').tie_embeddings
    assert g('x').tie_embeddings
    rope = g().attention.rope
    assert (rope.kind, rope.pairs)==('proportional', 4)
    assert g().sliding.rope.kind=='default'

def test_what_nemotrons_tensors_say():
    def n(*names): return from_tensors('nemotron_h_moe', *names)
    assert n().mixers==('mamba','attention','none','none')
    assert n().ffns==('none','none','moe','mlp')
    assert n().intermediate_size==96
    assert n().attention.rope is None
    router = 'blk.2.ffn_gate_inp.weight'
    plain = replace(n().mamba, conv_bias=False)
    assert n(router)==replace(n(), mamba=plain, tie_embeddings=True)
    assert n(router, 'blk.0.ssm_conv1d.bias').mamba.conv_bias
    assert n('blk.3.ffn_gate_inp.weight').ffns==('none','none','mlp','moe')
    assert n(router, 'blk.0.ssm_in.bias').mamba.proj_bias
    assert not n().mamba.proj_bias

def test_what_biases_and_patterns_say():
    def b(*names): return from_tensors('llama', *(f'blk.0.{n}.bias' for n in names))
    c = b('attn_q','attn_k','attn_v','ffn_up')
    assert c.attention.bias and c.mlp_bias
    assert not c.attention.o_bias
    assert not b('attn_q','attn_k').attention.bias
    slides = {'attention.sliding_window_pattern':[False,True,True,True]}
    assert from_tensors('gpt-oss', **slides).mixers==('attention','sliding','sliding','sliding')

@pytest.mark.parametrize('arch,key,v', (
    ('gemma4','attention.shared_kv_layers',2),
    ('mistral3','attention.temperature_scale',.1),
    ('gpt-oss','expert_count',0),
    ('nemotron_h','expert_shared_count',2),
    ('gemma4','embedding_length_per_layer_input',64),
    ('llama','expert_count',8),
    ('qwen3','attention.causal',False),
    ('qwen3moe','expert_group_count',4),
    ('qwen3moe','expert_gating_func',9),
    ('llama','logit_scale',2.),
    ('qwen35','rope.dimension_sections',[2,1,1,5])))
def test_what_a_header_must_not_say(arch, key, v):
    with pytest.raises(CheckpointError, match=key):
        from_tensors(arch, **{key:v})
