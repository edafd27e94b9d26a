"""Footprints against the loader: of toys of all families to the byte, and sets against all sets."""
import csv,io,json,sys
from dataclasses import replace
from pathlib import Path
import pytest
from hypothesis import given,settings,strategies as st
from atlas.card.arena import Region
from atlas.card.device import Host
from atlas.card.emulator import Emulator,find_cxx
from atlas.card.launch import recording
from atlas.card.variants import Dry
from atlas.cuda.vocabulary import _prompt_bytes,step_bytes
from atlas.engine.loading import LoadedModel
from atlas.engine.planning import StartPlan,SPARK,plan_load
from atlas.ground.catalog import CATALOG
from atlas.ground.options import EngineConfig
from atlas.use.footprints import Footprint,Together,Ways,footprint_table,footprints,largest_sets
from atlas.use.footprints import resident
sys.path.insert(0, str(Path(__file__).parent/'gpu'))
from toys import TOYS,toy_shape

FAMILIES = [n for n in TOYS if n!='minimax'] # which has no tiny shape

class Cold(LoadedModel):
    "A model that is never asked: its kernels need not be there"
    def _warm(self, known):
        "Nothing"

def beside(o)->tuple:
    "Planned and taken bytes: weights, and cache with states"
    parts,m = plan_load(o, o.device).parts,Cold(o, False)
    taken = resident(m),m.cache.nbytes
    m.close()
    return (parts['weights'],parts['cache']+parts['states']),taken

@pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')
@pytest.mark.parametrize(
    'name,kv', [('llama','f16'),('qwen3.6-moe','nvfp4'),*((n, 'fp8') for n in FAMILIES)])
def test_a_card_takes_what_is_planned(name, kv):
    """To the byte; of a shared expert's gate, which is also a row of the router, once more than
    planned"""
    shape,weights = toy_shape(name, True)
    drafts = dict(speculative='mtp') if name.endswith('drafts') else {}
    o = EngineConfig(
        shape, Emulator(), 256, 2, load_format='dummy', weights=weights, kv_cache_dtype=kv,
        kv_cache_memory=1<<24, enable_prefix_caching=False, **drafts)
    planned,taken = beside(o)
    assert planned[1]==taken[1]
    gates = 4*(2*64+4)*(5 if drafts else 4) if 'qwen3.6' in name else 0
    assert taken[0]-planned[0]==gates

@pytest.mark.parametrize('name', FAMILIES)
def test_a_host_takes_what_is_planned(name):
    "But for routers and gates, which are widened: much of a toy, a thousandth of a model"
    shape,weights = toy_shape(name, True)
    o = EngineConfig(
        shape, Host(), 256, 2, load_format='dummy', weights=weights, kv_cache_memory=1<<24,
        enable_prefix_caching=False)
    planned,taken = beside(o)
    assert planned[1]==taken[1]
    assert planned[0]==pytest.approx(taken[0], rel=.05)

WAYS = Ways((4096,262144), ('f16','nvfp4'), (None,'nvfp4'))

@pytest.mark.parametrize('name', ['gpt-oss-20b-mxfp4','qwen3-8b-bf16','tiny','llama-3.1-8b'])
def test_a_table_is_what_plans_say(name):
    "In each way that has a plan, and the refusal of a start where there is none"
    for f in footprints(name, WAYS):
        o = replace(WAYS.options(name), max_seq_len=f.context, kv_cache_dtype=f.kv,
            quantization=f.quantization)
        if f.plan:
            assert f.plan==plan_load(o, SPARK)
            continue
        with pytest.raises(ValueError) as e:
            plan_load(o, SPARK)
        assert f.refused==e.value.msg and f.nbytes is None

def test_columns_of_the_whole_catalogue():
    "A row for each model and way; sums are right, and what does not fit says so"
    t = footprint_table(ways=Ways((8192,)))
    rows = list(csv.DictReader(io.StringIO(t.to_csv())))
    assert [r['model'] for r in rows]==list(CATALOG)
    for r,e in zip(rows, CATALOG.values()):
        assert e.least_memory in (None,int(r['total']))
        assert (r['fits']=='True')==(int(r['total'])<=t.memory)
    assert json.loads(json.dumps(t.rows()))==t.rows()

GIB = 1<<30
sizes = st.lists(st.tuples(st.integers(1, 60*GIB), st.integers(1, 99)), max_size=7)

def made(many):
    "Footprints of so many bytes of weights"
    def plan(n): return StartPlan('', '', 0, 0, '', dict(weights=n))
    return [Footprint(str(i), None, 'f16', 1, plan(n)) for i,n in enumerate(many)]

@given(sizes, st.integers(0, 200*GIB))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_parts_of_a_set_that_fits_fit(some, memory):
    "Sums are right, all of it fits if the sum does, and one model less fits, too"
    found = made([n for n,_ in some])
    whole = Together(tuple(found), memory)
    assert whole.nbytes==sum(f.set_aside for f in found)>=sum(f.nbytes for f in found)
    assert whole.fits==(whole.nbytes<=memory)
    assert replace(whole, memory=whole.nbytes).fits
    assert not (found and replace(whole, memory=whole.nbytes-1).fits)
    for i in range(len(found)):
        part = replace(whole, found=tuple(found[:i]+found[i+1:]))
        assert part.fits or not whole.fits
    for s in largest_sets(found, [p for _,p in some], memory):
        assert s.fits and len({f.model for f in s.found})==len(s.found)

def test_a_set_with_a_model_that_cannot_be_planned():
    bad = Footprint('a', None, 'f16', 1, None, 'no')
    t = Together((*made([1]),bad), 1<<40)
    assert not t.fits and t.nbytes is None and t.to_dict()['refused']==['a: no']
    assert str(t)=='0 + a: no plan; a: no'
    assert str(Together(tuple(made([1<<30])), 1<<20)).endswith('of 1 MiB, do not fit')

def test_a_context_beyond_the_model_is_no_question_of_room():
    t = footprint_table(['qwen3-0.6b-bf16','tiny'], Ways((262144,)))
    said = t.together(262144, 'f16')
    assert 'do not fit' not in str(said) and ' 0 B' not in str(said)
    assert [s.partition(': ')[0] for s in said.refused]==['qwen3-0.6b-bf16','tiny']

# ---- a step, beside what is planned for it

@pytest.fixture
def most(monkeypatch):
    "Tells the most bytes that arrays of a dry card take while a function runs"
    held,hold = [0],Region.hold
    def noted(region, *args, **kw):
        piece = hold(region, *args, **kw)
        held[0] = max(held[0], region.used)
        return piece
    monkeypatch.setattr(Region, 'hold', noted)
    def of(card, f, *args):
        card._all._settle()
        before = held[0] = card._all.used
        f(*args)
        return held[0]-before
    return of

@pytest.mark.slow
@pytest.mark.parametrize('shape,weights', [('llama-3.1-8b','fp8'), ('gpt-oss-20b',None),
    ('qwen3.6-35b-a3b','nvfp4'), ('gemma-4-26b-a4b','nvfp4-experts'), ('qwen3.6-27b','nvfp4'),
    ('nemotron-3-nano-30b-a3b','nvfp4'), ('granite-4.0-h-tiny','nvfp4')])
def test_a_step_takes_what_was_planned(most, shape, weights):
    "Prompts of 2,048 tokens take nearly that, and 32 sequences that may be long no more"
    card,longest = Dry('sm_90a', 1<<40),65_536
    o = EngineConfig(shape, card, longest, 32, load_format='dummy', weights=weights)
    with recording(launch=False):
        m = Cold(replace(o, chunk=2048, kv_cache_memory=1<<34), False)
        s = m.engine.stepper
        prompts = most(card, s._try_prompt, 2048)
        rows = most(card, s._try_decode, longest, s._buckets()[-1:])
    planned = 2048*_prompt_bytes(m.config)
    assert .7*planned<prompts<=1.02*planned
    assert rows<=step_bytes(m.config, 0, 32, longest)
