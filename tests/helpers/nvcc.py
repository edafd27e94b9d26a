"""What nvcc makes of a kernel: its PTX and what it says, the one run of it for all tests that ask.

Kept in pytest's cache by all that matters, which are the text of the kernel and its headers,
the options, the architecture and nvcc's version."""
import functools,hashlib,json,os,subprocess,tempfile
from pathlib import Path
from types import SimpleNamespace
from atlas.card.launch import OPTIONS,Source,find_nvcc

@functools.cache
def version():
    "What nvcc says of its version"
    return subprocess.check_output([find_nvcc(), '--version'], text=True)

def built(cache, name, arch, options=OPTIONS):
    "Compile a kernel, unless that is known; fails with what nvcc says"
    src = Source(name)
    key = src.key(arch, tuple(options), version())
    digest = hashlib.sha256(' '.join(options).encode()).hexdigest()[:12]
    file = Path(cache.mkdir('nvcc'))/f'{name}.{arch}.{digest}.json'
    known = json.loads(file.read_text()) if file.exists() else {}
    if known.get('key')!=key:
        known = dict(key=key)|run(src, arch, options)
        made = file.with_suffix(f'.{os.getpid()}')
        made.write_text(json.dumps(known))
        made.replace(file)
    return SimpleNamespace(ptx=known['ptx'], said=known['said'])

def cubin(folder, name, arch, options, out):
    "Compile kernel `name` of a folder to the file `out`, down to machine code: how that went"
    target = f'-gencode=arch={arch.replace("sm", "compute")},code={arch}'
    command = [find_nvcc(), '-cubin', '-Xptxas', '-v', *options, target, '-I.', f'{name}.cu']
    # From inside: an assert's message has the path of the file
    return subprocess.run([*command, '-o', out], cwd=folder, capture_output=True, text=True)

def run(src, arch, options):
    "One run of nvcc, and the PTX that it kept"
    with tempfile.TemporaryDirectory() as d:
        out = Path(d, 'out')
        r = cubin(src.root, src.name, arch, (*options, '--keep', '--keep-dir', d), out)
        assert r.returncode==0 and out.read_bytes()[:4]==b'\x7fELF', r.stderr
        ptx, = Path(d).glob('*.ptx')
        return dict(ptx=ptx.read_text(), said=r.stderr)
