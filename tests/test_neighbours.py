"""What programs for llama-swap and llama.cpp ask of a server: what is loaded, unloading,
properties, slots."""
import pytest
from starlette.testclient import TestClient
from atlas.ground.options import EngineConfig
from atlas.service.process import Model,Served
from atlas.service.models import Models
from atlas.service.http import ApiKeys,Rules
from atlas.service.server import create_app
from atlas.service.service import ReadyModel
from helpers.inprocess import app_of
from test_server import FakeRunner,template,tok

QUIET = dict(raise_server_exceptions=False)

class Pool(Models):
    "Remembers what is to be unloaded"
    def __init__(self, *args, **kw):
        super().__init__(*args, **kw)
        self.gone = []
    async def unload(self, name):
        self.gone.append(self.find(name).name)
        return {}

def two(**kw):
    "One that is there, and one that is not"
    r = FakeRunner()
    r.info |= dict(max_num_seqs=4)
    up = ReadyModel('fake', ['fake','alias'], r.info, tok, template, runner=r)
    here = Served(['fake','alias'], up)
    here.wanted = True
    return r,Pool(
        [here, Model(EngineConfig('other'))], first=('fake',),
        **kw)

@pytest.fixture
def pool():
    r,models = two()
    with TestClient(create_app(models), base_url='http://localhost', **QUIET) as c:
        yield r,models,c

def test_running(pool):
    _,_,c = pool
    one, = c.get('/running').json()['running']
    assert (one['model'],one['state'],one['ttl'])==('fake','ready',0)

def test_states_have_llama_swaps_words(pool):
    _,models,c = pool
    states = {}
    for state in ('loading','loaded','sleeping','unloading','failed','unloaded'):
        models.all[1].state = state
        states[state] = [
            m['state'] for m in c.get('/running').json()['running'] if m['model']=='other']
    assert states==dict(loading=['starting'], loaded=['ready'], sleeping=['sleeping'],
        unloading=['stopping'], failed=[], unloaded=[])

UNLOAD = [
    ('GET','/unload'), ('POST','/unload'), ('POST','/api/models/unload'),
    ('GET','/unload/alias'), ('POST','/unload/fake'), ('POST','/api/models/unload/alias')]

@pytest.mark.parametrize('method,path', UNLOAD)
def test_unload(pool, method, path):
    _,models,c = pool
    r = c.request(method, path)
    assert r.status_code==200 and r.json()==dict(msg='ok') and models.gone==['fake']

def test_unload_of_none(pool):
    _,models,c = pool
    assert c.get('/unload/nothing').status_code==404
    r = c.post('/api/models/unload/nothing')
    assert r.status_code==404 and isinstance(r.json()['error'], str) and not models.gone

def test_a_page_unloads_nothing(pool):
    "A picture on anybody's page is a GET; and reading the headers alone unloads nothing either"
    _,models,c = pool
    for site in ('cross-site','same-site'):
        for path in ('/unload','/unload/fake'):
            assert c.get(path, headers={'sec-fetch-site':site}).status_code==403
        assert c.post('/api/models/unload', headers={'sec-fetch-site':site}).status_code==403
    for path in ('/unload','/unload/fake'):
        assert c.head(path).status_code==405
    assert not models.gone
    assert c.get('/unload', headers={'sec-fetch-site':'same-origin'}).status_code==200

def test_unloading_is_for_admins():
    _,models = two()
    rules = Rules(keys=ApiKeys({'sesame':'user','onion':'admin'}))
    with TestClient(create_app(models, rules=rules), base_url='http://localhost', **QUIET) as c:
        def ask(path, key, how):
            return c.request(how, path, headers={'x-api-key':key}).status_code
        paths = [
            ('/unload','GET'), ('/unload/fake','GET'), ('/unload/fake','POST'),
            ('/api/models/unload','POST'), ('/api/models/unload/fake','POST')]
        assert [ask(p, 'sesame', how) for p,how in paths]==[403]*5 and not models.gone
        assert [ask(p, 'onion', how) for p,how in paths]==[200]*5
        assert c.get('/running', headers={'x-api-key':'sesame'}).status_code==200

def test_props(pool):
    _,models,c = pool
    assert c.get('/props').json()['role']=='router'
    d = c.get('/props?model=alias').json()
    assert (
        d['model_alias'], d['total_slots'], d['default_generation_settings']['n_ctx']
    )==('fake',4,1000)
    assert 'm.role' in d['chat_template'] and d['modalities']==dict(vision=False, audio=False)
    d = c.get('/props', params=dict(model='other')).json()
    assert (
        d['total_slots'], d['is_sleeping'], models.all[1].state)==(0,False,'unloaded')
    assert c.get('/props?model=x').status_code==404

def test_slots(pool):
    r,models,c = pool
    r.seen += [1]
    slots = c.get('/slots?model=fake').json()
    assert [s['id'] for s in slots]==[0,1,2,3] and [
        s['is_processing'] for s in slots]==[True]+[False]*3
    assert c.get('/slots?model=fake&fail_on_no_slot=1').status_code==200
    r.seen += [1]*3
    full = c.get('/slots?model=fake&fail_on_no_slot=1')
    assert full.status_code==503 and full.headers['retry-after']
    assert c.get('/slots?model=other').json()==[] and models.all[1].state=='unloaded'
    assert c.get('/slots').status_code==400

def test_one_model_needs_no_name():
    c = TestClient(app_of(FakeRunner(), tok, template), **QUIET)
    assert c.get('/props').json()['model_alias']=='fake' and c.get('/slots').json()==[]
