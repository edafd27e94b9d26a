"""One file for a whole machine: what is refused, where names lead, and how a server takes a
changed file.

Files are texts; servers are in this process with a scripted runner, or real ones with scripted
workers or the tiny model."""
import asyncio,json,os,re,signal,subprocess,sys,pytest
from contextlib import asynccontextmanager,contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
import httpx
from hypothesis import given,settings,strategies as st
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.testclient import TestClient
from atlas.card.pressure import Look
from atlas.card.sensors import SensorReading
from atlas.ground.core import SourceError
from atlas.ground.requests import Request,SamplingParams
from atlas.service.fleet import FleetError,fleet_of,read_fleet,schema
from atlas.service.explain import assumed_memory,explain
from atlas.service.process import Model,Served
from atlas.service.models import Models
from atlas.service.names import Names,has_word
from atlas.service.protocol.base import Ask
from atlas.service.protocol.chunks import TextAsk
from atlas.service.reload import FleetFile,changes
from atlas.service.server import create_app
from atlas.service.service import ReadyModel
from atlas.text.chat import ChatTemplate
from atlas.text.tokenizer import byte_tokenizer

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from helpers.patience import PATIENT  # noqa: E402
from helpers.waiting import WAIT,happens,until  # noqa: E402
from scripted import Speaker,TEMPLATE  # noqa: E402

here = Path(__file__).parent
tok = byte_tokenizer()
WORKER = (sys.executable, here/'helpers'/'fake_worker.py')

WHOLE = '''
memory: 110GiB                 # for all models
defaults: {ttl: 30m, max_num_seqs: 16, enable_prefix_caching: true}
models:
  qwen:  {model: qwen3.6-35b-a3b-nvfp4, max_seq_len: 262144, speculative: true, pin: true}
  small: {model: demo, ttl: 5m}
names:                         # personas
  cyber: {model: qwen, system: "You know malware.", keywords: [malware, exploit, CVE, threat],
    sampling: {temperature: 0.2, max_tokens: 4096}}
  code:  {model: qwen, tool_call_parser: qwen3_coder, sampling: {max_tokens: 8192},
    keywords: [python, rust, function, class, impl]}
  "gpt-4*": qwen
routes: {auto: [code, cyber, qwen]}
upstreams:
  spark2:  {url: http://spark2.local:8888/v1, models: ["gemma*"], key_env: SPARK2_KEY}
  speech:  {url: http://127.0.0.1:8765/v1, serves: [audio/transcriptions]}
  voice:   {url: http://127.0.0.1:8882/v1, serves: [audio/speech]}
  ollama:  {url: http://127.0.0.1:11434/v1}
fallbacks: {qwen: [spark2/gemma-4-26b, small], retries: 3, timeout: 30s, cooldown: 60s}
watch: {every: 1m, notify: ["tgram://bot/chat"], endpoints: {asr: http://127.0.0.1:8765/health}}
'''
ENV = dict(SPARK2_KEY='secret')

def refusal(text, env=ENV):
    "What is said of a file that is refused"
    with pytest.raises(FleetError) as e:
        fleet_of(text, 'atlas.yaml', env)
    return e.value

# -- the file ------------------------------------------------------------------------------------

def test_the_whole_of_it():
    f = fleet_of(WHOLE, env=ENV)
    assert f.memory==110<<30 and f.first==['qwen']
    assert f.watch.every==f.fallbacks.cooldown==60
    c = f.config('qwen')
    assert (c.model, c.max_seq_len)==('qwen3.6-35b-a3b-nvfp4',262144)
    assert (c.max_num_seqs, c.speculative)==(16,True)
    assert f.fallbacks.names==dict(qwen=['spark2/gemma-4-26b','small'])
    assert [f.setting(n, 'ttl') for n in f.models]==[1800, 300]

# What is changed, what is said, and what is advised; the line is that of the change
WRONG = {
    'a key that no part has': ('pin: true', 'pinn: true', 'pinn is not known', 'Did you mean pin?'),
    'a key of the whole': ('memory:', 'memroy:', 'memroy is not known', 'memory'),
    'a key of vLLM, misspelt': (
        'max_seq_len', 'max_modle_len', 'max_modle_len is not known', 'max_model_len'),
    'two models of one name': (
        '  small:', '  qwen:', 'Two models are called', 'the first is at line 5'),
    'two names alike': ('  code:', '  cyber:', 'Two names are called', 'another name'),
    'a model and a route alike': (
        '{auto:', '{small:', 'is a name that models has already, at line 6', 'another name'),
    'a route in a circle': (
        '[code, cyber, qwen]', '[code, cyber, auto]', 'leads in a circle: auto > auto',
        'name a model'),
    'a persona of nothing': (
        'cyber: {model: qwen', 'cyber: {model: qwne', "leads to 'qwne', which is no name",
        'Did you mean qwen?'),
    'a persona without a model': (
        'cyber: {model: qwen, ', 'cyber: {', 'names.cyber.model is missing', 'Add it'),
    'a persona of a route': (
        'cyber: {model: qwen', 'cyber: {model: auto', 'is a persona of auto, which is a route',
        'one model'),
    'a route to nothing': (
        '[code, cyber, qwen]', '[code, qwne]', "leads to 'qwne'", 'Did you mean qwen?'),
    'a way that nobody goes': (
        '[code, cyber, qwen]', '[qwen, cyber]', 'has no keywords and is not the last', 'put it last'
    ),
    'a budget smaller than a model': (
        'pin: true', 'memory_budget: 200GiB', 'is 200 GiB, and memory is 110 GiB for all',
        'Raise memory'),
    'a size that is none': ('110GiB', 'lots', "memory is 'lots', expected a size such as", ''),
    'a time that is none': (
        'ttl: 5m', 'ttl: 5 weeks', "'5 weeks', expected a time such as 30m", ''),
    'a ttl of nothing': ('ttl: 5m', 'ttl: 0', 'expected a time such as 30m, or never,', ''),
    'a url that is no url': (
        'http://127.0.0.1:8882/v1', 'localhost 8882', 'is no address', 'http://host:port/path'),
    'a url of another kind': (
        'http://127.0.0.1:8882/v1', 'ftp://127.0.0.1/v1', 'is no address', 'http://host:port/path'),
    'a key in no variable': (
        'SPARK2_KEY', 'SPARK3_KEY', 'no variable of that name is set', 'export SPARK3_KEY'),
    'a glob that shadows a model': (
        '"gpt-4*": qwen', '"sm*": qwen', 'catches small, which is a model here', 'Narrow'),
    'an upstream that shadows one': ('["gemma*"]', '["q*"]', 'catches qwen', 'Narrow'),
    'a parser that nobody knows': (
        'qwen3_coder', 'qwen3_codr', 'which nobody knows', 'Did you mean qwen3_coder?'),
    'a sampling that cannot be': (
        'temperature: 0.2', 'temperature: 200', "expected a number from 0 to 100", ''),
    'a sampling that is no default': (
        'temperature: 0.2', 'n: 2', 'is no sampling parameter that can have a default', ''),
    'an option that cannot be': (
        'max_seq_len: 262144', 'max_seq_len: lots', 'expected a whole number', ''),
    'a default that cannot be': (
        'max_num_seqs: 16', 'max_num_seqs: 0', 'defaults.max_num_seqs', ''),
    'a fallback to nothing': (
        '[spark2/gemma-4-26b, small]', '[smal]', "leads to 'smal'", 'Did you mean small?'),
    'a fallback to itself': (
        '[spark2/gemma-4-26b, small]', '[qwen]', 'a fallback to itself', 'Leave it out'),
    'an endpoint that is no url': ('http://127.0.0.1:8765/health', 'asr', 'is no address', ''),
    'a url with a password': (
        'http://127.0.0.1:8882/v1', 'http://me:secret@127.0.0.1/v1', 'has a password in it',
        'key_env'),
    'a fallback to a persona of itself': (
        '[spark2/gemma-4-26b, small]', '[code]', 'leads in a circle: qwen > code > qwen',
        'another model'),
    'a fallback to a route': (
        '[spark2/gemma-4-26b, small]', '[auto]', 'leads to auto, which is a route', 'Name a model'),
    'a fallback of a persona': (
        'fallbacks: {qwen: [', 'fallbacks: {code: [', 'which is a name for a model', 'name one'),
    'what an upstream cannot serve': (
        'audio/speech', 'audio/spech', 'is not known', 'audio/speech'),
    'a group that is none': (
        'ttl: 5m', 'group: tools', "'tools', which is no group", 'Add it to groups'),
    'pinned, and with an end': (
        'pin: true', 'pin: true, ttl: 5m', 'a pinned model stays', 'Leave one of them out'),
    'no YAML': ('ttl: 5m}', 'ttl: 5m', 'this is no YAML', ''),
    'a name that YAML takes for a truth': (
        '  small:', '  on:', "that YAML takes for true", 'quotes'),
}

@pytest.mark.parametrize('what', WRONG)
def test_refused_with_line_and_remedy(what):
    old,new,*told = WRONG[what]
    assert WHOLE.count(old)==1
    e = refusal(WHOLE.replace(old, new))
    line = WHOLE[:WHOLE.index(old)].count('\n')+1
    if what=='no YAML':
        assert e.line in (line,line+1)
    else:
        assert e.line==line and f'atlas.yaml, line {line}:' in e.msg
    says,advice = told
    assert says in e.msg and advice in e.hint+e.msg and e.status==400

def test_all_that_is_wrong_is_told():
    text = WHOLE.replace('cyber: {model: qwen', 'cyber: {model: qwne')
    e = refusal(text.replace('[spark2/gemma-4-26b, small]', '[smal]'), {})
    assert [x.line for x in (e,*e.others)]==[8,15,19]

@pytest.mark.parametrize('text,says', [
    ('', 'there is nothing to serve'), ('[1, 2]', 'a list of 2'),
    ('models: !!python/object/apply:os.system [ls]', 'is of the kind'),
    ('models: {a: &a {model: *a}}', 'nested'), ('models: {a: '+'['*5000, ''),
    ('models: {a: tiny}\n---\nmodels: {}', 'no YAML'),
    ('models: {a: 2026-13-45}', ''), ('models: {"a\\u0001": tiny}', 'is no name'),
    ('models: {"q*": tiny}', 'is a pattern'),
    ('models: {a: {model: tiny, kv_cache_memory: 1XB}}', 'not a size')])
def test_nonsense_is_refused(text, says):
    assert says in refusal(text).msg

def test_a_bomb_of_aliases_is_refused():
    lines = ['a: &a [1,1,1,1,1,1,1,1,1,1]']
    for x,y in zip('abcdefgh', 'bcdefghi'):
        lines.append(f'{y}: &{y} [{",".join(["*"+x]*10)}]')
    assert 'has more than' in refusal('\n'.join(lines)).msg

def test_anchors_and_merges_are_fine():
    f = fleet_of('models:\n  a: &a {model: tiny, ttl: 1m}\n  b: {<<: *a, ttl: 2m}', env={})
    assert [m.ttl for m in f.models.values()]==[60, 120]

def test_files(tmp_path):
    path = tmp_path/'atlas.yaml'
    with pytest.raises(FleetError, match='cannot be read'):
        read_fleet(path)
    path.write_bytes(b'models:\n  a: tiny\nnames: {\xff: a}')
    with pytest.raises(FleetError, match='line 3: this is not UTF-8'):
        read_fleet(path)
    path.write_text('models: {a: tiny}')
    assert read_fleet(path).config('a').model=='tiny'

def test_the_schema_holds():
    "What is accepted is valid by the published schema, and a wrong key is not"
    import jsonschema,yaml
    check = jsonschema.Draft202012Validator(schema())
    assert not [*check.iter_errors(yaml.safe_load(WHOLE))]
    wrong = {'pin: true':'pinn: true', 'max_num_seqs: 16':'max_num_seqs: 0',
        'ttl: 5m':'ttl: 5 weeks'}
    for old,new in wrong.items():
        assert [*check.iter_errors(yaml.safe_load(WHOLE.replace(old, new)))], new

# -- names ---------------------------------------------------------------------------------------

def names_of(text): return Names(fleet_of(text, env=ENV))
def said(text): return Ask([dict(role='user', content=text)])

def test_where_names_lead():
    n = names_of(WHOLE)
    def why(name, text=''): return n.find(name, said(text)).why
    assert why('qwen')=='' and why('cyber')=='cyber > qwen (persona)'
    assert why('gpt-4o')=='gpt-4o > qwen (gpt-4*)'
    assert why('auto', 'A CVE in Python?')=='auto > code (keyword python) > qwen (persona)'
    assert why('auto', 'A cve-2026-1?')=='auto > cyber (keyword cve) > qwen (persona)'
    assert why('auto', 'I receive a pythonic subclass')=='auto > qwen (no keyword)'

def test_where_names_of_other_servers_lead():
    n = names_of(WHOLE)
    assert n.end('spark2/x').upstream==('spark2','x')
    assert n.end('gemma-9').upstream==('spark2','gemma-9')
    found = n.find('gemma-9', None, {'gemma-9'})
    assert found.model=='gemma-9', 'a model of another server, by its own name'

def test_a_completion_is_routed_by_its_prompt():
    found = names_of(WHOLE).find('auto', TextAsk([], prompts=['fn main() in rust']))
    assert found.manner.sampling==dict(max_tokens=8192)

def test_a_name_that_is_none():
    n = names_of(WHOLE)
    with pytest.raises(SourceError) as e:
        n.find('cybr')
    assert e.value.status==404 and 'cyber' in e.value.hint

def test_only_the_last_word_of_a_user_counts():
    n = names_of(WHOLE)
    old = [
        dict(role='user', content='python'),
        dict(role='assistant', content='rust'),
        dict(role='user', content='Thanks')]
    assert n.find('auto', Ask(old)).why=='auto > qwen (no keyword)'
    tool = [
        dict(role='user', content='python'),
        dict(role='assistant', tool_calls=[]),
        dict(role='tool', content='malware')]
    assert 'keyword python' in n.find('auto', Ask(tool)).why

def test_patterns():
    n = names_of('models: {a: tiny, b: tiny}\nnames: {"x*": a, "xy*": b, xyz: a, "*": b}')
    assert [n.find(k).model for k in ('x1','xy1','xyz','else')]==['a','b','a','b']
    assert [n.exact(k) for k in ('a','xyz','xy1','else','*')]==['a','a',None,None,None]

_word = st.text('abc_-é ', min_size=1, max_size=4)
@given(_word, st.text('abc_-é .', max_size=30))
@settings(max_examples=500, deadline=None)
def test_words_are_those_that_a_regex_finds(word, text):
    edge = r'(?<!\w)' if re.match(r'\w', word) else ''
    end = r'(?!\w)' if re.match(r'\w', word[-1]) else ''
    assert has_word(text, word)==bool(
        re.search(edge+re.escape(word)+end, text))

_names = st.sampled_from(['m0','m1','p0','p1','p2','a0','r0','r1','r2'])
_persona = st.builds(
    lambda m, k: f'{{model: {m}, system: hi, keywords: [{k}]}}', _names,
    st.sampled_from(['red','blue']))
_globs = st.dictionaries(
    st.sampled_from(['x*','xy*','*z','*','p?x']), _names,
    max_size=3)

@st.composite
def fleets(draw):
    "A file in which names lead anywhere"
    lines = [
        'models: {m0: tiny, m1: {model: tiny, keywords: [red]}}', 'names:', '  a0: '+draw(_names)]
    for p in draw(st.sets(st.sampled_from(['p0','p1','p2']))):
        lines.append(f'  {p}: {draw(st.one_of(_names,_persona))}')
    for g,to in draw(_globs).items():
        lines.append(f'  "{g}": {to}')
    routes = draw(
        st.dictionaries(
            st.sampled_from(['r0','r1','r2']),
            st.lists(_names, min_size=1, max_size=3)))
    return '\n'.join(
        lines+['routes:'+json.dumps(routes)] if routes else lines).replace('routes:{', 'routes: {')

def leads(f, name, seen=()):
    "Does a name lead in a circle, as a reader of the file would see it?"
    if name in seen:
        return True
    if name in f['models']:
        return False
    to = f.get('routes', {}).get(name) or f['names'].get(name, [])
    to = [to] if isinstance(to, str) else [to['model']] if isinstance(to, dict) else to
    return any(leads(f, t, (*seen,name)) for t in to)

@given(
    fleets(),
    st.sampled_from(
        ['m0','a0','p0','r0','r1','x1','xyz','zz','p1x','none']),
    st.sampled_from(['red','a blue one','green']))
@settings(max_examples=400, deadline=None)
def test_every_name_has_one_end(text, name, words):
    "Never a circle; an exact name is no pattern's; each leads to one model, or is a 404"
    import yaml
    raw = yaml.safe_load(text)
    round_ = any(leads(raw, n) for n in [*raw['names'],*raw.get('routes', {})])
    try:
        f = fleet_of(text, env={})
    except FleetError:
        return
    assert not round_
    n = Names(f)
    exact = name in {*f.models,*f.names,*f.routes}
    try:
        end = n.find(name, said(words))
    except SourceError as e:
        assert e.status==404 and not exact and '*' not in f.names
        return
    assert end.model in f.models and n.find(name, said(words))==end
    if exact:
        assert n.exact(name) in f.models and not re.search(r'^\S+ > \S+ \([^)]*[*?]', end.why)
    else:
        assert n.exact(name) is None and end.why.startswith(f'{name} > ')

# -- the APIs ------------------------------------------------------------------------------------

PERSONAS = '''
models:
  qwen: {model: tiny, sampling: {top_p: 0.9}}
  small: tiny
names:
  cyber: {model: qwen, system: "You know malware.", sampling: {temperature: 0.25, max_tokens: 7},
    keywords: [malware], cache_salt: lab, chat_template_kwargs: {language: fr}}
  tools: {model: small, tool_call_parser: llama3_json}
  thinker: {model: small, reasoning_parser: qwen3}
  hack: cyber
  "gpt-4*": small
routes: {auto: [cyber, small]}
'''

class Recorder(Speaker):
    "A `Speaker` that keeps requests"
    def __init__(self, name):
        super().__init__(lambda prompt: 'Yes.')
        self.info = self.info|dict(name=name, max_seq_len=20_000)
        self.seen = []
    def submit(self, r):
        self.seen.append(r)
        return super().submit(r)
    async def call(self, op, **kw):
        return [1.,0.]

@pytest.fixture
def personas():
    "A client of the models of `PERSONAS`, and their runners"
    f,runners = fleet_of(PERSONAS, env={}),{}
    made = []
    for n in f.models:
        r = runners[n] = Recorder(n)
        made.append(
            Served(
                [n],
                ReadyModel(
                    n, [n], r.info, tok, ChatTemplate(TEMPLATE+'{{ language }}'),
                    parsers=('hermes',None), runner=r)))
    ms = Models(made)
    ms.names = Names(f)
    with TestClient(create_app(ms), base_url='http://localhost') as http:
        yield SimpleNamespace(http=http, models=ms, **runners)

CHAT = dict(messages=[dict(role='user', content='Some malware')])
ASKED = {
    '/v1/chat/completions': CHAT,
    '/v1/messages': CHAT|dict(max_tokens=5),
    '/v1/responses': dict(input='Some malware'),
    '/v1/completions': dict(prompt='Some malware'),
}

@pytest.mark.parametrize('stream', [False,True])
@pytest.mark.parametrize('path', ASKED)
def test_every_api_knows_names(personas, path, stream):
    r = personas.http.post(path, json=ASKED[path]|dict(model='auto', stream=stream))
    assert r.status_code==200
    assert r.headers['x-atlas-route']=='auto > cyber (keyword malware) > qwen (persona)'
    q, = personas.qwen.seen
    assert (q.params.temperature, q.params.top_p, q.salt)==(.25,.9,'lab:')
    assert q.params.max_tokens==(5 if 'max_tokens' in ASKED[path] else 7)
    if path!='/v1/completions':
        prompt = personas.qwen.prompts[0]
        assert 'system: You know malware.' in prompt and prompt.endswith('fr')
    if not stream:
        assert r.json()['model']=='auto'

def test_a_request_wins(personas):
    body = CHAT|dict(
        model='cyber', temperature=1.0, max_completion_tokens=3, cache_salt='mine',
        chat_template_kwargs=dict(language='de'))
    body['messages'] = [dict(role='system', content='Be brief.'), *body['messages']]
    assert personas.http.post('/v1/chat/completions', json=body).status_code==200
    q, = personas.qwen.seen
    assert (q.params.temperature, q.params.max_tokens, q.params.top_p)==(1.,3,.9)
    prompt = personas.qwen.prompts[0]
    assert q.salt=='lab:mine' and prompt.endswith('de')
    assert 'system: You know malware.\n\nBe brief.' in prompt

def test_a_models_own_name_has_its_own_manner_only(personas):
    r = personas.http.post('/v1/chat/completions', json=CHAT|dict(model='qwen'))
    q, = personas.qwen.seen
    assert 'x-atlas-route' not in r.headers
    assert (q.params.top_p, q.params.temperature, q.salt)==(.9,1.,'')
    assert 'system' not in personas.qwen.prompts[0]
    personas.http.post('/v1/chat/completions', json=CHAT)  # no name: the first model, as ever
    assert personas.qwen.seen[1].params.top_p==.9

def test_what_is_counted_is_what_is_answered(personas):
    def post(path, **body): return personas.http.post(path, json=CHAT|body)
    count = '/v1/messages/count_tokens'
    want = post(count, model='qwen').json()['input_tokens']+len('system: You know malware.fr')
    r = post(count, model='hack')
    assert r.json()['input_tokens']==want and 'hack > cyber (alias)' in r.headers['x-atlas-route']
    assert post('/tokenize', model='hack').json()['count']==want
    asked = dict(input='Some malware', model='hack')
    r = personas.http.post('/v1/responses/input_tokens', json=asked)
    assert r.json()['input_tokens']==want
    assert 'You know malware.' in post('/apply-template', model='auto').json()['prompt']

def test_other_endpoints_know_names(personas):
    http = personas.http
    assert http.post('/v1/embeddings', json=dict(model='gpt-4o', input='hi')).status_code==200
    r = http.post('/detokenize', json=dict(model='hack', tokens=tok.encode('A')))
    assert r.json()['content']=='A'

@pytest.mark.parametrize('path', [*ASKED,'/v1/messages/count_tokens','/tokenize','/v1/embeddings'])
def test_a_name_that_is_none_is_a_404(personas, path):
    body = ASKED.get(path, CHAT|dict(input='hi', prompt='hi'))
    r = personas.http.post(path, json=body|dict(model='cybr'))
    assert r.status_code==404 and 'Did you mean cyber?' in r.text

CALL = '{"name": "look", "parameters": {"at": "sky"}}'

def says_a_call(prompt): return CALL

def answered(personas, model, **kw):
    "The message of an answer"
    r = personas.http.post('/v1/chat/completions', json=CHAT|dict(model=model, **kw))
    return r.json()['choices'][0]['message']

def test_parsers_of_a_persona(personas):
    personas.small.script = says_a_call
    f = dict(name='look', parameters=dict(type='object'))
    def calls(model):
        tools = [dict(type='function', function=f)]
        return answered(personas, model, tools=tools).get('tool_calls')
    assert calls('tools')[0]['function']['name']=='look' and not calls('small')
    def thought(model): return answered(personas, model).get('reasoning')
    assert thought('thinker')==CALL and not thought('small')

def test_a_response_goes_on_without_the_prompt_twice(personas):
    one = personas.http.post(
        '/v1/responses', json=dict(model='cyber', input='Hi')).json()
    assert (one['temperature'], one['max_output_tokens'])==(.25, 7)
    personas.http.post(
        '/v1/responses',
        json=dict(model='cyber', input='More', previous_response_id=one['id']))
    assert personas.qwen.prompts[1].count('You know malware.')==1

def test_lists_show_names(personas):
    data = {d['id']:d for d in personas.http.get('/v1/models').json()['data']}
    assert [*data]==['qwen','small','cyber','tools','thinker','hack','auto']
    assert (
        data['cyber']['persona_of'], data['cyber']['root'],
        data['hack']['alias_of'])==('qwen','qwen','cyber')
    assert data['auto']['routes']==['cyber','small'] and data['small']['aliases']==['gpt-4*']
    one = personas.http.get('/v1/models/cyber').json()
    assert one==data['cyber'] and personas.http.get('/v1/models/gpt-4o').json()['root']=='small'

@pytest.mark.parametrize('path', ['/models/load','/models/unload'])
def test_who_unloads_means_a_model(personas, path):
    "A pattern is no name there"
    assert personas.http.post(path, json=dict(model='gpt-4o')).status_code==404
    # there: it cannot be unloaded here
    assert personas.http.post(path, json=dict(model='cyber')).status_code==400
    assert personas.http.post('/sleep?model=gpt-4o').status_code==404

def test_unload_of_no_name_where_any_name_will_do():
    "`--alias '*'` answers every name, and unloads none of them"
    r = Recorder('only')
    ms = Models(
        [
            Served(
                ['only','*'],
                ReadyModel('only', ['only'], r.info, tok, ChatTemplate(TEMPLATE), runner=r))])
    with TestClient(create_app(ms), base_url='http://localhost') as http:
        assert http.post('/v1/chat/completions', json=CHAT|dict(model='whoever')).status_code==200
        for name in 'whoever','*':
            r = http.post('/models/unload', json=dict(model=name))
            assert r.status_code==404 and r.json()['error']['code']=='model_not_found'

# -- a changed file ------------------------------------------------------------------------------

def alive(pid):
    "Is there such a process, other than a dead one that nobody has reaped?"
    try:
        return Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0]!='Z'
    except OSError:
        return False

def text_side(config): return dict(tokenizer=tok)
def small(configs, budget):
    "What `measure` tells of models that fit beside any others"
    return [dict(least=1<<20, most=1<<20) for _ in configs]

HOW = dict(policy=PATIENT, command=WORKER, text=text_side, measure=small)

FIRST = '''
models:
  one: {load_on_startup: true}
  two: {load_on_startup: true}
  three: {load_on_startup: true}
names: {uno: one, tre: three}
'''
SECOND = '''
models:
  one: {load_on_startup: true, ttl: 1h}
  two: {load_on_startup: true, max_seq_len: 512}
  four: {load_on_startup: true}
names: {eins: one, vier: four}
'''

@asynccontextmanager
async def following(path, text=FIRST, **kw):
    "A file that is followed, its models loaded; afterwards no process is left"
    path.write_text(text)
    file = FleetFile(path, **kw)
    ms,pids = file(HOW),[]
    tell = ms._tell
    def heard(e):
        pids.extend(m.child.pid for m in ms._every() if getattr(m, 'child', None))
        tell(e)
    ms._tell = heard
    ms._take(ms.all)
    await ms.start()
    try:
        yield file,ms
    finally:
        await asyncio.wait_for(ms.close(), WAIT)
        assert not any(map(alive, set(pids))) and not ms.going

def running_test(f):
    "A coroutine as a test, with a limit that only a hang reaches"
    import functools
    @functools.wraps(f)
    def test(*a, **kw):
        asyncio.run(asyncio.wait_for(f(*a, **kw), 3*WAIT))
    return test

def request(rid, text='hello'):
    return Request(
        rid, tuple(tok.encode(text)),
        SamplingParams(temperature=0, max_tokens=10**6))
async def collect(s):
    "How an answer ended, and how long it was"
    events = [e async for e in s]
    return events[-1].finish,len(events)

def test_what_changes():
    a,b = (fleet_of(t, env={}) for t in (FIRST,SECOND))
    assert changes(a, b)==dict(
        kept=['one'], changed=['two'], added=['four'],
        removed=['three'])
    with_defaults = SECOND.replace('models:', 'defaults: {max_num_seqs: 4}\nmodels:')
    assert changes(b, fleet_of(with_defaults, env={}))['changed']==['one','two','four']
    assert changes(
        a,
        fleet_of(FIRST.replace('uno', 'eins'), env={}))['kept']==['one',
        'two', 'three']

@asynccontextmanager
async def answering(tmp_path):
    "A file, its models, and of each that answers a stream and the process"
    async with following(tmp_path/'atlas.yaml') as (file,ms):
        ups = {n: await ms.get(n) for n in ('one','two','three')}
        pids = {n: ms.find(n).child.pid for n in ups}
        streams = {n: u.runner.submit(request(f'r-{n}', '<hold>')) for n,u in ups.items()}
        for s in streams.values():
            await anext(s)
        yield SimpleNamespace(file=file, models=ms, pids=pids, streams=streams)

async def reloaded(f, text):
    f.path.write_text(text)
    return await f.reload()

@running_test
async def test_reload_says_what_has_changed(tmp_path):
    async with following(tmp_path/'atlas.yaml') as (file,ms):
        one = ms.find('one')
        said = await reloaded(file, SECOND)
        assert said==dict(kept=['one'], changed=['two'], added=['four'], removed=['three'])
        assert ms.find('eins') is one and one.ttl==3600
        for gone in 'three','tre','uno':
            with pytest.raises(SourceError):
                ms.find(gone)

@running_test
async def test_reload_lets_answers_end(tmp_path):
    "What is changed, or gone, ends when its answers have; only then a new process begins"
    async with answering(tmp_path) as s:
        await reloaded(s.file, SECOND)
        two = s.models.find('two')
        await happens(lambda: two.state=='loading')
        assert two.child is None and alive(s.pids['two'])
        for n in 'two','three':
            s.streams[n].abort()
        for n in 'two','three':
            assert (await collect(s.streams[n]))[0]=='abort'
        assert (await s.models.get('two')).info['max_seq_len']==512
        assert (await s.models.get('vier')).name=='four'
        await happens(lambda: not (alive(s.pids['two']) or alive(s.pids['three'])))

@running_test
async def test_reload_touches_only_what_changed(tmp_path):
    async with answering(tmp_path) as s:
        await reloaded(s.file, SECOND)
        for n in 'two','three':
            s.streams[n].abort()
        await s.models.get('two')
        one = s.models.find('one')
        assert one.child.pid==s.pids['one'] and one.restarts==0
        s.streams['one'].abort()
        assert (await collect(s.streams['one']))[0]=='abort', 'it was there all the time'

@running_test
async def test_a_file_with_a_mistake_changes_nothing(tmp_path, caplog):
    async with following(tmp_path/'atlas.yaml') as (file,ms):
        await ms.get('one')
        def state(): return dict(ms.models),ms.names,file.fleet,ms.find('one').child.pid
        before = state()
        for wrong in (SECOND.replace('vier: four', 'vier: fuor'), 'models: [', ''):
            file.path.write_text(wrong)
            with pytest.raises(FleetError) as e:
                await file.reload()
            assert e.value.status==400 and 'line' in e.value.msg
        file.path.unlink()
        with pytest.raises(FleetError, match='cannot be read'):
            await file.reload()
        assert state()==before
        stream = (await ms.get('uno')).runner.submit(request('r'))
        assert (await collect(stream))[0]=='stop'
        assert sum('is not taken' in r.getMessage() for r in caplog.records)==4

@running_test
async def test_reloads_at_once_and_an_end_among_them(tmp_path):
    "Whatever comes together, one file is the last, and no process stays"
    async with following(tmp_path/'atlas.yaml') as (file,ms):
        await ms.get('one')
        for k in range(6):
            file.path.write_text((SECOND,FIRST)[k%2].replace('512', str(512+k)))
            await asyncio.gather(*(file.reload() for _ in range(3)))
        assert [m.name for m in ms.all]==['one','two','three']
        await ms.get('two')
        file.path.write_text(SECOND)
        await file.reload()

@running_test
async def test_who_waits_for_a_model_that_changes_gets_the_new_one(tmp_path):
    async with following(tmp_path/'atlas.yaml', lazy=True) as (file,ms):
        u = await ms.get('two')
        s = u.runner.submit(request('r', '<hold>'))
        await anext(s)
        file.path.write_text(SECOND)
        await file.reload()
        waiting = asyncio.create_task(ms.get('two'))
        await happens(lambda: ms.find('two').state=='loading')
        assert not waiting.done()
        s.abort()
        assert (await waiting).info['max_seq_len']==512
        assert ms.find('four').state=='unloaded', 'with --lazy nothing new is loaded unasked'

@running_test
async def test_what_is_to_be_loaded_at_the_start(tmp_path):
    def first(models): return fleet_of(f'models: {{{models}}}', env={}).first
    pinned = 'a: tiny, b: {model: tiny, pin: true}'
    assert first(f'{pinned}, c: {{load_on_startup: false, pin: true}}')==['b']
    assert first('a: tiny, b: tiny')==['a']
    assert first('a: {load_on_startup: false}, b: tiny')==[]

# -- real servers --------------------------------------------------------------------------------

@contextmanager
def serving(command, **kw):
    "A server in a process; gives its client, with `pid`"
    p = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True, **kw)
    try:
        line = p.stdout.readline()
        assert 'is ready' in line, line
        at = re.search(r'http://127.0.0.1:\d+', line)[0]
        with httpx.Client(base_url=at, timeout=WAIT) as http:
            http.pid = p.pid
            yield http
    finally:
        p.terminate()
        try:
            p.wait(WAIT)
        finally:
            p.kill()
            p.stdout.close()

def gateway(path, **kw):
    said = dict(file=str(path), policy=vars(PATIENT), drain=WAIT, **kw)
    return [sys.executable, str(here/'helpers'/'fake_gateway.py'), json.dumps(said)]

def listed(http):
    return [d['id'] for d in http.get('/v1/models').json()['data']]

def test_sighup_reads_the_file_again(tmp_path):
    path = tmp_path/'atlas.yaml'
    path.write_text(FIRST)
    command = gateway(path, log_format='json')
    with open(tmp_path/'log', 'w') as log, serving(command, stderr=log) as http:
        assert listed(http)==['one','two','three','uno','tre']
        path.write_text(SECOND)
        os.kill(http.pid, signal.SIGHUP)
        until(lambda: listed(http)==['one','two','four','eins','vier'])
        r = http.post('/v1/chat/completions', json=CHAT|dict(model='vier', max_tokens=100))
        assert r.json()['choices'][0]['message']['content']=='Hello there, reader.'
        path.write_text(SECOND+'  zwei: tow')
        os.kill(http.pid, signal.SIGHUP)
        until(lambda: 'is not taken' in (tmp_path/'log').read_text())
        assert listed(http)==['one','two','four','eins','vier']

@contextmanager
def administered(path):
    "A server of a file; posts something with a key"
    path.write_text(FIRST)
    env = os.environ|dict(ATLAS_API_KEY='user', ATLAS_ADMIN_KEY='admin')
    with serving(gateway(path), stderr=subprocess.DEVNULL, env=env) as http:
        def post(path='/models?reload=1', key='admin', **body):
            return http.post(path, headers=dict(authorization=f'Bearer {key}'), json=body)
        yield post

def test_post_models_reads_the_file_again(tmp_path):
    path = tmp_path/'atlas.yaml'
    with administered(path) as post:
        assert post(key='user').status_code==403 and post(key='no').status_code==401
        assert post('/models').status_code==501
        path.write_text(SECOND)
        said = dict(kept=['one'], changed=['two'], added=['four'], removed=['three'])
        assert post().json()==dict(success=True)|said
        assert post().json()['kept']==['one','two','four']
        r = post('/v1/chat/completions', 'user', **CHAT|dict(model='eins'))
        assert r.status_code==200

def test_post_models_says_what_is_wrong_with_the_file(tmp_path):
    path = tmp_path/'atlas.yaml'
    with administered(path) as post:
        path.write_text(SECOND.replace('max_seq_len: 512', 'max_seq_len: 1'))
        r = post()
        e = r.json()['error']
        assert r.status_code==400 and e['code']=='bad_fleet'
        assert f'{path}, line 4' in e['message'] and 'max_seq_len' in e['param']

def test_a_server_without_a_file_has_none_to_read():
    r = Recorder('only')
    ms = Models([Served(['only'], ReadyModel('only', ['only'], r.info, tok, runner=r))])
    with TestClient(create_app(ms), base_url='http://localhost') as http:
        for path in '/models?reload=1','/models':
            assert http.post(path).status_code==501

TINY = '''
models:
  tiny: {model: tiny, device: cpu, max_seq_len: 512, max_num_seqs: 2}
  other: {model: tiny, device: cpu, max_seq_len: 256, max_num_seqs: 2}
names:
  cow: {model: tiny, system: "You are a cow.", sampling: {temperature: 0, max_tokens: 8},
    keywords: [cow, milk]}
  "gpt-4*": tiny
routes: {auto: [cow, tiny]}
'''

@pytest.fixture
def tiny_server(tmp_path):
    "`atlas serve --config` with a real model"
    path = tmp_path/'atlas.yaml'
    path.write_text(TINY)
    command = [sys.executable, '-m', 'atlas', 'serve', '--config', str(path), '--port', '0']
    with serving(command, stderr=subprocess.DEVNULL) as http:
        yield http

def test_the_tiny_model_under_many_names(tiny_server):
    "One process; a persona is what a client could say itself"
    user = dict(role='user', content='What does a cow eat?')
    def ask(model, *messages, **kw):
        asked = dict(model=model, messages=messages)|kw
        return tiny_server.post('/v1/chat/completions', json=asked)
    r = ask('auto', user)
    assert r.headers['x-atlas-route']=='auto > cow (keyword cow) > tiny (persona)'
    n = r.json()['usage']
    assert n['completion_tokens']<=8
    system = dict(role='system', content='You are a cow.')
    same = ask('gpt-4o', system, user, temperature=0, max_tokens=8)
    assert same.json()['choices'][0]['message']==r.json()['choices'][0]['message']
    assert same.json()['usage']['prompt_tokens']==n['prompt_tokens']

def test_the_first_model_is_loaded_at_the_start(tiny_server):
    models = tiny_server.get('/models').json()['data']
    assert {m['id']: m['status']['value'] for m in models}==dict(tiny='loaded', other='unloaded')

def atlas(*args, **kw):
    "A run of the command"
    return subprocess.run(
        [sys.executable, '-m', 'atlas', *map(str, args)],
        capture_output=True, text=True, timeout=WAIT, **kw)

def test_the_command_refuses(tmp_path):
    path = tmp_path/'atlas.yaml'
    path.write_text(TINY.replace('model: tiny, system', 'model: tinyy, system'))
    for args in ('serve','--config',path),('config','check',path):
        r = atlas(*args)
        assert r.returncode==1 and 'Did you mean tiny?' in r.stderr
        assert f'{path}, line 6: names.cow.model' in r.stderr
    flags = ('--max-seq-len 64', '--no-enable-prefix-caching', '--alias x', '--memory 1GiB')
    for flag in map(str.split, flags):
        assert f"'{flag[0].replace('no-', '')}'" in atlas('serve', '--config', path, *flag).stderr
    assert 'stands beside --config' in atlas('serve', 'tiny', '--config', path).stderr
    assert 'name a model' in atlas('serve').stderr

def test_the_schema_is_published():
    assert json.loads(atlas('config', 'schema').stdout)==schema()

def test_check_says_what_would_run(tmp_path):
    "Without loading or fetching anything: bytes of each part, and where names lead"
    path = tmp_path/'atlas.yaml'
    away = 'upstreams: {away: {url: "http://away:1/v1", models: [nowhere]}}'
    path.write_text(f'memory: 110GiB{TINY}{away}')
    r = atlas('config', 'check', path, '--json')
    assert r.returncode==0, r.stderr
    said = json.loads(r.stdout)
    tiny,other = said['models']
    assert tiny['load_on_startup'] and not other['load_on_startup'] and said['fits']
    a,b = tiny['parts'],other['parts']
    angles = a['weights']-b['weights'] # of 256 more positions
    assert 0<angles<1<<16 and b['weights']>1<<20 and a['cache']>b['cache']
    assert tiny['need']==sum(a.values())
    assert said['names']['auto']=='cow (cow, milk), else tiny'
    assert 'away' in said['names']['nowhere']
    text = atlas('config', 'check', path).stdout
    assert 'memory: 110 GiB for all' in text and 'cow' in text
    assert atlas('serve', '--config', path, '--dry-run').stdout==text

def test_a_budget_smaller_than_weights_is_refused(tmp_path):
    "At the start, by the command that checks, and at a reload"
    path = tmp_path/'atlas.yaml'
    path.write_text(TINY)
    file = FleetFile(path)
    path.write_text('memory: 3MiB'+TINY)
    for args in ('serve','--config',path),('config','check',path):
        r = atlas(*args)
        assert r.returncode==1 and 'Raise memory' in r.stderr
        assert f'{path}, line 3: models.tiny.model has weights of' in r.stderr
    ms = file(HOW)
    with pytest.raises(FleetError, match='has weights of'):
        asyncio.run(ms.reload())
    assert file.fleet.memory is None

# -- one memory ----------------------------------------------------------------------------------

GIB = 1<<30
def measure(configs, budget):
    return [dict(least=6*GIB, most=6*GIB) for _ in configs]

TWO = '''
memory: 10GiB
defaults: {ttl: never}
models:
  one: {load_on_startup: true}
  two: {load_on_startup: false}
'''

@asynccontextmanager
async def sharing(tmp_path, monkeypatch):
    "Two models of 6 GiB each, of which one is loaded, and 10 GiB for both"
    monkeypatch.setitem(HOW, 'policy', replace(PATIENT, soon=.01))
    monkeypatch.setitem(HOW, 'measure', measure)
    async with following(tmp_path/'atlas.yaml', TWO) as (file,ms):
        await ms.get('one')
        ms.find('one').took = 0.  # as if loading had taken no time: it need not stay
        yield file,ms

@running_test
async def test_models_of_a_file_share_its_memory(tmp_path, monkeypatch):
    "Two that do not fit take turns; with more memory both stay"
    async with sharing(tmp_path, monkeypatch) as (file,ms):
        one,two = ms.find('one'),ms.find('two')
        assert one.holds==6*GIB and ms.residency.free==4*GIB
        await ms.get('two')
        assert one.state in ('unloaded','sleeping') and two.state=='loaded'
        pid = two.child.pid
        assert (await reloaded(file, TWO.replace('10GiB', '20GiB')))['kept']==['one','two']
        await ms.get('one')
        assert two.state=='loaded' and two.child.pid==pid and ms.residency.free==8*GIB

@running_test
async def test_a_file_with_too_little_memory_changes_nothing(tmp_path, monkeypatch):
    async with sharing(tmp_path, monkeypatch) as (file,ms):
        with pytest.raises(FleetError) as e:
            await reloaded(file, TWO.replace('10GiB', '4GiB'))
        assert e.value.line==2 and 'takes 6 GiB' in e.value.msg
        pinned = TWO.replace('load_on_startup: true', 'pin: true')
        with pytest.raises(FleetError, match='pinned'):
            await reloaded(file, pinned.replace('load_on_startup: false', 'pin: true'))
        assert ms.residency.budget==10*GIB and not ms.find('one').pinned, 'as it was'

def machine(free, total=128*GIB, cards=()):
    "A `Machine` with made-up numbers"
    host = Look(total, free, free)
    return lambda: (list(cards), host)

NOBODY = TWO.replace('memory: 10GiB', '')

@asynccontextmanager
async def assuming(tmp_path, monkeypatch):
    "The same where the file does not say, and that much is free, less a reserve"
    monkeypatch.setitem(HOW, 'measure', measure)
    monkeypatch.setitem(HOW, 'policy', replace(PATIENT, soon=.01))
    seen = machine(11*GIB, 10*GIB) # a tenth of which is for the rest of the machine
    async with following(tmp_path/'atlas.yaml', NOBODY, machine=seen) as (file,ms):
        yield file,ms

@running_test
async def test_memory_that_a_file_does_not_say(tmp_path, monkeypatch):
    "It is what is free at the start, less a reserve, and models take turns in it"
    async with assuming(tmp_path, monkeypatch) as (file,ms):
        assert ms.memory['budget']==10*GIB
        await ms.get('one')
        assert ms.residency.free==4*GIB
        ms.find('one').took = 0.
        await ms.get('two')
        assert ms.find('one').state!='loaded', 'both do not fit'

@running_test
async def test_memory_that_a_file_says_later(tmp_path, monkeypatch):
    "What was assumed stays after a reload, until the file says something else"
    async with assuming(tmp_path, monkeypatch) as (file,ms):
        await ms.get('one')
        file.machine = machine(0)
        said = await reloaded(file, NOBODY.replace('two:', '# as before\n  two:'))
        assert said['kept']==['one','two'] and ms.residency.budget==10*GIB
        await reloaded(file, TWO.replace('10GiB', '20GiB'))
        assert ms.residency.budget==20*GIB
        app = httpx.ASGITransport(create_app(ms))
        async with httpx.AsyncClient(transport=app, base_url='http://localhost') as http:
            assert (await http.get('/models')).json()['memory']['budget']==20*GIB

def test_too_little_is_free(tmp_path):
    "It is refused at the start, with both numbers"
    (tmp_path/'atlas.yaml').write_text(NOBODY)
    file = FleetFile(tmp_path/'atlas.yaml', machine=machine(7*GIB, 20*GIB))
    with pytest.raises(FleetError) as e:
        file(HOW|dict(measure=measure))
    assert 'that is free, less a reserve, is too little' in e.value.msg
    assert 'takes 6 GiB' in e.value.msg and '5 GiB' in e.value.msg

def test_whose_memory_is_free(monkeypatch):
    """A card's own, the host's where a card has none, and nobody's where models are on several
    devices"""
    card = SensorReading('1', memory=dict(used=10*GIB, total=100*GIB))
    seen = machine(50*GIB, 100*GIB, [SensorReading('0'), card])
    def of(*devices):
        models = ''.join(f'\n  m{i}: {{model: tiny, device: {d!r}}}' for i,d in enumerate(devices))
        return assumed_memory(fleet_of(f'models: {models}', env={}), seen)
    assert of('cuda:1')==88*GIB
    assert of('cpu')==of('auto')==of('cuda')==of('cuda:0')==40*GIB
    assert of('cuda:1','cuda:1')==88*GIB
    assert of('cuda:2') is None, 'there is none'
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '1')
    assert of('auto')==of('cuda:0')==88*GIB and of('cuda:1') is None
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES')
    assert of('cuda:1','cpu') is None
    assert assumed_memory(fleet_of('upstreams: {a: {url: "http://a:1/v1"}}', env={}), seen) is None

def test_check_says_what_is_free():
    "Also that it is no more than assumed, and that two that are pinned do not fit"
    f = fleet_of('models: {a: {model: tiny, device: cpu, pin: true}}', env={})
    e = explain(f, machine(110*GIB, 100*GIB))
    assert e.to_dict()['memory']==100*GIB and e.to_dict()['memory_assumed'] and e.fits
    assert 'memory: 100 GiB for all, which is what is free, less a reserve; ' in str(e)
    assert not explain(f, machine(11<<20, 10<<20)).fits
    spark = fleet_of('models: {a: {model: qwen3.6-35b-a3b-nvfp4, device: cuda}}', env={})
    e = explain(spark, machine(8*GIB, 8*GIB))
    assert e.memory>100*GIB and e.fits, 'planned for a Spark, whose memory counts'
    assert 'GiB for all, which is what a DGX Spark has, less a reserve' in str(e)

@running_test
async def test_models_of_unknown_size_all_load_at_the_start(tmp_path, monkeypatch):
    """The first holds all there is until it has told what it takes; the next waits, and nobody
    leaves"""
    def unknown(configs, budget): return [None for _ in configs]
    monkeypatch.setitem(HOW, 'measure', unknown)
    monkeypatch.setattr(Model, '_make_ready', telling(Model._make_ready))
    both = NOBODY.replace('false', 'true')
    async with following(tmp_path/'atlas.yaml', both, machine=machine(20*GIB)) as (file,ms):
        await happens(lambda: all(m.state!='loading' for m in ms.all))
        assert {m.name: (m.state, m.need) for m in ms.all}==dict(
                one=('loaded',GIB), two=('loaded',GIB))
        assert not ms.memory['evictions']

def telling(make_ready):
    "As `make_ready`, of a worker that tells what it takes"
    async def of(self, info):
        info['memory'] = dict(weights=GIB)
        return await make_ready(self, info)
    return of

@running_test
async def test_what_is_replaced_holds_its_memory_until_it_is_gone(tmp_path, monkeypatch):
    monkeypatch.setitem(HOW, 'measure', measure)
    async with following(tmp_path/'atlas.yaml', TWO) as (file,ms):
        s = (await ms.get('one')).runner.submit(request('r', '<hold>'))
        await anext(s)
        file.path.write_text(TWO.replace('one: {', 'one: {max_seq_len: 512, '))
        assert (await file.reload())['changed']==['one']
        await happens(lambda: ms.find('one').state=='loading')
        assert ms.residency.free==4*GIB and ms.find('one').child is None
        s.abort()
        assert (await ms.get('one')).info['max_seq_len']==512 and ms.residency.free==4*GIB

def test_groups_pins_and_ttl_reach_the_models():
    from atlas.service.reload import build
    models = 'models: {a: {model: tiny, ttl: 5m}, b: {model: tiny, pin: true}, c: tiny}'
    groups = 'groups: {g: {members: [a, c], swap: false}}'
    ms = build(fleet_of(f'{models}\n{groups}', env={}), **HOW)
    told = [(m.ttl, m.pinned, m.group) for m in ms.all]
    assert told==[(300,False,'g'), (None,True,None), (None,False,'g')]
    g = ms.residency.groups['g']
    assert (g.together, g.alone)==(True, False)

def in_a_group(how, *pinned):
    "A file of three models, of which `a` and `b` are in a group"
    models = [f'  {n}: {{model: tiny, pin: {str(n in pinned).lower()}}}' for n in 'abc']
    return '\n'.join(['models:', *models, f'groups: {{g: {{members: [a, b], {how}}}}}'])

@pytest.mark.parametrize('how,pinned,out', [
    ('', 'a', 'b'), ('exclusive: true', 'a', 'bc'), ('swap: false, exclusive: true', 'a', 'c'),
    ('exclusive: true', 'c', 'ab'), ('', 'ab', 'b'), ('swap: false, exclusive: true', 'bc', 'ac')])
def test_groups_that_keep_a_model_out_for_ever(how, pinned, out):
    "As one that is pinned is in its way: refused, each with its line"
    e = refusal(in_a_group(how, *pinned))
    found = [e,*e.others]
    assert [x.line for x in found]==['abc'.index(n)+2 for n in out]
    for n,x in zip(out, found):
        assert f'models.{n} may not be resident beside' in x.msg and 'Unpin' in x.hint

@pytest.mark.parametrize('how,pinned', [
    ('', ''), ('exclusive: true', ''), ('', 'c'), ('swap: false', 'abc'),
    ('swap: false, exclusive: true', '')])
def test_groups_that_take_turns(how, pinned):
    fleet_of(in_a_group(how, *pinned), env={})

# -- other servers -------------------------------------------------------------------------------

class Elsewhere:
    "Another server of chat: keeps what it was asked, and may be down"
    def __init__(self, *models):
        self.models,self.asked,self.down = models,[],False
    async def __call__(self, scope, receive, send):
        if scope['type']!='http':
            return
        status,said = await self.answer(HttpRequest(scope, receive))
        await JSONResponse(said, status)(scope, receive, send)
    async def answer(self, q):
        if self.down:
            return 503,dict(error=dict(message='down'))
        if q.url.path.endswith('/models'):
            return 200,dict(data=[dict(id=m) for m in self.models])
        b = await q.json()
        self.asked.append(b)
        said = dict(role='assistant', content=f'{b["model"]} says so')
        return 200,dict(
            id='c', object='chat.completion', model=b['model'],
            choices=[dict(index=0, message=said, finish_reason='stop')],
            usage=dict(prompt_tokens=3, completion_tokens=2))

FAR = '''
models: {near: {model: tiny}}
names:
  wise: {model: away/big, system: "You are wise.", sampling: {temperature: 0.5}, keywords: [why]}
  other: big
  "gpt-4*": away/big
routes: {auto: [wise, away/big, near]}
upstreams: {away: {url: URL, models: ["b*"]}}
fallbacks: {away/big: [near], retries: 1, cooldown: 1s}
'''.replace('[wise, away/big, near]', '[wise, near]')

def models_of(f, runner):
    "The models of a fleet, of which one is here"
    from atlas.service.reload import stand_ins,upstreams_of
    near = ReadyModel('near', ['near'], runner.info, tok, ChatTemplate(TEMPLATE), runner=runner)
    ms = Models([Served(['near'], near)], upstreams=upstreams_of(f))
    ms.names,ms.fallbacks = Names(f),stand_ins(f)
    ms.meet()
    return ms

@contextmanager
def beside(app, text=FAR):
    """A fleet with one model here and another server; its client, and what it takes to read its
    file again"""
    from scripted import running
    with running(app) as url:
        r = Recorder('near')
        ms = models_of(fleet_of(text.replace('URL', f'"{url}/v1"'), env={}), r)
        with TestClient(create_app(ms), base_url='http://localhost') as http:
            def ask(model, text='Tell me', **kw):
                messages = [dict(role='user', content=text)]
                asked = dict(model=model, messages=messages)|kw
                return http.post('/v1/chat/completions', json=asked)
            yield SimpleNamespace(http=http, models=ms, near=r, url=url, ask=ask)

def test_names_lead_to_other_servers():
    "A persona over a model elsewhere: prompt and sampling go there; a plain name passes through"
    app = Elsewhere('big','bigger')
    with beside(app) as s:
        r = s.ask('auto', 'But why?')
        assert r.status_code==200
        assert r.json()['choices'][0]['message']['content']=='big says so'
        assert r.headers['x-atlas-route']=='auto > wise (keyword why) > away/big (persona)'
        b = app.asked[-1]
        assert (b['model'], b['temperature'])==('big',.5)
        assert b['messages'][0]==dict(role='system', content='You are wise.')
        r = s.ask('gpt-4o', temperature=.1)
        assert r.headers['x-atlas-route']=='gpt-4o > away/big (gpt-4*)'
        plain = dict(model='big', messages=[dict(role='user', content='Tell me')], temperature=.1)
        assert app.asked[-1]==plain, 'byte for byte'

def test_which_names_other_servers_have():
    app = Elsewhere('big','bigger')
    with beside(app) as s:
        assert s.ask('other').json()['choices'] and app.asked[-1]['model']=='big'
        assert s.ask('bigger').json()['model']=='bigger', 'it is in the list of that server'
        r = s.ask('auto', 'Hello')
        assert r.headers['x-atlas-route']=='auto > near (no keyword)'
        assert r.json()['model']=='auto' and s.near.seen
        assert s.ask('nobody').status_code==404
        listed = {d['id']:d for d in s.http.get('/v1/models').json()['data']}
        assert listed['wise']['persona_of']=='away/big'
        assert listed['auto']['routes']==['wise','near']

def test_ours_stands_in_for_another_servers():
    app = Elsewhere('big','bigger')
    with beside(app) as s:
        app.down = True
        r = s.ask('gpt-4o')
        assert r.status_code==200 and r.headers['x-atlas-model']=='near'
        assert r.headers.get_list('x-atlas-route')==[
            'fallback: near for away/big (upstream_error)', 'gpt-4o > away/big (gpt-4*)']

BACKUP = '''
models: {near: {model: tiny}}
names:
  wise: {model: away/big, system: "You are wise.", sampling: {temperature: 0.5, top_p: 0.9}}
  soft: {model: near, sampling: {temperature: 0.25}}
upstreams: {away: {url: URL, models: ["b*"]}}
fallbacks: {near: [wise], retries: 1, cooldown: 1s}
'''

def told(app):
    "What the last request to another server said: model, sampling and the first message"
    b = app.asked[-1]
    return b['model'],b.get('temperature'),b.get('top_p'),b['messages'][0]['content']

def test_a_persona_stands_in():
    "With its prompt and sampling; where a persona was asked for, that one's count first"
    app = Elsewhere('big')
    with beside(app, BACKUP) as s:
        assert s.ask('near').headers.get('x-atlas-route') is None and not app.asked
        s.near.healthy = False
        r = s.ask('near')
        assert r.json()['choices'][0]['message']['content']=='big says so'
        assert r.headers['x-atlas-route']=='fallback: wise for near (unavailable)'
        assert told(app)==('big', .5, .9, 'You are wise.')
        for model,kw,t in ('soft',{},.25),('near',dict(temperature=.75),.75):
            assert s.ask(model, **kw).status_code==200
            assert told(app)==('big', t, .9, 'You are wise.')
        s.near.healthy = True
        s.models.fallbacks.down.clear()
        n = len(app.asked)
        assert s.ask('near').status_code==200 and len(app.asked)==n, 'nothing of it is left'

def test_a_persona_of_ours_stands_in():
    "Where the model that fails is another server's"
    app = Elsewhere('big')
    text = BACKUP.replace('{near: [wise]', '{away/big: [soft]')
    with beside(app, text) as s:
        app.down = True
        r = s.http.post('/v1/chat/completions', json=CHAT|dict(model='away/big'))
        assert r.status_code==200 and r.headers['x-atlas-model']=='soft'
        assert s.near.seen[-1].params.temperature==.25

def test_a_file_of_other_servers_alone():
    from atlas.service.reload import build
    from scripted import running
    app = Elsewhere('big')
    with running(app) as url:
        text = f'upstreams: {{away: {{url: "{url}/v1"}}}}\nnames: {{best: away/big}}'
        ms = build(fleet_of(text, env={}))
        with TestClient(create_app(ms), base_url='http://localhost') as http:
            r = http.post('/v1/chat/completions', json=CHAT|dict(model='best'))
            assert r.json()['model']=='big'
            assert http.post('/models/unload', json=dict(model='best')).status_code==400

@running_test
async def test_reload_changes_other_servers(tmp_path):
    from scripted import running
    def text(away, same):
        return f'''
models: {{one: {{load_on_startup: true}}}}
names: {{far: away/big}}
upstreams: {{away: {{url: "{away}/v1"}}, same: {{url: "{same}/v1"}}}}'''
    with running(Elsewhere('big')) as url,running(Elsewhere('big')) as url2:
        async with following(tmp_path/'atlas.yaml', text(url, url)) as (file,ms):
            away,same = ms.upstreams
            assert ms.find('far').upstream is away
            await reloaded(file, text(url2, url)+'\nfallbacks: {one: [away/big]}')
            assert [u.name for u in ms.upstreams]==['away','same']
            assert ms.upstreams[1] is same and ms.upstreams[0] is not away
            assert ms.find('far').upstream is ms.upstreams[0]
            assert ms.fallbacks.to==dict(one=['away/big'])
            await happens(lambda: not ms.parting)

@running_test
async def test_reload_without_other_servers(tmp_path):
    from scripted import running
    with running(Elsewhere('big')) as url:
        ours = 'models: {one: {load_on_startup: true}}\n'
        away = f'upstreams: {{away: {{url: "{url}/v1"}}}}\nnames: {{far: away/big}}'
        async with following(tmp_path/'atlas.yaml', ours+away) as (file,ms):
            await ms.get('one')
            pid = ms.find('one').child.pid
            await reloaded(file, ours+'names: {far: one}')
            assert not ms.upstreams and ms.fallbacks is None
            assert [m.name for m in ms.all]==['one'] and ms.find('far').child.pid==pid

class Watching:
    "In place of those who watch: how often, when they begin and end"
    def __init__(self):
        self.begun,self.ended = [],[]
    def __call__(self, entry):
        async def run(models):
            self.begun.append((entry.every, models))
            try:
                await asyncio.Event().wait()
            finally:
                self.ended.append(entry.every)
        return run

@running_test
async def test_who_watches_hears_of_a_changed_file(tmp_path, monkeypatch):
    from atlas.service import reload
    seen = Watching()
    monkeypatch.setattr(reload, 'watching', seen)
    text = FIRST+'watch: {every: 1m}'
    async with following(tmp_path/'atlas.yaml', text, lazy=True) as (file,ms):
        async def changed(text):
            file.path.write_text(text)
            await file.reload()
        f, = ms.beside
        task = asyncio.create_task(f(ms))
        await happens(lambda: seen.begun==[(60, ms)])
        await changed(text.replace('uno', 'eins'))
        await changed(text.replace('1m', '2m'))
        await happens(lambda: [e for e,_ in seen.begun]==[60,120] and seen.ended==[60])
        await changed(FIRST)
        await happens(lambda: seen.ended==[60,120])
        task.cancel()
