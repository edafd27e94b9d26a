// A draft for each row: the largest of its logits, the lowest column among equals, and the token
// that this column stands for. A row with a logit that is not finite has none: -2. TEAM blocks
// (lib/team.cuh) have a row, and nothing is kept between launches, so a step that breaks off leaves
// nothing behind; greedy.cu shares a row among many.
//   logits : [rows, v]  f32
//   names  : [v]        i32   or null: a column is its token
//   ids    : [rows]     i32   -2 where a logit is not finite
//   -D TEAM= 1 (by default), 2, 4 or 8
//   launch: <<<rows*TEAM, 1024>>>
#ifndef TEAM
#define TEAM 1
#endif
#include "lib/pdl.cuh"
#include "lib/sample.cuh"
#include "lib/team.cuh"

extern "C" TEAM_OF(TEAM) __global__ void __launch_bounds__(1024) likeliest(
        const float* logits, const int* __restrict__ names, int* ids, int v) {
    __shared__ u64 part[32], best;
    const float* row = logits + (size_t)(blockIdx.x / TEAM) * v;
    pdl_trigger();
    pdl_wait();
    unsigned top = 0, at = 0;  // of a logit; all ones for one that is not finite
    for (int base = blockIdx.x % TEAM * 4096 + threadIdx.x * 4; base < v;
            base += TEAM * 16384) {
        float4 a[4];
        #pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = load4(row, base + i * TEAM * 4096, v);
        #pragma unroll
        for (int i = 0; i < 16; i++) {
            const float x = (&a[i / 4].x)[i % 4];
            const int id = base + i / 4 * TEAM * 4096 + i % 4;
            const unsigned k = id >= v ? 0u : not_finite(x) ? ~0u : float_key(x);
            if (k > top) {
                top = k;
                at = id;
            }
        }
    }
    u64 key = (u64)top << 32 | (unsigned)~at;
    for (int m = 16; m; m >>= 1)
        key = max(key, __shfl_xor_sync(~0u, key, m));
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = key;
    __syncthreads();
    if (threadIdx.x < 32) {
        key = part[threadIdx.x];
        for (int m = 16; m; m >>= 1)
            key = max(key, __shfl_xor_sync(~0u, key, m));
        if (TEAM > 1 && !threadIdx.x)
            best = key;
    }
    if (TEAM > 1) {
        team_sync();
        if (threadIdx.x < 32 && blockIdx.x % TEAM == 0) {
            key = of_member(&best, threadIdx.x % TEAM);
            for (int m = 1; m < TEAM; m *= 2)
                key = max(key, __shfl_xor_sync(~0u, key, m));
        }
        team_sync();  // nobody leaves before that
        if (blockIdx.x % TEAM)
            return;
    }
    if (threadIdx.x)
        return;
    const int id = (unsigned)(key >> 32) == ~0u ? -2 : (int)~(unsigned)key;
    ids[blockIdx.x / TEAM] = id >= 0 && names ? names[id] : id;
}
