"""Which tests go with which page.

    pytest --page 4_model/01_layers
        the page, and the pages and test files that import its module
    pytest --changed
        the same for all that differs from the last commit (--changed=main: from that one)
    pytest --page layers --far
        those that import it through others, too

The map is what stands in the imports: of notebooks, of test files,
and of what these run in other processes."""
import functools,json,re,subprocess
from fnmatch import fnmatchcase
from pathlib import Path
import pytest

ROOT = Path(__file__).parents[2]

def pytest_addoption(parser):
    group = parser.getgroup('atlas')
    group.addoption('--page',
        help='only the tests of a page, by the name of its file or of its module')
    group.addoption('--changed', nargs='?', const='HEAD', metavar='COMMIT',
        help='only the tests of pages, kernels and test files that differ from a commit, '
             'the last by default')
    group.addoption('--far', action='store_true',
        help='with --page or --changed: what imports them through others, too')

def page_name(path):
    "A page by its place below nbs/: `5_engine/12_scheduler`"
    return path.relative_to(ROOT/'nbs').with_suffix('').as_posix()

def short(page):
    "A page's name without chapter and number"
    return re.sub(r'^(?:.*/)?\d+_', '', page)

def code_of(notebook):
    "The code cells of a notebook, as one text"
    cells = json.loads(notebook.read_text(encoding='utf-8'))['cells']
    return '\n'.join(''.join(c['source']) for c in cells if c['cell_type']=='code')

@functools.cache
def texts():
    "Code of every page, by its place, and text of every test file and helper, by path"
    found = {}
    for p in (ROOT/'nbs').rglob('*.ipynb'):
        if '.ipynb_checkpoints' not in p.parts:
            found[page_name(p)] = code_of(p)
    for folder in (ROOT/'tests', ROOT/'tests'/'helpers'):
        for p in folder.glob('*.py'):
            found[p.relative_to(ROOT).as_posix()] = p.read_text(encoding='utf-8')
    return found

def is_page(name):
    "Is it a page, and no test file?"
    return not name.endswith('.py')

@functools.cache
def makers():
    "The page that each module is made by"
    found = {}
    for page in filter(is_page, texts()):
        directive = re.search(r'#\|\s*default_exp\s+(\S+)', texts()[page])
        if directive:
            found[directive[1]] = page
    return found

def modules_in(text):
    "Modules of the package that a text may import, by all the names that it has for them"
    from atlas import _doors
    found = set(re.findall(r'\batlas\.([a-z_][\w.]*)', text))
    for names in re.findall(r'from\s+atlas\s+import\s+([\w, ]+)', text):
        for name in names.split(','):
            plain = name.split(' as ')[0].strip()
            found.add(_doors.get(plain, name.strip()))
    for module,names in re.findall(r'from\s+atlas\.([\w.]+)\s+import\s+([\w, ]+)', text):
        found |= {f'{module}.{name.strip()}' for name in names.split(',')}
    return found

def test_files_in(text):
    "Test files and helpers that a text imports, or runs by their paths"
    imported = re.findall(r'(?:from|import)\s+\.?(?:helpers\.)?(\w+)', text)
    by_path = re.findall(r'helpers[\'"]?/[\'"]?(\w+)', text)
    for m in imported+by_path:
        for file in (f'tests/helpers/{m}.py', f'tests/{m}.py'):
            if file in texts():
                yield file

def named(text):
    "Pages and files that a text imports"
    for m in modules_in(text):
        parts = m.removeprefix('atlas.').split('.')
        for n in range(len(parts)):
            module = '.'.join(parts[:n+1])
            if module in makers():
                yield makers()[module]
    yield from test_files_in(text)

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
    found = {}
    for p in (ROOT/'kernels').rglob('*.*'):
        if p.suffix not in ('.cu','.cuh','.h'):
            continue
        names = re.findall(r'#include\s+[<"]([^>"]+)', p.read_text())
        found[p.relative_to(ROOT/'kernels').as_posix()] = set(names)
    return found

def kernels(path):
    "Names of the kernels that a file below kernels/ goes into"
    found = {path.removeprefix('kernels/')}
    if path.startswith('kernels/emulator/'):
        found = set(includes())  # all are compiled with those
    while new := {p for p,names in includes().items() if names&found}-found:
        found |= new
    return {Path(p).stem for p in found if p.endswith('.cu')}

def pages_of(name):
    "The page that `name` means; a usage error if there is none"
    def meant(p): return name in (p,short(p)) or makers().get(name)==p
    found = list(filter(meant, texts()))
    if found:
        return found
    there = ', '.join(sorted(filter(is_page, texts())))
    raise pytest.UsageError(f'there is no page {name!r}. There are: {there}')

def has_quoted(text, word): return f"'{word}'" in text or f'"{word}"' in text

def named_in(folder, word):
    "Pages or test files below `folder` that have `word` in quotes"
    inside = [f for f in texts() if f.startswith('tests/')==(folder=='tests')]
    return {f for f in inside if has_quoted(texts()[f], word)}

# Files that no import names, by pattern -> modules whose pages read them, and test files that do
READ = {
    'atlas/model/families/*.toml': ('ground.presets','ground.config'),
    'atlas/service/static/*': ('service.management',
        'tests/test_cli.py','tests/test_http.py','tests/test_page.py',
        'tests/test_models_page.py'),
    'atlas/*.py': ('tests/test_repo.py',),
    'atlas/catalog.json': ('ground.catalog','tests/test_catalog.py'),
    'atlas/bench_prompts.jsonl': ('use.bench_data','tests/test_bench_serve.py'),
    'atlas/quality.txt': ('use.bench_quality','tests/test_quality.py'),
    'kernels/variants.json': ('card.variants','tests/test_kernels.py','tests/test_memory.py'),
    'kernels/host/*': ('ops.host','ops.host_attend',
        'tests/test_host_kernel.py','tests/test_kernels.py','tests/test_repo.py'),
    'kernels/*': ('tests/test_kernels.py','tests/test_repo.py'),
    'tests/data/*': ('tests/helpers/reference.py',),
    'tests/helpers/host_product.cpp': ('tests/test_host_kernel.py',),
    'tests/gpu/*': ('tests/test_gpu_scripts.py',),
    'tests/durations.json': ('tests/test_selection.py',),
    'setup.py': ('tests/test_kernels.py','tests/test_repo.py'),
    'settings.ini': ('tests/test_kernels.py','tests/test_repo.py'),
    '.ci/*': ('tests/test_repo.py','tests/test_site.py'),
    'CONTRIBUTING.md': ('tests/test_repo.py',),
    'CHANGELOG.md': ('tests/test_repo.py',),
    'nbs/index_files/*': ('tests/test_repo.py',),
    'pyproject.toml': ('tests/test_repo.py',),
    'atlas/models/tiny/*': ('tests/test_tiny.py',),
    'deploy/*': ('tests/test_deploy.py',),
    'tools/train_tiny/*': ('tests/test_train_tiny.py',),
    '_quarto.yml': ('tests/test_repo.py',),
    'README.md': ('tests/test_repo.py',),
    '.gitignore': ('tests/test_repo.py',),
}

def readers(path):
    "Pages and test files that read a file which nothing imports"
    p = Path(path)
    patterns = [pattern for pattern in READ if fnmatchcase(path, pattern)]
    names = set(READ[patterns[0]]) if patterns else set()
    if path.startswith('atlas/model/families/'):
        names.add(f'model.families.{p.stem}')
    found = {makers().get(n, n) for n in names}&set(texts())
    if path.startswith('tests/data/'):
        found |= named_in('tests', p.parts[2])
    if path.startswith('nbs/'):
        found |= named_in('nbs', p.name)
    return found

def launchers(path):
    "Pages and test files that name a kernel which a file below kernels/ goes into"
    quoted = [f"'{k}'" for k in kernels(path)]
    return {f for f,text in texts().items() if any(k in text for k in quoted)}

def own_page(path):
    "The page that a notebook is, or that a module is made by"
    p = Path(path)
    if path.startswith('nbs/') and p.suffix=='.ipynb':
        return page_name(ROOT/p)
    module = '.'.join(p.with_suffix('').parts[1:])
    if path.startswith('atlas/') and p.suffix=='.py':
        return makers().get(module)

def roots_of(path):
    "Pages and test files that a changed file is a part of, or that read it"
    if page := own_page(path):
        return {page}&set(texts())
    own = launchers(path) if path.startswith('kernels/') else {path}&set(texts())
    return own or readers(path)

def changed(commit):
    "Files that differ from `commit`, new ones included"
    def git(*args):
        return subprocess.check_output(['git', *args], cwd=ROOT, text=True).splitlines()
    return git('diff', '--name-only', commit)+git('ls-files', '--others', '--exclude-standard')

def pytest_report_header(config):
    "What has changed, and no test is known to read"
    commit = config.option.changed
    if not commit:
        return
    unknown = [p for p in changed(commit) if not roots_of(p)]
    if unknown:
        return f'changed, and read by no test that is known: {", ".join(unknown)}'

def wanted(config):
    "Pages and files whose tests are asked for; None: all"
    o = config.option
    if not o.page and not o.changed:
        return None
    roots = set(pages_of(o.page)) if o.page else set()
    if o.changed:
        roots |= {r for path in changed(o.changed) for r in roots_of(path)}
    return users(roots, o.far)

def belongs(item, those):
    "Is a test one of a page or file among `those`?"
    params = getattr(getattr(item, 'callspec', None), 'params', {})
    if nb := params.get('nb'):
        return page_name(nb) in those
    if page := params.get('page'):
        return page in those
    if module := params.get('mod') or params.get('module'):
        return makers().get(module) in those
    return item.path.relative_to(ROOT).as_posix() in those

def pytest_collection_modifyitems(config, items):
    those = wanted(config)
    if those is None:
        return
    kept = [i for i in items if belongs(i, those)]
    config.hook.pytest_deselected(items=[i for i in items if i not in set(kept)])
    items[:] = kept
