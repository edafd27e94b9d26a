"""The site, built once for all tests that ask, from a copy of the tree as it is."""
import fcntl,http.server,os,shutil,subprocess,sys,threading
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]

def copy(to):
    "What git has of the tree, and what it would be given: files as they are now"
    files = ['git', 'ls-files', '-z', '--cached', '--others', '--exclude-standard']
    listed = subprocess.check_output(files, cwd=ROOT, text=True)
    for name in filter(None, listed.split('\0')):
        if not (ROOT/name).is_file():
            continue
        (to/name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT/name, to/name)

def build(to):
    "Build the site in a copy; what it says is kept in a file, which is there when all is"
    copy(to)
    env = os.environ|dict(PYTHONPATH=str(to))
    run = [sys.executable, '.ci/docs']
    done = subprocess.run(run, cwd=to, env=env, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    (to/'said.txt').write_text(done.stderr)

def built(folder):
    "The built site in `folder`, which the processes of one run of tests share"
    folder.mkdir(exist_ok=True)
    with open(folder/'lock', 'w') as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder/'tree'/'said.txt').exists():
            shutil.rmtree(folder/'tree', ignore_errors=True)
            build(folder/'tree')
    return folder/'tree'

@contextmanager
def served(docs):
    "An address at which a folder of pages is read"
    class Files(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(docs))
        def log_message(self, *args):
            "Nobody reads it"
    server = http.server.ThreadingHTTPServer(('127.0.0.1', 0), Files)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'http://127.0.0.1:{server.server_port}/'
    server.shutdown()
    server.server_close()
