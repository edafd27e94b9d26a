#pragma once
// A head of N elements in a warp: of quads u = lane, lane + 32, ... < N/4, a lane has elements
// 16*(u/4) + 2*(u%4) + {0, 1, 8, 9}, which is what a fragment of lib/mma.cuh wants of them, and
// KvRow of lib/kvcache.cuh. All is written out, so that a head has the same bits in every kernel
// and variant.
#include "lib/reduce.cuh"
__device__ __forceinline__ int element(int u, int k) {
    return u / 4 * 16 + u % 4 * 2 + (k & 1) + (k >> 1) * 8;
}

template <int N> struct Head {
    static constexpr int I = (N / 4 + 31) / 32;
    float v[I][4];
    __device__ __forceinline__ void load(const float* p, int lane) {
        #pragma unroll
        for (int i = 0; i < I; i++) {
            const int u = lane + 32 * i;
            float2 a = make_float2(0.f, 0.f), b = a;
            if (u < N / 4) {
                a = *(const float2*)(p + element(u, 0));
                b = *(const float2*)(p + element(u, 2));
            }
            v[i][0] = a.x;
            v[i][1] = a.y;
            v[i][2] = b.x;
            v[i][3] = b.y;
        }
    }
    // 1 / root of the mean square
    __device__ __forceinline__ float rms(float eps) const {
        float m = 0.f;
        #pragma unroll
        for (int i = 0; i < I; i++)
            #pragma unroll
            for (int k = 0; k < 4; k++)
                m = fmaf(v[i][k], v[i][k], m);
        return rsqrtf(fmaf(warp_sum(m), 1.f / N, eps));
    }
    __device__ __forceinline__ void times(float m) {
        #pragma unroll
        for (int i = 0; i < I; i++)
            #pragma unroll
            for (int k = 0; k < 4; k++)
                v[i][k] = __fmul_rn(v[i][k], m);
    }
    __device__ __forceinline__ void times(float m, const Head& gain) {
        #pragma unroll
        for (int i = 0; i < I; i++)
            #pragma unroll
            for (int k = 0; k < 4; k++)
                v[i][k] = __fmul_rn(__fmul_rn(v[i][k], m), gain.v[i][k]);
    }
};

// The rotation of a row: pairs (i, i + PAIRS) by the angles of its position; no PAIRS, no rotation.
template <int N, int PAIRS> struct Turn {
    static constexpr int I = Head<N>::I;
    // is the partner of an element a lane or a register away?
    static constexpr bool SWAP = PAIRS >= 16 && (PAIRS & (PAIRS - 1)) == 0;
    // floats of shared memory that a warp needs
    static constexpr int SCRATCH = PAIRS && !SWAP ? N : 0;
    Head<N> c, s;
    int place[I][4];  // by what elements turn: axes, then positions
    // Three steps, for each waits for what the one before has asked for.
    // `axes`: [PAIRS], which of many positions a pair turns by; null: the first
    __device__ __forceinline__ void ask(const int* axes, int lane) {
        if (!PAIRS)
            return;
        #pragma unroll
        for (int i = 0; i < I; i++)
            #pragma unroll
            for (int k = 0; k < 4; k++)
                place[i][k] = axes && on(i, k, lane) ? axes[pair(i, k, lane)] : 0;
    }
    // `at`: [many][rows] positions
    __device__ __forceinline__ void find(
            const int* at, int row, int rows, int lane) {
        if (!PAIRS)
            return;
        #pragma unroll
        for (int i = 0; i < I; i++)
            #pragma unroll
            for (int k = 0; k < 4; k++)
                place[i][k] = on(i, k, lane) ? at[place[i][k] * rows + row] : 0;
    }
    __device__ __forceinline__ void load(
            const float* cos, const float* sin, int lane) {
        if (!PAIRS)
            return;
        #pragma unroll
        for (int i = 0; i < I; i++)
            #pragma unroll
            for (int k = 0; k < 4; k++) {
                const size_t a = (size_t)place[i][k] * PAIRS
                        + (on(i, k, lane) ? pair(i, k, lane) : 0);
                c.v[i][k] = on(i, k, lane) ? cos[a] : 1.f;
                s.v[i][k] = on(i, k, lane) ? sin[a] : 0.f;
            }
    }
    // Does an element of this lane turn? And which pair is it of?
    static __device__ __forceinline__ bool on(int i, int k, int lane) {
        return element(lane + 32 * i, k) < 2 * PAIRS;
    }
    static __device__ __forceinline__ int pair(int i, int k, int lane) {
        const int e = element(lane + 32 * i, k);
        return e < PAIRS ? e : e - PAIRS;
    }
    __device__ __forceinline__ Head<N> partners(
            const Head<N>& x, float* scratch, int lane) const {
        Head<N> other;
        if constexpr (SWAP) {
            #pragma unroll
            for (int i = 0; i < I; i++)
                #pragma unroll
                for (int k = 0; k < 4; k++)
                    other.v[i][k] = PAIRS >= 128
                            ? x.v[(i ^ (PAIRS / 128)) & (I - 1)][k]
                            : __shfl_xor_sync(~0u, x.v[i][k], PAIRS / 4 % 32);
        } else {
            #pragma unroll
            for (int i = 0; i < I; i++)
                #pragma unroll
                for (int k = 0; k < 4; k++)
                    if (lane + 32 * i < N / 4)
                        scratch[element(lane + 32 * i, k)] = x.v[i][k];
            __syncwarp();
            #pragma unroll
            for (int i = 0; i < I; i++)
                #pragma unroll
                for (int k = 0; k < 4; k++) {
                    const int e = element(lane + 32 * i, k);
                    other.v[i][k] = e < 2 * PAIRS
                            ? scratch[e < PAIRS ? e + PAIRS : e - PAIRS]
                            : 0.f;
                }
            __syncwarp();
        }
        return other;
    }
    __device__ __forceinline__ void operator()(
            Head<N>& x, float* scratch, int lane) const {
        if (!PAIRS)
            return;
        const Head<N> other = partners(x, scratch, lane);
        #pragma unroll
        for (int i = 0; i < I; i++)
            #pragma unroll
            for (int k = 0; k < 4; k++) {
                const float by = element(lane + 32 * i, k) < PAIRS ? -s.v[i][k]
                                                                   : s.v[i][k];
                x.v[i][k] = fmaf(
                        x.v[i][k], c.v[i][k], __fmul_rn(other.v[i][k], by));
            }
    }
};
