"""What the README's table of models says: tokens a second of each at 1, 8 and 32 sequences, with
nothing and with 4,096 tokens behind them, and of two models with drafts.

    python tests/gpu/table.py [--emulator] [--only gpt-oss] [--folder FOLDER] [--ahead sm_90a]

A line for each model as soon as it is measured, and a file with all numbers, as `atlas bench decode
--output` writes it, where a folder is named. With `--ahead` nothing is measured: kernels are
compiled for a card that need not be there."""
import json
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from atlas.card.launch import prepare,recording
from atlas.card.variants import Dry
from atlas.engine.card_stepper import StepShape
from atlas.use.bench_decode import bench_decode
from atlas.use.llm import LLM
from toys import arguments,ready_for,toy,verdict

NVFP4 = dict(weights='nvfp4', lm_head_dtype='nvfp4')
DRAFTS = NVFP4|dict(speculative='mtp', num_speculative_tokens=3)

def steps(batches, drafts):
    "What is launched by decode steps of so many sequences, greedy, with any number of drafts"
    def launch(stepper):
        end = stepper.scheduler.max_seq_len
        for w in range(2, drafts+2) if drafts else [1]:
            stepper.rows.place([], [], w)
            for n in batches:
                for longest in {min(128, end),end}:
                    shape = StepShape(n, longest, False, False, stepper.table.stamp, width=w)
                    stepper.body(shape)
    return launch

def loaded(m, device, count):
    "The model, with room for what is measured"
    length = max(m.contexts)+(2*count+64)*8
    with ready_for(steps(m.batches, len(m.chances or ()))):
        if device=='emulator':
            return toy(m.name, True, max(m.batches), 512, show=False, **m.how)
        return LLM(
            m.name, device, length, max(m.batches), load_format='dummy',
            show=False, **m.how)

@dataclass
class Measured:
    "A model, and what is measured of it"
    name:str
    how:dict # How it is loaded
    batches:tuple=(1,8,32)
    contexts:tuple=(0,4096)
    chances:list|None=None # Shares of the first, second, … draft that are right

    def __str__(self):
        return f'{self.name}-{"drafts" if self.chances else self.how.get("weights") or "shipped"}'

def measure(m, device, count, folder):
    "Measure a model, say it, and write it down"
    began = perf_counter()
    llm = loaded(m, device, count)
    report = bench_decode(llm, m.batches, m.contexts, count, simulate=m.chances)
    llm.close()
    took = perf_counter()-began
    said = ', '.join(f'{p.batch}@{p.context}'+f'+{p.drafts}'*bool(p.drafts)+f' {p.tokens:.0f}'
        for p in report.points)
    p = report.points[0]
    print(f'{m}: {said}; {report.floor(p)/p.us:.0%} of a copy; '
        f'loaded in {report.load_seconds:.1f} s, in all {took:.0f} s', flush=True)
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder)/f'{m}.json').write_text(json.dumps(report.to_dict(), indent=1))
    return report

def row(m, report, drafted):
    "A line of the README's table"
    at = {(p.batch,p.context): f'{p.tokens:,.0f}' for p in report.points}
    p = report.points[0]
    three = f'{drafted.points[-1].tokens:,.0f}' if drafted else ''
    cells = (
        m.name,m.how.get('weights', 'as shipped'),
        at[1,0],three,at[1,4096],
        at[8,0],at[32,0])
    return ' | '.join(['',*cells,f'{report.floor(p)/p.us:.0%}','']).strip()

def compile_ahead(m, arch):
    "Compile what a model will launch, without a card"
    with recording(launch=False) as r:
        llm = loaded(m, Dry(arch), 32)
        with ready_for(steps(m.batches, len(m.chances or ()))):
            llm.engine.warm()
    prepare(r.variants, arch)
    print(f'{m}: {len(r.variants)} kernels', flush=True)

TABLE = [Measured('qwen3.6-35b-a3b', NVFP4), Measured('qwen3.6-27b', NVFP4),
    Measured('qwen3.6-35b-a3b', dict(weights='mixed', lm_head_dtype='nvfp4')),
    Measured('gpt-oss-20b', {}), Measured('gpt-oss-120b', {}),
    Measured('qwen3-30b-a3b', NVFP4), Measured('nemotron-3-nano-30b-a3b', NVFP4),
    Measured('gemma-4-26b-a4b', dict(weights='nvfp4-experts')),
    Measured('llama-3.1-8b', dict(weights='fp8')),
    Measured('qwen3.6-35b-a3b', DRAFTS, (1,), (0,), [.9,.8,.7]),
    Measured('qwen3.6-27b', DRAFTS, (1,), (0,), [.85,.75,.65])]

def main():
    o = arguments(__doc__, only=dict(default=''), ahead=dict(default=None),
        folder=dict(default=None), steps=dict(type=int, default=32))
    if o.emulator:
        measure(
            Measured('llama', {}, (1,2), (0,)), 'emulator',
            8, o.folder)
        verdict([], 'measured')
    done = {}
    for m in TABLE:
        if o.only not in str(m):
            continue
        try:
            if o.ahead:
                compile_ahead(m, o.ahead)
            else:
                done[str(m)] = m,measure(m, 'cuda', o.steps, o.folder)
        except Exception as e:
            print(f'FAILED {m}: {type(e).__name__}: {e}', flush=True)
    for m,report in done.values():
        drafted = done.get(f'{m.name}-drafts', (None,None))[1] if m.how==NVFP4 else None
        if not m.chances:
            print(row(m, report, drafted), flush=True)

if __name__=='__main__':
    main()
