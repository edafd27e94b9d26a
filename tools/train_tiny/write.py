"""Simple English, written by Atlas's demo model: JSON lines, round after round, until the time is over.

    python tools/train_tiny/write.py OUT --minutes 6 [--device cuda] [--rows 2048]

Every line is {"kind", "prompt", "text"}. A file is appended to after each round, so that what was written stays.
"""
import argparse,json,lzma,random,re,sys,time
from itertools import count
from pathlib import Path
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
import torch
from words import EXAMPLES,KINDS,writing_prompt
from writer import Writer

REFUSALS = re.compile(r"as an ai|i'm sorry|i am sorry, but|i cannot|i can't help|language model|here(?:'s| is) (?:a|the) "
    r'(?:short|simple|list|rewritten|revised|possible)|certainly|sure[,!]|example of a', re.I)
MARKUP = re.compile(r'[*#`<>\[\]{}|\\_=~^]')
PLAIN = str.maketrans({'\u2018':"'", '\u2019':"'", '\u201c':'"', '\u201d':'"', '\u2013':'-', '\u2014':'-', '\u2026':'...'})


def tidy(text:str, whole:bool)->str|None: # None: not worth keeping
    "The text of an answer: plain letters, up to its last whole sentence; None if a filter refuses it"
    text = text.translate(PLAIN).strip()
    if not whole:
        end = max(text.rfind(c) for c in '.!?')
        text = text[:end+1]
    text = re.sub(r'\n\d+[.)]$', '', text.rstrip())  # a list's number without its line
    text = re.sub(r'\n{2,}', '\n\n', re.sub(r'[ \t]+', ' ', text)).strip()
    lines = [re.sub(r'^\d+[.)]\s*', '', l.strip()) for l in text.split('\n') if l.strip()]
    sentences = [s for s in re.split(r'(?<=[.!?])\s+', text) if len(s)>12]
    if not 12<=len(text)<=1500 or not text.isascii() or MARKUP.search(text) or REFUSALS.search(text): return None
    if len(set(lines))<len(lines) or len(set(sentences))<.9*len(sentences): return None
    words = re.findall('[a-z]+', text.lower())
    three = list(zip(words, words[1:], words[2:]))
    if len(three)>20 and len(set(three))<.85*len(three): return None  # it goes round in circles
    return text


def asks_of(kind:str, seed:int, n:int)->list[tuple]:
    "What to ask for: question, how the answer begins, an example, and the most tokens of an answer"
    rng = random.Random(f'{seed}-{kind}')
    out = []
    for _ in range(n):
        question,begin,most = writing_prompt(kind, rng)
        out.append((question, begin, rng.choice(EXAMPLES[kind]), most))
    return out


def prompt_ids(llm, question:str, begin:str, example:tuple)->list[int]:
    "The prompt up to how the answer begins"
    roles = ('user','assistant','user')
    turns = [dict(role=r, content=c) for r,c in zip(roles, (*example, question))]
    return llm.tokenizer.encode(llm.render(turns)+begin, add_special=False)


def write_round(llm, writer:Writer, kind:str, seed:int, a)->tuple[list[dict],int]: # Records; tokens made
    "Answers of one kind: the likelier ones that `tidy` lets through"
    asks = asks_of(kind, seed, a.rows)
    prompts = [prompt_ids(llm, question, begin, example) for question,begin,example,_ in asks]
    torch.manual_seed(seed)
    answers = writer.write(prompts, asks[0][-1])
    likely = sorted(logp for _,_,logp in answers)[int(len(answers)*(1-a.keep))]
    records = []
    for (question,begin,example,_),(ids,whole,logp) in zip(asks, answers):
        if logp<likely: continue
        text = tidy(begin+llm.tokenizer.decode(ids), whole)
        if text and text[:60]!=example[1][:60]: records.append(dict(kind=kind, prompt=question, text=text))
    return records,sum(len(ids) for ids,_,_ in answers)


def append(path:Path, records:list[dict]):
    "One more stream at the end of an .xz file: whoever reads it sees one file"
    lines = ''.join(json.dumps(r)+'\n' for r in records)
    with open(path, 'ab') as f: f.write(lzma.compress(lines.encode(), preset=4))


def write(a):
    "Rounds of all kinds in turn until the time is over"
    from atlas.use.llm import LLM
    end = time.time()+60*a.minutes
    a.out.mkdir(parents=True, exist_ok=True)
    llm = LLM(a.model, device='cpu', show=False)
    writer = Writer(llm, a.device)
    order = [kind for kind,share in KINDS.items() for _ in range(share)]
    random.Random(a.seed).shuffle(order)
    begin,tokens,kept = time.time(),0,0
    for r in count():
        if time.time()>end: break
        records,n = write_round(llm, writer, order[r%len(order)], a.seed*100_003+r, a)
        append(a.out/f'text-{r//a.rounds:03}.jsonl.xz', records)
        tokens,kept = tokens+n,kept+len(records)
        seconds = time.time()-begin
        if r%10==0: print(f'round {r}: {tokens:,} tokens, {tokens/seconds:,.0f} a second, {kept:,} texts', flush=True)


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('out', type=Path)
    p.add_argument('--model', default='demo')
    p.add_argument('--device', default='cuda')
    p.add_argument('--minutes', type=float, default=6)
    p.add_argument('--rows', type=int, default=2048, help='answers at the same time')
    p.add_argument('--rounds', type=int, default=25, help='rounds a file')
    p.add_argument('--keep', type=float, default=1., help='part of the answers that is kept: the likeliest')
    p.add_argument('--seed', type=int, default=1)
    a = p.parse_args()
    write(a)
    files = sorted(a.out.glob('text-*.jsonl.xz'))
    total = [json.loads(line) for f in files for line in lzma.open(f, 'rt')]
    packed = sum(f.stat().st_size for f in files)
    print(f'{len(total):,} texts, {sum(len(r["text"]) for r in total):,} characters, {packed:,} bytes packed')
    for r in random.Random(0).sample(total, min(12, len(total))): print('---', r['kind'], '|', r['prompt'], '\n', r['text'][:300])


if __name__=='__main__': main()
