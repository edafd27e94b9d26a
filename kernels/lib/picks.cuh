#pragma once
// The experts of a row, picked by one warp. Lane l holds the logits of experts l*N to l*N+N-1, so that of equal ones the first lane has the lowest id.
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

// ids[0..BEST-1]: the best of MANY, best first. KIND 0: softmax over all, 1: sigmoid of each, 2: the logits. `correction` is added to the scores.
template <int MANY, int BEST, int KIND, int N> __device__ __forceinline__ void pick(const float* logit, const float* __restrict__ correction, int lane, int* ids) {
    float low = 0.f, all = 1.f;
    if (KIND == 0 && correction) {  // without a correction the logits have the order of their softmax
        low = logit[0];
        #pragma unroll
        for (int i = 1; i < N; i++) low = fmaxf(low, lane * N + i < MANY ? logit[i] : low);
        if (lane * N >= MANY) low = __uint_as_float(0xFF800000u);
        for (int m = 16; m; m >>= 1) low = fmaxf(low, __shfl_xor_sync(~0u, low, m));
        all = 0.f;
        #pragma unroll
        for (int i = 0; i < N; i++) all += lane * N + i < MANY ? expf(logit[i] - low) : 0.f;
        all = warp_sum(all);
    }
    unsigned key[N];
    #pragma unroll
    for (int i = 0; i < N; i++) {
        const int e = lane * N + i;
        float v = logit[i];
        if (KIND == 1) v = logistic(v);
        if (KIND == 0 && correction) v = expf(v - low) / all;
        if (correction && e < MANY) v += correction[e];
        key[i] = e < MANY ? pick_key(v) : 0u;
    }
    #pragma unroll 1
    for (int j = 0; j < BEST; j++) {
        unsigned best = key[0];
        int at = 0;
        #pragma unroll
        for (int i = 1; i < N; i++) if (key[i] > best) { best = key[i]; at = i; }
        const unsigned top = lanes_max(best);
        const int owner = __ffs(__ballot_sync(~0u, best == top)) - 1;
        if (lane == owner) {
            ids[j] = lane * N + at;
            #pragma unroll
            for (int i = 0; i < N; i++) if (i == at) key[i] = 0u;
        }
    }
}

// Weight of the pick that lane j < BEST holds, with logit `mine`; `logit` as above, for a softmax that is not renormalised.
template <int MANY, int BEST, int KIND, bool TO_ONE, int N> __device__ __forceinline__ float pick_weight(const float* logit, float mine, float scaling, int lane) {
    float w;
    if (KIND == 1) w = logistic(mine);
    else {
        float top = lane < BEST ? mine : __uint_as_float(0xFF800000u);
        for (int m = 16; m; m >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
        if (KIND == 0 && !TO_ONE) {  // the largest of all is not always among the picked: a correction may have come between
            #pragma unroll
            for (int i = 0; i < N; i++) if (lane * N + i < MANY) top = fmaxf(top, logit[i]);
            for (int m = 16; m; m >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
        }
        w = expf(mine - top);
        if (KIND == 0 && !TO_ONE) {  // the sum over all is needed only where it does not cancel
            float all = 0.f;
            #pragma unroll
            for (int i = 0; i < N; i++) all += lane * N + i < MANY ? expf(logit[i] - top) : 0.f;
            w /= warp_sum(all);
        }
    }
    if (lane >= BEST) w = 0.f;
    if (KIND == 2 || TO_ONE) w /= warp_sum(w) + (KIND == 1 ? 1e-20f : 0.f);
    return __fmul_rn(w, scaling);
}
