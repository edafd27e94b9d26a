"""What nvcc makes of a kernel: its PTX and what it says, the one run of it for all tests that ask.

Kept in pytest's cache by all that matters, which are the text of the kernel and its headers, the options, the architecture and nvcc's version."""
import functools,hashlib,json,os,subprocess,tempfile
from pathlib import Path
from types import SimpleNamespace
from atlas.card.launch import OPTIONS,Source,find_nvcc

@functools.cache
def version(): return subprocess.run([find_nvcc(), '--version'], capture_output=True, text=True, check=True).stdout

def built(cache, name, arch, options=OPTIONS):
    "Compile a kernel, unless that is known; fails with what nvcc says"
    src,digest = Source(name),hashlib.sha256(' '.join(options).encode()).hexdigest()[:12]
    file,key = Path(cache.mkdir('nvcc'))/f'{name}.{arch}.{digest}.json',src.key(arch, tuple(options), version())
    known = json.loads(file.read_text()) if file.exists() else {}
    if known.get('key')!=key:
        known = dict(key=key)|run(src, arch, options)
        made = file.with_suffix(f'.{os.getpid()}')
        made.write_text(json.dumps(known))
        made.replace(file)
    return SimpleNamespace(ptx=known['ptx'], said=known['said'])

def run(src, arch, options):
    "One run of nvcc, down to machine code"
    with tempfile.TemporaryDirectory() as d:
        code = f'-gencode=arch={arch.replace("sm", "compute")},code={arch}'
        keep = ('-Xptxas','-v','--keep','--keep-dir',d)
        r = subprocess.run([find_nvcc(), '-cubin', *options, code, *keep, f'-I{src.root}', src.root/f'{src.name}.cu', '-o', f'{d}/out'], capture_output=True, text=True)
        assert r.returncode==0 and Path(d, 'out').read_bytes()[:4]==b'\x7fELF', r.stderr
        ptx, = Path(d).glob('*.ptx')
        return dict(ptx=ptx.read_text(), said=r.stderr)
