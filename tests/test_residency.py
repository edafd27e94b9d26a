"""Models that share a budget of memory. Random days of requests, kills, unloads, sleeps and clients
that leave, through the real `Models`: processes are stand-ins on a device of fixed memory, and time
is made up, so that a day takes a moment. And real workers under a budget that holds one of them."""
import asyncio,os,random,re,selectors,signal,socket,subprocess,sys,threading
import httpx,pytest
from concurrent.futures import Future
from contextlib import contextmanager,suppress
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from hypothesis import HealthCheck,example,given,settings,strategies as st
import atlas.service.admission as admission
import atlas.service.process as process
from atlas.ground.core import AtlasError,OutOfMemoryError
from atlas.ground.options import EngineConfig
from atlas.ground.requests import Event
from atlas.card.emulator import Emulator,find_cxx
from atlas.engine.loading import LoadedModel
from atlas.engine.planning import MeasuredModel
from atlas.service.process import Model,ProcessTimes
from atlas.service.admission import Residency
from atlas.service.models import Models
from atlas.service.gateway import modelled
from atlas.service.link import Frames,frame,pack_event,pack_error
from atlas.service.residency import STAY
from atlas.service.turn import UnavailableError
from helpers.patience import PATIENT
from helpers.waiting import WAIT,happens,until
from test_processes import ask,collect,model,ok,req,running,running_test

# -- time that is made up ------------------------------------------------------------------------

class Stuck(AssertionError):
    "Somebody waits, and nothing will ever happen"

class Leaping(selectors.DefaultSelector):
    "Where nothing is there to be read, time goes on at once until the next thing is due"
    now,left = 1000.,20_000 # Looks that a day may take
    def select(self, timeout=None):
        found = super().select(0)
        self.left -= 1
        if self.left<0:
            raise Stuck('they go round in circles')
        if found or timeout==0:
            return found
        if timeout is None:
            raise Stuck('somebody waits for ever')
        self.now += max(timeout, 1e-9)
        return []

class VirtualLoop(asyncio.SelectorEventLoop):
    "An event loop in made-up time; what is for a thread is done at once"
    def __init__(self):
        self.selector = Leaping()
        super().__init__(self.selector)
    def time(self): return self.selector.now
    def run_in_executor(self, executor, f, *args):
        done = self.create_future()
        try:
            done.set_result(f(*args))
        except Exception as e:
            done.set_exception(e)
        return done

def at_once(f, *args)->Future:
    "What is for a thread of its own, likewise"
    done = Future()
    try:
        done.set_result(f(*args))
    except Exception as e:
        done.set_exception(e)
    return done

# -- processes that are stand-ins ----------------------------------------------------------------

class Device:
    "Memory of a fixed size, and who has how much of it"
    def __init__(self, size):
        self.size,self.taken,self.wrong = size,{},[]
    def take(self, who, nbytes):
        self.taken[who] = nbytes
        if sum(self.taken.values())>self.size:
            self.fault(f'{self.taken} is more than there is')
    def fault(self, said):
        self.wrong.append(said)

class StandIn(asyncio.Protocol):
    """A worker in this process: it takes memory, answers token by token, sleeps and wakes, and
    can be killed"""
    pids = iter(range(1, 10**9))
    def __init__(self, world, name):
        self.world,self.name,self.pid = world,name,next(self.pids)
        self.sock,self.theirs = socket.socketpair()
        self.loop = asyncio.get_running_loop()
        self.ended = self.loop.create_future()
        self.frames,self.answers = Frames(),{}
        self.gone = False
        self.says,self.asleep = self.world.kinds[name],False
        world.lives.append(name)
        self.work = self.loop.create_task(self.run())
    async def run(self):
        self.transport,_ = await self.loop.create_unix_connection(lambda: self, sock=self.theirs)
    def data_received(self, data):
        for m in self.frames.feed(data):
            getattr(self, m[0])(*m[1:])
    def connection_lost(self, e):
        self.end(0)
    def send(self, *m):
        if not self.gone:
            self.transport.write(frame(*m))
    def later(self, seconds, f, *args):
        self.loop.call_later(seconds, lambda: self.gone or f(*args))
    def load(self, options, pace):
        self.world.device.take(self, self.says['need'])
        self.send('stage', 'open', 0., {})
        self.later(self.says['seconds'], self.ready)
    def ready(self):
        info = dict(
            name=self.name, max_seq_len=4096, vocab_size=9, max_queue=99,
            eos_ids=[])
        self.send(
            'ready',
            info|dict(memory=dict(weights=self.says['need'])),
            {})
    def add(self, n, request, images):
        took,tokens = self.world.long[request['id']]
        self.answers[n] = request['id']
        self.later(took/tokens, self.token, n, tokens, took/tokens)
    def token(self, n, left, pause):
        if n not in self.answers:
            return
        last = left==1
        self.send(
            'events',
            [
                pack_event(n, Event(self.answers[n], 1, finish='stop' if last else None))],
            {})
        if last:
            del self.answers[n]
        else:
            self.later(pause, self.token, n, left-1, pause)
    def abort(self, n):
        if (rid := self.answers.pop(n, None)) is None:
            return
        if rid not in self.world.left and not self.world.excused(self.name):
            self.cut('an answer was ended')
        self.send('events', [pack_event(n, Event(rid, finish='abort'))], {})
    def cut(self, said):
        self.world.device.fault(f'{self.name}: {said}')
    def sent_away(self, how):
        "Its time is over: was that right?"
        w,m = self.world,self.world.models.find(self.name)
        if w.excused(self.name):
            return
        if self.answers:
            self.cut(f'{how} while it answers')
        if self.asleep: # then it was sent away before, or by an admin
            return
        early = self.loop.time()<m.since+STAY*m.took-1e-6
        if early and m.lasts is None and not w.admins:
            self.cut(f'{how} before it was there for long')
    def call(self, n, op, kw):
        if op=='sleep':
            self.sent_away('put to sleep')
            rests = self.says['rests']
            given = self.says['need']-rests
            if self.says['sleepless']:
                return self.send(
                    'failed', n, pack_error(OutOfMemoryError('There is no room for a copy')))
            self.world.device.take(self, rests)
            self.asleep = True
            return self.send('result', n, dict(level=1, bytes=given, seconds=.1))
        self.world.device.take(self, self.says['need'])
        self.asleep = False
        self.later(.5, self.send, 'result', n, dict(bytes=0, seconds=.5))
    def bye(self):
        self.sent_away('unloaded')
        self.later(.2, self.end, 0)
    def kill(self):
        self.end(-9)
    def end(self, code):
        if self.gone:
            return
        self.gone = True
        self.world.device.taken.pop(self, None)
        self.loop.call_soon(lambda: self.ended.done() or self.ended.set_result(code))
        if hasattr(self, 'transport'):
            self.transport.close()
        else:
            self.work.cancel()
            self.theirs.close()

PACE = ProcessTimes(
    beat=1e7, stalled=1e12, dead=1e12, hung=1e12, start=1e12, grace=5., pause=.5,
    longest=8., ends=99, drain=10., wait=2000., soon=.5)

class World:
    "Models on a device, and people who ask them and meddle with them"
    def __init__(self, kinds, budget, policy=PACE, groups=None):
        self.kinds,self.device = kinds,Device(budget)
        self.long = {} # Of each request: seconds and tokens of its answer
        self.left,self.meddled,self.ends = set(),{},[]
        self.admins,self.lives = False,[] # Did one load a model? Whose processes were started
        ms = [self.made(n, k, policy) for n,k in kinds.items()]
        self.models = Models(ms, first=[], budget=budget, groups=groups)
    def made(self, name, k, policy):
        "A model of a kind"
        def text(config): return dict(tokenizer=None)
        m = Model(EngineConfig(name), policy=policy, command=partial(StandIn, self), text=text)
        m.need,m.pinned = k['need'],k.get('pinned', False)
        m.ttl,m.group = k.get('ttl'),k.get('group')
        return m
    def excused(self, name):
        "May an answer of it be cut now? Somebody unloads it, or puts it to sleep, or all is over"
        return self.models.draining or name in self.meddled
    async def ask(self, name, took, tokens, leaves=None):
        "A request; its end goes into `ends`"
        rid,loop = f'r{len(self.long)}',asyncio.get_running_loop()
        self.long[rid],began = (took,tokens),loop.time()
        task = loop.create_task(self._answer(name, rid))
        if leaves is not None:
            loop.call_later(leaves, self._leave, name, rid, task)
        try:
            end = await task
        except AtlasError as e:
            end = type(e).__name__
        except asyncio.CancelledError:
            end = 'left'
        self.ends.append((rid, end, loop.time()-began))
    begun = frozenset()
    def _leave(self, name, rid, task):
        "Who asked goes"
        self.left.add(rid)
        for s in self.models.find(name).runner._streams.copy().values():
            if s.id==rid:
                s.abort()
        if rid not in self.begun:
            task.cancel()
    async def _answer(self, name, rid):
        up = await self.models.get(name)
        await asyncio.sleep(.1) # its template is rendered
        s = up.runner.submit(req(rid, 'x'))
        self.begun = self.begun|{rid}
        n,ends = 0,[]
        async for e in s:
            n += e.token is not None
            if e.finish:
                ends.append(e.finish)
        assert len(ends)==1, f'{rid} ended as {ends}'
        assert ends[0]!='stop' or n==self.long[rid][1], f'{rid} has {n} tokens'
        return ends[0]
    async def meddle(self, what, name, value=None):
        "Kill, unload, load, put to sleep or wake a model, or say how long it stays"
        ms,m = self.models,self.models.find(name)
        if what=='kill':
            if m.child:
                m.child.kill()
        elif what=='ttl':
            m.ttl = value
            ms.residency.soon()
        elif what=='keep':
            m.keep(value)
        elif what=='pin':
            ms.pin(name, value>5)
        else:
            await self._order(what, name)
    async def _order(self, what, name):
        "Unload, load, put to sleep or wake a model, as an admin"
        self.meddled[name] = self.meddled.get(name, 0)+1
        self.admins = self.admins or what=='load'
        try:
            await getattr(self.models, what)(name)
            if what=='unload':
                await self.models.find(name).leaving
        except AtlasError:
            pass
        if left := self.meddled.pop(name)-1:
            self.meddled[name] = left
    def check(self):
        "The sums are right"
        r = self.models.residency
        assert not self.device.wrong, self.device.wrong
        assert r.free>=0, r
        for m in self.models.all:
            held = self.device.taken.get(m.child, 0)
            assert held<=m.holds, f'{m.name} has {held} and {m.holds} are written down'
            if m.state in ('unloaded','failed'):
                assert not m.holds and not m.child, m

async def live(world, deeds):
    """Let people do their deeds, each so many seconds after the one before, and see that all
    have ended"""
    tasks = []
    for after,what,*args in deeds:
        await asyncio.sleep(after)
        f = world.ask if what=='ask' else partial(world.meddle, what)
        tasks.append(asyncio.create_task(f(*args)))
        world.check()
    await settled(world, tasks)
    await asyncio.sleep(30)
    world.check()
    await world.models.close()
    assert not world.device.taken
    asked = [a for a in deeds if a[1]=='ask']
    assert len(world.ends)==len(asked)==len({rid for rid,*_ in world.ends})
    return world

async def settled(world, tasks):
    "Until all deeds are done, whose errors are raised; the sums are right meanwhile"
    first = asyncio.FIRST_COMPLETED if len(tasks)<2 else asyncio.ALL_COMPLETED
    while any(not t.done() for t in tasks):
        await asyncio.wait(tasks, timeout=3., return_when=first)
        world.check()
        if asyncio.get_running_loop().time()>1e6:
            raise Stuck(f'{world.models} {world.models.residency.queue}')
    for t in tasks:
        t.result()

def play(kinds, deeds, budget=100, **kw):
    "A day in made-up time"
    loop = VirtualLoop()
    real,in_thread = process.time,process.in_thread
    made_up = SimpleNamespace(time=real.time, monotonic=loop.time)
    process.time = admission.time = made_up
    process.in_thread = at_once
    async def all_of_it():
        return await live(World(kinds, budget, **kw), deeds)
    try:
        return loop.run_until_complete(all_of_it())
    finally:
        process.time = admission.time = real
        process.in_thread = in_thread
        swept(loop)

def swept(loop):
    "End what a day that went wrong has left, and close the loop"
    loop.selector.left = 10_000
    async def over(tasks):
        await asyncio.gather(*tasks, return_exceptions=True)
    with suppress(Stuck):
        while left := asyncio.all_tasks(loop): # Who is cancelled may begin something
            for t in left:
                t.cancel()
            loop.run_until_complete(over(left))
    loop.close()

def kind(need, seconds=5., rests=0, **kw):
    return dict(need=need, seconds=seconds, rests=rests, sleepless=False)|kw

# -- random days ---------------------------------------------------------------------------------

NAMES = 'abcd'
def kinds_of(r:random.Random):
    "Models of random sizes"
    out = {}
    for n in NAMES[:r.randint(2, 4)]:
        need = r.randint(10, 100)
        seconds,rests = r.uniform(.1, 30),r.choice([0, need//10, need])
        sleepless,ttl = r.random()<.2,r.choice([None,None,5.,60.])
        out[n] = kind(need, seconds, rests, sleepless=sleepless, ttl=ttl)
    return out

def deeds_of(r:random.Random, kinds, n, meddling=True):
    "What people do, at random"
    out = []
    for _ in range(n):
        name,after = r.choice(list(kinds)),r.choice([0,0,.05,1,10,60])*r.random()
        what = r.choice(MEDDLING) if meddling and r.random()<.3 else 'ask'
        out.append((after, what, name, *details(r, what)))
    return [d for d in out if d[1]!='ttl' or d[3]>=0]

MEDDLING = ['kill','ttl','keep','pin','unload','load','sleep','wake']

def details(r:random.Random, what):
    "Of a question how long it takes, its tokens, and when it is given up; of others a number"
    if what=='ask':
        seconds = r.choice([.1,3,30,90])*r.random()+.01
        return seconds,r.randint(1, 9),r.choice([None,None,None,r.uniform(0, 40)])
    if what in ('keep','ttl'):
        return r.choice([0,3,30,-1]),
    return r.randint(0, 9),

def day(seed, meddling=True, n=40, **kw):
    r = random.Random(seed)
    kinds = kinds_of(r)
    return play(kinds, deeds_of(r, kinds, n, meddling), **kw)

@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**9),
    n=st.integers(1, 60))
@example(seed=10026, n=21) # an admin puts a model to sleep, and another one needs its memory
@example(seed=867968235, n=44) # two are told that there is no room, and one of them asks again
def test_whatever_happens(seed, n):
    """The budget is never exceeded, nobody waits for ever, nothing leaves while it answers,
    every request ends once"""
    day(seed, n=n)

def answered(seed, n=40):
    "On a day on which nobody meddles, whoever has patience gets an answer"
    w = day(seed, meddling=False, n=n, policy=replace(PACE, wait=1e5))
    assert {end for rid,end,_ in w.ends if rid not in w.left}<={'stop'}

@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**9),
    n=st.integers(1, 60))
def test_where_nobody_meddles_all_are_answered(seed, n):
    answered(seed, n)

# -- the test can fail ---------------------------------------------------------------------------

def nothing_written(monkeypatch):
    tell = Residency._tell
    def forgets(self, m, e=None):
        tell(self, m, e)
        m.holds = 0
    monkeypatch.setattr(Residency, '_tell', forgets)
    monkeypatch.setattr(World, 'check', lambda self: None)

def nobody_waits_for_answers(monkeypatch):
    async def at_once(self, seconds):
        return True
    monkeypatch.setattr(Model, 'still', at_once)

def nobody_looks_again(monkeypatch):
    monkeypatch.setattr(Residency, 'soon', lambda self: None)

def not_struck_off(monkeypatch):
    put = Model._set
    def keeps(self, state=None):
        held = self.holds
        put(self, state)
        if state=='unloaded':
            self.holds = held
    monkeypatch.setattr(Model, '_set', keeps)

def two_in_one_place(monkeypatch):
    monkeypatch.setattr(Residency, 'forget', lambda self, m: None)

def nobody_stays(monkeypatch):
    monkeypatch.setattr('atlas.service.residency.STAY', 0)

def asleep_it_has_nothing(monkeypatch):
    def wrong(self, given):
        self.rests = 0
        self._sleeps_on()
    monkeypatch.setattr(Model, '_rests', wrong)

PLANTED = [
    nothing_written, nobody_waits_for_answers, nobody_looks_again, not_struck_off,
    two_in_one_place, nobody_stays, asleep_it_has_nothing]

@pytest.mark.parametrize('fault', PLANTED)
def test_it_would_be_seen(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        for seed in range(60):
            day(seed, meddling=seed%2==0)
        for seed in range(20):
            answered(seed)
            day(seed, meddling=False, policy=replace(PACE, soon=.01))

# -- one after another ---------------------------------------------------------------------------

def ends(w): return [e for _,e,_ in w.ends]

def test_one_swap_serves_all_who_wait():
    """Five who ask for another model while one answers: it leaves once, comes back once, and
    nobody is cut off"""
    two = dict(
        a=kind(60, 2., sleepless=True),
        b=kind(60, 2., sleepless=True))
    asks = [(0, 'ask', 'a', 30., 9)]+[(2, 'ask', n, 1., 3) for n in 'bbbbbaaaaa']
    w = play(two, asks, policy=replace(PACE, drain=60.))
    assert set(ends(w))=={'stop'} and w.lives==['a','b','a']

def test_asleep_where_that_is_enough():
    "Its process stays; where it cannot sleep, or would not give enough back, it is unloaded"
    asks = [
        (0, 'ask', 'a', 1., 3),
        (20, 'ask', 'b', 1., 3),
        (20, 'ask', 'a', 1., 3)]
    for k,lives in ((dict(rests=10), 'ab'), (dict(rests=50), 'aba'), (dict(sleepless=True), 'aba')):
        w = play(
            dict(a=kind(60, 2., **k), b=kind(60, 2.)),
            asks)
        assert set(ends(w))=={'stop'} and ''.join(w.lives)==lives

def test_an_answer_without_end_is_not_cut():
    "Whoever waits for its memory is told after `wait`, and the model answers others meanwhile"
    two = dict(a=kind(60, 2.), b=kind(60, 2.))
    w = play(
        two,
        [
            (0, 'ask', 'a', 900., 9),
            (20, 'ask', 'b', 1., 3),
            (100, 'ask', 'a', 1., 3)],
        policy=replace(PACE, wait=300.))
    by = {rid:(end,took) for rid,end,took in w.ends}
    end,took = by['r1']
    assert by['r0'][0]==by['r2'][0]=='stop' and end=='UnavailableError' and 299<took<311
    assert w.lives==['a']

def test_an_admin_does_not_wait_for_its_stay():
    two = dict(a=kind(60, 100.), b=kind(60, 2.))
    w = play(
        two,
        [
            (0, 'ask', 'a', 1., 3), (110, 'load', 'b'),
            (10, 'ask', 'b', 1., 3)])
    assert set(ends(w))=={'stop'} and dict((r,t) for r,_,t in w.ends)['r1']<2
    w = play(
        two,
        [(0, 'ask', 'a', 1., 3), (110, 'ask', 'b', 1., 3)])
    assert set(ends(w))=={'stop'} and dict((r,t) for r,_,t in w.ends)['r1']>200

def test_small_ones_pass_who_are_in_nobodys_way():
    three = dict(
        a=kind(60, 30.), b=kind(80, 2.),
        c=kind(20, 2.))
    asks = [
        (0, 'ask', 'a', 1., 3),
        (35, 'ask', 'b', 1., 3),
        (1, 'ask', 'c', 1., 3)]
    w = play(three, asks)
    assert [r for r,_,_ in w.ends]==['r0','r2','r1'] and set(ends(w))=={'stop'}
    w = play(three|dict(c=kind(30, 2.)), asks)
    assert [r for r,_,_ in w.ends]==['r0','r1','r2'] # b and c do not fit at once

def test_groups():
    "Of two that may not be there together one leaves, though there is room"
    two = dict(
        a=kind(10, 2., group='g'),
        b=kind(10, 2., group='g'))
    asks = [
        (0, 'ask', 'a', 1., 3),
        (20, 'ask', 'b', 1., 3),
        (20, 'ask', 'a', 1., 3)]
    w = play(two, asks, groups=dict(g=dict(together=False)))
    assert set(ends(w))=={'stop'} and w.models.residency.evicted
    w = play(two, asks, groups=dict(g=dict(together=True)))
    assert set(ends(w))=={'stop'} and not w.models.residency.evicted

def test_how_long_it_stays():
    "`ttl`, and what a client says instead: seconds, at once, for ever, and again as before"
    def ask(after): return after,'ask','a',1.,3
    def lives(*deeds, **kw):
        one = dict(a=kind(60, 2., ttl=50., **kw))
        return len(play(one, list(deeds)).lives)
    assert lives(ask(0), ask(100))==2
    for said,want in {10:2, -1:1, None:2, '10m':1}.items():
        assert lives(ask(0), (0, 'keep', 'a', said), ask(100))==want, said
    assert lives(ask(0), (0, 'keep', 'a', 0), ask(5))==2
    assert lives(ask(0), ask(100), pinned=True)==1

def test_budgets_that_are_too_small():
    "Refused by name and with both numbers, before anything is loaded"
    def made(**needs):
        ms = [Model(EngineConfig(n)) for n in needs]
        for m in ms:
            m.need = needs[m.name]<<30
        return ms
    with pytest.raises(
        OutOfMemoryError, match='big takes 60 GiB, and the budget of all models is 50 GiB'
    ):
        Models(made(small=10, big=60), budget=50<<30).check()
    ms = made(small=10, big=60)
    ms[0].pinned = True
    with pytest.raises(
        OutOfMemoryError, match='big takes 60 GiB, and 55 GiB of 65 GiB are not pinned'
    ):
        Models(ms, budget=65<<30).check()
    Models(made(small=10, big=60), budget=60<<30).check()

def test_who_never_fits_is_refused():
    w = play(
        dict(a=kind(60, 2., pinned=True), b=kind(60, 2.)),
        [(0, 'ask', 'a', 1., 3), (30, 'ask', 'b', 1., 3)])
    assert ends(w)==['stop','OutOfMemoryError']

def test_who_is_not_known_takes_what_is_free(monkeypatch):
    "And what its worker tells then counts"
    seen = []
    class Unknown(World):
        def __init__(self, *a, **kw):
            super().__init__(*a, **kw)
            self.models.find('b').need = 0
        def check(self):
            seen.append(self.models.find('b').holds)
            super().check()
    monkeypatch.setitem(globals(), 'World', Unknown)
    two = dict(a=kind(60, 2.), b=kind(30, 2.))
    w = play(
        two,
        [
            (0, 'ask', 'a', 1., 3),
            (20, 'ask', 'b', 1., 3),
            (1, 'ttl', 'b', 1e9),
            (20, 'ask', 'a', 1., 3)])
    assert set(ends(w))=={'stop'} and {40,30}<=set(seen) and w.lives==['a','b']

def test_who_takes_more_than_was_reckoned(monkeypatch):
    "Others leave until the sum is right again"
    class Larger(World):
        def __init__(self, *a, **kw):
            super().__init__(*a, **kw)
            self.device.size,self.models.find('a').need = 1000,40
        def check(self):
            pass
    monkeypatch.setitem(globals(), 'World', Larger)
    w = play(
        dict(a=kind(60, 2.), b=kind(50, 2., sleepless=True)),
        [(0, 'ask', 'b', 1., 3), (30, 'ask', 'a', 1., 3)])
    assert set(ends(w))=={'stop'} and w.models.residency.evicted=={('b','unload'): 1}

# -- real processes ------------------------------------------------------------------------------

def scripted(name, need, **options):
    "A model whose process is a scripted worker"
    m = model(name, policy=replace(PATIENT, soon=.02), **options)
    m.need = need<<30
    return m

@running_test
async def test_scripted_workers_take_turns():
    "Each is asked in turn: never both are there, and what is told says so"
    a,b = scripted('a', 6),scripted('b', 7, say='I am b.')
    async with running(a, b, budget=10<<30, first=[]) as ms:
        for _ in range(2):
            assert await ok(ms, 'a') and ms.memory['held']==6<<30
            assert (
                await ask(ms, name='b')
            )[0]=='I am b.' and ms.memory==ms.memory|dict(held=7<<30,
            free=3<<30)
        assert a.state=='unloaded' and not a.child and sum(
            d['times'] for d in ms.memory['evictions'])>=3

@running_test
async def test_who_has_no_room_at_the_start_is_loaded_later():
    a,b = scripted('a', 6),scripted('b', 7)
    async with running(a, b, budget=10<<30) as ms:
        await happens(lambda: a.state=='loaded' and b.state=='unloaded')
        assert 'waits for' in b.reason and await ok(ms, 'b') and a.holds==0

@running_test
async def test_the_end_comes_while_one_waits_for_memory():
    a,b = scripted('a', 6),scripted('b', 7)
    async with running(a, b, budget=10<<30, first=['a']) as ms:
        s = (await ms.get('a')).runner.submit(
            req('x', '<endless>', max_tokens=10**6))
        await anext(s)
        wait = asyncio.create_task(ms.get('b'))
        await happens(lambda: b.state=='loading' and b.reason)
        ms.abort()
        with pytest.raises(UnavailableError):
            await wait
        assert (await collect(s))[1].finish=='error'

@running_test
async def test_a_model_that_was_killed_keeps_its_place():
    a,b = scripted('a', 6),scripted('b', 7)
    async with running(a, b, budget=10<<30, first=['a']) as ms:
        assert await ok(ms, 'a')
        os.kill(a.child.pid, signal.SIGKILL)
        await happens(lambda: a.restarts==1)
        assert a.holds==6<<30
        await happens(lambda: a.state=='loaded')
        assert await ok(ms, 'a')

SERVE = """
import sys
from atlas.service.process import ProcessTimes
from atlas.service.gateway import Listening,Making,Naming,serve
def model(name):
    return dict(model='tiny', name=name, kv_spill_dir=sys.argv[1]+'/'+name, kv_spill_gb=.05)
serve(
    [model('a'), model('b')], listening=Listening(port=int(sys.argv[2])),
    naming=Naming(memory=int(sys.argv[3]), first=[]),
    making=Making(
        policy=ProcessTimes(soon=.05), options=dict(device='cpu', max_seq_len=512, max_num_seqs=2)))
"""

def server(tmp_path, memory):
    "A server of two real models under a budget, and its address"
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        port = s.getsockname()[1]
    p = subprocess.Popen(
        [sys.executable, '-c', SERVE, str(tmp_path), str(port), str(memory)],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return p,f'http://127.0.0.1:{port}'

@contextmanager
def served(tmp_path, memory):
    "A client of such a server, when it answers; the server has to end well"
    p,url = server(tmp_path, memory)
    told = []
    threading.Thread(target=lambda: told.extend(p.stdout), daemon=True).start()
    c = httpx.Client(base_url=url, timeout=WAIT)
    def there():
        try:
            return c.get('/health').status_code==200
        except httpx.TransportError:
            return p.poll() is not None
    try:
        until(there, again=.05)
        yield c
        p.send_signal(signal.SIGINT)
        assert p.wait(WAIT) in (0,130), ''.join(told)
    finally:
        p.kill()

STORY = 'Once upon a time there was a little girl who lived in a house near the wood. '*6

def told(c, name):
    "How a model goes on with `STORY`, and how many tokens of it were in its cache"
    asked = dict(model=name, prompt=STORY, max_tokens=8, temperature=0)
    r = c.post('/v1/completions', json=asked)
    assert r.status_code==200, r.text
    details = r.json()['usage'].get('prompt_tokens_details', {})
    return r.json()['choices'][0]['text'],details.get('cached_tokens', 0)

@pytest.mark.parametrize('room,how', [(400,'unload'), (500,'sleep')])
def test_two_real_models_and_room_for_one(room, how, tmp_path):
    """One leaves when the other is asked, and is there again when it is asked: with the same
    answer, and with what it had computed of the prompt, which lay on the disk meanwhile"""
    gone = dict(unload='unloaded', sleep='sleeping')[how]
    with served(tmp_path, room<<20) as c:
        text,cached = told(c, 'a')
        assert cached==0
        for name,other in ('b',gone),('a',None):
            again,cached = told(c, name)
            assert again==text
            check_resident(c.get('/models').json(), name, other, room<<20)
        assert cached>=64 # `a` was not there in between
        metrics = c.get('/metrics').text
        assert float(re.search(r'(?m)^atlas:memory_budget_bytes (\S+)', metrics)[1])==room<<20
        assert f'atlas:model_evictions_total{{how="{how}",model_name="a"}} 1.0' in metrics
        assert 'atlas:model_need_bytes{model_name="b"}' in metrics

def check_resident(said, name, other, budget):
    "What a server tells: `name` is there, and `a` is what `other` says"
    models = {m['id']: m for m in said['data']}
    assert models[name]['status']['value']=='loaded'
    assert other is None or models['a']['status']['value']==other
    assert said['memory']['budget']==budget and said['memory']['free']>=0
    here = models[name]['residency']
    assert 0<here['holds']<=budget and here['need']==here['holds'] and here['since']>=0

def test_a_budget_smaller_than_a_model(tmp_path):
    "The server ends before it loads anything, and says by name what takes how much of how little"
    p,_ = server(tmp_path, 200<<20)
    said,_ = p.communicate(timeout=WAIT)
    assert p.returncode and re.search(
        r'a takes \d+ MiB, and the budget of all models is 200 MiB', said), said

# -- measured before -----------------------------------------------------------------------------

DEVICES = [
    lambda: 'cpu',
    pytest.param(Emulator, marks=pytest.mark.skipif(not find_cxx(), reason='no C++ compiler'))]

@pytest.mark.parametrize('device', DEVICES, ids=['host','card'])
@pytest.mark.parametrize('kw', [
    pytest.param(dict(max_seq_len=512), id='short'),
    pytest.param({}, id='long'),
    pytest.param(dict(max_seq_len=512, max_num_seqs=2, kv_cache_memory=1<<24), id='cache'),
])
def test_what_was_measured_is_enough_and_is_not_exceeded(device, kw):
    o = EngineConfig('tiny', device=device(), **kw)
    m = MeasuredModel(o, 3<<30).told()
    assert m['least']<=m['most']<=3<<30 and (m['least']==m['most'])==('kv_cache_memory' in kw)
    for nbytes in {m['least'],m['most']}:
        grown = m['settled'][m['grows']]+nbytes-m['least']
        model = LoadedModel(replace(o, **m['settled']|{m['grows']: grown}))
        assert sum(model.memory.values())<=nbytes
        assert {'weights','cache','steps'}<=model.memory.keys()
        model.close()

def test_models_are_measured_by_one_process():
    "And what is left over is divided; a model that nobody can measure has the need 0"
    models = [dict(model='tiny', name=n, device='cpu', max_seq_len=512) for n in 'ab']
    ms = Models(
        modelled([*models, dict(model='nobody/has-it', name='c')]),
        budget=2<<30).admitted()
    a,b,c = ms.all
    assert a.need==b.need>300<<20 and c.need==0 and a.settled['kv_cache_memory']>0
    assert Models(modelled(models)).admitted().all[0].need==0 # nobody asked
    with pytest.raises(
        OutOfMemoryError, match='a takes .* and the budget of all models is 256 MiB'
    ):
        Models(modelled(models), budget=256<<20).admitted()
