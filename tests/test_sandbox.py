"Work that may have to be killed: what a child may not do, and that it never outlives anybody."
import asyncio,os,random,signal,subprocess,sys,threading
from concurrent.futures import wait
from contextlib import contextmanager,nullcontext
from contextvars import copy_context
from pathlib import Path
from unittest.mock import Mock
import pytest
from atlas.text.chat import ChatTemplate
from atlas.ground.core import EngineError,QueueFullError,RequestError
from atlas.text import sandbox
from atlas.text.sandbox import NoChildError,OverrunError,SafeTemplate,Sandbox,asker
from helpers.waiting import WAIT,until

JOBS = {
    'sleep':'time:sleep', 'power':'builtins:pow', 'room':'builtins:bytearray', 'exit':'os:_exit',
    'pid':'os:getpid', 'sum':'builtins:sum', 'stop':'signal:raise_signal', 'list':'builtins:list',
    'write':'pathlib:Path', 'env':'os:listdir', 'limits':'resource:getrlimit', 'parse':'json:loads',
    'threads':'threading:active_count'}

pytestmark = pytest.mark.usefixtures('patient_sandbox')

@contextmanager
def hurry():
    "For a job that takes no processor"
    with pytest.MonkeyPatch.context() as m:
        m.setattr(sandbox, '_PATIENCE', 1)
        yield

def gone(pid):
    "Wait until a process is no more"
    def over():
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        try:
            after_name = Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1]
        except OSError:
            return True
        return after_name.split()[0]=='Z'
    return until(over, f'the end of {pid}')

@pytest.mark.parametrize('how', [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize('job', ['idle','busy'])
def test_dies_with_its_parent(how, job):
    "Also in the middle of a job that Python cannot interrupt"
    code = f'''
import sys
from atlas.text.sandbox import Sandbox
box = Sandbox({JOBS!r}, seconds=600., workers=2)
print(*{{box.submit('pid').result() for _ in range(8)}}, flush=True)
if {job!r}=='busy':
    for _ in range(2): box.submit('power', 9**99, 9**9)
print('ready', flush=True)
import time; time.sleep(600)
'''
    p = subprocess.Popen(
        [sys.executable,'-c',code], stdout=subprocess.PIPE, text=True,
        cwd=Path(__file__).parents[1])
    pids = [int(x) for x in p.stdout.readline().split()]
    assert pids
    assert p.stdout.readline()=='ready\n'
    p.send_signal(how)
    p.wait(WAIT)
    assert all(gone(pid) for pid in pids)

def test_exit_of_the_parent_is_not_held_up():
    "A program that forgets to close its sandbox ends all the same"
    code = f'''from atlas.text.sandbox import Sandbox
box = Sandbox({JOBS!r}, seconds=600.)
print(box.call("pid"))'''
    r = subprocess.run(
        [sys.executable,'-c',code], capture_output=True, text=True, timeout=WAIT,
        cwd=Path(__file__).parents[1])
    assert r.returncode==0, r.stderr
    assert gone(int(r.stdout)), r.stderr

@pytest.mark.parametrize('job,args', [
    ('sleep',[60]), ('power',[9**99,9**9]), ('exit',[0]), ('exit',[1]), ('stop',[signal.SIGKILL]),
    ('stop',[signal.SIGSEGV]), ('stop',[signal.SIGSTOP]), ('list',['x'*9000])],
    ids=['sleep','power','exit','fail','kill','fault','stop','output'])
def test_overruns(job, args):
    sleeps = args in ([60],[signal.SIGSTOP])
    with Sandbox(JOBS, seconds=.3, memory=128<<20, output=10_000, workers=1) as box:
        pid = box.call('pid')
        with hurry() if sleeps else nullcontext():
            with pytest.raises(OverrunError):
                box.call(job, *args)
        assert gone(pid)
        assert box.call('pid')!=pid
        assert box.killed==1

def test_a_job_without_room_costs_no_child():
    with Sandbox(JOBS, seconds=.3, memory=128<<20, output=10_000, workers=1) as box:
        pid = box.call('pid')
        with pytest.raises(OverrunError, match='memory'):
            box.call('room', 1<<30)
        assert box.call('pid')==pid
        assert box.killed==0

def test_a_stopped_child_is_replaced():
    with Sandbox(JOBS, seconds=.3, workers=1) as box:
        pid = box.call('pid')
        os.kill(pid, signal.SIGSTOP)
        with hurry():
            with pytest.raises(OverrunError):
                box.call('sum', [1])
        assert box.call('sum', [1,2])==3
        assert gone(pid)

def test_a_child_that_died_idle_is_nobodys_fault():
    with Sandbox(JOBS, workers=1) as box:
        pid = box.call('pid')
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
        assert box.call('sum', [1,2])==3
        assert box.call('pid')!=pid and not box.killed

@pytest.mark.parametrize('how', ['no process','no beginning'])
def test_no_room_for_a_child(how, monkeypatch):
    "The system's trouble is a 503, and over when it is over"
    with Sandbox(JOBS, workers=1) as box:
        full = OSError(24, 'Too many open files')
        with monkeypatch.context() as m:
            if how=='no beginning':
                m.setattr('atlas.text.sandbox.sys.executable', '/bin/false')
            else:
                m.setattr('atlas.text.sandbox.subprocess.Popen', Mock(side_effect=full))
            for _ in range(2):
                with pytest.raises(NoChildError) as e:
                    box.call('sum', [1])
                assert (e.value.status, e.value.code)==(503, 'queue_full')
        assert box.call('sum', [1,2])==3

def test_large_messages_both_ways():
    "More than a pipe holds, in both directions"
    with Sandbox(JOBS, seconds=10., workers=1) as box:
        big = [[i]*1000 for i in range(1000)]
        assert box.call('list', big)==big

def test_errors_come_through():
    with Sandbox(JOBS, workers=1) as box:
        with pytest.raises(EngineError, match='JSONDecodeError') as e:
            box.call('parse', '{"secret": ')
        assert 'secret' not in str(e.value)  # the text of an exception stays in the child
        with pytest.raises(KeyError):
            box.call('eval', '1')
        with pytest.raises(RequestError):
            box.call('sum', object())
        with pytest.raises(EngineError):
            box.call('write', 'x')  # a result that is no data
    with Sandbox({'nothing':'atlas.nowhere:f'}, workers=1) as box:
        with pytest.raises(EngineError):
            box.call('nothing')

def test_no_more_wait_than_may():
    with Sandbox(JOBS, seconds=5., workers=1, queue=2) as box:
        box.call('pid')
        go = threading.Event()
        box.pool.submit(go.wait)  # its only thread
        fs = [box.submit('sum', [1]) for _ in range(3)]
        with pytest.raises(QueueFullError):
            box.submit('pid')
        go.set()
        for f in fs:
            f.result(WAIT)
        until(lambda: not box.waiting)
        assert box.call('sum', [1])==1

def test_many_at_once():
    "From a loop, with two bombs among them"
    with Sandbox(JOBS, seconds=.5, workers=2) as box:
        async def run():
            good = [box.run('sum', [i,i]) for i in range(100)]
            bad = [box.run('power', 9**99, 9**9) for _ in range(2)]
            return await asyncio.gather(
                *good[:50], *bad, *good[50:], return_exceptions=True)
        got = asyncio.run(run())
    assert [g for g in got if not isinstance(g, Exception)]==[2*i for i in range(100)]
    assert sum(isinstance(g, OverrunError) for g in got)==2

def test_many_threads():
    out = []
    with Sandbox(JOBS, seconds=.5, workers=2) as box:
        def ask(i):
            out.append(box.call('sum', [i]))
        ts = [threading.Thread(target=ask, args=(i,)) for i in range(20)]
        for t in ts:
            t.start()
        for t in ts:
            t.join(WAIT)
    assert sorted(out)==list(range(20))

async def leave(box):
    "Six jobs for a child that is busy, of which four are cancelled; what became of all"
    go = threading.Event()
    box.pool.submit(go.wait)
    jobs = [asyncio.ensure_future(box.run('sum', [i])) for i in range(6)]
    await asyncio.sleep(0)
    for t in jobs[1:5]:
        t.cancel()
    await asyncio.sleep(0)
    go.set()
    return await asyncio.gather(*jobs, return_exceptions=True)

def test_a_client_that_leaves():
    "Cancelling a call takes it out of the queue, and hurts nobody"
    with Sandbox(JOBS, seconds=5., workers=1) as box:
        got = asyncio.run(leave(box))
        assert (got[0],got[5])==(0,5)
        assert all(isinstance(g, asyncio.CancelledError) for g in got[1:5])
        assert box.call('sum', [1])==1
        until(lambda: box.waiting==0)

def test_no_descriptors_are_left():
    def fds(): return len(os.listdir('/proc/self/fd'))
    with Sandbox(JOBS, seconds=.2, workers=1) as box:
        box.call('pid')
        before = fds()
        for _ in range(5):
            with pytest.raises(OverrunError):
                box.call('exit', 1)
        box.call('pid')
        assert fds()==before
    assert fds()<before

def test_templates_of_two_models():
    with Sandbox(workers=2) as box:
        a,b = (
            SafeTemplate(
                ChatTemplate(
                    w+' {{ messages[0].content }}{{ tools|length if tools }}', tool_source=t),
                box)
            for w,t in (('a',None),('b','t {{ tools|length }}')))
        say = [dict(role='user', content='x')]
        for _ in range(4):
            assert a.render(say)=='a x'
            assert b.render(say)=='b x'
            assert a.render(say, [1])=='a x1'
            assert b.render(say, [1,2])=='t 2'

# ---- Whose turn it is ----

def by(box, who, *args, **kw):
    "Submit a job for somebody"
    c = copy_context()
    c.run(asker.set, who)
    return c.run(box.submit, *args, **kw)

def test_endless_work_of_one_holds_up_nobody_else():
    """Jobs that never end, as many as may wait: whoever else asks is served, and so is another
    kind of work of whoever sent them; two who do that take no more"""
    with Sandbox(JOBS, seconds=600., workers=4, queue=60) as box:
        for _ in range(20):
            by(box, 'eve', 'power', 9**99, 9**9)
        for who in ('ann','bob','eve'):
            assert by(box, who, 'sum', [1,2]).result(WAIT)==3
        for _ in range(20):
            by(box, 'eve', 'power', 9**99, 9**9, kind='other')
        assert by(box, 'ann', 'sum', [1,2]).result(WAIT)==3
        assert box.busy['eve',]<=3

def test_who_sends_too_much_is_refused_and_nobody_else():
    with Sandbox(JOBS, seconds=600., workers=4, queue=6) as box:
        fs = [
            by(box, 'eve', 'power', 9**99, 9**9)
            for _ in range(10)]
        with pytest.raises(QueueFullError):
            by(box, 'eve', 'sum', [1,2])
        assert by(box, 'bob', 'sum', [1,2]).result(WAIT)==3
        # who leaves gives back a place
        assert fs[-1].cancel()
        assert by(box, 'eve', 'sum', [1,2]).result(WAIT)==3
    assert not box.places
    assert not box.waiting

def test_queues_take_turns():
    """One child, and much that waits for it: a job of each, in the order in which they came,
    whoever sent more"""
    done,go = [],threading.Event()
    with Sandbox(JOBS, workers=1) as box:
        box.pool.submit(go.wait)  # the only thread
        for who,n in (('a',3),('b',1),('c',2)):
            for k in range(n):
                by(box, who, 'sum', [k]).add_done_callback(
                    lambda f, who=who: done.append((who, f.result())))
        last = by(box, 'a', 'sum', [9])
        go.set()
        last.result(WAIT)
    assert done==[
        ('a',0), ('b',0), ('c',0), ('a',1),
        ('c',1), ('a',2)]

def test_threads_and_tasks_ask_for_whoever_began_them():
    with Sandbox(JOBS, seconds=600., workers=4) as box:
        async def main():
            asker.set('eve')
            for _ in range(5):
                asyncio.ensure_future(box.run('power', 9**99, 9**9))
            for _ in range(5):
                asyncio.ensure_future(asyncio.to_thread(box.submit, 'power', 9**99, 9**9))
            while sum(map(len, box.queues.values()))<8:
                await asyncio.sleep(.01)
            queues = list(box.queues)
            for t in asyncio.all_tasks()-{asyncio.current_task()}:
                t.cancel()
            return queues
        assert asyncio.run(asyncio.wait_for(main(), WAIT))==[('eve','power ')]

def some_jobs(box, seed, n=100):
    "Futures of random askers, kinds and bombs, some of them cancelled"
    r = random.Random(seed)
    out = []
    for _ in range(n):
        job = ('exit',1) if r.random()<.02 else ('sum',[1,2])
        f = by(box, r.choice('abcd'), *job, kind=r.choice('xyz'))
        out.append(f)
        if r.random()<.2:
            f.cancel()
    return out

def test_nothing_is_stranded():
    "From many threads: every future is done, every share is given back"
    fs = []
    with Sandbox(JOBS, seconds=.2, workers=4, queue=10**6) as box:
        ts = [
            threading.Thread(target=lambda i=i: fs.extend(some_jobs(box, i))) for i in range(8)]
        for t in ts:
            t.start()
        for t in ts:
            t.join()
        wait(fs, WAIT)
        assert len(fs)==800
        assert all(f.done() for f in fs)
    assert box.waiting==0
    assert not (box.queues or box.busy or box.places)
    assert {f.result() for f in fs if not f.cancelled() and not f.exception()}=={3}

def test_no_thread_for_it(monkeypatch):
    "Where no thread can be started a job is refused, and waits for nobody"
    with Sandbox(JOBS, workers=1) as box:
        with monkeypatch.context() as m:
            m.setattr(
                'threading.Thread.start',
                lambda self: (_ for _ in ()).throw(RuntimeError("can't start new thread")))
            with pytest.raises(NoChildError):
                box.submit('sum', [1])
        assert box.waiting==0
        assert not box.queues
        assert box.call('sum', [1,2])==3
