"""Presets are data that strangers may edit: whatever stands in a file comes out as descriptions,
or as an error that names file, preset and key."""
import copy
from importlib.resources import files
import pytest
from hypothesis import given,settings,strategies as st
from atlas.ground.config import PRESETS,ModelConfig,check_preset,families
from atlas.ground.core import ConfigError,UnsupportedError
from atlas.ground.presets import Presets,read_presets

TOML = [p for p in files('atlas.model.families').iterdir() if p.name.endswith('.toml')]
FILES = {p.name:p.read_text(encoding='utf-8') for p in TOML}
OWN = {}  # preset: its file, and what stands there
for file,text in FILES.items():
    for name,d in read_presets(text, file).items():
        OWN[name] = file,d

def test_every_family_has_a_file_and_every_preset_a_family():
    assert sorted(FILES)==[f'{f.name}.toml' for f in families()]
    for n,(file,d) in OWN.items():
        family, = [f for f in families() if f'{f.name}.toml'==file]
        assert PRESETS[n]==d
        assert d['model_type'] in family.hf
        assert ModelConfig.preset(n).name==n

def refused(file, name, d):
    "What is said against a preset, or None"
    try:
        check_preset(file, name, d)
    except (ConfigError,UnsupportedError) as e:
        assert e.msg.startswith(f'{file}: {name}: '), e.msg
        assert e.param, e.msg
        return e

def keys(d, path=()):
    for k,v in d.items():
        yield (*path,k)
        if isinstance(v, dict):
            yield from keys(v, (*path,k))

def changed(d, path, fn):
    "`d` with `fn` applied to the table that holds the last key of `path`"
    d = at = copy.deepcopy(d)
    for k in path[:-1]:
        at = at[k]
    fn(at, path[-1])
    return d

@pytest.mark.parametrize('name', OWN)
def test_a_misspelt_key_is_named(name):
    "Each key, with a letter too many: something is missed, or nobody reads it, and is named"
    file,d = OWN[name]
    def misspell(at, k):
        at[k+'x'] = at.pop(k)
    for path in keys(d):
        e = refused(file, name, changed(d, path, misspell))
        assert e, path
        unread = 'nobody reads' in e.msg
        assert not unread or '.'.join(path)+'x' in e.msg, (path, e.msg)

ODD = [
    True, -1, 0, 1.5, 10**30, float('nan'), 'x', [],
    ['x'], {}, {'a':1}, {'rope_type':[]}]

@settings(max_examples=150, deadline=None)
@given(st.data())
def test_odd_values(data):
    name = data.draw(st.sampled_from(sorted(OWN)))
    file,d = OWN[name]
    odd = st.sampled_from(ODD)
    for _ in range(data.draw(st.integers(1, 3))):
        path = data.draw(st.sampled_from(list(keys(d))))
        def put(at, k):
            at[k] = data.draw(odd)
        d = changed(d, path, put)
        if not d:
            break
    refused(file, name, d)

WRONG = [
    '', '"', '=', '[', ']', '{', '\n', '#', '7', 'x', '.',
    '\x00']

@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(FILES)), st.data())
def test_a_damaged_file(file, data):
    "A character changed or lost anywhere: presets, or an error that names the file"
    text = FILES[file]
    i = data.draw(st.integers(0, len(text)-1))
    text = (
        text[:i]+data.draw(st.sampled_from(WRONG))
        +text[i+1:])
    try:
        found = read_presets(text, file)
        for name,d in found.items():
            check_preset(file, name, d)
    except (ConfigError,UnsupportedError) as e:
        assert e.msg.startswith(file)

def test_two_files_cannot_have_one_preset(tmp_path, monkeypatch):
    import atlas.ground.presets
    for n in 'ab':
        (tmp_path/f'{n}.toml').write_text('["one"]\nx = 1\n')
    monkeypatch.setattr(atlas.ground.presets, 'files', lambda package: tmp_path)
    presets = Presets('anywhere', lambda *a: None)
    with pytest.raises(ConfigError, match='b.toml: one: another file'):
        len(presets)

def test_presets_are_a_mapping_that_can_be_added_to(monkeypatch):
    n = len(PRESETS)
    monkeypatch.setitem(PRESETS, 'toy', PRESETS['smollm2-135m']|dict(num_hidden_layers=2))
    assert ModelConfig.preset('toy').num_layers==2
    assert len(PRESETS)==n+1
    assert 'toy' in PRESETS
    assert list(PRESETS)[-1]=='toy'
    monkeypatch.undo()
    assert 'toy' not in PRESETS
    assert len(PRESETS)==n
    with pytest.raises(ConfigError, match='No preset is called') as e:
        ModelConfig.preset('toy')
    assert 'smollm2-135m' in e.value.hint
