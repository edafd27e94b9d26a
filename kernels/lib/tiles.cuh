#pragma once
// Rows of x as gemv_halves.cu leaves them for gemv_wide.cu: eight rows and one unit of columns of F
// are a tile, whose bytes lie together, in the order in which lanes read them (F::put). Tiles of rows
// that follow each other lie side by side, unit after unit.
#include "lib/fragment.cuh"

template <class F> struct Tile {
    static constexpr int PLANES = F::TWO ? 2 : 1;
    static constexpr int BLOCK = 2048 * PLANES;        // bytes of 128 columns
    static constexpr int SCALES = F::UNITS * BLOCK;    // where their powers of two begin
    static constexpr int BYTES = SCALES + (F::TWO ? 0 : 32 * F::UNITS);
    // Eight columns, the e-th of the 128 that a half warp holds, of row r and block b.
    static __device__ __forceinline__ void put(
            unsigned char* tile, int r, int b, int e, const float* a, bool in) {
        uint4* const to = (uint4*)(tile + b * BLOCK);
        if (F::TWO) {
            uint4 high, low;
            split8(a, high, low);
            if (!in) return;
            F::put(to, r, e, high);
            F::put(to + 128, r, e, low);
            return;
        }
        float top = top8(a);
        #pragma unroll
        for (int m = 1; m < 16; m *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
        const float2 f = chunk_scale(top);
        if (!in) return;
        F::put(to, r, e, F::CROSSED ? to_half8_crossed(a, f.x) : to_half8(a, f.x));
        if (!e) ((float*)(tile + SCALES))[8 * b + r] = f.y;
    }
};
