#pragma once
// Weights of every format on their way to a tensor core: eight of a row become four pairs of fp16. What a row has to be multiplied by afterwards is its
// `unit` (units.cu), so that the largest fp16 numbers of a row are large, whatever the format's range: nothing overflows, and what underflows is below
// 2^-28 of the row's largest.
//   BYTES  of eight weights       SCALE  bytes of the scales of a row and chunk of 32; 0: none, -1: a float32 for 128 weights
//   aid(unit), unit(aid)          what `get` wants to know of a row's unit, and back
//   get(w, s, t, aid, low, h)     w: the weights as stored. s: scales of row and chunk. t: which eight of the chunk. low: what fp16 left of float32 weights
#include "lib/codes.cuh"
#include "lib/stage.cuh"

struct itself {
    static __device__ __forceinline__ float aid(float unit) { return unit; }
    static __device__ __forceinline__ float unit(float aid) { return aid; }
};
struct inverse {  // of a power of two
    static __device__ __forceinline__ float aid(float unit) { return __uint_as_float((254u - (__float_as_uint(unit) >> 23)) << 23); }
    static __device__ __forceinline__ float unit(float aid) { return inverse::aid(aid); }
};

namespace weights {
struct nvfp4 : itself {  // times 2^-7 of the block's e4m3 scale: at most 21, exact
    static constexpr int BYTES = 4, SCALE = 2;
    static __device__ __forceinline__ void get(const unsigned char* w, const unsigned char* s, int t, float, bool, unsigned* h) {
        e2m1_pairs(*(const unsigned*)w, __hmul2(half2_from(e4m3_halves(s[t / 2] * 0x101u)), __float2half2_rn(128.f)), h);
    }
};
struct mxfp4 {  // times the block's power of two over the row's largest; exact down to 2^-24
    static constexpr int BYTES = 4, SCALE = 1;
    static __device__ __forceinline__ float aid(float unit) { return __int_as_float(29 - (int)(__float_as_uint(unit) >> 23)); }
    static __device__ __forceinline__ float unit(float aid) { return __uint_as_float((29u - __float_as_uint(aid)) << 23); }
    static __device__ __forceinline__ void get(const unsigned char* w, const unsigned char* s, int, float aid, bool, unsigned* h) {
        const int e = __float_as_int(aid) + s[0];
        e2m1_pairs(*(const unsigned*)w, half2_from((unsigned)(e > 0 ? e : 0) * 0x04000400u), h);
    }
};
struct fp8 : itself {
    static constexpr int BYTES = 8, SCALE = 0;
    static __device__ __forceinline__ void get(const unsigned char* w, const unsigned char*, int, float, bool, unsigned* h) {
        const uint2 v = *(const uint2*)w;
        h[0] = e4m3_halves(v.x & 0xFFFFu); h[1] = e4m3_halves(v.x >> 16);
        h[2] = e4m3_halves(v.y & 0xFFFFu); h[3] = e4m3_halves(v.y >> 16);
    }
};
struct fp8_block : inverse {  // times the block's scale, which the power of two below the row's largest brings below 2
    static constexpr int BYTES = 8, SCALE = -1;
    static __device__ __forceinline__ void get(const unsigned char* w, const unsigned char* s, int t, float aid, bool low, unsigned* h) {
        const __half2 f = __float2half2_rn(*(const float*)s * aid);
        fp8::get(w, s, t, aid, low, h);
        #pragma unroll
        for (int i = 0; i < 4; i++) h[i] = bits_of_half2(__hmul2(half2_from(h[i]), f));
    }
};
struct f16 : itself {
    static constexpr int BYTES = 16, SCALE = 0;
    static __device__ __forceinline__ void get(const unsigned char* w, const unsigned char*, int, float, bool, unsigned* h) { *(uint4*)h = *(const uint4*)w; }
};
struct bf16 : inverse {
    static constexpr int BYTES = 16, SCALE = 0;
    static __device__ __forceinline__ void get(const unsigned char* w, const unsigned char*, int, float up, bool, unsigned* h) {
        const uint4 v = *(const uint4*)w;
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const unsigned u = (&v.x)[i];
            h[i] = bits_of_half2(__floats2half2_rn(__uint_as_float(u << 16) * up, __uint_as_float(u & 0xFFFF0000u) * up));
        }
    }
};
struct f32 : inverse {
    static constexpr int BYTES = 32, SCALE = 0;
    static __device__ __forceinline__ void get(const unsigned char* w, const unsigned char*, int, float up, bool low, unsigned* h) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 v = ((const float2*)w)[i];
            const __half2 p = __floats2half2_rn(v.x * up, v.y * up);
            const float2 q = __half22float2(p);
            h[i] = bits_of_half2(low ? __floats2half2_rn(fmaf(v.x, up, -q.x), fmaf(v.y, up, -q.y)) : p);
        }
    }
};
}  // namespace weights
