#pragma once
// Keys and values as the pools hold them, a row (token and head) of N elements at a time; 16
// divides N. F:
//   0 bf16    u16 [N]
//   1 fp8     e4m3 u8 [N], times a float32 a row
//   2 nvfp4   u8 [N/2], words of eight as in lib/formats.cuh, times an e4m3 for 16 elements
//             (`sub`), times a float32 a row
//   3 f16     u16 [N], finite numbers beyond the largest become the largest
//   4 f32     u16 [N/16, 2, 16]: of sixteen elements the nearest f16, then the nearest f16 of what
//             is left: 22 bits
// Whoever computes with them wants bf16: an element of any format but the last two, without the
// row's float32, is one exactly. Times KV_UNIT, that is, which a kernel folds into the row's scale.
#include "lib/encode.cuh"
#include <cuda_bf16.h>
#include <cuda_fp16.h>

template <int F> constexpr bool KV_CODED = F == 1 || F == 2;  // with scales?

// 2^26: e2m1 bits stand low in a bf16
template <int F> constexpr float KV_UNIT = F == 2 ? 67108864.f : 1.f;
// of a row in k or v
template <int F, int N>
constexpr int KV_BYTES = F == 1 ? N
        : F == 2                ? N / 2
        : F == 4                ? 4 * N
                                : 2 * N;
template <int F>
constexpr int KV_PLANES = F == 4 ? 2 : 1;  // halves of an element

// Products of two pairs of bf16, exact where they are numbers of 8 bits.
__device__ __forceinline__ unsigned bf16x2_mul(unsigned a, unsigned b) {
#if defined(ATLAS_EMULATE)
    const unsigned lo = __bfloat16_as_ushort(__float2bfloat16(
            __uint_as_float(a << 16) * __uint_as_float(b << 16)));
    return lo
            | (unsigned)__bfloat16_as_ushort(__float2bfloat16(
                      __uint_as_float(a & 0xFFFF0000u)
                      * __uint_as_float(b & 0xFFFF0000u)))
            << 16;
#else
    const __nv_bfloat162 r = __hmul2(
            *reinterpret_cast<const __nv_bfloat162*>(&a),
            *reinterpret_cast<const __nv_bfloat162*>(&b));
    return *reinterpret_cast<const unsigned*>(&r);
#endif
}
__device__ __forceinline__ unsigned bf16x2_of(float a, float b) {
    return (unsigned)__bfloat16_as_ushort(__float2bfloat16(a))
            | (unsigned)__bfloat16_as_ushort(__float2bfloat16(b)) << 16;
}

// Halves; finite numbers stay finite, NaN and infinity what they are.
__device__ __forceinline__ unsigned half2_of(float a, float b) {
    auto one = [](float v) {
        return (unsigned)__half_as_ushort(__float2half_rn(
                fabsf(v) <= 3.4028235e38f ? fminf(fmaxf(v, -65504.f), 65504.f)
                                          : v));
    };
    return one(a) | one(b) << 16;
}
// What the nearest halves leave.
__device__ __forceinline__ unsigned half2_rest(float a, float b) {
    const unsigned h = half2_of(a, b);
    return half2_of(
            a - __half2float(__ushort_as_half((unsigned short)h)),
            b - __half2float(__ushort_as_half((unsigned short)(h >> 16))));
}

// Two e4m3 in the low and the high half of `v` (bits 8-15 and 24-31) as bf16. Placed there they are
// themselves times 2^-120.
__device__ __forceinline__ unsigned e4m3_to_bf16x2(unsigned v) {
    // 2^120
    return bf16x2_mul((v & 0x80008000u) | ((v >> 4) & 0x07F007F0u), 0x7B807B80u);
}
// Two e4m3 scales as bf16, times 2^100.
__device__ __forceinline__ unsigned subs_to_bf16x2(
        unsigned char a, unsigned char b) {
    // 2^127, 2^93
    return bf16x2_mul(
            bf16x2_mul(
                    (unsigned)(a & 0x7F) << 4 | (unsigned)(b & 0x7F) << 20,
                    0x7F007F00u),
            0x6E006E00u);
}
__device__ __forceinline__ unsigned sub_to_bf16x2(unsigned char s) {
    return subs_to_bf16x2(s, s);
}
// Two e2m1 in bits 8-15 and 24-31, sign first, magnitude in the lower half but its last bit, as
// bf16, times 2^-126, times `f`.
__device__ __forceinline__ unsigned e2m1_pair(unsigned v, unsigned f) {
    return bf16x2_mul((v & 0x80008000u) | ((v & 0x0E000E00u) >> 3), f);
}
// Two e2m1 codes as bf16, times 2^-126, times `f`.
__device__ __forceinline__ unsigned e2m1_to_bf16x2(
        unsigned a, unsigned b, unsigned f) {
    return bf16x2_mul(
            (a & 8) << 12 | (a & 7) << 6 | ((b & 8) << 12 | (b & 7) << 6) << 16,
            f);
}
// Eight of a word, in order.
__device__ __forceinline__ uint4 e2m1_word_to_bf16(unsigned w, unsigned f) {
    // bytes of `a`: elements 0-3, of `b`: 4-7, each with its sign in bit 7 and its magnitude in
    // bits 1 to 3
    const unsigned a = w & 0x8E8E8E8Eu;
    const unsigned b = ((w << 7) & 0x80808080u) | ((w >> 3) & 0x0E0E0E0Eu);
    return make_uint4(
            e2m1_pair(__byte_perm(a, 0, 0x1404), f),
            e2m1_pair(__byte_perm(a, 0, 0x3424), f),
            e2m1_pair(__byte_perm(b, 0, 0x1404), f),
            e2m1_pair(__byte_perm(b, 0, 0x3424), f));
}

// Sixteen elements of a row on their way from a pool to 32 bytes of bf16.
template <int F> struct KvUnit {
    uint4 raw[F == 0 ? 2 : 1];
    unsigned char sub;
    // `pool`, `subs`: of the layer. `row`: number of the row in the pool. `u`: which sixteen
    template <int N>
    __device__ __forceinline__ void load(
            const void* pool, const unsigned char* subs, size_t row, int u) {
        const unsigned char* p = (const unsigned char*)pool + row * KV_BYTES<F, N>
                + u * KV_BYTES<F, 16>;
        if (F == 0) {
            raw[0] = *(const uint4*)p;
            raw[F == 0] = *(const uint4*)(p + 16);
        }
        if (F == 1)
            raw[0] = *(const uint4*)p;
        if (F == 2) {
            const uint2 v = *(const uint2*)p;
            raw[0].x = v.x;
            raw[0].y = v.y;
            sub = subs[row * (N / 16) + u];
        }
    }
    __device__ __forceinline__ void zero() {
        for (int i = 0; i < (F == 0 ? 2 : 1); i++)
            raw[i] = make_uint4(0, 0, 0, 0);
        sub = 0;
    }
    __device__ __forceinline__ void bf16(uint4& a, uint4& b) const {
        if (F == 0) {
            a = raw[0];
            b = raw[F == 0];
        }
        if (F == 1) {
            auto eight = [](unsigned x, unsigned y) {
                return make_uint4(
                        e4m3_to_bf16x2(__byte_perm(x, 0, 0x1404)),
                        e4m3_to_bf16x2(__byte_perm(x, 0, 0x3424)),
                        e4m3_to_bf16x2(__byte_perm(y, 0, 0x1404)),
                        e4m3_to_bf16x2(__byte_perm(y, 0, 0x3424)));
            };
            a = eight(raw[0].x, raw[0].y);
            b = eight(raw[0].z, raw[0].w);
        }
        if (F == 2) {
            const unsigned f = sub_to_bf16x2(sub);
            a = e2m1_word_to_bf16(raw[0].x, f);
            b = e2m1_word_to_bf16(raw[0].y, f);
        }
    }
};
// What the elements of a row are to be multiplied by.
template <int F>
__device__ __forceinline__ float kv_scale(const float* scales, size_t row) {
    return KV_CODED<F> ? scales[row] * KV_UNIT<F> : 1.f;
}

// A row that a warp holds and stores. Of quads u = lane, lane + 32, ... < N/4, a lane has elements
// 16*(u/4) + 2*(u%4) + {0, 1, 8, 9}: as in a fragment of lib/mma.cuh. A row with a NaN or an
// infinity gets a NaN for its float32 where the format has one.
template <int F, int N> struct KvRow {
    static constexpr int I = (N / 4 + 31) / 32;
    unsigned a[I], b[I];  // pairs of bf16, or halves, as they would be read again
    unsigned ra[F == 4 ? I : 1], rb[F == 4 ? I : 1];  // and what they leave
    unsigned code[I];  // four codes
    unsigned char sub[I];
    float scale;  // without KV_UNIT
    __device__ __forceinline__ void encode(const float4* v, int lane) {
        if (!KV_CODED<F>) {
            uncoded(v);
            return;
        }
        unsigned top[I], all = 0;
        #pragma unroll
        for (int i = 0; i < I; i++) {
            const unsigned m = 0x7FFFFFFFu;
            top[i] = lane + 32 * i < N / 4
                    ? max(max(__float_as_uint(v[i].x) & m,
                                  __float_as_uint(v[i].y) & m),
                              max(__float_as_uint(v[i].z) & m,
                                      __float_as_uint(v[i].w) & m))
                    : 0u;
            all = max(all, top[i]);
        }
        for (int m = 16; m; m >>= 1)
            all = max(all, __shfl_xor_sync(~0u, all, m));
        scale = all >= 0x7F800000u
                ? __uint_as_float(0x7FC00000u)
                : fmaxf(__fdiv_rn(__uint_as_float(all), F == 1 ? 448.f : 2688.f),
                          1e-30f);
        #pragma unroll
        for (int i = 0; i < I; i++) {
            if (F == 1)
                to_fp8(i, v[i]);
            else
                to_fp4(i, v[i], top[i], lane);
        }
    }
    // Pairs as they are, and what halves leave.
    __device__ __forceinline__ void uncoded(const float4* v) {
        for (int i = 0; i < I; i++) {
            a[i] = F ? half2_of(v[i].x, v[i].y) : bf16x2_of(v[i].x, v[i].y);
            b[i] = F ? half2_of(v[i].z, v[i].w) : bf16x2_of(v[i].z, v[i].w);
        }
        if (F == 4)
            for (int i = 0; i < I; i++) {
                ra[i % (F == 4 ? I : 1)] = half2_rest(v[i].x, v[i].y);
                rb[i % (F == 4 ? I : 1)] = half2_rest(v[i].z, v[i].w);
            }
        scale = 1.f;
    }
    // Quad i in e4m3.
    __device__ __forceinline__ void to_fp8(int i, const float4& v) {
        const unsigned c0 = to_e4m3(__fdiv_rn(v.x, scale));
        const unsigned c1 = to_e4m3(__fdiv_rn(v.y, scale));
        const unsigned c2 = to_e4m3(__fdiv_rn(v.z, scale));
        const unsigned c3 = to_e4m3(__fdiv_rn(v.w, scale));
        code[i] = c0 | c1 << 8 | c2 << 16 | c3 << 24;
        a[i] = e4m3_to_bf16x2(c0 << 8 | c1 << 24);
        b[i] = e4m3_to_bf16x2(c2 << 8 | c3 << 24);
    }
    // Quad i in e2m1 with a scale for sixteen: of `t`, the largest bits of the four lanes' quads.
    __device__ __forceinline__ void to_fp4(
            int i, const float4& v, unsigned t, int lane) {
        for (int m = 2; m; m >>= 1)
            t = max(t, __shfl_xor_sync(~0u, t, m));
        sub[i] = (unsigned char)to_e4m3(
                fminf(fmaxf(__fdiv_rn(__fdiv_rn(__uint_as_float(t), 6.f), scale),
                              0.001953125f),
                        448.f));
        const float s = __fmul_rn(of_e4m3(sub[i]), scale);
        const unsigned c0 = to_e2m1(__fdiv_rn(v.x, s));
        const unsigned c1 = to_e2m1(__fdiv_rn(v.y, s));
        const unsigned c2 = to_e2m1(__fdiv_rn(v.z, s));
        const unsigned c3 = to_e2m1(__fdiv_rn(v.w, s));
        const unsigned f = sub_to_bf16x2(sub[i]);
        a[i] = e2m1_to_bf16x2(c0, c1, f);
        b[i] = e2m1_to_bf16x2(c2, c3, f);
        const unsigned w0 = placed(c0, c1, lane);
        const unsigned w1 = placed(c2, c3, lane);
        code[i] = lane & 1 ? w1 : w0;  // lanes 0 and 1 of four store them
    }
    // Two codes at their places in a word of eight, which four lanes make.
    static __device__ __forceinline__ unsigned placed(
            unsigned x, unsigned y, int lane) {
        const bool late = lane & 2;  // elements 4 to 7 of their word
        auto one = [&](unsigned c) {
            return late ? c >> 3 | (c & 7) << 4 : (c >> 3) << 7 | (c & 7) << 1;
        };
        unsigned w = (one(x) | one(y) << 8) << (lane & 1) * 16;
        w |= __shfl_xor_sync(~0u, w, 1);
        w |= __shfl_xor_sync(~0u, w, 2);
        return w;
    }
    // `row`: number of the row in the pool
    __device__ __forceinline__ void store(
            void* pool, float* scales, unsigned char* subs, size_t row,
            int lane) const {
        unsigned char* p = (unsigned char*)pool + row * KV_BYTES<F, N>;
        #pragma unroll
        for (int i = 0; i < I; i++) {
            const int u = lane + 32 * i;
            const int s = u / 4;
            const int t = u % 4;
            if (u >= N / 4)
                break;
            if (!KV_CODED<F>) {
                unsigned* q = (unsigned*)p + 8 * KV_PLANES<F> * s + t;
                q[0] = a[i];
                q[4] = b[i];
                if (F == 4) {
                    q[8] = ra[i % (F == 4 ? I : 1)];
                    q[12] = rb[i % (F == 4 ? I : 1)];
                }
            }
            if (F == 1) {
                ((unsigned short*)p)[8 * s + t] = (unsigned short)code[i];
                ((unsigned short*)p)[8 * s + t + 4] = (unsigned short)(code[i]
                        >> 16);
            }
            if (F == 2 && t < 2)
                ((unsigned*)p)[2 * s + t] = code[i];
            if (F == 2 && t == 2)
                subs[row * (N / 16) + s] = sub[i];
        }
        if (KV_CODED<F> && !lane)
            scales[row] = scale;
    }
    // The same as bf16 into a row of shared memory
    __device__ __forceinline__ void stage(void* to, int lane) const {
        #pragma unroll
        for (int i = 0; i < I; i++) {
            const int u = lane + 32 * i;
            const int s = u / 4;
            const int t = u % 4;
            if (u >= N / 4)
                break;
            ((unsigned*)to)[8 * s + t] = a[i];
            ((unsigned*)to)[8 * s + t + 4] = b[i];
        }
    }
};
