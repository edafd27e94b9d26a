// How many picks of each expert there are in each stretch of 1,024 picks: what moe_sort.cu needs to
// know where its own begin.
//   ids    : [rows, top]       i32   experts of each row
//   seq    : [rows]            i32   negative: the row is padding, and picks nothing; or null
//   counts : [stretches, e]    i32   stretches = ceil(rows * top / 1024)
//   -D E=   experts, up to 1024
//   launch: <<<stretches, 256>>>
#include "lib/stretch.cuh"
#ifndef E
#define E 256
#endif

extern "C" __global__ void __launch_bounds__(256) moe_count(
        const int* __restrict__ ids, const int* __restrict__ seq, int* counts,
        int picks, int top) {
    __shared__ int found[E];
    for (int e = threadIdx.x; e < E; e += 256)
        found[e] = 0;
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < STRETCH / 256; i++) {
        const int e = expert_of(
                ids, seq, blockIdx.x * STRETCH + i * 256 + threadIdx.x, picks,
                top);
        if (e >= 0)
            atomicAdd(&found[e], 1);
    }
    __syncthreads();
    for (int e = threadIdx.x; e < E; e += 256)
        counts[blockIdx.x * E + e] = found[e];
}
