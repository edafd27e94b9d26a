#pragma once
// What a block of gemm.cu multiplies, on its way to shared memory, stage by stage: over the
// constants of that file, whose name for each is there.
#include "lib/async.cuh"

// N bytes (4, 8 or 16) beside the thread where `on`; a predicate, for a branch would keep the
// products around it apart. L2: how many bytes around them come to the L2 cache, too.
template <int N, int L2 = 0>
__device__ __forceinline__ void cp_async_if(void* to, const void* from, bool on) {
#if defined(__CUDA_ARCH__)
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
#define COPY_IF(how, n) \
    asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async." how " [%0], [%1], " #n ";}" \
        :: "r"(at), "l"(from), "r"((unsigned)on) : "memory")
    if (N == 16 && L2 == 256) COPY_IF("cg.shared.global.L2::256B", 16);
    else if (N == 16 && L2 == 128) COPY_IF("cg.shared.global.L2::128B", 16);
    else if (N == 16) COPY_IF("cg.shared.global", 16);
    else if (N == 8) COPY_IF("ca.shared.global", 8);
    else COPY_IF("ca.shared.global", 4);
#undef COPY_IF
#else
    if (on) emu::copy(to, from, N, true);
#endif
}

struct Job {  // what all threads of a block know
    const unsigned char *x, *xs;  // xs: scales of x, where it has any (XSC bytes of a row and stage)
    const unsigned char *w, *s;  // of the first row of W in the block's first tile
    const float* aids;           // of the block's columns (lib/unpack.cuh), in shared memory
    const int* from;             // row of x of each row of the tile, in shared memory
    int line, chunks, blocks;    // sixteens of bytes of a row of x; scales of a row, fp8_block
    int steps, tiles;            // along K; tiles of columns that the block has
    unsigned last;               // the last row of W there is, counted from the first of the first tile
};

// Where row `row` of W lies in a stage. A lane of a warpgroup has rows 2g and 2g+1 of its warp's
// sixteen, or a gate and its up; those of eight lanes lie side by side, so that no bank is met twice.
__device__ __forceinline__ unsigned place_of(unsigned row) {
    if (!WGMMA) return row;
    const unsigned r = row % 16;
    const unsigned place = PAIR ? r / 2 % 2 * 8 + r / 4 * 2 + r % 2 : r % 2 * 8 + r / 2;
    return row - r + place;
}

// Where piece `piece` of row `row` of x lies among rows of ROW bytes: eight rows meet no bank twice.
template <int ROW> __device__ __forceinline__ unsigned place_in_row(unsigned row, unsigned piece) {
    return row * ROW + (ROW == 64 ? piece ^ row / 2 % 4 : piece ^ row % 8) * 16;
}

constexpr unsigned FEEDERS = FEEDS ? FEEDS * 32 : THREADS;  // threads that copy
__device__ __forceinline__ unsigned feeder() { return threadIdx.x - (THREADS - FEEDERS); }

// Brings what a step along K needs into a stage: each thread the same piece of every so manieth
// row; step after step, tile after tile. Beyond W's last row nothing is read: what lies in the stage
// gives results that nobody keeps, and were the last row read again and again by all blocks, one
// slice of the L2 cache would be all they wait for. Its last chunk is read again and meets zeros of x.
template <int ROWS> struct Feed {
    static constexpr unsigned XP = XROW / 16, WP = CH * PER;           // pieces of a row
    static constexpr unsigned XS = FEEDERS / XP, WS = FEEDERS / WP;    // rows that all threads bring at once
    static constexpr int OWN = (ROWS + XS - 1) / XS;
    static constexpr unsigned ROW = WGMMA ? 128 : XROW;
    static_assert(FEEDERS % XP == 0 && FEEDERS % WP == 0 && BN % WS == 0, "whole rows");
    static_assert(XS % 8 == 0 && (!WGMMA || WS % 16 == 0), "the same place of all rows");
    const Job& j;
    int step = 0, tile = 0;
    unsigned at[OWN];  // where the pieces of x begin, in sixteens of bytes
    __device__ __forceinline__ Feed(const Job& job) : j(job) {
        #pragma unroll
        for (int i = 0; i < OWN; i++) {
            const unsigned row = min(feeder() / XP + i * XS, ROWS - 1u);
            at[i] = (unsigned)j.from[row] * j.line + feeder() % XP;
        }
    }
    __device__ __forceinline__ void rows(unsigned char* stage, const unsigned char* x, bool on) const {
        const unsigned row = feeder() / XP, piece = feeder() % XP;
        const unsigned block = WGMMA ? piece / 8 : 0;  // of 128 bytes of a row
        unsigned char* to = stage + block * BM * 128 + place_in_row<ROW>(row, piece - block * 8);
        #pragma unroll
        for (int i = 0; i < OWN; i++) {
            const bool real = ROWS % XS == 0 || row + i * XS < ROWS;
            cp_async_if<16>(to + i * XS * ROW, x + (size_t)at[i] * 16, on && real);
        }
    }
    __device__ __forceinline__ void scales(unsigned char* stage, bool on) const {
        if constexpr (XSC > 0)
            for (int row = feeder(); row < ROWS; row += FEEDERS)
                cp_async_if<XSC ? XSC : 4>(stage + XPARTS * AP + row * XSC,
                    j.xs + ((size_t)j.from[row] * j.steps + step) * XSC, on);
    }
    __device__ __forceinline__ void weights(unsigned char* stage, int c0, bool on) const {
        const unsigned tid = feeder(), row = tid / WP, piece = tid % WP, chunk = piece / PER;
        const unsigned n0 = tile * BN, c = min(c0 + (int)chunk, j.chunks - 1);
        const unsigned char* w = j.w + c * (PER * 16) + piece % PER * 16;
        unsigned char* to = stage + A + chunk * BC + place_of(row) * PER * 16 + piece % PER * 16;
        #pragma unroll
        for (int i = 0; i < BN / WS; i++) {
            const unsigned r = n0 + row + i * WS;
            cp_async_if<16, NEAR>(to + i * WS * PER * 16, w + (size_t)(r * (j.chunks * PER)) * 16, on && r <= j.last);
        }
        if (W::SCALE > 0)  // those of four rows lie together
            #pragma unroll
            for (unsigned i = 0; i < BN / 4 * CH; i += FEEDERS) {
                const unsigned p = i + tid, q = min(n0 / 4 + p / CH, j.last / 4);
                const unsigned c = min(c0 + (int)(p % CH), j.chunks - 1);
                cp_async_if<SC ? SC * 4 : 4>(stage + A + B + (p % CH * BN + p / CH * 4) * SC,
                    j.s + (size_t)(q * j.chunks + c) * 4 * SC, on && p < BN / 4 * CH);
            }
        if (W::SCALE < 0)
            #pragma unroll
            for (unsigned i = 0; i < BN; i += FEEDERS) {
                const unsigned p = i + tid, r = min(n0 + p, j.last);
                cp_async_if<4>(stage + A + B + p * 4, (const float*)j.s + r * j.blocks + c0 / 4, on && p < BN);
            }
    }
    __device__ __forceinline__ void operator()(unsigned char* stage) {
        const bool on = tile < j.tiles;
        const int own = j.steps / (PARTS == 2 ? 2 : 1), k = step < own ? step : step - own;
        #pragma unroll
        for (int i = 0; i < XPARTS; i++) rows(stage + i * AP, j.x + (step + i * j.steps) * XROW, on);
        scales(stage, on);
        weights(stage, k * CH, on);
        const bool more = step + 1 < j.steps;
        step = more ? step + 1 : 0;
        tile += !more;
        cp_async_commit();
    }
};
