// y = add + sum over a row's experts of weight_e * down_e (act(gate_e x) * up_e x), the shared expert as one more; the norm before them folded in. In two halves: hidden values
// first, then, when all blocks have met, their products. Nothing is sorted, gathered or scattered. A lane has 32 columns of four rows of an expert's matrix (a quad), ULANES
// or DLANES lanes a whole quad, a warp a unit of as many quads as it can. Units of the first half are dealt out to the warps of all blocks; of the second, a block owns some
// outputs, for every expert. DEEP pieces of a warp are on their way to shared memory: those of the second half follow those of the first, before anybody has met.
// A row's bits do not depend on how many rows there are.
//   uw     : [ubytes]    u8    bank of up to EXPERTS + 1 matrices [n4, HIDDEN] in UP (lib/quads.cuh); rows 4q..4q+3 are the gates of outputs 2q, 2q+1, then their ups;
//                              without gates (relu2) rows are outputs. The shared expert is the last
//   dw     : [dbytes]    u8    the same of [HIDDEN, INNER] in DOWN
//   us     : [uscales]   u8    scales; or null
//   ds     : [dscales]   u8    or null
//   ugs    : [urows]     f32   nvfp4, int4: scale of each row; or null
//   dgs    : [drows]     f32   or null
//   ubias  : [urows]     f32   of the rows as they are stored; or null
//   dbias  : [drows]     f32   or null
//   logits : [r, ld]             f32   of the router; with GATE the one after the experts' is the shared expert's gate
//   correction : [experts]       f32   added to the scores for picking only (CORRECTED 1); or null
//   per_expert : [experts]       f32   a factor on the weight of each expert; or null
//   gain   : [k]                 f32   of the norm (NORM 1); or null
//   x      : [r, k]              f32
//   h      : [r, picks, width]   f32   width = INNER to a multiple of 4; picks = TOP_K (+ 1: the shared expert's)
//   ids    : [r, top_k]          i32   who was picked, best first; or null
//   weights : [r, top_k]         f32   their weights; or null
//   add    : [r, k]              f32   residual; or null; may be y
//   y      : [r, k]              f32
//   met    : [1]                 i32   a multiple of the number of blocks, before and after (router.cu begins with 0)
//   later_w : [tbytes]    u8    of which the first 16 * later_w16 bytes will be read next: they are asked for once all blocks have met; or null
//   later_s : [tscales]   u8    likewise; or null
//   -D UP= DOWN= UKB= DKB= (fp8: columns of scales)  HIDDEN= (k, a multiple of 32)  INNER=  EXPERTS=  TOP_K=  SHARED= GATE= (of the shared expert: 0 or 1)
//   -D SCORE= (of lib/picks.cuh) CORRECTED= (0 or 1)  RENORM=  NORM= (0 or 1)  ACT= (of lib/act.cuh)  ROWS= (1, 2, 4, 8: at most so many)  ULANES= DLANES= (4, 8, 16, 32)
//   -D WARPS=  DEEP=  OWN= groups of outputs of a block  ROOM= bytes of shared memory
//   halves: 1: the first only; 2: the second only; 3: both, and all blocks must be running at once
//   launch: <<<any number from ceil(k/4*DLANES/32/OWN), 32*WARPS, ROOM>>>, see atlas.cuda.experts
#include "lib/act.cuh"
#include "lib/ahead.cuh"
#include "lib/async.cuh"
#include "lib/meet.cuh"
#include "lib/pdl.cuh"
#include "lib/picks.cuh"
#include "lib/quads.cuh"
#ifndef HIDDEN
#define UP nvfp4
#define DOWN nvfp4
#define UKB 1
#define DKB 1
#define HIDDEN 2048
#define INNER 512
#define EXPERTS 256
#define TOP_K 8
#define SHARED 1
#define GATE 1
#define SCORE SCORE_SOFTMAX
#define CORRECTED 0
#define RENORM 1
#define NORM 1
#define ACT ACT_SILU
#define ROWS 1
#define ULANES 32
#define DLANES 16
#define WARPS 20
#define DEEP 2
#define OWN 2
#define ROOM 118784
#endif
typedef quads::UP U;
typedef quads::DOWN D;
constexpr int K = HIDDEN, I = INNER, E = EXPERTS, THREADS = 32 * WARPS, PICKS = TOP_K + SHARED, N = (E + 31) / 32, EACH = ROWS > 1 ? 2 : 1, WIDTH = (I + 3) / 4 * 4;
constexpr bool PAIR = ACT != ACT_RELU2;
constexpr int UC = K / 32, UQUADS = ((PAIR ? 2 * I : I) + 3) / 4, UT = 32 / ULANES, UNITS = (UQUADS + UT - 1) / UT, USTEPS = (UC + ULANES - 1) / ULANES;  // chunks of a row; quads; of a unit
constexpr int DC = (I + 31) / 32, DQUADS = K / 4, DT = 32 / DLANES, DSTEPS = (DC + DLANES - 1) / DLANES, OUTS = OWN * DT * 4;
constexpr int ASKS = WARPS - 1 - (WARPS > ROWS ? ROWS : 0);  // who asks for what comes next: the last warps pick, and this one has little else to do
constexpr int XPARTS = (K + 255) / 256, HPARTS = (I + 255) / 256, T = UT > DT ? UT : DT, SIZE = U::SIZE > D::SIZE ? U::SIZE : D::SIZE;
struct Place { unsigned char weights[SIZE]; float scale[4 * T], bias[4 * T]; };
struct Shared {
    Place ring[WARPS][DEEP];
    union { Inputs<K, ROWS, U::POWER> x; Inputs<I, ROWS * PICKS, D::POWER> h; };
    float squares[ROWS][XPARTS], share[ROWS * PICKS], done[ROWS * PICKS][OUTS];
    Slots<E, TOP_K, SHARED, ROWS, EACH> slots;
};
static_assert(sizeof(Shared) <= ROOM && ROWS <= WARPS, "see the contract");

// A piece of four rows from `row` on, which has C chunks: chunk `c` of a lane; with the last one what the rows are multiplied by, and what is added.
template <class F, int LANES, int C, int KB> __device__ __forceinline__ void fetch(Place& p, const unsigned char* w, const unsigned char* s, const float* gs, const float* bias,
        size_t row, int step, bool on, int lane) {
    const int c = step * LANES + lane % LANES;
    F::fetch(p.weights, w, s, row, c < C ? c : 0, C, KB, on && (C % LANES == 0 || c < C));
    if (step == (C + LANES - 1) / LANES - 1 && lane % LANES == 0) {
        if (gs) cp_async_or_zero<16>(p.scale + lane / LANES * 4, gs + row, on);
        if (bias) cp_async_or_zero<16>(p.bias + lane / LANES * 4, bias + row, on);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) experts(const unsigned char* __restrict__ uw, const unsigned char* __restrict__ dw, const unsigned char* __restrict__ us,
        const unsigned char* __restrict__ ds, const float* __restrict__ ugs, const float* __restrict__ dgs, const float* __restrict__ ubias, const float* __restrict__ dbias,
        const float* logits, const float* __restrict__ correction, const float* __restrict__ per_expert, const float* __restrict__ gain, const float* x, float* h, int* ids,
        float* weights, const float* add, float* y, unsigned* met, const unsigned char* later_w, const unsigned char* later_s, float eps, float limit, float scaling, int ld, int rows, int halves, int later_w16, int later_s16) {
    DYNAMIC_SHARED(Shared, sm);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, first = blockIdx.x + gridDim.x * warp, stride = gridDim.x * WARPS;
    int unit = first, total = 0, down = warp, all = 0, step = 0, place = 0, here = 0;  // what is fetched next: a unit of the first half, one of the second; and where to
    size_t row = 0;
    bool on = false;
    auto next = [&] {
        Place& p = sm->ring[warp][place];
        if (unit < total) {
            if (step == 0) {
                const int slot = unit / UNITS, quad = unit % UNITS * UT + lane / ULANES;
                on = quad < UQUADS;
                row = ((size_t)(SHARED && slot < sm->slots.FIRST ? E : sm->slots.expert[slot]) * UQUADS + (on ? quad : 0)) * 4;
            }
            fetch<U, ULANES, UC, UKB>(p, uw, us, ugs, ubias, row, step, on, lane);
            if (++step == USTEPS) { step = 0; unit += stride; }
        } else if (down < all) {
            if (step == 0) {
                const int quad = (blockIdx.x + gridDim.x * (down % OWN)) * DT + lane / DLANES;
                on = quad < DQUADS;
                row = ((size_t)sm->slots.expert[down / OWN] * DQUADS + (on ? quad : 0)) * 4;
            }
            fetch<D, DLANES, DC, DKB>(p, dw, ds, dgs, dbias, row, step, on, lane);
            if (++step == DSTEPS) { step = 0; down += WARPS; }
        }
        cp_async_commit();
        place = place == DEEP - 1 ? 0 : place + 1;
    };
    sm->slots.clear(rows, THREADS);
    int begun = 0;
    if (SHARED && (halves & 1)) for (total = UNITS; begun < DEEP && unit < UNITS; begun++) next();  // needs no router
    pdl_trigger();
    pdl_wait();
    const int picker = WARPS - 1 - warp;  // whose row this warp picks for
    float near[N];
    if (picker < rows) {
        near_logits<E, N>(logits + (size_t)picker * ld, lane, near);
        pick<E, TOP_K, SCORE, CORRECTED, N>(near, correction, lane, sm->slots.of(picker));
    }
    if (halves & 1)
        #pragma unroll 1
        for (int i = warp; i < rows * XPARTS; i += WARPS) {
            const int r = i / XPARTS, v = i % XPARTS * 32 + lane;
            float a[8] = {}, g[8], sum = 0.f;
            if (v * 8 < K) load8(x + (size_t)r * K + v * 8, a);
            if (NORM && v * 8 < K) load8(gain + v * 8, g);
            #pragma unroll
            for (int j = 0; j < 8; j++) if (NORM) { sum = fmaf(a[j], a[j], sum); a[j] = v * 8 < K ? __fmul_rn(a[j], g[j]) : 0.f; }
            sm->x.put(r, v, a);
            if (NORM) sum = warp_sum(sum);
            if (NORM && !lane) sm->squares[r][i % XPARTS] = sum;
        }
    __syncthreads();
    if (ROWS > 1) { sm->slots.group(rows, THREADS); __syncthreads(); }
    const int slots = ROWS == 1 ? PICKS : sm->slots.number;
    total = halves & 1 ? slots * UNITS : 0;
    all = halves & 2 ? slots * OWN : 0;
    #pragma unroll 1
    for (; begun < DEEP; begun++) next();
    if (picker < rows) {
        const float* p = logits + (size_t)picker * ld;
        const int id = sm->slots.of(picker)[lane < TOP_K ? lane : 0];
        float v = pick_weight<E, TOP_K, SCORE, RENORM, N>(near, __ldcg(p + id), scaling, lane);
        if (per_expert) v = __fmul_rn(v, per_expert[id]);
        if (lane < TOP_K) sm->share[picker * PICKS + lane] = v;
        if (SHARED && lane == TOP_K) sm->share[picker * PICKS + TOP_K] = GATE ? logistic(__ldcg(p + E)) : 1.f;
    }
    auto out_of = [&](int i) { return (blockIdx.x + gridDim.x * (i % OUTS / (4 * DT))) * 4 * DT + i % (4 * DT); };  // where result i of the block goes in its row
    float before = 0.f;
    if (add && threadIdx.x < rows * OUTS && out_of(threadIdx.x) < K) before = add[(size_t)(threadIdx.x / OUTS) * K + out_of(threadIdx.x)];
    auto after = [&] {  // a piece has been multiplied
        next();
        here = here == DEEP - 1 ? 0 : here + 1;
    };
    if (halves & 1) {
        float inverse = 0.f;  // of the row that the lane stands for
        if (NORM) {
            #pragma unroll
            for (int i = 0; i < XPARTS; i++) inverse += sm->squares[lane % ROWS][i];
            inverse = rsqrtf(fmaf(inverse, 1.f / K, eps));
        }
        #pragma unroll 1
        for (int u = first; u < total; u += stride) {
            const int slot = u / UNITS, quad = u % UNITS * UT + lane / ULANES;
            const int at = lane / ULANES * 4 + lane % ULANES / (ULANES / 4), o = quad * (PAIR ? 2 : 4) + lane % ULANES / (ULANES / 4);
            float v[EACH][4] = {}, scale = U::UNIT, more = 0.f;
            #pragma unroll 1
            for (int i = 0; i < USTEPS; i++) {
                const int c = min(i * ULANES + lane % ULANES, UC - 1);
                cp_async_wait<DEEP - 1>();
                #pragma unroll
                for (int r = 0; r < EACH; r++) {
                    const int entry = ROWS == 1 ? 0 : sm->slots.who[slot][r];
                    if (entry >= 0) sm->x.template dot<U>(sm->ring[warp][here].weights, entry / PICKS, c, v[r]);
                }
                if (i == USTEPS - 1) {
                    __syncwarp();
                    if (ugs) scale = __fmul_rn(U::UNIT, sm->ring[warp][here].scale[at]);
                    if (ubias) more = sm->ring[warp][here].bias[at];
                }
                __syncwarp();
                after();
            }
            #pragma unroll
            for (int r = 0; r < EACH; r++) {
                const int entry = sm->slots.who[slot][r];
                if (ROWS > 1 && entry < 0) continue;
                float s = group_sum4<ULANES>(v[r][0], v[r][1], v[r][2], v[r][3]);
                if (NORM) s = __fmul_rn(s, ROWS == 1 ? inverse : __shfl_sync(~0u, inverse, entry / PICKS));
                s = fmaf(s, scale, more);
                const float z = act_mul<ACT>(s, PAIR ? __shfl_xor_sync(~0u, s, ULANES / 2) : 0.f, limit);
                if (lane % (ULANES / 4) == 0 && (!PAIR || lane % ULANES < ULANES / 2) && quad < UQUADS && o < I) h[(size_t)entry * WIDTH + o] = z;
            }
        }
    }
    if (!(halves & 2)) return;
    if (halves & 1) meet(met, gridDim.x);
    if (later_w && warp == ASKS) {  // memory idles now
        ahead(later_w, later_w16, blockIdx.x * 32 + lane, gridDim.x * 32);
        if (later_s) ahead(later_s, later_s16, blockIdx.x * 32 + lane, gridDim.x * 32);
    }
    #pragma unroll 1
    for (int from = warp; from < rows * PICKS * HPARTS; from += 2 * WARPS) {
        float a[2][8] = {};
        #pragma unroll
        for (int k = 0; k < 2; k++) {
            const int i = from + k * WARPS, v = i % HPARTS * 32 + lane;
            #pragma unroll
            for (int j = 0; j < 8; j += 4)
                if (i < rows * PICKS * HPARTS && v * 8 + j < I) *(float4*)(a[k] + j) = __ldcg((const float4*)(h + (size_t)(i / HPARTS) * WIDTH + v * 8 + j));
            if (I % 4)
                #pragma unroll
                for (int j = 0; j < 8; j++) a[k][j] = v * 8 + j < I ? a[k][j] : 0.f;
        }
        #pragma unroll
        for (int k = 0; k < 2; k++) if (from + k * WARPS < rows * PICKS * HPARTS) sm->h.put((from + k * WARPS) / HPARTS, (from + k * WARPS) % HPARTS * 32 + lane, a[k]);
    }
    __syncthreads();
    #pragma unroll 1
    for (int u = warp; u < all; u += WARPS) {
        const int slot = u / OWN, at = lane / DLANES * 4 + lane % DLANES / (DLANES / 4);
        float v[EACH][4] = {}, scale = D::UNIT, more = 0.f;
        #pragma unroll 1
        for (int i = 0; i < DSTEPS; i++) {
            const int c = min(i * DLANES + lane % DLANES, DC - 1);
            cp_async_wait<DEEP - 1>();
            #pragma unroll
            for (int r = 0; r < EACH; r++) {
                const int entry = sm->slots.who[slot][r];
                if (ROWS == 1 || entry >= 0) sm->h.template dot<D>(sm->ring[warp][here].weights, entry, c, v[r]);
            }
            if (i == DSTEPS - 1) {
                __syncwarp();
                if (dgs) scale = __fmul_rn(D::UNIT, sm->ring[warp][here].scale[at]);
                if (dbias) more = sm->ring[warp][here].bias[at];
            }
            __syncwarp();
            after();
        }
        #pragma unroll
        for (int r = 0; r < EACH; r++) {
            const int entry = sm->slots.who[slot][r];
            if (ROWS > 1 && entry < 0) continue;
            const float z = fmaf(group_sum4<DLANES>(v[r][0], v[r][1], v[r][2], v[r][3]), scale, more);
            if (lane % (DLANES / 4) == 0) sm->done[entry][u % OWN * 4 * DT + at] = z;
        }
    }
    __syncthreads();
    #pragma unroll 1
    for (int i = threadIdx.x; i < rows * OUTS; i += THREADS) {
        const int r = i / OUTS, o = out_of(i);
        if (o >= K) continue;
        float v = 0.f;
        #pragma unroll
        for (int p = 0; p < PICKS; p++) v = fmaf(sm->share[r * PICKS + p], sm->done[r * PICKS + p][i % OUTS], v);
        y[(size_t)r * K + o] = (i < THREADS ? before : add ? add[(size_t)r * K + o] : 0.f) + v;
    }
    if (!blockIdx.x && threadIdx.x < rows * TOP_K) {
        const int r = threadIdx.x / TOP_K, j = threadIdx.x % TOP_K;
        if (ids) ids[threadIdx.x] = sm->slots.of(r)[j];
        if (weights) weights[threadIdx.x] = sm->share[r * PICKS + j];
    }
}
