#pragma once
// Strips: sixteen rows of a matrix, times up to eight rows of x by tensor cores, in the one order
// that all kernels of a mixture of experts have, so that a row's bits are the same from each.
// A strip's columns are units of lib/fragment.cuh. Share s of SPLIT has units s, s + SPLIT, ... one
// after the other; shares are added in order, from 0 on; then come the norm, the row's scale and
// its bias.
#include "lib/fragment.cuh"
#include "lib/warps.cuh"

// How COLS columns of a strip are shared, by MOST warps (a power of two) at most.
template <class F, int COLS, int MOST> struct Shares {
    static constexpr int N = (COLS + 128 * F::UNITS - 1) / (128 * F::UNITS);  // units
    static constexpr int SPLIT = MOST >= 4 && N >= 4 ? 4 : MOST >= 2 && N >= 2 ? 2 : 1;
    static __device__ __forceinline__ int of(int share) { return (N - 1 - share) / SPLIT + 1; }
    // Who has the last unit, and is there nothing in its second half?
    static constexpr int LAST = (N - 1) % SPLIT;
    static constexpr bool SHORT = F::UNITS == 2 && (COLS + 127) / 128 % 2;
};

// MANY rows of COLS numbers in shared memory, as F multiplies them: zeros beyond the end. Rows that
// were never put may hold anything, as long as nobody needs their products.
template <class F, int COLS, int MANY> struct StagedRows {
    static constexpr int N = (COLS + 128 * F::UNITS - 1) / (128 * F::UNITS);
    static constexpr int HELD = (N * F::UNITS + 1) / 2 * 2;  // 128s of a row
    static constexpr int PARTS = HELD / 2;                   // what a warp puts at a time: 256s
    typedef Staged<F, 4 * HELD> S;
    static constexpr int LD = S::LD, PLANE = MANY * S::LDR;
    uint4 at[S::PLANES * PLANE];
    float e[MANY][HELD];
    // Columns 8v to 8v + 7 of a row; sixteen lanes that follow each other have 128, or nothing.
    __device__ __forceinline__ void put(int row, int v, const float* a) {
        uint4* const to = at + row * S::LDR + v % 4 * LD + v / 4;
        if (F::TWO) return split8(a, to[0], to[PLANE]);
        float top = top8(a);
        #pragma unroll
        for (int m = 1; m < 16; m *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
        const float2 f = chunk_scale(top);
        *to = F::CROSSED ? to_half8_crossed(a, f.x) : to_half8(a, f.x);
        if (v % 16 == 0) e[row][v / 16] = f.y;
    }
    // What a lane reads of a row from the unit `unit` on; the next unit is 4 * F::UNITS further.
    __device__ __forceinline__ const uint4* of(int row, int unit, int t) const {
        return at + row * S::LDR + 4 * F::UNITS * unit + F::template own<LD>(t);
    }
};

// acc += a unit of W, or the first `half` of it, times what a lane's `x` points to, which is a row
// of X for column l/4 of the product; e0, e1: powers of two of its columns 2t, 2t + 1. acc[j]: row
// 2g + j/2, column 2t + j%2.
template <class F, class X> __device__ __forceinline__ void multiply(const unsigned char* place,
        float* acc, const uint4* x, const float* e0, const float* e1, int g, int t,
        bool half = false) {
    #pragma unroll
    for (int b = 0; b < F::UNITS; b++) {
        if (b && half) break;
        F q;
        q.read(place, b, g, t);
        float d[2][4] = {};
        q.template dot<X::LD, X::PLANE>(d, x + 4 * b);
        #pragma unroll
        for (int j = 0; j < 2; j++) {
            const float f = F::TWO ? 1.f : j ? e1[b] : e0[b];
            const float low = F::SCALED ? __fmul_rn(f, q.scale(0)) : f;
            const float high = F::SCALED ? __fmul_rn(f, q.scale(1)) : f;
            acc[j] = fmaf(d[0][j] + d[1][j], low, acc[j]);
            acc[2 + j] = fmaf(d[0][2 + j] + d[1][2 + j], high, acc[2 + j]);
        }
    }
}

// What a warp found, [16 rows of W][R rows of x].
template <int R> __device__ __forceinline__ void put_part(float (*part)[R], const float* acc, int g,
        int t) {
    #pragma unroll
    for (int j = 0; j < 4; j++)
        if (2 * t + j % 2 < R) part[2 * g + j / 2][2 * t + j % 2] = acc[j];
}
// The sum of what SPLIT warps that follow each other found.
template <int SPLIT, int R> __device__ __forceinline__ float sum_parts(const float (*part)[16][R],
        int line, int column) {
    float v = 0.f;
    #pragma unroll
    for (int m = 0; m < SPLIT; m++) v += part[m][line][column];
    return v;
}
