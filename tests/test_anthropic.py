"""Anthropic's Messages API: its official client against scripted answers, any chunking, any
body, and what Claude Code sends."""
import asyncio,copy,json,re,sys,threading
from dataclasses import replace
from pathlib import Path
import anthropic,pytest,uvicorn
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message,RawMessageStreamEvent
from hypothesis import given,settings,strategies as st
from pydantic import BaseModel,TypeAdapter
from atlas.text.chat import ChatTemplate
from atlas.ground.core import AtlasError,ContextLengthError,EngineError,QueueFullError
from atlas.ground.core import RequestError,SourceError
from atlas.service.http import ApiKeys,Rate,Rules
from atlas.service.log import Access
from atlas.service.protocol.anthropic import error_body,parse,parse_count,reply
from atlas.text.deltas import CallDelta,Delta,gather
from atlas.service.protocol.base import Ask,Usage

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from agents import agent,run  # noqa: E402
from inprocess import app_of  # noqa: E402
from scripted import TEMPLATE,Speaker,running,service  # noqa: E402
from helpers.waiting import WAIT  # noqa: E402

HELLO = [dict(role='user', content='Hello')]
COUNTS = Usage(prompt=120, completion=30, cached=64, reasoning=7)

def parsed(f=parse, **kw):
    body = dict(model='m', max_tokens=64, messages=HELLO)|kw
    return f(json.dumps(body).encode())
def calls(*ds): return tuple(ds)

# -- a server that says what a script tells it ----------------------------------------------------

class KeyMissing(AtlasError):
    status,code = 401,'no_key'
class NotYours(AtlasError):
    status,code = 403,'forbidden'
class TooLarge(RequestError):
    status,code = 413,'body_too_large'
class TooMany(AtlasError):
    status,code = 429,'rate_limited'

def always(*deltas):
    "An answer that is the same whatever is asked"
    return lambda ask: [replace(d) for d in deltas]

def said(text, **kw): return Delta(content=text, **kw)

def thought(text, **kw): return Delta(reasoning=text, **kw)

def called(*args, **kw):
    "A piece of a tool call, or the beginning of one"
    return Delta(calls=calls(CallDelta(*args, **kw)))

def end(finish='stop', **kw): return Delta(finish=finish, **kw)

class Script:
    "An ASGI app; `answer` makes pieces, or an error, from an `Ask`"
    def __init__(self):
        self.answer = always(said('Hi.', finish='stop'))
        self.seen,self.error_at = [],None

    async def __call__(self, scope, receive, send):
        if scope['type']!='http':
            return
        raw = b''
        while True:
            m = await receive()
            raw += m.get('body', b'')
            if not m.get('more_body'):
                break
        try:
            status,kind,chunks = 200,*self.serve(scope['path'], raw)
        except AtlasError as e:
            status = e.status
            kind = b'application/json'
            chunks = [json.dumps(error_body(e)).encode()]
        await send(
            dict(type='http.response.start', status=status, headers=[(b'content-type', kind)]))
        for c in chunks:
            await send(dict(type='http.response.body', body=c, more_body=True))
        await send(dict(type='http.response.body', body=b''))

    def serve(self, path, raw):
        if path=='/v1/messages/count_tokens':
            ask = parse_count(raw)
            self.seen.append(ask)
            return (
                b'application/json',
                [json.dumps(dict(input_tokens=len(str(ask.messages)))).encode()])
        ask = parse(raw)
        self.seen.append(ask)
        pieces = self.answer(ask)
        w = reply(ask, ask.model)
        if not ask.stream:
            return (
                b'application/json',
                [json.dumps(w.whole([gather(pieces)], COUNTS)).encode()])
        return b'text/event-stream',list(self.stream(w, pieces))

    def stream(self, w, pieces):
        yield w.start(Usage(prompt=120))
        yield w.ping()
        for n,p in enumerate(pieces):
            if n==self.error_at:
                yield w.error(EngineError('The engine failed'))
                return
            yield w.piece(0, p)
            if n==0:
                yield w.ping()
        yield w.end(COUNTS)

@pytest.fixture(scope='module')
def scripted_app():
    "The script, and the URL it is at"
    script = Script()
    server = uvicorn.Server(uvicorn.Config(script, port=0, log_level='warning', lifespan='off'))
    up = threading.Event()
    async def main():
        task = asyncio.ensure_future(server.serve())
        while not server.started:
            await asyncio.sleep(.01)
        script.url = f'http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}'
        up.set()
        await task
    t = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    t.start()
    assert up.wait(WAIT)
    yield script
    server.should_exit = True
    t.join(WAIT)

@pytest.fixture
def script(scripted_app):
    scripted_app.__init__()
    return scripted_app

def client_of(url, **kw):
    return anthropic.Anthropic(base_url=url, max_retries=0, timeout=WAIT, **kw)

@pytest.fixture
def client(script):
    with client_of(script.url, api_key='none') as c:
        yield c

def ask(client, **kw): return dict(model='m', max_tokens=64, messages=HELLO)|kw

# -- the client -----------------------------------------------------------------------------------

SAMPLED = dict(temperature=.5, top_k=40)

def test_a_message(client):
    m = client.messages.create(**ask(client, system='Be kind'))
    assert (m.content[0].text,m.stop_reason,m.stop_sequence)==('Hi.','end_turn',None)
    assert (m.role,m.type,m.model)==('assistant','message','m')
    assert m.id.startswith('msg_')
    u = m.usage
    assert (u.input_tokens,u.cache_read_input_tokens,u.cache_creation_input_tokens)==(56,64,0)
    assert (u.output_tokens,u.output_tokens_details.thinking_tokens)==(30,7)

def test_what_a_message_is_asked_for(client, script):
    client.messages.create(
        **ask(client, system='Be kind', stop_sequences=['END'], service_tier='auto'),
        metadata=dict(user_id='u'), extra_body=SAMPLED)
    a = script.seen[0]
    assert a.messages==[
        dict(role='system', content='Be kind'),
        dict(role='user', content='Hello')]
    p = a.params
    assert (p.temperature,p.top_k,p.stop,p.max_tokens)==(.5,40,('END',),64)
    assert a.stream is False

@pytest.mark.parametrize(
    'finish,stop,want',
    [('stop',None,('end_turn',None)),
     ('stop','END',('stop_sequence','END')),
     ('stop','<|im_end|>',('end_turn',None)),
     ('stop',7,('end_turn',None)),
     ('length',None,('max_tokens',None))])
def test_stop_reasons(client, script, finish, stop, want):
    script.answer = always(said('a'), end(finish, stop=stop))
    m = client.messages.create(**ask(client, stop_sequences=['END']))
    assert (m.stop_reason,m.stop_sequence)==want
    with client.messages.stream(**ask(client, stop_sequences=['END'])) as s:
        m = s.get_final_message()
    assert (m.stop_reason,m.stop_sequence)==want

def test_a_stream(client, script):
    odd = [
        'Hel', 'lo', '\n\ndata: no\n\nevent: error\n', ' \u2028\u2029\x85 ',
        'größer "quoted" \\ 日本 \U0001f600', '\x00\x1f']
    script.answer = always(*map(said, odd), end())
    with client.messages.stream(**ask(client)) as s:
        got = list(s.text_stream)
        m = s.get_final_message()
    assert got==odd and m.content[0].text==''.join(odd)
    assert (
        m.usage.input_tokens,m.usage.cache_read_input_tokens,
        m.usage.output_tokens
    ) == (56,64,30)

MIXED = [
    thought('Hm'), thought('.', content='\n'), said('So'),
    called(0, 'call_ab', 'f'), called(0, arguments='{"a":'),
    said('\nDone', calls=calls(CallDelta(0, arguments='1}'))), end('tool_calls')]

@pytest.fixture
def mixed(client, script):
    "The events of an answer that has everything"
    script.answer = always(*MIXED)
    return list(client.messages.create(**ask(client, stream=True)))

def test_events_in_order(mixed):
    kinds = [e.type for e in mixed]
    assert kinds[:2]==['message_start','content_block_start']
    assert kinds[-2:]==['message_delta','message_stop']
    starts = [e for e in mixed if e.type=='content_block_start']
    assert [e.index for e in starts]==[0,1,2,3]
    assert [e.content_block.type for e in starts]==['thinking','text','tool_use','text']

def test_one_block_is_open_at_a_time(mixed):
    open_ = None
    for e in mixed:
        if e.type=='content_block_start':
            assert open_ is None
            open_ = e.index
        if e.type in ('content_block_delta','content_block_stop'):
            assert e.index==open_
        if e.type=='content_block_stop':
            open_ = None
    assert open_ is None

def test_deltas_in_order(mixed):
    deltas = [e.delta for e in mixed if e.type=='content_block_delta']
    assert [d.type for d in deltas]==[
        'thinking_delta','thinking_delta','signature_delta','text_delta','input_json_delta',
        'input_json_delta','text_delta']
    assert deltas[2].signature and deltas[-1].text=='\nDone' and deltas[3].text=='\nSo'

THINKING = [
    thought('Let me '),
    thought('think.', content='Yes'),
    said('.', finish='stop')]

def test_thinking_goes_round(client, script):
    script.answer = always(*THINKING)
    m = client.messages.create(
        **ask(client, max_tokens=4096, thinking=dict(type='enabled', budget_tokens=2048)))
    assert [b.type for b in m.content]==['thinking','text']
    assert m.content[0].thinking=='Let me think.'
    assert m.content[0].signature
    assert script.seen[0].thinking_budget==2048
    assert script.seen[0].template['enable_thinking'] is True
    with client.messages.stream(
        **ask(client, messages=[*HELLO, m.to_param(), *HELLO])
    ) as s:
        assert s.get_final_message().content[0].thinking=='Let me think.'
    assert script.seen[1].messages[1]==dict(
        role='assistant', content='Yes.', reasoning='Let me think.')

HIDDEN = dict(thinking=dict(type='adaptive', display='omitted'))

def test_a_thought_that_is_not_shown(client, script):
    script.answer = always(*THINKING)
    with client.messages.stream(**ask(client, **HIDDEN)) as s:
        deltas = [e.delta.type for e in s if e.type=='content_block_delta']
        m = s.get_final_message()
    assert [b.type for b in m.content]==['thinking','text']
    assert m.content[0].thinking=='' and m.content[0].signature
    assert 'thinking_delta' not in deltas
    w = client.messages.create(**ask(client, **HIDDEN))
    assert [b.type for b in w.content]==['thinking','text']
    assert w.content[0]==m.content[0]

def test_a_thought_that_is_not_shown_goes_round_too(client, script):
    script.answer = always(*THINKING)
    m = client.messages.create(**ask(client, **HIDDEN))
    client.messages.create(**ask(client, messages=[*HELLO, m.to_param(), *HELLO]))
    assert script.seen[-1].messages[1]==dict(
        role='assistant', content='Yes.', reasoning='Let me think.')

def test_zero_tokens_say_nothing(client, script):
    kw = ask(client, max_tokens=0)
    with client.messages.stream(**kw) as s:
        streamed = s.get_final_message()
    for m in client.messages.create(**kw),streamed:
        assert (m.content,m.stop_reason)==([],'max_tokens')

def forecast(a):
    "A model that calls `weather`, and then says what it gave"
    last = a.messages[-1]
    if last['role']=='tool':
        return [said(f'It is {last["content"]}.', finish='stop')]
    begun = called(0, 'call_0123', 'weather', '{"city"')
    return [said('Wait.'), begun, called(0, arguments=': "Oslo"}'), end('tool_calls')]

@anthropic.beta_tool
def weather(city: str) -> str:
    "The weather in a city"
    return f'{city}: rain'

@pytest.mark.parametrize('stream', [False,True])
def test_the_tool_loop_of_the_sdk(client, script, stream):
    "The SDK's own loop calls the tool and comes back with its result"
    script.answer = forecast
    kw = dict(model='m', max_tokens=64, messages=list(HELLO), tools=[weather])
    if stream:
        turns = client.beta.messages.tool_runner(stream=True, **kw)
        *_,m = [turn.get_final_message() for turn in turns]
    else:
        m = client.beta.messages.tool_runner(**kw).until_done()
    assert m.content[0].text=='It is Oslo: rain.'
    a = script.seen[-1]
    assert [m['role'] for m in a.messages]==['user','assistant','tool']
    f = dict(name='weather', arguments='{"city":"Oslo"}')
    assert a.messages[1]['tool_calls']==[dict(id='toolu_0123', type='function', function=f)]
    assert a.messages[2]==dict(
        role='tool', tool_call_id='toolu_0123', content='Oslo: rain', name='weather')
    # the first try, with a thread, was refused
    assert a.tools[0]['function']['parameters']['required']==['city']
    assert len(script.seen)==2

def test_no_conversation_is_held(client):
    "A later request of a thread has only what is new"
    with pytest.raises(anthropic.BadRequestError) as e:
        client.beta.messages.create(
            **ask(client),
            thread=dict(type='continue', previous_message_id='msg_1'),
            betas=['message-threads-2026-08-12'])
    assert e.value.error_code=='thread_unsupported_request'

def test_parallel_calls_and_a_cut(client, script):
    f = CallDelta(0, 'call_1', 'f', '{}')
    g = CallDelta(1, 'call_2', 'g', '{"a": [1, {"b": "x')
    both = Delta(calls=calls(f, g))
    script.answer = always(both, end('length'))
    whole = client.messages.create(**ask(client))
    with client.messages.stream(**ask(client)) as s:
        streamed = s.get_final_message()
    for m in whole,streamed:
        assert [(b.id,b.name,b.input) for b in m.content]==[
            ('toolu_1','f',{}),
            ('toolu_2','g',dict(a=[1,{}]))]
        assert m.stop_reason=='max_tokens'

def test_an_empty_answer_has_a_block(client, script):
    for text in '','\n':
        script.answer = always(said(text), end())
        with client.messages.stream(**ask(client)) as s:
            streamed = s.get_final_message()
        for m in client.messages.create(**ask(client)),streamed:
            assert [b.to_dict() for b in m.content]==[
                dict(type='text', text=text)]

class Title(BaseModel):
    title:str

def test_structured_output(client, script):
    script.answer = always(said('{"title": "A day"}', finish='stop'))
    m = client.messages.parse(**ask(client, output_format=Title))
    assert m.parsed_output==Title(title='A day')
    assert script.seen[0].format['kind']=='json_schema'
    assert script.seen[0].format['schema']['required']==['title']

def test_count_tokens(client, script):
    n = client.messages.count_tokens(
        model='m', messages=HELLO, system='Be kind',
        tools=[dict(name='f', input_schema=dict(type='object'))]).input_tokens
    assert n==len(str(script.seen[0].messages)) and script.seen[0].tools
    client.messages.count_tokens(
        model='m',
        messages=[*HELLO, dict(role='assistant', content='and then')])

ERRORS = [
    (RequestError('a'),anthropic.BadRequestError,'invalid_request_error'),
    (KeyMissing('a'),anthropic.AuthenticationError,'authentication_error'),
    (NotYours('a'),anthropic.PermissionDeniedError,'permission_error'),
    (SourceError('a'),anthropic.NotFoundError,'not_found_error'),
    (TooLarge('a'),anthropic.APIStatusError,'request_too_large'),
    (TooMany('a'),anthropic.RateLimitError,'rate_limit_error'),
    (EngineError('a'),anthropic.InternalServerError,'api_error'),
    (QueueFullError('a'),anthropic.APIStatusError,'overloaded_error'),
    (ContextLengthError('a'),anthropic.BadRequestError,'invalid_request_error')]

@pytest.mark.parametrize(
    'e,kind,name', ERRORS,
    ids=[type(e).__name__ for e,*_ in ERRORS])
def test_errors(client, script, e, kind, name):
    def fail(a):
        raise e
    script.answer = fail
    with pytest.raises(kind) as got:
        client.messages.create(**ask(client))
    assert got.value.type==name
    assert got.value.error_code==e.code
    assert got.value.status_code==e.status
    assert ('prompt is too long' in got.value.api_message)==isinstance(e, ContextLengthError)

def test_a_body_that_is_wrong(client):
    with pytest.raises(anthropic.BadRequestError, match=r'messages\[0\].content\[0\].type'):
        client.messages.create(
            **ask(
                client,
                messages=[dict(role='user', content=[dict(type='video')])]))

def test_a_stream_that_breaks(client, script):
    script.answer = always(said('a'), said('b'), end())
    script.error_at = 1
    got = []
    with pytest.raises(anthropic.APIStatusError, match='The engine failed') as e:
        with client.messages.stream(**ask(client)) as s:
            for t in s.text_stream:
                got.append(t)
    assert got==['a'] and e.value.type=='api_error'

async def test_async_client(script):
    async with anthropic.AsyncAnthropic(base_url=script.url, api_key='none', max_retries=0) as c:
        async with c.messages.stream(model='m', max_tokens=9, messages=HELLO) as s:
            assert [t async for t in s.text_stream]==['Hi.']
def test_async_client(script, f=test_async_client): return asyncio.run(f(script))

# -- any chunking --------------------------------------------------------------------------------
# ------------------------------

event = TypeAdapter(RawMessageStreamEvent)

def accumulated(w, pieces):
    "The message that the SDK's accumulator makes of a stream"
    raw = w.start(Usage(prompt=120))+b''.join(
        w.piece(0, p) for p in pieces
    )+w.end(COUNTS)
    m,bufs = None,{}
    for e in raw.decode().split('\n\n')[:-1]:
        head,data = e.split('\n')
        d = json.loads(data.removeprefix('data: '))
        assert head==f'event: {d["type"]}'
        m = accumulate_event(event=event.validate_python(d), current_snapshot=m, json_bufs=bufs)
    return m.to_dict()

texts = st.text(st.sampled_from('ab \n"\\{}é\u2028😀'), max_size=12)
values = st.recursive(
    st.none()|st.booleans()
    |st.integers(-9,9**20)|texts,
    lambda s: st.lists(s, max_size=3)|st.dictionaries(
        texts, s, max_size=3),
    max_leaves=6)
args = st.dictionaries(texts, values, max_size=3).map(json.dumps)

def cut(text, at):
    return [text[i:j] for i,j in zip([0,*at], [*at,len(text)])]

@st.composite
def atoms(draw):
    "What one answer says, in order, as small pieces: (kind, piece)"
    def pieces(text):
        return cut(text, sorted(draw(st.lists(st.integers(0,len(text)), max_size=4))))
    todo = [('reasoning',t) for t in pieces(draw(texts))]
    todo += [('content',t) for t in pieces(draw(texts))]
    for i,a in enumerate(draw(st.lists(args, max_size=3))):
        todo.append(('calls',(CallDelta(i, f'call_{i}', f'f{i}'),)))
        todo += [('calls',(CallDelta(i, arguments=t),)) for t in pieces(a)]
    return todo

@st.composite
def answers(draw):
    "Pieces of one answer, cut and packed in any way that keeps the order"
    pieces,now = [],Delta()
    for kind,x in draw(atoms()):
        if draw(st.booleans()):
            pieces.append(now)
            now = Delta()
        setattr(now, kind, getattr(now, kind)+x)
    finish = st.sampled_from(['stop','length','tool_calls'])
    stop = st.sampled_from([None,'END','x',3])
    last = end(draw(finish), stop=draw(stop))
    if draw(st.booleans()):
        now.finish,now.stop = last.finish,last.stop
        return [*pieces, now]
    return [*pieces, now, last]

@settings(max_examples=200, deadline=None)
@given(answers())
def test_any_chunking_is_the_same_message(pieces):
    a = parsed(stop_sequences=['END'])
    whole = reply(a, 'm', id='msg_1').whole([gather(pieces)], COUNTS)
    assert accumulated(reply(a, 'm', id='msg_1'), pieces)==whole
    Message.model_validate(whole)

# -- any body -------------------------------------------------------------------------------------

BILLING = 'x-anthropic-billing-header: cc_version=2.1.165.0d9; cc_entrypoint=cli; cch={};'
def text(t, **kw): return dict(type='text', text=t)|kw
CACHED = dict(cache_control=dict(type='ephemeral', ttl='1h'))

def tool(name, **props):
    shape = {
        '$schema':'https://json-schema.org/draft/2020-12/schema', 'type':'object',
        'properties':{k:dict(type=v) for k,v in props.items()},
        'required':list(props), 'additionalProperties':False}
    return dict(name=name, description=f'{name} something', input_schema=shape)

def noted(note): return text(f'<system-reminder>\n{note}\n</system-reminder>')
def result(id, content, **kw):
    return dict(type='tool_result', tool_use_id=id, content=content)|kw

TODAY = text(
    '<system-reminder>\nAs you answer, you can use the following context:\n# currentDate\n'
    'Today is 2026-11-21.\n</system-reminder>\n\n')
ASKED = [
    dict(role='user', content=[TODAY, text('why does test_a fail?', **CACHED)]),
    dict(role='system', content='The following skills are available: none.')]
READ = dict(
    type='tool_use', id='toolu_01', name='Read', input=dict(file_path='/w/test_a.py'))
BASH = dict(
    type='tool_use', id='toolu_02', name='Bash', input=dict(command='pytest -x', timeout=60000),
    caller=dict(type='direct'))
PLAN = dict(
    type='thinking', thinking='Look at the test, and run it.', signature='EqQBCkYIBxgC')
FAILED = text('<tool_use_error>Exit code 1\nE assert 2 == 1</tool_use_error>')
CALLED = [
    dict(role='assistant', content=[PLAN, text("I'll look at the test."), READ, BASH]),
    dict(role='user', content=[
        result('toolu_01', '     1→def test_a(): assert f()==1\n'),
        result('toolu_02', [FAILED], is_error=True, **CACHED),
        noted('The task tools have not been used recently.')])]
WENT_ON = [
    dict(role='assistant', content=[text('f() gives 2.')]),
    dict(role='user', content='fix it'),
    dict(role='user', content='and be quick')]
CLAUDE_TOOLS = [
    tool('Bash', command='string', timeout='number'),
    tool('Read', file_path='string')|dict(eager_input_streaming=True),
    tool('mcp__ide__getDiagnostics'),
    dict(type='web_search_20250305', name='web_search', max_uses=8)]
CLAUDE = dict(
    model='claude-opus-4-8', max_tokens=32000, stream=True, temperature=1, tools=CLAUDE_TOOLS,
    metadata=dict(user_id='user_0784b_account_261d_session_b4e5'),
    thinking=dict(type='adaptive', display='omitted'),
    context_management=dict(edits=[dict(type='clear_thinking_20251015', keep='all')]),
    output_config=dict(effort='high'), diagnostics=None, speed=None)

def claude_code(turn=1, cch='fa690', **kw):
    "What Claude Code sends: turn 1, the calls of turn 1 done, or one more question"
    messages = ASKED+(CALLED if turn>1 else [])+(WENT_ON if turn>2 else [])
    system = [
        text(BILLING.format(cch)),
        text("You are Claude Code, Anthropic's official CLI for Claude.", **CACHED),
        text('\nYou are an interactive agent that helps users with software.', **CACHED)]
    return CLAUDE|dict(messages=copy.deepcopy(messages), system=system)|kw

@pytest.fixture
def third_turn():
    "What the third turn of Claude Code asks"
    return parse(json.dumps(claude_code(3)).encode())

def test_what_claude_code_asks_first(third_turn):
    assert [m['role'] for m in third_turn.messages]==[
        'system','user','assistant','tool','tool','user','assistant','user']
    s,u,*_ = third_turn.messages
    assert s['content']==(
        "You are Claude Code, Anthropic's official CLI for Claude.\nYou are an interactive agent "
        "that helps users with software.")
    assert 'cch=' not in json.dumps(third_turn.messages)
    assert u['content'].endswith(
        'why does test_a fail?\n<system-reminder>\nThe following skills are available: '
        'none.\n</system-reminder>')

def test_what_claude_code_calls(third_turn):
    c,read,ran = third_turn.messages[2:5]
    note,last = third_turn.messages[5]['content'],third_turn.messages[7]['content']
    assert c['reasoning']=='Look at the test, and run it.'
    assert c['content']=="I'll look at the test."
    functions = [t['function'] for t in c['tool_calls']]
    assert [f['name'] for f in functions]==['Read','Bash']
    assert json.loads(functions[1]['arguments'])==dict(command='pytest -x', timeout=60000)
    assert (read['tool_call_id'],ran['name'])==('toolu_01','Bash')
    assert ran['content'].startswith('<tool_use_error>Exit code 1')
    assert 'task tools' in note and last=='fix it\nand be quick'

def test_what_claude_code_wants(third_turn):
    a = third_turn
    assert [t['function']['name'] for t in a.tools]==['Bash','Read','mcp__ide__getDiagnostics']
    warning, = a.warnings
    assert 'web_search' in warning and a.ignored==[]
    assert a.template['enable_thinking'] is True and a.template['reasoning_effort']=='high'
    assert a.thinking_budget is None and a.params.max_tokens==32000
    assert a.stream and a.parallel and a.tool_choice=='auto'

def test_the_cache_finds_the_turns_before():
    "Each turn's prompt begins with the one before, whatever the billing line says"
    strict = ChatTemplate(
        "{% for m in messages %}{% if m.role=='system' and not loop.first %}{{ "
        "raise_exception('System message must be at the beginning.') }}{% endif %}"
        "<{{ m.role }}>{{ m.content or '' }}{% for t in m.tool_calls or [] %}[{{ "
        "t.function.name }}{{ t.function.arguments | tojson }}]{% endfor %}{% endfor %}")
    shown = [
        strict.render(
            parse(json.dumps(claude_code(n, cch=f'{n:05}')).encode()).messages,
            add_generation_prompt=False)
        for n in (1,2,3)]
    assert shown[1].startswith(shown[0])
    assert shown[2].startswith(shown[1])
    assert len(set(map(len, shown)))==3

def test_claude_codes_small_requests():
    "The probe, and the count of a tool"
    parsed(
        messages=[dict(role='user', content='quota')],
        max_tokens=1, metadata=dict(user_id='u'))
    foo = dict(messages=[dict(role='user', content='foo')], tools=[tool('Bash', command='string')])
    assert parsed(parse_count, max_tokens=None, **foo).tools

def test_claude_codes_title():
    title = dict(
        type='object', properties=dict(title=dict(type='string')), required=['title'],
        additionalProperties=False)
    a = parsed(
        system=[text(BILLING.format('0')), text('Write a title.')],
        tools=[], temperature=1, thinking=dict(type='disabled'),
        output_config=dict(format=dict(type='json_schema', schema=title)))
    assert a.format['schema']==title
    assert a.template['enable_thinking'] is False
    assert a.tools is None
    assert a.messages[0]['content']=='Write a title.'

def test_images_wherever_they_are():
    def image(**source): return dict(type='image', source=source)
    png = image(type='base64', media_type='image/png', data='AAAA')
    far = image(type='url', url='https://a/b.png')
    shot = dict(type='tool_use', id='t', name='shot', input={})
    seen = [text('What is this?'), result('t', [text('A picture'), png]), far]
    a = parsed(messages=[
        dict(role='assistant', content=[shot]),
        dict(role='user', content=seen)])
    _,heard,last = a.messages
    assert heard==dict(role='tool', tool_call_id='t', content='A picture', name='shot')
    def shown(url, where): return dict(type='image_url', image_url=dict(url=url), where=where)
    assert last['content']==[
        shown(
            'data:image/png;base64,AAAA',
            'messages[1].content[1].tool_result.content[1].image'),
        text('What is this?'),
        shown('https://a/b.png', 'messages[1].content[2].image')]

SOUND = [
    claude_code(3),
    dict(
        model='m', max_tokens=9, system='s',
        messages=[
            dict(
                role='user',
                content=[
                    dict(
                        type='document', title='t', context='c',
                        source=dict(type='content', content=[text('a')])),
                    dict(
                        type='search_result', title='t', source='s',
                        content=[text('b')]),
                    dict(
                        type='image',
                        source=dict(type='base64', media_type='image/png', data='AA'))]),
            dict(
                role='assistant',
                content=[
                    dict(type='redacted_thinking', data='x'),
                    dict(type='server_tool_use', id='s', name='web_search', input={}),
                    dict(type='compaction', content='so far')]),
            dict(role='user', content='go on')],
        tools=[tool('f')],
        tool_choice=dict(type='tool', name='f', disable_parallel_tool_use=True),
        thinking=dict(type='enabled', budget_tokens=7),
        output_format=dict(type='json_schema', schema={}),
        mcp_servers=[])]

def places(d, path=()):
    "Every path into a body"
    yield path
    for k,v in (
        d.items() if isinstance(d, dict)
        else enumerate(d) if isinstance(d, list) else ()
    ):
        yield from places(v, (*path,k))

PLACES = [
    (i,p) for i,b in enumerate(SOUND)
    for p in places(b) if p]
words = st.sampled_from([
    'text','image','tool_use','tool_result','thinking','document','user','assistant',
    'system','auto','any','tool','url','base64','content','',
    BILLING])
junk = st.recursive(
    st.none()|st.booleans()
    |st.integers()
    |st.floats(allow_nan=False, allow_infinity=False)
    |st.text(max_size=8)|words,
    lambda s: st.lists(s, max_size=3)|st.dictionaries(
        words
        |st.sampled_from([
            'type','text','content','source','id','name','input','tool_use_id',
            'data']),
        s, max_size=4),
    max_leaves=8)

def check_message(m):
    "What every message of an `Ask` promises to a template"
    assert m['role'] in ('system','user','assistant','tool')
    assert isinstance(m['content'], str|list|None)
    assert m['content'] is not None or m['role']=='assistant'
    for p in m['content'] if isinstance(m['content'], list) else ():
        assert isinstance(p['text'] if p['type']=='text' else p['image_url']['url'], str)
    for c in m.get('tool_calls', ()):
        assert c['id'] and c['function']['name']
        assert isinstance(json.loads(c['function']['arguments']), dict)
    assert m['role']!='tool' or isinstance(m['tool_call_id'], str)

def check(a):
    "What every `Ask` promises to those who take it"
    assert isinstance(a, Ask) and a.messages
    for m in a.messages:
        check_message(m)
    roles = [m['role'] for m in a.messages]
    assert 'system' not in roles[1:]
    assert all(x!=y or x=='tool' for x,y in zip(roles, roles[1:]))
    for w in a.warnings:
        assert w.isascii() and w.isprintable()
    json.dumps([a.messages, a.tools, a.format])

@settings(max_examples=250, deadline=None)
@given(st.sampled_from(PLACES), junk, st.booleans())
def test_a_body_with_something_odd_in_it(place, value, drop):
    i,(*path,last) = place
    b = at = copy.deepcopy(SOUND[i])
    for k in path:
        at = at[k]
    if drop:
        del at[last]
    else:
        at[last] = value
    try:
        check(parse(json.dumps(b).encode()))
    except AtlasError as e:
        assert 400<=e.status<=501 and error_body(e)['error']['message']

@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=60)
    |junk.map(lambda d: json.dumps(d).encode())
    |st.dictionaries(st.sampled_from(list(SOUND[0])), junk, max_size=6).map(
        lambda d: json.dumps(d|dict(max_tokens=1)).encode()))
def test_a_body_that_is_anything(raw):
    for f in parse,parse_count:
        try:
            check(f(raw))
        except AtlasError as e:
            assert 400<=e.status<=501

def test_sound_bodies_are_sound():
    for b in SOUND:
        check(parse(json.dumps(b).encode()))

def test_a_deep_or_large_body():
    deep = 50_000
    with pytest.raises(AtlasError):
        parse(b'{"max_tokens":1,"messages":'+b'['*deep+b']'*deep+b'}')
    nest = dict(type='document', source=dict(type='content', content=[text('x')]))
    for _ in range(40):
        nest = dict(type='document', source=dict(type='content', content=[nest]))
    try:
        check(parsed(messages=[dict(role='user', content=[nest])]))
    except AtlasError:
        pass
    many = [dict(role='user', content=[text('a')]*50_000)]
    assert len(parsed(messages=many).messages[0]['content'])==99_999

def test_notes_of_nothing_and_names_of_anything():
    a = parsed(
        messages=[*HELLO, dict(role='system', content=BILLING.format('1'))],
        tools=[tool('f'), dict(type='evil\r\nx-admin: yes\u2028é')])
    assert a.messages==HELLO and len(a.warnings)==1
    check(a)

def pdf(**source):
    return dict(
        type='document', title='t',
        source=dict(type='base64', media_type='application/pdf', data='JVBERi0=')|source)
REFUSED = [
    pdf(), pdf(type='url', url='https://a/b.pdf'),
    pdf(type='file', file_id='file_1'),
    pdf(media_type='text/plain', data='/w=='),
    dict(type='image', source=dict(type='file', file_id='file_1')),
    dict(type='image', source=dict(type='base64', media_type='image/png'))]

@pytest.mark.parametrize('block', REFUSED, ids=lambda b: f'{b["type"]}-{b["source"]["type"]}')
def test_a_block_that_cannot_be_read_is_named_as_anthropic_does(block):
    "Claude Code takes the place out of the message, leaves the block out, and goes on"
    use = dict(
        role='assistant',
        content=[dict(type='tool_use', id='t', name='f', input={})])
    for blocks,where in (
        ([text('a'), block], f'messages[1].content[1].{block["type"]}.source'),
        ([dict(type='tool_result', tool_use_id='t', content=[text('a'), block])],
         f'messages[1].content[0].tool_result.content[1].{block["type"]}.source')
    ):
        with pytest.raises(RequestError) as e:
            parsed(messages=[use, dict(role='user', content=blocks)])
        assert str(e.value).startswith(where+' ') and e.value.param==where

def test_documents_of_text():
    blocks = [
        pdf(type='text', media_type='text/plain', data='One'),
        pdf(media_type='text/markdown', data='VHdv'),
        pdf(type='content', content='Three'),
        pdf(type='content', content=[text('Four')])]
    a = parsed(
        messages=[
            dict(
                role='user',
                content=[b|CACHED|dict(citations=dict(enabled=True)) for b in blocks])])
    said = a.messages[0]['content']
    assert [
        said.count(w)
        for w in ('<document>\nTitle: t','One','Two','Three','Four')
    ]==[4,1,1,1,1]
    assert a.warnings==['citations is not offered here and was left out']

def test_a_failed_call_says_so():
    use = dict(
        role='assistant',
        content=[dict(type='tool_use', id='t', name='f', input={})])
    def shown(**kw):
        return parsed(
            messages=[
                use,
                dict(role='user', content=[dict(type='tool_result', tool_use_id='t')|kw])]
        ).messages[1]['content']
    assert [
        shown(content='gone', is_error=True),
        shown(content='gone', is_error=False),
        shown(is_error=True),
        shown(content=[text('An error occurred')], is_error=True)
    ]==['Error: gone','gone','Error','An error occurred']

def test_zero_tokens_fill_the_cache():
    assert parsed(max_tokens=0).params.max_tokens==1

# -- the service ---------------------------------------------------------------------------------
# ------------------------------

CALL = (
    '<think>Look outside.</think>\n\nWait.\n<tool_call>\n{"name": "weather", "arguments": '
    '{"city": "Oslo"}}\n</tool_call>')
OLD_FRIENDS = dict(
    name='weather',
    input_schema=dict(
        type='object',
        properties=dict(city=dict(type='string')),
        required=['city']))

def model(prompt):
    "What the model says, by how the prompt ends"
    if 'tool: ' in prompt.rsplit('assistant:', 2)[-2]:
        return '<think>Rain.</think>It rains in Oslo.'
    return CALL if 'tool {' in prompt else '<think></think>Hello END there'

@pytest.fixture(scope='module')
def served():
    with service(model) as s, client_of(s.url, api_key='none') as c:
        s.ask = dict(model='scripted', max_tokens=400, messages=HELLO)
        yield s,c

def test_the_service_answers(served):
    s,c = served
    m = c.messages.create(
        **s.ask,
        system=[text(BILLING.format(1)), text('Be kind')])
    assert [b.to_dict() for b in m.content]==[text('Hello END there')]
    assert m.stop_reason=='end_turn'
    assert m.model=='scripted'
    assert s.prompts[-1]=='system: Be kinduser: Helloassistant: '
    assert m.usage.input_tokens==len(s.prompts[-1]) and m.usage.output_tokens>10
    with c.messages.stream(**s.ask) as got:
        assert got.get_final_text()=='Hello END there'
    assert got.get_final_message().usage.output_tokens==m.usage.output_tokens

def test_the_service_stops(served):
    s,c = served
    for f in (
            c.messages.create,
            (lambda **kw: c.messages.stream(**kw).__enter__().get_final_message())
    ):
        m = f(**s.ask|dict(stop_sequences=['END']))
        assert (m.content[0].text,m.stop_reason,m.stop_sequence)==(
            'Hello ','stop_sequence','END')
        assert f(**s.ask|dict(max_tokens=18)).stop_reason=='max_tokens'

@pytest.fixture(params=[False,True], ids=['whole','stream'])
def turn(served, request):
    "Asks the service, with a tool; whole or streamed"
    s,c = served
    def turn(messages):
        adaptive = dict(type='adaptive')
        kw = s.ask|dict(messages=messages, tools=[OLD_FRIENDS], thinking=adaptive)
        if not request.param:
            return c.messages.create(**kw)
        with c.messages.stream(**kw) as got:
            return got.get_final_message()
    return turn

def test_the_service_calls(turn):
    m = turn(HELLO)
    assert [b.type for b in m.content]==['thinking','text','tool_use']
    assert m.stop_reason=='tool_use'
    thought,said,use = m.content
    assert thought.thinking=='Look outside.' and said.text.strip()=='Wait.'
    assert (use.name,use.input)==('weather',dict(city='Oslo'))
    assert use.id.startswith('toolu_')
    assert m.usage.output_tokens_details.thinking_tokens>5

def test_the_service_goes_on(served, turn):
    m = turn(HELLO)
    rain = dict(role='user', content=[result(m.content[2].id, 'rain')])
    done = turn([*HELLO, m.to_param(), rain])
    assert done.content[-1].text=='It rains in Oslo.' and done.stop_reason=='end_turn'
    assert 'call weathertool: rain' in served[0].prompts[-1]

def test_the_service_counts(served):
    s,c = served
    n = len(s.prompts)
    assert c.messages.count_tokens(
        model='scripted', messages=HELLO, system='Be kind'
    ).input_tokens==len('system: Be kinduser: Helloassistant: ')
    assert len(s.prompts)==n

def test_the_service_refuses(served):
    s,c = served
    with pytest.raises(anthropic.NotFoundError) as e:
        c.messages.create(**s.ask|dict(model='claude-9'))
    assert e.value.type=='not_found_error'
    with pytest.raises(anthropic.BadRequestError, match='temperature') as e:
        c.messages.create(**s.ask, extra_body=dict(temperature=-1))
    assert e.value.request_id
    long = [dict(role='user', content='long '*90_000)]
    with pytest.raises(anthropic.BadRequestError, match='prompt is too long'):
        c.messages.create(**s.ask|dict(messages=long))

def test_the_service_leaves_out(served):
    s,c = served
    hosted = dict(type='web_search_20250305', name='web_search')
    r = c.messages.with_raw_response.create(**s.ask|dict(tools=[OLD_FRIENDS, hosted]))
    assert 'web_search_20250305' in r.headers['x-atlas-warning']

def test_the_service_names_an_image(served):
    "In the body, where Claude Code looks"
    s,c = served
    png = dict(type='image', source=dict(type='base64', media_type='image/png', data='AAAA'))
    use = dict(type='tool_use', id='t', name='f', input={})
    talk = [
        *HELLO, dict(role='assistant', content=[use]),
        dict(role='user', content=[result('t', [png])])]
    where = r'messages\[2\]\.content\[0\]\.tool_result\.content\[0\]\.image'
    why = rf'{where} is an image, and this model reads only text'
    with pytest.raises(anthropic.BadRequestError, match=why):
        c.messages.create(**s.ask|dict(messages=talk))

def test_the_service_counts_what_is_too_long(served):
    s,c = served
    with pytest.raises(anthropic.BadRequestError) as e:
        c.messages.create(**s.ask|dict(messages=[dict(role='user', content='x'*400_000)]))
    said = re.match(
        r'prompt is too long: (\d+) tokens > 399999 maximum\b', e.value.api_message)
    assert int(said[1])>400_000

def test_the_service_knows_claude_code(served):
    s,c = served
    sent = claude_code(1, model='scripted', stream=False)
    d = c.post('/v1/messages?beta=true', body=sent, cast_to=object)
    assert [b['type'] for b in d['content']][-1]=='tool_use'
    assert s.prompts[-1].count('system: ')==1 and 'cch=' not in s.prompts[-1]
    assert [m.id for m in c.models.list()]==['scripted']

QUESTION = dict(model='scripted', max_tokens=9, messages=HELLO)

def behind(rules):
    "The service behind these rules"
    s = Speaker(model)
    return app_of(s, s.tok, ChatTemplate(TEMPLATE), rules=rules)

def test_the_door_knows_keys():
    "Before anything of this API is read"
    with running(Access(behind(Rules(keys=ApiKeys({'secret':'user'}))))) as url:
        with pytest.raises(anthropic.AuthenticationError) as e:
            client_of(url, api_key='wrong').messages.create(**QUESTION)
        assert e.value.type=='authentication_error' and 'secret' not in str(e.value)
        assert e.value.request_id and e.value.body['request_id']==e.value.request_id
        for kw in dict(api_key='secret'),dict(auth_token='secret'):
            assert client_of(url, **kw).messages.create(**QUESTION).type=='message'

def test_the_door_knows_rates():
    rules = Rules(keys=ApiKeys({'secret':'user'}), rate=Rate(2))
    with running(behind(rules)) as url:
        c = client_of(url, api_key='secret').messages
        for _ in range(2):
            c.create(**QUESTION)
        with pytest.raises(anthropic.RateLimitError) as e:
            c.create(**QUESTION)
        assert e.value.type=='rate_limit_error' and int(e.value.response.headers['retry-after'])>=1

def test_the_door_knows_sizes():
    with running(behind(Rules(body=1000))) as url:
        with pytest.raises(anthropic.APIStatusError) as e:
            client_of(url, api_key='any').messages.create(**QUESTION, system='x'*2000)
        assert (e.value.status_code,e.value.type)==(413,'request_too_large')

# -- Claude Code itself, where there is one -------------------------------------------------------

def claude(url, home, *args):
    "Run Claude Code against `url`, and nothing else; what it says in the end"
    out = run(
        [agent('claude'), '-p', *args, '--output-format', 'json'],
        home, ok=False, ANTHROPIC_BASE_URL=url, ANTHROPIC_AUTH_TOKEN='none',
        ANTHROPIC_MODEL='scripted', CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC='1',
        DISABLE_AUTOUPDATER='1')
    return json.loads(out)

def adds(a):
    "A model that has a shell add 40 and 2, and says what it hears"
    last = a.messages[-1]
    if last['role']=='tool':
        return [said(f'It is {last["content"]}'), end()]
    run_it = thought('Run it.', content='I run it.')
    begun = called(0, 'call_01', 'Bash', '{"command": "echo $((40+')
    return [run_it, begun, called(0, arguments='2))"}'), end('tool_calls')]

def test_claude_code_runs_a_tool(script, tmp_path):
    """It is told to run a command, runs it, and shows what comes back; its first try is refused,
    its second breaks before it says anything"""
    tries = []
    def answer(a):
        tries.append(a)
        if len(tries)==1:
            raise QueueFullError('256 requests are waiting')
        script.error_at = 0 if len(tries)==2 else None
        return adds(a)
    script.answer = answer
    d = claude(script.url, tmp_path, 'what is 40+2?', '--allowedTools', 'Bash')
    assert (d['result'],d['is_error'])==('It is 42',False), d
    done = tries[-1]
    assert [m['role'] for m in done.messages]==['system','user','assistant','tool']
    assert done.messages[2]['reasoning']=='Run it.'
    assert 'x-anthropic-billing-header' not in str(done.messages)
    assert done.template['enable_thinking'] is True

def test_claude_code_knows_a_prompt_that_is_too_long(script, tmp_path):
    def answer(a):
        raise ContextLengthError('The prompt has 250,000 tokens, and the context holds 200,000')
    script.answer = answer
    assert 'Prompt is too long' in claude(script.url, tmp_path, 'hi')['result']

def test_claude_code_with_the_service(tmp_path):
    "Through the chat template, the tool parser and the reasoning parser"
    seen = []
    def model(prompt):
        seen.append(prompt)
        if 'call Bashtool: ' in prompt:
            return '<think>Done.</think>It is '+prompt.rsplit(
                'call Bashtool: ', 1
            )[1].removesuffix('assistant: ')
        return (
            '<think>Run it.</think>I run it.\n<tool_call>\n{"name": "Bash", "arguments": '
            '{"command": "echo $((40+2))", "description": "sum"}}\n</tool_call>')
    with service(model) as s:
        d = claude(s.url, tmp_path, 'what is 40+2?', '--allowedTools', 'Bash')
    assert (d['result'],d['is_error'],d['num_turns'])==(
        'It is 42',False,2), d
    assert d['usage']['output_tokens']>20
    assert d['usage']['input_tokens']+d['usage']['cache_read_input_tokens']==sum(
        map(len, (p.encode() for p in seen)))
    assert seen[1].startswith(seen[0].removesuffix('assistant: ')) and 'call Bash' in seen[1]
