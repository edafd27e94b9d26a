#pragma once
// The products of a block of gemm.cu by warpgroups (lib/wgmma.cuh): W is what registers bring, 64
// rows a group and fragment, and the rows of x are the columns of the product, all of them at once,
// so that a weight is decoded once for a whole tile. Over the constants of gemm.cu.
#include "lib/feed.cuh"
#include "lib/wgmma.cuh"
constexpr int FRAGMENTS = NT / 2;  // of 64 rows, of each group
constexpr int UNITS = CH / UNIT;   // of UNIT chunks, of a stage: what is decoded at once
static_assert(WN % 4 == 0 && NT % 2 == 0 && WM == 1 && STAGES >= 3, "see the contract");
static_assert(UNITS % 2 == 0, "two sets of registers take turns");
static_assert(PARTS < 3, "W in two parts is for single warps");

// Rows of a lane among its warp's sixteen: i = 0, 1.
__device__ __forceinline__ int row_of(int i) {
    const int g = threadIdx.x % 32 / 4;
    return PAIR ? g / 2 * 4 + g % 2 + i * 2 : g * 2 + i;
}
// First row of a warp's fragment f in the block.
__device__ __forceinline__ int rows_of(int f) {
    const int warp = threadIdx.x / 32;
    return (warp / 4 * FRAGMENTS + f) * 64 + warp % 4 * 16;
}

// Where results go. A lane has two rows of W, of each eight columns two rows of x. The two rows of
// W are results side by side, or a gate and its up.
struct Put {
    const float *aids, *bias, *add;
    float* y;
    const float *by, *gated;
    const int* to;
    int n0, out, nb, as, ys;
    float limit;
    bool gate, whole;
    // Two results of row r of y, from column o on; of a pair one.
    __device__ __forceinline__ void one(int r, int o, float v, float w, float f) const {
        if (PAIR) v = act_mul<ACTIVATION>(v, w, limit);
        else if (ACTIVATION != ACT_NONE) {
            v = act_mul<ACTIVATION>(v, 0.f, limit);
            w = act_mul<ACTIVATION>(w, 0.f, limit);
        }
        if (gate) {
            v *= f;
            w *= f;
        }
        if (r < 0) return;
        float* const yr = y + (size_t)r * ys + o;
        const float* const ar = add + (size_t)r * as + o;
        if (PAIR) *yr = v + (add ? *ar : 0.f);
        else if (whole) {
            const float2 z = add ? *(const float2*)ar : make_float2(0.f, 0.f);
            *(float2*)yr = make_float2(v + z.x, w + z.y);
        } else {
            yr[0] = v + (add ? ar[0] : 0.f);
            if (o + 1 < out) yr[1] = w + (add ? ar[1] : 0.f);
        }
    }
    // Results of 64 rows of W; this warp's begin at row c of the block.
    template <int V> __device__ __forceinline__ void operator()(int c, float (&d)[V]) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const int o = PAIR ? (n0 + c) / 2 + g : n0 + c + 2 * g;
        if (o >= out) return;
        float u[2], b[2];
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = c + row_of(i);
            u[i] = __fmul_rn(W::unit(aids[row]), W::UNITY);
            b[i] = bias && n0 + row < nb ? bias[n0 + row] : 0.f;
        }
        #pragma unroll
        for (int k = 0; k < V; k += 4) {
            const int row = k * 2 + 2 * t;
            const int2 r = *(const int2*)(to + row);
            const float2 m = *(const float2*)(by + row), f = *(const float2*)(gated + row);
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                const float mine = i ? m.y : m.x;
                const float v = fmaf(__fmul_rn(d[k + i], mine), u[0], b[0]);
                const float w = fmaf(__fmul_rn(d[k + i + 2], mine), u[1], b[1]);
                one(i ? r.y : r.x, o, v, w, i ? f.y : f.x);
            }
        }
    }
};

// Eight weights of a row and the bytes of their scale, on their way from shared memory.
template <int N> struct Words { typedef uint4 T; };
template <> struct Words<8> { typedef uint2 T; };
template <> struct Words<4> { typedef unsigned T; };
struct Codes {
    typedef Words<W::BYTES>::T Part;
    static constexpr int PARTS_OF = W::BYTES / (int)sizeof(Part);
    __align__(16) unsigned codes[W::BYTES / 4];
    unsigned scale;
    __device__ __forceinline__ void fetch(const unsigned char* stage, int c, int place, int r) {
        const int t = threadIdx.x % 4;
        const unsigned char* w = stage + A + c * BC + (place * 4 + t) * W::BYTES;
        const unsigned char* s = stage + A + B + ((W::SCALE < 0 ? 0 : c) * BN + r) * SC;
        #pragma unroll
        for (int i = 0; i < PARTS_OF; i++) ((Part*)codes)[i] = ((const Part*)w)[i];
        if (W::SCALE == 2) scale = s[t / 2];
        else if (W::SCALE == 1) scale = s[0];
        else if (W::SCALE) scale = *(const unsigned*)s;
    }
    __device__ __forceinline__ void decode(float aid, unsigned* h) const {
        const int t = threadIdx.x % 4;
        const Bytes s = (Bytes)&scale;
        W::halves((Bytes)codes, W::SCALE == 2 ? s - t / 2 : s, t, aid, false, h);
    }
};
// What registers bring to the products of a unit.
struct Weights {
    static constexpr int MANY = FRAGMENTS * UNIT * 2;
    Codes codes[FRAGMENTS][UNIT][2];
    __device__ __forceinline__ void fetch(const unsigned char* stage, int u) {
        #pragma unroll
        for (int v = 0; v < MANY; v++) {
            const int f = v / 2 / UNIT, c = v / 2 % UNIT, i = v % 2, first = rows_of(f);
            const int place = first + i * 8 + threadIdx.x % 32 / 4;
            codes[f][c][i].fetch(stage, u * UNIT + c, place, first + row_of(i));
        }
    }
    __device__ __forceinline__ void decode(const float* aids, unsigned (*a)[UNIT][2][4]) const {
        #pragma unroll
        for (int v = 0; v < MANY; v++) {
            const int f = v / 2 / UNIT, c = v / 2 % UNIT, i = v % 2;
            unsigned h[4];
            codes[f][c][i].decode(aids[rows_of(f) + row_of(i)], h);
            a[f][c][0][i] = h[0];
            a[f][c][0][i + 2] = h[1];
            a[f][c][1][i] = h[2];
            a[f][c][1][i + 2] = h[3];
        }
    }
};
// Products of unit u of the stage whose rows of x are `x`.
template <int N, int V> __device__ __forceinline__ void multiply(
        float (&d)[FRAGMENTS][V], unsigned (*a)[UNIT][2][4], WgmmaMatrix x, int u) {
    wgmma_fence();
    #pragma unroll
    for (int k = 0; k < UNIT * FRAGMENTS * 2; k++) {
        const int c = k / 2 / FRAGMENTS, f = k / 2 % FRAGMENTS, h = k % 2, at = u * UNIT + c;
        const WgmmaMatrix b = x + at / 2 * (BM * 8) + (at % 2 * 2 + h) * WGMMA_K;
        wgmma<N, false>(d[f], a[f][c][h], b, PARTS == 1 || at % 2 + h > 0);
    }
    wgmma_commit();
}

// A tile of 8 * M rows of x: all of K through the pipeline, then `put(row of W in the block,
// 64 x 8 * M results)` for each fragment; `meanwhile` before anything has come. While products of
// a unit run, weights of the next one are decoded, and codes of the one after that fetched.
template <int M, class F, class G>
__device__ __forceinline__ void tile(const Job& j, unsigned char* stages, F meanwhile, G put) {
    constexpr int N = 8 * M, V = N / 2;
    Feed<N> feed(j);
    #pragma unroll
    for (int i = 0; i < STAGES - 1; i++) feed(stages + i * STAGE);
    meanwhile();
    cp_async_wait<STAGES - 2>();
    wgmma_seen();
    __syncthreads();
    unsigned a[2][FRAGMENTS][UNIT][2][4];
    Weights w;
    w.fetch(stages, 0);
    w.decode(j.aids, a[0]);
    w.fetch(stages, 1);
    const WgmmaMatrix first = wgmma_kept(wgmma_rows(stages, 1024));
    float d[FRAGMENTS][V], own[FRAGMENTS][PARTS == 1 ? 1 : V];
    #pragma unroll
    for (int v = 0; v < FRAGMENTS * V; v++) d[v / V][v % V] = 0.f;
    int stage = 0;
    for (int i = 0; i < j.steps; i++) {
        const int ahead = stage == STAGES - 1 ? 0 : stage + 1;
        const int done = stage == 0 ? STAGES - 1 : stage - 1;
        const WgmmaMatrix x = first + stage * (STAGE / 16);
        #pragma unroll
        for (int u = 0; u < UNITS; u++) {
            if constexpr (PARTS == 1) multiply<N>(d, a[u % 2], x, u);
            else multiply<N>(own, a[u % 2], x, u);
            wgmma_wait<1>();
            if (u == 0) {  // nobody reads the stage before this one any more
                cp_async_wait<STAGES - 3>();
                wgmma_seen();
                __syncthreads();
                feed(stages + done * STAGE);
            }
            w.decode(j.aids, a[(u + 1) % 2]);
            w.fetch(stages + (u >= UNITS - 2 ? ahead : stage) * STAGE, (u + 2) % UNITS);
            // Tensor cores cut off what a sum has no room for, which would add up along a row:
            // of products in parts each 64 columns are summed by themselves.
            if constexpr (PARTS > 1) if (UNIT == 2 || u % 2) {
                wgmma_wait<0>();
                #pragma unroll
                for (int v = 0; v < FRAGMENTS * V; v++) {
                    wgmma_own(own[v / V][v % V]);
                    d[v / V][v % V] += own[v / V][v % V];
                }
            }
        }
        stage = ahead;
    }
    wgmma_wait<0>();
    #pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
        wgmma_own(d[f]);
        put(rows_of(f), d[f]);
    }
}
