"""A server of the Responses API with a script instead of a model: the pages `protocol.responses`
and `protocol.stored`, and nothing else of Atlas.

`serve(script)` runs it on a free port. `script(ask)` gives the pieces of an answer, with `await`
points in between where it is an async generator."""
import asyncio,socket,threading
from contextlib import contextmanager
import uvicorn
from helpers.waiting import WAIT
from starlette.applications import Starlette
from starlette.responses import JSONResponse,StreamingResponse
from starlette.routing import Route
from atlas.ground.core import AtlasError
from atlas.ground.requests import Event
from atlas.service.protocol.base import Usage
from atlas.text.deltas import gather
from atlas.text.tokenizer import byte_tokenizer
from atlas.service.protocol.responses import ResponseStore,error_body,parse,reply

class ResponsesApp:
    "One store, one script, and all that was asked"
    def __init__(self, script):
        self.script = script
        self.store = ResponseStore()
        self.asks = []
        self.bodies = []
        self.aborted = []
        self.tasks = set()

    async def pieces(self, ask, w):
        "The pieces of the script, until somebody aborts"
        stop = asyncio.Event()
        def abort():
            self.aborted.append(w.id)
            stop.set()
        w.abort = abort
        it = self.script(ask)
        if not hasattr(it, '__anext__'):
            for p in it:
                yield p
            return
        while True:
            nxt = asyncio.ensure_future(anext(it, None))
            out = asyncio.ensure_future(stop.wait())
            await asyncio.wait([nxt, out], return_when=asyncio.FIRST_COMPLETED)
            out.cancel()
            if stop.is_set():
                nxt.cancel()
                raise AtlasError('The answer was stopped')
            if (p := nxt.result()) is None:
                return
            yield p

    async def events(self, ask, w):
        usage = Usage(11, 7, 3, 2)
        try:
            yield w.start(Usage(11))
            async for p in self.pieces(ask, w):
                yield w.piece(0, p)
            yield w.end(usage)
        except Exception as e:
            yield w.error(e)
        finally:
            w.close()

    async def create(self, request):
        raw = await request.body()
        self.bodies.append(raw)
        ask = parse(raw, self.store, request.headers.get('x-owner'))
        self.asks.append(ask)
        w = reply(ask, ask.model or 'scripted')
        heads = {'x-atlas-warning':w for w in ask.warnings[:1]}
        stream = self.events(ask, w)
        if ask.background:
            return await self.background(ask, w, stream)
        if ask.stream:
            return StreamingResponse(stream, media_type='text/event-stream', headers=heads)
        try:
            choice = gather([p async for p in self.pieces(ask, w)])
            return JSONResponse(w.whole([choice], Usage(11, 7, 3, 2)), headers=heads)
        finally:
            w.close()

    async def background(self, ask, w, stream):
        "Answer without the client"
        await anext(stream)
        async def drain():
            async for _ in stream:
                pass
        self.tasks.add(asyncio.create_task(drain()))
        if ask.stream:
            return StreamingResponse(w.follow(), media_type='text/event-stream')
        return JSONResponse(w.resource())

    async def get(self, request):
        id = request.path_params['id']
        owner,q = request.headers.get('x-owner'),request.query_params
        if q.get('stream')!='true':
            return JSONResponse(self.store.get(id, owner))
        events = self.store.follow(id, owner, q.get('starting_after'))
        return StreamingResponse(events, media_type='text/event-stream')
    async def delete(self, request):
        return JSONResponse(self.store.delete(*named(request)))
    async def cancel(self, request):
        return JSONResponse(self.store.cancel(*named(request)))
    async def items(self, request):
        q = request.query_params
        q = {k:q[k] for k in ('after','limit','order') if k in q}
        return JSONResponse(self.store.items(*named(request), **q))
    async def models(self, request):
        only = dict(id='scripted', object='model', created=0, owned_by='atlas')
        return JSONResponse(dict(object='list', data=[only]))

    def app(self):
        async def refused(request, e):
            return JSONResponse(error_body(e), e.status)
        at = '/v1/responses'
        routes = [
            Route(at, self.create, methods=['POST']),
            Route(at+'/{id}', self.get),
            Route(at+'/{id}', self.delete, methods=['DELETE']),
            Route(at+'/{id}/cancel', self.cancel, methods=['POST']),
            Route(at+'/{id}/input_items', self.items),
            Route('/v1/models', self.models)]
        return Starlette(routes=routes, exception_handlers={AtlasError:refused})

def named(request):
    "The id of a request's response, and who asks"
    return request.path_params['id'],request.headers.get('x-owner')

@contextmanager
def running(app):
    "Run an ASGI application on a free port of this machine; gives its URL"
    sock = socket.create_server(('127.0.0.1', 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level='warning', timeout_graceful_shutdown=1))
    t = threading.Thread(target=server.run, kwargs=dict(sockets=[sock]), daemon=True)
    t.start()
    try:
        yield f'http://127.0.0.1:{sock.getsockname()[1]}'
    finally:
        server.should_exit = True
        t.join(WAIT)
        sock.close()

@contextmanager
def serve(script):
    "Run a `ResponsesApp` on a free port; gives it, with its `url`"
    s = ResponsesApp(script)
    with running(s.app()) as s.url:
        yield s

# -- the whole service, with a script in the place of its runner ---------------------------------

END = 256  # comes after the bytes, and ends an answer
TEMPLATE = '''{% for t in tools or [] %}tool {{ t | tojson }}
{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content or '' }}
{%- for c in m.tool_calls or [] %} call {{ c.function.name }}{% endfor %}
{% endfor %}assistant: '''

class Speaker:
    """A runner: `script` gives the answer, markup and all, to the text of a prompt.

    `drafts`: each step says so many tokens more, which were drafted."""
    def __init__(self, script, drafts=0):
        self.drafts = drafts
        self.cached = 0 # Tokens of each prompt that come from a cache, as its first event says
        self.tok = byte_tokenizer()
        self.script = script
        self.healthy = True
        self.prompts = []
        self.aborted = 0
        self.info = dict(name='scripted', max_seq_len=400_000, vocab_size=257, eos_ids=[END])
        if drafts:
            self.info['speculative'] = f'mtp, {drafts} drafts'
    def submit(self, r):
        self.prompts.append(self.tok.decode(list(r.prompt)))
        answer = self.tok.encode(self.script(self.prompts[-1]))
        return Line(self, r, [*answer, END])
    def stats(self):
        return dict(num_requests_running=0, num_requests_waiting=0, kv_cache_usage_perc=0.)
    def close(self, drain=0.):
        pass

class Line:
    "One answer of a `Speaker`, a token at a time"
    def __init__(self, speaker, r, ids):
        self.speaker,self.r = speaker,r
        self.ids,self.n = ids,0
        self.over = False
    def __aiter__(self): return self
    async def __anext__(self):
        await asyncio.sleep(0)
        if self.over:
            raise StopAsyncIteration
        return self.event()
    def ready(self):
        "The rest of a step"
        out,rows = [],self.speaker.drafts+1
        while not self.over and self.n%rows:
            out.append(self.event())
        return out
    def event(self):
        n,self.n = self.n,self.n+1
        cut = 'length' if self.n==self.r.params.max_tokens else None
        finish = 'stop' if self.n==len(self.ids) else cut
        self.over = finish is not None
        drafted = n%(self.speaker.drafts+1)>0
        cached = None if n else self.speaker.cached
        return Event(self.r.id, self.ids[n], finish=finish, drafted=drafted, cached=cached)
    def abort(self):
        if not self.over:
            self.over = True
            self.speaker.aborted += 1

@contextmanager
def service(script, parsers=('hermes','qwen3'), template=TEMPLATE, drafts=0, **kw):
    """Run the service on a free port, with `script` for its model; gives the `Speaker`, with its
    `url`"""
    from atlas.text.chat import ChatTemplate
    from inprocess import app_of
    s = Speaker(script, drafts)
    app = app_of(s, s.tok, ChatTemplate(template), parsers=parsers, **kw)
    with running(app) as s.url:
        yield s
