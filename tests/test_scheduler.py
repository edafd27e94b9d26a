"""The scheduler held to its promises by a fuzzer.

The stand-in for the model keeps a hash where a real one keeps keys and values, in the same
slots, and its next token is a hash of all that it finds there by way of the block table. So a
block with two owners, a row that is skipped or computed in another way, a tile that is cut
elsewhere or a token that is sampled twice changes what some request is answered, and `alone`
knows what it should be."""
import gc,random,sys
from collections import deque
import pytest
from hypothesis import settings,strategies as st
from hypothesis.stateful import RuleBasedStateMachine,initialize,invariant,precondition,rule
from atlas.engine.cache import BlockPool
from atlas.ground.core import ContextLengthError,QueueFullError,RequestError
from atlas.ops.linear import MAX_ROWS,TILE
from atlas.ops.sample import SamplingParams
from atlas.engine.scheduler import Request,Scheduler

VOCAB,EOS,STOP = 120,0,1
# How a row of decode or replay was computed; a row of prefill says which rows were in its tile
ROW = (-1,-1)

def key(prev, token, how): return hash((prev, token, how))
def pick(keys, seed): return hash((tuple(keys), seed))%VOCAB
def tile(p, lo, hi):
    t = p//TILE*TILE
    return max(t, lo),min(t+TILE, hi)

def alone(request, seed, max_seq_len):
    "What `request` is answered when nothing else exists: its tokens, and why they end"
    r,p,P = request,request.params,len(request.prompt)
    most = min(p.max_tokens or max_seq_len, max_seq_len-P)
    ends = set(p.stop_token_ids)|set(() if p.ignore_eos else r.eos_ids)
    keys,out = [],[]
    for i,t in enumerate(r.prompt):
        keys.append(key(keys[-1] if i else 0, t,
            tile(i, 0, P)))
    while True:
        out.append(pick(keys, seed))
        if out[-1] in ends and len(out)>p.min_tokens:
            return out,'stop'
        if len(out)==most:
            return out,'length'
        keys.append(key(keys[-1], out[-1], ROW))

class Toy:
    "Computes the rows of a plan, on memory that is never cleared"
    def __init__(self, pool):
        self.kv = [-1]*(pool.num_blocks*pool.block_size)
        self.said = {}  # tokens of each sequence, those too that were not accepted yet

    def rows(self, seq, start, n, prefill):
        slots = seq.table.slots(0, start+n).tolist()
        so_far = [*seq.request.prompt, *self.said.get(seq, ())]
        fed = so_far[start:start+n]
        assert len(fed)==n
        for p,t in zip(range(start, start+n), fed):
            self.kv[slots[p]] = key(
                self.kv[slots[p-1]] if p else 0, t,
                tile(p, start, start+n) if prefill else ROW)
        return [self.kv[s] for s in slots]

    def decode(self, seq, width):
        "Tokens of the newest one and of drafts, some accepted; rejected rows leave rubbish"
        said = self.said[seq]
        p = seq.prompt_len+len(said)-1
        assert p<=seq.num_computed<seq.depth, 'no more rows than there can be'
        accepted = 1+hash((p, seq.seed))%width
        rows = min(width, seq.depth-p)
        good = min(accepted, rows)
        new = []
        for row in range(p, p+good):
            new.append(pick(self.rows(seq, row, 1, False),
                seq.seed))
            said.append(new[-1])
        for row in range(p+good, p+rows):
            slot = seq.table.slots(row)[0]
            self.kv[slot] = -2
        return new

    def run(self, plan):
        "Tokens for each of `plan.sampled`"
        for s,start,n in plan.prefill:
            assert n>0 and start%TILE==0 and ((start+n)%TILE==0
                or start+n==s.prompt_len)
        for s,start,n in plan.replay:
            assert 0<n<=MAX_ROWS and s.prompt_len<=start and start+n<len(s)
        for s in plan.decode:
            assert s.prompt_len<=s.num_computed<s.depth
        keys = {s:self.rows(s, start, n, True)
            for s,start,n in plan.prefill}
        for s,start,n in plan.replay:
            self.rows(s, start, n, False)
        for s in plan.first:
            self.said[s] = [pick(keys[s], s.seed)]
        first = [list(self.said[s]) for s in plan.first]
        return first+[self.decode(s, plan.width) for s in plan.decode]

class Driver:
    "The engine's loop; with `behind`, tokens are accepted while the next step is already computed"
    def __init__(self, sc, behind=0):
        self.sc,self.behind = sc,behind
        self.toy = Toy(sc.pool)
        self.flight = deque()
        self.got,self.why = {},{}

    def note(self, seq, tokens, reason):
        assert seq not in self.why, 'an event after the end'
        if tokens is not None:
            self.got.setdefault(seq, []).extend(tokens)
        if reason:
            self.why[seq] = reason

    def step(self):
        "One step; its plan"
        if plan := self.sc.schedule():
            toks = self.toy.run(plan)
            self.sc.advance(plan)
            self.flight.append((plan,toks))
        while len(self.flight)>(self.behind if plan else 0):
            for e in self.sc.accept(*self.flight.popleft()):
                self.note(*e)
        return plan

    def drain(self, most=20_000):
        for _ in range(most):
            if not self.sc.has_work:
                return
            self.step()
        raise AssertionError(f'no end: {self.sc}')

    def check(self, seq):
        "Everything that `seq` was sent is what it is sent alone"
        toks,why = alone(seq.request, seq.seed, self.sc.max_seq_len)
        got = self.got.get(seq, [])
        reason = self.why.get(seq)
        if reason in ('stop','length'):
            assert (got,reason)==(toks,why)
        else:
            assert got==toks[:len(got)]

def request(id, n, max_tokens=None, priority=0, flavour=0, **kw):
    return Request(str(id),
        tuple((flavour*31+i*7)%VOCAB
            for i in range(n)),
        SamplingParams(max_tokens=max_tokens, **kw), priority, (EOS,))

class Machine(RuleBasedStateMachine):
    "Requests come, go and step at will"
    @initialize(
        block=st.sampled_from([1,4,16,64]),
        length=st.sampled_from([50,2,20,90,150,260]),
        spare=st.sampled_from([0,1,5,12]),
        seqs=st.sampled_from([3,1,2,6]),
        chunk=st.sampled_from([64,128,320]),
        over=st.sampled_from([4,1,1.3,8]),
        queue=st.sampled_from([2,9]),
        behind=st.booleans(),
        width=st.sampled_from([1,2,4]))
    def start(self, block, length, spare, seqs, chunk, over, queue, behind, width=1):
        pool = BlockPool(-(-length//block)+spare, block)
        self.sc = Scheduler(pool, seqs, length,
            chunk=chunk, overcommit=over, max_queue=queue, drafts=width-1)
        self.sc.width = width
        self.over,self.n = over,0
        self.d,self.all = Driver(self.sc, behind),[]

    @rule(
        shares=st.lists(
            st.sampled_from([.02,.05,.1,.3,.6,.97,1.2]),
            min_size=1, max_size=4),
        out=st.sampled_from([None,None,1,9,60]),
        priority=st.sampled_from([0,0,0,-1,1]), least=st.integers(0, 3),
        eos=st.booleans(), stop=st.booleans(), seed=st.integers(0, 9))
    def add(self, shares, out, priority, least, eos, stop, seed):
        for share in shares:
            size = 1+int(self.sc.max_seq_len*share)
            r = request(self.n, size, out, priority, seed,
                min_tokens=min(least, out or least), ignore_eos=eos,
                stop_token_ids=(STOP,) if stop else (), seed=seed)
            self.add_one(r, size)

    def add_one(self, r, size):
        full = len(self.sc.waiting)>=self.sc.max_queue
        long = size>=self.sc.max_seq_len
        if long or full:
            with pytest.raises(ContextLengthError if long else QueueFullError):
                self.sc.add(r)
            return
        self.all.append(self.sc.add(r))
        self.n += 1
        with pytest.raises(RequestError, match='still being served'):
            self.sc.add(r)

    @precondition(lambda self: self.sc.has_work)
    @rule(i=st.integers(0, 20), failed=st.booleans())
    def end(self, i, failed):
        "A client goes away, or a row of a running sequence is not finite"
        live = self.sc.running if failed and self.sc.running else list(self.sc.seqs.values())
        s = live[i%len(live)]
        if failed and s.running:
            self.d.note(*self.sc.fail(s))
        else:
            assert self.sc.abort(s.id) is s
            self.d.note(s, None, s.finish_reason)
        assert self.sc.abort(s.id) is None

    @rule(n=st.sampled_from([1,2,5,30]))
    def step(self, n):
        for _ in range(n):
            self.one_step()

    def one_step(self):
        before = list(self.sc.running)
        preemptions = self.sc.totals['preemptions']
        work = self.sc.has_work
        fit = {s:s.state for s in before}
        real,plan = self.sc.schedule,None
        def spy():
            nonlocal plan
            plan = real()
            self.check_plan(plan, fit)
            self.check_queue(before, self.sc.totals['preemptions']>preemptions)
            return plan
        self.sc.schedule = spy
        try:
            self.d.step()
        finally:
            del self.sc.schedule
        assert plan or not work or self.d.behind
        self.books()

    def check_plan(self, plan, before):
        if plan is None:
            return
        assert len(set(plan.seqs))==len(plan.seqs)
        assert sum(n for _,_,n in plan.prefill+plan.replay)<=self.sc.chunk
        # who decodes is in every step, unless preempted, or its last row is under way
        for s,state in before.items():
            if state=='decode' and s.running:
                assert s in plan.decode or s.num_computed>=s.depth

    def check_queue(self, before, preempted):
        sc = self.sc
        for s in sc.running:
            for w in sc.waiting:
                higher = s.request.priority>w.request.priority
                assert s.order<w.order or higher, 'somebody was overtaken'
                if s not in before:
                    assert s.order<w.order, 'somebody was overtaken'
        if (w := sc.waiting.head()) and not preempted: # nobody waits who fits
            full = len(sc.running)==sc.max_num_seqs
            beyond = sc.promised+sc.pool.blocks_for(w.depth)>sc.limit
            assert full or beyond or w.table.missing(len(w))>sc.unpromised
        if self.over==1 and all(s.request.priority==0
                for s in self.all):
            assert not sc.totals['preemptions']

    @invariant()
    def books(self):
        if not hasattr(self, 'sc'):
            return
        sc = self.sc
        owned = [b for s in sc.running for b in s.table.blocks]
        assert len(set(owned))==len(owned)==sc.pool.used
        assert all(sc.pool.refs[b]==1 for b in owned)
        assert sc.unpromised>=0, 'a block was promised to two'
        promised = sum(sc.pool.blocks_for(s.depth) for s in sc.running)
        assert sc.promised==promised<=sc.limit<=sc.pool.num_blocks*self.over
        for s in sc.running:
            assert len(s.table.blocks)<=sc.pool.blocks_for(s.depth)
            assert s.table.missing(min(s.num_computed, s.depth))==0

    @invariant()
    def places(self):
        if not hasattr(self, 'sc'):
            return
        sc = self.sc
        assert len(sc.running)<=sc.max_num_seqs
        assert sc.running==sorted(sc.running, key=lambda s: s.order)
        assert not any(s.table.blocks or s.running for s in sc.waiting)
        assert set(sc.running)|set(sc.waiting)==set(sc.seqs.values())
        assert len(sc.running)+len(sc.waiting)==len(sc.seqs)

    def teardown(self):
        if not hasattr(self, 'sc'):
            return
        self.d.drain()
        self.books()
        pool = self.sc.pool
        assert pool.free==pool.num_blocks
        assert sorted(pool._free)==list(range(pool.num_blocks))
        assert sum(self.sc.finished.values())==len(self.all) and set(self.d.why)==set(self.all)
        for s in self.all:
            self.d.check(s)

Machine.TestCase.settings = settings(max_examples=300, stateful_step_count=25, deadline=None)
TestMachine = Machine.TestCase

@pytest.mark.parametrize('seed', range(24))
def test_crowd(seed):
    """The same machine where it is always crowded: forty requests, each of which may fill half the
    cache or more"""
    rng,m = random.Random(seed),Machine()
    sizes = dict(
        block=[1,4,16], length=[50,90,150], spare=[1,12],
        seqs=[3,6], chunk=[64,128], over=[1,1.5,8])
    drawn = {k: rng.choice(v) for k,v in sizes.items()}
    m.start(**drawn, queue=9, behind=seed%2, width=1+seed%3)
    for _ in range(10):
        come(m, rng)
        m.step(rng.choice([1,5,20,60]))
        if m.sc.has_work and rng.random()<.3:
            m.end(rng.randrange(20), rng.random()<.5)
    m.teardown()

def come(m, rng):
    "Four requests come to the machine, of the same kind but for their lengths"
    shares = [rng.choice([.02,.1,.3,.6]) for _ in range(4)]
    m.add(shares, rng.choice([None,None,9]), rng.choice([0,0,-1,1]), 2,
        rng.random()<.7, rng.random()<.2, rng.randrange(99))

@pytest.mark.parametrize('n', (1, 63, 64, 65, 200))
@pytest.mark.parametrize('behind', (0, 1))
def test_alone(n, behind):
    d = Driver(Scheduler(BlockPool(20), 1, 300, chunk=64), behind)
    s = d.sc.add(request('a', n, 40, ignore_eos=True))
    d.drain()
    d.check(s)
    assert d.why[s]=='length' and len(d.got[s])==40

@pytest.mark.parametrize('at', range(2, 26, 3))
@pytest.mark.parametrize('behind', (0, 1))
def test_preempted_and_resumed(at, behind):
    d = Driver(Scheduler(BlockPool(20), 1, 300, chunk=64), behind)
    s = d.sc.add(request('a', 130, 30, ignore_eos=True))
    for _ in range(at):
        d.step()
    u = d.sc.add(request('u', 70, 5,
        priority=-1, flavour=1, ignore_eos=True))
    seen = list(s.outputs)
    d.drain()
    d.check(s)
    d.check(u)
    assert d.sc.totals['preemptions']==1 and d.got[s][:len(seen)]==seen
    assert (d.sc.totals['replay_tokens']>0)==(len(seen)+behind>1)

def test_no_victims_in_vain():
    "A better request that would not fit even then takes nobody's place"
    sc = Scheduler(BlockPool(16), 4, 256)
    for r in (request('a', 100, 60),
            request('b', 50, 10, priority=1),
            request('c', 100, 100, priority=0)):
        sc.add(r)
    sc.schedule() # a and, behind c, nobody: c needs 13 of 16 blocks
    assert [s.id for s in sc.running]==['a'] and not sc.totals['preemptions']
    sc.abort('c')
    sc.schedule()
    assert [s.id for s in sc.running]==['a','b']
    sc.add(request('d', 100, 100))
    sc.schedule()
    assert [s.id for s in sc.running]==['a','b'] and not sc.totals['preemptions']
    sc.add(request('e', 60, 20))
    sc.abort('d')
    sc.schedule() # 5 blocks, and b's place makes room
    assert [s.id for s in sc.running]==['a','e'] and sc.totals['preemptions']==1

def test_overcommit_ends():
    "Everybody asks for the whole cache, ten at a time"
    d = Driver(Scheduler(BlockPool(16, 4), 10, 64, overcommit=10))
    for i in range(20):
        d.sc.add(request(i, 5+i%3,
            flavour=i%4, ignore_eos=True))
    seqs = list(d.sc.seqs.values())
    d.drain()
    for s in seqs:
        d.check(s)
    assert d.sc.finished==dict(length=20) and d.sc.totals['preemptions']>5

def calls(f):
    "How many calls `f` makes, Python's and C's"
    n = 0
    def count(frame, event, arg):
        nonlocal n
        n += event in ('call','c_call')
    gc.disable() # a collection may call back
    sys.setprofile(count)
    try:
        f()
    finally:
        sys.setprofile(None)
        gc.enable()
    return n

def test_a_step_does_not_read_the_queue():
    "As many calls with 10,000 waiting as with 10, for a step of either kind"
    def work(waiting):
        sc = Scheduler(BlockPool(64), 4, 200, max_queue=20_000)
        for i in range(waiting):
            sc.add(request(i, 20, 20, priority=i%3,
                flavour=i, ignore_eos=True))
        def step():
            plan = sc.schedule()
            sc.commit(plan, [[5]]*len(plan.sampled))
        ns = [calls(step) for _ in range(30)]
        ns.append(calls(lambda: sc.abort('9')))
        return ns
    assert work(30)==work(10_000)
