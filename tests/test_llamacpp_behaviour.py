"""What llama.cpp's server is tested for, as far as it is about servers and not about its engine,
asked of ours: a toy model with a token for each byte, and a gateway with scripted workers.
Where we differ, we do so on purpose, and the test says why."""
import asyncio,base64,functools,json,re,struct,sys,threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
import httpx,numpy as np,openai,pytest,uvicorn
from starlette.testclient import TestClient
import atlas.engine.score  # noqa: F401
from atlas.text.chat import ChatTemplate
from atlas.ground.config import PRESETS
from atlas.service.process import Model
from atlas.service.models import Models as Gateway
from atlas.service.http import ApiKeys,Rules,server_config
from atlas.use.llm import LLM
from atlas.text.tokenizer import byte_tokenizer
from atlas.service.server import create_app,listen

sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from inprocess import app_of,loaded  # noqa: E402
from script_config import ScriptConfig  # noqa: E402
from scripted import TEMPLATE,Speaker  # noqa: E402
from helpers.patience import PATIENT  # noqa: E402
from helpers.waiting import WAIT,until  # noqa: E402

QUESTION = 'What is the best book'
LIFE = 'I believe the meaning of life is'
HELLO = [dict(role='system', content='Book'), dict(role='user', content=QUESTION)]
TINY = PRESETS['llama-3.1-8b']|dict(
    hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=96, vocab_size=256, max_position_embeddings=512, bos_token_id=1,
    eos_token_id=255)

@pytest.fixture(scope='module')
def real():
    "A model that is really there, with random weights; a context of 400 tokens"
    PRESETS['toy-judge'] = TINY
    try:
        llm = LLM(
            'toy-judge', 'cpu', load_format='dummy', max_seq_len=400, max_num_seqs=4, show=False)
    finally:
        del PRESETS['toy-judge']
    ms = loaded(llm, ['tiny','tiny/alias'])
    with TestClient(create_app(ms), raise_server_exceptions=False) as c:
        # waits until it is loaded
        assert c.post('/tokenize', json=dict(content='a')).status_code==200
        yield c
        assert ms.healthy
        assert not ms.all[0].restarts

# the same each time, and no end before its time
LASTS = dict(temperature=0, logit_bias={'255':-100})
def chat(c, **kw):
    return c.post('/v1/chat/completions', json=dict(messages=HELLO, max_tokens=8)|LASTS|kw)
def text(c, **kw):
    return c.post(
        '/v1/completions',
        json=dict(prompt='I believe the meaning of life is', max_tokens=8)|LASTS|kw)
def chat_said(c, **kw):
    "What a chat answers"
    return chat(c, **kw).json()['choices'][0]['message']['content']
def text_said(c, **kw):
    "What a completion answers"
    return text(c, **kw).json()['choices'][0]['text']
def events(r):
    lines = [l[6:] for l in r.text.split('\n') if l.startswith('data: ')]
    return [json.loads(l) for l in lines if l!='[DONE]']
def plain(c):
    "A bias against all that is no small letter, so that each token is a character of its own"
    letters = ''.join(map(chr, range(97, 123)))
    ids = c.post('/tokenize', json=dict(content=letters)).json()['tokens']
    return {str(i):-100 for i in range(256) if i not in ids}

# ---- Basics, models ----

def test_it_is_there(real):
    assert real.get('/health').json()['status']==real.get('/v1/health').json()['status']=='ok'
    assert '<!doctype html>' in real.get('/').text.lower()
    assert real.head('/').status_code==200

def test_the_models_are_told(real):
    m = real.get('/models').json()
    assert m['object']=='list'
    loaded = dict(value='loaded', args=['atlas','serve','tiny'])
    shown = [(x['id'],x['aliases'],x['status']) for x in m['data']]
    assert shown==[('tiny',['tiny/alias'],loaded)]
    assert {x['id'] for x in real.get('/v1/models').json()['data']}=={'tiny','tiny/alias'}
    assert real.get('/v1/models/tiny/alias').json()['root']=='tiny'

@pytest.mark.parametrize(
    'path', ['/lora-adapters','/completion','/chat/completions','/v1/v1/models'])
def test_llamacpp_own_paths(real, path):
    """Paths without /v1 are its own, but for those that test_neighbours.py has: 404 in OpenAI's
    shape, so that a client that probes them goes on"""
    for r in real.get(path),real.post(path, json={}):
        assert r.status_code==404
        assert set(r.json()['error'])=={'message', 'type', 'param', 'code'}

# ---- Chat ----

def tokens_of(c, **kw):
    "How many tokens the server counts in this"
    return c.post('/tokenize', json=kw).json()['count']

def test_chat(real):
    a = chat(real).json()
    x = a['choices'][0]
    u = a['usage']
    assert 'cmpl' in a['id']
    assert a['object']=='chat.completion'
    assert x['message']['role']=='assistant'
    assert x['finish_reason']=='length'
    assert u['completion_tokens']==8
    assert u['prompt_tokens']==tokens_of(real, messages=HELLO)
    assert u['total_tokens']==u['prompt_tokens']+8

def test_chat_in_parts(real):
    parts = [dict(type='text', text='What is'), dict(type='text', text=' the best book')]
    messages = [HELLO[0], dict(role='user', content=parts)]
    usage = chat(real, messages=messages).json()['usage']
    assert usage['prompt_tokens']>=tokens_of(real, messages=HELLO)

def streamed(c, **kw):
    "The chunks of a streamed chat"
    return events(chat(c, stream=True, temperature=0, **kw))

def test_chat_stream(real):
    es = streamed(real, stream_options=dict(include_usage=True))
    first,*others = [e['choices'][0] for e in es[:-1]]
    assert first['delta']['role']=='assistant'
    assert not any('role' in x['delta'] for x in others)
    assert len({e['id'] for e in es})==len({e['model'] for e in es})==1
    assert others[-1]['finish_reason']=='length'
    assert not others[-1]['delta'].get('content')

def test_chat_stream_is_the_whole(real):
    es = streamed(real, stream_options=dict(include_usage=True))
    whole = chat(real, temperature=0).json()
    said = ''.join(e['choices'][0]['delta'].get('content') or '' for e in es[:-1])
    assert said==whole['choices'][0]['message']['content']
    assert es[-1]['choices']==[]
    details = es[-1]['usage']['prompt_tokens_details']
    assert es[-1]['usage']==whole['usage']|dict(prompt_tokens_details=details)

def test_chat_stream_tells_usage_when_asked(real):
    assert streamed(real)[-1].get('usage') is None

@pytest.mark.parametrize(
    'messages',
    [
        None, 'string', [123], [{}], [dict(role=123)],
        [dict(role='system', content=123)], [dict(content='hello')],
        [dict(role='system', content='x'), {}], []])
def test_chat_refused(real, messages):
    r = chat(real, messages=messages)
    assert r.status_code==400
    assert r.json()['error']['param'].startswith('messages')

def test_two_assistants_in_a_row(real):
    """llama.cpp refuses this; real conversations have it (a call's turn and its comment), so we
    leave it to the template"""
    assert chat(
        real,
        messages=[
            HELLO[1], dict(role='assistant', content='a'),
            dict(role='assistant', content='b'), HELLO[1]]).status_code==200

@pytest.mark.parametrize('kind,want', [
    (dict(type='json_object', schema=dict(const='42')),'"42"'),
    (dict(type='json_schema', json_schema=dict(schema=dict(const='foooooo'))),'"foooooo"'),
    (dict(type='json_object'),r'\s*\{.*'),
    (dict(type='sound'),None),
    (dict(type='json_object', schema=123),None),
    (dict(type='json_object', schema=dict(type=123)),None),
    (dict(type='json_object', schema=dict(type='hiccup')),None),
    (dict(type='json_schema'),None)])
def test_response_format(real, kind, want):
    r = chat(real, response_format=kind, max_tokens=24, seed=1)
    if want is None:
        assert r.status_code==400
        assert r.json()['error']['param']=='response_format'
    else:
        said = r.json()['choices'][0]['message']['content']
        assert re.fullmatch(want, said, re.S)

def test_grammar(real):
    """Its `json_schema` is ours too; its `grammar` has a syntax of its own, and a header says that
    we leave it out"""
    assert chat_said(real, json_schema=dict(const='foo'), max_tokens=24)=='"foo"'
    assert 'grammar' in chat(real, grammar='root ::= "a"').headers['x-atlas-warning']

def test_structured_outputs(real):
    "Ours are vLLM's, and take Lark, regex and choice"
    five = dict(regex='a{5}')
    a = chat(real, structured_outputs=five, max_tokens=24).json()['choices'][0]
    assert (a['message']['content'],a['finish_reason'])==('aaaaa','stop')
    lark = dict(grammar='start: "a" "b"+ "c"')
    said = chat_said(real, structured_outputs=lark, max_tokens=24, logit_bias=plain(real))
    assert said.startswith('ab')

@pytest.mark.parametrize('stream', [False,True])
def test_chat_logprobs(real, stream):
    r = chat(
        real, logprobs=True, top_logprobs=10, temperature=0, max_tokens=5,
        stream=stream, logit_bias=plain(real))
    cs = [e['choices'][0] for e in events(r)] if stream else r.json()['choices']
    told = [x['delta' if stream else 'message'] for x in cs]
    toks = [t for x in cs if x.get('logprobs') for t in x['logprobs']['content']]
    assert len(toks)==5
    assert ''.join(t['token'] for t in toks)==''.join(m.get('content') or '' for m in told)
    for t in toks:
        assert t['logprob']<=0
        assert t['bytes']==list(t['token'].encode())
        assert len(t['top_logprobs'])==10
        assert t['top_logprobs'][0]['logprob']>=t['logprob']-1e-6

def test_logit_bias(real):
    letters = plain(real)
    said = chat_said(real, max_tokens=64, logit_bias=letters)
    assert len(said)==64
    assert re.fullmatch('[a-z]+', said)
    ids = real.post('/tokenize', json=dict(content=said[0])).json()['tokens']
    ban = {str(i):-100 for i in ids}
    assert said[0] not in chat_said(real, max_tokens=64, logit_bias=letters|ban)

def test_many_choices(real):
    a = chat(real, n=2, seed=3).json()
    assert [x['index'] for x in a['choices']]==[0,1]
    assert a['usage']['completion_tokens']==16
    assert all(x['finish_reason']=='length' for x in a['choices'])

# ---- Contexts that are too small: never a word is dropped silently ----

@pytest.mark.parametrize('stream', [False,True])
def test_context_exceeded(real, stream):
    """llama.cpp names the error exceed_context_size_error; ours is OpenAI's
    context_length_exceeded, with both numbers in the message, and also for a stream a plain 400"""
    r = chat(real, messages=HELLO*100, stream=stream)
    e = r.json()['error']
    assert r.status_code==400
    assert e['code']=='context_length_exceeded'
    assert '400' in e['message']
    assert len(re.findall(r'\d[\d,]*', e['message']))>=2
    assert text(real, prompt='x'*500).status_code==400
    assert text(real, prompt=[5]*400).status_code==400

def test_context_that_just_fits(real):
    "The answer's bound is cut to what is left; no context shift begins"
    a = text(real, prompt=[5]*399, max_tokens=100, ignore_eos=True).json()
    assert (
        a['usage']['prompt_tokens'], a['usage']['completion_tokens'],
        a['choices'][0]['finish_reason'])==(399,1,'length')
    a = text(
        real, prompt=[5]*390, max_tokens=10**6, ignore_eos=True).json()
    assert a['usage']['total_tokens']==400
    assert a['choices'][0]['finish_reason']=='length'

# ---- Completions ----

def test_completion_stream_equals_whole(real):
    es = events(text(real, stream=True, temperature=0))
    assert ''.join(e['choices'][0]['text'] for e in es)==text_said(real, temperature=0)

def test_seeds(real):
    def said(**kw): return text_said(real, **dict(temperature=1.)|kw)
    assert len({said(seed=42) for _ in range(4)})==1
    assert len({said(seed=i) for i in range(4)})==4
    assert len({said(temperature=0, seed=i) for i in range(3)})==1
    a = text(real, n=2, seed=7, temperature=1.).json()['choices']
    assert a[0]['text']!=a[1]['text']

def test_neighbours_change_nothing(real):
    "Greedy answers are the same alone and in a batch"
    ps = ['Write a very long book.','Write a poem.','What is LLM?','The sky is blue']
    alone = [text(real, prompt=p, temperature=0).json()['choices'][0]['text'] for p in ps]
    assert [x['text'] for x in text(real, prompt=ps, temperature=0).json()['choices']]==alone

def test_tokens_as_prompt(real):
    said = dict(content=LIFE, add_special=True)
    ids = real.post('/tokenize', json=said).json()['tokens']
    one = text(real, prompt=ids, temperature=0).json()
    two = text(real, prompt=[ids,ids], temperature=0).json()
    assert [x['text'] for x in two['choices']]==[one['choices'][0]['text']]*2
    assert one['usage']['prompt_tokens']==len(ids)

@pytest.mark.parametrize('prompt', [[[65,66],'text'], [1,2,'text']])
def test_mixed_prompts(real, prompt):
    """Text and ids in one list are llama.cpp's own: OpenAI's API has no such thing, and a refusal
    names the field"""
    r = text(real, prompt=prompt)
    assert r.status_code==400
    assert r.json()['error']['param'].startswith('prompt[')

def test_a_token_that_is_none(real):
    assert text(real, prompt=[256]).json()['error']['param']=='prompt'

def test_stop_words(real):
    kw = dict(temperature=0, max_tokens=40, logit_bias=plain(real))
    said = text(real, **kw).json()['choices'][0]['text']
    for stop in said[7:9],said[3:9],said[0]:
        a = text(real, stop=[stop,'NEVER'], **kw).json()['choices'][0]
        assert a['text']==said[:said.index(stop)]
        assert (a['finish_reason'],a['stop_reason'])==('stop',stop)

def test_stop_words_in_a_stream(real):
    kw = dict(temperature=0, max_tokens=40, logit_bias=plain(real))
    stop = text(real, **kw).json()['choices'][0]['text'][3:9]
    whole = text(real, stop=stop, **kw).json()['choices'][0]['text']
    cs = [e['choices'][0] for e in events(text(real, stop=stop, stream=True, **kw))]
    assert ''.join(x['text'] for x in cs)==whole
    assert cs[-1]['finish_reason']=='stop'

def test_probabilities(real):
    r = text(real, logprobs=10, temperature=0, max_tokens=5, logit_bias=plain(real))
    a = r.json()['choices'][0]['logprobs']
    assert len(a['tokens'])==5
    assert all(p<=0 for p in a['token_logprobs'])
    assert all(s in t and len(t)<=11 for s,t in zip(a['tokens'], a['top_logprobs']))
    assert a['text_offset']==[*range(5)]

def test_ignore_eos_and_min_tokens(real):
    eos = {'255':100}
    assert text(
        real, logit_bias=eos, temperature=0).json()['choices'][0]['finish_reason']=='stop'
    a = text(real, logit_bias=eos, temperature=0, ignore_eos=True).json()
    assert a['choices'][0]['finish_reason']=='length'
    assert a['usage']['completion_tokens']==8
    assert text(
        real, logit_bias=eos, temperature=0, min_tokens=5).json()['usage']['completion_tokens']>=5

def test_unknown_fields(real):
    "llama.cpp's own sampling fields, and anybody's, are no error"
    assert text(
        real, cache_prompt=False, id_slot=0, mirostat=2, dry_multiplier=1.,
        n_probs=0, samplers=['top_k'], timings_per_token=True, return_progress=True,
        nonsense={}).status_code==200

def cached_so_far(real):
    "Prompt tokens that a cache has supplied, by the metrics"
    found = re.search(r'atlas:prompt_tokens_cached_total\{[^}]*\} (\d+)', real.get('/metrics').text)
    return int(found[1]) if found else 0

def test_prompt_cache(real):
    """The same prompt again: the same answer, and what a cache supplied is counted in the answer
    and in the metrics"""
    p = 'A long prompt that is there twice. '*8
    one = text(real, prompt=p, temperature=0).json()
    before = cached_so_far(real)
    two = text(real, prompt=p, temperature=0).json()
    cached = two['usage']['prompt_tokens_details']['cached_tokens']
    assert one['choices'][0]['text']==two['choices'][0]['text']
    assert 0<cached<two['usage']['prompt_tokens']
    assert not cached%64
    assert cached_so_far(real)-before==cached

# ---- Tokens, templates ----

def test_tokenize(real):
    content = 'What is the capital of France ? 媽 🤗'
    a = real.post('/tokenize', json=dict(content=content)).json()
    assert a['count']==len(a['tokens'])==len(content.encode())
    back = real.post('/detokenize', json=dict(tokens=a['tokens'])).json()
    assert back['content']==content
    ps = real.post('/tokenize', json=dict(content=content, with_pieces=True)).json()['tokens']
    assert [x['id'] for x in ps]==a['tokens']
    assert ''.join(x['piece'] for x in ps[:5])=='What '
    assert real.post('/tokenize', json={}).status_code==400

@pytest.mark.parametrize(
    'bad',
    [dict(tokens=['a']), dict(tokens=[256]), dict(tokens=[-1]), dict(tokens=[2**31]), {}])
def test_no_tokens(real, bad):
    assert real.post('/detokenize', json=bad).json()['error']['param'].startswith('tokens')

def test_apply_template(real):
    p = real.post('/apply-template', json=dict(messages=HELLO)).json()['prompt']
    assert 'Book' in p
    assert p.index('Book')<p.index('What is the best book')
    assert chat(real).json()['usage']['prompt_tokens']==len(
        real.post('/tokenize', json=dict(content=p)).json()['tokens'])

@pytest.mark.parametrize(
    'kw,end',
    [
        ({},'<assistant>'), (dict(add_generation_prompt=True),'<assistant>'),
        (dict(add_generation_prompt=False),'')])
def test_generation_prompt(kw, end):
    s = Speaker(lambda p: 'x')
    t = ChatTemplate(
        '{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if '
        'add_generation_prompt %}<assistant>{% endif %}')
    c = TestClient(app_of(s, s.tok, t))
    r = c.post('/apply-template', json=dict(messages=HELLO)|kw)
    assert r.json()['prompt']=='<system>Book<user>What is the best book'+end

THINKS = ChatTemplate(
    '{% for t in tools or [] %}T{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% '
    'endfor %}<assistant>{% if enable_thinking is false %}<think></think>{% else %}<think>{% endif '
    '%}')

@pytest.mark.parametrize(
    'tools',
    [
        None, [],
        [dict(type='function', function=dict(name='test', parameters=dict(type='object')))]])
@pytest.mark.parametrize(
    'kw,end',
    [
        ({},'<think>'), (dict(enable_thinking=True),'<think>'),
        (dict(enable_thinking=False),'<think></think>'),
        (dict(chat_template_kwargs=dict(enable_thinking=False)),'<think></think>'),
        (dict(reasoning_effort='none'),'<think></think>')])
def test_thinking_in_the_template(tools, kw, end):
    s = Speaker(lambda p: 'x')
    app = app_of(s, s.tok, THINKS, parsers=('hermes','qwen3'))
    asked = dict(messages=HELLO, tools=tools)|kw
    p = TestClient(app).post('/apply-template', json=asked).json()['prompt']
    assert p=='T'*len(tools or [])+'<system>Book<user>What is the best book<assistant>'+end
    assert not s.prompts

# ---- Vectors ----

def embed(c, **kw):
    return c.post('/v1/embeddings', json=kw)

def vector(c, **kw):
    "The first vector of an answer"
    return np.array(embed(c, **kw).json()['data'][0]['embedding'])

def test_embeddings(real):
    one = embed(real, input=LIFE).json()
    v = np.array(one['data'][0]['embedding'])
    assert abs((v**2).sum()-1)<1e-3
    assert one['usage']==dict(prompt_tokens=32, total_tokens=32)
    mean = vector(real, input=LIFE, pooling='mean')
    assert abs((mean**2).sum()-1)<1e-3
    assert not np.allclose(mean, v, atol=1e-3)

def test_many_embeddings(real):
    v = vector(real, input=LIFE)
    many = embed(real, input=[LIFE]*3+['This is a test']).json()
    *same,other = [d['embedding'] for d in many['data']]
    assert [d['index'] for d in many['data']]==[0,1,2,3]
    assert all(np.allclose(x, v, atol=1e-4) for x in same)
    assert not np.allclose(other, v, atol=1e-2)
    assert many['usage']['prompt_tokens']==3*32+14

def test_embeddings_in_base64(real):
    v = vector(real, input=LIFE)
    a = embed(real, input=LIFE, encoding_format='base64').json()
    raw = base64.b64decode(a['data'][0]['embedding'])
    assert np.allclose(struct.unpack(f'<{len(v)}f', raw), v, atol=1e-6)

@pytest.mark.parametrize('bad', [[],'',dict(content='x'),['a',[1]],['a',5],[[256]],'x'*500])
def test_nothing_to_embed(real, bad):
    assert embed(real, input=bad).status_code==400

def test_no_pooling(real):
    assert embed(real, input='a', pooling='none').status_code==400

# ---- Anthropic's messages, OpenAI's responses ----

def say(c, **kw):
    return c.post(
        '/v1/messages',
        json=dict(
            model='tiny', max_tokens=8, temperature=0,
            messages=[dict(role='user', content='Say hello')])|kw)

def test_messages(real):
    a = say(real).json()
    assert (a['type'],a['role'],a['stop_reason'])==('message','assistant','max_tokens')
    assert a['content'][0]['type']=='text'
    assert 'timings' not in a
    assert {'input_tokens', 'output_tokens', 'cache_read_input_tokens'}<=set(a['usage'])
    assert a['usage']['output_tokens']==8

LETTERS = [chr(i) for i in range(97, 107)]
IN_PARTS = [dict(type='text', text='What is'), dict(type='text', text=' the answer?')]
@pytest.mark.parametrize('kw', [
    dict(system='You are helpful.'), dict(temperature=.5), dict(top_p=.9), dict(top_k=40),
    dict(metadata=dict(user_id='u')), dict(stop_sequences=['\n','END']),
    dict(
        thinking=dict(type='enabled', budget_tokens=1024), max_tokens=2000,
        stop_sequences=LETTERS),
    dict(messages=[dict(role='user', content=IN_PARTS)])])
def test_messages_with(real, kw):
    assert say(real, **kw).json()['type']=='message'

def test_messages_stream(real):
    es = events(say(real, stream=True))
    kinds = [e['type'] for e in es if e['type']!='ping']
    assert kinds[:2]==['message_start','content_block_start']
    assert kinds[-3:]==['content_block_stop', 'message_delta', 'message_stop']
    assert set(kinds[2:-3])<={'content_block_delta'}
    m = es[0]['message']
    assert m['content']==[]
    assert m['role']=='assistant'
    assert m['usage']['input_tokens']>0
    assert es[-2]['delta']['stop_reason']=='max_tokens'
    assert es[-2]['usage']['output_tokens']==8
    assert 'timings' not in es[-1]

def test_count_tokens(real):
    def count(**kw):
        return real.post(
            '/v1/messages/count_tokens',
            json=dict(model='tiny', messages=[dict(role='user', content='Say hello')])|kw).json()
    assert count()==dict(input_tokens=say(real).json()['usage']['input_tokens'])
    assert count(system='You are helpful.')['input_tokens']>count()['input_tokens']

def test_messages_refused(real):
    """llama.cpp answers an empty conversation; there is nothing to answer, and Anthropic refuses
    it too"""
    source = dict(type='base64', media_type='image/png', data='iVBORw0KGgo=')
    image = dict(role='user', content=[dict(type='image', source=source)])
    for kw in dict(messages=[]),dict(messages=None),dict(max_tokens=None),dict(messages=[image]):
        r = say(real, **kw)
        assert r.status_code==400, kw
        assert r.json()['type']=='error', kw
        assert r.json()['error']['type']=='invalid_request_error', kw
    assert 'reads only text' in r.json()['error']['message']

RESULTS = [
    dict(content='Sunny, 25°C'),
    dict(content=[dict(type='text', text='Sunny, 25°C')]),
    dict(is_error=True, content='City not found'), {}]
@pytest.mark.parametrize('result', RESULTS)
@pytest.mark.parametrize(
    'more', [[], [dict(type='text', text='Here are the results:')]])
def test_tool_results(real, result, more):
    "A result is a message of its own, whatever stands beside it"
    use = dict(type='tool_use', id='test123', name='get_weather', input=dict(location='Paris'))
    back = dict(type='tool_result', tool_use_id='test123')|result
    a = say(real, messages=[
        dict(role='user', content="What's the weather?"),
        dict(role='assistant', content=[use]),
        dict(role='user', content=[*more, back])])
    assert a.status_code==200
    assert a.json()['content'][0]['type']=='text'

def test_apis_differ(real):
    a,b = chat(real).json(),say(real).json()
    assert a['object']=='chat.completion'
    assert 'type' not in a
    assert b['type']=='message'
    assert 'object' not in b
    assert 'choices' not in b

@pytest.mark.parametrize(
    'kind,want',
    [
        (dict(type='json_schema', name='test', schema=dict(const='foooooo')),'"foooooo"'),
        (dict(type='json_object'),r'\s*\{.*'),
        (dict(type='text'),None),
        (dict(type='json_schema', name='test'),400)])
def test_responses_format(real, kind, want):
    r = real.post(
        '/v1/responses',
        json=dict(
            input='Write an example', max_output_tokens=24, temperature=0, text=dict(format=kind)))
    if want==400:
        assert r.status_code==400
        assert r.json()['error']['message']
        return
    out = next(o for o in r.json()['output'] if o['type']=='message')
    assert want is None or re.fullmatch(want, out['content'][0]['text'], re.S)

def test_responses_logprobs():
    "Log-probabilities of the answer do not have the prompt scored: this model could not"
    asked = dict(input='a', top_logprobs=2, include=['message.output_text.logprobs'])
    with speaking('Hi', (None,None)) as (c,_):
        a = c.post('/v1/responses', json=asked)
        assert a.status_code==200
        told = a.json()['output'][0]['content'][0]['logprobs']
        assert [t['token'] for t in told][:2]==['H','i']

def responses_stream(c):
    asked = dict(input=HELLO, max_output_tokens=16, temperature=0, stream=True)
    return events(c.post('/v1/responses', json=asked))

def test_responses_stream(real):
    es = responses_stream(real)
    kinds = [e['type'] for e in es]
    assert kinds[:2]==['response.created','response.in_progress']
    assert kinds[-1] in ('response.completed','response.incomplete')
    assert [e['sequence_number'] for e in es]==[*range(len(es))]
    ids = {e['response']['id'] for e in (es[0],es[-1])}
    assert len(ids)==1
    assert ids.pop().startswith('resp_')

def test_responses_stream_is_the_whole(real):
    es = responses_stream(real)
    item = es[-1]['response']['output'][0]
    assert item['id'].startswith('msg_')
    added = [e['item']['id'] for e in es if e['type']=='response.output_item.added']
    assert added[0]==item['id']
    assert {e['item_id'] for e in es if 'item_id' in e}=={item['id']}
    said = ''.join(e['delta'] for e in es if e['type']=='response.output_text.delta')
    assert said==item['content'][0]['text']

# ---- Tool calls ----
# Every family says the same thing in its own way, through all three APIs, streamed and whole

PARAMS = dict(
    type='object',
    properties=dict(city=dict(type='string'), days=dict(type='integer')),
    required=['city'])
ARGS = '{"city": "Paris", "days": 3}'
THINK = '<think>Hm.</think>Look:'
D31 = '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'
SAID = {
    ('hermes','qwen3'):
        THINK+'<tool_call>\n{"name": "weather", "arguments": '+ARGS+'}\n</tool_call>',
    ('qwen3_coder','qwen3'):
        THINK+'<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n'
        '<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>',
    ('mistral','mistral'):'[THINK]Hm.[/THINK]Look:[TOOL_CALLS]weather'+ARGS,
    ('llama3_json',None):'{"name": "weather", "parameters": '+ARGS+'}',
    ('pythonic',None):'[weather(city="Paris", days=3)]',
    ('gemma4','gemma4'):
        '<|channel>thought\nHm.<channel|>Look:'
        '<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
    ('minimax_m2','minimax_m2'):
        THINK+'<minimax:tool_call>\n<invoke name="weather">\n'
        '<parameter name="city">Paris</parameter>\n<parameter name="days">3</parameter>\n'
        '</invoke>\n</minimax:tool_call>',
    ('deepseek_v3','deepseek_r1'):
        THINK+D31+'function<｜tool▁sep｜>weather\n```json\n'+ARGS
        +'\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ('deepseek_v31','deepseek_r1'):
        'Hm.</think>Look:'+D31+'weather<｜tool▁sep｜>'+ARGS
        +'<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    ('deepseek_v32','deepseek_r1'):
        'Hm.</think>Look:<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n'
        '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n'
        '</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    ('glm45','glm45'):
        THINK+'<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n'
        '<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>',
    ('glm47','glm45'):
        THINK+'<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value>'
        '<arg_key>days</arg_key><arg_value>3</arg_value></tool_call>',
    ('openai','openai_gptoss'):
        '<|channel|>analysis<|message|>Hm.<|end|>'
        '<|start|>assistant<|channel|>commentary<|message|>Look:<|end|>'
        '<|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json'
        '<|message|>'+ARGS+'<|call|>'}

def calls_of(message):
    "Names and arguments of a message's calls"
    functions = [t['function'] for t in message.get('tool_calls') or []]
    return [(x['name'], json.loads(x['arguments'])) for x in functions]

class Spoken:
    "A choice of a streamed chat, put together"
    def __init__(self):
        self.reasoning = self.content = ''
        self.calls = {}
        self.finish = None
    def add(self, choice):
        d = choice['delta']
        self.reasoning += d.get('reasoning') or ''
        self.content += d.get('content') or ''
        self.finish = choice['finish_reason'] or self.finish
        for t in d.get('tool_calls') or []:
            call = self.calls.setdefault(t['index'], ['',''])
            call[0] += t['function'].get('name') or ''
            call[1] += t['function'].get('arguments') or ''
    def told(self):
        calls = [(name, json.loads(arguments)) for name,arguments in self.calls.values()]
        return self.reasoning,self.content,calls,self.finish

WEATHER = dict(type='function', function=dict(name='weather', parameters=PARAMS))

def of_chat(c, **kw):
    "(reasoning, content, calls, finish) of each choice, whole and streamed"
    b = dict(messages=HELLO, tools=[WEATHER])|kw
    whole = []
    for x in c.post('/v1/chat/completions', json=b).json()['choices']:
        m = x['message']
        said = m.get('reasoning') or '',m['content'] or ''
        whole.append((*said, calls_of(m), x['finish_reason']))
    got = {}
    for e in events(c.post('/v1/chat/completions', json=b|dict(stream=True))):
        for x in e['choices']:
            got.setdefault(x['index'], Spoken()).add(x)
    return whole,[got[i].told() for i in sorted(got)]

def of_block(block, said):
    "Kind and content of a block of Anthropic's"
    kind = block['type']
    return kind,((block['name'],said) if kind=='tool_use' else said)

def of_whole(a):
    "Blocks and reason of a whole message"
    said = [x.get('input', x.get('text', x.get('thinking'))) for x in a['content']]
    return [of_block(x, s) for x,s in zip(a['content'], said)],a['stop_reason']

def of_stream(es):
    "Blocks and reason of a streamed message, each block of which has to end"
    blocks = {e['index']:e['content_block'] for e in es if e['type']=='content_block_start'}
    said = dict.fromkeys(blocks, '')
    for e in es:
        if e['type']=='content_block_delta':
            d = e['delta']
            said[e['index']] += d.get('text') or d.get('thinking') or d.get('partial_json') or ''
    assert [*blocks]==[*range(len(blocks))]
    assert {e['index'] for e in es if e['type']=='content_block_stop'}=={*blocks}
    for i,x in blocks.items():
        said[i] = json.loads(said[i]) if x['type']=='tool_use' else said[i]
    why = [e['delta']['stop_reason'] for e in es if e['type']=='message_delta']
    return [of_block(x, said[i]) for i,x in blocks.items()],why[-1]

ASKED = dict(role='user', content='Weather?')

def of_messages(c, **kw):
    "Blocks and reason, whole and streamed"
    b = dict(
        model='scripted', max_tokens=5000, messages=[dict(role='user', content='hi')],
        tools=[dict(name='weather', input_schema=PARAMS)])|kw
    a = c.post('/v1/messages', json=b).json()
    return of_whole(a),of_stream(events(c.post('/v1/messages', json=b|dict(stream=True))))

def of_items(r):
    "Kinds and contents of a response's items"
    out = []
    for o in r['output']:
        parts = o.get('content') or o.get('summary') or []
        said = ''.join(x['text'] for x in parts)
        if o['type']=='function_call':
            said = o['name'],json.loads(o['arguments'])
        out.append((o['type'], said))
    return out

def of_responses(c, **kw):
    "Items, whole and at the end of a stream; what the stream's deltas came to"
    b = dict(input='hi', tools=[dict(type='function', name='weather', parameters=PARAMS)])|kw
    es = events(c.post('/v1/responses', json=b|dict(stream=True)))
    def added(kind):
        return ''.join(e['delta'] for e in es if e['type']==f'response.{kind}.delta')
    whole = of_items(c.post('/v1/responses', json=b).json())
    end = of_items(es[-1]['response'])
    return whole,end,(added('output_text'),added('function_call_arguments'))

@contextmanager
def speaking(say, parsers):
    s = Speaker(say if callable(say) else lambda p: say)
    app = app_of(s, s.tok, ChatTemplate(TEMPLATE), parsers=parsers)
    yield TestClient(app, raise_server_exceptions=False),s

@pytest.mark.parametrize('parsers', SAID, ids=lambda p: p[0])
def test_calls_of_every_family(parsers):
    thought,before = ('Hm.','Look:') if parsers[1] else ('','')
    call = ('weather', dict(city='Paris', days=3))
    def items(*kinds):
        all_three = zip(kinds, (thought,before,call))
        return [(kind,said) for kind,said in all_three if said]
    with speaking(SAID[parsers], parsers) as (c,_):
        want = (thought, before, [call], 'tool_calls')
        assert of_chat(c, n=2)==([want]*2, [want]*2)
        blocks = items('thinking', 'text', 'tool_use')
        assert of_messages(c)==((blocks, 'tool_use'),)*2
        whole,end,deltas = of_responses(c)
        assert whole==end==items('reasoning', 'message', 'function_call')
        said,args = deltas
        assert said==before
        assert json.loads(args)==call[1]

@pytest.mark.parametrize(
    'parsers',
    [('hermes','qwen3'),('qwen3_coder','qwen3'),('openai','openai_gptoss'),('mistral','mistral')],
    ids=lambda p: p[0])
def test_stop_strings_across_marks(parsers):
    """A stop string is looked for in what the client is shown: not in thoughts, marks or calls;
    streamed or not, the same"""
    shown = dict(Look='', **{'k:':'Loo'})
    with speaking(SAID[parsers], parsers) as (c,_):
        for stop in 'Look','k:','Hm',':<','Paris','tool':
            (a,),(b,) = of_chat(c, stop=stop)
            assert a==b, (stop, a)
            assert a[:2]==('Hm.',shown.get(stop, 'Look:')), (stop, a)
            assert (a[3]=='stop')==(not a[2])==(stop in shown), (stop, a)

@pytest.fixture(params=SAID, ids=lambda p: p[0])
def rainy(request):
    "A model that asks for the weather and then says that it rains; the prompts that it saw"
    seen = []
    def say(prompt):
        seen.append(prompt)
        return 'It rains.' if 'tool: rain' in prompt else SAID[request.param]
    with speaking(say, request.param) as (c,_):
        yield c,seen

# Call, result, answer: over each API the model sees its own call and thought again, and then
# says something

def test_a_tool_loop_in_chat(rainy):
    c,seen = rainy
    ms = [dict(role='developer', content='Be brief'), ASKED]
    def choice():
        a = c.post('/v1/chat/completions', json=dict(messages=ms, tools=[WEATHER]))
        return a.json()['choices'][0]
    m = choice()['message']
    ms += [m, dict(role='tool', tool_call_id=m['tool_calls'][0]['id'], content='rain')]
    a = choice()
    said = (a['message']['content'] or '')+(a['message'].get('reasoning') or '')
    assert 'It rains.' in said
    assert a['finish_reason']=='stop'
    assert 'call weather' in seen[-1]
    assert 'system: Be brief' in seen[-1]

def test_a_tool_loop_in_messages(rainy):
    c,seen = rainy
    b = dict(
        model='scripted', max_tokens=999, system='Be brief', messages=[ASKED],
        tools=[dict(name='weather', input_schema=PARAMS)])
    x = c.post('/v1/messages', json=b).json()
    use = next(k for k in x['content'] if k['type']=='tool_use')
    result = dict(type='tool_result', tool_use_id=use['id'], content='rain')
    b['messages'] = [
        ASKED, dict(role='assistant', content=x['content']), dict(role='user', content=[result])]
    y = c.post('/v1/messages', json=b).json()
    assert y['stop_reason']=='end_turn'
    assert 'It rains.' in json.dumps(y['content'])
    assert 'call weather' in seen[-1]

def test_a_tool_loop_in_responses(rainy):
    c,seen = rainy
    tools = [dict(type='function', name='weather', parameters=PARAMS)]
    asked = dict(input='Weather?', instructions='Be brief', tools=tools)
    r = c.post('/v1/responses', json=asked).json()
    call = next(o for o in r['output'] if o['type']=='function_call')
    out = dict(type='function_call_output', call_id=call['call_id'], output='rain')
    later = dict(previous_response_id=r['id'], input=[out])
    for kw in later,dict(input=[ASKED, *r['output'], out]):
        z = c.post('/v1/responses', json=kw).json()
        assert z['status']=='completed', z
        assert 'It rains.' in json.dumps(z['output']), z
        assert 'call weather' in seen[-1], z

ITEMS = ChatTemplate(
    "{% for m in messages %}{{ m.role }}{% for c in m.tool_calls or [] %} {{ c.function.name }}({% "
    "for k,v in c.function.arguments.items() %}{{ k }}={{ v }}{% endfor %}){% endfor %}; {% endfor "
    "%}")

@pytest.mark.parametrize(
    'args,want',
    [
        ('{"a": 1}','f(a=1)'), (dict(a=1),'f(a=1)'),
        ('','f()'), ('null','f()'), (None,'f()'),
        ('{"items": 3}','f(items=3)'), ('{"a"','f()'), ('[1]','f()'),
        (5,400)])
def test_arguments_given_back(args, want):
    """Templates go through the arguments of earlier calls; JSON that was cut off, or is no object,
    is shown to such a template as none, for it would end the conversation otherwise"""
    s = Speaker(lambda p: 'x')
    c = TestClient(app_of(s, s.tok, ITEMS), raise_server_exceptions=False)
    r = c.post(
        '/v1/chat/completions',
        json=dict(
            messages=[
                *HELLO,
                dict(
                    role='assistant', content=None,
                    tool_calls=[
                        dict(id='c', type='function', function=dict(name='f', arguments=args))]),
                dict(role='tool', tool_call_id='c', content='r')]))
    if want==400:
        assert r.status_code==400
        assert r.json()['error']['type']=='invalid_request_error'
        assert not s.prompts
    else:
        assert r.status_code==200
        assert f'assistant {want}; ' in s.prompts[-1]

# ---- Keys, other web pages, other names, files ----

KEY,ADMIN = 'sk-this-is-the-secret-key','sk-of-the-admin'

@pytest.fixture(scope='module')
def guarded():
    s = Speaker(lambda p: 'Hello')
    keys = ApiKeys({KEY:'user', ADMIN:'admin'})
    @functools.cache
    def make(**kw):
        app = app_of(s, s.tok, ChatTemplate(TEMPLATE), rules=Rules(keys, **kw))
        return TestClient(app, base_url='http://localhost', raise_server_exceptions=False)
    return make

@pytest.mark.parametrize(
    'path', ['/models','/v1/models','/metrics','/props','/nowhere','/openapi.json','/version'])
def test_a_key_is_needed_everywhere(guarded, path):
    """llama.cpp leaves the list of models open; a stranger has no business to know them. 401 comes
    before 404"""
    assert guarded().get('/health').status_code==200
    words = 'Bearer invalid-key',f'Basic {KEY}','Bearer',KEY
    for h in {},{'x-api-key':'invalid-key'},*(dict(authorization=w) for w in words):
        r = guarded().get(path, headers=h)
        assert r.status_code==401
        assert r.headers['www-authenticate']=='Bearer'
        assert r.json()['error']['code']=='invalid_api_key'

@pytest.mark.parametrize(
    'header',
    [dict(authorization=f'Bearer {KEY}'), dict(authorization=f'bearer {KEY}'), {'x-api-key':KEY}])
def test_the_right_key(guarded, header):
    c = guarded()
    def post(path, **body): return c.post(path, json=body, headers=header)
    assert post('/v1/completions', prompt='a').json()['choices'][0]['text']=='Hello'
    hi = [dict(role='user', content='hi')]
    a = post('/v1/messages', model='scripted', max_tokens=9, messages=hi).json()
    assert a['content'][0]['text']=='Hello'
    # an admin's
    assert post('/models/unload', model='scripted').status_code==403

def test_errors_of_keys_in_anthropics_shape(guarded):
    """llama.cpp says authentication_error to all; that is Anthropic's word, and OpenAI's clients
    look at the status"""
    r = guarded().post('/v1/messages', json={})
    assert r.status_code==401
    assert r.json()['type']=='error'
    assert r.json()['error']['type']=='authentication_error'

def test_other_pages(guarded):
    "llama.cpp answers every page that asks; ours is told which may"
    ask = {
        'origin':'https://web.mydomain.fr', 'access-control-request-method':'POST',
        'access-control-request-headers':'Authorization'}
    r = guarded().options('/v1/completions', headers=ask)
    assert r.status_code==403
    assert not [h for h in r.headers if h.startswith('access-control')]
    r = guarded(origins=('https://web.mydomain.fr',)).options('/v1/completions', headers=ask)
    assert r.status_code==204
    assert r.headers['access-control-allow-origin']=='https://web.mydomain.fr'
    assert 'POST' in r.headers['access-control-allow-methods']
    assert 'authorization' in r.headers['access-control-allow-headers'].lower()
    assert 'access-control-allow-credentials' not in r.headers

@pytest.mark.parametrize(
    'host,ok',
    [
        ('localhost',1), ('127.0.0.1:8888',1), ('[::1]:80',1),
        ('evil.example',0), ('localhost.evil.example',0), ('127.0.0.1.nip.io',0),
        ('localhost@evil',0), ('',0), ('localhost:x',0)])
def test_other_names(guarded, host, ok):
    assert guarded().get(
        '/health', headers=dict(host=host)).status_code==(200 if ok else 403)

@pytest.mark.parametrize(
    'url',
    [
        'file:///etc/passwd', 'file://mtmd/test-1.jpeg', '/etc/passwd', 'http://127.0.0.1:1/a.png',
        'https://example.com/a.png', 'ftp://a/b', 'data:text/html,hi', 'data:image/png;base64,!!',
        'gopher://x', ''])
def test_no_files_no_fetching(real, url):
    "llama.cpp has a folder of media; ours reads no file and, unless told to, no address"
    r = chat(
        real,
        messages=[
            dict(role='user', content=[dict(type='image_url', image_url=dict(url=url))])])
    assert r.status_code==400
    assert r.json()['error']['param'].startswith('messages[0].content')

# ---- Many models ----

FAKE = (sys.executable, Path(__file__).parent/'helpers'/'fake_worker.py')

class Served:
    "A gateway that serves, in a thread"
    def __init__(self, gateway):
        self.gateway = gateway
        self.server = self.url = None
        self.thread = threading.Thread(target=asyncio.run, args=(self.main(),), daemon=True)
        self.thread.start()
        until(lambda: not self.thread.is_alive() or self.server and self.server.started)
        assert self.thread.is_alive()
    async def main(self):
        app = create_app(self.gateway)
        with listen(port=0) as sock:
            server = uvicorn.Server(server_config(app, drain=1.))
            self.url = f'http://127.0.0.1:{sock.getsockname()[1]}'
            self.server = server
            await server.serve(sockets=[sock])
    def end(self):
        self.server.should_exit = True
        self.thread.join(WAIT)
        assert not self.thread.is_alive()

def scripted_model(m):
    template = ChatTemplate('{% for m in messages %}{{ m.content }}{% endfor %}')
    side = dict(tokenizer=byte_tokenizer(), template=template)
    config = ScriptConfig(**dict(max_queue=64)|m)
    return Model(config, policy=PATIENT, command=FAKE, text=lambda o: dict(side))

@contextmanager
def routed(*models, **kw):
    "A gateway of scripted workers, in a thread; a client, and the models"
    served = Served(Gateway([*map(scripted_model, models)], **kw))
    try:
        with httpx.Client(base_url=served.url, timeout=WAIT) as h:
            yield h,served.gateway
    finally:
        served.end()

def status(h, name):
    return next(m['status']['value'] for m in h.get('/models').json()['data'] if m['id']==name)
def reaches(h, name, value):
    until(lambda: status(h, name)==value, f'{name} {value}')
def ask(h, name, content='hi', **kw):
    return h.post(
        '/v1/chat/completions',
        json=dict(
            model=name, messages=[dict(role='user', content=content)],
            max_tokens=2000)|kw)

def at_once(n, f):
    "Call `f` from `n` threads; what they got"
    out = []
    ts = [threading.Thread(target=lambda: out.append(f())) for _ in range(n)]
    for t in ts:
        t.start()
    for t in ts:
        t.join(WAIT)
        assert not t.is_alive()
    return out

SLOW = 'I am b, and I take my time.'*8

@contextmanager
def two(tmp_path):
    "A model that is there and one that comes when asked; a client, and how often b came"
    lives = tmp_path/'lives'
    b = dict(model='b', say=SLOW, lives=str(lives))
    with routed(dict(model='org/a:Q8'), b, first=['org/a:Q8']) as (h,_):
        reaches(h, 'org/a:Q8', 'loaded')
        assert status(h, 'b')=='unloaded'
        yield h,lambda: len(lives.read_text().split())

def load(h, **kw):
    return h.post('/models/load', json=kw)
def unload(h, name):
    return h.post('/models/unload', json=dict(model=name))

def test_requests_share_a_load(tmp_path):
    with two(tmp_path) as (h,lives):
        rs = at_once(6, lambda: ask(h, 'b'))
        assert [r.status_code for r in rs]==[200]*6
        assert lives()==1
        assert status(h, 'b')=='loaded'

def test_an_unload_lets_what_runs_finish(tmp_path):
    "Whoever asks meanwhile waits for the next life"
    with two(tmp_path) as (h,lives):
        asked = dict(model='b', messages=[dict(role='user', content='hi')], stream=True)
        with h.stream('POST', '/v1/chat/completions', json=asked) as s:
            lines = s.iter_lines()
            next(lines)
            assert unload(h, 'b').json()==dict(success=True)
            assert status(h, 'b')!='loaded'
            assert ask(h, 'org/a:Q8').status_code==200
            chunks = [json.loads(l[6:]) for l in lines if l.startswith('data: {')]
        told = [c['choices'][0]['delta'] for c in chunks if c['choices']]
        assert ''.join(d.get('content') or '' for d in told)==SLOW
        assert ask(h, 'b').status_code==200
        assert lives()==2

def test_load_and_unload(tmp_path):
    with two(tmp_path) as (h,_):
        assert ask(h, 'b').status_code==200
        assert load(h, model='b').status_code==400
        assert load(h, model='c').status_code==404
        assert load(h).status_code==400
        assert unload(h, 'b').json()==dict(success=True)
        reaches(h, 'b', 'unloaded')
        assert unload(h, 'b').status_code==400
        assert status(h, 'org/a:Q8')=='loaded'

@pytest.mark.parametrize('stream', [False,True])
def test_unknown_models(stream):
    name = 'non-existent/model'
    paths = {
        '/v1/chat/completions':dict(messages=HELLO), '/v1/completions':dict(prompt='a'),
        '/v1/messages':dict(messages=HELLO[1:], max_tokens=5), '/v1/responses':dict(input='a')}
    others = {
        '/tokenize':dict(content='a'), '/v1/embeddings':dict(input='a'),
        '/apply-template':dict(messages=HELLO)}
    with routed(dict(model='a')) as (h,_):
        for path,kw in paths.items():
            r = h.post(path, json=kw|dict(model=name, stream=stream))
            assert r.status_code==404
            assert r.headers['content-type']=='application/json'
            assert name in r.json()['error']['message']
        for path,kw in others.items():
            assert h.post(path, json=kw|dict(model='x')).status_code==404

def test_no_loading_by_asking():
    """llama.cpp says 400; nothing is wrong with the request, so we say 503, when to come again,
    and who can help"""
    with routed(dict(model='a'), dict(model='b'), autoload=False, first=['a']) as (h,_):
        r = ask(h, 'b')
        assert r.status_code==503
        assert int(r.headers['retry-after'])>=1
        assert '/models/load' in r.json()['error']['message']
        assert status(h, 'b')=='unloaded'
        assert load(h, model='b').json()==dict(success=True)
        reaches(h, 'b', 'loaded')
        assert ask(h, 'b').status_code==200

def leaves_while_it_loads(h, name):
    "Ask, and give up before an answer comes, but not before the load has begun"
    for patience in (.3, 3., 30., WAIT):
        hasty = httpx.Timeout(WAIT, read=patience)
        with pytest.raises(httpx.ReadTimeout):
            ask(httpx.Client(base_url=h.base_url, timeout=hasty), name)
        if status(h, name)!='unloaded':
            return

def test_clients_that_leave_while_it_loads():
    """The one who asked is gone, and the other models never noticed; a load that hangs can be
    called off"""
    with routed(dict(model='a'), dict(model='b', at_load='hang'), first=['a']) as (h,ms):
        reaches(h, 'a', 'loaded')
        leaves_while_it_loads(h, 'b')
        assert status(h, 'b')=='loading'
        assert ask(h, 'a').status_code==200
        assert h.get('/health').status_code==200
        out = []
        t = threading.Thread(target=lambda: out.append(ask(h, 'b', stream=True)))
        t.start()
        assert unload(h, 'b').json()==dict(success=True)
        b = ms.find('b')
        b.config = replace(b.config, at_load=None)  # the next life is a good one
        t.join(WAIT)
        assert not t.is_alive()
        assert out[0].status_code in (200,503)
        assert ask(h, 'b').status_code==200

def told_of_a_load(h, name):
    "What `/models/sse` says of a model, from the wish to load it to the end of that"
    seen = []
    with httpx.Client(base_url=h.base_url, timeout=WAIT) as k, k.stream('GET', '/models/sse') as s:
        lines = s.iter_lines()
        assert load(h, model=name).json()==dict(success=True)
        for l in lines:
            if l.startswith('data: '):
                seen.append(json.loads(l[6:]))
            if seen and seen[-1]['data']['status']=='loaded':
                return seen

def test_what_is_told_meanwhile():
    "GET /models/sse: each change of a state, with the stages of a load"
    with routed(dict(model='a'), first=[]) as (h,_):
        seen = told_of_a_load(h, 'a')
    assert {(e['model'],e['event']) for e in seen}=={('a','model_status')}
    assert seen[-1]['data']['status']=='loaded'
    loading = [e['data'] for e in seen if e['data']['status']=='loading']
    assert any(d.get('progress') for d in loading)

def test_openai_client_of_many():
    with routed(dict(model='a'), dict(model='b', say='I am b.')) as (h,_):
        c = openai.OpenAI(base_url=f'{h.base_url}/v1', api_key='x', max_retries=0, timeout=WAIT)
        assert {m.id for m in c.models.list()}=={'a','b'}
        said = c.chat.completions.create(model='b', messages=HELLO).choices[0].message
        assert said.content=='I am b.'
        with pytest.raises(openai.NotFoundError):
            c.chat.completions.create(model='c', messages=HELLO)
