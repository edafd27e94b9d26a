"""A gateway under load for an hour: every API, guides, stored responses, clients that leave at any
moment, models that are unloaded and loaded again. `python tests/long/soak.py --minutes 60`

Memory is what the gateway's process alone has (its private pages), in MiB. It may grow while
what is bounded fills up, which the first third is for; then it has to stay. The store of
responses is made small, so that it is full soon. `--trace` says at the end which lines of
Python hold what came since the first third (slow)."""
import argparse,asyncio,json,os,random,re,signal,subprocess,sys,tempfile,time
from collections import Counter
from pathlib import Path
here = Path(__file__).parents[1]
sys.path[:0] = [str(here),str(here/'helpers')]
from test_mixed import body,client as one_client  # noqa: E402
import test_mixed  # noqa: E402

NAMES = ('left','right')

def serve(trace):
    "The gateway: two scripted models with guides, and a small store"
    from fake_gateway import COMMAND,ScriptConfig,text
    from atlas.service.gateway import serve,tables_of
    from atlas.text.guide import Guides
    from atlas.text.sandbox import Sandbox
    small_store()
    if trace:
        _trace()
    box = Sandbox()
    def side(options):
        d = text(options)
        guides = Guides(d['tokenizer'], 256, [0], box)
        return d|dict(guides=guides, parsers=('hermes','qwen3'))
    models = [dict(model=n, name=n, say='x'*200, max_queue=200) for n in NAMES]
    serve(models, **tables_of(
        port=0, config=ScriptConfig, text=side, command=COMMAND, log_level='error'))

def small_store():
    "Stores of responses hold little, so that they are full soon"
    from atlas.service.protocol import responses
    kept = responses.ResponseStore.__init__
    def small(self, most=300, size=8<<20, **kw):
        kept(self, most, size, **kw)
    responses.ResponseStore.__init__ = small

def _trace():
    "SIGUSR1: remember, and then say what grew"
    import gc,tracemalloc
    tracemalloc.start(8)
    last = []
    def show(*_):
        gc.collect()
        s = tracemalloc.take_snapshot().filter_traces(
            [tracemalloc.Filter(False, tracemalloc.__file__)])
        if last:
            for d in s.compare_to(last[0], 'traceback')[:12]:
                print(
                    f'{d.size_diff/1e3:+,.0f} kB in {d.count_diff:+,} pieces:',
                    *d.traceback.format()[-6:], sep='\n',
                    file=sys.stderr)
        last[:] = [s]
    signal.signal(signal.SIGUSR1, show)

def numbers(pid)->tuple:
    "MiB of private memory, descriptors, threads and children of a process"
    mib = sum(
        int(n)
        for n in re.findall(
                r'Private_\w+: *(\d+)', Path(f'/proc/{pid}/smaps_rollup').read_text()))/1024
    kids = Path(f'/proc/{pid}/task/{pid}/children').read_text().split()
    return mib,len(os.listdir(f'/proc/{pid}/fd')),len(os.listdir(f'/proc/{pid}/task')),len(kids)

def guide(rng, said):
    "An object of random members"
    types = 'string','integer','boolean'
    members = {
        f'k{rng.randint(0, 10**9)}': dict(type=rng.choice(types))
        for _ in range(rng.randint(1, 12))}
    schema = dict(name='x', schema=dict(type='object', properties=members))
    return '/v1/chat/completions',dict(
        messages=said, response_format=dict(type='json_schema', json_schema=schema))

def tools(rng, said):
    "A call that has to be made"
    letters = dict(type='string', pattern='[a-z]{%d}' % rng.randint(1, 50))
    f = dict(
        name=f'f{rng.randint(0, 99)}',
        parameters=dict(type='object', properties=dict(a=letters)),
        strict=True)
    return '/v1/chat/completions',dict(
        messages=said,
        tools=[dict(type='function', function=f)],
        tool_choice='required',
        stream=rng.random()<.5)

def regex(rng, said):
    pattern = '(%s|b)+' % ('a'*rng.randint(1, 200))
    return '/v1/completions',dict(prompt='hi', structured_outputs=dict(regex=pattern))

def bomb(rng, said):
    "A pattern that takes longer than anybody waits"
    pattern = '((a{1,99}){1,99}){1,99}b'
    return '/v1/completions',dict(prompt='hi', structured_outputs=dict(regex=pattern))

def store(rng, said):
    return '/v1/responses',dict(
        input=said[0]['content'][:4000],
        stream=rng.random()<.5,
        background=rng.random()<.2,
        store=True)

MORE = dict(guide=guide, tools=tools, regex=regex, store=store, bomb=bomb)

def more(rng, kind):
    "Bodies beside those of `test_mixed`: guides, tools, long prompts, answers to answers"
    said = rng.choice(('hi','ä€😀 '*rng.randint(1, 3000)))
    model = rng.choice(NAMES)
    if kind in MORE:
        path,b = MORE[kind](rng, [dict(role='user', content=said)])
        most = 'max_output_tokens' if kind=='store' else 'max_tokens'
        return path,b|{'model':model, most:5}
    path,b = body(rng, kind)
    if 'model' in b or path=='/v1/completions':
        b['model'] = b.get('model') if b.get('model')=='nobody' else model
    return path,b

KINDS = test_mixed.KINDS*3+('guide','tools','regex','store')*3+('bomb',)

async def _post(port, path, **b):
    "A small question of our own; its status"
    raw = json.dumps(b).encode()
    r,w = await asyncio.open_connection('127.0.0.1', port)
    try:
        head = [
            f'POST {path} HTTP/1.1', 'Host: localhost', 'Content-Type: application/json',
            f'Content-Length: {len(raw)}', 'Connection: close']
        w.write('\r\n'.join([*head, '', '']).encode()+raw)
        return int((await asyncio.wait_for(r.read(), 60))[9:12])
    finally:
        w.close()

async def lane(port, until, k, pause, seen):
    "A client after the other, one each `pause` seconds"
    n,left = 0,Counter()
    while time.monotonic()<until:
        t = time.monotonic()
        try:
            seen[await one_client(port, f'{k}-{n}', random.Random(f'{k} {n}'), left)] += 1
        except (ConnectionError,asyncio.TimeoutError,AssertionError) as e:
            seen[type(e).__name__] += 1
        n += 1
        await asyncio.sleep(max(0., pause-(time.monotonic()-t)))

async def swaps(port, until, seen):
    "A model is unloaded, and soon loaded again"
    while time.monotonic()<until:
        await asyncio.sleep(15)
        name = random.choice(NAMES)
        seen[f'unload {await _post(port, "/models/unload", model=name)}'] += 1
        await asyncio.sleep(1)
        seen[f'load {await _post(port, "/models/load", model=name)}'] += 1

async def load(port, until, at_once, rate, seen):
    "Clients until it is time, about `rate` a second"
    test_mixed.body,test_mixed.KINDS = more,KINDS
    lanes = [lane(port, until, k, at_once/rate, seen) for k in range(at_once)]
    await asyncio.gather(swaps(port, until, seen), *lanes)

async def watch(pid, until, rows, every):
    "What the process has, now and then"
    start = time.monotonic()
    while time.monotonic()<until:
        rows.append(((time.monotonic()-start)/60, *numbers(pid)))
        await asyncio.sleep(every)

def show(rows, n=12):
    "The course of it in `n` lines: the median of each part"
    print('minute   MiB  descriptors  threads  children')
    for k in range(n):
        part = rows[k*len(rows)//n:(k+1)*len(rows)//n]
        if not part:
            continue
        widths = {1:5, 2:11, 3:9, 4:9}
        columns = [f'{middle(part, j):{w}.0f}' for j,w in widths.items()]
        print(f'{part[-1][0]:6.1f} ', *columns, flush=True)

def middle(rows, j):
    "The median of a column"
    return sorted(r[j] for r in rows)[len(rows)//2]

GROWTH = { # Columns, what they are, and by how much they may grow
    1: ('MiB of memory',8),
    2: ('descriptors',4),
    3: ('threads',2),
    4: ('children',1)}

def verdict(rows)->list[str]:
    """What is not flat after the first third, by the medians of the sixth that follows it and of
    the last sixth"""
    n = len(rows)
    early,late = rows[n//3:n//2],rows[n-n//6:]
    grown = []
    for j,(what,room) in GROWTH.items():
        a,b = middle(early, j),middle(late, j)
        if b>a+room:
            grown.append(f'{what} went from {a:.0f} to {b:.0f}')
    return grown

FAULTS = (
    'ConnectionError','ConnectionResetError','ConnectionRefusedError','TimeoutError',
    'AssertionError')

def said_in(log):
    "The end of it"
    log.seek(0)
    return log.read()[-2000:]

async def soaked(p, o, seen):
    "What the process `p` had, row by row, while it was under load"
    port = int(re.search(r'127.0.0.1:(\d+)', p.stdout.readline())[1])
    rows,until = [],time.monotonic()+60*o.minutes
    async def mark():
        await asyncio.sleep(20*o.minutes)
        if o.trace:
            p.send_signal(signal.SIGUSR1)
    await asyncio.gather(
        load(port, until, o.at_once, o.rate, seen),
        watch(p.pid, until, rows, max(1., o.minutes/6)),
        mark())
    return rows

def judged(rows, seen, p)->list[str]:
    "Show what was seen; what is wrong about it"
    show(rows)
    most = sorted(seen.items(), key=lambda i: -i[1])
    print(', '.join(f'{k or "left"}: {v:,}' for k,v in most))
    wrong = verdict(rows)
    wrong += [f'{seen[k]} requests ended with {k}' for k in FAULTS if seen[k]]
    if p.poll() is not None:
        wrong.append('the gateway ended')
    return wrong

def soak(o):
    "Put a gateway under load; is it well?"
    log = tempfile.TemporaryFile('w+') # What the gateway says
    p = subprocess.Popen(
        [sys.executable, __file__, '--serve', *['--trace']*o.trace],
        stdout=subprocess.PIPE, stderr=None if o.trace else log, text=True)
    seen = Counter()
    try:
        rows = asyncio.run(soaked(p, o, seen))
        if o.trace:
            p.send_signal(signal.SIGUSR1)
            time.sleep(20)
        wrong = judged(rows, seen, p)
    finally:
        p.terminate()
        p.wait(20)
    if wrong:
        print(said_in(log))
        print('failed: '+'; '.join(wrong))
    else:
        print(f'ok: {sum(seen.values()):,} requests in {o.minutes:g} minutes, and nothing grew')
    return not wrong

def main():
    a = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    a.add_argument('--minutes', type=float, default=60.)
    a.add_argument('--at-once', type=int, default=24)
    a.add_argument('--rate', type=float, default=40., help='requests a second')
    a.add_argument('--trace', action='store_true')
    a.add_argument('--serve', action='store_true', help=argparse.SUPPRESS)
    o = a.parse_args()
    if o.serve:
        serve(o.trace)
    else:
        sys.exit(not soak(o))

if __name__=='__main__':
    main()
