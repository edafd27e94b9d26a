"""Packed files of models: a start that reads one is the first start, bit for bit; what is not
that file is not used."""
import logging,os,shutil,subprocess,sys,threading
import numpy as np, pytest
from pathlib import Path
from atlas.card.emulator import Emulator,find_cxx
from atlas.engine import loading
from atlas.ground import packed
from atlas.ground.core import CheckpointError,RequestError
from atlas.ground.packed import PackedFile,flatten,part_of
from atlas.ground.config import PRESETS
from atlas.ground.weights import Checkpoint,open_checkpoint
from atlas.model.model import imagine,load_model
from atlas.model.stored import Store
from atlas.ops.sample import SamplingParams
from atlas.use.llm import LLM
from helpers.checkpoints import gguf_file
from helpers.waiting import WAIT

pytestmark = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')
DATA = Path(__file__).parent/'data'
MODELS = sorted(p.name for p in DATA.iterdir() if (p/'config.json').exists())

def arrays(m):
    "The bytes of all arrays of a model's weights, and what they are"
    found,objects = flatten(m.weights())
    return (
        {n: (
             str(a.dtype),a.shape,
             np.asarray(a).tobytes())
         for n,a in found.items()},
        objects)

def read(path, folder, parts=('','vision','mtp'), **kw):
    "The model of a checkpoint, and its store"
    s = Store(
        folder, 'm',
        dict(model=str(path), kw=sorted(kw.items())),
        {})
    with open_checkpoint(path) as ck:
        return load_model(ck, Emulator(), 64, False, parts, store=s, **kw),s

def kept(path, folder, monkeypatch, **kw):
    "Two loads of a checkpoint, the second without it"
    a,s = read(path, folder, **kw)
    s.save(a)
    def forbidden(*_):
        raise AssertionError('A tensor of the checkpoint is read')
    with monkeypatch.context() as m:
        m.setattr(Checkpoint, 'read', forbidden)
        b,t = read(path, folder, **kw)
    assert t.fresh and not s.fresh
    assert arrays(a)==arrays(b)
    return a,b

@pytest.mark.parametrize('name', MODELS)
def test_the_second_load_is_the_first(name, tmp_path, monkeypatch):
    "Every family and format: the same arrays, joined banks and factors of rows among them"
    a,b = kept(DATA/name, tmp_path, monkeypatch)
    def joined(m):
        return [getattr(l, 'joined', None) for x in m.layers for l in x.parts()]
    assert joined(a)==joined(b)

@pytest.mark.parametrize(
    'how',
    [dict(quantization='nvfp4'),
     dict(quantization='fp8', head='fp8'),
     dict(packed=True)])
@pytest.mark.parametrize('name', ['qwen35-moe-stacked','qwen3-vl','smollm2-tied'])
def test_stored_anew(name, how, tmp_path, monkeypatch):
    kept(DATA/name, tmp_path, monkeypatch, **how)

@pytest.mark.parametrize('quant', ['Q8_0','Q4_0','F32'])
def test_gguf(quant, tmp_path, monkeypatch):
    gguf_file(tmp_path/'m.gguf', quant=quant)
    kept(tmp_path/'m.gguf', tmp_path/'packed', monkeypatch)

SHARED = dict(hidden_size=64, num_hidden_layers=4, num_attention_heads=2, num_key_value_heads=1,
    head_dim=32, vocab_size=256, linear_num_key_heads=1, linear_num_value_heads=2,
    linear_key_head_dim=32, linear_value_head_dim=32, num_experts=4, num_experts_per_tok=2,
    moe_intermediate_size=32, shared_expert_intermediate_size=32, vision_config=None,
    image_token_id=None, video_token_id=None)

@pytest.mark.parametrize('weights', ['nvfp4','fp8','bf16','mxfp4','int4'])
def test_banks_that_were_joined(weights, tmp_path, monkeypatch):
    "A shared expert that is the last of its bank is written there, and stays there"
    monkeypatch.setitem(PRESETS, 'shared', PRESETS['qwen3.6-35b-a3b']|SHARED)
    def load(folder=tmp_path):
        s = Store(folder, 'm', dict(), {})
        with imagine('shared', weights) as ck:
            return load_model(ck, Emulator(), 64, False, ('','mtp'), store=s),s
    a,s = load()
    s.save(a)
    b,t = load()
    assert t.fresh and arrays(a)==arrays(b)
    before,after = mixtures_of(a),mixtures_of(b)
    assert len(before)==len(after)==5
    for l in before+after:
        assert l.joined and l.experts.gate_up_proj.experts==5
        assert l.shared.gate_up_proj.weight is None
    assert [l.then is None for l in before]==[l.then is None for l in after]

def mixtures_of(m):
    "Layers of experts, those of the draft head too"
    layers = (*m.layers,*m.mtp.layers)
    return [part for l in layers for part in l.parts() if hasattr(part, 'experts')]

def test_filled_in_place(tmp_path):
    m,s = read(DATA/'qwen35-moe-stacked', tmp_path)
    s.save(m)
    was = arrays(m)
    for a in flatten(m.weights())[0].values():
        a.reshape(-1).view('uint8')[:] = 0xA5
    assert s.usable() and arrays(m)!=was
    assert s.reload(m)>=sum(
        len(b)
        for _,_,b in was[0].values())
    assert arrays(m)==was
    damage(s.path)
    with pytest.raises(CheckpointError):
        s.reload(m)

def damage(path):
    "A bit of an array, flipped"
    raw = bytearray(path.read_bytes())
    with PackedFile(path) as f:
        raw[f.layout.start+11] ^= 1
    path.write_bytes(raw)

# -- by the engine -------------------------------------------------------------------------------

@pytest.fixture
def model(tmp_path):
    "A model that may be changed, and a folder for packed files"
    return shutil.copytree(DATA/'qwen3-moe-ct-nvfp4', tmp_path/'model'),tmp_path/'packed'

def start(model, **kw):
    "An engine of it, when its packed file is written"
    path,folder = model
    how = dict(
        max_seq_len=128, max_num_seqs=1, chunk=64,
        cache_packed=str(folder), show=False)
    llm = LLM(str(path), Emulator(), **how|kw)
    for s in llm._stores:
        s.wait()
    return llm

def ended(llm):
    "Which of its models came from packed files; it is closed"
    fresh = [s.fresh for s in llm._stores]
    llm.close()
    return fresh

def test_the_same_answers(model):
    a,p = start(model),SamplingParams(max_tokens=6, temperature=0)
    said = a.generate([5,6,7,8], p).token_ids
    assert ended(a)==[False]
    b = start(model)
    assert b.generate([5,6,7,8], p).token_ids==said
    assert ended(b)==[True]
    assert len(list(model[1].iterdir()))==1

def test_a_draft_model_has_its_own(model):
    kw = dict(draft_model=str(DATA/'qwen3-moe-ct-nvfp4'), num_speculative_tokens=2)
    first = start(model, **kw)
    assert ended(first)==[False,False]
    assert ended(start(model, **kw))==[True,True]
    assert len(list(model[1].iterdir()))==2

def touch(model):
    p = next(model[0].glob('*.safetensors'))
    os.utime(p, ns=(1,p.stat().st_mtime_ns+1))
def spoil(model):
    damage(next(model[1].iterdir()))
def cut(model):
    os.truncate(next(model[1].iterdir()), 5000)
def foreign(model):
    shutil.copy(
        next(model[0].glob('*.safetensors')),
        next(model[1].iterdir()))
def unfinished(model):
    p = next(model[1].iterdir())
    p.write_bytes(packed.PART+p.read_bytes()[8:])

def older(model):
    p = next(model[1].iterdir())
    raw = p.read_bytes()
    p.write_bytes(
        raw[:8]
        +(packed.VERSION-1).to_bytes(4, 'little')
        +raw[12:])

@pytest.mark.parametrize(
    'what,why',
    [(touch,'of other files'),(older,f'is of version {packed.VERSION-1}'),
     (spoil,'is not what was written'),(cut,'the header speaks of'),
     (foreign,'is no packed file'),(unfinished,'never finished')])
def test_what_will_not_do_is_made_anew(model, what, why, caplog):
    ended(start(model))
    what(model)
    with caplog.at_level(logging.WARNING, 'atlas'):
        assert ended(start(model))==[False]
    said = [r.message for r in caplog.records if 'packed file made anew' in r.message]
    assert len(said)==1 and why in said[0]
    assert ended(start(model))==[True]
    assert len(list(model[1].iterdir()))==1

def test_of_other_code(model, monkeypatch, caplog):
    ended(start(model))
    monkeypatch.setattr(loading, 'code_digest', lambda: b'other')
    with caplog.at_level(logging.WARNING, 'atlas'):
        assert ended(start(model))==[False]
    assert 'of other code' in caplog.text

def test_each_card_and_way_of_loading_has_its_own(model, monkeypatch):
    ended(start(model))
    assert ended(start(model, quantization='fp8'))==[False]
    monkeypatch.setattr(Emulator, 'identity', lambda self: 'another card')
    assert ended(start(model))==[False]
    assert len(list(model[1].iterdir()))==3

def test_a_start_without_room_serves(model, monkeypatch, caplog):
    "What keeps the file from being written is said, and is no error of the model's"
    def full(*_):
        raise OSError(28, 'No space left on device')
    monkeypatch.setattr(os, 'posix_fallocate', full)
    with caplog.at_level(logging.WARNING, 'atlas'):
        llm = start(model)
    assert 'No space left' in caplog.text
    assert len(llm.generate([5,6], SamplingParams(max_tokens=2)).token_ids)==2
    ended(llm)
    assert list(model[1].iterdir())==[]

def test_a_folder_that_cannot_be(model, caplog):
    with caplog.at_level(logging.WARNING, 'atlas'):
        ended(start(model, cache_packed='/dev/null/x'))
    assert 'cannot be made' in caplog.text

def test_closed_while_it_is_written(model, monkeypatch):
    "Nothing reads the weights any more, and the next start goes on"
    begun,go_on,one = threading.Event(),threading.Event(),packed._Writer.one
    def slow(*args):
        begun.set()
        go_on.wait(WAIT)
        return one(*args)
    path,folder = model
    monkeypatch.setattr(packed._Writer, 'one', slow)
    monkeypatch.setattr(Store, 'wait', lambda self: None)
    llm = start(model)
    assert begun.wait(WAIT)
    monkeypatch.undo()
    store = llm._stores[0]
    threading.Timer(.05, go_on.set).start()
    llm.close()
    assert store._thread is None and not store.path.exists() and part_of(store.path).exists()
    assert ended(start(model))==[False]
    assert ended(start(model))==[True]

ENDS = '''
import sys,threading,time
from atlas.card.emulator import Emulator
from atlas.ground import packed
from atlas.use.llm import LLM
one,begun = packed._Writer.one,threading.Event()
packed._BUFFER,packed._batches.__defaults__ = 4096,(1,)
def slow(*args):
    begun.set()
    time.sleep(.002)
    return one(*args)
packed._Writer.one = slow
LLM(sys.argv[1], Emulator(), max_seq_len=128, max_num_seqs=1, chunk=64,
    cache_packed=sys.argv[2], show=False)
begun.wait()
print('ready')'''

def test_a_program_that_ends_while_it_is_written(model):
    "It ends at once and without a word, and the next start goes on"
    path,folder = model
    r = subprocess.run(
        [sys.executable, '-c', ENDS, path, folder],
        capture_output=True, text=True, timeout=WAIT)
    assert (r.returncode,r.stdout,r.stderr)==(0,'ready\n','')
    assert [p.name[-12:] for p in folder.iterdir()]==['.packed.part']
    assert ended(start(model))==[False]
    assert ended(start(model))==[True]

def test_the_host_has_no_use_for_it():
    with pytest.raises(RequestError, match='cache_packed is for models on a card'):
        LLM(str(DATA/'smollm2-tied'), 'cpu', cache_packed=True)
