"""The kernel for the processor behind whole models: as near to the definition as its contract
says, in every family and company; what a user asks of threads; and a machine without a compiler"""
import ctypes,logging,shutil,subprocess,sys
from pathlib import Path
import numpy as np
import pytest
from atlas import SamplingParams
from atlas.card import processor
from atlas.card.device import Host
from atlas.engine import stepper
from atlas.engine.loading import LoadedModel
from atlas.ground.core import RequestError
from atlas.ground.formats import GGUF_BLOCKS,QTensor
from atlas.ground.options import EngineConfig
from atlas.ground.requests import Request
from atlas.ground.weights import open_checkpoint
from atlas.model.model import load_model
from atlas.ops.host import STORED,HostMatrix,_described,_Matrix,settled
from atlas.use.llm import LLM
from helpers.reference import Run,data as DATA

ARM,QEMU = map(shutil.which, ('aarch64-linux-gnu-g++','qemu-aarch64-static'))
ACTS = None,'silu','gelu_tanh','swiglu_oai'
needs_arm = pytest.mark.skipif(not ARM, reason='no compiler for 64-bit Arm')

TEXTS = [
    'The history of the steam engine begins',
    'def fibonacci(n):\n    "The n-th number"\n',
    'Wer reitet so spät durch Nacht und Wind?']

def divergence(a, b):
    "KL of the distributions that logits `b` mean from those that `a` mean, the largest of all rows"
    def logs(x):
        x = x.astype('f8')-x.max(-1, keepdims=True)
        return x-np.log(np.exp(x).sum(-1, keepdims=True))
    a,b = logs(a),logs(b)
    return (np.exp(a)*(a-b)).sum(-1).max()

@pytest.fixture(scope='module')
def pair():
    "The tiny model as it is stored, and as the definition has it"
    return [LLM('tiny', device='cpu', max_seq_len=512, exact=e) for e in (False,True)]

def test_tokens_are_the_definitions(pair):
    "Greedy, the same tokens; and one thread more changes no bit"
    greedy = SamplingParams(max_tokens=24, temperature=0, logprobs=2, ignore_eos=True)
    fast,exact = [m.generate(TEXTS, greedy) for m in pair]
    assert [o.token_ids for o in fast]==[o.token_ids for o in exact]
    one = LLM('tiny', device='cpu', max_seq_len=512, threads=1)
    again = one.generate(TEXTS, greedy)
    assert [(o.token_ids,o.logprobs) for o in again]==[(o.token_ids,o.logprobs) for o in fast]

def test_as_near_as_promised(pair):
    "KL from the definition of each position, of prompts and of single tokens"
    fast,exact = pair
    assert isinstance(fast.model.embed_tokens.weight, HostMatrix)
    assert isinstance(exact.model.embed_tokens.weight, np.ndarray)
    for text in TEXTS:
        ids = exact.tokenizer.encode(text)
        assert divergence(exact.logits(ids), fast.logits(ids))<1e-6

@pytest.mark.slow
def test_the_demo_is_as_near(demo):
    "A real model: the same tokens, and KL"
    fast,exact = (LLM('demo', device='cpu', max_seq_len=512, exact=e) for e in (False,True))
    greedy = SamplingParams(max_tokens=24, temperature=0)
    a,b = (m.generate(TEXTS, greedy) for m in (fast,exact))
    assert [o.token_ids for o in a]==[o.token_ids for o in b]
    ids = exact.tokenizer.encode(' '.join(TEXTS))
    assert divergence(exact.logits(ids), fast.logits(ids))<1e-6

FILES = ('gpt-oss-mxfp4','llama-ct-int4-zeros','llama-fp8-tensor','minimax-fp8-block',
    'nemotron-nvfp4','qwen3-fp8-channel','qwen35-mixed','llama-gptq')

@pytest.mark.parametrize('name', FILES)
def test_formats_of_publishers(name):
    "Logits of a prompt, with matrices and banks as they are stored, are the definition's"
    def logits(device):
        with open_checkpoint(DATA/name) as ck:
            m = load_model(ck, device, 256, packed=True)
        return Run(m).prefill(list(range(3, 40)))
    want = logits(Host())
    got = logits(settled(Host(), EngineConfig('m', threads=2)))
    assert np.abs(got-want).max()<1e-4*np.abs(want).max()

@pytest.mark.parametrize('threads', [0,-1,True,'2',1.5])
def test_threads_that_cannot_be(threads):
    with pytest.raises(RequestError, match='threads'):
        EngineConfig('m', threads=threads)

def test_more_threads_than_processors(caplog):
    "As many as there are, and a word about it"
    device = settled(Host(), EngineConfig('m', threads=10**6))
    assert device.threads==processor.processors()
    assert 'threads=1000000' in caplog.text

def test_no_compiler(monkeypatch, caplog):
    "The definition does the work, which is said once"
    monkeypatch.setattr(processor, '_shipped', lambda name: None)
    monkeypatch.setattr(processor, 'find_cxx', lambda: None)
    processor.library.cache_clear()
    try:
        devices = [settled(Host(), EngineConfig('m')) for _ in '12']
        assert [type(d) for d in devices]==[Host,Host]
        said = [r for r in caplog.records if 'no C++ compiler' in r.getMessage()]
        assert len(said)==1 and said[0].levelno==logging.WARNING
    finally:
        processor.library.cache_clear()

def test_a_process_ends():
    "Threads of the kernel that sleep when a process ends do not keep it"
    code = ("from atlas.use.llm import LLM; "
        "m = LLM('tiny', device='cpu', max_seq_len=512, threads=2); "
        "m.generate(['A cow eats '*40]*3)")
    subprocess.run([sys.executable,'-c',code], check=True, timeout=300)

@needs_arm
def test_reads_on_arm():
    "Nothing that a compiler for another processor does not know or would warn of"
    source = processor.kernel_dir()/'host'/'linear.cpp'
    command = [ARM,*processor.HOST_FLAGS,'-march=armv8-a','-Wall','-Wextra','-fsyntax-only',source]
    r = subprocess.run(command, capture_output=True, text=True)
    assert (r.returncode,r.stderr)==(0,'')

class Asked(ctypes.Structure):
    "As `Asked` of helpers/host_product.cpp"
    _fields_ = [
        ('bytes',ctypes.c_long*3), ('rows',ctypes.c_long), ('threads',ctypes.c_long),
        ('act',ctypes.c_long), ('matrix',_Matrix)]

def asked(q, gain, x, act)->bytes:
    "A product as helpers/host_product.cpp reads it"
    arrays = [q.parts.get(k, np.empty(())) for k in ('data','scale','zero')]
    parts = [a.tobytes() if a.ndim else b'' for a in arrays]
    sizes = (ctypes.c_long*3)(*map(len, parts))
    head = Asked(sizes, len(x), 1+len(x)%2, act, _described(q))
    return b''.join([bytes(head), *parts, gain.tobytes(), x.tobytes()])

def made_up(fmt, rng, n=22, k=1536):
    "A matrix in a format, of random weights or, where Atlas only reads it, of random blocks"
    if fmt not in ('Q4_K','Q5_K','Q6_K'):
        return QTensor.encode(.02*rng.standard_normal((n,k), 'f4'), fmt)
    size,nbytes = GGUF_BLOCKS[fmt]
    blocks = rng.integers(0, 256, (n*k//size,nbytes), np.uint8)
    blocks[:,1::2] &= 0xBF # no number of 16 bits is 2 or more
    return QTensor(fmt, (n,k), dict(data=blocks.reshape(n, -1)))

def run_there(folder, said)->np.ndarray:
    "What the kernel, compiled for Arm, answers"
    host = processor.kernel_dir()/'host'
    driver,out = Path(__file__).parent/'helpers'/'host_product.cpp',folder/'arm'
    drop = {'-fPIC','-shared'}
    flags = ['-march=armv8-a','-static',*(f for f in processor.HOST_FLAGS if f not in drop)]
    subprocess.run([ARM, *flags, f'-I{host}', driver, '-o', out], check=True)
    r = subprocess.run([QEMU,out], input=said, capture_output=True, check=True)
    return np.frombuffer(r.stdout, 'f4')

def products(rng):
    "Matrices of every format, rows by few and by tiles, and an activation: (q, x, act)"
    rows = [rng.standard_normal((n,1536), 'f4') for n in (1,2,3,7,20)]
    matrices = [made_up(fmt, rng) for fmt in STORED]
    work = [(q,x,0) for q in matrices for x in rows]
    return work+[(q,x,act) for q in matrices[:2] for x in rows for act in (1,2,3)]

def product_here(multiply, q, gain, x, act):
    "What such a product is on this processor"
    norm = dict(gain=gain, eps=1e-6, act=ACTS[act], limit=7.) if act else {}
    return HostMatrix(q, multiply, 1).fused(x, **norm).ravel()

@pytest.mark.slow
@needs_arm
@pytest.mark.skipif(not QEMU, reason='no qemu-aarch64-static')
def test_bits_on_arm(tmp_path):
    "Bare products, and those from a norm to an activation: the same numbers on both processors"
    rng = np.random.default_rng(0)
    gain,work = rng.standard_normal(1536, 'f4'),products(rng)
    there = run_there(tmp_path, b''.join(asked(q, gain, x, act) for q,x,act in work))
    device = settled(Host(), EngineConfig('m', threads=1))
    for q,x,act in work:
        here = product_here(device._multiply, q, gain, x, act)
        assert np.array_equal(there[:here.size], here), (q.fmt,len(x),act)
        there = there[here.size:]
    assert not there.size

# ---- steps as lists of calls

def spoken(folder, texts, **how):
    "What requests of so many ids each are answered, with all bits, and the replays there are then"
    o = EngineConfig(str(folder), 'cpu', 128, len(texts), packed=True, threads=2, **how)
    m = LoadedModel(o, False)
    said = {}
    p = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)
    for i,n in enumerate(texts):
        m.engine.add(Request(str(i), tuple(range(3, 3+n)), p))
    while m.engine.has_work:
        for ev in m.engine.step():
            said.setdefault(ev.id, []).append((ev.token,ev.logprob,ev.top))
    made = m.engine.stepper.replays
    m.close()
    return said,made

@pytest.mark.parametrize('name,how', [('smollm2-tied',{}), ('qwen3-fp8-channel',{}),
    ('llama-fp8-tensor',{}), ('smollm2-tied',dict(speculative='ngram'))])
def test_replayed_steps_have_the_same_bits(name, how, monkeypatch):
    "Three sequences that end at different times, so that steps of one to three rows follow"
    texts = 5,40,17
    said,made = spoken(DATA/name, texts, **how)
    assert made and all(made.values())
    monkeypatch.setattr(stepper, 'recorded', lambda device, f, x, angles: (f(),None))
    want,none = spoken(DATA/name, texts, **how)
    assert said==want and not any(none.values())

@pytest.mark.parametrize('name', ['nemotron-nvfp4','gpt-oss-mxfp4','qwen35-mixed'])
def test_layers_that_are_no_list_of_calls(name):
    "Experts and states are NumPy's in part: such a model goes on as ever, and is asked once"
    _,made = spoken(DATA/name, (5,9))
    assert made and not any(made.values())
