"""The models page, in a browser where there is one: memory, states and speeds, loading and
unloading, keys, and what people see who use no mouse."""
import json,sys
from contextlib import contextmanager
from pathlib import Path
import pytest

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from browser import browser  # noqa: E402
from scripted import Speaker,running  # noqa: E402
from test_page import RATIO  # noqa: E402
from atlas.ground.core import RequestError  # noqa: E402
from atlas.service.process import Served  # noqa: E402
from atlas.service.models import Models  # noqa: E402
from atlas.service.http import ApiKeys,Rules  # noqa: E402
from atlas.service.server import create_app  # noqa: E402
from atlas.service.service import ReadyModel  # noqa: E402
from atlas.text.chat import ChatTemplate  # noqa: E402

GIB = 1<<30
NASTY = '<img src=x onerror=alert(1)>'

class Sham(Served):
    "A model that is loaded and unloaded at once"
    need = 0
    def stay(self):
        holds = self.need*(self.state=='loaded')
        return dict(need=self.need, holds=holds, pinned=False)
    def _go(self, state, why=None):
        self.wanted = state=='loaded'
        self.reason = why
        self._set(state)
    @property
    def condition(self): return self.state
    @property
    def status(self):
        said = dict(value=self.state if self.state!='failed' else 'unloaded', args=[])
        return said|(dict(reason=self.reason) if self.reason else {})
    def begin(self, admin=False, evicts=True):
        self._go('loaded')
    async def stop(self, drain=0.):
        self._go('unloaded')

class Shams(Models):
    "Such models, of one budget"
    memory = dict(budget=100*GIB)
    async def unload(self, name):
        m = self.find(name)
        if not m.wanted:
            raise RequestError(f'{m.name} is not loaded', param='model')
        await m.stop()
        return m.described()

def sham(name, need, state='loaded', why=None):
    s = Speaker(str)
    s.info |= dict(name=name)
    m = Sham([name], ReadyModel(name, [name], s.info, s.tok, ChatTemplate('x'), runner=s))
    m.need = need
    m.state = state
    m.reason = why
    m.wanted = state=='loaded'
    return m

@contextmanager
def serving(**kw):
    here = [
        sham('large', 60*GIB), sham('small', 8*GIB), sham('other', 70*GIB, 'unloaded'),
        sham('broken', 5*GIB, 'failed', f'There is no file {NASTY}')]
    ms = Shams(here, first=[])
    with running(create_app(ms, **kw)) as ms.url:
        yield ms

@pytest.fixture(scope='module')
def chromium():
    with browser() as b:
        yield b

@pytest.fixture
def served():
    with serving() as ms:
        yield ms

@pytest.fixture
def page(chromium, served):
    p = opened(chromium, served)
    p.until('models.length === 4 && document.querySelectorAll("li.model").length === 4')
    yield p
    closed(p)
    assert not p.logged

def closed(p):
    "The page listens to the server no more"
    p.go('about:blank')
    p.ws.close()

def opened(chromium, served):
    p = chromium.open(served.url+'/ui')
    p.js('sessionStorage.clear(); localStorage.clear()')
    p.go(served.url+'/ui?2')
    return p

def state(p, name):
    "What the page says of a model's state"
    found = f'e => e.querySelector("h2").textContent === {json.dumps(name)}'
    return p.js(f'''[...document.querySelectorAll("li.model")].find(
        {found}).querySelector(".state").textContent''')

def press(p, label):
    p.js(f'document.querySelector(`[aria-label="{label}"]`).click()')

def test_memory_is_one_bar(page):
    "Each model's part as wide as its bytes, and the rest of the budget"
    assert page.js(
        '$("said").textContent')=='68 GiB of 100 GiB for models in use: large 60 GiB, small 8 GiB.'
    widths = page.js(
        '[...$("bar").children].map(e => e.getBoundingClientRect().width / $("bar").clientWidth)')
    assert [round(w, 1) for w in widths]==[.6, .1, .3]
    assert page.js('$("bar").getAttribute("role")')=='img'

def test_states_and_reasons_are_text(page):
    assert [state(page, n) for n in ('large','other','broken')]==['loaded','unloaded','failed']
    assert page.js('document.querySelector(".why").textContent')==f'There is no file {NASTY}'
    assert page.js('document.images.length')==0

def test_loading_and_unloading(page, served):
    press(page, 'Unload small')
    page.until('models.find(m => m.id === "small").live.state === "unloaded" && !busy.size')
    assert state(page, 'small')=='unloaded' and served.find('small').state=='unloaded'
    press(page, 'Load small')
    page.until('models.find(m => m.id === "small").live.state === "loaded" && !busy.size')
    assert '68 GiB' in page.js('$("said").textContent')

def test_changes_are_seen_without_asking(page, served):
    "By the stream of changes: the timer is off"
    page.js('for (let i = 0; i < 9999; i++) clearInterval(i)')
    page.js(
        'await fetch("models/unload", {method: "POST", headers: {"Content-Type": '
        '"application/json"}, body: JSON.stringify({model: "large"})})')
    page.until('models.find(m => m.id === "large").live.state === "unloaded"')
    assert state(page, 'large')=='unloaded'

def test_speed_and_queue(page, served):
    runner = served.find('large').runner
    def stats(): return dict(num_requests_running=3, num_requests_waiting=2)
    runner.stats = stats
    page.js('await look()')
    said = page.js('document.querySelector("li.model dl").innerText.replace(/\\n/g, " ")')
    assert 'Running 3' in said and 'Waiting 2' in said and 'Tokens/s 0' in said

def test_the_focus_stays(page):
    page.js('$("do-1").focus()')
    page.js('await look()')
    assert page.js('document.activeElement.id')=='do-1'
    page.enter()
    page.until('models[1].live.state === "unloaded" && !busy.size')
    assert page.js('document.activeElement.textContent')=='Load'

def test_a_server_that_is_gone(page):
    page.js('window.fetch = async () => { throw new TypeError("refused"); }; await look()')
    assert 'cannot be reached' in page.js('$("notice").textContent')
    assert page.js('document.querySelectorAll("li.model").length')==4

# -- keys ------------------------------------------------------------------------------------------

@pytest.fixture
def locked():
    with serving(rules=Rules(keys=ApiKeys({'sesame':'user', 'onion':'admin'}))) as ms:
        yield ms

def give(p, key):
    p.js(f'$("key").value = {json.dumps(key)}; $("keyform").requestSubmit()')

def test_keys(chromium, locked):
    """None: nothing is shown. A user's: all is shown, and nothing changes. An admin's: it does.
    It is kept for this tab"""
    p = opened(chromium, locked)
    p.until('!$("keyform").hidden')
    assert p.js('models.length')==0
    give(p, 'wrong')
    p.until('$("keysays").textContent.includes("does not know")')
    give(p, 'sesame')
    p.until('document.querySelectorAll("li.model").length === 4')
    press(p, 'Unload small')
    p.until('!$("keyform").hidden && !busy.size')
    assert 'admin' in p.js('$("keysays").textContent') and locked.find('small').state=='loaded'
    give(p, 'onion')
    press(p, 'Unload small')
    p.until('models.find(m => m.id === "small").live.state === "unloaded"')
    assert p.js('JSON.stringify({...localStorage})')=='{}'
    p.go(locked.url+'/ui?3')
    p.until('document.querySelectorAll("li.model").length === 4')
    closed(p)

# -- for every eye and hand ------------------------------------------------------------------------

@pytest.mark.parametrize('dark', [False,True])
def test_contrast(page, dark):
    "As WCAG 2.2 counts it: text 4.5, what is no text 3"
    page.dark(dark)
    on_bg = [(a,'bg') for a in ('text','dim','good','bad','accent')]
    for a,b in [*on_bg, ('bad','bad-bg')]:
        assert page.js(f'{RATIO}("--{a}", "--{b}")')>=4.5, (a, b)
    for a in ('edge',*(f'p{i}' for i in range(6))):
        assert page.js(f'{RATIO}("--{a}", "--bg")')>=3, a

def test_everything_has_a_name_and_the_tab_key_finds_it(page):
    assert not page.js('''[...document.querySelectorAll("button, input, a")].filter(
        e => !(e.labels && e.labels.length || e.textContent.trim() || e.ariaLabel)
    ).map(e => e.outerHTML)''')
    page.js('document.activeElement.blur()')
    seen = []
    for _ in range(6):
        page.tab()
        seen.append(
            page.js('document.activeElement.ariaLabel || document.activeElement.textContent'))
    assert seen==['Chat','Key','Unload large','Unload small','Load other','Load broken']

@pytest.mark.parametrize('width', [320,390,1280])
def test_nothing_is_wider_than_the_screen(page, width):
    page.size(width, 800, touch=width<1000)
    page.js('models[0].id = "n".repeat(200); models[0].aliases = ["a".repeat(90)]; draw()')
    assert page.js('document.documentElement.scrollWidth <= document.documentElement.clientWidth')

def test_the_chat_page_leads_here(chromium, served):
    p = chromium.open(served.url+'/')
    p.js("setTimeout(() => document.querySelector(`a[href=\"ui\"]`).click())")
    p.until('location.pathname === "/ui"')
    closed(p)
