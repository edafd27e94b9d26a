#pragma once
// How a long sequence is cut for attention: `many` pieces of 64 positions, as many of 128, then
// pieces of 256. The cuts depend on the position alone, so whatever is added up piece by piece has
// the same bits for every company. With a window all are of 64: `many` is then larger than any
// sequence.
#ifndef PIECE
#define PIECE 64
#endif
struct Pieces {
    int many;
    // Without branches, so that what is asked for by them is asked for at once
    __device__ __forceinline__ int of(int p) const {
        p /= PIECE;
        return min(p, many) + min(max(p - many, 0), 2 * many) / 2
                + max(p - 3 * many, 0) / 4;
    }
    __device__ __forceinline__ int start(int i) const {
        return (i + max(i - many, 0) + 2 * max(i - 2 * many, 0)) * PIECE;
    }
};
// Pieces that a block takes one after the other: of each size as many as have `1 << shift` times 64
// positions, at least one. What is added up, and in which order, does not depend on it.
struct Runs {
    int many, shift;
    // Of size 0, 1 or 2 (64, 128 or 256 positions): pieces of a run, as a power of two, and runs
    __device__ __forceinline__ int each(int size) const {
        return max(shift - size, 0);
    }
    __device__ __forceinline__ int all(int size) const {
        return (many - 1 >> each(size)) + 1;
    }
    __device__ __forceinline__ int before(int size) const {
        return size == 0 ? 0 : size == 1 ? all(0) : all(0) + all(1);
    }
    // Pieces of run i: the first, and the last if the sequence goes on so long
    __device__ __forceinline__ int2 pieces(int i) const {
        const int size = i < all(0) ? 0 : i < before(2) ? 1 : 2;
        const int a = size * many + (i - before(size) << each(size));
        const int z = a + (1 << each(size)) - 1;
        return make_int2(a, size < 2 ? min(z, (size + 1) * many - 1) : z);
    }
};
// minus infinity; NVRTC knows no INFINITY
#define NONE __int_as_float(0xFF800000)
#define LOG2E 1.4426950408889634f
__device__ __forceinline__ float warp_max(float v) {
    for (int m = 16; m; m >>= 1)
        v = fmaxf(v, __shfl_xor_sync(~0u, v, m));
    return v;
}
// v times the sigmoid of g.
__device__ __forceinline__ float gated(float v, float g) {
    return __fdividef(v, __fadd_rn(1.f, exp2f(__fmul_rn(-g, LOG2E))));
}
