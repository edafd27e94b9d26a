#pragma once
// Picks of experts, in stretches that a block takes together.
constexpr int STRETCH = 1024;

// The expert of pick `p`; -1 beyond the end, and of rows that are padding.
__device__ __forceinline__ int expert_of(
        const int* ids, const int* seq, int p, int picks, int top) {
    if (p >= picks)
        return -1;
    return seq && seq[p / top] < 0 ? -1 : ids[p];
}
