"""Packaging: the metadata is settings.ini, and the top-level kernels/ folder travels in the wheel
as atlas/kernels."""
import hashlib,json,os,platform,shlex,shutil,subprocess,sys
from concurrent.futures import ThreadPoolExecutor
from configparser import ConfigParser
from pathlib import Path
from setuptools import find_namespace_packages,find_packages,setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

here = Path(__file__).parent
ini = ConfigParser(delimiters=['='])
ini.read(here/'settings.ini', encoding='utf-8')
cfg = ini['DEFAULT']
kernels = ['atlas.kernels', *(f'atlas.kernels.{o}' for o in find_namespace_packages('kernels'))]

def words(name, default=''):
    "Words of an environment variable"
    return os.environ.get(name, default).split()

# Architectures of cards: none, and kernels are shipped as sources only
archs = [o if o.startswith('sm_') else f'sm_{o}'
    for o in words('ATLAS_CUDA_ARCHS', 'sm_90a sm_121a')]
# Of kernels/variants.json, or all: compile what they need, too. It takes minutes of nvcc, and saves
# half a minute at a first start
models = words('ATLAS_CUBINS')
# Bytes of machine code that a wheel may hold: what is beyond is compiled when it is first loaded
limit = 64<<20
# Processors that a wheel has a library for, as atlas.card.processor has them
HOST = dict(x86_64='x86-64-v3', aarch64='armv8-a')
HOST_FLAGS = ('-std=c++17', '-O2', '-ffp-contract=off', '-fPIC', '-shared', '-fvisibility=hidden',
    '-Wno-psabi', '-pthread')

def warn(line):
    print(line, file=sys.stderr)

def find_nvcc():
    "nvcc on PATH, else in `CUDA_HOME` or the toolkit's usual place, else None"
    usual = Path(os.environ.get('CUDA_HOME') or '/usr/local/cuda')/'bin'/'nvcc'
    return shutil.which('nvcc') or (usual if usual.exists() else None)

def chosen(inc):
    "What kernels/variants.json lists for the models in ATLAS_CUBINS, as sets of options by card"
    path = inc/'variants.json'
    listed = json.loads(path.read_text(encoding='utf-8')) if path.exists() else {}
    unknown = set(models)-{'all', *listed}
    if unknown:
        has = ', '.join(listed) or 'nothing'
        sys.exit(f'ATLAS_CUBINS: kernels/variants.json has no {", ".join(sorted(unknown))}. '
            f'It has: {has}; "all" is all of them')
    return [v for k,v in listed.items() if {k,'all'}&set(models)]

def variants(inc):
    """(source, options, architecture) of what is compiled: every kernel as it stands, then with the
    options that the models in ATLAS_CUBINS need"""
    plain = [(cu, (), a) for cu in sorted(inc.glob('*.cu')) for a in archs]
    more = set()
    for by_arch in chosen(inc):
        for a in archs:
            more |= {(a, name, tuple(options)) for name,*options in by_arch.get(a, []) if options}
    wanted = [(inc/f'{name}.cu', options, a) for a,name,options in sorted(more)]
    return plain+[v for v in wanted if v[0].exists()]

def made_in(inc):
    "Bytes of machine code there so far; a file may go while one looks"
    def size(p):
        try:
            return p.stat().st_size
        except OSError:
            return 0
    return sum(map(size, inc.glob('*.cubin')))

def nvcc_says(command, out):
    "Run nvcc: why there is no cubin, or nothing"
    try:
        r = subprocess.run(command, capture_output=True, text=True, timeout=600)
    except (OSError,subprocess.TimeoutExpired) as e:
        return str(e)
    if r.returncode:
        return (r.stderr or r.stdout).strip() or f'nvcc ended with {r.returncode}'
    if not (out.exists() and out.read_bytes()[:4]==b'\x7fELF'):
        return 'nvcc wrote no cubin'

def compile_cubin(nvcc, inc, cu, options, arch):
    """Compile one variant beside its source. A failure is told and leaves nothing: the kernel is
    then compiled when it is first loaded"""
    digest = hashlib.sha256(' '.join(options).encode()).hexdigest()[:12]
    digest = f'.{digest}' if options else ''  # as atlas.card.launch.cubin_name has it
    out = cu.with_suffix(f'{digest}.{arch}.cubin')
    if made_in(inc)>limit:
        return warn(f'warning: {out.name} is left out: over {limit>>20} MiB of machine code')
    target = f'-gencode=arch={arch.replace("sm", "compute")},code={arch}'
    flags = '-cubin', '-std=c++17', *options, target, f'-I{inc}'
    why = nvcc_says([nvcc, *flags, cu, '-o', out], out)
    if why:
        out.unlink(missing_ok=True)
        warn(f'warning: {cu.name} was not compiled for {arch}: {why}')

def tell(line):
    "Say `line` in the build's log, which pip shows with -v, and in the terminal of whoever waits"
    # pip itself shows nothing of a build
    print(line, file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        return
    try:
        with open('/dev/tty', 'w') as terminal:
            if os.tcgetpgrp(terminal.fileno())==os.getpgrp():
                terminal.write(f'\n  atlas: {line}\n')
    except OSError: # there is no terminal
        return

def compile_host(folder):
    """Compile the kernels of the processor beside their sources, where there is a C++ compiler: as
    atlas.card.processor would"""
    cxx = os.environ.get('CXX') or shutil.which('g++') or shutil.which('clang++')
    arch = HOST.get(platform.machine())
    if not (cxx and arch):
        return warn('no C++ compiler: kernels of the processor are compiled when they are first '
            'wanted')
    for cpp in sorted(folder.glob('*.cpp')):
        out = cpp.with_suffix(f'.{arch}.so')
        command = [cxx, *HOST_FLAGS, f'-march={arch}', cpp, '-o', out]
        r = subprocess.run(command, capture_output=True, text=True)
        if r.returncode:
            out.unlink(missing_ok=True)
            warn(f'warning: {cpp.name} was not compiled: {r.stderr.strip()}')

def compile_kernels(inc):
    "Compile all kernels of cards that are asked for, where there is an nvcc"
    if not archs:
        return
    nvcc = find_nvcc()
    if not nvcc:
        return warn('no nvcc: kernels are shipped as source and compiled when they are first '
            'loaded')
    todo,n = variants(inc),os.cpu_count()
    minutes = max(1, round(len(todo)*1.5/60/n))
    what = f'{len(todo)} kernels for {" and ".join(archs)} with {nvcc}'
    tell(f'compiling {what}, {n} at a time: about {minutes} min. '
        'ATLAS_CUDA_ARCHS= leaves that to the first start')
    def one(variant):
        compile_cubin(nvcc, inc, *variant)
    with ThreadPoolExecutor(n) as ex:
        list(ex.map(one, todo))

class BuildPy(build_py):
    """Copy the package, then, where there is an nvcc, compile each kernel beside its source.
    Editable installs compile nothing"""
    def run(self):
        out = Path(self.build_lib)/'atlas'
        if not self.editable_mode:
            # else a deleted kernel lives on in build/ and in the next wheel
            shutil.rmtree(out, ignore_errors=True)
        super().run()
        if self.editable_mode:
            return
        # what nbdev-export writes and git ignores: nbdev looks for it wherever Atlas is installed
        index = out/'_modidx.py'
        if not index.exists():
            index.write_text('d = dict(settings={}, syms={})\n')
        inc = (out/'kernels').resolve()
        compile_host(inc/'host')
        compile_kernels(inc)

class Sdist(sdist):
    "Add settings.ini, without which the source archive could not be built"
    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, [*files, 'settings.ini'])

def readme():
    p = here/'README.md'
    return p.read_text(encoding='utf-8') if p.exists() else cfg['description']

def listed(name):
    "Words of an option of settings.ini"
    return shlex.split(cfg.get(name, ''))

data_files = {o: ['*.cu', '*.cuh', '*.cpp', '*.h', '*.json', '*.md'] for o in kernels}
data_files |= {
    'atlas': ['catalog.json', 'bench_prompts.jsonl', 'quality.txt'],
    'atlas.service.static': ['*'],
    'atlas.models.tiny': ['*'],
    'atlas.model.families': ['*.toml']}
own = find_packages(include=['atlas', 'atlas.*'])
extras = 'dev','cuda','watch','bench'

setup(
    name=cfg['lib_name'],
    version=cfg['version'],
    description=cfg['description'],
    license='Apache-2.0',
    long_description=readme(),
    long_description_content_type='text/markdown',
    author=cfg['author'],
    author_email=cfg['author_email'],
    keywords=cfg['keywords'],
    python_requires=f'>={cfg["min_python"]}',
    install_requires=listed('requirements'),
    extras_require={o: listed(f'{o}_requirements') for o in extras},
    packages=[*own, 'atlas.service.static', 'atlas.models.tiny', *kernels],
    package_dir={'atlas.kernels': 'kernels'},
    package_data=data_files,
    entry_points=dict(
        console_scripts=listed('console_scripts'),
        nbdev=['atlas=atlas._modidx:d']),
    cmdclass=dict(build_py=BuildPy, sdist=Sdist),
    zip_safe=False)
