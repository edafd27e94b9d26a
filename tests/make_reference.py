"""Make the small reference checkpoints of tests/data: random weights in the layout of published
ones, with what another implementation makes of them.

    pip install torch==2.13.0 transformers==5.23.0 && python tests/make_reference.py [NAME...]

(Folders with INT4 are packed by libraries of their own: see helpers/reference_integers.py.)

Run by hand, never in CI: the tests only read what it wrote. For each row of `CASES` it makes a
model of that shape, fills it with numbers that depend on nothing but the seed and the tensor's
name, rounds them to what is stored, saves them as the publisher does (the library's own names;
quantised by helpers/reference_formats.py), and loads the plain weights again in float32, with
plain attention. ref.npz then has

    ids [T]                  prompt
    logits [T,V]             logits of the whole prompt
    next_ids [D]             tokens fed one at a time
    next_logits [D,V]        logits after each, from the cache
    rows [R]                 positions kept below
    layers [L,R,H]           residual stream after each layer, at those positions
    greedy [G]               the likeliest tokens that continue the prompt, each after the last
    rec{i}, conv{i}          state of recurrent layer i after the prompt: [heads,a,b], and
                             [K-1,C], newest last
    route_ids, route_weights [M,R,k] what the routers of the M sparse layers chose at `rows`, ids
                             in rising order
    mtp_logits [R,V]         of the head for the token after the next, at `rows`, fed the prompt's
                             tokens from the second on and greedy[0]
    mtp_again [V]            of its second pass, fed its own hidden row and token
    mtp_draft [2]            the tokens of both passes
    pixels, grid             two images, as patches
    features, deep{j}        what the tower makes of them
    image_*                  ids, pos [3,T], logits of a prompt with them, next_ids and
                             next_logits after it
    draft_*                  a drafter's: ids (its target's prompt), first (the token after it),
                             tokens [3], logits [3,V]; `target` names the target's folder

No choice among experts, greedy tokens or drafts was close. A quantised folder's reference is made
of its dequantised weights, with activations left alone.

`transformers` is the reference because it is where the configs' meaning is defined. It has no MTP
head; that one is put together from its layers as vLLM's qwen3_next_mtp.py does it. The folders
differ from each other, and from any published model, in shape.
"""
import copy,json,re,shutil,sys,tempfile,zlib
from pathlib import Path
import numpy as np, torch, transformers
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import nn
from helpers.reference_cases import CASES
from helpers.reference_formats import per_expert,quantise,stacked,transposed

data = Path(__file__).parent/'data'
D,G,LAYER_ROWS = 10,12,24

# -- making a folder
# --------------------------------------------------------------------------------------------------

def zero_centred(kind, name):
    return (
        kind.startswith(('qwen3_next','qwen3_5'))
        and 'linear_attn.norm' not in name
        and 'visual' not in name)

def values(name, shape, kind='llama'):
    """Numbers for tensor `name`: sized so that attention is neither flat nor one-hot, memory
    neither lost nor kept, and no layer drowns the stream"""
    rng = np.random.default_rng([20260, zlib.crc32(name.encode())])
    if name.endswith('token_ordering'):
        return rng.permutation(shape[0])
    x = rng.standard_normal(shape, np.float32)
    # in [0,1]
    u = (x-x.min())/max(float(np.ptp(x)), 1e-3)
    leaf = name.rsplit('.', 1)[-1]
    if leaf=='A_log':
        return np.log(.5+3.5*u)
    if leaf=='dt_bias':
        # the library clamps Mamba's smallest steps, in one of its two paths
        return 4*u-2.5 if 'mixer' in name else 5*u-4.5
    if leaf=='layer_scalar':
        return .8+.1*np.tanh(x)
    if leaf in ('D','scale','per_expert_scale'):
        return 1+.25*x
    if leaf.endswith('bias'):
        return .3*x
    if leaf=='sinks':
        return 1+x
    if 'conv1d' in name:
        return .5*x
    if 'norm' in name:
        return (
            (
                0 if zero_centred(kind, name)
                else .45 if kind.startswith('gemma') and 'q_norm' in name else 1)+.25*x)
    if 'embed' in name and 'patch_embed' not in name:
        return (.12 if kind.startswith('gemma') else .3 if 'pos_embed' in name else .15)*x
    wide = leaf if leaf!='weight' else name.split('.')[-2]
    gain = (
        1.6 if 'lm_head' in name
        else 1.5 if wide in ('q_proj','k_proj')
        else .6 if wide in ('o_proj','out_proj','down_proj') else 1.)
    if kind=='gpt_oss' and leaf=='gate_up_proj':
        gain = 3.  # some beyond the limit
    if re.search(r'(\.gate|router|router\.proj)\.weight$', name):
        gain = 2.
    fan = (
        shape[1] if kind=='gpt_oss' and len(shape)==3
        else np.prod(shape[1:]) if len(shape)==5
        else shape[-1])
    return gain*x/np.sqrt(fan)

def fill(module, name, kind, keep32=''):
    "Give every tensor of `module` its numbers, rounded to bfloat16 but for those of `keep32`"
    for n,p in [*module.named_parameters(), *module.named_buffers()]:
        if 'inv_freq' in n or n.endswith(('embed_scale','_std','_mean')):
            continue
        v = torch.from_numpy(np.ascontiguousarray(values(
            f'{name}/{n}', tuple(p.shape), kind))).to(p.dtype)
        p.data.copy_(
            v if not v.is_floating_point() or keep32 and re.search(keep32, n)
            else v.bfloat16().to(p.dtype))
    return module

def kind_of(case): return case.cfg['model_type']
def library_class(case): return getattr(transformers, case.cfg['architectures'][0])

class MTP(nn.Module):
    """Qwen's multi-token prediction head: one full-attention layer of the model between two norms
    and one"""
    def __init__(self, dec):
        super().__init__()
        c = copy.deepcopy(dec.config)
        c.layer_types,c.num_hidden_layers,c._attn_implementation = ['full_attention'],1,'eager'
        def norm():
            return type(dec.norm)(c.hidden_size, eps=c.rms_norm_eps)
        self.pre_fc_norm_embedding = norm()
        self.pre_fc_norm_hidden = norm()
        self.norm = norm()
        self.fc = nn.Linear(2*c.hidden_size, c.hidden_size, bias=False)
        self.layers = nn.ModuleList([type(dec.layers[0])(c, 0)])

    def forward(self, dec, tokens, hidden):
        """Rows [T,H] that predict the token after `tokens` [T], of the model's rows [T,H] before
        them"""
        x = self.fc(torch.cat(
            [self.pre_fc_norm_embedding(dec.embed_tokens(tokens)), self.pre_fc_norm_hidden(hidden)],
            -1))[None]
        pos = torch.arange(len(tokens))[None]
        mask = torch.full(
            (len(tokens),)*2,
            -torch.inf).triu(1)[None,None]
        y = self.layers[0](
            x, position_embeddings=dec.rotary_emb(x, pos), attention_mask=mask, position_ids=pos)
        return self.norm(y[0] if isinstance(y, tuple) else y)[0]

def decoder(model):
    d = model.get_decoder()
    return getattr(d, 'language_model', d)

def published(case, name, tmp):
    "All tensors of the model by the names of a release, in float32"
    cfg = transformers.AutoConfig.for_model(**json.loads(json.dumps(case.cfg)))
    model = fill(
        library_class(case)(cfg).float(), name, kind_of(case), case.keep32)
    model.tie_weights()
    model.save_pretrained(tmp)
    d = load_file(tmp/'model.safetensors')
    if case.mtp:
        head = {f'mtp.{k}':v
            for k,v in fill(
                MTP(decoder(model)), f'{name}/mtp',
                kind_of(case)).state_dict().items()}
        d |= per_expert(head) if kind_of(case)=='qwen3_next' else head
    return {
        'apart':per_expert, 'stacked':stacked, 'transposed':transposed, '':dict}[case.experts](
        d)

def build(name, case, tmp):
    """A folder as a publisher would upload it, and one of the plain weights for the library;
    those of the MTP head apart"""
    out,plain = data/name,tmp/'plain'
    stored,dense = quantise(published(case, name, tmp), case.rules)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    plain.mkdir()
    for k,v in dense.items():
        if (
            stored.get(k) is v
            and v.is_floating_point()
            and not (case.keep32 and re.search(case.keep32, k))):
            stored[k] = v.bfloat16()
    stored |= {k:torch.tensor(v) for k,v in case.scales.items()}
    save_torch_state_dict(stored, out, max_shard_size=case.shard or '1GB')
    (out/'config.json').write_text(
        json.dumps(
            case.cfg|(dict(quantization_config=case.quant) if case.quant else {}),
            indent=1)+'\n')
    if case.hf_quant:
        (out/'hf_quant_config.json').write_text(json.dumps(case.hf_quant, indent=1)+'\n')
    for p in out.iterdir():
        p.chmod(0o644)
    if case.experts:
        dense = stacked(dense)
    save_torch_state_dict(
        {k:v.contiguous()
            for k,v in dense.items() if not k.startswith('mtp.')},
        plain)
    (plain/'config.json').write_text(json.dumps(case.cfg))
    return (
        plain,
        stacked({k.removeprefix('mtp.'):v
            for k,v in dense.items() if k.startswith('mtp.')}))

# -- what the library makes of it
# ------------------------------------------------------------------------------------------------

def final_norm(dec): return dec.norm if hasattr(dec, 'norm') else dec.norm_f
def array(x): return x.detach().float().numpy().copy()

class Watch:
    """While open: the stream after each layer, the row that the output matrix sees, what routers
    chose, and how near the nearest choice of experts was"""
    def __init__(self, model):
        self.dec = decoder(model)
        self.stream = []
        self.routes = []
        self.final = None
        self.closest = np.inf

    def __enter__(self):
        def first(o):
            return (o[0] if isinstance(o, tuple) else o)[0]
        def routed(m, a, o):
            self.routes.append(
                (array(o[2]).astype(np.int32), array(o[1])))
        def last(m, a, o):
            self.final = o[0]
        self.hooks = [
            l.register_forward_hook(
                lambda m,a,o: self.stream.append(array(first(o))))
            for l in self.dec.layers]
        self.hooks += [m.register_forward_hook(routed)
            for m in self.dec.modules()
            if type(m).__name__.lower().endswith('router')]
        self.hooks.append(final_norm(self.dec).register_forward_hook(last))
        self.topk,self.method = torch.topk,torch.Tensor.topk
        def method(x, *a, **kw): return self.choose(x, *a, **kw)
        torch.topk,torch.Tensor.topk = self.choose,method
        return self

    def choose(self, x, k, dim=-1, **kw):
        if k<x.shape[-1]:
            v = self.topk(x, k+1, dim=-1).values
            self.closest = min(
                self.closest,
                float((v[...,-2]-v[...,-1]).min()))
        return self.topk(x, k, dim=dim, **kw)

    def __exit__(self, *_):
        torch.topk,torch.Tensor.topk = self.topk,self.method
        for h in self.hooks:
            h.remove()

def lead(logits):
    "By how much the likeliest is ahead of the next"
    v = logits.topk(2).values
    return float(v[0]-v[1])

def greedy(model, ids, **kw):
    "The likeliest continuation of `ids`, and by how much its closest choice was won"
    out,gap = list(ids),np.inf
    for _ in range(G):
        x = model(torch.tensor([out]), use_cache=False).logits[0,-1]
        out.append(int(x.argmax()))
        gap = min(gap, lead(x))
    return out[len(ids):],gap

def fresh(model):
    "Forget the images of the last prompt"
    if hasattr(getattr(model, 'model', None), 'rope_deltas'):
        model.model.rope_deltas = None

def states(cache, K):
    "rec{i} and conv{i} of the recurrent layers"
    out = {}
    for i,l in enumerate(cache.layers):
        if hasattr(l, 'recurrent_states') and l.is_recurrent_states_initialized[0]:
            out |= {
                f'rec{i}':array(l.recurrent_states[0][0]),
                f'conv{i}':array(l.conv_states[0][0]).T[1-K:]}
    return out

def steps(model, cache, ids):
    "Logits after each of `ids`, fed one at a time"
    out = []
    for i in ids:
        o = model(
            torch.tensor([[int(i)]]), past_key_values=cache, use_cache=True)
        out.append(array(o.logits[0,0]))
        cache = o.past_key_values
    return np.stack(out)

def mtp_rows(model, head, ids, first, final):
    "Logits of the head's first pass [T,V] and of its second [V]"
    dec = decoder(model)
    def lm(h): return model.get_output_embeddings()(h)
    toks = torch.tensor([*ids[1:], first])
    h = head(dec, toks, final)
    one = lm(h)
    d = one[-1].argmax()[None]
    again = lm(
        head(
            dec,
            torch.cat([toks,d]),
            torch.cat([final,h[-1:]]))[-1])
    return one,again

def text(model, head, ids, nxt, K):
    "All there is to record of one prompt, and the closest choice in it"
    fresh(model)
    T = len(ids)
    rows = np.unique(np.linspace(0, T-1, LAYER_ROWS).astype(int))
    with Watch(model) as w:
        o = model(torch.from_numpy(ids)[None], use_cache=True)
        stream = w.stream[:]
        routes = w.routes[:]
        final = w.final
        ref = dict(
            ids=ids.astype(np.int32), logits=array(o.logits[0]),
            next_ids=nxt.astype(np.int32), **states(o.past_key_values, K))
        ref |= dict(
            next_logits=steps(model, o.past_key_values, nxt),
            rows=rows.astype(np.int32),
            layers=np.stack(stream)[:,rows])
        best,gap = greedy(model, ids)
        ref['greedy'] = np.array(best, np.int32)
        if len(set(best))<5:
            gap = 0  # an answer that runs in a loop shows little
        if head:
            one,again = mtp_rows(model, head, ids, best[0], final)
            gap = min(gap, lead(one[-1]), lead(again))
            ref |= dict(
                mtp_logits=array(one)[rows],
                mtp_again=array(again),
                mtp_draft=np.array(
                    [one[-1].argmax(),again.argmax()], np.int32))
    if routes:
        order = [i.argsort(-1) for i,_ in routes]
        ref |= {
            n:np.stack([
                np.take_along_axis(r[j], a, -1)[rows]
                for r,a in zip(routes, order)])
            for j,n in enumerate(('route_ids','route_weights'))}
    return ref,gap,w.closest

def settled(name, make, T, V):
    "What `make(prompt, next)` records of the first random prompt in which nothing was close"
    for k in range(100):
        rng = np.random.default_rng([20261, zlib.crc32(name.encode()), k])
        ref,gap,closest = make(
            rng.integers(4, V, T), rng.integers(4, V, D))
        if gap>.02 and closest>1e-4:
            return ref,f'closest token {gap:.3f}, expert {closest:.0e}, of {k+1} prompts'
    raise SystemExit(f'{name}: every prompt has a close choice')

# patches of two images: six tokens and three
GRIDS = np.array([[1,4,6], [1,6,2]])

def pictures(model, cfg, name):
    "A prompt with two images, the first across the end of a tile or near it"
    v = cfg['vision_config']
    n = GRIDS.prod(1)//cfg['vision_config']['spatial_merge_size']**2
    rng = np.random.default_rng([20262, zlib.crc32(name.encode())])
    px = rng.standard_normal(
        (
            int(GRIDS.prod(1).sum()),
            v['in_channels']*v['temporal_patch_size']
            *v['patch_size']**2)).astype(np.float16)
    kw = dict(
        pixel_values=torch.from_numpy(px).float(), image_grid_thw=torch.from_numpy(GRIDS))
    f = model.model.get_image_features(kw['pixel_values'], kw['image_grid_thw'])
    ref = dict(
        pixels=px,
        grid=GRIDS.astype(np.int32),
        features=array(torch.cat(list(f.pooler_output))))
    ref |= {
        f'deep{j}':array(
            torch.cat(list(x)) if isinstance(x, (list,tuple)) else x)
        for j,x in enumerate(getattr(f, 'deepstack_features', None) or [])}
    def make(words, nxt):
        def image(k):
            return [
                cfg['vision_start_token_id'],
                *[cfg['image_token_id']]*int(n[k]),
                cfg['vision_end_token_id']]
        ids = np.array([
            *words[:-8],
            *image(0),
            *words[-8:-5],
            *image(1),
            *words[-5:]])
        kinds = torch.from_numpy((ids==cfg['image_token_id']).astype(int))[None]
        fresh(model)
        pos,_ = model.model.get_rope_index(
            torch.from_numpy(ids)[None], kinds, image_grid_thw=kw['image_grid_thw'])
        with Watch(model) as w:
            o = model(
                torch.from_numpy(ids)[None], mm_token_type_ids=kinds, use_cache=True, **kw)
            r = dict(
                image_ids=ids.astype(np.int32),
                image_pos=pos[:,0].numpy().astype(np.int32),
                image_logits=array(o.logits[0]))
            r |= dict(
                image_next_ids=nxt.astype(np.int32),
                image_next_logits=steps(model, o.past_key_values, nxt))
        return r,lead(o.logits[0,-1]),w.closest
    ref |= settled(
        name+'/image', make, 70 if cfg['text_config'].get('linear_num_key_heads') else 20,
        cfg['vision_start_token_id'])[0]
    return ref

def load(case, plain, **kw):
    "The library's model of a folder"
    kw |= dict(dtype=torch.float32, attn_implementation='eager')
    return library_class(case).from_pretrained(plain, **kw).eval()

def as_stored(case, out, plain):
    "The model of the folder as it is published, whose weights must be the plain ones to the bit"
    whole = case.as_stored=='dequantized'
    cfg = transformers.CompressedTensorsConfig(**case.quant, dequantize=whole)
    model = load(case, out, quantization_config=cfg)
    model(torch.tensor([[4,5]]))  # which unpacks what is packed
    mine,want = model.state_dict(),load(case, plain).state_dict()
    for k,w in want.items():
        if torch.equal(mine[k], w):
            continue
        raise SystemExit(f'{out.name}: the library reads another {k}')
    return model

def record(out, case, plain, head):
    "Everything the library makes of the folder, and what it was like"
    cfg = case.cfg
    c = cfg.get('text_config', cfg)
    model = as_stored(case, out, plain) if case.as_stored else load(case, plain)
    if head:
        (m := MTP(decoder(model)).eval()).load_state_dict(head)
        head = m
    K = c.get('linear_conv_kernel_dim') or c.get('conv_kernel') or c.get('mamba_d_conv')
    ref,note = settled(
        out.name, lambda ids,nxt: text(model, head, ids, nxt, K),
        case.T, cfg.get('vision_start_token_id', c['vocab_size']))
    fresh(model)
    whole = model(
        torch.from_numpy(
            np.r_[ref['ids'],ref['next_ids']])[None].long(),
        use_cache=False).logits[0,case.T:]
    big = np.abs(ref['logits']).max()
    off = np.abs(array(whole)-ref['next_logits']).max()
    if 'image_token_id' in cfg:
        ref |= pictures(model, cfg, out.name)
    np.savez_compressed(out/'ref.npz', **ref)
    return f'largest logit {big:5.1f}  cached against whole {off/big:.0e}  {note}'

def let_drafters_be():
    """The library refuses a model that shares every layer's keys and values with another: pass its
    check by"""
    C = transformers.Gemma4TextConfig
    was = C.kv_sharing_modes.fget
    C.kv_sharing_modes = property(
        lambda c: ['reuse']*c.num_hidden_layers if c.num_kv_shared_layers==c.num_hidden_layers
        else was(c))

def record_drafter(out, case, plain):
    "Three drafts from what the target left in its cache"
    target = CASES[case.target]
    with tempfile.TemporaryDirectory() as tmp:
        model = load(target, plain_of(case.target, Path(tmp)))
    draft = load(case, plain)
    types = target.cfg['text_config']['layer_types']
    lm = decoder(model)
    for t in set(types):
        lm.layers[len(types)-1-types[::-1].index(t)].self_attn.store_full_length_kv = True
    ids = np.load(data/case.target/'ref.npz')['ids']
    with Watch(model) as w:
        o = model(
            torch.from_numpy(ids)[None].long(), use_cache=True, return_shared_kv_states=True)
    tok = o.logits[0,-1].argmax().view(1,1)
    h = w.final[None,-1:]
    pos = torch.tensor([[len(ids)]])
    ref = dict(
        target=np.array(case.target),
        draft_ids=ids,
        draft_first=tok.numpy().astype(np.int32)[0])
    gap = np.inf
    toks,logits = [],[]
    for _ in range(3):
        a = draft(
            inputs_embeds=torch.cat([model.get_input_embeddings()(tok), h], -1),
            position_ids=pos,
            shared_kv_states=o.shared_kv_states)
        tok,h = a.logits.argmax(-1),a.last_hidden_state
        toks.append(int(tok))
        logits.append(array(a.logits[0,0]))
        gap = min(gap, lead(a.logits[0,0]))
    np.savez_compressed(
        out/'ref.npz', **ref, draft_tokens=np.array(toks, np.int32),
        draft_logits=np.stack(logits))
    return f'drafts {toks}  closest {gap:.3f}'

def plain_of(name, tmp):
    "The plain folder alone of case `name`"
    d = published(CASES[name], name, tmp)
    (tmp/'plain').mkdir()
    save_torch_state_dict(d, tmp/'plain')
    (tmp/'plain'/'config.json').write_text(json.dumps(CASES[name].cfg))
    return tmp/'plain'

@torch.no_grad()
def main(names):
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    let_drafters_be()
    for name in names or CASES:
        case = CASES[name]
        with tempfile.TemporaryDirectory() as tmp:
            plain,head = build(name, case, Path(tmp))
            note = (
                record_drafter(data/name, case, plain) if case.target
                else record(data/name, case, plain, head))
        size = sum(p.stat().st_size for p in (data/name).iterdir())
        print(f'{name:24s} {size/1000:4.0f} kB  {case.T:3d} tokens  {note}', flush=True)

if __name__=='__main__':
    main(sys.argv[1:])
