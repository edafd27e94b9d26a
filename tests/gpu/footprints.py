"""What is planned that a model takes, beside what a card gives it: of several whole models in
made-up weights, with keys and values in f16 and in fp8.

python tests/gpu/footprints.py [--emulator] [--only gpt-oss] [--kv f16,fp8] [--context 32768]
[--output FILE]

Each is planned and then loaded, as `atlas inspect --table` plans it for one sequence, and gets a
prompt that fills a chunk. Arrays are counted one by one, memory by the arena, and on a card by what
its driver says is free before and after. What stays (weights, tables, cache and states) must be
within 2 % of the plan, and nothing with its largest step may take more than 2 % beyond it. `FILE`
gets a row for each, which page use.footprints draws."""
import json
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from atlas.card.device import get_device
from atlas.card.emulator import Emulator
from atlas.engine.loading import LoadedModel
from atlas.engine.planning import plan_load
from atlas.ground.core import human
from atlas.ground.options import EngineConfig
from table import steps
from toys import arguments,greedy,prompt,ready_for,serve,toy_shape,verdict

WHOLE = {'qwen3.6-35b-a3b': 'nvfp4', 'gpt-oss-20b': None,
    'llama-3.1-8b': 'fp8', 'qwen3-30b-a3b': 'nvfp4'}
TOYS = 'llama','qwen3.6-moe'
WITHIN = .02 # Of the plan

@dataclass
class Case:
    "A model, and how it is kept"
    shape:str
    weights:str|None
    kv:str
    context:int
    chunk:int

    def __str__(self): return f'{self.shape} {self.weights or "as shipped"}, {self.kv}'
    def options(self, device)->EngineConfig:
        "As for a table of footprints"
        return EngineConfig(
            self.shape, device, self.context, 1, load_format='dummy', weights=self.weights,
            kv_cache_dtype=self.kv, chunk=self.chunk, enable_prefix_caching=False)

def free(device)->int:
    "Bytes that are free once what is kept for arrays to come is given back"
    device.synchronize()
    device.tidy()
    return device.memory().available

def load(options)->LoadedModel:
    "The model, ready for one prompt of a chunk and for plain steps"
    def both(stepper):
        stepper._try_prompt(options.chunk)
        steps((1,), 0)(stepper)
    with ready_for(both):
        return LoadedModel(options, False)

def asked(m, case):
    "Have a prompt of a chunk, and a few tokens"
    n = min(case.chunk, case.context-8)
    ids = prompt(n, m.config.vocab_size, 1)
    serve(m.engine, [(greedy('a', ids, 4), 0)])

def arrays(m)->dict:
    "Bytes of what was made, by the parts of a plan"
    return m.resident|dict(cache=m.cache.nbytes, tables=m.arena['tables'].used)

def measured(case, device)->dict:
    "Plan, load, ask, and say what each took"
    options = case.options(device)
    plan = plan_load(options, device)
    before,began = free(device),perf_counter()
    m = load(options)
    seconds = perf_counter()-began
    stays = before-free(device)
    asked(m, case)
    row = dict(
        model=case.shape, weights=case.weights, kv=case.kv, context=case.context,
        device=device.describe(), plan=plan.parts, arrays=arrays(m),
        mapped={k: r.mapped for k,r in m.arena.regions.items()},
        card=dict(stays=stays, asked=before-free(device)), seconds=seconds)
    m.close()
    return row

def planned(row, steps=False)->int:
    "Bytes that a plan has of what lies on the card"
    left_out = {'vision'}|(set() if steps else {'steps'})
    return sum(n for k,n in row['plan'].items() if k not in left_out)

def wrong(row, name, on_card)->list:
    "What is further from the plan than it may be"
    plan,stays = row['plan'],planned(row)
    found = [('weights', row['arrays']['weights'], plan['weights']),
        ('cache and states', row['arrays']['cache'], plan['cache']+plan['states'])]
    if on_card:
        found.append(('all that stays', row['card']['stays'], stays))
    bad = [f'{name}: {what} take {human(took)}, planned {human(said)}'
        for what,took,said in found
        if abs(took-said)>WITHIN*said]
    most = planned(row, True)
    if on_card and row['card']['asked']>most*(1+WITHIN):
        bad.append(f'{name}: {human(row["card"]["asked"])} with a step, planned {human(most)}')
    return bad

def line(row, name, on_card)->str:
    "A row of the table"
    plan,real = row['plan'],row['arrays']
    mapped = sum(row['mapped'].values())
    took = row['card'] if on_card else dict(stays=mapped, asked=mapped)
    stays,most = planned(row),planned(row, True)
    cells = (
        f'{name:38}', f'weights {real["weights"]/plan["weights"]-1:+.2%}',
        f'mapped {row["mapped"]["weights"]/plan["weights"]-1:+.2%}',
        f'stays {human(stays)} {took["stays"]/stays-1:+.2%}',
        f'asked {human(most)} {took["asked"]/most-1:+.2%}', f'{row["seconds"]:.1f} s')
    return '  '.join(cells)

def cases(o):
    "All that are to be measured"
    for kv in o.kv.split(','):
        for name in TOYS if o.emulator else WHOLE:
            if o.only not in name:
                continue
            shape,weights = toy_shape(name, True) if o.emulator else (name,WHOLE[name])
            if o.emulator:
                yield Case(shape, weights, kv, 256, 64)
            else:
                yield Case(shape, weights, kv, o.context, 2048)

def main():
    o = arguments(
        __doc__, only=dict(default=''), kv=dict(default='f16,fp8'),
        context=dict(type=int, default=32768), output=dict(type=Path))
    device = Emulator() if o.emulator else get_device('cuda')
    first = Case(*toy_shape('llama', o.emulator), 'f16', 256, 64)
    measured(first, device) # a context, and libraries that stay
    rows,bad = [],[]
    for case in cases(o):
        rows.append(measured(case, device))
        bad += wrong(rows[-1], str(case), not o.emulator)
        print(line(rows[-1], str(case), not o.emulator), flush=True)
    if o.output:
        o.output.write_text(json.dumps(rows, indent=1)+'\n')
    verdict(bad, f'{len(rows)} models take what was planned')

if __name__=='__main__':
    main()
