"""Atlas's demo model in PyTorch, for thousands of answers at a time, padded on the left"""
import torch
import torch.nn.functional as F


class Writer:
    """Weights of a Llama that Atlas has loaded on the host

    Rows share columns, so a step writes one column of the cache."""
    def __init__(self, llm, device:str):
        c,a = llm.config,llm.config.attention
        self.heads,self.kv_heads,self.head_dim = a.num_heads,a.num_kv_heads,a.head_dim
        self.eps,self.device,self.eos = c.norm_eps,device,list(llm.eos_ids)
        self.dtype = torch.bfloat16 if device!='cpu' else torch.float32
        self.embed = self._take(llm.model.embed_tokens)
        self.head = self._take(llm.model.lm_head)
        self.norm = self._take(llm.model.norm)
        self.layers = [self._layer(l) for l in llm.model.layers]
        even = torch.arange(0, self.head_dim, 2, device=device)
        speeds = a.rope.theta**(-even/self.head_dim)
        turns = torch.arange(c.max_seq_len, device=device)[:,None]*speeds
        self.cos,self.sin = turns.cos(),turns.sin()  # (positions, head_dim/2)

    def _take(self, part):
        return torch.from_numpy(part.weight).to(self.device, self.dtype)

    def _layer(self, l)->dict:
        return dict(
            before=self._take(l.mixer_norm),
            qkv=self._take(l.mixer.qkv_proj),
            o=self._take(l.mixer.o_proj),
            between=self._take(l.mlp_norm),
            up=self._take(l.mlp.gate_up_proj),
            down=self._take(l.mlp.down_proj))

    def cache(self, rows:int, columns:int)->list:
        "Keys and values of all layers, (2, rows, kv_heads, columns, head_dim) each"
        shape = (2, rows, self.kv_heads, columns, self.head_dim)
        return [torch.zeros(shape, device=self.device, dtype=self.dtype) for _ in self.layers]

    def _turn(self, x, pos):
        "Rotary positions: x (B,h,T,d), pos (B,T)"
        cos = self.cos[pos][:,None].to(x.dtype)
        sin = self.sin[pos][:,None].to(x.dtype)
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
        for w,past in zip(self.layers, cache):
            h = self._normed(x, w['before'])
            x = x+self._mixed(w, h, pos, columns, mask, past)
            h = self._normed(x, w['between'])
            gate,up = F.linear(h, w['up']).chunk(2, -1)
            x = x+F.linear(F.silu(gate)*up, w['down'])
        return F.linear(self._normed(x[:,-1], self.norm), self.head)

    def _normed(self, x, weight):
        return F.rms_norm(x, x.shape[-1:], weight, self.eps)

    def _mixed(self, w:dict, h, pos, columns, mask, past):
        B,T,_ = h.shape
        sizes = [n*self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        parts = F.linear(h, w['qkv']).split(sizes, -1)
        parts = [p.view(B, T, -1, self.head_dim) for p in parts]
        q,k,v = (p.transpose(1, 2) for p in parts)  # (B,h,T,d)
        past[0].index_copy_(2, columns, self._turn(k, pos))
        past[1].index_copy_(2, columns, v)
        o = self._attend(self._turn(q, pos), past, mask)
        return F.linear(o.transpose(1, 2).reshape(B, T, -1), w['o'])

    def _attend(self, q, past, mask):
        "One new place: the query heads of a group are rows of one product; else keys repeat"
        B,_,T,d = q.shape
        if T==1:
            q = q.view(B, self.kv_heads, -1, d)
            o = F.scaled_dot_product_attention(q, past[0], past[1], mask)
            return o.reshape(B, -1, 1, d)
        k,v = (p.repeat_interleave(self.heads//self.kv_heads, 1) for p in past)
        return F.scaled_dot_product_attention(q, k, v, mask)

    def _prefill(self, prompts:list[list[int]], pad, cache:list, part:int):
        "Logits after the prompts, (B,V), `part` rows at a time"
        P = max(map(len, prompts))
        rows = [[0]*(P-len(p))+list(p) for p in prompts]
        ids = torch.tensor(rows, device=self.device)
        place = torch.arange(cache[0].shape[3], device=self.device)
        here = place[:P,None]
        logits = []
        for i in range(0, len(prompts), part):
            own = pad[i:i+part,None]
            sees = (place>=own)[:,None,None,:]&(place<=here)
            sees |= place==here  # padding sees itself: no empty sum
            pos = (place[:P]-own).clamp(min=0)
            mine = [p[:,i:i+part].clone() for p in cache]
            logits.append(self.forward(ids[i:i+part], pos, place[:P], sees, mine))
            for c,m in zip(cache, mine):
                c[:,i:i+part] = m
        return torch.cat(logits)

    @torch.inference_mode()
    def write(self,
        prompts:list[list[int]],
        most:int, # Tokens at most
        temperature:float=.7,
        min_p:float=.08, # Least part of the likeliest token's probability
        part:int=256, # Rows of a prefill
    )->list[tuple]: # Ids before the end, whether it ended
        "Answers to all prompts at once"
        P = max(map(len, prompts))
        pad = torch.tensor([P-len(p) for p in prompts], device=self.device)
        cache = self.cache(len(prompts), P+most)
        logits = self._prefill(prompts, pad, cache, part)
        return Step(self, pad, P, cache, temperature, min_p).run(logits, most)


class Step:
    "One column after the other, as a graph on a card"
    def __init__(self, writer:Writer, pad, P:int, cache:list, temperature:float, min_p:float):
        self.w,self.cache = writer,cache
        self.pad,self.P = pad,P
        self.temperature,self.min_p = temperature,min_p
        self.at = torch.full((1,), P, device=pad.device)
        self.ids = torch.zeros(len(pad), 1, dtype=torch.int64, device=pad.device)
        self.place = torch.arange(cache[0].shape[3], device=pad.device)

    def sample(self, logits):
        p = (logits.float()/self.temperature).softmax(-1)
        p = p*(p>=self.min_p*p.amax(-1, keepdim=True))
        noise = torch.empty_like(p).exponential_()
        self.ids.copy_((p/noise).argmax(-1, keepdim=True))

    def forward(self):
        mask = (self.place>=self.pad[:,None])&(self.place<=self.at)
        mask = mask[:,None,None]
        pos = self.at-self.pad[:,None]
        logits = self.w.forward(self.ids, pos, self.at, mask, self.cache)
        self.sample(logits)
        self.at += 1

    def run(self, logits, most:int)->list[tuple]:
        self.sample(logits)
        step = self.forward if self.w.device=='cpu' else self._graph()
        said = [self.ids[:,0].clone()]
        ended = torch.zeros_like(said[0], dtype=torch.bool)
        eos = torch.tensor(self.w.eos, device=ended.device)
        for i in range(1, most):
            ended |= torch.isin(said[-1], eos)
            if i%16==0 and ended.float().mean()>.98:
                break
            step()
            said.append(self.ids[:,0].clone())
        return [self._cut(ids) for ids in torch.stack(said, 1).tolist()]

    def _graph(self):
        "Two steps to warm up are taken back; the third is recorded"
        first = self.ids.clone()
        for _ in range(2):
            self.forward()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.forward()
        self.ids.copy_(first)
        self.at.fill_(self.P)
        return graph.replay

    def _cut(self, ids:list[int])->tuple:
        n = next((i for i,t in enumerate(ids) if t in self.w.eos), len(ids))
        return ids[:n],n<len(ids)
