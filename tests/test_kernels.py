"""Kernels as files: each compiles for both machines, states its contract, and travels in the wheel
with or without an nvcc."""
import json,os,re,shutil,subprocess,sys,threading
import numpy as np,pytest
from hypothesis import given,settings,strategies as st
from nbdev.config import show_src
from pathlib import Path
from atlas.ground.core import AtlasError,cp
from atlas.card.emulator import find_cxx
from atlas.card.launch import CubinStore,Nvrtc,OPTIONS,Source,ahead,compilations,compiled
from atlas.card.launch import cubin_name,cuda_headers,find_nvcc,kernel_names,machine_code
from atlas.card.launch import options_of,prepare,saved_variants,simulate
from atlas.card.variants import Dry
from atlas.cuda.flash import _groups
from atlas.cuda.gemm_scaled import tile_scaled
from atlas.cuda.pack import CARD_FORMATS
from helpers.nvcc import built
import kernel_diff

root = Path(__file__).parents[1]
archs = ['sm_90a','sm_121a']
needs_nvcc = pytest.mark.skipif(not find_nvcc(), reason='no nvcc')
each = pytest.mark.parametrize('name', kernel_names())

# Bytes that were measured with: sixteen warps use all registers there are; and those of heads of
# 128, for which an sm_121a has no room
SPILT = {'experts_wide': 8, 'delta_wide': 24}

@needs_nvcc
@each
@pytest.mark.parametrize('arch', archs)
def test_compiles_and_spills_nothing(name, arch, cache):
    said = built(cache, name, arch).said
    stack,spilt = re.findall(r'(\d+) bytes stack frame, (\d+) bytes spill stores', said)[0]
    assert max(int(stack), int(spilt))<=SPILT.get(name, 0), said

@needs_nvcc
@pytest.mark.parametrize('d', [64,128,256])
def test_products_of_warpgroups_run_on(d, cache):
    "nvcc says so where it makes each wait for the one before, and where it shares out no registers"
    for share in (1,4):
        options = options_of(dict(DIM=d, FORMAT=3)|_groups(
            d, share, 1000, 132, 2).options)
        said = built(cache, 'flash', 'sm_90a', (*OPTIONS, *options)).said
        assert 'Performance Loss' not in said, said
        assert int(re.search(r'(\d+) bytes spill stores', said)[1])<=16, said

@needs_nvcc
@pytest.mark.parametrize('arch,fmt,stored', [
    ('sm_121a','nvfp4','nvfp4'), ('sm_121a','fp8','nvfp4'), ('sm_121a','fp8','fp8_tiled'),
    ('sm_90a','fp8','nvfp4'), ('sm_90a','fp8','fp8')])
def test_prompts_in_fewer_bits_spill_nothing(arch, fmt, stored, cache):
    "The tiles that a prompt of 2,048 rows takes, for all rows and for experts"
    f = CARD_FORMATS[stored]
    for grouped in (0,2):
        d = tile_scaled(f, fmt, 64 if grouped else 2048, 12288, Dry(arch), bool(grouped))
        defines = dict(FMT=f.many, FP8=int(fmt=='fp8'), GROUPED=grouped)|d
        said = built(cache, 'gemm_scaled', arch, (*OPTIONS, *options_of(defines))).said
        assert re.findall(r'(\d+) bytes spill stores', said)==['0'], (d, said)

@each
@pytest.mark.parametrize('arch', archs)
def test_nvrtc_compiles(name, arch):
    if cp is None:
        pytest.skip('no CuPy')
    assert Nvrtc()(Source(name), arch)[:4]==b'\x7fELF'

def signature(src):
    "Parameters of the kernel's C++ function: name -> is it a pointer?"
    text = re.search(
        r'extern "C" (?:TEAM_OF\(\w+\) )?__global__ void '
        r'(?:__launch_bounds__\([^)]*\)\s*|BOUNDS )?(\w+)\(([^)]*)\)',
        src.text)
    assert text[1]==src.name, 'the function has the name of its file'
    return {
        p.split()[-1].lstrip('*'): '*' in p
        for p in text[2].split(',')}

@each
def test_contract_covers_the_signature(name):
    src = Source(name)
    sig = signature(src)
    assert set(src.contract)=={k for k,pointer in sig.items() if pointer}
    dims = {
        w for words,_ in src.contract.values() for o in words
        for w in re.findall(r'[a-z]\w*', o)}
    assert not sig.keys()&set(src.contract)&dims and '//   launch:' in src.text

def params(src):
    "Fields of a kernel's `struct Params`: name -> is it a pointer?"
    body = re.search(r'^struct Params \{\n(.*?)^\};', src.text, re.M|re.S)[1]
    declared = re.findall(r'^    (\w[^;]*);', body, re.M)
    return {
        name: '*' in o for o in declared
        for name in re.findall(r'(\w+)(?:,|$)', o)}

@pytest.mark.parametrize(
    'name', [n for n in kernel_names() if 'struct Params' in Source(n).text])
def test_params_are_the_arguments(name):
    src = Source(name)
    assert params(src)==signature(src)

INSTRUCTION = re.compile(r'^\s*(?:@!?%p\d+ )?([a-z][\w.:]*)\s+(%rd\d+), (.*);', re.M)

def constants(name, ptx):
    """Parameters that the kernel's PTX reads as what nobody writes meanwhile (ld.global.nc), which
    compilers move to before a wait"""
    lines = INSTRUCTION.findall(ptx[ptx.index(f'.entry {name}'):])
    params = list(signature(Source(name)))
    of,old = {},None # Registers, and the parameters that they may come from
    while old!=(old := sum(map(len, of.values()))):
        for op,to,rest in lines:
            of.setdefault(to, set()).update(sources_of(op, rest, of, params))
    read = re.findall(r'ld\.global\.nc.*\[(%rd\d+)', ptx)
    return set().union(*(of.get(r, ()) for r in read))

def sources_of(op, rest, of, params):
    "Parameters that an instruction's result may come from, where registers have those `of`"
    if op.startswith('ld.param'):
        return [params[int(n)] for n in re.findall(r'_param_(\d+)', rest)]
    if op.startswith(('ld','atom','shfl')):
        return ()
    return set().union(*(of.get(r, ()) for r in re.findall(r'%rd\d+', rest)))

@needs_nvcc
@pytest.mark.parametrize(
    'name,options',
    [
        *((n,()) for n in kernel_names() if 'pdl_wait' in Source(n).text),
        ('gemv',('-DNORM=2','-DROWS=8')),
        ('gemv',('-DFORMAT=fragment_bf16','-DW=8','-DEXTRA=fragment_bf16'))])
def test_what_kernels_of_a_step_write_is_no_constant(name, options, cache):
    """A kernel that starts early reads as constant only what its signature calls __restrict__,
    which are weights and tables: a residual once was read before the kernel that made it had
    ended"""
    declared = {
        p.split()[-1]
        for p in re.search(r'__global__.*?\{', Source(name).text, re.S)[0].split(',')
        if '__restrict__' in p}
    assert constants(name, built(cache, name, 'sm_90a', (*OPTIONS, *options)).ptx)<=declared

def shown_sources():
    "Cells of pages that show a kernel, with what was saved of them"
    for page in sorted((root/'nbs').rglob('*.ipynb')):
        for c in json.loads(page.read_text(encoding='utf-8'))['cells']:
            code = ''.join(c['source'])
            if c['cell_type']!='code' or 'show_src(Source(' not in code:
                continue
            saved = [''.join(o['data']['text/markdown']) for o in c['outputs']]
            yield pytest.param(code, saved, id=f'{page.stem}-{c["id"]}')

@pytest.mark.parametrize('code,saved', list(shown_sources()))
def test_pages_show_kernels_as_they_are(code, saved):
    "Who changes a kernel runs the page that shows it again"
    now = eval(
        re.sub(r'^#\|.*', '', code, flags=re.M),
        dict(show_src=show_src, Source=Source))
    assert saved==[now.data]

@needs_nvcc
@pytest.mark.parametrize('was,now,told', [
    ('#include', '// A sentence\n#include', ''),
    ('#include', '#include <nothing>\n#include', 'nothing: No such file'),
    ('% 4 == 0', '% 8 == 0', '->')])
def test_kernels_laid_out_anew_are_compared(tmp_path, was, now, told):
    "A comment changes no instruction; what does not compile, and what does something else, is told"
    shutil.copytree(root/'kernels', tmp_path/'new')
    p = tmp_path/'new/rmsnorm.cu'
    p.write_text(p.read_text().replace(was, now, 1))
    ok,said = kernel_diff.compare(root/'kernels', tmp_path/'new', 'rmsnorm', 'sm_121a', ())
    assert ok==(not told) and told in said

def test_no_lambda_is_generic():
    """NVRTC takes a lambda with a parameter of type `auto` for a function of the host, nvcc does
    not; so machines that compile at load would find out first"""
    generic = re.compile(r'\[[&=][^\]]*\]\s*\([^)]*\bauto\b')
    assert generic.search('const auto put = [&](int row, auto& d) {')
    found = [
        p.name for p in (root/'kernels').rglob('*.cu*')
        if generic.search(p.read_text())]
    assert not found

def test_every_header_is_used():
    used = {f for n in kernel_names() for f in Source(n).files}
    folder = Source(kernel_names()[0]).root
    used.add('lib/stamp.cuh')  # atlas.use.timeline puts it into copies
    assert (
        {str(p.relative_to(folder)) for p in folder.rglob('*.cuh')}
        ==used-{f'{n}.cu' for n in kernel_names()})

def test_checkout_holds_no_machine_code():
    assert not [*(root/'kernels').rglob('*.cubin'), *(root/'kernels').rglob('*.fatbin')]

# The wheel

def build(tmp, listed=None, only=None, ignored=(), fails=False, **env):
    """Run the wheel's build step on a copy of the tree, with `listed` as its variants and `only`
    some kernels; returns the kernels folder it makes and what it said"""
    # the processor's kernel takes twenty seconds, and one test is enough for it
    env = dict(ATLAS_CUBINS=None, CXX=shutil.which('true'))|env
    pytest.importorskip('setuptools')
    tree = copied(tmp/'tree', only, ignored)
    if listed is not None:
        (tree/'kernels'/'variants.json').write_text(json.dumps(listed))
    env = {k: v for k,v in (os.environ|env).items() if v is not None}
    cmd = [sys.executable, 'setup.py', '-q', 'build_py', '--build-lib', tmp/'out']
    r = subprocess.run(
        cmd, cwd=tree, env=env, capture_output=True, text=True, start_new_session=True)
    assert fails==(r.returncode!=0), r.stderr
    return tmp/'out'/'atlas'/'kernels',r.stderr

def copied(tree, only, ignored):
    "A copy of what a wheel is built from, with `only` some kernels"
    tree.mkdir(exist_ok=True)
    for f in ('setup.py','settings.ini','pyproject.toml'):
        shutil.copy(root/f, tree)
    ignore = shutil.ignore_patterns('__pycache__', *ignored)
    for d in ('atlas','kernels'):
        shutil.copytree(root/d, tree/d, ignore=ignore, dirs_exist_ok=True)
    for p in (tree/'kernels').glob('*.cu'):
        if only and p.stem not in only:
            p.unlink()
    return tree

def files(d):
    "What lies in a folder, but for the processor's kernel, which is there where a compiler is"
    return {str(p.relative_to(d)) for p in d.rglob('*') if p.is_file() and p.suffix!='.so'}
sources = files(root/'kernels')

def fake_nvcc(tmp, script):
    d = tmp/'bin'
    d.mkdir()
    (d/'nvcc').write_text(script)
    (d/'nvcc').chmod(0o755)
    return f'{d}:{os.defpath}'

def test_wheel_without_nvcc(tmp_path):
    (tmp_path/'empty').mkdir()
    out,said = build(
        tmp_path, PATH=str(tmp_path/'empty'), CUDA_HOME=str(tmp_path/'empty'),
        ATLAS_CUDA_ARCHS=None)
    assert files(out)==sources and 'no nvcc' in said

def test_a_wheel_of_a_fresh_clone_has_what_it_advertises(tmp_path):
    "nbdev-export makes the index of names, which is in no clone; an empty one is better than none"
    assert "nbdev=['atlas=atlas._modidx:d']" in (root/'setup.py').read_text()
    out,_ = build(tmp_path, ATLAS_CUDA_ARCHS='', CXX=None, ignored=('_modidx.py',))
    assert bool([*(out/'host').glob('*.so')])==bool(find_cxx())
    ns = {}
    exec((out.parent/'_modidx.py').read_text(), ns)
    assert not ns['d']['syms']

def test_wheel_says_what_takes_so_long(tmp_path):
    "In the log, and in the terminal of whoever waits: pip shows nothing of a build"
    import pty
    nvcc = fake_nvcc(tmp_path, logs)
    env = dict(PATH=nvcc, ATLAS_CUDA_ARCHS='90a')
    _,said = build(tmp_path, only=('rmsnorm','rope'), **env)
    assert 'compiling 2 kernels for sm_90a' in said and 'ATLAS_CUDA_ARCHS=' in said
    pid,terminal = pty.fork()
    if not pid:
        os.chdir(tmp_path/'tree')
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        setup = ['setup.py','-q','build_py','--build-lib',str(tmp_path/'again')]
        os.execve(sys.executable, [sys.executable,*setup], os.environ|env)
    seen = all_of(terminal)
    _,status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status)==0 and b'atlas: compiling 2 kernels' in seen

def all_of(terminal):
    "What is written to a terminal until nobody has it open any more"
    seen = b''
    try:
        while more := os.read(terminal, 4096):
            seen += more
    except OSError:
        pass  # it has ended
    os.close(terminal)
    return seen

@pytest.mark.skipif((os.cpu_count() or 1)<2, reason='one core')
def test_wheel_compiles_side_by_side(tmp_path):
    "Each nvcc here waits for another one, which would not come if one ended before the next began"
    waits = """#!/bin/sh
touch "$0.$$.here"; n=0
while [ $(ls "$0".*.here | wc -l) -lt 2 ]; do
    n=$((n+1)); [ $n -lt 3000 ] || exit 1; sleep .1
done
"""
    two = 'rmsnorm','rope'
    nvcc = fake_nvcc(tmp_path, waits+logs.partition('\n')[2])
    out,_ = build(tmp_path, only=two, PATH=nvcc, ATLAS_CUDA_ARCHS='90a')
    made = {p.name for p in out.glob('*.cubin')}
    assert made=={cubin_name(n, 'sm_90a', ()) for n in two}

def test_wheel_of_sources_only(tmp_path):
    assert files(build(tmp_path, ATLAS_CUDA_ARCHS='')[0])==sources

def to_each_output(command):
    "A compiler that does `command` for the file that it is to make"
    return '#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" = -o ] && '+command+'; shift; done\n'

BROKEN = {
    'silent': '#!/bin/sh\nexit 1\n',
    'complains': '#!/bin/sh\necho boom >&2; exit 2\n',
    'writes-nothing': '#!/bin/sh\nexit 0\n',
    'garbage': 'this is no program',
    'no-shell': '#!/no/such/shell\n',
    'half-written': to_each_output('echo half > "$2"')}

@pytest.mark.parametrize('script', BROKEN.values(), ids=BROKEN)
def test_wheel_with_broken_nvcc(script, tmp_path):
    out,said = build(tmp_path, PATH=fake_nvcc(tmp_path, script), ATLAS_CUDA_ARCHS=None)
    assert files(out)==sources and 'rmsnorm.cu was not compiled for sm_121a' in said

logs = to_each_output('printf "\\177ELF" > "$2"').replace('\n', '\necho "$@" >> "$0.log"\n', 1)
_one = [['rmsnorm'], ['rmsnorm','-DA=1','-DB=2'], ['no_such_kernel','-DA=1']]
_two = [['rmsnorm','-DA=1','-DB=2'], ['rope','-DA=1']]
listed = dict(
    one=dict(sm_90a=_one, sm_121a=_one),
    two=dict(sm_90a=_two, sm_75=_two))

MORE = [('rmsnorm',('-DA=1','-DB=2')), ('rope',('-DA=1',))] # What is compiled of `listed`

@pytest.fixture(scope='module')
def whole(tmp_path_factory):
    "A wheel's kernels for both cards, with variants; and each call of the compiler"
    tmp = tmp_path_factory.mktemp('whole')
    out,_ = build(
        tmp, listed, PATH=fake_nvcc(tmp, logs), ATLAS_CUDA_ARCHS='90a sm_121a', ATLAS_CUBINS='all')
    return out,(tmp/'bin'/'nvcc.log').read_text().splitlines()

def test_wheel_compiles_as_launch_does(whole):
    out,calls = whole
    made = [(n, a, ()) for n in kernel_names() for a in archs]
    made += [(n, 'sm_90a', o) for n,o in MORE]
    made.append(('rmsnorm', 'sm_121a', MORE[0][1]))
    assert files(out)==sources|{'variants.json'}|{cubin_name(*m) for m in made}
    assert len(calls)==len(made)
    assert all(set(OPTIONS)<=set(c.split()) and f'-I{out}' in c for c in calls)
    assert sum('-gencode=arch=compute_121a,code=sm_121a' in c for c in calls)==len(kernel_names())+1
    assert sum('-DA=1 -DB=2' in c for c in calls)==2

def test_a_wheels_variants_are_found(whole):
    out,_ = whole
    assert ahead(Source('rope', out), 'sm_90a', ('-DA=1',))
    assert ahead(Source('rope', out), 'sm_90a', ('-DA=2',)) is None
    both = [('no_such_kernel',('-DA=1',)), ('rmsnorm',())]
    list_of = out/'variants.json'
    assert saved_variants(path=list_of)==[*both,*MORE]
    assert saved_variants('sm_121a', path=list_of)==[*both,MORE[0]]

@pytest.mark.parametrize(
    'asked,more',
    [(None,[]), ('',[]), (
        'one',
        [('rmsnorm','sm_90a',('-DA=1','-DB=2')), ('rmsnorm','sm_121a',('-DA=1','-DB=2'))]),
    (
        'two',
        [('rmsnorm','sm_90a',('-DA=1','-DB=2')), ('rope','sm_90a',('-DA=1',))])])
def test_wheel_compiles_for_the_models_asked_for(tmp_path, asked, more):
    out,_ = build(
        tmp_path, listed, ('rmsnorm','rope'), PATH=fake_nvcc(tmp_path, logs),
        ATLAS_CUDA_ARCHS=None, ATLAS_CUBINS=asked)
    assert {p.name for p in out.glob('*.cubin')}=={
        cubin_name(*m)
        for m in [(n, a, ()) for n in ('rmsnorm','rope') for a in archs]+more}

def test_wheel_for_a_model_that_is_not_listed(tmp_path):
    _,said = build(
        tmp_path, listed, fails=True, PATH=fake_nvcc(tmp_path, logs), ATLAS_CUBINS='one three')
    assert 'variants.json has no three. It has: one, two' in said

def test_wheel_has_a_limit(tmp_path):
    "What is too much is left out and told; the wheel is built all the same"
    big = to_each_output('{ printf "\\177ELF" > "$2"; truncate -s 40M "$2"; }')
    out,said = build(
        tmp_path, PATH=fake_nvcc(tmp_path, big)+os.pathsep+'/usr/bin', ATLAS_CUDA_ARCHS='90a')
    made = [p for p in out.glob('*.cubin')]
    assert 2<=len(made)<=1+os.cpu_count()
    assert said.count('is left out: over 64 MiB')==len(kernel_names())-len(made)

@needs_nvcc
def test_wheel_ships_cubins(tmp_path):
    out,_ = build(
        tmp_path,
        dict(one=dict.fromkeys(archs, [['rope','-DX=1']])),
        ('rmsnorm','rope'), ATLAS_CUDA_ARCHS=None, ATLAS_CUBINS='one')
    assert all(
        ahead(Source(n, out), a, o)[:4]==b'\x7fELF'
        for n,o in [
                ('rmsnorm',()), ('rope',()),
                ('rope',('-DX=1',))]
        for a in archs)
    assert ahead(Source('rmsnorm', out), 'sm_100a') is None

def test_listed_variants_exist():
    "What wheels are built with are kernels there are, and options that they know"
    for n,options in saved_variants():
        assert all(
            re.search(rf'\b{o[2:].split("=")[0]}\b', '\n'.join(Source(n).files.values()))
            for o in options), (n,options)

# Keys and the store

def kernel_tree(d, **change):
    "A made-up kernel with a header in a header, and one header that nobody includes"
    text = {
        'a.cu': '// a\n#include "lib/b.cuh"\n', 'lib/b.cuh': '#include "lib/c.cuh"\n',
        'lib/c.cuh': '// c\n', 'lib/other.cuh': '// other\n'} | change
    for k,v in text.items():
        (d/k).parent.mkdir(parents=True, exist_ok=True)
        (d/k).write_text(v)
    return Source('a', d)

def test_key_is_of_all_that_matters_and_nothing_else(tmp_path):
    def edited(**texts):
        return kernel_tree(tmp_path, **texts).key('sm_90a', (), 'nvrtc 13.0')
    plain = edited()
    texts = {
        'a.cu': '#include "lib/b.cuh"\n',
        'lib/b.cuh': '#include "lib/c.cuh"\n',
        'lib/c.cuh': ''}
    changed = [edited(**{f: f'{t}// edited\n'}) for f,t in texts.items()]
    src = kernel_tree(tmp_path)
    changed += [
        src.key('sm_121a', (), 'nvrtc 13.0'),
        src.key('sm_90a', ('-DX',), 'nvrtc 13.0'),
        src.key('sm_90a', (), 'nvrtc 13.1'),
        src.key('sm_90a', ('-DX','-DY'), '')]
    assert len({plain,*changed})==1+len(changed)
    assert edited(**{'lib/other.cuh': 'edited'})==plain

def test_include_cycle_ends(tmp_path):
    assert (
        set(kernel_tree(tmp_path, **{'lib/c.cuh': '#include "lib/b.cuh"\n'}).files)
        =={'a.cu','lib/b.cuh','lib/c.cuh'})

def test_variants_have_names_of_their_own():
    names = [
        cubin_name('gemv', a, o) for a in archs
        for o in (
                (), ('-DK=1',), ('-DK=12',), ('-DK=1','-DN=2'),
                ('-DK=1 -DN=2',''))]
    assert len(set(names))==len(names) and names[0]=='gemv.sm_90a.cubin'

def test_headers_are_found():
    "NVRTC needs the half-precision headers, and what they include"
    if not find_nvcc() and cp is None:
        pytest.skip('neither a toolkit nor CuPy')
    assert any(Path(d, 'cuda_fp16.h').exists() for d in cuda_headers())
    assert any(Path(d, 'nv/target').exists() for d in cuda_headers())

class Stub:
    name,version = 'stub','1'
    def __init__(self):
        self.calls = []
    def __call__(self, src, arch, options=()):
        self.calls.append(arch)
        return f'{src.text}|{arch}|{options}'.encode()*1000

def test_many_threads_share_a_store(tmp_path):
    src = kernel_tree(tmp_path/'k')
    stub = Stub()
    store = CubinStore(tmp_path/'s')
    got = []
    ts = [
        threading.Thread(
            target=lambda: got.append(compiled(src, 'sm_90a', compiler=stub, store=store)))
        for _ in range(8)]
    for t in ts:
        t.start()
    for t in ts:
        t.join()
    assert len(got)==8
    assert len(set(got))==1
    assert 1<=len(stub.calls)<=8
    assert [p.suffix for p in store.path.iterdir()]==['.cubin']

@settings(max_examples=30, deadline=None)
@given(cut=st.integers(0, 10_000), flip=st.integers(0, 10_000))
def test_damaged_cubin_is_never_returned(tmp_path_factory, cut, flip):
    d = tmp_path_factory.mktemp('s')
    src = kernel_tree(d/'k')
    stub = Stub()
    store = CubinStore(d/'s')
    want = compiled(src, 'sm_90a', compiler=stub, store=store)
    file, = store.path.iterdir()
    bad = bytearray(want[:cut%len(want)] if cut%2 else want)
    if not cut%2:
        bad[flip%len(bad)] ^= 1
    file.write_bytes(bad)
    assert compiled(src, 'sm_90a', compiler=stub, store=store)==want
    assert len(stub.calls)==2

def test_failed_compile_keeps_nothing(tmp_path):
    class Fails(Stub):
        def __call__(self, *a):
            raise AtlasError('no')
    with pytest.raises(AtlasError):
        compiled(
            kernel_tree(tmp_path/'k'), 'sm_90a', compiler=Fails(),
            store=CubinStore(tmp_path/'s'))
    assert not (tmp_path/'s').exists()

def test_ready_means_ready(tmp_path, monkeypatch):
    """In a step of a model that is ready, what is known is served, and what is not is an error,
    not a wait"""
    src = kernel_tree(tmp_path/'k')
    store = CubinStore(tmp_path/'s')
    stub = Stub()
    def code(option):
        return machine_code(src, 'sm_90a', (option,), compiler=stub, store=store)
    prepare([('a', ()), ('a', ('-DX',))], 'sm_90a', stub, store, tmp_path/'k')
    late = type(compilations)()
    late.refuse = True
    monkeypatch.setattr('atlas.card.launch.compilations', late)
    with late.serving([]):
        assert code('-DX') and late.after_ready==0
        with pytest.raises(AtlasError, match='would make a request wait'):
            code('-DY')
    assert len(stub.calls)==2 and late.late==['a']
    # somebody who is not serving may
    assert code('-DY')
    assert late.late==['a']

@settings(max_examples=20, deadline=None)
@given(
    wanted=st.lists(
        st.tuples(
            st.just('a'),
            st.lists(st.sampled_from(['-DX','-DY=1','-DZ=2']), unique=True).map(tuple)),
        max_size=12),
    bad=st.booleans())
def test_prepare_compiles_each_once(tmp_path_factory, wanted, bad):
    d = tmp_path_factory.mktemp('p')
    kernel_tree(d/'k')
    stub,store = Stub(),CubinStore(d/'s')
    got = prepare(wanted, 'sm_90a', stub, store, d/'k')
    assert set(got)==set(wanted)
    assert len(stub.calls)==len(set(wanted))
    assert len(set(got.values()))==len(got)
    assert prepare(wanted, 'sm_90a', stub, store, d/'k')==got
    assert len(stub.calls)==len(set(wanted))

def test_unwritable_store_warns_and_serves(tmp_path):
    (tmp_path/'s').write_text('a file where the folder should be')
    before = compilations.total
    with pytest.warns(UserWarning, match='cannot be kept'):
        assert compiled(
            kernel_tree(tmp_path/'k'), 'sm_90a', compiler=Stub(),
            store=CubinStore(tmp_path/'s'))
    assert compilations.total==before+1

# The contract

dim = st.integers(1, 5)
@settings(max_examples=100, deadline=None)
@given(
    rows=dim, heads=dim, half=dim,
    rest=st.integers(0, 3),
    before=st.integers(0, 2),
    after=st.integers(0, 2))
def test_check_accepts_what_the_contract_says(rows, heads, half, rest, before, after):
    d = 2*half+rest
    x = np.zeros(
        (rows, before+heads+after, d),
        'float32')[:,before:before+heads]
    cs = np.zeros((rows,half), 'float32')
    dims = Source('rope').check(
        x=x, y=x.copy(), cos=cs, sin=cs)
    assert dims==dict(
        rows=rows, heads=heads, dim=d, half=half,
        ys=heads*d,
        xs=(before+heads+after)*d if rows>1 else heads*d)

SPOILT = [
    lambda a: a.astype('float16'),
    lambda a: a[None],
    lambda a: a[0],
    lambda a: np.asfortranarray(a),
    lambda a: a[1:],
    lambda a: a[...,1:],
    lambda a: a[...,::2],
    lambda a: a[...,::-1],
    lambda a: np.concatenate([a,a]),
    lambda a: a.view('int32')]

@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(2, 5),
    heads=st.integers(2, 5),
    half=st.integers(2, 5),
    which=st.sampled_from(['x','y','cos','sin']),
    data=st.data())
def test_check_refuses_every_departure(rows, heads, half, which, data):
    shapes = dict(x=(rows,heads,2*half), y=(rows,heads,2*half), cos=(rows,half), sin=(rows,half))
    arrays = {k: np.zeros(s, 'float32') for k,s in shapes.items()}
    spoil = data.draw(st.sampled_from(SPOILT))
    arrays[which] = spoil(arrays[which])
    with pytest.raises(AtlasError) as e:
        Source('rope').check(**arrays)
    assert 'breaks its contract' in str(e.value)

@settings(max_examples=40, deadline=None)
@given(
    rows=st.integers(0, 4),
    n=st.integers(1, 40),
    threads=st.integers(1, 33))
def test_simulated_grid_adds_up(rows, n, threads):
    def total(b, t, T, x, y):
        part = yield sum(x[b,t::T])
        if t==0:
            y[b] = sum(part)
    x = np.random.default_rng(n).integers(0, 9, (rows,n))
    y = np.full(rows, -1)
    simulate(total, rows, threads, x, y)
    assert (y==x.sum(-1)).all()

@pytest.mark.skipif(sys.platform!='linux', reason='reads /proc')
def test_emulated_kernels_leave_room_for_a_fork():
    """Each has stacks for 1,024 fibers. What it does not touch must not count as memory, or a
    process with a hundred kernels cannot fork"""
    code = """if True:
        import re
        from atlas.card.card import run
        from atlas.card.emulator import Emulator
        def counted():
            maps = re.split('(?m)^(?=[0-9a-f]+-[0-9a-f]+ )', open('/proc/self/smaps').read())
            private = [m for m in maps if re.search('VmFlags:.* ac ', m)]
            return sum(int(re.search('Size: *([0-9]+)', m)[1]) for m in private)
        e = Emulator()
        x,y = e.zeros((4,64)),e.empty((4,32))
        before = counted()
        run('silu_mul', (4,1), 256, x, y, 32)
        print(before, counted()-before)"""
    before,more = map(
        int,
        subprocess.run(
            [sys.executable,'-c',code], capture_output=True, text=True,
            check=True, cwd=root).stdout.split())
    assert before>10_000 and more<64_000
