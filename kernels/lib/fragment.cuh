#pragma once
// Sixteen rows of weights, 128 columns of them at a time, times up to eight rows of x by tensor
// cores: a row's result is the same whatever the other rows are. Lane l, with g = l/4 and t = l%4,
// holds rows 2g and 2g+1 of the sixteen: rows g and g+8 of the tensor core's A. Which of the 128
// columns stand where in A is free as long as B agrees, so each lane reads sixteen bytes that lie
// together, and never exchanges any. A warp copies a unit of weights at a time to shared memory,
// whole lines of 128 bytes or more of each row; a unit is UNITS times 128 columns.
//   first(w, s, row, u, l)        where what lane l copies of unit u of rows `row`.. begins,
//                                 weights and scales; a unit on is LB and SB bytes on, four rows on
//                                 4*LINE and SLINE
//   fetch(at, w, s, rows, u, l)   copy the unit to `at`, of which `rows` rows are there; zeros for
//                                 columns beyond the end. `jump`: bytes between its upper and lower
//                                 eight rows
//   read(at, b, g, t)             128 columns, the b-th of the unit, in registers
//   aids(f)                       what `piece` wants to know of the block
//   piece(f, i, a)                the i-th quarter of the block's columns, as registers of A
//   times(d, a, x, low)           d[0] + d[1] += rows 2g (two of four), 2g+1 times columns 2t, 2t+1
//                                 of B; of these the lane's sixteen bytes, and of TWO planes those
//                                 of the lower
//   dot(d, x)                     all four; `x`: own(t) further than this block of row g of x
//                                 (Staged)
//   put(x, r, e, v)               v, which are columns 8e.. of row r of eight, where lanes find
//                                 them side by side: lane l the i-th sixteen bytes in x[32*i + l]
//   place(r, e)                   where: i of x[i]; of formats with one plane
//   scale(i)                      what the sums of row 2g+i of this block are to be multiplied by,
//                                 if SCALED
//   row_scale(s, gs, row)         and those of a whole row; row_raw what that reads
//                                 (lib/formats.cuh)
// CROSSED: x in the order of to_half8_crossed.
// A NaN among x stays in its own row.
#include "lib/async.cuh"
#include "lib/formats.cuh"
#include "lib/mma.cuh"

// LB bytes of each of 16 rows in shared memory, copied by a warp 512 bytes at a time. Sixteens of
// bytes are exchanged by fours so that reads have no bank conflicts.
template <int LB, unsigned LINE> struct Lines {
    static constexpr int BYTES = 16 * LB;
    static constexpr int PER = LB / 16;
    static constexpr int AT_ONCE = 512 / LB;
    static __device__ __forceinline__ int place(int row, int c) {
        return row * LB + (c ^ row / 2 % 2 * 4) * 16;
    }
    static __device__ __forceinline__ const unsigned char* first(
            const unsigned char* w, size_t row, int u, int l) {
        return w + (row + l / PER) * LINE + u * LB + l % PER * 16;
    }
    static __device__ __forceinline__ void fetch(
            unsigned char* at, const unsigned char* p, int rows, int u, int l,
            long long jump) {
        const bool in = LINE % LB == 0 || u * PER + l % PER < LINE / 16;
        #pragma unroll
        for (int i = 0; i < 16 / AT_ONCE; i++)
            cp_async16_or_zero(
                    at + place(i * AT_ONCE + l / PER, l % PER),
                    p + i * AT_ONCE * LINE + (i * AT_ONCE < 8 ? 0 : jump),
                    in && i * AT_ONCE < rows);
    }
    static __device__ __forceinline__ uint4 get(
            const unsigned char* at, int row, int c) {
        return *(const uint4*)(at + place(row, c));
    }
};

// Eight numbers as bf16, and as bf16 what that left of them.
__device__ __forceinline__ unsigned bf16_pair(float a, float b) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const unsigned*>(&v);
}
__device__ __forceinline__ void split8(const float* v, uint4& high, uint4& low) {
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned h = bf16_pair(v[2 * i], v[2 * i + 1]);
        (&high.x)[i] = h;
        (&low.x)[i] = bf16_pair(
                v[2 * i] - bf16_low(h), v[2 * i + 1] - bf16_high(h));
    }
}

// Rows of x in shared memory, for F and CP chunks: eights of 16 bits each, eight i of chunk c of
// row r in at[r*LDR + i*LD + c]; no bank conflicts, neither when written nor when read. F::TWO: two
// planes of bf16; else fp16 times a power of two for each 128 that brings the largest magnitude
// into [2^14, 2^15).
template <class F, int CP> struct Staged {
    static_assert(CP % 8 == 0, "a warp stages eight chunks");
    static constexpr int LD = CP + 2;
    static constexpr int LDR = 4 * LD + (8 + F::SKEW - 4 * LD % 8) % 8;
    static constexpr int PLANES = F::TWO ? 2 : 1;
};

// acc += the two sums of a block, times f.x and f.y: what columns 2t, 2t+1 of B are to be
// multiplied by.
template <class F>
__device__ __forceinline__ void fold(
        const F& q, float* acc, const float (*d)[4], float2 f) {
    #pragma unroll
    for (int j = 0; j < 2; j++) {
        const float by = j ? f.y : f.x;
        acc[j] = fmaf(
                d[0][j] + d[1][j], F::SCALED ? __fmul_rn(by, q.scale(0)) : by,
                acc[j]);
        acc[2 + j] = fmaf(
                d[0][2 + j] + d[1][2 + j],
                F::SCALED ? __fmul_rn(by, q.scale(1)) : by, acc[2 + j]);
    }
}
// acc += a block of W times its columns of up to R rows of x, in two sums that do not wait for each
// other.
template <class F, int R, int LD, int PLANE>
__device__ __forceinline__ void add(
        const F& q, float* acc, const uint4* x, const float* e, int t) {
    float d[2][4] = {};
    q.template dot<LD, PLANE>(d, x);
    #pragma unroll
    for (int j = 0; j < 2; j++) {
        const float f = F::TWO ? 1.f : e[min(2 * t + j, R - 1)];
        acc[j] = fmaf(
                d[0][j] + d[1][j], F::SCALED ? __fmul_rn(f, q.scale(0)) : f,
                acc[j]);
        acc[2 + j] = fmaf(
                d[0][2 + j] + d[1][2 + j],
                F::SCALED ? __fmul_rn(f, q.scale(1)) : f, acc[2 + j]);
    }
}

// The same, where the first `have` quarters of the block's columns are registers of A already; of
// formats of four bits.
template <class F, int R, int LD>
__device__ __forceinline__ void add_made(
        const F& q, int have, const unsigned (*made)[8], float* acc,
        const uint4* x, const float* e, int t) {
    float d[2][4] = {};
    typename F::Aids f;
    if (have < 4)
        q.aids(f);
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        unsigned a[F::LENGTH];
        if (i >= have)
            q.piece(f, i, a);
        F::times(d, i < have ? made[i] : a, x[i * LD], x[i * LD]);
    }
    fold(q, acc, d, make_float2(e[min(2 * t, R - 1)], e[min(2 * t + 1, R - 1)]));
}

// A unit of format F in shared memory: sixteen rows of codes, then the scales of their chunks, or
// of 128 columns of each row.
template <class F, int C> struct Unit {
    static constexpr int SKEW = F::CHUNK < 64 ? 64 / F::CHUNK : 1;
    static constexpr int UNITS = F::CHUNK < 32 ? 32 / F::CHUNK : 1;
    static constexpr int KB = (C + 3) / 4;
    // bytes of the scales of four rows and a chunk
    static constexpr int FOUR = 4 * F::SCALE;
    static constexpr int LB = 4 * UNITS * F::CHUNK;
    static constexpr int SB = F::TILE ? 4 : 4 * UNITS * FOUR;
    static constexpr int BYTES = 16 * LB + 16 * UNITS * FOUR + 64 * F::TILE;
    static constexpr unsigned LINE = F::CHUNK * C;
    static constexpr unsigned SLINE = F::TILE ? 16 * KB : FOUR * C;
    // have chunks scales?
    static constexpr bool TWO = F::TWO, CHUNKS = F::SCALE > 0;
    static constexpr bool FOUR_BITS = F::CHUNK == 16;
    typedef Lines<LB, LINE> L;
    // where the scales of four rows and a chunk are, if they have two bytes and more: exchanged by
    // fours as the codes of `Lines` are
    static __device__ __forceinline__ int place(int four, int c) {
        const int odd = F::SCALE == 4 ? four % 2 : four / 2;
        return L::BYTES + four * 32 * F::SCALE + (c ^ odd * 4) * FOUR;
    }
    // where those that lane l copies are
    static __device__ __forceinline__ int copied(int l) {
        return F::SCALE == 1 ? L::BYTES + l * 4 : place(l / 8, l % 8);
    }
    static __device__ __forceinline__ void first(
            Bytes& p, Bytes& q, size_t row, int u, int l) {
        p = L::first(p, row, u, l);
        if (F::SCALE)
            q += (row / 4 + l / 8) * SLINE + u * SB + l % 8 * FOUR;
        if (F::TILE)
            q += ((row + l % 16) * KB + u) * 4;
    }
    static __device__ __forceinline__ void fetch(
            unsigned char* at, Bytes p, Bytes q, int rows, int u, int l,
            long long jump = 0) {
        L::fetch(at, p, rows, u, l, jump);
        fetch_scales(at, q, rows, u, l);
    }
    static __device__ __forceinline__ void fetch_scales(
            unsigned char* at, Bytes q, int rows, int u, int l) {
        if constexpr (F::SCALE > 0)
            cp_async_or_zero<FOUR>(
                    at + copied(l), q,
                    l / 8 * 4 < rows && (C % 8 == 0 || 8 * u + l % 8 < C));
        if (F::TILE && l < 16)
            cp_async_or_zero<4>(at + L::BYTES + l * 4, q, l < rows);
    }
    static __device__ __forceinline__ float row_scale(
            Bytes s, const float* gs, size_t row) {
        return F::row_scale(s, gs, row);
    }
    static __device__ __forceinline__ float row_raw(
            Bytes s, const float* gs, size_t row) {
        return F::row_raw(s, gs, row);
    }
};

template <class F, int C, int CHUNK = F::CHUNK> struct Fragment;

template <class F, int C> struct Fragment<F, C, 16> : Unit<F, C> {  // four bits
    typedef Unit<F, C> U;
    static constexpr bool CROSSED = F::CROSSED, SCALED = F::Pair::SCALED;
    uint4 w[2];
    typename F::Pair s;
    template <int LD> static __device__ __forceinline__ int own(int t) {
        return t;
    }
    // where in a unit a lane finds its first row's part of block b, and the scales of both rows
    static __device__ __forceinline__ int words_at(int b, int g, int t) {
        return U::L::place(2 * g, 4 * b + t);
    }
    static __device__ __forceinline__ int scales_at(int b, int g, int t) {
        return (F::SCALE == 1 ? U::L::BYTES + (g / 2 * 8 + 4 * b + t) * 4
                              : U::place(g / 2, 4 * b + t))
                + g % 2 * (2 * F::SCALE);
    }
    __device__ __forceinline__ void read(
            const unsigned char* at, int b, int g, int t) {
        w[0] = U::L::get(at, 2 * g, 4 * b + t);
        w[1] = U::L::get(at, 2 * g + 1, 4 * b + t);
        s.read(at + scales_at(b, g, t));
    }
    // likewise, found before
    __device__ __forceinline__ void read_there(
            const unsigned char* at, const unsigned char* scales) {
        w[0] = *(const uint4*)at;
        w[1] = *(const uint4*)(at + U::LB);
        s.read(scales);
    }
    // likewise out of whole lines of a matrix: the lane's first row and its scale there
    __device__ __forceinline__ void read_lines(
            const unsigned char* at, const unsigned char* scale) {
        w[0] = *(const uint4*)at;
        w[1] = *(const uint4*)(at + U::LINE);
        s.read(scale);
    }
    typedef typename F::Factor Aids[2][2];
    static constexpr int LENGTH = 8;
    __device__ __forceinline__ void aids(Aids& f) const { s.factors(f); }
    __device__ __forceinline__ void piece(
            const Aids& f, int j, unsigned* a) const {
        unsigned h[2][4];
        F::times(word(w[0], j), f[0][j / 2], h[0]);
        F::times(word(w[1], j), f[1][j / 2], h[1]);
        #pragma unroll
        for (int i = 0; i < 8; i++)
            a[i] = h[i % 2][i / 2];
    }
    static __device__ __forceinline__ void times(
            float (*d)[4], const unsigned* a, const uint4& v, const uint4&) {
        const unsigned b[4] = {v.x, v.y, v.z, v.w};
        mma_f16(d[0], a, b);
        mma_f16(d[1], a + 4, b + 2);
    }
    // as `piece` and `times`, written out: this is what was measured, to the instruction
    template <int LD, int PLANE>
    __device__ __forceinline__ void dot(float (*d)[4], const uint4* x) const {
        typename F::Factor f[2][2];
        s.factors(f);
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            unsigned h[2][4];
            F::times(word(w[0], j), f[0][j / 2], h[0]);
            F::times(word(w[1], j), f[1][j / 2], h[1]);
            const uint4 v = x[j * LD];
            const unsigned a[8] = {h[0][0], h[1][0], h[0][1], h[1][1], h[0][2],
                    h[1][2], h[0][3], h[1][3]};
            const unsigned b[4] = {v.x, v.y, v.z, v.w};
            mma_f16(d[0], a, b);
            mma_f16(d[1], a + 4, b + 2);
        }
    }
    static __device__ __forceinline__ int place(int r, int e) {
        return e % 4 * 32 + r * 4 + e / 4;
    }
    static __device__ __forceinline__ void put(
            uint4* x, int r, int e, const uint4& v) {
        x[place(r, e)] = v;
    }
    __device__ __forceinline__ float scale(int i) const { return s.scale(i); }
};

template <class F, int C> struct Fragment<F, C, 32> : Unit<F, C> {  // e4m3
    typedef Unit<F, C> U;
    static constexpr bool CROSSED = false, SCALED = F::TILE;
    uint4 w[2][2];
    float s[2];
    __device__ __forceinline__ void read(
            const unsigned char* at, int, int g, int t) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = 2 * g + r;
            w[r][0] = U::L::get(at, row, t);
            w[r][1] = U::L::get(at, row, 4 + t);
            s[r] = F::TILE ? *(const float*)(at + U::L::BYTES + row * 4) : 1.f;
        }
    }
    template <int LD> static __device__ __forceinline__ int own(int t) {
        return t % 2 * 2 * LD + t / 2;
    }
    struct Aids {};
    static constexpr int LENGTH = 8;
    __device__ __forceinline__ void aids(Aids&) const {}
    __device__ __forceinline__ void piece(const Aids&, int i, unsigned* a) const {
        #pragma unroll
        for (int m = 0; m < 2; m++) {
            const unsigned p = word(w[0][i / 2], i % 2 * 2 + m);
            const unsigned q = word(w[1][i / 2], i % 2 * 2 + m);
            a[4 * m] = e4m3_halves(p & 0xFFFFu);
            a[4 * m + 1] = e4m3_halves(q & 0xFFFFu);
            a[4 * m + 2] = e4m3_halves(p >> 16);
            a[4 * m + 3] = e4m3_halves(q >> 16);
        }
    }
    static __device__ __forceinline__ void times(
            float (*d)[4], const unsigned* a, const uint4& v, const uint4&) {
        #pragma unroll
        for (int m = 0; m < 2; m++) {
            const unsigned b[2] = {word(v, 2 * m), word(v, 2 * m + 1)};
            mma_f16(d[m], a + 4 * m, b);
        }
    }
    // written out, too
    template <int LD, int PLANE>
    __device__ __forceinline__ void dot(float (*d)[4], const uint4* x) const {
        #pragma unroll
        for (int i = 0; i < 2; i++)
            #pragma unroll
            for (int j = 0; j < 2; j++) {
                const uint4 v = x[j * LD + 2 * i];
                #pragma unroll
                for (int m = 0; m < 2; m++) {
                    const unsigned p = word(w[0][i], 2 * j + m);
                    const unsigned q = word(w[1][i], 2 * j + m);
                    const unsigned a[4] = {e4m3_halves(p & 0xFFFFu),
                            e4m3_halves(q & 0xFFFFu), e4m3_halves(p >> 16),
                            e4m3_halves(q >> 16)};
                    const unsigned b[2] = {word(v, 2 * m), word(v, 2 * m + 1)};
                    mma_f16(d[m], a, b);
                }
            }
    }
    static __device__ __forceinline__ int place(int r, int e) {
        return (e / 8 * 2 + e % 2) * 32 + r * 4 + e / 4 % 2 * 2 + e / 2 % 2;
    }
    static __device__ __forceinline__ void put(
            uint4* x, int r, int e, const uint4& v) {
        x[place(r, e)] = v;
    }
    __device__ __forceinline__ float scale(int i) const { return s[i]; }
};

template <class F, int C> struct Fragment<F, C, 64> : Unit<F, C> {  // bf16, f16
    typedef Unit<F, C> U;
    static constexpr bool CROSSED = false, SCALED = false;
    uint4 w[2][4];
    __device__ __forceinline__ void read(
            const unsigned char* at, int, int g, int t) {
        #pragma unroll
        for (int i = 0; i < 8; i++)
            w[i / 4][i % 4] = U::L::get(at, 2 * g + i / 4, i % 4 * 4 + t);
    }
    template <int LD> static __device__ __forceinline__ int own(int t) {
        return t * LD;
    }
    struct Aids {};
    static constexpr int LENGTH = 8;
    __device__ __forceinline__ void aids(Aids&) const {}
    __device__ __forceinline__ void piece(const Aids&, int i, unsigned* a) const {
        #pragma unroll
        for (int m = 0; m < 8; m++)
            a[m] = word(w[m % 2][i], m / 4 * 2 + m / 2 % 2);
    }
    static __device__ __forceinline__ void times(
            float (*d)[4], const unsigned* a, const uint4& v, const uint4& u) {
        #pragma unroll
        for (int m = 0; m < 2; m++) {
            const unsigned b[2] = {word(v, 2 * m), word(v, 2 * m + 1)};
            const unsigned c[2] = {word(u, 2 * m), word(u, 2 * m + 1)};
            if (F::TWO) {
                mma_bf16(d[0], a + 4 * m, c);
                mma_bf16(d[1], a + 4 * m, b);
            } else
                mma_f16(d[m], a + 4 * m, b);
        }
    }
    template <int LD, int PLANE>
    __device__ __forceinline__ void dot(float (*d)[4], const uint4* x) const {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 v = x[i];
            const uint4 u = F::TWO ? x[PLANE + i] : v;
            #pragma unroll
            for (int m = 0; m < 2; m++) {
                const unsigned a[4] = {word(w[0][i], 2 * m), word(w[1][i], 2 * m),
                        word(w[0][i], 2 * m + 1), word(w[1][i], 2 * m + 1)};
                const unsigned b[2] = {word(v, 2 * m), word(v, 2 * m + 1)};
                const unsigned c[2] = {word(u, 2 * m), word(u, 2 * m + 1)};
                if (F::TWO) {
                    mma_bf16(d[0], a, c);
                    mma_bf16(d[1], a, b);
                } else
                    mma_f16(d[m], a, b);
            }
        }
    }
    static __device__ __forceinline__ int place(int r, int e) {
        return e / 4 * 32 + r * 4 + e % 4;
    }
    static __device__ __forceinline__ void put(
            uint4* x, int r, int e, const uint4& v) {
        x[place(r, e)] = v;
    }
    __device__ __forceinline__ float scale(int) const { return 1.f; }
};

// f32: a weight is three bf16 numbers, x two
template <class F, int C> struct Fragment<F, C, 128> : Unit<F, C> {
    typedef Unit<F, C> U;
    static constexpr bool CROSSED = false, SCALED = false;
    uint4 w[2][8];
    __device__ __forceinline__ void read(
            const unsigned char* at, int, int g, int t) {
        #pragma unroll
        for (int i = 0; i < 16; i++)
            w[i / 8][i % 8] = U::L::get(at, 2 * g + i / 8, i % 8 * 4 + t);
    }
    template <int LD> static __device__ __forceinline__ int own(int t) {
        return t / 2 * LD;
    }
    struct Aids {};
    static constexpr int LENGTH = 24;
    __device__ __forceinline__ void aids(Aids&) const {}
    __device__ __forceinline__ void piece(const Aids&, int i, unsigned* a) const {
        #pragma unroll
        for (int h = 0; h < 2; h++)
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint4& q = w[j % 2][2 * i + h];
                float p = __uint_as_float(word(q, j / 2 * 2));
                float r = __uint_as_float(word(q, j / 2 * 2 + 1));
                #pragma unroll
                for (int m = 0; m < 3; m++) {
                    const unsigned v = bf16_pair(p, r);
                    a[12 * h + 4 * m + j] = v;
                    p -= bf16_low(v);
                    r -= bf16_high(v);
                }
            }
    }
    static __device__ __forceinline__ void times(
            float (*d)[4], const unsigned* a, const uint4& v, const uint4& u) {
        #pragma unroll
        for (int h = 0; h < 2; h++) {
            const unsigned b[2] = {word(v, 2 * h), word(v, 2 * h + 1)};
            const unsigned c[2] = {word(u, 2 * h), word(u, 2 * h + 1)};
            const unsigned* p = a + 12 * h;
            mma_bf16(d[0], p + 8, b);
            mma_bf16(d[0], p + 4, c);
            mma_bf16(d[0], p + 4, b);
            mma_bf16(d[1], p, c);
            mma_bf16(d[1], p, b);
        }
    }
    template <int LD, int PLANE>
    __device__ __forceinline__ void dot(float (*d)[4], const uint4* x) const {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint2* at = (const uint2*)(x + i) + threadIdx.x % 2;
            const uint2 v = at[0];
            const uint2 u = at[2 * PLANE];
            const uint2 w = at[4 * LD];
            const uint2 z = at[4 * LD + 2 * PLANE];
            unsigned a[LENGTH];
            piece({}, i, a);
            times(d, a, {v.x, v.y, w.x, w.y}, {u.x, u.y, z.x, z.y});
        }
    }
    static __device__ __forceinline__ void put(
            uint4* x, int r, int e, const uint4& v) {
        uint2* const to = (uint2*)(x + e / 4 * 32 + r * 4 + e % 2 * 2)
                + e / 2 % 2;
        to[0] = make_uint2(v.x, v.y);
        to[2] = make_uint2(v.z, v.w);
    }
    __device__ __forceinline__ float scale(int) const { return 1.f; }
};

// Has each row a float32 scale in `s`, not in `gs`?
template <class F> struct RowScales;
template <class F, int C, int CHUNK> struct RowScales<Fragment<F, C, CHUNK>> {
    static constexpr bool IN_S = F::BY_ROW && !F::TILE;
};

#define NAMED(f) template <int C> using fragment_##f = Fragment<formats::f, C>;
EACH_FORMAT(NAMED)
#undef NAMED
