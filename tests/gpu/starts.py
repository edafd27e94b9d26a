"""Weights packed by the card while they are read, and by the host: the same bits, and how fast
both are.

python tests/gpu/starts.py [--emulator] [--folder FOLDER] [--shapes qwen3.6-35b-a3b:nvfp4,…]
python tests/gpu/starts.py --beside-dd 3 [--plain 14] [--layers 8] [--folder FOLDER]
    [--shapes …] [--output FILE]

Files are made up, of true size, and removed again; a shape may be a folder with files, which
stay. `FOLDER` may be on a disk or a RAM disk. With `--beside-dd` nothing is compared: files are
loaded so many times, by the card, and what `dd` and other plain reads get from the same disk is
measured before and after each time, for disks are slower in one minute than in another. A load
had a quiet disk if the best plain reads before and after it differ by 5 % at most. The best of
four is a lucky one, so the middle of each way of reading is said, too. `--plain` says how many GB
of the files each of them reads: a disk may give the first few faster."""
import json,shutil,tempfile
from contextlib import contextmanager
from dataclasses import asdict,dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from sleeping import dd
from toys import arguments,verdict
from atlas.card.device import get_device
from atlas.card.emulator import Emulator
from atlas.cuda.pack import Packed,packer
from atlas.ground.core import human
from atlas.ground.weights import IGNORE,load,open_checkpoint
from atlas.model.model import plan
from atlas.use.bench_startup import SETTINGS,forget,raw_read,write_checkpoint

class ByHost(packer):
    "The loader without what a card does by itself"
    def staging(self, size): return None

def loaded(path, card, put, note=None):
    "What is loaded, without images"
    with open_checkpoint(path) as ck:
        m,wants = plan(ck)
        parts = '','mtp'
        ws = load(
            ck, wants, card, False, (*IGNORE,*m.ignore), parts,
            put=put, note=note)
    card.synchronize()
    return ws

def timed(path, card, put, said):
    "The same, and how long it took"
    start,notes = perf_counter(),[]
    ws = loaded(path, card, put, notes.append)
    print(f'  {said}: {perf_counter()-start:.2f} s, {notes[0]}', flush=True)
    return ws

def unlike(card, a, b):
    "Names under which two loaded models differ"
    def same(x, y):
        if x is None or y is None:
            return x is y
        return bool((x.reshape(-1).view('uint8')==y.reshape(-1).view('uint8')).all())
    def equal(p, q):
        if not isinstance(p, Packed):
            return same(p, q)
        return all(
            same(getattr(p, k), getattr(q, k))
            for k in ('w','s','gs'))
    return [k for k in a if not equal(a[k], b[k])]

def compared(path, card):
    "Names that differ"
    by_card = timed(path, card, packer(card), 'by the card')
    timed(path, card, packer(card), 'again')
    card.tidy()  # two copies are what some cards have room for
    return unlike(card, by_card, timed(path, card, ByHost(card), 'by the host'))

def plain(files, i, most)->dict:
    "Bytes a second that `dd` and other plain reads get, each beginning at another file"
    def turned(k): return files[(i+k)%len(files):]+files[:(i+k)%len(files)]
    each = [raw_read(turned(k), *how, most) for k,how in enumerate(SETTINGS)]
    print('  plain reads:', *(human(v, 1000) for v in each), flush=True)
    return dict(dd=dd(turned(len(SETTINGS))[0], most=int(most)), best=max(each), each=each)

@dataclass
class Loaded:
    "Bytes a second of a load and of plain reads around it"
    seconds:float
    whole:float # Of the load
    reading:float # While it read
    dd:float
    best:float # Of other plain reads
    quiet:bool # Were the best before and after it the same?

    def show(self):
        rates = {k: getattr(self, k) for k in ('whole','reading','dd','best')}
        said = ', '.join(f'{k} {human(v, 1000)}/s' for k,v in rates.items())
        parts = ', '.join(f'{k} {rates[k]/self.best:.0%} of the best' for k in ('whole','reading'))
        print(f'  {self.seconds:.2f} s: {said}; {parts}{"; quiet"*self.quiet}', flush=True)

def one_load(path, card, files, i, before, most):
    "A load, the plain reads after it, and its bytes"
    start,notes = perf_counter(),[]
    loaded(path, card, packer(card), notes.append)
    seconds,r = perf_counter()-start,notes[0]
    after = plain(files, i+1, most)
    best = before['best'],after['best']
    load = Loaded(
        seconds,
        r.nbytes/seconds,
        r.rate,
        dd=(before['dd']+after['dd'])/2,
        best=sum(best)/2,
        quiet=min(best)>=.95*max(best))
    load.show()
    return load,after,r.nbytes

def beside(path, card, times, most)->dict:
    "Rates of loads, and of plain reads between them"
    files = sorted(path.glob('*.safetensors'))
    forget(files)
    reads,loads = [plain(files, 0, most)],[]
    for i in range(times):
        load,after,nbytes = one_load(path, card, files, i, reads[-1], most)
        loads.append(load)
        reads.append(after)
    loads_as = [asdict(l) for l in loads]
    middle = {k: median(l[k] for l in loads_as) for k in loads_as[0]}
    found = dict(nbytes=nbytes, loads=loads_as, median=middle, of=_parts(loads, ''))
    found['ways'] = _ways(reads, middle['whole'])
    if quiet := [l for l in loads if l.quiet]:
        found['of_quiet'] = _parts(quiet, ' on a quiet disk')
    return found

def _ways(reads, whole)->list:
    "What each way to read plainly gets in the middle; and a whole load of the best of them, shown"
    ways = [median(each) for each in zip(*(r['each'] for r in reads))]
    rates = ', '.join(f'{human(v, 1000)}/s' for v in ways)
    print(f'  ways to read, each in the middle: {rates}; a load {whole/max(ways):.0%} of the best')
    return ways

def _parts(loads, where)->dict:
    "What part of plain reads whole loads reach, in the middle; it is shown, too"
    p = {k: median(l.whole/getattr(l, k) for l in loads) for k in ('dd','best')}
    print(
        f'  {len(loads)} whole loads{where}: {p["dd"]:.0%} of dd, '
        f'{p["best"]:.0%} of the best plain reads')
    return p

def made(shape, weights, folder, layers):
    "The folder of a model's files"
    path = write_checkpoint(folder/shape, shape, weights, layers=layers)
    size = sum(f.stat().st_size for f in path.glob('*.safetensors'))
    print(f'{shape} in {weights}, {human(size, 1000)}', flush=True)
    return path

@contextmanager
def files_of(s, folder, layers):
    "A folder with a model's files, made up unless it is there"
    shape,_,weights = s.partition(':')
    if Path(shape).is_dir():
        yield Path(shape)
        return
    path = made(shape, weights, folder, layers)
    yield path
    shutil.rmtree(path)

def main():
    default = 'qwen3.6-35b-a3b:nvfp4,gpt-oss-20b:as-shipped,llama-3.1-8b:bf16,qwen3-30b-a3b:fp8'
    a = arguments(
        __doc__,
        folder={},
        shapes=dict(default=default),
        beside_dd=dict(type=int),
        plain=dict(type=float, default=3),
        layers=dict(type=int),
        output=dict(type=Path))
    card = Emulator() if a.emulator else get_device('cuda')
    shapes = 'smollm2-135m:bf16' if a.emulator else a.shapes
    layers = 1 if a.emulator else a.layers
    bad,found = [],{}
    with tempfile.TemporaryDirectory(dir=a.folder) as d:
        for s in shapes.split(','):
            with files_of(s, Path(d), layers) as path:
                if a.beside_dd:
                    found[s] = beside(path, card, a.beside_dd, a.plain*1e9)
                else:
                    bad += [f'{s}: {k}' for k in compared(path, card)]
    said = dict(machine=card.describe(), models=found)
    if a.output:
        a.output.write_text(json.dumps(said, indent=1)+'\n')
    verdict(bad, 'loaded beside plain reads' if a.beside_dd else 'the same bits, whoever packs')

if __name__=='__main__':
    main()
