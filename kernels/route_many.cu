// The experts of each of many rows and their weights, from the router's logits: a warp a row.
//   logits     : [rows, m]     f32   m = E, and one more with SHARED 1: the gate of an expert that all rows share
//   bias       : [e]           f32   added to the logits; or null
//   correction : [e]           f32   added to the scores for picking only; or null
//   factor     : [e]           f32   of each expert's weight; or null
//   ids        : [rows, out]   i32   best first; of equals the lower id, NaN last. out = TOP, and one more with SHARED 1 or 2: id E, the shared expert
//   weights    : [rows, out]   f32
//   -D E= TOP=   experts, up to 1024, and how many are picked, up to 31
//   -D SCORE=    0: softmax over all, 1: sigmoid of each, 2: softmax over the picked      -D RENORM=  1: the weights of the picked sum to one (SCORE 0, 1)
//   -D SHARED=   0: no shared expert, 1: its weight is the sigmoid of its gate, 2: its weight is 1
//   launch: <<<ceil(rows/4), 128>>>
#include "lib/reduce.cuh"
#ifndef E
#define E 256
#endif
#ifndef TOP
#define TOP 8
#endif
#ifndef SCORE
#define SCORE 0
#endif
#ifndef RENORM
#define RENORM 1
#endif
#ifndef SHARED
#define SHARED 0
#endif
constexpr int N = (E + 31) / 32, OUT = TOP + (SHARED > 0);
static_assert(OUT <= 32 && TOP <= E, "see the contract");

// Larger numbers have larger keys; NaN has 1, below all numbers, and 0 is for what cannot be picked.
__device__ __forceinline__ unsigned key_of(float v) {
    const unsigned u = __float_as_uint(v);
    return v != v ? 1u : u & 0x80000000u ? ~u : u | 0x80000000u;
}

extern "C" __global__ void __launch_bounds__(128) route_many(const float* __restrict__ logits, const float* __restrict__ bias,
        const float* __restrict__ correction, const float* __restrict__ factor, int* ids, float* weights, float scaling, int rows) {
    const int lane = threadIdx.x % 32, r = blockIdx.x * 4 + threadIdx.x / 32;
    if (r >= rows) return;
    const float* own = logits + (size_t)r * (E + (SHARED == 1));
    const auto row = [&](int e) { return own[e] + (bias ? bias[e] : 0.f); };
    float    most = 0.f, all = 0.f;
    unsigned key[N];
    if (SCORE == 0) {
        most = -3.4e38f;
        for (int e = lane; e < E; e += 32) most = fmaxf(most, row(e));
        for (int m = 16; m; m >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, m));
        for (int e = lane; e < E; e += 32) all += expf(row(e) - most);
        all = warp_sum(all);
    }
    #pragma unroll
    for (int i = 0; i < N; i++) {  // a lane holds N that follow each other, so that the first lane with a key has the lowest id
        const int e = lane * N + i;
        float v = e < E ? row(e) : 0.f;
        if (SCORE == 1) v = 1.f / (1.f + expf(-v));
        if (SCORE == 0 && correction) v = expf(v - most) / all;
        if (correction && e < E) v += correction[e];
        key[i] = e < E ? key_of(v) : 0u;
    }
    int id = 0;
    #pragma unroll 1
    for (int j = 0; j < TOP; j++) {
        unsigned best = key[0];
        int at = 0;
        #pragma unroll
        for (int i = 1; i < N; i++) if (key[i] > best) { best = key[i]; at = i; }
        unsigned top = best;
        for (int m = 16; m; m >>= 1) top = max(top, __shfl_xor_sync(~0u, top, m));
        const int owner = __ffs(__ballot_sync(~0u, best == top)) - 1, found = __shfl_sync(~0u, lane * N + at, owner);
        if (lane == j) id = found;
        #pragma unroll
        for (int i = 0; i < N; i++) if (lane == owner && i == at) key[i] = 0u;
    }
    const float l = row(id);
    float g;
    if (SCORE == 0) g = expf(l - most) / all;
    else if (SCORE == 1) g = 1.f / (1.f + expf(-l));
    else {
        most = lane < TOP ? l : -3.4e38f;
        for (int m = 16; m; m >>= 1) most = fmaxf(most, __shfl_xor_sync(~0u, most, m));
        g = expf(l - most);
    }
    if (SCORE == 2) g /= warp_sum(lane < TOP ? g : 0.f);
    else if (RENORM) g /= warp_sum(lane < TOP ? g : 0.f) + 1e-20f;
    g *= scaling;
    if (factor) g *= factor[id];
    if (SHARED && lane == TOP) { id = E; g = SHARED == 1 ? 1.f / (1.f + expf(-own[E])) : 1.f; }
    if (lane < OUT) { ids[(size_t)r * OUT + lane] = id; weights[(size_t)r * OUT + lane] = g; }
}
