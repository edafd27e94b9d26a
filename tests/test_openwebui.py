"""What Open WebUI 0.12 sends, in the order of a visit: the list of models, its page of model
providers, a chat with tools, stopped and gone on with, and files.

Seen between the real one and a server; here its requests come from httpx, and `heard` reads
a stream by the same rules as it does."""
import json,sys,threading,time
from pathlib import Path
import httpx,pytest
sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from inprocess import loaded as loaded_models
from script_config import ScriptConfig
from scripted import running,service
from test_images import FILES,folder,url
from atlas.text.chat import ChatTemplate
from atlas.use.clients import ServerModel,setup
from atlas.service.models import Models
from atlas.service.gateway import modelled
from atlas.service.http import Keys,Rules
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
    return httpx.Client(
        base_url=at, timeout=WAIT,
        headers=HEADS|({'authorization':f'Bearer {key}'} if key else {}))
def user(text): return dict(role='user', content=text)
def task(what, field, about):
    return user(
        f'### Task:\n{what}\n### Output:\nJSON format: {{ "{field}": … }}\n### Chat '
        f'History:\n<chat_history>\nUSER: {about}\nASSISTANT: \n</chat_history>')
def tool(name, **properties):
    return dict(
        type='function',
        function=dict(
            name=name, description=f'Does {name}.',
            parameters=dict(properties=properties, type='object')))
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
    both = modelled(
        ['first',str(path)], policy=PATIENT,
        command=FAKE, text=text, **say)
    ms = Models(both, first=['first'])
    with running(
        create_app(ms, rules=Rules(Keys(dict(reader='user', keeper='admin'))))
    ) as at:
        yield at,str(path)

def loaded(m):
    "The green dot of its menu, where the provider is called llama.cpp"
    return {'loaded':True, 'sleeping':True, 'loading':False, 'unloaded':False}.get(
        m['status']['value'])

def catalog(h):
    return {
        m['id']:m
        for m in h.get('/models').raise_for_status().json()['data']}
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

def test_page_of_providers(gateway):
    """Load and unload as its buttons do, with the list asked for after each; the changes are
    told to whoever listens"""
    events,ready = [],threading.Event()
    def listen():
        with client(gateway[0], 'keeper') as h, h.stream('GET', '/models/sse') as r:
            ready.set()
            for l in r.iter_lines():
                if l.startswith('data: '):
                    events.append(json.loads(l[6:]))
                if events and events[-1]['data']['status']=='unloaded':
                    return
    with client(gateway[0], 'keeper') as h:
        until(h, 'first', 'loaded')
        t = threading.Thread(target=listen)
        t.start()
        assert ready.wait(WAIT)
        assert h.post(
            '/models/load', json=dict(model='second.gguf')
        ).json()==dict(success=True)
        now = catalog(h)['second.gguf']['status']
        assert now['value'] in ('loading','loaded')
        assert 0<=now.get('progress', dict(value=0))['value']<=1
        until(h, 'second.gguf', 'loaded')
        assert all(map(loaded, h.get('/v1/models').json()['data']))
        again = h.post('/models/load', json=dict(model='second.gguf'))
        assert again.status_code==400 and 'second.gguf' in told(again)
        assert h.post(
            '/models/unload', json=dict(model='second.gguf', instance_id='second.gguf')
        ).json()==dict(success=True)
        until(h, 'second.gguf', 'unloaded')
        t.join(WAIT)
        assert not t.is_alive()
        states = [
            e['data']['status'] for e in events
            if (e['model'],e['event'])==('second.gguf','model_status')]
        assert states[0]=='loading'
        assert 'loaded' in states
        assert states[-1]=='unloaded'
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

def heard(lines):
    "A streamed answer, put together"
    out = dict(
        said='', thought='', calls={},
        finish=None, usage=None, error=None)
    for l in lines:
        if not l.startswith('data: {'):
            continue
        d = json.loads(l[6:])
        out['usage'] = d.get('usage') or out['usage']
        if not d.get('choices'):
            out['error'] = d.get('error') or out['error']
            continue
        c = d['choices'][0]
        delta = c.get('delta', {})
        out['finish'] = c.get('finish_reason') or out['finish']
        out['said'] += delta.get('content') or ''
        out['thought'] += (
            delta.get('reasoning_content') or delta.get('reasoning')
            or delta.get('thinking') or '')
        for t in delta.get('tool_calls') or []:
            call = out['calls'].setdefault(
                t['index'],
                dict(id=t.get('id'), name='', arguments=''))
            f = t.get('function') or {}
            call['name'] = f.get('name') or call['name']
            call['arguments'] += f.get('arguments') or ''
    return out

TOOLS = [
    tool('get_current_timestamp'),
    tool(
        'calculate_timestamp',
        days_ago=dict(default=0, description='Days back', type='integer')),
    *(tool(f'builtin_{i}') for i in range(34))]
SHOWS = '''{% for t in tools or [] %}tool {{ t.function.name }}
{% endfor %}{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments|tojson }}]{% endfor %}
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
    with client(s.url) as h, h.stream(
        'POST', '/v1/chat/completions',
        json=dict(stream=True, model='scripted', messages=messages, tools=tools)|kw
    ) as r:
        assert r.status_code==200 and r.headers['content-type'].startswith('text/event-stream')
        return heard(r.iter_lines())

@pytest.mark.parametrize(
    'field,kw',
    [('title',dict(max_tokens=1000)),
     ('follow_ups',{}), ('tags',{})])
def test_requests_behind_a_chat(speaker, field, kw):
    "Its titles, suggestions and tags: the content is JSON, without the thought"
    with client(speaker.url) as h:
        r = h.post(
            '/v1/chat/completions',
            json=dict(
                model='scripted',
                messages=[task('Do it.', field, 'Hi')], stream=False)
            |kw)
    assert field in json.loads(r.json()['choices'][0]['message']['content'])

def test_turns_with_thoughts_and_tools(speaker):
    """A system prompt, a thought in its fold, a call of one of many tools, its result, and one
    more question, each with all that came before"""
    turns = [dict(role='system', content='You are a pirate.'),user('Hello')]
    a = chat(speaker, turns)
    assert (
        a['thought'],a['said'],a['finish'],
        a['calls']
    )==('A greeting.','Hello! More. ','stop',{})
    assert speaker.prompts[-1].count('tool ')>=36
    assert '<system>You are a pirate.' in speaker.prompts[-1]
    turns += [
        dict(role='assistant', content=a['said'], reasoning_content=a['thought']),
        user('What does the clock say?')]
    b = chat(speaker, turns)
    assert b['finish']=='tool_calls'
    assert b['said'].strip()=='I look.'
    assert b['thought']=='I need a tool.'
    assert [
        (c['name'],json.loads(c['arguments']))
        for c in b['calls'].values()
    ]==[('calculate_timestamp',dict(days_ago=2))]
    call = dict(
        id=b['calls'][0]['id'],
        type='function',
        function=dict(name='calculate_timestamp', arguments=b['calls'][0]['arguments']))
    turns += [
        dict(
            role='assistant', content=b['said'],
            tool_calls=[call], reasoning_content=b['thought']),
        dict(role='tool', tool_call_id=call['id'], content='{"current_iso":"12:00"}')]
    c = chat(speaker, turns)
    assert (c['thought'],c['said'],c['finish'])==('It is in.','It is noon.','stop')
    assert '[calculate_timestamp {"days_ago": 2}]' in speaker.prompts[-1]
    assert '12:00' in speaker.prompts[-1]

def test_stop(speaker):
    "Its button closes the connection; the model stops too"
    n = speaker.aborted
    with client(speaker.url) as h, h.stream(
        'POST', '/v1/chat/completions',
        json=dict(
            stream=True, model='scripted',
            messages=[user('A long one')], tools=TOOLS)
    ) as r:
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

def test_settings(speaker):
    "All that its panel of settings can send; what means nothing here is said in a header"
    kw = dict(
        temperature=.5, top_p=.9, min_p=.05, max_tokens=100,
        frequency_penalty=.1, presence_penalty=.2, reasoning_effort='medium', seed=42,
        stop=['zzz'], top_k=40, repeat_penalty=1.1,
        logit_bias={'5':10,'6':-10},
        mirostat=1, num_ctx=2048, think=True,
        chat_template_kwargs=dict(enable_thinking=False))
    seen,submit = [],speaker.submit
    speaker.submit = lambda r: (seen.append(r), submit(r))[1]
    try:
        with client(speaker.url) as h, h.stream(
            'POST', '/v1/chat/completions',
            json=dict(
                model='scripted', messages=[user('Hello')],
                stream=True, stream_options=dict(include_usage=True))
            |kw
        ) as r:
            a,warned = heard(r.iter_lines()),r.headers.get_list('x-atlas-warning')
    finally:
        del speaker.submit
    p = seen[0].params
    assert a['usage']['total_tokens']==a['usage']['prompt_tokens']+a['usage']['completion_tokens']
    assert any('mirostat' in w for w in warned)
    assert (
        p.temperature,p.top_p,p.min_p,p.max_tokens,
        p.seed,p.top_k,p.repetition_penalty
    )==(.5,.9,.05,100,42,40,1.1)

def test_errors_that_its_page_shows(speaker):
    "An image for a model that reads only text"
    r = httpx.post(
        f'{speaker.url}/v1/chat/completions', headers=HEADS, timeout=WAIT,
        json=dict(
            stream=True, model='scripted', tools=TOOLS,
            messages=[
                user([
                    dict(
                        type='text',
                        text='<attached_files>\n<file name="a.png"/>\n</attached_files>\n\n'),
                    dict(type='text', text='What is this?'),
                    dict(type='image_url', image_url=dict(url=url(FILES['png'])))])]))
    assert r.status_code==400
    assert r.headers['content-type']=='application/json'
    assert 'reads only text' in told(r)

def test_a_worker_that_dies(gateway):
    """The stream ends with an error that is read as one, and the next question is told when to
    come again, or answered"""
    with client(gateway[0], 'reader') as h:
        with h.stream(
            'POST', '/v1/chat/completions',
            json=dict(stream=True, model='first', messages=[user('<die>')])
        ) as r:
            a = heard(r.iter_lines())
        assert a['said'] and a['error']['message'] and not a['finish']
        r = h.post(
            '/v1/chat/completions',
            json=dict(stream=True, model='first', messages=[user('Hi')]))
        assert r.status_code==200 or r.status_code==503 and int(r.headers['retry-after'])>=1

# -- a connection whose API type is Responses

def answered(lines):
    "The items of a streamed response, from its events alone"
    items,last = {},None
    for l in lines:
        if not l.startswith('data: {'):
            continue
        e = last = json.loads(l[6:])
        kind = e['type']
        if kind=='response.output_item.added':
            items[e['output_index']] = dict(e['item'], text='', args='')
        elif kind in ('response.output_text.delta','response.reasoning_text.delta'):
            items[e['output_index']]['text'] += e['delta']
        elif kind=='response.function_call_arguments.delta':
            items[e['output_index']]['args'] += e['delta']
        elif kind=='response.output_item.done':
            items[e['output_index']] |= {
                k:v for k,v in e['item'].items()
                if k in ('name','call_id','arguments','status')}
    assert last['type']=='response.completed' and last['response']['usage']['total_tokens']>0
    return [items[i] for i in sorted(items)]

def test_responses(speaker):
    "The same conversation as items, with a system prompt as instructions"
    def message(role, text):
        return dict(
            type='message', role=role,
            content=[dict(type='output_text' if role=='assistant' else 'input_text', text=text)])
    flat = [dict(type='function', strict=False, **t['function']) for t in TOOLS]
    def ask(items):
        with client(speaker.url) as h, h.stream(
            'POST', '/v1/responses',
            json=dict(
                stream=True, model='scripted', tools=flat, input=items,
                instructions='Be a pirate', min_p=.05, reasoning_effort='medium')
        ) as r:
            return answered(r.iter_lines())
    with client(speaker.url) as h:
        r = h.post(
            '/v1/responses',
            json=dict(
                model='scripted', stream=False,
                input=[message('user', task('Do it.', 'title', 'Hi')['content'])],
                max_output_tokens=1000)).json()
    assert 'title' in json.loads(
        ''.join(
            p['text'] for i in r['output']
            if i['type']=='message' for p in i['content']))
    items = [message('user', 'What does the clock say?')]
    thought,text,call = ask(items)
    assert (thought['type'],thought['text'],text['text'].strip())==(
        'reasoning','I need a tool.','I look.')
    assert (
        call['type'],call['name'],
        json.loads(call['args']),
        json.loads(call['arguments'])
    )==('function_call','calculate_timestamp',dict(days_ago=2),dict(days_ago=2))
    items += [
        message('assistant', text['text']),
        dict(
            type='function_call', call_id=call['call_id'],
            name=call['name'], arguments=call['arguments']),
        dict(type='function_call_output', call_id=call['call_id'], output='12:00')]
    assert [i['text'] for i in ask(items)]==['It is in.','It is noon.']
    assert '<system>Be a pirate' in speaker.prompts[-1]

# -- files: an image in a message, and a text whose pieces become vectors

def test_files(folder):
    """A model that sees answers about an image, and the one endpoint that its search needs gives
    a vector for each text"""
    llm = LLM(str(folder), device='cpu', max_seq_len=64)
    app = create_app(loaded_models(llm, ['eyes']))
    with running(app) as at, client(at, 'x') as h:
        def ask(*parts):
            return h.post(
                '/v1/chat/completions',
                json=dict(
                    model='eyes', stream=False, max_tokens=2,
                    messages=[
                        user([
                            dict(type='text', text='w1 '),
                            dict(type='text', text='w3 w4'),*parts])]))
        seen = ask(dict(type='image_url', image_url=dict(url=url(FILES['png']))))
        plain = ask()
        assert seen.status_code==200
        assert seen.json()['usage']['prompt_tokens']>plain.json()['usage']['prompt_tokens']
        assert 'image' in h.get('/v1/models').json()['data'][0]['architecture']['input_modalities']
        for texts in ['w3 w4 w5'],['w3 w4','w5']:
            r = h.post(
                '/v1/embeddings', json=dict(input=texts, model='eyes')
            ).json()['data']
            assert [d['index'] for d in r]==list(range(len(texts)))
            assert all(isinstance(x, float) for d in r for x in d['embedding'])
            assert len({len(d['embedding']) for d in r})==1

def test_launch():
    "`atlas launch open-webui` makes one connection, with the buttons, and its model for new chats"
    e = setup('open-webui', ServerModel('http://127.0.0.1:8888', 'first', 512, 'sesame')).env
    assert (
        e['OPENAI_API_BASE_URLS'],e['OPENAI_API_KEYS'],
        json.loads(e['OPENAI_API_CONFIGS']),e['DEFAULT_MODELS']
    )==('http://127.0.0.1:8888/v1','sesame',{'0':dict(provider='llama.cpp')},'first')
