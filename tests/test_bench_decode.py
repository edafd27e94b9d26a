"""Steps that check drafts, timed on the emulator: what they count, what they move, and what is
written of it."""
import json,sys
import numpy as np
import pytest
from pathlib import Path
from atlas.card.emulator import find_cxx
from atlas.cuda.vocabulary import packed_in
from atlas.engine.arbiter import expected
from atlas.ground.core import AtlasError
from atlas.ops.sample import uniform
from atlas.ops.accept import OTHER_SEED
from atlas.cuda.delta import PENDING
from atlas.engine.roofline import distinct,drafting_bytes,step_bytes
from atlas.use.bench_decode import _blank,bench_decode,checking
from atlas.use.bench_decode import make_room,measure,pretend
sys.path.insert(0, str(Path(__file__).parent/'gpu'))
from toys import toy  # noqa: E402

pytestmark = pytest.mark.skipif(find_cxx() is None, reason='no C++ compiler')
CHANCES = [.9,.6]

def drafting(**kw):
    "A toy whose steps check two drafts, on the emulator"
    how = dict(speculative='mtp', num_speculative_tokens=2)|kw
    return toy('qwen3.6-drafts', True, seqs=2, context=256, **how)

@pytest.fixture(scope='module')
def llm():
    model = drafting()
    yield model
    model.close()

def drawn(chances, seed, steps, skipped=7, at=1):
    "Tokens of a step by the very numbers that the card draws, after some that do not count"
    n = 0
    for i in range(skipped+steps):
        checked = chances if i else [] # nobody has drafted before the first step
        numbers = [uniform(seed^OTHER_SEED, at+j) for j in range(len(checked))]
        right = np.array(numbers)<np.float32(checked)
        said = 1+int(np.cumprod(right).sum())
        at += said
        if i>=skipped:
            n += said
    return n/steps

@pytest.fixture(scope='module')
def report(llm): return bench_decode(llm, steps=6, simulate=CHANCES)

def test_simulated_acceptance_is_counted(report):
    "Not by a formula: what the engine was given, token by token, for each number of drafts"
    assert [p.drafts for p in report.points]==[1,2]
    for p in report.points:
        chances = CHANCES[:p.drafts]
        assert p.tokens_per_step==drawn(chances, 0, 6)>1
        assert p.expected==expected(chances)[-1]
        assert p.tokens==pytest.approx(1e6*p.tokens_per_step/p.us)

def test_replays_stay_within_the_graph(llm):
    "It has no blocks for longer sequences, and those that are there would wait for theirs"
    e,width = llm.engine,3
    _blank(llm)
    pretend(llm, 1, 40, 200)
    with checking(e, 2):
        for _ in range(3):
            e.step()
        assert e.stepper.last.longest==128
        make_room(e, 40)
    last,= e.scheduler.running
    beyond = last.num_computed+42*width
    assert min(beyond, e.scheduler.max_seq_len)<=e.stepper.last.longest
    e.abort(last.id)
    while e.has_work:
        e.step()
    e.land()

def test_numbers_are_written(report):
    d = json.loads(json.dumps(report.to_dict()))
    assert (d['drafter'],d['simulate'])==('mtp, 2 drafts',CHANCES)
    for q,p in zip(d['points'], report.points):
        told = q['drafts'],q['tokens_per_step'],q['expected'],q['bytes']
        assert told==(p.drafts,p.tokens_per_step,p.expected,p.bytes)
        seconds = q['bytes']/230e9+q['launches']*1.3e-6
        assert q['projected_gb10']==pytest.approx(q['expected']/seconds)
    head,*rows = str(report).splitlines()[2:]
    assert 'drafts tok/step' in head and f' {report.points[1].tokens_per_step:8.2f} ' in rows[1]

def test_nothing_is_simulated_afterwards(llm, report):
    "Made-up weights draft nothing right; and the arbiter decides again"
    assert llm.engine.stepper.chances is None
    assert llm.engine.arbiter.adaptive and not llm.engine.has_work
    p = measure(llm, steps=4, drafts=1)
    assert p.tokens_per_step==p.expected<1.5

def picked(llm, rows):
    "Experts that so many rows read, the shared one with them"
    c = llm.config.moe
    return distinct(c.num_experts, c.top_k, rows)+1

def test_a_step_moves_more_for_its_drafts(llm):
    plain,two = (step_bytes(llm, 2, 64, k) for k in (0,2))
    assert 'drafting' not in plain
    for k in ('projections','head','kv'):
        assert two[k]==plain[k]
    more = picked(llm, 6)/picked(llm, 2)
    assert two['experts']==pytest.approx(plain['experts']*more)
    assert two['states']==plain['states']*4/(
        1+1/(PENDING+1)) # a delta net's single rows are written late

def test_drafting_moves_a_head_twice(llm):
    "Experts have a row of each sequence, the newest, in either pass"
    own = list(packed_in(llm.model.mtp))
    dense = sum(p.nbytes for p in own if not p.experts)
    each = sum(p.nbytes/p.experts for p in own if p.experts)
    kv = llm.cache.bytes_per_token/len(llm.cache.kv)*64*2
    heads = 2*llm.model.lm_head.weight.nbytes
    banks = 2*each*picked(llm, 2)
    moved = drafting_bytes(llm, 2, 64, 2)
    assert moved==pytest.approx(heads+2*(dense+kv)+banks)

@pytest.mark.parametrize('kind', ['ngram','draft'])
def test_other_drafters_are_counted(kind):
    more = dict(draft_model='toy-qwen3.6-drafts') if kind=='draft' else {}
    llm = drafting(speculative=kind, **more)
    moved = [drafting_bytes(llm, 1, 64, k) for k in (1,2)]
    passes = [step_bytes(llm, 1, 64)[k] for k in ('projections','head')]
    if kind=='ngram':
        assert moved==[0,0]
    else:
        assert 2*sum(passes)<moved[0]<moved[1]
    llm.close()

@pytest.mark.parametrize('chances,drafts,why', [([.9], True, '1 chances for 2'),
    ([.9], False, 'Nothing is drafted')])
def test_chances_that_do_not_fit_are_refused(chances, drafts, why):
    plain = dict(speculative=False, num_speculative_tokens=None)
    model = drafting(**({} if drafts else plain))
    with pytest.raises(AtlasError, match=why) as e:
        bench_decode(model, simulate=chances)
    assert e.value.param=='simulate_acceptance'
    model.close()
