"""Gateway and worker, in real processes, and what goes wrong with them: killed, frozen, full,
poisoned, talking nonsense. Waits are for conditions, with a limit that only a failure reaches;
whatever was started is gone when a test ends."""
import asyncio,json,os,random,signal,subprocess,sys,time
import numpy as np,pytest
from structlog.contextvars import bind_contextvars,get_contextvars
from contextlib import asynccontextmanager,suppress
from dataclasses import replace
from functools import partial,wraps
from itertools import groupby
from types import SimpleNamespace as NS
from pathlib import Path
from atlas.service.turn import UnavailableError
from atlas.ground.core import AtlasError,OutOfMemoryError,QueueFullError,RequestError
from atlas.service.process import Model
from atlas.service.models import Models
from atlas.use.llm import LLM
from atlas.text.tokenizer import byte_tokenizer
from atlas.ground.options import EngineConfig
from atlas.service.link import Frames
from atlas.service.remote import RemoteRunner,WorkerProcess
from atlas.ground.requests import Request,SamplingParams
from atlas.service.worker import FATAL,REFUSED

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from script_config import ScriptConfig  # noqa: E402
from helpers.patience import PATIENT,impatient  # noqa: E402
from helpers.waiting import WAIT,happens,until  # noqa: E402

here = Path(__file__).parent
FAKE = sys.executable,here/'helpers'/'fake_worker.py'
FAULTY = sys.executable,here/'helpers'/'faulty_worker.py'
tok = byte_tokenizer()

def patience(**limits):
    "`PATIENT`, but for these limits"
    return replace(PATIENT, **limits)

def model(name='fake', policy=PATIENT, command=FAKE, **options):
    "A model whose process is a scripted worker"
    def text(o): return dict(tokenizer=tok)
    return Model(ScriptConfig(name, **options), policy=policy, command=command, text=text)

def req(rid, text, **kw):
    ids = tok.encode(text) if isinstance(text, str) else text
    return Request(rid, tuple(ids), SamplingParams(**dict(temperature=0, max_tokens=2000)|kw))

def alive(pid):
    "Is there such a process, other than a dead one that nobody has reaped?"
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]!='Z'
    except OSError:
        return False

@asynccontextmanager
async def running(*models, **kw):
    "`Models`, loaded; afterwards none of their processes is left"
    ms,pids = Models(list(models), **kw),[]
    tell = ms._tell
    def note(m, e):
        if m.child:
            pids.append(m.child.pid)
        tell(e)
    for m in ms.all:
        m.tell = partial(note, m)
    await ms.start()
    try:
        yield ms
    finally:
        await asyncio.wait_for(ms.close(), WAIT)
        assert not any(map(alive, pids))
        assert all(m.child is None and not m.runner._streams for m in ms.all)

def reasons_of(m):
    "Why a model is gone, each time that it tells something"
    reasons = []
    def tell(e):
        reasons.append(m.reason or '')
    m.tell = tell
    return reasons

async def collect(s):
    "The text of an answer, and how it ended"
    ids,last = [],None
    async for e in s:
        ids += [e.token] if e.token is not None and e.finish!='stop' else []
        last = e
    return ''.join(tok.token(i) for i in ids).replace('Ġ', ' '),last

HELLO = 'Hello there, reader.' # What a fake worker says

async def submitted(ms, text, name=None, **kw):
    "The stream of an answer"
    return (await ms.get(name)).runner.submit(req(os.urandom(4).hex(), text, **kw))

async def ask(ms, text='hello', name=None, **kw):
    return await collect(await submitted(ms, text, name, **kw))

async def ok(ms, name=None):
    return (await ask(ms, 'hello', name))[0]==HELLO

async def begun(ms, text, name=None, n=1):
    "Streams that have said something"
    ss = [await submitted(ms, text, name, max_tokens=10**6) for _ in range(n)]
    for s in ss:
        await asyncio.wait_for(anext(s), WAIT)
    return ss

def running_test(f):
    "A coroutine as a test, with a limit that only a hang reaches"
    @wraps(f)
    def test(*a, **kw):
        asyncio.run(asyncio.wait_for(f(*a, **kw), 3*WAIT))
    return test

# -- the worker's process ------------------------------------------------------------------------

@running_test
async def test_it_serves():
    async with running(model()) as ms:
        said = await asyncio.gather(*(ask(ms, f'{i}') for i in range(64)))
        assert all(t=='Hello there, reader.' and e.finish=='stop' for t,e in said)
        u = await ms.get()
        assert await u.runner.call('double', x=21)==42
        assert u.runner.healthy and ms.health()['status']=='ok'
        def idle(): return u.runner.stats().get('num_requests_running')==0
        await happens(idle, 'an idle engine is reported')
        assert ms.stats()[0]['load_seconds'].keys()=={'open','weights','warm'}

@running_test
async def test_killed_worker():
    "In-flight: an error. Health: 503 until another is there. The next question: served. No orphan"
    async with running(model()) as ms:
        ss,m = await begun(ms, '<endless>', n=3),ms.all[0]
        pid,seen = m.child.pid,[]
        def tell(e):
            seen.append((ms.health()['status'], m.condition))
        m.tell = tell
        os.kill(pid, signal.SIGKILL)
        for s in ss:
            e = (await asyncio.wait_for(collect(s), WAIT))[1]
            assert (e.finish, e.code)==('error', 'unavailable')
        await happens(lambda: ms.healthy, 'another process')
        assert ('unhealthy','restarting') in seen
        assert not any(h=='ok' and c!='loaded' for h,c in seen)
        assert m.child.pid!=pid and not alive(pid) and m.restarts==1 and await ok(ms)

@running_test
async def test_refused_while_it_is_gone():
    "A question in between gets 503 and when to come again"
    patient = patience(pause=10**6, longest=10**6)
    async with running(model(policy=patient)) as ms:
        assert await ok(ms)
        m = ms.all[0]
        os.kill(m.child.pid, signal.SIGKILL)
        await happens(lambda: m.child is None and m.reason=='was ended by SIGKILL')
        with pytest.raises(AtlasError) as e:
            await ms.get()
        assert (e.value.status, e.value.code)==(503,'unavailable') and e.value.retry_after>=1
        assert not ms.healthy and m.reason=='was ended by SIGKILL'

@pytest.mark.parametrize('mark,reason', [('<sticky>', 'CUDA error 700'), ('<bug>', 'KeyError')])
@running_test
async def test_fault_of_the_engine(mark, reason):
    """Everybody's answer ends with an error; the process says why and is replaced; it answers
    nobody in between"""
    async with running(model()) as ms:
        m,others = ms.all[0],await begun(ms, '<endless>', n=2)
        pid,reasons = m.child.pid,reasons_of(m)
        text,last = await asyncio.wait_for(ask(ms, mark), WAIT)
        assert last.finish=='error' and len(text)<=3 and 'secret' not in last.error
        for s in others:
            assert (await asyncio.wait_for(collect(s), WAIT))[1].finish=='error'
        await happens(lambda: ms.healthy)
        assert m.code==FATAL and any(reason in r for r in reasons)
        assert m.child.pid!=pid and await ok(ms)

@running_test
async def test_nothing_after_a_fault():
    "From the fault to the new process not one token arrives"
    async with running(model()) as ms:
        assert await ok(ms)
        m,tokens = ms.all[0],[]
        events = m.runner._events
        def heard(es, stats):
            tokens.append((m.child.pid, m.runner._ready))
            events(es, stats)
        m.runner._events = heard
        pid = m.child.pid
        ends = await asyncio.gather(*(ask(ms, t) for t in ('<sticky>',*['<endless>']*8)))
        assert all(e.finish=='error' for _,e in ends)
        await happens(lambda: ms.healthy)
        assert await ok(ms) and all(ready for _,ready in tokens)
        # the first may have died in its first step
        assert m.child.pid in {p for p,_ in tokens} <= {pid, m.child.pid}

@pytest.mark.parametrize('wrong,says', [('oom', '12 GiB can be used'), ('host oom', '70. GiB')])
@running_test
async def test_no_memory_to_load(wrong, says):
    "507 with the numbers, once and not again; other models are unharmed"
    small,large = model('small'),model('large', at_load=wrong)
    async with running(small, large, first=['small']) as ms:
        assert await ok(ms, 'small')
        stream, = await begun(ms, '<endless>', 'small')
        with pytest.raises(OutOfMemoryError, match=says) as e:
            await ms.get('large')
        assert (e.value.status, large.state)==(507,'failed')
        assert (large.code, large.restarts)==(REFUSED,0)
        assert ms.healthy and await ok(ms, 'small')
        said = dict(value='unloaded', failed=True, exit_code=REFUSED, reason=large.reason)
        assert large.status|dict(args=0)==said|dict(args=0)
        await asyncio.wait_for(anext(stream), WAIT)
        stream.abort()
        assert (await collect(stream))[1].finish=='abort'

@pytest.mark.parametrize('mark,code', [('<oom>', 'out_of_memory'), ('<nan>', 'corrupted_output')])
@running_test
async def test_only_that_request(mark, code):
    "No memory for one prompt, or logits that are no numbers: nobody else notices"
    async with running(model()) as ms:
        others = [asyncio.create_task(ask(ms)) for _ in range(8)]
        _,last = await ask(ms, mark)
        assert (last.finish, last.code)==('error', code)
        assert [(await o)[0] for o in others]==[HELLO]*8
        assert ms.all[0].restarts==0 and ms.healthy
        def counted(): return ms.all[0].runner.stats().get('corrupted_requests_total')
        await happens(lambda: counted()==(mark=='<nan>'), 'the counter')

@running_test
async def test_clients_that_leave():
    "The engine is rid of a request, and of its blocks; within a step, says test_server"
    async with running(model()) as ms:
        r,ss = (await ms.get()).runner,await begun(ms, '<endless>', n=16)
        def busy(): return r.stats()['num_requests_running']
        def blocks(): return r.stats()['blocks_used']
        await happens(lambda: busy()==16 and blocks()>=16)
        for s in ss:
            s.abort()
        for s in ss:
            assert (await collect(s))[1].finish=='abort'
        await happens(lambda: blocks()==0 and not busy())
        assert r.idle.is_set() and not r._numbers and await ok(ms)

@running_test
async def test_queue_overflow():
    "Who is too many is refused at once; who was taken is answered"
    async with running(model(max_queue=2)) as ms:
        r,taken,refused = (await ms.get()).runner,[],0
        for i in range(50):
            try:
                taken.append(r.submit(req(f'q{i}', 'hello')))
            except QueueFullError as e:
                refused += e.status==503
        assert (len(taken), refused)==(2, 48)
        assert [(await collect(s))[0] for s in taken]==[HELLO]*2 and await ok(ms)

@running_test
async def test_frozen_worker():
    """SIGSTOP: not healthy, with the reason; those who are there wait. SIGCONT: all is well
    again, and nothing was lost"""
    async with running(model()) as ms:
        m = ms.all[0]
        s, = await begun(ms, '<endless>')
        pid = m.child.pid
        os.kill(pid, signal.SIGSTOP)
        impatient(m, stalled=.3)
        await happens(lambda: m.condition=='stalled', 'the watchman notices')
        assert not ms.healthy and 'no sign of life' in m.reason
        assert ms.health()['models']['fake']['state']=='stalled'
        with pytest.raises(AtlasError) as e:
            await ms.get()
        assert e.value.status==503
        os.kill(pid, signal.SIGCONT)
        await happens(lambda: ms.healthy, 'it recovers')
        impatient(m, stalled=PATIENT.stalled)
        assert m.child.pid==pid and m.restarts==0 and m.reason is None and await ok(ms)
        await anext(s)
        s.abort()
        assert (await collect(s))[1].finish=='abort'

@running_test
async def test_frozen_for_too_long():
    "After the longer limit it is ended and replaced"
    async with running(model()) as ms:
        m = ms.all[0]
        s, = await begun(ms, '<endless>')
        pid,reasons = m.child.pid,reasons_of(m)
        os.kill(pid, signal.SIGSTOP)
        impatient(m, stalled=.1, dead=.3)
        assert (await asyncio.wait_for(collect(s), WAIT))[1].finish=='error'
        impatient(m, stalled=PATIENT.stalled, dead=PATIENT.dead)  # the next one may take its time
        await happens(lambda: ms.healthy and m.child.pid!=pid)
        assert not alive(pid) and any('gave no sign of life' in r for r in reasons) and await ok(ms)

@running_test
async def test_stuck_step():
    "A step that does not come back, in a process that lives"
    async with running(model()) as ms:
        assert await ok(ms)
        pid = ms.all[0].child.pid
        stuck, = await begun(ms, '<stuck>')
        impatient(ms.all[0], hung=.5)
        _,last = await asyncio.wait_for(collect(stuck), WAIT)
        assert last.finish=='error'
        impatient(ms.all[0], hung=PATIENT.hung)
        await happens(lambda: ms.healthy and ms.all[0].child.pid!=pid)
        assert await ok(ms)

@running_test
async def test_never_ready():
    "Loading that does not get on is ended, and after some tries given up with the reason"
    hasty = patience(start=.4, ends=2)
    async with running(model(policy=hasty, at_load='hang')) as ms:
        with pytest.raises(AtlasError, match='did not get on') as e:
            await ms.get()
        m = ms.all[0]
        assert (e.value.status, m.state, m.restarts)==(503,'failed',1)
        assert not ms.healthy and ms.health()['status']=='unhealthy' and 'not ready' in m.reason

@pytest.mark.parametrize('wrong,says', [('die', 'ended with code 3'), ('bug', 'KeyError')])
@running_test
async def test_crash_loop(wrong, says, tmp_path):
    """A worker that ends at the start again and again is given up, with the reason; until
    somebody loads it again"""
    lives = tmp_path/'lives'
    async with running(model(at_load=wrong, lives=str(lives))) as ms:
        with pytest.raises(AtlasError, match=says) as e:
            await ms.get()
        m = ms.all[0]
        assert (e.value.status, m.state)==(503, 'failed')
        assert len(lives.read_text().split())==PATIENT.ends
        assert says in m.reason and 'secret' not in m.reason
        assert m.status['failed'] and m.status['value']=='unloaded'
        m.config = replace(m.config, at_load=None)
        await ms.load('fake')
        assert await ok(ms) and ms.healthy

@running_test
async def test_killed_again_and_again():
    "One that has been ready is never given up, however often it ends"
    async with running(model(policy=patience(ends=2))) as ms:
        assert await ok(ms)
        m = ms.all[0]
        for i in range(5):
            os.kill(m.child.pid, signal.SIGKILL)
            await happens(lambda: m.restarts==i+1 and ms.healthy)
        assert await ok(ms)

@running_test
async def test_second_try(tmp_path):
    "One that ends twice and then loads is there, and whoever waited is served"
    async with running(model(at_load='die twice', lives=str(tmp_path/'lives'))) as ms:
        assert await ok(ms) and ms.all[0].restarts==2

@running_test
async def test_no_such_command():
    async with running(model(command=('/nowhere/python',))) as ms:
        with pytest.raises(AtlasError, match='could not be started'):
            await ms.get()

@running_test
async def test_garbage():
    "Bytes that are no frame: the process is not listened to any more, and replaced"
    async with running(model()) as ms:
        m,other = ms.all[0],(await begun(ms, '<endless>'))[0]
        pid,reasons = m.child.pid,reasons_of(m)
        for c in (ask(ms, '<garbage>'), collect(other)):
            assert (await asyncio.wait_for(c, WAIT))[1].finish=='error'
        await happens(lambda: ms.healthy and m.child.pid!=pid)
        assert any('does not speak our language' in r for r in reasons) and await ok(ms)

@running_test
async def test_garbage_to_the_worker():
    async with running(model()) as ms:
        assert await ok(ms)
        m = ms.all[0]
        pid = m.child.pid
        m.runner._wire.write(b'\x00'*64)
        await happens(lambda: m.restarts==1 and ms.healthy)
        assert m.child.pid!=pid and m.code==FATAL and await ok(ms)

@running_test
async def test_clocks_that_jump(monkeypatch):
    """The wall clock goes back and forth by years, on both sides: nobody is thought dead,
    nothing is restarted, answers are right"""
    true = time.time
    def jumps(): return true()+random.choice((-1,1))*86400*400
    monkeypatch.setattr(time, 'time', jumps)
    async with running(model(clock=True)) as ms:
        for _ in range(20):
            assert await ok(ms)
        assert ms.all[0].restarts==0 and ms.healthy and ms.all[0].condition=='loaded'

def test_only_the_monotonic_clock():
    """The wall clock is asked for people alone: when a model was made known, and since when its
    state is what it is"""
    import inspect
    from atlas.service import admission,gateway,link,models,process,remote,worker
    parts = admission,gateway,link,models,process,remote,worker
    src = ''.join(map(inspect.getsource, parts))
    assert src.count('time.time(')==2 and 'datetime' not in src

@running_test
async def test_a_gateway_that_slept():
    "It was stopped itself, and does not blame its workers for the time"
    async with running(model()) as ms:
        assert await ok(ms)
        m = ms.all[0]
        await happens(lambda: m.silent==0)
        impatient(m, stalled=.5, dead=1.)
        time.sleep(1.5)  # the loop does nothing: no beat is read, no look is taken
        looks = m.stuck
        await happens(lambda: m.stuck>looks+2)  # three looks are no ten of silence
        assert m.condition=='loaded' and m.restarts==0
        impatient(m, stalled=PATIENT.stalled, dead=PATIENT.dead)
        assert await ok(ms)

@running_test
async def test_what_cannot_be_followed_is_given_up(monkeypatch):
    "A mistake of our own in the life of a process is no silence"
    async def broken(self, sock):
        raise RuntimeError('a mistake')
    monkeypatch.setattr('atlas.service.remote.RemoteRunner.attach', broken)
    async with running(model()) as ms:
        with pytest.raises(AtlasError, match='RuntimeError'):
            await ms.get()
        assert ms.all[0].state=='failed'

def missing(config):
    raise RequestError('There is no tokenizer')

@pytest.mark.parametrize('text,says', [
    (missing, 'no tokenizer'),
    (lambda config: 1/0, 'ZeroDivisionError'),
    (lambda config: dict(nonsense=1), 'TypeError'),
])
@running_test
async def test_text_side_that_fails(text, says):
    """A model without a tokenizer, or with a mistake of our own there: it says so, and its
    process goes"""
    m = model()
    m.text = text
    async with running(m) as ms:
        with pytest.raises(AtlasError, match=says):
            await ms.get()
        assert m.state=='failed' and m.child is None

def picture(value): return np.full((4,8), value, 'f4'),(1,2,2)

@running_test
async def test_images_are_sent_once():
    "The answers to one prompt share their images; whoever comes next has their own"
    sent,r = [],RemoteRunner('r')
    r._wire,r._ready = NS(write=sent.append),True
    r.info = dict(max_seq_len=100)
    one,other = (picture(1),),(picture(0),)
    for i,images in enumerate((one, one, other, (), (), one)):
        r.submit(Request(f'{i}', (1,2), SamplingParams(), images=images))
    got = [m[3] for b in sent for m in Frames().feed(b)]
    assert [None if g is None else len(g) for g in got]==[1,None,1,0,0,1]
    assert (got[0][0][0]==1).all() and (got[2][0][0]==0).all()

# -- loading, unloading, many models -------------------------------------------------------------

@running_test
async def test_load_and_unload():
    async with running(model('a'), model('b', say='I am b.'), first=[]) as ms:
        b = ms.find('b')
        assert ms.healthy and [d['status']['value'] for d in ms.list()]==['unloaded']*2
        assert (await ask(ms, name='b'))[0]=='I am b.'
        assert [m.state for m in ms.all]==['unloaded','loaded']
        await ms.load('a')
        s, = await begun(ms, 'hello', 'b')
        pid = b.child.pid
        await ms.unload('b')
        assert (await collect(s))[1].finish=='stop'  # it may finish
        await happens(lambda: b.state=='unloaded')
        assert not alive(pid) and await ok(ms, 'a') and (await ask(ms, name='b'))[0]=='I am b.'

@running_test
async def test_what_cannot_be_loaded_or_unloaded():
    async with running(model('a'), model('b'), first=[]) as ms:
        with pytest.raises(RequestError, match='not loaded'):
            await ms.unload('a')
        assert await ok(ms, 'b')
        with pytest.raises(RequestError, match='loaded already'):
            await ms.load('b')
        await ms.load('a')
        with pytest.raises(RequestError):
            await ms.load('a')
        with pytest.raises(AtlasError) as e:
            await ms.get('c')
        assert e.value.status==404

@running_test
async def test_the_text_side_is_read_again():
    "With each loading, for its files may be others by then; not when a process only comes back"
    reads,m = [],model()
    def text(o):
        reads.append(o.model)
        return dict(tokenizer=tok)
    m.text = text
    async with running(m) as ms:
        assert await ok(ms)
        m.child.kill()
        await happens(lambda: m.restarts==1 and m.state=='loaded')
        assert await ok(ms) and len(reads)==1
        await ms.unload(m.name)
        await happens(lambda: m.state=='unloaded')
        assert m.side is None and await ok(ms) and len(reads)==2

@running_test
async def test_unload_ends_what_does_not_finish():
    async with running(model(policy=patience(drain=.1))) as ms:
        s, = await begun(ms, '<endless>')
        await ms.unload('fake')
        assert (await asyncio.wait_for(collect(s), WAIT))[1].code=='unavailable'
        await happens(lambda: ms.all[0].state=='unloaded')

@running_test
async def test_load_on_request_is_shared():
    "Fifty who ask at once start one process; one who leaves does not stop it"
    async with running(model(), first=[]) as ms:
        gone = asyncio.create_task(ms.get())
        await asyncio.sleep(0)
        gone.cancel()
        assert all(await asyncio.gather(*(ok(ms) for _ in range(50))))
        assert ms.all[0].restarts==0

@running_test
async def test_no_autoload():
    async with running(model(), first=[], autoload=False) as ms:
        with pytest.raises(AtlasError, match='not loaded') as e:
            await ms.get()
        assert e.value.status==503

@running_test
async def test_unload_at_any_time():
    """While it loads, while it is down, while it waits: the process is gone, and it can be
    loaded again"""
    for wrong in ('hang','die',None):
        async with running(model(policy=patience(pause=.2, ends=99), at_load=wrong)) as ms:
            m = ms.all[0]
            for wait in (0, .01, .3):
                await asyncio.sleep(wait)
                if m.wanted:
                    await ms.unload('fake')
                await happens(lambda: m.state=='unloaded')
                assert m.child is None
                await ms.load('fake')

@running_test
async def test_load_while_it_unloads():
    """Refused if it is asked for; a question waits until the old process is gone and is answered
    by a new one"""
    async with running(model(policy=patience(drain=3600.))) as ms:
        m,(s,) = ms.all[0],await begun(ms, '<endless>')
        pid = m.child.pid
        await ms.unload('fake')
        with pytest.raises(RequestError, match='unloading'):
            await ms.load('fake')
        with pytest.raises(RequestError, match='not loaded'):
            await ms.unload('fake')
        waits = [asyncio.create_task(ask(ms, 'hello')) for _ in range(3)]
        await asyncio.sleep(0)
        assert m.state=='unloading' and not any(w.done() for w in waits)
        waits[0].cancel()
        s.abort()
        assert [(await asyncio.wait_for(w, WAIT))[0] for w in waits[1:]]==[HELLO]*2
        assert m.child.pid!=pid and not alive(pid) and m.restarts==0

@running_test
async def test_unload_while_it_loads():
    "Whoever waits for it is told; it is not loaded again for him"
    async with running(model(at_load='hang'), first=[]) as ms:
        m,wait = ms.all[0],asyncio.create_task(ms.get('fake'))
        await happens(lambda: m.state=='loading' and m.child)
        await ms.unload('fake')
        with pytest.raises(UnavailableError, match='was unloaded'):
            await asyncio.wait_for(wait, WAIT)
        assert m.state=='unloaded'

@asynccontextmanager
async def overheard(ms):
    "A list that gets the events of models, until these end"
    seen = []
    async def listen():
        async for e in ms.events():
            seen.append(e)
    ear = asyncio.create_task(listen())
    await asyncio.sleep(0)
    yield seen
    await ms.close()
    await asyncio.wait_for(ear, WAIT)

@running_test
async def test_events_as_llama_cpp_has_them():
    async with running(model(), first=[]) as ms, overheard(ms) as seen:
        assert await ok(ms)
        await ms.unload('fake')
        def told(): return seen[-1]['data']['status']
        await happens(lambda: ms.all[0].state==told()=='unloaded')
        assert all(e['event']=='model_status' and e['model']=='fake' for e in seen)
        words = [k for k,_ in groupby(e['data']['status'] for e in seen)]
        assert words==['loading','loaded','unloading','unloaded']
        json.dumps(seen)

@running_test
async def test_events_say_how_far_loading_is():
    async with running(model(), first=[]) as ms, overheard(ms) as seen:
        assert await ok(ms)
        steps = [e['data']['progress'] for e in seen if 'progress' in e['data']]
        assert all(s['stages']==['open','weights','warm'] and 0<=s['value']<=1 for s in steps)
        order = [(s['stages'].index(s['current']), s['value']) for s in steps]
        assert order==sorted(order) and (1, 1.) in order
        assert len({v for i,v in order if i==1})>50

@running_test
async def test_two_models_do_not_share_a_name():
    with pytest.raises(RequestError, match='Two models'):
        Models([model('a'), model('a')])

@running_test
async def test_the_end_comes_while_it_loads():
    "Who waits for a model hears that the server is going, and nothing is loaded for them any more"
    async with running(model(at_load='hang'), first=[]) as ms:
        m = ms.all[0]
        waiting = [asyncio.create_task(ms.get()) for _ in range(3)]
        await happens(lambda: m.child)
        begun = []
        def begin():
            begun.append(1)
        m.begin = begin
        assert await ms.drain(WAIT)
        for w in waiting:
            with pytest.raises(AtlasError, match='shutting down') as e:
                await asyncio.wait_for(w, WAIT)
            assert e.value.status==503
        ms.abort()
        await happens(lambda: m.state=='unloaded')
        with pytest.raises(AtlasError, match='shutting down'):
            await ms.get()
        assert not begun and m.child is None

@running_test
async def test_drain_waits_for_computations():
    async with running(model()) as ms:
        r = (await ms.get()).runner
        c = asyncio.create_task(r.call('nap', seconds=.3))
        await asyncio.sleep(0)
        assert await ms.drain(WAIT) and c.done() and c.result()=='rested' and r.idle.is_set()

@running_test
async def test_no_thread_to_wait_with(monkeypatch):
    "A process that nobody can watch is not left behind"
    pids,popen = [],subprocess.Popen
    class Seen(popen):
        def __init__(self, *a, **kw):
            super().__init__(*a, **kw)
            pids.append(self.pid)
    def none(self):
        raise RuntimeError("can't start new thread")
    monkeypatch.setattr('atlas.service.remote.threading.Thread.start', none)
    monkeypatch.setattr('atlas.service.remote.subprocess.Popen', Seen)
    with pytest.raises(OSError, match='thread'):
        WorkerProcess(FAKE)
    monkeypatch.undo()
    assert len(pids)==1 and not alive(pids[0])

# -- a thousand of everything --------------------------------------------------------------------

async def some_client(ms, i, rng):
    "Ask until it is taken, stay or leave early: how the answer ended"
    texts = ['hello','<endless>','<nan>','<oom>']
    while True:
        try:
            asked = req(f'r{i}', rng.choice(texts), max_tokens=rng.randint(1, 60))
            s = (await ms.get()).runner.submit(asked)
            break
        except AtlasError as e:
            assert e.status==503
            await asyncio.sleep(.02)
    if rng.random()>=.4:
        return (await collect(s))[1].finish
    async for e in s:
        if e.finish or rng.random()<.3:
            break
    s.abort()
    return e.finish or (await collect(s))[1].finish

async def killed_now_and_then(ms, times):
    for _ in range(times):
        await happens(lambda: ms.healthy)
        await asyncio.sleep(.15)
        if child := ms.all[0].child:
            with suppress(ProcessLookupError):  # of the last kill nobody has heard yet
                os.kill(child.pid, signal.SIGKILL)

@running_test
async def test_many_requests_and_random_ends():
    """1,000 requests, of which many leave early, while the process is killed now and then: every
    one ends exactly once, nothing is left"""
    rng = random.Random(5)
    async with running(model(max_queue=1000, policy=patience(ends=10**6))) as ms:
        kills,work = asyncio.create_task(killed_now_and_then(ms, 6)),[]
        for i in range(1000):
            work.append(asyncio.create_task(some_client(ms, i, rng)))
            if i%50==0:
                await asyncio.sleep(.05)
        ends = await asyncio.gather(*work)
        await kills
        assert len(ends)==1000 and {'stop','abort','error','length'}>={*ends}
        await happens(lambda: ms.healthy)
        r = ms.all[0].runner
        assert await ok(ms) and not r._streams and not r._numbers and not r._calls
        await happens(lambda: r.stats()['num_requests_running']==0)

@running_test
async def test_descriptors_and_threads_stay():
    import threading
    quick = patience(ends=10**6, pause=.001, longest=.001)
    async with running(model(policy=quick)) as ms:
        assert await ok(ms)
        m = ms.all[0]
        def count(): return len(os.listdir('/proc/self/fd')),threading.active_count()
        before = count()
        for i in range(5):
            os.kill(m.child.pid, signal.SIGKILL)
            await happens(lambda: m.restarts==i+1 and ms.healthy)
        await happens(lambda: count()<=before, f'{before} again')

# -- a real model --------------------------------------------------------------------------------

TOY = here/'data'/'qwen35-dense'
def toy(**options):
    "A model with a real engine"
    return Model(EngineConfig(TOY, 'cpu', max_num_seqs=4, **options), **OF_TOY)
def faulty():
    "The same in a worker that fails when it is told to"
    return Model(EngineConfig(TOY, 'cpu', max_num_seqs=4), command=FAULTY, **OF_TOY)
def no_text(config): return dict(tokenizer=None)
OF_TOY = dict(names=['toy'], policy=PATIENT, text=no_text)
async def ids_of(s):
    "Tokens of a stream"
    return [e.token async for e in s if e.token is not None]
PROMPTS = [
    [3,1,4,1,5,9,2,6],
    [2,7,1,8,2,8],
    [1,6,1,8,0,3,3,9,8,8,7,4]]

def at_home():
    "The model in this process, and its answers to `PROMPTS`"
    llm = LLM(str(TOY), 'cpu', max_num_seqs=4)
    params = SamplingParams(temperature=0, max_tokens=12)
    return llm,[o.token_ids for o in llm.generate(PROMPTS, params)]

async def answers(r, name='t'):
    "What a runner answers to `PROMPTS`"
    asked = [r.submit(req(f'{name}{i}', p, max_tokens=12)) for i,p in enumerate(PROMPTS)]
    return await asyncio.gather(*map(ids_of, asked))

@running_test
async def test_a_real_model_says_the_same():
    "Through a process, killed once in between, the answers are those of the model in this process"
    llm,want = at_home()
    async with running(toy()) as ms:
        r,pid = (await ms.get('toy')).runner,ms.all[0].child.pid
        assert await answers(r)==want
        said = r.info['max_seq_len'],r.info['vocab_size']
        assert said==(llm.max_seq_len, llm.config.vocab_size)
        s = r.submit(req('long', PROMPTS[0], max_tokens=200))
        await anext(s)
        os.kill(pid, signal.SIGKILL)
        assert (await collect_raw(s)).code=='unavailable'
        await happens(lambda: ms.healthy)
        assert ms.all[0].child.pid!=pid and await answers((await ms.get('toy')).runner)==want

async def collect_raw(s):
    async for e in s:
        pass
    return e

@running_test
async def test_a_real_model_with_faults():
    """NaN logits end that request and are counted; no memory for a prompt ends that request; the
    others are right"""
    _,want = at_home()
    async with running(faulty()) as ms:
        r = (await ms.get('toy')).runner
        for bad,code in ((7, 'corrupted_output'), (8, 'out_of_memory')):
            e = await collect_raw(r.submit(req(f'bad{bad}', [bad,1,2], max_tokens=12)))
            assert (e.finish, e.code)==('error', code) and ms.healthy
            assert await answers(r, bad)==want
        left = dict(corrupted_requests_total=1, blocks_used=0, num_requests_running=0)
        await happens(lambda: left.items()<=r.stats().items())
        assert ms.all[0].restarts==0

@running_test
async def test_a_real_model_that_does_not_fit():
    async with running(toy(kv_cache_memory=1), first=[]) as ms:
        with pytest.raises(OutOfMemoryError) as e:
            await ms.get('toy')
        assert e.value.status==507 and ms.all[0].code==REFUSED
        m = ms.all[0]
        m.config = replace(m.config, model=str(here/'nowhere'))
        await ms.load('toy')
        with pytest.raises(AtlasError) as e:
            await ms.get('toy')
        assert e.value.status==404

# -- over HTTP, from outside ---------------------------------------------------------------------

import contextlib,re,socket,threading
import httpx

GATEWAY = (sys.executable, here/'helpers'/'fake_gateway.py')

def body(text, max_tokens, **kw):
    "A question to chat completions"
    return dict(messages=[dict(role='user', content=text)], max_tokens=max_tokens)|kw

def asked_by_hand(port, text, **kw):
    "A socket on which a question was written, and from which nobody reads"
    raw = json.dumps(body(text, 10**5, **kw)).encode()
    s = socket.create_connection(('127.0.0.1', port))
    head = ('POST /v1/chat/completions HTTP/1.1', 'Host: localhost',
        'Content-Type: application/json', f'Content-Length: {len(raw)}', '', '')
    s.sendall('\r\n'.join(head).encode()+raw)
    return s

class Live:
    "A gateway in a process, and its workers"
    def __init__(self, *models, out=None, err=None, before=None, **kw):
        models = [dict(model='fake')|m for m in models or ({},)]
        kw = dict(models=models, policy=vars(PATIENT), drain=WAIT)|kw
        self.p = subprocess.Popen(
            [*GATEWAY, json.dumps(kw)], text=True, start_new_session=True, preexec_fn=before,
            stdout=out or subprocess.PIPE, stderr=err or out or subprocess.DEVNULL)
        self.port = self._told_port() if out is None else kw['port']
        self.http = self.client()
    def _told_port(self):
        line = self.p.stdout.readline()
        assert 'is ready' in line, line
        return int(re.search(r'http://127.0.0.1:(\d+)', line)[1])
    def client(self): return httpx.Client(base_url=f'http://127.0.0.1:{self.port}', timeout=WAIT)
    def chat(self, text, http=None, **kw):
        return (http or self.http).post('/v1/chat/completions', json=body(text, 5000, **kw))
    def stream(self, text, http=None, **kw):
        asked = body(text, 10**5, stream=True, **kw)
        return (http or self.http).stream('POST', '/v1/chat/completions', json=asked)
    def said(self, text, **kw):
        return self.chat(text, **kw).json()['choices'][0]['message']['content']
    def ok(self, **kw): return self.said('hello', **kw)==HELLO
    def health(self): return self.http.get('/health').status_code
    def metric(self, name):
        text = self.http.get('/metrics').text
        return sum(map(float, re.findall(rf'^atlas:{name}(?:{{[^}}]*}})? (\S+)$', text, re.M)))
    def statuses(self):
        "The status of each model, as llama.cpp's clients read it"
        return {m['id']: m['status']['value'] for m in self.http.get('/models').json()['data']}
    @property
    def workers(self):
        asked = ['pgrep', '-P', str(self.p.pid), '-f', 'fake_worker']
        found = subprocess.run(asked, capture_output=True, text=True).stdout
        return [int(p) for p in found.split()]
    def __enter__(self):
        self.pids = self.workers
        return self
    def __exit__(self, *_):
        pids = self.workers or self.pids
        self.p.kill()
        self.p.wait()
        self.http.close()
        if self.p.stdout:
            self.p.stdout.close()
        until(lambda: not any(map(alive, pids)), 'the end of all workers')

def data(lines):
    return [json.loads(l[6:]) for l in lines if l.startswith('data: {')]
def gone(port):
    "Is nobody there? Then the port can be taken, too"
    try:
        socket.create_connection(('127.0.0.1', port), 1).close()
        return False
    except OSError:
        pass
    socket.create_server(('127.0.0.1', port)).close()
    return True

def test_http_killed_worker():
    with Live() as l:
        pid, = l.workers
        with l.stream('<endless>') as r:
            lines = r.iter_lines()
            for _ in range(8):
                next(lines)
            os.kill(pid, signal.SIGKILL)
            assert l.http.get('/health', headers={'connection':'close'}).status_code in (200,503)
            rest = [*lines]
        last = data(rest)[-1]
        assert last['error']['code']=='unavailable' and 'data: [DONE]' in rest
        until(lambda: l.health()==200)
        assert l.ok() and not alive(pid) and len(l.workers)==1
        assert l.metric('model_restarts_total')==1

def test_http_refused_while_down():
    with Live(policy=vars(patience(pause=10**6, longest=10**6))) as l:
        os.kill(l.workers[0], signal.SIGKILL)
        until(lambda: l.health()==503)
        r = l.chat('hello')
        assert r.status_code==503 and int(r.headers['retry-after'])>=1
        assert r.json()['error']['code']=='unavailable'
        def reaped():
            "The link is lost before the process is reaped, which the reason tells"
            body = l.http.get('/health').json()
            return 'SIGKILL' in body['models']['fake']['reason'] and body['status']=='unhealthy'
        until(reaped)

@contextlib.contextmanager
def asked_again_and_again(l):
    "Statuses and bodies of one who asks for as long as this lasts"
    stop,got = threading.Event(),[]
    def asking():
        with l.client() as h:
            while not stop.is_set():
                r = l.chat('hello', h)
                got.append((r.status_code, r.json()))
    t = threading.Thread(target=asking)
    t.start()
    try:
        yield got
    finally:
        stop.set()
        t.join()

def test_http_sticky_fault():
    "After the fault no answer with text, until a new process is there"
    with Live() as l:
        pid, = l.workers
        with asked_again_and_again(l) as got:
            r = l.chat('<sticky>')
            assert r.status_code==503 and 'CUDA error 700' in r.json()['error']['message']
            until(lambda: l.health()==200 and l.workers and l.workers[0]!=pid)
        assert l.ok() and {c for c,_ in got}<={200,503,500}
        served = [b['choices'][0]['message']['content'] for c,b in got if c==200]
        assert {*served}<={HELLO}

def test_http_killed_gateway():
    """kill -9 of the gateway: its workers go, also one that is stopped in a step,
    and the port is free"""
    with Live(dict(model='a'), dict(model='b')) as l:
        pids = l.workers
        assert len(pids)==2
        with l.stream('<endless>', model='a') as r, l.stream('<stuck>', model='b') as s:
            for x in (r.iter_lines(), s.iter_lines()):
                next(x)
            l.p.kill()
            l.p.wait()
            until(lambda: not any(map(alive, pids)))
        assert gone(l.port)

@pytest.mark.parametrize('sig', [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_http_drain(sig):
    """What runs finishes; a question on an open connection gets 503; nobody new is let in; the
    code is 0"""
    with Live(dict(say='abcdefghij'*40)) as l, l.client() as other, l.client() as third:
        assert other.get('/health').status_code==200
        with l.stream('<endless>', third) as last, l.stream('hello') as r:
            lines = r.iter_lines()
            next(lines)
            next(last.iter_lines())  # as long as `last` runs the server is there
            os.killpg(l.p.pid, sig)  # as a terminal's Ctrl-C, or a service manager
            until(lambda: gone_port(l.port), 'it stops listening')
            h = other.get('/health')
            a = l.chat('hello', other)
            assert (h.status_code, h.json()['status'], a.status_code)==(503,'draining',503)
            assert int(a.headers['retry-after'])>=1
            deltas = [c['choices'][0]['delta'] for c in data(lines) if c['choices']]
        assert ''.join(d.get('content') or '' for d in deltas)=='abcdefghij'*40
        assert l.p.wait(WAIT)==0 and not any(map(alive, l.pids)) and gone(l.port)

def test_http_killed_gateway_while_its_worker_starts(tmp_path):
    """Before a line of anything large is read the worker is bound to its gateway: here importing
    NumPy takes for ever"""
    (tmp_path/'numpy.py').write_text(
        f'import time\nopen({str(tmp_path/"here")!r}, "w").close()\ntime.sleep(10**6)\n')
    code = f'''
import os,socket,subprocess,sys,time
a,b = socket.socketpair(); r,w = os.pipe()
args = [str(b.fileno()), str(r), str(os.getpid()), 'x']
env = dict(os.environ, PYTHONPATH={str(tmp_path)!r}+os.pathsep+{str(here.parent)!r})
p = subprocess.Popen([sys.executable, '-m', 'atlas.service.worker', *args],
    pass_fds=(b.fileno(),r), start_new_session=True, env=env)
print(p.pid, flush=True); time.sleep(10**6)
'''
    p = subprocess.Popen(
        [sys.executable, '-c', code], stdout=subprocess.PIPE, text=True,
        start_new_session=True)
    pid = int(p.stdout.readline())
    try:
        until(lambda: (tmp_path/'here').exists() or not alive(pid))
        assert alive(pid)
    finally:
        p.kill()
        p.wait()
        p.stdout.close()
    try:
        until(lambda: not alive(pid), 'the end of the worker')
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

def test_http_second_signal_with_a_frozen_worker():
    "It ends at once, and does not give the worker time to hear of it"
    with Live(drain=3600., policy=vars(patience(grace=3600.))) as l:
        pid, = l.workers
        with l.stream('<endless>') as r:
            lines = r.iter_lines()
            next(lines)
            os.kill(pid, signal.SIGSTOP)
            l.p.terminate()
            until(lambda: gone_port(l.port))
            l.p.terminate()
            assert data([*lines])[-1]['error']['code']=='unavailable'
        assert l.p.wait(WAIT)==0 and not alive(pid)

def test_http_the_terminal_goes():
    "nohup: the server stays"
    with Live(before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)) as l:
        os.kill(l.p.pid, signal.SIGHUP)
        assert l.ok() and l.p.poll() is None

def test_http_started_without_doors():
    """stdin, stdout and stderr are closed: no socket takes their place, and a worker's print
    goes nowhere"""
    with socket.create_server(('127.0.0.1', 0)) as s:
        port = s.getsockname()[1]
    def closed():
        os.closerange(0, 3)
    with Live(before=closed, out=subprocess.DEVNULL, port=port, log_level='debug') as l:
        until(lambda: not gone_port(port))
        until(lambda: l.health()==200)
        for pid in (l.p.pid, *l.workers):
            assert [os.readlink(f'/proc/{pid}/fd/{i}') for i in range(3)]==['/dev/null']*3
        assert l.ok()

def gone_port(port):
    try:
        socket.create_connection(('127.0.0.1', port), 1).close()
        return False
    except OSError:
        return True

def test_http_drain_has_an_end():
    with Live(drain=.3) as l:
        with l.stream('<endless>') as r:
            lines = r.iter_lines()
            next(lines)
            l.p.terminate()
            assert data([*lines])[-1]['error']['code']=='unavailable'
        assert l.p.wait(WAIT)==0 and not any(map(alive, l.pids))

@contextlib.contextmanager
def open_streams(l, n):
    "Lines of `n` answers without an end, of each of which something was read"
    with contextlib.ExitStack() as es:
        streams = [es.enter_context(l.stream('<endless>')) for _ in range(n)]
        lines = [r.iter_lines() for r in streams]
        for answer in lines:
            next(answer)
        yield lines

@pytest.mark.parametrize('streams,says', [
    (0, 'nothing is running'),
    (1, '1 answer has up to 3600 s'),
    (2, '2 answers have up to 3600 s'),
])
def test_http_a_signal_is_heard_at_once(streams, says, tmp_path):
    """While the answers go on, whoever stopped the server reads that it was heard,
    how long it may take, and what is faster"""
    log = tmp_path/'log'
    live = dict(drain=3600., log_format='json')
    with open(log, 'w') as err, Live(err=err, **live) as l, open_streams(l, streams):
        l.p.send_signal(signal.SIGINT)
        until(lambda: 'Stopping' in log.read_text())
        records = map(json.loads, log.read_text().splitlines())
        said, = [d for d in records if 'Stopping' in d['event']]
        event = said['event']
        assert said['level']=='warning' and says in event
        assert ('A second Ctrl-C' in event)==(streams>0)
        if streams:
            assert l.p.poll() is None
            l.p.send_signal(signal.SIGINT)
        assert l.p.wait(WAIT)==0

def test_http_second_signal():
    "The drain would take an hour; a second signal ends it now"
    with Live(drain=3600.) as l:
        with l.stream('<endless>') as r:
            lines = r.iter_lines()
            next(lines)
            l.p.terminate()
            until(lambda: gone_port(l.port))
            next(lines)
            l.p.terminate()
            assert data([*lines])[-1]['error']['code']=='unavailable'
        assert l.p.wait(WAIT)==0 and not any(map(alive, l.pids))

def test_http_clients_that_leave():
    "In the middle of a stream, and of an answer in one piece"
    with Live() as l:
        def busy(): return l.metric('num_requests_running')
        with l.stream('<endless>') as r:
            next(r.iter_lines())
            until(lambda: busy()==1)
        until(lambda: busy()==0, 'the engine is rid of the stream')
        s = asked_by_hand(l.port, '<endless>')
        until(lambda: busy()==1)
        s.close()
        until(lambda: busy()==0, 'the engine is rid of the answer')
        assert l.ok()

@pytest.mark.parametrize('stream', [False,True])
def test_http_a_client_that_leaves_while_its_model_loads(stream):
    """It is noticed at once; the load goes on, and can be stopped; nobody who asks for another
    model waits"""
    slow = dict(model='slow', at_load='hang')
    with Live(slow, dict(model='fake'), first=['fake']) as l:
        s = asked_by_hand(l.port, 'hi', model='slow', stream=stream)
        until(lambda: l.statuses()['slow']=='loading')
        s.close()
        until(lambda: 'status="499"' in l.http.get('/metrics').text, 'the client is missed')
        assert l.statuses()['slow']=='loading' and l.ok(model='fake')
        assert l.http.post('/models/unload', json=dict(model='slow')).status_code==200
        until(lambda: l.statuses()['slow']=='unloaded')
        assert len(l.workers)==1

QUESTIONS = [ # Of which three have their model, and two wait for it
    dict(model='fake', text='<endless>', stream=True),
    dict(model='fake', text='<endless>', stream=False),
    dict(model='slow', text='hi', stream=True), dict(model='slow', text='hi', stream=False),
    dict(model='fake', text='<hold>', stream=True)]

@pytest.mark.parametrize('order', ['wcs','csw','swc'])
def test_http_three_ends_at_once(order):
    """The worker is killed (w), clients leave (c), and the server is told to end (s), all in one
    moment: it ends, with code 0, and nothing is left"""
    models = dict(model='fake'),dict(model='slow', at_load='hang')
    with Live(*models, first=['fake'], drain=3600.) as l, contextlib.ExitStack() as es:
        ss = [es.enter_context(asked_by_hand(l.port, **q)) for q in QUESTIONS]
        until(lambda: l.metric('num_requests_running')==3 and len(l.workers)==2)
        pids = l.workers
        def clients_leave():
            for s in ss[::2]:
                s.close()
        ends = dict(w=lambda: os.kill(pids[0], signal.SIGKILL), c=clients_leave, s=l.p.terminate)
        for end in order:
            ends[end]()
        assert l.p.wait(WAIT)==0 and not any(map(alive, pids)) and gone(l.port)

def test_http_queue_overflow():
    "Two are taken, whoever else asks is told when to come again, and those two are answered"
    with Live(dict(max_queue=2, say='abcdefghij'*20)) as l:
        with open_streams(l, 2) as held:
            for r in [l.chat('hello') for _ in range(20)]:
                assert r.status_code in (429,503)
                assert int(r.headers['retry-after'])>=1
            for lines in held:
                # a token may come with others
                assert any(re.search('"content":"[a-j]*j', next(lines)) for _ in range(100))
        until(lambda: l.chat('hello').status_code==200)

def test_http_frozen_worker():
    """A server that is so impatient may be wrong about its worker on a busy machine,
    but not for ever"""
    with Live(policy=vars(patience(stalled=.5))) as l:
        pid, = l.workers
        os.kill(pid, signal.SIGSTOP)
        until(lambda: l.health()==503)
        assert l.http.get('/health').json()['models']['fake']['state']=='stalled'
        assert l.chat('hello').status_code==503
        os.kill(pid, signal.SIGCONT)
        until(lambda: l.health()==200)
        until(lambda: l.chat('hello').status_code==200)
        assert l.workers==[pid]

def test_http_full_disk():
    "Nothing can be written to the log: serving goes on, through a fault too"
    with socket.create_server(('127.0.0.1', 0)) as s:
        port = s.getsockname()[1]
    with open('/dev/full', 'w') as full, Live(out=full, port=port, log_level='debug') as l:
        until(lambda: not gone_port(port))
        until(lambda: l.http.get('/health').status_code==200)
        assert l.ok() and l.chat('<sticky>').status_code==503
        until(lambda: l.http.get('/health').status_code==200)
        assert l.ok()
        pids = l.workers
        l.p.terminate()
        l.p.wait(WAIT)
        assert not any(map(alive, pids))

def test_http_only_that_request():
    with Live() as l:
        for text,status,code in (('<nan>',500,'corrupted_output'), ('<oom>',507,'out_of_memory')):
            r = l.chat(text)
            assert (r.status_code, r.json()['error']['code'])==(status, code)
        assert l.ok()
        until(lambda: l.metric('corrupted_requests_total')==1)

@contextlib.contextmanager
def heard_until(l, model, status):
    "A list that gets what is told at /models/sse, and at the end has a model with a status last"
    seen = []
    def listen():
        with l.client() as h, h.stream('GET', '/models/sse') as r:
            for line in r.iter_lines():
                if line.startswith('data: '):
                    seen.append(json.loads(line[6:]))
                if seen and seen[-1]['model']==model and seen[-1]['data']['status']==status:
                    return
    t = threading.Thread(target=listen)
    t.start()
    yield seen
    t.join(WAIT)
    assert not t.is_alive()

@pytest.fixture
def three():
    "A gateway with a model that is there, one that may be, and one that is too large"
    b,large = dict(model='b', say='I am b.'),dict(model='elephant', at_load='oom')
    with Live(dict(model='a'), b, large, first=['a']) as l:
        yield l

def test_http_models_by_name(three):
    "llama.cpp's shapes: list, load, unload, and what is told meanwhile"
    def post(path): return three.http.post(path, json=dict(model='b')).json()['success']
    assert three.statuses()==dict(a='loaded', b='unloaded', elephant='unloaded')
    with heard_until(three, 'b', 'unloaded') as seen:
        until(lambda: three.metric('http_requests_total')>=0)
        assert post('/models/load') is True
        until(lambda: three.statuses()['b']=='loaded')
        assert three.said('hi', model='b')=='I am b.'
        assert post('/models/unload') is True
    told = {e['data']['status'] for e in seen if e['model']=='b'}
    assert {'loading','loaded','unloaded'}<=told
    assert three.ok(model='a')
    assert three.statuses()==dict(a='loaded', b='unloaded', elephant='unloaded')

def test_http_what_cannot_be_loaded(three):
    def load(name): return three.http.post('/models/load', json=dict(model=name)).status_code
    r = three.chat('hi', model='elephant')
    assert r.status_code==507 and '12 GiB' in r.json()['error']['message']
    assert three.health()==200
    assert load('z')==404 and load('b')==200
    until(lambda: three.statuses()['b']=='loaded')
    assert load('b')==400

def gateway_that_ends(*models, **kw):
    "What a gateway says that cannot serve, and its code"
    kw = dict(models=models, policy=vars(PATIENT))|kw
    command = [*GATEWAY, json.dumps(kw)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT)

NO_ROOM = '12 GiB can be used'

def test_a_server_with_nothing_to_serve_ends():
    "The only model is refused at the start: the server says so and goes"
    r = gateway_that_ends(dict(model='fake', at_load='oom'))
    assert r.returncode==1 and NO_ROOM in r.stderr

@pytest.mark.parametrize('wrongs,no_text,says', [
    pytest.param(['oom'], False, NO_ROOM, id='one'),
    pytest.param(['oom','oom'], False, NO_ROOM, id='two'),
    pytest.param([None], True, 'There is no tokenizer', id='text side'),
])
def test_what_cannot_be_loaded_is_told_once(wrongs, no_text, says):
    """At error level, and by nobody else; a model whose process was ready,
    and whose text cannot be read, was not served either"""
    models = []
    for i,wrong in enumerate(wrongs):
        models.append(dict(model='fake', name=f'm{i}', at_load=wrong))
    r = gateway_that_ends(*models, log_format='json', no_text=no_text)
    records = [json.loads(l) for l in r.stderr.splitlines() if l.startswith('{')]
    told = [d for d in records if says in d['event']]
    assert r.returncode==1 and len(told)==len(models)
    for d in told:
        assert d['level']=='error' and d['event'].count(says)==1

def test_nothing_is_loaded_before_it_is_asked_for():
    with Live(first=[]) as l:
        assert l.workers==[] and l.health()==200
        assert l.ok() and len(l.workers)==1

def test_a_life_is_not_told_under_the_request_that_began_it():
    """The log names that request where the load begins, and nobody's when the process is ready,
    or ends and is started again"""
    seen = []
    async def main():
        bind_contextvars(request_id='req_first')
        m = model(at_load=None)
        def tell(e):
            seen.append((e['data']['status'], get_contextvars().get('request_id')))
        m.tell = tell
        m.begin()
        await m.up()
        await m.stop()
    asyncio.run(main())
    assert seen[0]==('loading','req_first')
    assert ('loaded',None) in seen and ('loaded','req_first') not in seen

def test_names_and_aliases():
    from atlas.service.gateway import modelled
    ms = Models(modelled(['a',dict(model='b', names=['bee'])], ['first'], ['*','gpt']))
    found = [ms.find(n).name for n in ('first','gpt','claude-opus','bee',None)]
    assert found==['first','first','first','bee','first']
    assert '*' not in ms.list()[0]['names']
    with pytest.raises(AtlasError):
        Models(modelled('a')).find('b')
