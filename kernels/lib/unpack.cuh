#pragma once
// Weights of every format on their way to a tensor core: eight of a row become four pairs of fp16. What a row has to be multiplied by afterwards is its
// `unit` (units.cu), so that the largest fp16 numbers of a row are large, whatever the format's range: nothing overflows, and what underflows is below
// 2^-28 of the row's largest.
//   BYTES  of eight weights       SCALE  bytes of the scales of a row and chunk of 32; 0: none, -1: a float32 for 128 weights
//   get(w, s, t, unit, low, h)    w: the weights as stored. s: scales of row and chunk. t: which eight of the chunk. low: what fp16 left of float32 weights
#include "lib/stage.cuh"

// Two e4m3 numbers as fp16.
__device__ __forceinline__ __half2 e4m3_pair(unsigned v) {
#if __CUDA_ARCH__ >= 890
    unsigned h;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"((unsigned short)v));
    return *reinterpret_cast<__half2*>(&h);
#else  // an e4m3 shifted into an fp16 is the same number times 2^-8
    const unsigned h = ((v & 0x8000u) << 16) | ((v & 0x7F00u) << 15) | ((v & 0x80u) << 8) | ((v & 0x7Fu) << 7);
    return __hmul2(*reinterpret_cast<const __half2*>(&h), __float2half2_rn(256.f));
#endif
}
__device__ __forceinline__ unsigned bits_of(__half2 h) { return *reinterpret_cast<unsigned*>(&h); }
__device__ __forceinline__ __half2 half2_of(unsigned v) { return *reinterpret_cast<__half2*>(&v); }
// The power of two that a row was multiplied by: the inverse of its unit.
__device__ __forceinline__ float up_of(float unit) { return __uint_as_float((254u - (__float_as_uint(unit) >> 23)) << 23); }

// Eight e2m1 numbers as packed (pack.cu), times `f`: a magnitude's three bits in bits 9 to 11 of an fp16 are the same number times 2^-14.
__device__ __forceinline__ void e2m1_eight(unsigned w, __half2 f, unsigned* h) {
    const unsigned a = w & 0x8E8E8E8Eu, b = ((w << 7) & 0x80808080u) | ((w >> 3) & 0x0E0E0E0Eu);
    h[0] = bits_of(__hmul2(half2_of(__byte_perm(a, 0, 0x1404)), f));
    h[1] = bits_of(__hmul2(half2_of(__byte_perm(a, 0, 0x3424)), f));
    h[2] = bits_of(__hmul2(half2_of(__byte_perm(b, 0, 0x1404)), f));
    h[3] = bits_of(__hmul2(half2_of(__byte_perm(b, 0, 0x3424)), f));
}

namespace weights {
struct nvfp4 {  // times 2^-7 of the block's e4m3 scale: at most 21, exact
    static constexpr int BYTES = 4, SCALE = 2;
    static __device__ __forceinline__ void get(const unsigned char* w, const unsigned char* s, int t, float, bool, unsigned* h) {
        e2m1_eight(*(const unsigned*)w, __hmul2(e4m3_pair(s[t / 2] * 0x101u), __float2half2_rn(128.f)), h);
    }
};
struct mxfp4 {  // times the block's power of two over the row's largest; exact down to 2^-24
    static constexpr int BYTES = 4, SCALE = 1;
    static __device__ __forceinline__ void get(const unsigned char* w, const unsigned char* s, int, float unit, bool, unsigned* h) {
        const int e = 29 + (int)s[0] - (int)(__float_as_uint(unit) >> 23);
        e2m1_eight(*(const unsigned*)w, half2_of((unsigned)(e > 0 ? e : 0) * 0x04000400u), h);
    }
};
struct fp8 {
    static constexpr int BYTES = 8, SCALE = 0;
    static __device__ __forceinline__ void get(const unsigned char* w, const unsigned char*, int, float, bool, unsigned* h) {
        const uint2 v = *(const uint2*)w;
        h[0] = bits_of(e4m3_pair(v.x)); h[1] = bits_of(e4m3_pair(v.x >> 16));
        h[2] = bits_of(e4m3_pair(v.y)); h[3] = bits_of(e4m3_pair(v.y >> 16));
    }
};
struct fp8_block {  // times the block's scale over the row's largest
    static constexpr int BYTES = 8, SCALE = -1;
    static __device__ __forceinline__ void get(const unsigned char* w, const unsigned char* s, int t, float unit, bool low, unsigned* h) {
        const __half2 f = __float2half2_rn(*(const float*)s / unit);
        fp8::get(w, s, t, unit, low, h);
        #pragma unroll
        for (int i = 0; i < 4; i++) h[i] = bits_of(__hmul2(half2_of(h[i]), f));
    }
};
struct f16 {
    static constexpr int BYTES = 16, SCALE = 0;
    static __device__ __forceinline__ void get(const unsigned char* w, const unsigned char*, int, float, bool, unsigned* h) { *(uint4*)h = *(const uint4*)w; }
};
struct bf16 {
    static constexpr int BYTES = 16, SCALE = 0;
    static __device__ __forceinline__ void get(const unsigned char* w, const unsigned char*, int, float unit, bool, unsigned* h) {
        const uint4 v = *(const uint4*)w;
        const float up = up_of(unit);
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const unsigned u = (&v.x)[i];
            h[i] = bits_of(__floats2half2_rn(__uint_as_float(u << 16) * up, __uint_as_float(u & 0xFFFF0000u) * up));
        }
    }
};
struct f32 {
    static constexpr int BYTES = 32, SCALE = 0;
    static __device__ __forceinline__ void get(const unsigned char* w, const unsigned char*, int, float unit, bool low, unsigned* h) {
        const float up = up_of(unit);
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 v = ((const float2*)w)[i];
            const __half2 p = __floats2half2_rn(v.x * up, v.y * up);
            const float2 q = __half22float2(p);
            h[i] = bits_of(low ? __floats2half2_rn(fmaf(v.x, up, -q.x), fmaf(v.y, up, -q.y)) : p);
        }
    }
};
}  // namespace weights
