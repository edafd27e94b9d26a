"Packaging: the metadata is settings.ini, and the top-level kernels/ folder travels in the wheel as atlas/kernels."
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
kpkgs = ['atlas.kernels'] + [f'atlas.kernels.{o}' for o in find_namespace_packages('kernels')]
archs = [o if o.startswith('sm_') else f'sm_{o}' for o in os.environ.get('ATLAS_CUDA_ARCHS', 'sm_90a sm_121a').split()]  # empty: sources only
models = os.environ.get('ATLAS_CUBINS', '').split()  # of kernels/variants.json, or all: compile what they need, too. It takes minutes of nvcc, and saves half a minute at a first start

def find_nvcc():
    "nvcc on PATH, else in `CUDA_HOME` or the toolkit's usual place, else None"
    usual = Path(os.environ.get('CUDA_HOME') or '/usr/local/cuda')/'bin'/'nvcc'
    return shutil.which('nvcc') or (usual if usual.exists() else None)

limit = 64<<20  # bytes of machine code that a wheel may hold: what is beyond is compiled when it is first loaded

def variants(inc):
    "For each architecture every kernel as it stands, then with the options that the models in ATLAS_CUBINS need on it"
    listed = json.loads((inc/'variants.json').read_text(encoding='utf-8')) if (inc/'variants.json').exists() else {}
    if unknown := set(models)-{'all', *listed}: sys.exit(f'ATLAS_CUBINS: kernels/variants.json has no {", ".join(sorted(unknown))}. It has: {", ".join(listed) or "nothing"}; "all" is all of them')
    more = {(a, v[0], tuple(v[1:])) for m,by_arch in listed.items() if {m,'all'}&set(models) for a in archs for v in by_arch.get(a, []) if v[1:]}
    return [(cu, (), a) for cu in sorted(inc.glob('*.cu')) for a in archs] + [(inc/f'{n}.cu', o, a) for a,n,o in sorted(more) if (inc/f'{n}.cu').exists()]

def made_in(inc):
    "Bytes of machine code there so far; a file may go while one looks"
    def size(p):
        try: return p.stat().st_size
        except OSError: return 0
    return sum(map(size, inc.glob('*.cubin')))

def compile_cubin(nvcc, inc, cu, options, arch):
    "Compile one variant beside its source. A failure is told and leaves nothing: the kernel is then compiled when it is first loaded"
    digest = hashlib.sha256(' '.join(options).encode()).hexdigest()[:12]
    digest = f'.{digest}' if options else ''  # as atlas.card.launch.cubin_name has it
    out,gen = cu.with_suffix(f'{digest}.{arch}.cubin'),f'-gencode=arch={arch.replace("sm", "compute")},code={arch}'
    if made_in(inc)>limit: return print(f'warning: {out.name} is left out: over {limit>>20} MiB of machine code', file=sys.stderr)
    try: r = subprocess.run([nvcc, '-cubin', '-std=c++17', *options, gen, f'-I{inc}', cu, '-o', out], capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.TimeoutExpired) as e: why = str(e)
    else: why = r.returncode and ((r.stderr or r.stdout).strip() or f'nvcc ended with {r.returncode}')
    if not why and not (out.exists() and out.read_bytes()[:4]==b'\x7fELF'): why = 'nvcc wrote no cubin'
    if why:
        out.unlink(missing_ok=True)
        print(f'warning: {cu.name} was not compiled for {arch}: {why}', file=sys.stderr)

def tell(line):
    "Say `line` in the build's log, which pip shows with -v, and in the terminal of whoever waits"
    # pip itself shows nothing of a build
    print(line, file=sys.stderr, flush=True)
    if sys.stderr.isatty(): return
    try:
        with open('/dev/tty', 'w') as terminal:
            if os.tcgetpgrp(terminal.fileno())==os.getpgrp(): terminal.write(f'\n  atlas: {line}\n')
    except OSError: pass

HOST = dict(x86_64='x86-64-v3', aarch64='armv8-a')  # processors that a wheel has a library for, as atlas.card.processor has them

def compile_host(folder):
    "Compile the kernels of the processor beside their sources, where there is a C++ compiler: as atlas.card.processor would"
    cxx = os.environ.get('CXX') or shutil.which('g++') or shutil.which('clang++')
    if not cxx or platform.machine() not in HOST: return print('no C++ compiler: kernels of the processor are compiled when they are first wanted', file=sys.stderr)
    arch = HOST[platform.machine()]
    flags = ['-std=c++17', '-O2', '-ffp-contract=off', '-fPIC', '-shared', '-fvisibility=hidden', '-Wno-psabi', '-pthread', f'-march={arch}']
    for cpp in sorted(folder.glob('*.cpp')):
        out = cpp.with_suffix(f'.{arch}.so')
        r = subprocess.run([cxx, *flags, cpp, '-o', out], capture_output=True, text=True)
        if r.returncode:
            out.unlink(missing_ok=True)
            print(f'warning: {cpp.name} was not compiled: {r.stderr.strip()}', file=sys.stderr)

class BuildPy(build_py):
    "Copy the package, then, where there is an nvcc, compile each kernel beside its source. Editable installs compile nothing"
    def run(self):
        out = Path(self.build_lib)/'atlas'
        if not self.editable_mode: shutil.rmtree(out, ignore_errors=True)  # else a deleted kernel lives on in build/ and in the next wheel
        super().run()
        if self.editable_mode: return
        # what nbdev-export writes and git ignores: nbdev looks for it wherever Atlas is installed
        index = out/'_modidx.py'
        if not index.exists(): index.write_text('d = dict(settings={}, syms={})\n')
        compile_host((out/'kernels'/'host').resolve())
        if not archs: return
        if not (nvcc := find_nvcc()): return print('no nvcc: kernels are shipped as source and compiled when they are first loaded', file=sys.stderr)
        inc = (out/'kernels').resolve()
        todo,n = variants(inc),os.cpu_count()
        minutes = max(1, round(len(todo)*1.5/60/n))
        what = f'{len(todo)} kernels for {" and ".join(archs)} with {nvcc}'
        tell(f'compiling {what}, {n} at a time: about {minutes} min. '
            'ATLAS_CUDA_ARCHS= leaves that to the first start')
        def one(variant): compile_cubin(nvcc, inc, *variant)
        with ThreadPoolExecutor(n) as ex: list(ex.map(one, todo))

class Sdist(sdist):
    "Add settings.ini, without which the source archive could not be built"
    def make_release_tree(self, base_dir, files): super().make_release_tree(base_dir, [*files, 'settings.ini'])

def readme():
    p = here/'README.md'
    return p.read_text(encoding='utf-8') if p.exists() else cfg['description']

data_files = {o: ['*.cu', '*.cuh', '*.cpp', '*.h', '*.json', '*.md'] for o in kpkgs}
data_files |= {
    'atlas': ['catalog.json', 'bench_prompts.jsonl', 'quality.txt'],
    'atlas.service.static': ['*'],
    'atlas.models.tiny': ['*'],
    'atlas.model.families': ['*.toml']}

setup(
    name=cfg['lib_name'], version=cfg['version'], description=cfg['description'], license='Apache-2.0',
    long_description=readme(), long_description_content_type='text/markdown',
    author=cfg['author'], author_email=cfg['author_email'], keywords=cfg['keywords'],
    python_requires=f'>={cfg["min_python"]}',
    install_requires=shlex.split(cfg.get('requirements', '')),
    extras_require=dict(dev=shlex.split(cfg.get('dev_requirements', '')), cuda=shlex.split(cfg.get('cuda_requirements', '')), watch=shlex.split(cfg.get('watch_requirements', '')), bench=shlex.split(cfg.get('bench_requirements', ''))),
    packages=find_packages(include=['atlas', 'atlas.*']) + ['atlas.service.static', 'atlas.models.tiny'] + kpkgs,
    package_dir={'atlas.kernels': 'kernels'},
    package_data=data_files,
    entry_points=dict(console_scripts=shlex.split(cfg.get('console_scripts', '')), nbdev=['atlas=atlas._modidx:d']),
    cmdclass=dict(build_py=BuildPy, sdist=Sdist), zip_safe=False)
