#pragma once
// NVFP4 as the kernels read it. A chunk is 32 weights of one row: 16 bytes, and two e4m3 scales (one for 16 weights).
//   weights: uint4 [rows, K/32]. Word j of a chunk holds weights 8j..8j+7, byte i of it weights 8j+i (sign in bit 7, magnitude in bits 1-3)
//            and 8j+4+i (sign in bit 0, magnitude in bits 4-6), so that a mask or a shift, and a byte permutation, make fp16 pairs of them:
//            the three bits of an e2m1 magnitude, put in bits 9-11 of an fp16, are the same number times 2^-14, its subnormal included.
//   scales:  uint2 [rows/4, K/32]. The two scales of rows 4q, 4q+1, 4q+2, 4q+3 side by side: a lane fetches those of four rows at once.
// Activations are fp16 with a power-of-two scale for each chunk (lib/stage.cuh), largest magnitude in [2^14, 2^15): a sum of eight products
// stays below 8 * 6*2^-14 * 2^15 = 96, so nothing overflows, and what is lost below 2^-24 is 2^-29 of the chunk's largest.
#include <cuda_fp16.h>

#define NVFP4_UNIT 16384.f  // what the sums are to be multiplied by, once a row

__device__ __forceinline__ __half2 as_half2(unsigned v) { return *reinterpret_cast<__half2*>(&v); }

// Two e4m3 numbers as floats.
__device__ __forceinline__ float2 e4m3x2(unsigned short v) {
#if __CUDA_ARCH__ >= 890
    unsigned h;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"(v));
    return __half22float2(as_half2(h));
#else  // an e4m3 shifted into an fp16 is the same number times 2^-8
    return __half22float2(__hmul2(as_half2(((v & 0x8000u) << 16) | ((v & 0x7F00u) << 15) | ((v & 0x80u) << 8) | ((v & 0x7Fu) << 7)), __float2half2_rn(256.f)));
#endif
}

// Eight weights of word `w` times x[0..3], added to `acc`.
__device__ __forceinline__ __half2 nvfp4_word(unsigned w, const __half2* x, __half2 acc) {
    const unsigned a = w & 0x8E8E8E8Eu, b = ((w << 7) & 0x80808080u) | ((w >> 3) & 0x0E0E0E0Eu);
    acc = __hfma2(as_half2(__byte_perm(a, 0, 0x1404)), x[0], acc);
    acc = __hfma2(as_half2(__byte_perm(a, 0, 0x3424)), x[1], acc);
    acc = __hfma2(as_half2(__byte_perm(b, 0, 0x1404)), x[2], acc);
    return __hfma2(as_half2(__byte_perm(b, 0, 0x3424)), x[3], acc);
}

// A chunk's dot product, without its activations' scale and NVFP4_UNIT. `scales`: two e4m3.
__device__ __forceinline__ float nvfp4_chunk(uint4 w, unsigned short scales, const __half2* x) {
    const __half2 zero = __float2half2_rn(0.f);
    const float2 u = __half22float2(nvfp4_word(w.y, x + 4, nvfp4_word(w.x, x, zero)));
    const float2 v = __half22float2(nvfp4_word(w.w, x + 12, nvfp4_word(w.z, x + 8, zero)));
    const float2 f = e4m3x2(scales);
    return fmaf(u.x + u.y, f.x, __fmul_rn(v.x + v.y, f.y));  // told apart, lest the compiler fuse them differently for other row counts
}
// The scales of row r%4 out of four.
__device__ __forceinline__ unsigned short nvfp4_scales(uint2 s, int r) { return (unsigned short)((r & 2 ? s.y : s.x) >> ((r & 1) * 16)); }
