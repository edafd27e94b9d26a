"""How long tests take: seconds of processor, theirs and their children's,
written into tests/durations.json by

    pytest --slow --record-durations

and read by every other run: what takes more than `SLOW` seconds is marked `slow`,
what is not even listed `fast`; null is not measured yet, and neither.
Pages are listed without their numbers, which change when one comes between.
Where tests share a server, what starts it is counted for the first;
the others are given as much by hand. A run that names nothing (no path, no -k, no -m)
leaves the slow ones out unless it says `--slow`; `pytest -m fast` is for between two edits."""
import json,os,re
from pathlib import Path
import pytest

FILE = Path(__file__).parents[1]/'durations.json'
SLOW,FAST = .3,.04  # seconds
# A browser, and clients that are late on purpose: they take time, though little of the
# processor's; never fast
WAITS = ('test_page.py','test_http.py')
# Of which each test is slow, and so is finding them: not even read where slow ones are left out
LEFT = ('test_openapi.py',)

def spent():
    "Seconds of processor of this process and of children that have ended"
    return sum(os.times()[:4])

def listed(test):
    "The name of a test by which it is listed: `test_notebook[5_engine/12_draft]` as `…/draft]`"
    return re.sub(r'/\d+_', '/', test)

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
        if s is None or s>FAST:
            files.setdefault(f, {})[name] = s
    lines = []
    for f,tests in files.items():
        lines.append(f'{json.dumps(f)}: {json.dumps(tests, ensure_ascii=False)}')
    file.write_text('{\n'+',\n'.join(lines)+'\n}\n')

def pytest_addoption(parser):
    group = parser.getgroup('atlas')
    group.addoption('--slow', action='store_true',
        help=f'run the slow tests, too: those of more than {SLOW} s of processor, '
             'which a run that names no tests leaves out. '
             f'-m fast runs only those of no more than {FAST} s')
    group.addoption('--record-durations', action='store_true',
        help='write tests/durations.json anew for the tests that run')

def pytest_configure(config):
    config.addinivalue_line('markers',
        f'slow: takes more than {SLOW} s of processor, by tests/durations.json')
    config.addinivalue_line('markers', f'fast: takes no more than {FAST} s of processor')
    is_worker = hasattr(config, 'workerinput')
    if config.getoption('record_durations') and not is_worker:
        config.pluginmanager.register(Recorder(config), 'recorder')

def names_paths(config):
    "Were paths given on the command line?"
    return config.args_source is config.ArgsSource.ARGS

def named(config):
    "Has somebody said which tests to run?"
    o = config.option
    chosen = o.keyword or o.markexpr or o.page or o.changed
    return o.slow or chosen or names_paths(config)

def pytest_ignore_collect(collection_path, config):
    name = collection_path.name
    fast = config.option.markexpr=='fast'
    if fast and name in LEFT+WAITS:
        return True
    if name in LEFT and not named(config):
        return True

def waits(test):
    "Is it a test of a file that waits?"
    file = test.partition('::')[0]
    return file in [f'tests/{f}' for f in WAITS]

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    known,left,kept = read(),[],[]
    for item in items:
        s = known.get(listed(item.nodeid), 0)
        measured = s is not None
        said = item.get_closest_marker('slow') # by the test itself
        slow = bool(said) or measured and s>SLOW
        fast = measured and s<=FAST and not slow and not waits(item.nodeid)
        if slow:
            item.add_marker('slow')
        if fast:
            item.add_marker('fast')
        (left if slow and not named(config) else kept).append(item)
    if not left:
        return
    config.hook.pytest_deselected(items=left)
    items[:] = kept

def pytest_report_header(config):
    if not named(config):
        return 'slow tests are left out: --slow runs them, too'

class Clock:
    "What this process had spent when the last report was made"
    at = 0

def pytest_runtest_logstart():
    Clock.at = spent()

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport():
    report = yield
    before,Clock.at = Clock.at,spent()
    report.seconds = Clock.at-before  # travels from a worker with the rest of the report
    return report

class Recorder:
    "Adds up what the reports of a run say"
    def __init__(self, config):
        self.config,self.seconds = config,{}
    def pytest_runtest_logreport(self, report):
        test = listed(report.nodeid)
        self.seconds[test] = self.seconds.get(test, 0)+report.seconds
    def pytest_sessionfinish(self, session):
        whole = self.config.option.slow and not names_paths(self.config)
        known = {} if whole else read()
        write(known|self.seconds)
    def pytest_terminal_summary(self, terminalreporter):
        every = self.seconds.values()
        fast = [s for s in every if s<=FAST]
        terminalreporter.write_line(
            f'{sum(every):.0f} s of processor in {len(every)} tests, '
            f'{sum(fast):.0f} s in {len(fast)} fast ones; written to {FILE.name}')
