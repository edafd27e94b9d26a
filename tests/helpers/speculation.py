"""A made-up hybrid with a drafting head, those who guess for it, engines that check their guesses,
and what happened in them."""
import functools
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
import numpy as np
from atlas.engine.draft import Drafter,MTPDrafter,ModelDrafter,NgramDrafter
from atlas.engine.engine import Engine
from atlas.engine.stepper import HostStepper
from atlas.engine.scheduler import Scheduler
from atlas.engine.snapshots import SnapshotTree
from atlas.engine.records import Records
from atlas.engine.spill import SpillTier
from atlas.engine.spill_store import open_spill
from helpers import small_engine
from helpers.small_engine import V,made_up,serve,small_cache,tokens

CONFIG = replace(small_engine.CONFIG, mtp_layers=1)
MODEL = made_up(CONFIG)

class Guide:
    "Lets each of `sets` come once, in that order; then it is whole"
    error,code = None,'guide_failed'
    def __init__(self, sets, n=0):
        self.sets = sets
        self.n = n
    ended = property(lambda self: self.n>=len(self.sets))
    def accept(self, t):
        assert not self.ended and t in self.sets[self.n]
        self.n += 1
    def fork(self): return Guide(self.sets, self.n)
    def mask(self):
        bits = np.zeros(-(-V//32)*32, bool)
        if self.ended:
            may = []
        else:
            may = list(self.sets[self.n])
        bits[may] = True
        return np.packbits(bits, bitorder='little').view(np.uint32)
GUIDES = SimpleNamespace(start=Guide)

class Oracle(Drafter):
    "Knows what will be said; lies now and then, and now and then it says nothing"
    name = 'oracle'
    def __init__(self, target, k,
        answers=(), # Prompts and what comes after them, as tuples
        lies=.3, # Share of its guesses that are wrong
        gaps=0., # Share of them that are missing
        seed=0,
    ):
        super().__init__(target, k)
        self.answers,self.lies,self.gaps = answers,lies,gaps
        self.rng = np.random.default_rng(seed)

    def propose(self, h, ends, k, tap=None):
        said = [tuple(e.history) for e in ends.ends]
        rows = [self._after(h, k) for h in said]
        return list(np.array(rows, np.int32).T)

    def _after(self, history, k):
        n,known = len(history),()
        for answer in self.answers:
            if answer[:n]==history:
                known = answer[n:n+k]
        out = [self._say(t) for t in known]
        return out+[-1]*(k-len(out))

    def _say(self, token):
        luck = self.rng.random(2)
        if luck[0]<self.gaps:
            return -1
        return (token+1)%V if luck[1]<self.lies else token

class Broken(MTPDrafter):
    "A head whose numbers are none, now and then"
    def __init__(self, *args, share=.5):
        super().__init__(*args)
        self.share,self.rng = share,np.random.default_rng(0)
    def _likeliest(self, h, *args):
        bad = self.rng.random(len(h))<self.share
        h = np.array(h)
        h[bad] = np.nan
        return super()._likeliest(h, *args)

def own_cache(model, seqs, cache):
    "The cache of a draft model"
    return small_cache(model.c, cache.pool.num_blocks, cache.num_states+2*seqs)

def drafter(kind, model, cache, k, seqs, **how):
    "Who guesses: by name"
    if kind=='none':
        return None
    if kind=='mtp':
        return MTPDrafter(model, cache, k)
    if kind=='broken':
        return Broken(model, cache, k)
    if kind=='ngram':
        return NgramDrafter(model, k, 1, 3)
    if kind=='draft':
        own = own_cache(model, seqs, cache)
        return ModelDrafter(model, own, model, k)
    return Oracle(model, k, gaps=.2*(kind=='gaps'), **how)
KINDS = ['mtp','draft','ngram','oracle','gaps','broken']

def engine(kind='none', k=0, late=False, blocks=40, seqs=4,
        stepper=HostStepper, guides=GUIDES, arbiter=None,
        model=MODEL, who=None, prefix=None, chunk=64, spill=None, **kw):
    """An engine in which `kind` guesses `k` tokens a step; `who` is told to an oracle.
    With a tree of prefixes there are `prefix` more slots for states, and with a
    second tier `spill` bytes for what it evicts."""
    slots = (k+2)*seqs+(prefix or 0)
    sizes = (seqs,200,chunk)
    cache = small_cache(model.c, blocks, slots, drafting=True)
    who = who or {}
    d = drafter(kind, model, cache, k, seqs, **who)
    if prefix is not None:
        tree = SnapshotTree(cache.pool, cache.states, 128)
        kw |= dict(prefix=tree, states=cache.states)
        if spill:
            second_tier(tree,
                [cache,d.cache] if d and d.cache else [cache], spill)
    s = Scheduler(cache.pool, *sizes, drafts=k, **kw)
    return Engine(s, stepper(model, cache, late, d), guides, arbiter)

def second_tier(tree, caches, nbytes):
    "One in memory, for what `tree` evicts"
    records = Records(caches, MODEL.device.own_stream())
    return SpillTier(tree, records, open_spill(records, nbytes/1e9))

@functools.cache
def alone(r, model=MODEL):
    "What `r` is answered without drafts when nothing else exists"
    out,_ = serve(engine(model=model), [(r,0)])
    return out[r.id]

@functools.cache
def beyond(r):
    "The prompt of `r`, its answer, and what the model would say after that"
    p = r.params
    if not (p.min_tokens or r.guide):
        more = replace(p, stop_token_ids=(), max_tokens=p.max_tokens+8)
        r = replace(r, params=more)
    return (*r.prompt, *tokens(alone(r)))

# What happened

class Watched(HostStepper):
    "Counts in `seen` what becomes of drafts"
    seen = Counter()
    def _turn(self, *args):
        t = super()._turn(*args)
        self.turns.append(len(t.ids))
        return t
    def launch(self, plan, samplers):
        self.turns = []
        flight = super().launch(plan, samplers)
        n = len(plan.first)
        counts = flight.sampled.counts[n:].tolist()
        for rows,count in zip(self.turns, counts):
            if rows>1:
                self.seen[_became(rows, count)] += 1
        if plan.decode:
            last,self.width = getattr(self, 'width', plan.width),plan.width
            self.seen['widths changed'] += last!=plan.width
        starts = [start for _,start,_ in plan.prefill]
        self.seen['chunks'] += any(starts)
        self.seen['replays'] += len(plan.replay)
        return flight

def _became(rows, count):
    if count==rows:
        return 'all accepted'
    return 'some accepted' if count>1 else 'none accepted'

def watch_aborts(e, seen):
    "Count in `seen` those who are aborted while a step of theirs is in the air"
    real = e.abort
    def abort(rid):
        up = e.flying.plan.decode if e.flying else ()
        there = [s.id for s in up if not s.finish_reason]
        seen['aborted in the air'] += rid in there
        return real(rid)
    e.abort = abort

def count_ends(events, seen):
    "Count in `seen` how an answer ended whose last step accepted a draft"
    last = events[-1]
    n = len(events)-1
    before = bool(n and events[n-1].drafted)
    if last.finish=='length':
        seen['full inside'] += before
    if last.finish!='stop':
        return
    if last.token is None:
        seen['guide ended inside'] += bool(n>1 and events[n-2].drafted)
    else:
        seen['stopped inside'] += bool(last.drafted)

class Dice:
    "An arbiter who throws dice"
    def __init__(self, most, seed, calm=.8):
        self.most,self.calm = most,calm
        self.rng = np.random.default_rng(seed)
        self.k,self.limits,self.noted = most,{},Counter()
    def _thrown(self):
        return int(self.rng.integers(0, self.most+1))
    def _stays(self): return self.rng.random()<=self.calm
    def drafts(self, seqs, context=0):
        if not self._stays():
            self.k = self._thrown()
        return self.k
    def limit(self, id):
        if not (id in self.limits and self._stays()):
            one,other = self._thrown(),self._thrown()
            self.limits[id] = max(one, other)
        return self.limits[id]
    def note(self, k, accepted, seconds, context=0):
        for checked,n in accepted.values():
            fine = n<=checked<=k<=self.most
            self.noted[fine] += 1
    def leave(self, id):
        self.limits.pop(id, None)
    def stats(self): return {}
