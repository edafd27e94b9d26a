"""A small Qwen3.5 with experts in PyTorch, by the real checkpoints' names, and its drafting head

The maths is that of Atlas's own pages: gated delta net (Yang et al. 2025), gated attention,
experts, and one more layer that predicts the token after the next one. Parameters are float32;
saved ones bfloat16.
"""
import json,math
from dataclasses import dataclass
from pathlib import Path
import torch
from safetensors.torch import load_file
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

    def attends(self, i:int)->bool: return (i+1)%self.every==0

    def _rope(self)->dict:
        pairs = self.rotary//2
        third = pairs//3
        return dict(
            mrope_interleaved=True,
            mrope_section=[pairs-2*third, third, third],
            rope_type='default',
            rope_theta=int(self.theta),
            partial_rotary_factor=self.rotary/self.head_dim)

    def _text(self)->dict:
        names = ('linear_attention','full_attention')
        kinds = [names[self.attends(i)] for i in range(self.layers)]
        return dict(
            model_type='qwen3_5_moe_text',
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            attention_bias=False,
            attn_output_gate=True,
            hidden_act='silu',
            rms_norm_eps=self.eps,
            full_attention_interval=self.every,
            layer_types=kinds,
            linear_num_key_heads=self.key_heads,
            linear_num_value_heads=self.value_heads,
            linear_key_head_dim=self.key_dim,
            linear_value_head_dim=self.value_dim,
            linear_conv_kernel_dim=self.conv,
            mamba_ssm_dtype='float32',
            mlp_only_layers=[],
            num_experts=self.experts,
            num_experts_per_tok=self.top_k,
            moe_intermediate_size=self.width,
            shared_expert_intermediate_size=self.width,
            router_aux_loss_coef=.01,
            max_position_embeddings=self.context,
            mtp_num_hidden_layers=1,
            mtp_use_dedicated_embeddings=False,
            eos_token_id=self.eos[0],
            dtype='bfloat16',
            rope_parameters=self._rope(),
            tie_word_embeddings=False)

    def to_json(self)->dict:
        "As `config.json`"
        return dict(
            architectures=['Qwen3_5MoeForConditionalGeneration'],
            model_type='qwen3_5_moe',
            dtype='bfloat16',
            text_config=self._text(),
            tie_word_embeddings=False)


def rms(x, eps:float):
    return x*torch.rsqrt(x.square().mean(-1, keepdim=True)+eps)


class Norm(nn.Module):
    "RMS norm whose weight counts from one"
    def __init__(self, n:int, eps:float):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(n))
        self.eps = eps

    def forward(self, x):
        return rms(x.float(), self.eps)*(1+self.weight)


class PlainNorm(Norm):
    "RMS norm whose weight is the factor, as the delta net has it"
    def __init__(self, n:int, eps:float):
        super().__init__(n, eps)
        nn.init.ones_(self.weight)

    def forward(self, x):
        return rms(x.float(), self.eps)*self.weight


def linear(n:int, m:int, std:float=.02)->nn.Linear:
    l = nn.Linear(n, m, bias=False)
    nn.init.normal_(l.weight, std=std)
    return l

# ------------------------------------------------------------------------------------------

def delta_steps(q, k, v, beta, g):
    """The delta rule, token by token: what the others are tested against

    q, k (B,T,h,dk), v (B,T,h,dv), beta, g (B,T,h); gives (B,T,h,dv)."""
    B,T,h,dk = q.shape
    S = q.new_zeros(B, h, dk, v.shape[-1])
    out = []
    for t in range(T):
        S = S*g[:,t].exp()[...,None,None]
        seen = torch.einsum('bhkv,bhk->bhv', S, k[:,t])
        d = (v[:,t]-seen)*beta[:,t,:,None]
        S = S+k[:,t,:,:,None]*d[:,:,None]
        out.append(torch.einsum('bhkv,bhk->bhv', S, q[:,t]))
    return torch.stack(out, 1)


def in_chunks(x, C:int):
    "(B,T,h,..) -> (B,h,N,C,..), zeros behind the last token"
    pad = -x.shape[1]%C
    others = (0,0)*(x.dim()-3)
    x = F.pad(x.transpose(1, 2), (*others, 0, pad))
    return x.unflatten(2, (-1,C))


def decays(g):
    "From token j to token i of a chunk (B,h,N,C,C), and the sum from its beginning (B,h,N,C)"
    G = g.cumsum(-1)
    C = G.shape[-1]
    lower = torch.ones(C, C, dtype=torch.bool, device=g.device).tril()
    D = G[...,:,None]-G[...,None,:]
    return D.masked_fill(~lower, -torch.inf).exp(),G


def corrections(k, v, beta, D, decay):
    "U and W of each chunk: its tokens write U - W S, where S is the state before it"
    A = (((k*beta)@k.mT)*D).tril(-1)
    right = torch.cat([v*beta, k*(beta*decay)], -1)
    solved = torch.linalg.solve_triangular(A, right, upper=False, unitriangular=True)
    return solved.split([v.shape[-1], k.shape[-1]], -1)


def delta_chunks(q, k, v, beta, g, C:int=64):
    "The same in chunks of C tokens: a triangular system in each, a product from state to state"
    T,dk = q.shape[1],q.shape[3]
    q,k,v,beta,g = (in_chunks(x, C) for x in (q, k, v, beta, g))
    D,G = decays(g)
    decay,last = G.exp()[...,None],G[...,-1:]
    U,W = corrections(k, v, beta[...,None], D, decay)
    K = k*(last-G).exp()[...,None]
    eye = torch.eye(dk, device=q.device)
    M = last.exp()[...,None]*eye-K.mT@W  # the state after a chunk is M S + N
    S = states_between(M, K.mT@U)
    o = (q*decay)@S+((q@k.mT)*D)@(U-W@S)
    return o.flatten(2, 3)[:,:,:T].transpose(1, 2)


def states_between(M, N):
    "The state before each chunk: M, N (B,h,chunks,..)"
    S = torch.zeros_like(N[:,:,0])
    states = []
    for n in range(M.shape[2]):
        states.append(S)
        S = M[:,:,n]@S+N[:,:,n]
    return torch.stack(states, 2)


def l2(x):
    return x*torch.rsqrt(x.square().sum(-1, keepdim=True)+1e-6)


class DeltaNet(nn.Module):
    "Gated delta net with a short convolution before and a gated norm after"
    def __init__(self, c:Config):
        super().__init__()
        self.c = c
        z = c.value_heads*c.value_dim
        C = 2*c.key_heads*c.key_dim+z
        self.in_proj_qkv = linear(c.hidden, C)
        self.in_proj_z = linear(c.hidden, z)
        self.in_proj_b = linear(c.hidden, c.value_heads)
        self.in_proj_a = linear(c.hidden, c.value_heads)
        self.conv1d = nn.Conv1d(C, C, c.conv, groups=C, bias=False)
        self.A_log = nn.Parameter(torch.empty(c.value_heads).uniform_(1, 16).log())
        dt = torch.empty(c.value_heads).uniform_(math.log(.001), math.log(.1)).exp()
        self.dt_bias = nn.Parameter(dt+torch.log(-torch.expm1(-dt)))  # softplus of it is dt
        self.norm = PlainNorm(c.value_dim, c.eps)
        self.out_proj = linear(z, c.hidden, .02/math.sqrt(2*c.layers))

    def _convolved(self, x):
        "Queries, keys and values as heads: (B,T,value_heads,d)"
        c,T = self.c,x.shape[1]
        past = F.pad(self.in_proj_qkv(x).float(), (0,0,c.conv-1,0))
        w = self.conv1d.weight[:,0]
        taps = (past[:,i:i+T]*w[:,i] for i in range(c.conv))
        y = F.silu(sum(taps))
        n = c.key_heads*c.key_dim
        q,k = self._heads(y[...,:n]),self._heads(y[...,n:2*n])
        return q,k,y[...,2*n:].unflatten(-1, (-1,c.value_dim))

    def _heads(self, x):
        "Queries or keys of length one, each as often as there are values for it"
        c = self.c
        x = l2(x.unflatten(-1, (-1,c.key_dim)))
        return x.repeat_interleave(c.value_heads//c.key_heads, 2)

    def forward(self, x):  # (B,T,H)
        c = self.c
        q,k,v = self._convolved(x)
        beta = self.in_proj_b(x).float().sigmoid()
        dt = F.softplus(self.in_proj_a(x).float()+self.dt_bias)
        g = -self.A_log.exp()*dt
        with torch.autocast(x.device.type, enabled=False):
            o = delta_chunks(q*c.key_dim**-.5, k, v, beta, g)  # (B,T,h,dv)
        z = self.in_proj_z(x).float().unflatten(-1, (-1,c.value_dim))
        return self.out_proj((self.norm(o)*F.silu(z)).flatten(2))

# ------------------------------------------------------------------------------------------

def turn(x, pos, c:Config):
    "Rotary positions on the first dimensions of each head: x (B,T,h,d), pos (T,)"
    even = torch.arange(0, c.rotary, 2, device=x.device).float()
    a = pos[:,None].float()*c.theta**(-even/c.rotary)
    cos,sin = a.cos()[:,None],a.sin()[:,None]
    half = c.rotary//2
    u,w,rest = x.split([half, half, x.shape[-1]-c.rotary], -1)
    return torch.cat([u*cos-w*sin, w*cos+u*sin, rest], -1)


class Attention(nn.Module):
    "Grouped heads with a gate on what they give"
    def __init__(self, c:Config):
        super().__init__()
        self.c = c
        q,kv = c.heads*c.head_dim,c.kv_heads*c.head_dim
        self.q_proj = linear(c.hidden, 2*q)
        self.k_proj = linear(c.hidden, kv)
        self.v_proj = linear(c.hidden, kv)
        self.o_proj = linear(q, c.hidden, .02/math.sqrt(2*c.layers))
        self.q_norm = Norm(c.head_dim, c.eps)
        self.k_norm = Norm(c.head_dim, c.eps)

    def forward(self,
        x, # (B,T,H)
        shift:int=0, # Position of the first row
        past=(), # (k, v) of as many rows: all look back on the first, each on its row of others
    ): # (B,T,H), and (k, v) of these rows
        c = self.c
        both = self.q_proj(x).unflatten(-1, (c.heads,-1))  # [query | gate] of each head
        q,gate = both.chunk(2, -1)
        pos = torch.arange(shift, shift+x.shape[1], device=x.device)
        k,v = self._keys(x, pos)
        q = turn(self.q_norm(q), pos, c).to(v.dtype).transpose(1, 2)  # (B,h,T,d)
        if past:
            o = beside(q, [*past, (k,v)])
        else:
            o = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        o = o.transpose(1, 2).flatten(2)
        return self.o_proj(o*gate.flatten(2).sigmoid()),(k,v)

    def _keys(self, x, pos):
        "Keys, turned, and values, each as often as there are queries for it: (B,h,T,d)"
        c = self.c
        k = self.k_proj(x).unflatten(-1, (c.kv_heads,-1))
        v = self.v_proj(x).unflatten(-1, (c.kv_heads,-1))
        k = turn(self.k_norm(k), pos, c).to(v.dtype)
        r = c.heads//c.kv_heads
        return (a.repeat_interleave(r, 2).transpose(1, 2) for a in (k, v))


def beside(q, pairs:list):
    "Attention of rows that see what came up to their place, and of other pairs only their own row"
    (k0,v0),*own = pairs
    T,scale = q.shape[2],q.shape[-1]**-.5
    lower = torch.ones(T, T, dtype=torch.bool, device=q.device).tril()
    scores = (q@k0.mT*scale).masked_fill(~lower, -torch.inf)
    more = [(q*k).sum(-1, keepdim=True)*scale for k,_ in own]
    p = torch.cat([scores, *more], -1).float().softmax(-1).to(q.dtype)
    o = p[...,:T]@v0
    for i,(_,v) in enumerate(own):
        o = o+p[...,T+i:T+i+1]*v
    return o

# ------------------------------------------------------------------------------------------

class MLP(nn.Module):
    def __init__(self, c:Config):
        super().__init__()
        self.gate_proj = linear(c.hidden, c.width)
        self.up_proj = linear(c.hidden, c.width)
        self.down_proj = linear(c.width, c.hidden, .02/math.sqrt(2*c.layers))

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x))*self.up_proj(x))


class Experts(nn.Module):
    def __init__(self, c:Config):
        super().__init__()
        up = torch.randn(c.experts, 2*c.width, c.hidden)
        down = torch.randn(c.experts, c.hidden, c.width)
        self.gate_up_proj = nn.Parameter(up*.02)
        self.down_proj = nn.Parameter(down*.02/math.sqrt(2*c.layers))


class MoE(nn.Module):
    "Experts, all of them computed as one wide MLP, and those that were not picked weighted by zero"
    def __init__(self, c:Config):
        super().__init__()
        self.c = c
        self.gate = linear(c.hidden, c.experts)
        self.experts = Experts(c)
        self.shared_expert = MLP(c)
        self.shared_expert_gate = linear(c.hidden, 1)

    def _route(self, x):
        "Weights of the experts (B,T,E), and the loss that keeps them equally busy"
        c = self.c
        with torch.autocast(x.device.type, enabled=False):
            p = F.linear(x.float(), self.gate.weight).softmax(-1)  # (B,T,E)
        top,ids = p.topk(c.top_k, -1)
        top = top/top.sum(-1, keepdim=True)
        w = torch.zeros_like(p).scatter(-1, ids, top)
        busy = (w>0).float().mean((0, 1))/c.top_k
        return w,c.experts*(busy*p.mean((0, 1))).sum()

    def forward(self, x):  # (B,T,H), and the balance
        e = self.experts
        w,balance = self._route(x)
        up = F.linear(x, e.gate_up_proj.flatten(0, 1))
        up = up.unflatten(-1, (self.c.experts,2,-1))  # (B,T,E,2,width)
        gate,up = up.unbind(-2)
        h = F.silu(gate)*up*w[...,None].to(up.dtype)
        down = e.down_proj.permute(1, 0, 2).flatten(1)
        y = F.linear(h.flatten(-2), down)
        return y+self.shared_expert_gate(x).sigmoid()*self.shared_expert(x),balance


class Block(nn.Module):
    "A layer: the mixer and the experts, each with its norm before it"
    def __init__(self, c:Config, attends:bool):
        super().__init__()
        self.attends = attends
        self.input_layernorm = Norm(c.hidden, c.eps)
        self.post_attention_layernorm = Norm(c.hidden, c.eps)
        if attends:
            self.self_attn = Attention(c)
        else:
            self.linear_attn = DeltaNet(c)
        self.mlp = MoE(c)

    def forward(self, x, shift:int=0, past=()):  # The stream, keys and values, balance
        h,kv = self.input_layernorm(x),None
        if self.attends:
            y,kv = self.self_attn(h, shift, past)
        else:
            y = self.linear_attn(h)
        x = x+y
        y,balance = self.mlp(self.post_attention_layernorm(x))
        return x+y,kv,balance


class MTP(nn.Module):
    "The drafting head: a hidden state and the token after it make the state of the next"
    def __init__(self, c:Config):
        super().__init__()
        self.fc = linear(2*c.hidden, c.hidden)
        self.pre_fc_norm_embedding = Norm(c.hidden, c.eps)
        self.pre_fc_norm_hidden = Norm(c.hidden, c.eps)
        self.norm = Norm(c.hidden, c.eps)
        self.layers = nn.ModuleList([Block(c, True)])

    def forward(self, e, h, shift:int=0, past=()):
        both = torch.cat([self.pre_fc_norm_embedding(e), self.pre_fc_norm_hidden(h)], -1)
        x,kv,balance = self.layers[0](self.fc(both), shift, past)
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
        self.c = c
        self.model = Inner(c)
        self.lm_head = linear(c.hidden, c.vocab)
        self.mtp = MTP(c)

    def embed(self, ids):
        return self.model.language_model.embed_tokens(ids)

    def forward(self, ids):  # States after the last norm, (B,T,H); mean balance of the layers
        t,balance = self.model.language_model,0.
        x = self.embed(ids)
        for l in t.layers:
            x,_,b = l(x)
            balance = balance+b
        return t.norm(x),balance/len(t.layers)

    def drafts(self,
        h, # (B,T,H): hidden states of positions 0, 1, ...
        ids, # (B,T+K): `ids[:,i+1+s]` is what step s of position i is shown
        K:int, # Steps
    ): # K times states (B,T,H), for the token two, three, ... after each position; balance
        "Drafts of every position: a later step looks back on the drafts before it, too"
        T,balance = h.shape[1],0.
        out,past = [],[]
        for s in range(K):
            shown = self.embed(ids[:,1+s:1+s+T])
            h,kv,b = self.mtp(shown, h, s, past)
            past.append(kv)
            out.append(h)
            balance = balance+b
        return out,balance/K

    def head(self, h):
        return self.lm_head(h)

    def loss(self,
        ids, # (B,T+1+drafts)
        drafts:int=2,
        weights=(.3,.2,.1), # Of the drafts
        aux:float=.01, # Of the balance
    ): # The loss to learn by, its parts, the balance
        "Cross entropy of the next token and, weighted, of the drafts after it"
        T = ids.shape[1]-1-drafts
        h,balance = self(ids[:,:T])
        main = self._entropy(h, ids[:,1:1+T])
        states,more = self.drafts(h, ids, drafts) if drafts else ([],0.)
        parts = [self._entropy(s, ids[:,2+i:2+i+T]) for i,s in enumerate(states)]
        weighted = sum(w*p for w,p in zip(weights, parts))
        total = main+weighted+aux*(balance+.3*more)
        return total,[main.detach(), *(p.detach() for p in parts)],balance

    def _entropy(self, h, ids):
        logits = self.head(h).float()
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


NAMES = dict( # Of the sizes in config.json
    vocab='vocab_size',
    hidden='hidden_size',
    layers='num_hidden_layers',
    every='full_attention_interval',
    heads='num_attention_heads',
    kv_heads='num_key_value_heads',
    head_dim='head_dim',
    key_heads='linear_num_key_heads',
    value_heads='linear_num_value_heads',
    key_dim='linear_key_head_dim',
    value_dim='linear_value_head_dim',
    experts='num_experts',
    top_k='num_experts_per_tok',
    width='moe_intermediate_size',
    context='max_position_embeddings')


def load(folder:Path, device:str='cpu')->Model:
    "The model of a folder"
    t = json.loads((Path(folder)/'config.json').read_text())['text_config']
    rotary = int(t['head_dim']*t['rope_parameters']['partial_rotary_factor'])
    sizes = {k:t[v] for k,v in NAMES.items()}
    m = Model(Config(**sizes, rotary=rotary))
    tensors = load_file(Path(folder)/'model.safetensors')
    m.load_state_dict({k:v.float() for k,v in tensors.items()})
    return m.to(device)
