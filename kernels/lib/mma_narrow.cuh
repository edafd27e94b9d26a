#pragma once
// Matrix products of one warp by tensor cores, of numbers of eight and of four bits: D[16,8] +=
// A[16,K] B[K,8], float32 sums. Lane l holds, with g = l/4 and t = l%4, the lowest column of a
// register in its lowest bits:
//   e4m3, K 32, four numbers a register
//     a[0]: A[g][4t..]    a[1]: A[g+8][4t..]    a[2]: A[g][4t+16..]  a[3]: A[g+8][4t+16..]
//     b[0]: B[4t..][g]    b[1]: B[4t+16..][g]
//   e2m1, K 64, eight numbers a register: the same with 8t for 4t and 32 for 16
// and d as in lib/mma.cuh. E2m1 numbers are multiplied by e4m3 scales, one for 16 columns of a row
// of A and one for 16 rows of a column of B. Four of them are a register: those of row g + 8*(t%2)
// of A in lanes whose t/2 is `of_a`, those of column g of B where t is `of_b`; nobody looks at the
// others, so a register has the scales of two A or of four B. PTX mma.m16n8k32 (Ada and later; on
// Hopper made of products of fp16) and mma.m16n8k64 with block_scale (sm_120a, sm_121a).
#include "lib/encode.cuh"

#if !defined(__CUDA_ARCH__) && defined(ATLAS_EMULATE)
struct NarrowLane {
    unsigned a[4], b[2], sa, sb;
};
__device__ inline float e2m1_value(unsigned c) {
    const unsigned m = c & 7, e = m >> 1;
    const float v = e ? (1.f + .5f * (m & 1)) * (1 << e) * .5f : .5f * m;
    return c & 8 ? -v : v;
}
// Number k of 64 (BITS 4) or 32 in the registers of one row or column.
template <int BITS> __device__ inline float narrow_value(unsigned r, int k) {
    const unsigned c = r >> (BITS * (k % (32 / BITS)));
    return BITS == 4 ? e2m1_value(c & 15) : of_e4m3(c & 255);
}
// Of a lane: its numbers of one row or column, times their scales.
template <int BITS>
__device__ inline void narrow_line(
        const NarrowLane* all, int first, int low, bool is_a, int scales,
        float* line) {
    constexpr int PER = 32 / BITS, K = PER * 8;
    const NarrowLane s = emu::from(all, first + scales);
    for (int k = 0; k < K; k++) {
        const NarrowLane l = emu::from(all, first + k / PER % 4);
        const int high = k / (K / 2);
        line[k] = narrow_value<BITS>(is_a ? l.a[low + 2 * high] : l.b[high], k);
        if (BITS == 4)
            line[k] *= of_e4m3((is_a ? s.sa : s.sb) >> k / 16 * 8 & 127);
    }
}
template <int BITS>
__device__ inline void narrow_emulated(
        float* d, const NarrowLane& mine, int of_a, int of_b) {
    constexpr int K = 256 / BITS;
    const NarrowLane* all = emu::gather(~0u, mine);
    const int l = emu::lane();
    const int g = l / 4;
    const int t = l % 4;
    float rows[2][K], columns[2][K];
    for (int i = 0; i < 2; i++) {
        narrow_line<BITS>(all, g * 4, i, true, of_a * 2 + i, rows[i]);
        narrow_line<BITS>(all, (2 * t + i) * 4, 0, false, of_b, columns[i]);
    }
    for (int i = 0; i < 4; i++) {
        double sum = 0;
        for (int k = 0; k < K; k++)
            sum += (double)rows[i / 2][k] * columns[i % 2][k];
        d[i] += (float)sum;
    }
}
#endif

__device__ __forceinline__ void mma_e4m3(
        float* d, const unsigned* a, const unsigned* b) {
// with scales of one, which are said to double the rate of float32 sums
#if __CUDA_ARCH__ >= 1200
    asm volatile(
            "mma.sync.aligned.kind::mxf8f6f4.block_scale.scale_vec::1X.m16n8k32."
            "row.col."
            "f32.e4m3.e4m3.f32.ue8m0 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, "
            "{%11,%11}, "
            "{%10}, {%11,%11};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]),
            "r"(0x7F7F7F7F), "h"((short)0));
#elif defined(__CUDA_ARCH__)
    asm volatile(
            "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, "
            "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#elif defined(ATLAS_EMULATE)
    narrow_emulated<8>(d, {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, 0, 0}, 0, 0);
#endif
}
__device__ __forceinline__ void mma_e2m1(
        float* d, const unsigned* a, const unsigned* b, unsigned sa, int of_a,
        unsigned sb, int of_b) {
#if __CUDA_ARCH__ >= 1200
    asm volatile(
            "mma.sync.aligned.kind::mxf4nvf4.block_scale.scale_vec::4X.m16n8k64."
            "row.col."
            "f32.e2m1.e2m1.f32.ue4m3 "
            "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3}, {%10}, "
            "{%11,%12}, "
            "{%13}, {%11,%14};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]),
            "r"(sa), "h"((short)0), "h"((short)of_a), "r"(sb), "h"((short)of_b));
#elif defined(__CUDA_ARCH__)
    __trap();  // no such instruction
#elif defined(ATLAS_EMULATE)
    narrow_emulated<4>(
            d, {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}, sa, sb}, of_a, of_b);
#endif
}
