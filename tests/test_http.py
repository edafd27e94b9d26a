"""What a stranger may do to the service with a socket: every wait, size and number has an end.

Bounds are shrunk, and time stands still until a test lets it pass."""
import asyncio,json,logging,os,re,socket,subprocess,threading,time
from contextlib import closing,contextmanager
from dataclasses import replace
from types import SimpleNamespace
import pytest,uvicorn
from hypothesis import HealthCheck,given,settings,strategies as st
from atlas.service import http
from atlas.service.http import Bounds,Guard,ApiKeys,Rate,Rules,server_config
from helpers.waiting import WAIT,until

QUICK = Bounds(
    head=.2, chunk=.2, write=.4, idle=1., linger=.3, tick=.02,
    line=2000, header_bytes=8000, headers=40, connections=50, pipeline=4)
kinds = pytest.mark.parametrize('kind', ['httptools','h11'])

class Clock:
    """The time that servers read here. It stands still: a client is late when a test says so,
    and not when the machine is busy"""
    def __init__(self):
        self.now,self.looks = 1000.,0
        self.began = None  # on the machine's own clock, while time passes

    def __call__(self):
        passed = time.monotonic()-self.began if self.began else 0
        return self.now+passed

    def run(self):
        self.began = time.monotonic()
    def stop(self):
        self.now,self.began = self(),None
    def step(self, seconds):
        "So many seconds later, and every connection has been looked at"
        self.now += seconds
        seen = self.looks
        until(lambda: self.looks>seen+1, again=.002)
    @contextmanager
    def passes(self):
        self.run()
        try:
            yield
        finally:
            self.stop()

@pytest.fixture(scope='module', autouse=True)
def clock():
    c,sweep = Clock(),http.Careful.sweep
    def looked(self):
        sweep(self)
        c.looks += 1
    with pytest.MonkeyPatch.context() as m:
        m.setattr(http, 'monotonic', c)
        m.setattr(http.Careful, 'sweep', looked)
        yield c

class App:
    """Says hello, drips, or floods; keeps count of what it saw and of whether it was told that
    the client is gone"""
    def __init__(self):
        self.seen,self.gone,self.bodies = [],threading.Semaphore(0),[]
    async def __call__(self, scope, receive, send):
        self.seen.append(scope['path'])
        body,m = b'',dict(more_body=True)
        while m.get('more_body'):
            m = await receive()
            if m['type']=='http.disconnect':
                self.gone.release()
                return
            body += m.get('body', b'')
        self.bodies.append(len(body))
        await send(
            dict(
                type='http.response.start', status=200,
                headers=[] if scope['path']=='/flood' else [(b'content-length',b'5')]))
        if scope['path']=='/flood':
            await self.flood(receive, send)
        else:
            await send(dict(type='http.response.body', body=b'hello'))
    async def flood(self, receive, send):
        async def pour():
            while True:
                await send(dict(type='http.response.body', body=b'x'*65536, more_body=True))
                await asyncio.sleep(0)
        t = asyncio.ensure_future(pour())
        while (await receive())['type']!='http.disconnect':
            pass
        t.cancel()
        self.gone.release()

@contextmanager
def live(app, bounds=QUICK, kind='httptools', small=False, servers=None, **kw):
    """A real server on a free port, maybe with small buffers, which is also put into `servers`;
    afterwards no connection may be left"""
    sock = socket.create_server(('127.0.0.1',0))
    if small:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    server = uvicorn.Server(server_config(app, bounds, kind, drain=1, lifespan='off', **kw))
    t = threading.Thread(
        target=server.run,
        kwargs=dict(sockets=[sock]), daemon=True)
    t.start()
    if servers is not None:
        servers.append(server)
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        t.join(WAIT)
        assert not t.is_alive() and not server.server_state.connections

def connect(port): return closing(socket.create_connection(('127.0.0.1',port), WAIT))

def read(s):
    "All until the server ends the connection"
    got = b''
    try:
        while part := s.recv(1<<16):
            got += part
    except ConnectionError:
        pass
    return got

def talk(port, *parts):
    with connect(port) as s:
        try:
            for p in parts:
                s.sendall(p)
        except ConnectionError:
            pass
        return read(s)

def arrived(servers):
    "Wait until the only connection of a server has brought something; gives the server's end of it"
    c, = until(lambda: list(servers[0].server_state.connections))
    until(lambda: c.heard)
    return c

def statuses(raw): return [int(x) for x in re.findall(rb'HTTP/1\.1 (\d+)', raw)]
HEAD = b'GET / HTTP/1.1\r\nHost: localhost\r\n'
POST = b'POST / HTTP/1.1\r\nHost: localhost\r\n'
LAST = HEAD+b'Connection: close\r\n\r\n'

# ---- Waits ----

@kinds
@pytest.mark.parametrize(
    'raw,want',
    [(b'', []), (b'G', [408]),
     (b'GET /', [408]), (HEAD, [408]),
     (HEAD+b'X: a', [408]),
     (POST+b'Content-Length: 9\r\n\r\n', [408]),
     (POST+b'Content-Length: 9\r\n\r\nabc', [408]),
     (POST+b'Transfer-Encoding: chunked\r\n\r\n5\r\nabc', [408])],
    ids=[
        'nothing','a letter','a line','no end','a header','no body','half a body','half a chunk'])
def test_what_never_comes(kind, raw, want, clock):
    app,servers = App(),[]
    with live(app, kind=kind, servers=servers) as port:
        with connect(port) as s:
            s.sendall(raw)
            if raw:
                arrived(servers)
            with clock.passes():
                got = read(s)
        assert statuses(got)==want
        if want:
            assert json.loads(got.split(b'\r\n\r\n', 1)[1])['error']['code']=='bad_http'
            assert b'connection: close' in got.lower()
        assert statuses(talk(port, LAST))==[200]
    if raw.startswith(b'POST'):
        assert app.gone.acquire(timeout=WAIT)  # the application was told

@kinds
def test_one_header_at_a_time(kind, clock):
    """Each byte comes soon after the one before, and the head never ends: the time is for the
    whole of it"""
    servers,n = [],0
    serving = live(App(), kind=kind, servers=servers)
    with serving as port, connect(port) as s:
        s.sendall(HEAD)
        c = arrived(servers)
        while c.phase=='head' and n<50:
            s.sendall(b'X: y\r\n' if n<3 else b'y' if n>3 else b'Z: ')
            n += 1
            until(lambda: c.heard==clock())
            clock.step(.04)
        assert statuses(read(s))==[408] and 5<=n<=7

def test_a_body_that_drips(clock):
    "A byte now and then is no silence, but it is too slow"
    app,servers,n = App(),[],0
    bounds = Bounds(head=.2, chunk=.3, rate=10_000, tick=.02, linger=.2)
    with live(app, bounds, servers=servers) as port, connect(port) as s:
        s.sendall(POST+b'Content-Length: 100000\r\n\r\n')
        c = arrived(servers)
        while c.phase!='linger' and n<50:
            s.sendall(b'x')
            n += 1
            until(lambda: c.heard==clock())
            clock.step(.05)
        assert statuses(read(s))==[408] and 6<=n<=8
        assert app.gone.acquire(timeout=WAIT)

def test_a_steady_body_is_let_through(clock):
    "A large body takes longer than `chunk` in all, and that is fine as long as it comes"
    app,servers = App(),[]
    bounds = Bounds(chunk=.1, rate=1000, tick=.02)
    with live(app, bounds, servers=servers) as port, connect(port) as s:
        s.sendall(POST+b'Connection: close\r\nContent-Length: 400000\r\n\r\n')
        c = arrived(servers)
        for k in range(20):
            s.sendall(b'x'*20000)
            if k==19:
                break
            until(lambda: c.size==20000*(k+1))
            clock.step(.08)
        assert statuses(read(s))==[200] and app.bodies==[400000]

@kinds
def test_idle_between_requests(kind):
    with live(App(), kind=kind) as port, connect(port) as s:
        s.sendall(HEAD+b'\r\n')
        assert statuses(read(s))==[200]

def test_stray_bytes_do_not_keep_a_connection(clock):
    "A line end after a request stops uvicorn's own clock; ours goes on"
    bounds = Bounds(head=.2, idle=WAIT, tick=.05)
    with live(App(), bounds) as port, connect(port) as s:
        s.sendall(HEAD+b'\r\n')
        assert s.recv(1<<16)
        s.sendall(b'\r\n')
        with clock.passes():
            read(s)

@kinds
@pytest.mark.parametrize('path', ['/flood'])
def test_frozen_reader(kind, path, clock):
    "Somebody asks for a stream and never reads"
    app,servers = App(),[]
    with live(app, kind=kind, servers=servers) as port:
        s = socket.socket()
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        with closing(s):
            s.connect(('127.0.0.1',port))
            s.sendall(b'GET '+path.encode()+b' HTTP/1.1\r\nHost: localhost\r\n\r\n')
            arrived(servers)
            with clock.passes():
                assert app.gone.acquire(timeout=WAIT)
            forgotten(s)

def forgotten(s):
    """Is the connection reset, with what the system still had for its reader? An end of it would
    come after that"""
    s.settimeout(WAIT)
    with pytest.raises(ConnectionResetError):
        while s.recv(1<<16):
            pass

def answer(n, part=50_000):
    "An application that answers with so many bytes, in parts"
    class Big(App):
        async def __call__(self, scope, receive, send):
            length = (b'content-length', str(n).encode())
            await send(dict(type='http.response.start', status=200, headers=[length]))
            for at in range(part, n+1, part):
                body = dict(type='http.response.body', body=b'x'*part, more_body=at<n)
                await send(body)
    return Big()

@contextmanager
def small_reader(port):
    "A connection whose system takes little for who does not read"
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    with closing(s):
        s.settimeout(WAIT)
        s.connect(('127.0.0.1',port))
        yield s

def test_frozen_reader_of_a_finished_answer(clock):
    """The answer is complete, and smaller than what a buffer may hold: only the connection still
    waits for its reader"""
    gone,paused,servers = threading.Event(),threading.Event(),[]
    class Seen(http.HttpTools):
        bounds = Bounds(write=.3, idle=WAIT, tick=.05)
        def pause_writing(self):
            paused.set()
            super().pause_writing()
        def connection_lost(self, exc):
            super().connection_lost(exc)
            gone.set()
    with live(answer(50_000), http=Seen, small=True, servers=servers) as port:
        with small_reader(port) as s:
            s.sendall(HEAD+b'\r\n')
            arrived(servers)
            with clock.passes():
                assert gone.wait(WAIT)
            assert not paused.is_set()
            forgotten(s)

class Late(App):
    "Reads nothing until it is `ready`"
    def __init__(self):
        super().__init__()
        self.ready = threading.Event()
    async def __call__(self, scope, receive, send):
        while not self.ready.is_set():
            await asyncio.sleep(.01)
        await super().__call__(scope, receive, send)

def test_a_body_that_we_do_not_read(clock):
    "That it stays away is our doing, as long as we are busy"
    app,servers,got = Late(),[],[]
    raw = POST+b'Connection: close\r\nContent-Length: 3000000\r\n\r\n'+b'x'*3_000_000
    bounds = Bounds(chunk=.1, rate=1<<40, tick=.02)
    with live(app, bounds, servers=servers) as port:
        t = threading.Thread(target=lambda: got.append(talk(port, raw)))
        t.start()
        c = arrived(servers)
        until(lambda: c.flow.read_paused)
        for _ in range(6):
            clock.step(.1)
        app.ready.set()
        t.join(WAIT)
        assert statuses(got[0])==[200] and app.bodies==[3_000_000]

def test_a_slow_reader_is_served(clock):
    "It takes its time, but it takes"
    n = 1_500_000
    bounds = Bounds(write=.5, tick=.01)
    with live(answer(n), bounds, small=True) as port, small_reader(port) as s:
        s.sendall(LAST)
        got = looks = 0
        while part := s.recv(30_000):
            got += len(part)
            if looks<20 and got>40_000*looks:
                looks += 1
                clock.step(.1)
        assert got>n and looks==20

@kinds
@pytest.mark.parametrize(
    'raw,want',
    [(HEAD+b'X: '+b'a'*(16<<20)+b'\r\n\r\n', {431}),
     (HEAD+b'X: y\r\n'*100_000+b'\r\n', {431}),
     (HEAD+b'a'*(16<<20), {431}),
     (b'G'*(1<<20), {400,431}),
     (b'GET /'+b'a'*(1<<20)+b' HTTP/1.1\r\nHost: a\r\n\r\n', {414,431}),
     (HEAD+b'X: '+b'a'*7000+b'\r\n\r\n', {200})],
    ids=['one large','many','half a name','a method','an address','what fits'])
def test_large_heads(kind, raw, want):
    "16 MB of headers are refused with a reason that arrives, and hardly any of them are kept"
    app = App()
    with live(app, kind=kind) as port:
        got = statuses(talk(port, raw[:-2]+b'Connection: close\r\n\r\n' if want=={200} else raw))
        assert len(got)==1
        assert got[0] in want or (kind=='h11' and got[0]==400 and 200 not in want)
        assert app.seen==(['/'] if want=={200} else [])
        assert statuses(talk(port, LAST))==[200]

@pytest.mark.parametrize('extra', [0,1])
def test_header_bound_is_exact(extra):
    "The same bytes, and one more, however they are cut"
    line = 8000-len(b'Host'+b'localhost')-4-len('X')-4+extra
    raw = HEAD+b'Connection: close\r\n'
    line -= len(b'Connection'+b'close')+4
    raw += b'X: '+b'a'*line+b'\r\n\r\n'
    with live(App()) as port:
        for cut in (1, 500, len(raw)-1):
            assert statuses(talk(port, raw[:cut], raw[cut:]))==(
                [200] if not extra else [431])

def test_a_gigabyte_is_refused_unread():
    app = App()
    with live(Guard(app, Rules(body=1000))) as port:
        for size in (b'1073741824', b'1001', b'99999999999999999'):
            got = talk(port, POST+b'Connection: close\r\nContent-Length: '+size+b'\r\n\r\n')
            assert statuses(got)==[413]
            assert json.loads(got.split(b'\r\n\r\n', 1)[1])['error']['code']=='body_too_large'
        assert not app.seen
        assert statuses(
            talk(port, POST+b'Connection: close\r\nContent-Length: 1000\r\n\r\n'+b'x'*1000))==[200]
        chunked = b'Connection: close\r\nTransfer-Encoding: chunked\r\n\r\n'
        assert statuses(talk(port, POST+chunked+b'3e9\r\n'+b'x'*1001+b'\r\n0\r\n\r\n'))==[413]
        assert statuses(talk(port, POST+chunked+b'3e8\r\n'+b'x'*1000+b'\r\n0\r\n\r\n'))==[200]

# ---- Numbers ----

@kinds
def test_too_many_connections(kind):
    bounds = Bounds(connections=3, head=60, tick=.05, linger=.2)
    with live(App(), bounds, kind) as port:
        held = [socket.create_connection(('127.0.0.1',port), WAIT) for _ in range(3)]
        for s in held:
            s.sendall(b'GET / ')
        def told():
            "The answer to one more, when the three have been accepted"
            got = talk(port, LAST)
            return statuses(got)==[503] and got
        assert b'retry-after: 1' in until(told).lower()
        for s in held:
            s.close()
        until(lambda: statuses(talk(port, LAST))==[200], 'that places are given back')

def test_so_many_connections_that_nobody_is_told():
    "A few are told why, the others are cut: descriptors are for those inside"
    most = []
    class Seen(http.HttpTools):
        bounds = Bounds(connections=3, refused=2, head=60, linger=60, tick=.05)
        def connection_made(self, t):
            super().connection_made(t)
            most.append(sum(not c.transport.is_closing() for c in self.connections))
    with live(App(), http=Seen) as port:
        held = [socket.create_connection(('127.0.0.1',port), WAIT) for _ in range(20)]
        for s in held:
            s.settimeout(WAIT)
        told = [read(s) for s in held[5:]]
        assert not any(told)
        assert max(most)==5
        assert statuses(
            held[3].recv(1<<16)
        )==statuses(held[4].recv(1<<16))==[503]
        for s in held:
            s.close()

@kinds
def test_pipelining(kind):
    "Answers come in order; a queue without end is refused"
    with live(App(), Bounds(pipeline=4)) as port:
        assert statuses(talk(port, (HEAD+b'\r\n')*3+LAST))==[200]*4
    if kind=='httptools':
        with live(App(), Bounds(pipeline=4)) as port:
            assert 200 not in statuses(
                talk(port, (b'GET /flood HTTP/1.1\r\nHost: a\r\n\r\n')*2+(HEAD+b'\r\n')*50))[1:]

def test_who_pipelines_and_leaves():
    """Each request of the connection hears it: the one that is answered, too, which is not the
    one that was read last"""
    class Waits(App):
        async def __call__(self, scope, receive, send):
            self.seen.append(scope['path'])
            started.release()
            while (await receive())['type']!='http.disconnect':
                pass
            self.gone.release()
    app,started = Waits(),threading.Semaphore(0)
    with live(app) as port:
        for rest in (
            b'', HEAD+b'\r\n', (HEAD+b'\r\n')*3, b'GET / HT',
            POST+b'Content-Length: 9\r\n\r\nabc'
        ):
            for now,later in ((rest, b''), (b'', rest)):
                with connect(port) as s:
                    s.sendall(b'GET /long HTTP/1.1\r\nHost: a\r\n\r\n'+now)
                    assert started.acquire(timeout=WAIT)
                    s.sendall(later)  # which is read before the end, or with it
                assert app.gone.acquire(timeout=WAIT), (now, later)
        assert app.seen==['/long']*10  # nobody begins what came after

def test_writing_to_who_is_gone():
    "A transport that is closing raises with uvloop, and takes nothing with asyncio"
    out,t = (
        [],
        SimpleNamespace(
            is_closing=lambda: shut,
            write=lambda d: out.append(d),
            get_write_buffer_size=lambda: 0))
    c,shut = http.Counted(t),False
    c.write(b'ab')
    shut = True
    c.write(b'cd')
    assert (out, c.written, c.taken)==([b'ab'], 2, 2)

@kinds
def test_a_refused_body_that_comes_all_the_same(kind):
    "It is thrown away so that the client may read why, but not without end"
    with live(
        Guard(App(), Rules(body=1000)),
        Bounds(body=1000, tick=.02), kind
    ) as port, connect(port) as s:
        s.sendall(POST+b'Content-Length: 1000000000000\r\n\r\n')
        assert statuses(s.recv(1<<16))==[413]
        with pytest.raises(ConnectionError):
            for _ in range(2000):
                s.sendall(b'x'*(1<<20))

def test_lingering_begins_with_the_refusal(clock):
    "And not when the client was last heard, which may be longer ago than anybody lingers"
    kept = []
    class Seen(http.HttpTools):
        bounds = Bounds(chunk=.2, tick=.02)
        def refuse(self, *a, **kw):
            super().refuse(*a, **kw)
            kept.append(self.since-self.heard)
    servers = []
    serving = live(App(), http=Seen, servers=servers)
    with serving as port, connect(port) as s:
        s.sendall(POST+b'Content-Length: 9\r\n\r\nabc')
        arrived(servers)
        with clock.passes():
            assert statuses(read(s))==[408]
    assert kept[0]>.2

# ---- What is no HTTP ----

@kinds
@pytest.mark.parametrize(
    'raw',
    [b'\x16\x03\x01\x02\x00\x01', b'hello\r\n\r\n', b'GET / HTTP/9.9\r\n\r\n',
     b'GET / HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n',
     b'GET / HTTP/1.1\r\nHost: a\r\nContent-Length: 1e3\r\n\r\n',
     POST+b'Content-Length: 3\r\nContent-Length: 4\r\n\r\nabcd',
     POST+b'Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n',
     POST+b'Transfer-Encoding: chunked\r\n\r\nzz\r\n',
     POST+b'Transfer-Encoding: chunked\r\n\r\n'+b'f'*40+b'\r\n',
     b'GET / HTTP/1.1\r\n Host: a\r\n\r\n', b'GET / HTTP/1.1\r\nHo st: a\r\n\r\n',
     b'GET / HTTP/1.1\r\nHost: a\x00b\r\n\r\n', b'PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n'])
def test_no_http(kind, raw, clock):
    """One answer (h11 reads the preface of HTTP/2 as two requests), and it is not 200 or 5xx;
    the next client is served"""
    with live(Guard(App()), kind=kind) as port:
        # h11 takes some of these for a beginning
        with clock.passes():
            got = statuses(talk(port, raw))
        assert len(got)<=(2 if raw.startswith(b'PRI') else 1) and all(
            400<=s<500 for s in got), got
        assert statuses(talk(port, LAST))==[200]

@given(
    st.lists(
        st.binary(max_size=60)
        |st.sampled_from([
            HEAD, POST, LAST, b'\r\n', b'Content-Length: 4\r\n\r\nabcd',
            b'Transfer-Encoding: chunked\r\n\r\n', b'GET http://a:99999999/ HTTP/1.1\r\n',
            b'GET * HTTP/1.1\r\n', b'\xff: \xff\r\n']),
        max_size=6))
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
def test_noise(fuzzed, clock, parts):
    with clock.passes():
        raw = talk(fuzzed, b''.join(parts))
    got = statuses(raw)
    assert all(s in (200,400,403,408,414,431) for s in got), got

@pytest.fixture(scope='module')
def fuzzed():
    bounds = Bounds(head=.05, chunk=.05, tick=.02, idle=.05, linger=WAIT)
    with live(Guard(App()), bounds) as port:
        yield port
        assert statuses(talk(port, LAST))==[200]

# ---- The guard, over the wire ----

def ask(port, method='GET', path='/v1/models', **headers):
    "Status, headers and body of an answer"
    named = dict(Host='localhost', Connection='close')|headers
    lines = ''.join(f'{k.replace("_", "-")}: {v}\r\n' for k,v in named.items())
    raw = talk(port, f'{method} {path} HTTP/1.1\r\n{lines}\r\n'.encode())
    head,_,body = raw.partition(b'\r\n\r\n')
    told = head.decode().lower().split('\r\n')[1:]
    return statuses(raw)[0],dict(l.split(': ', 1) for l in told),body

@pytest.fixture(scope='module')
def guarded():
    rules = Rules(keys=ApiKeys({'sesame':'user', 'onion':'admin'}), rate=Rate(1000))
    with live(Guard(App(), rules)) as port:
        yield port

@pytest.mark.parametrize('path,status', [
    ('/',401), ('/v1/models',401), ('/metrics',401), ('/openapi.json',401), ('/docs',401),
    ('//health',401), ('/health',200), ('/health?x=1',200), ('/Health',401), ('/health/',401),
    ('/%68ealth',200)])
def test_guarded_paths(guarded, path, status):
    assert ask(guarded, path=path)[0]==status

def test_keys_over_the_wire(guarded):
    assert ask(guarded, Authorization='Bearer sesame')[0]==200
    assert ask(guarded, X_Api_Key='sesame')[0]==200
    for bad in 'sesam','sesamee','SESAME','','é','a'*5000:
        assert ask(guarded, Authorization=f'Bearer {bad}')[0]==401
    assert ask(guarded, 'POST', '/models/load', X_Api_Key='sesame')[0]==403
    assert ask(guarded, 'POST', '/models/load', X_Api_Key='onion')[0]==200

def test_a_refusal_over_the_wire(guarded):
    "In the words of the API that was asked"
    status,head,body = ask(guarded, 'POST', '/v1/messages', Authorization='Bearer nobody')
    assert status==401
    assert json.loads(body)['type']=='error'
    assert head['www-authenticate']=='bearer'

def test_names_over_the_wire(guarded):
    assert ask(guarded, Authorization='Bearer sesame', Host='rebound.example')[0]==403
    # no key, but still a name
    assert ask(guarded, path='/health', Host='rebound.example')[0]==403

def test_an_address_with_a_name_in_it():
    "The name in the request's first line counts, and `Host` does not (RFC 9112, 3.2.2)"
    with live(Guard(App())) as port:
        for path,host,want in (
            ('http://localhost/x','localhost',200), ('http://evil.example/x','localhost',403),
            ('http://localhost/x','evil.example',200),
            ('http://localhost@evil.example/x','localhost',403),
            ('HTTP://LOCALHOST:80/?x','evil.example',200), ('//evil.example/x','localhost',200)
        ):
                assert ask(port, path=path, Host=host)[0]==want, path

def test_two_headers_of_a_kind_are_one_too_many():
    with live(
        Guard(App(), Rules(keys=ApiKeys({'sesame':'user'})))
    ) as port:
        for twice in (
            b'Host: localhost\r\nHost: evil.example\r\n',
            b'Host: localhost\r\nAuthorization: Bearer a\r\nAuthorization: Bearer sesame\r\n',
            b'Host: localhost\r\nX-Api-Key: a\r\nx-api-key: sesame\r\n'
        ):
            assert statuses(
                talk(port, b'GET / HTTP/1.1\r\nConnection: close\r\n'+twice+b'\r\n'))==[400]
        assert statuses(talk(port, b'GET /health HTTP/1.1\r\nConnection: close\r\n\r\n'))==[400]
        assert statuses(talk(port, b'GET /health HTTP/1.0\r\n\r\n'))==[200]

def test_every_key_is_compared(monkeypatch):
    "A guess takes the same steps whether it is right, nearly right or wrong"
    seen = []
    real = http.hmac.compare_digest
    monkeypatch.setattr(
        http.hmac, 'compare_digest',
        lambda a,b: seen.append((
            len(a),len(b)
        )) or real(a, b))
    keys = ApiKeys({f'key-{i}':'user' for i in range(5)})
    for guess in (b'key-0', b'key-4', b'key-', b'', b'x'*10_000):
        seen.clear()
        keys.find(guess)
        assert seen==[(32,32)]*5

def test_keys_are_not_kept():
    keys = ApiKeys({'sesame':'user Ali'})
    assert 'sesame' not in repr(keys)
    assert not any(
        'sesame' in str(v) or b'sesame' in (v if isinstance(v, bytes) else b'')
        for k in keys.known for v in k)

PAGE = dict(Origin='https://page.example')
MAY_I = PAGE|dict(
    Access_Control_Request_Method='POST', Access_Control_Request_Headers='authorization')

def keyed(**kw):
    "An application behind a key"
    return live(Guard(App(), Rules(keys=ApiKeys({'k':'user'}), **kw)))

def test_no_cors():
    with keyed() as port:
        assert ask(port, 'OPTIONS', **MAY_I)[0]==403
        _,head,_ = ask(port, X_Api_Key='k', **PAGE)
        assert not any(k.startswith('access-control') for k in head)

def test_cors():
    with keyed(origins=('https://page.example',)) as port:
        status,head,_ = ask(port, 'OPTIONS', **MAY_I)
        assert status==204
        assert head['access-control-allow-origin']=='https://page.example'
        assert 'authorization' in head['access-control-allow-headers']
        # a preflight needs no key; what comes after does
        assert ask(port, 'GET', **PAGE)[0]==401
        _,head,_ = ask(port, X_Api_Key='k', **PAGE)
        assert head['access-control-allow-origin']=='https://page.example'

def test_cors_of_other_pages():
    with keyed(origins=('https://page.example',)) as port:
        for other in 'https://page.example.evil','http://page.example','null','':
            assert ask(port, 'OPTIONS', **MAY_I|dict(Origin=other))[0]==403
            assert 'access-control-allow-origin' not in ask(port, X_Api_Key='k', Origin=other)[1]

def test_rate_is_by_key():
    rules = Rules(
        keys=ApiKeys({'a':'user', 'b':'user'}),
        rate=Rate(2, clock=lambda: 0.))
    with live(Guard(App(), rules)) as port:
        assert [ask(port, X_Api_Key=k)[0] for k in 'aaabb']==[
            200,200,429,200,200]
        status,head,body = ask(port, X_Api_Key='a')
        assert status==429
        assert int(head['retry-after'])==30
        assert json.loads(body)['error']['code']=='rate_limit_exceeded'
        assert json.loads(
            ask(port, 'POST', '/v1/messages', X_Api_Key='a')[2]
        )['error']['type']=='rate_limit_error'
        assert ask(port, path='/health')[0]==200

def test_every_answer_is_dressed():
    with live(
        Guard(App(), Rules(keys=ApiKeys({'a':'user'})))
    ) as port:
        for got in (
            ask(port), ask(port, X_Api_Key='a'),
            ask(port, Host='evil.example')
        ):
            assert got[1]['x-content-type-options']=='nosniff'
            assert got[1]['x-frame-options']=='deny'
            assert got[1]['referrer-policy']=='no-referrer'

# ---- TLS ----

@pytest.fixture(scope='module')
def pair(tmp_path_factory):
    d = tmp_path_factory.mktemp('tls')
    cmd = [
        'openssl','req','-x509','-newkey','rsa:2048','-nodes','-keyout',
        d/'key.pem','-out',d/'cert.pem','-days','2','-subj',
        '/CN=localhost','-addext','subjectAltName=DNS:localhost']
    try:
        subprocess.run(cmd, check=True, capture_output=True)
    except (OSError,subprocess.CalledProcessError):
        pytest.skip('no openssl')
    return str(d/'cert.pem'),str(d/'key.pem')

def test_tls(pair, clock):
    import ssl
    servers = []
    tls = http.tls_options(*pair)
    with live(App(), tls=tls, servers=servers) as port:
        c = ssl.create_default_context(cafile=pair[0])
        with connect(port) as raw, c.wrap_socket(raw, server_hostname='localhost') as s:
            s.sendall(LAST)
            assert statuses(read(s))==[200]
        with connect(port) as raw, c.wrap_socket(raw, server_hostname='localhost') as s:
            s.sendall(HEAD)
            def waits(c): return c.heard and not c.answering and c.phase=='head'
            connections = servers[0].server_state.connections
            until(lambda: any(map(waits, list(connections))))
            with clock.passes():
                assert statuses(read(s))==[408]

def test_tls_asks_clients_for_a_certificate(pair):
    import ssl
    with live(App(), tls=http.tls_options(*pair, pair[0])) as port:
        c = ssl.create_default_context(cafile=pair[0])
        for known in (False,True):
            if known:
                c.load_cert_chain(*pair)
            with connect(port) as raw:
                try:
                    with c.wrap_socket(raw, server_hostname='localhost') as s:
                        s.sendall(LAST)
                        got = statuses(read(s))
                except OSError:
                    got = []
            assert got==([200] if known else [])

def test_tls_files_are_looked_at(pair, tmp_path):
    (tmp_path/'x.pem').write_text('no key')
    for args in [
        ('/nowhere',), (pair[0],),
        (pair[0],str(tmp_path/'x.pem')),
        (str(tmp_path/'x.pem'),pair[1]),
        (*pair,str(tmp_path/'x.pem'))
    ]:
        with pytest.raises(http.TLSError):
            http.tls_options(*args)

# ---- The log ----

@contextmanager
def bad_log(where):
    "An open file to log to, of which nothing comes, or will come"
    r,w = os.pipe()
    if where=='broken pipe':
        os.close(r)
    if where=='stuck pipe':
        os.set_blocking(w, False)
        while _fill(w):
            pass
        os.set_blocking(w, True)
    yield open('/dev/full', 'w') if where=='full disk' else os.fdopen(w, 'w')
    if where=='stuck pipe':
        os.read(r, 1<<20)

@contextmanager
def logging_to(stream):
    "Send log lines there for a while"
    import structlog
    from atlas.service.log import LOGGERS,configure
    loggers = [logging.getLogger(n) for n in LOGGERS]
    old = [(l, l.handlers, l.propagate) for l in loggers]
    try:
        yield configure('json', stream=stream)
    finally:
        structlog.reset_defaults()
        for l,handlers,propagate in old:
            l.handlers = handlers
            l.propagate = propagate

@pytest.mark.parametrize('where', ['full disk','broken pipe','stuck pipe','closed'])
def test_a_log_that_cannot_be_written(where):
    "Serving goes on, and the ids still go back"
    from atlas.service.log import Access
    with bad_log(where) as f:
        with logging_to(f) as sink:
            if where=='closed':
                f.close()
            with live(Access(App())) as port:
                for _ in range(20):
                    status,head,body = ask(port, X_Request_Id='mine')
                    assert status==200 and head['x-request-id']=='mine' and body==b'hello'
            sink.close(.2)
            assert sink.lost or where=='stuck pipe'
    sink.close(.2)

def _fill(fd):
    "One write into a pipe; None when it is full"
    try:
        return os.write(fd, b'x'*4096)
    except BlockingIOError:
        return None

# ---- The dashboard ----

DASHBOARD = http.Path(http.__file__).parent/'static'/'grafana.json'

class Everything:
    "One model, whose engine knows every number that the service may ask it for"
    def __init__(self, stats):
        engine = SimpleNamespace(stats=lambda: stats)
        self.ready_models = [SimpleNamespace(name='m', runner=engine)]
    def stats(self):
        return [dict(model='m', state='loaded', load_seconds=dict(weights=1.), restarts_total=0)]

def everything_seen():
    "A card that knows all there is to know, and the memory of a machine"
    clocks,memory = dict(sm=1., memory=1.),dict(used=1, total=2)
    card = SimpleNamespace(
        card='0', celsius=1., watts=1., watts_limit=1.,
        busy=1., clocks=clocks, clocks_most=clocks, memory=memory,
        reasons=())
    return (
        [card],
        SimpleNamespace(total=1, free=1, available=1, some=0., full=0.))

@pytest.fixture(scope='module')
def metric_names():
    "Every name that the service can tell"
    from atlas.service import metrics
    m = metrics.Metrics(Everything({k:1 for k in metrics._engine}))
    one = m.of('m')
    for k in 'request_success','aborted_requests','admission_rejections','tool_parse_failures':
        getattr(one, k)['x'] += 1
    m.http['GET','/','200'] += 1
    m.machine = everything_seen()
    return set(re.findall(r'^([\w:]+)(?:\{.*\})? ', m.text().decode(), re.M))

@pytest.fixture(scope='module')
def dashboard():
    return json.loads(DASHBOARD.read_text(encoding='utf-8'))

def test_dashboard_names_what_there_is(dashboard, metric_names):
    said = [t['expr'] for p in dashboard['panels'] for t in p.get('targets', ())]
    assert len(said)>25
    said += [v['definition'] for v in dashboard['templating']['list'] if 'definition' in v]
    for e in said:
        names = set(re.findall(r'(?:atlas:|process_)\w+', e))
        assert names and names<=metric_names, (e, names-metric_names)
        assert e.count('(')==e.count(')')

def test_dashboard_has_each_panel_once(dashboard):
    ids = [p['id'] for p in dashboard['panels']]
    assert len(set(ids))==len(ids)

# ---- The service behind it ----

@pytest.fixture(scope='module')
def service():
    from atlas.service.log import Access
    from test_server import FakeRunner,app_of,template,tok
    keys = ApiKeys({'sesame':'user', 'onion':'admin'})
    app = app_of(FakeRunner(), tok, template, rules=Rules(keys=keys, body=3_000_000))
    app.add_middleware(Access)
    with live(app, Bounds()) as port:
        yield port

def post(port, path, body, key='sesame', **headers):
    import http.client
    c = http.client.HTTPConnection('127.0.0.1', port, timeout=WAIT)
    with closing(c):
        c.request(
            'POST', path,
            body if isinstance(body, bytes) else json.dumps(body).encode(),
            {'Content-Type':'application/json', 'Host':'localhost'}
            |({'Authorization':f'Bearer {key}'} if key else {})|headers)
        r = c.getresponse()
        return (
            r.status,
            {k.lower():v for k,v in r.getheaders()},
            r.read())

SAY = dict(messages=[dict(role='user', content='Hi')])

def test_service_with_a_key(service):
    assert post(service, '/v1/chat/completions', SAY)[0]==200
    for key in (None,'wrong','sesam'):
        assert post(service, '/v1/chat/completions', SAY, key)[0]==401
    status,head,body = post(
        service, '/v1/messages', SAY|dict(max_tokens=5), None,
        **{'x-request-id':'mine'})
    assert status==401
    assert json.loads(body)['error']['type']=='authentication_error'
    assert head['x-request-id']==head['request-id']=='mine'
    assert post(
        service, '/v1/messages', SAY|dict(max_tokens=5), None,
        **{'x-api-key':'sesame'}
    )[0]==200

def test_the_page_asks_for_the_key(service):
    "It comes with 401, whole and under its policy; what it asks for next does not come at all"
    status,head,body = ask(service, path='/')
    assert status==401
    assert body.startswith(b'<!doctype html>')
    assert 'script-src' in head['content-security-policy']
    assert ask(service, path='/', Authorization='Bearer sesame')[0]==200
    for path in ('/v1/models','/metrics','/openapi.json','/models','/version','/docs','/nothing'):
        assert ask(service, path=path)[0]==401
    assert ask(service, path='/health')[0]==200

@pytest.mark.parametrize(
    'deep',
    [b'['*10_000+b']'*10_000, b'{"messages":'+b'['*10_000,
     b'{"a":'*10_000+b'1'+b'}'*10_000,
     b'{"messages": [{"role": "user", "content": "x"}], "tools": '+b'['*10_000+b']'*10_000+b'}',
     b'{"messages": [{"role": "user", "content": "x"}], "response_format": {"type": '
     b'"json_schema", "json_schema": {"name": "x", "schema": '
     +b'{"items":'*10_000+b'{}'+b'}'*10_000+b'}}}'])
@pytest.mark.parametrize('path', ['/v1/chat/completions','/v1/messages','/v1/responses'])
def test_deep_json(service, path, deep):
    status,_,body = post(service, path, deep)
    assert status==400 and 'error' in json.loads(body)

def test_large_body(service):
    status,_,body = post(
        service, '/v1/chat/completions',
        dict(messages=[dict(role='user', content='x'*3_000_000)]))
    assert status==413 and json.loads(body)['error']['code']=='body_too_large'
    assert post(service, '/v1/chat/completions', SAY)[0]==200

def test_strangers_hear_how_it_is_and_not_why(service):
    "Names of models, and what went wrong with them, are for those who have a key"
    assert json.loads(ask(service, path='/health')[2])==json.loads(
        ask(service, path='/health', X_Api_Key='wrong')[2]
    )==dict(status='ok')
    assert 'fake' in json.loads(ask(service, path='/health', X_Api_Key='sesame')[2])['models']

METHODS = ('GET','HEAD','POST','PUT','DELETE','PATCH','OPTIONS','TRACE')
WAYS = (
    '{}','{}/','/{}','{}?x=1','{}/..','{};x','{}%00','/health/..{}',
    '/health;{}','/health%2f..{}','/%2e{}','http://localhost{}','\\health{}')

def test_no_path_is_open(service):
    """All that the service has, and some that it has not, written in many ways and asked for in
    all ways: without a key nothing but `/health`, and the page that asks for one"""
    have = {
        p.replace('{id}','a').replace('{name}','fake')
        for p in json.loads(
            ask(service, path='/openapi.json', X_Api_Key='sesame')[2])['paths']} - {'/health'}
    assert len(have)>25
    for p in {
        *have, '/openapi.json', '/docs', '/redoc', '/static/chat.html', '/favicon.ico',
        '/nothing'
    }:
        for way in WAYS:
            for method in METHODS if way=='{}' else ('GET',):
                assert ask(
                    service, method, way.format(p)
                )[0] in (401,400), (method, way, p)

def test_admin_only(service):
    for path in ('/models/load','/models/unload'):
        assert post(service, path, dict(model='fake'))[0]==403
        assert post(service, path, dict(model='fake'), 'onion')[0]!=403

def test_images_are_not_fetched(service):
    image = dict(type='image_url', image_url=dict(url='http://169.254.169.254/latest/meta-data'))
    status,_,body = post(
        service, '/v1/chat/completions',
        dict(messages=[dict(role='user', content=[image])]))
    assert status==400 and b'169.254' not in body

ENDLESS = dict(messages=[  # for a template that loops for ever on more than one message
    dict(role='user', content='a'),
    dict(role='assistant', content='b'),
    dict(role='user', content='c')])

BOMB = (
    '{% for m in messages %}{{ m.content }}'
    '{% if loop.index>1 %}{{ lipsum(n=8000000) }}{% endif %}{% endfor %}')

def bombed(box, **kw):
    "The application of a model whose template loops for ever on two messages"
    from atlas.text.chat import ChatTemplate
    from test_server import FakeRunner,app_of,tok
    return app_of(FakeRunner(), tok, ChatTemplate(BOMB), sandbox=box, **kw)

def test_template_bomb(patient_sandbox):
    "A refusal, and the next request is served"
    from atlas.text.sandbox import Sandbox
    short = Sandbox(seconds=.5, memory=256<<20, workers=1)
    app = bombed(short)
    with short as box, live(app, Bounds()) as port:
        assert post(port, '/v1/chat/completions', SAY)[0]==200
        status,_,body = post(port, '/v1/chat/completions', ENDLESS)
        assert status==400 and json.loads(body)['error']['code']=='work_limit' and box.killed==1
        assert post(port, '/v1/chat/completions', SAY)[0]==200

@contextmanager
def endless_requests(port, key, n=10):
    "So many requests of a key that never end, until their clients leave"
    from http.client import HTTPConnection
    cs = [HTTPConnection('127.0.0.1', port, timeout=WAIT) for _ in range(n)]
    heads = {
        'Content-Type':'application/json', 'Host':'localhost', 'Authorization':f'Bearer {key}'}
    for c in cs:
        c.request('POST', '/v1/chat/completions', json.dumps(ENDLESS), heads)
    yield
    for c in cs:
        c.close()

def test_bombs_of_one_key_hold_up_no_other(patient_sandbox):
    "Ten requests whose template never ends, and then one of another key: it is answered at once"
    from atlas.text.sandbox import Sandbox
    keys = ApiKeys({'bad':'user eve', 'good':'user ann'})
    patient = Sandbox(seconds=600.)
    app = bombed(patient, rules=Rules(keys=keys))
    with patient as box, live(app, Bounds()) as port:
        with endless_requests(port, 'bad'):
            until(lambda: box.waiting>=10)
            assert post(port, '/v1/chat/completions', SAY, 'good')[0]==200 and box.waiting==10
        until(lambda: box.waiting<=2)  # those whose clients have left wait no longer

@kinds
def test_gone_while_one_of_two_is_prepared(kind):
    """Two requests on one connection, and the first waits for its model when their client
    leaves: it is heard at once, and neither reaches the engine"""
    from atlas.service.server import create_app
    from test_server import FakeRunner,Slow,head,slow_models
    slow,r = Slow(),FakeRunner()
    one = head(14).replace(b'Host: x', b'Host: localhost')+b'{"prompt":"a"}'
    app = create_app(slow_models(slow, r))
    with live(app, Bounds(), kind) as port:
        with connect(port) as s:
            s.sendall(2*one)
            assert slow.begun.acquire(timeout=WAIT)
        assert slow.cancelled.acquire(timeout=WAIT)
    assert not r.seen and not slow.begun.acquire(timeout=0)

@kinds
def test_no_other_protocol(kind):
    """An upgrade that we do not offer is a plain request; `Expect` is met, and a body that is
    too large is refused before it is sent"""
    up = (
        b'GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: '
        b'%s\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n')
    with live(Guard(App(), Rules(body=1000)), kind=kind) as port:
        for what in (b'websocket', b'h2c'):
            assert statuses(talk(port, up % what))[0]==200
        if kind=='httptools':
            assert statuses(
                talk(port, b'CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n'))==[400]
        with connect(port) as s:
            s.sendall(
                POST+b'Expect: 100-continue\r\nContent-Length: 3\r\nConnection: close\r\n\r\n')
            assert statuses(s.recv(1<<16))==[100]
            s.sendall(b'abc')
            assert statuses(read(s))==[200]
        got = talk(
            port,
            POST+b'Expect: 100-continue\r\nContent-Length: 3000\r\nConnection: close\r\n\r\n')
        assert statuses(got)==[413]

INNER = b'GET /secret HTTP/1.1\r\nHost: a\r\n\r\n'
WISH = (
    b'Host: localhost\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: '
    b'h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\nX-Mine: 1\r\n')
FRAMED = dict(
    length=(b'Content-Length: %d\r\n\r\n'%len(INNER), INNER),
    chunks=(
        b'Transfer-Encoding: chunked\r\n\r\n',
        b'%x\r\n'%len(INNER)+INNER+b'\r\n0\r\n\r\n'))

class KeepsHeads(App):
    "Remembers the headers of what it was asked"
    def __init__(self):
        super().__init__()
        self.heads = []
    async def __call__(self, scope, receive, send):
        self.heads.append(dict(scope['headers']))
        await super().__call__(scope, receive, send)

@kinds
@pytest.mark.parametrize('framed', FRAMED)
@pytest.mark.parametrize('apart', [0,1,30])
def test_a_wish_for_another_protocol_loses_no_body(kind, apart, framed, clock):
    """Java's client asks for HTTP/2 with each first request. What is in the body is no request,
    however it is cut, and the connection goes on"""
    app,(how,body) = KeepsHeads(),FRAMED[framed]
    raw = b'POST /a HTTP/1.1\r\n'+WISH+how
    cut = len(raw)-apart
    with live(Guard(app), replace(QUICK, idle=WAIT), kind=kind) as port, connect(port) as s:
        for part in raw[:cut],raw[cut:],body:
            s.sendall(part)
            clock.step(0.)  # each is read by itself
        assert statuses(s.recv(1<<16))==[200]
        s.sendall(LAST)
        assert statuses(read(s))==[200]
    assert app.seen==['/a','/'] and app.bodies==[len(INNER),0]
    assert app.heads[0][b'x-mine']==b'1'
