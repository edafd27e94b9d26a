#pragma once
// What a norm multiplies a row by: one over the root of its mean square, by a block of 256 threads. `wide`: may 16 bytes be read at a time? The order of the sum depends on that and on `size` alone.
#include "lib/reduce.cuh"

__device__ __forceinline__ float rms_inverse(const float* x, int size, bool wide, float eps) {
    const int n4 = wide ? size / 4 : 0;
    float s = 0.f;
    for (int i = threadIdx.x; i < n4; i += 256) {
        const float4 v = ((const float4*)x)[i];
        s = fmaf(v.x, v.x, s); s = fmaf(v.y, v.y, s); s = fmaf(v.z, v.z, s); s = fmaf(v.w, v.w, s);
    }
    for (int i = n4 * 4 + threadIdx.x; i < size; i += 256) s = fmaf(x[i], x[i], s);
    return 1.f / sqrtf(block_sum(s) / size + eps);
}
