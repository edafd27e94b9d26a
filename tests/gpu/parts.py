"""A plain step beside a chunk of a prompt: one after the other, and on parts of the
multiprocessors, which the driver deals out (green contexts).

python tests/gpu/parts.py [--emulator] [--seqs 1,2,4,8] [--chunks 8192] [--parts 2,4,6]

Times are shown, not judged. That a step, and a chunk, have the same bits on any number of
multiprocessors is."""
from dataclasses import dataclass
from types import SimpleNamespace as NS
import numpy as np
from atlas.card.card import card_of
from atlas.card.graph import Graph
from atlas.cuda.sample import sample_rows
from atlas.engine import card_stepper
from atlas.engine.card_stepper import PromptShape,StepShape
from atlas.ops.linear import TILE
from atlas.use.bench_decode import _blank,pretend
from many import clear,say,timed
from toys import arguments,greedy,prompt,ready_for,toy,verdict

CARD = NS(
    model='qwen3.6-35b-a3b', seqs=(1,2,4,8),
    chunks=(8192,), parts=(2,4,6),
    vocab=200_000, behind=400, bound=512, room=dict(kv_cache_memory=20<<30))
TINY = NS(
    model='qwen3.6-moe', seqs=(1,3,12),
    chunks=(64,128), parts=(2,4,16),
    vocab=256, behind=16, bound=128, room={})

class Beside:
    "A step of those who decode, and chunks of prompts, as graphs that may run side by side"
    def __init__(self, llm, s):
        self.llm,self.s,self.stepper = llm,s,llm.engine.stepper
        self.device,t = llm.device,self.stepper
        self.card = card_of(t.rows.firsts[1])  # the one that ops ask how many there are
        self.whole = self.card.multiprocessors
        timed(llm, 4)
        self.shape,self.seqs = t.last,list(t.rows.seqs)
        self.lanes = [t.lanes[q.id] for q in self.seqs]
        self.memory,self.scratch = self.device.own_stream(),self.device.scratch()
        self.batches = {n: self._batch(n) for n in s.chunks}

    def _batch(self, n):
        "Arrays of a chunk of `n` tokens, whose blocks and state nobody has when this is over"
        e = self.llm.engine
        for i in range(2):  # what comes again is recorded
            rid = f'p{n}-{i}'
            e.add(greedy(rid, prompt(n, self.s.vocab, i), 2))
            while not e.scheduler.seqs[rid].outputs:
                timed(self.llm)
            e.abort(rid)
        return self.stepper.prompts.kept[PromptShape(-(-n//TILE)*TILE, 1)].b

    def _graph(self, f, stream, many):
        with self.card.using(many), self.stepper.here():
            return Graph(f, self.device, 'half', stream=stream, warm=False),stream

    def chunk(self, n:int, stream=None, many=None):
        "The graph of a chunk for so many multiprocessors, and its stream"
        def body():
            with self.scratch.allocating():
                return self.stepper.over(self.batches[n])
        return self._graph(body, stream, many or self.whole)

    def step(self, stream=None, many=None):
        "The same of a plain step, which leaves its logits"
        t,shape = self.stepper,self.shape
        def body():
            with self.memory.temporaries():
                b = t.rows.batch(shape.seqs, shape.longest)
                r = t.rows.of(shape.seqs)
                logits = t.model.forward(b, t.cache)
                then = b,t.cache.pool.block_size
                sample_rows(logits, t.table, r.ids, r.lanes, greedy=True, cuts=False, then=then)
            return logits
        return self._graph(body, stream, many or self.whole)

    def again(self):
        "Those who decode stand where they stood"
        with self.stepper.here():
            self.stepper.rows.place(self.seqs, self.lanes, 1)
        self.device.synchronize()

    def finish(self, *pairs):
        "Wait for the streams of some graphs: a wait for the card may leave out those of parts"
        for _,stream in pairs:
            if stream is not None:
                stream.synchronize()
        self.device.synchronize()

    def took(self, *queues)->list:
        "Milliseconds until each graph of several queues has ended: (stream, graphs) of each"
        cuda,out = self.device.xp.cuda,[]
        self.again()
        began = cuda.Event()
        began.record(queues[0][0])
        for stream,graphs in queues:
            ends = [cuda.Event() for _ in graphs]
            for g,end in zip(graphs, ends):
                g(stream)
                end.record(stream)
            out.append(ends)
        self.finish(*[(None,stream) for stream,_ in queues])
        return [[cuda.get_elapsed_time(began, e) for e in ends] for ends in out]

    def each(self, step, n=8)->float:
        "Milliseconds of a step"
        graph,stream = step
        ends, = self.took((stream,[graph]*(n+1)))
        return (ends[-1]-ends[0])/n

    def logits(self, *those)->list:
        "What each of several steps makes of the same state; with a chunk after it, beside that"
        cache,out = self.stepper.cache,[]
        pools = [a for p in (cache.conv,cache.rec) for a in p.values()]
        kept = [a.copy() for a in pools]
        for step,*beside in those:
            for a,was in zip(pools, kept):
                a[...] = was
            self.again()
            for g,stream in (*beside,step):
                g(stream)
            self.finish(*beside, step)
            out.append(self.device.download(step[0].out)[:len(self.seqs)].copy())
        return out

    def rows(self, *chunks)->list:
        "The last rows that each of several graphs of a chunk makes"
        out = []
        for c in chunks:
            c[0](c[1])
            self.finish(c)
            out.append(self.device.download(c[0].out).copy())
        return out

def same(a, b)->bool:
    return np.array_equal(a.view('u4'), b.view('u4'))

@dataclass
class Times:
    "A chunk and steps, in milliseconds, in turns, so that all find the card equally warm"
    alone:list # The chunk on all multiprocessors
    after:list # The same and then as many steps as there are beside
    beside:list # The chunk on its part, with steps on the other all the time
    count:int # Steps that ended meanwhile
    each:float # A step beside it

    @classmethod
    def of(cls, b, alone, step, own, mine, each, rounds=9):
        "Of graphs and their streams"
        (c,stream) = alone
        rows = []
        for _ in range(rounds):
            one, = b.took((stream,[c]))
            many = [mine[0]]*(int(1.4*one[0]/each)+2)
            (end,),ends = b.took((own[1],[own[0]]), (mine[1],many))
            n = sum(e<=end for e in ends)
            after, = b.took((stream,[c,*[step[0]]*n]))
            rows.append((one[0],after[-1],end))
        columns = map(list, zip(*rows))
        return cls(*columns, n, ends[n-1]/max(n, 1))

    def __repr__(self):
        one,after,beside = map(np.median, (self.alone,self.after,self.beside))
        low = f'{min(self.alone):.2f} to {max(self.alone):.2f}'
        return (f'alone {one:.2f} ({low}), with {self.count} steps after it {after:.2f}, '
            f'beside {beside:.2f}, every {self.each:.2f} ms')

    def more(self, plain)->float:
        "Plain steps that each beside costs, if as many go on as the chunk has time for"
        longer = np.median(self.beside)-np.median(self.alone)
        steps = np.median(self.beside)/self.each
        return longer/steps/plain

def on_parts(b:Beside)->list:
    "Times of steps and chunks; faults"
    bad,s,stream = [],b.s,b.device.xp.cuda.Stream
    alone,first = stream(non_blocking=True),stream(non_blocking=True, priority=-5)
    chunks = {n: b.chunk(n, alone) for n in s.chunks}
    step = b.step(first)
    say(f'{len(b.seqs)} sequences: a plain step {b.each(step):.3f} ms')
    for k in s.parts:
        bad += on_part(b, k, step, chunks)
    return bad

def on_part(b:Beside, k, step, chunks)->list:
    "The same with steps on `k` multiprocessors, and chunks on the rest"
    bad,d = [],b.each(step)
    few,rest = b.memory.divided(k)
    mine = b.step(few.raw, few.count)
    own = {n: b.chunk(n, rest.raw, rest.count) for n in chunks}
    y,*others = b.logits([step], [mine], [mine,own[min(own)]])
    if not all(same(y, z) for z in others):
        bad.append(f'{len(b.seqs)} rows on {k} have other bits')
    e = b.each(mine)
    say(f'  a step on {few.count}: {e:.2f} ms, {e*k/b.whole/d:.2f} of its share')
    for n,c in chunks.items():
        want,again,y = b.rows(c, c, own[n])
        if not (same(want, again) and same(want, y)):
            bad.append(f'{n} tokens on {rest.count} have other bits')
        t = Times.of(b, c, step, own[n], mine, e)
        say(f'    chunk of {n}: {t}: {t.more(d):.2f} plain steps each')
    return bad

def on_emulator(b:Beside)->list:
    "Steps shared out over several numbers of multiprocessors; faults"
    b.card.multiprocessors = b.whole = 132  # as many as a real one
    want,*got = b.logits(
        [b.step()],
        *([b.step(many=k)] for k in b.s.parts))
    bad = [k for k,y in zip(b.s.parts, got) if not same(want, y)]
    return [f'{len(want)} rows on {k} have other bits' for k in bad]

def engine(s, emulator):
    "An engine with room for all of `s`"
    def passes(stepper):
        card = card_of(stepper.rows.firsts[1])
        whole = card.multiprocessors
        stepper.rows.place([], [], 1)
        for k in (*s.parts,whole):
            with card.using(k):
                for n in s.seqs:
                    shape = StepShape(n, s.bound, False, False, stepper.table.stamp)
                    stepper.body(shape)
            with card.using(whole-k or whole):
                for n in s.chunks:
                    stepper._try_prompt(n)
    with ready_for(passes):
        return toy(
            s.model, emulator, max(s.seqs)+1,
            max(s.chunks)+s.bound, show=False,
            tbt_deadline_ms=0, chunk=max(s.chunks), enable_prefix_caching=False, **s.room)

if __name__=='__main__':
    asked = dict.fromkeys(('seqs','chunks','parts'), dict(default=''))
    o = arguments(__doc__, **asked)
    s,bad = TINY if o.emulator else CARD,[]
    for k in asked:
        if given := getattr(o, k):
            setattr(s, k, tuple(map(int, given.split(','))))
    card_stepper.LONG = 1<<20  # a graph is recorded although answers wait
    llm = engine(s, o.emulator)
    for n in s.seqs:
        pretend(llm, n, s.behind, s.bound-s.behind-1)
        _blank(llm)
        bad += (on_emulator if o.emulator else on_parts)(Beside(llm, s))
        clear(llm)
    llm.close()
    verdict(bad, 'a step has the same bits on any number of multiprocessors')
