#pragma once
// A row that a block of 256 threads norms: what it is to be multiplied by is one over the root of
// its mean square. `wide`: may 16 bytes be read at a time? The order of the sum depends on that and
// on `size` alone.
#include "lib/reduce.cuh"

// The first so many sixteens of bytes of a thread stay in registers; later ones are read again, out
// of the L1 cache.
struct NormRow {
    static constexpr int HELD = 8;
    const float* x;
    int n4;
    float4 v[HELD];
    // which 16 bytes of the row a thread's j-th are
    static __device__ __forceinline__ int at(int j) {
        return threadIdx.x + 256 * j;
    }
    __device__ __forceinline__ float inverse(
            const float* x_, int size, bool wide, float eps) {
        x = x_;
        n4 = wide ? size / 4 : 0;
        #pragma unroll
        for (int j = 0; j < HELD; j++)
            v[j] = at(j) < n4 ? ((const float4*)x)[at(j)]
                              : make_float4(0.f, 0.f, 0.f, 0.f);
        float s = 0.f;
        auto add = [&](float4 a) {
            s = fmaf(a.x, a.x, s);
            s = fmaf(a.y, a.y, s);
            s = fmaf(a.z, a.z, s);
            s = fmaf(a.w, a.w, s);
        };
        #pragma unroll
        for (int j = 0; j < HELD; j++)
            if (at(j) < n4)
                add(v[j]);
        for (int j = HELD; at(j) < n4; j++)
            add(((const float4*)x)[at(j)]);
        for (int i = n4 * 4 + threadIdx.x; i < size; i += 256)
            s = fmaf(x[i], x[i], s);
        return 1.f / sqrtf(block_sum(s) / size + eps);
    }
    // f(i, v) for the i-th 16 bytes of the row, v
    template <class F> __device__ __forceinline__ void each(F f) const {
        #pragma unroll
        for (int j = 0; j < HELD; j++)
            if (at(j) < n4)
                f(at(j), v[j]);
        for (int j = HELD; at(j) < n4; j++)
            f(at(j), ((const float4*)x)[at(j)]);
    }
};
