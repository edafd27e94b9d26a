"Tool-call formats: what each makes of whole, broken and hostile texts, however they are cut"
import ast,json,random,time,pytest
from pathlib import Path
from hypothesis import HealthCheck,given,settings,strategies as st
import atlas
from atlas.ground.core import RequestError
from atlas.text.parsers import TOOL_PARSERS,ToolStream,parse_tools
from helpers.waiting import linear

many = settings(
    deadline=None, max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))

FORMATS = (
    'hermes qwen3_coder qwen3_xml mistral llama3_json pythonic gemma4 minimax_m2 deepseek_v3 '
    'deepseek_v31 deepseek_v32 glm45 glm47').split()
Q,D = '<|"|>','｜DSML｜'
O = '<｜tool▁calls▁begin｜>'
C = '<｜tool▁calls▁end｜>'
o = '<｜tool▁call▁begin｜>'
c = '<｜tool▁call▁end｜>'
sep = '<｜tool▁sep｜>'

def tool(name, **ps):
    parameters = {'type': 'object', 'properties': ps}
    return {'type': 'function', 'function': {'name': name, 'parameters': parameters}}
def null(t): return {'anyOf': [{'type': t}, {'type': 'null'}]}
TOOLS = [
    tool(
        'f',
        s={'type': 'string'},
        i={'type': 'integer'},
        n={'type': 'number'},
        b={'type': 'boolean'},
        o={'type': 'object'},
        a={'type': 'array'},
        ni=null('integer'),
        ns=null('string'),
        ti={'type': ['integer','null']},
        si={
            'anyOf': [{'type': 'string'}, {'type': 'integer'}, {'type': 'null'}]},
        e={'enum': ['x', 'y']}),
    tool('g'),
    tool('get_weather', city={'type': 'string'})]

NESTED = [
    tool(
        'h',
        o={
            'anyOf': [
                {
                    'type': 'object',
                    'properties': {'k': {'type': 'integer'}, 's': {'type': 'string'}}},
                {'type': 'null'}]},
        l={'type': ['array','null'], 'items': null('integer')})['function']]

def plain(r): return r.content,[(t.name,t.arguments) for t in r.calls]
def read(r):
    "Names and arguments of all calls"
    return [(t.name,json.loads(t.arguments)) for t in r.calls]
def put_together(deltas):
    "Ids, names and arguments of the calls in deltas, each of which has id and name once"
    calls = {}
    for x in (x for d in deltas for x in d.calls):
        if x.index not in calls:
            assert x.id
            assert x.name is not None
            calls[x.index] = [x.id, x.name, '']
        else:
            assert (x.id,x.name)==(None,None)
        calls[x.index][2] += x.arguments
    assert list(calls)==list(range(len(calls)))
    return list(calls.values())

def cut(parser, text, sizes, tools=None):
    "Content and calls of the pieces, and the result"
    s = ToolStream(parser, tools)
    k,ds = 0,[]
    while k<len(text):
        n = next(sizes)
        ds.append(s.feed(text[k:k+n]))
        k += n
    ds.append(s.finish())
    calls = put_together(ds)
    said = ''.join(d.content for d in ds)
    result = s.result()
    assert s.calling==bool(calls)
    assert calls==[[t.id,t.name,t.arguments] for t in result.calls]
    if parser=='llama3_json' and calls:
        assert result.content is None # it alone shows words that a call then hides
    else:
        strips = calls and TOOL_PARSERS[parser].blank=='strip'
        assert (said.lstrip() if strips else said)==(result.content or '')
    return said,calls,result
def forever(n):
    while True:
        yield n
def ragged(seed):
    rng = random.Random(seed)
    while True:
        yield rng.choice((1, 1, 2, 3, 5, 8, 13, 40))

# -- case by case ----------------------------------------------------------------------------------

def H(args, name='f'):
    return '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>' % (name, args)
def X(name, ps='', wrap=True): # ps: [(key, value)] or the text itself
    body = (
        ps if isinstance(ps, str)
        else ''.join(f'<parameter={k}>\n{v}\n</parameter>\n' for k,v in ps))
    t = f'<function={name}>\n{body}</function>'
    return f'<tool_call>\n{t}\n</tool_call>' if wrap else t
def I(name, *ps):
    params = ''.join(f'<parameter name="{k}">{v}</parameter>' for k,v in ps)
    return f'<invoke name="{name}">{params}</invoke>'
def MM(*xs): return '<minimax:tool_call>'+''.join(xs)+'</minimax:tool_call>'
def V(name, *ps):
    def param(k, v, s): return f'<{D}parameter name="{k}" string="{s}">{v}</{D}parameter>\n'
    return f'<{D}invoke name="{name}">\n'+''.join(param(*p) for p in ps)+f'</{D}invoke>\n'
def VV(*xs): return f'<{D}function_calls>\n'+''.join(xs)+f'</{D}function_calls>'
def G(name, ps=(), nl='\n'):
    def arg(k, v): return f'<arg_key>{k}</arg_key>{nl}<arg_value>{v}</arg_value>{nl}'
    return f'<tool_call>{name}{nl}'+''.join(arg(k, v) for k,v in ps)+'</tool_call>'
def M4(name, args): return f'<|tool_call>call:{name}{{{args}}}<tool_call|>'
def V3(name, args): return f'{o}function{sep}{name}\n```json\n{args}\n```{c}'
def V31(name, args): return f'{o}{name}{sep}{args}{c}'

SAME = object() # the text itself is the content
CASES = [ # parser, text, content, calls[, tools]
    ('hermes', 'This is not a tool call.', SAME, []),
    ('hermes', H('{"trigger": true}'), None, [('f','{"trigger": true}')]),
    (
        'hermes',
        '<tool_call>{"name": "f", "arguments": {"location":"San Francisco, California", '
        '"unit": "celsius"}}</tool_call>',
        None,
        [('f','{"location":"San Francisco, California", "unit": "celsius"}')]),
    (
        'hermes', '<tool_call>\n{"name": "f", "arguments": {"trigger": true}}', None,
        [('f','{"trigger": true}')]),
    ('hermes', '<tool_call>\n{"name": "f", "arguments": {"trigger": true}', SAME, []),
    (
        'hermes', 'Sure.'+H('{"q": "cats"}')+H('{"q": "dogs"}', 'g'), 'Sure.',
        [('f','{"q": "cats"}'), ('g','{"q": "dogs"}')]),
    ('hermes', 'Sure. '+H('{}')+'\nand that was it', 'Sure. ', [('f','{}')]),
    ('hermes', H(r'"{\"param\": \"max\"}"'), None, [('f','{"param": "max"}')]),
    ('hermes', H('"hello"'), None, [('f','"hello"')]),
    ('hermes', H('"[oops"'), None, [('f','"[oops"')]),
    ('hermes', H(r'"{\"a\": 1} tail"'), None, [('f',r'"{\"a\": 1} tail"')]),
    (
        'hermes', H('{"a": "\\u00e9 \\" </tool_call> <tool_call>"}'), None,
        [('f','{"a": "\\u00e9 \\" </tool_call> <tool_call>"}')]),
    (
        'hermes', '<tool_call>{"arguments": {"name": "x"}, "name": "f"}</tool_call>', None,
        [('f','{"name": "x"}')]),
    (
        'hermes', '<tool_call>{"id": 3, "name": "f", "arguments": [1, 2]}</tool_call>', None,
        [('f','[1, 2]')]),
    ('hermes', '<tool_call>{"name": "f"}</tool_call>', SAME, []),
    ('hermes', '<tool_call>{"arguments": {}}</tool_call>', SAME, []),
    ('hermes', '<tool_call>{"name": 3, "arguments": {}}</tool_call>', SAME, []),
    ('hermes', '<tool_call>{"name": "f", "arguments": {}}}</tool_call>', SAME, []),
    ('hermes', '<tool_call>not JSON</tool_call>', SAME, []),
    ('hermes', 'a <tool_call', SAME, []),
    ('hermes', H('{"a": Infinity}'), SAME, []),
    ('hermes', H('{"a": tru}')+H('{"b": 1}'), None, [('f','{"b": 1}')]),
    (
        'hermes',
        '<tool_call>{"name": "f", "arguments": {"x": 1}}<tool_call>{"name": "g", '
        '"arguments": {}}</tool_call>',
        None,
        [('f','{"x": 1}'), ('g','{}')]),

    ('llama3_json', 'This is just some text without any tool calls', SAME, []),
    (
        'llama3_json',
        'Here is the result: {"name": "f", "parameters": {}} Would you like to know more?',
        None,
        [('f','{}')]),
    (
        'llama3_json', '{"name": "f", "parameters": {"query": "test query", "limit": 10}}', None,
        [('f','{"query": "test query", "limit": 10}')]),
    ('llama3_json', '{"name": "f", "parameters": {invalid json}', SAME, []),
    ('llama3_json', '{"name": "f", "arguments": {"q": "t"}}', None, [('f','{"q": "t"}')]),
    *[
        (
            'llama3_json',
            '{"name": "f", "parameters": {"q": 1}}'+s+'{"name": "g", "parameters": {}}'+s
            +'{"name": "f", "parameters": {"q": 2}}',
            None,
            [('f','{"q": 1}'), ('g','{}'), ('f','{"q": 2}')])
        for s in ('; ', ';', ' ; ', ';\n', '\n', '')],
    (
        'llama3_json', '{"name": "f", "parameters": {"a": {"b": {"c": {"d": {"value": "deep"}}}}}}',
        None, [('f','{"a": {"b": {"c": {"d": {"value": "deep"}}}}}')]),
    (
        'llama3_json',
        '{"name": "f", "parameters": {"q": "test {value} [complex]","n": {"inner": "more '
        '{brackets}"}}}',
        None,
        [('f','{"q": "test {value} [complex]","n": {"inner": "more {brackets}"}}')]),
    (
        'llama3_json', r'{"name": "f", "parameters": {"text": "He said \"Hello {world}\""}}', None,
        [('f',r'{"text": "He said \"Hello {world}\""}')]),
    ('llama3_json', '{"parameters": {}}', SAME, []),
    ('llama3_json', '{"name": "f"}', SAME, []),
    (
        'llama3_json', '{"name": "f", "parameters": {"q": 1}} I used {f} for this.', None,
        [('f','{"q": 1}')]),
    (
        'llama3_json', '{"name": "f", "parameters": {"q": 1}} The arguments were {"q": 1}', None,
        [('f','{"q": 1}')]),
    (
        'llama3_json', '{"parameters": {"name": "inner"}, "name": "outer"}', None,
        [('outer','{"name": "inner"}')]),
    ('llama3_json', '<|python_tag|>{"name": "f", "parameters": {}}', None, [('f','{}')]),
    ('llama3_json', '{hello world[A(A=\t)A(A=,\t\t)A(A=,\t', SAME, []),
    ('llama3_json', 'Sure: function f() { return 1; } and that is it', SAME, []),
    ('llama3_json', '{"n<|python_tag|>": 1} {"name": "f", "parameters": {}}', None, [('f','{}')]),
    ('llama3_json', '{"n<|python_tag|>": 1}', '{"n": 1}', []),
    ('llama3_json', '{"name": "f", "parameters": "text"}', None, [('f','"text"')]),

    ('mistral', 'This is a test', SAME, []),
    (
        'mistral', '[TOOL_CALLS][{"name": "add", "arguments":{"a": 3.5, "b": 4}}]', None,
        [('add','{"a": 3.5, "b": 4}')]),
    (
        'mistral', '[TOOL_CALLS]  [ {"name":"add" , "arguments" : {"a": 3, "b": 4} } ]', None,
        [('add','{"a": 3, "b": 4}')]),
    (
        'mistral', '[TOOL_CALLS] [{"arguments":{"name": "John Doe"}, "name": "get_age"}]', None,
        [('get_age','{"name": "John Doe"}')]),
    (
        'mistral',
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments":{"c": '
        '"SF"}}]',
        None,
        [('f','{"a": 1}'), ('g','{"c": "SF"}')]),
    (
        'mistral', 'Hello[TOOL_CALLS] [{"name": "f", "arguments":{"a": 1}}]', 'Hello',
        [('f','{"a": 1}')]),
    (
        'mistral', '[TOOL_CALLS] [{"name": "f", "arguments":{"a": 1}}]\nextra trailing data', None,
        [('f','{"a": 1}')]),
    (
        'mistral', '[TOOL_CALLS]  junk [{"name": "f", "arguments":{"a": 1}}] trail', None,
        [('f','{"a": 1}')]),
    ('mistral', '[TOOL_CALLS] not json at all', 'not json at all', []),
    *[
        ('mistral', f'[TOOL_CALLS] {t}', t, [])
        for t in ('42', 'null', '["add"]', '{"foo": 1}', '{not JSON')],
    ('mistral', '[TOOL_CALLS] [{"arguments": {"a": 1}}]', None, [('','{"a": 1}')]),
    (
        'mistral',
        '[TOOL_CALLS] [{"name": null, "arguments": null}, {"name": "g", "arguments": null}]',
        None,
        [('','{}'), ('g','{}')]),
    ('mistral', 'bash[TOOL_CALLS]{"command": "ls"} and so on', 'bash', [('','{"command": "ls"}')]),
    ('mistral', 'bash[TOOL_CALLS][ARGS]{"command": "ls"}', 'bash', [('','{"command": "ls"}')]),
    (
        'mistral', 'bash[TOOL_CALLS]{"command": "ls"}[TOOL_CALLS]g[ARGS]{"a": {"b": 1}}', 'bash',
        [('','{"command": "ls"}'), ('g','{"a": {"b": 1}}')]),
    (
        'mistral', 'bash[TOOL_CALLS]{"command": "ls"}[TOOL_CALLS]{"a": {"b": 1}}', 'bash',
        [('','{"command": "ls"}'), ('','{"a": {"b": 1}}')]),
    (
        'mistral', '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]{"a": {"b": 1}}', None,
        [('f','{"a": 1}'), ('','{"a": {"b": 1}}')]),
    (
        'mistral', '[TOOL_CALLS]f{"a": 1}[TOOL_CALLS][ARGS]{"b": 2}', None,
        [('f','{"a": 1}'), ('','{"b": 2}')]),
    ('mistral', 'bash[TOOL_CALLS]{no JSON at all', 'bash', [('','{no JSON at all')]),
    (
        'mistral', 'Sure[TOOL_CALLS]{"name": "f", "arguments": {"a": 1}} and', 'Sure',
        [('f','{"a": 1}')]),
    ('mistral', 'Sure [TOOL_CALLS] {"a": 1}', 'Sure {"a": 1}', []),
    (
        'mistral',
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}][TOOL_CALLS] [{"name": "g", '
        '"arguments": {}}]',
        None,
        [('f','{"a": 1}')]),
    (
        'mistral',
        r'[TOOL_CALLS] [{"name": "f", "arguments": "{\"a\": 1}"}, {"name": "g", "arguments": '
        r'{"b": 2}}]',
        None,
        [('f','{"a": 1}'), ('g','{"b": 2}')]),
    (
        'mistral',
        '[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}, {"x": 1}, {"name": "g"}, "junk"]',
        None,
        [('f','{"a": 1}'), ('g','{}')]),
    (
        'mistral', '[TOOL_CALLS] [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', None,
        [('f','{"a": 1}')]),
    (
        'mistral', '[TOOL_CALLS] {"name": "f", "arguments": {}}, {"name": "g", "arguments": {}}',
        None, [('f','{}')]),
    ('mistral', 'g[TOOL_CALLS]{"a": 1} and', 'g', [('g','{"a": 1}')], TOOLS),
    ('mistral', 'Look. [TOOL_CALLS]f{"a": 1} more', 'Look.', [('f','{"a": 1}')]),
    ('mistral', '[TOOL_CALLS] {"name": "f", "arguments": {"a": 1}}', None, [('f','{"a": 1}')]),
    (
        'mistral', '[TOOL_CALLS]add_this_and_that{"a": 3.5, "b": 4}', None,
        [('add_this_and_that','{"a": 3.5, "b": 4}')]),
    (
        'mistral', '[TOOL_CALLS]f{"a": 3.5}[TOOL_CALLS]g{"a": 3}', None,
        [('f','{"a": 3.5}'), ('g','{"a": 3}')]),
    (
        'mistral', 'hi[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{"a": 3}', 'hi',
        [('f','{"a": 1}'), ('g','{"a": 3}')]),
    (
        'mistral',
        'hi{hi[TOOL_CALLS]bash{"command": "print(\\"hello world!\\")\\nre.compile(r\'{}\')',
        'hi{hi',
        [('bash','{"command": "print(\\"hello world!\\")\\nre.compile(r\'{}\')')]),
    (
        'mistral',
        'hi{hi[TOOL_CALLS]bash{"command": "print(\\"hello world!\\")\\nre.compile(r\'{}\')"}',
        'hi{hi',
        [('bash','{"command": "print(\\"hello world!\\")\\nre.compile(r\'{}\')"}')]),
    (
        'mistral', '[TOOL_CALLS]f{"city": "SF"}Estimating the weather...', None,
        [('f','{"city": "SF"}')]),
    (
        'mistral', '[TOOL_CALLS]f[ARGS]{"city": "SF"}Estimating the weather...', None,
        [('f','{"city": "SF"}')]),
    ('mistral', '[TOOL_CALLS]toolname_no_args', None, [('toolname_no_args','{}')]),
    (
        'mistral', '[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"a": 1}[TOOL_CALLS]g[CALL_ID]5[ARGS]{}',
        None, [('f','{"a": 1}'), ('g','{}')]),

    ('pythonic', 'How can I help you today?', SAME, []),
    (
        'pythonic', "[f(city='San Francisco', metric='celsius')]", None,
        [('f','{"city": "San Francisco", "metric": "celsius"}')]),
    (
        'pythonic', '[f(city="SF", units="metric")]', None,
        [('f','{"city": "SF", "units": "metric"}')]),
    (
        'pythonic',
        "[f(name='John Doe', age=37, address={'city': 'SF', 'state': 'CA'}, role=None, "
        "passed_test=True, aliases=['John', 'Johnny'])]",
        None,
        [
            (
                'f',
                '{"name": "John Doe", "age": 37, "address": {"city": "SF", "state": "CA"}, '
                '"role": null, "passed_test": true, "aliases": ["John", "Johnny"]}')]),
    (
        'pythonic', '[f(), g(a={}), f(steps=[])]', None,
        [('f','{}'), ('g','{"a": {}}'), ('f','{"steps": []}')]),
    (
        'pythonic', r"""[f(city='Martha\'s Vineyard', metric='\"cool units\"')]""", None,
        [('f','{"city": "Martha\'s Vineyard", "metric": "\\"cool units\\""}')]),
    (
        'pythonic', "[f(a=null, b=true, c=false)]", None,
        [('f','{"a": null, "b": true, "c": false}')]),
    ('pythonic', "[où(città='Zürich', été=1)]", None, [('où','{"città": "Zürich", "été": 1}')]),
    (
        'pythonic', '[f(a=-5, b=(1), c=(1,), d=(1, "2"), e=("x" "y"))]', None,
        [('f','{"a": -5, "b": 1, "c": [1], "d": [1, "2"], "e": "xy"}')]),
    ('pythonic', "[bad(x=b'z'), f(a=1)]", None, [('f','{"a": 1}')]),
    ('pythonic', '[calc(x=1e999), f(a=1)]', None, [('f','{"a": 1}')]),
    ('pythonic', "[f(a=1), g(a='x 'y', b='z')]", None, [('f','{"a": 1}')]),
    ('pythonic', "[f(a='x 'y' 'z), g(b='p 'q' 'r)]", SAME, []),
    ('pythonic', '[foo(x=1)])]', SAME, []),
    ('pythonic', 'hello world[A(A=\t)A(A=,\t\t)A(A=,\t', SAME, []),
    ('pythonic', '[__import__("os").system("true")]', SAME, []),
    ('pythonic', '[f(x=().__class__)]', SAME, []),
    ('pythonic', '[f(x=[i for i in (1,)])]', SAME, []),

    ('gemma4', 'Hello, how can I help you today?', SAME, []),
    (
        'gemma4', M4('get_weather', f'city:{Q}London{Q}'), None,
        [('get_weather','{"city": "London"}')]),
    (
        'gemma4', M4('f', f's:{Q}Paris, France{Q},u:{Q}C{Q}'), None,
        [('f','{"s": "Paris, France", "u": "C"}')]),
    (
        'gemma4', 'Let me check the weather for you. '+M4('f', f's:{Q}x{Q}'),
        'Let me check the weather for you.', [('f','{"s": "x"}')]),
    ('gemma4', M4('f', f's:{Q}x{Q}')+M4('g', ''), None, [('f','{"s": "x"}'), ('g','{}')]),
    (
        'gemma4', M4('f', f'nested:{{inner:{Q}value{Q}}},list:[{Q}a{Q},{Q}b{Q}]'), None,
        [('f','{"nested": {"inner": "value"}, "list": ["a", "b"]}')]),
    (
        'gemma4', M4('f', 'b:true,i:42,n:3.14'), None, [('f','{"b": true, "i": 42, "n": 3.14}')],
        TOOLS),
    ('gemma4', M4('f', 's:42,ni:null'), None, [('f','{"s": "42", "ni": null}')], TOOLS),
    ('gemma4', f'<|tool_call>call:f{{s:{Q}London', None, [('f','{"s": "London"}')]),
    ('gemma4', M4('get-weather', ''), None, [('get-weather','{}')]),
    ('gemma4', M4('weather.get', f'{Q}a{Q}:{Q}b{Q}'), None, [('weather.get','{"a": "b"}')]),
    (
        'gemma4', M4('f', f's:{Q}function() {{ return []; }}{Q},p:{Q}a.js{Q}'), None,
        [('f','{"s": "function() { return []; }", "p": "a.js"}')]),
    (
        'gemma4', M4('f', f's:{Q}<!DOCTYPE html>\n<html lang="de">{Q}'), None,
        [('f','{"s": "<!DOCTYPE html>\\n<html lang=\\"de\\">"}')]),
    ('gemma4', M4('f', '')+'<div>', '<div>', [('f','{}')]),
    ('gemma4', f'<|tool_call>call:f{{s:{Q}x{Q}}}<turn|>', None, [('f','{"s": "x"}')]),
    ('gemma4', f'<|tool_call>:f{{s:{Q}x{Q}}}<tool_call|>', None, [('f','{"s": "x"}')]),
    ('gemma4', f'some prose\ncall:f{{s:{Q}x{Q}}}', 'some prose', [('f','{"s": "x"}')]),
    ('gemma4', 'I will call: you {later}', SAME, []),
    ('gemma4', M4('f', '"s":"x","i":2'), None, [('f','{"s": "x", "i": "2"}')]),
    (
        'gemma4', M4('f', 'b:true,i:42,n:3.14,z:null'), None,
        [('f','{"b": "true", "i": "42", "n": "3.14", "z": "null"}')]),
    (
        'gemma4', M4('f', 'o:{k:true},l:[1,[2],x]'), None,
        [('f','{"o": {"k": "true"}, "l": ["1", ["2"], "x"]}')]),
    (
        'gemma4', M4('f', 'b:1,n:5.0,ni:7,si:8,e:y'), None,
        [('f','{"b": true, "n": 5, "ni": 7, "si": 8, "e": "y"}')], TOOLS),
    (
        'gemma4', M4('h', f'o:{{k:1,s:2}},l:[1,{Q}2{Q},null]'), None,
        [('h','{"o": {"k": 1, "s": "2"}, "l": [1, 2, null]}')], NESTED),
    ('gemma4', 'a<tool_call|>b<|tool_call>c d<tool_call|>e', 'abe', []),
    (
        'gemma4', '<|tool_call>call:bad no brace<tool_call|>'+M4('f', f's:{Q}x{Q}'), None,
        [('bad no brace','{}'), ('f','{"s": "x"}')]),
    (
        'gemma4', f'<|tool_call>call:f(s:{Q}x){Q},i:(4))<tool_call|>', None,
        [('f','{"s": "x)", "i": "(4)"}')]),
    ('gemma4', M4('f', 's:a :) b,i:4'), None, [('f','{"s": "a :) b", "i": "4"}')]),
    ('gemma4', 'So.<|tool_call>call:get_wea', 'So.', []),
    *[
        ('gemma4', f'<|tool_call>{h}f{{s:{Q}x{Q}}}<tool_call|>', None, [('f','{"s": "x"}')])
        for h in ('call :', 'callcall:', 'call\n:', 'I will call:', 'é:', '<:')],
    (
        'gemma4', f'Sure.<call>get_weather{{city:{Q}Paris{Q}}}', 'Sure.',
        [('get_weather','{"city": "Paris"}')], TOOLS),
    ('gemma4', 'A <call>nobody{x:1} and <call> me', SAME, [], TOOLS),
    ('gemma4', M4('mcp:read', f'p:{Q}/{Q}'), None, [('mcp:read','{"p": "/"}')]),
    ('gemma4', M4('f', f's:{Q}London'), None, [('f','{"s": "London"}')]),
    ('gemma4', M4('f', f'o:{{k:{Q}x}}'), None, [('f','{"o": {"k": "x"}}')]),
    ('gemma4', M4('f', f's:{Q}if (a) {{ b; }}'), None, [('f','{"s": "if (a) { b; }"}')]),
    ('gemma4', f'<|tool_call>call:f{{s:{Q}Lon<|', None, [('f','{"s": "Lon"}')]),

    ('qwen3_coder', 'This is a test without tools', SAME, []),
    (
        'qwen3_coder', X('f', [('city','Dallas'), ('state','TX')]), None,
        [('f','{"city": "Dallas", "state": "TX"}')]),
    ('qwen3_xml', X('f', '<parameter=city>Tokyo</parameter>\n'), None, [('f','{"city": "Tokyo"}')]),
    (
        'qwen3_coder', 'Sure! Let me check.'+X('f', [('s','x')]), 'Sure! Let me check.',
        [('f','{"s": "x"}')]),
    (
        'qwen3_coder', X('f', [('o','{"width": 10, \n "height": 20}'), ('i','2')]), None,
        [('f','{"o": {"width": 10, "height": 20}, "i": 2}')], TOOLS),
    (
        'qwen3_coder',
        X('f', [('s','a')])+'\n'
        +X('g', [('q','b')]),
        None,
        [('f','{"s": "a"}'), ('g','{"q": "b"}')]),
    ('qwen3_coder', X('f', [('s','a')], False), None, [('f','{"s": "a"}')]),
    (
        'qwen3_coder', "I'll check.\n\n"+X('f', [('s','a')], False)+'\n</tool_call>', "I'll check.",
        [('f','{"s": "a"}')]),
    (
        'qwen3_coder',
        X(
            'f',
            [
                ('i','42'), ('n','3.14'), ('b','true'), ('s','hello world'),
                ('o','{"key": "value"}')]),
        None,
        [('f','{"i": 42, "n": 3.14, "b": true, "s": "hello world", "o": {"key": "value"}}')],
        TOOLS),
    (
        'qwen3_coder',
        X(
            'f',
            [
                ('ni','5'), ('ns','hello'), ('ti','42'), ('si','some text'),
                ('a','["a", "b"]')]),
        None,
        [('f','{"ni": 5, "ns": "hello", "ti": 42, "si": "some text", "a": ["a", "b"]}')],
        TOOLS),
    (
        'qwen3_coder',
        X(
            'f',
            [
                ('ni','null'), ('ns','null'), ('s','null'), ('e','x'),
                ('n','5.0'), ('i','not a number')]),
        None,
        [('f','{"ni": null, "ns": null, "s": "null", "e": "x", "n": 5, "i": "not a number"}')],
        TOOLS),
    (
        'qwen3_coder', X('f', [('ns','8080'), ('s','1')]), None,
        [('f','{"ns": "8080", "s": "1"}')], TOOLS),
    (
        'qwen3_coder',
        X(
            'f', [('i','42'), ('b','true'), ('x','null')]),
        None,
        [('f','{"i": "42", "b": "true", "x": "null"}')]),
    (
        'qwen3_coder',
        'Look:\n<tool_call>\n<function=f>\n<parameter=city>\nDallas\n'
        '<parameter=state>\nTX\n</parameter>\n</function>\n</tool_call>',
        'Look:',
        [('f','{"city": "Dallas", "state": "TX"}')]),
    (
        'qwen3_coder', '<tool_call>\n<function=f>\n<parameter=s>\nlast\n</function>\n</tool_call>',
        None, [('f','{"s": "last"}')]),
    (
        'qwen3_coder',
        '<tool_call>\n<function=f>\n<parameter=s>x</parameter>\n</function>\n'+X('g'),
        None,
        [('f','{"s": "x"}'), ('g','{}')]),
    (
        'qwen3_coder',
        X(
            'f',
            '<parameter=q>He said "hello"</parameter>\n'
            '<parameter=p>C:\\Users\\f</parameter>\n<parameter=n>a\nb</parameter>\n'),
        None,
        [('f','{"q": "He said \\"hello\\"", "p": "C:\\\\Users\\\\f", "n": "a\\nb"}')]),
    (
        'qwen3_coder', X('f', '<parameter=s>\n\n  two\n\n</parameter>\n'), None,
        [('f','{"s": "\\n  two\\n"}')]),
    ('qwen3_coder', 'A\n\n'+X('g')+'\n\nB', 'A\n\n\n\nB', [('g','{}')]),
    ('qwen3_coder', '<tool_call><function=></function></tool_call>', None, []),
    *[
        ('qwen3_coder', 'Checking. '+t, 'Checking. ', [])
        for t in (
            '<tool_call>', '<tool_call>\n', '<tool_call>\n<', '<tool_call>\n<function',
            '<tool_call>\n<function=get')],
    ('qwen3_coder', 'A <tool_call>garbage</tool_call> B', 'A  B', []),
    ('qwen3_coder', 'Quoted `<tool_call>` still <tool_call> visible.', SAME, []),
    (
        'qwen3_coder', 'First `<tool_call>`, then\n'+X('g'), 'First `<tool_call>`, then',
        [('g','{}')]),
    (
        'qwen3_coder', '<tool_call>\n<b>\n</tool_call> and <tool_call>\n</tool_call> and so on',
        ' and  and so on', []),
    (
        'qwen3_coder', X('h', [('o','{"k": "1", "s": 2}'), ('l','["1", null]')]), None,
        [('h','{"o": {"k": "1", "s": 2}, "l": ["1", null]}')], NESTED),
    (
        'qwen3_coder',
        '<tool_call>\n<function=nobody\n</function>\n</tool_call>\n'+X('f', [('s','x')]),
        None,
        [('f','{"s": "x"}')],
        TOOLS),
    (
        'qwen3_coder',
        '<tool_call>\n<function=nobody\n</function>\n</tool_call>\n'+X('f', [('s','x')]),
        None,
        [('nobody','{}'), ('f','{"s": "x"}')]),
    (
        'qwen3_coder', 'Use <tool_call>\n<function=g>\nWait, <tool_call>\n'+X('f', [('s','x')]),
        'Use', [('g','{}'), ('f','{"s": "x"}')]),
    (
        'qwen3_coder',
        '<tool_call>\n<function=f\n<parameter=s>x</parameter>\n</function>\n</tool_call>',
        None,
        [('f','{"s": "x"}')],
        TOOLS),

    (
        'qwen3_coder',
        X(
            'f',
            [('o',"{'key': 'value', 'n': None}"), ('a',"['x', {'y': True}]"), ('s',"{'k': 1}")]),
        None,
        [('f','{"o": {"key": "value", "n": null}, "a": ["x", {"y": true}], "s": "{\'k\': 1}"}')],
        TOOLS),
    (
        'qwen3_coder',
        X(
            'f', [('n','9007199254740993'), ('o',"['x']"), ('a',"{'x': 1}")]),
        None,
        [('f','{"n": 9007199254740993, "o": "[\'x\']", "a": "{\'x\': 1}"}')],
        TOOLS),
    (
        'qwen3_coder', X('f', [('o',"__import__('os')"), ('a','[f() for f in ()]')]), None,
        [('f','{"o": "__import__(\'os\')", "a": "[f() for f in ()]"}')], TOOLS),

    (
        'qwen3_coder',
        X(
            'f', [('a',"['x' 'y']"), ('ns',' null'), ('ni',' null ')]),
        None,
        [('f','{"a": "[\'x\' \'y\']", "ns": " null", "ni": null}')],
        TOOLS),
    (
        'qwen3_coder', X('f', [('s','a <tool_call> in </tool_call> text')]), None,
        [('f','{"s": "a <tool_call> in </tool_call> text"}')]),
    ('qwen3_coder', 'Yes.'+X('g')+'</tool_call>', 'Yes.', [('g','{}')]),
    (
        'qwen3_coder', X('g')+'</tool_call>\n'+X('f', [('s','x')]), None,
        [('g','{}'), ('f','{"s": "x"}')]),
    ('qwen3_coder', 'A </tool_call> and a </function> alone', SAME, []),
    (
        'qwen3_coder', X('h', [('o','null'), ('l','null')]), None,
        [('h','{"o": null, "l": null}')], NESTED),

    ('minimax_m2', 'Hello world', SAME, []),
    (
        'minimax_m2',
        MM(I(
            'f', ('ns',' null'), ('si','null '), ('ni',' null\n'))),
        None,
        [('f','{"ns": " null", "si": "null ", "ni": null}')],
        TOOLS),
    (
        'minimax_m2', MM('<invoke name="f"><parameter name="x">1</parameter>'+I('g', ('y','2'))),
        None, [('f','{"x": "1"}'), ('g','{"y": "2"}')]),
    (
        'minimax_m2', 'Let me check. '+MM(I('get_weather', ('city','Seattle'))), 'Let me check.',
        [('get_weather','{"city": "Seattle"}')]),
    (
        'minimax_m2', MM(I('f', ('city','Seattle'), ('days','5'))), None,
        [('f','{"city": "Seattle", "days": "5"}')]),
    (
        'minimax_m2',
        MM(
            I('f', ('x','1')), I('g', ('y','2'))),
        None,
        [('f','{"x": "1"}'), ('g','{"y": "2"}')]),
    (
        'minimax_m2',
        MM(I(
            'f', ('ns','Alice'), ('ni','null'), ('o','{"theme": "dark", "n": 14}'))),
        None,
        [('f','{"ns": "Alice", "ni": null, "o": {"theme": "dark", "n": 14}}')],
        TOOLS),
    ('minimax_m2', MM(I('f', ('s','  keep\n'))), None, [('f','{"s": "  keep\\n"}')], TOOLS),
    (
        'minimax_m2',
        MM(
            '<invoke name="f"><parameter name="a">Seattle</parameter><parameter '
            'name="b">celsius</invoke>'),
        None,
        [('f','{"a": "Seattle", "b": "celsius"}')]),
    (
        'minimax_m2',
        MM(
            I('img_gen', ('p','cat')), I('f', ('s','news'))),
        None,
        [('f','{"s": "news"}')],
        TOOLS),
    ('minimax_m2', MM(I('img_gen', ('p','cat'))), None, [], TOOLS),
    ('minimax_m2', MM(I('img_gen', ('p','cat')))+' and more', ' and more', [], TOOLS),
    ('minimax_m2', 'a</minimax:tool_call>b<minimax:tool_call>c</minimax:tool_call>d', 'abd', []),
    (
        'minimax_m2', 'a<minimax:tool_call><invoke name="f"><parameter name="s">', 'a',
        [('f','{}')], TOOLS),
    ('minimax_m2', I('f', ('s','x')), None, [('f','{"s": "x"}')]),
    (
        'minimax_m2',
        '<minimax:tool_call>\n<invoke name=f>\n<parameter '
        'name=\'s\'>x</parameter>\n</invoke>\n</minimax:tool_call>',
        None,
        [('f','{"s": "x"}')]),

    ('deepseek_v3', 'How can I help you today?', SAME, []),
    (
        'deepseek_v3', O+V3('f', '{"city": "Tokyo", "unit": "celsius"}')+C, None,
        [('f','{"city": "Tokyo", "unit": "celsius"}')]),
    (
        'deepseek_v3', 'Let me see.'+O+V3('f', '{"a": [1], "b": null}')+'\n'+V3('g', '{}')+C,
        'Let me see.', [('f','{"a": [1], "b": null}'), ('g','{}')]),
    (
        'deepseek_v3', O+V3('f', r'{"text": "He said \"hello\"", "path": "C:\\Users\\file"}')+C,
        None, [('f',r'{"text": "He said \"hello\"", "path": "C:\\Users\\file"}')]),
    ('deepseek_v3', f'{O}function{sep}f\n```json\n{{}}\n```{C}', None, []),
    (
        'deepseek_v3', 'let me check.'+O+V3('f', '{}')+C+'It is 30 degrees.',
        'let me check.It is 30 degrees.', [('f','{}')]),
    *[
        (
            'deepseek_v3', f'{O}{o}function{sep}{n}\n```json\n{{"a": 1}}{end}{c}{C}', None,
            [('f','{"a": 1}')])
        for n in ('f', ' f ', 'f\n')
        for end in ('\n```', '```', '\n``` ', '\n```\n', '\n', '')],
    ('deepseek_v31', 'normal text'+O+V31('foo', '{"x":1}')+C, 'normal text', [('foo','{"x":1}')]),
    (
        'deepseek_v31',
        'prefix'+O+V31('foo', '{"x":1}')+V31('bar', '{"y":2}')+C+' some suffix text',
        'prefix',
        [('foo','{"x":1}'), ('bar','{"y":2}')]),
    ('deepseek_v31', f'Let me look that up.{O}get_weather', 'Let me look that up.', []),
    ('deepseek_v31', f'{O}foo{sep}{{"x":1}}{C}', None, []),
    ('deepseek_v31', f'a{O}{V31("f", "{}")}{o}g{sep}{{"x":', 'a', [('f','{}')]),

    ('deepseek_v32', 'just some text', SAME, []),
    ('deepseek_v32', VV(V('get_time')), None, [('get_time','{}')]),
    (
        'deepseek_v32',
        'Sure, let me check! '
        +VV(V(
            'f', ('location','SF','true'), ('date','2024-01-16','true'))),
        'Sure, let me check! ',
        [('f','{"location": "SF", "date": "2024-01-16"}')]),
    (
        'deepseek_v32',
        VV(
            V('f', ('p','v1','true')),
            V('g', ('q','v2','true'))),
        None,
        [('f','{"p": "v1"}'), ('g','{"q": "v2"}')]),
    (
        'deepseek_v32',
        VV(V('f', ('b','true','false'), ('i','42','false'))),
        None,
        [('f','{"b": true, "i": 42}')],
        TOOLS),
    (
        'deepseek_v32',
        VV(V('f', ('i','42','true'), ('o','{"k": 1}','true'))),
        None,
        [('f','{"i": 42, "o": {"k": 1}}')],
        TOOLS),
    (
        'deepseek_v32',
        VV(V(
            'f', ('count','42','false'), ('flag','true','false'),
            ('bad','abc','false'))),
        None,
        [('f','{"count": 42, "flag": true, "bad": "abc"}')]),
    (
        'deepseek_v32',
        VV(V(
            'f', ('s','null','false'), ('ns','null','false'),
            ('i','abc','false'), ('n','3.0','false'))),
        None,
        [('f','{"s": "null", "ns": null, "i": "abc", "n": 3}')],
        TOOLS),
    (
        'deepseek_v32', VV(V('get_weather', ('arguments','{"city":"Beijing"}','false'))), None,
        [('get_weather','{"city": "Beijing"}')], TOOLS),
    (
        'deepseek_v32', VV(V('get_weather', ('input','{"city":"Beijing"}','true'))), None,
        [('get_weather','{"city": "Beijing"}')], TOOLS),
    (
        'deepseek_v32',
        VV(V('f', ('k','v','true'))).replace(f'</{D}invoke>\n', ''),
        None,
        [('f','{"k": "v"}')]),
    ('deepseek_v32', 'Hi '+V('f', ('k','v','true')), 'Hi ', [('f','{"k": "v"}')]),
    *[
        ('deepseek_v32', f'Hi {w(V("f", ("k","v","true")))} and bye', 'Hi ', [('f','{"k": "v"}')])
        for w in (VV, str)],
    (
        'deepseek_v32',
        VV(V(
            'f',
            ('k','5','true'),
            ('n','5','true'))).replace(' string="true">5', '>5'),
        None,
        [('f','{"k": 5, "n": 5}')]),
    (
        'deepseek_v32', VV(V('f', ('expr',f'a<b><{D[:3]}','true'))), None,
        [('f','{"expr": "a<b><｜DS"}')]),
    ('deepseek_v32', '<｜DSM some regular text', SAME, []),
    (
        'deepseek_v32',
        VV(f'<{D}invoke name="f">\n{{"i": "4", "s": 5, "x": [1]}}\n</{D}invoke>\n'+V('g')),
        None,
        [('f','{"i": 4, "s": "5", "x": [1]}'), ('g','{}')],
        TOOLS),
    (
        'deepseek_v32', VV(f'<{D}invoke name="f">\nso {{"i": 4}}\n</{D}invoke>\n'), None,
        [('f','{}')]),

    ('glm45', 'This is a test', SAME, []),
    (
        'glm45', G('f', [('city','Dallas'), ('state','TX')]), None,
        [('f','{"city": "Dallas", "state": "TX"}')]),
    (
        'glm47', G('get_weather', [('city','Beijing')], ''), None,
        [('get_weather','{"city": "Beijing"}')], TOOLS),
    ('glm47', '<tool_call>g</tool_call>', None, [('g','{}')], TOOLS),
    ('glm47', '  \n  '+G('g', (), ''), None, [('g','{}')]),
    (
        'glm45',
        G('f', [('a','x')])+'\n'
        +G('f', [('a','y')]),
        None,
        [('f','{"a": "x"}'), ('f','{"a": "y"}')]),
    ('glm47', 'Checking.'+G('g'), 'Checking.', [('g','{}')]),
    (
        'glm45', G('f', [('s','    indented code    ')]), None,
        [('f','{"s": "    indented code    "}')], TOOLS),
    (
        'glm45',
        G(
            'f',
            [
                ('i','42'), ('n','3.14'), ('b','true'),
                ('s','7')]),
        None,
        [('f','{"i": 42, "n": 3.14, "b": true, "s": "7"}')],
        TOOLS),
    (
        'glm45', G('f', [('greeting','你好世界'), ('emoji','🎉')]), None,
        [('f','{"greeting": "你好世界", "emoji": "🎉"}')]),
    ('glm47', G('get', [('city','Beijing')]), None, [], TOOLS),
    ('glm47', 'I issue a <tool_call>'+G('g', (), ''), 'I issue a', [('g','{}')], TOOLS),
    ('glm45', 'a<tool_call>   ', 'a', []),
    ('glm45', 'a<tool_call></tool_call>b', 'ab', []),
    ('glm45', '\n<tool_call></tool_call>\n', None, []),
    (
        'glm45', G('g')+'</tool_call>\n'+G('f', [('s','x')])+'</tool_call>',
        None, [('g','{}'), ('f','{"s": "x"}')]),
    ('glm47', 'A </tool_call> alone', SAME, []),
    (
        'glm45',
        G(
            'f', [('a',r'[{\"k\": \"C:\\\\d\"}]'), ('o',r'{\"k\": 1}'), ('s',r'{\"k\": 1}')]),
        None,
        [('f',r'{"a": [{"k": "C:\\d"}], "o": {"k": 1}, "s": "{\\\"k\\\": 1}"}')],
        TOOLS),
    (
        'glm47',
        '<tool_call>f<arg_key>s<arg_value>x</arg_value><arg_key>n</arg_key> '
        '<arg_value>2</tool_call>',
        None,
        [('f','{"s": "x", "n": 2}')],
        TOOLS),
]

@pytest.mark.parametrize('case', CASES, ids=lambda c: f'{c[0]}-{c[1][:30]!r}')
def test_case(case):
    parser,text = case[:2]
    content,calls = case[2:4]
    tools = case[4] if len(case)>4 else None
    content = text if content is SAME else content
    assert plain(parse_tools(parser, text, tools))==(content, calls)
    for sizes in (
        forever(1), forever(2), forever(3), forever(7),
        ragged(len(text))):
        said,sent,result = cut(parser, text, sizes, tools)
        assert plain(result)==(content, calls)

def test_names():
    assert set(FORMATS)<=set(TOOL_PARSERS)
    with pytest.raises(RequestError, match='hermes'):
        ToolStream('nobody')

LOOP = {'properties': {'s': {'$ref': '#/$defs/a'}}, '$defs': {'a': {'$ref': '#/$defs/a'}}}
ODD_TOOLS = [
    None, 3, {}, {'function': None}, {'function': {'name': 3}},
    {'function': {'name': 'f', 'parameters': None}},
    {'name': 'f', 'parameters': {'properties': [1]}}, tool('f', s=None),
    tool('f', i={'type': 3, 'enum': 'x', 'anyOf': {}}),
    {'function': {'name': 'f', 'parameters': LOOP}}]

@pytest.mark.parametrize('odd', ODD_TOOLS, ids=range(len(ODD_TOOLS)))
def test_tools_of_any_form(odd):
    "Tools come from strangers: odd ones are passed over"
    texts = {
        'qwen3_coder':X('f', [('s','1')]), 'glm45':G('f', [('s','1')]),
        'gemma4':M4('f', f's:{Q}1{Q}'),
        'deepseek_v32':VV(V('f', ('arguments','{"s": 1}','false')))}
    for parser,text in texts.items():
        (call,) = parse_tools(parser, text, [odd]).calls
        assert call.name=='f'
        assert json.loads(call.arguments)

def test_hosted_tools_are_no_functions():
    "A list of tools that holds no function says nothing about names"
    for t in (
        {'type': 'namespace', 'name': 'mcp', 'tools': [{'type': 'function', 'name': 'read'}]},
        {'type': 'web_search', 'name': 'web_search'}):
        assert plain(parse_tools(
            'glm47', G('mcp__read', [('p','/')], ''),
            [t]))==(None, [('mcp__read','{"p": "/"}')])
        assert plain(parse_tools(
            'glm47', G('mcp__read'), [t, tool('f')]))==(None, [])

# -- any text, any cut -----------------------------------------------------------------------------

WORDS = {
    'hermes': [
        '<tool_call>', '</tool_call>', '{"name": "f", "arguments": ', '{"a": 1}', '"arguments": ',
        '}', '{', '"', '\\', ',', ':', '[', ']'],
    'llama3_json': [
        '<|python_tag|>', '{"name": "f", "parameters": ', '{"name"', ': "f"', '"arguments": ',
        '{"a": 1}', '}', '{', '"', '\\', ',', ':', ';'],
    'mistral': [
        '[TOOL_CALLS]', '[ARGS]', '[', ']', '{"name": "f", "arguments": ', '{"a": 1}', '}', '{',
        '"', '\\', ',', 'f'],
    'pythonic': [
        '[', ']', 'f(', ')', 'a=', "'", '"', '\\', ',', '1', '{', '}', 'None', '.', '"""', '(',
        '-', 'e5'],
    'gemma4': [
        '<|tool_call>', '<tool_call|>', '<turn|>', Q, 'call:', 'f', '{', '}', '[', ']', ':', ',',
        'a:', '(', 'true', '"', '\ncall:f{'],
    'qwen3_coder': [
        '<tool_call>', '</tool_call>', '<function=', '</function>', '<parameter=', '</parameter>',
        'f', '>', '<', 'i>'],
    'minimax_m2': [
        '<minimax:tool_call>', '</minimax:tool_call>', '<invoke name=', '"f">', 'f', '>',
        '</invoke>', '<parameter name=', '"i">', '</parameter>', '<', "'"],
    'deepseek_v32': [
        f'<{D}function_calls>', f'</{D}function_calls>', f'<{D}invoke name=', '"f">',
        f'</{D}invoke>', f'<{D}parameter name=', '"i" string="false">',
        '"arguments" string="true">', f'</{D}parameter>', '>', '{"i": 1}', '<'],
    'deepseek_v3': [
        O, C, o, c, sep, 'function', 'f', '\n```json\n', '\n```', '`', '{"a": 1}',
        '<｜'],
    'glm45': [
        '<tool_call>', '</tool_call>', '<arg_key>', '</arg_key>', '<arg_value>', '</arg_value>',
        'f', '<', '>'],
}
WORDS['deepseek_v31'] = WORDS['deepseek_v3']
KINDS = sorted(WORDS)
def soups(parser):
    words = WORDS[parser]*3+[' ', '\n', 'text', '1', 'null', 'é', '😀', '<']
    return st.lists(st.sampled_from(words), max_size=40).map(''.join)

@pytest.mark.parametrize('parser', KINDS)
@many
@given(data=st.data())
def test_any_cut_says_the_same(parser, data):
    text = data.draw(soups(parser))
    tools = data.draw(st.sampled_from((None, TOOLS)))
    whole = parse_tools(parser, text, tools)
    n = len(text)+1
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=n, max_size=n))
    said,sent,result = cut(parser, text, iter(sizes), tools)
    said1,sent1,_ = cut(parser, text, forever(len(text)+1), tools)
    assert plain(result)==plain(whole)
    # and the pieces come to the same
    assert said==said1
    assert [x[1:] for x in sent]==[x[1:] for x in sent1]

def leaves(v):
    if isinstance(v, dict):
        for k,x in v.items():
            yield k
            yield from leaves(x)
    elif isinstance(v, list):
        for x in v:
            yield from leaves(x)
    else:
        yield v

@pytest.mark.parametrize('parser', KINDS)
@many
@given(data=st.data())
def test_nothing_is_invented(parser, data):
    """Arguments are JSON but where the format hands on what the model wrote;
    names, keys and values stand in the text"""
    text = data.draw(soups(parser))
    for t in parse_tools(parser, text).calls:
        # which hands on arguments that came without a name
        assert t.name in text
        assert t.name or parser=='mistral'
        if parser in ('llama3_json','mistral','deepseek_v3','deepseek_v31'):
            assert t.arguments in text or t.arguments=='{}'
        elif parser=='hermes' and t.arguments in text:
            json.loads(t.arguments)
        else:
            for v in leaves(json.loads(t.arguments)):
                assert stands_in(v, text), (v, text)

def stands_in(v, text):
    "Is a value made of what the text has?"
    if isinstance(v, str):
        return v in text or all(part in text for part in v)
    if v is None:
        return 'null' in text or 'None' in text
    return str(v).lower() in text.lower() or str(abs(v))[:1] in text or 'e' in text

@pytest.mark.parametrize('case', [c for c in CASES if c[3]], ids=lambda c: f'{c[0]}-{c[1][:20]!r}')
def test_cut_short(case):
    "A text that ends anywhere: whole parameters may stay, half ones do not turn into others"
    parser,text = case[:2]
    calls,*tools = case[3:]
    for k in range(len(text)):
        r = parse_tools(parser, text[:k], *tools)
        assert len(r.calls)<=len(calls)
        for t,(name,args) in zip(r.calls, calls):
            # a name alone is a call there
            assert t.name==name or parser=='mistral' and t.arguments=='{}'
            if parser=='mistral':
                assert args.startswith(t.arguments) or t.arguments=='{}'
            elif parser not in ('gemma4','deepseek_v32'):
                assert_part(json.loads(t.arguments), json.loads(args), text[:k])

def assert_part(got, want, text):
    "All members of an object are members of another"
    if isinstance(want, dict):
        assert all(k in want and want[k]==v for k,v in got.items()), (text, got)

# -- there and back --------------------------------------------------------------------------------

text_ = st.text(st.characters(blacklist_categories=('Cs',)), max_size=20)
value = st.recursive(
    st.none() | st.booleans()
    | st.integers(-10**9, 10**9)
    | st.floats(allow_nan=False, allow_infinity=False) | text_,
    lambda s: st.lists(s, max_size=3)
    | st.dictionaries(text_, s, max_size=3),
    max_leaves=8)
calls_ = st.lists(
    st.tuples(
        st.sampled_from(('f', 'get_weather', 'a_b2')),
        st.dictionaries(text_, value, max_size=4)),
    min_size=1,
    max_size=3)
def dump(a, **kw): return json.dumps(a, **kw)
WRITE = {
    'hermes': lambda cs, **kw: '\n'.join(
        H(dump(a, **kw), n)
        for n,a in cs),
    'llama3_json': lambda cs, **kw: '; '.join(
        '{"name": "%s", "parameters": %s}'%(n, dump(a, **kw))
        for n,a in cs),
    'mistral': lambda cs, **kw: '[TOOL_CALLS]['
    +', '.join(
        '{"name": "%s", "arguments": %s}'%(n, dump(a, **kw))
        for n,a in cs)+']',
    'mistral[ARGS]': lambda cs, **kw: ''.join(
        f'[TOOL_CALLS]{n}[ARGS]{dump(a, **kw)}' for n,a in cs),
    'deepseek_v31': lambda cs, **kw: O
    +''.join(V31(n, dump(a, **kw)) for n,a in cs)
    +C,
    'deepseek_v3': lambda cs, **kw: O
    +''.join(V3(n, dump(a, **kw)) for n,a in cs)
    +C}
@pytest.mark.parametrize('form', WRITE)
@many
@given(calls_, st.booleans(), st.integers(0, 99))
def test_json_there_and_back(form, cs, ascii, seed):
    text = WRITE[form](cs, ensure_ascii=ascii)
    _,sent,r = cut(form.partition('[')[0], text, ragged(seed))
    assert read(r)==cs
    assert r.content is None
    assert [(n, json.loads(a)) for _,n,a in sent]==cs

word = st.text('abcdefghij_', min_size=1, max_size=6)
@many
@given(
    st.lists(
        st.tuples(word, st.dictionaries(word, value, max_size=4)),
        min_size=1,
        max_size=3),
    st.integers(0, 99))
def test_python_there_and_back(cs, seed):
    text = '['+', '.join(f'{n}({", ".join(f"{k}={v!r}" for k,v in a.items())})' for n,a in cs)+']'
    _,sent,r = cut('pythonic', text, ragged(seed))
    as_json = [(n,json.loads(json.dumps(a))) for n,a in cs]
    assert read(r)==as_json

free = st.text('ab \n<>/"\'\\{}[]=:,é', max_size=20)
TAGS = {
    'qwen3_coder': lambda n, a: X(n, list(a.items())),
    'glm45': lambda n, a: G(n, list(a.items())),
    'minimax_m2': lambda n, a: MM(I(n, *a.items())),
    'deepseek_v32': lambda n, a: VV(V(
        n,
        *((k,v,'true') for k,v in a.items()))),
    'gemma4': lambda n, a: M4(
        n, ','.join(f'{k}:{Q}{v}{Q}' for k,v in a.items()))}
@pytest.mark.parametrize('parser', TAGS)
@many
@given(
    st.lists(
        st.tuples(word, st.dictionaries(word, free, max_size=4)),
        min_size=1,
        max_size=3),
    st.integers(0, 99))
def test_tags_there_and_back(parser, cs, seed):
    text = 'So.\n\n'+'\n'.join(TAGS[parser](n, a) for n,a in cs)
    said,sent,r = cut(parser, text, ragged(seed))
    assert read(r)==cs
    assert r.content.strip()==said.strip()=='So.'

# -- long and hostile ------------------------------------------------------------------------------

HEADS = {
    'hermes': ['<tool_call>{"name": "f", "arguments": '],
    'llama3_json': ['{"name": "f", "arguments": '],
    'mistral': ['[TOOL_CALLS]f', '[TOOL_CALLS]['],
    'pythonic': ['[f(a=', '[f(a="'],
    'gemma4': ['<|tool_call>call:f{a:', f'<|tool_call>call:f{{a:{Q}'],
    'qwen3_coder': ['<tool_call><function=f><parameter=a>', '<tool_call><function='],
    'glm45': ['<tool_call>f<arg_key>a</arg_key><arg_value>'],
    'minimax_m2': ['<minimax:tool_call><invoke name="f"><parameter name="a">'],
    'deepseek_v32': [f'<{D}invoke name="f"><{D}parameter name="arguments" string="false">'],
    'deepseek_v3': [O, O+o+'function'+sep],
    'deepseek_v31': [O+o+'f'+sep]}
UNITS = [
    '<', '{', '[', '{"a":', '[[],', '"', '\\"', '\\', "'", ' ', '\n', '(',
    'a', '1,', 'a:{', '😀', ' \n<']

@pytest.mark.parametrize('parser', KINDS)
def test_long_and_hostile(parser):
    "The worst takes no more than a moment. Quadratic parsers take minutes, so the bound is loose."
    heads = ['']+HEADS[parser]
    rng = random.Random(0)
    mixed = [''.join(rng.choices(WORDS[parser]+UNITS, k=5000)) for _ in heads]
    texts = [(head, unit, 2**17) for head in heads for unit in UNITS+WORDS[parser]]
    texts += [(head, unit, 2**20) for head,unit in zip(heads, mixed)]
    for head,unit,n in texts:
        def seconds(n):
            text = (head+unit*(n//len(unit)+1))[:n]
            t = time.process_time()
            parse_tools(parser, text, TOOLS)
            return time.process_time()-t
        loose = 4 if n<2**20 else 8
        assert linear(seconds, n, loose), (parser, head, unit[:20])

@pytest.mark.parametrize('n', [100, 199, 200, 900, 990, 1000, 100_000])
def test_deep(n):
    "Nesting that no client could read is no call, and no stack overflows"
    a,b = '['*n,']'*n
    for p,text in [
        ('hermes', H(a+b)),
        ('hermes', H('{"a":'*n+'1'+'}'*n)),
        ('pythonic', f'[f(a={a}{b})]'),
        ('pythonic', f'[f(a={"-"*n}1)]'),
        ('pythonic', f'[f(a={"("*n}1{")"*n})]'),
        ('gemma4', M4('f', f'a:{a}{b}')),
        ('gemma4', M4('f', '{a:'*n+'}'*n))]:
        r = parse_tools(p, text)
        if p!='hermes' or n>201:
            assert plain(r)==(None if p=='gemma4' else text, []), p

@pytest.mark.parametrize('n', [100, 199, 200, 900, 990, 1000, 100_000])
def test_deep_values_stay_text(n):
    deep = '['*n+']'*n
    texts = {
        'qwen3_coder':X('f', [('o',deep)]), 'deepseek_v32':VV(V('f', ('o',deep,'false'))),
        'glm45':G('f', [('a',deep)])}
    for p,text in texts.items():
        (t,) = parse_tools(p, text, TOOLS).calls
        assert t.name=='f'
        if n>=202:
            assert json.loads(t.arguments) in ({'o': deep}, {'a': deep})

@pytest.mark.parametrize('parser', KINDS)
def test_long_in_small_pieces(parser):
    "What waits on the tape stays short, so that the price of a piece does not grow with the text"
    first,last = HEADS[parser][0],HEADS[parser][-1]
    for head,unit in [
        ('',' '), ('','<'), (first,'x'), (first,'{"'), (last,'\\'), (last,'<'), (last,' ')]:
        def seconds(n):
            s,t = ToolStream(parser),time.process_time()
            s.feed(head)
            for _ in range(n):
                s.feed(unit)
                assert len(s.buf)<300, (head, unit)
            s.finish()
            s.result()
            return time.process_time()-t
        assert linear(seconds, 2**14, loose=4), (parser, head, unit)

@pytest.mark.parametrize(
    'parser,text',
    [
        ('hermes', H(r'"\ud83d"')),
        ('hermes', H(r'{"s": "\ud83d"}')),
        ('qwen3_coder', X('f', [('o',r'{"k": "\ud83d"}')])),
        ('glm45', G('f', [('o',r'["\ud83d"]')])),
        ('pythonic', r"[f(s='\ud83d', o='\ud83d\ude00')]"),
        ('deepseek_v32', VV(V('f', ('o',r'{"k": "\ud83d"}','false')))),
        ('gemma4', M4('f', r'"s":"\ud83d"'))])
def test_half_a_character(parser, text):
    "Half a surrogate pair is legal in JSON and in Python, and has no bytes in UTF-8"
    (t,) = parse_tools(parser, text, TOOLS).calls
    assert r'\ud83d' in t.arguments
    assert json.loads(t.arguments)
    assert t.arguments.encode()
    if parser=='pythonic':
        assert json.loads(t.arguments)['o']=='😀'

def test_a_name_that_cannot_be_said():
    for p,text in (
        ('hermes', H('{}', r'f\ud83d')), ('llama3_json', r'{"name": "a\nb", "parameters": {}}')):
        assert plain(parse_tools(p, text))==(text, [])

def test_nothing_runs():
    "No parser calls eval, exec, compile or pickle, or brings in the module that could"
    for p in sorted((Path(atlas.__file__).parent/'calls').glob('*.py')):
        for n in ast.walk(ast.parse(p.read_text(encoding='utf-8'))):
            if isinstance(n, ast.Name):
                assert n.id not in ('eval','exec','compile','__import__'), p
            if isinstance(n, (ast.Import,ast.ImportFrom)):
                assert not (
                    {a.name for a in n.names}
                    & {'ast','pickle','marshal','importlib','builtins'}), p
