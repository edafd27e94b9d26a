#pragma once
// The products of a block of gemm.cu by warpgroups (lib/wgmma.cuh): W is what registers bring, 64
// rows a group and fragment, and the rows of x are the columns of the product, all of them at once,
// so that a weight is decoded once for a whole tile. Over the constants of gemm.cu, or
// gemm_scaled.cu.
#include "lib/feed.cuh"
#include "lib/wgmma.cuh"
#ifndef FP8
#define FP8 0
#endif
#ifndef TURNS
#define TURNS 1
#endif
#ifndef RING
#define RING 0
#endif
constexpr int FRAGMENTS = NT / 2;  // of 64 rows, of each group
#if FP8  // of gemm_scaled.cu: x is e4m3, and so become the weights (lib/narrow.cuh)
constexpr int PRODUCTS = 1;  // products of a chunk
constexpr int SUMMED = 4;  // chunks that are summed by themselves, where APART
constexpr bool APART = W::SCALE < 0;
#else
constexpr int PRODUCTS = 2, SUMMED = 2;
constexpr bool APART = PARTS > 1;
#endif
static_assert(
        WN % 4 == 0 && NT % 2 == 0 && WM == 1 && STAGES >= 3, "see the contract");
static_assert(CH % 2 == 0, "two sets of registers take turns");
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
    __device__ __forceinline__ void one(
            int r, int o, float v, float w, float f) const {
        if (PAIR)
            v = act_mul<ACTIVATION, PARTS == 1>(v, w, limit);
        else if (ACTIVATION != ACT_NONE) {
            v = act_mul<ACTIVATION, PARTS == 1>(v, 0.f, limit);
            w = act_mul<ACTIVATION, PARTS == 1>(w, 0.f, limit);
        }
        if (gate) {
            v *= f;
            w *= f;
        }
        if (r < 0)
            return;
        float* const yr = y + (size_t)r * ys + o;
        const float* const ar = add + (size_t)r * as + o;
        if (PAIR)
            *yr = v + (add ? *ar : 0.f);
        else if (whole) {
            const float2 z = add ? *(const float2*)ar : make_float2(0.f, 0.f);
            *(float2*)yr = make_float2(v + z.x, w + z.y);
        } else {
            yr[0] = v + (add ? ar[0] : 0.f);
            if (o + 1 < out)
                yr[1] = w + (add ? ar[1] : 0.f);
        }
    }
    // Results of 64 rows of W; this warp's begin at row c of the block.
    template <int V>
    __device__ __forceinline__ void operator()(int c, float (&d)[V]) const {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const int o = PAIR ? (n0 + c) / 2 + g : n0 + c + 2 * g;
        if (o >= out)
            return;
        float u[2], b[2];
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = c + row_of(i);
            u[i] = factor(aids[row]);
            b[i] = bias && n0 + row < nb ? bias[n0 + row] : 0.f;
        }
        #pragma unroll
        for (int k = 0; k < V; k += 4) {
            const int row = k * 2 + 2 * t;
            const int2 r = *(const int2*)(to + row);
            const float2 m = *(const float2*)(by + row);
            const float2 f = *(const float2*)(gated + row);
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

// A number that the compiler neither finds again wherever it is wanted, nor takes for a shorter
// one.
__device__ __forceinline__ void keep(unsigned& v) {
#if defined(__CUDA_ARCH__)
    asm volatile("" : "+r"(v));
#endif
}

// Eight weights of a row and the bytes of their scale, on their way from shared memory.
template <int N> struct Words {
    typedef uint4 T;
};
template <> struct Words<8> {
    typedef uint2 T;
};
template <> struct Words<4> {
    typedef unsigned T;
};
struct Codes {
    typedef Words<W::BYTES>::T Part;
    static constexpr int PARTS_OF = W::BYTES / (int)sizeof(Part);
    __align__(16) unsigned codes[W::BYTES / 4];
    unsigned scale;
    __device__ __forceinline__ void fetch(
            const unsigned char* w, const unsigned char* s) {
        #pragma unroll
        for (int i = 0; i < PARTS_OF; i++)
            ((Part*)codes)[i] = ((const Part*)w)[i];
        if (W::SCALE == 2 || W::SCALE == 1)
            scale = *s;
        else if (W::SCALE)
            scale = *(const unsigned*)s;
        keep(scale);
    }
    // as what a lane brings of them to the products of their chunk, in its row i of two
    template <class F = W>
    __device__ __forceinline__ void decode(
            float aid, int i, unsigned (*a)[4]) const {
        const int t = threadIdx.x % 4;
        const Bytes s = (Bytes)&scale;
        const Bytes own = W::SCALE == 2 ? s - t / 2 : s;
        unsigned h[2 * PRODUCTS];
#if FP8
        Narrow::eight((Bytes)codes, own, t, aid, h);
#else
        if constexpr (F::SCALE == 2)
            F::halves(codes[0], scale, h);
        else
            F::halves((Bytes)codes, own, t, aid, false, h);
#endif
        #pragma unroll
        for (int p = 0; p < 2 * PRODUCTS; p++)
            a[p / 2][i + p % 2 * 2] = h[p];
    }
};
// What registers bring to the products of a chunk.
struct Weights {
    static constexpr int MANY = FRAGMENTS * 2;
    Codes codes[FRAGMENTS][2];
    // where a lane's first codes of a stage are, and their scale
    unsigned own, its;
    // the warp's first row in a stage
    __device__ __forceinline__ Weights(int first) {
        const int lane = threadIdx.x % 32;
        own = A + ((first + lane / 4) * 4 + lane % 4) * W::BYTES;
        its = A + B + (first + row_of(0)) * SC
                + (W::SCALE == 2 ? lane % 4 / 2 : 0);
        keep(own);
        keep(its);
    }
    __device__ __forceinline__ void fetch(const unsigned char* stage, int c) {
        const unsigned char *w = stage + own, *s = stage + its;
        #pragma unroll
        for (int v = 0; v < MANY; v++) {
            const int f = v / 2, i = v % 2;
            const int row = f * 64 + (PAIR ? i * 2 : i);
            const int chunk = W::SCALE < 0 ? 0 : c;
            codes[f][i].fetch(
                    w + c * BC + (f * 64 + i * 8) * 4 * W::BYTES,
                    s + (chunk * BS + row) * SC);
        }
    }
    // `aids`: from the warp's first row on
    __device__ __forceinline__ void decode(
            const float* aids, unsigned (*a)[PRODUCTS][4]) const {
        #pragma unroll
        for (int v = 0; v < MANY; v++) {
            const int f = v / 2, i = v % 2;
            codes[f][i].decode(aids[f * 64 + row_of(i)], i, a[f]);
        }
    }
};
// Products of chunk c of the stage whose rows of x are `x`.
template <int N, int V>
__device__ __forceinline__ void multiply(
        float (&d)[FRAGMENTS][V], unsigned (*a)[PRODUCTS][4], WgmmaMatrix x,
        int c) {
    wgmma_fence();
    #pragma unroll
    for (int k = 0; k < FRAGMENTS * PRODUCTS; k++) {
        const int f = k / PRODUCTS, h = k % PRODUCTS;
        const int at = c * PRODUCTS + h;  // 32 bytes of each row of x
        const WgmmaMatrix b = x + at / 4 * (BM * 8) + at % 4 * WGMMA_K;
        const bool add = !APART || at % (SUMMED * PRODUCTS) > 0;
#if FP8
        wgmma_e4m3<N>(d[f], a[f][h], b, add);
#else
        wgmma<N, false>(d[f], a[f][h], b, add);
#endif
    }
    wgmma_commit();
}

#if TURNS == 1 && !RING
// No sums yet.
template <int V> __device__ __forceinline__ void zero(float (&d)[FRAGMENTS][V]) {
    #pragma unroll
    for (int v = 0; v < FRAGMENTS * V; v++)
        d[v / V][v % V] = 0.f;
}

// Of blocks that share a scale, those of a thread's rows.
__device__ __forceinline__ void block_scales(
        const float* scales, float (&by)[FRAGMENTS][2]) {
    #pragma unroll
    for (int v = 0; v < FRAGMENTS * 2; v++)
        by[v / 2][v % 2] = scales[rows_of(v / 2) + row_of(v % 2)];
}

// What some columns made joins the sums, by the scales of blocks that share one.
template <int V>
__device__ __forceinline__ void join(
        float (&own)[FRAGMENTS][V], float (&by)[FRAGMENTS][2],
        float (&d)[FRAGMENTS][V]) {
    #pragma unroll
    for (int v = 0; v < FRAGMENTS * V; v++) {
        wgmma_own(own[v / V][v % V]);
        float& sum = d[v / V][v % V];
        if constexpr (FP8)
            sum = fmaf(own[v / V][v % V], by[v / V][v / 2 % 2], sum);
        else
            sum += own[v / V][v % V];
    }
}

// A tile of 8 * M rows of x: all of K through the pipeline, then `put(row of W in the block,
// 64 x 8 * M results)` for each fragment; `meanwhile` before anything has come. While products of
// a chunk run, weights of the next one are decoded, and codes of the one after that fetched.
template <int M, class F, class G>
__device__ __forceinline__ void tile(
        const Job& j, unsigned char* stages, F meanwhile, G put) {
    constexpr int N = 8 * M, V = N / 2;
    Feed<N> feed(j);
    #pragma unroll
    for (int i = 0; i < STAGES - 1; i++)
        feed(stages + i * STAGE);
    meanwhile();
    cp_async_wait<STAGES - 2>();
    wgmma_seen();
    __syncthreads();
    unsigned a[2][FRAGMENTS][PRODUCTS][4];
    const float* const aids = j.aids + rows_of(0);
    Weights w(rows_of(0));
    w.fetch(stages, 0);
    w.decode(aids, a[0]);
    w.fetch(stages, 1);
    const WgmmaMatrix first = wgmma_kept(wgmma_rows(stages, 1024));
    float d[FRAGMENTS][V], own[FRAGMENTS][APART ? V : 1];
    zero<V>(d);
    constexpr int LAST = (STAGES - 1) * STAGE;
    // where stages begin: that of this step, and of the one before
    int stage = 0, done = LAST;
    for (int i = 0; i < j.steps; i++) {
        const int ahead = stage == LAST ? 0 : stage + STAGE;
        const WgmmaMatrix x = first + (unsigned)stage / 16;
        float by[FRAGMENTS][2];
        if (APART && FP8)
            block_scales((const float*)(stages + stage + A + B), by);
        #pragma unroll
        for (int c = 0; c < CH; c++) {
            if constexpr (APART)
                multiply<N>(own, a[c % 2], x, c);
            else
                multiply<N>(d, a[c % 2], x, c);
            wgmma_wait<1>();
            if (c == 0) {  // nobody reads the stage before this one any more
                cp_async_wait<STAGES - 3>();
                wgmma_seen();
                __syncthreads();
                feed(stages + done);
            }
            w.decode(aids, a[(c + 1) % 2]);
            w.fetch(stages + (c >= CH - 2 ? ahead : stage), (c + 2) % CH);
            // Tensor cores cut off what a sum has no room for, which would add up along a row:
            // of products in parts each 64 columns are summed by themselves. So are those of FP8 in
            // blocks that share a scale.
            if constexpr (APART)
                if ((c + 1) % SUMMED == 0) {
                    wgmma_wait<0>();
                    join<V>(own, by, d);
                }
        }
        done = stage;
        stage = ahead;
    }
    wgmma_wait<0>();
    #pragma unroll
    for (int f = 0; f < FRAGMENTS; f++) {
        wgmma_own(d[f]);
        put(rows_of(f), d[f]);
    }
}
#endif
