"""litellm against Atlas, through its providers for vLLM, OpenAI and Anthropic, in a process of
its own. `ATLAS_LITELLM=/path/to/python` tries the litellm of another environment.

Nothing leaves this machine: litellm's table of prices is the one in its package."""
import json,os,subprocess,sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
import pytest
from atlas.text.chat import ChatTemplate

here = Path(__file__).parent/'helpers'
sys.path.insert(0, str(here))
from inprocess import app_of  # noqa: E402
from scripted import TEMPLATE,Speaker,running  # noqa: E402
from helpers.waiting import WAIT  # noqa: E402

def model(prompt):
    "What the model says, by its prompt"
    if 'call weathertool: rain' in prompt:
        return '<think>Rain.</think>It rains.'
    for name in 'weather','json_tool_call':
        if f'"name": "{name}"' in prompt:
            call = json.dumps(dict(name=name, arguments=dict(city='Oslo')))
            return f'<think>Look.</think>Wait.\n<tool_call>\n{call}\n</tool_call>'
    return '<think>Hm.</think>{"city": "Oslo"}'

@pytest.fixture(scope='module')
def told():
    "What litellm says, by provider"
    python = os.environ.get('ATLAS_LITELLM') or sys.executable
    if python==sys.executable and not find_spec('litellm'):
        pytest.skip('litellm is not installed')
    s = Speaker(model)
    # the script keeps to every format by itself
    anything = SimpleNamespace(check=lambda spec: None)
    side = dict(parsers=('hermes','qwen3'), guides=anything)
    env = {k:os.environ[k] for k in ('PATH','LANG','HOME') if k in os.environ}
    env['NO_PROXY'] = '127.0.0.1'
    with running(app_of(s, s.tok, ChatTemplate(TEMPLATE), **side)) as url:
        command = [python, here/'litellm_client.py', url, 'scripted']
        r = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WAIT)
        assert r.returncode==0, r.stderr[-3000:]
        return json.loads(r.stdout.splitlines()[-1])

every = pytest.mark.parametrize('provider', ['hosted_vllm','openai','anthropic'])

@every
def test_answers(told, provider):
    for k in 'whole','stream','effort':
        t = told[provider][k]
        assert (t['content'],t['reasoning'])==('{"city": "Oslo"}','Hm.'), k
        assert (t['finish'],t['calls'])==('stop',[]), k

@every
def test_counts(told, provider):
    for k in 'whole','stream','effort':
        t = told[provider][k]
        assert t['prompt']==37 and t['completion']>t['thought'] and t['cached']==0, k
        uncounted = (provider,k)==('anthropic','stream') # By litellm
        assert t['thought']>0 or uncounted
    whole,stream = told[provider]['whole'],told[provider]['stream']
    assert (whole['prompt'],whole['completion'])==(stream['prompt'],stream['completion'])

@every
def test_tools(told, provider):
    t = told[provider]
    for k in 'tools','tool_stream':
        assert t[k]['calls']==[['weather',dict(city='Oslo')]]
        assert t[k]['reasoning']=='Look.' and t[k]['content'].strip()=='Wait.', k
    # litellm's builder of streams says 'stop' of them itself
    assert t['tools']['finish']=='tool_calls'
    assert (t['loop']['content'],t['loop']['finish'])==('It rains.','stop')

@every
def test_ends(told, provider):
    t = told[provider]
    assert json.loads(t['schema']['content'])==dict(city='Oslo')
    assert (t['stop']['content'],t['stop']['finish'])==('{"city": "','stop')
    assert t['cut']['finish']=='length'

@every
def test_errors(told, provider):
    assert (told[provider]['wrong'],told[provider]['nobody'])==('BadRequestError','NotFoundError')
