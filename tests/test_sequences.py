"""How many sequences an engine runs at once where nobody says it: as many as there is memory for on
a card, eight on the host; and what is said of it."""
from pathlib import Path
import pytest
from atlas import LLM,SamplingParams
from atlas.card.emulator import Emulator,find_cxx
from atlas.cuda import vocabulary as card_words
from atlas.engine import card_stepper,loading
from atlas.engine.loading import FEW,MOST_ROWS,USUAL
from atlas.service.server import create_app
from atlas.service.worker import workload
from helpers.inprocess import loaded
from starlette.testclient import TestClient
import atlas.engine.score  # noqa: F401

DATA = Path(__file__).parent/'data'

def load(device='cpu', **kw):
    return LLM(str(DATA/'qwen35-moe-stacked'), device, show=False, **dict(max_seq_len=256)|kw)

def test_on_the_host():
    assert load().max_num_seqs==FEW and load(max_num_seqs=3).max_num_seqs==3

@pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')
@pytest.mark.parametrize('room,seqs', [(9,FEW), (20,16), (40,32), (200,128), (1000,128)])
def test_as_memory_allows(room, seqs):
    "In a cache that has room for so many, beside a tenth of it for snapshots"
    card = Emulator()
    one = load(card, max_num_seqs=1)._sequence_bytes(min(256, USUAL))
    llm = load(card, kv_cache_memory=int((room+.5)*one/.9))
    assert llm.max_num_seqs==seqs==llm.engine.scheduler.max_num_seqs
    assert llm.cache.num_states>=seqs

@pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')
def test_what_is_asked_for_counts():
    card = Emulator()
    assert load(card, max_num_seqs=5).max_num_seqs==5
    llm = load(card, speculative='ngram', num_speculative_tokens=3)
    assert llm.max_num_seqs==MOST_ROWS//4  # 256 rows a step

def test_it_is_told():
    llm = load()
    assert workload(llm).info['max_num_seqs']==FEW
    assert llm.engine.stats()['max_num_seqs']==FEW

@pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')
def test_chunks_are_longer_where_memory_is_a_cards_own(monkeypatch):
    "The emulator shares the host's memory, and does not"
    card = Emulator()
    most = card_words.DEFAULTS.large_chunk
    assert load(card).chunk==card_words.DEFAULTS.chunk
    monkeypatch.setattr(Emulator, 'shares_host', False)
    assert load(card).chunk==most and load(card, chunk=128).chunk==128
    monkeypatch.setattr(loading, 'SMALL', 1<<30)
    assert load(card).chunk==card_words.DEFAULTS.chunk

def test_clients_are_told():
    llm = LLM('tiny', 'cpu', 256, show=False)
    with TestClient(create_app(loaded(llm, ['tiny']))) as c:
        asked = dict(model='tiny', prompt='A', max_tokens=1)
        assert c.post('/v1/completions', json=asked).status_code==200  # it is loaded then
        assert c.get('/v1/models').json()['data'][0]['max_num_seqs']==FEW
        assert f'atlas:max_num_seqs{{model_name="tiny"}} {FEW}.0' in c.get('/metrics').text

@pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')
def test_few_graphs_are_kept(monkeypatch):
    "Answers are the same with room for one, which is recorded again and again"
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    prompts = [[5+i]*(3+i) for i in range(3)]
    def answers():
        llm = LLM(str(DATA/'smollm2-tied'), Emulator(), 256, 4, show=False)
        said = [llm.generate(p, params).token_ids for p in prompts]
        together = [r.token_ids for r in llm.generate(prompts, params)]
        assert together==said
        return said,len(llm.engine.stepper.graphs)
    many,kept = answers()
    monkeypatch.setattr(card_stepper, 'MOST_STEP_GRAPHS', 1)
    assert kept>1 and answers()==(many,1)
