#pragma once
// Rows of x as gemv_halves.cu leaves them for gemv_wide.cu: eight rows and one unit of columns of F
// are a tile, whose bytes lie together, in the order in which lanes read them (F::put). Tiles of
// rows that follow each other lie side by side, unit after unit. CORED: a quarter of a block's
// columns in the order in which warpgroups read it (lib/wgmma.cuh): of each product, 8 of its 16
// columns, eight rows of 16 bytes; then the other 8.
#include "lib/fragment.cuh"

template <class F, bool CORED = false> struct Tile {
    static constexpr int PLANES = F::TWO ? 2 : 1;
    static constexpr int BLOCK = 2048 * PLANES;        // bytes of 128 columns
    // where their powers of two begin
    static constexpr int SCALES = F::UNITS * BLOCK;
    // CORED: eight rows of 16 bytes begin at a multiple of 128
    static constexpr int ENDS = F::TWO ? 0 : 32 * F::UNITS;
    static constexpr int BYTES = SCALES + (CORED ? 128 : ENDS);
    // Eight columns, the e-th of the 128 that a half warp holds, of row r and block b.
    static __device__ __forceinline__ void put(
            unsigned char* tile, int r, int b, int e, const float* a, bool in) {
        uint4* const to = (uint4*)(tile + b * BLOCK);
        if (F::TWO) {
            uint4 high, low;
            split8(a, high, low);
            if (!in)
                return;
            F::put(to, r, e, high);
            F::put(to + 128, r, e, low);
            return;
        }
        float top = top8(a);
        #pragma unroll
        for (int m = 1; m < 16; m *= 2)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
        const float2 f = chunk_scale(top);
        if (!in)
            return;
        const uint4 v = F::CROSSED ? to_half8_crossed(a, f.x) : to_half8(a, f.x);
        if constexpr (CORED) {
            const int at = F::place(r, e);
            unsigned* const w = (unsigned*)(to + at / 32 * 32) + r * 4 + at % 4;
            w[0] = v.x;
            w[32] = v.y;
            w[64] = v.z;
            w[96] = v.w;
        } else
            F::put(to, r, e, v);
        if (!e)
            ((float*)(tile + SCALES))[8 * b + r] = f.y;
    }
};
