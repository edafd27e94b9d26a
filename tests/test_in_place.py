"""A step may write a recurrent state where it has read it: kernels give the bits, of answers and of
states, that they give with a slot for each."""
import numpy as np,pytest
from atlas.card.emulator import Emulator,find_cxx
from atlas.cuda.delta import delta_step
from atlas.cuda.mamba import mamba_step
from atlas.cuda.scan import delta_many,mamba_many
from atlas.engine.cache import TAILS,other_tail,state_in,states_in
from atlas.model.model import Piece,make_batch

pytestmark = pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')
KH,VH,D = 1,2,32 # Heads of keys and of values, and their size
NH,HD,NS = 2,16,16 # Heads of a Mamba layer, their size, and that of a state
DELTA,MAMBA = 2*KH*D+VH*D,NH*HD+2*NS # Channels

class Layer:
    "Made-up weights of a layer, and its kernels for rows and for tiles"
    def __init__(self, card, kind, seed=0):
        self.card,self.kind,self.rng = card,kind,np.random.default_rng(seed)
        self.C = DELTA if kind=='delta' else MAMBA
        self.rec = (VH,D,D) if kind=='delta' else (NH,HD,NS)
        heads,n = (VH,D) if kind=='delta' else (NH,NH*HD)
        self.width = self.C+VH*D+2*VH if kind=='delta' else self.C+NH*HD+NH
        bias = () if kind=='delta' else (self.some(self.C),)
        skip = () if kind=='delta' else (self.some(heads),)
        self.w = [self.some(self.C, 4),*bias,-np.exp(self.some(heads)),*skip,self.some(heads),self.some(n)]
        self.w = [card.upload(a) for a in self.w]

    def some(self, *shape): return self.rng.standard_normal(shape, dtype='f4')

    def __call__(self, x, conv, rec, b):
        "What the rows of `b` are answered"
        heads = KH if self.kind=='delta' else 1
        if self.kind=='delta': f = delta_many if b.tiled else delta_step
        else: f = mamba_many if b.tiled else mamba_step
        out = f(x, *self.w, conv, rec, b, heads)
        return out if b.tiled else out[0]

def pools(layer, states, tails):
    "Convolutions and matrices of so many states, the same ones whatever they share"
    rng = np.random.default_rng(1)
    conv = rng.standard_normal((states,3,layer.C), dtype='f4')
    rec = rng.standard_normal((states//TAILS,*layer.rec), dtype='f4')
    if tails==1: rec = np.repeat(rec, TAILS, 0)
    return layer.card.upload(conv),layer.card.upload(rec)

def ran(layer, x, pieces, tails):
    "Answers to the rows of `pieces`, and the state that each has left"
    card = layer.card
    conv,rec = pools(layer, 2*TAILS*len(pieces), tails)
    b = make_batch(pieces, len(x)%64==0, 16, card)
    y = card.download(layer(card.upload(x), conv, rec, b))
    left = card.download(b.state_out)
    left = left[left>=0]
    return y,card.download(conv)[left],card.download(rec)[left//tails]

def pieces_of(lengths, start):
    "A piece of each length that reads and writes the two states of a slot"
    out = []
    for s,n in enumerate(lengths):
        read,write = states_in([s])
        if s%2: read,write = write,read
        out.append(Piece([0]*n, start, list(range(8)), n, read, write))
    return out

@pytest.mark.parametrize('kind,lengths,start', [
    ('delta',(1,1,1),5), ('delta',(3,1,2),5), ('delta',(1,)*9,5), ('delta',(2,)*8,5),
    ('mamba',(1,1,1),5), ('mamba',(3,1,2),5), ('delta',(64,64),64), ('mamba',(64,64),64)])
def test_same_bits(kind, lengths, start):
    layer = Layer(Emulator(), kind)
    x = layer.some(sum(lengths), layer.width)
    pieces = pieces_of(lengths, start)
    got,want = [ran(layer, x, pieces, tails) for tails in (TAILS,1)]
    for a,b in zip(got, want):
        assert np.isfinite(a).all() and a.tobytes()==b.tobytes()

def test_numbers():
    "States of a sequence: what it reads, and what the rows of a step write, row 0 in place"
    assert states_in([3])==[6,7] and states_in([3,1,5])==[6,7,2,10]
    assert [other_tail(n) for n in states_in([3])]==[7,6]
    assert [state_in(s) for s in range(3)]==[0,2,4]
