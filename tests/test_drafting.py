"""Who drafts, asked for wrongly or oddly: heard before a weight is read, with what to do about it;
or a clean fall-back, and it is said."""
import json,re,shutil
from pathlib import Path
import pytest
import atlas.engine.loading as loading
from atlas.card.device import Host,Memory
from atlas.ground.core import AtlasError,OutOfMemoryError,RequestError,SourceError,UnsupportedError
from atlas.ground.options import EngineConfig
from atlas.use.llm import LLM

DATA = Path(__file__).parent/'data'
PLAIN,HEAD = str(DATA/'smollm2-tied'),str(DATA/'qwen35-moe-stacked')
GEMMA,ASSISTANT = str(DATA/'gemma4-moe'),str(DATA/'gemma4-assistant')
OTHER = str(DATA/'qwen3-tied-wide')

def load(name, **kw): return LLM(name, 'cpu', max_seq_len=128, max_num_seqs=2, show=False, **kw)

@pytest.fixture
def reads(monkeypatch):
    "Models whose weights were read, one after the other"
    seen,real = [],loading.load_model
    def counted(ck, *args, **kw):
        seen.append(ck.path.name)
        return real(ck, *args, **kw)
    monkeypatch.setattr(loading, 'load_model', counted)
    return seen

@pytest.fixture
def opened(monkeypatch):
    "Models whose files were opened"
    seen,real = [],loading.open_model
    def counted(o, *args):
        seen.append(Path(o.model).name)
        return real(o, *args)
    monkeypatch.setattr(loading, 'open_model', counted)
    return seen

# -- before a weight is read ---------------------------------------------------------------------

def refused(name, **kw):
    with pytest.raises(AtlasError) as e:
        load(name, **kw)
    assert str(e.value).count('\n')<2 and e.value.hint
    return e.value

def test_another_vocabulary(reads):
    e = refused(PLAIN, draft_model=OTHER)
    assert isinstance(e, UnsupportedError) and not reads
    assert e.param=='draft_model' and re.search('144 tokens .* 160', e.msg)
    assert 'Decoder' not in e.msg, 'names, and not what only we know'

def narrower(tmp_path):
    "An assistant for a target of another width"
    folder = tmp_path/'narrow'
    shutil.copytree(ASSISTANT, folder)
    c = json.loads((folder/'config.json').read_text())
    c['backbone_hidden_size'] += 64
    (folder/'config.json').write_text(json.dumps(c))
    return str(folder)

def test_an_assistant_of_another_width(reads, tmp_path):
    e = refused(GEMMA, draft_model=narrower(tmp_path))
    assert isinstance(e, UnsupportedError) and not reads
    assert e.param=='draft_model' and 'made for a width of' in e.msg

def test_an_assistant_of_other_layers(reads):
    e = refused(str(DATA/'gemma4-dense'), draft_model=ASSISTANT)
    assert isinstance(e, UnsupportedError) and not reads
    assert e.param=='draft_model' and 'does not fit' in e.msg

@pytest.mark.parametrize('draft,error', [('nothing',SourceError),('qwen3-8b',SourceError)])
def test_no_such_draft_model(reads, draft, error):
    e = refused(PLAIN, draft_model=draft)
    assert isinstance(e, error) and not reads
    assert e.param=='draft_model' and e.msg.startswith('The draft model cannot be opened')

def test_no_head(reads):
    e = refused(PLAIN, speculative='mtp')
    assert isinstance(e, UnsupportedError) and e.param=='speculative' and not reads

def with_memory(monkeypatch, free):
    monkeypatch.setattr(Host, 'memory', lambda self: Memory(1<<40, free))

def test_a_drafter_that_does_not_fit(reads, monkeypatch):
    "Beside its target, which fits by itself"
    with_memory(monkeypatch, 300<<20)
    load(PLAIN, kv_cache_memory=1<<20).close()
    assert reads==['smollm2-tied']
    reads.clear()
    monkeypatch.setattr(loading.host_words, 'weight_bytes', lambda *a, **kw: 151<<20)
    monkeypatch.setattr(loading.host_words, 'step_bytes', lambda *a: 0)
    e = refused(PLAIN, draft_model=PLAIN, kv_cache_memory=1<<20)
    assert isinstance(e, OutOfMemoryError) and not reads
    assert 'which drafts for it' in e.msg and '302 MiB' in e.msg

def test_caches_that_do_not_fit(reads, monkeypatch):
    "The draft model's beside the target's, beside the weights of both"
    cost = 1<<20
    monkeypatch.setattr(loading.host_words, 'weight_bytes', lambda *a, **kw: 50*cost)
    monkeypatch.setattr(loading.host_words, 'step_bytes', lambda *a: 0)
    monkeypatch.setattr(loading, 'token_bytes', lambda *a, **kw: 1<<14)
    import atlas.engine.cache as cache
    monkeypatch.setattr(cache, 'token_bytes', lambda *a, **kw: 1<<14)
    with_memory(monkeypatch, 103*cost) # Two caches of 128 tokens take 4 MiB
    e = refused(PLAIN, draft_model=PLAIN)
    assert isinstance(e, OutOfMemoryError) and not reads

def test_a_step_has_a_row_for_each_draft(monkeypatch):
    "And is as large as that of the larger model"
    seen = []
    def spy(config, tiles, rows, context):
        seen.append((config.family,rows,context))
        return 1
    monkeypatch.setattr(loading.host_words, 'step_bytes', spy)
    m = load(PLAIN, draft_model=PLAIN, num_speculative_tokens=3)
    assert seen==[(m.config.family,8,m.max_seq_len)]*2
    m.close()

def test_the_smaller_model_is_read_first(reads):
    load(GEMMA, draft_model=ASSISTANT).close()
    assert reads==['gemma4-assistant','gemma4-moe']

# -- said ----------------------------------------------------------------------------------------

SAID = [
    (HEAD, dict(speculative=True), 'mtp, 2 drafts'),
    (HEAD, dict(speculative=True, draft_model='never/opened'),
        "mtp, 2 drafts (the model's own head; "
        "draft_model='never/opened' is for speculative='draft')"),
    (HEAD, dict(speculative=True, ngram_most=6),
        "mtp, 2 drafts (ngram_most=6 is for speculative='ngram')"),
    (PLAIN, dict(speculative=True, ngram_most=6),
        'ngram, 4 drafts (the model has no head of its own)'),
    (PLAIN, dict(num_speculative_tokens=2, draft_vocab=9),
        "ngram, 2 drafts (the model has no head of its own; "
        "draft_vocab=9 is for speculative='draft')"),
    (PLAIN, dict(speculative=True, draft_model=PLAIN), 'draft, 3 drafts'),
    (PLAIN, dict(ngram_most=6), 'ngram, 4 drafts'),
]

@pytest.mark.parametrize('name,how,word', SAID, ids=[word for *_,word in SAID])
def test_it_is_said(reads, opened, name, how, word):
    "Who drafts, why, and what is of no use; a model that is of none is not opened"
    llm = load(name, **how)
    assert llm.speculative==str(llm.drafting)==word
    assert word in repr(llm)
    assert sorted(opened)==sorted(reads)
    llm.close()

def test_nothing_is_said_of_what_was_not_asked_for():
    llm = load(HEAD)
    assert llm.speculative is None and 'speculative' not in repr(llm)
    llm.close()

def test_looked_up_as_far_as_was_said():
    llm = load(PLAIN, speculative_config=dict(prompt_lookup_max=6))
    d = llm.engine.stepper.drafter
    assert (d.name,d.least,d.most)==('ngram',2,6)
    llm.close()

# -- refused at birth ----------------------------------------------------------------------------

WRONG = [
    (dict(speculative='draft'), 'draft_model', 'needs a model that drafts'),
    (dict(speculative='eagle'), 'speculative', 'expected True, False or one of'),
    (dict(speculative='mtp', ngram_most=6), 'ngram_most', 'has no use for ngram_most'),
    (dict(speculative='mtp', ngram_least=1), 'ngram_least', 'has no use for ngram_least'),
    (dict(draft_model='d', ngram_most=6), 'ngram_most', 'has no use for ngram_most'),
    (dict(speculative='ngram', draft_model='d'), 'draft_model', 'has no use for draft_model'),
    (dict(speculative='ngram', draft_vocab=9), 'draft_vocab', 'has no use for draft_vocab'),
    (dict(speculative='ngram', draft_quantization='fp8'), 'draft_quantization', 'has no use for'),
    *[(dict(num_speculative_tokens=n), 'num_speculative_tokens', 'from 1 to 7')
        for n in (0,8,99,-1,'x',True)],
]
CONFIG = [
    ('{', 'is no JSON'),
    ('{method:mtp}', 'in single quotes'),
    ('[]', 'expected an object such as'),
    ('{"method":"eagle3"}', 'There are mtp, ngram and draft_model'),
    ('{"method":"mtp","gamma":3}', 'has gamma'),
    ('{"num_speculative_tokens":2,"num_speculative_tokens":3}', 'num_speculative_tokens 2 times'),
    ('{"method":"mtp","prompt_lookup_max":6}', 'prompt_lookup_max'),
    ('{"method":"draft_model"}', 'needs a model that drafts'),
]

@pytest.mark.parametrize('how,param,said', WRONG, ids=[str(how) for how,*_ in WRONG])
def test_wrong_words_are_refused(how, param, said):
    with pytest.raises(RequestError, match=re.escape(said)) as e:
        EngineConfig('m', **how)
    assert e.value.param==param
    assert e.value.hint or 'expected' in e.value.msg

@pytest.mark.parametrize('text,said', CONFIG)
def test_wrong_configs_are_refused(text, said):
    with pytest.raises(RequestError, match=re.escape(said)) as e:
        EngineConfig('m', speculative_config=text)
    assert e.value.hint or 'expected' in e.value.msg

def test_twice_and_different():
    with pytest.raises(RequestError, match='is 3 beside it') as e:
        EngineConfig('m', num_speculative_tokens=3,
            speculative_config='{"num_speculative_tokens":2}')
    assert e.value.param=='speculative_config'
