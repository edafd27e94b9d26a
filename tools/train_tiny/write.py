"""Simple English, written by Atlas's demo model: shards of JSON lines, a few a minute, until the time is over.

    python tools/train_tiny/write.py OUT --minutes 6 [--device cuda] [--processes 3] [--seqs 256]

Every line is {"kind", "prompt", "text"}. A shard is appended to after each round, so that what was written stays.
"""
import argparse,json,lzma,random,re,subprocess,sys,time
from pathlib import Path
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
from words import EXAMPLES,writing_prompt

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


def prompts(seed:int, n:int)->list[tuple]:
    "What to ask for: kind, question, how the answer begins, most tokens, and an example"
    rng = random.Random(seed)
    asks = [writing_prompt(rng) for _ in range(n)]
    return [(*a, rng.choice(EXAMPLES[a[0]])) for a in asks]


def prompt_ids(llm, question:str, begin:str, example)->list[int]:
    "The prompt up to how the answer begins"
    turns = [dict(role=r, content=c) for r,c in zip(('user','assistant','user'), (*example,question))]
    return llm.tokenizer.encode(llm.render(turns)+begin, add_special=False)


def answer(llm, asks, seed:int, until:float)->tuple[list[dict],int]: # Records, and tokens that were made
    "The model's answers to `asks`, all at once; what is not finished at `until` is cut"
    from atlas.ground.requests import SamplingParams
    said = {}
    for i,(_,question,begin,most,example) in enumerate(asks):
        ids = prompt_ids(llm, question, begin, example)
        params = SamplingParams(temperature=.75, min_p=.08, max_tokens=min(most, llm.max_seq_len-len(ids)-1), seed=seed*100_003+i)
        said[f'{seed}-{i}'] = dict(ask=asks[i], tokens=[], whole=False)
        llm.engine.add(llm.request(ids, params, f'{seed}-{i}'))
    while llm.engine.has_work:
        for e in llm.engine.step():
            if e.token is not None: said[e.id]['tokens'].append(e.token)
            if e.finish: said[e.id]['whole'] = e.finish=='stop'
        if time.time()>until:
            for rid in said: llm.engine.abort(rid)
            break
    out = []
    for s in said.values():
        kind,question,begin,_,example = s['ask']
        text = tidy(begin+llm.tokenizer.decode(s['tokens']), s['whole'])
        if text and text[:60]!=example[1][:60]: out.append(dict(kind=kind, prompt=question, text=text))
    return out,sum(len(s['tokens']) for s in said.values())


def append(path:Path, records:list[dict]):
    "One more stream at the end of an .xz file: whoever reads it sees one file"
    lines = ''.join(json.dumps(r)+'\n' for r in records)
    with open(path, 'ab') as f: f.write(lzma.compress(lines.encode(), preset=6))


def work(a, k:int):
    "Process `k`: rounds of answers until the time is over"
    from atlas.use.llm import LLM
    card = a.device!='cpu'
    more = dict(kv_cache_memory=a.seqs*a.context*32*1024, chunk=8192) if card else {}
    llm = LLM(a.model, device=a.device, max_num_seqs=a.seqs, max_seq_len=a.context, max_queue=max(256, 2*a.seqs), show=False, **more)
    print(f'[{k}] {llm!r}, ready in {llm.load_seconds:.0f} s', flush=True)
    (a.out/f'.ready{k}').touch()
    start,tokens,kept,asked,round_ = time.time(),0,0,0,0
    while time.time()<a.until:
        asks = prompts(a.seed*1_000_003+round_*1009+k, a.seqs)
        records,n = answer(llm, asks, (a.seed*101+round_)*64+k, a.until)
        append(a.out/f'text-{k}.jsonl.xz', records)
        tokens,kept,asked,round_ = tokens+n,kept+len(records),asked+len(asks),round_+1
        print(f'[{k}] round {round_}: {tokens:,} tokens, {tokens/(time.time()-start):,.0f} a second, {kept} of {asked} answers kept', flush=True)
    llm.close()


def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('out', type=Path)
    p.add_argument('--model', default='demo')
    p.add_argument('--device', default='cuda')
    p.add_argument('--minutes', type=float, default=6)
    p.add_argument('--processes', type=int, default=3)
    p.add_argument('--seqs', type=int, default=256, help='answers at the same time, in each process')
    p.add_argument('--context', type=int, default=384)
    p.add_argument('--seed', type=int, default=1)
    p.add_argument('--until', type=float)
    p.add_argument('--inner', type=int)
    a = p.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    a.until = a.until or time.time()+60*a.minutes
    if a.inner is not None: return work(a, a.inner)
    for f in a.out.glob('.ready*'): f.unlink()
    args = [x for x in sys.argv[1:] if x!='--inner']
    children = []
    for k in range(a.processes):
        children.append(subprocess.Popen([sys.executable, __file__, *args, '--until', str(a.until), '--inner', str(k)]))
        while k==0 and not (a.out/'.ready0').exists() and children[0].poll() is None: time.sleep(.2)  # it compiles for all
    for c in children:
        try: c.wait(max(5, a.until-time.time()+40))
        except subprocess.TimeoutExpired: c.kill()
    for f in a.out.glob('.ready*'): f.unlink()
    total = [json.loads(l) for f in sorted(a.out.glob('text-*.jsonl.xz')) for l in lzma.open(f, 'rt')]
    print(f'{len(total):,} texts, {sum(len(r["text"]) for r in total):,} characters, '
        f'{sum(f.stat().st_size for f in a.out.glob("text-*.jsonl.xz")):,} bytes packed')
    for r in random.Random(0).sample(total, min(6, len(total))): print('---', r['kind'], '|', r['prompt'], '\n', r['text'][:300])


if __name__=='__main__': main()
