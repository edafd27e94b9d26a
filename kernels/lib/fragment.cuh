#pragma once
// Sixteen rows of weights, 128 columns of them at a time, times up to eight rows of x by tensor cores: a row's result is the same whatever the other rows are.
// Lane l, with g = l/4 and t = l%4, holds rows 2g and 2g+1 of the sixteen: rows g and g+8 of the tensor core's A. Which of the 128 columns stand where in A is
// free as long as B agrees, so each lane fetches sixteen bytes that lie together, and never exchanges any.
//   first(w, s, row, b, t)      where the weights and scales of rows `row`, row+1 and columns 128b.. begin; 128 columns on is BLOCK and SBLOCK bytes on,
//                               four rows on 4*LINE and SLINE
//   fetch(at, w, s, b, t, on)   a copy of them to the lane's place in shared memory, where `on`; zeros where not
//   read(at)                    what was copied, in registers
//   dot(d, x, t)                d[0..3] += rows 2g (two of d), 2g+1 times columns 2t, 2t+1 of B; `x`: this block of row g of x (Staged)
//   scale(i)                    what the sums of row 2g+i of this block are to be multiplied by, if SCALED
//   row_scale(s, gs, row)       and those of a whole row
// A NaN among x stays in its own row.
#include "lib/stage.cuh"
#include "lib/mma.cuh"
#include "lib/async.cuh"

__device__ __forceinline__ unsigned bits_of_half2(__half2 h) { return *reinterpret_cast<unsigned*>(&h); }
__device__ __forceinline__ __half2 half2_from(unsigned v) { return *reinterpret_cast<__half2*>(&v); }

// Two e4m3 numbers as fp16.
__device__ __forceinline__ unsigned e4m3_halves(unsigned v) {
#if __CUDA_ARCH__ >= 890
    unsigned h;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(h) : "h"((unsigned short)v));
    return h;
#else  // an e4m3 shifted into an fp16 is the same number times 2^-8; its NaN becomes 480
    const unsigned h = ((v & 0x8000u) << 16) | ((v & 0x7F00u) << 15) | ((v & 0x80u) << 8) | ((v & 0x7Fu) << 7);
    return bits_of_half2(__hmul2(half2_from(h), __float2half2_rn(256.f)));
#endif
}
// The e2m1 numbers of word `w` (layout: nvfp4.cuh) as four pairs of fp16, times 2^-14 and `f`.
__device__ __forceinline__ void e2m1_pairs(unsigned w, __half2 f, unsigned* h) {
    const unsigned a = w & 0x8E8E8E8Eu, b = ((w << 7) & 0x80808080u) | ((w >> 3) & 0x0E0E0E0Eu);
    h[0] = bits_of_half2(__hmul2(half2_from(__byte_perm(a, 0, 0x1404)), f));
    h[1] = bits_of_half2(__hmul2(half2_from(__byte_perm(a, 0, 0x3424)), f));
    h[2] = bits_of_half2(__hmul2(half2_from(__byte_perm(b, 0, 0x1404)), f));
    h[3] = bits_of_half2(__hmul2(half2_from(__byte_perm(b, 0, 0x3424)), f));
}
__device__ __forceinline__ const unsigned& word(const uint4& v, int i) { return (&v.x)[i]; }

// A place of the ring: V times 16 bytes of each lane, then U times 4. Copies run beside the lane that asks for them; only that lane reads them.
template <int V, int U> struct Place {
    static constexpr int BYTES = V * 512 + U * 128;
    static __device__ __forceinline__ void copy(unsigned char* at, int i, const void* p, bool on) {
        cp_async16_or_zero((uint4*)at + i * 32 + threadIdx.x % 32, p, on);
    }
    static __device__ __forceinline__ void copy4(unsigned char* at, int i, const void* p, bool on) {
        cp_async4_or_zero((unsigned*)(at + V * 512) + i * 32 + threadIdx.x % 32, p, on);
    }
    static __device__ __forceinline__ uint4 at16(const unsigned char* at, int i) { return ((const uint4*)at)[i * 32 + threadIdx.x % 32]; }
    static __device__ __forceinline__ unsigned at4(const unsigned char* at, int i) { return ((const unsigned*)(at + V * 512))[i * 32 + threadIdx.x % 32]; }
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

template <int C> struct fragment_nvfp4 {  // exact in fp16: at most 6 * 448 * 2^-8, a multiple of 2^-18
    static constexpr int SKEW = 4;
    static constexpr bool TWO = false, SCALED = false;
    typedef Place<2, 1> At;
    uint4 w[2];
    unsigned s;
    static constexpr size_t BLOCK = 64, LINE = 16 * C, SBLOCK = 32, SLINE = 8 * C;
    static __device__ __forceinline__ void first(const unsigned char*& p, const unsigned char*& q, size_t row, int b, int t) {
        p += row * LINE + b * BLOCK + t * 16;
        q += row / 4 * SLINE + b * SBLOCK + t * 8 + row % 4 / 2 * 4;
    }
    static __device__ __forceinline__ void fetch(unsigned char* at, const unsigned char* p, const unsigned char* q, int b, int t, bool on) {
        on = on && (C % 4 == 0 || 4 * b + t < C);
        At::copy(at, 0, p, on);
        At::copy(at, 1, p + LINE, on);
        At::copy4(at, 0, q, on);
    }
    __device__ __forceinline__ void read(const unsigned char* at) { w[0] = At::at16(at, 0); w[1] = At::at16(at, 1); s = At::at4(at, 0); }
    template <int LD, int PLANE> __device__ __forceinline__ void dot(float* d, const uint4* x, int t) const {
        const __half2 up = __float2half2_rn(64.f);
        const __half2 f = __hmul2(half2_from(e4m3_halves(s & 0xFFFFu)), up), g = __hmul2(half2_from(e4m3_halves(s >> 16)), up);
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            unsigned h[2][4];
            e2m1_pairs(word(w[0], j), j < 2 ? __half2half2(__low2half(f)) : __half2half2(__high2half(f)), h[0]);
            e2m1_pairs(word(w[1], j), j < 2 ? __half2half2(__low2half(g)) : __half2half2(__high2half(g)), h[1]);
            const uint4 v = x[j * LD + t];
            const unsigned a[8] = {h[0][0], h[1][0], h[0][1], h[1][1], h[0][2], h[1][2], h[0][3], h[1][3]}, b[4] = {v.x, v.y, v.z, v.w};
            mma_f16(d, a, b);
            mma_f16(d, a + 4, b + 2);
        }
    }
    __device__ __forceinline__ float scale(int) const { return 1.f; }
    static __device__ __forceinline__ float row_scale(const unsigned char*, const float* gs, size_t row) { return gs[row] * 256.f; }
};

template <int C> struct fragment_mxfp4 {  // each chunk times its power of two over the largest of the four; exact unless that is below 2^-23
    static constexpr int SKEW = 4;
    static constexpr bool TWO = false, SCALED = true;
    typedef Place<2, 1> At;
    uint4 w[2];
    unsigned s, top;
    static constexpr size_t BLOCK = 64, LINE = 16 * C, SBLOCK = 16, SLINE = 4 * C;
    static __device__ __forceinline__ void first(const unsigned char*& p, const unsigned char*& q, size_t row, int b, int t) {
        p += row * LINE + b * BLOCK + t * 16;
        q += row / 4 * SLINE + b * SBLOCK + t * 4;
    }
    static __device__ __forceinline__ void fetch(unsigned char* at, const unsigned char* p, const unsigned char* q, int b, int t, bool on) {
        on = on && (C % 4 == 0 || 4 * b + t < C);
        At::copy(at, 0, p, on);
        At::copy(at, 1, p + LINE, on);
        At::copy4(at, 0, q, on);
    }
    __device__ __forceinline__ void read(const unsigned char* at) {  // of four rows' scales, those of this lane's two
        w[0] = At::at16(at, 0); w[1] = At::at16(at, 1);
        s = At::at4(at, 0) >> (threadIdx.x / 4 % 2 * 16) & 0xFFFFu;
    }
    template <int LD, int PLANE> __device__ __forceinline__ void dot(float* d, const uint4* x, int t) {
        unsigned f[2];
        top = 0;
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const unsigned e = s >> (8 * i) & 255u;
            unsigned m = max(e, __shfl_xor_sync(~0u, e, 1));
            m = max(m, __shfl_xor_sync(~0u, m, 2));
            f[i] = (29u + e > m ? 29u + e - m : 0u) * 0x04000400u;
            top |= m << (8 * i);
        }
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            unsigned h[2][4];
            e2m1_pairs(word(w[0], j), half2_from(f[0]), h[0]);
            e2m1_pairs(word(w[1], j), half2_from(f[1]), h[1]);
            const uint4 v = x[j * LD + t];
            const unsigned a[8] = {h[0][0], h[1][0], h[0][1], h[1][1], h[0][2], h[1][2], h[0][3], h[1][3]}, b[4] = {v.x, v.y, v.z, v.w};
            mma_f16(d, a, b);
            mma_f16(d, a + 4, b + 2);
        }
    }
    __device__ __forceinline__ float scale(int i) const {
        const unsigned e = top >> (8 * i) & 255u;
        return __uint_as_float(e ? e << 23 : 0x00400000u);
    }
    static __device__ __forceinline__ float row_scale(const unsigned char*, const float*, size_t) { return 1.f; }
};

template <int C, int TILED> struct fragment_e4m3 {  // TILED: a scale for each 128 columns, else one for the row
    static constexpr int SKEW = 2, KB = (C + 3) / 4;
    static constexpr bool TWO = false, SCALED = TILED;
    typedef Place<4, 2 * TILED> At;
    uint4 w[2][2];
    float s[2];
    static constexpr size_t BLOCK = 128, LINE = 32 * C, SBLOCK = TILED ? 4 : 0, SLINE = TILED ? 16 * KB : 0;
    static __device__ __forceinline__ void first(const unsigned char*& p, const unsigned char*& q, size_t row, int b, int t) {
        p += row * LINE + b * BLOCK + t * 16;
        if (TILED) q += (row * KB + b) * 4;
    }
    static __device__ __forceinline__ void fetch(unsigned char* at, const unsigned char* p, const unsigned char* q, int b, int t, bool on) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            #pragma unroll
            for (int i = 0; i < 2; i++) At::copy(at, 2 * r + i, p + r * LINE + i * 64, on && (C % 4 == 0 || 8 * b + 4 * i + t < 2 * C));
            if (TILED) At::copy4(at, r, q + r * KB * 4, on);
        }
    }
    __device__ __forceinline__ void read(const unsigned char* at) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            w[r][0] = At::at16(at, 2 * r); w[r][1] = At::at16(at, 2 * r + 1);
            s[r] = TILED ? __uint_as_float(At::at4(at, r)) : 1.f;
        }
    }
    template <int LD, int PLANE> __device__ __forceinline__ void dot(float* d, const uint4* x, int t) const {
        #pragma unroll
        for (int i = 0; i < 2; i++)
            #pragma unroll
            for (int j = 0; j < 2; j++) {
                const uint4 v = x[(t % 2 * 2 + j) * LD + 2 * i + t / 2];
                #pragma unroll
                for (int m = 0; m < 2; m++) {
                    const unsigned p = word(w[0][i], 2 * j + m), q = word(w[1][i], 2 * j + m);
                    const unsigned a[4] = {e4m3_halves(p & 0xFFFFu), e4m3_halves(q & 0xFFFFu), e4m3_halves(p >> 16), e4m3_halves(q >> 16)};
                    const unsigned b[2] = {word(v, 2 * m), word(v, 2 * m + 1)};
                    mma_f16(d, a, b);
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
    static constexpr bool TWO = BF16, SCALED = false;
    typedef Place<8, 0> At;
    uint4 w[2][4];
    static constexpr size_t BLOCK = 256, LINE = 64 * C, SBLOCK = 0, SLINE = 0;
    static __device__ __forceinline__ void first(const unsigned char*& p, const unsigned char*&, size_t row, int b, int t) { p += row * LINE + b * BLOCK + t * 16; }
    static __device__ __forceinline__ void fetch(unsigned char* at, const unsigned char* p, const unsigned char*, int b, int t, bool on) {
        #pragma unroll
        for (int i = 0; i < 8; i++) At::copy(at, i, p + i / 4 * LINE + i % 4 * 64, on && (C % 4 == 0 || 4 * b + i % 4 < C));
    }
    __device__ __forceinline__ void read(const unsigned char* at) {
        #pragma unroll
        for (int i = 0; i < 8; i++) w[i / 4][i % 4] = At::at16(at, i);
    }
    template <int LD, int PLANE> __device__ __forceinline__ void dot(float* d, const uint4* x, int t) const {
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint4 v = x[t * LD + i], u = BF16 ? x[PLANE + t * LD + i] : v;
            #pragma unroll
            for (int m = 0; m < 2; m++) {
                const unsigned a[4] = {word(w[0][i], 2 * m), word(w[1][i], 2 * m), word(w[0][i], 2 * m + 1), word(w[1][i], 2 * m + 1)};
                const unsigned b[2] = {word(v, 2 * m), word(v, 2 * m + 1)}, c[2] = {word(u, 2 * m), word(u, 2 * m + 1)};
                if (BF16) { mma_bf16(d, a, c); mma_bf16(d, a, b); }
                else mma_f16(d, a, b);
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
    static constexpr bool TWO = true, SCALED = false;
    typedef Place<16, 0> At;
    uint4 w[2][8];
    static constexpr size_t BLOCK = 512, LINE = 128 * C, SBLOCK = 0, SLINE = 0;
    static __device__ __forceinline__ void first(const unsigned char*& p, const unsigned char*&, size_t row, int b, int t) { p += row * LINE + b * BLOCK + t * 16; }
    static __device__ __forceinline__ void fetch(unsigned char* at, const unsigned char* p, const unsigned char*, int b, int t, bool on) {
        #pragma unroll
        for (int i = 0; i < 16; i++) At::copy(at, i, p + i / 8 * LINE + i % 8 * 64, on && (C % 4 == 0 || 4 * b + i % 8 / 2 < C));
    }
    __device__ __forceinline__ void read(const unsigned char* at) {
        #pragma unroll
        for (int i = 0; i < 16; i++) w[i / 8][i % 8] = At::at16(at, i);
    }
    template <int LD, int PLANE> __device__ __forceinline__ void dot(float* d, const uint4* x, int t) const {
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            const uint2* at = (const uint2*)(x + (i % 2 * 2 + t / 2) * LD + i / 2) + t % 2;
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
            mma_bf16(d, a[2], b); mma_bf16(d, a[1], c); mma_bf16(d, a[1], b); mma_bf16(d, a[0], c); mma_bf16(d, a[0], b);
        }
    }
    __device__ __forceinline__ float scale(int) const { return 1.f; }
    static __device__ __forceinline__ float row_scale(const unsigned char*, const float*, size_t) { return 1.f; }
};
