"""The demo model on the card against the host, over a page of text: Kullback-Leibler divergence of each position's prediction, by prefill and by steps of eight rows,
greedy continuations, and how fast it decodes.

    python tests/gpu/demo.py [--emulator] [--model demo or a file] [--pieces FOLDER]      with --pieces the file's parts are joined first
"""
import tempfile
from pathlib import Path
import numpy as np
from toys import arguments,verdict
from atlas.bench_decode import measure
from atlas.cache import KVCache
from atlas.llm import LLM
from atlas.model import Piece,make_batch
from atlas.ops.sample import SamplingParams

ROOT = Path(__file__).parents[2]
STARTS = ['The capital of France is', 'Once upon a time, in a village by the sea, there lived', 'def fibonacci(n):\n', 'Water boils at', 'The three laws of thermodynamics are']

def log_softmax(x):
    x = x.astype(np.float64); x -= x.max(1, keepdims=True)
    return x-np.log(np.exp(x).sum(1, keepdims=True))

def divergence(want, got):
    "KL(want || got) of each row, in nats"
    p,q = log_softmax(want),log_softmax(got)
    return (np.exp(p)*(p-q)).sum(1)

def by_steps(llm, ids, n=8):
    "Logits after each of `ids` as decode kernels compute them, `n` rows at a time"
    m,B = llm.model,64
    with llm.engine.here():
        cache = KVCache(m.c, m.device, len(ids)//B+2, B, 'bf16', 4)
        out = [m.device.download(m.forward(make_batch([Piece(ids[i:i+n], i, list(range(len(ids)//B+2)), len(ids[i:i+n]), state=0, keep=1)], False, B, m.device), cache)) for i in range(0, len(ids), n)]
        m.device.synchronize()
    return np.concatenate(out)

def continuations(host, card, starts, n, tiny=.05):
    "Where greedy answers part although the host was sure, and how many tokens were compared"
    bad,same,p = [],0,SamplingParams(temperature=0, max_tokens=n, logprobs=2, ignore_eos=True)
    for s in starts:
        a,b = (l.generate(s, p).logprobs for l in (host,card))
        k = next((i for i,(x,y) in enumerate(zip(a, b)) if x.id!=y.id), n); same += k
        if k<n and (gap := a[k].top[0][1]-a[k].top[1][1])>tiny: bad.append(f'{s!r}: token {k} is {b[k].id} and not {a[k].id}, which led by {gap:.3f}')
    return bad,same

def main():
    a = arguments(__doc__, model=dict(default='demo'), pieces=dict(default=''))
    model,dev,size = a.model,'cuda',400
    if a.pieces:
        model = str(Path(tempfile.mkdtemp())/'demo.gguf')
        Path(model).write_bytes(b''.join(p.read_bytes() for p in sorted(Path(a.pieces).glob('*.part*'))))
    if a.emulator:
        from atlas.emulator import Emulator
        model,dev,size = str(ROOT/'tests/data/smollm2-tied'),Emulator(),40
    host,card = (LLM(model, d, 2048 if not a.emulator else 128, 1, kv_cache_memory=1<<26) for d in ('cpu',dev))
    V = host.config.vocab_size
    text = (ROOT/'README.md').read_text()
    ids = [i%V for i in host.tokenizer.encode(text)][:size] if not a.emulator else np.random.default_rng(0).integers(3, V, size).tolist()
    want,bad = host.logits(ids),[]
    for how,got in (('prefill',card.logits(ids)), ('steps of 8',by_steps(card, ids)), ('steps of 1',by_steps(card, ids[:64], 1))):
        kl = divergence(want[:len(got)], got)
        print(f'{how}: KL mean {kl.mean():.2e}, largest {kl.max():.2e} of {len(kl)} positions; largest logit {abs(want).max():.1f}, off by {abs(got-want[:len(got)]).max():.3f}; '
            f'best token the same at {(got.argmax(1)==want[:len(got)].argmax(1)).mean():.1%}', flush=True)
        if not kl.max()<=1e-3: bad.append(f'{how}: KL {kl.max():.2e} at position {kl.argmax()}')
    starts = STARTS if not a.emulator else [ids[:9]]
    parted,same = continuations(host, card, starts, 64 if not a.emulator else 6); bad += parted
    p = measure(card, 1, 0, 64 if not a.emulator else 2)
    if not a.emulator and p.tokens<1000: bad.append(f'{p.tokens:.0f} tokens a second')
    verdict(bad, f'{len(ids)} positions; {same} greedy tokens the same; {p.tokens:,.0f} tokens a second')

if __name__=='__main__': main()
