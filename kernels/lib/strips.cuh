#pragma once
// Strips: sixteen rows of a matrix, times up to eight rows of x by tensor cores, in the one order
// that all kernels of a mixture of experts have, so that a row's bits are the same from each.
// A strip's columns are units of lib/fragment.cuh. Share s of SPLIT has units s, s + SPLIT, ... one
// after the other; shares are added in order, from 0 on; then come the norm, the row's scale and
// its bias.
#include "lib/fragment.cuh"
#include "lib/warps.cuh"

// How COLS columns of a strip are shared, by MOST warps (a power of two) at most.
template <class F, int COLS, int MOST> struct Shares {
    // units
    static constexpr int N = (COLS + 128 * F::UNITS - 1) / (128 * F::UNITS);
    static constexpr int SPLIT = MOST >= 4 && N >= 4 ? 4
            : MOST >= 2 && N >= 2                    ? 2
                                                     : 1;
    static __device__ __forceinline__ int of(int share) {
        return (N - 1 - share) / SPLIT + 1;
    }
    static constexpr int MOST_OF = (N - 1) / SPLIT + 1;  // that a share has
    // Who has the last unit, and is there nothing in its second half?
    static constexpr int LAST = (N - 1) % SPLIT;
    static constexpr bool SHORT = F::UNITS == 2 && (COLS + 127) / 128 % 2;
};

// The columns of a strip in one piece.
template <class S> struct Whole {
    static constexpr int SPLIT = 1;
    static __device__ __forceinline__ int of(int) { return S::N; }
};

// MANY rows of COLS numbers in shared memory, as F multiplies them: zeros beyond the end. Rows that
// were never put may hold anything, as long as nobody needs their products.
template <class F, int COLS, int MANY> struct StagedRows {
    static constexpr int N = (COLS + 128 * F::UNITS - 1) / (128 * F::UNITS);
    static constexpr int HELD = (N * F::UNITS + 1) / 2 * 2;  // 128s of a row
    // what a warp puts at a time: 256s
    static constexpr int PARTS = HELD / 2;
    typedef Staged<F, 4 * HELD> S;
    static constexpr int LD = S::LD, PLANE = MANY * S::LDR;
    uint4 at[S::PLANES * PLANE];
    float e[MANY][HELD];
    // Columns 8v to 8v + 7 of a row; sixteen lanes, every STEP-th of a warp, have 128, or nothing.
    template <int STEP = 1>
    __device__ __forceinline__ void put(int row, int v, const float* a) {
        uint4* const to = at + row * S::LDR + v % 4 * LD + v / 4;
        if (F::TWO)
            return split8(a, to[0], to[PLANE]);
        float top = top8(a);
        #pragma unroll
        for (int m = STEP; m < 16 * STEP; m *= 2)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
        const float2 f = chunk_scale(top);
        *to = F::CROSSED ? to_half8_crossed(a, f.x) : to_half8(a, f.x);
        if (v % 16 == 0)
            e[row][v / 16] = f.y;
    }
    // What a lane reads of a row from the unit `unit` on; the next unit is 4 * F::UNITS further.
    __device__ __forceinline__ const uint4* of(int row, int unit, int t) const {
        return at + row * S::LDR + 4 * F::UNITS * unit + F::template own<LD>(t);
    }
};

// The same number, of which the compiler knows nothing: found before a loop, it stays in a register
// and is not found again in each round; found in a loop, the other way around.
template <bool HIDE = true> __device__ __forceinline__ int opaque(int v) {
#if defined(__CUDA_ARCH__)
    if (HIDE)
        asm volatile("" : "+r"(v));
#endif
    return v;
}

// A lane's part in copying a strip's units to shared memory: sixteen bytes of some rows, and some
// scales. Rows are ones below each other with RUNS, so that few addresses will do; else those of
// neighbouring lanes. What depends on the lane alone is found once, and kept in registers if there
// are enough: with KEEP 1 most of it, with 2 all.
template <class F, class S, int KEEP, bool RUNS> struct Copies {
    typedef typename F::L L;
    static constexpr int MANY = 16 / L::AT_ONCE;
    static constexpr int STEP = RUNS ? 1 : L::AT_ONCE;
    // `column`: in sixteens of bytes, of the first unit
    int row, column, to[2], scales;
    __device__ __forceinline__ Copies(int share, int lane) {
        row = lane / L::PER * (RUNS ? MANY : 1);
        column = opaque<(KEEP > 0)>(share * L::PER + lane % L::PER);
        to[0] = opaque<(KEEP > 0)>(L::place(row, lane % L::PER));
        to[1] = opaque<(KEEP > 1)>(to[0] ^ 64);  // where pairs of rows are odd
        scales = 0;
        if constexpr (F::CHUNKS)
            scales = opaque<(KEEP > 0)>(F::copied(lane));
    }
    // where the lane's part of a strip is, of which the first row is `from`; four rows further
    // SLINE
    __device__ __forceinline__ void first(
            Bytes& w, Bytes& s, unsigned from, int share, int lane) const {
        Bytes unused = w;
        F::first(unused, s, 0, share, lane);
        s += (size_t)(from / 4) * F::SLINE;
        w += (size_t)from * F::LINE + row * F::LINE + column * 16;
    }
    // Unit `step` of a share, of which `rows` rows are there. `jump`: bytes between its upper and
    // lower eight rows, unless there are RUNS: then `w` is where the lane's are
    __device__ __forceinline__ void fetch(
            unsigned char* place, Bytes w, Bytes s, int rows, int step, int share,
            int lane, long long jump) const {
        const bool in = F::LINE % F::LB == 0
                || step * (S::SPLIT * L::PER) + column < F::LINE / 16;
        #pragma unroll
        for (int i = 0; i < MANY; i++) {
            const int r = i * STEP;  // fours of rows are there, or not
            cp_async16_or_zero(
                    place + to[r / 2 % 2] + r * F::LB,
                    w + r * F::LINE + (!RUNS && r >= 8 ? jump : 0),
                    in && (RUNS ? row + r / 4 * 4 : r) < rows);
        }
        if constexpr (F::CHUNKS)
            cp_async_or_zero<F::FOUR>(
                    place + scales, s, in && lane / 8 * 4 < rows);
        else
            F::fetch_scales(place, s, rows, step * S::SPLIT + share, lane);
    }
};

// Where a lane finds in a unit what it multiplies.
template <class F, int KEEP> struct Spots {
    int g, t;
    __device__ __forceinline__ Spots(int g_, int t_) : g(g_), t(t_) {}
    __device__ __forceinline__ void read(
            F& q, const unsigned char* place, int b) const {
        q.read(place, b, g, t);
    }
};
template <class F, int C, int KEEP> struct Spots<Fragment<F, C, 16>, KEEP> {
    typedef Fragment<F, C, 16> Q;
    int words[Q::UNITS], scales[Q::UNITS];
    __device__ __forceinline__ Spots(int g, int t) {
        words[0] = opaque<(KEEP > 0)>(Q::words_at(0, g, t));
        scales[0] = opaque<(KEEP > 0)>(Q::scales_at(0, g, t));
        #pragma unroll
        for (int b = 1; b < Q::UNITS;
                b++) {  // four sixteens further, exchanged or not
            words[b] = opaque<(KEEP > 1)>(words[0] ^ 64);
            scales[b] = F::SCALE == 1
                    ? scales[0] + 16
                    : opaque<(KEEP > 1)>(scales[0] ^ 4 * Q::FOUR);
        }
    }
    __device__ __forceinline__ void read(
            Q& q, const unsigned char* place, int b) const {
        q.read_there(place + words[b], place + scales[b]);
    }
};

// acc += a unit of W, or the first `half` of it, times what a lane's `x` points to, which is a row
// of X for column l/4 of the product; e0, e1: powers of two of its columns 2t, 2t + 1. acc[j]: row
// 2g + j/2, column 2t + j%2.
template <class F, class X>
__device__ __forceinline__ void multiply(
        const unsigned char* place, float* acc, const uint4* x, const float* e0,
        const float* e1, int g, int t, bool half = false) {
    #pragma unroll
    for (int b = 0; b < F::UNITS; b++) {
        if (b && half)
            break;
        F q;
        q.read(place, b, g, t);
        float d[2][4] = {};
        q.template dot<X::LD, X::PLANE>(d, x + 4 * b);
        #pragma unroll
        for (int j = 0; j < 2; j++) {
            const float f = F::TWO ? 1.f : j ? e1[b] : e0[b];
            const float low = F::SCALED ? __fmul_rn(f, q.scale(0)) : f;
            const float high = F::SCALED ? __fmul_rn(f, q.scale(1)) : f;
            acc[j] = fmaf(d[0][j] + d[1][j], low, acc[j]);
            acc[2 + j] = fmaf(d[0][2 + j] + d[1][2 + j], high, acc[2 + j]);
        }
    }
}

// A unit's blocks of which the first MADE quarters have become registers of a tensor core, before
// anybody knows what they are to be multiplied by; of formats of four bits.
template <class F, int MADE> struct Made {
    F blocks[F::UNITS];
    unsigned made[MADE][8];
    __device__ __forceinline__ void decode() {  // blocks that have been read
        #pragma unroll
        for (int i = 0; i < MADE; i++) {
            typename F::Aids f;
            blocks[i / 4].aids(f);
            blocks[i / 4].piece(f, i % 4, made[i]);
        }
    }
    // d[0] + d[1] += block b times x
    template <class X>
    __device__ __forceinline__ void dot(
            float (*d)[4], int b, const uint4* x) const {
        typename F::Aids f;
        if (MADE < 4 * b + 4)
            blocks[b].aids(f);
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            unsigned a[F::LENGTH];
            const bool had = 4 * b + i < MADE;
            if (!had)
                blocks[b].piece(f, i, a);
            const uint4 v = x[i * X::LD];
            F::times(d, had ? made[had ? 4 * b + i : 0] : a, v, v);
        }
    }
};
template <class F> struct Made<F, 0> {
    F blocks[F::UNITS];
    __device__ __forceinline__ void decode() {}
};

// `multiply` with such a unit.
template <class F, class X, int MADE>
__device__ __forceinline__ void multiply_made(
        const Made<F, MADE>& unit, float* acc, const uint4* x, const float* e0,
        const float* e1) {
    #pragma unroll
    for (int b = 0; b < F::UNITS; b++) {
        const F& q = unit.blocks[b];
        float d[2][4] = {};
        unit.template dot<X>(d, b, x + 4 * b);
        #pragma unroll
        for (int j = 0; j < 2; j++) {
            const float f = j ? e1[b] : e0[b];
            const float low = F::SCALED ? __fmul_rn(f, q.scale(0)) : f;
            const float high = F::SCALED ? __fmul_rn(f, q.scale(1)) : f;
            acc[j] = fmaf(d[0][j] + d[1][j], low, acc[j]);
            acc[2 + j] = fmaf(d[0][2 + j] + d[1][2 + j], high, acc[2 + j]);
        }
    }
}

// The same with what a lane reads found before; of columns only the first counts if there is ONE.
template <class F, class X, bool ONE, class At>
__device__ __forceinline__ void multiply(
        const unsigned char* place, float* acc, const uint4* x, const float* e0,
        const float* e1, const At& spots, bool half = false) {
    #pragma unroll
    for (int b = 0; b < F::UNITS; b++) {
        if (b && half)
            break;
        F q;
        spots.read(q, place, b);
        float d[2][4] = {};
        q.template dot<X::LD, X::PLANE>(d, x + 4 * b);
        #pragma unroll
        for (int j = 0; j < (ONE ? 1 : 2); j++) {
            const float f = F::TWO ? 1.f : j ? e1[b] : e0[b];
            const float low = F::SCALED ? __fmul_rn(f, q.scale(0)) : f;
            const float high = F::SCALED ? __fmul_rn(f, q.scale(1)) : f;
            acc[j] = fmaf(d[0][j] + d[1][j], low, acc[j]);
            acc[2 + j] = fmaf(d[0][2 + j] + d[1][2 + j], high, acc[2 + j]);
        }
    }
}

// What `multiply` would add up of a unit, for whom adds it up in order: of each 128 columns and
// rows 2g, 2g + 1, for columns 0, or 1 if `second`, of the product, the sum and what it is to be
// multiplied by. Lanes whose t is 0 have that.
template <class F, class X, class At>
__device__ __forceinline__ void multiply_apart(
        const unsigned char* place, float4 (*to)[8], const uint4* x,
        const float* e, const At& spots, bool second, int g, int t) {
    #pragma unroll
    for (int b = 0; b < F::UNITS; b++) {
        F q;
        spots.read(q, place, b);
        float d[2][4] = {};
        q.template dot<X::LD, X::PLANE>(d, x + 4 * b);
        const float f = F::TWO ? 1.f : e[b];
        const float low = F::SCALED ? __fmul_rn(f, q.scale(0)) : f;
        const float high = F::SCALED ? __fmul_rn(f, q.scale(1)) : f;
        const float v = second ? d[0][1] + d[1][1] : d[0][0] + d[1][0];
        const float w = second ? d[0][3] + d[1][3] : d[0][2] + d[1][2];
        if (!t)
            to[b][g] = make_float4(v, low, w, high);
    }
}

// What a warp found, [16 rows of W][R rows of x].
template <int R>
__device__ __forceinline__ void put_part(
        float (*part)[R], const float* acc, int g, int t) {
    #pragma unroll
    for (int j = 0; j < 4; j++)
        if (2 * t + j % 2 < R)
            part[2 * g + j / 2][2 * t + j % 2] = acc[j];
}
// The sum of what SPLIT warps that follow each other found.
template <int SPLIT, int R>
__device__ __forceinline__ float sum_parts(
        const float (*part)[16][R], int line, int column) {
    float v = 0.f;
    #pragma unroll
    for (int m = 0; m < SPLIT; m++)
        v += part[m][line][column];
    return v;
}
