"""Atlas against another implementation: the checkpoints of tests/data, made by make_reference.py,
and what the transformers library makes of them."""
import re
from dataclasses import replace
import numpy as np, pytest
import atlas.ground.files
from atlas import LLM,SamplingParams
from atlas.engine.cache import KVCache
from atlas.engine.engine import Engine
from atlas.engine.stepper import HostStepper
from atlas.engine.scheduler import Request,Scheduler
from helpers.gguf_writer import to_gguf
from helpers.reference import INT4,TOL,Run,data,drafts,error,having,host
from helpers.reference import model,mtp,refs,rewritten,seen

def each(key='ids'): return pytest.mark.parametrize('name', having(key))
def greedy_params(n): return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)

def test_there_is_data():
    assert len(refs)>=35 and set(having('target'))=={'gemma4-assistant','gemma4-assistant-ordered'}

@each()
def test_logits(name):
    r = refs[name]
    logits = LLM(str(data/name), device='cpu').logits(r['ids'])
    assert logits.dtype==np.float32
    assert error(logits, r['logits'])<TOL

@each()
def test_layers(name):
    "The residual stream after every layer, so that a fault is seen where it is made"
    r,streams,m = refs[name],[],model(name)
    def tap(i, x):
        x = x.reshape(-1, x.shape[-1])
        streams.append(x[r['rows']].copy())
    Run(m).prefill(r['ids'], tap=tap)
    assert len(streams)==len(r['layers'])
    unit = np.float32(m.unit)
    errs = [error(a*unit, b) for a,b in zip(streams, r['layers'])]
    assert max(errs)<TOL, errs

@each()
def test_cached_decode(name):
    "Tokens fed one at a time after the prompt, each reading what the last left in the cache"
    r = refs[name]
    run = Run(model(name))
    T = len(r['ids'])
    run.prefill(r['ids'])
    step = run.steps(r['next_ids'], T)
    assert error(step, r['next_logits'])<TOL
    eight = Run(run.model)
    eight.prefill(r['ids'])  # the same rows, eight at a time: the same bits
    assert (
        eight(r['next_ids'][:8], T, False)==step[:8]).all()

@each()
def test_chunked_prefill(name):
    "A prompt in chunks of whole tiles, bit for bit the prompt at once"
    r = refs[name]
    m = model(name)
    whole = Run(m).prefill(r['ids'])
    assert (
        (Run(m).chunks(r['ids'])==whole).all()
        and error(whole, r['logits'])<TOL)

@each()
def test_wanted_rows_alone(name):
    "A last layer that is spared the rows of a prompt that nobody asks for: the same bits"
    ids,m = refs[name]['ids'],model(name)
    run = Run(m)
    b = run.batch(ids, 0, True)
    whole = m.trunk(b, run.cache)
    for out in ([],[len(ids)-1],[len(ids)//2,0,len(ids)-1]):
        wanted = replace(b, out=np.array(out, np.int32))
        assert (m.trunk(wanted, Run(m).cache, only_out=True)==whole[wanted.out]).all()

@each()
def test_prompt_by_decode(name):
    """A prompt fed one token at a time goes through none of the code for tiles, and comes to the
    same"""
    r = refs[name]
    assert error(Run(model(name)).steps(r['ids']), r['logits'])<TOL

@pytest.mark.parametrize(
    'how',
    (Run.prefill,Run.chunks,Run.steps),
    ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    'name',
    [
        n for n,r in refs.items()
        if any(k.startswith('rec') for k in r)])
def test_states(name, how):
    "What recurrent layers remember of the prompt, however they read it"
    r = refs[name]
    run = Run(model(name))
    how(run, r['ids'])
    got = run.states()
    assert (
        got.keys()
        =={k for k in r if k.startswith(('rec','conv'))})
    for k,a in got.items():
        assert error(a, r[k])<TOL, k

@each('route_ids')
def test_routing(name):
    "Which experts each row went to, and how much of each"
    r,routes = refs[name],[]
    run = Run(model(name))
    b = run.batch(r['ids'], 0, True)
    run.model.trunk(b, run.cache, routes=routes)
    assert len(routes)==len(r['route_ids'])
    for (ids,weights),want,share in zip(
        routes, r['route_ids'], r['route_weights']):
        ids,weights = (
            a.reshape(-1, a.shape[-1])[r['rows']]
            for a in (ids,weights))
        order = ids.argsort(-1)
        assert (np.take_along_axis(ids, order, -1)==want).all()
        assert error(np.take_along_axis(weights, order, -1), share)<TOL

def one_off(data, zero): return data,zero+1&15
def other_half(data, zero): return data>>4|data<<4,zero
def turned_round(data, zero): return data,zero[::-1]

CODE_FAULTS = one_off,other_half,turned_round

@pytest.mark.parametrize('fault', CODE_FAULTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize('name', INT4)
def test_integers_read_otherwise_are_seen(name, fault, monkeypatch):
    "Zero points that are one off, or another row's, and codes in the wrong half of their byte"
    real = getattr(atlas.ground.files, INT4[name])
    def faulty(*a, **kw): return fault(*real(*a, **kw))
    monkeypatch.setattr(atlas.ground.files, INT4[name], faulty)
    r = refs[name]
    got = LLM(str(data/name), device='cpu').logits(r['ids'])
    off = error(got, r['logits'])
    alike = name=='llama-ct-int4' and fault is turned_round  # zero points that are all the same
    assert off<TOL if alike else off>100*TOL

# -- the tokens themselves
# --------------------------------------------------------------------------------------------------

def greedy(model, prompts, n, **kw):
    "Greedy tokens that an engine gives for `prompts`, run together"
    cache = KVCache(model.c, host, 64, num_states=8)
    out = {i:[] for i in range(len(prompts))}
    eng = Engine(
        Scheduler(cache.pool, 4, 256, **kw), HostStepper(model, cache))
    for i,ids in enumerate(prompts):
        eng.add(Request(
            str(i), tuple(int(t) for t in ids), greedy_params(n)))
    while eng.has_work:
        for e in eng.step():
            assert not e.error, e.error
            if e.token is not None:
                out[int(e.id)].append(e.token)
    assert cache.pool.used==0
    return list(out.values())

@each()
def test_greedy_through_the_engine(name):
    "Alone and beside others, whole and in chunks"
    r = refs[name]
    m = model(name)
    want = r['greedy'].tolist()
    n = len(want)
    assert greedy(m, [r['ids']], n)==[want]
    mates = [
        r['ids'][:5], r['ids'],
        r['ids'][::-1][:67]]
    assert greedy(m, mates, n, chunk=64)[1]==want

@each()
def test_greedy_through_the_door(name):
    r = refs[name]
    out = LLM(str(data/name), device='cpu', max_seq_len=256).generate(
        r['ids'].tolist(), greedy_params(len(r['greedy'])))
    assert out.token_ids==r['greedy'].tolist()

# -- drafts: what is proposed, and the logits it was taken from
# --------------------------------------------------------------------

@each('mtp_draft')
@pytest.mark.parametrize('pieces', (False,True))
def test_mtp(name, pieces):
    "Shown the prompt at once, or as it is verified, in tiles and in a few rows at a time"
    r = refs[name]
    one,tokens,logits = mtp(
        name,
        [64,1,2]+[len(r['ids'])-67] if pieces
        else None)
    assert error(one[r['rows']], r['mtp_logits'])<TOL
    assert (
        tokens==r['mtp_draft'].tolist()
        and error(logits[1], r['mtp_again'])<TOL)

@each('draft_tokens')
def test_assistant(name):
    r = refs[name]
    tokens,logits = drafts(name)
    assert tokens==r['draft_tokens'].tolist()
    assert error(logits, r['draft_logits'])<TOL

# -- images
# --------------------------------------------------------------------------------------------------

@each('pixels')
def test_vision_features(name):
    r = refs[name]
    media = seen(name, model(name))
    rows,values,levels = zip(*media.patches(0, len(r['image_ids'])))
    assert len(rows)==2
    assert error(np.concatenate(values), r['features'])<TOL
    deep = [r[f'deep{j}'] for j in range(9) if f'deep{j}' in r]
    got = [np.concatenate(d) for d in zip(*levels)]
    assert len(got)==len(deep)
    for a,b in zip(got, deep):
        assert error(a, b)<TOL
    assert (media.pos3==r['image_pos']).all()

@each('pixels')
def test_image_prompt(name):
    """Logits of a prompt with two images, whole, in chunks and token by token, and of tokens after
    it"""
    r = refs[name]
    m = model(name)
    media = seen(name, m)
    ids = r['image_ids']
    run = Run(m)
    whole = run.prefill(ids, media)
    assert error(whole, r['image_logits'])<TOL
    assert error(
        run.steps(r['image_next_ids'], len(ids), media),
        r['image_next_logits'])<TOL
    assert (Run(m).chunks(ids, 64, media)==whole).all()
    assert error(Run(m).steps(ids, 0, media), r['image_logits'])<TOL

# -- the same weights, laid out in other ways that are found in the wild
# -----------------------------------------------------------

def apart(ts):
    "Stacked experts one by one"
    out = {}
    for k,a in ts.items():
        m = re.fullmatch(r'(.*experts\.)(gate_up_proj|down_proj)', k)
        if not m:
            out[k] = a
            continue
        for e,x in enumerate(a):
            rows = (
                dict(zip(('gate_proj','up_proj'), np.split(x, 2)))
                if m[2]=='gate_up_proj'
                else {m[2]:x})
            out |= {f'{m[1]}{e}.{n}.weight':np.ascontiguousarray(r) for n,r in rows.items()}
    return out

def together(ts):
    "Experts stacked"
    out,found = {},{}
    for k,a in ts.items():
        m = re.fullmatch(r'(.*experts\.)(\d+)\.(gate|up|down)_proj\.weight', k)
        if m:
            found.setdefault(m[1], {})[int(m[2]),m[3]] = a
        else:
            out[k] = a
    for p,x in found.items():
        E = range(len(x)//3)
        out |= {
            p+'gate_up_proj':np.stack([
                np.concatenate([x[e,'gate'],x[e,'up']])
                for e in E]),
            p+'down_proj':np.stack([x[e,'down'] for e in E])}
    return out

def not_transposed(ts):
    return {
        k:a.swapaxes(-1, -2).copy()
        if re.search(r'experts\.(gate_up|down)_proj$', k)
        else a
        for k,a in ts.items()}
def plain_prefix(ts):
    return {k.replace('model.language_model.', 'model.').replace('language_model.', ''):a
        for k,a in ts.items()}
def any_prefix(ts):
    return {re.sub(r'^(model|backbone)\.', 'some.thing.else.', k):a
        for k,a in ts.items()}
def text_only(ts):
    return {k:a
        for k,a in ts.items() if not re.search('visual|vision_tower|projector|^mtp', k)}
def wider(ts):
    return {
        k:(a.astype(np.uint32)<<16).view(np.float32)
        if a.dtype==np.uint16
        else a
        for k,a in ts.items()}

LAYOUTS = {
    not_transposed:['qwen3-vl-moe'],
    text_only:['mistral3-wrapped','qwen35-moe-stacked','qwen3-next'],
    any_prefix:['nemotron-h','gpt-oss'],
    plain_prefix:['mistral3-wrapped','qwen35-dense','gemma4-moe'],
    apart:['qwen35-moe-stacked','gemma4-moe'], together:['qwen3-next','qwen3-moe-some-layers'],
    wider:['minimax-m2','gpt-oss-mxfp4']}

@pytest.mark.parametrize(
    'name,layout',
    [(n,f) for f,ns in LAYOUTS.items() for n in ns],
    ids=lambda x: x if isinstance(x, str) else x.__name__)
def test_layouts(tmp_path, name, layout):
    "Not a bit of the logits depends on how the weights are laid out"
    ids,folder = refs[name]['ids'],rewritten(name, tmp_path, layout)
    one,other = [LLM(str(p), device='cpu', exact=True) for p in (folder,data/name)]
    assert (one.logits(ids)==other.logits(ids)).all()

# as GGUF files, written as llama.cpp's converter does it;
# patterns of layers that its keys cannot tell are left out
GGUF = (
    'linear-rope', 'llama3-rope-sharded', 'llama32-tied', 'mistral-wide-heads', 'smollm2-tied',
    'yarn-rope', 'qwen3-tied-wide', 'qwen35-dense', 'gpt-oss-mxfp4', 'gemma4-moe')

@pytest.mark.parametrize('name', GGUF)
def test_gguf(tmp_path, name):
    "The logits of the safetensors file, and the reference's greedy tokens"
    r = refs[name]
    how = dict(device='cpu', max_seq_len=256, exact=True)
    m = LLM(str(to_gguf(data/name, tmp_path/'m.gguf')), **how)
    off = np.abs(m.logits(r['ids'])-LLM(str(data/name), **how).logits(r['ids']))
    assert off.max()<1e-5*np.abs(r['logits']).max()
    assert error(m.logits(r['ids']), r['logits'])<TOL
    assert (
        m.generate(r['ids'].tolist(), greedy_params(len(r['greedy']))).token_ids
        ==r['greedy'].tolist())
