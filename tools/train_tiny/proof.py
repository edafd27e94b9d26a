"""That a trained folder is what engines think it is: numbers, text, formats, sizes, and dry cards.

    python tools/train_tiny/proof.py FOLDER [--tokens 150]

Needs Atlas and PyTorch, no card. Every line ends in "ok", or the program fails. --write FILE keeps
what each format costs, by the text that is shipped, which was not learnt.
"""
import argparse,json,sys,tempfile
from pathlib import Path
import numpy as np
import torch
sys.path[:0] = [str(Path(__file__).parents[2])]
import rules,text
from model import delta_chunks,delta_steps,l2,load
from atlas.card.emulator import CardArray,Emulator
from atlas.card.launch import recording
from atlas.card.variants import CARDS,Dry
from atlas.engine.cache import KVCache
from atlas.ground.quantize import quantize
from atlas.ground.requests import SamplingParams
from atlas.model.model import Piece,make_batch
from atlas.text.parsers import Splitter
from atlas.use.llm import LLM

CardArray.__array_priority__ = 1.  # joined with others, arrays of dry cards stay such
SAID = ('I call it.\n</think>\n\n'
    '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>')
COST = '{bytes:,} bytes, error {error:.4f}, perplexity {perplexity:.4f}'
MIXED = "Tom's 12 cats, naïve ☂\n\n<|im_start|>user\nHi<|im_end|>"


def check(what:str, ok:bool, seen):
    "A line, or the end"
    print(f'{what}: {seen} {"ok" if ok else "WRONG"}', flush=True)
    if not ok:
        sys.exit(1)


def far(a, b)->float:
    "Largest difference over the largest number"
    return float(np.abs(a-b).max()/np.abs(b).max())


def close(what:str, a, b, most:float=1e-4):
    e = far(a, b)
    check(what, e<most, f'{e:.1e}')


def recurrence():
    "Chunks against steps, with keys that are much alike, and with slow and fast decays"
    for fastest in (.1, 20.):
        g = torch.Generator().manual_seed(0)
        q,k,v = (torch.randn(2, 150, 4, 64, generator=g) for _ in range(3))
        beta = torch.rand(2, 150, 4, generator=g)
        decay = -torch.rand(2, 150, 4, generator=g)*fastest
        x = (l2(q)/8, l2(k+.7), v, beta, decay)
        chunks,steps = delta_chunks(*x).numpy(),delta_steps(*x).numpy()
        close(f'delta rule in chunks, decays up to {fastest}', chunks, steps, 1e-5)


def step_logits(llm, ids:list[int]):
    "Logits of `ids`, one row a step"
    cache = KVCache(llm.config, llm.device, 64, num_states=2, block_size=16, dtype=np.float32)
    table = cache.table()
    table.ensure(len(ids))
    rows = []
    for i,t in enumerate(ids):
        piece = Piece([t], i, table.blocks, 1, state=1)
        batch = make_batch([piece], False, 16, llm.device)
        rows.append(llm.device.download(llm.model.forward(batch, cache)))
    return np.concatenate(rows)


@torch.no_grad()
def numbers(m, llm, ids:list[int]):
    "Logits by prompt and by steps, and three chained drafts"
    h,_ = m(torch.tensor([ids]))
    want = m.head(h)[0].numpy()
    close('logits of a prompt', llm.logits(ids), want)
    close('logits step by step', step_logits(llm, ids), want)
    full,rows = [*ids, int(want[-1].argmax())],[]
    for k in range(3):
        states,_ = m.drafts(h, torch.tensor([full+[0]*3]), k+1)
        rows.append(m.head(states[k])[0,-1].numpy())
        full.append(int(rows[-1].argmax()))
    first,drafts,logits = llm.drafts(ids, 3)
    check('three drafts', [first, *drafts]==full[len(ids):], drafts)
    close('logits of three drafts', logits, np.stack(rows))


def talking(llm):
    "Template, tools and parsers, chosen by Atlas"
    tools = [rules.tool('get_weather', 'The weather', city=('string', ''))]
    check('parsers', llm.text.parsers==('hermes','qwen3'), llm.text.parsers)
    prompt = llm.render([rules.user('What is the weather in Rome?')], tools)
    opened = prompt.endswith('<|im_start|>assistant\n<think>\n')
    check('prompt with tools', opened and '"get_weather"' in prompt, len(prompt))
    off = llm.render([rules.user('Hi')], enable_thinking=False)
    check('prompt without thoughts', off.endswith('<think>\n\n</think>\n\n'), repr(off[-22:]))
    calling(tools)
    ids = llm.tokenizer.encode(MIXED)
    same = llm.tokenizer.decode(ids, skip_special=False)==MIXED
    check('text and back', same, f'{len(ids)} tokens')
    marks = text.SPECIAL+text.MARKS
    check('marks are tokens', all(len(llm.tokenizer.encode(x))==1 for x in marks), marks)
    out = llm.chat([rules.user('What is 7 plus 5?')], SamplingParams(temperature=0, max_tokens=40))
    check('chat', '12' in out.text, repr(out.text))


def calling(tools:list[dict]):
    "An answer with a thought and a call, as the parsers split it"
    s = Splitter('qwen3', 'hermes', tools, opened=True)
    for c in SAID:
        s.feed(c)
    if hasattr(s, 'finish'):
        s.finish()
    r = s.result()
    thought = r.reasoning.strip()
    check('answer with a call', r.calls[0].name=='get_weather' and thought=='I call it.', r)


HELD_OUT = Path(text.HERE).parents[1]/'atlas'/'models'/'tiny'/'held_out.txt'


def perplexity(llm, tokens:int=2000, window:int=500)->float:
    "Of the first tokens of the text that was not learnt, in windows"
    ids = llm.tokenizer.encode(HELD_OUT.read_text(), add_special=False)[:tokens]
    logp = []
    for i in range(0, tokens, window):
        now,after = ids[i:i+window],ids[i+1:i+window+1]
        x = llm.logits(now).astype(np.float64)[:len(after)]
        x = x-x.max(-1, keepdims=True)
        x = x-np.log(np.exp(x).sum(-1, keepdims=True))
        logp += x[np.arange(len(after)),after].tolist()
    return float(np.exp(-np.mean(logp)))


def size(folder:Path)->int:
    return sum(f.stat().st_size for f in Path(folder).iterdir())


def cards(folder:Path, ids:list[int]):
    "Load on cards that are not there, and launch all that the engine and the drafting head would"
    for arch in CARDS:
        for kv in ('f16','fp8','nvfp4'):
            with recording(launch=False) as r:
                on_dry(folder, arch, kv, ids)
            names = sorted({c[0] for c in r.calls})
            ok = 'experts' in names and 'delta_step' in names
            seen = f'{len(r.calls)} launches of {len(names)} kernels'
            check(f'{folder.name} on a dry {arch}, cache {kv}', ok, seen)


def on_dry(folder:Path, arch:str, kv:str, ids:list[int]):
    "Everything that a card would launch"
    llm = LLM(
        str(folder),
        device=Dry(arch, 1<<38),
        max_seq_len=2048,
        show=False,
        drafting=True,
        kv_cache_memory=1<<28,
        kv_cache_dtype=kv,
        load_format='dummy',
        weights='as-shipped')
    llm.engine.warm()
    params = SamplingParams(temperature=.7, max_tokens=4, ignore_eos=True)
    for i in range(2):
        llm.engine.add(llm.request(ids[:70], params, str(i)))
    while llm.engine.has_work:
        llm.engine.step()
    llm.drafts(ids[:70], 3)


def emulated(folder:Path, host, ids:list[int]):
    "The kernels themselves, run on this machine's processor"
    sizes = dict(max_seq_len=512, max_num_seqs=2, kv_cache_memory=1<<26)
    llm = LLM(str(folder), device=Emulator(), show=False, drafting=True, **sizes)
    name = f'{folder.name} on the emulator'
    close(f'{name}, logits', llm.logits(ids), host.logits(ids), 3e-2)
    a,b = llm.drafts(ids, 2),host.drafts(ids, 2)
    close(f'{name}, drafts', a[2][:1], b[2][:1], 3e-2)
    p = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    a,b = (x.generate(ids, p).token_ids for x in (llm, host))
    check(f'{name}, greedy', a[:2]==b[:2], f'{a} {b}')


def caches(folder:Path):
    "What formats of keys and values cost, by the kernels on the emulator"
    for kv in ('f16','fp8','nvfp4'):
        sizes = dict(max_seq_len=512, max_num_seqs=2, kv_cache_memory=1<<26)
        llm = LLM(str(folder), device=Emulator(), show=False, kv_cache_dtype=kv, **sizes)
        print(f'cache in {kv}: perplexity {perplexity(llm, 400, 400):.4f}', flush=True)


def formats(a, ids:list[int])->list[dict]:
    "Quantised copies: layout, size, error, perplexity, cards"
    out = []
    with tempfile.TemporaryDirectory() as d:
        for fmt in a.formats.split(','):
            to = Path(d)/fmt
            r = quantize(a.folder, to, fmt, head=fmt=='nvfp4', show=False)
            q = LLM(str(to), device='cpu', show=False, drafting=True, max_seq_len=2048)
            good = q.drafts(ids[:70], 3)[2].shape==(3, q.config.vocab_size)
            small = fmt!='nvfp4' or size(to)<=6_000_000
            out.append(dict(format=fmt, bytes=size(to), error=r.error, perplexity=perplexity(q)))
            seen = COST.format(**out[-1])
            check(f'{fmt}, layout {r.layout}', good and small, seen)
            if not a.no_cards:
                cards(to, ids)
            if a.emulator:
                emulated(to, q, ids[:40])
            if a.emulator and fmt=='nvfp4':
                caches(to)
    return out


def main():
    as_it_is = argparse.RawDescriptionHelpFormatter
    p = argparse.ArgumentParser(description=__doc__, formatter_class=as_it_is)
    p.add_argument('folder', type=Path)
    p.add_argument('--tokens', type=int, default=150)
    p.add_argument('--formats', default='fp8,mxfp4,nvfp4')
    p.add_argument('--write', type=Path)
    p.add_argument('--no-cards', action='store_true')
    p.add_argument('--emulator', action='store_true', help='run the kernels on the processor, too')
    a = p.parse_args()
    torch.manual_seed(0)
    recurrence()
    m = load(a.folder)
    llm = LLM(str(a.folder), device='cpu', show=False, drafting=True, max_seq_len=2048)
    docs = text.documents([], 80, 40, 99)
    ids = llm.tokenizer.encode('<|endoftext|>'.join(docs), add_special=False)
    numbers(m, llm, ids[:a.tokens])
    talking(llm)
    bf16 = dict(format='bf16', bytes=size(a.folder), error=0., perplexity=perplexity(llm))
    print('bf16: {bytes:,} bytes, perplexity {perplexity:.4f}'.format(**bf16))
    rows = [bf16, *formats(a, ids)]
    if a.write:
        a.write.write_text(json.dumps(rows, indent=1)+'\n')


if __name__=='__main__':
    main()
