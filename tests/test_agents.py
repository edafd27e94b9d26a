"""Real agents against Atlas, where Node and they are installed: Codex over the Responses API,
opencode over that and over chat completions, Claude Code over messages.

`tests/helpers/agents.py` says how to install them, and where they are looked for."""
import json,sys
from pathlib import Path
import pytest
from atlas.text.deltas import CallDelta,Delta
from atlas.service.protocol.items import unseal

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from agents import agent,run,steps  # noqa: E402
from scripted import serve,service  # noqa: E402

# -- Codex: POST /v1/responses, streamed
# -------------------------------------------------------------------------------------

CODEX = '''model = "scripted"
model_provider = "atlas"
[model_providers.atlas]
name = "Atlas"
base_url = "%s/v1"
wire_api = "responses"
'''

def codex(home, url, prompt, *flags):
    "The events that `codex exec` prints"
    (at := home/'codex').mkdir(exist_ok=True)
    (at/'config.toml').write_text(CODEX % url)
    out = run(
        [agent('codex'), 'exec', '--skip-git-repo-check', '--json', *flags, prompt],
        home, CODEX_HOME=str(at))
    return [json.loads(l) for l in out.splitlines() if l.startswith('{')]

def completed(events, kind):
    return [
        e['item'] for e in events
        if e['type']=='item.completed' and e['item']['type']==kind]

def test_codex_says_what_the_model_said(tmp_path):
    pong = [Delta(content='po'), Delta(content='ng'), Delta(finish='stop')]
    with serve(lambda ask: pong) as s:
        got = codex(tmp_path, s.url, 'Say pong')
        ask = s.asks[0]
    assert completed(got, 'agent_message')[0]['text']=='pong'
    assert [
        e['usage'] for e in got if e['type']=='turn.completed'
    ][0].items()>=dict(
        input_tokens=11, cached_input_tokens=3, output_tokens=7, reasoning_output_tokens=2).items()
    roles = [m['role'] for m in ask.messages]
    assert roles[0]=='system' and roles.count('system')==1 and roles[
        -1]=='user', 'its developer messages are one system message'
    assert {t['function']['name'] for t in ask.tools}>={'exec_command'}
    assert any('web_search' in w for w in ask.warnings)

def test_codex_runs_a_command_and_brings_the_result_back(tmp_path):
    def script(ask):
        if ask.messages[-1]['role']=='tool':
            return [Delta(content='It printed 42.'), Delta(finish='stop')]
        args = json.dumps(dict(cmd='echo $((6*7))'))
        begun = CallDelta(0, 'call_'+'a'*24, 'exec_command', args[:9])
        rest = CallDelta(0, arguments=args[9:])
        return [
            Delta(reasoning='I must count.'),
            Delta(content='Let me see.'),
            Delta(calls=(begun,)),
            Delta(calls=(rest,)),
            Delta(finish='tool_calls')]
    with serve(script) as s:
        got = codex(
            tmp_path, s.url, 'What is six times seven?',
            '--dangerously-bypass-approvals-and-sandbox')
        asks,last = s.asks,json.loads(s.bodies[-1])
    assert [m['text'] for m in completed(got, 'agent_message')]==['Let me see.','It printed 42.']
    assert completed(got, 'command_execution')[0]['exit_code']==0
    turn,result = asks[1].messages[-2:]
    assert (result['role'], result['tool_call_id'], result['name']) == (
        'tool', 'call_'+'a'*24, 'exec_command')
    assert '42' in result['content']
    assert (turn['reasoning'], turn['content'], len(turn['tool_calls'])) == (
        'I must count.', 'Let me see.', 1), 'one turn came back whole'
    assert [
        unseal(i['encrypted_content']) for i in last['input']
        if i['type']=='reasoning']==['I must count.']

def test_codex_shows_reasoning(tmp_path):
    deltas = [
        Delta(reasoning='**Thinking**\n\nHm.'),
        Delta(content='Done.'),
        Delta(finish='stop')]
    with serve(lambda ask: deltas) as s: got = codex(tmp_path, s.url, 'Think')
    assert 'Thinking' in completed(got, 'reasoning')[0]['text']

def test_codex_says_why_it_failed(tmp_path):
    async def script(ask):
        yield Delta(content='Half')
        raise RuntimeError('secret')
    with serve(script) as s:
        with pytest.raises(AssertionError, match='unexpected error') as e:
            codex(
                tmp_path, s.url, 'Say pong', '-c', 'model_providers.atlas.stream_max_retries=0',
                '-c', 'model_providers.atlas.request_max_retries=0')
    assert 'secret' not in str(e.value)

# -- Codex and the whole service: template, parsers, stream
# ------------------------------------------------------------------

def times(tool, args, *more):
    "Calls a tool, and reads out what it gave"
    return steps(
        tool, [args,*more],
        lambda prompt: 'It printed '+(
            '42.' if '42' in prompt.partition(f'call {tool}')[2] else 'something else.'))

def goes_on(prompts):
    "Does each prompt begin with the whole of the one before, so that the cache finds it?"
    ps = [p.removesuffix('assistant: ') for p in prompts if 'tool {' in p]
    return all(b.startswith(a) for a,b in zip(ps, ps[1:]))

# A loop of three turns: what the second does needs what the first did
LOOP = ['echo $((6*7)) > out.txt', 'cat out.txt', 'rm out.txt && ls']

def test_codex_through_the_whole_service(tmp_path):
    with service(times('exec_command', *(dict(cmd=c) for c in LOOP))) as s:
        got = codex(
            tmp_path, s.url, 'What is six times seven?',
            '--dangerously-bypass-approvals-and-sandbox')
    assert [
        m['text'].strip()
        for m in completed(got, 'agent_message')
    ]==['Let me see.']*3+['It printed 42.']
    assert [c['exit_code'] for c in completed(got, 'command_execution')]==[0,0,0]
    assert len(s.prompts)==4
    assert goes_on(s.prompts)
    assert '42' in completed(got, 'command_execution')[1]['aggregated_output']
    assert s.prompts[1].count('system: ')==1 and s.prompts[1].startswith('tool {')

# -- opencode: POST /v1/chat/completions or /v1/responses, streamed, as its provider package has
# it ---------------------------

def opencode(home, url, prompt, npm):
    "The events that `opencode run` prints"
    provider = dict(
        npm=npm, name='Atlas',
        options=dict(baseURL=f'{url}/v1', apiKey='none'),
        models=dict(scripted=dict(name='scripted', tool_call=True, reasoning=True)))
    (project := home/'project').mkdir(exist_ok=True)
    (project/'opencode.json').write_text(
        json.dumps(
            dict(
                model='atlas/scripted', small_model='atlas/scripted', autoupdate=False,
                share='disabled', permission=dict(bash='allow'),
                provider=dict(atlas=provider))))
    out = run(
        [agent('opencode'), 'run', prompt, '--format', 'json'],
        home, OPENCODE_DISABLE_MODELS_FETCH='1', OPENCODE_DISABLE_AUTOUPDATE='1')
    return [json.loads(l) for l in out.splitlines() if l.startswith('{')]

@pytest.mark.parametrize('npm', ['@ai-sdk/openai-compatible','@ai-sdk/openai'])
def test_opencode_calls_a_tool(tmp_path, npm):
    with service(
        times('bash', *(dict(command=c, description='Works') for c in LOOP))
    ) as s:
        got = opencode(tmp_path, s.url, 'What is six times seven?', npm)
    texts = [e['part']['text'].strip() for e in got if e['type']=='text']
    assert texts[-1]=='It printed 42.' and 'Let me see.' in texts
    uses = [e['part']['state'] for e in got if e['type']=='tool_use']
    assert [u['status'] for u in uses]==['completed']*3
    assert '42' in uses[1]['output']
    assert goes_on(s.prompts)

# -- Claude Code: POST /v1/messages, streamed
# ----------------------------------------------------------------------------------

def claude(home, url, prompt, *flags, **env):
    "What Claude Code says in the end"
    out = run(
        [agent('claude'), '-p', prompt, *flags, '--output-format', 'json'],
        home, ok=False, ANTHROPIC_BASE_URL=url, ANTHROPIC_AUTH_TOKEN='none',
        ANTHROPIC_MODEL='scripted', CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC='1',
        DISABLE_AUTOUPDATER='1', **env)
    return json.loads(out)

def test_claude_code_calls_tools(tmp_path):
    with service(
        times('Bash', *(dict(command=c, description='Works') for c in LOOP))
    ) as s:
        d = claude(tmp_path, s.url, 'What is six times seven?', '--allowedTools', 'Bash')
    assert (
        d['result'].strip(),d['is_error'],
        d['num_turns']
    )==('It printed 42.',False,4), d
    assert goes_on(s.prompts) and 'cch=' not in s.prompts[-1]

def test_claude_code_reads_on_after_a_file_that_cannot_be_read(tmp_path):
    """Atlas refuses a PDF, and an image where the model sees nothing. It says which block, and
    Claude Code leaves that out"""
    from PIL import Image
    (tmp_path/'project').mkdir()
    pdf,png = tmp_path/'project'/'a.pdf',tmp_path/'project'/'a.png'
    Image.new('RGB', (32,32), 'red').save(pdf)
    Image.new('RGB', (32,32), 'red').save(png)
    with service(
        steps(
            'Read',
            [dict(file_path=str(pdf)), dict(file_path=str(png))],
            lambda p: f'{p.count("removed")} removed')
    ) as s: d = claude(tmp_path, s.url, 'What is in them?', '--allowedTools', 'Read')
    assert (d['result'].strip(),d['is_error'])==('2 removed',False), d
