"""Prompts in the air beside answers, with a tree of prefixes, on a card that is divided whenever
it may be.

python tests/gpu/aloft.py [--emulator] [--models llama,qwen3.6-moe] [--rounds 30]

Requests come, find prefixes, are given up and let others go on, all by chance; steps fail and
the model is told to sleep while a prompt is in the air. Whatever was said is what is said
alone."""
from types import SimpleNamespace as NS
import numpy as np
from atlas.engine import card_stepper
from atlas.engine.policy import Policy
from atlas.ground.core import EngineError
from toys import arguments,greedy,prompt,toy,verdict

CARD = NS(context=4000, shared=1536, longest=2000, most=60, seqs=8)
TINY = NS(context=250, shared=64, longest=100, most=16, seqs=3)

class Always(Policy):
    "Divides the card whenever it may, and lets nearly all steps go on beside a chunk"
    def __init__(self, rng):
        super().__init__()
        self.rng = rng
    def apart(self, line, decode, chunk, width): return chunk if line and decode else 0
    def fits(self, *_): return self.rng.random()<.9

def drawn(rng, s, vocab, i):
    "A request: every other one begins as others do"
    shared = (
        prompt(s.shared, vocab, int(rng.integers(2)))
        if rng.random()<.5 else ())
    own = prompt(int(rng.integers(1, s.longest)), vocab, 100+i)
    return greedy(
        f'r{i}', shared+own, int(rng.integers(1, s.most)),
        logprobs=i%3-1 if i%3 else None)

def alone(llm, r):
    "What `r` is told with nobody beside it and nothing remembered"
    llm.engine.scheduler.prefix.clear()
    llm.engine.add(r)
    return [(v.token, v.logprob) for _ in iter(lambda: llm.engine.has_work, False)
        for v in llm.engine.step() if v.token is not None]

class Traffic:
    "Requests that come and go, and what each was told"
    def __init__(self, llm, s, rng):
        self.llm,self.s,self.rng = llm,s,rng
        self.e = llm.engine
        self.asked,self.told = {},{}
        self.seen = dict(aloft=0, gone=0, slept=0, failed=0, hits=0)

    def step(self):
        for v in self.e.step():
            if v.token is not None:
                self.told[v.id].append((v.token, v.logprob))

    def come(self):
        "One more request"
        r = drawn(self.rng, self.s, self.llm.config.vocab_size, len(self.asked))
        self.asked[r.id],self.told[r.id] = r,[]
        self.e.add(r)

    def happen(self):
        "Something, by chance"
        running,rng = list(self.e.scheduler.seqs),self.rng
        if len(running)<self.s.seqs and rng.random()<.3:
            self.come()
        if not self.e.prompt:
            return
        self.seen['aloft'] += 1
        what = rng.random()
        if what<.05 and running:
            self.e.abort(running[int(rng.integers(len(running)))])
            self.seen['gone'] += 1
        elif what<.1:
            self.sleepless()
        elif what<.15:
            self.stumble()

    def sleepless(self):
        "Nobody sleeps while answers are under way"
        try:
            self.llm.sleep()
        except EngineError:
            self.seen['slept'] += 1

    def stumble(self):
        "The next launch finds no memory for prompts, or is cut off"
        stepper = self.e.stepper
        def launch(plan, samplers):
            del stepper.launch
            self.seen['failed'] += 1
            raise MemoryError('none left') if plan.prefill else KeyboardInterrupt
        stepper.launch = launch
        while self.e.has_work and 'launch' in vars(stepper):
            try:
                self.step()
            except KeyboardInterrupt:
                pass
        vars(stepper).pop('launch', None)

    def run(self, rounds):
        while len(self.asked)<rounds or self.e.has_work:
            if len(self.asked)<rounds:
                self.happen()
            self.step()
        self.e.land()

def served(llm, s, rounds):
    "What came of a time in which prompts are always computed apart"
    e,rng = llm.engine,np.random.default_rng(5)
    policy = e.scheduler.policy
    e.scheduler.policy = Always(rng)
    e.scheduler.policy.part = policy.part
    t = Traffic(llm, s, rng)
    t.run(rounds)
    e.scheduler.policy = policy
    policy.part = 0.
    t.seen['hits'] = e.stats()['prefix_cache_hits_total']
    return t

def same_after_sleep(llm, r):
    want = alone(llm, r)
    llm.sleep()
    llm.wake()
    return alone(llm, r)==want

def faults(llm, t, expected):
    "What is wrong after it"
    e = llm.engine
    for rid,r in t.asked.items():
        want,got = alone(llm, r),t.told[rid]
        if got!=want[:len(got)]:
            yield f'{rid} was told something else'
    if missing := [what for what in expected if not t.seen[what]]:
        yield f'{missing} never happened'
    if e.late:
        yield f'compiled late: {e.late}'
    if e.stepper.lanes or e.scheduler.seqs:
        yield 'lanes or sequences are left'
    if not same_after_sleep(llm, r):
        yield 'another answer after sleep'

def one(name, emulator, rounds):
    "All that may happen to one model; faults"
    s = TINY if emulator else CARD
    if emulator:
        card_stepper.APART,card_stepper.LARGE = 2,4
    llm = toy(
        name, emulator, s.seqs, s.context, enable_prefix_caching=True,
        chunk=64 if emulator else 1024)
    t = served(llm, s, rounds)
    expected = () if emulator else ('aloft','gone','slept','failed','hits')
    bad = [f'{name}: {b}' for b in faults(llm, t, expected)]
    part = llm.engine.stepper.part
    print(f'{name}: {len(t.asked)} requests, {t.seen}, part {part:.2f}', flush=True)
    llm.close()
    return bad

if __name__=='__main__':
    o = arguments(__doc__, models=dict(default='llama,qwen3.6-moe,gpt-oss,gemma'),
        rounds=dict(type=int, default=40))
    names = ['qwen3.6-moe'] if o.emulator else o.models.split(',')
    rounds = 12 if o.emulator else o.rounds
    verdict(
        [b for n in names for b in one(n, o.emulator, rounds)],
        f'{len(names)} models, as alone')
