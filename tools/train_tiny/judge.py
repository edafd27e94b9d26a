"""How good a model is: loss by kind of text, drafts accepted, skills, and samples.

    python tools/train_tiny/judge.py FOLDER [--data SHARDS]

With --write FILE it only puts some of the text that was not learnt into a file."""
import argparse,functools,json,random,re
from pathlib import Path
import numpy as np
import torch
import rules,text
from model import Block,load

EAGER = Block.forward


def eager(f):
    "`f` without gradients, and with layers that are not compiled: its shapes are too many"
    @functools.wraps(f)
    @torch.no_grad()
    def g(*args, **kw):
        now,Block.forward = Block.forward,EAGER
        try:
            return f(*args, **kw)
        finally:
            Block.forward = now
    return g


@eager
def validate(m, batches, amp, K:int)->list[float]:
    "Mean loss of the next token, and of the drafts after it, on held-out text"
    with amp:
        parts = [m.loss(b, K)[1] for b in batches]
    return [float(torch.stack(each).mean()) for each in zip(*parts)]


@eager
def greedy(m, prompts:list[list[int]], n:int, amp):
    "Ids (B,longest+n): each prompt with `n` more tokens, the likeliest each time, then zeros"
    device,rows = next(m.parameters()).device,range(len(prompts))
    at = torch.tensor([len(p) for p in prompts], device=device)
    longest = int(at.max())
    padded = [p+[0]*(longest+n-len(p)) for p in prompts]
    ids = torch.tensor(padded, device=device)
    for i in range(n):
        with amp:
            logits = m.head(m(ids[:,:longest+i])[0][rows,at-1])
        ids[rows,at] = logits.float().argmax(-1)
        at = at+1
    return ids


@eager
def guesses(m, full, rows:int, K:int, amp)->list:
    "What `K` chained drafts say at the first `rows` places of `full`"
    with amp:
        h,_ = m(full[:,:rows])
        states,_ = m.drafts(h, full[:,:rows+K], K)
        return [m.head(s).argmax(-1) for s in states]


def acceptance(m, ids, n:int, amp, K:int=3)->dict:
    """How often chained drafts equal what the model says next

    `n` places in a greedy answer to each of the prompts `ids` (B,T)."""
    T = ids.shape[1]
    rows = T+n-1
    full = greedy(m, ids.tolist(), n+K, amp)
    hits = [guess==full[:,2+i:2+i+rows] for i,guess in enumerate(guesses(m, full, rows, K, amp))]
    hits = torch.stack(hits)[...,T-1:]
    kept = hits.int().cumprod(0).sum((1, 2)).tolist()  # drafts accepted with all before them
    places = hits[0].numel()
    each = [k/max(1, before) for k,before in zip(kept, [places, *kept])]
    return dict(each=each, tokens_per_step=1+sum(kept)/places, places=places)

# ------------------------------------------------------------------------------------------

def answers(m, tok, prompts:list[str], n:int, amp)->list[str]:
    "The greedy answers to prompts, up to their end"
    ids = [tok.encode(p, add_special_tokens=False).ids for p in prompts]
    ends = [tok.token_to_id(s) for s in ('<|im_end|>','<|endoftext|>')]
    out = []
    for p,row in zip(ids, greedy(m, ids, n, amp).tolist()):
        said = row[len(p):len(p)+n]
        end = next((i for i,t in enumerate(said) if t in ends), n)
        out.append(tok.decode(said[:end], skip_special_tokens=False))
    return out


def simple(f):
    "Question, right answer and tools, of a rule without tools"
    def ask(rng):
        *asked,last = f(rng)
        return asked,last,None
    return ask


def with_tools(f):
    "The same of a rule with tools: its own and another"
    def ask(rng):
        own,question,arguments,*_ = f(rng)
        call = rules.called(own['function']['name'], arguments)
        tools = [own, rules.timer(rng)[0]]
        return [rules.user(question)],call,tools
    return ask

SKILLS = dict(
    sums=simple(rules.sums),
    sums_in_words=simple(rules.story_sum),
    counting=simple(rules.counting),
    copying=simple(rules.copying),
    weather=with_tools(rules.weather),
    made_up_tool=with_tools(rules.made_up))


def answered(said:str)->str:
    return said.split('</think>')[-1].strip()


def same(a:str, b:str, kind:str)->bool:
    "Do two answers say the same? Sums may be told in several ways"
    if kind.startswith('sums'):
        a,b = (re.findall(r'\d+', x)[-1:] for x in (a, b))
    return a==b


def questions(kind:str, n:int, seed:int)->tuple[list[str],list[str]]:
    "Prompts, and what is to be answered"
    rng,chat = random.Random(f'{seed}-{kind}'),text.template()
    prompts,wanted = [],[]
    for _ in range(n):
        asked,last,tools = SKILLS[kind](rng)
        prompts.append(chat.render(messages=asked, tools=tools, add_generation_prompt=True))
        whole = chat.render(messages=[*asked, last], tools=tools)
        wanted.append(answered(whole.removesuffix('<|im_end|>\n')))
    return prompts,wanted


def skills(m, tok, amp, n:int=64, seed:int=1234)->dict[str,float]:
    "The part of `n` questions of each rule that is answered rightly"
    out = {}
    for kind in SKILLS:
        prompts,wanted = questions(kind, n, seed)
        said = [answered(s) for s in answers(m, tok, prompts, 110, amp)]
        wrong = [(w, s) for s,w in zip(said, wanted) if not same(s, w, kind)]
        out[kind] = 1-len(wrong)/n
        for pair in wrong[:2]:
            print(kind, *map(repr, pair), sep='\n    ')
    return out


def kinds(records:list[dict], n:int, seed:int=4321)->dict[str,list[str]]:
    "Documents that were not learnt, by whose hand they are"
    out = dict(stories=text.ruled_documents(n, seed), conversations=text.conversations(n, seed))
    if records:
        out['written'] = text.written_documents(records[::100], seed)[:n]
    return out


@eager
def by_kind(m, tok, docs:list[str], amp)->dict[str,float]:
    "Perplexity of documents, each by itself, and bits a character"
    end,device = tok.token_to_id('<|endoftext|>'),next(m.parameters()).device
    loss = tokens = letters = 0
    for d in docs:
        ids = torch.tensor([[end, *tok.encode(d, add_special_tokens=False).ids]], device=device)
        with amp:
            logits = m.head(m(ids[:,:-1])[0])[0].float()
        loss += float(torch.nn.functional.cross_entropy(logits, ids[0,1:], reduction='sum'))
        tokens += ids.shape[1]-1
        letters += len(d)
    return dict(perplexity=float(np.exp(loss/tokens)), bits_a_letter=loss/letters/np.log(2))

# ------------------------------------------------------------------------------------------

PROMPTS = ['Once upon a time, there was', 'Lily and Ben went to the park.']
CHATS = [
    ('Write a very short story in simple words about a fox and a lost ball.', None),
    ('What is 7 plus 5?', None),
    ('What is the weather in Rome?', 'get_weather'),
    ('Open the door number 3.', 'open_door'),
    ('Count from 3 to 9.', None),
    ('What does a bee eat?', None),
    ('Write a short dialogue between Mia and Tom about the rain.', None),
    ('Describe the sea.', None)]
OFFERED = dict(
    get_weather=rules.tool('get_weather', 'The weather in a city', city=('string', 'Name')),
    open_door=rules.tool('open_door', 'Open a door', number=('integer', '')))


def prompts()->list[str]:
    chat = text.template()
    out = list(PROMPTS)
    for question,tool in CHATS:
        tools = [OFFERED[tool]] if tool else None
        messages = [rules.user(question)]
        out.append(chat.render(messages=messages, tools=tools, add_generation_prompt=True))
    return out


def samples(m, tok, amp, n:int=100)->list[str]:
    "What the model says to a few prompts, greedily"
    return [p+a for p,a in zip(prompts(), answers(m, tok, prompts(), n, amp))]


def judge(m, tok, docs:dict[str,list[str]], amp, n:int)->dict:
    "All numbers"
    known = {kind:by_kind(m, tok, d, amp) for kind,d in docs.items()}
    starts = [tok.encode(d, add_special_tokens=False).ids[:40] for ds in docs.values() for d in ds]
    starts = torch.tensor([s for s in starts if len(s)==40][:2*n])
    known['acceptance'] = acceptance(m, starts, 64, amp)
    known['skills'] = skills(m, tok, amp, n)
    return known


def write(docs:dict[str,list[str]], path:Path, n:int):
    "`n` documents of each kind in turn, as they follow each other in training"
    rows = zip(*(d[:n] for d in docs.values()))
    path.write_text(''.join(f'{d}<|endoftext|>' for row in rows for d in row)+'\n')


def main():
    as_it_is = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_is)
    p.add_argument('folder', type=Path)
    p.add_argument('--data', type=Path, help='folder of *.jsonl.xz')
    p.add_argument('--n', type=int, default=64, help='questions of each skill')
    p.add_argument('--device', default='cuda')
    p.add_argument('--write', type=Path, help='a file to be written')
    a = p.parse_args()
    docs = kinds(text.read_texts(a.data) if a.data else [], 4*a.n)
    if a.write:
        return write(docs, a.write, a.n)
    m = load(a.folder, a.device)
    tok = text.Tokenizer.from_file(str(a.folder/'tokenizer.json'))
    amp = torch.autocast(a.device, torch.bfloat16, enabled=a.device=='cuda')
    print(json.dumps(judge(m, tok, docs, amp, a.n), indent=1))
    for s in samples(m, tok, amp):
        print('---\n'+s)


if __name__=='__main__':
    main()
