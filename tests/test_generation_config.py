"""A model's own generation_config.json is how it is sampled where a request says nothing,
whichever API asks."""
import json,shutil
import httpx,pytest
from atlas.ground.core import ConfigError,RequestError,SourceError
from atlas.ground.hub import NAMED
from atlas.ground.options import EngineConfig
from atlas.ground.requests import SamplingParams,generation_defaults
from atlas.service.process import open_text
from atlas.service.protocol.base import Ask
from atlas.text.processor import read_text
from atlas.use.llm import LLM
from helpers.waiting import WAIT
from test_server import FakeRunner,live

OWN = dict(temperature=.6, top_k=20, max_tokens=7)
HELLO = [dict(role='user', content='Hello')]
ASKED = { # Path of an API, the least that a body has, and what it sets with that
    '/v1/chat/completions': (dict(messages=HELLO), {}),
    '/v1/completions': (dict(prompt='Hello'), {}),
    '/v1/responses': (dict(input='Hello'), {}),
    '/v1/messages': (dict(messages=HELLO, max_tokens=5), dict(max_tokens=5))}

@pytest.fixture(scope='module')
def server():
    "A server of a model that has a way to be sampled: its address and runner"
    r = FakeRunner()
    with live(r, sampling=OWN) as port:
        yield f'http://127.0.0.1:{port}',r

def params(server, path, **more):
    "The sampling parameters that the engine gets for a question"
    url,runner = server
    r = httpx.post(url+path, json=ASKED[path][0]|more, timeout=WAIT)
    assert r.status_code==200, r.text
    return runner.seen[-1].params

def only(p): return {k: getattr(p, k) for k in OWN}

@pytest.mark.parametrize('path', ASKED)
def test_who_says_nothing_gets_the_models_own(server, path):
    assert only(params(server, path))==OWN|ASKED[path][1]

@pytest.mark.parametrize('path', ASKED)
def test_what_is_said_wins(server, path):
    "Also where it is the value that nobody would have to say"
    said = params(
        server,
        path,
        temperature=1,
        **{
            k:v
            for k,v in dict(top_k=0).items() if path!='/v1/responses'})
    assert said.temperature==1
    assert path=='/v1/responses' or said.top_k==0
    assert params(server, path, temperature=0).temperature==0

def test_it_is_told(server):
    "With the model"
    said = httpx.get(
        server[0]+'/v1/models', timeout=WAIT).json()['data'][0]
    assert said['default_sampling_params']==OWN

def test_models_without_it_stay_as_they_were():
    r = FakeRunner()
    with live(r) as port:
        at = f'http://127.0.0.1:{port}'
        for path in ASKED:
            params((at,r), path)
        assert (
            'default_sampling_params'
            not in httpx.get(
                at+'/v1/models', timeout=WAIT).json()['data'][0])
    assert [q.params for q in r.seen]==[
        SamplingParams(max_tokens=ASKED[p][1].get('max_tokens'))
        for p in ASKED]

def test_another_models_values_are_forgotten():
    "A question that a second model answers, after the first had set its own"
    a = Ask(HELLO, SamplingParams(top_p=.5), given=frozenset({'top_p'}))
    a.lean_on(dict(temperature=.6, top_p=.9))
    assert (a.params.temperature,a.params.top_p)==(.6,.5)
    a.lean_on(dict(top_k=9))
    assert (a.params.temperature,a.params.top_k,a.given)==(1,9,{'top_p'})

def test_a_personas_values_stay():
    a = Ask(HELLO, SamplingParams(top_p=.5), given=frozenset({'top_p'}))
    a.lean_on(dict(top_k=9))
    a.fill(dict(temperature=.2)) # a persona
    a.lean_on(dict(temperature=.6, max_tokens=4))
    assert (a.params.temperature,a.params.top_k,a.params.max_tokens)==(.2,0,4)

def test_fewer_tokens_than_asked_for():
    b = Ask(HELLO, SamplingParams(min_tokens=9), given=frozenset({'min_tokens'}))
    b.lean_on(dict(max_tokens=4))
    assert b.params.max_tokens==9

# -- files and options ---------------------------------------------------------------------------

@pytest.fixture
def model(tmp_path):
    "A copy of the tiny model, and what writes its generation_config.json"
    folder = tmp_path/'model'
    shutil.copytree(NAMED['tiny'].path(), folder)
    def write(said=None, where=folder):
        where.mkdir(exist_ok=True)
        (where/'generation_config.json').unlink(missing_ok=True)
        if said is not None:
            (where/'generation_config.json').write_text(json.dumps(said))
        return where
    return write

def sampling(folder, **how):
    "As the gateway has it"
    return open_text(EngineConfig(str(folder), device='cpu', **how))['sampling']

def test_the_file_and_its_options(model, tmp_path):
    f = model(dict(do_sample=True, temperature=.3, top_p=.8, eos_token_id=2039))
    assert sampling(f)==dict(temperature=.3, top_p=.8)
    for word in ('vllm','none'):
        assert sampling(f, generation_config=word)=={}
    other = model(dict(top_k=5), tmp_path/'other')
    assert sampling(f, generation_config=str(other))==dict(top_k=5)
    over = dict(override_generation_config='{"temperature":0.9,"top_k":3}')
    assert sampling(f, **over)==dict(temperature=.9, top_p=.8, top_k=3)
    assert sampling(f, generation_config='vllm', **over)==dict(temperature=.9, top_k=3)
    assert sampling(model(dict(do_sample=False, temperature=.3)))==dict(temperature=0)
    assert sampling(model(None))=={}

@pytest.mark.parametrize(
    'said,field',
    [
        (dict(temperature=-1),'temperature'),
        (dict(top_p='x'),'top_p'),
        (dict(top_k=1.5),'top_k'),
        (dict(repetition_penalty=0),'repetition_penalty')])
def test_a_broken_file_is_refused(model, said, field):
    with pytest.raises(ConfigError) as e:
        sampling(model(said))
    assert e.value.param==field
    assert 'generation_config.json' in e.value.msg
    assert '--generation-config vllm' in e.value.hint
    assert sampling(model(said), generation_config='vllm')=={}

@pytest.mark.parametrize(
    'said', ['{', '[]', '{"temp":1}', '{"top_p":3}', '{"top_k":1,"top_k":2}', 7])
def test_a_broken_override_is_refused(said):
    with pytest.raises(RequestError) as e:
        EngineConfig('m', override_generation_config=said)
    assert e.value.param=='override_generation_config'

def test_a_folder_without_the_file(tmp_path):
    with pytest.raises(SourceError, match='no generation_config.json'):
        read_text(EngineConfig('tiny', generation_config=str(tmp_path)))

def test_options_that_say_the_same_are_equal():
    same = [EngineConfig('m', override_generation_config=o) for o in
        ({'top_k':3,'top_p':.5}, '{"top_p": 0.5, "top_k": 3}')]
    assert same[0]==same[1]
    assert hash(same[0])==hash(same[1])

@pytest.fixture(scope='module')
def greedy_llm():
    "A model whose makers draw, opened by somebody who does not"
    llm = LLM('tiny', device='cpu', show=False, override_generation_config=dict(do_sample=False))
    yield llm
    llm.close()

def test_notebooks_use_it_too(greedy_llm):
    "`LLM` without parameters draws as `SamplingParams` with the model's own do"
    llm = greedy_llm
    zero = SamplingParams(temperature=0)
    assert llm.sampling==dict(temperature=0., top_p=.9)
    assert llm.params(top_p=1.)==zero
    hello = [dict(role='user', content='What does a cow eat?')]
    said = {llm.chat(hello, enable_thinking=False).text for _ in range(2)}
    assert said=={llm.chat(hello, zero, enable_thinking=False).text}
    assert llm.generate('The cow').text==llm.generate('The cow', zero).text

def test_what_a_notebook_gives_is_taken_as_it_is(greedy_llm):
    ways = [SamplingParams(temperature=5, seed=s, max_tokens=9) for s in range(3)]
    assert len({greedy_llm.generate('The cow', p).text for p in ways})>1

def test_made_up_and_gguf_models_have_none():
    assert generation_defaults({})=={}
    assert read_text(EngineConfig('qwen3-0.6b', load_format='dummy')).sampling=={}
