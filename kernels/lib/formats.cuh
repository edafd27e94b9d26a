#pragma once
// The formats that weights have on a card, a struct each: all that kernels know of one. What reads,
// moves and multiplies (lib/decode.cuh, unpack.cuh, fragment.cuh) is written once, over
// these; the same rows are atlas.cuda.pack.CARD_FORMATS, and layouts are in kernels/README.md.
//   CHUNK   bytes of 32 codes of a row, a chunk
//   SCALE   bytes of its scales, those of four rows side by side; 0: none
//   BY_ROW  has each row a float32 scale in `s`?
//   TILE    have 128 columns?
// As float32, eight codes that follow each other:
//   floats(w, s, gs, row, C, v, a) the v-th eight of a row of C chunks, with its scales
// As fp16 for a product of many rows. What a row has to be multiplied by afterwards is its `unit`
// times UNITY, so that its largest fp16 numbers are large, whatever the format's range: nothing
// overflows, and what underflows is below 2^-28 of the row's largest.
//   aid(unit)            what `halves` wants to know of a row's unit
//   unit(aid)            and back
//   halves(w, s, t, aid, low, h) the eight at `w` as four pairs. s: scales of row and chunk. t:
//                        which eight of the chunk. low: what fp16 left of float32 weights
//   piece(w, s, r, bytes, i) of all of row r that its unit depends on, the i-th; -1 beyond the end.
//                        Only where units are to be found (units.cu)
//   unit_of(top)         the unit of a row whose largest piece is `top`
// For products of few rows by tensor cores, 128 columns at a time (lib/fragment.cuh):
//   TWO                  x as two planes of bf16, not one of fp16
//   Pair                 where chunks have scales: those of two rows. read(p); factors(f): a Factor
//                        for each row and each half of a chunk; scale(i): of the sums of row i, if
//                        SCALED
//   times(w, f, h)       there too: word `w` times its Factor as four pairs of fp16, in the order
//                        of to_half8_crossed if CROSSED, else as they come
//   row_scale(s, gs, row) what the sums of a whole row are to be multiplied by
//   row_raw(s, gs, row)  what that reads: row_scale of one row makes of it the same
//
// Four bits: a chunk is 32 weights of one row: 16 bytes, and in NVFP4 two e4m3 scales (one for 16
// weights).
//   weights: uint4 [rows, K/32]. Word j of a chunk holds weights 8j..8j+7, byte i of it weights
//            8j+i (sign in bit 7, magnitude in bits 1-3) and 8j+4+i (sign in bit 0, magnitude in
//            bits 4-6), so that a mask or a shift, and a byte permutation, make fp16 pairs of them:
//            the three bits of an e2m1 magnitude, put in bits 9-11 of an fp16, are the same number
//            times 2^-14, its subnormal included.
//   scales:  uint2 [rows/4, K/32]. The two scales of rows 4q, 4q+1, 4q+2, 4q+3 side by side: a lane
//            fetches those of four rows at once.
// INT4 has codes q from 0 to 15 and a zero point z, and is (q - z) times a scale, which 32 weights
//   share. Words in another order: the lower half has 8j, 8j+2, 8j+4, 8j+6 from its lowest bits on,
//        the upper half the weights after these, so that a mask leaves a pair. A code in the lowest
//        bits of the fp16 1024 makes it 1024 + q, four bits higher 1024 + 16q, and q - z is a
//        subtraction or a multiply-add, exact.
//   scales:  uint4 [rows/4, K/32]. Of each of four rows the fp16 scale, in the lower half, and z,
//            so that zeros stand for zeros. A row's power of two (`gs`) brings its largest scale
//            into [2^11, 2^12).
#include "lib/codes.cuh"
#include "lib/stage.cuh"

typedef const unsigned char* Bytes;
#define EACH_FORMAT(X) \
    X(nvfp4) X(mxfp4) X(int4) X(fp8) X(fp8_tiled) X(bf16) X(f16) X(f32)

__device__ __forceinline__ void halves_to_floats(
        const unsigned* h, float f, float* a) {
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const float2 v = __half22float2(half2_from(h[i]));
        a[2 * i] = __fmul_rn(v.x, f);
        a[2 * i + 1] = __fmul_rn(v.y, f);
    }
}
// The v-th eight codes, as a T, of row `row` of C chunks.
template <class T>
__device__ __forceinline__ const T& eight(Bytes w, size_t row, int C, int v) {
    return ((const T*)w)[row * C * 4 + v];
}
__device__ __forceinline__ const unsigned& word(const uint4& v, int i) {
    return (&v.x)[i];
}
__device__ __forceinline__ float bf16_low(unsigned v) {
    return __uint_as_float(v << 16);
}
__device__ __forceinline__ float bf16_high(unsigned v) {
    return __uint_as_float(v & 0xFFFF0000u);
}

__device__ __forceinline__ void multiply_pairs(unsigned* h, __half2 f) {
    #pragma unroll
    for (int i = 0; i < 4; i++)
        h[i] = bits_of_half2(__hmul2(half2_from(h[i]), f));
}

namespace formats {
struct itself {
    static __device__ __forceinline__ float aid(float unit) { return unit; }
    static __device__ __forceinline__ float unit(float aid) { return aid; }
};
struct inverse {  // of a power of two
    static __device__ __forceinline__ float aid(float unit) {
        return __uint_as_float((254u - (__float_as_uint(unit) >> 23)) << 23);
    }
    static __device__ __forceinline__ float unit(float aid) {
        return inverse::aid(aid);
    }
};

struct e2m1 {  // what nvfp4 and mxfp4 share
    static constexpr int CHUNK = 16;
    static constexpr bool BY_ROW = false;
    static constexpr bool TILE = false;
    static constexpr bool TWO = false;
    static constexpr bool CROSSED = true;
    typedef __half2 Factor;
    static __device__ __forceinline__ void times(unsigned w, float f, float* a) {
        unsigned h[4];
        e2m1_pairs(w, __float2half2_rn(16384.f), h);
        halves_to_floats(h, f, a);
    }
    static __device__ __forceinline__ void times(
            unsigned w, Factor f, unsigned* h) {
        e2m1_crossed(w, f, h);
    }
};

struct nvfp4 : e2m1, itself {
    static constexpr int SCALE = 2;
    static constexpr float UNITY = 16384.f;
    static __device__ __forceinline__ void floats(
            Bytes w, Bytes s, const float* gs, size_t row, int C, int v,
            float* a) {
        const unsigned char scale =
                s[((row / 4 * C + v / 4) * 4 + row % 4) * 2 + v % 4 / 2];
        const float2 f = __half22float2(half2_from(e4m3_halves(scale)));
        const unsigned codes = eight<unsigned>(w, row, C, v);
        times(codes, __fmul_rn(f.x, gs[row]), a);
    }
    // times 2^-14 of the block's e4m3 scale: at most .17, exact, a multiple of 2^-24
    static __device__ __forceinline__ void halves(
            unsigned codes, unsigned scale, unsigned* h) {
        e2m1_pairs(codes, half2_from(e4m3_halves(scale * 0x101u)), h);
    }
    static __device__ __forceinline__ void halves(
            Bytes w, Bytes s, int t, float, bool, unsigned* h) {
        halves(*(const unsigned*)w, s[t / 2], h);
    }
    struct Pair {  // exact in fp16: at most 6 * 448 * 2^-14, a multiple of 2^-24
        static constexpr bool SCALED = false;
        unsigned s;
        __device__ __forceinline__ void read(Bytes p) { s = *(const unsigned*)p; }
        __device__ __forceinline__ void factors(__half2 (*f)[2]) const {
            const __half2 p = half2_from(e4m3_halves(s & 0xFFFFu));
            const __half2 q = half2_from(e4m3_halves(s >> 16));
            f[0][0] = __half2half2(__low2half(p));
            f[0][1] = __half2half2(__high2half(p));
            f[1][0] = __half2half2(__low2half(q));
            f[1][1] = __half2half2(__high2half(q));
        }
        __device__ __forceinline__ float scale(int) const { return 1.f; }
    };
    static __device__ __forceinline__ float row_scale(
            Bytes, const float* gs, size_t row) {
        return gs[row] * 16384.f;
    }
    static __device__ __forceinline__ float row_raw(
            Bytes, const float* gs, size_t row) {
        return gs[row];
    }
};

// Of two pairs of 16 bits, the larger ones.
__device__ __forceinline__ unsigned larger(unsigned a, unsigned b) {
#if defined(__CUDA_ARCH__)
    return __vmaxu2(a, b);
#else
    return max(a & 0xFFFFu, b & 0xFFFFu) | max(a >> 16, b >> 16) << 16;
#endif
}
// The greater number, as one instruction: of a shifted one compilers make a comparison and a
// choice.
__device__ __forceinline__ unsigned greater(unsigned a, unsigned b) {
#if defined(__CUDA_ARCH__)
    unsigned v;
    asm("max.u32 %0, %1, %2;" : "=r"(v) : "r"(a), "r"(b));
    return v;
#else
    return max(a, b);
#endif
}
struct mxfp4 : e2m1 {
    static constexpr int SCALE = 1;
    static constexpr float UNITY = 1.f;
    static __device__ __forceinline__ float power(unsigned e) {
        return __uint_as_float(e ? e << 23 : 0x00400000u);
    }
    static __device__ __forceinline__ void floats(
            Bytes w, Bytes s, const float*, size_t row, int C, int v, float* a) {
        const unsigned e = s[(row / 4 * C + v / 4) * 4 + row % 4];
        times(eight<unsigned>(w, row, C, v), power(e), a);
    }
    static __device__ __forceinline__ float aid(float unit) {
        return __int_as_float(29 - (int)(__float_as_uint(unit) >> 23));
    }
    static __device__ __forceinline__ float unit(float aid) {
        return __uint_as_float((29u - __float_as_uint(aid)) << 23);
    }
    // times the block's power of two over the row's largest; exact down to 2^-24
    static __device__ __forceinline__ void halves(
            Bytes w, Bytes s, int, float aid, bool, unsigned* h) {
        const int e = __float_as_int(aid) + s[0];
        const unsigned codes = *(const unsigned*)w;
        const unsigned power = (unsigned)(e > 0 ? e : 0) * 0x04000400u;
        e2m1_pairs(codes, half2_from(power), h);
    }
    static __device__ float piece(Bytes, Bytes s, int r, int bytes, int i) {
        const int chunks = bytes / 16;
        if (i >= chunks)
            return -1.f;
        return s[((size_t)(r / 4) * chunks + i) * 4 + r % 4];
    }
    static __device__ __forceinline__ float unit_of(float top) {
        return __uint_as_float((unsigned)max((int)top, 1) << 23);
    }
    // each chunk times its power of two over the largest of the four: exact, unless below 2^-23
    struct Pair {
        static constexpr bool SCALED = true;
        unsigned s, top;  // of both rows, 16 bits each
        __device__ __forceinline__ void read(Bytes p) {
            // and the largest of the four chunks'
            s = __byte_perm(*(const unsigned short*)p, 0, 0x4140);
            top = larger(s, __shfl_xor_sync(~0u, s, 1));
            top = larger(top, __shfl_xor_sync(~0u, top, 2));
        }
        __device__ __forceinline__ void factors(__half2 (*f)[2]) const {
            const unsigned e = (larger(s + 0x001D001Du, top) - top) << 10;
            f[0][0] = f[0][1] = half2_from(__byte_perm(e, 0, 0x1010));
            f[1][0] = f[1][1] = half2_from(__byte_perm(e, 0, 0x3232));
        }
        __device__ __forceinline__ float scale(int i) const {  // `power`
            return __uint_as_float(greater(top >> (16 * i) << 23, 0x00400000u));
        }
    };
    static __device__ __forceinline__ float row_scale(
            Bytes, const float*, size_t) {
        return 1.f;
    }
    static __device__ __forceinline__ float row_raw(Bytes, const float*, size_t) {
        return 1.f;
    }
};

struct int4 : itself {
    static constexpr int CHUNK = 16, SCALE = 4;
    static constexpr float UNITY = 1.f;
    static constexpr bool BY_ROW = false;
    static constexpr bool TILE = false;
    static constexpr bool TWO = false;
    static constexpr bool CROSSED = false;
    typedef unsigned Factor;  // scale and z
    static __device__ __forceinline__ float scale(Factor f) {
        return __half22float2(half2_from(f)).x;
    }
    // The fp16 1024 plus the lower half of `bits`, and plus the upper half.
    static __device__ __forceinline__ __half2 over_1024(unsigned bits) {
        return half2_from(bits | 0x64006400u);
    }
    // q - z of eight codes
    static __device__ __forceinline__ void less(
            unsigned w, Factor f, unsigned* h) {
        const __half2 z = over_1024(__byte_perm(f, 0, 0x3232));
        const __half2 sixteenth = __float2half2_rn(.0625f);
        const __half2 base = __hsub2(__float2half2_rn(960.f), z);
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const unsigned v = w >> (8 * i);
            const __half2 low = over_1024(v & 0x000F000Fu);
            h[2 * i] = bits_of_half2(__hsub2(low, z));
            const __half2 high = over_1024(v & 0x00F000F0u);
            h[2 * i + 1] = bits_of_half2(__hfma2(high, sixteenth, base));
        }
    }
    // below 15 * 2^12; rounded, as a scale has eleven bits and a product of it more
    static __device__ __forceinline__ void times(
            unsigned w, Factor f, unsigned* h) {
        const __half2 s = half2_from(__byte_perm(f, 0, 0x1010));
        less(w, f, h);
        multiply_pairs(h, s);
    }
    static __device__ __forceinline__ void floats(
            Bytes w, Bytes s, const float* gs, size_t row, int C, int v,
            float* a) {
        const Factor f = ((const Factor*)s)[(row / 4 * C + v / 4) * 4 + row % 4];
        unsigned h[4];
        less(eight<unsigned>(w, row, C, v), f, h);
        halves_to_floats(h, __fmul_rn(scale(f), gs[row]), a);
    }
    static __device__ __forceinline__ void halves(
            Bytes w, Bytes s, int, float, bool, unsigned* h) {
        times(*(const unsigned*)w, *(const Factor*)s, h);
    }
    struct Pair {
        static constexpr bool SCALED = false;
        uint2 s;
        __device__ __forceinline__ void read(Bytes p) { s = *(const uint2*)p; }
        __device__ __forceinline__ void factors(Factor (*f)[2]) const {
            f[0][0] = f[0][1] = s.x;
            f[1][0] = f[1][1] = s.y;
        }
        __device__ __forceinline__ float scale(int) const { return 1.f; }
    };
    static __device__ __forceinline__ float row_scale(
            Bytes, const float* gs, size_t row) {
        return gs[row];
    }
    static __device__ __forceinline__ float row_raw(
            Bytes, const float* gs, size_t row) {
        return gs[row];
    }
};

template <bool TILED> struct e4m3 {
    static constexpr int CHUNK = 32, SCALE = 0;
    static constexpr float UNITY = 1.f;
    static constexpr bool BY_ROW = true, TILE = TILED, TWO = false;
    static __device__ __forceinline__ void pairs(const uint2 v, unsigned* h) {
        h[0] = e4m3_halves(v.x & 0xFFFFu);
        h[1] = e4m3_halves(v.x >> 16);
        h[2] = e4m3_halves(v.y & 0xFFFFu);
        h[3] = e4m3_halves(v.y >> 16);
    }
    static __device__ __forceinline__ void floats(
            Bytes w, Bytes s, const float*, size_t row, int C, int v, float* a) {
        unsigned h[4];
        pairs(eight<uint2>(w, row, C, v), h);
        const size_t at = TILED ? row * ((C + 3) / 4) + v / 16 : row;
        halves_to_floats(h, ((const float*)s)[at], a);
    }
    static __device__ __forceinline__ float row_scale(
            Bytes s, const float*, size_t row) {
        return TILED ? 1.f : ((const float*)s)[row];
    }
    static __device__ __forceinline__ float row_raw(
            Bytes s, const float* gs, size_t row) {
        return row_scale(s, gs, row);
    }
};
struct fp8 : e4m3<false>, itself {
    static __device__ __forceinline__ void halves(
            Bytes w, Bytes, int, float, bool, unsigned* h) {
        pairs(*(const uint2*)w, h);
    }
};
struct fp8_tiled : e4m3<true>, inverse {
    // times the block's scale, which the power of two below the row's largest brings below 2
    static __device__ __forceinline__ void halves(
            Bytes w, Bytes s, int, float aid, bool, unsigned* h) {
        const __half2 f = __float2half2_rn(*(const float*)s * aid);
        pairs(*(const uint2*)w, h);
        multiply_pairs(h, f);
    }
    static __device__ float piece(Bytes, Bytes s, int r, int bytes, int i) {
        const int n = (bytes + 127) / 128;
        return i < n ? fabsf(((const float*)s)[(size_t)r * n + i]) : -1.f;
    }
    static __device__ __forceinline__ float unit_of(float top) {
        const unsigned power = __float_as_uint(top) & 0x7F800000u;
        return __uint_as_float(max(power, 1u << 23));
    }
};

template <bool BF16> struct sixteen {
    static constexpr int CHUNK = 64, SCALE = 0;
    static constexpr float UNITY = 1.f;
    static constexpr bool BY_ROW = false, TILE = false, TWO = BF16;
    static __device__ __forceinline__ float row_scale(
            Bytes, const float*, size_t) {
        return 1.f;
    }
    static __device__ __forceinline__ float row_raw(Bytes, const float*, size_t) {
        return 1.f;
    }
};
struct bf16 : sixteen<true>, inverse {
    static __device__ __forceinline__ void floats(
            Bytes w, Bytes, const float*, size_t row, int C, int v, float* a) {
        const uint4 q = eight<uint4>(w, row, C, v);
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            a[2 * i] = bf16_low(word(q, i));
            a[2 * i + 1] = bf16_high(word(q, i));
        }
    }
    static __device__ __forceinline__ void halves(
            Bytes w, Bytes, int, float up, bool, unsigned* h) {
        const uint4 v = *(const uint4*)w;
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const float low = bf16_low(word(v, i)) * up;
            const float high = bf16_high(word(v, i)) * up;
            h[i] = bits_of_half2(__floats2half2_rn(low, high));
        }
    }
    static __device__ float piece(Bytes w, Bytes, int, int bytes, int i) {
        if (i >= bytes / 2)
            return -1.f;
        return fabsf(bf16_low(((const unsigned short*)w)[i]));
    }
    static __device__ __forceinline__ float unit_of(float top) {
        return chunk_scale(top).y;
    }
};
struct f16 : sixteen<false>, itself {
    static __device__ __forceinline__ void floats(
            Bytes w, Bytes, const float*, size_t row, int C, int v, float* a) {
        const uint4 q = eight<uint4>(w, row, C, v);
        halves_to_floats(&q.x, 1.f, a);
    }
    static __device__ __forceinline__ void halves(
            Bytes w, Bytes, int, float, bool, unsigned* h) {
        *(uint4*)h = *(const uint4*)w;
    }
};

struct f32 : inverse {
    static constexpr int CHUNK = 128, SCALE = 0;
    static constexpr float UNITY = 1.f;
    static constexpr bool BY_ROW = false, TILE = false, TWO = true;
    static __device__ __forceinline__ void floats(
            Bytes w, Bytes, const float*, size_t row, int C, int v, float* a) {
        load8((const float*)w + (row * C * 4 + v) * 8, a);
    }
    static __device__ __forceinline__ void halves(
            Bytes w, Bytes, int, float up, bool low, unsigned* h) {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const float2 v = ((const float2*)w)[i];
            const __half2 p = __floats2half2_rn(v.x * up, v.y * up);
            const float2 q = __half22float2(p);
            const float x = fmaf(v.x, up, -q.x);
            const float y = fmaf(v.y, up, -q.y);
            h[i] = bits_of_half2(low ? __floats2half2_rn(x, y) : p);
        }
    }
    static __device__ float piece(Bytes w, Bytes, int, int bytes, int i) {
        return i < bytes / 4 ? fabsf(((const float*)w)[i]) : -1.f;
    }
    static __device__ __forceinline__ float unit_of(float top) {
        return chunk_scale(top).y;
    }
    static __device__ __forceinline__ float row_scale(
            Bytes, const float*, size_t) {
        return 1.f;
    }
    static __device__ __forceinline__ float row_raw(Bytes, const float*, size_t) {
        return 1.f;
    }
};
}  // namespace formats
