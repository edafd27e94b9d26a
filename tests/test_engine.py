"""The engine's loop, without kernels: steps that land at once, and steps that stay in the air until the next one is launched, as a card's do.

A made-up model is run by NumPy. Whatever comes, goes, ends and fails, a request is answered as it is alone, at once or late."""
from types import SimpleNamespace
import numpy as np,pytest
from hypothesis import given,settings,strategies as st
from atlas.engine.cache import KVCache
from atlas.ground.config import AttentionConfig,DeltaConfig,ModelConfig,RopeConfig
from atlas.card.device import Host
from atlas.engine.engine import Engine,Flight,HostStepper
from atlas.model.model import build
from atlas.ops.sample import Sampled,SamplingParams
from atlas.engine.scheduler import Request,Scheduler

V = 61
CONFIG = ModelConfig('qwen', V, 32, ('delta','attention'), ('mlp','mlp'),
    AttentionConfig(4, 2, 16, RopeConfig(dim=8)), delta=DeltaConfig(2, 4, 8, 8),
    intermediate_size=48, max_seq_len=256)

def made_up():
    "A model with states, whose answers depend on all that was said"
    m,rng = build(CONFIG),np.random.default_rng(0)
    def rand(w):
        x = ((2.5 if 'lm_head' in w.name else 1.)*rng.standard_normal(w.shape)
            /np.sqrt(w.shape[-1])).astype('f4')
        return -abs(x) if w.name.endswith('.A') else x+('norm' in w.name and len(w.shape)==1)
    return m.bind({w.name:rand(w) for w in m.wants()}, Host(), 256)
MODEL = made_up()

def engine(overlap=False, blocks=40, seqs=4, stepper=HostStepper, guides=None, **kw):
    cache = KVCache(CONFIG, MODEL.device, blocks, num_states=2*seqs)
    for a in (*cache.conv.values(), *cache.rec.values()): a[...] = np.nan
    return Engine(Scheduler(cache.pool, seqs, 200, 64, **kw),
        stepper(MODEL, cache, overlap), guides)

def ask(i, n=10, most=8, priority=0, guide=None, **kw):
    how = dict(temperature=0, max_tokens=most, ignore_eos=True)|kw
    return Request(f'r{i}', tuple(np.random.default_rng(i).integers(0, V, n).tolist()),
        SamplingParams(**how), priority, eos_ids=(V-1,), guide=guide)

def serve(e, arrivals, aborts=(), most=2000):
    "Events by request, and their ids by step; nothing is left behind"
    out,order,todo,gone,t = {},[],list(arrivals),[],0
    while todo or e.has_work:
        for r in [r for r,at in todo if at<=t]: e.add(r)
        todo = [x for x in todo if x[1]>t]
        for rid in [rid for rid,at in aborts if at==t]: gone += e.abort(rid)
        events = [*gone, *e.step()]
        gone.clear(); t += 1
        for ev in events:
            assert not (was := out.setdefault(ev.id, [])) or not was[-1].finish, \
                f'{ev.id}: an event after the end'
            was.append(ev)
        order.append([(ev.id, ev.finish) for ev in events])
        assert t<most, 'no end'
    e.land()
    s = e.scheduler
    assert e.flying is None and not e._samplers and s.pool.used==0 \
        and not getattr(e.stepper, '_air', None)
    assert sorted(i for p in s.states for i in p)==list(range(2*s.max_num_seqs))
    return out,order

def said(events): return [(ev.token, ev.logprob, ev.top) for ev in events if ev.token is not None]
_alone = {}
def alone(r):
    "What `r` is answered when nothing else exists"
    if r not in _alone: _alone[r] = serve(engine(), [(r,0)])[0][r.id]
    return _alone[r]

HOWS = [{}, dict(temperature=.9, seed=3), dict(logprobs=2),
    dict(temperature=.8, seed=5, presence_penalty=.5, repetition_penalty=1.3, logprobs=0),
    dict(stop_token_ids=tuple(range(0, V, 7))),
    dict(min_tokens=3, ignore_eos=False, stop_token_ids=tuple(range(0, V, 2))),
    dict(temperature=1., seed=1, top_p=.8, frequency_penalty=.4)]
one = st.tuples(st.sampled_from([1,5,63,64,70,130]), st.sampled_from([1,2,7,20]),
    st.sampled_from([0,0,-1,1]), st.sampled_from(HOWS), st.integers(0, 12))

@settings(max_examples=60, deadline=None)
@given(st.lists(one, min_size=1, max_size=8), st.sampled_from([13,16,40]),
    st.sampled_from([1,2,4]), st.sampled_from([1.,4.]),
    st.lists(st.tuples(st.integers(0, 7), st.integers(0, 40)), max_size=3))
def test_late_as_at_once(asks, blocks, seqs, over, aborts):
    "Random arrivals, aborts, priorities and pools: everybody's tokens are those of the same request alone, whenever steps land"
    arrivals = [(ask(i, n, max(most, how.get('min_tokens', 0)), priority, **how), at)
        for i,(n,most,priority,how,at) in enumerate(asks)]
    gone = [(f'r{i}', at) for i,at in aborts]
    for late in (False,True):
        got,_ = serve(engine(late, blocks, seqs, overcommit=over), arrivals, gone)
        for r,_ in arrivals:
            mine,want = got.get(r.id, []),said(alone(r))
            if mine and mine[-1].finish!='abort':
                assert (said(mine), mine[-1].finish)==(want, alone(r)[-1].finish)
            else: assert said(mine)==want[:len(said(mine))]

def test_the_next_step_is_launched_before_the_last_one_lands():
    calls = []
    class Told(HostStepper):
        def launch(self, plan, samplers):
            calls.append(('launch', len(calls)))
            return super().launch(plan, samplers)
        def land(self, flight):
            calls.append(('land', len(calls)))
            return super().land(flight)
    def kinds(late):
        calls.clear(); serve(engine(late, stepper=Told), [(ask(0, most=4),0)])
        return [k for k,_ in calls]
    assert kinds(False)==['launch','land']*4
    # the prompt, and three steps
    assert kinds(True)==['launch','land', 'launch','launch','land','launch','land','land']

def test_late_by_one_step():
    "The same events, those of decoding one step later, and no more steps than that"
    arrivals = [(ask(0, 70, 9),0), (ask(1, 5, 12),3)]
    (a,x),(b,y) = (serve(engine(late), arrivals) for late in (False,True))
    assert {k:said(v) for k,v in a.items()}=={k:said(v) for k,v in b.items()} \
        and len(x)<len(y)<=len(x)+3

def test_aborted_in_the_air():
    e = engine(True)
    for i in (0,1): e.add(ask(i, most=30))
    for _ in range(4): e.step()
    assert e.flying and [v.finish for v in e.abort('r0')]==['abort'] and e.abort('r0')==[]
    e.add(ask(0, 20, 5))  # the id is free at once, although its old row is still under way
    got,_ = serve(e, [])
    assert said(got['r0'])==said(alone(ask(0, 20, 5))) and got['r1'][-1].finish=='length'

@pytest.mark.parametrize('late', (False,True))
def test_an_end_while_somebody_has_to_leave(late):
    "A step is planned at the cost of a sequence, and then the answer it was for turns out to have ended with the step before"
    i = next(i for i in range(99) if (x := [t for t,*_ in said(alone(ask(i)))])[6] not in x[:6])
    r = ask(i, most=9, stop_token_ids=(said(alone(ask(i)))[6][0],)) # its eighth token would need a second block
    other = ask(100, 180, 12, priority=1) # has all others
    e = engine(late, blocks=13, overcommit=4.)
    got,_ = serve(e, [(other,0), (r,3)])
    assert len(said(got[r.id]))==7 and got[r.id][-1].finish=='stop' and e.scheduler.totals['preemptions']==late
    assert said(got[other.id])==said(alone(other))

@pytest.mark.parametrize('late', (False,True))
def test_logits_that_are_no_numbers(late):
    "The row fails, also when its next one is under way already, and nobody else notices"
    e = engine(late)
    for i in (0,1): e.add(ask(i, 20, 12))
    got = [v for _ in range(4) for v in e.step()]
    e.cache.kv[1].k[e.scheduler.seqs['r0'].table.blocks[0]] = np.nan
    rest,_ = serve(e, [])
    assert (rest['r0'][-1].code, e.stats()['corrupted_requests_total'])==('corrupted_output', 1)
    assert said([v for v in got if v.id=='r1']+rest['r1'])==said(alone(ask(1, 20, 12)))

@pytest.mark.parametrize('late', (False,True))
def test_a_prompt_without_memory(late):
    e = engine(late); launch = e.stepper.launch
    def tight(plan, samplers):
        if any(s.id=='r1' for s,*_ in plan.prefill): raise MemoryError
        return launch(plan, samplers)
    e.stepper.launch = tight
    got,_ = serve(e, [(ask(0, most=9),0), (ask(1, 20),3)])
    assert got['r1'][-1].code=='out_of_memory' and said(got['r0'])==said(alone(ask(0, most=9)))

@pytest.mark.parametrize('at', range(1, 9))
@pytest.mark.parametrize('late', (False,True))
def test_interrupted(late, at):
    "A launch that an impatient reader's Ctrl-C ends half-way has destroyed nothing"
    e,n,head = engine(late),0,type(MODEL).head
    def failing(self, *rows):
        nonlocal n
        n += 1
        if n==at: raise KeyboardInterrupt
        return head(self, *rows)
    e.add(ask(0, 70, 6)); got = []
    with pytest.MonkeyPatch.context() as mp:
        mp.setattr(type(MODEL), 'head', failing)
        while e.has_work:
            try: got += e.step()
            except KeyboardInterrupt: pass
    assert said(got)==said(alone(ask(0, 70, 6)))

# Guides

class Guide:
    "Lets each of `may` come once, in that order; then it is whole"
    error,code = None,'guide_failed'
    def __init__(self, may): self.may,self.n = may,0
    ended = property(lambda self: self.n>=len(self.may))
    def accept(self, t): self.n += 1
    def mask(self):
        bits = np.zeros(-(-V//32)*32, bool)
        if not self.ended: bits[self.may[self.n]] = True
        return np.packbits(bits, bitorder='little').view(np.uint32)
GUIDES = SimpleNamespace(start=Guide)

@pytest.mark.parametrize('late', (False,True))
def test_guides(late):
    "A step with a guided sequence lands before the next is planned, one without does not"
    e = engine(late, guides=GUIDES); flown = []
    e.add(ask(0, most=20)); e.add(ask(1, most=20, guide=[7,3,9]))
    while e.has_work:
        events = e.step(); flown.append((len(e._samplers), e.flying is not None, events))
    mine = [v for _,_,events in flown for v in events if v.id=='r1']
    assert ([v.token for v in mine], mine[-1].finish)==([7,3,9,None],'stop')
    assert said([v for _,_,events in flown for v in events if v.id=='r0'])==said(alone(ask(0, most=20)))
    assert any(f for _,f,_ in flown)==late

# Steps that accept several tokens of a sequence

class Scripted(HostStepper):
    "Gives of each sequence what `says(seq, k)` lists for its `k`-th decode step; the first token is the model's, and is a 1"
    says = None
    def launch(self, plan, samplers):
        for s in samplers: s.row()
        new = [[1]]*len(plan.first)+[self.says(s, self.turn(s)) for s in plan.decode]
        ids = np.full((len(new),plan.width), -1, np.int32)
        for row,t in zip(ids, new): row[:len(t)] = t
        probs = -ids.astype(np.float32)
        return Flight(plan, Sampled(ids, probs, ids[:,:,None], probs[:,:,None], np.array([len(t) for t in new], np.int32)))
    def land(self, flight): return flight.sampled
    def turn(self, seq):
        k = self._air[seq] = self._air.get(seq, 0)+1
        return k-1

def scripted(late, says, requests, **kw):
    "What comes of `requests` when a step of three rows says what `says` has"
    e = engine(late, stepper=Scripted, **kw); e.scheduler.width = 3; e.stepper.says = says
    for r in requests: e.add(r)
    out,bounds = {},set()
    while e.has_work:
        assert e.steps<500, 'no end'
        for v in e.step(): out.setdefault(v.id, []).append(v)
        bounds |= {(s.num_computed-len(s)+1, s.flying) for s in e.scheduler.running if s.state=='decode'}
    e.land()
    assert not e._samplers and e.scheduler.pool.used==0 and e.cache.pool.used==0
    assert all(ahead==3*flying for ahead,flying in bounds), 'what was rejected was not taken back'
    return e,out
def tokens(events): return [v.token for v in events if v.token is not None]

@pytest.mark.parametrize('late', (False,True))
def test_several_tokens_a_step(late):
    "Each accepted token is an event, with its own log probability; what was rejected is not"
    says = lambda s,k: [[2,3,4],[5],[6,7]][k%3]
    _,got = scripted(late, says, [ask(0, 20, 14, logprobs=1), ask(1, 5, 9)])
    assert tokens(got['r0'])==[1, 2,3,4, 5, 6,7, 2,3,4, 5, 6,7, 2] and tokens(got['r1'])==[1, 2,3,4, 5, 6,7, 2,3]
    assert [(v.logprob, v.top) for v in got['r0'][1:4]]==[(-t, [(t,-t)]) for t in (2.,3.,4.)]
    assert [v.finish for v in got['r0']]==[None]*13+['length'] and [v.waited is None for v in got['r0']]==[False]+[True]*13
    assert all(v.logprob is None for v in got['r1'])

@pytest.mark.parametrize('late', (False,True))
def test_an_end_in_the_middle(late):
    "A stop token, the last token there is room for, and a guide's end, with more behind them"
    says = lambda s,k: [2,3,4]
    _,got = scripted(late, says, [ask(0, 20, 30, stop_token_ids=(3,)), ask(1, 9, 6), ask(2, 9, 30, guide=[1,2,3,4,2,3]), ask(3, 9, 30, guide=[1,2,3])], guides=GUIDES)
    assert tokens(got['r0'])==[1,2,3] and got['r0'][-1].finish=='stop' and got['r0'][-1].token==3
    assert tokens(got['r1'])==[1,2,3,4,2,3] and got['r1'][-1].finish=='length'
    assert tokens(got['r2'])==[1,2,3,4,2,3] and (got['r2'][-1].token, got['r2'][-1].finish)==(None,'stop')
    assert tokens(got['r3'])==[1,2,3] and (got['r3'][-1].token, got['r3'][-1].finish)==(None,'stop')

@pytest.mark.parametrize('late', (False,True))
def test_nothing_accepted_is_a_failure(late):
    _,got = scripted(late, lambda s,k: [] if s.id=='r0' and k==2 else [2,3], [ask(0, 20, 30), ask(1, 9, 8)])
    assert (tokens(got['r0']), got['r0'][-1].code)==([1,2,3,2,3],'corrupted_output') and tokens(got['r1'])==[1,2,3,2,3,2,3,2]

@pytest.mark.parametrize('late', (False,True))
def test_several_tokens_and_little_room(late):
    "Sequences push each other out, and are replayed to where they were"
    says = lambda s,k: [[2,3,4],[5],[6,7]][k%3]
    e,got = scripted(late, says, [ask(i, 30, 40) for i in range(4)], blocks=13, overcommit=4.)
    assert e.scheduler.totals['preemptions']>1 and e.scheduler.totals['replay_tokens']>9
    for v in got.values(): assert tokens(v)==([1]+[2,3,4,5,6,7]*7)[:40] and v[-1].finish=='length'

def test_what_is_compiled_late_is_counted():
    "One list, and its length among the numbers; none before the engine is warm"
    e = engine()
    assert (e.late, e.stats()['jit_after_ready_total'])==(None, 0)
    e.warm()
    e.late += ['gemv','rope']
    assert e.stats()['jit_after_ready_total']==2
