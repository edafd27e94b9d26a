#pragma once
// Copies from global to shared memory that run beside the thread (PTX cp.async): 16 bytes each,
// committed in groups, waited for by group.
#ifndef ASKS_L2
// or ".L2::256B": what stands beside the 16 bytes comes to the L2 cache, too
#define ASKS_L2 ""
#endif
__device__ __forceinline__ void cp_async16(void* to, const void* from) {
#if defined(__CUDA_ARCH__)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                         (unsigned)__cvta_generic_to_shared(to)),
            "l"(from)
            : "memory");
#else
    emu::copy(to, from, 16, true);
#endif
}
// Like cp_async16 where `on`, and 16 zero bytes where not; `from` is not read then.
__device__ __forceinline__ void cp_async16_or_zero(
        void* to, const void* from, bool on) {
#if defined(__CUDA_ARCH__)
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.cg.shared.global" ASKS_L2
                 " [%0], [%1], 16, %2;" ::"r"(at),
            "l"(from), "r"(on ? 16 : 0)
            : "memory");
#else
    emu::copy(to, from, 16, on);
#endif
}
// N bytes (4, 8 or 16), likewise.
template <int N>
__device__ __forceinline__ void cp_async_or_zero(
        void* to, const void* from, bool on) {
#if defined(__CUDA_ARCH__)
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    if (N == 16)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at),
                "l"(from), "r"(on ? 16 : 0)
                : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(at),
                "l"(from), "n"(N), "r"(on ? N : 0)
                : "memory");
#else
    emu::copy(to, from, N, on);
#endif
}
__device__ __forceinline__ void cp_async_commit() {
#if defined(__CUDA_ARCH__)
    asm volatile("cp.async.commit_group;" ::: "memory");
#else
    emu::commit();
#endif
}
// Wait until at most the N newest groups are still under way.
template <int N> __device__ __forceinline__ void cp_async_wait() {
#if defined(__CUDA_ARCH__)
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
#else
    emu::wait(N);
#endif
}
// Dynamic shared memory as an array of `type` called `name`.
#ifndef DYNAMIC_SHARED
#define DYNAMIC_SHARED(type, name) \
    extern __shared__ __align__(128) unsigned char dynamic_shared[]; \
    type* name = (type*)dynamic_shared
#endif
