"""Ollama's API: its own Python client against the service, bodies that nobody should send,
and who may do what."""
import asyncio,base64,io,json,sys,threading
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
import httpx,pytest
import numpy as np
from hypothesis import HealthCheck,given,settings,strategies as st
from PIL import Image
from starlette.testclient import TestClient
from atlas.service.gateway import DOORS
from atlas.service.http import Bounds,ApiKeys,Rules
from atlas.text.chat import ChatTemplate
from atlas.text.images import ImageSpec
from atlas.service.models import Models
from atlas.service.process import Served
from atlas.service.server import create_app
from atlas.service.service import ReadyModel
from helpers.waiting import WAIT,until
from test_http import live
from test_server import FakeRunner,places,template,tok,values

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from inprocess import app_of  # noqa: E402
from scripted import TEMPLATE,Speaker,running  # noqa: E402

HELLO = [dict(role='user', content='Say something')]
quiet = dict(raise_server_exceptions=False)

# ---- Ollama's own client ----

def model(prompt):
    "What the model says, by its prompt"
    if 'tool: wet' in prompt:
        return '<think>Rain.</think>It rains.'
    if 'weather' in prompt:
        call = json.dumps(dict(name='weather', arguments=dict(city='Oslo')))
        return f'<think>Look.</think>Wait.\n<tool_call>\n{call}\n</tool_call>'
    if 'break' in prompt:
        raise KeyError('secret')
    return '<think>Hm.</think>\n\n{"city": "Oslo"}'

@pytest.fixture(scope='module')
def speaker():
    s = Speaker(model)
    guides = SimpleNamespace(check=lambda spec: s.specs.append(spec))
    s.specs = []
    app = app_of(
        s, s.tok, ChatTemplate(TEMPLATE), parsers=('hermes','qwen3'), guides=guides,
        names=['scripted','alias'], doors=DOORS)
    with running(app) as s.url:
        yield s

@pytest.fixture(scope='module')
def client(speaker):
    if not find_spec('ollama'):
        pytest.skip('the ollama package is not installed')
    import ollama
    return ollama.Client(host=speaker.url, trust_env=False)

def test_chat(client):
    r = client.chat('scripted', HELLO)
    assert (r.message.content,r.message.thinking)==('{"city": "Oslo"}','Hm.')
    assert (r.done,r.done_reason,r.model)==(True,'stop','scripted')
    assert r.prompt_eval_count==len('user: Say somethingassistant: ') and r.eval_count>10
    parts = r.load_duration+r.prompt_eval_duration+r.eval_duration
    assert 0<parts<=r.total_duration and r.eval_duration>0

def test_chat_stream(client):
    *parts,last = client.chat('scripted:latest', HELLO, stream=True)
    assert ''.join(p.message.thinking or '' for p in parts)=='Hm.'
    assert ''.join(p.message.content for p in parts)=='{"city": "Oslo"}'
    assert not any(p.done for p in parts) and (last.done,last.done_reason)==(True,'stop')
    assert last.eval_count and last.message.content==''

def weather(city:str)->str:
    """What the weather is like.

    Args:
      city: Of which city
    """
    return 'wet'

def test_tools(client, speaker):
    "A loop as Ollama's documentation has it: the answer is sent back, and the result behind it"
    talk = [dict(role='user', content='weather?')]
    r = client.chat('scripted', talk, tools=[weather])
    call, = r.message.tool_calls
    assert (call.function.name,call.function.arguments)==('weather',dict(city='Oslo'))
    assert r.message.content.strip()=='Wait.' and r.done_reason=='stop'
    talk += [r.message, dict(role='tool', tool_name='weather', content='wet')]
    assert client.chat('scripted', talk, tools=[weather]).message.content=='It rains.'
    last = speaker.prompts[-1]
    assert 'call weathertool: wet' in last and '"name": "weather"' in last

def test_tools_in_a_stream(client):
    talk = [dict(role='user', content='weather?')]
    parts = client.chat('scripted', talk, tools=[weather], stream=True)
    streamed = [c for p in parts for c in p.message.tool_calls or []]
    assert [c.function.arguments for c in streamed]==[dict(city='Oslo')]

def test_format(client, speaker):
    speaker.specs.clear()
    schema = dict(type='object', properties=dict(city=dict(type='string')))
    r = client.chat('scripted', HELLO, format=schema, think=False)
    client.chat('scripted', HELLO, format='json', think=False)
    assert json.loads(r.message.content.split('</think>')[-1])==dict(city='Oslo')
    assert [s['kind'] for s in speaker.specs]==['json_schema','json_object']
    assert speaker.specs[0]['schema']==schema

def test_generate(client, speaker):
    r = client.generate('alias', 'Once')
    assert (r.response,r.thinking,r.done)==('{"city": "Oslo"}','Hm.',True)
    assert speaker.prompts[-1]=='user: Onceassistant: ' and r.model=='alias'
    assert speaker.tok.decode(r.context).startswith('user: Onceassistant: <think>Hm.')
    *parts,last = client.generate('alias', 'Once', stream=True)
    assert ''.join(p.response for p in parts)==r.response and last.context==r.context

def test_generate_goes_on(client, speaker):
    r = client.generate('alias', 'Once')
    more = client.generate('alias', 'More', context=r.context, system='Briefly')
    behind = speaker.tok.decode(r.context)+'system: Brieflyuser: Moreassistant: '
    assert speaker.prompts[-1]==behind and len(more.context)>len(r.context)

def test_raw(client, speaker):
    r = client.generate('scripted', 'As it is', raw=True)
    assert speaker.prompts[-1]=='As it is'
    assert (r.response,r.context)==('<think>Hm.</think>\n\n{"city": "Oslo"}',None)

def test_options(client, speaker):
    r = client.generate('scripted', 'a', raw=True, options=dict(num_predict=4, seed=7))
    assert (r.response,r.done_reason,r.eval_count)==('<thi','length',4)
    r = client.generate('scripted', 'a', raw=True, options=dict(stop=['</think>']))
    assert (r.response,r.done_reason)==('<think>Hm.','stop')

def test_load(client, speaker):
    n = len(speaker.prompts)
    r = client.generate('scripted')
    assert (r.done,r.done_reason,r.response)==(True,'load','')
    r = client.chat('scripted', [])
    assert (r.done_reason,r.message.content)==('load','')
    assert client.generate('scripted', keep_alive=0).done_reason=='unload'
    assert len(speaker.prompts)==n
    assert list(client.chat('scripted', [], stream=True))[-1].done_reason=='load'

def test_lists(client):
    listed = client.list().models
    assert [m.model for m in listed]==['scripted','alias'] and len(listed[0].digest)==64
    here, = client.ps().models
    assert (here.model,here.context_length)==('scripted',400_000)

def test_errors(client, speaker):
    import ollama
    with pytest.raises(ollama.ResponseError) as e:
        client.chat('gpt', HELLO)
    assert e.value.status_code==404 and "'gpt'" in e.value.error
    for stream in (False,True):
        with pytest.raises(ollama.ResponseError) as e:
            wrong = dict(format=dict(type=3), options=dict(top_p=7))
            list(client.chat('scripted', HELLO, stream=stream, **wrong))
        assert e.value.status_code==400 and 'top_p' in e.value.error

def test_an_error_in_the_middle():
    "The status has gone out: the error is a line"
    app = app_of(FakeRunner(fail=3), tok, template, doors=DOORS)
    with running(app) as url:
        r = httpx.post(url+'/api/chat', json=dict(messages=HELLO), trust_env=False)
    *said,last = map(json.loads, r.text.splitlines())
    assert r.status_code==200 and len(said)==3 and set(last)=={'error'}

def test_logprobs():
    app = app_of(FakeRunner(), tok, template, doors=DOORS)
    c = TestClient(app, raise_server_exceptions=False)
    body = dict(messages=HELLO, logprobs=True, top_logprobs=2, options=dict(num_predict=2))
    def tokens(told): return [t['token'] for t in told]
    r = c.post('/api/chat', json=body|dict(stream=False)).json()
    assert tokens(r['logprobs'])==['H','e']
    assert tokens(r['logprobs'][0]['top_logprobs'])==['H','A']
    lines = [json.loads(l) for l in c.post('/api/chat', json=body).text.splitlines()]
    assert tokens(t for l in lines for t in l.get('logprobs', []))==['H','e']

# ---- Images ----

EYES = (
    '{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}'
    '{% for p in m.content %}{{ "#" if p.type == "image" else p.text }}{% endfor %}'
    '{% endif %}{% endfor %}')

@pytest.fixture
def eyes():
    "A model that sees, a client of its server, and a picture in base64"
    red = io.BytesIO()
    Image.new('RGB', (96,64), 'red').save(red, 'PNG')
    runner = FakeRunner('Red.')
    spec = ImageSpec(tok.encode('#')[0], min_pixels=1024)
    app = app_of(runner, tok, ChatTemplate(EYES), spec=spec, doors=DOORS)
    return runner,TestClient(app, **quiet),base64.b64encode(red.getvalue()).decode()

def test_images(eyes):
    "They come as base64, before the text"
    runner,c,data = eyes
    turn = dict(role='user', content='Colour?', images=[data])
    r = c.post('/api/chat', json=dict(messages=[turn], stream=False)).json()
    assert r['message']['content']=='Red.' and tok.decode(runner.seen[-1].prompt)=='######Colour?'
    r = c.post('/api/generate', json=dict(prompt='Colour?', images=[data], stream=False)).json()
    assert r['response']=='Red.' and len(runner.seen[-1].images)==1
    blind = c.post('/api/generate', json=dict(prompt='x', context=r['context']))
    assert blind.status_code==400 and 'image' in blind.json()['error']

def test_what_is_no_image(eyes):
    _,c,_ = eyes
    turn = dict(role='user', content='Colour?', images=['no image'])
    bad = c.post('/api/chat', json=dict(messages=[turn]))
    assert bad.status_code==400 and 'messages[0].images[0]' in bad.json()['error']

# ---- Bodies that nobody should send ----

fields = st.sampled_from('''model messages prompt stream options format think keep_alive logprobs
    top_logprobs tools suffix system images context raw template truncate made_up'''.split())
inside = st.sampled_from(
    'num_predict temperature top_p top_k seed stop repeat_penalty num_ctx'.split())
fuzzed = TestClient(app_of(FakeRunner('ok'), tok, template, doors=DOORS), **quiet)

def refused(r):
    "Is this a refusal in Ollama's shape?"
    d = r.json()
    return r.status_code in (400,404,501) and set(d)=={'error'} and isinstance(d['error'], str)

options = st.none()|st.dictionaries(inside, values, max_size=3)

@given(
    path=st.sampled_from(['/api/chat','/api/generate']),
    wrong=st.dictionaries(fields, values, min_size=1, max_size=3), options=options)
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
def test_any_body(path, wrong, options):
    body = dict(messages=HELLO, prompt='x')|wrong
    if options is not None:
        body['options'] = options
    r = fuzzed.post(path, content=json.dumps(body).encode())
    if r.status_code!=200:
        assert refused(r) and len(r.text)<2000, r.text

SCHEMA = dict(type='object', properties=dict(a=dict(type='integer')), required=['a'])
CALL = dict(function=dict(name='f', arguments=dict(a=1)))
TALK = [
    dict(role='system', content='s'),
    dict(role='user', content='x'),
    dict(role='assistant', content='', thinking='t', tool_calls=[CALL]),
    dict(role='tool', tool_name='f', content='ok')]
CHAT = dict(
    model='fake', stream=False, think='low', keep_alive='5m', logprobs=True, top_logprobs=1,
    messages=TALK,
    tools=[dict(type='function', function=dict(name='f', description='d', parameters=SCHEMA))],
    options=dict(num_predict=2, temperature=.5, stop=['a'], seed=3, num_ctx=100))
GENERATE = dict(
    model='fake', stream=False, prompt='x', system='s', context=[1,2], think=False,
    options=dict(num_predict=2, stop='q', top_k=3), keep_alive=-1)
RICH = {'/api/chat':CHAT, '/api/generate':GENERATE}
ODD = (
    'null true 0 -1 1.5 1e999 1000000000000000000000000000000 "" "x" "\\u0000" [] [null] {} '
    '{"":{}} [{}]').split()

@pytest.mark.parametrize('path', RICH)
@given(data=st.data(), raw=st.sampled_from(ODD))
@settings(deadline=None, max_examples=100, suppress_health_check=list(HealthCheck))
def test_any_place_of_a_body(path, data, raw):
    "A value that is not expected, anywhere in a body that has everything"
    at = data.draw(st.sampled_from(list(places(RICH[path]))))
    body = part = json.loads(json.dumps(RICH[path]))
    for k in at[:-1]:
        part = part[k]
    part[at[-1]] = '@'
    r = fuzzed.post(path, content=json.dumps(body).replace('"@"', raw).encode())
    assert r.status_code==200 or refused(r), (at, raw, r.text)

@pytest.mark.parametrize('path', RICH)
def test_a_rich_body_is_answered(path):
    assert fuzzed.post(path, json=RICH[path]).status_code==200

@given(raw=st.binary(max_size=200))
@settings(deadline=None, max_examples=50)
def test_any_bytes(raw):
    assert refused(fuzzed.post('/api/chat', content=raw))

def test_deep_and_large():
    deep = b'{"format":'+b'{"items":'*10**4+b'{}'+b'}'*10**4+b'}'
    for raw in b'['*10**5, b'{"messages":'*10**4, deep:
        assert refused(fuzzed.post('/api/chat', content=raw))
    assert fuzzed.post('/api/chat', content=b' '*(33<<20)).status_code==413

# ---- Who may do what ----

FORM = {'content-type':'application/x-www-form-urlencoded'}

def test_a_form_is_read_unless_a_page_sends_it():
    """`curl -d` calls its body a form; so does a page of anybody's, in a browser, that asks
    without leave"""
    body = json.dumps(dict(messages=HELLO, stream=False))
    assert fuzzed.post('/api/chat', content=body, headers=FORM).status_code==200
    cross = {'sec-fetch-site':'cross-site'}
    for page in dict(origin='https://evil.example'), dict(origin='null'), cross:
        for kind in (FORM, {'content-type':'text/plain'}, {}):
            assert refused(fuzzed.post('/api/chat', content=body, headers=kind|page))
        json_said = {'content-type':'application/json'}|page
        assert fuzzed.post('/api/chat', content=body, headers=json_said).status_code==200
    assert fuzzed.post('/v1/completions', content=body, headers=FORM).status_code==400

@pytest.fixture(scope='module')
def guarded():
    keys = ApiKeys({'sesame':'user', 'onion':'admin'})
    app = app_of(FakeRunner(), tok, template, rules=Rules(keys=keys), doors=DOORS)
    with live(app, Bounds()) as port:
        yield f'http://127.0.0.1:{port}'

def test_keys(guarded):
    def ask(key, **kw):
        auth = {'Authorization':f'Bearer {key}'} if key else {}
        body = dict(messages=[])|kw
        return httpx.post(guarded+'/api/chat', json=body, headers=auth, trust_env=False)
    r = ask(None)
    assert r.status_code==401 and set(r.json())=={'error'}
    assert ask('sesame').json()['done_reason']=='load'
    r = ask('sesame', keep_alive=0)
    assert r.status_code==403 and set(r.json())=={'error'}
    assert ask('onion', keep_alive=0).json()['done_reason']=='unload'

# ---- What a model can do, vectors, fetching ----

def test_show(client):
    r = client.show('scripted')
    assert {'completion','tools','thinking'}=={*r.capabilities}
    assert r.modelinfo['unknown.context_length']==400_000 and 'm.role' in r.template

def test_show_of_a_model_that_is_not_loaded():
    """Its text side is read, and is there for whoever loads it; one that cannot be read is tried
    anew"""
    from atlas.ground.core import SourceError
    from atlas.ground.options import EngineConfig
    from atlas.service.process import Model
    read = []
    def text(config):
        read.append(config.model)
        if len(read)==1:
            raise SourceError('Not there')
        return dict(tokenizer=tok, template=template, parsers=('hermes',None), spec=None)
    m = Model(EngineConfig('asleep', load_format='dummy'), text=text)
    app = create_app(Models([m], first=()), doors=DOORS)
    with TestClient(app, **quiet) as c:
        shown = [c.post('/api/show', json=dict(model='asleep')).json() for _ in range(3)]
        shown = [d['capabilities'] for d in shown]
        assert c.get('/api/ps').json()['models']==[]
    assert shown==[['completion'],['completion','tools'],['completion','tools']]
    assert read==['asleep']*2 and m.state=='unloaded'

def test_show_fetches_nothing():
    "What is asked of a model that is not on this disk does not bring it here"
    from atlas.ground.options import EngineConfig
    from atlas.service.process import Model
    def text(config):
        raise AssertionError('it would be fetched')
    m = Model(EngineConfig('nobody/nowhere'), text=text)
    with TestClient(create_app(Models([m], first=()), doors=DOORS), **quiet) as c:
        r = c.post('/api/show', json=dict(model='nobody/nowhere'))
        assert r.status_code==200 and r.json()['capabilities']==['completion']

class Embedder(FakeRunner):
    async def call(self, op, ids, **kw):
        return [3.,0.,4.]

def test_embed():
    app = app_of(Embedder(), tok, template, doors=DOORS)
    with running(app) as url:
        if not find_spec('ollama'):
            pytest.skip('the ollama package is not installed')
        import ollama
        c = ollama.Client(host=url, trust_env=False)
        r = c.embed('fake', ['ab','c'])
        assert [list(v) for v in r.embeddings]==[[3.,0.,4.]]*2 and r.prompt_eval_count==3
        assert list(c.embed('fake', 'a', dimensions=1).embeddings[0])==[1.]
        assert list(c.embeddings('fake', 'a').embedding)==[3.,0.,4.]

@pytest.fixture
def pulls(monkeypatch):
    "What is fetched, and the bar's steps; a name with `bad` cannot be"
    from atlas.ground.core import SourceError
    from atlas.service.server import Service
    asked = []
    def pull(name, show):
        asked.append(name)
        if 'bad' in name:
            raise SourceError(f'No {name}', hint='Try another')
        if show:
            with show(100, 'downloading it') as bar:
                bar.update(100)
    # a page that ran here has its own
    used = Service.ollama_pull.__globals__['progress'].__globals__
    monkeypatch.setitem(used, 'pull', pull)
    return asked

def test_pull(client, pulls):
    said = [p.status for p in client.pull('hf.co/org/name:Q4_K_M', stream=True)]
    assert (said[0],said[-1])==('pulling manifest','success') and pulls==['org/name:Q4_K_M']
    assert client.pull('demo').status=='success'
    import ollama
    with pytest.raises(ollama.ResponseError) as e:
        list(client.pull('org/bad', stream=True))
    assert 'No org/bad. Try another' in e.value.error
    with pytest.raises(ollama.ResponseError) as e:
        client.pull('org/bad')
    assert e.value.status_code==404
    for path in ('/etc/passwd','../x'):
        with pytest.raises(ollama.ResponseError) as e:
            client.pull(path)
        assert e.value.status_code==400
    assert len(pulls)==4

@pytest.fixture
def halting_hub(monkeypatch, tmp_path):
    "A hub whose download stops at 400 of 1,000 bytes until this event is set"
    import huggingface_hub
    goes_on = threading.Event()
    for name in 'config.json','model.safetensors':
        (tmp_path/name).write_bytes(b'')
    def download(repo, tqdm_class, **kw):
        files = tqdm_class(total=2, desc='Fetching 2 files')
        bar = tqdm_class(total=1000, unit='B', desc='model.safetensors')
        files.update(1)
        bar.update(400)
        assert goes_on.wait(WAIT)
        bar.update(600)
        return str(tmp_path)
    monkeypatch.setattr(huggingface_hub, 'snapshot_download', download)
    return goes_on

def test_bytes_of_a_repository(halting_hub):
    "Of an id of the hub, too, it is told how many bytes there are and how many have come"
    from atlas.service.ollama import progress
    async def states():
        seen = []
        async for s in progress('org/name', .005):
            seen.append(s)
            if s.get('completed')==400:
                halting_hub.set()
        return seen
    seen = asyncio.run(asyncio.wait_for(states(), WAIT))
    assert [s['status'] for s in seen][::len(seen)-1]==['pulling manifest','success']
    first = next(s for s in seen if 'total' in s)
    bytes_of = first['total'],first['completed']
    assert bytes_of==(1000,400), 'and the number of files is none of bytes'
    assert first['status']=='downloading org/name' and first['digest'].startswith('sha256:')

def test_who_may_fetch(guarded, pulls):
    def ask(key):
        auth = {'Authorization':f'Bearer {key}'}
        body = dict(model='demo', stream=False)
        r = httpx.post(guarded+'/api/pull', json=body, headers=auth, trust_env=False)
        return r.status_code
    assert [ask('sesame'),ask('onion')]==[403,200] and pulls==['demo']
    c = TestClient(fuzzed.app, client=('192.0.2.7', 1), **quiet)
    r = c.post('/api/pull', json=dict(model='demo'))
    assert r.status_code==403 and 'ATLAS_ADMIN_KEY' in r.json()['error'] and pulls==['demo']

def test_what_is_not_offered():
    for path in ('/api/create','/api/copy','/api/push','/api/blobs/sha256:1'):
        r = fuzzed.post(path, json={})
        assert r.status_code==501 and set(r.json())=={'error'}

# ---- keep_alive ----

class Kept(Served):
    "A model that is there, and notes how long it was told to stay, and after how many requests"
    def __init__(self, runner):
        ready = ReadyModel('fake', ['fake'], runner.info, tok, template, runner=runner)
        super().__init__(['fake'], ready)
        self.seen = runner.seen
        self.said = []
    def keep(self, seconds):
        self.said.append((seconds, len(self.seen)))

@pytest.fixture
def kept():
    "A client, and what the one model was told of how long it stays"
    m = Kept(FakeRunner('ok'))
    return TestClient(create_app(Models([m]), doors=DOORS), **quiet),m.said

def test_keep_alive(kept):
    "It counts from the end of the answer"
    c,said = kept
    for n,(v,want) in enumerate([(300,300.),('5m',300.),(0,0.),('-1',-1.)], 1):
        assert c.post('/api/chat', json=dict(messages=HELLO, keep_alive=v)).status_code==200
        assert said==[(want,n)]
        said.clear()
    c.post('/api/generate', json=dict(prompt='a', keep_alive='1h', stream=False))
    c.post('/api/generate', json=dict(keep_alive='2h'))
    assert said==[(3600.,5),(7200.,5)]
    c.post('/api/chat', json=dict(messages=HELLO))
    assert len(said)==2

def test_keep_alive_of_completions(kept):
    c,said = kept
    body = dict(messages=HELLO, prompt='a')
    for n,path in enumerate(('/v1/chat/completions','/v1/completions'), 1):
        said.clear()
        assert c.post(path, json=body|dict(keep_alive='5m')).status_code==200
        assert said==[(300.,n)]
        assert c.post(path, json=body|dict(keep_alive='x')).status_code==400

def test_what_is_no_time(kept):
    c,said = kept
    for bad in 'soon',True,[],{}:
        assert refused(c.post('/api/chat', json=dict(messages=HELLO, keep_alive=bad)))
    assert said==[]

BODIES = { # A path, and a question there that needs no more
    '/api/chat': dict(messages=HELLO, stream=False),
    '/api/generate': dict(prompt='a', stream=False),
    '/api/embed': dict(input='a'),
    '/api/embeddings': dict(prompt='a'),
    '/v1/chat/completions': dict(messages=HELLO),
    '/v1/completions': dict(prompt='a'),
    '/v1/responses': dict(input='a'),
    '/v1/messages': dict(messages=HELLO, max_tokens=4),
    '/v1/embeddings': dict(input='a')}

class Embeds(FakeRunner):
    async def call(self, op, **kw):
        return np.ones(4, np.float32)

@pytest.fixture
def keeps():
    "The same, of a model that also makes vectors"
    m = Kept(Embeds('ok'))
    return TestClient(create_app(Models([m]), doors=DOORS), **quiet),m.said

@pytest.mark.parametrize('path', BODIES)
def test_keep_alive_at_every_door(keeps, path):
    """It means the same wherever it is said; what is no time is refused by its name, and nothing
    is kept"""
    c,said = keeps
    for v,want in (('5m',300.), (300,300.), (0,0.), (-1,-1.)):
        said.clear()
        r = c.post(path, json=BODIES[path]|dict(keep_alive=v))
        assert r.status_code==200, r.text
        assert [s for s,_ in said]==[want] and 'x-atlas-ignored' not in r.headers
    said.clear()
    for bad in ('soon', True, []):
        r = c.post(path, json=BODIES[path]|dict(keep_alive=bad))
        assert r.status_code==400 and 'keep_alive' in r.text
    assert c.post(path, json=BODIES[path]).status_code==200
    assert said==[]

def test_keep_alive_of_a_response_in_the_background(keeps):
    "It counts from the end of the answer, which nobody waits for"
    c,said = keeps
    with c:
        body = dict(input='a', background=True, keep_alive='1h')
        id = c.post('/v1/responses', json=body).json()['id']
        while c.get(f'/v1/responses/{id}').json()['status'] in ('queued','in_progress'):
            pass
        until(lambda: [s for s,_ in said]==[3600.])

def test_keep_alive_of_a_user(guarded):
    auth = dict(authorization='Bearer sesame')
    body = dict(messages=HELLO, keep_alive='5m', stream=False)
    r = httpx.post(guarded+'/api/chat', json=body, headers=auth, trust_env=False)
    assert r.status_code==200 and 'admin' in r.headers['x-atlas-warning']

@pytest.fixture
def gateway(monkeypatch):
    "A client of the true gateway, with one model that is loaded"
    from test_llamacpp_behaviour import reaches,routed
    def with_doors(models): return create_app(models, doors=DOORS)
    monkeypatch.setattr('test_llamacpp_behaviour.create_app', with_doors)
    with routed(dict(model='one')) as (h,_):
        reaches(h, 'one', 'loaded')
        yield h

def said_by_one(h, **kw):
    "What a short answer says, if there is one"
    r = h.post('/api/chat', json=dict(model='one', messages=HELLO, stream=False)|kw)
    return r.status_code==200 and r.json()['message']['content']

def test_until_when_a_model_stays(gateway):
    def until_when():
        there, = gateway.get('/api/ps').json()['models']
        return there['expires_at']
    assert said_by_one(gateway, keep_alive='1h') and until_when()<'2100'
    for ever in 1e18,'1e300',-1:
        assert said_by_one(gateway, keep_alive=ever) and until_when().startswith('9999')

def test_a_model_goes_when_its_time_has_come(gateway):
    """What is kept for 0 seconds is unloaded behind its answer, and loaded by a question without
    words"""
    from test_llamacpp_behaviour import reaches
    def wordless(**kw):
        return gateway.post('/api/generate', json=dict(model='one')|kw).json()['done_reason']
    assert said_by_one(gateway, keep_alive=0)
    reaches(gateway, 'one', 'unloaded')
    assert wordless()=='load'
    reaches(gateway, 'one', 'loaded')
    assert wordless(keep_alive=0)=='unload'
    reaches(gateway, 'one', 'unloaded')
