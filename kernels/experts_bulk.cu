// y = add + sum over a row's experts of weight_e * down_e (act(gate_e x) * up_e x), the shared one
// as one more; the norm before them folded in: what experts.cu makes, to the bit, for up to four
// rows and matrices of four bits, whose strips of sixteen rows come whole, by bulk copies. In two
// halves: hidden values first, then their products; each value says for itself whether it is there
// (lib/given.cuh). Strips of the first half are dealt out to all blocks, and in a block to teams of
// USPLIT warps; of the second, a block owns SPAN outputs, for every expert, and teams of DSPLIT warps
// take their strips, which have eight rows of one expert and eight more, of it or of the next.
// Stages, a strip of the first half or as many of the second as find room there, go round a ring of
// places. The warp that knows who was picked asks for the first ones at once; whoever has left a
// place asks for what comes there next, of the second half before hidden values are there.
// A row's bits do not depend on how many rows there are.
//   uw     : [ubytes]    u8    bank of up to EXPERTS + 1 matrices [UROWS, HIDDEN] in UP; rows
//                              4q..4q+3 are the gates of outputs 2q, 2q+1, then their ups; without
//                              gates (relu2) rows are outputs. The shared expert is the last
//   dw     : [dbytes]    u8    the same of [HIDDEN, INNER] in DOWN
//   us     : [uscales]   u8    scales
//   ds     : [dscales]   u8    likewise
//   ugs    : [urows]     f32   nvfp4, int4: scale of each row; or null
//   dgs    : [drows]     f32   or null
//   ubias  : [urows]     f32   of the rows as they are stored (BIASED 1); or null
//   dbias  : [drows]     f32   likewise; or null
//   logits : [r, ld]             f32   of the router; with GATE the one after the experts' is the
//                                      shared expert's gate
//   correction : [experts]       f32   added to the scores for picking only (CORRECTED 1); or null
//   per_expert : [experts]       f32   a factor on the weight of each expert; or null
//   gain   : [k]                 f32   of the norm (NORM 1); or null
//   x      : [r, k]              f32
//   h      : [r, picks, INNER]   f32   picks = TOP_K (+ 1: the shared expert's); EMPTY before
//                                      (router.cu)
//   ids    : [r, top_k]          i32   who was picked, best first; or null
//   weights : [r, top_k]         f32   their weights; or null
//   add    : [r, k]              f32   residual; or null; may be y
//   y      : [r, k]              f32
//   later_w : [tbytes]    u8    of which the first 16 * later_w16 bytes will be read next: they are
//                               asked for once hidden values are there; or null
//   later_s : [tscales]   u8    likewise; or null
//   -D UP= DOWN= (of lib/fragment.cuh, four bits)  HIDDEN= (k)  INNER=  (multiples of 32; of 64 where
//   rows of a chunk have one scale of a byte; a matrix of the first half has strips of 16 rows)
//   -D EXPERTS=  TOP_K=  SHARED= GATE= (of the shared expert: 0 or 1)
//   -D SCORE= (of lib/picks.cuh)  CORRECTED= BIASED= (0 or 1)
//   -D RENORM=  NORM= (0 or 1)  ACT= (of lib/act.cuh)  ROWS= (1, 2, 4: at most so many)
//   -D WARPS= (a multiple of 4)  RING= places, 8 at most  SPAN= outputs of a block, a multiple of 8
//   -D APART= do inputs of the two halves have places of their own? (0 or 1)
//   -D ROOM= bytes of shared memory
//   halves: 1: the first only; 2: the second only; 3: both, and all blocks must be running at once
//   launch: <<<any number from ceil(k/SPAN), 32*WARPS, ROOM>>>, see atlas.cuda.experts
#include "lib/act.cuh"
#include "lib/ahead.cuh"
#include "lib/async.cuh"
#include "lib/given.cuh"
#include "lib/grouped.cuh"
#include "lib/parts.cuh"
#include "lib/pdl.cuh"
#include "lib/ranked.cuh"
#ifndef HIDDEN
#define UP fragment_nvfp4
#define DOWN fragment_nvfp4
#define HIDDEN 2048
#define INNER 512
#define EXPERTS 256
#define TOP_K 8
#define SHARED 1
#define GATE 1
#define SCORE SCORE_SOFTMAX
#define CORRECTED 0
#define BIASED 0
#define RENORM 1
#define NORM 1
#define ACT ACT_SILU
#define ROWS 1
#define WARPS 20
#define RING 5
#define SPAN 16
#define APART 1
#define ROOM 118784
#endif
constexpr int K = HIDDEN, I = INNER, E = EXPERTS, PICKS = TOP_K + SHARED, THREADS = 32 * WARPS;
constexpr int N = (E + 31) / 32;
constexpr bool PAIR = ACT != ACT_RELU2;
constexpr unsigned UROWS = PAIR ? 2 * I : I, STRIPS = UROWS / 16;  // of an expert
constexpr int OUT = PAIR ? 8 : 16, OWN = SPAN / 8;  // outputs of a strip; parts of a block's outputs
static_assert(UROWS % 16 == 0 && SPAN % 8 == 0 && RING <= 8 && ROWS <= 4, "see the contract");
#if __CUDA_ARCH__ == 900  // registers that leave a block of the router its own
constexpr int LIMIT = WARPS == 20 ? 768 : WARPS == 16 ? 640 : THREADS;
#else
constexpr int LIMIT = THREADS;
#endif
typedef UP<K / 32> U;
typedef DOWN<I / 32> D;
typedef Parts<U, K> UParts;
typedef Parts<D, I> DParts;
constexpr int USPLIT = Shares<U, K, 4>::SPLIT, DSPLIT = Shares<D, I, 2>::SPLIT;
constexpr int UTEAMS = WARPS / USPLIT, DTEAMS = WARPS / DSPLIT;
// strips of the second half in a stage, and bytes of its place
constexpr int MANY = UParts::BYTES / DParts::BYTES > 1 ? UParts::BYTES / DParts::BYTES : 1;
constexpr int PLACE = MANY * DParts::BYTES > UParts::BYTES ? DParts::BYTES : UParts::BYTES;
// Groups of the second half meet at barriers of their own, if they are not those of the first.
constexpr int AFTER = USPLIT == DSPLIT || USPLIT == 1 ? 0 : UTEAMS;
constexpr bool DISTINCT = DSPLIT == 1 || AFTER + DTEAMS <= 15;
constexpr bool MIXED = OWN % 2 || K % SPAN;  // may a strip of the second half have two experts?
// Has each warp just one unit of the second half, and does it stage what it multiplies by itself?
constexpr bool ALONE = APART && ROWS == 1 && DISTINCT && OWN == 2 && !MIXED
    && DParts::UNITS == DSPLIT && PICKS * DSPLIT <= WARPS;
// the first so many warps stage x, while the others pick
constexpr int STAGE = ROWS > 1 && WARPS - ROWS >= 4 ? WARPS - ROWS : WARPS;
constexpr int ASKER = ROWS > 1 ? 0 : WARPS - 1;  // the warp that knows first who was picked
constexpr int COLUMNS = MIXED ? 2 * ROWS : ROWS;
typedef StagedRows<U, K, ROWS> X;
typedef StagedRows<D, I, ROWS * PICKS> H;
constexpr int PARTS = X::PARTS, HPARTS = H::PARTS;  // pieces of 256 of a row
typedef Slots<E, TOP_K, SHARED, ROWS> Table;
// What strips of a half are multiplied by. Apart, warps go on to the second half alone.
template <bool> struct Inputs { union { X x; H h; }; };
template <> struct Inputs<true> { X x; H h; };
struct Shared {
    unsigned char ring[RING][PLACE];
    Inputs<APART> in;
    Meeting full[RING];
    unsigned char none[16];  // zeros
    float part[2][WARPS][16][COLUMNS];  // of one strip while those of the next are made
    float inverse[WARPS][ROWS];  // of the root of a row's mean square
    float squares[ROWS][PARTS], share[ROWS * PICKS], done[ROWS * PICKS][SPAN];
    Table slots;
    int left[RING];  // how many have done with a place of the second half
    unsigned asked[RING];  // the stage that a place was last asked for
    int seen[ROWS > 1 ? E : 1];
};
static_assert(sizeof(Shared) <= ROOM && ROWS <= WARPS && WARPS % 4 == 0, "see the contract");

// The same number, of which the compiler knows nothing: what follows from it is found anew for each
// strip, and not kept in registers meanwhile.
__device__ __forceinline__ int anew(int v) {
#if defined(__CUDA_ARCH__)
    asm volatile("" : "+r"(v));
#endif
    return v;
}

// Pieces of 256 values, MOST at most, dealt out to the first BY warps: a lane has eight, and up to
// so many pieces of a warp are on their way at once.
template <int MOST, int BY, int AT_ONCE, class Load, class Put> __device__ __forceinline__
        void stage(int pieces, Load load, Put put) {
    constexpr int ROUNDS = (MOST + BY - 1) / BY, MANY = ROUNDS < AT_ONCE ? ROUNDS : AT_ONCE;
    const int warp = threadIdx.x / 32;
    #pragma unroll 1
    for (int from = BY == WARPS || warp < BY ? warp : pieces; from < pieces; from += MANY * BY) {
        float a[MANY][8];
        #pragma unroll
        for (int k = 0; k < MANY; k++) load(min(from + k * BY, pieces - 1), a[k]);
        #pragma unroll
        for (int k = 0; k < MANY; k++)
            if (from + k * BY < pieces) put(from + k * BY, a[k]);
    }
}

extern "C" __global__ void __launch_bounds__(LIMIT, 1) experts_bulk(
        const unsigned char* __restrict__ uw, const unsigned char* __restrict__ dw,
        const unsigned char* __restrict__ us, const unsigned char* __restrict__ ds,
        const float* __restrict__ ugs, const float* __restrict__ dgs,
        const float* __restrict__ ubias, const float* __restrict__ dbias, const float* logits,
        const float* __restrict__ correction, const float* __restrict__ per_expert,
        const float* __restrict__ gain, const float* x, float* h, int* ids, float* weights,
        const float* add, float* y, const unsigned char* later_w,
        const unsigned char* later_s, float eps, float limit, float scaling, int ld, int rows,
        int halves, int later_w16, int later_s16) {
    DYNAMIC_SHARED(Shared, sm);
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);  // the compiler learns: one for all
    const int ushare = warp % USPLIT, dshare = warp % DSPLIT;
    const int base = blockIdx.x * SPAN, span = max(0, min(SPAN, K - base));  // the block's outputs
    const unsigned own = K % SPAN ? span / 8 : span ? OWN : 0;  // parts that these are
    auto slots = [&] { return ROWS == 1 ? PICKS : sm->slots.number; };
    // stages of so many strips of the first half
    auto dealt = [&](unsigned strips) {
        return halves & 1 && strips > blockIdx.x ? (strips - blockIdx.x - 1) / gridDim.x + 1 : 0;
    };
    unsigned ups = 0, parts = 0, stages = 0;  // of the first half; of the second; of both
    auto count = [&] {
        ups = dealt(slots() * STRIPS);
        parts = halves & 2 ? slots() * own : 0;
        stages = ups + (parts + 2 * MANY - 1) / (2 * MANY);
    };
    auto expert_of = [&](unsigned slot) -> unsigned {
        return SHARED && slot < sm->slots.FIRST ? E : sm->slots.expert[slot];
    };
    // Stages from..to - 1 are asked for by a warp, four lanes a stage.
    auto ask = [&](unsigned from, unsigned to) {
        const int i = lane % 4;
        for (unsigned s = from + lane / 4; s < to; s += 8) {
            unsigned char* const place = sm->ring[s % RING];
            Meeting* const b = sm->full + s % RING;
            if (!i) *(volatile unsigned*)(sm->asked + s % RING) = s;
            if (s < ups) {
                const unsigned u = blockIdx.x + gridDim.x * s;
                const unsigned row = expert_of(u / STRIPS) * UROWS + u % STRIPS * 16;
                if (!i) bulk_expect(b, 2 * UParts::PART);
                UParts::ask_strip(place, i, uw, us, row, b);
                continue;
            }
            const unsigned first = (s - ups) * (2 * MANY), n = min(2u * MANY, parts - first);
            if (!i) bulk_expect(b, n * DParts::PART);
            #pragma unroll 1
            for (unsigned k = MIXED ? i / 2 : 0; k < n; k += 2) {
                const unsigned q = first + k;
                const unsigned row = expert_of(q / own) * K + base + q % own * 8;
                unsigned char* const to = place + k / 2 * DParts::BYTES;
                if (MIXED) DParts::ask_part(to, i / 2, i % 2 == 0, dw, ds, row, b);
                else DParts::ask_strip(to, i, dw, ds, row, b);
            }
        }
    };
    // Until a stage is there. Its barrier has two phases that look alike, so it must have been asked
    // for; what was there before has come then.
    auto wait = [&](unsigned s) {
        const unsigned place = s % RING;
        while (s >= RING && *(volatile unsigned*)(sm->asked + place) != s) meet_pause();
        meet_wait(sm->full + place, s / RING % 2);
    };
    const bool asker = warp == ASKER;
    if (asker) {
        if (!lane) {
            for (int i = 0; i < RING; i++) meet_init(sm->full + i, 1);
            meet_ready();
        }
        __syncwarp();
    }
    sm->slots.clear(rows, THREADS);
    for (int i = threadIdx.x; ROWS > 1 && i < E; i += THREADS) sm->seen[i] = ROWS * TOP_K;
    if (threadIdx.x < RING) sm->left[threadIdx.x] = 0;
    if (threadIdx.x < 4) ((unsigned*)sm->none)[threadIdx.x] = 0;
    const unsigned begun = SHARED ? min((unsigned)RING, dealt(STRIPS)) : 0;  // needs no router
    if (SHARED && asker) {
        ups = begun;
        ask(0, begun);
    }
    pdl_trigger();
    pdl_wait();
    const int picker = WARPS - 1 - warp;  // whose row this warp picks for
    if (picker < rows) {
        float near[N];
        near_logits<E, N>(logits + (size_t)picker * ld, lane, near);
        int* const to = sm->slots.of(picker);
        const int id = ranked<E, TOP_K, SCORE, CORRECTED, N>(near, correction, lane, to);
        if (lane < TOP_K) to[lane] = id;
    }
    if (ROWS == 1) {
        count();
        __syncwarp();
        if (asker) ask(begun, min(stages, (unsigned)RING));
    }
    auto stage_x = [&] {
        stage<ROWS * PARTS, STAGE, 4>(rows * PARTS, [&](int i, float* a) {
            const int v = i % PARTS * 32 + lane;
            if (K % 256 == 0 || v * 8 < K) load8(x + (size_t)(i / PARTS) * K + v * 8, a);
            else for (int j = 0; j < 8; j++) a[j] = 0.f;
        }, [&](int i, float* a) {
            const int r = i / PARTS, v = i % PARTS * 32 + lane;
            float w[8] = {}, sum = 0.f;
            if (NORM && (K % 256 == 0 || v * 8 < K)) load8(gain + v * 8, w);
            #pragma unroll
            for (int j = 0; NORM && j < 8; j++) {
                sum = fmaf(a[j], a[j], sum);
                a[j] = __fmul_rn(a[j], w[j]);
            }
            sm->in.x.put(r, v, a);
            if (NORM) sum = warp_sum(sum);
            if (NORM && !lane) sm->squares[r][i % PARTS] = sum;
        });
    };
    if (halves & 1) stage_x();  // beside the warps that pick
    __syncthreads();
    if (ROWS > 1) {
        if (asker) {
            group_rows<TOP_K, ROWS>(sm->slots, sm->seen, rows * TOP_K, lane);
            __syncwarp();
            count();
            ask(begun, min(stages, (unsigned)RING));
        }
        __syncthreads();
        count();
    }
    int round = 0;
    if (halves & 1) {
        constexpr int TEAM = 32 * USPLIT, ITEMS = (OUT * ROWS + TEAM - 1) / TEAM;
        if (NORM) {
            float sum = 0.f;
            #pragma unroll
            for (int i = 0; i < PARTS; i++) sum += sm->squares[lane % ROWS][i];
            sm->inverse[warp][lane % ROWS] = rsqrtf(fmaf(sum, 1.f / K, eps));
            __syncwarp();
        }
        #pragma unroll 1
        for (unsigned s = warp / USPLIT; s < ups; s += UTEAMS, round ^= 1) {
            const int l = anew(lane);
            const unsigned char* const place = sm->ring[s % RING];
            const unsigned char* w = place + UParts::weights(ushare, l / 4, l % 4);
            const unsigned char* scales = place + UParts::scales(ushare, l / 4, l % 4);
            const uint4* at = sm->in.x.of(min(l / 4, ROWS - 1), ushare, l % 4);
            const float* e = sm->in.x.e[max(0, min(l % 4 * 2, ROWS - 2))] + 2 * ushare;
            float acc[4] = {};
            const int mine = anew(threadIdx.x) % TEAM, r = mine % OUT;
            const int line = PAIR ? r / 2 * 4 + r % 2 : r;
            const unsigned u = blockIdx.x + gridDim.x * s, slot = u / STRIPS;
            const unsigned o = u % STRIPS * OUT + r;
            float scale[2], more[2];
            #pragma unroll
            for (int j = 0; j < 1 + PAIR; j++) {
                const unsigned row = expert_of(slot) * UROWS + u % STRIPS * 16 + line + 2 * j;
                scale[j] = U::row_scale(us, ugs, row);
                more[j] = BIASED ? ubias[row] : 0.f;
            }
            wait(s);
            #pragma unroll 1
            for (int i = ushare; i < UParts::UNITS; i += USPLIT) {
                UParts::multiply<X>(w, scales, sm->none, i, acc, at, e, e + (ROWS > 1 ? X::HELD : 0),
                    l % 4);
                w += 128 * USPLIT;
                scales += 8 * U::FOUR * USPLIT;
                at += 8 * USPLIT;
                e += 2 * USPLIT;
            }
            put_part(sm->part[round][warp], acc, UParts::line(l / 4) / 2, l % 4);
            sync_warps<USPLIT>(warp / USPLIT);  // and all have done with the place
            if (ushare == 0) ask(s + RING, min(s + RING + 1, stages));
            #pragma unroll
            for (int i = 0; i < ITEMS; i++) {
                const int c = (mine + i * TEAM) / OUT;
                const int entry = c < ROWS ? sm->slots.who[slot][c] : -1;
                if (entry < 0) continue;
                const float inv = NORM ? sm->inverse[warp][c] : 1.f;
                float v[2];
                #pragma unroll
                for (int j = 0; j < 1 + PAIR; j++) {
                    v[j] = sum_parts<USPLIT>(sm->part[round] + warp - ushare, line + 2 * j, c);
                    v[j] = fmaf(__fmul_rn(v[j], inv), scale[j], more[j]);
                }
                give(h + (size_t)entry * I + o, act_mul<ACT>(v[0], v[PAIR], limit));
            }
        }
    }
    if (!(halves & 2)) return;
    if (picker < rows) {
        const float* p = logits + (size_t)picker * ld;
        float near[N];  // once more: registers are few meanwhile
        near_logits<E, N>(p, lane, near);
        const int id = sm->slots.of(picker)[lane < TOP_K ? lane : 0];
        float v = pick_weight<E, TOP_K, SCORE, RENORM, N>(near, __ldcg(p + id), scaling, lane);
        if (per_expert) v = __fmul_rn(v, per_expert[id]);
        if (lane < TOP_K) sm->share[picker * PICKS + lane] = v;
        if (SHARED && lane == TOP_K)
            sm->share[picker * PICKS + TOP_K] = GATE ? logistic(__ldcg(p + E)) : 1.f;
    }
    if (!APART) __syncthreads();  // before what is staged takes the place of x
    float before = 0.f;
    if (add && threadIdx.x < rows * SPAN && (int)threadIdx.x % SPAN < span)
        before = add[(size_t)(threadIdx.x / SPAN) * K + base + threadIdx.x % SPAN];
    auto staged = [&](int i) { return ALONE ? sm->slots.who[i / HPARTS][0] : i / HPARTS; };
    auto peek_all = [&](int i, float* a) {  // true: they are there
        const int v = i % HPARTS * 32 + lane;
        const float* const from = h + (size_t)staged(i) * I + v * 8;
        bool all = true;
        #pragma unroll
        for (int j = 0; j < 8; j += 4)
            *(float4*)(a + j) = I % 256 == 0 || v * 8 + j < I ? peek4(from + j)
                                              : make_float4(0.f, 0.f, 0.f, 0.f);
        #pragma unroll
        for (int j = 0; j < 8; j++) all = all && there(a[j]);
        return all;
    };
    stage<ROWS * PICKS * HPARTS, WARPS, 4>(
            rows * PICKS * HPARTS, peek_all, [&](int i, float* a) {
        bool all = true;
        #pragma unroll
        for (int j = 0; j < 8; j++) all = all && there(a[j]);
        while (!all) all = peek_all(i, a);
        __syncwarp();
        sm->in.h.put(staged(i), i % HPARTS * 32 + lane, a);
    });
    // memory idles when a warp's values are there
    const int asks = blockIdx.x * THREADS + threadIdx.x;
    if (later_w) ahead(later_w, later_w16, asks, gridDim.x * THREADS);
    if (later_s) ahead(later_s, later_s16, asks, gridDim.x * THREADS);
    if (ALONE) __syncwarp(); else __syncthreads();
    constexpr int TEAM = 32 * DSPLIT, ITEMS = (16 * ROWS + TEAM - 1) / TEAM;
    if (USPLIT < DSPLIT) round = 0;  // warps of a team may have had different numbers of strips
    #pragma unroll 1
    for (unsigned strip = warp / DSPLIT; 2 * strip < parts; strip += DTEAMS, round ^= 1) {
        const unsigned s = ups + strip / MANY;
        const unsigned char* const place = sm->ring[s % RING] + strip % MANY * DParts::BYTES;
        const unsigned char* w = place + DParts::weights(dshare, g, t);
        const unsigned char* scales = place + DParts::scales(dshare, g, t);
        auto slot = [&](unsigned p) { return min(2 * strip + p, parts - 1) / own; };
        auto entry = [&](int c) {  // of column c
            const int p = MIXED ? min(c / ROWS, 1) : 0;
            return max(0, (int)sm->slots.who[slot(p)][MIXED ? c % ROWS : min(c, ROWS - 1)]);
        };
        const uint4* at = sm->in.h.of(entry(g), dshare, t);
        const float* e0 = sm->in.h.e[entry(2 * t)] + 2 * dshare;
        const float* e1 = sm->in.h.e[entry(2 * t + 1)] + 2 * dshare;
        float acc[4] = {};
        const int mine = anew(threadIdx.x) % TEAM, line = mine % 16;
        const unsigned q = 2 * strip + line / 8;
        const unsigned row = expert_of(slot(line / 8)) * K + base + q % own * 8 + line % 8;
        const float scale = q < parts ? D::row_scale(ds, dgs, row) : 0.f;
        const float more = BIASED && q < parts ? dbias[row] : 0.f;
        wait(s);
        #pragma unroll 1
        for (int i = dshare; i < DParts::UNITS; i += DSPLIT) {
            DParts::multiply<H>(w, scales, sm->none, i, acc, at, e0, e1, t);
            w += 128 * DSPLIT;
            scales += 8 * D::FOUR * DSPLIT;
            at += 8 * DSPLIT;
            e0 += 2 * DSPLIT;
            e1 += 2 * DSPLIT;
        }
        put_part(sm->part[round][warp], acc, DParts::line(g) / 2, t);
        if (s + RING < stages) {  // the last of those that had to do with the place asks
            int earlier = 0;
            __syncwarp();
            if (!lane) earlier = atomicAdd(sm->left + s % RING, 1);
            if (__shfl_sync(~0u, earlier, 0) == MANY * DSPLIT - 1) {
                if (!lane) sm->left[s % RING] = 0;
                ask(s + RING, s + RING + 1);
            }
        }
        sync_warps<DSPLIT, ALONE ? AFTER : 0>(warp / DSPLIT);
        if (q >= parts) continue;
        #pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const int c = mine / 16 + i * (TEAM / 16);
            const int to = c < ROWS ? sm->slots.who[q / own][c] : -1;
            if (to < 0) continue;
            const int column = MIXED ? line / 8 * ROWS + c : c;
            const float v = sum_parts<DSPLIT>(sm->part[round] + warp - dshare, line, column);
            sm->done[to][q % own * 8 + line % 8] = fmaf(v, scale, more);
        }
    }
    __syncthreads();
    #pragma unroll 1
    for (int i = threadIdx.x; i < rows * SPAN; i += THREADS) {
        const int r = i / SPAN, c = i % SPAN;
        if (c >= span) continue;
        float v = 0.f;
        #pragma unroll
        for (int p = 0; p < PICKS; p++)
            v = fmaf(sm->share[r * PICKS + p], sm->done[r * PICKS + p][c], v);
        const float prior = i < THREADS ? before : add ? add[(size_t)r * K + base + c] : 0.f;
        y[(size_t)r * K + base + c] = prior + v;
    }
    if (!blockIdx.x && threadIdx.x < rows * TOP_K) {
        const int r = threadIdx.x / TOP_K, j = threadIdx.x % TOP_K;
        if (ids) ids[threadIdx.x] = sm->slots.of(r)[j];
        if (weights) weights[threadIdx.x] = sm->share[r * PICKS + j];
    }
}
