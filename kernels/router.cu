// Router logits of a decode step, the norm before it folded in, and the shared expert's gate as one more row; all in float32.
// Who is picked is decided by the kernels that use it (lib/topk.cuh).
//   w      : [rbytes]    u8     bf16 [n, k]: router rows, then the shared expert's gate if there is one
//   bias   : [n]         f32    or null
//   gain   : [k]         f32    of the norm
//   x      : [rows, k]   f32
//   logits : [rows, n]   f32
//   -D HIDDEN=  k, 256 must divide it
//   launch: <<<(ceil(n/2), any), 64>>>, `count` rows dealt out to blockIdx.y
#include "lib/bf16row.cuh"
#include "lib/pdl.cuh"
#ifndef HIDDEN
#define HIDDEN 2048
#endif
constexpr int K = HIDDEN;

extern "C" __global__ void __launch_bounds__(64) router(const unsigned char* __restrict__ w, const float* __restrict__ bias,
        const float* __restrict__ gain, const float* x, float eps, float* logits, int n, int count) {
    const int lane = threadIdx.x % 32, r = blockIdx.x * 2 + threadIdx.x / 32;
    const bool real = r < n;
    Bf16Row<K, true> row;
    row.load((const unsigned short*)w + (size_t)(real ? r : 0) * K, gain, lane);
    pdl_trigger();
    pdl_wait();
    #pragma unroll 1
    for (int t = blockIdx.y; t < count; t += gridDim.y) {
        const float v = row.dot(x + (size_t)t * K, gain, eps, lane);
        if (!lane && real) logits[(size_t)t * n + r] = v + (bias ? bias[r] : 0.f);
    }
}
