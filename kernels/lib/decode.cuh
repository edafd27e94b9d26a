#pragma once
// Eight weights of one row as float32: columns 8v to 8v+7 of row `row` of a Packed matrix with C chunks a row. For tables and conversions; what multiplies
// has its own ways (lib/fragment.cuh).
#include "lib/fragment.cuh"

__device__ __forceinline__ void halves_to_floats(const unsigned* h, float f, float* a) {
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 v = __half22float2(half2_from(h[i]));
        a[2 * i] = __fmul_rn(v.x, f); a[2 * i + 1] = __fmul_rn(v.y, f);
    }
}
__device__ __forceinline__ void e2m1_floats(unsigned w, float f, float* a) {
    unsigned h[4];
    e2m1_pairs(w, __float2half2_rn(16384.f), h);
    halves_to_floats(h, f, a);
}
struct decode_nvfp4 {
    static __device__ __forceinline__ void get(const unsigned char* w, const unsigned char* s, const float* gs, size_t row, int C, int v, float* a) {
        const float2 f = __half22float2(half2_from(e4m3_halves(s[((row / 4 * C + v / 4) * 4 + row % 4) * 2 + v % 4 / 2])));
        e2m1_floats(((const unsigned*)w)[row * C * 4 + v], __fmul_rn(f.x, gs[row]), a);
    }
};
struct decode_mxfp4 {
    static __device__ __forceinline__ void get(const unsigned char* w, const unsigned char* s, const float*, size_t row, int C, int v, float* a) {
        const unsigned e = s[(row / 4 * C + v / 4) * 4 + row % 4];
        e2m1_floats(((const unsigned*)w)[row * C * 4 + v], __uint_as_float(e ? e << 23 : 0x00400000u), a);
    }
};
template <bool TILED> struct decode_e4m3 {
    static __device__ __forceinline__ void get(const unsigned char* w, const unsigned char* s, const float*, size_t row, int C, int v, float* a) {
        const uint2 q = ((const uint2*)w)[row * C * 4 + v];
        const unsigned h[4] = {e4m3_halves(q.x & 0xFFFFu), e4m3_halves(q.x >> 16), e4m3_halves(q.y & 0xFFFFu), e4m3_halves(q.y >> 16)};
        halves_to_floats(h, ((const float*)s)[TILED ? row * ((C + 3) / 4) + v / 16 : row], a);
    }
};
typedef decode_e4m3<false> decode_fp8;
typedef decode_e4m3<true> decode_fp8_tiled;
struct decode_f16 {
    static __device__ __forceinline__ void get(const unsigned char* w, const unsigned char*, const float*, size_t row, int C, int v, float* a) {
        const uint4 q = ((const uint4*)w)[row * C * 4 + v];
        halves_to_floats(&q.x, 1.f, a);
    }
};
struct decode_bf16 {
    static __device__ __forceinline__ void get(const unsigned char* w, const unsigned char*, const float*, size_t row, int C, int v, float* a) {
        const uint4 q = ((const uint4*)w)[row * C * 4 + v];
        #pragma unroll
        for (int i = 0; i < 4; i++) { a[2 * i] = bf16_low(word(q, i)); a[2 * i + 1] = bf16_high(word(q, i)); }
    }
};
struct decode_f32 {
    static __device__ __forceinline__ void get(const unsigned char* w, const unsigned char*, const float*, size_t row, int C, int v, float* a) {
        load8((const float*)w + (row * C * 4 + v) * 8, a);
    }
};
