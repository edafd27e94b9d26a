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
//   mid         : [2, rows, words] f32   likewise: hidden values of a row's picks as fp16 with a scale for each 32
//   turn        : [blocks]      i32   whose turn it is; 0 at first
//   ids         : [n, top_k]    i32   who was picked, best first, or null
//   weights     : [n, top_k]    f32   their weights, or null
//   y           : [n, hidden]   f32
//   -D HIDDEN= (a multiple of 32)  INNER= (even with gates)  EXPERTS=  TOP_K=  SHARED= GATE= (of the shared expert; 0 or 1)
//   -D SCORE= (softmax, sigmoid, topk_softmax)  RENORM=  NORM= (0 or 1)  ACT=  UP= DOWN= ROUTER= (formats)  KB_UP= KB_DOWN= (fp8: columns of scales)
//   -D ROWS= (1, 2, 4, 8: at most so many)  BLOCKS=  WARPS= (8 or 16)  DEEP=  AHEAD= (0 or 1)  STEPS=  BYTES= (of shared memory)
//   launch: <<<BLOCKS, 32*WARPS, BYTES>>>
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
#define WARPS 16
#define DEEP 1
#define AHEAD 1
#define BYTES 160000
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
constexpr int H = HIDDEN, I = INNER, E = EXPERTS, TOP = TOP_K, W = WARPS, THREADS = 32 * W, PICKS = TOP + SHARED;
constexpr bool PAIR = ACT::PAIR, FUSED = STEPS == 7;
// Router: a warp to 256 columns of a row
constexpr int SEGS = CEIL(H, 256), NR = E + GATE, RB = CEIL(NR, BLOCKS), RT = CEIL(RB * SEGS, W);
constexpr int N = CEIL(CEIL(E, 32), 4) * 4, LD = 32 * N + 4;  // logits a lane picks among; then the gate's
// Up: a warp to four rows (OQ outputs), a block to UO outputs of a pick, in SUB rounds; BU of a lane's PU chunks at once
constexpr int CU = H / 32, LX = CU + 2, PU = CEIL(CU, 32), BU = Up::VECTORS == 4 ? LEAST(PU, 2) : 1, NU = CEIL(PU, BU);
constexpr int RU = PAIR ? 2 * I : CEIL(I, 4) * 4, QU = RU / 4, OQ = PAIR ? 2 : 4, UO = W * OQ < 32 ? 32 : W * OQ, SUB = UO / (W * OQ), UN = CEIL(I, UO);
// Down: G lanes to four rows, T of those a warp, UB warps' worth of outputs a block
constexpr int CD = CEIL(I, 32), G = CD <= 4 ? 4 : CD <= 8 ? 8 : CD <= 16 ? 16 : 32, T = 32 / G, PD = CEIL(CD, G), BD = Down::VECTORS == 4 ? LEAST(PD, 2) : 1, ND = CEIL(PD, BD);
constexpr int QD = H / 4, UB = CEIL(CEIL(QD, T), BLOCKS), OUTS = UB * T * 4, CP = UN * UO / 32, MID = CEIL(PICKS * CP * 17, 4) * 4;
// Places for weights under way, of each warp: DEEP for `up`, and with AHEAD one for the first of `down`; after `up` all are for `down`
constexpr int UP_SIZE = BU * Up::SIZE + 32, DOWN_SIZE = BD * Down::SIZE + 32 * T, SU = DEEP;
constexpr int AREA = AHEAD || SU * UP_SIZE > DOWN_SIZE ? SU * UP_SIZE : DOWN_SIZE, HELD = AHEAD ? DOWN_SIZE : 0, MORE = AREA / DOWN_SIZE;
constexpr int SD = LEAST(4, MORE + AHEAD), KEEP = SHARED && UB <= 4 && Down::VECTORS == 4;
static_assert(H % 32 == 0 && (!PAIR || I % 2 == 0) && TOP <= 16 && ROWS <= 8 && UO % 32 == 0 && G * PD >= CD && (G == 32 || PD == 1) && SD > 0, "shapes");
struct Shared {
    unsigned char area[W][AREA + HELD], kept[KEEP ? UB : 1][KEEP ? DOWN_SIZE : 16];
    uint4 xs[ROWS][4 * LX];  // activations as fp16, and the inverses of their powers of two
    float xz[ROWS][CU], part[ROWS][PICKS][OUTS], dots[RB][ROWS][SEGS], squares[ROWS][SEGS], share[ROWS][PICKS], hidden[2 > ROWS ? 2 : ROWS][UO];
    int ids[ROWS * TOP];
    unsigned room[ROWS][64];
};
static_assert(sizeof(Shared) <= BYTES, "BYTES is too small");
#define BOUNDS THREADS, (ROWS == 1 && Up::VECTORS == 4 ? 2 : 1)  // with one row, half of the registers are left to the kernels before and after

extern "C" __global__ void __launch_bounds__(BOUNDS) moe(const unsigned char* __restrict__ router_w, const float* __restrict__ router_bias,
        const float* __restrict__ correction, const float* __restrict__ per_expert, const float* __restrict__ gain, const float* __restrict__ router_gain,
        const float* x, const unsigned char* __restrict__ up_w, const unsigned char* __restrict__ up_s, const float* __restrict__ up_gs,
        const float* __restrict__ up_bias, const unsigned char* __restrict__ down_w, const unsigned char* __restrict__ down_s,
        const float* __restrict__ down_gs, const float* __restrict__ down_bias, const float* add, float* logits, float* mid, int* turn, int* ids,
        float* weights, float* y, float eps, float scaling, float limit, int count) {
    DYNAMIC_SHARED(Shared, sm);
    const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32, block = blockIdx.x;
    unsigned char* const area = sm->area[warp];

    // Batch b of four rows of `up`, or of T times four of `down`, and behind them what the rows are multiplied by and have added
    auto fetch_up = [&](unsigned char* p, int e, int q, int b) {
        if (q >= QU) return;
        const size_t r = (size_t)e * RU + 4 * q;
        #pragma unroll
        for (int j = 0; j < BU; j++) {
            const int c = (b * BU + j) * 32 + lane;
            Up::fetch(p + j * Up::SIZE, up_w, up_s, r, c < CU ? c : 0, CU, KB_UP, c < CU);
        }
        if (lane == 0 && up_gs) copy_beside<16>(p + BU * Up::SIZE, up_gs + r, true);
        if (lane == 1 && up_bias) copy_beside<16>(p + BU * Up::SIZE + 16, up_bias + r, true);
    };
    auto fetch_down = [&](unsigned char* p, int e, int u, int b) {
        const int first = (block * UB + u) * T, quad = first + lane / G;
        const bool on = quad < QD;
        const size_t r = (size_t)e * H + (on ? 4 * quad : 0);
        #pragma unroll
        for (int j = 0; j < BD; j++) {
            const int c = (b * BD + j) * G + lane % G;
            Down::fetch(p + j * Down::SIZE, down_w, down_s, r, c < CD ? c : 0, CD, KB_DOWN, on && c < CD);
        }
        const bool mine = lane < T && first + lane < QD;
        const size_t own = (size_t)e * H + 4 * (first + lane);
        if (mine && down_gs) copy_beside<16>(p + BD * Down::SIZE + 16 * lane, down_gs + own, true);
        if (mine && down_bias) copy_beside<16>(p + BD * Down::SIZE + 16 * (T + lane), down_bias + own, true);
    };

    // What needs no activation: router, shared expert
    float w[RT][8], g[8];
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
    const int at0 = warp % SEGS * 256 + lane * 8, su0 = BLOCKS - 1 - block, sw = (warp + W / 2) % W;
    if (NORM && (STEPS & 2) && at0 < H) load8(gain + at0, g);
    if (SHARED && (STEPS & 2) && su0 < UN) fetch_up(area, E, su0 * SUB * W + warp, 0);
    if (KEEP && (STEPS & 4) && sw < UB) fetch_down(sm->kept[sw], E, sw, 0);
    cp_async_commit();
    pdl_wait();
    if (!FUSED) pdl_trigger();
    const int set = FUSED ? turn[block] : 0;
    float* const old_logits = logits + (size_t)(set ^ 1) * ROWS * LD;
    float* const old_mid = mid + (size_t)(set ^ 1) * ROWS * MID;
    logits += (size_t)set * ROWS * LD;
    mid += (size_t)set * ROWS * MID;

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
                #pragma unroll 1
                for (int t = 0; t < count; t++) {
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
        #pragma unroll
        for (int i = 0; i < SEGS; i++) s += sm->squares[t][i];
        return rsqrtf(fmaf(s, 1.f / H, eps));
    };
    if (STEPS & 1) {
        for (int i = tid; i < count * RB; i += THREADS) {
            const int t = i / RB, r = block * RB + i % RB;
            if (r >= NR) continue;
            float s = 0.f;
            #pragma unroll
            for (int k = 0; k < SEGS; k++) s += sm->dots[i % RB][t][k];
            s = __fmul_rn(s, inverse_rms(t));
            if (router_bias && r < E) s += router_bias[r];
            give(logits + t * LD + (r < E ? r : 32 * N), s);
        }
    }

    // `up`: the product of a batch; the hidden values of four rows, two outputs with gates; and the values of a unit as fp16 for all
    auto dot_up = [&](unsigned char* p, int t, int b, float* v) {
        #pragma unroll
        for (int j = 0; j < BU; j++) {
            const int c = LEAST((b * BU + j) * 32 + lane, CU - 1);
            uint4 a[4];
            #pragma unroll
            for (int i = 0; i < 4; i++) a[i] = sm->xs[t][i * LX + c];
            Up::dot(p + j * Up::SIZE, a, sm->xz[t][c], v);
        }
    };
    auto end_up = [&](unsigned char* p, const float* v4, int t, int q, float* hidden) {
        float v = warp_sum4(v4[0], v4[1], v4[2], v4[3]);  // lanes 8i..8i+7: row i
        const float* row = (const float*)(p + BU * Up::SIZE);
        v = fmaf(v, __fmul_rn(__fmul_rn(inverse_rms(t), Up::UNIT), up_gs && q < QU ? row[lane / 8] : 1.f), up_bias && q < QU ? row[4 + lane / 8] : 0.f);
        const float u = PAIR ? __shfl_xor_sync(~0u, v, 16) : 0.f;
        const int o = OQ * q + lane / 8;
        if (lane % 8 == 0 && (!PAIR || lane < 16)) hidden[o % UO] = o < I ? ACT::of(v, u, limit) : 0.f;
    };
    auto give_hidden = [&](const float* hidden, int t, int p, int unit, int k) {
        const int c = unit * (UO / 32) + k;
        const float v = hidden[k * 32 + lane];
        const float2 z = chunk_power<Down::POWER>(__uint_as_float(lanes_max(__float_as_uint(fabsf(v)))));
        const float next = __shfl_down_sync(~0u, v, 1);
        const __half2 h = __floats2half2_rn(v * z.x, next * z.x);
        unsigned word = *(const unsigned*)&h;
        if (word == EMPTY) word = 0x7FFF7FFFu;
        if (lane % 2 == 0) give(mid + t * MID + p * CP * 16 + (lane / 8 * CP + c) * 4 + lane % 8 / 2, __uint_as_float(word));  // piece lane/8 of the chunk
        if (lane == 0) give(mid + t * MID + (PICKS * 16 + p) * CP + c, z.y);
    };
    if (SHARED && (STEPS & 2)) {  // while the logits are on their way
        for (int unit = su0; unit < UN; unit += BLOCKS) {
            #pragma unroll 1
            for (int sub = 0; sub < SUB; sub++) {
                const int q = (unit * SUB + sub) * W + warp;
                #pragma unroll 1
                for (int t = 0; t < count; t++) {
                    float v[4] = {};
                    #pragma unroll 1
                    for (int b = 0; b < NU; b++) {
                        if (b || (t ? NU > 1 : unit != su0 || sub)) { __syncwarp(); fetch_up(area, E, q, b); cp_async_commit(); }
                        cp_async_wait<0>();
                        __syncwarp();
                        if (q < QU) dot_up(area, t, b, v);
                    }
                    end_up(area, v, t, q, sm->hidden[t]);
                }
            }
            __syncthreads();
            for (int i = warp; i < count * (UO / 32); i += W) give_hidden(sm->hidden[i / (UO / 32)], i / (UO / 32), TOP, unit, i % (UO / 32));
            __syncthreads();
        }
    }

    float4 near[N / 4];  // logits: a warp to a row, from the last
    const int mine = W - 1 - warp;
    if ((STEPS & 6) && mine < count) {
        gather4<N / 4, FUSED>(near, logits + mine * LD, lane * N, 4, E);
        pick<E, TOP, SCORE, N>((const float*)near, correction, lane, sm->ids + mine * TOP, sm->room[mine]);
    }
    if (STEPS & 6) __syncthreads();

    // The pipelines: item i is batch i % NU (ND) of a warp's i / NU-th four rows
    const int ups = (STEPS & 2) ? count * TOP * UN : 0, items = block < ups ? (ups - block + BLOCKS - 1) / BLOCKS * SUB * NU : 0;
    auto issue_up = [&](int i) {
        if (i < items) {
            const int u = block + i / (SUB * NU) * BLOCKS, pick = u % (count * TOP), unit = u / (count * TOP);
            fetch_up(area + i % SU * UP_SIZE, sm->ids[pick], (unit * SUB + i / NU % SUB) * W + warp, i % NU);
        }
        cp_async_commit();
    };
    const int downs = (STEPS & 4) && warp < count * TOP * UB ? (count * TOP * UB - warp + W - 1) / W * ND : 0;
    auto place_down = [&](int i) { i %= SD; return AHEAD ? i ? area + (i - 1) * DOWN_SIZE : area + AREA : area + i * DOWN_SIZE; };
    auto issue_down = [&](int i) {
        if (i < downs) {
            const int d = warp + i / ND * W;
            fetch_down(place_down(i), sm->ids[d / UB], d % UB, i % ND);
        }
        cp_async_commit();
    };
    #pragma unroll
    for (int i = 0; i < SU; i++) issue_up(i);
    if (AHEAD) issue_down(0);
    if (FUSED) {
        pdl_trigger();
        const float4 e = make_float4(__uint_as_float(EMPTY), __uint_as_float(EMPTY), __uint_as_float(EMPTY), __uint_as_float(EMPTY));
        for (int i = block * THREADS + tid; i < ROWS * LD / 4; i += BLOCKS * THREADS) ((float4*)old_logits)[i] = e;
        for (int i = block * THREADS + tid; i < ROWS * MID; i += BLOCKS * THREADS) old_mid[i] = e.x;
    }
    float residual = 0.f;
    if ((STEPS & 4) && add) {
        const int t = tid / OUTS, o = block * OUTS + tid % OUTS;
        if (t < count && o < H) residual = add[(size_t)t * H + o];
    }
    if ((STEPS & 4) && mine < count) {  // weights of the picked
        const float* p = logits + mine * LD;
        const int id = sm->ids[mine * TOP + (lane < TOP ? lane : 0)];
        float share = pick_weight<E, TOP, SCORE, RENORM, N>((const float*)near, __ldcg(p + id), scaling, lane);
        if (per_expert) share = __fmul_rn(share, per_expert[id]);
        if (lane < TOP) {
            sm->share[mine][lane] = share;
            if (ids && !block) ids[mine * TOP + lane] = id;
            if (weights && !block) weights[mine * TOP + lane] = share;
        }
        if (SHARED && lane == TOP) {
            float4 one = make_float4(0.f, 0.f, 0.f, 0.f);
            if (GATE) gather4<1, FUSED>(&one, p + 32 * N, 0, 4, 1);
            sm->share[mine][TOP] = GATE ? logistic(one.x) : 1.f;
        }
    }

    if (STEPS & 2) {
        float v[4];
        #pragma unroll 1
        for (int i = 0; i < items; i++) {
            const int k = i / (SUB * NU), u = block + k * BLOCKS, pick = u % (count * TOP), unit = u / (count * TOP), sub = i / NU % SUB, q = (unit * SUB + sub) * W + warp;
            unsigned char* p = area + i % SU * UP_SIZE;
            if (AHEAD && i < SU) cp_async_wait<SU>();  // `down` may come later
            else cp_async_wait<SU - 1>();
            __syncwarp();
            if (i % NU == 0) v[0] = v[1] = v[2] = v[3] = 0.f;
            if (q < QU) dot_up(p, pick / TOP, i % NU, v);
            if (i % NU == NU - 1) end_up(p, v, pick / TOP, q, sm->hidden[k % 2]);
            __syncwarp();
            issue_up(i + SU);
            if (i % NU == NU - 1 && sub == SUB - 1) {
                __syncthreads();
                for (int c = (warp + k) % W; c < UO / 32; c += W) give_hidden(sm->hidden[k % 2], pick / TOP, pick % TOP, unit, c);
            }
        }
    }

    if (STEPS & 4) {
        cp_async_wait<0>();
        __syncwarp();
        #pragma unroll
        for (int i = AHEAD; i < SD; i++) issue_down(i);
        // Batch b of the product with the hidden values of pick p of row t, as soon as they are there; and its end
        auto dot_down = [&](unsigned char* place, int t, int p, int b, float* v) {
            const float *at = mid + t * MID + p * CP * 16, *scales = mid + t * MID + (PICKS * 16 + p) * CP;
            #pragma unroll
            for (int j = 0; j < BD; j++) {
                const int c = LEAST((b * BD + j) * G + lane % G, CD - 1);
                float4 h[4];
                float z;
                gather4<4, FUSED>(h, at, c * 4, CP * 4, CP * 16, scales + c, &z);
                Down::dot(place + j * Down::SIZE, (const uint4*)h, z, v);
            }
        };
        auto end_down = [&](unsigned char* place, const float* v, int t, int p, int u) {
            const float sum = group_sum4<G>(v[0], v[1], v[2], v[3]);
            const int o = lane / (G / 4);
            const float* row = (const float*)(place + BD * Down::SIZE);
            const bool on = (block * UB + u) * T * 4 + o < H;
            if (lane % (G / 4) == 0)
                sm->part[t][p][u * T * 4 + o] = fmaf(sum, __fmul_rn(Down::UNIT, down_gs && on ? row[o] : 1.f), down_bias && on ? row[4 * T + o] : 0.f);
        };
        auto shared_down = [&] {
            for (int u = sw; u < UB; u += W)
                #pragma unroll 1
                for (int t = 0; t < count; t++) {
                    unsigned char* place = KEEP ? sm->kept[u] : place_down(0);
                    float v[4] = {};
                    #pragma unroll 1
                    for (int b = 0; b < ND; b++) {
                        if (b || (t ? ND > 1 : !KEEP)) { __syncwarp(); fetch_down(place, E, u, b); cp_async_commit(); cp_async_wait<0>(); __syncwarp(); }
                        dot_down(place, t, TOP, b, v);
                    }
                    end_down(place, v, t, TOP, u);
                }
        };
        if (KEEP) shared_down();  // its hidden values were the first to be given
        float v[4];
        #pragma unroll 1
        for (int i = 0; i < downs; i++) {
            const int d = warp + i / ND * W, u = d % UB, p = d / UB % TOP, t = d / UB / TOP;
            cp_async_wait<SD - 1>();
            __syncwarp();
            if (i % ND == 0) v[0] = v[1] = v[2] = v[3] = 0.f;
            dot_down(place_down(i), t, p, i % ND, v);
            if (i % ND == ND - 1) end_down(place_down(i), v, t, p, u);
            __syncwarp();
            issue_down(i + SD);
        }
        if (SHARED && !KEEP) { cp_async_wait<0>(); __syncwarp(); shared_down(); }
        __syncthreads();
        for (int i = tid; i < count * OUTS; i += THREADS) {
            const int t = i / OUTS, o = block * OUTS + i % OUTS;
            if (o >= H) continue;
            if (i != tid) residual = add ? add[(size_t)t * H + o] : 0.f;
            float s = 0.f;
            #pragma unroll
            for (int p = 0; p < PICKS; p++) s = fmaf(sm->share[t][p], sm->part[t][p][i % OUTS], s);
            y[(size_t)t * H + o] = residual + s;
        }
        if (FUSED && !tid) turn[block] = set ^ 1;
    }
}
