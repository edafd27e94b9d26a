// h = act(gate_e x) * up_e x for the experts that rows picked, and for the shared expert as one more; the norm before them folded in. LANES lanes hold four rows of an
// expert's matrix (a quad), a warp 32/LANES of them (a unit). All units are dealt out to the warps of all blocks: nothing is sorted, gathered or scattered, and warps wait
// for each other only once. DEEP pieces of a warp are on their way to shared memory. A row's bits do not depend on how many rows there are.
//   w      : [ubytes]            u8    bank of up to EXPERTS + 1 matrices [n4, HIDDEN] in FORMAT (lib/quads.cuh); rows 4q..4q+3 are the gates of outputs 2q, 2q+1, then their
//                                      ups; without gates (relu2) rows are outputs. The shared expert is the last
//   s      : [uscales]           u8    their scales; or null
//   gs     : [urows]             f32   nvfp4: scale of each row; or null
//   bias   : [urows]             f32   of the rows as they are stored; or null
//   logits : [r, ld]             f32   of the router
//   correction : [experts]       f32   added to the scores for picking only (CORRECTED 1); or null
//   gain   : [k]                 f32   of the norm (NORM 1); or null
//   x      : [r, k]              f32
//   h      : [r, picks, width]   f32   width = INNER to a multiple of 4; picks = TOP_K (+ 1: the shared expert's)
//   -D FORMAT= KB= (fp8: columns of scales)  HIDDEN= (k, a multiple of 32)  INNER=  EXPERTS=  TOP_K=  SHARED= (0 or 1)  SCORE= (of lib/picks.cuh) CORRECTED= (0 or 1)
//   -D NORM= (0 or 1)  ACT= (of lib/act.cuh)  ROWS= (1, 2, 4, 8: at most so many)  LANES= (4, 8, 16, 32)  WARPS=  DEEP=  ROOM= bytes of shared memory
//   launch: <<<any number up to that of units, 32*WARPS, ROOM>>>, see atlas.cuda.experts
#include "lib/act.cuh"
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
#define SCORE SCORE_SOFTMAX
#define CORRECTED 0
#define NORM 1
#define ACT ACT_SILU
#define ROWS 1
#define LANES 32
#define WARPS 18
#define DEEP 2
#define ROOM 118784
#endif
typedef quads::FORMAT F;
constexpr int K = HIDDEN, I = INNER, E = EXPERTS, THREADS = 32 * WARPS, PICKS = TOP_K + SHARED, C = K / 32, N = (E + 31) / 32, EACH = ROWS > 1 ? 2 : 1;
constexpr bool PAIR = ACT != ACT_RELU2;
constexpr int QUADS = ((PAIR ? 2 * I : I) + 3) / 4, T = 32 / LANES, UNITS = (QUADS + T - 1) / T, STEPS = (C + LANES - 1) / LANES, WIDTH = (I + 3) / 4 * 4;
constexpr int SEGMENTS = (K + 255) / 256;
struct Shared {
    struct { unsigned char weights[F::SIZE]; float scale[4 * T], bias[4 * T]; } ring[WARPS][DEEP];
    Inputs<K, ROWS, F::POWER> x;
    float squares[ROWS][SEGMENTS];
    Slots<E, TOP_K, SHARED, ROWS, EACH> slots;
};
static_assert(sizeof(Shared) <= ROOM, "see the contract");

extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_up(const unsigned char* __restrict__ w, const unsigned char* __restrict__ s,
        const float* __restrict__ gs, const float* __restrict__ bias, const float* logits, const float* __restrict__ correction,
        const float* __restrict__ gain, const float* x, float* h, float eps, float limit, int ld, int rows) {
    DYNAMIC_SHARED(Shared, sm);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x + gridDim.x * warp, stride = gridDim.x * WARPS;
    int total = 0, unit = first, step = 0, place = 0;  // what is fetched next, and where to
    size_t row = 0;
    bool on = false;
    auto fetch = [&] {
        if (step == 0) {
            const int slot = unit / UNITS, quad = unit % UNITS * T + lane / LANES;
            on = unit < total && quad < QUADS;
            row = ((size_t)(SHARED && slot < sm->slots.FIRST ? E : on ? sm->slots.expert[slot] : 0) * QUADS + (on ? quad : 0)) * 4;
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
        if (++step == STEPS) { step = 0; unit += stride; }
    };
    sm->slots.clear(rows, THREADS);
    int begun = 0;
    if (SHARED) for (total = UNITS; begun < DEEP && unit < UNITS; begun++) fetch();  // needs no router
    pdl_wait();
    pdl_trigger();  // after the wait: experts_down reads the logits before it waits for this kernel
    #pragma unroll 1
    for (int r = WARPS - 1 - warp; r < rows; r += WARPS) {
        float near[N];
        near_logits<E, N>(logits + (size_t)r * ld, lane, near);
        pick<E, TOP_K, SCORE, CORRECTED, N>(near, correction, lane, sm->slots.of(r));
    }
    #pragma unroll 1
    for (int i = warp; i < rows * SEGMENTS; i += WARPS) {
        const int r = i / SEGMENTS, v = i % SEGMENTS * 32 + lane;
        float a[8] = {}, g[8], sum = 0.f;
        if (v * 8 < K) load8(x + (size_t)r * K + v * 8, a);
        if (NORM && v * 8 < K) load8(gain + v * 8, g);
        #pragma unroll
        for (int j = 0; j < 8; j++) if (NORM) { sum = fmaf(a[j], a[j], sum); a[j] = v * 8 < K ? __fmul_rn(a[j], g[j]) : 0.f; }
        sm->x.put(r, v, a);
        if (NORM) sum = warp_sum(sum);
        if (NORM && !lane) sm->squares[r][i % SEGMENTS] = sum;
    }
    __syncthreads();
    if (ROWS > 1) { sm->slots.group(rows, THREADS); __syncthreads(); }
    total = (ROWS == 1 ? PICKS : sm->slots.number) * UNITS;
    #pragma unroll 1
    for (; begun < DEEP; begun++) fetch();
    float inverse = 0.f;  // of the row that the lane stands for
    if (NORM) {
        #pragma unroll
        for (int i = 0; i < SEGMENTS; i++) inverse += sm->squares[lane % ROWS][i];
        inverse = rsqrtf(fmaf(inverse, 1.f / K, eps));
    }
    int here = 0;
    #pragma unroll 1
    for (int u = first; u < total; u += stride) {
        const int slot = u / UNITS, quad = u % UNITS * T + lane / LANES;
        const int at = lane / LANES * 4 + lane % LANES / (LANES / 4), o = quad * (PAIR ? 2 : 4) + lane % LANES / (LANES / 4);
        float v[EACH][4] = {}, scale = F::UNIT, more = 0.f;
        #pragma unroll 1
        for (int i = 0; i < STEPS; i++) {
            const int c = min(i * LANES + lane % LANES, C - 1);
            cp_async_wait<DEEP - 1>();
            #pragma unroll
            for (int r = 0; r < EACH; r++) {
                const int entry = ROWS == 1 ? 0 : sm->slots.who[slot][r];
                if (entry >= 0) sm->x.template dot<F>(sm->ring[warp][here].weights, entry / PICKS, c, v[r]);
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
            float y = group_sum4<LANES>(v[r][0], v[r][1], v[r][2], v[r][3]);
            if (NORM) y = __fmul_rn(y, ROWS == 1 ? inverse : __shfl_sync(~0u, inverse, entry / PICKS));
            y = fmaf(y, scale, more);
            const float z = act_mul<ACT>(y, PAIR ? __shfl_xor_sync(~0u, y, LANES / 2) : 0.f, limit);
            if (lane % (LANES / 4) == 0 && (!PAIR || lane % LANES < LANES / 2) && quad < QUADS && o < I) h[(size_t)entry * WIDTH + o] = z;
        }
    }
}
