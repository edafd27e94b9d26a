// h = act(gate_e x) * up_e x for the experts picked for each row, and for the shared expert as one more; the norm before them folded in.
// Output-centric: a block belongs to some outputs of one pick of one row, so there is nothing to sort, gather or scatter.
//   w      : [ubytes]            u8    NVFP4 [e, n2, 16*chunks] (lib/nvfp4.cuh); rows 4q..4q+3 of an expert: gates of outputs 2q, 2q+1, then their ups. n2 = 2*I, K = 32*chunks.
//   s      : [uscales]           u8    [e, n2/4, 8*chunks]; the shared expert, if any, is the last of e
//   gs     : [urows]             f32   global scales of the rows, e*n2 of them
//   logits : [rows, ld]          f32   of the router (ld = E, + 1 with a shared gate)
//   gain   : [k]                 f32   of the norm
//   x      : [rows, k]           f32
//   h      : [rows, picks, half] f32   half = I; picks = TOP_K (+ 1 with a shared expert)
//   -D HIDDEN= (K) INNER= (I) EXPERTS= (E) TOP_K= SHARED= (0 or 1)   32 | K, 16 | I
//   launch: <<<(I/16, picks, rows), 256>>>
#include "lib/nvfp4.cuh"
#include "lib/stage.cuh"
#include "lib/pdl.cuh"
#include "lib/reduce.cuh"
#include "lib/topk.cuh"
#ifndef HIDDEN
#define HIDDEN 2048
#endif
#ifndef INNER
#define INNER 512
#endif
#ifndef EXPERTS
#define EXPERTS 256
#endif
#ifndef TOP_K
#define TOP_K 8
#endif
#ifndef SHARED
#define SHARED 1
#endif
constexpr int K = HIDDEN, I = INNER, E = EXPERTS, TOP = TOP_K, W = 8;
#define THREADS (32 * W)
constexpr int C = K / 32, P = (C + 31) / 32, LD = C + 2;

extern "C" __global__ void __launch_bounds__(THREADS) experts_up(const unsigned char* __restrict__ w, const unsigned char* __restrict__ s,
        const float* __restrict__ gs, const float* logits, const float* __restrict__ gain, const float* x,
        float eps, float* h, int ld) {
    __shared__ uint4 xs[4 * LD];
    __shared__ float scale[C], squares[W];
    __shared__ int chosen;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, pick = blockIdx.y, t = blockIdx.z, q = blockIdx.x * W + warp;
    constexpr int J = (K / 8 + THREADS - 1) / THREADS;
    float g[J][8];
    #pragma unroll
    for (int j = 0; j < J; j++) if (j * THREADS + threadIdx.x < K / 8) load8(gain + (j * THREADS + threadIdx.x) * 8, g[j]);
    uint4 c4[4][P];
    uint2 f[P];
    auto fetch = [&](int e) {
        const size_t row = ((size_t)e * (I / 2) + q) * 4;
        #pragma unroll
        for (int p = 0; p < P; p++) {
            const int c = p * 32 + lane;
            const bool on = C % 32 == 0 || c < C;
            #pragma unroll
            for (int r = 0; r < 4; r++) c4[r][p] = on ? __ldcs((const uint4*)w + (row + r) * C + c) : make_uint4(0, 0, 0, 0);
            f[p] = on ? __ldcs((const uint2*)s + row / 4 * C + c) : make_uint2(0, 0);
        }
    };
    if (SHARED && pick == TOP) fetch(E);  // needs no router
    pdl_wait();
    pdl_trigger();  // after the wait: experts_down may read the logits before it waits for this kernel
    float a[J][8];
    x += (size_t)t * K;
    #pragma unroll
    for (int j = 0; j < J; j++) if (j * THREADS + threadIdx.x < K / 8) load8(x + (j * THREADS + threadIdx.x) * 8, a[j]);
    if (!(SHARED && pick == TOP) && warp == W - 1) {
        int id; float v;
        topk<E, TOP, false>(logits + (size_t)t * ld, nullptr, lane, id, v, pick + 1);
        if (lane == pick) chosen = id;
    }
    float sum = 0.f;
    #pragma unroll
    for (int j = 0; j < J; j++) {  // as gemv.cu stages a row, while the last warp looks for the expert
        const int v = j * THREADS + threadIdx.x;
        const bool on = v < K / 8;
        #pragma unroll
        for (int i = 0; i < 8; i++) { a[j][i] = on ? a[j][i] : 0.f; sum += a[j][i] * a[j][i]; a[j][i] = on ? a[j][i] * g[j][i] : 0.f; }
        float top = top8(a[j]);
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        const float2 z = chunk_scale(top);
        if (on) xs[(v % 4) * LD + v / 4] = to_half8(a[j], z.x);
        if (on && v % 4 == 0) scale[v / 4] = z.y;
    }
    sum = warp_sum(sum);
    if (!lane) squares[warp] = sum;
    __syncthreads();
    const int e = SHARED && pick == TOP ? E : chosen;
    if (!(SHARED && pick == TOP)) fetch(e);
    const float unit = __ldg(gs + ((size_t)e * (I / 2) + q) * 4 + lane / 8);
    float y[4] = {};
    #pragma unroll
    for (int p = 0; p < P; p++) {
        const int c = C % 32 == 0 ? p * 32 + lane : min(p * 32 + lane, C - 1);
        uint4 v[4];
        #pragma unroll
        for (int i = 0; i < 4; i++) v[i] = xs[i * LD + c];
        const float z = scale[c];
        #pragma unroll
        for (int r = 0; r < 4; r++) y[r] += nvfp4_chunk(c4[r][p], nvfp4_scales(f[p], r), (const __half2*)v) * z;
    }
    float v = warp_sum4(y[0], y[1], y[2], y[3]), z = 0.f;  // lanes 0-15: gates, 16-31: ups
    #pragma unroll
    for (int i = 0; i < W; i++) z += squares[i];
    v *= rsqrtf(z / K + eps) * NVFP4_UNIT * unit;
    const float up = __shfl_xor_sync(~0u, v, 16);
    if (lane < 16 && lane % 8 == 0) h[((size_t)t * gridDim.y + pick) * I + 2 * q + lane / 8] = v / (1.f + expf(-v)) * up;
}
