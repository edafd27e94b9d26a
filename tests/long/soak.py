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
    kept = responses.Store.__init__
    def small(self, most=300, size=8<<20, **kw):
        kept(self, most, size, **kw)
    responses.Store.__init__ = small

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

def more(rng, kind):
    "Bodies beside those of `test_mixed`: guides, tools, long prompts, answers to answers"
    ask = [dict(
        role='user',
        content=rng.choice(('hi','ä€😀 '*rng.randint(1, 3000))))]
    model = rng.choice(NAMES)
    if kind=='guide':
        d = {
            f'k{rng.randint(0, 10**9)}':dict(type=rng.choice(('string','integer','boolean')))
            for _ in range(rng.randint(1, 12))}
        return (
            '/v1/chat/completions',
            dict(
                model=model, messages=ask, max_tokens=5,
                response_format=dict(
                    type='json_schema',
                    json_schema=dict(name='x', schema=dict(type='object', properties=d)))))
    if kind=='tools':
        f = dict(
            name=f'f{rng.randint(0, 99)}',
            parameters=dict(
                type='object',
                properties=dict(a=dict(type='string', pattern='[a-z]{%d}' % rng.randint(1, 50)))),
            strict=True)
        return (
            '/v1/chat/completions',
            dict(
                model=model, messages=ask, max_tokens=5,
                tools=[dict(type='function', function=f)], tool_choice='required',
                stream=rng.random()<.5))
    if kind=='regex':
        return (
            '/v1/completions',
            dict(
                model=model, prompt='hi', max_tokens=5,
                structured_outputs=dict(regex='(%s|b)+' % ('a'*rng.randint(1, 200)))))
    if kind=='store':
        return (
            '/v1/responses',
            dict(
                model=model, input=ask[0]['content'][:4000],
                max_output_tokens=5, stream=rng.random()<.5,
                background=rng.random()<.2, store=True))
    if kind=='bomb':
        return (
            '/v1/completions',
            dict(
                model=model, prompt='hi', max_tokens=5,
                structured_outputs=dict(regex='((a{1,99}){1,99}){1,99}b')))
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

async def load(port, until, at_once, rate, seen):
    "Clients until it is time, about `rate` a second"
    test_mixed.body,test_mixed.KINDS = more,KINDS
    async def lane(k):
        n,left = 0,Counter()
        while time.monotonic()<until:
            t = time.monotonic()
            try:
                seen[await one_client(port, f'{k}-{n}', random.Random(f'{k} {n}'), left)] += 1
            except (ConnectionError,asyncio.TimeoutError,AssertionError) as e:
                seen[type(e).__name__] += 1
            n += 1
            await asyncio.sleep(max(0., at_once/rate-(time.monotonic()-t)))
    async def swaps():
        while time.monotonic()<until:
            await asyncio.sleep(15)
            name = random.choice(NAMES)
            seen[f'unload {await _post(port, "/models/unload", model=name)}'] += 1
            await asyncio.sleep(1)
            seen[f'load {await _post(port, "/models/load", model=name)}'] += 1
    await asyncio.gather(swaps(), *(lane(k) for k in range(at_once)))

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
        if part:
            print(
                f'{part[-1][0]:6.1f} ',
                *(
                    f'{sorted(r[j] for r in part)[len(part)//2]:{w}.0f}'
                    for j,w in (
                            (1,5),(2,11),(3,9),
                            (4,9))),
                flush=True)

def verdict(rows)->list[str]:
    """What is not flat after the first third, by the medians of the sixth that follows it and of
    the last sixth"""
    def mid(part, j):
        return sorted(r[j] for r in part)[len(part)//2]
    n = len(rows)
    a = rows[n//3:n//2]
    b = rows[n-n//6:]
    return [
        f'{what} went from {mid(a,j):.0f} to {mid(b,j):.0f}'
        for j,what,room in (
                (1,'MiB of memory',8),(2,'descriptors',4),
                (3,'threads',2),(4,'children',1))
        if mid(b,j)>mid(a,j)+room]

def main():
    a = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    a.add_argument('--minutes', type=float, default=60.)
    a.add_argument('--at-once', type=int, default=24)
    a.add_argument('--rate', type=float, default=40., help='requests a second')
    a.add_argument('--trace', action='store_true')
    a.add_argument('--serve', action='store_true', help=argparse.SUPPRESS)
    o = a.parse_args()
    if o.serve:
        return serve(o.trace)
    log = tempfile.TemporaryFile('w+') # What the gateway says
    p = subprocess.Popen(
        [sys.executable, __file__, '--serve', *['--trace']*o.trace],
        stdout=subprocess.PIPE, stderr=None if o.trace else log, text=True)
    try:
        port = int(re.search(r'127.0.0.1:(\d+)', p.stdout.readline())[1])
        rows,seen,begin = [],Counter(),time.monotonic()
        until = begin+60*o.minutes
        async def both():
            async def mark():
                await asyncio.sleep(20*o.minutes)
                if o.trace:
                    p.send_signal(signal.SIGUSR1)
            await asyncio.gather(
                load(port, until, o.at_once, o.rate, seen),
                watch(p.pid, until, rows, max(1., o.minutes/6)),
                mark())
        asyncio.run(both())
        if o.trace:
            p.send_signal(signal.SIGUSR1)
            time.sleep(20)
        show(rows)
        print(', '.join(
            f'{k or "left"}: {v:,}'
            for k,v in sorted(seen.items(), key=lambda i: -i[1])))
        wrong = verdict(rows)+[
            f'{seen[k]} requests ended with {k}'
            for k in (
                    'ConnectionError','ConnectionResetError','ConnectionRefusedError',
                    'TimeoutError','AssertionError')
            if seen[k]]+['the gateway ended']*(p.poll() is not None)
        if wrong:
            log.seek(0)
            print(log.read()[-2000:])
        well = f'ok: {sum(seen.values()):,} requests in {o.minutes:g} minutes, and nothing grew'
        print('failed: '+'; '.join(wrong) if wrong else well)
        sys.exit(bool(wrong))
    finally:
        p.terminate()
        p.wait(20)

if __name__=='__main__':
    main()
