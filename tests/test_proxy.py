"""Other servers behind our door: a second Atlas, and one that breaks in every way.
Whatever it does, a request ends in exactly one way, and a stream in an event that says so."""
import asyncio,gzip,json,re,subprocess,sys,threading
from contextlib import ExitStack,contextmanager
from dataclasses import replace
from pathlib import Path
import anthropic,httpx,openai,pytest
from atlas.ground.config import PRESETS
from atlas.ground.core import ConfigError,QueueFullError
from atlas.service.http import ApiKeys,Rules
from atlas.service.process import Served
from atlas.service.models import Models
from atlas.service.gateway import DOORS
from atlas.service.fallbacks import Fallbacks
from atlas.service.upstream import Upstream,UpstreamLimits,Connection
from atlas.service.server import create_app
from atlas.service.service import ReadyModel
from atlas.text.chat import ChatTemplate
from atlas.use.llm import LLM

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from inprocess import loaded  # noqa: E402
from scripted import TEMPLATE,Speaker,running,service  # noqa: E402
from fake_upstream import DONE,HELLO,chunk,completion,good,text,upstream  # noqa: E402
from helpers.patience import PATIENT  # noqa: E402
from helpers.waiting import WAIT,until  # noqa: E402

QUICK = UpstreamLimits(connect=WAIT, first=WAIT, between=WAIT, whole=WAIT)
HASTY = UpstreamLimits(connect=WAIT, first=.3, between=.3, whole=.3, body=1<<16)
STRICT = replace(QUICK, body=1<<16)
ASK = dict(
    model='gemma', messages=[dict(role='user', content='Hi')],
    max_tokens=99)

class Door:
    "Our server, in front of others"
    def __init__(self, url, models):
        self.url,self.models,self.web = url,models,httpx.Client(base_url=url, timeout=WAIT)
    def post(self, path='/v1/chat/completions', **body):
        return self.web.post(path, json=ASK|body)
    def metric(self, name, **labels):
        said = ','.join(f'{k}="{v}"' for k,v in sorted(labels.items()))
        hits = re.findall(
            rf'^atlas:{name}{{{re.escape(said)}}} (\S+)$', self.web.get('/metrics').text, re.M)
        return float(hits[0]) if hits else None

def speaker(name, say):
    "A model of ours, with a script"
    s = Speaker(say)
    return Served([name], upstream_of(name, s))

def upstream_of(name, s):
    return ReadyModel(
        name, [name], s.info, s.tok, ChatTemplate(TEMPLATE),
        parsers=('hermes','qwen3'), runner=s)

@contextmanager
def door(*upstreams, local=(), fallbacks=None, **kw):
    "Our server, with these behind it"
    ms = Models([*local], upstreams=upstreams)
    ms.fallbacks = fallbacks
    with running(create_app(ms, **kw)) as url:
        d = Door(url, ms)
        with d.web:
            yield d

@contextmanager
def behind(say, limits=QUICK, local=(), fallbacks=None, **kw):
    "A fake server and our own in front of it, as `(door, fake)`"
    with upstream(say) as u, door(
        Upstream('spark2', u.url, **dict(models=['gemma'])|kw, limits=limits),
        local=local, fallbacks=fallbacks
    ) as d:
        yield d,u

def data(r):
    return [json.loads(l[6:]) for l in r.text.splitlines() if l.startswith('data: {')]

def spoken(r):
    "The content of an answer of chat, in one piece or streamed"
    if r.headers['content-type'].startswith('application/json'):
        return r.json()['choices'][0]['message']['content']
    return ''.join(c['delta'].get('content') or '' for d in data(r) for c in d['choices'])

def forget(text):
    "Without what is new in every answer"
    ids = '(chatcmpl-|cmpl-|msg_|resp_|rs_|call_|atlas-)[0-9a-f]+'
    times = r'"(created|created_at|completed_at)": ?\d+'
    return re.sub(f'{ids}|{times}', '', text)

def wrong(r, api='chat'):
    "What an error says, in the shape of an API"
    e = r.json()['error']
    assert set(e)==(
        {'type','message','details'} if api=='messages' else {'message','type','param','code'})
    return e['message']

# -- byte for byte -------------------------------------------------------------------------------

def test_a_stream_is_passed_on_byte_for_byte():
    choices = b'[{"index":0,"delta":{"content":"\\u00e9 "}}]'
    odd = b': hm\n\ndata: {"choices":  '+choices+b', "theirs": 1.0}\n\n'
    events = [odd, *HELLO]
    with behind(lambda c: c.stream(*events)) as (d,u):
        r = d.post(stream=True, odd=dict(model='inner'))
        assert r.content==b''.join(events) and r.headers['content-type'].startswith(
            'text/event-stream')
        assert r.headers['x-atlas-model']=='spark2/gemma'
        assert d.metric('upstream_requests_total', upstream='spark2', outcome='ok')==1
        tokens = [d.metric('upstream_tokens_total', upstream='spark2', kind=k)
            for k in ('prompt','completion')]
        assert tokens==[11,7]

def test_only_the_model_is_replaced():
    messages = b'[{"role":"user","content":"\\u00e9"}]'
    raw = b'{ "messages":'+messages+b',"t": 1.0, "model" : "gemma","x":{"model":"gemma"} }'
    with behind(lambda c: c.whole(completion())) as (d,u):
        d.models.find('gemma').id = 'theirs/gemma'
        r = d.web.post(
            '/v1/chat/completions', content=raw, headers={'content-type':'application/json'})
        assert r.json()==completion()
        assert u.calls[0].body==raw.replace(b'"model" : "gemma"', b'"model" : "theirs/gemma"')

def test_events_that_come_in_pieces():
    whole = b''.join(HELLO).replace(b'\n\n', b'\r\n\r\n')
    with behind(
        lambda c: c.stream(
            *(whole[i:i+7] for i in range(0, len(whole), 7)))
    ) as (d,u):
        assert d.post(stream=True).content==whole

# -- a stream, however the network cuts it -------------------------------------------------------

HEAD = b'HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n'
LAST = b'0\r\n\r\n'
def chunked(*events):
    return b''.join(b'%x\r\n%b\r\n'%(len(e), e) for e in events)

class Pieces:
    "Both ends of a connection that has these bytes, and then no more"
    def __init__(self, *pieces):
        self.left = [*pieces]
    async def read(self, most):
        return self.left.pop(0) if self.left else b''
    def write(self, raw):
        pass
    async def drain(self):
        pass

async def taken(*pieces):
    "The head of an answer, what its plain chunks hold, and what is left to read"
    ends = Pieces(*pieces)
    w = Connection(ends, ends)
    await w.write(b'a question')
    head = b''
    while not w.at_body:
        head += await w.read(1<<16)
    held = b''.join([c async for c in w.chunks()])
    rest = b''
    while more := await w.read(1<<16):
        rest += more
    return head,held,rest

def test_chunks_wherever_they_are_cut():
    raw = HEAD+chunked(*HELLO)+LAST
    cuts = [(raw[:i], raw[i:]) for i in range(1, len(raw))]
    bytewise = [raw[i:i+1] for i in range(len(raw))]
    for pieces in [(raw,), *cuts, bytewise]:
        head,held,rest = asyncio.run(taken(*pieces))
        assert (head, held) == (HEAD, b''.join(HELLO)), pieces
        assert rest==LAST, pieces

ODD = dict(
    extension=b'5;a=b\r\ndata:\r\n'+chunked(b' 1\n\n', DONE)+LAST,
    trailer=chunked(b'data: 1\n\n', DONE)+b'0\r\nx-a: b\r\n\r\n',
    zeros=b'0000000009\r\ndata: 1\n\n\r\n'+chunked(DONE)+LAST,
    small=chunked(*(bytes([b]) for b in b'data: 1\n\n'+DONE))+LAST,
    large=chunked(b'data: 1\n\n', b':'+b' '*(1<<20)+b'\n\n', DONE)+LAST)

@pytest.mark.parametrize('odd', ODD)
def test_chunks_that_are_unusual(odd):
    with behind(lambda c: c.send(HEAD, ODD[odd])) as (d,u):
        r = d.post(stream=True)
        assert 'data: 1\n\n' in r.text and 'error' not in r.text, r.text[-200:]

BAD = dict(
    size=chunked(text('Hi'))+b'zz\r\nab\r\n', end=chunked(text('Hi'))+b'3\r\nabcdef\r\n',
    cut=chunked(text('Hi'))+b'ff\r\ndata')

@pytest.mark.parametrize('path', ['chat/completions','messages'])
@pytest.mark.parametrize('bad', BAD)
def test_chunks_that_are_none(bad, path):
    def say(c):
        c.send(HEAD, BAD[bad])
    with behind(say, apis='chat') as (d,u):
        r = d.post('/v1/'+path, stream=True)
        assert 'Hi' in r.text and 'upstream_error' in r.text, r.text

def test_a_connection_that_was_hung_up_meanwhile():
    "The next question is asked by another; one that is new and hung up on is not asked again"
    def say(c):
        if len(u.calls)<3:
            c.stream(*HELLO)
            c.sock.recv(1<<16) # the next question, which nobody answers
    with behind(say) as (d,u):
        assert [spoken(d.post(stream=True)) for _ in range(2)]==['Hello','Hello']
        assert len(u.calls)==2
        assert d.post().status_code==502 and len(u.calls)==3

def test_a_head_that_comes_with_more():
    "What was read with another head is not looked for in the wire"
    seen = threading.Event()
    early = b'HTTP/1.1 103 Early Hints\r\n\r\n'
    def say(c):
        c.send(early+HEAD+chunked(HELLO[0]))
        assert seen.wait(WAIT)
        c.send(chunked(*HELLO[1:])+LAST)
    with behind(say) as (d,u), d.web.stream(
        'POST', '/v1/chat/completions', json=ASK|dict(stream=True)
    ) as r:
        lines = r.iter_lines()
        assert '"Hel"' in next(lines)
        seen.set()
        assert '"lo"' in ''.join(lines)

def test_a_connection_is_used_again():
    def say(c):
        c.stream(*HELLO)
        again = c.sock.recv(1<<16)
        while b'"messages"' not in again:
            again += c.sock.recv(1<<16)
        c.stream(text('Again'), chunk(finish='stop'), DONE)
    with behind(say) as (d,u):
        assert spoken(d.post(stream=True))=='Hello'
        assert spoken(d.post(stream=True))=='Again'
        assert len(u.calls)==1 # connections

def test_a_stream_that_is_packed():
    raw = gzip.compress(b''.join(HELLO))
    def say(c):
        c.head(kind='text/event-stream', content_encoding='gzip', content_length=len(raw))
        c.send(raw)
    with behind(say) as (d,u):
        r = d.post(stream=True)
        assert r.content==b''.join(HELLO) and 'content-encoding' not in r.headers
        assert u.calls[0].heads['accept-encoding']=='identity'

def test_keys_and_headers(monkeypatch, caplog):
    caplog.set_level('DEBUG')
    monkeypatch.setenv('SPARK2_KEY', 'sk-theirs')
    def say(c):
        c.whole(
            completion(), set_cookie='a=b', access_control_allow_origin='*',
            x_ratelimit_remaining='5', server='theirs')
    with behind(say, key_env='SPARK2_KEY') as (d,u):
        mine = {'authorization':'Bearer sk-ours', 'x-api-key':'sk-ours'}
        mine |= {'cookie':'c=1', 'te':'trailers'}
        r = d.web.post('/v1/chat/completions', json=ASK, headers=mine)
        heads = u.calls[0].heads
        assert heads['authorization']=='Bearer sk-theirs' and 'sk-ours' not in str(heads)
        assert not {'cookie','te','x-api-key'}&{*heads} and heads['host']==f'127.0.0.1:{u.port}'
        assert not {'set-cookie','access-control-allow-origin'}&{*r.headers}
        assert r.headers['x-ratelimit-remaining']=='5' and r.headers.get('server')!='theirs'
        assert 'sk-theirs' not in caplog.text+repr(d.models.upstreams)

# -- everything that breaks ----------------------------------------------------------------------

def hang(c):
    c.wait()
def head_only(c):
    c.head(kind='text/event-stream')
    c.wait()
def close(c):
    pass
def garbage(c):
    c.send(b'\x00\xff not HTTP at all\r\n\r\n')
def huge_headers(c):
    c.send(
        b'HTTP/1.1 200 OK\r\n',
        b''.join(b'x-%d: %b\r\n'%(i, b'a'*1000) for i in range(1000)),
        b'\r\n')
def html(c):
    c.whole(b'<html>Log in</html>', kind='text/html')
def no_json(c):
    c.whole(b'{"choices": [', kind='application/json')
def bomb(c):
    c.whole(gzip.compress(b' '*(1<<20)), content_encoding='gzip')
def bad_gzip(c):
    c.whole(b'this is no gzip', content_encoding='gzip')
def no_events(c):
    c.stream(b'\x00\x01\x02\n\n', DONE)
def nothing(c):
    c.stream()
def redirect(c):
    c.whole(b'', 307, location='http://127.0.0.1:1/v1/chat/completions')
def drip(c):
    c.stream(cut=True)
    [c.chunk(b'd') for _ in range(3)]
    c.wait()
def status(n, **heads):
    "What answers with a status"
    def say(c):
        c.whole(dict(error=dict(message='No luck', code='unlucky')), n, **heads)
    say.__name__ = f'status{n}'
    return say

# What it does: the status that becomes of it, for whole answers and for streams; the fault that is
# counted for both
BROKEN = {
    hang:(504,504,'timeout'), head_only:(502,504,None),
    close:(502,502,'cut'), garbage:(502,502,'garbage'),
    huge_headers:(502,502,'garbage'), html:(502,502,'garbage'),
    no_json:(502,502,'garbage'), bomb:(502,502,'garbage'),
    bad_gzip:(502,502,'garbage'),
    no_events:(502,502,'garbage'), nothing:(502,502,None),
    redirect:(502,502,'status'), drip:(502,504,None)}

def limits_for(fault, stream):
    "Only what says nothing more is waited for in vain; all else comes, however late"
    silent = (hang,head_only,drip) if stream else (hang,)
    return HASTY if fault in silent else STRICT

def named(f): return f.__name__
both_ways = pytest.mark.parametrize('stream', [False,True], ids=['whole','stream'])

@both_ways
@pytest.mark.parametrize('say', BROKEN, ids=named)
def test_broken(say, stream):
    "One error, with the server's name, and not with its address; and the next question is answered"
    answer = say
    with behind(lambda c: answer(c), limits=limits_for(say, stream)) as (d,u):
        *expected,fault = BROKEN[say]
        r = d.post(stream=stream)
        assert r.status_code==expected[stream], r.text
        assert wrong(r).startswith('spark2 ') and str(u.port) not in r.text
        if fault:
            assert d.metric('upstream_requests_total', upstream='spark2', outcome=fault)==1
        assert d.metric('upstream_up', upstream='spark2')==0
        d.models.upstreams[0].limits = QUICK
        answer = good
        assert d.post(stream=stream).status_code==200 and d.metric(
            'upstream_up', upstream='spark2')==1
        assert d.models.find('gemma').runner.running==0

def test_refused():
    with upstream(good) as u:
        gone = u.url
    with door(Upstream('spark2', gone, ['gemma'], limits=QUICK)) as d:
        r = d.post()
        assert (r.status_code,wrong(r))==(
            503, 'spark2 cannot be reached') and int(r.headers['retry-after'])>=1
        h = d.web.get('/health')
        assert h.status_code==200 and h.json()['models']['spark2/gemma']==dict(
            state='failed', reason='spark2 cannot be reached')

@pytest.mark.parametrize(
    's,expected',
    [
        (400,400), (404,404), (408,408),
        (413,413), (422,422), (429,429),
        (500,502), (501,501), (503,503),
        (529,529), (401,502), (403,502),
        (402,502)])
def test_their_errors(s, expected):
    with behind(status(s, retry_after='7')) as (d,u):
        r = d.post()
        assert r.status_code==expected
        said = wrong(r)
        assert said.startswith('spark2 ') and (s in (401,402,403) or 'No luck' in said)
        if s in (429,503):
            assert r.headers['retry-after']=='7'

@pytest.mark.parametrize('path', ['chat/completions','completions','messages','responses'])
@pytest.mark.parametrize('cut', [True,False], ids=['cut','ended'])
def test_cut_in_the_middle(path, cut):
    "Half an event is not passed on; the stream ends in an error of its API"
    whole = b'data: {"x": 1}\n\n'
    with behind(
        lambda c: c.stream(whole, b'data: {"half', cut=cut),
        apis=[path]
    ) as (d,u):
        r = d.post(f'/v1/{path}', stream=True)
        assert r.status_code==200 and r.content.startswith(whole) and b'half' not in r.content
        e = data(r)[-1]
        assert 'spark2' in json.dumps(e) and (e.get('type')=='error' or e['error'])
        assert r.text.endswith('data: [DONE]\n\n')==('completions' in path)
        assert d.metric('upstream_requests_total', upstream='spark2', outcome='cut')==1

def test_silence_in_the_middle():
    "A stream that stands still ends, too"
    with behind(
        lambda c: (c.stream(text('Hel'), cut=True), c.wait()),
        limits=UpstreamLimits(connect=WAIT, first=WAIT, between=.2)
    ) as (d,u):
        r = d.post(stream=True)
        assert spoken_part(r)=='Hel' and 'did not answer in time' in r.text
        assert d.metric('upstream_requests_total', upstream='spark2', outcome='timeout')==1

def spoken_part(r):
    return ''.join(c['delta'].get('content') or '' for d in data(r) for c in d.get('choices', ()))

def test_an_event_without_end():
    def say(c):
        c.stream(text('Hel'), cut=True)
        for _ in range(64):
            c.chunk(b'a'*1024)
        c.wait()
    with behind(
        say,
        limits=UpstreamLimits(connect=WAIT, first=WAIT, between=WAIT, event=1<<14)
    ) as (d,u):
        r = d.post(stream=True)
        assert 'sent an event of more than 16,384 bytes' in r.text and 'aaaa' not in r.text

def test_a_client_that_leaves_ends_the_question():
    left = []
    def say(c):
        c.stream(text('Hel'), cut=True)
        left.append(c.wait())
    with behind(say) as (d,u):
        with d.web.stream('POST', '/v1/chat/completions', json=ASK|dict(stream=True)) as r:
            next(r.iter_lines())
        until(lambda: left)
        assert left==[True]
        until(
            lambda: d.metric('upstream_requests_total', upstream='spark2', outcome='client_gone')==1
        )
        assert d.models.find('gemma').runner.running==0

@pytest.mark.parametrize('path', ['chat/completions','messages'])
def test_a_client_that_leaves_before_the_answer(path):
    left = []
    def say(c):
        left.append(c.wait()) if 'chat' in c.path else good(c)
    with behind(say) as (d,u):
        with pytest.raises(httpx.ReadTimeout):
            d.web.post(f'/v1/{path}', json=ASK, timeout=httpx.Timeout(WAIT, read=.2))
        until(lambda: left)
        assert left==[True]

# -- chat in the middle --------------------------------------------------------------------------

def messages(d):
    return anthropic.Anthropic(base_url=d.url, api_key='x', max_retries=0, timeout=WAIT)
def client(d):
    return openai.OpenAI(base_url=d.url+'/v1', api_key='x', max_retries=0, timeout=WAIT)

def test_messages_of_a_chat_server():
    with behind(good) as (d,u):
        m = messages(d).messages.create(**ASK)
        assert (
            m.content[0].text, m.stop_reason, m.usage.output_tokens,
            m.usage.cache_read_input_tokens)==('Hello','end_turn',7,3)
        with messages(d).messages.stream(**ASK) as s:
            assert ''.join(s.text_stream)=='Hello'
        assert [c.path for c in u.calls]==[
            '/v1/messages', '/v1/chat/completions', '/v1/chat/completions'], 'it was learnt'
        assert u.calls[1].json['messages']==ASK['messages'] and u.calls[1].json['model']=='gemma'

def test_responses_of_a_chat_server():
    with behind(good) as (d,u):
        c = client(d)
        r = c.responses.create(model='gemma', input='Hi', instructions='Be kind.')
        assert r.output_text=='Hello' and r.usage.output_tokens==7
        kinds = [e.type for e in c.responses.create(model='gemma', input='Hi', stream=True)]
        assert kinds[0]=='response.created' and kinds[-1]=='response.completed'
        more = c.responses.create(model='gemma', input='And?', previous_response_id=r.id)
        assert more.output_text=='Hello'
        assert [m['role'] for m in u.calls[-1].json['messages']]==['user','assistant','user']
        assert c.responses.retrieve(r.id).output_text=='Hello'

def test_a_response_in_the_background():
    with behind(good) as (d,u):
        r = client(d).responses.create(model='gemma', input='Hi', background=True)
        until(lambda: client(d).responses.retrieve(r.id).status=='completed')
        assert client(d).responses.retrieve(r.id).output_text=='Hello'

def test_completions_of_a_chat_server():
    with behind(good) as (d,u):
        r = client(d).completions.create(
            model='gemma', prompt=['Hi','Ho'], n=1, echo=True)
        assert [x.text for x in r.choices]==['HiHello','HoHello'] and r.usage.completion_tokens==14
        assert d.post('/v1/completions', prompt=[1,2]).status_code==501
        said = client(d).completions.create(model='gemma', prompt='Hi', stream=True)
        assert ''.join(x.choices[0].text for x in said)=='Hello'

CONVERSATIONS = dict(
    messages=ASK,
    responses=dict(model='gemma', input='Hi'),
    completions=dict(model='gemma', prompt='Hi'))

@pytest.mark.parametrize('path', CONVERSATIONS)
@pytest.mark.parametrize('given', [dict(temperature=1.0, top_p=1), {}])
def test_a_server_has_defaults_of_its_own(path, given):
    "What a client asks for reaches it, also where we would have done the same unasked"
    with behind(good, apis='chat') as (d,u):
        assert d.post(f'/v1/{path}', **CONVERSATIONS[path], **given).status_code==200
        body = u.calls[-1].json
        assert {k: body[k] for k in ('temperature','top_p') if k in body}==given

TOOL = dict(name='weather', description='', input_schema=dict(type='object', properties={}))

def calls_a_tool(c):
    "Thinks, and calls `TOOL` in two pieces, where it is asked by chat; else it has no such API"
    if 'chat' not in c.path:
        return good(c)
    name = dict(index=0, id='call_1', type='function')
    begin = name|dict(function=dict(name='weather', arguments='{"ci'))
    rest = dict(index=0, function=dict(arguments='ty": "Oslo"}'))
    said = dict(reasoning_content='Hm.'),dict(tool_calls=[begin]),dict(tool_calls=[rest])
    c.stream(*map(chunk, said), chunk(finish='tool_calls'), DONE)

def test_tools_and_thoughts():
    with behind(calls_a_tool) as (d,u):
        m = messages(d).messages.create(
            **ASK|dict(max_tokens=4096), tools=[TOOL], tool_choice=dict(type='any'),
            thinking=dict(type='enabled', budget_tokens=2048))
        assert [b.type for b in m.content]==['thinking','tool_use']
        assert m.content[1].input==dict(city='Oslo') and m.stop_reason=='tool_use'
        body = u.calls[-1].json
        assert body['tool_choice']=='required' and body['tools'][0]['function']['name']=='weather'
        assert body['chat_template_kwargs']['enable_thinking'] is True

def test_results_and_thoughts_go_back():
    with behind(calls_a_tool) as (d,u):
        m = messages(d).messages.create(**ASK, tools=[TOOL])
        result = dict(type='tool_result', tool_use_id=m.content[1].id, content='Rain')
        back = [
            *ASK['messages'],
            dict(role='assistant', content=[b.model_dump() for b in m.content]),
            dict(role='user', content=[result])]
        messages(d).messages.create(**ASK|dict(messages=back), tools=[TOOL])
        _,said,heard = u.calls[-1].json['messages']
        assert said['reasoning_content']=='Hm.' and heard['role']=='tool'
        assert said['tool_calls'][0]['function']['arguments']=='{"city":"Oslo"}'

def test_a_server_that_refuses_what_only_some_know():
    def say(c):
        if 'top_k' in c.json and 'chat' in c.path:
            return c.whole(dict(error=dict(message='Unrecognized request argument: top_k')), 400)
        good(c)
    with behind(say) as (d,u):
        for _ in range(2):
            assert d.post('/v1/messages', top_k=5).json()['content'][0]['text']=='Hello'
        assert ['top_k' in c.json for c in u.asked()]==[True,False,False]

@both_ways
@pytest.mark.parametrize(
    'say',
    [*BROKEN,*map(status, (400,429,500))],
    ids=named)
def test_broken_in_translation(say, stream):
    """The same faults, told in the shape of another API: as a status before anything was said, or
    as an event. The other server is asked for a stream, whatever the client asked for"""
    with behind(
        lambda c: say(c) if 'chat' in c.path else good(c),
        limits=limits_for(say, stream=True)
    ) as (d,u):
        r = d.post('/v1/messages', stream=stream)
        if r.status_code==200:
            last = data(r)[-1]
            assert stream and last['type']=='error' and 'spark2' in last['error']['message']
        else:
            assert r.status_code>=400 and 'spark2' in wrong(r, 'messages')
        assert d.models.find('gemma').runner.running==0

@pytest.mark.parametrize('bad', [
    b'data: {"choices": [7]}\n\n', b'data: {"choices": {"a": 1}}\n\n',
    b'data: {"choices": [{"delta": [1]}]}\n\n',
    b'data: {"choices": [{"delta": {"tool_calls": "no"}}]}\n\n',
    b'data: {"error": {"message": "No luck"}}\n\n', b': hm\n\n'])
def test_chunks_that_make_no_sense(bad):
    with behind(
        lambda c: c.stream(text('Hel'), bad) if 'chat' in c.path else good(c)
    ) as (d,u):
        r = d.post('/v1/messages', stream=True)
        assert data(r)[-1]['type']=='error' and 'spark2' in data(r)[-1]['error']['message']
        assert d.post('/v1/messages').status_code==502

# -- a second Atlas ------------------------------------------------------------------------------

def say(prompt): return '<think>Hm.</think>Hello there.'

@pytest.fixture
def pair():
    "Our server, and a second Atlas behind it, with a script for its model, as `(door, speaker)`"
    with service(say) as s, door(
        Upstream('second', s.url, limits=QUICK, refresh=WAIT)
    ) as d:
        yield d,s

ASKS = {
    'chat/completions':{}, 'completions':dict(prompt='Hi'), 'messages':{},
    'responses':dict(input='Hi')}
def body(path, **kw):
    return {
        k:v for k,v in (ASK|ASKS[path]|kw).items()
        if path!='responses' or k not in ('messages','max_tokens')}

@both_ways
@pytest.mark.parametrize('path', ASKS)
def test_a_second_atlas(pair, path, stream):
    "Every API of it, through our door, as it says it itself; its models are found"
    d,s = pair
    ask = body(path, model='scripted', stream=stream)
    through,direct = d.web.post(f'/v1/{path}', json=ask),httpx.post(
        f'{s.url}/v1/{path}', json=ask, timeout=WAIT)
    assert through.status_code==direct.status_code==200, through.text
    assert forget(through.text)==forget(direct.text)

def test_names_of_a_second_atlas(pair):
    d,s = pair
    assert d.post(model='second/scripted').status_code==200
    assert [m['id'] for m in d.web.get('/v1/models').json()['data']]==['scripted']
    assert d.post(model='nobody').status_code==404
    assert d.web.post('/tokenize', json=dict(model='scripted', prompt='Hi')).status_code==501

def test_clients_through_the_door(pair):
    d,s = pair
    c,ask = client(d),dict(model='scripted', messages=ASK['messages'])
    m = c.chat.completions.create(**ask).choices[0].message
    assert (m.content,m.reasoning)==('Hello there.','Hm.')
    assert ''.join(
        x.choices[0].delta.content or '' for x in c.chat.completions.create(**ask, stream=True)
    )=='Hello there.'
    with pytest.raises(openai.BadRequestError, match='second says: temperature'):
        c.chat.completions.create(**ask, temperature=-1)

def test_a_circle_ends():
    "Two servers that point at each other"
    with ExitStack() as stack:
        fake = stack.enter_context(upstream(good))
        a,b = (Upstream(n, fake.url, ['gemma'], limits=QUICK) for n in 'ab')
        da,db = stack.enter_context(door(a)),stack.enter_context(door(b))
        a.url,b.url = db.url+'/v1',da.url+'/v1'
        for path in 'chat/completions','messages':
            r = da.post(f'/v1/{path}')
            assert r.status_code==508 and 'come back' in r.text

TINY = PRESETS['llama-3.1-8b']|dict(
    hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, intermediate_size=96,
    vocab_size=256, max_position_embeddings=512, bos_token_id=1, eos_token_id=255)

@both_ways
@pytest.mark.parametrize('path', ['chat/completions','completions','messages'])
def test_a_real_model_behind_two_doors(path, stream, tiny):
    "Its words are the same through one server and through two, and each is counted"
    with running(create_app(tiny)) as url, door(
        Upstream('second', url+'/v1', ['tiny'], limits=QUICK)
    ) as d:
        ask = body(
            path, model='tiny', stream=stream, temperature=0, max_tokens=9,
            **(dict(stream_options=dict(include_usage=True)) if stream and path!='messages' else {})
        )
        through,direct = d.web.post(f'/v1/{path}', json=ask),httpx.post(
            f'{url}/v1/{path}', json=ask, timeout=WAIT)
        assert through.status_code==200
        if stream:
            assert words(through)==words(direct)!='', 'however many tokens came with each event'
        else:
            assert forget(through.text)==forget(direct.text)
        assert d.metric('upstream_tokens_total', upstream='second', kind='completion')==9

def words(r):
    "All the text of a stream, of any of three APIs"
    said = [d.get('delta') or (d.get('choices') or [{}])[0] for d in data(r)]
    return ''.join(x.get('text') or (x.get('delta') or {}).get('content') or '' for x in said)

@pytest.fixture
def tiny():
    "A model with random weights, in a worker's thread"
    PRESETS['toy-behind'] = TINY
    try:
        llm = LLM(
            'toy-behind', 'cpu', load_format='dummy', max_seq_len=400, max_num_seqs=4, show=False)
    finally:
        del PRESETS['toy-behind']
    return loaded(llm, ['tiny'], ChatTemplate(TEMPLATE))

@contextmanager
def fake_atlas():
    "A server with a fake worker, in a process of its own: the process, and its address"
    own = dict(models=[dict(model='fake')], policy=vars(PATIENT), drain=WAIT)
    command = [sys.executable, str(Path(__file__).parent/'helpers'/'fake_gateway.py')]
    p = subprocess.Popen(
        [*command, json.dumps(own)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        text=True, start_new_session=True)
    try:
        yield p,re.search(r'http://127.0.0.1:\d+', p.stdout.readline())[0]
    finally:
        p.kill()
        p.wait()
        p.stdout.close()

def test_a_second_atlas_that_is_killed():
    "In the middle of an answer: the stream ends in an error. After it: another stands in"
    fallbacks = Fallbacks(dict(fake=['small']), timeout=WAIT)
    with fake_atlas() as (p,at):
        b = Upstream('second', at, ['fake'], limits=QUICK)
        with door(b, local=[speaker('small', say)], fallbacks=fallbacks) as d:
            ask = dict(model='fake', messages=[dict(role='user', content='<endless>')])
            ask |= dict(stream=True, max_tokens=10**5)
            with d.web.stream('POST', '/v1/chat/completions', json=ask) as r:
                lines = r.iter_lines()
                for _ in range(8):
                    next(lines)
                p.kill()
                rest = [*lines]
            assert 'second hung up' in rest[-4] and rest[-2]=='data: [DONE]', rest[-6:]
            p.wait()
            r = d.post(model='fake')
            assert spoken(r)=='Hello there.' and r.headers['x-atlas-model']=='small'

def test_ollamas_door():
    "Its API, too, is told by its own writers"
    ask = dict(model='gemma', messages=ASK['messages'])
    with upstream(good) as u:
        with door(Upstream('spark2', u.url, ['gemma'], limits=QUICK), doors=DOORS) as d:
            def post(**kw): return d.web.post('/api/chat', json=ask|kw)
            r = post(stream=False).json()
            assert (r['message']['content'], r['done_reason'])==('Hello','stop')
            assert r['eval_count']==7
            lines = [json.loads(l) for l in post().text.splitlines()]
            assert ''.join(l['message']['content'] for l in lines)=='Hello' and lines[-1]['done']
            assert [c.path for c in u.calls]==['/v1/chat/completions']*2

# -- sounds and vectors --------------------------------------------------------------------------

AUDIO = b'HTTP/1.1 200 OK\r\ncontent-type: audio/mpeg\r\ntransfer-encoding: chunked\r\n\r\n'

def speech(c):
    "Hears and speaks"
    if c.path=='/v1/audio/speech':
        c.send(AUDIO)
        c.chunk(b'\xff\xfb'*9)
        c.chunk(b'\0\n\n')
        c.send(b'0\r\n\r\n')
    elif b'srt' in c.body:
        c.whole(b'1\n00:00', kind='text/plain')
    else:
        c.whole(dict(text='Hello'))

HEAR = '/v1/audio/transcriptions'
WAV = dict(file=('a.wav', b'RIFF\r\n--x', 'audio/wav'))

@pytest.fixture
def sounding():
    "Our server and one behind it that hears and speaks, under another name than ours"
    with upstream(speech) as u:
        serves = ['audio/transcriptions','audio/speech']
        other = Upstream('speech', u.url, ['whisper-1'], serves=serves, limits=QUICK)
        with door(other) as d:
            d.models.find('whisper-1').id = 'theirs'
            yield d,u

def test_what_is_heard(sounding):
    "A form with only its model changed"
    d,u = sounding
    r = d.web.post(HEAR, data=dict(model='whisper-1', language='en'), files=WAV)
    assert r.json()==dict(text='Hello')
    sent = u.calls[0].body
    assert b'\r\n\r\ntheirs\r\n' in sent and b'whisper-1' not in sent and b'RIFF\r\n--x' in sent
    r = d.web.post(HEAR, data=dict(response_format='srt'), files=WAV)
    assert r.text=='1\n00:00' and r.headers['content-type'].startswith('text/plain')

def test_what_is_spoken(sounding):
    d,u = sounding
    r = d.web.post('/v1/audio/speech', json=dict(model='tts', input='Hi'))
    assert (r.content,r.headers['content-type'])==(b'\xff\xfb'*9+b'\0\n\n','audio/mpeg')
    assert u.calls[-1].json==dict(model='theirs', input='Hi')

def test_sounds_that_are_refused(sounding):
    d,_ = sounding
    assert d.web.post('/v1/audio/translations', files=WAV).status_code==501
    stranger = dict(origin='http://evil.example')
    assert d.web.post(HEAR, files=WAV, headers=stranger).status_code==403
    form = {'content-type':'multipart/form-data; boundary=y'}
    assert d.web.post(HEAR, content=b'x', headers=form).status_code==400
    assert d.post(model='whisper-1').status_code==501

def test_no_sounds_without_servers():
    with service(say) as s:
        r = httpx.post(f'{s.url}/v1/audio/speech', json={}, timeout=WAIT)
        said = r.json()['error']['message']
        assert r.status_code==501
        assert said=='POST /v1/audio/speech is not offered by this server'
        assert r.headers['x-should-retry']=='false'

def test_a_sound_that_breaks_off():
    with upstream(lambda c: (c.send(AUDIO), c.chunk(b'\xff'))) as u, door(
        Upstream('voice', u.url, serves='audio/speech', limits=QUICK)
    ) as d:
        with pytest.raises(httpx.RemoteProtocolError):
            d.web.post('/v1/audio/speech', json=dict(input='Hi'))
        assert d.metric('upstream_requests_total', upstream='voice', outcome='cut')==1

def test_vectors():
    said = dict(
        object='list',
        data=[dict(object='embedding', index=0, embedding=[1.,0.])],
        usage=dict(prompt_tokens=2, total_tokens=2))
    with behind(lambda c: c.whole(said)) as (d,u):
        r = d.web.post('/v1/embeddings', json=dict(model='gemma', input='Hi'))
        assert r.json()==said and u.calls[0].path=='/v1/embeddings'
        assert d.metric('upstream_tokens_total', upstream='spark2', kind='prompt')==2

# -- what other servers keep, and count ----------------------------------------------------------

KEPT = dict(
    id='resp_1', object='response', status='completed', output=[],
    usage=dict(input_tokens=2, output_tokens=1))
def sse(kind, **d): return f'event: {kind}\ndata: {json.dumps(dict(type=kind, **d))}\n\n'.encode()

def keeper(c):
    "What answers as OpenAI's responses do, and keeps what it has made"
    path = c.path.partition('?')[0]
    if c.method=='POST' and path=='/v1/responses':
        if c.json.get('stream'):
            return c.stream(
                sse('response.created', response=KEPT), sse('response.completed', response=KEPT))
        return c.whole(KEPT)
    if path.startswith('/v1/responses/resp_1'):
        return c.whole(dict(id='resp_1', asked=f'{c.method} {c.path}'))
    if path=='/v1/messages/count_tokens' and c.json['model']=='gemma':
        return c.whole(dict(input_tokens=17))
    if path=='/v1/responses/input_tokens':
        return c.whole(dict(object='response.input_tokens', input_tokens=18))
    c.whole(dict(detail='Not Found'), 404)

@both_ways
def test_a_response_that_stays_there(stream):
    with behind(keeper) as (d,u):
        assert d.web.get('/v1/responses/resp_1').status_code==404, 'nobody has made it yet'
        assert d.post('/v1/responses', input='Hi', messages=None, stream=stream).status_code==200
        asked = [
            ('GET', '', '?include=a'), ('GET', '/input_items', ''),
            ('POST', '/cancel', ''), ('DELETE', '', '')]
        for how,more,query in asked:
            r = d.web.request(how, f'/v1/responses/resp_1{more}{query}')
            assert r.json()['asked']==f'{how} /v1/responses/resp_1{more}{query}', r.text
            assert r.headers['x-atlas-model']=='spark2/gemma'
        n = len(u.calls)
        assert d.web.get('/v1/responses/resp_1').status_code==404, 'it was deleted'
        assert len(u.calls)==n

def test_a_response_that_nobody_keeps():
    with behind(keeper) as (d,u):
        d.post('/v1/responses', input='Hi', messages=None, store=False)
        assert d.web.get('/v1/responses/resp_1').status_code==404

def test_events_of_a_response_that_stays_there():
    with behind(keeper) as (d,u):
        d.post('/v1/responses', input='Hi', messages=None)
        r = d.web.get('/v1/responses/resp_1?stream=true')
        said = r.json()['error']['message']
        assert r.status_code==501 and 'spark2/gemma has this response' in said

def test_a_response_of_somebody_else():
    keys = ApiKeys({'sk-ann':'user ann', 'sk-bob':'user bob'})
    def ask(d, key, how, path, **kw):
        return d.web.request(how, path, headers={'authorization':f'Bearer sk-{key}'}, **kw)
    with upstream(keeper) as u, door(
        Upstream('spark2', u.url, models=['gemma'], limits=QUICK),
        rules=Rules(keys=keys)
    ) as d:
        assert ask(
            d, 'ann', 'POST', '/v1/responses', json=dict(model='gemma', input='Hi')
        ).status_code==200
        assert ask(d, 'bob', 'GET', '/v1/responses/resp_1').status_code==404
        assert ask(d, 'ann', 'GET', '/v1/responses/resp_1').status_code==200

def test_a_response_of_a_chat_server_is_ours():
    with behind(good) as (d,u):
        made = d.post('/v1/responses', input='Hi', messages=None).json()
        n = len(u.calls)
        assert d.web.get(f'/v1/responses/{made["id"]}').json()['output']==made['output']
        assert d.web.delete(
            f'/v1/responses/{made["id"]}').json()['deleted'] is True and len(u.calls)==n

def test_tokens_that_they_count():
    with behind(keeper) as (d,u):
        r = d.post('/v1/messages/count_tokens')
        assert r.json()==dict(input_tokens=17) and r.headers['x-atlas-model']=='spark2/gemma'
        r = d.post('/v1/responses/input_tokens', input='Hi', messages=None)
        assert r.json()['input_tokens']==18

def test_tokens_that_nobody_counts():
    "Asked once; what it lacks is said by name, and remembered"
    with behind(good) as (d,u):
        for _ in range(2):
            r = d.post('/v1/messages/count_tokens')
            said = r.json()['error']['message']
            assert r.status_code==501 and 'spark2/gemma has no messages/count_tokens' in said
        assert len(u.calls)==1

# -- what it has ---------------------------------------------------------------------------------

def test_models_come_and_go():
    there = ['gemma-4-26b','qwen3','gemma-3']
    def say(c):
        if c.path!='/v1/models':
            return good(c)
        c.whole(dict(data=[dict(id=n, max_model_len=4096) for n in there]))
    with upstream(say) as u:
        b = Upstream('spark2', u.url, ['gemma*'], limits=QUICK, refresh=WAIT)
        with door(b) as d:
            until(lambda: listed(d)==['gemma-3','gemma-4-26b'])
            assert d.web.get('/v1/models/spark2/gemma-3').json()['max_model_len']==4096
            b, = d.models.upstreams
            there[:] = ['gemma-5']
            b.looked = 0.
            assert d.post(model='gemma-5').status_code==200, 'a name nobody knows is looked for'
            assert listed(d)==['gemma-5']
            b.looked = b.looked+WAIT
            there[:] = ['gemma-6']
            assert d.post(model='gemma-6').status_code==404, 'but not at every request'

def listed(d):
    "Names of the models that a server offers"
    return [m['id'] for m in d.web.get('/v1/models').json()['data']]

@pytest.mark.parametrize(
    'said', [b'{', b'[]', b'{"data": {}}', b'{"data": [1, {"id": 5}, {"id": ""}]}'])
def test_a_list_that_is_none(said):
    with upstream(lambda c: c.whole(said)) as u, door(
        Upstream('spark2', u.url, limits=QUICK, refresh=WAIT)
    ) as d:
        until(lambda: d.models.upstreams[0].looked>0)
        assert d.post().status_code==404 and d.web.get('/v1/models').json()['data']==[]

def test_a_name_of_ours_stays_ours():
    with behind(good, local=[speaker('gemma', say)]) as (d,u):
        r = d.post()
        assert spoken(r)=='Hello there.' and 'x-atlas-model' not in r.headers
        assert d.post(model='spark2/gemma').json()==completion()

@pytest.mark.parametrize('kw,said', [
    (dict(url='spark2'),'url of x'), (dict(url='http://u:p@h/v1'),'password'),
    (dict(key_env='NOBODY_SET_THIS'),'NOBODY_SET_THIS'),
    (dict(serves=['audio/sing']),'audio/sing'),
    (dict(name='a/b'),'no name'),
    (dict(apis=['chatt']),'chatt')])
def test_bad_descriptions(kw, said):
    with pytest.raises(ConfigError, match=said) as e:
        Upstream(**dict(name='x', url='http://h/v1')|kw)
    assert e.value.hint and e.value.param

def test_a_key_is_told_nobody(monkeypatch):
    monkeypatch.setenv('SPARK2_KEY', 'sk very secret')
    with pytest.raises(ConfigError, match='is no key') as e:
        Upstream('x', 'http://h/v1', key_env='SPARK2_KEY')
    assert 'secret' not in str(e.value)

def test_ourselves():
    b = Upstream('x', 'http://localhost:8888/v1')
    assert b.points_at(
        '127.0.0.1', 8888) and b.points_at('0.0.0.0', 8888) and not b.points_at('127.0.0.1', 8889)

# -- fallbacks -----------------------------------------------------------------------------------

def stand_in(*to, **kw):
    return Fallbacks(
        dict(gemma=[*to]),
        **dict(timeout=WAIT, pause=.001, longest=.01)|kw)

@both_ways
@pytest.mark.parametrize(
    'fault',
    [*BROKEN, *map(status, (408,429,500,503,401))],
    ids=named)
def test_a_model_of_ours_stands_in(fault, stream):
    with behind(
        fault, limits=limits_for(fault, stream), local=[speaker('small', say)],
        fallbacks=stand_in('small')
    ) as (d,u):
        r = d.post(stream=stream)
        assert r.status_code==200 and spoken(r)=='Hello there.'
        assert r.headers['x-atlas-model']=='small' and r.headers['x-atlas-route'].startswith(
            'fallback: small for spark2/gemma (')
        why = 'was left alone after it failed'
        route = d.post(stream=stream).headers['x-atlas-route']
        assert route==f'fallback: small for spark2/gemma ({why})'
        assert len(u.asked())<=1, 'it is left alone' # None where it was given up before it was read
        assert d.metric('fallbacks_total', model_name='spark2/gemma', answered_by='small')==2

@pytest.mark.parametrize('s', [400,404,413,422,501])
def test_a_mistake_stays_one(s):
    with behind(
        status(s), local=[speaker('small', say)],
        fallbacks=stand_in('small')
    ) as (d,u):
        assert d.post().status_code==s and len(u.asked())==1
        assert d.post(temperature=-1, model='small').status_code==400

def test_nobody_stands_in_after_the_first_byte():
    "And a stream that is cut ends in an error, once"
    with behind(
        lambda c: c.stream(text('Hel'), cut=True),
        local=[speaker('small', say)], fallbacks=stand_in('small')
    ) as (d,u):
        r = d.post(stream=True)
        assert spoken_part(r)=='Hel' and 'error' in data(r)[-1] and r.text.count('"error"')==1
        assert r.headers['x-atlas-model']=='spark2/gemma'

def test_retries():
    "Again after a pause, until it answers or there were enough"
    answers = [status(503, retry_after='0'),status(500),good]
    with behind(
        lambda c: answers.pop(0)(c),
        fallbacks=stand_in(retries=2)
    ) as (d,u):
        assert d.post().json()==completion() and len(u.asked())==3
    with behind(status(500), fallbacks=stand_in(retries=2)) as (d,u):
        assert d.post().status_code==502 and len(u.asked())==3

def test_one_who_wants_to_be_left_alone():
    "Nobody waits for longer than anybody would"
    with behind(
        status(429, retry_after='999'), fallbacks=stand_in(retries=5)
    ) as (d,u):
        r = d.post()
        assert (
            r.status_code, r.headers['retry-after'])==(429,'999') and len(u.asked())==1

def test_cool_down():
    now,answers = [100.],[status(500),good]
    f = stand_in('small', cooldown=60., clock=lambda: now[0])
    with behind(
        lambda c: answers.pop(0)(c),
        local=[speaker('small', say)], fallbacks=f
    ) as (d,u):
        assert [d.post().headers['x-atlas-model'] for _ in range(2)]==['small','small']
        now[0] += 61
        assert d.post().headers['x-atlas-model']=='spark2/gemma' and not answers

class Down(Served):
    "A model of ours that cannot be asked"
    def __init__(self, name, e):
        super().__init__([name], None)
        self.e,self.runner = e,Speaker(say)
    async def up(self, autoload=True):
        raise self.e

@both_ways
def test_another_server_stands_in_for_ours(stream):
    with behind(
        good, local=[Down('mine', QueueFullError('full'))],
        fallbacks=Fallbacks(dict(mine=['gemma']), timeout=WAIT)
    ) as (d,u):
        r = d.post(model='mine', stream=stream)
        assert r.status_code==200 and r.headers['x-atlas-model']=='gemma'
        assert '(queue_full)' in r.headers['x-atlas-route']
        assert messages(d).messages.create(**ASK|dict(model='mine')).content[0].text=='Hello'

class Stuck(Speaker):
    "A runner that takes a question, and does not begin to answer it"
    def submit(self, r):
        async def never(line):
            await asyncio.Event().wait()
        line = super().submit(r)
        line.__class__ = type('Never', (type(line),), dict(__anext__=never))
        return line

@both_ways
def test_one_that_does_not_begin(stream):
    "A model of ours that is stuck is given up in time, and its answer stopped"
    s = Stuck(say)
    with door(
        local=[Served(['gemma'], upstream_of('gemma', s)),speaker('small', say)],
        fallbacks=stand_in('small', timeout=.2)
    ) as d:
        r = d.post(stream=stream)
        assert r.headers['x-atlas-model']=='small' and '(stalled)' in r.headers['x-atlas-route']
    assert s.aborted==1

class Loading(Served):
    "A model that is being loaded, and never done"
    def __init__(self):
        super().__init__(['gemma'], None)
        self.asked,self.runner = 0,Speaker(say)
    async def up(self, autoload=True):
        self.asked += 1
        await asyncio.Event().wait()

@both_ways
def test_one_that_loads_too_long(stream):
    "Nobody waits for it longer than for one that is stuck"
    slow = Loading()
    with door(
        local=[slow,speaker('small', say)],
        fallbacks=stand_in('small', timeout=.2)
    ) as d:
        r = d.post(stream=stream)
        assert r.status_code==200 and r.headers['x-atlas-model']=='small'
        assert '(stalled)' in r.headers['x-atlas-route']
    assert slow.asked==1

@pytest.mark.parametrize('path', ['chat/completions','messages','responses'])
def test_streams_that_were_held_lose_nothing(path):
    "A model of ours with one who stands in says what it says without"
    with service(say) as s, door(
        local=[speaker('gemma', say),speaker('small', say)],
        fallbacks=stand_in('small')
    ) as d:
        a = d.web.post(f'/v1/{path}', json=body(path, stream=True))
        b = httpx.post(
            f'{s.url}/v1/{path}', json=body(path, stream=True, model='scripted'), timeout=WAIT)
        assert forget(a.text)==forget(b.text).replace('scripted', 'gemma')
        assert a.headers['x-atlas-model']=='gemma' and 'x-atlas-route' not in a.headers

@pytest.mark.parametrize(
    'kw',
    [
        dict(to=dict(a=['a'])),
        dict(to={}, retries=-1),
        dict(to={}, timeout=0),
        dict(to={}, cooldown='60s')])
def test_bad_fallbacks(kw):
    with pytest.raises(ConfigError):
        Fallbacks(**kw)

def test_a_server_that_is_ourselves():
    from atlas.service.gateway import Listening,_behind
    from atlas.service.server import listen
    with listen('127.0.0.1', 0) as sock:
        port = sock.getsockname()[1]
        ms = Models([], upstreams=[Upstream('me', f'http://localhost:{port}', ['gemma'])])
        with pytest.raises(ConfigError, match='me is this very server'):
            _behind(sock, create_app(ms), ms, Listening(), {})
