"""Policies held to their bounds by a fuzzer, in simulated time.

The stand-in for the model is that of the scheduler's tests: what an answer says depends on every row that was computed, and on how.
A clock goes on by what each step takes on a made-up machine, and by what happens between two steps.
Whose patience must be used up is counted here once more, from what was planned alone."""
import random
from collections import Counter,namedtuple
from dataclasses import replace
from math import inf,isfinite
import numpy as np
import pytest
from hypothesis import given,settings,strategies as st
from hypothesis.stateful import RuleBasedStateMachine,initialize,precondition,rule
from atlas.engine.cache import BlockPool
from atlas.engine.policy import Load,Policy,StepTimes,load_of
from atlas.engine.scheduler import Scheduler
from atlas.ground.core import AtlasError,QueueFullError,RequestError
from atlas.ground.requests import MAX_TIMEOUT,Request,SamplingParams
from atlas.ops.linear import TILE
from atlas.service.protocol import anthropic,openai,responses
from helpers.small_engine import ask,engine,left_clean
from test_scheduler import Driver,calls,request

Costs = namedtuple('Costs', 'plain fixed read each')

def seconds(c, load):
    "What a step takes on a machine that reads weights or computes, whichever takes longer"
    chunk = load.chunks*(c.fixed+max(c.read, c.each*(load.tokens+load.replays)))
    return c.plain*bool(load.seqs)+chunk+c.each*load.reach/1e5

machines = st.builds(Costs, *[st.sampled_from(v) for v in (
    (.001,.02,.3), (.001,.01,.2), (0.,.07), (1e-5,1.8e-4,2e-3))])

# -- one scheduler, any policy -------------------------------------------------------------------

class Machine(RuleBasedStateMachine):
    "Requests come, go, run out of time, and step at will"
    @initialize(
        name=st.sampled_from(['slai','fifo']),
        deadline=st.sampled_from([.1,None,.01]),
        max_wait=st.sampled_from([1.,.2,None]),
        costs=machines,
        seqs=st.sampled_from([2,1,4]),
        chunk=st.sampled_from([64,256,512]),
        over=st.sampled_from([1,4]),
        behind=st.booleans(),
        width=st.sampled_from([1,3]))
    def start(self, name, deadline, max_wait, costs, seqs, chunk, over, behind, width):
        self.now,self.costs,self.wait = 0.,costs,max_wait or inf
        self.policy = Policy(name, deadline, max_wait)
        self.sc = Scheduler(BlockPool(60, 16), seqs, 600,
            chunk=chunk, overcommit=over, max_queue=30, drafts=width-1,
            policy=self.policy, clock=lambda: self.now)
        self.sc.width = width
        self.d,self.all,self.seen = Driver(self.sc, behind),[],Counter()
        self.idle,self.resting = Counter(), {} # Seconds without progress; since when
        self.room,self.limits = self.policy.room,{}
        self.policy.room = self.spied
        self.roomed = None

    def spied(self, line, decode, chunk, width, now):
        "What the policy says, which must be legal"
        n = self.room(line, decode, chunk, width, now)
        assert n%TILE==0 and 0<=n<=chunk
        if not (decode and line and self.policy.deadline): assert n==chunk
        if n==0: assert self.policy.name=='slai' and self.roomed!=0
        self.seen['left out'] += n==0
        self.roomed = n
        return n

    @rule(sizes=st.lists(st.integers(1, 560), min_size=1, max_size=4), priority=st.sampled_from([0,0,-1,1]),
        out=st.sampled_from([1,5,30]), timeout=st.sampled_from([None,None,.05,2.]))
    def add(self, sizes, priority, out, timeout):
        for n in sizes:
            if len(self.sc.waiting)>=30: return
            r = request(len(self.all), n, out, priority, n%5, seed=n, ignore_eos=True)
            s = self.sc.add(replace(r, timeout=timeout))
            self.all.append(s)
            self.resting[s] = self.now
            if timeout: self.limits[s] = self.now+timeout

    @precondition(lambda self: self.sc.has_work)
    @rule(i=st.integers(0, 50))
    def leave(self, i):
        live = list(self.sc.seqs.values())
        s = live[i%len(live)]
        self.sc.abort(s.id)
        self.d.note(s, None, 'abort')

    @precondition(lambda self: len(self.sc.waiting))
    @rule(i=st.integers(0, 50), share=st.sampled_from([0,.5,1]))
    def found(self, i, share):
        "A prefix of a waiting prompt turns out to be in the cache"
        waits = list(self.sc.waiting)
        s = waits[i%len(waits)]
        s.there = int(share*s.prompt_len)//TILE*TILE
        self.sc.waiting.push(s)

    @rule(pause=st.sampled_from([.001,.06,.3]))
    def pass_time(self, pause): self.now += pause

    @rule(n=st.sampled_from([1,3,20]))
    def step(self, n):
        for _ in range(n): self.one_step()

    def one_step(self):
        self.expire()
        before = set(self.sc.running)
        real,left = self.sc.schedule,self.sc.totals['preemptions']
        plans = []
        def spy():
            plans.append(real())
            self.judge(plans[0], before, self.sc.totals['preemptions']>left)
            return plans[0]
        self.sc.schedule = spy
        try: self.d.step()
        finally: del self.sc.schedule
        load = load_of(plans[0]) if plans[0] else Load()
        took = seconds(self.costs, load)
        self.now += took
        if plans[0]: self.policy.note(load, took)

    def expire(self):
        due = {s for s,when in self.limits.items() if when<=self.now and s not in self.d.why}
        late = self.sc.expire()
        assert set(late)==due and len(late)==len(due)
        for s in late:
            assert s.finish_reason=='timeout' and not s.table.blocks and s.id not in self.sc.seqs
            self.d.note(s, None, 'timeout')
            self.seen['timeout'] += 1
        assert self.sc.expire()==[]

    def judge(self, plan, before, preempted):
        "Was anybody made to wait who should have gone first?"
        went = {s for s,*_ in plan.prefill+plan.replay} if plan else set()
        for s in self.all: # those who idled until now; they go, idle on, or have left
            live = not s.finish_reason
            since = self.resting.pop(s, None)
            if since is not None: self.idle[s] += self.now-since
            if live and s not in went and s.state!='decode': self.resting[s] = self.now
        spent = [s for s in self.all if not s.finish_reason and self.idle[s]>self.wait+1e-9]
        for s in spent:
            if s in self.resting or s in went: assert s.order[0]==-inf, f'{s} has no patience left'
        self.seen['first'] += sum(s.order[0]==-inf for s in self.resting)
        new = [s for s in self.sc.running if s not in before]
        for s in new if not preempted else (): # who was preempted just now has been admitted before
            for w in self.sc.waiting: self.check_order(s, w)
        self.check_line(went, plan)

    def check_order(self, s, w):
        "`s` was admitted, and `w` was not"
        first,other = (x.order[0]==-inf for x in (s,w))
        if other: assert first and s.arrival<w.arrival, f'{s} overtook {w}'
        elif not first: assert self.rank(s)<self.rank(w), f'{s} overtook {w}'

    def rank(self, s):
        p,n = s.request.priority,s.prompt_len-s.there
        return (p, s.arrival) if self.policy.name=='fifo' else (p, n, s.arrival)

    def check_line(self, went, plan):
        "Whoever has no patience left, and runs, is not passed over for others"
        asked,rows = self.roomed,plan.prefill+plan.replay if plan else []
        for s in self.sc.running:
            if s.order[0]!=-inf or s in went or s.state not in ('prefill','replay'): continue
            ahead = sum(n for o,_,n in rows if o.order[0]==-inf and o.arrival<s.arrival)
            assert asked-ahead<TILE, f'{s} was passed over'

    def teardown(self):
        if not hasattr(self, 'sc'): return
        for _ in range(20_000):
            if not self.sc.has_work: break
            self.one_step()
        sc = self.sc
        assert not sc.has_work and sc.pool.free==60 and sc.waiting.tokens==0
        assert sc.states.used==0
        assert set(self.d.why)==set(self.all) and sum(sc.finished.values())==len(self.all)
        for s in self.all: self.d.check(s)
        sc.schedule()
        assert not sc.policy._due, 'the policy knows somebody who has left'

Machine.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestMachine = Machine.TestCase

@pytest.mark.parametrize('seed', range(60))
def test_crowd(seed):
    "The same machine where it is always crowded"
    rng,m = random.Random(seed),Machine()
    pick = rng.choice
    costs = Costs(pick((.001,.02,.3)), pick((.001,.01,.2)), pick((0.,.07)), pick((1e-5,1.8e-4,2e-3)))
    m.start(pick(['slai','fifo']), pick([.1,None,.01]), pick([1.,.2,None]), costs,
        pick([2,1,4]), pick([64,256,512]), pick([1,4]), pick([0,1]), pick([1,3]))
    for _ in range(25):
        sizes = [rng.randint(1, 560) for _ in range(rng.randint(0, 4))]
        m.add(sizes, pick([0,0,-1,1]), pick([1,5,30]), pick([None,None,.05,2.]))
        if m.sc.has_work and rng.random()<.1: m.leave(rng.randint(0, 50))
        if m.sc.waiting and rng.random()<.2: m.found(rng.randint(0, 50), pick([0,.5,1]))
        if rng.random()<.4: m.pass_time(pick([.001,.06,.3]))
        m.step(pick([1,1,3,20]))
    m.teardown()

@pytest.mark.parametrize('name', ('fifo','slai'))
def test_machine_sees_all(name):
    "A crowd that loses patience, runs out of time, and is asked to wait"
    m = Machine()
    m.start(name, .1, .2, Costs(.02, .01, .07, 1.8e-4), 2, 256, 4, True, 1)
    rng = random.Random(1)
    for i in range(30):
        m.add([rng.randint(1, 560) for _ in range(3)], rng.choice([0,0,-1,1]), 5, rng.choice([None,2.]))
        if m.sc.waiting: m.found(i, rng.choice([0,.5]))
        m.step(4)
        m.pass_time(rng.choice([.001,.06]))
    m.teardown()
    assert m.seen['first']>20 and m.seen['timeout']>5
    assert (m.seen['left out']>0)==(name=='slai')

# -- the order -----------------------------------------------------------------------------------

arrivals = st.lists(st.tuples(st.integers(1, 500), st.sampled_from([0,0,-1,1]), st.integers(0, 30)), min_size=1, max_size=12)

@given(arrivals, st.sampled_from([1,4]))
@settings(deadline=None)
def test_fifo_is_the_order_without_a_policy(asks, over):
    "Step by step the same plans, where nobody has a deadline and nobody waits too long"
    def plans(policy):
        sc,out = Scheduler(BlockPool(60), 3, 600, chunk=128, overcommit=over, policy=policy),[]
        for t in range(400):
            for i,(n,priority,at) in enumerate(asks):
                if at==t: sc.add(request(i, n, 20, priority, ignore_eos=True))
            plan = sc.schedule()
            out.append(repr(plan))
            if plan: sc.commit(plan, [[5]]*len(plan.sampled))
        assert not sc.has_work
        return out
    assert plans(None)==plans(Policy('fifo', 0, 1e6))

def fifo_of_old(waiting): return sorted(waiting, key=lambda s: (s.request.priority, s.arrival))

@given(arrivals)
def test_fifo_admits_by_priority_and_arrival(asks):
    sc = Scheduler(BlockPool(60), 1, 600, policy=Policy(max_wait=None))
    for i,(n,priority,_) in enumerate(asks): sc.add(request(i, n, 1, priority))
    want = fifo_of_old(sc.waiting)
    got = []
    while plan := sc.schedule():
        got += [s for s in plan.seqs if s not in got]
        sc.commit(plan, [[5]]*len(plan.sampled))
    assert got==want

def test_cached_tokens_do_not_count():
    "A long prompt of which all but a little is known goes before a short one"
    sc = Scheduler(BlockPool(200), 2, 2000, chunk=64, policy=Policy('slai'))
    long,short,last = [sc.add(request(i, n, 1)) for i,n in enumerate((1000, 200, 1900))]
    assert [s.id for s in sc.waiting]==['1','0','2']
    long.there = 960
    sc.waiting.push(long)
    assert [s.id for s in sc.waiting]==['0','1','2'] and sc.waiting.tokens==3100
    plan = sc.schedule()
    assert [s for s,*_ in plan.prefill]==[long]
    short.there,long.there = 192,0
    sc.commit(plan, [])
    assert [s for s,*_ in sc.schedule().prefill]==[short]

def siege(policy, lower):
    "A long prompt among short ones that never stop coming; when it gets its first token, and what a step takes"
    now = [0.]
    sc = Scheduler(BlockPool(200), 2, 2000, chunk=128, max_queue=10**6, policy=policy, clock=lambda: now[0])
    x,n,longest = None,0,0.
    for i in range(4000):
        if i==5: x = sc.add(request('x', 1900, 2, priority=int(lower)))
        while len(sc.waiting)<4: n += 1; sc.add(request(n, 60+n%60, 8, ignore_eos=True))
        plan = sc.schedule()
        took = .01+1e-4*plan.num_rows
        now[0],longest = now[0]+took,max(longest, took)
        sc.commit(plan, [[5]]*len(plan.sampled))
        if x and x.outputs: return now[0]-x.born,longest
    return inf,longest

@pytest.mark.parametrize('lower', (False,True))
def test_nobody_starves(lower):
    """The bound: patience, what runs already (at most 8 steps here), those who came before (4 at most, each
    of 10 steps), and its own prompt, 15 chunks"""
    name = 'fifo' if lower else 'slai'
    assert siege(Policy(name), lower)[0]==inf
    for patience in (.5, 3.):
        took,step = siege(Policy(name, max_wait=patience), lower)
        assert patience<took<=patience+(8+40+15)*step

def test_the_impatient_are_not_preempted():
    "Whoever has idled for too long loses its place to no priority"
    now = [0.]
    def run(max_wait):
        sc = Scheduler(BlockPool(40), 1, 600, policy=Policy(max_wait=max_wait), clock=lambda: now[0])
        sc.add(request('first', 60, 50, ignore_eos=True))
        sc.commit(sc.schedule(), [[5]])
        x = sc.add(request('x', 60, 50, ignore_eos=True))
        now[0] += 2
        sc.abort('first')
        sc.commit(sc.schedule(), [[5]])
        sc.add(request('urgent', 60, 5, priority=-1))
        sc.schedule()
        return x.running
    assert [run(w) for w in (None, 1., 5.)]==[False,True,False]

def test_patience_is_kept_through_preemption():
    "Seconds in the queue add up, and those in a step do not count"
    now = [0.]
    sc = Scheduler(BlockPool(40), 1, 600, policy=Policy(max_wait=3.), clock=lambda: now[0])
    x = sc.add(request('x', 60, 500, ignore_eos=True))
    for i,first in enumerate((False,False,True,True)):
        now[0] += 1.1
        plan = sc.schedule()
        sc.commit(plan, [[5]]*len(plan.sampled))
        assert (x.order[0]==-inf)==first, i
        now[0] += 100
        if first: break
        u = sc.add(request(f'u{i}', 60, 1, priority=-1))
        sc.commit(sc.schedule(), [[5]])
        assert not x.running and u.finish_reason

def test_a_step_reads_no_queue():
    "As many calls with 5,000 waiting as with 30, whatever the policy"
    def work(name, waiting):
        now = [0.]
        sc = Scheduler(BlockPool(64), 4, 200, max_queue=20_000, policy=Policy(name, .1, 1e6), clock=lambda: now[0])
        for i in range(waiting): sc.add(request(i, 20, 20, priority=i%3, flavour=i, ignore_eos=True))
        def step():
            plan = sc.schedule()
            sc.commit(plan, [[5]]*len(plan.sampled))
        return [calls(step) for _ in range(12)]
    for name in ('fifo','slai'): assert work(name, 30)==work(name, 5000)

# -- times ---------------------------------------------------------------------------------------

@given(machines, st.sampled_from([.05,.1,.4]), st.integers(1, 8), st.lists(st.floats(.9, 1.1), min_size=30, max_size=30))
@settings(deadline=None)
def test_the_chunk_that_fits(c, deadline, seqs, noise):
    "It is legal, the prediction agrees with it, and in the end it is neither too long nor far too short"
    t,took = StepTimes(),[]
    t.note(Load(seqs=seqs), c.plain)
    for x in noise:
        n = t.tokens_in(deadline, 2048, seqs)
        assert n%TILE==0 and 0<=n<=2048
        n = max(n, TILE)
        load = Load(1, n, 0, seqs)
        took.append(seconds(c, load)*x)
        t.note(load, took[-1])
        times = [t.step(m, seqs) for m in range(TILE, 2049, TILE)]
        assert all(a<=b+1e-12 for a,b in zip(times, times[1:])) and isfinite(times[-1])
    def fits(slack): return max([0]+[m for m in range(TILE, 2049, TILE) if seconds(c, Load(1, m, 0, seqs))<=slack*deadline])
    last = t.tokens_in(deadline, 2048, seqs)
    assert fits(.85)/2-TILE<=last<=fits(1.15)*1.5+3*TILE

@pytest.mark.parametrize('at', (0, 7, 8, 20))
def test_one_slow_step_changes_nothing_for_long(at):
    "The first that compiles, or one in between, a hundred times too slow"
    def sizes(slow):
        t,out = StepTimes(),[]
        t.note(Load(seqs=4), .02)
        for i in range(40):
            n = max(t.tokens_in(.1, 2048, 4), TILE)
            out.append(n)
            t.note(Load(1, n, 0, 4), (.02+.01+1e-4*n)*(100 if i==slow else 1))
        return out
    good,bad = sizes(None),sizes(at)
    assert min(good[20:])>=512
    assert min(bad[max(at+12, 20):])>=448
    if at>=20: assert min(bad[at+1:])>=448, 'one step too slow, and chunks are small'

def wall(policy, c, N=12_000):
    "Times between tokens of four answers while a prompt of N tokens is computed, and how long that takes"
    now,rng = [0.],random.Random(0)
    sc = Scheduler(BlockPool(2000, 64), 8, 20_000, chunk=2048, policy=policy, clock=lambda: now[0])
    times = {}
    def step():
        plan = sc.schedule()
        load = load_of(plan)
        took = seconds(c, load)*rng.uniform(.98, 1.02)
        now[0] += took
        policy.note(load, took)
        for s in plan.sampled: times.setdefault(s.id, []).append(now[0])
        sc.commit(plan, [[5]]*len(plan.sampled))
    sc.add(request('before', 3000, 1))
    while sc.has_work: step()
    for i in range(4): sc.add(request(i, 50, 3000, ignore_eos=True))
    for _ in range(12): step()
    start = now[0]
    sc.add(request('long', N, 1))
    while 'long' not in times: step()
    end = times['long'][0]
    gaps = [b-a for a,b in zip(times['0'], times['0'][1:]) if b>start and a<end]
    return np.quantile(gaps, .99),end-start

@given(plain=st.floats(.003, .02), fixed=st.floats(.001, .01), each=st.floats(2e-5, 2e-4))
@settings(deadline=None, max_examples=25)
def test_both_lines(plain, fixed, each):
    "Where what is fixed leaves room for it: p99 within the deadline and a plain step, the prompt within 1.3 times"
    c = Costs(plain, fixed, 0., each)
    D = max((plain+fixed)/.15, 10*TILE*each)
    _,alone = wall(Policy(), c._replace(plain=0.))
    gap,took = wall(Policy('slai', D), c)
    assert gap<=D+plain
    assert took<=1.3*alone+D

# -- time limits and bounds ----------------------------------------------------------------------

asks = st.lists(st.tuples(st.integers(1, 150), st.integers(1, 12), st.sampled_from([None,.5,3.,9.]), st.integers(0, 12)), min_size=1, max_size=7)

@given(asks, st.booleans(), st.sampled_from(['fifo','slai']), st.sampled_from([None,4]))
@settings(deadline=None, max_examples=40)
def test_time_limits_in_an_engine(asks, late, name, abort):
    "Each request ends exactly once, in time, with the beginning of what it says alone; everything is given back"
    now = [0.]
    e = engine(late, seqs=2, policy=Policy(name, .1, 5.), clock=lambda: now[0])
    reqs = [(replace(ask(i, n, most), timeout=limit), at) for i,(n,most,limit,at) in enumerate(asks)]
    said,ends = {r.id:[] for r,_ in reqs},{}
    def hear(events):
        for v in events:
            assert v.id not in ends, 'an event after the end'
            if v.token is not None: said[v.id].append(v.token)
            if v.finish: ends[v.id] = v.finish,now[0]
    for t in range(400):
        for r,at in reqs:
            if at==t: e.add(r)
        if t==abort: hear(e.abort('r0'))
        hear(e.step())
        now[0] += 1
        if t>12 and not e.has_work: break
    left_clean(e)
    now[0] += 99
    assert not e.scheduler.expire() and not e.scheduler._limits
    assert set(ends)==set(said)
    for r,at in reqs:
        why,when = ends[r.id]
        if r.timeout and why=='timeout': assert r.timeout<=when-at<r.timeout+1
        elif r.timeout: assert when-at<r.timeout+1
        alone = engine()
        alone.add(replace(r, timeout=None))
        whole = [v.token for _ in range(99) if alone.has_work for v in alone.step() if v.token is not None]
        assert said[r.id]==whole[:len(said[r.id])]
        if why=='length': assert said[r.id]==whole

@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.integers(1, 600))
def test_tokens_that_wait(sizes, most):
    "Refused beyond the bound, and never alone"
    sc = Scheduler(BlockPool(60), 1, 600, max_queue_tokens=most)
    for i,n in enumerate(sizes):
        t = sum(s.prompt_len for s in sc.waiting)
        assert sc.waiting.tokens==t
        if t and t+n>most:
            with pytest.raises(QueueFullError, match='tokens are waiting already'): sc.add(request(i, n, 1))
        else: sc.add(request(i, n, 1))
        if i%3==2: sc.schedule()

HELLO = [dict(role='user', content='Hi')]
APIS = {
    'chat': (openai.parse, dict(messages=HELLO)),
    'text': (openai.parse_text, dict(prompt='Hi')),
    'messages': (anthropic.parse, dict(messages=HELLO, max_tokens=9)),
    'responses': (responses.parse, dict(input='Hi'))}

@pytest.mark.parametrize('api', APIS)
def test_timeout_of_a_body(api):
    import json
    parse,body = APIS[api]
    def asked(timeout): return parse(json.dumps(body|dict(timeout=timeout)).encode()).timeout
    assert [asked(v) for v in (None, 3, .5, MAX_TIMEOUT)]==[None, 3, .5, MAX_TIMEOUT]
    for bad in (0, -1, MAX_TIMEOUT+1, '3', [], True):
        with pytest.raises(RequestError) as e: asked(bad)
        assert e.value.param=='timeout'

@pytest.mark.parametrize('bad', (0, -1, MAX_TIMEOUT+1, '3', True, float('nan'), inf))
def test_timeout_of_a_request(bad):
    with pytest.raises(RequestError) as e: Request('a', (1,), SamplingParams(), timeout=bad)
    assert e.value.param=='timeout'

@pytest.mark.parametrize('bad', (dict(name='lifo'), dict(deadline=-1), dict(max_wait=-.1), dict(deadline=inf), dict(max_wait=float('nan'))))
def test_bad_policies(bad):
    with pytest.raises(AtlasError): Policy(**bad)
