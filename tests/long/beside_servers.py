"""One load on two servers of the demo model on the processor, with as many threads each, one after
the other, neither keeping prompts: ours and llama.cpp's from the wheel of xllamacpp.

    python tests/long/beside_servers.py [--threads 1] [--folder nbs/8_use]

The folder gets serve_atlas_host.json and serve_llamacpp_host.json, which `atlas bench compare`
reads and page use.bench_compare draws. On a machine with nothing else to do it takes four
minutes. It ends with `ok` if both answered all that was asked, with as many tokens."""
import argparse,json,subprocess,sys
from contextlib import contextmanager
from pathlib import Path
from atlas.ground.hub import resolve

ROOT = Path(__file__).parents[2]
SERVER = ROOT/'tests/helpers/llamacpp_server.py'
PROMPT,ANSWER,REQUESTS = 128,32,12 # Tokens, tokens, and requests of a run
AT_A_TIME = 1,2,4

def options():
    "What the command line says"
    a = argparse.ArgumentParser()
    a.add_argument('--threads', type=int, default=1, help='of each server')
    a.add_argument('--requests', type=int, default=REQUESTS, help='of each run')
    a.add_argument('--folder', type=Path, default=ROOT/'nbs/8_use', help='for both files')
    return a.parse_args()

@contextmanager
def llamacpp(path, threads):
    "llama.cpp's server: its address"
    room = 2*(PROMPT+ANSWER)*max(AT_A_TIME)
    words = dict(threads=threads, parallel=max(AT_A_TIME), context=room)
    flags = [f'--{k}={v}' for k,v in words.items()]
    pipes = dict(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    command = [sys.executable, SERVER, path, *flags, '--alias=demo', '--forget']
    with subprocess.Popen(command, text=True, **pipes) as p:
        try:
            yield p.stdout.readline().strip()
        finally:
            p.kill()

def ask(where, output, requests, *flags):
    "Ask a server, or one of a model that is started for it: the report"
    load = {
        'concurrency': ','.join(map(str, AT_A_TIME)), 'request-count': requests,
        'synthetic-input-tokens-mean': PROMPT, 'output-tokens-mean': ANSWER,
        'extra-inputs': 'ignore_eos:true', 'random-seed': 0, 'output': output}
    words = [*flags, *(f'--{k}={v}' for k,v in load.items())]
    print('atlas bench serve', where, *words, flush=True)
    command = [sys.executable, '-m', 'atlas', 'bench', 'serve', where, *words]
    subprocess.run(command, check=True, cwd=ROOT)
    return json.loads(output.read_text())

def wrong(report, requests):
    "What a report should not have"
    name = report['server']['engine']
    for r in report['runs']:
        if r['errors'] or r['doubts'] or r['output_tokens']!=requests*ANSWER:
            yield f'{name}, {r["concurrency"]} at a time: {r["output_tokens"]} tokens'

def main():
    o = options()
    path = next(iter(sorted(Path(resolve('demo')).parent.glob('*.gguf'))))
    mine,theirs = (o.folder/f'serve_{n}_host.json' for n in ('atlas','llamacpp'))
    own = '--device=cpu','--no-enable-prefix-caching',f'--threads={o.threads}'
    reports = [ask('demo', mine, o.requests, *own)]
    with llamacpp(path, o.threads) as url:
        reports.append(ask(url, theirs, o.requests))
    bad = [said for r in reports for said in wrong(r, o.requests)]
    print('\n'.join(['failed',*bad]) if bad else f'ok: {mine}, {theirs}')
    return bool(bad)

if __name__=='__main__':
    sys.exit(main())
