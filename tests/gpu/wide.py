"""Kernels for few rows and those for wide steps beside each other: times, and whether bits agree.

    python tests/gpu/wide.py [--emulator] [--part products|experts|states|all] [--rows 16,128]
        [--formats nvfp4,fp8,bf16] [--shapes 2048x4096] [--sweep 6] [--models gpt-oss-120b]

Products: `gemv` and `gemv_wide`, whose halves are timed alone, too; `--sweep N` times the N ways
to share out that the cost model likes best. Experts: `moe` and `moe_wide`, and what each launch
adds: the time of all up to it less that of those before. States: a delta net's `delta_step` and
`delta_wide`, by sequences of one row. All by graphs over random weights, more than caches hold.
Bits can fail, times cannot."""
from contextlib import contextmanager
from dataclasses import replace
import numpy as np
from atlas.card.card import limits
from atlas.card.device import Cuda
from atlas.card.emulator import Emulator
from atlas.cuda import delta,experts,experts_wide,gemv_wide as wide
from atlas.cuda.experts import Mixture,moe
from atlas.cuda.experts_wide import moe_wide
from atlas.cuda.gemv import _norm_of,gemv
from atlas.cuda.gemv_wide import gemv_wide
from atlas.cuda.pack import CARD_FORMATS,invented
from atlas.engine.cache import TAILS
from atlas.ground.config import ModelConfig
from toys import arguments,verdict
from types import SimpleNamespace as NS

rng = np.random.default_rng(0)
def normal(*shape): return rng.standard_normal(shape, dtype='f4')

def us(card, f, weights):
    "Microseconds of `f` with each of `weights`, by a graph of all; NaN on the emulator"
    def go():
        for w in weights:
            f(w)
    go()
    return card.microseconds(go)/len(weights)

def differ(what, a, b):
    "What to say if `a` has other bits than `b`, or what are no numbers"
    off = (
        (a.view('u4')!=b.view('u4')) | ~np.isfinite(a)).mean()
    return [f'{what}: {off:.2%} have other bits'] if off else []

@contextmanager
def instead(value, name, *modules):
    "While open, `value` is what `modules` have as `name`"
    before = getattr(modules[0], name)
    for m in modules:
        setattr(m, name, value)
    try:
        yield
    finally:
        for m in modules:
            setattr(m, name, before)

def shown(o):
    "A tiling in a few words"
    return (f't{o.tiles} s{o.strips} {o.down}x{o.along} deep {o.deep} held {o.held}, '
        f'{o.blocks} blocks of {o.span} rows, {o.shared>>10} KB')

def likely(card, p, rows, n):
    "The `n` best (cycles, tiling) by the cost model, each of other tiles, strips or shares"
    sizes = (
        p.w.rows,p.w.k,card.multiprocessors,p.split,
        -(-rows//8))
    best = {}
    found = wide._tilings(limits(card), p.w.format, *sizes)
    for cycles,o in sorted(found, key=lambda x: x[0]):
        best.setdefault((o.tiles,o.strips,o.along), (cycles,o))
    return list(best.values())[:n]

class Rows:
    "Some rows and matrices of one shape"
    def __init__(self, card, ws, rows):
        self.card,self.ws = card,ws
        w = ws[0]
        self.norm = {}
        if w.n>w.k:
            self.norm = dict(gain=card.upload(1+normal(w.k)/4), eps=1e-6)
        self.x = card.upload(normal(rows, w.k))
        self.out = card.empty((rows,w.n))

    def result(self, f):
        return self.card.download(f(self.x, self.ws[0], **self.norm))

    def us(self, f):
        "Microseconds of a product"
        return us(self.card, lambda w: f(self.x, w, out=self.out, **self.norm), self.ws)

    def halves_us(self, p):
        "Of what `p` does with rows before it"
        gain = self.norm.get('gain')
        how = _norm_of(gain, None, 0)
        return us(self.card, lambda w: p.halves(self.x, gain, 1e-6, None, how), self.ws)

def product(card, name, ws, rows, sweep):
    "A line of the table, and those of a sweep; what is wrong"
    r = Rows(card, ws, rows)
    p = wide._WideProduct(card, ws[0], None, rows)
    times = f'{r.us(gemv):8.1f} {r.us(gemv_wide):8.1f} {r.halves_us(p):8.1f}'
    print(f'{name} {rows:4}  {times}  {shown(p.o)}', flush=True)
    want = r.result(gemv)
    bad = differ(f'{name} {rows} rows', r.result(gemv_wide), want)
    for cycles,o in likely(card, p, rows, sweep):
        with instead(lambda *_: o, 'tiling', wide):
            took = r.us(gemv_wide)
            print(f'{took:42.1f}  {shown(o)}; {cycles:.0f} cycles likely', flush=True)
            bad += differ(f'{name} {rows} rows, {shown(o)}', r.result(gemv_wide), want)
    return bad

def products(card, formats, shapes, rows, sweep, tiny):
    "The table of products; what is wrong"
    print('products, us       rows      gemv     wide   halves')
    bad = []
    for fmt,shape in ((f,s) for f in formats for s in shapes):
        (n,k),f = map(int, shape.split('x')),CARD_FORMATS[fmt]
        many = (
            2 if tiny
            else int(np.clip(
                (150<<23)/(n*k*f.bits)+1, 2,
                12)))
        ws = [invented(card, (n,k), f, seed=i) for i in range(many)]
        for r in rows:
            bad += product(card, f'{fmt:5} {shape:12}', ws, r, sweep)
    return bad

LAUNCHES = {moe: ['router','experts'],
    moe_wide: ['router','expert_slots','up','down','experts_wide','expert_sum']}

def only(names):
    "While open, words for experts make no launches but these"
    run = experts.run
    def chosen(name, *args, **kw):
        part = ('up' if kw['UP'] else 'down') if name=='expert_strips' else name
        if part in names:
            run(name, *args, **kw)
    return instead(chosen, 'run', experts, experts_wide)

class Layers:
    "Layers of a model's experts, as many as fit"
    def __init__(self, card, name, tiny):
        c = ModelConfig.preset(name)
        self.card,self.c = card,c
        self.H,m = c.hidden_size,c.moe
        self.fmt = 'mxfp4' if name.startswith('gpt-oss') else 'nvfp4'
        self.shared = m.shared_size==m.intermediate_size
        if tiny:
            m = replace(m, num_experts=6, top_k=2, intermediate_size=64)
            self.H = 160
        self.m,self.gain = m,card.upload(1+normal(self.H)/4)
        self.correction = card.upload(normal(m.num_experts)/100) if m.correction else None
        self.layers = [self.layer(0)]
        self.nbytes = sum(p.nbytes for p in self.layers[0])
        many = 2 if tiny else max(2, min(c.num_layers, (40<<30)//self.nbytes))
        self.layers += [self.layer(i) for i in range(1, many)]

    def layer(self, seed):
        "Router, and both banks"
        pair = self.c.act!='relu2'
        H = self.H
        I = self.m.intermediate_size
        n,f = self.m.num_experts+self.shared,CARD_FORMATS[self.fmt]
        router = invented(self.card, (n,H), CARD_FORMATS['bf16'], seed=seed)
        up = invented(
            self.card, (n,(1+pair)*I,H), f,
            pair, seed=seed)
        return router,up,invented(self.card, (n,H,I), f, seed=seed)

    def __call__(self, f, x, layer, **kw):
        "Rows `x` by `f`"
        c,s = self.c,self.shared
        mix = Mixture(
            *layer, self.m, c.act, c.act_limit, self.gain, 1e-6,
            correction=self.correction, shared=s, gated=s)
        return f(x, mix, x, **kw)

    def times(self, f, rows):
        "Microseconds a layer, and what each launch adds"
        x = self.card.upload(normal(rows, self.H))
        out = self.card.empty((rows,self.H))
        names,sums = LAUNCHES[f],[0]
        for i in range(len(names)):
            with only(names[:i+1]):
                sums.append(us(
                    self.card, lambda layer: self(f, x, layer, out=out),
                    self.layers))
        adds = [f'{n} {t:.1f}' for n,t in zip(names, np.diff(sums))]
        return f'{f.__name__:9} {sums[-1]:8.1f}   {", ".join(adds)}'

    def bits(self, few, n):
        "Rows in company, alone and by `moe`; what is wrong"
        x = self.card.upload(normal(n, self.H))
        def result(f, x, **kw):
            return self.card.download(self(f, x, self.layers[0], **kw))
        y = result(moe_wide, x)
        bad = differ('fewer blocks', result(moe_wide, x, blocks=self.card.multiprocessors-1), y)
        for k,f in [(n//3,moe_wide)]+[
                (k,f) for k in few for f in (moe_wide,moe)]:
            at = slice(n-k-1, n-1)
            bad += differ(f'{k} rows alone by {f.__name__}', result(f, x[at]), y[at])
        return bad

def mixture(card, name, rows, tiny):
    "The table of a model's experts; what is wrong"
    e = Layers(card, name, tiny)
    few = (8,) if tiny else (1,2,4,8)
    size = f'{len(e.layers)} layers of {e.nbytes/1e6:.0f} MB'
    print(f'{name}, {e.fmt}, {size}: us a layer, and what each launch adds')
    bad = e.bits(few, 16 if tiny else 100)
    for r in sorted({*few,*rows}):
        words = [moe]+[moe_wide]*(r in rows)
        for f in words:
            print(f'{r:4} rows  {e.times(f, r)}', flush=True)
    return [f'{name}, {b}' for b in bad]

class DeltaNet:
    "Layers of `seqs` states, each sequence with a row to go on with, step after step"
    def __init__(self, card, seqs, heads, d, layers):
        self.card = card
        self.seqs = seqs
        self.heads = heads
        self.d = d
        self.C = 2*heads*d
        self.x = card.upload(normal(seqs, self.C+heads*d+2*heads))
        self.w = [card.upload(a) for a in
            (
                normal(self.C, 4)/2,
                -np.exp(normal(heads)), normal(heads),
                1+normal(d)/5)]
        self.first = (
            normal(seqs, 3, self.C),
            delta.as_records(normal(seqs, heads, d, d)))
        self.layers = [self.pools(1) for _ in range(layers)]
        ids = TAILS*np.arange(seqs)
        self.steps = [self.rows(ids, ids+1), self.rows(ids+1, ids)]

    def rows(self, read, write):
        "The tables of a step"
        def i32(a):
            return self.card.upload(np.asarray(a, np.int32))
        return NS(
            first=i32(np.arange(self.seqs+1)),
            starts=i32([9]*self.seqs),
            state_in=i32(read), state_out=i32(write), num_seqs=self.seqs)

    def pools(self, slots):
        "States and so many slots a sequence, the first of which have what all begin with"
        conv,rec = self.first
        p,q = [
            self.card.zeros((n*slots*self.seqs,*a.shape[1:]))
            for n,a in ((TAILS,conv),(1,rec))]
        p[:TAILS*self.seqs:TAILS] = self.card.upload(conv)
        q[:self.seqs] = self.card.upload(rec)
        return p,q

    def __call__(self, layer, b):
        "A step in a layer: y, and sums of squares"
        return delta.delta_step(self.x, *self.w, *layer, b, self.heads//2)

    def us(self):
        """Microseconds a layer and step, a whole round from one time that states are written to
        the next"""
        def go():
            for i in range(2*delta.PENDING+2):
                for layer in self.layers:
                    self(layer, self.steps[i%2])
        go()
        return self.card.microseconds(go)/len(self.layers)/(2*delta.PENDING+2)

    def bits(self, late=True):
        "What some steps answer; unless `late`, each leaves its states in other slots"
        pools = self.pools(2-late)
        ids = TAILS*np.arange(self.seqs)
        other = ids+TAILS*self.seqs
        steps = self.steps if late else [self.rows(ids, other), self.rows(other, ids)]
        out = [self(pools, steps[i%2]) for i in range(delta.PENDING+3)]
        return np.concatenate([self.card.download(a).ravel() for pair in out for a in pair])

def states(card, rows, tiny):
    "The table of delta nets; what is wrong"
    print('states, us         sequences   delta_step  delta_wide   bytes at 4.2 TB/s')
    bad = []
    (heads,d) = (2,32) if tiny else (32,128)
    for n in rows:
        size = n*heads*4*delta.record_size(d, d)
        net = DeltaNet(
            card, n, heads, d,
            2 if tiny else max(2, min(30, (16<<30)//size)))
        found,want = [],net.bits(late=False)
        for wide_from in (n+1,1):
            with instead(wide_from, '_WIDE', delta):
                found.append(net.us())
                name = 'delta_wide' if wide_from==1 else 'delta_step'
                bad += differ(f'{name} of {n} sequences, late', net.bits(), want)
        times = '  '.join(f'{t:11.1f}' for t in found)
        written = size+n*heads*4*d*d/(delta.PENDING+1)
        print(f'{heads} heads of {d} {n:12}  {times}  {written/4.2e6:12.1f}', flush=True)
    return bad

if __name__=='__main__':
    a = arguments(__doc__, part=dict(default='all', choices=['products','experts','states','all']),
        rows=dict(default=''), formats=dict(default=''), shapes=dict(default=''),
        models=dict(default='qwen3.6-35b-a3b'), sweep=dict(type=int, default=0))
    card = Emulator() if a.emulator else Cuda()
    tiny = a.emulator
    bad = []
    def listed(given, usual, least): return (given or (least if tiny else usual)).split(',')
    formats = listed(a.formats, 'nvfp4,fp8,bf16', 'nvfp4')
    shapes = listed(a.shapes, '2048x4096,12288x2048,248320x2048', '84x416')
    rows = [int(r) for r in listed(a.rows, '8,16,32,64,128,256', '16')]
    print(card.describe(), flush=True)
    def wanted(part): return a.part in (part,'all')
    if wanted('products'):
        bad += products(card, formats, shapes, rows, a.sweep, tiny)
    if wanted('states'):
        bad += states(card, rows, tiny)
    for name in a.models.split(',') if wanted('experts') else ():
        bad += mixture(card, name, rows, tiny)
    verdict(bad, f'bits of kernels for wide steps, {a.part}')
