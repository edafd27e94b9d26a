#pragma once
// Is this the last block of its launch to get here? It then sees what the others wrote before, but
// not through __restrict__ or the L1 cache (__ldcg), and `count` is 0 again, as it was before. One
// thread speaks for its block: a fence by all of them takes longer than all the rest.
__device__ __forceinline__ bool arrived_last(unsigned* count, unsigned blocks) {
    __shared__ bool last;
    __syncthreads();
    if (blocks == 1)
        return true;
    if (!threadIdx.x) {
        unsigned came;
#if defined(__CUDA_ARCH__)
        asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;"
                : "=r"(came)
                : "l"(count)
                : "memory");
#else
        came = (*count)++;
#endif
        last = came == blocks - 1;
        if (last)
            *count = 0;
    }
    __syncthreads();
    return last;
}
