// Rows of stored weights as float32, 32 weights at a time: for each format the very numbers that
// its `decode` of atlas.ground.formats makes.
#pragma once
#include "vector.h"

extern "C" {
// As `_Matrix` of atlas.ops.host has it
struct Matrix {
    const uint8_t *data, *scale, *zero;
    long data_row, scale_row, zero_row;  // bytes from a row to the next; FP8_BLOCK: of scales
    long n, k;
    long format;
    float factor;  // 1, or what all weights are multiplied by
};
}

// A row of it: where codes, scales and zero points begin, and a scale of all
struct Row {
    const uint8_t *data, *scale, *zero;
    float factor;
};

// BYTES: of the codes of 32 weights; ENDS: a row may end within 32. `row`: the n-th; `at`: a row
// from its c-th 32 weights on; `widen`: the first 32 of what `at` says
template <int B, bool E = false>
struct Format {
    static constexpr int BYTES = B;
    static constexpr bool ENDS = E;
    INLINE Row row(const Matrix& m, long n) {
        return {m.data + n * m.data_row, m.scale + n * m.scale_row, m.zero + n * m.zero_row,
                m.factor};
    }
    INLINE Row at(const Row& r, long c) { return {r.data + c * B, r.scale, r.zero, r.factor}; }
};

struct F32 : Format<128, true> {
    INLINE void widen(const Row& r, f8* w) { memcpy(w, r.data, 128); }
};

struct F16 : Format<64, true> {
    INLINE void widen(const Row& r, f8* w) {
        UNROLL for (int j = 0; j < 4; j++) w[j] = halves(r.data + 16 * j);
    }
};

struct BF16 : Format<64, true> {
    INLINE void widen(const Row& r, f8* w) {
        UNROLL for (int j = 0; j < 4; j++) {
#if defined(__AVX2__)
            __m256i v = _mm256_cvtepu16_epi32(load<__m128i>(r.data + 16 * j));
            w[j] = (f8)_mm256_slli_epi32(v, 16);
#elif defined(NEON)
            uint16x8_t v = load<uint16x8_t>(r.data + 16 * j);
            w[j] = {(f4)vshll_n_u16(vget_low_u16(v), 16), (f4)vshll_high_n_u16(v, 16)};
#else
            i8 v;
            UNROLL for (int i = 0; i < 8; i++) v[i] = load<uint16_t>(r.data + 16 * j + 2 * i) << 16;
            w[j] = (f8)v;
#endif
        }
    }
};

// Bare codes, or with a scale of all: `factor`
struct FP8 : Format<32, true> {
    INLINE void widen(const Row& r, f8* w) {
        f8 s = all(r.factor * 256);
        UNROLL for (int j = 0; j < 4; j++) w[j] = e4m3(r.data + 8 * j) * s;
    }
};

// With a float32 scale of each row
struct FP8_CHANNEL : FP8 {
    INLINE Row row(const Matrix& m, long n) {
        return {m.data + n * m.data_row, nullptr, nullptr, load<float>(m.scale + n * m.scale_row)};
    }
};

// With a float32 scale each 128 rows and columns
struct FP8_BLOCK : Format<32, true> {
    INLINE Row row(const Matrix& m, long n) {
        return {m.data + n * m.data_row, m.scale + n / 128 * m.scale_row, nullptr, 1};
    }
    INLINE Row at(const Row& r, long c) {
        return {r.data + 32 * c, r.scale + c / 4 * 4, r.zero, r.factor};
    }
    INLINE void widen(const Row& r, f8* w) {
        f8 s = all(load<float>(r.scale) * 256);
        UNROLL for (int j = 0; j < 4; j++) w[j] = e4m3(r.data + 8 * j) * s;
    }
};

// An E4M3 scale each 16, times `factor`
struct NVFP4 : Format<16, true> {
    INLINE Row at(const Row& r, long c) {
        return {r.data + 16 * c, r.scale + 2 * c, r.zero, r.factor};
    }
    INLINE void widen(const Row& r, f8* w) {
        uint8_t s[8] = {r.scale[0], r.scale[1]};
        f8 scales = e4m3(s) * all(256) * all(r.factor) * all(.5f);
        bytes16 c[2];
        pairs(load<bytes16>(r.data), c);
        UNROLL for (int i = 0; i < 2; i++) {
            signed_whole(e2m1(c[i]), w + 2 * i);
            w[2 * i] *= all(scales[i]);
            w[2 * i + 1] *= all(scales[i]);
        }
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
        f8 s = all(load<float>(&bits));
        bytes16 c[2];
        pairs(load<bytes16>(r.data), c);
        UNROLL for (int i = 0; i < 2; i++) signed_whole(e2m1(c[i]), w + 2 * i);
        UNROLL for (int j = 0; j < 4; j++) w[j] = w[j] * all(.5f) * s;
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
        UNROLL for (int i = 0; i < 2; i++) whole(c[i], w + 2 * i);
        UNROLL for (int j = 0; j < 4; j++) w[j] = (w[j] - z) * s;
    }
};

// What follows is GGUF's. The low halves of sixteen bytes come first, then the high ones; HIGH: a
// fifth bit of each is in four more bytes
template <bool HIGH>
INLINE void fours(const uint8_t* low, const uint8_t* high, f8* w) {
    UNROLL for (int i = 0; i < 2; i++) {
        i8 b = bytes8(low + 8 * i), c[2] = {b & 15, b >> 4};
        UNROLL for (int j = 0; j < 2; j++) {
            if (HIGH) {
                const i8 place = {1, 2, 4, 8, 16, 32, 64, 128};
                i8 fifth = place & high[2 * j + i];
                c[j] |= (fifth != 0) & 16;
            }
            w[2 * j + i] = numbers(c[j]);
        }
    }
}

// d, m?, fifth bits?, codes
template <bool OFFSET, bool HIGH>
struct Q45 : Format<2 + 2 * OFFSET + 4 * HIGH + 16> {
    INLINE void widen(const Row& r, f8* w) {
        const uint8_t* high = r.data + 2 + 2 * OFFSET;
        fours<HIGH>(high + 4 * HIGH, high, w);
        if (OFFSET) {
            Two s = two_halves(r.data);
            UNROLL for (int j = 0; j < 4; j++) w[j] = w[j] * s.first + s.second;
        } else {
            f8 d = all(half(r.data)), m = all(HIGH ? 16 : 8);
            UNROLL for (int j = 0; j < 4; j++) w[j] = (w[j] - m) * d;
        }
    }
};

struct Q8_0 : Format<34> {
    INLINE void widen(const Row& r, f8* w) {
        f8 d = all(half(r.data));
        UNROLL for (int j = 0; j < 4; j++) w[j] = numbers(signed8(r.data + 2 + 8 * j)) * d;
    }
};

// Blocks of 256: here `data` is that of the block, and `factor` says which 32 of it
template <int BLOCK>
struct KQuant : Format<BLOCK / 8> {
    INLINE Row at(const Row& r, long c) {
        return {r.data + c / 8 * BLOCK, r.scale, r.zero, (float)(c % 8)};
    }
};

// d, dmin, scales and offsets of six bits, fifth bits?, codes
template <bool HIGH>
struct Q45_K : KQuant<HIGH ? 176 : 144> {
    INLINE void widen(const Row& r, f8* w) {
        int i = (int)r.factor;
        const uint8_t *s = r.data + 4, *code = s + 12 + 32 * HIGH + i / 2 * 32;
        int sc = i < 4 ? s[i] & 63 : (s[i + 4] & 15) | (s[i - 4] >> 2 & 48);
        int mn = i < 4 ? s[i + 4] & 63 : s[i + 4] >> 4 | (s[i] >> 2 & 48);
        f8 d = all(half(r.data) * sc), m = all(half(r.data + 2) * mn);
        UNROLL for (int k = 0; k < 2; k++) {
            bytes16 b = load<bytes16>(code + 16 * k);
            b = i % 2 ? b >> 4 : b & all16(15);
            if (HIGH) b |= (load<bytes16>(s + 12 + 16 * k) >> (uint8_t)i & all16(1)) << 4;
            whole(b, w + 2 * k);
        }
        UNROLL for (int j = 0; j < 4; j++) w[j] = w[j] * d - m;
    }
};

// Lower four bits, upper two, scales each 16, d
struct Q6_K : KQuant<210> {
    INLINE void widen(const Row& r, f8* w) {
        int i = (int)r.factor;
        const uint8_t* low = r.data + i / 4 * 64 + i % 2 * 32;
        const uint8_t* high = r.data + 128 + i / 4 * 32;
        float d = half(r.data + 208);
        UNROLL for (int k = 0; k < 2; k++) {
            bytes16 b = load<bytes16>(low + 16 * k);
            b = i % 4 > 1 ? b >> 4 : b & all16(15);
            b |= (load<bytes16>(high + 16 * k) >> (uint8_t)(i % 4 * 2) & all16(3)) << 4;
            signed_whole(b - all16(32), w + 2 * k);
            f8 s = all(d * (int8_t)r.data[192 + 2 * i + k]);
            w[2 * k] *= s;
            w[2 * k + 1] *= s;
        }
    }
};
