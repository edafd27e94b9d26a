#pragma once
// A row of float32 activations, times a norm's gain if there is one, read once: SHARE warps share
// it, each thread holds four numbers of every 128*SHARE. Later ones than those are read again.
#include "lib/reduce.cuh"

template <int SHARE, int MOST = 4> struct HeldRow {
    static constexpr int STEP = 128 * SHARE;
    const float *row, *gain;
    int n, first;
    float4 v[MOST];
    float sum;     // of squares, without the gain
    // bits of the largest magnitude; those of a NaN or an infinity are larger than any
    unsigned top;

    // Numbers i to i+3, zeros beyond the end.
    __device__ __forceinline__ float4 at(const float* p, int i) const {
        float4 q = make_float4(0.f, 0.f, 0.f, 0.f);
        if (n % 4 == 0) {
            if (i < n)
                q = *(const float4*)(p + i);
        } else
            for (int j = 0; j < 4; j++)
                if (i + j < n)
                    (&q.x)[j] = p[i + j];
        return q;
    }
    __device__ __forceinline__ void times(float4& q, const float4& f) const {
        q = make_float4(q.x * f.x, q.y * f.y, q.z * f.z, q.w * f.w);
    }
    __device__ __forceinline__ void see(float4& q, const float4& f) {
        sum += fmaf(q.x, q.x, fmaf(q.y, q.y, fmaf(q.z, q.z, q.w * q.w)));
        if (gain)
            times(q, f);
        #pragma unroll
        for (int j = 0; j < 4; j++)
            top = max(top, __float_as_uint((&q.x)[j]) & 0x7FFFFFFFu);
    }
    // All of it; every thread of the block comes here. Its warps stand side by side in a block of
    // eight.
    __device__ __forceinline__ void read(
            const float* x, const float* g, int size) {
        row = x;
        gain = g;
        n = size;
        first = threadIdx.x % (32 * SHARE) * 4;
        sum = 0.f;
        top = 0;
        float4 f[MOST];
        #pragma unroll
        for (int j = 0; j < MOST; j++) {
            v[j] = at(row, first + j * STEP);
            if (gain)
                f[j] = at(gain, first + j * STEP);
        }
        #pragma unroll
        for (int j = 0; j < MOST; j++)
            see(v[j], f[j]);
        for (int i = first + MOST * STEP; i < n; i += STEP) {
            float4 q = at(row, i), late;
            if (gain)
                late = at(gain, i);
            see(q, late);
        }
        sum = warp_sum(sum);
        top = __reduce_max_sync(~0u, top);
        if (SHARE > 1) {
            __shared__ float sums[8];
            __shared__ unsigned tops[8];
            const int warp = threadIdx.x / 32, w0 = warp / SHARE * SHARE;
            if (threadIdx.x % 32 == 0) {
                sums[warp] = sum;
                tops[warp] = top;
            }
            __syncthreads();
            sum = 0.f;
            #pragma unroll
            for (int i = 0; i < SHARE; i++) {
                sum += sums[w0 + i];
                top = max(top, tops[w0 + i]);
            }
        }
    }
    // put(i, numbers i to i+3) for all of this thread's below `end`; a warp does it together.
    template <class F>
    __device__ __forceinline__ void each(int end, F put) const {
        const int whole = (end + 127) / 128 * 128;
        #pragma unroll
        for (int j = 0; j < MOST; j++)
            if (first / 128 * 128 + j * STEP < whole)
                put(first + j * STEP, v[j]);
        for (int i = first + MOST * STEP; i / 128 * 128 < whole; i += STEP) {
            float4 q = at(row, i);
            if (gain)
                times(q, at(gain, i));
            put(i, q);
        }
    }
};
