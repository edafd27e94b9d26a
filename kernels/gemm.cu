// y = W x for many rows, by tensor cores: x in fp16 (halve.cu), W in any format, decoded in registers on its way from shared memory (lib/unpack.cuh),
// float32 sums. The activation between gate and up, bias and residual are in it. One matrix for all rows, or a bank of experts, each with rows of its own.
//   x     : [xrows, ld]           f16   ld = parts * kp, and BK divides kp; columns in the order of halve.cu
//   scale : [xrows]               f32   of the rows of x
//   w     : [wrows, bytes]        u8    wrows = experts * n4: rows of one expert after those of another
//   s     : [scales]              u8    scales as packed; or null
//   unit  : [wrows]               f32   of the rows of W; or null for ones
//   bias  : [experts, nb]         f32   in the order of the rows of W; nb = n, of pairs with what pads them to n4; or null
//   gate  : [yrows:gs, columns]   f32   the result of a row is multiplied by the sigmoid of one of its columns; or null
//   add   : [yrows:as, out]       f32   then added, may be y; or null
//   y     : [yrows:ys, out]       f32   out = n, or n/2 after an activation of pairs
//   order : [picks]               i32   GROUPED: number of the pick at each place, sorted by expert; or null
//   tiles : [slots, 3]            i32   GROUPED: expert, first place, end of the places of a tile; expert -1: nothing to do; or null
//   -D FMT=     of lib/unpack.cuh       -D ACTIVATION=  of lib/act.cuh; all but ACT_NONE and ACT_RELU2 want rows of W in fours: two gates, two ups
//   -D PARTS=   1; 2: x in two parts; 3: W too (f32)
//   -D GROUPED= 0; 1: row of x is order[place]/top, row of y the place; 2: row of x is the place, row of y order[place]
//   -D MT= NT= WM= WN= BK= STAGES=   a warp has 16*MT x 8*NT results, a block WM x WN warps, K goes by BK, 64 or 128; GROUPED: WM 1, MT 1 to 4 or even
//   -D BLOCKS=  that a multiprocessor is to hold at least
//   launch: <<<GROUPED ? (ceil(n/BN), slots) : (ceil(xrows/BM), ceil(n/BN)), 32*WM*WN, STAGES * (A + B + scales)>>>   BM = 16*MT*WM, BN = 8*NT*WN
#include "lib/async.cuh"
#include "lib/mma.cuh"
#include "lib/unpack.cuh"
#include "lib/act.cuh"
#ifndef FMT
#define FMT nvfp4
#endif
#ifndef ACTIVATION
#define ACTIVATION ACT_NONE
#endif
#ifndef PARTS
#define PARTS 1
#endif
#ifndef GROUPED
#define GROUPED 0
#endif
#ifndef MT
#define MT 4
#endif
#ifndef NT
#define NT 8
#endif
#ifndef WM
#define WM 1
#endif
#ifndef WN
#define WN 4
#endif
#ifndef BK
#define BK 64
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#define THREADS (32 * WM * WN)
using W = weights::FMT;
constexpr int BM = 16 * MT * WM, BN = 8 * NT * WN, CH = BK / 32;
constexpr int PER = W::BYTES / 4;                                   // 16-byte pieces of a row's chunk
constexpr int SC = W::SCALE < 0 ? 4 : W::SCALE, SCH = W::SCALE < 0 ? 1 : CH;  // scales: bytes of a row's chunk, chunks a stage
constexpr int BC = BN * PER * 16;                                   // bytes of a chunk of all rows of W
constexpr bool PAIR = ACTIVATION != ACT_NONE && ACTIVATION != ACT_RELU2;
constexpr int A = BM * BK * 2, B = CH * BC, STAGE = A + B + SCH * SC * BN;
static_assert((BK == 64 || BK == 128) && (GROUPED == 0 || WM == 1), "see the contract");

// 4, 8 or 16 bytes beside the thread, as cp_async16.
template <int N> __device__ __forceinline__ void cp_async_small(void* to, const void* from) {
#if defined(__CUDA_ARCH__)
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from), "n"(N) : "memory");
#else
    emu::copy(to, from, N, true);
#endif
}

struct Job {  // what all threads of a block know
    const unsigned short* x;
    const unsigned char *w, *s;  // of the first row of W in the tile
    const float* aids;           // of the block's columns (lib/unpack.cuh), in shared memory
    const int* from;             // row of x of each row of the tile, in shared memory
    int ld, kp, chunks, blocks;  // blocks: scales of a row, fp8_block
    unsigned last;               // the last row of W there is, counted from the first of the tile
};

// Brings what a step along K needs into a stage: each thread the same piece of every so manieth row. Beyond the ends of W its last row and last chunk are
// read again: the former gives results that nobody keeps, the latter meets zeros of x.
template <int ROWS> struct Feed {
    static constexpr unsigned XP = CH * 4, WP = CH * PER, XS = THREADS / XP, WS = THREADS / WP;  // pieces of a row, rows that all threads bring at once
    static_assert(THREADS % XP == 0 && THREADS % WP == 0 && BN % WS == 0, "whole rows");
    const Job& j;
    unsigned at[(ROWS + XS - 1) / XS];  // where the pieces of x begin, in sixteens of bytes
    __device__ __forceinline__ Feed(const Job& job) : j(job) {
        #pragma unroll
        for (int i = 0; i < (ROWS + XS - 1) / XS; i++) at[i] = (unsigned)j.from[min(threadIdx.x / XP + i * XS, ROWS - 1u)] * (j.ld / 8) + threadIdx.x % XP;
    }
    __device__ __forceinline__ void operator()(unsigned char* stage, int step) const {
        const unsigned tid = threadIdx.x, xr = tid / XP, wr = tid / WP, piece = tid % WP;
        const int steps = j.kp / BK, part = PARTS == 1 ? 0 : step / steps, c0 = (PARTS == 1 ? step : step % steps) * CH;
        const unsigned char* x = (const unsigned char*)(j.x + (part == 1 ? j.kp : 0) + c0 * 32);
        unsigned char* to = stage + xr * BK * 2 + (tid % XP ^ xr % 8) * 16;  // so that neither writing nor reading meets a bank twice
        #pragma unroll
        for (int i = 0; i < (ROWS + XS - 1) / XS; i++) {
            static_assert(XS % 8 == 0, "the same place for all");
            if (ROWS % XS == 0 || xr + i * XS < ROWS) cp_async16(to + i * XS * BK * 2, x + (size_t)at[i] * 16);
        }
        const unsigned char* w = j.w + min(c0 + (int)(piece / PER), j.chunks - 1) * (PER * 16) + piece % PER * 16;
        to = stage + A + piece / PER * BC + wr * PER * 16 + piece % PER * 16;
        #pragma unroll
        for (int i = 0; i < BN / WS; i++) cp_async16(to + i * WS * PER * 16, w + (size_t)(min(wr + i * WS, j.last) * (j.chunks * PER)) * 16);
        if (W::SCALE > 0)  // those of four rows lie together
            #pragma unroll
            for (unsigned p = tid; p < BN / 4 * CH; p += THREADS) {
                const unsigned q = p / CH, c = min(c0 + (int)(p % CH), j.chunks - 1);
                cp_async_small<SC ? SC * 4 : 4>(stage + A + B + (p % CH * BN + q * 4) * SC, j.s + (size_t)(min(q, j.last / 4) * j.chunks + c) * 4 * SC);
            }
        if (W::SCALE < 0)
            #pragma unroll
            for (unsigned i = tid; i < BN; i += THREADS)
                cp_async_small<4>(stage + A + B + i * 4, (const float*)j.s + min(i, j.last) * j.blocks + c0 / 4);
    }
};

// A stage's part of M*16 x NT*8 results. A lane's weights of a chunk are eight that follow each other, its share of two products; halve.cu has put what they
// meet where `ldmatrix` finds it. Products that add to the same results are kept apart.
template <int M> __device__ __forceinline__ void multiply(const unsigned char* stage, const float* aids, float (*d)[NT][4], int m0, int n0, bool low) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const unsigned char* rows = stage + (m0 + lane % 16) * (BK * 2);
    #pragma unroll
    for (int c = 0; c < CH; c++) {
        unsigned a[M][2][4];
        #pragma unroll
        for (int m = 0; m < M; m++)
            #pragma unroll
            for (int h = 0; h < 2; h++) ldmatrix_x4(a[m][h], rows + m * 16 * (BK * 2) + ((c * 4 + h * 2 + lane / 16) ^ lane % 8) * 16);
        #pragma unroll
        for (int n = 0; n < NT; n += 2) {
            unsigned b[2][4];
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                const int r = n0 + (n + i) * 8 + g;
                const unsigned char* w = stage + A + c * BC + (r * 4 + t) * W::BYTES;
                const int block = W::SCALE < 0 ? 0 : c;
                const unsigned char* s = stage + A + B + (block * BN + r) * SC;
                W::halves(w, s, t, aids[r], low, b[i]);
            }
            #pragma unroll
            for (int h = 0; h < 2; h++)
                #pragma unroll
                for (int i = 0; i < 2; i++)
                    #pragma unroll
                    for (int m = 0; m < M; m++) mma_f16(d[m][n + i], a[m][h], b[i] + 2 * h);
        }
    }
}

// A tile whose warps have M*16 rows each: all of K through the pipeline, then `put(row of the tile, row of W in the tile, results)`.
template <int M, class F> __device__ __forceinline__ void tile(const Job& j, unsigned char* stages, F put) {
    const int warp = threadIdx.x / 32, m0 = warp / WN * MT * 16, n0 = warp % WN * NT * 8, steps = j.kp / BK * PARTS;
    float d[M][NT][4] = {};
    const Feed<M * 16 * WM> feed(j);
    #pragma unroll
    for (int i = 0; i < STAGES - 1; i++) { if (i < steps) feed(stages + i * STAGE, i); cp_async_commit(); }
    for (int i = 0; i < steps; i++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        if (i + STAGES - 1 < steps) feed(stages + (i + STAGES - 1) % STAGES * STAGE, i + STAGES - 1);
        cp_async_commit();
        const unsigned char* stage = stages + i % STAGES * STAGE;
        if (PARTS == 1) multiply<M>(stage, j.aids, d, m0, n0, false);
        else {  // tensor cores cut off what a sum has no room for, which would add up along a row: each stage is summed by itself
            float s[M][NT][4] = {};
            multiply<M>(stage, j.aids, s, m0, n0, PARTS == 3 && i >= steps / 3 * 2);
            #pragma unroll
            for (int m = 0; m < M; m++)
                #pragma unroll
                for (int n = 0; n < NT * 4; n++) d[m][n / 4][n % 4] += s[m][n / 4][n % 4];
        }
    }
    #pragma unroll
    for (int m = 0; m < M; m++)
        #pragma unroll
        for (int n = 0; n < NT; n++) put(m0 + m * 16, n0 + n * 8, d[m][n]);
}

#define BOUNDS THREADS, BLOCKS
extern "C" __global__ void __launch_bounds__(BOUNDS) gemm(const __half* __restrict__ x, const float* __restrict__ scale,
        const unsigned char* __restrict__ w, const unsigned char* __restrict__ s, const float* __restrict__ unit, const float* __restrict__ bias,
        const float* __restrict__ gate, const float* add, float* y, const int* __restrict__ order, const int* __restrict__ tiles,
        int rows, int ld, int kp, int chunks, int blocks, int n, float limit, int top, int column, int gs, int as, int ys) {
    DYNAMIC_SHARED(unsigned char, stages);
    __shared__ int   from[BM];
    __shared__ float aids[BN];
    const int n4 = (n + 3) / 4 * 4;
    const int slot = GROUPED ? blockIdx.y : 0, e = GROUPED ? tiles[slot * 3] : 0;
    if (e < 0) return;
    const int r0 = GROUPED ? tiles[slot * 3 + 1] : (int)blockIdx.x * BM, end = GROUPED ? tiles[slot * 3 + 2] : rows;
    const int n0 = (GROUPED ? blockIdx.x : blockIdx.y) * BN;
    for (int i = threadIdx.x; i < BM; i += THREADS) {
        const int r = min(r0 + i, end - 1);
        from[i] = GROUPED == 1 ? order[r] / top : r;
    }
    for (int i = threadIdx.x; i < BN; i += THREADS) aids[i] = W::aid(unit ? unit[(size_t)e * n4 + min(n0 + i, n4 - 1)] : 1.f);
    __syncthreads();
    const size_t row = (size_t)chunks * PER * 16;
    const size_t srow = W::SCALE < 0 ? (size_t)blocks * 4 : (size_t)chunks * SC;
    const size_t w0 = (size_t)e * n4 + n0;
    const Job j = {(const unsigned short*)x, w + w0 * row, s + w0 * srow, aids, from, ld, kp, chunks, blocks, (unsigned)(n4 - 1 - n0)};
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, out = PAIR ? n / 2 : n;
    const int nb = PAIR ? n4 : n;
    const float* b = bias ? bias + (size_t)e * nb : nullptr;
    const float unity = W::UNITY;
    const bool even = (out | as | ys) % 2 == 0 && (((size_t)add | (size_t)y) & 7) == 0;
    const auto store = [&](int r, int col, float p, float q) {
        if (r >= end || col >= out) return;
        const size_t row = GROUPED == 2 ? order[r] : r;
        const float* o = add ? add + row * as + col : nullptr;
        float* to = y + row * ys + col;
        if (gate) { const float f = 1.f / (1.f + expf(-gate[row * gs + column])); p *= f; q *= f; }
        if (even) {
            const float2 z = o ? *(const float2*)o : make_float2(0.f, 0.f);
            *(float2*)to = make_float2(p + z.x, q + z.y);
        } else {
            to[0] = p + (o ? o[0] : 0.f);
            if (col + 1 < out) to[1] = q + (o ? o[1] : 0.f);
        }
    };
    // Of 16 x 8 results a lane has [g][2t], [g][2t+1], [g+8][2t], [g+8][2t+1].
    const auto put = [&](int m, int c, float* d) {
        float v[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const int at = c + 2 * t + i % 2;
            v[i] = d[i] * scale[from[m + g + i / 2 * 8]] * (W::unit(aids[at]) * unity) + (b && n0 + at < nb ? b[n0 + at] : 0.f);
        }
        const int r = r0 + m + g, col = n0 + c + 2 * t;
        if (PAIR) {  // even lanes hold two gates of both rows, odd lanes the ups: each takes one row
            const bool odd = t & 1;
            const float p = __shfl_xor_sync(~0u, odd ? v[0] : v[2], 1), q = __shfl_xor_sync(~0u, odd ? v[1] : v[3], 1);
            store(r + 8 * odd, (col - 2 * odd) / 2, act_mul<ACTIVATION>(odd ? p : v[0], odd ? v[2] : p, limit), act_mul<ACTIVATION>(odd ? q : v[1], odd ? v[3] : q, limit));
        } else {
            #pragma unroll
            for (int i = 0; i < 4; i++) if (ACTIVATION != ACT_NONE) v[i] = act_mul<ACTIVATION>(v[i], 0.f, limit);
            store(r, col, v[0], v[1]);
            store(r + 8, col, v[2], v[3]);
        }
    };
#if GROUPED
    constexpr int STEP = MT > 4 ? 2 : 1;  // a tile that is not full is cut to one of four lengths
    switch ((end - r0 + 16 * STEP - 1) / (16 * STEP)) {
        case 1: tile<STEP>(j, stages, put); break;
        case 2: if constexpr (MT >= 2 * STEP) tile<2 * STEP>(j, stages, put); break;
        case 3: if constexpr (MT >= 3 * STEP) tile<3 * STEP>(j, stages, put); break;
        case 4: if constexpr (MT >= 4 * STEP) tile<4 * STEP>(j, stages, put); break;
    }
#else
    tile<MT>(j, stages, put);
#endif
}
