#pragma once
// The products of a block of gemm.cu whose rows of x lie in shared memory whole, all columns of
// them: so they are read once for all rows of W that the block has. A group of four warps has 64 of
// those at a time, TURNS times, and stages of its own, so groups wait for nobody: results of one
// are written while others multiply.
#include "lib/tile_groups.cuh"
#if TURNS > 1
static_assert(PARTS == 1 && FRAGMENTS == 1 && W::SCALE >= 0, "see the contract");

__device__ __forceinline__ void group_sync() {
    const int group = threadIdx.x / 128;
#if defined(__CUDA_ARCH__)
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
#else
    emu::barrier(1 + group, 128);
#endif
}
// First row in the block of those that a group has in a turn.
__device__ __forceinline__ int rows_in(int turn) {
    return (turn * (WN / 4) + threadIdx.x / 128) * 64;
}
// All columns of ROWS rows of x, in blocks of 64.
template <int ROWS>
__device__ __forceinline__ void bring_rows(const Job& j, unsigned char* to) {
    const int pieces = j.steps * (XROW / 16);
    for (int i = threadIdx.x; i < ROWS * pieces; i += THREADS) {
        const int row = i / pieces, piece = i % pieces;
        const unsigned char* from = j.x
                + ((size_t)j.from[row] * j.line + piece) * 16;
        cp_async16(
                to + piece / 8 * (BM * 128) + wgmma_piece(row, piece % 8), from);
    }
    cp_async_commit();
}
// What a group needs, step after step and turn after turn.
struct TurnFeed {
    const Job& j;
    WeightFeed<128, BS> weights;
    int step = 0, turn = 0;
    __device__ __forceinline__ TurnFeed(const Job& job)
        : j(job), weights(job, threadIdx.x % 128) {
        weights.begin(rows_in(0));
    }
    __device__ __forceinline__ void operator()(unsigned char* stage) {
        weights(stage, turn < TURNS);
        cp_async_commit();
        if (++step < j.steps)
            return;
        step = 0;
        weights.begin(rows_in(++turn));
    }
};

// As in lib/tile_groups.cuh, turn after turn.
template <int M, class F, class G>
__device__ __forceinline__ void tile(
        const Job& j, unsigned char* memory, F meanwhile, G put) {
    constexpr int N = 8 * M;
    constexpr int V = N / 2;
    constexpr int LAST = (STAGES - 1) * STAGE;
    // own: a warp's first row
    const int group = threadIdx.x / 128;
    const int own = threadIdx.x / 32 % 4 * 16;
    unsigned char* const stages = memory + j.steps * AP
            + group * (STAGES * STAGE);
    bring_rows<N>(j, memory);
    TurnFeed feed(j);
    #pragma unroll
    for (int i = 0; i < STAGES - 1; i++)
        feed(stages + i * STAGE);
    meanwhile();
    cp_async_wait<STAGES - 2>();
    wgmma_seen();
    __syncthreads();
    unsigned a[2][1][PRODUCTS][4];
    const float* aids = j.aids + rows_in(0) + own;
    Weights w(own);
    w.fetch(stages, 0);
    w.decode(aids, a[0]);
    w.fetch(stages, 1);
    const WgmmaMatrix first = wgmma_kept(wgmma_rows(memory, 1024));
    // where stages begin: that of this step, and of the one before
    int stage = 0, done = LAST;
    #pragma unroll 1
    for (int turn = 0; turn < TURNS; turn++) {
        float d[1][V];
        #pragma unroll
        for (int v = 0; v < V; v++)
            d[0][v] = 0.f;
        #pragma unroll 1
        for (int i = 0; i < j.steps; i++) {
            const int ahead = stage == LAST ? 0 : stage + STAGE;
            const WgmmaMatrix x = first + (unsigned)(i * (AP / 16));
            #pragma unroll
            for (int c = 0; c < CH; c++) {
                multiply<N>(d, a[c % 2], x, c);
                wgmma_wait<1>();
                if (c == 0) {
                    // nobody of the group reads the stage before this one any more
                    cp_async_wait<STAGES - 3>();
                    group_sync();
                    feed(stages + done);
                }
                if (c == CH - 1 && i == j.steps - 1)
                    aids = j.aids + rows_in(turn + 1) % BN + own;
                w.decode(aids, a[(c + 1) % 2]);
                w.fetch(stages + (c >= CH - 2 ? ahead : stage), (c + 2) % CH);
            }
            done = stage;
            stage = ahead;
        }
        wgmma_wait<0>();
        wgmma_own(d[0]);
        put(rows_in(turn) + own, d[0]);
    }
}
#endif
