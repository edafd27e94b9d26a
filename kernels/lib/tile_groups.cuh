#pragma once
// The products of a block of gemm.cu by warpgroups (lib/wgmma.cuh): W is what registers bring, 64
// rows a group and fragment, and the rows of x are the columns of the product, all of them at once,
// so that a weight is decoded once for a whole tile. Over the constants of gemm.cu.
#include "lib/feed.cuh"
#include "lib/wgmma.cuh"
constexpr int FRAGMENTS = NT / 2;  // of 64 rows, of each group
static_assert(WN % 4 == 0 && NT % 2 == 0 && WM == 1 && STAGES >= 3, "see the contract");
static_assert(PARTS < 3, "W in two parts is for single warps");

// Rows of a lane among its warp's sixteen: i = 0, 1.
__device__ __forceinline__ int row_of(int i) {
    const int g = threadIdx.x % 32 / 4;
    return PAIR ? g / 2 * 4 + g % 2 + i * 2 : g * 2 + i;
}
// First row of a warp's fragment f in the block.
__device__ __forceinline__ int rows_of(int f) {
    const int warp = threadIdx.x / 32;
    return (warp / 4 * FRAGMENTS + f) * 64 + warp % 4 * 16;
}
// Chunk c of a stage: what registers bring to two products.
__device__ __forceinline__ void decode(
        const unsigned char* stage, int c, const float* aids, unsigned (*a)[2][4]) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    #pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int first = rows_of(f), r = first + row_of(i);
            const int place = first + i * 8 + lane / 4;
            const unsigned char* w = stage + A + c * BC + (place * 4 + t) * W::BYTES;
            const unsigned char* s = stage + A + B + ((W::SCALE < 0 ? 0 : c) * BN + r) * SC;
            unsigned h[4];
            W::halves(w, s, t, aids[r], false, h);
            a[f][0][i] = h[0];
            a[f][0][i + 2] = h[1];
            a[f][1][i] = h[2];
            a[f][1][i + 2] = h[3];
        }
}
// Tiles side by side of 16 * M rows of x: all of K through the pipeline, then `put(row of W in the
// block, 64 x 16 * M results)` for each fragment; `meanwhile` before anything has come.
// While products of a chunk run, weights of the next one are decoded.
template <int M, class F, class G>
__device__ __forceinline__ void tile(const Job& j, unsigned char* stages, F meanwhile, G put) {
    constexpr int N = 16 * M, V = N / 2;
    Feed<N> feed(j);
    #pragma unroll
    for (int i = 0; i < STAGES - 1; i++) feed(stages + i * STAGE);
    meanwhile();
    cp_async_wait<STAGES - 2>();
    wgmma_seen();
    __syncthreads();
    unsigned a[2][FRAGMENTS][2][4];
    decode(stages, 0, j.aids, a[0]);
    const WgmmaMatrix first = wgmma_kept(wgmma_rows(stages, 1024));
    int stage = 0;
    for (int q = 0; q < j.tiles; q++) {
        float d[FRAGMENTS][V], own[FRAGMENTS][PARTS == 1 ? 1 : V];
        #pragma unroll
        for (int v = 0; v < FRAGMENTS * V; v++) d[v / V][v % V] = 0.f;
        for (int i = 0; i < j.steps; i++) {
            const int ahead = stage == STAGES - 1 ? 0 : stage + 1;
            const int done = stage == 0 ? STAGES - 1 : stage - 1;
            const bool last = i + 1 == j.steps && q + 1 < j.tiles;
            const WgmmaMatrix x = first + stage * (STAGE / 16);
            #pragma unroll
            for (int c = 0; c < CH; c++) {
                wgmma_fence();
                #pragma unroll
                for (int f = 0; f < FRAGMENTS; f++)
                    #pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const WgmmaMatrix b = x + c / 2 * (BM * 8) + (c % 2 * 2 + h) * WGMMA_K;
                        if constexpr (PARTS == 1) wgmma<N, false>(d[f], a[c % 2][f][h], b, 1);
                        else wgmma<N, false>(own[f], a[c % 2][f][h], b, c % 2 + h > 0);
                    }
                wgmma_commit();
                wgmma_wait<1>();
                const bool end = c == CH - 1;
                if (end) {
                    cp_async_wait<STAGES - 3>();
                    wgmma_seen();
                    __syncthreads();
                    feed(stages + done * STAGE);
                }
                const float* aids = j.aids + (end && last ? q + 1 : q) * BN;
                decode(stages + (end ? ahead : stage) * STAGE, end ? 0 : c + 1, aids, a[(c + 1) % 2]);
                // Tensor cores cut off what a sum has no room for, which would add up along a row:
                // of products in parts each 64 columns are summed by themselves.
                if constexpr (PARTS > 1) if (c % 2) {
                    wgmma_wait<0>();
                    #pragma unroll
                    for (int v = 0; v < FRAGMENTS * V; v++) {
                        wgmma_own(own[v / V][v % V]);
                        d[v / V][v % V] += own[v / V][v % V];
                    }
                }
            }
            stage = ahead;
        }
        wgmma_wait<0>();
        #pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) {
            wgmma_own(d[f]);
            put(q * BN + rows_of(f), d[f]);
        }
    }
}
