// y = add + sum over a row's experts of weight_e * down_e h_e, the shared expert among them. LANES lanes hold four rows of an expert's matrix (a quad), a warp 32/LANES of
// them; a block owns some such groups of outputs, for every expert. Who was picked is known since the router: weights are on their way to shared memory before h is there.
// The picks of an output are added in one order: a row's bits do not depend on how many rows there are.
//   w      : [dbytes]   u8   bank of up to EXPERTS + 1 matrices [HIDDEN, INNER] in FORMAT (lib/quads.cuh); the shared expert is the last
//   s      : [dscales]  u8   their scales; or null
//   gs     : [drows]    f32  nvfp4: scale of each row; or null
//   bias   : [drows]    f32  or null
//   logits : [r, ld]             f32  of the router; with GATE the one after the experts' is the shared expert's gate
//   correction : [experts]       f32  added to the scores for picking only (CORRECTED 1); or null
//   per_expert : [experts]       f32  a factor on the weight of each expert; or null
//   h      : [r, picks, width]   f32  of experts_up
//   ids    : [r, top_k]          i32  who was picked, best first; or null
//   weights : [r, top_k]         f32  their weights; or null
//   add    : [r, n]              f32  residual; or null; may be y
//   y      : [r, n]              f32
//   -D FORMAT= KB= (fp8: columns of scales)  HIDDEN= (n, a multiple of 4)  INNER=  EXPERTS=  TOP_K=  SHARED= GATE= (of the shared expert: 0 or 1)
//   -D SCORE= (of lib/picks.cuh) CORRECTED= (0 or 1)  RENORM=  ROWS= (1, 2, 4, 8: at most so many)  LANES= (4, 8, 16, 32)  WARPS=  DEEP=  OWN= groups of outputs of a block  ROOM= bytes of shared memory
//   launch: <<<any number from ceil(n/4*LANES/32/OWN), 32*WARPS, ROOM>>>, see atlas.cuda.experts
#include "lib/async.cuh"
#include "lib/pdl.cuh"
#include "lib/picks.cuh"
#include "lib/quads.cuh"
#ifndef HIDDEN
#define FORMAT nvfp4
#define KB 1
#define HIDDEN 2048
#define INNER 512
#define EXPERTS 256
#define TOP_K 8
#define SHARED 1
#define GATE 1
#define SCORE SCORE_SOFTMAX
#define CORRECTED 0
#define RENORM 1
#define ROWS 1
#define LANES 16
#define WARPS 18
#define DEEP 1
#define OWN 2
#define ROOM 118784
#endif
typedef quads::FORMAT F;
constexpr int I = INNER, E = EXPERTS, THREADS = 32 * WARPS, PICKS = TOP_K + SHARED, C = (I + 31) / 32, N = (E + 31) / 32, EACH = ROWS > 1 ? 2 : 1;
constexpr int QUADS = HIDDEN / 4, T = 32 / LANES, STEPS = (C + LANES - 1) / LANES, WIDTH = (I + 3) / 4 * 4, SEGMENTS = (I + 255) / 256, OUTS = OWN * T * 4;
struct Shared {
    struct { unsigned char weights[F::SIZE]; float scale[4 * T], bias[4 * T]; } ring[WARPS][DEEP];
    Inputs<I, ROWS * PICKS, F::POWER> h;
    float share[ROWS * PICKS], done[ROWS * PICKS][OUTS];
    Slots<E, TOP_K, SHARED, ROWS, EACH> slots;
};
static_assert(sizeof(Shared) <= ROOM, "see the contract");

extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_down(const unsigned char* __restrict__ w, const unsigned char* __restrict__ s,
        const float* __restrict__ gs, const float* __restrict__ bias, const float* logits, const float* __restrict__ correction,
        const float* __restrict__ per_expert, const float* h, int* ids, float* weights, const float* add, float* y, float scaling, int ld, int rows) {
    DYNAMIC_SHARED(Shared, sm);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    auto quad_of = [&](int group) { return (blockIdx.x + gridDim.x * group) * T + lane / LANES; };
    sm->slots.clear(rows, THREADS);
    #pragma unroll 1
    for (int r = WARPS - 1 - warp; r < rows; r += WARPS) {
        float near[N];
        const float* p = logits + (size_t)r * ld;
        near_logits<E, N>(p, lane, near);
        pick<E, TOP_K, SCORE, CORRECTED, N>(near, correction, lane, sm->slots.of(r));
        __syncwarp();
        const int id = sm->slots.of(r)[lane < TOP_K ? lane : 0];
        float v = pick_weight<E, TOP_K, SCORE, RENORM, N>(near, p[id], scaling, lane);
        if (per_expert) v = __fmul_rn(v, per_expert[id]);
        if (lane < TOP_K) sm->share[r * PICKS + lane] = v;
        if (SHARED && lane == TOP_K) sm->share[r * PICKS + TOP_K] = GATE ? logistic(p[E]) : 1.f;
    }
    __syncthreads();
    if (ROWS > 1) { sm->slots.group(rows, THREADS); __syncthreads(); }
    const int total = (ROWS == 1 ? PICKS : sm->slots.number) * OWN;
    int unit = warp, step = 0, place = 0;  // what is fetched next, and where to
    size_t row = 0;
    bool on = false;
    auto fetch = [&] {
        if (step == 0) {
            const int quad = quad_of(unit % OWN);
            on = unit < total && quad < QUADS;
            row = ((size_t)(on ? sm->slots.expert[unit / OWN] : 0) * QUADS + (on ? quad : 0)) * 4;
        }
        const int c = step * LANES + lane % LANES;
        auto& p = sm->ring[warp][place];
        F::fetch(p.weights, w, s, row, c < C ? c : 0, C, KB, on && (C % LANES == 0 || c < C));
        if (step == STEPS - 1 && lane % LANES == 0) {
            if (gs) copy_beside<16>(p.scale + lane / LANES * 4, gs + row, on);
            if (bias) copy_beside<16>(p.bias + lane / LANES * 4, bias + row, on);
        }
        cp_async_commit();
        place = place == DEEP - 1 ? 0 : place + 1;
        if (++step == STEPS) { step = 0; unit += WARPS; }
    };
    #pragma unroll 1
    for (int n = 0; n < DEEP; n++) fetch();
    auto out_of = [&](int i) { return (blockIdx.x + gridDim.x * (i % OUTS / (4 * T))) * 4 * T + i % (4 * T); };  // where result i of the block goes in its row
    float before = 0.f;  // older than the kernel before this one
    if (add && threadIdx.x < rows * OUTS && out_of(threadIdx.x) < HIDDEN) before = add[(size_t)(threadIdx.x / OUTS) * HIDDEN + out_of(threadIdx.x)];
    pdl_trigger();
    pdl_wait();
    #pragma unroll 1
    for (int first = warp; first < rows * PICKS * SEGMENTS; first += 2 * WARPS) {
        float a[2][8] = {};
        #pragma unroll
        for (int k = 0; k < 2; k++) {
            const int i = first + k * WARPS, v = i % SEGMENTS * 32 + lane;
            #pragma unroll
            for (int j = 0; j < 8; j += 4)
                if (i < rows * PICKS * SEGMENTS && v * 8 + j < I) *(float4*)(a[k] + j) = __ldcg((const float4*)(h + (size_t)(i / SEGMENTS) * WIDTH + v * 8 + j));
            if (I % 4)
                #pragma unroll
                for (int j = 0; j < 8; j++) a[k][j] = v * 8 + j < I ? a[k][j] : 0.f;
        }
        #pragma unroll
        for (int k = 0; k < 2; k++) if (first + k * WARPS < rows * PICKS * SEGMENTS) sm->h.put((first + k * WARPS) / SEGMENTS, (first + k * WARPS) % SEGMENTS * 32 + lane, a[k]);
    }
    __syncthreads();
    int here = 0;
    #pragma unroll 1
    for (int u = warp; u < total; u += WARPS) {
        const int slot = u / OWN;
        const int at = lane / LANES * 4 + lane % LANES / (LANES / 4);
        float v[EACH][4] = {}, scale = F::UNIT, more = 0.f;
        #pragma unroll 1
        for (int i = 0; i < STEPS; i++) {
            const int c = min(i * LANES + lane % LANES, C - 1);
            cp_async_wait<DEEP - 1>();
            #pragma unroll
            for (int r = 0; r < EACH; r++) {
                const int entry = sm->slots.who[slot][r];
                if (ROWS == 1 || entry >= 0) sm->h.template dot<F>(sm->ring[warp][here].weights, entry, c, v[r]);
            }
            if (i == STEPS - 1) {
                __syncwarp();
                if (gs) scale = __fmul_rn(F::UNIT, sm->ring[warp][here].scale[at]);
                if (bias) more = sm->ring[warp][here].bias[at];
                __syncwarp();
            }
            fetch();
            here = here == DEEP - 1 ? 0 : here + 1;
        }
        #pragma unroll
        for (int r = 0; r < EACH; r++) {
            const int entry = sm->slots.who[slot][r];
            if (ROWS > 1 && entry < 0) continue;
            const float z = fmaf(group_sum4<LANES>(v[r][0], v[r][1], v[r][2], v[r][3]), scale, more);
            if (lane % (LANES / 4) == 0) sm->done[entry][u % OWN * 4 * T + at] = z;
        }
    }
    __syncthreads();
    #pragma unroll 1
    for (int i = threadIdx.x; i < rows * OUTS; i += THREADS) {
        const int r = i / OUTS, o = out_of(i);
        if (o >= HIDDEN) continue;
        float v = 0.f;
        #pragma unroll
        for (int p = 0; p < PICKS; p++) v = fmaf(sm->share[r * PICKS + p], sm->done[r * PICKS + p][i % OUTS], v);
        y[(size_t)r * HIDDEN + o] = (i < THREADS ? before : add ? add[(size_t)r * HIDDEN + o] : 0.f) + v;
    }
    if (!blockIdx.x && threadIdx.x < rows * TOP_K) {
        const int r = threadIdx.x / TOP_K, j = threadIdx.x % TOP_K;
        if (ids) ids[threadIdx.x] = sm->slots.of(r)[j];
        if (weights) weights[threadIdx.x] = sm->share[r * PICKS + j];
    }
}
