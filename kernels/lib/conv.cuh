#pragma once
// The short causal convolution in front of a recurrent layer, for the few rows of a decode step, in
// a block of THREADS threads. A thread has up to SLOTS channels of its own, and nobody else reads
// them here: shared memory only spares it the registers, and no barrier is needed.
#include "lib/async.cuh"

// Like cp_async16, four bytes.
__device__ __forceinline__ void cp_async4(void* to, const void* from) {
#if defined(__CUDA_ARCH__)
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(
                         (unsigned)__cvta_generic_to_shared(to)),
            "l"(from)
            : "memory");
#else
    emu::copy(to, from, 4, true);
#endif
}
// Without branches, within 2 units in the last place; 0 where the exponential is infinite.
__device__ __forceinline__ float sigmoid(float v) {
    return __fdividef(1.f, __fadd_rn(1.f, expf(-v)));
}
__device__ __forceinline__ float silu(float v) {
    return __fdividef(v, __fadd_rn(1.f, expf(-v)));
}
__device__ __forceinline__ float softplus(float v) {
    return v > 20.f ? v : log1pf(expf(v));
}

template <int SLOTS, int THREADS = 128> struct Conv {
    // weights of a channel, the last for the newest input
    float4 taps[SLOTS][THREADS];
    // a ring: inputs of three earlier positions and the newest
    float seen[4][SLOTS][THREADS];
    int column[SLOTS][THREADS];  // of the input
    // `col`: the layer's channel in each slot, where the thread `has` one. Both are commited by
    // `fetch_tail`, where null is a tail of zeros.
    __device__ __forceinline__ void fetch_taps(
            const float* __restrict__ w, const int* col, const bool* has) {
        #pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            column[j][threadIdx.x] = col[j];
            if (has[j])
                cp_async16(&taps[j][threadIdx.x], w + col[j] * 4);
        }
    }
    __device__ __forceinline__ void fetch_tail(
            const float* tail, int c, const int* col, const bool* has) {
        #pragma unroll
        for (int j = 0; j < SLOTS; j++)
            if (has[j])
                #pragma unroll
                for (int t = 0; t < 3; t++)
                    if (tail)
                        cp_async4(
                                &seen[t][j][threadIdx.x], tail + t * c + col[j]);
                    else
                        seen[t][j][threadIdx.x] = 0.f;
        cp_async_commit();
    }
    // The input of row i of the step: from its columns of `row`.
    __device__ __forceinline__ void fetch(unsigned i, int j, const float* row) {
        cp_async4(
                &seen[(i + 3) % 4][j][threadIdx.x], row + column[j][threadIdx.x]);
    }
    __device__ __forceinline__ void put(unsigned i, int j, float in) {
        seen[(i + 3) % 4][j][threadIdx.x] = in;
    }
    __device__ __forceinline__ float input(unsigned i, int j) const {
        return seen[(i + 3) % 4][j][threadIdx.x];
    }
    // silu of the convolution at row i: the part of earlier rows, and all of it. Written out: a
    // row's bits must not depend on where the compiler finds it.
    __device__ __forceinline__ float older(unsigned i, int j) const {
        const float4 w = taps[j][threadIdx.x];
        return fmaf(
                seen[(i + 2) % 4][j][threadIdx.x], w.z,
                fmaf(seen[(i + 1) % 4][j][threadIdx.x], w.y,
                        __fmul_rn(seen[i % 4][j][threadIdx.x], w.x)));
    }
    static __device__ __forceinline__ float silu_of(
            float older, float w, float in, float bias = 0.f) {
        return silu(__fadd_rn(fmaf(in, w, older), bias));
    }
    __device__ __forceinline__ float step(
            unsigned i, int j, float bias = 0.f) const {
        return silu_of(older(i, j), taps[j][threadIdx.x].w, input(i, j), bias);
    }
    // Leave the three newest inputs at row i in `tail` [3, c]: of the slots before the last where
    // `most`, of the last where `last`.
    __device__ __forceinline__ void keep(
            unsigned i, float* tail, int c, bool most, bool last) const {
        #pragma unroll
        for (int j = 0; j < SLOTS; j++)
            if (j < SLOTS - 1 ? most : last)
                #pragma unroll
                for (int t = 0; t < 3; t++)
                    tail[t * c + column[j][threadIdx.x]] =
                            seen[(i + 1 + t) % 4][j][threadIdx.x];
    }
};
