"""Conversations over HTTP, whose next turns are prefilled while nobody waits, and the same without
that: the same answers and log probabilities, and more of each prompt is there already.

    python tests/gpu/next_turns.py [--emulator] [--turns 5]

`tiny` answers, in a process of its own as `atlas serve` starts it; `--emulator` takes the host."""
import json,os,re,signal,socket,subprocess,sys,time
from contextlib import contextmanager
from urllib.request import Request,urlopen
from toys import arguments,verdict

SAYS = 'Tell me a long story about a fox, a hen and a winter.','And then?','Why?','Who was it?'
# How three conversations are sampled; one draws, and one is given a schema as well
ADDRESS = dict(type='object', required=['name'], additionalProperties=False,
    properties=dict(name=dict(type='string', maxLength=20)))
SCHEMA = dict(type='json_schema', json_schema=dict(name='address', schema=ADDRESS))
HOW = [
    dict(temperature=0), dict(temperature=.8, seed=5),
    dict(temperature=0, response_format=SCHEMA)]
COUNT = re.compile(r'next_turn_prefills_total\{[^}]*outcome="(\w+)"[^}]*\} ([\d.]+)')

def free():
    "A free port"
    with socket.socket() as s:
        s.bind(('127.0.0.1', 0))
        return s.getsockname()[1]

def get(url, **body):
    "What `url` says, to `body` if there is one"
    data = json.dumps(body).encode() if body else None
    with urlopen(Request(url, data, {'content-type':'application/json'}), timeout=120) as r:
        return r.read().decode()

@contextmanager
def served(device, *options):
    "The address of a server that has loaded its model"
    url,code = f'http://127.0.0.1:{(port := free())}','from atlas.use.cli import main; main()'
    command = [sys.executable, '-c', code, 'serve', 'tiny', '--port', str(port), *options]
    p = subprocess.Popen([*command, '--device', device, '--log-level', 'warning'], env=os.environ)
    try:
        while p.poll() is None:
            try:
                get(url+'/health')
            except OSError:
                time.sleep(.1)
            else:
                break
        else:
            raise SystemExit(f'failed: the server ended with {p.returncode}')
        yield url
    finally:
        p.send_signal(signal.SIGINT)
        p.wait(60)

def settled(url):
    "How next turns ended, when none is under way"
    while True:
        counts = {
            k:int(float(n))
            for k,n in COUNT.findall(get(url+'/metrics'))}
        if counts.get('begun', 0)==sum(counts.values())-counts.get('begun', 0):
            return counts
        time.sleep(.05)

def conversation(url, how, turns):
    """Of each turn: what is said and its log probabilities, tokens of its prompt, those that were
    there"""
    messages,out = [],[]
    for i in range(turns):
        messages.append(dict(role='user', content=SAYS[min(i, len(SAYS)-1)]))
        body = dict(model='tiny', messages=messages, max_tokens=120, logprobs=True, **how)
        d = json.loads(get(url+'/v1/chat/completions', **body))
        choice,usage = d['choices'][0],d['usage']
        cached = usage['prompt_tokens_details']['cached_tokens']
        out.append((choice, usage['prompt_tokens'], cached))
        messages.append({
            k:v for k,v in choice['message'].items()
            if k in ('role','content')})
        settled(url)
    return out

def talks(device, turns, *options):
    "Three conversations, one after the other, and how their next turns ended"
    with served(device, *options) as url:
        return [conversation(url, how, turns) for how in HOW],settled(url)

if __name__=='__main__':
    a = arguments(__doc__, turns=dict(type=int, default=5))
    device,bad = 'cpu' if a.emulator else 'cuda',[]
    plain,none = talks(device, a.turns, '--no-prefill-next-turn')
    ahead,ends = talks(device, a.turns)
    if any(none.values()) or not ends.get('finished'):
        bad.append(f'next turns: {none} without, {ends} with')
    for i,(one,other) in enumerate(zip(plain, ahead)):
        same = [(x[:2],y[:2]) for x,y in zip(one, other)]
        bad += [
            f'conversation {i}, turn {t}: another answer' for t,(x,y) in enumerate(same) if x!=y]
    there = [sum(cached for talk in talks for _,_,cached in talk) for talks in (plain,ahead)]
    tokens = sum(n for talk in ahead for _,n,_ in talk)
    if there[1]<=there[0]:
        bad.append('nothing more is there')
    turns = len(HOW)*a.turns
    what = f'{turns} turns of {tokens} tokens, of which {there[0]} and {there[1]} were there'
    verdict(bad, f'{what}; {ends}')
