"""llama.cpp's own server behind our door: a real one, from a wheel, with a tiny model made
on the spot. What it says comes through as it says it, is counted, and is translated where
we are told to."""
import json,re,subprocess,sys
from contextlib import contextmanager
from pathlib import Path
import anthropic,httpx,openai,pytest
from atlas.service.fallbacks import Fallbacks
from atlas.service.models import Models
from atlas.service.server import create_app
from atlas.service.upstream import Upstream,UpstreamLimits
from helpers.scripted import running
from helpers.waiting import WAIT,until

pytest.importorskip('xllamacpp', reason='llama.cpp has no wheel for this machine')
HELPER = Path(__file__).parent/'helpers/llamacpp_server.py'
ALPHABET = ''.join(map(chr, range(ord('a'), ord('z')+1)))
QUICK = UpstreamLimits(connect=WAIT, first=WAIT, between=WAIT, whole=WAIT)
HELLO = dict(
    model='alphabet', temperature=0,
    messages=[dict(role='user', content='Hi')])

class LlamaCpp:
    "A server in a process of its own"
    def __init__(self, folder):
        self.process = subprocess.Popen([sys.executable, HELPER, folder],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith('http://127.0.0.1:'), 'it did not start'
    def end(self):
        self.process.kill()
        self.process.wait(WAIT)
        for f in self.process.stdin,self.process.stdout:
            f.close()

@pytest.fixture(scope='module')
def llama(tmp_path_factory):
    s = LlamaCpp(tmp_path_factory.mktemp('llama'))
    yield s
    s.end()

@contextmanager
def door(*urls, fallbacks=None, **kw):
    "Our server, in front of these, as `(client, models)`"
    servers = [Upstream(f'llama{i or ""}', u, limits=QUICK, **kw) for i,u in enumerate(urls)]
    ms = Models([], upstreams=servers)
    ms.fallbacks = fallbacks
    with running(create_app(ms)) as url, httpx.Client(base_url=url, timeout=WAIT) as web:
        yield web,ms

@pytest.fixture(scope='module')
def through(llama):
    with door(llama.url) as (web,_):
        yield web

def events(r):
    return [json.loads(l[6:]) for l in r.text.splitlines() if l.startswith('data: {')]

def counted(web, kind):
    "Tokens that our server has counted for the one behind it"
    found = re.search(rf'^atlas:upstream_tokens_total{{kind="{kind}",upstream="llama"}} (\S+)$',
        web.get('/metrics').text, re.M)
    return float(found[1]) if found else 0

def test_its_models(through):
    "They are listed as soon as the server has been asked"
    def names():
        return [m['id'] for m in through.get('/v1/models').json()['data']]
    assert until(names, 'the list of models')==['alphabet']

def test_chat(through):
    before = counted(through, 'prompt'),counted(through, 'completion')
    r = through.post('/v1/chat/completions', json=HELLO)
    d = r.json()
    choice = d['choices'][0]
    assert (choice['message']['content'], choice['finish_reason'])==(ALPHABET, 'stop')
    assert r.headers['x-atlas-model']=='llama/alphabet' and d['timings'], 'as it said it'
    prompt = d['usage']['prompt_tokens']
    assert prompt>len('user: Hi\nassistant:') and d['usage']['completion_tokens']==27
    after = counted(through, 'prompt'),counted(through, 'completion')
    assert (
        after[0]-before[0], after[1]-before[1])==(prompt, 27)

def test_chat_streamed(through):
    before = counted(through, 'completion')
    body = HELLO|dict(stream=True, stream_options=dict(include_usage=True))
    r = through.post('/v1/chat/completions', json=body)
    ds = events(r)
    said = [c['delta'].get('content') or '' for d in ds for c in d['choices']]
    assert ''.join(said)==ALPHABET and len([s for s in said if s])==26
    assert r.text.endswith('data: [DONE]\n\n')
    assert counted(through, 'completion')-before==27

def test_byte_for_byte(llama, through):
    "But for ids and times, its stream is what its own client gets"
    body = HELLO|dict(stream=True, max_tokens=3)
    def plain(web):
        text = web.post('/v1/chat/completions', json=body).text
        return re.sub(r'"(id|created)":("[^"]*"|\d+)|"timings":\{[^}]*\}', '', text)
    with httpx.Client(base_url=llama.url, timeout=WAIT) as direct:
        theirs = plain(direct)
    assert 'chat.completion.chunk' in theirs and plain(through)==theirs

APIS = dict(completions=dict(prompt='w', temperature=0), messages=HELLO|dict(max_tokens=4),
    responses=dict(input='Hi', temperature=0, max_output_tokens=4))

def spoken(path, d):
    "What a whole answer of an API says"
    if path=='completions':
        return d['choices'][0]['text']
    content = d['content'] if path=='messages' else d['output'][0]['content']
    return content[0]['text']

@pytest.mark.parametrize('path', APIS)
@pytest.mark.parametrize('apis', [None,'chat'], ids=['passed','translated'])
def test_every_api(llama, path, apis):
    "In its own API; and asked for chat, as a server that has nothing else would be"
    with door(llama.url, apis=apis) as (web,ms):
        body = APIS[path]|dict(model='alphabet')
        expected = 'abcd' if path!='completions' else 'xyz' if apis is None else ALPHABET
        r = web.post('/v1/'+path, json=body)
        assert spoken(path, r.json())==expected, r.text
        streamed = web.post('/v1/'+path, json=body|dict(stream=True))
        deltas = re.findall(r'"(?:delta|text)": ?"([a-z]+)"', streamed.text)
        assert ''.join(deltas).startswith(expected), streamed.text
        assert '"error":{' not in streamed.text
        asked, = ms.upstreams
        assert dict(asked.counts.asked)=={'ok':2} and asked.counts.usage['completion']>0

def test_openais_client(through):
    with openai.OpenAI(base_url=f'{through.base_url}/v1', api_key='none') as c:
        parts = c.chat.completions.create(**HELLO, stream=True)
        assert ''.join(p.choices[0].delta.content or '' for p in parts if p.choices)==ALPHABET
        vectors = c.embeddings.create(model='alphabet', input=['ab','ba','x']).data
        ab,ba,x = (v.embedding for v in vectors)
        assert len(ab)==256
        assert ab==pytest.approx(ba, abs=1e-6) and ab!=pytest.approx(x, abs=.01)

def test_anthropics_client(through):
    asked = dict(model='alphabet', messages=HELLO['messages'])
    with anthropic.Anthropic(base_url=str(through.base_url), api_key='none') as c:
        with c.messages.stream(**asked, max_tokens=40, extra_body=dict(temperature=0)) as s:
            assert ''.join(s.text_stream)==ALPHABET
        n = c.messages.count_tokens(**asked).input_tokens
        u = c.messages.create(**asked, max_tokens=1).usage
        assert n==u.input_tokens+u.cache_read_input_tokens

def test_counts_that_it_does_not_have(llama):
    "A server of chat alone counts nothing, and is not asked for it"
    with door(llama.url, apis='chat') as (web,ms):
        r = web.post('/v1/messages/count_tokens', json=HELLO)
        e = r.json()['error']
        assert (r.status_code, e['details']['error_code'])==(501,'not_supported')
        assert 'llama/alphabet has no messages/count_tokens' in e['message']
        assert not ms.upstreams[0].counts.asked

WRONG = dict(
    messages=(dict(messages='Hi'), 400, "Expected 'messages' to be an array"),
    context=(
        dict(messages=[dict(role='user', content='x'*600)]),
        400, 'exceeds the available context size'))

@pytest.mark.parametrize('stream', [False,True], ids=['whole','stream'])
@pytest.mark.parametrize('wrong', WRONG)
def test_its_errors(through, wrong, stream):
    "With its name, in our shape"
    fields,status,said = WRONG[wrong]
    r = through.post('/v1/chat/completions', json=HELLO|fields|dict(stream=stream))
    e = r.json()['error']
    assert r.status_code==status and e['message'].startswith(
        'llama says: ') and said in e['message']

def test_one_that_is_killed(llama, tmp_path):
    "Who asks it then reads that it is gone, and where another stands in, nothing of that"
    first = LlamaCpp(tmp_path)
    with door(first.url, llama.url) as (web,ms):
        def ask(): return web.post('/v1/chat/completions', json=HELLO|dict(model='llama/alphabet'))
        assert ask().status_code==200
        first.end()
        gone = ask()
        assert (gone.status_code, gone.json()['error']['message'])==(503, 'llama cannot be reached')
        ms.fallbacks = Fallbacks({'llama/alphabet':['llama1/alphabet']})
        r = ask()
        assert r.json()['choices'][0]['message']['content']==ALPHABET
        assert r.headers['x-atlas-model']=='llama1/alphabet'
