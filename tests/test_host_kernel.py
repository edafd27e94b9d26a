"""The kernel for the processor behind whole models: as near to the definition as its contract
says, in every family and company; what a user asks of threads; and a machine without a compiler"""
import logging,shutil,subprocess,sys
import numpy as np
import pytest
from atlas import SamplingParams
from atlas.card import processor
from atlas.card.device import Host
from atlas.ground.core import RequestError
from atlas.ground.options import EngineConfig
from atlas.ground.weights import open_checkpoint
from atlas.model.model import load_model
from atlas.ops.host import HostMatrix,settled
from atlas.use.llm import LLM
from helpers.reference import Run,data as DATA

ARM = shutil.which('aarch64-linux-gnu-g++')
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
