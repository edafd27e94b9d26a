"""Time of a decode step of qwen3.6-35b-a3b's shape on this card: the whole step as one CUDA graph, and each of its stages.

    python tests/gpu/bench.py

Needs CuPy, nvcc and a card with 40 GB free; seconds, once nvcc is done. The weights are random, every layer has its own (so nothing stays in L2), all big
linears and the head are NVFP4, and routing is what random weights give. Prints the copy rate of the card; a table of stages, each alone in a graph
over its layers, with the bytes it must move and the share of the copy rate that comes to; the whole step at several row counts and contexts, as us and
tokens a second; and the step without PDL. A figure is the median of 20 to 40 replays. Host work, sampling other than greedy and advancing
the positions are not in it.
`Model` and `Step` are used by check.py too.
"""
import cupy as cp,numpy as np
from launch import microseconds
from variants import Variant,argmax,attn_decode,attn_merge,build,delta_step,embed,experts_down,experts_up,gemv,router

H,V,E,I,TOP = 2048,248320,256,512,8                    # hidden, vocabulary, experts, width of one, picked
KH,VH,HEADS,KV,D,HALF = 16,32,16,2,256,32              # heads of the delta net, of attention; its head size; pairs that rotate
C = (2*KH+VH)*128                                      # channels of the convolution
IN,BA,QKV,Y = C+VH*128,2*VH,(2*HEADS+2*KV)*D,VH*128    # rows of the projections; what comes out of both mixers
BLOCK,PIECE = 64,32                                    # positions a KV block, a piece of attention

dev = cp.asarray
host = np.random.default_rng(0)
def normal(*shape): return host.standard_normal(shape).astype(np.float32)
def bf16(x):
    "Bits of the nearest bfloat16"
    u = np.ascontiguousarray(x, np.float32).view(np.uint32)
    return ((u+0x7FFF+((u>>16)&1))>>16).astype(np.uint16)

noise = cp.random.default_rng(1).integers(0, 2**63, 1<<26, dtype=cp.int64).view(cp.uint8)  # half a GB; tensors are pieces of it
def random_bytes(*shape):
    at,n = int(host.integers(1<<27)),int(np.prod(shape))
    return noise[at:at+n].reshape(shape).copy()
def random_nvfp4(n, k, lead=()):
    "Weights and scales in the kernels' layout; scales from 0.5 to 1.875"
    return random_bytes(*lead, n, k//2),(random_bytes(*lead, n//4, k//4)&0x0F)+0x30
def unit(k): "A global scale with which rows of `random_nvfp4` have norm 1, about"; return 1/(2.9*1.2*k**.5)

class Linear:
    def __init__(self, n, k, scale=1.): self.w,self.s = random_nvfp4(n, k); self.gs,self.n = cp.full(n, unit(k)*scale, cp.float32),n
    @property
    def arrays(self): return self.w,self.s,self.gs

class Layer:
    def __init__(self, attention):
        self.attention = attention
        gain = lambda n: dev(np.exp(normal(n)*.1))
        self.gain,self.gain2 = gain(H),gain(H)
        self.inp,self.out = Linear(QKV if attention else IN, H),Linear(H, Y, .5)
        self.router = dev(bf16(normal(E+1, H)/H**.5*2))
        self.up,self.down = random_nvfp4(2*I, H, (E+1,)),random_nvfp4(H, I, (E+1,))
        self.up_gs,self.down_gs = cp.full((E+1,2), unit(H), cp.float32),cp.full(E+1, unit(I), cp.float32)
        if attention: self.q_norm,self.k_norm = gain(D),gain(D)
        else: self.delta = dev(normal(C, 4)*.5),dev(-np.exp(normal(VH))),dev(normal(VH)),gain(128)
        self.ba = None if attention else dev(bf16(normal(BA, H)/H**.5))

class Model:
    "Weights, and `slots` random states of the delta nets"
    def __init__(self, layers=40, slots=9):
        self.embedding = cp.tile(dev(bf16(normal(1000, H))), (V//1000+1, 1))[:V]
        self.layers = [Layer(i%4==3) for i in range(layers)]
        self.head,self.gain = Linear(V, H),dev(np.exp(normal(H)*.1))
        self.states = [(dev(normal(slots, 4, C)), cp.tile(dev(normal(VH, 128, 128)*.1), (slots, 1, 1, 1))) if not l.attention else None for l in self.layers]

def step_kernels(rows):
    "The variants of a step of `rows` rows"
    return dict(inp=gemv(H, rows, 1, extra=1), qkv=gemv(H, rows, 1), out_delta=gemv(Y, rows, 2, share=4), out_attn=gemv(Y, rows, share=4), router=router(rows),
        up=experts_up(), down=experts_down(), delta=delta_step(), attn=attn_decode(), merge=attn_merge(), argmax=argmax(), embed=embed())

class Step:
    """A decode step at `context` of `counts[s]` rows for sequence s: its tables and buffers. Row r has token `ids[r]`; the delta nets take
    sequence s from slot `state_in[s]` and leave row r in slot `state_out[r]`; `kv` goes on with another step's pools."""
    def __init__(self, model, context=0, counts=(1,), ids=None, state_in=None, state_out=None, kv=None):
        i32 = lambda a: dev(np.int32(a))
        rows,seqs = sum(counts),len(counts)
        first = np.cumsum([0, *counts]); seq = np.repeat(np.arange(seqs), counts); pos = context+np.arange(rows)-first[seq]
        self.m,self.rows,self.context,self.seq,self.pos,self.first = model,rows,context,i32(seq),i32(pos),i32(first)
        self.ids = i32(np.arange(rows)*7+3 if ids is None else ids)
        self.starts = i32([context or 1]*seqs)  # at position 0 no state would be read: time the usual case
        self.state_in = i32(np.arange(seqs) if state_in is None else state_in); self.state_out = i32(np.arange(rows) if state_out is None else state_out)
        blocks = (context+max(counts)-1)//BLOCK+1; self.tables = i32(np.arange(seqs*blocks).reshape(seqs, blocks))
        pool = lambda: dev(bf16(normal(1, BLOCK, KV, D))).repeat(seqs*blocks, 0)
        self.kv = kv or [(pool(), pool()) if l.attention else None for l in model.layers]
        angle = np.arange(context+rows)[:,None]*1e7**-(np.arange(HALF)/HALF)
        self.cos,self.sin = dev(np.cos(angle).astype(np.float32)),dev(np.sin(angle).astype(np.float32))
        f32 = lambda *shape: cp.zeros((rows, *shape), cp.float32)
        pieces = (context+max(counts)-1)//PIECE+1
        self.x,self.p_delta,self.p_attn,self.y,self.parts = f32(H),f32(IN+BA),f32(QKV),f32(Y),f32(VH, 4)
        self.o,self.ml,self.route,self.h,self.logits = f32(pieces, HEADS, D),f32(pieces, HEADS, 2),f32(E+1),f32(TOP+1, I),f32(V)
        self.best,self.count,self.out = cp.zeros(rows, cp.int64),cp.zeros(rows, cp.int32),cp.zeros(rows, cp.int32)
        self.k = step_kernels(rows)
    def embed(self): self.k['embed'](self.ids, self.m.embedding, self.x)
    def inp(self, l): self.k['inp'](*l.inp.arrays, l.ba, self.x, l.gain, None, None, self.p_delta, IN, BA)
    def qkv(self, l): self.k['qkv'](*l.inp.arrays, None, self.x, l.gain, None, None, self.p_attn, QKV)
    def delta(self, i):
        slots = self.first,self.starts,self.state_in,self.state_out
        self.k['delta'](self.p_delta, *self.m.layers[i].delta, *self.m.states[i], *slots, self.y, self.parts)
    def attn(self, i):
        l = self.m.layers[i]
        self.k['attn'](self.p_attn, l.q_norm, l.k_norm, self.cos, self.sin, *self.kv[i], self.tables, self.seq, self.pos, self.o, self.ml)
    def merge(self): self.k['merge'](self.o, self.ml, self.p_attn, None, self.pos, self.y)
    def project(self, l):
        name,parts = ('out_attn',None) if l.attention else ('out_delta',self.parts)
        self.k[name](*l.out.arrays, None, self.y, None, parts, self.x, self.x, H)
    def choose(self, l): self.k['router'](l.router, l.gain2, self.x, self.route, E+1)
    def up(self, l): self.k['up'](*l.up, l.up_gs, self.route, l.gain2, self.x, self.h)
    def down(self, l): self.k['down'](*l.down, l.down_gs, self.route, self.h, self.x, self.x)
    def head(self): self.k['qkv'](*self.m.head.arrays, None, self.x, self.m.gain, None, None, self.logits, V)
    def argmax(self): self.k['argmax'](self.logits, self.best, self.count, self.out)
    def __call__(self):
        "The whole step: 6 launches a delta layer, 7 an attention layer, and embed, head, argmax"
        self.embed()
        for i,l in enumerate(self.m.layers):
            if l.attention: self.qkv(l); self.attn(i); self.merge()
            else: self.inp(l); self.delta(i)
            self.project(l); self.choose(l); self.up(l); self.down(l)
        self.head(); self.argmax()

def nvfp4_mb(n, k): return n*k*9/16/1e6

def stages(step, copy):
    "Each stage over all its layers; us and MB are of one launch"
    layers,r = step.m.layers,step.rows
    nets,attns = ([i for i,l in enumerate(layers) if l.attention==a] for a in (False, True))
    over = lambda f, ids: (lambda: [f(i) for i in ids],len(ids))
    each = lambda f, ids=range(len(layers)): over(lambda i: f(layers[i]), ids)
    pieces = r*step.o.shape[1]*HEADS*D*4/1e6
    table = [('in_proj 12288+64 x 2048', each(step.inp, nets), nvfp4_mb(IN, H)+BA*H*2/1e6), ('qkv 9216 x 2048', each(step.qkv, attns), nvfp4_mb(QKV, H)),
        ('delta_step', over(step.delta, nets), r*4.39), ('attn_decode', over(step.attn, attns), r*step.context*KV*D*4/1e6+pieces),
        ('attn_merge', over(lambda i: step.merge(), attns), pieces), ('out 2048 x 4096', each(step.project), nvfp4_mb(H, Y)),
        ('router 257 x 2048', each(step.choose), (E+1)*H*2/1e6), ('experts_up 9 x 1024 x 2048', each(step.up), (TOP*r+1)*nvfp4_mb(2*I, H)),
        ('experts_down 9 x 2048 x 512', each(step.down), (TOP*r+1)*nvfp4_mb(H, I)),
        ('head 248320 x 2048', over(lambda i: step.head(), range(4)), nvfp4_mb(V, H)), ('argmax', over(lambda i: step.argmax(), range(4)), r*V*4/1e6)]
    for name,(f,n),mb in table:
        us = microseconds(f)/n
        print(f'  {name:28s} {mb:8.2f} MB {us:8.2f} us {mb/us:6.2f} TB/s {mb/us/copy:5.0%} of copy', flush=True)

def copy_rate():
    "TB/s of a device-to-device copy, read and write counted"
    a = cp.zeros(1<<31, cp.uint8); b = cp.empty_like(a)
    run = lambda: cp.cuda.runtime.memcpyAsync(b.data.ptr, a.data.ptr, a.nbytes, 3, cp.cuda.get_current_stream().ptr)
    return 2*a.nbytes/microseconds(run, captured=False)/1e6  # as a node of a graph it is slower by a third

def main():
    copy = copy_rate(); print(f'{cp.cuda.runtime.getDeviceProperties(0)["name"].decode()}: copy {copy:.2f} TB/s')
    for rows in (1, 2, 4, 8): step_kernels(rows)
    build(); model = Model()
    for rows,context in ((1, 0), (1, 4096), (8, 0)):
        step = Step(model, context, [1]*rows)
        print(f'stages, {rows} row{"s"*(rows>1)}, context {context}'); stages(step, copy)
    print('whole step')
    for rows,context in ((1, 0), (1, 4096), (1, 32768), (2, 0), (4, 0), (8, 0), (8, 4096)):
        step = Step(model, context, [1]*rows); us = microseconds(step, 40)
        print(f'  rows {rows} context {context:5d}: {us:7.0f} us {1e6*rows/us:6.0f} tok/s', flush=True)
    Variant.pdl = False
    print(f'  rows 1 context     0, without PDL: {microseconds(Step(model), 40):.0f} us')

if __name__=='__main__': main()
