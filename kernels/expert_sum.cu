// The end of a mixture of experts over many rows: y = add + sum over a row's picks of weight times
// result, in the order of the picks.
//   share : [r, picks]    f32   weights, the shared expert's last
//   part  : [r, picks, k]  f32   results (expert_strips.cu)
//   add   : [r, k]        f32   residual; may be y; or null
//   y     : [r, k]        f32
//   -D HIDDEN= (k, a multiple of 32)  PICKS=
//   launch: <<<(ceil(k/512), r), 128>>>
#include "lib/pdl.cuh"
#ifndef HIDDEN
#define HIDDEN 2048
#define PICKS 9
#endif

// With no number of blocks asked for, ptxas keeps to 32 registers, and loads wait for each other.
extern "C" __global__ void __launch_bounds__(128, 4) expert_sum(
        const float* share, const float* part, const float* add, float* y) {
    const int o = (blockIdx.x * 128 + threadIdx.x) * 4;
    const int r = blockIdx.y;
    pdl_trigger();
    pdl_wait();
    if (o < HIDDEN) {
        const size_t at = (size_t)r * HIDDEN + o;
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
        float4 b = v;
        float4 a[PICKS];
        float w[PICKS];
        if (add)
            b = *(const float4*)(add + at);
        #pragma unroll
        for (int p = 0; p < PICKS; p++) {
            w[p] = __ldcg(share + r * PICKS + p);
            a[p] = __ldcg(
                    (const float4*)(part + ((size_t)r * PICKS + p) * HIDDEN + o));
        }
        #pragma unroll
        for (int p = 0; p < PICKS; p++) {
            v.x = fmaf(w[p], a[p].x, v.x);
            v.y = fmaf(w[p], a[p].y, v.y);
            v.z = fmaf(w[p], a[p].z, v.z);
            v.w = fmaf(w[p], a[p].w, v.w);
        }
        *(float4*)(y + at) = make_float4(
                b.x + v.x, b.y + v.y, b.z + v.z, b.w + v.w);
    }
}
