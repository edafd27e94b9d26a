#pragma once
// All blocks of a launch wait for each other, once. They must all be running: nothing but a fault may keep a block from a place.
// `count` is 0 before the launch, and `gridDim.x` after it. What a block wrote before, all blocks may read after, but not through __restrict__ or the L1 cache (__ldcg).
__device__ __forceinline__ void meet(unsigned* count, unsigned blocks) {
    __syncthreads();
#if defined(__CUDA_ARCH__)
    if (!threadIdx.x) {
        unsigned came;
        asm volatile("red.release.gpu.global.add.u32 [%0], 1;" :: "l"(count) : "memory");
        do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(came) : "l"(count) : "memory"); while (came < blocks);
    }
#endif
    __syncthreads();
}
