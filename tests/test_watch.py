"""Watching, over real sockets: servers that die and come back, what cron sees, and who cannot be
told."""
import asyncio,json,subprocess,sys
from contextlib import contextmanager
from pathlib import Path
import httpx,pytest

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from scripted import running  # noqa: E402
from helpers.waiting import WAIT  # noqa: E402
from test_models_page import Shams,sham  # noqa: E402
import atlas.service.gateway  # noqa: E402,F401 (it lets other servers stand beside models)
from atlas.service import watch  # noqa: E402
from atlas.service.http import ApiKeys,Rules  # noqa: E402
from atlas.service.server import create_app  # noqa: E402
from atlas.service.watch import Damper,Seen,Watcher,WatchError,once,teller  # noqa: E402

@contextmanager
def served(**kw):
    "A server of two models, of which one can be made ill"
    ms = Shams([sham('well', 1), sham('other', 1)], first=[])
    with running(create_app(ms, **kw)) as ms.url:
        yield ms

def make_ill(ms):
    m = ms.find('other')
    m.state,m.reason = 'failed','its disk is full'

def cron(url, tmp_path, *more):
    "A run of `atlas watch --once`: exit code, and what it printed"
    code = 'from atlas.use.cli import main; main()'
    r = subprocess.run(
        [sys.executable, '-c', code, 'watch', '--once', url, *more],
        capture_output=True, text=True, timeout=WAIT,
        env=dict(
            ATLAS_HOME=str(tmp_path), PATH='/usr/bin:/bin',
            PYTHONPATH=str(Path(__file__).parents[1])))
    return r.returncode,r.stdout,r.stderr

def test_cron_is_silent_until_something_changes(tmp_path):
    "Exit codes: 0 well, 3 ill, whether it is new or not; what is printed is news"
    with served() as ms:
        assert cron(ms.url, tmp_path)[:2]==(0,'')
        make_ill(ms)
        assert cron(ms.url, tmp_path)[:2]==(3,'atlas/other failed: its disk is full\n')
        assert cron(ms.url, tmp_path)[:2]==(3,'')
    assert cron(ms.url, tmp_path)[:2]==(3,'atlas cannot be reached\n')

FILE = """models: {m: {model: demo}}
watch: {every: 30s, endpoints: {asr: "URL/health"}}
"""

def test_a_file_is_watched(tmp_path):
    "Its endpoints, and its models where they are served"
    with served() as ms:
        path = tmp_path/'atlas.yaml'
        path.write_text(FILE.replace('URL', ms.url))
        make_ill(ms)
        code,said,_ = cron(str(path), tmp_path, '--json', '--server', ms.url)
    seen = {s['name']:s['well'] for s in json.loads(said)['seen']}
    assert code==3 and seen=={'asr':True, 'asr/well':True, 'asr/other':False,
        'atlas':True, 'atlas/well':True, 'atlas/other':False}

def test_what_a_file_names_is_watched_while_it_is_served(tmp_path):
    """A fleet that is built has its watch beside it; told is who can be, and else that is an
    error at once"""
    from atlas.service.fleet import fleet_of
    from atlas.service.reload import build
    text = FILE.replace('URL', 'http://asr')
    assert len(build(fleet_of(text)).beside)==1
    assert build(fleet_of(text.splitlines()[0])).beside==()
    told = text.replace('every: 30s', 'notify: ["nobody://x"]')
    with pytest.raises(WatchError):
        build(fleet_of(told))

def test_cron_as_json(tmp_path):
    with served() as ms:
        make_ill(ms)
        code,said,_ = cron(ms.url, tmp_path, '--json')
    said = json.loads(said)
    assert code==3 and {s['name']:s['well'] for s in said['seen']}=={
        'atlas':True, 'atlas/well':True, 'atlas/other':False}
    assert said['news']==['atlas/other failed: its disk is full']

def test_what_cannot_be_watched_is_refused(tmp_path):
    for what,why in (('ftp://x','is no address'), (str(tmp_path/'none.yaml'),'cannot be read')):
        code,out,err = cron(what, tmp_path)
        assert code==1 and out=='' and why in err and 'Traceback' not in err

def test_a_server_with_keys_tells_strangers_less():
    "Without a key its status alone counts; with one each model does"
    async def looked(key):
        w = Watcher(dict(atlas=ms.url+'/health'), key=key)
        async with w.client:
            return {s.name:s.well for s in await w.look()}
    with served(rules=Rules(keys=ApiKeys({'sesame':'user'}))) as ms:
        assert asyncio.run(looked(None))=={'atlas':True}
        make_ill(ms)
        assert asyncio.run(looked('sesame'))=={'atlas':True, 'atlas/well':True, 'atlas/other':False}
        ms.find('other').served = True # then its whole server is not well
        assert asyncio.run(looked(None))=={'atlas':False}

def test_a_key_is_for_its_server_alone():
    seen = {}
    def answer(request):
        seen[request.url.host] = request.headers.get('authorization')
        return httpx.Response(200)
    c = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    asyncio.run(
        Watcher(dict(atlas='http://a/health', asr='http://b/health'), key='sesame', client=c).look()
    )
    assert seen==dict(a='Bearer sesame', b=None)

@pytest.mark.parametrize(
    'body',
    [
        b'{', b'[]', b'{"models": 7}', b'{"models": {"m": 7}}', b'{"models": {"m": {}}}', b'\xff',
        b'null'])
def test_nonsense_is_no_model(body):
    c = httpx.AsyncClient(
        transport=httpx.MockTransport(lambda r: httpx.Response(503, content=body)))
    assert asyncio.run(Watcher(dict(x='http://x/'), client=c).look())==[
            Seen('x', False, 'answers 503')]

# -- flapping ------------------------------------------------------------------------------------

def test_what_comes_and_goes_is_told_once():
    "Hours of it make a handful of messages, and the last one is true"
    d,told = Damper(),[]
    looks = [i%4<2 for i in range(400)]+[False]*40
    for i,well in enumerate(looks):
        if said := d.hear(Seen('x', well, 'is gone'), 60.*i):
            told.append(said)
    assert len(told)<=7 and told[-1]=='x has stayed as it is: is gone for 15 min'

def test_things_do_not_disturb_each_other():
    d = Damper()
    for i in range(9):
        assert d.hear(Seen('a', True), i)is None
        said = d.hear(Seen('b', False, 'is gone'), i)
        assert (said is not None)==(i==1)

# -- who is told ---------------------------------------------------------------------------------

def test_without_apprise_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'apprise', None)
    with pytest.raises(WatchError) as e:
        teller(['json://localhost'])
    assert '.[watch]' in e.value.hint and e.value.param=='notify'

def test_people_are_told_by_apprise():
    "By the package itself, where it is installed: a message arrives"
    apprise = pytest.importorskip('apprise')
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route
    got = []
    async def take(request):
        got.append(await request.json())
        return Response()
    with running(Starlette(routes=[Route('/', take, methods=['POST'])])) as url:
        assert teller([url.replace('http', 'json')], apprise)('Atlas', 'asr is gone')
    assert got[0]['title']=='Atlas' and got[0]['message']=='asr is gone'

def test_what_could_not_be_sent_is_sent_later():
    said,up = [],[False]
    def tell(title, body):
        said.append(body)
        return up[0]
    def refuse(request):
        raise httpx.ConnectError('refused')
    w = Watcher(
        dict(asr='http://asr/'), tell, damper=Damper(confirm=1),
        client=httpx.AsyncClient(transport=httpx.MockTransport(refuse)))
    async def rounds():
        await w.round()
        up[0] = True
        await w.round()
        await w.round()
    asyncio.run(rounds())
    assert said==['asr cannot be reached']*2 and w.unsent==[]

def test_a_look_that_fails_is_not_the_last(monkeypatch):
    "`run` goes on after a fault of its own, until it is cancelled"
    rounds = []
    class Odd(Watcher):
        async def round(self):
            rounds.append(1)
            if len(rounds)==1:
                raise ValueError
            if len(rounds)==3:
                raise asyncio.CancelledError
    w = Odd({}, every=0.)
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(w.run())
    assert len(rounds)==3 and w.client.is_closed

def test_once_remembers_through_a_file(tmp_path):
    def refuse(request):
        raise httpx.ConnectError('refused')
    def look():
        w = Watcher(
            dict(asr='http://asr/'),
            client=httpx.AsyncClient(transport=httpx.MockTransport(refuse)))
        return asyncio.run(once(w, tmp_path/'deep'/'x.json'))[1]
    assert (look(),look())==(['asr cannot be reached'],[])
    assert [p.name for p in (tmp_path/'deep').iterdir()]==['x.json']
    assert watch.kept_at('a')!=watch.kept_at('b')

def test_once_tells_again_what_was_not_sent(tmp_path):
    def refuse(request):
        raise httpx.ConnectError('refused')
    told = []
    def tell(title, body):
        told.append(body)
        return len(told)==3
    for _ in range(5):
        client = httpx.AsyncClient(transport=httpx.MockTransport(refuse))
        asyncio.run(once(Watcher(dict(asr='http://asr/'), tell, client=client), tmp_path/'x.json'))
    assert told==['asr cannot be reached']*3
