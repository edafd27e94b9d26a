"""How quantised checkpoints store a matrix: each function gives the parts as they are stored, by
the end of their name, and the weights they stand for."""
import re,torch

E2M1 = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6])

def e2m1(x):
    "Codes of the nearest values, ties to the even code"
    off = (x.abs()[...,None]-E2M1).abs()
    equal = off==off.min(-1, keepdim=True).values
    c = torch.where(
        equal, torch.arange(8)%2+1, 3).argmin(-1)
    return (c+8*(x<0)).to(torch.uint8)

def pack(c):
    return c[...,0::2]|(c[...,1::2]<<4)
def value(c):
    return (
        E2M1[(c&7).long()]
        *torch.where(c>=8, -1., 1.))
def e4m3(x): return x.clamp(-448, 448).to(torch.float8_e4m3fn)
def blocks(w, n): return w.reshape(*w.shape[:-1], -1, n)

def fp8(w, **kw):
    s = w.abs().max()/448
    q = e4m3(w/s)
    return (
        dict(weight=q, weight_scale=s, input_scale=torch.tensor(.02)),
        q.float()*s)

def fp8_channel(w, dtype=torch.bfloat16):
    s = (w.abs().amax(1, keepdim=True)/448).to(dtype)
    q = e4m3(w/s.float())
    return dict(weight=q, weight_scale=s),q.float()*s.float()

def fp8_block(w, dtype=torch.float32, name='weight_scale_inv', four=False):
    n,k = w.shape
    p = torch.zeros(-(-n//128)*128, -(-k//128)*128)
    p[:n,:k] = w
    s = (
        p.view(
            p.shape[0]//128, 128, -1,
            128).abs().amax((1,3))/448).to(dtype)
    full = s.float().repeat_interleave(
        128, 0).repeat_interleave(128, 1)[:n,:k]
    q = e4m3(w/full)
    return (
        {'weight':q, name:s[:,None,:,None] if four else s},
        q.float()*full)

def nvfp4_parts(w):
    g = w.abs().max()/(6*448)
    b = blocks(w, 16)
    s = b.abs().amax(-1)/6/g
    s = torch.where(
        s==0, 1.,
        s).clamp(2**-9, 448).to(torch.float8_e4m3fn)
    full = (s.float()*g)[...,None]
    c = e2m1(b/full)
    return (
        pack(c.reshape(w.shape)), s, g,
        (value(c)*full).reshape(w.shape))

def nvfp4(w, activations=True):
    q,s,g,d = nvfp4_parts(w)
    return (
        dict(weight=q, weight_scale=s, weight_scale_2=g)
        |(dict(input_scale=torch.tensor(.003)) if activations else {}),
        d)

def nvfp4_a16(w): return nvfp4(w, False)

def nvfp4_packed(w):
    q,s,g,d = nvfp4_parts(w)
    return (
        dict(
            weight_packed=q, weight_scale=s, weight_global_scale=(1/g)[None],
            input_global_scale=torch.tensor([300.])),
        d)

def mxfp4(w):
    b = blocks(w, 32)
    top = b.abs().amax(-1).clamp_min(2.**-120)
    e = torch.floor(torch.log2(top))-2
    e = torch.where(top/torch.exp2(e)>6, e+1, e)
    s = torch.exp2(e)[...,None]
    c = e2m1(b/s)
    return (
        pack(c),
        (e+127).to(torch.uint8),
        (value(c)*s).reshape(w.shape))

def mxfp4_packed(w):
    q,s,d = mxfp4(w)
    return (
        dict(
            weight_packed=q.reshape(*w.shape[:-1], -1),
            weight_scale=s),
        d)

def fp8_block_bf16(w): return fp8_block(w, torch.bfloat16)
def fp8_block_4d(w): return fp8_block(w, name='weight_scale', four=True)

def quantise(d, rules):
    """`d` as stored, and the plain weights it stands for: each matrix by the first rule that
    matches its name"""
    stored,plain = {},{}
    for k,w in d.items():
        f = next((f for rx,f in rules if re.search(rx, k)), None)
        if f is None:
            stored[k] = plain[k] = w
            continue
        if f is mxfp4:  # gpt-oss: [E,in,out] becomes [E,out,in/32,16]
            q,s,x = f(w.float().mT)
            stored |= {k+'_blocks':q, k+'_scales':s}
            plain[k] = x.mT.contiguous()
            continue
        parts,plain[k] = f(w.float())
        stored |= {k.removesuffix('weight')+n:p for n,p in parts.items()}
    return stored,plain

def per_expert(d):
    "Stacked experts taken apart, as quantised releases have them"
    out = {}
    for k,w in d.items():
        m = re.fullmatch(r'(.*\bexperts\.)(gate_up_proj|down_proj)', k)
        if not m:
            out[k] = w
            continue
        for e,x in enumerate(w):
            both = (
                zip(('gate_proj','up_proj'), x.chunk(2)) if m[2]=='gate_up_proj'
                else [(m[2],x)])
            out |= {f'{m[1]}{e}.{n}.weight':p.clone() for n,p in both}
    return out

def transposed(d):
    "Stacked experts with their last two axes the other way round, as Qwen3-VL has them"
    return {
        k:w.mT.contiguous() if re.search(r'\bexperts\.(gate_up|down)_proj$', k) else w
        for k,w in d.items()}

def stacked(d):
    "The inverse of `per_expert`"
    out,found = {},{}
    for k,w in d.items():
        m = re.fullmatch(r'(.*\bexperts\.)(\d+)\.(gate|up|down)_proj\.weight', k)
        if m:
            found.setdefault(m[1], {})[int(m[2]),m[3]] = w
        else:
            out[k] = w
    for p,x in found.items():
        n = range(len(x)//3)
        out[p+'gate_up_proj'] = torch.stack([
            torch.cat([x[e,'gate'],x[e,'up']])
            for e in n])
        out[p+'down_proj'] = torch.stack([x[e,'down'] for e in n])
    return out
