#pragma once
// The experts of a row, picked by one warp out of the router's logits in global memory. Whoever asks gets the same answer, so the blocks that
// need it ask again instead of waiting for somebody to write it down. One warp a block: asked by all, it costs an H200 a microsecond and a half.
#include "lib/reduce.cuh"

// Larger floats have larger keys; ties go to the lower id because lanes are asked in that order.
__device__ __forceinline__ unsigned order_key(float v) {
    const unsigned u = __float_as_uint(v);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
__device__ __forceinline__ float of_key(unsigned k) { return __uint_as_float(k & 0x80000000u ? k & 0x7FFFFFFFu : ~k); }
__device__ __forceinline__ unsigned warp_max(unsigned v) {
    for (int m = 16; m; m >>= 1) v = max(v, __shfl_xor_sync(~0u, v, m));
    return v;
}

// Lane j < TOP gets the id and the score (as routed by: correction added) of the j-th best of E; E % 32 == 0 is not needed. `rounds`: how many are wanted.
// A NaN sorts last, as in the twin. SIGMOID: scores are sigmoids of the logits.
template <int E, int TOP, bool SIGMOID> __device__ __forceinline__ void topk(const float* logits, const float* correction, int lane, int& id, float& logit, int rounds = TOP) {
    constexpr int N = (E + 31) / 32;
    unsigned key[N];
    #pragma unroll
    for (int i = 0; i < N; i++) {  // lane l holds experts l*N .. l*N+N-1, so that the first lane with a key has the lowest id
        const int e = lane * N + i;
        float v = e < E ? logits[e] : 0.f;
        if (SIGMOID) v = 1.f / (1.f + __expf(-v));
        if (correction && e < E) v += correction[e];
        key[i] = e >= E || v != v ? 0u : order_key(v);
    }
    id = 0;
    #pragma unroll 1
    for (int j = 0; j < rounds; j++) {
        unsigned best = key[0];
        int at = 0;
        #pragma unroll
        for (int i = 1; i < N; i++) if (key[i] > best) { best = key[i]; at = i; }
#if __CUDA_ARCH__ >= 800
        const unsigned top = __reduce_max_sync(~0u, best);
#else
        const unsigned top = warp_max(best);
#endif
        const int owner = __ffs(__ballot_sync(~0u, best == top)) - 1, e = lane * N + at;
        const int found = __shfl_sync(~0u, e, owner);
        if (lane == j) id = found;
        if (lane == owner) {
            #pragma unroll
            for (int i = 0; i < N; i++) if (i == at) key[i] = 0u;
        }
    }
    logit = lane < TOP ? logits[id] : 0.f;
}

// Weight of the id that lane j < TOP holds. SCORE 0: softmax over all, 1: sigmoid, 2: softmax over the picked.
template <int E, int TOP, int SCORE> __device__ __forceinline__ float route_weight(const float* logits, float logit, bool renormalise, float scaling, int lane) {
    float w;
    if (SCORE == 1) w = 1.f / (1.f + expf(-logit));
    else {
        const float top = __shfl_sync(~0u, logit, 0);  // the best one is the largest
        w = expf(logit - top);
        if (SCORE == 0 && !renormalise) {  // the sum over all experts is needed only when it does not cancel
            float all = 0.f;
            for (int e = lane; e < E; e += 32) all += expf(logits[e] - top);
            w /= warp_sum(all);
        }
    }
    if (lane >= TOP) w = 0.f;
    if (SCORE == 2 || renormalise) w /= warp_sum(w) + (SCORE == 1 ? 1e-20f : 0.f);
    return w * scaling;
}
