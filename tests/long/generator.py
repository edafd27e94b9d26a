"""What `atlas bench serve` adds to the times that it reports: its numbers beside those of a server
that notes when it was asked and when it sent each token, by the same clock, over real sockets.

    python tests/long/generator.py [--streams 1,8,64] [--output nbs/8_use/generator_host.json]

What the generator reports beyond what the server did is its own, and the machine's. A bare reader,
which only notes when bytes come, is asked for the same by turns, and has only the machine's.
Processor seconds are those of the generator's process. It ends with `ok` if one of them is enough
for 2,000 tokens."""
import argparse,asyncio,json,os,subprocess,sys,time
from contextlib import contextmanager
from dataclasses import asdict,dataclass
from pathlib import Path
from urllib.request import urlopen
import numpy as np
from atlas.card.device import processor
from atlas.use.bench_client import Site
from atlas.use.bench_data import Synthetic
from atlas.use.bench_load import levels
from atlas.use.bench_serve import SweepPlan,Target,sweep

SERVER = Path(__file__).parents[1]/'helpers/known_server.py'
ENOUGH = 2000 # Tokens for a processor second
SHARES = 50,90,99

def options():
    "What the command line says"
    a = argparse.ArgumentParser()
    a.add_argument('--streams', default='1,8,64', help='at a time; several with commas')
    a.add_argument('--rate', type=float, default=3000., help='tokens a second of all together')
    a.add_argument('--first', type=float, default=.05, help='seconds to a first token, at least')
    a.add_argument('--tokens', type=int, default=400, help='of each answer')
    a.add_argument('--requests', type=int, default=32, help='of each run, at least one a stream')
    a.add_argument('--rounds', type=int, default=3)
    a.add_argument('--output', type=Path, help='write all numbers to this file, too')
    return a.parse_args()

@contextmanager
def server(o):
    "A server whose delays are known: its address"
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    command = [sys.executable, SERVER, str(o.first), str(o.rate)]
    with subprocess.Popen(command, text=True, **pipes) as p:
        try:
            yield f'http://127.0.0.1:{p.stdout.readline().strip()}'
        finally:
            p.kill()

@dataclass
class Heard:
    "One answer as its reader saw it, in seconds"
    number:int # As the server counts
    asked:float
    arrivals:list # Of its tokens

# -- two readers ---------------------------------------------------------------------------------

def body(tokens): return Synthetic(input_mean=64, output_mean=tokens)

async def generator(url, streams, o)->list[Heard]:
    "What `atlas bench serve` notes"
    plan = SweepPlan(levels((streams,)), max(o.requests, streams), warmup=0, data=body(o.tokens))
    runs,_ = await sweep(Target(Site(url), 'known'), plan)
    answers = [r.answer for r in runs[0][1]]
    if failed := [a.error for a in answers if a.error]:
        raise SystemExit(f'failed: {failed[0]}')
    return [Heard(int(a.text.split()[0]), a.asked, a.arrivals) for a in answers]

class Bare(asyncio.Protocol):
    "Notes when bytes come"
    def __init__(self, loop):
        self.loop,self.came = loop,[]
        self.over = loop.create_future()
    def data_received(self, data):
        self.came.append((self.loop.time(), data))
    def connection_lost(self, exc):
        self.over.set_result(None)

MARK = b'"content": "'

async def bare_answer(url, ask)->Heard:
    "Ask once, and read what came when all of it is there"
    loop,site = asyncio.get_running_loop(),Site(url)
    asked = loop.time()
    reader = Bare(loop)
    transport = await site.open(lambda: reader)
    transport.write(site.message('/v1/chat/completions', ask))
    await reader.over
    at = [t for t,raw in reader.came for _ in range(raw.count(MARK))]
    whole = b''.join(raw for _,raw in reader.came)
    return Heard(int(whole.split(MARK)[1].split()[0]), asked, at)

async def bare(url, streams, o)->list[Heard]:
    "The same requests, by a reader that does nothing else"
    todo,out = body(o.tokens).make(max(o.requests, streams)),[]
    async def user():
        while todo:
            out.append(await bare_answer(url, todo.pop().body(0, [])))
    await asyncio.gather(*(user() for _ in range(streams)))
    return out

READERS = {'atlas bench serve':generator, 'bare reader':bare}

# -- both beside the server ----------------------------------------------------------------------

def sent(url)->list:
    "When each question had come, and when each token was sent"
    with urlopen(f'{url}/sent') as r:
        return json.load(r)

@dataclass
class Added:
    "Milliseconds beyond what the server did, of each answer or token of a run"
    first:list # To the first token, from before the connection
    each:list # From each token to the next
    mean:list # Of an answer: between its tokens, on average, as it is reported

def added(heard:list, told:list)->Added:
    "What readers saw beside what the server did"
    out = Added([], [], [])
    for h in heard:
        asked,*at = told[h.number]
        gaps = np.diff(h.arrivals)-np.diff(at)
        out.first.append(1e3*(h.arrivals[0]-h.asked-at[0]+asked))
        out.each += (1e3*gaps).tolist()
        out.mean.append(1e3*float(gaps.mean()))
    return out

def one(name, url, streams, o)->tuple[Added,dict]:
    "A run: what it added, and what it took"
    sent(url)
    began,cpu = time.monotonic(),time.process_time()
    heard = asyncio.run(READERS[name](url, streams, o))
    cpu = time.process_time()-cpu
    took = dict(seconds=time.monotonic()-began, processor_seconds=cpu)
    return added(heard, sent(url)),took|dict(tokens=sum(len(h.arrivals) for h in heard))

def shares(values)->dict:
    "Percentiles in milliseconds"
    return {f'p{p}': round(float(np.percentile(values, p)), 4) for p in SHARES}

def row(name, streams, runs)->dict:
    "All rounds of a reader at so many streams"
    total = {k: sum(took[k] for _,took in runs) for k in runs[0][1]}
    spans = {k: shares([v for a,_ in runs for v in asdict(a)[k]]) for k in ('first','each','mean')}
    rates = dict(
        tokens_per_second=round(total['tokens']/total['seconds'], 1),
        tokens_per_processor_second=round(total['tokens']/total['processor_seconds'], 1))
    return dict(reader=name, streams=streams)|total|rates|{f'{k}_ms': v for k,v in spans.items()}

def measure(o)->list[dict]:
    "Both readers by turns, at each number of streams"
    rows = []
    with server(o) as url:
        for streams in map(int, o.streams.split(',')):
            runs = {name: [] for name in READERS}
            for _ in range(o.rounds):
                for name,own in runs.items():
                    own.append(one(name, url, streams, o))
            rows += [row(name, streams, own) for name,own in runs.items()]
    return rows

def line(r)->str:
    "A row of the table"
    spent = [r[k] for k in ('first_ms','each_ms','mean_ms')]
    spans = ''.join(f'{ms["p50"]:10.3f}{ms["p99"]:9.3f}' for ms in spent)
    rates = f'{r["tokens_per_second"]:10,.0f}{r["tokens_per_processor_second"]:12,.0f}'
    return f'{r["streams"]:7}  {r["reader"]:18}{rates}{spans}'

HEAD = f'''{'':27}{'tokens':>10}{'a processor':>12}{'first token, ms':>19}{'each token, ms':>19}\
{'an answer, ms':>19}
streams  {'added by':18}{'a second':>10}{'second':>12}{'p50       p99':>19}{'p50       p99':>19}\
{'p50       p99':>19}'''

def save(o, rows, load):
    "Write the file of `--output`"
    plan = {k: v for k,v in vars(o).items() if k!='output'}
    about = dict(machine=processor(), processors=os.cpu_count(), load=load, plan=plan)
    found = dict(kind='atlas.bench.generator', version=1)|about|dict(rows=rows)
    o.output.write_text(json.dumps(found, indent=1)+'\n')

def main():
    o = options()
    load = os.getloadavg()[0] if hasattr(os, 'getloadavg') else None
    rows = measure(o)
    print(HEAD, *map(line, rows), sep='\n')
    if o.output:
        save(o, rows, load)
    own = [r for r in rows if r['reader']=='atlas bench serve']
    least = min(r['tokens_per_processor_second'] for r in own)
    print(f'{"ok" if least>=ENOUGH else "failed"}: {least:,.0f} tokens a processor second')
    return least<ENOUGH

if __name__=='__main__':
    sys.exit(main())
