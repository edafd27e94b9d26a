"""Answers that are held to a schema, on a card: all of them fit it, others beside them say what
they say alone, and nothing is compiled for it.

python tests/gpu/guided.py [--emulator] [--model qwen3.6-moe]"""
import json,time
from dataclasses import replace
from toys import arguments,greedy,prompt,toy,verdict

SCHEMA = dict(
    type='object', required=['name','age','tags'], additionalProperties=False,
    properties=dict(name=dict(type='string', maxLength=12), age=dict(
        type='integer', minimum=0, maximum=99),
    tags=dict(
        type='array', items=dict(enum=['a','b']), minItems=1,
        maxItems=3)))
SPECS = {
    'schema':dict(kind='json_schema', schema=SCHEMA),
    'choice':dict(kind='choice', choices=['yes','no','perhaps']),
    'regex':dict(kind='regex', pattern='[a-f]{3}-[0-9]{4}')}

def fits(kind, text):
    "Is this what was asked for?"
    if kind=='choice':
        return text in SPECS['choice']['choices']
    if kind!='schema':
        return len(text)==8 and text[3]=='-'
    d = json.loads(text)
    return (
        set(d)=={'name','age','tags'}
        and len(d['name'])<=12 and 0<=d['age']<100
        and 1<=len(d['tags'])<=3
        and set(d['tags'])<=set('ab'))

def ask(llm, kind, i, n):
    "A request with a guide; every other one draws"
    r = greedy(
        f'{kind}-{i}', prompt(5+11*i, 250, i), n,
        **(dict(temperature=.9, seed=i) if i%2 else {}))
    return replace(r, guide=SPECS[kind], params=replace(r.params, ignore_eos=False))

def run(e, requests):
    "Tokens and ends"
    out = {r.id:[[],None] for r in requests}
    for r in requests:
        e.add(r)
    while e.has_work:
        for ev in e.step():
            if ev.token is not None:
                out[ev.id][0].append(ev.token)
            if ev.finish:
                out[ev.id][1] = ev.finish if not ev.error else ev.error
    return out

if __name__=='__main__':
    a = arguments(__doc__, model=dict(default='qwen3.6-moe'))
    llm = toy(a.model, a.emulator)
    e,n,bad = llm.engine,8 if a.emulator else 60,[]
    plain = [
        greedy(f'p{i}', prompt(9+31*i, llm.config.vocab_size, i), n)
        for i in range(2 if a.emulator else 4)]
    kinds = list(SPECS)[:2 if a.emulator else 3]
    guided = [
        ask(llm, k, i, 120) for k in kinds
        for i in range(1 if a.emulator else 2)]
    alone = run(e, plain)
    run(e, guided[:1])  # the arrays of masks are made
    t = time.perf_counter()
    together = run(e, plain+guided)
    t = time.perf_counter()-t
    for r in plain:
        if together[r.id]!=alone[r.id]:
            bad.append(f'{r.id} differs beside guided answers')
    for r in guided:
        ids,end = together[r.id]
        text = llm.tokenizer.decode([i for i in ids if i<256])
        if (
                end!='stop' or len(text)!=len(ids) and max(ids)>255
                or not fits(r.id.split('-')[0], text)):
            bad.append(f'{r.id}: {end} {text!r}')
        else:
            print(r.id, text, flush=True)
    if not a.emulator and e.late:
        bad.append(f'compiled late: {e.late}')
    if llm.cache.pool.used:
        bad.append('blocks are left')
    masks = e.stats().get('guide_seconds_total', 0)
    verdict(
        bad,
        f'{len(guided)} guided and {len(plain)} other answers, {t:.2f} s, '
        f'{masks:.3f} s of it for masks')
