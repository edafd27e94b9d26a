"""A load on servers that are known to the millisecond, in time that is made up; on some that
misbehave; on ours and on llama.cpp's; and cut off in the middle."""
import asyncio,json,signal,subprocess,sys,threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler,ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
import numpy as np,pytest
from typer.testing import CliRunner
from atlas.use import cli
from atlas.use.bench_client import Site
from atlas.use.bench_data import ScriptedConversation,Synthetic,UserTurn
from atlas.use.bench_load import MadeUpTime,due,levels
from atlas.use.bench_report import ServeReport
from atlas.use.bench_rounds import FILE_SHARES
from atlas.use.bench_serve import SweepPlan,Target,sweep
from atlas.use.bench_summary import objectives
from helpers.waiting import WAIT

def run(*args):
    return CliRunner().invoke(cli.app, list(args), prog_name='atlas')

# -- a server of which everything is known ---------------------------------------------------------

def event(**d): return f'data: {json.dumps(d)}\n\n'.encode()
def token(text='a'): return event(choices=[dict(delta=dict(content=text))])
def counts(n, prompt=0):
    return event(choices=[], usage=dict(prompt_tokens=prompt, completion_tokens=n))
END = event(choices=[dict(delta={}, finish_reason='stop')])
DONE = b'data: [DONE]\n\n'
HEAD = b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n'
LAST = b'0\r\n\r\n'

def chunk(raw): return b'%x\r\n%s\r\n' % (len(raw), raw)

class Known:
    "A server in made-up time: `script(i, body)` gives (seconds, bytes) of the `i`th request"
    def __init__(self, script):
        self.script,self.bodies,self.at = script,[],[]
    async def connect(self, site, make):
        p,loop = make(),asyncio.get_running_loop()
        def write(raw):
            body = json.loads(raw.split(b'\r\n\r\n', 1)[1])
            for seconds,said in self.script(len(self.bodies), body):
                loop.call_later(seconds, p.data_received, said)
            self.bodies.append(body)
            self.at.append(loop.time())
        return SimpleNamespace(write=write, close=lambda: None)
    def sweep(self, p, quiet=600., stop=None):
        site = Site('http://nowhere', quiet=quiet, connect=self.connect)
        async def whole():
            halt = asyncio.Event()
            if stop is not None:
                asyncio.get_running_loop().call_later(stop, halt.set)
            return await sweep(Target(site, 'm'), p, halt)
        return MadeUpTime().run(whole())

def answer(first, each, n):
    "A stream whose first token takes so many seconds, and each next so many"
    out = [(first+i*each, chunk(token())) for i in range(n)]
    out[0] = (first, HEAD+out[0][1])
    end = first+(n-1)*each
    return [*out, (end, chunk(END+counts(n, 9)+DONE)+LAST)]

DELAYS = np.random.default_rng(7).uniform(.05, 2., (40,2)).round(3)

def asked(requests=40, at_a_time=(1,), **kw):
    kw.setdefault('data', Synthetic(output_mean=20))
    return SweepPlan(levels(at_a_time), requests, warmup=0, **kw)

def counted_first(script):
    "The same, after the two requests by which a load asks how the server counts"
    def whole(i, body):
        if i>1:
            return script(i-2, body)
        n = len(body['messages'][0]['content'].split())
        return [(0., HEAD+chunk(token()+counts(1, n)+DONE)+LAST)]
    return whole

def close(told, ms):
    "Is a summary of times that of these milliseconds?"
    made = dict(mean=ms.mean(), min=ms.min(), max=ms.max())
    made |= {f'p{p}': np.percentile(ms, p) for p in FILE_SHARES}
    return told==pytest.approx(made, abs=.002)

def test_every_percentile_is_what_was_made():
    known = Known(counted_first(lambda i,_: answer(*DELAYS[i], 20)))
    ((s,records),),complete = known.sweep(asked())
    first,each = 1e3*DELAYS.T
    whole = first+19*each
    assert complete and len(records)==40
    assert close(s['time_to_first_token_ms'], first)
    assert close(s['inter_token_latency_ms'], each)
    assert close(s['request_latency_ms'], whole)
    assert close(s['inter_chunk_latency_ms'], np.repeat(each, 19))
    assert s['seconds']==pytest.approx(whole.sum()/1e3)
    assert s['output_tokens']==800 and s['input_tokens']==360
    assert s['output_token_throughput']==pytest.approx(800e3/whole.sum())

def test_goodput_counts_what_was_good_in_everything():
    limits = dict(time_to_first_token=1000., inter_token_latency=1500.)
    text = ' '.join(f'{k}:{v:g}' for k,v in limits.items())
    known = Known(counted_first(lambda i,_: answer(*DELAYS[i], 20)))
    ((s,_),),_ = known.sweep(asked(limits=objectives(text)))
    first,each = 1e3*DELAYS.T
    fine = ((first<=1000)&(each<=1500)).sum()
    assert 0<fine<40 and s['goodput']*s['seconds']==pytest.approx(fine)

def test_concurrency_is_never_more_and_never_less():
    known = Known(counted_first(lambda i,_: answer(1., 0., 1)))
    runs,_ = known.sweep(asked(12, (1,3,12)))
    assert [(s['most_under_way'],s['seconds']) for s,_ in runs]==[(1,12.),(3,4.),(12,1.)]

@pytest.mark.parametrize('kind', ['poisson','constant','burst'])
def test_requests_come_when_they_are_due(kind):
    "However slow the server is; and the same times for the same seed"
    known = Known(counted_first(lambda i,_: answer(100., 0., 1)))
    p = SweepPlan(levels((), (4.,), kind), 30, warmup=0, burst=5, data=Synthetic(seed=3))
    ((s,_),),_ = known.sweep(p)
    came = np.array(known.at[2:])-known.at[2]
    assert came==pytest.approx(due(30, 4., kind, 5, np.random.default_rng(3)))
    assert s['late_ms']==0 and s['most_under_way']==30

def test_a_load_that_waits_says_how_late_it_was():
    known = Known(counted_first(lambda i,_: answer(1., 0., 1)))
    ((s,_),),_ = known.sweep(SweepPlan(levels((1,), (2.,), 'constant'), 4, warmup=0))
    assert s['late_ms']==pytest.approx(1500.)

# -- what is asked ---------------------------------------------------------------------------------

def test_the_same_seed_asks_the_same():
    def bodies(seed):
        known = Known(counted_first(lambda i,_: answer(0., 0., 1)))
        data = Synthetic(input_stddev=40, output_stddev=9, form=.3, tools=.3, seed=seed)
        known.sweep(asked(20, data=data))
        return known.bodies[2:]
    assert bodies(1)==bodies(1)!=bodies(2)
    assert len({len(str(b['messages'])) for b in bodies(1)})>15
    kinds = ['tools' if 'tools' in b else 'response_format' in b for b in bodies(1)]
    assert len(set(kinds))==3

def test_prompts_have_the_tokens_that_were_asked_for():
    "By a server that takes three tokens for a word, and 40 around"
    def script(i, body):
        n = 3*len(body['messages'][0]['content'].split())+40
        return [(0., HEAD+chunk(token()+counts(1, n)+DONE)+LAST)]
    ((s,records),),_ = Known(script).sweep(asked(10, data=Synthetic(input_mean=340)))
    assert {r.answer.prompt for r in records}=={340} and s['input_tokens']==3400

def test_a_conversation_has_its_answers_in_it():
    said = iter('abc')
    def script(i, body):
        return [(0., HEAD+chunk(token(next(said))+counts(1)+DONE)+LAST)]
    c = ScriptedConversation('c', [UserTurn(t) for t in ('one','two','three')])
    known = Known(script)
    known.sweep(asked(3, file=[c]))
    roles = [(m['role'][0],m['content']) for m in known.bodies[-1]['messages']]
    assert roles==[('u','one'),('a','a'),('u','two'),('a','b'),('u','three')]

def test_without_a_stream():
    def script(i, body):
        assert 'stream' not in body
        choice = dict(message=dict(content='Hi'), finish_reason='stop')
        raw = json.dumps(dict(choices=[choice], usage=dict(prompt_tokens=4, completion_tokens=2)))
        head = f'HTTP/1.1 200 OK\r\ncontent-length: {len(raw)}\r\n\r\n'
        return [(.5, (head+raw).encode())]
    ((s,_),),_ = Known(script).sweep(asked(4, streaming=False))
    assert s['time_to_first_token_ms'] is None and s['request_latency_ms']['p99']==500.
    assert s['output_tokens']==8 and not s['errors'] and not s['doubts']

# -- servers that misbehave ------------------------------------------------------------------------

REFUSAL = b'{"error":{"message":"Too many"}}'
BAD = {
    'refuses': ([(.1, b'HTTP/1.1 429 No\r\ncontent-length: 32\r\n\r\n'+REFUSAL)], '429: Too many'),
    'never answers': ([], 'Nothing came for 5 seconds'),
    'stops': ([(.1, HEAD+chunk(token()))], 'Nothing came for 5 seconds'),
    'broken': ([(.1, HEAD+chunk(b'data: {"choices": [\n\n'))], 'An event is no JSON'),
    'fails': ([(.1, HEAD+chunk(token()+event(error=dict(message='It broke'))))], 'It broke'),
    'ends early': ([(.1, HEAD+chunk(token())+LAST)], 'ended without its last event'),
    'is no server': ([(.1, b'SSH-2.0\r\n')], 'Expected HTTP')}

@pytest.mark.parametrize('how', BAD)
def test_errors_are_counted_and_the_rest_is_measured(how):
    "Every other request goes wrong"
    script,said = BAD[how]
    known = Known(counted_first(lambda i,_: script if i%2 else answer(.5, .1, 3)))
    ((s,_),),complete = known.sweep(asked(6), quiet=5.)
    (e,) = s['errors']
    assert said in e['error'] and e['count']==3 and complete
    assert s['requests']==6 and s['output_tokens']==9
    assert s['time_to_first_token_ms']['max']==pytest.approx(500.)

LIES = {
    'fewer': (counts(2), 'fewer tokens than events'),
    'more': (counts(90), 'than the text has bytes'),
    'over': (counts(1000), 'more tokens than were asked for'), 'none': (b'', 'usage is missing')}

@pytest.mark.parametrize('how', LIES)
def test_counts_that_cannot_be_are_told(how):
    usage,said = LIES[how]
    raw = HEAD+chunk(token()*3+usage+DONE)+LAST
    ((s,_),),_ = Known(counted_first(lambda i,_: [(0., raw)])).sweep(
        asked(4, data=Synthetic(output_mean=100)))
    (d,) = s['doubts']
    assert said in d['error'] and d['count']==4 and not s['errors']
    report = str(ServeReport(dict(model='m', url='u'), {}, [s]))
    assert said in report

def test_what_had_come_is_kept():
    known = Known(counted_first(lambda i,_: answer(1., 0., 1)))
    runs,complete = known.sweep(asked(10, (1,2)), stop=12.5)
    assert not complete and [s['requests'] for s,_ in runs]==[10,4]

# -- the command -----------------------------------------------------------------------------------

class Handler(BaseHTTPRequestHandler):
    "Answers so many requests and then no more; its server has the `state`"
    def log_message(self, *_):
        pass
    def say(self, raw, kind):
        self.send_response(200)
        self.send_header('content-type', kind)
        self.send_header('content-length', str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)
    def do_GET(self):
        raw = json.dumps(dict(data=[dict(id='m', owned_by='somebody')], version='1.2'))
        self.say(raw.encode(), 'application/json')
    def do_POST(self):
        self.rfile.read(int(self.headers['content-length']))
        state = self.server.state
        state.n += 1
        if state.n<=state.hold:
            return self.say(token()+token('b')+END+counts(2)+DONE, 'text/event-stream')
        state.held.set()
        state.over.wait(WAIT)

@contextmanager
def serving(hold=10**9):
    "A real server, which answers `hold` requests and then no more; `held` is set when it does"
    s = ThreadingHTTPServer(('127.0.0.1', 0), Handler)
    s.daemon_threads = True
    s.state = SimpleNamespace(n=0, hold=hold, held=threading.Event(), over=threading.Event())
    threading.Thread(target=s.serve_forever, daemon=True).start()
    try:
        yield f'http://127.0.0.1:{s.server_address[1]}',s.state
    finally:
        s.state.over.set()
        s.shutdown()
        s.server_close()

@pytest.fixture(scope='module')
def written(tmp_path_factory):
    "What a sweep of two runs printed, and the folder that it wrote"
    folder = tmp_path_factory.mktemp('artifacts')
    with serving() as (url,_):
        flags = '--concurrency 1,2 --request-count 4 --goodput request_latency:60000 --json'
        more = '--generate-plots','--artifact-dir',str(folder)
        r = run('bench', 'serve', url, *flags.split(), *more)
    assert r.exit_code==0, r.output
    return json.loads(r.stdout),folder

def test_the_report(written):
    d,folder = written
    assert (d['kind'],d['version'],d['complete'])==('atlas.bench.serve',1,True)
    s = d['server']
    assert (s['model'],s['engine'],s['version'])==('m','somebody','1.2')
    assert d['load']['concurrency']=='1,2' and d['load']['random_seed']==0
    assert [x['output_tokens'] for x in d['runs']]==[8,8]
    assert d==json.loads((folder/'report.json').read_text())
    assert len((folder/'requests.jsonl').read_text().splitlines())==8
    assert len((folder/'runs.csv').read_text().splitlines())==3

def test_the_plots_of_a_sweep(written):
    "Of each kind two themes and two formats, and each is a picture"
    _,folder = written
    found = sorted((folder/'plots').iterdir())
    names = {p.name.rsplit('_', 1)[0] for p in found}
    assert {'rate_time_to_first_token','request_latency_by_concurrency'}<=names
    ends = {p.name.rsplit('_', 1)[1] for p in found}
    assert ends=={'light.svg','light.png','dark.svg','dark.png'} and len(found)==4*len(names)
    begins = dict(png=b'\x89PNG', svg=b'<?xml')
    assert all(p.read_bytes().startswith(begins[p.suffix[1:]]) for p in found)

PERCENTS = ['p1','p5','p10','p25','p50','p75','p90','p95','p99']

def test_the_report_of_aiperf(written):
    d,folder = written
    a = json.loads((folder/'run_0001/profile_export_aiperf.json').read_text())
    latency = a['request_latency']
    assert list(latency)==['unit','avg','min','max',*PERCENTS,'std','count','sum']
    ours = d['runs'][1]['request_latency_ms']['p99']
    assert latency['unit']=='ms' and latency['p99']==pytest.approx(ours, abs=.001)
    assert a['request_count']==dict(unit='requests', avg=4.) and a['was_cancelled'] is False
    phase, = a['input_config']['phases']
    assert (phase['concurrency'],phase['requests'])==(2,4)

def test_the_tables_of_aiperf(written):
    _,folder = written
    table = (folder/'run_0001/profile_export_aiperf.csv').read_text().splitlines()
    assert table[0]==','.join(['Metric','avg','min','max','sum',*PERCENTS,'std'])
    assert 'Metric,Value' in table
    lines = (folder/'run_0001/profile_export.jsonl').read_text().splitlines()
    metrics = [json.loads(l)['metrics'] for l in lines]
    assert [m['output_sequence_length']['value'] for m in metrics]==[2]*4

@pytest.mark.slow
def test_ctrl_c(tmp_path):
    "While the fourth answer does not come; five were asked before: four to count, one to warm"
    with serving(hold=8) as (url,state):
        p = subprocess.Popen(
            [sys.executable, '-m', 'atlas', 'bench', 'serve', url, '--output', tmp_path/'r.json'],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert state.held.wait(WAIT)
        p.send_signal(signal.SIGINT)
        out,err = p.communicate(timeout=WAIT)
    assert p.returncode==130 and 'Traceback' not in err, err
    d = json.loads((tmp_path/'r.json').read_text())
    assert d['complete'] is False and d['runs'][0]['requests']==3
    assert 'Interrupted' in out

def test_nobody_answered():
    with serving(hold=0) as (url,_):
        r = run('bench', 'serve', url, '--request-count', '2', '--request-timeout-seconds', '0.1')
    assert r.exit_code==1 and 'Nothing came for 0.1 seconds' in r.output

def test_a_server_that_counts_no_prompts():
    "It is told, and a word taken for a token"
    with serving() as (url,_):
        r = run('bench', 'serve', url, '--request-count', '2')
    assert r.exit_code==0 and 'a word of a prompt was taken for one' in r.output

def test_broken_lines(tmp_path, monkeypatch):
    "Before anything is started"
    f = tmp_path/'d.jsonl'
    f.write_text('{"text": "Hello"}\nno JSON\n{"turns": []}\n')
    r = run('bench', 'serve', 'tiny', '--input-file', str(f))
    said = ' '.join(r.stderr.split())
    assert r.exit_code==1 and 'line 2: it is no JSON' in said and 'line 3: nobody asks' in said

# -- real servers ----------------------------------------------------------------------------------

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
STAGES = ['gateway_ms','queue_ms','prefill_ms','decode_ms']

HI = dict(messages=[dict(role='user', content='Hi')], model='fake')
BODIES = {'chat/completions':HI, 'completions':dict(prompt='Hi', model='fake')}

@pytest.mark.parametrize('path', BODIES)
def test_our_server_says_where_the_time_went(path):
    "To whoever asks; and to nobody else"
    from test_server import FakeRunner,local
    client = local(FakeRunner('ok'))
    def post(**kw): return client.post(f'/v1/{path}', json=BODIES[path]|kw)
    plain,told = post().json(),post(return_timings=True).json()
    timings = told['timings']
    assert list(timings)==STAGES and min(timings.values())>=0
    assert set(told)-set(plain)=={'timings'} and set(plain)<set(told)
    stream = post(stream=True, return_timings=True).text
    last = json.loads(stream.split('data: ')[-2])
    assert list(last['timings'])==STAGES and stream.endswith('[DONE]\n\n')
    assert 'timings' not in post(stream=True, stream_options=dict(include_usage=True)).text

@pytest.mark.slow
def test_ours(tmp_path):
    "A model's name starts a server of it"
    flags = '--concurrency 2 --request-count 4 --conversation-turn-mean 2 --output-tokens-mean 6'
    flags += ' --synthetic-input-tokens-mean 40 --json --device cpu'
    r = run('bench', 'serve', 'tiny', *flags.split())
    assert r.exit_code==0, r.output
    d = json.loads(r.stdout)
    (s,) = d['runs']
    assert (d['server']['model'],d['server']['engine'])==('tiny','atlas')
    assert not s['errors'] and not s['doubts'] and set(s['stages_ms'])=={k[:-3] for k in STAGES}

@pytest.mark.slow
def test_llama_cpp(tmp_path):
    pytest.importorskip('xllamacpp', reason='llama.cpp has no wheel for this machine')
    from test_llamacpp import LlamaCpp
    llama = LlamaCpp(tmp_path)
    try:
        flags = '--concurrency 1,2 --request-count 4 --synthetic-input-tokens-mean 120'
        r = run('bench', 'serve', llama.url, *flags.split(), '--output-tokens-mean', '8', '--json')
    finally:
        llama.end()
    assert r.exit_code==0, r.output
    d = json.loads(r.stdout)
    assert d['server']['engine']=='llamacpp' and d['server']['model']=='alphabet'
    for s in d['runs']:
        assert s['output_tokens']==32 and not s['errors'] and not s['doubts']
        assert set(s['stages_ms'])=={'prefill','decode'}
