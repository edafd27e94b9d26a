"""Passes over prompts as graphs, on the emulator: the same tokens and log probabilities, to the
bit, as launched one by one; recorded when a shape comes again, and dropped with the memory that
they remember."""
import numpy as np,pytest
from atlas.card.device import Host
from atlas.card.emulator import Emulator,find_cxx
from atlas.engine import card_stepper
from atlas.engine.card_stepper import PromptGraphs,PromptShape
from atlas.ground.core import OutOfMemoryError
from atlas.model.model import Piece,make_batch
from helpers.small_engine import said,serve
from test_card import models
from test_speculation_card import asked,engine,hybrid

pytestmark = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')

LENGTHS = 70,20,30,25,40,28,33
ARRIVE = 0,4,4,8,8,12,12

def requests(V):
    "One prompt of two chunks, and three times two that arrive together"
    every = [asked(i, n, 2, V, logprobs=1)
        for i,n in enumerate(LENGTHS)]
    return list(zip(every, ARRIVE))

def answers(m, *how, **kw):
    "What everybody is told, and the engine"
    e = engine(m, *how, blocks=60, **kw)
    got,_ = serve(e, requests(m.c.vocab_size))
    return {rid: said(events) for rid,events in got.items()},e

def replayed(e):
    "Shapes that have a graph"
    return {shape for shape,g in e.stepper.prompts.kept.items() if g}

def same(m, monkeypatch, *how):
    "The answers with graphs are those without; the engine that has graphs"
    with monkeypatch.context() as off:
        off.setattr(card_stepper, 'MOST_PROMPT_GRAPHS', 0)
        want,e = answers(m, *how)
        assert e.stepper.prompts is None
    got,e = answers(m, *how)
    assert got==want
    return e

FAMILIES = [('llama','bf16'), ('qwen3.6-moe','nvfp4'), ('gpt-oss','mxfp4'), ('gemma','nvfp4'),
    ('nemotron','nvfp4')]
@pytest.mark.parametrize('toy,weights', FAMILIES)
def test_the_same_bits(toy, weights, monkeypatch):
    "Chunks at different places of a prompt are one graph"
    e = same(models(toy, weights)[1], monkeypatch)
    assert replayed(e)=={PromptShape(64, 1),PromptShape(128, 2)}

@pytest.mark.parametrize('kind,k', [('mtp',2), ('ngram',3)])
def test_drafters_see_all_rows(kind, k, monkeypatch):
    assert replayed(same(hybrid(), monkeypatch, kind, k))

@pytest.fixture
def inside(monkeypatch):
    "A list that is not empty while a graph is recorded"
    inside,real = [],PromptGraphs._recorded
    def recorded(self, b, stream):
        inside.append(True)
        try:
            return real(self, b, stream)
        finally:
            inside.pop()
    monkeypatch.setattr(PromptGraphs, '_recorded', recorded)
    return inside

def refusing(name, inside):
    "A method of the emulator, as it is but while a graph is recorded"
    real = getattr(Emulator, name)
    def refused(self, *args):
        assert not inside, name
        return real(self, *args)
    return refused

def test_a_graph_only_launches(inside, monkeypatch):
    "While one is recorded nothing is uploaded, read back or waited for: a card refuses that"
    for name in ('download','synchronize','write'):
        monkeypatch.setattr(Emulator, name, refusing(name, inside))
    uploads,real = [],Emulator.upload
    def upload(self, a):
        if inside:
            uploads.append(np.shape(a))
        return real(self, a)
    monkeypatch.setattr(Emulator, 'upload', upload)
    _,e = answers(hybrid())
    b = make_batch([Piece([1,2], 0, [0], 1)], True, 16, Host())
    arrays = len(card_stepper._arrays(b))
    assert len(uploads)==arrays*len(replayed(e))

def test_recorded_before_they_come(monkeypatch):
    "Passes of usual lengths are replayed from the first on, with the same bits"
    m = models('llama', 'bf16')[1]
    want,_ = answers(m)
    e = engine(m, blocks=60)
    e.stepper._expect_prompts(128)
    while e.idle():
        pass
    before = dict(e.stepper.prompts.kept)
    assert set(before)=={PromptShape(64, 1),PromptShape(128, 1)} and all(before.values())
    got,_ = serve(e, requests(m.c.vocab_size))
    assert {rid: said(events) for rid,events in got.items()}==want
    assert e.stepper.prompts.kept[PromptShape(64, 1)] is before[PromptShape(64, 1)]

def test_recorded_as_far_as_memory_goes(monkeypatch):
    "The longest first; where memory ends, there are no others"
    m = models('llama', 'bf16')[1]
    real = PromptGraphs._recorded
    def none_for_short(self, b, stream):
        if b.num_rows<100:
            raise OutOfMemoryError('no more')
        return real(self, b, stream)
    monkeypatch.setattr(PromptGraphs, '_recorded', none_for_short)
    e = engine(m, blocks=60)
    e.stepper._expect_prompts(128)
    while e.idle():
        pass
    kept = e.stepper.prompts.kept
    assert kept and min(shape.rows for shape in kept)>=100

def test_usual_lengths():
    "Powers of two and the longest; others, as many as there is room for, come later"
    p = engine(models('llama', 'bf16')[1]).stepper.prompts
    p.most = 4
    assert p.usual(256)==([256,128,64],[192])
    assert p.usual(320)==([320,256,128,64],[])
    assert p.usual(2048)==([2048,1024,512,256],[])
    assert p.usual(63)==([],[])

def rows(e): return [shape.rows for shape in e.stepper.prompts.kept]

def some_due(m, monkeypatch):
    "An engine that has one graph, and is to have two others"
    monkeypatch.setattr(PromptGraphs, 'usual',
        lambda self, long: ([128],[64,192]))
    e = engine(m, blocks=60)
    e.stepper._expect_prompts(192)
    assert rows(e)==[] and e.idle()
    assert rows(e)==[128] and [f.args[0] for f in e.stepper.due]==[64,192]
    return e

def test_others_while_nobody_asks(monkeypatch):
    "One by one, until all are there; they make no difference to what is said"
    m = models('llama', 'bf16')[1]
    want,_ = answers(m)
    e = some_due(m, monkeypatch)
    assert e.idle() and rows(e)==[64,128] # who was asked for is dropped later than who was not
    assert e.idle() and rows(e)==[192,64,128]
    assert not e.idle()
    got,_ = serve(e, requests(m.c.vocab_size))
    assert {rid: said(events) for rid,events in got.items()}==want

def test_others_as_far_as_memory_goes(monkeypatch):
    e = some_due(models('llama', 'bf16')[1], monkeypatch)
    def none(self, b, stream):
        raise OutOfMemoryError('no more')
    monkeypatch.setattr(PromptGraphs, '_recorded', none)
    assert e.idle() and not e.stepper.due and not e.idle()
    assert rows(e)==[128]

def test_memory_that_is_gone(monkeypatch):
    "A pool that was refused has given back what graphs write to"
    e = engine(models('llama', 'bf16')[1])
    e.add(asked(0, 140, 2, 256))
    while e.has_work:
        e.step()
    old = e.stepper.prompts.kept[PromptShape(64, 1)]
    assert old
    e.stepper.prompts.scratch.refused = 1
    e.add(asked(1, 70, 2, 256))
    while e.has_work:
        e.step()
    assert e.stepper.prompts.kept[PromptShape(64, 1)] not in (old,None)

def test_the_one_used_longest_ago_goes(monkeypatch):
    monkeypatch.setattr(card_stepper, 'MOST_PROMPT_GRAPHS', 1)
    _,e = answers(models('llama', 'bf16')[1])
    assert set(e.stepper.prompts.kept)=={PromptShape(128, 2)}

def test_no_long_one_while_answers_wait(monkeypatch):
    "What is long is recorded when nobody is beside it, and until then launched as it is"
    monkeypatch.setattr(card_stepper, 'LONG', 64)
    e = engine(models('llama', 'bf16')[1], blocks=60)
    pairs = [asked(i, 20+i, 2, 256) for i in range(8)]
    writes = asked(9, 30, 40, 256)
    serve(e, [(writes, 0), *zip(pairs[:6], (4,4,12,12,20,20))])
    two = PromptShape(128, 2)
    assert two in e.stepper.prompts.kept and not replayed(e)
    serve(e, [(r, 0) for r in pairs[6:]])
    assert replayed(e)=={two}

def test_cut_off_while_recording(monkeypatch):
    "What was cut off is computed anew, and says the same"
    m = models('llama', 'bf16')[1]
    want,_ = answers(m)
    real,calls = PromptGraphs._recorded,[]
    def once(self, *how):
        calls.append(how)
        if len(calls)==1:
            raise KeyboardInterrupt
        return real(self, *how)
    monkeypatch.setattr(PromptGraphs, '_recorded', once)
    e = engine(m, blocks=60)
    every,out = requests(256),{}
    for r,_ in every:
        e.add(r)
    while e.has_work:
        try:
            events = e.step()
        except KeyboardInterrupt:
            continue
        for ev in events:
            out.setdefault(ev.id, []).append(ev)
    assert {rid: said(v) for rid,v in out.items()}==want
    assert len(calls)>1

def patient(m, **kw):
    "An engine that is ready, and for which nobody has had a question until all is recorded"
    e = engine(m, blocks=60, **kw)
    e.warm()
    while e.idle():
        pass
    return e

def steps(e): return [(s.longest,s.full,s.cuts) for s in e.stepper.graphs if s.seqs==1]

def one_long(m, e):
    "A greedy answer whose context passes 128 tokens"
    got,_ = serve(e, [(asked(0, 100, 60, m.c.vocab_size),0)])
    return {rid: said(events) for rid,events in got.items()}

def test_steps_of_one_sequence_are_recorded_early():
    "Nothing is recorded while an answer gets longer, and it is the same"
    m = models('llama', 'bf16')[1]
    want = one_long(m, engine(m, blocks=60))
    e = patient(m)
    before = dict(e.stepper.graphs)
    ends = 128,e.scheduler.max_seq_len
    assert set(steps(e))=={(n,f,f) for n in ends for f in (True,False)}
    assert one_long(m, e)==want
    assert set(e.stepper.graphs)==set(before)

def test_steps_are_recorded_as_far_as_memory_goes(monkeypatch):
    m = models('llama', 'bf16')[1]
    monkeypatch.setattr(card_stepper, 'SPARE', 1<<60)
    e = patient(m)
    assert not e.stepper.graphs and not e.stepper.due

def test_a_graph_that_was_asked_for_stays_longer():
    "Those recorded early are the first to go"
    m = models('llama', 'bf16')[1]
    e = engine(m, blocks=60)
    e.warm()
    one_long(m, e)
    used = list(e.stepper.graphs)
    while e.idle():
        pass
    assert list(e.stepper.graphs)[-len(used):]==used
    assert len(e.stepper.graphs)>len(used)

def refused(self, shape):
    raise OutOfMemoryError('no more')

@pytest.mark.parametrize('name,value', [('MOST_STEP_GRAPHS',1), ('recorded',refused)])
def test_steps_that_find_no_room(name, value, monkeypatch):
    "Nothing that somebody asked for goes for them, and no memory is no fault"
    m = models('llama', 'bf16')[1]
    e = engine(m, blocks=60)
    e.warm()
    serve(e, [(asked(0, 20, 4, m.c.vocab_size),0)])
    used = list(e.stepper.graphs)
    if name=='recorded':
        monkeypatch.setattr(card_stepper.CardStepper, '_recorded', value)
    else:
        monkeypatch.setattr(card_stepper, name, value)
    while e.idle():
        pass
    assert list(e.stepper.graphs)==used and not e.stepper.due
