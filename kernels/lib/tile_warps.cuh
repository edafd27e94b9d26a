#pragma once
// The products of a block of gemm.cu, warp by warp (lib/mma.cuh): over the constants of that file.
#include "lib/feed.cuh"
#include "lib/mma.cuh"
// Fragments of M*16 rows and 16 columns, the h-th of a stage.
template <int M>
__device__ __forceinline__ void load(
        const unsigned char* stage, int m0, int h, unsigned (*a)[4]) {
    const int lane = threadIdx.x % 32;
    const unsigned char* rows = stage + (m0 + lane % 16) * (BK * 2)
            + ((h * 2 + lane / 16) ^ lane % 8) * 16;
    #pragma unroll
    for (int m = 0; m < M; m++)
        ldmatrix_x4(a[m], rows + m * 16 * (BK * 2));
}
// A lane's weights of row r and chunk c of a stage: eight that follow each other, its share of two
// products. halve.cu has put what they meet where `ldmatrix` finds it.
__device__ __forceinline__ void decode(
        const unsigned char* stage, int c, int r, float aid, bool low,
        unsigned* b) {
    const int t = threadIdx.x % 4;
    const unsigned char* w = stage + A + c * BC + (r * 4 + t) * W::BYTES;
    const unsigned char* s = stage + A + B
            + ((W::SCALE < 0 ? 0 : c) * BN + r) * SC;
    W::halves(w, s, t, aid, low, b);
}

// What a stage made joins the sums: of products in parts, with what small ones made.
template <int M>
__device__ __forceinline__ void join(
        float (&own)[PARTS == 1 ? 1 : M][NT][4],
        float (&small)[PARTS == 3 ? M : 1][NT][4], float (&d)[M][NT][4]) {
    constexpr int LOW = PARTS == 3;
    #pragma unroll
    for (int v = 0; v < M * NT * 4; v++) {
        const int m = v / (NT * 4), n = v / 4 % NT;
        const float low = LOW ? small[LOW ? m : 0][n][v % 4] : 0.f;
        d[m][n][v % 4] += own[PARTS == 1 ? 0 : m][n][v % 4] + low;
    }
}

// Products of what the one has in full and the other's rest, which are summed by themselves.
template <int M>
__device__ __forceinline__ void multiply_rests(
        float (*small)[NT][4], unsigned (*a)[M][4], unsigned (*b)[NT][4], int n,
        int half) {
    #pragma unroll
    for (int m = 0; m < M; m++)
        mma_f16(small[m][n], a[1][m], b[0][n] + half);
    #pragma unroll
    for (int m = 0; m < M; m++)
        mma_f16(small[m][n], a[0][m], b[1][n] + half);
}

// Of the n-th eight rows of W from r on: in full, and with three products their rests.
__device__ __forceinline__ void decode_parts(
        const unsigned char* stage, int c, int n, int r, const float* aids,
        unsigned (*b)[NT][4]) {
    #pragma unroll
    for (int l = 0; l < 1 + (PARTS == 3); l++)
        decode(stage, c, r + n * 8, aids[r + n * 8], l, b[l][n]);
}

// The first fragments of a tile: of rows, and of weights.
template <int M>
__device__ __forceinline__ void first_fragments(
        const Job& j, const unsigned char* stages, int m0, int r,
        unsigned (*a)[M][4], unsigned (*b)[NT][4]) {
    #pragma unroll
    for (int x = 0; x < XPARTS; x++)
        load<M>(stages + x * AP, m0, 0, a[x]);
    #pragma unroll
    for (int n = 0; n < NT; n++)
        decode_parts(stages, 0, n, r, j.aids, b);
}

// A tile whose warps have M*16 rows each: all of K through the pipeline, then `put(row of the tile,
// row of W in the block, 16 x NT*8 results)`; `meanwhile` before anything has come. While sixteen
// columns are multiplied, the fragments of the next sixteen are read and decoded.
template <int M, class F, class G>
__device__ __forceinline__ void tile(
        const Job& j, unsigned char* stages, F meanwhile, G put) {
    constexpr int KS = BK / 16, LOW = PARTS == 3;
    const int warp = threadIdx.x / 32;
    const int m0 = warp / WN * MT * 16;
    const int n0 = warp % WN * NT * 8;
    const int r = n0 + threadIdx.x % 32 / 4;
    Feed<M * 16 * WM> feed(j);
    #pragma unroll
    for (int i = 0; i < STAGES - 1; i++)
        feed(stages + i * STAGE);
    meanwhile();
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    unsigned a[2][XPARTS][M][4], b[1 + LOW][NT][4];
    first_fragments<M>(j, stages, m0, r, a[0], b);
    // that of this step, and of the one before
    unsigned char* stage = stages;
    unsigned char* done = stages + (STAGES - 1) * STAGE;
    float d[M][NT][4] = {};
    for (int i = 0; i < j.steps; i++) {
        // Tensor cores cut off what a sum has no room for, which would add up along a row: of
        // products in parts each stage is summed by itself, and small products by themselves.
        float own[PARTS == 1 ? 1 : M][NT][4] = {}, small[LOW ? M : 1][NT][4] = {};
        unsigned char* const ahead = stage == stages + (STAGES - 1) * STAGE
                ? stages
                : stage + STAGE;
        #pragma unroll
        for (int k = 0; k < KS; k++) {
            const bool end = k == KS - 1;
            const int next = (k + 1) % KS;
            const unsigned char* source = end ? ahead : stage;
            if (end) {
                cp_async_wait<STAGES - 2>();
                __syncthreads();
            }
            #pragma unroll
            for (int x = 0; x < XPARTS; x++)
                load<M>(source + x * AP, m0, next, a[next % 2][x]);
            #pragma unroll
            for (int n = 0; n < NT; n++) {
                #pragma unroll
                for (int m = 0; m < M; m++)
                    mma_f16(PARTS == 1 ? d[m][n] : own[PARTS == 1 ? 0 : m][n],
                            a[k % 2][0][m], b[0][n] + k % 2 * 2);
                if constexpr (LOW)
                    multiply_rests<M>(small, a[k % 2], b, n, k % 2 * 2);
                if (k + n == 0)
                    feed(done);
                if (k % 2)
                    decode_parts(source, next / 2, n, r, j.aids, b);
            }
        }
        done = stage;
        stage = ahead;
        if (PARTS > 1)
            join<M>(own, small, d);
    }
    #pragma unroll
    for (int m = 0; m < M; m++)
        put(m0 + m * 16, n0, d[m]);
}
