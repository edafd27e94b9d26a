"""What is in deploy/: units, an image, and a dashboard with its alerts, held against what Atlas is,
by their own tools where there are some."""
import json,os,re,shlex,shutil,signal,socket,subprocess,sys
from configparser import ConfigParser
from contextlib import contextmanager
from pathlib import Path
import pytest,yaml

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from helpers.waiting import WAIT  # noqa: E402
from test_http import Everything,everything_seen  # noqa: E402
from test_processes import GATEWAY  # noqa: E402
from atlas.service import metrics  # noqa: E402

root = Path(__file__).parents[1]
deploy = root/'deploy'
UNITS = sorted((deploy/'systemd').iterdir())
COMPOSE = yaml.safe_load((deploy/'compose.yaml').read_text())

def unit(path):
    "A unit's sections: name -> key -> list of values"
    out,into = {},None
    for line in path.read_text().splitlines():
        if line.startswith('['):
            into = out.setdefault(line.strip('[]'), {})
        elif line and line[0] not in '#;':
            k,_,v = line.partition('=')
            into.setdefault(k, []).append(v)
    return out

def flags(*command):
    "The flags that a command of `atlas` has"
    code = 'from atlas.use.cli import main; main()'
    r = subprocess.run(
        [sys.executable, '-c', code, *command, '--help'], capture_output=True,
        text=True, timeout=WAIT, cwd=root)
    assert r.returncode==0, r.stderr
    found = set(re.findall(r'--[a-z][\w-]+', r.stdout))
    return found

# -- systemd -------------------------------------------------------------------------------------

@pytest.mark.parametrize('path', UNITS, ids=lambda p: p.name)
def test_units_are_valid(path, tmp_path):
    "As systemd itself says: no unknown key, no bad value. What they run is not on this machine"
    exe = shutil.which('systemd-analyze') or pytest.skip('no systemd here')
    for p in UNITS:
        (tmp_path/p.name).write_text(p.read_text().replace('/opt/atlas/bin/atlas', '/bin/true'))
    r = subprocess.run(
        [exe, 'verify', '--man=no', tmp_path/path.name], capture_output=True,
        text=True, timeout=WAIT)
    said = [l for l in r.stderr.splitlines() if path.name in l]
    assert not said and r.returncode==0, r.stderr

def test_a_wrong_unit_would_be_seen(tmp_path):
    exe = shutil.which('systemd-analyze') or pytest.skip('no systemd here')
    wrong = tmp_path/'atlas.service'
    wrong.write_text(
        (deploy/'systemd'/'atlas.service').read_text().replace(
            'WatchdogSec=30s', 'WatchdogSec=often').replace('/opt/atlas/bin/atlas', '/bin/true'))
    r = subprocess.run(
        [exe, 'verify', '--man=no', wrong], capture_output=True, text=True,
        timeout=WAIT)
    assert 'atlas.service' in r.stderr and 'often' in r.stderr

def test_the_server_is_a_user_and_what_drops_caches_is_root():
    server,drop = (unit(deploy/'systemd'/f'{n}.service') for n in ('atlas','atlas-drop-caches'))
    assert server['Service']['User']==['atlas'] and 'User' not in drop['Service']
    assert 'drop_caches' in drop['Service']['ExecStart'][0] and drop['Service']['Type']==['oneshot']
    for k in ('Wants','After'):
        assert 'atlas-drop-caches.service' in server['Unit'][k][0].split()
    assert server['Service']['Type']==['notify']
    assert server['Service']['TimeoutStartSec']==['infinity']

@pytest.mark.parametrize('name', ['atlas.service','atlas-watch.service'])
def test_units_run_commands_that_there_are(name):
    said = shlex.split(unit(deploy/'systemd'/name)['Service']['ExecStart'][0])
    assert said[0]=='/opt/atlas/bin/atlas'
    assert {w for w in said if w.startswith('--')}<=flags(said[1])

@contextmanager
def kept(tmp_path, **env):
    "A gateway in a process of its own, and the socket at which systemd would listen"
    s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    s.bind(str(tmp_path/'notify'))
    s.settimeout(WAIT)
    env = os.environ|dict(
        NOTIFY_SOCKET=str(tmp_path/'notify'), PYTHONPATH=f'{root}:{root/"tests"/"helpers"}')|env
    p = subprocess.Popen(
        [*map(str, GATEWAY), json.dumps(dict(models=['m']))],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=env)
    try:
        yield p,s
    finally:
        p.kill()
        p.wait(WAIT)
        s.close()

def test_a_server_tells_systemd_how_it_is(tmp_path):
    "Ready once its models are; alive, again and again; and that it stops"
    with kept(tmp_path, WATCHDOG_USEC='600000') as (p,s):
        said = []
        def hear(word):
            while not any(word in m for m in said):
                said.append(s.recv(999).decode())
        hear('READY=1')
        said.clear()
        for _ in range(3):
            hear('WATCHDOG=1')
            said.clear()
        p.send_signal(signal.SIGTERM)
        hear('STOPPING=1')
        assert p.wait(WAIT)==0

def test_a_server_that_hangs_is_silent(tmp_path):
    "Stopped, it says nothing, and its watchdog would bite"
    with kept(tmp_path, WATCHDOG_USEC='300000') as (p,s):
        while 'WATCHDOG=1' not in s.recv(999).decode():
            pass
        p.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, p.pid, os.WSTOPPED|os.WNOWAIT)
        s.setblocking(False)
        with pytest.raises(BlockingIOError):
            for _ in range(99):
                s.recv(999) # what was on its way
        s.settimeout(.5)
        with pytest.raises(TimeoutError):
            s.recv(999)
        p.send_signal(signal.SIGCONT)
        s.settimeout(WAIT)
        assert 'WATCHDOG=1' in s.recv(999).decode()

def test_another_process_is_not_watched(tmp_path):
    "WATCHDOG_PID names whom the watchdog means"
    from atlas.service.gateway import Supervisor
    assert Supervisor(dict(WATCHDOG_USEC='300000', WATCHDOG_PID='1')).pace is None
    assert Supervisor(dict(WATCHDOG_USEC='300000', WATCHDOG_PID=str(os.getpid()))).pace==.1
    Supervisor(dict(NOTIFY_SOCKET=str(tmp_path/'none'))).tell(READY=1) # nobody listens

def test_the_file_that_comes_with_it_is_a_fleet():
    "What units and image serve until somebody says otherwise"
    from atlas.service.fleet import read_fleet
    assert list(read_fleet(deploy/'atlas.yaml').models)==['demo']

# -- the image -----------------------------------------------------------------------------------

def dockerfile():
    "Pairs of an instruction and its arguments"
    text = (deploy/'Dockerfile').read_text()
    text = re.sub(r'^#.*\n', '', text, flags=re.M).replace('\\\n', ' ')
    return [tuple(l.split(None, 1)) for l in text.splitlines() if l.strip()]

def test_the_image_has_what_it_copies():
    "And .dockerignore lets it through"
    let = [
        l[1:] for l in (deploy/'Dockerfile.dockerignore').read_text().splitlines()
        if l.startswith('!')]
    copied = [a.split() for k,a in dockerfile() if k=='COPY' and '--from' not in a]
    sources = [s for c in copied for s in c[:-1]]
    assert set(sources)==set(let) and all((root/s).exists() for s in sources)

def test_the_image_builds_what_setup_needs(tmp_path):
    "All that setup.py reads beside the packages is copied"
    copied = {s for k,a in dockerfile() if k=='COPY' for s in a.split()}
    for name in re.findall(r"here/'([\w.]+)'", (root/'setup.py').read_text()):
        assert name in copied, name

def test_the_image_runs_a_command_that_there_is():
    d = dict(dockerfile())
    cmd = json.loads(d['CMD'])
    assert json.loads(d['ENTRYPOINT'])==['atlas']
    assert {w for w in cmd if w.startswith('--')}<=flags(cmd[0])
    assert d['EXPOSE']=='8888' and d['USER']=='atlas'
    ini = ConfigParser(delimiters=['='])
    ini.read(root/'settings.ini')
    for extra in d['ARG'].partition('=')[2].split(','):
        assert f'{extra}_requirements' in ini['DEFAULT']
    assert extra in (root/'setup.py').read_text()

# -- compose, Prometheus, Grafana ----------------------------------------------------------------

def test_compose_is_valid():
    "By the specification's own model, where the package is installed"
    spec = pytest.importorskip('compose_spec')
    def value(m): return m[1] if (m[1] or '').isdigit() else 'x'
    text = re.sub(r'\$\{\w+(?::[-?]([^}]*))?\}', value, (deploy/'compose.yaml').read_text())
    assert len(spec.PyCompose.from_yaml(text).to_dict()['services'])==3

def test_compose_mounts_what_there_is():
    for name,s in COMPOSE['services'].items():
        for v in s.get('volumes', ()):
            source = v.split(':')[0]
            known = source in COMPOSE['volumes'] or (deploy/source).exists()
            assert known, f'{name}: {v}'
        for other in s.get('depends_on', ()):
            assert other in COMPOSE['services']
        for secret in s.get('secrets', ()):
            assert secret['source'] in COMPOSE['secrets']
    built = COMPOSE['services']['atlas']['build']
    assert (deploy/built['context']/built['dockerfile']).exists()

def test_only_atlas_is_open_to_the_network():
    for name in ('prometheus','grafana'):
        assert all(p.startswith('127.0.0.1:') for p in COMPOSE['services'][name]['ports'])

def test_what_must_be_set_is_in_the_readme():
    wanted = set(re.findall(r'\$\{(\w+):\?', (deploy/'compose.yaml').read_text()))
    assert wanted and all(w in (deploy/'README.md').read_text() for w in wanted)

def test_prometheus_asks_atlas():
    config = yaml.safe_load((deploy/'prometheus'/'prometheus.yml').read_text())
    job, = config['scrape_configs']
    host,port = job['static_configs'][0]['targets'][0].split(':')
    cmd = json.loads(dict(dockerfile())['CMD'])
    assert host in COMPOSE['services'] and port=='8888' and host==cmd[cmd.index('--allowed-host')+1]
    secret, = COMPOSE['services']['prometheus']['secrets']
    assert job['authorization']['credentials_file']==f'/run/secrets/{secret["target"]}'
    assert [(deploy/'prometheus'/f).exists() for f in config['rule_files']]==[True]

def samples():
    "Names of all samples that a server may tell, and the labels of each"
    m = metrics.Metrics(Everything({k:1 for k in metrics._engine}))
    m.machine = everything_seen()
    out = {}
    for l in m.text().decode().splitlines():
        if l[:1]!='#' and (x := re.match(r'([\w:]+)(?:\{(.*)\})? ', l)):
            out.setdefault(x[1], set()).update(
                re.findall(r'(\w+)=', x[2] or ''))
    return out

def alerts():
    said = yaml.safe_load((deploy/'prometheus'/'rules.yml').read_text())
    return said['groups'][0]['rules']

def test_alerts_are_whole():
    rules = alerts()
    assert len({r['alert'] for r in rules})==len(rules)>=5
    for r in rules:
        assert set(r)=={'alert','expr','for','labels','annotations'}
        e = r['expr']
        assert e.count('(')==e.count(')') and e.count('{')==e.count('}')

@pytest.mark.parametrize('rule', alerts(), ids=lambda r: r['alert'])
def test_alerts_name_what_there_is(rule):
    "Metrics, and the labels by which they are summed, matched and shown"
    told,e = samples(),rule['expr']
    names = set(re.findall(r'atlas:\w+', e))
    assert names<=told.keys(), names-told.keys()
    labels = set().union(*(told[n] for n in names)) if names else {'instance','job'}
    by = {x for b in re.findall(r'by \(([\w, ]+)\)', e) for x in re.split(r',\s*', b)}
    shown = set(re.findall(r'\$labels\.(\w+)', rule['annotations']['summary']))
    assert by<=labels and shown<=(by or labels|{'instance'})
    matched = {k for s in re.findall(r'\{([^}]*)\}', e) for k in re.findall(r'(\w+)[=!]', s)}
    assert matched<=labels|{'job'}

def test_states_of_alerts_are_states():
    rules = (deploy/'prometheus'/'rules.yml').read_text()
    from atlas.service.watch import ILL
    assert set(
        re.search(r'state=~"([\w|]+)"', rules)[1].split('|'))==set(ILL)<=set(metrics.STATES)
    from atlas.card.sensors import REASONS
    assert set(re.search(r'reason=~"([\w|]+)"', rules)[1].split('|'))<=set(REASONS)
    assert tuple(REASONS)==metrics._why_slow

def test_grafana_finds_its_dashboard():
    provider, = yaml.safe_load(
        (deploy/'grafana'/'dashboards'/'atlas.yaml').read_text())['providers']
    mounts = dict(v.split(':')[:2] for v in COMPOSE['services']['grafana']['volumes'])
    source, = (s for s,at in mounts.items() if at.startswith(provider['options']['path']))
    shown = json.loads((deploy/source).read_text())
    wants = [v for v in shown['templating']['list'] if v['type']=='datasource']
    assert [w['query'] for w in wants]==['prometheus']
    source, = yaml.safe_load(
        (deploy/'grafana'/'datasources'/'atlas.yaml').read_text())['datasources']
    assert source['type']=='prometheus' and source['url']=='http://prometheus:9090'
    assert mounts['./grafana']=='/etc/grafana/provisioning'
