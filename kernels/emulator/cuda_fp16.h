#pragma once
// Half precision for emulate.h: values are computed in wider types and rounded to
// nearest even once.
inline uint16_t emu_to_half(double d) {
    const uint64_t u = emu_bits<uint64_t>(d);
    const uint64_t m = u & ~(1ull << 63);
    const unsigned s = u >> 48 & 0x8000;
    if (m > 0x7FFull << 52)
        return s | 0x7FFF;
    if (m >= 1023ull + 16 << 52)
        return s | 0x7C00;                               // 65536 and more
    if (m < 1023ull - 14 << 52) {  // subnormal: multiples of 2^-24
        // 2^52: what is added to it loses its fraction
        const double whole = 4503599627370496.;
        return s | (unsigned)(emu_bits<double>(m) * 16777216. + whole - whole);
    }
    // What overflows is an infinity
    const uint64_t even = m + (1ull << 41) - 1 + (m >> 42 & 1);
    return s | (unsigned)((even >> 42) - (1023 - 15 << 10));
}
inline float emu_from_half(uint16_t h) {
    const unsigned s = (h & 0x8000u) << 16, m = h & 0x7FFF;
    if (m < 0x400)
        return emu_bits<float>(
                s | emu_bits<unsigned>(m * 5.9604644775390625e-08f));
    if (m >= 0x7C00)
        return emu_bits<float>(s | (m > 0x7C00 ? 0x7FC00000 : 0x7F800000));
    return emu_bits<float>(s | (m << 13) + (127 - 15 << 23));
}
struct alignas(2) __half {
    uint16_t u;
    __half() = default;
    __half(float f) : u(emu_to_half(f)) {}
    __half(double f) : u(emu_to_half(f)) {}
    __half(int f) : u(emu_to_half(f)) {}
    operator float() const { return emu_from_half(u); }
};
struct alignas(4) __half2 {
    __half x, y;
    __half2() = default;
    __half2(__half a, __half b) : x(a), y(b) {}
};
typedef __half half;
typedef __half2 half2;
inline __half emu_h(double v) {
    __half h;
    h.u = emu_to_half(v);
    return h;
}
inline double emu_d(__half h) { return emu_from_half(h.u); }
inline __half __float2half(float f) { return emu_h(f); }
inline __half __float2half_rn(float f) { return emu_h(f); }
inline float __half2float(__half h) { return emu_from_half(h.u); }
inline __half __ushort_as_half(unsigned short u) {
    __half h;
    h.u = u;
    return h;
}
inline unsigned short __half_as_ushort(__half h) { return h.u; }
inline __half __hadd(__half a, __half b) { return emu_h(emu_d(a) + emu_d(b)); }
inline __half __hsub(__half a, __half b) { return emu_h(emu_d(a) - emu_d(b)); }
inline __half __hmul(__half a, __half b) { return emu_h(emu_d(a) * emu_d(b)); }
inline __half __hfma(__half a, __half b, __half c) {
    return emu_h(emu_d(a) * emu_d(b) + emu_d(c));
}
inline __half __hmax(__half a, __half b) { return emu_d(a) > emu_d(b) ? a : b; }
inline __half __hmin(__half a, __half b) { return emu_d(a) < emu_d(b) ? a : b; }
inline __half __habs(__half a) {
    a.u &= 0x7FFF;
    return a;
}
inline __half __hneg(__half a) {
    a.u ^= 0x8000;
    return a;
}
inline __half2 __floats2half2_rn(float a, float b) {
    return {emu_h(a), emu_h(b)};
}
inline __half2 __float22half2_rn(float2 a) { return {emu_h(a.x), emu_h(a.y)}; }
inline __half2 __float2half2_rn(float a) { return {emu_h(a), emu_h(a)}; }
inline __half2 __half2half2(__half a) { return {a, a}; }
inline __half2 __halves2half2(__half a, __half b) { return {a, b}; }
inline __half2 make_half2(__half a, __half b) { return {a, b}; }
inline float2 __half22float2(__half2 h) {
    return {__half2float(h.x), __half2float(h.y)};
}
inline float __low2float(__half2 h) { return __half2float(h.x); }
inline float __high2float(__half2 h) { return __half2float(h.y); }
inline __half __low2half(__half2 h) { return h.x; }
inline __half __high2half(__half2 h) { return h.y; }
inline __half2 __hadd2(__half2 a, __half2 b) {
    return {__hadd(a.x, b.x), __hadd(a.y, b.y)};
}
inline __half2 __hsub2(__half2 a, __half2 b) {
    return {__hsub(a.x, b.x), __hsub(a.y, b.y)};
}
inline __half2 __hmul2(__half2 a, __half2 b) {
    return {__hmul(a.x, b.x), __hmul(a.y, b.y)};
}
inline __half2 __hadd2_rn(__half2 a, __half2 b) { return __hadd2(a, b); }
inline __half2 __hmul2_rn(__half2 a, __half2 b) { return __hmul2(a, b); }
inline __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
inline __half2 __hmax2(__half2 a, __half2 b) {
    return {__hmax(a.x, b.x), __hmax(a.y, b.y)};
}
inline __half2 __hmin2(__half2 a, __half2 b) {
    return {__hmin(a.x, b.x), __hmin(a.y, b.y)};
}
inline __half2 __habs2(__half2 a) { return {__habs(a.x), __habs(a.y)}; }
inline __half2 __hneg2(__half2 a) { return {__hneg(a.x), __hneg(a.y)}; }
