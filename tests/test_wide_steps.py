"""Steps of many rows, each weight read once, on the emulator: a row's logits have the bits that the
row has alone, whoever is beside it, and so has every row of a sequence that checks drafts."""
import pytest
from atlas.card.emulator import find_cxx
from atlas.cuda import sample
from atlas.engine.cache import state_in
from atlas.ground.requests import Request,SamplingParams
from atlas.model.model import Piece
from helpers.small_engine import said,serve,tokens
from test_card import cache_of,forward,ids_of,models
from test_speculation_card import engine,hybrid,requests

pytestmark = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')

def piece(i, t):
    "The first token of sequence `i`"
    return Piece([t], 0, [i], 1, state=0,
        keep=state_in(1+i))

@pytest.mark.parametrize('toy,weights', [('llama','fp8'), ('qwen3.6-moe','nvfp4')])
def test_thirty_three_sequences(toy, weights):
    "One row of each"
    m = models(toy, weights)[1]
    tokens = ids_of(33, 5)
    together = forward(m, cache_of(m, 40),
        [piece(i, t) for i,t in enumerate(tokens)], False)
    for i in (0,7,8,15,16,31,32):
        alone = forward(m, cache_of(m, 40),
            [piece(i, tokens[i])], False)
        assert (together[i]==alone[0]).all(), i

def test_sequences_that_check_drafts():
    "Four of them, with three drafts each: sixteen rows a step"
    m = hybrid()
    def answers(*how):
        got,_ = serve(engine(m, *how),
            [(r,0)
                for r,_ in requests(m.c.vocab_size, 4)])
        return {rid: said(events) for rid,events in got.items()}
    assert answers('ngram', 3)==answers()

def asked(i, **kw):
    "Request `i`, greedy, of five tokens"
    params = SamplingParams(temperature=0, ignore_eos=True, **kw)
    return Request(f'r{i}', tuple(ids_of(5, i)), params)

@pytest.mark.parametrize('drafts', (0,2))
def test_greedy_sequences(drafts, monkeypatch):
    """The head of their steps leaves keys; where one of them asks for more it leaves logits, and
    nobody says anything else"""
    m,keyed,run = hybrid(),[],sample.run
    def seen(name, *args, **kw):
        if name=='greedy':
            keyed.append('KEYS' in kw)
        run(name, *args, **kw)
    monkeypatch.setattr(sample, 'run', seen)
    reqs = [(asked(i, max_tokens=9), 0) for i in range(10)]
    reqs[3] = asked(3, max_tokens=4, logprobs=2),0
    def answers(some, seqs):
        got,_ = serve(engine(m, 'ngram' if drafts else 'none', drafts, seqs=seqs), some)
        return {rid: tokens(events) for rid,events in got.items()}
    together = answers(reqs, 10)
    assert True in keyed
    alone = {}
    for r,_ in reqs:
        alone |= answers([(r,0)], 1)
    assert together==alone
