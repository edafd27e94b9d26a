"""Shared fixtures, and what holds for a whole run: signals, memory,
durations (helpers/durations.py) and selection by page (helpers/pages.py)."""
import gc,os,signal,pytest

pytest_plugins = ['helpers.durations','helpers.pages']

def answer_signals():
    """Let the programs that tests start be ended by signals, however this run was started.

    A shell starts what it puts into the background with SIGINT and SIGQUIT ignored,
    and `nohup` with SIGHUP; programs inherit what is ignored, and no handlers.
    So what is ignored here gets a handler; SIGQUIT and SIGHUP still do nothing to this process."""
    def ignored(s): return signal.getsignal(s)==signal.SIG_IGN
    if ignored(signal.SIGINT):
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for s in (signal.SIGQUIT,signal.SIGHUP):
        if ignored(s):
            signal.signal(s, lambda *_: None)

answer_signals()

def pytest_configure(config):
    """Programs that tests start find the package compiled. A system may say that no bytecode is to
    be written; then each of them would compile it anew, which takes longer than most tests"""
    if hasattr(config, 'workerinput') or not hasattr(config, 'cache'):
        return
    os.environ.pop('PYTHONDONTWRITEBYTECODE', None)
    os.environ['PYTHONPYCACHEPREFIX'] = str(config.cache.mkdir('bytecode'))

def pytest_xdist_auto_num_workers():
    """One more than there are cores, for some tests wait for others' processes;
    what each takes of memory bounds it"""
    limited = hasattr(os, 'sched_getaffinity')
    cores = len(os.sched_getaffinity(0)) if limited else os.cpu_count()
    return min(8, cores+1)

def pytest_collection_finish():
    "What is there before the first test stays: the collector need not look at it after each"
    gc.collect()
    gc.freeze()

@pytest.fixture
def patient_sandbox(monkeypatch):
    """A sandbox ends jobs by the processor time that they take, and hardly by real time,
    in which a busy machine has other things to do"""
    from atlas.text import sandbox
    monkeypatch.setattr(sandbox, '_PATIENCE', 1000)
    monkeypatch.setattr(sandbox, '_START', 300.)

@pytest.fixture(scope='session')
def demo():
    """The demo model's file, pulled once into the default cache. Where CI=true it must come;
    elsewhere a machine without network skips."""
    from atlas.ground.core import SourceError
    from atlas.ground.hub import pull
    try:
        return pull('demo')
    except SourceError as e:
        if os.environ.get('CI')=='true':
            raise
        pytest.skip(f'no demo model: {e.msg}')
