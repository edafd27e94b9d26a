// The last of a recurrent layer's prefill, in place: each group of n numbers of a row normed and
// gated, or gated and normed. A warp to a group.
//   y        : [r, width]   f32   in place; zeros in rows that are not real
//   gate     : [r, xw]      f32   the gates of a row begin at column `at`
//   norm_w   : [gains]      f32   of one group, or of the whole row
//   tile_seq, tile_lo, tile_hi : [tiles] i32   sequence of a tile (-1: none), its real rows
//                                              lo..hi-1
//   -D GATE= (1: silu, 2: sigmoid, after the norm; 3: silu, before the norm)
//   -D KEPT= shares of a lane in registers, 1 to 4: as many as a group has, for few registers let
//            many loads be under way
//   launch: <<<ceil(r*width/n / 8), 256>>>
#include "lib/gate.cuh"
#include "lib/reduce.cuh"
#ifndef GATE
#define GATE 1
#endif
#ifndef KEPT
#define KEPT 4
#endif

// Lane's share of a group: four numbers of every 128, the first KEPT shares in registers.
extern "C" __global__ void __launch_bounds__(256, KEPT == 1 ? 5 : 3) gated_norm(
        float* y, const float* __restrict__ gate,
        const float* __restrict__ norm_w, const int* __restrict__ tile_seq,
        const int* __restrict__ tile_lo, const int* __restrict__ tile_hi,
        float eps, int r, int width, int xw, int at, int n, int gains) {
    const int lane = threadIdx.x % 32;
    const int cell = blockIdx.x * 8 + threadIdx.x / 32;
    const int per = width / n;
    const int row = cell / per;
    const int from = cell % per * n;
    if (row >= r)
        return;
    const int t = row / 64;
    // all asked for at once
    const int seq = tile_seq[t];
    const int lo = tile_lo[t];
    const int hi = tile_hi[t];
    const bool real = (seq >= 0) & (row % 64 >= lo) & (row % 64 < hi);
    float4* to = (float4*)(y + (size_t)row * width + from);
    const float* z = gate + (size_t)row * xw + at + from;
    const float* w = norm_w + (gains == n ? 0 : from);
    // gates need not lie at multiples of 16 bytes
    const bool wide = (size_t)gate % 16 == 0 && xw % 4 == 0 && at % 4 == 0;
    const float4 none = make_float4(0.f, 0.f, 0.f, 0.f);
    auto value = [&](int i) { return real && i < n / 4 ? to[i] : none; };
    auto raw = [&](int i) {
        return real && i < n / 4 ? four_of(z + 4 * i, wide) : none;
    };
    // zero where there is no gate: its value is zero, too
    auto act = [](float4 g) { return gates<GATE>(g); };
    float4 v[KEPT], g[KEPT];
    float sum = 0.f;
    #pragma unroll
    for (int i = 0; i < KEPT; i++) {  // all loads before the first result
        v[i] = value(lane + 32 * i);
        g[i] = raw(lane + 32 * i);
    }
    #pragma unroll
    for (int i = 0; i < KEPT; i++) {
        if (32 * i >= n / 4)
            break;
        g[i] = act(g[i]);
        sum += square(GATE == 3 ? times(v[i], g[i]) : v[i]);
    }
    for (int i = lane + 32 * KEPT; i < n / 4; i += 32)
        sum += square(GATE == 3 ? times(value(i), act(raw(i))) : value(i));
    const float f = rsqrtf(warp_sum(sum) / n + eps);
    auto finish = [&](int i, float4 a, float4 b) {
        if (i < n / 4)
            to[i] = make_float4(
                    a.x * b.x * (f * w[4 * i]), a.y * b.y * (f * w[4 * i + 1]),
                    a.z * b.z * (f * w[4 * i + 2]),
                    a.w * b.w * (f * w[4 * i + 3]));
    };
    #pragma unroll
    for (int i = 0; i < KEPT; i++)
        finish(lane + 32 * i, v[i], g[i]);
    for (int i = lane + 32 * KEPT; i < n / 4; i += 32)
        finish(i, value(i), act(raw(i)));
}
