"""The kernels of whole models, on the emulator: every family and format against the host, rows
that do not notice each other, and the engine's step."""
import gc,numpy as np,pytest,weakref
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from atlas.engine.cache import KVCache
from atlas.ground.config import PRESETS
from atlas.ground.core import RequestError
from atlas.engine.card_stepper import CardStepper,StepShape
from atlas.card.device import Host
from atlas.card.emulator import Emulator,find_cxx
from atlas.engine.engine import Engine
from atlas.engine.stepper import HostStepper
from atlas.card import card as card_calls,graph
from atlas.card.launch import recording
from atlas.model.model import Piece,imagine,load_model,make_batch
from atlas.ops.sample import SamplingParams
from atlas.engine.scheduler import Request,Scheduler
from atlas.card.variants import wanted
from atlas.cuda.pack import unpack
from atlas.ground.weights import open_checkpoint
from helpers.layouts import CONFS,LAYOUTS,folder,stored
from helpers.reference import INT4,refs
from helpers.small_engine import interrupted

DATA = Path(__file__).parent/'data'
pytestmark = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')

# Families at a size that a CPU can emulate; what makes each of them what it is, is kept

_SMALL = dict(
    hidden_size=128, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    head_dim=32, intermediate_size=96, vocab_size=256,
    max_position_embeddings=512, bos_token_id=1, eos_token_id=2)
_MOE = dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64)
_GDN = dict(
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=32,
    linear_value_head_dim=32, shared_expert_intermediate_size=64, num_hidden_layers=4)
_GRANITE = dict(layer_types=['mamba','attention','mamba'],
    mamba_n_heads=16, mamba_d_head=16, mamba_d_state=16)
_LESS = dict(vision_config=None, mtp_num_hidden_layers=0, image_token_id=None, video_token_id=None)
TOYS = {
    'llama': ('llama-3.1-8b', {}),
    'mistral': ('mistral-7b-v0.3', dict(sliding_window=40, head_dim=48)),
    'qwen3': ('qwen3-8b', {}), 'qwen3-moe': ('qwen3-30b-a3b', _MOE),
    'qwen3.5': ('qwen3.6-27b', _GDN|_LESS),
    'qwen3.6-moe': ('qwen3.6-35b-a3b', _GDN|_MOE|_LESS),
    'gpt-oss': ('gpt-oss-20b', dict(num_local_experts=8, num_experts_per_tok=2, sliding_window=16)),
    'gemma': (
        'gemma-4-26b-a4b',
        dict(
            num_hidden_layers=6, global_head_dim=64, num_global_key_value_heads=1, num_experts=8,
            top_k_experts=2, moe_intermediate_size=64, sliding_window=16)),
    'nemotron': ('nemotron-3-nano-30b-a3b', dict(
        hybrid_override_pattern='MEM*E', num_hidden_layers=5, mamba_num_heads=8, mamba_head_dim=16,
        n_groups=2, ssm_state_size=16, n_routed_experts=8, num_experts_per_tok=2,
        moe_intermediate_size=64, moe_shared_expert_intermediate_size=96)),
    'granite': ('granite-4.0-h-tiny', _GRANITE|dict(
        num_local_experts=8, num_experts_per_tok=2, shared_intermediate_size=64)),
    'granite-tied': ('granite-4.0-h-micro', _GRANITE|dict(
        mamba_n_groups=2, mamba_conv_bias=False, mamba_proj_bias=True,
        attention_bias=True, shared_intermediate_size=96)),
    'granite-moe': ('granite-4.0-h-tiny', dict(model_type='granitemoe', num_local_experts=8,
        num_experts_per_tok=2, shared_intermediate_size=0)),
    'minimax': ('minimax-m2', dict(rotary_dim=16, num_local_experts=8, num_experts_per_tok=2))}
CASES = [
    ('llama','bf16'), ('llama','fp8'), ('mistral','nvfp4'),
    ('qwen3','mxfp4'), ('qwen3-moe','nvfp4'), ('qwen3.5','nvfp4'),
    ('qwen3.6-moe','nvfp4'), ('qwen3.6-moe','fp8'),
    ('gpt-oss','mxfp4'), ('gemma','nvfp4'), ('nemotron','nvfp4'), ('granite','nvfp4'),
    ('granite-tied','nvfp4'), ('granite-moe','nvfp4'), ('minimax','fp8'), ('qwen3-moe','int4')]
FEW = [('llama','bf16'), ('qwen3.6-moe','nvfp4'), ('nemotron','nvfp4')]

_models = {}
def models(toy, weights):
    "The same random model on the host and on the emulator"
    if (toy,weights) not in _models:
        base,small = TOYS[toy]
        PRESETS[f'toy-{toy}'] = PRESETS[base]|_SMALL|small
        try:
            def load(dev):
                with imagine(f'toy-{toy}', weights) as ck:
                    ck.kind = 'numbers'  # a card would make up its own
                    return load_model(ck, dev, 512)
            _models[toy,weights] = load(Host()),load(Emulator())
        finally:
            del PRESETS[f'toy-{toy}']
    return _models[toy,weights]

def cache_of(m, states=8, blocks=40, B=16):
    kept = np.float32 if m.device.kind=='cpu' else 'bf16'
    return KVCache(m.c, m.device, blocks, B, kept, states)

def forward(m, cache, pieces, tiled):
    b = make_batch(pieces, tiled, cache.pool.block_size, m.device)
    return m.device.download(m.forward(b, cache))
def ids_of(n, seed=0):
    return np.random.default_rng(seed).integers(3, 250, n).tolist()
def off(a, b):
    return float(abs(a-b).max()/abs(b).max())

# Layer by layer

TABLE = list(range(8)) # Blocks of the one sequence

def prompt_of(ids, device):
    "A batch of one prompt in tiles"
    return make_batch([Piece(ids, 0, TABLE, 1, keep=1)], True, 16, device)

def layer_inputs(host, ids):
    "What goes into each layer of the host's model, and what comes out of it"
    b,stream = prompt_of(ids, Host()),[]
    def note(i, x):
        stream.append(x.reshape(-1, x.shape[-1]).copy())
    host.trunk(b, cache_of(host), note)
    return [host.embed(b), *stream[:-1]],stream

@pytest.mark.parametrize('toy,weights', CASES)
def test_each_layer_alone(toy, weights):
    """Given the host's input, each layer's output on the card is the host's; experts that a
    rounding flips are within a rounding of each other"""
    host,card = models(toy, weights)
    ids,cache = ids_of(100),cache_of(card)
    ins,outs = layer_inputs(host, ids)
    b = prompt_of(ids, card.device)
    for i,(l,x,want) in enumerate(zip(card.layers, ins, outs)):
        got = card.device.download(l(card.device.upload(x), card.step(b, cache)))
        got,want = got[:100],want[:100]
        bad = abs(got-want).max(1)>1e-2*abs(want).max()
        allowed = .06 if 'moe' in card.c.ffns[i] else 0
        assert bad.mean()<=allowed, (i, bad.mean(), off(got, want))
        assert off(np.delete(got, bad, 0), np.delete(want, bad, 0))<1e-2

def loaded(path, device):
    "The model of a folder"
    with open_checkpoint(path) as ck:
        return load_model(ck, device, 512)

def matrices(layer):
    "The matrices of a layer with one attention and one MLP"
    mixer,mlp = layer.parts()
    layers = mixer.qkv_proj,mixer.o_proj,mlp.gate_up_proj,mlp.down_proj
    return [l.weight for l in layers]

def prompt_then_steps(m, ids, more, outs):
    "Logits of the last `outs` tokens of the prompt `ids`, and of each of `more` after it"
    c = cache_of(m)
    table = list(range(8))
    T = len(ids)
    prompt = Piece(ids, 0, table, outs, state=0, keep=1)
    logits = [forward(m, c, [prompt], True)]
    for i,t in enumerate(more):
        step = Piece([t], T+i, table, 1,
            state=1+i%2, keep=2-i%2)
        logits.append(forward(m, c, [step], False))
    return np.concatenate(logits)

@pytest.mark.parametrize('name', INT4)
def test_integers_that_libraries_packed(name):
    "They stay integers on the card, and give the recorded logits of a prompt and of steps"
    r,m = refs[name],loaded(DATA/name, Emulator())
    assert {w.fmt for w in matrices(m.layers[0])}=={'int4'}
    ids,more = r['ids'].tolist(),r['next_ids'].tolist()
    got = prompt_then_steps(m, ids, more, len(ids))
    want = np.concatenate([r['logits'],r['next_logits']])
    wrong = abs(got-want).max(1)
    assert (wrong<2e-2*abs(want).max()).all(), off(got, want)

@pytest.mark.parametrize('name', ['llama-int4-ct','llama-gptq','qwen3-awq','qwen3-moe-int4-ct'])
def test_integers_in_groups_as_published(tmp_path, name, monkeypatch):
    "On the card they stay integers, and give the host's bits and logits, of a prompt and of a step"
    conf,*rest = LAYOUTS[name]
    of_a_size_that_the_cache_takes = CONFS[conf]|dict(head_dim=32)
    monkeypatch.setitem(CONFS, conf, of_a_size_that_the_cache_takes)
    path = folder(tmp_path, CONFS[conf], stored(conf, *rest)[0])
    host,card = loaded(path, Host()),loaded(path, Emulator())
    w,plain = (m.layers[0].mixer.qkv_proj.weight for m in (card,host))
    assert w.fmt=='int4' and (unpack(w)==plain).all()
    ids = [i%64 for i in ids_of(65)]
    got,want = (prompt_then_steps(m, ids[:64], ids[64:], 1)
        for m in (card,host))
    wrong = abs(got-want).max(1)
    assert (wrong<2e-2*abs(want).max(1)).all(), off(got, want)

@pytest.mark.parametrize('toy,weights', CASES)
def test_each_layer_alone_in_steps(toy, weights):
    "The same for eight rows of a verify step after 64 tokens of a prompt: the kernels of decoding"
    host,card = models(toy, weights)
    ids,cache,device = ids_of(72),cache_of(card),card.device
    ins,outs = layer_inputs(host, ids)
    tiles = prompt_of(ids[:64], device)
    step = Piece(ids[64:], 64, TABLE, 8, state=1, keep=2)
    rows = make_batch([step], False, 16, device)
    for i,layer in enumerate(card.layers):
        x,want = ins[i],outs[i][64:72]
        layer(device.upload(x[:64]), card.step(tiles, cache))
        got = layer(device.upload(x[64:72]), card.step(rows, cache))
        part = abs(device.download(got)-want).max(1)/abs(want).max()
        assert (part>1e-2).sum()<=('moe' in card.c.ffns[i]), (i, part)

# Row invariance

def after_prompt(m, ids):
    "A cache that has the prompt `ids`"
    c = cache_of(m, 12)
    forward(m, c,
        [Piece(ids, 0, TABLE, 1, state=0, keep=1)], True)
    return c

def one_by_one(m, prompt, more):
    "Logits of each of `more` after a prompt, a step each"
    c = after_prompt(m, prompt)
    def step(i, t):
        return forward(
            m, c, [Piece([t], len(prompt)+i, TABLE, 1, state=1+i%2, keep=2-i%2)], False)
    return [step(i, t) for i,t in enumerate(more)]

ROWS_ALONE = pytest.mark.parametrize(
    'toy,weights', [*FEW, ('gpt-oss','mxfp4'), ('llama','fp8')])

@ROWS_ALONE
def test_rows_of_a_sequence_do_not_notice_each_other(toy, weights):
    "To the last bit: eight rows of one sequence as eight steps"
    m,ids = models(toy, weights)[1],ids_of(72)
    ones = one_by_one(m, ids[:64], ids[64:])
    for n in (2,3,8):
        c = after_prompt(m, ids[:64])
        got = forward(m, c,
            [Piece(ids[64:64+n], 64, TABLE, n, state=1, keep=2)], False)
        assert (got==np.concatenate(ones[:n])).all(), n

@ROWS_ALONE
def test_sequences_do_not_notice_each_other(toy, weights):
    "To the last bit: a row among others as alone"
    m,ids = models(toy, weights)[1],ids_of(72)
    alone, = one_by_one(m, ids[:64], ids[64:65])
    c = after_prompt(m, ids[:64])
    forward(m, c,
        [Piece(ids_of(30, 1), 0, [20,21], 1, state=4, keep=5)], True)
    among = [
        Piece(ids[64:65], 64, TABLE, 1, state=1, keep=2),
        Piece([7], 30, [20,21], 1, state=5, keep=6),
        Piece([9], 0, [30], 1, state=0, keep=8)]
    assert (forward(m, c, among, False)[0]==alone).all()

# The engine

def engine(m, seqs=4, blocks=40, chunk=64, **kw):
    c = cache_of(m, 2*seqs, blocks)
    s = Scheduler(c.pool, seqs, 200, chunk, **kw)
    host = m.device.kind=='cpu'
    return Engine(s, HostStepper(m, c) if host else CardStepper(m, c, s))

def serve(e, requests, at=lambda step: ()):
    "Tokens, reasons and log probabilities of all requests; `at(step)` lists those that come later"
    out,todo,step = {},list(requests),0
    while todo or e.has_work or step<20:
        for r in [r for r in todo if r[1]<=step]:
            e.add(r[0])
            todo.remove(r)
        for ev in e.step():
            t = out.setdefault(ev.id,
                SimpleNamespace(tokens=[], logprobs=[], finish=None))
            if ev.token is not None:
                t.tokens.append(ev.token)
                t.logprobs.append(ev.logprob)
            if ev.finish:
                t.finish = ev.finish
        step += 1
    return out

def greedy(max_tokens, **kw):
    "As many of the likeliest tokens"
    return SamplingParams(**dict(temperature=0, max_tokens=max_tokens, ignore_eos=True)|kw)

def asks(n=5, **kw):
    "Requests of growing length, and the steps in which they come"
    def ask(i):
        params = greedy(**dict(max_tokens=6+i)|kw)
        return Request(f'r{i}', tuple(ids_of(10+17*i, i)), params)
    return [(ask(i), 2*i) for i in range(n)]

def said(out)->dict:
    "Tokens of each request"
    return {i:t.tokens for i,t in out.items()}

@pytest.mark.parametrize('toy,weights', FEW)
def test_the_same_greedy_tokens_in_any_company(toy, weights):
    _,m = models(toy, weights)
    together = serve(engine(m), asks())
    for r,_ in asks():
        alone = serve(engine(m), [(r,0)])[r.id]
        assert alone.tokens==together[r.id].tokens
        assert alone.finish==together[r.id].finish=='length'

def test_the_hosts_tokens():
    "Where logits are clear of each other the card says what the host says"
    a,b = (serve(engine(m), asks(4, logprobs=1)) for m in models('llama', 'bf16'))
    def lengths(out): return {i: len(t) for i,t in said(out).items()}
    assert lengths(a)==lengths(b)
    def each(out): return [p for i in a for p in zip(out[i].tokens, out[i].logprobs)]
    both = list(zip(each(a), each(b)))
    same = [abs(p-q) for (x,p),(y,q) in both if x==y]
    assert len(same)>=.9*len(both)
    assert max(same)<.05

def course(m, stepper):
    "Who got a token in each step, or had to leave, and how many were preempted"
    c = cache_of(m, 6, 14)
    s = Scheduler(c.pool, 3, 200, 64, overcommit=3.)
    e = Engine(s, stepper(m, c, s))
    steps = []
    todo = []
    for i,(r,at) in enumerate(asks(5, max_tokens=24)):
        todo.append((Request(r.id, r.prompt, r.params, i%2), at))
    while todo or e.has_work:
        for r,at in todo:
            if at<=len(steps):
                e.add(r)
        todo = [x for x in todo if x[1]>len(steps)]
        gone = e.abort('r3') if len(steps)==20 else []
        events = gone+e.step()
        steps.append([(v.id, v.finish, v.token is None) for v in events])
    return steps,s.totals['preemptions']

def test_the_host_one_step_behind_goes_step_by_step_with_the_card():
    "Who gets a token in which step, and who has to leave: as with the host's stepper, landing late"
    host,card = models('llama', 'bf16')
    late = course(host, lambda m,c,s: HostStepper(m, c, overlap=True))
    assert late==course(card, CardStepper) and late[1]>0

def test_sampled_tokens_are_repeatable():
    _,m = models('llama', 'bf16')
    how = dict(
        temperature=.8, top_p=.9, top_k=40, seed=5, presence_penalty=.3,
        repetition_penalty=1.1, logit_bias={7:3.}, min_tokens=3)
    a = serve(engine(m), asks(3, **how))
    b = serve(engine(m), asks(3, **how))
    assert said(a)==said(b)
    alone = serve(engine(m), asks(3, **how)[2:])
    assert alone['r2'].tokens==a['r2'].tokens

def test_preemption_changes_nothing():
    _,m = models('llama', 'bf16')
    plain = serve(engine(m, blocks=40), asks(4, max_tokens=30))
    e = engine(m, blocks=14, overcommit=3.)
    tight = serve(e, asks(4, max_tokens=30))
    assert e.scheduler.totals['preemptions']>0
    assert said(plain)==said(tight)

def drawn_request(i, priority, n):
    drawn = dict(temperature=.9, presence_penalty=.5, repetition_penalty=1.2, logprobs=1)
    params = greedy(n, seed=i, **drawn)
    return Request(f'{priority}{i}', tuple(ids_of(10+i, i)), params, priority=priority)

def test_preempted_sequences_give_up_their_lanes():
    """More sequences have begun than there are lanes in the sampler's table: who waits again has
    none, and goes on as if nothing had been"""
    _,m = models('llama', 'bf16')
    e = engine(m, seqs=2)
    late = [drawn_request(i, 0, 3) for i in range(2)]
    early = [drawn_request(i, 1, 8) for i in range(2)]
    out = serve(e, [(r,0) for r in early]+[(r,4) for r in late])
    assert e.scheduler.totals['preemptions']==2 and not e.stepper.lanes
    for r in (early[0],late[0]):
        assert serve(engine(m), [(r,0)])[r.id]==out[r.id]

def test_who_comes_back_is_placed_anew():
    """A sequence that was alone before and after it was preempted has other blocks now, and the
    card must be told"""
    _,m = models('llama', 'bf16')
    a = Request('a', tuple(ids_of(20)), greedy(24), priority=1)
    e = engine(m, seqs=1)
    e.add(a)
    got = []
    def go(n):
        events = [v for _ in range(n) for v in e.step()]
        got.extend(v.token for v in events if v.id=='a' and v.token is not None)
    go(8)
    e.add(Request('b', tuple(ids_of(150, 3)), SamplingParams(max_tokens=4)))
    go(2)
    assert e.scheduler.totals['preemptions']==1
    assert e.scheduler.running[0].state=='prefill'
    e.abort('b')
    while e.has_work:
        go(1)
    assert got==serve(engine(m), [(a,0)])['a'].tokens

def variants(*steps)->set:
    "What steps launch"
    return {(n,tuple(sorted(d.items())))
        for n,d in wanted(*steps)}

def run_rows(e, m, ns, start, tiled):
    "Sequences of `ns` tokens from `start` on, through the model; of prompts the logits too"
    def piece(n):
        return Piece([0]*n, start,
            list(range(e.cache.blocks_for(start+n))), int(tiled))
    b = make_batch([piece(n) for n in ns], tiled, 16, m.device)
    x = m.trunk(b, e.cache)
    if tiled:
        m.head(m.final(x[b.out]))

def made_ready(e, monkeypatch):
    "What an engine makes ready at its start"
    known = set()
    def make_ready(card, *steps, **_):
        known.update(variants(*steps))
    monkeypatch.setattr('atlas.engine.card_stepper.make_ready', make_ready)
    with recording(launch=False):
        e.warm()
    return known

@pytest.mark.parametrize('toy,weights', CASES)
def test_a_warm_engine_compiles_no_more(toy, weights, monkeypatch):
    """What prompts of any length and number, replays and steps launch is among what was made
    ready; nothing is launched here"""
    _,m = models(toy, weights)
    e = engine(m)
    known = made_ready(e, monkeypatch)
    for ns in ((1,), (65,), (1,1), (64,)*3, (3,1,2,1)):
        assert variants(lambda: run_rows(e, m, ns, 0, True))<=known, ns
    for ns in ((2,), (3,), (8,), (8,8), (3,8,1)):
        assert variants(lambda: run_rows(e, m, ns, 70, False))<=known, ns
    body = e.stepper.body
    for k in (1,2,4):
        shapes = StepShape(k, 200, True, True),StepShape(k, 128, True, False)
        assert variants(*(partial(body, shape) for shape in shapes))<=known, k

@pytest.fixture
def larger(monkeypatch):
    "An emulator with so many multiprocessors, which has no kernel yet"
    def f(n):
        monkeypatch.setattr(Emulator, 'multiprocessors', n)
        monkeypatch.setattr(card_calls, '_variants', {})
        card_calls._kernels.clear()
    yield f
    card_calls._kernels.clear()

def replayed(stepper)->list:
    "How many tokens are replayed in each launch from now on"
    many,launch = [],stepper.launch
    def seen(plan, samplers):
        many.append(sum(n for *_,n in plan.replay))
        return launch(plan, samplers)
    stepper.launch = seen
    return many

CROWDS = [('llama','bf16'), ('mistral','nvfp4')]

@pytest.mark.parametrize('toy,weights', CROWDS)
def test_replays_of_several_sequences_compile_no_more(toy, weights, larger):
    """Three sequences give way to one, and are replayed side by side: more blocks at once than the
    card has room for"""
    larger(24)
    _,m = models(toy, weights)
    e = engine(m, blocks=13, overcommit=4.)
    e.warm()
    side_by_side = replayed(e.stepper)
    small = [(Request(f'r{i}', tuple(ids_of(5+i, i)), greedy(14), priority=1), 0)
        for i in range(3)]
    large = Request('r3', tuple(ids_of(190, 3)), greedy(2), priority=0)
    got = serve(e, [*small, (large,11)])
    assert e.scheduler.totals['preemptions']==3 and max(side_by_side)==24
    assert [len(got[f'r{i}'].tokens) for i in range(4)]==[14,14,14,2]
    assert e.late==[] and e.stats()['jit_after_ready_total']==0

def test_end_tokens():
    _,m = models('llama', 'bf16')
    def ask(**kw): return Request('a', tuple(ids_of(20)), greedy(12, **kw))
    want = serve(engine(m), [(ask(),0)])['a'].tokens
    stop = want[5]
    ended = ask(ignore_eos=False, stop_token_ids=(stop,))
    out = serve(engine(m), [(ended,0), *asks(2)])
    assert out['a'].tokens==want[:want.index(stop)+1]
    assert out['a'].finish=='stop'

def test_aborts():
    e = engine(models('llama', 'bf16')[1])
    for r,_ in asks(3):
        e.add(r)
    for _ in range(4):
        e.step()
    assert [x.finish for x in e.abort('r1')]==['abort']
    left = serve(e, [])
    assert 'r1' not in {i for i,t in left.items() if t.finish}
    assert len(e.stepper.free)==e.stepper.rows.most+1
    assert e.scheduler.pool.used==0

def test_logits_that_are_no_numbers_fail_their_row():
    _,m = models('llama', 'bf16')
    e = engine(m)
    reqs = asks(2)
    for r,_ in reqs:
        e.add(r)
    for _ in range(4):
        e.step()
    victim = next(s for s in e.scheduler.running if s.id=='r0')
    b = e.cache.kv[0].arrays[0]
    b[victim.table.blocks[0]] = 0x7FC0 if b.dtype==np.uint16 else 0xFF
    out = serve(e, [])
    assert out['r0'].finish=='error'
    assert out['r1'].finish=='length'
    assert e.stats()['corrupted_requests_total']==1

def test_a_steady_step_is_one_replay():
    """While the same sequences decode nothing is placed anew, and the step in the air is taken in
    by the next"""
    _,m = models('llama', 'bf16')
    e = engine(m)
    rows,placed = e.stepper.rows,[]
    place = rows.place
    def counted(*a):
        placed.append(1)
        return place(*a)
    rows.place = counted
    e.add(asks(1, max_tokens=20)[0][0])
    n = 0
    while e.has_work:
        n += len(e.step())
    assert n==20 and len(placed)==1 and len(e.stepper.graphs)==1

def test_a_warm_engine_says_the_same():
    """Trying every kind of step first, without launching and then with, leaves no trace in what is
    said"""
    want = serve(engine(models('qwen3.6-moe', 'nvfp4')[1]), asks(2))
    kept = _models.pop(('qwen3.6-moe','nvfp4'))
    try:
        e = engine(models('qwen3.6-moe', 'nvfp4')[1])
    finally:
        _models['qwen3.6-moe','nvfp4'] = kept
    e.warm()
    for a in (*e.cache.rec.values(), *e.cache.conv.values()):
        assert np.isfinite(np.asarray(a)).all()
    assert said(serve(e, asks(2)))==said(want)

# Options

def test_options_of_a_card_are_refused_on_the_host():
    from atlas import LLM
    options = dict(
        quantization='nvfp4', lm_head_dtype='fp8', kv_cache_dtype='fp8',
        kv_high_precision_layers=2, prefill_activations='fp8')
    for k,v in options.items():
        with pytest.raises(RequestError, match=k):
            LLM(str(DATA/'smollm2-tied'), 'cpu', **{k:v})

@pytest.mark.parametrize(
    'how',
    [
        dict(quantization='nvfp4'), dict(quantization='fp8', lm_head_dtype='nvfp4'),
        dict(kv_cache_dtype='fp8'), dict(kv_cache_dtype='nvfp4', kv_high_precision_layers=1)],
    ids=str)
def test_fewer_bits(how):
    "Requantised weights and caches are near what they stand for, and smaller"
    from atlas import LLM
    def one(**kw):
        return LLM(
            str(DATA/'smollm2-tied'), Emulator(), max_seq_len=128, max_num_seqs=1, **kw)
    plain,small = one(),one(**how)
    ids = [i%150 for i in ids_of(40)]
    a,b = plain.logits(ids),small.logits(ids)
    assert np.isfinite(b).all()
    assert np.linalg.norm(b-a)<.5*np.linalg.norm(a)
    if 'quantization' in how:
        assert small.model.layers[0].mixer.qkv_proj.weight.fmt==how['quantization']
        assert small.model.embed_tokens.weight.fmt not in ('nvfp4','fp8')
    else:
        assert small.cache.bytes_per_token<plain.cache.bytes_per_token
    p = greedy(4)
    assert len(small.generate(ids, p).token_ids)==4

@pytest.mark.parametrize('toy', ['smollm2-tied','qwen3-moe-ct-nvfp4'])
@pytest.mark.parametrize('fmt', ['fp8','nvfp4'])
def test_prompts_in_fewer_bits(toy, fmt):
    """They are near what they stand for, the same however a prompt is cut,
    and steps of rows are as before"""
    from atlas import LLM
    how = dict(quantization='nvfp4', max_seq_len=256, max_num_seqs=1)
    def one(**kw): return LLM(str(DATA/toy), Emulator(), **how|kw)
    plain,few = one(),one(prefill_activations=fmt)
    ids = [i%100 for i in ids_of(140)]
    a,b = plain.logits(ids),few.logits(ids)
    off = np.linalg.norm(b-a)/np.linalg.norm(a)
    assert 1e-4<off<.8 and f'prefill in {fmt}' in repr(few)
    p = greedy(4, logprobs=0)
    cut = one(prefill_activations=fmt, chunk=64)
    want,got = few.generate(ids, p),cut.generate(ids, p)
    assert got.token_ids==want.token_ids
    assert [t.logprob for t in got.logprobs]==[t.logprob for t in want.logprobs]

def _by_its_twin(fmt):
    "`gemm_with` that multiplies rounded numbers on the host, where it would on the card"
    from atlas.cuda import gemm_scaled as g
    from atlas.ops.linear import fused_linear
    real = g.gemm_with
    def with_(activations, x, w, exact=False, gain=None, eps=0., out=None, **kw):
        if activations not in w.format.scaled or w.pair:
            more = dict(exact=exact, gain=gain, eps=eps, out=out)
            return real(activations, x, w, **more, **kw)
        with_.many += 1
        h = g.narrow_on_host(x, fmt, gain, eps)
        y = fused_linear(g.narrow_values(h, w.k),
            g.rounded(w, fmt), **kw)
        if out is None:
            return Emulator().upload(y)
        out[...] = y
        return out
    with_.many = 0
    return with_

@pytest.mark.parametrize('fmt', ['fp8','nvfp4'])
def test_prompts_in_fewer_bits_by_their_definition(fmt, monkeypatch):
    "A whole model, but for products of gates and ups: what the twin makes of it"
    from atlas import LLM
    from atlas.cuda import vocabulary
    m = LLM(str(DATA/'qwen3-moe-ct-nvfp4'), Emulator(), max_seq_len=128,
        max_num_seqs=1, prefill_activations=fmt)
    ids = [i%100 for i in ids_of(70)]
    got = m.logits(ids)
    twin = _by_its_twin(fmt)
    monkeypatch.setattr(vocabulary, 'gemm_with', twin)
    want = m.logits(ids)
    assert twin.many>=4
    # a rounding may fall the other way, where a sum differs in its last bit
    assert np.linalg.norm(got-want)<2e-2*np.linalg.norm(want)

def test_prompts_in_fewer_bits_are_refused_where_nothing_has_them():
    from atlas import LLM
    from atlas.ground.core import UnsupportedError
    with pytest.raises(UnsupportedError, match='weights in NVFP4') as e:
        LLM(str(DATA/'smollm2-tied'), Emulator(), prefill_activations='nvfp4')
    assert e.value.param=='prefill_activations'

def test_unknown_formats_are_refused():
    from atlas import AtlasError,LLM
    for k in ('quantization','lm_head_dtype','kv_cache_dtype','prefill_activations'):
        with pytest.raises(AtlasError, match='int3'):
            LLM(str(DATA/'smollm2-tied'), Emulator(),
                max_seq_len=128, max_num_seqs=1, **{k:'int3'})

def test_launches_of_a_layer():
    "Whatever the family, a layer of a decode step is at most ten launches"
    for toy,weights in CASES:
        _,m = models(toy, weights)
        c,b = cache_of(m),make_batch([Piece([5], 3, [0], 1)], False, 16, m.device)
        with recording(launch=False) as r:
            m.forward(b, c)
        assert len(r.calls)<=10*len(m.layers)+2, (toy, len(r.calls), len(m.layers))

def patient(step):
    "`step`, which a Ctrl-C ends with nothing"
    def one():
        try:
            return step()
        except KeyboardInterrupt:
            return []
    return one

LAUNCHES = [('replay',2), ('replay',4), ('_first',2), ('_first',3)]

@pytest.mark.parametrize('where,at', LAUNCHES)
def test_interrupted(where, at):
    "A Ctrl-C after the card's part of a launch changes no tokens, log probabilities or draws"
    m = models('qwen3.6-moe', 'nvfp4')[1]
    drawn = SamplingParams(temperature=.9, seed=3, frequency_penalty=.5,
        max_tokens=7, ignore_eos=True, logprobs=1)
    some = [*asks(3, logprobs=1), (Request('drawn', tuple(ids_of(12, 7)), drawn),1)]
    want = serve(engine(m), some)
    e = engine(m)
    calls = interrupted(e.stepper, where, at)
    e.step = patient(e.step)
    got = serve(e, some)
    assert calls()>at and got==want

def test_no_memory_while_rows_are_placed(monkeypatch):
    "The prompt of that step is shed, and the others go on as if nothing had been"
    m,n = models('llama', 'bf16')[1],0
    some = [*asks(2, logprobs=1), (Request('late', tuple(ids_of(9, 5)), greedy(4)),4)]
    want = serve(engine(m), some)
    import atlas.engine.card_stepper as at
    real = at.place_rows
    def full(*args):
        nonlocal n
        n += 1
        came = 'late' in {s.id for s in e.scheduler.running}
        if came and e.scheduler.seqs['late'].num_computed==0:
            raise MemoryError
        return real(*args)
    monkeypatch.setattr(at, 'place_rows', full)
    e = engine(m)
    got = serve(e, some)
    assert got['late'].finish=='error'
    for i in ('r0','r1'):
        assert got[i]==want[i]

def test_what_was_captured_stays(monkeypatch):
    "A kernel that only a captured function knows is there as long as what launches it again"
    launched = []
    @contextmanager
    def capturing(stream):
        yield SimpleNamespace(graph=SimpleNamespace(launch=launched.append))
    monkeypatch.setattr(graph, 'capturing', capturing)
    kernel = partial(int)
    known = weakref.ref(kernel)
    raw = SimpleNamespace(synchronize=lambda: None)
    again = graph.CudaStream.captured(SimpleNamespace(raw=raw), partial(id, kernel))
    del kernel
    gc.collect()
    again()
    assert known() and launched==[raw]
