"""The same tokens, and log probabilities to the bit, with drafts as without: alone in plain steps,
and in company in steps that check drafts, whoever guesses them.

    python tests/gpu/speculation.py [--emulator] [--models llama,gemma] [--tokens 40]

A model that drafts for itself is right wherever an answer is greedy, and sometimes where it is
drawn; a made-up head is nearly never right. So steps accept all, some and none of their drafts."""
import subprocess,sys
from toys import arguments,greedy,prompt,serve,toy,verdict

MODELS = ['llama','mistral','qwen3.6-drafts','gpt-oss','gemma','nemotron','granite']
HOW = [{}, dict(temperature=.7, seed=3), dict(logprobs=1),
    dict(temperature=.8, seed=5, presence_penalty=.5, repetition_penalty=1.2, logprobs=2)]

def ways(name):
    "Who drafts, and how many"
    itself = dict(speculative='draft', draft_model=f'toy-{name}')
    found = [itself|dict(num_speculative_tokens=k) for k in (1,3,5)]
    found.append(dict(speculative='ngram', num_speculative_tokens=2))
    if 'drafts' in name:
        found += [dict(speculative='mtp', num_speculative_tokens=k) for k in (1,2,3)]
    return found

def asks(V, tokens, emulator):
    "Requests of all kinds"
    out = []
    for i in range(4 if emulator else 8):
        n = 5+7*i if emulator else 5+23*i%190
        out.append(greedy(
            f'r{i}', prompt(n, V, i), tokens-i%4,
            **HOW[i%4]))
    return out

def one(name, emulator, tokens):
    "All drafters of one model"
    plain = toy(name, emulator)
    wanted = asks(plain.config.vocab_size, tokens, emulator)
    alone = {
        r.id: serve(plain.engine, [(r,0)])[r.id]
        for r in wanted}
    plain.close()
    bad = []
    for how in ways(name):
        llm = toy(name, emulator, speculative_adaptive=False, **how)
        got = serve(llm.engine, [(r, 2*i) for i,r in enumerate(wanted)])
        wrong = [r.id for r in wanted if got[r.id]!=alone[r.id]]
        s = llm.engine.stats()
        right,tried = (s[f'spec_decode_num_{k}_tokens_total'] for k in ('accepted','draft'))
        kind,k,late = llm.drafting.who,llm.drafting.k,s['jit_after_ready_total']
        print(
            f'{name}, {kind} {k}: {len(wrong)} differ {wrong}; {right} of {tried} drafts accepted; '
            f'{late} compiled late', flush=True)
        bad += [f'{name}, {kind} {k}: {rid}' for rid in wrong]
        if late:
            bad.append(f'{name}, {kind} {k}: {late} kernels compiled late')
        if kind=='draft' and not 0<right<tried:
            bad.append(f'{name}: {right} of {tried} accepted')
        llm.close()
    return bad

if __name__=='__main__':
    a = arguments(
        __doc__, models=dict(default=','.join(MODELS)),
        tokens=dict(type=int, default=40),
        inner=dict(action='store_true'))
    names = a.models.split(',')
    if a.emulator and a.models==','.join(MODELS):
        names,a.tokens = ['qwen3.6-drafts'],10
    alone = len(names)==1 or a.inner or a.emulator
    if alone:
        verdict([b for n in names for b in one(n, a.emulator, a.tokens)], f'{len(names)} models')
    def begin(n):
        own = ['--inner','--models',n,'--tokens',str(a.tokens)]
        return subprocess.Popen([sys.executable,__file__,*own])
    ps = [begin(n) for n in names]  # each compiles for itself, at once
    verdict([n for n,p in zip(names, ps) if p.wait()], f'{len(names)} models')
