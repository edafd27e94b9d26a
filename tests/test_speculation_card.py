"""Steps that check drafts, on the emulator: the same tokens and log probabilities, to the last bit,
as alone and without drafts; and memory after a model that could not be loaded."""
import functools,gc
from pathlib import Path
import numpy as np,pytest
from atlas import LLM
from atlas.card.arena import Arena
from atlas.card.device import Budget
from atlas.card.emulator import Emulator,find_cxx
from atlas.engine.cache import KVCache
from atlas.engine.card_stepper import CardStepper
from atlas.engine.draft import AssistantDrafter,MTPDrafter,ModelDrafter,NgramDrafter
from atlas.engine.engine import Engine
from atlas.engine.scheduler import Request,Scheduler
from atlas.ground.config import PRESETS
from atlas.ground.core import UnsupportedError
from atlas.ground.weights import open_checkpoint
from atlas.model.model import imagine,load_model
from atlas.ops.sample import SamplingParams
from helpers.small_engine import left_clean,said,serve
from test_card import _GDN,_LESS,_MOE,_SMALL,TOYS,ids_of

DATA = Path(__file__).parent/'data'
pytestmark = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')
SIZES = _SMALL|_GDN|_MOE|_LESS|dict(num_hidden_layers=2, mtp_num_hidden_layers=1)
SIZES |= dict(layer_types=['linear_attention','full_attention'])

@functools.cache
def hybrid():
    "A made-up hybrid with a drafting head"
    PRESETS['toy-mtp'] = PRESETS['qwen3.6-35b-a3b']|SIZES
    try:
        with imagine('toy-mtp', 'nvfp4') as ck:
            ck.kind = 'numbers'
            return load_model(ck, Emulator(), 512, parts=('','mtp'))
    finally: del PRESETS['toy-mtp']

@functools.cache
def folder(name):
    "The model of a folder"
    with open_checkpoint(DATA/name) as ck: return load_model(ck, Emulator(), 512)

def cache_of(m, states, **kw): return KVCache(m.c, m.device, 40, 16, 'bf16', states, **kw)

def drafter(kind, m, cache, k, seqs):
    "Who guesses: by name"
    if kind=='none': return None
    if kind=='mtp': return MTPDrafter(m, cache, k)
    if kind=='ngram': return NgramDrafter(m, k, 1, 3)
    if kind=='draft': return ModelDrafter(m, cache_of(m, (k+4)*seqs), m, k)
    return AssistantDrafter(m, cache, folder(kind), k)

class Guide:
    "Lets each of `may` come once, in that order; then it is whole"
    error,code = None,'guide_failed'
    def __init__(self, may, n=0): self.may,self.n = may,n
    ended = property(lambda self: self.n>=len(self.may))
    def accept(self, t): self.n += 1
    def fork(self): return Guide(self.may, self.n)
    def mask(self):
        bits = np.zeros(256, bool)
        if not self.ended: bits[list(self.may[self.n])] = True
        return np.packbits(bits, bitorder='little').view(np.uint32)

class Guides: start = staticmethod(Guide)

def engine(m, kind='none', k=0, seqs=4, **kw):
    "An engine in which `kind` guesses `k` tokens a step"
    cache = cache_of(m, (2+k)*seqs, drafting=bool(m.mtp))
    d = drafter(kind, m, cache, k, seqs)
    s = Scheduler(cache.pool, seqs, 200, 64, drafts=k, **kw)
    return Engine(s, CardStepper(m, cache, s, drafter=d), Guides)

TEXT = tuple((t,) for t in (7,3,9)*3)
SETS = tuple(tuple(range(i, 256, 2)) for i in (1,0,1,0,0,1))
HOWS = [
    dict(logprobs=1),
    dict(temperature=.9, seed=3),
    dict(temperature=.8, seed=5, presence_penalty=.5, repetition_penalty=1.3, logprobs=2),
    dict(min_tokens=4, stop_token_ids=tuple(range(0, 256, 2))),
    dict(guide=TEXT, logprobs=0),
    dict(guide=SETS, temperature=1., seed=2, frequency_penalty=.5),
]

def asked(i, n, most, V, guide=None, **how):
    "A request"
    params = dict(temperature=0, max_tokens=most, ignore_eos=True)|how
    ids = tuple(t%V for t in ids_of(n, i))
    return Request(f'r{i}', ids, SamplingParams(**params), guide=guide)

def requests(V, n=6):
    "Of all kinds, with the steps at which they arrive"
    lengths = [(5,12), (20,12), (70,10), (9,12), (6,12), (12,12)]
    return [(asked(i, *lengths[i], V, **HOWS[i]), 2*i) for i in range(n)]

@functools.cache
def alone(of, V, n):
    "What each is answered without drafts when nothing else exists"
    out = {}
    for r,_ in requests(V, n): out |= serve(engine(of()), [(r,0)])[0]
    return out

def as_alone(of, kind, k, V=256, n=6, **kw):
    "Serve all of them at once with drafts; drafts that were accepted, and the engine"
    want,e = alone(of, V, n),engine(of(), kind, k, **kw)
    got,_ = serve(e, requests(V, n))
    for rid,mine in got.items():
        assert said(mine)==said(want[rid]), rid
        assert mine[-1].finish==want[rid][-1].finish
    assert len(e.stepper.free)==e.stepper.rows.most+1
    every = [v for events in got.values() for v in events]
    return sum(bool(v.drafted) for v in every),e

@pytest.mark.parametrize('kind,k', [('mtp',1), ('mtp',3), ('draft',2), ('draft',3), ('ngram',4)])
def test_hybrid(kind, k):
    accepted,e = as_alone(hybrid, kind, k)
    assert kind=='mtp' or accepted>3
    assert e.steps*2>accepted, 'not all of them can be accepted'
