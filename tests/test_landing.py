"""Steps that come down: one whose wait is interrupted is not lost, and the arbiter hears what a
change of the number of drafts takes."""
import pytest
from atlas.engine.draft import NgramDrafter
from atlas.engine.engine import Engine
from atlas.engine.stepper import HostStepper
from helpers.small_engine import MODEL,alone,ask,engine,left_clean,said

late_or_not = pytest.mark.parametrize('late', [False,True])

def drafted(late, drafts, arbiter=None):
    "An engine whose drafts are looked up, or without drafts"
    e = engine(late, drafts=drafts)
    drafter = NgramDrafter(MODEL, drafts, 1, 4) if drafts else None
    stepper = HostStepper(MODEL, e.cache, late, drafter)
    return Engine(e.scheduler, stepper, arbiter=arbiter)

def waits(e, at):
    "Have the wait for results `at` be interrupted, before they are there"
    n,real = 0,e.stepper.land
    def land(flight):
        nonlocal n
        n += 1
        if n==at:
            raise KeyboardInterrupt
        return real(flight)
    e.stepper.land = land
    return lambda: n

def by_request(e):
    "Events of all that `e` has to do, and how often it was interrupted"
    out,cut = {},0
    for _ in range(200):
        if not e.has_work:
            break
        try:
            events = e.step()
        except KeyboardInterrupt:
            cut += 1
            continue
        for ev in events:
            out.setdefault(ev.id, []).append(ev)
    assert not e.has_work, 'no end'
    left_clean(e)
    assert not getattr(e, '_landing', None)
    return out,cut

def rest(e):
    "Events until `e` has nothing to do"
    out = []
    for _ in range(200):
        if not e.has_work:
            return out
        out += e.step()
    pytest.fail('no end')

@pytest.mark.parametrize('at', range(1, 12))
@pytest.mark.parametrize('drafts', [0,3])
@late_or_not
def test_an_interrupted_wait_loses_nothing(late, drafts, at):
    "Of two answers; one is shorter, so that a step lands for its end"
    e = drafted(late, drafts)
    asks = [
        ask(0, 70, 12),
        ask(1, 9, 7, temperature=.8, seed=3)]
    for r in asks:
        e.add(r)
    calls = waits(e, at)
    got,cut = by_request(e)
    assert cut==(calls()>=at)
    for r in asks:
        assert said(got[r.id])==said(alone(r))

def test_an_interrupted_landing_by_hand():
    "`land` itself, which others call between steps"
    e,r = drafted(True, 3),ask(0, 10, 12)
    e.add(r)
    got = e.step()+e.step()
    assert e.flying
    waits(e, 1)
    with pytest.raises(KeyboardInterrupt):
        e.land()
    e.land()
    assert e.flying is None
    got += rest(e)
    assert said(got)==said(alone(r))

def test_an_abort_after_an_interrupted_wait():
    "The step that stays in line says nothing more to who has left"
    e = drafted(True, 3)
    asks = [ask(0, 10, 12), ask(1, 9, 12)]
    for r in asks:
        e.add(r)
    got = e.step()+e.step()
    waits(e, 1)
    with pytest.raises(KeyboardInterrupt):
        e.step()
    got += e.abort('r0')
    got += rest(e)
    left_clean(e)
    assert said(v for v in got if v.id=='r1')==said(alone(asks[1]))
    mine = [v.finish for v in got if v.id=='r0']
    assert mine.count('abort')==1 and mine[-1]=='abort'

# -- what a change takes -------------------------------------------------------------------------

class Turns:
    "Two drafts for six steps, none for six, and so on"
    def __init__(self):
        self.asked,self.told = 0,[]
    def drafts(self, seqs, context):
        self.asked += 1
        return 2*(self.asked//6%2==0)
    def limit(self, rid): return 2
    def note(self, k, checked, seconds, context):
        self.told.append((k,seconds))
    def leave(self, rid):
        pass

def clocked(e):
    "A clock by which a plan takes 1, and a wait for results until 10 after the launch"
    now = [0.]
    def clock(): return now[0]
    e.scheduler.clock = clock
    plan = e.scheduler.schedule
    launch = e.stepper.launch
    land = e.stepper.land
    ready = {}
    free = [0.]
    def planned():
        now[0] += 1
        return plan()
    def launched(*args):
        flight = launch(*args)
        free[0] = ready[id(flight)] = max(now[0], free[0])+10
        return flight
    def landed(flight):
        now[0] = max(now[0], ready[id(flight)])
        return land(flight)
    e.scheduler.schedule = planned
    e.stepper.launch = launched
    e.stepper.land = landed

def test_a_change_is_told_with_its_wait():
    "Late steps take 10, as the plan hides behind them; the first of another width takes 11"
    e = drafted(True, 2, Turns())
    clocked(e)
    e.add(ask(0, 10, 60))
    rest(e)
    e.land()
    told = e.arbiter.told
    turned = {
        s
        for (a,_),(b,s) in zip(told, told[1:])
        if a!=b}
    same = {
        s
        for (a,_),(b,s) in zip(told, told[1:])
        if a==b}
    assert turned=={11.}
    assert same=={10.}
