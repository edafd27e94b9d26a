// Rows as a file has them into the order that kernels read (atlas.cuda.pack). One call for the codes, one for the scales of four bits a weight.
//   src : [src_rows, src_bytes]  u8   of all experts
//   idx : [n4]                   i32  source row of each row of an expert; -1: zeros, -2: another call writes it
//   dst : [dst_bytes]            u8   of all experts
//   -D KIND=  0: bytes as they are
//             1: e2m1 codes, two a byte, into the words of lib/formats.cuh
//             2: float32 to fp16    3: float32 to bf16
//             4: scales of 16    5: scales of 32    6: of 32 with their zero points; those of four
//             rows side by side
//             7: int4 codes, two a byte, into their words
//   launch: <<<(n4, ceil(units/128), experts), 128>>>; a thread writes one unit of `units` a row: 16 bytes, of scales a chunk's
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#ifndef KIND
#define KIND 1
#endif

__device__ __forceinline__ unsigned e2m1_word(unsigned v) {  // nibbles 0-3 and 4-7 of v: byte i has nibble i with its sign on top, nibble 4+i in what is left
    unsigned w = 0;
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned a = v >> (4 * i) & 15u, b = v >> (16 + 4 * i) & 15u;
        w |= ((a >> 3) << 7 | (a & 7u) << 1 | b >> 3 | (b & 7u) << 4) << (8 * i);
    }
    return w;
}

// the even nibbles of v below the odd ones
__device__ __forceinline__ unsigned int4_word(unsigned v) {
    unsigned w = 0;
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        w |= (v >> (8 * i) & 15u) << (4 * i) |
             (v >> (8 * i + 4) & 15u) << (16 + 4 * i);
    }
    return w;
}

// `dst` is from one expert's rows to the next `n4` rows of `units`, `src` `from` rows.
extern "C" __global__ void __launch_bounds__(128) pack(const unsigned char* __restrict__ src, const int* __restrict__ idx, unsigned char* __restrict__ dst,
        int src_bytes, int n4, int from, int units) {
    const int u = blockIdx.y * 128 + threadIdx.x, row = blockIdx.x, at = idx[row];
    if (u >= units || at == -2) return;
    const size_t to = (size_t)blockIdx.z * n4 + row;
    const unsigned char* p = src + ((size_t)blockIdx.z * from + (at < 0 ? 0 : at)) * src_bytes;
    constexpr int scales = KIND == 4 ? 2 : KIND == 5 ? 1 : KIND == 6 ? 4 : 0;
    constexpr int per = scales ? scales : KIND == 2 || KIND == 3 ? 32 : 16;
    const int have = at < 0 ? 0 : min(per, src_bytes - u * per);  // bytes that a unit is made of, and those there are
    if (KIND >= 4 && KIND <= 6) {
        unsigned char* q = dst + ((to / 4 * units + u) * 4 + to % 4) * per;
        for (int i = 0; i < per; i++) q[i] = i < have ? p[u * per + i] : 0;
        return;
    }
    __align__(16) unsigned char b[32] = {};
    if (have == per && ((size_t)p + u * per) % 16 == 0)
        for (int i = 0; i < per / 16; i++) ((uint4*)b)[i] = ((const uint4*)(p + u * per))[i];
    else {
        #pragma unroll
        for (int i = 0; i < per; i++) b[i] = i < have ? p[u * per + i] : 0;
    }
    __align__(16) unsigned h[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const float x = ((const float*)b)[2 * i], y = ((const float*)b)[2 * i + 1];
        if (KIND == 0) h[i] = ((const unsigned*)b)[i];
        if (KIND == 1) h[i] = e2m1_word(((const unsigned*)b)[i]);
        if (KIND == 7) h[i] = int4_word(((const unsigned*)b)[i]);
        if (KIND == 2) { const __half2 v = __floats2half2_rn(x, y); h[i] = *(const unsigned*)&v; }
        if (KIND == 3) { const __nv_bfloat162 v = __floats2bfloat162_rn(x, y); h[i] = *(const unsigned*)&v; }
    }
    ((uint4*)dst)[to * units + u] = *(const uint4*)h;
}
