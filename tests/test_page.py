"""The chat page, in a browser where there is one: what it draws, where the reader's eye and the
keyboard's focus stay, what it says when things fail."""
import json,sys
from pathlib import Path
import pytest

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from browser import browser  # noqa: E402
from scripted import service  # noqa: E402

TOOL = dict(
    type='function',
    function=dict(
        name='weather',
        parameters=dict(type='object', properties=dict(city=dict(type='string')))))

def script(prompt):
    "An answer to the last question, as a model that thinks would write it"
    last = prompt.rsplit('user: ', 1)[-1]
    if 'tool:' in last:
        return '</think>It is 12 degrees.'
    if 'weather' in last:
        call = '{"name": "weather", "arguments": {"city": "Oslo"}}'
        return f'<think>Look.</think><tool_call>\n{call}\n</tool_call>'
    if 'nothing' in last:
        return '<think>Hm.</think>'
    return '<think>Let me see.</think>Forty-two.'

@pytest.fixture(scope='module')
def chromium():
    with browser() as b:
        yield b

@pytest.fixture(scope='module')
def served():
    with service(script) as s:
        yield s

@pytest.fixture
def page(chromium, served):
    """The page with nothing stored, and `say(text)`, which waits for the answer; scripts that
    failed, and dialogs, fail the test"""
    p = chromium.open(served.url+'/')
    p.js('localStorage.clear()')
    p.go(served.url+'/')
    p.until('models.length')
    yield p
    assert not p.logged
    p.ws.close()

def say(p, text, wait=True):
    p.js('$("box").focus()')
    p.type(text)
    p.enter()
    if wait:
        p.until('!running && state.messages.at(-1).role !== "user"')

# A server within the page, for what must happen in the midst of an answer: `push` sends a delta,
# `drop` loses the connection, `shut` ends the answer
STUB = '''window.fetch = async (url, o) => {
  if (!url.includes('completions')) return new Response(JSON.stringify({data: models}));
  const enc = new TextEncoder(), to = c => s => c.enqueue(enc.encode(`data: ${s}\\n\\n`));
  return new Response(new ReadableStream({start(c) {
    window.push = d => to(c)(JSON.stringify({choices: [{delta: d}]}));
    window.shut = () => {
      to(c)(JSON.stringify({choices: [{delta: {}, finish_reason: 'stop'}]}));
      c.close();
    };
    window.drop = () => c.error(new TypeError('gone'));
    o.signal.addEventListener('abort', () => c.error(new DOMException('', 'AbortError')));
  }}));
}; 0'''

def drawn(p, md):
    return p.js(
        f'(() => {{ const d = make("div"); d.append(...blocks({json.dumps(md)})); for (const b of '
        f'd.querySelectorAll("button, figcaption")) b.remove(); return d.innerHTML; }})()')

# -- a little Markdown ----------------------------------------------------------------------------

@pytest.mark.parametrize('md,html', [
    (
        '*a* _b_ **c** ***d*** ~~e~~ `f*g*`',
        '<p><em>a</em> <em>b</em> <strong>c</strong> <strong><em>d</em></strong> <s>e</s> '
        '<code>f*g*</code></p>'),
    (
        'snake_case_name, 2*3*4, 5 * 6 * 7, \\*so\\*',
        '<p>snake_case_name, 2*3*4, 5 * 6 * 7, *so*</p>'),
    (
        '1. a\n   - b\n   - c\n2. d',
        '<ol start="1"><li>a<ul><li>b</li><li>c</li></ul></li><li>d</li></ol>'),
    ('- a\n\n  - b\n\n- c', '<ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>'),
    (
        'Steps:\n1. a\n\n   more\n2. b\nAfter',
        '<p>Steps:</p><ol start="1"><li>a<p>more</p></li><li>b</li></ol><p>After</p>'),
    (
        '1. Do:\n   ```sh\n   ls\n\n     -l\n   ```\n2. b',
        '<ol start="1"><li>Do:<figure><pre tabindex="0"><code><span '
        'class="hljs-built_in">ls</span>\n\n  -l</code></pre></figure></li><li>b</li></ol>'),
    ('- a\n1. b', '<ul><li>a</li></ul><ol start="1"><li>b</li></ol>'),
    ('- [ ] a\n- [x] b', '<ul><li>☐ a</li><li>☑ b</li></ul>'),
    ('a\n\n---\n\n* * *\nb', '<p>a</p><hr><hr><p>b</p>'),
    (
        '> a\n> - b\n> - c\n\nd',
        '<blockquote><p>a</p><ul><li>b</li><li>c</li></ul></blockquote><p>d</p>'),
    (
        '| a | b |\n|---|--:|\n| `x \\| y` | 2 |',
        '<div class="sheet" tabindex="0"><table><tr><th scope="col">a</th><th scope="col" '
        'style="text-align: end;">b</th></tr><tr><td><code>x | y</code></td><td style="text-align: '
        'end;">2</td></tr></table></div>'),
    ('# A\nb\n### C', '<h3>A</h3><p>b</p><h4>C</h4>'),
])
def test_markdown(page, md, html):
    assert drawn(page, md)==html

def test_links_lead_to_the_web_and_nowhere_else(page):
    p = drawn(
        page,
        '[a](https://x.org/b_c_d) https://y.org/z. ![p](https://x.org/i.png) '
        '[b](javascript:alert(1)) <script>alert(1)</script> <img src=x onerror=alert(1)>')
    assert p.count('<a ')==p.count('rel="noopener noreferrer nofollow"')==3
    assert 'href="https://y.org/z"' in p and 'href="https://x.org/b_c_d"' in p
    assert '<img' not in p and '<script' not in p and 'href="javascript' not in p
    assert 'alert(1)' in p

ALL = '''# H
As $a_1$ and \\(b\\):
$$
x = 1
\\tag{2}
$$
so
\\[ y \\]
# I
Text with *a*, **b**, `c`:
1. one
   - two

     more

   ```py
   x = 1

   y
   ```
2. three


10. ten

After
- x
- y
```sh
ls
```
> q
> - r

|a|b|
|-|-|
|1|2|

---
~~~
z
~~~
- last

**Bold** line

2024 was a year
'''

def test_an_answer_looks_the_same_however_it_came(page):
    "In pieces of any size, drawn after each"
    got = page.js(f'''(() => {{
      const t = {json.dumps(ALL)};
      const all = n => {{
        const d = make('div'), a = new Answer(d);
        for (let i = 0; i < t.length; i += n) {{ a.text += t.slice(i, i + n); a.draw(); }}
        return d.innerHTML;
      }};
      return [t.length, 1, 2, 3, 7, 31].map(all);
    }})()''')
    assert got[0].count('<li')==8 and got[0].count('<math')==4
    assert '<table' in got[0] and 'hljs-' in got[0]
    for g in got[1:]:
        assert g==got[0]

ENDLESS = ( # As JavaScript spells them
    '*a ', '[', '`', '_a ', '**', 'http://', '- ', '> ', '1. a\\n\\n', '| a ', '\\\\', '~~a',
    ' ', '(', '***a', '$', '$$', '$a', '$$\\n', '\\\\(', '\\\\[', '\\\\[\\n', '$a $', '\\n ',
    '\\n  a')

def test_markdown_of_endless_answers(page):
    """What a model may repeat for ever is drawn, and neither its length nor its depth brings the
    page down"""
    for s in ENDLESS:
        assert page.js(
            f'(() => {{ const d = make("div"); d.append(...blocks("{s}".repeat(20000))); return '
            f'true; }})()')
    nested = '\n'.join(' '*2*i+'- a' for i in range(400))
    quoted = '\n'.join('>'*i+' - a' for i in range(200))
    for s in '>'*5000+'a',nested,quoted:
        assert drawn(page, s).count('<')<3000

def test_right_to_left(page):
    page.js(
        '(() => { const d = make("article"); d.id = "rtl"; d.append(...blocks("- עברית one\\n\\n> '
        '1. مرحبا\\n\\nשלום\\n\\nEnglish")); $("log").append(d); })()')
    assert page.js(
        '[...$("rtl").children].map(e => getComputedStyle(e).direction)')==['rtl','rtl','rtl','ltr']
    say(page, 'שלום לך')
    assert page.js(
        '(() => { const b = $("log").querySelector(".user .body"), r = document.createRange(); '
        'r.selectNodeContents(b); const t = getComputedStyle(b); return [t.unicodeBidi, '
        't.textAlign]; })()')==['plaintext','start']

# -- a conversation -------------------------------------------------------------------------------

def test_a_thought_and_an_answer(page):
    say(page, 'hello')
    assert page.js('$("log").querySelector(".think div").textContent')=='Let me see.' and page.js(
        '$("log").querySelector(".assistant .body").textContent')=='Forty-two.'
    assert 'tokens' in page.js('$("log").querySelector(".assistant .meta").textContent')
    assert page.js(
        'document.activeElement.id'
    )=='box' and page.js('$("status").textContent')=='The answer is complete'

def test_an_answer_of_nothing_says_so(page):
    say(page, 'nothing')
    assert page.js(
        '$("log").querySelector(".assistant .body").textContent'
    )=='There are only thoughts, and no answer.'

def test_a_call_and_its_result(page, served):
    page.js(
        f'$("tools").value = {json.dumps(json.dumps([TOOL]))}; $("tools").dispatchEvent(new '
        'Event("input"))')
    say(page, 'weather')
    page.js(
        '$("result-0").value = "12"; [...document.querySelectorAll("button")].find(b => '
        'b.textContent === "Send the result").click()')
    page.until('!running && state.messages.at(-1).content')
    assert page.js('$("log").querySelector(".tool summary").textContent')=='Result of weather'
    assert page.js(
        'document.activeElement.id')=='box', 'the button that was pressed is gone; the focus is not'
    assert 'tool: 12' in served.prompts[-1]

def test_what_was_taken_away_can_be_brought_back(page):
    say(page, 'hello')
    for take in ('$("new").click()', 'edit(0)'):
        page.js(take)
        assert page.js('state.messages.length')==0
        page.js(
            '[...document.querySelectorAll("button")].find(b => b.textContent.startsWith("Bring '
            'back")).click()')
        assert page.js(
            'state.messages.map(m => m.role)'
        )==['user','assistant'] and page.js('$("box").value')=='' and page.js(
            '$("log").textContent.includes("Forty-two.")')

def test_settings_are_sent_and_can_be_undone(page):
    page.js(
        'for (const [k, v] of [["system", "Be brief."], ["temperature", "0.25"], ["top_k", "40"], '
        '["max", "9"], ["thinking", "none"]]) { $(k).value = v; $(k).dispatchEvent(new '
        'Event("input")); }')
    r = page.js('request()')
    assert r['messages']==[
        dict(role='system', content='Be brief.')
    ] and r['chat_template_kwargs']==dict(enable_thinking=False)
    assert {
        k:r[k] for k in ('temperature','top_k','max_tokens')
    }==dict(temperature=.25, top_k=40, max_tokens=9)
    page.js('$("reset").click()')
    r = page.js('request()')
    assert r['messages']==[]
    assert not {'temperature','top_k','max_tokens'}&set(r)
    assert page.js('[$("system").value, $("t-out").textContent]')==['','as the model has it']

def test_a_model_that_reads_only_text_takes_no_image(page):
    assert page.js('getComputedStyle($("add")).display')=='none'
    page.js('await attach([new File(["x"], "a.png", {type: "image/png"})])')
    assert page.js(
        '$("notice").textContent'
    )=='scripted reads only text, and no images.' and page.js('pending.length')==0

def test_a_file_that_is_no_image(page):
    page.js('models[0].architecture.input_modalities = ["text", "image"]; about()')
    page.js(
        'await attach([new File(["x"], "a.txt", {type: "text/plain"}), new File(["x"], "b.png", '
        '{type: "image/png"})])')
    assert page.js(
        'getComputedStyle($("add")).display'
    )!='none' and page.js('$("notice").textContent')=='a.txt, b.png cannot be read as images.'
    say(page, 'hello')
    assert page.js('$("notice").textContent')==''

# -- formulas and code ----------------------------------------------------------------------------

MATHS = [
    ('$x^2$', 1), (r'\(x\) and \[y\]', 2), ('$$x$$', 1), ('**a** $b_1 * c_2 * d_3$', 1),
    ('We have\n$$\n\\frac{1}{2}\n$$\nthus\n\\[\ny\n\\].', 2),
    ('1. a\n   $$\n   x\n   $$\n2. $b$', 2), ('> $$x$$', 1), ('| $a$ |\n|---|\n| \\(b\\) |', 2),
    ('It costs $5 or $10, and 7$.', 0), ('$HOME/$PATH, US$5', 0), (r'\$x\$', 0), ('`$x$`', 0),
    ('```\n$$x$$\n```', 0), ('$$\nx\n\ny\n$$', 0), (r'$\frac{$', 0)]

@pytest.mark.parametrize('md,n', MATHS)
def test_formulas(page, md, n):
    "As MathML; what is none, or cannot be read, stays as it was written"
    said = drawn(page, md)
    assert said.count('<math')==n
    if n:
        assert '</math>' in said and not page.js(
            f'blocks({json.dumps(md)}).some(e => e.textContent.includes("$$"))')

def test_a_formula_has_its_source(page):
    "For those who copy it; and its parts are elements, which screen readers know"
    said = drawn(page, r'$\frac{a}{b}$')
    source = r'<annotation encoding="application/x-tex">\frac{a}{b}</annotation>'
    assert '<mfrac>' in said and source in said

EVIL = ['$\\href{javascript:alert(1)}{x}$', '$\\url{javascript:alert(1)}$',
    '$\\includegraphics{https://x.org/a.png}$', '$\\text{<img src=x onerror=alert(1)>}$',
    '$\\class{x}{y}\\style{position:fixed}{z}\\id{box}{w}\\data{onclick=alert(1)}{v}$',
    '$\\def\\a{\\a\\a}\\a$', '$\\rule{99999em}{99999em}$',
    '```html\n<script>alert(1)</script><img src=x onerror=alert(1)>\n```',
    '```js\n`${"</pre><img src=x onerror=alert(1)>"}`\n```',
    '```"><img src=x onerror=alert(1)>\nx\n```', '```constructor\nx\n```', '```__proto__\nx\n```']

@pytest.mark.parametrize('md', EVIL)
def test_formulas_and_code_bring_no_markup(page, md):
    page.js(
        f'(() => {{ const d = make("article"); d.id = "evil"; '
        f'd.append(...blocks({json.dumps(md)})); $("log").append(d); }})()')
    assert page.js(
        '$("evil").querySelectorAll("img, script, a, [onclick], [onerror], [href], [id], '
        'iframe").length')==0
    assert page.js(
        '[...$("evil").querySelectorAll("*")].every(e => getComputedStyle(e).position !== "fixed")')
    assert page.js('$("evil").getBoundingClientRect().width <= scroll.clientWidth')

@pytest.mark.parametrize(
    'lang,word',
    [('python','def'), ('CUDA','void'), ('rust','fn'), ('json','null')])
def test_code_is_coloured_and_stays_the_same_text(page, lang, word):
    code = f'\n  {word} f(x) <b>&amp;</b> "s" # \t ü\n\n'
    md = f'```{lang}\n{code}\n```'
    assert page.js(f'blocks({json.dumps(md)})[0].querySelector("code").textContent')==code
    assert '<span class="hljs-' in drawn(page, md)

def test_what_is_drawn_is_not_drawn_again(page):
    "While code grows its element stays, and so do blocks before it; at the end it has colours"
    page.js(STUB)
    say(page, 'code', wait=False)
    page.until('running && window.push')
    page.js('push({content: "First $x$.\\n\\n```python\\ndef f():\\n"})')
    page.until('$("log").querySelector(".assistant pre code")')
    page.js("""
      window.was = [...document.querySelectorAll(".assistant .body > *"),
        document.querySelector(".assistant pre code")];
      window.lost = 0;
      const noteLost = ms => ms.forEach(m => { lost += m.removedNodes.length; });
      new MutationObserver(noteLost).observe(
        document.querySelector(".assistant .body"), {childList: true, subtree: true}); 0""")
    for i in range(40):
        page.js(f'push({{content: "    x = {i}\\n"}}); await new Promise(requestAnimationFrame)')
    page.until('was[2].textContent.includes("x = 39")')
    assert page.js('lost')==0 and page.js('was.every(e => e.isConnected)')
    page.js('push({content: "```"}); shut()')
    page.until('!running')
    assert page.js('document.querySelectorAll(".assistant .hljs-keyword").length')==1
    assert page.js('was[0].textContent')==page.js(
        'document.querySelector(".assistant .body").firstChild.textContent')

def test_nothing_comes_from_elsewhere(page, served):
    "All scripts are in the page, and its policy names each of them and nothing more"
    say(page, 'hello')
    assert page.js(
        'performance.getEntriesByType("resource").every(e => e.name.startsWith(location.origin))')
    import urllib.request
    with urllib.request.urlopen(served.url) as r:
        policy,html = r.headers['content-security-policy'],r.read().decode()
    assert policy.count('sha256-')==html.count('<script>')==3
    assert 'src="' not in html.split('<style>')[0]

# -- conversations --------------------------------------------------------------------------------

def chat_titles(p):
    return p.js('[...$("found").querySelectorAll(".pick")].map(e => e.firstChild.textContent)')

def open_list(p):
    p.js('$("chats").click()')
    p.until('chats.open')

@pytest.fixture
def three(page):
    "A page with three conversations; the last is open"
    for q in ('hello one','hello <b>deux</b>','hello three'):
        page.js('$("new").click()')
        say(page, q)
    open_list(page)
    return page

def test_conversations_are_listed_and_opened(three, served):
    p = three
    assert chat_titles(p)==['hello three','hello <b>deux</b>','hello one']
    assert p.js(
        '$("found").querySelector("[aria-current=true]").firstChild.textContent')=='hello three'
    p.js('$("found").querySelectorAll(".pick")[2].click()')
    assert p.js('chats.open') is False and p.js('state.messages[0].content')=='hello one'
    say(p, 'and more')
    assert 'user: hello one' in served.prompts[-1] and 'deux' not in served.prompts[-1]
    p.go(served.url+'/?2')
    p.until('models.length')
    assert p.js('state.messages.map(m => m.content)')==[
        'hello one', 'Forty-two.', 'and more', 'Forty-two.']
    open_list(p)
    assert chat_titles(p)[0]=='hello one' and len(chat_titles(p))==3

def test_conversations_are_found(three):
    "By words of their titles and of what was said, in any order"
    for words,n in (('',3), ('DEUX',1), ('forty hello',3), ('forty one',1), ('nowhere',0)):
        three.js(
            f'$("search").value = {json.dumps(words)}; $("search").dispatchEvent(new '
            'Event("input"))')
        assert len(chat_titles(three))==n, words
    assert three.js('$("counted").textContent')=='0 conversations of 3 found'

def test_a_conversation_is_renamed(three, served):
    p = three
    p.js('document.querySelector(`[aria-label="Rename hello one"]`).click()')
    assert p.js('document.activeElement.id')=='rename'
    p.type('<img src=x onerror=alert(1)>')
    p.enter()
    assert '<img src=x onerror=alert(1)>' in chat_titles(p) and p.js('document.images.length')==0
    p.js('document.querySelector(`[aria-label="Rename hello three"]`).click()')
    p.type('The third')
    p.enter()
    p.js('chats.close()')
    say(p, 'more')
    p.go(served.url+'/?2')
    open_list(p)
    assert chat_titles(p)[0]=='The third' and len(chat_titles(p))==3

def test_a_deleted_conversation_can_be_brought_back(three):
    p = three
    p.js('document.querySelector(`[aria-label="Delete hello three"]`).click()')
    assert len(chat_titles(p))==2 and p.js('state.messages.length')==0
    p.js(
        '[...document.querySelectorAll("button")].find(b => b.textContent === "Bring back hello '
        'three").click()')
    assert len(chat_titles(p))==3
    p.js('document.querySelector(`[aria-label="Delete hello one"]`).click()')
    p.js('chats.close()')
    open_list(p)
    assert len(chat_titles(p))==2 and 'Bring back' not in p.js('$("found").textContent')

def test_a_conversation_of_an_older_page_is_kept(page, served):
    "When there was one, it lay beside the settings"
    said = [('user','old'),('assistant','so old')]
    messages = [dict(role=role, content=text, images=[], calls=[]) for role,text in said]
    kept = json.dumps(dict(settings=dict(system='Be brief.'), messages=messages))
    page.js(f'localStorage.clear(); localStorage.setItem(KEY, {json.dumps(kept)})')
    page.go(served.url+'/?2')
    page.until('models.length')
    assert page.js('[state.messages[0].content, state.settings.system]')==['old','Be brief.']
    say(page, 'more')
    open_list(page)
    assert chat_titles(page)==['old']

def test_stored_nonsense_is_not_believed(page, served):
    fine = dict(role='user', content='fine', images=['https://x.org/i.png'])
    stored = {
        'x':'{', 'abcdef':'[]', 'abcdeg':'{"messages": [{"role": "root"}, 7, null]}',
        '../..':'{}', 'abcdeh':json.dumps(dict(title=7, at='x', messages=[fine]))}
    for k,v in stored.items():
        page.js(f'localStorage.setItem(CHAT + {json.dumps(k)}, {json.dumps(v)})')
    page.go(served.url+'/?2')
    open_list(page)
    assert chat_titles(page)==['fine']
    page.js('$("found").querySelector(".pick").click()')
    assert page.js('document.images.length')==0

def test_no_other_conversation_while_one_is_answered(three):
    p = three
    p.js('chats.close()')
    p.js(STUB)
    say(p, 'x', wait=False)
    p.until('running && window.push')
    assert p.js('$("chats").disabled && $("new").disabled')
    p.js('push({content: "y"}); shut()')
    p.until('!running')
    assert not p.js('$("chats").disabled')

@pytest.mark.parametrize('width', [320,390,1280])
def test_the_list_fits_the_screen(three, width):
    three.size(width, 800, touch=width<1000)
    three.js('const c = kept()[0]; c.title = "t".repeat(200); rewrite(c); showChats()')
    for e in ('document.documentElement','chats','document.body'):
        assert three.js(f'{e}.scrollWidth <= {e}.clientWidth'), e

# -- drafts ---------------------------------------------------------------------------------------

SPEECH = 'Some **bold** words, of which many were drafted.\n\n- one\n- two'

@pytest.fixture(scope='module')
def guessing():
    "A server whose steps say four tokens, three of them accepted drafts"
    def answer(prompt): return '<think>Well.</think>'+SPEECH
    with service(answer, drafts=3) as s:
        yield s

@pytest.fixture
def drafting(chromium, guessing):
    p = chromium.open(guessing.url+'/')
    p.js('localStorage.clear()')
    p.go(guessing.url+'/')
    p.until('models.length')
    yield p
    assert not p.logged
    p.ws.close()

META = '$("log").querySelector(".assistant .meta span").textContent'
BODY = '$("log").querySelector(".assistant .body")'

def press(p, label):
    p.js(f'[...document.querySelectorAll("button")].find(b => b.textContent === "{label}").click()')

def test_accepted_drafts_are_counted_and_shown(drafting, guessing):
    p = drafting
    say(p, 'hello')
    n = len(('<think>Well.</think>'+SPEECH).encode())+1  # a byte is a token; and the end
    accepted = n-(n+3)//4
    assert f'{n} tokens' in p.js(META)
    assert f'{accepted} accepted drafts, {n/(n-accepted):.1f} a step' in p.js(META)
    drawn = p.js(f'{BODY}.innerHTML')
    press(p, 'Show drafts')
    assert p.js(f'{BODY}.firstChild.textContent')==SPEECH, 'the answer as it was written'
    assert p.js(f'{BODY}.lastChild.textContent').startswith('Underlined: drafted')
    before = len('<think>Well.</think>')
    drafted = [(before+i)%4>0 for i in range(len(SPEECH))]
    told = p.js(f'''[...{BODY}.firstChild.childNodes].flatMap(
        e => [...e.textContent].map(() => e.nodeName === "U"))''')
    assert told==drafted
    press(p, 'Hide drafts')
    assert p.js(f'{BODY}.innerHTML')==drawn and '<strong>bold</strong>' in drawn

def test_cached_tokens_are_shown(drafting, guessing):
    "Beside the length of the prompt, and nothing where there are none"
    p = drafting
    said = []
    for guessing.cached in (3,0):
        press(p, 'New chat')
        say(p, 'hello')
        said.append(p.js(META).split('prompt ')[1])
    n = said[1]
    assert said==[f'{n}, 3 cached', n] and n.isdecimal()

def test_drafts_begin_where_the_words_do(drafting):
    "Blank lines between a thought and its answer are not shown"
    drawn = drafting.js('''(() => {
        const m = {content: '\\n\\n  One two', marks: [1, 2, 4, 2, 2]}, e = drafts(m);
        return [...e.childNodes].map(c => [c.nodeName, c.textContent]); })()''')
    assert drawn==[['#text', 'One'], ['U', ' t'], ['#text', 'wo']]

def test_what_to_ask_suits_the_model(page):
    assert 'cow' not in page.js('$("log").textContent')
    page.js('$("model").append(new Option("tiny")); $("model").value = "tiny"')
    page.js('$("model").onchange()')
    assert 'What does a cow eat?' in page.js('$("log").textContent')

def test_drafts_are_still_there_when_the_page_is_opened_anew(drafting, guessing):
    p = drafting
    say(p, 'hello')
    said = p.js(META)
    p.go(guessing.url+'/?2')
    p.until('models.length')
    assert p.js(META)==said
    press(p, 'Show drafts')
    assert p.js(f'{BODY}.querySelectorAll("u").length')>9
    # what somebody changed in the storage is not believed
    p.js('state.messages.at(-1).marks = [1, 2]; save()')
    p.go(guessing.url+'/?3')
    assert 'Show drafts' not in p.js('$("log").textContent')

def test_the_page_says_how_tokens_are_drafted(drafting, page):
    assert 'Speculation: mtp, 3 drafts.' in drafting.js('$("about").textContent')
    assert drafting.js('$("faster").hidden') is True
    assert 'Speculation' not in page.js('$("about").textContent')
    assert page.js('$("faster").hidden') is False
    assert '--speculative' in page.js('$("faster").textContent')

def test_an_answer_without_drafts_says_nothing_of_them(page):
    say(page, 'hello')
    assert 'drafts' not in page.js('$("log").textContent')
    assert 'a step' not in page.js('$("log").textContent')

@pytest.mark.parametrize('width', [390,1280])
def test_drafts_fit_the_screen(drafting, width):
    drafting.size(width, 800, touch=width<1000)
    say(drafting, 'hello')
    press(drafting, 'Show drafts')
    for e in ('document.documentElement','scroll','document.body'):
        assert drafting.js(f'{e}.scrollWidth <= {e}.clientWidth'), e

# -- in the midst of an answer --------------------------------------------------------------------

LONG = json.dumps('Some words of an answer.\n\n'*200)

def test_a_reader_who_scrolled_up_stays_there(page):
    page.js(STUB)
    say(page, 'long', wait=False)
    page.until('running && window.push')
    page.js(f'push({{content: {LONG}}})')
    page.until('scroll.scrollHeight > 4000 && nearEnd()')
    page.js('scroll.scrollTop = 1000')
    page.js(f'push({{content: {LONG}}})')
    page.until('scroll.scrollHeight > 8000')
    assert page.js('scroll.scrollTop')==1000
    page.js('shut()')
    page.until('!running')
    assert page.js('scroll.scrollTop')==1000

def test_escape_stops_and_what_came_stays(page):
    page.js(STUB)
    say(page, 'x', wait=False)
    page.until('running && window.push')
    page.js('push({content: "half an"})')
    page.until('$("log").textContent.includes("half an")')
    assert page.js('$("send").textContent')=='Stop'
    page.key('Escape', 27)
    page.until('!running')
    assert page.js('$("send").textContent')=='Send' and 'stopped' in page.js(
        '$("log").querySelector(".assistant .meta").textContent'
    ) and page.js('state.messages.at(-1).content')=='half an'

def test_a_lost_connection(page):
    page.js(STUB)
    say(page, 'x', wait=False)
    page.until('running && window.push')
    page.js('push({content: "half"})')
    page.until('$("log").textContent.includes("half")')
    page.js('drop()')
    page.until('!running')
    assert page.js(
        '$("log").querySelector("[role=alert]").textContent'
    )=='The connection was lost before the answer was complete.'
    page.js('window.fetch = async () => { throw new TypeError("refused"); }; again()')
    page.until('!running')
    assert 'cannot be reached' in page.js('$("log").querySelector("[role=alert]").textContent')
    assert page.js('state.messages.at(-1).content')=='half' and page.js(
        '$("log").textContent.includes("half")'), 'nothing better came: what there was stays'

def test_a_list_of_models_that_is_refused(page):
    "The page goes on: what was known of the models stays, and so does the conversation"
    page.js(
        'window.was = window.fetch; window.fetch = async () => new Response(JSON.stringify({error: '
        '{message: "slowly"}}), {status: 429}); await list()')
    assert page.js('$("model").selectedOptions[0].textContent')=='answers 429'
    say(page, 'hello', wait=False)
    page.until('!running && $("log").querySelector("[role=alert]")')
    assert page.js('$("log").querySelector("[role=alert]").textContent')=='slowly'
    page.js('window.fetch = window.was; await list()')
    say(page, 'hello')
    assert page.js('$("model").value')=='scripted' and page.js(
        '$("log").textContent.includes("Forty-two.")')

def test_a_question_that_was_not_answered_can_be_asked_again(page, served):
    page.js('state.messages.push({role: "user", content: "hello", calls: [], images: []}); save()')
    page.go(served.url+'/?2')
    assert page.js('$("log").querySelector("[role=alert]").textContent')=='This was not answered.'
    page.js(
        '[...document.querySelectorAll("button")].find(b => b.textContent === "Try again").click()')
    page.until('!running && $("log").textContent.includes("Forty-two.")')

# -- for every eye and hand -----------------------------------------------------------------------

RATIO = '''((a, b) => {
  const c = document.createElement('canvas').getContext('2d', {willReadFrequently: true});
  const linear = v => (v /= 255) <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4;
  const lum = s => {
    c.fillStyle = s;
    c.fillRect(0, 0, 1, 1);
    const l = [...c.getImageData(0, 0, 1, 1).data].slice(0, 3).map(linear);
    return .2126 * l[0] + .7152 * l[1] + .0722 * l[2];
  };
  const e = document.body.appendChild(document.createElement('i'));
  const v = n => (e.style.color = `var(${n})`, getComputedStyle(e).color);
  const [x, y] = [lum(v(a)), lum(v(b))].sort((p, q) => q - p);
  e.remove();
  return (x + .05) / (y + .05);
})'''

TEXT_ON = [
    ('text','bg'), ('text','you'), ('text','code'), ('text','soft'), ('dim','bg'), ('dim','soft'),
    ('accent','bg'), ('on-accent','accent'), ('bad','bad-bg'), *((c,'code') for c in 'kscnfv')]

@pytest.mark.parametrize('dark', [False,True])
def test_contrast(page, dark):
    "As WCAG 2.2 counts it: text 4.5, the edges of fields and the ring of the focus 3"
    page.dark(dark)
    for a,b in TEXT_ON:
        assert page.js(f'{RATIO}("--{a}", "--{b}")')>=4.5, (a, b)
    assert page.js(f'{RATIO}("--edge", "--bg")')>=3
    assert page.js(
        'getComputedStyle($("box"), "::placeholder").color === '
        'getComputedStyle($("log").querySelector(".empty")).color')

def test_everything_has_a_name_and_the_tab_key_finds_it(page):
    names = page.js(
        '[...document.querySelectorAll("button, input:not([aria-hidden]), select, '
        'textarea")].filter(e => !(e.labels && e.labels.length || e.textContent.trim() || '
        'e.ariaLabel)).map(e => e.outerHTML)')
    assert not names
    page.js('document.activeElement.blur()')
    seen = []
    for _ in range(10):
        page.tab()
        seen.append(
            page.js(
                'document.activeElement.id || document.activeElement.className || '
                'document.activeElement.localName'))
    assert [
        s for s in seen if s in ('model','chats','new','open','scroll','box','send')
    ]==['model','chats','new','open','scroll','box','send']
    page.js('$("open").focus()')
    page.enter()
    page.until('drawer.open && drawer.contains(document.activeElement)')
    page.key('Escape', 27)
    page.until('!drawer.open && document.activeElement.id === "open"')

@pytest.mark.parametrize('width', [320,390,1280])
def test_nothing_is_wider_than_the_screen(page, width):
    page.size(width, 800, touch=width<1000)
    table = f'| a | b |\n|---|---|\n| {"word "*40} | {"y"*300} |'
    code = f'```\n{"z"*400}\n```'
    md = json.dumps(f'{"x"*500}\n\n{table}\n\n{code}\n\n- {"w"*300}')
    page.js(
        f'state.messages = [{{role: "user", content: "u".repeat(400), calls: [], images: []}}, '
        f'{{role: "assistant", content: {md}, reasoning: "r".repeat(400), calls: [{{id: "1", name: '
        f'"n".repeat(80), arguments: "{{}}"}}], images: []}}]; showAll()')
    for e in ('document.documentElement','scroll','document.body'):
        assert page.js(f'{e}.scrollWidth <= {e}.clientWidth'), e
    page.js('drawer.showModal()')
    assert page.js('drawer.scrollWidth <= drawer.clientWidth')
