"Recurrent states through the engine: a sequence whose layers cannot be cut back gives the same tokens in any company, chunked, preempted, interrupted and in a slot that others used."
import numpy as np, pytest
from hypothesis import given,settings,strategies as st
from atlas.engine.cache import KVCache
from atlas.ground.config import AttentionConfig,DeltaConfig,MambaConfig,ModelConfig,MoEConfig
from atlas.ground.config import RopeConfig
from atlas.card.device import Host
from atlas.engine.engine import Engine
from atlas.engine.stepper import HostStepper
from atlas.model.model import build
from atlas.ops.sample import SamplingParams
from atlas.engine.scheduler import Request,Scheduler

V = 61
att = AttentionConfig(4, 2, 16, RopeConfig(dim=8), qk_norm='head', gate=True)
CONFIGS = dict(
    delta=ModelConfig('qwen', V, 32, ('delta','delta','attention'), ('mlp','moe','mlp'), att, delta=DeltaConfig(2, 4, 8, 8), moe=MoEConfig(6, 2, 16, shared_size=16, shared_gate=True),
        intermediate_size=48, norm_plus_one=True, max_seq_len=256),
    mamba=ModelConfig('nemotron', V, 32, ('mamba','none','attention','mamba','none'), ('none','moe','none','none','mlp'), AttentionConfig(4, 2, 8, None), mamba=MambaConfig(4, 8, 2, 8),
        moe=MoEConfig(6, 2, 16, score='sigmoid', correction=True, scaling=2.5, shared_size=24), intermediate_size=48, act='relu2', max_seq_len=256))

def model(c):
    m,rng = build(c),np.random.default_rng(0)
    def rand(w):
        x = ((2.5 if 'lm_head' in w.name else 1.)*rng.standard_normal(w.shape)/np.sqrt(w.shape[-1])).astype('f4')
        return -abs(x) if w.name.endswith('.A') else x+('norm' in w.name and len(w.shape)==1)
    return m.bind({w.name:rand(w) for w in m.wants()}, Host(), 256)

models = {k:model(c) for k,c in CONFIGS.items()}
each = pytest.mark.parametrize('m', models.values(), ids=models.keys())

def engine(m, blocks=64, seqs=4, **kw):
    cache = KVCache(m.c, Host(), blocks, num_states=2*seqs)
    for a in (*cache.conv.values(),*cache.rec.values()):
        a[...] = np.nan  # nobody may rely on a clean slot
    s = Scheduler(cache.pool, seqs, 256, **kw)
    return Engine(s, HostStepper(m, cache))

def run(eng, prompts, n=12):
    out = {str(i):[] for i in range(len(prompts))}
    for i,p in enumerate(prompts):
        eng.add(Request(str(i), tuple(p), SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)))
    while eng.has_work:
        for e in eng.step():
            assert not e.error, e.error
            if e.token is not None:
                out[e.id].append(e.token)
    s = eng.scheduler
    assert s.pool.used==0 and s.states.used==0
    return list(out.values())

def prompt(seed, n): return np.random.default_rng(seed).integers(0, V, n).tolist()

@each
def test_company_and_chunks(m):
    ps = [prompt(1, 3),prompt(2, 70),prompt(3, 129),prompt(4, 64)]
    alone = [run(engine(m), [p])[0] for p in ps]
    assert len(set(map(tuple, alone)))==4  # the prompts matter
    assert run(engine(m), ps)==alone
    assert run(engine(m, chunk=64), ps)==alone
    assert run(engine(m, seqs=2), ps+ps)==alone+alone  # slots used again

@each
def test_preempted(m):
    ps = [prompt(5, 30),prompt(6, 70),prompt(7, 9)]
    alone = [run(engine(m), [p], 70)[0] for p in ps]
    eng = engine(m, blocks=16, overcommit=4.)
    assert run(eng, ps, 70)==alone
    assert eng.stats()['num_preemptions_total']>0

@each
def test_interrupted(m):
    "A step that fails half-way has spoilt states: its sequence begins anew, which takes a few steps"
    p = prompt(8, 70)
    want = run(engine(m), [p])[0]
    eng,calls,head = engine(m),[0],type(m).head
    def failing(self, *args):
        calls[0] += 1
        if calls[0]%7==0:
            raise KeyboardInterrupt  # the states are written by now, where they were read
        return head(self, *args)
    eng.add(Request('0', tuple(p), SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)))
    got = []
    with pytest.MonkeyPatch.context() as mp:
        mp.setattr(type(m), 'head', failing)
        while eng.has_work:
            try:
                got += [e.token for e in eng.step() if e.token is not None]
            except KeyboardInterrupt:
                pass
    assert calls[0]>12 and got==want

@each
def test_aborted_slots_come_back(m):
    eng = engine(m, seqs=1)
    for k in range(3):
        eng.add(Request(str(k), tuple(prompt(k, 20)), SamplingParams(temperature=0, max_tokens=30)))
        eng.step()
        eng.step()
        eng.abort(str(k))
    assert run(eng, [prompt(9, 40)])==run(engine(m), [prompt(9, 40)])

@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1,100), st.integers(0,6)), min_size=1, max_size=5), st.sampled_from([64,128]), st.sampled_from(list(models)))
def test_any_arrival(arrivals, chunk, name):
    "Requests that come whenever they like"
    m = models[name]
    eng,out,todo,t = engine(m, chunk=chunk),{},sorted(enumerate(arrivals), key=lambda a: a[1][1]),0
    while todo or eng.has_work:
        while todo and todo[0][1][1]<=t:
            i,(n,_) = todo.pop(0)
            eng.add(Request(str(i), tuple(prompt(n, n)), SamplingParams(temperature=0, max_tokens=5, ignore_eos=True)))
        for e in eng.step():
            out.setdefault(e.id, []).append(e.token)
        t += 1
    for i,(n,_) in enumerate(arrivals):
        assert out[str(i)]==run(engine(m), [prompt(n, n)], 5)[0]
