"""Memory that is short: what a model gives back, in which order, and that answers go on. Counters
are files that are made up; what they lead to is real."""
import random,sys
from pathlib import Path
import pytest
import atlas.engine.loading as loading
from atlas.card.emulator import Emulator
from atlas.card.pressure import Advice,Look,Pressure,look
from atlas.card.device import Memory
from atlas.ground.core import OutOfMemoryError,RequestError
from atlas.use.llm import LLM
from helpers.waiting import until
from helpers.prefixes import check_node,nodes_of
from test_sleep import answer,choice,serving
sys.path.insert(0, str(Path(__file__).parent/'gpu'))
from toys import greedy,prompt,serve,toy  # noqa: E402

K,M,G = 1<<10,1<<20,1<<30

# -- a model -------------------------------------------------------------------------------------

@pytest.fixture(params=['host','card'])
def m(request, monkeypatch):
    "A model that has seen ten prompts; on the card a chunk has few blocks"
    monkeypatch.setattr(loading, '_CHUNK', dict(cache=64*K))
    if request.param=='host':
        m = LLM('tiny', 'cpu', 512, 4, kv_cache_memory=64*M)
    else:
        m = toy('llama', emulator=True, seqs=4, context=1024, kv_cache_memory=64*M)
    m.prompts = [prompt(200, m.config.vocab_size, i) for i in range(8)]
    m.want = ask(m)
    yield m
    m.close()

def ask(m, only=None):
    reqs = [
        (greedy(str(i), ids, 5, logprobs=1), 0)
        for i,ids in enumerate(m.prompts) if only is None or i in only]
    return serve(m.engine, reqs)

def sound(m):
    "Books of blocks, and memory behind each that can be had"
    s,p = m.engine.scheduler,m.cache.pool
    assert not set(p.lent)&set(p._free)
    assert all(not p.refs[i] for i in p.lent)
    assert p.free+len(p.lent)+sum(r>0 for r in p.refs)==p.num_blocks
    assert s.limit==p.num_blocks-len(p.lent)>=p.blocks_for(m.max_seq_len)
    for n in nodes_of(s.prefix):
        check_node(s.prefix, n)

def test_what_nobody_uses_goes_first(m):
    "Then prefixes, the oldest first; then nothing, and one long sequence still fits"
    p,tree = m.cache.pool,m.engine.scheduler.prefix
    nodes,rss = tree.nodes,0
    while (
            p.runs() and tree.nodes==nodes
            and (got := m.ease(Advice('give', 64*K)))):
        rss += got
        sound(m)
    assert rss>0 and p.lent
    assert ask(m)==m.want
    while m.ease(Advice('give', M)):
        sound(m)
    assert tree.nodes<nodes
    assert ask(m)==m.want
    sound(m)

def test_least_recently_used(m):
    ask(m, [0,1])
    tree = m.engine.scheduler.prefix
    used = {n.used for n in nodes_of(tree)}
    tree.evict(m.cache.pool.reclaimable//2)
    left = {n.used for n in nodes_of(tree)}
    assert left and min(left)>min(used) and max(left)==max(used)

def test_all_comes_back(m):
    p,limit = m.cache.pool,m.engine.scheduler.limit
    m.ease(Advice('give', 4*M))
    assert p.lent and m.lent==len(p.lent)*m._block_bytes()
    m.ease(Advice('take'))
    assert not p.lent
    assert m.lent==0
    assert m.engine.scheduler.limit==limit
    assert p.free+sum(r>0 for r in p.refs)==p.num_blocks
    assert ask(m)==m.want
    sound(m)

def test_while_others_answer(m):
    "At any moment, any number of times; each answer is what it was"
    rng = random.Random(1)
    seen = {str(i): [] for i in range(8)}
    for i,ids in enumerate(m.prompts):
        m.engine.add(greedy(str(i), ids, 5, logprobs=1))
    while m.engine.has_work:
        for e in m.engine.step():
            if e.token is not None:
                seen[e.id].append((e.token, e.logprob))
        m.ease(rng.choice([
            Advice('give', 100*K),Advice('give', 9*M),
            Advice('take'),Advice('trim'),Advice()]))
        sound(m)
    assert seen==m.want

def test_a_sequence_that_waits_for_blocks(m):
    """What was lent is promised to nobody; who needs more than is left waits until it is taken
    back, or others end"""
    while m.ease(Advice('give', M)):
        pass
    n = m.max_seq_len-30
    long = [prompt(n, m.config.vocab_size, 50+i) for i in range(3)]
    out = serve(
        m.engine,
        [(greedy(f'l{i}', ids, 20), 0) for i,ids in enumerate(long)])
    assert all(len(v)==20 for v in out.values())
    sound(m)

def test_not_taken_back_without_memory(monkeypatch):
    monkeypatch.setattr(loading, '_CHUNK', dict(cache=64*K))
    m = toy('llama', emulator=True, seqs=4, context=1024, kv_cache_memory=64*M)
    m.ease(Advice('give', 300*K))
    lent = list(m.cache.pool.lent)
    m.arena.budget.take('others', m.arena.budget.left)
    assert lent
    assert m.ease(Advice('take'))==0
    assert m.cache.pool.lent==lent
    m.arena.budget.give('others')
    assert m.ease(Advice('take'))<0 and not m.cache.pool.lent
    m.close()

def test_asleep_and_awake(m):
    "A model that sleeps has nothing to give; one that wakes has lent nothing"
    m.ease(Advice('give', M))
    m.sleep()
    assert m.ease(Advice('give', M))==0==m.lent
    m.wake()
    assert m.lent==0 and not m.cache.pool.lent
    sound(m)
    assert ask(m)==m.want

def test_the_copy_of_weights_goes():
    m = toy('llama', emulator=True, seqs=2, context=256)
    m.sleep()
    m.wake()
    copy = m.arena['weights'].kept
    assert copy
    assert m.ease(Advice('give', 1))>=copy.nbytes
    assert m.arena['weights'].kept is None
    m.close()

def test_a_card_with_memory_of_its_own(monkeypatch):
    "Its cache is none of the host's memory; a copy of the weights is"
    m = toy('llama', emulator=True, seqs=2, context=256)
    m.sleep()
    m.wake()
    monkeypatch.setattr(Emulator, 'shares_host', False, raising=False)
    size,blocks = m.arena['weights'].kept.nbytes,m.cache.pool.free
    assert m.ease(Advice('give', G))==size
    assert m.cache.pool.free==blocks
    m.close()

# -- counters ------------------------------------------------------------------------------------

class Machine:
    "Files as a kernel writes them"
    def __init__(self, root):
        self.root = Path(root)
    def write(self, path, text):
        p = self.root/path
        p.parent.mkdir(parents=True, exist_ok=True)
        new = p.with_suffix('.new')
        new.write_text(text)
        new.rename(p)
    def __call__(self, free, available=None, total=64*G, some=0., full=0.):
        available = free if available is None else available
        kb = dict(MemTotal=total, MemFree=free, MemAvailable=available)
        self.write('proc/meminfo', ''.join(f'{k}: {v//K} kB\n' for k,v in kb.items()))
        self.write(
            'proc/pressure/memory',
            f'some avg10={100*some:.2f} total=1\nfull avg10={100*full:.2f} total=1\n')
        return look(self.root)

@pytest.mark.parametrize('text', ['', 'nonsense', 'some avg10=x\n', 'MemFree: 5 kB\n'])
def test_files_that_say_nothing(text, tmp_path):
    "A kernel without stalls, a group without limits, files of others: nothing is made up"
    here = Machine(tmp_path)
    assert here(5*G)==Look(64*G, 5*G, 5*G, 0., 0.)
    here.write('proc/pressure/memory', text)
    here.write('proc/self/cgroup', text)
    assert here.root
    assert look(tmp_path)==Look(64*G, 5*G, 5*G, 0., 0.)

def test_groups_within_groups(tmp_path):
    "The tightest counts, and its own stalls"
    here = Machine(tmp_path)
    here(50*G)
    here.write('proc/self/cgroup', '0::/a/b\n')
    here.write('sys/fs/cgroup/a/memory.max', f'{8*G}\n')
    here.write('sys/fs/cgroup/a/memory.current', f'{7*G}\n')
    here.write('sys/fs/cgroup/a/b/memory.max', 'max\n')
    here.write(
        'sys/fs/cgroup/a/b/memory.pressure', 'some avg10=40.00 total=1\nfull avg10=30.00 total=1\n')
    assert look(tmp_path)==Look(8*G, G, G, .4, .3)
    assert Pressure(root=tmp_path)().what=='give'

def test_no_flapping():
    "On a bound that memory wavers about, nothing is taken back; after it, once"
    p,said = Pressure(low=4*G, patience=5),[]
    for i in range(40):
        said.append(p.judge(
            Look(64*G, *[4*G+(-1)**i*G//2]*2),
            G).what)
    assert set(said[1:])=={'give'} # it has not become more than twice the bound
    said = [
        p.judge(Look(64*G, 20*G, 20*G), G).what
        for _ in range(20)]
    assert said[:4]==['nothing']*4 and 'take' in said

# -- a server ------------------------------------------------------------------------------------

def test_a_server_under_pressure(tmp_path):
    "Caches are given back while answers go on, and are had again afterwards"
    here = Machine(tmp_path)
    here(40*G)
    with serving(MADE_UP_ROOT=str(tmp_path)) as c:
        def answers(): return [choice(answer(c, prompt=f'One day, {i}')) for i in range(4)]
        want = answers()
        assert lent(c)==0
        here(G, some=.5, full=.3)
        until(lambda: choice(answer(c)) and lent(c)>0, again=.1)
        assert answers()==want
        here(40*G)
        until(lambda: lent(c)==0, again=.1) # though nobody asks anything
        assert answers()==want
        until(lambda: any('Memory is short' in x and 'given back' in x for x in c.lines))

def lent(c):
    "Blocks that a server's cache has lent"
    lines = c.get('/metrics').text.splitlines()
    line = next(x for x in lines if x.startswith('atlas:kv_blocks_lent{'))
    return float(line.split()[-1])

# -- budgets -------------------------------------------------------------------------------------

def loaded(monkeypatch, total=4*G, free=3*G, **kw):
    monkeypatch.setattr(Emulator, 'memory', lambda self: Memory(total, free))
    return toy('llama', emulator=True, seqs=2, context=256, **kw)

def test_a_budget_for_all(monkeypatch):
    "In bytes, or as a part of the whole card; more than is free is refused, and so is too little"
    m = loaded(monkeypatch, memory_budget=700*M)
    assert m.arena.budget.total==700*M and m.arena.budget.left>=0
    m.close()
    m = loaded(monkeypatch, gpu_memory_utilization=.5)
    assert m.arena.budget.total==2*G # of 4, not of the 3 that are free
    m.close()
    m = loaded(monkeypatch, gpu_memory_utilization=.5, memory_budget=800*M)
    assert m.arena.budget.total==800*M
    m.close()
    for kw in (dict(gpu_memory_utilization=.9),dict(memory_budget=4*G)):
        with pytest.raises(OutOfMemoryError, match='3 GiB are free') as e:
            loaded(monkeypatch, **kw)
        assert '--gpu-memory-utilization' in e.value.hint
    with pytest.raises(OutOfMemoryError):
        loaded(monkeypatch, memory_budget=10*M)

def test_a_budget_of_the_host():
    with pytest.raises(RequestError, match='for models on a card'):
        LLM('tiny', 'cpu', gpu_memory_utilization=.5)
