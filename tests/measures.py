"""How the tree reads, in numbers: lines, tokens, functions, and what stands between shown things.

    python tests/measures.py [-v] [PATH ...]

A row for each chapter, the kernels and the tests, or for each path: notebooks, Python, CUDA and
C++ files, or folders of these. `longest` is a line, in characters; `function` the 90th percentile
of tokens of a function, `large` counts those of more than 170, `bodies` functions of CUDA of more
than 60 lines, `walls` runs of more than 250 words or three exported cells with nothing shown, and
`words` are the most with nothing shown. `-v` says where a line is too long, a function too large,
and so on. Below it, the minutes of the tests: of one processor, by tests/durations.json."""
import ast,io,json,re,sys,tokenize
from collections import Counter
from dataclasses import dataclass,field
from pathlib import Path
from helpers import durations

ROOT = Path(__file__).parents[1]
LINE,MANY = 100,20 # Characters and tokens of a line
FUNCTION,NAMES = 170,3 # Tokens of a function, names of one assignment
WORDS,CELLS = 250,3 # With nothing shown
BODY = 60 # Lines of a function of CUDA
C_KINDS = '.cu','.cuh','.h','.cpp'
KINDS = '.ipynb','.py',*C_KINDS
LAYOUT = {
    tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.COMMENT, tokenize.ENCODING, tokenize.ENDMARKER}
C_TOKEN = re.compile(
    r'"(?:\\.|[^"\\])*"|[A-Za-z_]\w*|\d[\w.]*|<<=|>>=|->'
    r'|\+\+|--|<<|>>|[<>=!]=|&&|\|\||[-+*/]=|::|\S')

def quantile(counts:list, q:float)->int:
    "What a share `q` of `counts` does not exceed"
    return sorted(counts)[int(q*(len(counts)-1))] if counts else 0

@dataclass
class Measures:
    "Of some files"
    lines:int=0
    tokens:list=field(default_factory=list) # Of each line that has some
    longest:int=0 # Characters of a line
    long:int=0 # Lines
    joined:int=0 # Lines with two statements
    wide:int=0 # Assignments of many names
    lambdas:int=0 # With a name
    functions:list=field(default_factory=list) # Tokens of each function
    bodies:int=0 # Functions of CUDA that are too long
    walls:int=0 # Runs of words or exported cells with nothing shown
    words:int=0 # The most with nothing shown

    def quantile(self, q:float)->int:
        "Tokens that a line has at most, but for the longest"
        return quantile(self.tokens, q)

    def row(self, name:str)->str:
        "A line of the table"
        large = sum(n>FUNCTION for n in self.functions)
        worst = max(self.functions, default=0)
        return (
            f'{name:14} {self.lines:7,} {self.quantile(.5):4} {self.quantile(.9):4} '
            f'{self.quantile(.99):4} {self.longest:7} {self.long:6} {self.joined:6} {self.wide:6} '
            f'{self.lambdas:7} {quantile(self.functions, .9):8} {large:5} {worst:6} '
            f'{self.bodies:6} {self.walls:6} {self.words:5}')

HEAD = (
    f'{"":14} {"lines":>7} {"p50":>4} {"p90":>4} {"p99":>4} {"longest":>7} {"long":>6} '
    f'{"joined":>6} {"wide":>6} {"lambdas":>7} {"function":>8} {"large":>5} {"worst":>6} '
    f'{"bodies":>6} {"walls":>6} {"words":>5}')

def files(paths):
    "All files below `paths` that are measured"
    for p in paths:
        found = [p] if p.is_file() else sorted(p.rglob('*'))
        yield from (f for f in found if f.suffix in KINDS and '.ipynb_checkpoints' not in f.parts)

def cells(path)->list:
    "Cells of a notebook, with their source as one text"
    found = json.loads(path.read_text(encoding='utf-8'))['cells']
    return [c|dict(source=''.join(c['source'])) for c in found]

def sources(path):
    "(where, text) of all code of a file"
    if path.suffix!='.ipynb':
        yield str(path),path.read_text(encoding='utf-8')
        return
    for i,c in enumerate(cells(path)):
        if c['cell_type']=='code' and not c['source'].lstrip().startswith('%'):
            yield f'{path}[{i}]',c['source']

def tokens_of(src:str)->Counter:
    "Tokens of each line of Python, layout and comments aside"
    try:
        found = list(tokenize.generate_tokens(io.StringIO(src).readline))
    except (tokenize.TokenError,SyntaxError):
        return Counter()
    return Counter(t.start[0] for t in found if t.type not in LAYOUT)

def joined(tree)->list:
    "Lines with two statements, but for functions that return one plain value"
    begun = Counter(n.lineno for n in ast.walk(tree) if isinstance(n, ast.stmt))
    for n in ast.walk(tree):
        if isinstance(n, ast.FunctionDef) and isinstance(n.body[0], ast.Return):
            begun[n.lineno] -= n.body[0].lineno==n.lineno
    return [line for line,n in begun.items() if n>1]

def python(src:str, m:Measures, say):
    "Measure a text of Python"
    per = tokens_of(src)
    m.tokens += per.values()
    for line,n in per.items():
        if n>2*MANY:
            say(line, f'{n} tokens')
    try:
        tree = ast.parse(src)
    except SyntaxError:
        return
    for line in joined(tree):
        m.joined += 1
        say(line, 'two statements')
    for n in ast.walk(tree):
        if isinstance(n, (ast.FunctionDef,ast.AsyncFunctionDef)):
            measure_function(n, per, m, say)
        if isinstance(n, ast.Assign):
            measure_assignment(n, m, say)

def measure_function(n, per:Counter, m:Measures, say):
    "Count a function of Python, of whose lines `per` has the tokens"
    total = sum(k for line,k in per.items() if n.lineno<=line<=n.end_lineno)
    m.functions.append(total)
    if total>FUNCTION:
        say(n.lineno, f'{n.name} has {total} tokens')

def measure_assignment(n, m:Measures, say):
    "Count an assignment of Python"
    m.lambdas += isinstance(n.value, ast.Lambda)
    names = max(len(t.elts) if isinstance(t, ast.Tuple) else 1 for t in n.targets)
    if names>NAMES:
        m.wide += 1
        say(n.lineno, f'{names} names')

def blank(found)->str:
    "The line breaks of a match"
    return '\n'*found[0].count('\n')

def code_of(src:str)->str:
    "CUDA C++ without comments, directives and what strings say; lines stay where they are"
    src = re.sub(r'/\*.*?\*/', blank, src, flags=re.S)
    src = re.sub(r'//.*', '', src)
    src = re.sub(r'"(?:\\.|[^"\\])*"|\'\\?.\'', '""', src)
    return re.sub(r'^[ \t]*#(?:.*\\\n)*.*', blank, src, flags=re.M)

def closing(code:str, at:int)->int:
    "Where the parenthesis or brace that opens at `at` is closed"
    depth = 0
    for i in range(at, len(code)):
        depth += (code[i] in '({')-(code[i] in ')}')
        if not depth:
            return i
    return len(code)-1

def plain_statements(code:str)->str:
    "`code` whose loops' heads, and lambdas of one statement, have no semicolons"
    for found in re.finditer(r'\bfor\s*\(', code):
        end = closing(code, found.end()-1)
        code = code[:found.start()]+code[found.start():end].replace(';', ',')+code[end:]
    lambda_of_one = r'\[[&=\w, ]*\]\s*(?:\([^()]*\))?\s*\{[^{};]*;\s*\}'
    return re.sub(lambda_of_one, lambda found: found[0].replace(';', ','), code)

def bodies(code:str):
    "(first line, lines) of each function that a card runs"
    for found in re.finditer(r'\b__(?:device|global)__\b', code):
        head = re.compile(r'[;{]').search(code, found.end())
        if head and head[0]=='{':
            end = closing(code, head.start())
            yield code.count('\n', 0, head.start())+1,code.count('\n', head.start(), end)-1

def cuda(src:str, m:Measures, say):
    "Measure a text of CUDA C++"
    plain = re.sub(r'/\*.*?\*/', blank, src, flags=re.S)
    for line in plain.splitlines():
        if n := len(C_TOKEN.findall(re.sub(r'//.*', '', line))):
            m.tokens.append(n)
    code = code_of(src)
    for i,line in enumerate(plain_statements(code).splitlines(), 1):
        if line.count(';')>1:
            m.joined += 1
            say(i, 'two statements')
    for i,n in bodies(code):
        if n>BODY:
            m.bodies += 1
            say(i, f'a body of {n} lines')

def imports_only(src:str)->bool:
    "A cell of imports, which a page's reader does not see"
    return all(isinstance(n, (ast.Import,ast.ImportFrom)) for n in ast.parse(src).body)

def walls(path, m:Measures, say):
    "Count runs of prose or code of a page with nothing shown"
    words = exported = 0
    for i,c in enumerate(cells(path)):
        if c['cell_type']=='markdown':
            words += len(c['source'].split())
        elif c['source'].startswith('#| export') and not imports_only(c['source']):
            exported += 1
        if c['cell_type']=='code' and c.get('outputs') or '|--' in c['source']:
            words = exported = 0
        m.words = max(m.words, words)
        if words>WORDS or exported>CELLS:
            m.walls += 1
            say(i, f'{words} words and {exported} exported cells with nothing shown')
            words = exported = 0

def measured(paths, verbose=False)->Measures:
    "What files have"
    m = Measures()
    for path in files(paths):
        for where,src in sources(path):
            def say(line, what):
                if verbose:
                    print(f'{where}:{line}: {what}')
            rows = src.splitlines()
            m.lines += len(rows)
            for i,row in enumerate(rows, 1):
                m.longest = max(m.longest, len(row))
                if len(row)>LINE:
                    m.long += 1
                    say(i, f'{len(row)} characters')
            (cuda if path.suffix in C_KINDS else python)(src, m, say)
        if path.suffix=='.ipynb':
            walls(path, m, lambda i,what: verbose and print(f'{path}[{i}]: {what}'))
    return m

def minutes()->str:
    "What the tests take, those that a plain run leaves out and the others"
    def shown(some): return f'{sum(some)/60:.1f} minutes in {len(some):,} tests'
    seconds = [s for s in durations.read().values() if s]
    slow = [s for s in seconds if s>durations.SLOW]
    rest = [s for s in seconds if s<=durations.SLOW]
    return f'pytest: {shown(rest)} of more than {durations.FAST} s; pytest -m slow: {shown(slow)}'

def main(args):
    "Print the table"
    verbose = '-v' in args
    named = [Path(a) for a in args if a!='-v']
    paths = named or [*sorted(p for p in (ROOT/'nbs').glob('[0-9]*') if p.is_dir()),
        ROOT/'kernels', ROOT/'tests']
    rows = [(p.name, measured([p], verbose)) for p in paths]
    print(HEAD)
    for name,m in rows:
        print(m.row(name))
    print(minutes())

if __name__=='__main__':
    main(sys.argv[1:])
