#pragma once
// Weights on their way to products of numbers of eight or four bits: eight of a row that follow
// each other, from shared memory (as lib/unpack.cuh finds them) to what lib/mma_narrow.cuh takes.
//   eight(w, s, t, aid, b)   FP8: as e4m3, two registers. Where their scale is in it they are
//                            rounded
//   BACK                     and what the row's unit is to be multiplied by then
//   scale(s, aid)            FP4: the e4m3 scales of two sixteens, in 16 bits; a word is plain_e2m1
//   BACK4                    likewise
#include "lib/encode.cuh"
#include "lib/unpack.cuh"

// Codes of eight e2m1 numbers: byte i has number i in its lower half, number 4+i in its upper one.
__device__ __forceinline__ unsigned plain_e2m1(unsigned w) {
    unsigned r = choose(w >> 1, w, 0x07070707u);
    r = choose(w >> 4, r, 0x08080808u);
    return choose(w << 7, r, 0x80808080u);
}
// Two pairs of fp16 as four e4m3, rounded to nearest even, saturating.
__device__ __forceinline__ unsigned halves_to_e4m3(unsigned p, unsigned q) {
#if __CUDA_ARCH__ >= 890
    unsigned short a, b;
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(a) : "r"(p));
    asm("cvt.rn.satfinite.e4m3x2.f16x2 %0, %1;" : "=h"(b) : "r"(q));
    return a | (unsigned)b << 16;
#else
    const float2 u = __half22float2(half2_from(p));
    const float2 v = __half22float2(half2_from(q));
    return to_e4m3(u.x) | to_e4m3(u.y) << 8 | to_e4m3(v.x) << 16
            | to_e4m3(v.y) << 24;
#endif
}

namespace narrow_weights {
// LIFT: a power of two that brings the largest fp16 weight near 448
template <class F, int LIFT> struct rounded {
    static constexpr float BACK = F::UNITY / LIFT;
    static __device__ __forceinline__ void eight(
            Bytes w, Bytes s, int t, float aid, unsigned* b) {
        unsigned h[4];
        F::halves(w, s, t, aid, false, h);
        multiply_pairs(h, __float2half2_rn(LIFT));
        b[0] = halves_to_e4m3(h[0], h[1]);
        b[1] = halves_to_e4m3(h[2], h[3]);
    }
};
struct nvfp4 : rounded<weights::nvfp4, 2048> {  // 336 at most
    static constexpr float BACK4 = 1.f;
    static __device__ __forceinline__ unsigned scale(Bytes s, float) {
        return *(const unsigned short*)s;
    }
};
struct mxfp4 : rounded<weights::mxfp4, 64> {  // 6 * 64 at most
    // Powers of two over the row's largest, which becomes 2^8: down to 2^-17 of it
    static constexpr float BACK4 = .00390625f;
    static __device__ __forceinline__ unsigned scale(Bytes s, float aid) {
        const int e = s[0] - (29 - __float_as_int(aid)) + 15;
        const unsigned code = e > 0 ? e << 3 : e > -3 ? 4 >> -e : 0;
        return code * 0x101u;
    }
};
struct e4m3_codes {
    static constexpr float BACK = 1.f, BACK4 = 1.f;
    static __device__ __forceinline__ void eight(
            Bytes w, Bytes, int, float, unsigned* b) {
        const uint2 v = *(const uint2*)w;
        b[0] = v.x;
        b[1] = v.y;
    }
    static __device__ __forceinline__ unsigned scale(Bytes, float) { return 0; }
};
typedef e4m3_codes fp8, fp8_block;
}  // namespace narrow_weights
