"Which tests run: by page, by what changed, by how long they took; and nothing of how a run was started reaches the programs that it starts."
import asyncio,os,signal,subprocess,sys,pytest
from pathlib import Path
from types import SimpleNamespace
from helpers import durations,nvcc,pages,waiting
from helpers.waiting import happens,linear,until

def test_a_page_has_the_tests_that_import_it():
    near = pages.users(pages.pages_of('scheduler'))
    assert 'tests/test_scheduler.py' in near and any(pages.short(p)=='engine' for p in near)
    assert not any(pages.short(p) in ('core','ops.norm') for p in near) and 'tests/test_http.py' not in near
    far = pages.users(pages.pages_of('scheduler'), far=True)
    assert near<far and any(pages.short(p)=='cli' for p in far) and not any(pages.short(p)=='core' for p in far)

def test_what_runs_in_another_process_counts():
    assert 'tests/test_cli.py' in pages.users(pages.pages_of('cli')) and 'tests/test_processes.py' in pages.users({'tests/helpers/fake_worker.py'})

def test_every_name_of_a_page_will_do():
    one, = pages.pages_of('ops.norm')
    assert pages.pages_of(one)==[one]
    with pytest.raises(pytest.UsageError, match='no page'): pages.pages_of('no_such_page')

def test_a_kernel_has_the_pages_that_launch_it():
    assert {'gemv','embed'}<=pages.kernels('kernels/lib/formats.cuh') and pages.kernels('kernels/argmax.cu')=={'argmax'}
    assert pages.kernels('kernels/emulator/emulate.h')>=pages.kernels('kernels/lib/mma.cuh')
    assert any(p.endswith('cuda.gemv') for p in pages.roots_of('kernels/gemv.cu'))
    assert pages.roots_of('LICENSE')==set() and pages.roots_of('tests/test_cli.py')=={'tests/test_cli.py'}

DATA = {'atlas/model/families/granite.toml': {'families.granite','presets','config'}, 'atlas/service/static/chat.html': {'server','tests/test_page.py'},
    'atlas/__init__.py': {'tests/test_repo.py'}, 'atlas/engine/engine.py': {'engine'}, 'kernels/variants.json': {'variants','tests/test_kernels.py'},
    'tests/data/smollm2-tied/ref.npz': {'tests/helpers/reference.py','tests/test_llm.py'}, 'tests/gpu/demo.py': {'tests/test_gpu_scripts.py'},
    'setup.py': {'tests/test_kernels.py'}, 'settings.ini': {'tests/test_repo.py'}, '.ci/run': {'tests/test_repo.py'}, 'nbs/8_use/decode_h200.json': {'bench_decode'}}

@pytest.mark.parametrize('path', DATA)
def test_data_has_those_who_read_it(path):
    assert DATA[path]<={pages.short(p) for p in pages.roots_of(path)}

def test_every_file_has_a_test():
    "But for what nothing reads; and what is unknown is told"
    files = subprocess.run(['git','ls-files'], cwd=pages.ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    assert {f for f in files if not pages.roots_of(f)}=={'LICENSE','tests/long/README.md','tests/long/soak.py'}

def test_changed_files_that_no_test_reads_are_told(monkeypatch):
    monkeypatch.setattr(pages, 'changed', lambda commit: ['LICENSE','setup.py'])
    def header(commit): return pages.pytest_report_header(SimpleNamespace(option=SimpleNamespace(changed=commit)))
    assert header('HEAD').endswith(': LICENSE') and header(None) is None

def test_durations_come_back(tmp_path):
    "What takes no time is not listed"
    durations.write({'tests/a.py::x[1::2]': 20.04, 'tests/a.py::y': .01, 'tests/b.py::z': .5}, tmp_path/'d.json')
    assert durations.read(tmp_path/'d.json')=={'tests/a.py::x[1::2]': 20., 'tests/b.py::z': .5} and durations.read(tmp_path/'none.json')=={}

@pytest.mark.parametrize('asked,slow', [(dict(),False), (dict(slow=True),True), (dict(keyword='a'),True), (dict(named=True),True)])
def test_slow_tests_wait_to_be_asked(asked, slow, monkeypatch):
    monkeypatch.setattr(durations, 'read', lambda: {'slow': durations.SLOW+1, 'usual': durations.FAST+.1})
    source,left = SimpleNamespace(ARGS=1, TESTPATHS=2),[]
    option = dict.fromkeys(('slow','keyword','markexpr','page','changed'))|{k: v for k,v in asked.items() if k!='named'}
    config = SimpleNamespace(option=SimpleNamespace(**option), ArgsSource=source, args_source=source.ARGS if 'named' in asked else source.TESTPATHS,
        hook=SimpleNamespace(pytest_deselected=lambda items: left.extend(items)))
    def item(name):
        marks = []
        return SimpleNamespace(nodeid=name, marks=marks, add_marker=marks.append)
    items = [item(n) for n in ('fast','slow','usual')]
    durations.pytest_collection_modifyitems(config, items)
    assert [i.nodeid for i in items]==['fast',*['slow']*slow,'usual'] and [i.nodeid for i in left]==['slow']*(not slow)
    assert {i.nodeid: i.marks for i in items+left}==dict(fast=['fast'], slow=['slow'], usual=[])

IGNORED = f'''import signal,subprocess,sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
for s in (signal.SIGINT,signal.SIGQUIT,signal.SIGHUP): signal.signal(s, signal.SIG_IGN)
%s
code = 'import signal; print(*(signal.getsignal(s)!=signal.SIG_IGN for s in (signal.SIGINT,signal.SIGQUIT,signal.SIGHUP)))'
signal.raise_signal(signal.SIGHUP)
print(subprocess.run([sys.executable, '-c', code], capture_output=True, text=True).stdout.strip())'''

@pytest.mark.parametrize('first,said', [('','False False False'), ('import conftest','True True True')])
def test_children_answer_signals(first, said):
    "However the run was started; what was to survive a terminal's end still does"
    r = subprocess.run([sys.executable, '-c', IGNORED % first], capture_output=True, text=True)
    assert r.stdout.strip()==said, r.stderr

def test_work_that_grows_too_fast_is_told_from_a_slow_machine():
    "And what takes no time is not measured twice"
    asked = []
    def takes(f): return lambda n: (asked.append(n), f(n))[1]
    assert linear(takes(lambda n: n), 99, loose=100) and asked==[99]
    assert linear(takes(lambda n: 50*n), 100, loose=100) and not linear(takes(lambda n: n*n), 100, loose=100)

def test_waiting_has_an_end(monkeypatch):
    monkeypatch.setattr(waiting, 'WAIT', .05)
    assert until(lambda: 'it')=='it' and asyncio.run(happens(lambda: 'it'))=='it'
    with pytest.raises(AssertionError, match='the moon did not happen'): until(lambda: False, 'the moon')
    with pytest.raises(AssertionError, match='the moon did not happen'): asyncio.run(happens(lambda: False, 'the moon'))

def test_a_kernel_is_compiled_once_for_all_who_ask(tmp_path, monkeypatch):
    "Until its text, or what it is compiled with, is another"
    ran = []
    monkeypatch.setattr(nvcc, 'version', lambda: 'one'); monkeypatch.setattr(nvcc, 'run', lambda src,arch,options: ran.append(options) or dict(ptx='p', said='s'))
    cache = SimpleNamespace(mkdir=lambda name: tmp_path)
    def ask(*options): return nvcc.built(cache, 'rmsnorm', 'sm_90a', options)
    assert [ask().ptx, ask().said, ask('-DA').ptx, ask().ptx]==['p','s','p','p'] and ran==[(),('-DA',)]
    monkeypatch.setattr(nvcc, 'version', lambda: 'two')
    assert ask().ptx and len(ran)==3

def test_what_is_slow_to_find_is_left():
    "But for those who ask for it"
    source = SimpleNamespace(ARGS=1, TESTPATHS=2)
    def left(name, **kw):
        option = SimpleNamespace(**dict.fromkeys(('slow','keyword','markexpr','page','changed'))|kw)
        return durations.pytest_ignore_collect(Path(name), SimpleNamespace(option=option, ArgsSource=source, args_source=source.TESTPATHS))
    file, = durations.LEFT
    assert left(file) and left(file, markexpr='fast') and not left('test_cli.py') and not left(file, slow=True) and not left(file, markexpr='slow')
    assert all(s>durations.SLOW for t,s in durations.read().items() if t.startswith(f'tests/{file}::'))

COMPILED = '''from atlas.card.emulator import Emulator
from atlas.card.launch import Source
print(Emulator().load(Source('silu_mul')).name)'''

def test_nobody_compiles_a_kernel_twice(tmp_path):
    "Processes that want the same one at the same time wait for whoever began"
    from atlas.card.emulator import find_cxx
    if not find_cxx(): pytest.skip('no C++ compiler')
    (cxx := tmp_path/'cxx').write_text(f'#!/bin/sh\ncase "$*" in *--version*) ;; *) echo x >> {tmp_path}/log;; esac\nexec {find_cxx()} "$@"\n')
    cxx.chmod(0o755)
    env = os.environ|dict(CXX=str(cxx), ATLAS_HOME=str(tmp_path/'home'))
    those = [subprocess.Popen([sys.executable, '-c', COMPILED], env=env, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    assert [p.communicate()[0] for p in those]==['silu_mul\n']*4
    assert (tmp_path/'log').read_text()=='x\n'*2  # the runtime, and the kernel
