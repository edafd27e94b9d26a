"Steps with drafts whose kernels start as early as they may, as on a card (tests/test_races.py)."
import numpy as np,pytest
from atlas.card.emulator import Emulator,find_cxx
from atlas.cuda.accept import VerifyRows,accept_rows,next_rows
from atlas.cuda.sample import SampleTable,sample_rows
from atlas.ops.sample import SampleState,SamplingParams
from test_races import overlap  # noqa: F401  a fixture

pytestmark = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')

S,W,V = 3,3,40
ASKED = [
    dict(temperature=0),
    dict(top_p=.9, logprobs=2),
    dict(top_k=5, presence_penalty=.5)]

def begin(card):
    "Rows of sequences that begin, and what they ask for"
    r = VerifyRows(card, S, W, 16, 4, steps=2, scratch=50)
    t = SampleTable(card, S, V, rows=S*W, width=W)
    for i,kw in enumerate(ASKED):
        p = SamplingParams(**kw)
        t.set(i, SampleState(p, [1], V, seed=i))
    seqs,rows = np.arange(S),np.arange(S*W)
    first = dict(line=seqs, lanes=rows//W, ids=rows, live=1, kmax=W-1, limit=60)
    first['tables'] = np.arange(16*S).reshape(S, 16)
    for k,v in first.items():
        a = getattr(r, k)
        card.write(a, np.full(a.shape, v, np.int32))
    return r,t

def told(r, t, k):
    "What the host heard of step `k`"
    heard = t.heard[k%2]
    ids,seqs = heard['id'],r.heard_seq[k%2]
    return ids.tolist(),heard['logprob'].tobytes(),seqs.tolist()

def where(r):
    "Where it stands"
    arrays = vars(r.on_host())
    return {k: np.array(a).tolist() for k,a in arrays.items()}

def model_step(card, r, t, logits, drafts):
    "Sample, accept, draft what the likeliest tokens are, and go on"
    how = dict(width=W, given=r.ids)
    sample_rows(logits, t, r.said, r.lanes, **how)
    accept_rows(r, t, full=True)
    sample_rows(logits, t, drafts, r.lanes, greedy=True, **how)
    K = W-1
    next_rows(r, drafts[:S*K].reshape(K, S))

def text(card, chain, steps=12):
    "What a model that is a table of logits says, as the host hears it, and where it stands then"
    r,t = begin(card)
    logits,drafts = card.empty((S*W,V)),card.empty(S*W, 'int32')
    heard,zeros = [],np.zeros(S*W, np.float32)
    for k in range(steps):
        ids = card.download(r.ids)
        card.write(logits, chain[np.maximum(ids, 0)])
        card.write(t.logprobs, zeros)
        model_step(card, r, t, logits, drafts)
        heard.append(told(r, t, k))
    return heard,where(r)

def test_nothing_is_read_before_it_is_written(overlap):
    card,rng = Emulator(),np.random.default_rng(0)
    chain = rng.standard_normal((V,V)).astype('f4')*4
    got = text(card, chain)
    assert {'accept','next_rows','sample_draw'}<=overlap.names and overlap.hidden>100
    overlap.on = False
    assert got==text(card, chain)
