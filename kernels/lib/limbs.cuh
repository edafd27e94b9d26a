#pragma once
// Products of float32 accuracy on tensor cores. A number is the sum of two bf16, its limbs, and a
// product is three: hi*hi + hi*lo + lo*hi, summed in float32. What is lost is 2^-16 of a factor;
// the range is float32's, so no data overflows.
//
// A fragment of a B operand (16 x 8) is what a warp needs of it at once: 16 bytes a lane, {hi b0,
// hi b1, lo b0, lo b1} with b0, b1 as in lib/mma.cuh. Kernels that prepare operands for others
// write them as fragments, 512 bytes each, so that the reader needs neither a transposition nor a
// conversion.
#include "lib/mma.cuh"

struct Pair {
    unsigned hi, lo;
};  // two numbers
__device__ __forceinline__ unsigned as_bits(__nv_bfloat162 v) {
    return *reinterpret_cast<unsigned*>(&v);
}
__device__ __forceinline__ Pair limbs(float a, float b) {
    const __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
    return {as_bits(h),
            as_bits(__floats2bfloat162_rn(
                    a - __bfloat162float(h.x), b - __bfloat162float(h.y)))};
}
// Two halves instead, whose range is +-65504: finite numbers beyond become that.
__device__ __forceinline__ Pair half_limbs(float a, float b) {
    auto bits = [](float x, float y) {
        return (unsigned)__half_as_ushort(__float2half_rn(x))
                | (unsigned)__half_as_ushort(__float2half_rn(y)) << 16;
    };
    auto held = [](float v) {
        return fabsf(v) > 65504.f && fabsf(v) <= 3.4028235e38f
                ? copysignf(65504.f, v)
                : v;
    };
    const float x = held(a), y = held(b);
    return {bits(x, y),
            bits(x - __half2float(__float2half_rn(x)),
                    y - __half2float(__float2half_rn(y)))};
}
// The same for what is known to be between them, or a NaN.
__device__ __forceinline__ Pair half_limbs_below(float x, float y) {
    auto bits = [](float a, float b) {
        return (unsigned)__half_as_ushort(__float2half_rn(a))
                | (unsigned)__half_as_ushort(__float2half_rn(b)) << 16;
    };
    return {bits(x, y),
            bits(x - __half2float(__float2half_rn(x)),
                    y - __half2float(__float2half_rn(y)))};
}
__device__ __forceinline__ uint4 b_fragment(Pair b0, Pair b1) {
    return make_uint4(b0.hi, b1.hi, b0.lo, b1.lo);
}

// An A operand (16 x 16).
struct Limbs {
    unsigned hi[4], lo[4];
    __device__ __forceinline__ void set(int i, Pair p) {
        hi[i] = p.hi;
        lo[i] = p.lo;
    }
    // The sums of two neighbouring products (16 x 8 each), as they lie in registers
    __device__ __forceinline__ void of_sums(const float* c, const float* d) {
        set(0, limbs(c[0], c[1]));
        set(1, limbs(c[2], c[3]));
        set(2, limbs(d[0], d[1]));
        set(3, limbs(d[2], d[3]));
    }
    // From shared memory; hi and lo: what ldmatrix wants of this lane
    __device__ __forceinline__ void load(const void* h, const void* l) {
        ldmatrix_x4(hi, h);
        ldmatrix_x4(lo, l);
    }
    __device__ __forceinline__ void load_trans(const void* h, const void* l) {
        ldmatrix_x4_trans(hi, h);
        ldmatrix_x4_trans(lo, l);
    }
};

// c[n] += A B[n] for n in from..N-1. The three products of one sum stand N apart, so that none
// waits for the one before it.
template <int N>
__device__ __forceinline__ void mma_limbs(
        float (*c)[4], const Limbs& a, const uint4* b, int from = 0) {
    #pragma unroll
    for (int n = 0; n < N; n++)
        if (n >= from)
            mma_bf16(c[n], a.lo, &b[n].x);
    #pragma unroll
    for (int n = 0; n < N; n++)
        if (n >= from)
            mma_bf16(c[n], a.hi, &b[n].z);
    #pragma unroll
    for (int n = 0; n < N; n++)
        if (n >= from)
            mma_bf16(c[n], a.hi, &b[n].x);
}
