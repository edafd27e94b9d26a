// Router logits of a decode step, the norm before it folded in, and the shared expert's gate as one more row; all in float32.
// Who is picked is decided by the kernels that use it (lib/topk.cuh).
//   w      : [n, k]      bf16   router rows, then the shared expert's gate if there is one
//   bias   : [n]         f32    or null
//   gain   : [k]         f32    of the norm
//   x      : [rows, k]   f32
//   logits : [rows, n]   f32
//   -D K=  length of a row, 256 must divide it      -D ROWS=  1 to 8
//   launch: <<<ceil(n/2), 64>>>
#include "lib/bf16row.cuh"
#include "lib/pdl.cuh"
#ifndef K
#define K 2048
#endif
#ifndef ROWS
#define ROWS 1
#endif

extern "C" __global__ void __launch_bounds__(64) router(const unsigned short* __restrict__ w, const float* __restrict__ bias,
        const float* __restrict__ gain, const float* x, float eps, float* logits, int n) {
    const int lane = threadIdx.x % 32, r = blockIdx.x * 2 + threadIdx.x / 32;
    const bool real = r < n;
    Bf16Row<K, true> row;
    row.load(w + (size_t)(real ? r : 0) * K, gain, lane);
    pdl_trigger();
    pdl_wait();
    #pragma unroll 1
    for (int t = 0; t < ROWS; t++) {
        const float v = row.dot(x + (size_t)t * K, gain, eps, lane);
        if (!lane && real) logits[(size_t)t * n + r] = v + (bias ? bias[r] : 0.f);
    }
}
