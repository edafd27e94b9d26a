"""What goes wrong with a card: none, an old one, a full one, one that fails; and memory that is
given back and taken again. A made-up driver plays the card."""
import gc,math,re,subprocess,sys,threading,weakref
import numpy as np,pytest
from hypothesis import given,settings,strategies as st
from pathlib import Path
from types import SimpleNamespace as NS
from atlas.card.arena import Arena,CudaPages,HostCopy,HostPages
from atlas.ground.core import DeviceError,OutOfMemoryError,typed_error
from atlas.card.device import STICKY,Budget,Cuda,CudaFault,Faults,Host,Memory
from atlas.card.device import cuda_count,get_device,quiet
from atlas.card.graph import Graph
from atlas.card.card import Launch,_ok
from atlas.card.launch import Nvrtc,Source,_refused,compiled,find_nvcc
from helpers import made_up_driver as made_up

G,M = 1<<30,1<<20

# No card, or the wrong one

def cupy(status=0, driver=13000, count=1, **props):
    "CuPy's runtime on a machine with `count` cards, or with the trouble that `status` names"
    def get():
        if status:
            raise made_up.CudaError(status)
        return count
    props = dict(name=b'A card', major=9, minor=0, multiProcessorCount=132, integrated=0)|props
    rt = NS(
        getDeviceCount=get, driverGetVersion=lambda: driver, runtimeGetVersion=lambda: 13020,
        CUDARuntimeError=made_up.CudaError, getDeviceProperties=lambda i: props,
        memGetInfo=lambda: (9*G, 140*G))
    return NS(cuda=NS(runtime=rt))

@pytest.mark.parametrize('xp,says,do', [
    (None, 'CuPy', 'pip install'),
    (cupy(35, 0), 'no NVIDIA driver', 'Install one'),
    (cupy(35, 12040), 'too old: it supports CUDA 12.4, and CuPy needs 13.2', 'Update the driver'),
    (cupy(100), 'sees no GPU', 'CUDA_VISIBLE_DEVICES'),
    (cupy(999), 'does not start', 'nvidia-smi'),
    (cupy(803), 'does not start', 'nvidia-smi'),
    (cupy(major=6, minor=1), 'compute capability 6.1', '--device cpu')], ids=['no CuPy',
    'no driver', 'old driver', 'no GPU', 'unknown', 'mismatch', 'old card'])
def test_no_card(xp, says, do):
    with pytest.raises(DeviceError, match=re.escape(says)) as e:
        Cuda(0, xp)
    assert do in e.value.hint
    assert e.value.code=='device_error'
    assert e.value.status==503

def test_no_such_card():
    with pytest.raises(DeviceError, match='There is no cuda:2: this machine has 2 CUDA devices'):
        Cuda(2, cupy(count=2))

def test_host_works_without():
    assert get_device('auto').kind in ('cpu', 'cuda')
    assert Host().zeros((2,)).sum()==0
    assert cuda_count(cupy())==1

@pytest.mark.parametrize('integrated,reserve', [(0, 2), (1, 10)])
def test_budget_of_a_card(integrated, reserve, monkeypatch):
    """Its own memory is cudaMemGetInfo's; a shared one is the host's, of which a tenth stays the
    system's"""
    monkeypatch.setattr('atlas.card.device.host_memory', lambda soon=False: Memory(120*G, 100*G))
    c = Cuda(0, cupy(integrated=integrated))
    c.use = made_up.nullcontext
    m,b = c.memory(),c.budget(.5)
    assert m==((120*G, 100*G) if integrated else (140*G, 9*G))
    assert b.total==int((m.available-m.total*reserve//100)*.5)

# Errors that stay

def header():
    "The text of `cuda.h`, of CUDA's errors; None where there is none"
    if not find_nvcc():
        return None
    include = Path(find_nvcc()).resolve().parents[1]/'include'
    for p in include/'cuda.h',Path('/usr/local/cuda/include/cuda.h'):
        if p.exists():
            text = p.read_text()
            return text[text.index('typedef enum cudaError_enum'):text.index('} CUresult;')]

HARMLESS = {1, 2, 100, 200, 209, 500, 600, 701, 720, 900, 901}

def test_every_sticky_error_of_the_header_is_known():
    "The header says of each that the process must be terminated"
    text = header()
    if not text:
        pytest.skip('no cuda.h')
    found = re.findall(r'/\*\*(.*?)\*/\s*CUDA_\w+\s*=\s*(\d+)', text, re.S)
    said = {int(n):' '.join(d.replace('*', ' ').split()) for d,n in found}
    stay = {n for n,d in said.items() if 'inconsistent state' in d or 'must be terminated' in d}
    assert len(stay)>8
    assert stay<=STICKY.keys()
    assert not HARMLESS&STICKY.keys()

step = st.one_of(
    st.tuples(st.just('launch'), st.lists(st.sampled_from('abcdef'), min_size=1, max_size=3)),
    st.tuples(st.just('settle'), st.integers(0, 9)),
    st.tuples(st.just('wait'), st.none()),
    st.tuples(st.just('error'), st.sampled_from([0,1,2,201,701,700,716,719,999])))

class Latch:
    """A plain model of `Faults`: after the first error that stays everything refuses and names the
    same kernels; before it, other errors change nothing"""
    def __init__(self):
        self.f = Faults()
        self.open = [] # (launch, kernel) that nobody has waited for
        self.count = 0
        self.first = None # Kernels of the first error that stays
    def names(self):
        return list(dict.fromkeys(n for _,n in self.open))
    def do(self, what, v):
        if what=='launch':
            self.f.launching(*v)
            self.count += 1
            self.open += [(self.count, n) for n in v]
        elif what=='settle':
            self.f.settled(v)
            self.open = [o for o in self.open if o[0]>v]
        elif what=='wait':
            with self.f.watch():
                self.f.settled()
                self.open = []
        elif v:
            with self.f.watch('a wait'):
                raise made_up.CudaError(v)
    def stays(self, what, v, e):
        "An error that stays"
        if self.first is None:
            self.first = self.names()
            assert what=='error'
            assert v in STICKY
            assert all(n in str(e) for n in self.first)
        assert list(e.kernels)==self.first
        assert self.f.fault
    def passes(self, v, e):
        "One that does not"
        assert v not in STICKY
        assert self.first is None
        assert type(e) is (OutOfMemoryError if v==2 else DeviceError)
@settings(max_examples=200, deadline=None)
@given(steps=st.lists(step, max_size=30))
def test_latch(steps):
    m = Latch()
    for what,v in steps:
        try:
            m.do(what, v)
        except CudaFault as e:
            m.stays(what, v, e)
        except DeviceError as e:
            m.passes(v, e)
        else:
            # a fault is never passed over in silence
            assert m.first is None or what in ('settle','error')
        if m.first is None:
            assert m.f.names==m.names()
            assert m.f.count==m.count
    assert (m.f.fault is None)==(m.first is None)

def test_error_types():
    f = Faults()
    assert type(f.error(2, 'x')) is OutOfMemoryError
    assert type(f.error(1, 'x')) is DeviceError
    assert type(f.error(700, 'x')) is CudaFault
    # the first is what is told
    assert type(f.error(716, 'y')) is CudaFault
    assert f.fault.msg.startswith('CUDA error 700')
    e = typed_error('device_fault', 'from a worker')
    assert type(e) is CudaFault
    assert e.status==503
    assert e.kernels==()

def test_one_fault_for_many_threads():
    f,got = Faults(),[]
    f.launching('gemv')
    def go():
        try:
            with f.watch('a step'):
                raise made_up.CudaError(719)
        except CudaFault as e:
            got.append(str(e))
    ts = [threading.Thread(target=go) for _ in range(16)]
    for t in ts:
        t.start()
    for t in ts:
        t.join()
    assert len(got)==16
    assert all('gemv' in o for o in got)

def made_up_launch(monkeypatch, faults, answer):
    "A kernel that is loaded, on a card whose driver answers a launch with `answer()`"
    driver = NS(cuLaunchKernelEx=lambda *a: answer())
    monkeypatch.setattr('atlas.card.card.faults', faults)
    monkeypatch.setattr('atlas.card.card._driver', lambda: driver)
    module = NS(load=len, get_function=lambda name: NS(ptr=7))
    stream = NS(ptr=0)
    cuda = NS(Module=lambda: module, get_current_stream=lambda: stream)
    card = NS(
        xp=NS(cuda=cuda), card='A made-up card', arch='sm_90a', plain=True,
        recorded=False)
    return Launch(card, Source('rmsnorm'), b'')

def test_launch_of_a_kernel(monkeypatch):
    """A launch that fails says which; an error that stays closes the card, and later launches do
    not even reach it"""
    calls,status = [],[0]
    def answer():
        calls.append(status[0])
        return status[0]
    k = made_up_launch(monkeypatch, Faults(), answer)
    def launch():
        k((1,1,1), (256,1,1), None, pdl=False)
    launch()
    status[0] = 1
    with pytest.raises(DeviceError, match='rmsnorm cannot be launched') as e:
        launch()
    assert type(e.value) is DeviceError
    status[0] = 700
    said = 'illegal memory access, seen at rmsnorm cannot.*; it happened in rmsnorm'
    with pytest.raises(CudaFault, match=said):
        launch()
    status[0] = 0
    with pytest.raises(CudaFault, match='nothing runs on it any more'):
        launch()
    assert calls==[0,1,700]

def test_card_closes_for_everybody():
    "One wait that fails, and neither arrays, copies, graphs nor memory of that card can be had"
    status = []
    def wait():
        if status:
            raise made_up.CudaError(status[0])
    d = made_up.Driver(64*M)
    c = made_up.card(d, wait)
    a = Arena(c, Budget(64*M), pages=CudaPages(c, d))
    r = a.region('weights', 64*M)
    x = r.take((4,))
    c.faults.launching('delta_step')
    c.synchronize()
    c.faults.launching('gemv')
    status.append(714)
    with pytest.raises(CudaFault, match='it happened in gemv'):
        c.synchronize()
    before = len(d.calls)
    for f in uses_of(c, r, x):
        with pytest.raises(CudaFault, match='nothing runs on it any more'):
            f()
    assert len(d.calls)==before
    assert c.faults.names==['gemv']

def uses_of(c, r, x):
    "All that one may want of a card `c`, its region `r` and an array `x` there"
    g = Graph.__new__(Graph)
    g.card,g.name,g.kernels = c,'g',('argmax',)
    copies = [
        lambda: c.upload(np.ones(2)), lambda: c.download(x), lambda: c.write(x, np.ones(4)),
        lambda: c.zeros((2,))]
    return [c.synchronize, *copies, c.memory, g, r.release, lambda: r.take((60*M,), 'uint8')]

def has_card():
    try:
        return cuda_count()>0
    except DeviceError:
        return False

@pytest.mark.skipif(not has_card(), reason='no card')
@pytest.mark.parametrize('how', ['eager','exact','graph','misaligned','trap'])
def test_real_faults(how):
    r = subprocess.run(
        [sys.executable, Path(__file__).parent/'gpu'/'faults.py', how],
        capture_output=True, text=True)
    assert r.returncode==0, r.stdout+r.stderr

# The arena

class HostArena:
    """Regions on the host against plain copies: arrays stay where they are, keep what they hold,
    and never overlap, in whatever order they come and go; the budget is the sum of what is
    mapped"""
    def __init__(self, budget, step):
        self.page = HostPages.page
        self.arena = Arena(Host(), Budget(budget*self.page), step=step*self.page)
        self.names = 0
        self.held = {}
        self.rs = [self.region(n) for n in (8,40,200)]
    def region(self, pages):
        self.names += 1
        r = self.arena.region(f'r{self.names}', pages*self.page)
        self.held[r.name] = []
        return r
    def take(self, r, n, k):
        dtype = ('float32', 'uint8', 'int64', 'float16')[k%4]
        align = (1,64,256,4096)[k//4%4]
        shape = (n//100,k) if k%3 else (n,)
        nbytes = max(1, math.prod(shape)*np.dtype(dtype).itemsize)
        used,budget = r.used,self.arena.budget.used
        try:
            a = r.take(shape, dtype, align)
        except OutOfMemoryError as e:
            assert (r.used, self.arena.budget.used)==(used, budget)
            assert not r.asleep
            assert e.hint
            return
        except DeviceError:
            assert r.asleep
            return
        assert r.used==used+-(-nbytes//256)*256
        assert (a.shape,a.dtype)==(shape,dtype)
        self.keep(r, a, max(align, 256), 1+k%100)
    def keep(self, r, a, align, fill):
        "An array that lies well in its region, filled"
        assert a.ctypes.data%align==0
        assert r.at<=a.ctypes.data
        assert a.ctypes.data+a.nbytes<=r.at+r.size
        a[...] = fill
        self.held[r.name].append([a, a.copy(), a.ctypes.data])
    def drop(self, r, n, k):
        "Somebody lets go of arrays; a view of another keeps it"
        for i in (n%7, k%5, n%3)[:1+k%3]:
            if i<len(os := self.held[r.name]):
                os.pop(i)
        if os := self.held[r.name]:
            os[0][0] = os[0][0][...]
        r._settle()
    def trim(self, r, n, k):
        mapped = r.mapped
        assert r.trim()==mapped-r.mapped
        assert r.asleep or r.mapped<=len(r._needed())*r.chunk
    def sleep(self, r, n, keep):
        if r.asleep:
            assert r.release()==0
            return
        mapped = r.mapped
        copy = HostCopy(r, lambda arrays: [0 for _ in arrays]) if keep%2 else None
        assert r.release(copy)==mapped
        assert r.asleep
        assert r.mapped==0
        assert r.name not in self.arena.budget.parts
        if not keep%2:
            for o in self.held[r.name]:
                o[1] = np.zeros_like(o[1])
    def wake(self, r, n, k):
        try:
            r.restore()
        except OutOfMemoryError:
            assert r.asleep
            assert r.mapped==0
    def close(self, r, n, k):
        self.held.pop(r.name)
        r.close()
        self.rs[self.rs.index(r)] = self.region(1+n%60)
    def others(self, r, n, k):
        "Somebody else takes from the budget, or gives back"
        b,n = self.arena.budget,k%20*self.page
        if k%3:
            b.give('others')
        elif n<=b.left:
            b.take('others', n)
    def sound(self):
        "The budget is the sum of what is mapped, arrays do not overlap, and regions are in order"
        a,b = self.arena,self.arena.budget
        mapped = sum(r.mapped for r in a.regions.values())
        assert b.used-b.parts.get('others', 0)==mapped
        assert b.left>=0
        spans = sorted((at, at+x.nbytes) for os in self.held.values() for x,_,at in os if x.nbytes)
        assert all(e<=s for (_,e),(s,_) in zip(spans, spans[1:]))
        for name,os in self.held.items():
            self.sound_region(a[name], os)
    def sound_region(self, r, arrays):
        "Holes and arrays fill a region, and arrays are where they were, with what they held"
        h = r._holes
        assert all(s<e for s,e in h)
        assert all(e<s for (_,e),(s,_) in zip(h, h[1:]))
        assert r.asleep or set(r._needed())<=r._handles.keys()
        assert r.used==sum(-(-max(1, x.nbytes)//256)*256 for x,_,_ in arrays)
        assert r.used+sum(e-s for s,e in h)==r.size
        if not r.asleep:
            for x,want,at in arrays:
                assert x.ctypes.data==at
                assert (x==want).all()

_DO = ['take']*6+['drop']*4+[
    'trim', 'trim', 'sleep', 'wake', 'wake', 'wake', 'others', 'close']
@settings(max_examples=150, deadline=None)
@given(
    budget=st.integers(0, 100),
    step=st.integers(1, 8),
    ops=st.lists(
        st.tuples(
            st.sampled_from(_DO), st.integers(0, 2),
            st.integers(0, 20000), st.integers(0, 1000)),
        min_size=10, max_size=60))
def test_arena_of_the_host(budget, step, ops):
    h = HostArena(budget, step)
    for op,i,n,k in ops:
        getattr(h, op)(h.rs[i], n, k)
        h.sound()

statuses = st.lists(st.sampled_from([0,2,1,201]), max_size=3)
KINDS = 'take','take','drop','trim','sleep','wake','others'
doings = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 1), st.integers(1, 20*M)),
    min_size=2, max_size=25)
failures = st.fixed_dictionaries(
    dict(cuMemCreate=statuses, cuMemMap=statuses, cuMemSetAccess=statuses))

class CardArena:
    "Regions on a made-up card whose driver may fail"
    def __init__(self):
        self.d = made_up.Driver(64*M)
        self.c = made_up.card(self.d)
        self.arena = Arena(self.c, Budget(48*M), step=4*M, pages=CudaPages(self.c, self.d))
        self.rs = [self.arena.region('weights', 40*M), self.arena.region('cache', 80*M)]
        self.arrays = []
    def do(self, op, r, n):
        try:
            self._do(op, r, n)
        except DeviceError as e:
            assert type(e) in (OutOfMemoryError, DeviceError)
            assert op!='wake' or r.asleep
    def _do(self, op, r, n):
        if op=='take':
            self.arrays.append((r, r.take((n,), 'uint8')))
        elif op=='drop' and self.arrays:
            self.arrays.pop(n%len(self.arrays))
        elif op=='trim':
            r.trim()
        elif op=='sleep':
            r.release()
        elif op=='wake':
            r.restore()
        else:
            self.others(n)
    def others(self, n):
        "Other processes take memory of the card, or give it back"
        d = self.d
        whole = d.total<64*M
        taken = min(n, d.free)
        d.free += n if whole else -taken
        d.total = 64*M if whole else 64*M-taken
    def sound(self):
        "What is handed out, mapped and paid for are the same, and arrays have memory behind them"
        d = self.d
        mapped = sum(o[0] for o in d.maps.values())
        assert mapped==sum(d.handles.values())==sum(r.mapped for r in self.rs)
        assert mapped==self.arena.budget.used
        assert all(ok for *_,ok in d.maps.values())
        for r,a in self.arrays:
            assert r.asleep or d.usable(a.data.ptr, a.shape[0])
    def empty(self):
        "All was given back"
        assert not (self.d.maps or self.d.handles or self.d.reserved)
        assert self.arena.budget.used==0
        assert self.c.faults.fault is None
@settings(max_examples=300, deadline=None)
@given(ops=doings, fail=failures, at=st.integers(0, 4))
def test_arena_of_a_card_loses_nothing(ops, fail, at):
    "Whatever fails, and in the end all is given back"
    a = CardArena()
    for i,(op,which,n) in enumerate(ops):
        if i==at:
            a.d.failing(**fail)
        a.do(op, a.rs[which], n)
        a.sound()
    a.d.failing()
    for r in a.rs:
        r.close()
    a.empty()

@pytest.mark.parametrize('call', ['cuMemCreate','cuMemMap','cuMemSetAccess'])
def test_no_room_to_wake(call):
    "It sleeps on, owes nothing, and wakes at the same addresses when there is room"
    d = made_up.Driver(64*M)
    r = weights_of(d)
    x = r.take((3*M,), 'uint8')
    r.release()
    d.failing(**{call: [2,2]})
    with pytest.raises(OutOfMemoryError):
        r.restore()
    d.failing()
    assert r.asleep
    assert not (d.maps or d.handles)
    assert r.arena.budget.used==0
    assert r.restore() is False
    assert d.usable(x.data.ptr, 3*M)
    assert r.arena.budget.used==r.mapped==32*M

def weights_of(d, c=None):
    "A region of 32 MB on a card of the driver `d`"
    c = c or made_up.card(d)
    return Arena(c, Budget(64*M), pages=CudaPages(c, d)).region('weights', 32*M)

def test_arrays_keep_their_region():
    """A region that nobody names any more lives as long as an array over it, and then gives
    everything back"""
    a = Arena(Host(), Budget(M))
    x = a.region('r', M).take((3,))
    r = weakref.ref(a['r'])
    del a
    gc.collect()
    assert r()
    del x
    gc.collect()
    assert not r()

def test_arrays_of_a_card_keep_their_region():
    d = made_up.Driver(64*M)
    x = weights_of(d).take((3,))
    gc.collect()
    assert d.maps
    assert d.usable(x.data.ptr, 12)
    del x
    gc.collect()
    assert not (d.maps or d.reserved)
    assert d.free==64*M

def test_a_recording_is_not_disturbed():
    """A model that the collector finds while a graph is recorded, in this thread or in another, is
    given back after it"""
    d = made_up.Driver(200*M)
    waits = []
    c = made_up.card(d, lambda: waits.append(quiet._recording))
    x,y = weights_of(d, c).take((3,)),weights_of(d, c).take((3,))
    with quiet.recording():
        del x
        gc.collect()
        t = threading.Thread(target=gc.collect)
        del y
        t.start()
        t.join()
        assert (len(d.reserved),len(d.maps))==(2,2)
        assert not waits
    assert waits
    assert not any(waits)
    assert not (d.maps or d.reserved)
    assert d.free==200*M

def test_a_recording_refuses_to_wait():
    "Waiting for the card or emptying pools is refused or put off"
    d = made_up.Driver(200*M)
    c = made_up.card(d)
    r = Arena(c, Budget(64*M), pages=CudaPages(c, d)).region('cache', 64*M)
    z = r.take((3,))
    with quiet.recording():
        del z
        for f in (c.synchronize, c.tidy, r.trim, r.release):
            with pytest.raises(DeviceError, match='while a graph is recorded'):
                f()
        d.failing(cuMemCreate=[2])
        with pytest.raises(OutOfMemoryError):
            r.take((40*M,), 'uint8')
    d.failing()
    assert r.trim()
    r.close()
    assert not (d.maps or d.reserved)
    assert d.free==200*M

def test_a_card_that_cannot_map():
    old = type(
        'Old', (made_up.Driver,),
        dict(_cuDeviceGetAttribute=lambda self, out, which, dev: 0))
    with pytest.raises(DeviceError, match='cannot map memory'):
        CudaPages(made_up.card(old(64*M)), old(64*M))

def counting_arena(monkeypatch, d):
    "An arena on a card that cannot map memory"
    def no(card):
        raise DeviceError('A made-up card cannot map memory')
    monkeypatch.setattr('atlas.card.arena.CudaPages', no)
    c = made_up.card(d)
    ptrs = iter(range(1, 99))
    def malloc(n): return NS(ptr=next(ptrs), size=n)
    pool = NS(malloc=malloc, free_all_blocks=lambda: None)
    monkeypatch.setattr(c.xp, 'get_default_memory_pool', lambda: pool, raising=False)
    with pytest.warns(UserWarning, match='cannot be put to sleep'):
        return Arena(c, Budget(M), step=4096)

def test_it_counts_all_the_same(monkeypatch):
    "On such a card arrays lie in CuPy's memory, and the region only counts them"
    d = made_up.Driver(64*M)
    a = counting_arena(monkeypatch, d)
    r = a.region('weights', M)
    p = r.malloc(5000)
    assert (p.ptr, r.used, a.budget.parts)==(1, 5120, dict(weights=8192))
    assert not d.calls
    with pytest.raises(DeviceError, match='cannot sleep') as e:
        r.release()
    assert e.value.hint
    with pytest.raises(OutOfMemoryError):
        r.malloc(2*M)
    del p
    r._settle()
    assert r.used==0
    assert a.close()==0
    assert not a.budget.parts

class Refuses:
    name,version = 'nvrtc','13.0'
    def __call__(self, src, arch, options):
        raise _refused(src, arch, self, 'rope.cu(3): error: expected a ";"')
class NoStore:
    def get(self, name, key):
        "Nothing is kept"

_BUILT = NS(card='A made-up card', arch='sm_90a')
@pytest.mark.parametrize('what,says', [
    (lambda: Nvrtc(None), 'CuPy'),
    (
        lambda: compiled(Source('rope'), 'sm_75', (), Refuses(), NoStore()),
        'rope.cu does not compile for sm_75 with nvrtc 13.0: rope.cu(3): error: expected a ";"'),
    (
        lambda: Nvrtc(
            NS(
                cuda=NS(
                    nvrtc=NS(getVersion=lambda: (12,8), getSupportedArchs=lambda: [75,90])))
        )(Source('rope'), 'sm_121a'),
        'no machine code of rope for sm_121a, and NVRTC 12.8 makes it for sm_75 to sm_90'),
    (lambda: _ok(1, 'moe with 230000 bytes of shared memory', _BUILT), 'moe with 230000 bytes'),
    (lambda: _ok(701, 'moe cannot be launched', _BUILT), 'moe cannot be launched'),
    (lambda: _ok(2, 'moe', _BUILT), 'moe'),
    (lambda: _ok(209, 'moe', _BUILT), 'moe'),
    (lambda: _ok(700, 'moe', _BUILT), 'CUDA error 700')],
    ids=[
        'no CuPy', 'does not compile', 'other architecture', 'shared memory', 'threads', 'memory',
        'machine code', 'fault'])
def test_every_trouble_says_what_to_do(what, says, monkeypatch):
    monkeypatch.setattr('atlas.card.card.faults', Faults())
    with pytest.raises(DeviceError) as e:
        what()
    assert e.value.hint
    assert e.value.hint in str(e.value)
    assert says in e.value.msg
