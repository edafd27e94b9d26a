// A gated delta net between its projections, for the rows of a decode step: causal convolution, silu, unit q and k, the delta rule, and the
// output gate. The norm over each head is left to whoever reads y: it gets the sums of squares (gemv.cu, IN 2).
// A block owns 32 of the 128 columns of one head's state, 16 KB in registers: a row costs one pass over them, because
// o = exp(g) q.S + (q.k) d with d = beta (v - exp(g) k.S) needs only products with the state before the row.
//   x      : [r, width]            f32   q | k | v | z | b | a, width = 2*kh*128 + 2*vh*128 + 2*vh
//   conv_w : [c, 4]                f32   c = 2*kh*128 + vh*128
//   decay  : [vh]                  f32   A = -exp(A_log)
//   dt_bias: [vh]                  f32
//   norm_w : [128]                 f32
//   conv   : [slots, 4, c]         f32   the input at position p in row p%4: what is written is never what is read
//   rec    : [slots, vh, 128, 128] f32
//   first  : [seqs1]               i32   rows of sequence s: first[s] .. first[s+1]-1
//   starts : [seqs]                i32   position of its first row
//   state_in : [seqs]              i32   slot to begin from (unread at position 0)
//   state_out : [r]                i32   slot for the state after a row, or -1. With several rows a sequence none of them is state_in's.
//   y      : [r, vhd]              f32   vhd = vh*128
//   parts  : [r, vh, 4]            f32   sums of squares of y before norm_w and gate, by block
//   launch: <<<(4*vh, seqs), 256>>>
#include "lib/reduce.cuh"
#include "lib/pdl.cuh"
#ifndef SIGMOID  // output gate: silu, or sigmoid alone
#define SIGMOID 0
#endif

__device__ __forceinline__ float conv_silu(const float* p, const float4 w) {
    const float v = p[0] * w.x + p[1] * w.y + p[2] * w.z + p[3] * w.w;
    return v / (1.f + expf(-v));
}

extern "C" __global__ void __launch_bounds__(256) delta_step(const float* x, const float* __restrict__ conv_w, const float* __restrict__ decay,
        const float* __restrict__ dt_bias, const float* __restrict__ norm_w, float* conv, float* rec, const int* __restrict__ first,
        const int* __restrict__ starts, const int* __restrict__ state_in, const int* __restrict__ state_out, float* y, float* parts, int kh, int vh, int c) {
    __shared__ float qk[256], vs[32], square[8], cross[8];
    __shared__ float4 red[2][8][8];
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
    const int head = blockIdx.x / 4, quarter = blockIdx.x % 4, key = head / (vh / kh), width = c + vh * 128 + 2 * vh;
    const int r0 = first[blockIdx.y], r1 = first[blockIdx.y + 1], start = starts[blockIdx.y], from = state_in[blockIdx.y];
    // Thread t convolves channel t of this head's q | k, and the first warp a column of v besides.
    const int chan[2] = {(tid < 128 ? 0 : kh * 128) + key * 128 + tid % 128, 2 * kh * 128 + head * 128 + quarter * 32 + lane};
    float4 cw[2];
    float past[2][4];  // inputs of three earlier positions, and the one of now
    #pragma unroll
    for (int j = 0; j < 2; j++) {
        cw[j] = ((const float4*)conv_w)[chan[j]];
        #pragma unroll
        for (int i = 0; i < 3; i++) past[j][i + 1] = start ? conv[((size_t)from * 4 + (start + 1 + i) % 4) * c + chan[j]] : 0.f;
    }
    // Columns 4*(lane%8).. of rows 4*warp + lane/8 + 32*i.
    const int rows0 = warp * 4 + lane / 8;
    const size_t at = (size_t)head * 16384 + rows0 * 128 + quarter * 32 + lane % 8 * 4;
    float4 S[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) S[i] = start ? __ldcs((const float4*)(rec + (size_t)from * vh * 16384 + at + i * 4096)) : make_float4(0, 0, 0, 0);
    const float A = decay[head], bias = dt_bias[head], gain = norm_w[quarter * 32 + lane];
    pdl_trigger();
    pdl_wait();
    #pragma unroll 1
    for (int r = r0; r < r1; r++) {
        const float* row = x + (size_t)r * width;
        const int out = state_out[r], pos = start + r - r0;
        const float b = row[width - 2 * vh + head], a = row[width - vh + head] + bias, z = row[c + head * 128 + quarter * 32 + lane];
        #pragma unroll
        for (int j = 0; j < 2; j++) {
            #pragma unroll
            for (int i = 0; i < 3; i++) past[j][i] = past[j][i + 1];
            past[j][3] = row[chan[j]];
        }
        const float u = conv_silu(past[0], cw[0]);
        if (warp == 0) vs[lane] = conv_silu(past[1], cw[1]);
        qk[tid] = u;
        const float sq = warp_sum(u * u);
        if (!lane) square[warp] = sq;
        if (out >= 0) {  // one block writes what several have read
            const bool mine = head % (vh / kh) == 0 && quarter == 0;
            #pragma unroll
            for (int i = 1; i < 4; i++) {
                const size_t o = ((size_t)out * 4 + (pos + 1 + i) % 4) * c;
                if (i < 3 && start && out == from && r == r0) continue;  // in place: only the newest is new
                if (mine) conv[o + chan[0]] = past[0][i];
                if (warp == 0) conv[o + chan[1]] = past[1][i];
            }
        }
        __syncthreads();
        const float nq = rsqrtf(square[0] + square[1] + square[2] + square[3] + 1e-6f) * 0.08838834764831845f;
        const float nk = rsqrtf(square[4] + square[5] + square[6] + square[7] + 1e-6f);
        const float beta = 1.f / (1.f + expf(-b)), eg = expf(A * (a > 20.f ? a : log1pf(expf(a))));
        float4 kS = make_float4(0, 0, 0, 0), qS = kS;
        float k[4], qdotk = 0.f;
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const float q = qk[rows0 + 32 * i] * nq;
            k[i] = qk[128 + rows0 + 32 * i] * nk;
            qdotk += q * k[i];
            kS.x += k[i] * S[i].x; kS.y += k[i] * S[i].y; kS.z += k[i] * S[i].z; kS.w += k[i] * S[i].w;
            qS.x += q * S[i].x; qS.y += q * S[i].y; qS.z += q * S[i].z; qS.w += q * S[i].w;
        }
        #pragma unroll
        for (int m = 8; m < 32; m *= 2) {
            #pragma unroll
            for (int i = 0; i < 4; i++) { (&kS.x)[i] += __shfl_xor_sync(~0u, (&kS.x)[i], m); (&qS.x)[i] += __shfl_xor_sync(~0u, (&qS.x)[i], m); }
            qdotk += __shfl_xor_sync(~0u, qdotk, m);
        }
        if (lane < 8) { red[0][warp][lane] = kS; red[1][warp][lane] = qS; }
        if (!lane) cross[warp] = qdotk;
        __syncthreads();
        float4 d = make_float4(0, 0, 0, 0);
        const float* col = &red[0][0][lane % 8].x;
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            float v = 0.f;
            #pragma unroll
            for (int j = 0; j < 8; j++) v += col[j * 32 + i];
            (&d.x)[i] = (vs[lane % 8 * 4 + i] - eg * v) * beta;
        }
        #pragma unroll
        for (int i = 0; i < 4; i++)
            #pragma unroll
            for (int j = 0; j < 4; j++) (&S[i].x)[j] = (&S[i].x)[j] * eg + k[i] * (&d.x)[j];
        if (warp == 0) {  // lane = column
            float q = 0.f, dot = 0.f, v = 0.f;
            #pragma unroll
            for (int j = 0; j < 8; j++) { q += (&red[1][j][0].x)[lane]; v += (&red[0][j][0].x)[lane]; dot += cross[j]; }
            const float o = eg * q + dot * (vs[lane] - eg * v) * beta;
            const float ss = warp_sum(o * o), g = 1.f / (1.f + expf(-z));
            y[((size_t)r * vh + head) * 128 + quarter * 32 + lane] = o * gain * (SIGMOID ? g : z * g);
            if (!lane) parts[((size_t)r * vh + head) * 4 + quarter] = ss;
        }
        if (out >= 0)
            #pragma unroll
            for (int i = 0; i < 4; i++) __stcs((float4*)(rec + (size_t)out * vh * 16384 + at + i * 4096), S[i]);
        if (r + 1 < r1) __syncthreads();
    }
}
