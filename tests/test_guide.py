"""Guides: what a schema accepts and refuses token by token, answers drawn at random that must be
right, hostile grammars, and guided answers of whole engines on both devices."""
import json,random,re,threading
import numpy as np,pytest
import tokenizers as hf
from dataclasses import replace
from hypothesis import HealthCheck,given,settings,strategies as st
from jsonschema import Draft202012Validator
from types import SimpleNamespace
from atlas import LLM
from atlas.engine.cache import KVCache
from atlas.text.calls.grammar import FORMATS
from atlas.ground.config import PRESETS
from atlas.ground.core import RequestError,typed_error
from atlas.engine.card_stepper import CardStepper
from atlas.card.device import Host
from atlas.card.emulator import Emulator,find_cxx
from atlas.engine.engine import Engine
from atlas.engine.stepper import HostStepper
from atlas.text.guide import Guides,_sandbox,unpack
from atlas.text.tokenizer import byte_tokenizer
from atlas.model.model import imagine,load_model
from atlas.ops.sample import SampleState,SamplingParams,sample
from atlas.text.parsers import parse_tools
from atlas.engine.scheduler import Request,Scheduler
from atlas.text.tokenizer import Tokenizer

pytestmark = pytest.mark.usefixtures('patient_sandbox')

# Tokenizers of all kinds

ALPHABET = sorted(hf.pre_tokenizers.ByteLevel.alphabet())
TEXT = (
    [
        '{"name": "Ann", "age": 42, "tags": ["red", "blue"], "ok": true, "none": null}',
        'What is the weather in Paris today? I think, therefore I am.\n\n',
        '-12.5e+10 3.14159 </think>\n\n{"a": [1, 2, 3]}']*4)

def byte_level(special=('<|im_start|>','</think>','<end>'), size=420):
    "Byte-level BPE with merges"
    t = hf.Tokenizer(hf.models.BPE())
    t.pre_tokenizer = hf.pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = hf.decoders.ByteLevel()
    t.train_from_iterator(
        TEXT,
        hf.trainers.BpeTrainer(vocab_size=size, initial_alphabet=ALPHABET, show_progress=False))
    t.add_special_tokens([hf.AddedToken(s, special=True) for s in special])
    return Tokenizer(t)

STEER = '<unk>','<s>','</s>'
PIECES = [
    *STEER,
    *(f'<0x{b:02X}>' for b in range(256)),
    *'▁abcdefghijklmnopqrstuvwxyzABCDEFP0123456789{}[]",:.-\n',
    *('▁{','▁"','":','▁yes','▁no','true','né')]

def sentence_piece():
    "Spaces as `▁`, one before a text, bytes as `<0xNN>`"
    ids = {w:i for i,w in enumerate(PIECES)}
    merges = [('▁','{'),('▁','"'),('"',':')]
    model = hf.models.BPE(ids, merges, byte_fallback=True, fuse_unk=True, unk_token='<unk>')
    t = hf.Tokenizer(model)
    t.normalizer = hf.normalizers.Sequence([
        hf.normalizers.Prepend('▁'),
        hf.normalizers.Replace(' ','▁')])
    t.decoder = hf.decoders.Sequence([
        hf.decoders.Replace('▁',' '),
        hf.decoders.ByteFallback(),
        hf.decoders.Fuse(),
        hf.decoders.Strip(content=' ', left=1)])
    t.add_special_tokens([hf.AddedToken(s, special=True) for s in STEER])
    return Tokenizer(t, eos_ids=(2,))

def made(kind):
    if kind=='bytes':
        # the model has more logits than the tokenizer has tokens
        return Guides(byte_tokenizer(), 300, [299])
    if kind=='no end':
        return Guides(byte_tokenizer(), 256)
    if kind=='bpe':
        t = byte_level()
        return Guides(t, t.vocab_size+5, t.encode('<end>'))
    return Guides(sentence_piece(), len(sentence_piece().inner.get_vocab()), [2])
_made = {}
def guides(kind='bytes'):
    if kind not in _made:
        _made[kind] = made(kind)
    return _made[kind]
KINDS = ('bytes','no end','bpe','pieces')

def spelt(g, text):
    "Tokens that write exactly `text`, bytes where need be"
    by = {}
    for i in range(g.vocab_size):
        by.setdefault(g.tokenizer.token_bytes(i), i)
    return [by[bytes([b])] for b in text.encode()]

def accepts(g, spec, text, tokens=None):
    "May this be a whole answer? By masks and by `validate`, which must agree"
    guide = g.start(spec)
    tokens = spelt(g, text) if tokens is None else tokens
    fit = guide.validate(tokens)
    for k,t in enumerate(tokens):
        m = guide.mask()
        if m is not None and not m[t//32]>>t%32&1:
            assert k==fit
            return False
        guide.accept(t)
    assert fit==len(tokens)
    assert not guide.error
    if guide.ended:
        return True
    m = guide.fork().mask()
    return (
        m is None
        or any(m[e//32]>>e%32&1 for e in g.eos_ids)
        or not g.eos_ids and guide._m.is_accepting())

def J(schema, **kw): return dict(kind='json_schema', schema=schema, **kw)

def deep(n, how=lambda x: {'type':'object','properties':{'a':x}}):
    x = {}
    for _ in range(n):
        x = how(x)
    return x

# In the manner of the JSON-Schema-Test-Suite: a schema, what is valid, what is not

SUITE = {
    'boolean true': (True, ['1', '{}', '"a"', 'null'], ['', 'x', '{']),
    'type integer': (
        {'type':'integer'},
        ['0', '-1', '42'],
        ['1.5', '"1"', '01', '-', '+1', '1.', 'null']),
    'type number': (
        {'type':'number'},
        ['0', '-1.5', '1e3', '1.5E-7'],
        ['.5', '"1"', 'NaN', 'Infinity', '1e', '0x1']),
    'type string': (
        {'type':'string'},
        ['""', '"a b"', '"\\n\\"\\\\"', '"é😀"', '"\\u0007"'],
        ['a', '"a', "'a'", '"\n"', '"\\x"', '1']),
    'type boolean': ({'type':'boolean'}, ['true', 'false'], ['True', '0', '"true"']),
    'type null': ({'type':'null'}, ['null'], ['nil', '""', 'None']),
    'several types': (
        {'type':['string','null']}, ['null', '"x"'], ['1', 'true']),
    'enum': (
        {'enum':['a', 1, None, {'b':[2]}]},
        ['"a"', '1', 'null', '{"b":[2]}'],
        ['"b"', '2', '{"b":[3]}']),
    'const': (
        {'const':{'a':1}}, ['{"a":1}', '{"a": 1}'], ['{"a":2}', '{}', '{"a":1,"b":1}']),
    'properties': (
        {
            'type':'object',
            'properties':{'a':{'type':'integer'},'b':{'type':'string'}}},
        ['{}', '{"a":1}', '{"a":1,"b":"x"}', '{"c":[]}'],
        ['{"a":"x"}', '{"b":1}', '[]']),
    'required': (
        {'type':'object','properties':{'a':{}},'required':['a']},
        ['{"a":null}', '{"a":1,"z":2}'],
        ['{}', '{"b":1}']),
    'required without properties': ({'type':'object','required':['x']}, ['{"x":1}'], ['{}']),
    'additionalProperties false': (
        {'type':'object','properties':{'a':{}},'additionalProperties':False},
        ['{}', '{"a":1}'],
        ['{"b":1}', '{"a":1,"b":2}']),
    'additionalProperties schema': (
        {'type':'object','additionalProperties':{'type':'integer'}},
        ['{}', '{"x":1}', '{"x":1,"y":2}'],
        ['{"x":"1"}']),
    'patternProperties': (
        {
            'type':'object',
            'patternProperties':{'^n_':{'type':'integer'}},
            'additionalProperties':False},
        ['{"n_a":1}', '{}'],
        ['{"n_a":"x"}', '{"a":1}']),
    'items': (
        {'type':'array','items':{'type':'integer'}},
        ['[]', '[1]', '[1, 2,3]'],
        ['[1,]', '["a"]', '[1 2]', '{}']),
    'prefixItems': (
        {
            'type':'array',
            'prefixItems':[{'type':'integer'},{'type':'string'}],
            'items':False},
        ['[1,"a"]', '[1]', '[]'],
        ['["a"]', '[1,"a",2]']),
    'minItems and maxItems': (
        {'type':'array','items':{'type':'integer'},'minItems':2,'maxItems':3},
        ['[1,2]', '[1,2,3]'],
        ['[]', '[1]', '[1,2,3,4]']),
    'minLength and maxLength': (
        {'type':'string','minLength':2,'maxLength':3},
        ['"ab"', '"abc"', '"éé"', '"\\n\\n"'],
        ['"a"', '"abcd"', '""']),
    'pattern': (
        {'type':'string','pattern':'^[a-c]+$'}, ['"abc"', '"a"'], ['""', '"abd"', '"ABC"']),
    'pattern anywhere': (
        {'type':'string','pattern':'b+'}, ['"abba"', '"b"'], ['"aa"', '""']),
    'minimum and maximum': (
        {'type':'integer','minimum':-2,'maximum':11}, ['-2', '0', '11', '9'],
        ['-3', '12', '100']),
    'exclusive bounds': (
        {'type':'integer','exclusiveMinimum':0,'exclusiveMaximum':3},
        ['1', '2'],
        ['0', '3']),
    'number bounds': (
        {'type':'number','minimum':0.5,'maximum':2},
        ['0.5', '1', '1.75', '2'],
        ['0.4', '2.1', '-1']),
    'multipleOf': (
        {'type':'integer','multipleOf':5}, ['0', '5', '15'], ['3', '11']),
    'anyOf': (
        {'anyOf':[{'type':'integer'},{'type':'string','maxLength':1}]},
        ['12', '"a"'],
        ['"ab"', 'null']),
    'allOf': (
        {
            'allOf':[
                {'type':'object','properties':{'a':{'type':'integer'}},'required':['a']},
                {
                    'type':'object', 'properties':{'b':{'type':'string'}}, 'required':['b']}]},
        ['{"a":1,"b":"x"}'],
        ['{"a":1}', '{"b":"x"}']),
    'oneOf that exclude each other': (
        {'oneOf':[{'type':'integer'},{'type':'string'}]},
        ['1', '"a"'],
        ['null', '1.5']),
    '$ref and $defs': (
        {
            '$defs':{'p':{'type':'integer','minimum':0}}, 'type':'object',
            'properties':{'a':{'$ref':'#/$defs/p'}}, 'required':['a']},
        ['{"a":3}'],
        ['{"a":-3}', '{}']),
    'recursion': (
        {
            '$defs':{
                'n':{
                    'type':'object',
                    'properties':{
                        'v':{'type':'integer'},
                        'k':{'type':'array','items':{'$ref':'#/$defs/n'}}},
                    'required':['v'],
                    'additionalProperties':False}},
            '$ref':'#/$defs/n'},
        ['{"v":1}', '{"v":1,"k":[{"v":2},{"v":3,"k":[]}]}'],
        ['{"v":1,"k":[{}]}', '{"k":[]}']),
    'root reference': (
        {'type':'object','properties':{'next':{'$ref':'#'}},'additionalProperties':False},
        ['{}', '{"next":{"next":{}}}'],
        ['{"next":1}', '{"last":{}}']),
    'format date': (
        {'type':'string','format':'date'}, ['"2026-11-22"'], ['"2026-13-01"', '"today"']),
    'format date, leap years': (
        {'type':'string','format':'date'},
        ['"2024-02-29"', '"2000-02-29"'],
        ['"2023-02-29"', '"1900-02-29"', '"2026-02-30"', '"2026-04-31"']),
    'format date-time': (
        {'anyOf':[{'type':'string','format':'date-time'},{'type':'null'}]},
        ['"2024-02-29T23:59:59Z"', '"2026-11-22T09:30:00.25+01:00"', 'null'],
        ['"2023-02-29T10:00:00Z"', '"2026-11-22T23:58:60Z"', '"2026-11-22T09:30:00"']),
    'a property by the name of format': (
        {'type':'object','properties':{'format':{'enum':['date']}},'additionalProperties':False},
        ['{"format":"date"}'],
        ['{"format":"2026-11-22"}']),
    'format uuid': (
        {'type':'string','format':'uuid'},
        ['"2eb8aa08-aa98-11ea-b4aa-73b441d16380"'],
        ['"2eb8"', '"zzb8aa08-aa98-11ea-b4aa-73b441d16380"']),
    'white space': (
        {'type':'object','properties':{'a':{'type':'array'}}},
        ['{ }', '{\n\t"a" : [ ]\r\n}'],
        [' {}', '{}\n', '{ "a":[]\x0b}']),
    'keys to be escaped': (
        {
            'type':'object', 'properties':{'a"b\\c\n':{'type':'null'}}, 'required':['a"b\\c\n'],
            'additionalProperties':False},
        ['{"a\\"b\\\\c\\n":null}'],
        ['{"a":null}']),
    'minProperties': (
        {
            'type':'object', 'additionalProperties':{'type':'integer'}, 'minProperties':1,
            'maxProperties':2},
        ['{"a":1}', '{"a":1,"b":2}'],
        ['{}', '{"a":1,"b":2,"c":3}']),
    'types with a tag, as pydantic writes them': (
        {
            '$defs':{
                'Cat':{
                    'type':'object',
                    'properties':{
                        'kind':{'const':'cat','default':'cat','type':'string'},
                        'm':{'type':'integer'}},
                    'required':['kind','m']},
                'Dog':{
                    'type':'object',
                    'properties':{'kind':{'const':'dog','type':'string'}},
                    'required':['kind']}},
            'oneOf':[{'$ref':'#/$defs/Cat'},{'$ref':'#/$defs/Dog'}],
            'discriminator':{'propertyName':'kind'}},
        ['{"kind":"cat","m":1}', '{"kind":"dog"}'],
        ['{"kind":"cow"}', '{"kind":"cat"}']),
    'enum of mixed types': (
        {'enum':[1,'1',1.5,True,None,[],{}]},
        ['1', '"1"', '1.5', 'true', 'null', '[]', '{}'],
        ['2', 'false', '[1]']),
    'an enum of 5,000': (
        {'enum':[f'value number {i}' for i in range(5000)]},
        ['"value number 4999"'],
        ['"value number 5000"', '"value number"']),
    'lengths are characters': (
        {'type':'string','minLength':2,'maxLength':2},
        ['"é😀"', '"\\n\\\""'],
        ['"😀"', '"abc"']),
    'multipleOf of cents': (
        {'type':'number','multipleOf':.01}, ['1.25', '-3.33', '1', '0.1'], ['1.255']),
    'patterns beside properties': (
        {
            'type':'object', 'properties':{'a':{'type':'integer'}},
            'patternProperties':{'^x-':{'type':'string'}}, 'additionalProperties':False},
        ['{"a":1,"x-b":"c"}', '{"x-b":"c"}'],
        ['{"x-a":1}', '{"b":1}', '{"x":"c"}']),
    'words beside a reference': (
        {'$defs':{'a':{'type':'integer'}},'$ref':'#/$defs/a','minimum':3},
        ['3'],
        ['1', '"3"']),
    'forty levels': (
        deep(
            40,
            lambda x: {
                'type':'object', 'properties':{'a':x}, 'required':['a'],
                'additionalProperties':False}),
        ['{"a":'*40+'1'+'}'*40],
        ['{"a":'*39+'1'+'}'*39]),
    'title and others say nothing': (
        {
            'title':'T', 'description':'D', 'default':3, 'examples':[1],
            '$schema':'https://json-schema.org/draft/2020-12/schema', 'type':'integer'},
        ['3'],
        ['"3"'])}

@pytest.mark.parametrize('case', SUITE)
def test_schemas(case):
    schema,valid,invalid = SUITE[case]
    assert [t for t in valid if not accepts(guides(), J(schema), t)]==[]
    assert [t for t in invalid if accepts(guides(), J(schema), t)]==[]
    for t in valid:
        Draft202012Validator(schema).validate(json.loads(t))  # the table is right

@pytest.mark.parametrize('kind', KINDS[1:])
@pytest.mark.parametrize('case', ['type string', 'properties', 'recursion', 'several types'])
def test_schemas_with_other_tokenizers(case, kind):
    schema,valid,invalid = SUITE[case]
    assert [t for t in valid if not accepts(guides(kind), J(schema), t)]==[]
    assert [t for t in invalid if accepts(guides(kind), J(schema), t)]==[]

@pytest.mark.parametrize('kind', ('bpe','pieces'))
def test_tokens_of_several_bytes(kind):
    "The tokenizer's own way to cut a text is as good as bytes"
    g = guides(kind)
    for text in ('{"name": "Ann", "age": 42}', '{"tags": ["red", "blue"]}'):
        ids = g.tokenizer.encode(text, False)
        if kind=='pieces':
            assert g.tokenizer.token_bytes(ids[0]).startswith(b' ')
            ids = (
                spelt(g, '{"')
                +ids[
                    1+(g.tokenizer.token_bytes(ids[0])!=b' {'):][1:])
            continue
        assert len(ids)<len(text)
        assert accepts(g, dict(kind='json_object'), text, ids)

UNSUPPORTED = {
    'not': {'not':{'type':'string'}},
    'oneOf that overlap': {'oneOf':[{'type':'object'},{'type':'object','minProperties':0}]},
    'if': {'if':{'type':'string'},'then':{'minLength':1}},
    'uniqueItems': {'type':'array','uniqueItems':True},
    'an unknown format': {'type':'string','format':'polish'},
    'a remote reference': {'$ref':'https://example.com/s.json'}}
@pytest.mark.parametrize('case', UNSUPPORTED)
def test_what_is_not_supported_is_refused_or_dropped(case):
    with pytest.raises(RequestError) as e:
        guides().check(J(UNSUPPORTED[case]))
    assert e.value.status==400
    assert e.value.param=='response_format'
    assert len(str(e.value))<400
    if case=='a remote reference':
        return
    assert accepts(
        guides(),
        J(UNSUPPORTED[case], strict=False),
        '{"a":1}' if case!='uniqueItems' and 'format' not in case
        else '[1,1]' if case=='uniqueItems' else '"x"')
    if case!='oneOf that overlap':
        assert guides().check(J(UNSUPPORTED[case], strict=False))

def test_a_loop_of_references_with_a_way_out():
    loop = J({
        '$defs':{'a':{'anyOf':[{'$ref':'#/$defs/a'},{'type':'integer'}]}},
        '$ref':'#/$defs/a'})
    assert accepts(guides(), loop, '1')
    assert not accepts(guides(), loop, '"a"')

WRONG = {
    'type': {'type':'strin'},
    'a number for a type': {'type':17},
    'no such definition': {'$ref':'#/$defs/none'},
    'nothing fits': {'enum':[]},
    'a bad pattern': {'type':'string','pattern':'(a'},
    'false': False,
    'bounds crossed': {'type':'integer','minimum':3,'maximum':1},
    'itself': {'$ref':'#'},
    'a ring of references': {
        '$defs':{'a':{'$ref':'#/$defs/b'},'b':{'$ref':'#/$defs/a'}},
        '$ref':'#/$defs/a'},
    'an enum of another type': {'type':'integer','enum':['a']},
    'multipleOf nothing': {'type':'number','multipleOf':0},
    'required and not allowed': {
        'type':'object', 'properties':{}, 'required':['b'], 'additionalProperties':False},
    'a pattern that looks ahead': {'type':'string','pattern':'^(?!foo).*$'},
    'a pattern of JavaScript': {'type':'string','pattern':'\\cA'},
    'patterns that overlap': {
        'type':'object',
        'patternProperties':{'a':{'type':'string'},'aa':{'type':'integer'}}}}
@pytest.mark.parametrize('case', WRONG)
def test_schemas_that_are_wrong(case):
    with pytest.raises(RequestError) as e:
        guides().check(J(WRONG[case]))
    assert e.value.status==400
    assert len(str(e.value))<400

BAD_SYNTAX = {
    'look ahead': ('regex','(?=.*[0-9])[a-z0-9]{3}'),
    'look behind': ('regex','(?<!a)b'),
    'a back reference': ('regex','(a)\\1'),
    'a boundary': ('regex','\\bab\\b'),
    'an anchor inside': ('regex','a$b'),
    'unclosed': ('regex','(a'),
    'backwards': ('regex','a{3,1}'),
    'nothing matches': ('regex','[^\\s\\S]'),
    'no such rule': ('lark','start: foo'),
    'unclosed group': ('lark','start: ('),
    'no start': ('lark','foo: "a"'),
    'GBNF': ('lark','root ::= "a" | "b"'),
    'twice': ('lark','start: "a"\nstart: "b"'),
    'a bad expression': ('lark','start: /(/'),
    'one that looks ahead': ('lark','start: /(?=a)b/'),
    'a terminal in itself': ('lark','start: A\nA: A "x"'),
    'no such grammar': ('lark','start: @nope'),
    'a range backwards': ('lark','start: "a"{3,1}'),
    'cut short': ('lark','start: %json {"type":'),
    'a template': ('lark','_sep{x,s}: x (s x)*\nstart: _sep{"a",","}'),
    'a bad option': ('lark','%llguidance {"no_forcing": 5}\nstart: "a"')}
@pytest.mark.parametrize('case', BAD_SYNTAX)
def test_wrong_syntax_is_refused_with_the_reason(case):
    kind,text = BAD_SYNTAX[case]
    with pytest.raises(RequestError, match=f'The {kind} cannot be followed: .') as e:
        guides().check({
            'kind':kind, dict(regex='pattern', lark='grammar')[kind]:text})
    assert e.value.status==400
    assert e.value.param=='response_format'
    assert len(str(e.value))<500
    assert 'backtrace' not in str(e.value)

OTHERS = [
    (
        dict(kind='regex', pattern=r'\d{3}-[a-z]+'),
        ['123-ab'],
        ['12-ab', '123-', '123-A', '1234-a']),
    (
        dict(kind='regex', pattern='^(yes|no)$'), ['yes','no'], ['maybe', 'yes ', 'Yes']),
    (dict(kind='regex', pattern='a/b"\\n?'), ['a/b"', 'a/b"\n'], ['a/b']),
    (dict(kind='regex', pattern='(a+)+'), ['aaaa'], ['b', '']),
    (
        dict(kind='choice', choices=['yes','no','"q"\\','né\n']),
        ['yes','no','"q"\\','né\n'],
        ['ye','noo','']),
    (
        dict(kind='choice', choices=['a','ab','abc']),
        ['a','ab','abc'],
        ['b','abcd']),
    (
        dict(kind='choice', choices=['','a','ab','ab']),
        ['','a','ab'],
        ['b','abb']),
    (
        dict(
            kind='lark',
            grammar='start: expr\nexpr: NUM | "(" expr ("+"|"*") expr ")"\nNUM: /[0-9]+/'),
        ['1', '(1+(2*33))'],
        ['1+2', '(1+)', '()']),
    (
        dict(kind='lark', grammar='start: "a"{2,3}\n# a comment'), ['aa', 'aaa'], ['a', 'aaaa']),
    (
        dict(
            kind='lark',
            grammar='%llguidance {"no_forcing": false}\nstart: %json {"type":"integer"} ";"'),
        ['12;'],
        ['a;', '12']),
    (
        dict(kind='json_object'), ['{}', '{"a":[{}]}'], ['[]', '1', '"a"', '{}}'])]
@pytest.mark.parametrize('n', range(len(OTHERS)))
@pytest.mark.parametrize('kind', KINDS)
def test_other_kinds(n, kind):
    spec,valid,invalid = OTHERS[n]
    assert [t for t in valid if not accepts(guides(kind), spec, t)]==[]
    assert [t for t in invalid if accepts(guides(kind), spec, t)]==[]

def test_special_tokens():
    """No text is one, no pattern matches one; a grammar may name one;
    one that is not there is refused"""
    g = guides('bpe')
    start, = g.tokenizer.encode('<|im_start|>')
    text = spelt(g, '<|im_start|>')
    any_text = dict(kind='regex', pattern='.*')
    assert accepts(g, any_text, '', text)
    assert not accepts(g, any_text, '', [start])
    for name in '<|im_start|>',f'<[{start}]>':
        named = dict(kind='lark', grammar=f'start: {name} "x"')
        assert accepts(g, named, '', [start,*spelt(g, 'x')])
        assert not accepts(g, named, '', text+spelt(g, 'x'))
    with pytest.raises(RequestError):
        g.check(dict(kind='lark', grammar='start: <|no_such|> "x"'))

# Drawn at random

def allowed(g, mask):
    "Ids that a mask lets through"
    if mask is None:
        return list(range(g.vocab_size))
    return np.flatnonzero(unpack(mask, g.vocab_size)).tolist()

def draw(g, spec, seed, most=300):
    "A random answer, in a hurry to end; None if it did not"
    rng = random.Random(seed)
    guide = g.start(spec)
    out = []
    calm = {b for c in '"}],' for b in spelt(g, c)}
    while len(out)<most and not guide.ended:
        may = allowed(g, guide.mask())
        if set(may)&set(g.eos_ids) and rng.random()<.6:
            return out
        soon = [t for t in may if t in calm]
        may = [t for t in may if t not in g.eos_ids]
        t = rng.choice(soon if soon and rng.random()<.4 else may)
        out.append(t)
        guide.accept(t)
        assert not guide.error
    return out if guide.ended else None

def drawn(g, spec):
    "The first random answer that ends"
    return next(ids for seed in range(20) if (ids := draw(g, spec, seed, 400)) is not None)

def calls(parser, *tools, **more):
    "The guide of one call that must come"
    spec = dict(kind='tools', parser=parser, tools=[*tools], choice='required', parallel=False)
    return spec|more

def text_of(g, ids):
    return b''.join(map(g.tokenizer.token_bytes, ids)).decode(errors='replace')

leaf = st.sampled_from([
    {'type':'integer'}, {'type':'integer','minimum':-5,'maximum':17},
    {'type':'number'}, {'type':'boolean'}, {'type':'null'},
    {'type':'string','maxLength':4}, {'type':'string','pattern':'^[ab]{1,3}$'},
    {'enum':['x',1,None]}, {'const':'k'},
    {'type':'string','format':'date'}])
def nested(inner):
    props = st.dictionaries(st.sampled_from('abcd'), inner, max_size=3)
    return st.one_of(
        st.builds(
            lambda s,lo,n: {
                'type':'array', 'items':s, 'minItems':lo, 'maxItems':lo+n},
            inner,
            st.integers(0,1),
            st.integers(0,2)),
        st.lists(
            inner, min_size=1, max_size=3).map(lambda l: {'anyOf':l}),
        props.flatmap(
            lambda p: st.sets(st.sampled_from(sorted(p) or ['a'])).map(
                lambda r: {
                    'type':'object', 'properties':p, 'required':sorted(r&set(p)),
                    'additionalProperties':False})))

@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.recursive(leaf, nested, max_leaves=6), st.integers(0, 2**31),
    st.sampled_from(KINDS))
def test_whatever_is_drawn_under_a_schema_validates(schema, seed, kind):
    g = guides(kind)
    ids = draw(g, J(schema), seed)
    if ids is not None:
        Draft202012Validator(schema, format_checker=Draft202012Validator.FORMAT_CHECKER).validate(
            json.loads(text_of(g, ids)))

@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.recursive(
        st.none()|st.booleans()|st.integers(-99,99)
        |st.text(max_size=5)|st.floats(-1e6,1e6),
        lambda x: st.lists(x, max_size=3)
        |st.dictionaries(st.text(max_size=3), x, max_size=3),
        max_leaves=6),
    st.sampled_from([None,1]))
def test_whatever_is_json_is_accepted(value, indent):
    "As Python writes it, with and without line breaks; and what is cut short is not"
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    if (
        '\x7f' in text
        or any(ord(c)<32 for c in text.replace('\n',''))):
        return
    assert accepts(guides(), J(True), text)
    if isinstance(value, (dict,list,str)):
        assert not accepts(guides(), J(True), text[:-1])

@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.text(min_size=1, max_size=8).filter(
            lambda s: s.isprintable()),
        min_size=1,
        max_size=5),
    st.integers(0, 99),
    st.sampled_from(KINDS))
def test_choices(choices, seed, kind):
    g = guides(kind)
    spec = dict(kind='choice', choices=choices)
    assert text_of(g, draw(g, spec, seed) or spelt(g, choices[0])) in choices
    assert all(accepts(g, spec, c) for c in choices)

def bars(mask, token):
    "Does a mask bar a token?"
    return mask is not None and not mask[token//32]>>token%32&1

def follow(guide, tokens, ends, endless):
    "How many of `tokens` masks let through one after the other; nothing follows an end"
    for k,t in enumerate(tokens):
        if bars(guide.mask(), t):
            return k
        guide.accept(t)
        if t in ends and not guide._marks and not endless:
            return k+1
    return len(tokens)

@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.integers(0, 299), max_size=12),
    st.lists(st.integers(0, 299), max_size=6))
def test_validate_says_what_masks_say(say, draft):
    "Whatever was said before, free text or not, and it changes nothing"
    g = guides()
    for spec in (
        J({'type':'object'}, after='=', budget=9), dict(kind='free', after='!', budget=3),
        J(True), dict(kind='regex', pattern='.*')):
        guide = g.start(spec)
        for t in say:
            if t not in g.eos_ids and not bars(guide.mask(), t):
                guide.accept(t)  # whoever has ended says no more
        n,twin = guide.validate(draft),guide.fork()
        assert follow(twin, draft, g.eos_ids, spec['kind']=='free')==n
        assert guide.validate(draft)==n

# Hostile grammars

def chain(n, how):
    defs = {f'a{i}':how(f'#/$defs/a{i+1}') for i in range(n)}
    return {'$defs':defs|{f'a{n}':{'type':'string'}}, '$ref':'#/$defs/a0'}
def L(g): return dict(kind='lark', grammar=g)
def R(p): return dict(kind='regex', pattern=p)
BOMBS = {
    '10,000 levels': lambda: J(deep(10_000)),
    '10,000 lists': lambda: J({
        'enum':[deep(10_000, lambda x: [x])]}),
    '3,000 references': lambda: J(chain(
        3000, lambda r: {'type':'array','items':{'$ref':r}})),
    '9,000 references': lambda: J(chain(
        9000, lambda r: {'allOf':[{'$ref':r}]})),
    'a large enum': lambda: J({'enum':[f'value {i}' for i in range(90_000)]}),
    'an enum of objects': lambda: J({
        'enum':[
            {'a':i,'b':[i]*5}
            for i in range(9000)]}),
    '10,000 properties': lambda: J({
        'type':'object',
        'properties':{f'p{i}':{'type':'string'} for i in range(10_000)}}),
    'alternatives multiplied': lambda: J({
        'allOf':[
            {
                'anyOf':[
                    {'type':'object','properties':{f'a{i}{j}':{'type':'string'}}}
                    for j in range(10)]}
            for i in range(12)]}),
    'patterns crossed': lambda: J({
        'allOf':[{'type':'string','pattern':f'.*{c}.*{c}.{{50}}'} for c in 'abcdefghij']}),
    '10,000 parentheses': lambda: R('('*10_000+'a'+')'*10_000),
    'a long pattern': lambda: R('a'*100_000),
    'many rules': lambda: L(
        'start: r0\n'+'\n'.join(f'r{i}: "x" r{i+1}?' for i in range(20_000))+'\nr20000: "y"'),
    'deep rules': lambda: L('start: '+'('*10_000+'"a"'+')'*10_000),
    'doubling terminals': lambda: L(
        'start: A0\n'+'\n'.join(f'A{i}: A{i+1} A{i+1}' for i in range(30))+'\nA30: "x"'),
    '60,000 words': lambda: L('start: '+' | '.join(f'"word {i}"' for i in range(60_000))),
    'endless rules': lambda: L('start: start'),
    '30,000 choices': lambda: dict(kind='choice', choices=[f'{i}' for i in range(30_000)]),
    'two megabytes': lambda: dict(kind='choice', choices=['x'*2_000_000])}
class Asked:
    "The sandbox of guides, and how often it was asked"
    def __init__(self):
        self.box,self.n = _sandbox(),0
    def call(self, *args):
        self.n += 1
        return self.box.call(*args)

# Refused for their size
AT_THE_DOOR = (
    '10,000 levels', '10,000 lists', 'a large enum', 'a long pattern', '30,000 choices',
    'two megabytes')
# These overflow any stack, or take many seconds
FATAL = ('3,000 references', '9,000 references', '10,000 properties')
def assert_short(e):
    "A refusal that can be shown"
    assert e.status==400
    assert len(str(e))<500
    assert 'backtrace' not in str(e)

@pytest.mark.parametrize('bomb', BOMBS)
def test_bombs_go_off_elsewhere(bomb, monkeypatch):
    """What they cost is bounded by work: at the door it is counted, and the child has a second of
    its processor, and half a gigabyte. In this process nothing is compiled"""
    here = []
    inner = Guides._matcher
    def counted(self, spec):
        here.append(spec)
        return inner(self, spec)
    monkeypatch.setattr(Guides, '_matcher', counted)
    g = Guides(byte_tokenizer(), 300, [299], sandbox=Asked())
    box = g.sandbox.box
    killed = box.killed
    assert (box.seconds, box.memory)==(1., 512<<20)
    with pytest.raises(RequestError) as e:
        g.check(BOMBS[bomb]())
    assert_short(e.value)
    assert not here
    assert g.sandbox.n==(bomb not in AT_THE_DOOR)
    may = (1,) if bomb in FATAL else (0,1) if g.sandbox.n else (0,)
    assert box.killed-killed in may
    assert accepts(g, J({'type':'integer'}), '7')
    assert len(here)==1

TAME = {
    'a thousand million': R('[ab]a{1000000000}'),
    'a million': R('[xy](a{1000}){1000}'),
    'catastrophic': R('^(([a-z])+.)+[A-Z]([a-z])+$'),
    'nested plus': R('(a+)+b'),
    'exponential': R('.*a.{300}'),
    'both': R('(a|b)*a(a|b){30}'),
    'letters': R(r'(\w\d\s\p{L}){500}'),
    'a long string': J({'type':'string','minLength':10**6}),
    'a long list': J({
        'type':'array', 'items':{'type':'string'}, 'minItems':10**6,
        'maxItems':10**9}),
    'left recursion': L('start: start start | "a" | ""'),
    'ambiguous': L('start: a a a a a a a a\na: a a | "x"*'),
    'doubling rules': L(
        'start: a0\n'+'\n'.join(f'a{i}: a{i+1} a{i+1}' for i in range(30))+'\na30: "x"')}
def walk(guide, n=60):
    "Random tokens; how many there were"
    rng = random.Random(0)
    for k in range(n):
        may = [
            i for i in np.flatnonzero(unpack(guide.mask(), 300)).tolist()
            if i!=299]
        if not may:
            return k
        guide.accept(rng.choice(may))
    return n

@pytest.mark.parametrize('name', TAME)
def test_grammars_that_only_look_dangerous(name, monkeypatch):
    """They compile, and no mask on the way costs even half of the work that the library lets one
    cost: a step of the engine waits for it"""
    import llguidance
    from atlas.text import guide as module
    tight = module._limits()
    fuel = tight.step_lexer_fuel//2
    monkeypatch.setattr(
        module,
        '_limits',
        lambda: llguidance.LLParserLimits(
            verbose_errors=False, max_lexer_states=tight.max_lexer_states, step_lexer_fuel=fuel,
            step_max_items=tight.step_max_items//2))
    g = made('bytes')
    g.check(TAME[name])
    guide = g.start(TAME[name])
    assert walk(guide)
    assert not guide.error

def test_a_mask_that_is_too_much_work_fails_its_answer():
    """What only shows on the way: the library gives up, and the answer ends with a reason that is
    the request's"""
    guide = guides().start(R('((a{1,100}){1,100}){1,100}'))
    assert walk(guide)<60
    assert 'no further' in guide.error
    assert not guide.mask().any()
    assert typed_error(guide.code, guide.error).status==400

def test_threads_share_guides():
    g,bad = made('bytes'),[]
    def work(k):
        try:
            for i in range(12):
                assert accepts(g, J({'type':'integer','minimum':i%5,'maximum':9}), '7')
        except BaseException as e:
            bad.append(e)
    ts = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for t in ts:
        t.start()
    for t in ts:
        t.join()
    assert not bad
    assert len(g._known)==5

def test_few_stay_compiled():
    g = Guides(byte_tokenizer(), 300, [299], keep=4)
    for i in range(9):
        g.check(dict(kind='choice', choices=[f'c{i}']))
    assert len(g._known)==4
    assert accepts(g, dict(kind='choice', choices=['c0']), 'c0')

# Calls of tools: what the grammar lets through, the parser reads

TOOLS = [
    dict(
        name='get_weather',
        parameters={
            'type':'object',
            'properties':{
                'city':{'type':'string'},
                'days':{'type':'integer','minimum':1,'maximum':9},
                'unit':{'type':'string','enum':['C','F']},
                'exact':{'type':'boolean'}},
            'required':['city','days'],
            'additionalProperties':False}),
    dict(name='ping', parameters={'type':'object','properties':{},'additionalProperties':False}),
    dict(
        name='add',
        parameters={
            'type':'object',
            'properties':{'xs':{'type':'array','items':{'type':'integer'},'maxItems':3}},
            'required':['xs'],
            'additionalProperties':False})]
CALL_MARKS = (
    '<|channel|>', '<|message|>', '<|end|>', '<|start|>', '<|constrain|>', '<|call|>',
    '[TOOL_CALLS]', '[ARGS]', '<|"|>', '<|tool_call>', '<tool_call|>')

def call_guides(kind):
    if kind=='plain':
        return guides()
    if 'calls' not in _made:
        t = byte_level((*CALL_MARKS,'</think>','<end>'), 300)
        _made['calls'] = Guides(t, t.vocab_size, t.encode('<end>'))
    return _made['calls']

@pytest.mark.parametrize('kind', ('plain','special'))
@pytest.mark.parametrize('parser', FORMATS)
def test_calls_are_read_back(parser, kind):
    g = call_guides(kind)
    spec = dict(kind='tools', parser=parser, tools=TOOLS, choice='required', parallel=True)
    offered = [dict(type='function', function=t) for t in TOOLS]
    answers = [draw(g, spec, seed, 500) for seed in range(14)]
    texts = [text_of(g, ids) for ids in answers if ids is not None]
    assert len(texts)>2
    seen = set()
    for text in texts:
        got = parse_tools(parser, text, offered).calls
        assert got, text
        for c in got:
            tool = next(t for t in TOOLS if t['name']==c.name)
            Draft202012Validator(tool['parameters']).validate(json.loads(c.arguments))
            seen.add(c.name)
    assert len(seen)>1

@pytest.mark.parametrize('parser', FORMATS)
def test_one_call_only(parser):
    g = guides()
    spec = dict(
        kind='tools', parser=parser, tools=TOOLS[1:2], choice='required',
        parallel=False)
    drawn = [
        ids for seed in range(12)
        if (ids := draw(g, spec, seed, 400)) is not None]
    assert drawn
    called = [dict(type='function', function=TOOLS[1])]
    for ids in drawn:
        r = parse_tools(parser, text_of(g, ids), called)
        assert len(r.calls)==1

@pytest.mark.parametrize('parser', [p for p in FORMATS if p not in ('openai',)])
def test_calls_that_may_be(parser):
    "Any text until the mark; then a call, and nothing else"
    g = guides()
    spec = dict(kind='tools', parser=parser, tools=TOOLS, choice='auto', parallel=False)
    guide = g.start(spec)
    assert guide.mask() is None
    for t in spelt(g, 'Let me see: '):
        guide.accept(t)
    assert guide.mask() is None
    assert not guide.ended
    ids = drawn(g, spec|dict(choice='required'))
    assert guide.validate(ids)==len(ids)
    mark = guide._marks[0].words[0]
    assert guide.validate(spelt(g, mark.decode()+"\x00"))==len(mark)

TEXTS = [
    dict(
        name='f',
        parameters={
            'type':'object',
            'properties':{
                's':{'type':'string','minLength':2,'maxLength':5},
                'p':{'type':'string','pattern':'^[a-c]+$'},
                'd':{'type':'string','format':'date'},
                'n':{
                    'anyOf':[{'type':'string','maxLength':3},{'type':'null'}]}},
            'required':['s','p','d','n'],
            'additionalProperties':False})]
@pytest.mark.parametrize('kind', ('plain','special'))
@pytest.mark.parametrize('parser', FORMATS)
def test_strings_of_calls_are_held_to_their_schema(parser, kind):
    "Length, pattern, format and null, whether a format quotes its strings or not"
    g,n = call_guides(kind),0
    called = [dict(type='function', function=TEXTS[0])]
    for seed in range(12):
        ids = draw(
            g,
            dict(kind='tools', parser=parser, tools=TEXTS, choice='required', parallel=False),
            seed,
            400)
        if ids is None:
            continue
        (c,) = parse_tools(parser, text_of(g, ids), called).calls
        n += 1
        Draft202012Validator(
            TEXTS[0]['parameters'],
            format_checker=Draft202012Validator.FORMAT_CHECKER).validate(json.loads(c.arguments))
    assert n>2

@pytest.mark.parametrize('parser', ['glm45','pythonic'])
def test_what_a_call_cannot_be_held_to_is_refused(parser):
    parameters = {
        'type':'object', 'properties':{'a':{'type':'string'}},
        'patternProperties':{'^x':{'type':'integer'}}}
    odd = calls(parser, dict(name='f', parameters=parameters), parallel=True)
    with pytest.raises(RequestError, match='patternProperties') as e:
        guides().check(odd)
    assert e.value.param=='tools'
    guides().check(odd|dict(strict=False))
    no = dict(name='f', parameters={'properties':{'a':{'not':{}}}})
    with pytest.raises(RequestError, match='not'):
        guides().check(calls(parser, no, parallel=True))

ODD_CHARS = list(' -.:/\\"\'<>{}[](),=|$#@&;\n\t')+['é','｜','\x01','🙂']
def only(props):
    "An object with these members, all of them, and no others"
    return {
        'type':'object', 'properties':props, 'required':list(props),
        'additionalProperties':False}

def oddly_named(n):
    "Tools where a name is odd: their own, that of a parameter, and that of something inside"
    number = {'type':'integer','minimum':0,'maximum':9}
    yield dict(name=n, parameters=only({'k':number}))
    yield dict(name='f', parameters=only({n:number}))
    yield dict(name='f', parameters=only({'k':only({n:number})}))

def read_back(parser, tool, text):
    "The one call in a text has the tool's name, and arguments that follow its schema"
    (c,) = parse_tools(parser, text, [dict(type='function', function=tool)]).calls
    assert c.name==tool['name'], text
    check = Draft202012Validator.FORMAT_CHECKER
    follows = Draft202012Validator(tool['parameters'], format_checker=check)
    follows.validate(json.loads(c.arguments))

@pytest.mark.parametrize('parser', FORMATS)
def test_odd_names_are_read_back_or_refused(parser):
    g = guides()
    read = 0
    names = [f'a{c}b' for c in ODD_CHARS]+['1a',' a','a ']
    for tool in (tool for n in names for tool in oddly_named(n)):
        spec = calls(parser, tool)
        try:
            g.check(spec)
        except RequestError as e:
            assert e.param=='tools'
            assert ' name ' in str(e)
            continue
        read_back(parser, tool, text_of(g, drawn(g, spec)))
        read += 1
    assert read>30

DEFS = {
    'word':{'type':'string','pattern':'^[a-z0-9]+$'},
    'tree':{
        'type':'object',
        'properties':{
            'v':{'type':'integer'},
            'next':{'allOf':[{'$ref':'#/$defs/tree'}],'description':'as old pydantic writes it'}},
        'required':['v'],
        'additionalProperties':False}}
ODD = {
    'no type, a pattern': {'pattern':'^[ab]+$'},
    'no type, a minimum': {'minimum':3},
    'a type, and alternatives': {
        'type':'string',
        'anyOf':[{'maxLength':2},{'minLength':4,'maxLength':5}]},
    'an empty list': {'type':'array','items':False},
    'words beside a reference': {'$ref':'#/$defs/word','maxLength':3},
    'words beside a reference of one': {
        'allOf':[{'$ref':'#/$defs/word'}], 'minLength':2, 'maxLength':3},
    'references in a tree': {'$ref':'#/$defs/tree'},
    'a text or a list': {
        'anyOf':[
            {'type':'string'},
            {'type':'array','items':{'type':'integer'},'maxItems':2}]},
    'a text or large': {'anyOf':[{'type':'string'},{'type':'integer','minimum':1000}]},
    'a text or an object': {
        'type':['string','object'], 'properties':{'a':{'type':'integer'}},
        'required':['a'], 'additionalProperties':False},
    'values that look alike': {'enum':['1',2,None,'null','true',True,'[1]','x']},
    'values of one type': {'type':'string','enum':['a',1,'1']},
    'a text that looks like a number': {'type':'string','enum':['1','null','true']},
    'a day': {'anyOf':[{'type':'string','format':'date'},{'type':'null'}]},
    'one number': {'const':2},
    'one word': {'const':'ab'},
    'properties without a type': {
        'properties':{'a':{'type':'integer'}}, 'required':['a'], 'additionalProperties':False},
    'items without a type': {'items':{'type':'integer'},'maxItems':3}}
@pytest.mark.parametrize('case', ODD)
def test_odd_schemas_of_tools_are_followed(case):
    "Whatever is drawn, the parser reads what the schema says, which it does by types alone"
    g = guides()
    params = {
        'type':'object', 'properties':{'p':ODD[case],'never':False},
        'required':['p'], 'additionalProperties':False, '$defs':DEFS}
    tool = dict(name='f', parameters=params)
    n = 0
    for parser in ('hermes','qwen3_coder','glm45','deepseek_v32','pythonic','gemma4'):
        said = [draw(g, calls(parser, tool), seed, 400) for seed in range(12)]
        for text in (text_of(g, ids) for ids in said if ids is not None):
            if re.search(r'\d[eE][+-]?\d{3}', text):
                continue  # a number that no float holds
            read_back(parser, tool, text)
            n += 1
    assert n>20

NOT_OF_CALLS = {
    'references that differ': {'$ref':'#/$defs/word','type':'integer'},
    'rules for the same properties': {
        'allOf':[{'type':'object','properties':{'a':{}}}], 'additionalProperties':False},
    'alternatives of an object': {
        'type':'object',
        'properties':{'a':{}},
        'anyOf':[{'required':['a']},{'required':['b']}]}}
@pytest.mark.parametrize('case', NOT_OF_CALLS)
def test_odd_schemas_of_tools_that_are_refused(case):
    tool = dict(
        name='f',
        parameters={
            'type':'object', 'properties':{'p':NOT_OF_CALLS[case]}, 'required':['p'],
            '$defs':DEFS})
    with pytest.raises(RequestError) as e:
        guides().check(dict(
            kind='tools', parser='gemma4', tools=[tool], choice='required'))
    assert e.value.status==400
    assert e.value.param=='tools'

def test_arguments_are_an_object():
    guides().check(dict(
        kind='tools',
        parser='qwen3_coder',
        tools=[dict(name='f', parameters={'type':True})],
        choice='required',
        strict=False))
    for parser in ('qwen3_coder','pythonic'):
        with pytest.raises(RequestError):
            guides().check(dict(
                kind='tools',
                parser=parser,
                tools=[dict(name='f', parameters={'$ref':'#/$defs/word','$defs':DEFS})],
                choice='required'))

def test_leap_days_can_be_said_in_calls():
    tool = dict(
        name='f',
        parameters={
            'type':'object',
            'properties':{'d':{'type':'string','format':'date'}},
            'required':['d']})
    def said(day):
        return accepts(
            guides(),
            dict(
                kind='tools', parser='glm47', tools=[tool], choice='required', parallel=False),
            f'<tool_call>f<arg_key>d</arg_key><arg_value>{day}</arg_value></tool_call>')
    assert said('2024-02-29')
    assert not said('2023-02-29')

@pytest.mark.parametrize('choice', ['required','auto'])
def test_a_call_may_end_a_thought(choice):
    "Where a parser takes a mark for the end of a thought, the guide of calls begins there"
    g = guides()
    tools = dict(
        kind='tools', parser='hermes', tools=TOOLS, after='</think>', early=['<tool_call>'],
        choice=choice)
    rest = '\n{"name": "ping", "arguments": {}}\n</tool_call>'
    assert accepts(g, tools, 'hm<tool_call>'+rest)
    assert accepts(g, tools, 'hm</think><tool_call>'+rest)
    assert not accepts(g, tools, 'hm<tool_call>{}')

def test_a_call_cannot_end_another_guides_wait():
    g = guides()
    plain = J({'type':'integer'}, after='</think>', early=['<tool_call>'])
    assert accepts(g, plain, 'hm</think>7')
    assert g.start(plain).validate(spelt(g, 'hm<tool_call>'))==2+len('<tool_call')

def test_a_free_answer_may_leap():
    g = guides()
    barred = g.start(dict(kind='free', after='</think>', early=['<tool_call>'], budget=3))
    for t in spelt(g, '<tool_call>'):
        mask = barred.mask()
        barred.accept(t if mask is None else allowed(g, mask)[0])
    free = g.start(dict(kind='free', after='</think>', early=['=='], budget=3))
    for t in spelt(g, '=='):
        free.accept(t)
    assert free.mask() is None
    assert not free._marks

@pytest.mark.parametrize('parser', [p for p in FORMATS if p not in ('openai','llama3_json')])
def test_a_format_or_a_call(parser):
    "Who asks for a format and offers tools gets the one or the other"
    g = guides()
    ping = TOOLS[1]
    spec = calls(parser, ping, choice='auto', format=J(only({'ok':{'type':'boolean'}})))
    assert accepts(g, spec, '{"ok": true}')
    assert not accepts(g, spec, 'Let me see')
    assert not accepts(g, spec, '{"ok": 1}')
    assert accepts(g, spec, '', drawn(g, calls(parser, ping)))
    with pytest.raises(RequestError) as e:
        g.check(spec|dict(format=J({'not':{}})))
    assert e.value.param=='response_format'

def test_a_format_or_a_call_of_harmony():
    g = call_guides('special')
    spec = dict(
        kind='tools', parser='openai', tools=TOOLS[1:2], choice='auto',
        format=J({'type':'integer'}), after=['<|channel|>final','<|message|>'],
        early=[' to=functions.'])
    def ids(text): return g._exactly(text)
    assert accepts(g, spec, '', ids('<|channel|>final<|message|>7'))
    assert not accepts(g, spec, '', ids('<|channel|>final<|message|>x'))
    assert not accepts(g, spec, '', ids('<|channel|>final<|message|> to=functions.'))
    assert accepts(
            g, spec, '',
            ids('<|channel|>commentary to=functions.ping <|constrain|>json<|message|>{}'))
    assert not accepts(g, spec, '', ids('<|channel|>commentary to=functions.pong'))

NODE = {
    'type':'object', 'properties':{c:{'$ref':'#/$defs/n'} for c in 'abcdefghij'},
    'additionalProperties':False}
TREE = dict(name='f', parameters=only({'n':{'$ref':'#/$defs/n'}})|{'$defs':{'n':NODE}})
MANY = dict(name='f', parameters={
    'type':'object', 'properties':{'n':{'$ref':'#/$defs/a'}},
    '$defs':{'a':{'anyOf':[{'$ref':'#/$defs/a'}]*50+[{'type':'integer'}]}}})

@pytest.mark.parametrize('parser', FORMATS)
def test_definitions_that_refer_to_themselves(parser):
    "No exponential work, in whatever language values are written"
    guides().check(calls(parser, TREE, parallel=True))
    try:
        guides().check(calls(parser, MANY, parallel=True))
    except RequestError as e:
        assert len(str(e))<400

def test_a_tree_of_calls():
    assert accepts(guides(), calls('pythonic', TREE), '[f(n={"b": {"a": {}}})]')

def test_large_guides_do_not_stay_together():
    g = Guides(byte_tokenizer(), 300, [299])
    for i in range(6):
        g.check(dict(kind='choice', choices=[f'{i}'+'x'*500_000]))
    assert 1<=len(g._known)<=4

def test_unknown_formats_are_refused():
    with pytest.raises(RequestError, match='cannot be guided') as e:
        guides().check(dict(kind='tools', parser='nobody', tools=TOOLS))
    assert e.value.param=='tools'

# Whole engines

SMALL = (
    PRESETS['llama-3.1-8b']
    |dict(
        hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, intermediate_size=96, vocab_size=300, max_position_embeddings=512,
        bos_token_id=1, eos_token_id=299))
_nets = {}
def net(device):
    "A random model of 300 tokens, the same on both devices"
    if device not in _nets:
        PRESETS['toy-guides'] = SMALL
        try:
            with imagine('toy-guides', 'bf16') as ck:
                ck.kind = 'numbers'  # a card would make up its own
                _nets[device] = load_model(ck, Host() if device=='host' else Emulator(), 512)
        finally:
            del PRESETS['toy-guides']
    return _nets[device]
DEVICES = (
    'host',
    pytest.param(
        'emulator', marks=pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')))

def engine(
    device='host', seqs=4, blocks=60, g=None, ctx=200, **kw):
    m = net(device)
    host = device=='host'
    c = KVCache(
        m.c, m.device, blocks, 16, np.float32 if host else 'bf16', 2*seqs)
    s = Scheduler(c.pool, seqs, ctx, 64, **kw)
    stepper = HostStepper(m, c) if host else CardStepper(m, c, s)
    return Engine(s, stepper, g or guides())

def serve(e, *requests, each=lambda events: None):
    "Token ids and the last event of each request"
    out = {
        r.id:SimpleNamespace(ids=[], end=None, events=[])
        for r in requests}
    for r in requests:
        e.add(r)
    while e.has_work:
        each(events := e.step())
        for v in events:
            o = out[v.id]
            o.events.append(v)
            if v.token is not None:
                o.ids.append(v.token)
            assert o.end is None
            o.end = v if v.finish else None
    assert not e._samplers
    assert not e.cache.pool.used
    assert not getattr(e.stepper, 'lanes', None)  # which only a card has
    return out
def ask(i, spec=None, n=8, most=60, ignore=True, **kw):
    ids = tuple(np.random.default_rng(i).integers(0, 250, n).tolist())
    params = dict(temperature=0, max_tokens=most, ignore_eos=ignore)|kw
    return Request(f'r{i}', ids, SamplingParams(**params), eos_ids=(299,), guide=spec)
def said(o, g=None): return text_of(g or guides(), o.ids)

CARD = J({
    'type':'object',
    'properties':{
        'ok':{'type':'boolean'},
        'n':{'type':'integer','minimum':10,'maximum':99},
        's':{'type':'string','pattern':'^[a-d]{3}$'}},
    'required':['ok','n','s'],
    'additionalProperties':False,
    'x':0})
SPECS = [
    CARD,
    dict(kind='choice', choices=['alpha','beta','gamma delta']),
    dict(kind='regex', pattern='[a-z]{5}[0-9]{3}!'),
    dict(kind='lark', grammar='start: "<" /[a-z]{2,4}/ ">"'),
    dict(kind='choice', choices=['</a>'], after='=', budget=5)]

HOT = dict(temperature=1.2, seed=5, logprobs=2)
ALL = dict(
    temperature=.7, top_k=20, top_p=.9, presence_penalty=.5, repetition_penalty=1.2,
    seed=9, logit_bias={7:5.}, logprobs=1)
@pytest.mark.parametrize(
    'device,how',
    [
        ('host',dict(temperature=0)),
        ('host',HOT),
        ('host',ALL),
        *(
            pytest.param('emulator', how, marks=DEVICES[1].marks)
            for how in (dict(temperature=0),ALL))])
def test_answers_follow_their_guides(device, how):
    "Alone and in company, and company changes nothing; who has no guide does not notice"
    host = device=='host'
    guided = [ask(i, s, most=60 if host else 14, **how) for i,s in enumerate(SPECS)]
    reqs = [*guided, ask(9, None, most=14, **how)]
    got = serve(engine(device), *reqs)
    for r in reqs if host else reqs[1::4]:
        o = got[r.id]
        alone = serve(engine(device), r)[r.id]
        assert (o.ids, o.end.finish)==(alone.ids, alone.end.finish), r.id
        if r.guide and 'after' not in r.guide and o.end.finish=='stop':
            assert accepts(guides(), r.guide, said(o))
        if r.guide is None:
            assert len(o.ids)==14
        if how.get('logprobs'):
            assert_told(o, how['logprobs'])
    assert_as_asked(got)

def assert_told(o, n):
    "Every token has a log-probability, and the `n` likeliest"
    for v in o.events:
        if v.token is not None:
            assert np.isfinite(v.logprob)
            assert len(v.top)==n

def assert_as_asked(got):
    "Answers look as their guides say"
    if got['r0'].end.finish!='length':
        assert json.loads(said(got['r0']))['n'] in range(10, 100)
    assert said(got['r1']) in SPECS[1]['choices']
    assert said(got['r2'])[5:8].isdigit()
    assert [got[f'r{i}'].end.finish for i in (1,2,3)]==['stop']*3
    assert said(got['r4']).endswith('=</a>')

@pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')
def test_both_devices_choose_the_same():
    """The same logits and the same masks, greedy and drawn: the card's sampler and its twin agree
    on every token of an answer"""
    from atlas.cuda.sample import SampleTable,sample_rows
    card = Emulator()
    rng = np.random.default_rng(1)
    table = SampleTable(card, 3, 300)
    states = three_states()
    for i,s in enumerate(states):
        table.set(i, s)
    for _ in range(9):
        x = rng.standard_normal((3,300)).astype('f4')
        for i,s in enumerate(states):
            table.allow(i, s.allowed())
        ids = card.empty(3, 'int32')
        sample_rows(card.upload(x), table, ids, greedy=False)
        want = sample(x, [s.row() for s in states]).ids
        assert card.download(ids).tolist()==want.tolist()
        assert (want>=0).all()
        for s,w in zip(states, want):
            s.add(int(w))

def three_states():
    "Three answers in the making: greedy, drawn, and drawn with penalties"
    ps = [
        SamplingParams(temperature=0), SamplingParams(temperature=1., seed=3),
        SamplingParams(temperature=1.5, seed=4, top_p=.8, frequency_penalty=.3, min_tokens=3)]
    specs = SPECS[2],dict(kind='json_object'),SPECS[4]
    started = map(guides().start, specs)
    return [SampleState(p, [1], 300, eos_ids=[299], guide=g) for p,g in zip(ps, started)]

@pytest.mark.parametrize('device', DEVICES)
def test_preempted_answers_go_on(device):
    seqs = 4 if device=='host' else 3
    specs = [
        dict(kind='regex', pattern='([a-z]{5} ){5}[0-9]'),
        dict(kind='regex', pattern='[0-9]{33}'), None, SPECS[4]]
    reqs = [
        ask(i, s, n=60, most=34, temperature=.9, seed=i) for i,s in enumerate(specs)]
    plain = serve(engine(device, seqs), *reqs)
    e = engine(device, seqs, blocks=13, overcommit=4.)
    tight = serve(e, *reqs)
    assert e.scheduler.totals['preemptions']>0
    for r in reqs[:2]:
        assert accepts(guides(), r.guide, said(tight[r.id]))
    def told(outs): return {k:(o.ids,o.end.finish) for k,o in outs.items()}
    assert told(plain)==told(tight)

class Fails:
    "A guide whose library gives up after two tokens"
    def __init__(self, inner):
        self.inner = inner
        self.n = 0
        self.error = None
        self.code = 'guide_failed'
    ended = property(lambda self: False)
    def mask(self): return self.inner.mask() if self.n<2 else self.fail('it broke')
    def accept(self, t):
        self.n += 1
        self.inner.accept(t)
    def fail(self, why):
        self.error = why
        return np.zeros(10, np.uint32)

@pytest.mark.parametrize('device', DEVICES)
def test_a_guide_that_fails_fails_its_request(device):
    g = guides()
    other = SimpleNamespace(
        start=lambda s: Fails(g.start(dict(kind='json_object'))) if s=='bad'
        else g.start(s))
    got = serve(
        engine(device, g=other), ask(0, 'bad'),
        ask(1, SPECS[1]), ask(2, None, most=9))
    end = got['r0'].end
    assert (end.finish,end.code,end.error)==('error','guide_failed','it broke')
    assert len(got['r0'].ids)==2
    # clients send a 500 again by themselves
    assert typed_error('guide_failed', 'it broke').status==400
    assert said(got['r1']) in SPECS[1]['choices']
    assert len(got['r2'].ids)==9

@pytest.mark.parametrize('device', DEVICES)
def test_ends(device):
    "An end token where one may come, the guide's own end where nothing else may, and the length"
    def regex(p): return dict(kind='regex', pattern=p)
    ab = dict(kind='choice', choices=['ab'])
    got = serve(
        engine(device),
        ask(0, regex('[ab]*'), ignore=False, logit_bias={299:100.}),
        ask(1, SPECS[1], ignore=False),
        ask(2, regex('[ab]{90}')),
        ask(3, ab, min_tokens=40, ignore=False),
        ask(4, regex('a?'), min_tokens=9, stop_token_ids=(299,), temperature=0))
    token,own,length = got['r0'],got['r1'],got['r2']
    choice,short = got['r3'],got['r4']
    for o in (token,own,choice,short):
        assert o.end.finish=='stop'
    assert token.ids==[299] and token.end.token==299
    assert own.end.token is None
    assert length.end.finish=='length' and len(length.ids)==60
    assert said(choice)=='ab'
    assert said(short)=='a'

@pytest.mark.parametrize('device', DEVICES)
def test_nothing_is_left_to_choose(device):
    "`min_tokens` bars the end where the guide wants it"
    got = serve(
        engine(device),
        ask(
            0, dict(kind='lark', grammar='start: "ab" <[298]>'), min_tokens=9,
            stop_token_ids=(298,)),
        ask(1, None, most=5))
    assert got['r0'].end.code=='guide_failed'
    assert 'min_tokens' in got['r0'].end.error
    assert len(got['r1'].ids)==5

@pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')
def test_a_card_loses_nothing_without_guides():
    """With guides at hand but none in the plan, a step is always in the air;
    with one in it, none is; and after it, again"""
    e = engine('emulator')
    airborne = []
    serve(e, ask(0, None, most=20), each=lambda _: airborne.append(e.flying is not None))
    assert airborne.count(True)==19
    e.add(ask(1, None, most=40))
    for _ in range(5):
        e.step()
    assert e._steady(1)
    e.add(ask(2, SPECS[1]))
    for _ in range(2):
        e.step()
    assert not e._steady(1)
    assert e.flying
    while 'r2' in e._samplers:
        e.step()
    e.step()
    e.step()
    assert e._steady(1)
    while e.has_work:
        e.step()

@pytest.mark.parametrize('device', DEVICES)
def test_aborts(device):
    e = engine(device)
    reqs = [
        ask(i, s)
        for i,s in enumerate([*SPECS[:3], None])]
    for r in reqs:
        e.add(r)
    for _ in range(3):
        e.step()
    assert [v.finish for v in e.abort('r0')+e.abort('r3')]==['abort']*2
    left = []
    while e.has_work:
        left += e.step()
    assert {v.id for v in left if v.finish}=={'r1','r2'}
    assert not e._samplers
    assert not e.cache.pool.used

def test_guides_are_refused_at_the_door():
    e = engine()
    e.guides = None
    with pytest.raises(RequestError, match='tokenizer'):
        e.add(ask(0, SPECS[0]))
    e = engine()
    for bad in (
        dict(kind='xml'), dict(kind='regex', pattern='('),
        J({'type':'strin'}), J(deep(10_000))):
        with pytest.raises(RequestError):
            e.add(ask(0, bad))
    assert not e.has_work
    assert not e._samplers

# The door

@pytest.fixture(scope='module')
def llm():
    PRESETS['toy-guides'] = SMALL
    try:
        return LLM('toy-guides', 'cpu', load_format='dummy', max_seq_len=300)
    finally:
        del PRESETS['toy-guides']

HOTTER = SamplingParams(temperature=1., seed=1, max_tokens=120, n=4)

def test_generate(llm):
    many = llm.generate('A:', replace(HOTTER, n=20), guide=SPECS[1]).choices
    assert {o.text for o in many}<=set(SPECS[1]['choices'])
    digits = dict(kind='regex', pattern='[0-9]{4}')
    for x in llm.generate(['one','two'], HOTTER, guide=digits):
        for o in x.choices:
            assert re.fullmatch('[0-9]{4}', o.text)
            assert o.finish_reason=='stop'
            assert o.usage['completion_tokens']==4
    assert not llm.engine.has_work
    assert not llm._boxes

def test_other_ways_to_generate(llm):
    stream = llm.stream('x', replace(HOTTER, n=1), guide=SPECS[1])
    assert ''.join(d.text for d in stream) in SPECS[1]['choices']
    talk = llm.chat([dict(role='user', content='hi')], HOTTER, guide=SPECS[1])
    assert talk.text in SPECS[1]['choices']
    assert llm.generate('x', HOTTER).text!=llm.generate('x', HOTTER, guide=SPECS[1]).text

def test_a_guide_that_generate_refuses(llm):
    with pytest.raises(RequestError, match='look-around'):
        llm.generate('x', HOTTER, guide=dict(kind='regex', pattern='(?!a)b'))
    assert not llm.engine.has_work
    assert not llm._boxes

def test_a_stop_string_and_the_end_of_a_guide_in_one_step(llm):
    "The answer has ended when the engine says so a second time"
    p = SamplingParams(temperature=1., seed=1, max_tokens=20, stop='b', n=2)
    ab = dict(kind='choice', choices=['ab'])
    for o in llm.generate(['one','two'], p, guide=ab):
        assert len(o.choices)==2
        for x in o.choices:
            assert (x.text,x.finish_reason)==('a','stop')
            assert len(x.token_ids)==2
    *_,last = llm.stream('x', replace(p, n=1), guide=ab)
    assert (last.finish,last.stop)==('stop','b')
    assert not llm.engine.has_work
    assert not llm._boxes

@pytest.mark.parametrize('budget', [0,1,7,20])
def test_thinking_budget(llm, budget):
    p = SamplingParams(temperature=1., seed=2, max_tokens=60, ignore_eos=True)
    wait = dict(after='</think>', budget=budget)
    o = llm.generate('Q', p, guide=dict(kind='choice', choices=['yes','no'])|wait)
    forced = slice(budget, budget+8)
    assert o.token_ids[forced]==llm.tokenizer.encode('</think>')
    assert o.text.rpartition('</think>')[2] in ('yes','no')
    assert len(o.token_ids)<=budget+11
    free = llm.generate('Q', p, guide=dict(kind='free')|wait)
    assert free.token_ids[forced]==o.token_ids[forced]
    assert len(free.token_ids)==60

def test_no_tokenizer():
    from pathlib import Path
    m = LLM(str(Path(__file__).parent/'data'/'smollm2-tied'), device='cpu', max_seq_len=64)
    with pytest.raises(RequestError, match='no tokenizer'):
        m.generate([1,2], guide=SPECS[1])

def test_a_space_at_the_beginning_is_kept():
    "SentencePiece drops the space before a text; one that a guide asked for is no such space"
    from atlas.text.deltas import gather
    from atlas.text.generation import ChoiceReader
    from atlas.ground.requests import Event
    g = guides('pieces')
    ids = spelt(g, ' yes')
    out = {}
    for exact in (False,True):
        reader = ChoiceReader(g.tokenizer.detokenizer(continuing=exact), SamplingParams())
        deltas = reader.feed([Event('r', t) for t in ids])
        out[exact] = gather(deltas).content
    assert out=={False:'yes', True:' yes'}
    assert accepts(g, dict(kind='choice', choices=[' yes']), ' yes')
