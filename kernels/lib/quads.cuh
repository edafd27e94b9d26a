#pragma once
// Four rows of a packed matrix (atlas.cuda.pack) times an activation, 32 columns at a time, for kernels that read each weight once. A lane fetches the
// chunk of four rows whole, so what it keeps until the activation is there is as small as in memory.
//   Item            what a lane holds of four rows and one chunk
//   POWER           activations come as fp16 times a power of two that brings a chunk's largest into [2^POWER, 2^(POWER+1)): see `chunk_power`
//   UNIT            what the sums are to be multiplied by, once a row
//   fetch           `row`: the first of the four; `c`: which of `chunks`; `kb`: scales a row, of fp8
//   dot             y[r] += row r times x (32 halves) times z, the inverse of their power of two
#include "lib/nvfp4.cuh"
#include "lib/stage.cuh"

// As chunk_scale, with the largest magnitude in [2^POWER, 2^(POWER+1)).
template <int POWER> __device__ __forceinline__ float2 chunk_power(float top) {
    const unsigned e = max(__float_as_uint(top) >> 23, (unsigned)(POWER + 1));
    return make_float2(__uint_as_float((254u + POWER - e) << 23), __uint_as_float((e - POWER) << 23));
}
__device__ __forceinline__ uint4 zeros4() { return make_uint4(0, 0, 0, 0); }

namespace quads {
typedef const unsigned char* Bytes;

struct nvfp4 {
    struct Item { uint4 w[4]; uint2 s; };
    static constexpr int POWER = 14;
    static constexpr float UNIT = 16384.f;
    static __device__ __forceinline__ void fetch(Item& i, Bytes w, Bytes s, size_t row, int c, int chunks, int, bool on) {
        #pragma unroll
        for (int r = 0; r < 4; r++) i.w[r] = on ? __ldcs((const uint4*)w + (row + r) * chunks + c) : zeros4();
        i.s = on ? __ldcs((const uint2*)s + row / 4 * chunks + c) : make_uint2(0, 0);
    }
    static __device__ __forceinline__ void dot(const Item& i, const uint4* x, float z, float* y) {
        #pragma unroll
        for (int r = 0; r < 4; r++) y[r] = fmaf(nvfp4_chunk(i.w[r], nvfp4_scales(i.s, r), (const __half2*)x), z, y[r]);
    }
};
struct mxfp4 {
    struct Item { uint4 w[4]; unsigned s; };
    static constexpr int POWER = 14;
    static constexpr float UNIT = 16384.f;
    static __device__ __forceinline__ void fetch(Item& i, Bytes w, Bytes s, size_t row, int c, int chunks, int, bool on) {
        #pragma unroll
        for (int r = 0; r < 4; r++) i.w[r] = on ? __ldcs((const uint4*)w + (row + r) * chunks + c) : zeros4();
        i.s = on ? __ldcs((const unsigned*)s + row / 4 * chunks + c) : 0;
    }
    static __device__ __forceinline__ void dot(const Item& i, const uint4* x, float z, float* y) {
        const __half2 zero = __float2half2_rn(0.f), *h = (const __half2*)x;
        #pragma unroll
        for (int r = 0; r < 4; r++) {
            const unsigned e = i.s >> (8 * r) & 0xFF;
            const float f = __uint_as_float(e == 0 ? 0x400000u : e == 255 ? 0x7FFFFFFFu : e << 23);
            const float2 u = __half22float2(nvfp4_word(i.w[r].y, h + 4, nvfp4_word(i.w[r].x, h, zero)));
            const float2 v = __half22float2(nvfp4_word(i.w[r].w, h + 12, nvfp4_word(i.w[r].z, h + 8, zero)));
            y[r] = fmaf(__fmul_rn(__fadd_rn(u.x + u.y, v.x + v.y), z), f, y[r]);
        }
    }
};
struct fp8 {  // products of eight below 8 * 448 * 16 = 57,344
    struct Item { uint4 w[4][2]; float s[4]; };
    static constexpr int POWER = 3;
    static constexpr float UNIT = 1.f;
    static __device__ __forceinline__ void fetch(Item& i, Bytes w, Bytes s, size_t row, int c, int chunks, int kb, bool on) {
        #pragma unroll
        for (int r = 0; r < 4; r++) {
            #pragma unroll
            for (int j = 0; j < 2; j++) i.w[r][j] = on ? __ldcs((const uint4*)w + ((row + r) * chunks + c) * 2 + j) : zeros4();
            i.s[r] = on ? __ldg((const float*)s + (row + r) * kb + (kb > 1 ? c / 4 : 0)) : 0.f;
        }
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
    static __device__ __forceinline__ void dot(const Item& i, const uint4* x, float z, float* y) {
        const __half2* h = (const __half2*)x;
        #pragma unroll
        for (int r = 0; r < 4; r++) {
            float sum = 0.f;
            #pragma unroll
            for (int j = 0; j < 2; j++) {
                __half2 a = __float2half2_rn(0.f);
                #pragma unroll
                for (int k = 0; k < 8; k++) a = __hfma2(pair((&i.w[r][j].x)[k / 2] >> (k % 2 * 16)), h[j * 8 + k], a);
                const float2 f = __half22float2(a);
                sum += f.x + f.y;
            }
            y[r] = fmaf(__fmul_rn(sum, z), i.s[r], y[r]);
        }
    }
};
// 16 bits: every product in float32.
template <bool BF16> struct wide {
    struct Item { uint4 w[4][4]; };
    static constexpr int POWER = 14;
    static constexpr float UNIT = 1.f;
    static __device__ __forceinline__ void fetch(Item& i, Bytes w, Bytes, size_t row, int c, int chunks, int, bool on) {
        #pragma unroll
        for (int r = 0; r < 4; r++)
            #pragma unroll
            for (int j = 0; j < 4; j++) i.w[r][j] = on ? __ldcs((const uint4*)w + ((row + r) * chunks + c) * 4 + j) : zeros4();
    }
    static __device__ __forceinline__ float2 pair(unsigned v) {
        return BF16 ? make_float2(__uint_as_float(v << 16), __uint_as_float(v & 0xFFFF0000u)) : __half22float2(as_half2(v));
    }
    static __device__ __forceinline__ void dot(const Item& i, const uint4* x, float z, float* y) {
        float sum[4] = {};
        #pragma unroll
        for (int k = 0; k < 16; k++) {
            const float2 v = __half22float2(as_half2((&x[k / 4].x)[k % 4]));
            #pragma unroll
            for (int r = 0; r < 4; r++) {
                const float2 u = pair((&i.w[r][k / 4].x)[k % 4]);
                sum[r] = fmaf(u.y, v.y, fmaf(u.x, v.x, sum[r]));
            }
        }
        #pragma unroll
        for (int r = 0; r < 4; r++) y[r] = fmaf(sum[r], z, y[r]);
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
