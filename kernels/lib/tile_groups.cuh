#pragma once
// The products of a block of gemm.cu by warpgroups (lib/wgmma.cuh): W is what registers bring, 64
// rows a group and fragment, and the rows of x are the columns of the product, all of them at once,
// so that a weight is decoded once for a whole tile. Over the constants of gemm.cu.
#include "lib/feed.cuh"
#include "lib/bulk.cuh"
#include "lib/wgmma.cuh"
constexpr int FRAGMENTS = NT / 2;  // of 64 rows, of each group
#if FP8  // of gemm_scaled.cu: x is e4m3, and so become the weights (lib/narrow.cuh)
constexpr int PRODUCTS = 1;           // of a chunk
constexpr bool APART = FP8_APART || W::SCALE < 0;
constexpr int SUMMED = 4;             // chunks that are summed by themselves, where APART
template <int N> __device__ __forceinline__ void multiply(
        float* d, const unsigned* a, WgmmaMatrix b, int add) {
    wgmma_e4m3<N>(d, a, b, add);
}
// Eight weights of row i of a lane's two, for the products of a chunk
__device__ __forceinline__ void eight(Bytes w, Bytes s, int t, float aid, int i, unsigned (*a)[4]) {
    unsigned b[2];
    Narrow::eight(w, s, t, aid, b);
    a[0][i] = b[0];
    a[0][i + 2] = b[1];
}
#else
constexpr int PRODUCTS = 2, SUMMED = 2;
constexpr bool APART = PARTS > 1;
template <int N> __device__ __forceinline__ void multiply(
        float* d, const unsigned* a, WgmmaMatrix b, int add) {
    wgmma<N, false>(d, a, b, add);
}
__device__ __forceinline__ void eight(Bytes w, Bytes s, int t, float aid, int i, unsigned (*a)[4]) {
    unsigned h[4];
    W::halves(w, s, t, aid, false, h);
    #pragma unroll
    for (int p = 0; p < 4; p++) a[p / 2][i + p % 2 * 2] = h[p];
}
#endif
static_assert(WN % 4 == 0 && NT % 2 == 0 && WM == 1 && STAGES >= 3, "see the contract");
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
    __device__ __forceinline__ void one(int r, int o, float v, float w, float f) const {
        if (PAIR) v = act_mul<ACTIVATION>(v, w, limit);
        else if (ACTIVATION != ACT_NONE) {
            v = act_mul<ACTIVATION>(v, 0.f, limit);
            w = act_mul<ACTIVATION>(w, 0.f, limit);
        }
        if (gate) v *= f, w *= f;
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
        float u[2], b[2];
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = c + row_of(i);
            u[i] = factor(aids[row]);
            b[i] = bias && n0 + row < nb ? bias[n0 + row] : 0.f;
        }
        if (o >= out) return;
        #pragma unroll
        for (int k = 0; k < V; k++) {
            if (k % 4 > 1) continue;
            const int row = k / 4 * 8 + 2 * t + k % 2;
            const float v = fmaf(__fmul_rn(d[k], by[row]), u[0], b[0]);
            const float w = fmaf(__fmul_rn(d[k + 2], by[row]), u[1], b[1]);
            one(to[row], o, v, w, gated[row]);
        }
    }
};
// Chunk c of a stage: what registers bring to two products.
__device__ __forceinline__ void decode(
        const unsigned char* stage, int c, const float* aids, unsigned (*a)[PRODUCTS][4]) {
    const int lane = threadIdx.x % 32, t = lane % 4;
    #pragma unroll
    for (int f = 0; f < FRAGMENTS; f++)
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int first = rows_of(f), r = first + row_of(i);
            const int place = first + i * 8 + lane / 4;
            const unsigned char* w = stage + A + c * BC + (place * 4 + t) * W::BYTES;
            const unsigned char* s = stage + A + B + ((W::SCALE < 0 ? 0 : c) * BN + r) * SC;
            eight(w, s, t, aids[r], i, a[f]);
        }
}
// Stages go round: when each is there, and when nobody reads it any more. All threads of a block
// copy, and meet, or those of some warps do nothing else.
struct Round {
    Meeting *full, *empty;  // FEEDS: of each stage, in shared memory
    int stage = 0, phase = 0;
    __device__ __forceinline__ Round(Meeting* m) : full(m), empty(m + STAGES) {}
    __device__ __forceinline__ void next() {
        phase ^= stage == STAGES - 1;
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
};
constexpr int LAG = STAGES - 2;  // steps that are under way before the first is waited for
// Warps that copy: all of K of all tiles.
template <class F> __device__ __forceinline__ void copy_all(F& feed, int steps, unsigned char* stages, Meeting* meetings) {
    Round r(meetings), there(meetings);
    for (int i = 0; i < steps + LAG; i++) {
        if (i < steps) {
            if (i >= STAGES) meet_wait(r.empty + r.stage, r.phase ^ 1);
            feed(stages + r.stage * STAGE);
            r.next();
        } else cp_async_commit();
        if (i < LAG) continue;
        cp_async_wait<LAG>();
        wgmma_seen();
        meet_arrive(there.full + there.stage);
        there.next();
    }
}
template <int N> __device__ __forceinline__ void registers_up() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (N) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(N ? N : 8));
#endif
}
template <int N> __device__ __forceinline__ void registers_down() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    if (N) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(N ? N : 8));
#endif
}

// Tiles side by side of 8 * M rows of x: all of K through the pipeline, then `put(row of W in the
// block, 64 x 8 * M results)` for each fragment; `meanwhile` before anything has come.
// While products of a chunk run, weights of the next one are decoded.
template <int M, class F, class G>
__device__ __forceinline__ void tile(const Job& j, unsigned char* stages, F meanwhile, G put) {
    constexpr int N = 8 * M, V = N / 2;
    __shared__ Meeting meetings[2 * STAGES];
    if (FEEDS && threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            meet_init(meetings + i, FEEDERS);
            meet_init(meetings + STAGES + i, WN);
        }
        meet_ready();
    }
    if (FEEDS) {
        meanwhile();
        __syncthreads();
        if (threadIdx.x >= WN * 32) {
            registers_down<MANY ? FEW : 0>();
            Feed<N> feed(j);
            copy_all(feed, j.steps * j.tiles, stages, meetings);
            return;
        }
        registers_up<MANY>();
    }
    Round r(meetings);
#if !FEEDS
    Feed<N> feed(j);
    #pragma unroll
    for (int i = 0; i < STAGES - 1; i++) feed(stages + i * STAGE);
    meanwhile();
    cp_async_wait<STAGES - 2>();
    wgmma_seen();
    __syncthreads();
#else
    meet_wait(r.full, 0);
#endif
    unsigned a[2][FRAGMENTS][PRODUCTS][4];
    decode(stages, 0, j.aids, a[0]);
    const WgmmaMatrix first = wgmma_kept(wgmma_rows(stages, 1024));
    for (int q = 0; q < j.tiles; q++) {
        float d[FRAGMENTS][V], own[FRAGMENTS][APART ? V : 1];
        #pragma unroll
        for (int v = 0; v < FRAGMENTS * V; v++) d[v / V][v % V] = 0.f;
        for (int i = 0; i < j.steps; i++) {
            const int stage = r.stage, done = stage == 0 ? STAGES - 1 : stage - 1;
            const bool end_of_tile = i + 1 == j.steps, last = end_of_tile && q + 1 < j.tiles;
            const WgmmaMatrix x = first + stage * (STAGE / 16);
            float by[FRAGMENTS][2];
            if constexpr (APART && W::SCALE < 0 && PARTS == 1)
                #pragma unroll
                for (int v = 0; v < FRAGMENTS * 2; v++) {
                    const float* scales = (const float*)(stages + stage * STAGE + A + B);
                    by[v / 2][v % 2] = scales[rows_of(v / 2) + row_of(v % 2)];
                }
            r.next();
            #pragma unroll
            for (int c = 0; c < CH; c++) {
                wgmma_fence();
                #pragma unroll
                for (int f = 0; f < FRAGMENTS; f++)
                    #pragma unroll
                    for (int h = 0; h < PRODUCTS; h++) {
                        const int k = c * PRODUCTS + h;  // 32 bytes of each row of x
                        const WgmmaMatrix b = x + k / 4 * (BM * 8) + k % 4 * WGMMA_K;
                        if constexpr (APART) multiply<N>(own[f], a[c % 2][f][h], b, c % SUMMED + h > 0);
                        else multiply<N>(d[f], a[c % 2][f][h], b, 1);
                    }
                wgmma_commit();
                wgmma_wait<1>();
                const bool end = c == CH - 1;
#if FEEDS
                if (c == 0 && q + i > 0 && threadIdx.x % 32 == 0) meet_arrive(r.empty + done);
                if (end && !(end_of_tile && !last)) meet_wait(r.full + r.stage, r.phase);
#else
                if (end) {
                    cp_async_wait<STAGES - 3>();
                    wgmma_seen();
                    __syncthreads();
                    feed(stages + done * STAGE);
                }
#endif
                const float* aids = j.aids + (end && last ? q + 1 : q) * BN;
                decode(stages + (end ? r.stage : stage) * STAGE, end ? 0 : c + 1, aids, a[(c + 1) % 2]);
                // Tensor cores cut off what a sum has no room for, which would add up along a row:
                // so many chunks are summed by themselves, and FP8 in blocks gets its scale then.
                if constexpr (APART) if (c % SUMMED == SUMMED - 1) {
                    wgmma_wait<0>();
                    #pragma unroll
                    for (int v = 0; v < FRAGMENTS * V; v++) {
                        wgmma_own(own[v / V][v % V]);
                        if constexpr (W::SCALE < 0 && PARTS == 1)
                            d[v / V][v % V] = fmaf(own[v / V][v % V], by[v / V][v / 2 % 2], d[v / V][v % V]);
                        else d[v / V][v % V] += own[v / V][v % V];
                    }
                }
            }
        }
        wgmma_wait<0>();
        #pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) {
            wgmma_own(d[f]);
            put(q * BN + rows_of(f), d[f]);
        }
    }
}
