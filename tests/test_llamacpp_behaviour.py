"""What llama.cpp's server is tested for, as far as it is about servers and not about its engine,
asked of ours: a toy model with a token for each byte, and a gateway with scripted workers.
Where we differ, we do so on purpose, and the test says why."""
import asyncio,base64,functools,json,re,struct,sys,threading,time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
import httpx,numpy as np,openai,pytest,uvicorn
from starlette.testclient import TestClient
import atlas.engine.score
from atlas.text.chat import ChatTemplate
from atlas.ground.config import PRESETS
from atlas.service.process import Model
from atlas.service.models import Models as Gateway
from atlas.service.http import Keys,Rules,server_config
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
def events(r):
    return [
        json.loads(l[6:]) for l in r.text.split('\n')
        if l.startswith('data: ') and l!='data: [DONE]']
def plain(c):
    "A bias against all that is no small letter, so that each token is a character of its own"
    ids = c.post(
        '/tokenize',
        json=dict(content=''.join(map(chr, range(97, 123))))).json()['tokens']
    return {str(i):-100 for i in range(256) if i not in ids}

# ---- Basics, models ----

def test_it_is_there(real):
    assert real.get('/health').json()['status']==real.get('/v1/health').json()['status']=='ok'
    assert '<!doctype html>' in real.get('/').text.lower()
    assert real.head('/').status_code==200
    m = real.get('/models').json()
    assert m['object']=='list'
    loaded = dict(value='loaded', args=['atlas','serve','tiny'])
    shown = [(x['id'],x['aliases'],x['status']) for x in m['data']]
    assert shown==[('tiny',['tiny/alias'],loaded)]
    assert {
        x['id'] for x in real.get('/v1/models').json()['data']
    }=={'tiny','tiny/alias'}
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

def test_chat(real):
    a = chat(real).json()
    x,u = a['choices'][0],a['usage']
    assert 'cmpl' in a['id']
    assert a['object']=='chat.completion'
    assert x['message']['role']=='assistant'
    assert x['finish_reason']=='length'
    assert u['completion_tokens']==8
    assert u['prompt_tokens']==real.post(
        '/tokenize', json=dict(messages=HELLO)
    ).json()['count']
    assert u['total_tokens']==u['prompt_tokens']+8
    parts = [
        HELLO[0],
        dict(
            role='user',
            content=[dict(type='text', text='What is'), dict(type='text', text=' the best book')])]
    assert chat(real, messages=parts).json()['usage']['prompt_tokens']>=u['prompt_tokens']

def test_chat_stream(real):
    es = events(chat(real, stream=True, stream_options=dict(include_usage=True), temperature=0))
    first,last = es[0]['choices'][0],es[-2]['choices'][0]
    assert first['delta']['role']=='assistant'
    assert not any(
        'role' in e['choices'][0]['delta'] for e in es[1:-1])
    assert len({e['id'] for e in es})==1
    assert len({e['model'] for e in es})==1
    assert last['finish_reason']=='length'
    assert not last['delta'].get('content')
    assert es[-1]['choices']==[]
    assert es[-1]['usage']==chat(real, temperature=0).json()['usage'] | dict(
        prompt_tokens_details=es[-1]['usage']['prompt_tokens_details'])
    assert ''.join(
        e['choices'][0]['delta'].get('content') or '' for e in es[:-1]
    )==chat(real, temperature=0).json()['choices'][0]['message']['content']
    assert 'usage' not in events(
        chat(real, stream=True))[-1] or events(chat(real, stream=True))[-1]['usage'] is None

@pytest.mark.parametrize(
    'messages',
    [
        None, 'string', [123], [{}],
        [dict(role=123)],
        [dict(role='system', content=123)],
        [dict(content='hello')],
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

@pytest.mark.parametrize('kind,want', [(dict(type='json_object', schema=dict(const='42')),'"42"'), (dict(type='json_schema', json_schema=dict(schema=dict(const='foooooo'))),'"foooooo"'), (dict(type='json_object'),r'\s*\{.*'),
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
        assert re.fullmatch(
            want, r.json()['choices'][0]['message']['content'],
            re.S)

def test_grammar(real):
    """Its `json_schema` is ours too; its `grammar` has a syntax of its own, and a header says that
    we leave it out. Ours are vLLM's, and take Lark, regex and choice"""
    assert chat(
        real, json_schema=dict(const='foo'), max_tokens=24
    ).json()['choices'][0]['message']['content']=='"foo"'
    assert 'grammar' in chat(real, grammar='root ::= "a"').headers['x-atlas-warning']
    a = chat(
        real, structured_outputs=dict(regex='a{5}'), max_tokens=24).json()['choices'][0]
    assert (a['message']['content'],a['finish_reason'])==('aaaaa','stop')
    assert chat(
        real, structured_outputs=dict(grammar='start: "a" "b"+ "c"'), max_tokens=24,
        logit_bias=plain(real)).json()['choices'][0]['message']['content'].startswith('ab')

@pytest.mark.parametrize('stream', [False,True])
def test_chat_logprobs(real, stream):
    r = chat(
        real, logprobs=True, top_logprobs=10, temperature=0, max_tokens=5,
        stream=stream, logit_bias=plain(real))
    cs = [e['choices'][0] for e in events(r)] if stream else r.json()['choices']
    said = ''.join(
        x['delta'].get('content') or '' for x in cs) if stream else cs[0]['message']['content']
    toks = [t for x in cs if x.get('logprobs') for t in x['logprobs']['content']]
    assert ''.join(t['token'] for t in toks)==said
    assert len(toks)==5
    assert all(
        t['logprob']<=0 and t['bytes']==list(t['token'].encode()) and len(t['top_logprobs'])==10 and t['top_logprobs'][0]['logprob']>=t['logprob']-1e-6
        for t in toks)

def test_logit_bias(real):
    said = chat(
        real, temperature=0, max_tokens=64, logit_bias=plain(real)
    ).json()['choices'][0]['message']['content']
    assert len(said)==64
    assert re.fullmatch('[a-z]+', said)
    ban = {str(i):-100 for i in real.post('/tokenize', json=dict(content=said[0])).json()['tokens']}
    assert said[0] not in chat(
        real, temperature=0, max_tokens=64, logit_bias=plain(real)|ban
    ).json()['choices'][0]['message']['content']

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
    assert ''.join(
        e['choices'][0]['text'] for e in events(text(real, stream=True, temperature=0))
    )==text(real, temperature=0).json()['choices'][0]['text']

def test_seeds(real):
    said = lambda **kw: text(real, temperature=1., **kw).json()['choices'][0]['text']
    assert len({said(seed=42) for _ in range(4)})==1
    assert len({said(seed=i) for i in range(4)})==4
    a = text(real, n=2, seed=7, temperature=1.).json()['choices']
    assert a[0]['text']!=a[1]['text']
    assert len(
        {text(real, temperature=0, seed=i).json()['choices'][0]['text'] for i in range(3)})==1

def test_neighbours_change_nothing(real):
    "Greedy answers are the same alone and in a batch"
    ps = ['Write a very long book.','Write a poem.','What is LLM?','The sky is blue']
    alone = [text(real, prompt=p, temperature=0).json()['choices'][0]['text'] for p in ps]
    assert [x['text'] for x in text(real, prompt=ps, temperature=0).json()['choices']]==alone

def test_tokens_as_prompt(real):
    """Mixed prompts, text and ids in one list, are llama.cpp's own: OpenAI's API has no such
    thing, and a refusal names the field"""
    ids = real.post(
        '/tokenize', json=dict(content='I believe the meaning of life is', add_special=True)
    ).json()['tokens']
    one,two = text(real, prompt=ids, temperature=0).json(),text(
        real, prompt=[ids,ids], temperature=0).json()
    assert [
        x['text'] for x in two['choices']
    ]==[one['choices'][0]['text']]*2
    assert one['usage']['prompt_tokens']==len(ids)
    for p in [ids,'text'],[1,2,'text']:
        r = text(real, prompt=p)
        assert r.status_code==400
        assert r.json()['error']['param'].startswith('prompt[')
    assert text(real, prompt=[256]).json()['error']['param']=='prompt'

def test_stop_words(real):
    kw = dict(temperature=0, max_tokens=40, logit_bias=plain(real))
    said = text(real, **kw).json()['choices'][0]['text']
    for stop in said[7:9],said[3:9],said[0]:
        a = text(
            real, stop=[stop,'NEVER'], **kw).json()['choices'][0]
        assert (
            a['text'], a['finish_reason'], a['stop_reason'])==(said[:said.index(stop)],'stop',stop)
        es = events(text(real, stop=stop, stream=True, **kw))
        assert ''.join(e['choices'][0]['text'] for e in es)==a['text']
        assert es[-1]['choices'][0]['finish_reason']=='stop'

def test_probabilities(real):
    a = text(
        real, logprobs=10, temperature=0, max_tokens=5, logit_bias=plain(real)
    ).json()['choices'][0]['logprobs']
    assert len(a['tokens'])==5
    assert all(p<=0 for p in a['token_logprobs'])
    assert all(
        s in t and len(t)<=11 for s,t in zip(a['tokens'], a['top_logprobs'])
    )
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
    assert real.post(
        '/detokenize', json=dict(tokens=a['tokens'])).json()['content']==content
    ps = real.post(
        '/tokenize', json=dict(content=content, with_pieces=True)).json()['tokens']
    assert [x['id'] for x in ps]==a['tokens']
    assert ''.join(x['piece'] for x in ps[:5])=='What '
    for bad in dict(tokens=['a']),dict(tokens=[256]),dict(tokens=[-1]),dict(tokens=[2**31]),{}:
        assert real.post('/detokenize', json=bad).json()['error']['param'].startswith('tokens'), bad
    assert real.post('/tokenize', json={}).status_code==400

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

def test_embeddings(real):
    def post(**kw): return real.post('/v1/embeddings', json=kw)
    one = post(input='I believe the meaning of life is').json()
    v = np.array(one['data'][0]['embedding'])
    assert abs((v**2).sum()-1)<1e-3
    assert one['usage']==dict(prompt_tokens=32, total_tokens=32)
    many = post(input=['I believe the meaning of life is']*3+['This is a test']).json()
    assert [d['index'] for d in many['data']]==[0,1,2,3]
    assert all(
        np.allclose(d['embedding'], v, atol=1e-4) for d in many['data'][:3]
    )
    assert not np.allclose(many['data'][3]['embedding'], v, atol=1e-2)
    assert many['usage']['prompt_tokens']==3*32+14
    raw = base64.b64decode(
        post(
            input='I believe the meaning of life is', encoding_format='base64'
        ).json()['data'][0]['embedding'])
    assert np.allclose(struct.unpack(f'<{len(v)}f', raw), v, atol=1e-6)
    mean = np.array(
        post(
            input='I believe the meaning of life is', pooling='mean').json()['data'][0]['embedding']
    )
    assert abs((mean**2).sum()-1)<1e-3
    assert not np.allclose(mean, v, atol=1e-3)
    for bad in [],'',dict(content='x'),['a',[1]],['a',5],[[256]],'x'*500:
        assert post(input=bad).status_code==400, bad
    assert post(input='a', pooling='none').status_code==400

# ---- Anthropic's messages, OpenAI's responses ----

def say(c, **kw):
    return c.post(
        '/v1/messages',
        json=dict(
            model='tiny', max_tokens=8, temperature=0,
            messages=[dict(role='user', content='Say hello')])|kw)

def test_messages(real):
    a = say(real).json()
    assert (
        a['type'], a['role'], a['stop_reason'],
        a['content'][0]['type'])==('message','assistant','max_tokens','text')
    assert 'timings' not in a
    assert {'input_tokens', 'output_tokens', 'cache_read_input_tokens'}<=set(a['usage'])
    assert a['usage']['output_tokens']==8
    for kw in dict(system='You are helpful.'),dict(temperature=.5),dict(top_p=.9),dict(top_k=40),dict(metadata=dict(user_id='u')),dict(stop_sequences=['\n','END']),dict(thinking=dict(type='enabled', budget_tokens=1024), max_tokens=2000, stop_sequences=[chr(i) for i in range(97, 107)]),dict(messages=[dict(role='user', content=[dict(type='text', text='What is'), dict(type='text', text=' the answer?')])]):
        assert say(real, **kw).json()['type']=='message', kw

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
    for kw in dict(messages=[]),dict(messages=None),dict(max_tokens=None),dict(messages=[dict(role='user', content=[dict(type='image', source=dict(type='base64', media_type='image/png', data='iVBORw0KGgo='))])]):
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
    ms = [dict(role='user', content="What's the weather?"), dict(role='assistant', content=[dict(type='tool_use', id='test123', name='get_weather', input=dict(location='Paris'))]),
        dict(
            role='user',
            content=[*more, dict(type='tool_result', tool_use_id='test123')|result])]
    a = say(real, messages=ms)
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
    with speaking('Hi', (None,None)) as (c,_):
        a = c.post(
            '/v1/responses',
            json=dict(input='a', top_logprobs=2, include=['message.output_text.logprobs']))
        assert a.status_code==200
        assert [
            t['token'] for t in a.json()['output'][0]['content'][0]['logprobs']][:2]==['H','i']

def test_responses_stream(real):
    es = events(
        real.post(
            '/v1/responses',
            json=dict(input=HELLO, max_output_tokens=16, temperature=0, stream=True)))
    kinds = [e['type'] for e in es]
    assert kinds[:2]==['response.created','response.in_progress']
    assert kinds[-1] in ('response.completed', 'response.incomplete')
    assert [e['sequence_number'] for e in es]==[*range(len(es))]
    rid,mid = es[0]['response']['id'],next(
        e['item']['id'] for e in es if e['type']=='response.output_item.added')
    assert rid.startswith('resp_')
    assert mid.startswith('msg_')
    assert {e['item_id'] for e in es if 'item_id' in e}=={mid}
    assert es[-1]['response']['id']==rid
    said = ''.join(e['delta'] for e in es if e['type']=='response.output_text.delta')
    assert said==es[-1]['response']['output'][0]['content'][0]['text']
    assert es[-1]['response']['output'][0]['id']==mid

# ---- Tool calls: every family says the same thing in its own way, through all three APIs, streamed and whole ----

PARAMS = dict(
    type='object',
    properties=dict(city=dict(type='string'), days=dict(type='integer')),
    required=['city'])
ARGS = '{"city": "Paris", "days": 3}'
SAID = {('hermes','qwen3'):'<think>Hm.</think>Look:<tool_call>\n{"name": "weather", "arguments": '+ARGS+'}\n</tool_call>',
    (
        'qwen3_coder', 'qwen3'
    ):'<think>Hm.</think>Look:<tool_call>\n<function=weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>',
    ('mistral','mistral'):'[THINK]Hm.[/THINK]Look:[TOOL_CALLS]weather'+ARGS,
    ('llama3_json',None):'{"name": "weather", "parameters": '+ARGS+'}',
    ('pythonic',None):'[weather(city="Paris", days=3)]',
    (
        'gemma4', 'gemma4'
    ):'<|channel>thought\nHm.<channel|>Look:<|tool_call>call:weather{city:<|"|>Paris<|"|>,days:3}<tool_call|>',
    (
        'minimax_m2', 'minimax_m2'
    ):'<think>Hm.</think>Look:<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">Paris</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    (
        'deepseek_v3', 'deepseek_r1'
    ):'<think>Hm.</think>Look:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n'+ARGS+'\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    (
        'deepseek_v31', 'deepseek_r1'
    ):'Hm.</think>Look:<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>'+ARGS+'<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    (
        'deepseek_v32', 'deepseek_r1'
    ):'Hm.</think>Look:<｜DSML｜function_calls>\n<｜DSML｜invoke name="weather">\n<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    (
        'glm45', 'glm45'
    ):'<think>Hm.</think>Look:<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>',
    (
        'glm47', 'glm45'
    ):'<think>Hm.</think>Look:<tool_call>weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key><arg_value>3</arg_value></tool_call>',
    (
        'openai', 'openai_gptoss'
    ):'<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>Look:<|end|><|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json<|message|>'+ARGS+'<|call|>'}

def of_chat(c, **kw):
    "(reasoning, content, calls, finish) of each choice, whole and streamed"
    b = dict(
        messages=HELLO,
        tools=[dict(type='function', function=dict(name='weather', parameters=PARAMS))])|kw
    whole = [
        (m['message'].get('reasoning') or '', m['message']['content'] or '', [(t['function']['name'], json.loads(t['function']['arguments'])) for t in m['message'].get('tool_calls') or []], m['finish_reason'])
        for m in c.post('/v1/chat/completions', json=b).json()['choices']]
    got = {}
    for x in (x for e in events(c.post('/v1/chat/completions', json=b|dict(stream=True))) for x in e['choices']):
        g,d = got.setdefault(x['index'], ['','',{},None]),x['delta']
        g[0] += d.get('reasoning') or ''
        g[1] += d.get('content') or ''
        g[3] = x['finish_reason'] or g[3]
        for t in d.get('tool_calls') or []:
            k = g[2].setdefault(t['index'], ['',''])
            k[0] += t['function'].get('name') or ''
            k[1] += t['function'].get('arguments') or ''
    return whole,[
        (g[0], g[1], [(n, json.loads(a)) for n,a in g[2].values()], g[3])
        for _,g in sorted(got.items())]

def of_messages(c, **kw):
    "Blocks and reason, whole and streamed; the indices of the blocks"
    b = dict(
        model='scripted', max_tokens=5000,
        messages=[dict(role='user', content='hi')],
        tools=[dict(name='weather', input_schema=PARAMS)])|kw
    a,blocks = c.post('/v1/messages', json=b).json(),{}
    for e in events(c.post('/v1/messages', json=b|dict(stream=True))):
        if e['type']=='content_block_start':
            blocks[e['index']] = [e['content_block'], '', False]
        if e['type']=='content_block_delta':
            blocks[e['index']][1] += next(
                (e['delta'][k] for k in ('text','thinking','partial_json') if k in e['delta']),
                '')
        if e['type']=='content_block_stop':
            blocks[e['index']][2] = True
        if e['type']=='message_delta':
            why = e['delta']['stop_reason']
    assert [*blocks]==[*range(len(blocks))]
    assert all(over for *_,over in blocks.values())
    show = lambda k,d,t: (
        k, (d['name'], t) if k=='tool_use' else t)
    return (
        [
            show(x['type'], x, x.get('input', x.get('text', x.get('thinking'))))
            for x in a['content']],
        a['stop_reason']
    ),([show(d['type'], d, json.loads(t) if d['type']=='tool_use' else t) for d,t,_ in blocks.values()], why)

def of_responses(c, **kw):
    "Items, whole and at the end of a stream; what the stream's deltas came to"
    b = dict(
        input='hi',
        tools=[dict(type='function', name='weather', parameters=PARAMS)])|kw
    def show(r):
        return [
            (o['type'], (o['name'], json.loads(o['arguments'])) if o['type']=='function_call' else ''.join(x['text'] for x in o.get('content') or o.get('summary') or []))
            for o in r['output']]
    es = events(c.post('/v1/responses', json=b|dict(stream=True)))
    return show(c.post('/v1/responses', json=b).json()),show(es[-1]['response']),*(
        ''.join(e['delta'] for e in es if e['type']==f'response.{k}.delta')
        for k in ('output_text','function_call_arguments'))

@contextmanager
def speaking(say, parsers):
    s = Speaker(say if callable(say) else lambda p: say)
    app = app_of(s, s.tok, ChatTemplate(TEMPLATE), parsers=parsers)
    yield TestClient(app, raise_server_exceptions=False),s

@pytest.mark.parametrize('parsers', SAID, ids=lambda p: p[0])
def test_calls_of_every_family(parsers):
    thought,before = ('Hm.','Look:') if parsers[1] else ('','')
    with speaking(SAID[parsers], parsers) as (c,_):
        want = (thought, before, [('weather', dict(city='Paris', days=3))], 'tool_calls')
        assert of_chat(c, n=2)==([want]*2, [want]*2)
        blocks = [
            *([('thinking', thought)] if thought else []),
            *([('text', before)] if before else []),
            ('tool_use', ('weather', dict(city='Paris', days=3)))]
        assert of_messages(c)==((blocks, 'tool_use'),)*2
        items = [
            *([('reasoning', thought)] if thought else []),
            *([('message', before)] if before else []),
            ('function_call', want[2][0])]
        whole,end,said,args = of_responses(c)
        assert whole==end==items
        assert said==before
        assert json.loads(args)==want[2][0][1]

@pytest.mark.parametrize(
    'parsers',
    [('hermes','qwen3'),('qwen3_coder','qwen3'),('openai','openai_gptoss'),('mistral','mistral')],
    ids=lambda p: p[0])
def test_stop_strings_across_marks(parsers):
    """A stop string is looked for in what the client is shown: not in thoughts, marks or calls;
    streamed or not, the same"""
    with speaking(SAID[parsers], parsers) as (c,_):
        for stop,want in ('Look','') , ('k:','Loo'), ('Hm','Look:'), (':<','Look:'), ('Paris','Look:'), ('tool','Look:'):
            (a,),(b,) = of_chat(c, stop=stop)
            assert a==b, (stop, a)
            assert a[:2]==('Hm.',want), (stop, a)
            assert (a[3]=='stop')==(not a[2])==(
                want!='Look:'), (stop, a)

@pytest.mark.parametrize('parsers', SAID, ids=lambda p: p[0])
def test_a_tool_loop(parsers):
    """Call, result, answer: over each API the model sees its own call and thought again, and then
    says something"""
    seen = []
    with speaking(
        lambda p: (seen.append(p), 'It rains.' if 'tool: rain' in p else SAID[parsers])[1],
        (parsers[0],None if not parsers[1] else parsers[1])
    ) as (c,_):
        tools = [dict(type='function', function=dict(name='weather', parameters=PARAMS))]
        ms = [dict(role='developer', content='Be brief'), dict(role='user', content='Weather?')]
        m = c.post(
            '/v1/chat/completions', json=dict(messages=ms, tools=tools)
        ).json()['choices'][0]['message']
        ms += [
            m,
            dict(role='tool', tool_call_id=m['tool_calls'][0]['id'], content='rain')]
        a = c.post(
            '/v1/chat/completions', json=dict(messages=ms, tools=tools)).json()['choices'][0]
        assert 'It rains.' in (a['message']['content'] or '')+(
            a['message'].get('reasoning') or ''
        )
        assert a['finish_reason']=='stop'
        assert 'call weather' in seen[-1]
        assert 'system: Be brief' in seen[-1]
        b = dict(
            model='scripted', max_tokens=999, system='Be brief',
            messages=[dict(role='user', content='Weather?')],
            tools=[dict(name='weather', input_schema=PARAMS)])
        x = c.post('/v1/messages', json=b).json()
        use = next(k for k in x['content'] if k['type']=='tool_use')
        b['messages'] += [
            dict(role='assistant', content=x['content']),
            dict(
                role='user',
                content=[dict(type='tool_result', tool_use_id=use['id'], content='rain')])]
        y = c.post('/v1/messages', json=b).json()
        assert y['stop_reason']=='end_turn'
        assert 'It rains.' in json.dumps(y['content'])
        assert 'call weather' in seen[-1]
        r = c.post(
            '/v1/responses',
            json=dict(
                input='Weather?', instructions='Be brief',
                tools=[dict(type='function', name='weather', parameters=PARAMS)])).json()
        call = next(o for o in r['output'] if o['type']=='function_call')
        out = dict(type='function_call_output', call_id=call['call_id'], output='rain')
        for kw in dict(previous_response_id=r['id'], input=[out]),dict(input=[dict(role='user', content='Weather?'), *r['output'], out]):
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
    keys = Keys({KEY:'user', ADMIN:'admin'})
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
    for h in {},dict(authorization='Bearer invalid-key'),{'x-api-key':'invalid-key'},dict(authorization=f'Basic {KEY}'),dict(authorization='Bearer'),dict(authorization=KEY):
        r = guarded().get(path, headers=h)
        assert r.status_code==401
        assert r.headers['www-authenticate']=='Bearer'
        assert r.json()['error']['code']=='invalid_api_key'

@pytest.mark.parametrize(
    'header',
    [dict(authorization=f'Bearer {KEY}'), dict(authorization=f'bearer {KEY}'), {'x-api-key':KEY}])
def test_the_right_key(guarded, header):
    c = guarded()
    assert c.post(
        '/v1/completions', json=dict(prompt='a'), headers=header
    ).json()['choices'][0]['text']=='Hello'
    assert c.post(
        '/v1/messages',
        json=dict(
            model='scripted', max_tokens=9,
            messages=[dict(role='user', content='hi')]),
        headers=header).json()['content'][0]['text']=='Hello'
    # an admin's
    assert c.post('/models/unload', json=dict(model='scripted'), headers=header).status_code==403

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

@contextmanager
def routed(*models, **kw):
    "A gateway of scripted workers, in a thread; a client, and the models"
    got,side = {},dict(
        tokenizer=byte_tokenizer(),
        template=ChatTemplate('{% for m in messages %}{{ m.content }}{% endfor %}'))
    def model(m):
        config = ScriptConfig(**dict(max_queue=64)|m)
        return Model(config, policy=PATIENT, command=FAKE, text=lambda o: dict(side))
    ms = [model(m) for m in models]
    async def main():
        g = Gateway(ms, **kw)
        app = create_app(g)
        with listen(port=0) as sock:
            server = uvicorn.Server(server_config(app, drain=1.))
            server.install_signal_handlers = lambda: None
            got.update(server=server, url=f'http://127.0.0.1:{sock.getsockname()[1]}', models=g)
            await server.serve(sockets=[sock])
    t = threading.Thread(target=asyncio.run, args=(main(),), daemon=True)
    t.start()
    def started(): return 'server' in got and got['server'].started
    until(lambda: not t.is_alive() or started())
    assert t.is_alive()
    try:
        with httpx.Client(base_url=got['url'], timeout=WAIT) as h:
            yield h,got['models']
    finally:
        got['server'].should_exit = True
        t.join(WAIT)
        assert not t.is_alive()

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

def test_load_unload_and_load_by_asking(tmp_path):
    """Requests for one model that is not there share one load; an unload lets what runs finish,
    and whoever asks meanwhile waits for the next life"""
    lives = tmp_path/'lives'
    with routed(
        dict(model='org/a:Q8'),
        dict(model='b', say='I am b, and I take my time.'*8, lives=str(lives)),
        first=['org/a:Q8']
    ) as (h,_):
        reaches(h, 'org/a:Q8', 'loaded')
        assert status(h, 'b')=='unloaded'
        rs = at_once(6, lambda: ask(h, 'b'))
        assert [r.status_code for r in rs]==[200]*6
        assert len(lives.read_text().split())==1
        assert status(h, 'b')=='loaded'
        with h.stream(
            'POST', '/v1/chat/completions',
            json=dict(
                model='b', messages=[dict(role='user', content='hi')],
                stream=True)
        ) as s:
            lines = s.iter_lines()
            next(lines)
            assert h.post(
                '/models/unload', json=dict(model='b')).json()==dict(success=True)
            assert status(h, 'b')!='loaded'
            assert ask(h, 'org/a:Q8').status_code==200
            said = ''.join(
                c['choices'][0]['delta'].get('content') or '' for l in lines
                if l.startswith('data: {') and (c := json.loads(l[6:]))['choices'])
        assert said=='I am b, and I take my time.'*8
        # it was stopping, and came again
        assert ask(h, 'b').status_code==200
        assert len(lives.read_text().split())==2
        assert h.post('/models/load', json=dict(model='b')).status_code==400
        assert h.post('/models/load', json=dict(model='c')).status_code==404
        assert h.post('/models/load', json={}).status_code==400
        assert h.post(
            '/models/unload', json=dict(model='b')).json()==dict(success=True)
        reaches(h, 'b', 'unloaded')
        assert h.post('/models/unload', json=dict(model='b')).status_code==400
        assert status(h, 'org/a:Q8')=='loaded'

@pytest.mark.parametrize('stream', [False,True])
def test_unknown_models(stream):
    with routed(dict(model='a')) as (h,_):
        for path,kw in ('/v1/chat/completions',dict(messages=HELLO)),('/v1/completions',dict(prompt='a')),('/v1/messages',dict(messages=HELLO[1:], max_tokens=5)),('/v1/responses',dict(input='a')):
            r = h.post(path, json=kw|dict(model='non-existent/model', stream=stream))
            assert r.status_code==404
            assert r.headers['content-type']=='application/json'
            assert 'non-existent/model' in r.json()['error']['message']
        for path,kw in ('/tokenize',dict(content='a')),('/v1/embeddings',dict(input='a')),('/apply-template',dict(messages=HELLO)):
            assert h.post(path, json=kw|dict(model='x')).status_code==404

def test_no_loading_by_asking():
    """llama.cpp says 400; nothing is wrong with the request, so we say 503, when to come again,
    and who can help"""
    with routed(
        dict(model='a'), dict(model='b'), autoload=False,
        first=['a']
    ) as (h,_):
        r = ask(h, 'b')
        assert r.status_code==503
        assert int(r.headers['retry-after'])>=1
        assert '/models/load' in r.json()['error']['message']
        assert status(h, 'b')=='unloaded'
        assert h.post(
            '/models/load', json=dict(model='b')).json()==dict(success=True)
        reaches(h, 'b', 'loaded')
        assert ask(h, 'b').status_code==200

def test_clients_that_leave_while_it_loads(tmp_path):
    """The one who asked is gone, and the other models never noticed; a load that hangs can be
    called off"""
    with routed(
        dict(model='a'), dict(model='b', at_load='hang'),
        first=['a']
    ) as (h,ms):
        reaches(h, 'a', 'loaded')
        for patience in (.3, 3., 30., WAIT):  # until it got as far as that
            hasty = httpx.Timeout(WAIT, read=patience)
            c = httpx.Client(base_url=h.base_url, timeout=hasty)
            with pytest.raises(httpx.ReadTimeout):
                ask(c, 'b')
            if status(h, 'b')!='unloaded':
                break
        assert status(h, 'b')=='loading'
        assert ask(h, 'a').status_code==200
        assert h.get('/health').status_code==200
        out = []
        t = threading.Thread(target=lambda: out.append(ask(h, 'b', stream=True)))
        t.start()
        assert h.post(
            '/models/unload', json=dict(model='b')).json()==dict(success=True)
        b = ms.find('b')
        b.config = replace(b.config, at_load=None)  # the next life is a good one
        t.join(WAIT)
        assert not t.is_alive()
        assert out[0].status_code in (200,503)
        assert ask(h, 'b').status_code==200

def test_what_is_told_meanwhile():
    "GET /models/sse: each change of a state, with the stages of a load"
    with routed(dict(model='a'), first=[]) as (h,_):
        seen = []
        with httpx.Client(
            base_url=h.base_url, timeout=WAIT
        ) as k, k.stream('GET', '/models/sse') as s:
            lines = s.iter_lines()
            assert h.post(
                '/models/load', json=dict(model='a')).json()==dict(success=True)
            for l in lines:
                if l.startswith('data: '):
                    seen.append(json.loads(l[6:]))
                if seen and seen[-1]['data']['status']=='loaded':
                    break
        assert all(e['model']=='a' and e['event']=='model_status' for e in seen)
        assert [e['data']['status'] for e in seen][-1]=='loaded'
        assert any(
            e['data'].get('progress') for e in seen if e['data']['status']=='loading')

def test_openai_client_of_many():
    with routed(
        dict(model='a'), dict(model='b', say='I am b.')
    ) as (h,_):
        c = openai.OpenAI(base_url=f'{h.base_url}/v1', api_key='x', max_retries=0, timeout=WAIT)
        assert {m.id for m in c.models.list()}=={'a','b'}
        assert c.chat.completions.create(model='b', messages=HELLO).choices[0].message.content=='I am b.'
        with pytest.raises(openai.NotFoundError):
            c.chat.completions.create(model='c', messages=HELLO)
