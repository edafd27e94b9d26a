"""A step may write a recurrent state where it has read it: kernels give the bits, of answers and of
states, that they give with a slot for each. A delta net's may be written late: not in every
step."""
import numpy as np,pytest
from atlas.card.emulator import Emulator,find_cxx
from atlas.cuda import delta
from atlas.cuda.delta import as_records,as_states,delta_step
from atlas.cuda.mamba import mamba_step
from atlas.cuda.scan import delta_many,mamba_many
from atlas.engine.cache import TAILS,other_tail,state_in,states_in
from atlas.model.model import Piece,make_batch

pytestmark = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')
KH,VH,D = 1,2,32 # Heads of keys and of values, and their size
NH,HD,NS = 2,16,16 # Heads of a Mamba layer, their size, and that of a state
DELTA = 2*KH*D+VH*D
MAMBA = NH*HD+2*NS # Channels

class Layer:
    "Made-up weights of a layer, and its kernels for rows and for tiles"
    def __init__(self, card, kind, seed=0):
        self.card = card
        self.kind = kind
        self.rng = np.random.default_rng(seed)
        if kind=='delta':
            self.C,self.rec = DELTA,(VH,D,D)
            self.width = self.C+VH*D+2*VH
            w = self.delta_weights()
        else:
            self.C,self.rec = MAMBA,(NH,HD,NS)
            self.width = self.C+NH*HD+NH
            w = self.mamba_weights()
        self.w = [card.upload(a) for a in w]

    def delta_weights(self):
        return self.some(self.C, 4),-np.exp(self.some(VH)),self.some(VH),self.some(D)

    def mamba_weights(self):
        conv = self.some(self.C, 4),self.some(self.C)
        heads = -np.exp(self.some(NH)),self.some(NH),self.some(NH)
        return *conv,*heads,self.some(NH*HD)

    def some(self, *shape): return self.rng.standard_normal(shape, dtype='f4')

    def __call__(self, x, conv, rec, b):
        "What the rows of `b` are answered"
        heads = KH if self.kind=='delta' else 1
        if self.kind=='delta':
            f = delta_many if b.tiled else delta_step
        else:
            f = mamba_many if b.tiled else mamba_step
        out = f(x, *self.w, conv, rec, b, heads)
        return out if b.tiled else out[0]

    def given(self, states):
        "A pool of states as kernels have it"
        return self.card.upload(as_records(states) if self.kind=='delta' else states)

    def states(self, rec):
        "States in rows of such a pool, and which of them are there to the bit"
        rec = self.card.download(rec)
        if self.kind!='delta':
            return rec,np.ones(len(rec), bool)
        return (
            as_states(rec, *self.rec[1:]),
            ~counts(rec).any((1,2)))

def counts(rec):
    "Rows that are pending in records, by head and 16 columns"
    return rec[
        ..., -24:-16].view('i4')[...,:D//16]

def pools(layer, states, tails):
    "Convolutions and matrices of so many states, the same ones whatever they share"
    rng = np.random.default_rng(1)
    conv = rng.standard_normal((states,3,layer.C), dtype='f4')
    rec = rng.standard_normal((states//TAILS,*layer.rec), dtype='f4')
    if tails==1:
        rec = np.repeat(rec, TAILS, 0)
    return layer.card.upload(conv),layer.given(rec)

def ran(layer, x, pieces, tails):
    "Answers to the rows of `pieces`, and the state that each has left"
    card = layer.card
    conv,rec = pools(layer, 2*TAILS*len(pieces), tails)
    b = make_batch(pieces, len(x)%64==0, 16, card)
    y = card.download(layer(card.upload(x), conv, rec, b))
    left = card.download(b.state_out)
    left = left[left>=0]
    return (
        y,
        card.download(conv)[left],
        *layer.states(rec[left//tails]))

def pieces_of(lengths, start):
    "A piece of each length that reads and writes the two states of a slot"
    out = []
    for s,n in enumerate(lengths):
        read,write = states_in([s])
        if s%2:
            read,write = write,read
        out.append(Piece(
            [0]*n, start, list(range(8)), n, read, write))
    return out

@pytest.mark.parametrize(
    'kind,lengths,start',
    [
        ('delta',(1,1,1),5),
        ('delta',(3,1,2),5),
        ('delta',(1,)*9,5),
        ('delta',(2,)*8,5),
        ('mamba',(1,1,1),5),
        ('mamba',(3,1,2),5),
        ('delta',(64,64),64),
        ('mamba',(64,64),64)])
def test_same_bits(kind, lengths, start):
    layer = Layer(Emulator(), kind)
    x = layer.some(sum(lengths), layer.width)
    pieces = pieces_of(lengths, start)
    got,want = [
        ran(layer, x, pieces, tails)
        for tails in (TAILS,1)]
    for a,b in zip(got[:2], want):
        assert np.isfinite(a).all() and a.tobytes()==b.tobytes()
    same_states(got[2:], want[2:])
    assert kind=='mamba' or got[3].tolist()==[n>1 for n in lengths]

def same_states(got, want):
    "Those that are there have the same bits, others are as near as rows that join them on the host"
    (a,there),(b,too) = got,want
    both = there&too
    assert a[both].tobytes()==b[both].tobytes()
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)

class Walk:
    "Sequences that go on step by step: in their slots, or from slot to slot"
    def __init__(self, layer, seqs, tails):
        self.layer,self.tails = layer,tails
        rng = np.random.default_rng(1)
        ids = 2*np.arange(seqs)
        def pool(n, at, *shape):
            p = np.full((n,*shape), np.nan, 'f4')
            p[at] = rng.standard_normal((seqs,*shape), dtype='f4')
            return p
        self.conv = layer.card.upload(pool(
            4*seqs, ids, 3, layer.C))
        self.rec = layer.given(pool(
            4*seqs//tails, ids//tails, *layer.rec))
        self.at,self.start = ids.tolist(),[5]*seqs

    def elsewhere(self, state):
        "A state in another slot"
        half = 2*len(self.at)
        return (state+half)%(2*half)

    def step(self, steps, kind, accepted=0):
        """Answers to `n` rows of each sequence `s`, for (s,n) in `steps`;
        of drafts so many are accepted"""
        card,pieces,outs = self.layer.card,[],[]
        for s,n in steps:
            piece,states = self.piece(s, n, kind, accepted)
            pieces.append(piece)
            outs += states
        b = make_batch(pieces, kind=='tiles', 16, card)
        if kind=='drafts':
            b.state_out[:] = np.int32(outs)
        rng = np.random.default_rng(sum(self.start))
        x = rng.standard_normal((b.num_rows,self.layer.width), dtype='f4')
        return card.download(self.layer(card.upload(x), self.conv, self.rec, b))

    def piece(self, s, n, kind, accepted):
        "The next `n` rows of sequence `s`, and states after the first and after the last"
        read = self.at[s]
        here,there = other_tail(read),self.elsewhere(read)
        write = here if kind!='away' else there
        piece = Piece([0]*n, self.start[s], list(range(99)), n, read, write)
        went = n
        if kind=='drafts':
            write,went = (there,n) if accepted else (here,1)
        self.at[s] = write
        self.start[s] += went
        return piece,[here,*[-1]*(n-2),there]

    @property
    def states(self):
        return self.layer.states(
            self.rec[[n//self.tails for n in self.at]])

ROWS = dict(rows=(1,4), tiles=(1,4), drafts=(2,4)) # Of a sequence in a step, from and below

def any_step(rng):
    "Rows of some of five sequences, what kind of step it is, and whether drafts are accepted"
    who = sorted(rng.permutation(5)[:rng.integers(1, 6)].tolist())
    kind = rng.choice(['row']*5+['rows','drafts','away','tiles'])
    least,most = ROWS.get(kind, (1,2))
    steps = [(s, int(rng.integers(least, most))) for s in who]
    return steps,kind,rng.integers(2)

@pytest.mark.parametrize('seed', range(3))
def test_late_writes(seed, monkeypatch):
    "Whatever kernel a step takes, and whatever was pending"
    rng = np.random.default_rng(seed)
    layer = Layer(Emulator(), 'delta')
    late,now = [Walk(layer, 5, tails) for tails in (TAILS,1)]
    behind = 0
    for i in range(40):
        how = any_step(rng)
        monkeypatch.setattr(delta, '_WIDE', rng.choice([1,99]))
        monkeypatch.setattr(delta, '_FEW', rng.choice([0,99]))
        monkeypatch.setattr(Emulator, 'multiprocessors', rng.choice([1,2*VH,99]))
        got,want = [w.step(*how) for w in (late,now)]
        assert np.isfinite(want).all(), (i, how)
        assert got.tobytes()==want.tobytes(), (i, how)
        same_states(late.states, now.states)
        behind += (~late.states[1]).sum()
    assert behind>40

def test_numbers():
    "States of a sequence: what it reads, and what the rows of a step write, row 0 in place"
    assert (
        states_in([3])==[6,7]
        and states_in([3,1,5])==[6,7,2,10])
    assert [other_tail(n) for n in states_in([3])]==[7,6]
    assert [state_in(s) for s in range(3)]==[0,2,4]
