"""A thousand requests of every kind at once, from clients of every kind: polite ones, ones that
leave in the middle of a word, ones that send half a body or none.

Then everything is as it was: no stream, task, connection or descriptor is left, memory is flat,
and every request is in the metrics and in the log, once."""
import asyncio,gc,io,json,os,random,socket,sys,threading
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
import uvicorn
from prometheus_client.parser import text_string_to_metric_families as families
from atlas.text.chat import ChatTemplate
from atlas.service.process import Model
from atlas.service.models import Models
from atlas.service.http import server_config
from atlas.text.tokenizer import byte_tokenizer
from atlas.service.log import Access,configure
from atlas.service.server import create_app

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from script_config import ScriptConfig  # noqa: E402
from helpers.patience import PATIENT  # noqa: E402
from helpers.waiting import WAIT,until  # noqa: E402

FAKE = (sys.executable, Path(__file__).parent/'helpers'/'fake_worker.py')
LINES = '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: '
template = ChatTemplate(LINES)

class Sink(io.StringIO):
    "Where log lines go"
    def fileno(self):
        raise OSError

class Served:
    "A gateway with one scripted worker, in a thread of this process"
    def __init__(self):
        self.models = self.port = self.server = self.loop = None
        self.thread = threading.Thread(target=asyncio.run, args=(self.main(),), daemon=True)
        self.thread.start()

    async def main(self):
        config = ScriptConfig('fake', say='x'*400, max_queue=200)
        def text(config): return dict(tokenizer=byte_tokenizer(), template=template)
        models = Models([Model(config, policy=PATIENT, command=FAKE, text=text)])
        app = create_app(models)
        app.add_middleware(Access)
        with socket.create_server(('127.0.0.1', 0), backlog=1024) as sock:
            self.server = uvicorn.Server(server_config(app))
            self.port,self.loop = sock.getsockname()[1],asyncio.get_running_loop()
            self.models = models
            await self.server.serve(sockets=[sock])

    @property
    def begun(self):
        "Has it a model, or ended?"
        return not self.thread.is_alive() or self.models and self.models.ready_models

@contextmanager
def gateway():
    "A gateway, its models, the application's port and the log"
    lines = Sink()
    configure('json', stream=lines)
    g = Served()
    until(lambda: g.begun, 'a gateway with a model')
    assert g.thread.is_alive(), lines.getvalue()[-2000:]
    try:
        yield g.models,g.port,lines,g.loop
    finally:
        g.server.should_exit = True
        g.thread.join(WAIT)
        assert not g.thread.is_alive()

PATHS = [
    '/v1/chat/completions',
    '/v1/messages',
    '/v1/responses',
    '/nowhere',
    '/v1/audio/speech']

def body(rng, kind):
    "Path and body of a request"
    said = rng.choice(('hi','<nan>','a longer question '*20,'<oom>'))
    ask = [dict(role='user', content=said)]
    n = rng.randint(1, 60)
    return BODIES[kind](rng, ask, n)

def chat(rng, ask, n):
    return '/v1/chat/completions',dict(
        model='fake',
        messages=ask,
        max_tokens=n,
        stream=rng.random()<.6,
        n=rng.choice((1,1,3)),
        logprobs=rng.random()<.1)

def text(rng, ask, n):
    prompt = rng.choice(('hi',[1,2,3],['a','b']))
    return '/v1/completions',dict(
        prompt=prompt, max_tokens=n, stream=rng.random()<.6, stop='zz')

def messages(rng, ask, n):
    return '/v1/messages',dict(model='fake', messages=ask, max_tokens=n, stream=rng.random()<.6)

def responses(rng, ask, n):
    return '/v1/responses',dict(
        model='fake', input='hi', max_output_tokens=n, stream=rng.random()<.6)

def bad(rng, ask, n):
    "What no API takes, or none that is at this path"
    nobody = dict(model='nobody', messages=ask, max_tokens=3, input='x')
    wrong = {},dict(messages=3),nobody,dict(temperature=10**9)
    return rng.choice(PATHS),rng.choice(wrong)

def tokenize(rng, ask, n):
    return '/tokenize',dict(prompt='hello')

BODIES = dict(
    chat=chat,
    text=text,
    messages=messages,
    responses=responses,
    bad=bad,
    tokenize=tokenize)

KINDS = ('chat','chat','chat','text','messages','responses','bad','tokenize')

def head_of(path, i, size):
    "The first lines of request `i`, whose body has `size` bytes"
    lines = [
        f'POST {path} HTTP/1.1',
        'Host: localhost',
        'Content-Type: application/json',
        f'X-Request-Id: req-{i}',
        f'Content-Length: {size}',
        'Connection: close']
    return '\r\n'.join((*lines, '', '')).encode()

async def client(port, i, rng, left):
    "One request, and where it is left; the status, or None"
    path,b = body(rng, rng.choice(KINDS))
    raw = json.dumps(b).encode()
    leave = rng.choice((None,None,'mid','body','sent'))
    r,w = await asyncio.open_connection('127.0.0.1', port)
    try:
        w.write(head_of(path, i, len(raw)))
        w.write(raw[:len(raw)//2] if leave=='body' else raw)
        await w.drain()
        got = None
        if leave not in ('body','sent'):
            got = await answer(r, rng, leave)
        if got is None:
            left[leave] += 1
            return None
        assert got.startswith(b'HTTP/1.1 '), got[:200]
        return int(got[9:12])
    finally:
        if leave and rng.random()<.5:
            w.get_extra_info('socket').setsockopt(
                socket.SOL_SOCKET, socket.SO_LINGER, b'\1\0\0\0\0\0\0\0')  # a reset
        w.close()

async def answer(r, rng, leave):
    "All of it; None where the client leaves in its middle"
    got = b''
    def more(): return r.read(rng.choice((1<<16,300)))
    while chunk := await asyncio.wait_for(more(), WAIT):
        got += chunk
        if leave=='mid' and len(got)>rng.randint(1, 3000):
            return None
    return got

async def crowd(port, n, seed, at_once=64):
    "`n` requests, so many at a time"
    statuses,left = Counter(),Counter()
    gate = asyncio.Semaphore(at_once)
    async def one(i):
        async with gate:
            rng = random.Random(f'{seed} {i}')
            statuses[await client(port, f'{seed}-{i}', rng, left)] += 1
    await asyncio.gather(*(one(i) for i in range(n)))
    return statuses,left

def rss():
    return int(Path('/proc/self/statm').read_text().split()[1])*os.sysconf('SC_PAGE_SIZE')
def fds(): return len(os.listdir('/proc/self/fd'))

def numbers(port):
    "The metrics"
    with socket.create_connection(('127.0.0.1', port)) as s:
        s.sendall(b'GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n')
        raw = b''
        while c := s.recv(1<<16):
            raw += c
    return {(m.name,*sorted(m.labels.items())):m.value
        for f in families(raw.partition(b'\r\n\r\n')[2].decode())
        for m in f.samples}

def total(ms, name):
    return sum(v for k,v in ms.items() if k[0]==name)

def settled(models, loop):
    "Wait until nobody is being served; how many tasks the loop has then"
    runner = models.ready_models[0].runner
    def idle(): return not runner._streams and len(asyncio.all_tasks(loop))<=12
    until(idle, 'an end of all streams and tasks')
    return len(asyncio.all_tasks(loop))

COUNTED = [
    'atlas:requests_submitted_total',
    'atlas:request_success_total',
    'atlas:aborted_requests_total']

def check_statuses(statuses, left):
    "What polite clients saw, and that others left in every way"
    assert statuses[200]>100 and statuses[400]>10
    assert statuses[404]>0 and statuses[501]>0
    assert statuses[None]==sum(left.values())>200
    assert all(left[k] for k in ('mid','body','sent'))
    assert not set(statuses)-{200,400,404,500,501,503,507,None}, statuses

def check_log(lines, since, heard):
    "Of a thousand requests at least those that were `heard` are in the log, each once"
    def ids():
        rows = map(json.loads, lines.getvalue().splitlines()[since:])
        names = [r.get('request_id', '') for r in rows]
        return Counter(n for n in names if n.startswith('req-1-'))
    until(lambda: sum(ids().values())>=heard, again=.05)
    assert max(ids().values())==1 and heard<=len(ids())<=1000

def counted(port):
    "Requests that came, that were answered and that were given up, once none is running"
    # the worker's numbers are of a moment ago
    until(lambda: not total(numbers(port), 'atlas:num_requests_running'), again=.05)
    ms = numbers(port)
    return [total(ms, k) for k in COUNTED]

def test_a_thousand_mixed_requests():
    with gateway() as (models,port,lines,loop):
        asyncio.run(crowd(port, 300, 0))
        settled(models, loop)  # what is made once is made
        gc.collect()
        before,files,tasks = rss(),fds(),settled(models, loop)
        was = counted(port)
        log = len(lines.getvalue().splitlines())
        statuses,left = asyncio.run(crowd(port, 1000, 1))
        assert settled(models, loop)<=tasks+2
        asked,done,aborted = (a-b for a,b in zip(counted(port), was))
        gc.collect()
        check_statuses(statuses, left)
        # nothing is left
        runner = models.ready_models[0].runner
        assert not runner._streams
        assert fds()<=files+2 and rss()<before+(48<<20)
        # every request is accounted for, once
        assert asked==done>500 and aborted>0
        assert models.all[0].restarts==0 and models.healthy
        check_log(lines, log, heard=1000-left['body']-left['sent'])

def test_what_an_unloaded_model_leaves():
    "Its guides are freed, with all that a library in another language holds for them"
    import weakref
    from atlas.text.guide import Guides
    g = Guides(byte_tokenizer(), 256, [0])
    g.check(dict(kind='regex', pattern='a+'))
    left = weakref.ref(g)
    del g
    gc.collect()
    assert left() is None
