#pragma once
// Rows as fp16, in the order that gemm.cu wants: of 32 columns, column 8t + 4h + 2p + i is number
// 16h + 8p + 2t + i, so that a lane which multiplies eight weights that follow each other finds its
// share in the fragments of tensor cores.
#include "lib/stage.cuh"

// Numbers i to i+3 (4 divides i) of a row, times `by`. COUNT 2: what rounding leaves, rounded, kp
// columns behind.
template <int COUNT>
__device__ __forceinline__ void put_halves(
        __half* row, int kp, int i, float4 v, float by) {
    unsigned h[2 * COUNT];
    #pragma unroll
    for (int j = 0; j < 2; j++) {
        const float p = (&v.x)[2 * j] * by;
        const float q = (&v.x)[2 * j + 1] * by;
        __half2 a = __floats2half2_rn(p, q);
        const float2 b = __half22float2(a);
        h[j] = *(const unsigned*)&a;
        if (COUNT == 2) {
            a = __floats2half2_rn(p - b.x, q - b.y);
            h[(2 + j) % (2 * COUNT)] = *(const unsigned*)&a;
        }
    }
    #pragma unroll
    for (int p = 0; p < COUNT; p++) {
        unsigned* to = (unsigned*)(row + (size_t)p * kp + i / 32 * 32)
                + i % 8 / 4 * 8 + i % 32 / 8;
        to[0] = h[2 * p];
        to[4] = h[2 * p + 1];
    }
}
