#pragma once
// Memory that a later kernel will read is asked for while nothing else comes, and waits in the L2 cache: `sixteens` pieces of 16 bytes from p on, dealt out to `threads`.
__device__ __forceinline__ void ahead(const unsigned char* p, int sixteens, int thread, int threads) {
#if defined(__CUDA_ARCH__)
    for (int i = thread; i * 8 < sixteens; i += threads) asm volatile("prefetch.global.L2 [%0];" :: "l"(p + (size_t)i * 128));
#endif
}
// Likewise the first `bytes` of each of `many` matrices that begin `step` bytes apart: multiples of 16.
__device__ __forceinline__ void ahead_each(const unsigned char* p, int step, int bytes, int many, int thread, int threads) {
    constexpr int PIECE = 4096;
    for (int i = thread; i < (bytes + PIECE - 1) / PIECE * many; i += threads) {
        const int at = i / many * PIECE;
#if __CUDA_ARCH__ >= 900
        const unsigned char* const from = p + (size_t)(i % many) * step + at;
        asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(min(PIECE, bytes - at)) : "memory");
#endif
    }
}
