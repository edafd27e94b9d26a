"""Launch a cubin's kernel with programmatic dependent launch (PDL), capture a graph of launches, time it.

CuPy's own kernels take no launch attributes, so the call is the driver's `cuLaunchKernelEx`, through ctypes, on CuPy's current stream. The attribute
survives stream capture: in the graph it is a programmatic edge. Used by variants.py, check.py and bench.py; prints nothing.
"""
import ctypes as C
import cupy as cp,numpy as np

cp.zeros(1)  # makes the context that modules are loaded into
driver = C.CDLL('libcuda.so.1')

class Attribute(C.Structure): _fields_ = [('id', C.c_int), ('pad', C.c_char*4), ('value', C.c_int*16)]
class Config(C.Structure):
    "CUlaunchConfig"
    _fields_ = [('grid', C.c_uint*3), ('block', C.c_uint*3), ('shared', C.c_uint), ('stream', C.c_void_p), ('attributes', C.POINTER(Attribute)),
                ('count', C.c_uint)]

PDL = (Attribute*1)()
PDL[0].id,PDL[0].value[0] = 6,1  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

def ok(code, what):
    if not code: return
    text = C.c_char_p(); driver.cuGetErrorString(code, C.byref(text))
    raise RuntimeError(f'{what}: {text.value.decode() if text.value else code}')

def load(cubin, name):
    "Handle of function `name` of the file `cubin`"
    module,function = C.c_void_p(),C.c_void_p()
    ok(driver.cuModuleLoad(C.byref(module), str(cubin).encode()), name)
    ok(driver.cuModuleGetFunction(C.byref(function), module, name.encode()), name)
    return function

def argument(v):
    "Arrays go as pointers, None as the null pointer, Python's floats as float32, whole numbers as int32"
    if v is None: return C.c_void_p(0)
    if isinstance(v, cp.ndarray): return C.c_void_p(v.data.ptr)
    return C.c_float(v) if isinstance(v, float) else C.c_int(int(v))

def launch(function, grid, block, args, pdl=True):
    "Start `function` on CuPy's current stream"
    values = [argument(a) for a in args]
    pointers = (C.c_void_p*len(values))(*[C.cast(C.pointer(v), C.c_void_p) for v in values])
    grid = (*grid, 1, 1)[:3]
    config = Config((C.c_uint*3)(*grid), (C.c_uint*3)(block, 1, 1), 0, cp.cuda.get_current_stream().ptr, PDL if pdl else None, int(pdl))
    ok(driver.cuLaunchKernelEx(C.byref(config), function, pointers, None), f'launch of {grid} x {block}')

stream = cp.cuda.Stream(non_blocking=True)

def graph(f):
    "What `f()` launches, as a graph"
    with stream:
        stream.begin_capture(); f()
        return stream.end_capture()

def replay(f):
    "Capture `f()`, run it once, wait for it"
    cp.cuda.Device().synchronize()  # inputs are made on another stream
    graph(f).launch(stream); stream.synchronize()

def microseconds(f, n=20, warm=3, captured=True):
    "Median time of `n` replays of the graph of `f()`, or of `f()` itself"
    cp.cuda.Device().synchronize()
    g,times = graph(f) if captured else None,[]
    for _ in range(n+warm):
        begin,end = cp.cuda.Event(),cp.cuda.Event()
        begin.record(stream)
        if captured: g.launch(stream)
        else:
            with stream: f()
        end.record(stream); end.synchronize()
        times.append(cp.cuda.get_elapsed_time(begin, end))
    return float(np.median(times[warm:]))*1e3
