"""A browser without a window, where Chromium is installed, spoken to over its DevTools protocol:
`with browser() as b: page = b.open(url)`."""
import json,os,shutil,subprocess,tempfile,urllib.request
from contextlib import ExitStack,contextmanager,suppress
from pathlib import Path
import pytest
from helpers.waiting import WAIT,until

FLAGS = (
    '--headless', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage',
    '--disable-background-networking', '--disable-component-update', '--disable-sync',
    '--no-first-run', '--disable-renderer-backgrounding', '--remote-debugging-port=0',
    '--remote-allow-origins=*')
NAMES = 'chromium','chromium-browser','google-chrome'

def chromium():
    "The browser's path; skips where there is none"
    found = next(filter(None, map(shutil.which, NAMES)), None)
    return found or pytest.skip('no Chromium here')

class Navigated(Exception):
    "The page went elsewhere while it was asked"

class Page:
    "A tab: `js` evaluates an expression in it, `until` waits for one to be true"
    def __init__(self, ws):
        self.ws = ws
        self.n = 0
        self.logged = []
    def send(self, method, **params):
        self.n += 1
        self.ws.send(json.dumps(dict(id=self.n, method=method, params=params)))
        while (m := json.loads(self.ws.recv(timeout=WAIT))).get('id')!=self.n:
            self.note(m)
        self.check(m)
        return m['result']
    def check(self, m):
        "What is asked of a page that goes elsewhere meanwhile is never answered"
        said = m.get('error', {}).get('message', '')
        if 'navigated' in said or 'context was destroyed' in said:
            raise Navigated(said)
        assert not said, said
    def note(self, m):
        "Keep errors and dialogs of the page for whoever looks at `logged`"
        if m.get('method')=='Runtime.exceptionThrown':
            self.logged.append(m['params']['exceptionDetails']['exception'].get('description'))
        if m.get('method')=='Page.javascriptDialogOpening':
            self.logged.append('a dialog: '+m['params']['message'])
    def js(self, code):
        how = dict(awaitPromise=True, returnByValue=True, replMode=True)
        r = self.send('Runtime.evaluate', expression=code, **how)
        assert 'exceptionDetails' not in r, r['exceptionDetails']['exception'].get('description', r)
        return r['result'].get('value')
    def until(self, code):
        def true():
            with suppress(Navigated):
                return self.js(f'Boolean({code})')
        until(true, code, again=.02)
    def key(self, name, code=0, text=None, shift=False):
        key = dict(key=name, code=name, windowsVirtualKeyCode=code, modifiers=8*shift)
        makes = dict(text=text) if text else {}
        self.send('Input.dispatchKeyEvent', type='keyDown', **key, **makes)
        self.send('Input.dispatchKeyEvent', type='keyUp', **key)
    def tab(self, shift=False):
        self.key('Tab', 9, shift=shift)
    def enter(self):
        self.key('Enter', 13, '\r')
    def type(self, text):
        self.send('Input.insertText', text=text)
    def size(self, w, h, touch=False):
        screen = dict(width=w, height=h, deviceScaleFactor=1, mobile=touch)
        self.send('Emulation.setDeviceMetricsOverride', **screen)
    def dark(self, on=True):
        scheme = dict(name='prefers-color-scheme', value='dark' if on else 'light')
        self.send('Emulation.setEmulatedMedia', features=[scheme])
    def go(self, url):
        self.send('Page.navigate', url=url)
        there = f'location.href.startsWith({json.dumps(url)})'
        self.until(f"{there} && document.readyState==='complete'")

class Browser:
    def __init__(self, at, stack):
        self.at = at
        self.stack = stack
    def open(self, url, w=1280, h=800):
        from websockets.sync.client import connect
        new = urllib.request.Request(f'http://{self.at}/json/new?about:blank', method='PUT')
        tab = json.load(urllib.request.urlopen(new, timeout=WAIT))
        socket = connect(tab['webSocketDebuggerUrl'], max_size=None)
        p = Page(self.stack.enter_context(socket))
        for domain in ('Page','Runtime'):
            p.send(domain+'.enable')
        p.size(w, h)
        p.go(url)
        return p

@contextmanager
def browser(*flags):
    "Run one with a profile of its own, and more flags; nothing of it stays"
    exe,home = chromium(),tempfile.mkdtemp()
    command = [exe, *FLAGS, *flags, f'--user-data-dir={home}', 'about:blank']
    p = subprocess.Popen(
        command, env=os.environ|dict(HOME=home),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        port = Path(home)/'DevToolsActivePort'
        def started(): return port.exists() and port.read_text()
        until(lambda: p.poll() is not None or started(), 'the start of Chromium')
        assert p.poll() is None, 'Chromium did not start'
        with ExitStack() as stack:
            yield Browser('127.0.0.1:'+port.read_text().split()[0], stack)
    finally:
        p.terminate()
        p.wait(WAIT)
        shutil.rmtree(home, ignore_errors=True)
