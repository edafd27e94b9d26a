"""No kernel is compiled for a request: whatever rows a step has, a start has made its kernels
ready.

On dry cards, which only note what is asked for."""
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
import numpy as np,pytest
sys.path.insert(0, str(Path(__file__).parent/'gpu'))
from toys import toy_shape
from atlas.ground.config import PRESETS
from atlas.card.launch import recording
from atlas.card.variants import Dry
from atlas.cuda.sample import sample_rows
from atlas.engine.card_stepper import APART,MOST_APART,StepShape
from atlas.use.llm import LLM

SEQS = 8

@dataclass(frozen=True)
class Sizes:
    "Of an engine: tokens of prompts in a step, and of a sequence"
    chunk:int
    longest:int

def decodes(s, sizes):
    "Every kind of decode step, on the whole card and beside prompts"
    lengths = [1<<i for i in range(7, sizes.longest.bit_length())]+[sizes.longest]
    for part in (0,APART):
        with s.card.using(part) if part else nullcontext():
            for k in s._buckets():
                if part and k>MOST_APART:
                    continue
                for longest in lengths:
                    for full in (False,True):
                        s.body(StepShape(k, longest, full, full, s.table.stamp))

def prompts(s, sizes, rng):
    "Prompts of all lengths, and several that share a chunk by chance"
    for n in range(64, sizes.chunk+1, 64):
        s._try_prompt(n)
    for n in range(2, SEQS+1):
        s._try_prompt(sizes.chunk//n, n)
        s._try_prompt(sizes.chunk//n-63, n)
        for short in rng.integers(0, SEQS-n+1, 3):
            most = (sizes.chunk-int(short))//n
            s._try_prompt(int(rng.integers(1, most+1)), n, int(short))
            s._try_prompt(most, n, int(short))

def samples(s):
    "What the passes over any number of prompts end with: all greedy, or not"
    n = s.model.c.vocab_size
    for rows in range(1, SEQS+1):
        logits = s.card.zeros((rows,n))
        ids = s.card.empty(rows, 'int32')
        for greedy in (False,True):
            sample_rows(logits, s.table, ids, greedy=greedy)

def replays(s, sizes):
    "Answers that are computed again: one to eight rows of each of some sequences, from anywhere"
    for rows in range(1, s.replay_rows+1):
        for n in range(1, SEQS+1):
            for part in (0,.02,.1,.25,.5,.75,1):
                start = max(1, int(part*sizes.longest)-rows-1)
                s._try_replay(rows, n, start)

def of_toy(name):
    "A shape, how its weights are stored, and the sizes to try"
    if name in PRESETS: # its true matrices, in few layers
        PRESETS['few layers'] = PRESETS[name]|dict(num_hidden_layers=4, mtp_num_hidden_layers=0,
            vision_config=None, image_token_id=None, video_token_id=None)
        return 'few layers','nvfp4',Sizes(8192, 40_000)
    return *toy_shape(name),Sizes(1024, 4000)

NAMES = ['qwen3.6-moe','gpt-oss','gemma','nemotron','qwen3.6-35b-a3b']

@pytest.mark.parametrize('arch', ['sm_90a','sm_121a'])
@pytest.mark.parametrize('name', NAMES)
def test_nothing_is_compiled_late(name, arch):
    shape,weights,sizes = of_toy(name)
    card = Dry(arch, 1<<40)
    rng = np.random.default_rng(3)
    how = dict(load_format='dummy', weights=weights, chunk=sizes.chunk)
    with recording(launch=False) as r:
        llm = LLM(shape, card, sizes.longest, SEQS, **how)
        llm.engine.warm()
        s = llm.engine.stepper
        ready = set(r.variants)
        with card.using(APART):
            s.few = s.stream  # a dry card has no parts: what they get ready, in its place
            s._try_apart(sizes.longest)
        ready |= set(r.variants)
    with recording() as r, recording(launch=False):
        decodes(s, sizes)
        prompts(s, sizes, rng)
        replays(s, sizes)
        samples(s)
    late = set(r.variants)-ready
    assert not late, late
