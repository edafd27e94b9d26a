// What the rows of a matrix are to be multiplied by after a product in which the largest of a row was brought near the top of fp16 (lib/unpack.cuh).
// Run once, when weights are loaded.
//   w    : [rows, bytes]   u8    a row's weights as packed
//   s    : [scales]        u8    all scales as packed; or null
//   unit : [rows]          f32   bf16, f32: a power of two that brings the largest into [1, 2) times 2^-14; mxfp4: its largest scale; fp8_block: the power of two below it
//   -D FMT=  bf16, f32, mxfp4 or fp8_block
//   launch: <<<rows, 128>>>
#include "lib/unpack.cuh"
#ifndef FMT
#define FMT bf16
#endif

template <class F> struct Top;
template <> struct Top<weights::bf16> {
    static __device__ float of(const unsigned char* w, const unsigned char*, int, int bytes, int i) { return i < bytes / 2 ? fabsf(__uint_as_float((unsigned)((const unsigned short*)w)[i] << 16)) : -1.f; }
};
template <> struct Top<weights::f32> {
    static __device__ float of(const unsigned char* w, const unsigned char*, int, int bytes, int i) { return i < bytes / 4 ? fabsf(((const float*)w)[i]) : -1.f; }
};
template <> struct Top<weights::mxfp4> {  // chunks of 16 bytes; scales of four rows lie together
    static __device__ float of(const unsigned char*, const unsigned char* s, int r, int bytes, int i) { return i < bytes / 16 ? (float)s[((size_t)(r / 4) * (bytes / 16) + i) * 4 + r % 4] : -1.f; }
};
template <> struct Top<weights::fp8_block> {
    static __device__ float of(const unsigned char*, const unsigned char* s, int r, int bytes, int i) {
        const int n = (bytes + 127) / 128;
        return i < n ? fabsf(((const float*)s)[(size_t)r * n + i]) : -1.f;
    }
};
__device__ __forceinline__ float unit_of(weights::bf16, float top) { return chunk_scale(top).y; }
__device__ __forceinline__ float unit_of(weights::f32, float top) { return chunk_scale(top).y; }
__device__ __forceinline__ float unit_of(weights::mxfp4, float top) { return __uint_as_float((unsigned)max((int)top, 1) << 23); }
__device__ __forceinline__ float unit_of(weights::fp8_block, float top) { return __uint_as_float(max(__float_as_uint(top) & 0x7F800000u, 1u << 23)); }

extern "C" __global__ void __launch_bounds__(128) units(const unsigned char* __restrict__ w, const unsigned char* __restrict__ s, float* unit, int bytes) {
    __shared__ float part[4];
    const int r = blockIdx.x;
    float top = 0.f;
    for (int i = threadIdx.x;; i += 128) {
        const float v = Top<weights::FMT>::of(w + (size_t)r * bytes, s, r, bytes, i);
        if (v == -1.f) break;
        top = fmaxf(top, v);
    }
    for (int m = 16; m; m >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = top;
    __syncthreads();
    if (threadIdx.x == 0) unit[r] = unit_of(weights::FMT(), fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3])));
}
