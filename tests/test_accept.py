"Steps with drafts whose kernels start as early as they may, as on a card (tests/test_races.py)."
import numpy as np,pytest
from atlas.card.emulator import Emulator,find_cxx
from atlas.cuda.accept import VerifyRows,accept_rows,next_rows
from atlas.cuda.sample import SampleTable,sample_rows
from atlas.ops.sample import SampleState,SamplingParams
from test_races import overlap

pytestmark = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')

S,W,V = 3,3,40
ASKED = dict(temperature=0),dict(top_p=.9, logprobs=2),dict(top_k=5, presence_penalty=.5)

def begin(card):
    "Rows of sequences that begin, and what they ask for"
    r = VerifyRows(card, S, W, 16, 4, steps=2, scratch=50)
    t = SampleTable(card, S, V, rows=S*W, width=W)
    for i,kw in enumerate(ASKED):
        t.set(i, SampleState(SamplingParams(**kw), [1], V, seed=i))
    first = dict(line=range(S), live=[1]*S, kmax=[W-1]*S, limit=[60]*S, ids=np.arange(S*W),
        lanes=np.repeat(np.arange(S), W), tables=np.arange(16*S).reshape(S, 16))
    for k,a in first.items(): card.write(getattr(r, k), np.array(a, np.int32))
    return r,t

def text(card, chain, steps=12):
    "What a model that is a table of logits says, as the host hears it, and where it stands then"
    r,t = begin(card)
    logits,heard = card.empty((S*W,V)),[]
    drafts = card.empty(S*W, 'int32') # what the likeliest tokens are
    for k in range(steps):
        card.write(logits, chain[np.maximum(card.download(r.ids), 0)])
        card.write(t.logprobs, np.zeros(S*W, np.float32))
        sample_rows(logits, t, r.said, r.lanes, width=W, given=r.ids)
        accept_rows(r, t, full=True)
        sample_rows(logits, t, drafts, r.lanes, greedy=True, width=W, given=r.ids)
        next_rows(r, drafts[:S*(W-1)].reshape(W-1, S))
        told = t.heard[k%2]
        heard.append([told['id'].tolist(),told['logprob'].tobytes(),r.heard_seq[k%2].tolist()])
    rest = {k: a.tolist() for k,a in vars(r.on_host()).items() if hasattr(a, 'tolist')}
    return heard,rest

def test_nothing_is_read_before_it_is_written(overlap):
    card,rng = Emulator(),np.random.default_rng(0)
    chain = rng.standard_normal((V,V)).astype('f4')*4
    got = text(card, chain)
    assert {'accept','next_rows','sample_draw'}<=overlap.names and overlap.hidden>100
    overlap.on = False
    assert got==text(card, chain)
