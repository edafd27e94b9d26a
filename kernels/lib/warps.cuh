#pragma once
// A barrier of COUNT neighbouring warps, the block's group number `group`, of at most 15.
template <int COUNT> __device__ __forceinline__ void sync_warps(int group) {
    if (COUNT == 1) return __syncwarp();
#if defined(__CUDA_ARCH__)
    asm volatile("bar.sync %0, %1;" :: "r"(group + 1), "n"(COUNT * 32) : "memory");
#else
    static int came[16], turn[16];
    const int now = turn[group];
    emu::progress++;
    if (++came[group] == COUNT * 32) { came[group] = 0; turn[group]++; }
    while (turn[group] == now) emu::yield();
#endif
}
