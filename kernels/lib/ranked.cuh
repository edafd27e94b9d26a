#pragma once
// The picks of lib/picks.cuh by few instructions, for blocks whose warps are many: each lane sorts
// its keys once, and a round then looks at the first of each lane, and not at all.
#include "lib/picks.cuh"

// key[0] >= key[1] >= ...: Batcher's merge exchange (Knuth, volume 3, 5.2.2, algorithm M).
template <int N> __device__ __forceinline__ void sort_down(unsigned* key) {
    constexpr int T = N > 16 ? 16 : N > 8 ? 8 : N > 4 ? 4 : N > 2 ? 2 : N > 1;
    static_assert(N <= 32, "a lane has so many");
    auto pass = [&](int p, int r, int d) {
        #pragma unroll
        for (int i = 0; i + d < N; i++)
            if ((i & p) == r) {
                const unsigned a = key[i], b = key[i + d];
                key[i] = max(a, b);
                key[i + d] = min(a, b);
            }
    };
    #pragma unroll
    for (int p = T; p; p >>= 1) {
        pass(p, 0, p);
        #pragma unroll
        for (int q = T; q > p; q >>= 1)
            pass(p, p, q - p);
    }
}

// Lane j < BEST gets the j-th best of MANY. Keys that are equal are left to `pick`, which has
// `room` for its answer. AT_ONCE rounds are written out.
template <int MANY, int BEST, int KIND, bool MOVED, int N, int AT_ONCE = 1>
__device__ __forceinline__ int ranked(
        const float* near, const float* __restrict__ correction, int lane,
        int* room) {
    constexpr int HEAD = N < BEST ? N : BEST;
    static_assert(BEST <= 32, "a lane has one of them");
    unsigned own[N];
    unsigned key[N + 1];
    unsigned top = 0;
    unsigned voters = 0;
    pick_keys<MANY, KIND, MOVED, N>(near, correction, lane, own);
    #pragma unroll
    for (int i = 0; i < N; i++)
        key[i] = own[i];
    key[N] = 0u;
    sort_down<N>(key);
    #pragma unroll AT_ONCE
    for (int j = 0; j < BEST; j++) {
        const unsigned best = lanes_max(key[0]);
        const bool won = key[0] == best;
        const unsigned votes = __ballot_sync(~0u, won);
        if (lane == j) {
            top = best;
            voters = votes;
        }
        #pragma unroll
        for (int i = 0; i < HEAD; i++)
            key[i] = won ? key[i + 1] : key[i];
    }
    const unsigned before = __shfl_up_sync(~0u, top, 1);
    const bool equal = (lane && before == top) || (voters & (voters - 1));
    if (__any_sync(~0u, lane < BEST && equal)) {
        pick<MANY, BEST, KIND, MOVED, N>(near, correction, lane, room);
        __syncwarp();
        return room[lane < BEST ? lane : 0];
    }
    const int whose = max(__ffs(voters) - 1, 0);
    int at = 0;
    #pragma unroll
    for (int i = 1; i < N; i++)
        at = __shfl_sync(~0u, own[i], whose) == top ? i : at;
    return lane < BEST ? whose * N + at : 0;
}

// What a row's results are to be multiplied by, by the warp that has ranked it: weights of its
// picks in `weights`, if it is there, and in `share`, which the shared expert's ends if there is
// one. `id`, `logit`: lane j's pick and its logit; `gate`: the shared expert's, or null.
template <int MANY, int BEST, int KIND, bool TO_ONE, bool ALSO, int N>
__device__ __forceinline__ void give_weights(
        const float* near, int id, float logit, const float* gate,
        const float* __restrict__ per_expert, float scaling, int lane,
        float* weights, float* share) {
    float v = pick_weight<MANY, BEST, KIND, TO_ONE, N>(
            near, logit, scaling, lane);
    if (per_expert)
        v = __fmul_rn(v, per_expert[id]);
    if (lane < BEST) {
        if (weights)
            weights[lane] = v;
        share[lane] = v;
    }
    if (ALSO && lane == BEST)
        share[BEST] = gate ? logistic(*gate) : 1.f;
}
