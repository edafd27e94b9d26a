"""An answer that the client has begun, or that was cut: the prompt ends within it, in all three
APIs, and what follows is content."""
import sys
from pathlib import Path
from typing import NamedTuple
import anthropic,openai,pytest
sys.path.insert(0, str(Path(__file__).parent/'helpers'))
from scripted import service

TALK = [dict(role='user', content='A person, as JSON'), dict(role='assistant', content='{"name": ')]

@pytest.fixture(scope='module')
def said():
    with service(lambda prompt: '"Ada"}') as s:
        yield s

def chat(s, messages=TALK, stream=False, **kw):
    return openai.OpenAI(base_url=s.url+'/v1', api_key='x').chat.completions.create(
        model='scripted', messages=messages, stream=stream, extra_body=kw)

def test_openai(said):
    r = chat(said, continue_final_message=True, add_generation_prompt=False)
    assert said.prompts[-1].endswith('assistant: {"name": ')
    assert r.choices[0].message.content=='"Ada"}'
    assert not getattr(r.choices[0].message, 'reasoning', None)

def test_without_it_a_new_turn_begins(said):
    chat(said)
    assert said.prompts[-1].endswith('assistant: ') and '{"name": ' in said.prompts[-1]

def test_anthropic(said):
    c = anthropic.Anthropic(base_url=said.url, api_key='x', max_retries=0)
    m = c.messages.create(model='scripted', max_tokens=50, messages=TALK)
    assert said.prompts[-1].endswith('assistant: {"name": ')
    assert [b.text for b in m.content]==['"Ada"}']
    n = c.messages.count_tokens(model='scripted', messages=TALK).input_tokens
    assert n>=len(said.prompts[-1])
    with c.messages.stream(model='scripted', max_tokens=50, messages=TALK) as st:
        assert st.get_final_text()=='"Ada"}'

def respond(said, **kw):
    c = openai.OpenAI(base_url=said.url+'/v1', api_key='x', max_retries=0)
    return c.responses.create(model='scripted', **kw)

CUT = [TALK[0], TALK[1]|dict(status='incomplete')]

def test_responses(said):
    r = respond(said, input=CUT)
    assert said.prompts[-1].endswith('assistant: {"name": ')
    assert r.output_text=='"Ada"}'
    assert r.output[-1].status=='completed'

def test_the_rest_of_a_response(said):
    r = respond(said, input=CUT, max_output_tokens=3)
    assert r.status==r.output[-1].status=='incomplete' and r.output_text=='"Ad'
    r = respond(said, previous_response_id=r.id, input=[])
    assert said.prompts[-1].endswith('assistant: {"name": "Ad')
    # that one was complete
    respond(said, previous_response_id=r.id, input='Thanks')
    assert said.prompts[-1].endswith('user: Thanksassistant: ')

@pytest.mark.parametrize(
    'kw,messages,says',
    [(dict(continue_final_message=True, add_generation_prompt=True), TALK, 'both true'),
     (dict(continue_final_message=True), TALK[:1], 'beginning of an answer'),
     (dict(continue_final_message=True),
      [*TALK[:1], dict(role='assistant', content='')],
      'beginning of an answer')])
def test_refused(said, kw, messages, says):
    with pytest.raises(openai.BadRequestError, match=says):
        chat(said, messages, **kw)

# -- stopped while it was still thinking: a message with a thought, and nothing said

TAGS = """{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}<think>
{{ m.reasoning_content|trim }}
</think>

{% endif %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"""
HARMONY = (
    "{% for m in messages %}<|start|>{{ m.role }}{% if m.role=='assistant' %}"
    "{% if m.thinking %}<|channel|>analysis<|message|>{{ m.thinking }}<|end|>"
    "<|start|>assistant{% endif %}<|channel|>final{% endif %}"
    "<|message|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}")
STOPPED = [
    dict(role='user', content='Hi'),
    dict(role='assistant', content='', reasoning_content='A greeting. I ')]
class Kind(NamedTuple):
    "A way to write thoughts"
    template:str
    parsers:tuple
    end:str # Of the prompt that goes on
    says:str # What the model says then
KINDS = dict(
    tags=Kind(
        TAGS,
        ('hermes','qwen3'),
        '<think>\nA greeting. I',
        ' greet back.\n</think>\n\nHello!'),
    harmony=Kind(
        HARMONY,
        ('openai','openai_gptoss'),
        '<|channel|>analysis<|message|>A greeting. I ',
        'greet back.<|end|><|start|>assistant<|channel|>final<|message|>Hello!'))

def parts_of(r, stream):
    "Messages of an answer, whole or streamed"
    if stream:
        return [c.choices[0].delta for c in r if c.choices]
    return [r.choices[0].message]

def thought_in(ms):
    "What messages have of a thought"
    return ''.join(m.model_extra.get('reasoning_content') or '' for m in ms)

@pytest.mark.parametrize('kind', KINDS.values(), ids=KINDS)
@pytest.mark.parametrize('stream', [False,True])
def test_within_a_thought(kind, stream):
    "What comes first is the rest of the thought, in one piece or streamed; tools do not matter"
    tools = [dict(type='function', function=dict(name='f'))]
    how = dict(continue_final_message=True, add_generation_prompt=False, stream=stream)
    with service(lambda prompt: kind.says, kind.parsers, kind.template) as s:
        ms = parts_of(chat(s, STOPPED, tools=tools, **how), stream)
        assert s.prompts[-1].endswith(kind.end)
        assert thought_in(ms).strip()=='greet back.'
        assert ''.join(m.content or '' for m in ms).strip()=='Hello!'

@pytest.mark.parametrize('content', ['Hello','A greeting. I'])
def test_behind_a_thought(content):
    """With something said, it is the content that goes on, and at once, even if the thought ends
    alike"""
    for kind in KINDS.values():
        with service(lambda prompt: ', Ada.', kind.parsers, kind.template) as s:
            r = chat(
                s,
                [STOPPED[0],STOPPED[1]|dict(content=content)],
                continue_final_message=True, stream=True)
            ds = [c.choices[0].delta for c in r if c.choices]
            assert s.prompts[-1].endswith(content) and 'A greeting' in s.prompts[-1]
            assert [d.content for d in ds if d.content]==list(', Ada.')
            assert not any(d.model_extra.get('reasoning_content') for d in ds)

def test_a_template_without_thoughts_begins_anew(said):
    chat(said, STOPPED, continue_final_message=True)
    assert said.prompts[-1].endswith('user: Hiassistant: ')
