"""A plain step beside a chunk of a prompt: one after the other, on two streams, and on parts of the
multiprocessors, which the driver deals out (green contexts).

    python tests/gpu/parts.py [--emulator] [--seqs 8,32,128] [--chunks 2048,8192] [--parts 4,8,16]

Times are shown, not judged. That a step has the same bits on any number of multiprocessors is."""
import ctypes
from contextlib import contextmanager
from types import SimpleNamespace as NS
import numpy as np
from atlas.card.card import card_of
from atlas.card.device import driver
from atlas.card.graph import Graph
from atlas.cuda import gemv,gemv_wide
from atlas.cuda.sample import sample_rows
from atlas.engine.card_stepper import PromptShape,StepShape
from atlas.ops.linear import TILE
from atlas.use.bench_decode import _blank,pretend
from many import clear,say,timed
from toys import arguments,greedy,prompt,ready_for,toy,verdict

CARD = NS(model='qwen3.6-35b-a3b', seqs=(8,32,128), chunks=(2048,8192), parts=(4,8,16),
    vocab=200_000, behind=400, bound=512, room=dict(kv_cache_memory=20<<30))
TINY = NS(model='qwen3.6-moe', seqs=(1,3,12), chunks=(64,128), parts=(2,4,16),
    vocab=256, behind=16, bound=128, room={})

class Resource(ctypes.Structure):
    "The driver's CUdevResource, of multiprocessors"
    _fields_ = [('type',ctypes.c_int), ('pad',ctypes.c_ubyte*92), ('count',ctypes.c_uint),
        ('rest',ctypes.c_ubyte*44)]

def call(name, *args):
    "Call a function of the driver; a `SystemExit` with its status where it refuses"
    if code := getattr(driver(), name)(*args): raise SystemExit(f'{name}: {code}')

class Part:
    "Some of a card's multiprocessors, and a stream whose kernels run on them alone"
    def __init__(self, card, resource, priority=0):
        self.count,at = resource.count,ctypes.byref
        what,context,stream = (ctypes.c_void_p() for _ in range(3))
        call('cuDevResourceGenerateDesc', at(what), at(resource), 1)
        call('cuGreenCtxCreate', at(context), what, card.index, 1) # 1: with a stream of its own
        call('cuGreenCtxStreamCreate', at(stream), context, 1, priority) # 1: waits for no other
        self.stream = card.xp.cuda.ExternalStream(stream.value)

def parted(card, n:int)->tuple[Part,Part]:
    "A part of `n` multiprocessors, 4 or a multiple of 8, and one of the others"
    whole,few,rest = Resource(),(Resource*1)(),Resource()
    count,at = ctypes.c_uint(1),ctypes.byref
    call('cuDeviceGetDevResource', card.index, at(whole), 1) # 1: multiprocessors
    alone = int(n<8) # Not in eights, which clusters may count on
    call('cuDevSmResourceSplitByCount', few, at(count), at(whole), at(rest), alone, n)
    return Part(card, few[0], -5),Part(card, rest)

_plan,_extra_blocks = gemv.plan,gemv._extra_blocks

@contextmanager
def shared_out(card, n:int):
    "A context whose kernels are for `n` multiprocessors, with the sums of kernels for all of them"
    whole,last = card.multiprocessors,[0]
    def extra(w, extra, sms):
        last[0] = _extra_blocks(w, extra, whole)
        return _extra_blocks(w, extra, sms)
    def plan(f, rows, k, sms):
        W,split,_,_ = _plan(f, rows, k, whole-last[0])
        groups = sms*-(-rows//(16*(W//split)*sms))
        span = -(-rows//(4*groups))*4
        return W,split,min(sms, -(-rows//span)),span
    card.multiprocessors = n
    for m in (gemv,gemv_wide): m.plan,m._extra_blocks = plan,extra
    try: yield
    finally:
        card.multiprocessors = whole
        for m in (gemv,gemv_wide): m.plan,m._extra_blocks = _plan,_extra_blocks

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
            while not e.scheduler.seqs[rid].outputs: timed(self.llm)
            e.abort(rid)
        return self.stepper.prompts.kept[PromptShape(-(-n//TILE)*TILE, 1)].b

    def _graph(self, f, stream, many):
        with shared_out(self.card, many), self.stepper.here():
            return Graph(f, self.device, 'half', stream=stream, warm=False),stream

    def chunk(self, n:int, stream=None, many=None):
        "The graph of a chunk for so many multiprocessors, and its stream"
        def body():
            with self.scratch.allocating(): return self.stepper.over(self.batches[n])
        return self._graph(body, stream, many or self.whole)

    def step(self, stream=None, many=None):
        "The same of a plain step, which leaves its logits"
        t,shape = self.stepper,self.shape
        def body():
            with self.memory.temporaries():
                b,r = t.rows.batch(shape.seqs, shape.longest),t.rows.of(shape.seqs)
                logits = t.model.forward(b, t.cache)
                then = b,t.cache.pool.block_size
                sample_rows(logits, t.table, r.ids, r.lanes, greedy=True, cuts=False, then=then)
            return logits
        return self._graph(body, stream, many or self.whole)

    def again(self):
        "Those who decode stand where they stood"
        with self.stepper.here(): self.stepper.rows.place(self.seqs, self.lanes, 1)
        self.device.synchronize()

    def finish(self, *pairs):
        "Wait for the streams of some graphs: a wait for the card may leave out those of parts"
        for _,stream in pairs:
            if stream is not None: stream.synchronize()
        self.device.synchronize()

    def took(self, *pairs, runs=2):
        "Milliseconds until each of some graphs, begun together, has ended: means of several runs"
        cuda,out = self.device.xp.cuda,[]
        self.again()
        for _ in range(runs+1):
            events = [(cuda.Event(),cuda.Event()) for _ in pairs]
            for (g,stream),(begin,end) in zip(pairs, events):
                begin.record(stream)
                g(stream)
                end.record(stream)
            self.finish(*pairs)
            began = events[0][0]
            out.append([cuda.get_elapsed_time(began, end) for _,end in events])
        return np.mean(out[1:], axis=0).tolist()

    def during(self, chunk, step, each)->tuple[float,int]:
        "Milliseconds of a chunk, and how many steps of some `each` ms end meanwhile"
        cuda = self.device.xp.cuda
        begin,end = cuda.Event(),cuda.Event()
        events = [cuda.Event() for _ in range(int(300/each)+2)]
        self.again()
        begin.record(step[1])
        chunk[0](chunk[1])
        end.record(chunk[1])
        for e in events:
            step[0](step[1])
            e.record(step[1])
        self.finish(chunk, step)
        ms = cuda.get_elapsed_time(begin, end)
        return ms,sum(cuda.get_elapsed_time(begin, e)<=ms for e in events)

    def logits(self, *those)->list:
        "What each of several steps makes of the same state; with a chunk after it, beside that"
        cache,out = self.stepper.cache,[]
        pools = [a for p in (cache.conv,cache.rec) for a in p.values()]
        kept = [a.copy() for a in pools]
        for step,*beside in those:
            for a,was in zip(pools, kept): a[...] = was
            self.again()
            for g,stream in (*beside,step): g(stream)
            self.finish(*beside, step)
            out.append(self.device.download(step[0].out)[:len(self.seqs)].copy())
        return out

def same(a, b)->bool: return np.array_equal(a.view('u4'), b.view('u4'))

def on_parts(b:Beside)->list:
    "Times of steps and chunks; faults"
    bad,s,stream = [],b.s,b.device.xp.cuda.Stream
    alone,first = stream(non_blocking=True),stream(non_blocking=True, priority=-5)
    chunks,step = {n: b.chunk(n, alone) for n in s.chunks},b.step(first)
    d = b.took(step, runs=8)[0]  # every fourth step writes states
    p = {n: b.took(c)[0] for n,c in chunks.items()}
    def more(n, ends): return f'{max(ends):.2f} ms, {(max(ends)-p[n])/d:.2f} steps more'
    say(f'{len(b.seqs)} sequences: a plain step {d:.2f} ms')
    for n,c in chunks.items():
        both = more(n, b.took(step, c))
        say(f'  chunk of {n}: {p[n]:.2f} ms, with a step on another stream {both}')
    for k in s.parts:
        few,rest = parted(b.device, k)
        mine = b.step(few.stream, k)
        own = {n: b.chunk(n, rest.stream, rest.count) for n in chunks}
        e = b.took(mine, runs=4)[0]
        y,*others = b.logits([step], [mine], [mine,own[min(own)]])
        if not all(same(y, z) for z in others): bad.append(f'{len(y)} rows on {k} have other bits')
        say(f'  a step on {k}: {e:.2f} ms, {e*k/b.whole/d:.2f} of its share')
        for n,c in chunks.items():
            say(f'    chunk of {n} on the others alone {b.took(own[n])[0]:.2f} ms, '
                f'beside it {more(n, b.took(mine, own[n]))}; on all {more(n, b.took(mine, c))}')
        ms,count = b.during(own[n], mine, e)
        say(f'    chunk of {n} beside steps again and again: {ms:.2f} ms, {count} steps meanwhile')
    return bad

def on_emulator(b:Beside)->list:
    "Steps shared out over several numbers of multiprocessors; faults"
    b.card.multiprocessors = b.whole = 132  # as many as a real one
    want,*got = b.logits([b.step()], *([b.step(many=k)] for k in b.s.parts))
    bad = [k for k,y in zip(b.s.parts, got) if not same(want, y)]
    return [f'{len(want)} rows on {k} have other bits' for k in bad]

def engine(s, emulator):
    "An engine with room for all of `s`"
    def passes(stepper):
        card = card_of(stepper.rows.firsts[1])
        whole = card.multiprocessors
        stepper.rows.place([], [], 1)
        for k in (*s.parts,whole):
            with shared_out(card, k):
                for n in s.seqs:
                    shape = StepShape(n, s.bound, False, False, stepper.table.stamp)
                    stepper.body(shape)
            with shared_out(card, whole-k or whole):
                for n in s.chunks: stepper._try_prompt(n)
    with ready_for(passes):
        return toy(s.model, emulator, max(s.seqs)+1, max(s.chunks)+s.bound, show=False,
            tbt_deadline_ms=0, chunk=max(s.chunks), enable_prefix_caching=False, **s.room)

if __name__=='__main__':
    asked = dict.fromkeys(('seqs','chunks','parts'), dict(default=''))
    o = arguments(__doc__, **asked)
    s,bad = TINY if o.emulator else CARD,[]
    for k in asked:
        if given := getattr(o, k): setattr(s, k, tuple(map(int, given.split(','))))
    llm = engine(s, o.emulator)
    for n in s.seqs:
        pretend(llm, n, s.behind, s.bound-s.behind-1)
        _blank(llm)
        bad += (on_emulator if o.emulator else on_parts)(Beside(llm, s))
        clear(llm)
    llm.close()
    verdict(bad, 'a step has the same bits on any number of multiprocessors')
