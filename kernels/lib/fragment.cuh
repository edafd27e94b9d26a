#pragma once
// Sixteen rows of weights, 128 columns of them at a time, times up to eight rows of x by tensor cores: a row's result is the same whatever the other rows are.
// Lane l, with g = l/4 and t = l%4, holds rows 2g and 2g+1 of the sixteen: rows g and g+8 of the tensor core's A. Which of the 128 columns stand where in A is
// free as long as B agrees, so each lane reads sixteen bytes that lie together, and never exchanges any. A warp copies a unit of weights at a time to shared
// memory, whole lines of 128 bytes or more of each row; a unit is UNITS times 128 columns.
//   first(w, s, row, u, l)        where what lane l copies of unit u of rows `row`.. begins, weights and scales; a unit on is LB and SB bytes on, four rows on 4*LINE and SLINE
//   fetch(at, w, s, rows, u, l)   copy the unit to `at`, of which `rows` rows are there; zeros for columns beyond the end
//   read(at, b, g, t)             128 columns, the b-th of the unit, in registers
//   dot(d, x)                     d[0] + d[1] += rows 2g (two of four), 2g+1 times columns 2t, 2t+1 of B; `x`: own(t) further than this block of row g of x (Staged)
//   scale(i)                      what the sums of row 2g+i of this block are to be multiplied by, if SCALED
//   row_scale(s, gs, row)         and those of a whole row
// CROSSED: x in the order of to_half8_crossed.
// A NaN among x stays in its own row.
#include "lib/stage.cuh"
#include "lib/mma.cuh"
#include "lib/async.cuh"
#include "lib/codes.cuh"

// The bits of `a` where `mask` has ones, those of `b` where it has zeros: in one instruction, which the compiler would not find.
__device__ __forceinline__ unsigned choose(unsigned a, unsigned b, unsigned mask) {
#if defined(__CUDA_ARCH__)
    unsigned r;
    asm("lop3.b32 %0, %1, %2, %3, 0xCA;" : "=r"(r) : "r"(mask), "r"(a), "r"(b));
    return r;
#else
    return (a & mask) | (b & ~mask);
#endif
}
// The same in the order 0 2, 1 3, 4 6, 5 7: without permutations, which share a unit of half the speed with masks and shifts.
__device__ __forceinline__ void e2m1_crossed(unsigned w, __half2 f, unsigned* h) {
    const unsigned m = 0x8E008E00u, u = choose(w << 7, w >> 3, 0x80808080u);
    h[0] = bits_of_half2(__hmul2(half2_from(w << 8 & m), f));
    h[1] = bits_of_half2(__hmul2(half2_from(w & m), f));
    h[2] = bits_of_half2(__hmul2(half2_from(u << 8 & m), f));
    h[3] = bits_of_half2(__hmul2(half2_from(u & m), f));
}
__device__ __forceinline__ const unsigned& word(const uint4& v, int i) { return (&v.x)[i]; }

// LB bytes of each of 16 rows in shared memory, copied by a warp 512 bytes at a time. Sixteens of bytes are exchanged by fours so that reads have no bank conflicts.
template <int LB, unsigned LINE> struct Lines {
    static constexpr int BYTES = 16 * LB, PER = LB / 16, AT_ONCE = 512 / LB;
    static __device__ __forceinline__ int place(int row, int c) { return row * LB + (c ^ row / 2 % 2 * 4) * 16; }
    static __device__ __forceinline__ const unsigned char* first(const unsigned char* w, size_t row, int u, int l) { return w + (row + l / PER) * LINE + u * LB + l % PER * 16; }
    static __device__ __forceinline__ void fetch(unsigned char* at, const unsigned char* p, int rows, int u, int l) {
        const bool in = LINE % LB == 0 || u * PER + l % PER < LINE / 16;
        #pragma unroll
        for (int i = 0; i < 16 / AT_ONCE; i++) cp_async16_or_zero(at + place(i * AT_ONCE + l / PER, l % PER), p + i * AT_ONCE * LINE, in && i * AT_ONCE < rows);
    }
    static __device__ __forceinline__ uint4 get(const unsigned char* at, int row, int c) { return *(const uint4*)(at + place(row, c)); }
};

// Eight numbers as bf16, and as bf16 what that left of them.
__device__ __forceinline__ unsigned bf16_pair(float a, float b) {
    const __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<const unsigned*>(&v);
}
__device__ __forceinline__ float bf16_low(unsigned v) { return __uint_as_float(v << 16); }
__device__ __forceinline__ float bf16_high(unsigned v) { return __uint_as_float(v & 0xFFFF0000u); }
__device__ __forceinline__ void split8(const float* v, uint4& high, uint4& low) {
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned h = bf16_pair(v[2 * i], v[2 * i + 1]);
        (&high.x)[i] = h;
        (&low.x)[i] = bf16_pair(v[2 * i] - bf16_low(h), v[2 * i + 1] - bf16_high(h));
    }
}

// Rows of x in shared memory, for F and CP chunks: eights of 16 bits each, eight i of chunk c of row r in at[r*LDR + i*LD + c]; no bank conflicts, neither when
// written nor when read. F::TWO: two planes of bf16; else fp16 times a power of two for each 128 that brings the largest magnitude into [2^14, 2^15).
template <class F, int CP> struct Staged {
    static_assert(CP % 8 == 0, "a warp stages eight chunks");
    static constexpr int LD = CP + 2, LDR = 4 * LD + (8 + F::SKEW - 4 * LD % 8) % 8, PLANES = F::TWO ? 2 : 1;
};

// acc += a block of W times its columns of up to R rows of x, in two sums that do not wait for each other.
template <class F, int R, int LD, int PLANE> __device__ __forceinline__ void add(const F& q, float* acc, const uint4* x, const float* e, int t) {
    float d[2][4] = {};
    q.template dot<LD, PLANE>(d, x);
    #pragma unroll
    for (int j = 0; j < 2; j++) {
        const float f = F::TWO ? 1.f : e[min(2 * t + j, R - 1)];
        acc[j] = fmaf(d[0][j] + d[1][j], F::SCALED ? __fmul_rn(f, q.scale(0)) : f, acc[j]);
        acc[2 + j] = fmaf(d[0][2 + j] + d[1][2 + j], F::SCALED ? __fmul_rn(f, q.scale(1)) : f, acc[2 + j]);
    }
}

template <int C> struct fragment_e2m1 {  // what nvfp4 and mxfp4 share
    static constexpr int SKEW = 4, UNITS = 2, LB = 128;
    static constexpr unsigned LINE = 16 * C;
    static constexpr bool TWO = false, CROSSED = true;
    typedef Lines<LB, LINE> L;
    uint4 w[2];
    template <int LD> static __device__ __forceinline__ int own(int t) { return t; }
    __device__ __forceinline__ void read_rows(const unsigned char* at, int b, int g, int t) { w[0] = L::get(at, 2 * g, 4 * b + t); w[1] = L::get(at, 2 * g + 1, 4 * b + t); }
    // `f`: what to multiply by, for each row and each half of the chunk
    template <int LD> __device__ __forceinline__ void dot_scaled(float (*d)[4], const uint4* x, const __half2 (*f)[2]) const {
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            unsigned h[2][4];
            e2m1_crossed(word(w[0], j), f[0][j / 2], h[0]);
            e2m1_crossed(word(w[1], j), f[1][j / 2], h[1]);
            const uint4 v = x[j * LD];
            const unsigned a[8] = {h[0][0], h[1][0], h[0][1], h[1][1], h[0][2], h[1][2], h[0][3], h[1][3]}, b[4] = {v.x, v.y, v.z, v.w};
            mma_f16(d[0], a, b);
            mma_f16(d[1], a + 4, b + 2);
        }
    }
};

template <int C> struct fragment_nvfp4 : fragment_e2m1<C> {  // exact in fp16: at most 6 * 448 * 2^-14, a multiple of 2^-24
    typedef fragment_e2m1<C> E;
    static constexpr int SB = 64, BYTES = E::L::BYTES + 256;
    static constexpr unsigned SLINE = 8 * C;
    static constexpr bool SCALED = false;
    unsigned s;
    static __device__ __forceinline__ int place(int four, int c) { return E::L::BYTES + four * 64 + (c ^ four / 2 * 4) * 8; }
    static __device__ __forceinline__ void first(const unsigned char*& p, const unsigned char*& q, size_t row, int u, int l) {
        p = E::L::first(p, row, u, l);
        q += (row / 4 + l / 8) * SLINE + u * SB + l % 8 * 8;
    }
    static __device__ __forceinline__ void fetch(unsigned char* at, const unsigned char* p, const unsigned char* q, int rows, int u, int l) {
        E::L::fetch(at, p, rows, u, l);
        cp_async8_or_zero(at + place(l / 8, l % 8), q, l / 8 * 4 < rows && (C % 8 == 0 || 8 * u + l % 8 < C));
    }
    __device__ __forceinline__ void read(const unsigned char* at, int b, int g, int t) {
        this->read_rows(at, b, g, t);
        s = *(const unsigned*)(at + place(g / 2, 4 * b + t) + g % 2 * 4);
    }
    template <int LD, int PLANE> __device__ __forceinline__ void dot(float (*d)[4], const uint4* x) const {
        const __half2 p = half2_from(e4m3_halves(s & 0xFFFFu)), q = half2_from(e4m3_halves(s >> 16));
        const __half2 f[2][2] = {{__half2half2(__low2half(p)), __half2half2(__high2half(p))}, {__half2half2(__low2half(q)), __half2half2(__high2half(q))}};
        this->template dot_scaled<LD>(d, x, f);
    }
    __device__ __forceinline__ float scale(int) const { return 1.f; }
    static __device__ __forceinline__ float row_scale(const unsigned char*, const float* gs, size_t row) { return gs[row] * 16384.f; }
};

template <int C> struct fragment_mxfp4 : fragment_e2m1<C> {  // each chunk times its power of two over the largest of the four; exact unless that is below 2^-23
    typedef fragment_e2m1<C> E;
    static constexpr int SB = 32, BYTES = E::L::BYTES + 128;
    static constexpr unsigned SLINE = 4 * C;
    static constexpr bool SCALED = true;
    unsigned s, top;
    static __device__ __forceinline__ void first(const unsigned char*& p, const unsigned char*& q, size_t row, int u, int l) {
        p = E::L::first(p, row, u, l);
        q += (row / 4 + l / 8) * SLINE + u * SB + l % 8 * 4;
    }
    static __device__ __forceinline__ void fetch(unsigned char* at, const unsigned char* p, const unsigned char* q, int rows, int u, int l) {
        E::L::fetch(at, p, rows, u, l);
        cp_async4_or_zero(at + E::L::BYTES + l * 4, q, l / 8 * 4 < rows && (C % 8 == 0 || 8 * u + l % 8 < C));
    }
    __device__ __forceinline__ void read(const unsigned char* at, int b, int g, int t) {  // of four rows' scales, those of this lane's two; and the largest of the four chunks'
        this->read_rows(at, b, g, t);
        s = *(const unsigned short*)(at + E::L::BYTES + (g / 2 * 8 + 4 * b + t) * 4 + g % 2 * 2);
        top = 0;
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const unsigned e = s >> (8 * i) & 255u;
            unsigned m = max(e, __shfl_xor_sync(~0u, e, 1));
            m = max(m, __shfl_xor_sync(~0u, m, 2));
            top |= m << (8 * i);
        }
    }
    template <int LD, int PLANE> __device__ __forceinline__ void dot(float (*d)[4], const uint4* x) const {
        __half2 f[2][2];
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const unsigned e = s >> (8 * i) & 255u, m = top >> (8 * i) & 255u;
            f[i][0] = f[i][1] = half2_from((29u + e > m ? 29u + e - m : 0u) * 0x04000400u);
        }
        this->template dot_scaled<LD>(d, x, f);
    }
    __device__ __forceinline__ float scale(int i) const {
        const unsigned e = top >> (8 * i) & 255u;
        return __uint_as_float(e ? e << 23 : 0x00400000u);
    }
    static __device__ __forceinline__ float row_scale(const unsigned char*, const float*, size_t) { return 1.f; }
};

template <int C, int TILED> struct fragment_e4m3 {  // TILED: a scale for each 128 columns, else one for the row
    static constexpr int SKEW = 2, KB = (C + 3) / 4;
    static constexpr bool TWO = false, CROSSED = false, SCALED = TILED;
    static constexpr int UNITS = 1, LB = 128, SB = TILED ? 4 : 0, BYTES = 16 * LB + 64 * TILED;
    static constexpr unsigned LINE = 32 * C, SLINE = TILED ? 16 * KB : 0;
    typedef Lines<LB, LINE> L;
    uint4 w[2][2];
    float s[2];
    static __device__ __forceinline__ void first(const unsigned char*& p, const unsigned char*& q, size_t row, int u, int l) {
        p = L::first(p, row, u, l);
        if (TILED) q += ((row + l % 16) * KB + u) * 4;
    }
    static __device__ __forceinline__ void fetch(unsigned char* at, const unsigned char* p, const unsigned char* q, int rows, int u, int l) {
        L::fetch(at, p, rows, u, l);
        if (TILED && l < 16) cp_async4_or_zero(at + L::BYTES + l * 4, q, l < rows);
    }
    __device__ __forceinline__ void read(const unsigned char* at, int, int g, int t) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            w[r][0] = L::get(at, 2 * g + r, t); w[r][1] = L::get(at, 2 * g + r, 4 + t);
            s[r] = TILED ? *(const float*)(at + L::BYTES + (2 * g + r) * 4) : 1.f;
        }
    }
    template <int LD> static __device__ __forceinline__ int own(int t) { return t % 2 * 2 * LD + t / 2; }
    template <int LD, int PLANE> __device__ __forceinline__ void dot(float (*d)[4], const uint4* x) const {
        #pragma unroll
        for (int i = 0; i < 2; i++)
            #pragma unroll
            for (int j = 0; j < 2; j++) {
                const uint4 v = x[j * LD + 2 * i];
                #pragma unroll
                for (int m = 0; m < 2; m++) {
                    const unsigned p = word(w[0][i], 2 * j + m), q = word(w[1][i], 2 * j + m);
                    const unsigned a[4] = {e4m3_halves(p & 0xFFFFu), e4m3_halves(q & 0xFFFFu), e4m3_halves(p >> 16), e4m3_halves(q >> 16)};
                    const unsigned b[2] = {word(v, 2 * m), word(v, 2 * m + 1)};
                    mma_f16(d[m], a, b);
                }
            }
    }
    __device__ __forceinline__ float scale(int i) const { return s[i]; }
    static __device__ __forceinline__ float row_scale(const unsigned char* q, const float*, size_t row) { return TILED ? 1.f : ((const float*)q)[row]; }
};
template <int C> using fragment_fp8 = fragment_e4m3<C, 0>;
template <int C> using fragment_fp8_tiled = fragment_e4m3<C, 1>;

template <int C, bool BF16> struct fragment_16bit {
    static constexpr int SKEW = 1;
    static constexpr bool TWO = BF16, CROSSED = false, SCALED = false;
    static constexpr int UNITS = 1, LB = 256, SB = 0, BYTES = 16 * LB;
    static constexpr unsigned LINE = 64 * C, SLINE = 0;
    typedef Lines<LB, LINE> L;
    uint4 w[2][4];
    static __device__ __forceinline__ void first(const unsigned char*& p, const unsigned char*&, size_t row, int u, int l) { p = L::first(p, row, u, l); }
    static __device__ __forceinline__ void fetch(unsigned char* at, const unsigned char* p, const unsigned char*, int rows, int u, int l) { L::fetch(at, p, rows, u, l); }
    __device__ __forceinline__ void read(const unsigned char* at, int, int g, int t) {
        #pragma unroll
        for (int i = 0; i < 8; i++) w[i / 4][i % 4] = L::get(at, 2 * g + i / 4, i % 4 * 4 + t);
    }
    template <int LD> static __device__ __forceinline__ int own(int t) { return t * LD; }
    template <int LD, int PLANE> __device__ __forceinline__ void dot(float (*d)[4], const uint4* x) const {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 v = x[i], u = BF16 ? x[PLANE + i] : v;
            #pragma unroll
            for (int m = 0; m < 2; m++) {
                const unsigned a[4] = {word(w[0][i], 2 * m), word(w[1][i], 2 * m), word(w[0][i], 2 * m + 1), word(w[1][i], 2 * m + 1)};
                const unsigned b[2] = {word(v, 2 * m), word(v, 2 * m + 1)}, c[2] = {word(u, 2 * m), word(u, 2 * m + 1)};
                if (BF16) { mma_bf16(d[0], a, c); mma_bf16(d[1], a, b); }
                else mma_f16(d[m], a, b);
            }
        }
    }
    __device__ __forceinline__ float scale(int) const { return 1.f; }
    static __device__ __forceinline__ float row_scale(const unsigned char*, const float*, size_t) { return 1.f; }
};
template <int C> using fragment_bf16 = fragment_16bit<C, true>;
template <int C> using fragment_f16 = fragment_16bit<C, false>;

template <int C> struct fragment_f32 {  // a weight is three bf16 numbers, x two
    static constexpr int SKEW = 1;
    static constexpr bool TWO = true, CROSSED = false, SCALED = false;
    static constexpr int UNITS = 1, LB = 512, SB = 0, BYTES = 16 * LB;
    static constexpr unsigned LINE = 128 * C, SLINE = 0;
    typedef Lines<LB, LINE> L;
    uint4 w[2][8];
    static __device__ __forceinline__ void first(const unsigned char*& p, const unsigned char*&, size_t row, int u, int l) { p = L::first(p, row, u, l); }
    static __device__ __forceinline__ void fetch(unsigned char* at, const unsigned char* p, const unsigned char*, int rows, int u, int l) { L::fetch(at, p, rows, u, l); }
    __device__ __forceinline__ void read(const unsigned char* at, int, int g, int t) {
        #pragma unroll
        for (int i = 0; i < 16; i++) w[i / 8][i % 8] = L::get(at, 2 * g + i / 8, i % 8 * 4 + t);
    }
    template <int LD> static __device__ __forceinline__ int own(int t) { return t / 2 * LD; }
    template <int LD, int PLANE> __device__ __forceinline__ void dot(float (*d)[4], const uint4* x) const {
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint2* at = (const uint2*)(x + i % 2 * 2 * LD + i / 2) + threadIdx.x % 2;
            const uint2 v = *at, u = at[2 * PLANE];
            const unsigned b[2] = {v.x, v.y}, c[2] = {u.x, u.y};
            unsigned a[3][4];
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                const uint4& q = w[j % 2][i];
                float p = __uint_as_float(word(q, j / 2 * 2)), r = __uint_as_float(word(q, j / 2 * 2 + 1));
                #pragma unroll
                for (int m = 0; m < 3; m++) {
                    a[m][j] = bf16_pair(p, r);
                    p -= bf16_low(a[m][j]); r -= bf16_high(a[m][j]);
                }
            }
            mma_bf16(d[0], a[2], b); mma_bf16(d[0], a[1], c); mma_bf16(d[0], a[1], b); mma_bf16(d[1], a[0], c); mma_bf16(d[1], a[0], b);
        }
    }
    __device__ __forceinline__ float scale(int) const { return 1.f; }
    static __device__ __forceinline__ float row_scale(const unsigned char*, const float*, size_t) { return 1.f; }
};
