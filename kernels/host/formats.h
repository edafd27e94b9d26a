// Rows of stored weights as float32, 32 weights at a time: for each format the
// very numbers that its `decode` of atlas.ground.formats makes.
#pragma once
#include "vector.h"

extern "C" {
// As `_Matrix` of atlas.ops.host has it
struct Matrix {
    const uint8_t *data, *scale, *zero;
    // Bytes from a row to the next; FP8_BLOCK: of scales
    long data_row, scale_row, zero_row;
    long n, k;
    long format;
    float factor;  // 1, or what all weights are multiplied by
};
}

// A row of it: where codes, scales and zero points begin, a scale of all, and
// which 32 of a block
struct Row {
    const uint8_t *data, *scale, *zero;
    float factor;
    int part = 0;
};

// What a row keeps ready for 256 weights: nothing
struct Nothing {};

// BYTES: of the codes of 32 weights; ENDS: a row may end within 32; HELD: 32s for
// which `hold` makes something ready. `row`: the n-th; `at`: a row from its c-th
// 32 weights on; `widen`: the first 32 of what `at` says
template <int B, bool E = false> struct Format {
    static constexpr int BYTES = B, HELD = 1;
    static constexpr bool ENDS = E;
    typedef Nothing Held;
    INLINE Row row(const Matrix& m, long n) {
        return {m.data + n * m.data_row, m.scale + n * m.scale_row,
                m.zero + n * m.zero_row, m.factor};
    }
    INLINE Row at(const Row& r, long c) {
        return {r.data + c * B, r.scale, r.zero, r.factor};
    }
    INLINE void hold(const Row&, Nothing&) {}
};

struct F32 : Format<128, true> {
    INLINE void widen(const Row& r, f8* w) {
        #pragma GCC unroll 16
        for (int j = 0; j < 4; j++)
            w[j] = load<f8>(r.data + 32 * j);
    }
};

struct F16 : Format<64, true> {
    INLINE void widen(const Row& r, f8* w) {
        #pragma GCC unroll 16
        for (int j = 0; j < 4; j++)
            w[j] = halves(r.data + 16 * j);
    }
};

struct BF16 : Format<64, true> {
    INLINE void widen(const Row& r, f8* w) {
        #pragma GCC unroll 16
        for (int j = 0; j < 4; j++) {
#if defined(__AVX2__)
            __m256i v = _mm256_cvtepu16_epi32(load<__m128i>(r.data + 16 * j));
            w[j] = (f8)_mm256_slli_epi32(v, 16);
#elif defined(NEON)
            uint16x8_t v = load<uint16x8_t>(r.data + 16 * j);
            w[j] = {(f4)vshll_n_u16(vget_low_u16(v), 16),
                    (f4)vshll_high_n_u16(v, 16)};
#else
            i8 v;
            #pragma GCC unroll 16
            for (int i = 0; i < 8; i++)
                v[i] = load<uint16_t>(r.data + 16 * j + 2 * i) << 16;
            w[j] = (f8)v;
#endif
        }
    }
};

// Bare codes, or with a scale of all: `factor`
struct FP8 : Format<32, true> {
    INLINE void widen(const Row& r, f8* w) { scaled(r.data, r.factor, w); }
    INLINE void scaled(const uint8_t* data, float factor, f8* w) {
        f8 s = all(factor * 256);
        #pragma GCC unroll 16
        for (int i = 0; i < 2; i++)
            e4m3(load<bytes16>(data + 16 * i), w + 2 * i);
        #pragma GCC unroll 16
        for (int j = 0; j < 4; j++)
            w[j] *= s;
    }
};

// With a float32 scale of each row
struct FP8_CHANNEL : FP8 {
    INLINE Row row(const Matrix& m, long n) {
        return {m.data + n * m.data_row, nullptr, nullptr,
                load<float>(m.scale + n * m.scale_row)};
    }
};

// With a float32 scale each 128 rows and columns
struct FP8_BLOCK : Format<32, true> {
    INLINE Row row(const Matrix& m, long n) {
        return {m.data + n * m.data_row, m.scale + n / 128 * m.scale_row, nullptr,
                1};
    }
    INLINE Row at(const Row& r, long c) {
        return {r.data + 32 * c, r.scale + c / 4 * 4, r.zero, r.factor};
    }
    INLINE void widen(const Row& r, f8* w) {
        FP8::scaled(r.data, load<float>(r.scale), w);
    }
};

// An E4M3 scale each 16, times `factor`
struct NVFP4 : Format<16, true> {
    INLINE Row at(const Row& r, long c) {
        return {r.data + 16 * c, r.scale + 2 * c, r.zero, r.factor};
    }
    INLINE void widen(const Row& r, f8* w) {
        Two s = two_e4m3(r.scale, r.factor);
        bytes16 c[2];
        pairs(load<bytes16>(r.data), c);
        #pragma GCC unroll 16
        for (int i = 0; i < 2; i++)
            signed_whole(e2m1(c[i]), w + 2 * i);
        #pragma GCC unroll 16
        for (int j = 0; j < 2; j++)
            w[j] *= s.first;
        #pragma GCC unroll 16
        for (int j = 2; j < 4; j++)
            w[j] *= s.second;
    }
};

// A power of two each 32
struct MXFP4 : Format<16> {
    INLINE Row at(const Row& r, long c) {
        return {r.data + 16 * c, r.scale + c, r.zero, r.factor};
    }
    INLINE void widen(const Row& r, f8* w) {
        uint32_t e = *r.scale;
        uint32_t bits = e == 255 ? 0x7fc00000 : e ? e << 23 : 0x400000;
        f8 s = all(load<float>(&bits) * .5f);
        bytes16 c[2];
        pairs(load<bytes16>(r.data), c);
        #pragma GCC unroll 16
        for (int i = 0; i < 2; i++)
            signed_whole(e2m1(c[i]), w + 2 * i);
        #pragma GCC unroll 16
        for (int j = 0; j < 4; j++)
            w[j] *= s;
    }
};

// A float32 scale and a zero point each 32
struct INT4 : Format<16> {
    INLINE Row at(const Row& r, long c) {
        return {r.data + 16 * c, r.scale + 4 * c, r.zero + c, r.factor};
    }
    INLINE void widen(const Row& r, f8* w) {
        f8 s = all(load<float>(r.scale)), z = all(*r.zero);
        bytes16 c[2];
        pairs(load<bytes16>(r.data), c);
        #pragma GCC unroll 16
        for (int i = 0; i < 2; i++)
            whole(c[i], w + 2 * i);
        #pragma GCC unroll 16
        for (int j = 0; j < 4; j++)
            w[j] = (w[j] - z) * s;
    }
};

// What follows is GGUF's. The low halves of sixteen bytes come first, then the
// high ones
INLINE void fours(const uint8_t* low, f8* w) {
    #pragma GCC unroll 16
    for (int i = 0; i < 2; i++) {
        i8 b = bytes8(low + 8 * i);
        w[i] = numbers(b & 15);
        w[2 + i] = numbers(b >> 4);
    }
}

// With a fifth bit of each in four more bytes; SIGNED: less 16
template <bool SIGNED>
INLINE void fives(const uint8_t* low, const uint8_t* high, f8* w) {
    bytes16 b = load<bytes16>(low), c[2] = {b & all16(15), b >> 4};
    #pragma GCC unroll 16
    for (int i = 0; i < 2; i++) {
        bytes16 set = bits16(high + 2 * i);
        c[i] |= SIGNED ? all16(0xf0) & ~set : all16(16) & set;
        if (SIGNED)
            signed_whole(c[i], w + 2 * i);
        else
            whole(c[i], w + 2 * i);
    }
}

// d, m?, fifth bits?, codes
template <bool OFFSET, bool HIGH>
struct Q45 : Format<2 + 2 * OFFSET + 4 * HIGH + 16> {
    INLINE void widen(const Row& r, f8* w) {
        const uint8_t* high = r.data + 2 + 2 * OFFSET;
        if (HIGH)
            fives<!OFFSET>(high + 4, high, w);
        else
            fours(high, w);
        if (OFFSET) {
            Two s = two_halves(r.data);
            #pragma GCC unroll 16
            for (int j = 0; j < 4; j++)
                w[j] = w[j] * s.first + s.second;
        } else {
            f8 d = all(half(r.data));
            f8 m = all(HIGH ? 0 : 8);
            #pragma GCC unroll 16
            for (int j = 0; j < 4; j++)
                w[j] = (w[j] - m) * d;
        }
    }
};

struct Q8_0 : Format<34> {
    INLINE void widen(const Row& r, f8* w) {
        f8 d = all(half(r.data));
        #pragma GCC unroll 16
        for (int j = 0; j < 4; j++)
            w[j] = numbers(signed8(r.data + 2 + 8 * j)) * d;
    }
};

// Blocks of 256: here `data` is that of the block, and its scales are held
struct Scales {
    float d[16], m[8];
};
template <int BLOCK> struct KQuant : Format<BLOCK / 8> {
    static constexpr int HELD = 8;
    typedef Scales Held;
    INLINE Row at(const Row& r, long c) {
        return {r.data + c / 8 * BLOCK, r.scale, r.zero, r.factor, (int)(c % 8)};
    }
};

// d, dmin, scales and offsets of six bits, fifth bits?, codes
template <bool HIGH> struct Q45_K : KQuant<HIGH ? 176 : 144> {
    // Four scales and four offsets in six bits each, and the rest of them: four
    // bits each, and two
    INLINE void hold(const Row& r, Scales& h) {
        uint32_t a = load<uint32_t>(r.data + 4), b = load<uint32_t>(r.data + 8);
        uint32_t c = load<uint32_t>(r.data + 12);
        const uint32_t six = 0x3f3f3f3f, four = 0x0f0f0f0f, two = 0x30303030;
        uint32_t sc[] = {a & six, (c & four) | (a >> 2 & two)};
        uint32_t mn[] = {b & six, (c >> 4 & four) | (b >> 2 & two)};
        store(h.d, all(half(r.data)) * numbers(bytes8(sc)));
        store(h.m, all(half(r.data + 2)) * numbers(bytes8(mn)));
    }
    INLINE void widen(const Row& r, const Scales& h, f8* w) {
        int i = r.part;
        const uint8_t *high = r.data + 16, *code = high + 32 * HIGH + i / 2 * 32;
        #pragma GCC unroll 16
        for (int k = 0; k < 2; k++) {
            bytes16 b = shifted(code + 16 * k, i % 2 * 4) & all16(15);
            if (HIGH)
                b |= (shifted(high + 16 * k, i) & all16(1)) << 4;
            whole(b, w + 2 * k);
        }
        f8 d = all(h.d[i]);
        f8 m = all(h.m[i]);
        #pragma GCC unroll 16
        for (int j = 0; j < 4; j++)
            w[j] = w[j] * d - m;
    }
};

// Lower four bits, upper two, scales each 16, d
struct Q6_K : KQuant<210> {
    INLINE void hold(const Row& r, Scales& h) {
        f8 d = all(half(r.data + 208));
        #pragma GCC unroll 16
        for (int i = 0; i < 2; i++)
            store(h.d + 8 * i, d * numbers(signed8(r.data + 192 + 8 * i)));
    }
    INLINE void widen(const Row& r, const Scales& h, f8* w) {
        int i = r.part;
        const uint8_t* low = r.data + i / 4 * 64 + i % 2 * 32;
        const uint8_t* high = r.data + 128 + i / 4 * 32;
        #pragma GCC unroll 16
        for (int k = 0; k < 2; k++) {
            bytes16 b = shifted(low + 16 * k, i % 4 / 2 * 4) & all16(15);
            b |= (shifted(high + 16 * k, i % 4 * 2) & all16(3)) << 4;
            signed_whole(b - all16(32), w + 2 * k);
            f8 s = all(h.d[2 * i + k]);
            w[2 * k] *= s;
            w[2 * k + 1] *= s;
        }
    }
};
