// y = add + sum over a row's experts of weight_e * down_e h_e, the shared expert among them. A warp holds one pick of 8*M outputs; the picks
// of an output are then added in one order. Weights are fetched before h is there: who was picked is known since the router.
//   w      : [e, n, 16*chunks]     u8   NVFP4 (lib/nvfp4.cuh); I = 32*chunks; the shared expert, if any, is the last of e
//   s      : [e, n4, 8*chunks]     u8   n = 4*n4
//   gs     : [e]                   f32  global scales
//   logits : [rows, ld]            f32  of the router; with a shared expert the last one is its gate's
//   correction : [experts]         f32  added for picking only, or null
//   h      : [rows, picks, half]   f32  half = I
//   add    : [rows, n]             f32  residual; may be y
//   y      : [rows, n]             f32
//   -D I= (256 or 512) E= TOP= SHARED= SCORE= RENORM=    -D M=  groups of 8 outputs a block
//   launch: <<<(n/(8*M), rows), 32*picks>>>
#include "lib/nvfp4.cuh"
#include "lib/stage.cuh"
#include "lib/pdl.cuh"
#include "lib/topk.cuh"
#ifndef I
#define I 512
#endif
#ifndef E
#define E 256
#endif
#ifndef TOP
#define TOP 8
#endif
#ifndef SHARED
#define SHARED 1
#endif
#ifndef SCORE
#define SCORE 0
#endif
#ifndef RENORM
#define RENORM 1
#endif
#ifndef M
#define M 2
#endif
#define THREADS (32 * (TOP + SHARED))
constexpr int C = I / 32;
static_assert(C == 16, "half a warp holds a row");

extern "C" __global__ void __launch_bounds__(THREADS) experts_down(const unsigned char* __restrict__ w, const unsigned char* __restrict__ s,
        const float* __restrict__ gs, const float* logits, const float* __restrict__ correction, const float* h, const float* add, float* y,
        float scaling, int n, int ld) {
    __shared__ float part[TOP + SHARED][8 * M], shares[TOP];
    __shared__ int chosen[TOP];
    __shared__ uint4 xs[TOP + SHARED][4 * (C + 2)];
    __shared__ float scale[TOP + SHARED][C];
    const int lane = threadIdx.x % 32, pick = threadIdx.x / 32, t = blockIdx.y, c = lane % 16;
    logits += (size_t)t * ld;
    if (pick == 0) {
        int id; float logit;
        topk<E, TOP, SCORE == 1>(logits, correction, lane, id, logit);
        const float share = route_weight<E, TOP, SCORE>(logits, logit, RENORM, scaling, lane);
        if (lane < TOP) { chosen[lane] = id; shares[lane] = share; }
    }
    __syncthreads();
    int e = chosen[pick % TOP];
    float weight = shares[pick % TOP];
    if (SHARED && pick == TOP) { e = E; weight = ld > E ? 1.f / (1.f + expf(-logits[E])) : 1.f; }
    uint4 q[4][M];
    uint2 f[M];
    #pragma unroll
    for (int m = 0; m < M; m++) {  // half a warp to four outputs
        const size_t row = (size_t)e * n + (blockIdx.x * M + m) * 8 + lane / 16 * 4;
        #pragma unroll
        for (int r = 0; r < 4; r++) q[r][m] = __ldcs((const uint4*)w + (row + r) * C + c);
        f[m] = __ldcs((const uint2*)s + row / 4 * C + c);
    }
    weight *= gs[e] * NVFP4_UNIT;
    const int out = blockIdx.x * 8 * M + threadIdx.x;
    float sum = threadIdx.x < 8 * M ? add[(size_t)t * n + out] : 0.f;  // older than the kernel before this one
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
        if (c % 4 == 0) part[pick][m * 8 + lane / 16 * 4 + c / 4] = sum4;
    }
    __syncthreads();
    if (threadIdx.x < 8 * M) {
        float v = 0.f;
        #pragma unroll
        for (int i = 0; i < TOP + SHARED; i++) v += part[i][threadIdx.x];
        y[(size_t)t * n + out] = sum + v;
    }
}
