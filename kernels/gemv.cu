// y = W f(x) (+ add): the linear layer of a decode step, W in NVFP4 (lib/nvfp4.cuh), with the norm before it and the residual after it folded in.
// A warp takes 4 rows of W, and K/KW of their length. Its weights are all on their way before it waits for the kernel that makes x.
//   w     : [n, 16*chunks]       u8    K = 32*chunks
//   s     : [n4, 8*chunks]       u8    n = 4*n4
//   gs    : [n]                  f32   global scale of each row
//   extra : [m, k]               bf16  further rows that are never quantised (a delta net's b and a), after the others in y; or null
//   x     : [rows, k]            f32
//   gain  : [k]                  f32   of the norm; null unless IN is 1
//   parts : [rows, heads, 4]     f32   IN 2: sums of squares of quarters of each 128 values of x, a norm over each head still to be done
//   add   : [rows, out]          f32   added to the result, may be y; or null
//   y     : [rows, out]          f32   out = n + m
//   -D K=      length of a row, 32 must divide it        -D ROWS=  rows of x, 1 to 8: the bits of a row are the same for any number
//   -D IN=     0: f(x) = x;  1: f(x) = rmsnorm(x, gain);  2: f(x) = x / rms of its head
//   -D W= KW=  warps a block, warps that share a row of W  -D EXTRA=  1: there may be such further rows, and 256 divides K
//   launch: <<<ceil(n/(4*W/KW)) + ceil(m/W), 32*W>>>
#include "lib/nvfp4.cuh"
#include "lib/stage.cuh"
#include "lib/pdl.cuh"
#include "lib/bf16row.cuh"
#ifndef K
#define K 2048
#endif
#ifndef ROWS
#define ROWS 1
#endif
#ifndef IN
#define IN 1
#endif
#ifndef W
#define W 8
#endif
#ifndef KW
#define KW 1
#endif
#ifndef EXTRA
#define EXTRA 0
#endif
#define THREADS (32 * W)
constexpr int C = K / 32, P = (C + 32 * KW - 1) / (32 * KW);   // chunks a row, and of one lane
constexpr int PASS = ROWS < 16384 / K ? ROWS : 16384 / K;      // rows of x that fit the shared memory together
constexpr int J = (K / 8 + THREADS - 1) / THREADS;             // eights of x that a thread stages
static_assert(K % 32 == 0 && W % KW == 0 && !(EXTRA && (IN == 2 || K % 256)), "see the contract");
constexpr int LD = C + 2;                                      // no bank conflicts when staging nor when reading

// Rows of x as fp16 pieces of 8: piece i of chunk c in xs[i*LD + c]. One barrier for all: sums of squares go the same way.
__device__ __forceinline__ void stage(const float* x, const float g[][8], const float* parts, float eps,
                                      uint4* xs, float* scale, float* squares) {
    float sum = 0.f;
    #pragma unroll
    for (int j = 0; j < J; j++) {
        const int v = j * THREADS + threadIdx.x;
        float a[8] = {};
        if (v < K / 8) {
            load8(x + v * 8, a);
            if (IN == 1) {
                #pragma unroll
                for (int i = 0; i < 8; i++) { sum = fmaf(a[i], a[i], sum); a[i] *= g[j][i]; }
            }
            if (IN == 2) {
                const float4 q = ((const float4*)parts)[v / 16];
                const float inv = rsqrtf((q.x + q.y + q.z + q.w) / 128.f + eps);
                #pragma unroll
                for (int i = 0; i < 8; i++) a[i] *= inv;
            }
        }
        float top = top8(a);
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        if (v < K / 8) {
            const float2 f = chunk_scale(top);
            xs[(v % 4) * LD + v / 4] = to_half8(a, f.x);
            if (v % 4 == 0) scale[v / 4] = f.y;
        }
    }
    if (IN == 1) {
        sum = warp_sum(sum);
        if (threadIdx.x % 32 == 0) squares[threadIdx.x / 32] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) gemv(const unsigned char* __restrict__ w, const unsigned char* __restrict__ s,
        const float* __restrict__ gs, const unsigned short* __restrict__ extra, const float* x, const float* __restrict__ gain,
        const float* parts, float eps, const float* add, float* y, int n, int m) {
    __shared__ uint4 xs[PASS][4 * LD];
    __shared__ float scale[PASS][C], squares[PASS][W], part[KW > 1 ? PASS : 1][W][4];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, group = W / KW;
#if EXTRA
    const int first = (n + 4 * group - 1) / (4 * group);
    if ((int)blockIdx.x >= first) {  // the rows that are not quantised
        const int r = (blockIdx.x - first) * W + warp;
        if (r >= m) return;
        Bf16Row<K, false> row;
        row.load(extra + (size_t)r * K, nullptr, lane);
        pdl_trigger();
        pdl_wait();
        #pragma unroll 1
        for (int t = 0; t < ROWS; t++) {
            const float v = row.dot(x + (size_t)t * K, IN == 1 ? gain : nullptr, eps, lane);
            if (!lane) y[(size_t)t * (n + m) + n + r] = v;
        }
        return;
    }
#endif
    const int r0 = (blockIdx.x * group + warp / KW) * 4, c0 = (warp % KW) * 32 + lane;
    const bool real = r0 < n;
    uint4 q[4][P];
    uint2 f[P];
    #pragma unroll
    for (int p = 0; p < P; p++) {
        const int  c  = c0 + p * 32 * KW;
        const bool on = real && (C % (32 * KW) == 0 || c < C);
        #pragma unroll
        for (int r = 0; r < 4; r++) q[r][p] = on ? __ldcs((const uint4*)w + (size_t)(r0 + r) * C + c) : make_uint4(0, 0, 0, 0);
        f[p] = on ? __ldcs((const uint2*)s + (size_t)(r0 / 4) * C + c) : make_uint2(0, 0);
    }
    float g[J][8] = {};
    if (IN == 1)
        #pragma unroll
        for (int j = 0; j < J; j++) if (j * THREADS + threadIdx.x < K / 8) load8(gain + (j * THREADS + threadIdx.x) * 8, g[j]);
    const float unit = real ? gs[r0 + lane / 8] * NVFP4_UNIT : 0.f;
    pdl_trigger();
    pdl_wait();
    #pragma unroll 1
    for (int t0 = 0; t0 < ROWS; t0 += PASS) {
        const int nt = ROWS - t0 < PASS ? ROWS - t0 : PASS;
        for (int t = 0; t < nt; t++) stage(x + (size_t)(t0 + t) * K, g, IN == 2 ? parts + (size_t)(t0 + t) * (K / 32) : nullptr, eps, xs[t], scale[t], squares[t]);
        __syncthreads();
        for (int t = 0; t < nt; t++) {
            float a[4] = {};
            #pragma unroll
            for (int p = 0; p < P; p++) {
                const int c = C % (32 * KW) == 0 ? c0 + p * 32 * KW : min(c0 + p * 32 * KW, C - 1);  // beyond the end: weights are 0
                uint4 h[4];
                #pragma unroll
                for (int i = 0; i < 4; i++) h[i] = xs[t][i * LD + c];
                const float e = scale[t][c];
                #pragma unroll
                for (int r = 0; r < 4; r++) a[r] = fmaf(nvfp4_chunk(q[r][p], nvfp4_scales(f[p], r), (const __half2*)h), e, a[r]);
            }
            float v = warp_sum4(a[0], a[1], a[2], a[3]);  // row lane/8
            if (KW > 1 && lane % 8 == 0) part[t][warp][lane / 8] = v;
            else if (KW == 1 && real && lane % 8 == 0) {
                if (IN == 1) {
                    float z = 0.f;
                    #pragma unroll
                    for (int i = 0; i < W; i++) z += squares[t][i];
                    v *= rsqrtf(z / K + eps);
                }
                const size_t o = (size_t)(t0 + t) * (n + m) + r0 + lane / 8;
                y[o] = fmaf(v, unit, add ? add[o] : 0.f);
            }
        }
        if (KW > 1) {
            __syncthreads();
            if (warp % KW == 0 && lane % 8 == 0 && real)
                for (int t = 0; t < nt; t++) {
                    float v = 0.f, z = 0.f;
                    #pragma unroll
                    for (int i = 0; i < KW; i++) v += part[t][warp + i][lane / 8];
                    #pragma unroll
                    for (int i = 0; i < W; i++) z += IN == 1 ? squares[t][i] : 0.f;
                    if (IN == 1) v *= rsqrtf(z / K + eps);
                    const size_t o = (size_t)(t0 + t) * (n + m) + r0 + lane / 8;
                    y[o] = fmaf(v, unit, add ? add[o] : 0.f);
                }
        }
        if (t0 + PASS < ROWS) __syncthreads();
    }
}
