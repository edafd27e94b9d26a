#pragma once
// Sixteen positions of a key head's keys or values in shared memory, as the pool has them, for
// PARTS warps to fetch and to multiply with by tensor cores: each has a part of the elements, and
// nothing of what it fetched is for another warp. What is multiplied with them is a sum of two bf16
// (lib/limbs.cuh). Where the order of a sum is free, it is the one in which a format's codes lie.
#include "lib/async.cuh"
#include "lib/kvcache.cuh"
#include "lib/limbs.cuh"
#include "lib/warps.cuh"

template <int F, int N, int PARTS> struct Slice {
    // of 16 elements: of a query, and of a weighted value
    static constexpr int STEPS = F == 2 ? (N + 31) / 32 * 2 : N / 16;
    // bytes of a row, and what is fetched at once
    static constexpr int ROW = KV_BYTES<F, N>, UNIT = ROW % 16 ? 8 : 16,
                         UNITS = ROW / UNIT;
    static constexpr int COLS = (ROW + 15) / 16;  // of 16 bytes
    // odd many from row to row: no bank conflicts
    static constexpr int STRIDE = (COLS | 1) * 16;
    // of a part
    static constexpr int P = KV_PLANES<F>;
    static constexpr int LOADS = ((COLS + 1) / 2 + P * PARTS - 1) / (P * PARTS)
            * P;
    static constexpr int OWN = LOADS * 32 / UNIT;
    static constexpr int TILES = !KV_CODED<F> ? LOADS / P : LOADS * 2 * F;
    // do the parts have the same? And scales of their own?
    static constexpr bool EVEN = LOADS * PARTS * 2 == COLS;
    static constexpr bool APART = EVEN && N % 32 == 0;
    static constexpr int SUB = F != 2 ? 0 : APART ? LOADS * 4 : N / 16;
    static constexpr int EXTRA = KV_CODED<F> ? 16 * SUB + 128 : 0;
    static constexpr int SIZE = 16 * STRIDE + PARTS * EXTRA;
    // rows; and this part's scales of keys and values, [2][16], and of sixteen elements, [16][SUB]
    unsigned char *p, *extra;
    // what ldmatrix wants of this lane: of four matrices, two lie side by side, and two below
    const unsigned char* at;
    int lane, part;
    __device__ __forceinline__ Slice(unsigned char* to, int part_, int l)
        : p(to),
          extra(to + 16 * STRIDE + part_ * EXTRA),
          at(to + (l % 8 + l / 16 * 8) * STRIDE
                  + (l / 8 % 2 + part_ * LOADS * 2) * 16),
          lane(l),
          part(part_) {}
    // Factor of position i's key, or of its value: slices of keys have both, for both are wanted
    // before the values
    __device__ __forceinline__ float scale(int i, bool value) const {
        return __fmul_rn(((const float*)extra)[i + value * 16], KV_UNIT<F>);
    }
    // of elements 16c.. of row r
    __device__ __forceinline__ const unsigned char* sub(int r, int c) const {
        return extra + 128 + r * SUB + c - (APART ? part * SUB : 0);
    }
    // Limbs, and products with them: what is not f16 is bf16
    static __device__ __forceinline__ Pair limbs_of(float a, float b) {
        return F >= 3 ? half_limbs(a, b) : limbs(a, b);
    }
    static __device__ __forceinline__ Pair weights_of(float a, float b) {
        return F >= 3 ? half_limbs_below(a, b) : limbs(a, b);
    }
    static __device__ __forceinline__ void product(
            float* c, const unsigned* a, const unsigned* b) {
        if (F >= 3)
            mma_f16(c, a, b);
        else
            mma_bf16(c, a, b);
    }
    // The element that sum e (of the upper or the lower eight) of tile i is of, in lanes 4g .. 4g+3
    __device__ __forceinline__ int element(int i, int g, int e) const {
        i += part * TILES;
        return !KV_CODED<F> ? 16 * i + g + 8 * e
                : F == 1
                ? 16 * i + 2 * g + e
                : 32 * (i / 2) + 8 * (g / 2) + 2 * (g % 2) + e + 4 * (i % 2);
    }

    // Are a warp's bytes of a row so many sixteens that its lanes fetch whole rows together?
    static constexpr bool LINES = UNIT == 16 && 32 % OWN == 0
            && OWN * PARTS == UNITS && !KV_CODED<F>;
    // Positions first .. end-1 of the sixteen, and zeros for the others; `row`: of the first in the
    // pool, others are `kv` apart. Scales, if any, or null
    template <int kv>
    __device__ __forceinline__ void fetch(
            const unsigned char* pool, const float* k_scales,
            const float* v_scales, const unsigned char* subs, size_t row,
            int first, int end) const {
        pool += row * ROW;
        if constexpr (LINES)
            fetch_lines<kv>(pool, first, end);
        else {
            fetch_units<kv>(pool, first, end);
            const int r = lane % 16;
            const bool on = r >= first && r < end;
            if (KV_CODED<F> && k_scales)
                cp_async_or_zero<4>(
                        extra + lane * 4,
                        (lane < 16 ? k_scales : v_scales) + row + r * kv, on);
            if (F == 2)
                fetch_subs(
                        subs + (row + r * kv) * (N / 16)
                                + (APART ? part * SUB : 0),
                        on);
        }
    }
    template <int kv>
    __device__ __forceinline__ void fetch_lines(
            const unsigned char* pool, int first, int end) const {
        const int r0 = lane / OWN, c = lane % OWN + part * OWN;
        unsigned char* const to = p + r0 * STRIDE + c * 16;
        const unsigned char* const from = pool + r0 * kv * ROW + c * 16;
        constexpr int STEP = 32 / OWN;  // rows that a warp fetches at once
        if (first <= 0 && end >= 16) {  // all sixteen, as nearly always
            #pragma unroll
            for (int r = 0; r < 16; r += STEP)
                cp_async16(to + r * STRIDE, from + r * kv * ROW);
            return;
        }
        #pragma unroll 1
        for (int r = 0; r < 16; r += STEP) {
            const bool on = r + r0 >= first && r + r0 < end;
            cp_async16_or_zero(to + r * STRIDE, from + r * kv * ROW, on);
        }
    }
    template <int kv>
    __device__ __forceinline__ void fetch_units(
            const unsigned char* pool, int first, int end) const {
        #pragma unroll
        for (int k = 0; k < (16 * OWN + 31) / 32; k++) {
            const int i = k * 32 + lane;
            const int r = i / OWN;
            const int c = i % OWN + part * OWN;
            const bool on = r >= first && r < end;
            if ((OWN % 2 && i >= 16 * OWN)
                    || (OWN * PARTS != UNITS && c >= UNITS))
                continue;
            if (UNIT == 16)
                cp_async16_or_zero(
                        p + r * STRIDE + c * 16, pool + r * kv * ROW + c * 16,
                        on);
            else
                cp_async_or_zero<8>(
                        p + r * STRIDE + c * 8, pool + r * kv * ROW + c * 8, on);
        }
    }
    // Scales of sixteen elements, of the row lane % 16
    __device__ __forceinline__ void fetch_subs(
            const unsigned char* from, bool on) const {
        unsigned char* const to = extra + 128 + lane % 16 * SUB;
        #pragma unroll
        for (int k = 0; k < SUB;)
            if (SUB % 16 == 0) {
                if (lane / 16 == k / 16 % 2)
                    cp_async16_or_zero(to + k, from + k, on);
                k += 16;
            } else if (SUB % 8 == 0) {
                if (lane < 16)
                    cp_async_or_zero<8>(to + k, from + k, on);
                k += 8;
            } else if (SUB % 4 == 0) {
                if (lane < 16)
                    cp_async_or_zero<4>(to + k, from + k, on);
                k += 4;
            } else {
                if (lane < 16)
                    to[k] = on ? from[k] : 0;
                k++;
            }
    }
    // Row r: number `from` of rows that lie as KvRow stores them
    __device__ __forceinline__ void copy(
            const unsigned char* rows, const unsigned char* subs, int from,
            int r) const {
        for (int c = lane + part * OWN; c < min(UNITS, part * OWN + OWN); c += 32)
            if (UNIT == 16)
                *(uint4*)(p + r * STRIDE + c * 16) = *(
                        const uint4*)(rows + from * ROW + c * 16);
            else
                *(uint2*)(p + r * STRIDE + c * 8) = *(
                        const uint2*)(rows + from * ROW + c * 8);
        if (F == 2 && lane < SUB)
            extra[128 + r * SUB + lane] =
                    subs[from * (N / 16) + lane + (APART ? part * SUB : 0)];
    }
    __device__ __forceinline__ void copy_scales(
            const float* scales, int r) const {
        if (KV_CODED<F> && lane < 2)
            ((float*)extra)[lane * 16 + r] = scales[lane];
    }

    // Fragments of a query head that a warp holds as a Head, times `factor`: head g's limbs are
    // rows g and g+8 of an A operand
    static __device__ __forceinline__ void put_query(
            uint4* to, const float (*v)[4], int g, float factor, int lane) {
        #pragma unroll
        for (int k = 0; k < (N / 4 + 31) / 32; k++) {
            const int u = lane + 32 * k;
            if (u >= STEPS * 4)
                break;
            const float m = u < N / 4 ? factor : 0.f;
            #pragma unroll
            for (int h = 0; h < 2; h++) {
                const int e = 16 * (u / 4) + 2 * (u % 4) + 8 * h;
                const int r = e % 32;
                const int step = F == 2 ? e / 32 * 2 + r % 8 / 4 : e / 16;
                const int t = !KV_CODED<F> ? u % 4 : F == 1 ? e % 16 / 4 : r / 8;
                const int slot = !KV_CODED<F> ? h : r % 4 / 2;
                const Pair x = limbs_of(
                        __fmul_rn(v[k][2 * h], m), __fmul_rn(v[k][2 * h + 1], m));
                ((uint2*)to)[(step * 32 + g * 4 + t) * 2 + slot] = make_uint2(
                        x.hi, x.lo);
            }
        }
    }
    // c[row][step%2][positions 0-7, 8-15] += this part of queries * keys, for R rows
    template <int R>
    __device__ __forceinline__ void scores(
            float (*c)[2][2][4], const uint4* qf) const {
        #pragma unroll
        for (int u = 0; u < LOADS; u++) {
            if (!KV_CODED<F> && !EVEN && 2 * (part * LOADS + u) >= COLS)
                break;
            unsigned x[4];
            ldmatrix_x4(x, at + u * 32);
            #pragma unroll
            for (int h = 0; h < (KV_CODED<F> ? 2 : 1); h++) {
                unsigned b[2][4];  // of a step or, of nvfp4, two
                if (!KV_CODED<F>) {
                    b[0][0] = x[0];
                    b[0][1] = x[1];
                    b[0][2] = x[2];
                    b[0][3] = x[3];
                } else if (!EVEN && 2 * (part * LOADS + u) + h >= COLS)
                    break;
                if (F == 1)
                    #pragma unroll
                    for (int i = 0; i < 2; i++) {
                        b[0][2 * i] = e4m3_to_bf16x2(
                                __byte_perm(x[h + 2 * i], 0, 0x1404));
                        b[0][2 * i + 1] = e4m3_to_bf16x2(
                                __byte_perm(x[h + 2 * i], 0, 0x3424));
                    }
                if (F == 2)
                    #pragma unroll
                    for (int i = 0; i < 2; i++) {
                        const uint4 v = e2m1_word_to_bf16(
                                x[h + 2 * i],
                                sub_to_bf16x2(
                                        *sub(lane / 4 + 8 * i,
                                                (2 * (part * LOADS + u) + h) * 2
                                                        + lane % 4 / 2)));
                        b[0][2 * i] = v.x;
                        b[0][2 * i + 1] = v.y;
                        b[1][2 * i] = v.z;
                        b[1][2 * i + 1] = v.w;
                    }
                #pragma unroll
                for (int s = 0; s < (F == 2 ? 2 : 1); s++)
                    #pragma unroll
                    for (int r = 0; r < R; r++) {
                        const int step = !KV_CODED<F> ? u / P
                                : F == 1              ? 2 * u + h
                                                      : 4 * u + 2 * h + s;
                        const uint4 a =
                                qf[(r * STEPS + part * TILES + step) * 32 + lane];
                        product(c[r][step % 2][0], &a.x, b[s]);
                        product(c[r][step % 2][1], &a.x, b[s] + 2);
                    }
            }
        }
    }
    // acc[row][tile] += values * weights, w[row]: two registers of high limbs, two of low ones
    template <int R>
    __device__ __forceinline__ void values(
            float (*acc)[TILES][4], const unsigned (*w)[4]) const {
        #pragma unroll
        for (int u = 0; u < LOADS; u++) {
            if (!KV_CODED<F> && !EVEN && 2 * (part * LOADS + u) >= COLS)
                break;
            unsigned x[4];
            ldmatrix_x4_trans(x, at + u * 32);
            #pragma unroll
            for (int h = 0; h < (KV_CODED<F> ? 2 : 1); h++) {
                unsigned a[2][4];
                if (!KV_CODED<F>) {
                    a[0][0] = x[0];
                    a[0][1] = x[1];
                    a[0][2] = x[2];
                    a[0][3] = x[3];
                } else if (!EVEN && 2 * (part * LOADS + u) + h >= COLS)
                    break;
                #pragma unroll
                for (int i = 0; i < 2; i++) {
                    const unsigned y = x[h + 2 * i];
                    if (F == 1) {
                        a[0][2 * i] = e4m3_to_bf16x2(__byte_perm(y, 0, 0x2404));
                        a[0][2 * i + 1] = e4m3_to_bf16x2(
                                __byte_perm(y, 0, 0x3414));
                    }
                    if (F == 2) {
                        const unsigned char* s = sub(
                                lane % 4 * 2 + 8 * i,
                                (2 * (part * LOADS + u) + h) * 2 + lane / 16);
                        const unsigned f = subs_to_bf16x2(s[0], s[SUB]);
                        const unsigned z = y & 0x8E8E8E8Eu;
                        const unsigned o = ((y << 7) & 0x80808080u)
                                | ((y >> 3) & 0x0E0E0E0Eu);
                        a[0][2 * i] = e2m1_pair(__byte_perm(z, 0, 0x2404), f);
                        a[0][2 * i + 1] = e2m1_pair(__byte_perm(z, 0, 0x3414), f);
                        a[1][2 * i] = e2m1_pair(__byte_perm(o, 0, 0x2404), f);
                        a[1][2 * i + 1] = e2m1_pair(__byte_perm(o, 0, 0x3414), f);
                    }
                }
                #pragma unroll
                for (int s = 0; s < (F == 2 ? 2 : 1); s++)
                    #pragma unroll
                    for (int r = 0; r < R; r++) {
                        const int i = !KV_CODED<F> ? u / P
                                : F == 1           ? 2 * u + h
                                                   : 4 * u + 2 * h + s;
                        product(acc[r][i], a[s], w[r]);
                        product(acc[r][i], a[s], w[r] + 2);
                    }
            }
        }
    }
};
