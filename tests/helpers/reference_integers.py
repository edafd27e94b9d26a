"""INT4 as libraries pack it: like reference_formats.py, but of the libraries' own making.

    pip install compressed-tensors==0.20.0 loguru psutil accelerate
    pip install --no-deps auto-gptq==0.7.1
    pip install --no-deps --no-build-isolation autoawq==0.2.9

AutoGPTQ and AutoAWQ are no longer developed, and do not import beside today's transformers.
What quantises, packs and unpacks in them is plain torch, so those modules alone are imported. The
weights that a packed matrix stands for come from the library's own way back, with scales widened
to float32 first, so that nothing is rounded there.
"""
import importlib,importlib.util,sys
from types import ModuleType
from unittest import mock
import torch
from torch import nn

def bare(name, *packages):
    "The module `name`, without running what its `packages` begin with"
    for p in packages:
        if p in sys.modules:
            continue
        places = importlib.util.find_spec(p).submodule_search_locations
        sys.modules[p] = ModuleType(p)
        sys.modules[p].__path__ = list(places)
    return importlib.import_module(name)

def linear(w):
    "A layer with the matrix `w`"
    out,inner = w.shape
    m = nn.Linear(inner, out, bias=False)
    m.weight.data = w.clone()
    return m

def ct_scheme(symmetric, group):
    "What config.json says of weights in groups, as compressed-tensors has it"
    return dict(num_bits=4, type='int', strategy='group', group_size=group,
        symmetric=symmetric, dynamic=False)

def ct_int4(symmetric, group, dtype=torch.bfloat16):
    "pack-quantized of compressed-tensors, with scales of this type"
    def packed(w):
        from compressed_tensors.compressors import PackedQuantizationCompressor as Compressor
        from compressed_tensors.quantization import QuantizationArgs,QuantizationScheme
        from compressed_tensors.quantization.utils import calculate_qparams
        args = QuantizationArgs(**ct_scheme(symmetric, group))
        scheme = QuantizationScheme(targets=['Linear'], weights=args)
        b = w.reshape(len(w), -1, group)
        lo,hi = b.amin(-1),b.amax(-1)
        scale,zero = calculate_qparams(lo, hi, args)
        scale = scale.to(dtype)
        parts = dict(weight=w, weight_scale=scale.float(), weight_zero_point=zero)
        stored = Compressor.compress(parts, scheme)
        dense = Compressor.decompress(stored, scheme)['weight']
        return stored|dict(weight_scale=scale),dense
    return packed

def gptq_rounded(w, group, ordered):
    "Layer, scales, zero points, group of each column, by AutoGPTQ; `ordered`: by activation"
    GPTQ = bare('auto_gptq.quantization.gptq', 'auto_gptq').GPTQ
    layer = linear(w)
    rng = torch.Generator().manual_seed(w.shape[1])
    inner = w.shape[1]
    x = torch.randn(256, inner, generator=rng)
    x = x*torch.linspace(.2, 2, inner)
    g = GPTQ(layer)
    g.quantizer.configure(4, perchannel=True, sym=False)
    g.add_batch(x, None)
    with mock.patch('torch.cuda.synchronize'):
        found = g.fasterquant(group_size=group, actorder=ordered, static_groups=ordered)
    return layer,*found

def gptq_int4(group=32, ordered=True):
    "AutoGPTQ's first layout: zero points are stored less one"
    def packed(w):
        places = 'auto_gptq','auto_gptq.nn_modules','auto_gptq.nn_modules.qlinear'
        QuantLinear = bare('auto_gptq.nn_modules.qlinear.qlinear_cuda', *places).QuantLinear
        layer,*found = gptq_rounded(w, group, ordered)
        out,inner = w.shape
        m = QuantLinear(4, group, inner, out, False)
        m.pack(layer.half(), *found)
        stored = dict(m.state_dict())
        dense = m.float()(torch.eye(inner)).T
        return stored,dense.contiguous()
    return packed

def awq_int4(group=32):
    "AutoAWQ's `gemm` layout"
    def packed(w):
        gemm = bare('awq.modules.linear.gemm', 'awq', 'awq.modules', 'awq.modules.linear')
        rows = bare('auto_gptq.quantization.quantizer', 'auto_gptq').Quantizer()
        rows.configure(4, perchannel=True, sym=False)
        b = w.reshape(-1, group)
        rows.find_params(b, weight=True)
        layer = linear(rows.quantize(b).reshape(w.shape))
        def turned(p): return p.reshape(len(w), -1).T.contiguous()
        groups = dict(scales=turned(rows.scale), zeros=turned(rows.zero))
        m = gemm.WQLinear_GEMM.from_linear(layer, 4, group, **groups)
        scales = m.scales.float()
        dense = gemm.dequantize_gemm(m.qweight, m.qzeros, scales, 4, group)
        return dict(m.state_dict()),dense.T.contiguous()
    return packed
