"""Where the agents are that tests start: `node_modules/.bin` of the folder that ATLAS_AGENTS names
(`~/agents` without), or the PATH.

They are large and no part of the package, so that tests skip without them. To install them, outside
of the repository:

    npm install --prefix ~/agents @openai/codex@0.169.0 opencode-ai@1.18.33 \\
        @anthropic-ai/claude-code@2.1.197
    (cd ~/agents/node_modules/opencode-ai && node postinstall.mjs)
    ATLAS_AGENTS=~/agents pytest tests/test_agents.py tests/test_clients.py tests/test_anthropic.py

`@continuedev/cli` and `@mariozechner/pi-coding-agent` are tried too where they are there. Nothing
leaves this machine: each runs in an empty home with Atlas as its only provider."""
import json,os,shutil,subprocess
from pathlib import Path
import pytest
from helpers.waiting import WAIT

HOME = Path(os.environ.get('ATLAS_AGENTS') or '~/agents').expanduser().absolute()
BIN = HOME/'node_modules'/'.bin'
PATH = f'{BIN}{os.pathsep}{os.environ["PATH"]}'

def agent(name):
    "Path of an agent's program, or a skip that says why"
    if not shutil.which('node'):
        pytest.skip('no Node on this machine')
    found = shutil.which(name, path=PATH)
    return found or pytest.skip(f'no {name}: tests/helpers/agents.py says how to install it')

def run(cmd, home, ok=True, **env):
    "Run an agent in an empty project of its own, with nothing of this user's; its output"
    (project := home/'project').mkdir(exist_ok=True)
    keep = {k:os.environ[k] for k in ('LANG','TERM') if k in os.environ}
    env = keep|dict(PATH=PATH, HOME=str(home), NO_PROXY='127.0.0.1')|env
    r = subprocess.run(
        cmd, cwd=project, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=WAIT)
    assert not ok or r.returncode==0, f'{r.stdout[-3000:]}\n{r.stderr[-3000:]}'
    return r.stdout

def steps(tool, calls, done):
    """A model that calls `tool` with each of `calls` in turn, and says `done` of what the prompt
    then holds"""
    def script(prompt):
        if 'tool {' not in prompt:
            return 'A title'  # Some ask for one beside, and give no tools
        n = prompt.count(f'call {tool}')
        if n==len(calls):
            return f'<think>\nIt is there.\n</think>\n\n{done(prompt)}'
        call = json.dumps(dict(name=tool, arguments=calls[n]))
        thought = f'<think>\nStep {n+1}.\n</think>\n\n'
        return f'{thought}Let me see.\n<tool_call>\n{call}\n</tool_call>'
    return script
