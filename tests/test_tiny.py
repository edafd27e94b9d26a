"The model that comes with Atlas: found without a network, loaded, spoken to, and drafted for."
import json,pytest
import numpy as np
from pathlib import Path
from starlette.testclient import TestClient
from typer.testing import CliRunner
import atlas
import atlas.use.cli as cli
from atlas.use.commands import base
from atlas import LLM,SamplingParams
from atlas.ground.core import SourceError
from atlas.ground.hub import NAMED,cached,pull,remove,resolve
from atlas.service.server import create_app
from atlas.text.deltas import gather
from helpers.inprocess import loaded
from test_kernels import build

ROOT = Path(__file__).parents[1]
FOLDER = Path(atlas.__file__).parent/'models'/'tiny'
def tool(name, about, *params):
    "A tool with some whole numbers"
    numbers = {k:dict(type='integer') for k in params}
    schema = dict(type='object', properties=numbers, required=params)
    return dict(type='function',
        function=dict(name=name, description=about, parameters=schema))

OPEN_DOOR = tool('open_door', 'Open a door', 'number')
ADD = tool('add', 'add two numbers', 'a', 'b')

def user(text): return [dict(role='user', content=text)]
def greedy(n, **kw): return SamplingParams(temperature=0, max_tokens=n, **kw)

@pytest.fixture(scope='module')
def llm():
    return LLM('tiny', 'cpu', drafting=True, max_seq_len=512, show=False)

@pytest.fixture
def client():
    "The service with a model of its own"
    own = LLM('tiny', 'cpu', max_seq_len=512, show=False)
    with TestClient(create_app(loaded(own, ['tiny']))) as c:
        yield c

# Where it is

@pytest.fixture
def alone(tmp_path, monkeypatch):
    "A machine with an empty cache and no network, in a folder that holds nothing"
    monkeypatch.setenv('ATLAS_HOME', str(tmp_path/'home'))
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_CACHE', str(tmp_path/'hf'))
    monkeypatch.setattr('subprocess.Popen', None)
    monkeypatch.chdir(tmp_path)
    return tmp_path

def test_it_is_found_without_a_network(alone):
    assert resolve('tiny')==pull('tiny')==FOLDER
    assert [(e.name, e.kind, e.path) for e in cached()]==[(
        'tiny', 'safetensors', FOLDER)]
    assert not (alone/'home').exists()

def test_a_folder_of_that_name_goes_first(alone):
    (alone/'tiny').mkdir()
    assert resolve('tiny')==Path('tiny')

def test_it_is_not_removed(alone):
    with pytest.raises(SourceError, match='a part of Atlas'):
        remove('tiny')
    assert (FOLDER/'model.safetensors').is_file()

def test_commands_know_it(alone):
    def said(*args):
        return CliRunner().invoke(cli.app, list(args), prog_name='atlas').stdout
    assert said('pull', 'tiny').strip()==str(FOLDER)
    assert said('list').split('\n')[1].split()[0]=='tiny'
    assert json.loads(said('inspect', 'tiny', '--json'))['layers']==8
    assert 'tiny' in base.complete_model('ti')

def test_it_is_small():
    sizes = [f.stat().st_size for f in FOLDER.iterdir()]
    assert sum(sizes)<=6e6
    assert 'Apache-2.0' in NAMED['tiny'].about

def test_it_travels_in_the_wheel(tmp_path):
    "As `pip install` builds it"
    kernels,_ = build(tmp_path, ATLAS_CUDA_ARCHS='')
    there = {f.name for f in (kernels.parent/'models'/'tiny').iterdir()}
    assert there=={f.name for f in FOLDER.iterdir()}

# What it says

@pytest.mark.parametrize('a,b', [(7, 5), (2, 2), (9, 4)])
def test_it_adds(llm, a, b):
    said = llm.chat(user(f'What is {a} plus {b}?'), greedy(40))
    assert str(a+b) in said.reasoning and str(a+b) in said.text
    assert '</think>' not in said.reasoning+said.text

def test_it_answers_without_a_thought(llm):
    said = llm.chat(user('Which day comes after Monday?'), greedy(20), enable_thinking=False)
    assert 'Tuesday' in said.text and not said.reasoning

def test_its_parsers_are_found(llm): assert llm.text.parsers==('hermes', 'qwen3')

def test_it_calls_a_tool(client):
    "Through the service: the thought and the call are told apart, as of any model of its kind"
    ask = dict(messages=user('Open the door number 3.'), tools=[OPEN_DOOR], temperature=0)
    choice = client.post('/v1/chat/completions', json=dict(ask, max_tokens=80)).json()['choices'][0]
    call, = choice['message']['tool_calls']
    assert choice['finish_reason']=='tool_calls' and call['function']['name']=='open_door'
    assert json.loads(call['function']['arguments'])==dict(number=3)

@pytest.mark.parametrize('text,tools', [
    ('What does an owl eat?', {}), ('Open the door number 3.', dict(tools=[OPEN_DOOR]))])
def test_a_notebook_tells_apart_what_the_service_does(llm, client, text, tools):
    "The same parsers read both: thought, answer and call are the same, streamed or whole"
    ask = dict(messages=user(text), temperature=0, max_tokens=80)
    choice = client.post('/v1/chat/completions', json=ask|tools).json()['choices'][0]
    m = choice['message']
    out = llm.chat(user(text), greedy(80), **tools)
    assert (out.reasoning, out.text or None)==(m['reasoning_content'],
        m['content'])
    assert out.finish_reason==choice['finish_reason'] and bool(out.calls)==bool(tools)
    called = [c['function'] for c in m.get('tool_calls') or ()]
    assert [dict(name=c.name, arguments=c.arguments) for c in out.calls]==called
    streamed = gather(llm.chat(user(text), greedy(80),
        stream=True, **tools))
    assert (streamed.reasoning,streamed.content,streamed.calls)==(out.reasoning,
        out.text,out.calls)

def test_commands_print_its_answer_alone(alone):
    r = CliRunner().invoke(cli.app, 'run tiny -t 0 --device cpu'.split()+['What does an owl eat?'])
    assert (r.exit_code,r.stdout,r.stderr)==(0, 'An owl eats mice.\n', '')

def test_it_goes_on_with_what_the_tool_said(llm):
    call = dict(type='function',
        function=dict(name='add',
            arguments=dict(a=310, b=25)))
    told = dict(role='tool', content='{"result": 335}')
    asked = dict(role='assistant', content='', tool_calls=[call])
    messages = [*user('What is 310 plus 25?'), asked, told]
    assert '335' in llm.chat(messages, greedy(40), [ADD], enable_thinking=False).text

def log_p(llm, ids):
    "Logarithms of what the model gives to each of `ids` but the first"
    logits = llm.logits(ids[:-1]).astype(np.float64)
    x = logits-logits.max(-1, keepdims=True)
    x -= np.log(np.exp(x).sum(-1, keepdims=True))
    return x[np.arange(len(x)),ids[1:]]

def test_its_perplexity_is_what_the_book_says(llm):
    "On the text that comes with it, in windows of 500 tokens as the table of formats has it"
    text = (FOLDER/'held_out.txt').read_text()
    ids = llm.tokenizer.encode(text, add_special=False)
    found = np.concatenate([log_p(llm, ids[i:i+501])
        for i in range(0, 2000, 500)])
    rows = json.loads((ROOT/'nbs'/'1_ground'/'tiny_formats.json').read_text())
    said, = (r['perplexity'] for r in rows if r['format']=='nvfp4')
    assert abs(np.exp(-found.mean())/said-1)<.002

# Its drafts

def test_its_drafts_are_accepted(llm):
    "Two drafts after each of some places of greedy answers: most are what the model says itself"
    right = places = 0
    for question in ('What is 7 plus 5?', 'Count from 3 to 9.', 'Describe the sea.'):
        prompt = llm.tokenizer.encode(llm.render(user(question)), add_special=False)
        ids = prompt+llm.generate(prompt, greedy(24)).token_ids
        for at in range(len(prompt), len(ids)-3, 4):
            first,drafts,_ = llm.drafts(ids[:at], 2)
            assert first==ids[at]
            right += sum(d==t
                for d,t in zip(drafts, ids[at+1:]))
            places += 2
    assert places>=30 and right>.7*places, f'{right} of {places}'
