"""A server in a control group whose memory runs out: another process of the group takes it, step
by step, while answers are asked for. Caches are given back before anything is killed, answers
stay what they were, and the cache is had again afterwards. `python tests/long/pressure.py
[--model tiny] [--output FILE]`

It needs the right to make a group (root, or systemd) and ends with 3 where there is none.
`--unwatched` takes the watch out: then somebody is killed."""
import argparse,json,os,re,signal,subprocess,sys,threading,time
from contextlib import contextmanager
from pathlib import Path
import httpx

M = 1<<20
ROOT = Path(__file__).parents[2]
CGROUPS = Path('/sys/fs/cgroup')

# -- a group -------------------------------------------------------------------------------------

class Group:
    "A control group of memory, of version 1 or 2"
    names = {
        1: ('memory.limit_in_bytes','memory.usage_in_bytes'), 2: ('memory.max','memory.current')}
    def __init__(self, parent:Path, version:int):
        self.path,self.version = parent/f'atlas-pressure-{os.getpid()}',version
        self._limit,self._usage = self.names[version]
        self.path.mkdir()
        if (self.path/self._limit).exists():
            return
        self.path.rmdir()
        raise OSError(f'{parent} has no controller of memory for its groups')
    def read(self, name): return (self.path/name).read_text().strip()
    def limit(self, n:int):
        (self.path/self._limit).write_text(str(n))
    def join(self):
        "Put this process into it"
        (self.path/'cgroup.procs').write_text(str(os.getpid()))
    @property
    def used(self)->int: return int(self.read(self._usage))
    @property
    def stat(self)->dict:
        lines = [x.split() for x in self.read('memory.stat').splitlines()]
        return {k.removeprefix('total_'): int(n) for k,n in lines}
    @property
    def anonymous(self)->int:
        "Bytes that are no file's"
        return self.stat['rss' if self.version==1 else 'anon']
    @property
    def events(self)->dict:
        "What the kernel counts: times that the limit was met, and who was killed"
        if self.version==2:
            return _numbers(self.read('memory.events'))
        return dict(max=int(self.read('memory.failcnt')))|_numbers(self.read('memory.oom_control'))
    def close(self):
        for _ in range(100):
            try:
                return self.path.rmdir()
            except OSError:
                time.sleep(.1) # somebody is still ending

def _numbers(text):
    return {k: int(n) for k,n in re.findall(r'^(\w+) (\d+)$', text, re.M)}

def _parents():
    "(folder, version) where a group might be made: within that of this process"
    for line in Path('/proc/self/cgroup').read_text().splitlines():
        _,controllers,path = line.split(':', 2)
        if 'memory' in controllers.split(','):
            yield CGROUPS/'memory'/path.strip('/'),1
        if not controllers:
            yield CGROUPS/path.strip('/'),2

@contextmanager
def limited_group():
    "A new group; ends the program with 3 where there is none to be had"
    why = ['no controller of memory']
    for parent,version in _parents():
        try:
            g = Group(parent, version)
        except OSError as e:
            why.append(str(e))
            continue
        try:
            yield g
        finally:
            g.close()
        return
    print(f'skipped: {"; ".join(why)}')
    raise SystemExit(3)

# -- a server, and who takes its memory ----------------------------------------------------------

SERVE = 'import sys; from atlas.use.cli import main; main()'
UNWATCHED = 'import atlas.service.worker as w; w.Easing.__call__ = lambda self, do: None; w.main()'
TAKE = '''
import sys,time
n,step,pause = int(sys.argv[1]),1<<20,float(sys.argv[2])
held = []
for i in range(n):
    held.append(b"x"*step)
    print(i+1, flush=True)
    time.sleep(pause)
sys.stdin.read()
'''

class Server:
    def __init__(self, group, a):
        flags = [
            '--device','cpu','--port','0','--kv-cache-memory',str(a.cache),'--max-num-seqs',
            str(a.seqs),'--max-seq-len','1024']
        self.lines,self.ready = [],threading.Event()
        env = os.environ|dict(PYTHONPATH=str(ROOT), OMP_NUM_THREADS='2', OPENBLAS_NUM_THREADS='2')
        self.process = subprocess.Popen(
            [sys.executable,'-c',serving(a.unwatched),'serve',a.model,*flags],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            preexec_fn=group.join)
        threading.Thread(target=self._read, daemon=True).start()
        self.model = a.model
        while not self.ready.wait(1):
            if self.process.poll() is None and 'has failed' not in ''.join(self.lines):
                continue
            self.process.kill()
            raise SystemExit('failed: no server\n'+''.join(self.lines))
    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)
            if m := re.search(r'http://[\w.]+:(\d+)', line):
                self.client = httpx.Client(base_url=f'http://127.0.0.1:{m[1]}', timeout=300)
                self.ready.set()
    def ask(self, i:int)->tuple:
        "What is said to the prompt `i`, and log probabilities"
        body = dict(
            model=self.model, prompt=text(i), max_tokens=4, temperature=0,
            logprobs=1)
        r = self.client.post('/v1/completions', json=body)
        if r.status_code!=200:
            return r.status_code,r.text
        x = r.json()['choices'][0]
        return x['text'],x['logprobs']['token_logprobs']
    def metric(self, name)->float:
        found = re.search(rf'^{name}(?:{{[^}}]*}})? (\S+)$', self.client.get('/metrics').text, re.M)
        return float(found[1]) if found else 0.

def serving(unwatched):
    "The command, and where its models are to end themselves"
    if not unwatched:
        return SERVE
    begin = 'import atlas.service.gateway as g, sys'
    return f'{begin}; g.COMMAND = [sys.executable, "-c", {UNWATCHED!r}]; {SERVE}'

def text(i):
    "A prompt of its own, of some hundred tokens"
    words = (
        'the cat','a dog','an old cow','the river','some bread','a small bird','the house',
        'a red ball')
    return ' '.join(f'{words[(i*j+j//7)%8]} saw {words[(i+j)%8]}.' for j in range(i+3, i+43))

class Taker:
    "A process of the group that takes memory, MiB by MiB, and holds it"
    def __init__(self, group, mib, rate):
        self.mib,self.taken = mib,0
        self.process = subprocess.Popen(
            [sys.executable,'-c',TAKE,str(mib),str(1/rate)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, preexec_fn=group.join)
        threading.Thread(target=self._read, daemon=True).start()
    def _read(self):
        for line in self.process.stdout:
            self.taken = int(line)
    @property
    def going(self)->bool: return self.process.poll() is None and self.taken<self.mib
    def close(self):
        self.process.kill()
        self.process.wait()

def stalled()->str:
    "What the kernel says of stalls, if it does"
    try:
        return Path('/proc/pressure/memory').read_text().splitlines()[1].split(' total')[0]
    except (OSError,IndexError):
        return 'no stalls are counted'

class Watch:
    "Looks at all of it now and then"
    def __init__(self, g, s, taker, limit):
        self.g = g
        self.s = s
        self.taker = taker
        self.limit = limit
        self.rows,self.answers,self.over = [],0,threading.Event()
        self.start = time.monotonic()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()
    def _run(self):
        while not self.over.wait(.5):
            try:
                lent = self.s.metric('atlas:kv_blocks_lent')
            except httpx.HTTPError:
                continue
            seconds = round(time.monotonic()-self.start, 1)
            row = dict(
                seconds=seconds, taken=self.taker.taken,
                used=self.g.used//M, limit=self.limit//M,
                lent=lent, answers=self.answers)
            self.rows.append(row)
            if len(self.rows)%5==1:
                print(', '.join(f'{k} {v:g}' for k,v in row.items())+f'; {stalled()}', flush=True)
    def close(self):
        self.over.set()
        self.thread.join()

def squeeze(g, s, want, grown, a)->list[str]:
    """Take memory, some of it of the `grown` bytes of cache, while answers are asked for; what is
    wrong"""
    limit = tightened(g, a.room)
    taker = Taker(g, (a.room+int(a.part*grown))//M, a.rate)
    watch = Watch(g, s, taker, limit)
    wrong = answers_meanwhile(s, want, taker, watch)
    watch.close()
    if a.output:
        said = dict(model=a.model, version=g.version, events=g.events, rows=watch.rows)
        a.output.write_text(json.dumps(said)+'\n')
    lent = 0 if wrong else s.metric('atlas:kv_blocks_lent')
    print(
        f'{taker.taken} MiB of {taker.mib} taken, {watch.answers} answers, {lent:.0f} blocks lent; '
        f'events: {g.events}', flush=True)
    if taker.taken<taker.mib:
        wrong.append(f'who takes memory ended at {taker.taken} MiB')
    if not lent:
        wrong.append('nothing was given back')
    if g.events.get('oom_kill'):
        wrong.append('somebody was killed')
    taker.close()
    return wrong

def tightened(g, room)->int:
    "The limit that leaves `room` beside what the group has now, files aside; it is set"
    state = g.stat
    cached = state.get('inactive_file', 0)+state.get('active_file', 0)
    limit = g.used-cached+room
    g.limit(limit)
    time.sleep(1.5) # a limit is there long before somebody meets it, and has been seen
    return limit

def answers_meanwhile(s, want, taker, watch)->list[str]:
    "Ask until all is taken and each prompt was answered as often; what is wrong"
    n = len(want)
    try:
        while taker.going or watch.answers%n:
            i = watch.answers%n
            got = s.ask(i)
            watch.answers += 1
            if got!=want[i]:
                return [f'prompt {i}: {str(got)[:200]}']
    except httpx.TransportError as e:
        return [f'the server: {type(e).__name__}']
    return []

def relaxed(s)->list[str]:
    "Is the cache had again?"
    for _ in range(90):
        if not s.metric('atlas:kv_blocks_lent'):
            return []
        time.sleep(1)
    return [f'{s.metric("atlas:kv_blocks_lent"):.0f} blocks are lent for good']

def run(g, a)->list[str]:
    g.limit(a.most)
    s = Server(g, a)
    try:
        before = g.anonymous
        want = [s.ask(i) for i in range(a.prompts)]
        grown = g.anonymous-before
        print(
            f'{a.prompts} prompts answered; {g.anonymous//M} MiB, '
            f'{grown//M} of them since the start', flush=True)
        wrong = squeeze(g, s, want, grown, a)
        if wrong:
            return wrong+s.lines[-5:]
        g.limit(a.most)
        wrong = relaxed(s)
        if [s.ask(i) for i in range(a.prompts)]!=want:
            wrong.append('other answers afterwards')
        print(''.join(x for x in s.lines if 'Memory is' in x or 'taken again' in x), end='')
        return wrong
    finally:
        s.process.send_signal(signal.SIGINT)
        try:
            s.process.wait(30)
        except subprocess.TimeoutExpired:
            s.process.kill()

def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument('--model', default='demo')
    p.add_argument('--cache', type=int, default=256*M, help='bytes of the cache')
    p.add_argument(
        '--seqs', type=int, default=4, help='the cache has room for so many of 1,024 tokens')
    p.add_argument('--prompts', type=int, default=16)
    p.add_argument(
        '--room', type=int, default=256*M,
        help='bytes that are left beside the server when others begin')
    p.add_argument(
        '--part', type=float, default=.4,
        help='of what the server has taken for its answers, that they take, too')
    p.add_argument('--rate', type=float, default=10, help='MiB a second that they take')
    p.add_argument('--most', type=int, default=4<<30, help='the limit before that')
    p.add_argument('--output', type=Path, help='gets the numbers that page engine.ease draws')
    p.add_argument('--unwatched', action='store_true', help='nobody looks at memory')
    a = p.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1)) # what was started is ended all the same
    with limited_group() as g:
        print(f'control groups of version {g.version}; {stalled()}')
        wrong = run(g, a)
    for w in wrong:
        print('wrong:', w.rstrip())
    print('failed' if wrong else 'ok: caches were given back, nobody was killed, answers went on')
    raise SystemExit(bool(wrong))

if __name__=='__main__':
    main()
