"""litellm against Atlas, through its providers for vLLM, OpenAI and Anthropic, in a process of its own. `ATLAS_LITELLM=/path/to/python` tries the litellm of another environment.

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
            return f'<think>Look.</think>Wait.\n<tool_call>\n{{"name": "{name}", "arguments": {{"city": "Oslo"}}}}\n</tool_call>'
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
    app = app_of(
        s, s.tok, ChatTemplate(TEMPLATE),
        parsers=('hermes','qwen3'), guides=anything)
    with running(app) as url:
        env = {
            k:os.environ[k]
            for k in ('PATH','LANG','HOME') if k in os.environ
        } | dict(NO_PROXY='127.0.0.1')
        command = [python, here/'litellm_client.py', url, 'scripted']
        r = subprocess.run(command, env=env, capture_output=True, text=True, timeout=WAIT)
        assert r.returncode==0, r.stderr[-3000:]
        return json.loads(r.stdout.splitlines()[-1])

every = pytest.mark.parametrize('provider', ['hosted_vllm','openai','anthropic'])

@every
def test_answers(told, provider):
    t = told[provider]
    for k in 'whole','stream','effort':
        assert (
            t[k]['content'],t[k]['reasoning'],
            t[k]['finish'],t[k]['calls']
        )==('{"city": "Oslo"}','Hm.','stop',[]), k
        assert t[k]['prompt']==37 and t[k]['completion']>t[k]['thought'] and t[k]['cached']==0, k
        assert t[k]['thought']>0 or (provider,k)==(
            'anthropic','stream'), 'which litellm does not count'
    assert {k:t['whole'][k] for k in ('prompt','completion')}=={
        k:t['stream'][k]
        for k in ('prompt','completion')}

@every
def test_tools(told, provider):
    t = told[provider]
    for k in 'tools','tool_stream':  # litellm's builder of streams says 'stop' of them itself
        assert t[k]['calls']==[['weather',dict(city='Oslo')]] and (
            t[k]['finish']=='tool_calls' or k=='tool_stream'
        ) and t[k]['reasoning']=='Look.' and t[k]['content'].strip()=='Wait.', k
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
