#pragma once
// Numbers of eight and four bits.

// Nearest e4m3, ties to even, saturating at 448; NaN stays NaN.
__device__ __forceinline__ unsigned to_e4m3(float v) {
    const unsigned u = __float_as_uint(v);
    const unsigned sign = u >> 24 & 0x80;
    const unsigned a = u & 0x7FFFFFFFu;
    if (a > 0x7F800000u)
        return 0x7F;
    if (a < 0x3C800000u)  // below 2^-6: multiples of 2^-9
        return sign | (unsigned)__float2int_rn(__uint_as_float(a) * 512.f);
    const unsigned near = (a + 0x7FFFF + (a >> 20 & 1)) / (1u << 20);
    return sign | min(near - (120u << 3), 0x7Eu);
}
__device__ __forceinline__ float of_e4m3(unsigned c) {
    // 2^120
    return __uint_as_float((c & 0x80) << 24 | (c & 0x7F) << 20)
            * 1.329227995784916e36f;
}
// Nearest e2m1, ties to even, saturating at 6.
__device__ __forceinline__ unsigned to_e2m1(float v) {
    const float a = fabsf(v);
    const bool low = a > .25f;
    const bool one = a >= .75f;
    const bool more = a > 1.25f;
    const bool two = a >= 1.75f;
    const bool three = a > 2.5f, four = a >= 3.5f, six = a > 5.f;
    return (unsigned)(low + one + more + two + three + four + six)
            | (v < 0.f ? 8u : 0u);
}
