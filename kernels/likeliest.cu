// A draft for each row: the largest of its logits, the lowest column among equals, and the token that this column stands for. A row with a logit that is not finite has none.
// A block a row and nothing kept between launches, so a step that breaks off leaves nothing behind; it is made for heads that are read in part. greedy.cu shares a row among many blocks.
//   logits : [rows, v]  f32
//   names  : [v]        i32   or null: a column is its token
//   ids    : [rows]     i32   -1 where a logit is not finite
//   launch: <<<rows, 1024>>>
#include "lib/pdl.cuh"
#include "lib/sample.cuh"

extern "C" __global__ void __launch_bounds__(1024) likeliest(const float* logits, const int* __restrict__ names, int* ids, int v) {
    __shared__ u64 part[32];
    const float* row = logits + (size_t)blockIdx.x * v;
    pdl_trigger();
    pdl_wait();
    unsigned top = 0, at = 0;  // of a logit; all ones for one that is not finite
    for (int base = threadIdx.x * 4; base < v; base += 16384) {
        float4 a[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) a[i] = load4(row, base + i * 4096, v);
        #pragma unroll
        for (int i = 0; i < 16; i++) {
            const float x = (&a[i / 4].x)[i % 4];
            const int id = base + i / 4 * 4096 + i % 4;
            const unsigned k = id >= v ? 0u : not_finite(x) ? ~0u : float_key(x);
            if (k > top) { top = k; at = id; }
        }
    }
    u64 key = (u64)top << 32 | (unsigned)~at;
    for (int m = 16; m; m >>= 1) key = max(key, __shfl_xor_sync(~0u, key, m));
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = key;
    __syncthreads();
    if (threadIdx.x >= 32) return;
    key = part[threadIdx.x];
    for (int m = 16; m; m >>= 1) key = max(key, __shfl_xor_sync(~0u, key, m));
    if (threadIdx.x) return;
    const int id = (unsigned)(key >> 32) == ~0u ? -1 : (int)~(unsigned)key;
    ids[blockIdx.x] = id >= 0 && names ? names[id] : id;
}
