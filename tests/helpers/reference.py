"""What make_reference.py recorded, models fed by hand to be compared with it, and the folders'
tensors as they are stored."""
import json,shutil
from pathlib import Path
import numpy as np
from atlas.engine.cache import KVCache,TAILS
from atlas.engine.draft import AssistantDrafter,End,Ends,MTPDrafter
from atlas.card.device import get_device
from atlas.model.model import Piece,build,load_model,make_batch
from atlas.ops.linear import MAX_ROWS
from atlas.ground.weights import load,open_checkpoint
from .checkpoints import st_bytes

TOL = 1e-4  # of the largest value of the reference
data = Path(__file__).parents[1]/'data'
host = get_device('cpu')
refs = {p.parent.name: dict(np.load(p))
    for p in sorted(data.glob('*/ref.npz'))}
def having(key):
    "Names of the folders whose reference has `key`"
    return [n for n,r in refs.items() if key in r]

# Folders with integers in groups that a library packed, and what reads them in atlas.ground.files
INT4 = {'llama-ct-int4':'_ct_codes', 'llama-ct-int4-zeros':'_ct_codes',
    'llama-gptq':'_gptq_codes', 'qwen3-awq':'_awq_codes'}

def error(got, want):
    assert got.shape==want.shape
    return float(
        np.abs(got-want).max()
        /np.abs(want).max())

def model(name, change=None):
    "The model of a folder; with `change`, of a config that it does not have"
    with open_checkpoint(data/name) as ck:
        if not change:
            return load_model(ck, host, 256, parts=('','mtp','vision'))
        m = build(change(ck.config))
        return m.bind(
            load(
                ck, [w for w in m.wants() if not w.part], host,
                ignore=('*',)),
            host, 256)

class Run:
    "One sequence on one model"
    def __init__(self, model):
        self.model = model
        self.cache = KVCache(
            model.c, host, 16, num_states=2, drafting=bool(model.mtp))
        self.table = self.cache.table()
        self.table.ensure(256)

    def batch(self, ids, start, tiled, media=None):
        return make_batch(
            [
                Piece(
                    list(ids), start, self.table.blocks, len(ids), state=1,
                    media=media)],
            tiled, 16, host)
    def __call__(self, ids, start, tiled, media=None, tap=None):
        return self.model.forward(
            self.batch(ids, start, tiled, media), self.cache, tap)
    def prefill(self, ids, media=None, tap=None):
        return self(ids, 0, True, media, tap)
    def chunks(self, ids, n=64, media=None):
        return np.concatenate([
            self(ids[i:i+n], i, True, media)
            for i in range(0, len(ids), n)])
    def steps(self, ids, start=0, media=None):
        return np.concatenate([self([t], start+i, False, media) for i,t in enumerate(ids)])
    def stream(self, ids):
        "The stream after the last layer"
        b = self.batch(ids, 0, True)
        return self.model.trunk(b, self.cache)[b.out]
    def hidden(self, ids):
        "Rows that the output matrix sees"
        return self.model.final(self.stream(ids))
    def states(self):
        "The recurrent state, by the reference's names"
        rec = {f'rec{i}':a[1//TAILS] for i,a in self.cache.rec.items()}
        return rec|{f'conv{i}':a[1] for i,a in self.cache.conv.items()}

def mtp(name, sizes=None, normed=True):
    """Logits of the head's first pass, and the tokens and logits of two drafts;
    the head is shown the model's stream, `normed` as it should be, in pieces of `sizes`"""
    r = refs[name]
    run = Run(model(name))
    x = run.stream(r['ids'])
    ids = [*r['ids'].tolist()[1:], int(r['greedy'][0])]
    sizes = sizes or [len(ids)]
    assert sum(sizes)==len(ids)
    norm = run.model.last_norm if normed else None
    one = first_pass(run, x, norm, ids, sizes)
    drafter = MTPDrafter(run.model, run.cache, 2)
    logits = run.model.head(np.concatenate(one), run.model.mtp.last_norm)
    return logits, *proposed(drafter, run, one[-1][-1:], ids[-1], len(ids))

def first_pass(run, x, norm, ids, sizes)->list:
    "Rows of the drafting head for `ids`, shown the stream `x`, `norm`ed, in pieces of `sizes`"
    m,found,at = run.model,[],0
    for n in sizes:
        b = run.batch(ids[at:at+n], at, n>MAX_ROWS)
        rows = np.zeros((b.num_rows,x.shape[1]), np.float32)
        rows[b.out] = x[at:at+n]
        found.append(m.mtp(m, b, rows, norm, run.cache)[b.out])
        at += n
    return found

def proposed(drafter, run, h, newest, at):
    "Tokens and logits that `drafter` proposes after `newest`, which is at position `at`"
    rows = []
    end = End(newest, at, 255, run.table.blocks)
    ends = Ends([end], run.cache, host)
    found = drafter.propose(h, ends, drafter.k, rows.append)
    return [int(ids[0]) for ids in found],np.concatenate(rows)

def drafts(name, beyond=0, spoil=lambda assistant: None):
    "Three drafts of an assistant, and their logits; its query stands `beyond` where it should"
    r = refs[name]
    run = Run(model(r['target'].item()))
    a = model(name)
    spoil(a)
    ids,newest = r['draft_ids'],int(r['draft_first'][0])
    h,at = run.hidden(ids),len(ids)+beyond
    drafter = AssistantDrafter(run.model, run.cache, a, 3)
    return proposed(drafter, run, h[-1:], newest, at)

def seen(name, m):
    "`Media` of the reference's two images"
    r = refs[name]
    cut = int(np.prod(r['grid'][0]))
    px = r['pixels'].astype(np.float32)
    return m.media(
        r['image_ids'].tolist(),
        list(zip(
            (px[:cut],px[cut:]),
            (tuple(g) for g in r['grid'].tolist()))))

_TYPES = {'BF16':'u2', 'F32':'f4', 'U8':'u1', 'F8_E4M3':'u1', 'I64':'i8'}

def stored(folder):
    """Tensors of a folder as they are stored, BF16 and FP8 as whole numbers, and the names of
    their types"""
    out,types = {},{}
    for p in folder.glob('*.safetensors'):
        b = p.read_bytes()
        n = int.from_bytes(b[:8], 'little')
        for k,e in json.loads(b[8:8+n]).items():
            if k=='__metadata__':
                continue
            lo,hi = (8+n+o for o in e['data_offsets'])
            out[k],types[k] = (
                np.frombuffer(
                    b[lo:hi],
                    _TYPES[e['dtype']]).reshape(e['shape']),
                e['dtype'])
    return out,types

def rewritten(name, to, change):
    """The folder `name` again, its tensors changed by `change`: all of them by name to all of them
    by name"""
    ts,types = stored(data/name)
    ts = change(ts)
    for p in (data/name).glob('*.json'):
        shutil.copy(p, to)
    (to/'model.safetensors').write_bytes(st_bytes(
        ts,
        dtypes={k:types[k]
            for k,a in ts.items()
            if k in types and a.dtype==np.uint8}))
    return to
