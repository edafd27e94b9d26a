"""Drafts change nothing: whoever guesses, however many are checked, and whatever comes between.

A made-up hybrid is run by NumPy, at once or one step late. Every answer is to be
the one that its request gets alone and without drafts: tokens, log probabilities and end."""
from collections import Counter
from dataclasses import replace
from pathlib import Path
import numpy as np,pytest
from hypothesis import given,settings,strategies as st
import atlas.engine.stepper
from atlas.model.model import Piece,make_batch
from atlas.ops.accept import accept
from atlas.ops.sample import candidates
from atlas.ground.core import RequestError,SourceError,UnsupportedError
from atlas.engine.scheduler import Request
from atlas.ops.sample import SamplingParams
from atlas.use.llm import LLM
from helpers.reference import model,refs
from helpers.small_engine import HOWS as PLAIN,V,arrivals,as_alone,ask,drawn
from helpers.small_engine import interrupted,left_clean,said,serve,small_cache,tokens
from helpers.speculation import CONFIG,Dice,KINDS,MODEL,Watched,alone,beyond
from helpers.speculation import count_ends,engine,watch_aborts

either_way = pytest.mark.parametrize('late', (False,True))
each_kind = pytest.mark.parametrize('kind', KINDS)

SETS = tuple(tuple(range(i, V, 3))
    for i in (0,1,2,1))
TEXT = (7,),(3,),(9,)
HOWS = [*PLAIN,
    dict(guide=TEXT*3, logprobs=1),
    dict(guide=SETS*2, temperature=1., seed=2),
    dict(guide=SETS, repetition_penalty=1.5)]

# Random schedules

one = drawn([1,5,30,64,70,130],
    [1,7,20,30], HOWS)
asked = st.lists(one, min_size=3, max_size=7)
whom = st.integers(0, 4)
when = st.integers(3, 18)
left = st.tuples(whom, when)  # who is aborted, before which step
seeds = st.integers(0, 99)
DRAWN = dict(
    asks=asked,
    blocks=st.sampled_from([13,13,16,40]),
    seqs=st.sampled_from([1,2,4,4]),
    over=st.sampled_from([1.,4.,4.]),
    gone=st.lists(left, min_size=1, max_size=3),
    kind=st.sampled_from([*KINDS,'oracle','gaps']),
    k=st.integers(1, 7),
    lies=st.sampled_from([0.,.2,.5]),
    dice=st.none()|st.none()|seeds)

def knowing(some):
    "What an oracle is told of requests that arrive"
    return dict(answers=[beyond(r) for r,_ in some])

def counted(some, got, seen):
    "Every answer is what it is alone; how they ended goes to `seen`"
    for r,_ in some:
        mine = got.get(r.id, [])
        as_alone(mine, alone(r))
        if mine:
            count_ends(mine, seen)

def schedule(seen, asks, gone, kind, k, late,
        blocks, seqs, over, lies, dice):
    "Serve all of it; every answer is what it is alone"
    some = arrivals(asks)
    class Counted(Watched):
        pass
    Counted.seen = seen
    who = dict(knowing(some), lies=lies)
    arbiter = None if dice is None else Dice(k, dice)
    e = engine(kind, k, late, blocks, seqs, Counted,
        arbiter=arbiter, who=who, overcommit=over)
    watch_aborts(e, seen)
    aborts = [(f'r{i}', at) for i,at in gone]
    got,_ = serve(e, some, aborts)
    counted(some, got, seen)
    seen['preemptions'] += e.scheduler.totals['preemptions']
    assert not (arbiter and arbiter.limits), 'somebody who left is still known'

HAPPENED = ['all accepted','some accepted','none accepted','stopped inside','full inside',
    'guide ended inside','aborted in the air','widths changed','preemptions','chunks','replays']

def test_random_schedules():
    "Arrivals, aborts, priorities, little room, chunks, all kinds of requests, drafters and K"
    seen = Counter()
    @settings(max_examples=50, deadline=None, derandomize=True, database=None)
    @given(**DRAWN)
    def run(**drawn):
        for late in (False,True):
            schedule(seen, **drawn, late=late)
    run()
    missing = [what for what in HAPPENED if seen[what]<3]
    assert not missing, f'{missing} hardly happened: {seen}'

LENGTHS = 5,64,130,1,70,63,10,9,9,9
MOST = 20,30,7,40,30,25,12,20,20,20

@each_kind
@either_way
def test_much_at_once(kind, late):
    "All kinds of requests in one engine with little room"
    asks = zip(LENGTHS, MOST, [0]*10, HOWS, range(10))
    some = arrivals(asks)
    for k in (1,4):
        e = engine(kind, k, late, 16, who=knowing(some), overcommit=4.)
        got,_ = serve(e, some)
        for r,_ in some:
            as_alone(got[r.id], alone(r))
        assert any(drafted(got))

def drafted(got):
    "Of each event, whether a draft was accepted"
    return [bool(v.drafted) for events in got.values() for v in events]

# What breaks

def patient(e, error):
    "Events of all that `e` has to do, whatever is raised"
    got,n = [],0
    while e.has_work:
        try:
            got += e.step()
        except error:
            n += 1
    assert n==1
    left_clean(e)
    return got

@pytest.mark.parametrize('error', [KeyboardInterrupt,RuntimeError])
@pytest.mark.parametrize('kind', ['mtp','draft','oracle'])
@either_way
def test_interrupted(late, kind, error):
    """A launch that is cut off in the drafter, or when it is done, has destroyed nothing:
    with a Ctrl-C, or with an error of the drafter, which is an error of the step"""
    r = ask(0, 70, 12, **HOWS[3])
    who = knowing([(r,0)])
    places = ['see','propose'] if late else ['see','propose','launch']
    for name in places:
        for at in range(1, 6):
            e = engine(kind, 3, late, who=who)
            holder = e.stepper if name=='launch' else e.stepper.drafter
            calls = interrupted(holder, name, at, error)
            e.add(r)
            assert said(patient(e, error))==said(alone(r))
            assert calls()>at

def test_interrupted_when_it_is_in_the_air():
    "A launch that is cut off when a late step is done counts for nothing"
    r = ask(0, 70, 12)
    e = engine('mtp', 3, True)
    interrupted(e.stepper, 'launch', 3)
    e.add(r)
    assert said(patient(e, KeyboardInterrupt))==said(alone(r))

@each_kind
@either_way
def test_a_prompt_without_memory(late, kind):
    "It is shed, and who decodes goes on with the drafts that he has"
    first = ask(0, most=25, logprobs=0)
    e = engine(kind, 3, late, who=knowing([(first,0)]))
    launch = e.stepper.launch
    def tight(plan, samplers):
        out = launch(plan, samplers)
        prompts = [s.id for s,*_ in plan.prefill]
        if 'r1' in prompts:
            raise MemoryError
        return out
    e.stepper.launch = tight
    got,_ = serve(e,
        [(first,0), (ask(1, 20),3)])
    assert got['r1'][-1].code=='out_of_memory'
    assert said(got['r0'])==said(alone(first))

@either_way
def test_logits_that_are_no_numbers(late):
    "What was said before them counts; then the row fails, and nobody else notices"
    both = [(ask(i, 20, 30), 0) for i in range(2)]
    e = engine('oracle', 3, late, who=knowing(both))
    for r,_ in both:
        e.add(r)
    before = [v for _ in range(4) for v in e.step()]
    block = e.scheduler.seqs['r0'].table.blocks[0]
    e.cache.kv[1].k[block] = np.nan
    rest,_ = serve(e, [])
    assert rest['r0'][-1].code=='corrupted_output'
    assert e.stats()['corrupted_requests_total']==1
    def whole(id):
        return said([v for v in before if v.id==id]+rest[id])
    mine,others = whole('r0'),whole('r1')
    first,other = [said(alone(r)) for r,_ in both]
    assert mine==first[:len(mine)]
    assert others==other

@either_way
def test_a_drafter_without_numbers(late):
    "Its guesses are dropped, and the answers go on, with those drafts that it has"
    r = ask(3, 9, 30)
    def steps(share):
        e = engine('broken', 3, late)
        e.stepper.drafter.share = share
        got,_ = serve(e, [(r,0)])
        as_alone(got[r.id], alone(r))
        return e.steps,e.stats()['spec_decode_invalid_total']
    e = engine('mtp', 3, late)
    serve(e, [(r,0)])
    all_steps,dropped = steps(1.)
    assert all_steps==steps(1.)[0]>=30
    assert dropped>=28
    assert steps(0.)==(e.steps,0)
    assert e.steps<30

# Many of them

@pytest.mark.parametrize('n', [300,10_000])
def test_many_come_and_go(n):
    "Random requests with random aborts: each ends once, and nothing of them is left"
    rng = np.random.default_rng(n)
    dice = Dice(3, n)
    how = dict(blocks=30, seqs=16, overcommit=3.)
    e = engine('draft', 3, True, arbiter=dice, **how)
    ended,came = Counter(),0
    while came<n or e.has_work:
        for _ in range(int(rng.integers(0, 7))):
            if came==n or len(e.scheduler.seqs)>24:
                break
            e.add(short(came, rng))
            came += 1
        events = e.step()
        if rng.random()<.5:
            events += leave_one(e, rng)
        for v in events:
            ended[v.id] += v.finish is not None
    left_clean(e)
    assert len(ended)==n and set(ended.values())=={1}
    ways = e.scheduler.finished
    assert sum(ways.values())==n
    assert min(ways['abort'], ways['length'])>n/50
    assert dice.noted[True]>n/4

def short(i, rng):
    "A short request"
    def draw(lo, hi): return int(rng.integers(lo, hi))
    n,most = draw(1, 20),draw(1, 9)
    priority = draw(-1, 2)
    how = HOWS[draw(0, len(HOWS))]
    most = max(most, how.get('min_tokens', 0))
    return ask(i, n, most, priority, **how)

def leave_one(e, rng):
    "Abort somebody"
    ids = list(e.scheduler.seqs)
    if not ids:
        return []
    i = rng.integers(len(ids))
    return e.abort(ids[i])

@either_way
def test_the_arbiter_is_told_what_was_checked(late):
    "Never fewer drafts than were accepted"
    some = [(ask(i, 9, 30),0) for i in range(4)]
    dice = Dice(3, 0, calm=.5)
    e = engine('draft', 3, late, arbiter=dice)
    def three(*_): return 3
    e.arbiter.drafts = three
    serve(e, some)
    assert dice.noted[True]>9 and not dice.noted[False]

# What is drawn

DRAWS = 600
HOW = dict(temperature=1.2, top_k=3)

def after(ids):
    "Logits after `ids`"
    cache = small_cache(CONFIG, 4, 2)
    piece = Piece(ids, 0, [0], 1, 0, 1)
    b = make_batch([piece], True, 16, MODEL.device)
    return MODEL.forward(b, cache)[0]

def chances(ids, n, params):
    "Every text of `n` tokens after `ids`, and its probability"
    if not n:
        return {(): 1.}
    tokens,w = candidates(after(ids), params)
    out = {}
    share = (w/w.sum()).tolist()
    for t,p in zip(tokens.tolist(), share):
        rest = chances([*ids,t], n-1, params)
        out |= {(t,*text): p*q
            for text,q in rest.items()}
    return out

def surprise(found, expected):
    "Standard deviations of a normal that chi-square of the counts stands for; rare texts are one"
    n,cells = sum(found.values()),Counter()
    wanted = Counter()
    for t,p in expected.items():
        cell = t if n*p>=5 else 'rare'
        cells[cell] += found[t]
        wanted[cell] += n*p
    chi = sum((cells[t]-e)**2/e
        for t,e in wanted.items())
    k = len(wanted)-1
    v = 2/(9*k)
    root = (chi/k)**(1/3)
    return (root-(1-v))/v**.5

def texts():
    "How often each text of three tokens came, drawn with drafts; and the share of drafts"
    e = engine('draft', 2, True, 96, 32)
    first,some = ask(0, 5, 3),[]
    for i in range(DRAWS):
        r = ask(i, 5, 3, **HOW, seed=i)
        r = replace(r, prompt=first.prompt)
        some.append((r, i//20))
    got,_ = serve(e, some)
    said = [tuple(tokens(events)) for events in got.values()]
    return Counter(said),np.mean(drafted(got))

def expected_texts():
    "Of a request of `texts`"
    r = ask(0, 5, 3, **HOW)
    return chances(list(r.prompt), 3, r.params)

def test_drawn_as_without_drafts():
    "The chances of the first three tokens are the model's, over many seeds"
    found,drafted = texts()
    assert set(found)<=set(expected_texts())
    assert abs(surprise(found, expected_texts()))<4
    assert .1<drafted<.6

def likely_drafts(out, least):
    "Wrong: a draft of more than `least` chance is what was said"
    def by_seq(said, first, turns):
        s = out(said, first, turns)
        for i,t in enumerate(turns, first):
            for j,d in enumerate(t.ids[1:]):
                p = np.exp(s.top_logprobs[i,j])
                likely = p[s.top_ids[i,j]==d]>least
                if s.counts[i]<=j or not likely.any():
                    continue
                s.ids[i,j] = d
                s.counts[i] = j+2
        return s
    return by_seq

def all_drafts(said, drafts, live):
    "Wrong: every draft was right, and what was said after it counts"
    return live

def half_of_the_drafts(said, drafts, live):
    "Wrong: a coin says whether a draft is right, and then it is what was said"
    rng = np.random.default_rng(int(said.sum()))
    right = (drafts>=0)&(rng.random(drafts.shape)<.5)
    said[:,:-1][right] = drafts[right]
    return accept(said, drafts, live)

WRONG = [all_drafts,half_of_the_drafts]

@pytest.mark.parametrize('rule', WRONG, ids=lambda f: f.__name__)
def test_a_wrong_rule_is_seen(rule, monkeypatch):
    monkeypatch.setattr(atlas.engine.stepper, 'accept', rule)
    found,_ = texts()
    expected = expected_texts()
    possible = Counter({t: found[t] for t in expected})
    assert surprise(possible, expected)>5 or found.keys()-expected

def test_likely_drafts_are_seen(monkeypatch):
    "Who takes a draft because it is likely draws it too often"
    real = atlas.engine.stepper._by_seq
    monkeypatch.setattr(atlas.engine.stepper, '_by_seq', likely_drafts(real, .4))
    monkeypatch.setitem(HOW, 'logprobs', 3)
    found,_ = texts()
    assert surprise(found, expected_texts())>5

# Images in the prompt

@pytest.fixture(scope='module')
def seer():
    "A model that sees, with a drafting head, and a prompt with two images"
    name = 'qwen35-moe-stacked'
    r,m = refs[name],model(name)
    cut = int(np.prod(r['grid'][0]))
    pixels = r['pixels'].astype(np.float32)
    grids = [tuple(g) for g in r['grid'].tolist()]
    two = pixels[:cut],pixels[cut:]
    images = tuple(zip(two, grids))
    return m,tuple(r['image_ids'].tolist()),images

@pytest.mark.parametrize('kind', ['mtp','draft','oracle'])
@either_way
def test_images_in_the_prompt(seer, kind, late):
    "Rows behind images have other positions; drafts and answers do not mind"
    m,*prompt = seer
    some = seen_by(*prompt)
    def serve_with(*how, **more):
        e = engine(*how, model=m, **more)
        return serve(e, some)[0]
    plain = serve_with()
    answers = [(*r.prompt, *tokens(plain[r.id]))
        for r,_ in some]
    for k in (1,4):
        got = serve_with(kind, k, late, who=dict(answers=answers))
        for r,_ in some:
            assert said(got[r.id])==said(plain[r.id])
        if kind!='mtp':
            assert any(v.drafted for v in got['r0'])
    assert tokens(plain['r0'])!=tokens(plain['r2'])

def seen_by(ids, images):
    "Requests about images, one without, and when they arrive"
    hows = dict(logprobs=1),dict(temperature=1., seed=1),dict(frequency_penalty=.8)
    greedy = dict(temperature=0, ignore_eos=True)
    some = []
    for i,how in enumerate(hows):
        params = SamplingParams(**greedy|dict(max_tokens=14)|how)
        r = Request(f'r{i}', ids, params, images=images)
        some.append((r, 2*i))
    params = SamplingParams(**greedy, max_tokens=20)
    return [*some, (Request('text', ids[:3], params), 6)]

# What does not go together

DATA = Path(__file__).parent/'data'
def load(name, **kw):
    if 'draft_model' in kw:
        kw['draft_model'] = str(DATA/kw['draft_model'])
    small = dict(max_seq_len=128, max_num_seqs=2, show=False)
    return LLM(str(DATA/name), 'cpu', **small, **kw)

BAD = [
    ('smollm2-tied', dict(speculative='mtp'), UnsupportedError, 'no drafting head'),
    ('smollm2-tied', dict(speculative='draft'), RequestError, 'needs a model that drafts'),
    ('smollm2-tied', dict(speculative='eagle'), RequestError, 'eagle'),
    ('smollm2-tied', dict(draft_model='qwen3-tied-wide'), UnsupportedError, '144 tokens .* 160'),
    ('smollm2-tied', dict(draft_model='nothing'), SourceError, 'not a file or folder'),
    ('gemma4-dense', dict(draft_model='gemma4-assistant'), UnsupportedError, 'does not fit'),
    ('qwen35-moe-stacked', dict(speculative=True, num_speculative_tokens=8), RequestError, '8'),
    ('qwen35-moe-stacked', dict(speculative=True, num_speculative_tokens=0), RequestError, '0'),
]

@pytest.mark.parametrize('name,how,error,said', BAD)
def test_what_does_not_fit_is_refused(name, how, error, said):
    with pytest.raises(error, match=said) as e:
        load(name, **how)
    assert e.value.hint or 'expected' in str(e.value)

GOOD = [
    ('smollm2-tied', dict(speculative=True), 'ngram, 4 drafts (the model has no head of its own)'),
    ('smollm2-tied', dict(), 'off'),
    ('qwen35-moe-stacked', dict(speculative=True), 'mtp, 2 drafts'),
    ('qwen35-moe-stacked', dict(num_speculative_tokens=1), 'mtp, 1 draft'),
    ('qwen35-moe-stacked', dict(speculative='ngram', num_speculative_tokens=7), 'ngram, 7 drafts'),
    ('gemma4-moe', dict(draft_model='gemma4-assistant'), 'draft, 3 drafts'),
    ('nemotron-h', dict(speculative=True, draft_model='nemotron-h'), 'draft, 3 drafts'),
]

@pytest.mark.parametrize('name,how,word', GOOD)
def test_it_is_said_who_drafts(name, how, word):
    "And the answer is the one without drafts"
    prompt = [5,6,7,5,6,7,5]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    plain,other = load(name),load(name, **how)
    assert str(other.drafting)==word
    want,got = (llm.generate(prompt, params) for llm in (plain,other))
    assert got.token_ids==want.token_ids
    plain.close()
    other.close()
