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

// How many lanes have a larger key, or the same and are before this one.
__device__ __forceinline__ int lane_rank(unsigned key, int lane) {
    int r = 0;
    #pragma unroll
    for (int j = 0; j < 32; j++) r += __shfl_sync(~0u, key, j) >= key + (lane <= j);
    return r;
}

// ids[0..BEST-1]: the best of MANY, best first. KIND 0: softmax over all, 1: sigmoid of each, 2: the logits. `correction` is added to the scores; `room`: 64 words.
template <int MANY, int BEST, int KIND, int N> __device__ __forceinline__ void pick(const float* logit, const float* __restrict__ correction, int lane, int* ids, unsigned* room) {
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
    unsigned key[N], best = 0u;
    #pragma unroll
    for (int i = 0; i < N; i++) {
        const int e = lane * N + i;
        float v = logit[i];
        if (KIND == 1) v = logistic(v);
        if (KIND == 0 && correction) v = expf(v - low) / all;
        if (correction && e < MANY) v += correction[e];
        key[i] = e < MANY ? pick_key(v) : 0u;
        best = max(best, key[i]);
    }
    // The lane whose best is the BEST-th of the lanes' bests: nobody below it is picked, and few are above
    const int last = __ffs(__ballot_sync(~0u, lane_rank(best, lane) == BEST - 1)) - 1;
    const unsigned floor = __shfl_sync(~0u, best, last);
    int mine = 0;
    #pragma unroll
    for (int i = 0; i < N; i++) mine += key[i] >= floor && key[i];
    int before = 0, found = 0;  // of the lanes before this one; of all
    #pragma unroll
    for (int m = 0; m < 5; m++) {
        const unsigned votes = __ballot_sync(~0u, mine >> m & 1);
        before += __popc(votes & ((1u << lane) - 1)) << m;
        found += __popc(votes) << m;
    }
    if (found <= 32) {  // a lane to each of them, in the order of their ids
        #pragma unroll
        for (int i = 0; i < N; i++) if (key[i] >= floor && key[i]) { room[2 * before] = key[i]; room[2 * before + 1] = lane * N + i; before++; }
        __syncwarp();
        const unsigned k = lane < found ? room[2 * lane] : 0u;
        const int rank = lane_rank(k, lane);
        if (lane < found && rank < BEST) ids[rank] = room[2 * lane + 1];
        return;
    }
    #pragma unroll 1
    for (int j = 0; j < BEST; j++) {  // many are equal: one after the other
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
