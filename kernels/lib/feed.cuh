#pragma once
// What a block of gemm.cu multiplies, on its way to shared memory, stage by stage: over the
// constants of that file, whose name for each is there.
#include "lib/async.cuh"

// N bytes (4, 8 or 16) beside the thread where `on`; a predicate, for a branch would keep the
// products around it apart.
template <int N> __device__ __forceinline__ void cp_async_if(void* to, const void* from, bool on) {
#if defined(__CUDA_ARCH__)
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    if (N == 16)
        asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}"
                     :: "r"(at), "l"(from), "r"((unsigned)on) : "memory");
    else
        asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], %3;}"
                     :: "r"(at), "l"(from), "r"((unsigned)on), "n"(N) : "memory");
#else
    if (on) emu::copy(to, from, N, true);
#endif
}

struct Job {  // what all threads of a block know
    const unsigned short* x;
    const unsigned char *w, *s;  // of the block's first row of W
    const float* aids;           // of the block's columns (lib/unpack.cuh), in shared memory
    const int* from;             // row of x of each row of the tile, in shared memory
    int ld, kp, chunks, blocks;  // blocks: scales of a row, fp8_block
    int steps;                   // along K
    unsigned last;               // the last row of W there is, counted from the block's first
};

// Where row `row` of W lies in a stage. A lane of a warpgroup has rows 2g and 2g+1 of its warp's
// sixteen, or a gate and its up; those of eight lanes lie side by side, so that no bank is met twice.
__device__ __forceinline__ unsigned place_of(unsigned row) {
    if (!WGMMA) return row;
    const unsigned r = row % 16;
    const unsigned place = PAIR ? r / 2 % 2 * 8 + r / 4 * 2 + r % 2 : r % 2 * 8 + r / 2;
    return row - r + place;
}

// Brings what a step along K needs into a stage: each thread the same piece of every so manieth
// row; step after step. Beyond W's last row nothing is read: what lies in the stage
// gives results that nobody keeps, and were the last row read again and again by all blocks, one
// slice of the L2 cache would be all they wait for. Its last chunk is read again and meets zeros of x.
template <int ROWS> struct Feed {
    static constexpr unsigned XP = CH * 4, WP = CH * PER;              // pieces of a row
    static constexpr unsigned XS = THREADS / XP, WS = THREADS / WP;    // rows that all threads bring at once
    static constexpr int OWN = (ROWS + XS - 1) / XS, WOWN = BN / WS;
    static constexpr unsigned ROW = WGMMA ? 128 : BK * 2;
    static constexpr unsigned SPIECES = W::SCALE > 0 ? BN / 4 * CH : W::SCALE < 0 ? BN : 0;
    static constexpr int SOWN = (SPIECES + THREADS - 1) / THREADS;     // pieces of scales
    static constexpr unsigned SBYTES = W::SCALE > 0 ? 4 * SC : 4;      // of one
    static_assert(THREADS % XP == 0 && THREADS % WP == 0 && BN % WS == 0, "whole rows");
    static_assert(XS % 8 == 0 && (!WGMMA || WS % 16 == 0), "the same place of all rows");
    static_assert(SOWN < 2 || THREADS % CH == 0, "the same chunk of all rows");
    const Job& j;
    int step = 0, c0 = 0;      // c0: the step's first chunk
    unsigned at[OWN];          // where the pieces of x begin, in sixteens of bytes
    const unsigned char *w, *s;
    unsigned x_to, w_to, s_to; // in a stage
    __device__ __forceinline__ Feed(const Job& job) : j(job) {
        const unsigned tid = threadIdx.x;
        #pragma unroll
        for (int i = 0; i < OWN; i++) {
            const unsigned row = min(tid / XP + i * XS, ROWS - 1u);
            at[i] = (unsigned)j.from[row] * (j.ld / 8) + tid % XP;
        }
        const unsigned row = tid / XP, piece = tid % XP;
        const unsigned block = WGMMA ? piece / 8 : 0;  // of 64 columns
        const unsigned place = (piece - block * 8) ^ row % 8;  // so that no bank is met twice
        x_to = block * BM * 128 + row * ROW + place * 16;
        w_to = A + tid % WP / PER * BC + place_of(tid / WP) * PER * 16 + tid % PER * 16;
        s_to = A + B + (W::SCALE > 0 ? tid % CH * BN + tid / CH * 4 : tid) * SC;
        begin();
    }
    // At the first chunk of W.
    __device__ __forceinline__ void begin() {
        const unsigned tid = threadIdx.x, row = tid / WP;
        const unsigned c = min((int)(tid % WP / PER), j.chunks - 1);
        w = j.w + ((size_t)(row * j.chunks + c) * PER + tid % PER) * 16;
        if (W::SCALE > 0) {
            const unsigned q = min(tid / CH, j.last / 4), c = min((int)(tid % CH), j.chunks - 1);
            s = j.s + (size_t)(q * j.chunks + c) * SBYTES;
        } else s = j.s + (size_t)(min(tid, j.last) * j.blocks) * 4;
        c0 = 0;
    }
    __device__ __forceinline__ void rows(unsigned char* stage, const unsigned short* x, bool on) const {
        #pragma unroll
        for (int i = 0; i < OWN; i++) {
            const bool real = ROWS % XS == 0 || threadIdx.x / XP + i * XS < ROWS;
            const unsigned char* from = (const unsigned char*)x + (size_t)at[i] * 16;
            cp_async_if<16>(stage + x_to + i * XS * ROW, from, on && real);
        }
    }
    __device__ __forceinline__ void weights(unsigned char* stage, bool on) const {
        const unsigned tid = threadIdx.x;
        #pragma unroll
        for (int i = 0; i < WOWN; i++) {
            const bool real = tid / WP + i * WS <= j.last;
            const unsigned char* from = w + (size_t)(i * WS) * (j.chunks * PER * 16);
            cp_async_if<16>(stage + w_to + i * WS * PER * 16, from, on && real);
        }
        #pragma unroll
        for (int i = 0; i < SOWN; i++) {
            const bool real = (i + 1) * THREADS <= SPIECES || i * THREADS + tid < SPIECES;
            const unsigned first = W::SCALE > 0 ? tid / CH : tid, last = W::SCALE > 0 ? j.last / 4 : j.last;
            const unsigned skip = min(first + i * (W::SCALE > 0 ? THREADS / CH : THREADS), last) - min(first, last);
            const size_t pitch = W::SCALE > 0 ? j.chunks * SBYTES : j.blocks * 4;
            cp_async_if<SBYTES>(stage + s_to + i * (W::SCALE > 0 ? THREADS / CH * 4 : THREADS) * SC, s + (i ? skip * pitch : 0), on && real);
        }
    }
    // W's next step. A chunk that is not there is one that was: it meets zeros of x.
    __device__ __forceinline__ void next() {
        const unsigned tid = threadIdx.x;
        c0 += CH;
        const int mine = c0 + tid % WP / PER, its = c0 + tid % CH;
        w += mine < j.chunks ? CH * PER * 16 : 0;
        if (W::SCALE > 0) s += its < j.chunks ? CH * SBYTES : 0;
        if (W::SCALE < 0) s += c0 % 4 == 0 && c0 < j.chunks ? 4 : 0;
    }
    __device__ __forceinline__ void operator()(unsigned char* stage) {
        const bool on = step < j.steps;
        const int steps = j.kp / BK, part = PARTS == 2 && step >= steps, k = (step - part * steps) * BK;
        if (PARTS == 2 && step == steps) begin();
        #pragma unroll
        for (int i = 0; i < XPARTS; i++) rows(stage + i * AP, j.x + (part + i) * j.kp + k, on);
        weights(stage, on);
        next();
        step++;
        cp_async_commit();
    }
};
