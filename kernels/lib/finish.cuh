#pragma once
// What stands behind the sums of a matrix product of many rows: factors of rows and columns, bias,
// the activation between gate and up, a gate of the whole row, and what the result is added to.
#include "lib/act.cuh"

struct Finish {
    // aids: of columns, whose factors `factor` knows
    const float *aids, *bias, *add;
    float* y;
    const float *by, *gated;  // of rows of the tile: factor, and gate
    const int* to;            // row of y; -1: nobody wants it
    // the block's first column; columns of y, and with padding
    int n0, out, nb, as, ys;
    float limit;
    bool gate;
};

// Results of 16 x 8*TILES sums, row m and column c of the block the first. A lane has of each eight
// columns [g][2t], [g][2t+1], [g+8][2t], [g+8][2t+1]: it gives two away, so that an even lane has
// four in a row of the upper eight rows, an odd one of the lower. Of pairs these are two gates and
// their ups.
template <int ACT, int TILES>
__device__ __forceinline__ void finish(
        const Finish& f, int m, int c, float (*d)[4]) {
    constexpr bool PAIRS = ACT != ACT_NONE && ACT != ACT_RELU2;
    constexpr int WIDTH = PAIRS ? 2 : 4;  // results of a lane that lie together
    const int g = threadIdx.x % 32 / 4;
    const int t = threadIdx.x % 4;
    const int odd = t & 1;
    const int row = m + g + 8 * odd;
    const int r = f.to[row];
    const size_t ends = (size_t)f.add | (size_t)f.y;
    const bool whole = (f.out | f.as | f.ys) % WIDTH == 0
            && (ends & (WIDTH * 4 - 1)) == 0;
    float* const yr = f.y + (size_t)max(r, 0) * f.ys;
    const float* const ar = f.add + (size_t)max(r, 0) * f.as;
    #pragma unroll
    for (int i = 0; i < TILES; i++) {
        const float p = __shfl_xor_sync(~0u, odd ? d[i][0] : d[i][2], 1);
        const float q = __shfl_xor_sync(~0u, odd ? d[i][1] : d[i][3], 1);
        float v[4] = {odd ? p : d[i][0], odd ? q : d[i][1], odd ? d[i][2] : p,
                odd ? d[i][3] : q};
        const int col = c + i * 8 + t / 2 * 4;
        const int at = f.n0 + col;
        const float4 a = *(const float4*)(f.aids + col);
        #pragma unroll
        for (int k = 0; k < 4; k++) {
            const float b = f.bias && at + k < f.nb ? f.bias[at + k] : 0.f;
            v[k] = fmaf(__fmul_rn(v[k], f.by[row]), factor((&a.x)[k]), b);
        }
        if (PAIRS) {
            v[0] = act_mul<ACT, PARTS == 1>(v[0], v[2], f.limit);
            v[1] = act_mul<ACT, PARTS == 1>(v[1], v[3], f.limit);
        } else if (ACT != ACT_NONE)
            #pragma unroll
            for (int k = 0; k < 4; k++)
                v[k] = act_mul<ACT, PARTS == 1>(v[k], 0.f, f.limit);
        if (f.gate)
            #pragma unroll
            for (int k = 0; k < WIDTH; k++)
                v[k] *= f.gated[row];
        const int o = at / (4 / WIDTH);
        if (r < 0 || o >= f.out)
            continue;
        if (!whole) {
            for (int k = 0; k < WIDTH && o + k < f.out; k++)
                yr[o + k] = v[k] + (f.add ? ar[o + k] : 0.f);
        } else if (PAIRS) {
            const float2 z = f.add ? *(const float2*)(ar + o)
                                   : make_float2(0.f, 0.f);
            *(float2*)(yr + o) = make_float2(v[0] + z.x, v[1] + z.y);
        } else {
            const float4 z = f.add ? *(const float4*)(ar + o)
                                   : make_float4(0.f, 0.f, 0.f, 0.f);
            *(float4*)(yr + o) = make_float4(
                    v[0] + z.x, v[1] + z.y, v[2] + z.z, v[3] + z.w);
        }
    }
}
