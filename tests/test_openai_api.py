"""OpenAI's API through OpenAI's own client: tools, reasoning, formats, counts, vectors, and what
is remembered of prompts."""
import asyncio,json,random,re,threading
import httpx,numpy as np,openai,pytest
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass,replace
from unittest.mock import Mock
from pydantic import BaseModel
from starlette.testclient import TestClient
from tokenizers import Tokenizer as HFTokenizer,decoders,models,pre_tokenizers
from atlas.text.chat import ChatTemplate
from atlas.ground.config import PRESETS
from atlas.ground.core import RequestError
from atlas.ground.requests import Event
from atlas.use.llm import LLM
from atlas.service.server import create_app
from atlas.text.tokenizer import Tokenizer
from test_server import END,FakeRunner,HELLO,WAIT,app_of,client_of,head,live
from test_server import template,threaded,tok
from inprocess import always,loaded
from scripted import Speaker as Scripted,service
from helpers.waiting import until

ONCE = httpx.Limits(max_keepalive_connections=0)
web = httpx.Client(timeout=WAIT, limits=ONCE)

THINKING = ChatTemplate(
    '{% for m in messages %}[{{ m.role }}]{% if m.reasoning_content %}({{ m.reasoning_content '
    '}}){% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ '
    'c.function.arguments|tojson }}{% endfor %}\n{% endfor %}'
    '{% if tools %}tools: {{ tools|map(attribute="function")|map(attribute="name")|join(",") '
    '}}\n{% endif %}{{ reasoning_effort }}>{% if enable_thinking is false %}<think></think>{% '
    'endif %}')
CITY = dict(type='object', properties=dict(city=dict(type='string')), required=['city'])
WEATHER = dict(
    type='function', function=dict(name='weather', description='Of a city', parameters=CITY))
NUMBERS = dict(type='object', properties=dict(a=dict(type='integer'), b=dict(type='integer')))
SUM = dict(type='function', function=dict(name='sum', parameters=NUMBERS))
CALL = (
    '<think>Look it up.</think>I will look.<tool_call>\n{"name": "weather", "arguments": '
    '{"city": "Paris"}}\n</tool_call>\n<tool_call>\n{"name": "sum", "arguments": {"a": 1, "b": '
    '2}}\n</tool_call>')

class Guides:
    "Notes what it was asked; refuses one schema"
    def __init__(self):
        self.seen = []
    def check(self, spec):
        self.seen.append(spec)
        if 'bomb' in json.dumps(spec):
            raise RequestError('The schema is too large', param='response_format')
        return ['pattern was left out'] if 'odd' in json.dumps(spec) else []

class Speaker(FakeRunner):
    "A fake runner that can score and embed"
    async def call(self, op, ids, **kw):
        if op=='embed':
            return [3.,4.,0.] if kw['pooling']=='last' else [0.,0.,1.]
        def score(k, i): return -1.-k,[(i,-1.-k),(65,-5.)][:kw['k']]
        return [score(k, i) for k,i in enumerate(ids[1:])]

@contextmanager
def speaking(text, **kw):
    "A server whose model says `text`; (client, runner, guides, port)"
    r,g = Speaker(text),Guides()
    side = dict(parsers=('hermes','qwen3'), guides=g, template=THINKING)|kw
    with live(r, **side) as port:
        yield client_of(port),r,g,port

def plain(port):
    "A client that knows no API"
    return httpx.Client(timeout=WAIT, base_url=f'http://127.0.0.1:{port}')

@pytest.fixture(scope='module')
def calling():
    with speaking(CALL) as s:
        yield s

def ask(c, **kw):
    return c.chat.completions.create(**(dict(model='fake', messages=HELLO)|kw))

# ---- Tools and reasoning ----

BOTH = [('weather',dict(city='Paris')),('sum',dict(a=1, b=2))] # As `CALL` has them

def test_tool_calls(calling):
    a = ask(calling[0], tools=[WEATHER,SUM])
    m = a.choices[0].message
    calls = [(t.function.name, json.loads(t.function.arguments)) for t in m.tool_calls]
    assert calls==BOTH
    assert a.choices[0].finish_reason=='tool_calls'
    assert m.content.strip()=='I will look.'
    assert m.reasoning==m.reasoning_content=='Look it up.'
    assert len({t.id for t in m.tool_calls})==2
    assert all(re.fullmatch('call_[0-9a-f]{24}', t.id) for t in m.tool_calls)
    assert a.usage.completion_tokens_details.reasoning_tokens==len('<think>Look it up.</think>')-1
    assert a.usage.prompt_tokens_details.cached_tokens==0

def test_tools_that_nothing_enforces(calling):
    "The choice is auto"
    c,r,g = calling[:3]
    seen = len(g.seen)
    ask(c, tools=[WEATHER,SUM])
    assert len(g.seen)==seen and r.seen[-1].guide is None
    assert 'tools: weather,sum' in tok.decode(r.seen[-1].prompt)

class Gathered:
    "A stream, put together"
    def __init__(self, chunks):
        self.reasoning = self.content = ''
        self.ends = []
        self.calls = {} # Name and arguments, by index
        for x in chunks:
            self.add(x.choices[0])
    def add(self, choice):
        d = choice.delta
        self.reasoning += getattr(d, 'reasoning_content', None) or ''
        self.content += d.content or ''
        self.ends += filter(None, [choice.finish_reason])
        for t in d.tool_calls or []:
            name,args = self.calls.get(t.index, ('',''))
            f = t.function
            self.calls[t.index] = name+(f.name or ''),args+(f.arguments or '')

def test_tool_calls_streamed(calling):
    h = Gathered(ask(calling[0], tools=[WEATHER,SUM], stream=True))
    assert [(n, json.loads(a)) for n,a in h.calls.values()]==BOTH
    assert (h.reasoning,h.content.strip())==('Look it up.','I will look.')
    assert h.ends==['tool_calls']

def test_tool_calls_that_the_client_gathers(calling):
    kw = dict(model='fake', messages=HELLO, tools=[WEATHER,SUM])
    with calling[0].chat.completions.stream(**kw) as s:
        m = s.get_final_completion().choices[0].message
    assert m.tool_calls[1].function.arguments=='{"a": 1, "b": 2}'

@pytest.mark.parametrize(
    'choice,spec',
    [('required',dict(choice='required', names=['weather','sum'], parallel=True)),
     (dict(type='function', function=dict(name='sum')),
      dict(choice='required', names=['sum'], parallel=False))])
def test_tool_choice(calling, choice, spec):
    c,r,g = calling[:3]
    ask(c, tools=[WEATHER,SUM], tool_choice=choice)
    s = r.seen[-1].guide
    assert g.seen[-1]==s
    assert (s['kind'],s['parser'],s['after'])==('tools','hermes','</think>')
    assert s['strict'] is False
    told = dict(
        choice=s['choice'], names=[t['name'] for t in s['tools']], parallel=s['parallel'])
    assert told==spec

def test_tool_choice_none(calling):
    c,r = calling[:2]
    a = ask(c, tools=[WEATHER], tool_choice='none')
    assert a.choices[0].message.tool_calls is None
    assert '<tool_call>' in a.choices[0].message.content
    assert 'tools:' not in tok.decode(r.seen[-1].prompt)
    assert r.seen[-1].guide is None

def test_a_strict_tool(calling):
    c,r = calling[:2]
    strict = dict(type='function', function=SUM['function']|dict(strict=True))
    ask(c, tools=[strict], parallel_tool_calls=False)
    g = r.seen[-1].guide
    assert (g['choice'],g['parallel'],g['strict'])==('auto',False,True)

@pytest.mark.parametrize('bad', ['some', dict(type='function', function=dict(name='other'))])
def test_tool_choice_of_what_is_not_there(calling, bad):
    with pytest.raises(openai.BadRequestError) as e:
        ask(calling[0], tools=[SUM], tool_choice=bad)
    assert e.value.param=='tool_choice'

def test_the_second_turn(calling):
    c,r = calling[:2]
    call = dict(id='call_1', type='function', function=dict(name='sum', arguments='{"a": 1}'))
    ask(
        c,
        messages=[
            dict(role='developer', content='Be brief'), *HELLO,
            dict(role='assistant', content=None, tool_calls=[call], reasoning_content='Add'),
            dict(role='tool', tool_call_id='call_1', content='1'),
            dict(role='system', content='Be kind')],
        tools=[SUM])
    assert tok.decode(r.seen[-1].prompt).startswith(
        '[system]Be brief\n\nBe kind[user]Say something[assistant](Add)sum{"a": '
        '1}[tool]1tools: sum')

def test_hosted_tools_are_left_out_with_a_warning(calling):
    c = calling[0]
    a = c.chat.completions.with_raw_response.create(
        model='fake', messages=HELLO,
        tools=[dict(type='web_search'),WEATHER],
        extra_body=dict(chat_template_kwargs=dict(zebra=1)))
    assert 'web_search' in a.headers.get_list('x-atlas-warning')[0]
    assert 'zebra' in a.headers.get_list('x-atlas-warning')[1]
    assert a.parse().choices[0].message.tool_calls

@pytest.mark.parametrize('kw', [
    dict(enable_thinking=False), dict(chat_template_kwargs=dict(enable_thinking=False)),
    dict(thinking=dict(type='disabled')), dict(thinking_token_budget=0)])
def test_no_thinking(calling, kw):
    c,r = calling[:2]
    a = ask(c, extra_body=kw)
    assert tok.decode(r.seen[-1].prompt).endswith('<think></think>')
    assert a.choices[0].message.content.startswith('<think>Look')
    assert r.seen[-1].guide is None

def test_thinking(calling):
    c,r = calling[:2]
    ask(c, reasoning_effort='high', extra_body=dict(thinking_budget=7))
    assert tok.decode(r.seen[-1].prompt).endswith('high>')
    g = r.seen[-1].guide
    assert (g['kind'],g['after'],g['budget'])==('free','</think>',7)
    with pytest.raises(openai.BadRequestError) as e:
        ask(c, extra_body=dict(chat_template_kwargs=dict(tokenize=True)))
    assert e.value.param=='chat_template_kwargs'

ONE_AT_MOST = dict(tools=[WEATHER,SUM], parallel_tool_calls=False)

def test_one_call_at_most(calling):
    x = ask(calling[0], **ONE_AT_MOST).choices[0]
    assert [t.function.name for t in x.message.tool_calls]==['weather']
    assert x.finish_reason=='tool_calls'

def test_one_call_at_most_in_a_stream(calling):
    h = Gathered(ask(calling[0], stream=True, **ONE_AT_MOST))
    assert [name for name,_ in h.calls.values()]==['weather']
    assert h.ends==['tool_calls']

@pytest.mark.parametrize('stream', [False,True])
def test_one_call_at_most_of_a_response(calling, stream):
    tools = [dict(type='function', **t['function']) for t in (WEATHER,SUM)]
    kw = dict(model='fake', input='x', tools=tools, parallel_tool_calls=False)
    if stream:
        with calling[0].responses.stream(**kw) as s:
            r = s.until_done().get_final_response()
    else:
        r = calling[0].responses.create(**kw)
    assert [o.name for o in r.output if o.type=='function_call']==['weather']

@pytest.mark.parametrize('choice', ['required', dict(type='web_search')])
def test_a_choice_of_what_was_left_out_is_text(calling, choice):
    c,r = calling[:2]
    a = c.chat.completions.with_raw_response.create(
        model='fake', messages=HELLO,
        tools=[dict(type='web_search')], tool_choice=choice)
    assert 'web_search' in a.headers['x-atlas-warning']
    assert a.parse().choices[0].message.content.startswith('I will look.')
    assert r.seen[-1].guide is None

def test_parts_of_messages(calling):
    c,r = calling[:2]
    talk = [
        dict(
            role='user',
            content=['a', dict(type='input_text', text='b')]),
        dict(
            role='assistant',
            content=[
                dict(type='refusal', refusal='c'),
                dict(type='output_text', text='d')]),
        dict(role='assistant', function_call=dict(name='sum', arguments='{}')),
        dict(role='function', name='sum', content='3')]
    ask(c, messages=talk)
    assert tok.decode(r.seen[-1].prompt).startswith(
        '[user]a\nb[assistant]c\nd[assistant]sum{}[tool]3')

UNTOLD = [dict(include_reasoning=False),dict(reasoning=dict(exclude=True))]

@pytest.mark.parametrize('kw', UNTOLD)
def test_reasoning_that_is_not_told(calling, kw):
    a = ask(calling[0], logprobs=True, extra_body=kw)
    m = a.choices[0].message
    assert not hasattr(m, 'reasoning') and not hasattr(m, 'reasoning_content')
    assert m.content.startswith('I will look.')
    assert 'Look it up' not in a.to_json()
    assert a.usage.completion_tokens_details.reasoning_tokens>9

@pytest.mark.parametrize('kw', UNTOLD)
def test_reasoning_that_is_not_told_in_a_stream(calling, kw):
    xs = [x.choices[0] for x in ask(calling[0], logprobs=True, stream=True, extra_body=kw)]
    assert ''.join(x.delta.content or '' for x in xs).startswith('I will look.')
    assert not any(getattr(x.delta, 'reasoning', None) for x in xs)
    tokens = [t.token for x in xs if x.logprobs for t in x.logprobs.content]
    assert 'Look' not in ''.join(tokens)

@pytest.mark.parametrize(
    'kw,param',
    [(dict(stream_options=dict(include_usage=True)),'stream_options'),
     (dict(top_logprobs=21, logprobs=True),'top_logprobs'),
     (dict(top_logprobs=-1, logprobs=True),'top_logprobs'),
     (dict(top_logprobs=1),'top_logprobs'),
     (dict(stream=True, prompt_logprobs=1),'prompt_logprobs'),
     (dict(chat_template='{{ 1 }}'),'chat_template'),
     (dict(modalities=['audio']),'modalities'),
     (dict(max_completion_tokens=0),'max_completion_tokens')])
def test_promises_that_would_be_broken(calling, kw, param):
    with pytest.raises(openai.APIStatusError) as e:
        ask(calling[0], extra_body=kw)
    assert (e.value.status_code, e.value.param)==(501 if param=='modalities' else 400, param)

def test_fields_without_effect_are_named(calling):
    c = calling[0]
    a = c.chat.completions.with_raw_response.create(
        model='fake', messages=HELLO,
        functions=[dict(name='f', parameters={})],
        store=True, metadata=dict(a='b'),
        user='u', service_tier='auto',
        prediction=dict(type='content', content='x'),
        verbosity='low', modalities=['text'],
        extra_body=dict(bad_words=['x'], unheard_of=1))
    assert a.headers.get_list('x-atlas-warning')==[
        'bad_words, functions left out: not offered here']
    assert a.headers.get_list('x-atlas-ignored')==['bad_words, functions, unheard_of']

def told(path, port, **kw):
    "The fields that an answer says were ignored"
    asked = dict(model='fake', max_tokens=4)|kw
    r = web.post(f'http://127.0.0.1:{port}{path}', json=asked)
    assert r.status_code==200, r.text
    return r.headers.get('x-atlas-ignored')

@pytest.fixture
def log(monkeypatch):
    "The service's log; it has told of no field yet"
    from atlas.service.service import Service
    # its names, in the package or in its page where that has run in this process
    module = Service.in_place.__globals__
    spy = Mock(told=set())
    monkeypatch.setitem(module, '_told', spy.told)
    monkeypatch.setitem(module, '_log', spy)
    return spy

SHORT = dict(max_output_tokens=16, store=False)
EVERY_API = [
    ('/v1/chat/completions', dict(messages=HELLO)),
    ('/v1/completions', dict(prompt='a')),
    ('/v1/messages', dict(messages=HELLO)),
    ('/v1/responses', dict(input='a', max_tokens=None)|SHORT),
    ('/v1/messages/count_tokens', dict(messages=HELLO)),
    ('/v1/responses/input_tokens', dict(input='a', max_tokens=None)),
    ('/v1/embeddings', dict(input='a', max_tokens=None)),
    ('/tokenize', dict(prompt='a', max_tokens=None)),
    ('/tokenize', dict(messages=HELLO)),
    ('/detokenize', dict(tokens=[65], max_tokens=None)),
    ('/apply-template', dict(messages=HELLO))]

def test_ignored_fields_are_told_once(calling, log):
    "By every API, whatever their names hold"
    port = calling[3]
    strange = {'foo':1, 'bar\r\nx-evil: 1':2, 'quiet':None}
    for path,kw in EVERY_API:
        for _ in range(2):
            assert told(path, port, **kw, **strange)=='bar??x-evil??1, foo'
        usual = dict(metadata={}, user='u', service_tier='auto')
        assert told(path, port, **kw, **usual) is None
    line = 'Ignored fields of requests: %s','bar??x-evil??1, foo'
    assert [c.args for c in log.warning.call_args_list]==[line]

def test_a_stranger_cannot_fill_log_or_memory_with_inventions(calling, log):
    for i in range(40):
        invented = {f'made_up_{i}_{k}':1 for k in range(16)}
        told('/v1/completions', calling[3], prompt='a', **invented)
    assert len(log.told)==256
    assert log.warning.call_count==256//16  # a line for each request, until memory is full

ALL_USAGE = dict(include_usage=True, every=3, include_obfuscation=True)
ODD = dict(type='text', odd=1)
OPTIONS = [
    ('/v1/chat/completions',
     dict(messages=HELLO, stream=True, stream_options=ALL_USAGE), 'stream_options.every'),
    ('/v1/chat/completions',
     dict(
         messages=HELLO,
         thinking=dict(type='disabled', depth=1), zeal=1),
     'thinking.depth, zeal'),
    ('/v1/messages',
     dict(
         messages=HELLO, max_tokens=4,
         output_config=dict(effort='low', tone='x')),
     'output_config.tone'),
    ('/v1/responses',
     SHORT|dict(input='a', text=dict(verbosity='low', format=ODD)),
     'text.format.odd'),
    ('/v1/responses',
     SHORT|dict(input='a', reasoning=dict(effort='low', tokens=9)),
     'reasoning.tokens')]

@pytest.mark.parametrize('path,kw,named', OPTIONS)
def test_ignored_fields_of_options_are_named(calling, path, kw, named):
    r = web.post(f'http://127.0.0.1:{calling[3]}{path}', json=dict(model='fake')|kw)
    assert r.status_code==200, r.text
    assert r.headers.get('x-atlas-ignored')==named

def test_what_real_clients_send_is_no_news():
    "Nothing that the libraries of OpenAI and Anthropic know, and that changes no answer, is told"
    from anthropic.types.message_create_params import MessageCreateParamsBase as Messages
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase as Chat
    from openai.types.completion_create_params import CompletionCreateParamsBase as Completion
    from openai.types.responses.response_create_params import ResponseCreateParamsBase as Responses
    from atlas.service.protocol import anthropic,openai,responses
    from atlas.service.protocol.base import ignored
    def unknown(body, theirs):
        "What we ignore of a body that has every field of theirs"
        everything = dict.fromkeys(theirs.__annotations__, 'x')
        return ignored(body.model_construct(**everything))
    audio_and_old = ['audio','function_call','functions','web_search_options']
    assert unknown(openai.ChatBody, Chat)==audio_and_old
    assert unknown(openai.CompletionBody, Completion)==[]
    assert unknown(responses.ResponsesBody, Responses)==['image']
    assert unknown(anthropic.MessagesBody, Messages)==['container']

def test_a_call_that_cannot_be_read_is_counted():
    with speaking('<think></think>Hm <tool_call>{"name": "wea') as (c,_,_,port):
        a = ask(c, tools=[WEATHER])
        assert a.choices[0].finish_reason=='stop' and not a.choices[0].message.tool_calls
        said = web.get(f'http://127.0.0.1:{port}/metrics').text
        assert 'atlas:tool_parse_failures_total{model_name="fake",parser="hermes"} 1.0' in said

# ---- Formats ----

class City(BaseModel):
    name:str
    people:int

FORMATS = [
    (dict(response_format=dict(type='json_object')),
     dict(kind='json_object')),
    (dict(extra_body=dict(structured_outputs=dict(regex='a+'))),
     dict(kind='regex', pattern='a+')),
    (dict(extra_body=dict(guided_choice=['a','b'])),
     dict(kind='choice', choices=['a','b'])),
    (dict(extra_body=dict(structured_outputs=dict(grammar='start: "a"'))),
     dict(kind='lark', grammar='start: "a"'))]

def schema(**kw):
    "A `response_format` of a schema"
    return dict(type='json_schema', json_schema=dict(name='x', schema=kw))

@pytest.fixture(scope='module')
def paris():
    "A server whose model says an object"
    with speaking('{"name": "Paris", "people": 2}', parsers=(None,None)) as s:
        yield s

def test_formats(paris):
    c,r = paris[:2]
    m = c.chat.completions.parse(model='fake', messages=HELLO, response_format=City)
    assert m.choices[0].message.parsed==City(name='Paris', people=2)
    assert r.seen[-1].guide['schema']['required']==['name','people']
    for kw,want in FORMATS:
        ask(c, **kw)
        assert r.seen[-1].guide==want
    c.completions.create(model='fake', prompt='a', extra_body=dict(guided_regex='b'), n=2)
    assert [x.guide for x in r.seen[-2:]]==[dict(kind='regex', pattern='b')]*2

def test_formats_that_are_refused(paris):
    c,r = paris[:2]
    create = c.chat.completions.with_raw_response.create
    a = create(model='fake', messages=HELLO, response_format=schema(odd=1))
    assert a.headers['x-atlas-warning']=='pattern was left out'
    n = len(r.seen)
    for bad in schema(bomb=1),dict(type='xml'):
        with pytest.raises(openai.BadRequestError) as e:
            ask(c, response_format=bad)
        assert e.value.param=='response_format'
    assert len(r.seen)==n

def test_a_server_without_formats():
    with speaking('x', guides=None) as s:
        with pytest.raises(openai.InternalServerError) as e:
            ask(s[0], response_format=dict(type='json_object'))
    assert e.value.status_code==501

def test_a_forced_call_that_is_cut():
    "It must call, and ran out of tokens: what there is of the call is not told as content"
    with speaking('<think>So.</think><tool_call>\n{"name": "wea') as (c,_,_,_):
        for n in 23,29,31:
            a = ask(c, tools=[WEATHER], tool_choice='required', max_tokens=n).choices[0]
            assert (
                a.finish_reason,a.message.content or '',
                a.message.tool_calls,a.message.reasoning
            )==('length','',None,'So.')
            xs = [
                x.choices[0]
                for x in ask(
                    c, tools=[WEATHER], tool_choice='required', max_tokens=n,
                    stream=True)]
            assert ''.join(x.delta.content or '' for x in xs)==''
            assert xs[-1].finish_reason=='length'
        assert '<tool_call>' in ask(c, tools=[WEATHER], max_tokens=31).choices[0].message.content

BOMB = dict(type='object', properties=dict(bomb=dict(type='string')))
SHAPE = dict(type='json_schema', name='x', schema=BOMB)

@pytest.fixture(scope='module')
def x():
    "A client of a server whose model says x"
    with speaking('x') as (_,_,_,port), plain(port) as c:
        yield c

@pytest.mark.parametrize('param,path,body', [
    ('structured_outputs.regex', '/v1/chat/completions',
     dict(messages=HELLO, structured_outputs=dict(regex='bomb'))),
    ('guided_choice', '/v1/completions', dict(prompt='a', guided_choice=['bomb'])),
    ('text.format', '/v1/responses', dict(input='hi', text=dict(format=SHAPE))),
    ('regex', '/v1/responses', dict(input='hi', regex='bomb')),
    ('stop_token_ids', '/v1/chat/completions', dict(messages=HELLO, stop_token_ids=[10**6])),
    ('logit_bias', '/v1/completions', dict(prompt='a', logit_bias={'1000000':1}))])
def test_refusals_name_the_field(x, param, path, body):
    """A shape may have come from many fields; ids beyond the vocabulary are refused wherever
    they may stand"""
    r = x.post(path, json=body)
    assert (r.status_code,r.json()['error']['param'])==(400,param), r.text

def test_a_message_with_a_shape_is_refused(x):
    schema = dict(format=dict(type='json_schema', schema=BOMB))
    body = dict(model='fake', max_tokens=5, messages=HELLO, output_config=schema)
    r = x.post('/v1/messages', json=body)
    assert r.status_code==400 and r.json()['error']['type']=='invalid_request_error', r.text

# ---- Prompts: echo, log-probabilities, ids, the middle ----

@pytest.fixture(scope='module')
def xy():
    "A server whose model says xy"
    with speaking('xy') as s:
        yield s

def echo(s, prompt, **kw):
    return s[0].completions.create(model='fake', prompt=prompt, echo=True, **kw)

def test_echo_alone():
    with speaking('xy') as s:
        a = echo(s, 'ab', logprobs=1, max_tokens=0).choices[0]
        assert (a.text, a.finish_reason)==('ab', 'length')
        assert a.logprobs.tokens==['a','b']
        assert a.logprobs.token_logprobs==[None,-1.]
        assert a.logprobs.text_offset==[0,1]
        assert s[1].seen==[]

def test_echo_before_answers(xy):
    a = echo(xy, ['ab','c'], logprobs=1, n=2)
    assert [x.text for x in a.choices]==['abxy','abxy','cxy','cxy']
    assert a.choices[0].logprobs.tokens[:4]==['a','b','x','y']
    assert a.usage.prompt_tokens==3
    assert echo(xy, 'ab').choices[0].text=='abxy'
    said = [x.choices[0] for x in echo(xy, 'ab', logprobs=0, stream=True)]
    assert ''.join(x.text for x in said)=='abxy'
    offsets = [o for x in said if x.logprobs for o in x.logprobs.text_offset]
    assert offsets[:4]==[0,1,2,3]

def test_prompt_logprobs(xy):
    a = ask(xy[0], extra_body=dict(prompt_logprobs=1))
    assert a.prompt_logprobs[0] is None
    assert list(a.prompt_logprobs[1].values())[0]['logprob']==-1.

def test_ids_of_tokens(xy):
    c,r = xy[:2]
    wish = dict(return_token_ids=True)
    a = ask(c, extra_body=wish)
    prompt = tok.decode(r.seen[-1].prompt)
    assert tok.decode(a.prompt_token_ids)==prompt
    assert a.choices[0].token_ids==[*tok.encode('xy'),END]
    xs = list(ask(c, stream=True, extra_body=wish))
    assert tok.decode(xs[0].prompt_token_ids)==prompt
    told = [getattr(x.choices[0], 'token_ids', None) or [] for x in xs[1:]]
    assert sum(told, [])==[*tok.encode('xy'),END]

def test_counts_are_null_until_the_last_chunk(calling):
    for kw,n in (
            (dict(stream_options=dict(include_usage=True)),1),
            ({},0)
    ):
        with ask(calling[0], stream=True, **kw) as s:
            xs = [json.loads(x.to_json(exclude_unset=True)) for x in s]
        assert ['usage' in x for x in xs]==[bool(n)]*len(xs)
        assert [
            x['usage'] is not None for x in xs if n
        ]==[False]*(len(xs)-1)*n+[True]*n

class Unequal(FakeRunner):
    "Gives every choice log-probabilities of its own"
    def submit(self, r):
        s,k = super().submit(r),len(self.seen)
        async def events():
            async for e in s:
                yield replace(e, logprob=-((k*7)%5+1.))
        return type(
            'Line', (),
            dict(__aiter__=lambda _: events(), abort=s.abort))()

@pytest.fixture
def unequal():
    "A client of a server whose choices are of unequal likelihood, and its runner"
    r = Unequal('xy')
    with live(r) as port:
        yield client_of(port).completions,r

def test_best_of(unequal):
    c,_ = unequal
    a = c.create(model='fake', prompt=['a','b'], best_of=4, n=2, logprobs=0, echo=False)
    want = []
    for ks in range(1,5),range(5,9):
        want += sorted((-((k*7)%5+1.) for k in ks), reverse=True)[:2]
    assert [x.logprobs.token_logprobs[0] for x in a.choices]==want
    assert [x.index for x in a.choices]==[0,1,2,3]
    assert a.usage.completion_tokens==8*3

def test_best_of_makes_no_more_than_it_must(unequal):
    c,r = unequal
    a = c.create(model='fake', prompt='a', best_of=3)
    assert len(a.choices)==1 and a.choices[0].logprobs is None
    assert len(r.seen)==3
    a = c.create(model='fake', prompt='a', best_of=2, n=2)
    assert len(a.choices)==2 and len(r.seen)==5

def test_best_of_that_is_refused(unequal):
    for kw in dict(n=3, best_of=2),dict(best_of=2, stream=True),dict(best_of=0):
        with pytest.raises(openai.BadRequestError) as e:
            unequal[0].create(model='fake', prompt='a', **kw)
        assert e.value.param=='best_of'

def test_tokens_by_their_ids():
    with speaking('xy', parsers=(None,None)) as (c,_,_,_):
        ids = [f'token_id:{i}' for i in (*tok.encode('xy'),END)]
        assert [
            t.token
            for t in ask(
                c, logprobs=True, extra_body=dict(return_tokens_as_token_ids=True)
            ).choices[0].logprobs.content]==ids
        a = c.completions.create(
            model='fake', prompt='a', logprobs=1,
            extra_body=dict(return_tokens_as_token_ids=True)
        ).choices[0].logprobs
        assert a.tokens==ids
        assert a.text_offset==[0,1,2]
        assert set(a.top_logprobs[0])>={ids[0]}

def test_halves_of_characters():
    "A token may be part of a character: its bytes say which, in both APIs that have them"
    with speaking('é🦊', parsers=(None,None)) as (c,_,_,_):
        a = ask(c, logprobs=True).choices[0]
        b = c.responses.create(
            model='fake', input='x', include=['message.output_text.logprobs']
        ).output[0].content[0]
        for text,lps in (
                (a.message.content,a.logprobs.content),
                (b.text,b.logprobs)
        ):
            assert text=='é🦊'
            assert bytes(x for t in lps[:6] for x in t.bytes).decode()==text
            assert lps[0].token=='\ufffd'

def pieces_tokenizer():
    "Words with SentencePiece's mark for the space before them"
    t = HFTokenizer(
        models.WordLevel(
            dict(
                zip(['▁The','▁capital','▁is','▁Paris','.','<end>','<unk>'], range(7))),
            unk_token='<unk>'))
    t.pre_tokenizer,t.decoder = pre_tokenizers.Metaspace(),decoders.Metaspace()
    t.add_special_tokens(['<end>'])
    return Tokenizer(t, eos_ids=(5,))

def test_the_space_between_prompt_and_completion():
    "Which belongs to the completion's first token, and is not lost on the way"
    t,r = pieces_tokenizer(),FakeRunner()
    r.ids = [3,4,5]
    c = TestClient(app_of(r, t, THINKING))
    def text(**kw):
        return c.post(
            '/v1/completions', json=dict(prompt='The capital is')|kw
        ).json()['choices'][0]
    assert text()['text']==' Paris.'
    assert text(prompt=[0,1,2], echo=True)['text']=='The capital is Paris.'
    assert text(logprobs=0)['logprobs']['tokens'][:2]==[' Paris','.']
    assert text(logprobs=0)['logprobs']['text_offset'][:2]==[0,6]
    assert c.post(
        '/v1/chat/completions', json=dict(messages=HELLO)
    ).json()['choices'][0]['message']['content']=='Paris.'

def test_suffix():
    with speaking('xy') as (c,_,_,_):
        with pytest.raises(openai.InternalServerError) as e:
            c.completions.create(model='fake', prompt='a', suffix='b')
        assert e.value.status_code==501 and e.value.param=='suffix'

def test_continuous_usage():
    with speaking('abc', parsers=(None,None)) as (c,_,_,_):
        xs = list(
            ask(
                c, stream=True,
                stream_options=dict(include_usage=True, continuous_usage_stats=True)))
        n = [x.usage.completion_tokens for x in xs]
        assert n==sorted(n)
        assert n[-1]==4
        assert n[1]==1
        assert all(x.usage.prompt_tokens==xs[0].usage.prompt_tokens for x in xs)
        assert ask(c, max_tokens=2**40).choices[0].message.content=='abc'

# ---- Drafts ----

@pytest.fixture(scope='module')
def both():
    "Clients of two services that say the same: with three accepted drafts in a step, and without"
    def say(prompt): return 'Half of this was drafted.'
    def serve(**kw): return service(say, parsers=(None,None), **kw)
    with serve(drafts=3) as a, serve() as b:
        yield [client_of(httpx.URL(s.url).port) for s in (a,b)]

def streamed(c, **kw):
    "Chunks of an answer: their choices, and the counts at the end"
    options = dict(include_usage=True)|kw
    xs = list(c.chat.completions.create(
        model='scripted', messages=HELLO, stream=True, stream_options=options))
    return [x.choices[0] for x in xs if x.choices],xs[-1].usage

def test_drafts_are_counted(both):
    drafted,plain = both
    for c,accepted in ((drafted,19), (plain,None)):
        a = c.chat.completions.create(model='scripted', messages=HELLO)
        assert a.usage.completion_tokens==26
        details = a.usage.completion_tokens_details
        assert details.accepted_prediction_tokens==accepted
        said = set(details.model_dump(exclude_unset=True))
        assert said==({'reasoning_tokens'}|({'accepted_prediction_tokens'} if accepted else set()))

def test_chunks_say_nothing_of_drafts_unasked(both):
    drafted,plain = both
    for c,asked in ((drafted,False), (plain,True), (plain,False)):
        said,_ = streamed(c, **dict(atlas_drafts=True) if asked else {})
        assert [x for x in said if 'drafted' in x.model_dump()]==[]

def test_chunks_tell_which_tokens_were_drafts(both):
    said,counts = streamed(both[0], atlas_drafts=True)
    said = [x for x in said if x.delta.content]
    texts = [(x.delta.content, getattr(x, 'drafted', 0)) for x in said]
    assert ''.join(t for t,_ in texts)=='Half of this was drafted.'
    assert texts==[(t, int(i%4>0)) for i,t in enumerate('Half of this was drafted.')]
    assert counts.completion_tokens_details.accepted_prediction_tokens==19

def test_models_say_how_they_draft(both):
    drafted,plain = both
    assert drafted.models.list().data[0].speculative=='mtp, 3 drafts'
    assert 'speculative' not in plain.models.list().data[0].model_dump()

def test_the_log_says_how_a_model_drafts(caplog):
    for drafts in (3,0):
        runner = Scripted(str, drafts)
        model, = always(runner, runner.tok).all
        with caplog.at_level('INFO', 'atlas'):
            model._set('loaded')
        model.reason = 'it is slow'
        with caplog.at_level('INFO', 'atlas'):
            model._set('loaded')
    assert [r.getMessage() for r in caplog.records]==[
        'scripted is loaded, speculative: mtp, 3 drafts', 'scripted is loaded: it is slow',
        'scripted is loaded', 'scripted is loaded: it is slow']

# ---- Vectors, tokens, models ----

@pytest.fixture(scope='module')
def silent():
    "A server whose model says nothing: (OpenAI's client, runner, a plain client)"
    with speaking('', names=['fake','alias']) as (c,r,_,port):
        with plain(port) as p:
            yield c,r,p

def test_embeddings(silent):
    c = silent[0].embeddings
    # the client asks for base64 by itself
    a = c.create(model='fake', input=['ab','c'])
    assert [d.index for d in a.data]==[0,1]
    assert a.data[0].embedding==[3.,4.,0.]
    assert a.usage.prompt_tokens==3
    short = c.create(model='fake', input=[1,2], dimensions=2, encoding_format='float')
    np.testing.assert_allclose(short.data[0].embedding, [.6,.8], rtol=1e-6)
    mean = c.create(model='fake', input=[[1],[2,3]], extra_body=dict(pooling='mean'))
    assert mean.data[1].embedding==[0.,0.,1.]

@pytest.mark.parametrize('bad', [
    dict(input=''), dict(input=[]), dict(input=[[]]), dict(input=[300]),
    dict(input='x'*2000), dict(input='a', dimensions=4), dict(input='a', encoding_format='hex')])
def test_embeddings_that_are_refused(silent, bad):
    assert silent[2].post('/v1/embeddings', json=bad).status_code==400

@pytest.mark.parametrize('under', ['','/v1'])
def test_tokens_and_templates(silent, under):
    _,r,c = silent
    def post(path, **kw): return c.post(under+path, json=kw).json()
    ids = tok.encode('ab')
    told = dict(count=2, max_model_len=1000, tokens=ids, token_strs=None)
    assert post('/tokenize', prompt='ab')==told
    assert post('/detokenize', tokens=ids)==dict(prompt='ab', content='ab')
    unthinking = dict(enable_thinking=False)
    prompt = post('/apply-template', messages=HELLO, chat_template_kwargs=unthinking)['prompt']
    assert prompt=='[user]Say something><think></think>'
    assert r.seen==[]

def test_tokens_of_messages_and_strings(silent):
    def post(path, **kw): return silent[2].post(path, json=kw).json()
    assert post('/tokenize', messages=HELLO)['count']==len('[user]Say something>')
    assert post('/tokenize', prompt='a', return_token_strs=True)['token_strs']==['a']
    assert post('/tokenize')['error']['param']=='prompt'
    assert post('/detokenize', tokens=[-1])['error']['param']=='tokens[0]'

def test_models_as_others_list_them(silent):
    c = silent[2]
    one, = c.get('/models').json()['data']
    assert (one['id'],one['aliases'])==('fake',['alias'])
    assert one['status']==dict(value='loaded', args=['atlas','serve','fake'])
    assert c.get('/v1/models').json()['has_more'] is False
    assert c.get('/version').json()['version']
    assert c.get('/v1/health').json()['status']=='ok'
    # what comes of changes: test_processes
    with c.stream('GET', '/models/sse') as s:
        assert s.status_code==200
        assert s.headers['content-type'].startswith('text/event-stream')
    nobody = c.post('/models/load', json=dict(model='nobody'))
    assert nobody.status_code==404

@pytest.mark.parametrize('path', [
    '/v1/files','/v1/images/generations','/v1/batches','/v1/moderations','/v1/responses/compact'])
def test_what_others_offer(silent, path):
    e = silent[2].post(path, json={})
    assert e.status_code==501 and e.json()['error']['code']=='not_supported'

# ---- The other two APIs have the same road ----

def test_a_background_response_outlives_its_client():
    with speaking('So it is.', parsers=(None,None)) as (c,_,_,_):
        a = c.responses.create(model='fake', input='Is it?', background=True)
        assert a.status in ('queued','in_progress','completed')
        def done():
            response = c.responses.retrieve(a.id)
            return response.status=='completed' and response
        b = until(done)
        assert b.output_text=='So it is.'
        said = [e.type for e in c.responses.retrieve(a.id, stream=True)]
        assert said[0]=='response.created' and said[-1]=='response.completed'

def test_a_background_response_can_be_cancelled():
    r = FakeRunner(endless=True)
    with live(r) as port:
        c = client_of(port)
        a = c.responses.create(model='fake', input='Go', background=True)
        assert r.arrived.acquire(timeout=WAIT)
        assert c.responses.cancel(a.id).status=='cancelled'
        assert r.aborted.acquire(timeout=WAIT)

SEEN = dict(type='image_url', image_url=dict(url='data:image/png;base64,AA'))
WRONG = dict(
    chat=[
        ('seed',dict(seed=2**63)),
        ('seed',dict(seed=-2**63-1)),
        ('thinking_token_budget',dict(thinking_token_budget=-2)),
        ('thinking_budget',dict(thinking_budget=.6)),
        ('reasoning.effort',dict(reasoning=dict(effort='huge'))),
        ('tools[1].type',dict(tools=[SUM,dict(name='f')])),
        ('tools[0].type',dict(tools=[{}])),
        ('tools[0].type',dict(tools=[dict(type=['function'])])),
        ('response_format',dict(response_format={})),
        ('messages[0].content[1].text',
         dict(
             messages=[
                 dict(
                     role='user',
                     content=[dict(type='text', text='a'), dict(type='text')])])),
        ('guided_json',dict(guided_json='{"type"')),
        ('structured_outputs.json',dict(structured_outputs=dict(json=''))),
        ('json_schema',dict(json_schema='[]')),
        ('messages[1].content[0]',
         dict(
             messages=[
                 HELLO[0],
                 dict(role='user', content=[SEEN]),
                 dict(role='developer', content='a')])),
        ('messages[2].content[0]',
         dict(
             messages=[
                 HELLO[0], dict(role='system', content='a'),
                 dict(role='user', content=[SEEN])])),
        ('messages[0].content[0].type',
         dict(
             messages=[
                 dict(role='user', content=[dict(type='input_audio', input_audio={})])]))],
    completions=[
        ('structured_outputs.json',dict(structured_outputs=dict(json='x'))),
        ('regex',dict(regex='a', json_schema={})),
        ('seed',dict(seed=2**63))],
    responses=[
        ('seed',dict(seed=2**63)),
        ('input[0].content',dict(input=[dict(role='user')])),
        ('input[1].content',
         dict(
             input=[
                 dict(role='user', content='a'),
                 dict(type='message', role='developer', content=None)])),
        ('thinking_budget',dict(thinking_budget=-2)),
        ('text.format',
         dict(
             text=dict(format=dict(type='json_object')),
             structured_outputs=dict(regex='a'))),
        ('text.format',
         dict(text=dict(format=dict(type='json_schema', name='x')))),
        ('input[1].content[0]',
         dict(
             input=[
                 dict(role='system', content='a'),
                 dict(role='user', content=[SEEN|dict(type='input_image', image_url='data:,')])]))]
)
PATHS = dict(
    chat=('/v1/chat/completions',dict(messages=HELLO)),
    completions=('/v1/completions',dict(prompt='a')),
    responses=('/v1/responses',dict(input='a')))

@pytest.mark.parametrize('kind', WRONG)
def test_what_is_wrong_is_named(kind):
    app,(path,base) = app_of(FakeRunner(), tok, THINKING),PATHS[kind]
    c = TestClient(app, raise_server_exceptions=False)
    got = [
        (c.post(path, json=base|more).json().get('error')
         or {}).get('param')
        for _,more in WRONG[kind]]
    assert got==[p for p,_ in WRONG[kind]]

@pytest.mark.parametrize('kind', PATHS)
def test_bounds_that_are_allowed(kind):
    r = FakeRunner()
    app,(path,base) = app_of(r, tok, THINKING),PATHS[kind]
    c = TestClient(app, raise_server_exceptions=False)
    for more in (
            dict(seed=2**63-1),
            dict(seed=-2**63),
            dict(thinking_budget=-1),
            {'max_output_tokens' if kind=='responses' else 'max_tokens':10**18}
    ):
        assert c.post(path, json=base|more).status_code==200, more
    assert r.seen[-1].params.max_tokens==2**31-1

def test_errors_have_the_shape_of_their_api():
    c = TestClient(app_of(FakeRunner(), tok), raise_server_exceptions=False)
    assert c.post(
        '/v1/messages', json={}
    ).json()['type']==c.get('/v1/messages').json()['type']=='error'
    r = FakeRunner()
    r.submit = None
    c = TestClient(app_of(r, tok, THINKING), raise_server_exceptions=False)
    a = c.post('/v1/messages', json=dict(messages=HELLO, max_tokens=3, model='fake'))
    assert a.status_code==500
    assert a.json()['type']=='error'
    assert a.headers['request-id']==a.headers['x-request-id']

# ---- A model that is really there ----

@pytest.fixture(scope='module')
def demo():
    PRESETS['toy-api'] = PRESETS['llama-3.1-8b']|dict(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=96, vocab_size=256, max_position_embeddings=512,
        bos_token_id=1, eos_token_id=255)
    try:
        # random weights, a token for each byte
        llm = LLM('toy-api', 'cpu', load_format='dummy', max_seq_len=400, show=False)
    finally:
        del PRESETS['toy-api']
    app = create_app(loaded(llm, ['demo']))
    with TestClient(app) as c:
        yield c,llm

STATE = dict(
    type='object',
    properties=dict(ok=dict(type='boolean'), n=dict(type='integer', minimum=0, maximum=9)),
    required=['ok','n'], additionalProperties=False)

def test_a_real_model_keeps_to_a_schema(demo):
    form = dict(type='json_schema', json_schema=dict(name='x', schema=STATE))
    body = dict(messages=HELLO, n=3, seed=1, max_tokens=64, response_format=form)
    for x in demo[0].post('/v1/chat/completions', json=body).json()['choices']:
        d = json.loads(x['message']['content'])
        assert x['finish_reason']=='stop' and isinstance(d['ok'], bool) and 0<=d['n']<=9

def test_a_real_model_keeps_to_a_choice(demo):
    c,_ = demo
    left_or_right = dict(structured_outputs=dict(choice=['left','right']))
    a = c.post('/v1/completions', json=dict(prompt='a', max_tokens=30)|left_or_right).json()
    assert a['choices'][0]['text'] in ('left','right')
    a = c.post('/v1/responses', json=dict(input='a', max_output_tokens=30)|left_or_right).json()
    assert a['output'][-1]['content'][0]['text'] in ('left','right')

def test_a_real_model_keeps_to_an_expression(demo):
    body = dict(prompt='a', max_tokens=30, regex='x{3}')
    a = demo[0].post('/v1/completions', json=body).json()
    assert set(a['choices'][0]['text'])=={'x'}

def test_a_real_model_calls_what_it_must(demo):
    must = dict(tools=[SUM], tool_choice='required', parallel_tool_calls=False)
    body = dict(messages=HELLO, max_tokens=200)|must
    a = demo[0].post('/v1/chat/completions', json=body).json()['choices'][0]
    called = [t['function']['name'] for t in a['message'].get('tool_calls') or []]
    assert a['finish_reason']=='length' or called[0]=='sum', a

def test_a_real_model_scores_its_prompt(demo):
    c,llm = demo
    a = c.post(
        '/v1/completions',
        json=dict(prompt='hello there', echo=True, logprobs=1, max_tokens=0)
    ).json()['choices'][0]
    want = llm.score(llm.tokenizer.encode('hello there'), 1)
    np.testing.assert_allclose(
        a['logprobs']['token_logprobs'][1:],
        [lp for lp,_ in want], rtol=1e-4)
    v = c.post(
        '/v1/embeddings', json=dict(input='hello there')
    ).json()['data'][0]['embedding']
    np.testing.assert_allclose(
        v,
        llm.embed(llm.tokenizer.encode('hello there'), 'last'),
        rtol=1e-4)

# ---- Many requests, some of which are left ----

class Steps:
    "An engine of steps, for a real runner: a token for everybody, and no more than `room` at once"
    def __init__(self):
        self.todo,self.moment = {},threading.Event()
    def add(self, r):
        self.todo[r.id] = r.params.max_tokens or 50
    def abort(self, rid):
        return [Event(rid, finish='abort')] if self.todo.pop(rid, None) else []
    @property
    def has_work(self): return bool(self.todo)
    def stats(self): return dict(num_requests_running=len(self.todo))
    def step(self):
        out = self.moment.wait(.001) or []  # a step takes a moment
        for rid in list(self.todo):
            self.todo[rid] -= 1
            out.append(Event(rid, 65, finish='length' if not self.todo[rid] else None))
            if not self.todo[rid]:
                del self.todo[rid]
        return out

KINDS = [
    ('/v1/chat/completions', dict(messages=HELLO)),
    ('/v1/completions', dict(prompt='a')),
    ('/v1/messages', dict(messages=HELLO)),
    ('/v1/responses', dict(input='a')),
    ('/v1/completions', dict(prompt=''))]

async def one_of_all(port, k):
    "A request of a kind that `k` decides, whose client leaves in a third of all cases"
    dice = random.Random(k)  # its own, so that who is faster changes nothing
    path,body = dice.choice(KINDS)
    if path.startswith('/v1/chat'):
        body = body|dict(n=dice.choice([1,1,3]))
    limit = 'max_output_tokens' if 'input' in body else 'max_tokens'
    more = {limit:dice.randint(16, 200), 'stream':dice.random()<.6, 'model':'fake'}
    raw = json.dumps(body|more).encode()
    rd,wr = await asyncio.open_connection('127.0.0.1', port)
    once = head(len(raw), path).replace(b'\r\n\r\n', b'\r\nConnection: close\r\n\r\n')
    wr.write(once+raw)
    if dice.random()<.33:
        await rd.read(dice.choice([1,100,3000]))
    else:
        await rd.read()
    wr.close()

async def a_thousand(port):
    "Forty at a time"
    gate = asyncio.Semaphore(40)
    async def held(k):
        async with gate:
            await one_of_all(port, k)
    await asyncio.gather(*(held(k) for k in range(1000)))

@dataclass
class Scrape:
    "The metrics of a server, as text"
    text:str
    def total(self, k):
        "A counter's sum over its labels"
        values = re.findall(rf'^atlas:{k}(?:{{[^}}]*}})? (\S+)$', self.text, re.M)
        return sum(map(float, values))
    def by(self, labels):
        "Counts above 0 by the one label that is no name"
        found = re.findall(f'^atlas:{labels} (\\S+)$', self.text, re.M)
        return +Counter({k:float(v) for k,v in found})

def check_ends(m):
    "Every request ended, in one of two ways, and those that were stopped for one reason"
    assert m.total('requests_submitted_total')>900
    assert m.total('http_requests_total')>=1000
    ended = m.by(r'request_success_total{finished_reason="(\w+)",model_name="fake"}')
    why = m.by(r'aborted_requests_total{model_name="fake",why="(\w+)"}')
    assert ended['abort']==sum(why.values())>20
    assert ended['length']>400
    assert set(ended)<={'length','abort'} and set(why)<={'client_gone'}

def test_every_request_is_accounted_for():
    "1,000 requests of every kind, a third of which their clients leave at some point"
    e = Steps()
    info = dict(name='fake', max_seq_len=1000, vocab_size=257, eos_ids=[END], max_queue=400)
    ms = threaded(e, info, tok, template)
    with live(ms) as port:
        asyncio.run(a_thousand(port))
        def settled():
            m = Scrape(web.get(f'http://127.0.0.1:{port}/metrics').text)
            ended = m.total('request_success_total')==m.total('requests_submitted_total')
            return ended and not e.todo and m
        check_ends(until(settled))  # those that were left
        assert not e.todo and not ms.all[0].runner._streams
