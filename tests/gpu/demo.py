"""The demo model on the card against the host, over a page of text: Kullback-Leibler divergence of
each position's prediction, by prefill and by steps of eight rows, greedy continuations, how fast
it decodes, and a step's timeline.

python tests/gpu/demo.py [--emulator] [--model demo or a file] [--pieces FOLDER] [--tokens 400]
[--answer 64]

With --pieces the file's parts are joined first. The emulator has a tiny model of its own,
unless one is named: a tile of 64 rows of the demo model takes it five minutes, a step of eight
25 s."""
import tempfile,time
from dataclasses import dataclass,replace
from pathlib import Path
import numpy as np
from toys import arguments,verdict
from atlas.use.bench_decode import measure
from atlas.engine.cache import KVCache
from atlas.use.llm import LLM
from atlas.use.timeline import timeline
from atlas.model.model import Piece,make_batch
from atlas.ops.sample import SamplingParams

ROOT = Path(__file__).parents[2]
STARTS = [
    'The capital of France is', 'Once upon a time, in a village by the sea, there lived',
    'def fibonacci(n):\n', 'Water boils at', 'The three laws of thermodynamics are']

def log_softmax(x):
    x = x.astype(np.float64)
    x -= x.max(1, keepdims=True)
    return x-np.log(np.exp(x).sum(1, keepdims=True))

def divergence(want, got):
    "KL(want || got) of each row, in nats"
    p,q = log_softmax(want),log_softmax(got)
    return (np.exp(p)*(p-q)).sum(1)

BLOCK = 64

def step(m, cache, rows, at, table):
    "Logits of `rows` of one sequence from position `at` on"
    piece = Piece(rows, at, table, len(rows), state=0, keep=1)
    batch = make_batch([piece], False, BLOCK, m.device)
    return m.device.download(m.forward(batch, cache))

def by_steps(llm, ids, n=8):
    "Logits after each of `ids` as decode kernels compute them, `n` rows at a time"
    m = llm.model
    table = list(range(len(ids)//BLOCK+2))
    with llm.engine.stepper.here():
        cache = KVCache(m.c, m.device, len(table), BLOCK, 'f16', 4)
        starts = range(0, len(ids), n)
        out = [step(m, cache, ids[i:i+n], i, table) for i in starts]
        m.device.synchronize()
    return np.concatenate(out)

def continuations(host, card, starts, n, tiny=.05):
    "Where greedy answers part although the host was sure, and how many tokens were compared"
    bad = []
    same = 0
    p = SamplingParams(temperature=0, max_tokens=n, logprobs=2, ignore_eos=True)
    for s in starts:
        a,b = (l.generate(s, p).logprobs for l in (host,card))
        differ = [i for i,(x,y) in enumerate(zip(a, b)) if x.id!=y.id]
        same += differ[0] if differ else n
        if not differ:
            continue
        k = differ[0]
        first,second = a[k].top[:2]
        gap = first[1]-second[1]
        if gap>tiny:
            bad.append(f'{s!r}: token {k} is {b[k].id} and not {a[k].id}, which led by {gap:.3f}')
    return bad,same

_last = time.perf_counter()
def say(what):
    "Print it, and how long it took"
    global _last
    now = time.perf_counter()
    print(f'{what} ({now-_last:.1f} s)', flush=True)
    _last = now

@dataclass(frozen=True)
class Setting:
    "What is compared"
    model:str
    device:object # 'cuda' or an emulator
    tokens:int # Of text
    answer:int # Tokens of a continuation
    context:int

def setting(a)->Setting:
    "As the arguments say"
    if a.emulator:
        from atlas.card.emulator import Emulator
        usual = Setting(str(ROOT/'tests/data/smollm2-tied'), Emulator(), 40, 6, 128)
    else:
        usual = Setting('demo', 'cuda', 400, 64, 2048)
    return replace(
        usual,
        model=a.model or usual.model,
        tokens=a.tokens or usual.tokens,
        answer=usual.answer if a.answer is None else a.answer)

def joined(pieces, folder):
    "The path of the model whose file lies in `pieces`, put together in `folder`"
    model = Path(folder)/'demo.gguf'
    parts = sorted(Path(pieces).glob('*.part*'))
    model.write_bytes(b''.join(p.read_bytes() for p in parts))
    return str(model)

def text_for(llm, n):
    "Ids of a text of `n` tokens, or any where the vocabulary is a toy's"
    V = llm.config.vocab_size
    if V>256:
        text = (ROOT/'README.md').read_text()
        return llm.tokenizer.encode(text)[:n]
    return np.random.default_rng(0).integers(3, V, n).tolist()

def apart(how, want, got):
    "How far logits `got` are from the first of `want`: said, and what is bad about it"
    there = want[:len(got)]
    kl = divergence(there, got)
    agree = (got.argmax(1)==there.argmax(1)).mean()
    say(
        f'{how}: KL mean {kl.mean():.2e}, largest {kl.max():.2e} of {len(kl)} positions; '
        f'largest logit {abs(want).max():.1f}, off by {abs(got-there).max():.3f}; '
        f'best token the same at {agree:.1%}')
    if kl.max()<=1e-3:
        return []
    return [f'{how}: KL {kl.max():.2e} at position {kl.argmax()}']

def all_ways(host, card, ids):
    "What is bad about the card's logits of `ids`, computed in each way"
    want = host.logits(ids)
    say(f'the host: {len(ids)} tokens')
    bad = apart('prefill', want, card.logits(ids))
    bad += apart('steps of 8', want, by_steps(card, ids))
    return bad+apart('steps of 1', want, by_steps(card, ids[:64], 1))

def compare(a):
    "The card with the host: what is bad, and a summary"
    s = setting(a)
    host,card = (
        LLM(s.model, d, s.context, 1, kv_cache_memory=1<<28)
        for d in ('cpu',s.device))
    say(f'{card}')
    ids = text_for(host, s.tokens)
    bad = all_ways(host, card, ids)
    same,speed = 0,0
    if s.answer:
        starts = STARTS if host.config.vocab_size>256 else [ids[:9]]
        parted,same = continuations(host, card, starts, s.answer)
        bad += parted
        say(f'{same} greedy tokens the same')
        speed = measure(card, 1, 0, s.answer).tokens
        say(f'{speed:,.0f} tokens a second')
        if not a.emulator and speed<1000:
            bad.append(f'{speed:.0f} tokens a second')
        spans = timeline(card, replays=3).spans
        say(f'a step of {len(spans)} launches with stamps')
        if not spans:
            bad.append('a timeline without launches')
    return bad,(
        f'{len(ids)} positions; {same} greedy tokens the same; {speed:,.0f} tokens a second')

def main():
    a = arguments(
        __doc__,
        model=dict(default=''),
        pieces=dict(default=''),
        tokens=dict(type=int, default=0),
        answer=dict(type=int))
    with tempfile.TemporaryDirectory() as folder:
        if a.pieces:
            a.model = joined(a.pieces, folder)
        verdict(*compare(a))

if __name__=='__main__':
    main()
