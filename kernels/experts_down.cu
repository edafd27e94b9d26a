// y = add + sum over a row's experts of weight_e * down_e h_e, the shared expert among them. A warp holds one pick of 8*M outputs; the picks
// of an output are then added in one order. Weights are fetched before h is there: who was picked is known since the router.
//   w      : [dbytes]   u8   NVFP4 [e, n, 16*chunks] (lib/nvfp4.cuh); I = 32*chunks; the shared expert, if any, is the last of e
//   s      : [dscales]  u8   [e, n/4, 8*chunks]
//   gs     : [drows]    f32  global scales of the rows, e*n of them
//   logits : [rows, ld]            f32  of the router; with a shared expert the last one is its gate's
//   h      : [rows, picks, half]   f32  half = I
//   ids    : [rows, top_k]          i32  who was picked, best first, or null
//   weights : [rows, top_k]         f32  their weights, or null
//   add    : [rows, n]             f32  residual, or null; may be y
//   y      : [rows, n]             f32
//   -D INNER= (I, 512) EXPERTS= (E) TOP_K= SHARED= (0 or 1)   16 | n
//   launch: <<<(n/16, rows), 32*picks>>>
#include "lib/nvfp4.cuh"
#include "lib/stage.cuh"
#include "lib/pdl.cuh"
#include "lib/topk.cuh"
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
constexpr int I = INNER, E = EXPERTS, TOP = TOP_K, M = 2;
#define THREADS (32 * (TOP + SHARED))
constexpr int C = I / 32;
static_assert(C == 16, "half a warp holds a row");

extern "C" __global__ void __launch_bounds__(THREADS) experts_down(const unsigned char* __restrict__ w, const unsigned char* __restrict__ s,
        const float* __restrict__ gs, const float* logits, const float* h, int* ids, float* weights,
        const float* add, float* y,
        float scaling, int n, int ld) {
    __shared__ float part[TOP + SHARED][8 * M], shares[TOP];
    __shared__ int chosen[TOP];
    __shared__ uint4 xs[TOP + SHARED][4 * (C + 2)];
    __shared__ float scale[TOP + SHARED][C];
    const int lane = threadIdx.x % 32, pick = threadIdx.x / 32, t = blockIdx.y, c = lane % 16;
    logits += (size_t)t * ld;
    if (pick == 0) {
        int id; float logit;
        topk<E, TOP, false>(logits, nullptr, lane, id, logit);
        const float share = route_weight<E, TOP, 0>(logits, logit, true, scaling, lane);
        if (lane < TOP) {
            chosen[lane] = id; shares[lane] = share;
            if (ids && !blockIdx.x) { ids[t * TOP + lane] = id; weights[t * TOP + lane] = share; }
        }
    }
    __syncthreads();
    int e = chosen[pick % TOP];
    float weight = shares[pick % TOP];
    if (SHARED && pick == TOP) { e = E; weight = ld > E ? 1.f / (1.f + expf(-logits[E])) : 1.f; }
    uint4 q[4][M];
    uint2 f[M];
    float unit[M];
    #pragma unroll
    for (int m = 0; m < M; m++) {  // half a warp to four outputs
        const size_t row = (size_t)e * n + (blockIdx.x * M + m) * 8 + lane / 16 * 4;
        #pragma unroll
        for (int r = 0; r < 4; r++) q[r][m] = __ldcs((const uint4*)w + (row + r) * C + c);
        f[m] = __ldcs((const uint2*)s + row / 4 * C + c);
        unit[m] = __ldg(gs + row + c / 4) * NVFP4_UNIT;
    }
    const int out = blockIdx.x * 8 * M + threadIdx.x;
    float sum = add && threadIdx.x < 8 * M ? add[(size_t)t * n + out] : 0.f;  // older than the kernel before this one
    pdl_trigger();
    pdl_wait();
    h += ((size_t)t * (TOP + SHARED) + pick) * I;
    #pragma unroll
    for (int i = 0; i < I / 128; i++) {  // eight lanes to a chunk
        const float4 v = ((const float4*)h)[i * 32 + lane];
        float top = fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
        for (int m = 1; m < 8; m *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
        const float2 z = chunk_scale(top);
        const __half2 lo = __floats2half2_rn(v.x * z.x, v.y * z.x), hi = __floats2half2_rn(v.z * z.x, v.w * z.x);
        // piece lane%8/2 of chunk 4*i + lane/8, as gemv.cu lays them out
        ((uint2*)&xs[pick][lane % 8 / 2 * (C + 2) + i * 4 + lane / 8])[lane % 2] = make_uint2(*(const unsigned*)&lo, *(const unsigned*)&hi);
        if (lane % 8 == 0) scale[pick][i * 4 + lane / 8] = z.y;
    }
    __syncwarp();
    uint4 x[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) x[i] = xs[pick][i * (C + 2) + c];
    weight *= scale[pick][c];
    #pragma unroll
    for (int m = 0; m < M; m++) {
        float v[4];
        #pragma unroll
        for (int r = 0; r < 4; r++) v[r] = nvfp4_chunk(q[r][m], nvfp4_scales(f[m], r), (const __half2*)x) * weight;
        const float sum4 = half_sum4(v[0], v[1], v[2], v[3]);
        if (c % 4 == 0) part[pick][m * 8 + lane / 16 * 4 + c / 4] = __fmul_rn(sum4, unit[m]);
    }
    __syncthreads();
    if (threadIdx.x < 8 * M) {
        float v = 0.f;
        #pragma unroll
        for (int i = 0; i < TOP + SHARED; i++) v += part[i][threadIdx.x];
        y[(size_t)t * n + out] = sum + v;
    }
}
