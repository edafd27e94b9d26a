"""What litellm makes of a server, through three of its providers:
`python litellm_client.py URL MODEL` prints one JSON object.

It runs in a process of its own and imports nothing of Atlas."""
import json,os,sys

os.environ |= dict(
    LITELLM_LOCAL_MODEL_COST_MAP='True', LITELLM_TELEMETRY='False', LITELLM_LOG='ERROR')
import litellm  # noqa: E402

url,model = sys.argv[1:3]
HELLO = [dict(role='system', content='Be kind'), dict(role='user', content='Hello')]
CITY = dict(city=dict(type='string'))
PARAMETERS = dict(type='object', properties=CITY, required=['city'], additionalProperties=False)
WEATHER = dict(name='weather', description='The weather', parameters=PARAMETERS)
TOOL = dict(type='function', function=WEATHER)
PLACE = dict(name='place', strict=True, schema=PARAMETERS)
SCHEMA = dict(type='json_schema', json_schema=PLACE)

def call(provider, to=model, **kw):
    base = url if provider=='anthropic' else f'{url}/v1'
    at = dict(api_base=base, api_key='none', num_retries=0, timeout=300)
    asked = dict(messages=HELLO, max_tokens=400)
    return litellm.completion(f'{provider}/{to}', **asked|at|kw)

def told(r):
    "What an answer says, by our names"
    m,u = r.choices[0].message,r.usage
    calls = [c.function for c in m.tool_calls or []]
    return dict(
        content=m.content, reasoning=getattr(m, 'reasoning_content', None),
        finish=r.choices[0].finish_reason,
        calls=[(f.name,json.loads(f.arguments)) for f in calls],
        prompt=u.prompt_tokens, completion=u.completion_tokens,
        thought=u.completion_tokens_details.reasoning_tokens,
        cached=u.prompt_tokens_details.cached_tokens)

def stream(provider, **kw):
    counts = dict(include_usage=True)
    chunks = list(call(provider, stream=True, stream_options=counts, **kw))
    return litellm.stream_chunk_builder(chunks, messages=HELLO)

def loop(provider):
    "A tool is called, and its result brought back"
    m = call(provider, tools=[TOOL]).choices[0].message
    back = [dict(role='tool', tool_call_id=c.id, content='rain') for c in m.tool_calls]
    talk = [*HELLO, m.model_dump(exclude_none=True), *back]
    return told(call(provider, messages=talk, tools=[TOOL]))

def error(provider, **kw):
    try:
        call(provider, **kw)
    except Exception as e:
        return type(e).__name__

def all_of(p):
    effort = dict(reasoning_effort='low', drop_params=True, max_tokens=2048)
    return dict(
        whole=told(call(p)), stream=told(stream(p)),
        tools=told(call(p, tools=[TOOL])), tool_stream=told(stream(p, tools=[TOOL])),
        loop=loop(p), schema=told(call(p, response_format=SCHEMA)),
        stop=told(call(p, stop=['Oslo'])), cut=told(call(p, max_tokens=20)),
        effort=told(call(p, **effort)), wrong=error(p, temperature=-5),
        nobody=error(p, to='nobody'))

print(json.dumps({p:all_of(p) for p in ('hosted_vllm','openai','anthropic')}))
