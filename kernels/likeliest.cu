// A draft for each row: the largest of its logits, the lowest column among equals, and the token
// that this column stands for. A row with a logit that is not finite has none: -2. TEAM blocks
// (lib/team.cuh) have a row, and nothing is kept between launches, so a step that breaks off leaves
// nothing behind; greedy.cu shares a row among many.
//   logits : [rows, v]  f32   or null
//   keys   : [rows, parts] i64   KEYS: of each part of a row the key of its largest logit
//                                (lib/keys.cuh); or null
//   names  : [v]        i32   or null: a column is its token
//   ids    : [rows]     i32   -2 where a logit is not finite
//   -D TEAM= 1 (by default), 2, 4 or 8
//   -D KEYS= 1: `keys` are there, and no logits; a row has one block
//   launch: <<<rows*TEAM, 1024>>>, <<<rows, 256>>> with KEYS
#ifndef TEAM
#define TEAM 1
#endif
#ifndef KEYS
#define KEYS 0
#endif
#include "lib/pdl.cuh"
#include "lib/sample.cuh"
#include "lib/team.cuh"

constexpr int THREADS = KEYS ? 256 : 1024, WARPS = THREADS / 32;
static_assert(!KEYS || TEAM == 1, "see the contract");

// The key of the largest of a thread's logits of a row.
__device__ __forceinline__ u64 best_of(const float* row, int v) {
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
            const unsigned k = id >= v ? 0u : logit_key(x);
            if (k > top) {
                top = k;
                at = id;
            }
        }
    }
    return keyed(top, at);
}

extern "C" TEAM_OF(TEAM) __global__ void __launch_bounds__(THREADS) likeliest(
        const float* logits, const long long* keys, const int* __restrict__ names,
        int* ids, int v, int parts) {
    __shared__ u64 part[WARPS], best;
    const int row = blockIdx.x / TEAM;
    pdl_trigger();
    pdl_wait();
    u64 key = 0;
    if (KEYS)
        for (int i = threadIdx.x; i < parts; i += THREADS)
            key = max(key, ((const u64*)keys)[(size_t)row * parts + i]);
    else
        key = best_of(logits + (size_t)row * v, v);
    for (int m = 16; m; m >>= 1)
        key = max(key, __shfl_xor_sync(~0u, key, m));
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = key;
    __syncthreads();
    if (threadIdx.x < 32) {
        key = threadIdx.x < WARPS ? part[threadIdx.x] : 0;
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
    ids[row] = id >= 0 && names ? names[id] : id;
}
