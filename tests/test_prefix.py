"""The tree of prefixes: its books are right whatever happens, and a hit answers what a miss
answers, to the bit.

A made-up hybrid is run by NumPy; in its states whatever was not written is no number."""
from dataclasses import replace
from collections import Counter
from threading import Event
from types import SimpleNamespace
import numpy as np,pytest
from hypothesis import given,settings,strategies as st
from hypothesis.stateful import RuleBasedStateMachine,initialize,invariant,precondition,rule
from atlas.engine.cache import BlockPool,BlockTable
from atlas.engine.prefix import PrefixTree,tile_keys
from atlas.engine.scheduler import Request
from atlas.engine.snapshots import SnapshotTree
from atlas.engine.spill import Fetch
from atlas.ops.linear import TILE
from atlas.ops.sample import SamplingParams
from atlas.use.llm import LLM
from helpers.prefixes import check_tree,emptied
from helpers.small_engine import V,as_alone,interrupted,left_clean,note,said
from helpers.speculation import Dice,KINDS,Watched,alone,beyond,engine

# The tree alone

class Walker:
    "A prompt on its way: what a sequence does with a tree"
    def __init__(self, tree, tokens, salt, ends):
        self.tree,self.tokens,self.at = tree,tokens,0
        r = SimpleNamespace(prompt=tokens, salt=salt, boundaries=ends)
        self.trail = tree.trail(r, tile_keys(tokens[:-1]))
        self.table = BlockTable(tree.pool)

    def go_on(self):
        "Take what there is"
        nodes = self.tree.find(self.trail, len(self.tokens))
        first = len(self.trail.path)*self.tree.per
        blocks = self.tree.enter(self.trail, nodes)
        own = self.table.blocks[first:first+len(blocks)]
        self.table.blocks[first:first+len(blocks)] = blocks
        self.tree.pool.give(own)
        self.at = max(self.at, self.trail.tokens)

    def step(self, tiles, launched):
        "Compute some tiles; if not `launched`, it comes to nothing"
        end = min(self.at-self.at%TILE+tiles*TILE,
            len(self.tokens))
        if self.table.missing(end)>self.tree.pool.available:
            return
        self.table.ensure(end)
        self.tree.mark(self.trail, self.at, end)
        if not launched:
            return
        self.tree.commit(self.trail, self.table, end)
        self.at = end

    def leave(self):
        self.table.release()
        self.tree.leave(self.trail)

class Walks(RuleBasedStateMachine):
    "Prompts with common beginnings come, go on, are cut off and leave"
    @initialize(states=st.none()|st.integers(1, 9),
        size=st.sampled_from([16,32,64]))
    def start(self, states, size):
        pool = BlockPool(24*TILE//size//2, size)
        if states is None:
            self.tree = PrefixTree(pool)
        else:
            self.tree = SnapshotTree(pool, BlockPool(states, 1), 128)
        self.going = []

    @rule(a=st.integers(0, 2),
        n=st.integers(1, 400),
        b=st.integers(0, 2),
        m=st.integers(0, 200),
        salt=st.sampled_from(['','','x']), ends=st.lists(
            st.integers(-5, 700), max_size=5))
    def come(self, a, n, b, m, salt, ends):
        if len(self.going)<4:
            self.going.append(Walker(self.tree,
                [a]*n+[b]*m, salt, ends))

    @precondition(lambda self: self.going)
    @rule(i=st.integers(0, 9),
        tiles=st.integers(1, 5), launched=st.booleans())
    def step(self, i, tiles, launched):
        w = self.going[i%len(self.going)]
        if w.at%TILE==0:
            w.go_on()
        if w.at<len(w.tokens):
            w.step(tiles, launched)

    @precondition(lambda self: self.going)
    @rule(i=st.integers(0, 9))
    def leave(self, i):
        self.going.pop(i%len(self.going)).leave()

    @rule(n=st.integers(0, 9))
    def evict(self, n):
        pool = self.tree.pool
        n = min(n, pool.reclaimable)
        before = pool.free
        self.tree.evict(n)
        assert pool.free>=before+n, 'what can be reclaimed can be had'

    @precondition(lambda self: hasattr(self.tree, 'states'))
    @rule(n=st.integers(0, 9))
    def evict_snapshots(self, n):
        pool = self.tree.states
        n = min(n, pool.reclaimable)
        before = pool.free
        self.tree.evict_snapshots(n)
        assert pool.free>=before+n

    @invariant()
    def books(self):
        if hasattr(self, 'tree'):
            check_tree(self.tree,
                [(w.trail, w.table) for w in self.going])

    def teardown(self):
        if not hasattr(self, 'tree'):
            return
        for w in self.going:
            w.leave()
        check_tree(self.tree)
        emptied(self.tree)

Walks.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestWalks = Walks.TestCase

# With a model

STEMS = [np.random.default_rng(100+i).integers(0, V, 190).tolist() for i in range(2)]
PLAIN = [{}, {}, dict(temperature=.9, seed=3),
    dict(logprobs=2),
    dict(temperature=.8, seed=5, logprobs=0, repetition_penalty=1.3)]

def talk(
    i, stem, n, m, most, how, priority=0, salt='',
    ends=(), fill=False
):
    "Request `i`: `n` tokens of a stem and `m` of its own"
    own = np.random.default_rng(i).integers(0, V, m).tolist()
    params = SamplingParams(**dict(temperature=0, max_tokens=most, ignore_eos=True)|how)
    ids = tuple(STEMS[stem][:n]+own)
    return Request(f'r{i}', ids, params, priority, eos_ids=(V-1,),
        salt=salt, boundaries=tuple(ends), prefill_only=fill)

one = st.fixed_dictionaries(dict(
    stem=st.integers(0, 1),
    n=st.sampled_from([64,100,128,150,190]),
    m=st.sampled_from([0,0,1,3]),
    most=st.sampled_from([1,9,20,25]),
    how=st.sampled_from(PLAIN),
    priority=st.sampled_from([0,0,0,-1,1]),
    salt=st.sampled_from(['','','','s']),
    ends=st.lists(st.integers(0, 190), max_size=3),
    fill=st.sampled_from([False]*5+[True])))
DRAWN = dict(
    asks=st.lists(st.tuples(one, st.integers(0, 14)),
        min_size=4, max_size=8),
    blocks=st.sampled_from([13,16,40,40]),
    seqs=st.sampled_from([4,2,4,1]),
    over=st.sampled_from([1.,4.,4.]),
    extra=st.sampled_from([0,1,2,6]),
    spill=st.sampled_from([None,1<<19,1<<24]),
    chunk=st.sampled_from([64,128,192]),
    gone=st.lists(
        st.tuples(st.integers(0, 5),
            st.integers(1, 12)),
        max_size=3),
    kind=st.sampled_from(['none',*KINDS,'oracle']),
    k=st.integers(1, 4),
    dice=st.none()|st.integers(0, 99))

def going(e):
    "Those who are on their way"
    return [(s.trail, s.table)
        for s in e.scheduler.seqs.values()]

def run(e, some, aborts, seen):
    "Events by request; the books are looked at after each step"
    out,t,todo = {},0,list(some)
    while todo or e.has_work:
        for r,at in todo:
            if at<=t:
                e.add(r)
        todo = [x for x in todo if x[1]>t]
        events = [v for rid,at in aborts if at==t
            for v in e.abort(rid)]
        note(events+e.step(), out)
        check_tree(e.scheduler.prefix, going(e))
        count_marks(e.scheduler, seen)
        t += 1
        assert t<3000, 'no end'
    left_clean(e)
    return out

def count_marks(s, seen):
    "What running sequences read and leave behind"
    trails = [q.trail for q in s.running]
    seen['restored'] += any(t.restored is not None for t in trails)
    shared = Counter(id(n) for t in trails for n in t.path)
    seen['shared'] += any(n>1 for n in shared.values())

def tell(e, seen):
    "Count what happened in an engine"
    s,tree = e.scheduler,e.scheduler.prefix
    seen['hits'] += s.totals['hits']>0
    seen['preemptions'] += s.totals['preemptions']
    for k in ('evictions','restores','snapshot_evictions'):
        seen[k] += getattr(tree, k)
    if tree.tier:
        seen['fetched'] += tree.tier.store.read>0

def knowing(some, kind):
    "What an oracle is told of requests that arrive"
    if kind not in ('oracle','gaps'):
        return {}
    return dict(answers=[beyond(r) for r,_ in some if not r.prefill_only])

HAPPENED = ['hits','restores','evictions','snapshot_evictions','preemptions','shared',
    'some accepted','all accepted','chunks','replays','filled','aborted','fetched']

def left_empty(tree):
    "All of `tree` can be evicted, and nobody waits for a record of its second tier"
    tier = tree.tier
    emptied(tree)
    if tier:
        assert not tier.store._reads
        tier.close()

def test_random_schedules():
    "Arrivals, aborts, priorities, little room, chunks, salts, fills, drafters and K"
    seen = Counter()
    class Counted(Watched):
        "Counts in `seen`"
    Counted.seen = seen
    @settings(max_examples=70, deadline=None, derandomize=True, database=None)
    @given(**DRAWN)
    def drawn(asks, blocks, seqs, over, extra, chunk, gone, kind, k, dice, spill):
        some = [(talk(i, **how), at) for i,(how,at) in enumerate(asks)]
        k = k if kind!='none' else 0
        for late in (False,True):
            arbiter = None if dice is None or not k else Dice(k, dice)
            e = engine(kind, k, late, blocks, seqs, Counted, arbiter=arbiter,
                who=knowing(some, kind), prefix=extra, chunk=chunk, spill=spill, overcommit=over)
            got = run(e, some, [(f'r{i}', at) for i,at in gone], seen)
            compare(some, got, seen)
            tell(e, seen)
            left_empty(e.scheduler.prefix)
    drawn()
    missing = [what for what in HAPPENED if seen[what]<3]
    assert not missing, f'{missing} hardly happened: {seen}'

def compare(some, got, seen):
    "Each answer is the one that its request gets alone, without a tree"
    for r,_ in some:
        mine = got.get(r.id, [])
        if mine:
            seen['aborted'] += mine[-1].finish=='abort'
        if r.prefill_only:
            assert not said(mine)
            seen['filled'] += bool(mine) and mine[-1].finish=='stop'
        else:
            as_alone(mine, alone(r))

# One thing at a time

def answer(e, r, seen=None):
    "What is said to `r`, and how many tokens of prompts were computed for it"
    before = e.scheduler.totals['prefill_tokens']
    out = run(e, [(r,0)], (),
        Counter() if seen is None else seen)
    return said(out[r.id]),e.scheduler.totals['prefill_tokens']-before

def named(r, i):
    return Request(f'again{i}', r.prompt, r.params, boundaries=r.boundaries)

@pytest.mark.parametrize('late', (False,True))
def test_twelve_replays(late):
    "The same request again and again: the same answer, and only the rest of a tile to compute"
    e = engine('mtp', 2, late, prefix=4)
    r = talk(1, 0, 150, 3, 12,
        dict(temperature=.9, seed=3, logprobs=2))
    first,whole = answer(e, r)
    assert whole==153 and first==said(alone(r))
    for i in range(12):
        again,computed = answer(e, named(r, i))
        assert again==first and computed==153-128

def test_only_what_changed_is_computed():
    "A prompt whose end is another, and one whose beginning is"
    e = engine(prefix=6)
    answer(e,
        talk(1, 0, 190, 0, 3, {},
            ends=(70,130)))
    assert answer(e, talk(2, 0, 140, 40, 3, {}))[1]==180-128
    assert answer(e, talk(3, 0, 70, 90, 3, {}))[1]==160-64
    assert answer(e, talk(4, 1, 190, 0, 3, {}))[1]==190

def test_an_end_that_changed_costs_little_of_bare_ids_too():
    "Nobody says where messages end, and the last hundred tokens are others"
    e = engine(prefix=6)
    for i,cached in ((1,0),(2,64)):
        assert answer(e, talk(i, 0, 96, 100, 3, {}))[1]==196-cached

def test_salts_keep_apart():
    e = engine(prefix=6)
    r = [talk(i, 0, 150, 0, 3, {}, salt=s)
        for i,s in enumerate(('','a','b','a'))]
    assert [answer(e, x)[1] for x in r]==[150,150,150,150-128]

def test_forty_turns_cost_what_is_new_in_them():
    "`tiny` has recurrent layers: a turn computes its new tokens and less than two tiles more"
    llm = LLM('tiny', device='cpu')
    p = SamplingParams(temperature=0, max_tokens=1)
    messages,before = [dict(role='system', content='You help with a village. '*12)],0
    for i in range(40):
        seen = ' '.join(f'{i*j%10} cows' for j in range(6))
        messages.append(dict(role='user', content=f'Step {i}: there are {seen}. What now?'))
        computed = -llm.engine.stats()['prefill_tokens_total']
        n = llm.chat(messages, p).usage['prompt_tokens']
        computed += llm.engine.stats()['prefill_tokens_total']
        assert computed<n-before+2*TILE
        before = n
        messages.append(dict(role='assistant', content='Look at the river next.'))
    assert before>20*TILE

def test_one_prompt_for_all_its_answers():
    "Who needs what another computes in this step waits for it"
    e = engine(prefix=6)
    for i in range(4):
        e.add(talk(i, 0, 150, 0, 5,
            dict(temperature=1., seed=i)))
    while e.has_work:
        e.step()
    t = e.scheduler.totals
    assert t['prefill_tokens']==150+3*22 and t['hits']==3*128

def test_a_preempted_answer_finds_its_prompt():
    "What it costs is the rest of a tile, and its answer once more"
    e = engine(prefix=6, seqs=1)
    r = talk(1, 0, 150, 0, 20, {})
    e.add(r)
    for _ in range(8):
        e.step()
    before = Counter(e.scheduler.totals)
    got = run(e,
        [(talk(2, 1, 20, 0, 3, {}, priority=-1),
            0)],
        (), Counter())
    t = e.scheduler.totals
    assert t['preemptions']==1 and t['replay_tokens']>0
    assert t['prefill_tokens']-before['prefill_tokens']==20+150-128
    assert said(got['r1'])==said(alone(r))[-len(said(got['r1'])):]

def test_a_fill_gives_way_and_is_of_use():
    "It computes nothing while an answer is wanted, and the next turn finds what it has computed"
    e = engine(prefix=6)
    fill = talk(1, 0, 190, 0, 1, {}, fill=True)
    other = talk(2, 1, 100, 0, 6, {})
    e.add(fill)
    e.step()
    e.add(other)
    while len(e.scheduler.seqs)>1:
        e.step()
        up = [s.id for s in e.scheduler.running]
        assert 'r1' not in up or len(e.scheduler.seqs)==1
    done = [v for _ in range(5) for v in e.step()]
    assert [(v.id, v.finish, v.token) for v in done]==[(
        'r1','stop',None)]
    assert answer(e, talk(3, 0, 190, 0, 3, {}))[1]==190-128
    assert e.scheduler.stats()['request_success_total']==dict(length=2)

def test_cached_tokens_are_told_with_the_first_token():
    e = engine(prefix=6)
    r = talk(1, 0, 150, 0, 3, {})
    told = [[v.cached for v in run(e, [(x,0)], (), Counter())[x.id]] for x in (r,named(r, 0))]
    assert told==[[0,None,None],[128,None,None]]

@pytest.mark.parametrize('error', [KeyboardInterrupt,MemoryError])
@pytest.mark.parametrize('late', (False,True))
def test_a_launch_that_is_cut_off_leaves_nothing_wrong(late, error):
    "Neither a slot, nor a tile that was not computed"
    r = talk(1, 0, 190, 0, 6, {},
        ends=(70,130))
    for at in range(1, 4):
        e = engine(late=late, prefix=4)
        interrupted(e.stepper, '_passes', at, error)
        e.add(r)
        while e.has_work:
            try:
                e.step()
            except KeyboardInterrupt:
                pass
            check_tree(e.scheduler.prefix, going(e))
        left_clean(e)
        assert answer(e, named(r, at))[0]==said(alone(r))

def test_tiles_of_an_answer_that_failed_are_forgotten():
    "Keys that are no numbers make its logits none; the next one computes its own"
    e = engine(prefix=4)
    r = talk(1, 0, 150, 0, 6, {})
    e.add(r)
    spoil_first_tile(e)
    events = [v for _ in range(9) for v in e.step()]
    assert events[-1].finish=='error' and e.scheduler.prefix.nodes==0
    assert answer(e, named(r, 1))[0]==said(alone(r))

def spoil_first_tile(e):
    "Take a step; keys of whom it computes are no numbers"
    e.step()
    seq, = e.scheduler.running
    e.cache.kv[1].k[seq.table.blocks[0]] = np.nan

@pytest.mark.parametrize('late', (False,True))
def test_a_bad_tile_harms_one_alone(late):
    "Who shares it, and has said nothing yet, is computed anew; so is who comes later"
    e = engine(late=late, prefix=6)
    others = [talk(i, 0, 128, 3, 6, {}, ends=(128,)) for i in (2,3,4)]
    e.add(talk(1, 0, 190, 0, 6, {}))
    spoil_first_tile(e)
    got = run(e,
        [(r, i) for i,r in enumerate(others)], (),
        Counter())
    assert got['r1'][-1].finish=='error'
    for r in others:
        as_alone(got[r.id], alone(r))

def test_a_fill_that_went_wrong_harms_nobody():
    "What comes next has no first token from its tiles, and computes its own"
    e = engine(prefix=6)
    e.add(talk(1, 0, 190, 0, 1, {},
        fill=True))
    spoil_first_tile(e)
    while e.has_work:
        e.step()
    for i in (2,3):
        r = talk(i, 0, 190, 3, 6, {})
        assert answer(e, r)[0]==said(alone(r))
    assert e.scheduler.prefix.nodes==4 and not e.corrupted

def test_rows_of_answers_are_not_in_the_tree():
    "A prompt that goes on with an answer computes the answer's tokens as a prompt's"
    e = engine(prefix=6)
    r = talk(1, 0, 120, 0, 60, {})
    told = [t for t,*_ in answer(e, r)[0]]
    more = Request('more', r.prompt+tuple(told)+(5,),
        r.params)
    assert more.prompt[:128]!=r.prompt[:128] and len(more.prompt)>128
    assert answer(e, more)[1]==len(more.prompt)-64

@pytest.mark.parametrize('n', [200,10_000])
def test_many_come_and_go(n):
    "Random requests with random aborts: each ends once, and no block, slot or tile is left"
    rng,came,ended = np.random.default_rng(n),0,Counter()
    e = engine('draft', 2, True, 60, 16, prefix=8,
        overcommit=3., chunk=192)
    while came<n or e.has_work:
        for _ in range(int(rng.integers(0, 7))):
            if came==n or len(e.scheduler.seqs)>24:
                break
            e.add(anybody(came, rng))
            came += 1
        events = e.step()
        if rng.random()<.5 and e.scheduler.seqs:
            events += e.abort(str(rng.choice(list(e.scheduler.seqs))))
        for v in events:
            ended[v.id] += v.finish is not None
        if came%50==0:
            check_tree(e.scheduler.prefix, going(e))
    left_clean(e)
    emptied(e.scheduler.prefix)
    assert len(ended)==n and set(ended.values())=={1}
    assert e.scheduler.totals['hits']>n

def anybody(i, rng):
    "A request with few tokens of its own"
    def draw(lo, hi): return int(rng.integers(lo, hi))
    n,own = draw(1, 140),draw(1, 4)
    most = draw(1, 6)
    fill = draw(0, 10)==0
    return talk(i, i%2, n, own, most, {},
        draw(-1, 2), ends=(draw(0, 140),),
        fill=fill)

# The second tier

def spilled(kind='none', k=0, **kw):
    """An engine whose second tier has the prompt of a request, and whose tree is empty; and that
    request"""
    e = engine(kind, k, prefix=4, spill=1<<24, **kw)
    r = talk(1, 0, 190, 0, 9, {})
    answer(e, r)
    tree = e.scheduler.prefix
    emptied(tree)
    tree.tier.store.settle()
    return e,r,tree.tier.store

def damage(store, kind, depth):
    "Turn a bit of a record over"
    r = next(r
        for r in store.records.values() if r.kind==kind and r.depth==depth)
    store.place.a[4096+r.units[0]*store.unit+200] ^= 1

@pytest.mark.parametrize('late', (False,True))
@pytest.mark.parametrize('kind,k', [('none',0),('mtp',2),('draft',2)])
def test_what_was_evicted_comes_back(kind, k, late):
    e,r,store = spilled(kind, k, late=late)
    said_now,computed = answer(e, named(r, 1))
    assert said_now==said(alone(r)) and computed==190-128
    assert store.read>0 and not store._reads
    e.scheduler.prefix.tier.close()

def test_a_long_prompt_pushes_out_a_step_at_a_time():
    "Blocks are promised when it starts, and taken as its steps need them"
    e = engine(blocks=16, prefix=4)
    answer(e, talk(1, 0, 190, 0, 1, {}))
    tree,left = e.scheduler.prefix,[]
    e.add(talk(2, 1, 190, 0, 1, {}))
    while e.has_work:
        e.step()
        left.append(tree.evictions)
    assert left==[0,0,1], left

def test_what_is_fetched_waits_for_what_it_pushes_out():
    "No tile leaves for one that comes back while there is no buffer for it"
    e,r,store = spilled(blocks=13)
    answer(e, talk(2, 1, 190, 0, 1, {}))
    tree,left = e.scheduler.prefix,[]
    def full(kind):
        left.append(tree.evictions)
        return len(left)<5
    store.full = full
    before = tree.evictions
    assert answer(e, named(r, 1))==(said(alone(r)),
        190-128)
    assert left[:5]==[before]*5 and tree.evictions>before
    store.settle()
    assert not store.dropped
    tree.tier.close()

def test_what_both_tiers_have_is_not_read_in_vain():
    "States alone come back, and no buffer of the store is left with a tile that the tree had"
    e,r,store = spilled()
    for i in range(4):
        assert answer(e, named(r, i))==(said(alone(r)),
            190-128)
        assert not store._reads
        store.settle()
        e.scheduler.prefix.evict_snapshots(9)
        store.settle()
    e.scheduler.prefix.tier.close()

def expecting(e, seconds):
    "Let the policy of `e` expect that of any prefill"
    def computing(chunk, tokens, before): return seconds
    e.scheduler.policy.computing = computing

@pytest.mark.parametrize('seconds,cached', [(1e-6,0),(1e6,128)])
def test_a_store_that_is_slower_than_prefill_is_not_asked(seconds, cached):
    "Who has the engine alone is answered as soon as may be; the tokens are the same"
    e,r,store = spilled()
    expecting(e, seconds)
    for _ in range(3):
        assert answer(e, named(r, 1))==(said(alone(r)), 190-128)
        emptied(e.scheduler.prefix)
        store.settle()
    assert answer(e, named(r, 1))==(said(alone(r)), 190-cached)
    e.scheduler.prefix.tier.close()

def test_beside_others_a_store_is_asked_all_the_same():
    "It leaves the card to them, however slow it was"
    e,r,store = spilled()
    tier = e.scheduler.prefix.tier
    expecting(e, 0.)
    for _ in range(3):
        tier.took(Fetch([], read=1), 9.)
    e.add(talk(2, 1, 40, 0, 60, {}))
    e.step()
    before = store.read
    e.add(named(r, 3))
    run(e, [], [], Counter())
    assert store.read>before
    tier.close()

def test_who_finds_no_slot_for_states_computes_them():
    "Rather than read them again and again until there is one"
    e,r,store = spilled(seqs=1)
    states = e.scheduler.states
    others = states.take(states.num_blocks-2)
    e.add(named(r, 1))
    events = [v for _ in range(40) for v in e.step()]
    states.give(others)
    left_clean(e)
    assert said(events)==said(alone(r))
    e.scheduler.prefix.tier.close()

@pytest.mark.parametrize('kind,depth', [('tile',0),('tile',1),('state',1)])
def test_what_is_damaged_is_computed(kind, depth):
    """A bit that has turned over is noticed; the prompt is computed, and what is good is of use
    again"""
    e,r,store = spilled()
    damage(store, kind, depth)
    assert answer(e, named(r, 1))==(said(alone(r)),190)
    assert store.errors==1 and not store._reads
    emptied(e.scheduler.prefix)
    store.settle()
    assert answer(e, named(r, 2))==(said(alone(r)),
        190-128)
    e.scheduler.prefix.tier.close()

def test_a_disk_that_fails_harms_nobody():
    "Neither while it is written nor while it is read"
    for name in ('write','read'):
        e,r,store = spilled()
        def fails(*args):
            raise OSError('it is gone')
        setattr(store.place, name, fails)
        other = talk(5, 1, 190, 0, 3, {})
        assert answer(e, other)[0]==said(alone(other))
        emptied(e.scheduler.prefix)
        store.settle()
        assert answer(e, named(r, 1))[0]==said(alone(r))
        assert store.off and store.stats()['kv_spill_errors_total']
        left_clean(e)
        e.scheduler.prefix.tier.close()

@pytest.mark.parametrize('why', ('abort','timeout'))
def test_who_waits_for_the_store_can_leave(why, monkeypatch):
    "An end while records are being read leaves nothing behind"
    e,r,store = spilled()
    go,read = Event(),store.place.read
    def held(*args):
        go.wait(60)
        return read(*args)
    monkeypatch.setattr(store.place, 'read', held)
    s,now = e.scheduler,[0.]
    monkeypatch.setattr(s, 'clock', lambda: now[0])
    e.add(replace(named(r, 1), timeout=5.))
    s.schedule()
    assert s.running[0].fetch
    now[0] += 6*(why=='timeout')
    ends = e.step() if why=='timeout' else e.abort('again1')
    assert [v.finish for v in ends]==[why]
    left_clean(e)
    assert not store._reads
    go.set()
    assert answer(e, named(r, 2))==(said(alone(r)),
        190-128)
    e.scheduler.prefix.tier.close()
