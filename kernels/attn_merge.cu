// The pieces of attn_decode.cu made one: y = sigmoid(gate) * sum_i e_i o_i / (sum_i e_i l_i + e_sink), e_i = exp(m_i - largest m).
// A block takes 32 values of a head, one to a lane; its warp w adds pieces w, w+8, ..., then the eight are added in order.
//   o     : [rows, pieces, heads, d]  f32
//   ml    : [rows, pieces, heads, 2]  f32
//   qkv   : [rows, width]             f32   begins with the gates, one for each element, if GATE
//   sinks : [heads]                   f32   one more logit for each head, or null
//   pos   : [rows]                    i32
//   y     : [rows, heads, d]          f32
//   -D D= (32 to 256)  -D GATE=
//   launch: <<<(D/32, heads, rows), 256>>>; window as for attn_decode
#include "lib/reduce.cuh"
#include "lib/pdl.cuh"
#define NONE __int_as_float(0xFF800000)  // minus infinity; NVRTC knows no INFINITY
#ifndef D
#define D 256
#endif
#ifndef GATE
#define GATE 1
#endif
constexpr int N = 32;

extern "C" __global__ void __launch_bounds__(256) attn_merge(const float* o, const float* ml, const float* qkv, const float* __restrict__ sinks,
        const int* __restrict__ pos, float* y, int window, int pieces, int width) {
    __shared__ float part[8][32], sums[8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, d = blockIdx.x * 32 + lane, h = blockIdx.y, heads = gridDim.y, t = blockIdx.z;
    const int p = pos[t], low = window ? max(0, p - window + 1) : 0, first = low / N, last = p / N;
    const float sink = sinks ? sinks[h] : NONE;
    pdl_trigger();
    pdl_wait();
    o  += ((size_t)t * pieces * heads + h) * D + d;
    ml += ((size_t)t * pieces * heads + h) * 2;
    const float gate = GATE && warp == 0 ? qkv[(size_t)t * width + h * D + d] : 0.f;
    float top = sink, sum = 0.f, a = 0.f;
    for (int i = first + lane; i <= last; i += 32) top = fmaxf(top, ml[(size_t)i * heads * 2]);  // every warp finds the largest for itself
    for (int m = 16; m; m >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
    #pragma unroll 8
    for (int i = first + warp; i <= last; i += 8) {
        const float2 v = *(const float2*)(ml + (size_t)i * heads * 2);
        const float  e = expf(v.x - top);
        sum = fmaf(e, v.y, sum);
        a = fmaf(e, o[(size_t)i * heads * D], a);
    }
    part[warp][lane] = a;
    if (!lane) sums[warp] = sum;
    __syncthreads();
    if (warp) return;
    float v = 0.f, l = expf(sink - top);
    #pragma unroll
    for (int i = 0; i < 8; i++) { v += part[i][lane]; l += sums[i]; }
    v /= l;
    if (GATE) v /= 1.f + expf(-gate);
    y[((size_t)t * heads + h) * D + d] = v;
}
