"""What is planned that a model takes, beside what a card gives it: of several whole models in
made-up weights, with keys and values in f16 and in fp8.

python tests/gpu/footprints.py [--emulator] [--only gpt-oss] [--kv f16,fp8] [--context 32768]
[--pieces 8,32] [--output FILE]

Each is planned as `atlas inspect --table` does for one sequence, then loaded, and gets a prompt
that fills a chunk. Arrays are counted one by one, mapped memory by the arena, and on a card by what
its driver says is free before and after. Judged are, within 2 %: arrays against the plan, and what
the card gave against what the arena has mapped. With its largest step a model must not take more
than its plan and a sixteenth of its weights, which is what a gateway sets aside for it.

Memory is mapped in pieces, and some of them are not full. The first of `--pieces`, in MiB, is for
all rows; with each of the others the first model is loaded once more, to see what that costs.
`FILE` gets a row for each, which page use.footprints draws."""
import json
from dataclasses import asdict,dataclass,field,replace
from pathlib import Path
from atlas.card.device import get_device
from atlas.card.emulator import Emulator
from atlas.engine import loading
from atlas.engine.loading import LoadedModel
from atlas.engine.planning import plan_load
from atlas.ground.core import human
from atlas.ground.options import EngineConfig
from atlas.use.footprints import resident
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
    piece:int=8 # MiB that memory of weights is mapped by

    def __str__(self):
        pieces = f', pieces of {self.piece} MiB' if self.piece!=8 else ''
        return f'{self.shape} {self.weights or "as shipped"}, {self.kv}{pieces}'
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

@dataclass(kw_only=True)
class Row(Case):
    "A model, what was planned, and what it took"
    name:str
    device:str
    plan:dict # Bytes by part
    arrays:dict # Bytes of what was made
    seconds:float # Of the load
    card:dict=field(default_factory=dict) # What is less free, as loaded and after a prompt
    mapped:dict=field(default_factory=dict) # What the arena has, likewise

    @property
    def stays(self)->int:
        "Bytes of a plan that are there from the start"
        return sum(self.plan[k] for k in ('weights','tables','cache','states'))
    @property
    def most(self)->int:
        "With the largest step"
        return self.stays+self.plan['steps']

def measured(case, device)->Row:
    "Plan, load, ask, and say what each took"
    options = case.options(device)
    plan = plan_load(options, device).parts
    loading._WEIGHTS_CHUNK = case.piece<<20
    before = free(device)
    m = load(options)
    about = asdict(case)|dict(name=str(case), plan=plan, seconds=m.load_seconds)
    arrays = dict(weights=resident(m), cache=m.cache.nbytes)
    row = Row(**about, device=device.describe(), arrays=arrays)
    def note(when):
        row.card[when],row.mapped[when] = before-free(device),m.arena.mapped
    note('stays')
    asked(m, case)
    note('asked')
    m.close()
    return row

def wrong(r, on_card)->list:
    "What is further from the plan than it may be"
    plan = r.plan
    found = [('weights', r.arrays['weights'], plan['weights']),
        ('cache and states', r.arrays['cache'], plan['cache']+plan['states'])]
    if on_card:
        found += [('memory of the card', r.card[k], r.mapped[k]) for k in r.card]
    bad = [f'{r}: {what} take {human(took)}, and not {human(said)}'
        for what,took,said in found
        if abs(took-said)>WITHIN*said]
    if on_card and r.card['asked']>r.most+plan['weights']/16:
        bad.append(f'{r}: {human(r.card["asked"])} with a step, planned {human(r.most)}')
    return bad

def line(r, on_card)->str:
    "A row of the table"
    def beside(took, said): return f'{human(took)} ({took/said-1:+.2%})' if on_card else human(took)
    cells = (
        f'{str(r):40}', f'arrays {r.arrays["weights"]/r.plan["weights"]-1:+.3%} of their plan',
        f'stays: planned {human(r.stays)}, mapped {beside(r.mapped["stays"], r.stays)}',
        f'taken {beside(r.card["stays"], r.stays)}',
        f'asked: planned {human(r.most)}, taken {beside(r.card["asked"], r.most)}',
        f'{r.seconds:.1f} s')
    return '; '.join(cells)

def cases(o):
    "All that are to be measured"
    whole = {toy_shape(n, True)[0]: toy_shape(n, True)[1] for n in TOYS} if o.emulator else WHOLE
    first,*others = map(int, o.pieces.split(','))
    sizes = (256,64) if o.emulator else (o.context,2048)
    found = [Case(name, weights, kv, *sizes, first)
        for kv in o.kv.split(',')
        for name,weights in whole.items()
        if o.only in name]
    return found+[replace(found[0], piece=n) for n in others]

def options():
    "The command line"
    return arguments(
        __doc__, only=dict(default=''), kv=dict(default='f16,fp8'), pieces=dict(default='8,32'),
        context=dict(type=int, default=32768), output=dict(type=Path))

def main():
    o = options()
    device = Emulator() if o.emulator else get_device('cuda')
    measured(Case(*toy_shape('llama', o.emulator), 'f16', 256, 64), device) # libraries that stay
    rows,bad = [],[]
    for case in cases(o):
        r = measured(case, device)
        print(line(r, not o.emulator), flush=True)
        rows.append(asdict(r)|dict(stays=r.stays, most=r.most))
        bad += wrong(r, not o.emulator)
    if o.output:
        o.output.write_text(json.dumps(rows, indent=1)+'\n')
    verdict(bad, f'{len(rows)} models take what was planned')

if __name__=='__main__':
    main()
