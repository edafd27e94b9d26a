#pragma once
// Sums over the threads that work together. The order of the additions depends on the number of threads alone, so the same row gives the
// same bits whatever runs beside it.

// Sum of `v` over the 32 lanes of a warp; every lane gets the answer.
__device__ __forceinline__ float warp_sum(float v) {
    for (int m = 16; m; m >>= 1) v += __shfl_xor_sync(~0u, v, m);
    return v;
}

// Sum of `v` over a block of whole warps; every thread gets the answer. The second barrier lets the block call it again.
__device__ __forceinline__ float block_sum(float v) {
    __shared__ float part[32];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    v = warp_sum(v);
    if (!lane) part[warp] = v;
    __syncthreads();
    v = warp_sum(lane < warps ? part[lane] : 0.f);
    __syncthreads();
    return v;
}
