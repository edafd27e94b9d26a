#pragma once
// The experts of a row, picked by a block in two steps; of equal ones the one with the lower id.
#include "lib/reduce.cuh"

// Larger floats have larger keys. A NaN comes last; 0 is nobody.
__device__ __forceinline__ unsigned pick_key(float v) {
    const unsigned u = __float_as_uint(v + 0.f);  // -0 is 0
    return v != v ? 1u : u & 0x80000000u ? ~u : u | 0x80000000u;
}
__device__ __forceinline__ unsigned lanes_max(unsigned v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    for (int m = 16; m; m >>= 1) v = max(v, __shfl_xor_sync(~0u, v, m));
    return v;
#else
    return __reduce_max_sync(~0u, v);
#endif
}
__device__ __forceinline__ float logistic(float v) { return 1.f / (1.f + expf(-v)); }

__device__ __forceinline__ float lanes_largest(float v) {
    for (int m = 16; m; m >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, m));
    return v;
}
// How many lanes have a larger key, or the same and are before this one.
__device__ __forceinline__ int lane_rank(unsigned key, int lane) {
    int r = 0;
    #pragma unroll 16
    for (int j = 0; j < 32; j++) r += __shfl_sync(~0u, key, j) >= key + (lane <= j);
    return r;
}

// Picking, the first half: a warp sorts the keys of 32 experts, and the BEST of them are candidates. So those of all warps are in the order of their ids
// where keys are equal. The second half: a thread looks how many of `n` candidates are better than number c.
template <int BEST> __device__ __forceinline__ void sort32(unsigned key, int e, int lane, unsigned* keys, int* who) {
    const int rank = lane_rank(key, lane);
    if (rank < BEST) { keys[rank] = key; who[rank] = e; }
}
template <int MANY> __device__ __forceinline__ int candidate_rank(const unsigned* keys, int c) {
    const unsigned mine = keys[c];
    int r = 0;
    #pragma unroll 4
    for (int j = 0; j < MANY / 4; j++) {
        const uint4 k = ((const uint4*)keys)[j];
        r += (k.x >= mine + (c <= 4 * j)) + (k.y >= mine + (c <= 4 * j + 1)) + (k.z >= mine + (c <= 4 * j + 2)) + (k.w >= mine + (c <= 4 * j + 3));
    }
    return r;
}

// Weight of the pick that lane j < BEST holds, with logit `mine`. KIND 0: softmax over all, 1: sigmoid of each, 2: softmax of the picked.
template <int MANY, int BEST, int KIND, bool TO_ONE> __device__ __forceinline__ float pick_weight(const float* logits, float mine, float scaling, int lane) {
    float w;
    if (KIND == 1) w = logistic(mine);
    else {
        float top = lane < BEST ? mine : __uint_as_float(0xFF800000u);
        if (KIND == 0 && !TO_ONE) {  // the largest of all is not always among the picked: a correction may have come between
            #pragma unroll 1
            for (int e = lane; e < MANY; e += 32) top = fmaxf(top, __ldcg(logits + e));
        }
        top = lanes_largest(top);
        w = expf(mine - top);
        if (KIND == 0 && !TO_ONE) {  // the sum over all is needed only where it does not cancel
            float all = 0.f;
            #pragma unroll 1
            for (int e = lane; e < MANY; e += 32) all += expf(__ldcg(logits + e) - top);
            w /= warp_sum(all);
        }
    }
    if (lane >= BEST) w = 0.f;
    if (KIND == 2 || TO_ONE) w /= warp_sum(w) + (KIND == 1 ? 1e-20f : 0.f);
    return __fmul_rn(w, scaling);
}
