"Properties of sampling, tokenizers and chat templates that one example cannot show"
import copy,json
import numpy as np
import pytest
from dataclasses import replace
from functools import partial
from hypothesis import given,settings,strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as Inner,decoders,models,pre_tokenizers,trainers
from atlas.text.chat import ChatTemplate,_Generation
from atlas.ground.core import AtlasError,TemplateError
from atlas.ops.sample import SampleState,SamplingParams,candidates,draw,sample,top,weights
from atlas.text.tokenizer import PRES,StopStrings,Tokenizer,_T

few = settings(max_examples=60, deadline=None)
TEXT = (
    'The quick brown fox jumps over the lazy dog – naïve café, 時間, ♜♞, 👩‍👧; '
    "it's 12345 or 3.14.\n"
    "def f(x):\n    return x+1  # don't\n\n") * 3

# ---- tokenizers

def bytelevel():
    t = Inner(models.BPE())
    t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = decoders.ByteLevel()
    t.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(
            vocab_size=380, special_tokens=['<s>','</s>'],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    return t

def bpe_meta(**kw):
    m = json.loads(bytelevel().to_str())['model']
    toks = sorted(m['vocab'], key=m['vocab'].get)+['<think>']
    d = dict(
        model='gpt2', pre='gpt-2', tokens=toks,
        merges=[' '.join(p) for p in m['merges']],
        token_type=[3,3]+[1]*(len(toks)-3)+[4],
        bos_token_id=0, eos_token_id=1)
    return {_T+k:v for k,v in (d|kw).items()}

PIECES = [
    '▁', 't', 'h', 'e', 'i', 'n', 'r', 'a', 's', '▁t', 'he', '▁the',
    'in', 'er', '▁a', '▁in', '▁▁', 'aa', 'th', 'the', 'ain', '▁rain', 'ea', 'tea',
    'eat', '▁▁▁▁', 'aaaa', 'es']
def spm_meta(**kw):
    toks = ['<unk>','<s>','</s>', *(f'<0x{b:02X}>' for b in range(256)), *PIECES]
    d = dict(
        model='llama',
        tokens=toks,
        scores=[0.]*259+[-float(i) for i in range(len(PIECES))],
        token_type=[2,3,3]+[6]*256+[1]*len(PIECES),
        bos_token_id=1,
        eos_token_id=2,
        unknown_token_id=0)
    return {_T+k:v for k,v in (d|kw).items()}

TOKS = {
    'bytes':Tokenizer.from_gguf(bpe_meta()),
    'pieces':Tokenizer.from_gguf(spm_meta()),
    'pieces, no lead':Tokenizer.from_gguf(spm_meta(add_space_prefix=False))}
kinds = pytest.mark.parametrize('kind', TOKS)
# SentencePiece writes a space as ▁ and cannot tell the two apart afterwards, so ▁ itself is left
# out
text = st.one_of(
    st.text(max_size=40),
    st.text(
        alphabet='the rain aé♜\n <s>', max_size=40)).map(lambda s: s.replace('▁',''))

def pieces(tok, ids, **kw):
    d = tok.detokenizer(**kw)
    return [d.put(i) for i in ids]+[d.finish()]

@kinds
@few
@given(data=st.data())
def test_stream_is_decode(kind, data):
    "Any ids, also bytes that are no text, also ids that do not exist"
    tok = TOKS[kind]
    ids = data.draw(st.lists(st.integers(0,tok.vocab_size+5), max_size=60))
    skip = data.draw(st.booleans())
    assert ''.join(pieces(tok,ids,skip_special=skip)) == tok.decode(ids,skip_special=skip)

@kinds
@few
@given(s=text)
def test_text_survives(kind, s):
    "Encode, then stream: the same text, no U+FFFD that was not there, every prefix a prefix"
    tok = TOKS[kind]
    ids = tok.encode(s)
    special = any(i in tok.special_ids for i in tok.encode(s,add_special=False))
    out = pieces(tok, ids, skip_special=False)
    if kind=='bytes':
        assert ''.join(out)==tok.decode(ids,skip_special=False)==s
    if special:
        return
    assert tok.decode(ids)==tok.inner.decode(ids)==s==''.join(pieces(tok,ids))
    assert ''.join(out).count('\ufffd')==s.count('\ufffd')

@kinds
@few
@given(s=text)
def test_continuing_keeps_the_space(kind, s):
    "An answer that goes on from a prompt, put after it, is what the whole decodes to"
    tok = TOKS[kind]
    ids = tok.encode('the rain'+s, add_special=False)
    if any(i in tok.special_ids for i in ids):
        return
    for cut in range(len(ids)):
        head = tok.decode(ids[:cut]) if cut else ''
        if '\ufffd' in head:
            continue
        assert head+''.join(pieces(tok,ids[cut:],continuing=cut>0)) == 'the rain'+s

def naive_bpe(words, rank):
    "Merge the pair of lowest rank, the leftmost first, until none is left"
    w = list(words)
    while True:
        pairs = enumerate(zip(w,w[1:]))
        best = min(((rank[p],i) for i,p in pairs if p in rank), default=None)
        if best is None:
            return w
        i = best[1]
        w[i:i+2] = [w[i]+w[i+1]]

@few
@given(s=text)
def test_gguf_bpe_is_the_definition(s):
    "Words cut by the regular expression, bytes merged by rank"
    tok = TOKS['bytes']
    meta = bpe_meta()
    rank = {
        tuple(m.split(' ')):i
        for i,m in enumerate(meta[_T+'merges'])}
    s = s.replace('<','')
    words = [w for w,_ in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(s)]
    want = [p for w in words for p in naive_bpe(w,rank)]
    assert [tok.token(i) for i in tok.encode(s)] == want

@few
@given(s=st.text(alphabet='the rain s', max_size=40))
def test_scores_are_the_definition(s):
    """SentencePiece: of all neighbours that form a piece, join the pair whose piece has the best
    score"""
    tok = TOKS['pieces']
    score = {p:i for i,p in enumerate(PIECES)}
    rank = type(
        'R',
        (dict,),
        {
            '__contains__':lambda self,k:''.join(k) in score,
            '__getitem__':lambda self,k:score[''.join(k)]})()
    assert (
        [tok.token(i) for i in tok.encode(s,add_special=False)]
        == (naive_bpe('▁'+s.replace(' ','▁'),rank) if s else []))

@pytest.mark.parametrize('pre', sorted(PRES))
@settings(max_examples=15, deadline=None)
@given(s=text)
def test_every_pre_keeps_text(pre, s):
    """However words are cut, nothing is lost (but for Unicode's composed form, where the model
    wants that)"""
    import unicodedata
    tok = (
        PRE_TOKS.setdefault(pre, None)
        or PRE_TOKS.__setitem__(pre,Tokenizer.from_gguf(bpe_meta(pre=pre,add_bos_token=False)))
        or PRE_TOKS[pre])
    assert (
        tok.decode(tok.encode(s),skip_special=False)
        == (unicodedata.normalize('NFC',s) if PRES[pre].nfc else s))
PRE_TOKS = {}

ROT = [
    None, 3, -1, 2**70, 'x', 1.5, [], ['a'],
    [1,2], {}, True]
@pytest.mark.parametrize('make', [bpe_meta,spm_meta])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_rotten_metadata(make, data):
    "Any twisted key is an AtlasError or a tokenizer that works"
    meta = copy.deepcopy(META[make])
    for _ in range(data.draw(st.integers(1,2))):
        if meta:
            twist(meta, data.draw)
    try:
        tok = Tokenizer.from_gguf(meta)
    except AtlasError as e:
        assert str(e)
    else:
        tok.decode(tok.encode('the rain ♜'))

def twist(meta, draw):
    "Drop or replace a key, or cut or change a list"
    k = draw(st.sampled_from(sorted(meta)))
    how = draw(st.sampled_from(['drop','replace','cut','poke']))
    if how=='drop':
        meta.pop(k)
    elif how=='replace':
        meta[k] = copy.deepcopy(draw(st.sampled_from(ROT)))
    elif isinstance(meta[k],list) and meta[k]:
        i = draw(st.integers(0,len(meta[k])-1))
        if how=='cut':
            del meta[k][i:]
        else:
            meta[k][i] = copy.deepcopy(draw(st.sampled_from(ROT)))
META = {bpe_meta:bpe_meta(), spm_meta:spm_meta()}

# ---- stop strings

stops = st.lists(
    st.text(alphabet='ab', min_size=2, max_size=6), max_size=4)
@settings(max_examples=400, deadline=None)
@given(stops, st.text(alphabet='ab', max_size=12), st.data())
def test_stop_strings(stop, s, data):
    "Any chunking gives the plain answer, and no character is held back without need"
    want,hits = plainly_stopped(s, stop)
    ss = StopStrings(tuple(stop))
    out = ''
    seen = ''
    hit = False
    while seen!=s and not hit:
        n = data.draw(st.integers(1,5))
        piece = s[len(seen):len(seen)+n]
        seen += piece
        t,hit = ss.feed(piece)
        out += t
        if not hit:
            begun = (k for x in stop for k in range(len(x)) if seen.endswith(x[:k]))
            hold = max(begun, default=0)
            assert out==seen[:len(seen)-hold]
    assert hit==hits
    assert out+('' if hit else ss.finish())==want

def plainly_stopped(s, stop):
    "What is shown of `s`, and whether it was stopped, by looking at each end of it"
    ends = [i for i in range(len(s)+1) if any(s[:i].endswith(x) for x in stop)]
    if not ends:
        return s,False
    first = s[:ends[0]]
    return s[:ends[0]-max(len(x) for x in stop if first.endswith(x))],True

# ---- sampling

def plain_candidates(x, p):
    "The filters as their definitions say, in double precision, token by token"
    w = np.exp((x.astype('f8')-x.max())/p.temperature)
    keep = np.ones(len(w),bool)
    if p.top_k:
        keep &= w >= np.sort(w)[::-1][min(p.top_k,len(w))-1]
    if p.top_p<1:
        share = np.where(keep,w,0)/w[keep].sum()
        keep &= np.array([share[share>v].sum() < p.top_p for v in share])
    return keep & (w>=p.min_p), w

@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0,2**32),
    n=st.sampled_from([1,2,9,60,800]),
    scale=st.sampled_from([.01,1,4,30]),
    ties=st.booleans(),
    params=st.builds(
        SamplingParams,
        temperature=st.sampled_from([.1,.7,1,2.5]),
        top_k=st.sampled_from([0,0,1,5,50]),
        top_p=st.sampled_from([.01,.3,.7,.95,1]),
        min_p=st.sampled_from([0,0,.02,.4])))
def test_filters_are_their_definitions(seed, n, scale, ties, params):
    "Ties included; tokens within rounding of a threshold may go either way"
    x = np.random.default_rng(seed).normal(0, scale, n).astype('f4')
    x = np.round(x) if ties else x
    ids,w = candidates(x, params)
    want,ref = plain_candidates(x, params)
    some = ref>1e-30 # a weight that float32 rounds to nothing is never drawn, kept or not
    got = np.isin(np.arange(n), ids)&some
    if (got!=want&some).any():
        fewer,more = hairs_breadth(params)
        assert ((plain_candidates(x, fewer)[0]&some)<=got).all()
        assert (got<=plain_candidates(x, more)[0]).all()
    assert np.allclose(w, ref[ids], rtol=1e-4, atol=1e-30)
    assert got[x.argmax()]

def hairs_breadth(params):
    "A little less and a little more than `params` keep, by less than float32 resolves"
    p,m = params.top_p,params.min_p
    fewer = replace(params, top_p=max(p*(1-1e-5), 1e-9), min_p=min(m*(1+1e-5), 1))
    more = replace(params, top_p=min(p*(1+1e-5), 1), min_p=m*(1-1e-5))
    return fewer,more

params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0,.3,1,5]),
    top_p=st.sampled_from([.2,.9,1]),
    top_k=st.sampled_from([0,1,7]),
    min_p=st.sampled_from([0,.1]),
    presence_penalty=st.sampled_from([0,1]),
    frequency_penalty=st.sampled_from([0,-.5]),
    repetition_penalty=st.sampled_from([1,1.2]),
    logit_bias=st.sampled_from([None,{3:5.}]),
    logprobs=st.sampled_from([None,0,5]),
    min_tokens=st.sampled_from([0,3]),
    seed=st.integers(0,2**64-1))

@few
@given(
    st.lists(params, min_size=1, max_size=8),
    st.integers(0,2**32), st.data())
def test_rows_stand_alone(ps, seed, data):
    "Order and company change nothing, to the last bit"
    x,rows = logits_and_rows(ps, seed)
    keep = x.copy()
    base = sample(x,rows)
    assert (x==keep).all()
    assert (base.ids>=0).all()
    order = data.draw(st.permutations(range(len(ps))))
    mixed = sample(x[order],[rows[i] for i in order])
    for j,i in enumerate(order):
        assert_same_row(mixed, j, base, i, rows[i])
        assert_same_row(sample(x[i:i+1],[rows[i]]), 0, base, i, rows[i])

@few
@given(
    st.lists(params, min_size=1, max_size=8),
    st.integers(0,2**32), st.data())
def test_a_sick_row_hurts_no_other(ps, seed, data):
    x,rows = logits_and_rows(ps, seed)
    base = sample(x,rows)
    sick = data.draw(st.integers(0,len(ps)-1))
    x[sick,data.draw(st.integers(0,V-1))] = data.draw(st.sampled_from([np.nan,np.inf,-np.inf]))
    ill = sample(x,rows)
    assert ill.ids[sick]==-1
    for i in range(len(ps)):
        if i!=sick:
            assert_same_row(ill, i, base, i, rows[i])

V = 97

def logits_and_rows(ps, seed):
    "Random logits, and states that have said a few tokens"
    rng = np.random.default_rng(seed)
    x = rng.normal(0,3,(len(ps),V)).astype('f4')
    rows = []
    for p in ps:
        s = SampleState(p, rng.integers(0,V,5), V, eos_ids=[1])
        for t in rng.integers(0,V,rng.integers(0,6)):
            s.add(int(t))
        rows.append(s.row())
    return x,rows

def assert_same_row(a, i, b, j, row):
    "Row `i` of one sampling is row `j` of another"
    K = row.params.logprobs or 0
    assert a.ids[i]==b.ids[j]
    assert np.array_equal(a.logprobs[i],b.logprobs[j],equal_nan=True)
    assert (a.top_ids[i,:K]==b.top_ids[j,:K]).all()
    assert (a.top_logprobs[i,:K]==b.top_logprobs[j,:K]).all()

@few
@given(
    st.integers(0,2**32), st.integers(1,50),
    st.integers(1,20))
def test_top_and_draw(seed, n, k):
    "Top ids against a full sort; a draw never lands on a weight of zero"
    rng = np.random.default_rng(seed)
    x = np.round(rng.normal(0,2,n)).astype('f4')
    assert top(x,k).tolist() == sorted(range(n), key=lambda i:(-x[i],i))[:k]
    w = weights(x)*(rng.random(n)<.5)
    w[rng.integers(n)] = 1
    assert all(w[draw(w,u)]>0 for u in (0,1-2**-53,*rng.random(5)))

# ---- chat templates

TEMPLATES = {
    'plain':
        "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m['content'] | trim }}"
        "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}",
    'busy':"""{%- macro show(m) %}{{ m.role ~ ': ' ~ m.content }}{% endmacro %}
{% set ns = namespace(n=0, last='') %}
{% for m in messages if m.role != 'tool' %}
    {% set ns.n = ns.n + m.content|length %}
    {% if loop.first %}<first>{% endif %}
    {% for w in m.content.split(' ') %}{% if loop.index > 3 %}{% break %}{% endif %}\
{{ w|upper }}{{ '-' * 3 }}{% else %}empty{% endfor %}
    {% generation %}{{ show(m) }}{% endgeneration %}
    {% set ns.last = m.content + '!' %}
{% endfor %}
{% set block %}{{ ns.n }} {{ ns.last | tojson }}{% endset %}{{ block }} {{ 7 // 2 }} {{ 2 ** 8 }} \
{{ '%s' % ns.n }} {{ messages | tojson(indent=2) }}"""}
def reference(source):
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation,'jinja2.ext.loopcontrols'])
    env.filters['tojson'] = partial(json.dumps, ensure_ascii=False)
    return env.from_string(source)
messages = st.lists(
    st.fixed_dictionaries({
        'role':st.sampled_from(['system','user','assistant','tool']),
        'content':st.text(max_size=30)}),
    min_size=1,
    max_size=5)

@pytest.mark.parametrize('name', TEMPLATES)
@few
@given(ms=messages, gen=st.booleans())
def test_metering_changes_nothing(name, ms, gen):
    "A metered template prints what plain Jinja prints"
    t,ref = RENDER[name]
    before = copy.deepcopy(ms)
    assert t.render(ms,add_generation_prompt=gen) == ref.render(
        messages=ms, bos_token='<s>', eos_token='</s>', add_generation_prompt=gen)
    parts = [m|{'content':[{'type':'text','text':m['content']}]} for m in ms]
    assert t.render(parts)==t.render(ms)
    assert ms==before
RENDER = {
    n:(ChatTemplate(s,bos='<s>',eos='</s>'),reference(s))
    for n,s in TEMPLATES.items()}

@few
@given(st.text(alphabet='{}%# \n|()[].~*+-"\'=abformesgin0159', max_size=60))
def test_any_source(source):
    "Whatever the source, a text or a TemplateError"
    try:
        out = ChatTemplate(
            '{{ messages[0].content }}'+source,
            steps=1000,
            chars=1<<16).render([{'role':'user','content':'a'}])
    except TemplateError:
        return
    assert isinstance(out,str)

json_like = st.recursive(
    st.none()|st.booleans()|st.floats()
    |st.text(max_size=5)|st.integers(),
    lambda c: st.lists(c,max_size=3)
    |st.dictionaries(
        st.sampled_from(['role','content','type','text','tool_calls','function','arguments']),
        c,
        max_size=4),
    max_leaves=8)
@settings(max_examples=200, deadline=None)
@given(json_like)
def test_any_messages(ms):
    "Whatever the messages, a text or a request error, and the caller's object untouched"
    before = repr(ms)
    try:
        out = RENDER['plain'][0].render(ms)
    except AtlasError as e:
        assert e.status==400
    else:
        assert isinstance(out,str)
    assert repr(ms)==before

def test_nothing_of_the_callers_changes():
    "A message without content is rendered as if empty, and stays without"
    ms = [
        {
            'role':'assistant',
            'content':None,
            'tool_calls':[{'function':{'name':'f','arguments':'{"a":1}'}}]}]
    before = copy.deepcopy(ms)
    assert RENDER['plain'][0].render(ms)=='<s>[assistant] </s>\n[assistant]'
    assert ms==before

params_like = st.dictionaries(
    st.sampled_from([*SamplingParams.__dataclass_fields__]),
    st.one_of(
        st.none(),
        st.booleans(),
        st.floats(),
        st.integers(),
        st.text(max_size=4),
        st.lists(st.integers(),max_size=3),
        st.dictionaries(
            st.text(max_size=3), st.floats(), max_size=2)),
    max_size=4)
@settings(max_examples=200, deadline=None)
@given(params_like)
def test_any_params(d):
    "Any JSON is refused as a request error, or gives a row that can be sampled"
    try:
        p = SamplingParams(**d)
        s = SampleState(p,[1],50,seed=1)
    except AtlasError as e:
        assert e.status==400
        assert e.param in SamplingParams.__dataclass_fields__
    else:
        assert 0<=sample(np.linspace(-3,3,50,dtype='f4')[None], [s.row()]).ids[0]<50
