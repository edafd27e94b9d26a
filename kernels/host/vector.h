// Eight float32 at a time, and what makes them of stored numbers. Written over
// the compiler's own vectors, which become AVX, NEON or plain loops; where one
// instruction does what takes several of these, it is named. Nothing here rounds
// otherwise than NumPy does, but for `fma`.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__AVX2__)
#include <immintrin.h>
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define NEON
#include <arm_neon.h>
#if !defined(__clang__)
// Loads stay beside what uses them: moved up, they take registers that sums are
// held in
#pragma GCC optimize("no-schedule-insns")
#endif
#endif

#define INLINE static inline __attribute__((always_inline))
// For what holds many sums: among other code the compiler would find no registers
// for all of them
#define APART static __attribute__((noinline))

typedef float f4 __attribute__((vector_size(16)));
typedef uint8_t bytes16 __attribute__((vector_size(16)));
#if defined(NEON)
#include "wide.h"
#else
typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
#endif

template <class T> INLINE T load(const void* p) {
    T v;
    memcpy(&v, p, sizeof v);
    return v;
}

template <class T> INLINE void store(void* p, T v) { memcpy(p, &v, sizeof v); }

#if defined(NEON)
template <> inline __attribute__((always_inline)) f8 load<f8>(const void* p) {
    return {vld1q_f32((const float*)p), vld1q_f32((const float*)p + 4)};
}
INLINE void store(void* p, f8 v) {
    vst1q_f32((float*)p, v.low);
    vst1q_f32((float*)p + 4, v.high);
}
#endif

// Of eight numbers those of `a` where `yes`, else those of `b`
#if defined(NEON)
INLINE f8 where(i8 yes, f8 a, f8 b) {
    return {yes.low ? a.low : b.low, yes.high ? a.high : b.high};
}
#else
INLINE f8 where(i8 yes, f8 a, f8 b) { return yes ? a : b; }
#endif

INLINE f8 all(float v) {
#if defined(NEON)
    return {vdupq_n_f32(v), vdupq_n_f32(v)};
#else
    return f8{v, v, v, v, v, v, v, v};
#endif
}
INLINE bytes16 all16(uint8_t v) {
    return bytes16{v, v, v, v, v, v, v, v, v, v, v, v, v, v, v, v};
}

// Have it in a register, where the compiler would read it from memory at each use
INLINE void keep([[maybe_unused]] f8& v) {
#if defined(__AVX__)
    asm("" : "+x"(v));
#elif defined(NEON)
    asm("" : "+w"(v.low), "+w"(v.high));
#endif
}

// a * b + c, rounded once
INLINE f8 fma(f8 a, f8 b, f8 c) {
#if defined(__FMA__)
    return (f8)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(NEON)
    return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
#else
    for (int i = 0; i < 8; i++)
        c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

// Always in this order
INLINE float sum(f8 v) {
    return ((v[0] + v[4]) + (v[1] + v[5])) + ((v[2] + v[6]) + (v[3] + v[7]));
}

// Those of four, side by side
INLINE void sum4(const f8* v, float* y) {
#if defined(__AVX2__)
    __m128 h[4];
    #pragma GCC unroll 16
    for (int i = 0; i < 4; i++) {
        __m256 a = (__m256)v[i];
        h[i] = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    }
    _mm_storeu_ps(
            y, _mm_hadd_ps(_mm_hadd_ps(h[0], h[1]), _mm_hadd_ps(h[2], h[3])));
#elif defined(NEON)
    f4 h[4];
    #pragma GCC unroll 16
    for (int i = 0; i < 4; i++)
        h[i] = v[i].low + v[i].high;
    vst1q_f32(y, vpaddq_f32(vpaddq_f32(h[0], h[1]), vpaddq_f32(h[2], h[3])));
#else
    for (int i = 0; i < 4; i++)
        y[i] = sum(v[i]);
#endif
}

// One float16
INLINE float half(const uint8_t* p) {
    uint16_t h = load<uint16_t>(p);
#if defined(__F16C__)
    return _cvtsh_ss(h);
#elif defined(NEON)
    return load<__fp16>(&h);
#else
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
    if (!e) {
        float tiny = m * 0x1p-24f;
        return sign ? -tiny : tiny;
    }
    return load<float>(
            &(const uint32_t&)(sign | (e == 31 ? 255 : e + 112) << 23 | m << 13));
#endif
}

// Eight float16
INLINE f8 halves(const void* p) {
#if defined(__F16C__)
    return (f8)_mm256_cvtph_ps(load<__m128i>(p));
#elif defined(NEON)
    float16x8_t h = load<float16x8_t>(p);
    return {vcvt_f32_f16(vget_low_f16(h)), vcvt_high_f32_f16(h)};
#else
    f8 v;
    for (int i = 0; i < 8; i++)
        v[i] = half((const uint8_t*)p + 2 * i);
    return v;
#endif
}

// Sixteen whole numbers of eight bits, without and with a sign
INLINE void whole(bytes16 b, f8* w) {
#if defined(__AVX2__)
    __m128i v = (__m128i)b;
    w[0] = (f8)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(v));
    w[1] = (f8)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(v, 8)));
#elif defined(NEON)
    uint16x8_t h[2] = {vmovl_u8(vget_low_u8(b)), vmovl_high_u8(b)};
    #pragma GCC unroll 16
    for (int i = 0; i < 2; i++)
        w[i] = {vcvtq_f32_u32(vmovl_u16(vget_low_u16(h[i]))),
                vcvtq_f32_u32(vmovl_high_u16(h[i]))};
#else
    for (int i = 0; i < 16; i++)
        w[i / 8][i % 8] = b[i];
#endif
}

INLINE void signed_whole(bytes16 b, f8* w) {
#if defined(__AVX2__)
    __m128i v = (__m128i)b;
    w[0] = (f8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(v));
    w[1] = (f8)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(v, 8)));
#elif defined(NEON)
    int16x8_t h[2] = {
            vmovl_s8(vget_low_s8((int8x16_t)b)), vmovl_high_s8((int8x16_t)b)};
    #pragma GCC unroll 16
    for (int i = 0; i < 2; i++)
        w[i] = {vcvtq_f32_s32(vmovl_s16(vget_low_s16(h[i]))),
                vcvtq_f32_s32(vmovl_high_s16(h[i]))};
#else
    for (int i = 0; i < 16; i++)
        w[i / 8][i % 8] = (int8_t)b[i];
#endif
}

// Eight bytes as whole numbers, without and with a sign
INLINE i8 bytes8(const void* p) {
#if defined(__AVX2__)
    return (i8)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#elif defined(NEON)
    uint16x8_t v = vmovl_u8(vld1_u8((const uint8_t*)p));
    return (i8)Wide{vmovl_u16(vget_low_u16(v)), vmovl_high_u16(v)};
#else
    i8 v;
    for (int i = 0; i < 8; i++)
        v[i] = ((const uint8_t*)p)[i];
    return v;
#endif
}
INLINE i8 signed8(const void* p) {
#if defined(__AVX2__)
    return (i8)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
#elif defined(NEON)
    int16x8_t v = vmovl_s8(vld1_s8((const int8_t*)p));
    return {vmovl_s16(vget_low_s16(v)), vmovl_high_s16(v)};
#else
    i8 v;
    for (int i = 0; i < 8; i++)
        v[i] = ((const int8_t*)p)[i];
    return v;
#endif
}
INLINE f8 numbers(i8 v) {
#if defined(__AVX2__)
    return (f8)_mm256_cvtepi32_ps((__m256i)v);
#elif defined(NEON)
    return {vcvtq_f32_s32(v.low), vcvtq_f32_s32(v.high)};
#else
    return __builtin_convertvector(v, f8);
#endif
}

// Two float16 that stand side by side, each eight times
struct Two {
    f8 first, second;
};
INLINE Two two_halves(const uint8_t* p) {
#if defined(__F16C__)
    __m128 v = _mm_cvtph_ps(_mm_cvtsi32_si128(load<int32_t>(p)));
    return {(f8)_mm256_broadcastss_ps(v),
            (f8)_mm256_broadcastss_ps(_mm_movehdup_ps(v))};
#else
    return {all(half(p)), all(half(p + 2))};
#endif
}

// Sixteen E4M3, less a factor of 256: float16 with their bits, whose exponents
// count from elsewhere
INLINE void e4m3(bytes16 b, f8* w) {
#if defined(__F16C__)
    __m128i v = (__m128i)b, zero = _mm_setzero_si128(),
            bits = _mm_set1_epi16((short)0xbf80);
    __m128i h[2] = {_mm_unpacklo_epi8(zero, v), _mm_unpackhi_epi8(zero, v)};
    #pragma GCC unroll 16
    for (int i = 0; i < 2; i++)
        w[i] = (f8)_mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(h[i], 1), bits));
#elif defined(NEON)
    int16x8_t bits = vdupq_n_s16((int16_t)0xbf80);
    int16x8_t h[2] = {(int16x8_t)vzip1q_u8(vdupq_n_u8(0), b),
            (int16x8_t)vzip2q_u8(vdupq_n_u8(0), b)};
    #pragma GCC unroll 16
    for (int i = 0; i < 2; i++) {
        h[i] = vshrq_n_s16(h[i], 1) & bits;
        w[i] = halves(h + i);
    }
#else
    uint16_t h[16];
    for (int i = 0; i < 16; i++)
        h[i] = (b[i] & 0x80) << 8 | (b[i] & 0x7f) << 7;
    #pragma GCC unroll 16
    for (int i = 0; i < 2; i++)
        w[i] = halves(h + 8 * i);
#endif
}

// Two E4M3 that stand side by side, halved and times a factor, each eight times
INLINE Two two_e4m3(const uint8_t* p, float factor) {
#if defined(__F16C__)
    __m128i h = _mm_unpacklo_epi8(
            _mm_setzero_si128(), _mm_cvtsi32_si128(load<uint16_t>(p)));
    h = _mm_and_si128(_mm_srai_epi16(h, 1), _mm_set1_epi16((short)0xbf80));
    __m128 v = _mm_mul_ps(_mm_cvtph_ps(h), _mm_set1_ps(256));
    v = _mm_mul_ps(_mm_mul_ps(v, _mm_set1_ps(factor)), _mm_set1_ps(.5f));
    return {(f8)_mm256_broadcastss_ps(v),
            (f8)_mm256_broadcastss_ps(_mm_movehdup_ps(v))};
#else
    f8 v[2];
    uint8_t b[16] = {p[0], p[1]};
    e4m3(load<bytes16>(b), v);
    v[0] = v[0] * all(256) * all(factor) * all(.5f);
    return {all(v[0][0]), all(v[0][1])};
#endif
}

// Two times E2M1 of each code
INLINE bytes16 e2m1(bytes16 code) {
    const bytes16 table = {
            0, 1, 2, 3, 4, 6, 8, 12, 0, 255, 254, 253, 252, 250, 248, 244};
#if defined(__AVX2__)
    return (bytes16)_mm_shuffle_epi8((__m128i)table, (__m128i)code);
#elif defined(NEON)
    return (bytes16)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)code);
#else
    bytes16 v;
    for (int i = 0; i < 16; i++)
        v[i] = table[code[i]];
    return v;
#endif
}

// Sixteen bytes as 32 codes of four bits: those in the low halves are even, or
// come first
INLINE void pairs(bytes16 b, bytes16* c) {
    bytes16 lo = b & all16(15), hi = b >> 4;
    c[0] = __builtin_shufflevector(
            lo, hi, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    c[1] = __builtin_shufflevector(
            lo, hi, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

// Sixteen bytes, shifted to the right by pairs: of each byte the lower 8-n bits
// are its own
INLINE bytes16 shifted(const uint8_t* p, int n) {
    typedef uint16_t shorts __attribute__((vector_size(16)));
    return (bytes16)(load<shorts>(p) >> (uint16_t)n);
}

// Sixteen bits, each as a byte of all or none
INLINE bytes16 bits16(const uint8_t* p) {
    const bytes16 place = {
            1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    typedef uint16_t shorts __attribute__((vector_size(16)));
    uint16_t two = load<uint16_t>(p);
    bytes16 b = (bytes16)shorts{two, two, two, two, two, two, two, two};
    b = __builtin_shufflevector(
            b, b, 0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1);
    return (bytes16)((b & place) == place);
}
