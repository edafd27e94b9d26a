"""A worker whose engine follows a script: what each prompt says in <marks> is what goes wrong.
`atlas.service.worker` does the rest, as for a model.

Options of the model: those of `ScriptConfig`, `max_seq_len` and `max_queue`."""
import itertools,os,signal,sys,time
from functools import partial
from pathlib import Path
from atlas.ground.core import CudaFault,NumericError,OutOfMemoryError
from atlas.ground.requests import Event
from atlas.service.worker import Workload,main
from atlas.text.tokenizer import byte_tokenizer

TOK = byte_tokenizer()

class ScriptedEngine:
    """Says `say`, a byte a step, and then an end, to everyone; a request has a block for each 16
    tokens"""
    def __init__(self, say):
        self.say = TOK.encode(say)
        self.live = {}  # by id: the request, the text of its prompt, and how many tokens it has
        self.corrupted,self.steps = 0,0
    def add(self, r):
        said = TOK.decode(list(r.prompt))
        self.live[r.id] = [r, said, 0]
    def abort(self, rid):
        return [Event(rid, finish='abort')] if self.live.pop(rid, None) else []
    has_work = property(lambda self: bool(self.live))
    def stats(self):
        blocks = sum(-(-(len(r.prompt)+n)//16) for r,_,n in self.live.values())
        return dict(
            num_requests_running=len(self.live), num_requests_waiting=0, kv_cache_usage_perc=0.,
            blocks_used=blocks, corrupted_requests_total=self.corrupted, steps_total=self.steps)
    def step(self):
        time.sleep(.002)  # a model's step takes a while, and so can be interrupted
        self.steps += 1
        out = [e for rid in list(self.live) if (e := self.one(rid))]
        for e in out:
            if e.finish:
                del self.live[e.id]
        return out
    def one(self, rid):
        r,said,n = self.live[rid]
        if '<oom>' in said:
            return Event(rid, finish='error', error=NO_ROOM, code=OutOfMemoryError.code)
        if n==3 and '<nan>' in said:
            self.corrupted += 1
            return Event(rid, finish='error', error=NO_NUMBERS, code=NumericError.code)
        if n==3:
            self.go_wrong(rid, said)
            if '<hold>' in said:
                return
        self.live[rid][2] = n = n+1
        if n>len(self.say) and '<endless>' not in said:
            return Event(rid, 0, finish='stop')
        last = n==(r.params.max_tokens or 10**9)
        return Event(rid, self.say[(n-1)%len(self.say)], finish='length' if last else None)
    def go_wrong(self, rid, said):
        "What is marked in a prompt happens to the whole process"
        if '<sticky>' in said:
            raise CudaFault(
                'CUDA error 700, illegal memory access, seen at a step; it happened in gemv')
        if '<bug>' in said:
            raise KeyError('a secret of the engine')
        if '<die>' in said:
            os.kill(os.getpid(), signal.SIGKILL)
        if '<freeze>' in said:
            self.live[rid][1] = ''
            os.kill(os.getpid(), signal.SIGSTOP)
        if '<garbage>' in said:
            os.write(int(sys.argv[-4]), b'Segmentation fault (core dumped)\n')
        if '<stuck>' in said:
            time.sleep(10**6)

NO_ROOM = 'There was no memory for the prompt: 3 GiB were asked for, 1 GiB are free'
NO_NUMBERS = 'The model produced logits that are not finite numbers'

def clock_that_jumps():
    "From now on the wall clock goes forth and back by more than a year"
    days,true = itertools.cycle((86400*400, -86400*400)),time.time
    def jumping(): return true()+next(days)
    time.time = jumping

def opened(wrong, path):
    "The files of a model are open; or what is `wrong` with them happens"
    if wrong=='die':
        os._exit(3)
    if wrong=='bug':
        raise KeyError('a secret of the loader')
    if wrong=='die twice' and len(Path(path).read_text().split())<3:
        os._exit(3)
    if wrong=='oom':
        raise OutOfMemoryError(
            'The weights take 70 GiB and a step 1 GiB; 12 GiB can be used of 13 GiB that are free',
            hint='Choose a smaller model')
    if wrong=='host oom':
        raise MemoryError('Unable to allocate 70. GiB for an array')
    if wrong=='hang':
        time.sleep(10**6)

def load(options, meter):
    if path := options.get('lives'):
        with open(path, 'a') as f:
            f.write(f'{os.getpid()}\n')
    if options.get('clock'):
        clock_that_jumps()
    meter.stage('open')
    opened(options.get('at_load'), path)
    meter.stage('weights')
    with meter(100, 'loading') as bar:
        for _ in range(100):
            bar.update(1)
    info = dict(
        name=options['name'], max_seq_len=options.get('max_seq_len', 4096), vocab_size=256,
        eos_ids=[], max_queue=options.get('max_queue', 64))
    engine = ScriptedEngine(options.get('say', 'Hello there, reader.'))
    bed = Bed(engine, options.get('asleep', ''))
    ops = dict(double=double, nap=nap, naps=NAPS.copy, sleep=bed.sleep, wake=bed.wake)
    w = Workload(engine, info, ops)
    if path := options.get('closes'):
        w.close = partial(write_down, path)
    return w

def write_down(path):
    "As a cache is, which takes a while"
    time.sleep(.3)
    Path(path).touch()

class Bed:
    "What sleeping is for a scripted engine: it has nobody to answer then"
    def __init__(self, engine, wrong):
        self.engine,self.wrong = engine,wrong
        self.level = self.tries = 0
    def sleep(self, level):
        assert not self.engine.has_work, 'it is at work'
        self.tries += 1
        if self.wrong=='no sleep' and self.tries==1:
            raise OutOfMemoryError('There is no room for a copy')
        if self.wrong=='dies asleep' and self.tries==1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.level = max(level, self.level)
        self.engine.add,self.add = self.refuse,self.engine.add
        return dict(level=self.level, bytes=1<<30, seconds=.1)
    def refuse(self, r):
        raise AssertionError('a request to a model that is asleep')
    def wake(self):
        self.tries += 1
        if self.wrong=='no waking' and self.tries==2:
            raise OutOfMemoryError('Waking takes 2 GiB, and 1 GiB are free')
        if self.wrong=='dies waking' and self.tries==2:
            os.kill(os.getpid(), signal.SIGKILL)
        self.level,self.engine.add = 0,self.add
        return dict(bytes=1<<30, seconds=.1)

def double(x): return 2*x

NAPS = [] # Those that were taken

def nap(seconds):
    NAPS.append(seconds)
    time.sleep(seconds)
    return 'rested'

if __name__=='__main__':
    main(load)
