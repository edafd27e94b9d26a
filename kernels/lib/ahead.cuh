#pragma once
// Memory that a later kernel will read is asked for while nothing else comes, and waits in the L2 cache: `sixteens` pieces of 16 bytes from p on, dealt out to `threads`.
__device__ __forceinline__ void ahead(const unsigned char* p, int sixteens, int thread, int threads) {
#if defined(__CUDA_ARCH__)
    for (int i = thread; i * 8 < sixteens; i += threads) asm volatile("prefetch.global.L2 [%0];" :: "l"(p + (size_t)i * 128));
#endif
}
// The same for the 128 bytes that `p` is among.
__device__ __forceinline__ void ahead(const void* p) {
#if defined(__CUDA_ARCH__)
    asm volatile("prefetch.global.L2 [%0];" :: "l"(p));
#endif
}
// `bytes` from p on, a multiple of 16 both, asked for by one thread (PTX cp.async.bulk.prefetch), so
// that other loads of the multiprocessor do not stand behind it.
__device__ __forceinline__ void ahead_whole(const unsigned char* p, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(p), "r"(bytes) : "memory");
#endif
}
// A block's share of `sixteens` pieces of 16 bytes from p on.
__device__ __forceinline__ void ahead_share(const unsigned char* p, int sixteens) {
    const int each = (sixteens + gridDim.x - 1) / gridDim.x, from = blockIdx.x * each;
    const int n = min(each, sixteens - from);
    if (n > 0) ahead_whole(p + 16 * (size_t)from, 16u * n);
}
