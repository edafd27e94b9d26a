// y = add + x * sigmoid(gate), one gate a row: an expert that all rows share and that is not in the bank of the others.
//   x    : [rows, n]   f32
//   gate : [rows, m]   f32   its first column
//   add  : [rows, n]   f32   or null; may be y
//   y    : [rows, n]   f32   may be x
//   launch: <<<(ceil(n/256), rows), 256>>>
#include "lib/pdl.cuh"

extern "C" __global__ void __launch_bounds__(256) gate_add(const float* x, const float* gate, const float* add, float* y, int n, int m) {
    const int i = blockIdx.x * 256 + threadIdx.x, t = blockIdx.y;
    pdl_trigger();
    pdl_wait();
    if (i >= n) return;
    const size_t at = (size_t)t * n + i;
    y[at] = fmaf(x[at], 1.f / (1.f + expf(-gate[(size_t)t * m])), add ? add[at] : 0.f);
}
