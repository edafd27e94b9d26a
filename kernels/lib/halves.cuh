#pragma once
// Queries, keys and values as fp16, for attention of many rows.
#include <cuda_fp16.h>

// What fp16 cannot hold becomes its largest; NaN stays.
__device__ __forceinline__ unsigned half_pair(float a, float b) {
    const __half2 h = __floats2half2_rn(
            fabsf(a) > 65504.f ? copysignf(65504.f, a) : a,
            fabsf(b) > 65504.f ? copysignf(65504.f, b) : b);
    return *reinterpret_cast<const unsigned*>(&h);
}
// Two numbers of a cache's row (lib/kvcache.cuh), times its scale if the format has one.
template <int F>
__device__ __forceinline__ unsigned kv_halves(unsigned v, float scale) {
    if (F >= 3)
        return v;
    const float a = __uint_as_float(v << 16),
                b = __uint_as_float(v & 0xFFFF0000u);
    return F ? half_pair(a * scale, b * scale) : half_pair(a, b);
}
template <int F>
__device__ __forceinline__ uint4 kv_halves(uint4 v, float scale) {
    return make_uint4(
            kv_halves<F>(v.x, scale), kv_halves<F>(v.y, scale),
            kv_halves<F>(v.z, scale), kv_halves<F>(v.w, scale));
}
// 2^x in one instruction; below 2^-126 it is 0.
__device__ __forceinline__ float power2(float x) {
#if defined(__CUDA_ARCH__)
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
#else
    return exp2f(x);
#endif
}
