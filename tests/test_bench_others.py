"""`atlas bench serve` beside servers and tools of others: streams in the shapes of vLLM, Ollama,
SGLang and llama.cpp, in time that is made up; certificates; and the files that aiperf reads."""
import json,ssl,sys
from dataclasses import dataclass
from pathlib import Path
import jsonschema,pytest
from atlas.use.bench_files import read_measurements
from test_bench_serve import HEAD,LAST,Known,asked,chunk,counted_first,run,serving
from test_http import pair  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from fake_upstream import HELLO,upstream  # noqa: E402

# -- streams as others send them -------------------------------------------------------------------

def data(d): return f'data: {json.dumps(d)}\n\n'.encode()

def delta(finish=None, usage=False, **d):
    "An event of a choice; `usage` is null in it, where it is in all others"
    c = dict(index=0, delta=d, finish_reason=finish, logprobs=None)
    more = {} if usage is False else dict(usage=usage)
    return data(dict(id='chatcmpl-1', object='chat.completion.chunk', choices=[c])|more)

def total(n, prompt=9, **more): return dict(prompt_tokens=prompt, completion_tokens=n,
    total_tokens=n+prompt)|more

def counts(n, choices=(), **more):
    "An event of counts alone"
    found = [] if choices==() else choices
    return data(dict(id='chatcmpl-1', choices=found, usage=total(n))|more)

DONE = b'data: [DONE]\n\n'
ROLE = delta(role='assistant', content='')

@dataclass
class Shape:
    "What a server sends, at which second, and what is true of it"
    events:list # Pairs of seconds and bytes
    first:float|None # Second of the first token
    tokens:int # Of the answer
    arrivals:int # Events that have something of the answer
    doubt:str|None = None
    error:str|None = None
    last:bool = True # Does the body end as it should?

def steps(start, *parts):
    "Parts a tenth of a second apart, from `start`"
    return [(round(start+.1*i, 3), p) for i,p in enumerate(parts)]

THREE = [delta(content=c) for c in 'abc']
THOUGHT = 'Hm. '

SHAPES = {
    # An empty delta with the role, null usage in each event, counts in one without choices
    'vllm': Shape(
        [(.2, ROLE), *steps(.5, *[delta(content=c, usage=None) for c in 'abc'],
            delta('stop', content='', usage=None), counts(4), DONE)], .5, 4, 3),
    # Counts that grow in each event: the last is right
    'vllm, continuous': Shape(
        [(.2, delta(role='assistant', content='', usage=total(0))),
            *steps(.5, *[delta(content=c, usage=total(i+1)) for i,c in enumerate('abc')],
                delta('length', content='', usage=total(3)), counts(3), DONE)], .5, 3, 3),
    # Some send null instead of an empty list
    'null choices': Shape(
        steps(.5, *THREE, delta('stop'), counts(3, None), DONE), .5, 3, 3),
    # Thoughts under two names at once are one text
    'vllm, thinking': Shape(
        [(.2, ROLE), *steps(.4, delta(reasoning=THOUGHT, reasoning_content=THOUGHT),
            delta(content='a'), delta('stop', content=''), counts(3), DONE)], .4, 3, 2),
    'vllm, thinking before': Shape(
        [(.2, ROLE), *steps(.4, delta(reasoning_content=THOUGHT, content=None),
            delta(content='a'), delta('stop'), counts(3), DONE)], .4, 3, 2),
    # A draft that was accepted: two tokens in an event
    'two at once': Shape(
        steps(.5, delta(content='ab'), delta(content='cd'), delta('stop'), counts(4), DONE),
        .5, 4, 2),
    # The role in every event
    'ollama': Shape(
        steps(.5, *[delta(role='assistant', content=c) for c in 'abc'],
            delta('stop', role='assistant', content=''), counts(4), DONE), .5, 4, 3),
    'ollama, thinking': Shape(
        steps(.5, delta(role='assistant', content='', reasoning=THOUGHT),
            delta(role='assistant', content='a'), delta('stop', role='assistant', content=''),
            counts(4), DONE), .5, 4, 2),
    # It knew no stream_options before 0.5.2
    'ollama, before counts': Shape(
        steps(.5, *[delta(role='assistant', content=c) for c in 'abc'],
            delta('stop', role='assistant', content=''), DONE), .5, 3, 3, 'usage is missing'),
    # It fails in the middle: an empty event, and no last one
    'ollama, failed': Shape(
        steps(.5, *THREE, delta(role='assistant', content='')), .5, 0, 0,
        error='ended without its last event'),
    # Comments that keep a connection, before the first token and among others
    'comments': Shape(
        [(.1, b': keep-alive\n\n'), (.2, b':\n\n'), *steps(.5, THREE[0], b': ping\n\n', *THREE[1:],
            delta('stop'), counts(3), DONE)], .5, 3, 3),
    'carriage returns': Shape(
        [(t, p.replace(b'\n', b'\r\n')) for t,p in
            steps(.5, *THREE, delta('stop'), counts(3), DONE)], .5, 3, 3),
    'no space, named events': Shape(
        steps(.5, *[b'event: message\n'+e.replace(b'data: ', b'data:') for e in THREE],
            delta('stop'), counts(3), DONE), .5, 3, 3),
    # Counts with the last choice, as before there was include_usage
    'counts with the end': Shape(
        steps(.5, *THREE, delta('stop', usage=total(3)), DONE), .5, 3, 3),
    'llama.cpp': Shape(
        [(.2, delta(role='assistant', content=None)), *steps(.5, *THREE, delta('stop'),
            counts(3, timings=dict(prompt_ms=1., predicted_ms=2.)), DONE)], .5, 3, 3),
    # A call whose arguments come in pieces
    'a call': Shape(
        steps(.5, delta(role='assistant', content=None, tool_calls=[dict(index=0, id='c1',
            type='function', function=dict(name='weather', arguments=''))]),
            delta(tool_calls=[dict(index=0, function=dict(arguments='{}'))]),
            delta('tool_calls'), counts(12), DONE), .5, 12, 2),
    # Errors in a stream that began well, and an end as if nothing were
    'vllm, failed': Shape(
        steps(.5, *THREE, data(dict(error=dict(object='error', message='CUDA', code=500))), DONE),
        .5, 0, 0, error='CUDA'),
    'sglang, failed': Shape(
        steps(.5, data(dict(error=dict(message='Aborted', type='Abort', code=503))), DONE),
        None, 0, 0, error='Aborted'),
    'tgi, failed': Shape(
        steps(.5, THREE[0], b'event: error\n'+data(dict(error='Overloaded', error_type='x'))),
        .5, 0, 0, error='Overloaded'),
}

def script(shape):
    "What is sent, in chunks of HTTP"
    out = [(t, chunk(p)) for t,p in shape.events]
    out[0] = (out[0][0], HEAD+out[0][1])
    if shape.last:
        out[-1] = (out[-1][0], out[-1][1]+LAST)
    return out

def sweep_of(shape):
    "What becomes of three answers of a shape"
    known = Known(counted_first(lambda i,_: script(shape)))
    ((s,records),),_ = known.sweep(asked(3), quiet=5.)
    return s,records[0].answer

@pytest.mark.parametrize('name', [n for n,shape in SHAPES.items() if not shape.error])
def test_the_shape_of_others(name):
    "Counts and the first token are what was sent"
    shape = SHAPES[name]
    s,a = sweep_of(shape)
    assert not s['errors'] and s['output_tokens']==3*shape.tokens
    assert (a.tokens,len(a.arrivals))==(shape.tokens,shape.arrivals)
    assert s['time_to_first_token_ms']['p50']==pytest.approx(1e3*shape.first)
    assert [d['count'] for d in s['doubts']]==[3]*bool(shape.doubt)
    assert all(shape.doubt in d['error'] for d in s['doubts'])

@pytest.mark.parametrize('name', [n for n,shape in SHAPES.items() if shape.error])
def test_the_failures_of_others(name):
    "They are called what they were"
    s,_ = sweep_of(SHAPES[name])
    assert [(SHAPES[name].error in e['error'],e['count']) for e in s['errors']]==[(True,3)]

# -- counts that are none --------------------------------------------------------------------------

def usage(**u): return data(dict(choices=[], usage=dict(prompt_tokens=9, completion_tokens=3)|u))
def timings(t): return data(dict(choices=[], usage=total(3), timings=t))

COUNTED = {
    'null': usage(completion_tokens=None), 'a text': usage(completion_tokens='3'),
    'a prompt in text': usage(prompt_tokens='9'), 'a list': data(dict(choices=[], usage=[1])),
    'no number': usage(completion_tokens=float('nan')), 'less than none': usage(prompt_tokens=-9),
    'a cache in text': usage(prompt_tokens_details=dict(cached_tokens='x')),
    'more cached than asked': usage(prompt_tokens_details=dict(cached_tokens=90))}
TIMED = {
    'null': timings(dict(prompt_ms=None)), 'a text': timings(dict(prompt_ms='x')),
    'a list': timings([1])}
FAILED = {
    'nested': dict(error=dict(error=dict(message='It broke'))),
    'flat': dict(object='error', message='It broke', type='BadRequestError', code=400),
    'a text': dict(error='It broke'), 'without a message': dict(error=dict(type='It broke'))}

def lied(raw, requests=2):
    "What becomes of answers whose fourth event is `raw`"
    events = steps(.5, *THREE, raw, delta('stop'), DONE)
    known = Known(counted_first(lambda i,_: script(Shape(events, .5, 3, 3))))
    ((s,_),),_ = known.sweep(asked(requests), quiet=5.)
    json.dumps(s, allow_nan=False)
    return s

@pytest.mark.parametrize('how', COUNTED)
def test_counts_that_are_none(how):
    "It is told, and nothing else of the sweep is lost"
    s = lied(COUNTED[how])
    assert s['requests']==2 and (s['doubts'] or s['errors'])

@pytest.mark.parametrize('how', TIMED)
def test_stages_that_are_no_times(how):
    s = lied(TIMED[how])
    assert s['output_tokens']==6 and not s['errors'] and not s['stages_ms']

@pytest.mark.parametrize('how', FAILED)
def test_errors_in_other_words(how):
    ((e,),) = [lied(data(FAILED[how]))['errors']]
    assert 'It broke' in e['error'] and e['count']==2

def test_an_error_that_is_null_is_none():
    s = lied(data(dict(choices=[], usage=total(3), error=None)))
    assert s['output_tokens']==6 and not s['errors']

def test_a_refusal_is_an_answer():
    s = lied(delta(refusal='I cannot')+usage(completion_tokens=4))
    assert s['output_tokens']==8 and not s['doubts']

def test_nothing_comes_after_done():
    "A connection that stays open then keeps nobody waiting"
    shape = Shape(steps(.5, *THREE, delta('stop'), usage(), DONE), .5, 3, 3, last=False)
    ((s,_),),_ = Known(counted_first(lambda i,_: script(shape))).sweep(asked(2), quiet=5.)
    assert not s['errors'] and s['request_latency_ms']['max']==pytest.approx(1000.)

# -- certificates ----------------------------------------------------------------------------------

def serves(c):
    "Has one model, and says hello"
    if c.path=='/v1/models':
        return c.whole(dict(data=[dict(id='m', owned_by='somebody')]))
    if c.method=='GET':
        return c.whole({}, 404)
    c.stream(*HELLO)

@pytest.fixture
def secure(pair):  # noqa: F811
    "A server with a certificate of its own: its address, and that certificate"
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*pair)
    with upstream(serves, tls) as u:
        yield f'https://localhost:{u.port}/v1',pair[0]

def test_a_certificate_that_is_known(secure, monkeypatch):
    url,cert = secure
    monkeypatch.setenv('SSL_CERT_FILE', cert)
    r = run('bench', 'serve', url, '--request-count', '3', '--json')
    assert r.exit_code==0, r.output
    (s,) = json.loads(r.stdout)['runs']
    assert s['output_tokens']==21 and not s['errors']

def test_a_certificate_that_is_not(secure, monkeypatch):
    monkeypatch.delenv('SSL_CERT_FILE', raising=False)
    r = run('bench', 'serve', secure[0], '--request-count', '3')
    said = ' '.join(r.stderr.split())
    assert r.exit_code==1 and 'is not trusted: self-signed certificate' in said
    assert 'SSL_CERT_FILE' in said and 'Traceback' not in r.output

def test_roots_are_read_once(secure, monkeypatch):
    "And not in the time of each request"
    url,cert = secure
    monkeypatch.setenv('SSL_CERT_FILE', cert)
    read,real = [],ssl.create_default_context
    def counted(*args, **kw):
        read.append(1)
        return real(*args, **kw)
    monkeypatch.setattr(ssl, 'create_default_context', counted)
    r = run('bench', 'serve', url, '--request-count', '9')
    assert r.exit_code==0 and len(read)<5, r.output

# -- the files of aiperf ---------------------------------------------------------------------------

AIPERF = Path(__file__).parent/'data/aiperf'
SCHEMA = json.loads((AIPERF/'schema.json').read_text())
NAME = 'profile_export_aiperf.json'

def wrong(d, kind):
    "What a `summary` or a `record` has that aiperf does not read"
    schema = {'$ref': f'#/$defs/{kind}', '$defs': SCHEMA['$defs']}
    found = jsonschema.Draft202012Validator(schema).iter_errors(d)
    return [f'{"/".join(map(str, e.absolute_path))}: {e.message}' for e in found]

def load(path): return json.loads(path.read_text())

@pytest.fixture(scope='module')
def folder(tmp_path_factory):
    "What a sweep of two runs wrote"
    folder = tmp_path_factory.mktemp('artifacts')
    with serving() as (url,_):
        flags = '--concurrency 1,2 --request-count 4 --json --artifact-dir'
        r = run('bench', 'serve', url, *flags.split(), str(folder))
    assert r.exit_code==0, r.output
    return folder

def test_the_schema_takes_what_aiperf_wrote():
    "And refuses it with another unit, or with less"
    d = load(AIPERF/NAME)
    assert wrong(d, 'summary')==[]
    assert wrong(d|dict(request_latency=d['request_latency']|dict(unit='sec')), 'summary')
    assert wrong({k: v for k,v in d.items() if k!='input_config'}, 'summary')

def test_our_summaries_are_aiperfs(folder):
    for i in (0,1):
        d = load(folder/f'run_{i:04}'/NAME)
        assert wrong(d, 'summary')==[]
        (phase,) = [p for p in d['input_config']['phases'] if p['kind']=='profiling']
        assert (phase['concurrency'],phase['requests'])==(i+1,4)

def test_our_requests_are_aiperfs(folder):
    "Four lines a run, one after the other by the clock on the wall"
    for i in (0,1):
        lines = (folder/f'run_{i:04}/profile_export.jsonl').read_text().splitlines()
        found = [json.loads(l) for l in lines]
        assert len(found)==4 and [wrong(d, 'record') for d in found]==[[]]*4
        spans = [d['metadata'] for d in found]
        assert all(0<m['request_end_ns']-m['request_start_ns']<3600*10**9 for m in spans)

def test_our_table_has_aiperfs_columns(folder):
    head = (folder/'run_0000/profile_export_aiperf.csv').read_text().splitlines()[0]
    assert head=='Metric,avg,min,max,sum,p1,p5,p10,p25,p50,p75,p90,p95,p99,std'

def test_a_folder_of_aiperf_is_read(tmp_path):
    "It has each run twice, with its warm-up: by itself, and as a phase of a whole"
    raw = (AIPERF/NAME).read_text()
    for part in ('.', 'phases/warmup', 'phases/profiling'):
        (tmp_path/part).mkdir(parents=True, exist_ok=True)
        (tmp_path/part/NAME).write_text(raw)
    m, = read_measurements([tmp_path])
    assert [r.concurrency for r in m.runs]==[2]
    assert (m.server.model,m.server.url)==('tiny','http://127.0.0.1:18090')
