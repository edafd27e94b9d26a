"""Weights packed by the card while they are read, and by the host: the same bits, and how fast both are.

    python tests/gpu/starts.py [--emulator] [--folder FOLDER] [--shapes qwen3.6-35b-a3b:nvfp4,…]

Files are made up, of true size, and removed again. `FOLDER` may be on a disk or a RAM disk."""
import shutil,tempfile
from pathlib import Path
from time import perf_counter
from toys import arguments,verdict
from atlas.card.device import get_device
from atlas.card.emulator import Emulator
from atlas.cuda.pack import Packed,packer
from atlas.ground.core import human
from atlas.ground.weights import IGNORE,load,open_checkpoint
from atlas.model.model import plan
from atlas.use.bench_startup import write_checkpoint

class ByHost(packer):
    "The loader without what a card does by itself"
    def staging(self, size): return None

def timed(path, card, put, said):
    "What is loaded, without images"
    start,notes = perf_counter(),[]
    with open_checkpoint(path) as ck:
        m,wants = plan(ck)
        ws = load(ck, wants, card, False, (*IGNORE,*m.ignore), ('','mtp'), put=put, note=notes.append)
    card.synchronize()
    print(f'  {said}: {perf_counter()-start:.2f} s, {notes[0]}', flush=True)
    return ws

def unlike(card, a, b):
    "Names under which two loaded models differ"
    def same(x, y):
        if x is None or y is None: return x is y
        return bool((x.reshape(-1).view('uint8')==y.reshape(-1).view('uint8')).all())
    def equal(p, q):
        if not isinstance(p, Packed): return same(p, q)
        return all(same(getattr(p, k), getattr(q, k)) for k in ('w','s','gs'))
    return [k for k in a if not equal(a[k], b[k])]

def one(shape, weights, folder, card, layers):
    "Names that differ, of one shape"
    path = write_checkpoint(folder/shape, shape, weights, layers=layers)
    size = sum(f.stat().st_size for f in path.glob('*.safetensors'))
    print(f'{shape} in {weights}, {human(size, 1000)}', flush=True)
    try:
        by_card = timed(path, card, packer(card), 'by the card')
        timed(path, card, packer(card), 'again')
        return unlike(card, by_card, timed(path, card, ByHost(card), 'by the host'))
    finally: shutil.rmtree(path)

def main():
    default = 'qwen3.6-35b-a3b:nvfp4,gpt-oss-20b:as-shipped,llama-3.1-8b:bf16,qwen3-30b-a3b:fp8'
    a = arguments(__doc__, folder={}, shapes=dict(default=default))
    card = Emulator() if a.emulator else get_device('cuda')
    shapes = 'smollm2-135m:bf16' if a.emulator else a.shapes
    layers = 1 if a.emulator else None
    bad = []
    with tempfile.TemporaryDirectory(dir=a.folder) as d:
        for s in shapes.split(','):
            shape,weights = s.split(':')
            bad += [f'{s}: {k}' for k in one(shape, weights, Path(d), card, layers)]
    verdict(bad, 'the same bits, whoever packs')

if __name__=='__main__': main()
