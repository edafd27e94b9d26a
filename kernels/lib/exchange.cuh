#pragma once
// Numbers that one block of a grid gives to all others while all are running. Each word says for itself whether it is there: it is EMPTY until it is
// written, once. So there is no barrier and no flag, and giving and taking cost one way through L2. Whoever takes waits, so all blocks of the grid must
// run at the same time; and the words must be EMPTY again before the next launch that uses them: two sets of words take turns, and a launch empties
// the set that it does not use.
#define EMPTY 0xFFFFFFFFu

__device__ __forceinline__ void give(float* p, float v) {
    if (__float_as_uint(v) == EMPTY) v = __uint_as_float(0x7FFFFFFFu);  // a NaN like any other
#if defined(__CUDA_ARCH__)
    asm volatile("st.relaxed.gpu.global.f32 [%0], %1;" :: "l"(p), "f"(v) : "memory");
#else
    *p = v;
#endif
}
__device__ __forceinline__ bool there(float v) { return __float_as_uint(v) != EMPTY; }
__device__ __forceinline__ float peek1(const float* p) {
#if defined(__CUDA_ARCH__)
    float v;
    asm volatile("ld.relaxed.gpu.global.f32 %0, [%1];" : "=f"(v) : "l"(p) : "memory");
    return v;
#else
    return *p;
#endif
}
__device__ __forceinline__ float4 peek4(const float* p) {
#if defined(__CUDA_ARCH__)
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
    return v;
#else
    return *(const float4*)p;
#endif
}

// v[i], i < COUNT: the four words at `first` + i*`step`; from `limit` on there are none, and zeros instead. And the word at `p1`, if any.
// WAIT: until all are there.
template <int COUNT, bool WAIT> __device__ __forceinline__ void gather4(float4* v, const float* p, int first, int step, int limit, const float* p1 = 0, float* v1 = 0) {
    bool all;
    do {
        all = true;
        #pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int at = first + i * step;
            v[i] = at < limit ? WAIT ? peek4(p + at) : *(const float4*)(p + at) : make_float4(0.f, 0.f, 0.f, 0.f);
        }
        if (p1) *v1 = WAIT ? peek1(p1) : *p1;
        #pragma unroll
        for (int i = 0; i < COUNT; i++) {
            const int left = limit - first - i * step;
            if (left < 4) v[i].w = 0.f;
            if (left < 3) v[i].z = 0.f;
            if (left < 2) v[i].y = 0.f;
            if (WAIT) all = all && there(v[i].x) && there(v[i].y) && there(v[i].z) && there(v[i].w);
        }
        if (WAIT && p1) all = all && there(*v1);
#if !defined(__CUDA_ARCH__)
        if (WAIT && !all) __nanosleep(0);
#endif
    } while (WAIT && !all);
}
