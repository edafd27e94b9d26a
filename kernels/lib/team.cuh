#pragma once
// TEAM blocks that follow each other share a piece of work: they run at the same time, close to
// each other, and read each other's shared memory (a thread block cluster). On the emulator blocks
// run one after the other, and TEAM is 1.
//   TEAM_OF(n)         before __global__: blocks come in teams of n
//   team_sync()        all threads of the team wait for each other; what they wrote to shared
//                      memory before, all may read after. Nobody may leave while others read
//   of_member(p, m)    what lies in the shared memory of member m where this block has p
#if TEAM > 1
#define TEAM_OF(n) __cluster_dims__(n, 1, 1)
#else
#define TEAM_OF(n)
#endif
__device__ __forceinline__ void team_sync() {
#if __CUDA_ARCH__ >= 900
    asm volatile(
            "barrier.cluster.arrive.release.aligned;\n "
            "barrier.cluster.wait.acquire.aligned;" ::
                    : "memory");
#endif
}
__device__ __forceinline__ float of_member(const float* p, int m) {
    float v = *p;
#if __CUDA_ARCH__ >= 900
    unsigned at;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
            : "=r"(at)
            : "r"((unsigned)__cvta_generic_to_shared(p)), "r"(m));
    asm volatile("ld.shared::cluster.f32 %0, [%1];"
            : "=f"(v)
            : "r"(at)
            : "memory");
#endif
    return v;
}
__device__ __forceinline__ unsigned long long of_member(
        const unsigned long long* p, int m) {
    unsigned long long v = *p;
#if __CUDA_ARCH__ >= 900
    unsigned at;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;"
            : "=r"(at)
            : "r"((unsigned)__cvta_generic_to_shared(p)), "r"(m));
    asm volatile("ld.shared::cluster.u64 %0, [%1];"
            : "=l"(v)
            : "r"(at)
            : "memory");
#endif
    return v;
}
