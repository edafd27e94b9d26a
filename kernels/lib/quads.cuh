#pragma once
// Four rows of a packed matrix (atlas.cuda.pack) times an activation, 32 columns at a time, for kernels that read each weight once. A lane copies its
// chunk of four rows to a place of its own in shared memory, beside whatever else the warp does, and nobody but itself reads it there.
//   VECTORS, SCALES  16-byte pieces and bytes of scales of four rows and one chunk
//   POWER            activations come as fp16 times a power of two that brings a chunk's largest into [2^POWER, 2^(POWER+1)): see `chunk_power`
//   UNIT             what the sums are to be multiplied by, once a row
//   fetch            `row`: the first of the four; `c`: which of `chunks`; `kb`: scales a row, of fp8
//   dot              y[r] += row r times x (32 halves) times z, the inverse of their power of two
#include "lib/nvfp4.cuh"
#include "lib/stage.cuh"

// As chunk_scale, with the largest magnitude in [2^POWER, 2^(POWER+1)).
template <int POWER> __device__ __forceinline__ float2 chunk_power(float top) {
    const unsigned e = max(__float_as_uint(top) >> 23, (unsigned)(POWER + 1));
    return make_float2(__uint_as_float((254u + POWER - e) << 23), __uint_as_float((e - POWER) << 23));
}
// A copy of N bytes (4, 8, 16) from global to shared memory that runs beside the thread; zeros where not `on`.
template <int N> __device__ __forceinline__ void copy_beside(void* to, const void* from, bool on) {
#if defined(__CUDA_ARCH__)
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    if (N == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(at), "l"(from), "r"(on ? 16 : 0) : "memory");
    else asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" :: "r"(at), "l"(from), "n"(N), "r"(on ? N : 0) : "memory");
#else
    emu::copy(to, from, N, on);
#endif
}

namespace quads {
typedef const unsigned char* Bytes;

// A chunk's place: 16-byte pieces [VECTORS][32 lanes], then scales [32 lanes].
template <int V, int S> struct Place {
    static constexpr int VECTORS = V, SCALES = S, SIZE = 32 * (16 * V + S);
    static __device__ __forceinline__ uint4* vector(unsigned char* p, int i) { return (uint4*)p + i * 32 + threadIdx.x % 32; }
    static __device__ __forceinline__ unsigned char* scales(unsigned char* p) { return p + 512 * V + threadIdx.x % 32 * S; }
    // Row r of the four has V/4 pieces
    static __device__ __forceinline__ void rows(unsigned char* p, Bytes w, size_t row, int c, int chunks, bool on) {
        #pragma unroll
        for (int i = 0; i < V; i++) copy_beside<16>(vector(p, i), (const uint4*)w + ((row + i / (V / 4)) * chunks + c) * (V / 4) + i % (V / 4), on);
    }
};

struct nvfp4 : Place<4, 8> {
    static constexpr int POWER = 14;
    static constexpr float UNIT = 16384.f;
    static __device__ __forceinline__ void fetch(unsigned char* p, Bytes w, Bytes s, size_t row, int c, int chunks, int, bool on) {
        rows(p, w, row, c, chunks, on);
        copy_beside<8>(scales(p), s + (row / 4 * chunks + c) * 8, on);
    }
    static __device__ __forceinline__ void dot(unsigned char* p, const uint4* x, float z, float* y) {
        const uint2 s = *(const uint2*)scales(p);
        #pragma unroll
        for (int r = 0; r < 4; r++) y[r] = fmaf(nvfp4_chunk(*vector(p, r), nvfp4_scales(s, r), (const __half2*)x), z, y[r]);
    }
};
struct mxfp4 : Place<4, 4> {
    static constexpr int POWER = 14;
    static constexpr float UNIT = 16384.f;
    static __device__ __forceinline__ void fetch(unsigned char* p, Bytes w, Bytes s, size_t row, int c, int chunks, int, bool on) {
        rows(p, w, row, c, chunks, on);
        copy_beside<4>(scales(p), s + (row / 4 * chunks + c) * 4, on);
    }
    static __device__ __forceinline__ void dot(unsigned char* p, const uint4* x, float z, float* y) {
        const __half2 zero = __float2half2_rn(0.f), *h = (const __half2*)x;
        const unsigned s = *(const unsigned*)scales(p);
        #pragma unroll
        for (int r = 0; r < 4; r++) {
            const uint4 w = *vector(p, r);
            const float f = __uint_as_float((r < 3 ? s << (23 - 8 * r) : s >> 1) & 0x7F800000u);  // 2^-127 counts as nothing, NaN as infinity
            const float2 u = __half22float2(nvfp4_word(w.y, h + 4, nvfp4_word(w.x, h, zero)));
            const float2 v = __half22float2(nvfp4_word(w.w, h + 12, nvfp4_word(w.z, h + 8, zero)));
            y[r] = fmaf(__fmul_rn(__fadd_rn(u.x + u.y, v.x + v.y), z), f, y[r]);
        }
    }
};
struct fp8 : Place<8, 16> {  // products of eight below 8 * 448 * 16 = 57,344
    static constexpr int POWER = 3;
    static constexpr float UNIT = 1.f;
    static __device__ __forceinline__ void fetch(unsigned char* p, Bytes w, Bytes s, size_t row, int c, int chunks, int kb, bool on) {
        rows(p, w, row, c, chunks, on);
        #pragma unroll
        for (int r = 0; r < 4; r++) copy_beside<4>(scales(p) + 4 * r, (const float*)s + (row + r) * kb + (kb > 1 ? c / 4 : 0), on);
    }
    static __device__ __forceinline__ __half2 pair(unsigned v) {
#if __CUDA_ARCH__ >= 890
        unsigned h;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"((unsigned short)v));
        return as_half2(h);
#else  // an e4m3 shifted into an fp16 is the same number times 2^-8
        return __hmul2(as_half2(((v & 0x8000u) << 16) | ((v & 0x7F00u) << 15) | ((v & 0x80u) << 8) | ((v & 0x7Fu) << 7)), __float2half2_rn(256.f));
#endif
    }
    static __device__ __forceinline__ void dot(unsigned char* p, const uint4* x, float z, float* y) {
        const __half2* h = (const __half2*)x;
        const float4 s = *(const float4*)scales(p);
        #pragma unroll
        for (int r = 0; r < 4; r++) {
            float sum = 0.f;
            #pragma unroll
            for (int j = 0; j < 2; j++) {
                const uint4 w = *vector(p, 2 * r + j);
                __half2 a = __float2half2_rn(0.f);
                #pragma unroll
                for (int k = 0; k < 8; k++) a = __hfma2(pair((&w.x)[k / 2] >> (k % 2 * 16)), h[j * 8 + k], a);
                const float2 f = __half22float2(a);
                sum += f.x + f.y;
            }
            y[r] = fmaf(__fmul_rn(sum, z), (&s.x)[r], y[r]);
        }
    }
};
// 16 bits: every product in float32.
template <bool BF16> struct wide : Place<16, 0> {
    static constexpr int POWER = 14;
    static constexpr float UNIT = 1.f;
    static __device__ __forceinline__ void fetch(unsigned char* p, Bytes w, Bytes, size_t row, int c, int chunks, int, bool on) { Place<16, 0>::rows(p, w, row, c, chunks, on); }
    static __device__ __forceinline__ float2 pair(unsigned v) {
        return BF16 ? make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xFFFF0000u)) : __half22float2(as_half2(v));
    }
    static __device__ __forceinline__ void dot(unsigned char* p, const uint4* x, float z, float* y) {
        #pragma unroll
        for (int r = 0; r < 4; r++) {
            float sum = 0.f;
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint4 w = *Place<16, 0>::vector(p, 4 * r + j);
                #pragma unroll
                for (int k = 0; k < 4; k++) {
                    const float2 u = pair((&w.x)[k]), v = __half22float2(as_half2((&x[j].x)[k]));
                    sum = fmaf(u.y, v.y, fmaf(u.x, v.x, sum));
                }
            }
            y[r] = fmaf(sum, z, y[r]);
        }
    }
};
typedef wide<true> bf16;
typedef wide<false> f16;
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
