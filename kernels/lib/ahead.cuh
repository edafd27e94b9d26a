#pragma once
// Memory that a later kernel will read is asked for while nothing else comes, and waits in the L2
// cache: `sixteens` pieces of 16 bytes from p on, dealt out to `threads`.
__device__ __forceinline__ void ahead(
        const unsigned char* p, int sixteens, int thread, int threads) {
#if defined(__CUDA_ARCH__)
    for (int i = thread; i * 8 < sixteens; i += threads)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(p + (size_t)i * 128));
#endif
}
// The same for the 128 bytes that `p` is among.
__device__ __forceinline__ void ahead(const void* p) {
#if defined(__CUDA_ARCH__)
    asm volatile("prefetch.global.L2 [%0];" ::"l"(p));
#endif
}
