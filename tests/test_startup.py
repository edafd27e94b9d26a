"Where the time of a start goes: kept with the model, told by the worker, shown by the gateway."
import os,pytest,shutil
from pathlib import Path
from types import SimpleNamespace as NS
from atlas.card import variants
from atlas.card.emulator import Emulator,find_cxx
from atlas.card.launch import compilations,recording
from atlas.card.variants import Known
from atlas.engine.loading import STAGES,LoadedModel,Startup
from atlas.ground.options import EngineConfig
from atlas.ground.reading import Reading
from atlas.ground.requests import Request,SamplingParams
from atlas.service import gateway
from atlas.service.metrics import Metrics
from atlas.service.worker import told,workload

DATA = Path(__file__).parent/'data'

@pytest.fixture(scope='module')
def model():
    m = LoadedModel(EngineConfig(str(DATA/'smollm2-tied'), 'cpu', max_seq_len=64), False)
    yield m
    m.close()

def test_a_model_knows_its_stages(model):
    s = model.startup
    assert tuple(s.seconds)==STAGES and all(v>=0 for v in s.seconds.values())
    assert model.load_seconds==s.total==sum(s.seconds.values())
    size = sum(f.stat().st_size for f in (DATA/'smollm2-tied').glob('*.safetensors'))
    assert .5*size<s.nbytes<=size and s.rate==s.nbytes/s.seconds['read']
    assert ' at ' in str(s) and 'graphs' in str(s)

def test_nothing_read_is_no_rate():
    s = Startup()
    s.begin('open')
    s.note(Reading())
    s.begin()
    assert s.rate==0 and ' at ' not in str(s)

def test_a_worker_tells_it(model):
    model.text = NS(eos_ids=[0])
    model.score = model.embed = None
    start = workload(model).info['startup']
    assert start==told(model.startup)
    assert start['bytes']==model.startup.nbytes and tuple(start['seconds'])==STAGES

START = dict(
    seconds=dict(open=.4, read=1.2),
    bytes=24_000_000_000, bytes_per_second=20_000_000_000, text='read 1.2 s')

def test_metrics_have_it():
    def stats():
        return [
            dict(model='m', state='loaded', startup=START),
            dict(model='n', state='loading')]
    text = Metrics(NS(ready_models=[], stats=stats)).text().decode()
    for line in ('atlas:model_startup_seconds{model_name="m",stage="read"} 1.2',
        'atlas:model_startup_bytes{model_name="m"} 2.4e+010',
        'atlas:model_startup_bytes_per_second{model_name="m"} 2e+010'):
        assert line.replace('e+010', 'e+10') in text.replace('e+010', 'e+10')
    assert 'startup_bytes{model_name="n"}' not in text

def test_the_line_that_says_ready(capsys):
    up = NS(name='m', info=dict(max_num_seqs=8, startup=START))
    models = NS(
        ready_models=[up],
        find=lambda name: NS(seconds=dict(open=.4, weights=1.2)))
    gateway._ready(models, 'http://here')
    assert 'm is ready (1.6 s, weights at 20 GB/s, 8 sequences at once)' in capsys.readouterr().out
    del up.info['startup']
    gateway._ready(models, 'http://here')
    assert 'm is ready (1.6 s, 8 sequences at once)' in capsys.readouterr().out

# ---- a start like the last one does not ask which kernels it needs

class Starts:
    "Starts of a model on the emulator, which remember what they loaded, as on a card"
    def __init__(self, folder, mp):
        self.folder = folder
        self.mp = mp
        self.code = b'code'
        self.asked = []
        def known(card, who, code=None):
            k = Known(card, who, folder/'known', code and (lambda: self.code))
            k.load()
            return k
        mp.setattr(Emulator, 'known', known)
        mp.setattr(Emulator, 'warm_up', lambda card, f: f())
        mp.setattr(variants, 'is_compiled', lambda *a: True)
        real = variants.wanted
        def wanted(*steps):
            self.asked.append(len(steps))
            return real(*steps)
        mp.setattr(variants, 'wanted', wanted)
        self.model = folder/'model'
        shutil.copytree(DATA/'smollm2-tied', self.model)
    def __call__(self, **kw):
        "A start; what it says to a prompt, and whether it asked"
        self.asked.clear()
        few = dict(max_seq_len=128, max_num_seqs=2, kv_cache_memory=1<<22)
        m = LoadedModel(EngineConfig(str(self.model), Emulator(), **few|kw), False)
        try:
            e,said = m.engine,[]
            p = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
            e.add(Request('r', tuple(range(5, 12)), p))
            while e.has_work:
                said += [ev.token for ev in e.step()]
            late = compilations.after_ready
        finally:
            m.close()
        return said,bool(self.asked),late

@pytest.fixture
def starts(tmp_path, monkeypatch):
    if not find_cxx():
        pytest.skip('no C++ compiler')
    return Starts(tmp_path, monkeypatch)

def test_a_start_like_the_last_one_does_not_ask(starts):
    said,asked,late = starts()
    assert asked
    assert starts()==(said,False,late)

CHANGES = {
    'code': lambda s: setattr(s, 'code', b'other'),
    'a file': lambda s: os.utime(
        next(s.model.glob('*.safetensors')),
        (1,1)),
    'options': lambda s: dict(max_num_seqs=3),
    'the last list': lambda s: [
        p.write_text('{')
        for p in (s.folder/'known').iterdir()],
    'machine code gone': lambda s: s.mp.setattr(
        variants, 'is_compiled', lambda src, *a: src.name!='gemv'),
    'a kernel that fails': lambda s: s.mp.setattr(variants, '_load_one', lambda *a: False)}
@pytest.mark.parametrize('change', CHANGES.values(), ids=CHANGES)
def test_any_other_start_asks(starts, change):
    said,*_ = starts()
    how = change(starts)
    again,asked,_ = starts(**how if isinstance(how, dict) else {})
    assert asked and again==said

def test_what_memory_leaves_is_asked_about(starts):
    "The cache may have become so small that other steps are run"
    starts()
    assert starts(kv_cache_memory=1<<23)[1] # these are options; what follows is not
    real = LoadedModel._asks
    starts.mp.setattr(LoadedModel, '_asks', lambda m: real(m)+' fewer blocks')
    assert starts(kv_cache_memory=1<<23)[1]

def test_what_is_asked_for_does_not_depend_on_free_memory(monkeypatch):
    "Caches of other sizes ask for the same kernels, unless prompts become shorter by it"
    if not find_cxx():
        pytest.skip('no C++ compiler')
    def found(size):
        got = set()
        def ready(card, *steps, **_):
            got.update(
                (n, tuple(sorted(d.items())))
                for n,d in variants.wanted(*steps))
        with monkeypatch.context() as mp, recording(launch=False):
            mp.setattr('atlas.engine.card_stepper.make_ready', ready)
            mp.setattr(Emulator, 'warm_up', lambda card, f: f())
            few = dict(max_seq_len=128, max_num_seqs=2, kv_cache_memory=size)
            m = LoadedModel(EngineConfig(str(DATA/'smollm2-tied'), Emulator(), **few), False)
        asks = m._asks()
        m.close()
        return asks,got
    (a,some),(b,others) = found(1<<22),found(3<<22)
    assert a==b and some==others and some
