// The experts of each of many rows and their weights, from the router's logits: a warp a row, which
// picks as decoding does (lib/picks.cuh).
//   logits     : [rows, m]     f32   m = E, and one more with SHARED 1: the gate of an expert that
//                                    all rows share
//   bias       : [e]           f32   added to the logits; or null
//   correction : [e]           f32   added to the scores for picking only; or null
//   factor     : [e]           f32   of each expert's weight; or null
//   ids        : [rows, out]   i32   best first; of equals the lower id, NaN last. out = TOP, and
//                                    one more with SHARED 1 or 2: id E, the shared expert
//   weights    : [rows, out]   f32
//   -D E= TOP=   experts, up to 1024, and how many are picked, up to 31
//   -D SCORE=    0: softmax over all, 1: sigmoid of each, 2: softmax over the picked
//   -D RENORM=  1: the weights of the picked sum to one (SCORE 0, 1)
//   -D SHARED=   0: no shared expert, 1: its weight is the sigmoid of its gate, 2: its weight is 1
//   launch: <<<ceil(rows/4), 128>>>
#include "lib/picks.cuh"
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
constexpr int N = (E + 31) / 32;
constexpr int OUT = TOP + (SHARED > 0);
static_assert(OUT <= 32 && TOP <= E, "see the contract");

extern "C" __global__ void __launch_bounds__(128) route_many(
        const float* __restrict__ logits, const float* __restrict__ bias,
        const float* __restrict__ correction, const float* __restrict__ factor,
        int* ids, float* weights, float scaling, int rows) {
    __shared__ int picked[4][TOP];
    __shared__ unsigned room[4][64];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int r = blockIdx.x * 4 + warp;
    if (r >= rows)
        return;
    const float* own = logits + (size_t)r * (E + (SHARED == 1));
    const auto logit = [&](int e) { return own[e] + (bias ? bias[e] : 0.f); };
    float near[N];
    #pragma unroll
    for (int i = 0; i < N; i++)
        near[i] = lane * N + i < E ? logit(lane * N + i) : 0.f;
    pick<E, TOP, SCORE, N>(near, correction, lane, picked[warp], room[warp]);
    __syncwarp();
    int id = picked[warp][lane < TOP ? lane : 0];
    float g = pick_weight<E, TOP, SCORE, RENORM, N>(
            near, logit(id), scaling, lane);
    if (factor)
        g *= factor[id];
    if (SHARED && lane == TOP) {
        id = E;
        g = SHARED == 1 ? logistic(own[E]) : 1.f;
    }
    if (lane < OUT) {
        ids[(size_t)r * OUT + lane] = id;
        weights[(size_t)r * OUT + lane] = g;
    }
}
