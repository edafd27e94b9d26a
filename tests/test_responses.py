"""The Responses API from outside: OpenAI's own client against a script, every event against the
client's own types, bodies that are wrong, and answers in any pieces."""
import asyncio,json,sys
from pathlib import Path
import openai,pytest
from hypothesis import HealthCheck,example,given,settings,strategies as st
from pydantic import BaseModel,TypeAdapter
from openai.types.responses import Response,ResponseItem,ResponseStreamEvent
from atlas.ground.core import AtlasError,QueueFullError
from atlas.text.parsers import Splitter
from atlas.text.deltas import Call,CallDelta,Choice,Delta
from atlas.service.protocol.base import Usage
from atlas.service.protocol.responses import ResponsesAsk,ResponseStore,error_body,parse,reply
from atlas.service.protocol.items import seal,unseal

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from scripted import serve,service  # noqa: E402
from helpers.waiting import WAIT  # noqa: E402

WEATHER = dict(
    type='function', name='weather', description='Look out',
    parameters=dict(
        type='object',
        properties=dict(city=dict(type='string')),
        required=['city'], additionalProperties=False),
    strict=True)

def said(text): return Delta(content=text)

def thought(text): return Delta(reasoning=text)

def part(*args, **kw):
    "A piece of a tool call"
    return Delta(calls=(CallDelta(*args, **kw),))

def say(*texts, finish='stop'):
    return [*map(said, texts), Delta(finish=finish)]

def call(name, args, id='call_0123456789abcdef01234567', index=0):
    "A tool call in two pieces"
    begin,rest = args[:3],args[3:]
    return [part(index, id, name, begin), part(index, arguments=rest)]

def script(ask):
    "What the scripted model answers: a word of its last message chooses"
    last = ask.messages[-1]
    if isinstance(last['content'], str):
        text = last['content']
    else:
        text = ''.join(p.get('text', '') for p in last['content'])
    if last['role']=='tool':
        return say('It is ', f'{text}.')
    if 'weather' in text and ask.tools:
        thoughts = thought('I must '),thought('look.')
        oslo = call('weather', '{"city": "Oslo"}')
        return [*thoughts, *oslo, Delta(finish='tool_calls')]
    if 'think' in text:
        return [thought('Hm. '), thought('Yes.'), *say('Sure')]
    if 'json' in text:
        return say('{"name": "Ada",', ' "year": 1815}')
    if 'long' in text:
        return say('on and ', 'on', finish='length')
    if 'break' in text:
        return broken()
    if 'slow' in text:
        return slow()
    return say(f'You said {text!r}', ' to ', str(len(ask.messages)), ' messages')

async def slow():
    yield said('One')
    await asyncio.Event().wait()

async def broken():
    yield said('Half')
    raise RuntimeError('a secret of the server')

@pytest.fixture(scope='module')
def at():
    with serve(script) as s:
        yield s
def client_of(at):
    return openai.OpenAI(base_url=f'{at.url}/v1', api_key='none', max_retries=0, timeout=WAIT)

@pytest.fixture
def client(at): return client_of(at)

# -- what is on the wire, against the client's types: it builds objects of anything, so the check
# is pydantic's own ------------

EVENTS,ITEMS = TypeAdapter(ResponseStreamEvent),TypeAdapter(ResponseItem)

def check_event(d:dict):
    "An event as it stands on the wire, against the type with its name"
    got = EVENTS.validate_python(d)
    assert got.type==d['type'], f'{d["type"]} was read as a {got.type}'
    left = set(d)-set(type(got).model_fields)-{'name','item_id'}
    assert not left, f'{d["type"]} has unknown fields {left}'
    if d['type'] in (
        'response.created','response.in_progress','response.completed','response.incomplete',
        'response.failed'
    ):
        check_response(d['response'])
    return got

# what Open Responses (2026-04-24) demands of the resource
REQUIRED = (
    'id object created_at completed_at status incomplete_details model previous_response_id '
    'instructions output error tools tool_choice truncation parallel_tool_calls text top_p '
    'presence_penalty frequency_penalty top_logprobs temperature reasoning usage '
    'max_output_tokens max_tool_calls store background service_tier metadata safety_identifier '
    'prompt_cache_key').split()
TYPES = dict(
    created_at=int, status=str, truncation=str, parallel_tool_calls=bool,
    top_p=float, presence_penalty=float, frequency_penalty=float, top_logprobs=int,
    temperature=float, store=bool, background=bool, service_tier=str,
    text=dict, tools=list, output=list)

def check_item(o):
    "An item of the output, against the fields that Open Responses requires"
    assert o['id']
    if o['type']=='message':
        assert {'status','role','content'}<=set(o)
        assert all({'text','annotations'}<=set(p) for p in o['content'])
    if o['type']=='function_call':
        assert {'call_id','name','arguments','status'}<=set(o)
    if o['type']=='reasoning':
        assert isinstance(o['summary'], list)
        assert isinstance(o.get('encrypted_content', ''), str)

def check_response(d:dict):
    "A response against the client's type and the fields that Open Responses requires"
    r = Response.model_validate(d)
    assert not (missing := [k for k in REQUIRED if k not in d]), missing
    for k,t in TYPES.items():
        assert isinstance(d[k], t), (k, d[k])
    for t in d['tools']:
        assert t['type']!='function' or {'name','description','parameters','strict'}<=set(t)
    for o in d['output']:
        check_item(o)
    if u := d['usage']:
        assert u['total_tokens']==u['input_tokens']+u['output_tokens']
        assert 'cached_tokens' in u['input_tokens_details']
    return r

def events(raw):
    lines = raw.decode().split('\n')
    return [json.loads(l[6:]) for l in lines if l.startswith('data: {')]
def stream(w, pieces, usage=Usage(5, 9, 2, 3)):
    return w.start(Usage(5))+b''.join(w.piece(0, p) for p in pieces)+w.end(usage)
def asked(memory=None, owner=None, **kw):
    return parse(json.dumps(dict(input='hi') | kw).encode(), memory, owner)

# -- the client -----------------------------------------------------------------------------------

def made(client, streamed, **kw):
    "A response, in one piece or put together from a stream"
    kw = dict(model='m', tools=[WEATHER])|kw
    if not streamed:
        return client.responses.create(**kw)
    with client.responses.stream(**kw) as s:
        return s.until_done().get_final_response()

def test_create(client):
    raw = client.responses.with_raw_response.create(
        model='m', input='hello', instructions='Be kind.',
        metadata=dict(a='b'), temperature=.5, max_output_tokens=99)
    check_response(json.loads(raw.http_response.text))
    r = raw.parse()
    assert r.output_text=="You said 'hello' to 2 messages" and r.status=='completed'
    assert (r.model, r.instructions, r.metadata)==('m','Be kind.',dict(a='b'))
    assert (r.temperature, r.max_output_tokens, r.previous_response_id)==(.5,99,None)
    assert r.completed_at>=r.created_at>1.7e9

def test_usage(client):
    u = client.responses.create(model='m', input='hello').usage
    assert (u.input_tokens, u.input_tokens_details.cached_tokens)==(11,3)
    assert (u.output_tokens_details.reasoning_tokens, u.total_tokens)==(2,18)

def test_stream_helper(client):
    with client.responses.stream(
        model='m', input='think',
        reasoning=dict(summary='auto', effort='low')
    ) as s:
        kinds = [e.type for e in s]
        r = s.get_final_response()
    assert r.output_text=='Sure' and [o.type for o in r.output]==['reasoning','message']
    assert r.output[0].content[0].text=='Hm. Yes.'==r.output[0].summary[0].text
    assert kinds[:2]==['response.created','response.in_progress']
    assert kinds[-1]=='response.completed'
    assert {
        'response.reasoning_text.delta','response.reasoning_summary_text.delta',
        'response.output_text.delta','response.output_item.done'
    }<=set(kinds)

def test_raw_stream_numbers_every_event(client):
    got = list(
        client.responses.create(
            model='m', input='weather?', tools=[WEATHER],
            stream=True))
    assert [e.sequence_number for e in got]==list(range(len(got)))
    args = ''.join(e.delta for e in got if e.type=='response.function_call_arguments.delta')
    done = [e.item for e in got if e.type=='response.output_item.done'][-1]
    assert args==done.arguments=='{"city": "Oslo"}'
    assert done.status=='completed'
    assert done.id.startswith('fc_')
    assert got[-1].response.output[-1]==done

def test_parse_with_pydantic(client, at):
    class Person(BaseModel):
        name:str
        year:int
    r = client.responses.parse(model='m', input='json please', text_format=Person)
    assert r.output_parsed==Person(name='Ada', year=1815)
    f = at.asks[-1].format
    assert f['kind']=='json_schema' and set(f['schema']['properties'])=={'name','year'}
    assert r.text.format.name=='Person'

@pytest.mark.parametrize('streamed', [False, True])
def test_tool_loop_through_previous_response(client, at, streamed):
    r1 = made(client, streamed, input='What is the weather?', instructions='Only for the first.')
    c = r1.output[-1]
    assert (c.type, c.name)==('function_call','weather')
    assert json.loads(c.arguments)==dict(city='Oslo')
    result = dict(type='function_call_output', call_id=c.call_id, output='sunny')
    r2 = made(client, streamed, previous_response_id=r1.id, input=[result])
    assert r2.output_text=='It is sunny.' and r2.previous_response_id==r1.id
    ms = at.asks[-1].messages
    assert [m['role'] for m in ms]==['user','assistant','tool'], 'instructions are not inherited'
    assert ms[1]['reasoning']=='I must look.'
    assert ms[1]['tool_calls'][0]['id']==c.call_id

def test_history_sent_by_the_client(client, at):
    r1 = client.responses.create(
        model='m', input='What is the weather?', tools=[WEATHER],
        store=False, include=['reasoning.encrypted_content'])
    kept = [o.to_dict() for o in r1.output]
    assert unseal(kept[0]['encrypted_content'])=='I must look.'
    del kept[0]['content']  # as Codex does
    asked = dict(role='user', content='What is the weather?')
    result = dict(type='function_call_output', call_id=kept[-1]['call_id'], output='fog')
    client.responses.create(
        model='m', store=False, tools=[WEATHER], input=[asked, *kept, result])
    assert at.asks[-1].messages[1]['reasoning']=='I must look.'
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(r1.id)

@pytest.fixture
def two(client):
    "Two responses, the second of which goes on from the first"
    r1 = client.responses.create(model='m', input='one')
    asked = dict(role='user', content=[dict(type='input_text', text='two')])
    return r1,client.responses.create(model='m', input=[asked], previous_response_id=r1.id)

def test_retrieve_and_list(client, two):
    r1,r2 = two
    assert client.responses.retrieve(r2.id)==r2
    pages = client.responses.input_items.list(r2.id, limit=1) # the client turns them
    ids = [ITEMS.validate_python(i.to_dict()).id for i in pages]
    assert len(ids)==3 and ids[1]==r1.output[0].id
    oldest_first = client.responses.input_items.list(r2.id, order='asc')
    assert [i.id for i in oldest_first]==ids[::-1]

def test_delete(client, two):
    r1,r2 = two
    client.responses.delete(r1.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(r1.id)
    with pytest.raises(openai.BadRequestError) as e:
        client.responses.create(model='m', input='three', previous_response_id=r1.id)
    assert (e.value.param, e.value.code)==('previous_response_id','previous_response_not_found')
    assert client.responses.retrieve(r2.id).output_text==r2.output_text

def test_item_reference(client, at):
    r = client.responses.create(model='m', input='one')
    client.responses.create(
        model='m',
        input=[
            dict(role='user', content='one'),
            dict(type='item_reference', id=r.output[0].id),
            dict(role='user', content='two')])
    assert at.asks[-1].messages[1]==dict(role='assistant', content=r.output_text)

def of_owner(client, name):
    return client.with_options(default_headers={'x-owner':name}).responses

def test_an_owner_sees_its_own(client):
    ann = of_owner(client, 'ann')
    r = ann.create(model='m', input='mine')
    assert ann.retrieve(r.id).id==r.id
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(r.id)

def test_owners_do_not_see_each_other(client):
    r = of_owner(client, 'ann').create(model='m', input='mine')
    bob = of_owner(client, 'bob')
    for f in bob.retrieve,bob.cancel,bob.delete,bob.input_items.list:
        with pytest.raises(openai.NotFoundError):
            f(r.id)
    meant = dict(type='item_reference', id=r.output[0].id)
    with pytest.raises(openai.NotFoundError):
        bob.create(model='m', input=[meant])
    with pytest.raises(openai.BadRequestError):
        bob.create(model='m', input='x', previous_response_id=r.id)

@pytest.mark.parametrize(
    'kw,kind,param',
    [(dict(input=5), openai.BadRequestError, 'input'),
     (dict(input='x', temperature=9999), openai.BadRequestError, 'temperature'),
     (dict(input='x', max_output_tokens=0), openai.BadRequestError, 'max_output_tokens'),
     (dict(input='x', top_logprobs=21), openai.BadRequestError, 'top_logprobs'),
     (dict(input='x', tool_choice='required'), openai.BadRequestError, 'tool_choice'),
     (dict(
          input='x', tools=[WEATHER],
          tool_choice=dict(type='function', name='nothing')),
      openai.BadRequestError, 'tool_choice'),
     (dict(input=[dict(type='function_call_output', call_id='c', output='x')]),
      openai.BadRequestError, 'input[0].call_id'),
     (dict(
          input='x',
          text=dict(format=dict(type='json_schema', name='x'))),
      openai.BadRequestError, 'text.format'),
     (dict(input='x', conversation='conv_1'), openai.InternalServerError, 'conversation'),
     (dict(input='x', previous_response_id='resp_0'), openai.BadRequestError,
      'previous_response_id')])
def test_errors_name_the_field(client, kw, kind, param):
    with pytest.raises(kind) as e:
        client.responses.create(model='m', **kw)
    assert e.value.param==param and e.value.type in ('invalid_request_error','server_error')

HOSTED = [
    dict(type='web_search'),
    dict(type='namespace', name='n', description='', tools=[]),
    dict(type='file_search', vector_store_ids=['v']),
    dict(type='code_interpreter', container=dict(type='auto')),
    dict(type='mcp', server_label='s'),
    dict(type='local_shell'), dict(type='image_generation')]

def test_hosted_tools_are_left_out_with_a_warning(client, at):
    got = client.responses.with_raw_response.create(
        model='m', input='weather', tools=[WEATHER, *HOSTED])
    assert 'web_search' in got.headers['x-atlas-warning']
    r,a = got.parse(),at.asks[-1]
    assert r.output[-1].type=='function_call'
    assert [t['function']['name'] for t in a.tools]==['weather']
    assert len(a.warnings)==7
    assert a.tools[0]['function']['strict'] is True
    assert [t.type for t in r.tools]==['function']

# -- any pieces -----------------------------------------------------------------------------------

def cut(text, cuts):
    "The text in pieces"
    at = sorted(
        {min(c, len(text)) for c in cuts}
        |{0, len(text)})
    if text:
        return [text[i:j] for i,j in zip(at, at[1:])]
    return []

def joined(ps, together):
    "Pieces of which some come together with the one before"
    out = []
    for p,t in zip(ps, [*together, *[False]*len(ps)]):
        if t and out:
            q = out.pop()
            reasoning,content = q.reasoning+p.reasoning,q.content+p.content
            p = Delta(reasoning, content, q.calls+p.calls, finish=p.finish)
        out.append(p)
    return out

def bare(d, w):
    return json.loads(
        json.dumps(d).replace(w.id[5:], 'X')
    ) | dict(created_at=0, completed_at=0)

cuts = st.lists(st.integers(0, 60), max_size=8)
words = st.text(max_size=40)
OPTIONS = [
    dict(), dict(reasoning=dict(summary='auto')),
    dict(include=['reasoning.encrypted_content']),
    dict(
        tools=[
            dict(type='custom', name='f'),
            dict(type='function', name='g')])]

@given(
    words, words,
    st.lists(
        st.tuples(
            st.sampled_from('fg'),
            st.dictionaries(words, words, max_size=2)),
        max_size=3),
    cuts, st.sampled_from(['stop','length','tool_calls']),
    st.sampled_from(OPTIONS),
    st.lists(st.booleans(), max_size=20))
@example(
    'a', 'b',
    [('f', {'input':'x\ny'}), ('g', {})],
    [1, 3], 'tool_calls', OPTIONS[3],
    [True]*9)
@example('\u2028', '\x85"\\', [], [1], 'stop', OPTIONS[1], [])
@settings(deadline=None, max_examples=150)
def test_any_pieces_make_the_same_response(thought, text, calls, at, finish, kw, together):
    made = [Call(n, json.dumps(args), f'call_{k:024x}') for k,(n,args) in enumerate(calls)]
    whole = Choice(thought, text, made, finish=finish)
    a,b = reply(asked(**kw), 'm'),reply(asked(**kw), 'm')
    raw = stream(a, joined(pieces_of(whole, at), together))
    assert len(raw.decode().splitlines())==raw.count(b'\n')
    es = events(raw)
    for e in es:
        check_event(e)
    assert [e['sequence_number'] for e in es]==list(range(len(es)))
    last = bare(es[-1]['response'], a)
    assert last==bare(b.whole([whole], Usage(5, 9, 2, 3)), b)==bare(a.resource(), a)
    follows(es)

def pieces_of(whole, at):
    "A whole answer, in pieces that are cut `at` these places"
    ps = [Delta(reasoning=x) for x in cut(whole.reasoning, at)]
    ps += [Delta(content=x) for x in cut(whole.content, at)]
    for k,c in enumerate(whole.calls):
        first,*rest = cut(c.arguments, at)
        ps.append(part(k, c.id, c.name, first))
        ps += [part(k, arguments=x) for x in rest]
    return [*ps, Delta(finish=whole.finish)]

BEHIND = dict(
    qwen3_coder=(
        '<tool_call>\n<function=g>\n<parameter=a>\n1',
        '\n</parameter>\n</function>\n</tool_call>\nSo'),
    minimax_m2=(
        '<minimax:tool_call>\n<invoke name="g">\n<parameter name="a">1',
        '</parameter>\n</invoke>\n</minimax:tool_call>\nSo'),
    glm45=('<tool_call>g\n<arg_key>a</arg_key>\n<arg_value>1', '</arg_value>\n</tool_call>\nSo'),
    openai=(
        '<|channel|>commentary to=functions.g<|message|>{"a"',
        ': 1}<|call|><|start|>assistant<|channel|>final<|message|>\nSo'))

TAKES_A = dict(type='object', properties=dict(a=dict(type='integer')))
G = dict(type='function', function=dict(name='g', parameters=TAKES_A))

@pytest.mark.parametrize('parser', BEHIND)
def test_the_end_of_a_call_and_what_follows_it_come_at_once(parser):
    "Several tokens come together when drafts are accepted"
    reasoning = 'openai_gptoss' if parser=='openai' else None
    s = Splitter(reasoning, parser, [G], False, False, '')
    ps = [s.feed(token) for token in BEHIND[parser]]
    ps += [s.finish(), Delta(finish='tool_calls')]
    es = events(stream(reply(asked(), 'm'), ps))
    for e in es:
        check_event(e)
    follows(es)
    output = es[-1]['response']['output']
    out = {d['type']:d for d in output}
    call = out['function_call']
    assert len(output)==2
    assert (call['name'],json.loads(call['arguments']))==('g',dict(a=1))
    assert out['message']['content'][0]['text'].strip()=='So'

TEXTS = (
    'output_text.delta','reasoning_text.delta','function_call_arguments.delta',
    'custom_tool_call_input.delta')

def text_of(d):
    "What an item says"
    if 'call' in d['type']:
        return d.get('arguments', d.get('input'))
    return ''.join(p['text'] for p in d['content'])

def follows(es):
    """What a client puts together from the deltas is what the items say in the end, and items
    open and close in order"""
    now,out = None,[]
    for e in es:
        t = e['type'].removeprefix('response.')
        if t=='output_item.added':
            assert now is None and e['output_index']==len(out)
            now = dict(id=e['item']['id'], text='', summary='')
        elif t in TEXTS:
            now['text'] += e['delta']
            assert e['item_id']==now['id']
        elif t=='reasoning_summary_text.delta':
            now['summary'] += e['delta']
        elif t=='output_item.done':
            d = e['item']
            assert (d['id'], text_of(d))==(now['id'], now['text'])
            assert now['summary']==''.join(p['text'] for p in d.get('summary', ()))
            out.append(d)
            now = None
    assert now is None and out==es[-1]['response']['output']

def test_every_kind_of_event_was_checked():
    "The check above is not empty: these kinds come by in one stream, and a missing field is found"
    f = call('f', '{"input": "x"}')
    g = call('g', '{}   ', id='call_1', index=1)
    ps = [thought('a'), said('b'), *f, *g, Delta(finish='stop')]
    es = events(
        stream(
            reply(
                asked(
                    tools=OPTIONS[3]['tools'],
                    reasoning=dict(summary='auto'), background=False),
                'm'),
            ps))
    assert len({e['type'] for e in es})==19
    for e in es:
        for k in set(e)-{'name','type'}:
            with pytest.raises(Exception):
                check_event({x:v for x,v in e.items() if x!=k})

# -- wrong bodies --------------------------------------------------------------------------------
# ----------------------------

values = st.recursive(
    st.none()|st.booleans()
    |st.integers()
    |st.floats(allow_nan=False, allow_infinity=False)
    |st.text(max_size=8),
    lambda v: st.lists(v, max_size=3)|st.dictionaries(
        st.text(max_size=6), v, max_size=3),
    max_leaves=6)
ITEM = [
    'type','id','role','content','call_id','name','arguments','output',
    'input','summary','encrypted_content','status']
KINDS = [
    'message','reasoning','function_call','function_call_output','custom_tool_call',
    'custom_tool_call_output','item_reference','web_search_call','local_shell_call',
    'local_shell_call_output','computer_call_output','compaction','mcp_call','nonsense']
parts = st.fixed_dictionaries(
    {},
    optional=dict(
        type=st.sampled_from([
            'input_text','output_text','input_image','input_file','refusal','x'])
        |values,
        text=st.text(max_size=5)|values,
        image_url=st.just('data:,')|values, refusal=values))
items = st.fixed_dictionaries(
    {},
    optional=dict(
        type=st.sampled_from(KINDS)|values,
        role=st.sampled_from(['user','assistant','system','developer','tool']),
        content=st.text(max_size=5)
        |st.lists(parts, max_size=2)|values,
        call_id=st.sampled_from(['a','b'])|values,
        name=st.just('f')|values,
        arguments=st.just('{}')|values,
        output=st.text(max_size=5)
        |st.lists(parts, max_size=2)|values,
        input=values,
        id=st.text(max_size=4)|values,
        summary=st.lists(parts, max_size=2)|values,
        encrypted_content=st.just(seal('x'))|values,
        action=values))
a_tool = st.fixed_dictionaries(
    {},
    optional=dict(
        type=st.sampled_from(['function','custom','web_search','namespace'])|values,
        name=st.sampled_from(['f','g'])|values,
        parameters=st.just({})|values, strict=values,
        function=values, format=values, description=values))
choices = st.sampled_from([
    'auto','none','required','x',
    dict(type='function', name='f'),
    dict(
        type='allowed_tools', mode='auto',
        tools=[dict(type='function', name='f')])])|values
others = {
    k:values
    for k in 'model stream instructions previous_response_id parallel_tool_calls max_tool_calls '
    'text reasoning max_output_tokens top_logprobs include store background truncation metadata '
    'prompt_cache_key user conversation prompt temperature top_p seed stop stream_options '
    'priority'.split()}
bodies = st.fixed_dictionaries(
    {},
    optional=dict(
        input=st.text(max_size=5)
        |st.lists(items, max_size=4)|values,
        tools=st.lists(a_tool, max_size=3)|values,
        tool_choice=choices,
        text=st.fixed_dictionaries(
            {},
            optional=dict(
                format=st.fixed_dictionaries(
                    {},
                    optional=dict(
                        type=st.sampled_from(['text','json_schema','json_object'])|values,
                        name=values, schema=values, strict=values)),
                verbosity=values)),
        reasoning=st.fixed_dictionaries(
            {},
            optional=dict(
                effort=st.sampled_from(['none','low','max'])|values,
                summary=st.sampled_from(['auto','detailed'])|values))))
mixed = st.tuples(bodies, st.fixed_dictionaries({}, optional=others)).map(
    lambda t: t[1]|t[0])

# sound bodies, of which one field may then be spoilt
text = st.text(max_size=8)
def fields(**kw):
    return st.fixed_dictionaries({
        k:v if isinstance(v, st.SearchStrategy) else st.just(v)
        for k,v in kw.items()})
def sound_parts(kind): return st.lists(fields(type=kind, text=text), max_size=2)
pair = st.tuples(
    st.sampled_from(['function_call','custom_tool_call','local_shell_call']), text,
    st.booleans()).map(
    lambda t: [
        dict(
            type=t[0], call_id='c'+t[1],
            name='f', arguments=t[1],
            input=t[1],
            action=dict(a=t[1]))
    ]+[
        dict(
            type=t[0]+'_output',
            call_id='c'+t[1], output=t[1])
    ]*t[2])
sound_item = fields(
    role='assistant',
    content=[dict(type='refusal', refusal='No.')]
)|fields(role='assistant', content=text|sound_parts('output_text'))|fields(
    role=st.sampled_from(['user','system','developer']),
    content=text|sound_parts('input_text')
)|fields(type='reasoning', id='r', summary=sound_parts('summary_text'))|fields(
    type='reasoning', content=sound_parts('reasoning_text'),
    encrypted_content=seal('x')
)|fields(type='web_search_call', id='w')
sound_items = st.lists(
    sound_item.map(lambda i: [i])|pair,
    min_size=1, max_size=5).map(
    lambda ls: [
        dict(role='user', content='x'),
        *(i for l in ls for i in l)])
sound_tools = st.lists(
    st.sampled_from([
        WEATHER, dict(type='custom', name='f'),
        dict(type='function', name='g'),
        dict(type='web_search')]),
    unique_by=str, max_size=4)
sound = st.fixed_dictionaries(
    dict(input=text|sound_items),
    optional=dict(
        tools=sound_tools, instructions=text, store=st.booleans(),
        stream=st.booleans(),
        truncation=st.sampled_from(['auto','disabled']),
        parallel_tool_calls=st.booleans(),
        temperature=st.floats(0, 2),
        top_logprobs=st.integers(0, 20),
        max_output_tokens=st.integers(1, 10**6),
        metadata=st.dictionaries(text, text, max_size=2),
        include=st.just(['reasoning.encrypted_content']),
        reasoning=fields(
            effort=st.sampled_from(['none','low','max']),
            summary=st.sampled_from(['auto','detailed'])),
        text=fields(
            format=st.sampled_from([
                dict(type='text'), dict(type='json_object'),
                dict(type='json_schema', name='n', schema=dict(type='object'))])),
        tool_choice=st.sampled_from(['auto','none'])))
nearly = st.tuples(
    sound,
    st.sampled_from(sorted(others)+['input','tools','tool_choice'])
    |st.none(),
    values
).map(
    lambda t: t[0] if t[1] is None else t[0]|{
        t[1]:t[2]})

MEMORY = ResponseStore(most=50)
@given(mixed|nearly)
@settings(deadline=None, max_examples=400, suppress_health_check=list(HealthCheck))
def test_any_body_is_an_ask_or_a_refusal(d):
    try:
        a = parse(json.dumps(d).encode(), MEMORY)
    except AtlasError as e:
        assert 400<=e.status<=501 and error_body(e)['error']['message']
    else:
        answered(a, listed=False)

@given(sound)
@settings(deadline=None, max_examples=200, suppress_health_check=list(HealthCheck))
def test_a_sound_body_is_answered(d):
    answered(parse(json.dumps(d).encode(), MEMORY))

def answered(a, listed=True):
    "What every `Ask` must be like, and that its answer can be written, listed and gone on from"
    assert isinstance(a, ResponsesAsk) and a.messages
    roles = [m['role'] for m in a.messages]
    assert set(roles)<={'system','user','assistant','tool'} and 'system' not in roles[1:]
    assert all(isinstance(w, str) and w.isascii() for w in a.warnings)
    for e in events(stream(reply(a, 'm'), say('x'))):
        check_response(e['response']) if 'response' in e else check_event(e)
    if a.store:
        gone_on_from(a, listed)

def gone_on_from(a, listed):
    "Its items are there, and another question follows it"
    for d in MEMORY.items(a.id)['data']:
        assert d['id']
        if listed and d['type'] in ('message','reasoning','function_call'):
            ITEMS.validate_python(d)
    more = json.dumps(dict(input='x', previous_response_id=a.id)).encode()
    assert len(parse(more, MEMORY).messages)>=len(a.messages)-1

@given(st.binary(max_size=60))
@example(b'{"input": ' + b'['*100_000)
@example(b'{"input": "\xff"}')
@example(b'{"input": "x", "temperature": NaN}')
def test_any_bytes_are_refused(raw):
    with pytest.raises(AtlasError):
        parse(raw)

# -- what the store promises ----------------------------------------------------------------------

def test_the_store_is_bounded():
    s = ResponseStore(most=20, size=200_000)
    for k in range(200):
        w = reply(asked(s, input='x'*(k*50)), 'm')
        w.whole([Choice(content='y'*k)], Usage())
        assert len(s)<=20
        assert s.bytes<=200_000
        assert s.bytes==sum(r.size for r in s.records.values())
    assert len(s.where)==2*len(s)
    w = reply(asked(s, input='x'*300_000), 'm')
    w.whole([Choice(content='y')], Usage())
    assert len(s)==0 and s.bytes==0 and not s.where, 'what is larger than all of it is not kept'

def test_a_client_that_leaves_does_not_leave_a_response_in_progress():
    s = ResponseStore()
    w = reply(asked(s), 'm')
    w.start(Usage(1))
    w.piece(0, said('a'))
    assert s.get(w.id)['status']=='in_progress'
    w.close()
    assert s.get(w.id)['status']=='cancelled'
    assert s.records[w.id].writer is None

def test_failures_have_codes_that_codex_knows():
    from atlas.ground.core import ContextLengthError
    def code(e):
        return events(
            reply(asked(), 'm').error(e)
        )[-1]['response']['error']['code']
    assert [
        code(e)
        for e in (
            QueueFullError('x'), ContextLengthError('x'), ValueError('x'),
            AtlasError('x'))
    ]==['rate_limit_exceeded','context_length_exceeded','server_error','server_error']

# -- through the whole service: template, tokenizer, parsers, stream
# -----------------------------------------------------------

def model(prompt):
    "A scripted model: markup and all"
    if 'endless' in prompt:
        return '<think>\n\n</think>\n\n'+'A'*100_000
    if 'weather' in prompt and 'call weather' not in prompt and 'tool {' in prompt:
        return (
            '<think>\nI must look.\n</think>\n\n<tool_call>\n{"name": "weather", "arguments": '
            '{"city": "Oslo"}}\n</tool_call>')
    return '<think>\nHm.\n</think>\n\n'+('It is foggy.' if 'fog' in prompt else 'Hello.')

@pytest.fixture(scope='module')
def whole():
    with service(model) as s:
        yield s
@pytest.fixture
def sdk(whole): return client_of(whole)

def looked_up(sdk, streamed):
    "A call of a tool, and what comes of its result"
    kw = dict(model='scripted', tools=[dict(WEATHER, strict=False)])
    r1 = made(sdk, streamed, input='The weather?', instructions='Be brief.', **kw)
    result = dict(type='function_call_output', call_id=r1.output[-1].call_id, output='fog')
    return r1,made(sdk, streamed, previous_response_id=r1.id, input=[result], **kw)

@pytest.mark.parametrize('streamed', [False, True])
def test_service_tool_loop(sdk, whole, streamed):
    r1,r2 = looked_up(sdk, streamed)
    thought,call = r1.output
    assert (thought.type,call.type)==('reasoning','function_call')
    assert thought.content[0].text.strip()=='I must look.'
    assert json.loads(call.arguments)==dict(city='Oslo')
    assert r2.output_text.strip()=='It is foggy.'
    assert r2.usage.input_tokens==len(whole.prompts[-1].encode())
    assert r2.usage.output_tokens_details.reasoning_tokens>0
    check_response(r2.to_dict()|dict(created_at=int(r2.created_at)))

def test_service_prompts_of_a_tool_loop(sdk, whole):
    looked_up(sdk, False)
    first,second = whole.prompts[-2:]
    assert first.startswith('tool {') and 'system: Be brief.' in first
    assert 'call weather' in second and 'Be brief' not in second

def test_service_stores_counts_and_forgets(sdk, whole):
    r = sdk.responses.create(model='scripted', input='Hi', metadata=dict(k='v'))
    assert sdk.responses.retrieve(r.id)==r
    assert [i.role for i in sdk.responses.input_items.list(r.id)]==['user']
    counted = sdk.responses.input_tokens.count(model='scripted', input='Hi')
    assert counted.input_tokens==r.usage.input_tokens
    sdk.responses.delete(r.id)
    with pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(r.id)

def test_service_compacts_nothing(sdk):
    with pytest.raises(openai.APIStatusError) as e:
        sdk.responses.compact(model='scripted', input='Hi')
    assert e.value.status_code in (404, 501) and e.value.body['message']

def test_service_cuts_at_max_output_tokens(sdk):
    r = sdk.responses.create(model='scripted', input='endless', max_output_tokens=12)
    assert (r.status, r.incomplete_details.reason, r.usage.output_tokens) == (
        'incomplete','max_output_tokens',12)

def test_service_background(sdk, whole):
    r = sdk.responses.create(model='scripted', input='endless', background=True)
    assert r.status=='queued'
    before = whole.aborted
    assert sdk.responses.cancel(r.id).status=='cancelled' and whole.aborted==before+1
    got = list(sdk.responses.retrieve(r.id, stream=True))
    assert got[0].type=='response.created' and got[-1].response.status=='cancelled'
    r = sdk.responses.create(model='scripted', input='Hi', background=True, stream=True)
    assert [e for e in r][-1].response.output_text.strip()=='Hello.'

def test_service_stops_when_the_client_leaves(sdk, whole):
    before = whole.aborted
    s = sdk.responses.create(model='scripted', input='endless', stream=True)
    rid = next(s).response.id
    for e in s:
        if e.type=='response.output_text.delta':
            break
    s.close()
    status = next(
        x for _ in range(200)
        if (x := sdk.responses.retrieve(rid).status)!='in_progress')
    assert status=='cancelled' and whole.aborted==before+1

def test_service_truncates_only_when_asked(sdk, whole):
    turns = [
        dict(role=r, content='x'*90_000)
        for r in ('user','assistant')
    ]*3+[dict(role='user', content='Hi')]
    with pytest.raises(openai.BadRequestError) as e:
        sdk.responses.create(model='scripted', input=turns)
    assert e.value.code=='context_length_exceeded'
    raw = sdk.responses.with_raw_response.create(model='scripted', input=turns, truncation='auto')
    assert 'left out' in raw.headers['x-atlas-warning']
    assert raw.parse().usage.input_tokens<400_000
    assert whole.prompts[-1].count('user: x')==2

def test_service_errors(sdk):
    with pytest.raises(openai.NotFoundError) as e:
        sdk.responses.create(model='nobody', input='Hi')
    assert e.value.param=='model'
    with pytest.raises(openai.BadRequestError):
        sdk.responses.input_items.list(
            sdk.responses.create(model='scripted', input='Hi').id,
            limit=0)
