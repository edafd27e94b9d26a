#pragma once
// What blocks of a launch give one another while all are running: float32 words that say for
// themselves whether they are there. Each is EMPTY until it is written, once; so there is no
// barrier and no flag, and giving and taking cost one way through L2. Whoever takes asks until it
// is there.
#define EMPTY 0xFFFFFFFFu
__device__ __forceinline__ bool there(float v) {
    return __float_as_uint(v) != EMPTY;
}
__device__ __forceinline__ float4 peek4(const float* p) {
#if defined(__CUDA_ARCH__)
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];"
            : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
            : "l"(p)
            : "memory");
    return v;
#else
    return *(const float4*)p;
#endif
}
// Of a piece of 256 words lanes ask for four that lie together from each half, so that no sector
// of the L2 cache is asked for twice. Here they exchange some: each has eight that lie together
// then. Which eight of the piece; lanes of one parity have those of a half.
__device__ __forceinline__ int eight_of(float* a, int lane) {
    const bool odd = lane % 2;
    #pragma unroll
    for (int j = 0; j < 4; j++) {
        const float got = __shfl_xor_sync(~0u, odd ? a[j] : a[4 + j], 1);
        a[j] = odd ? got : a[j];
        a[4 + j] = odd ? a[4 + j] : got;
    }
    return odd * 16 + lane / 2;
}
// EMPTY is a NaN; another is given in its place.
__device__ __forceinline__ float given(float v) {
    return __float_as_uint(v) == EMPTY ? __uint_as_float(0x7FFFFFFFu) : v;
}
__device__ __forceinline__ void give4(float* p, float4 v) {
    v = make_float4(given(v.x), given(v.y), given(v.z), given(v.w));
#if defined(__CUDA_ARCH__)
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(p),
            "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
            : "memory");
#else
    *(float4*)p = v;
#endif
}
__device__ __forceinline__ void give2(float* p, float2 v) {
    v = make_float2(given(v.x), given(v.y));
#if defined(__CUDA_ARCH__)
    asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1,%2};" ::"l"(p), "f"(v.x),
            "f"(v.y)
            : "memory");
#else
    *(float2*)p = v;
#endif
}
__device__ __forceinline__ float2 peek2(const float* p) {
#if defined(__CUDA_ARCH__)
    float2 v;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0,%1}, [%2];"
            : "=f"(v.x), "=f"(v.y)
            : "l"(p)
            : "memory");
    return v;
#else
    return *(const float2*)p;
#endif
}
__device__ __forceinline__ float peek(const float* p) {
#if defined(__CUDA_ARCH__)
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];"
            : "=f"(v)
            : "l"(p)
            : "memory");
    return v;
#else
    return *p;
#endif
}
__device__ __forceinline__ void emptied(float* p, int words) {
    const float e = __uint_as_float(EMPTY);
    if (words == 4)
        *(float4*)p = make_float4(e, e, e, e);
    else
        *(float2*)p = make_float2(e, e);
}
__device__ __forceinline__ void give(float* p, float v) {
    v = given(v);
#if defined(__CUDA_ARCH__)
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" ::"l"(p), "f"(v)
            : "memory");
#else
    *p = v;
#endif
}
