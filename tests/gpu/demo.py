"""The demo model on the card against the host, over a page of text: Kullback-Leibler divergence of
each position's prediction, by prefill and by steps of eight rows, greedy continuations, and how
fast it decodes.

python tests/gpu/demo.py [--emulator] [--model demo or a file] [--pieces FOLDER] [--tokens 400]
[--answer 64]

With --pieces the file's parts are joined first. The emulator has a tiny model of its own,
unless one is named: a tile of 64 rows of the demo model takes it five minutes, a step of eight
25 s."""
import tempfile,time
from pathlib import Path
import numpy as np
from toys import arguments,verdict
from atlas.use.bench_decode import measure
from atlas.engine.cache import KVCache
from atlas.use.llm import LLM
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

def by_steps(llm, ids, n=8):
    "Logits after each of `ids` as decode kernels compute them, `n` rows at a time"
    m,B = llm.model,64
    with llm.engine.stepper.here():
        cache = KVCache(m.c, m.device, len(ids)//B+2, B, 'f16', 4)
        out = [
            m.device.download(m.forward(
                make_batch(
                    [Piece(
                        ids[i:i+n], i,
                        list(range(len(ids)//B+2)),
                        len(ids[i:i+n]), state=0,
                        keep=1)],
                    False, B, m.device),
                cache))
            for i in range(0, len(ids), n)]
        m.device.synchronize()
    return np.concatenate(out)

def continuations(host, card, starts, n, tiny=.05):
    "Where greedy answers part although the host was sure, and how many tokens were compared"
    bad = []
    same = 0
    p = SamplingParams(temperature=0, max_tokens=n, logprobs=2, ignore_eos=True)
    for s in starts:
        a,b = (l.generate(s, p).logprobs for l in (host,card))
        k = next(
            (
                i for i,(x,y) in enumerate(zip(a, b))
                if x.id!=y.id),
            n)
        same += k
        if (
                k<n
                and (gap := a[k].top[0][1]-a[k].top[1][1])>tiny):
            bad.append(f'{s!r}: token {k} is {b[k].id} and not {a[k].id}, which led by {gap:.3f}')
    return bad,same

_last = time.perf_counter()
def say(what):
    "Print it, and how long it took"
    global _last
    now = time.perf_counter()
    print(f'{what} ({now-_last:.1f} s)', flush=True)
    _last = now

def setting(a):
    "The model's name, the devices' tokens of text, of an answer, and of context"
    if not a.emulator:
        return a.model or 'demo','cuda',a.tokens or 400,64 if a.answer is None else a.answer,2048
    from atlas.card.emulator import Emulator
    return (
        a.model or str(ROOT/'tests/data/smollm2-tied'),Emulator(),a.tokens or 40,
        6 if a.answer is None else a.answer,128)

def main():
    a = arguments(
        __doc__, model=dict(default=''), pieces=dict(default=''),
        tokens=dict(type=int, default=0),
        answer=dict(type=int))
    if a.pieces:
        folder = tempfile.TemporaryDirectory()
        a.model = str(Path(folder.name)/'demo.gguf')
        Path(a.model).write_bytes(b''.join(
            p.read_bytes()
            for p in sorted(Path(a.pieces).glob('*.part*'))))
    model,dev,size,n,context = setting(a)
    host,card = (
        LLM(model, d, context, 1, kv_cache_memory=1<<28)
        for d in ('cpu',dev))
    V = host.config.vocab_size
    say(f'{card}')
    text = (ROOT/'README.md').read_text()
    ids = (
        host.tokenizer.encode(text)[:size] if V>256
        else np.random.default_rng(0).integers(3, V, size).tolist())
    want,bad = host.logits(ids),[]
    say(f'the host: {len(ids)} tokens')
    for how,get in (
            ('prefill',lambda: card.logits(ids)),
            ('steps of 8',lambda: by_steps(card, ids)),
            ('steps of 1',lambda: by_steps(card, ids[:64], 1))):
        got = get()
        kl = divergence(want[:len(got)], got)
        there = want[:len(got)]
        agree = (got.argmax(1)==there.argmax(1)).mean()
        say(
            f'{how}: KL mean {kl.mean():.2e}, largest {kl.max():.2e} of {len(kl)} positions; '
            f'largest logit {abs(want).max():.1f}, off by {abs(got-there).max():.3f}; '
            f'best token the same at {agree:.1%}')
        if not kl.max()<=1e-3:
            bad.append(f'{how}: KL {kl.max():.2e} at position {kl.argmax()}')
    same,speed = 0,0
    if n:
        parted,same = continuations(host, card, STARTS if V>256 else [ids[:9]], n)
        bad += parted
        say(f'{same} greedy tokens the same')
        speed = measure(card, 1, 0, n).tokens
        say(f'{speed:,.0f} tokens a second')
    if n and not a.emulator and speed<1000:
        bad.append(f'{speed:.0f} tokens a second')
    verdict(
        bad, f'{len(ids)} positions; {same} greedy tokens the same; {speed:,.0f} tokens a second')

if __name__=='__main__':
    main()
