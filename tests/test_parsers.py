"Reasoning, calls and content: any way to cut a text gives the same answer, and no text takes long"
import json,time
from dataclasses import dataclass
from types import SimpleNamespace
import pytest
from hypothesis import given,settings,strategies as st
from atlas.ground.core import RequestError
from atlas.text.chat import ChatTemplate
from atlas.text.parsers import REASONING_PARSERS,ReasoningStream,Splitter
from atlas.text.parsers import begins,default_parsers,kept,parse_reasoning,parse_tools
from helpers.waiting import linear

many = settings(max_examples=60, deadline=None)
S,T = '<|start|>','<|start|>assistant'
STARTS = ['qwen3','deepseek_r1','glm45','minimax_m2']  # a text begins in the middle of a thought
MARKS = [
    '<think>', '</think>', '[THINK]', '[/THINK]', '<|channel>', '<channel|>', '<|start|>',
    '<|message|>', '<|channel|>', '<|end|>', '<|call|>', '<|return|>', '<|constrain|>',
    '<tool_call>', '</tool_call>', '<|tool_call>', '<minimax:tool_call>', '[TOOL_CALLS]']
WORDS = [
    'thought\n', 'thought', 'analysis', 'commentary', 'final', 'assistant', ' to=functions.f',
    ' json', '{"a": 1}', '{"name": "f", "arguments": {"x": "é"}}',
    '<function=f>\n<parameter=a>\n1\n</parameter>\n</function>',
    '<tool_call>\n{"name": "f", "arguments": {"x": "1"}}\n</tool_call>',
    '<tool_call>\n<function=f>\n<parameter=x>\n2\n</parameter>\n</function>\n</tool_call>',
    '<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>3</arg_value>\n</tool_call>',
    '<minimax:tool_call>\n<invoke name="f">\n<parameter '
    'name="x">4</parameter>\n</invoke>\n</minimax:tool_call>',
    '[TOOL_CALLS]f{"x": "5"}', '<|tool_call>call:f{x:<|"|>6<|"|>}<tool_call|>', ' ', '\n', 'a',
    'Yes.', '<', '</', '[', '<|', '|>', '時']
texts = st.lists(
    st.one_of(
        st.sampled_from(MARKS), st.sampled_from(WORDS), st.text(max_size=3)),
    max_size=14).map(''.join)

def cut(text, at):
    "The pieces of `text` between the places `at`"
    at = sorted({i%(len(text)+1) for i in at})
    return [text[a:b] for a,b in zip([0,*at], [*at,len(text)])]

@dataclass
class Read:
    "What came out of a text"
    reasoning:str|None # Of all deltas, and so is the content
    content:str|None
    calls:list # (name, arguments, id)
    result:object # As the splitter gives it

def run(s, pieces):
    "What came out piece by piece, and the result"
    out = [s.feed(p) for p in pieces]+[s.finish()]
    calls = {}
    for c in (c for p in out for c in getattr(p, 'calls', ())):
        if c.index not in calls:
            assert c.name
            assert c.id
            assert c.index==len(calls)
            calls[c.index] = [c.name,'',c.id]
        else:
            assert (c.name,c.id)==(None,None)
        calls[c.index][1] += c.arguments
    reasoning = ''.join(p.reasoning for p in out) or None
    content = ''.join(p.content for p in out) or None
    return Read(reasoning, content, [tuple(c) for c in calls.values()], s.result())

# ---- reasoning

CASES = [ # parsers, text, reasoning, content
    (STARTS, 'Just thinking aloud', 'Just thinking aloud', None),
    (STARTS, 'Hm, 7.</think>It is 7.', 'Hm, 7.', 'It is 7.'),
    (STARTS, '<think>Hm, 7.</think>It is 7.', 'Hm, 7.', 'It is 7.'),
    (STARTS, '<think>Hm', 'Hm', None),
    (STARTS, 'Hm</think>', 'Hm', None),
    (STARTS, '</think>It is 7.', None, 'It is 7.'),
    (STARTS, '', None, None),
    (STARTS, '\n<think>one\ntwo</think>\nthree\nfour', 'one\ntwo', '\nthree\nfour'),
    (['mistral','gemma4'], 'It is 7.', None, 'It is 7.'),
    (['mistral','gemma4'], '', None, None),
    (['mistral'], '[THINK]Hm[/THINK]It is 7.', 'Hm', 'It is 7.'),
    (['mistral'], '[THINK]Hm', 'Hm', None),
    (['mistral'], '[/THINK]It is 7.', None, 'It is 7.'),
    (['mistral'], 'So:\n[THINK]Hm[/THINK]\n7', 'Hm', 'So:\n\n7'),
    (['mistral'], '<think>Hm</think>7', 'Hm', '7'),
    (['gemma4'], '<|channel>thought\nHm\nhm<channel|>7', 'Hm\nhm', '7'),
    (['gemma4'], '<|channel>Hm<channel|>', 'Hm', None),
    (['gemma4'], '<|channel>thousands<channel|>7', 'thousands', '7'),
    (['gemma4'], '<|channel>thought\n<channel|>', None, None),
    (['gemma4'], 'Hm<channel|>7', 'Hm', '7'),
    (['gemma4'], '<|tool_call>', None, '<|tool_call>'),
    (
        ['qwen3'], 'I look.\n\n<tool_call>\n<function=ls>\n</function>\n</tool_call>',
        'I look.\n\n', '<tool_call>\n<function=ls>\n</function>\n</tool_call>'),
    (['qwen3','minimax_m2','glm45'], 'a</think>b</think>c', 'a', 'bc'),
    (
        ['openai_gptoss'],
        '<|channel|>analysis<|message|>Hm<|end|>'+T+'<|channel|>final<|message|>7', 'Hm', '7'),
    (
        ['openai_gptoss'],
        '<|channel|>commentary<|message|>I look.<|end|>'+T
        +' to=functions.ls<|channel|>commentary<|message|>{}<|call|>',
        None,
        'I look.')]

@pytest.mark.parametrize(
    'parser,text,reasoning,content',
    [(p,*c[1:]) for c in CASES for p in c[0]])
def test_reasoning_and_content(parser, text, reasoning, content):
    assert parse_reasoning(parser, text)==(reasoning,content)

def test_vllm_names():
    assert (
        set(REASONING_PARSERS)
        =={'qwen3','deepseek_r1','openai_gptoss','gemma4','minimax_m2','mistral','glm45'})

@pytest.mark.parametrize('parser', STARTS)
@given(text=texts)
@many
def test_without_thinking_all_is_content(parser, text):
    assert parse_reasoning(parser, text, thinking=False)==(None,text or None)

@pytest.mark.parametrize('parser', REASONING_PARSERS)
@given(
    text=texts, at=st.lists(st.integers(0,200), max_size=8),
    thinking=st.booleans(), opened=st.booleans())
@many
def test_cuts_do_not_show_in_reasoning(parser, text, at, thinking, opened):
    def make(): return ReasoningStream(parser, thinking, opened)
    want = run(make(), [text])
    assert run(make(), cut(text, at))==want==run(make(), list(text))
    assert (want.reasoning,want.content)==want.result

@pytest.mark.parametrize('parser', sorted(set(REASONING_PARSERS)-{'openai_gptoss'}))
@given(text=texts)
@many
def test_only_marks_labels_and_blanks_are_lost(parser, text):
    "All other characters are in the reasoning or the content, in the order of the text"
    style,r = REASONING_PARSERS[parser],ReasoningStream(parser)
    out = ''.join(
        d.reasoning+d.content
        for d in [*map(r.feed, text), r.finish()])
    for m in (*style.marks, *(['thought'] if style.label else [])):
        text = text.replace(m, '')
        out = out.replace(m, '')
    assert ''.join(out.split())==''.join(text.split()) or style.early

# ---- both together

PAIRS = [
    ('qwen3','hermes'), ('qwen3','qwen3_coder'), ('deepseek_r1','deepseek_v31'), ('glm45','glm45'),
    ('minimax_m2','minimax_m2'), ('mistral','mistral'), ('gemma4','gemma4'), (None,'llama3_json'),
    (None,'hermes'), (None,'pythonic'), ('deepseek_r1','deepseek_v32'), ('qwen3',None),
    (None,None), ('openai_gptoss','openai'), ('openai_gptoss',None), (None,'openai')]
TOOLS = [
    dict(
        type='function',
        function=dict(
            name='f',
            parameters=dict(
                type='object',
                properties=dict(
                    a=dict(type='integer'), x=dict(type='string')))))]

@pytest.mark.parametrize('reasoning,tools', PAIRS)
@given(
    text=texts, at=st.lists(st.integers(0,200), max_size=8),
    thinking=st.booleans())
@many
def test_cuts_do_not_show_in_a_split(reasoning, tools, text, at, thinking):
    def make(): return Splitter(reasoning, tools, TOOLS, thinking)
    whole = run(make(), [text])
    a = whole.result
    for pieces in (cut(text, at), list(text)):
        s = make()
        read = run(s, pieces)
        assert (read.reasoning,read.result)==(whole.reasoning,a)
        if not (a.calls and tools=='llama3_json'):
            assert (read.content or '').strip()==(a.content or '').strip()
        assert [c[:2] for c in read.calls]==[(t.name,t.arguments) for t in a.calls]
        assert s.calling==bool(a.calls)

@pytest.mark.parametrize('reasoning,tools', [p for p in PAIRS if p[1] in ('openai','hermes')])
@given(text=texts)
@many
def test_arguments_are_words_of_the_model(reasoning, tools, text):
    s = Splitter(reasoning, tools, TOOLS)
    s.feed(text)
    s.finish()
    for t in s.result().calls:
        assert t.arguments in text and t.name in text or t.arguments=='{}'

def test_a_thought_then_words_then_a_call():
    s = Splitter('openai_gptoss', 'openai')
    text = (
        '<|channel|>analysis<|message|>Weather.<|end|>'+T
        +'<|channel|>commentary<|message|>A moment.<|end|>'+T
        +'<|channel|>commentary to=functions.sky <|constrain|>json'
        +'<|message|>{"at": "Oslo"}<|call|>')
    read = run(s, list(text))
    assert (read.reasoning,read.content)==('Weather.','A moment.')
    (name,arguments,id), = read.calls
    assert (name,arguments)==('sky','{"at": "Oslo"}')
    assert s.calling
    assert read.result.calls[0].id==id
    assert id.startswith('call_')

@pytest.mark.parametrize('gap', ['',' ','\n\n','\n\nSo:\n'])
def test_blanks_before_a_call_are_dropped(gap):
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    read = run(Splitter('qwen3', 'hermes'), list(f'Hm</think>{gap}{call}'))
    assert (read.content,read.result.content)==((gap,gap) if gap.strip() else (None,None))
    assert [x[:2] for x in read.calls]==[('f','{}')]
    assert run(Splitter('qwen3', 'hermes'), list(f'Hm</think>{gap}Yes')).content==gap+'Yes'

@pytest.mark.parametrize(
    'reasoning,tools,call,args',
    [
        (
            'qwen3', 'qwen3_coder',
            '<tool_call><function=f><parameter=x></think></parameter></function></tool_call>',
            '{"x": "</think>"}'),
        (
            'qwen3', 'hermes',
            '<tool_call>{"name": "f", "arguments": {"x": "</think>"}}</tool_call>',
            '{"x": "</think>"}'),
        (
            'glm45', 'glm47',
            '<tool_call>f<arg_key>x</arg_key><arg_value></think></arg_value></tool_call>',
            '{"x": "</think>"}'),
        (
            'minimax_m2', 'minimax_m2',
            '<minimax:tool_call><invoke name="f"><parameter '
            'name="x"></think></parameter></invoke></minimax:tool_call>',
            '{"x": "</think>"}'),
        (
            'gemma4', 'gemma4', '<|tool_call>call:f{x:<|"|><channel|><|"|>}<tool_call|>',
            '{"x": "<channel|>"}')])
@pytest.mark.parametrize(
    'tail,said',
    [
        ('',None), ('{}',None), ('\n{}\n\n',None), ('{}Done.','Done.'),
        ('\n{}\nDone.{} So.','Done. So.')])
def test_a_thought_that_is_closed_behind_its_call(reasoning, tools, call, args, tail, said):
    style = REASONING_PARSERS[reasoning]
    text = style.open+'Hm.'+call+tail.replace('{}', style.close)
    for pieces in ([text], list(text)):
        read = run(Splitter(reasoning, tools, TOOLS), pieces)
        a = read.result
        assert read.reasoning==a.reasoning=='Hm.'
        assert [x[:2] for x in read.calls]==[(t.name,t.arguments) for t in a.calls]==[('f',args)]
        if tools!='hermes':
            # which drops what is said behind a call
            assert ((read.content or '').strip() or None,a.content)==(said,said)
        else:
            assert read.content is a.content is None

def test_thinking_tells_where_a_token_belongs():
    s,seen = Splitter('qwen3', None),[]
    for p in ['<think>','One',' two','</think>','Three']:
        s.feed(p)
        seen.append(s.thinking)
    assert seen==[True,True,True,False,False]
    s,seen = Splitter('openai_gptoss', 'openai'),[]
    for p in [
        '<|channel|>', 'analysis', '<|message|>', 'One', '<|end|>', S, 'assistant', '<|channel|>',
        'final', '<|message|>', 'Two']:
        s.feed(p)
        seen.append(s.thinking)
    assert [i for i,t in enumerate(seen) if t]==[2,3]

@pytest.mark.parametrize(
    'parser,prompt,state',
    [
        ('qwen3','<|im_start|>assistant\n<think>\n',True),
        ('qwen3','<|im_start|>assistant\n<think>\n\n</think>\n\n',False),
        ('qwen3','<|im_start|>assistant\n',None), ('gemma4','<|channel>thought\n',True),
        ('gemma4','<|channel>thought\n<channel|>',False), ('minimax_m2',']~b]ai\n<think>\n',True),
        (None,'<think>',None)])
def test_prompt_says_how_an_answer_begins(parser, prompt, state):
    assert begins(parser, prompt)==begins(parser, 'x'*500+prompt)==state

# ---- harmony

@pytest.mark.parametrize(
    'head',
    [
        ' to=functions.f<|channel|>commentary', '<|channel|>commentary to=functions.f',
        '<|channel|>analysis to=functions.f', ' to=f<|channel|>commentary'])
@pytest.mark.parametrize('kind', ['',' json',' <|constrain|>json','<|constrain|>json'])
@pytest.mark.parametrize('end', ['','<|call|>','<|end|>'])
def test_a_call_in_every_spelling(head, kind, end):
    r = parse_tools('openai', head+kind+'<|message|>{"a": 1}'+end)
    assert r.content is None
    assert [(t.name,t.arguments) for t in r.calls]==[('f','{"a": 1}')]

def test_a_channel_that_is_written_twice():
    r = parse_tools(
        'openai',
        '<|channel|>commentary to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>')
    assert [(t.name,t.arguments) for t in r.calls]==[('f','{"a": 1}')]

@pytest.mark.parametrize(
    'head,reasoning,content',
    [
        (' analysis','Hm',None), (' final',None,'Hm'),
        ('commentary to=assistant<|channel|>analysis','Hm',None),
        ('commentary to=assistant<|channel|>final',None,'Hm')])
def test_channels_of_another_look(head, reasoning, content):
    assert parse_reasoning(
        'openai_gptoss', f'<|channel|>{head}<|message|>Hm<|end|>')==(reasoning,content)

@pytest.mark.parametrize(
    'name,kept_name',
    [
        ('functions.f','f'), ('f','f'), ('math.sum','math.sum'),
        ('functions.math.sum','math.sum')])
def test_names(name, kept_name):
    r = parse_tools('openai', f' to={name}<|channel|>commentary<|message|>1')
    assert [t.name for t in r.calls]==[kept_name]

@pytest.mark.parametrize('name', ['assistant','browser','browser.open','python','container.exec'])
def test_hosted_tools_are_no_calls(name):
    r = parse_tools(
        'openai',
        f'<|channel|>commentary to={name}<|message|>1<|call|>{T}<|channel|>final<|message|>Yes')
    assert (r.content,r.calls)==('Yes',[])

@given(text=texts)
@many
def test_analysis_is_never_content(text):
    secret = 'S3CRET'
    for t in (
        f'<|channel|>analysis<|message|>{secret}<|end|>{text}', f'<|channel|>analysis {secret}'):
        assert secret not in (parse_tools('openai', t).content or '')

# ---- names, defaults, cost

def test_unknown_names_are_refused():
    with pytest.raises(RequestError, match='qwen9'):
        parse_reasoning('qwen9', '')
    with pytest.raises(RequestError):
        parse_tools('qwen9', '')

# as Granite 4 writes calls, and the results that follow them
GRANITE4 = """{%- for m in messages %}
{%- set role = 'user' if m.role=='tool' else m.role %}<|start_of_role|>{{ role }}<|end_of_role|>
{%- if m.role=='tool' %}<tool_response>
{{ m.content }}
</tool_response>{% else %}{{ m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}{% set c = c.function %}<tool_call>
{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}
</tool_call>{% endfor %}<|end_of_text|>
{% endfor %}
{%- if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"""

def test_what_granite_writes_is_read():
    "A call rendered by a template like that of Granite 4, read by the parser that is chosen for it"
    args = dict(a=1, b='</x>')
    call = dict(type='function', function=dict(name='add', arguments=args))
    asked = dict(role='assistant', content='', tool_calls=[call])
    said = ChatTemplate(GRANITE4).render([asked])
    tools,thinks = default_parsers(SimpleNamespace(family='granite'), GRANITE4)
    text = said.partition('<|end_of_role|>')[2].partition('<|end_of_text|>')[0]
    r = parse_tools(tools, text)
    assert (thinks,r.content)==(None,None)
    (call,) = r.calls
    assert call.name=='add'
    assert json.loads(call.arguments)==args

@pytest.mark.parametrize(
    'family,template,want',
    [
        ('gptoss','',('openai','openai_gptoss')), ('gemma','',('gemma4','gemma4')),
        ('minimax','',('minimax_m2','minimax_m2')),
        ('qwen','<tool_call>{"name"} <think>',('hermes','qwen3')),
        ('qwen','<tool_call>\n<function=x> </think>',('qwen3_coder','qwen3')),
        ('qwen','<tool_call>\n<function=x>',('qwen3_coder',None)),
        ('granite',GRANITE4,('hermes',None)), ('granite','',('hermes',None)),
        ('nemotron','<tool_call><function=x><think>',('qwen3_coder','qwen3')),
        ('llama','<|start_header_id|>',('llama3_json',None)),
        ('llama','[INST] [TOOL_CALLS]',('mistral',None)),
        ('llama','[TOOL_CALLS] [THINK]',('mistral','mistral')),
        (None,'',(None,None))])
def test_defaults(family, template, want):
    assert default_parsers(SimpleNamespace(family=family), template)==want

def test_marks_of_both_are_kept():
    assert set(kept('qwen3', None))=={'<think>','</think>','<tool_call>'}
    assert kept(None, None)==()
    assert len(kept('openai_gptoss', 'openai'))==7
    assert '<|channel>' in kept('gemma4', None)

@pytest.mark.parametrize(
    'reasoning,tools',
    [p for p in PAIRS if p[1] in (None,'openai')]
    +[(r,None) for r in REASONING_PARSERS if r!='qwen3'])
def test_no_text_takes_long(reasoning, tools):
    "The work grows with the text, at once and letter by letter"
    bits = [
        *kept(reasoning, tools), '<', '<|', ' ', '\n', '</think><think>',
        S+'assistant<|channel|>commentary to=functions.f<|message|>', 'thought\n']
    def seconds(bit, n, size):
        s = Splitter(reasoning, tools)
        text = bit*(n//len(bit))
        t = time.process_time()
        for i in range(0, len(text), size):
            s.feed(text[i:i+size])
        s.finish()
        s.result()
        return time.process_time()-t
    def at_once(n): return seconds(b, n, n)
    def by_letters(n): return seconds(b, n, 1)
    for b in bits:
        assert linear(at_once, 10**6, loose=2), b
        assert linear(by_letters, 3*10**4, loose=2), b
