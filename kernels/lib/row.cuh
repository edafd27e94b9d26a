#pragma once
// A row of n numbers that a block of THREADS holds in registers, PER fours a thread; 4 divides n,
// which is at most 4 * PER * THREADS.
#include "lib/reduce.cuh"
#ifndef PER
#define PER 2
#endif
#ifndef THREADS
#define THREADS 352
#endif

struct Row {
    float4 v[PER];
    __device__ __forceinline__ void load(const float* p, int n) {
        #pragma unroll
        for (int i = 0; i < PER; i++) {
            const int at = i * THREADS + threadIdx.x;
            v[i] = 4 * at < n ? ((const float4*)p)[at]
                              : make_float4(0.f, 0.f, 0.f, 0.f);
        }
    }
    __device__ __forceinline__ void store(float* p, int n) const {
        #pragma unroll
        for (int i = 0; i < PER; i++) {
            const int at = i * THREADS + threadIdx.x;
            if (4 * at < n)
                ((float4*)p)[at] = v[i];
        }
    }
    __device__ __forceinline__ float& at(int i) { return (&v[i / 4].x)[i % 4]; }
    __device__ __forceinline__ float squares() const {
        float s = 0.f;
        #pragma unroll
        for (int i = 0; i < PER; i++)
            s = fmaf(
                    v[i].w, v[i].w,
                    fmaf(v[i].z, v[i].z,
                            fmaf(v[i].y, v[i].y, fmaf(v[i].x, v[i].x, s))));
        return s;
    }
};

// The sums of N values over a block, by one barrier; `part` is shared memory that nothing else
// uses.
template <int N>
__device__ __forceinline__ void row_sums(float (&s)[N], float (*part)[32]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    #pragma unroll
    for (int j = 0; j < N; j++) {
        s[j] = warp_sum(s[j]);
        if (!lane)
            part[j][warp] = s[j];
        if (!warp && lane >= THREADS / 32)
            part[j][lane] = 0.f;
    }
    __syncthreads();
    #pragma unroll
    for (int j = 0; j < N; j++) {
        float4 t = make_float4(0.f, 0.f, 0.f, 0.f);
        #pragma unroll
        for (int i = 0; i < (THREADS / 32 + 3) / 4; i++) {
            const float4 q = ((const float4*)part[j])[i];
            t.x += q.x;
            t.y += q.y;
            t.z += q.z;
            t.w += q.w;
        }
        s[j] = (t.x + t.y) + (t.z + t.w);
    }
}
