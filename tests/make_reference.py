"""Make the small reference checkpoints of tests/data: random weights in the layout of published ones, with what another implementation makes of them.

    pip install torch==2.13.0 transformers==5.23.0 && python tests/make_reference.py [NAME...]

Run by hand, never in CI: the tests only read what it wrote. For each row of `CASES` it makes a model of that shape, fills it with numbers that
depend on nothing but the seed and the tensor's name, rounds them to bfloat16, saves them as the library itself saves a model, writes a config.json
of the generation named, loads the folder again from disk, and records in float32 with plain attention:

    ids [T]             prompt                      logits [T,V]          logits of the whole prompt
    next_ids [D]        tokens fed one at a time    next_logits [D,V]     logits after each, from the cache
    rows [R]            positions kept below        layers [L,R,H]        residual stream after each layer, at those positions
    greedy [G]          the likeliest tokens that continue the prompt, each after the last; no choice among them was close

`transformers` is the reference because it is where the configs' meaning is defined. The folders differ in one trait each, named by the folder.
"""
import json,shutil,sys,zlib
from pathlib import Path
import numpy as np, torch, transformers

data = Path(__file__).parent/'data'
V,D,G,LAYER_ROWS = 160,10,12,24

# The shape everything else is a variation of: untied, two layers, two query heads to a key head.
BASE = dict(model_type='llama', architectures=['LlamaForCausalLM'], vocab_size=V, hidden_size=48, intermediate_size=80, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, hidden_act='silu', rms_norm_eps=1e-5, max_position_embeddings=512, rope_theta=10000.0,
    attention_bias=False, mlp_bias=False, tie_word_embeddings=False, bos_token_id=1, eos_token_id=2, torch_dtype='bfloat16')
MISTRAL = BASE|dict(model_type='mistral', architectures=['MistralForCausalLM'], rope_theta=1000000.0, sliding_window=None)

# name -> config.json as its publisher would have written it, tokens of prompt, bytes a shard (None: one file)
CASES = {
    # as Llama 3.1 is published, with pairs on all three parts of its curve; the prompt crosses two 64-token boundaries; sharded, with an index
    'llama3-rope-sharded': (BASE|dict(hidden_size=64, num_hidden_layers=3, intermediate_size=96, eos_token_id=[2,3],
        rope_scaling=dict(rope_type='llama3', factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)), 140, 100_000),
    # as Mistral Small: heads that together are wider than the model
    'mistral-wide-heads': (MISTRAL|dict(head_dim=20), 70, None),
    # as Mistral 7B v0.1: a query sees itself and the 22 tokens before it
    'mistral-window': (MISTRAL|dict(sliding_window=23, rope_theta=10000.0), 90, None),
    # as SmolLM2: three query heads on one key head, output matrix tied to the embedding, the newer config.json
    'smollm2-tied': ({k:v for k,v in BASE.items() if k not in ('rope_theta','torch_dtype')}|dict(num_attention_heads=3, num_key_value_heads=1, head_dim=16,
        num_hidden_layers=3, tie_word_embeddings=True, rope_parameters=dict(rope_type='default', rope_theta=100000.0), dtype='bfloat16'), 70, None),
    # the two scalings that came before llama3's, each in one generation of config.json
    'yarn-rope': ({k:v for k,v in BASE.items() if k!='rope_theta'}|dict(num_attention_heads=2, num_key_value_heads=1,
        rope_parameters=dict(rope_type='yarn', rope_theta=10000.0, factor=4.0, original_max_position_embeddings=64, beta_fast=4.0, beta_slow=1.0)), 72, None),
    'linear-rope': (BASE|dict(rope_scaling=dict(type='linear', factor=4.0)), 70, None),
    # a bias on every projection
    'biases': (BASE|dict(attention_bias=True, mlp_bias=True), 70, None)}

def values(name, shape):
    "Numbers for tensor `name`: sized so that attention is neither flat nor one-hot, and no layer drowns the stream"
    rng = np.random.default_rng([20260, zlib.crc32(name.encode())])
    x = rng.standard_normal(shape, np.float32)
    if 'norm' in name: return 1 + .25*x
    if name.endswith('bias'): return .3*x
    if 'embed' in name: return .15*x
    gain = 1.6 if 'lm_head' in name else 1.5 if name.endswith(('q_proj.weight','k_proj.weight')) else .6 if name.endswith(('o_proj.weight','down_proj.weight')) else 1.
    return gain*x/np.sqrt(shape[-1])

def build(name, cfg, shard):
    "A folder as a publisher would upload it"
    out = data/name
    shutil.rmtree(out, ignore_errors=True)
    kind = transformers.AutoConfig.for_model(**json.loads(json.dumps(cfg)))
    model = transformers.AutoModelForCausalLM.from_config(kind, dtype=torch.bfloat16)
    for n,p in model.named_parameters(): p.data.copy_(torch.from_numpy(values(f'{name}/{n}', tuple(p.shape))))
    model.tie_weights()
    model.save_pretrained(out, max_shard_size=shard or '1GB')
    (out/'generation_config.json').unlink(missing_ok=True)
    for p in out.iterdir(): p.chmod(0o644)
    (out/'config.json').write_text(json.dumps(cfg, indent=1)+'\n')
    return out

@torch.no_grad()
def greedy(model, ids):
    "The likeliest continuation of `ids`, and by how much its closest choice was won"
    out,gap = list(ids),np.inf
    for _ in range(G):
        top = model(torch.tensor([out]), use_cache=False).logits[0,-1].topk(2)
        out.append(int(top.indices[0])); gap = min(gap, float(top.values[0]-top.values[1]))
    return out[len(ids):],gap

def prompt(model, name, T):
    "The first random prompt whose greedy continuation has no close choice"
    for k in range(100):
        rng = np.random.default_rng([20261, zlib.crc32(name.encode()), k])
        ids,nxt = rng.integers(4, V, T),rng.integers(4, V, D)
        out,gap = greedy(model, ids)
        if gap>.02: return ids,nxt,out,gap

@torch.no_grad()
def record(out, T):
    "What the library makes of the folder, read back from disk"
    model = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32, attn_implementation='eager').eval()
    ids,nxt,best,gap = prompt(model, out.name, T)
    stream = []
    hooks = [l.register_forward_hook(lambda m,a,o: stream.append((o[0] if isinstance(o, tuple) else o)[0].numpy())) for l in model.model.layers]
    o = model(torch.from_numpy(ids)[None], use_cache=True)
    for h in hooks: h.remove()
    cache,step = o.past_key_values,[]
    for i in nxt:
        s = model(torch.tensor([[int(i)]]), past_key_values=cache, use_cache=True)
        step.append(s.logits[0,0].numpy()); cache = s.past_key_values
    whole = model(torch.from_numpy(np.concatenate([ids, nxt]))[None], use_cache=False).logits[0,T:].numpy()
    rows = np.unique(np.linspace(0, T-1, LAYER_ROWS).astype(int))
    ref = dict(ids=ids.astype(np.int32), logits=o.logits[0].numpy(), next_ids=nxt.astype(np.int32), next_logits=np.stack(step),
        rows=rows.astype(np.int32), layers=np.stack(stream)[:,rows], greedy=np.array(best, np.int32))
    np.savez_compressed(out/'ref.npz', **ref)
    return float(np.abs(ref['logits']).max()),float(np.abs(whole-ref['next_logits']).max()),gap

def main(names):
    transformers.logging.set_verbosity_error()
    for name in names or CASES:
        cfg,T,shard = CASES[name]
        out = build(name, cfg, shard)
        big,off,gap = record(out, T)
        size = sum(p.stat().st_size for p in out.iterdir())
        print(f'{name:22s} {size/1000:6.0f} kB  {T:3d} tokens  largest logit {big:5.1f}  cached against whole {off:.0e}  closest greedy choice {gap:.3f}  {" ".join(sorted(p.name for p in out.iterdir()))}')

if __name__=='__main__': main(sys.argv[1:])
