"""Another server that breaks in every way: a socket, and a function that writes what it likes.

`upstream(say)` runs one on a free port. `say(c)` is called with each question, a `Call`,
and may write with `c.send`, wait for `c.wait()`, and end by returning, which hangs up."""
import json,socket,threading
from contextlib import contextmanager,suppress
from dataclasses import dataclass,field
from helpers.waiting import WAIT

@dataclass
class Call:
    "One question, and the connection that it came by"
    sock:socket.socket
    over:threading.Event
    method:str=''
    path:str=''
    heads:dict=field(default_factory=dict)
    body:bytes=b''
    @property
    def json(self): return json.loads(self.body)
    def send(self, *parts):
        for p in parts:
            self.sock.sendall(p)
    def head(self, status=200, kind='application/json', **heads):
        "A head without a length: the answer ends when the connection does"
        lines = [
            f'HTTP/1.1 {status} Said', f'content-type: {kind}', 'connection: close',
            *(f'{k.replace("_", "-")}: {v}' for k,v in heads.items())]
        self.send('\r\n'.join([*lines, '', '']).encode())
    def whole(self, d, status=200, **heads):
        "A whole answer"
        raw = d if isinstance(d, bytes) else json.dumps(d).encode()
        self.head(status, **dict(content_length=len(raw))|heads)
        self.send(raw)
    def stream(self, *events, cut=False):
        "A chunked stream; where it is `cut`, without an end"
        kind = b'content-type: text/event-stream\r\n'
        self.send(b'HTTP/1.1 200 OK\r\n', kind, b'transfer-encoding: chunked\r\n\r\n')
        for e in events:
            self.chunk(e)
        if not cut:
            self.send(b'0\r\n\r\n')
    def chunk(self, raw):
        self.send(b'%x\r\n%b\r\n'%(len(raw), raw))
    def wait(self):
        "Until the client hangs up, or the test is over: did it hang up?"
        self.sock.settimeout(.05)
        while not self.over.is_set():
            try:
                if not self.sock.recv(1):
                    return True
            except TimeoutError:
                continue
            except OSError:
                return True
        return False

class FakeUpstream:
    "What was asked, and how it is answered"
    def __init__(self, say, tls=None):
        self.say,self.calls,self.tls = say,[],tls
        self.over = threading.Event()
        self.sock = socket.create_server(('127.0.0.1', 0))
        self.port = self.sock.getsockname()[1]
        self.url = f'http{"s"*bool(tls)}://127.0.0.1:{self.port}/v1'
        threading.Thread(target=self._accept, daemon=True).start()
    def _accept(self):
        while not self.over.is_set():
            try:
                c,_ = self.sock.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(c,), daemon=True).start()
    def _serve(self, c):
        with suppress(OSError),self.secured(c) as c:
            c.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            f = c.makefile('rb')
            first = f.readline().decode().split()
            if len(first)<3:
                return
            heads = {}
            while (l := f.readline().decode('latin-1').strip()):
                k,_,v = l.partition(':')
                heads[k.lower()] = v.strip()
            body = f.read(int(heads.get('content-length', 0)))
            q = Call(c, self.over, first[0], first[1], heads, body)
            self.calls.append(q)
            self.say(q)
    def secured(self, c):
        "The connection, after its handshake if there is to be one"
        c.settimeout(WAIT)
        return self.tls.wrap_socket(c, server_side=True) if self.tls else c
    def asked(self, path='/v1/chat/completions'): return [c for c in self.calls if c.path==path]

@contextmanager
def upstream(say, tls=None):
    "Run a `FakeUpstream`; `tls` is an `SSLContext`, to speak https"
    u = FakeUpstream(say, tls)
    try:
        yield u
    finally:
        u.over.set()
        u.sock.shutdown(socket.SHUT_RDWR)  # wakes whoever accepts
        u.sock.close()

# -- what good servers say -----------------------------------------------------------------------

def chunk(delta=None, finish=None, **kw):
    "One event of a chat stream"
    c = dict(index=0, delta=delta or {}, finish_reason=finish)
    d = dict(
        id='chatcmpl-1', object='chat.completion.chunk', created=1, model='theirs',
        choices=[c])|kw
    return b'data: '+json.dumps(d).encode()+b'\n\n'
def text(s): return chunk(dict(content=s))
USAGE = dict(
    prompt_tokens=11, completion_tokens=7, total_tokens=18,
    prompt_tokens_details=dict(cached_tokens=3))
COUNTS = chunk(usage=USAGE, choices=[])
DONE = b'data: [DONE]\n\n'
HELLO = [text('Hel'), text('lo'), chunk(finish='stop'), COUNTS, DONE]
def completion(content='Hello', **message):
    "A whole chat completion"
    m = dict(role='assistant', content=content)|message
    return dict(
        id='chatcmpl-1', object='chat.completion', created=1, model='theirs', usage=USAGE,
        choices=[dict(index=0, message=m, finish_reason='stop')])
def good(c):
    "What says hello to whoever asks for chat, and has nothing else"
    if c.path!='/v1/chat/completions':
        return c.whole(dict(detail='Not Found'), 404)
    if c.json.get('stream'):
        c.stream(*HELLO)
    else:
        c.whole(completion())
