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
//   -D PARTS=   1; 2: x in two parts, K once with each; 3: W too (f32), K once: of products of first parts, and of those with one second part, each 64
//               columns are summed by themselves, then added up. Tiles have no say in the order of sums
//   -D GROUPED= 0; 1: row of x is order[place]/top, row of y the place; 2: row of x is the place, row of y order[place]
//   -D MT= NT= WM= WN= BK= STAGES=   a warp has 16*MT x 8*NT results, a block WM x WN warps, K goes by BK, 64 or 128; GROUPED: WM 1, MT 1 to 8
//   -D SPAN=    tiles side by side that a block has, one after the other, in one pipeline
//   -D BLOCKS=  that a multiprocessor is to hold at least
//   launch: <<<GROUPED ? (ceil(n/(SPAN*BN)), slots) : (ceil(xrows/BM), ceil(n/(SPAN*BN))), 32*WM*WN, STAGES * (A + B + scales)>>>   A: two parts of x if PARTS is 3; BM = 16*MT*WM, BN = 8*NT*WN
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
#ifndef SPAN
#define SPAN 1
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
constexpr int XPARTS = PARTS == 3 ? 2 : 1, AP = BM * BK * 2;         // parts of x in a stage, bytes of one
constexpr int A = XPARTS * AP, B = CH * BC, STAGE = A + B + SCH * SC * BN;
static_assert((BK == 64 || BK == 128) && (GROUPED == 0 || WM == 1), "see the contract");

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
    const unsigned char *w, *s;  // of the first row of W in the block's first tile
    const float* aids;           // of the block's columns (lib/unpack.cuh), in shared memory
    const int* from;             // row of x of each row of the tile, in shared memory
    int ld, kp, chunks, blocks;  // blocks: scales of a row, fp8_block
    int steps, tiles;            // along K; tiles of columns that the block has
    unsigned last;               // the last row of W there is, counted from the first of the first tile
};

// Brings what a step along K needs into a stage: each thread the same piece of every so manieth
// row; step after step, tile after tile. Beyond W's last row nothing is read: what lies in the stage
// gives results that nobody keeps, and were the last row read again and again by all blocks, one
// slice of the L2 cache would be all they wait for. Its last chunk is read again and meets zeros of x.
template <int ROWS> struct Feed {
    static constexpr unsigned XP = CH * 4, WP = CH * PER;              // pieces of a row
    static constexpr unsigned XS = THREADS / XP, WS = THREADS / WP;    // rows that all threads bring at once
    static constexpr int OWN = (ROWS + XS - 1) / XS;
    static_assert(THREADS % XP == 0 && THREADS % WP == 0 && BN % WS == 0, "whole rows");
    static_assert(XS % 8 == 0, "the same place of all rows");
    const Job& j;
    int step = 0, tile = 0;
    unsigned at[OWN];  // where the pieces of x begin, in sixteens of bytes
    __device__ __forceinline__ Feed(const Job& job) : j(job) {
        #pragma unroll
        for (int i = 0; i < OWN; i++) {
            const unsigned row = min(threadIdx.x / XP + i * XS, ROWS - 1u);
            at[i] = (unsigned)j.from[row] * (j.ld / 8) + threadIdx.x % XP;
        }
    }
    __device__ __forceinline__ void rows(unsigned char* stage, const unsigned short* x, bool on) const {
        const unsigned row = threadIdx.x / XP, piece = threadIdx.x % XP;
        unsigned char* to = stage + row * BK * 2 + (piece ^ row % 8) * 16;  // so that neither writing nor reading meets a bank twice
        #pragma unroll
        for (int i = 0; i < OWN; i++) {
            const bool real = ROWS % XS == 0 || row + i * XS < ROWS;
            cp_async_if<16>(to + i * XS * BK * 2, (const unsigned char*)x + (size_t)at[i] * 16, on && real);
        }
    }
    __device__ __forceinline__ void weights(unsigned char* stage, int c0, bool on) const {
        const unsigned tid = threadIdx.x, row = tid / WP, piece = tid % WP, chunk = piece / PER;
        const unsigned n0 = tile * BN, c = min(c0 + (int)chunk, j.chunks - 1);
        const unsigned char* w = j.w + c * (PER * 16) + piece % PER * 16;
        unsigned char* to = stage + A + chunk * BC + row * PER * 16 + piece % PER * 16;
        #pragma unroll
        for (int i = 0; i < BN / WS; i++) {
            const unsigned r = n0 + row + i * WS;
            cp_async_if<16>(to + i * WS * PER * 16, w + (size_t)(r * (j.chunks * PER)) * 16, on && r <= j.last);
        }
        if (W::SCALE > 0)  // those of four rows lie together
            #pragma unroll
            for (unsigned i = 0; i < BN / 4 * CH; i += THREADS) {
                const unsigned p = i + tid, q = min(n0 / 4 + p / CH, j.last / 4);
                const unsigned c = min(c0 + (int)(p % CH), j.chunks - 1);
                cp_async_if<SC ? SC * 4 : 4>(stage + A + B + (p % CH * BN + p / CH * 4) * SC,
                    j.s + (size_t)(q * j.chunks + c) * 4 * SC, on && p < BN / 4 * CH);
            }
        if (W::SCALE < 0)
            #pragma unroll
            for (unsigned i = 0; i < BN; i += THREADS) {
                const unsigned p = i + tid, r = min(n0 + p, j.last);
                cp_async_if<4>(stage + A + B + p * 4, (const float*)j.s + r * j.blocks + c0 / 4, on && p < BN);
            }
    }
    __device__ __forceinline__ void operator()(unsigned char* stage) {
        const bool on = tile < j.tiles;
        const int steps = j.kp / BK, part = PARTS == 2 && step >= steps, k = (step - part * steps) * BK;
        #pragma unroll
        for (int i = 0; i < XPARTS; i++) rows(stage + i * AP, j.x + (part + i) * j.kp + k, on);
        weights(stage, k / 32, on);
        const bool more = step + 1 < j.steps;
        step = more ? step + 1 : 0;
        tile += !more;
        cp_async_commit();
    }
};

// Fragments of M*16 rows and 16 columns, the h-th of a stage.
template <int M> __device__ __forceinline__ void load(const unsigned char* stage, int m0, int h, unsigned (*a)[4]) {
    const int lane = threadIdx.x % 32;
    const unsigned char* rows = stage + (m0 + lane % 16) * (BK * 2) + ((h * 2 + lane / 16) ^ lane % 8) * 16;
    #pragma unroll
    for (int m = 0; m < M; m++) ldmatrix_x4(a[m], rows + m * 16 * (BK * 2));
}
// A lane's weights of row r and chunk c of a stage: eight that follow each other, its share of two
// products. halve.cu has put what they meet where `ldmatrix` finds it.
__device__ __forceinline__ void decode(const unsigned char* stage, int c, int r, float aid, bool low, unsigned* b) {
    const int t = threadIdx.x % 4;
    const unsigned char* w = stage + A + c * BC + (r * 4 + t) * W::BYTES;
    const unsigned char* s = stage + A + B + ((W::SCALE < 0 ? 0 : c) * BN + r) * SC;
    W::halves(w, s, t, aid, low, b);
}

// Tiles side by side whose warps have M*16 rows each: all of K through the pipeline, then
// `put(row of the tile, row of W in the block, 16 x NT*8 results)`; `meanwhile` before anything has come. While sixteen columns are multiplied,
// the fragments of the next sixteen are read and decoded; the pipeline never ends between tiles.
template <int M, class F, class G> __device__ __forceinline__ void tile(const Job& j, unsigned char* stages, F meanwhile, G put) {
    constexpr int KS = BK / 16, LOW = PARTS == 3;
    const int warp = threadIdx.x / 32, m0 = warp / WN * MT * 16, n0 = warp % WN * NT * 8;
    const int r = n0 + threadIdx.x % 32 / 4;
    Feed<M * 16 * WM> feed(j);
    #pragma unroll
    for (int i = 0; i < STAGES - 1; i++) feed(stages + i * STAGE);
    meanwhile();
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    unsigned a[2][XPARTS][M][4], b[1 + LOW][NT][4];
    #pragma unroll
    for (int x = 0; x < XPARTS; x++) load<M>(stages + x * AP, m0, 0, a[0][x]);
    #pragma unroll
    for (int n = 0; n < NT; n++)
        #pragma unroll
        for (int l = 0; l < 1 + LOW; l++) decode(stages, 0, r + n * 8, j.aids[r + n * 8], l, b[l][n]);
    unsigned char *stage = stages, *done = stages + (STAGES - 1) * STAGE;  // that of this step, and of the one before
    for (int q = 0; q < j.tiles; q++) {
        float d[M][NT][4] = {};
        for (int i = 0; i < j.steps; i++) {
            // Tensor cores cut off what a sum has no room for, which would add up along a row: of
            // products in parts each stage is summed by itself, and small products by themselves.
            float own[PARTS == 1 ? 1 : M][NT][4] = {}, small[LOW ? M : 1][NT][4] = {};
            unsigned char* const ahead = stage == stages + (STAGES - 1) * STAGE ? stages : stage + STAGE;
            const float* aids = j.aids + (i + 1 < j.steps || q + 1 == j.tiles ? q : q + 1) * BN;
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
                for (int x = 0; x < XPARTS; x++) load<M>(source + x * AP, m0, next, a[next % 2][x]);
                #pragma unroll
                for (int n = 0; n < NT; n++) {
                    #pragma unroll
                    for (int m = 0; m < M; m++) mma_f16(PARTS == 1 ? d[m][n] : own[PARTS == 1 ? 0 : m][n], a[k % 2][0][m], b[0][n] + k % 2 * 2);
                    #pragma unroll
                    for (int m = 0; m < M * LOW; m++) mma_f16(small[LOW ? m : 0][n], a[k % 2][LOW][m], b[0][n] + k % 2 * 2);
                    #pragma unroll
                    for (int m = 0; m < M * LOW; m++) mma_f16(small[LOW ? m : 0][n], a[k % 2][0][m], b[LOW][n] + k % 2 * 2);
                    if (k + n == 0) feed(done);
                    if (k % 2)
                        #pragma unroll
                        for (int l = 0; l < 1 + LOW; l++)
                            decode(source, next / 2, r + n * 8, (end ? aids : j.aids + q * BN)[r + n * 8], l, b[l][n]);
                }
            }
            done = stage;
            stage = ahead;
            if (PARTS > 1)
                #pragma unroll
                for (int v = 0; v < M * NT * 4; v++) {
                    const int m = v / (NT * 4), n = v / 4 % NT;
                    const float low = LOW ? small[LOW ? m : 0][n][v % 4] : 0.f;
                    d[m][n][v % 4] += own[PARTS == 1 ? 0 : m][n][v % 4] + low;
                }
        }
        #pragma unroll
        for (int m = 0; m < M; m++) put(m0 + m * 16, q * BN + n0, d[m]);
    }
}

#define BOUNDS THREADS, BLOCKS
extern "C" __global__ void __launch_bounds__(BOUNDS) gemm(const __half* __restrict__ x, const float* __restrict__ scale,
        const unsigned char* __restrict__ w, const unsigned char* __restrict__ s, const float* __restrict__ unit, const float* __restrict__ bias,
        const float* __restrict__ gate, const float* add, float* y, const int* __restrict__ order, const int* __restrict__ tiles,
        int rows, int ld, int kp, int chunks, int blocks, int n, float limit, int top, int column, int gs, int as, int ys) {
    DYNAMIC_SHARED(unsigned char, stages);
    __shared__ int   from[BM], to[BM];  // of a row of the tile: row of x, and of y; -1: nobody wants it
    __shared__ float by[BM];            // its scale
    __shared__ __align__(16) float aids[SPAN * BN];
    const int n4 = (n + 3) / 4 * 4;
    const int slot = GROUPED ? blockIdx.y : 0, e = GROUPED ? tiles[slot * 3] : 0;
    if (e < 0) return;
    const int r0 = GROUPED ? tiles[slot * 3 + 1] : (int)blockIdx.x * BM, end = GROUPED ? tiles[slot * 3 + 2] : rows;
    const int n0 = (GROUPED ? blockIdx.x : blockIdx.y) * (SPAN * BN);
    for (int i = threadIdx.x; i < BM; i += THREADS) {
        const int r = min(r0 + i, end - 1), named = GROUPED ? order[r] : r;
        from[i] = GROUPED == 1 ? named / top : r;
        to[i] = r0 + i >= end ? -1 : GROUPED == 2 ? named : r;
    }
    __syncthreads();
    const auto meanwhile = [&] {
        for (int i = threadIdx.x; i < BM; i += THREADS) by[i] = scale[from[i]];
        for (int i = threadIdx.x; i < SPAN * BN; i += THREADS)
            aids[i] = W::aid(unit ? unit[(size_t)e * n4 + min(n0 + i, n4 - 1)] : 1.f);
    };
    const size_t row = (size_t)chunks * PER * 16;
    const size_t srow = W::SCALE < 0 ? (size_t)blocks * 4 : (size_t)chunks * SC;
    const size_t w0 = (size_t)e * n4 + n0;
    const int steps = kp / BK * (PARTS == 2 ? 2 : 1), own = min(SPAN, (n4 - n0 + BN - 1) / BN);
    const Job j = {(const unsigned short*)x, w + w0 * row, s + w0 * srow, aids, from, ld, kp, chunks, blocks,
                   steps, own, (unsigned)(n4 - 1 - n0)};
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4, odd = t & 1;
    const int out = PAIR ? n / 2 : n, nb = PAIR ? n4 : n;
    const float* b = bias ? bias + (size_t)e * nb : nullptr;
    const float unity = W::UNITY;
    constexpr int WIDTH = PAIR ? 2 : 4;  // results of a lane that lie together
    const bool whole = (out | as | ys) % WIDTH == 0 && (((size_t)add | (size_t)y) & (WIDTH * 4 - 1)) == 0;
    // Of 16 x 8 results a lane has [g][2t], [g][2t+1], [g+8][2t], [g+8][2t+1]: it gives two away, so
    // that an even lane has four in a row of the upper eight rows, an odd one of the lower. Of pairs
    // these are two gates and their ups.
    const auto put = [&](int m, int c, float (*d)[4]) {
        const int at = m + g + 8 * odd, r = to[at];
        const float mine = by[at];
        const float f = gate && r >= 0 ? 1.f / (1.f + expf(-gate[(size_t)r * gs + column])) : 1.f;
        float* const yr = y + (size_t)max(r, 0) * ys;
        const float* const ar = add + (size_t)max(r, 0) * as;
        #pragma unroll
        for (int i = 0; i < NT; i++) {
            const float p = __shfl_xor_sync(~0u, odd ? d[i][0] : d[i][2], 1), q = __shfl_xor_sync(~0u, odd ? d[i][1] : d[i][3], 1);
            float v[4] = {odd ? p : d[i][0], odd ? q : d[i][1], odd ? d[i][2] : p, odd ? d[i][3] : q};
            const int col = c + i * 8 + t / 2 * 4;
            const float4 a = *(const float4*)(aids + col);
            #pragma unroll
            for (int k = 0; k < 4; k++) {
                v[k] = __fmul_rn(v[k], mine);
                const float u = __fmul_rn(W::unit((&a.x)[k]), unity);
                v[k] = fmaf(v[k], u, b && n0 + col + k < nb ? b[n0 + col + k] : 0.f);
            }
            if (PAIR) {
                v[0] = act_mul<ACTIVATION>(v[0], v[2], limit);
                v[1] = act_mul<ACTIVATION>(v[1], v[3], limit);
            } else if (ACTIVATION != ACT_NONE)
                #pragma unroll
                for (int k = 0; k < 4; k++) v[k] = act_mul<ACTIVATION>(v[k], 0.f, limit);
            if (gate)
                #pragma unroll
                for (int k = 0; k < WIDTH; k++) v[k] *= f;
            const int o = (n0 + col) / (4 / WIDTH);
            if (r < 0 || o >= out) continue;
            if (!whole) {
                for (int k = 0; k < WIDTH && o + k < out; k++) yr[o + k] = v[k] + (add ? ar[o + k] : 0.f);
            } else if (PAIR) {
                const float2 z = add ? *(const float2*)(ar + o) : make_float2(0.f, 0.f);
                *(float2*)(yr + o) = make_float2(v[0] + z.x, v[1] + z.y);
            } else {
                const float4 z = add ? *(const float4*)(ar + o) : make_float4(0.f, 0.f, 0.f, 0.f);
                *(float4*)(yr + o) = make_float4(v[0] + z.x, v[1] + z.y, v[2] + z.z, v[3] + z.w);
            }
        }
    };
#if GROUPED
    switch ((end - r0 + 15) / 16) {  // a tile that is not full is cut
        case 1: tile<1>(j, stages, meanwhile, put); break;
        case 2: if constexpr (MT >= 2) tile<2>(j, stages, meanwhile, put); break;
        case 3: if constexpr (MT >= 3) tile<3>(j, stages, meanwhile, put); break;
        case 4: if constexpr (MT >= 4) tile<4>(j, stages, meanwhile, put); break;
        case 5: if constexpr (MT >= 5) tile<5>(j, stages, meanwhile, put); break;
        case 6: if constexpr (MT >= 6) tile<6>(j, stages, meanwhile, put); break;
        case 7: if constexpr (MT >= 7) tile<7>(j, stages, meanwhile, put); break;
        case 8: if constexpr (MT >= 8) tile<8>(j, stages, meanwhile, put); break;
    }
#else
    tile<MT>(j, stages, meanwhile, put);
#endif
}
