"""What hangs, or does not end, is alone: no thread, lock or place that others need is lost to it,
and a server ends"""
import asyncio,json,os,re,signal,ssl,subprocess,sys,threading
from pathlib import Path
from types import SimpleNamespace
import httpx,pytest,uvicorn
from atlas.service.gateway import Gateway
from atlas.service.process import Model
from atlas.service.models import Models
from atlas.service.remote import WorkerProcess
from atlas.service.upstream import Upstream,UpstreamError
from atlas.service.watch import Damper,Watcher,ask as look_at
import atlas.service.proxy # noqa: F401 (which watches the lists of other servers)
from helpers.waiting import WAIT,happens
from test_fleet import following,reloaded
from test_processes import HELLO,ask,model,ok,patience,running,running_test
from test_processes import tok

# -- computations --------------------------------------------------------------------------------

@running_test
async def test_answers_go_on_beside_computations():
    "Two clients compute one after the other, so that there is always one that waits"
    async with running(model()) as ms:
        r,made = (await ms.get()).runner,[]
        async def computes():
            for _ in range(100):
                made.append(await r.call('nap', seconds=.01))
        tasks = [asyncio.create_task(computes()) for _ in range(2)]
        await happens(lambda: len(made)>4)
        assert (await ask(ms))[0]==HELLO and len(made)<200
        await asyncio.gather(*tasks)

@running_test
async def test_nobody_waits_for_a_computation_that_was_given_up():
    async with running(model()) as ms:
        r = (await ms.get()).runner
        calls = [asyncio.create_task(r.call('nap', seconds=.2)) for _ in range(20)]
        await happens(lambda: len(r._calls)==20)
        for c in calls:
            c.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert not r._calls and await r.call('double', x=2)==4
        assert len(await r.call('naps'))<20 # but for those under way before

# -- models that come and go ---------------------------------------------------------------------

@running_test
async def test_who_asks_a_model_that_is_awake_waits_for_no_other():
    a,b = model('a'),model('b', at_load='hang')
    async with running(a, b, first=['a']) as ms:
        await ms.get('a')
        await ms.sleep('a')
        asked = [asyncio.create_task(ok(ms, 'a')) for _ in range(2)]
        while not a.gate.locked():
            await asyncio.sleep(0)
        b.begin() # is next at the gate, and stays there
        assert await asyncio.wait_for(asyncio.gather(*asked), WAIT)==[True]*2
        assert not a.turning.locked() and b.state=='loading'

@running_test
async def test_a_cache_is_written_down_at_the_end(tmp_path):
    "Also when its model was just leaving for another, and the decision to do so is over"
    path = tmp_path/'closed'
    a,b = model('a', closes=str(path), kv_spill_keep=True, kv_spill_dir=tmp_path),model('b')
    a.need = b.need = 100
    async with running(a, b, first=['a'], budget=150) as ms:
        assert await ok(ms, 'a')
        ms.residency.send('a')
        await happens(lambda: a.state in ('unloading','unloaded'))
    assert path.exists() and a.code==0

@running_test
async def test_a_text_side_that_could_not_be_read_is_read_again():
    reads = []
    def text(config):
        reads.append(config.model)
        if len(reads)==1:
            raise OSError(24, 'Too many open files')
        return dict(tokenizer=tok)
    m = model()
    m.text = text
    m._loop = asyncio.get_running_loop()
    m._read_text()
    with pytest.raises(OSError):
        await m.side
    async with running(m) as ms:
        assert await ok(ms) and len(reads)==2

@running_test
async def test_a_process_that_cannot_be_killed_is_left_behind(monkeypatch, caplog):
    "As where one of its threads is within a driver that hangs"
    there = []
    class Undead(WorkerProcess):
        def kill(self):
            there.append(self)
        def _watch(self):
            pass # nobody reaps it
    def start(name): return Undead([*map(str, model().command)], name)
    m = model(policy=patience(grace=.1))
    monkeypatch.setattr(Models, '_longest', lambda self: 1.)
    monkeypatch.setattr(Model, '_start', lambda self: start(self.name))
    ms = Models([m])
    await ms.start()
    await ms.get()
    pid = m.child.pid
    try:
        os.kill(pid, signal.SIGSTOP)
        await asyncio.wait_for(ms.close(), WAIT)
        assert there and f'The process of {m.name} could not be ended' in caplog.text
    finally:
        os.kill(pid, signal.SIGKILL)
        m.child.process.wait()
        m.task.cancel()

# -- a server's end ------------------------------------------------------------------------------

HANGS = '''
import json,sys,time
from atlas.card import sensors
from atlas.service import ollama
def hangs(*a, **kw): time.sleep(10**6)
sensors.Machine.__call__ = ollama.pull = hangs
import fake_gateway
fake_gateway.main(**json.loads(sys.argv[1]))
'''

@pytest.mark.parametrize('what', ['driver','pull'])
def test_a_server_ends_whatever_hangs(what):
    helpers = Path(__file__).parent/'helpers'
    said = json.dumps(dict(models=[dict(model='fake')], drain=1.))
    command = [sys.executable, '-c', HANGS, said]
    env = os.environ|dict(PYTHONPATH=f'{helpers}:{os.environ.get("PYTHONPATH", "")}')
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env=env) as p:
        try:
            told = next(line for line in p.stdout if 'is ready' in line)
            url = 'http://127.0.0.1:'+re.search(r'127\.0\.0\.1:(\d+)', told)[1]
            with httpx.Client(base_url=url, timeout=WAIT, trust_env=False) as c:
                if what=='driver':
                    assert c.get('/metrics').status_code==200
                else:
                    with c.stream('POST', '/api/pull', json=dict(model='org/name')) as r:
                        assert 'pulling' in next(r.iter_lines())
            p.terminate()
            p.stdout.read()
            assert p.wait(WAIT)==0
        finally:
            p.kill()

@running_test
async def test_a_second_signal_counts_until_the_end():
    "Also when the server has stopped listening, and only waits for its processes"
    said = []
    class Ends:
        reload = None
        def abort(self, peace=True):
            said.append(peace)
        async def close(self):
            for _ in range(2):
                g.handle_exit(signal.SIGINT, None)
            await asyncio.sleep(0)
    g = Gateway(uvicorn.Config(None), Ends())
    async def nothing():
        pass
    g.servers,g.lifespan = [],SimpleNamespace(shutdown=nothing)
    await g.shutdown()
    assert said==[True,False]
    g.handle_exit(signal.SIGINT, None) # is no error when all is over

@running_test
async def test_names_are_looked_up_beside_the_loop(tmp_path, monkeypatch):
    "A file is read again while a server of names does not answer"
    threads = []
    def points_at(self, host, port):
        threads.append(threading.current_thread())
        return False
    text = 'models: {one: {model: tiny}}'
    async with following(tmp_path/'atlas.yaml', text) as (file,ms):
        ms.address = '127.0.0.1',8888
        monkeypatch.setattr(Upstream, 'points_at', points_at)
        await reloaded(file, text+'\nupstreams: {far: {url: "http://far.local:8888/v1"}}')
    assert threads and threading.main_thread() not in threads

# -- those who watch -----------------------------------------------------------------------------

ILL = type('Ill', (), dict(health=lambda self: dict(models=dict(m=dict(state='failed')))))

@running_test
async def test_an_endpoint_that_never_ends_its_answer(monkeypatch):
    "Others are told of all the same; one that sends events is well, as it answers"
    async def drips(reader, writer):
        head = await reader.readuntil(b'\r\n\r\n')
        kind = b'text/event-stream' if b'/events' in head else b'text/plain'
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-type: '+kind+b'\r\n\r\n')
        try:
            while True:
                writer.write(b': still here\n\n')
                await writer.drain()
                await asyncio.sleep(.02)
        except OSError:
            pass
    server = await asyncio.start_server(drips, '127.0.0.1', 0)
    at = f'http://127.0.0.1:{server.sockets[0].getsockname()[1]}'
    told = []
    def tell(title, body):
        told.append(body)
        return True
    w = Watcher(dict(page=at), tell, models=ILL(), damper=Damper(confirm=1),
        client=httpx.AsyncClient(trust_env=False))
    async with w.client:
        assert [s.well for s in await look_at(w.client, 'events', f'{at}/events')]==[True]
        monkeypatch.setattr('atlas.service.watch._LONGEST', .2)
        seen,_ = await w.round()
    server.close()
    assert {s.name: s.well for s in seen}==dict(page=False, m=False)
    assert 'page does not answer in time' in told[0]

@running_test
async def test_a_message_that_never_arrives():
    "No look waits for it for long, and no other is begun"
    gone,asked = threading.Event(),[]
    def tell(title, body):
        asked.append(body)
        gone.wait(WAIT)
        return True
    w = Watcher({}, tell, models=ILL(), damper=Damper(confirm=1))
    assert not await w._told('a', 'b', patience=.01)
    assert not await w._told('a', 'c', patience=.01)
    await happens(lambda: asked)
    gone.set()
    await happens(lambda: w.telling.done())
    assert await w._told('a', 'd') and asked==['b','d']
    await w.client.aclose()

def test_what_tls_says_is_a_fault_of_the_server():
    u = Upstream('far', 'https://far.example/v1')
    with pytest.raises(UpstreamError, match='SSLError'), u.faults():
        raise ssl.SSLError(1, 'TLSV13_ALERT_CERTIFICATE_REQUIRED')

@running_test
async def test_a_list_is_looked_at_again_whatever_went_wrong(monkeypatch):
    looks = []
    async def renew(self, models):
        looks.append(1)
        raise ValueError('nobody thought of this')
    monkeypatch.setattr(Upstream, 'renew', renew)
    monkeypatch.setattr('atlas.service.proxy._SOON', 0.)
    u = Upstream('far', 'https://far.example/v1', models=['*'])
    u.refresh = 0.
    task = asyncio.create_task(u._watch(None))
    await happens(lambda: len(looks)>2)
    task.cancel()
