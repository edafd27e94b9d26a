"A browser without a window, where Chromium is installed: `with browser() as b: page = b.open(url)`, spoken to over its DevTools protocol."
import json,os,shutil,subprocess,tempfile,urllib.request
from contextlib import ExitStack,contextmanager
from pathlib import Path
import pytest
from helpers.waiting import WAIT,until

FLAGS = ('--headless','--no-sandbox','--disable-gpu','--disable-dev-shm-usage','--disable-background-networking','--disable-component-update','--disable-sync','--no-first-run',
    '--disable-renderer-backgrounding','--remote-debugging-port=0','--remote-allow-origins=*')

def chromium():
    "The browser's path; skips where there is none"
    return next((p for n in ('chromium','chromium-browser','google-chrome') if (p := shutil.which(n))), None) or pytest.skip('no Chromium here')

class Page:
    "A tab: `js` evaluates an expression in it, `until` waits for one to be true"
    def __init__(self, ws): self.ws,self.n,self.logged = ws,0,[]
    def send(self, method, **params):
        self.n += 1
        self.ws.send(json.dumps(dict(id=self.n, method=method, params=params)))
        while True:
            m = json.loads(self.ws.recv(timeout=WAIT))
            if m.get('method')=='Runtime.exceptionThrown': self.logged.append(m['params']['exceptionDetails']['exception'].get('description'))
            if m.get('method')=='Page.javascriptDialogOpening': self.logged.append('a dialog: '+m['params']['message'])
            if m.get('id')==self.n: break
        assert 'error' not in m, m['error']
        return m['result']
    def js(self, code):
        r = self.send('Runtime.evaluate', expression=code, awaitPromise=True, returnByValue=True, replMode=True)
        assert 'exceptionDetails' not in r, r['exceptionDetails']['exception'].get('description', r)
        return r['result'].get('value')
    def until(self, code):
        until(lambda: self.js(f'Boolean({code})'), code, again=.02)
    def key(self, name, code=0, text=None, shift=False):
        for kind in ('keyDown','keyUp'): self.send('Input.dispatchKeyEvent', type=kind, key=name, code=name, windowsVirtualKeyCode=code, modifiers=8*shift, **({'text':text} if text and kind=='keyDown' else {}))
    def tab(self, shift=False): self.key('Tab', 9, shift=shift)
    def enter(self): self.key('Enter', 13, '\r')
    def type(self, text): self.send('Input.insertText', text=text)
    def size(self, w, h, touch=False): self.send('Emulation.setDeviceMetricsOverride', width=w, height=h, deviceScaleFactor=1, mobile=touch)
    def dark(self, on=True): self.send('Emulation.setEmulatedMedia', features=[dict(name='prefers-color-scheme', value='dark' if on else 'light')])
    def go(self, url):
        self.send('Page.navigate', url=url)
        self.until(f"location.href.startsWith({json.dumps(url)}) && document.readyState==='complete'")

class Browser:
    def __init__(self, at, stack): self.at,self.stack = at,stack
    def open(self, url, w=1280, h=800):
        from websockets.sync.client import connect
        tab = json.load(urllib.request.urlopen(urllib.request.Request(f'http://{self.at}/json/new?about:blank', method='PUT'), timeout=WAIT))
        p = Page(self.stack.enter_context(connect(tab['webSocketDebuggerUrl'], max_size=None)))
        for domain in ('Page','Runtime'): p.send(domain+'.enable')
        p.size(w, h)
        p.go(url)
        return p

@contextmanager
def browser(*flags):
    "Run one with a profile of its own, and more flags; nothing of it stays"
    exe,home = chromium(),tempfile.mkdtemp()
    p = subprocess.Popen([exe, *FLAGS, *flags, f'--user-data-dir={home}', 'about:blank'], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=os.environ|dict(HOME=home))
    try:
        port = Path(home)/'DevToolsActivePort'
        def started(): return port.exists() and port.read_text()
        until(lambda: p.poll() is not None or started(), 'the start of Chromium')
        assert p.poll() is None, 'Chromium did not start'
        with ExitStack() as stack: yield Browser('127.0.0.1:'+port.read_text().split()[0], stack)
    finally: p.terminate(); p.wait(WAIT); shutil.rmtree(home, ignore_errors=True)
