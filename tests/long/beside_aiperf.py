"""NVIDIA's aiperf beside `atlas bench serve`: the same load on one server by turns, and whether
aiperf's own tools read the files of ours.

    python -m venv v && v/bin/pip install aiperf
    python tests/long/beside_aiperf.py v/bin/aiperf [--rounds 2] [--folder FOLDER]

The server is ours, with the model `tiny` on the processor. aiperf validates our summaries with the
classes that it writes its own by, and plots our folder, which takes chromium. On a machine with
nothing else to do it takes three minutes."""
import argparse,json,os,subprocess,sys,tempfile
from pathlib import Path
from atlas.ground.hub import resolve
from atlas.ground.options import EngineConfig
from atlas.use.bench_throughput import serving

PROMPT,ANSWER,REQUESTS = 100,32,24 # Tokens, tokens, and requests of a run
LOAD = {
    'concurrency': 2, 'request-count': REQUESTS, 'warmup-request-count': 2, 'random-seed': 0,
    'synthetic-input-tokens-mean': PROMPT, 'output-tokens-mean': ANSWER,
    'extra-inputs': 'ignore_eos:true'}
TIMES = 'time_to_first_token','inter_token_latency','request_latency'
NAME = 'profile_export_aiperf.json'
CHECK = '''
import json,sys
from aiperf.common.models.export_models import JsonExportData
from aiperf.plot.core.data_loader import DataLoader
from pathlib import Path
for p in map(Path, sys.argv[1:]):
    JsonExportData.model_validate(json.loads(p.read_text()))
    run = DataLoader().load_run(p.parent)
    print(len(run.requests), run.metadata.model, run.metadata.concurrency)
'''

def options():
    "What the command line says"
    a = argparse.ArgumentParser()
    a.add_argument('aiperf', type=Path, help='its command, in an environment that has it')
    a.add_argument('--rounds', type=int, default=2)
    a.add_argument('--folder', type=Path, help='for the files of both; else they are not kept')
    return a.parse_args()

def flags(): return [f'--{k}={v}' for k,v in LOAD.items()]

def ours(url, folder):
    "Ask with `atlas bench serve`"
    command = [sys.executable, '-m', 'atlas', 'bench', 'serve', url, *flags()]
    subprocess.run([*command, f'--artifact-dir={folder}'], check=True)

def theirs(aiperf, url, folder):
    "Ask with aiperf; it counts as the server does"
    counts = ['--use-server-token-count', f'--tokenizer={resolve("tiny")}']
    how = ['--endpoint-type=chat', '--streaming', '--ui=none', '--workers-max=1']
    command = [aiperf, 'profile', '--model=bench', f'--url={url}', *how, *counts, *flags()]
    # What it imports is its own
    own = {k: v for k,v in os.environ.items() if k!='PYTHONPATH'}
    pipes = dict(stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    subprocess.run([*command, f'--output-artifact-dir={folder}'], check=True, env=own, **pipes)

def told(name, folder):
    "A line of what a tool says"
    d = json.loads((folder/NAME).read_text())
    spans = [f'{d[k]["p50"]:9.1f}{d[k]["p90"]:9.1f}' for k in TIMES]
    rate = d['output_token_throughput']['avg']
    tokens = d['output_sequence_length']['sum']
    return f'{name:18}{rate:9.1f} tokens/s {tokens:6,.0f} tokens'+''.join(spans)

def read_by_them(aiperf, folders, plots)->list[str]:
    "What their classes and their plots make of our files: what is wrong"
    own = {k: v for k,v in os.environ.items() if k!='PYTHONPATH'}
    said = dict(capture_output=True, text=True, env=own)
    files = [f/NAME for f in folders]
    tools = {
        'validation': [aiperf.parent/'python', '-c', CHECK, *files],
        'plots': [aiperf, 'plot', *folders, '--output', plots]}
    bad = []
    for what,command in tools.items():
        p = subprocess.run(command, **said)
        print(f'aiperf, {what}:', p.stdout.strip()[-300:])
        if p.returncode:
            bad.append(f'{what}: {(p.stderr or p.stdout).strip()[-300:]}')
    return bad

def by_turns(o, aiperf, folder):
    "Ask with both, and say what each told"
    with serving(EngineConfig('tiny', device='cpu', max_num_seqs=2)) as port:
        url = f'http://127.0.0.1:{port}'
        for i in range(o.rounds):
            theirs(aiperf, url, folder/f'aiperf_{i}')
            ours(url, folder/f'atlas_{i}')
    heads = 'first p50','p90','ITL p50','p90','whole p50','p90'
    print(f'{"":43}'+''.join(f'{h:>9}' for h in heads))
    for i in range(o.rounds):
        print(told('aiperf', folder/f'aiperf_{i}'))
        print(told('atlas bench serve', folder/f'atlas_{i}'))

def main():
    o = options()
    aiperf = o.aiperf.absolute()
    with tempfile.TemporaryDirectory() as made:
        folder = (o.folder or Path(made)).absolute()
        by_turns(o, aiperf, folder)
        mine = [folder/f'atlas_{i}' for i in range(o.rounds)]
        bad = read_by_them(aiperf, mine, folder/'plots')
    print('\n'.join(['failed',*bad]) if bad else 'ok')
    return bool(bad)

if __name__=='__main__':
    sys.exit(main())
