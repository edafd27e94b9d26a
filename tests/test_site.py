"""The site: what it makes of a page before it is rendered, and, of the site as built,
that a reader finds the way, reads it without a network, and on a phone."""
import base64,posixpath,re,struct,sys
from urllib.parse import unquote
import pytest
from atlas.book import address,place
from helpers.browser import browser
from helpers.site import ROOT,built,served

sys.path.insert(0, str(ROOT/'.ci'))
import plots,staged  # noqa: E402

slow = pytest.mark.slow

# -- before it is rendered -------------------------------------------------------------------------

def card(name):
    "What nbdev puts beside a definition"
    md = f'---\n\n### {name}\n\n```python\ndef f(\n    x\n):\n```\n\n*What it does*'
    shown = dict(output_type='display_data', data={'text/markdown': md.splitlines(True)})
    return dict(cell_type='code', source=f'#| echo: false\nshow_doc({name})', outputs=[shown])

def exported(source):
    "The cell of an exported source, as nbdev stages it"
    source = f'{staged.EXPORTED}#| exports: true\n{source}'
    return dict(cell_type='code', source=source, outputs=[])

def said(cells):
    "Headings and code of cells, without directives"
    return [re.sub(r'^#\|.*\n', '', staged.text(c['source']), flags=re.M) for c in cells]

def test_a_card_becomes_a_heading():
    cells = staged.one_heading([card('f'), exported('def f(x): return x')])
    assert said(cells)==['### `f` {.definition}', 'def f(x): return x']

def test_a_cell_of_several_definitions_is_cut():
    "Cards come anywhere, in no order; helpers stay with what they help"
    source = '@patch\ndef __repr__(self:A): return _name\n\n_name = 1\ndef g(): pass\nlast = 2'
    before,after = [card('g'), exported('_h = 2')],[card('A.__repr__'), card('B.g')]
    cells = staged.one_heading([*before, exported(source), *after])[1:]
    assert said(cells[:4])==[
        '### `A.__repr__` {.definition}', '@patch\ndef __repr__(self:A): return _name',
        '### `g` {.definition}', '_name = 1\ndef g(): pass\nlast = 2']
    assert cells[4:]==after[1:]

def test_a_source_without_cards_is_shown_as_it_is():
    cells = [card('f'), exported('x = 1'), exported('%magic')]
    assert said(staged.one_heading(cells))[1:]==['x = 1', '%magic']

def shows(lines, source="show_src(Source('gemv').text, 'cpp')"):
    "A cell that shows a source of so many lines"
    md = '```cpp\n'+'\n'.join(['int x;']*lines)+'\n```'
    shown = dict(output_type='display_data', data={'text/markdown': md})
    return dict(cell_type='code', source=source, outputs=[shown])

def test_long_kernels_are_folded():
    short = shows(staged.LONG)
    assert staged.folded(short)==short
    md = staged.markdown(staged.folded(shows(staged.LONG+1)))
    assert f'<summary><code>kernels/gemv.cu</code>, {staged.LONG+1} lines</summary>' in md
    header = "show_src(Source('experts').files['lib/given.cuh'], 'cpp')"
    assert 'kernels/lib/given.cuh' in staged.markdown(staged.folded(shows(99, header)))

def test_a_file_of_the_repository_is_linked_there():
    md = 'see [this](deploy/README.md), [that](https://x.org/a.md)'
    assert staged.SOURCES+'deploy/README.md)' in staged.to_sources(md)
    assert staged.to_files(staged.to_sources(md))==md

# -- as built --------------------------------------------------------------------------------------

@pytest.fixture(scope='session')
def site(tmp_path_factory):
    "The tree in which the site was built"
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if base.name.startswith('popen-') else base
    return built(shared/'site')

@pytest.fixture(scope='session')
def docs(site): return site/'_docs'

@pytest.fixture(scope='session')
def html(docs):
    "Pages by their address"
    found = docs.rglob('*.html')
    return {p.relative_to(docs).as_posix(): p.read_text(encoding='utf-8') for p in found}

@slow
def test_nothing_is_amiss(site):
    warnings = [l for l in (site/'said.txt').read_text().splitlines() if 'warning' in l]
    assert not warnings, '\n'.join(warnings)

TAG = r'<(?:script|link|img|iframe|source)\b[^>]*?'
LOADS = re.compile(TAG+r'(?:src|href)=["\'](?:https?:)?//[^"\']*')

@slow
def test_nothing_comes_from_other_sites(docs, html):
    "Scripts, styles, fonts and pictures: a plane has no network"
    bad = [f'{k}: {m[0]}' for k,page in html.items() for m in LOADS.finditer(page)]
    for p in docs.rglob('*.css'):
        css = p.read_text(encoding='utf-8')
        bad += [f'{p.name}: {m}' for m in re.findall(r'(?:url\(|@import )["\']?https?:[^)]*', css)]
    assert not bad, '\n'.join(bad[:20])

def neighbour(page, side):
    "The address and the title of the previous or the next page, or None"
    part = page.partition(f'nav-page-{side}">')[2].partition('</div>')[0]
    link = re.search(r'href="([^"]+)".*?nav-page-text">([^<]+)<', part)
    return link and link.groups()

@slow
def test_pages_follow_one_another(html):
    "In reading order, from the front page to the last and back"
    nbs = [p.relative_to(ROOT/'nbs').as_posix() for p in (ROOT/'nbs').rglob('*.ipynb')
           if '.ipynb_checkpoints' not in p.parts]
    front = ['index.html']
    order = front+[address(p) for p in sorted(nbs, key=place) if p!='index.ipynb']
    assert sorted(order)==sorted(set(html)-{'404.html'})
    pairs = list(zip(order, order[1:]))
    for side,steps in (('next', pairs), ('previous', [(b, a) for a,b in pairs])):
        for here,there in steps:
            to,title = neighbour(html[here], side)
            assert posixpath.normpath(posixpath.join(posixpath.dirname(here), to))==there
            assert f'<title>{title}' in html[there]

@slow
def test_links_within_the_site(html):
    "To pages, and to places on them"
    places,bad = {k: set(re.findall(r'\bid="([^"]+)"', page)) for k,page in html.items()},[]
    for k,page in html.items():
        main = page.partition('<main')[2].partition('</main>')[0]
        for link in re.findall(r'<a [^>]*href="(?![a-z]+:)([^"]+)"', main):
            path,_,at = link.partition('#')
            to = posixpath.normpath(posixpath.join(posixpath.dirname(k), path)) if path else k
            if to not in html or at and unquote(at) not in places[to]:
                bad.append(f'{k}: {link}')
    assert not bad, '\n'.join(bad)

@slow
def test_no_definition_is_headed_twice(html):
    bad = []
    for k,page in html.items():
        names = re.findall(r'<h3 [^>]*><code>([^<]+)</code></h3>', page)
        bad += [f'{k}: {n}' for n in set(names) if names.count(n)>1]
        bad += [f'{k}: {m}' for m in re.findall(r'<summary>Exported source', page)]
    assert not bad, '\n'.join(bad[:20])

@slow
def test_kernels_are_folded(html):
    "Where a long source is shown, it is within what can be folded"
    for k,page in html.items():
        for part in page.split('<pre class="sourceCode cpp')[1:]:
            lines = part.partition('</pre>')[0].count('\n')+1
            before = page.partition(part)[0]
            folded = before.count('<details')>before.count('</details>')
            assert lines<=staged.LONG or folded, f'{k}: {lines} lines'

@slow
def test_what_else_a_site_has(docs, html):
    for k,page in html.items():
        title = re.search(r'<title>([^<]+)</title>', page)
        assert title and 'Atlas' in title[1], k
        icon = re.search(r'<link rel="icon" href="([^"]+)"', page)[1]
        assert (docs/posixpath.dirname(k)/icon).is_file(), k
    assert '<base href="/atlas/">' in html['404.html']
    assert '7_service/http.llms.md' in (docs/'llms.txt').read_text()

@slow
def test_the_front_page_has_its_pictures(site, html):
    assert len(re.findall(r'<img [^>]*src="data:image/png', html['index.html']))==2
    shown = re.findall(r'!\[[^]]+\]\(([^)]+)\)', (site/'README.md').read_text())
    assert len(shown)==2 and all((site/p).is_file() for p in shown)

def image(width, height):
    "The tag of a picture, as pages have it"
    head = b'\x89PNG\r\n\x1a\n'+struct.pack('>I4s2I', 13, b'IHDR', width, height)
    return f'<img src="data:image/png;base64,{base64.b64encode(head).decode()}…">'

def test_flat_plots_are_marked():
    flat,high = image(811, 65),image(613, 349)
    assert plots.marked(flat)==flat.replace('<img', '<img data-flat')
    assert plots.marked(high)==high

def plot(source):
    "A cell that shows a picture"
    output = dict(output_type='display_data', data={'image/png': 'iVBO'})
    return dict(cell_type='code', source=source, outputs=[output])

@pytest.mark.parametrize('source,alt', [
    ("ax.set(xlabel='KB', ylabel='ms')", 'ms over KB'),
    ("plt.title('Reads'); plt.ylabel('GB/s'); plt.plot(x, label='direct')", 'Reads: GB/s: direct'),
    ("a.set_ylabel('ms')\nb.set_ylabel('KB')\nb.set_xlabel('rows')", 'ms, KB, rows'),
    ("%matplotlib inline\ndraw(label='_none')", 'It grows with n, see below.')])
def test_what_a_plot_says(source, alt):
    said = 'So far.\n\nThat is all. It grows with `n`, see [below](#x).'
    md = dict(cell_type='markdown', source=said)
    source = plots.described([md, plot(source)])[1]['source']
    assert source.startswith(f'#| fig-alt: "Plot. {alt}"\n')

@slow
def test_every_plot_says_what_it_shows(html):
    shown = [i for p in html.values() for i in re.findall(r'<img[^>]*src="data:image.{9}', p)]
    assert shown and all(re.search('alt="[^"]', i) for i in shown)

# -- in a browser ----------------------------------------------------------------------------------

PAGES = ('index','book','1_ground/formats','2_card/device','3_ops/linear/ops.linear',
    '3_ops/moe/cuda.experts','4_model/families.qwen','5_engine/scheduler','6_text/chat',
    '7_service/http','7_service/gateway','8_use/bench_decode')
some = pytest.mark.parametrize('name', PAGES)
NOWHERE = '--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1'

@pytest.fixture(scope='module')
def tab(docs):
    "A tab that reaches nothing but the built site: no name is found"
    with served(docs) as at, browser(NOWHERE) as b:
        page = b.open('about:blank')
        def opened(name, wide=1280, dark=False):
            page.size(wide, 900, touch=wide<600)
            page.dark(dark)
            page.go(f'{at}{name}.html')
            return page
        yield opened

@slow
@some
def test_formulas_are_there(tab, name):
    p = tab(name)
    p.until('document.querySelectorAll(".math:not(:has(.katex))").length===0')
    assert p.js('document.querySelectorAll(".katex-error").length')==0
    if p.js('document.querySelectorAll(".katex").length'):
        p.js('await document.fonts.ready')
        faces = p.js('[...document.fonts].map(f => [f.family, f.status])')
        assert ['KaTeX_Main','loaded'] in faces
        assert not [name for name,status in faces if status=='error']

LINES = '''[...document.querySelectorAll("main pre")].filter(p => p.offsetParent)
    .map(p => [p.innerText.split("\\n").map(l => l.length), p.scrollWidth-p.clientWidth])
    .filter(([letters, more]) => Math.max(...letters)<=100 && more>1)'''
SIDEWAYS = 'document.documentElement.scrollWidth-document.documentElement.clientWidth'

@slow
@some
def test_a_line_of_code_fits(tab, name):
    "One of 100 letters at 1280 pixels"
    p = tab(name)
    p.js('document.querySelectorAll("details").forEach(d => d.open = true)')
    assert p.js(LINES)==[]
    assert p.js(SIDEWAYS)<=0

@slow
@some
def test_a_phone_shows_a_page_whole(tab, name):
    "What is wider scrolls in a box of its own"
    p = tab(name, 390)
    assert p.js(SIDEWAYS)<=0
    tables = '[...document.querySelectorAll("main table")]'
    inside = 't => t.closest(".sd-table, .cell-output").getBoundingClientRect().right<=391'
    assert p.js(f'{tables}.every({inside})')

@slow
def test_a_phone_shows_the_letters_of_a_flat_plot(tab):
    p = tab('6_text/deltas', 390)
    assert p.js('document.querySelector("img[data-flat]").getBoundingClientRect().width')>500
    assert p.js(SIDEWAYS)<=0

CONTRAST = '''(e => {
    const rgb = c => c.match(/[\\d.]+/g).map(Number);
    const linear = v => v<=.03928 ? v/12.92 : ((v+.055)/1.055)**2.4;
    const share = [.2126,.7152,.0722];
    const light = c => share.reduce((sum, s, i) => sum+s*linear(rgb(c)[i]/255), 0);
    let under = e;
    while (under.parentElement && (rgb(getComputedStyle(under).backgroundColor)[3] ?? 1)<1)
        under = under.parentElement;
    const a = light(getComputedStyle(e).color), b = light(getComputedStyle(under).backgroundColor);
    return (Math.max(a, b)+.05)/(Math.min(a, b)+.05); })'''

@slow
@pytest.mark.parametrize('dark', [False,True])
def test_search_can_be_read(tab, dark):
    p = tab('7_service/http', dark=dark)
    p.js('document.querySelector("#quarto-search input").focus()')
    p.type('scheduler')
    p.until('document.querySelector(".search-result-title")')
    assert p.js('document.querySelectorAll(".search-result").length')>3
    assert p.js('document.documentElement.classList.contains("quarto-dark")')==dark
    for part in ('#quarto-search input','.search-result-title','.search-result-text','mark'):
        assert p.js(f'{CONTRAST}(document.querySelector("{part}"))')>4.5, part

@slow
@pytest.mark.parametrize('dark', [False,True])
def test_code_can_be_read(tab, dark):
    p = tab('5_engine/scheduler', dark=dark)
    p.until(f'document.documentElement.classList.contains("quarto-dark")==={str(dark).lower()}')
    spans = '[...document.querySelectorAll("main pre code, main pre code span")].slice(0, 900)'
    low = p.js(f'{spans}.map(e => [{CONTRAST}(e), e.className, e.textContent]).filter(c => c[0]<4)')
    assert not low, low[:5]

@slow
@some
def test_the_sidebar_stands_at_the_page(tab, name):
    "It is marked, and in sight; only its own chapter is open"
    p = tab(name)
    assert p.js('document.querySelectorAll(".sidebar-link.active").length')==1
    assert p.js('''(() => {
        const bar = document.getElementById("quarto-sidebar").getBoundingClientRect();
        const here = document.querySelector(".sidebar-link.active").getBoundingClientRect();
        return here.top>=bar.top && here.bottom<=Math.min(bar.bottom, innerHeight); })()''')
    opened = p.js('document.querySelectorAll(".sidebar-section.depth1.show").length')
    assert opened==('/' in name)
