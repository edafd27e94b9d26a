"""Programs that people have, started by `atlas launch` against our own service: each must print
what the model said."""
import json,socket,subprocess,sys,threading
from contextlib import contextmanager
from pathlib import Path
import pytest
from atlas.service.http import Bounds,ApiKeys,Rules
from atlas.use.clients import ClientError,find_server
from test_http import live
from test_server import FakeRunner,app_of,template,tok

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from agents import PATH,agent  # noqa: E402
from helpers.waiting import WAIT  # noqa: E402

ASK = {
    'codex':['exec','--skip-git-repo-check','Say pong'],
    'opencode':['run','Say pong'], 'claude':['-p','Say pong'],
    'continue':['-p','Say pong'], 'pi':['-p','Say pong']}

@pytest.fixture(scope='module')
def port():
    rules = Rules(keys=ApiKeys({'sesame':'user'}))
    app = app_of(FakeRunner('pong', max_seq_len=1<<20), tok, template, rules=rules)
    with live(app, Bounds()) as port:
        yield port

def environment(home):
    "Of a user with an empty home, and the key of the server"
    return dict(
        PATH=PATH, HOME=str(home), ATLAS_HOME=str(home/'atlas'), ATLAS_API_KEY='sesame',
        LANG='C.UTF-8', OPENCODE_DISABLE_MODELS_FETCH='1', OPENCODE_DISABLE_AUTOUPDATE='1',
        PYTHONPATH=str(Path(__file__).parents[1]))

def said(client, port, home, **env):
    "What a client prints when Atlas has started it, in an empty home that may be prepared"
    agent({'continue':'cn'}.get(client, client))
    code = 'from atlas.use.cli import main; main()'
    args = ['launch', client, '--url', f'http://127.0.0.1:{port}', '--', *ASK[client]]
    (home/'work').mkdir(exist_ok=True)
    r = subprocess.run(
        [sys.executable,'-c',code,*args], env=environment(home)|env, cwd=home/'work',
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=WAIT)
    written = [f for f in home.rglob('*') if f.is_file() and b'sesame' in f.read_bytes()]
    assert not written, 'the key was written'
    assert r.returncode==0, r.stderr[-2000:]
    return r.stdout

@pytest.mark.parametrize('client', ASK)
def test_launch(client, port, tmp_path):
    assert 'pong' in said(client, port, tmp_path)

@pytest.fixture
def nowhere():
    "The address of something that takes connections and never answers"
    with socket.create_server(('127.0.0.1', 0)) as s:
        yield f'http://127.0.0.1:{s.getsockname()[1]}'

def test_claude_goes_to_atlas_whatever_its_user_had_set(port, tmp_path, nowhere):
    mine = json.dumps(
        dict(
            env=dict(
                ANTHROPIC_BASE_URL=nowhere, ANTHROPIC_MODEL='claude-x',
                CLAUDE_CODE_USE_VERTEX='1'),
            model='sonnet'))
    for folder in tmp_path/'.claude',tmp_path/'work'/'.claude':
        folder.mkdir(parents=True)
        (folder/'settings.json').write_text(mine)
    assert 'pong' in said(
        'claude', port, tmp_path, CLAUDE_CODE_USE_BEDROCK='1', ANTHROPIC_API_KEY='sk-ant-1',
        CLAUDE_CODE_OAUTH_TOKEN='x')
    assert json.loads((tmp_path/'.claude'/'settings.json').read_text())==json.loads(mine)

def test_opencode_goes_to_atlas_whatever_the_project_says(port, tmp_path):
    mine = json.dumps(dict(model='anthropic/claude-x', small_model='anthropic/claude-x'))
    (tmp_path/'work').mkdir()
    (tmp_path/'work'/'opencode.json').write_text(mine)
    assert 'pong' in said('opencode', port, tmp_path)
    assert json.loads(
        (tmp_path/'work'/'opencode.json').read_text()
    ).items()>=json.loads(mine).items()

def test_codex_keeps_its_own_configuration(port, tmp_path):
    (tmp_path/'.codex').mkdir()
    (tmp_path/'.codex'/'config.toml').write_text('model = "mine"\n')
    assert 'pong' in said('codex', port, tmp_path)
    assert [f.name for f in (tmp_path/'.codex').iterdir()]==['config.toml']
    assert (tmp_path/'.codex'/'config.toml').read_text()=='model = "mine"\n'

@pytest.mark.parametrize('client', ['codex','claude'])
def test_a_proxy_is_left_out_on_the_way_to_this_machine(client, port, tmp_path):
    with socket.create_server(('127.0.0.1', 0)) as s:
        dead = f'http://127.0.0.1:{s.getsockname()[1]}'
    assert 'pong' in said(
        client, port, tmp_path,
        **dict.fromkeys(
            ('HTTP_PROXY','http_proxy','HTTPS_PROXY','https_proxy','ALL_PROXY'), dead))

# -- what is no server ---------------------------------------------------------------------------

@contextmanager
def saying(text):
    "The address of something that says `text` to whoever comes"
    with socket.create_server(('127.0.0.1', 0)) as s:
        def answer():
            with s.accept()[0] as c:
                c.recv(1<<16)
                c.sendall(text)
        thread = threading.Thread(target=answer)
        thread.start()
        yield f'http://127.0.0.1:{s.getsockname()[1]}'
        thread.join()

OK = b'HTTP/1.1 200 OK\r\n\r\n'

@pytest.mark.parametrize('text, why', [
    (b'SSH-2.0-OpenSSH_9.6\r\n', 'is no server of models'), (OK+b'fine', 'is no server of models'),
    (OK+b'{"data": 5}', 'is no server of models'), (OK+b'{"data": null}', 'has no model')])
def test_what_is_no_server_of_models_is_called_that(text, why):
    with saying(text) as url:
        with pytest.raises(ClientError, match=why):
            find_server(url)

@pytest.mark.parametrize('key', ['ключ', 'a\nb'])
def test_a_key_that_cannot_be_sent_is_called_that(key):
    with pytest.raises(ClientError, match='The API key has characters'):
        find_server('http://127.0.0.1:1', key=key)
