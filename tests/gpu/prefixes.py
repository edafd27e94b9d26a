"""The same tokens, and log probabilities to the bit, with a tree of prefixes as without one:
prompts that begin alike, a cache too small for all of them, preemption, snapshots in the middle
of chunks, drafts.

python tests/gpu/prefixes.py [--emulator] [--models llama,qwen3.6-drafts] [--tokens 24]

Each answer is compared with what its request gets alone in an engine that computes every prompt
whole."""
from dataclasses import replace
from toys import arguments,greedy,prompt,serve,toy,verdict
from atlas.engine.cache import slot_bytes,token_bytes

MODELS = ['llama','mistral','qwen3.6-drafts','gpt-oss','gemma','nemotron','granite','qwen3.5']
HOW = [{}, dict(temperature=.7, seed=3), dict(logprobs=1),
    dict(temperature=.8, seed=5, presence_penalty=.5, repetition_penalty=1.2, logprobs=2)]
COUNTED = 'prefix_cache_hits','prefix_cache_queries','jit_after_ready'
STEMS = (64,150,200,330,330,128,200,64)
OWN = (1,40,3,7,70,0,3,100)

def asks(V, tokens, emulator):
    "Requests whose prompts begin alike, in two families, with places where messages end"
    out = []
    for i,(n,own) in enumerate(zip(STEMS, OWN)):
        if emulator:
            n,own = min(n, 200),min(own, 20)
        ids = prompt(400, V, 900+i//6)[:n]+prompt(own, V, i)
        r = greedy(f'r{i}', ids, tokens-i%4, **HOW[i%4])
        out.append(replace(r, boundaries=(70,n)))
    return out

def little(llm, seqs, snapshots):
    "Bytes of a cache for `seqs` sequences that have little more than a context together"
    c,tokens = llm.config,llm.max_seq_len+20
    return tokens*token_bytes(c, llm.ops)+(seqs+snapshots)*slot_bytes(c, llm.ops)

def ways(name, llm):
    "Options of engines with a tree; in the second they have little room, and some must give way"
    small = dict(kv_cache_memory=little(llm, 4, 3), state_snapshots=3)
    # steps of one size, however long they take, so that the same ones always give way
    found = [dict(), small|dict(overcommit=8., max_num_seqs=4, chunk=64, tbt_deadline_ms=0)]
    found.append(dict(state_snapshots=2, chunk=128))
    if 'drafts' in name:
        found.append(dict(speculative='mtp', num_speculative_tokens=2))
    if 'drafts' not in name:
        found.append(dict(speculative='ngram', num_speculative_tokens=3))
    return found

def rounds(llm, wanted):
    "What is answered the first time, again, and by a crowd, of whom the last are the most urgent"
    e = llm.engine
    one = [serve(e, [(r,0)])[r.id] for r in wanted]
    again = [serve(e, [(r,0)])[r.id] for r in wanted]
    urgent = [replace(r, priority=-(i>5)) for i,r in enumerate(wanted)]
    crowd = serve(e, [(r, i//3) for i,r in enumerate(urgent)])
    return one,again,[crowd[r.id] for r in wanted]

def told(name, how, s):
    "Print what engine stats `s` say; what did not happen, or should not have"
    hits,asked,late = [s[f'{k}_total'] for k in COUNTED]
    evicted,preempted = s['prefix_cache_evictions_total'],s['num_preemptions_total']
    print(f'{name} {how}: {hits} of {asked} prompt tokens were there, '
        f'{s.get("prefix_cache_restores_total", 0)} states restored, {evicted} evicted, '
        f'{preempted} preempted, {late} compiled late', flush=True)
    if late:
        yield f'{late} compiled late'
    if 'kv_cache_memory' not in how:
        if hits<asked/3:
            yield f'{hits} hits'
    elif not (hits and evicted and preempted):
        yield 'nothing was scarce'

def one(name, emulator, tokens):
    "All engines of one model"
    context = 256 if emulator else 512
    plain = toy(name, emulator, context=context, enable_prefix_caching=False)
    wanted = asks(plain.config.vocab_size, tokens, emulator)
    alone = [serve(plain.engine, [(r,0)])[r.id] for r in wanted]
    bad,engines = [],ways(name, plain)
    plain.close()
    for how in engines:
        seqs = how.pop('max_num_seqs', 8)
        llm = toy(name, emulator, seqs, context, speculative_adaptive=False, **how)
        for round,got in zip(('first','again','crowd'), rounds(llm, wanted)):
            wrong = [r.id for r,a,b in zip(wanted, got, alone) if a!=b]
            bad += [f'{name}, {how}, {round}: {rid}' for rid in wrong]
        bad += [f'{name}, {how}: {what}' for what in told(name, how, llm.engine.stats())]
        llm.close()
    return bad

if __name__=='__main__':
    a = arguments(
        __doc__, models=dict(default=','.join(MODELS)),
        tokens=dict(type=int, default=24))
    names = a.models.split(',')
    if a.emulator and a.models==','.join(MODELS):
        names,a.tokens = ['qwen3.6-drafts','granite'],6
    verdict([b for n in names for b in one(n, a.emulator, a.tokens)], f'{len(names)} models')
