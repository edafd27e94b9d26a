// Attention of a decode step, a piece of 32 positions at a time: norms and rotation of queries and keys, the new keys and values into the
// cache, and softmax(q k) v over the piece. The pieces lie at fixed positions and attn_merge.cu adds them in order, so a row's bits do not
// depend on its company nor on how many blocks run. A block serves all heads of one key head.
//   qkv      : [rows, width]             f32   gates (GATE) | queries | keys | values
//   q_norm, k_norm : [d]                 f32   or null
//   cos, sin : [positions, half]         f32   half = HALF
//   k_pool, v_pool : [blocks, bs, kv, d] bf16  written at the rows' positions
//   tables   : [seqs, mb]                i32   block tables
//   seq      : [rows]                    i32   sequence of each row
//   pos      : [rows]                    i32   its position; rows of a sequence stand together, positions ascending
//   o        : [rows, pieces, heads, d]  f32   values weighted within the piece
//   ml       : [rows, pieces, heads, 2]  f32   largest score of the piece, and the sum of exp(score - largest)
//   -D D= HEADS= KV= HALF= GATE= (0 or 1)    256 threads must hold HEADS/KV heads: D * HEADS/KV % 256 == 0, HEADS/KV <= 8
//   launch: <<<(pieces, kv, rows), 256>>>; window 0: none. Pieces beyond a row's position or before its window are left unwritten.
#include <cuda_bf16.h>
#include "lib/reduce.cuh"
#include "lib/pdl.cuh"
#define NONE __int_as_float(0xFF800000)  // minus infinity; NVRTC knows no INFINITY
#ifndef D
#define D 256
#endif
#ifndef HEADS
#define HEADS 16
#endif
#ifndef KV
#define KV 2
#endif
#ifndef HALF
#define HALF 32
#endif
#ifndef GATE
#define GATE 1
#endif
static_assert(D * HEADS / KV % 256 == 0 && HEADS / KV <= 8, "256 threads hold the heads of a key head");
constexpr int N = 32, G = HEADS / KV, L = D / 32;  // positions a piece, heads a key head, values a lane

__device__ __forceinline__ void copy_async(void* to, const void* from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(from));
}

// A lane's values side by side, so that they are fetched in one piece.
struct alignas(2 * L) Bf16s { unsigned u[L / 2]; };
struct alignas(L < 4 ? 4 * L : 16) Floats { float v[L]; };

// Norm and rotation of a head whose elements l*L .. l*L+L-1 lane l holds; what does not depend on the head is loaded at construction.
struct Turn {
    float g[L], c[L], s[L];
    __device__ __forceinline__ Turn(const float* __restrict__ norm, const float* __restrict__ cos, const float* __restrict__ sin, int p, int lane) {
        #pragma unroll
        for (int i = 0; i < L; i++) {
            const int  e = lane * L + i, h = e % HALF;
            const bool on = e < 2 * HALF;
            g[i] = norm ? norm[e] : 1.f;
            c[i] = on ? cos[(size_t)p * HALF + h] : 1.f;
            s[i] = on ? (e < HALF ? -1.f : 1.f) * sin[(size_t)p * HALF + h] : 0.f;
        }
        normed = norm;
    }
    bool normed;
    __device__ __forceinline__ void operator()(float* v, float eps, int lane) const {
        float m = 0.f;
        #pragma unroll
        for (int i = 0; i < L; i++) m += v[i] * v[i];
        m = normed ? rsqrtf(warp_sum(m) / D + eps) : 1.f;
        #pragma unroll
        for (int i = 0; i < L; i++) v[i] *= m * g[i];
        #pragma unroll
        for (int i = 0; i < L; i++) {
            const float other = __shfl_xor_sync(~0u, v[i], HALF / L);
            v[i] = v[i] * c[i] + other * s[i];
        }
    }
};

extern "C" __global__ void __launch_bounds__(256) attn_decode(const float* qkv, const float* __restrict__ q_norm, const float* __restrict__ k_norm,
        const float* __restrict__ cos, const float* __restrict__ sin, __nv_bfloat16* k_pool, __nv_bfloat16* v_pool, const int* __restrict__ tables,
        const int* __restrict__ seq, const int* __restrict__ pos, float* o, float* ml, float eps, float scale, int window, int bs, int mb) {
    __shared__ uint4 ks[N][D / 8], vs[N][D / 8];
    __shared__ __align__(16) float qs[G][D], ps[N][8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, piece = blockIdx.x, kv = blockIdx.y, t = blockIdx.z;
    const int p = pos[t], lo = piece * N, low = window ? max(0, p - window + 1) : 0;
    if (lo > p || lo + N <= low) return;
    const int* table = tables + (size_t)seq[t] * mb;
    int back = 0;  // rows of the same sequence before this one: their keys are as new as its own
    while (back < t && seq[t - back - 1] == seq[t]) back++;
    const int fresh = p - back, n = min(N, p + 1 - lo);
    auto slot = [&](int j) { return (((size_t)table[j / bs] * bs + j % bs) * KV + kv) * D; };
    for (int i = threadIdx.x; i < N * (D / 8); i += 256) {  // keys and values of earlier steps
        const int j = lo + i / (D / 8);
        if (j < fresh) {
            const size_t a = slot(j) + i % (D / 8) * 8;
            copy_async(&ks[i / (D / 8)][i % (D / 8)], k_pool + a);
            copy_async(&vs[i / (D / 8)][i % (D / 8)], v_pool + a);
        }
    }
    asm volatile("cp.async.commit_group;");
    // Warp w turns query head w, and the fresh key w if it lies in this piece (at most 8 rows a sequence). All it needs but the
    // activations is fetched before the wait.
    const int  j = fresh + warp;
    const bool key = warp <= back && j >= lo && j < lo + N;
    const Turn tq(q_norm, cos, sin, p, lane), tk(k_norm, cos, sin, key ? j : 0, lane);
    const size_t mine = key ? slot(j) + lane * L : 0;
    pdl_trigger();
    pdl_wait();
    constexpr int width = ((1 + GATE) * HEADS + 2 * KV) * D;
    float q[L], k[L], v[L];
    const float* row = qkv + (size_t)t * width + GATE * HEADS * D + (kv * G + warp % G) * D + lane * L;
    const float* fr  = qkv + (size_t)(key ? t - back + warp : t) * width + (1 + GATE) * HEADS * D + kv * D + lane * L;
    #pragma unroll
    for (int i = 0; i < L; i++) { q[i] = ((const Floats*)row)->v[i]; k[i] = ((const Floats*)fr)->v[i]; v[i] = ((const Floats*)(fr + KV * D))->v[i]; }
    tq(q, eps, lane);
    tk(k, eps, lane);
    if (warp < G)
        #pragma unroll
        for (int i = 0; i < L; i++) qs[warp][lane * L + i] = q[i] * scale;
    asm volatile("cp.async.wait_group 0;");
    if (key) {
        #pragma unroll
        for (int i = 0; i < L; i++) {
            const __nv_bfloat16 kb = __float2bfloat16(k[i]), vb = __float2bfloat16(v[i]);
            ((__nv_bfloat16*)ks[j - lo])[lane * L + i] = kb;
            ((__nv_bfloat16*)vs[j - lo])[lane * L + i] = vb;
            if (warp == back) { k_pool[mine + i] = kb; v_pool[mine + i] = vb; }
        }
    }
    __syncthreads();
    {   // scores: a warp to a position, its lanes along the head
        float q[G][L];
        #pragma unroll
        for (int g = 0; g < G; g++)
            #pragma unroll
            for (int i = 0; i < L; i++) q[g][i] = ((const Floats*)qs[g])[lane].v[i];
        #pragma unroll
        for (int j = warp; j < n; j += 8) {
            float s[8] = {};
            const Bf16s kj = ((const Bf16s*)ks[j])[lane];
            #pragma unroll
            for (int i = 0; i < L; i++) {
                const float k = __uint_as_float(i % 2 ? kj.u[i / 2] & 0xFFFF0000u : kj.u[i / 2] << 16);
                #pragma unroll
                for (int g = 0; g < G; g++) s[g] += q[g][i] * k;
            }
            const float a = warp_sum4(s[0], s[1], s[2], s[3]), b = warp_sum4(s[4], s[5], s[6], s[7]);
            const bool seen = lo + j >= low;
            if (lane % 8 == 0) { ps[j][lane / 8] = seen ? a : NONE; ps[j][4 + lane / 8] = seen ? b : NONE; }
        }
    }
    __syncthreads();
    const size_t cell = ((size_t)t * gridDim.x + piece) * HEADS + kv * G;
    if (warp < G) {  // a warp to a head, a lane to a position; at least one is seen
        const float s = lane < n ? ps[lane][warp] : NONE;
        float top = s;
        for (int m = 16; m; m >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
        const float e = expf(s - top), sum = warp_sum(e);
        ps[lane][warp] = e;
        if (!lane) { ml[(cell + warp) * 2] = top; ml[(cell + warp) * 2 + 1] = sum; }
    }
    __syncthreads();
    constexpr int H = D * G / 256;  // heads of a thread
    struct alignas(H % 4 ? 4 : 16) Weights { float v[H]; };
    const int d = threadIdx.x % D, g0 = threadIdx.x / D * H;
    float acc[H] = {};
    #pragma unroll 8
    for (int j = 0; j < n; j++) {
        const float v = __bfloat162float(((const __nv_bfloat16*)vs[j])[d]);
        #pragma unroll
        for (int h = 0; h < H; h++) acc[h] += ((const Weights*)ps[j])[g0 / H].v[h] * v;
    }
    #pragma unroll
    for (int h = 0; h < H; h++) o[(cell + g0 + h) * D + d] = acc[h];
}
