"""The tree of prefixes: its books are right whatever happens, and a hit answers what a miss answers, to the bit.

A made-up hybrid is run by NumPy; in its states whatever was not written is no number."""
from collections import Counter
from types import SimpleNamespace
import numpy as np,pytest
from hypothesis import given,settings,strategies as st
from hypothesis.stateful import RuleBasedStateMachine,initialize,invariant,precondition,rule
from atlas.engine.cache import BlockPool,BlockTable
from atlas.engine.prefix import PrefixTree,tile_keys
from atlas.engine.scheduler import Request
from atlas.engine.snapshots import SnapshotTree
from atlas.ops.linear import TILE
from atlas.ops.sample import SamplingParams
from helpers.prefixes import check_tree,emptied
from helpers.small_engine import V,arrivals,as_alone,interrupted,left_clean,note,said
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
        end = min(self.at-self.at%TILE+tiles*TILE, len(self.tokens))
        if self.table.missing(end)>self.tree.pool.available: return
        self.table.ensure(end)
        self.tree.mark(self.trail, self.at, end)
        if not launched: return
        self.tree.commit(self.trail, self.table, end)
        self.at = end

    def leave(self):
        self.table.release()
        self.tree.leave(self.trail)

class Walks(RuleBasedStateMachine):
    "Prompts with common beginnings come, go on, are cut off and leave"
    @initialize(states=st.none()|st.integers(1, 9), size=st.sampled_from([16,32,64]))
    def start(self, states, size):
        pool = BlockPool(24*TILE//size//2, size)
        if states is None: self.tree = PrefixTree(pool)
        else: self.tree = SnapshotTree(pool, BlockPool(states, 1), 128)
        self.going = []

    @rule(a=st.integers(0, 2), n=st.integers(1, 400), b=st.integers(0, 2), m=st.integers(0, 200),
        salt=st.sampled_from(['','','x']), ends=st.lists(st.integers(-5, 700), max_size=5))
    def come(self, a, n, b, m, salt, ends):
        if len(self.going)<4:
            self.going.append(Walker(self.tree, [a]*n+[b]*m, salt, ends))

    @precondition(lambda self: self.going)
    @rule(i=st.integers(0, 9), tiles=st.integers(1, 5), launched=st.booleans())
    def step(self, i, tiles, launched):
        w = self.going[i%len(self.going)]
        if w.at%TILE==0: w.go_on()
        if w.at<len(w.tokens): w.step(tiles, launched)

    @precondition(lambda self: self.going)
    @rule(i=st.integers(0, 9))
    def leave(self, i): self.going.pop(i%len(self.going)).leave()

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
        if hasattr(self, 'tree'): check_tree(self.tree, [(w.trail, w.table) for w in self.going])

    def teardown(self):
        if not hasattr(self, 'tree'): return
        for w in self.going: w.leave()
        check_tree(self.tree)
        emptied(self.tree)

Walks.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestWalks = Walks.TestCase

# With a model

STEMS = [np.random.default_rng(100+i).integers(0, V, 190).tolist() for i in range(2)]
PLAIN = [{}, {}, dict(temperature=.9, seed=3), dict(logprobs=2),
    dict(temperature=.8, seed=5, logprobs=0, repetition_penalty=1.3)]

def talk(i, stem, n, m, most, how, priority=0, salt='', ends=(), fill=False):
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
    asks=st.lists(st.tuples(one, st.integers(0, 14)), min_size=4, max_size=8),
    blocks=st.sampled_from([13,16,40,40]),
    seqs=st.sampled_from([4,2,4,1]),
    over=st.sampled_from([1.,4.,4.]),
    extra=st.sampled_from([0,1,2,6]),
    chunk=st.sampled_from([64,128,192]),
    gone=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 12)), max_size=3),
    kind=st.sampled_from(['none',*KINDS,'oracle']),
    k=st.integers(1, 4),
    dice=st.none()|st.integers(0, 99))

def going(e):
    "Those who are on their way"
    return [(s.trail, s.table) for s in e.scheduler.seqs.values()]

def run(e, some, aborts, seen):
    "Events by request; the books are looked at after each step"
    out,t,todo = {},0,list(some)
    while todo or e.has_work:
        for r,at in todo:
            if at<=t: e.add(r)
        todo = [x for x in todo if x[1]>t]
        events = [v for rid,at in aborts if at==t for v in e.abort(rid)]
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
    for k in ('evictions','restores','snapshot_evictions'): seen[k] += getattr(tree, k)

def knowing(some, kind):
    "What an oracle is told of requests that arrive"
    if kind not in ('oracle','gaps'): return {}
    return dict(answers=[beyond(r) for r,_ in some if not r.prefill_only])

HAPPENED = ['hits','restores','evictions','snapshot_evictions','preemptions','shared',
    'some accepted','all accepted','chunks','replays','filled','aborted']

def test_random_schedules():
    "Arrivals, aborts, priorities, little room, chunks, salts, fills, drafters and K"
    seen = Counter()
    @settings(max_examples=70, deadline=None, derandomize=True, database=None)
    @given(**DRAWN)
    def drawn(asks, blocks, seqs, over, extra, chunk, gone, kind, k, dice):
        some = [(talk(i, **how), at) for i,(how,at) in enumerate(asks)]
        k = k if kind!='none' else 0
        class Counted(Watched): pass
        Counted.seen = seen
        for late in (False,True):
            arbiter = None if dice is None or not k else Dice(k, dice)
            e = engine(kind, k, late, blocks, seqs, Counted, arbiter=arbiter,
                who=knowing(some, kind), prefix=extra, chunk=chunk, overcommit=over)
            got = run(e, some, [(f'r{i}', at) for i,at in gone], seen)
            compare(some, got, seen)
            tell(e, seen)
            emptied(e.scheduler.prefix)
    drawn()
    missing = [what for what in HAPPENED if seen[what]<3]
    assert not missing, f'{missing} hardly happened: {seen}'

def compare(some, got, seen):
    "Each answer is the one that its request gets alone, without a tree"
    for r,_ in some:
        mine = got.get(r.id, [])
        if mine: seen['aborted'] += mine[-1].finish=='abort'
        if r.prefill_only:
            assert not said(mine)
            seen['filled'] += bool(mine) and mine[-1].finish=='stop'
        else: as_alone(mine, alone(r))
