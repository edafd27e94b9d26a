#pragma once
// A row of bf16 weights times a float32 activation, a warp to a row, all in float32: for the few matrices that are never quantised.
#include "lib/reduce.cuh"

// Weights of one row in registers. FOLD: already multiplied by the norm's gain, which saves fetching it later and costs twice the
// registers; otherwise as they are stored. N % 256 == 0.
template <int N, bool FOLD> struct Bf16Row {
    uint4 raw[N / 256];
    float w[FOLD ? N / 32 : 1];
    __device__ __forceinline__ float2 pair(int p, int j) const {
        const unsigned u = (&raw[p].x)[j];
        return make_float2(__uint_as_float(u << 16), __uint_as_float(u & 0xFFFF0000u));
    }
    __device__ __forceinline__ void load(const unsigned short* __restrict__ row, const float* __restrict__ gain, int lane) {
        #pragma unroll
        for (int p = 0; p < N / 256; p++) raw[p] = __ldcs((const uint4*)row + p * 32 + lane);
        if (FOLD)
            #pragma unroll
            for (int i = 0; i < N / 64; i++) {
                const float2 u = pair(i / 4, i % 4), g = *(const float2*)(gain + (i / 4 * 32 + lane) * 8 + i % 4 * 2);
                w[2 * i] = u.x * g.x;
                w[2 * i + 1] = u.y * g.y;
            }
    }
    // Dot product with x, or with rmsnorm(x, gain) where there is a gain; every lane gets it.
    __device__ __forceinline__ float dot(const float* x, const float* __restrict__ gain, float eps, int lane) const {
        float a = 0.f, s = 0.f;
        #pragma unroll
        for (int i = 0; i < N / 128; i++) {
            const int at = (i / 2 * 32 + lane) * 8 + i % 2 * 4;
            const float4 v = *(const float4*)(x + at);
            float u[4];
            if (FOLD) {
                #pragma unroll
                for (int j = 0; j < 4; j++) u[j] = w[4 * i + j];
            } else {
                const float4 g = gain ? *(const float4*)(gain + at) : make_float4(1.f, 1.f, 1.f, 1.f);
                const float2 b = pair(i / 2, i % 2 * 2), c = pair(i / 2, i % 2 * 2 + 1);
                u[0] = b.x * g.x; u[1] = b.y * g.y; u[2] = c.x * g.z; u[3] = c.y * g.w;
            }
            a = fmaf(v.x, u[0], a); a = fmaf(v.y, u[1], a); a = fmaf(v.z, u[2], a); a = fmaf(v.w, u[3], a);
            s = fmaf(v.x, v.x, s); s = fmaf(v.y, v.y, s); s = fmaf(v.z, v.z, s); s = fmaf(v.w, v.w, s);
        }
        a = warp_sum(a);
        return gain ? __fmul_rn(a, rsqrtf(fmaf(warp_sum(s), 1.f / N, eps))) : a;
    }
};
