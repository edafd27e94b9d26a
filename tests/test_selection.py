"""Which tests run: by page, by what changed, by how long they took;
and nothing of how a run was started reaches the programs that it starts."""
import asyncio,os,subprocess,sys,pytest
from pathlib import Path
from types import SimpleNamespace
from helpers import durations,nvcc,pages,waiting
from helpers.waiting import happens,linear,until

def shorts(found):
    "The names of pages without chapter and number"
    return {pages.short(p) for p in found}

def test_a_page_has_the_tests_that_import_it():
    scheduler = pages.pages_of('scheduler')
    near,far = pages.users(scheduler),pages.users(scheduler, far=True)
    assert 'tests/test_scheduler.py' in near and 'engine' in shorts(near)
    assert 'tests/test_http.py' not in near and not {'core','ops.norm'}&shorts(near)
    assert near<far
    assert 'cli' in shorts(far) and 'core' not in shorts(far)

def test_what_runs_in_another_process_counts():
    assert 'tests/test_cli.py' in pages.users(pages.pages_of('cli'))
    assert 'tests/test_processes.py' in pages.users({'tests/helpers/fake_worker.py'})

def test_every_name_of_a_page_will_do():
    one, = pages.pages_of('ops.norm')
    assert pages.pages_of(one)==[one]
    with pytest.raises(pytest.UsageError, match='no page'):
        pages.pages_of('no_such_page')

def test_a_kernel_has_the_pages_that_launch_it():
    assert {'gemv','embed'}<=pages.kernels('kernels/lib/formats.cuh')
    assert pages.kernels('kernels/argmax.cu')=={'argmax'}
    emulated = pages.kernels('kernels/emulator/emulate.h')
    assert emulated>=pages.kernels('kernels/lib/mma.cuh')
    assert any(p.endswith('cuda.gemv') for p in pages.roots_of('kernels/gemv.cu'))
    assert pages.roots_of('LICENSE')==set()
    assert pages.roots_of('tests/test_cli.py')=={'tests/test_cli.py'}

DATA = {
    'atlas/model/families/granite.toml': {'families.granite','presets','config'},
    'atlas/catalog.json': {'catalog','tests/test_catalog.py'},
    'atlas/service/static/chat.html': {'management','tests/test_page.py'},
    'atlas/service/static/theme.css': {'management','tests/test_page.py'},
    'atlas/__init__.py': {'tests/test_repo.py'},
    'atlas/engine/engine.py': {'engine'},
    'kernels/variants.json': {'variants','tests/test_kernels.py'},
    'tests/data/smollm2-tied/ref.npz': {'tests/helpers/reference.py','tests/test_llm.py'},
    'tests/gpu/demo.py': {'tests/test_gpu_scripts.py'},
    'setup.py': {'tests/test_kernels.py'},
    'settings.ini': {'tests/test_repo.py'},
    '.ci/run': {'tests/test_repo.py'},
    'nbs/8_use/decode_h200.json': {'bench_decode'},
    'nbs/5_engine/prefixes_h200.json': {'snapshots','spill','policy'},
}

@pytest.mark.parametrize('path', DATA)
def test_data_has_those_who_read_it(path):
    assert DATA[path]<=shorts(pages.roots_of(path))

def test_every_file_has_a_test():
    "But for what nothing reads; and what is unknown is told"
    out = subprocess.check_output(['git','ls-files'], cwd=pages.ROOT, text=True)
    unread = {f for f in out.splitlines() if not pages.roots_of(f)}
    by_hand = {f for f in unread if f.startswith('tests/long/')}
    assert unread=={'LICENSE','.clang-format'}|by_hand

def test_changed_files_that_no_test_reads_are_told(monkeypatch):
    monkeypatch.setattr(pages, 'changed', lambda commit: ['LICENSE','setup.py'])
    def header(commit):
        option = SimpleNamespace(changed=commit)
        return pages.pytest_report_header(SimpleNamespace(option=option))
    assert header('HEAD').endswith(': LICENSE')
    assert header(None) is None

def test_durations_come_back(tmp_path):
    "What takes no time is not listed"
    file = tmp_path/'d.json'
    listed = {'tests/a.py::x[1::2]': 20.04, 'tests/b.py::z': .5}
    durations.write(listed|{'tests/a.py::y': .01}, file)
    assert durations.read(file)==listed|{'tests/a.py::x[1::2]': 20.}
    assert durations.read(tmp_path/'none.json')=={}

def test_a_page_with_another_number_is_as_slow_as_it_was(monkeypatch):
    monkeypatch.setattr(durations, 'read', lambda: {'tests/a.py::x[5_engine/draft]': 9})
    left,items = [],[item('tests/a.py::x[5_engine/12_draft]')]
    durations.pytest_collection_modifyitems(config(left=left), items)
    assert nodeids(left)==['tests/a.py::x[5_engine/12_draft]'] and not items

def config(named=False, left=None, **options):
    "A run's configuration: its options, whether paths are named, and where it puts what it leaves"
    source = SimpleNamespace(ARGS=1, TESTPATHS=2)
    known = dict.fromkeys(('slow','keyword','markexpr','page','changed'))
    return SimpleNamespace(
        option=SimpleNamespace(**known|options),
        ArgsSource=source,
        args_source=source.ARGS if named else source.TESTPATHS,
        hook=SimpleNamespace(pytest_deselected=lambda items: left.extend(items)))

def item(name, *said):
    "A test, in whose `marks` its markers are; it says `said` of itself"
    marks = list(said)
    def closest(name): return name if name in marks else None
    return SimpleNamespace(
        nodeid=name, marks=marks, add_marker=marks.append, get_closest_marker=closest)

def nodeids(items): return [i.nodeid for i in items]

ASKED = [
    (dict(), False),
    (dict(slow=True), True),
    (dict(keyword='a'), True),
    (dict(named=True), True),
]

@pytest.mark.parametrize('asked,slow', ASKED)
def test_slow_tests_wait_to_be_asked(asked, slow, monkeypatch):
    known = dict(slow=durations.SLOW+1, usual=durations.FAST+.1)
    monkeypatch.setattr(durations, 'read', lambda: known)
    left,items = [],[item(n) for n in ('fast','slow','usual')]
    durations.pytest_collection_modifyitems(config(left=left, **asked), items)
    marks = {i.nodeid: i.marks for i in items+left}
    assert marks==dict(fast=['fast'], slow=['slow'], usual=[])
    if slow:
        assert nodeids(items)==['fast','slow','usual'] and left==[]
    else:
        assert nodeids(items)==['fast','usual'] and nodeids(left)==['slow']

IGNORED = f'''import signal,subprocess,sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
for s in (signal.SIGINT,signal.SIGQUIT,signal.SIGHUP): signal.signal(s, signal.SIG_IGN)
%s
code = """import signal
for s in (signal.SIGINT,signal.SIGQUIT,signal.SIGHUP):
    print(signal.getsignal(s)!=signal.SIG_IGN)"""
signal.raise_signal(signal.SIGHUP)
print(subprocess.check_output([sys.executable, '-c', code], text=True))'''

@pytest.mark.parametrize('first,said', [
    ('', 'False False False'),
    ('import conftest', 'True True True'),
])
def test_children_answer_signals(first, said):
    "However the run was started; what was to survive a terminal's end still does"
    r = subprocess.run([sys.executable, '-c', IGNORED % first], capture_output=True, text=True)
    assert r.stdout.split()==said.split(), r.stderr

def test_work_that_grows_too_fast_is_told_from_a_slow_machine():
    "And what takes no time is not measured twice"
    asked = []
    def measured(n):
        asked.append(n)
        return n
    assert linear(measured, 99, loose=100)
    assert asked==[99]
    assert linear(lambda n: 50*n, 100, loose=100)
    assert not linear(lambda n: n*n, 100, loose=100)

def test_waiting_has_an_end(monkeypatch):
    monkeypatch.setattr(waiting, 'WAIT', .05)
    assert until(lambda: 'it')=='it'
    assert asyncio.run(happens(lambda: 'it'))=='it'
    said = 'the moon did not happen'
    with pytest.raises(AssertionError, match=said):
        until(lambda: False, 'the moon')
    with pytest.raises(AssertionError, match=said):
        asyncio.run(happens(lambda: False, 'the moon'))

def test_a_kernel_is_compiled_once_for_all_who_ask(tmp_path, monkeypatch):
    "Until its text, or what it is compiled with, is another"
    ran = []
    def run(src, arch, options):
        ran.append(options)
        return dict(ptx='p', said='s')
    monkeypatch.setattr(nvcc, 'version', lambda: 'one')
    monkeypatch.setattr(nvcc, 'run', run)
    cache = SimpleNamespace(mkdir=lambda name: tmp_path)
    def ask(*options):
        made = nvcc.built(cache, 'rmsnorm', 'sm_90a', options)
        assert (made.ptx, made.said)==('p', 's')
        return len(ran)
    assert ask()==1 and ask()==1
    assert ask('-DA')==2 and ask()==2
    assert ran==[(),('-DA',)]
    monkeypatch.setattr(nvcc, 'version', lambda: 'two')
    assert ask()==3

def test_what_is_slow_to_find_is_left():
    "But for those who ask for it"
    def left(name, **options):
        return durations.pytest_ignore_collect(Path(name), config(**options))
    file, = durations.LEFT
    assert left(file) and left(file, markexpr='fast')
    assert not left(file, slow=True) and not left(file, markexpr='slow')
    assert not left('test_cli.py')
    for test,seconds in durations.read().items():
        if test.startswith(f'tests/{file}::'):
            assert seconds>durations.SLOW

COMPILED = '''from atlas.card.emulator import Emulator
from atlas.card.launch import Source
print(Emulator().load(Source('silu_mul')).name)'''

COUNTING = '''#!/bin/sh
case "$*" in *--version*) ;; *) echo x >> %s;; esac
exec %s "$@"
'''

def test_nobody_compiles_a_kernel_twice(tmp_path):
    "Processes that want the same one at the same time wait for whoever began"
    from atlas.card.emulator import find_cxx
    if not find_cxx():
        pytest.skip('no C++ compiler')
    cxx,log = tmp_path/'cxx',tmp_path/'log'
    cxx.write_text(COUNTING % (log, find_cxx()))
    cxx.chmod(0o755)
    env = os.environ|dict(CXX=str(cxx), ATLAS_HOME=str(tmp_path/'home'))
    def start():
        code = [sys.executable, '-c', COMPILED]
        return subprocess.Popen(code, env=env, stdout=subprocess.PIPE, text=True)
    those = [start() for _ in range(4)]
    assert [p.communicate()[0] for p in those]==['silu_mul\n']*4
    assert log.read_text()=='x\n'*2  # the runtime, and the kernel
