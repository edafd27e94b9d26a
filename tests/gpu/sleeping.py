"""A whole model that sleeps and wakes: from the host's memory and from its packed file, beside
what `dd` reads of that file; without room, and while another model answers. Answers, log
probabilities, graphs and checksums of weights are what they were.

python tests/gpu/sleeping.py [--emulator] [--model qwen3.6-35b-a3b] [--folder FOLDER] [--output
FILE]

`FOLDER` says on which disk the packed file is; `FILE` gets the numbers that page engine.sleep
draws."""
import json,os,subprocess,tempfile,threading
from pathlib import Path
from time import perf_counter
from toys import arguments,greedy,prompt,serve,toy,verdict
from atlas.card.card import on_card
from atlas.cuda.checksum import checksums
from atlas.ground.core import AsleepError,OutOfMemoryError,human
from atlas.ground.packed import flatten

class Sleeper:
    "A model, and what it was like before it slept"
    def __init__(self, m, tokens):
        self.m,self.bad,self.rows = m,[],[]
        self.ids = prompt(tokens, m.config.vocab_size, 1)
        self.arrays = [
            a for a in flatten(m.model.weights())[0].values()
            if on_card(a)]
        self.want,self.sums = self.asked(),self.summed()
        self.graphs = dict(m.engine.stepper.graphs)
    def asked(self):
        return serve(
            self.m.engine,
            [(greedy('a', self.ids, 8, logprobs=3), 0)])
    def summed(self): return checksums(self.m.device, self.arrays)
    def free(self):
        self.m.device.tidy()
        return self.m.device.memory().available
    def check(self, what):
        if self.asked()!=self.want:
            self.bad.append(f'{what}: other answers')
        if self.summed()!=self.sums:
            self.bad.append(f'{what}: other weights')
        if self.m.engine.stepper.graphs!=self.graphs:
            self.bad.append(f'{what}: other graphs')

def nap(s:Sleeper, level, what):
    "Sleep and wake once"
    before = s.free()
    slept = s.m.sleep(level)
    given = s.free()-before
    woke = s.m.wake()
    s.rows.append(dict(
        what=what, level=level, bytes=slept['bytes'], card=given,
        sleep=slept['seconds'], wake=woke['seconds']))
    said = (
        f'{human(slept["bytes"])} given back in {slept["seconds"]:.2f} s, '
        f'of which the card says {human(given)}')
    print(f'{what}: {said}; woke in {woke["seconds"]:.3f} s', flush=True)
    s.check(what)
    return woke['seconds']

def dd(path, part=0, most=8<<30):
    "Bytes a second that `dd` reads, past the page cache, of some bytes of a file"
    with open(path, 'rb') as f:
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    n = min(most, path.stat().st_size)
    skip = int(part*(path.stat().st_size-n))>>24
    command = [
        'dd',f'if={path}','of=/dev/null','bs=16M','iflag=direct',f'count={-(-n>>24)}',
        f'skip={skip}']
    start = perf_counter()
    r = subprocess.run(command, capture_output=True)
    return n/(perf_counter()-start) if r.returncode==0 else 0.

def from_file(s:Sleeper):
    "Level 2, twice, beside the disk's own rate before, between and after"
    store, = s.m._stores
    store.wait()
    rates = [dd(store.path, 0, 2<<30)]
    for i in range(2):
        seconds = nap(s, 2, f'from the file, {i+1}')
        rates.append(dd(store.path, (i+1)/2, 2<<30))
        read = store.readings[-1]
        disk = (rates[-1]+rates[-2])/2
        s.rows[-1] |= dict(read=read.nbytes, reading=read.seconds, disk=disk)
        print(
            f'   {read}; in all {read.nbytes/seconds/1e9:.2f} GB/s; dd {disk/1e9:.2f} GB/s',
            flush=True)

def unchecked(need):
    "In place of the arena's look at what is free"

def no_room(s:Sleeper):
    "Somebody else has taken memory, whether that is seen before or only while mapping"
    m,card = s.m,s.m.device
    m.sleep()
    need = sum(n for r in m.arena.regions.values() for _,n in r.spans())
    for looked in (True,False):
        with card.use():
            other = card.xp.cuda.alloc(max(s.free()-need//2, 1))
        if not looked:
            m.arena._enough = unchecked
        cannot_wake(s)
        m.arena.__dict__.pop('_enough', None)
        still_asleep(s)
        del other
        s.free()
    m.wake()
    s.check('after there was no room')

def cannot_wake(s:Sleeper):
    try:
        s.m.wake()
        s.bad.append('woke without room')
    except OutOfMemoryError as e:
        print(f'no room: {e}', flush=True)

def still_asleep(s:Sleeper):
    if s.m.asleep!=1 or s.m.arena.mapped:
        s.bad.append('half awake')
    try:
        s.asked()
        s.bad.append('answered asleep')
    except AsleepError:
        pass

def in_company(s:Sleeper, other):
    "Another model answers while this one sleeps, wakes, and sleeps again"
    ids = prompt(90, other.config.vocab_size, 2)
    def ask():
        return serve(other.engine, [(greedy('b', ids, 100, logprobs=1), 0)])
    want = ask()
    s.m.sleep()
    if ask()!=want:
        s.bad.append('another answers otherwise while one sleeps')
    found = []
    def asks():
        for _ in range(8):
            found.append(ask()==want)
    t = threading.Thread(target=asks)
    t.start()
    s.m.wake()
    s.m.sleep()
    s.m.wake()
    t.join()
    if found!=[True]*8:
        s.bad.append('another answers otherwise while one wakes')
    s.check('in company')

def sleeper(a, folder):
    "A model that can sleep, whose packed file is in `folder`"
    if a.emulator:
        m = toy('qwen3.6-moe', emulator=True, seqs=2, context=256, cache_packed=folder)
    else:
        m = toy(a.model, seqs=128, context=8192, kv_cache_memory=32<<30, cache_packed=folder)
    print(f'{m.device.describe()}; {m.startup}', flush=True)
    s = Sleeper(m, 30 if a.emulator else 300)
    for store in m._stores:
        store.wait()
    return s

def all_naps(s:Sleeper, emulator):
    nap(s, 1, 'from memory, a new copy')
    nap(s, 1, 'from memory')
    from_file(s)
    if not emulator:
        no_room(s)
        other = toy('qwen3.6-moe')
        in_company(s, other)
        other.close()

def main():
    a = arguments(
        __doc__, model=dict(default='qwen3.6-35b-a3b'), folder={}, output=dict(type=Path))
    with tempfile.TemporaryDirectory(dir=a.folder) as folder:
        s = sleeper(a, folder)
        all_naps(s, a.emulator)
        said = dict(
            machine=s.m.device.describe(),
            model=s.m.name,
            weights=sum(x.nbytes for x in s.arrays),
            naps=s.rows)
        s.m.close()
    if a.output:
        a.output.write_text(json.dumps(said, indent=1)+'\n')
    verdict(s.bad, 'what slept is what it was')

if __name__=='__main__':
    main()
