"""A CUDA driver that keeps books of addresses and memory, refuses what a real one refuses, and
fails when it is told to"""
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace as NS
import numpy as np
from atlas.card.device import Cuda,Faults

def values(args):
    "Of ctypes their values, and of `byref` what it points to"
    return [a.value if hasattr(a, 'value') else getattr(a, '_obj', a) for a in args]

class Driver:
    """Memory calls of the driver; `fail` maps the name of a call to the statuses it gives next, 0
    being none"""
    page = 2<<20
    def __init__(self, total):
        self.total,self.free = total,total
        self.next,self.reserved = 1<<45,{} # Address -> bytes
        self.handles,self.maps = {},{}
        self.fail,self.calls = {},[]
    def __getattr__(self, name):
        f = getattr(type(self), '_'+name)
        def call(*args):
            self.calls.append(name)
            if self.fail.get(name) and (code := self.fail[name].popleft()):
                return code
            return f(self, *values(args)) or 0
        return call
    def failing(self, **codes):
        self.fail = {k: deque(v) for k,v in codes.items()}
    def _cuDeviceGetAttribute(self, out, which, dev):
        out.value = int(which==102)
    def _cuMemGetAllocationGranularity(self, n, prop, flag):
        n.value = self.page
    def _cuMemAddressReserve(self, at, n, align, hint, flags):
        at.value = self.next
        self.reserved[self.next] = n
        self.next += n+self.page
    def _cuMemAddressFree(self, at, n):
        whole = self.reserved.pop(at, 0)==n
        return 0 if whole and not any(at<=m<at+n for m in self.maps) else 1
    def _cuMemCreate(self, h, n, prop, flags):
        if n%self.page or not n or (prop.type, prop.location.type)!=(1,1):
            return 1
        if n>self.free:
            return 2
        self.free -= n
        h.value = 1+max(self.handles, default=0)
        self.handles[h.value] = n
    def _cuMemMap(self, at, n, off, h, flags):
        inside = any(a<=at and at+n<=a+s for a,s in self.reserved.items())
        taken = any(a<at+n and at<a+s for a,(s,_,_) in self.maps.items())
        if at%self.page or self.handles.get(h)!=n or not inside or taken:
            return 1
        self.maps[at] = n,h,False
    def _cuMemSetAccess(self, at, n, desc, count):
        if self.maps.get(at, (0,))[0]!=n or desc.flags!=3:
            return 1
        self.maps[at] = *self.maps[at][:2],True
    def _cuMemUnmap(self, at, n): return 0 if self.maps.pop(at, (0,))[0]==n else 1
    def _cuMemRelease(self, h):
        if any(m[1]==h for m in self.maps.values()):
            return 1
        self.free += self.handles.pop(h)
    def usable(self, at, n):
        "Is there memory behind all of it? A stretch may go over several mappings"
        while n>0:
            m = next(((a+s-at) for a,(s,_,ok) in self.maps.items() if a<=at<a+s and ok), 0)
            if not m:
                return False
            at,n = at+m,n-m
        return True

class CudaError(RuntimeError):
    "As CuPy raises it"
    def __init__(self, status):
        self.status = status
        super().__init__(f'cudaError {status}')

def card(driver, wait=lambda: None):
    "A `Cuda` on that driver; `wait` is what happens when the card is waited for"
    c = Cuda.__new__(Cuda)
    c.index,c.name = 0,'cuda:0'
    c.card,c.integrated = 'A made-up card',False
    c.faults = Faults()
    c.xp = cupy_of(driver, wait)
    return c

def nothing(*args, **kw):
    "What calls do that need a card"

def cupy_of(driver, wait):
    "As much of CuPy as a `Cuda` looks at"
    pool = NS(free_all_blocks=nothing)
    return NS(
        cuda=cuda_of(driver, wait),
        ndarray=array,
        zeros=np.zeros,
        asarray=np.asarray,
        ascontiguousarray=np.ascontiguousarray,
        asnumpy=lambda a: a,
        get_default_memory_pool=lambda: pool)

def array(shape, dtype, memptr):
    "One of the card: nothing is in it"
    return NS(
        shape=shape,
        dtype=np.dtype(dtype),
        data=memptr,
        nbytes=0,
        flags=NS(c_contiguous=True),
        set=nothing)

def cuda_of(driver, wait):
    "Its part `cuda`"
    class Device(nullcontext):
        def synchronize(self):
            wait()
    return NS(
        Device=lambda i: Device(),
        runtime=runtime_of(driver),
        MemoryPointer=lambda mem, off: NS(ptr=mem.ptr+off, owner=mem),
        UnownedMemory=lambda ptr, size, owner, device_id: NS(ptr=ptr, size=size, owner=owner),
        alloc_pinned_memory=bytearray,
        Event=lambda **kw: NS(record=nothing, synchronize=wait),
        get_current_stream=lambda: NS(ptr=0))

def runtime_of(driver):
    return NS(
        free=nothing,
        memGetInfo=lambda: (driver.free, driver.total),
        memcpyAsync=nothing,
        memset=nothing,
        CUDARuntimeError=CudaError)
