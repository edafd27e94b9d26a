"""How long tests take: seconds of processor, theirs and their children's, written into tests/durations.json by

    pytest --slow --record-durations

and read by every other run: what takes more than `SLOW` seconds is marked `slow`, what is not even listed `fast`; null is not measured yet, and neither.
Where tests share a server, what starts it is counted for the first; the others are given as much by hand. A run that names nothing (no path, no -k, no -m)
leaves the slow ones out unless it says `--slow`; `pytest -m fast` is for between two edits."""
import json,os
from pathlib import Path
import pytest

FILE = Path(__file__).parents[1]/'durations.json'
SLOW,FAST = 1,.04  # seconds
WAITS = ('test_page.py','test_http.py')  # a browser, and clients that are late on purpose: they take time, though little of the processor's; never fast
LEFT = ('test_openapi.py',)  # of which each test is slow, and so is finding them: not even read where slow ones are left out

def spent():
    "Seconds of processor of this process and of children that have ended"
    return sum(os.times()[:4])

def read(file=FILE):
    "Seconds of each test that takes more than `FAST`"
    files = json.loads(file.read_text()) if file.exists() else {}
    return {f'{f}::{t}': s for f,tests in files.items() for t,s in tests.items()}

def write(seconds, file=FILE):
    "Keep `seconds`: a file of tests a line"
    files = {}
    for test,s in sorted(seconds.items()):
        f,_,name = test.partition('::')
        s = s and round(s, 2 if s<1 else 1)
        if s is None or s>FAST: files.setdefault(f, {})[name] = s
    file.write_text('{\n'+',\n'.join(f'{json.dumps(f)}: {json.dumps(tests, ensure_ascii=False)}' for f,tests in files.items())+'\n}\n')

def pytest_addoption(parser):
    group = parser.getgroup('atlas')
    group.addoption('--slow', action='store_true', help=f'run the slow tests, too: those of more than {SLOW} s of processor, which a run that names no tests leaves out. -m fast runs only those of no more than {FAST} s')
    group.addoption('--record-durations', action='store_true', help='write tests/durations.json anew for the tests that run')

def pytest_configure(config):
    config.addinivalue_line('markers', f'slow: takes more than {SLOW} s of processor, by tests/durations.json')
    config.addinivalue_line('markers', f'fast: takes no more than {FAST} s of processor')
    if config.getoption('record_durations') and not hasattr(config, 'workerinput'): config.pluginmanager.register(Recorder(config), 'recorder')

def named(config):
    "Has somebody said which tests to run?"
    o = config.option
    return o.slow or o.keyword or o.markexpr or o.page or o.changed or config.args_source is config.ArgsSource.ARGS

def pytest_ignore_collect(collection_path, config):
    name,fast = collection_path.name,config.option.markexpr=='fast'
    if name in LEFT and (fast or not named(config)) or name in WAITS and fast: return True

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    known,left,kept = read(),[],[]
    for item in items:
        s = known.get(item.nodeid, 0)
        slow = s is not None and s>SLOW
        if slow: item.add_marker('slow')
        elif s is not None and s<=FAST and not item.nodeid.startswith(tuple(f'tests/{f}' for f in WAITS)): item.add_marker('fast')
        (left if slow and not named(config) else kept).append(item)
    if not left: return
    config.hook.pytest_deselected(items=left)
    items[:] = kept

def pytest_report_header(config):
    if not named(config): return 'slow tests are left out: --slow runs them, too'

class Clock:
    "What this process had spent when the last report was made"
    at = 0

def pytest_runtest_logstart(): Clock.at = spent()

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    before,Clock.at = Clock.at,spent()
    report.seconds = Clock.at-before  # travels from a worker with the rest of the report
    return report

class Recorder:
    "Adds up what the reports of a run say"
    def __init__(self, config): self.config,self.seconds = config,{}
    def pytest_runtest_logreport(self, report): self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0)+report.seconds
    def pytest_sessionfinish(self, session):
        whole = self.config.args_source is not self.config.ArgsSource.ARGS and self.config.option.slow
        write(({} if whole else read())|self.seconds)
    def pytest_terminal_summary(self, terminalreporter):
        fast = [s for s in self.seconds.values() if s<=FAST]
        terminalreporter.write_line(f'{sum(self.seconds.values()):.0f} s of processor in {len(self.seconds)} tests, {sum(fast):.0f} s in {len(fast)} fast ones; written to {FILE.name}')
