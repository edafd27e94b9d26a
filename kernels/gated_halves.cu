// As gated_norm.cu, and the result is what the product after it reads: rows as halve.cu leaves
// them, fp16 times a power of two. A block a row, which is in registers until its largest magnitude
// is known.
//   y        : [r, width]   f32
//   gate     : [r, xw]      f32   the gates of a row begin at column `at`
//   norm_w   : [gains]      f32   of one group, or of the whole row
//   tile_seq, tile_lo, tile_hi : [tiles] i32   sequence of a tile (-1: none), its real rows
//                                              lo..hi-1
//   h        : [r, ld]      f16   written, ld = PARTS*width; zeros in rows that are not real
//   scale    : [r]          f32   of a row: result = h * scale
//   -D GATE= (1: silu, 2: sigmoid, after the norm; 3: silu, before the norm)
//   -D PARTS=   1 or 2, as halve.cu has them
//   -D SHARES=  128 numbers each that a group has
//   -D PER=  that a warp has: width = 1024*PER, and SHARES divides PER
//   launch: <<<r, 256>>>
#include "lib/gate.cuh"
#include "lib/halves_out.cuh"
#include "lib/reduce.cuh"
#ifndef GATE
#define GATE 1
#endif
#ifndef PARTS
#define PARTS 1
#endif
#ifndef SHARES
#define SHARES 1
#endif
#ifndef PER
#define PER 4
#endif
static_assert(PER % SHARES == 0, "see the contract");

// Largest of `v` over a block of eight warps
__device__ __forceinline__ float block_top(float v) {
    __shared__ float part[8];
    for (int m = 16; m; m >>= 1)
        v = fmaxf(v, __shfl_xor_sync(~0u, v, m));
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = v;
    __syncthreads();
    v = part[0];
    #pragma unroll
    for (int i = 1; i < 8; i++)
        v = fmaxf(v, part[i]);
    return v;
}

extern "C" __global__ void __launch_bounds__(256, PER > 4 ? 2 : 4) gated_halves(
        const float* __restrict__ y, const float* __restrict__ gate,
        const float* __restrict__ norm_w, const int* __restrict__ tile_seq,
        const int* __restrict__ tile_lo, const int* __restrict__ tile_hi,
        __half* h, float* scale, float eps, int width, int xw, int at,
        int gains) {
    constexpr int N = 128 * SHARES;
    const int row = blockIdx.x;
    const int t = row / 64;
    const int lane = threadIdx.x % 32;
    const int first = threadIdx.x / 32 * PER * 128 + lane * 4;
    // all asked for at once
    const int seq = tile_seq[t];
    const int lo = tile_lo[t];
    const int hi = tile_hi[t];
    const bool real = (seq >= 0) & (row % 64 >= lo) & (row % 64 < hi);
    const float* from = y + (size_t)row * width + first;
    const float* z = gate + (size_t)row * xw + at + first;
    const float* gain = norm_w + (gains == N ? lane * 4 : first);
    const bool wide = (size_t)gate % 16 == 0 && xw % 4 == 0 && at % 4 == 0;
    float4 v[PER], g[PER];
    #pragma unroll
    for (int i = 0; i < PER; i++) {
        v[i] = g[i] = make_float4(0.f, 0.f, 0.f, 0.f);
        if (!real)
            continue;
        v[i] = *(const float4*)(from + 128 * i);
        g[i] = four_of(z + 128 * i, wide);
    }
    float top = 0.f;
    #pragma unroll
    for (int i = 0; i < PER; i += SHARES) {
        float sum = 0.f;
        #pragma unroll
        for (int j = i; j < i + SHARES; j++) {
            g[j] = gates<GATE>(g[j]);
            sum += square(GATE == 3 ? times(v[j], g[j]) : v[j]);
        }
        const float f = rsqrtf(warp_sum(sum) / N + eps);
        #pragma unroll
        for (int j = i; j < i + SHARES; j++) {
            const float4 w = *(
                    const float4*)(gain + 128 * (gains == N ? j - i : j));
            v[j] = times(
                    times(v[j], g[j]),
                    make_float4(f * w.x, f * w.y, f * w.z, f * w.w));
            top = fmaxf(
                    fmaxf(top, fmaxf(fabsf(v[j].x), fabsf(v[j].y))),
                    fmaxf(fabsf(v[j].z), fabsf(v[j].w)));
        }
    }
    const float2 by = chunk_scale(block_top(top));
    if (threadIdx.x == 0)
        scale[row] = by.y;
    #pragma unroll
    for (int i = 0; i < PER; i++)
        put_halves<PARTS>(
                h + (size_t)row * PARTS * width, width, first + 128 * i, v[i],
                by.x);
}
