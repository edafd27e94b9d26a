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

def fail(how):
    "Let a kernel fail between two good ones"
    card = Cuda()
    x = card.zeros((8,256))
    w = card.zeros((256,))
    y = card.zeros((8,256))
    with tempfile.TemporaryDirectory() as d:
        Path(d, 'bad.cu').write_text(BAD)
        k = card_of(x).load(Source('bad', d))
    words = Arguments('Pqi')
    def bad(off, how=0, block=32):
        words.fill([y.data.ptr, off, how])
        k((1,1,1), (block,1,1), words.pointers, pdl=False)
    def good():
        run('rmsnorm', 8, 256, x, w, 1e-5, y, 256, pdl=False)
    good()
    bad(0)
    card.synchronize()
    assert not faults.names
    for wrong in (
            lambda: card.zeros((1<<40,)),
            lambda: bad(0, block=4096)):
        try:
            wrong()
            raise SystemExit('what cannot be was done')
        except DeviceError as e:
            assert not isinstance(e, CudaFault)   # errors of one call change nothing
    good()
    card.synchronize()
    faults.exact = how=='exact'
    try:
        good()
        if how=='graph':
            g = Graph(lambda: (good(), bad(1<<42)), card, 'a step', warm=False)
            s = card.own_stream()
            g(s.raw)
            s.gather(
                [(card.address(y), y.nbytes)],
                s.buffer(y.nbytes)).wait()
        else:
            bad(1<<42, dict(misaligned=1, trap=2).get(how, 0))
            good()
            card.download(y)
        raise SystemExit('no fault')
    except CudaFault as e:
        first = e
    assert (
        f'CUDA error {CASES[how]}' in str(first) and 'bad' in first.kernels
        and (how!='exact' or first.kernels==('bad',))), first
    for f in (
            good, card.synchronize, lambda: card.zeros((2,)),
            lambda: card.download(y), card.memory):
        try:
            f()
            raise SystemExit('something ran after the fault')
        except CudaFault as e:
            assert e.kernels==first.kernels
    assert Host().zeros((2,)).sum()==0
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
