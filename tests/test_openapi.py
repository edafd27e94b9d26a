"""Bodies that schemathesis makes up from our own /openapi.json: every one gets an answer or a
refusal in the shape of its API, never a fault of the server."""
import atexit,json,sys
from pathlib import Path
import pytest,schemathesis
from hypothesis import HealthCheck,settings
from atlas import LLM
from atlas.ground.config import PRESETS
from atlas.service.gateway import DOORS
from atlas.service.server import create_app
import atlas.engine.score  # noqa: F401

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from inprocess import loaded  # noqa: E402
from scripted import running  # noqa: E402

PRESETS['toy-openapi'] = PRESETS['llama-3.1-8b']|dict(
    hidden_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
    head_dim=32, intermediate_size=64, vocab_size=256, max_position_embeddings=512,
    bos_token_id=1, eos_token_id=255)
try:
    llm = LLM(
        'toy-openapi', 'cpu', load_format='dummy', max_seq_len=128, max_num_seqs=4,
        show=False) # a token for each byte, so that any text gets as far as the model
finally:
    del PRESETS['toy-openapi']
models = loaded(llm, ['tiny'])
server = running(create_app(models, doors=DOORS))
atexit.register(server.__exit__, None, None, None)
schema = schemathesis.openapi.from_url(server.__enter__()+'/openapi.json')
endless = {'/models/sse'}  # streams without an end

@pytest.fixture(scope='module', autouse=True)
def over():
    yield
    assert models.healthy and not models.all[0].restarts, 'the engine did not survive'

def shaped(path, d):
    "Is this an error in the shape of the API that `path` belongs to?"
    e = d.get('error')
    if path.startswith('/api/'):
        return set(d)=={'error'} and isinstance(e, str) and e
    return (
        isinstance(e, dict)
        and isinstance(e.get('message'), str)
        and e['message']
        and isinstance(e.get('type'), str)
        and (
            d.get('type')=='error' if path.startswith('/v1/messages')
            else 'code' in e and 'param' in e))

def sse(raw):
    "Is this a stream of events?"
    lines = raw.split(b'\n')
    said = all(l[:1]==b':' or l[:6] in (b'data: ',b'event:') or not l for l in lines)
    return raw.endswith(b'\n\n') and said

def fits(case, r):
    "What every answer must be"
    path,kind = case.operation.path,r.headers.get('content-type', [''])[0]
    assert r.status_code!=500, (r.status_code, r.content[:300])
    assert r.headers.get('x-request-id')
    if r.status_code>=400:
        assert shaped(path, json.loads(r.content)), r.content[:300]
    elif kind.startswith('text/event-stream'):
        assert sse(r.content)
    elif kind.startswith('application/x-ndjson'):
        assert r.content.endswith(b'\n')
        assert list(map(json.loads, r.content.splitlines()))
    elif kind.startswith('application/json'):
        json.loads(r.content)
    else:
        assert path in ('/','/ui','/metrics'), kind

LIMIT = {
    '/v1/chat/completions':'max_tokens', '/v1/completions':'max_tokens',
    '/v1/responses':'max_output_tokens'}

def is_number(v): return isinstance(v, int) and not isinstance(v, bool)

def little(path, b):
    "Have a body ask for few tokens, of few choices"
    for k in 'max_tokens','max_completion_tokens','max_output_tokens':
        if is_number(b.get(k)) and b[k]>8:
            b[k] = 8
    limit = LIMIT.get(path)
    if limit and b.get(limit) is None:
        b[limit] = 8
    if is_number(b.get('n')) and b['n']>2:
        b['n'] = 2
    if path in ('/api/chat','/api/generate'):
        o = b.get('options') if isinstance(b.get('options'), dict) else {}
        b['options'] = o|dict(num_predict=8)

def known(case):
    "Half of the bodies should get as far as the model: they name it, and ask for little"
    b,path = case.body,case.operation.path
    if not isinstance(b, dict):
        return
    if 'model' in b and (b['model'] is None or len(str(b['model']))%2):
        b['model'] = 'tiny'
    little(path, b)
    if 'background' in b:
        b['background'] = False
    if path=='/api/pull':
        b |= dict(model='tiny', name=None) # which is here

@schema.parametrize()
@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_answers_or_refuses(case):
    if case.operation.path in endless:
        return
    known(case)
    fits(case, case.call())
