// A mixture of experts at decode: norm, router, the best experts of each row, their MLPs, the weighted sum and the residual, for at most 8 rows.
// STEPS 7 is all of it in one launch: as many blocks as run at the same time pass logits and hidden values to each other (lib/exchange.cuh), and each
// fetches what it can before it has to wait: router and shared expert before the kernel ahead has ended, `down` of the picked beside their `up`.
// STEPS 1, 2 and 4 are its three parts as launches of their own, for cards or tools that do not let a whole grid run at once; the bits are the same.
// Output-centric: a warp belongs to four rows of `up` of one pick, or to some outputs of one pick, so nothing is sorted, gathered or scattered.
//   router_w    : [rbytes]      u8    ROUTER (bf16 or f32) [EXPERTS + GATE, HIDDEN]: a row an expert, then the shared expert's gate
//   router_bias : [experts]     f32   or null
//   correction  : [experts]     f32   added to the scores for picking only, or null
//   per_expert  : [experts]     f32   a factor on the weight of each expert, or null
//   gain        : [hidden]      f32   of the norm (NORM 1), or null
//   router_gain : [hidden]      f32   likewise, of what the router sees
//   x           : [n, hidden]   f32
//   up_w        : [ubytes]      u8    bank in format UP (lib/quads.cuh): EXPERTS matrices, and with SHARED the shared expert. Rows 4q..4q+3 are the gates
//                                     of outputs 2q, 2q+1, then their ups; without gates (relu2) rows are outputs
//   up_s        : [uscales]     u8    or null
//   up_gs, up_bias : [urows]    f32   scales of rows and what is added to them, or null
//   down_w      : [dbytes]      u8    bank in format DOWN
//   down_s      : [dscales]     u8    or null
//   down_gs, down_bias : [drows] f32  likewise
//   add         : [n, hidden]   f32   residual, or null; may be y
//   logits      : [2, rows, ld] f32   scratch: two sets that take turns, EMPTY at first; ld = E to a multiple of 128, + 4
//   mid         : [2, rows, picks, ip] f32   likewise; picks = TOP_K + SHARED, ip = INNER to a multiple of 32
//   turn        : [blocks]      i32   whose turn it is; 0 at first
//   ids         : [n, top_k]    i32   who was picked, best first, or null
//   weights     : [n, top_k]    f32   their weights, or null
//   y           : [n, hidden]   f32
//   -D HIDDEN= (a multiple of 32)  INNER= (even with gates)  EXPERTS=  TOP_K=  SHARED= GATE= (of the shared expert; 0 or 1)
//   -D SCORE= (softmax, sigmoid, topk_softmax)  RENORM=  NORM= (0 or 1)  ACT=  UP= DOWN= ROUTER= (formats)  KB_UP= KB_DOWN= (fp8: columns of scales)
//   -D ROWS= (1, 2, 4, 8: at most so many)  BLOCKS=  STEPS=  BYTES= (of shared memory)
//   launch: <<<BLOCKS, 512, BYTES>>>
#include "lib/async.cuh"
#include "lib/exchange.cuh"
#include "lib/pdl.cuh"
#include "lib/picks.cuh"
#include "lib/quads.cuh"
#include "lib/reduce.cuh"
enum { softmax, sigmoid, topk_softmax };
#ifndef HIDDEN
#define HIDDEN 2048
#define INNER 512
#define EXPERTS 256
#define TOP_K 8
#define SHARED 1
#define GATE 1
#define SCORE softmax
#define RENORM 1
#define NORM 1
#define ACT silu
#define UP nvfp4
#define DOWN nvfp4
#define ROUTER bf16
#define KB_UP 1
#define KB_DOWN 1
#define ROWS 1
#define BLOCKS 132
#define STEPS 7
#define BYTES 49152
#endif

#define CEIL(a, b) (((a) + (b) - 1) / (b))
#define LEAST(a, b) ((a) < (b) ? (a) : (b))

struct silu { static constexpr bool PAIR = true; static __device__ __forceinline__ float of(float g, float u, float) { return __fmul_rn(g / (1.f + expf(-g)), u); } };
struct gelu_tanh {
    static constexpr bool PAIR = true;
    static __device__ __forceinline__ float of(float g, float u, float) {
        const float c = 1.5957691216f, z = __fmul_rn(g, fmaf(__fmul_rn(c * .044715f, g), g, c));
        return __fmul_rn(g / (1.f + expf(-z)), u);
    }
};
struct swiglu_oai {  // comparisons, not fminf: a NaN stays one
    static constexpr bool PAIR = true;
    static __device__ __forceinline__ float of(float g, float u, float limit) {
        g = g > limit ? limit : g; u = u > limit ? limit : u < -limit ? -limit : u;
        return __fmul_rn(g / (1.f + expf(__fmul_rn(-1.702f, g))), u + 1.f);
    }
};
struct relu2 { static constexpr bool PAIR = false; static __device__ __forceinline__ float of(float u, float, float) { u = u < 0.f ? 0.f : u; return __fmul_rn(u, u); } };

namespace routers {  // eight weights of a row as floats
struct bf16 {
    static __device__ __forceinline__ void load(const unsigned char* __restrict__ w, size_t at, float* v) {
        const uint4 u = __ldcs((const uint4*)(w + 2 * at));
        #pragma unroll
        for (int i = 0; i < 4; i++) { v[2 * i] = __uint_as_float((&u.x)[i] << 16); v[2 * i + 1] = __uint_as_float((&u.x)[i] & 0xFFFF0000u); }
    }
};
struct f32 { static __device__ __forceinline__ void load(const unsigned char* __restrict__ w, size_t at, float* v) { load8((const float*)w + at, v); } };
}  // namespace routers

typedef quads::UP Up;
typedef quads::DOWN Down;
constexpr int H = HIDDEN, I = INNER, E = EXPERTS, TOP = TOP_K;
constexpr bool PAIR = ACT::PAIR, FUSED = STEPS == 7;
constexpr int W = 16, THREADS = 32 * W, PICKS = TOP + SHARED;
// Router: a warp to 256 columns of a row
constexpr int SEGS = CEIL(H, 256), NR = E + GATE, RB = CEIL(NR, BLOCKS), RT = CEIL(RB * SEGS, W);
constexpr int N = CEIL(CEIL(E, 32), 4) * 4, LD = 32 * N + 4;  // logits a lane picks among; then the gate's
// Up: a warp to four rows
constexpr int CU = H / 32, LX = CU + 2, PU = CEIL(CU, 32);
constexpr int RU = PAIR ? 2 * I : CEIL(I, 4) * 4, QU = RU / 4;
// Down: G lanes to four rows, T of those a warp, UB warps' worth of outputs a block
constexpr int CD = CEIL(I, 32), IP = 32 * CD, G = CD <= 4 ? 4 : CD <= 8 ? 8 : CD <= 16 ? 16 : 32, T = 32 / G, PD = CEIL(CD, G);
constexpr int SD = CD < 32 ? CD : 32, LH = SD + 2, QD = H / 4, UB = CEIL(CEIL(QD, T), BLOCKS);
constexpr int OUTS = UB * T * 4;
// Registers: chunks of `up` and of `down` that a lane fetches at once; whether the first of `down` are fetched beside `up` (AHEAD), the shared expert's too (KEEP)
constexpr int WU = sizeof(typename Up::Item) / 4, WD = sizeof(typename Down::Item) / 4;
constexpr int ROOM = 76 - 6 * SHARED, BU = LEAST(PU, WU <= 20 ? 2 : 1), NU = CEIL(PU, BU);
constexpr int FIT = (ROOM - WU * BU) / WD, BD = FIT < 1 ? 1 : LEAST(PD, FIT), ND = CEIL(PD, BD);
constexpr bool AHEAD = FIT > 0, KEEP = SHARED && AHEAD && WU * BU + 2 * WD * BD <= 76;
struct Shared {
    uint4 xs[ROWS][4 * LX], hs[W][4 * LH];  // activations as fp16, and the inverses of their powers of two
    float xz[ROWS][CU], hz[W][SD], part[ROWS][PICKS][OUTS], dots[RB][ROWS][SEGS], squares[ROWS][SEGS], share[ROWS][PICKS];
    int ids[ROWS][TOP];
};
static_assert(sizeof(Shared) <= BYTES, "BYTES is too small");

extern "C" __global__ void __launch_bounds__(THREADS) moe(const unsigned char* __restrict__ router_w, const float* __restrict__ router_bias,
        const float* __restrict__ correction, const float* __restrict__ per_expert, const float* __restrict__ gain, const float* __restrict__ router_gain,
        const float* x, const unsigned char* __restrict__ up_w, const unsigned char* __restrict__ up_s, const float* __restrict__ up_gs,
        const float* __restrict__ up_bias, const unsigned char* __restrict__ down_w, const unsigned char* __restrict__ down_s,
        const float* __restrict__ down_gs, const float* __restrict__ down_bias, const float* add, float* logits, float* mid, int* turn, int* ids,
        float* weights, float* y, float eps, float scaling, float limit, int count) {
    DYNAMIC_SHARED(Shared, sm);
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, block = blockIdx.x;

    // Four rows of `up`, and four (T times) of `down`: a batch of chunks, and what a row is multiplied by and has added
    auto fetch_up = [&](typename Up::Item* it, float2& row, int e, int q, int b) {
        const size_t r = (size_t)e * RU + 4 * q;
        #pragma unroll
        for (int j = 0; j < BU; j++) {
            const int c = (b * BU + j) * 32 + lane;
            Up::fetch(it[j], up_w, up_s, r, c, CU, KB_UP, c < CU);
        }
        if (!b) row = make_float2(up_gs ? __ldg(up_gs + r + lane / 8) : 1.f, up_bias ? __ldg(up_bias + r + lane / 8) : 0.f);
    };
    auto fetch_down = [&](typename Down::Item* it, float2& row, int e, int u, int b) {
        const int quad = (block * UB + u) * T + lane / G;
        const bool on = quad < QD;
        const size_t r = (size_t)e * H + (on ? 4 * quad : 0);
        #pragma unroll
        for (int j = 0; j < BD; j++) {
            const int c = (b * BD + j) * G + lane % G;
            Down::fetch(it[j], down_w, down_s, r, c, CD, KB_DOWN, on && c < CD);
        }
        const int i = lane % G / (G / 4);
        if (!b) row = make_float2(down_gs ? __ldg(down_gs + r + i) : 1.f, down_bias ? __ldg(down_bias + r + i) : 0.f);
    };

    // What needs no activation
    float w[RT][8], g[8];
    typename Up::Item su[BU];
    typename Down::Item sd[BD];
    float2 su_row, sd_row;
    const int sq = warp * BLOCKS + block, sw = (warp + W / 2) % W;  // the shared expert's `up` and `down` are spread over different warps
    if (STEPS & 1) {
        #pragma unroll
        for (int i = 0; i < RT; i++) {
            const int task = i * W + warp, r = block * RB + task / SEGS, at = task % SEGS * 256 + lane * 8;
            const bool on = task < RB * SEGS && r < NR && at < H;
            routers::ROUTER::load(router_w, on ? (size_t)r * H + at : 0, w[i]);
            #pragma unroll
            for (int k = 0; k < 8; k++) w[i][k] = !on ? 0.f : NORM ? w[i][k] * router_gain[at + k] : w[i][k];
        }
    }
    const int at0 = warp % SEGS * 256 + lane * 8;
    if (NORM && (STEPS & 2) && at0 < H) load8(gain + at0, g);
    if (SHARED && (STEPS & 2) && sq < QU) fetch_up(su, su_row, E, sq, 0);
    if (KEEP && (STEPS & 4) && sw < UB) fetch_down(sd, sd_row, E, sw, 0);
    pdl_wait();
    if (!FUSED) pdl_trigger();
    const int set = FUSED ? turn[block] : 0;
    float* const old_logits = logits + (size_t)(set ^ 1) * ROWS * LD;
    float* const old_mid = mid + (size_t)(set ^ 1) * ROWS * PICKS * IP;
    logits += (size_t)set * ROWS * LD;
    mid += (size_t)set * ROWS * PICKS * IP;
    float residual = 0.f;
    if (STEPS & 4) {
        const int t = tid / OUTS, o = block * OUTS + tid % OUTS;
        if (add && t < count && o < H) residual = add[(size_t)t * H + o];
    }

    if (STEPS & 3) {
        for (int i = warp; i < count * SEGS; i += W) {  // rows to fp16, and their squares
            const int t = i / SEGS, at = i % SEGS * 256 + lane * 8;
            float a[8] = {}, sum = 0.f;
            if (at < H) load8(x + (size_t)t * H + at, a);
            if (NORM && i != warp && (STEPS & 2) && at < H) load8(gain + at, g);
            #pragma unroll
            for (int k = 0; k < 8; k++) { sum = fmaf(a[k], a[k], sum); if (NORM && (STEPS & 2)) a[k] = at < H ? __fmul_rn(a[k], g[k]) : 0.f; }
            float top = top8(a);
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
            top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
            const float2 z = chunk_power<Up::POWER>(top);
            if (at < H) {
                sm->xs[t][at / 8 % 4 * LX + at / 32] = to_half8(a, z.x);
                if (at % 32 == 0) sm->xz[t][at / 32] = z.y;
            }
            sum = warp_sum(sum);
            if (!lane) sm->squares[t][i % SEGS] = sum;
        }
        if (STEPS & 1) {
            #pragma unroll
            for (int i = 0; i < RT; i++) {
                const int task = i * W + warp, at = task % SEGS * 256 + lane * 8;
                if (task >= RB * SEGS) break;
                #pragma unroll
                for (int t = 0; t < ROWS; t++) {
                    if (t >= count) break;
                    float a[8] = {}, sum = 0.f;
                    if (at < H) load8(x + (size_t)t * H + at, a);
                    #pragma unroll
                    for (int k = 0; k < 8; k++) sum = fmaf(a[k], w[i][k], sum);
                    sum = warp_sum(sum);
                    if (!lane) sm->dots[task / SEGS][t][task % SEGS] = sum;
                }
            }
        }
        __syncthreads();
    }
    auto inverse_rms = [&](int t) {
        if (!NORM) return 1.f;
        float s = 0.f;
        for (int i = 0; i < SEGS; i++) s += sm->squares[t][i];
        return rsqrtf(fmaf(s, 1.f / H, eps));
    };
    if (STEPS & 1) {
        const int t = tid / RB, r = block * RB + tid % RB;
        if (t < count && r < NR) {
            float s = 0.f;
            for (int i = 0; i < SEGS; i++) s += sm->dots[tid % RB][t][i];
            s = __fmul_rn(s, inverse_rms(t));
            if (router_bias && r < E) s += router_bias[r];
            give(logits + t * LD + (r < E ? r : 32 * N), s);
        }
    }

    // `up`: hidden values of four rows, two outputs with gates
    auto dot_up = [&](const typename Up::Item* it, int t, int b, float* v) {
        #pragma unroll
        for (int j = 0; j < BU; j++) {
            const int c = min((b * BU + j) * 32 + lane, CU - 1);
            uint4 a[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) a[i] = sm->xs[t][i * LX + c];
            Up::dot(it[j], a, sm->xz[t][c], v);
        }
    };
    auto give_up = [&](const float* v4, float2 row, int t, int p, int q) {
        float v = warp_sum4(v4[0], v4[1], v4[2], v4[3]);  // lanes 8i..8i+7: row i
        v = fmaf(v, __fmul_rn(__fmul_rn(inverse_rms(t), Up::UNIT), row.x), row.y);
        const float u = PAIR ? __shfl_xor_sync(~0u, v, 16) : 0.f;
        const int o = PAIR ? 2 * q + lane / 8 : 4 * q + lane / 8;
        if (lane % 8 == 0 && (PAIR ? lane < 16 : o < I)) give(mid + (t * PICKS + p) * IP + o, ACT::of(v, u, limit));
    };
    if (SHARED && (STEPS & 2)) {  // while the logits are on their way
        for (int q = sq; q < QU; q += W * BLOCKS) {
            #pragma unroll 1
            for (int t = 0; t < count; t++) {
                float v[4] = {};
                #pragma unroll 1
                for (int b = 0; b < NU; b++) {
                    if (b || (t ? NU > 1 : q != sq)) fetch_up(su, su_row, E, q, b);
                    dot_up(su, t, b, v);
                }
                give_up(v, su_row, t, TOP, q);
            }
        }
    }

    if (STEPS & 6) {  // who is picked: a warp to a row, from the last
        const int t = W - 1 - warp;
        if (t < count) {
            float4 v[N / 4];
            const float *p = logits + t * LD, *all = (const float*)v;
            gather4<N / 4, FUSED>(v, p, lane * N, 4, E);
            pick<E, TOP, SCORE, N>(all, correction, lane, sm->ids[t]);
            __syncwarp();
            if (STEPS & 4) {
                const int id = sm->ids[t][lane < TOP ? lane : 0];
                float share = pick_weight<E, TOP, SCORE, RENORM, N>(all, __ldcg(p + id), scaling, lane);
                if (per_expert) share = __fmul_rn(share, per_expert[id]);
                if (lane < TOP) {
                    sm->share[t][lane] = share;
                    if (ids && !block) ids[t * TOP + lane] = id;
                    if (weights && !block) weights[t * TOP + lane] = share;
                }
                if (SHARED && lane == TOP) {
                    float4 one = make_float4(0.f, 0.f, 0.f, 0.f);
                    if (GATE) gather4<1, FUSED>(&one, p + 32 * N, 0, 4, 1);
                    sm->share[t][TOP] = GATE ? logistic(one.x) : 1.f;
                }
            }
        }
        __syncthreads();
    }

    typename Down::Item dn[BD];
    float2 dn_row;
    const int downs = count * TOP * UB;
    auto fetch_first_down = [&] { if (AHEAD && (STEPS & 4) && warp < downs) fetch_down(dn, dn_row, sm->ids[warp / UB / TOP][warp / UB % TOP], warp % UB, 0); };
    if (!(STEPS & 2)) fetch_first_down();
    else {
        const int all = count * TOP * QU;
        typename Up::Item it[BU];
        float2 row;
        int n = warp * BLOCKS + block, t = n % (count * TOP) / TOP, p = n % TOP, q = n / (count * TOP);
        if (n < all) fetch_up(it, row, sm->ids[t][p], q, 0);
        fetch_first_down();
        if (FUSED) {
            pdl_trigger();
            const float e = __uint_as_float(EMPTY);
            for (int i = block * THREADS + tid; i < ROWS * LD / 4; i += BLOCKS * THREADS) ((float4*)old_logits)[i] = make_float4(e, e, e, e);
            for (int i = block * THREADS + tid; i < ROWS * PICKS * IP / 4; i += BLOCKS * THREADS) ((float4*)old_mid)[i] = make_float4(e, e, e, e);
        }
        #pragma unroll 1
        while (n < all) {
            float v[4] = {};
            #pragma unroll 1
            for (int b = 0; b < NU; b++) {
                if (b) fetch_up(it, row, sm->ids[t][p], q, b);
                dot_up(it, t, b, v);
            }
            const float2 now = row;
            const int t0 = t, p0 = p, q0 = q;
            n += W * BLOCKS; t = n % (count * TOP) / TOP; p = n % TOP; q = n / (count * TOP);
            if (n < all) fetch_up(it, row, sm->ids[t][p], q, 0);
            give_up(v, now, t0, p0, q0);
        }
    }

    if (STEPS & 4) {
        // Hidden values of one pick, to fp16 for one warp, and their product
        auto dot_down = [&](typename Down::Item* it, float2& row, int e, int t, int p, int u, bool fetched) {
            const float* from = mid + (t * PICKS + p) * IP;
            uint4* hs = sm->hs[warp];
            float* hz = sm->hz[warp];
            float v[4] = {};
            constexpr int M = (SD + 3) / 4;
            #pragma unroll 1
            for (int b = 0; b < ND; b++) {
                if (b || !fetched) fetch_down(it, row, e, u, b);
                #pragma unroll
                for (int j = 0; j < BD; j++) {
                    const int piece = b * BD + j;
                    if (piece >= PD) break;
                    float4 a[M];
                    gather4<M, FUSED>(a, from + piece * 1024, lane * 4, 128, I - piece * 1024);
                    __syncwarp();
                    #pragma unroll
                    for (int i = 0; i < M; i++) {  // eight lanes to a chunk
                        const int c = i * 4 + lane / 8;
                        float top = fmaxf(fmaxf(fabsf(a[i].x), fabsf(a[i].y)), fmaxf(fabsf(a[i].z), fabsf(a[i].w)));
                        for (int m = 1; m < 8; m *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
                        const float2 z = chunk_power<Down::POWER>(top);
                        const __half2 lo = __floats2half2_rn(a[i].x * z.x, a[i].y * z.x), hi = __floats2half2_rn(a[i].z * z.x, a[i].w * z.x);
                        if (c < SD) {
                            ((uint2*)&hs[lane % 8 / 2 * LH + c])[lane % 2] = make_uint2(*(const unsigned*)&lo, *(const unsigned*)&hi);
                            if (lane % 8 == 0) hz[c] = z.y;
                        }
                    }
                    __syncwarp();
                    const int c = min(lane % G, SD - 1);
                    uint4 h[4];
                    #pragma unroll
                    for (int i = 0; i < 4; i++) h[i] = hs[i * LH + c];
                    Down::dot(it[j], h, hz[c], v);
                }
            }
            const float sum = group_sum4<G>(v[0], v[1], v[2], v[3]);
            if (lane % (G / 4) == 0)
                sm->part[t][p][u * T * 4 + lane / (G / 4)] = __fmul_rn(sm->share[t][p], fmaf(sum, __fmul_rn(Down::UNIT, row.x), row.y));
        };
        auto shared_down = [&] {
            for (int u = sw; u < UB; u += W)
                #pragma unroll 1
                for (int t = 0; t < count; t++) dot_down(sd, sd_row, E, t, TOP, u, ND == 1 ? t || (KEEP && u == sw) : KEEP && u == sw && !t);
        };
        if (KEEP) shared_down();  // its hidden values were the first to be given
        #pragma unroll 1
        for (int d = warp; d < downs; d += W) {
            const int u = d % UB, p = d / UB % TOP, t = d / UB / TOP;
            dot_down(dn, dn_row, sm->ids[t][p], t, p, u, AHEAD && d == warp);
        }
        if (SHARED && !KEEP) shared_down();
        __syncthreads();
        for (int i = tid; i < count * OUTS; i += THREADS) {
            const int t = i / OUTS, o = block * OUTS + i % OUTS;
            if (o >= H) continue;
            if (i != tid) residual = add ? add[(size_t)t * H + o] : 0.f;
            float s = 0.f;
            #pragma unroll
            for (int p = 0; p < PICKS; p++) s += sm->part[t][p][i % OUTS];
            y[(size_t)t * H + o] = residual + s;
        }
        if (FUSED && !tid) turn[block] = set ^ 1;
    }
}
