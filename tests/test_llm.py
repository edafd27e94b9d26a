"""The door and the engine behind it: calls that overlap, calls that are left half-way, and
everything that must be refused. On the checkpoints of tests/data."""
import gc,json,shutil,tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock
import numpy as np, pytest
from tokenizers import Tokenizer as HF,decoders,models
from atlas import LLM,SamplingParams
from atlas.ground.core import AtlasError,ContextLengthError,OutOfMemoryError
from atlas.ground.core import RequestError,SourceError
from atlas.card.device import Host,Memory
from atlas.engine.scheduler import Request
from atlas.ground.requests import Event
from atlas.text.deltas import gather

data = Path(__file__).parent/'data'
def load(name='smollm2-tied', **kw):
    return LLM(str(data/name), device='cpu', **dict(max_seq_len=256)|kw)
def greedy(n, **kw):
    return SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, **kw)
def ids(deltas): return [t.id for d in deltas for t in d.tokens]
def idle(llm):
    "Nothing is left of any request"
    return not (
        llm.engine.has_work or llm.engine._samplers or llm._boxes
        or llm.cache.pool.used or llm.engine.scheduler.promised)

@pytest.fixture(scope='module')
def llm(): return load()
@pytest.fixture(autouse=True)
def leaves_nothing(request):
    yield
    if 'llm' in request.fixturenames:
        assert idle(request.getfixturevalue('llm'))

A,B = [1,2,3],[5,6]

# calls that overlap

def test_generate_within_a_stream(llm):
    want,got = llm.generate(A, greedy(12)).token_ids,[]
    for i,d in enumerate(llm.stream(A, greedy(12))):
        got += ids([d])
        if i in (2,3):
            assert llm.generate(B, greedy(20)).token_ids==llm.generate(
                B, greedy(20)).token_ids # longer than what is left of the stream
    assert got==want

def test_streams_side_by_side(llm):
    a,b = zip(
        *zip(
            llm.stream(A, greedy(9)),
            llm.stream(B, greedy(9))))
    assert (ids(a),ids(b))==(
        llm.generate(A, greedy(9)).token_ids,
        llm.generate(B, greedy(9)).token_ids)

def test_a_stream_that_waits(llm):
    "Left alone while others run, it finds all its tokens when somebody comes back to it"
    s = llm.stream(A, greedy(6))
    first = next(s)
    llm.generate([B]*9, greedy(5))
    assert ids([first,*s])==llm.generate(A, greedy(6)).token_ids

def test_a_stream_that_is_left(llm):
    s = llm.stream(A, greedy(50))
    next(s)
    llm.generate(B, greedy(3))
    s.close()
    assert idle(llm)

def test_threads(llm):
    prompts = [[i,i+1] for i in range(12)]
    with ThreadPoolExecutor(4) as pool:
        got = list(
            pool.map(lambda p: llm.generate(p, greedy(8)).token_ids, prompts))
    assert got==[o.token_ids for o in llm.generate(prompts, greedy(8))]

@pytest.mark.parametrize('at', (0,3))
def test_ended_behind_its_back(llm, at):
    got = []
    for i,d in enumerate(llm.stream(A, greedy(20))):
        got.append(d)
        if i==at:
            [llm.engine.abort(r) for r in list(llm.engine.scheduler.seqs)]
    assert (len(ids(got)), got[-1].finish_reason)==(at+1, 'abort')

def test_more_prompts_than_the_queue_holds():
    llm = load(max_queue=3, max_num_seqs=2)
    prompts = [[i] for i in range(11)]
    assert [o.token_ids for o in llm.generate(prompts, greedy(3))]==[
        llm.generate(p, greedy(3)).token_ids
        for p in prompts]
    assert llm.generate(
        prompts, replace(greedy(2), n=2)
    )[10].choices[1].token_ids==llm.generate(
        prompts[10], greedy(2)).token_ids
    assert idle(llm)

def test_time_limits(llm):
    "Whoever has no time left ends with what was said, and the others do not notice"
    for o in llm.generate([A,B], greedy(20), timeout=1e-9):
        assert o.finish_reason=='timeout'
    assert idle(llm)
    with pytest.raises(RequestError) as e:
        llm.generate(A, timeout=0)
    assert e.value.param=='timeout'

def test_a_stream_whose_time_is_up(llm, monkeypatch):
    s = llm.engine.scheduler
    now,got = [s.clock()],[]
    with monkeypatch.context() as m:
        m.setattr(s, 'clock', lambda: now[0])
        for d in llm.stream(A, greedy(20), timeout=5.):
            got.append(d)
            now[0] += 1.
    said = ids(got)
    assert got[-1].finish=='timeout' and 0<len(said)<20
    whole = llm.generate(A, greedy(20), timeout=1000).token_ids
    assert whole[:len(said)]==said
    assert idle(llm)

@pytest.mark.parametrize('where', ('trunk','sample'))
def test_an_exception_in_a_step(llm, monkeypatch, where):
    "The call that was under way fails, whoever else waits goes on, and nothing leaks"
    import atlas.engine.stepper as E
    want = llm.generate(A, greedy(8)).token_ids
    s = llm.stream(A, greedy(8))
    got = [next(s)]
    def broken(*_, **how):
        raise ArithmeticError
    with monkeypatch.context() as m:
        m.setattr(
            *((llm.model,'trunk') if where=='trunk' else (E,'sample')),
            broken)
        with pytest.raises(ArithmeticError):
            llm.generate(B, greedy(3))
    assert ids(got+list(s))==want

def test_aborted_while_the_model_runs(llm, monkeypatch):
    "As when a forgotten stream is collected in the middle of a step: its mates do not notice"
    want,trunk = llm.generate([A,B], greedy(6)),llm.model.trunk
    llm.engine.add(Request('left', tuple(A), greedy(50)))
    def collected(*a, **how):
        llm.engine.abort('left')
        return trunk(*a, **how)
    with monkeypatch.context() as m:
        m.setattr(llm.model, 'trunk', collected)
        got = llm.generate([A,B], greedy(6))
    assert [o.token_ids for o in got]==[o.token_ids for o in want]

# what must be refused, and what must not

BAD = {
    'a float': [1.5], 'text among ids': ['a'],
    'beyond the vocabulary': [1,10**6],
    'below it': [-1], 'far below it': [-2**40],
    'nothing': []}
@pytest.mark.parametrize('bad', BAD.values(), ids=BAD.keys())
def test_bad_prompts(llm, bad):
    with pytest.raises(RequestError) as e:
        llm.generate([A,bad], greedy(2))
    assert e.value.param=='prompt'
    if bad and isinstance(bad[-1], int):
        r = Request('x', tuple(bad), SamplingParams(repetition_penalty=2.))
        with pytest.raises(RequestError, match='and the vocabulary ends at'):
            llm.engine.add(r)

def test_context_is_exactly_full(llm):
    o = llm.generate([1]*255, SamplingParams(temperature=0, ignore_eos=True))
    assert (
        len(o.token_ids), o.finish_reason,
        o.usage['total_tokens']
    )==(1, 'length', 256)
    o = llm.generate(
        [1]*192,
        SamplingParams(temperature=0, ignore_eos=True, max_tokens=10**6))
    assert (len(o.token_ids), o.finish_reason)==(64, 'length')
    with pytest.raises(ContextLengthError):
        llm.generate([1]*256)
    assert llm.logits([1]*256).shape==(256, llm.config.vocab_size)

@pytest.mark.parametrize('folder', ('smollm2-tied','mistral-window'))
def test_whole_tiles_and_odd_chunks(folder):
    """Prompts around multiples of 64, chunks beyond the context, one sequence at a time, and
    pushing each other out: the same tokens"""
    prompts = [
        np.random.default_rng(n).integers(0, 96, n).tolist()
        for n in (1,63,64,65,127,128,129,192)]
    def run(**kw):
        return [o.token_ids for o in load(folder, **kw).generate(prompts, greedy(20))]
    want = run(chunk=64)
    assert run(chunk=1024)==want and run(max_num_seqs=1)==want
    m = load(folder)
    tight = 18*16*m.cache.bytes_per_token
    assert run(kv_cache_memory=tight, overcommit=4.)==want

REFUSED = {
    'kv_cache_memory':(0,100,-5),
    'max_num_seqs':(0,2.5,'3'),
    'max_seq_len':(1,10**9,100.5),
    'max_queue':(0,), 'chunk':(100,0),
    'overcommit':(.5,float('nan'))}
@pytest.mark.parametrize(
    'name,value',
    [(k,v) for k,vs in REFUSED.items() for v in vs])
def test_bad_options(name, value):
    with pytest.raises(AtlasError) as e:
        load(**{name:value})
    assert isinstance(e.value, OutOfMemoryError) or e.value.param==name

@pytest.fixture
def told():
    "What is said of each field of `EngineConfig`"
    from dataclasses import fields
    from atlas.ground.options import EngineConfig
    return {f.name:f.metadata for f in fields(EngineConfig) if f.metadata}

def test_options_are_those_of_who_takes_them(told):
    "What `EngineConfig` may be told is said on its own page, which is before all of theirs"
    from atlas.cuda.gemm_scaled import SCALED
    from atlas.cuda.pack import REQUANTIZED
    from atlas.cuda.vocabulary import KV_FORMATS
    from atlas.ground.weights import WEIGHTS
    from atlas.ops.linear import TILE
    def words(name): return told[name]['words']
    assert words('weights')==tuple(WEIGHTS)
    assert words('kv_cache_dtype')==KV_FORMATS
    assert words('prefill_activations')==('f16',*SCALED)
    assert {*words('quantization')}=={*words('lm_head_dtype')}=={*REQUANTIZED}
    chunk = told['chunk']
    assert chunk['step']==TILE and f'a multiple of {TILE}' in chunk['help']

def test_the_help_of_an_option_names_its_words(told):
    for name,field in told.items():
        if name=='lm_head_dtype':
            continue
        for word in field['words']:
            assert word in field['help'], name

def test_a_broken_preset_stops_nobody_else(monkeypatch):
    "Models that are here, real, made up or looked at, and names of the hub"
    from atlas.ground import config,opening
    from atlas.ground.options import EngineConfig
    from atlas.use.inspect import look
    def broken(*_):
        raise RequestError('llama.toml is not valid TOML')
    monkeypatch.setattr(config, 'PRESETS', config.Presets('atlas.model.families', broken))
    monkeypatch.setattr(opening, 'PRESETS', config.PRESETS)
    here = str(data/'smollm2-tied')
    made_up = LLM(here, device='cpu', load_format='dummy')
    assert load().config==made_up.config==look(here, on=[]).config
    assert not opening.is_shape('demo') and not opening.is_shape('Qwen/Qwen3-8B')
    other = EngineConfig('qwen3-8b')
    with pytest.raises(RequestError, match='not valid TOML'):
        opening.open_model(other)

class Read(Exception):
    "Weights were read"

@pytest.fixture
def no_weights(monkeypatch):
    "A context in which whoever loads a model's weights gets a `Read`; what fits gets there"
    def refuse(*args, **kw):
        raise Read
    @contextmanager
    def within():
        with monkeypatch.context() as m:
            m.setitem(LLM._load.__globals__, 'load_model', refuse)
            with pytest.raises(Read):
                load()
            yield
    return within

def test_a_cache_that_cannot_fit_is_refused_before_the_weights_are_read(no_weights):
    with no_weights(), pytest.raises(OutOfMemoryError):
        load(kv_cache_memory=1000)

def test_a_cache_beyond_the_host(monkeypatch, no_weights):
    "What is asked for and needed has to be free; what is asked for and not needed is not made"
    whole = load(kv_cache_memory=1<<42).cache
    assert whole.pool.num_blocks==8*16
    monkeypatch.setattr(Host, 'memory', lambda self: Memory(1<<30, whole.nbytes-1))
    with no_weights():
        with pytest.raises(OutOfMemoryError, match='The cache was to have') as e:
            load(kv_cache_memory=1<<42)
    assert e.value.param=='kv_cache_memory' and e.value.hint
    assert 16<=load().cache.pool.num_blocks<8*16*.4+1

def test_extreme_sampling(llm):
    V,first = llm.config.vocab_size,llm.generate(A, greedy(4)).token_ids
    def same(**kw):
        return llm.generate(
            A,
            SamplingParams(max_tokens=4, ignore_eos=True, seed=3, **kw)).token_ids
    assert same(
        temperature=1e-300
    )==same(top_k=1)==same(top_p=1e-300)==same(min_p=1)==first
    assert same(top_k=V)==same(top_k=10*V)==same()
    # no numeric error of the caller's making
    assert len(same(repetition_penalty=1e-300))==len(same(repetition_penalty=100.))==4
    assert len(
        llm.generate(
            A,
            SamplingParams(seed=2**64-1, n=3, max_tokens=2)).choices)==3

def test_min_tokens_and_stop_ids(llm):
    every = tuple(range(llm.config.vocab_size))
    all_but_7 = tuple(i for i in every if i!=7)
    p = SamplingParams(temperature=0, max_tokens=9, stop_token_ids=all_but_7)
    o = llm.generate(A, p)
    assert (len(o.token_ids), o.finish_reason) in ((1,'stop'), (9,'length'))
    o = llm.generate(A, replace(p, min_tokens=4))
    assert o.token_ids[:4]==[7]*4 and len(o.token_ids)<=9
    with pytest.raises(RequestError, match='bars every token'):
        llm.generate(A, replace(p, min_tokens=1, stop_token_ids=every))

def log_softmax(l):
    "Of each row"
    l = l-l.max(-1, keepdims=True)
    return l-np.log(np.exp(l).sum(-1, keepdims=True))

def test_logprobs(llm):
    o = llm.generate(A, greedy(3, logprobs=20))
    want = log_softmax(llm.logits(A+o.token_ids[:2])[2:])
    for t,row in zip(o.logprobs, want, strict=True):
        assert len(t.top)==len(dict(t.top))==20
        assert t.top[0][0]==t.id
        assert abs(t.logprob-row[t.id])<1e-3
        assert max(abs(lp-row[i]) for i,lp in t.top)<1e-3
    plain = llm.generate(A, greedy(3, logprobs=0))
    assert [t.top for t in plain.logprobs]==[()]*3
    assert llm.generate(A, greedy(3)).logprobs is None

# checkpoints whose parts do not belong together

def with_tokenizer(path, n, eos=None):
    "A copy of a checkpoint with a tokenizer of `n` words w0, w1…"
    shutil.copytree(data/'smollm2-tied', path)
    t = HF(models.WordLevel({f'w{i}':i for i in range(n)}, unk_token='w0'))
    t.decoder = decoders.ByteLevel()
    t.save(str(path/'tokenizer.json'))
    (path/'tokenizer_config.json').write_text(json.dumps(dict(eos_token=eos and f'w{eos}')))
    return LLM(str(path), device='cpu', max_seq_len=64)

def test_a_tokenizer_that_knows_more_than_the_model(tmp_path):
    V = load().config.vocab_size
    llm = with_tokenizer(tmp_path/'m', V+9, eos=V+3)
    assert len(llm.generate('w5', SamplingParams(min_tokens=2, max_tokens=3)).token_ids)>=2
    with pytest.raises(RequestError, match=f'prompt has token {V+2}, and'):
        llm.generate(f'w{V+2}')
    assert idle(llm)

def test_no_tokenizer(llm):
    assert len(llm.generate(A, greedy(3)).token_ids)==3
    with pytest.raises(SourceError):
        llm.generate('text')
    with pytest.raises(SourceError):
        llm.generate(A, SamplingParams(stop='x'))
    with pytest.raises(SourceError):
        llm.tokenizer

def test_memory_does_not_grow():
    "Two thousand steps; what is remembered is the answer"
    llm = load(max_seq_len=512)
    def run(n):
        return sum(
            len(
                llm.generate(
                    A,
                    SamplingParams(max_tokens=100, ignore_eos=True, frequency_penalty=.1, seed=i)
                ).token_ids)
            for i in range(n))
    run(3)
    tracemalloc.start()
    run(1)
    gc.collect()  # which empties what Python keeps for its next small tuples, too
    before = tracemalloc.get_traced_memory()[0]
    assert run(20)==2000
    gc.collect()
    grown = tracemalloc.get_traced_memory()[0]-before
    tracemalloc.stop()
    assert grown<50_000 and idle(llm)

# names

def test_a_config_and_fields_beside_it():
    "One of them would be dropped in silence"
    from atlas.ground.options import EngineConfig
    config = EngineConfig(str(data/'smollm2-tied'), device='cpu')
    with pytest.raises(TypeError, match='beside'):
        LLM(config, max_seq_len=16)

NAMES = {
    '.': 'mine',
    './': 'mine',
    '../mine/': 'mine',
    'part/..': 'mine',
    '../link': 'link',
    '../link/': 'link'}

@pytest.fixture
def mine(tmp_path, monkeypatch):
    "We are in a model's folder, which has a part, and a link beside it"
    folder = shutil.copytree(data/'smollm2-tied', tmp_path/'mine')
    (folder/'part').mkdir()
    (tmp_path/'link').symlink_to(folder)
    monkeypatch.chdir(folder)

@pytest.mark.parametrize('given,name', NAMES.items())
def test_a_folder_is_called_by_its_own_name(mine, given, name):
    "By the library, by the gateway that lists it and logs it, and by the worker that has it"
    from atlas.service.gateway import modelled
    from atlas.service.worker import Meter,load_model
    m = LLM(given, device='cpu', max_seq_len=16)
    assert m.name==name and repr(m).startswith(f'LLM({name}: ')
    with pytest.raises(RequestError, match=f'^{name} has no chat template'):
        m.render([])
    (served,) = modelled(given)
    assert served.name==name and repr(served)==f'Model({name}: unloaded)'
    assert served.described()['names']==[name]
    asked = dict(model=given, device='cpu', max_seq_len=16)
    worker = load_model(asked, Meter(Mock()))
    assert worker.info['name']==name

# thoughts and calls

@pytest.fixture(scope='module')
def tiny(): return LLM('tiny', 'cpu', max_seq_len=512, show=False)

HI = [dict(role='user', content='hi')]
ADD = [
    dict(
        type='function',
        function=dict(name='add', parameters=dict(type='object')))]

def speak(monkeypatch, llm, text, size=1, finish='stop'):
    "Have `llm` say `text`, so many tokens at once"
    ids = llm.tokenizer.encode(text, add_special=False)
    events = [Event('r', i) for i in ids]+[
        Event('r', llm.eos_ids[0], finish=finish)]
    def run(reqs, readers):
        for k,reader in enumerate(readers):
            for i in range(0, len(events), size):
                for d in reader.feed(events[i:i+size]):
                    yield k,d
    monkeypatch.setattr(llm, '_run', run)

def heard(llm, *args, **kw):
    "Thought, answer and calls of an answer, which must be what is streamed"
    out = llm.chat(*args, **kw)
    ds = llm.chat(*args, stream=True, **kw)
    c = gather(ds)
    calls = [(x.name,x.arguments) for x in out.calls]
    assert (c.reasoning,c.content)==(out.reasoning,out.text)
    assert [(x.name,x.arguments) for x in c.calls]==calls
    assert c.finish==out.finish_reason
    return out.reasoning,out.text,calls

@pytest.mark.parametrize('size', [1,2,3,99])
def test_a_thought_is_told_apart(tiny, monkeypatch, size):
    speak(monkeypatch, tiny, 'Two and\n</think>\n\nFour.', size)
    assert heard(tiny, HI)==('Two and\n', '\n\nFour.', [])
    three = tiny.chat(HI, SamplingParams(n=3)).choices
    assert [o.text for o in three]==['\n\nFour.']*3

@pytest.mark.parametrize('size', [1,2,3,99])
def test_a_call_is_told_apart_where_tools_are_offered(tiny, monkeypatch, size):
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    speak(monkeypatch, tiny, f'Hm</think>\n{call}', size)
    assert heard(tiny, HI, tools=ADD)==('Hm', '', [('add','{}')])
    assert heard(tiny, HI)==('Hm', f'\n{call}', [])  # nothing is lost where none are

def test_a_thought_that_never_ends(tiny, monkeypatch):
    speak(monkeypatch, tiny, 'Two and', finish='length')
    assert heard(tiny, HI)[:2]==('Two and', '')
    assert tiny.chat(HI).finish_reason=='length'

def test_marks_are_seen_where_they_are_special_tokens(tiny, monkeypatch):
    t = tiny.tokenizer
    mark = t.inner.token_to_id('</think>')
    monkeypatch.setattr(t, 'special_ids', t.special_ids|{mark})
    speak(monkeypatch, tiny, 'Two</think>Four')
    assert heard(tiny, HI)==('Two', 'Four', [])
    assert tiny.generate('hi').text=='TwoFour'

def test_stop_strings_are_of_the_answer(tiny, monkeypatch):
    speak(monkeypatch, tiny, 'a. b</think>c. d')
    out = tiny.chat(HI, SamplingParams(stop='.'))
    assert (out.reasoning,out.text,out.finish_reason)==('a. b', 'c', 'stop')

def test_who_does_not_think_only_answers(tiny, monkeypatch):
    "Switched off, gone on with, or not of such a family: all of it is the answer"
    text = 'Two</think>'
    speak(monkeypatch, tiny, 'Two')
    assert heard(tiny, HI, enable_thinking=False)[:2]==('', 'Two')
    begun = [*HI, dict(role='assistant', content='It is')]
    on = dict(add_generation_prompt=False, continue_final_message=True)
    assert heard(tiny, begun, **on)[:2]==('', 'Two')
    speak(monkeypatch, tiny, text)
    monkeypatch.setattr(tiny.text, 'parsers', (None,None))
    assert heard(tiny, HI)[:2]==('', text)

def test_generate_takes_nothing_away(tiny, monkeypatch):
    speak(monkeypatch, tiny, 'Two</think>Four')
    assert tiny.generate('hi').text=='Two</think>Four'

def test_a_guide_waits_for_the_end_of_the_thought(tiny):
    yes = dict(kind='choice', choices=['hay','mice'])
    for stream in (False,True):
        out = tiny.chat(
            HI, SamplingParams(temperature=0, max_tokens=60),
            stream=stream, guide=yes)
        c = gather(out) if stream else out
        assert c.reasoning and str(c.content if stream else c.text) in yes['choices']
    out = tiny.chat(HI, SamplingParams(temperature=0), guide=yes, enable_thinking=False)
    assert not out.reasoning and out.text in yes['choices']
