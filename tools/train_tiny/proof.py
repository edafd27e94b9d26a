"""That a trained folder is what engines think it is: PyTorch's numbers against Atlas's, text, formats and sizes, and cards that are not there.

    python tools/train_tiny/proof.py FOLDER [--tokens 150]

Needs Atlas and PyTorch, no card. Every line ends in "ok", or the program fails.
"""
import argparse,sys,tempfile
from pathlib import Path
import numpy as np
import torch
sys.path[:0] = [str(Path(__file__).parents[2])]
import rules,train
from model import delta_chunks,delta_steps,l2
from atlas.card.emulator import CardArray,Emulator
from atlas.card.launch import recording
from atlas.card.variants import CARDS,Dry
from atlas.engine.cache import KVCache
from atlas.engine.draft import MTPDrafter
from atlas.ground.quantize import quantize
from atlas.ground.requests import SamplingParams
from atlas.model.model import Piece,make_batch
from atlas.text.parsers import Splitter
from atlas.use.llm import LLM

CardArray.__array_priority__ = 1.  # arrays of cards that are not there stay such when they are joined

def line(what, ok, seen):
    print(f'{what}: {seen} {"ok" if ok else "WRONG"}', flush=True)
    if not ok: sys.exit(1)

def far(a, b): return float(np.abs(a-b).max()/np.abs(b).max())

def recurrence():
    "Chunks against steps, with keys that are much alike, and with slow and fast decays"
    for fastest in (.1, 20.):
        g = torch.Generator().manual_seed(0)
        q,k,v = (torch.randn(2, 150, 4, 64, generator=g) for _ in range(3))
        q,k,beta = l2(q)/8,l2(k+.7),torch.rand(2, 150, 4, generator=g)
        decay = -torch.rand(2, 150, 4, generator=g)*fastest
        e = far(delta_chunks(q, k, v, beta, decay).numpy(), delta_steps(q, k, v, beta, decay).numpy())
        line(f'delta rule in chunks, decays up to {fastest}', e<1e-5, f'{e:.1e}')

def steps(llm, ids):
    "Logits of `ids`, one row a step"
    cache = KVCache(llm.config, llm.device, 64, num_states=2, block_size=16, dtype=np.float32)
    table = cache.table()
    table.ensure(len(ids))
    one = lambda i: make_batch([Piece([ids[i]], i, table.blocks, 1, state=1)], False, 16, llm.device)
    return np.concatenate([llm.device.download(llm.model.forward(one(i), cache)) for i in range(len(ids))])

@torch.no_grad()
def numbers(m, llm, ids):
    "Logits by prompt and by steps, and three chained drafts"
    t = torch.tensor([ids])
    h,_ = m(t)
    want = m.head(h)[0].numpy()
    line('logits of a prompt', (e := far(llm.logits(ids), want))<1e-4, f'{e:.1e}')
    line('logits step by step', (e := far(steps(llm, ids), want))<1e-4, f'{e:.1e}')
    full,rows = [*ids, int(want[-1].argmax())],[]
    for k in range(3):
        states,_ = m.drafts(h, torch.tensor([full+[0]*3]), k+1)
        rows.append(m.head(states[k])[0,-1].numpy())
        full.append(int(rows[-1].argmax()))
    first,drafts,logits = llm.drafts(ids, 3)
    line('logits of three drafts', [first,*drafts]==full[len(ids):] and (e := far(logits, np.stack(rows)))<1e-4, f'{e:.1e} {drafts}')

def talking(llm):
    "Template, tools and parsers, chosen by Atlas"
    tools = [rules.tool('get_weather', 'The weather', city=('string', ''))]
    line('parsers', llm.text.parsers==('hermes','qwen3'), llm.text.parsers)
    prompt = llm.render([rules.user('What is the weather in Rome?')], tools)
    line('prompt with tools', prompt.endswith('<|im_start|>assistant\n<think>\n') and '"get_weather"' in prompt, len(prompt))
    off = llm.render([rules.user('Hi')], enable_thinking=False)
    line('prompt without thoughts', off.endswith('<think>\n\n</think>\n\n'), repr(off[-22:]))
    said = 'I call it.\n</think>\n\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
    s = Splitter('qwen3', 'hermes', tools, opened=True)
    for c in said: s.feed(c)
    if hasattr(s, 'finish'): s.finish()
    r = s.result()
    line('answer with a call', r.calls[0].name=='get_weather' and r.reasoning.strip()=='I call it.', r)
    text = "Tom's 12 cats, naïve ☂\n\n<|im_start|>user\nHi<|im_end|>"
    ids = llm.tokenizer.encode(text)
    line('text and back', llm.tokenizer.decode(ids, skip_special=False)==text, f'{len(ids)} tokens')
    line('marks are tokens', all(len(llm.tokenizer.encode(x))==1 for x in rules_marks()), rules_marks())
    out = llm.chat([rules.user('What is 7 plus 5?')], SamplingParams(temperature=0, max_tokens=40))
    line('chat', True, repr(out.text))

def rules_marks():
    import text
    return text.SPECIAL+text.MARKS

def perplexity(llm, ids):
    x = llm.logits(ids[:-1]).astype(np.float64)
    x = x-x.max(-1, keepdims=True)
    return float(np.exp(np.mean(np.log(np.exp(x).sum(-1))-x[np.arange(len(x)),ids[1:]])))

def size(folder): return sum(f.stat().st_size for f in Path(folder).iterdir())

def cards(folder, ids):
    "Load on cards that are not there, and launch all that the engine and the drafting head would"
    for arch in CARDS:
        for kv in ('f16','fp8','nvfp4'):
            with recording(launch=False) as r: llm = on_dry(folder, arch, kv, ids)
            names = sorted({c[0] for c in r.calls})
            line(f'{folder.name} on a dry {arch}, cache {kv}', 'experts' in names and 'delta_step' in names, f'{len(r.calls)} launches of {" ".join(names)}')

def on_dry(folder, arch, kv, ids):
    "Everything that a card would launch"
    llm = LLM(str(folder), device=Dry(arch, 1<<38), max_seq_len=2048, show=False, drafting=True, kv_cache_memory=1<<28, kv_cache_dtype=kv,
        load_format='dummy', weights='as-shipped')
    llm.engine.warm()
    for i in range(2): llm.engine.add(llm.request(ids[:70], SamplingParams(temperature=.7, max_tokens=4, ignore_eos=True), str(i)))
    while llm.engine.has_work: llm.engine.step()
    llm.drafts(ids[:70], 3)
    return llm

def emulated(folder, host, ids):
    "The kernels themselves, run on this machine's processor"
    llm = LLM(str(folder), device=Emulator(), max_seq_len=512, max_num_seqs=2, show=False, drafting=True, kv_cache_memory=1<<26)
    e = far(llm.logits(ids), host.logits(ids))
    line(f'{folder.name} on the emulator, logits', e<3e-2, f'{e:.1e}')
    a,b = llm.drafts(ids, 2),host.drafts(ids, 2)
    line(f'{folder.name} on the emulator, drafts', far(a[2][:1], b[2][:1])<3e-2, f'{a[:2]} {b[:2]}')
    p = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    a,b = (x.generate(ids, p).token_ids for x in (llm,host))
    line(f'{folder.name} on the emulator, greedy', a[:2]==b[:2], f'{a} {b}')

def main():
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument('folder', type=Path)
    p.add_argument('--tokens', type=int, default=150)
    p.add_argument('--formats', default='fp8,nvfp4')
    p.add_argument('--no-cards', action='store_true')
    p.add_argument('--emulator', action='store_true', help='also run the kernels on the processor; takes minutes')
    a = p.parse_args()
    torch.manual_seed(0)
    recurrence()
    m = train.load(a.folder)
    llm = LLM(str(a.folder), device='cpu', show=False, drafting=True, max_seq_len=2048)
    docs = train.text.documents([], 80, 40, 99)
    ids = llm.tokenizer.encode('<|endoftext|>'.join(docs), add_special=False)
    numbers(m, llm, ids[:a.tokens])
    talking(llm)
    print(f'bf16: {size(a.folder):,} bytes, perplexity {perplexity(llm, ids[:1500]):.3f}')
    with tempfile.TemporaryDirectory() as d:
        for fmt in a.formats.split(','):
            to = Path(d)/fmt
            r = quantize(a.folder, to, fmt, head=fmt=='nvfp4', show=False)
            q = LLM(str(to), device='cpu', show=False, drafting=True, max_seq_len=2048)
            good = q.drafts(ids[:70], 3)[2].shape==(3,q.config.vocab_size)
            line(f'{fmt}, layout {r.layout}', good and (fmt!='nvfp4' or size(to)<=6_000_000), f'{size(to):,} bytes, '
                f'error {100*r.error:.2f} %, perplexity {perplexity(q, ids[:1500]):.3f}, kept {len(r.kept)}')
            print({f.name:f.stat().st_size for f in sorted(to.iterdir())})
            if not a.no_cards: cards(to, ids)
            if a.emulator: emulated(to, q, ids[:40])

if __name__=='__main__': main()
