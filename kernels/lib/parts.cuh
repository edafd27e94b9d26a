#pragma once
// Strips of lib/strips.cuh as bulk copies bring them, for formats of four bits: two parts of eight
// rows, each of which lies together in memory; the parts of a strip may be of two matrices. Lane l,
// with g = l/4, has rows line(g) and line(g) + 1. Parts are shifted against each other where that
// keeps reads from bank conflicts; else a strip of one matrix comes in one piece.
#include "lib/bulk.cuh"
#include "lib/strips.cuh"

template <class F, int COLS> struct Parts {
    static constexpr int C = COLS / 32, UNITS = (COLS + 255) / 256;
    static constexpr bool SHIFTED = F::LINE % 64 == 0;
    static constexpr int W = 8 * F::LINE, S = 2 * F::SLINE;  // bytes of a part
    static constexpr int W1 = W + 64 * SHIFTED, S0 = W1 + W, S1 = S0 + S;
    static constexpr int PART = W + S, BYTES = (S1 + S + 127) / 128 * 128;
    static_assert(COLS % 32 == 0 && S % 16 == 0, "copies are of sixteens of bytes");

    // Row `row` of a bank and the seven after it, as part p of the strip at `to`: weights or scales.
    static __device__ __forceinline__ void ask_part(unsigned char* to, int p, bool weights, Bytes w,
            Bytes s, unsigned row, Meeting* b) {
        if (weights) bulk_copy(to + p * W1, w + (size_t)row * F::LINE, W, b);
        else bulk_copy(to + S0 + p * S, s + (size_t)(row / 4) * F::SLINE, S, b);
    }
    // Row `row` and the fifteen after it, by four lanes; `i`: which of them.
    static __device__ __forceinline__ void ask_strip(unsigned char* to, int i, Bytes w, Bytes s,
            unsigned row, Meeting* b) {
        w += (size_t)row * F::LINE;
        if (i == 0) bulk_copy(to, w, SHIFTED ? W : 2 * W, b);
        if (i == 1 && SHIFTED) bulk_copy(to + W1, w + W, W, b);
        if (i == 2) bulk_copy(to + S0, s + (size_t)(row / 4) * F::SLINE, 2 * S, b);
    }
    // Which of the strip's rows is a lane's first.
    static __device__ __forceinline__ int line(int g) {
        return SHIFTED ? g % 2 * 8 + g / 2 * 2 : 2 * g;
    }
    // Where a lane's part of unit `unit` is, and its scales.
    static __device__ __forceinline__ int weights(int unit, int g, int t) {
        return line(g) / 8 * W1 + line(g) % 8 * F::LINE + unit * 128 + t * 16;
    }
    static __device__ __forceinline__ int scales(int unit, int g, int t) {
        const int pair = line(g) / 2 % 2 * (F::FOUR / 2);
        return S0 + line(g) / 4 * F::SLINE + (unit * 8 + t) * F::FOUR + pair;
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
