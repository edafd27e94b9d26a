"""Provoke errors that stay, each in a process of its own, and see that they are recognised once,
name the kernel, that nothing runs afterwards, and that the process ends quietly.

python tests/gpu/faults.py all of them, on cuda:0"""
import subprocess,sys,tempfile
from pathlib import Path
from atlas.card.card import Arguments,card_of,run
from atlas.ground.core import DeviceError
from atlas.card.device import Cuda,CudaFault,Host,faults
from atlas.card.graph import Graph
from atlas.card.launch import Source
from toys import verdict

BAD = '''// y : [n] f32
extern "C" __global__ void bad(float* y, long long off, int how) {
    if (how == 1) *(volatile float*)((char*)y + 1) = 1.f;
    else if (how == 2) asm("trap;");
    else y[off + threadIdx.x] = 1.f;
}
'''
CASES = dict(eager=700, exact=700, graph=700, misaligned=716, trap=719)

FAR = 1<<42 # Bytes beyond what there is

class Pair:
    "A kernel that is good, and one that can be bad, over the same array"
    def __init__(self, card):
        self.card = card
        self.x,self.y = card.zeros((8,256)),card.zeros((8,256))
        self.w = card.zeros((256,))
        with tempfile.TemporaryDirectory() as d:
            Path(d, 'bad.cu').write_text(BAD)
            self.kernel = card_of(self.x).load(Source('bad', d))
        self.words = Arguments('Pqi')

    def bad(self, off, how=0, block=32):
        self.words.fill([self.y.data.ptr, off, how])
        self.kernel((1,1,1), (block,1,1), self.words.pointers, pdl=False)

    def good(self):
        run('rmsnorm', 8, 256, self.x, self.w, 1e-5, self.y, 256, pdl=False)

    def recorded(self):
        "Both in a graph, and what it wrote is fetched"
        def step():
            self.good()
            self.bad(FAR)
        g = Graph(step, self.card, 'a step', warm=False)
        s = self.card.own_stream()
        g(s.raw)
        n = self.y.nbytes
        s.gather([(self.card.address(self.y), n)], s.buffer(n)).wait()

    def launched(self, how):
        "One between two good ones, and what they wrote is fetched"
        self.bad(FAR, dict(misaligned=1, trap=2).get(how, 0))
        self.good()
        self.card.download(self.y)

def raised(f, kind, otherwise):
    "The error of `kind` that `f` ends with; without one the process ends, and says `otherwise`"
    try:
        f()
    except kind as e:
        return e
    raise SystemExit(otherwise)

def nothing_stays(p:Pair):
    "Good launches leave no fault, nor do errors of one call"
    p.good()
    p.bad(0)
    p.card.synchronize()
    assert not faults.names
    for wrong in (lambda: p.card.zeros((1<<40,)), lambda: p.bad(0, block=4096)):
        e = raised(wrong, DeviceError, 'what cannot be was done')
        assert not isinstance(e, CudaFault)
    p.good()
    p.card.synchronize()

def nothing_runs(p:Pair, first:CudaFault):
    "After a fault, but on the host"
    calls = (
        p.good,
        p.card.synchronize,
        lambda: p.card.zeros((2,)),
        lambda: p.card.download(p.y),
        p.card.memory)
    for f in calls:
        e = raised(f, CudaFault, 'something ran after the fault')
        assert e.kernels==first.kernels
    assert Host().zeros((2,)).sum()==0

def fail(how):
    "Let a kernel fail between two good ones"
    p = Pair(Cuda())
    nothing_stays(p)
    faults.exact = how=='exact'
    def wrong():
        p.good()
        if how=='graph':
            p.recorded()
        else:
            p.launched(how)
    first = raised(wrong, CudaFault, 'no fault')
    assert f'CUDA error {CASES[how]}' in str(first), first
    assert 'bad' in first.kernels, first
    assert how!='exact' or first.kernels==('bad',), first
    nothing_runs(p, first)
    print(f'{how}: {first.msg}')

def alone(how):
    "Complaints about a process in which it happens"
    r = subprocess.run([sys.executable, __file__, how], timeout=300, capture_output=True, text=True)
    print(r.stdout, end='', flush=True)
    if r.returncode:
        return [f'{how}: ended with {r.returncode}: {r.stderr[-2000:]}']
    print(r.stderr[:600], end='')
    return [f'{how}: its end was not quiet']*('Exception ignored' in r.stderr)

if __name__=='__main__':
    if len(sys.argv)>1:
        fail(sys.argv[1])
    else:
        verdict([b for how in CASES for b in alone(how)], f'{len(CASES)} kinds of faults')
