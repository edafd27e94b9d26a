#pragma once
// Strips of lib/strips.cuh as bulk copies bring them, for formats of four bits: two parts of eight
// rows, each of which lies together in memory; the parts of a strip may be of two matrices. Lane l,
// with g = l/4, has rows 2m and 2m + 1 of part g % 2, where m = g/2. Parts are shifted against each
// other, so that reads have no bank conflicts.
#include "lib/bulk.cuh"
#include "lib/strips.cuh"

// A bank of matrices of the same number of columns. MORE: have rows biases?
struct Rows {
    Bytes w, s;
    const float *scale, *bias;  // of each row; or null
};

template <class F, int COLS, bool MORE> struct Parts {
    static constexpr int C = COLS / 32, UNITS = (COLS + 255) / 256;
    static constexpr int W = 8 * F::LINE, S = 2 * F::SLINE;  // bytes of a part
    static constexpr int W1 = W + 64, S0 = W1 + W, S1 = S0 + S + 64, TAIL = S1 + S;
    static constexpr int BYTES = (TAIL + 64 * (1 + MORE) + 127) / 128 * 128;
    static_assert(COLS % 32 == 0 && S % 16 == 0, "copies are of sixteens of bytes");

    static __device__ __forceinline__ unsigned bytes_of_part(const Rows& of) {
        return W + S + (of.scale ? 32 : 0) + 32 * MORE;
    }
    // Row `row` of a bank and the seven after it, as part p of the strip at `to`: their weights, or
    // all else.
    static __device__ __forceinline__ void ask(unsigned char* to, int p, bool weights,
            const Rows& of, unsigned row, Meeting* b) {
        if (weights) return bulk_copy(to + p * W1, of.w + (size_t)row * F::LINE, W, b);
        bulk_copy(to + (p ? S1 : S0), of.s + (size_t)(row / 4) * F::SLINE, S, b);
        if (of.scale) bulk_copy(to + TAIL + p * 32, of.scale + row, 32, b);
        if (MORE) bulk_copy(to + TAIL + 64 + p * 32, of.bias + row, 32, b);
    }
    // Which of the strip's rows is a lane's first.
    static __device__ __forceinline__ int line(int g) { return g % 2 * 8 + g / 2 * 2; }
    // Where a lane's part of unit `unit` is, and its scales.
    static __device__ __forceinline__ int weights(int unit, int g, int t) {
        return g % 2 * W1 + g / 2 * 2 * F::LINE + unit * 128 + t * 16;
    }
    static __device__ __forceinline__ int scales(int unit, int g, int t) {
        const int pair = g / 2 % 2 * (F::FOUR / 2);
        return (g % 2 ? S1 : S0) + g / 4 * F::SLINE + (unit * 8 + t) * F::FOUR + pair;
    }
    // acc += the unit at `w` and `s` times a lane's columns. Beyond the end x is zero, and so are
    // scales, as in `none`.
    template <class X> static __device__ __forceinline__ void multiply(const unsigned char* w,
            const unsigned char* s, const unsigned char* none, int unit, float* acc,
            const uint4* x, const float* e0, const float* e1, int t) {
        #pragma unroll
        for (int b = 0; b < 2; b++) {
            if (C % 8 && b && 8 * unit + 4 >= C) break;
            const bool on = C % 4 == 0 || 8 * unit + 4 * b + t < C;
            F q;
            q.read_lines(w + 64 * b, on ? s + 4 * b * F::FOUR : none);
            multiply_block<X>(q, acc, x + 4 * b, e0[b], e1[b]);
        }
    }
};
