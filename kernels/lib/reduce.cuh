#pragma once
// Sums over the threads that work together. The order of the additions depends on the number of
// threads alone, so the same row gives the same bits whatever runs beside it.

// Sum of `v` over the 32 lanes of a warp; every lane gets the answer.
__device__ __forceinline__ float warp_sum(float v) {
    for (int m = 16; m; m >>= 1)
        v += __shfl_xor_sync(~0u, v, m);
    return v;
}

// Sums of four values over the lanes of a warp, in six exchanges instead of twenty: lanes 8i..8i+7
// get the sum of the i-th.
__device__ __forceinline__ float warp_sum4(float a, float b, float c, float d) {
    const int lane = threadIdx.x % 32;
    const bool hi = lane & 16, odd = lane & 8;
    const float p = (hi ? c : a) + __shfl_xor_sync(~0u, hi ? a : c, 16);
    const float q = (hi ? d : b) + __shfl_xor_sync(~0u, hi ? b : d, 16);
    float v = (odd ? q : p) + __shfl_xor_sync(~0u, odd ? p : q, 8);
    for (int m = 4; m; m >>= 1)
        v += __shfl_xor_sync(~0u, v, m);
    return v;
}

// The same over each half of a warp: lanes 4i..4i+3 of a half get the sum of the i-th.
__device__ __forceinline__ float half_sum4(float a, float b, float c, float d) {
    const int lane = threadIdx.x % 32;
    const bool hi = lane & 8, odd = lane & 4;
    const float p = (hi ? c : a) + __shfl_xor_sync(~0u, hi ? a : c, 8);
    const float q = (hi ? d : b) + __shfl_xor_sync(~0u, hi ? b : d, 8);
    float v = (odd ? q : p) + __shfl_xor_sync(~0u, odd ? p : q, 4);
    v += __shfl_xor_sync(~0u, v, 2);
    return v + __shfl_xor_sync(~0u, v, 1);
}

// Sum of `v` over a block of whole warps; every thread gets the answer. The second barrier lets the
// block call it again.
__device__ __forceinline__ float block_sum(float v) {
    __shared__ float part[32];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int warps = blockDim.x / 32;
    v = warp_sum(v);
    if (!lane)
        part[warp] = v;
    __syncthreads();
    v = warp_sum(lane < warps ? part[lane] : 0.f);
    __syncthreads();
    return v;
}
