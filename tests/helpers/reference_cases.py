"""The checkpoints of tests/data: config.json as a publisher would have written it, at sizes that
nobody published, and how the weights are stored."""
import torch
from dataclasses import dataclass,field
from .reference_formats import (
    fp8,fp8_block,fp8_block_4d,fp8_block_bf16,fp8_channel,mxfp4,mxfp4_packed,nvfp4,nvfp4_a16,
    nvfp4_packed)
from .reference_integers import awq_int4,ct_int4,ct_scheme,gptq_int4

V = 160

@dataclass
class Case:
    cfg:dict # config.json as its publisher would have written it
    T:int=70 # tokens of prompt
    shard:int|None=None # bytes a file; None: one file
    rules:list=field(default_factory=list) # (pattern, format) of the quantised matrices
    quant:dict|None=None # config.json's quantization_config
    hf_quant:dict|None=None # hf_quant_config.json
    experts:str='' # stored 'apart', 'stacked' or 'transposed'; else as the library saves them
    keep32:str='' # pattern of the tensors stored in float32
    scales:dict=field(default_factory=dict) # further scalars in the file
    mtp:bool=False # with an MTP head
    target:str=None # a drafter's
    # the library loads the folder itself, 'packed' or 'dequantized'; else plain weights
    as_stored:str=''

# The shape everything else is a variation of: untied, two layers, two query heads to a key head.
BASE = dict(
    model_type='llama', architectures=['LlamaForCausalLM'], vocab_size=V, hidden_size=48,
    intermediate_size=80, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    hidden_act='silu', rms_norm_eps=1e-5, max_position_embeddings=512, rope_theta=10000.0,
    attention_bias=False, mlp_bias=False, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2,
    torch_dtype='bfloat16')
MISTRAL = (
    BASE
    |dict(
        model_type='mistral', architectures=['MistralForCausalLM'], rope_theta=1000000.0,
        sliding_window=None))
def without(d, *names):
    return {k:v for k,v in d.items() if k not in names}

CASES = {}

# as Llama 3.1 is published, with pairs on all three parts of its curve;
# the prompt crosses two 64-token boundaries; sharded, with an index
CASES['llama3-rope-sharded'] = Case(
    BASE
    |dict(
        hidden_size=64,
        num_hidden_layers=3,
        intermediate_size=96,
        eos_token_id=[2,3],
        rope_scaling=dict(
            rope_type='llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=64)),
    140,
    100_000)

# as Mistral Small: heads that together are wider than the model
CASES['mistral-wide-heads'] = Case(MISTRAL|dict(head_dim=20))

# as Mistral 7B v0.1: a query sees itself and the 22 tokens before it
CASES['mistral-window'] = Case(MISTRAL|dict(sliding_window=23, rope_theta=10000.0), 90)

# as SmolLM2: three query heads on one key head, output matrix tied to the embedding, the newer
# config.json
CASES['smollm2-tied'] = Case(
    without(BASE, 'rope_theta', 'torch_dtype')
    |dict(
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=16,
        num_hidden_layers=3,
        tie_word_embeddings=True,
        rope_parameters=dict(rope_type='default', rope_theta=100000.0),
        dtype='bfloat16'))

# the two scalings that came before llama3's, each in one generation of config.json
CASES['yarn-rope'] = Case(
    without(BASE, 'rope_theta')
    |dict(
        num_attention_heads=2,
        num_key_value_heads=1,
        rope_parameters=dict(
            rope_type='yarn', rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64,
            beta_fast=4.0, beta_slow=1.0)),
    72)
CASES['linear-rope'] = Case(
    BASE|dict(rope_scaling=dict(type='linear', factor=4.0)))

# a bias on every projection
CASES['biases'] = Case(BASE|dict(attention_bias=True, mlp_bias=True))

# as Llama 3.2: tied, llama3 scaling, a head_dim that is written down
LLAMA = BASE|dict(vocab_size=136, num_attention_heads=6, num_key_value_heads=2, head_dim=16)
CASES['llama32-tied'] = Case(
    LLAMA
    |dict(
        num_hidden_layers=3,
        tie_word_embeddings=True,
        rope_theta=500000.0,
        rope_scaling=dict(
            rope_type='llama3', factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=48)),
    76)

# as Mistral Small 3.1: the text model inside a wrapper, a vision tower that nobody asked for
# beside it
CASES['mistral3-wrapped'] = Case(
    dict(
        model_type='mistral3',
        architectures=['Mistral3ForConditionalGeneration'],
        image_token_index=119,
        projector_hidden_act='gelu',
        multimodal_projector_bias=False,
        spatial_merge_size=2,
        vision_feature_layer=-1,
        tie_word_embeddings=False,
        torch_dtype='bfloat16',
        text_config=without(MISTRAL, 'architectures', 'torch_dtype')
        |dict(
            vocab_size=120, head_dim=20, num_attention_heads=3, num_key_value_heads=1,
            rope_theta=1e9),
        vision_config=dict(
            model_type='pixtral', hidden_size=16, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=1, head_dim=16, image_size=56, patch_size=4, num_channels=3,
            hidden_act='gelu', rope_theta=10000.0)),
    66)

QWEN3 = dict(
    model_type='qwen3', architectures=['Qwen3ForCausalLM'], vocab_size=144, hidden_size=48,
    intermediate_size=72, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1,
    head_dim=32, hidden_act='silu', rms_norm_eps=1e-6, max_position_embeddings=512,
    rope_theta=1000000, rope_scaling=None, attention_bias=False, use_sliding_window=False,
    sliding_window=None, max_window_layers=3, tie_word_embeddings=True, bos_token_id=1,
    eos_token_id=2, torch_dtype='bfloat16')
CASES['qwen3-tied-wide'] = Case(QWEN3, 75)

# layers 1 and 5 have experts: every second one, but for layer 3. The weights of the chosen do not
# add up to one
QWEN3_MOE = (
    QWEN3
    |dict(
        model_type='qwen3_moe', architectures=['Qwen3MoeForCausalLM'], vocab_size=112,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=6,
        num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=True, decoder_sparse_step=1,
        mlp_only_layers=[], tie_word_embeddings=False))
CASES['qwen3-moe-some-layers'] = Case(
    QWEN3_MOE
    |dict(
        num_hidden_layers=6, hidden_size=40, intermediate_size=32, num_experts=5,
        norm_topk_prob=False, decoder_sparse_step=2, mlp_only_layers=[3]),
    67)

# three value heads to a key head, dk != dv, layers in no regular order, the prompt over three tiles
QWEN3_NEXT = dict(
    model_type='qwen3_next',
    architectures=['Qwen3NextForCausalLM'],
    vocab_size=104,
    hidden_size=40,
    intermediate_size=64,
    num_hidden_layers=5,
    layer_types=[
        'linear_attention', 'full_attention', 'linear_attention', 'linear_attention',
        'full_attention'],
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=24,
    partial_rotary_factor=0.5,
    rope_theta=10000000,
    rope_scaling=None,
    rms_norm_eps=1e-6,
    hidden_act='silu',
    linear_num_key_heads=2,
    linear_num_value_heads=6,
    linear_key_head_dim=16,
    linear_value_head_dim=8,
    linear_conv_kernel_dim=4,
    num_experts=5,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=24,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    max_position_embeddings=512,
    tie_word_embeddings=False,
    bos_token_id=1,
    eos_token_id=2,
    torch_dtype='bfloat16')
CASES['qwen3-next'] = Case(QWEN3_NEXT, 133, mtp=True)

ROPE35 = dict(
    mrope_interleaved=True, mrope_section=[6,4,2], rope_type='default', rope_theta=10000000,
    partial_rotary_factor=0.75)
TEXT35 = dict(
    vocab_size=128, hidden_size=48, num_hidden_layers=4, num_attention_heads=3,
    num_key_value_heads=1, head_dim=32, hidden_act='silu', rms_norm_eps=1e-6, attention_bias=False,
    attn_output_gate=True, full_attention_interval=3, max_position_embeddings=512,
    rope_parameters=ROPE35, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=12, linear_value_head_dim=20, linear_conv_kernel_dim=4,
    mamba_ssm_dtype='float32', mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False,
    tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, dtype='bfloat16')
TOWER = dict(
    depth=2, hidden_size=24, hidden_act='gelu_pytorch_tanh', intermediate_size=40, num_heads=2,
    in_channels=3, num_position_embeddings=25, patch_size=4, spatial_merge_size=2,
    temporal_patch_size=2, deepstack_visual_indexes=[])
def wrapped(kind, arch, text, tower):
    v = text['vocab_size']
    return dict(
        architectures=[arch],
        model_type=kind,
        text_config=text|dict(model_type=kind+'_text'),
        vision_config=tower|dict(model_type=kind, out_hidden_size=text['hidden_size']),
        image_token_id=v-2,
        video_token_id=v-1,
        vision_start_token_id=v-4,
        vision_end_token_id=v-3,
        tie_word_embeddings=text['tie_word_embeddings'])
F32 = r'linear_attn\.(A_log|norm\.weight)$'
CASES['qwen35-dense'] = Case(
    wrapped(
        'qwen3_5', 'Qwen3_5ForConditionalGeneration',
        TEXT35|dict(intermediate_size=64, tie_word_embeddings=True), TOWER),
    83,
    mtp=True,
    keep32=F32)
MOE35 = dict(
    num_experts=6, num_experts_per_tok=3, moe_intermediate_size=16,
    shared_expert_intermediate_size=32)
CASES['qwen35-moe-stacked'] = Case(
    wrapped(
        'qwen3_5_moe',
        'Qwen3_5MoeForConditionalGeneration',
        without(TEXT35, 'full_attention_interval')|MOE35
        |dict(
            vocab_size=120,
            hidden_size=40,
            num_hidden_layers=3,
            layer_types=['full_attention','linear_attention','linear_attention'],
            linear_num_key_heads=3,
            linear_num_value_heads=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            rope_parameters=ROPE35|dict(mrope_section=[2,1,1], partial_rotary_factor=0.5)),
        TOWER|dict(depth=3, hidden_size=16, num_heads=1, num_position_embeddings=16)),
    71,
    mtp=True,
    experts='stacked')

GPT_OSS = dict(
    model_type='gpt_oss',
    architectures=['GptOssForCausalLM'],
    vocab_size=120,
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    hidden_act='silu',
    rms_norm_eps=1e-5,
    attention_bias=True,
    num_local_experts=5,
    num_experts_per_tok=3,
    experts_per_token=3,
    sliding_window=13,
    layer_types=['full_attention','sliding_attention','sliding_attention'],
    rope_theta=10000.0,
    swiglu_limit=7.0,
    initial_context_length=64,
    rope_scaling=dict(
        rope_type='yarn', factor=16.0, beta_fast=4.0, beta_slow=0.5, truncate=False,
        original_max_position_embeddings=64),
    max_position_embeddings=512,
    tie_word_embeddings=False,
    pad_token_id=0,
    eos_token_id=2,
    torch_dtype='bfloat16')
CASES['gpt-oss'] = Case(GPT_OSS, 78)
CASES['gpt-oss-mxfp4'] = Case(
    GPT_OSS
    |dict(
        vocab_size=104, hidden_size=64, intermediate_size=32, num_hidden_layers=2,
        num_local_experts=4, num_experts_per_tok=2, experts_per_token=2, sliding_window=21,
        layer_types=['sliding_attention','full_attention']),
    69,
    rules=[(r'experts\.(gate_up|down)_proj$', mxfp4)],
    quant=dict(
        quant_method='mxfp4',
        modules_to_not_convert=[
            'model.layers.*.self_attn', 'model.layers.*.mlp.router', 'model.embed_tokens',
            'lm_head']))

GEMMA = dict(
    vocab_size=128,
    hidden_size=48,
    intermediate_size=40,
    num_hidden_layers=5,
    num_attention_heads=4,
    num_key_value_heads=4,
    num_global_key_value_heads=2,
    head_dim=16,
    global_head_dim=24,
    attention_k_eq_v=True,
    enable_moe_block=True,
    num_experts=6,
    top_k_experts=3,
    moe_intermediate_size=16,
    hidden_size_per_layer_input=0,
    vocab_size_per_layer_input=128,
    num_kv_shared_layers=0,
    use_double_wide_mlp=False,
    final_logit_softcapping=2.5,
    sliding_window=19,
    attention_bias=False,
    layer_types=[
        'sliding_attention', 'full_attention', 'sliding_attention', 'sliding_attention',
        'full_attention'],
    hidden_activation='gelu_pytorch_tanh',
    rms_norm_eps=1e-6,
    rope_parameters=dict(
        full_attention=dict(
            partial_rotary_factor=0.5, rope_theta=1000000.0, rope_type='proportional'),
        sliding_attention=dict(rope_theta=10000.0, rope_type='default')),
    max_position_embeddings=512,
    tie_word_embeddings=True,
    use_bidirectional_attention='vision',
    pad_token_id=0,
    bos_token_id=2,
    eos_token_id=1)
def gemma(**kw):
    return dict(
        architectures=['Gemma4ForConditionalGeneration'],
        model_type='gemma4',
        text_config=GEMMA|dict(model_type='gemma4_text')|kw,
        vision_config=None,
        audio_config=None,
        tie_word_embeddings=True,
        dtype='bfloat16')
CASES['gemma4-moe'] = Case(gemma(), 74)
CASES['gemma4-dense'] = Case(
    gemma(
        enable_moe_block=False,
        num_experts=None,
        top_k_experts=None,
        moe_intermediate_size=None,
        attention_k_eq_v=False,
        num_hidden_layers=3,
        layer_types=['full_attention','sliding_attention','full_attention'],
        num_attention_heads=6,
        num_key_value_heads=3,
        vocab_size=104,
        final_logit_softcapping=None),
    68)
def drafter(ordered):
    return dict(
        architectures=['Gemma4AssistantForCausalLM'],
        model_type='gemma4_assistant',
        backbone_hidden_size=48,
        tie_word_embeddings=True,
        use_ordered_embeddings=ordered,
        num_centroids=16,
        centroid_intermediate_top_k=5,
        dtype='bfloat16',
        text_config=GEMMA
        |dict(
            model_type='gemma4_text',
            hidden_size=32,
            intermediate_size=56,
            num_hidden_layers=3,
            num_kv_shared_layers=3,
            layer_types=['sliding_attention','sliding_attention','full_attention'],
            enable_moe_block=False,
            num_experts=None,
            top_k_experts=None,
            moe_intermediate_size=None,
            final_logit_softcapping=None,
            vocab_size_per_layer_input=0))
CASES['gemma4-assistant'] = Case(drafter(False), target='gemma4-moe')
CASES['gemma4-assistant-ordered'] = Case(drafter(True), target='gemma4-moe')

# all four kinds of layer, three groups, widths that no chunk divides
NEMOTRON = dict(
    model_type='nemotron_h', architectures=['NemotronHForCausalLM'], vocab_size=112, hidden_size=48,
    hybrid_override_pattern='ME-*MEM', num_hidden_layers=7, num_attention_heads=6,
    num_key_value_heads=2, head_dim=12, intermediate_size=56, mamba_num_heads=6, mamba_head_dim=12,
    n_groups=3, ssm_state_size=10, conv_kernel=4, chunk_size=24, expand=2,
    use_conv_bias=True, use_bias=False, mamba_proj_bias=False, mlp_bias=False,
    mamba_hidden_act='silu', mlp_hidden_act='relu2', n_routed_experts=7, n_shared_experts=1,
    num_experts_per_tok=3, moe_intermediate_size=24, moe_shared_expert_intermediate_size=40,
    n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=1.5,
    layer_norm_epsilon=1e-5, norm_eps=1e-5, time_step_min=0.001, time_step_max=0.1,
    time_step_floor=0.0001, max_position_embeddings=512, rope_theta=10000, residual_in_fp32=False,
    tie_word_embeddings=False, attention_bias=False, bos_token_id=1, eos_token_id=2,
    torch_dtype='bfloat16')
CASES['nemotron-h'] = Case(NEMOTRON, 134, keep32='e_score_correction_bias|A_log')

MINIMAX = dict(
    model_type='minimax_m2', architectures=['MiniMaxM2ForCausalLM'], vocab_size=120, hidden_size=40,
    intermediate_size=24, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=3,
    head_dim=16, rotary_dim=12, rope_theta=5000000, rms_norm_eps=1e-6, hidden_act='silu',
    num_local_experts=6, num_experts_per_tok=3, scoring_func='sigmoid', use_routing_bias=True,
    use_qk_norm=True, qk_norm_type='per_layer', shared_intermediate_size=0,
    max_position_embeddings=512, tie_word_embeddings=False, use_mtp=True, num_mtp_modules=3,
    mtp_transformer_layers=1, bos_token_id=1, eos_token_id=2)
CASES['minimax-m2'] = Case(MINIMAX, 73, keep32='e_score_correction_bias')

# as Granite 4.0 H: a mixer and a feed-forward half in every layer, all four multipliers,
# attention without positions; no width that 32 divides
GRANITE = dict(
    model_type='granitemoehybrid',
    architectures=['GraniteMoeHybridForCausalLM'],
    vocab_size=112, hidden_size=48, intermediate_size=24, num_hidden_layers=4,
    layer_types=['mamba','attention','mamba','mamba'],
    num_attention_heads=4, num_key_value_heads=2,
    mamba_n_heads=6, mamba_d_head=16, mamba_n_groups=1, mamba_d_state=10, mamba_d_conv=4,
    mamba_expand=2, mamba_chunk_size=24, mamba_conv_bias=True, mamba_proj_bias=False,
    num_local_experts=7, num_experts_per_tok=3, shared_intermediate_size=40,
    embedding_multiplier=3.5, attention_multiplier=0.125,
    residual_multiplier=0.35, logits_scaling=1.5,
    position_embedding_type='nope', normalization_function='rmsnorm', hidden_act='silu',
    rms_norm_eps=1e-5, max_position_embeddings=512, rope_theta=10000,
    attention_bias=False, tie_word_embeddings=False,
    bos_token_id=1, eos_token_id=2, torch_dtype='bfloat16')
CASES['granite-hybrid'] = Case(GRANITE, 70, keep32='A_log')
# multipliers that let a small tied net say something else than its last token
MILD = dict(embedding_multiplier=.75, residual_multiplier=.85, tie_word_embeddings=True)
DENSE = MILD|dict(num_local_experts=0, num_experts_per_tok=0)
# as Granite 4.0 H Micro: no experts, tied; and what no published one has, groups and other biases
TIED = GRANITE|DENSE|dict(
    vocab_size=96, hidden_size=40, num_hidden_layers=3,
    layer_types=['mamba','attention','mamba'],
    mamba_n_heads=4, mamba_d_head=20, mamba_n_groups=2,
    mamba_conv_bias=False, mamba_proj_bias=True, attention_bias=True,
    shared_intermediate_size=56)
CASES['granite-tied'] = Case(TIED, 68, keep32='A_log')
# as Granite 4.0 Micro: the same type, attention with positions in every layer, tied
ATTENTION = without(GRANITE, 'intermediate_size')|DENSE|dict(
    vocab_size=96, num_hidden_layers=3, layer_types=['attention']*3,
    position_embedding_type='rope', rope_theta=10000000)
CASES['granite-attention'] = Case(ATTENTION|dict(intermediate_size=40), 66)
# as Granite 3 and 4.1, and Granite 3 with experts: types of their own
OLDER = without(BASE, 'mlp_bias')|MILD|dict(
    vocab_size=96, attention_multiplier=.125, logits_scaling=.5)
CASES['granite-dense'] = Case(OLDER|dict(model_type='granite', mlp_bias=False,
    architectures=['GraniteForCausalLM']), 66)
CASES['granite-moe'] = Case(OLDER|dict(model_type='granitemoe', intermediate_size=24,
    architectures=['GraniteMoeForCausalLM'], num_local_experts=5, num_experts_per_tok=2), 66)
CASES['granite-moe-shared'] = Case(CASES['granite-moe'].cfg|dict(model_type='granitemoeshared',
    architectures=['GraniteMoeSharedForCausalLM'], shared_intermediate_size=32), 66)

VL = dict(
    vocab_size=112,
    hidden_size=40,
    intermediate_size=56,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    hidden_act='silu',
    rms_norm_eps=1e-6,
    rope_theta=5000000,
    rope_scaling=dict(mrope_interleaved=True, mrope_section=[5,4,3], rope_type='default'),
    attention_bias=False,
    max_position_embeddings=512,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
    dtype='bfloat16')
CASES['qwen3-vl'] = Case(
    wrapped(
        'qwen3_vl',
        'Qwen3VLForConditionalGeneration',
        VL,
        TOWER
        |dict(
            depth=4, hidden_size=16, num_heads=1, num_position_embeddings=36,
            deepstack_visual_indexes=[1,2,3])),
    66)
CASES['qwen3-vl-moe'] = Case(
    wrapped(
        'qwen3_vl_moe',
        'Qwen3VLMoeForConditionalGeneration',
        VL
        |dict(
            num_hidden_layers=3, tie_word_embeddings=False, num_experts=5, num_experts_per_tok=2,
            moe_intermediate_size=16, decoder_sparse_step=1, mlp_only_layers=[],
            norm_topk_prob=True),
        TOWER
        |dict(
            hidden_size=16, num_heads=2, num_position_embeddings=16, deepstack_visual_indexes=[0])),
    65,
    experts='transposed')

# -- the same families as quantised releases have them
LINEAR = r'(self_attn|mlp)\.[a-z]+_proj\.weight$'
EXPERT = r'experts\.\d+\.[a-z0-9_]+\.weight$'
PRODUCER = dict(name='modelopt', version='0.43.0')
def modelopt(algo, ignore, kv=True):
    return (
        dict(quant_method='modelopt', quant_algo=algo, producer=PRODUCER, ignore=ignore)
        |(
            dict(kv_cache_scheme=dict(dynamic=False, num_bits=8, type='float')) if kv
            else {}))
def older(algo, exclude, **kw):
    return dict(
        producer=PRODUCER,
        quantization=dict(quant_algo=algo, kv_cache_quant_algo='FP8', exclude_modules=exclude)|kw)
def compressed(fmt, ignore, acts, **weights):
    return dict(
        quant_method='compressed-tensors',
        format=fmt,
        quantization_status='compressed',
        ignore=ignore,
        config_groups=dict(group_0=dict(
            targets=['Linear'],
            weights=dict(type='float', symmetric=True, dynamic=False)|weights,
            input_activations=acts)))
def fp8_blocks(keep):
    return dict(
        quant_method='fp8', fmt='e4m3', activation_scheme='dynamic', weight_block_size=[128,128],
        modules_to_not_convert=keep)

# FP8, one scale a tensor, and scales for keys and values;
# told by hf_quant_config.json alone, as older exports do
CASES['llama-fp8-tensor'] = Case(
    LLAMA,
    66,
    rules=[(LINEAR, fp8)],
    hf_quant=older('FP8', ['lm_head']),
    scales={f'model.layers.{i}.self_attn.{n}_proj.{n}_scale':.03+.01*i
        for i in range(2)
        for n in 'kv'})
# one scale a row, in a checkpoint of compressed-tensors
CASES['qwen3-fp8-channel'] = Case(
    QWEN3|dict(num_hidden_layers=2, tie_word_embeddings=False, vocab_size=104),
    66,
    rules=[(LINEAR, fp8_channel)],
    quant=compressed(
        'float-quantized',
        ['lm_head'],
        dict(num_bits=8, type='float', strategy='token', symmetric=True, dynamic=True),
        num_bits=8,
        strategy='channel'))
# blocks of 128 x 128, the last ones partial both ways, float32 scales
CASES['minimax-fp8-block'] = Case(
    MINIMAX
    |dict(
        vocab_size=104, hidden_size=144, intermediate_size=16, num_hidden_layers=2,
        num_local_experts=4, num_attention_heads=9, num_experts_per_tok=2),
    67,
    rules=[(EXPERT+r'|self_attn\.[qkvo]_proj', fp8_block)],
    keep32='e_score_correction_bias',
    quant=fp8_blocks(['gate','e_score_correction_bias','lm_head']))
# the same with BF16 scales, the MTP layer too; text only, and so without a prefix
CASES['qwen35-moe-fp8-block'] = Case(
    without(TEXT35, 'full_attention_interval')|MOE35
    |dict(
        model_type='qwen3_5_moe_text',
        architectures=['Qwen3_5MoeForCausalLM'],
        vocab_size=96,
        hidden_size=136,
        num_hidden_layers=2,
        layer_types=['linear_attention','full_attention'],
        num_experts=3,
        num_experts_per_tok=2,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=40,
        linear_value_head_dim=32,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=48,
        rope_parameters=dict(rope_type='default', rope_theta=10000000, partial_rotary_factor=0.25)),
    90,
    mtp=True,
    experts='apart',
    rules=[
        (r'in_proj_[ab]\.|^mtp\.fc|gate\.weight|norm|conv1d', None),
        (r'_proj\.weight$|in_proj_(qkv|z)\.weight$', fp8_block_bf16)],
    quant=fp8_blocks(['lm_head','model.embed_tokens','mtp.fc']))
# modelopt's blocks, whose scales have four dimensions
CASES['llama-fp8-pb-wo'] = Case(
    LLAMA|dict(num_hidden_layers=1, intermediate_size=144, head_dim=24, vocab_size=104), 65,
    rules=[(LINEAR, fp8_block_4d)], quant=modelopt('FP8_PB_WO', ['lm_head']))
# NVFP4 in every linear; told by hf_quant_config.json alone
CASES['qwen3-nvfp4'] = Case(
    QWEN3|dict(intermediate_size=80), 66, rules=[(LINEAR, nvfp4)],
    hf_quant=older('NVFP4', ['lm_head'], group_size=16))
CASES['gemma4-nvfp4-experts'] = Case(
    gemma(
        num_hidden_layers=3,
        layer_types=['sliding_attention','sliding_attention','full_attention'],
        num_key_value_heads=2,
        num_global_key_value_heads=1,
        vocab_size=112,
        moe_intermediate_size=32,
        num_experts=4,
        top_k_experts=2),
    66,
    experts='apart',
    rules=[(EXPERT, nvfp4)],
    hf_quant=older('NVFP4', ['lm_head'], group_size=16),
    quant=modelopt(
        'NVFP4',
        [
            'lm_head', 'model.language_model.layers.*.mlp*',
            'model.language_model.layers.*.router*', 'model.language_model.layers.*.self_attn*']))
CASES['nemotron-nvfp4'] = Case(
    without(NEMOTRON, 'hybrid_override_pattern')
    |dict(
        layers_block_type=['attention','mamba','moe','mamba','mlp'],
        num_hidden_layers=5,
        intermediate_size=48,
        mamba_num_heads=4,
        mamba_head_dim=24,
        n_groups=2,
        ssm_state_size=16,
        vocab_size=104,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=48,
        n_routed_experts=4,
        num_experts_per_tok=2),
    66,
    rules=[
        (r'layers\.1\.|[qkvo]_proj', None),
        (EXPERT+r'|mixer\.(in|out|up|down)_proj|shared_experts', nvfp4)],
    hf_quant=older(
        'NVFP4',
        ['lm_head','backbone.layers.1.mixer.in_proj', 'backbone.layers.1.mixer.out_proj']
        +[f'backbone.layers.0.mixer.{x}_proj' for x in 'qkvo'],
        group_size=16))
CASES['qwen3-moe-ct-nvfp4'] = Case(
    QWEN3_MOE|dict(num_hidden_layers=2, moe_intermediate_size=16),
    66,
    rules=[(EXPERT+'|self_attn.[qkvo]_proj', nvfp4_packed)],
    quant=compressed(
        'nvfp4-pack-quantized',
        ['lm_head','re:.*mlp.gate$'],
        dict(
            num_bits=4, type='float', strategy='tensor_group', symmetric=True, dynamic='local',
            group_size=16),
        num_bits=4,
        strategy='tensor_group',
        group_size=16))
CASES['llama-ct-mxfp4'] = Case(
    LLAMA|dict(vocab_size=104, hidden_size=64, num_attention_heads=4, intermediate_size=96),
    66,
    rules=[(LINEAR, mxfp4_packed)],
    quant=compressed(
        'mxfp4-pack-quantized', ['lm_head'], None, num_bits=4, strategy='group', group_size=32))
# FP8 attention, NVFP4 for the rest and the output matrix, BF16 where neither; and no MTP head
FP8_PARTS = (
    r'linear_attn\.(in_proj_qkv|in_proj_z|out_proj)\.weight$'
    r'|self_attn\.[qkvo]_proj\.weight$')
CASES['qwen35-mixed'] = Case(
    TEXT35
    | dict(
        model_type='qwen3_5_text', architectures=['Qwen3_5ForCausalLM'], vocab_size=112,
        num_hidden_layers=3, intermediate_size=64, mtp_num_hidden_layers=0, linear_key_head_dim=16,
        linear_value_head_dim=16, linear_num_value_heads=6, output_gate_type='swish'),
    66,
    rules=[(FP8_PARTS, fp8),(r'mlp\.[a-z]+_proj\.weight$|^lm_head', nvfp4_a16)],
    quant=dict(
        quant_method='modelopt',
        quant_algo='MIXED_PRECISION',
        producer=PRODUCER,
        ignore=['mtp*'],
        quantized_layers={f'model.layers.{i}.linear_attn.{n}':dict(quant_algo='FP8')
            for i in (0,1)
            for n in ('in_proj_qkv','in_proj_z','out_proj')}
        | {f'model.layers.2.self_attn.{n}_proj':dict(quant_algo='FP8') for n in 'qkvo'}
        | {n:dict(quant_algo='W4A16_NVFP4', group_size=16)
            for n in ['lm_head']
            + [f'model.layers.{i}.mlp.{x}_proj' for i in range(3)
                for x in ('gate','up','down')]}),
    scales={f'model.layers.2.self_attn.{n}_proj.{n}_scale':.05 for n in 'kv'})

# INT4 in groups, of a size that a card's cache takes, packed by the libraries themselves
SMALL = dict(
    vocab_size=40, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
    num_attention_heads=2, num_key_value_heads=1, head_dim=32)

def grouped(**scheme):
    "What config.json of a compressed-tensors folder says"
    group = dict(targets=['Linear'], weights=ct_scheme(**scheme))
    group['input_activations'] = None
    return dict(
        quant_method='compressed-tensors', format='pack-quantized',
        quantization_status='compressed', ignore=['lm_head'], config_groups=dict(group_0=group))

# without zero points, and scales in BF16
CASES['llama-ct-int4'] = Case(LLAMA|SMALL, 34, as_stored='packed',
    rules=[(LINEAR, ct_int4(True, 64))],
    quant=grouped(symmetric=True, group=64))
# with them, and scales in float32
CASES['llama-ct-int4-zeros'] = Case(LLAMA|SMALL, 34, as_stored='dequantized',
    rules=[(LINEAR, ct_int4(False, 32, torch.float32))],
    quant=grouped(symmetric=False, group=32))
# rounded in the order of activations, with groups that stay where they are
GPTQ = dict(
    quant_method='gptq', bits=4, group_size=32, desc_act=True, static_groups=True,
    sym=False, damp_percent=0.01, true_sequential=True, checkpoint_format='gptq')
CASES['llama-gptq'] = Case(
    LLAMA|SMALL, 34, rules=[(LINEAR, gptq_int4(32))], quant=GPTQ)
AWQ = dict(
    quant_method='awq', bits=4, group_size=32,
    zero_point=True, version='gemm', modules_to_not_convert=None)
CASES['qwen3-awq'] = Case(
    QWEN3|SMALL|dict(max_window_layers=1, tie_word_embeddings=False), 34,
    rules=[(LINEAR, awq_int4(32))],
    quant=AWQ)
