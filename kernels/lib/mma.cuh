#pragma once
// Matrix products of one warp by tensor cores: D[16,8] += A[16,16] B[16,8], 16-bit inputs, float32
// sums (PTX mma.m16n8k16), and the loads that feed them. Lane l holds, with g = l/4 and t = l%4
// (two 16-bit numbers a register, the lower column first):
//   a[0]: A[g][2t..]  a[1]: A[g+8][2t..]  a[2]: A[g][2t+8..]  a[3]: A[g+8][2t+8..]      b[0]:
//                     B[2t..][g]  b[1]: B[2t+8..][g] d[0], d[1]: D[g][2t], D[g][2t+1]      d[2],
//                     d[3]: D[g+8][2t], D[g+8][2t+1]
#include <cuda_fp16.h>
#include <cuda_bf16.h>

#if !defined(__CUDA_ARCH__) && defined(ATLAS_EMULATE)
struct MmaLane {
    unsigned a[4], b[2];
};
template <bool BF16> __device__ inline float mma_value(unsigned r, int hi) {
    const unsigned short u = hi ? r >> 16 : r & 0xFFFF;
    return BF16 ? __bfloat162float(__ushort_as_bfloat16(u))
                : __half2float(__ushort_as_half(u));
}
template <bool BF16>
__device__ inline void mma_emulated(
        float* d, const unsigned* a, const unsigned* b) {
    MmaLane mine;
    for (int i = 0; i < 4; i++)
        mine.a[i] = a[i];
    for (int i = 0; i < 2; i++)
        mine.b[i] = b[i];
    const MmaLane* all = emu::gather(~0u, mine);
    const int l = emu::lane();
    const int g = l / 4;
    const int t = l % 4;
    float rows[2][16], cols[2][16];  // of A: g and g+8; of B: 2t and 2t+1
    for (int k = 0; k < 16; k++) {
        const MmaLane la = emu::from(all, g * 4 + k % 8 / 2);
        for (int i = 0; i < 2; i++) {
            const MmaLane lb = emu::from(all, (2 * t + i) * 4 + k % 8 / 2);
            rows[i][k] = mma_value<BF16>(la.a[i + k / 8 * 2], k % 2);
            cols[i][k] = mma_value<BF16>(lb.b[k / 8], k % 2);
        }
    }
    for (int i = 0; i < 4; i++) {
        double s = 0;
        for (int k = 0; k < 16; k++)
            s += (double)rows[i / 2][k] * cols[i % 2][k];
        d[i] += (float)s;
    }
}
#endif

__device__ __forceinline__ void mma_f16(
        float* d, const unsigned* a, const unsigned* b) {
#if defined(__CUDA_ARCH__)
    asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, "
            "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#elif defined(ATLAS_EMULATE)
    mma_emulated<false>(d, a, b);
#endif
}
__device__ __forceinline__ void mma_bf16(
        float* d, const unsigned* a, const unsigned* b) {
#if defined(__CUDA_ARCH__)
    asm volatile(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, "
            "{%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#elif defined(ATLAS_EMULATE)
    mma_emulated<true>(d, a, b);
#endif
}

// Four (two) 8x8 matrices of 16-bit numbers from shared memory: lane l names row l%8 of matrix l/8
// (16 bytes, aligned); register i gets of matrix i the two numbers 2t, 2t+1 of row g. TRANS: of
// column g, rows 2t and 2t+1.
template <int COUNT, bool TRANS>
__device__ __forceinline__ void ldmatrix(unsigned* r, const void* row) {
#if defined(__CUDA_ARCH__)
    const unsigned at = (unsigned)__cvta_generic_to_shared(row);
    if (COUNT == 4 && !TRANS)
        asm volatile(
                "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                : "r"(at));
    if (COUNT == 4 && TRANS)
        asm volatile(
                "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, "
                "[%4];"
                : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                : "r"(at));
    if (COUNT == 2 && !TRANS)
        asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];"
                : "=r"(r[0]), "=r"(r[1])
                : "r"(at));
    if (COUNT == 2 && TRANS)
        asm volatile(
                "ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];"
                : "=r"(r[0]), "=r"(r[1])
                : "r"(at));
#elif defined(ATLAS_EMULATE)
    const void* const* all = (const void* const*)emu::gather(~0u, row);
    const int l = emu::lane();
    const int g = l / 4;
    const int t = l % 4;
    for (int i = 0; i < COUNT; i++) {
        const unsigned short* p = (const unsigned short*)emu::from(
                (const void* const*)all, i * 8 + (TRANS ? 2 * t : g));
        const unsigned short* q = (const unsigned short*)emu::from(
                (const void* const*)all, i * 8 + (TRANS ? 2 * t + 1 : g));
        r[i] = TRANS ? p[g] | (unsigned)q[g] << 16
                     : p[2 * t] | (unsigned)p[2 * t + 1] << 16;
    }
#endif
}
__device__ __forceinline__ void ldmatrix_x4(unsigned* r, const void* row) {
    ldmatrix<4, false>(r, row);
}
__device__ __forceinline__ void ldmatrix_x4_trans(unsigned* r, const void* row) {
    ldmatrix<4, true>(r, row);
}
__device__ __forceinline__ void ldmatrix_x2(unsigned* r, const void* row) {
    ldmatrix<2, false>(r, row);
}
__device__ __forceinline__ void ldmatrix_x2_trans(unsigned* r, const void* row) {
    ldmatrix<2, true>(r, row);
}
