#pragma once
// Where the time of a step goes. atlas.use.timeline puts these words into a copy of a kernel's
// text; the kernels themselves know nothing of them. Lane 0 of each warp writes eight words down:
// the card's clock (two) and which multiprocessor + 1, and by that multiprocessor's clock when the
// warp came, let the next kernel in, began to wait for the one before, was let go, and ended. What
// it did not do stays 0.
#include "lib/pdl.cuh"
#ifdef ATLAS_EMULATE
#include <time.h>
#endif
__device__ __forceinline__ unsigned long long stamp_time() {
    // ns, in steps that depend on the card
    unsigned long long t = 0;
#if defined(__CUDA_ARCH__)
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t)::"memory");
#elif defined(ATLAS_EMULATE)
    timespec s;
    clock_gettime(CLOCK_MONOTONIC, &s);
    t = s.tv_sec * 1000000000ull + s.tv_nsec;
#endif
    return t;
}
__device__ __forceinline__ unsigned
stamp_clock() {  // ticks of this multiprocessor
#if defined(__CUDA_ARCH__)
    unsigned t;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(t)::"memory");
    return t;
#else
    return (unsigned)stamp_time();
#endif
}
__device__ __forceinline__ unsigned stamp_place() {
    unsigned r = 0;
#if defined(__CUDA_ARCH__)
    asm volatile("mov.u32 %0, %%smid;" : "=r"(r));
#endif
    return r + 1;
}
__device__ __forceinline__ unsigned stamp_thread() {
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}
// those of this block
__device__ __forceinline__ unsigned*& stamp_lines() {
    __shared__ unsigned* lines;
    return lines;
}
__device__ __forceinline__ void stamp(int what) {
    if (stamp_thread() % 32 == 0)
        *(volatile unsigned*)(stamp_lines() + stamp_thread() / 32 * 8
                + what) = stamp_clock();
}
__device__ __forceinline__ void stamp_trigger() {
    stamp(4);
    pdl_trigger();
}
__device__ __forceinline__ void stamp_wait() {
    stamp(5);
    pdl_wait();
    stamp(6);
}
struct Stamp {
    __device__ __forceinline__ Stamp(unsigned* all) {
        if (stamp_thread() % 32)
            return;
        const unsigned block = blockIdx.x
                + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
        const unsigned warps = (blockDim.x * blockDim.y * blockDim.z + 31) / 32;
        // every warp says the same
        stamp_lines() = all + (size_t)block * warps * 8;
        unsigned* const line = stamp_lines() + stamp_thread() / 32 * 8;
        stamp(3);
        const unsigned long long t = stamp_time();
        line[0] = (unsigned)t;
        line[1] = (unsigned)(t >> 32);
        line[2] = stamp_place();
    }
    __device__ __forceinline__ ~Stamp() { stamp(7); }
};
