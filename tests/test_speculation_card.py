"""Steps that check drafts, on the emulator: the same tokens and log probabilities, to the last bit,
as alone and without drafts; and memory after a model that could not be loaded."""
import functools,gc,json
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
from atlas.model.model import Piece,imagine,load_model,make_batch
from atlas.ops.sample import SamplingParams
from helpers.small_engine import interrupted,said,serve
from test_card import _GDN,_LESS,_MOE,_SMALL,ids_of,models,patient

DATA = Path(__file__).parent/'data'
pytestmark = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')
SIZES = _SMALL|_GDN|_MOE|_LESS|dict(num_hidden_layers=2, mtp_num_hidden_layers=1)
SIZES |= dict(layer_types=['linear_attention','full_attention'])

def made_up(name, conf, parts=('',)):
    "A model of random numbers"
    PRESETS[f'toy-{name}'] = conf
    try:
        with imagine(f'toy-{name}', 'nvfp4') as ck:
            ck.kind = 'numbers'
            return load_model(ck, Emulator(), 512, parts=parts)
    finally:
        del PRESETS[f'toy-{name}']

@functools.cache
def hybrid():
    "A made-up hybrid with a drafting head"
    return made_up('mtp', PRESETS['qwen3.6-35b-a3b']|SIZES, ('','mtp'))

def gemma(): return models('gemma', 'nvfp4')[1]

@functools.cache
def assistant():
    "A made-up assistant of `gemma()`"
    conf = json.loads((DATA/'gemma4-assistant'/'config.json').read_text())
    conf['backbone_hidden_size'] = 128
    conf['text_config'] |= dict(vocab_size=256, sliding_window=16, head_dim=32,
        num_key_value_heads=2, global_head_dim=64, num_global_key_value_heads=1)
    return made_up('assistant', conf)

def cache_of(m, states, blocks=40, **kw):
    return KVCache(m.c, m.device, blocks, 16, 'bf16', states, **kw)

def drafter(kind, m, cache, k, seqs):
    "Who guesses: by name"
    if kind=='none':
        return None
    if kind=='mtp':
        return MTPDrafter(m, cache, k)
    if kind=='ngram':
        return NgramDrafter(m, k, 1, 3)
    if kind=='draft':
        own = cache_of(m, (k+4)*seqs, cache.pool.num_blocks)
        return ModelDrafter(m, own, m, k)
    return AssistantDrafter(m, cache, assistant(), k)

def of_four_rows(ask):
    "What the drafting head answers to `ask`, and the keys and values that it leaves, as bytes"
    m = hybrid()
    cache = cache_of(m, 8, drafting=True)
    b = make_batch([Piece([5,6,7,8], 0, [0], 4, keep=1)], False, 16, m.device)
    x = ask(m.mtp, m, b, m.trunk(b, cache), m.last_norm, cache)
    pool = cache.kv[m.c.num_layers]
    kept = [m.device.download(a).tobytes() for a in pool.arrays if a is not None]
    return None if x is None else m.device.download(x).view('u4'), kept

def test_a_head_that_is_asked_about_some_rows():
    "They have the bits that they have among all, and so do the keys that all leave"
    rows = hybrid().device.upload(np.int32([3,1]))
    every,kept = of_four_rows(lambda head, *args: head(*args))
    some,those = of_four_rows(lambda head, *args: head(*args, rows))
    none,same = of_four_rows(lambda head, *args: head.keep(*args))
    np.testing.assert_array_equal(some, every[[3,1]])
    assert none is None and kept==those==same
    assert all(any(a) for a in kept)

class Guide:
    "Lets each of `may` come once, in that order; then it is whole"
    error,code = None,'guide_failed'
    def __init__(self, may, n=0):
        self.may = may
        self.n = n
    ended = property(lambda self: self.n>=len(self.may))
    def accept(self, t):
        self.n += 1
    def fork(self): return Guide(self.may, self.n)
    def mask(self):
        bits = np.zeros(256, bool)
        if self.ended:
            may = []
        else:
            may = list(self.may[self.n])
        bits[may] = True
        return np.packbits(bits, bitorder='little').view(np.uint32)

class Guides:
    start = staticmethod(Guide)

def engine(m, kind='none', k=0, seqs=4,
        blocks=40, longest=200, **kw):
    "An engine in which `kind` guesses `k` tokens a step"
    slots,head = (2+k)*seqs,bool(m.mtp)
    cache = cache_of(m, slots, blocks, drafting=head)
    d = drafter(kind, m, cache, k, seqs)
    sizes = seqs,longest,64
    s = Scheduler(cache.pool, *sizes, drafts=k, **kw)
    return Engine(s, CardStepper(m, cache, s, drafter=d), Guides)

TEXT = (7,),(3,),(9,)
EVEN = tuple(range(0, 256, 2))
ODD = tuple(range(1, 256, 2))
HOWS = [
    dict(logprobs=1),
    dict(temperature=.9, seed=3),
    dict(temperature=.8, seed=5, logprobs=2,
        presence_penalty=.5, repetition_penalty=1.3),
    dict(min_tokens=4, stop_token_ids=EVEN),
    dict(guide=TEXT*3, logprobs=0),
    dict(guide=(ODD,EVEN,ODD,EVEN,EVEN,ODD),
        temperature=1., seed=2, frequency_penalty=.5),
]

def asked(i, n, most, V, guide=None, **how):
    "A request"
    params = dict(temperature=0, max_tokens=most, ignore_eos=True)|how
    ids = tuple(t%V for t in ids_of(n, i))
    return Request(f'r{i}', ids, SamplingParams(**params), guide=guide)

LENGTHS = 5,20,70,9,6,12
MOST = 12,12,10,12,12,12

def requests(V, n=6):
    "Of all kinds, with the steps at which they arrive"
    some = []
    for i,how in enumerate(HOWS[:n]):
        r = asked(i, LENGTHS[i], MOST[i], V, **how)
        some.append((r, 2*i))
    return some

@functools.cache
def alone(of, V, n):
    "What each is answered without drafts when nothing else exists"
    out = {}
    for r,_ in requests(V, n):
        got,_ = serve(engine(of()), [(r,0)])
        out |= got
    return out

def are(got, want):
    "It is asserted that everybody said what is wanted"
    for rid,mine in got.items():
        assert said(mine)==said(want[rid]), rid
        assert mine[-1].finish==want[rid][-1].finish

def as_alone(of, kind, k, V=256, n=6, **kw):
    "Serve all of them at once with drafts; drafts that were accepted, and the engine"
    e = engine(of(), kind, k, **kw)
    got,_ = serve(e, requests(V, n))
    are(got, alone(of, V, n))
    assert len(e.stepper.free)==e.stepper.rows.most+1
    every = [v for events in got.values() for v in events]
    return sum(bool(v.drafted) for v in every),e

KINDS = [('mtp',2), ('draft',3), ('ngram',4)]
@pytest.mark.parametrize('kind,k', KINDS)
def test_hybrid(kind, k):
    "Everybody's answer; some of what a model drafts for itself is right"
    accepted,e = as_alone(hybrid, kind, k)
    if kind!='mtp':
        assert 3<accepted<2*e.steps

def test_little_room():
    "Sequences push each other out, and are replayed to where they were"
    little = dict(blocks=6, longest=90, overcommit=4.)
    e = engine(hybrid(), 'draft', 2, **little)
    got,_ = serve(e, requests(256, 4))
    assert e.scheduler.totals['preemptions']>0
    are(got, alone(hybrid, 256, 4))

def test_a_drafter_without_numbers():
    "Its guesses are dropped and counted, and the answers go on"
    e = engine(hybrid(), 'mtp', 2)
    drafter = e.stepper.drafter
    drafter.narrow(64)
    drafter.head.weight.w.view('uint8')[:] = 255 # which is no number
    got,_ = serve(e, requests(256, 3))
    are(got, alone(hybrid, 256, 3))
    assert e.stats()['spec_decode_invalid_total']>e.steps/2
    assert not any(v.drafted for events in got.values() for v in events)

def test_an_assistant():
    "Which is made up, as its target is: hardly a guess is right"
    as_alone(gemma, 'assistant', 2, n=2)

@pytest.mark.parametrize('where,at', [('replay',2), ('_first',2)])
def test_interrupted(where, at):
    "A Ctrl-C after the card's part of a launch changes nothing"
    e = engine(hybrid(), 'draft', 2)
    calls = interrupted(e.stepper, where, at)
    e.step = patient(e.step)
    got,_ = serve(e, requests(256, 3))
    assert calls()>at
    are(got, alone(hybrid, 256, 3))

def test_aborted_in_the_air():
    e = engine(hybrid(), 'draft', 2)
    first,other,_ = [r for r,_ in requests(256, 3)]
    e.add(first)
    e.add(other)
    got = [v for _ in range(3) for v in e.step()]
    assert e.flying
    ended = e.abort(first.id)
    assert [v.finish for v in ended]==['abort']
    rest,_ = serve(e, [])
    mine = [v for v in got if v.id==other.id]+rest[other.id]
    are({other.id: mine}, alone(hybrid, 256, 3))
    assert len(e.stepper.free)==e.stepper.rows.most+1

# What does not fit

@pytest.fixture
def load(monkeypatch):
    "Loads from a folder; afterwards nothing lies in memory of what was refused"
    budgets = []
    def arena(self, most=None):
        budgets.append(Budget(1<<30))
        return Arena(self, budgets[-1], step=1<<20)
    monkeypatch.setattr(Emulator, 'arena', arena)
    def f(name, **kw):
        options = dict(max_seq_len=128, max_num_seqs=2)
        options |= dict(show=False, kv_cache_memory=1<<22)
        return LLM(str(DATA/name), Emulator(), **options|kw)
    yield f
    gc.collect()
    Emulator().tidy()  # as who loads next does
    gc.collect()
    for b in budgets:
        assert not b.parts.keys()-{'steps'}, 'what a step takes is only planned'
    assert Emulator().room is None

BAD = [
    ('smollm2-tied', 'qwen3-tied-wide', '144 tokens .* 160'),
    ('smollm2-tied', 'gemma4-assistant', 'does not fit'),
]

@pytest.mark.parametrize('name,draft,said', BAD)
def test_what_does_not_fit_leaves_nothing(load, name, draft, said):
    model = str(DATA/draft)
    with pytest.raises(UnsupportedError, match=said):
        load(name, draft_model=model)

def test_a_draft_model_leaves_nothing(load):
    "What was loaded with one is given back as a whole"
    llm = load('smollm2-tied', draft_model=str(DATA/'smollm2-tied'))
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    plain = load('smollm2-tied')
    got,want = (m.generate([5,6,7], params)
        for m in (llm,plain))
    assert got.token_ids==want.token_ids
    assert llm.close()==plain.close()==0

def test_more_rows_than_a_step_can_check(monkeypatch):
    "A model whose attention takes few rows at once"
    monkeypatch.setattr('atlas.engine.card_stepper.most_rows', lambda *_: 4)
    with pytest.raises(UnsupportedError, match='checks at most 3') as e:
        engine(hybrid(), 'ngram', 4)
    assert e.value.param=='num_speculative_tokens'
    assert engine(hybrid(), 'ngram', 3).stepper.replay_rows==4
