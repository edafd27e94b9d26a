#pragma once
// How a long sequence is cut for attention: `many` pieces of 64 positions, as many of 128, then pieces of 256. The cuts depend on the position alone, so
// whatever is added up piece by piece has the same bits for every company. With a window all are of 64: `many` is then larger than any sequence.
#ifndef PIECE
#define PIECE 64
#endif
struct Pieces {
    int many;
    __device__ __forceinline__ int of(int p) const {
        p /= PIECE;
        return p < many ? p : p < 3 * many ? many + (p - many) / 2 : 2 * many + (p - 3 * many) / 4;
    }
    __device__ __forceinline__ int start(int i) const { return (i < many ? i : i < 2 * many ? many + 2 * (i - many) : 3 * many + 4 * (i - 2 * many)) * PIECE; }
};
#define NONE __int_as_float(0xFF800000)  // minus infinity; NVRTC knows no INFINITY
#define LOG2E 1.4426950408889634f
__device__ __forceinline__ float warp_max(float v) {
    for (int m = 16; m; m >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, m));
    return v;
}
// v times the sigmoid of g.
__device__ __forceinline__ float gated(float v, float g) { return __fdividef(v, __fadd_rn(1.f, exp2f(__fmul_rn(-g, LOG2E)))); }
