// The pieces of attn_decode.cu made one, for rows that see several: y = gate * sum_i e_i o_i / (sum_i e_i l_i + e_sink), e_i = 2^(m_i - largest m).
// A block takes 32 values of a head, one to a lane; its warp w adds pieces w, w+W, ..., then what the warps have is added in order. What a row's sum
// looks like depends on its position alone.
//   o      : [rows, pieces, heads, d]  f32
//   ml     : [rows, pieces, heads, 2]  f32
//   qkv    : [rows, width]             f32   begins with the gates, one for each element, if GATE
//   seq    : [rows]                    i32   sequence of each row; -1: padding
//   first  : [seqs1]                   i32   first row of each sequence
//   starts : [all]                     i32   position of each sequence's first row
//   sinks  : [heads]                   f32   one more logit for each head, or null
//   y      : [rows, heads, d]          f32
//   -D D=  -D GATE=  -D W= N= warps, and pieces that each has under way
//   launch: <<<(ceil(D/32), heads, rows), 32*W>>>; window and many as for attn_decode
#include "lib/pdl.cuh"
#include "lib/pieces.cuh"
#ifndef D
#define D 256
#endif
#ifndef GATE
#define GATE 1
#endif
#ifndef W
#define W 16
#endif
#ifndef N
#define N 8
#endif

extern "C" __global__ void __launch_bounds__(32 * W) attn_merge(const float* o, const float* ml, const float* qkv, const int* __restrict__ seq, const int* __restrict__ first,
        const int* __restrict__ starts, const float* __restrict__ sinks, float* y, int window, int many, int max_pieces, int width) {
    __shared__ float part[W][32], tops[W], sums[W];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, d = blockIdx.x * 32 + lane, h = blockIdx.y, heads = gridDim.y, t = blockIdx.z, s = seq[t];
    const Pieces pieces{many};
    const int  p = s < 0 ? 0 : starts[s] + t - first[s], a = pieces.of(window ? max(0, p - window + 1) : 0), count = pieces.of(p) - a + 1;
    const bool mine = D % 32 == 0 || d < D;
    const float sink = sinks ? __fmul_rn(sinks[h], LOG2E) : NONE;
    pdl_trigger();
    pdl_wait();
    if (s < 0 || count == 1) return;
    const float gate = GATE && !warp && mine ? qkv[(size_t)t * width + h * D + d] : 0.f;
    o  += ((size_t)t * max_pieces * heads + h) * D + d;
    ml += ((size_t)t * max_pieces * heads + h) * 2;
    float top = NONE, sum = 0.f, v = 0.f;
    #pragma unroll 1
    for (int i = warp; i < count; i += W * N) {
        float2 w[N];
        float  x[N], m = top;
        #pragma unroll
        for (int k = 0; k < N; k++) {
            const size_t at = (size_t)(i + W * k) * heads;
            const bool on = i + W * k < count;
            w[k] = on ? *(const float2*)(ml + at * 2) : make_float2(NONE, 0.f);
            x[k] = on && mine ? o[at * D] : 0.f;
        }
        #pragma unroll
        for (int k = 0; k < N; k++) m = fmaxf(m, w[k].x);
        const float base = m == NONE ? 0.f : m, f = exp2f(__fsub_rn(top, base));
        sum = __fmul_rn(sum, f); v = __fmul_rn(v, f); top = m;
        #pragma unroll
        for (int k = 0; k < N; k++) { const float e = exp2f(__fsub_rn(w[k].x, base)); sum = fmaf(e, w[k].y, sum); v = fmaf(e, x[k], v); }
    }
    part[warp][lane] = v;
    if (!lane) { tops[warp] = top; sums[warp] = sum; }
    __syncthreads();
    if (warp) return;
    float base = sink, all, r = 0.f;
    #pragma unroll
    for (int i = 0; i < W; i++) base = fmaxf(base, tops[i]);
    if (base == NONE) base = 0.f;  // nothing but NaN
    all = exp2f(__fsub_rn(sink, base));
    #pragma unroll
    for (int i = 0; i < W; i++) { const float e = exp2f(__fsub_rn(tops[i], base)); all = fmaf(e, sums[i], all); r = fmaf(e, part[i][lane], r); }
    r /= all;
    if (GATE) r = gated(r, gate);
    if (mine) y[((size_t)t * heads + h) * D + d] = r;
}
