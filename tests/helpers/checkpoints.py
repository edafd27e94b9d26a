"Checkpoints small enough to damage in every place: writers that know nothing of Atlas's readers."
import json,struct
from pathlib import Path
import gguf, numpy as np

CONF = dict(
    model_type='llama', vocab_size=32, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, intermediate_size=32, max_position_embeddings=64, rms_norm_eps=1e-5,
    rope_theta=10000.0, tie_word_embeddings=True, eos_token_id=2)
GGUF_META = {
    'llama.vocab_size':32, 'llama.embedding_length':32, 'llama.block_count':1,
    'llama.attention.head_count':2, 'llama.attention.head_count_kv':1,
    'llama.feed_forward_length':32, 'llama.context_length':64,
    'llama.attention.layer_norm_rms_epsilon':1e-5, 'llama.rope.freq_base':10000.0}
_LAYER = (
    dict(input_layernorm='attn_norm', post_attention_layernorm='ffn_norm')
    | {f'self_attn.{x}_proj':f'attn_{y}'
        for x,y in dict(
            q='q', k='k', v='v', o='output').items()}
    | {f'mlp.{x}_proj':f'ffn_{x}' for x in ('gate','up','down')})
GGUF_NAMES = (
    {'model.embed_tokens.weight':'token_embd.weight', 'model.norm.weight':'output_norm.weight'}
    | {f'model.layers.0.{k}.weight':f'blk.0.{v}.weight' for k,v in _LAYER.items()})
_CODES = {'float32':'F32', 'float16':'F16', 'uint16':'BF16', 'uint8':'U8', 'int64':'I64'}

def weights(seed=0):
    "The tensors of `CONF`, float32, by Hugging Face name"
    r = np.random.default_rng(seed)
    rows = dict(k_proj=16, v_proj=16)
    return {
        k:r.standard_normal(
            (32,) if 'norm' in k
            else (
                rows.get(k.split('.')[-2],32),
                32)).astype(np.float32)
        for k in GGUF_NAMES}

def st_entries(tensors, dtypes={}):
    "What the header of a sound safetensors file says"
    d,pos = {},0
    for k,a in tensors.items():
        d[k] = dict(
            dtype=dtypes.get(k) or _CODES[str(a.dtype)],
            shape=list(a.shape),
            data_offsets=[pos,pos:=pos+a.nbytes])
    return d

def st_bytes(tensors, header=None, dtypes={}):
    "A safetensors file with its true header, or with `header`: a dict, or bytes as they are"
    h = st_entries(tensors, dtypes) if header is None else header
    if isinstance(h, dict):
        h = json.dumps(h).encode()
    return (
        struct.pack('<Q', len(h))+h
        +b''.join(a.tobytes() for a in tensors.values()))

def hf_folder(path, tensors=None, conf=CONF, shards=1, **files):
    """A model folder with one safetensors file or several with an index;
    `files` by name override or add"""
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    tensors = weights() if tensors is None else tensors
    (path/'config.json').write_text(json.dumps(conf))
    if shards==1:
        (path/'model.safetensors').write_bytes(st_bytes(tensors))
    else:
        names = [f'model-{i+1:05}-of-{shards:05}.safetensors' for i in range(shards)]
        for i,n in enumerate(names):
            (path/n).write_bytes(st_bytes(dict(
                list(tensors.items())[i::shards])))
        index = {k:names[i%shards] for i,k in enumerate(tensors)}
        (path/'model.safetensors.index.json').write_text(json.dumps(dict(
            metadata={}, weight_map=index)))
    return path

def interleave(w, heads):
    "Rows of a query or key matrix in llama.cpp's order"
    return w.reshape(
        heads, 2, w.shape[0]//heads//2,
        *w.shape[1:]).swapaxes(1,2).reshape(w.shape)

def gguf_file(
    path, tensors=None, meta=GGUF_META, arch='llama', quant='Q8_0', extra={}):
    """`tensors`, by Hugging Face name, as GGUF: matrices in `quant`, the rest in float32;
    `extra` tensors as they are"""
    g = gguf.GGUFWriter(path, arch)
    for k,v in meta.items():
        (
            g.add_array if isinstance(v,list)
            else g.add_float32 if isinstance(v,float)
            else g.add_string if isinstance(v,str) else g.add_uint32)(k, v)
    t = gguf.GGMLQuantizationType[quant]
    for k,a in (weights() if tensors is None else tensors).items():
        if 'q_proj' in k or 'k_proj' in k:
            a = interleave(a, 2 if 'q_proj' in k else 1)
        if a.ndim<2 or quant=='F32':
            g.add_tensor(GGUF_NAMES[k], a)
        else:
            g.add_tensor(GGUF_NAMES[k], gguf.quantize(a, t), raw_dtype=t)
    for k,a in extra.items():
        g.add_tensor(k, a)
    g.write_header_to_file()
    g.write_kv_data_to_file()
    g.write_tensors_to_file()
    g.close()
    return Path(path)

def splice(b, at, new):
    "`b` with `new` written over it from `at`"
    return b[:at]+new+b[at+len(new):]
