"""Many requests at once: what is counted of them, what servers may do to their client, and the
command."""
import json,socket,threading
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from unittest import mock
import numpy as np,pytest
from typer.testing import CliRunner
from atlas import LLM
from atlas.ground.core import EngineError,RequestError
from atlas.ground.options import EngineConfig
from atlas.use import cli
from atlas.use.bench_client import TimedAnswer
from atlas.use.bench_rounds import ordinary,percentiles,prompts_of,round_of,through_engine
from atlas.use.bench_throughput import ThroughputPlan,fitting,flags_of
from atlas.use.bench_throughput import serving,through_http

def run(*args):
    return CliRunner().invoke(cli.app, list(args), prog_name='atlas')

# What is asked, and what is counted

def test_prompts_have_nothing_in_common():
    "Neither within a round nor with another; and they are the same again for the same seed"
    ids = np.arange(5, 500)
    rounds = [
        prompts_of('distinct', 20, 64, ids, (7,i))
        for i in range(3)]
    starts = {tuple(p[:8]) for r in rounds for p in r}
    assert len(starts)==60 and min(min(p) for r in rounds for p in r)>=5
    assert rounds[1]==prompts_of('distinct', 20, 64, ids, (7,1))
    assert rounds[1]!=prompts_of('distinct', 20, 64, ids, (8,1))

def test_no_prompt_has_an_image():
    "Ids that stand for one are left out, where a model has any"
    seen = mock.Mock(vocab_size=10, vision=mock.Mock(image_token_id=3, video_token_id=None))
    assert ordinary(seen).tolist()==[
        0,1,2,4,5,6,7,8,
        9]
    assert len(ordinary(mock.Mock(vocab_size=10, vision=None)))==10

def test_percentiles():
    assert percentiles([*range(101)][::-1])==dict(p50=50., p95=95., p99=99.)
    assert percentiles([])=={}

def test_a_failure_is_no_time():
    "What came of a request that failed counts as tokens, and not as a wait"
    bad = TimedAnswer(0., [9.,10.], 2, error='gone')
    load = round_of(
        'http', 'distinct', 2,
        [TimedAnswer(1., [1.5,1.6], 2), bad],
        2.)
    assert (load.tokens,load.rate,load.errors,load.error)==(
        4,2.,1,'gone')
    assert load.first_ms[2]==500. and load.between_ms==[100.]*3

@pytest.fixture(scope='module')
def drafting():
    llm = LLM('tiny', max_seq_len=96, max_num_seqs=3, speculative=True, speculative_adaptive=False)
    yield llm
    llm.close()

def test_drafts_arrive_together(drafting):
    "All tokens are counted, in fewer arrivals; never more requests are under way than were asked"
    most,step = 0,drafting.engine.step
    def counted():
        nonlocal most
        most = max(most, len(drafting.engine.scheduler.seqs))
        return step()
    start = drafting.tokenizer.encode('Once upon a time there was a little girl who')
    with mock.patch.object(drafting.engine, 'step', counted):
        answers = through_engine(drafting, [start]*5, 2, 24)
    assert [a.tokens for a in answers]==[24]*5 and most==2
    assert all(5<len(a.arrivals)<24 for a in answers)
    assert all(np.diff(a.arrivals).min()>0 for a in answers)

# What makes no sense

def test_an_answer_needs_a_context():
    config = EngineConfig('tiny', max_seq_len=64)
    with pytest.raises(
        RequestError, match='128 of an answer are more than the context of tiny, 64'
    ) as e:
        fitting(config, ThroughputPlan(prompt=10))
    assert '--max-seq-len' in e.value.hint
    fitted = fitting(
        config,
        ThroughputPlan(prompt=40, tokens=24, requests=300, concurrency=(300,)))
    assert (fitted.max_seq_len,fitted.max_num_seqs,fitted.max_queue)==(64,300,300)

REFUSED = [
    ('--concurrency 0', 2, 'from 1 up'),
    ('--concurrency 1,x', 2, "'--concurrency'"),
    ('--concurrency 1,64', 1, '32 requests are never 64 at a time'),
    ('--requests 0', 2, '--requests'),
    ('--tokens 0', 2, '--tokens'),
    ('--prompt 0', 2, '--prompt'),
    ('--tokens 100000', 1, '100,000 of an answer are more than the context of tiny'),
    ('--max-seq-len 300', 1, 'or raise --max-seq-len'),
]

@pytest.mark.parametrize('flags,code,said', REFUSED)
def test_refused(flags, code, said, monkeypatch):
    "Before anything is loaded"
    monkeypatch.setattr('atlas.use.llm.LLM', mock.Mock(side_effect=AssertionError))
    r = run('bench', 'throughput', 'tiny', *flags.split())
    assert r.exit_code==code and said in ' '.join(r.stderr.split()), r.stderr

CONFIGS = [
    {},
    dict(max_seq_len=99, max_num_seqs=3, chunk=128, kv_cache_memory=5<<20, overcommit=1.5),
    dict(load_format='dummy', weights='nvfp4', lm_head_dtype='fp8', kv_cache_dtype='fp8'),
    dict(speculative=True, num_speculative_tokens=3, speculative_adaptive=False),
    dict(speculative='ngram', enable_prefix_caching=False, packed=False),
    dict(draft_model='other', scheduling_policy='slai', tbt_deadline_ms=0),
]

@pytest.mark.parametrize('fields', CONFIGS, ids=str)
def test_the_server_is_told_what_the_engine_was(fields, monkeypatch):
    "Flags that are written for a config are read as that config"
    serve,config = mock.Mock(),EngineConfig('m', **fields)
    monkeypatch.setattr('atlas.service.gateway.serve', serve)
    r = run('serve', 'm', *flags_of(config))
    assert r.exit_code==0, r.stderr
    assert serve.call_args.args==([config],)

def test_what_no_flag_means():
    with pytest.raises(RequestError, match='tbt_deadline_ms is None, which no flag'):
        flags_of(EngineConfig('m', tbt_deadline_ms=None))

# What a server may do

@contextmanager
def saying(*pieces):
    "A server that says the same to everybody, piece by piece, and closes"
    def talk(c):
        with c:
            asked = b''
            while b'\r\n\r\n' not in asked:
                asked += c.recv(1<<16)
            for p in pieces:
                c.sendall(p)
    def listen():
        while True:
            try:
                c,_ = s.accept()
            except OSError:
                return
            threading.Thread(target=talk, args=(c,), daemon=True).start()
    with socket.create_server(('127.0.0.1', 0)) as s:
        threading.Thread(target=listen, daemon=True).start()
        yield s.getsockname()[1]
        s.shutdown(socket.SHUT_RDWR)

def chunk(text):
    raw = text.encode() if isinstance(text, str) else text
    return b'%x\r\n%s\r\n' % (len(raw), raw)

def event(**d): return f'data: {json.dumps(d)}\n\n'
def token(i):
    return event(choices=[dict(text='a', token_ids=[i])], usage=None)

HEAD = b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n'
USAGE = event(
    choices=[],
    usage=dict(completion_tokens=5, prompt_tokens_details=dict(cached_tokens=64)))
END = 'data: [DONE]\n\n'

def test_a_stream_in_any_pieces():
    "Events that are cut anywhere, and several at once; the count is the server's, not the events'"
    whole = (
        token(1)
        +event(choices=[dict(text='', token_ids=[])])
        +token(2)+USAGE+END).encode()
    for size in (1,7,1000):
        cut = [
            chunk(whole[i:i+size])
            for i in range(0, len(whole), size)]
        with saying(HEAD, *cut, b'0\r\n\r\n') as port:
            a, = through_http(port, [[1]], 1, 5)
        assert (
            a.tokens,a.cached,len(a.arrivals),
            a.error
        )==(5,64,2,None)

FAILING = [
    ([b'HTTP/1.1 503 Busy\r\n\r\n', b'{"error":{"message":"The queue is \\"full\\""}}'],
     '503: The queue is "full"'),
    ([b'HTTP/1.1 500 Oh\r\n\r\n', b'no JSON'], '500: no JSON'),
    ([HEAD, chunk(token(1)),
      chunk(event(error=dict(message='It broke'))), b'0\r\n\r\n'],
     'It broke'),
    ([HEAD, chunk(token(1))], 'was cut off'),
    ([HEAD, b'ff\r\nhalf'], 'was cut off'),
    ([HEAD, chunk(token(1)+END), b'0\r\n\r\n'], '0 of 5 tokens came'),
    ([HEAD, chunk(USAGE+END), b'0\r\n\r\n'], '0 of 5 tokens came'),
    ([HEAD, b'?\r\n'], 'Invalid character in chunk size'),
    ([], 'closed the connection'),]

@pytest.mark.parametrize('pieces,said', FAILING, ids=[s for _,s in FAILING])
def test_what_fails_is_told(pieces, said):
    with saying(*pieces) as port:
        answers = through_http(port, [[1]]*3, 2, 5)
    assert len(answers)==3 and all(said in a.error for a in answers)

def test_nobody_listens():
    with socket.create_server(('127.0.0.1', 0)) as s:
        port = s.getsockname()[1]
    answers = through_http(port, [[1]]*2, 2, 5)
    assert all('onnect' in a.error for a in answers)

DATA = Path(__file__).parent/'data'

def test_who_cannot_be_served(monkeypatch):
    "It is told before the engine is measured; and what does not start is told as well"
    never = mock.Mock(side_effect=AssertionError)
    monkeypatch.setattr('atlas.use.bench_throughput.rounds', never)
    flags = '--requests', '2', '--concurrency', '1', '--prompt', '9', '--tokens', '3'
    r = run('bench', 'throughput', str(DATA/'smollm2-tied'), *flags)
    assert r.exit_code==1 and 'no tokenizer' in r.stderr and '--no-http' in r.stderr
    with pytest.raises(EngineError, match='did not start') as e:
        with serving(EngineConfig(str(DATA/'nothing'))):
            pass
    assert '--no-http' in e.value.hint

def test_the_engine_alone(monkeypatch):
    "A model that has no words"
    monkeypatch.setattr('atlas.use.bench_throughput.serving', mock.Mock(side_effect=AssertionError))
    flags = '--requests', '2', '--concurrency', '1,2', '--prompt', '9', '--tokens', '3', '--no-http'
    r = run('bench', 'throughput', str(DATA/'smollm2-tied'), *flags, '--json', '--device', 'cpu')
    assert r.exit_code==0, r.stderr
    assert [
        l['tokens']
        for l in json.loads(r.stdout)['loads']
    ]==[6]*4

# All of it

def check_load(l):
    "Three requests of four tokens"
    assert (l['requests'],l['tokens'],l['errors'])==(3,12,0)
    assert 0<l['first_ms'][0]<=l['first_ms'][2]
    assert 0<=l['between_ms'][0]<=l['between_ms'][2] # two may come at once
    assert l['rate']==pytest.approx(12/l['seconds'])
    if l['prompts']=='distinct':
        assert l['cached']==0
    elif l['concurrency']==1:
        assert l['cached']==128

def test_the_command(tmp_path, monkeypatch):
    "Both ways, both kinds, exact counts, in JSON; a key of this shell's is not the server's"
    monkeypatch.setenv('ATLAS_API_KEY', 'secret')
    file = tmp_path/'n.json'
    flags = '--requests 3 --concurrency 1,3 --prompt 66 --tokens 4 --seed 5 --device cpu'
    r = run('bench', 'throughput', 'tiny', *flags.split(), '--output', str(file))
    assert r.exit_code==0, r.stderr
    d = json.loads(file.read_text())
    ways = [(l['way'],l['prompts'],l['concurrency']) for l in d['loads']]
    assert ways==[*product(('engine','http'), ('distinct','same'), (1,3))]
    for l in d['loads']:
        check_load(l)
    assert d['model']=='tiny' and d['copy']>0 and d['formats'] and d['late']==0
    assert d['options']==dict(device='cpu', max_seq_len=70, max_num_seqs=3)
    assert d['plan']['seed']==5 and d['versions']['numpy']==np.__version__
    assert 'tokens/s' in r.stdout and r.stdout.count('http')==4
