"Atlas against another implementation: the checkpoints of tests/data, made by make_reference.py, and what the transformers library makes of them."
from dataclasses import replace
from pathlib import Path
import gguf, json, numpy as np, pytest
from atlas import LLM,SamplingParams
from atlas.cache import KVCache
from atlas.device import get_device
from atlas.engine import Engine
from atlas.model import Piece,build,make_batch
from atlas.scheduler import Request,Scheduler
from atlas.weights import load,open_checkpoint

TOL = 1e-4  # of the largest value of the reference
folders = sorted(p.parent for p in (Path(__file__).parent/'data').glob('*/ref.npz'))
each = pytest.mark.parametrize('folder', folders, ids=lambda p: p.name)
host = get_device('cpu')

def reference(folder): return dict(np.load(folder/'ref.npz'))
def error(got, want): return float(np.abs(got-want).max()/np.abs(want).max())

def decoder(folder, **changes):
    "The model of `folder`, its config changed"
    with open_checkpoint(folder) as ck:
        m = build(replace(ck.config, **changes))
        return m.bind(load(ck, m.wants(), host), host, 256)

class Run:
    "One sequence on one model, fed by hand"
    def __init__(self, model):
        self.model,self.cache = model,KVCache(model.c, host, 16)
        self.table = self.cache.table(); self.table.ensure(256)
    def __call__(self, ids, start, tiled, tap=None):
        b = make_batch([Piece(list(ids), start, self.table.blocks, len(ids))], tiled, 16, host)
        return self.model.forward(b, self.cache, tap)
    def prefill(self, ids, tap=None): return self(ids, 0, True, tap)

def test_there_is_data(): assert len(folders)>=7

@each
def test_logits(folder):
    r = reference(folder)
    logits = LLM(str(folder), device='cpu').logits(r['ids'])
    assert (logits.shape,logits.dtype)==(r['logits'].shape,np.float32)
    assert error(logits, r['logits'])<TOL

@each
def test_layers(folder):
    "The residual stream after every layer, so that a fault is seen where it is made"
    r,seen = reference(folder),[]
    Run(decoder(folder)).prefill(r['ids'], lambda i,x: seen.append(x.reshape(-1, x.shape[-1])[r['rows']].copy()))
    assert len(seen)==len(r['layers'])
    errs = [error(a, b) for a,b in zip(seen, r['layers'])]
    assert max(errs)<TOL, errs

@each
def test_cached_decode(folder):
    "Tokens fed one at a time after the prompt, each reading what the last left in the cache"
    r = reference(folder); run = Run(decoder(folder)); T = len(r['ids'])
    run.prefill(r['ids'])
    step = np.concatenate([run([t], T+i, False) for i,t in enumerate(r['next_ids'])])
    assert error(step, r['next_logits'])<TOL
    eight = Run(run.model); eight.prefill(r['ids'])  # the same rows, eight at a time: the same bits
    assert (eight(r['next_ids'][:8], T, False)==step[:8]).all()

@each
def test_chunked_prefill(folder):
    "A prompt in chunks of whole tiles, bit for bit the prompt at once"
    r = reference(folder); m = decoder(folder); T = len(r['ids'])
    whole,parts = Run(m).prefill(r['ids']),Run(m)
    chunks = np.concatenate([parts(r['ids'][i:i+64], i, True) for i in range(0, T, 64)])
    assert (chunks==whole).all() and error(whole, r['logits'])<TOL

@each
def test_prompt_by_decode(folder):
    "A prompt fed one token at a time goes through none of the code for tiles, and comes to the same"
    r = reference(folder); run = Run(decoder(folder))
    rows = np.concatenate([run([t], i, False) for i,t in enumerate(r['ids'])])
    assert error(rows, r['logits'])<TOL

def greedy(model, prompts, n, **kw):
    "Greedy tokens that an engine gives for `prompts`, run together"
    cache = KVCache(model.c, host, 64)
    eng,out = Engine(model, cache, Scheduler(cache.pool, 4, 256, **kw)),{i:[] for i in range(len(prompts))}
    p = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
    for i,ids in enumerate(prompts): eng.add(Request(str(i), tuple(int(t) for t in ids), p))
    while eng.has_work:
        for e in eng.step():
            assert not e.error, e.error
            if e.token is not None: out[int(e.id)].append(e.token)
    assert cache.pool.used==0
    return list(out.values())

@each
def test_greedy_through_the_engine(folder):
    "The tokens themselves, alone and beside others, whole and in chunks"
    r = reference(folder); m = decoder(folder); want = r['greedy'].tolist(); n = len(want)
    assert greedy(m, [r['ids']], n)==[want]
    mates = [r['ids'][:5],r['ids'],r['ids'][::-1][:67]]
    assert greedy(m, mates, n, chunk=64)[1]==want

@each
def test_greedy_through_the_door(folder):
    r = reference(folder)
    out = LLM(str(folder), device='cpu', max_seq_len=256).generate(r['ids'].tolist(), SamplingParams(temperature=0, max_tokens=len(r['greedy']), ignore_eos=True))
    assert out.token_ids==r['greedy'].tolist()

# The same checkpoints as GGUF files, written as llama.cpp's convert_hf_to_gguf.py does it
def permute(w, heads): return w.reshape(heads, 2, len(w)//heads//2, *w.shape[1:]).swapaxes(1, 2).reshape(w.shape)

def rope_freqs(r, theta, dim):
    "What llama.cpp divides the frequencies by, for llama3 scaling"
    n,low,high = r['original_max_position_embeddings'],r['low_freq_factor'],r['high_freq_factor']
    def one(f):
        turns = n*f/2/np.pi; smooth = (turns-low)/(high-low)
        return 1. if turns>high else r['factor'] if turns<low else 1/((1-smooth)/r['factor']+smooth)
    return np.array([one(theta**-(i/dim)) for i in range(0, dim, 2)], np.float32)

def to_gguf(folder, path):
    d,w = json.loads((folder/'config.json').read_text()),gguf.GGUFWriter(path, 'llama')
    r = d.get('rope_parameters') or d.get('rope_scaling') or {}
    theta,heads,kv = r.get('rope_theta') or d['rope_theta'],d['num_attention_heads'],d['num_key_value_heads']
    dim,kind = d.get('head_dim') or d['hidden_size']//heads,r.get('rope_type') or r.get('type')
    w.add_context_length(d['max_position_embeddings']); w.add_embedding_length(d['hidden_size']); w.add_block_count(d['num_hidden_layers'])
    w.add_feed_forward_length(d['intermediate_size']); w.add_head_count(heads); w.add_head_count_kv(kv); w.add_layer_norm_rms_eps(d['rms_norm_eps'])
    w.add_vocab_size(d['vocab_size']); w.add_rope_freq_base(theta); w.add_rope_dimension_count(dim); w.add_key_length(dim); w.add_value_length(dim)
    if kind in ('linear','yarn'): w.add_rope_scaling_type(gguf.RopeScalingType(kind)); w.add_rope_scaling_factor(r['factor'])
    if kind=='yarn': w.add_rope_scaling_orig_ctx_len(r['original_max_position_embeddings']); w.add_rope_scaling_yarn_beta_fast(r['beta_fast']); w.add_rope_scaling_yarn_beta_slow(r['beta_slow'])
    if kind=='llama3': w.add_tensor('rope_freqs.weight', rope_freqs(r, theta, dim))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, d['num_hidden_layers'])
    with open_checkpoint(folder) as ck:
        for name in ck.tensors:
            a = ck.read(name).decode()
            if '.q_proj.' in name or '.k_proj.' in name: a = permute(a, heads if 'q_proj' in name else kv)
            w.add_tensor(names.get_name(name, ('.weight',)), np.ascontiguousarray(a))
    w.write_header_to_file(); w.write_kv_data_to_file(); w.write_tensors_to_file(); w.close()
    return path

@pytest.mark.parametrize('name', ('linear-rope','llama3-rope-sharded','mistral-wide-heads','smollm2-tied','yarn-rope'))
def test_gguf(tmp_path, name):
    "The logits of the safetensors file, whose rows of queries and keys stand in another order, and the reference's greedy tokens"
    folder = next(f for f in folders if f.name==name); r = reference(folder)
    m = LLM(str(to_gguf(folder, tmp_path/'m.gguf')), device='cpu', max_seq_len=256)
    assert np.abs(m.logits(r['ids'])-LLM(str(folder), device='cpu').logits(r['ids'])).max()<1e-5*np.abs(r['logits']).max()
    assert error(m.logits(r['ids']), r['logits'])<TOL
    assert m.generate(r['ids'].tolist(), SamplingParams(temperature=0, max_tokens=len(r['greedy']), ignore_eos=True)).token_ids==r['greedy'].tolist()

# What a reference does not notice it does not test. Each of these would be a plausible mistake; each must be far outside the tolerance.
def rope(**kw): return lambda c: dict(rope=replace(c.rope, **kw))
MISTAKES = {
    'llama3-rope-sharded': [rope(kind='default'), rope(kind='linear'), rope(high_freq_factor=2.), rope(low_freq_factor=.5), rope(original_max=128)],
    'mistral-wide-heads':  [rope(theta=10000.), lambda c: dict(norm_eps=1e-2)],
    'mistral-window':      [lambda c: dict(sliding_window=None), lambda c: dict(sliding_window=22), lambda c: dict(sliding_window=24)],
    'smollm2-tied':        [rope(theta=10000.)],
    'yarn-rope':           [rope(kind='default'), rope(kind='linear'), rope(attention_factor=1.), rope(beta_fast=32.), rope(truncate=False)],
    'linear-rope':         [rope(kind='default'), rope(factor=2.)],
    'biases':              []}

@each
def test_mistakes_are_seen(folder):
    r = reference(folder)
    with open_checkpoint(folder) as ck: c = ck.config
    for change in MISTAKES[folder.name]:
        kw = change(c); e = error(Run(decoder(folder, **kw)).prefill(r['ids']), r['logits'])
        assert e>20*TOL, f'{kw} moves the logits by only {e:.0e}'

@pytest.mark.parametrize('part', ('self_attn.qkv_proj','self_attn.o_proj','mlp.gate_up_proj','mlp.down_proj'))
def test_each_bias_counts(part):
    folder = next(f for f in folders if f.name=='biases')
    m,r = decoder(folder),reference(folder)
    a,b = part.split('.')
    proj = getattr(getattr(m.layers[1], a), b)
    proj.bias = np.zeros_like(proj.bias)
    assert error(Run(m).prefill(r['ids']), r['logits'])>20*TOL
