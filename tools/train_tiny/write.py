"""Simple English by Atlas's demo model: JSON lines, round after round, until the time is over.

    python tools/train_tiny/write.py OUT --minutes 3.4 [--device cuda] [--rows 2048] [--seed 1]

Every line is {"kind", "prompt", "text"}. A file is appended to after each round, so that what was
written stays. Several processes at the same time, each with its own seed, fill a card: a part of
the time is tokenizing and decoding.
"""
import argparse,json,lzma,random,re,sys,time
from itertools import count
from pathlib import Path
HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1])]
import torch
from words import EXAMPLES,KINDS,writing_prompt
from writer import Writer

REFUSALS = re.compile(r"as an ai|i'm sorry|i am sorry, but|i cannot|i can't help|language model|"
    r"here(?:'s| is) (?:a|the) (?:short|simple|list|rewritten|revised|possible)|"
    r'certainly|sure[,!]|example of a', re.I)
MARKUP = re.compile(r'[*#`<>\[\]{}|\\_=~^]')
PLAIN = str.maketrans({
    '\u2018':"'", '\u2019':"'", '\u201c':'"', '\u201d':'"',
    '\u2013':'-', '\u2014':'-', '\u2026':'...'})


def plain(text:str, whole:bool)->str:
    "Plain letters, single spaces, up to the last whole sentence"
    text = text.translate(PLAIN).strip()
    if not whole:
        end = max(text.rfind(c) for c in '.!?')
        text = text[:end+1]
    text = re.sub(r'\n\d+[.)]$', '', text.rstrip())  # a list's number without its line
    text = re.sub(r'[ \t]+', ' ', text)
    return re.sub(r'\n{2,}', '\n\n', text).strip()


def repeats(text:str)->bool:
    "Does it go round in circles?"
    lines = [l.strip() for l in text.split('\n') if l.strip()]
    lines = [re.sub(r'^\d+[.)]\s*', '', l) for l in lines]
    if len(set(lines))<len(lines):
        return True
    sentences = [s for s in re.split(r'(?<=[.!?])\s+', text) if len(s)>12]
    if len(set(sentences))<.9*len(sentences):
        return True
    words = re.findall('[a-z]+', text.lower())
    three = list(zip(words, words[1:], words[2:]))
    return len(three)>20 and len(set(three))<.85*len(three)


def tidy(text:str, whole:bool)->str|None: # None: not worth keeping
    "The text of an answer; None if a filter refuses it"
    text = plain(text, whole)
    if not 12<=len(text)<=1500 or not text.isascii():
        return None
    if MARKUP.search(text) or REFUSALS.search(text) or repeats(text):
        return None
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
    roles = ('user', 'assistant', 'user')
    turns = [dict(role=r, content=c) for r,c in zip(roles, (*example, question))]
    return llm.tokenizer.encode(llm.render(turns)+begin, add_special=False)


def write_round(llm, writer:Writer, kind:str, seed:int, rows:int)->tuple[list[dict],int]:
    "Answers of one kind that `tidy` lets through, as records; and how many tokens were made"
    asks = asks_of(kind, seed, rows)
    prompts = [prompt_ids(llm, question, begin, example) for question,begin,example,_ in asks]
    torch.manual_seed(seed)
    answers = writer.write(prompts, asks[0][-1])
    records = []
    for (question,begin,example,_),(ids,whole) in zip(asks, answers):
        text = tidy(begin+llm.tokenizer.decode(ids), whole)
        if not text or text[:60]==example[1][:60]:
            continue
        records.append(dict(kind=kind, prompt=question, text=text))
    return records,sum(len(ids) for ids,_ in answers)


def append(path:Path, records:list[dict]):
    "One more stream at the end of an .xz file: whoever reads it sees one file"
    lines = ''.join(json.dumps(r)+'\n' for r in records)
    with open(path, 'ab') as f:
        f.write(lzma.compress(lines.encode(), preset=4))


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
        if time.time()>end:
            break
        kind,seed = order[r%len(order)],a.seed*100_003+r
        records,n = write_round(llm, writer, kind, seed, a.rows)
        append(a.out/f'text-{a.seed}.jsonl.xz', records)
        tokens,kept = tokens+n,kept+len(records)
        if r%10:
            continue
        speed = tokens/(time.time()-begin)
        print(f'round {r}: {tokens:,} tokens, {speed:,.0f} a second, {kept:,} texts', flush=True)


def show(folder:Path):
    "How much there is, and some of it"
    files = sorted(folder.glob('text-*.jsonl.xz'))
    total = [json.loads(line) for f in files for line in lzma.open(f, 'rt')]
    letters = sum(len(r['text']) for r in total)
    packed = sum(f.stat().st_size for f in files)
    print(f'{len(total):,} texts, {letters:,} characters, {packed:,} bytes packed')
    for r in random.Random(0).sample(total, min(12, len(total))):
        print('---', r['kind'], '|', r['prompt'], '\n', r['text'][:300])


def main():
    as_it_is = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_is)
    p.add_argument('out', type=Path)
    p.add_argument('--model', default='demo')
    p.add_argument('--device', default='cuda')
    p.add_argument('--minutes', type=float, default=3.4)
    p.add_argument('--rows', type=int, default=2048, help='answers at the same time')
    p.add_argument('--seed', type=int, default=1)
    a = p.parse_args()
    write(a)
    show(a.out)


if __name__=='__main__':
    main()
