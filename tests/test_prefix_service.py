"""What a prefix cache needs of the service, and what it says of it: salts, places where messages
end, cached tokens in every API, and next turns that are prefilled while nobody waits.

The text side of `tiny` is real; its engine is a script that remembers what it was asked.
A client of each API sends back what it was given, and its next prompt must begin as foreseen."""
import asyncio,json,re,time
from contextlib import contextmanager
import httpx,pytest
from hypothesis import HealthCheck,given,settings,strategies as st
from atlas.ground.core import ConfigError,QueueFullError
from atlas.ground.options import EngineConfig
from atlas.ground.requests import Event,Request,SamplingParams
from atlas.service.gateway import serve
from atlas.service.http import Keys,Rules
from atlas.service.log import configure
from atlas.service.metrics import Metrics,_engine
from atlas.service.reanchor import LAST,NextTurns
from atlas.text.chat import ChatTemplate
from atlas.text.next_turn import TurnMarks,foresee,shared
from atlas.text.processor import read_text
from atlas.text.tokenizer import byte_tokenizer
from helpers.inprocess import app_of
from helpers.scripted import running
from helpers.waiting import WAIT,happens,until
from test_processes import model,running as gateway,running_test

TINY = read_text(EngineConfig('tiny'))
TOK,END = TINY.tokenizer,TINY.eos_ids[0]
CHAT,TEXT = '/v1/chat/completions','/v1/completions'
RESPONSES,MESSAGES = '/v1/responses','/v1/messages'
APIS = CHAT,TEXT,RESPONSES,MESSAGES
TALKS = CHAT,RESPONSES,MESSAGES
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
WHOLE = dict(type='integer')
SCHEMA = dict(type='object', properties=dict(a=WHOLE, b=WHOLE))
THOUGHT = 'They want a sum. I have a tool for that.</think>\n\n'

def body(path, text='What does a cow eat?', **kw):
    "A question in the shape of an API"
    if path==TEXT: return dict(prompt=text)|kw
    if path==RESPONSES: return dict(input=text, store=False)|kw
    limit = dict(max_tokens=200) if path==MESSAGES else {}
    return limit|dict(messages=[dict(role='user', content=text)])|kw

# -- an engine that remembers -----------------------------------------------------------------------

class Line:
    "An answer, a token at a time; then nothing, if it is `held`"
    def __init__(self, engine, r, ids): self.engine,self.r,self.ids,self.over = engine,r,ids,False
    def __aiter__(self): return self
    async def __anext__(self):
        await asyncio.sleep(0)
        if self.over: raise StopAsyncIteration
        if not self.ids: await asyncio.Event().wait()
        n = len(self.ids)
        i,*self.ids = self.ids
        first = n==self.n
        self.over = not self.ids and not self.held
        limit = self.r.params.max_tokens
        cut = limit is not None and self.n-n+1==limit
        finish = 'stop' if self.over else 'length' if cut else None
        return Event(self.r.id, i, finish=finish, cached=self.engine.cached if first else None)
    def abort(self):
        if not self.over: self.over = True; self.engine.aborted.append(self.r)

class Engine:
    "A runner: says what `script` makes of the text of a prompt"
    healthy = True
    def __init__(self, script, cached=0, hold=lambda r: False):
        self.script,self.cached,self.hold = script,cached,hold
        self.info = dict(name='tiny', max_seq_len=4096, vocab_size=TOK.vocab_size, prefix_caching=True)
        self.asked,self.aborted,self.said = [],[],{}
    def submit(self, r):
        self.asked.append(r)
        ids = [None]
        if not r.prefill_only:
            text = self.script(TOK.decode(list(r.prompt), skip_special=False))
            ids = [*TOK.encode(text, add_special=False), END]
        line = Line(self, r, ids)
        line.n,line.held = len(ids),self.hold(r)
        if line.held: line.ids = ids[:-1]
        return line
    def stats(self): return self.said
    def close(self, drain=0.): pass
    @property
    def real(self): return [r for r in self.asked if not r.prefill_only]
    @property
    def ahead(self): return [r for r in self.asked if r.prefill_only]

def script(prompt):
    "An answer, or a call where there are tools and no result yet"
    if 'sum' in prompt and '<tool_response>' not in prompt: return THOUGHT+CALL
    return 'Let me think.</think>\n\nGrass, and now and then hay.'

@contextmanager
def served(engine=None, **kw):
    "The service in front of an engine; gives a client, with `engine`"
    engine = engine or Engine(script)
    app = app_of(engine, TOK, TINY.template, parsers=TINY.parsers, **kw)
    with running(app) as url, httpx.Client(base_url=url, timeout=WAIT) as client:
        client.engine,client.service = engine,app.state.service
        yield client

def outcomes(client):
    "How next turns ended, when none is under way"
    def done():
        d = client.service.metrics.of('tiny').next_turn_prefills
        return d['begun']==sum(d.values())-d['begun']
    until(done, 'the end of what was begun')
    return +client.service.metrics.of('tiny').next_turn_prefills

def asked(client, path, **kw):
    "Ask, and be answered"
    r = client.post(path, json=body(path, **kw))
    assert r.status_code==200, r.text
    return r

# -- salts ------------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def client():
    with served() as c: yield c

@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize('path', APIS)
def test_a_salt_reaches_the_engine(client, path, stream):
    for salt,want in (('mine','mine'), (None,''), ('','')):
        r = asked(client, path, cache_salt=salt, stream=stream)
        assert 'x-atlas-ignored' not in r.headers
        assert client.engine.real[-1].salt==want
    outcomes(client)
    assert {r.salt for r in client.engine.ahead}<={'mine',''}

@pytest.mark.parametrize('salt', [3, True, ['a'], dict(a=1), 'x'*2000], ids=str)
@pytest.mark.parametrize('path', APIS)
def test_a_salt_is_text(client, path, salt):
    n = len(client.engine.asked)
    r = client.post(path, json=body(path, cache_salt=salt))
    e = r.json()['error']
    assert r.status_code==400 and 'cache_salt' in e['message']
    assert e['type']=='invalid_request_error'
    if path!=MESSAGES: assert e['param']=='cache_salt'
    assert len(client.engine.asked)==n

@pytest.mark.parametrize('path', APIS)
def test_half_a_surrogate_is_no_salt(client, path):
    raw = json.dumps(body(path)|dict(cache_salt='SALT')).replace('SALT', '\\ud800')
    r = client.post(path, content=raw, headers={'content-type':'application/json'})
    assert r.status_code==400, r.text

KEYS = Keys({'sesame':'user', 'onion':'admin', 'garlic':'user same', 'leek':'user same'})

def salts_of(client, path, key, **kw):
    "The salt that a question with this key has"
    r = client.post(path, json=body(path, **kw), headers=dict(authorization=f'Bearer {key}'))
    assert r.status_code==200, r.text
    return client.engine.real[-1].salt

def test_each_key_has_its_salt():
    with served(rules=Rules(keys=KEYS), salt_keys=True) as c:
        names = 'sesame','onion','garlic','leek'
        salts = {k:{salts_of(c, p, k) for p in APIS} for k in names}
        assert all(len(s)==1 for s in salts.values()), 'the same in every API'
        assert len(set().union(*salts.values()))==4, 'also where keys share a name'
        own = {salts_of(c, p, k, cache_salt='a') for p in APIS for k in names}
        assert len(own)==4 and not own & set().union(*salts.values())
        assert not any(k in s for k in names for s in own), 'a salt does not tell the key'
        outcomes(c)
        for r in c.engine.ahead: assert r.salt in {q.salt for q in c.engine.real if q.id==r.id[:-5]+'-0'}

def test_keys_share_unless_told():
    with served(rules=Rules(keys=KEYS)) as c:
        assert {salts_of(c, p, k) for p in APIS for k in ('sesame','onion')}=={''}
        assert salts_of(c, CHAT, 'sesame', cache_salt='a')=='a'

def test_salts_of_keys_need_keys(monkeypatch):
    for k in 'ATLAS_API_KEY','ATLAS_ADMIN_KEY': monkeypatch.delenv(k, raising=False)
    with pytest.raises(ConfigError, match='no API key'): serve('tiny', cache_salt_per_key=True)

# -- where messages end -----------------------------------------------------------------------------

def test_boundaries_are_ends_of_messages(client):
    talk = [dict(role='user', content='What does a cow eat?'), dict(role='assistant', content='Grass.'),
        dict(role='user', content='And a cat?')]
    asked(client, CHAT, messages=talk)
    r = client.engine.real[-1]
    assert [TOK.token(r.prompt[i-1]) for i in r.boundaries]==['<|im_end|>']*3
    text = TINY.template.render(talk)
    asked(client, TEXT, text=text)
    assert client.engine.real[-1].boundaries==r.boundaries, 'a prompt of text has them, too'

def test_boundaries_are_bounded(client):
    talk = [dict(role='user', content='a'), dict(role='assistant', content='b')]*200+[dict(role='user', content='c')]
    asked(client, CHAT, messages=talk)
    r = client.engine.real[-1]
    assert len(r.boundaries)==256 and r.boundaries[-1]>len(r.prompt)-8
    assert list(r.boundaries)==sorted(set(r.boundaries))

# -- cached tokens ----------------------------------------------------------------------------------

def usage_of(path, r, stream):
    "(all tokens of the prompt, those of them from the cache) as an API says them"
    if not stream: d = r.json()
    else:
        said = [json.loads(l[6:]) for l in r.text.splitlines() if l.startswith('data: {')]
        d = [e for e in said if e.get('usage') or (e.get('response') or {}).get('usage')][-1]
        d = d.get('response') or d
    u = d['usage']
    if path==MESSAGES:
        assert u['cache_creation_input_tokens']==0 and u['input_tokens']>=0
        return u['input_tokens']+u['cache_read_input_tokens'],u['cache_read_input_tokens']
    if path==RESPONSES:
        assert u['total_tokens']==u['input_tokens']+u['output_tokens']
        return u['input_tokens'],u['input_tokens_details']['cached_tokens']
    assert u['total_tokens']==u['prompt_tokens']+u['completion_tokens']
    return u['prompt_tokens'],u['prompt_tokens_details']['cached_tokens']

@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize('path', APIS)
def test_cached_tokens_are_told(path, stream):
    with served() as c:
        more = dict(stream_options=dict(include_usage=True)) if stream and path in (CHAT,TEXT) else {}
        for cached in 0,5,None:
            c.engine.cached = cached
            r = asked(c, path, stream=stream, **more)
            assert usage_of(path, r, stream)==(len(c.engine.real[-1].prompt), cached or 0)
        n = len(c.engine.real[0].prompt)
        c.engine.cached = n-1
        r = asked(c, path, stream=stream, **more)
        assert usage_of(path, r, stream)==(n, n-1), 'all but the last token'
        counts = c.service.metrics.of('tiny')
        assert (counts.prompt_tokens_cached, counts.prompt_tokens)==(5+n-1, 4*n)
        assert f'atlas:prompt_tokens_cached_total{{model_name="tiny"}} {4+n}.0' in c.get('/metrics').text

def test_choices_share_what_is_cached():
    "A prompt counts once, however many answers it has"
    with served(Engine(script, cached=7)) as c:
        r = asked(c, CHAT, n=3)
        n,cached = usage_of(CHAT, r, False)
        assert cached==7<n
        r = asked(c, TEXT, prompt=['What?','Why?'], n=2)
        assert usage_of(TEXT, r, False)[1]==14
        assert c.service.metrics.of('tiny').prompt_tokens_cached==7+14

def test_the_log_tells_of_the_cache(capfd):
    from atlas.service.log import Access
    engine = Engine(script, cached=9)
    app = app_of(engine, TOK, TINY.template, parsers=TINY.parsers)
    app.add_middleware(Access)
    sink = configure('json', 'info')
    try:
        with running(app) as url: httpx.post(url+CHAT, json=body(CHAT), timeout=WAIT)
    finally: sink.close()
    lines = [json.loads(l) for l in capfd.readouterr().err.splitlines() if l.startswith('{')]
    said = [l for l in lines if l.get('event')=='request']
    assert [l['cached_tokens'] for l in said]==[9], 'one line, and none for what was prefilled'

# -- next turns -------------------------------------------------------------------------------------

class Chat:
    "A client of chat completions, which sends thoughts back or does not"
    path,tools = CHAT,[dict(type='function', function=dict(name='add', parameters=SCHEMA))]
    returns = False
    def __init__(self): self.messages = []
    def say(self, text): self.messages.append(dict(role='user', content=text))
    def body(self): return dict(messages=self.messages)
    def heard(self, d):
        "Keep the answer; was it a call?"
        m = d['choices'][0]['message']
        keep = ('role','content','tool_calls')+('reasoning_content',)*self.returns
        self.messages.append({k:m[k] for k in keep if k in m})
        return bool(m.get('tool_calls'))
    def result(self, text):
        for c in self.messages[-1]['tool_calls']:
            self.messages.append(dict(role='tool', tool_call_id=c['id'], content=text))

class Thoughtful(Chat):
    returns = True

class Messages(Chat):
    path,tools = MESSAGES,[dict(name='add', input_schema=SCHEMA)]
    def body(self): return dict(messages=self.messages, max_tokens=400)
    def heard(self, d):
        self.messages.append(dict(role='assistant', content=d['content']))
        return d['stop_reason']=='tool_use'
    def result(self, text):
        calls = [b for b in self.messages[-1]['content'] if b['type']=='tool_use']
        parts = [dict(type='tool_result', tool_use_id=c['id'], content=text) for c in calls]
        self.messages.append(dict(role='user', content=parts))

class Responses(Chat):
    path,tools = RESPONSES,[dict(type='function', name='add', parameters=SCHEMA)]
    def body(self): return dict(input=self.messages, store=False)
    def heard(self, d):
        self.messages += d['output']
        return d['output'][-1]['type']=='function_call'
    def result(self, text):
        c = self.messages[-1]
        self.messages.append(dict(type='function_call_output', call_id=c['call_id'], output=text))

CLIENTS = Chat,Thoughtful,Messages,Responses

@pytest.mark.parametrize('kind', CLIENTS, ids=lambda k: k.__name__)
def test_the_next_turn_begins_as_foreseen(kind):
    """A question, a call, its result, an answer, two more questions.

    What was prefilled behind each answer is a prefix of the next prompt,
    and lacks only what the client says anew"""
    with served() as c:
        talk,engine,turns = kind(),c.engine,0
        words = ['What does a cow eat?','What is the sum of 1 and 2?',None,'And 3 and 4?','Thanks.']
        for text in words:
            if text: talk.say(text)
            else: talk.result('3')
            r = c.post(talk.path, json=talk.body()|dict(tools=talk.tools))
            assert r.status_code==200, r.text
            prompt = engine.real[-1].prompt
            if turns:
                f = engine.ahead[-1].prompt
                assert prompt[:len(f)]==f, TOK.decode(list(prompt), skip_special=False)
                assert 0<len(prompt)-len(f)<45
            assert talk.heard(r.json())==(text==words[1])
            turns += 1
            assert outcomes(c)==dict(begun=turns, finished=turns)
        for real,after in zip(engine.real, engine.ahead):
            assert after.priority==LAST>2**31-1 and after.params.max_tokens==1
            assert after.id.startswith(real.id.rpartition('-')[0]) and after.boundaries
        counts = c.service.metrics.of('tiny')
        assert counts.requests_submitted==sum(counts.request_success.values())==len(words)
        assert 'next_turn_prefills_total{model_name="tiny",outcome="finished"} 5.0' in c.get('/metrics').text

def test_a_guess_may_be_wrong():
    "A client that returns thoughts, and has not done so before: it is foreseen without them"
    with served() as c:
        talk,prompts = Thoughtful(),[]
        talk.say('What is the sum of 1 and 2?')
        for last in False,True:
            r = c.post(CHAT, json=talk.body()|dict(tools=talk.tools))
            assert talk.heard(r.json()) is not last
            if not last: talk.result('3')
        (first,second),f = c.engine.real,c.engine.ahead[0].prompt
        assert shared(first.prompt, second.prompt)>=shared(f, second.prompt)<len(f)
        assert outcomes(c)==dict(begun=2, finished=2)

@pytest.mark.parametrize('path', TALKS)
def test_streams_are_followed_too(path):
    with served() as c:
        asked(c, path)
        asked(c, path, stream=True)
        assert outcomes(c)==dict(begun=2, finished=2)
        a,b = c.engine.ahead
        assert a.prompt==b.prompt
        if path==RESPONSES:
            r = c.post(path, json=dict(input='What does a cow eat?', background=True))
            assert r.status_code==200
            until(lambda: len(c.engine.ahead)==3, 'a background answer is followed')
            assert c.engine.ahead[2].prompt==a.prompt

def test_what_is_not_followed():
    with served() as c:
        def quiet(path, **kw):
            asked(c, path, **kw)
            assert outcomes(c)=={} and not c.engine.ahead
        quiet(TEXT)
        quiet(CHAT, n=2)
        quiet(CHAT, max_tokens=3)
        quiet(MESSAGES, max_tokens=0)
        assert c.post('/v1/messages/count_tokens', json=body(MESSAGES)).status_code==200
        assert c.post(CHAT, json=body(CHAT, temperature=-1)).status_code==400
        c.engine.info['prefix_caching'] = False
        quiet(CHAT)
        del c.engine.info['prefix_caching']
        quiet(CHAT)

def test_it_can_be_turned_off():
    with served(prefill_next_turn=False) as c:
        asked(c, CHAT)
        assert c.service.follow is None and outcomes(c)=={} and not c.engine.ahead

def test_a_client_that_left_is_not_followed():
    with served(Engine(script, hold=lambda r: not r.prefill_only)) as c:
        with c.stream('POST', CHAT, json=body(CHAT, stream=True)) as r: next(r.iter_lines())
        until(lambda: c.engine.aborted, 'the answer is stopped')
        assert not c.engine.ahead and outcomes(c)=={}

def test_nothing_is_begun_while_requests_wait():
    with served() as c:
        c.engine.said = dict(num_requests_waiting=1)
        asked(c, CHAT)
        assert outcomes(c)==dict(begun=1, given_up=1) and not c.engine.ahead
        c.engine.said = {}
        asked(c, CHAT)
        assert outcomes(c)==dict(begun=2, given_up=1, finished=1)

def test_nothing_is_needed_twice():
    "A template whose next prompt has no more than this one"
    flat = ChatTemplate('{% for m in messages if m.role=="user" %}<|im_start|>{{ m.content }}{% endfor %}')
    engine = Engine(script)
    app = app_of(engine, TOK, flat, parsers=(None,None))
    with running(app) as url: 
        c = httpx.Client(base_url=url, timeout=WAIT)
        c.service,c.engine = app.state.service,engine
        asked(c, CHAT)
        # all that is new is the mark before the next question
        assert outcomes(c)==dict(begun=1, finished=1) and len(engine.ahead[0].prompt)==len(engine.real[0].prompt)+1
        c.close()

def fails(where, e):
    "A service where `where` fails once the answer is there"
    def broken(*args, **kw): raise e
    return broken

@pytest.mark.parametrize('e', [QueueFullError('full'), KeyError('a secret')], ids=lambda e: type(e).__name__)
def test_a_fault_of_what_follows_stays_there(e, caplog):
    with served() as c:
        def submit(r):
            if r.prefill_only: raise e
            return Engine.submit(c.engine, r)
        c.engine.submit = submit
        for path in TALKS: asked(c, path)
        assert outcomes(c)==dict(begun=3, given_up=3)
        del c.engine.submit
        class Broken:
            def render(self, *args, **kw): raise e
        whole = c.service.template
        c.service.template = lambda u: Broken() if asyncio.current_task().get_coro().__name__=='_follow' else whole(u)
        for path in TALKS: asked(c, path)
        assert outcomes(c)==dict(begun=6, given_up=6)
        c.service.follow.begin = fails('begin', e)
        for path in TALKS: asked(c, path)
        del c.service.follow.begin
        c.service.template = whole
        asked(c, CHAT)
        assert outcomes(c)==dict(begun=7, given_up=6, finished=1)

def test_an_engine_that_fails_is_given_up():
    with served() as c:
        class Failing(Line):
            async def __anext__(self):
                self.over = True
                return Event(self.r.id, finish='error', error='no room', code='out_of_memory')
        def submit(r): return Failing(c.engine, r, []) if r.prefill_only else Engine.submit(c.engine, r)
        c.engine.submit = submit
        asked(c, CHAT)
        assert outcomes(c)==dict(begun=1, given_up=1)

def test_a_server_that_stops_takes_them_back():
    "What is held is aborted, and shutting down does not wait for it"
    with served(Engine(script, hold=lambda r: r.prefill_only)) as c:
        asked(c, CHAT)
        until(lambda: c.engine.ahead, 'it is begun')
        s = c.service
        assert s.metrics.of('tiny').next_turn_prefills==dict(begun=1)
    assert c.engine.aborted==c.engine.ahead
    assert s.metrics.of('tiny').next_turn_prefills==dict(begun=1, given_up=1) and not s.tasks

def test_a_drain_begins_none():
    with served() as c:
        c.engine.hold = lambda r: False
        begin = c.service.follow.begin
        def late(*args):
            c.service.models.draining = True
            try: begin(*args)
            finally: c.service.models.draining = False
        c.service.follow.begin = late
        asked(c, CHAT)
        assert outcomes(c)=={} and not c.engine.ahead

# -- a worker in a process of its own ---------------------------------------------------------------

def quiet(rid, text='<endless>'):
    return Request(rid, tuple(text.encode()), SamplingParams(max_tokens=10**6), prefill_only=True)

@running_test
async def test_they_take_no_place():
    "Neither of the queue, nor of what keeps a model from being unloaded"
    async with gateway(model(max_queue=2)) as ms:
        r,m = (await ms.get()).runner,ms.all[0]
        held = [r.submit(quiet(f'q{i}')) for i in range(5)]
        for s in held: await asyncio.wait_for(anext(s), WAIT)
        assert r.running==0 and r.idle.is_set() and len(r._streams)==5
        real = [r.submit(Request(f'r{i}', tuple(b'<endless>'), SamplingParams())) for i in range(2)]
        assert r.running==2 and not r.idle.is_set()
        with pytest.raises(QueueFullError): r.submit(Request('r2', tuple(b'hello'), SamplingParams()))
        held.append(r.submit(quiet('q5')))
        for s in real: s.abort()
        for s in real: assert [e async for e in s][-1].finish=='abort'
        await happens(r.idle.is_set, 'nobody waits any more')
        assert len(r._streams)==6
        await asyncio.wait_for(m.stop(10**6), WAIT) # a drain of days does not wait for them
        assert m.state=='unloaded'
        for s in held: assert [e async for e in s][-1].finish in ('abort','error')
        assert not r._streams and not r._aside and not r._numbers

@running_test
async def test_they_end_with_their_process():
    async with gateway(model()) as ms:
        r,m = (await ms.get()).runner,ms.all[0]
        s = r.submit(quiet('q'))
        await asyncio.wait_for(anext(s), WAIT)
        m.child.kill()
        assert [e async for e in s][-1].finish=='error' and not r._aside
        await happens(lambda: ms.healthy, 'another process')
        assert r.idle.is_set() and not r._streams

def test_a_request_crosses_the_link():
    from atlas.service.link import pack_event,pack_request,unpack_event,unpack_request
    r = Request('a', (1,2,3), SamplingParams(), priority=LAST, salt='\u00e9', boundaries=(1,3), prefill_only=True)
    assert unpack_request(pack_request(r))==r
    e = Event('a', 5, cached=64)
    assert unpack_event('a', pack_event(1, e)).cached==64

# -- numbers of the engine --------------------------------------------------------------------------

NAMES = '''prefix_cache_queries_total prefix_cache_hits_total prefix_cache_blocks prefix_cache_reclaimable_blocks
    prefix_cache_snapshots prefix_cache_evictions_total prefix_cache_snapshot_evictions_total
    prefix_cache_restores_total kv_spill_written_bytes_total kv_spill_read_bytes_total kv_spill_used_bytes
    kv_spill_errors_total prefill_only_requests_total kv_blocks_live'''.split()

def test_numbers_of_the_cache_are_passed_on():
    assert set(NAMES)<=_engine.keys()
    with served() as c:
        c.engine.said = {k:i+1 for i,k in enumerate(NAMES)}
        text = c.get('/metrics').text
    for i,k in enumerate(NAMES):
        assert f'atlas:{k}{{model_name="tiny"}} {i+1}.0\n' in text
        kind = 'counter' if k.endswith('_total') else 'gauge'
        assert re.search(rf'# TYPE atlas:{k.removesuffix("_total")}(_total)? {kind}\n', text)

# -- in process -------------------------------------------------------------------------------------

def test_in_process():
    from atlas.use.llm import LLM
    llm = LLM('tiny', 'cpu', show=False)
    try:
        seen,request = [],llm.request
        def kept(*args, **kw):
            seen.append(request(*args, **kw))
            return seen[-1]
        llm.request = kept
        out = llm.chat([dict(role='user', content='Hi')], SamplingParams(max_tokens=2, temperature=0))
        assert set(out.usage)=={'prompt_tokens','completion_tokens','total_tokens','cached_tokens'}
        assert 0<=out.usage['cached_tokens']<out.usage['prompt_tokens']
        r = seen[0]
        assert [TOK.token(r.prompt[i-1]) for i in r.boundaries]==['<|im_end|>']
        llm.generate([5,END,6], SamplingParams(max_tokens=1))
        assert seen[1].boundaries==(2,)
    finally: llm.close()

# -- any conversation -------------------------------------------------------------------------------

WORDS = st.text(st.sampled_from('aZ0 .\n\t"\'{}<>|é\u2028漢'), max_size=12)|st.sampled_from(
    ['<|im_end|>','</think>','<tool_response>','  ','\n\n','user'])
CALLS = st.lists(st.just(dict(name='add', arguments='{"a": 1}')), max_size=2)
PLAIN = ChatTemplate('{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}')

def message(role, text, thought='', calls=()):
    m = dict(role=role, content=text)
    if thought: m['reasoning_content'] = thought
    if calls: m['tool_calls'] = [dict(id=f'c{i}', type='function', function=f) for i,f in enumerate(calls)]
    return m

@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(st.tuples(WORDS, WORDS), max_size=3), WORDS, WORDS, WORDS, CALLS, WORDS)
def test_foreseen_is_what_comes(before, question, said, thought, calls, words):
    "Whatever is said next, the next prompt begins with what was foreseen"
    messages = [m for a,b in before for m in (message('user', a), message('assistant', b))]
    messages.append(message('user', question))
    answer = message('assistant', said, thought, calls)
    nxt = [message('tool', words)|dict(tool_call_id=f'c{i}') for i,_ in enumerate(calls)]
    nxt = nxt or [message('user', words)]
    plain = byte_tokenizer()
    for t,tok,marks in (TINY.template,TOK,TurnMarks(TOK, TINY.eos_ids)), (PLAIN,plain,TurnMarks(plain)):
        def encode(text): return tok.encode(text, add_special=False)
        f = foresee(t.render, encode, marks, messages, answer)
        prompt = encode(t.render([*messages, answer, *nxt]))
        assert prompt[:len(f)]==f
        last = encode(t.render(messages))
        assert t is PLAIN or len(f)>=shared(prompt, last), 'more than the last prompt had'
        at = marks.boundaries(prompt)
        assert all(0<i<=len(prompt) for i in at) and list(at)==sorted(set(at)) and len(at)<=256
