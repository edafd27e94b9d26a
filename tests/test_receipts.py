"""Answers come again to the bit: receipts of every API, whole and in streams, of drafts, guides,
tools, prefixes and images, replayed alone and in company; and what must not come again is seen."""
import base64,io,json,socket
from contextlib import closing,contextmanager
from dataclasses import replace
from pathlib import Path
import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient
from typer.testing import CliRunner
import atlas.use.cli as cli
from atlas import LLM,SamplingParams
from atlas.ground.core import RequestError
from atlas.ground.packed import flatten
from atlas.service.gateway import DOORS
from atlas.service.server import create_app
from atlas.text.receipts import bits_of,number_of,read_receipt
from atlas.use.commands.base import app as commands
from atlas.use.replay import ReplayError,replay_at
from helpers.inprocess import loaded
from helpers.scripted import running
from helpers.seeing import seeing_model

assert cli.app is commands
CHAT,TEXT = '/v1/chat/completions','/v1/completions'
MESSAGES,RESPONSES,OLLAMA = '/v1/messages','/v1/responses','/api/chat'

SIZES = dict(max_seq_len=512, max_num_seqs=8)
def tiny(**kw): return LLM('tiny', 'cpu', show=False, **SIZES, **kw)

@pytest.fixture(scope='module')
def plain():
    "Replays"
    with closing(tiny()) as llm:
        yield llm

@pytest.fixture(scope='module')
def served():
    "The model of a server, which drafts"
    with closing(tiny(speculative='mtp')) as llm:
        yield llm

@pytest.fixture(scope='module')
def drafting():
    "Such a model that no server has: one engine is for one thread, also while nobody asks"
    with closing(tiny(speculative='mtp')) as llm:
        yield llm

@pytest.fixture(scope='module')
def client(served):
    app = create_app(loaded(served, ['tiny']), doors=DOORS)
    with TestClient(app) as c:
        yield c

def user(text='What does an owl eat?'):
    "Messages of one turn"
    return [dict(role='user', content=text)]

WHOLE = dict(number=dict(type='integer'))
NUMBER = dict(type='object', properties=WHOLE, required=['number'])
OPEN = dict(name='open_door', parameters=NUMBER)
DOOR = dict(type='function', function=OPEN)
SHAPE = dict(type='json_schema')
SHAPE['json_schema'] = dict(name='door', schema=NUMBER)
QUIET = dict(chat_template_kwargs=dict(enable_thinking=False))
HOT = dict(temperature=1.3, top_p=.95)
CASES = dict(
    greedy=(CHAT, dict(
        messages=user(), temperature=0, max_tokens=14)),
    seeded=(CHAT, dict(
        messages=user(), seed=7, max_tokens=14)|HOT),
    unseeded=(CHAT, dict(
        messages=user(), max_tokens=14, logprobs=True, top_logprobs=2)|HOT),
    schema=(CHAT, dict(
        messages=user('Door 3'), response_format=SHAPE, max_tokens=40)|QUIET|HOT),
    tools=(CHAT, dict(
        messages=user('Open the door number 3.'), tools=[DOOR],
        tool_choice='required', max_tokens=60, temperature=0)),
    three=(CHAT, dict(
        messages=user(), n=3, max_tokens=9)|HOT),
    stopped=(CHAT, dict(
        messages=user(), stop=[' the',' a'], max_tokens=40)|QUIET|HOT),
    penalties=(CHAT, dict(
        messages=user(), presence_penalty=.7, repetition_penalty=1.2,
        logit_bias={'40':-3.}, min_tokens=5, max_tokens=12)),
    prompts=(TEXT, dict(
        prompt=['A cow eats','An owl'], n=2, max_tokens=8)|HOT),
    echoed=(TEXT, dict(
        prompt='A cow eats grass', echo=True, logprobs=1, max_tokens=5)),
    messages=(MESSAGES, dict(
        messages=user(), max_tokens=12, temperature=1.)),
    responses=(RESPONSES, dict(
        input='What does a cow eat?', max_output_tokens=12)),
    ollama=(OLLAMA, dict(
        model='tiny', messages=user(), options=dict(num_predict=12))))

def lines(r):
    "JSON objects of a stream, whichever API it is of"
    found = [l.removeprefix('data: ') for l in r.text.split('\n')]
    return [json.loads(l) for l in found if l.startswith('{')]

def asked(client, path, body, stream=False, **more):
    "The objects of an answer: one, or those of a stream"
    r = client.post(path, json=body|dict(stream=stream)|more)
    assert r.status_code==200, r.text
    return lines(r) if stream else [r.json()]

def receipt(objects):
    "The receipt, which the last that is told has"
    found = []
    for d in objects:
        inner = d.get('response') or {}
        found.append(d.get('receipt') or inner.get('receipt'))
    assert sum(map(bool, found))==1
    assert any(found[-2:])
    return read_receipt(json.dumps(next(filter(None, found))))

def replayed(llm, r, *company):
    "Replay, and fail with what was different"
    for n in (0,*company):
        c = llm.replay(r, n)
        assert c.code==0 and c.company==n, str(c)

# Everything

def shown(d):
    "What an answer says, without what is never the same"
    never = 'id','created','receipt','created_at'
    return {k:v for k,v in d.items() if k not in never}

@pytest.mark.parametrize('name', ['unseeded','stopped'])
def test_receipts_replay(client, plain, name):
    path,body = CASES[name]
    replayed(plain, receipt(asked(client, path, body, receipt=True)), 3)

@pytest.mark.slow
@pytest.mark.parametrize('stream', [False,True])
@pytest.mark.parametrize('name', CASES)
def test_all_receipts_replay(client, plain, drafting, name, stream):
    path,body = CASES[name]
    r = receipt(asked(client, path, body, stream, receipt=True))
    assert sum(len(a.ids) for a in r.answers)
    replayed(plain, r, 3)
    assert drafting.replay(r, 2).code==0

@pytest.mark.slow
def test_company_that_is_preempted_changes_nothing(plain):
    "In a cache of six blocks, where sequences push each other out"
    prompt = 'A cow eats grass and hay. '*6
    two = SamplingParams(max_tokens=24, n=2, seed=1)
    out = plain.generate(prompt, two, receipt=True)
    six_blocks = dict(max_num_seqs=6, chunk=64, overcommit=16., kv_cache_memory=3_000_000)
    with closing(LLM('tiny', 'cpu', max_seq_len=96, show=False, **six_blocks)) as tight:
        assert tight.replay(out.receipt, 5).code==0
        assert tight.engine.stats()['num_preemptions_total']

def test_a_seed_is_drawn_and_told(client):
    path,body = CASES['unseeded']
    one,two = (receipt(asked(client, path, body, receipt=True)) for _ in range(2))
    assert one.answers[0].seed!=two.answers[0].seed
    again = asked(client, path, body|dict(seed=one.answers[0].seed), receipt=True)
    assert receipt(again).answers==one.answers

def test_greedy_has_no_seed_and_a_prefix_hit_no_other_bits(client):
    prompt = 'A cow eats grass and hay. An owl eats mice. '*8
    body = dict(prompt=prompt, temperature=0, max_tokens=6)
    first,second = (asked(client, TEXT, body, receipt=True)[0] for _ in range(2))
    cached = [d['usage']['prompt_tokens_details']['cached_tokens'] for d in (first,second)]
    assert cached[0]==0<cached[1]
    assert first['receipt']==second['receipt']
    assert first['receipt']['answers'][0]['seed'] is None

def test_logprobs_are_those_that_are_told(client):
    path,body = CASES['unseeded']
    d, = asked(client, path, body, receipt=True)
    told = [t['logprob'] for t in d['choices'][0]['logprobs']['content']]
    assert told==[number_of(b) for b in d['receipt']['answers'][0]['logprobs']]

@pytest.mark.parametrize('stream', [False,True])
@pytest.mark.parametrize('name', ['seeded','stopped'])
def test_nothing_else_changes(client, name, stream):
    path,body = CASES[name]
    body = body|dict(seed=5)
    without,proven = (asked(client, path, body, stream, receipt=x) for x in (False,True))
    if stream:
        assert proven.pop()['choices']==[]
    assert joined(without)==joined(proven)

def joined(objects):
    """What objects say, without counts of what a prefix cache had. Of a stream, pieces of text that
    follow one another as one: where it is cut depends on how fast it is read"""
    out = []
    for d in map(_counted, objects):
        piece = _piece(d)
        kind = piece and piece[0]
        if kind and out and out[-1][0]==kind:
            piece = kind,out.pop()[1]+piece[1]
        out.append(piece or (None,d))
    return out

def _piece(d):
    "Kind and text of a delta that is nothing else, or None"
    c, = d['choices'] or [{}]
    delta = c.get('delta') or {}
    if c.get('finish_reason') or len(delta)!=1:
        return None
    piece, = delta.items()
    return piece if isinstance(piece[1], str) else None

def _counted(d):
    "The same, without counts of what a prefix cache had"
    return {k:v for k,v in shown(d).items() if k!='usage'}

def test_pieces_are_joined():
    def chunk(**delta): return dict(id=1, choices=[dict(delta=delta, finish_reason=None)])
    first,end = chunk(role='assistant', content=''),chunk(tool_calls=[7])
    many = joined([first, chunk(content='a'), chunk(content='b'), chunk(reasoning='c'), end])
    assert many[1:3]==[('content','ab'),('reasoning','c')] and [k for k,_ in many].count(None)==2

# Streams in a notebook

@pytest.mark.parametrize('stop', [(),(' hay',)])
def test_the_last_of_a_stream_has_the_receipt(plain, stop):
    "The same as of the whole answer, and only the last"
    p = SamplingParams(max_tokens=9, seed=3, stop=stop)
    whole = plain.generate('A cow eats grass and', p, receipt=True)
    *before,last = plain.stream('A cow eats grass and', p, receipt=True)
    assert last.receipt==whole.receipt and not any(d.receipt for d in before)
    assert last.receipt.answers[0].finish==('cut' if stop else 'length')
    assert ''.join(d.text for d in [*before,last])==whole.text
    replayed(plain, last.receipt, 2)

def test_a_stream_draws_its_seed(plain):
    p = SamplingParams(max_tokens=5, temperature=1.3)
    *_,last = plain.chat(user(), p, stream=True, receipt=True)
    assert last.receipt.answers[0].seed is not None
    replayed(plain, last.receipt)
    assert not any(d.receipt for d in plain.stream('A cow', p))

# Images

@pytest.fixture(scope='module')
def eyes(tmp_path_factory):
    "A model that sees"
    folder = seeing_model(tmp_path_factory.mktemp('sees')/'vl')
    with closing(LLM(str(folder), 'cpu', max_seq_len=64, max_num_seqs=4, show=False)) as llm:
        yield llm

def picture(seed):
    "Noise"
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (16,24,3), np.uint8)

def png(pixels):
    "Bytes of a file"
    f = io.BytesIO()
    Image.fromarray(pixels).save(f, 'PNG')
    return f.getvalue()

def sees(*pixels):
    "A message with pictures"
    urls = [f'data:image/png;base64,{base64.b64encode(png(p)).decode()}' for p in pixels]
    parts = [dict(type='image_url', image_url=dict(url=u)) for u in urls]
    asks = dict(type='text', text='w3 w4')
    return [dict(role='user', content=[asks, *parts])]

def test_images_are_given_again(eyes):
    "From a server, in any order and any kind of file; another pixel is another image"
    one,two = picture(0),picture(1)
    body = dict(messages=sees(one, two), max_tokens=6, seed=4)
    with TestClient(create_app(loaded(eyes, ['vl']))) as c:
        r = receipt(asked(c, CHAT, body, receipt=True))
    assert len(r.prompts[0].images)==2
    for n in (0,2):
        assert eyes.replay(r, n, [Image.fromarray(two),png(one)]).code==0
    refuses_others(eyes, r, one, two)

def refuses_others(eyes, r, one, two):
    flipped = one.copy()
    flipped[9,4,1] ^= 1
    for given in ([], [two], [flipped,two]):
        with pytest.raises(ReplayError, match='not among'):
            eyes.replay(r, images=given)
    with pytest.raises(ReplayError, match='not those'):
        eyes.replay(r, images=[one,two,flipped])

def test_an_image_decides_about_bits(eyes):
    "Whoever says in a receipt that it was another image is found out"
    p = SamplingParams(temperature=0, max_tokens=6)
    first,other = (eyes.chat(sees(picture(k)), p, receipt=True).receipt for k in (0,1))
    assert first.prompts[0].ids==other.prompts[0].ids
    assert eyes.replay(replace(first, prompts=other.prompts), images=[picture(1)]).code==1

def test_images_have_their_places(eyes, plain):
    "As many tokens as it takes, and a model that sees"
    p = SamplingParams(temperature=0, max_tokens=2)
    r = eyes.chat(sees(picture(0)), p, receipt=True).receipt
    short = eyes.generate([3,4], p, receipt=True).receipt.prompts[0]
    lies = replace(short, images=r.prompts[0].images)
    with pytest.raises(ReplayError, match='no room'):
        eyes.replay(replace(r, prompts=[lies]), images=[picture(0)])
    with pytest.raises(RequestError, match='only text'):
        plain.replay(plain.generate('A cow', p, receipt=True).receipt, images=[picture(0)])
    with pytest.raises(ReplayError, match='--url'):
        replay_at('http://127.0.0.1:9', r)

def test_images_at_a_terminal(eyes, tmp_path):
    p = SamplingParams(temperature=0, max_tokens=2)
    r = eyes.chat(sees(picture(0)), p, receipt=True).receipt
    at,photo = tmp_path/'receipt.json',tmp_path/'photo.png'
    at.write_text(json.dumps(r.to_dict()))
    photo.write_bytes(png(picture(0)))
    command = ['replay',str(at),str(eyes.path),'--device','cpu','--max-seq-len','64']
    def run(*more): return CliRunner().invoke(commands, [*command,*map(str, more)])
    ends = [
        run('--image', photo),
        run(),
        run('--image', at),
        run('--image', photo, '--url', 'x')]
    assert [e.exit_code for e in ends]==[0,2,2,2]
    assert '--image' in ends[1].output

# What must be seen

def test_a_changed_weight(client, plain):
    path,body = CASES['greedy']
    r = receipt(asked(client, path, body, receipt=True))
    w = flatten(plain.model.weights())[0]['norm.weight']
    keep = w.copy()
    try:
        w[3] *= 1.25
        c = plain.replay(r)
        assert (c.code, c.differences[0].index)==(1,0), str(c)
    finally:
        w[:] = keep
    assert plain.replay(r).code==0

def flipped(r, k):
    "A receipt with another last bit in the log probability of token `k`"
    a = r.answers[0]
    bits = [*a.logprobs]
    bits[k] = f'{int(bits[k], 16)^1:08x}'
    assert bits_of(number_of(bits[k]))==bits[k]
    a = replace(a, logprobs=bits)
    return replace(r, answers=[a, *r.answers[1:]])

def test_a_flipped_bit(client, plain):
    path,body = CASES['seeded']
    r = receipt(asked(client, path, body, receipt=True))
    for n in (0,3):
        c = plain.replay(flipped(r, 5), n)
        assert (c.code, c.differences[0].index)==(1,5)

def test_a_receipt_tells_no_more_than_was_asked(client):
    path,body = CASES['seeded']
    said = json.dumps(asked(client, path, body, receipt=True)[0]['receipt'])
    for secret in (socket.gethostname(), str(Path.home()), str(Path.cwd()), '/models/'):
        assert secret not in said

# Over the wire, and from a terminal

YES = dict(prompt='A', guide=dict(kind='choice', choices=['yes','no']), max_tokens=5)

@contextmanager
def two_servers(drafting, plain):
    "The url of one, and a client of another"
    with running(create_app(loaded(drafting, ['tiny']))) as url:
        with TestClient(create_app(loaded(plain, ['tiny']))) as other:
            yield url,other

def test_a_server_answers_again(drafting, plain):
    with two_servers(drafting, plain) as (url,other):
        for path,body in (CASES['unseeded'],(TEXT,YES)):
            r = receipt(asked(other, path, body, receipt=True))
            for n in (0,2):
                assert replay_at(url, r, n).code==0

def test_a_server_answers_a_terminal(drafting, plain, tmp_path):
    at,ends = tmp_path/'receipt.json',[]
    with two_servers(drafting, plain) as (url,other):
        r = receipt(asked(other, TEXT, YES, receipt=True))
        for x in (r,flipped(r, 0),replace(r, made_by={})):
            at.write_text(json.dumps(x.to_dict()))
            run = CliRunner().invoke(commands, ['replay',str(at),'--url',url,'--json'])
            ends.append((run.exit_code, json.loads(run.output)['result']))
    assert ends==[(0,'same'), (1,'different'), (0,'same')]

def test_what_cannot_be_compared_ends_with_two(client, tmp_path):
    at = tmp_path/'receipt.json'
    path,body = CASES['greedy']
    d = asked(client, path, body, receipt=True)[0]
    for text in ('{}', json.dumps(d).replace('"version":', '"versions":'), json.dumps(d)[:-9]):
        at.write_text(text)
        assert CliRunner().invoke(commands, ['replay',str(at)]).exit_code==2
    for more in ([str(tmp_path/'none')], [str(at),'--url','http://127.0.0.1:9']):
        assert CliRunner().invoke(commands, ['replay',*more]).exit_code==2

def test_other_versions_and_models_that_are_not_here(client, tmp_path):
    "Each is refused with its own sentence"
    at = tmp_path/'receipt.json'
    path,body = CASES['greedy']
    r = receipt(asked(client, path, body, receipt=True))
    said = {'version 2': replace(r, version=2), 'no-such-model': replace(r, model='no-such-model')}
    for what,x in said.items():
        at.write_text(json.dumps(x.to_dict()))
        run = CliRunner().invoke(commands, ['replay',str(at),'--device','cpu'])
        assert run.exit_code==2 and what in run.output, run.output

def test_another_model(client, plain):
    path,body = CASES['greedy']
    r = receipt(asked(client, path, body, receipt=True))
    facts = r.made_by|dict(model=r.made_by['model']|dict(tensors='0'*64))
    with pytest.raises(ReplayError, match='another model'):
        plain.replay(replace(r, made_by=facts))

# The fields

def test_guides_in_their_own_words_are_checked(client):
    body = dict(prompt='A', max_tokens=9)
    bad = [dict(guide=dict(kind='charm')), dict(guide={}), dict(guide=dict(kind='regex')),
        dict(guide=dict(kind='choice', choices=['a']), response_format=SHAPE), dict(guide=3)]
    for more in bad:
        assert client.post(TEXT, json=body|more).status_code==400, more
    said = client.post(TEXT, json=body|dict(guide=dict(kind='choice', choices=['yes','no'])))
    assert said.json()['choices'][0]['text'] in ('yes','no')

def test_openapi_has_the_field(client):
    paths = client.get('/openapi.json').json()['paths']
    for path in (CHAT,TEXT,MESSAGES,RESPONSES):
        body = paths[path]['post']['requestBody']['content']['application/json']['schema']
        assert 'receipt' in body['properties']
    assert client.post(CHAT, json=dict(messages=user(), receipt='yes')).status_code==400
