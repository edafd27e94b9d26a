"""The engine's loop, without kernels: steps that land at once, and steps that stay in the air
until the next one is launched, as a card's do.

A made-up model is run by NumPy. Whatever comes, goes, ends and fails,
a request is answered as it is alone, at once or late."""
from types import SimpleNamespace
import numpy as np,pytest
from hypothesis import given,settings,strategies as st
from helpers.small_engine import MODEL,V,alone,arrivals,as_alone,ask
from helpers.small_engine import drawn,engine,note,said,serve,tokens
from atlas.engine.stepper import Flight,HostStepper
from atlas.ops.sample import Sampled

either_way = pytest.mark.parametrize('late', (False,True))

one = drawn([1,5,63,64,70,130], [1,2,7,20])
asked = st.lists(one, min_size=1, max_size=8)
left = st.tuples(st.integers(0, 7),
    st.integers(0, 40))  # who is aborted, before which step

@settings(max_examples=60, deadline=None)
@given(
    asked,
    st.sampled_from([13,16,40]),
    st.sampled_from([1,2,4]),
    st.sampled_from([1.,4.]),
    st.lists(left, max_size=3))
def test_late_as_at_once(asks, blocks, seqs, over, aborts):
    """Random arrivals, aborts, priorities and pools:
    everybody's tokens are those of the same request alone, whenever steps land"""
    some = arrivals(asks)
    gone = [(f'r{i}', at) for i,at in aborts]
    for late in (False,True):
        e = engine(late, blocks, seqs, overcommit=over)
        got,_ = serve(e, some, gone)
        for r,_ in some:
            as_alone(got.get(r.id, []), alone(r))

def test_the_next_step_is_launched_before_the_last_one_lands():
    calls = []
    class Told(HostStepper):
        def launch(self, plan, samplers):
            calls.append('launch')
            return super().launch(plan, samplers)
        def land(self, flight):
            calls.append('land')
            return super().land(flight)
    def kinds(late):
        calls.clear()
        serve(engine(late, stepper=Told),
            [(ask(0, most=4),0)])
        return ' '.join(calls)
    assert kinds(False)==' '.join(['launch land']*4)
    # the prompt, and three steps
    assert kinds(True)=='launch land launch launch land launch land land'

def test_tokens_are_told_before_a_prompt_is_launched():
    "Who speaks does not wait while the host launches the next piece of another's prompt"
    e,seen = engine(overlap=True, blocks=80),[]
    e.add(ask(0, 5, 30))
    for _ in range(4):
        e.step()
    e.add(ask(1, 180, 1))
    while 'r1' in e.scheduler.seqs:
        before = e.steps
        told = [ev.id for ev in e.step()]
        seen.append((e.steps-before, told))
    pieces = [i for i,(launched,_) in enumerate(seen) if launched]
    assert len(pieces)==3 and all(seen[i-1]==(0,['r0']) for i in pieces[1:]), seen

def test_late_by_one_step():
    "The same events, those of decoding one step later, and no more steps than that"
    first = ask(0, 70, 9)
    second = ask(1, 5, 12)
    arrivals = [(first,0), (second,3)]
    at_once,steps = serve(engine(False), arrivals)
    late,late_steps = serve(engine(True), arrivals)
    assert at_once.keys()==late.keys()
    for rid,events in at_once.items():
        assert said(events)==said(late[rid])
    assert len(steps)<len(late_steps)<=len(steps)+3

def test_aborted_in_the_air():
    e = engine(True)
    e.add(ask(0, most=30))
    e.add(ask(1, most=30))
    for _ in range(4):
        e.step()
    assert e.flying
    assert [v.finish for v in e.abort('r0')]==['abort']
    assert e.abort('r0')==[]
    again = ask(0, 20, 5)
    e.add(again)  # the id is free at once, although its old row is still under way
    got,_ = serve(e, [])
    assert said(got['r0'])==said(alone(again))
    assert got['r1'][-1].finish=='length'

def new_at_its_seventh():
    "A number of a request whose seventh token is none of its first six, and that token"
    for i in range(99):
        x = tokens(alone(ask(i)))
        if x[6] not in x[:6]:
            return i,x[6]

@either_way
def test_an_end_while_somebody_has_to_leave(late):
    """A step is planned at the cost of a sequence,
    and then the answer it was for turns out to have ended with the step before"""
    i,end = new_at_its_seventh()
    r = ask(i, most=9, stop_token_ids=(end,))  # its eighth token would need a second block
    other = ask(100, 180, 12, priority=1)  # has all others
    e = engine(late, blocks=13, overcommit=4.)
    got,_ = serve(e, [(other,0), (r,3)])
    assert len(said(got[r.id]))==7
    assert got[r.id][-1].finish=='stop'
    assert e.scheduler.totals['preemptions']==late
    assert said(got[other.id])==said(alone(other))

@either_way
def test_logits_that_are_no_numbers(late):
    "The row fails, also when its next one is under way already, and nobody else notices"
    e = engine(late)
    other = ask(1, 20, 12)
    e.add(ask(0, 20, 12))
    e.add(other)
    before = [v for _ in range(4) for v in e.step()]
    block = e.scheduler.seqs['r0'].table.blocks[0]
    e.cache.kv[1].k[block] = np.nan
    rest,_ = serve(e, [])
    assert rest['r0'][-1].code=='corrupted_output'
    assert e.stats()['corrupted_requests_total']==1
    others = [v for v in before if v.id=='r1']+rest['r1']
    assert said(others)==said(alone(other))

@either_way
def test_a_prompt_without_memory(late):
    e = engine(late)
    launch = e.stepper.launch
    def tight(plan, samplers):
        prompts = [s.id for s,*_ in plan.prefill]
        if 'r1' in prompts:
            raise MemoryError
        return launch(plan, samplers)
    e.stepper.launch = tight
    first,second = ask(0, most=9),ask(1, 20)
    got,_ = serve(e, [(first,0), (second,3)])
    assert got['r1'][-1].code=='out_of_memory'
    assert said(got['r0'])==said(alone(first))

@pytest.mark.parametrize('at', range(1, 9))
@either_way
def test_interrupted(late, at):
    "A launch that an impatient reader's Ctrl-C ends half-way has destroyed nothing"
    e,r = engine(late),ask(0, 70, 6)
    n,head = 0,type(MODEL).head
    def failing(self, *rows):
        nonlocal n
        n += 1
        if n==at:
            raise KeyboardInterrupt
        return head(self, *rows)
    e.add(r)
    got = []
    with pytest.MonkeyPatch.context() as mp:
        mp.setattr(type(MODEL), 'head', failing)
        while e.has_work:
            try:
                got += e.step()
            except KeyboardInterrupt:
                pass
    assert said(got)==said(alone(r))

# Guides

class Guide:
    "Lets each of `may` come once, in that order; then it is whole"
    error,code = None,'guide_failed'
    def __init__(self, may):
        self.may,self.n = may,0
    ended = property(lambda self: self.n>=len(self.may))
    def accept(self, t):
        self.n += 1
    def mask(self):
        bits = np.zeros(-(-V//32)*32, bool)
        if not self.ended:
            bits[self.may[self.n]] = True
        return np.packbits(bits, bitorder='little').view(np.uint32)
GUIDES = SimpleNamespace(start=Guide)

@either_way
def test_guides(late):
    "A step with a guided sequence lands before the next is planned, one without does not"
    free = ask(0, most=20)
    held = ask(1, most=20, guide=[7,3,9])
    e = engine(late, guides=GUIDES)
    e.add(free)
    e.add(held)
    flown,events = [],[]
    while e.has_work:
        events += e.step()
        flown.append(e.flying is not None)
    guided = [v for v in events if v.id=='r1']
    assert [v.token for v in guided]==[7,3,9,None]
    assert guided[-1].finish=='stop'
    others = [v for v in events if v.id=='r0']
    assert said(others)==said(alone(free))
    assert any(flown)==late

# Steps that accept several tokens of a sequence

class ScriptedStepper(HostStepper):
    """Gives of each sequence what `says(seq, k)` lists for its `k`-th decode step;
    the first token is the model's, and is a 1"""
    says = None
    def launch(self, plan, samplers):
        for s in samplers:
            s.row()
        new = [[1] for _ in plan.first]
        new += [self.turn(s) for s in plan.decode]
        return Flight(plan, self.sampled(new, plan.width))
    def land(self, flight): return flight.sampled
    def sampled(self, new, width):
        "What a sampler gives that accepted `new` of each sequence: the log probability of 2 is -2"
        ids = np.full((len(new),width), -1, np.int32)
        for row,mine in zip(ids, new):
            row[:len(mine)] = mine
        accepted = np.array(list(map(len, new)), np.int32)
        probs = -ids.astype(np.float32)
        return Sampled(ids, probs, ids[...,None], probs[...,None], accepted)
    def turn(self, seq):
        "What the next decode step of `seq` says"
        k = self._air.get(seq, 0)
        self._air[seq] = k+1
        return self.says(seq, k)

def ahead(e):
    "How far each sequence that decodes has gone beyond what is sure, and its rows under way"
    decoding = [s for s in e.scheduler.running if s.state=='decode']
    return {(s.num_computed-len(s)+1, s.flying) for s in decoding}

def scripted(late, says, requests, **kw):
    "What comes of `requests` when a step of three rows says what `says` has"
    e = engine(late, stepper=ScriptedStepper, drafts=2, **kw)
    e.scheduler.width,e.stepper.says = 3,says
    for r in requests:
        e.add(r)
    out,bounds,turns = {},set(),0
    while e.has_work:
        turns += 1
        assert turns<500, 'no end'
        note(e.step(), out)
        bounds |= ahead(e)
    e.land()
    assert not e._samplers
    assert e.scheduler.pool.used==0 and e.cache.pool.used==0
    assert all(n==3*flying for n,flying in bounds), 'what was rejected was not taken back'
    return e,out

def digits(text):
    "Tokens by their digits; spaces show the steps"
    return [int(c) for c in text if c!=' ']

def three_one_two(seq, k):
    "2 to 7, again and again: three of them accepted in a step, then one, then two"
    steps = '234 5 67'.split()
    return digits(steps[k%3])

def three(seq, k): return digits('234')

@either_way
def test_several_tokens_a_step(late):
    "Each accepted token is an event, with its own log probability; what was rejected is not"
    first = ask(0, 20, 14, logprobs=1)
    second = ask(1, 5, 9)
    _,got = scripted(late, three_one_two, [first, second])
    mine,other = got['r0'],got['r1']
    assert tokens(mine)==digits('1 234 5 67 234 5 67 2')
    assert tokens(other)==digits('1 234 5 67 23')
    for v in mine[1:4]:
        assert v.logprob==-v.token
        assert v.top==[(v.token,-v.token)]
    finishes = [v.finish for v in mine]
    assert finishes==[None]*13+['length']
    waited = [v.waited is not None for v in mine]
    assert waited==[True]+[False]*13
    assert all(v.logprob is None for v in other)

MIDDLES = [  # what is asked, what is said, the last event's token and why it is the last
    (dict(most=30, stop_token_ids=(3,)), '1 23', 3, 'stop'),
    (dict(most=6), '1 234 23', 3, 'length'),
    (dict(most=30, guide=digits('123423')), '1 234 23', None, 'stop'),
    (dict(most=30, guide=digits('123')), '1 23', None, 'stop'),
]

@either_way
def test_an_end_in_the_middle(late):
    "A stop token, the last token there is room for, and a guide's end, with more behind them"
    requests = []
    for i,(how,*_) in enumerate(MIDDLES):
        requests.append(ask(i, 9 if i else 20, **how))
    _,got = scripted(late, three, requests, guides=GUIDES)
    for i,(_,want,token,finish) in enumerate(MIDDLES):
        mine = got[f'r{i}']
        assert tokens(mine)==digits(want)
        assert mine[-1].token==token
        assert mine[-1].finish==finish

@either_way
def test_nothing_accepted_is_a_failure(late):
    def says(seq, k):
        nothing = seq.id=='r0' and k==2
        return [] if nothing else [2,3]
    first = ask(0, 20, 30)
    second = ask(1, 9, 8)
    _,got = scripted(late, says, [first, second])
    assert tokens(got['r0'])==digits('1 23 23')
    assert got['r0'][-1].code=='corrupted_output'
    assert tokens(got['r1'])==digits('1 23 23 23 2')

@either_way
def test_several_tokens_and_little_room(late):
    "Sequences push each other out, and are replayed to where they were"
    requests = [ask(i, 30, 40) for i in range(4)]
    e,got = scripted(late, three_one_two, requests, blocks=13, overcommit=4.)
    assert e.scheduler.totals['preemptions']>1
    assert e.scheduler.totals['replay_tokens']>9
    want = digits('1'+'234567'*7)
    for v in got.values():
        assert tokens(v)==want[:40]
        assert v[-1].finish=='length'

def test_what_is_compiled_late_is_counted():
    "One list, and its length among the numbers; none before the engine is warm"
    def counted(): return e.stats()['jit_after_ready_total']
    e = engine()
    assert e.late is None and counted()==0
    e.warm()
    e.late += ['gemv','rope']
    assert counted()==2
