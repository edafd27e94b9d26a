#pragma once
// What delta_prep and mamba_prep share: a tile's rows (64 positions of one sequence) through the
// convolution, its decays, and operands turned into fragments (lib/limbs.cuh). 256 threads. A row
// of shared memory holds key limbs (hi KD, lo KD) and, after them, query limbs or values.
#include "lib/async.cuh"
#include "lib/limbs.cuh"
#include "lib/reduce.cuh"

constexpr int TILE = 64;

// The rows of a tile: lo..hi-1 are real. `tail`: the three inputs before the sequence's first row
// in this step, or null; `rel` is this tile's row 0 counted from that first row.
struct Rows {
    const float* x;      // row 0 of the tile
    const float* tail;   // [3, c]
    float* keep;         // where the last three inputs go, or null
    int width, c, lo, hi, rel, tile;
    // Where input channel `ch` (at column `at` of x) of row j >= -3 is; null: it is zero
    __device__ __forceinline__ const float* from(int j, int ch, int at) const {
        if (rel + j >= 0)
            return j < hi ? x + (long long)j * width + at : nullptr;
        return tail && rel + j >= -3 ? tail + (size_t)(3 + rel + j) * c + ch
                                     : nullptr;
    }
    __device__ __forceinline__ float in(int j, int ch, int at) const {
        const float* p = from(j, ch, at);
        return p ? *p : 0.f;
    }
    // All rows are real, and so are the three before them
    __device__ __forceinline__ bool inner() const {
        return lo == 0 && hi == TILE && rel >= 3;
    }
    // silu of the convolution over time of channel `ch` for rows j0..j0+15: f(row, value); zeros
    // where rows are not real
    template <class F>
    __device__ __forceinline__ void conv(
            int ch, int at, int j0, const float* __restrict__ conv_w,
            const float* __restrict__ bias, F f) const {
        if (inner())
            conv_of<true>(ch, at, j0, conv_w, bias, f);
        else
            conv_of<false>(ch, at, j0, conv_w, bias, f);
    }
    template <bool INNER, class F>
    __device__ __forceinline__ void conv_of(
            int ch, int at, int j0, const float* __restrict__ conv_w,
            const float* __restrict__ bias, F f) const {
        const float4 w = ((const float4*)conv_w)[ch];
        const float b = bias ? bias[ch] : 0.f;
        const float* from = x + (long long)(j0 - 3) * width + at;
        float v[19];
        #pragma unroll
        for (int i = 0; i < 19; i++)
            v[i] = INNER ? from[(long long)i * width] : in(j0 + i - 3, ch, at);
        #pragma unroll
        for (int i = 0; i < 16; i++) {
            const float y =
                    fmaf(v[i + 3], w.w,
                            fmaf(v[i + 2], w.z, fmaf(v[i + 1], w.y, v[i] * w.x)))
                    + b;
            const bool real = INNER || (j0 + i >= lo && j0 + i < hi);
            f(j0 + i, real ? __fdividef(y, 1.f + __expf(-y)) : 0.f);
        }
    }
    __device__ __forceinline__ void keep_tail(int ch, int at) const {
        if (keep)
            for (int i = 0; i < 3; i++)
                keep[(size_t)i * c + ch] = in(hi - 3 + i, ch, at);
    }
};

// Tile `t` of a step; `first_row`: of its sequence, as laid out.
__device__ __forceinline__ Rows rows_of(
        int t, const float* x, int width, int c, float* conv, const int* first,
        const int* starts, const int* state_in, const int* state_out,
        const int* tile_seq, const int* tile_lo, const int* tile_hi) {
    Rows r;
    const int s = tile_seq[t], start = starts[s];
    r.tile = t;
    r.width = width;
    r.c = c;
    r.lo = tile_lo[t];
    r.hi = tile_hi[t];
    r.x = x + (size_t)t * TILE * width;
    r.rel = (t - first[s] / TILE) * TILE - start % TILE;
    r.tail = start ? conv + (size_t)state_in[s] * 3 * c : nullptr;
    const int keep = state_out[t * TILE + r.hi - 1];
    r.keep = keep >= 0 ? conv + (size_t)keep * 3 * c : nullptr;
    return r;
}

// Sums of the decays' logs g up to each row, as two floats: a segment's sum is the difference of
// two of them, and stays exact when both are large. One warp; lane l brings rows 2l and 2l+1, and
// gets them back summed.
struct Twice {
    float hi, lo;
};
__device__ __forceinline__ Twice add(Twice a, Twice b) {
    const float s = a.hi + b.hi, v = s - a.hi;
    const float e = (a.hi - (s - v)) + (b.hi - v) + (a.lo + b.lo);
    const float r = s + e;
    return {r, e - (r - s)};
}
__device__ __forceinline__ void running_sums(
        float g0, float g1, Twice& a, Twice& b) {
    const int lane = threadIdx.x % 32;
    Twice v = add({g0, 0.f}, {g1, 0.f});
    #pragma unroll
    for (int m = 1; m < 32; m *= 2) {
        const Twice o = {
                __shfl_up_sync(~0u, v.hi, m), __shfl_up_sync(~0u, v.lo, m)};
        if (lane >= m)
            v = add(o, v);
    }
    const Twice o = {__shfl_up_sync(~0u, v.hi, 1), __shfl_up_sync(~0u, v.lo, 1)};
    a = lane ? add(o, {g0, 0.f}) : Twice{g0, 0.f};
    b = v;
}
// Decays of a tile, by one warp; lane l brings g and a factor f of rows 2l and 2l+1. `hi` and `lo`
// get the running sums of g, G and the first half of `scal` the decay from the tile's begin, the
// other half that to its end, times f.
__device__ __forceinline__ void decays(
        const float* g, const float* f, float* hi, float* lo, float* scal,
        float* G) {
    Twice s[2];
    running_sums(g[0], g[1], s[0], s[1]);
    const float top = __shfl_sync(~0u, s[1].hi, 31);
    const float rest = __shfl_sync(~0u, s[1].lo, 31);
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const int j = 2 * (threadIdx.x % 32) + i;
        hi[j] = s[i].hi;
        lo[j] = s[i].lo;
        scal[j] = G[i] = expf(s[i].hi + s[i].lo);
        scal[TILE + j] = expf((top - s[i].hi) + (rest - s[i].lo)) * f[i];
    }
}
__device__ __forceinline__ float segment(
        const float* hi, const float* lo, int i, int j) {
    return expf((hi[i] - hi[j]) + (lo[i] - lo[j]));
}
__device__ __forceinline__ float softplus(float x) {
    return x > 20.f ? x : log1pf(expf(x));
}

// A number as limbs, at places e and e + `apart` of a row of shared memory.
__device__ __forceinline__ void put_limbs(
        unsigned char* row, int e, int apart, float v) {
    const __nv_bfloat16 b = __float2bfloat16(v);
    __nv_bfloat16* to = (__nv_bfloat16*)row + e;
    to[0] = b;
    to[apart] = __float2bfloat16(v - __bfloat162float(b));
}

// Limbs of matrices in shared memory, a row for a token. `L` says where: at(row, col) is the
// address of the high limb, low(p) of the low limb that belongs to it.
template <class L> struct Operand : L {
    using L::at;
    using L::low;
    __device__ __forceinline__ static void split(uint4* f, const Limbs& m) {
        f[0] = make_uint4(m.hi[0], m.hi[1], m.lo[0], m.lo[1]);
        f[1] = make_uint4(m.hi[2], m.hi[3], m.lo[2], m.lo[3]);
    }
    // A operand: rows r.., columns c..
    __device__ __forceinline__ void a(Limbs& f, int r, int c) const {
        const int l = threadIdx.x % 32;
        const unsigned char* p = at(r + l % 16, c + l / 16 * 8);
        f.load(p, low(p));
    }
    // A operand of the transposed: rows are columns c.. of the matrix, columns its rows r..
    __device__ __forceinline__ void a_turned(Limbs& f, int c, int r) const {
        const int l = threadIdx.x % 32;
        const unsigned char* p = at(r + l % 8 + l / 16 * 8, c + l / 8 % 2 * 8);
        f.load_trans(p, low(p));
    }
    // Two B fragments with the matrix's rows as columns: n = rows r.. and r+8.., k = columns c..
    // FLIP 1: the other way round
    __device__ __forceinline__ void b_turned(
            uint4* f, int r, int c, int flip = 0) const {
        const int l = threadIdx.x % 32;
        const unsigned char* p = at(
                r + l % 8 + (l / 16 ^ flip) * 8, c + l / 8 % 2 * 8);
        Limbs m;
        m.load(p, low(p));
        split(f, m);
    }
    // Two B fragments: k = rows r.., n = columns c.. and c+8..
    __device__ __forceinline__ void b(uint4* f, int r, int c) const {
        const int l = threadIdx.x % 32;
        const unsigned char* p = at(r + l % 16, c + l / 16 * 8);
        Limbs m;
        m.load_trans(p, low(p));
        split(f, m);
    }
};
// Rows of STEP bytes, padded so that no two of eight begin in the same banks; low limbs `apart`
// bytes behind.
template <int STEP> struct Padded {
    const unsigned char* hi;
    int apart;
    __device__ __forceinline__ const unsigned char* at(int row, int col) const {
        return hi + row * STEP + col * 2;
    }
    __device__ __forceinline__ const unsigned char* low(
            const unsigned char* p) const {
        return p + apart;
    }
};
// Rows of COLS high limbs and as many low ones, without padding, at a multiple of 1,024 bytes: of
// each 128 bytes, the eighths stand in an order of their own in each of eight rows. COLS: 32, 64 or
// 128.
template <int COLS> struct Mixed {
    const unsigned char* hi;
    static __device__ __forceinline__ int place(int row, int col) {
        return row * 4 * COLS + ((col / 8 ^ row % 8) * 16) + col % 8 * 2;
    }
    __device__ __forceinline__ const unsigned char* at(int row, int col) const {
        return hi + place(row, col);
    }
    __device__ __forceinline__ const unsigned char* low(
            const unsigned char* p) const {
        return hi + ((p - hi) ^ (2 * COLS));
    }
};
template <int STEP> using Matrix = Operand<Padded<STEP>>;

// What the scan reads of a key head: fragments of q and of k. Warps share the work.
template <int KD, int STEP>
__device__ __forceinline__ void write_q(uint4* q, const Matrix<STEP>& Q) {
    const int lane = threadIdx.x % 32;
    for (int i = threadIdx.x / 32; i < KD / 4;
            i += 8) {  // 4 row tiles of 16, KD/16 steps
        Limbs a;
        Q.a(a, i % 4 * 16, i / 4 * 16);
        uint4* to = q + ((i / 4) * 8 + i % 4 * 2) * 32 + lane;
        to[0] = make_uint4(a.hi[0], a.hi[2], a.lo[0], a.lo[2]);
        to[32] = make_uint4(a.hi[1], a.hi[3], a.lo[1], a.lo[3]);
    }
}
template <int KD, int STEP>
__device__ __forceinline__ void write_k(uint4* k, const Matrix<STEP>& K) {
    for (int i = threadIdx.x / 32; i < KD / 4; i += 8) {
        // 4 steps of 16 rows, KD/16 pairs of columns
        uint4 f[2];
        K.b(f, i % 4 * 16, i / 4 * 16);
        uint4* to = k + (i % 4 * (KD / 8) + i / 4 * 2) * 32 + threadIdx.x % 32;
        to[0] = f[0];
        to[32] = f[1];
    }
}
// c = A B' for warp w's part of [64, 64]: rows 16*(w%4).., columns 32*(w/4)..
template <int KD, class M>
__device__ __forceinline__ void products(float (*c)[4], const M& A, const M& B) {
    const int warp = threadIdx.x / 32;
    #pragma unroll 2
    for (int s = 0; s < KD / 16; s++) {
        Limbs a;
        uint4 b[4];
        A.a(a, warp % 4 * 16, s * 16);
        B.b_turned(b, warp / 4 * 32, s * 16);
        B.b_turned(b + 2, warp / 4 * 32 + 16, s * 16);
        mma_limbs<4>(c, a, b);
    }
}
// f(n, e, i, j) for each sum c[n][e] of that part: it is that of rows i and j.
template <class F> __device__ __forceinline__ void each_sum(F f) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    #pragma unroll
    for (int n = 0; n < 4; n++)
        #pragma unroll
        for (int e = 0; e < 4; e++)
            f(n, e, warp % 4 * 16 + lane / 4 + e / 2 * 8,
                    warp / 4 * 32 + n * 8 + lane % 4 * 2 + e % 2);
}
// Sums c of that part, [64 rows i][64 rows j], as fragments with k = j, n = i
__device__ __forceinline__ void write_p(uint4* p, const float (*c)[4]) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int m = warp % 4;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const float* a = c[2 * i];
        const float* b = c[2 * i + 1];
        uint4* to = p + ((warp / 4 * 2 + i) * 8 + 2 * m) * 32 + lane;
        to[0] = b_fragment(limbs(a[0], a[1]), limbs(b[0], b[1]));
        to[32] = b_fragment(limbs(a[2], a[3]), limbs(b[2], b[3]));
    }
}
// Fragments of a triangle with k = j, n = i, on and below the diagonal: number of fragment n (of 8)
// of step s (of 4)
__device__ __forceinline__ constexpr int triangle(int s, int n) {
    return 7 * s - s * s + n;
}
__device__ __forceinline__ void write_triangle(uint4* p, const float (*c)[4]) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int m = warp % 4;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        const int s = warp / 4 * 2 + i;
        if (m < s)
            continue;
        const float* a = c[2 * i];
        const float* b = c[2 * i + 1];
        uint4* to = p + triangle(s, 2 * m) * 32 + lane;
        to[0] = b_fragment(limbs(a[0], a[1]), limbs(b[0], b[1]));
        to[32] = b_fragment(limbs(a[2], a[3]), limbs(b[2], b[3]));
    }
}
