"""How good a model is: loss on held-out text, drafts that equal what it says itself, and samples"""
import functools
import torch
import rules,text
from model import Block

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
def validate(m, batches, amp, K:int)->list[float]:
    "Mean loss of the next token, and of the drafts after it, on held-out text"
    with amp: parts = [m.loss(b, K)[1] for b in batches]
    return [float(torch.stack(each).mean()) for each in zip(*parts)]


@eager
def greedy(m, ids, n:int, amp):
    "`n` more tokens after each row of `ids`, the likeliest each time"
    for _ in range(n):
        with amp: logits = m.head(m(ids)[0][:,-1:])
        ids = torch.cat([ids, logits.float().argmax(-1)], 1)
    return ids


@eager
def acceptance(m, ids, n:int, amp, K:int=3)->dict:
    """How often chained drafts equal what the model says next

    `n` places in a greedy answer to each of the prompts `ids` (B,T)."""
    T = ids.shape[1]
    rows = T+n-1
    full = greedy(m, ids, n+K, amp)
    with amp:
        h,_ = m(full[:,:rows])
        states,_ = m.drafts(h, full[:,:rows+K], K)
        guesses = [m.head(s).argmax(-1) for s in states]
    hits = []
    for i,guess in enumerate(guesses):
        right = full[:,2+i:2+i+rows]
        hits.append((guess==right)[:,T-1:])
    kept = torch.stack(hits).int().cumprod(0).bool()  # (K,B,n): all drafts up to here
    rates,before = [],kept.new_ones(kept.shape[1:])
    for k in kept:
        rates.append(float(k.sum()/before.sum().clamp(min=1)))
        before = k
    places = kept[0].numel()
    return dict(each=rates, tokens_per_step=float(1+kept.sum()/places), places=places)

PROMPTS = ['Once upon a time, there was', 'Lily and Ben went to the park.']
CHATS = [
    ('Write a very short story in simple words about a fox and a lost ball.', None),
    ('What is 7 plus 5?', None),
    ('What is the weather in Rome?', 'get_weather'),
    ('Count from 3 to 9.', None),
    ('What does a bee eat?', None),
    ('Write a short dialogue between Mia and Tom about the rain.', None),
    ('Describe the sea.', None)]


def prompts(tok)->list[list[int]]:
    chat = text.template()
    city = ('string', 'Name of the city')
    offered = [rules.tool('get_weather', 'The weather in a city', city=city)]
    out = list(PROMPTS)
    for question,tool in CHATS:
        tools = offered if tool else None
        messages = [rules.user(question)]
        out.append(chat.render(messages=messages, tools=tools, add_generation_prompt=True))
    return [tok.encode(p, add_special_tokens=False).ids for p in out]


def samples(m, tok, amp, n:int=80)->list[str]:
    "What the model says to a few prompts, greedily"
    device = next(m.parameters()).device
    ends = [tok.token_to_id(s) for s in ('<|im_end|>','<|endoftext|>')]
    out = []
    for p in prompts(tok):
        prompt = torch.tensor([p], device=device)
        said = greedy(m, prompt, n, amp)[0,len(p):].tolist()
        end = next((i for i,t in enumerate(said) if t in ends), n)
        out.append(tok.decode(p+said[:end], skip_special_tokens=False))
    return out
