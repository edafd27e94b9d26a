"Where the time of a start goes: kept with the model, told by the worker, shown by the gateway."
import pytest
from pathlib import Path
from types import SimpleNamespace as NS
from atlas.engine.loading import STAGES,LoadedModel,Startup
from atlas.ground.options import EngineConfig
from atlas.ground.reading import Reading
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

START = dict(seconds=dict(open=.4, read=1.2), bytes=24_000_000_000, bytes_per_second=20_000_000_000, text='read 1.2 s')

def test_metrics_have_it():
    def stats(): return [dict(model='m', state='loaded', startup=START), dict(model='n', state='loading')]
    text = Metrics(NS(upstreams=[], stats=stats)).text().decode()
    for line in ('atlas:model_startup_seconds{model_name="m",stage="read"} 1.2',
        'atlas:model_startup_bytes{model_name="m"} 2.4e+010',
        'atlas:model_startup_bytes_per_second{model_name="m"} 2e+010'):
        assert line.replace('e+010', 'e+10') in text.replace('e+010', 'e+10')
    assert 'startup_bytes{model_name="n"}' not in text

def test_the_line_that_says_ready(capsys):
    up = NS(name='m', info=dict(max_num_seqs=8, startup=START))
    models = NS(upstreams=[up], find=lambda name: NS(seconds=dict(open=.4, weights=1.2)))
    gateway._ready(models, 'http://here')
    assert 'm is ready (1.6 s, weights at 20 GB/s, 8 sequences at once)' in capsys.readouterr().out
    del up.info['startup']
    gateway._ready(models, 'http://here')
    assert 'm is ready (1.6 s, 8 sequences at once)' in capsys.readouterr().out
