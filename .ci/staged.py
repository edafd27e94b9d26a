"""What the site makes of a staged page before it is rendered.

nbdev puts a card (name, signature, docstring) beside the source of each exported definition, which
says the same again: here a card becomes the heading of its definition. Long kernels are folded."""
import ast,json,re
from plots import described,text

CARD = re.compile(r'---\n\n### (.+)\n')
EXPORTED = '#| code-fold: show\n#| code-summary: "Exported source"\n'
CODE = re.compile(r'```\w+\n.*\n```\s*', re.S)
LONG = 40 # lines of a source that is shown unfolded

def markdown(cell):
    "What a cell shows as markdown, the first of it"
    outputs = cell.get('outputs', [])
    shown = [o['data']['text/markdown'] for o in outputs if 'text/markdown' in o.get('data', {})]
    return text(shown[0]) if shown else ''

def title(cell):
    "The definition that a card is about, or None where a cell is no card"
    found = CARD.match(markdown(cell))
    return found[1] if found and 'show_doc(' in text(cell['source']) else None

# -- definitions -----------------------------------------------------------------------------------

def defined(source):
    "The definitions in a source"
    try:
        tree = ast.parse(source)
    except SyntaxError: # a magic
        return []
    return [n for n in tree.body if hasattr(n, 'name')]

def patched(n):
    "Names in what says onto which class a definition is patched; of others, none"
    decorators = ' '.join(ast.unparse(d) for d in n.decorator_list)
    if 'patch' not in decorators:
        return []
    first = n.args.args[:1]
    of = ast.unparse(first[0].annotation) if first and first[0].annotation else ''
    return re.findall(r'\w+', f'{decorators} {of}')

def fits(title, n):
    "Is `title`, `Seq.span` or `rank`, that of a definition?"
    cls,_,name = title.rpartition('.')
    if name!=n.name:
        return False
    return not cls or cls in patched(n)

def parts(source, titles):
    "A source cut after each definition that has a title: its titles, and lines"
    lines,found,at = source.splitlines(),[],0
    for n in defined(source):
        mine = [t for t in titles if fits(t, n)]
        if mine:
            found.append((mine, lines[at:n.end_lineno]))
            at = n.end_lineno
    if not found:
        return [([], lines)]
    found[-1][1].extend(lines[at:])
    return found

def heading(name):
    source = f'### `{name}` {{.definition}}'
    return dict(cell_type='markdown', metadata={}, source=source)

def headed(cell, titles):
    "The cells that an exported source becomes: each definition with a title under it"
    source = text(cell['source']).removeprefix(EXPORTED)
    options = [l for l in source.splitlines() if l.startswith('#|')]
    body = '\n'.join(source.splitlines()[len(options):])
    cells = []
    for names,lines in parts(body, titles):
        cells += [heading(n) for n in dict.fromkeys(names)]
        code = '\n'.join(lines).strip('\n')
        cells.append(cell|dict(source='\n'.join(options+[code]), outputs=[]))
    cells[-1]['outputs'] = cell.get('outputs', [])
    return cells

def one_heading(cells):
    "Cells in which no definition is headed by a card and by its own source, wherever the card is"
    cards = [title(c) for c in cells if title(c)]
    found,used = [],set()
    for cell in cells:
        source = text(cell['source'])
        if not source.startswith(EXPORTED):
            found.append(cell)
            continue
        here = defined(source)
        mine = [t for t in cards if t not in used and any(fits(t, n) for n in here)]
        used.update(mine)
        found += headed(cell, mine)
    return [c for c in found if title(c) not in used]

# -- kernels ---------------------------------------------------------------------------------------

def kernel(source):
    "The file that a cell shows, `kernels/gemv.cu` or `kernels/lib/load.cuh`"
    header = re.search(r"'(lib/[\w.]+)'", source)
    name = re.search(r"Source\('(\w+)'\)", source)
    if header:
        return f'kernels/{header[1]}'
    return f'kernels/{name[1]}.cu' if name else 'source'

def folded(cell):
    "The cell, with a long source that it shows folded; how it was got is left out"
    shown = markdown(cell)
    lines = shown.strip().count('\n')-1
    if not CODE.fullmatch(shown) or lines<=LONG:
        return cell
    source = text(cell['source'])
    summary = f'<summary><code>{kernel(source)}</code>, {lines} lines</summary>'
    md = f'<details class="kernel">\n{summary}\n\n{shown.strip()}\n\n</details>\n'
    output = dict(output_type='display_data', metadata={}, data={'text/markdown': md})
    return cell|dict(source='#| echo: false\n'+source, outputs=[output])

# -- pages -----------------------------------------------------------------------------------------

SOURCES = 'https://github.com/atlas-inference/atlas/blob/main/'
FILE = re.compile(r'\]\((?!https?:)([\w./-]+\.md)\)')

def to_sources(md): return FILE.sub(rf']({SOURCES}\1)', md)

def to_files(md):
    "The other way, for the README, which lies beside these files"
    return md.replace(f']({SOURCES}', '](')

def changed(path, change):
    "Rewrite a staged notebook: `change` is given its cells and returns others"
    page = json.loads(path.read_text(encoding='utf-8'))
    page['cells'] = change(page['cells'])
    path.write_text(json.dumps(page, ensure_ascii=False), encoding='utf-8')

def shown(cells):
    "The cells of a page as the site shows them"
    cells = [folded(c) for c in one_heading(described(cells))]
    for c in cells:
        if c['cell_type']=='markdown':
            c['source'] = to_sources(text(c['source']))
    return cells

def unnamed(cells):
    "Cells without the file name that nbdev puts at the top"
    top = text(cells[0]['source'])
    cells[0]['source'] = re.sub(r'^output-file: .*\n', '', top, flags=re.M)
    return cells

def rewrite(path):
    "A staged page as the site shows it"
    changed(path, shown)

def forget_output_file(path):
    "For smalldocs, which does not read it"
    changed(path, unnamed)
