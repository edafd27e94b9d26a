"""The server from outside: real sockets, OpenAI's own client, clients that misbehave, and a
scripted runner behind it."""
import asyncio,json,re,signal,socket,struct,subprocess,sys,threading
from contextlib import closing,contextmanager
from dataclasses import dataclass,replace
from pathlib import Path
import atlas,httpx,openai,pytest,uvicorn
from hypothesis import HealthCheck,example,given,settings,strategies as st
from starlette.testclient import TestClient
from atlas.text.chat import ChatTemplate
from atlas.ground.core import ContextLengthError,QueueFullError
from atlas.service.models import Models
from atlas.ground.requests import Event
from atlas.service.management import page
from atlas.service.server import PortError,create_app,listen
from atlas.text.tokenizer import byte_tokenizer

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from inprocess import always,app_of,threaded  # noqa: E402
from helpers.waiting import WAIT,until  # noqa: E402

END = 256  # the end-of-sequence token

tok = byte_tokenizer('<end>')
A = tok.encode('A')[0]
template = ChatTemplate(
    '{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: ')
HELLO = [dict(role='user', content='Say something')]

class FakeRunner:
    """Says `text` to everyone; `hold` tokens only and then nothing, `endless` always, or `fail`
    after some tokens"""
    def __init__(
        self, text='Hello there, reader.', hold=None, endless=False, fail=None,
        room=10**9, max_seq_len=1000
    ):
        self.ids = [*tok.encode(text), END]
        self.hold = hold
        self.endless = endless
        self.fail = fail
        self.room = room
        self.info = dict(name='fake', max_seq_len=max_seq_len, vocab_size=257)
        self.healthy = True
        self.closed = False
        self.seen = []
        self.arrived = threading.Semaphore(0)
        self.aborted = threading.Semaphore(0)
    def submit(self, r):
        if len(r.prompt)>=self.info['max_seq_len']:
            raise ContextLengthError(
                f'The prompt has {len(r.prompt):,} tokens and the context holds '
                f'{self.info["max_seq_len"]:,}')
        if len(self.seen)>=self.room:
            raise QueueFullError('Too many')
        self.seen.append(r)
        self.arrived.release()
        return FakeStream(self, r)
    def stats(self):
        return dict(
            num_requests_running=len(self.seen), kv_cache_usage_perc=.5, num_preemptions_total=3,
            blocks_used=1)
    def close(self, drain=0.):
        self.closed = True

class FakeStream:
    def __init__(self, runner, r):
        self.runner = runner
        self.r = r
        self.n = 0
        self.over = False
    def __aiter__(self): return self
    async def __anext__(self):
        await asyncio.sleep(0)
        f,n = self.runner,self.n
        if self.over:
            raise StopAsyncIteration
        if n==f.hold:
            await asyncio.Event().wait()
        if n==f.fail:
            self.over = True
            return Event(self.r.id, finish='error', error='The engine failed')
        self.n += 1
        if f.endless:
            return Event(self.r.id, A)
        cut = 'length' if n+1==self.r.params.max_tokens else None
        last = 'stop' if n+1==len(f.ids) else cut
        self.over = last is not None
        top = [(f.ids[n],-.25),(A,-2.)][:self.r.params.logprobs or 0]
        return Event(self.r.id, f.ids[n], -.25, top, finish=last)
    def abort(self):
        if not self.over:
            self.over = True
            self.runner.aborted.release()

@contextmanager
def live(runner, **kw):
    "A real server on a free port"
    up,sock = threading.Event(),listen(port=0)
    models = runner if isinstance(runner, Models) else None
    if models:
        app = create_app(models, on_ready=up.set, **kw)
    else:
        kw = dict(template=template)|kw
        app = app_of(runner, tok, **kw, on_ready=up.set)
    server = uvicorn.Server(uvicorn.Config(app, log_level='critical', timeout_graceful_shutdown=1))
    t = threading.Thread(target=server.run, kwargs=dict(sockets=[sock]), daemon=True)
    t.start()
    assert up.wait(WAIT)
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        t.join(WAIT)
        assert not t.is_alive()

def client_of(port):
    return openai.OpenAI(
        base_url=f'http://127.0.0.1:{port}/v1', api_key='none', max_retries=0, timeout=WAIT)
def local(runner, **kw):
    app = app_of(runner, tok, template, **kw)
    return TestClient(app, raise_server_exceptions=False)
def chat(c, **kw):
    return c.post('/v1/chat/completions', json=dict(messages=HELLO)|kw)
def events(text):
    lines = [l for l in text.splitlines() if l.startswith('data: ') and l!='data: [DONE]']
    return [json.loads(l[6:]) for l in lines]

# ---- OpenAI's own client ----

@pytest.fixture(scope='module')
def served():
    r = FakeRunner()
    with live(r, names=['fake','org/alias']) as port:
        yield r,client_of(port),port

def test_openai_chat(served):
    r,c,_ = served
    a = c.chat.completions.create(model='fake', messages=HELLO, n=2, seed=5)
    assert [x.message.content for x in a.choices]==['Hello there, reader.']*2
    assert [x.index for x in a.choices]==[0,1]
    assert a.choices[0].finish_reason=='stop' and a.usage.completion_tokens==42
    assert a.usage.total_tokens==42+a.usage.prompt_tokens
    assert [x.params.seed for x in r.seen[-2:]]==[5,6]
    assert len({x.id for x in r.seen})==len(r.seen)
    last = r.seen[-1]
    assert tok.decode(last.prompt)=='user: Say something\nassistant: ' and last.params.n==1

def test_openai_chat_logprobs(served):
    _,c,_ = served
    a = c.chat.completions.create(
        model='fake', messages=HELLO, n=2, seed=5, logprobs=True, top_logprobs=2)
    e = a.choices[0].logprobs.content[0]
    assert (e.token, e.logprob, e.bytes)==('H',-.25,[72])
    assert [t.token for t in e.top_logprobs]==['H','A']

def test_openai_chat_stream(served):
    _,c,_ = served
    chunks = list(c.chat.completions.create(
        model='fake', messages=HELLO, n=2, stream=True, max_completion_tokens=5,
        stream_options=dict(include_usage=True)))
    assert chunks[-1].usage.completion_tokens==10 and chunks[-1].choices==[]
    for i in 0,1:
        mine = [x.choices[0] for x in chunks if x.choices and x.choices[0].index==i]
        assert mine[0].delta.role=='assistant'
        assert ''.join(x.delta.content or '' for x in mine)=='Hello'
        assert [x.finish_reason for x in mine if x.finish_reason]==['length']

def test_openai_stream_that_is_gathered(served):
    _,c,_ = served
    with c.chat.completions.stream(model='fake', messages=HELLO) as s:
        assert s.get_final_completion().choices[0].message.content=='Hello there, reader.'

def test_openai_completions(served):
    _,c,_ = served
    a = c.completions.create(
        model='org/alias', prompt=['a','b'], n=2, logprobs=1, stop=', r')
    assert a.model=='org/alias' and [x.text for x in a.choices]==['Hello there']*4
    lps = a.choices[0].logprobs
    assert lps.tokens[:2]==['H','e'] and lps.text_offset[:3]==[0,1,2]
    assert lps.top_logprobs[1]=={'e':-.25}

def test_openai_completions_stream(served):
    _,c,_ = served
    s = list(c.completions.create(model='fake', prompt=[1,2,3], logprobs=0, stream=True))
    assert ''.join(x.choices[0].text for x in s)=='Hello there, reader.'
    assert s[-1].choices[0].finish_reason=='stop'
    assert [o for x in s for o in x.choices[0].logprobs.text_offset][:5]==[0,1,2,3,4]

def test_openai_models(served):
    _,c,_ = served
    assert [m.id for m in c.models.list()]==['fake','org/alias']
    assert c.models.retrieve('org/alias').owned_by=='atlas'
    a = c.with_options(default_headers={'x-request-id':'mine'}).models.with_raw_response.list()
    assert a.headers['x-request-id']=='mine'

def test_openai_errors(served):
    _,c,_ = served
    with pytest.raises(openai.NotFoundError) as e:
        c.models.retrieve('gpt-5')
    assert e.value.code=='model_not_found'
    with pytest.raises(openai.BadRequestError) as e:
        c.completions.create(model='fake', prompt='x'*1234)
    assert e.value.code=='context_length_exceeded'
    assert '1,234' in e.value.message and '1,000' in e.value.message
    with pytest.raises(openai.BadRequestError) as e:
        c.chat.completions.create(model='fake', messages=HELLO, temperature=-1)
    assert e.value.param=='temperature'
    # a bound, not an error
    a = c.completions.create(model='fake', prompt='x', max_tokens=10**6)
    assert a.choices[0].text=='Hello there, reader.'

def test_many_streams(served):
    _,_,port = served
    url = f'http://127.0.0.1:{port}/v1'
    async def one(c, k):
        chunks = await c.completions.create(model='fake', prompt='a', stream=True, max_tokens=k)
        return ''.join([x.choices[0].text async for x in chunks])
    async def go():
        async with openai.AsyncOpenAI(base_url=url, api_key='x', max_retries=0) as c:
            return await asyncio.gather(*(one(c, 1+i%20) for i in range(48)))
    assert asyncio.run(go())==['Hello there, reader.'[:1+i%20] for i in range(48)]

@pytest.mark.parametrize('stream', [False,True])
def test_stop_string_stops_the_engine(stream):
    r = FakeRunner()
    a = chat(local(r), stop='there', stream=stream)
    if stream:
        chunks = [c['choices'][0]['delta'] for c in events(a.text)]
        said = ''.join(d.get('content', '') for d in chunks)
    else:
        said = a.json()['choices'][0]['message']['content']
    assert a.status_code==200 and said=='Hello ' and '"stop_reason":"there"' in a.text
    assert r.aborted.acquire(timeout=0)

# ---- A stream says what the whole answer says ----

@given(
    text=st.text(max_size=60),
    stop=st.lists(st.text('ab ,', min_size=1, max_size=3), max_size=3),
    n=st.integers(1,3),
    limit=st.none()|st.integers(1,30))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
# what str.splitlines, and so many a client, takes for line ends
@example(text='a\x85b\u2028c\u2029d\x1ce', stop=[], n=1, limit=None)
def test_stream_equals_whole(text, stop, n, limit):
    c,kw = local(FakeRunner(text)),dict(stop=stop, n=n, max_tokens=limit)
    whole,out = chat(c, **kw).json(),{}
    for e in events(chat(c, stream=True, stream_options=dict(include_usage=True), **kw).text):
        for x in e['choices']:
            t = out.setdefault(x['index'], ['', None])
            t[0] += x['delta'].get('content') or ''
            t[1] = x['finish_reason']
    told = {x['index']:[x['message']['content'],x['finish_reason']] for x in whole['choices']}
    assert out==told and e['usage']==whole['usage']
    if not stop and limit is None:
        assert out[0]==[text,'stop']

# ---- Bodies that nobody should send ----

def nested(s): return st.lists(s, max_size=4)|st.dictionaries(st.text(max_size=6), s, max_size=3)

numbers = st.integers(-10**40, 10**40)|st.floats()
plain = st.none()|st.booleans()|numbers|st.text(max_size=8)
values = st.recursive(plain, nested, max_leaves=8)
fields = st.sampled_from('''
    messages prompt model temperature top_p top_k min_p n stop seed max_tokens min_tokens logit_bias
    logprobs top_logprobs stream stream_options tools tool_choice response_format stop_token_ids
    ignore_eos presence_penalty repetition_penalty max_completion_tokens priority echo made_up
    structured_outputs guided_json guided_regex guided_choice guided_grammar thinking reasoning
    reasoning_effort thinking_budget enable_thinking chat_template_kwargs prompt_logprobs suffix
    parallel_tool_calls return_token_ids return_timings'''.split())

@given(
    path=st.sampled_from(['/v1/chat/completions','/v1/completions']),
    wrong=st.dictionaries(fields, values, min_size=1, max_size=3),
    inside=st.booleans())
@settings(deadline=None, max_examples=250, suppress_health_check=[HealthCheck.too_slow])
def test_any_body(path, wrong, inside):
    body = dict(messages=HELLO, prompt='x')
    body |= dict(messages=[HELLO[0]|wrong]) if inside else wrong
    r = post(path, json.dumps(body).encode())
    if r.status_code!=200:
        assert r.status_code in (400,404,501) and len(r.text)<2000, r.text
        assert set(r.json()['error'])=={'message','type','param','code'}, r.text

fuzzed = local(FakeRunner('ok'))

def post(path, raw, client=fuzzed):
    "Send bytes that say that they are JSON"
    return client.post(path, content=raw, headers={'content-type':'application/json'})

SCHEMA = dict(
    type='object',
    properties=dict(a=dict(type='integer', minimum=0, enum=[1,2])),
    required=['a'])
def text(t, kind='text'): return dict(type=kind, text=t)

NAMED = dict(type='function', name='f')
CALL = dict(id='1', type='function', function=dict(name='f', arguments='{"a": 1}'))
FUNCTION = dict(name='f', description='d', strict=False, parameters=SCHEMA)
CHAT = dict(
    messages=[
        dict(role='system', content='s'),
        dict(role='user', content=[text('x')]),
        dict(role='assistant', content=None, reasoning='r', tool_calls=[CALL]),
        dict(role='tool', tool_call_id='1', content='ok')],
    max_tokens=2, tools=[dict(type='function', function=FUNCTION)],
    tool_choice=dict(type='function', function=dict(name='f')),
    stop=['a'], logit_bias={'5':1.5}, chat_template_kwargs=dict(enable_thinking=True),
    metadata=dict(a='b'), logprobs=True, top_logprobs=2, seed=3)
USE = dict(type='tool_use', id='1', name='f', input=dict(a=1))
THOUGHT = dict(type='thinking', thinking='t', signature='s')
RESULT = dict(type='tool_result', tool_use_id='1', content=[text('k')])
MESSAGES = dict(
    max_tokens=2, system=[text('s')],
    messages=[
        dict(role='user', content='x'),
        dict(role='assistant', content=[THOUGHT, USE]),
        dict(role='user', content=[RESULT])],
    tools=[dict(name='f', input_schema=SCHEMA)], tool_choice=dict(type='tool', name='f'),
    thinking=dict(type='enabled', budget_tokens=1024), stop_sequences=['a'])
RESPONSES = dict(
    instructions='i', max_output_tokens=16,
    input=[
        dict(type='message', role='user', content=[text('x', 'input_text')]),
        dict(type='function_call', call_id='1', name='f', arguments='{}'),
        dict(type='function_call_output', call_id='1', output='o'),
        dict(type='reasoning', id='rs_1', summary=[text('s', 'summary_text')])],
    tools=[NAMED|dict(parameters=SCHEMA)],
    tool_choice=dict(type='allowed_tools', mode='auto', tools=[NAMED]),
    text=dict(format=dict(type='json_schema', name='x', schema=SCHEMA)),
    reasoning=dict(effort='low'), metadata=dict(a='b'))
COMPLETIONS = dict(
    prompt=['ab',[1,2]], max_tokens=2, logit_bias={'5':1}, logprobs=1, stop=['q'],
    structured_outputs=dict(json=SCHEMA))
RICH = {
    '/v1/chat/completions':CHAT, '/v1/messages':MESSAGES, '/v1/responses':RESPONSES,
    '/v1/completions':COMPLETIONS}

def places(d, at=()):
    "The way to everything within a body"
    if isinstance(d, list):
        d = dict(enumerate(d))
    for k,v in d.items() if isinstance(d, dict) else ():
        yield (*at,k)
        yield from places(v, (*at,k))

@pytest.fixture(scope='module')
def guided():
    from atlas.text.guide import Guides
    guides = Guides(tok, 257, (END,))
    return local(FakeRunner('ok'), guides=guides, parsers=('hermes',None))

UNEXPECTED = (
    'null true 0 -1 1.5 1e999 -1e999 1e-400 1000000000000000000000000000000 9223372036854775808 '
    '"" "x" "\\u0000" [] [null] [1e999] {} {"a":1e999} {"":{}} [{}]')

@pytest.mark.parametrize('path', RICH)
@given(data=st.data(), raw=st.sampled_from(UNEXPECTED.split()))
@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
def test_any_place_of_a_body(guided, path, data, raw):
    """A value that is not expected, anywhere in a body that has everything: an answer or a refusal,
    and never a crash"""
    at = data.draw(st.sampled_from(list(places(RICH[path]))))
    body = part = json.loads(json.dumps(RICH[path]))
    for k in at[:-1]:
        part = part[k]
    part[at[-1]] = '@'
    r = post(path, json.dumps(body).replace('"@"', raw).encode(), guided)
    assert r.status_code in (200,400,404,501), (at, raw, r.text)
    if '1e999' in raw:
        assert r.status_code==400 and 'too large' in r.text, (at, raw, r.text)

@given(raw=st.binary(max_size=200))
@settings(deadline=None, max_examples=100)
def test_any_bytes(raw):
    assert post('/v1/completions', raw).status_code==400

@pytest.mark.parametrize('raw', [
    b'', b'[]', b'null', b'['*10**6, b'{"a":'*10**5, b'{"prompt": NaN}',
    b'{"prompt": "a", "temperature": 1e999}', b'{"prompt": "a", "top_p": -Infinity}',
    b'{"prompt": "a", "x": NaN}', b'{"prompt": "\xff"}',
    b'{"prompt": "a", "seed": 1'+b'0'*4000+b'}', b'{"prompt": "a", "logit_bias": {"-1": 1}}',
    b'{"prompt": "a", "logit_bias": {"257": 1}}',
    b'{"prompt": [257]}', b'{"prompt": []}', b'{"prompt": ""}', b'{"prompt": [[]]}',
    b'{"prompt": ["a", 1]}', b'{"prompt": "a", "stop": ["", "b"]}', b'{"prompt": "a", "n": 129}'])
def test_refused(raw):
    r = post('/v1/completions', raw)
    assert r.status_code==400 and r.json()['error']['type']=='invalid_request_error', r.text
    assert fuzzed.post('/v1/completions', json=dict(prompt='a')).status_code==200

@pytest.mark.parametrize(
    'kind', [None, 'text/plain', 'application/x-www-form-urlencoded', 'application/jsonp'])
def test_content_type(kind):
    def ask(head):
        return fuzzed.post('/v1/completions', content=b'{"prompt": "a"}', headers=head)
    r = ask({'content-type':kind} if kind else {})
    assert r.status_code==400 and 'application/json' in r.json()['error']['message']
    assert ask({'content-type':'application/json; charset=utf-8'}).status_code==200

@pytest.mark.parametrize('method,path,code', [
    ('GET','/nowhere',404), ('POST','/v1/embeddings',400), ('POST','/v1/audio/speech',501),
    ('GET','/v1/completions',405), ('DELETE','/v1/models',405), ('GET','/v1/models/',404)])
def test_routes(method, path, code):
    r = fuzzed.request(method, path, json={} if method=='POST' else None)
    kind = 'server_error' if code>=500 else 'invalid_request_error'
    assert r.status_code==code and r.json()['error']['type']==kind and r.headers['x-request-id']

def test_what_is_told_of_routes():
    r = fuzzed.options(
        '/v1/models',
        headers={'origin':'http://evil.example', 'access-control-request-method':'POST'})
    assert not [h for h in r.headers if h.startswith('access-control')]
    post = fuzzed.get('/openapi.json').json()['paths']['/v1/chat/completions']['post']
    schema = post['requestBody']['content']['application/json']['schema']
    assert 'messages' in schema['properties'] and '$ref' not in json.dumps(schema)
    assert fuzzed.head('/health').status_code==200

# ---- The runner says no, or breaks ----

def test_queue_full():
    r = FakeRunner(room=1, hold=3)
    a = chat(local(r), n=2)
    assert a.status_code==503 and a.headers['retry-after']
    assert a.json()['error']['code']=='queue_full'
    assert r.aborted.acquire(timeout=WAIT)  # the choice that was admitted does not run on

def test_engine_error():
    c = local(FakeRunner(fail=4))
    a = chat(c)
    assert a.status_code==500 and a.json()['error']['message']=='The engine failed'
    text = chat(c, stream=True).text
    assert events(text)[-1]['error']['type']=='server_error' and text.endswith('data: [DONE]\n\n')
    r = FakeRunner(fail=4)
    with live(r) as port, pytest.raises(openai.APIError, match='engine failed'):
        list(client_of(port).completions.create(model='fake', prompt='a', stream=True))

def test_unhealthy():
    r = FakeRunner()
    r.healthy = False
    c = local(r)
    assert c.get('/health').status_code==503 and chat(c).status_code==503
    r.healthy = True
    assert c.get('/health').json()['status']=='ok' and chat(c).status_code==200

class Bomb(list):
    def __getitem__(self, i):
        raise KeyError('/etc/secret')

def test_nothing_leaks_from_a_crash():
    r = FakeRunner()
    ids,r.ids = r.ids,Bomb(r.ids)
    c = local(r)
    assert chat(c).status_code==500 and 'secret' not in chat(c).text
    assert 'secret' not in chat(c, stream=True).text
    r.submit = None
    a = chat(c)
    assert a.status_code==500 and a.headers['x-request-id']
    assert a.json()['error']['code']=='internal_error'
    del r.submit
    r.ids = ids
    assert chat(c).status_code==200

def test_no_template():
    c = TestClient(app_of(FakeRunner(), tok))
    assert chat(c).status_code==400
    assert c.post('/v1/completions', json=dict(prompt='a')).status_code==200

def test_metrics():
    c = local(FakeRunner())
    for kw in {},dict(stream=True),dict(max_tokens=3),dict(temperature=-1):
        chat(c, **kw)
    m = counted(c)
    assert m[of('request_success_total', finished_reason='stop')]==2
    assert m[of('request_success_total', finished_reason='length')]==1
    assert m[of('generation_tokens_total')]==45
    assert m[of('time_to_first_token_seconds_count')]==3
    assert m[of('inter_token_latency_seconds_count')]==42
    assert m[of('num_preemptions_total')]==3 and m[of('kv_cache_usage_perc')]==.5
    refused = 'handler="/v1/chat/completions",method="POST",status="400"'
    assert m[f'atlas:http_requests_total{{{refused}}}']==1

def counted(c):
    "All numbers of a scrape, by name and labels"
    found = re.findall(r'^(atlas:[^\s]+(?:\{[^}]*\})?) (\S+)$', c.get('/metrics').text, re.M)
    return {k:float(v) for k,v in found}

def of(name, **labels):
    "What a number of the model is called"
    told = sorted((dict(model_name='fake')|labels).items())
    return f'atlas:{name}{{'+','.join(f'{k}="{v}"' for k,v in told)+'}'

EVERY_API = [
    ('/v1/chat/completions', dict(messages=HELLO)),
    ('/v1/chat/completions', dict(messages=HELLO, n=3, max_tokens=4)),
    ('/v1/completions', dict(prompt=['ab','cde'], n=2)),
    ('/v1/messages', dict(messages=HELLO, max_tokens=6)),
    ('/v1/responses', dict(input='Hi'))]

def used(c, path, body):
    "Tokens of prompt and answer, as an answer tells them; the same is asked for as a stream, too"
    u = c.post(path, json=body).json()['usage']
    assert c.post(path, json=body|dict(stream=True)).status_code==200
    newer = 'input_tokens' in u
    return (u['input_tokens'],u['output_tokens']) if newer else (
        u['prompt_tokens'],u['completion_tokens'])

@dataclass
class Sums:
    "The requests that reached the engine, tokens as clients were told them, and the counters"
    seen:list
    prompt:int
    answer:int
    counters:dict

@pytest.fixture
def sums():
    "After questions to every API, each of them whole and as a stream"
    r = FakeRunner()
    c = local(r)
    told = [used(c, path, body) for path,body in EVERY_API]
    return Sums(r.seen, 2*sum(p for p,_ in told), 2*sum(a for _,a in told), counted(c))

def test_every_token_is_in_the_sums(sums):
    """What usage says to clients, and what the counters say, is the same: for every API, whole and
    streamed, with several prompts and choices"""
    seen,m = sums.seen,sums.counters
    assert m[of('prompt_tokens_total')]==sums.prompt
    assert m[of('generation_tokens_total')]==m[of('request_generation_tokens_sum')]==sums.answer
    assert m[of('inter_token_latency_seconds_count')]==sums.answer-len(seen)
    assert m[of('request_prompt_tokens_sum')]==sum(len(r.prompt) for r in seen)

def test_every_request_is_in_the_sums(sums):
    seen,m = sums.seen,sums.counters
    ends = [v for k,v in m.items() if k.startswith('atlas:request_success_total')]
    assert m[of('requests_submitted_total')]==sum(ends)==len(seen)
    for k in (
            'time_to_first_token_seconds', 'request_queue_time_seconds',
            'request_prefill_time_seconds', 'request_decode_time_seconds',
            'request_inference_time_seconds', 'e2e_request_latency_seconds',
            'request_time_per_output_token_seconds', 'request_prompt_tokens',
            'request_generation_tokens'):
        assert m[of(k+'_count')]==len(seen), k

def test_the_engine_says_how_long_a_request_waited():
    class Late(FakeStream):
        async def __anext__(self):
            e = await super().__anext__()
            return replace(e, waited=1e9) if self.n==1 else e
    class Waiting(FakeRunner):
        def submit(self, q):
            super().submit(q)
            return Late(self, q)
    c = local(Waiting())
    chat(c)
    m = counted(c)
    # it cannot have waited longer than that
    queued = m[of('request_queue_time_seconds_sum')]
    assert queued==m[of('time_to_first_token_seconds_sum')]>0
    assert m[of('request_prefill_time_seconds_sum')]==0

# ---- Raw sockets: clients that leave, freeze, or never stop sending ----

def dial(port, rcvbuf=None):
    s = socket.socket()
    if rcvbuf:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, rcvbuf)
    s.settimeout(WAIT)
    s.connect(('127.0.0.1', port))
    return s

def head(n, path='/v1/completions'):
    kind = 'Content-Type: application/json'
    return f'POST {path} HTTP/1.1\r\nHost: x\r\n{kind}\r\nContent-Length: {n}\r\n\r\n'.encode()
def ask(s, **body):
    raw = json.dumps(dict(prompt='a')|body).encode()
    s.sendall(head(len(raw))+raw)

def read_until(s, mark):
    got = b''
    while mark not in got:
        part = s.recv(65536)
        assert part, got
        got += part
    return got

def alive(port):
    assert client_of(port).models.list().data[0].id=='fake'

@pytest.mark.parametrize('reset', [False,True], ids=['close','reset'])
@pytest.mark.parametrize('n', [1,3])
def test_gone_while_streaming(n, reset):
    r = FakeRunner(endless=True)
    with live(r) as port:
        with dial(port) as s:
            ask(s, stream=True, n=n)
            read_until(s, b'data: ')
            if reset:
                s.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack('ii', 1, 0))
        for _ in range(n):
            assert r.aborted.acquire(timeout=WAIT)
        alive(port)

@pytest.mark.parametrize(
    'body', [dict(), dict(n=3), dict(stream=True)], ids=['whole','whole-n3','stream'])
def test_gone_while_waiting(body):
    "Nothing is ever written to this client, so only `receive` can tell that it left"
    r = FakeRunner(hold=0)
    with live(r) as port:
        with dial(port) as s:
            ask(s, **body)
            for _ in range(body.get('n', 1)):
                assert r.arrived.acquire(timeout=WAIT)
        for _ in range(body.get('n', 1)):
            assert r.aborted.acquire(timeout=WAIT)
        alive(port)
        # a second registry in one process is no trouble
        m = TestClient(app_of(r, tok)).get('/metrics')
        assert m.status_code==200

def test_gone_in_its_own_body():
    r = FakeRunner()
    with live(r) as port:
        with dial(port) as s:
            s.sendall(head(1000)+b'{"prompt"')
        alive(port)
        assert not r.seen

def test_openai_timeout_stops_the_work():
    r = FakeRunner(hold=2)
    with live(r) as port:
        for patience in (.2, 2., 20., WAIT):  # until it got as far as the engine
            c = client_of(port).with_options(timeout=patience).completions
            with pytest.raises(openai.APITimeoutError):
                c.create(model='fake', prompt='a')
            if r.seen:
                break
        assert r.aborted.acquire(timeout=WAIT)

# ---- Clients that leave while their request is being prepared ----

class Slow:
    "Something that takes until `go`; it says when it has begun, and when it was cancelled"
    def __init__(self):
        self.begun = threading.Semaphore(0)
        self.cancelled = threading.Semaphore(0)
        self.go = threading.Event()
        self.held = asyncio.Event()
    async def wait(self):
        self.begun.release()
        try:
            await self.held.wait()
        except asyncio.CancelledError:
            self.cancelled.release()
            raise
    def block(self):
        "For threads"
        self.begun.release()
        assert self.go.wait(WAIT)

class SlowModels(Models):
    "Its model loads for as long as one waits"
    async def get(self, name=None):
        await self.slow.wait()
        return await super().get(name)

def slow_models(slow, runner):
    ms = always(runner, tok, template, SlowModels)
    ms.slow = slow
    return ms

class SlowTemplate:
    source = ''
    def __init__(self, slow):
        self.slow = slow
    async def arender(self, *a, **kw):
        await self.slow.wait()

ASKS = {
    '/v1/chat/completions':dict(messages=HELLO), '/v1/completions':dict(prompt='a'),
    '/v1/messages':dict(messages=HELLO, max_tokens=5), '/v1/responses':dict(input='Hi'),
    '/v1/messages/count_tokens':dict(messages=HELLO), '/v1/responses/input_tokens':dict(input='Hi'),
    '/v1/embeddings':dict(input='a'), '/tokenize':dict(prompt='a'),
    '/v1/apply-template':dict(messages=HELLO), '/detokenize':dict(tokens=[1])}

def send(s, path, **body):
    raw = json.dumps(ASKS[path]|body).encode()
    s.sendall(head(len(raw), path)+raw)

def noticed(port, path):
    "Wait until a request to `path` is in the metrics as one whose client has left"
    line = f'atlas:http_requests_total{{handler="{path}",method="POST",status="499"}} 1.0'
    with httpx.Client(base_url=f'http://127.0.0.1:{port}', timeout=WAIT) as c:
        def missed():
            text = c.get('/metrics').text
            return line in text and text
        return until(missed, 'that the client is missed')

def untouched(r, text):
    "No request reached the engine, and none was counted"
    assert not r.seen and not re.search(
        r'^atlas:(requests_submitted|prompt_tokens|request_success|aborted_requests)_total.* [^0]',
        text, re.M)

@pytest.mark.parametrize('stream', [False,True], ids=['whole','stream'])
@pytest.mark.parametrize('path', ASKS)
def test_gone_while_the_model_loads(path, stream):
    slow,r = Slow(),FakeRunner()
    with live(slow_models(slow, r)) as port:
        with dial(port) as s:
            streams = stream and path in list(ASKS)[:4]
            send(s, path, **dict(stream=True) if streams else {})
            assert slow.begun.acquire(timeout=WAIT)
        assert slow.cancelled.acquire(timeout=WAIT)
        untouched(r, noticed(port, path))

class SlowGuide:
    def __init__(self, slow):
        self.slow = slow
    def check(self, spec):
        self.slow.block()

SLOW_PATH = dict(score='/v1/completions')
SLOW_BODY = dict(
    guide=dict(response_format=dict(type='json_object')),
    image=dict(messages=[dict(role='user', content=[text('x')])]),
    score=dict(prompt='ab', echo=True, logprobs=1))

@pytest.mark.parametrize('what', ['template','guide','image','score'])
def test_gone_while_it_is_prepared(what):
    """A template renders, a guide is compiled, an image is read, a prompt is scored: what cannot be
    stopped goes on, and nobody waits for it"""
    slow,r = Slow(),FakeRunner()
    async def call(op, **kw):
        await slow.wait()
    r.call = call
    side = dict(template=dict(template=SlowTemplate(slow)), guide=dict(guides=SlowGuide(slow)))
    path,kw = SLOW_PATH.get(what, '/v1/chat/completions'),side.get(what, {})
    with pytest.MonkeyPatch.context() as m, live(r, **kw) as port:
        if what=='image':
            prepare = 'atlas.service.service.prepare_images'
            m.setattr(prepare, lambda *a, **kw: slow.block())
        try:
            with dial(port) as s:
                send(s, path, **SLOW_BODY.get(what, {}))
                assert slow.begun.acquire(timeout=WAIT)
            noticed(port, path)
        finally:
            slow.go.set()
        untouched(r, noticed(port, path))
        alive(port)

def test_a_background_response_needs_no_client():
    slow,r = Slow(),FakeRunner()
    with live(slow_models(slow, r)) as port:
        with dial(port) as s:
            send(s, '/v1/responses', background=True)
            assert slow.begun.acquire(timeout=WAIT)
        # what came before these has been heard: that it has left, too
        for _ in range(3):
            alive(port)
        assert not slow.cancelled.acquire(timeout=0)
        slow.held._loop.call_soon_threadsafe(slow.held.set)
        assert r.arrived.acquire(timeout=WAIT)

def scope_of(path):
    "A request with JSON in it, as ASGI has it"
    return dict(
        type='http', http_version='1.1', method='POST', path=path, query_string=b'',
        headers=[(b'content-type',b'application/json')])

class HandClient:
    "A client played by hand: it sends `raw`, keeps what comes, and leaves when `left` is set"
    def __init__(self, raw):
        self.sent = [dict(type='http.request', body=raw, more_body=False)]
        self.left = asyncio.Event()
        self.out = []
    async def receive(self):
        if self.sent:
            return self.sent.pop()
        await self.left.wait()
        return dict(type='http.disconnect')
    async def send(self, m):
        self.out.append(m)
        await asyncio.sleep(0)
    def whole(self):
        "Has it read an answer to its end?"
        first,last = self.out[0],self.out[-1]
        ended = last['type']=='http.response.body' and not last.get('more_body')
        return first['status']==200 and ended

def test_a_background_response_that_is_cut_before_it_begins():
    "The server ends just then: what it submitted is stopped and counted"
    r = FakeRunner(endless=True)
    app = app_of(r, tok, template)
    service = app.state.service
    async def run():
        c = HandClient(json.dumps(dict(input='Hi', background=True)).encode())
        t = asyncio.create_task(app(scope_of('/v1/responses'), c.receive, c.send))
        while not service.tasks:
            await asyncio.sleep(0)
        for b in service.tasks:
            b.cancel()
        await asyncio.wait([t], timeout=WAIT)
    asyncio.run(run())
    m = service.metrics.of('fake')
    assert r.aborted.acquire(timeout=0) and not service.tasks
    assert m.requests_submitted==m.request_success['abort']==m.aborted_requests['shutdown']==1

class Steps:
    "A template that takes some rounds of the loop"
    source = ''
    async def arender(self, *a, **kw):
        for _ in range(5):
            await asyncio.sleep(0)
        return 'x'

class Kept(FakeRunner):
    "Keeps the streams of all requests that it got"
    def __init__(self, *args):
        super().__init__(*args)
        self.made = []
    def submit(self, r):
        self.made.append(super().submit(r))
        return self.made[-1]

class Ends:
    "One application whose client leaves, or which is cut off, at any round of the loop"
    def __init__(self, path, body):
        self.runner = Kept('Hello')
        self.app = app_of(self.runner, tok, Steps())
        self.metrics = self.app.state.service.metrics.of('fake')
        self.path = path
        self.raw = json.dumps(body).encode()
    def settled(self, at, how):
        "Every request that reached the engine has ended there, and is counted once"
        m,made = self.metrics,self.runner.made
        assert all(s.over for s in made), (at, how)
        assert len(made)==m.requests_submitted==sum(m.request_success.values()), (at, how)
        assert m.request_success['abort']==sum(m.aborted_requests.values()), (at, how)
    async def once(self, at, how):
        "Ask, and end it after `at` rounds; was there an answer before?"
        c = HandClient(self.raw)
        t = asyncio.create_task(self.app(scope_of(self.path), c.receive, c.send))
        for _ in range(at):
            await asyncio.sleep(0)
        if how!='cut':
            c.left.set()
        if how!='left':
            t.cancel()
        await asyncio.wait([t], timeout=WAIT)
        assert t.done() and (t.cancelled() or t.exception() is None), (at, how)
        for _ in range(5):
            await asyncio.sleep(0)
        assert asyncio.all_tasks()=={asyncio.current_task()}, (at, how, asyncio.all_tasks())
        self.settled(at, how)
        return not t.cancelled() and bool(c.out) and c.whole()
    async def sweep(self):
        for how in 'left','cut','both':
            for at in range(200):
                if await self.once(at, how):
                    break
            else:
                pytest.fail('it never got to its end')
            assert at>4

@pytest.mark.parametrize('n', [1,2])
@pytest.mark.parametrize('stream', [False,True], ids=['whole','stream'])
@pytest.mark.parametrize('path', list(ASKS)[:4])
def test_an_end_at_any_moment(path, stream, n):
    """The client leaves, the server is cut off, or both, at each round of the loop there is: every
    request that reached the engine has ended there, is counted once, and no task is left"""
    if n>1 and path in ('/v1/messages','/v1/responses'):
        return
    ends = Ends(path, ASKS[path]|dict(stream=stream)|(dict(n=n) if n>1 else {}))
    asyncio.run(ends.sweep())
    reached = 'length' if path=='/v1/messages' else 'stop'
    assert ends.metrics.request_success[reached]>=3
    assert ends.metrics.aborted_requests.keys()=={'client_gone','shutdown'}

class Counting:
    "An engine that counts its steps, for a real worker"
    def __init__(self):
        self.todo = set()
        self.after = {}
        self.gone = threading.Event()
    def add(self, r):
        self.todo.add(r.id)
    def abort(self, rid):
        if rid not in self.todo:
            return []
        self.todo.remove(rid)
        self.after[rid] = 0
        self.gone.set()
        return [Event(rid, finish='abort')]
    @property
    def has_work(self): return bool(self.todo)
    def stats(self): return {}
    def step(self):
        for rid in self.after.keys()&self.todo:
            self.after[rid] += 1
        self.gone.wait(.0005)  # a step takes a moment
        return [Event(rid, A) for rid in self.todo]

@pytest.mark.parametrize('stream', [False,True])
def test_gone_with_a_real_worker(stream):
    e = Counting()
    info = dict(name='fake', max_seq_len=1000, vocab_size=257, eos_ids=[END])
    with live(threaded(e, info, tok, template)) as port:
        with dial(port) as s:
            ask(s, stream=stream)
            if stream:
                read_until(s, b'data: ')
            else:  # until the request has reached the engine
                until(lambda: e.todo)
        assert e.gone.wait(WAIT) and not e.todo and set(e.after.values())=={0}
        alive(port)

def test_a_choice_that_cannot_be_stopped():
    "It fails to, and its neighbours are stopped all the same; all are counted"
    class Stubborn(FakeStream):
        def abort(self):
            raise RuntimeError('the link is gone')
    class FirstIsStubborn(FakeRunner):
        def submit(self, q):
            stream = super().submit(q)
            return Stubborn(self, q) if len(self.seen)==1 else stream
    r = FirstIsStubborn(endless=True)
    with live(r) as port:
        with dial(port) as s:
            ask(s, stream=True, n=3)
            read_until(s, b'data: ')
        for _ in range(2):
            assert r.aborted.acquire(timeout=WAIT)
        with httpx.Client(base_url=f'http://127.0.0.1:{port}', timeout=WAIT) as c:
            def counted():
                text = c.get('/metrics').text
                return 'finished_reason="abort",model_name="fake"} 3.0' in text and text
            m = until(counted)
        assert 'aborted_requests_total{model_name="fake",why="client_gone"} 3.0' in m
        assert 'requests_submitted_total{model_name="fake"} 3.0' in m

def test_a_choice_that_cannot_begin():
    "A mistake of our own at the second: the first does not run on for nobody"
    class OnlyOne(FakeRunner):
        def submit(self, q): return 1/0 if self.seen else super().submit(q)
    r = OnlyOne(endless=True)
    c = local(r)
    a = chat(c, n=2)
    assert a.status_code==500 and 'Zero' not in a.text and r.aborted.acquire(timeout=0)
    m = counted(c)
    assert m[of('requests_submitted_total')]==1
    assert m[of('request_success_total', finished_reason='abort')]==1
    assert m[of('aborted_requests_total', why='error')]==1

def test_frozen_reader_of_a_quiet_stream():
    "All that is written is a comment now and then, and that is not taken either"
    from atlas.service.turn import EventStream
    ends,sent = [],[]
    async def quiet():
        yield b'first'
        await asyncio.Event().wait()
    async def receive():
        await asyncio.Event().wait()
    async def send(m):
        sent.append(m)
        if len(sent)>2:
            await asyncio.Event().wait()
    def close(why='client_gone'):
        ends.append(why)
    async def run():
        stream = EventStream(quiet(), close, every=.01, patience=.05)
        await asyncio.wait_for(stream(dict(type='http'), receive, send), WAIT)
        await asyncio.sleep(0)
        return asyncio.all_tasks()-{asyncio.current_task()}
    assert asyncio.run(run())==set() and ends==['client_gone'] and len(sent)==3

MISTAKES = dict(
    ping='atlas.service.protocol.base.Writer.ping',
    close='atlas.service.protocol.base.Writer.close', events='atlas.service.turn.Turn.usage')

@pytest.mark.parametrize('how', MISTAKES)
def test_a_stream_that_breaks(how, caplog):
    """A mistake of our own in what keeps a stream open, in what ends it, or in itself: the
    connection is closed, the log has it, and others are served"""
    r = FakeRunner(hold=2)
    with pytest.MonkeyPatch.context() as m, live(r, ping=.05) as port:
        m.setattr(MISTAKES[how], lambda self: 1/0)
        with dial(port) as s:
            ask(s, stream=True)
            if how=='close':
                read_until(s, b'data: ')
            else:
                while s.recv(1<<16):
                    pass
        if how!='events':
            assert r.aborted.acquire(timeout=WAIT)
        until(lambda: 'ZeroDivisionError' in caplog.text)
    with live(r) as port:
        alive(port)

def test_pipelined_and_patient():
    """An answer in one piece, a stream, a refusal and another one, all asked for at once: each in
    its turn"""
    with live(FakeRunner()) as port, dial(port) as s:
        for body in (dict(), dict(stream=True), dict(prompt=3.5), dict(n=2)):
            send(s, '/v1/completions', **body)
        got = read_until(s, b'"completion_tokens":42')
        assert re.findall(rb'HTTP/1\.1 (\d+)', got)==[b'200',b'200',b'400',b'200']
        assert got.count(b'[DONE]')==1

def test_frozen_reader():
    r = FakeRunner(endless=True)
    with live(r, patience=.3) as port, dial(port, rcvbuf=4096) as s:
        ask(s, stream=True)
        assert r.aborted.acquire(timeout=WAIT)
        alive(port)

def test_quiet_stream_is_kept_alive():
    with live(FakeRunner(hold=2), ping=.05) as port, dial(port) as s:
        ask(s, stream=True)
        assert read_until(s, b': still here\n\n').count(b'data: ')==2

def test_body_too_large_is_refused_before_it_is_sent():
    with live(FakeRunner()) as port, dial(port) as s:
        s.sendall(head(50_000_000))
        assert read_until(s, b'body_too_large').startswith(b'HTTP/1.1 413')
        alive(port)

def test_endless_chunked_body():
    with live(FakeRunner(), max_body=100_000) as port, dial(port) as s:
        s.sendall(head(0).replace(b'Content-Length: 0', b'Transfer-Encoding: chunked'))
        for _ in range(4):
            s.sendall(b'c350\r\n'+b' '*50_000+b'\r\n')  # 200 kB, and no end in sight
        assert read_until(s, b'body_too_large').startswith(b'HTTP/1.1 413')
        alive(port)

def test_fifty_megabytes_from_a_client():
    with live(FakeRunner()) as port:
        with pytest.raises(openai.APIStatusError) as e:
            client_of(port).completions.create(model='fake', prompt='x'*50_000_000)
        assert e.value.status_code==413 and e.value.code=='body_too_large'
        alive(port)

@pytest.mark.parametrize('raw', [
    b'\x16\x03\x01 not http\r\n\r\n', b'GET\r\n\r\n',
    b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n',
    b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: abc\r\n\r\n'])
def test_not_http(raw):
    with live(FakeRunner()) as port:
        with dial(port) as s:
            s.sendall(raw)
            assert s.recv(1000).startswith(b'HTTP/1.1 400')
        alive(port)

def test_a_connection_serves_again_after_an_error():
    with live(FakeRunner()) as port, dial(port) as s:
        ask(s, temperature=-1)
        read_until(s, b'"temperature"')
        ask(s)
        assert b'Hello there' in read_until(s, b'total_tokens')

# ---- A process: its port, its end ----

def test_port_in_use():
    with closing(listen(port=0)) as s:
        port = s.getsockname()[1]
        with pytest.raises(PortError, match=rf'Port {port} on 127.0.0.1 is already in use.*--port'):
            listen(port=port)

_child = '''import sys; sys.path.insert(0, %r)
from test_server import FakeRunner,listen,template,tok
from inprocess import app_of,run
r,sock = FakeRunner(**%r),listen(port=0)
def ready(): print(f'http://127.0.0.1:{sock.getsockname()[1]}', flush=True)
run(app_of(r, tok, template, on_ready=ready), sock, %r)
'''
@contextmanager
def child(drain, **kw):
    code = _child % (str(Path(__file__).parent), kw, drain)
    p = subprocess.Popen([sys.executable, '-c', code], stdout=subprocess.PIPE, text=True)
    try:
        yield p,int(p.stdout.readline().rsplit(':', 1)[1])
    finally:
        p.kill()
        p.wait(WAIT)
        p.stdout.close()

@pytest.mark.parametrize('sig', [signal.SIGTERM,signal.SIGINT])
def test_shutdown_does_not_wait_for_ever(sig):
    with child(1, endless=True) as (p,port), dial(port) as s:
        ask(s, stream=True)
        read_until(s, b'data: ')
        p.send_signal(sig)
        while s.recv(1<<20):
            pass  # the stream is cut
        assert p.wait(WAIT) in (0,-sig)

def test_shutdown_lets_answers_finish():
    long = dict(text='a'*20_000, max_seq_len=30_000)
    with child(WAIT, **long) as (p,port), dial(port) as s:
        ask(s, stream=True)
        got = read_until(s, b'data: ')
        p.send_signal(signal.SIGTERM)
        while part := s.recv(1<<20):
            got += part
        assert b'[DONE]' in got

# ---- The page ----

DANGEROUS = r'innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|\son\w+='

@pytest.mark.parametrize('name', ['chat.html','models.html'])
def test_pages_make_no_markup_of_text(name):
    "What is ours: text becomes nodes, never markup, and nothing comes from elsewhere"
    own = (Path(atlas.__file__).parent/'service'/'static'/name).read_text()
    assert not re.search(DANGEROUS, own)
    assert set(re.findall(r'https?://[^\s"\'>]+', own))<={'http://www.w3.org/2000/svg'}
    beside = r'<(link|script|img|iframe)[^>]*(src|href)="(?!data:|theme\.css"|[\w.-]+\.min\.js")'
    assert not re.search(beside, own)

def test_page():
    html,policy = page()
    scripts = html.count('<script')
    assert scripts==3 and policy.count("'sha256-")==scripts and len(html)<400_000
    assert not re.search(r'<(link|script|img|iframe)[^>]*(src|href)="(?!data:)', html)
    r = fuzzed.get('/')
    assert r.status_code==200 and r.text==html and r.headers['content-security-policy']==policy
