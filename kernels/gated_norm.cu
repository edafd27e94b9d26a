// The last of a recurrent layer's prefill, in place: each group of n numbers of a row normed and gated, or gated and normed. A warp to a group.
//   y        : [r, width]   f32   in place; zeros in rows that are not real
//   gate     : [r, xw]      f32   the gates of a row begin at column `at`
//   norm_w   : [gains]      f32   of one group, or of the whole row
//   tile_seq, tile_lo, tile_hi : [tiles] i32   sequence of a tile (-1: none), its real rows lo..hi-1
//   -D GATE= (1: silu, 2: sigmoid, after the norm; 3: silu, before the norm)
//   launch: <<<ceil(r*width/n / 8), 256>>>
#include "lib/reduce.cuh"
#ifndef GATE
#define GATE 1
#endif

extern "C" __global__ void __launch_bounds__(256) gated_norm(float* y, const float* __restrict__ gate, const float* __restrict__ norm_w,
        const int* __restrict__ tile_seq, const int* __restrict__ tile_lo, const int* __restrict__ tile_hi, float eps, int r, int width, int xw, int at, int n, int gains) {
    const int lane = threadIdx.x % 32, cell = blockIdx.x * 8 + threadIdx.x / 32, per = width / n, row = cell / per, from = cell % per * n;
    if (row >= r) return;
    const int t = row / 64;
    const bool real = tile_seq[t] >= 0 && row % 64 >= tile_lo[t] && row % 64 < tile_hi[t];
    float* to = y + (size_t)row * width + from;
    const float *z = gate + (size_t)row * xw + at + from, *w = norm_w + (gains == n ? 0 : from);
    float sum = 0.f;
    if (real)
        for (int i = lane; i < n; i += 32) {
            float v = to[i];
            if (GATE == 3) v *= z[i] / (1.f + expf(-z[i]));
            sum = fmaf(v, v, sum);
        }
    const float f = rsqrtf(warp_sum(sum) / n + eps);
    for (int i = lane; i < n; i += 32) {
        float v = 0.f;
        if (real) {
            const float s = 1.f / (1.f + expf(-z[i]));
            v = to[i] * f * w[i] * (GATE == 2 ? s : z[i] * s);
        }
        to[i] = v;
    }
}
