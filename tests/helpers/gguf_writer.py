"""What llama.cpp's converter makes of a Hugging Face folder: names from the gguf package's own
tables, keys and transforms as its scripts have them, restated.

Reads safetensors by itself, so that a fault of Atlas's reader cannot hide in both files of a
comparison. `without` leaves steps out, by name:
a test that does not notice does not test."""
import json,re,struct
from pathlib import Path
import gguf, numpy as np

ARCHS = {
    'llama':'LLAMA', 'mistral':'LLAMA', 'qwen2':'QWEN2', 'qwen3':'QWEN3', 'qwen3_moe':'QWEN3MOE',
    'qwen3_next':'QWEN3NEXT', 'qwen3_5':'QWEN35', 'qwen3_5_moe':'QWEN35MOE', 'gpt_oss':'GPT_OSS',
    'gemma4':'GEMMA4', 'nemotron_h':'NEMOTRON_H_MOE', 'minimax_m2':'MINIMAXM2',
    'qwen3_vl':'QWEN3VL', 'qwen3_vl_moe':'QWEN3VLMOE', 'granite':'GRANITE',
    'granitemoe':'GRANITE_MOE', 'granitemoeshared':'GRANITE_MOE',
    'granitemoehybrid':'GRANITE_HYBRID'}
_TILES = ('tile_qkv','tile_z','tile_b','tile_a','tile_A','tile_dt','tile_conv','tile_out')
# what a step of the conversion is called, by family
STEPS = {
    'llama':('permute',),
    'mistral':('permute',),
    'qwen3_next':('plus_one','neg_exp','ungroup'),
    'qwen3_5':('plus_one','neg_exp',*_TILES),
    'qwen3_5_moe':('plus_one','neg_exp',*_TILES),
    'gpt_oss':('split','transpose'),
    'gpt_oss-mxfp4':('split','nibbles'),
    'qwen3_vl_moe':('transpose',),
    'nemotron_h':('neg_exp',),
    'granitemoehybrid':('neg_exp','permute'),
    **dict.fromkeys(('granite','granitemoe','granitemoeshared'), ('permute',))}

def architecture(c):
    "Of the file; a hybrid that attends in every layer is written as a Granite without Mamba"
    kind = c['model_type']
    if kind=='granitemoehybrid' and {*c['layer_types']}=={'attention'}:
        kind = 'granitemoe' if c['num_experts_per_tok'] else 'granite'
    return gguf.MODEL_ARCH[ARCHS[kind]]

# ---- reading

def st_read(path):
    "Arrays of a safetensors file by name; BF16 widened, F8 as its bytes"
    b = Path(path).read_bytes()
    n, = struct.unpack_from('<Q', b)
    def one(e):
        raw = b[
            8+n+e['data_offsets'][0]:8+n+e['data_offsets'][1]]
        t = e['dtype']
        a = np.frombuffer(
            raw,
            dict(
                F32='<f4', F16='<f2', BF16='<u2', U8='u1', F8_E4M3='u1',
                F8_E8M0='u1', I64='<i8')[t]).reshape(e['shape'])
        return (
            (a.astype(np.uint32)<<16).view(np.float32) if t=='BF16'
            else a.astype(np.float32) if t=='F16' else a)
    return {k:one(e)
        for k,e in json.loads(b[8:8+n]).items()
        if k!='__metadata__'}

def hf_read(folder):
    "Config, its text part brought up, and tensors without their prefix and without the towers"
    folder = Path(folder)
    d = json.loads((folder/'config.json').read_text())
    d |= d.get('text_config') or {}
    d['model_type'] = d['model_type'].removesuffix('_text')
    ts = {k:a
        for p in sorted(folder.glob('*.safetensors'))
        for k,a in st_read(p).items()}
    return (
        d,
        {k.replace('language_model.', ''):a
            for k,a in ts.items() if not re.search(r'visual\.|vision|audio|projector|inv_freq', k)})

# ---- transforms

def permute(a, heads):
    return a.reshape(
        heads, 2, len(a)//heads//2,
        *a.shape[1:]).swapaxes(1, 2).reshape(a.shape)

def tile(a, axis, kh, d):
    """V heads, grouped by key head in the file, in the order that ggml broadcasts: the first of
    every group, then the second"""
    s = a.shape
    return np.ascontiguousarray(a.reshape(
        *s[:axis], kh, -1, d,
        *s[axis+1:]).swapaxes(axis, axis+1)).reshape(s)

def ungroup(a, kh, parts):
    "Rows [group of a key head: parts one after the other] as one array a part"
    g = a.reshape(kh, sum(parts), a.shape[1])
    cuts = np.cumsum((0,*parts))
    return [
        np.ascontiguousarray(g[:,i:j]).reshape(-1, a.shape[1])
        for i,j in zip(cuts, cuts[1:])]

def mxfp4(blocks, scales, nibbles=True):
    """[..., n, 16] bytes, each two neighbours, and [..., n] exponents as ggml's blocks of 17
    bytes: exponent, then elements j and j+16 in a byte"""
    codes = np.stack(
        [blocks&15, blocks>>4],
        -1).reshape(*blocks.shape[:-1], 32)
    q = codes[...,:16]|codes[...,16:]<<4 if nibbles else blocks
    return np.concatenate(
        [scales[...,None], q],
        -1).reshape(*blocks.shape[:-2], -1)

def nvfp4(w, scale):
    """[out, in/2] bytes and [out, in/16] E4M3 scales as ggml's blocks of 64: four scales, then
    four times eight bytes of elements j and j+8"""
    out,n = scale.shape
    codes = np.stack(
        [w&15, w>>4], -1).reshape(out, n, 16)
    q = codes[...,:8]|codes[...,8:]<<4
    return np.concatenate(
        [
            (scale&127).reshape(out, n//4, 4),
            q.reshape(out, n//4, 32)],
        -1).reshape(out, -1)

def llama3_divisors(r, dim):
    "What llama.cpp divides the frequencies by, for llama3 scaling"
    n,low,high = r['original_max_position_embeddings'],r['low_freq_factor'],r['high_freq_factor']
    def one(f):
        turns = n*f/2/np.pi
        smooth = (turns-low)/(high-low)
        return (
            1. if turns>high
            else r['factor'] if turns<low
            else 1/((1-smooth)/r['factor']+smooth))
    return np.array(
        [one(r['rope_theta']**-(i/dim))
            for i in range(0, dim, 2)],
        np.float32)

# ---- one family's tensors: (name, array) -> some of them, under Hugging Face names that the
# package's tables know

def _heads(c, name, a, without):
    "Rows of queries and keys, for the converters that inherit llama's"
    m = re.search(r'([qk])_proj\.(weight|bias)$', name)
    if m and 'permute' not in without:
        a = permute(a, c['num_attention_heads' if m[1]=='q' else 'num_key_value_heads'])
    yield name,a

def _experts(c, name, a, without):
    "Stacked experts in two"
    if re.search(r'experts\.gate_up_proj$', name):
        for i,part in enumerate(('gate','up')):
            yield (
                name.replace('gate_up', part)+'.weight',
                np.ascontiguousarray(np.split(a, 2, 1)[i]))
    elif name.endswith('experts.down_proj'):
        yield name+'.weight',a
    else:
        yield name,a

_NORMS = 'norm.weight','norm_embedding.weight','norm_hidden.weight'

def _tiled(c, name, a, without):
    "Rows, channels or columns of value heads dealt out over key heads, as ggml tiles"
    kh,vh,dk,dv = (c[f'linear_{k}']
        for k in ('num_key_heads','num_value_heads','key_head_dim','value_head_dim'))
    def do(step, part):
        tiles = c['model_type']!='qwen3_next' and vh>kh
        return part in name and tiles and f'tile_{step}' not in without
    if do('qkv', 'in_proj_qkv.') or do('conv', 'conv1d'):
        cut = 2*kh*dk
        a = np.concatenate([a[:cut], tile(a[cut:], 0, kh, dv)])
    if do('z', 'in_proj_z.'):
        a = tile(a, 0, kh, dv)
    for step,part in dict(b='in_proj_b.', a='in_proj_a.', A='A_log', dt='dt_bias').items():
        if do(step, part):
            a = tile(a, 0, kh, 1)
    return tile(a, 1, kh, dv) if do('out', 'linear_attn.out_proj') else a

def _qkvz(c, a, without):
    "Qwen3-Next's fused projection, taken apart"
    kh,vh,dk,dv = (c[f'linear_{k}']
        for k in ('num_key_heads','num_value_heads','key_head_dim','value_head_dim'))
    if 'ungroup' in without:
        return np.split(a, np.cumsum((kh*dk,kh*dk,vh*dv)))
    r = vh//kh
    return ungroup(a, kh, (dk,dk,r*dv,r*dv))

def _delta(c, name, a, without):
    "Qwen3-Next's and Qwen3.5's delta nets and norms"
    if 'conv1d' in name:
        a = a.reshape(len(a), -1)
    a = _tiled(c, name, a, without)
    if name.endswith('A_log') and 'neg_exp' not in without:
        a = -np.exp(a)
    if name.endswith(_NORMS) and 'linear_attn.norm' not in name and 'plus_one' not in without:
        a = 1+a
    if 'in_proj_qkvz' in name:
        q,k,v,z = _qkvz(c, a, without)
        yield name.replace('qkvz', 'qkv'),np.concatenate([q,k,v])
        yield name.replace('qkvz', 'z'),z
    else:
        yield from _experts(c, name.replace('dt_bias', 'dt_proj.bias'), a, without)

def _gptoss(c, name, a, without):
    "Interleaved gate and up rows apart; 4-bit blocks in ggml's order"
    halves = (
        (slice(0,None,2),slice(1,None,2))
        if 'split' not in without
        else (
            slice(0,c['intermediate_size']), slice(c['intermediate_size'],None)))
    stem,kind = re.match(r'(.*?)(_bias|_blocks|)$', name).groups()
    if '.experts.' not in name:
        yield name+('.weight' if name.endswith('sinks') else ''),a
        return
    if not kind and 'transpose' not in without:
        a = np.ascontiguousarray(a.swapaxes(1, 2))
    end = '.bias' if kind=='_bias' else '.weight'
    if 'gate_up' not in name:
        yield stem+end,a
        return
    for part,h in zip(('gate','up'), halves):
        yield stem.replace('gate_up', part)+end,np.ascontiguousarray(a[:,h])

def _nemotron(c, name, a, without):
    "Mamba's small tensors, in the shapes that ggml broadcasts"
    if name.endswith('A_log'):
        a = (-np.exp(a) if 'neg_exp' not in without else a).reshape(-1, 1)
    if name.endswith('mixer.D'):
        a = a.reshape(-1, 1)
    if name.endswith('mixer.norm.weight'):
        a = a.reshape(c['n_groups'], -1)
    if 'conv1d.weight' in name:
        a = a.reshape(len(a), -1)
    yield from _heads(c, name.replace('dt_bias', 'dt.bias'), a, without)

def _granite(c, name, a, without):
    "As Nemotron's, and gate and up rows apart"
    mlp = 'mlp.shared_expert' if c.get('num_local_experts') else 'mlp'
    if 'input_linear' in name:
        stem,parts = mlp,('gate_proj','up_proj')
        if 'sparse' in name:
            stem,parts = 'block_sparse_moe.experts',('w1','w3')
        for part,half in zip(parts, np.split(a, 2, -2)):
            to = f'{stem}.{part}'
            to = re.sub(r'(block_sparse_moe|shared_mlp)\.input_linear', to, name)
            yield to,np.ascontiguousarray(half)
    elif mlp=='mlp' and 'shared_mlp.output' in name:
        yield name.replace('shared_mlp.output_linear', 'mlp.down_proj'),a
    elif name.endswith('mamba.norm.weight'):
        yield name,a.reshape(c['mamba_n_groups'], -1)
    elif name.endswith('mamba.D'):
        yield name,a.reshape(-1, 1)
    else:
        name = name.replace('dt_bias', 'dt_proj.bias')
        yield from _nemotron(c, name, a, without)

def _vl_experts(c, name, a, without):
    "Qwen3-VL's stacks are [E, in, out]"
    stack = (
        name.endswith(('experts.gate_up_proj','experts.down_proj'))
        and 'transpose' not in without)
    yield from _experts(
        c, name, np.ascontiguousarray(a.swapaxes(1, 2)) if stack else a,
        without)

def _gemma(c, name, a, without):
    yield (name if name.endswith(('.weight','scale')) else name+'.weight'),a

GRANITES = 'granitemoehybrid','granitemoeshared','granitemoe','granite'
MODIFY = dict(llama=_heads, mistral=_heads, gpt_oss=_gptoss, gemma4=_gemma)
MODIFY |= dict.fromkeys(('qwen3_next','qwen3_5','qwen3_5_moe'), _delta)
MODIFY |= dict(qwen3_vl_moe=_vl_experts, nemotron_h=_nemotron)
MODIFY |= dict.fromkeys(GRANITES, _granite)

# ---- names

def _stack_experts(ts):
    "Experts that come one by one, stacked"
    out,banks = {},{}
    for k,a in ts.items():
        m = re.match(r'(.*experts)\.(\d+)\.(.*)', k)
        if m:
            banks.setdefault((m[1],m[3]), {})[int(m[2])] = a
        else:
            out[k] = a
    return (
        out
        |{
            f'{b}.{m}':np.stack([x[e] for e in range(len(x))])
            for (b,m),x in banks.items()})

def _names(c, arch, extra):
    "Name of a tensor in the file, from its Hugging Face name"
    L = c['num_hidden_layers']
    table = gguf.get_tensor_name_map(arch, L+extra)
    mtp = {
        'fc':'eh_proj', 'pre_fc_norm_embedding':'enorm', 'pre_fc_norm_hidden':'hnorm',
        'norm':'shared_head_norm'}
    def name(k):
        if m := re.fullmatch(r'mtp\.(\w+)\.weight', k):
            return f'blk.{L}.nextn.{mtp[m[1]]}.weight'
        k = re.sub(r'^mtp\.layers\.(\d+)', lambda m: f'model.layers.{L+int(m[1])}', k)
        k = k.replace('e_score_correction_bias', 'e_score_correction.bias')
        if k.endswith('router.scale'):
            return f'blk.{k.split(".")[2]}.ffn_gate_inp.scale'
        if k.endswith('per_expert_scale'):
            return f'blk.{k.split(".")[2]}.ffn_down_exps.scale'
        if k.startswith('backbone.') and '.mixer.experts.' in k:
            k = k.replace('backbone', 'model').replace('.mixer.', '.mlp.')
        if m := re.fullmatch(r'model\.layers\.(\d+)\.experts\.(gate|up)_proj\.weight', k):
            return f'blk.{m[1]}.ffn_{m[2]}_exps.weight'  # Gemma's, one by one
        if 'linear_attn.in_proj_qkv.' in k:
            return f'blk.{k.split(".")[2]}.attn_qkv.weight'
        got = table.get_name(k, ('.weight','.bias'))
        assert got, k
        return got
    return name

# ---- keys

ALL = {
    'context_length':'max_position_embeddings', 'embedding_length':'hidden_size',
    'attention.head_count':'num_attention_heads', 'attention.head_count_kv':'num_key_value_heads',
    'vocab_size':'vocab_size', 'feed_forward_length':'intermediate_size',
    'attention.key_length':'head_dim', 'attention.value_length':'head_dim',
    'expert_count':('num_local_experts','num_experts'),
    'expert_used_count':('num_experts_per_tok','top_k_experts'),
    'expert_feed_forward_length':'moe_intermediate_size',
    'expert_shared_feed_forward_length':'shared_expert_intermediate_size'}
DELTA = {
    'ssm.conv_kernel':'linear_conv_kernel_dim', 'ssm.state_size':'linear_key_head_dim',
    'ssm.group_count':'linear_num_key_heads', 'ssm.time_step_rank':'linear_num_value_heads'}
OSS = {
    'attention.sliding_window':'sliding_window', 'expert_feed_forward_length':'intermediate_size'}
GEMMA = {
    'attention.sliding_window':'sliding_window',
    'attention.shared_kv_layers':'num_kv_shared_layers',
    'embedding_length_per_layer_input':'hidden_size_per_layer_input',
    'attention.key_length':'global_head_dim', 'attention.value_length':'global_head_dim',
    'attention.key_length_swa':'head_dim', 'attention.value_length_swa':'head_dim',
    'rope.dimension_count':'global_head_dim', 'rope.dimension_count_swa':'head_dim',
    'final_logit_softcapping':'final_logit_softcapping'}
NEMOTRON = {
    'ssm.conv_kernel':'conv_kernel', 'ssm.state_size':'ssm_state_size',
    'ssm.group_count':'n_groups', 'ssm.time_step_rank':'mamba_num_heads',
    'expert_count':'n_routed_experts', 'expert_shared_count':'n_shared_experts',
    'expert_shared_feed_forward_length':'moe_shared_expert_intermediate_size',
    'expert_weights_norm':'norm_topk_prob', 'expert_weights_scale':'routed_scaling_factor',
    'expert_group_count':'n_group', 'expert_group_used_count':'topk_group'}
GRANITE = {'ssm.conv_kernel':'mamba_d_conv', 'ssm.state_size':'mamba_d_state',
    'ssm.group_count':'mamba_n_groups', 'ssm.time_step_rank':'mamba_n_heads'}
GRANITE_SCALES = {'attention.scale':'attention_multiplier',
    'embedding_scale':'embedding_multiplier',
    'residual_scale':'residual_multiplier',
    'logit_scale':'logits_scaling'}
MINIMAX = {'expert_feed_forward_length':'intermediate_size', 'rope.dimension_count':'rotary_dim'}

def renamed(c, table):
    "Keys of `table` with what the config calls them; the first of several that it has"
    def pick(names):
        return next(
            (
                c[n] for n in ((names,) if isinstance(names, str) else names)
                if c.get(n) is not None),
            None)
    return {k:v
        for k,names in table.items() if (v := pick(names)) is not None}

def _rope_meta(kind, full)->dict:
    "What the header says of a rope that is scaled"
    if kind not in ('linear','yarn'):
        return {}
    d = {'rope.scaling.type':kind, 'rope.scaling.factor':float(full['factor'])}
    if kind=='yarn':
        d['rope.scaling.original_context_length'] = full['original_max_position_embeddings']
        betas = [k for k in ('beta_fast','beta_slow') if full.get(k)]
        d |= {f'rope.scaling.yarn_{k}':float(full[k]) for k in betas}
    return d

def meta(c, ts, arch, extra):
    "What the converter writes into the header, without the architecture"
    r = c.get('rope_parameters') or c.get('rope_scaling') or {}
    full = r.get('full_attention', r)
    theta = full.get('rope_theta', c.get('rope_theta'))
    d = renamed(c, ALL)
    d['block_count'] = c['num_hidden_layers']+extra
    d['attention.layer_norm_rms_epsilon'] = float(c.get('rms_norm_eps') or c['norm_eps'])
    d['rope.freq_base'] = float(theta)
    if c.get('scoring_func'):
        d['expert_gating_func'] = dict(softmax=1, sigmoid=2)[c['scoring_func']]
    d |= _rope_meta(full.get('rope_type') or full.get('type'), full)
    if 'mrope_section' in r:
        d['rope.dimension_sections'] = [*r['mrope_section'],0][:4]
    if extra:
        d['nextn_predict_layers'] = extra
    more = MORE.get(c['model_type'], lambda *_: {})(c, d)
    return d|{k:v for k,v in more.items() if v is not None}

def _llama(c, d):
    return {'rope.dimension_count':c.get('head_dim') or c['hidden_size']//c['num_attention_heads']}

def _next(c, d):
    part = (c.get('rope_parameters') or {}).get(
        'partial_rotary_factor', c.get('partial_rotary_factor', .25))
    n = c.get('full_attention_interval', 4)
    rec = [t=='linear_attention' for t in c.get('layer_types') or []]
    usual = [(i+1)%n!=0 for i in range(len(rec))]
    # newer files list the delta nets where they are not all but every n-th
    return (
        renamed(c, DELTA)
        |{
            'ssm.inner_size':c['linear_value_head_dim']*c['linear_num_value_heads'],
            'full_attention_interval':n,
            'rope.dimension_count':int(c['head_dim']*part),
            'attention.recurrent_layers':None if rec==usual
            else rec+[False]*d.get('nextn_predict_layers', 0)})

def _oss(c, d):
    slide = [t=='sliding_attention' for t in c['layer_types']]
    usual = [i%2==0 for i in range(len(slide))]
    return renamed(c, OSS)|{'attention.sliding_window_pattern':None if slide==usual else slide}

def _gemma4(c, d):
    swa = [t=='sliding_attention' for t in c['layer_types']]
    kv = c['num_key_value_heads']
    full = c.get('num_global_key_value_heads') if c.get('attention_k_eq_v') else None
    return (
        renamed(c, GEMMA)
        |{
            'attention.sliding_window_pattern':swa,
            'attention.head_count_kv':[kv if s else full or kv for s in swa],
            'rope.freq_base_swa':float(c['rope_parameters']['sliding_attention']['rope_theta'])})

def _nemo(c, d):
    p = (
        c.get('hybrid_override_pattern')
        or ''.join(
            dict(mamba='M', moe='E', attention='*', mlp='-')[k]
            for k in c['layers_block_type']))
    ff = {'E':c['moe_intermediate_size'], '-':c.get('intermediate_size')}
    return (
        renamed(c, NEMOTRON)
        |{
            'attention.head_count_kv':[c['num_key_value_heads'] if k=='*' else 0 for k in p],
            'feed_forward_length':[ff.get(k, 0) for k in p],
            'context_length':2**20,
            'rope.scaling.finetuned':False,
            'rope.dimension_count':c['hidden_size']//c['num_attention_heads'],
            'ssm.inner_size':c['mamba_num_heads']*c['mamba_head_dim']})

def _hybrid(c, d):
    kinds,kv = c['layer_types'],c['num_key_value_heads']
    turns = {*kinds}=={'attention'}
    keys = _granite_keys(c, d)|renamed(c, GRANITE)
    return keys|{
        'attention.head_count_kv':[kv*(k=='attention') for k in kinds],
        'rope.scaling.finetuned':turns, 'ssm.inner_size':c['mamba_expand']*c['hidden_size'],
        'context_length':c['max_position_embeddings'] if turns else 2**20}

def _granite_keys(c, d):
    scales = {k:float(c[n]) for k,n in GRANITE_SCALES.items()}
    shared = {'expert_shared_feed_forward_length':'shared_intermediate_size'}
    return _llama(c, d)|scales|renamed(c, shared)

def _minimax(c, d): return renamed(c, MINIMAX)
def _vl(c, d):
    return {
        'n_deepstack_layers':len(
            (c.get('vision_config') or {}).get('deepstack_visual_indexes') or [])}

MORE = dict(llama=_llama, mistral=_llama, gpt_oss=_oss, gemma4=_gemma4)
MORE |= dict.fromkeys(('qwen3_next','qwen3_5','qwen3_5_moe'), _next)
MORE |= dict(qwen3_vl=_vl, qwen3_vl_moe=_vl, nemotron_h=_nemo, minimax_m2=_minimax)
MORE |= dict.fromkeys(GRANITES, _granite_keys)|dict(granitemoehybrid=_hybrid)

# ---- the file

ALWAYS_F32 = re.compile(
    r'_norm\.|ffn_gate_inp|ssm_conv1d|\.(bias|scale)$|ssm_(a|d)$|layer_output_scale')
def _extra_tensors(c):
    "rope_freqs.weight, for the families that have it"
    r = c.get('rope_parameters') or c.get('rope_scaling') or {}
    if (r.get('rope_type') or r.get('type'))=='llama3':
        return {
            'rope_freqs.weight':llama3_divisors(
                r|dict(rope_theta=r.get('rope_theta') or c['rope_theta']),
                c.get('head_dim') or c['hidden_size']//c['num_attention_heads'])}
    if c['model_type']!='gemma4':
        return {}
    p = c['rope_parameters']['full_attention']
    n = c['global_head_dim']
    turn = int(n*p['partial_rotary_factor']/2)
    return {
        'rope_freqs.weight':np.array(
            [1.]*turn+[1e30]*(n//2-turn), np.float32)}

def _oss_packed(c, ts, name, without):
    "gpt-oss's blocks and scales"
    out = {}
    for k in [k for k in ts if k.endswith('_blocks')]:
        blocks,scales = ts.pop(k),ts.pop(k.replace('_blocks', '_scales'))
        parts = zip(_gptoss(c, k, blocks, without), _gptoss(c, k, scales, without))
        for (n,b),(_,s) in parts:
            out[name(n)] = (mxfp4(b, s, 'nibbles' not in without), 'MXFP4')
    return out

def _nvfp4_of(ts, key):
    "Blocks and global scale of the matrix whose `weight_scale_2` is `key`"
    stem = key[:-len('_scale_2')]
    if ts[stem+'_scale'].shape[-1]%4:
        raise ValueError(f'{stem}: ggml has NVFP4 in blocks of 64')
    blocks = nvfp4(ts.pop(stem), ts.pop(stem+'_scale'))
    return stem,blocks,float(ts.pop(key).ravel()[0])

def _bank(ts, stem, x):
    "Blocks and global scales of the matrices `x` of all experts"
    blocks,scales = zip(*(x[e] for e in range(len(x))))
    scales = np.array(scales, np.float32)
    # Gemma's weight of each expert goes where its scale does
    each = stem.split('experts')[0]+'router.per_expert_scale'
    if 'down' in stem and each in ts:
        scales = scales*ts.pop(each)
    return np.stack(blocks),scales

def _packed(c, ts, name, without):
    """Tensors that are 4-bit in the folder, by name in the file: gpt-oss's blocks and modelopt's
    NVFP4; they are taken out of `ts`"""
    out = _oss_packed(c, ts, name, without)
    keys = [k for k in ts if k.endswith('.weight_scale_2')]
    for k in keys:
        ts.pop(k.replace('weight_scale_2', 'input_scale'), None)
    found,banks = {},{}
    for k in keys:
        stem,blocks,scale = _nvfp4_of(ts, k)
        if m := re.match(r'(.*experts)\.(\d+)\.(.*)', stem):
            banks.setdefault(f'{m[1]}.{m[3]}', {})[int(m[2])] = blocks,scale
        else:
            found[stem] = blocks,np.array([scale], np.float32)
    found |= {stem:_bank(ts, stem, x) for stem,x in banks.items()}
    for stem,(blocks,scales) in found.items():
        n = name(stem)
        out |= {n:(blocks, 'NVFP4'), n.replace('.weight', '.scale'):scales}
    return out

def convert(folder, quant='F32', without=(), arch=None):
    "Architecture, keys and tensors (array, or packed array and type) of the GGUF file of `folder`"
    c,ts = hf_read(folder)
    mt = c['model_type']
    arch = gguf.MODEL_ARCH[arch] if arch else architecture(c)
    extra = len({k.split('.')[2]
        for k in ts if k.startswith('mtp.layers.')})
    name = _names(c, arch, extra)
    keys = meta(c, ts, arch, extra)
    out = _packed(c, ts, name, without)
    t = gguf.GGMLQuantizationType[quant]
    for k,a in _stack_experts(ts).items():
        for n,b in MODIFY.get(mt, _experts)(c, k, a, without):
            n = name(n)
            plain = (
                quant=='F32'
                or b.ndim<2
                or ALWAYS_F32.search(n)
                or b.shape[-1]%gguf.GGML_QUANT_SIZES[t][0])
            out[n] = (
                np.ascontiguousarray(b, np.float32) if plain
                else (gguf.quantize(np.ascontiguousarray(b, np.float32), t), quant))
    return gguf.MODEL_ARCH_NAMES[arch],keys,out|_extra_tensors(c)

def write(path, arch, keys, tensors, part=0):
    "Write them, `part` tensors a file where that is not 0"
    w = gguf.GGUFWriter(path, arch, split_max_tensors=part)
    for k,v in keys.items():
        k = k if k.startswith(('tokenizer.','general.','split.')) else f'{arch}.{k}'
        add = {
            list:w.add_array, bool:w.add_bool, str:w.add_string,
            float:w.add_float32, int:w.add_uint32}[type(v)]
        add(k, v)
    for k,a in tensors.items():
        a,t = a if isinstance(a, tuple) else (a,None)
        w.add_tensor(k, a, raw_dtype=t and gguf.GGMLQuantizationType[t])
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return Path(path)

def to_gguf(folder, path, quant='F32', without=(), arch=None, **keys):
    "The GGUF file of a Hugging Face folder; `keys` override or add, None takes away"
    a,m,ts = convert(folder, quant, without, arch)
    return write(
        path,
        a,
        {k:v for k,v in (m|keys).items() if v is not None},
        ts)
