"""`atlas ps`, `load`, `stop` and `top` against a gateway of scripted workers:
what they show and change, in tables and as JSON, and what they say when they may not."""
import json,socket,sys,time
from pathlib import Path
import pytest
from atlas.service.http import ApiKeys,Rules
from atlas.service.server import create_app
from atlas.use.admin import Server,cells,row
from atlas.use.clients import ClientError
from test_cli import Terminal,run
from test_http import live
from test_models_page import GIB,Shams,sham

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from helpers.waiting import until  # noqa: E402
from test_llamacpp_behaviour import ask,routed  # noqa: E402

@pytest.fixture(autouse=True)
def no_keys(monkeypatch):
    for n in ('ATLAS_API_KEY','ATLAS_ADMIN_KEY'):
        monkeypatch.delenv(n, raising=False)

@pytest.fixture(scope='module')
def gateway():
    "Two models of which one is loaded at the start; its address"
    with routed(
        dict(model='one'),
        dict(model='two', at_load=None),
        first=['one'], autoload=False
    ) as (h,models):
        until(lambda: models.find('one').state=='loaded')
        yield str(h.base_url).rstrip('/'),h

def ok(*args):
    r = run(*args)
    assert r.exit_code==0, r.stderr
    return r.stdout

def refused(*args):
    r = run(*args)
    assert r.exit_code==1 and r.stdout=='' and 'Traceback' not in r.stderr
    return r.stderr

def states(url):
    return {m['name']:m['state']
        for m in json.loads(ok('ps', '--url', url, '--json'))['models']}

# ---- What is there ----

def test_ps(gateway):
    url,h = gateway
    head,*lines = ok('ps', '--url', url).splitlines()
    assert head.split()==[
        'NAME','STATE','SIZE','TOKENS/S','ROOF','RUNNING','WAITING','SINCE',
        'UNTIL','NAMES']
    assert [l.split()[:2] for l in lines]==[
        ['one','loaded'],['two','unloaded']]
    before = time.time()
    ask(h, 'one', max_tokens=4)
    until(lambda: not Server(url).one('one').running)
    one,two = json.loads(ok('ps', '--url', url+'/v1/', '--json'))['models']
    assert one['tokens_per_second']>0 and (one['running'],one['waiting'])==(0,0)
    assert before-3600<one['since']<=time.time()+1 and two['state']=='unloaded'

def test_ps_says_what_is_known_of_the_memory():
    models = Shams([
        sham('big', 40*GIB),
        sham('gone', 10*GIB, 'failed', 'no room')])
    with live(create_app(models)) as port:
        url = f'http://127.0.0.1:{port}'
        said = json.loads(ok('ps', '--url', url, '--json'))
        assert said['memory']['budget']==100*GIB
        assert [(m['bytes'],m['state'],m['reason'])
            for m in said['models']
        ]==[(40*GIB,'loaded',None),(10*GIB,'failed','no room')]
        assert '40 GiB' in ok('ps', '--url', url)

# ---- Loading and unloading ----

def test_load_and_stop(gateway):
    "Both wait for the end; what is so already is no error; since is since then"
    url,_ = gateway
    since = Server(url).one('two').since
    assert ok('load', 'two', '--url', url)=='two is loaded\n'
    assert ok('load', 'two', '--url', url)=='two is loaded\n'
    assert states(url)==dict(one='loaded', two='loaded')
    assert Server(url).one('two').since>=since
    assert json.loads(ok('stop', 'two', '--url', url, '--json'))['state']=='unloaded'
    assert ok('stop', 'two', '--url', url)=='two is unloaded\n'
    assert states(url)==dict(one='loaded', two='unloaded')

def test_without_waiting(gateway):
    url,_ = gateway
    assert json.loads(
        ok('load', 'two', '--no-wait', '--json', '--url', url)
    )['state'] in ('loading','loaded')
    until(lambda: states(url)['two']=='loaded')
    ok('stop', 'two', '--no-wait', '--url', url)
    until(lambda: states(url)['two']=='unloaded')

def test_a_load_that_fails_says_why():
    with routed(
        dict(model='good'),
        dict(model='bad', at_load='oom'), first=['good']
    ) as (h,models):
        url = str(h.base_url).rstrip('/')
        said = refused('load', 'bad', '--url', url)
        assert 'bad has failed' in said and models.find('bad').reason in said
        assert ok('stop', 'bad', '--url', url)=='bad is failed\n'

def test_a_model_that_is_none(gateway):
    url,_ = gateway
    for verb in ('load','stop'):
        assert "'three'" in refused(verb, 'three', '--url', url)
    assert "'a/b?c'" in refused('load', 'a/b?c', '--url', url)

# ---- As it goes ----

def test_top_in_a_pipe(gateway):
    url,_ = gateway
    said = ok('top', '--url', url, '--count', '2', '--every', '0.1')
    assert said.count('STATE')==2 and said.count('tokens/s,')==2 and url in said

def test_top_as_json(gateway):
    url,_ = gateway
    lines = [json.loads(l)
        for l in ok(
            'top', '--url', url, '--count', '2', '--every', '0.1', '--json').splitlines()]
    assert [[m['name'] for m in l['models']]
        for l in lines
    ]==[['one','two']]*2

@pytest.mark.parametrize('term', ['dumb','xterm-256color'])
def test_top_in_a_terminal(gateway, term):
    "It goes on until Ctrl-C, which is how to leave it and no error"
    url,_ = gateway
    t = Terminal(f"""import os; os.environ['TERM'] = {term!r}
from atlas.use.cli import app
try: app(['top','--url',{url!r},'--every','.1'])
finally: print('left', flush=True)""")
    try:
        for _ in range(3):
            t.expect('tokens/s,')
        t.expect('left', again='\x03')
        assert t.status()==0
    finally:
        t.end()

def test_top_outlives_a_server_that_is_away(gateway, monkeypatch):
    url,_ = gateway
    looks,n = Server.rows,[0]
    def rows(self):
        n[0] += 1
        if n[0]==2:
            raise ClientError('No server answers')
        return looks(self)
    monkeypatch.setattr(Server, 'rows', rows)
    first,gone,back = ok(
        'top', '--url', url, '--count', '3', '--every', '0.1', '--json').splitlines()
    assert json.loads(gone)==dict(error='No server answers')
    assert first.startswith('{"models"')
    assert back.startswith('{"models"')

# ---- Keys, and servers that are none ----

@pytest.fixture(scope='module')
def guarded():
    rules = Rules(keys=ApiKeys({'sesame':'user', 'onion':'admin'}))
    models = Shams([sham('m', GIB, 'unloaded')], first=())
    with live(create_app(models, rules=rules)) as port:
        yield f'http://127.0.0.1:{port}',models

def test_keys(guarded, monkeypatch):
    "From the flag, or the environment; what changes something is for admins"
    url,models = guarded
    assert 'wants an API key' in refused('ps', '--url', url)
    assert 'does not know' in refused('ps', '--url', url, '--key', 'guess')
    assert 'm' in ok('ps', '--url', url, '--key', 'sesame')
    said = refused('load', 'm', '--url', url, '--key', 'sesame')
    assert 'the key of an admin' in said and models.find('m').state=='unloaded'
    assert ok('load', 'm', '--url', url, '--key', 'onion')=='m is loaded\n'
    monkeypatch.setenv('ATLAS_API_KEY', 'sesame')
    assert 'm' in ok('ps', '--url', url)
    assert 'the key of an admin' in refused('stop', 'm', '--url', url)
    monkeypatch.setenv('ATLAS_ADMIN_KEY', 'onion,other')
    assert ok('stop', 'm', '--url', url)=='m is unloaded\n'

def test_no_server():
    with socket.create_server(('127.0.0.1', 0)) as s:
        port = s.getsockname()[1]
    for verb in (
        ['ps'],['load','m'],['stop','m'],
        ['top'],['top','--json']
    ):
        assert 'atlas serve' in refused(*verb, '--url', f'http://127.0.0.1:{port}')
    assert 'no address' in refused('ps', '--url', 'spark:8888')

def test_something_else():
    "A server that speaks HTTP, and is none of ours"
    from scripted import running
    from starlette.applications import Starlette
    from starlette.responses import JSONResponse,PlainTextResponse
    from starlette.routing import Route
    said = [
        PlainTextResponse('hello'), JSONResponse([1]),
        JSONResponse(dict(data=[3])),
        JSONResponse({}, 418)]
    async def answer(request):
        return said[0]
    with running(Starlette(routes=[Route('/models', answer)])) as url:
        while said:
            assert 'no server of models' in (e := refused('ps', '--url', url)) or '418' in e
            said.pop(0)

def test_other_servers_of_this_kind():
    "llama.cpp's list of models says less"
    r = row(dict(id='x', status=dict(value='sleeping')))
    assert cells(r, 0)==(
        'x', 'sleeping', '-', '-', '-', '0', '0', '-', '-', '')
