"""A small Qwen3.5 with experts in PyTorch, with the names of the real checkpoints, and its drafting head

The maths is that of Atlas's own pages: gated delta net (Yang et al. 2025), gated attention, experts, and one more layer
that predicts the token after the next one. Parameters are float32; the saved ones bfloat16.
"""
import math
from dataclasses import dataclass
import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Config:
    "Sizes; those of the model that is shipped"
    vocab:int=2048
    hidden:int=256
    layers:int=8
    every:int=4 # Each so many-th layer attends
    heads:int=4
    kv_heads:int=2
    head_dim:int=64
    rotary:int=16 # Dimensions of a head that turn
    theta:float=1e7
    key_heads:int=2
    value_heads:int=4
    key_dim:int=64
    value_dim:int=64
    conv:int=4
    experts:int=12
    top_k:int=4
    width:int=32 # Of an expert, and of the shared one
    eps:float=1e-6
    context:int=4096
    eos:tuple=(0,0) # <|endoftext|>, <|im_end|>

    def attends(self, i): return (i+1)%self.every==0

    def to_json(self)->dict:
        "As `config.json`"
        kinds = ['full_attention' if self.attends(i) else 'linear_attention' for i in range(self.layers)]
        pairs = self.rotary//2
        third = pairs//3
        rope = dict(mrope_interleaved=True, mrope_section=[pairs-2*third, third, third], rope_type='default', rope_theta=int(self.theta),
            partial_rotary_factor=self.rotary/self.head_dim)
        text = dict(model_type='qwen3_5_moe_text', vocab_size=self.vocab, hidden_size=self.hidden, num_hidden_layers=self.layers,
            num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, head_dim=self.head_dim, attention_bias=False,
            attn_output_gate=True, hidden_act='silu', rms_norm_eps=self.eps, full_attention_interval=self.every, layer_types=kinds,
            linear_num_key_heads=self.key_heads, linear_num_value_heads=self.value_heads, linear_key_head_dim=self.key_dim,
            linear_value_head_dim=self.value_dim, linear_conv_kernel_dim=self.conv, mamba_ssm_dtype='float32', mlp_only_layers=[],
            num_experts=self.experts, num_experts_per_tok=self.top_k, moe_intermediate_size=self.width,
            shared_expert_intermediate_size=self.width, router_aux_loss_coef=.01, max_position_embeddings=self.context,
            mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, eos_token_id=self.eos[0], dtype='bfloat16',
            rope_parameters=rope, tie_word_embeddings=False)
        return dict(architectures=['Qwen3_5MoeForConditionalGeneration'], model_type='qwen3_5_moe', dtype='bfloat16', text_config=text,
            tie_word_embeddings=False)


def rms(x, eps): return x*torch.rsqrt(x.square().mean(-1, keepdim=True)+eps)

class Norm(nn.Module):
    "RMS norm whose weight counts from one"
    def __init__(self, n, eps):
        super().__init__()
        self.weight,self.eps = nn.Parameter(torch.zeros(n)),eps
    def forward(self, x): return rms(x.float(), self.eps)*(1+self.weight)

class PlainNorm(Norm):
    "RMS norm whose weight is the factor, as the delta net has it"
    def __init__(self, n, eps):
        super().__init__(n, eps)
        nn.init.ones_(self.weight)
    def forward(self, x): return rms(x.float(), self.eps)*self.weight

def linear(n, m, std=.02):
    l = nn.Linear(n, m, bias=False)
    nn.init.normal_(l.weight, std=std)
    return l

# ---------------------------------------------------------------------------------------------------------------------

def delta_steps(q, k, v, beta, g):
    "The delta rule, token by token: q, k [B,T,h,dk], v [B,T,h,dv], beta, g [B,T,h]; what the others are tested against"
    B,T,h,dk = q.shape
    S,out = q.new_zeros(B, h, dk, v.shape[-1]),[]
    for t in range(T):
        S = S*g[:,t].exp()[...,None,None]
        d = (v[:,t]-torch.einsum('bhkv,bhk->bhv', S, k[:,t]))*beta[:,t,:,None]
        S = S+k[:,t,:,:,None]*d[:,:,None]
        out.append(torch.einsum('bhkv,bhk->bhv', S, q[:,t]))
    return torch.stack(out, 1)

def delta_chunks(q, k, v, beta, g, C=64):
    "The same in chunks of C tokens: a triangular system within each, and one product a chunk from state to state"
    B,T,h,dk = q.shape
    pad = -T%C
    def cut(x): # [B,T,h,..] -> [B,h,N,C,..]
        x = F.pad(x.transpose(1, 2), (0,0)*(x.dim()-3)+(0,pad))
        return x.unflatten(2, (-1,C))
    q,k,v,beta,g = map(cut, (q,k,v,beta,g))
    G = g.cumsum(-1)  # (B,h,N,C)
    lower = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    D = (G[...,:,None]-G[...,None,:]).masked_fill(~lower, -torch.inf).exp()  # decay from token j to token i
    A = (((k*beta[...,None])@k.mT)*D).tril(-1)
    right = torch.cat([v*beta[...,None], k*(beta*G.exp())[...,None]], -1)
    U,W = torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True).split([v.shape[-1],dk], -1)
    last = G[...,-1:]
    K = k*(last-G).exp()[...,None]
    M = last.exp()[...,None]*torch.eye(dk, device=q.device)-K.mT@W  # the state after a chunk is M S + N
    N = K.mT@U
    S,states = torch.zeros_like(N[:,:,0]),[]
    for n in range(M.shape[2]):
        states.append(S)
        S = M[:,:,n]@S+N[:,:,n]
    S = torch.stack(states, 2)
    new = U-W@S
    o = (q*G.exp()[...,None])@S+((q@k.mT)*D)@new
    return o.flatten(2, 3)[:,:,:T].transpose(1, 2)

def l2(x): return x*torch.rsqrt(x.square().sum(-1, keepdim=True)+1e-6)

class DeltaNet(nn.Module):
    "Gated delta net with a short convolution before and a gated norm after"
    def __init__(self, c:Config):
        super().__init__()
        self.c = c
        H,z,vh = c.hidden,c.value_heads*c.value_dim,c.value_heads
        C = 2*c.key_heads*c.key_dim+z
        self.in_proj_qkv,self.in_proj_z = linear(H, C),linear(H, z)
        self.in_proj_b,self.in_proj_a = linear(H, vh),linear(H, vh)
        self.conv1d = nn.Conv1d(C, C, c.conv, groups=C, bias=False)
        self.A_log = nn.Parameter(torch.empty(vh).uniform_(1, 16).log())
        dt = torch.empty(vh).uniform_(math.log(.001), math.log(.1)).exp()
        self.dt_bias = nn.Parameter(dt+torch.log(-torch.expm1(-dt)))  # softplus of it is dt
        self.norm = PlainNorm(c.value_dim, c.eps)
        self.out_proj = linear(z, H, .02/math.sqrt(2*c.layers))

    def forward(self, x):
        c,(B,T,_) = self.c,x.shape
        qkv,w = self.in_proj_qkv(x).float(),self.conv1d.weight[:,0]
        past = F.pad(qkv, (0,0,c.conv-1,0))
        y = F.silu(sum(past[:,i:i+T]*w[:,i] for i in range(c.conv)))
        n = c.key_heads*c.key_dim
        q,k,v = y.split([n,n,y.shape[-1]-2*n], -1)
        r = c.value_heads//c.key_heads
        q,k = (l2(a.unflatten(-1, (c.key_heads,c.key_dim))).repeat_interleave(r, 2) for a in (q,k))
        v = v.unflatten(-1, (c.value_heads,c.value_dim))
        beta = self.in_proj_b(x).float().sigmoid()
        g = -self.A_log.exp()*F.softplus(self.in_proj_a(x).float()+self.dt_bias)
        with torch.autocast(x.device.type, enabled=False): o = delta_chunks(q*c.key_dim**-.5, k, v, beta, g)
        z = self.in_proj_z(x).float().unflatten(-1, (c.value_heads,c.value_dim))
        return self.out_proj((self.norm(o)*F.silu(z)).flatten(2))

# ---------------------------------------------------------------------------------------------------------------------

def turn(x, pos, c:Config):
    "Rotary positions on the first dimensions of each head: x [B,T,h,d], pos [T]"
    f = c.theta**(-torch.arange(0, c.rotary, 2, device=x.device).float()/c.rotary)
    a = pos[:,None].float()*f
    cos,sin = a.cos()[:,None],a.sin()[:,None]
    half = c.rotary//2
    u,w,rest = x.split([half,half,x.shape[-1]-c.rotary], -1)
    return torch.cat([u*cos-w*sin, w*cos+u*sin, rest], -1)

class Attention(nn.Module):
    "Grouped heads with a gate on what they give"
    def __init__(self, c:Config):
        super().__init__()
        self.c = c
        q,kv = c.heads*c.head_dim,c.kv_heads*c.head_dim
        self.q_proj,self.k_proj,self.v_proj = linear(c.hidden, 2*q),linear(c.hidden, kv),linear(c.hidden, kv)
        self.o_proj = linear(q, c.hidden, .02/math.sqrt(2*c.layers))
        self.q_norm,self.k_norm = Norm(c.head_dim, c.eps),Norm(c.head_dim, c.eps)

    def forward(self,
        x, # [B,T,H]
        shift:int=0, # Position of the first row
        past=(), # (k, v) of rows of the same length: the first is looked back on, each other one is seen by its own row alone
    ): # [B,T,H], and (k, v) of these rows
        c = self.c
        q,gate = self.q_proj(x).unflatten(-1, (c.heads,2*c.head_dim)).chunk(2, -1)  # [query | gate] of each head
        k,v = (p(x).unflatten(-1, (c.kv_heads,c.head_dim)) for p in (self.k_proj,self.v_proj))
        pos = torch.arange(shift, shift+x.shape[1], device=x.device)
        r = c.heads//c.kv_heads
        q,k = turn(self.q_norm(q), pos, c).to(v.dtype),turn(self.k_norm(k), pos, c).to(v.dtype)
        q,k,v = (a.transpose(1, 2) for a in (q, k.repeat_interleave(r, 2), v.repeat_interleave(r, 2)))  # (B,h,T,d)
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True) if not past else beside(q, [*past, (k,v)])
        return self.o_proj(o.transpose(1, 2).flatten(2)*gate.flatten(2).sigmoid()),(k,v)

def beside(q, pairs):
    "Attention of rows that see what came up to their place, and of the other pairs only their own row"
    (k0,v0),*own = pairs
    T,scale = q.shape[2],q.shape[-1]**-.5
    lower = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    scores = (q@k0.mT*scale).masked_fill(~lower, -torch.inf)
    more = [(q*k).sum(-1, keepdim=True)*scale for k,_ in own]
    p = torch.cat([scores, *more], -1).float().softmax(-1).to(q.dtype)
    o = p[...,:T]@v0
    for i,(_,v) in enumerate(own): o = o+p[...,T+i:T+i+1]*v
    return o

# ---------------------------------------------------------------------------------------------------------------------

class MLP(nn.Module):
    def __init__(self, c:Config):
        super().__init__()
        self.gate_proj,self.up_proj = linear(c.hidden, c.width),linear(c.hidden, c.width)
        self.down_proj = linear(c.width, c.hidden, .02/math.sqrt(2*c.layers))
    def forward(self, x): return self.down_proj(F.silu(self.gate_proj(x))*self.up_proj(x))

class Experts(nn.Module):
    def __init__(self, c:Config):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(c.experts, 2*c.width, c.hidden)*.02)
        self.down_proj = nn.Parameter(torch.randn(c.experts, c.hidden, c.width)*.02/math.sqrt(2*c.layers))

class MoE(nn.Module):
    "Experts, all of them computed as one wide MLP, and those that were not picked weighted by zero"
    def __init__(self, c:Config):
        super().__init__()
        self.c = c
        self.gate,self.experts = linear(c.hidden, c.experts),Experts(c)
        self.shared_expert,self.shared_expert_gate = MLP(c),linear(c.hidden, 1)

    def forward(self, x): # [B,T,H], and the loss that keeps experts equally busy
        c,e = self.c,self.experts
        with torch.autocast(x.device.type, enabled=False): p = F.linear(x.float(), self.gate.weight).softmax(-1)  # (B,T,E)
        top,ids = p.topk(c.top_k, -1)
        w = torch.zeros_like(p).scatter(-1, ids, top/top.sum(-1, keepdim=True))
        busy = (w>0).float().mean((0,1))/c.top_k
        balance = c.experts*(busy*p.mean((0,1))).sum()
        up = F.linear(x, e.gate_up_proj.flatten(0, 1)).unflatten(-1, (c.experts,2,c.width))
        h = F.silu(up[...,0,:])*up[...,1,:]*w[...,None].to(up.dtype)
        y = F.linear(h.flatten(-2), e.down_proj.permute(1, 0, 2).flatten(1))
        return y+self.shared_expert_gate(x).sigmoid()*self.shared_expert(x),balance

class Block(nn.Module):
    "A layer: the mixer and the experts, each with its norm before it"
    def __init__(self, c:Config, attends:bool):
        super().__init__()
        self.input_layernorm,self.post_attention_layernorm = Norm(c.hidden, c.eps),Norm(c.hidden, c.eps)
        if attends: self.self_attn = Attention(c)
        else: self.linear_attn = DeltaNet(c)
        self.attends,self.mlp = attends,MoE(c)

    def forward(self, x, shift:int=0, past=()): # The stream, keys and values, balance
        h,kv = self.input_layernorm(x),None
        if self.attends: y,kv = self.self_attn(h, shift, past)
        else: y = self.linear_attn(h)
        x = x+y
        y,balance = self.mlp(self.post_attention_layernorm(x))
        return x+y,kv,balance

class MTP(nn.Module):
    "The drafting head: a hidden state and the token after it make the state of the next"
    def __init__(self, c:Config):
        super().__init__()
        self.fc = linear(2*c.hidden, c.hidden)
        self.pre_fc_norm_embedding,self.pre_fc_norm_hidden,self.norm = (Norm(c.hidden, c.eps) for _ in range(3))
        self.layers = nn.ModuleList([Block(c, True)])

    def forward(self, e, h, shift=0, past=()):
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(e), self.pre_fc_norm_hidden(h)], -1))
        x,kv,balance = self.layers[0](x, shift, past)
        return self.norm(x),kv,balance

class Text(nn.Module):
    def __init__(self, c:Config):
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab, c.hidden)
        nn.init.normal_(self.embed_tokens.weight, std=.02)
        self.layers = nn.ModuleList(Block(c, c.attends(i)) for i in range(c.layers))
        self.norm = Norm(c.hidden, c.eps)

class Inner(nn.Module):
    def __init__(self, c:Config):
        super().__init__()
        self.language_model = Text(c)

class Model(nn.Module):
    "All of it; the tree of modules is the checkpoint's tree of names"
    def __init__(self, c:Config):
        super().__init__()
        self.c,self.model,self.lm_head,self.mtp = c,Inner(c),linear(c.hidden, c.vocab),MTP(c)

    def embed(self, ids): return self.model.language_model.embed_tokens(ids)

    def forward(self, ids): # Hidden states after the last norm, [B,T,H], and the mean balance of the layers
        t,balance = self.model.language_model,0.
        x = self.embed(ids)
        for l in t.layers:
            x,_,b = l(x)
            balance = balance+b
        return t.norm(x),balance/len(t.layers)

    def drafts(self,
        h, # [B,T,H]: hidden states of positions 0, 1, ...
        ids, # [B,T+K]: `ids[:,i+1+s]` is what step s of position i is shown
        K:int, # Steps
    ): # K times the head's states [B,T,H] for the token two, three, ... after each position; balance
        "Drafts of every position: the first step looks back on all pairs, a later one also on its own drafts"
        T,out,past,balance = h.shape[1],[],[],0.
        for s in range(K):
            h,kv,b = self.mtp(self.embed(ids[:,1+s:1+s+T]), h, s, past)
            past.append(kv)
            out.append(h)
            balance = balance+b
        return out,balance/K

    def head(self, h): return self.lm_head(h)

    def loss(self, ids, drafts:int=2, weights=(.3,.2,.1), aux=.01): # ids [B,T+1+drafts]; the loss to learn by, and its parts
        "Cross entropy of the next token and, weighted, of the drafts after it"
        V,T = self.c.vocab,ids.shape[1]-1-drafts
        h,balance = self(ids[:,:T])
        def ce(h, shift): return F.cross_entropy(self.head(h).float().flatten(0, 1), ids[:,shift:shift+T].flatten())
        main = ce(h, 1)
        states,more = self.drafts(h, ids, drafts) if drafts else ([],0.)
        parts = [ce(s, 2+i) for i,s in enumerate(states)]
        total = main+sum(w*p for w,p in zip(weights, parts))+aux*(balance+.3*more)
        return total,[main.detach(), *(p.detach() for p in parts)],balance
