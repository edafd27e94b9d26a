"""Long prompts beside answers, on a card that is divided between the two and on one that is not.

    python tests/gpu/apart.py [--emulator] [--seqs 1,4,8] [--long 32768]

Times are shown, not judged: to a prompt's first token, and between tokens of the answers. That all
tokens are the same, and nothing is compiled late, is. The last line of each number of answers is
without parts, at a deadline that gives times between tokens as those with them."""
from contextlib import contextmanager
from time import perf_counter
from types import SimpleNamespace as NS
import numpy as np
from atlas.engine import card_stepper
from toys import arguments,greedy,prompt,toy,verdict

CARD = NS(
    model='qwen3.6-35b-a3b', vocab=200_000, long=32768,
    seqs=(1,4,8), prompts=3, plain=60)
TINY = NS(
    model='qwen3.6-moe', vocab=256, long=200, seqs=(1,3),
    prompts=2, plain=6)

def long_prompt(s, i):
    "A request for one token after it"
    return greedy('p', prompt(s.long, s.vocab, 70+i), 1)

class Answers:
    "Some answers that are being written, what they say, and the milliseconds between tokens"
    def __init__(self, llm, s, n):
        self.e = llm.engine
        self.s = s
        self.last = {}
        self.gaps = []
        self.said = {f'a{n}-{i}': [] for i in range(n)}
        for i,rid in enumerate(self.said):
            self.e.add(greedy(rid, prompt(64, s.vocab, 60+i), s.most))
        while not all(self.said.values()):
            self.step()
        for _ in range(s.plain):
            self.step()

    def step(self):
        "One step: who said something"
        events = [v for v in self.e.step() if v.token is not None]
        now = perf_counter()
        mine = [v for v in events if v.id in self.said]
        for v in mine:
            self.said[v.id].append(v.token)
        ids = {v.id for v in mine}
        self.gaps += [(now-self.last[i])*1e3 for i in ids if i in self.last]
        self.last |= dict.fromkeys(ids, now)
        return events

    def prompts(self):
        "Milliseconds to the first token of some prompts, those tokens, and the gaps meanwhile"
        took,firsts,gaps = [],[],[]
        for i in range(self.s.prompts):
            self.gaps,began,first = [],perf_counter(),None
            self.e.add(long_prompt(self.s, i))
            while first is None:
                first = next((v.token for v in self.step() if v.id=='p'), None)
            took.append((perf_counter()-began)*1e3)
            firsts.append(first)
            gaps += self.gaps
            for _ in range(self.s.plain):
                self.step()
        return took,firsts,gaps

    def leave(self):
        for rid in self.said:
            self.e.abort(rid)
        while self.e.has_work:
            self.e.step()
        self.e.land()

def alone(llm, s, i):
    "Milliseconds to the first token of a prompt, and the token"
    began,e = perf_counter(),llm.engine
    e.add(long_prompt(s, i))
    token = [
        v.token for _ in iter(lambda: e.has_work, False)
        for v in e.step()][0]
    return (perf_counter()-began)*1e3,token

@contextmanager
def watched(stepper):
    "While open, plans of prompts beside answers go into a list"
    planned,launch = [],stepper.launch
    def launched(plan, samplers):
        if plan.apart and plan.decode:
            planned.append(plan)
        return launch(plan, samplers)
    stepper.launch = launched
    try:
        yield planned
    finally:
        stepper.launch = launch

class Trial:
    "Prompts beside `n` answers, on a card that is divided or not"
    def __init__(self, llm, s, n):
        self.llm,self.s,self.n = llm,s,n
        self.policy = llm.engine.scheduler.policy
        self.told = [] # By the answers, each time

    def one(self, what, share, limit):
        "First tokens of the prompts, and seconds between most tokens of the answers"
        self.policy.part,self.policy.deadline = share,limit
        a = Answers(self.llm, self.s, self.n)
        a.prompts()  # learns
        with watched(self.llm.engine.stepper) as planned:
            took,firsts,gaps = a.prompts()
        a.leave()
        self.show(what, took, gaps, len(planned))
        self.told.append(a.said)
        return firsts,np.percentile(gaps, 95)/1e3

    def show(self, what, took, gaps, beside):
        p = np.percentile(gaps, (50,95))
        each = len(gaps)/self.n/len(took)
        print(f'  {what:9} at {self.policy.deadline*1e3:.0f} ms: prompt {np.median(took):.0f} ms '
            f'({min(took):.0f} to {max(took):.0f}), between tokens {p[0]:.1f}, p95 {p[1]:.1f}, '
            f'most {max(gaps):.1f}; {each:.0f} tokens of each answer, '
            f'{beside/len(took):.0f} of them beside', flush=True)

    def run(self):
        "First tokens each time, by how the card was"
        part,deadline = self.policy.part,self.policy.deadline
        first,_ = self.one('undivided', 0., deadline)
        divided,limit = self.one('divided', part, deadline)
        again,_ = self.one('undivided', 0., limit)
        self.learnt()
        self.policy.part,self.policy.deadline = part,deadline
        return [('undivided',first), ('divided',divided), ('undivided',again)]

    def learnt(self):
        "Show what times the policy expects"
        t = self.policy.times
        plain = [t.plain_steps.get(k) for k in t.apart_steps]
        steps = [f'{s.mean*1e3 if s else 0:.2f}' for s in plain]
        beside = [f'{s.mean*1e3:.2f}' for s in t.apart_steps.values()]
        chunk = t._expected(self.llm.engine.scheduler.chunk, 0)
        print(
            '  learnt, ms: steps', *steps, 'beside', *beside, 'chunk', f'{chunk*1e3:.1f}',
            flush=True)

    def unlike(self):
        "Answers that did not say the same each time, as far as they went"
        first,*others = self.told
        for said in others:
            for rid,tokens in said.items():
                k = min(len(tokens), len(first[rid]))
                if tokens[:k]!=first[rid][:k]:
                    yield rid

def run(llm, s, n, want)->list:
    "Prompts beside `n` answers; faults"
    print(f'{n} answers', flush=True)
    t = Trial(llm, s, n)
    bad = [
        f'{n} answers, {what}: other first tokens'
        for what,firsts in t.run() if firsts!=want]
    return bad+[f'{rid} says something else' for rid in t.unlike()]

def setting(o):
    "What is run, as the arguments say"
    s = TINY if o.emulator else CARD
    if o.seqs:
        s.seqs = tuple(map(int, o.seqs.split(',')))
    s.long = o.long or s.long
    s.most = 100*s.plain
    return s

def main():
    o = arguments(__doc__, seqs=dict(default=''), long=dict(type=int, default=0))
    s = setting(o)
    if o.emulator:
        card_stepper.APART,card_stepper.LARGE = 2,4
    llm = toy(
        s.model, o.emulator, max(s.seqs)+1, s.long+s.most+128,
        show=False, enable_prefix_caching=False)
    e = llm.engine
    print(e.stepper.part, 'of the card; chunks of', e.scheduler.chunk, flush=True)
    for i in range(2):
        alone(llm, s, i)
    both = [alone(llm, s, i) for i in range(s.prompts)]
    print(f'alone {np.median([ms for ms,_ in both]):.0f} ms', flush=True)
    want,bad = [token for _,token in both],[]
    for n in s.seqs:
        bad += run(llm, s, n, want)
    if e.late:
        bad.append(f'compiled late: {e.late}')
    llm.close()
    verdict(bad, 'the same tokens, divided or not')

if __name__=='__main__':
    main()
