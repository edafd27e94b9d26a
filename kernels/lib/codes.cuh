#pragma once
// Numbers of four and eight bits as pairs of fp16, the lower one first.
#include <cuda_fp16.h>

__device__ __forceinline__ unsigned bits_of_half2(__half2 h) {
    return *reinterpret_cast<unsigned*>(&h);
}
__device__ __forceinline__ __half2 half2_from(unsigned v) {
    return *reinterpret_cast<__half2*>(&v);
}

// Two e4m3 numbers, in the lower 16 bits of `v`.
__device__ __forceinline__ unsigned e4m3_halves(unsigned v) {
#if __CUDA_ARCH__ >= 890
    unsigned h;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"((unsigned short)v));
    return h;
#else  // an e4m3 shifted into an fp16 is the same number times 2^-8; its NaN becomes 480
    const unsigned h = ((v & 0x8000u) << 16) | ((v & 0x7F00u) << 15)
            | ((v & 0x80u) << 8) | ((v & 0x7Fu) << 7);
    return bits_of_half2(__hmul2(half2_from(h), __float2half2_rn(256.f)));
#endif
}
// The eight e2m1 numbers of word `w` (layout: lib/formats.cuh), times 2^-14 and `f`: a magnitude's
// three bits in bits 9 to 11 of an fp16 are the number times 2^-14.
__device__ __forceinline__ void e2m1_pairs(unsigned w, __half2 f, unsigned* h) {
    const unsigned a = w & 0x8E8E8E8Eu;
    const unsigned b = ((w << 7) & 0x80808080u) | ((w >> 3) & 0x0E0E0E0Eu);
    h[0] = bits_of_half2(__hmul2(half2_from(__byte_perm(a, 0, 0x1404)), f));
    h[1] = bits_of_half2(__hmul2(half2_from(__byte_perm(a, 0, 0x3424)), f));
    h[2] = bits_of_half2(__hmul2(half2_from(__byte_perm(b, 0, 0x1404)), f));
    h[3] = bits_of_half2(__hmul2(half2_from(__byte_perm(b, 0, 0x3424)), f));
}
// The bits of `a` where `mask` has ones, those of `b` where it has zeros: in one instruction, which
// the compiler would not find.
__device__ __forceinline__ unsigned choose(
        unsigned a, unsigned b, unsigned mask) {
#if defined(__CUDA_ARCH__)
    unsigned r;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(r) : "r"(mask), "r"(a), "r"(b));
    return r;
#else
    return (a & mask) | (b & ~mask);
#endif
}
// The same in the order 0 2, 1 3, 4 6, 5 7: without permutations, which share a unit of half the
// speed with masks and shifts.
__device__ __forceinline__ void e2m1_crossed(unsigned w, __half2 f, unsigned* h) {
    const unsigned m = 0x8E008E00u;
    const unsigned u = choose(w << 7, w >> 3, 0x80808080u);
    h[0] = bits_of_half2(__hmul2(half2_from(w << 8 & m), f));
    h[1] = bits_of_half2(__hmul2(half2_from(w & m), f));
    h[2] = bits_of_half2(__hmul2(half2_from(u << 8 & m), f));
    h[3] = bits_of_half2(__hmul2(half2_from(u & m), f));
}
