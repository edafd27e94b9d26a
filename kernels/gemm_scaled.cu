// y = W x for many rows, by tensor cores, in fewer bits than gemm.cu: x in NVFP4 or FP8
// (narrow.cu), W as it is stored. In NVFP4 both sides go to tensor cores with their scales (NVFP4
// and MXFP4 weights); in FP8 a weight is made e4m3 on its way from shared memory (NVFP4, MXFP4,
// rounded) or is so (FP8). The rest is as in gemm.cu.
//   x     : [xrows, bytes]        u8    codes, in the order of narrow.cu: of kp columns, and 128
//                                       divides kp
//   xs    : [xrows, sixteens]     u8    NVFP4: e4m3 scales; or null
//   scale : [xrows]               f32   of the rows of x
//   w     : [wrows, wbytes]       u8    wrows = experts * n4: rows of one expert after those of
//                                       another
//   s     : [scales]              u8    scales as packed; or null
//   unit  : [wrows]               f32   of the rows of W; or null for ones
//   bias  : [experts, nb]         f32   in the order of the rows of W; nb = n, of pairs with what
//                                       pads them to n4; or null
//   gate  : [yrows:gs, columns]   f32   the result of a row is multiplied by the sigmoid of one of
//                                       its columns; or null
//   add   : [yrows:as, out]       f32   then added, may be y; or null
//   y     : [yrows:ys, out]       f32   out = n, or n/2 after an activation of pairs
//   order : [picks]               i32   GROUPED: number of the pick at each place, sorted by
//                                       expert; or null
//   tiles : [slots, 3]            i32   GROUPED: expert, first place, end of the places of a tile;
//                                       expert -1: nothing to do; or null
//   -D FMT=     nvfp4, mxfp4; fp8, fp8_block only with FP8
//   -D FP8=  1: x is FP8, 0: NVFP4 (sm_120a, sm_121a)
//   -D ACTIVATION= GROUPED= MT= NT= WN= STAGES= WGMMA= BLOCKS=   as in gemm.cu; a block is WN warps
//                  side by side, K goes by 128; WGMMA only with FP8
//   launch: <<<GROUPED ? (ceil(n/BN), slots) : (ceil(xrows/BM), ceil(n/BN)), 32*WN, STAGES * (A +
//        B)>>>   with their scales; BM = 16*MT, BN = 8*NT*WN; with WGMMA a stage is a multiple of
//        1,024, and 1,024 more
#include "lib/act.cuh"
#include "lib/mma.cuh"
#include "lib/mma_narrow.cuh"
#include "lib/narrow.cuh"
#ifndef FMT
#define FMT nvfp4
#endif
#ifndef FP8
#define FP8 0
#endif
#ifndef ACTIVATION
#define ACTIVATION ACT_NONE
#endif
#ifndef GROUPED
#define GROUPED 0
#endif
#ifndef MT
#define MT 4
#endif
#ifndef NT
#define NT 4
#endif
#ifndef WN
#define WN 4
#endif
#ifndef STAGES
#define STAGES 3
#endif
#ifndef WGMMA
#define WGMMA 0
#endif
#ifndef BLOCKS
#define BLOCKS 1
#endif
#define PARTS 1
#define WM 1
#define THREADS (32 * WN)
using W = weights::FMT;
using Narrow = narrow_weights::FMT;
constexpr int BK = 128;
constexpr int CH = BK / 32;
constexpr int BM = 16 * MT;
constexpr int BN = 8 * NT * WN;
// of a row of x in a stage: bytes, scales
constexpr int XROW = FP8 ? BK : BK / 2;
constexpr int XSC = FP8 ? 0 : BK / 16;
constexpr int XPARTS = 1, AP = BM * XROW;
// of a row's chunk: pieces; bytes of all rows'
constexpr int PER = W::BYTES / 4;
constexpr int BS = BN;
constexpr int BC = BS * PER * 16;
constexpr bool TILED = W::SCALE < 0;  // a scale for 128 columns of W
constexpr bool PAIR = ACTIVATION != ACT_NONE && ACTIVATION != ACT_RELU2;
constexpr int SC = TILED ? 4 : W::SCALE, SCH = TILED ? 1 : CH;
constexpr int A = AP + BM * XSC;
constexpr int B = CH * BC;
constexpr int BYTES = A + B + SCH * SC * BN;
constexpr int STAGE = WGMMA ? (BYTES + 1023) / 1024 * 1024 : BYTES;
static_assert(FP8 || W::BYTES == 4, "NVFP4 multiplies weights of four bits");
static_assert(FP8 || !WGMMA, "products of warpgroups know no NVFP4");
// What sums of a row of W are to be multiplied by
__device__ __forceinline__ float factor(float aid) {
    return TILED ? 1.f
                 : __fmul_rn(W::unit(aid), FP8 ? Narrow::BACK : Narrow::BACK4);
}
#include "lib/tile_rows.cuh"
#if WGMMA
#include "lib/tile_groups.cuh"
#else
#include "lib/feed.cuh"
#include "lib/finish.cuh"
constexpr int KS = FP8 ? CH : CH / 2;  // products along K in a stage

// What a warp multiplies at once: 16*M rows of x, 8*NT of W, and of NVFP4 their scales.
template <int M> struct Fragments {
    unsigned a[M][4], b[NT][2], sa[(M + 1) / 2], sb[(NT + 3) / 4];
    // the k-th of a stage; n0: the warp's first row of W
    __device__ __forceinline__ void load(
            const unsigned char* stage, int k, int n0, const Job& j) {
        const int lane = threadIdx.x % 32;
        const int g = lane / 4;
        const int t = lane % 4;
        #pragma unroll
        for (int m = 0; m < M; m++)
            ldmatrix_x4(
                    a[m],
                    stage
                            + place_in_row<XROW>(
                                    m * 16 + lane % 16, k * 2 + lane / 16));
        const unsigned char *w = stage + A, *s = w + B;
        #pragma unroll
        for (int n = 0; n < NT; n++) {
            const int row = n0 + n * 8 + g;
            if (FP8) {
                const unsigned char* scale = s
                        + ((TILED ? 0 : k) * BN + row) * SC;
                Narrow::eight(
                        w + k * BC + (row * 4 + t) * W::BYTES, scale, t,
                        j.aids[row], b[n]);
            } else
                #pragma unroll
                for (int h = 0; h < 2; h++)
                    b[n][h] = plain_e2m1(*(const unsigned*)(w + (k * 2 + h) * BC
                            + (row * 4 + t) * 4));
        }
        if (FP8)
            return;
        #pragma unroll
        for (int i = 0; i < (M + 1) / 2; i++) {
            const int row = min(2 * i + t / 2, M - 1) * 16 + t % 2 * 8 + g;
            sa[i] = *(const unsigned*)(stage + AP + row * XSC + k * 4);
        }
        #pragma unroll
        for (int i = 0; i < (NT + 3) / 4; i++) {
            const int row = n0 + min(4 * i + t, NT - 1) * 8 + g;
            unsigned two[2];
            #pragma unroll
            for (int h = 0; h < 2; h++)
                two[h] = Narrow::scale(
                        s + ((k * 2 + h) * BN + row) * SC, j.aids[row]);
            sb[i] = two[0] | two[1] << 16;
        }
    }
    __device__ __forceinline__ void multiply(float (*d)[NT][4]) const {
        #pragma unroll
        for (int n = 0; n < NT; n++)
            #pragma unroll
            for (int m = 0; m < M; m++)
                if (FP8)
                    mma_e4m3(d[m][n], a[m], b[n]);
                else
                    mma_e2m1(
                            d[m][n], a[m], b[n], sa[m / 2], m % 2, sb[n / 4],
                            n % 4);
    }
};

// Results of 16*M rows: all of K through the pipeline. Fragments of the next product are read while
// this one is multiplied.
template <int M, class F, class G>
__device__ __forceinline__ void tile(
        const Job& j, unsigned char* stages, F meanwhile, G put) {
    const int n0 = threadIdx.x / 32 * NT * 8;
    Feed<M * 16> feed(j);
    #pragma unroll
    for (int i = 0; i < STAGES - 1; i++)
        feed(stages + i * STAGE);
    meanwhile();
    cp_async_wait<STAGES - 2>();
    __syncthreads();
    Fragments<M> f[2];
    f[0].load(stages, 0, n0, j);
    float d[M][NT][4] = {};
    int at = 0;
    for (int i = 0; i < j.steps; i++) {
        float own[TILED ? M : 1][NT][4] = {};
        const int ahead = at + 1 == STAGES ? 0 : at + 1;
        const int done = at == 0 ? STAGES - 1 : at - 1;
        const float* scales = (const float*)(stages + at * STAGE + A + B);
        float by[TILED ? NT : 1][2];
        #pragma unroll
        for (int n = 0; n < (TILED ? NT : 0); n++)
            #pragma unroll
            for (int h = 0; h < 2; h++)
                by[n][h] = scales[n0 + n * 8 + threadIdx.x % 4 * 2 + h];
        #pragma unroll
        for (int k = 0; k < KS; k++) {
            const bool end = k == KS - 1;
            if (end) {
                cp_async_wait<STAGES - 2>();
                __syncthreads();
            }
            f[(k + 1) % 2].load(
                    stages + (end ? ahead : at) * STAGE, (k + 1) % KS, n0, j);
            f[k % 2].multiply(TILED ? own : d);
            if (k == 0)
                feed(stages + done * STAGE);
        }
        #pragma unroll
        for (int v = 0; v < (TILED ? M * NT * 4 : 0); v++) {
            const int m = v / (NT * 4), n = v / 4 % NT;
            float& sum = d[m][n][v % 4];
            sum = fmaf(
                    own[TILED ? m : 0][n][v % 4], by[TILED ? n : 0][v % 2], sum);
        }
        at = ahead;
    }
    #pragma unroll
    for (int m = 0; m < M; m++)
        put(m * 16, n0, d[m]);
}
#endif

// rows by which a tile that is not full is cut
constexpr int STEP = WGMMA ? 8 : 16;
constexpr int MOST = BM / STEP;
__host__ __device__ constexpr int cut(int m) {
    return WGMMA && m <= MOST / 2 ? (m + 1) / 2 * 2 : m;
}
#define CUT(m) \
    case m: \
        if constexpr (m <= MOST) \
            tile<cut(m)>(j, stages, meanwhile, put); \
        break;
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gemm_scaled(
        const unsigned char* __restrict__ x, const unsigned char* __restrict__ xs,
        const float* __restrict__ scale, const unsigned char* __restrict__ w,
        const unsigned char* __restrict__ s, const float* __restrict__ unit,
        const float* __restrict__ bias, const float* __restrict__ gate,
        const float* add, float* y, const int* __restrict__ order,
        const int* __restrict__ tiles, int rows, int kp, int chunks, int blocks,
        int n, float limit, int top, int column, int gs, int as, int ys) {
    DYNAMIC_SHARED(unsigned char, memory);
#if WGMMA
    unsigned char* const stages = wgmma_aligned(memory);
#else
    unsigned char* const stages = memory;
#endif
    __shared__ int from[BM];  // row of x of each row of the tile
    __shared__ __align__(8) int to[BM];  // and of y; -1: nobody wants it
    __shared__ __align__(8) float by[BM], gated[BM];  // its scale, and its gate
    __shared__ __align__(16) float aids[BN];  // of rows of W (lib/unpack.cuh)
    const int n4 = (n + 3) / 4 * 4;
    const int slot = GROUPED ? blockIdx.y : 0;
    const int e = GROUPED ? tiles[slot * 3] : 0;
    if (e < 0)
        return;
    const int r0 = GROUPED ? tiles[slot * 3 + 1] : (int)blockIdx.x * BM;
    const int end = GROUPED ? tiles[slot * 3 + 2] : rows;
    const int n0 = (GROUPED ? blockIdx.x : blockIdx.y) * BN;
    name_rows(from, to, order, r0, end, top);
    __syncthreads();
    const auto meanwhile = [&] {
        learn_factors(
                by, gated, aids, from, to, scale, gate, unit, gs, column, e, n0,
                n4);
    };
    const size_t row = (size_t)chunks * PER * 16;
    const size_t w0 = (size_t)e * n4 + n0;
    const size_t srow = TILED ? (size_t)blocks * 4 : (size_t)chunks * SC;
    const int steps = kp / BK, line = steps * (XROW / 16);
    const Job j = {x, xs, w + w0 * row, s + w0 * srow, aids, from, line, chunks,
            blocks, steps, (unsigned)(n4 - 1 - n0)};
    const int out = PAIR ? n / 2 : n, nb = PAIR ? n4 : n;
    const float* b = bias ? bias + (size_t)e * nb : nullptr;
#if WGMMA
    const bool whole = (out | as | ys) % 2 == 0
            && (((size_t)add | (size_t)y) & 7) == 0;
    const Put put = {aids, b, add, y, by, gated, to, n0, out, nb, as, ys, limit,
            gate != nullptr, whole};
#else
    const Finish f = {aids, b, add, y, by, gated, to, n0, out, nb, as, ys, limit,
            gate != nullptr};
    const auto put = [&](int m, int c, float (*d)[4]) {
        finish<ACTIVATION, NT>(f, m, c, d);
    };
#endif
#if GROUPED
    switch ((end - r0 + STEP - 1) / STEP) { CUTS }
#else
    tile<MOST>(j, stages, meanwhile, put);
#endif
}
