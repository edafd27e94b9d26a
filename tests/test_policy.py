"""Policies held to their bounds by a fuzzer, in simulated time.

The stand-in for the model is that of the scheduler's tests: what an answer says depends on every
row that was computed, and on how. A clock goes on by what each step takes on a made-up machine, and
by what happens between two steps.
Whose patience must be used up is counted here once more, from what was planned alone."""
import json,random
from collections import Counter,namedtuple
from contextlib import nullcontext
from dataclasses import replace
from math import inf,isfinite
from types import SimpleNamespace
import numpy as np
import pytest
from hypothesis import example,given,settings,strategies as st
from hypothesis.stateful import RuleBasedStateMachine,initialize,precondition,rule
from atlas.engine.cache import BlockPool
from atlas.engine.policy import Load,Policy,StepTimes,load_of
from atlas.engine.scheduler import Scheduler
from atlas.ground.core import AtlasError,QueueFullError,RequestError
from atlas.ground.requests import MAX_TIMEOUT,Request,SamplingParams
from atlas.ops.linear import TILE
from atlas.service.protocol import anthropic,openai,responses
from atlas.service.remote import RemoteRunner
from helpers.small_engine import alone,ask,engine,left_clean
from test_scheduler import Driver,calls,request

Costs = namedtuple('Costs', 'plain fixed read each')
SIZES = range(TILE, 2049, TILE)

def scheduler(policy=None, seqs=1, blocks=60, length=600, **kw):
    "A scheduler in simulated time, and its clock: a list of one number"
    now = [0.]
    return Scheduler(BlockPool(blocks), seqs, length, policy=policy, clock=lambda: now[0], **kw),now

def step(sc):
    "A step in which everybody says 5; its plan"
    if plan := sc.schedule():
        sc.commit(plan, [[5]]*len(plan.sampled))
    return plan

def seconds(c, load):
    "What a step takes on a machine that reads weights or computes, whichever takes longer"
    chunk = load.chunks*(c.fixed+max(c.read,
        c.each*(load.tokens+load.replays)))
    return c.plain*bool(load.seqs)+chunk+c.each*load.reach/1e5

COSTS = (.001,.02,.3),(.001,.01,.2),(0.,.07),(1e-5,1.8e-4,2e-3)
machines = st.builds(Costs, *map(st.sampled_from, COSTS))
STARTS = dict(
    name=['slai','fifo'],
    deadline=[.1,None,.01],
    max_wait=[1.,.2,None],
    seqs=[2,1,4],
    chunk=[64,256,512],
    over=[1,4],
    behind=[False,True],
    width=[1,3])

# -- one scheduler, any policy -------------------------------------------------------------------

class Machine(RuleBasedStateMachine):
    "Requests come, go, run out of time, and step at will"
    @initialize(costs=machines,
        **{k:st.sampled_from(v)
            for k,v in STARTS.items()})
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
        if not (decode and line and self.policy.deadline):
            assert n==chunk
        if n==0:
            assert self.roomed!=0
        self.seen['left out'] += n==0
        self.roomed = n
        return n

    @rule(
        sizes=st.lists(st.integers(1, 560), min_size=1,
            max_size=4),
        priority=st.sampled_from([0,0,-1,1]),
        out=st.sampled_from([1,5,30]),
        timeout=st.sampled_from([None,None,.05,2.]))
    def add(self, sizes, priority, out, timeout):
        for n in sizes:
            if len(self.sc.waiting)>=30:
                return
            r = request(len(self.all), n, out, priority,
                n%5, seed=n, ignore_eos=True)
            s = self.sc.add(replace(r, timeout=timeout))
            self.all.append(s)
            self.resting[s] = self.now
            if timeout:
                self.limits[s] = self.now+timeout

    @precondition(lambda self: self.sc.has_work)
    @rule(i=st.integers(0, 50))
    def leave(self, i):
        live = list(self.sc.seqs.values())
        s = live[i%len(live)]
        self.sc.abort(s.id)
        self.d.note(s, None, 'abort')

    @precondition(lambda self: len(self.sc.waiting))
    @rule(i=st.integers(0, 50),
        share=st.sampled_from([0,.5,1]))
    def found(self, i, share):
        "A prefix of a waiting prompt turns out to be in the cache"
        waits = list(self.sc.waiting)
        s = waits[i%len(waits)]
        s.there = int(share*s.prompt_len)//TILE*TILE
        self.sc.waiting.push(s)

    @rule(pause=st.sampled_from([.001,.06,.3]))
    def pass_time(self, pause):
        self.now += pause

    @rule(n=st.sampled_from([1,3,20]))
    def step(self, n):
        for _ in range(n):
            self.one_step()

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
        try:
            self.d.step()
        finally:
            del self.sc.schedule
        load = load_of(plans[0]) if plans[0] else Load()
        took = seconds(self.costs, load)
        self.now += took
        if plans[0]:
            self.policy.note(load, took)

    def expire(self):
        due = {s
            for s,when in self.limits.items() if when<=self.now and s not in self.d.why}
        late = self.sc.expire()
        assert set(late)==due and len(late)==len(due)
        for s in late:
            assert s.finish_reason=='timeout' and not s.table.blocks and s.id not in self.sc.seqs
            self.d.note(s, None, 'timeout')
            self.seen['timeout'] += 1
        assert self.sc.expire()==[]

    def judge(self, plan, before, preempted):
        "Was anybody made to wait who should have gone first?"
        rows = plan.prefill+plan.replay if plan else []
        self.count(went := {s for s,*_ in rows})
        new = [s for s in self.sc.running if s not in before]
        for s in new if not preempted else (): # who was preempted just now was admitted before
            for w in self.sc.waiting:
                self.check_order(s, w)
        self.check_line(went, rows)

    def count(self, went):
        """Whoever has idled until now goes, idles on, or has left; and is first if it was for too
        long"""
        for s in self.all:
            since = self.resting.pop(s, None)
            if since is not None:
                self.idle[s] += self.now-since
            idles = not s.finish_reason and s not in went and s.state!='decode'
            if idles:
                self.resting[s] = self.now
            spent = self.idle[s]>self.wait+1e-9
            if spent and (idles or s in went):
                assert s.order[0]==-inf, f'{s} has no patience left'
        self.seen['first'] += sum(s.order[0]==-inf
            for s in self.resting)

    def check_order(self, s, w):
        "`s` was admitted, and `w` was not"
        first,other = (x.order[0]==-inf for x in (s,w))
        if other:
            assert first and s.arrival<w.arrival, f'{s} overtook {w}'
        elif not first:
            assert self.rank(s)<self.rank(w), f'{s} overtook {w}'

    def rank(self, s):
        p,n = s.request.priority,s.prompt_len-s.there
        return (p, s.arrival) if self.policy.name=='fifo' else (p,
            n, s.arrival)

    def check_line(self, went, rows):
        "Whoever has no patience left, and runs, is not passed over for others"
        for s in self.sc.running:
            waits = s not in went and s.state in ('prefill','replay')
            if s.order[0]!=-inf or not waits:
                continue
            ahead = sum(n
                for o,_,n in rows if o.order[0]==-inf and o.arrival<s.arrival)
            assert self.roomed-ahead<TILE, f'{s} was passed over'

    def teardown(self):
        if not hasattr(self, 'sc'):
            return
        for _ in range(20_000):
            if not self.sc.has_work:
                break
            self.one_step()
        sc = self.sc
        assert not sc.has_work and sc.pool.free==60 and sc.waiting.tokens==0
        assert sc.states.used==0
        assert set(self.d.why)==set(self.all) and sum(sc.finished.values())==len(self.all)
        for s in self.all:
            self.d.check(s)
        sc.schedule()
        assert not sc.policy._due, 'the policy knows somebody who has left'

Machine.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestMachine = Machine.TestCase

@pytest.mark.parametrize('seed', range(60))
def test_crowd(seed):
    "The same machine where it is always crowded"
    rng,m = random.Random(seed),Machine()
    starts = {k: rng.choice(v) for k,v in STARTS.items()}
    m.start(**starts, costs=Costs(*map(rng.choice, COSTS)))
    for _ in range(25):
        turn(m, rng)
    m.teardown()

def turn(m, rng):
    "Some come, one may leave or be found, time may pass, and then a step or more"
    pick = rng.choice
    sizes = [rng.randint(1, 560) for _ in range(rng.randint(0, 4))]
    m.add(sizes, pick([0,0,-1,1]), pick([1,5,30]), pick([None,None,.05,2.]))
    luck,i = rng.random(),rng.randint(0, 50)
    if m.sc.has_work and luck<.1:
        m.leave(i)
    if m.sc.waiting and luck>.8:
        m.found(i, pick([0,.5,1]))
    if .3<luck<.7:
        m.pass_time(pick([.001,.06,.3]))
    m.step(pick([1,1,3,20]))

@pytest.mark.parametrize('name', ('fifo','slai'))
def test_machine_sees_all(name):
    "A crowd that loses patience, runs out of time, and is asked to wait"
    m = Machine()
    m.start(name, .1, .2,
        Costs(.02, .01, .07, 1.8e-4), 2, 256, 4, True,
        1)
    rng = random.Random(1)
    for i in range(30):
        sizes = [rng.randint(1, 560) for _ in range(3)]
        m.add(sizes,
            rng.choice([0,0,-1,1]), 5,
            rng.choice([None,2.]))
        if m.sc.waiting:
            m.found(i, rng.choice([0,.5]))
        m.step(4)
        m.pass_time(rng.choice([.001,.06]))
    m.teardown()
    assert m.seen['first']>20 and m.seen['timeout']>5
    assert m.seen['left out']

# -- the order -----------------------------------------------------------------------------------

arrival = st.tuples(
    st.integers(1, 500), # tokens of the prompt
    st.sampled_from([0,0,-1,1]), # priority
    st.integers(0, 30)) # the step before which it comes
arrivals = st.lists(arrival, min_size=1, max_size=12)

@given(arrivals, st.sampled_from([1,4]))
@settings(deadline=None)
def test_fifo_is_the_order_without_a_policy(asks, over):
    "Step by step the same plans, where nobody has a deadline and nobody waits too long"
    def plans(policy):
        (sc,_),out = scheduler(policy, 3, chunk=128, overcommit=over),[]
        for t in range(400):
            for i,(n,priority,at) in enumerate(asks):
                if at==t:
                    sc.add(request(i, n, 20, priority, ignore_eos=True))
            out.append(repr(step(sc)))
        assert not sc.has_work
        return out
    assert plans(None)==plans(Policy('fifo', 0, 1e6))

@settings(deadline=None)
@given(arrivals)
def test_fifo_admits_by_priority_and_arrival(asks):
    sc,_ = scheduler(Policy())
    for i,(n,priority,_) in enumerate(asks):
        sc.add(request(i, n, 1, priority))
    want = sorted(sc.waiting,
        key=lambda s: (s.request.priority, s.arrival))
    got = []
    while plan := step(sc):
        got += [s for s in plan.seqs if s not in got]
    assert got==want

def test_cached_tokens_do_not_count():
    "A long prompt of which all but a little is known goes before a short one"
    sc,_ = scheduler(Policy('slai'), 2, 200, 2000, chunk=64)
    long,short,last = seqs = [sc.add(request(i, n, 1))
        for i,n in enumerate((1000, 200, 1900))]
    assert list(sc.waiting)==[short,long,last]
    long.there = 960
    sc.waiting.push(long)
    assert list(sc.waiting)==seqs and sc.waiting.tokens==3100
    def first(): return [s for s,*_ in step(sc).prefill]
    assert first()==[long]
    short.there,long.there = 192,0
    assert first()==[short]

def siege(policy, lower):
    """Seconds until a long prompt gets its first token among short ones that never end; the
    longest step"""
    sc,now = scheduler(policy, 2, 200, 2000, chunk=128,
        max_queue=10**6)
    longest = n = 0
    for i in range(4000):
        if i==5:
            x = sc.add(request('x', 1900, 2, priority=int(lower)))
        while len(sc.waiting)<4:
            n += 1
            sc.add(request(n, 60+n%60, 8, ignore_eos=True))
        plan = sc.schedule()
        took = .01+1e-4*plan.num_rows
        now[0],longest = now[0]+took,max(longest, took)
        sc.commit(plan, [[5]]*len(plan.sampled))
        if i>5 and x.outputs:
            return now[0]-x.born,longest
    return inf,longest

@pytest.mark.parametrize('lower', (False,True))
def test_nobody_starves(lower):
    """The bound: patience, what runs already (at most 8 steps here), those who came before (4 at
    most, each of 10 steps), and its own prompt, 15 chunks"""
    name = 'fifo' if lower else 'slai'
    assert siege(Policy(name), lower)[0]==inf
    for patience in (.5, 3.):
        took,step = siege(Policy(name, max_wait=patience), lower)
        assert patience<took<=patience+(8+40+15)*step

@pytest.mark.parametrize('max_wait,stays',
    [(None,False), (1.,True), (5.,False)])
def test_the_impatient_are_not_preempted(max_wait, stays):
    "Whoever has idled for too long loses its place to no priority"
    sc,now = scheduler(Policy(max_wait=max_wait))
    sc.add(request('first', 60, 50, ignore_eos=True))
    step(sc)
    x = sc.add(request('x', 60, 50, ignore_eos=True))
    now[0] += 2
    sc.abort('first')
    step(sc)
    sc.add(request('urgent', 60, 5, priority=-1))
    step(sc)
    assert x.running==stays

def test_the_impatient_keep_their_blocks():
    "Nor when there is a place, and only room in the cache is wanting"
    sc,now = scheduler(Policy(max_wait=1.), 2)
    sc.add(request('first', 550, 50, ignore_eos=True))
    step(sc)
    x = sc.add(request('x', 550, 50, ignore_eos=True))
    now[0] += 2
    sc.abort('first')
    step(sc)
    urgent = sc.add(request('urgent', 400, 5, priority=-1))
    step(sc)
    assert x.running and not urgent.running

@pytest.mark.parametrize('name', ('fifo','slai'))
def test_decoding_goes_first_only_where_it_has_waited(name):
    "Once, when more than an eighth of the deadline went by between two steps"
    sc,now = scheduler(Policy(name, .1), 2, 200, 2000, chunk=128)
    sc.add(request('answer', 60, 300, ignore_eos=True))
    step(sc)
    sc.add(request('prompt', 1900, 2))
    def kinds(pause):
        now[0] += pause
        plan = sc.schedule()
        now[0] += .05
        sc.commit(plan, [[5]]*len(plan.sampled))
        return bool(plan.prefill),bool(plan.decode)
    pauses = 0,0,.01,.013,.03,0,.03,0,0
    want = [True,True,True,False,True,True,False,True,True]
    assert [kinds(p) for p in pauses]==[(p,True) for p in want]

def test_patience_is_kept_through_preemption():
    "Seconds in the queue add up, and those in a step do not count"
    sc,now = scheduler(Policy(max_wait=3.))
    x = sc.add(request('x', 60, 500, ignore_eos=True))
    for i,first in enumerate((False,False,True)):
        now[0] += 1.1
        step(sc)
        assert (x.order[0]==-inf)==first, i
        now[0] += 100
        urgent = sc.add(request(f'u{i}', 60, 1, priority=-1))
        step(sc)
        assert x.running==first
        assert bool(urgent.finish_reason)!=first

def test_a_clock_that_goes_back():
    "Nobody gains patience by it"
    sc,now = scheduler(Policy(max_wait=3.))
    now[0] = 100.
    sc.add(request('first', 60, 50, ignore_eos=True))
    x = sc.add(request('x', 60, 50, ignore_eos=True))
    step(sc)
    now[0] = 5.
    sc.abort('first')
    step(sc)
    assert x.running and x.patience<=3

def test_a_step_reads_no_queue():
    "As many calls with 5,000 waiting as with 30, whatever the policy"
    def work(name, waiting):
        sc,_ = scheduler(Policy(name, .1, 1e6), 4, 64,
            200, max_queue=20_000)
        for i in range(waiting):
            sc.add(request(i, 20, 20, i%3, i, ignore_eos=True))
        return [calls(lambda: step(sc)) for _ in range(12)]
    for name in ('fifo','slai'):
        assert work(name, 30)==work(name, 5000)

# -- times ---------------------------------------------------------------------------------------

noise = st.lists(st.floats(.9, 1.1), min_size=30, max_size=30)

@given(machines, st.sampled_from([.05,.1,.4]),
    st.integers(1, 8), noise)
@example(Costs(.001, .01, .07, 1e-5), .1, 1, [1.]*30) # Of two tiles the line expects too much
@example(Costs(.3, .001, 0., 1.8e-4), .4, 1, [1.]*3+[1.0625]*27) # Plain steps that scatter by more
@settings(deadline=None)
def test_the_chunk_that_fits(c, deadline, seqs, noise):
    "It is legal, longer ones take longer, and in the end it is neither too long nor far too short"
    t = StepTimes()
    t.note(Load(seqs=seqs), c.plain)
    for x in noise:
        n = t.tokens_in(deadline, 2048, seqs)
        assert n%TILE==0 and 0<=n<=2048
        load = Load(1, max(n, TILE), 0, seqs)
        t.note(load, seconds(c, load)*x)
        times = [t.step(m, seqs) for m in SIZES]
        assert times==sorted(times) and isfinite(times[-1])
    true = [seconds(c, Load(1, m, 0, seqs)) for m in SIZES]
    def fits(slack): return TILE*sum(s<=slack*deadline for s in true)
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
            took = .02+.01+1e-4*n
            t.note(Load(1, n, 0, 4),
                100*took if i==slow else took)
        return out
    good,bad = sizes(None),sizes(at)
    assert min(good[20:])>=512
    assert min(bad[max(at+12, 20):])>=448
    if at>=20:
        assert min(bad[at+1:])>=448, 'one step too slow, and chunks are small'

def asked(c, deadline, speeds, chunk=2048, first=None):
    """Tokens that a policy gives a prompt beside four answers, step by step; a step takes as
    many times as long as `speeds` say. And what the steps took. A prompt alone may have taken
    a `first` step"""
    p,now = Policy('slai', deadline),0.
    sizes,times = [],[]
    p.note(Load(seqs=4), c.plain)
    if first:
        p.note(Load(1, chunk), first)
    for slow in speeds:
        who = SimpleNamespace(num_computed=0, said=now)
        sizes.append(p.room([who], [who]*4, chunk,
            1, now))
        load = Load(1, sizes[-1], 0, 4)
        times.append(slow*seconds(c, load))
        now += times[-1]
        p.note(load, times[-1])
    return np.array(sizes),np.array(times)

LARGE = Costs(.0022, .008, 0., .179e-3)
SMALL = Costs(.025, .015, .070, .16e-3)

@pytest.mark.parametrize('name', ('fifo','slai'))
def test_what_answers_have_waited_is_taken_from_the_deadline(name):
    "A chunk ends with it, whether their last token came just now or a while ago"
    p,limit,waited = Policy(name, .1),.1+LARGE.plain,.012
    def chunk(said):
        who = SimpleNamespace(num_computed=0, said=said)
        return p.room([who], [who]*4, 2048, 1, 0.)
    def took(n): return seconds(LARGE, Load(1, n, 0, 4))
    p.note(Load(seqs=4), LARGE.plain)
    for _ in range(30):
        n = chunk(said=0.)
        p.note(Load(1, n, 0, 4), took(n))
    assert took(n)<=limit<waited+took(n)
    assert .8*limit<waited+took(chunk(-waited))<=limit

@pytest.mark.parametrize('machine,deadline',
    [(LARGE,.1), (SMALL,.2), (SMALL,.1)])
@pytest.mark.parametrize('slow', (1.5, 2, 3, 10, 100))
def test_another_process_takes_the_card(machine, deadline, slow):
    "Chunks do not climb while all is slower, and are as long as before soon after"
    sizes,times = asked(machine, deadline,
        [1]*30+[slow]*30+[1]*30)
    before = sizes[29]
    assert sizes[30:60].max()<=1.5*before
    floor = slow*seconds(machine, Load(1, TILE, 0, 4))
    assert times[36:60].max()<=2.2*max(deadline, floor)
    assert sizes[75:].min()>=.7*before and sizes[75:].max()<=1.4*before

@pytest.mark.parametrize('machine,deadline',
    [(LARGE,.1), (SMALL,.2), (SMALL,.1)])
def test_a_prompt_that_had_to_compile(machine, deadline):
    "A first chunk that took a hundred times as long does not keep those beside answers small"
    good,bad = [asked(machine, deadline, [1]*40, first=s)[0] for s in (None,33.)]
    assert bad[20:].min()>=.6*good[20:].mean()

@pytest.mark.parametrize('deadline', (.001, .05, .1))
@pytest.mark.parametrize('machine', (LARGE,SMALL))
def test_a_deadline_that_no_chunk_keeps(machine, deadline):
    "Nothing is known at first; soon a prompt takes about twice its time alone at most"
    sizes,times = asked(machine, deadline, [1]*40)
    alone = seconds(machine, Load(1, 2048))/2048
    assert times[15:].sum()<=2.3*alone*sizes[15:].sum()

def test_one_slow_step_is_no_median():
    t = StepTimes()
    t.note(Load(seqs=4), .02)
    def seen(n, slow=1):
        t.note(Load(1, n, 0, 4),
            .02+slow*(.01+1e-4*n))
    for n in (64, 128, 512)*5:
        seen(n)
    before = t.step(512, 4)
    seen(512, 100)
    assert abs(t.step(512, 4)/before-1)<.05

class Wall:
    "A prompt of N tokens comes to four answers: times between tokens meanwhile, and its own"
    def __init__(self, policy, costs, N=12_000):
        self.costs,self.random,self.said = costs,random.Random(0),{}
        self.sc,self.now = scheduler(policy, 8, 8000, 20_000, chunk=2048)
        self.ask('before', 3000, 1)
        for i in range(4):
            self.ask(str(i), 50, 3000, 2)
        start = self.now[0]
        self.ask('long', N, 1)
        end = self.said['long'][0]
        self.took = end-start
        times = [t for t in self.said['0'] if start<t<=end]
        self.p99 = np.quantile(np.diff(times), .99) if len(times)>1 else 0.

    def ask(self, id, n, most, until=1):
        self.sc.add(request(id, n, most, ignore_eos=True))
        while len(self.said.setdefault(id, []))<until:
            self.step()

    def step(self):
        plan = self.sc.schedule()
        load = load_of(plan)
        took = seconds(self.costs, load)*self.random.uniform(.98, 1.02)
        self.now[0] += took
        self.sc.policy.note(load, took)
        for s in plan.sampled:
            self.said.setdefault(s.id, []).append(self.now[0])
        self.sc.commit(plan, [[5]]*len(plan.sampled))

lines = st.floats(.003, .02),st.floats(.001, .01),st.floats(2e-5, 2e-4)

@given(*lines)
@settings(deadline=None, max_examples=25)
def test_both_lines(plain, fixed, each):
    """Where what is fixed leaves room for it: p99 within the deadline and a plain step,
    the prompt within 1.3 times its time alone"""
    c = Costs(plain, fixed, 0., each)
    D = max((plain+fixed)/.15, 10*TILE*each)
    alone = Wall(Policy(), c._replace(plain=0.)).took
    w = Wall(Policy('slai', D), c)
    assert w.p99<=D+plain
    assert w.took<=1.3*alone+D

def test_a_plain_step_more(monkeypatch):
    """Where the deadline alone would make a prompt far slower, steps are longer by a plain one at
    most"""
    w = Wall(Policy('slai', .1), SMALL)
    assert w.p99<=.1+SMALL.plain
    monkeypatch.setattr('atlas.engine.policy.SWIFT', 99.)
    assert w.took<.97*Wall(Policy('slai', .1), SMALL).took

# -- time limits and bounds ----------------------------------------------------------------------

limited = st.tuples(
    st.integers(1, 150), # tokens of the prompt
    st.integers(1, 12), # tokens at most
    st.sampled_from([None,.5,3.,9.]), # its time limit
    st.integers(0, 12)) # the step before which it comes

def served(e, now, reqs, abort):
    "Tokens and ends of requests that come at their times to an engine whose steps take a second"
    said = {r.id:[] for r,_ in reqs}
    ends = {}
    def hear(events):
        for v in events:
            assert v.id not in ends, 'an event after the end'
            if v.token is not None:
                said[v.id].append(v.token)
            if v.finish:
                ends[v.id] = v.finish,now[0]
    for t in range(400):
        for r,at in reqs:
            if at==t:
                e.add(r)
        if t==abort:
            hear(e.abort('r0'))
        hear(e.step())
        now[0] += 1
        if t>12 and not e.has_work:
            return said,ends

@given(
    st.lists(limited, min_size=1, max_size=7),
    st.booleans(),
    st.sampled_from([None,4]))
@settings(deadline=None, max_examples=40)
def test_time_limits_in_an_engine(asks, late, abort):
    """Each request ends exactly once, in time, with the beginning of what it says alone;
    everything is given back"""
    now,reqs = [0.],[]
    for i,(n,most,limit,at) in enumerate(asks):
        reqs.append((replace(ask(i, n, most), timeout=limit), at))
    e = engine(late, seqs=2, policy=Policy('slai', .1, 5.), clock=lambda: now[0])
    said,ends = served(e, now, reqs, abort)
    left_clean(e)
    now[0] += 99
    assert not e.scheduler.expire() and not e.scheduler._limits
    assert set(ends)==set(said)
    for r,at in reqs:
        why,when = ends[r.id]
        check_end(r, said[r.id], why, when-at)

def check_end(r, said, why, after):
    "A request has ended in time, with the beginning of what it says alone"
    whole = tokens_of(alone(replace(r, timeout=None)))
    if r.timeout:
        assert after<r.timeout+1
    if why=='timeout':
        assert r.timeout<=after
    assert said==(whole if why=='length' else whole[:len(said)])

def reached(e, test):
    "Step until `test` of request r0's sequence is true: all events until then"
    events = []
    for _ in range(100):
        if test(e.scheduler.seqs['r0']):
            return events
        events += e.step()
    raise AssertionError('that was never reached')

def staged(stage, late):
    "An engine in which request r0, of three, is at `stage`; its clock, and all events until then"
    now,events = [0.],[]
    crowded = stage in ('waiting','preempted','replay')
    e = engine(late, seqs=2-crowded, policy=Policy('slai', .1), clock=lambda: now[0])
    if stage=='waiting':
        e.add(ask(1, 10, 9))
    e.add(replace(ask(0, 150, 20), timeout=5.))
    for until in STAGES[stage]:
        if until is waits:
            e.add(ask(1, 10, 9, priority=-1))
        events += reached(e, until)
    state = e.scheduler.seqs['r0'].state
    assert state==dict(preempted='waiting').get(stage, stage)
    return e,now,events

def begun(s): return s.state=='prefill' and s.num_computed>0
def speaks(s): return len(s.outputs)==9
def waits(s): return s.state=='waiting'
def replays(s): return s.state=='replay'

STAGES = dict( # What happens to r0 until it is there
    waiting=(),
    prefill=(begun,),
    decode=(speaks,),
    preempted=(speaks,waits),
    replay=(speaks,waits,replays))

@pytest.mark.parametrize('late', (False,True))
@pytest.mark.parametrize('stage', ('waiting','prefill','decode','preempted','replay'))
def test_time_is_up_at(stage, late):
    "It ends once with the beginning of what it says alone, and whoever is there goes on"
    e,now,events = staged(stage, late)
    e.add(ask(2, 10, 9))
    now[0] += 6
    for _ in range(100):
        events += e.step()
    left_clean(e)
    first,*others = [[v for v in events if v.id==f'r{i}'] for i in range(3)]
    assert [v.finish for v in first if v.finish]==['timeout'] and first[-1].finish
    said = tokens_of(first)
    assert said==tokens_of(alone(ask(0, 150, 20)))[:len(said)]
    assert (len(said)>=9)==(stage in ('decode','preempted','replay'))
    for i,of in enumerate(others, 1):
        if of:
            assert tokens_of(of)==tokens_of(alone(ask(i, 10, 9)))
    assert others[1]

def tokens_of(events): return [v.token for v in events if v.token is not None]

@given(
    st.lists(st.integers(1, 300), min_size=1,
        max_size=20),
    st.integers(1, 600))
def test_tokens_that_wait(sizes, most):
    "Refused beyond the bound, and never alone"
    sc,_ = scheduler(max_queue_tokens=most)
    for i,n in enumerate(sizes):
        t = sum(s.prompt_len for s in sc.waiting)
        assert sc.waiting.tokens==t
        full = t and t+n>most
        refused = pytest.raises(QueueFullError, match='tokens are waiting already')
        with refused if full else nullcontext():
            sc.add(request(i, n, 1))
        if i%3==2:
            sc.schedule()

def test_who_only_fills_the_cache_is_not_in_the_queue():
    "Prompts that nobody waits for count neither as requests nor as tokens"
    sc,_ = scheduler(max_queue=2, max_queue_tokens=100)
    sc.add(request('runs', 60, 9))
    step(sc)
    for i in range(3):
        sc.add(replace(request(f'fill{i}', 300, 1), prefill_only=True))
    for id,n in (('b',60),('c',40)):
        sc.add(request(id, n, 1))
    assert sc.waiting.tokens==sc.stats()['num_tokens_waiting']==100
    with pytest.raises(QueueFullError, match='2 requests'):
        sc.add(request('d', 1, 1))
    while step(sc):
        pass
    assert sc.waiting.tokens==0 and not sc.has_work

def test_a_gateway_knows_that_the_queue_is_full():
    "It refuses before an answer has begun, so that a stream has a status"
    r = RemoteRunner('m')
    r._ready,r.info = True,dict(max_queue=9, max_queue_tokens=100)
    def asked(n, waiting, **kw):
        r._stats = dict(num_tokens_waiting=waiting)
        return r._check(replace(request('a', n, 1), **kw))
    asked(500, 0)
    asked(60, 40)
    with pytest.raises(QueueFullError, match='40 tokens of prompts are waiting') as e:
        asked(61, 40)
    assert e.value.status==503
    asked(61, 40, prefill_only=True)
    r.info = dict(max_queue=9, max_queue_tokens=None)
    asked(500, 400)

HELLO = [dict(role='user', content='Hi')]
APIS = {
    'chat': (openai.parse, dict(messages=HELLO)),
    'text': (openai.parse_text, dict(prompt='Hi')),
    'messages': (anthropic.parse, dict(messages=HELLO, max_tokens=9)),
    'responses': (responses.parse, dict(input='Hi'))}

@pytest.mark.parametrize('api', APIS)
def test_timeout_of_a_body(api):
    parse,body = APIS[api]
    def asked(timeout):
        raw = json.dumps(body|dict(timeout=timeout))
        return parse(raw.encode()).timeout
    for good in (None, 3, .5, MAX_TIMEOUT):
        assert asked(good)==good
    for bad in (0, -1, MAX_TIMEOUT+1, '3', [], True):
        with pytest.raises(RequestError) as e:
            asked(bad)
        assert e.value.param=='timeout'

@pytest.mark.parametrize('bad',
    (0, -1, MAX_TIMEOUT+1, '3', True,
        float('nan'), inf))
def test_timeout_of_a_request(bad):
    with pytest.raises(RequestError) as e:
        Request('a', (1,), SamplingParams(), timeout=bad)
    assert e.value.param=='timeout'

@pytest.mark.parametrize('bad',
    (('lifo',), ('fifo',-1),
        ('slai',.1,-.1), ('fifo',inf)))
def test_bad_policies(bad):
    with pytest.raises(AtlasError):
        Policy(*bad)
