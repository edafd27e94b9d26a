#pragma once
// bfloat16 for emulate.h.
inline uint16_t emu_to_bf16(float f) {
    const unsigned u = emu_bits<unsigned>(f);
    if ((u & 0x7FFFFFFF) > 0x7F800000)
        return u >> 16 | 0x40;
    return (u + 0x7FFF + (u >> 16 & 1)) >> 16;
}
struct alignas(2) __nv_bfloat16 {
    uint16_t u;
    __nv_bfloat16() = default;
    __nv_bfloat16(float f) : u(emu_to_bf16(f)) {}
    operator float() const { return emu_bits<float>((unsigned)u << 16); }
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
inline __nv_bfloat16 __float2bfloat16(float f) { return f; }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return f; }
inline float __bfloat162float(__nv_bfloat16 b) { return b; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) {
    __nv_bfloat16 b;
    b.u = u;
    return b;
}
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 b) { return b.u; }
inline __nv_bfloat162 __floats2bfloat162_rn(float a, float b) { return {a, b}; }
inline __nv_bfloat162 __float22bfloat162_rn(float2 a) { return {a.x, a.y}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 a, __nv_bfloat16 b) {
    return {a, b};
}
inline float2 __bfloat1622float2(__nv_bfloat162 b) {
    return {(float)b.x, (float)b.y};
}
inline float __low2float(__nv_bfloat162 b) { return b.x; }
inline float __high2float(__nv_bfloat162 b) { return b.y; }
