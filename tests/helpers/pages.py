"""Which tests go with which page.

    pytest --page 4_model/01_layers     the page, and the pages and test files that import its module
    pytest --changed            the same for all that differs from the last commit (--changed=main: from that one)
    pytest --page layers --far  those that import it through others, too

The map is what stands in the imports: of notebooks, of test files, and of what these run in other processes."""
import functools,json,re,subprocess
from fnmatch import fnmatchcase
from pathlib import Path
import pytest

ROOT = Path(__file__).parents[2]

def pytest_addoption(parser):
    group = parser.getgroup('atlas')
    group.addoption('--page', help='only the tests of a page, by the name of its file or of its module')
    group.addoption('--changed', nargs='?', const='HEAD', metavar='COMMIT', help='only the tests of pages, kernels and test files that differ from a commit, the last by default')
    group.addoption('--far', action='store_true', help='with --page or --changed: what imports them through others, too')

def page_name(path):
    "A page by its place below nbs/: `5_engine/03_scheduler`"
    return path.relative_to(ROOT/'nbs').with_suffix('').as_posix()

def short(page):
    "A page's name without chapter and number"
    return re.sub(r'^(?:.*/)?\d+_', '', page)

@functools.cache
def texts():
    "Code of every page, by stem, and text of every test file and helper, by path"
    def code(p): return '\n'.join(''.join(c['source']) for c in json.loads(p.read_text(encoding='utf-8'))['cells'] if c['cell_type']=='code')
    notebooks = {page_name(p): code(p) for p in (ROOT/'nbs').rglob('*.ipynb') if '.ipynb_checkpoints' not in p.parts}
    tests = [p for d in ('','helpers') for p in (ROOT/'tests'/d).glob('*.py')]
    return notebooks|{p.relative_to(ROOT).as_posix(): p.read_text(encoding='utf-8') for p in tests}

@functools.cache
def makers():
    "The page that each module is made by"
    found = {p: re.search(r'#\|\s*default_exp\s+(\S+)', t) for p,t in texts().items() if not p.endswith('.py')}
    return {m[1]: p for p,m in found.items() if m}

def named(text):
    "Pages and files that a text imports"
    from atlas import _doors
    doors = re.findall(r'from\s+atlas\s+import\s+([\w, ]+)', text)
    modules = set(re.findall(r'\batlas\.([a-z_][\w.]*)', text))
    modules |= {_doors.get(n.split(' as ')[0].strip(), n.strip()) for names in doors for n in names.split(',')}
    modules |= {f'{m}.{n.strip()}' for m,names in re.findall(r'from\s+atlas\.([\w.]+)\s+import\s+([\w, ]+)', text) for n in names.split(',')}
    for m in modules:
        parts = m.removeprefix('atlas.').split('.')
        yield from (makers()[p] for n in range(len(parts)) if (p := '.'.join(parts[:n+1])) in makers())
    for m in re.findall(r'(?:from|import)\s+\.?(?:helpers\.)?(\w+)', text)+re.findall(r'helpers[\'"]?/[\'"]?(\w+)', text):
        yield from (f for f in (f'tests/helpers/{m}.py',f'tests/{m}.py') if f in texts())

@functools.cache
def graph():
    "For every page and file, what it imports"
    return {p: set(named(t))-{p} for p,t in texts().items()}

def users(roots, far=False):
    "`roots`, and what imports them; a helper, and with `far` everything, hands on"
    found,todo = set(roots),list(roots)
    while todo:
        one = todo.pop()
        new = {p for p,names in graph().items() if one in names}-found
        found |= new
        todo += [p for p in new if far or p.startswith('tests/helpers/')]
    return found

@functools.cache
def includes():
    "For every file below kernels/ that is compiled, what it includes"
    return {p.relative_to(ROOT/'kernels').as_posix(): set(re.findall(r'#include\s+[<"]([^>"]+)', p.read_text())) for p in (ROOT/'kernels').rglob('*.*') if p.suffix in ('.cu','.cuh','.h')}

def kernels(path):
    "Names of the kernels that a file below kernels/ goes into"
    found = {path.removeprefix('kernels/')} if not path.startswith('kernels/emulator/') else set(includes())  # every kernel is compiled with those
    while new := {p for p,names in includes().items() if names&found}-found: found |= new
    return {Path(p).stem for p in found if p.endswith('.cu')}

def pages_of(name):
    "The page that `name` means; a usage error if there is none"
    if found := [p for p in texts() if name in (p,short(p)) or makers().get(name)==p]: return found
    raise pytest.UsageError(f'there is no page {name!r}. There are: {", ".join(p for p in sorted(texts()) if not p.endswith(".py"))}')

def named_in(folder, *words):
    "Pages or test files below `folder` that have one of `words` in quotes"
    return {f for f,t in texts().items() if f.startswith('tests/')==(folder=='tests') for w in words if f"'{w}'" in t or f'"{w}"' in t}

# Files that no import names, by pattern -> modules whose pages read them, and test files that do
READ = {'atlas/model/families/*.toml': ('ground.presets','ground.config'),
    'atlas/service/static/*': ('service.server','tests/test_cli.py','tests/test_http.py','tests/test_page.py'),
    'atlas/*.py': ('tests/test_repo.py',),
    'kernels/variants.json': ('card.variants','tests/test_kernels.py','tests/test_memory.py'), 'kernels/*': ('tests/test_kernels.py','tests/test_repo.py'),
    'tests/data/*': ('tests/helpers/reference.py',), 'tests/gpu/*': ('tests/test_gpu_scripts.py',), 'tests/durations.json': ('tests/test_selection.py',),
    'setup.py': ('tests/test_kernels.py','tests/test_repo.py'), 'settings.ini': ('tests/test_kernels.py','tests/test_repo.py'),
    **dict.fromkeys(('.ci/*','pyproject.toml','_quarto.yml','README.md','.gitignore'), ('tests/test_repo.py',))}

def readers(path):
    "Pages and test files that read a file which nothing imports"
    p,names = Path(path),next((names for pattern,names in READ.items() if fnmatchcase(path, pattern)), ())
    family = (f'model.families.{p.stem}',)*path.startswith('atlas/model/families/')
    found = {makers().get(n, n) for n in (*names,*family)}&set(texts())
    if path.startswith('tests/data/'): found |= named_in('tests', p.parts[2])
    if path.startswith('nbs/'): found |= named_in('nbs', p.name)
    return found

def roots_of(path):
    "Pages and test files that a changed file is a part of, or that read it"
    p = Path(path)
    if path.startswith('nbs/') and p.suffix=='.ipynb': return {page_name(ROOT/p)}&set(texts())
    own = '.'.join(p.with_suffix('').parts[1:])
    if path.startswith('atlas/') and p.suffix=='.py' and own in makers(): return {makers()[own]}
    if own := {f for f,t in texts().items() for k in kernels(path) if f"'{k}'" in t} if path.startswith('kernels/') else {path}&set(texts()): return own
    return readers(path)

def changed(commit):
    "Files that differ from `commit`, new ones included"
    def git(*args): return subprocess.run(['git', *args], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return git('diff', '--name-only', commit)+git('ls-files', '--others', '--exclude-standard')

def pytest_report_header(config):
    "What has changed, and no test is known to read"
    commit = config.option.changed
    if unknown := [p for p in changed(commit) if not roots_of(p)] if commit else []: return f'changed, and read by no test that is known: {", ".join(unknown)}'

def wanted(config):
    "Pages and files whose tests are asked for; None: all"
    o = config.option
    if not o.page and not o.changed: return None
    roots = set(pages_of(o.page)) if o.page else set()
    if o.changed: roots |= {r for path in changed(o.changed) for r in roots_of(path)}
    return users(roots, o.far)

def belongs(item, those):
    "Is a test one of a page or file among `those`?"
    params = getattr(getattr(item, 'callspec', None), 'params', {})
    nb,page,module = params.get('nb'),params.get('page'),params.get('mod') or params.get('module')
    if nb: return page_name(nb) in those
    if page or module: return (page or makers().get(module)) in those
    return item.path.relative_to(ROOT).as_posix() in those

def pytest_collection_modifyitems(config, items):
    those = wanted(config)
    if those is None: return
    kept = [i for i in items if belongs(i, those)]
    config.hook.pytest_deselected(items=[i for i in items if i not in set(kept)])
    items[:] = kept
