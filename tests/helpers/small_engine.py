"""A made-up model with recurrent states, run by NumPy, and engines of it: what is asked of them,
what they answer, and that nothing is left behind."""
import functools
import numpy as np
from hypothesis import strategies as st
from atlas.engine.cache import KVCache
from atlas.ground.config import AttentionConfig,DeltaConfig,ModelConfig,RopeConfig
from atlas.card.device import Host
from atlas.engine.engine import Engine
from atlas.engine.stepper import HostStepper
from atlas.model.model import build
from atlas.ops.sample import SamplingParams
from atlas.engine.scheduler import Request,Scheduler

V = 61
CONFIG = ModelConfig('qwen', V, 32,
    ('delta','attention'),
    ('mlp','mlp'),
    AttentionConfig(4, 2, 16, RopeConfig(dim=8)),
    delta=DeltaConfig(2, 4, 8, 8),
    intermediate_size=48,
    max_seq_len=256)

def made_up(config=CONFIG):
    "A model with states, whose answers depend on all that was said"
    m,rng = build(config),np.random.default_rng(0)
    def rand(w):
        scale = 2.5 if 'lm_head' in w.name else 1.
        x = scale*rng.standard_normal(w.shape)/np.sqrt(w.shape[-1])
        x = x.astype('f4')
        if w.name.endswith('.A'):
            return -abs(x)
        is_norm = 'norm' in w.name and len(w.shape)==1
        return x+is_norm
    weights = {w.name: rand(w) for w in m.wants()}
    return m.bind(weights, Host(), 256)
MODEL = made_up()

def small_cache(config, blocks, states, drafting=False):
    "A cache in whose states whatever is not written is no number"
    cache = KVCache(config, MODEL.device, blocks, num_states=states, drafting=drafting)
    for states in (cache.conv, cache.rec):
        for a in states.values():
            a[...] = np.nan
    return cache

def engine(overlap=False, blocks=40, seqs=4,
        stepper=HostStepper, guides=None, drafts=0, **kw):
    "An engine of `MODEL`"
    cache = small_cache(CONFIG, blocks, (2+drafts)*seqs)
    sizes = seqs,200,64
    scheduler = Scheduler(cache.pool, *sizes, drafts=drafts, **kw)
    return Engine(scheduler, stepper(MODEL, cache, overlap), guides)

# What is asked

def every(n):
    "Every `n`th token"
    return tuple(range(0, V, n))

HOWS = [
    {},
    dict(temperature=.9, seed=3),
    dict(logprobs=2),
    dict(temperature=.8, seed=5, logprobs=0,
        presence_penalty=.5, repetition_penalty=1.3),
    dict(stop_token_ids=every(9)),
    dict(min_tokens=3, ignore_eos=False, stop_token_ids=every(6)),
    dict(temperature=1., seed=1, top_p=.8, frequency_penalty=.4),
]

def ask(i, n=10, most=8, priority=0, guide=None, **kw):
    "Request `i`: `n` tokens of its own, and `most` to come"
    prompt = np.random.default_rng(i).integers(0, V, n)
    how = dict(temperature=0, max_tokens=most, ignore_eos=True)|kw
    params = SamplingParams(**how)
    ids = tuple(prompt.tolist())
    return Request(f'r{i}', ids, params, priority, eos_ids=(V-1,), guide=guide)

def drawn(lengths, most, hows=HOWS):
    "A request that hypothesis draws, and when it arrives: what `arrivals` takes"
    return st.tuples(
        st.sampled_from(lengths),  # tokens of its prompt
        st.sampled_from(most),  # tokens at most
        st.sampled_from([0,0,-1,1]),  # priority
        st.sampled_from(hows),
        st.integers(0, 12))  # the step before which it arrives

def arrivals(asks):
    "Requests with the steps before which they arrive"
    out = []
    for i,(n,most,priority,how,at) in enumerate(asks):
        most = max(most, how.get('min_tokens', 0))
        r = ask(i, n, most, priority, **how)
        out.append((r, at))
    return out

def left_clean(e):
    "Nothing of any request is left in an engine that has no work"
    e.land()
    s = e.scheduler
    assert e.flying is None and e.prompt is None and not s.aloft
    assert not getattr(e.stepper, '_air', None)
    assert not e._samplers and s.pool.used==0
    assert not s.seqs and not s.waiting and not s.running and not s.promised
    assert not getattr(e.arbiter, 'limits', None), 'the arbiter knows somebody who has left'
    assert s.states.used==0

def note(events, out):
    "Put each event to those of its request, which must not have ended"
    for ev in events:
        before = out.setdefault(ev.id, [])
        assert not before or not before[-1].finish, f'{ev.id}: an event after the end'
        before.append(ev)

def serve(e, arrivals, aborts=(), most=2000):
    "Events by request, and their ids by step; nothing is left behind"
    out,order,t = {},[],0
    todo = list(arrivals)
    while todo or e.has_work:
        for r,at in todo:
            if at<=t:
                e.add(r)
        todo = [x for x in todo if x[1]>t]
        events = []
        for rid,at in aborts:
            if at==t:
                events += e.abort(rid)
        events += e.step()
        t += 1
        note(events, out)
        order.append([(ev.id, ev.finish) for ev in events])
        assert t<most, 'no end'
    left_clean(e)
    return out,order

def interrupted(holder, name, at, error=KeyboardInterrupt):
    "Raise `error` after call `at` of method `name` of `holder`; what is returned counts its calls"
    calls,real = 0,getattr(holder, name)
    def cut_off(*args, **kw):
        nonlocal calls
        out = real(*args, **kw)
        calls += 1
        if calls==at:
            raise error
        return out
    setattr(holder, name, cut_off)
    return lambda: calls

def said(events):
    "What was said, each token with its probabilities"
    return [(ev.token, ev.logprob, ev.top) for ev in events if ev.token is not None]

def as_alone(mine, want):
    "What was answered is what is answered alone, up to where it was aborted"
    if mine and mine[-1].finish!='abort':
        assert said(mine)==said(want)
        assert mine[-1].finish==want[-1].finish
        assert mine[-1].code==want[-1].code
    else:
        n = len(said(mine))
        assert said(mine)==said(want)[:n]

def tokens(events):
    "The tokens that were said"
    return [token for token,*_ in said(events)]

@functools.cache
def alone(r):
    "What `r` is answered when nothing else exists"
    out,_ = serve(engine(), [(r,0)])
    return out[r.id]
