"Ranking texts: the probability of yes against the logits of the model itself, and who refuses."
import shutil
import numpy as np, pytest
from starlette.testclient import TestClient
import atlas.engine.score  # noqa: F401
from atlas import LLM
from atlas.ground.hub import pull
from atlas.service.server import create_app
from atlas.service import service
from atlas.service.service import judged
from helpers.inprocess import loaded

QUERY,TEXTS = 'What does a cow eat?',['Cows eat grass.','The sea is deep.','A cow is an animal.']

WORDS = 'Yes','No' # Which the model at hand has as tokens

@pytest.fixture(scope='module', autouse=True)
def words():
    with pytest.MonkeyPatch.context() as m:
        m.setattr(service, 'VERDICTS', WORDS)
        yield

@pytest.fixture(scope='module')
def llm(tmp_path_factory):
    "A model that is called a reranker"
    folder = tmp_path_factory.mktemp('models')/'tiny-Reranker'
    shutil.copytree(pull('tiny'), folder)
    return LLM(str(folder), 'cpu', max_seq_len=256, max_num_seqs=2, show=False)

@pytest.fixture(scope='module')
def client(llm):
    with TestClient(create_app(loaded(llm, ['judge'])), raise_server_exceptions=False) as c:
        yield c

def rank(c, **kw):
    return c.post('/v1/rerank', json=dict(query=QUERY, documents=TEXTS)|kw)

def by_hand(llm, text, instruction=None):
    "The probability of yes, of yes and no, by the logits behind the prompt"
    said = llm.template.render(
        judged(QUERY, text, instruction), add_generation_prompt=True, enable_thinking=False)
    ids = llm.tokenizer.encode(said, add_special=False)
    yes,no = (llm.tokenizer.encode(w, add_special=False)[0] for w in WORDS)
    logits = llm.logits(ids)
    last = np.asarray(logits, np.float64).reshape(-1, np.shape(logits)[-1])[-1]
    return 1/(1+np.exp(last[no]-last[yes])),len(ids)

def test_relevance_is_the_probability_of_yes(client, llm):
    r = rank(client).json()
    want = [by_hand(llm, t) for t in TEXTS]
    got = {x['index']:x['relevance_score'] for x in r['results']}
    assert np.allclose(
        [got[i] for i in range(3)],
        [p for p,_ in want], atol=1e-4)
    assert len({round(p, 6) for p,_ in want})==3, 'the texts must differ'
    scores = [x['relevance_score'] for x in r['results']]
    assert scores==sorted(scores, reverse=True)
    assert r['usage']==dict(
        prompt_tokens=sum(n for _,n in want),
        total_tokens=sum(n for _,n in want))

def test_an_instruction_counts(client, llm):
    r = rank(client, documents=TEXTS[:1], instruction='Find texts about the sea').json()
    want,_ = by_hand(llm, TEXTS[0], 'Find texts about the sea')
    assert abs(r['results'][0]['relevance_score']-want)<1e-4
    assert abs(want-by_hand(llm, TEXTS[0])[0])>1e-4

def test_shapes(client):
    r = client.post(
        '/rerank',
        json=dict(
            query='a', documents=[dict(text='b'),'c','d'],
            top_n=2, return_documents=True)).json()
    assert len(r['results'])==2 and r['object']=='list' and r['model']=='judge'
    assert all(x['document']['text']==['b','c','d'][x['index']] for x in r['results'])

@pytest.mark.parametrize('bad,param', [(dict(query=None),'query'), (dict(documents=[]),'documents'),
    (dict(documents=[3]),'documents[0]'),
    (dict(top_n=0),'top_n'),
    (dict(documents=['x'*3000]),'prompt')])
def test_refused(client, bad, param):
    r = rank(client, **bad)
    assert r.status_code==400 and r.json()['error']['param']==param

def test_one_that_was_not_made_for_it_says_so():
    from test_server import FakeRunner,local
    r = rank(local(FakeRunner()))
    assert r.status_code==501 and 'no reranker' in r.json()['error']['message']
    assert r.headers['x-should-retry']=='false'
