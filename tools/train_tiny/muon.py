"""Muon (Jordan et al. 2024): momentum made orthogonal, for matrices; Adam for the rest"""
import numpy as np
import torch
from model import Model


def orthogonal(g, steps:int=5):
    "Matrices (..,n,m) with singular values near one, by Newton and Schulz's iteration"
    x = g.to(torch.bfloat16 if g.is_cuda else torch.float32)
    tall = x.shape[-2]>x.shape[-1]
    if tall:
        x = x.mT
    x = x/(x.norm(dim=(-2,-1), keepdim=True)+1e-7)
    for _ in range(steps):
        a = x@x.mT
        x = 3.4445*x+(-4.775*a+2.0315*a@a)@x
    return (x.mT if tall else x).float()


class Muon:
    "Momentum made orthogonal; matrices of one shape go together"
    def __init__(self, params, lr:float, momentum:float=.95, decay:float=.05):
        self.lr,self.momentum,self.decay = lr,momentum,decay
        self.groups = {}
        for p in params:
            shape = tuple(p.shape[-2:])
            self.groups.setdefault(shape, []).append(p)
        self.sums = {shape:self._zeros(shape, ps) for shape,ps in self.groups.items()}

    def _zeros(self, shape:tuple, ps:list):
        matrices = sum(p.numel() for p in ps)//(shape[0]*shape[1])
        return torch.zeros(matrices, *shape, device=ps[0].device)

    @torch.no_grad()
    def step(self, scale:float):
        "`scale`: of the learning rate"
        for shape,ps in self.groups.items():
            g = torch.cat([p.grad.reshape(-1, *shape) for p in ps])
            m = self.sums[shape].lerp_(g, 1-self.momentum)
            size = max(1, shape[0]/shape[1])**.5
            u = orthogonal(g.lerp(m, self.momentum))*(self.lr*scale*size)
            parts = u.split([p.numel()//(shape[0]*shape[1]) for p in ps])
            for p,part in zip(ps, parts):
                p.mul_(1-self.lr*scale*self.decay).sub_(part.reshape(p.shape))


def is_big(name:str, p)->bool:
    "Is it a large matrix of a layer?"
    outside = any(k in name for k in ('embed','lm_head','conv1d'))
    return p.dim()>=2 and min(p.shape[-2:])>=32 and not outside


def optimizers(m:Model, a):
    "Muon for large matrices between the layers, Adam for embedding, head, routers and vectors"
    named = list(m.named_parameters())
    big = [p for n,p in named if is_big(n, p)]
    rest = [p for n,p in named if not is_big(n, p)]
    settings = dict(betas=(.9,.95), eps=1e-10, weight_decay=0., fused=rest[0].is_cuda)
    return Muon(big, a.lr),torch.optim.AdamW(rest, lr=a.adam_lr, **settings)


def schedule(done:float)->float:
    "Factor of the learning rate after a part `done` of the run: up, level, and down as a cosine"
    if done<.02:
        return .02+done/.02*.98
    if done<.3:
        return 1.
    down = min(1., (done-.3)/.7)
    return .02+.98*(.5+.5*np.cos(np.pi*down))
