"""Every decode kernel on this card against float64 NumPy, and what must agree to the last bit.

    python tests/gpu/check.py

Needs CuPy, nvcc and a card with 12 GB free; seconds, once nvcc is done. A line for each case: the largest error over the largest value of the expected
output, or what held and what did not; `FAIL` where it is over its bound. Outputs are full of NaN before each launch, so what is not written shows. Then a
model of eight layers in the shape of qwen3.6-35b-a3b: a graph gives the bits of eager launches, a row the bits it has alone, and several rows of one sequence
those of one step after another. Exit code 1 if anything failed. `compute-sanitizer python tests/gpu/check.py` looks for stray accesses.
"""
import sys
import cupy as cp,numpy as np
from bench import E,H,HALF,HEADS,I,KV,Model,Step,TOP,bf16,dev,normal,random_nvfp4,step_kernels,unit
from launch import replay
from variants import argmax,attn_decode,attn_merge,build,delta_step,embed,experts_down,experts_up,gemv,router

failed = []
def say(what, bounds=None, **figures):
    "Print the figures of a case; errors have a bound each, everything else must be true"
    bad = [k for k,v in figures.items() if not (v<=bounds[k] if bounds and k in bounds else v)]
    text = [f'{k} {v:.0e}' if isinstance(v, float) else f'{k} {bool(v)}' for k,v in figures.items()]
    print('FAIL' if bad else 'ok  ', what+':', ', '.join(text), flush=True)
    failed.extend([what]*bool(bad))

def error(got, want):
    "Largest difference over the largest wanted value; NaN, which no bound admits, where there is one"
    got = got.get() if isinstance(got, cp.ndarray) else got
    return float(np.abs(got-want).max()/np.abs(want).max())
def blank(*shape): return cp.full(shape, cp.nan, cp.float32)
def wide(bits): return (bits.astype(np.uint32)<<16).view(np.float32)
def f64(a): return a.astype(np.float64)
def sigmoid(v): return 1/(1+np.exp(-v))
def silu(v): return v*sigmoid(v)
def rms(x, gain): return x/np.sqrt((x*x).mean(-1, keepdims=True)+1e-6)*gain
def gains(*shape, by=.3): return np.exp(normal(*shape)*by)
def same(a, b): return bool((a==b).all())

E2M1 = np.array([0, .5, 1, 1.5, 2, 3, 4, 6])
def e4m3(b):
    e,m = (b>>3)&15,b&7
    return np.where(b&128, -1, 1)*np.where(e==0, m/8*2.**-6, (1+m/8)*2.**(e-7.))

def unpacked(w, s, gs):
    "The matrix that packed weights [n,K/2], scales [n/4,K/4] and global scales [n] stand for; layout: kernels/lib/nvfp4.cuh"
    n,w = len(w),w.reshape(len(w), -1, 4, 4)
    low,high = E2M1[(w>>1)&7]*np.where(w>>7, -1, 1),E2M1[(w>>4)&7]*np.where(w&1, -1, 1)
    scales = e4m3(s.astype(int)).reshape(n//4, -1, 4, 2).transpose(0, 2, 1, 3).reshape(n, -1)
    return (np.stack([low,high], 3).reshape(n, -1, 16)*scales[...,None]).reshape(n, -1)*gs[:,None]

def check_gemv(n, m, k, rows, form, warps, share, add):
    f = {r: gemv(k, r, form, warps, share, int(m>0)) for r in {1,rows}}
    w,s = random_nvfp4(n, k); gs = gains(n)*np.float32(unit(k)); extra = bf16(normal(m, k)/k**.5) if m else None
    x = normal(rows, k); x[:,:64] *= 1e4; x[:,64:96] = 0; x[:,96:128] *= 1e-20  # outliers, a chunk of zeros, a chunk of next to nothing
    if rows>1: x[1] *= 1e12; x[rows-1] *= 1e-12
    gain,parts,add = gains(k),np.abs(normal(rows, k//128, 4))*100+1 if form==2 else None,normal(rows, n+m) if add else None
    h = f64(x)
    if form==1: h = rms(h, gain)
    if form==2: h = (x.reshape(rows, -1, 128)/np.sqrt(parts.sum(-1)/128+1e-6)[...,None]).reshape(rows, k)
    want = h@unpacked(w.get(), s.get(), gs).T
    if m: want = np.concatenate([want, h@wide(extra).T], 1)
    if add is not None: want = want+add
    def run(at, r):
        y,cut = blank(r, n+m),lambda a: None if a is None else dev(a[at])
        f[r](w, s, dev(gs), None if extra is None else dev(extra), cut(x), dev(gain) if form==1 else None, cut(parts), cut(add), y, n, m)
        return y.get()
    y = run(slice(None), rows)
    say(f'gemv {n}+{m} x {k}, rows {rows}, IN {form}, W {warps}, KW {share}', dict(error=2e-3), error=max(map(error, y, want)),
        rows_alone_equal=all(same(run(slice(i, i+1), 1), y[i:i+1]) for i in range(rows)))

def check_experts(rows):
    route,up,down = router(rows),experts_up(),experts_down()
    (uw,us),(dw,ds) = random_nvfp4(2*I, H, (E+1,)),random_nvfp4(H, I, (E+1,))
    ugs,dgs = gains(E+1, 2)*np.float32(unit(H)),gains(E+1)*np.float32(unit(I))
    x = normal(rows, H)*3; x[:,5] *= 1e3
    gain,rw,add,logits = gains(H),bf16(normal(E+1, H)/H**.5*2),normal(rows, H),blank(rows, E+1)
    route(dev(rw), dev(gain), dev(x), logits, E+1)
    xn = rms(f64(x), gain); off = error(logits, xn@wide(rw).T)
    given = logits.get(); given[0,7] = given[0,3] = given[0].max()+1  # a tie; from here on both sides see the same logits
    p = np.exp(f64(given[:,:E])-given[:,:E].max(1, keepdims=True))
    ids = np.argsort(-p, 1, kind='stable')[:,:TOP]; share = np.take_along_axis(p, ids, 1); share /= share.sum(1, keepdims=True)
    def run(at):
        h,y = blank(len(x[at]), TOP+1, I),blank(len(x[at]), H)
        up(uw, us, dev(ugs), dev(given[at]), dev(gain), dev(x[at]), h); down(dw, ds, dev(dgs), dev(given[at]), h, dev(add[at]), y)
        return h.get(),y.get()
    hs,ys = np.zeros((rows, TOP+1, I)),f64(add)
    for t,j in np.ndindex(rows, TOP+1):
        e = ids[t,j] if j<TOP else E
        pairs = unpacked(uw[e].get(), us[e].get(), np.tile(np.repeat(ugs[e], 2), I//2)).reshape(I//2, 2, 2, H)  # gate 2q, gate 2q+1, up 2q, up 2q+1
        g,u = (pairs[:,i].reshape(I, H)@xn[t] for i in (0, 1))
        hs[t,j] = silu(g)*u
        ys[t] += (share[t,j] if j<TOP else sigmoid(f64(given[t,E])))*(unpacked(dw[e].get(), ds[e].get(), np.full(H, dgs[e]))@hs[t,j])
    h,y = run(slice(None))
    say(f'experts, rows {rows}', dict(router=2e-6, h=3e-3, y=3e-3), router=off, h=error(h, hs), y=error(y, ys),
        rows_alone_equal=all(same(run(slice(i, i+1))[1], y[i:i+1]) for i in range(rows)))

def delta_row(row, window, S, conv_w, decay, bias, norm, kh, vh):
    "One row of a delta net: output, sums of squares, new state; `window` is the inputs of four positions"
    c,unit_heads = (2*kh+vh)*128,lambda z: np.repeat(z/np.sqrt((z*z).sum(1, keepdims=True)+1e-6), vh//kh, 0)
    heads = silu((np.array(window)*conv_w.T).sum(0)).reshape(-1, 128)
    q,k,v = unit_heads(heads[:kh])*128**-.5,unit_heads(heads[kh:2*kh]),heads[2*kh:]
    z,b,a = row[c:c+vh*128].reshape(vh, 128),row[-2*vh:-vh],row[-vh:]
    S = S*np.exp(decay*np.logaddexp(0, a+bias))[:,None,None]
    S = S+k[:,:,None]*((v-np.einsum('hk,hkv->hv', k, S))*sigmoid(b)[:,None])[:,None]
    o = np.einsum('hk,hkv->hv', q, S)
    return o*norm*silu(z),(o*o).sum(1),S

def check_delta(counts, starts, slots_in, slots_out, kh=16, vh=32, slots=6):
    f,rows,c,i32 = delta_step(kh, vh),sum(counts),(2*kh+vh)*128,lambda a: dev(np.int32(a))
    x,conv,rec = normal(rows, c+vh*128+2*vh)*2,normal(slots, 4, c),normal(slots, vh, 128, 128)*.3
    weights = normal(c, 4)*.5,-np.exp(normal(vh)),normal(vh),gains(128)
    first,y,parts,convs,recs = np.cumsum([0, *counts]),blank(rows, vh*128),blank(rows, vh, 4),dev(conv),dev(rec)
    f(dev(x), *map(dev, weights), convs, recs, i32(first), i32(starts), i32(slots_in), i32(slots_out), y, parts)
    convs,recs,ys,squares,left,exact = convs.get(),recs.get(),[],[],0.,True
    for s,n in enumerate(counts):
        p,src = starts[s],slots_in[s]  # position p lies in row p%4 of a slot's ring
        window,S = ([f64(conv[src,(p+i)%4]) for i in range(4)],f64(rec[src])) if p else ([np.zeros(c)]*4,np.zeros((vh, 128, 128)))
        for i in range(n):
            r = first[s]+i; window = window[1:]+[f64(x[r,:c])]
            o,sq,S = delta_row(f64(x[r]), window, S, *map(f64, weights), kh, vh); ys.append(o); squares.append(sq)
            if (to := slots_out[r])<0: continue
            left = max(left, error(recs[to], S)); exact &= all(same(convs[to,(p+i+1+j)%4], window[j]) for j in (1, 2, 3))
    rest = [i for i in range(slots) if i not in slots_out]
    say(f'delta_step, rows {counts} from {starts}, slots {slots_in} to {slots_out}', dict(y=2e-6, squares=2e-6, state=2e-6),
        y=error(y.reshape(rows, vh, 128), np.array(ys)), squares=error(parts.sum(-1), np.array(squares)), state=left, conv_exact=exact,
        rest_untouched=same(convs[rest], conv[rest]) and same(recs[rest], rec[rest]))

def check_attention(pos, seq, window=0, block=16, sinks=None, d=256):
    f,merge,rows,blocks = attn_decode(window),attn_merge(window),len(pos),max(pos)//block+2
    n = (max(seq)+1)*blocks+3
    qkv,qn,kn = normal(rows, (2*HEADS+2*KV)*d),gains(d),gains(d)
    angle = np.arange(max(pos)+1)[:,None]*1e6**-(np.arange(HALF)/HALF); cos,sin = (g(angle).astype(np.float32) for g in (np.cos, np.sin))
    pools = [bf16(normal(n, block, KV, d)) for _ in range(2)]
    tables = np.random.default_rng(0).permutation(n)[:n-3].reshape(-1, blocks).astype(np.int32)
    now,i32,pieces = [*map(dev, pools)],lambda a: dev(np.int32(a)),max(pos)//32+1
    o,ml,y = blank(rows, pieces, HEADS, d),blank(rows, pieces, HEADS, 2),blank(rows, HEADS, d)
    f(dev(qkv), dev(qn), dev(kn), dev(cos), dev(sin), *now, dev(tables), i32(seq), i32(pos), o, ml)
    merge(o, ml, dev(qkv), None if sinks is None else dev(sinks), i32(pos), y)
    now,want,written = [a.get() for a in now],np.zeros((rows, HEADS, d)),0.
    def rope(x, p):
        a,b,c,s = x[...,:HALF],x[...,HALF:2*HALF],f64(cos[p]),f64(sin[p])
        return np.concatenate([a*c-b*s, b*c+a*s, x[...,2*HALF:]], -1)
    for t,(p,s) in enumerate(zip(pos, seq)):
        gate,q,k,v = (a.reshape(-1, d) for a in np.split(f64(qkv[t]), np.cumsum([HEADS*d, HEADS*d, KV*d])))
        at = tables[s,p//block],p%block
        for pool,was,new in zip(now, pools, (rope(rms(k, kn), p), v)):
            written = max(written, float((np.abs(wide(pool[at])-new)/np.abs(new)).max())); was[at] = pool[at]
        keys,values = (f64(wide(a[tables[s]].reshape(-1, KV, d)[max(0, p+1-window) if window else 0:p+1])) for a in now)
        q = rope(rms(q, qn), p)
        for h in range(HEADS):
            a = keys[:,h//(HEADS//KV)]@q[h]*d**-.5; a = a if sinks is None else np.append(a, sinks[h])
            e = np.exp(a-a.max()); want[t,h] = e[:p+1 if not window else min(p+1, window)]@values[:,h//(HEADS//KV)]/e.sum()
        want[t] *= sigmoid(gate)
    say(f'attention at {pos} of {seq}, window {window}, blocks of {block}', dict(y=3e-6, written=2**-8+1e-6), y=error(y, want), written=written,
        rest_untouched=all(map(same, now, pools)))

def check_ends():
    for v in (248320, 1000):
        logits = normal(3, v); logits[0,5] = logits[0,77] = 50; logits[1] = np.nan; logits[2,9] = np.nan
        best,count,ids = cp.zeros(3, cp.int64),cp.zeros(3, cp.int32),cp.full(3, -9, cp.int32)
        for _ in range(2): argmax()(dev(logits), best, count, ids)  # twice: it leaves its scratch as it found it
        say(f'argmax of {v}', ids=ids.get().tolist()==[5, -1, int(np.nanargmax(logits[2]))], scratch=not best.any() and not count.any())
    w,x = bf16(normal(100, H)),blank(3, H); embed()(dev(np.int32([7, -1, 99])), dev(w), x, 2.)
    say('embed', exact=same(x.get(), np.stack([wide(w[7])*2, np.zeros(H), wide(w[99])*2])))

def check_step(context):
    "The bits of a whole step: graph and eager, in company and alone, drafts verified together and one after another"
    model = Model(8)
    arrays = [a for s in model.states if s for a in s]; begin = [a.copy() for a in arrays]
    states = lambda: [a.get() for a in arrays]
    def reset():
        for a,b in zip(arrays, begin): a[:] = b
    ids = np.arange(8)*7+3
    everyone = Step(model, context, [1]*8); kv = everyone.kv
    def run(rows, eager=False):
        reset(); step = Step(model, context, [1]*len(rows), ids[rows], rows, rows, kv)
        step.tables = everyone.tables[cp.asarray(rows)]
        if eager: cp.cuda.Device().synchronize(); step(); cp.cuda.Device().synchronize()
        else: replay(step)
        return step.logits.get(),states()
    (together,after),(eager,after_eager) = run([*range(8)]),run([*range(8)], True)
    parts = {str(r): same(run(r)[0], together[r]) for r in ([0], [5], [6, 2], [0, 1, 2, 3])}
    say(f'whole step, context {context}', finite=np.isfinite(together).all(), graph_equals_eager=same(together, eager) and all(map(same, after, after_eager)),
        **parts)
    # four rows of one sequence, states in slots 1 to 4; then the same by four steps
    reset(); four = Step(model, context, [4], ids[:4], [0], [1, 2, 3, 4]); replay(four); want,after = four.logits.get(),states()
    reset(); got = []
    for i in range(4):
        one = Step(model, context+i, [1], ids[i:i+1], [i], [i+1], four.kv); one.tables = four.tables
        replay(one); got.append(one.logits.get())
    say(f'rows of one sequence, context {context}', logits=same(np.concatenate(got), want),
        states=all(same(a, b) for a,b in zip(states(), after) if a.ndim==4))  # not the rings: they have one row more than is defined

GEMV = [(12288, 64, 2048, 1, 8, 1, False), (2052, 3, 2048, 1, 8, 2, False), (1028, 0, 2048, 1, 8, 1, True), (2048, 0, 4096, 2, 8, 4, True),
        (2048, 0, 4096, 0, 8, 4, True), (2884, 0, 2880, 0, 4, 2, True), (300, 5, 2816, 1, 4, 2, False)]  # n, m, k, IN, W, KW, is something added
DELTA = [([1], [5], [2], [2]), ([1], [0], [2], [2]), ([1], [1], [0], [0]), ([1, 1, 1], [7, 0, 3], [1, 2, 0], [1, 2, 0]), ([4], [9], [0], [1, 2, -1, 3]),
         ([3, 2], [2, 0], [0, 1], [-1, 3, 4, 5, -1])]
ATTENTION = [([0], [0], {}), ([31], [0], {}), ([32], [0], {}), ([*range(30, 38)], [0]*8, {}), ([700], [0], {}), ([300], [0], dict(window=100)),
             ([5, 64, 65, 66, 900], [0, 1, 1, 1, 2], dict(block=64)), ([40, 300, 301], [0, 1, 1], dict(window=33, sinks=normal(HEADS)*3))]

def main():
    for rows in (1, 2, 4, 8): step_kernels(rows)  # asked for here, so that nvcc works on all at once
    for rows in (1, 8):
        for _,m,k,form,warps,share,_ in GEMV: gemv(k, rows, form, warps, share, int(m>0))
    build()
    for rows in (1, 8):
        for n,m,k,*rest in GEMV: check_gemv(n, m, k, rows, *rest)
    for rows in (1, 4): check_experts(rows)
    for case in DELTA: check_delta(*case)
    for pos,seq,options in ATTENTION: check_attention(pos, seq, **options)
    check_ends()
    for context in (1, 70): check_step(context)
    print(f'{len(failed)} cases failed' if failed else 'all is well'); sys.exit(bool(failed))

if __name__=='__main__': main()
