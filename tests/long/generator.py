"""What `atlas bench serve` adds to the times that it reports: its numbers beside those of a server
that notes when it was asked and when it sent each token, by the same clock, over real sockets.

    python tests/long/generator.py [--streams 1,8,64] [--output nbs/8_use/generator_host.json]

So much as the generator reports beyond what the server did is its own, and the machine's: a bare
reader, which only notes when bytes come, is asked for the same, by turns, and has only the
machine's. Processor seconds are those of the generator's process. It ends with `ok` if a
processor second is enough for 2,000 tokens."""
import argparse,asyncio,json,os,platform,subprocess,sys,time
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.request import urlopen
import numpy as np
from atlas.use.bench_client import Site
from atlas.use.bench_data import Synthetic
from atlas.use.bench_load import levels
from atlas.use.bench_serve import Plan,Target,sweep

SERVER = Path(__file__).parents[1]/'helpers/known_server.py'
ENOUGH = 2000 # Tokens for a processor second

def options():
    "What the command line says"
    a = argparse.ArgumentParser()
    a.add_argument('--streams', default='1,8,64', help='at a time; several with commas')
    a.add_argument('--rate', type=float, default=2500., help='tokens a second of all together')
    a.add_argument('--first', type=float, default=.05, help='seconds to a first token, at least')
    a.add_argument('--tokens', type=int, default=200, help='of each answer')
    a.add_argument('--seconds', type=float, default=6., help='of each run, about')
    a.add_argument('--rounds', type=int, default=3)
    a.add_argument('--output', type=Path, help='write all numbers to this file, too')
    return a.parse_args()

@contextmanager
def server(first, rate):
    "A server whose delays are known: its address"
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    command = [sys.executable, SERVER, str(first), str(rate)]
    with subprocess.Popen(command, text=True, **pipes) as p:
        try:
            yield f'http://127.0.0.1:{p.stdout.readline().strip()}'
        finally:
            p.kill()

@dataclass
class Heard:
    "One answer as its reader saw it, in seconds"
    number:int # Of the server's
    asked:float
    arrivals:list
    ended:float

# -- the generator -------------------------------------------------------------------------------

async def generator(url, streams, requests, tokens)->list[Heard]:
    "What `atlas bench serve` notes"
    data = Synthetic(input_mean=64, output_mean=tokens)
    plan = Plan(levels((streams,)), requests, warmup=0, data=data)
    runs,_ = await sweep(Target(Site(url), 'known'), plan)
    answers = [r.answer for r in runs[0][1]]
    failed = [a.error for a in answers if a.error]
    if failed:
        raise SystemExit(f'failed: {failed[0]}')
    return [Heard(int(a.text.split()[0]), a.asked, a.arrivals, a.ended) for a in answers]

# -- a bare reader -------------------------------------------------------------------------------

class Bare(asyncio.Protocol):
    "Notes when bytes come, and reads them when all is over"
    def __init__(self, loop):
        self.loop,self.came = loop,[]
        self.over = loop.create_future()
    def data_received(self, data):
        self.came.append((self.loop.time(), data))
    def connection_lost(self, exc):
        self.over.set_result(None)

def heard(asked, came)->Heard:
    "When its tokens came"
    at = [t for t,raw in came for _ in range(raw.count(b'"content": "'))]
    text = b''.join(raw for _,raw in came).split(b'"content": "')[1]
    return Heard(int(text.split()[0]), asked, at, came[-1][0])

async def bare_one(url, tokens)->tuple:
    "Ask once"
    loop = asyncio.get_running_loop()
    content = 'word '*64
    body = dict(messages=[dict(role='user', content=content)], max_tokens=tokens)
    asked = loop.time()
    make = partial(Bare, loop)
    site = Site(url)
    raw = site.message('/v1/chat/completions', body)
    transport = await site.open(b := make) if False else None
    return asked,raw,transport,b
