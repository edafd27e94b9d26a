#pragma once
// Activations on their way to fp16: float32 values, 32 at a time, times the power of two that
// brings the largest magnitude into [2^14, 2^15).
#include <cuda_fp16.h>

// For a chunk with largest magnitude `top`: the power of two to multiply by, and its inverse.
// Exact, and finite for any `top`.
__device__ __forceinline__ float2 chunk_scale(float top) {
    const unsigned e = max(__float_as_uint(top) >> 23, 15u);
    return make_float2(
            __uint_as_float((268u - e) << 23), __uint_as_float((e - 14u) << 23));
}
__device__ __forceinline__ float top8(const float* v) {
    float m = fabsf(v[0]);
    #pragma unroll
    for (int i = 1; i < 8; i++)
        m = fmaxf(m, fabsf(v[i]));
    return m;
}
__device__ __forceinline__ uint4 to_half8(const float* v, float s) {
    uint4 r;
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const __half2 h = __floats2half2_rn(v[2 * i] * s, v[2 * i + 1] * s);
        (&r.x)[i] = *reinterpret_cast<const unsigned*>(&h);
    }
    return r;
}
// The same in the order 0 2 1 3 4 6 5 7.
__device__ __forceinline__ uint4 to_half8_crossed(const float* v, float s) {
    const float u[8] = {v[0], v[2], v[1], v[3], v[4], v[6], v[5], v[7]};
    return to_half8(u, s);
}
__device__ __forceinline__ void load8(const float* p, float* v) {
    *(float4*)v = *(const float4*)p;
    *(float4*)(v + 4) = *(const float4*)(p + 4);
}
