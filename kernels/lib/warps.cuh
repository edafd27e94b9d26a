#pragma once
// A barrier of COUNT neighbouring warps, the block's group number `group`, of at most 15 in all:
// groups of two sizes may be under way at a time only if those of one begin at AFTER.
template <int COUNT, int AFTER = 0>
__device__ __forceinline__ void sync_warps(int group) {
    if (COUNT == 1)
        return __syncwarp();
#if defined(__CUDA_ARCH__)
    asm volatile("bar.sync %0, %1;" ::"r"(AFTER + group + 1), "n"(COUNT * 32)
            : "memory");
#else
    emu::barrier(AFTER + group + 1, COUNT * 32);
#endif
}
