"""What a prefix cache needs of the service, and what it says of it: salts, places where messages
end, cached tokens in every API, and next turns that are prefilled while nobody waits.

The text side of `tiny` is real; its engine is a script that remembers what it was asked.
A client of each API sends back what it was given, and its next prompt must begin as foreseen."""
import asyncio,json,re
from contextlib import contextmanager
from types import SimpleNamespace
import httpx,pytest
from hypothesis import HealthCheck,given,settings,strategies as st
from atlas.ground.core import ConfigError,QueueFullError,RequestError
from atlas.ground.options import EngineConfig
from atlas.ground.requests import Event,Request,SamplingParams
from atlas.service.gateway import Answers,_app,serve
from atlas.service.http import ApiKeys,Rules
from atlas.service.log import configure
from atlas.service.metrics import _engine
from atlas.service.reanchor import LAST,Ahead
from atlas.service.service import Prompt,ReadyModel
from atlas.text.chat import ChatTemplate
from atlas.text.images import expand_images,tokens_of
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
    if path==TEXT:
        return dict(prompt=text)|kw
    if path==RESPONSES:
        return dict(input=text, store=False)|kw
    limit = dict(max_tokens=200) if path==MESSAGES else {}
    return limit|dict(messages=[dict(role='user', content=text)])|kw

# -- an engine that remembers ------------------------------------------------------------------

class Line:
    "An answer, a token at a time; then nothing, if it is `held`"
    def __init__(self, engine, r, ids):
        self.engine,self.r,self.ids = engine,r,ids
        self.over = False
    def __aiter__(self): return self
    async def __anext__(self):
        await asyncio.sleep(0)
        if self.over:
            raise StopAsyncIteration
        if not self.ids:
            await asyncio.Event().wait()
        n = len(self.ids)
        i,*self.ids = self.ids
        first = n==self.n
        self.over = not self.ids and not self.held
        limit = self.r.params.max_tokens
        cut = limit is not None and self.n-n+1==limit
        finish = 'stop' if self.over else 'length' if cut else None
        return Event(
            self.r.id, i, finish=finish,
            cached=self.engine.cached if first else None)
    def abort(self):
        if self.over:
            return
        self.over = True
        self.engine.aborted.append(self.r)

class Engine:
    "A runner: says what `script` makes of the text of a prompt"
    healthy = True
    def __init__(self, script, cached=0, hold=lambda r: False):
        self.script,self.cached,self.hold = script,cached,hold
        self.info = dict(name='tiny', max_seq_len=4096, vocab_size=TOK.vocab_size)
        self.info['prefix_caching'] = True
        self.asked,self.aborted,self.said = [],[],{}
    def submit(self, r):
        self.asked.append(r)
        ids = [None]
        if not r.prefill_only:
            text = self.script(TOK.decode(list(r.prompt), skip_special=False))
            ids = [*TOK.encode(text, add_special=False), END]
        line = Line(self, r, ids)
        line.n,line.held = len(ids),self.hold(r)
        if line.held:
            line.ids = ids[:-1]
        return line
    def stats(self): return self.said
    def close(self, drain=0.):
        pass
    @property
    def real(self): return [r for r in self.asked if not r.prefill_only]
    @property
    def ahead(self): return [r for r in self.asked if r.prefill_only]

def script(prompt):
    "An answer, or a call where there are tools and no result yet"
    if 'sum' in prompt and '<tool_response>' not in prompt:
        return THOUGHT+CALL
    return 'Let me think.</think>\n\nGrass, and now and then hay.'

@contextmanager
def served(engine=None, template=TINY.template, **kw):
    "The service in front of an engine; gives a client, with `engine`"
    engine = engine or Engine(script)
    app = app_of(engine, TOK, template, parsers=TINY.parsers, **kw)
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

# -- salts -------------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def client():
    with served() as c:
        yield c

@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize('path', APIS)
def test_a_salt_reaches_the_engine(client, path, stream):
    for salt,want in (('mine','mine'), (None,''), ('','')):
        r = asked(client, path, cache_salt=salt, stream=stream)
        assert 'x-atlas-ignored' not in r.headers
        assert client.engine.real[-1].salt==want
    outcomes(client)
    assert {r.salt for r in client.engine.ahead}<={'mine',''}

NO_SALTS = 3,True,['a'],dict(a=1),'x'*2000

@pytest.mark.parametrize('salt', NO_SALTS, ids=str)
@pytest.mark.parametrize('path', APIS)
def test_a_salt_is_text(client, path, salt):
    n = len(client.engine.asked)
    r = client.post(path, json=body(path, cache_salt=salt))
    e = r.json()['error']
    assert r.status_code==400 and 'cache_salt' in e['message']
    assert e['type']=='invalid_request_error'
    if path!=MESSAGES:
        assert e['param']=='cache_salt'
    assert len(client.engine.asked)==n

@pytest.mark.parametrize('path', APIS)
def test_half_a_surrogate_is_no_salt(client, path):
    raw = json.dumps(body(path)|dict(cache_salt='SALT')).replace('SALT', '\\ud800')
    r = client.post(path, content=raw, headers={'content-type':'application/json'})
    assert r.status_code==400, r.text

KEYS = ApiKeys({'sesame':'user', 'onion':'admin', 'garlic':'user same', 'leek':'user same'})

def salts_of(client, path, key, **kw):
    "The salt that a question with this key has"
    r = client.post(
        path, json=body(path, **kw), headers=dict(authorization=f'Bearer {key}'))
    assert r.status_code==200, r.text
    return client.engine.real[-1].salt

NAMES = 'sesame','onion','garlic','leek'

@pytest.fixture(scope='module')
def apart():
    "A service that keeps API keys apart"
    with served(rules=Rules(keys=KEYS), salt_keys=True) as c:
        yield c

def test_each_key_has_its_salt(apart):
    "The same in every API, and another one for each key, also where keys share a name"
    salts = [{salts_of(apart, p, k) for p in APIS} for k in NAMES]
    assert all(len(s)==1 for s in salts)
    assert len(set.union(*salts))==4

def test_a_request_has_its_own_beside(apart):
    plain = {salts_of(apart, CHAT, k) for k in NAMES}
    own = {salts_of(apart, p, k, cache_salt='a') for p in APIS for k in NAMES}
    assert len(own)==4 and not own & plain
    assert not any(k in salt for k in NAMES for salt in own), 'a salt does not tell the key'

def test_a_next_turn_has_the_salt_of_its_own(apart):
    salts_of(apart, CHAT, 'leek', cache_salt='b')
    outcomes(apart)
    assert apart.engine.ahead[-1].salt==apart.engine.real[-1].salt

def test_keys_share_unless_told():
    with served(rules=Rules(keys=KEYS)) as c:
        assert {salts_of(c, p, k) for p in APIS for k in ('sesame','onion')}=={''}
        assert salts_of(c, CHAT, 'sesame', cache_salt='a')=='a'

def test_salts_of_keys_need_keys(monkeypatch):
    for k in 'ATLAS_API_KEY','ATLAS_ADMIN_KEY':
        monkeypatch.delenv(k, raising=False)
    with pytest.raises(ConfigError, match='no API key'):
        serve('tiny', answers=Answers(cache_salt_per_key=True))

# -- where messages end ------------------------------------------------------------------------

def test_boundaries_are_ends_of_messages(client):
    words = 'What does a cow eat?','Grass.','And a cat?'
    roles = 'user','assistant','user'
    talk = [dict(role=r, content=w) for r,w in zip(roles, words)]
    asked(client, CHAT, messages=talk)
    r = client.engine.real[-1]
    assert [TOK.token(r.prompt[i-1]) for i in r.boundaries]==['<|im_end|>']*3
    text = TINY.template.render(talk)
    asked(client, TEXT, text=text)
    assert client.engine.real[-1].boundaries==r.boundaries, 'a prompt of text has them, too'

def test_boundaries_are_bounded(client):
    roles = ['user','assistant']*200+['user']
    talk = [dict(role=r, content='a') for r in roles]
    asked(client, CHAT, messages=talk)
    r = client.engine.real[-1]
    assert len(r.boundaries)==256 and r.boundaries[-1]>len(r.prompt)-8
    assert list(r.boundaries)==sorted(set(r.boundaries))

# -- cached tokens -----------------------------------------------------------------------------

def last_usage(r):
    "The `usage` of a body, or the last one of a stream"
    if r.headers['content-type']=='application/json':
        return r.json()['usage']
    lines = [l[6:] for l in r.text.splitlines() if l.startswith('data: {')]
    events = [json.loads(l) for l in lines]
    bodies = [e.get('response') or e for e in events]
    return [b['usage'] for b in bodies if b.get('usage')][-1]

def usage_of(path, r):
    "(all tokens of the prompt, those of them from the cache) as an API says them"
    u = last_usage(r)
    if path==MESSAGES:
        assert u['cache_creation_input_tokens']==0 and u['input_tokens']>=0
        cached = u['cache_read_input_tokens']
        return u['input_tokens']+cached,cached
    if path==RESPONSES:
        assert u['total_tokens']==u['input_tokens']+u['output_tokens']
        return u['input_tokens'],u['input_tokens_details']['cached_tokens']
    assert u['total_tokens']==u['prompt_tokens']+u['completion_tokens']
    return u['prompt_tokens'],u['prompt_tokens_details']['cached_tokens']

@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize('path', APIS)
def test_cached_tokens_are_told(path, stream):
    "None, some, and all but the last of a prompt"
    more = dict(stream=stream)
    if stream and path in (CHAT,TEXT):
        more['stream_options'] = dict(include_usage=True)
    with served() as c:
        asked(c, path)
        n = len(c.engine.real[0].prompt)
        for cached in 0,5,None,n-1:
            c.engine.cached = cached
            r = asked(c, path, **more)
            assert usage_of(path, r)==(n, cached or 0)
        counts = c.service.metrics.of('tiny')
        assert (counts.prompt_tokens_cached, counts.prompt_tokens)==(5+n-1, 5*n)
        text = c.get('/metrics').text
        assert f'atlas:prompt_tokens_cached_total{{model_name="tiny"}} {4+n}.0' in text

def test_choices_share_what_is_cached():
    "A prompt counts once, however many answers it has"
    with served(Engine(script, cached=7)) as c:
        r = asked(c, CHAT, n=3)
        n,cached = usage_of(CHAT, r)
        assert cached==7<n
        r = asked(c, TEXT, prompt=['What?','Why?'], n=2)
        assert usage_of(TEXT, r)[1]==14
        assert c.service.metrics.of('tiny').prompt_tokens_cached==7+14

def test_the_log_tells_of_the_cache(capfd):
    from atlas.service.log import Access
    engine = Engine(script, cached=9)
    app = app_of(engine, TOK, TINY.template, parsers=TINY.parsers)
    app.add_middleware(Access)
    sink = configure('json', 'info')
    try:
        with running(app) as url:
            httpx.post(url+CHAT, json=body(CHAT), timeout=WAIT)
    finally:
        sink.close()
    text = capfd.readouterr().err
    lines = [json.loads(l) for l in text.splitlines() if l[:1]=='{']
    said = [l for l in lines if l.get('event')=='request']
    assert [l['cached_tokens'] for l in said]==[9], 'one line, and none for what was prefilled'

# -- next turns --------------------------------------------------------------------------------

class Chat:
    "A client of chat completions, which sends thoughts back or does not"
    path,tools = CHAT,[
        dict(type='function', function=dict(name='add', parameters=SCHEMA))]
    returns = False
    def __init__(self):
        self.messages = []
    def say(self, text):
        self.messages.append(dict(role='user', content=text))
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

SUM = 'What is the sum of 1 and 2?'
TALK = 'What does a cow eat?',SUM,None,'And 3 and 4?','Thanks.' # None: the result of a call

def turn(client, talk, text):
    "One turn of a client: it speaks, or says what its tool said; was it told to call?"
    if text:
        talk.say(text)
    else:
        talk.result('3')
    r = client.post(
        talk.path, json=talk.body()|dict(tools=talk.tools))
    assert r.status_code==200, r.text
    return talk.heard(r.json())

@pytest.mark.parametrize('kind', CLIENTS, ids=lambda k: k.__name__)
def test_the_next_turn_begins_as_foreseen(kind):
    """A question, a call, its result, an answer, two more questions.

    What was prefilled behind each answer is a prefix of the next prompt,
    and lacks only what the client says anew"""
    with served() as c:
        talk,engine = kind(),c.engine
        for i,text in enumerate(TALK):
            assert turn(c, talk, text)==(text==SUM)
            assert outcomes(c)==dict(begun=i+1, finished=i+1)
        for f,r in zip(engine.ahead, engine.real[1:]):
            n = len(f.prompt)
            assert r.prompt[:n]==f.prompt, TOK.decode(
                list(r.prompt), skip_special=False)
            assert 0<len(r.prompt)-n<45

def test_it_is_nobodys_request():
    "It goes last, says nothing, and is not counted among the requests"
    with served() as c:
        for text in TALK:
            asked(c, CHAT, text=text or 'Well?')
        assert outcomes(c)==dict(begun=5, finished=5)
        for real,after in zip(c.engine.real, c.engine.ahead):
            assert after.priority==LAST>2**31-1 and after.params.max_tokens==1
            assert after.id==real.id.rpartition('-')[0]+'-next' and after.boundaries
        counts = c.service.metrics.of('tiny')
        assert counts.requests_submitted==sum(counts.request_success.values())==5
        line = 'next_turn_prefills_total{model_name="tiny",outcome="finished"} 5.0'
        assert line in c.get('/metrics').text

def test_a_guess_may_be_wrong():
    "A client that returns thoughts, and has not done so before: it is foreseen without them"
    with served() as c:
        talk = Thoughtful()
        assert turn(c, talk, SUM) and not turn(c, talk, None)
        (first,second),f = c.engine.real,c.engine.ahead[0].prompt
        assert shared(f, second.prompt)<len(f)
        assert shared(f, second.prompt)<=shared(first.prompt, second.prompt)
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

@pytest.mark.parametrize('on', [False, True])
def test_the_gateway_passes_both_on(on):
    app = _app(None, Rules(), None, Answers(cache_salt_per_key=on, prefill_next_turn=on))
    s = app.state.service
    assert (s.salt_keys, s.follow is not None)==(on, on)

SHOWS = '''
{%- for m in messages -%}
<|im_start|>
{%- if m.content is string -%}{{ m.content }}
{%- else -%}{%- for p in m.content -%}{{ p.text or '<|image|>' }}{%- endfor -%}
{%- endif -%}<|im_end|>
{%- endfor -%}'''

def looked(tok, pad, template, *grids):
    "A conversation about images of these grids that was answered"
    spec = SimpleNamespace(token=pad, merge=2)
    u = ReadyModel('eyes', ['eyes'], dict(max_seq_len=999), tok, spec=spec)
    messages = [message('user', [dict(type='image')]*len(grids))]
    ids = tok.encode(template.render(messages))
    ids = expand_images(ids, pad, [tokens_of(g, 2) for g in grids])
    p = Prompt(ids, images=tuple((None, g) for g in grids), messages=messages)
    return Ahead(u, 'x', p, message('assistant', 'Two cats.'), None, {})

def test_images_are_those_of_the_prompt():
    "Their marks become as many tokens as there, and nothing is looked at again"
    tok = byte_tokenizer('<|im_start|>','<|im_end|>','<|image|>')
    pad, = tok.encode('<|image|>')
    template = ChatTemplate(SHOWS)
    a = looked(tok, pad, template, (1,4,8), (1,2,2))
    p,found = a.prompt,a.tokens(template)
    assert found[:len(p.ids)]==p.ids and found.count(pad)==9
    assert a.request(found).images is p.images
    p.images = p.images[:1]
    with pytest.raises(RequestError):
        a.tokens(template)

def test_a_client_that_left_is_not_followed():
    with served(Engine(script, hold=lambda r: not r.prefill_only)) as c:
        question = body(CHAT, stream=True)
        with c.stream('POST', CHAT, json=question) as r:
            next(r.iter_lines())
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

QUESTIONS = '''
{%- for m in messages if m.role=="user" -%}<|im_start|>{{ m.content }}{%- endfor -%}
{%- if messages|length>1 -%}<|im_end|>{%- endif -%}'''

def test_nothing_is_needed_twice():
    "A template that shows only questions: the next prompt begins as this one, but for a mark"
    with served(template=ChatTemplate(QUESTIONS)) as c:
        asked(c, CHAT)
        assert outcomes(c)==dict(begun=1, finished=1)
        assert c.engine.ahead[0].prompt[:-1]==c.engine.real[0].prompt
    shows_last = ChatTemplate('<|im_start|>{{ messages[-1].content }}')
    with served(template=shows_last) as c:
        asked(c, CHAT)
        assert outcomes(c)==dict(begun=1, needless=1) and not c.engine.ahead

def fails(e):
    "A function that fails"
    def broken(*args, **kw):
        raise e
    return broken

FAULTS = QueueFullError('full'),KeyError('a secret')

@pytest.fixture(params=FAULTS, ids=lambda e: type(e).__name__)
def fault(request): return request.param

def test_what_cannot_be_submitted(fault):
    with served() as c:
        def submit(r):
            if r.prefill_only:
                raise fault
            return Engine.submit(c.engine, r)
        c.engine.submit = submit
        for path in TALKS:
            asked(c, path)
        assert outcomes(c)==dict(begun=3, given_up=3)

def test_what_cannot_be_rendered(fault):
    with served() as c:
        whole = c.service.template
        def template(u):
            following = asyncio.current_task().get_coro().__name__=='_follow'
            return SimpleNamespace(render=fails(fault)) if following else whole(u)
        c.service.template = template
        for path in TALKS:
            asked(c, path)
        assert outcomes(c)==dict(begun=3, given_up=3)

def test_what_cannot_be_begun(fault):
    with served() as c:
        c.service.follow.begin = fails(fault)
        for path in TALKS:
            asked(c, path)
        del c.service.follow.begin
        asked(c, CHAT)
        assert outcomes(c)==dict(begun=1, finished=1)

def test_an_engine_that_fails_is_given_up():
    with served() as c:
        class Failing(Line):
            async def __anext__(self):
                self.over = True
                return Event(self.r.id, finish='error', error='no room', code='out_of_memory')
        def submit(r):
            if r.prefill_only:
                return Failing(c.engine, r, [])
            return Engine.submit(c.engine, r)
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
        def goes(r): return False
        c.engine.hold = goes
        begin = c.service.follow.begin
        def late(*args):
            c.service.models.draining = True
            try:
                begin(*args)
            finally:
                c.service.models.draining = False
        c.service.follow.begin = late
        asked(c, CHAT)
        assert outcomes(c)=={} and not c.engine.ahead

# -- a worker in a process of its own ----------------------------------------------------------

def endless(runner, rid, **kw):
    "A request that never ends"
    params = SamplingParams(max_tokens=10**6)
    return runner.submit(Request(rid, tuple(b'<endless>'), params, **kw))

async def quiet(runner, n):
    "`n` that only fill the cache; they have begun"
    held = [endless(runner, f'q{i}', prefill_only=True) for i in range(n)]
    for s in held:
        await asyncio.wait_for(anext(s), WAIT)
    return held

async def end_of(s):
    "How a stream ended"
    async for e in s:
        last = e
    return last.finish

@running_test
async def test_they_take_no_place_of_the_queue():
    async with gateway(model(max_queue=2)) as ms:
        r = (await ms.get()).runner
        await quiet(r, 5)
        assert r.running==0 and r.idle.is_set() and len(r._streams)==5
        real = [endless(r, f'r{i}') for i in range(2)]
        assert r.running==2 and not r.idle.is_set()
        with pytest.raises(QueueFullError):
            endless(r, 'r2')
        endless(r, 'q5', prefill_only=True)
        for s in real:
            s.abort()
        assert [await end_of(s) for s in real]==['abort']*2
        await happens(r.idle.is_set, 'nobody waits any more')
        assert len(r._streams)==6

@running_test
async def test_a_drain_does_not_wait_for_them():
    async with gateway(model()) as ms:
        r,m = (await ms.get()).runner,ms.all[0]
        held = await quiet(r, 3)
        days = 10**6
        assert await asyncio.wait_for(r.drain(days), WAIT)
        assert [await end_of(s) for s in held]==['abort']*3
        assert not r._streams and not r._aside and not r._numbers and m.child
        await asyncio.wait_for(m.stop(days), WAIT)
        assert m.state=='unloaded'

@running_test
async def test_they_end_with_their_process():
    async with gateway(model()) as ms:
        r,m = (await ms.get()).runner,ms.all[0]
        s, = await quiet(r, 1)
        m.child.kill()
        assert await end_of(s)=='error' and not r._aside
        await happens(lambda: ms.healthy, 'another process')
        assert r.idle.is_set() and not r._streams

def test_a_request_crosses_the_link():
    from atlas.service.link import pack_event,pack_request,unpack_event,unpack_request
    more = dict(salt='\u00e9', boundaries=(1,3), prefill_only=True)
    r = Request('a', (1,2,3), SamplingParams(), priority=LAST, **more)
    assert unpack_request(pack_request(r))==r
    e = Event('a', 5, cached=64)
    assert unpack_event('a', pack_event(1, e)).cached==64

# -- numbers of the engine ---------------------------------------------------------------------

NUMBERS = '''prefix_cache_queries_total prefix_cache_hits_total
    prefix_cache_blocks prefix_cache_reclaimable_blocks prefix_cache_snapshots
    prefix_cache_evictions_total prefix_cache_snapshot_evictions_total prefix_cache_restores_total
    kv_spill_written_bytes_total kv_spill_read_bytes_total kv_spill_used_bytes
    kv_spill_errors_total kv_spill_dropped_total kv_blocks_live'''.split()

def test_numbers_of_the_cache_are_passed_on():
    assert set(NUMBERS)<=_engine.keys()
    with served() as c:
        c.engine.said = {k:i+1 for i,k in enumerate(NUMBERS)}
        text = c.get('/metrics').text
    for i,k in enumerate(NUMBERS):
        assert f'atlas:{k}{{model_name="tiny"}} {i+1}.0\n' in text
        kind = 'counter' if k.endswith('_total') else 'gauge'
        assert re.search(rf'# TYPE atlas:{k.removesuffix("_total")}(_total)? {kind}\n', text)

def test_numbers_come_from_a_real_engine():
    "None that `/metrics` offers is one that no engine ever tells; of cards that is a rate, too"
    from atlas.engine import roofline # noqa: F401  `compare` is there
    from atlas.use.llm import LLM
    m = LLM('tiny', 'cpu', show=False, kv_spill_gb=.1, speculative=True)
    m.compare(1e9)
    r = Request('a', (10,11,12), SamplingParams(max_tokens=4))
    m.engine.add(r)
    while m.engine.has_work:
        m.engine.step()
    told = m.engine.stats()
    m.close()
    assert set(_engine)<=told.keys()

@pytest.mark.parametrize('fill', [False,True])
def test_what_is_computed_ahead_is_no_hit(fill):
    "The share of tokens found is of prompts that somebody asked"
    from atlas.use.llm import LLM
    m = LLM('tiny', 'cpu', show=False)
    ids = tuple(range(10, 210))
    for i,n in enumerate((130,200)):
        r = Request(
            str(i), ids[:n], SamplingParams(max_tokens=1),
            prefill_only=fill and i>0)
        m.engine.add(r)
        while m.engine.has_work:
            m.engine.step()
    s = m.engine.stats()
    m.close()
    found = s['prefix_cache_queries_total'],s['prefix_cache_hits_total']
    assert found==((130,0) if fill else (330,128))

# -- in process --------------------------------------------------------------------------------

@pytest.fixture(scope='module')
def llm():
    from atlas.use.llm import LLM
    m = LLM('tiny', 'cpu', show=False)
    yield m
    m.close()

def test_usage_in_process(llm):
    out = llm.generate('Hi', SamplingParams(max_tokens=2))
    u = out.usage
    assert set(u)=={'prompt_tokens','completion_tokens','total_tokens','cached_tokens'}
    assert 0<=u['cached_tokens']<u['prompt_tokens']

def test_boundaries_in_process(llm, monkeypatch):
    seen,request = [],llm.request
    def kept(*args, **kw):
        seen.append(request(*args, **kw))
        return seen[-1]
    monkeypatch.setattr(llm, 'request', kept)
    one = SamplingParams(max_tokens=1)
    llm.chat([dict(role='user', content='Hi')], one)
    llm.generate([5,END,6], one)
    chat,bare = seen
    assert [TOK.token(chat.prompt[i-1]) for i in chat.boundaries]==['<|im_end|>']
    assert bare.boundaries==(2,)

# -- any conversation --------------------------------------------------------------------------

WORDS = st.text(st.sampled_from('aZ0 .\n\t"\'{}<>|é\u2028漢'), max_size=12)|st.sampled_from(
    ['<|im_end|>','</think>','<tool_response>','  ','\n\n','user'])
CALLS = st.integers(0, 2)
PLAIN = ChatTemplate('{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}')
BYTES = byte_tokenizer()
ADD = dict(name='add', arguments='{"a": 1}')

def message(role, text, thought='', calls=0):
    m = dict(role=role, content=text)
    if thought:
        m['reasoning_content'] = thought
    made = [dict(id=f'c{i}', type='function', function=ADD) for i in range(calls)]
    return m|dict(tool_calls=made) if made else m

def next_of(answer, words):
    "What a client says after an answer"
    calls = answer.get('tool_calls', ())
    results = [message('tool', words)|dict(tool_call_id=c['id']) for c in calls]
    return results or [message('user', words)]

@st.composite
def conversations(draw):
    "Messages, an answer to them, and what is said next"
    n = draw(st.integers(0, 3))
    roles = ['user','assistant']*n+['user']
    messages = [message(r, draw(WORDS)) for r in roles]
    answer = message('assistant', draw(WORDS), draw(WORDS), draw(CALLS))
    return messages,answer,next_of(answer, draw(WORDS))

@pytest.mark.parametrize(
    'template,tok', [(TINY.template,TOK), (PLAIN,BYTES)],
    ids=['tiny','plain'])
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(conversations())
def test_foreseen_is_what_comes(template, tok, talk):
    "Whatever is said next, the next prompt begins with what was foreseen"
    messages,answer,then = talk
    marks = TurnMarks(tok, TINY.eos_ids if tok is TOK else ())
    def encode(text): return tok.encode(text, add_special=False)
    f = foresee(template.render, encode, marks, messages, answer)
    prompt = encode(template.render([*messages, answer, *then]))
    assert prompt[:len(f)]==f
    last = encode(template.render(messages))
    assert tok is BYTES or len(f)>=shared(prompt, last), 'more than the last prompt had'
    at = marks.boundaries(prompt)
    assert list(at)==sorted(set(at)) and all(0<i<=len(prompt) for i in at)

# -- the chat page -----------------------------------------------------------------------------

def test_the_page_tells_of_the_cache():
    "How much of the prompt came from the cache stands below an answer, if any did"
    from helpers.browser import browser
    with browser() as b,served(Engine(script)) as c:
        page = b.open(str(c.base_url))
        page.until('models.length')
        for n,want in enumerate(('',', 1,234 cached')):
            c.engine.cached = 1234*n
            page.js('$("box").focus()')
            page.type('What does a cow eat?')
            page.enter()
            page.until(f'!running && state.messages.length==={2*n+2}')
            said = page.js('[...document.querySelectorAll(".meta")].at(-1).textContent')
            assert re.search(rf'prompt \d+{want}Copy', said), said
        assert not page.logged
