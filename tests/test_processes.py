"""Gateway and worker, in real processes, and what goes wrong with them: killed, frozen, full, poisoned, talking nonsense.
Waits are for conditions, with a limit that only a failure reaches; whatever was started is gone when a test ends."""
import asyncio,json,os,random,signal,subprocess,sys,time
import numpy as np,pytest
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from atlas.service.turn import UnavailableError
from atlas.ground.core import AtlasError,OutOfMemoryError,QueueFullError,RequestError
from atlas.service.process import Model
from atlas.service.models import Models
from atlas.use.llm import LLM
from atlas.text.tokenizer import byte_tokenizer
from atlas.ground.options import EngineConfig
from atlas.service.remote import WorkerProcess
from atlas.ground.requests import Request,SamplingParams
from atlas.service.worker import FATAL,REFUSED

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from script_config import ScriptConfig  # noqa: E402
from helpers.patience import PATIENT,impatient  # noqa: E402
from helpers.waiting import WAIT,happens,until  # noqa: E402

here = Path(__file__).parent
FAKE,FAULTY = (sys.executable, here/'helpers'/'fake_worker.py'),(
    sys.executable, here/'helpers'/'faulty_worker.py')
tok = byte_tokenizer()

def patience(**limits):
    "`PATIENT`, but for these limits"
    return replace(PATIENT, **limits)

def model(name='fake', policy=PATIENT, command=FAKE, **options):
    "A model whose process is a scripted worker"
    def text(o): return dict(tokenizer=tok)
    return Model(ScriptConfig(name, **options), policy=policy, command=command, text=text)

def req(rid, text, **kw):
    return Request(
        rid,
        tuple(tok.encode(text) if isinstance(text, str) else text),
        SamplingParams(**dict(temperature=0, max_tokens=2000)|kw))

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
    for m in ms.all:
        m.tell = lambda e, m=m: (
            pids.append(m.child.pid) if m.child else None,
            tell(e))
    await ms.start()
    try:
        yield ms
    finally:
        await asyncio.wait_for(ms.close(), WAIT)
        assert not any(map(alive, pids)) and all(
            m.child is None and not m.runner._streams for m in ms.all)

async def collect(s):
    "The text of an answer, and how it ended"
    ids,last = [],None
    async for e in s:
        ids += [e.token] if e.token is not None and e.finish!='stop' else []
        last = e
    return ''.join(tok.token(i) for i in ids).replace('Ġ', ' '),last
async def ask(ms, text='hello', name=None, rid=None, **kw):
    return await collect(
        (await ms.get(name)).runner.submit(
            req(rid or os.urandom(4).hex(), text, **kw)))
async def ok(ms, name=None):
    return (await ask(ms, 'hello', name))[0]=='Hello there, reader.'
async def begun(ms, text, name=None, n=1):
    "Streams that have said something"
    ss = [
        (await ms.get(name)).runner.submit(
            req(os.urandom(4).hex(), text, max_tokens=10**6))
        for _ in range(n)]
    for s in ss:
        await asyncio.wait_for(anext(s), WAIT)
    return ss
def running_test(f):
    "A coroutine as a test, with a limit that only a hang reaches"
    import functools
    @functools.wraps(f)
    def test(*a, **kw):
        asyncio.run(asyncio.wait_for(f(*a, **kw), 3*WAIT))
    return test

# -- the worker's process ------------------------------------------------------------------------------------------------

@running_test
async def test_it_serves():
    async with running(model()) as ms:
        said = await asyncio.gather(*(ask(ms, f'{i}') for i in range(64)))
        assert all(t=='Hello there, reader.' and e.finish=='stop' for t,e in said)
        u = await ms.get()
        assert await u.runner.call(
            'double', x=21)==42 and u.runner.healthy and ms.health()['status']=='ok'
        def idle(): return u.runner.stats().get('num_requests_running')==0
        await happens(idle, 'an idle engine is reported')
        assert ms.stats()[0]['load_seconds'].keys()=={'open','weights','warm'}

@running_test
async def test_killed_worker():
    "In-flight: an error. Health: 503 until another is there. The next question: served. No orphan"
    async with running(model()) as ms:
        ss,m = await begun(ms, '<endless>', n=3),ms.all[0]
        pid,seen = m.child.pid,[]
        m.tell = lambda e: seen.append((ms.health()['status'], m.condition))
        os.kill(pid, signal.SIGKILL)
        for s in ss:
            e = (await asyncio.wait_for(collect(s), WAIT))[1]
            assert (e.finish, e.code)==('error', 'unavailable')
        await happens(lambda: ms.healthy, 'another process')
        assert ('unhealthy','restarting') in seen and not any(
            h=='ok' and c!='loaded' for h,c in seen)
        assert m.child.pid!=pid and not alive(pid) and m.restarts==1 and await ok(ms)

@running_test
async def test_refused_while_it_is_gone():
    "A question in between gets 503 and when to come again"
    async with running(
        model(policy=patience(pause=10**6, longest=10**6))
    ) as ms:
        assert await ok(ms)
        m = ms.all[0]
        os.kill(m.child.pid, signal.SIGKILL)
        await happens(lambda: m.child is None and m.reason=='was ended by SIGKILL')
        with pytest.raises(AtlasError) as e:
            await ms.get()
        assert (
            e.value.status, e.value.code, e.value.retry_after>=1,
            ms.healthy, ms.all[0].reason)==(503, 'unavailable', True, False, 'was ended by SIGKILL')

@pytest.mark.parametrize('mark,reason', [('<sticky>', 'CUDA error 700'), ('<bug>', 'KeyError')])
@running_test
async def test_fault_of_the_engine(mark, reason):
    """Everybody's answer ends with an error; the process says why and is replaced; it answers
    nobody in between"""
    async with running(model()) as ms:
        m,others = ms.all[0],await begun(ms, '<endless>', n=2)
        codes,pid,reasons = [],m.child.pid,[]
        m.tell = lambda e: reasons.append(m.reason or '')
        end = m.runner.end
        m.runner.end = lambda *a: (codes.append(m.code), end(*a))
        text,last = await asyncio.wait_for(ask(ms, mark), WAIT)
        assert last.finish=='error' and len(text)<=3 and 'secret' not in last.error
        for s in others:
            assert (await asyncio.wait_for(collect(s), WAIT))[1].finish=='error'
        await happens(lambda: ms.healthy)
        assert m.code==FATAL and any(
            reason in r for r in reasons) and m.child.pid!=pid and await ok(ms)

@running_test
async def test_nothing_after_a_fault():
    "From the fault to the new process not one token arrives"
    async with running(model()) as ms:
        assert await ok(ms)
        m,tokens = ms.all[0],[]
        events = m.runner._events
        m.runner._events = lambda es, stats: (
            tokens.append((m.child.pid, m.runner._ready)),
            events(es, stats))
        pid = m.child.pid
        ends = await asyncio.gather(
            *(ask(ms, t) for t in ('<sticky>',*['<endless>']*8)))
        assert all(e.finish=='error' for _,e in ends)
        await happens(lambda: ms.healthy)
        assert await ok(ms) and all(ready for _,ready in tokens)
        # the first may have died in its first step
        assert m.child.pid in {p for p,_ in tokens} <= {pid, m.child.pid}

@pytest.mark.parametrize('wrong,says', [('oom', '12 GiB can be used'), ('host oom', '70. GiB')])
@running_test
async def test_no_memory_to_load(wrong, says):
    "507 with the numbers, once and not again; other models are unharmed"
    async with running(
        model('small'), model('large', at_load=wrong), first=['small']
    ) as ms:
        assert await ok(ms, 'small')
        stream, = await begun(ms, '<endless>', 'small')
        with pytest.raises(OutOfMemoryError, match=says) as e:
            await ms.get('large')
        assert (
            e.value.status, ms.find('large').state,
            ms.find('large').code,
            ms.find('large').restarts)==(507, 'failed', REFUSED, 0)
        assert ms.healthy and await ok(ms, 'small') and ms.find('large').status|dict(args=0)==dict(
            value='unloaded', failed=True, exit_code=REFUSED, args=0,
            reason=ms.find('large').reason)
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
        assert [
            (await o)[0] for o in others
        ]==['Hello there, reader.']*8 and ms.all[0].restarts==0 and ms.healthy
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
        assert [(await collect(s))[0] for s in taken]==['Hello there, reader.']*2 and await ok(ms)

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
        assert not ms.healthy and 'no sign of life' in m.reason and ms.health()['models']['fake']['state']=='stalled'
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
        pid,reasons = m.child.pid,[]
        m.tell = lambda e: reasons.append(m.reason or '')
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
        assert (
            e.value.status, m.state, m.restarts, ms.healthy,
            ms.health()['status']
        )==(503, 'failed', 1, False, 'unhealthy') and 'not ready' in m.reason

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
async def test_second_try():
    "One that ends twice and then loads is there, and whoever waited is served"
    with __import__('tempfile').TemporaryDirectory() as d:
        async with running(model(at_load='die twice', lives=d+'/lives')) as ms:
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
        pid,reasons = m.child.pid,[]
        m.tell = lambda e: reasons.append(m.reason or '')
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
    monkeypatch.setattr(
        time, 'time',
        lambda: true()+random.choice((-1,1))*86400*400)
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
    async def broken(self, sock): raise RuntimeError('a mistake')
    monkeypatch.setattr('atlas.service.remote.RemoteRunner.attach', broken)
    async with running(model()) as ms:
        with pytest.raises(AtlasError, match='RuntimeError'):
            await ms.get()
        assert ms.all[0].state=='failed'

@running_test
async def test_text_side_that_fails():
    """A model without a tokenizer, or with a mistake of our own there: it says so, and its
    process goes"""
    def missing(o): raise RequestError('There is no tokenizer')
    for text,says in ((missing, 'no tokenizer'), (lambda o: 1/0, 'ZeroDivisionError'), (lambda o: dict(nonsense=1), 'TypeError')):
        m = model()
        m.text = text
        async with running(m) as ms:
            with pytest.raises(AtlasError, match=says):
                await ms.get()
            assert m.state=='failed' and m.child is None

@running_test
async def test_images_are_sent_once():
    "The answers to one prompt share their images; whoever comes next has their own"
    from atlas.service.link import Frames
    from atlas.service.remote import RemoteRunner
    from types import SimpleNamespace as NS
    sent,r = [],RemoteRunner('r')
    r._wire,r._ready,r.info = NS(write=sent.append),True,dict(max_seq_len=100)
    pics,more = (
        (np.ones((4,8), 'f4'), (1,2,2)),),(
        (np.zeros((4,8), 'f4'), (1,2,2)),)
    for i,p in enumerate((pics, pics, more, (), (), pics)):
        r.submit(
            req(f'{i}', [1,2], temperature=0)) if not p else r.submit(
            Request(f'{i}', (1,2), SamplingParams(), images=p))
    got = [m[3] for b in sent for m in Frames().feed(b)]
    assert [
        None if g is None else len(g) for g in got
    ]==[1, None, 1, 0, 0,
    1] and (got[0][0][0]==1).all() and (got[2][0][0]==0).all()

# -- loading, unloading, many models -------------------------------------------------------------------------------------

@running_test
async def test_load_and_unload():
    async with running(model('a'), model('b', say='I am b.'), first=[]) as ms:
        assert ms.healthy and [d['status']['value'] for d in ms.list()]==['unloaded']*2
        with pytest.raises(RequestError, match='not loaded'):
            await ms.unload('a')
        assert (
            await ask(ms, name='b')
        )[0]=='I am b.' and [m.state for m in ms.all]==['unloaded','loaded']
        with pytest.raises(RequestError, match='loaded already'):
            await ms.load('b')
        await ms.load('a')
        with pytest.raises(RequestError):
            await ms.load('a')
        s, = await begun(ms, 'hello', 'b')
        pid = ms.find('b').child.pid
        await ms.unload('b')
        assert (await collect(s))[1].finish=='stop'  # it may finish
        await happens(lambda: ms.find('b').state=='unloaded')
        assert not alive(pid) and await ok(ms, 'a') and (await ask(ms, name='b'))[0]=='I am b.'
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
        assert all(
            await asyncio.gather(*(ok(ms) for _ in range(50)))) and ms.all[0].restarts==0

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
        async with running(
            model(policy=patience(pause=.2, ends=99), at_load=wrong)
        ) as ms:
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
        assert [(await asyncio.wait_for(w, WAIT))[0] for w in waits[1:]]==['Hello there, reader.']*2
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

@running_test
async def test_events_as_llama_cpp_has_them():
    async with running(model(), first=[]) as ms:
        seen = []
        async def listen():
            async for e in ms.events():
                seen.append(e)
        ear = asyncio.create_task(listen())
        await asyncio.sleep(0)
        assert await ok(ms)
        await ms.unload('fake')
        def told(): return seen[-1]['data']['status']
        await happens(lambda: ms.all[0].state==told()=='unloaded')
        assert all(e['event']=='model_status' and e['model']=='fake' for e in seen)
        words = [k for k,g in __import__('itertools').groupby(e['data']['status'] for e in seen)]
        assert words==['loading','loaded','unloading','unloaded']
        steps = [e['data']['progress'] for e in seen if 'progress' in e['data']]
        assert all(s['stages']==['open','weights','warm'] and 0<=s['value']<=1 for s in steps)
        order = [(s['stages'].index(s['current']), s['value']) for s in steps]
        assert order==sorted(order) and (1, 1.) in order and len({v for i,v in order if i==1})>50
        json.dumps(seen)
    await asyncio.wait_for(ear, WAIT)

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
        begun,begin = [],m.begin
        m.begin = lambda: (begun.append(1), begin())
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
    async with running(model(policy=patience(ends=2))) as ms:
        assert await ok(ms)
        made = []
        def none(self): made.append(self); raise RuntimeError("can't start new thread")
        with monkeypatch.context() as mp:
            import subprocess,threading
            pids,popen = [],subprocess.Popen
            class Seen(popen):
                def __init__(self, *a, **kw):
                    super().__init__(*a, **kw); pids.append(self.pid)
            mp.setattr('atlas.service.remote.threading.Thread.start', none)
            mp.setattr('atlas.service.remote.subprocess.Popen', Seen)
            with pytest.raises(OSError, match='thread'):
                WorkerProcess(FAKE)
            assert len(pids)==1 and not alive(pids[0])

# -- a thousand of everything --------------------------------------------------------------------------------------------

@running_test
async def test_many_requests_and_random_ends():
    """1,000 requests, of which many leave early, while the process is killed now and then: every
    one ends exactly once, nothing is left"""
    rng = random.Random(5)
    async with running(model(max_queue=1000, policy=patience(ends=10**6))) as ms:
        m,ends = ms.all[0],[]
        async def client(i):
            while True:
                try:
                    s = (await ms.get()).runner.submit(
                        req(
                            f'r{i}', rng.choice(['hello','<endless>','<nan>','<oom>']),
                            max_tokens=rng.randint(1, 60)))
                except AtlasError as e:
                    assert e.status==503
                    await asyncio.sleep(.02)
                    continue
                if rng.random()<.4:
                    async for e in s:
                        if e.finish or rng.random()<.3:
                            break
                    s.abort()
                    if e.finish is None:
                        e = (await collect(s))[1]
                else:
                    _,e = await collect(s)
                ends.append(e.finish)
                return
        async def killer():
            for _ in range(6):
                await happens(lambda: ms.healthy)
                await asyncio.sleep(.15)
                if m.child:
                    os.kill(m.child.pid, signal.SIGKILL)
        k,work = asyncio.create_task(killer()),[]
        for i in range(1000):
            work.append(asyncio.create_task(client(i)))
            if i%50==0:
                await asyncio.sleep(.05)
        await asyncio.gather(*work)
        await k
        assert len(ends)==1000 and None not in ends and {
            'stop', 'abort', 'error', 'length'}>=set(ends)
        await happens(lambda: ms.healthy)
        assert await ok(ms) and not m.runner._streams and not m.runner._numbers and not m.runner._calls
        await happens(lambda: m.runner.stats()['num_requests_running']==0)

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

# -- a real model --------------------------------------------------------------------------------------------------------

TOY = here/'data'/'qwen35-dense'
def toy(**options):
    "A model with a real engine"
    return Model(EngineConfig(TOY, 'cpu', max_num_seqs=4, **options), **OF_TOY)
def faulty():
    "The same in a worker that fails when it is told to"
    return Model(EngineConfig(TOY, 'cpu', max_num_seqs=4), command=FAULTY, **OF_TOY)
def no_text(config): return dict(tokenizer=None)
OF_TOY = dict(names=['toy'], policy=PATIENT, text=no_text)
async def ids_of(s): return [e.token async for e in s if e.token is not None]
PROMPTS = [
    [3,1,4,1,5,9,2,6],
    [2,7,1,8,2,8],
    [1,6,1,8,0,3,3,9,8,8,7,4]]

@running_test
async def test_a_real_model_says_the_same():
    "Through a process, killed once in between, the answers are those of the model in this process"
    llm = LLM(str(TOY), 'cpu', max_num_seqs=4)
    want = [
        o.token_ids for o in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12))]
    async with running(toy()) as ms:
        for again in range(2):
            r = (await ms.get('toy')).runner
            assert list(
                await asyncio.gather(
                    *(
                        ids_of(r.submit(req(f't{i}', p, max_tokens=12)))
                        for i,p in enumerate(PROMPTS))))==want
            assert (
                r.info['max_seq_len'], r.info['vocab_size']
            )==(llm.max_seq_len, llm.config.vocab_size)
            if again:
                break
            pid = ms.all[0].child.pid
            s = r.submit(req('long', PROMPTS[0], max_tokens=200))
            await anext(s)
            os.kill(pid, signal.SIGKILL)
            assert (await collect_raw(s)).code=='unavailable'
            await happens(lambda: ms.healthy)
            assert ms.all[0].child.pid!=pid

async def collect_raw(s):
    async for e in s:
        pass
    return e

@running_test
async def test_a_real_model_with_faults():
    """NaN logits end that request and are counted; no memory for a prompt ends that request; the
    others are right"""
    llm = LLM(str(TOY), 'cpu', max_num_seqs=4)
    want = [
        o.token_ids for o in llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=12))]
    async with running(faulty()) as ms:
        r = (await ms.get('toy')).runner
        for bad,code in ((7, 'corrupted_output'), (8, 'out_of_memory')):
            e = await collect_raw(
                r.submit(req(f'bad{bad}', [bad,1,2], max_tokens=12)))
            assert (e.finish, e.code)==('error', code) and ms.healthy
            assert list(
                await asyncio.gather(
                    *(
                        ids_of(r.submit(req(f'{bad}{i}', p, max_tokens=12)))
                        for i,p in enumerate(PROMPTS))))==want
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

# -- over HTTP, from outside ---------------------------------------------------------------------------------------------

import contextlib,re,socket,threading
import httpx

GATEWAY = (sys.executable, here/'helpers'/'fake_gateway.py')

class Live:
    "A gateway in a process, and its workers"
    def __init__(self, *models, out=None, err=None, before=None, **kw):
        models = [dict(model='fake')|m for m in models or ({},)]
        kw = dict(models=models, policy=vars(PATIENT), drain=WAIT)|kw
        self.p = subprocess.Popen([*GATEWAY, json.dumps(kw)],
            stdout=out or subprocess.PIPE,
            stderr=err or out or subprocess.DEVNULL,
            text=True,
            start_new_session=True,
            preexec_fn=before)
        if out is None:
            line = self.p.stdout.readline()
            assert 'is ready' in line, line
            self.port = int(re.search(r'http://127.0.0.1:(\d+)', line)[1])
        else:
            self.port = kw['port']
        self.http = self.client()
    def client(self): return httpx.Client(base_url=f'http://127.0.0.1:{self.port}', timeout=WAIT)
    def chat(self, text, http=None, **kw):
        return (http or self.http).post(
            '/v1/chat/completions',
            json=dict(
                messages=[dict(role='user', content=text)],
                max_tokens=kw.pop('max_tokens', 5000))|kw)
    def stream(self, text, http=None, **kw):
        return (http or self.http).stream(
            'POST', '/v1/chat/completions',
            json=dict(
                messages=[dict(role='user', content=text)], stream=True,
                max_tokens=10**5)|kw)
    def ok(self, **kw):
        return self.chat(
            'hello', **kw).json()['choices'][0]['message']['content']=='Hello there, reader.'
    def health(self): return self.http.get('/health').status_code
    def metric(self, name):
        return sum(
            float(m[1])
            for m in re.finditer(rf'^atlas:{name}(?:{{[^}}]*}})? (\S+)$', self.http.get('/metrics').text, re.M)
        )
    @property
    def workers(self):
        return [
            int(p)
            for p in subprocess.run(['pgrep', '-P', str(self.p.pid), '-f', 'fake_worker'], capture_output=True, text=True).stdout.split()
        ]
    def __enter__(self): self.pids = self.workers; return self
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
            seen = [next(lines) for _ in range(8)]
            os.kill(pid, signal.SIGKILL)
            assert l.http.get('/health', headers={'connection':'close'}).status_code in (200,503)
            rest = [*lines]
        last = data(rest)[-1]
        assert last['error']['code']=='unavailable' and 'data: [DONE]' in rest
        until(lambda: l.health()==200)
        assert l.ok() and not alive(pid) and len(l.workers)==1 and l.metric(
            'model_restarts_total')==1

def test_http_refused_while_down():
    with Live(policy=vars(patience(pause=10**6, longest=10**6))) as l:
        os.kill(l.workers[0], signal.SIGKILL)
        until(lambda: l.health()==503)
        r = l.chat('hello')
        assert r.status_code==503 and int(
            r.headers['retry-after'])>=1 and r.json()['error']['code']=='unavailable'
        def reaped():
            "The link is lost before the process is reaped, which the reason tells"
            body = l.http.get('/health').json()
            return 'SIGKILL' in body['models']['fake']['reason'] and body['status']=='unhealthy'
        until(reaped)

def test_http_sticky_fault():
    "After the fault no answer with text, until a new process is there"
    with Live() as l:
        pid, = l.workers
        stop,got = threading.Event(),[]
        def asking():
            with httpx.Client(base_url=l.http.base_url, timeout=WAIT) as h:
                while not stop.is_set():
                    r = l.chat('hello', h)
                    got.append((r.status_code, r.json()))
        t = threading.Thread(target=asking)
        t.start()
        r = l.chat('<sticky>')
        assert r.status_code==503 and 'CUDA error 700' in r.json()['error']['message']
        until(lambda: l.health()==200 and l.workers and l.workers[0]!=pid)
        stop.set()
        t.join()
        assert l.ok() and {c for c,_ in got}<={200,503,500} and all(
            b['choices'][0]['message']['content']=='Hello there, reader.' for c,b in got if c==200)

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
            assert (
                h.status_code, h.json()['status'], a.status_code
            )==(503, 'draining', 503) and int(a.headers['retry-after'])>=1
            text = ''.join(
                c['choices'][0]['delta'].get('content') or '' for c in data(lines) if c['choices'])
        assert text=='abcdefghij'*40 and l.p.wait(WAIT)==0 and not any(
            map(alive, l.pids)) and gone(l.port)

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
    with Live(
        before=lambda: os.closerange(0, 3), out=subprocess.DEVNULL,
        port=port, log_level='debug'
    ) as l:
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
        s = socket.create_connection(('127.0.0.1', l.port))
        body = json.dumps(
            dict(
                messages=[dict(role='user', content='<endless>')], max_tokens=10**5)).encode()
        s.sendall(
            b'POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n'%len(body)+body
        )
        until(lambda: busy()==1)
        s.close()
        until(lambda: busy()==0, 'the engine is rid of the answer')
        assert l.ok()

@pytest.mark.parametrize('stream', [False,True])
def test_http_a_client_that_leaves_while_its_model_loads(stream):
    """It is noticed at once; the load goes on, and can be stopped; nobody who asks for another
    model waits"""
    with Live(
        dict(model='slow', at_load='hang'), dict(model='fake'),
        first=['fake']
    ) as l:
        s = socket.create_connection(('127.0.0.1', l.port))
        body = json.dumps(
            dict(
                model='slow', messages=[dict(role='user', content='hi')],
                stream=stream)).encode()
        s.sendall(
            b'POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n'%len(body)+body
        )
        def state():
            return next(
                m['status']['value'] for m in l.http.get('/models').json()['data']
                if m['id']=='slow')
        until(lambda: state()=='loading')
        s.close()
        until(lambda: 'status="499"' in l.http.get('/metrics').text, 'the client is missed')
        assert state()=='loading' and l.ok(model='fake')
        assert l.http.post('/models/unload', json=dict(model='slow')).status_code==200
        until(lambda: state()=='unloaded')
        assert len(l.workers)==1

def test_http_three_ends_at_once():
    """The worker is killed, clients leave, and the server is told to end, all in one moment: it
    ends, with code 0, and nothing is left"""
    for order in ('wcs','csw','swc'):
        with Live(
            dict(model='fake'), dict(model='slow', at_load='hang'),
            first=['fake'], drain=3600.
        ) as l:
            def open_(model, text, stream):
                s,body = socket.create_connection(('127.0.0.1', l.port)),json.dumps(
                    dict(
                        model=model, messages=[dict(role='user', content=text)],
                        max_tokens=10**5, stream=stream)).encode()
                s.sendall(
                    b'POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n'%len(body)+body
                )
                return s
            ss = [
                open_(*a)
                for a in (('fake','<endless>',True), ('fake','<endless>',False), ('slow','hi',True), ('slow','hi',False), ('fake','<hold>',True))
            ]
            def busy(): return l.metric('num_requests_running')
            until(lambda: busy()==3 and len(l.workers)==2)
            pids = l.workers
            for end in order:
                if end=='w':
                    os.kill(pids[0], signal.SIGKILL)
                if end=='s':
                    l.p.terminate()
                if end=='c':
                    for s in ss[::2]:
                        s.close()
            assert l.p.wait(WAIT)==0 and not any(map(alive, pids)) and gone(l.port)
            for s in ss:
                s.close()

def test_http_queue_overflow():
    "Two are taken, whoever else asks is told when to come again, and those two are answered"
    with Live(dict(max_queue=2, say='abcdefghij'*20)) as l:
        with open_streams(l, 2) as held:
            for r in [l.chat('hello') for _ in range(20)]:
                assert r.status_code in (429,503)
                assert int(r.headers['retry-after'])>=1
            for lines in held:
                assert any('"content":"j"' in next(lines) for _ in range(100))
        until(lambda: l.chat('hello').status_code==200)

def test_http_frozen_worker():
    """A server that is so impatient may be wrong about its worker on a busy machine,
    but not for ever"""
    with Live(policy=vars(patience(stalled=.5))) as l:
        pid, = l.workers
        os.kill(pid, signal.SIGSTOP)
        until(lambda: l.health()==503)
        assert l.http.get('/health').json()['models']['fake']['state']=='stalled' and l.chat('hello').status_code==503
        os.kill(pid, signal.SIGCONT)
        until(lambda: l.health()==200)
        until(lambda: l.chat('hello').status_code==200)
        assert l.workers==[pid]

def test_http_full_disk():
    "Nothing can be written to the log: serving goes on, through a fault too"
    with socket.create_server(('127.0.0.1', 0)) as s:
        port = s.getsockname()[1]
    with open('/dev/full', 'w') as full, Live(
        out=full, port=port, log_level='debug'
    ) as l:
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
        n,o = l.chat('<nan>'),l.chat('<oom>')
        assert (
            n.status_code, n.json()['error']['code']
        )==(500, 'corrupted_output') and (o.status_code,
        o.json()['error']['code'])==(507,
        'out_of_memory') and l.ok()
        until(lambda: l.metric('corrupted_requests_total')==1)

def test_http_models_by_name():
    "llama.cpp's shapes: list, load, unload, and what is told meanwhile"
    with Live(
        dict(model='a'), dict(model='b', say='I am b.'),
        dict(model='elephant', at_load='oom'), first=['a']
    ) as l:
        def status():
            return {m['id']:m['status']['value'] for m in l.http.get('/models').json()['data']}
        assert status()==dict(a='loaded', b='unloaded', elephant='unloaded')
        seen = []
        def listen():
            with httpx.Client(
                base_url=l.http.base_url, timeout=WAIT
            ) as h, h.stream('GET', '/models/sse') as r:
                for line in r.iter_lines():
                    if line.startswith('data: '):
                        seen.append(json.loads(line[6:]))
                    if seen and seen[-1]['model']=='b' and seen[-1]['data']['status']=='unloaded':
                        return
        t = threading.Thread(target=listen)
        t.start()
        until(lambda: l.metric('http_requests_total')>=0)
        assert l.http.post(
            '/models/load', json=dict(model='b')).json()['success'] is True
        until(lambda: status()['b']=='loaded')
        assert l.chat('hi', model='b').json()['choices'][0]['message']['content']=='I am b.'
        e = l.chat('hi', model='elephant')
        assert e.status_code==507 and '12 GiB' in e.json()['error']['message'] and l.http.get('/health').status_code==200
        assert l.http.post(
            '/models/load', json=dict(model='b')
        ).status_code==400 and l.http.post('/models/load',
        json=dict(model='z')).status_code==404
        assert l.http.post(
            '/models/unload', json=dict(model='b')).json()['success'] is True
        t.join(WAIT)
        assert not t.is_alive()
        assert {'loading','loaded','unloaded'}<={
            e['data']['status'] for e in seen if e['model']=='b'}
        assert l.ok(model='a') and status()==dict(
            a='loaded', b='unloaded', elephant='unloaded')

def gateway_that_ends(*models, **kw):
    "What a gateway says that cannot serve, and its code"
    kw = dict(models=models, policy=vars(PATIENT))|kw
    return subprocess.run(
        [*GATEWAY, json.dumps(kw)], capture_output=True, text=True,
        timeout=WAIT)

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
        assert l.workers==[] and l.http.get('/health').status_code==200 and l.ok() and len(l.workers)==1

def test_a_life_is_not_told_under_the_request_that_began_it():
    """The log names that request where the load begins, and nobody's when the process is ready,
    or ends and is started again"""
    import structlog
    seen = []
    async def main():
        structlog.contextvars.bind_contextvars(request_id='req_first')
        m = model(at_load=None)
        m.tell = lambda e: seen.append(
            (e['data']['status'], structlog.contextvars.get_contextvars().get('request_id')))
        m.begin()
        await m.up()
        await m.stop()
    asyncio.run(main())
    assert seen[0]==(
        'loading', 'req_first') and ('loaded',None) in seen and ('loaded','req_first') not in seen

def test_names_and_aliases():
    from atlas.service.gateway import modelled
    ms = Models(
        modelled(
            ['a',dict(model='b', names=['bee'])],
            ['first'], ['*','gpt']))
    assert [
        ms.find(n).name for n in ('first','gpt','claude-opus','bee',None)
    ]==['first', 'first', 'first', 'bee',
    'first'] and '*' not in ms.list()[0]['names']
    with pytest.raises(AtlasError):
        Models(modelled('a')).find('b')
