// Rows of x, normed with its gain, as gemv_wide.cu multiplies them, and what the norm leaves to it:
// once for all blocks. The bits are those that gemv.cu makes of each row by itself: the same powers
// of two, and squares that are added up in the order of its warps.
// PICKS: rows of x are what experts of the layer before found, added up as in expert_sum.cu.
//   -D FORMAT= EXTRA= K= NORM= GROUP= PARTS= W= SPLIT=   as for gemv.cu
//   -D CORES= as for gemv_wide.cu
//   -D PICKS= 0, or of a row, with NORM 1
//   launch: <<<(rows, NORM 1: 1, else any), 32 * (NORM 1: W, else 8)>>>
#include "lib/tiles.cuh"
#include "lib/pdl.cuh"
#include "lib/reduce.cuh"
#ifndef FORMAT
#define FORMAT fragment_nvfp4
#endif
#ifndef K
#define K 2048
#endif
#ifndef NORM
#define NORM 1
#endif
#ifndef GROUP
#define GROUP 128
#endif
#ifndef PARTS
#define PARTS 4
#endif
#ifndef W
#define W 12
#endif
#ifndef SPLIT
#define SPLIT 4
#endif
#ifndef CORES
#define CORES 0
#endif
#ifndef PICKS
#define PICKS 0
#endif
constexpr int C = (K + 31) / 32;
constexpr int B = (C + 3) / 4;
constexpr int SEGMENTS = (K + 255) / 256;
// warps of gemv.cu that have squares of a row
constexpr int SLOTS = SEGMENTS < W ? SEGMENTS : W;
constexpr int WARPS = NORM == 1 ? W : 8;
typedef FORMAT<C> Main;
// Does a warp of gemv.cu stage what it multiplies, by 128 columns? Then it adds up those squares.
constexpr bool OWN = SPLIT == W && Main::UNITS == 1;
static_assert(!PICKS || (NORM == 1 && K % 32 == 0), "see the contract");

// What the kernel is given.
struct Params {
    float* x;  // [rows, k] f32; PICKS: where their sums go to
    const float* gain;  // [k] f32 or null: NORM 1
    // NORM 2: sums of squares of each GROUP of x
    const float* parts;  // [rows, heads, p] f32 or null
    // tiles of rows (lib/tiles.cuh), line = tiles * bytes
    unsigned char* halves;  // [units, line] u8
    unsigned char* more;  // [parcels, ld] u8 or null: the same for EXTRA
    // NORM 1: 1/rms; then that for EXTRA, whose squares are added up in another order
    float* inverse;  // [both, rows] f32 or null
    // PICKS, this and what follows: as for expert_sum.cu
    const float* share;  // [rows, picks] f32 or null
    const float* part;  // [rows, picks, k] f32 or null
    const float* add;  // [rows, k] f32 or null: may be x
    float eps;  // of the norm
    int rows;
    int tiles;  // of halves
    int early;  // 1 if blocks are there long before their rows, with PICKS; else 0
};

__device__ __forceinline__ void load_x(const float* p, int v, float* a) {
    if (K % 8 == 0 && v < K / 8)
        load8(p + v * 8, a);
    else
        for (int i = 0; i < 8; i++)
            a[i] = v * 8 + i < K ? p[v * 8 + i] : 0.f;
}
__device__ __forceinline__ float add_squares(const float* a, float sum) {
    #pragma unroll
    for (int j = 0; j < 8; j++)
        sum = fmaf(a[j], a[j], sum);
    return sum;
}
__device__ __forceinline__ float sum_of_parts(const float* q) {
    float z = q[0];
    #pragma unroll
    for (int j = 1; j < PARTS; j++)
        z += q[j];
    return z;
}
template <class F, bool CORED = false>
__device__ __forceinline__ void put(
        unsigned char* to, int tiles, int row, int b, int e, const float* a,
        unsigned char* aside) {
    const size_t tile = (size_t)(b / F::UNITS) * tiles + row / 8;
    const bool in = b < (B + F::UNITS - 1) / F::UNITS * F::UNITS;
    typedef Tile<F, CORED> T;
    T::put(aside ? aside : to + tile * T::BYTES, row % 8, b % F::UNITS, e, a, in);
}
// Eight numbers of a row: what its picks found, one `hop` behind the other, weighted, and what is
// added to that.
__device__ __forceinline__ void sum_of_picks(
        const float* share, const float* part, size_t hop, const float* add,
        float* a) {
    constexpr int MANY = PICKS ? PICKS : 1;
    float w[MANY];
    float b[8] = {};
    float sum[8] = {};
    float4 found[MANY][2];
    if (add)
        load8(add, b);
    #pragma unroll
    for (int p = 0; p < PICKS; p++) {
        w[p] = __ldcg(share + p);
        #pragma unroll
        for (int i = 0; i < 2; i++)
            found[p][i] = __ldcg((const float4*)(part + p * hop) + i);
    }
    #pragma unroll
    for (int p = 0; p < PICKS; p++)
        #pragma unroll
        for (int j = 0; j < 8; j++)
            sum[j] = fmaf(w[p], (&found[p][j / 4].x)[j % 4], sum[j]);
    #pragma unroll
    for (int j = 0; j < 8; j++)
        a[j] = b[j] + sum[j];
}
// Loaded here, and not where it is first used.
__device__ __forceinline__ void now(float* v) {
#if defined(__CUDA_ARCH__)
    #pragma unroll
    for (int i = 0; i < 8; i++)
        asm volatile("" : "+f"(v[i]));
#endif
}
// The squares of warp `slot` of gemv.cu, where each has every W-th 128 columns.
__device__ __forceinline__ float own_squares(const float* x, int slot, int lane) {
    float sum = 0.f;
    for (int b = slot + lane / 16 * W; b < B; b += 2 * W) {
        float a[8];
        load_x(x, b * 16 + lane % 16, a);
        sum = add_squares(a, sum);
    }
    return warp_sum(sum);
}

// With no number of blocks asked for, ptxas has loads of picks wait for each other.
#define BLOCKS (PICKS ? 1 : 0)
#ifdef EXTRA
constexpr int MORE = Tile<EXTRA<C>>::BYTES;
constexpr bool BOTH = true;  // sums go two ways
#else
constexpr int MORE = 0;
constexpr bool BOTH = false;
#endif
// One over the root of the mean square of a row, whose warps' sums are `squares`.
__device__ __forceinline__ float inverse_of(
        const float (&squares)[W], float eps) {
    float z = 0.f;
    #pragma unroll
    for (int j = 0; j < W; j++)
        z += squares[j];
    return rsqrtf(fmaf(z, 1.f / K, eps));
}

// What a warp has of a row: every `step`-th 256 columns from `from` on, eight for each lane.
struct Share {
    int row, lane, from, step;
    int e;  // which eight of 128 are the lane's
};

// What a pass over a row writes. Not `live`: the row is not there yet, and nobody wants that.
struct Pass {
    bool live;
    float4 *to, *kept;  // the row: for others, and for this block
    unsigned char* aside;  // in place of its tiles; or null
};

// Columns 8v to 8v + 7 of the sum of a row's picks and what they are added to. Not `live`, gains in
// place of all that is read.
__device__ __forceinline__ void take_picks(
        const float* __restrict__ gain, const float* share, const float* part,
        const float* add, int row, int v, bool live, float (&a)[8]) {
    const size_t first = (size_t)row * PICKS;
    const float* w = gain;
    const float* p = gain;
    const float* more = add ? gain : add;
    if (live) {
        w = share + first;
        p = part + first * K + v * 8;
        if (add)
            more = add + (size_t)row * K + v * 8;
    }
    sum_of_picks(w, p, live ? K : 0, more, a);
}

// Eight columns of a group that is normed by itself, of whose squares others left sums.
__device__ __forceinline__ void norm_group(
        const float* parts, float eps, float (&a)[8]) {
    float z = sum_of_parts(parts);
    z = rsqrtf(fmaf(z, 1.f / GROUP, eps));
    #pragma unroll
    for (int j = 0; j < 8; j++)
        a[j] = __fmul_rn(a[j], z);
}

// Eight columns get their gains; the sum of squares is without.
__device__ __forceinline__ float weigh(
        float (&a)[8], const float (&g)[8], float sum) {
    sum = add_squares(a, sum);
    #pragma unroll
    for (int j = 0; j < 8; j++)
        a[j] = __fmul_rn(a[j], g[j]);
    return sum;
}

// Eight columns of a row go where it is written, and stay.
__device__ __forceinline__ void keep(
        const Pass& pass, int v, const float (&a)[8]) {
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const float4 four = make_float4(
                a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3]);
        pass.kept[2 * v + i] = four;
        pass.to[2 * v + i] = four;
    }
}

// Eight columns of a row go to its tiles, for the matrix and for EXTRA; or, both, `aside`.
__device__ __forceinline__ void put_halves(
        const Params& p, int row, int b, int e, const float (&a)[8],
        unsigned char* aside) {
    put<Main, CORES>(p.halves, p.tiles, row, b, e, a, aside);
#ifdef EXTRA
    put<EXTRA<C>>(p.more, p.tiles, row, b, e, a, aside);
#endif
}

// A warp's share of a row is loaded, normed and put. Returns a lane's sum of squares. `g`: gains of
// the first eight columns of it.
__device__ __forceinline__ float make_share(
        const Params& p, const Share& w, const Pass& pass, const float* x,
        float (&g)[8]) {
    float sum = 0.f;
    #pragma unroll 1
    for (int u = w.from; u < SEGMENTS; u += w.step) {
        const int b = 2 * u + w.lane / 16;
        const int v = b * 16 + w.e;
        const bool in = v * 8 < K;
        float a[8] = {};
        if (PICKS && in) {
            take_picks(p.gain, p.share, p.part, p.add, w.row, v, pass.live, a);
            keep(pass, v, a);
        } else if (in)
            load_x(x, v, a);
        if (NORM == 1) {
            if (u != w.from)
                load_x(p.gain, v, g);
            sum = weigh(a, g, sum);
        }
        if (NORM == 2 && in) {
            const size_t group = (size_t)w.row * (K / GROUP) + v * 8 / GROUP;
            norm_group(p.parts + group * PARTS, p.eps, a);
        }
        put_halves(p, w.row, b, w.e, a, pass.aside);
    }
    return sum;
}

// A warp's sums of squares: of what it has made, and, where gemv.cu adds up in another order, of
// what the warp of that number has there.
__device__ __forceinline__ void put_squares(
        float (*squares)[W], float sum, const float* x, int warp, int lane) {
    sum = warp_sum(sum);
    if (!lane)
        squares[0][warp] = sum;  // beyond SLOTS nothing
    if (OWN || BOTH) {
        if (PICKS)
            __syncthreads();
        const float z = own_squares(x, warp, lane);
        if (!lane)
            squares[1][warp] = z;
    }
}

__device__ constexpr int most(int a, int b) { return a > b ? a : b; }
// for a row, or a tile
constexpr int ROOM = most(
        K / 4, (most(Tile<Main, CORES>::BYTES, MORE) + 15) / 16);
extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS) gemv_halves(
        float* x, const float* __restrict__ gain, const float* parts,
        unsigned char* halves, unsigned char* more, float* inverse,
        const float* share, const float* part, const float* add, float eps,
        int rows, int tiles, int early) {
    const Params p = {x, gain, parts, halves, more, inverse, share, part, add,
            eps, rows, tiles, early};
    __shared__ float squares[2][W];
    __shared__ float4 kept[PICKS ? ROOM : 1];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int row = blockIdx.x;
    const int warps = NORM == 1 ? SLOTS : WARPS;
    const int from = warp < warps ? blockIdx.y * warps + warp : SEGMENTS;
    const int step = gridDim.y * warps;
    const Share w = {row, lane, from, step, lane % 16};
    float* const mine = x + (size_t)row * K;
    float g[8] = {};
    pdl_trigger();
    if (NORM == 1 && from < SEGMENTS) {
        load_x(gain, from * 32 + lane, g);
        now(g);
    }
    // `early`: a block that is there long before its row goes through its work once without it,
    // with gains in place of all it reads. A launch finds its instructions in no cache, and whoever
    // waits has time to fetch them.
    #pragma unroll 1
    for (int left = PICKS ? early : 0; left >= 0; left--) {
        const bool live = !left;
        unsigned char* const aside = live ? nullptr : (unsigned char*)kept;
        float4* const to = live ? (float4*)mine : kept;
        const Pass pass = {live, to, kept, aside};
        if (live)
            pdl_wait();
        const float sum = make_share(p, w, pass, mine, g);
        if (NORM != 1)
            return;
        const float* const made = PICKS ? (const float*)kept : mine;
        put_squares(squares, sum, made, warp, lane);
        __syncthreads();
        if (threadIdx.x <= BOTH) {
            const float z = inverse_of(squares[OWN || threadIdx.x], eps);
            if (live)
                inverse[(size_t)threadIdx.x * rows + row] = z;
        }
        if (!live)
            __syncthreads();
    }
}
