"""Plots of the site, for those who see them on a phone, or not at all.

A plot much wider than high keeps its letters on a phone, and is moved sideways in its box:
`img[data-flat]` of site.css. What a plot says in words (title, axes, names of curves) is its
alternative text, which readers of screens speak; where it has no words, the sentence before it."""
import ast,base64,json,re,struct

# The first 24 bytes of a PNG have its width and height at their end
PNG = re.compile(r'<img (?=(?:alt="[^"]*" )?src="data:image/png;base64,([\w+/]{32}))')
FLAT = 2.2 # Widths for a height, from which a plot is flat

def marked(page):
    "A page in which flat plots are told from others"
    def mark(m):
        width,height = struct.unpack_from('>2I', base64.b64decode(m[1]), 16)
        return '<img data-flat ' if width>FLAT*height else m[0]
    return PNG.sub(mark, page)

# -- in words --------------------------------------------------------------------------------------

def text(saved):
    "What a notebook has as one string or a list of lines"
    return saved if isinstance(saved, str) else ''.join(saved)

def shows_picture(cell):
    outputs = cell.get('outputs', []) if cell['cell_type']=='code' else []
    return any(k.startswith('image/') for o in outputs for k in o.get('data', {}))

KINDS = 'title','ylabel','xlabel','label'
ASKED = dict(set_title='title', suptitle='title', set_xlabel='xlabel', set_ylabel='ylabel')

def constant(n):
    "The string that an argument is, or nothing"
    return n.value.strip() if isinstance(n, ast.Constant) and isinstance(n.value, str) else ''

def words(source):
    "What the calls of a source write into a plot, by kind"
    lines = [l for l in source.splitlines() if not l.startswith(('%','!'))]
    found = {k: [] for k in KINDS}
    for c in ast.walk(ast.parse('\n'.join(lines))):
        if not isinstance(c, ast.Call):
            continue
        name = getattr(c.func, 'attr', '')
        kind = ASKED.get(name, name)
        said = [(kind, constant(a)) for a in c.args[:1]]
        said += [(k.arg, constant(k.value)) for k in c.keywords]
        for k,s in said:
            if k in found and s and not s.startswith('_') and s not in found[k]:
                found[k].append(s)
    return found

def last_sentence(md):
    "Of the last paragraph of a text, without what is only for the eye"
    prose = [b for b in re.split(r'\n\s*\n', md) if re.match(r'\w', b)]
    if not prose:
        return ''
    line = re.sub(r'\[([^]]*)\]\([^)]*\)', r'\1', ' '.join(prose[-1].split()))
    line = re.sub(r'[*`$]', '', line)
    return re.split(r'(?<=[.!?:]) (?=\w)', line)[-1].rstrip(':')

def alternative(cell, before):
    "What a picture shows, in words: its own, or the sentence `before` it"
    title,ys,xs,names = words(text(cell['source'])).values()
    between = ' over ' if len(ys)==len(xs)==1 else ', '
    parts = ['; '.join(title), between.join(ys+xs), ', '.join(names)]
    said = ': '.join(p for p in parts if p) or before
    return f'Plot. {said}' if said else 'Plot'

def described(cells):
    "Cells of which each that shows a picture says what it is"
    out,before = [],''
    for c in cells:
        if c['cell_type']=='markdown':
            before = last_sentence(text(c['source'])) or before
        source = text(c['source'])
        if shows_picture(c) and '#| fig-alt' not in source:
            alt = json.dumps(alternative(c, before), ensure_ascii=False)
            c = c|dict(source=f'#| fig-alt: {alt}\n{source}')
        out.append(c)
    return out
