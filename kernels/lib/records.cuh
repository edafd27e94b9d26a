#pragma once
// What the blocks of a row's pieces give one another while all are running: a record of twelve words for eight elements of a head: the weighted values, the
// piece's largest score and its sum of weights. Each word says for itself whether it is there: it is EMPTY until it is written, once. So there is no barrier
// and no flag, and giving and taking cost one way through L2. Whoever takes waits, so all blocks must run at the same time, and empties what it has taken.
#include "lib/pieces.cuh"
#define EMPTY 0xFFFFFFFFu
constexpr int RECORD = 12;

__device__ __forceinline__ bool there(float v) { return __float_as_uint(v) != EMPTY; }
__device__ __forceinline__ float4 peek4(const float* p) {
#if defined(__CUDA_ARCH__)
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
    return v;
#else
    return *(const float4*)p;
#endif
}
// EMPTY is a NaN; another is given in its place.
__device__ __forceinline__ float given(float v) { return __float_as_uint(v) == EMPTY ? __uint_as_float(0x7FFFFFFFu) : v; }
__device__ __forceinline__ void give4(float* p, float4 v) {
    v = make_float4(given(v.x), given(v.y), given(v.z), given(v.w));
#if defined(__CUDA_ARCH__)
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1,%2,%3,%4};" :: "l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
#else
    *(float4*)p = v;
#endif
}
__device__ __forceinline__ void give2(float* p, float2 v) {
    v = make_float2(given(v.x), given(v.y));
#if defined(__CUDA_ARCH__)
    asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1,%2};" :: "l"(p), "f"(v.x), "f"(v.y) : "memory");
#else
    *(float2*)p = v;
#endif
}
__device__ __forceinline__ float2 peek2(const float* p) {
#if defined(__CUDA_ARCH__)
    float2 v;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
    return v;
#else
    return *(const float2*)p;
#endif
}
__device__ __forceinline__ void emptied(float* p, int words) {
    const float e = __uint_as_float(EMPTY);
    if (words == 4) *(float4*)p = make_float4(e, e, e, e);
    else            *(float2*)p = make_float2(e, e);
}

// Four elements of a row from the records of its pieces, at most eight, added as attn_merge.cu does it, bit for bit. `p`: where the four are in the first
// piece's record, `odd`: are they the later half of its eight? Pieces are `step` words apart. Waits until the records are there, and empties them.
__device__ __forceinline__ float4 merged(float* p, int odd, size_t step, int count, float sink) {
    float2 w[8];
    float4 x[8], v = make_float4(0.f, 0.f, 0.f, 0.f);
    bool ready;
    do {
        ready = true;
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            w[i] = i < count ? peek2(p + i * step + 8 - 4 * odd) : make_float2(NONE, 0.f);
            x[i] = i < count ? peek4(p + i * step) : v;
        }
        #pragma unroll
        for (int i = 0; i < 8; i++) ready = ready && there(w[i].x) && there(w[i].y) && there(x[i].x) && there(x[i].y) && there(x[i].z) && there(x[i].w);
#if !defined(__CUDA_ARCH__)
        if (!ready) __nanosleep(0);
#endif
    } while (!ready);
    float base = sink;
    #pragma unroll
    for (int i = 0; i < 8; i++) base = fmaxf(base, w[i].x);
    if (base == NONE) base = 0.f;  // nothing but NaN
    float all = exp2f(__fsub_rn(sink, base));
    #pragma unroll
    for (int i = 0; i < 8; i++) {
        const float e = exp2f(__fsub_rn(w[i].x, base));
        all = fmaf(e, w[i].y, all); v.x = fmaf(e, x[i].x, v.x); v.y = fmaf(e, x[i].y, v.y); v.z = fmaf(e, x[i].z, v.z); v.w = fmaf(e, x[i].w, v.w);
    }
    __syncwarp();  // two lanes read a piece's words
    #pragma unroll
    for (int i = 0; i < 8; i++) if (i < count) { emptied(p + i * step, 4); if (!odd) emptied(p + i * step + 8, 2); }
    return make_float4((v.x + 0.f) / all, (v.y + 0.f) / all, (v.z + 0.f) / all, (v.w + 0.f) / all);
}
