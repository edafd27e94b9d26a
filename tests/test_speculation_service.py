"""Drafts change nothing of what clients see: every API, whole and in a stream; clients that leave.

A made-up hybrid speaks bytes. A drafter knows what it says without drafts,
and lies now and then."""
import json
from dataclasses import replace
import httpx,pytest
from starlette.testclient import TestClient
from atlas.engine.arbiter import Arbiter
from atlas.service.server import create_app
from atlas.text.chat import ChatTemplate
from atlas.text.guide import Guides
from atlas.text.tokenizer import byte_tokenizer
from helpers.inprocess import threaded
from helpers.scripted import END,running
from helpers.small_engine import left_clean,made_up
from helpers.speculation import CONFIG,engine
from helpers.waiting import WAIT,until

TOK = byte_tokenizer('<end>')
MODEL = made_up(replace(CONFIG, vocab_size=END+1))
GUIDES = Guides(TOK, END+1, (END,))
INFO = dict(
    name='small', max_seq_len=200, vocab_size=END+1, eos_ids=[END],
    max_queue=64)
TEXTS = ChatTemplate('{% for m in messages %}{{ m.content }}> {% endfor %}')

def models(e, **info):
    "The service's `Models` with engine `e`"
    side = dict(guides=GUIDES, parsers=('hermes',None))
    return threaded(e, INFO|info, TOK, TEXTS, **side)

class Recorded:
    "Keeps the prompt and answer of each request that an engine has served"
    def __init__(self, e):
        self.said,self.add,self.step = {},e.add,e.step
        e.add,e.step = self._add,self._step
    def _add(self, r):
        self.add(r)
        self.said[r.id] = list(r.prompt)
    def _step(self):
        events = self.step()
        for v in events:
            if v.token is not None:
                self.said[v.id].append(v.token)
        return events

# What is asked

CHAT,TEXT = '/v1/chat/completions','/v1/completions'
RESPONSES,MESSAGES = '/v1/responses','/v1/messages'
HOWS = dict(temperature=0),dict(temperature=.9, seed=7)
WHOLE = dict(type='integer')
BOTH = dict(a=WHOLE, b=WHOLE)
NUMBERS = dict(type='object', properties=BOTH, required=['a','b'])
ADD = dict(name='add', parameters=NUMBERS)
SHAPE = dict(type='json_schema', json_schema=dict(name='sum', schema=NUMBERS))

def user(text='Hello'): return dict(messages=[dict(role='user', content=text)])

LIKELY = dict(logprobs=True, top_logprobs=3, return_token_ids=True)
CHATS = [
    LIKELY|dict(max_tokens=23),
    LIKELY|dict(n=3, max_tokens=11),
    dict(max_tokens=30, min_tokens=9, stop=list('aeiou é')),
    dict(max_tokens=30, presence_penalty=.7, frequency_penalty=.5, repetition_penalty=1.3),
    LIKELY|dict(max_tokens=40, response_format=SHAPE),
    dict(max_tokens=60, tools=[dict(type='function', function=ADD)], tool_choice='required'),
]
WIDE = dict(regex='(漢字🙂){2,5}ä')
NINTH = list(range(0, 256, 9))
PROMPTS = [
    *(dict(prompt='One', max_tokens=n, logprobs=2) for n in (1,2,3,5)),
    dict(prompt='Two', max_tokens=9, echo=True),
    dict(prompt=['One and','two'], n=2, max_tokens=13, return_token_ids=True),
    dict(prompt='Sea', max_tokens=40, stop_token_ids=NINTH, min_tokens=5),
    dict(prompt='x'*150, ignore_eos=True, logit_bias={'65': 3, '66': -100}),
    dict(prompt='€', structured_outputs=WIDE, stop=['🙂漢字🙂漢'], max_tokens=60),
    dict(prompt='€', structured_outputs=WIDE, max_tokens=60, logprobs=1),
]
FORM = dict(type='json_schema', name='x', schema=NUMBERS)
INPUTS = [
    dict(max_output_tokens=21, top_logprobs=2, include=['message.output_text.logprobs']),
    dict(max_output_tokens=50, text=dict(format=FORM)),
]
ASKED = [
    dict(max_tokens=21),
    dict(max_tokens=30, stop_sequences=list('aeiou é')),
    dict(max_tokens=60, tool_choice=dict(type='any'),
        tools=[dict(name='add', input_schema=NUMBERS)]),
]

def asks():
    "All questions: where to, and what; every other is drawn"
    some = [(CHAT, user()|a) for a in CHATS]
    some += [(TEXT, a) for a in PROMPTS]
    some += [(RESPONSES, dict(input='Hello')|a) for a in INPUTS]
    some += [(MESSAGES, user()|a) for a in ASKED]
    for i,(path,body) in enumerate(some):
        yield path,body|HOWS[i%2]

# What is answered

OWN = {'id','created','created_at','completed_at','call_id','item_id','sequence_number',
    'accepted_prediction_tokens','obfuscation','signature'}

def told(x):
    "What is not of this one answer alone, or of its drafts"
    if isinstance(x, list):
        return [told(v) for v in x]
    if not isinstance(x, dict):
        return x
    return {k: told(v) for k,v in x.items() if k not in OWN}

def events(r):
    "The events of a stream"
    lines = [l[6:] for l in r.text.split('\n') if l.startswith('data: ')]
    return [json.loads(l) for l in lines if l!='[DONE]']

def leaves(x, path=()):
    "All that is within `x`, and where"
    inner = x.items() if isinstance(x, dict) else ()
    for k,v in inner:
        if isinstance(v, dict):
            yield from leaves(v, (*path, k))
        else:
            yield (*path, k),v

def joined(stream):
    "A stream with what was said in pieces put together, by place"
    out = {}
    for e in stream:
        place = e.get('type'),e.get('index'),e.get('output_index')
        for p in (e, *e.pop('choices', ())):
            where = *place,p.get('index')
            for c in _calls(p):
                _put(out, (*where, 'call', c['index']), c)
            _put(out, where, p)
    return out

def _calls(p):
    "Pieces of calls in a chunk's choice, which are taken out"
    d = p.get('delta')
    return d.pop('tool_calls', ()) if isinstance(d, dict) else ()

def _put(out, at, piece):
    for k,v in leaves(piece):
        before = out.get((at,k))
        if before is not None and isinstance(v, str|list) and 'type' not in k[-1:]:
            same = k[-1] in ('object','model','name','role')
            out[at,k] = v if same else before+v
        else:
            out[at,k] = v if v is not None else before

def answers(c):
    "What client `c` is answered to everything, whole and in a stream; and its accepted drafts"
    out,accepted = [],0
    for path,body in asks():
        whole = c.post(path, json=body)
        assert whole.status_code==200, whole.text
        more = dict(stream_options=dict(include_usage=True)) if path in (CHAT,TEXT) else {}
        stream = c.post(path, json=dict(body, stream=True)|more)
        accepted += whole.text.count('accepted_prediction_tokens')
        said = joined(told(events(stream)))
        out.append((path, body, told(whole.json()), said))
    return out,accepted

@pytest.fixture(scope='module')
def plain():
    "Answers without drafts, and texts for the drafter"
    e = engine(model=MODEL, guides=GUIDES, seqs=4)
    seen = Recorded(e)
    with TestClient(create_app(models(e))) as c:
        got,accepted = answers(c)
    assert not accepted
    left_clean(e)
    return got,{tuple(ids) for ids in seen.said.values()}

def drafting(plain, k, late, lies):
    "An engine with drafts that are known"
    who = dict(answers=sorted(plain[1]), lies=lies)
    arbiter = Arbiter(k, adaptive=False)
    how = dict(model=MODEL, guides=GUIDES, who=who, arbiter=arbiter)
    return engine('oracle', k, late, **how)

KINDS = [(3,True,.2), (7,False,.05)]

@pytest.mark.parametrize('k,late,lies', KINDS)
def test_every_api(plain, k, late, lies):
    "Text, ids, log probabilities, ends and counts are what they are without drafts"
    e = drafting(plain, k, late, lies)
    with TestClient(create_app(models(e, speculative=f'oracle, {k} drafts'))) as c:
        got,accepted = answers(c)
        assert c.get('/v1/models').json()['data'][0]['speculative']==f'oracle, {k} drafts'
    for (path,body,whole,stream),mine in zip(plain[0], got):
        assert mine[2]==whole, (path, body)
        assert mine[3]==stream, (path, body)
    assert accepted>=12
    left_clean(e)

# Clients that leave

def numbers(url):
    "Gauges and totals of the only model"
    lines = httpx.get(url+'/metrics').text.split('\n')
    mine = [l.rsplit(' ', 1) for l in lines if 'model_name="small"' in l]
    return {k.split('{')[0].removeprefix('atlas:'): float(v) for k,v in mine}

def leave(url, body, n):
    "Ask, and close the connection after `n` lines of the answer"
    ask = dict(json=dict(body, stream=True), timeout=WAIT)
    with httpx.stream('POST', url, **ask) as r:
        lines = r.iter_lines()
        for _ in range(n):
            next(lines, None)

def test_clients_that_leave(plain):
    "After any number of lines; nothing of them is left, and who stays is answered as ever"
    e = drafting(plain, 3, True, .2)
    path,body,want = plain[0][0][:3]
    with running(create_app(models(e))) as url:
        for n in range(14):
            leave(url+path, body, n)
        whole = httpx.post(url+path, json=body, timeout=WAIT)
        assert told(whole.json())==want
        def idle():
            m = numbers(url)
            drafted = m['spec_decode_num_draft_tokens_total']
            right = drafted>=m['spec_decode_num_accepted_tokens_total']>0
            return right and m['num_requests_running']==m['kv_cache_usage_perc']==0
        until(idle)
    assert e.scheduler.finished['abort']>0
    left_clean(e)
