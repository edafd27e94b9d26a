#pragma once
// The experts of a row, picked by one warp out of the router's logits. Whoever needs them picks
// again: that is shorter than to wait for somebody to write them down. Lane l holds the logits of
// experts l*N to l*N+N-1, so that of equal ones the first lane has the lowest id. Loops are kept as
// loops: a launch finds its instructions in no cache, and to fetch them takes longer than to run
// them.
#include "lib/reduce.cuh"
// of all; of each; of the picked
enum { SCORE_SOFTMAX, SCORE_SIGMOID, SCORE_TOPK_SOFTMAX };

// Larger floats have larger keys. A NaN comes last; 0 is nobody.
__device__ __forceinline__ unsigned pick_key(float v) {
    const unsigned u = __float_as_uint(v + 0.f);  // -0 is 0
    return v != v ? 1u : u & 0x80000000u ? ~u : u | 0x80000000u;
}
__device__ __forceinline__ unsigned lanes_max(unsigned v) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 800
    for (int m = 16; m; m >>= 1)
        v = max(v, __shfl_xor_sync(~0u, v, m));
    return v;
#else
    return __reduce_max_sync(~0u, v);
#endif
}
__device__ __forceinline__ float logistic(float v) {
    return 1.f / (1.f + expf(-v));
}

// The lane's part of a row of logits; what is no expert's may be anything. `logits` on a multiple
// of 16 bytes, their number up to a multiple of four.
template <int MANY, int N>
__device__ __forceinline__ void near_logits(
        const float* logits, int lane, float* near) {
    if (N % 4 == 0) {
        #pragma unroll
        for (int i = 0; i < N / 4; i++) {
            const bool on = lane * N + 4 * i < MANY;
            const float4 v = on ? __ldcg((const float4*)(logits + lane * N) + i)
                                : make_float4(0.f, 0.f, 0.f, 0.f);
            near[4 * i] = v.x;
            near[4 * i + 1] = v.y;
            near[4 * i + 2] = v.z;
            near[4 * i + 3] = v.w;
        }
    } else
        #pragma unroll
        for (int i = 0; i < N; i++)
            near[i] = lane * N + i < MANY ? __ldcg(logits + lane * N + i) : 0.f;
}

// What is picked by: scores as keys, MOVED by a correction; without one, softmaxes have the order
// of their logits.
template <int MANY, int KIND, bool MOVED, int N>
__device__ __forceinline__ void pick_keys(
        const float* near, const float* __restrict__ correction, int lane,
        unsigned* key) {
    float low = 0.f, all = 1.f;
    if (KIND == SCORE_SOFTMAX && MOVED) {
        low = __uint_as_float(0xFF800000u);
        #pragma unroll
        for (int i = 0; i < N; i++)
            low = lane * N + i < MANY ? fmaxf(low, near[i]) : low;
        for (int m = 16; m; m >>= 1)
            low = fmaxf(low, __shfl_xor_sync(~0u, low, m));
        all = 0.f;
        #pragma unroll
        for (int i = 0; i < N; i++)
            all += lane * N + i < MANY ? expf(near[i] - low) : 0.f;
        all = warp_sum(all);
    }
    #pragma unroll
    for (int i = 0; i < N; i++) {
        const int e = lane * N + i;
        float v = near[i];
        if (KIND == SCORE_SIGMOID)
            v = logistic(v);
        if (KIND == SCORE_SOFTMAX && MOVED)
            v = expf(v - low) / all;
        if (MOVED && e < MANY)
            v += correction[e];
        key[i] = e < MANY ? pick_key(v) : 0u;
    }
}

// ids[0..BEST-1]: the best of MANY, best first. Every round takes all that are as good as the best;
// where that was more than one, all is done again slowly.
template <int MANY, int BEST, int KIND, bool MOVED, int N>
__device__ __forceinline__ void pick(
        const float* near, const float* __restrict__ correction, int lane,
        int* ids) {
    unsigned key[N];
    pick_keys<MANY, KIND, MOVED, N>(near, correction, lane, key);
    int found = 0;
    #pragma unroll 1
    for (int j = 0; j < BEST; j++) {
        unsigned best = key[0];
        #pragma unroll
        for (int i = 1; i < N; i++)
            best = max(best, key[i]);
        best = lanes_max(best);
        #pragma unroll
        for (int i = 0; i < N; i++)
            if (key[i] == best) {
                ids[j] = lane * N + i;
                key[i] = 0u;
                found++;
            }
    }
    if (__reduce_add_sync(~0u, found) == BEST)
        return;
    __syncwarp();
    pick_keys<MANY, KIND, MOVED, N>(near, correction, lane, key);
    #pragma unroll 1
    for (int j = 0; j < BEST; j++) {
        unsigned best = key[0];
        int at = 0;
        #pragma unroll
        for (int i = 1; i < N; i++)
            if (key[i] > best) {
                best = key[i];
                at = i;
            }
        const unsigned top = lanes_max(best);
        if (lane == __ffs(__ballot_sync(~0u, best == top)) - 1) {
            ids[j] = lane * N + at;
            #pragma unroll
            for (int i = 0; i < N; i++)
                key[i] = i == at ? 0u : key[i];
        }
    }
}

template <int MANY, int BEST, int KIND, int N>
__device__ __forceinline__ void pick(
        const float* near, const float* __restrict__ correction, int lane,
        int* ids, unsigned* = nullptr) {
    if (correction)
        pick<MANY, BEST, KIND, true, N>(near, correction, lane, ids);
    else
        pick<MANY, BEST, KIND, false, N>(near, nullptr, lane, ids);
}

// Weight of the pick that lane j < BEST holds, with logit `mine`; `near` as above, for a softmax
// that is not renormalised.
template <int MANY, int BEST, int KIND, bool TO_ONE, int N>
__device__ __forceinline__ float pick_weight(
        const float* near, float mine, float scaling, int lane) {
    float w;
    if (KIND == SCORE_SIGMOID)
        w = logistic(mine);
    else {
        float top = lane < BEST ? mine : __uint_as_float(0xFF800000u);
        for (int m = 16; m; m >>= 1)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
        if (KIND == SCORE_SOFTMAX && !TO_ONE) {
            // the largest of all is not always among the picked: a correction may have come between
            #pragma unroll
            for (int i = 0; i < N; i++)
                if (lane * N + i < MANY)
                    top = fmaxf(top, near[i]);
            for (int m = 16; m; m >>= 1)
                top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
        }
        w = expf(mine - top);
        if (KIND == SCORE_SOFTMAX && !TO_ONE) {
            // the sum over all is needed only where it does not cancel
            float all = 0.f;
            #pragma unroll
            for (int i = 0; i < N; i++)
                all += lane * N + i < MANY ? expf(near[i] - top) : 0.f;
            w /= warp_sum(all);
        }
    }
    if (lane >= BEST)
        w = 0.f;
    if (KIND == SCORE_TOPK_SOFTMAX || TO_ONE)
        w /= warp_sum(w) + (KIND == SCORE_SIGMOID ? 1e-20f : 0.f);
    return __fmul_rn(w, scaling);
}

// Which experts a step needs, and for whom: a slot is one expert, and the entry (row * PICKS +
// pick) of each row that picked it. The shared expert (number MANY) has the first slot, the others
// follow in the order in which rows picked them.
template <int MANY, int BEST, int ALSO, int FEW> struct Slots {
    static constexpr int FIRST = ALSO;
    static constexpr int MOST = FEW * BEST + FIRST;
    static constexpr int PICKS = BEST + ALSO;
    static constexpr int NOBODY = -1;
    int ids[FEW * BEST], expert[MOST], number;
    short who[MOST][FEW];
    __device__ __forceinline__ void clear(int rows, int threads) {
        for (int i = threadIdx.x; i < MOST * FEW; i += threads) {
            const int entry = ALSO && i < rows ? i * PICKS + BEST : NOBODY;
            who[i / FEW][i % FEW] = FEW > 1 || (ALSO && i < rows) ? entry
                                                                  : i - ALSO;
        }
        if (threadIdx.x < FIRST)
            expert[threadIdx.x] = MANY;
        if (FEW == 1 && !threadIdx.x)
            number = MOST;
    }
    // Where a row's picks are to be put; of one row they are its slots.
    __device__ __forceinline__ int* of(int row) {
        return FEW == 1 ? expert + ALSO : ids + row * BEST;
    }
};
