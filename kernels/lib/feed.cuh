#pragma once
// What a block of gemm.cu or gemm_scaled.cu multiplies, on its way to shared memory, stage by
// stage: over the constants of that file.
//   XROW  bytes of a row of x in a stage, AP of all of them, XPARTS so many times; XSC bytes of its
//         scales
//   PER, BC, SC, SCH  of a row's chunk of W: pieces of 16 bytes; bytes of all rows'; of its scales;
//                     chunks that have any
#include "lib/async.cuh"

// N bytes (4, 8 or 16) beside the thread where `on`; a predicate, for a branch would keep the
// products around it apart.
template <int N>
__device__ __forceinline__ void cp_async_if(void* to, const void* from, bool on) {
#if defined(__CUDA_ARCH__)
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    if (N == 16)
        asm volatile(
                "{.reg .pred p; setp.ne.u32 p, %2, 0; @p "
                "cp.async.cg.shared.global "
                "[%0], "
                "[%1], 16;}" ::"r"(at),
                "l"(from), "r"((unsigned)on)
                : "memory");
    else
        asm volatile(
                "{.reg .pred p; setp.ne.u32 p, %2, 0; @p "
                "cp.async.ca.shared.global "
                "[%0], "
                "[%1], %3;}" ::"r"(at),
                "l"(from), "r"((unsigned)on), "n"(N)
                : "memory");
#else
    if (on)
        emu::copy(to, from, N, true);
#endif
}

struct Job {  // what all threads of a block know
    const unsigned char *x, *xs;  // xs: scales of x, where it has any
    const unsigned char *w, *s;  // of the block's first row of W
    // of the block's columns (lib/unpack.cuh), in shared memory
    const float* aids;
    const int* from;  // row of x of each row of the tile, in shared memory
    // sixteens of bytes of a row of x; scales of a row, fp8_block
    int line, chunks, blocks;
    int steps;  // along K
    // the last row of W there is, counted from the block's first
    unsigned last;
};

// Where row `row` of W lies in a stage. A lane of a warpgroup has rows 2g and 2g+1 of its warp's
// sixteen, or a gate and its up; those of eight lanes lie side by side, so that no bank is met
// twice.
__device__ __forceinline__ unsigned place_of(unsigned row) {
    if (!WGMMA)
        return row;
    const unsigned r = row % 16;
    const unsigned place = PAIR ? r / 2 % 2 * 8 + r / 4 * 2 + r % 2
                                : r % 2 * 8 + r / 2;
    return row - r + place;
}

// Where piece `piece` of row `row` of x lies among rows of ROW bytes: eight rows meet no bank
// twice.
template <int ROW>
__device__ __forceinline__ unsigned place_in_row(unsigned row, unsigned piece) {
    return row * ROW + (ROW == 64 ? piece ^ row / 2 % 4 : piece ^ row % 8) * 16;
}

// Brings a step's rows of W, and their scales, by TH threads of which this is number tid: each the
// same piece of every so manieth of ROWS rows. Beyond W's last row nothing is read: what lies in
// the stage gives results that nobody keeps, and were the last row read again and again by all
// blocks, one slice of the L2 cache would be all they wait for. Its last chunk is read again and
// meets zeros of x.
template <int TH, int ROWS> struct WeightFeed {
    // pieces of a row; rows brought at once
    static constexpr unsigned WP = CH * PER, WS = TH / WP;
    // of scales: groups of rows whose scales lie together; bytes of a group and chunk
    static constexpr bool FOURS = W::SCALE > 0;
    static constexpr unsigned GROUPS = FOURS ? ROWS / 4 : ROWS;
    static constexpr unsigned SBYTES = FOURS ? 4 * SC : 4;
    static constexpr unsigned PIECES = W::SCALE ? GROUPS * (FOURS ? CH : 1) : 0;
    static constexpr unsigned SS = FOURS ? TH / CH : TH;
    static_assert(
            TH % WP == 0 && ROWS % WS == 0 && (!WGMMA || WS % 16 == 0),
            "whole rows");
    const Job& j;
    const unsigned tid;
    int c0 = 0;  // the step's first chunk
    unsigned row = 0;  // the first row
    const unsigned char *w, *s;  // what is next
    unsigned w_to, s_to;  // in a stage
    __device__ __forceinline__ WeightFeed(const Job& job, unsigned tid)
        : j(job), tid(tid) {
        w_to = A + tid % WP / PER * BC + place_of(tid / WP) * PER * 16
                + tid % PER * 16;
        s_to = A + B + (FOURS ? tid % CH * ROWS + tid / CH * 4 : tid) * SC;
        begin(0);
    }
    __device__ __forceinline__ unsigned group() const {
        return FOURS ? row / 4 + tid / CH : row + tid;
    }
    __device__ __forceinline__ unsigned last() const {
        return FOURS ? j.last / 4 : j.last;
    }
    __device__ __forceinline__ unsigned pitch() const {
        return FOURS ? j.chunks * SBYTES : j.blocks * 4;
    }
    // At the first chunk of the rows from `first` on, which 4 divides.
    __device__ __forceinline__ void begin(unsigned first) {
        const unsigned c = min((int)(tid % WP / PER), j.chunks - 1);
        row = first;
        w = j.w
                + ((size_t)((row + tid / WP) * j.chunks + c) * PER + tid % PER)
                        * 16;
        s = j.s + (size_t)min(group(), last()) * pitch();
        if (FOURS)
            s += min((int)(tid % CH), j.chunks - 1) * SBYTES;
        c0 = 0;
    }
    __device__ __forceinline__ void operator()(unsigned char* stage, bool on) {
        #pragma unroll
        for (int i = 0; i < ROWS / WS; i++) {
            const bool real = row + tid / WP + i * WS <= j.last;
            const unsigned char* from = w
                    + (size_t)(i * WS) * (j.chunks * PER * 16);
            cp_async_if<16>(stage + w_to + i * WS * PER * 16, from, on && real);
        }
        #pragma unroll
        for (unsigned i = 0; i * TH < PIECES; i++) {
            const bool real = (i + 1) * TH <= PIECES || i * TH + tid < PIECES;
            const unsigned skip = min(group() + i * SS, last())
                    - min(group(), last());
            const unsigned char* from = s + (i ? (size_t)skip * pitch() : 0);
            cp_async_if<SBYTES>(
                    stage + s_to + i * SS * (FOURS ? 4 : 1) * SC, from,
                    on && real);
        }
        next();
    }
    // On to W's next step. In place of a chunk that is not there one that was is read again.
    __device__ __forceinline__ void next() {
        c0 += CH;
        w += c0 + (int)(tid % WP / PER) < j.chunks ? CH * PER * 16 : 0;
        if (FOURS)
            s += c0 + (int)(tid % CH) < j.chunks ? CH * SBYTES : 0;
        if (W::SCALE < 0)
            s += c0 % 4 == 0 && c0 < j.chunks ? 4 : 0;
    }
};

// Brings what a step along K needs into a stage, step after step: rows of x as well, each thread
// the same piece of every so manieth row.
template <int ROWS, int TH = THREADS> struct Feed {
    // pieces of a row; rows at once
    static constexpr unsigned XP = XROW / 16, XS = TH / XP;
    static constexpr int OWN = (ROWS + XS - 1) / XS;
    static constexpr unsigned ROW = WGMMA ? 128 : XROW;
    static_assert(TH % XP == 0 && XS % 8 == 0, "the same place of all rows");
    const Job& j;
    int step = 0;
    unsigned at[OWN];  // where the pieces of x begin, in sixteens of bytes
    unsigned x_to;  // in a stage
    WeightFeed<TH, BN> weights;
    __device__ __forceinline__ Feed(const Job& job)
        : j(job), weights(job, threadIdx.x) {
        const unsigned row = threadIdx.x / XP, piece = threadIdx.x % XP;
        #pragma unroll
        for (int i = 0; i < OWN; i++)
            at[i] = (unsigned)j.from[min(row + i * XS, ROWS - 1u)] * j.line
                    + piece;
        const unsigned block = WGMMA ? piece / 8 : 0;  // of 128 bytes of a row
        x_to = block * BM * 128 + place_in_row<ROW>(row, piece - block * 8);
    }
    __device__ __forceinline__ void rows(
            unsigned char* stage, const unsigned char* x, bool on) const {
        #pragma unroll
        for (int i = 0; i < OWN; i++) {
            const bool real = ROWS % XS == 0 || threadIdx.x / XP + i * XS < ROWS;
            cp_async_if<16>(
                    stage + x_to + i * XS * ROW, x + (size_t)at[i] * 16,
                    on && real);
        }
    }
    __device__ __forceinline__ void scales(unsigned char* stage, bool on) const {
        for (int row = threadIdx.x; row < (XSC ? ROWS : 0); row += TH)
            cp_async_if<XSC ? XSC : 4>(
                    stage + XPARTS * AP + row * XSC,
                    j.xs + ((size_t)j.from[row] * j.steps + step) * XSC, on);
    }
    __device__ __forceinline__ void operator()(unsigned char* stage) {
        const bool on = step < j.steps;
        if (PARTS == 2 && step == j.steps / 2)
            weights.begin(0);
        #pragma unroll
        for (int i = 0; i < XPARTS; i++)
            rows(stage + i * AP, j.x + (step + i * j.steps) * XROW, on);
        scales(stage, on);
        weights(stage, on);
        step++;
        cp_async_commit();
    }
};
