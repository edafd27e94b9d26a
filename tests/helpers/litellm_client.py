"""What litellm makes of a server, through three of its providers: `python litellm_client.py URL MODEL` prints one JSON object.

It runs in a process of its own and imports nothing of Atlas."""
import json,os,sys
os.environ.update(LITELLM_LOCAL_MODEL_COST_MAP='True', LITELLM_TELEMETRY='False', LITELLM_LOG='ERROR')
import litellm  # noqa: E402

url,model = sys.argv[1:3]
HELLO = [dict(role='system', content='Be kind'), dict(role='user', content='Hello')]
PARAMETERS = dict(type='object', properties=dict(city=dict(type='string')), required=['city'], additionalProperties=False)
TOOL = dict(type='function', function=dict(name='weather', description='The weather', parameters=PARAMETERS))
SCHEMA = dict(type='json_schema', json_schema=dict(name='place', strict=True, schema=PARAMETERS))

def call(provider, to=model, **kw):
    base = url if provider=='anthropic' else f'{url}/v1'
    at = dict(api_base=base, api_key='none', num_retries=0, timeout=300)
    return litellm.completion(f'{provider}/{to}', **dict(messages=HELLO, max_tokens=400)|at|kw)

def told(r):
    m,u = r.choices[0].message,r.usage
    return dict(content=m.content, reasoning=getattr(m, 'reasoning_content', None), finish=r.choices[0].finish_reason,
        calls=[(c.function.name,json.loads(c.function.arguments)) for c in m.tool_calls or []], prompt=u.prompt_tokens, completion=u.completion_tokens,
        thought=u.completion_tokens_details.reasoning_tokens, cached=u.prompt_tokens_details.cached_tokens)

def stream(provider, **kw): return litellm.stream_chunk_builder(list(call(provider, stream=True, stream_options=dict(include_usage=True), **kw)), messages=HELLO)

def loop(provider):
    m = call(provider, tools=[TOOL]).choices[0].message
    back = [dict(role='tool', tool_call_id=c.id, content='rain') for c in m.tool_calls]
    return told(call(provider, messages=[*HELLO, m.model_dump(exclude_none=True), *back], tools=[TOOL]))

def error(provider, **kw):
    try: call(provider, **kw)
    except Exception as e: return type(e).__name__

def all_of(p):
    return dict(whole=told(call(p)), stream=told(stream(p)), tools=told(call(p, tools=[TOOL])), tool_stream=told(stream(p, tools=[TOOL])), loop=loop(p),
        schema=told(call(p, response_format=SCHEMA)), stop=told(call(p, stop=['Oslo'])), cut=told(call(p, max_tokens=20)),
        effort=told(call(p, reasoning_effort='low', drop_params=True, max_tokens=2048)), wrong=error(p, temperature=-5), nobody=error(p, to='nobody'))

print(json.dumps({p:all_of(p) for p in ('hosted_vllm','openai','anthropic')}))
