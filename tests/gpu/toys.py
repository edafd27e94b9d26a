"""Models that load in a second and have the mixers, norms, head sizes and weight formats of those
they stand for; and what the scripts beside this one share."""
import argparse,sys,time
from contextlib import contextmanager
import numpy as np
from atlas.card.variants import make_ready
from atlas.engine.card_stepper import CardStepper
from atlas.ground.config import PRESETS
from atlas.use.llm import LLM
from atlas.ops.sample import SamplingParams
from atlas.engine.scheduler import Request

_SMALL = dict(
    hidden_size=512, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
    head_dim=128, intermediate_size=768, vocab_size=4096,
    max_position_embeddings=4096, bos_token_id=1, eos_token_id=2)
_MOE = dict(num_experts=32, num_experts_per_tok=4, moe_intermediate_size=256)
_GDN = dict(
    head_dim=256, linear_num_key_heads=4, linear_num_value_heads=8,
    shared_expert_intermediate_size=256, vision_config=None, mtp_num_hidden_layers=0,
    image_token_id=None, video_token_id=None)
TOYS = {
    'llama': ('llama-3.1-8b', {}, 'fp8'),
    'smollm': (
        'smollm2-135m',
        dict(head_dim=64, num_attention_heads=9, num_key_value_heads=3, hidden_size=576),
        'bf16'),
    'mistral': ('mistral-7b-v0.3', dict(sliding_window=100), 'nvfp4'),
    'qwen3-moe': ('qwen3-30b-a3b', _MOE, 'nvfp4'), 'qwen3.5': ('qwen3.6-27b', _GDN, 'nvfp4'),
    'qwen3.6-moe': ('qwen3.6-35b-a3b', _GDN|_MOE, 'nvfp4'),
    'gpt-oss': (
        'gpt-oss-20b',
        dict(head_dim=64, num_local_experts=32, num_experts_per_tok=4, intermediate_size=320),
        None),
    'gemma': (
        'gemma-4-26b-a4b',
        dict(
            num_hidden_layers=6, head_dim=256, global_head_dim=512, num_global_key_value_heads=1,
            num_experts=32, top_k_experts=4, moe_intermediate_size=192, sliding_window=100),
        'nvfp4-experts'),
    'nemotron': ('nemotron-3-nano-30b-a3b', dict(
        hybrid_override_pattern='MEM*E', num_hidden_layers=5, mamba_num_heads=16, n_groups=2,
        n_routed_experts=32, num_experts_per_tok=4, moe_intermediate_size=160,
        moe_shared_expert_intermediate_size=320), 'nvfp4'),
    'granite': ('granite-4.0-h-tiny', dict(
        layer_types=['mamba','mamba','attention','mamba'],
        mamba_n_heads=16,
        mamba_d_head=64,
        num_local_experts=32,
        num_experts_per_tok=4,
        intermediate_size=256,
        shared_intermediate_size=512), 'nvfp4'),
    'minimax': (
        'minimax-m2', dict(num_local_experts=32, num_experts_per_tok=4, intermediate_size=256),
        'fp8')}
TOYS['qwen3.6-drafts'] = 'qwen3.6-35b-a3b',_GDN|_MOE|dict(mtp_num_hidden_layers=1),'nvfp4'
_TINY = dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=32,
    intermediate_size=64, vocab_size=256)
_TINIER = {
    'qwen3.5': dict(
        num_hidden_layers=4, linear_num_key_heads=1, linear_num_value_heads=2,
        linear_key_head_dim=32, linear_value_head_dim=32),
    'gemma': dict(
        num_hidden_layers=6, global_head_dim=64, num_experts=4, top_k_experts=2,
        moe_intermediate_size=32, sliding_window=16),
    'nemotron': dict(
        num_hidden_layers=5, mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=16,
        n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32),
    'granite': dict(
        num_hidden_layers=3,
        layer_types=['mamba','attention','mamba'],
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        intermediate_size=32,
        shared_intermediate_size=32),
    'gpt-oss': dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=16)}
_TINIER['qwen3.6-moe'] = _TINIER['qwen3.5']|dict(
    num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
    shared_expert_intermediate_size=32)

_TINIER['qwen3.6-drafts'] = _TINIER['qwen3.6-moe']

def toy_shape(
        name:str, emulator:bool=False)->tuple: # A key of `PRESETS`, and how its weights are stored
    "The shape of a toy"
    base,own,weights = TOYS[name]
    tiny = _TINY|_TINIER.get(name, {}) if emulator else {}
    PRESETS[f'toy-{name}'] = PRESETS[base]|_SMALL|own|tiny
    return f'toy-{name}',weights

def toy(
        name:str, emulator:bool=False, seqs:int=8,
        context:int=512, **kw)->LLM:
    "A toy, or with the name of a preset that one itself, with made-up weights"
    if name not in TOYS:
        return LLM(
            name, 'cuda', context, seqs, load_format='dummy',
            **dict(weights='nvfp4', lm_head_dtype='nvfp4')|kw)
    from atlas.card.emulator import Emulator
    shape,weights = toy_shape(name, emulator)
    kw.setdefault('kv_cache_memory', 1<<24 if emulator else 1<<30)
    return LLM(
        shape, Emulator() if emulator else 'cuda', context, seqs, load_format='dummy',
        **dict(weights=weights)|kw)

def prompt(n:int, vocab:int, seed:int)->tuple:
    return tuple(np.random.default_rng(seed).integers(3, vocab, n).tolist())

def greedy(rid, ids, n:int, **kw)->Request:
    return Request(
        rid, ids,
        SamplingParams(**dict(temperature=0, max_tokens=n, ignore_eos=True)|kw))

def serve(e, requests:list)->dict:
    """Tokens and log probabilities of `requests`, pairs of a request and the step it comes at; an
    answer that does not end by its length is a fault"""
    out = {r.id:[] for r,_ in requests}
    todo = list(requests)
    step = 0
    while todo or e.has_work:
        for r,at in [x for x in todo if x[1]<=step]:
            e.add(r)
            todo = [x for x in todo if x[0] is not r]
        for ev in e.step():
            if ev.token is not None:
                out[ev.id].append((ev.token, ev.logprob))
            if ev.finish and ev.finish!='length':
                raise SystemExit(f'{ev.id} ended with {ev.finish}: {ev.error}')
        step += 1
    return out

def arguments(doc, **more):
    "The command line: `--emulator`, and `more`"
    p = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('--emulator', action='store_true', help='tiny, without a card')
    for k,v in more.items():
        p.add_argument('--'+k.replace('_', '-'), **v)
    return p.parse_args()

@contextmanager
def ready_for(steps):
    "While open, an engine's start makes ready only what `steps(stepper)` launches, which is quick"
    def warm(self):
        with self.here():
            make_ready(self.card, lambda: steps(self))
    before,CardStepper.warm = CardStepper.warm,warm
    try:
        yield
    finally:
        CardStepper.warm = before

_began = time.perf_counter()
def verdict(bad:list, good:str):
    "Say it, and end"
    for b in bad:
        print('FAILED', b)
    print(f'{"failed" if bad else "ok"}: {good} ({time.perf_counter()-_began:.0f} s)', flush=True)
    sys.exit(bool(bad))
