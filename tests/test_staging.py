"""Weights packed on a card while they are read are those that the host packs, to the bit; and what
is wrong with them is told."""
import os,struct,pytest
from contextlib import contextmanager
from types import SimpleNamespace as NS
import numpy as np
from hypothesis import HealthCheck,given,settings,strategies as st
from atlas.card.emulator import Emulator,strips_whole
from atlas.cuda.pack import Packed,packer
from atlas.ground import weights
from atlas.ground.core import CheckpointError
from atlas.ground.reading import BLOCK
from atlas.ground.weights import IGNORE,_leave_some,load,open_checkpoint
from atlas.model.model import plan
from helpers.layouts import CONFS,LAYOUTS,any_format,folder,stored

def realign(path, residue):
    "Pad the headers of a folder's files so that tensors begin at `residue`, counted in eights"
    for p in path.glob('*.safetensors'):
        b = p.read_bytes()
        n, = struct.unpack('<Q', b[:8])
        more = (residue-n)%8
        p.write_bytes(struct.pack('<Q', n+more)+b[8:8+n]+b' '*more+b[8+n:])
    return path

class ByHost(packer):
    "The loader without what a card does by itself"
    def staging(self, size): return None

class Counting(packer):
    "Remembers what the card packed by itself"
    def staging(self, size):
        self.stage = super().staging(size)
        self.mine = []
        add = self.stage.add
        def counted(w, *args):
            to = add(w, *args)
            if to:
                self.mine.append(w.name)
            return to
        self.stage.add = counted
        return self.stage

def loaded(path, put, card, parts=('','mtp')):
    with open_checkpoint(path) as ck:
        m,wants = plan(ck)
        ignore = *IGNORE,*m.ignore
        return load(ck, wants, card, ignore=ignore, parts=parts, put=put)

def same_packed(x, y, k):
    "Are two packed matrices of the name `k` the same to the bit?"
    for what in ('fmt','n','k','experts','pair'):
        assert getattr(x, what)==getattr(y, what), (k,what)
    for part in ('w','s','gs'):
        p,q = getattr(x, part),getattr(y, part)
        assert (p is None)==(q is None), (k,part)
        if p is None:
            continue
        assert strips_whole(p)
        assert (p.shape,p.dtype)==(q.shape,q.dtype), (k,part)
        assert p.tobytes()==q.tobytes(), (k,part)

def same(a, b, card):
    "Are two loaded models the same to the bit?"
    assert a.keys()==b.keys()
    for k,x in a.items():
        assert type(x)==type(b[k]), k
        if isinstance(x, Packed):
            same_packed(x, b[k], k)
        elif x is not None:
            assert np.array_equal(card.download(x), card.download(b[k])), k

@pytest.fixture(scope='module')
def card(): return Emulator()

def layout(tmp, name, shards=1):
    "A folder with a model as a layout stores it"
    raw,_ = stored(*LAYOUTS[name])
    return realign(folder(tmp, CONFS[LAYOUTS[name][0]], raw, shards=shards), 0)

@pytest.mark.parametrize('name', LAYOUTS)
def test_every_layout(tmp_path, card, name, monkeypatch):
    path = layout(tmp_path, name, shards=1+len(name)%3)
    want = loaded(path, ByHost(card), card)
    for window in (1<<23,BLOCK):
        monkeypatch.setattr(weights, '_WINDOW', window)
        put = Counting(card)
        same(loaded(path, put, card), want, card)
    matrices = [k for k,p in want.items() if isinstance(p, Packed)]
    integers = any(how in name for how in ('int4','gptq','awq'))
    assert len(put.mine)>=len(matrices)*(.1 if integers else .6)

@pytest.mark.parametrize('quantization', ('nvfp4','fp8'))
@pytest.mark.parametrize('name', [n for n in LAYOUTS if len(n)%4==0])
def test_stored_anew(tmp_path, card, name, quantization, monkeypatch):
    path = layout(tmp_path, name)
    how = card,quantization,quantization,quantization
    want = loaded(path, ByHost(*how), card)
    monkeypatch.setattr(weights, '_WINDOW', BLOCK)
    same(loaded(path, Counting(*how), card), want, card)



@settings(
    deadline=None, max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    conf=st.sampled_from(['llama','qwen3_moe','qwen3_5_moe','nemotron_h','gpt_oss','gemma4']),
    experts=st.sampled_from(['each','stack']),
    shards=st.integers(1,3),
    seed=st.integers(0,2**32),
    residue=st.integers(0,7),
    blocks=st.integers(1,5))
def test_any_mixture(tmp_path_factory, card, conf, experts, shards, seed, residue, blocks):
    "Each tensor in a format of its own, at any place of a file, in windows of any size"
    raw,_ = stored(conf, 'plain', experts, any_format(seed))
    path = realign(folder(tmp_path_factory.mktemp('mix'), CONFS[conf], raw, shards), residue)
    want = loaded(path, ByHost(card), card)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(weights, '_WINDOW', blocks*BLOCK)
        same(loaded(path, packer(card), card), want, card)

def flat(incoming):
    "Parts of sources, want by want: (number of the want, part, span)"
    return [(k,p,s) for k,to in enumerate(incoming)
        for t in to.ts for p,s in t.spans.items()]

def place(span): return span.file.name,span.offset

def staged(ck, stage)->list:
    "All that is wanted of a checkpoint, shown to what packs on the card"
    m,wants = plan(ck)
    picks = weights.planned(ck, wants, (*IGNORE,*m.ignore))
    incoming = [weights._Incoming(ck, *p) for p in picks if p[1]]
    for to in incoming:
        to.landing = stage.add(to.want, to.way, to.ts, to.seen)
    return incoming

def moves_of(to)->list:
    "Number of the move of each part of a want; -1 where it is the host's"
    return to.landing.moves.tolist() if to.landing else [-1]*len(flat([to]))

@contextmanager
def shown(tmp, card, name, anew):
    "What is wanted of a layout in three files, and its parts as files have them"
    path = layout(tmp, name, shards=3)
    with open_checkpoint(path) as ck:
        stage = packer(card, anew).staging(1<<20)
        incoming = staged(ck, stage)
        yield incoming,weights._in_files(incoming)
        stage.close()

PARTS = [('qwen3-moe-nvfp4-ct',None), ('qwen3-fp8-half','nvfp4'), ('gpt-oss','nvfp4')]

@pytest.mark.parametrize('name,anew', PARTS)
def test_parts_come_as_they_lie_in_files(tmp_path, card, name, anew):
    "Wants of a part, and its move, beside a plain loop over all of them"
    with shown(tmp_path, card, name, anew) as (incoming,parts):
        every = flat(incoming)
        order = sorted(range(len(every)), key=lambda i: place(every[i][2]))
        assert order!=list(range(len(every)))
        in_order = [every[i] for i in order]
        assert list(map(place, parts.spans))==[place(s) for *_,s in in_order]
        assert parts.want.tolist()==[k for k,*_ in in_order]
        moves = [n for to in incoming for n in moves_of(to)]
        assert weights._moves(incoming, parts).tolist()==[moves[i] for i in order]
        assert max(moves)>0

@pytest.mark.parametrize('name,anew', PARTS)
def test_what_waits_for_a_part(tmp_path, card, name, anew):
    "What is stored anew, in the order in which its numbers come"
    with shown(tmp_path, card, name, anew) as (incoming,parts):
        in_order = sorted(flat(incoming), key=lambda part: place(part[2]))
        held = [incoming[k] for k,part,_ in in_order if part=='data']
        held = [to for to in held if to.landing and to.landing.anew]
        assert weights._waiting(incoming, parts)==held and bool(held)==bool(anew)

# ---- what is wrong with numbers, and with files

def spoil(path, name, byte, value):
    "Change bytes of the tensor `name` of a folder"
    with open_checkpoint(path) as ck:
        spans = {}
        for t in ck.tensors.values():
            spans |= {(t.stored,p): s for p,s in t.spans.items()}
        s = spans[name]
        with open(s.file.path, 'r+b') as f:
            f.seek(s.offset+byte if byte>=0 else s.offset+s.nbytes+byte)
            f.write(value)

def stored_in(path, fmt, part):
    "The last tensor of a folder in this format, as `spoil` wants it"
    with open_checkpoint(path) as ck:
        matrices = [t for t in ck.tensors.values() if t.fmt==fmt and len(t.shape)>1]
        return max((t.stored,part) for t in matrices if 'mtp' not in t.stored)

_f = np.float32
_BROKEN = [ # layout, format, part, byte from the end, bytes, what is said
    ('llama', 'BF16', 'data', -2, b'\x80\x7f', 'not finite'),
    ('llama', 'BF16', 'data', -4, b'\xc1\xff', 'not finite'),
    ('qwen3-fp8-tensor', 'FP8_TENSOR', 'data', -1, b'\xff', 'not finite'),
    ('qwen3-fp8-tensor', 'FP8_TENSOR', 'scale', -4, _f(np.nan).tobytes(), 'a scale of'),
    ('qwen3-fp8-channel', 'FP8_CHANNEL', 'scale', -4, _f(-1).tobytes(), 'a scale of'),
    ('qwen3-moe-fp8-block', 'FP8_BLOCK', 'scale', -4, _f(np.inf).tobytes(), 'a scale of'),
    ('qwen3-moe-nvfp4-ct', 'NVFP4', 'scale', -1, b'\x7f', 'a scale of'),
    ('qwen3-moe-nvfp4-ct', 'NVFP4', 'scale', -1, b'\x81', 'a scale of'),
    ('qwen3-moe-nvfp4-ct', 'NVFP4', 'global', -4, _f(0).tobytes(), 'a scale of'),
    ('gpt-oss-mxfp4', 'MXFP4', 'scale', -1, b'\xff', 'a scale of')]

@pytest.mark.parametrize('name,fmt,part,byte,value,said', _BROKEN)
@pytest.mark.parametrize('make', (ByHost,Counting))
def test_numbers_that_are_none(tmp_path, card, make, name, fmt, part, byte, value, said):
    "Whoever packs says the same"
    path = layout(tmp_path, name)
    which = stored_in(path, fmt, part)
    put = make(card)
    loaded(path, put, card)
    spoil(path, which, byte, value)
    with pytest.raises(CheckpointError, match=said) as e:
        loaded(path, put, card)
    assert e.value.param==which[0]
    assert which[0] in str(e.value)

def test_zero_scales_are_numbers(tmp_path, card):
    path = layout(tmp_path, 'qwen3-fp8-channel')
    spoil(path, stored_in(path, 'FP8_CHANNEL', 'scale'), -4, bytes(4))
    by_card = loaded(path, Counting(card), card)
    same(by_card, loaded(path, ByHost(card), card), card)

def test_the_host_touches_vectors_alone(tmp_path, card):
    "Of a model whose formats the card packs, `put` is given nothing else"
    path = layout(tmp_path, 'qwen3-moe-nvfp4-ct')
    class Strict(packer):
        def __call__(self, w, q):
            assert w.array or len(w.shape)<2, w.name
            return super().__call__(w, q)
    assert loaded(path, Strict(card), card)

def reads(path, card, monkeypatch):
    "Each read of a load: name of the file, where it began, and bytes"
    from atlas.ground import files,reading
    seen,fill = [],reading._OpenFile.fill
    def counted(self, memory, start, need):
        seen.append((self.file.name, start, need))
        return fill(self, memory, start, need)
    def never(*args):
        raise AssertionError('read by itself')
    with open_checkpoint(path) as ck:
        m,wants = plan(ck)
        monkeypatch.setattr(reading._OpenFile, 'fill', counted)
        monkeypatch.setattr(files.File, 'read_into', never)
        monkeypatch.setattr(weights, '_WINDOW', 4*BLOCK)
        load(ck, wants, card, ignore=(*IGNORE,*m.ignore), put=packer(card))
    return seen

def test_nothing_is_read_twice(tmp_path, card, monkeypatch):
    "Nor are scales looked at before"
    path = layout(tmp_path, 'qwen3-moe-nvfp4-ct')
    seen = reads(path, card, monkeypatch)
    total = sum(f.stat().st_size for f in path.glob('*.safetensors'))
    assert total*.9<sum(n for *_,n in seen)<=total
    ends = {}
    for name,start,n in sorted(seen):
        assert start>=ends.get(name, 0)
        ends[name] = start+n

@pytest.mark.parametrize(
    'harm,said',
    (
        (lambda p: os.truncate(p, p.stat().st_size//2), 'ends at byte'),
        (lambda p: os.utime(p, ns=(1,1)), 'was changed')))
def test_a_file_that_changes_while_it_is_read(tmp_path, card, monkeypatch, harm, said):
    "It is noticed, and nothing is left of what was loaded"
    from atlas.ground import reading
    raw,_ = stored(*LAYOUTS['qwen3-moe-nvfp4-ct'])
    path = realign(folder(tmp_path, CONFS['qwen3_moe'], raw), 0)
    file, = path.glob('*.safetensors')
    fill,seen = reading._OpenFile.fill,[]
    def harmed(self, *args):
        n = fill(self, *args)
        seen.append(n)
        if len(seen)==2:
            harm(file)
        return n
    monkeypatch.setattr(reading._OpenFile, 'fill', harmed)
    monkeypatch.setattr(weights, '_WINDOW', 4*BLOCK)
    with pytest.raises(CheckpointError, match=said):
        loaded(path, packer(card), card)
    assert len(seen)>=2

def test_few_wants_wait_at_a_time():
    "What is stored anew and would be held beside others for too long is left to the host"
    def want(held): return NS(landing=NS(held=held))
    a = want(5)
    b = want(5)
    c = want(5)
    d = want(50)
    order = [a,b,a,c,b,c,d,d]
    _leave_some(order, 9)
    assert (
        [to.landing is not None for to in (a,b,c,d)]
        ==[True,False,True,True])
