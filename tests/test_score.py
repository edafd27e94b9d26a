"""Scores and vectors of texts: the same as logits say, in every family, in chunks, between the
steps of running requests, and on a card (the emulator)."""
import sys
from pathlib import Path
import numpy as np, pytest
from atlas import LLM,SamplingParams
from atlas.ground.core import QueueFullError,RequestError,UnsupportedError
from atlas.card.emulator import Emulator
import atlas.engine.score  # noqa: F401
from atlas.ops.sample import logsumexp

sys.path.insert(0, str(Path(__file__).parent/'gpu'))
from toys import toy  # noqa: E402

data = Path(__file__).parent/'data'
def load(name, device='cpu', **kw):
    return LLM(
        str(data/name), device,
        **dict(max_seq_len=256, max_num_seqs=3, chunk=64, show=False)|kw)
def text(llm, n, seed=0):
    return np.random.default_rng(seed).integers(
        3, min(150, llm.config.vocab_size), n).tolist()
def wanted(llm, ids):
    return [
        r[t]-logsumexp(r)
        for r,t in zip(llm.logits(ids), ids[1:])]

@pytest.mark.parametrize(
    'name', ['smollm2-tied','qwen35-moe-stacked','nemotron-h','gemma4-dense','gpt-oss'])
@pytest.mark.parametrize('n', [1,2,64,65,150])
def test_scores_are_those_of_the_logits(name, n):
    llm = load(name)
    ids = text(llm, n)
    got = llm.score(ids, 2)
    assert len(got)==n-1
    assert all(
        len(best)==2
        and best[0][1]>=best[1][1]>=-1e4
        for _,best in got)
    assert np.allclose([p for p,_ in got], wanted(llm, ids), atol=2e-3)
    assert (llm.cache.pool.used,llm.engine.scheduler.states.used)==(0,0)

@pytest.mark.parametrize('name', ['smollm2-tied','qwen35-moe-stacked'])
def test_between_steps_of_others(name):
    "A score in the middle of an answer changes nothing of either"
    llm = load(name)
    ids,p = text(llm, 90),SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    alone,said = llm.generate(ids[:20], p).token_ids,llm.score(ids)
    got = []
    for i,d in enumerate(llm.stream(ids[:20], p)):
        got += [t.id for t in d.tokens]
        if i in (0,3,7):
            assert llm.score(ids)==said
    assert got==alone

@pytest.mark.parametrize('kind', ['mtp','ngram'])
@pytest.mark.parametrize('pooling', ['last','mean'])
def test_with_drafts_nothing_changes(kind, pooling):
    "A sequence has more slots for states then; a text of several chunks takes the same two"
    plain = load('qwen35-moe-stacked')
    llm = load('qwen35-moe-stacked', speculative=kind, num_speculative_tokens=3)
    for n in (65,150,200):
        ids = text(llm, n)
        assert llm.score(ids, 2)==plain.score(ids, 2)
        assert llm.embed(ids, pooling)==plain.embed(ids, pooling)
    assert llm.engine.scheduler.states.used==0

def test_between_steps_that_check_drafts():
    "As `test_between_steps_of_others`"
    name,p = 'qwen35-moe-stacked',SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    plain,llm = load(name),load(name, speculative=True, num_speculative_tokens=3)
    ids,got = text(llm, 90),[]
    for d in llm.stream(ids[:20], p):
        got += [t.id for t in d.tokens]
        assert llm.score(ids)==plain.score(ids)
    assert got==plain.generate(ids[:20], p).token_ids

def test_no_room_is_said_and_leaves_nothing():
    llm = load('smollm2-tied', max_num_seqs=1, max_seq_len=64)
    ids = text(llm, 64)
    s = llm.stream(
        ids[:32],
        SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    next(s)
    with pytest.raises(QueueFullError):
        llm.score(ids)
    s.close()
    assert len(llm.score(ids))==63
    with pytest.raises(RequestError, match='vocabulary'):
        llm.embed([10**6])
    with pytest.raises(RequestError, match='empty'):
        llm.embed([])
    assert llm.cache.pool.used==0

@pytest.mark.parametrize('pooling', ['last','mean'])
def test_vectors_tell_texts_apart(pooling):
    llm = load('qwen35-moe-stacked')
    a,b = text(llm, 100),text(llm, 100, 1)
    va,vb,again = (
        np.array(llm.embed(t, pooling))
        for t in (a,b,a))
    assert (va==again).all()
    assert abs(np.linalg.norm(va)-1)<1e-9
    assert va@vb<.999

def test_on_a_card():
    "Between the steps of an answer, which does not notice"
    card = toy('qwen3.6-moe', True, 3, 256)
    ids = np.random.default_rng(0).integers(3, 250, 70).tolist()
    p = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    alone,got = card.generate(ids[:9], p).token_ids,[]
    for i,d in enumerate(card.stream(ids[:9], p)):
        got += [t.id for t in d.tokens]
        if i in (0,2):
            assert np.allclose(
                [p for p,_ in card.score(ids)],
                wanted(card, ids), atol=2e-3)
    assert got==alone
    assert abs(np.linalg.norm(card.embed(ids))-1)<1e-9
    assert card.cache.pool.used==0

def test_heads_that_kernels_do_not_take():
    """Sizes that no model has, but that a file may name, are refused on a card before a kernel
    reads beyond its arrays"""
    with pytest.raises(UnsupportedError, match='12'):
        load('qwen35-moe-stacked', Emulator()).score(list(range(3, 73)))
