#pragma once
// All blocks of a launch wait for each other, once. They must all be running: nothing but a fault may keep a block from a place.
// `count` is a multiple of `blocks` before the launch and after it. What a block wrote before, all blocks may read after, but not through __restrict__ or the L1 cache (__ldcg).
__device__ __forceinline__ void meet(unsigned* count, unsigned blocks) {
    __syncthreads();
    if (!threadIdx.x) {
#if defined(__CUDA_ARCH__)
        unsigned came;
        asm volatile("atom.add.release.gpu.global.u32 %0, [%1], 1;" : "=r"(came) : "l"(count) : "memory");
        const unsigned all = came - came % blocks + blocks;
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(came) : "l"(count) : "memory"); while ((int)(came - all) < 0);
#else
        ++*count;  // there, blocks run one after the other, and cannot wait
#endif
    }
    __syncthreads();
}
