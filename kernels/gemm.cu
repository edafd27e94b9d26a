// y = W x for many rows, by tensor cores: x in fp16 (halve.cu), W in any format, decoded in
// registers on its way from shared memory (lib/unpack.cuh), float32 sums. The activation between
// gate and up, bias and residual are in it. One matrix for all rows, or a bank of experts, each
// with rows of its own.
//   -D FMT=     of lib/unpack.cuh
//   -D ACTIVATION=  of lib/act.cuh; all but ACT_NONE and ACT_RELU2 want rows of W in fours: two
//                   gates, two ups
//   -D PARTS=   1; 2: x in two parts, K once with each; 3: W too (f32), K once: of products of
//               first parts, and of those with one second part, each 64 columns are summed by
//               themselves, then added up. Tiles have no say in the order of sums
//   -D GROUPED= 0; 1: row of x is order[place]/top, row of y the place; 2: row of x is the place,
//               row of y order[place]
//   -D MT= NT= WM= WN= BK= STAGES=   a warp has 16*MT x 8*NT results, a block WM x WN warps, K goes
//          by BK, 64 or 128; GROUPED: WM 1, MT 1 to 8
//   -D BLOCKS=  that a multiprocessor is to hold at least
//   -D WGMMA=   0; 1: by warpgroups of Hopper (lib/wgmma.cuh). WM 1, WN in fours, NT even, MT to
//               16, STAGES from 3; PARTS 1 or 2
//   -D RING=    there, with PARTS 1, NT 2 and BK 64, not GROUPED: blocks stay and go from tile to
//               tile, so many stages of rows of x before them. 0: no, a block a tile
//   -D TURNS=   there, with PARTS 1 and NT 2: rows of x lie in shared memory whole, and each group
//               goes through so many times 64 rows of W, stages of its own; 1: no
//   launch: <<<GROUPED ? (ceil(n/BN), slots) : (ceil(xrows/BM), ceil(n/BN)), 32*WM*WN, STAGES * (A
//           + B + scales)>>>   A: two parts of x if PARTS is 3; BM = 16*MT*WM, BN = 8*NT*WN*TURNS
//           WGMMA: each stage in whole 1,024 bytes, and 1,024 more; TURNS: WN/4 * STAGES * (64 rows
//           of W and their scales) + 2*BM*kp + 1,024 RING: <<<up to as many as there are tiles or
//           multiprocessors, 32*WN + 128, RING*(128*BM + 16) + WN/2*(12*BM + 128*NT) +
//           WN/4*STAGES*(32*NT rows of W and their scales) + 1,024>>>
#include "lib/boxes.cuh"
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
#ifndef WGMMA
#define WGMMA 0
#endif
#ifndef TURNS
#define TURNS 1
#endif
#ifndef RING
#define RING 0
#endif
#define THREADS (32 * WM * WN + (RING ? 128 : 0))
using W = weights::FMT;
constexpr int BM = 16 * MT * WM;
constexpr int BN = 8 * NT * WN * TURNS;
constexpr int CH = BK / 32;
// each group fetches what it has of W
constexpr bool APIECE = TURNS > 1 || RING;
// rows of W in a stage
constexpr int BS = APIECE ? 32 * NT : BN;
// 16-byte pieces of a row's chunk
constexpr int PER = W::BYTES / 4;
// scales: bytes of a row's chunk, chunks a stage
constexpr int SC = W::SCALE < 0 ? 4 : W::SCALE;
constexpr int SCH = W::SCALE < 0 ? 1 : CH;
// bytes of a chunk of all rows of W
constexpr int BC = BS * PER * 16;
constexpr bool PAIR = ACTIVATION != ACT_NONE && ACTIVATION != ACT_RELU2;
constexpr int XPARTS = PARTS == 3 ? 2 : 1;  // parts of x in a stage
// of one, bytes of a row, and of all; no scales
constexpr int XROW = BK * 2;
constexpr int AP = BM * XROW;
constexpr int XSC = 0;
constexpr int A = APIECE ? 0 : XPARTS * AP;
constexpr int B = CH * BC;
constexpr int BYTES = A + B + SCH * SC * BS;
constexpr int STAGE = WGMMA && !APIECE ? (BYTES + 1023) / 1024 * 1024 : BYTES;
// What sums of a row of W are to be multiplied by
__device__ __forceinline__ float factor(float aid) {
    return __fmul_rn(W::unit(aid), W::UNITY);
}
static_assert(
        (BK == 64 || BK == 128) && (GROUPED == 0 || WM == 1), "see the contract");

#include "lib/tile_rows.cuh"
#if WGMMA
#include "lib/tile_groups.cuh"
#include "lib/tile_ring.cuh"
#include "lib/tile_whole.cuh"
#else
#include "lib/tile_warps.cuh"
#include "lib/finish.cuh"
#endif

#define BOUNDS THREADS, BLOCKS
// RING: registers of a thread that fetches, and of one that multiplies, of all there are
constexpr int FEWER = 24;
constexpr int ALL = 65536 / THREADS / BLOCKS / 8 * 8 * (WN / 4 + 1);
constexpr int MORE = (ALL - FEWER) / (WN / 4) / 8 * 8 < 240
        ? (ALL - FEWER) / (WN / 4) / 8 * 8
        : 240;
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
__device__ __forceinline__ unsigned char* aligned(unsigned char* p) {
#if WGMMA
    return wgmma_aligned(p);
#else
    return p;
#endif
}

// What the kernel is given, in the order of its arguments.
struct Params {
    // ld = parts * kp, and BK divides kp; columns in the order of halve.cu
    const __half* x;  // [xrows, ld] f16
    const float* scale;  // [xrows] f32: of the rows of x
    // wrows = experts * n4: rows of one expert after those of another
    const unsigned char* w;  // [wrows, bytes] u8
    const unsigned char* s;  // [scales] u8 or null: scales as packed
    const float* unit;  // [wrows] f32 or null: of the rows of W; null for ones
    // in the order of the rows of W; nb = n, of pairs with what pads them to n4
    const float* bias;  // [experts, nb] f32 or null
    // the result of a row is multiplied by the sigmoid of one of its columns
    const float* gate;  // [yrows:gs, columns] f32 or null
    const float* add;  // [yrows:as, out] f32 or null: then added, may be y
    float* y;  // [yrows:ys, out] f32: out = n, or n/2 after an activation of pairs
    // GROUPED: number of the pick at each place, sorted by expert
    const int* order;  // [picks] i32 or null
    // GROUPED: expert, first place, end of the places of a tile; expert -1: nothing to do
    const int* tiles;  // [slots, 3] i32 or null
    const TensorMap& x_map;  // RING: of x, boxes of BM rows (lib/boxes.cuh)
    int rows;  // of x
    int ld;  // numbers of a row of x
    int kp;  // columns of W, and what pads them
    int chunks;  // of 32 columns
    int blocks;  // of 128 columns
    int n;  // rows of W
    float limit;  // of the activation (lib/act.cuh)
    int top;  // picks of a row of x
    int column;  // of `gate`
    int gs;  // numbers from a row to the next: of gate
    int as;  // of add
    int ys;  // of y
};

// What follows from it.
struct Sizes {
    int n4;  // rows of W with what pads them
    int out, nb;  // results of a row, numbers of a bias
    bool whole;  // may two results of a row be written at once?
    __device__ __forceinline__ explicit Sizes(const Params& p) {
        n4 = (p.n + 3) / 4 * 4;
        out = PAIR ? p.n / 2 : p.n;
        nb = PAIR ? n4 : p.n;
        const size_t ends = (size_t)p.add | (size_t)p.y;
        whole = (out | p.as | p.ys) % 2 == 0 && (ends & 7) == 0;
    }
};

#if RING
// What a group must know of a tile to write its results.
__device__ __forceinline__ void learn_tile(
        const Params& p, const About& about, const Tiles& t, int n4) {
    for (int i = threadIdx.x % 128; i < BM; i += 128) {
        const int at = t.row() + i;
        const int r = min(at, p.rows - 1);
        const float g = p.gate ? p.gate[(size_t)r * p.gs + p.column] : 0.f;
        about.to[i] = at < p.rows ? r : -1;
        about.by[i] = p.scale[r];
        about.gated[i] = p.gate ? 1.f / (1.f + expf(-g)) : 1.f;
    }
    const int i = threadIdx.x % BS;
    const int row = min(t.n0() + i, n4 - 1);
    about.aids[i] = W::aid(p.unit ? p.unit[row] : 1.f);
}

// By one thread for each stage of the ring: who waits there for whom.
__device__ __forceinline__ void begin_ring(const Shared& all) {
    if (threadIdx.x < RING) {
        meet_init(all.full + threadIdx.x, 1);
        meet_init(all.empty + threadIdx.x, WN);
        meet_ready();
    }
}

// A block that stays: one thread fetches rows of x for all of its tiles, and groups of four warps
// multiply them.
__device__ __forceinline__ void make_tiles(
        const Params& p, unsigned char* stages) {
    const Sizes sizes(p);
    const int group = threadIdx.x / 128;
    const unsigned char* const x = (const unsigned char*)p.x;
    const unsigned last = sizes.n4 - 1;
    const Job j = {x, nullptr, p.w, p.s, nullptr, nullptr, p.ld / 8, p.chunks,
            p.blocks, p.kp / BK, last};
    unsigned char* const own = stages + RING * XSTAGE;
    const Shared all = {stages, (Meeting*)own, (Meeting*)own + RING};
    begin_ring(all);
    __syncthreads();
    const Tiles t(p.n, p.rows);
    if (group == WN / 4) {
        wgmma_registers_down<FEWER>();
        if (threadIdx.x % 128 == 0)
            fetch_rows(all, t, j.steps, p.x_map);
        return;
    }
    wgmma_registers_up<MORE>();
    const auto learn = [&](const About& about, const Tiles& t) {
        learn_tile(p, about, t, sizes.n4);
    };
    const auto put = [&](const About& about, const Tiles& t, int row,
                             float (&d)[BM / 2]) {
        const Put to = {about.aids, p.bias, p.add, p.y, about.by, about.gated,
                about.to, t.n0(), sizes.out, sizes.nb, p.as, p.ys, p.limit,
                p.gate != nullptr, sizes.whole};
        to(row, d);
    };
    unsigned char* const abouts = own + 16 * RING + group * 2 * About::BYTES;
    unsigned char* const mine = own + 16 * RING + WN / 2 * About::BYTES
            + group * STAGES * STAGE;
    Group<decltype(learn), decltype(put)> g(all, t, j, mine, abouts, learn, put);
    while (!g.t.over()) {
        Tiles after = g.t;
        after.next();
        g.tile(after);
    }
}
#else
// Whose rows a block's tile has.
struct TileRows {
    int e;  // expert, or -1: nothing to do
    int r0, end;  // rows, or places
    int n0;  // the first row of W
    __device__ __forceinline__ explicit TileRows(const Params& p) {
        // an expert that all share is last, and long
        const int slot = GROUPED ? gridDim.y - 1 - blockIdx.y : 0;
        e = GROUPED ? p.tiles[slot * 3] : 0;
        if (e < 0)
            return;
        r0 = GROUPED ? p.tiles[slot * 3 + 1] : (int)blockIdx.x * BM;
        end = GROUPED ? p.tiles[slot * 3 + 2] : p.rows;
        n0 = (GROUPED ? blockIdx.x : blockIdx.y) * BN;
    }
};

// What a tile multiplies: all of W's rows from n0 of expert e on.
__device__ __forceinline__ Job job_of(
        const Params& p, int e, int n0, int n4, const float* aids,
        const int* from) {
    const size_t row = (size_t)p.chunks * PER * 16;
    const size_t srow = W::SCALE < 0 ? (size_t)p.blocks * 4
                                     : (size_t)p.chunks * SC;
    const size_t w0 = (size_t)e * n4 + n0;
    const int steps = p.kp / BK * (PARTS == 2 ? 2 : 1);
    return {(const unsigned char*)p.x, nullptr, p.w + w0 * row, p.s + w0 * srow,
            aids, from, p.ld / 8, p.chunks, p.blocks, steps,
            (unsigned)(n4 - 1 - n0)};
}

// A block that makes one tile.
__device__ __forceinline__ void make_tile(
        const Params& p, unsigned char* stages) {
    __shared__ int from[BM];  // row of x of each row of the tile
    __shared__ __align__(8) int to[BM];  // and of y; -1: nobody wants it
    __shared__ __align__(8) float by[BM], gated[BM];  // its scale, and its gate
    __shared__ __align__(16) float aids[BN];
    const Sizes sizes(p);
    const TileRows at(p);
    if (at.e < 0)
        return;
    name_rows(from, to, p.order, at.r0, at.end, p.top);
    __syncthreads();
    const auto meanwhile = [&] {
        learn_factors(
                by, gated, aids, from, to, p.scale, p.gate, p.unit, p.gs,
                p.column, at.e, at.n0, sizes.n4);
    };
    const Job j = job_of(p, at.e, at.n0, sizes.n4, aids, from);
    const size_t first = (size_t)at.e * sizes.nb;
    const float* const b = p.bias ? p.bias + first : nullptr;
#if WGMMA
    const Put put = {aids, b, p.add, p.y, by, gated, to, at.n0, sizes.out,
            sizes.nb, p.as, p.ys, p.limit, p.gate != nullptr, sizes.whole};
#else
    const Finish f = {aids, b, p.add, p.y, by, gated, to, at.n0, sizes.out,
            sizes.nb, p.as, p.ys, p.limit, p.gate != nullptr};
    const auto put = [&](int m, int c, float (*d)[4]) {
        finish<ACTIVATION, NT>(f, m, c, d);
    };
#endif
#if GROUPED
    switch ((at.end - at.r0 + STEP - 1) / STEP) { CUTS }
#else
    tile<MOST / WM>(j, stages, meanwhile, put);
#endif
}
#endif

extern "C" __global__ void __launch_bounds__(BOUNDS) gemm(
        const __half* __restrict__ x, const float* __restrict__ scale,
        const unsigned char* __restrict__ w, const unsigned char* __restrict__ s,
        const float* __restrict__ unit, const float* __restrict__ bias,
        const float* __restrict__ gate, const float* add, float* y,
        const int* __restrict__ order, const int* __restrict__ tiles,
        const __grid_constant__ TensorMap x_map, int rows, int ld, int kp,
        int chunks, int blocks, int n, float limit, int top, int column, int gs,
        int as, int ys) {
    const Params p = {x, scale, w, s, unit, bias, gate, add, y, order, tiles,
            x_map, rows, ld, kp, chunks, blocks, n, limit, top, column, gs, as,
            ys};
    DYNAMIC_SHARED(unsigned char, memory);
    unsigned char* const stages = WGMMA ? aligned(memory) : memory;
#if RING
    make_tiles(p, stages);
#else
    make_tile(p, stages);
#endif
}
