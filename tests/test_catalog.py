"""The catalogue of models: its facts against the shapes, its names, and what is said without card
or weights."""
import json,re
from dataclasses import replace
from pathlib import Path
import pytest
from typer.testing import CliRunner
import atlas.use.cli as cli
from atlas.use.commands import base
from atlas.card.device import Host,Memory
from atlas.card.emulator import Emulator,find_cxx
from atlas.engine.loading import LoadedModel
from atlas.engine.planning import SPARK,PlannedCard,least_memory,plan_load
from atlas.ground import hub
from atlas.ground.catalog import CATALOG,find_entry,nearest,read_catalog,releases_of
from atlas.ground.config import PRESETS
from atlas.ground.core import ConfigError,SourceError
from atlas.ground.hub import NAMED,here,pull,pull_text
from atlas.ground.opening import open_model
from atlas.ground.options import EngineConfig
from atlas.model.model import imagine
from helpers.reference import data,having
from test_cli import SPARK as COMMANDS
from atlas.text.parsers import REASONING_PARSERS,TOOL_PARSERS

SEEING = [n for n in having('pixels') if n.startswith('qwen35')] # With heads that a card takes
GOOD = dict(hub='org/name', format='BF16')

def run(*args):
    "Run a command; a fault of ours is raised, not hidden in the result"
    r = CliRunner().invoke(cli.app, list(args), prog_name='atlas')
    if r.exception and not isinstance(r.exception, SystemExit):
        raise r.exception
    return r

@pytest.fixture(autouse=True)
def empty(monkeypatch, tmp_path):
    "A machine with an empty cache, and without a hub"
    for k in ('HF_HUB_OFFLINE','HF_HUB_CACHE'):
        monkeypatch.setattr(
            f'huggingface_hub.constants.{k}', tmp_path/'hf' if 'CACHE' in k else True)

# -- facts ---------------------------------------------------------------------------------------

sized = [n for n,e in CATALOG.items() if e.nbytes]

@pytest.mark.parametrize('name', sized)
def test_bytes_are_those_of_the_shape(name):
    "The bytes of the catalogue are what the shape has in the formats that it names"
    e = CATALOG[name]
    with imagine(name) as ck:
        found = sum(t.nbytes for t in ck.tensors.values())
    assert found==e.nbytes
    assert least_memory(name)==e.least_memory
    used = {e.format_of(k) for k in ck.tensors}
    assert used>={*e.tensors.values()}, 'a pattern that no tensor has'

def test_bytes_that_are_wrong_are_seen():
    name = sized[0]
    wrong = replace(CATALOG[name], tensors={})
    with imagine(name) as ck:
        names = list(ck.tensors)
    assert (
        {wrong.format_of(n) for n in names}=={'BF16'}
        !={CATALOG[name].format_of(n) for n in names})

def test_the_flagship():
    "Sizes that others have measured of the release"
    e = CATALOG['qwen3.6-35b-a3b-nvfp4']
    assert e.hub=='nvidia/Qwen3.6-35B-A3B-NVFP4' and e.context==262144 and e.drafter=='mtp'
    assert 23e9<e.nbytes<24e9 and e.parsers.tool_call=='qwen3_coder'

@pytest.mark.parametrize('name', CATALOG)
def test_entries_are_usable(name):
    "Names are new, parsers exist, flags are read, and a drafter is a repository"
    e = CATALOG[name]
    assert name not in PRESETS and name not in NAMED
    if e.parsers:
        assert e.parsers.tool_call in {None,*TOOL_PARSERS}
        assert e.parsers.reasoning in {None,*REASONING_PARSERS}
    assert e.drafter in (None,'mtp') or hub._repo.fullmatch(e.drafter)
    r = run('serve', name, *e.flags, '--dry-run', '--json')
    plan, = json.loads(r.stdout)['models']
    said = plan['drafter']
    assert said.startswith('mtp' if e.drafter=='mtp' else 'draft' if e.drafter else 'off')
    assert find_entry(e.hub)==(name,e)

# -- bad input -----------------------------------------------------------------------------------

@pytest.mark.parametrize(
    'wrong,field',
    [
        (dict(hub='name'),'hub'),
        (dict(hub=None),'hub'),
        (dict(context='long'),'context'),
        (dict(context=-1),'context'),
        (dict(nbytes=0),'nbytes'),
        (dict(least_memory=1.5),'least_memory'),
        (dict(kontext=1),'kontext'),
        (dict(shape='round'),'shape'),
        (dict(tensors={'(':'BF16'}),'tensors'),
        (dict(tensors={'x':'FP3'}),'tensors'),
        (dict(flags='--x'),'flags'),
        (dict(drafter=3),'drafter'),
        (dict(parsers=dict(tools='x')),'parsers.tools'),
        (dict(sampling=dict(chat=dict(temperature=-1))), 'temperature')])
def test_broken_entries_are_refused_by_field(wrong, field):
    with pytest.raises(ConfigError) as e:
        read_catalog(json.dumps({'m': GOOD|wrong}), 'c.json')
    assert e.value.param==field and e.value.msg.startswith(f'c.json: m: {field}: ')
    assert read_catalog(json.dumps({'m': GOOD}))['m'].hub=='org/name'

@pytest.mark.parametrize('text,said', [('{', 'no valid JSON'), ('[]', 'no object'),
    ('{"a":{},"a":{}}', 'a is there twice'), ('{"A b":{}}', "'A b' cannot name"),
    ('{"qwen3-8b":{}}', 'cannot name'), ('{"a":{"hub":"o/n"}}', 'format')])
def test_broken_files_are_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        read_catalog(text)

# -- names ---------------------------------------------------------------------------------------

def test_a_name_is_its_repository(monkeypatch):
    "`pull` and what reads text only ask the hub for the repository that a name stands for"
    asked = []
    monkeypatch.setattr(hub, 'pull_hub', lambda repo, show: asked.append(repo))
    monkeypatch.setattr(
        hub, '_snapshot', lambda repo, files, show: asked.append((repo,files)))
    pull('gpt-oss-20b-mxfp4')
    hub.resolve('gpt-oss-20b-mxfp4')
    pull_text('gpt-oss-20b-mxfp4')
    assert asked==['openai/gpt-oss-20b', 'openai/gpt-oss-20b', ('openai/gpt-oss-20b',hub.TEXT)]

def test_folders_go_before_names(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path/'gpt-oss-20b-mxfp4').mkdir()
    assert pull('gpt-oss-20b-mxfp4')==here('gpt-oss-20b-mxfp4')==Path('gpt-oss-20b-mxfp4')

@pytest.mark.parametrize('typed,meant', [('qwen3.6-35b-a3b-nvpf4','qwen3.6-35b-a3b-nvfp4'),
    ('Qwen3.6-35B-A3B-NVFP4','qwen3.6-35b-a3b-nvfp4'), ('gpt-oss:20b','gpt-oss-20b-mxfp4'),
    ('demoo','demo')])
def test_near_misses(typed, meant):
    assert meant in nearest(typed, NAMED)
    with pytest.raises(SourceError) as e:
        pull(typed)
    assert meant in e.value.hint
    for command in ('pull','serve'):
        r = run(command, typed, *['--dry-run']*(command=='serve'))
        assert r.exit_code==1 and meant in r.stderr and r.stdout==''

def test_shapes_say_what_can_be_pulled():
    can = releases_of('qwen3.6-35b-a3b')
    assert 'qwen3.6-35b-a3b-nvfp4' in can
    for ask in (
        lambda: pull('qwen3.6-35b-a3b'), lambda: open_model(EngineConfig('qwen3.6-35b-a3b'))):
        with pytest.raises(SourceError) as e:
            ask()
        assert all(n in e.value.hint for n in can)

def test_names_complete():
    assert {'tiny','qwen3.6-35b-a3b-nvfp4'}<={*base.complete_model('')}
    assert 'gpt-oss-20b-mxfp4' in base.complete_model('gpt')

def test_here_asks_nobody(monkeypatch):
    "Whether a model is here is seen without network, also where it would be allowed"
    monkeypatch.setattr('huggingface_hub.constants.HF_HUB_OFFLINE', False)
    monkeypatch.setattr('huggingface_hub.HfApi.repo_info', lambda *a, **k: pytest.fail('asked'))
    assert here('qwen3.6-35b-a3b-nvfp4') is None and here('org/none:Q4_K_M') is None
    assert here('tiny')==NAMED['tiny'].path()

# -- the command ---------------------------------------------------------------------------------

def test_list_all():
    ms = {m['name']: m
        for m in json.loads(run('list', '--all', '--json').stdout)}
    assert ms.keys()=={*NAMED,*CATALOG}
    m,e = ms['gpt-oss-120b-mxfp4'],CATALOG['gpt-oss-120b-mxfp4']
    assert (
        (m['bytes'],m['context'],m['least_memory'],m['here'])
        ==(e.nbytes,e.context,e.least_memory,False))
    assert ms['tiny']['here']
    lines = run('list', '--all').stdout.splitlines()
    assert lines[0].split()==[
        'NAME', 'SIZE', 'CONTEXT', 'LEAST', 'MEMORY', 'HERE', 'FORMAT']
    row = next(l for l in lines if l.startswith('gpt-oss-120b-mxfp4'))
    assert '65.2 GB' in row and '131,072' in row and ' yes ' not in row

def test_list_all_knows_what_is_here(monkeypatch):
    found = (
        hub.cached()
        +[hub.LocalModel('openai/gpt-oss-20b', Path('/h/m'), 5, 'safetensors')])
    monkeypatch.setattr(hub, 'cached', lambda: found)
    ms = {m['name']: m['here']
        for m in json.loads(run('list', '--all', '--json').stdout)}
    assert [
        n for n,h in ms.items()
        if h and n in CATALOG]==['gpt-oss-20b-mxfp4']

def test_dry_run_needs_nothing():
    "Neither card nor weights, and exit code 0; every part has its bytes"
    r = run('serve', 'qwen3.6-35b-a3b-nvfp4', '--speculative', '--dry-run')
    said = dict(l.split(maxsplit=1) for l in r.stdout.splitlines() if l)
    assert r.exit_code==0 and r.stderr==''
    assert {'weights','steps','tables','cache','states','together','context'}<=said.keys()
    assert 'mtp, 2 drafts' in said['drafter'] and 'qwen3_coder' in said['parsers']
    assert 'DGX Spark' in said['device'] and 'NVFP4' in said['weights']

def test_dry_run_of_what_does_not_fit():
    r = run('serve', 'minimax-m2.5-nvfp4', '--dry-run')
    assert r.exit_code==1 and re.search(r'take 126 GiB .* 108 GiB can be used', r.stderr)
    r = run('serve', 'qwen3.6-35b-a3b-nvfp4', '--memory-budget', '10GiB', '--dry-run', '--json')
    plan, = json.loads(r.stdout)['models']
    assert r.exit_code==1 and not plan['fits'] and '10 GiB' in plan['error']

def test_dry_run_says_what_it_ignores():
    r = run('serve', 'qwen3.6-35b-a3b-fp8', '--trust-remote-code', '--enable-auto-tool-choice',
        '--quantization', 'compressed-tensors', '--dry-run', '--json')
    ignored = json.loads(r.stdout)['ignored']
    flags = '--trust-remote-code','--enable-auto-tool-choice','--quantization compressed-tensors'
    assert (
        len(ignored)==3
        and all(i.startswith(f) for i,f in zip(ignored, flags)))

def test_dry_run_loads_and_fetches_nothing(monkeypatch):
    for name in ('pull_hub','pull_wheel','_snapshot'):
        monkeypatch.setattr(hub, name, lambda *a, **k: pytest.fail('fetched'))
    monkeypatch.setattr(LoadedModel, '_load', lambda *a: pytest.fail('loaded'))
    for model in ('tiny','nvidia/Qwen3.6-27B-NVFP4','qwen3-8b'):
        assert run('serve', model, '--dry-run').exit_code==0
    r = run('serve', 'org/unknown', '--dry-run')
    assert r.exit_code==1 and 'atlas pull org/unknown' in r.stderr
    assert run('serve', 'tiny', '--json').exit_code==2

def test_a_plan_is_what_is_loaded():
    "Of a model that is loaded on the host, blocks and sequences are as planned"
    o = EngineConfig(
        'tiny', device='cpu', kv_cache_memory=4<<20, max_num_seqs=2, max_seq_len=512)
    plan,m = plan_load(o),LoadedModel(o, False)
    assert plan.cache_tokens==m.cache.pool.num_blocks*m.cache.pool.block_size
    assert (
        (plan.max_num_seqs,plan.chunk,plan.max_seq_len)
        ==(m.max_num_seqs,m.chunk,m.max_seq_len))
    m.close()

@pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')
@pytest.mark.parametrize(
    'more',
    [
        {}, dict(speculative=True), dict(kv_cache_dtype='fp8', max_seq_len=300)])
def test_a_plan_is_what_a_card_loads(monkeypatch, more):
    "On a card too: blocks, sequences and states as planned, weights within what is said of them"
    monkeypatch.setattr(Emulator, 'memory', lambda self: Memory(2<<30, 2<<30))
    o = EngineConfig(
        'tiny',
        Emulator(),
        **dict(max_seq_len=512, max_num_seqs=2, chunk=64)|more)
    plan,m = plan_load(o),LoadedModel(o, False)
    assert (
        plan.fits
        and plan.cache_tokens==m.cache.pool.num_blocks*m.cache.pool.block_size)
    used = {n: r.used for n,r in m.arena.regions.items()}
    assert (
        abs(used['weights']-plan.parts['weights'])
        <.2*plan.parts['weights']+(1<<20))
    assert used['tables']<=plan.parts['tables']
    assert plan.parts['cache']+plan.parts['states']==m.cache.nbytes
    assert m.arena.budget.parts['steps']==plan.parts['steps']
    m.close()

@pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')
@pytest.mark.parametrize('packed', [False,True])
@pytest.mark.parametrize('name', SEEING)
def test_a_vision_tower_is_planned_to_the_byte(monkeypatch, name, packed):
    """It is the host's, and where that is the card's memory, the plan, the budget and the cache
    see it"""
    memory = Memory(1<<30, 1<<30)
    monkeypatch.setattr(Emulator, 'memory', lambda self: memory)
    few = dict(max_seq_len=128, max_num_seqs=1)
    o = EngineConfig(str(data/name), Emulator(), packed=packed, **few)
    plan,m = plan_load(o),LoadedModel(o, False)
    tower = [w for n,w in m.model.weights().items() if n.startswith('visual.')]
    held = sum(w.nbytes for w in tower)
    assert held==plan.parts['vision']==m.arena.budget.parts['vision']==m.memory['vision']>0
    assert dict(plan.lines())['vision']
    m.close()

@pytest.mark.parametrize('name', SEEING)
def test_a_vision_tower_elsewhere_is_no_part(monkeypatch, name):
    "On the host it is among the weights; beside a card with memory of its own it takes none of it"
    assert 'vision' not in plan_load(EngineConfig(str(data/name), device='cpu')).parts
    monkeypatch.setattr(PlannedCard, 'shares_host', False)
    assert 'vision' not in plan_load(EngineConfig(str(data/name)), SPARK).parts

def test_a_tower_leaves_less_for_the_cache():
    "What it takes is not there for blocks, and a budget that it fills is refused"
    o = EngineConfig('qwen3-vl-2b-instruct-bf16', max_num_seqs=1)
    p = plan_load(o, SPARK)
    assert p.parts['vision']>1<<30 and p.nbytes<=p.budget
    without = p.parts['weights']+p.parts['steps']+(512<<20)
    small = plan_load(replace(o, memory_budget=without), SPARK)
    assert not small.fits and 'take' in small.error

def test_a_host_that_is_too_small(monkeypatch):
    monkeypatch.setattr(Host, 'memory', lambda self: Memory(1<<30, 1<<30))
    plan = plan_load(EngineConfig('qwen3-8b-bf16', device='cpu'))
    assert not plan.fits and '; 1 GiB are free' in plan.error and 'weights and steps' in plan.error

def test_dummy_weights_in_the_published_formats():
    with open_model(EngineConfig('gpt-oss-20b-mxfp4', load_format='dummy')) as ck:
        assert ck.kind=='dummy' and ck.config.max_seq_len==131072

@pytest.mark.parametrize('line', COMMANDS)
def test_commands_of_spark_owners_would_run(line):
    "Each of them fits a Spark, and drafts where it is to"
    r = run('serve', *line.split(), '--dry-run', '--json')
    assert r.exit_code==0, r.stderr
    plan, = json.loads(r.stdout)['models']
    asked = re.search(r'--max-(?:seq|model)-len (\d+)', line)
    assert plan['max_seq_len']==int(asked[1]) and plan['drafter']!='off'
    parser = re.search(r'--tool-call-parser (\w+)', line)
    assert plan['parsers']['tool_call']==(parser[1] if parser else 'qwen3_coder')
