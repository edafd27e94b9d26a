"""Train the tiny model: one command, one seed.

    python tools/train_tiny/train.py OUT --data SHARDS --minutes 7

OUT/model gets a checkpoint in bfloat16 under the real names, the tokenizer and template; OUT/training.json the curve, the acceptance
of drafts on held-out text, samples. They are written every minute, so that a run that is cut off leaves something.
"""
import argparse,functools,json,signal,time
from pathlib import Path
import numpy as np
import torch
from safetensors.torch import load_file,save_file
import text
from model import Block,Config,Model

LINE = '{:>7} {:>7} {:>8} {:>8} {:>8} {:>8} {:>9} {:>8}'

# ---------------------------------------------------------------------------------------------------------------------

def orthogonal(g, steps=5):
    "Matrices [.., n, m] with singular values near one, by Newton and Schulz's iteration as Muon has it (Jordan et al. 2024)"
    x = g.to(torch.bfloat16 if g.is_cuda else torch.float32)
    tall = x.shape[-2]>x.shape[-1]
    if tall: x = x.mT
    x = x/(x.norm(dim=(-2,-1), keepdim=True)+1e-7)
    for _ in range(steps):
        a = x@x.mT
        x = 3.4445*x+(-4.775*a+2.0315*a@a)@x
    return (x.mT if tall else x).float()

class Muon:
    "Momentum made orthogonal, for the matrices of the layers; those of one shape go together"
    def __init__(self, params, lr, momentum=.95, decay=.05):
        self.lr,self.momentum,self.decay,self.groups = lr,momentum,decay,{}
        for p in params: self.groups.setdefault(tuple(p.shape[-2:]), []).append(p)
        self.sums = {s:torch.zeros(sum(p.numel() for p in ps)//(s[0]*s[1]), *s, device=ps[0].device) for s,ps in self.groups.items()}

    @torch.no_grad()
    def step(self, scale):
        "`scale`: of the learning rate"
        for s,ps in self.groups.items():
            g = torch.cat([p.grad.reshape(-1, *s) for p in ps])
            m = self.sums[s].lerp_(g, 1-self.momentum)
            u = orthogonal(g.lerp(m, self.momentum))*(self.lr*scale*max(1, s[0]/s[1])**.5)
            at = 0
            for p in ps:
                n = p.numel()//(s[0]*s[1])
                p.mul_(1-self.lr*scale*self.decay).sub_(u[at:at+n].reshape(p.shape))
                at += n

def optimizers(m:Model, a):
    "Muon for large matrices between the layers, Adam for embedding, head, routers and vectors"
    big,rest = [],[]
    for n,p in m.named_parameters():
        matrix = p.dim()>=2 and min(p.shape[-2:])>=32 and not any(k in n for k in ('embed','lm_head','conv1d'))
        (big if matrix else rest).append(p)
    adam = torch.optim.AdamW(rest, lr=a.adam_lr, betas=(.9,.95), eps=1e-10, weight_decay=0., fused=rest[0].is_cuda)
    return Muon(big, a.lr),adam

def schedule(done:float)->float:
    "Factor of the learning rate after a part `done` of the run: up, level, and down as a cosine"
    if done<.02: return .02+done/.02*.98
    if done<.3: return 1.
    return .02+.98*(.5+.5*np.cos(np.pi*min(1., (done-.3)/.7)))

# ---------------------------------------------------------------------------------------------------------------------

def weights(m:Model)->dict:
    "Tensors by the names of the real checkpoints, in bfloat16"
    return {k:v.detach().to('cpu', torch.bfloat16).contiguous().clone() for k,v in m.state_dict().items()}

def save(m:Model, tok, folder:Path):
    "A folder that engines load"
    folder.mkdir(parents=True, exist_ok=True)
    part = folder/'.model.part'
    save_file(weights(m), part, metadata=dict(format='pt'))
    part.chmod(0o644)
    part.replace(folder/'model.safetensors')
    (folder/'config.json').write_text(json.dumps(m.c.to_json(), indent=1)+'\n')
    ends = [tok.token_to_id(s) for s in ('<|im_end|>','<|endoftext|>')]
    generation = dict(eos_token_id=ends, pad_token_id=ends[1], do_sample=True, temperature=.7, top_p=.9)
    (folder/'generation_config.json').write_text(json.dumps(generation, indent=1)+'\n')
    text.save_tokenizer(tok, folder)

def load(folder:Path, device='cpu')->Model:
    "The model of a folder"
    t = json.loads((Path(folder)/'config.json').read_text())['text_config']
    names = dict(vocab='vocab_size', hidden='hidden_size', layers='num_hidden_layers', heads='num_attention_heads',
        kv_heads='num_key_value_heads', head_dim='head_dim', key_heads='linear_num_key_heads', value_heads='linear_num_value_heads',
        key_dim='linear_key_head_dim', value_dim='linear_value_head_dim', experts='num_experts', top_k='num_experts_per_tok',
        width='moe_intermediate_size', context='max_position_embeddings', every='full_attention_interval')
    rotary = int(t['head_dim']*t['rope_parameters']['partial_rotary_factor'])
    m = Model(Config(**{k:t[v] for k,v in names.items()}, rotary=rotary))
    m.load_state_dict({k:v.float() for k,v in load_file(Path(folder)/'model.safetensors').items()})
    return m.to(device)

# ---------------------------------------------------------------------------------------------------------------------

EAGER = Block.forward

def eager(f):
    "`f` without gradients, and with layers that are not compiled: its shapes are too many"
    @functools.wraps(f)
    @torch.no_grad()
    def g(*args, **kw):
        now,Block.forward = Block.forward,EAGER
        try: return f(*args, **kw)
        finally: Block.forward = now
    return g

@eager
def validate(m, batches, amp, K)->list[float]:
    "Mean loss of the next token, and of the drafts after it, on held-out text"
    with amp: parts = [m.loss(b, K)[1] for b in batches]
    return [float(torch.stack([p[i] for p in parts]).mean()) for i in range(K+1)]

@eager
def greedy(m, ids, n, amp):
    "`n` more tokens after each row of `ids`, the likeliest each time"
    for _ in range(n):
        with amp: logits = m.head(m(ids)[0][:,-1:])
        ids = torch.cat([ids, logits.float().argmax(-1)], 1)
    return ids

@eager
def acceptance(m, ids, n, amp, K=3)->dict:
    "How often chained drafts equal what the model itself says next: at `n` places each of greedy answers to the prompts `ids`"
    T = ids.shape[1]
    full = greedy(m, ids, n+K, amp)
    with amp:
        h,_ = m(full[:,:T+n-1])
        states,_ = m.drafts(h, full[:,:T+n+K-1], K)
        hits = torch.stack([m.head(s).argmax(-1)==full[:,2+i:2+i+T+n-1] for i,s in enumerate(states)])[:,:,T-1:]  # (K,B,n)
    kept = hits.int().cumprod(0).bool()
    rates,base = [],kept.new_ones(kept.shape[1:])
    for k in kept:
        rates.append(float(k.sum()/base.sum().clamp(min=1)))
        base = k
    return dict(each=rates, tokens_per_step=float(1+kept.sum()/kept[0].numel()), places=kept[0].numel())

PROMPTS = ['Once upon a time, there was', 'Lily and Ben went to the park.']
CHATS = [('Write a very short story in simple words about a fox and a lost ball.', None), ('What is 7 plus 5?', None),
    ('What is the weather in Rome?', 'get_weather'), ('Count from 3 to 9.', None), ('What does a bee eat?', None),
    ('Write a short dialogue between Mia and Tom about the rain.', None), ('Describe the sea.', None)]

def prompts(tok)->list[list[int]]:
    import rules
    chat = text.template()
    offered = [rules.tool('get_weather', 'The weather in a city', city=('string', 'Name of the city'))]
    asked = [chat.render(messages=[rules.user(q)], tools=offered if t else None, add_generation_prompt=True) for q,t in CHATS]
    return [tok.encode(p, add_special_tokens=False).ids for p in PROMPTS+asked]

def samples(m, tok, amp, n=80)->list[str]:
    "What the model says to a few prompts, greedily"
    device,out = next(m.parameters()).device,[]
    ends = [tok.token_to_id(s) for s in ('<|im_end|>','<|endoftext|>')]
    for p in prompts(tok):
        ids = greedy(m, torch.tensor([p], device=device), n, amp)[0].tolist()
        end = next((i for i,t in enumerate(ids) if i>=len(p) and t in ends), len(ids))
        out.append(tok.decode(ids[:end], skip_special_tokens=False))
    return out

# ---------------------------------------------------------------------------------------------------------------------

def corpus(a):
    "Tokenizer, and streams to learn from and to judge by"
    t = time.time()
    records = text.read_texts(a.data) if a.data else []
    if a.data and not records: raise SystemExit(f'There are no texts in {a.data}')
    docs = text.documents(records, a.ruled, a.rules, a.seed)
    held = max(32, len(docs)//100)
    print(f'{len(records):,} texts, {len(docs):,} documents, {sum(map(len, docs)):,} characters, {time.time()-t:.0f} s', flush=True)
    if a.init: tok = text.Tokenizer.from_file(str(a.init/'tokenizer.json'))
    else: tok = text.train_tokenizer([text.without_marks(d) for d in docs[held:held+60_000]], a.vocab)
    train,val = text.Stream(docs[held:], tok, a.seed),text.Stream(docs[:held], tok, a.seed)
    print(f'{tok.get_vocab_size()} tokens in the vocabulary; {train.tokens:,} to learn from, {val.tokens:,} held out, {time.time()-t:.0f} s', flush=True)
    return tok,train,val

def compiled(m:Model, batch, a, amp):
    "Layers compiled, if that works and pays"
    def seconds():
        begin = time.time()
        for _ in range(3):
            with amp: loss,*_ = m.loss(batch, a.drafts)
            loss.backward()
            m.zero_grad(set_to_none=True)
        if batch.is_cuda: torch.cuda.synchronize()
        return (time.time()-begin)/3
    seconds()
    plain = seconds()
    if not a.compile: return print(f'{plain*1000:.0f} ms a step, not compiled', flush=True)
    begin = time.time()
    signal.signal(signal.SIGALRM, late)
    signal.alarm(a.compile_seconds)
    try:
        Block.forward = torch.compile(EAGER, dynamic=False)
        seconds()
        took = time.time()-begin
        fast = seconds()
        print(f'{plain*1000:.0f} ms a step, {fast*1000:.0f} ms compiled, which took {took:.0f} s', flush=True)
        if fast<plain: return
    except Exception as e: print(f'{plain*1000:.0f} ms a step, not compiled: {str(e)[:300]!r}', flush=True)
    finally: signal.alarm(0)
    Block.forward = EAGER
    m.zero_grad(set_to_none=True)

def late(*_): raise TimeoutError('compiling takes too long')

def report(folder:Path, m, tok, curve, more):
    "Everything that is known so far, in files"
    save(m, tok, folder/'model')
    (folder/'training.json').write_text(json.dumps(dict(more, curve=curve), indent=1)+'\n')

def train(a):
    begin = time.time()
    device = 'cuda' if torch.cuda.is_available() and a.device!='cpu' else 'cpu'
    torch.manual_seed(a.seed)
    torch.set_float32_matmul_precision('high')
    tok,stream,held = corpus(a)
    eos = tuple(tok.token_to_id(s) for s in ('<|endoftext|>','<|im_end|>'))
    m = load(a.init, device) if a.init else Model(Config(vocab=a.vocab, eos=eos)).to(device)
    print(f'{sum(p.numel() for p in m.parameters()):,} parameters, {sum(p.numel() for p in m.mtp.parameters()):,} of them in the drafting head', flush=True)
    amp = torch.autocast(device, torch.bfloat16, enabled=device=='cuda')
    length = a.length+1+max(a.drafts, 3)
    def batch(of): return torch.from_numpy(next(of)).to(device, torch.int64, non_blocking=True)
    source,heldout = stream.batches(a.rows, length),held.batches(a.rows, length)
    tests = [batch(heldout) for _ in range(a.tests)]
    short = torch.cat([t[:,:48] for t in tests])[:64]
    compiled(m, batch(source)[:,:a.length+1+a.drafts], a, amp)
    muon,adam = optimizers(m, a)
    limit = begin+60*a.minutes-a.rest
    start,step,tokens,curve,saved = time.time(),0,0,[],time.time()
    print(LINE.format('step','seconds','Mtokens','loss','held out','draft 1','balance','tok/s'), flush=True)
    seen,more = [],{}
    while True:
        done = step/a.steps if a.steps else (time.time()-start)/max(1e-3, limit-start)
        if done>=1: break
        factor = schedule(done)
        for g in adam.param_groups: g['lr'] = a.adam_lr*factor
        with amp: loss,parts,balance = m.loss(batch(source)[:,:a.length+1+a.drafts], a.drafts)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 1.)
        muon.step(factor)
        adam.step()
        m.zero_grad(set_to_none=True)
        seen.append((parts[0], balance.detach()))
        step,tokens = step+1,tokens+a.rows*a.length
        if step%a.every and step not in (1,25,100): continue
        last = [float(torch.stack(x).mean()) for x in zip(*seen)]
        seen = []
        if not np.isfinite(last[0]): raise SystemExit(f'The loss is {last[0]} at step {step}')
        v = validate(m, [t[:,:a.length+1+a.drafts] for t in tests], amp, a.drafts)
        speed = tokens/(time.time()-start)
        curve.append(dict(step=step, seconds=time.time()-start, tokens=tokens, train=last[0], val=v[0], drafts=v[1:], lr=factor))
        if len(curve)<7 or len(curve)%3==0:
            print(LINE.format(step, f'{time.time()-start:.0f}', f'{tokens/1e6:.1f}', f'{last[0]:.3f}', f'{v[0]:.3f}',
                f'{v[1]:.3f}' if len(v)>1 else '', f'{last[1]:.2f}', f'{speed:,.0f}'), flush=True)
        if time.time()-saved>a.save_every:
            report(a.out, m, tok, curve, more)
            saved = time.time()
    more = dict(steps=step, tokens=tokens, epochs=stream.epochs, corpus_tokens=stream.tokens, seconds=time.time()-start, seed=a.seed, rows=a.rows,
        length=a.length, device=torch.cuda.get_device_name() if device=='cuda' else 'cpu', torch=torch.__version__,
        parameters=sum(p.numel() for p in m.parameters()))
    report(a.out, m, tok, curve, more)
    m.load_state_dict({k:v.float() for k,v in weights(m).items()})  # as it was saved
    more['val'] = validate(m, [t[:,:a.length+1+3] for t in tests], amp, 3)
    more['perplexity'] = float(np.exp(more['val'][0]))
    more['acceptance'] = acceptance(m, short, a.places, amp)
    more['samples'] = samples(m, tok, amp)
    report(a.out, m, tok, curve, more)
    print(f'{step:,} steps, {tokens/1e6:.0f} M tokens, {stream.epochs} epochs of {stream.tokens/1e6:.1f} M; held out: loss {more["val"][0]:.3f}, '
        f'perplexity {more["perplexity"]:.2f}; drafts {", ".join(f"{x:.3f}" for x in more["val"][1:])}')
    print('accepted:', ', '.join(f'draft {i+1} {x:.3f}' for i,x in enumerate(more['acceptance']['each'])),
        f'; {more["acceptance"]["tokens_per_step"]:.2f} tokens a step at {more["acceptance"]["places"]:,} places')
    for s in more['samples']: print('---\n'+s)
    print(f'{(a.out/"model/model.safetensors").stat().st_size:,} bytes of weights, {time.time()-begin:.0f} s in all', flush=True)

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('out', type=Path)
    p.add_argument('--data', type=Path, help='folder of *.jsonl.xz; none: rules alone')
    p.add_argument('--minutes', type=float, default=7, help='all in all')
    p.add_argument('--rest', type=float, default=40, help='seconds of them for what comes after the last step')
    p.add_argument('--steps', type=int, help='so many steps instead of so many minutes')
    p.add_argument('--ruled', type=int, default=45_000, help='texts by rule')
    p.add_argument('--rules', type=int, default=20_000, help='conversations by rule')
    p.add_argument('--rows', type=int, default=32)
    p.add_argument('--length', type=int, default=1024)
    p.add_argument('--drafts', type=int, default=2)
    p.add_argument('--vocab', type=int, default=2048)
    p.add_argument('--lr', type=float, default=.02, help="Muon's")
    p.add_argument('--adam-lr', type=float, default=.004)
    p.add_argument('--seed', type=int, default=1)
    p.add_argument('--every', type=int, default=200, help='steps between lines of the curve')
    p.add_argument('--tests', type=int, default=4, help='held-out batches')
    p.add_argument('--places', type=int, default=64, help='of each prompt, for acceptance')
    p.add_argument('--save-every', type=float, default=60)
    p.add_argument('--init', type=Path, help='a folder to begin with instead of random weights')
    p.add_argument('--compile-seconds', type=int, default=90, help='most to spend on compiling layers')
    p.add_argument('--device', default='cuda')
    p.add_argument('--no-compile', dest='compile', action='store_false')
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    train(a)

if __name__=='__main__': main()
