#pragma once
// Four rows of a packed matrix (atlas.cuda.pack) times an activation, 32 columns at a time, for kernels that read each weight once. A lane copies its
// chunk of four rows to a place of its own in shared memory, beside whatever else the warp does, and nobody but itself reads it there.
//   VECTORS, SCALES  16-byte pieces and bytes of scales of four rows and one chunk
//   POWER, UNIT      of lib/formats.cuh
//   fetch            `row`: the first of the four; `c`: which of `chunks`; `kb`: scales a row, of fp8
//   dot              y[r] += row r times x (32 halves) times z, the inverse of their power of two
#include "lib/async.cuh"
#include "lib/formats.cuh"

// As chunk_scale, with the largest magnitude in [2^POWER, 2^(POWER+1)).
template <int POWER> __device__ __forceinline__ float2 chunk_power(float top) {
    const unsigned e = max(__float_as_uint(top) >> 23, (unsigned)(POWER + 1));
    return make_float2(__uint_as_float((254u + POWER - e) << 23), __uint_as_float((e - POWER) << 23));
}

namespace quads {
// A chunk's place: 16-byte pieces [VECTORS][32 lanes], then scales [32 lanes].
template <class F> struct Quad : F {
    static constexpr int VECTORS = F::CHUNK / 4;
    static constexpr int SCALES = F::BY_ROW ? 16 : 4 * F::SCALE;
    static constexpr int SIZE = 32 * (16 * VECTORS + SCALES);
    static __device__ __forceinline__ uint4* vector(unsigned char* p, int i) { return (uint4*)p + i * 32 + threadIdx.x % 32; }
    static __device__ __forceinline__ unsigned char* scales(unsigned char* p) {
        return p + 512 * VECTORS + threadIdx.x % 32 * SCALES;
    }
    static __device__ __forceinline__ void fetch(unsigned char* p, Bytes w, Bytes s, size_t row, int c, int chunks, int kb, bool on) {
        constexpr int V = VECTORS / 4;  // of a row
        #pragma unroll
        for (int i = 0; i < VECTORS; i++) {
            const uint4* from = (const uint4*)w + ((row + i / V) * chunks + c) * V;
            cp_async_or_zero<16>(vector(p, i), from + i % V, on);
        }
        if constexpr (F::SCALE > 0)
            cp_async_or_zero<SCALES>(scales(p), s + (row / 4 * chunks + c) * SCALES, on);
        if constexpr (F::BY_ROW)
            #pragma unroll
            for (int r = 0; r < 4; r++) {
                const float* from = (const float*)s + (row + r) * kb;
                cp_async_or_zero<4>(scales(p) + 4 * r, from + (kb > 1 ? c / 4 : 0), on);
            }
    }
    static __device__ __forceinline__ void dot(unsigned char* p, const uint4* x, float z, float* y) {
        F::template dot<Quad>(p, x, z, y);
    }
};
#define NAMED(f) typedef Quad<formats::f> f;
EACH_FORMAT(NAMED)
#undef NAMED
}  // namespace quads

// Sums of four values over groups of G lanes (4 <= G <= 32): lanes i*G/4 to (i+1)*G/4-1 of a group get the sum of the i-th.
template <int G> __device__ __forceinline__ float group_sum4(float a, float b, float c, float d) {
    const int lane = threadIdx.x % 32;
    const bool hi = lane & (G / 2), odd = lane & (G / 4);
    const float p = (hi ? c : a) + __shfl_xor_sync(~0u, hi ? a : c, G / 2), q = (hi ? d : b) + __shfl_xor_sync(~0u, hi ? b : d, G / 2);
    float v = (odd ? q : p) + __shfl_xor_sync(~0u, odd ? p : q, G / 4);
    #pragma unroll
    for (int m = G / 8; m; m >>= 1) v += __shfl_xor_sync(~0u, v, m);
    return v;
}

// MANY rows of K columns as fp16 in shared memory: eights i of chunk c in at[row][i*LX + c], and what a chunk is to be multiplied by.
template <int K, int MANY, int POWER> struct Inputs {
    static constexpr int C = (K + 31) / 32, LX = C + 2;
    uint4 at[MANY][4 * LX];
    float z[MANY][C];
    // Columns v*8 to v*8 + 7 of a row from four lanes that follow each other, so that they have a chunk.
    __device__ __forceinline__ void put(int row, int v, const float* a) {
        float top = top8(a);
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float2 f = chunk_power<POWER>(top);
        if (v >= 4 * C) return;
        at[row][v % 4 * LX + v / 4] = to_half8(a, f.x);
        if (v % 4 == 0) z[row][v / 4] = f.y;
    }
    template <class F> __device__ __forceinline__ void dot(unsigned char* place, int row, int c, float* sums) const {  // a quad's chunk in `place`
        uint4 a[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) a[i] = at[row][i * LX + c];
        F::dot(place, a, z[row][c], sums);
    }
};
