"""Atlas's demo model in PyTorch, for thousands of answers at a time: one rectangle of rows, padded on the left"""
import torch
import torch.nn.functional as F


class Writer:
    "Weights of a Llama that Atlas has loaded on the host; rows share columns, so a step writes one column of the cache"
    def __init__(self, llm, device:str):
        c,a = llm.config,llm.config.attention
        self.heads,self.kv_heads,self.head_dim = a.num_heads,a.num_kv_heads,a.head_dim
        self.eps,self.device,self.eos = c.norm_eps,device,list(llm.eos_ids)
        self.dtype = torch.bfloat16 if device!='cpu' else torch.float32
        self.embed = self._take(llm.model.embed_tokens)
        self.head = self._take(llm.model.lm_head)
        self.norm = self._take(llm.model.norm)
        self.layers = [self._layer(l) for l in llm.model.layers]
        speeds = a.rope.theta**(-torch.arange(0, self.head_dim, 2, device=device)/self.head_dim)
        turns = torch.arange(c.max_seq_len, device=device)[:,None]*speeds
        self.cos,self.sin = turns.cos(),turns.sin()  # (positions, head_dim/2)

    def _take(self, part):
        return torch.from_numpy(part.weight).to(self.device, self.dtype)

    def _layer(self, l)->dict:
        return dict(before=self._take(l.mixer_norm), qkv=self._take(l.mixer.qkv_proj), o=self._take(l.mixer.o_proj),
            between=self._take(l.mlp_norm), up=self._take(l.mlp.gate_up_proj), down=self._take(l.mlp.down_proj))

    def cache(self, rows:int, columns:int)->list:
        "Keys and values of all layers, (rows, kv_heads, columns, head_dim) each"
        shape = (rows, self.kv_heads, columns, self.head_dim)
        return [torch.zeros(2, *shape, device=self.device, dtype=self.dtype) for _ in self.layers]

    def _turn(self, x, pos):
        "Rotary positions: x (B,h,T,d), pos (B,T)"
        cos,sin = self.cos[pos][:,None].to(x.dtype),self.sin[pos][:,None].to(x.dtype)
        u,w = x.chunk(2, -1)
        return torch.cat([u*cos-w*sin, w*cos+u*sin], -1)

    def forward(self,
        ids, # (B,T)
        pos, # (B,T): places within the row's own text
        columns, # (T,): where in the cache
        mask, # (B,1,T,columns): what each place sees
        cache:list, # Of these rows
    ): # (B,V): logits of the last place
        x = F.embedding(ids, self.embed)
        B,T = ids.shape
        sizes = [n*self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        for w,past in zip(self.layers, cache):
            h = F.rms_norm(x, x.shape[-1:], w['before'], self.eps)
            parts = F.linear(h, w['qkv']).split(sizes, -1)
            q,k,v = (p.view(B, T, -1, self.head_dim).transpose(1, 2) for p in parts)  # (B,h,T,d)
            past[0].index_copy_(2, columns, self._turn(k, pos))
            past[1].index_copy_(2, columns, v)
            o = self._attend(self._turn(q, pos), past, mask)
            x = x+F.linear(o.transpose(1, 2).reshape(B, T, -1), w['o'])
            h = F.rms_norm(x, x.shape[-1:], w['between'], self.eps)
            gate,up = F.linear(h, w['up']).chunk(2, -1)
            x = x+F.linear(F.silu(gate)*up, w['down'])
        return F.linear(F.rms_norm(x[:,-1], x.shape[-1:], self.norm, self.eps), self.head)

    def _attend(self, q, past, mask):
        "One new place: the query heads of a group are rows of one product. Many: keys and values are repeated"
        B,_,T,d = q.shape
        if T==1:
            q = q.view(B, self.kv_heads, -1, d)
            return F.scaled_dot_product_attention(q, past[0], past[1], mask).reshape(B, -1, 1, d)
        k,v = (p.repeat_interleave(self.heads//self.kv_heads, 1) for p in past)
        return F.scaled_dot_product_attention(q, k, v, mask)

    @torch.inference_mode()
    def write(self,
        prompts:list[list[int]],
        most:int, # Tokens at most
        temperature:float=.7,
        min_p:float=.08, # Least part of the likeliest token's probability
        part:int=256, # Rows of a prefill
    )->list[tuple]: # Ids before the end, whether it ended, mean log probability of its tokens
        "Answers to all prompts at once"
        B,P = len(prompts),max(map(len, prompts))
        end = P+most
        ids = torch.tensor([[0]*(P-len(p))+list(p) for p in prompts], device=self.device)
        pad = torch.tensor([P-len(p) for p in prompts], device=self.device)
        place = torch.arange(end, device=self.device)
        cache = self.cache(B, end)
        logits = []
        for i in range(0, B, part):
            own = pad[i:i+part,None]
            sees = (place[None,:]>=own)[:,None,None,:]&(place[None,:]<=place[:P,None])[None,None]
            sees |= (place[None,:]==place[:P,None])[None,None]  # padding sees itself: no empty sum
            pos = (place[:P]-own).clamp(min=0)
            rows = [p[:,i:i+part] for p in cache]
            own_cache = [r.clone() for r in rows]
            logits.append(self.forward(ids[i:i+part], pos, place[:P], sees, own_cache))
            for r,o in zip(rows, own_cache): r.copy_(o)
        step = Step(self, pad, P, cache, temperature, min_p)
        return step.run(torch.cat(logits), most)


class Step:
    "One column after the other, as a graph on a card"
    def __init__(self, writer:Writer, pad, P:int, cache:list, temperature:float, min_p:float):
        self.w,self.pad,self.P,self.cache = writer,pad,P,cache
        self.temperature,self.min_p = temperature,min_p
        B = len(pad)
        self.at = torch.full((1,), P, device=pad.device)
        self.ids = torch.zeros(B, 1, dtype=torch.int64, device=pad.device)
        self.logp = torch.zeros(B, device=pad.device)
        self.place = torch.arange(cache[0].shape[3], device=pad.device)

    def sample(self, logits):
        logits = logits.float()
        p = (logits/self.temperature).softmax(-1)
        p = p*(p>=self.min_p*p.amax(-1, keepdim=True))
        noise = torch.empty_like(p).exponential_()
        self.ids.copy_((p/noise).argmax(-1, keepdim=True))
        self.logp.copy_((logits.gather(1, self.ids)[:,0]-logits.logsumexp(-1)))

    def forward(self):
        mask = ((self.place>=self.pad[:,None])&(self.place<=self.at))[:,None,None]
        pos = self.at-self.pad[:,None]
        self.sample(self.w.forward(self.ids, pos, self.at, mask, self.cache))
        self.at += 1

    def run(self, logits, most:int)->list[tuple]:
        self.sample(logits)
        step = self.forward if self.w.device=='cpu' else self._graph()
        said,logp = [self.ids[:,0].clone()],[self.logp.clone()]
        ended = torch.zeros_like(said[0], dtype=torch.bool)
        eos = torch.tensor(self.w.eos, device=ended.device)
        for i in range(1, most):
            ended |= torch.isin(said[-1], eos)
            if i%16==0 and ended.float().mean()>.98: break
            step()
            said.append(self.ids[:,0].clone())
            logp.append(self.logp.clone())
        return self._cut(torch.stack(said, 1).cpu().numpy(), torch.stack(logp, 1).cpu().numpy())

    def _graph(self):
        "Three steps to warm up are taken back; the fourth is recorded"
        first = self.ids.clone()
        for _ in range(2): self.forward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph): self.forward()
        self.ids.copy_(first)
        self.at.fill_(self.P)
        return graph.replay

    def _cut(self, said, logp)->list[tuple]:
        out = []
        for ids,l in zip(said.tolist(), logp):
            n = next((i for i,t in enumerate(ids) if t in self.w.eos), len(ids))
            out.append((ids[:n], n<len(ids), float(l[:max(n, 1)].mean())))
        return out
