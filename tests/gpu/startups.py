"""Starts of true-sized models: from a RAM disk, from a disk, and from packed files. Each start is
a process of its own.

python tests/gpu/startups.py [--emulator] [--shapes gpt-oss-20b:as-shipped,…]
[--ram /dev/shm] [--disk /tmp] [--only disk] [--plain 3] [--output FILE]

`FILE` gets {model: {where: report}}, which page use.bench_startup draws; what is in it of other
models stays. Files are made up, and removed again. The first start, which compiles kernels and
bytecode and writes the packed file, is not kept. `--only` is one of the places; `--plain` says how
many gigabytes are read plainly, in each of four ways, beside each start."""
import json,os,shutil,subprocess,sys,tempfile
from dataclasses import replace
from pathlib import Path
from toys import arguments,toy_shape,verdict
from atlas.card.emulator import Emulator
from atlas.ground.core import human
from atlas.ground.options import EngineConfig
from atlas.use.bench_startup import bench_startup,write_checkpoint

SHAPES = 'qwen3.6-35b-a3b:nvfp4,gpt-oss-20b:as-shipped,llama-3.1-8b:bf16'
COMMAND = 'from atlas.use.cli import main; main()'

def by_command(path, plain, packed=None)->dict:
    "The report of a start in a process of its own"
    out = path.parent/'report.json'
    how = ['--cold','--plain',str(plain),'--output',str(out)]
    if packed:
        how.append(f'--cache-packed={packed}')
    command = [sys.executable,'-c',COMMAND,'bench','startup',str(path),*how]
    env = dict(os.environ)
    env.pop('PYTHONDONTWRITEBYTECODE', None)  # what pip installs is compiled
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=env)
    return json.loads(out.read_text())

def by_emulator(path, plain, packed=None)->dict:
    "The same, here"
    few = dict(max_seq_len=128, max_num_seqs=1, kv_cache_memory=1<<24)
    config = EngineConfig(str(path), Emulator(), **few)
    if packed:
        config = replace(config, cache_packed=str(packed))
    return bench_startup(config, True, 1e9*plain).to_dict()

def starts(path, name, start, plain)->dict:
    "Where -> report, of the files in a folder on the disk `name`"
    packed = path.parent/'packed'
    start(path, plain, packed)
    found = {f'{name}, packed': start(path, plain, packed)}
    shutil.rmtree(packed)
    return {name: start(path, plain)}|found

def wrong(where, r)->list[str]:
    "What is not as it should be in a report"
    bad = []
    if r['packed']!=where.endswith('packed'):
        bad.append(f'{where}: the weights came from elsewhere')
    if r['direct']<r['nbytes'] and not where.startswith('RAM'):
        bad.append(f'{where}: not all went past the page cache')
    return bad

def measured(a):
    "Shapes, and the reports of their starts from one place after the other"
    start = by_emulator if a.emulator else by_command
    shapes = [s.split(':') for s in a.shapes.split(',')]
    if a.emulator:
        shapes = [toy_shape('qwen3-moe', True)]
    for shape,weights in shapes:
        for name,folder in {'RAM disk': a.ram, 'disk': a.disk}.items():
            if a.only not in (None,name):
                continue
            with tempfile.TemporaryDirectory(dir=folder) as d:
                path = write_checkpoint(Path(d)/shape, shape, weights)
                yield shape,starts(path, name, start, a.plain)

def show(shape, where, r):
    rates = f'{human(r["bytes_per_second"], 1000)}/s, {r["of_disk"]:.0%} of plain reads'
    print(f'{shape}, {where}: first token after {r["total_seconds"]:.2f} s; {rates}', flush=True)

def main():
    a = arguments(
        __doc__,
        shapes=dict(default=SHAPES),
        ram=dict(default='/dev/shm'),
        disk=dict(default='/tmp'),
        only={},
        plain=dict(type=float, default=8),
        output=dict(type=Path))
    found,bad = {},[]
    if a.output and a.output.exists():
        found = json.loads(a.output.read_text())
    for shape,reports in measured(a):
        for where,r in reports.items():
            show(shape, where, r)
            bad += wrong(where, r)
        found.setdefault(shape, {}).update(reports)
        if a.output:
            a.output.write_text(json.dumps(found, indent=1)+'\n')
    verdict(bad, 'each start gave its first token')

if __name__=='__main__':
    main()
