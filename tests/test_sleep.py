"""Models that give their memory back: on the emulator, whose arrays lie in the arena as a card's
do, so that whoever touches one that is asleep ends the process; and in real servers."""
import asyncio,os,signal,socket,subprocess,sys,threading,time
from contextlib import contextmanager
from pathlib import Path
import httpx,numpy as np,pytest
from atlas.card.arena import Arena,HostCopy
from atlas.card.device import Budget,Host,Memory
from atlas.card.emulator import Emulator,strips_whole
from atlas.cuda.checksum import arrays_of
from atlas.engine.runner import Runner
from atlas.engine.sleep import Asleep,CurrentEngine,PackedWeights
from atlas.ground.core import AsleepError,DeviceError,EngineError,OutOfMemoryError,RequestError
from atlas.ground.packed import PackedFile
from atlas.ground.requests import SamplingParams
from atlas.use.llm import LLM
from atlas.service.turn import UnavailableError
from helpers.waiting import WAIT,happens,until
from test_processes import ask,begun,model,ok,running,running_test
sys.path.insert(0, str(Path(__file__).parent/'gpu'))
from toys import greedy,prompt,serve,toy  # noqa: E402

K = 1<<10
emu = Emulator()

def copy_of(region): return HostCopy(region, arrays_of(emu).sums)

# -- an arena ------------------------------------------------------------------------------------

@pytest.fixture
def arena():
    "Two regions with an array each; the first is to be kept"
    a = Arena(emu, Budget(1<<20), step=64*K)
    rs = a.region('weights', 1<<20),a.region('cache', 1<<20)
    a.arrays = []
    for r in rs:
        with r.allocating():
            a.arrays.append(emu.upload(np.arange(40*K,
                dtype='f4')))
    return a

def as_they_were(a):
    w,k = a.arrays
    return bool((w==np.arange(40*K)).all()
        and not k.any() and strips_whole(w) and strips_whole(k))

def test_regions_sleep_together(arena):
    where = [emu.address(x) for x in arena.arrays]
    mapped = arena.mapped
    copy = copy_of(arena['weights'])
    assert arena.sleep(weights=copy)==mapped and arena.mapped==arena.budget.used==0
    assert arena.sleep(weights=copy)==0 # they do already
    arena.wake()
    assert as_they_were(arena) and arena.mapped==arena.budget.used==mapped
    assert [emu.address(x) for x in arena.arrays]==where

def test_what_sleeps_cannot_be_read():
    code = '''
from atlas.card.arena import Arena
from atlas.card.emulator import Emulator
e = Emulator(); a = Arena(e); r = a.region('r', 1<<20)
with r.allocating(): x = e.zeros((9,))
a.sleep(); print('asleep', flush=True); print(x[0])'''
    p = subprocess.run([sys.executable, '-c', code], capture_output=True,
        text=True)
    assert (p.stdout.strip(), p.returncode)==('asleep', -signal.SIGSEGV)

class Failing:
    "Brings nothing back"
    def fill(self, region):
        raise OSError('the disk is gone')

def spoil(copy, how):
    "A bit, or the places of two words; once more, and all is as it was"
    words = copy.buffers[0].view('u8')
    if how=='damaged':
        words[9] ^= 1
    if how=='swapped':
        words[[9,999]] = words[[999,9]]

@pytest.mark.parametrize('how', ['budget','device','source','damaged','swapped'])
def test_no_waking(arena, how, monkeypatch):
    "Whatever fails while waking: all regions sleep on, owe nothing, and wake when they can"
    kept = Failing() if how=='source' else copy_of(arena['weights'])
    arena.sleep(weights=kept)
    if how=='budget':
        arena.budget.take('others', arena.budget.left-200*K) # enough for one of them
    if how=='device':
        monkeypatch.setattr(Emulator, 'memory', lambda self: Memory(1<<30, 100*K))
    if how!='source':
        spoil(kept, how)
    with pytest.raises(OSError if how=='source' else DeviceError):
        arena.wake()
    assert all(r.asleep for r in arena.regions.values()) and arena.mapped==0
    monkeypatch.undo()
    arena.budget.give('others')
    assert arena.budget.used==0 and arena['weights'].kept is kept
    if how=='source':
        return
    spoil(kept, how)
    arena.wake()
    assert as_they_were(arena)

def test_no_room_for_a_copy(monkeypatch):
    "Nothing is given up before all that is to be kept has been copied"
    m = made('llama')
    want = asked(m)
    def no(self, sizes):
        raise OutOfMemoryError('there is no room for a copy')
    monkeypatch.setattr(type(m.arena.pages), 'buffers', no)
    mapped = m.arena.mapped
    with pytest.raises(OutOfMemoryError):
        m.sleep()
    assert m.arena.mapped==mapped and not m.asleep and not any(r.asleep
        for r in m.arena.regions.values())
    assert asked(m)==want
    m.close()

def test_a_copy_knows_what_it_is_of(arena):
    r,(w,_) = arena['weights'],arena.arrays
    copy = copy_of(r)
    assert copy.of(r) and copy.nbytes==r.mapped
    w[7] += 1
    assert not copy.of(r)
    copy.fill(r)
    assert copy.of(r) and w[7]==7
    w[[4,900]] = w[[900,4]]
    assert not copy.of(r) # all of it is there, but not where it was
    copy.fill(r)
    assert w[4]==4

# -- a model -------------------------------------------------------------------------------------

def made(name, **kw):
    return toy(name, emulator=True, seqs=2, context=256, **kw)

KINDS = dict(
    llama={},
    nemotron={},
    gpt_oss={},
    drafts=dict(speculative='mtp', num_speculative_tokens=2))
TOYS = dict(gpt_oss='gpt-oss', drafts='qwen3.6-drafts')

def asked(m):
    "Two answers, token by token with log probabilities"
    ids = [prompt(n, m.config.vocab_size, n)
        for n in (70,9)]
    return serve(m.engine,
        [(greedy(str(i), x, 9, logprobs=3), 0)
            for i,x in enumerate(ids)])

@pytest.mark.parametrize('kind', KINDS)
def test_the_same_answers(kind):
    """After each level, again and again: graphs are the same ones, answers and chances too, to the
    bit"""
    m = made(TOYS.get(kind, kind), **KINDS[kind])
    want = asked(m)
    assert asked(m)==want and m.engine.scheduler.prefix.nodes
    for level in (1,1,2,1):
        nap(m, level)
        assert m.engine.scheduler.prefix.nodes==0
        assert asked(m)==want==asked(m)
        assert not m.engine.late
    assert m.sleep()['bytes'] and m.close()==0

def nap(m, level):
    "Sleep and wake; at level 1 the engine and its graphs are the same ones"
    engine,graphs = m.engine,dict(m.engine.stepper.graphs)
    told = m.sleep(level)
    assert told['level']==m.asleep==level and told['bytes']>0 and m.arena.mapped==0
    assert 'asleep at level' in repr(m)
    m.wake()
    same = m.engine is engine
    assert same==(level==1) and m.asleep==0 and m.arena.mapped
    if same:
        assert graphs and m.engine.stepper.graphs==graphs

@pytest.fixture(scope='module')
def llama(): return made('llama')

def test_words_of_kernels_begin_anew(llama, monkeypatch):
    "Blocks of attention leave each other words, which do not begin with zeros"
    m = llama
    words = next(iter(m.cache.kv.values())).words
    before = emu.download(words).view('i4')
    m.sleep()
    m.wake()
    assert (before==-1).all() and (emu.download(words).view('i4')==-1).all()

def test_twice_and_deeper(llama):
    m = llama
    want = asked(m)
    m.sleep(1)
    assert m.sleep(1)['bytes']==0 and m.asleep==1
    deeper = m.sleep(2)
    assert deeper['level']==2 and m.sleep(1)['level']==2 # not a lighter one
    m.wake()
    m.wake()
    assert asked(m)==want

def test_a_copy_is_made_once(llama, monkeypatch):
    m = llama
    m.sleep()
    copy = m.arena['weights'].kept
    m.wake()
    m.sleep()
    assert m.arena['weights'].kept is copy
    m.wake()
    m.arena['weights'].kept.sums[0] ^= 1 # the weights are others
    m.sleep()
    assert m.arena['weights'].kept is not copy
    monkeypatch.setattr(Host, 'memory',
        lambda self: Memory(1<<40,
            2*m.arena['weights'].kept.nbytes-1))
    m.wake()
    assert m.arena['weights'].kept is None # it would take most of what the host has
    assert m.arena['tables'].kept is None

def test_who_asks_a_sleeping_model(llama):
    m = llama
    m.sleep()
    questions = (
        lambda: m.generate([1,2]),
        lambda: m.ids([1]),
        lambda: m.engine.add(greedy('x', (1,), 1)),
        lambda: next(m.stream([1])),
        lambda: m.logits([1,2]))
    for ask_it in questions:
        with pytest.raises(AsleepError, match='asleep') as e:
            ask_it()
        assert (e.value.status, e.value.code)==(503, 'asleep')
    assert m.engine.abort('x')==m.engine.step()==[] and not m.engine.has_work
    m.wake()
    assert m.generate([1,2], SamplingParams(max_tokens=1)).token_ids

def test_not_while_it_answers(llama):
    m = llama
    s = m.stream([1,2,3],
        SamplingParams(max_tokens=50, ignore_eos=True))
    next(s)
    with pytest.raises(EngineError, match='1 answer is under way'):
        m.sleep()
    assert not m.asleep and next(s)
    s.close()
    assert m.sleep()['level']==1
    m.wake()
    for level in (0,3,'1',None):
        with pytest.raises(RequestError, match='expected 1 or 2'):
            m.sleep(level)

def test_no_room_to_sleep(llama, monkeypatch):
    m = llama
    want = asked(m)
    m.arena['weights'].kept = None
    monkeypatch.setattr(Host, 'memory', lambda self: Memory(1<<40, K))
    with pytest.raises(OutOfMemoryError):
        m.sleep()
    assert not m.asleep and m.arena.mapped
    monkeypatch.undo()
    assert asked(m)==want

@pytest.mark.parametrize('level', (1,2))
def test_no_room_to_wake(llama, level, monkeypatch):
    m = llama
    want = asked(m)
    m.sleep(level)
    monkeypatch.setattr(Emulator, 'memory', lambda self: Memory(1<<40, 100*K))
    for _ in '12':
        with pytest.raises(OutOfMemoryError):
            m.wake()
        with pytest.raises(AsleepError):
            m.generate([1])
        assert m.asleep==level and m.arena.mapped==0
    monkeypatch.undo()
    m.wake()
    assert asked(m)==want

def test_a_closed_model_does_neither():
    m = LLM('tiny', 'cpu', 256, 1)
    m.close()
    for f in (m.sleep, m.wake):
        with pytest.raises(EngineError, match='closed'):
            f()

@pytest.mark.parametrize('level', [1,2])
def test_on_the_host(level):
    m = LLM('tiny', 'cpu', 512, 2)
    p = SamplingParams(temperature=0, max_tokens=12, logprobs=2)
    def said():
        return [(t.id, t.logprob)
            for t in m.generate('One day, a cat went', p).logprobs]
    want = said()
    for _ in '12':
        assert m.sleep(level)['level']==level
        with pytest.raises(AsleepError):
            said()
        m.wake()
        assert said()==want==said()

@pytest.mark.parametrize('where', ['memory','folder'])
def test_a_second_tier_keeps_prefixes(where, tmp_path):
    "What the tree loses by sleeping is read back from there"
    kw = dict(kv_spill_gb=.01)
    if where=='folder':
        kw['kv_spill_dir'] = str(tmp_path)
    m = made('nemotron', **kw)
    ids = prompt(200, m.config.vocab_size, 3)
    def ask(rid):
        return serve(m.engine,
            [(greedy(rid, ids, 5, logprobs=1), 0)])
    def hits(): return m.engine.stats()['prefix_cache_hits_total']
    want,before = ask('a'),hits()
    m.sleep()
    m.wake()
    assert ask('a')==want and hits()>before
    m.close()

@pytest.fixture
def shared(monkeypatch, tmp_path):
    "Makes toys on a card that shares the host's memory, with packed files"
    monkeypatch.setattr(Emulator, 'integrated', True)
    return lambda kind, **kw: made(TOYS.get(kind, kind),
        **KINDS[kind]|dict(cache_packed=tmp_path)|kw)

def woken_from_a_file(m, levels):
    want = asked(m)
    for level in levels:
        graphs = dict(m.engine.stepper.graphs)
        assert m.sleep(level)['level']==level
        kept = m.arena['weights'].kept
        assert isinstance(kept, PackedWeights) and kept.nbytes<m.model.max_seq_len*1024*4
        m.wake()
        assert m.engine.stepper.graphs==graphs and asked(m)==want
    m.close()

@pytest.mark.parametrize('kind', KINDS)
def test_woken_from_a_file(kind, shared):
    """Where host and card are one memory: nothing is copied, and what comes back is the same, with
    its graphs"""
    woken_from_a_file(shared(kind), (1,2))

@pytest.mark.parametrize('kind', ['gpt_oss','drafts'])
def test_level_2_keeps_nothing_in_memory(kind, tmp_path):
    "Where a card has its own, too; a copy from before goes"
    m = made(TOYS[kind], **KINDS[kind], cache_packed=tmp_path)
    m.sleep()
    m.wake()
    assert isinstance(m.arena['weights'].kept, HostCopy)
    woken_from_a_file(m, (2,2))

@pytest.mark.parametrize('shares', [True,False])
def test_deeper(shares, tmp_path, monkeypatch):
    "A copy goes, and with it what only it had; a file stays what it was"
    monkeypatch.setattr(Emulator, 'integrated', shares)
    m = made('llama', cache_packed=tmp_path)
    want,engine = asked(m),m.engine
    m.sleep(1)
    told = m.sleep(2)
    assert told['level']==m.asleep==2 and m.sleep(1)['level']==2
    assert not any(isinstance(r.kept, HostCopy)
        for n,r in m.arena.regions.items() if n=='weights')
    m.wake()
    assert (m.engine is engine)==shares and asked(m)==want
    m.close()

@pytest.mark.parametrize('how', ['damaged','gone','cut','of another'])
def test_a_file_that_will_not_do(how, shared):
    "The checkpoint is read instead, and answers are the same"
    m = shared('llama')
    want,path = asked(m),m._stores[0].path
    m._stores[0].wait()
    data = path.read_bytes()
    m.sleep()
    if how=='gone':
        path.unlink()
    if how=='cut':
        path.write_bytes(data[:len(data)//2])
    if how=='damaged':
        path.write_bytes(data[:-99]+bytes([data[-99]^1])+data[-98:])
    if how=='of another':
        m._stores[0].made_of = dict(model='another')
    m.wake()
    assert not m.asleep and asked(m)==want
    m.close()

def test_no_file_and_no_copy(shared):
    "There waking is a start at level 1, too"
    m = made('llama')
    want = asked(m)
    assert m.sleep()['level']==1 and isinstance(m.engine, Asleep) and m.engine.engine is None
    m.wake()
    assert asked(m)==want
    m.close()

def test_no_room_for_a_copy_but_a_file(monkeypatch, tmp_path):
    m = made('llama', cache_packed=tmp_path)
    want = asked(m)
    monkeypatch.setattr(Host, 'memory', lambda self: Memory(1<<40, K))
    m.sleep()
    assert isinstance(m.arena['weights'].kept, PackedWeights)
    m.wake()
    assert asked(m)==want
    m.close()

NAPS = """
import sys
from test_sleep import made
m = made('llama', cache_packed=sys.argv[1])
print('loaded', flush=True)
while True:
    for level in (1,2):
        m.sleep(level)
        m.wake()
"""

def kill_after(seconds, command):
    "End a process some time after it has loaded"
    p = subprocess.Popen(
        command, cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True)
    assert p.stdout.readline()=='loaded\n'
    time.sleep(seconds)
    assert p.poll() is None
    p.kill()
    p.wait()

def test_killed_at_any_moment(tmp_path):
    """While it packs, sleeps or wakes: the file is whole or not there, and the next one has the
    same answers"""
    want = asked(made('llama'))
    rng = np.random.default_rng(0)
    for _ in range(4):
        kill_after(rng.uniform(0, .3), [sys.executable, '-c', NAPS, str(tmp_path)])
        for f in tmp_path.glob('*.packed'):
            with PackedFile(f) as there:
                there.load()
    m = made('llama', cache_packed=tmp_path)
    woken_from_a_file(m, (2,))
    m = made('llama', cache_packed=tmp_path)
    assert m._stores[0].fresh and asked(m)==want
    m.close()

# -- a runner ------------------------------------------------------------------------------------

class Heard:
    def __init__(self):
        self.out,self.ended = {},{}
    def events(self, pairs, stats):
        for n,e in pairs:
            if e.finish:
                self.ended[n] = e
    def result(self, n, value):
        self.out[n] = value
    def failed(self, n, e):
        self.out[n] = e

def test_in_the_step_loop(llama):
    """Requests before, while asleep, and after, in the order in which they came; the engine may be
    another one"""
    heard = Heard()
    r = Runner(CurrentEngine(llama), heard, dict(sleep=llama.sleep, wake=llama.wake))
    def ended(n, op=None, **kw):
        "How request `n` ends that comes after the call of `op`"
        if op:
            r.call(100+n, op, kw)
        r.add(n, greedy(f'r{n}', (5,6,7), 3))
        until(lambda: n in heard.ended)
        return heard.ended[n]
    t = threading.Thread(target=r.run)
    t.start()
    try:
        ended(1)
        assert ended(2, 'sleep').code=='asleep'
        assert ended(3, 'wake').finish=='length'
        assert ended(4, 'sleep', level=2).code=='asleep'
        assert ended(5, 'wake').finish=='length'
    finally:
        r.end()
        t.join(WAIT)

# -- a gateway, whose worker is a script ---------------------------------------------------------

@running_test
async def test_a_sleep_that_fails():
    "It is awake as before, and the next one may do"
    async with running(model(asleep='no sleep')) as ms:
        await ms.get()
        with pytest.raises(OutOfMemoryError, match='no room for a copy'):
            await ms.sleep()
        assert ms.all[0].condition=='loaded' and await ok(ms)
        assert (await ms.sleep())['bytes']==1<<30 and ms.all[0].status['value']=='sleeping'
        assert ms.health()['status']=='ok' and await ok(ms)

@running_test
async def test_a_waking_that_fails():
    "It sleeps on, says why, and wakes when there is room"
    async with running(model(asleep='no waking')) as ms:
        await ms.get()
        await ms.sleep(level=2)
        with pytest.raises(OutOfMemoryError, match='1 GiB are free'):
            await ask(ms) # who asks wakes it
        assert ms.all[0].condition=='sleeping' and ms.all[0].slept['level']==2
        assert (await ms.wake())['seconds']==.1 and ms.stats()[0]['slept']['wake']==.1
        assert await ok(ms)

@running_test
async def test_a_process_that_ends_while_it_turns():
    for when in ('dies asleep','dies waking'):
        async with running(model(asleep=when)) as ms:
            await ms.get()
            m = ms.all[0]
            if when=='dies waking':
                await ms.sleep()
            with pytest.raises(UnavailableError):
                await (ms.wake() if m.condition=='sleeping' else ms.sleep())
            await happens(lambda: m.condition=='loaded', 'another process')
            assert await ok(ms) and m.restarts==1

@running_test
async def test_everybody_at_once():
    """Sleeps, wakings and questions in any order: each question is answered, and no request
    reaches a model that is asleep"""
    async with running(model()) as ms:
        async def some(f):
            for _ in range(10):
                await f()
        naps = [some(f) for f in (ms.sleep, ms.wake, ms.sleep)]
        questions = [ask(ms) for _ in range(40)]
        together = asyncio.gather(*naps, *questions, return_exceptions=True)
        said = await asyncio.wait_for(together, WAIT)
        failed = [x for x in said if isinstance(x, BaseException)]
        answers = [x[0] for x in said if isinstance(x, tuple)]
        wrong = [x for x in failed if not isinstance(x, UnavailableError)]
        assert not wrong
        assert answers.count('Hello there, reader.')>=20
        await ms.wake()
        assert await ok(ms)

@running_test
async def test_hung_up_while_it_falls_asleep():
    "Whoever asked for it may go: it happens all the same, and nobody is left in between"
    async with running(model()) as ms:
        ss = await begun(ms, '<endless>')
        t = asyncio.create_task(ms.sleep())
        await happens(lambda: ms.all[0].condition=='sleeping')
        t.cancel()
        ms.all[0].runner.abort(ss[0].id)
        await happens(lambda: ms.all[0].slept, 'sleep')
        assert ms.all[0].condition=='sleeping' and await ok(ms) and ms.all[0].condition=='loaded'

@running_test
async def test_unloaded_asleep():
    "From then on it does not sleep, and cannot be woken, only loaded"
    async with running(model()) as ms:
        await ms.get()
        await ms.sleep()
        assert (await ms.unload(ms.all[0].name))['condition']=='unloading'
        with pytest.raises(UnavailableError, match='does not sleep'):
            await ms.wake()
        await happens(lambda: ms.all[0].condition=='unloaded')
        assert await ok(ms)

@running_test
async def test_the_end_of_a_server_whose_model_sleeps():
    async with running(model()) as ms:
        assert await ok(ms)
        await ms.sleep()
        assert await ms.drain(1)
        with pytest.raises(UnavailableError, match='shutting down'):
            await ms.wake()

# -- a server ------------------------------------------------------------------------------------

SERVE = '''
import sys
from atlas.service.process import ProcessTimes
from atlas.service.gateway import serve,tables_of
serve({models!r}, **tables_of(
    port={port}, command=[sys.executable, {worker!r}],
    policy=ProcessTimes(beat=.1, drain={drain}), autoload={autoload},
    max_seq_len=512, max_num_seqs=2, kv_cache_memory=1<<24))
'''
WORKER = str(Path(__file__).parent/'helpers'/'emulated_worker.py')

def free_port():
    "A port that nobody listens at"
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

def healthy(c):
    "Does the server answer, and is nothing wrong?"
    try:
        return c.get('/health').status_code==200
    except httpx.TransportError:
        return False

@contextmanager
def serving(models='tiny', drain=300., autoload=True, **env):
    "A server whose models are on the emulator; an HTTP client, and lines of its log"
    port = free_port()
    code = SERVE.format(models=models, port=port, worker=WORKER, drain=drain, autoload=autoload)
    p = subprocess.Popen(
        [sys.executable, '-c', code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ|env)
    lines = []
    threading.Thread(target=lambda: lines.extend(p.stdout), daemon=True).start()
    c = httpx.Client(base_url=f'http://127.0.0.1:{port}', timeout=WAIT)
    c.lines,c.process = lines,p
    try:
        until(lambda: p.poll() is not None or healthy(c), again=.1)
        assert p.poll() is None, ''.join(lines)
        yield c
        p.send_signal(signal.SIGINT)
        assert p.wait(WAIT) in (0,130), ''.join(lines)
    finally:
        p.kill()

def answer(c, **kw):
    body = dict(model='tiny', prompt='One day, a cat', max_tokens=6, temperature=0, logprobs=2)|kw
    return c.post('/v1/completions', json=body)

def choice(r):
    assert r.status_code==200, r.text
    x = r.json()['choices'][0]
    return x['text'],x['logprobs']

def state(c, name='tiny'):
    return next(m for m in c.get('/v1/models').json()['data'] if m['id']==name)['status']

def sleeping(c, **q):
    return c.get('/is_sleeping', params=q).json()

def workers_of(c):
    "The processes that a server started"
    stats = [p.read_text() for p in Path('/proc').glob('[0-9]*/stat')]
    fields = [(int(t.split()[0]), int(t.rpartition(')')[2].split()[1])) for t in stats]
    children = [pid for pid,parent in fields if parent==c.process.pid]
    return [pid for pid in children if WORKER in Path(f'/proc/{pid}/cmdline').read_text()]

def put_to_sleep(c, level):
    "The server's only model sleeps at `level`, and says so everywhere"
    r = c.post('/sleep', params=dict(level=level))
    told = r.json()
    assert r.status_code==200
    assert told['success'] and told['level']==level and told['bytes']>1<<20
    assert sleeping(c)=={'is_sleeping': True}
    s = state(c)
    assert (s['value'],s['level'],s['bytes'])==('sleeping',level,told['bytes'])
    assert c.get('/health').status_code==200 # nothing is wrong, and it does not wake
    metrics = c.get('/metrics').text
    assert 'atlas:model_state{model_name="tiny",state="sleeping"} 1.0' in metrics
    assert 'atlas:model_sleep_bytes{model_name="tiny"}' in metrics
    again = c.post('/sleep', params=dict(level=level)).json()
    assert again['level']==level and again['bytes']==0
    assert state(c)['bytes']==told['bytes']

def wake(c):
    "It wakes, and once is enough"
    w = c.post('/wake_up', params=dict(tags='weights'))
    assert w.json()['success'] and w.headers['x-atlas-ignored']=='tags'
    assert sleeping(c)=={'is_sleeping': False}
    assert state(c)['value']=='loaded'
    assert c.post('/wake_up').json()['bytes']==0

def refusals(c):
    "Levels, models and methods that there are not"
    for bad in ('0','3','x',''):
        assert c.post('/sleep', params=dict(level=bad)).status_code==400
    assert c.post('/sleep', params=dict(model='other')).status_code==404
    assert c.get('/sleep').status_code==405

def test_doors():
    "vLLM's doors: to sleep and to wake at both levels, what is told of it, and what wakes"
    with serving() as c:
        want = choice(answer(c))
        assert sleeping(c)=={'is_sleeping': False}
        for level in (1,2):
            put_to_sleep(c, level)
            wake(c)
            assert choice(answer(c))==want
        assert c.post('/sleep').status_code==200
        assert choice(answer(c))==want # who asks wakes it
        assert sleeping(c)=={'is_sleeping': False}
        refusals(c)
        assert c.post('/sleep').status_code==200
        assert c.post('/models/load', json=dict(model='tiny')).json()['success']
        assert sleeping(c)=={'is_sleeping': False}
        text = ''.join(c.lines)
        for said in ('tiny sleeps at level 1','given back in','tiny woke'):
            assert said in text

def test_many_models_and_no_autoload():
    "Which of them is meant has to be said, and none wakes by itself"
    models = [dict(model='tiny', name=name) for name in 'ab']
    with serving(models, autoload=False) as c:
        until(lambda: state(c, 'b')['value']=='loaded')
        for method,path in (('POST','/sleep'),('POST','/wake_up'),('GET','/is_sleeping')):
            r = c.request(method, path)
            assert r.status_code==400 and '?model=' in r.text
        def told(path): return c.post(path, params=dict(model='b'))
        assert told('/sleep').status_code==200
        b_does_not_answer(c)
        want = choice(answer(c, model='a'))
        assert told('/wake_up').status_code==200
        assert choice(answer(c, model='b'))==want
        assert told('/sleep').status_code==200
        assert c.post('/models/unload', json=dict(model='b')).status_code==200
        until(lambda: state(c, 'b')['value']=='unloaded')
        r = told('/wake_up')
        assert r.status_code==503 and 'does not sleep' in r.text

def b_does_not_answer(c):
    "It sleeps, and goes on sleeping when it is asked"
    assert [sleeping(c, model=m)['is_sleeping'] for m in 'ab']==[False,True]
    r = answer(c, model='b')
    assert r.status_code==503 and '/wake_up' in r.text
    assert int(r.headers['retry-after'])>0
    assert sleeping(c, model='b')=={'is_sleeping': True}

def streamed(c, n, ended, **kw):
    "Read a stream in a thread; its lines"
    lines = []
    def read():
        body = dict(model='tiny', prompt='Once', max_tokens=n, temperature=0, ignore_eos=True)
        with c.stream('POST', '/v1/completions', json=body|dict(stream=True)|kw) as r:
            for line in r.iter_lines():
                lines.append(line)
        ended.set()
    threading.Thread(target=read, daemon=True).start()
    until(lambda: len(lines)>2)
    return lines

@pytest.mark.parametrize('patient', [True,False])
def test_answers_under_way(patient):
    "They may end first; if they do not in time, they are ended with an error"
    with serving(drain=WAIT if patient else .1) as c:
        ended = threading.Event()
        lines = streamed(c, 60 if patient else 400, ended)
        assert c.post('/sleep').json()['level']==1
        assert ended.wait(WAIT)
        whole = any('"finish_reason":"length"' in line.replace(' ', '') for line in lines)
        assert whole==patient and patient!=any('put to sleep' in line for line in lines)
        assert sleeping(c)=={'is_sleeping': True}
        assert choice(answer(c))

def test_killed_while_asleep():
    "As ever: the process is started again, and the model is there"
    with serving() as c:
        want = choice(answer(c))
        c.post('/sleep')
        pid, = workers_of(c)
        os.kill(pid, signal.SIGKILL)
        until(lambda: state(c)['value']!='sleeping')
        until(lambda: c.get('/health').status_code==200, again=.1)
        assert choice(answer(c))==want and sleeping(c)=={'is_sleeping': False}
        assert c.post('/sleep').json()['level']==1 and c.post('/wake_up').status_code==200
        assert choice(answer(c))==want
