"""What Open WebUI 0.12 sends, in the order of a visit: the list of models, its page of model
providers, a chat with tools, stopped and gone on with, and files.

Seen between the real one and a server; here its requests come from httpx, and `heard` reads
a stream by the same rules as it does."""
import json,sys,threading
from contextlib import contextmanager
from pathlib import Path
import httpx,pytest
sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from inprocess import loaded as loaded_models
from script_config import ScriptConfig
from scripted import running,service
from test_images import FILES,folder,url  # noqa: F401
from atlas.text.chat import ChatTemplate
from atlas.use.clients import ServerModel,setup
from atlas.service.models import Models
from atlas.service.gateway import modelled
from atlas.service.http import ApiKeys,Rules
from atlas.use.llm import LLM
from atlas.text.tokenizer import byte_tokenizer
from atlas.service.server import create_app
from helpers import waiting
from helpers.patience import PATIENT
from helpers.waiting import WAIT

HEADS = {
    'content-type':'application/json', 'accept':'*/*', 'accept-encoding':'gzip, deflate, br',
    'user-agent':'Python/3.11 aiohttp/3.14.5'}
FAKE = (sys.executable, Path(__file__).parent/'helpers'/'fake_worker.py')
def client(at, key=''):
    auth = {'authorization':f'Bearer {key}'} if key else {}
    return httpx.Client(base_url=at, timeout=WAIT, headers=HEADS|auth)
def user(text): return dict(role='user', content=text)
def task(what, field, about):
    return user(
        f'### Task:\n{what}\n### Output:\nJSON format: {{ "{field}": … }}\n### Chat '
        f'History:\n<chat_history>\nUSER: {about}\nASSISTANT: \n</chat_history>')
def tool(name, **properties):
    shape = dict(properties=properties, type='object')
    f = dict(name=name, description=f'Does {name}.', parameters=shape)
    return dict(type='function', function=f)
def told(r): return r.json()['error']['message']

# -- models

@pytest.fixture(scope='module')
def gateway(tmp_path_factory):
    "Two models behind keys; the second was given as a path, and nobody has loaded it"
    path = tmp_path_factory.mktemp('models')/'second.gguf'
    path.touch()
    side = dict(tokenizer=byte_tokenizer(), template=ChatTemplate('{{ messages[-1].content }}'))
    def text(config): return dict(side)
    say = dict(options=dict(say='I am it.'), config=ScriptConfig)
    both = modelled(['first',str(path)], policy=PATIENT, command=FAKE, text=text, **say)
    rules = Rules(ApiKeys(dict(reader='user', keeper='admin')))
    with running(create_app(Models(both, first=['first']), rules=rules)) as at:
        yield at,str(path)

def loaded(m):
    "The green dot of its menu, where the provider is called llama.cpp"
    return {'loaded':True, 'sleeping':True, 'loading':False, 'unloaded':False}.get(
        m['status']['value'])

def catalog(h):
    return {m['id']:m for m in h.get('/models').raise_for_status().json()['data']}
def until(h, name, value):
    def state(): return catalog(h)[name]['status']['value']
    waiting.until(lambda: state()==value, f'{name} {value}')

def test_keys(gateway):
    """A wrong key is told so, a user may not load, and both hear it as `error.message`, which is
    what its page shows"""
    for key in '', 'wrong':
        r = client(gateway[0], key).get('/v1/models')
        assert r.status_code==401 and 'key' in told(r)
    with client(gateway[0], 'reader') as h:
        assert h.get('/v1/models').status_code==200 and h.get('/models').status_code==200
        r = h.post('/models/load', json=dict(model='second.gguf'))
        assert r.status_code==403 and 'admin' in told(r)

def test_each_model_is_listed_once(gateway):
    "Not also under the folder where it lies, which answers all the same"
    at,path = gateway
    with client(at, 'reader') as h:
        ms = h.get('/v1/models').json()['data']
        assert [m['id'] for m in ms]==['first','second.gguf']
        assert not any(path in m['aliases'] or m.get('name','') is None for m in ms)
        r = h.get(f'/v1/models/{path}')
        # nor did asking load it
        assert r.status_code==200
        assert r.json()['id']==path
        assert r.json()['root']=='second.gguf'
        assert loaded(r.json()) is False
        assert h.get('/v1/models/nobody').status_code==404

@contextmanager
def changes(at, end):
    "Changes of models' states while this is open, until one is `end`"
    events,ready = [],threading.Event()
    def listen():
        with client(at, 'keeper') as h, h.stream('GET', '/models/sse') as r:
            ready.set()
            for l in r.iter_lines():
                if l.startswith('data: '):
                    events.append(json.loads(l[6:]))
                if events and events[-1]['data']['status']==end:
                    return
    t = threading.Thread(target=listen)
    t.start()
    assert ready.wait(WAIT)
    yield events
    t.join(WAIT)
    assert not t.is_alive()

def load_and_unload(h, name):
    "As the page's buttons do it, with the list asked for after each"
    done = dict(success=True)
    assert h.post('/models/load', json=dict(model=name)).json()==done
    now = catalog(h)[name]['status']
    assert now['value'] in ('loading','loaded')
    assert 0<=now.get('progress', dict(value=0))['value']<=1
    until(h, name, 'loaded')
    assert all(map(loaded, h.get('/v1/models').json()['data']))
    again = h.post('/models/load', json=dict(model=name))
    assert again.status_code==400 and name in told(again)
    assert h.post('/models/unload', json=dict(model=name, instance_id=name)).json()==done
    until(h, name, 'unloaded')

def test_page_of_providers(gateway):
    "The changes are told to whoever listens"
    name = 'second.gguf'
    with client(gateway[0], 'keeper') as h:
        until(h, 'first', 'loaded')
        with changes(gateway[0], 'unloaded') as events:
            load_and_unload(h, name)
    mine = [e for e in events if (e['model'],e['event'])==(name,'model_status')]
    states = [e['data']['status'] for e in mine]
    assert (states[0],states[-1])==('loading','unloaded') and 'loaded' in states
    assert any(e['data'].get('progress') for e in events)

def test_buttons_that_we_do_not_have(gateway):
    "Fetch and delete: the refusal says where that is done"
    with client(gateway[0], 'keeper') as h:
        for r,word in (
                (h.post('/models', json=dict(model='some/model')),'atlas pull'),
                (h.delete('/models', params=dict(model='second.gguf')),'atlas rm')
        ):
            assert r.status_code==501 and word in told(r)
        assert set(catalog(h))=={'first','second.gguf'}

# -- a chat

def data_of(lines):
    "What the events of a stream hold"
    return [json.loads(l[6:]) for l in lines if l.startswith('data: {')]

def thought_in(delta):
    "Under whichever name it stands"
    names = 'reasoning_content','reasoning','thinking'
    return next((delta[k] for k in names if delta.get(k)), '')

def add_calls(calls, delta):
    "More of the calls of an answer"
    for t in delta.get('tool_calls') or []:
        f = t.get('function') or {}
        call = calls.setdefault(t['index'], dict(id=t.get('id'), name='', arguments=''))
        call['name'] = f.get('name') or call['name']
        call['arguments'] += f.get('arguments') or ''

def heard(lines):
    "A streamed answer, put together"
    out = dict(said='', thought='', calls={}, finish=None, usage=None, error=None)
    for d in data_of(lines):
        out['usage'] = d.get('usage') or out['usage']
        if not d.get('choices'):
            out['error'] = d.get('error') or out['error']
            continue
        c = d['choices'][0]
        delta = c.get('delta', {})
        out['finish'] = c.get('finish_reason') or out['finish']
        out['said'] += delta.get('content') or ''
        out['thought'] += thought_in(delta)
        add_calls(out['calls'], delta)
    return out

TOOLS = [
    tool('get_current_timestamp'),
    tool(
        'calculate_timestamp',
        days_ago=dict(default=0, description='Days back', type='integer')),
    *(tool(f'builtin_{i}') for i in range(34))]
SHOWS = '''{% for t in tools or [] %}tool {{ t.function.name }}
{% endfor %}{% for m in messages %}<{{ m.role }}>
{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}
{{- m.content or '' }}
{%- for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments|tojson }}]
{%- endfor %}
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}'''

def script(prompt):
    "Answers by what was asked last"
    ask = prompt.rsplit('<user>', 1)[-1]
    for field,value in ('title','"A Talk"'),('follow_ups','["And then?"]'),('tags','["Talks"]'):
        if f'"{field}"' in ask:
            return f'<think>Hm.</think>{{ "{field}": {value} }}'
    if '<tool>' in ask:
        return 'It is in.</think>It is noon.'
    if 'clock' in ask:
        return (
            '<think>I need a tool.</think>I look.\n<tool_call>\n{"name": "calculate_timestamp", '
            '"arguments": {"days_ago": 2}}\n</tool_call>')
    if prompt.endswith('Once upon'):
        return ' a time.'
    if prompt.endswith('<think>A tale'):
        return ', then.</think>There was a dog.'
    return '<think>A greeting.</think>Hello! '+'More. '*(4000 if 'long' in ask else 1)

@pytest.fixture(scope='module')
def speaker():
    with service(script, template=SHOWS) as s:
        yield s
def chat(s, messages, tools=TOOLS, **kw):
    body = dict(stream=True, model='scripted', messages=messages, tools=tools)|kw
    with client(s.url) as h, h.stream('POST', '/v1/chat/completions', json=body) as r:
        assert r.status_code==200 and r.headers['content-type'].startswith('text/event-stream')
        return heard(r.iter_lines())

@pytest.mark.parametrize(
    'field,kw', [('title',dict(max_tokens=1000)), ('follow_ups',{}), ('tags',{})])
def test_requests_behind_a_chat(speaker, field, kw):
    "Its titles, suggestions and tags: the content is JSON, without the thought"
    body = dict(model='scripted', messages=[task('Do it.', field, 'Hi')], stream=False)|kw
    with client(speaker.url) as h:
        r = h.post('/v1/chat/completions', json=body)
    assert field in json.loads(r.json()['choices'][0]['message']['content'])

PIRATE = dict(role='system', content='You are a pirate.')
CLOCK = 'What does the clock say?'

def test_a_turn_with_a_thought(speaker):
    "A system prompt, and a thought in its fold"
    a = chat(speaker, [PIRATE, user('Hello')])
    assert (a['thought'],a['said'])==('A greeting.','Hello! More. ')
    assert (a['finish'],a['calls'])==('stop',{})
    assert speaker.prompts[-1].count('tool ')>=36
    assert '<system>You are a pirate.' in speaker.prompts[-1]

def test_a_call_of_one_of_many_tools(speaker):
    before = dict(role='assistant', content='Hello!', reasoning_content='A greeting.')
    b = chat(speaker, [PIRATE, user('Hello'), before, user(CLOCK)])
    assert (b['thought'],b['said'].strip())==('I need a tool.','I look.')
    assert b['finish']=='tool_calls'
    call, = b['calls'].values()
    assert call['name']=='calculate_timestamp' and json.loads(call['arguments'])==dict(days_ago=2)

def test_the_result_of_a_call(speaker):
    "It comes back with all that came before"
    b = chat(speaker, [user(CLOCK)])
    made = b['calls'][0]
    f = dict(name='calculate_timestamp', arguments=made['arguments'])
    call = dict(id=made['id'], type='function', function=f)
    said = dict(
        role='assistant', content=b['said'], tool_calls=[call], reasoning_content=b['thought'])
    result = dict(role='tool', tool_call_id=made['id'], content='{"current_iso":"12:00"}')
    c = chat(speaker, [user(CLOCK), said, result])
    assert (c['thought'],c['said'],c['finish'])==('It is in.','It is noon.','stop')
    assert '[calculate_timestamp {"days_ago": 2}]' in speaker.prompts[-1]
    assert '12:00' in speaker.prompts[-1]

def test_stop(speaker):
    "Its button closes the connection; the model stops too"
    n = speaker.aborted
    body = dict(stream=True, model='scripted', messages=[user('A long one')], tools=TOOLS)
    with client(speaker.url) as h, h.stream('POST', '/v1/chat/completions', json=body) as r:
        for l in r.iter_lines():
            if 'More' in l or '"content":"M"' in l:
                break
    waiting.until(lambda: speaker.aborted>n)

@pytest.mark.parametrize(
    'said,end,thought,rest',
    [(dict(content='Once upon', reasoning_content='A tale.'), 'Once upon', '', ' a time.'),
     (dict(content='Once upon'), 'Once upon', '', ' a time.'),
     (dict(content='', reasoning_content='A tale'), '<think>A tale', ', then.',
      'There was a dog.')])
def test_continue_response(speaker, said, end, thought, rest):
    """The message that was stopped is the last one; what comes is only the rest, of the thought
    first if that was all there is"""
    a = chat(
        speaker,
        [user('Tell me'),dict(role='assistant')|said],
        continue_final_message=True, add_generation_prompt=False)
    assert speaker.prompts[-1].endswith(end)
    assert (a['thought'],a['said'])==(thought,rest)

SAMPLING = dict(temperature=.5, top_p=.9, min_p=.05, max_tokens=100, seed=42, top_k=40)
SETTINGS = SAMPLING|dict(
    frequency_penalty=.1, presence_penalty=.2, reasoning_effort='medium', stop=['zzz'],
    repeat_penalty=1.1, logit_bias={'5':10,'6':-10}, mirostat=1, num_ctx=2048, think=True,
    chat_template_kwargs=dict(enable_thinking=False))

def test_settings(speaker, monkeypatch):
    "All that its panel of settings can send; what means nothing here is said in a header"
    seen,submit = [],speaker.submit
    def noted(r):
        seen.append(r)
        return submit(r)
    monkeypatch.setattr(speaker, 'submit', noted)
    counts = dict(stream=True, stream_options=dict(include_usage=True))
    body = dict(model='scripted', messages=[user('Hello')])|counts|SETTINGS
    with client(speaker.url) as h, h.stream('POST', '/v1/chat/completions', json=body) as r:
        usage = heard(r.iter_lines())['usage']
        warned = r.headers.get_list('x-atlas-warning')
    p = seen[0].params
    assert usage['total_tokens']==usage['prompt_tokens']+usage['completion_tokens']
    assert any('mirostat' in w for w in warned)
    assert {k:getattr(p, k) for k in SAMPLING}==SAMPLING and p.repetition_penalty==1.1

def test_errors_that_its_page_shows(speaker):
    "An image for a model that reads only text"
    attached = '<attached_files>\n<file name="a.png"/>\n</attached_files>\n\n'
    asked = user([
        dict(type='text', text=attached),
        dict(type='text', text='What is this?'),
        dict(type='image_url', image_url=dict(url=url(FILES['png'])))])
    r = httpx.post(
        f'{speaker.url}/v1/chat/completions', headers=HEADS, timeout=WAIT,
        json=dict(stream=True, model='scripted', tools=TOOLS, messages=[asked]))
    assert r.status_code==400
    assert r.headers['content-type']=='application/json'
    assert 'reads only text' in told(r)

def test_a_worker_that_dies(gateway):
    """The stream ends with an error that is read as one, and the next question is told when to
    come again, or answered"""
    with client(gateway[0], 'reader') as h:
        body = dict(stream=True, model='first', messages=[user('<die>')])
        with h.stream('POST', '/v1/chat/completions', json=body) as r:
            a = heard(r.iter_lines())
        assert a['said'] and a['error']['message'] and not a['finish']
        r = h.post('/v1/chat/completions', json=body|dict(messages=[user('Hi')]))
        assert r.status_code==200 or r.status_code==503 and int(r.headers['retry-after'])>=1

# -- a connection whose API type is Responses

GROWS = {
    'response.output_text.delta':'text', 'response.reasoning_text.delta':'text',
    'response.function_call_arguments.delta':'args'}

def answered(lines):
    "The items of a streamed response, from its events alone"
    items,last = {},None
    for e in data_of(lines):
        last,kind = e,e['type']
        if kind=='response.output_item.added':
            items[e['output_index']] = dict(e['item'], text='', args='')
        elif kind in GROWS:
            items[e['output_index']][GROWS[kind]] += e['delta']
        elif kind=='response.output_item.done':
            told = {k:e['item'].get(k) for k in ('name','call_id','arguments','status')}
            items[e['output_index']] |= {k:v for k,v in told.items() if v is not None}
    assert last['type']=='response.completed' and last['response']['usage']['total_tokens']>0
    return [items[i] for i in sorted(items)]

def message(role, text):
    kind = 'output_text' if role=='assistant' else 'input_text'
    return dict(type='message', role=role, content=[dict(type=kind, text=text)])

def respond(s, items):
    "The items that answer these"
    body = dict(
        stream=True, model='scripted', input=items, instructions='Be a pirate', min_p=.05,
        tools=[dict(type='function', strict=False, **t['function']) for t in TOOLS],
        reasoning_effort='medium')
    with client(s.url) as h, h.stream('POST', '/v1/responses', json=body) as r:
        return answered(r.iter_lines())

def test_a_title_as_a_response(speaker):
    asked = message('user', task('Do it.', 'title', 'Hi')['content'])
    body = dict(model='scripted', stream=False, input=[asked], max_output_tokens=1000)
    with client(speaker.url) as h:
        r = h.post('/v1/responses', json=body).json()
    parts = [p['text'] for i in r['output'] if i['type']=='message' for p in i['content']]
    assert 'title' in json.loads(''.join(parts))

def test_responses(speaker):
    "The same conversation as items, with a system prompt as instructions"
    items = [message('user', CLOCK)]
    thought,text,call = respond(speaker, items)
    assert (thought['type'],thought['text'])==('reasoning','I need a tool.')
    assert text['text'].strip()=='I look.'
    assert (call['type'],call['name'])==('function_call','calculate_timestamp')
    assert json.loads(call['args'])==json.loads(call['arguments'])==dict(days_ago=2)
    made = {k:call[k] for k in ('call_id','name','arguments')}
    items += [
        message('assistant', text['text']), dict(type='function_call', **made),
        dict(type='function_call_output', call_id=call['call_id'], output='12:00')]
    assert [i['text'] for i in respond(speaker, items)]==['It is in.','It is noon.']
    assert '<system>Be a pirate' in speaker.prompts[-1]

# -- files: an image in a message, and a text whose pieces become vectors

@pytest.fixture(scope='module')
def eyes(folder):
    "A client of a server whose model sees"
    llm = LLM(str(folder), device='cpu', max_seq_len=64)
    with running(create_app(loaded_models(llm, ['eyes']))) as at, client(at, 'x') as h:
        yield h

def test_an_image(eyes):
    "A model that sees answers about it"
    def ask(*parts):
        words = [dict(type='text', text=t) for t in ('w1 ','w3 w4')]
        asked = [user([*words, *parts])]
        body = dict(model='eyes', stream=False, max_tokens=2, messages=asked)
        return eyes.post('/v1/chat/completions', json=body)
    seen = ask(dict(type='image_url', image_url=dict(url=url(FILES['png']))))
    plain = ask()
    assert seen.status_code==200
    assert seen.json()['usage']['prompt_tokens']>plain.json()['usage']['prompt_tokens']
    only, = eyes.get('/v1/models').json()['data']
    assert 'image' in only['architecture']['input_modalities']

@pytest.mark.parametrize('texts', [['w3 w4 w5'],['w3 w4','w5']])
def test_files(eyes, texts):
    "The one endpoint that its search needs gives a vector for each text"
    r = eyes.post('/v1/embeddings', json=dict(input=texts, model='eyes')).json()['data']
    assert [d['index'] for d in r]==list(range(len(texts)))
    assert all(isinstance(x, float) for d in r for x in d['embedding'])
    assert len({len(d['embedding']) for d in r})==1

def test_launch():
    "`atlas launch open-webui` makes one connection, with the buttons, and its model for new chats"
    e = setup('open-webui', ServerModel('http://127.0.0.1:8888', 'first', 512, 'sesame')).env
    assert e['OPENAI_API_BASE_URLS']=='http://127.0.0.1:8888/v1'
    assert (e['OPENAI_API_KEYS'],e['DEFAULT_MODELS'])==('sesame','first')
    assert json.loads(e['OPENAI_API_CONFIGS'])=={'0':dict(provider='llama.cpp')}
