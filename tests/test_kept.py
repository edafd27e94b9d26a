"What a card keeps a tensor of a file as: the same where it is loaded, made up, and planned."
import numpy as np, pytest
from types import SimpleNamespace
from atlas.card.emulator import Emulator,find_cxx
from atlas.cuda import vocabulary as words
from atlas.cuda.pack import packer,unpack
from atlas.ground.config import ModelConfig
from atlas.ground.weights import Want,_random,dummy_checkpoint
from atlas.model.model import model_wants
from atlas.use.inspect import fit,sheet

NAME,SHAPE = 'model.layers.0.mlp.down_proj.weight',(256,512)
# By the format in a file and that asked for, what the card keeps
KEPT_AS = {
    ('Q4_0',None): 'f16',
    ('Q4_0','nvfp4'): 'nvfp4',
    ('Q4_1','nvfp4'): 'nvfp4',
    ('Q5_0','fp8'): 'fp8',
    ('Q8_0','fp8'): 'fp8',
    ('Q6_K','nvfp4'): 'nvfp4',
    ('BF16','nvfp4'): 'nvfp4',
    ('BF16','fp8'): 'fp8',
    ('FP8_BLOCK','nvfp4'): 'nvfp4',
    ('FP8_BLOCK','fp8'): 'fp8',
    ('FP8_CHANNEL','fp8'): 'fp8',
    ('MXFP4','nvfp4'): 'mxfp4',
    ('MXFP4','fp8'): 'mxfp4',
    ('INT4','nvfp4'): 'int4',
    ('INT4','fp8'): 'int4',
    ('NVFP4','nvfp4'): 'nvfp4',
    ('NVFP4','fp8'): 'nvfp4'}

def far(got, want):
    "The largest difference, of the largest number"
    return (
        np.abs(got-want).max()
        /np.abs(want).max())

def described(t, fmt, nbytes):
    "What a checkpoint tells of a tensor that it holds in `fmt`"
    return SimpleNamespace(shape=t.shape, fmt=fmt, nbytes=nbytes)

@pytest.mark.skipif(not find_cxx(), reason='no C++ compiler')
@pytest.mark.parametrize('fmt,anew', KEPT_AS)
def test_what_is_loaded_is_what_is_made_up_and_planned(fmt, anew):
    q = _random(NAME, fmt, SHAPE, 0)
    w = Want(NAME, (NAME,), SHAPE)
    put = packer(Emulator(), anew)
    loaded,made = put(w, q),put.invent(w, fmt)
    assert loaded.fmt==made.fmt==KEPT_AS[fmt,anew]
    tensors = {NAME: described(w, fmt, q.nbytes)}
    plan = words.weight_bytes(tensors, ('',), quantization=anew)
    # factors of rows and tiles are not planned, and a file's scales may be wider
    assert loaded.nbytes==pytest.approx(plan, rel=.06)
    assert made.nbytes==pytest.approx(plan, rel=.06)
    assert far(unpack(loaded), q.decode())<.2

def vast():
    "A card on which everything fits"
    room = SimpleNamespace(total=1<<40, available=1<<40, left=1<<40)
    return SimpleNamespace(name='cuda', kind='cuda', memory=lambda: room, budget=lambda: room)

def test_what_fits_is_what_is_planned():
    """A GGUF's tensors in 4 bits take 16 on a card: the sheet of the model says so,
    as the plan of its memory does"""
    c = ModelConfig.preset('smollm2-135m')
    ck = dummy_checkpoint(c, model_wants(c, None))
    for k,t in ck.tensors.items():
        packed = t.nbytes*9//32
        if len(t.shape)>1:
            ck.tensors[k] = described(t, 'Q4_0', packed)
    f = fit(sheet(ck, on=[]), vast())
    assert f['form']=='packed'
    assert f['weights']==words.weight_bytes(ck.tensors, ('',))
    assert f['weights']==pytest.approx(2*c.num_params, rel=.005)
