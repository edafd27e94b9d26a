"""What a step takes with other options of its kernels, other constants or other sources, by turns
in one process, in microseconds; and whether it says the same tokens.

    python tests/gpu/choices.py [--emulator] [--model qwen3.6-35b-a3b] [--drafts 3] [--seqs 1,4]
        [--rounds 2] --choices CHOICE ...

A choice is a word, whose parts are joined by "+":

    gemv:K=4096,ROWS=2:LATE=1        where gemv has these options, LATE is 1
    gemv:K=4096:@FOLDER              it is made of the sources in FOLDER, a copy of kernels/
    atlas.cuda.experts._AHEAD=.8     a constant of a module

Steps of 1, 2 and 4 sequences are timed, or of those of --seqs; with --drafts steps of one sequence,
or of those, each of which checks one draft, two, and so on. What is there is timed first in each
round, as "now"."""
from ast import literal_eval
from contextlib import contextmanager
from dataclasses import dataclass,field
from importlib import import_module
from statistics import median
from atlas.card import card as calls
from atlas.card.launch import Source
from atlas.ops.sample import SamplingParams
from atlas.use.bench_decode import _blank,measure
from toys import arguments,toy,verdict

@dataclass
class Swap:
    "Other options, or other sources, of a kernel where it has certain options"
    kernel:str
    where:dict
    options:dict
    folder:str|None=None

    def __call__(self, name, defines)->bool:
        "Is that such a kernel?"
        has = {k: str(v) for k,v in defines.items()}
        return name==self.kernel and self.where.items()<=has.items()

@dataclass
class Constant:
    "Another value of a module's constant"
    module:object
    name:str
    value:object

    def put(self, value):
        "Give it a value, and return the one it had"
        old = getattr(self.module, self.name)
        setattr(self.module, self.name, value)
        return old

def pairs(text)->dict:
    "Options: `K=4096,ROWS=2`"
    return dict(p.split('=', 1) for p in text.split(',') if p)

def part(word):
    "A `Swap` or a `Constant`"
    name,_,value = word.partition('=')
    if ':' not in name:
        module,_,name = name.rpartition('.')
        return Constant(import_module(module), name, literal_eval(value))
    kernel,where,what = word.split(':')
    if what.startswith('@'):
        return Swap(kernel, pairs(where), {}, what[1:])
    return Swap(kernel, pairs(where), pairs(what))

@dataclass
class Choice:
    "What is tried, and what it took"
    name:str
    parts:list=field(default_factory=list)
    took:list=field(default_factory=list)

    def of(self, kind): return [p for p in self.parts if isinstance(p, kind)]

def swapped(swaps, ready, made):
    "`ready`, which has a kernel ready for its card, but for those that `swaps` are about"
    def other(name, defines, card):
        mine = [s for s in swaps if s(name, dict(defines))]
        if not mine:
            return ready(name, defines, card)
        options,folder = dict(defines),None
        for s in mine:
            options |= s.options
            folder = s.folder or folder
        key = name,tuple(sorted(options.items())),folder
        if key not in made:
            k = calls._Ready(name, options, card)
            if folder:
                k.src = Source(name, folder)
            k.load()
            made[key] = k
        return made[key]
    return other

@contextmanager
def chosen(llm, choice, made):
    "Have kernels and constants as `choice` says meanwhile"
    ready,constants = calls._ready,choice.of(Constant)
    before = [c.put(c.value) for c in constants]
    calls._ready = swapped(choice.of(Swap), ready, made)
    forget(llm)
    try:
        yield
    finally:
        calls._ready = ready
        for c,value in zip(constants, before):
            c.put(value)
        forget(llm)

def forget(llm):
    "Record steps anew"
    llm.device.synchronize()
    calls._variants.clear()
    llm.engine.stepper.graphs.clear()

def times(llm, seqs, drafts, steps)->list:
    "Microseconds of steps, of which so many are timed"
    each = range(1, drafts+1) if drafts else (0,)
    return [measure(llm, b, 0, steps, drafts=k).us for b in seqs for k in each]

def said(llm, seqs, n=24)->list:
    "What the model says to as many prompts as a step has at most"
    p = SamplingParams(temperature=0, max_tokens=n, ignore_eos=True)
    prompts = [[5+i,6,7] for i in range(max(seqs))]
    return [out.token_ids for out in llm.generate(prompts, p)]

def tried(llm, choices, seqs, drafts, rounds, steps)->list:
    "Have all `choices` take their turns; what is wrong"
    bad,made,want = [],{},said(llm, seqs)
    for i in range(rounds):
        for c in choices:
            with chosen(llm, c, made):
                if not i and said(llm, seqs)!=want:
                    bad.append(f'{c.name}: other tokens')
                c.took.append(times(llm, seqs, drafts, steps))
            now = choices[0].took[i]
            more = [f'{us:9.1f} {us-was:+7.1f}' for us,was in zip(c.took[i], now)]
            print(f'{i+1} {c.name:40}', *more, flush=True)
    return bad

def medians(choices):
    "A line for each choice"
    for c in choices:
        middle = [median(column) for column in zip(*c.took)]
        print(f'| {c.name} |', *[f'{us:,.0f} |' for us in middle])

def engine(o, most, drafts):
    "The model, as it is to be run, for at most so many sequences"
    how = dict(speculative='mtp', num_speculative_tokens=drafts) if drafts else {}
    name = 'qwen3.6-drafts' if o.emulator else o.model
    return toy(name, o.emulator, most, 512 if o.emulator else 4096, show=False, **how)

if __name__=='__main__':
    o = arguments(
        __doc__, model=dict(default='qwen3.6-35b-a3b'), drafts=dict(type=int, default=0),
        seqs=dict(default=''), rounds=dict(type=int, default=2),
        choices=dict(nargs='*', default=[]))
    choices = [Choice('now'), *(Choice(c, list(map(part, c.split('+')))) for c in o.choices)]
    seqs = [int(n) for n in o.seqs.split(',') if n] or ([1] if o.drafts else [1,2,4])
    llm = engine(o, max(4, *seqs), o.drafts)
    _blank(llm)
    bad = tried(llm, choices, seqs, o.drafts, o.rounds, 2 if o.emulator else 64)
    medians(choices)
    llm.close()
    verdict(bad, f'{len(choices)} choices say the same tokens')
