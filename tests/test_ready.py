"""No kernel is compiled for a request: whatever rows a step has, a start has made its kernels ready.

On dry cards, which only note what is asked for."""
import sys
from contextlib import nullcontext
from pathlib import Path
import numpy as np,pytest
sys.path.insert(0, str(Path(__file__).parent/'gpu'))
from toys import toy_shape
from atlas.card.launch import recording
from atlas.card.variants import Dry
from atlas.engine.card_stepper import APART,MOST_APART,StepShape
from atlas.use.llm import LLM

SEQS,CHUNK,LONGEST = 8,1024,4000

def decodes(s):
    "Every kind of decode step, on the whole card and beside prompts"
    for part in (0,APART):
        with s.card.using(part) if part else nullcontext():
            for k in s._buckets():
                if part and k>MOST_APART: continue
                for longest in (128,256,512,1024,2048,LONGEST):
                    for full in (False,True)[:1 if part else 2]:
                        s.body(StepShape(k, longest, full, full, s.table.stamp))

def prompts(s, rng):
    "Prompts of all lengths, and several that share a chunk by chance"
    for n in range(64, CHUNK+1, 64): s._try_prompt(n)
    for n in range(2, SEQS+1):
        s._try_prompt(CHUNK//n, n)
        s._try_prompt(CHUNK//n-63, n)
        for short in rng.integers(0, SEQS-n+1, 3):
            most = (CHUNK-int(short))//n
            s._try_prompt(int(rng.integers(1, most+1)), n, int(short))
            s._try_prompt(most, n, int(short))

def replays(s):
    "Answers that are computed again: one to eight rows of each of some sequences, from anywhere"
    for rows in range(1, s.replay_rows+1):
        for n in range(1, SEQS+1):
            for start in (1,100,500,1000,2000,3000,LONGEST-rows-1): s._try_replay(rows, n, start)

@pytest.mark.parametrize('name', ['qwen3.6-moe','gpt-oss','gemma','nemotron'])
def test_nothing_is_compiled_late(name):
    shape,weights = toy_shape(name)
    card,rng = Dry('sm_90a', 1<<40),np.random.default_rng(3)
    with recording(launch=False) as r:
        llm = LLM(shape, card, LONGEST, SEQS, load_format='dummy', weights=weights, chunk=CHUNK)
        llm.engine.warm()
        s = llm.engine.stepper
        ready = set(r.variants)
        with card.using(APART):
            s.few = s.stream  # a dry card has no parts: what they get ready, in its place
            s._try_apart(LONGEST)
        ready |= set(r.variants)
        decodes(s)
        prompts(s, rng)
        replays(s)
    late = set(r.variants)-ready
    assert not late, late
