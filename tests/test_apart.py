"""Prompts that stay in the air while others decode, as on a card of which steps get a part.

The card may compute such a prompt at any time: here as early as it can, or not before
somebody waits for it. Whatever comes, goes, ends, fails and has to leave meanwhile,
everybody is answered as alone."""
from collections import Counter
from functools import partial
import numpy as np,pytest
from hypothesis import given,settings,strategies as st
from atlas.card.emulator import find_cxx
from atlas.engine import card_stepper,policy
from atlas.engine.policy import Load,Policy
from atlas.engine.scheduler import Plan
from atlas.engine.stepper import Flight,HostStepper,_by_seq
from atlas.ops.sample import sample
from helpers.small_engine import alone,ask,engine,said,serve
from test_card import models
from test_prefix import DRAWN,compare,engine as with_tree,left_empty,run,talk,tell
from test_speculation_card import asked,engine as on_card

on_emulator = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')

class Whenever(HostStepper):
    "Computes prompts that stay in the air at once, or as late as possible"
    part,seen,late = .03,Counter(),True
    def launch(self, plan, samplers):
        if not (plan.apart and plan.prefill):
            return super().launch(plan, samplers)
        assert not plan.decode and not plan.replay
        flight = Flight(plan)
        flight.work = partial(self._said, plan, samplers)
        self.seen['prompts'] += 1
        if not self.late:
            self.wait(flight)
        return flight
    def prompts_first(self, plan):
        "Either may be"
        return sum(self.seen.values())%2>0
    def wait(self, flight):
        if flight.sampled is not None:
            return
        flight.sampled = flight.work()
        flight.early = not self.late
    def land(self, flight):
        if hasattr(flight, 'work'):
            self.wait(flight)
        return super().land(flight)
    def _said(self, plan, samplers):
        logits = self._logits(self._passes(plan, []))
        out = sample(logits, [state.row() for state in samplers])
        return _by_seq(out, len(samplers), [])

class Often(Policy):
    "Divides the card whenever it may, and lets steps end by chance"
    def __init__(self, seed=0, share=.96):
        super().__init__()
        self.rng,self.share = np.random.default_rng(seed),share
    def apart(self, line, decode, chunk, width): return chunk if line and decode else 0
    def fits(self, *_): return self.rng.random()<self.share

def stepper(seen, late):
    "A kind of stepper that counts in `seen`"
    return type('Counted', (Whenever,), dict(seen=seen, late=late))

HAPPEN = ['hits','evictions','preemptions','aborted','fetched','restores','prompts','steps',
    'waited','left']
GONE = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 25)),
    min_size=3, max_size=9)

APART = {k: v for k,v in DRAWN.items() if k not in ('kind','k','dice')}|dict(gone=GONE)

@pytest.mark.parametrize('late', [False,True])
def test_random_schedules(late):
    "Arrivals, aborts, priorities, little room, chunks, salts, fills, and a second tier"
    seen = Counter()
    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(**APART, seed=st.integers(0, 99), overlap=st.booleans())
    def drawn(asks, blocks, seqs, over, extra, chunk, gone, spill, seed, overlap):
        some = [(talk(i, **how), at) for i,(how,at) in enumerate(asks)]
        e = with_tree('none', 0, overlap, blocks, seqs, stepper(seen, late), prefix=extra,
            chunk=chunk, spill=spill, overcommit=over, policy=Often(seed))
        watch(e, seen)
        got = run(e, some, [(f'r{i}', at) for i,at in gone], seen)
        compare(some, got, seen)
        tell(e, seen)
        left_empty(e.scheduler.prefix)
    drawn()
    missing = [what for what in HAPPEN if seen[what]<3]
    assert not missing, f'{missing} hardly happened: {seen}'

def watch(e, seen):
    "Count steps beside a prompt in the air, and who had to wait for it, and who left meanwhile"
    s,launch = e.scheduler,e.stepper.launch
    def launched(plan, samplers):
        seen['steps'] += e.prompt is not None
        return launch(plan, samplers)
    stop = s._stop
    def stopped(seq):
        seen['waited'] += seq in s.aloft
        seen['left'] += bool(s.aloft) and seq not in s.aloft
        return stop(seq)
    e.stepper.launch,s._stop = launched,stopped

def flown(late, steps, **kw):
    "An engine that lets so many steps go beside each prompt, one of which is in the air"
    class Some(Often):
        def fits(self, *_):
            self.left -= 1
            return self.left>=0
        def apart(self, *how):
            self.left = steps-1
            return super().apart(*how)
    e = engine(late, stepper=stepper(Counter(), True), policy=Some(), **kw)
    e.add(ask(0, 5, 40))
    for _ in range(4):
        e.step()
    e.add(ask(1, 60, 5))
    while e.prompt is None:
        e.step()
    return e

@pytest.mark.parametrize('prompts', [False,True])
def test_who_begins(prompts, monkeypatch):
    "The prompt or the step beside it, as the stepper says"
    begun,launch = [],Whenever.launch
    def noted(self, plan, samplers):
        if plan.apart:
            begun.append(bool(plan.prefill))
        return launch(self, plan, samplers)
    monkeypatch.setattr(Whenever, 'launch', noted)
    monkeypatch.setattr(Whenever, 'prompts_first', lambda self, plan: prompts)
    e = flown(False, 2)
    assert begun[:2]==[prompts,not prompts]
    assert rest(e)['r0'][-1].finish=='length'

def rest(e):
    "What `e` still says, by request"
    return serve(e, [])[0]

both = pytest.mark.parametrize('late', [False,True])

@both
@pytest.mark.parametrize('steps', [1,2,5])
def test_steps_go_on(late, steps):
    "So many tokens of the answer come before the first of the prompt's"
    e,told = flown(late, steps),[]
    while not any(v.id=='r1' for v in told):
        told += e.step()
    assert [v.id for v in told].count('r0')==steps-(not late) # one was told before
    assert e.prompt is None and not e.scheduler.aloft
    got = rest(e)
    assert said(
        [v for v in told if v.id=='r1']+got['r1'])==said(alone(ask(1, 60, 5)))

@both
def test_nobody_finds_tiles_that_are_not_there(late):
    "The scheduler hears of a prompt when it has landed"
    e = flown(late, 3)
    q = e.scheduler.seqs['r1']
    assert q.num_computed==0 and q.state=='prefill'
    while e.prompt:
        e.step()
    assert q.num_computed>=60

@both
def test_an_abort_waits(late):
    "For the prompt in the air, and before its blocks are anybody's"
    e = flown(late, 5)
    flight,table = e.prompt,e.scheduler.seqs['r1'].table
    real = table.release
    def release():
        assert flight.sampled is not None
        return real()
    table.release = release
    assert [v.finish for v in e.abort('r1')]==['abort'] and not table.blocks
    got = rest(e)
    assert 'r1' not in got and got['r0'][-1].finish=='length'

@both
def test_an_id_comes_back(late):
    "While the prompt of its old owner is still in the air"
    e = flown(late, 5)
    e.abort('r1')
    again = ask(1, 20, 4)
    e.add(again)
    assert said(rest(e)['r1'])==said(alone(again))

@both
def test_all_leave(late):
    e = flown(late, 5)
    for rid in ('r0','r1'):
        e.abort(rid)
    assert not e.has_work
    e.add(ask(2, 30, 4))
    assert said(rest(e)['r2'])==said(alone(ask(2, 30, 4)))

@both
def test_who_decodes_leaves(late):
    "With nobody left to decode the prompt lands"
    e = flown(late, 9)
    e.abort('r0')
    assert said(rest(e)['r1'])==said(alone(ask(1, 60, 5)))

@both
@pytest.mark.parametrize('at', range(1, 7))
def test_interrupted(late, at):
    "A wait that is cut off, for a step or for a prompt, has lost nothing"
    e,n = flown(late, 3),0
    real = e.stepper.land
    def land(flight):
        nonlocal n
        n += 1
        if n==at:
            raise KeyboardInterrupt
        return real(flight)
    e.stepper.land = land
    got = {}
    while e.has_work:
        try:
            events = e.step()
        except KeyboardInterrupt:
            continue
        for v in events:
            got.setdefault(v.id, []).append(v)
    e.land()
    assert said(got['r1'])==said(alone(ask(1, 60, 5)))
    mine = said(got['r0'])
    assert n>=at and mine==said(alone(ask(0, 5, 40)))[-len(mine):]

@both
def test_a_launch_is_cut_off(late):
    "Of a step beside a prompt"
    e = flown(late, 4)
    real,n = e.stepper.launch,0
    def launch(plan, samplers):
        nonlocal n
        n += 1
        if n==2:
            raise KeyboardInterrupt
        return real(plan, samplers)
    e.stepper.launch = launch
    got = {}
    while e.has_work:
        try:
            events = e.step()
        except KeyboardInterrupt:
            continue
        for v in events:
            got.setdefault(v.id, []).append(v)
    e.land()
    assert said(got['r1'])==said(alone(ask(1, 60, 5)))

@both
def test_numbers_that_are_none(late):
    "A prompt whose logits are none ends alone"
    e = flown(late, 4)
    e.cache.kv[1].k[e.scheduler.seqs['r1'].table.blocks[0]] = np.nan
    assert rest(e)['r0'][-1].finish=='length'

# The policy

def learnt(part=4/132, deadline=.1):
    "A policy that knows a card like an H200: a plain step of four takes 2 ms, 8,192 tokens 140"
    p = Policy(deadline=deadline)
    p.part = part
    for _ in range(3):
        for n in (64,1024,8192):
            p.note(Load(1, n), .004+n*.136/8192)
        p.note(Load(seqs=4), .002)
    return p

class Who:
    "A prompt of so many tokens"
    order,there,num_computed = (0,0),0,0
    def __init__(self, n):
        self.prompt_len = n

def test_where_it_pays():
    "Not without a part, nor before anything is known, nor for a chunk that ends too soon"
    p,long = learnt(),[Who(20000)]
    def chunk(line=long, decode=4, policy=p): return policy.apart(line, [1]*decode, 8192, 1)
    assert chunk()==8192
    assert chunk(decode=8) and not chunk(decode=9)
    assert not chunk(decode=0) and not chunk([])
    assert not chunk([Who(2048)])
    assert not chunk([Who(2000),Who(20000)])  # of one prompt, and it is the first's turn
    assert not chunk(policy=learnt(part=0.))
    assert not chunk(policy=learnt(deadline=.03))
    deep = Who(200_000)
    deep.num_computed = 100_000
    for _ in range(3):
        p.note(Load(1, 8192, 8192*100_000), .5)
    assert chunk([deep])==2048  # who comes meanwhile waits for 0.2 s at most
    new = Policy(deadline=.1)
    new.part = 4/132
    assert not chunk(policy=new)

def test_steps_are_learnt():
    "What they take beside a chunk is no plain step, and says how many find room"
    p = learnt()
    before = p.times.plain(4)
    for _ in range(3):
        p.note(Load(seqs=4, apart=True), .02)
    assert p.times.plain(4)==before and p.times.apart(4, 1, p.part)==.02
    for n,chunk in {8192:8192, 8191:4096, 4096:4096, 4095:0}.items():  # lengths that have graphs
        assert p.apart([Who(n)], [1]*4, 8192, 1)==chunk
    load,spent,n = Load(1, 8192, apart=True),0.,0
    while p.fits(load, spent, 4, 1):
        spent += .02
        n += 1
    assert n==7  # of 140 ms
    for _ in range(30):
        p.note(Load(seqs=4, apart=True), .08)
    assert not p.apart([Who(20000)], [1]*4, 8192, 1)

# A card that is divided: the emulator, with two of its four multiprocessors for steps

FAMILIES = [('llama','bf16'), ('qwen3.6-moe','nvfp4'), ('gpt-oss','mxfp4'), ('gemma','nvfp4'),
    ('nemotron','nvfp4')]

def answers(m, policy=None, **kw):
    "What everybody is told, and the engine: three prompts of several chunks come beside answers"
    some = [(asked(i, n, most, m.c.vocab_size, **how), at)
        for i,(n,most,at,how) in enumerate(ASKED)]
    e = on_card(m, blocks=60, seqs=6, longest=300, policy=policy, **kw)
    got,_ = serve(e, some)
    return {rid: said(events) for rid,events in got.items()},e

ASKED = [(30,40,0,dict(logprobs=2)), (5,30,0,dict(temperature=.9, seed=3)), (150,6,4,{}),
    (90,5,4,dict(temperature=.8, seed=5, presence_penalty=.5)),
    (64,4,12,dict(logprobs=0))]

@pytest.fixture
def divided(monkeypatch):
    monkeypatch.setattr(card_stepper, 'APART', 2)
    monkeypatch.setattr(card_stepper, 'LARGE', 4)

@on_emulator
@pytest.mark.parametrize('toy,weights', FAMILIES)
def test_the_same_bits(toy, weights, divided):
    "As with steps after prompts; both parts have graphs"
    m = models(toy, weights)[1]
    want,e = answers(m)
    assert e.stepper.part==.5 and not any(s.part for s in e.stepper.graphs)
    got,e = answers(m, Often(share=.8))
    assert got==want
    steps = [s for s in e.stepper.graphs if s.part]
    prompts = [s for s,g in e.stepper.prompts.kept.items() if s.part and g]
    assert {s.part for s in steps+prompts}=={2}
    assert not e.stepper.lanes

@on_emulator
def test_its_lengths_have_graphs(divided, monkeypatch):
    "Of chunks beside steps, once nobody has asked for a while"
    monkeypatch.setattr(policy, 'SHORTEST', 64)
    e = on_card(models('llama', 'bf16')[1], blocks=60, seqs=2, longest=300)
    e.stepper._expect_prompts(256)
    while e.idle():
        pass
    beside = [s.rows for s,g in e.stepper.prompts.kept.items() if s.part and g]
    assert sorted(beside)==[64,128,256]
    def first(*tokens):
        fills = [(Who(1000),0,n) for n in tokens]
        return e.stepper.prompts_first(Plan(fills, apart=True))
    at_once = [n for n in range(1, 300) if first(n)]
    assert {-(-n//64)*64 for n in at_once}=={64,128,256} and len(at_once)==192
    assert not first(64, 64)
    assert policy.halvings(320)==[320,128,64] and policy.halvings(32)==[32]

@on_emulator
def test_lanes_come_back(divided):
    "Of a prompt that was given up in the air"
    m = models('llama', 'bf16')[1]
    e = on_card(m, blocks=60, seqs=2, policy=Often(share=1.))
    free = len(e.stepper.free)
    e.add(asked(0, 5, 60, m.c.vocab_size))
    for _ in range(2):
        e.step()
    for i in range(1, 7):
        e.add(asked(i, 30, 5, m.c.vocab_size))
        for _ in range(2):
            e.step()
        assert e.prompt
        e.abort(f'r{i}')
        e.land()
    e.abort('r0')
    e.land()
    assert len(e.stepper.free)==free and not e.stepper.lanes

@on_emulator
def test_who_is_not_divided():
    "Small cards, and steps that check drafts"
    m = models('llama', 'bf16')[1]
    assert on_card(m).stepper.part==0
    with pytest.MonkeyPatch.context() as mp:
        mp.setattr(card_stepper, 'LARGE', 4)
        assert on_card(m).stepper.few is None  # four of four are no part
        mp.setattr(card_stepper, 'APART', 2)
        assert on_card(m, 'ngram', 2).stepper.part==0
