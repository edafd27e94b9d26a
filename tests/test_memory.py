"""A model's memory on a card: what it takes is planned, counted and given back. The emulator
counts as a card does."""
import gc,json,threading,numpy as np,pytest
import atlas.engine.loading
from test_card import TOYS,_SMALL
from atlas.card import variants
from atlas.card.arena import Arena,Region
from atlas.ground.config import PRESETS
from atlas.ground.core import kernel_dir,EngineError,OutOfMemoryError
from atlas.card.device import Budget,Memory
from atlas.card.emulator import Emulator,find_cxx
from atlas.card.launch import compilations,saved_variants
from atlas.engine.card_stepper import CardStepper
from atlas.use.llm import LLM,list_model
from atlas.cuda import vocabulary as card_words
from atlas.model.model import model_wants
from atlas.ground.opening import open_model
from atlas.ground.options import EngineConfig
from atlas.ops.sample import SamplingParams
from atlas.card.variants import CARDS

pytestmark = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')
M = 1<<20

@pytest.fixture
def load(monkeypatch):
    def f(toy='llama', weights='nvfp4', free=None, **kw):
        base,small = TOYS[toy]
        monkeypatch.setitem(PRESETS, f'toy-{toy}', PRESETS[base]|_SMALL|small)
        card = Emulator()
        if free:
            monkeypatch.setattr(card, 'memory', lambda: Memory(free, free))  # 36 % may be used
        return LLM(
            f'toy-{toy}', card,
            **dict(
                max_seq_len=200, max_num_seqs=2, chunk=64, load_format='dummy', weights=weights,
                show=False)|kw)
    return f

def ids(llm, n=4):
    return llm.generate(
        [5,6,7],
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)).token_ids

def check_counted(llm):
    "All that stays of a model is counted, and where it belongs"
    b,rs = llm.arena.budget,llm.arena.regions
    assert {'weights','cache','tables','steps'}==b.parts.keys()
    assert b.used==sum(r.mapped for r in rs.values())+b.parts['steps']<=b.total
    assert llm.device.room is None
    assert rs['cache'].used>=llm.cache.nbytes
    assert rs['tables'].used>=llm.engine.stepper.table.nbytes

def planned_bytes(llm, weights, quantization=None, lm_head_dtype=None, **kw):
    "Bytes that its weights were planned to take"
    options = EngineConfig(llm.name, load_format='dummy', weights=weights)
    with open_model(options, model_wants) as ck:
        return card_words.weight_bytes(ck.tensors, ('','vision'), quantization=quantization,
            head=lm_head_dtype)

@pytest.mark.parametrize('toy,weights,kw', [
    ('llama','bf16',{}),
    ('qwen3.6-moe','nvfp4',dict(lm_head_dtype='nvfp4')),
    ('qwen3.6-moe','bf16',dict(quantization='nvfp4')),
    ('gpt-oss','mxfp4',{}),
    ('nemotron','nvfp4',{}),
    ('llama','bf16',dict(quantization='fp8', kv_cache_dtype='nvfp4'))])
def test_two_loads_leave_nothing(load, toy, weights, kw):
    """All that stays is counted, about as much as was planned; closing gives it back, to the last
    byte"""
    for _ in range(2):
        llm = load(toy, weights, **kw)
        check_counted(llm)
        b,rs = llm.arena.budget,llm.arena.regions
        plan = planned_bytes(llm, weights, **kw)
        assert abs(plan-rs['weights'].used)<.2*plan+M, (plan, rs['weights'].used)
        used = {n:r.used for n,r in rs.items()}
        ids(llm)
        assert {n:r.used for n,r in rs.items()}==used  # a step leaves nothing in them
        assert llm.close()==0
        assert not b.parts
        assert not rs
        assert 'closed' in repr(llm)
        with pytest.raises(EngineError, match='is closed'):
            ids(llm)
        assert llm.close()==0

def test_penalties_are_tables(load):
    "What the sampler needs later is counted, too, and used again"
    llm = load()
    t = llm.arena['tables']
    used = t.used
    def ask():
        return llm.generate(
        [5,6,7],
        SamplingParams(
            temperature=.5, seed=1, max_tokens=3, frequency_penalty=.5,
            logit_bias={9:1.}, ignore_eos=True))
    ask()
    more = t.used
    ask()
    assert t.used==more>used and llm.close()==0

def test_kept_arrays_stay(load):
    "An array that somebody keeps is valid after the end, and goes when he lets go of it"
    llm = load()
    b,w = llm.arena.budget,llm.model.embed_tokens.weight
    before = np.array(w.w)
    assert llm.close()==b.parts['weights']>0
    assert (np.array(w.w)==before).all()
    del w
    gc.collect()
    assert not b.parts

@pytest.mark.parametrize(
    'how',
    [dict(free=100*M), dict(free=700*M, chunk=1<<15), dict(
        free=1000*M, kv_cache_memory=1<<40, max_seq_len=512, max_num_seqs=4000),
    dict(free=1000*M, max_seq_len=512, max_num_seqs=4000), dict(free=175*M)])
def test_too_large_is_told_before_anything_is_made(load, monkeypatch, how):
    made = []
    monkeypatch.setattr(Emulator, 'empty', lambda *a, **kw: made.append(a))
    with pytest.raises(OutOfMemoryError) as e:
        load('nemotron', **how)
    assert not made and e.value.hint and e.value.code=='out_of_memory', e.value
    if how['free']==100*M:
        assert 'The weights of toy-nemotron take' in str(e.value)
        assert 'can be used' in str(e.value)
        assert '--quantization' in e.value.hint

def test_a_bound_beyond_the_card_is_no_error(load):
    "The cache is as large as whole contexts of all sequences need, whatever it might have"
    a,b = load(),load(free=1000*M, kv_cache_memory=1<<42)
    assert a.cache.nbytes==b.cache.nbytes<M
    assert b.cache.pool.num_blocks==2*4
    assert len(ids(b))==4
    a.close()
    b.close()

def test_a_plan_that_was_wrong(load, monkeypatch):
    "Weights that need more than was thought: the region refuses, and nothing stays behind"
    monkeypatch.setattr(card_words, 'weight_bytes', lambda *a, **kw: 0)
    monkeypatch.setattr(card_words, 'step_bytes', lambda *a, **kw: 0)
    monkeypatch.setattr(atlas.engine.loading, '_fit', lambda *a, **kw: 8)
    arena = Arena(Emulator(), Budget(300<<10), step=4096)
    monkeypatch.setattr(Emulator, 'arena', lambda self, most=None: arena)
    with pytest.raises(
            OutOfMemoryError, match='weights: .* needed, .* left of a budget of 300 KiB'):
        load('qwen3.6-moe')
    gc.collect()
    arena.close()
    assert Emulator().room is None and not arena.budget.parts

def count(n):
    "A prompt of `n` tokens"
    return list(range(5, 5+n))

def say(llm, prompts, max_tokens=3, **how):
    "Have `prompts` answered"
    llm.generate(prompts, SamplingParams(max_tokens=max_tokens, ignore_eos=True, **how))

def beside(llm, other):
    "Have a model answer while a thread does `other`"
    t = threading.Thread(target=other)
    t.start()
    for n in (1,30,65,130,200):
        say(llm, count(n), temperature=n%2, seed=1)
    say(llm, [count(3), count(70)], temperature=0, max_tokens=80)
    t.join()

def test_only_what_a_step_waits_for_is_late(load):
    """Each model has its own count: one that is loaded while another serves is not late, and a
    warm engine compiles nothing"""
    llm = load('qwen3.6-moe', max_seq_len=300)
    before = compilations.after_ready
    llm.engine.warm()
    beside(llm, lambda: load('gpt-oss', 'mxfp4').close())
    assert llm.engine.late==[] and compilations.after_ready==before
    new = load('mistral')
    # not warm: nothing is late
    assert new.engine.late is None
    assert ids(new)
    assert new.engine.late is None
    new.engine.late = []
    say(new, count(140), temperature=1, seed=3, top_p=.9)
    assert llm.engine.late==[]
    assert compilations.after_ready-before==len(new.engine.late)
    new.close()
    llm.close()

FLAGSHIP = 'qwen3.6-35b-a3b'
NVFP4 = dict(weights='nvfp4', lm_head_dtype='nvfp4')
LISTED = [FLAGSHIP]

@pytest.mark.parametrize('name', LISTED)
def test_the_list_for_wheels_is_current(tmp_path, name):
    "What wheels are compiled with is what the model asks for, neither more nor less"
    list_model(name, tmp_path/'v.json', **NVFP4)
    for arch in CARDS:
        now = saved_variants(arch, path=tmp_path/'v.json')
        listed = saved_variants(arch, name)
        assert now==listed, 'renew kernels/variants.json: list_model(name, **NVFP4)'

def test_all_that_is_listed_is_tested():
    listed = json.loads((kernel_dir()/'variants.json').read_text())
    assert sorted(LISTED)==sorted(listed)

@pytest.fixture
def most_used(monkeypatch):
    "Region -> the most bytes that its arrays ever had"
    most,hold = {},Region.hold
    def held(region, *args, **kw):
        piece = hold(region, *args, **kw)
        most[region.name] = max(most.get(region.name, 0), region.used)
        return piece
    monkeypatch.setattr(Region, 'hold', held)
    monkeypatch.setattr(Emulator, 'warm_up', lambda card, f: None)
    return most

def test_what_is_joined_does_not_stay_beside_what_it_is_made_of(load, most_used, monkeypatch):
    "Shared experts become the last of their banks: of few banks there are two at a time"
    base,small = TOYS['qwen3.6-moe']
    layers = dict(num_hidden_layers=16, layer_types=['full_attention']*16)
    many = dict(num_experts=64, moe_intermediate_size=64, shared_expert_intermediate_size=64)
    monkeypatch.setitem(TOYS, 'banks', (base, small|layers|many))
    llm = load('banks')
    assert all(l.joined for b in llm.model.layers for l in b.parts() if hasattr(l, 'experts'))
    assert most_used['weights']<1.2*llm.arena.regions['weights'].used

def test_kernels_are_loaded_once_noted_steps_gave_their_memory_back(load, monkeypatch):
    "What is only noted takes memory as a step does: beside a large cache it may be all there is"
    monkeypatch.setattr(Emulator, 'warm_up', lambda card, f: None)
    llm,order = load(),[]
    def telling(what, f):
        def told(*args):
            order.append(what)
            return f(*args)
        return told
    for where,name in ((CardStepper,'_try_prompt'),(CardStepper,'_tidy'),(variants,'_ready')):
        monkeypatch.setattr(where, name, telling(name, getattr(where, name)))
    llm.engine.warm()
    first = order.index('_ready')
    assert order[first-1]=='_tidy' and '_try_prompt' in order[:first]
