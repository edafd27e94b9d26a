#pragma once
// Is this the last block of its launch to get here? It then sees what the others wrote before, but
// not through __restrict__ or the L1 cache (__ldcg), and `count` is 0 again, as it was before.
__device__ __forceinline__ bool arrived_last(unsigned* count, unsigned blocks) {
    __shared__ bool last;
    if (blocks > 1) __threadfence();
    __syncthreads();
    if (blocks == 1) return true;
    if (!threadIdx.x) {
        last = atomicAdd(count, 1u) == blocks - 1;
        if (last) { *count = 0; __threadfence(); }
    }
    __syncthreads();
    return last;
}
