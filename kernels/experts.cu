// y = add + sum over a row's experts of weight_e * down_e (act(gate_e x) * up_e x), the shared one
// as one more; the norm before them folded in. By tensor cores, in the order of lib/strips.cuh, so
// that a row has the bits that expert_strips.cu gives it among many. In two
// halves: hidden values first, then their products; each value says for itself whether it is there
// (lib/given.cuh), so that nobody waits for more than what it needs. An expert is read
// and decoded once for all rows: column c of a product is row c of x. Strips of the first half are
// dealt out to teams of USPLIT warps of all blocks; of the second, a block owns SPAN outputs, for
// every expert, and teams of DSPLIT warps take their strips. Where SPAN leaves half a strip over, a
// strip has eight rows of one expert and eight of the same or the next, and columns for both.
// Warps of a team share a strip's columns and wait for each other, not for the block. DEEP units of
// a warp are on their way to shared memory: those of the second half when the warp is done with the
// first, before hidden values are there.
// A row's bits do not depend on how many rows there are.
//   -D UP= DOWN= (of lib/fragment.cuh)  HIDDEN= (k, a multiple of 32)  INNER=  EXPERTS=  TOP_K=
//   -D SHARED= GATE= (of the shared expert: 0 or 1)  SCORE= (of lib/picks.cuh)  CORRECTED= (0 or 1)
//   -D RENORM=  NORM= (0 or 1)  ACT= (of lib/act.cuh)  ROWS= (1, 2, 4, 8: at most so many)
//   -D WARPS= (a multiple of 4)  DEEP=  SPAN= outputs of a block, a multiple of 4
//   -D ROUNDS= 0; or, for long rows (lib/experts_long.cuh), strips of the first half that a team
//      has, at most
//   -D APART= do inputs of the two halves have places of their own? (0 or 1)
//   -D ROOM= bytes of shared memory
//   launch: <<<any number from ceil(k/SPAN), 32*WARPS, ROOM>>>, see atlas.cuda.experts
#include "lib/act.cuh"
#include "lib/ahead.cuh"
#include "lib/async.cuh"
#include "lib/given.cuh"
#include "lib/pdl.cuh"
#include "lib/picks.cuh"
#include "lib/ranked.cuh"
#include "lib/strips.cuh"
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
#define RENORM 1
#define NORM 1
#define ACT ACT_SILU
#define ROWS 1
#define WARPS 20
#define DEEP 2
#define SPAN 16
#define ROUNDS 0
#define APART 1
#define ROOM 118784
#endif
// What the kernel is given. Of matrices, those with u are the first half's, with d the second's.
struct Params {
    // bank of up to EXPERTS + 1 matrices [n4, HIDDEN] in UP; rows 4q..4q+3 are the gates
    // of outputs 2q, 2q+1, then their ups; without gates (relu2) rows are outputs. The
    // shared expert is the last
    const unsigned char* uw;  // [ubytes] u8
    const unsigned char* dw;  // [dbytes] u8: the same of [HIDDEN, INNER] in DOWN
    const unsigned char* us;  // [uscales] u8 or null: scales
    const unsigned char* ds;  // [dscales] u8 or null
    const float* ugs;  // [urows] f32 or null: nvfp4, int4: scale of each row
    const float* dgs;  // [drows] f32 or null
    const float* ubias;  // [urows] f32 or null: of the rows as they are stored
    const float* dbias;  // [drows] f32 or null
    // of the router; with GATE the one after the experts' is the shared expert's gate
    const float* logits;  // [r, ld] f32
    // added to the scores for picking only (CORRECTED 1)
    const float* correction;  // [experts] f32 or null
    // a factor on the weight of each expert
    const float* per_expert;  // [experts] f32 or null
    const float* gain;  // [k] f32 or null: of the norm (NORM 1)
    const float* x;  // [r, k] f32
    // width = INNER to a multiple of 4; picks = TOP_K (+ 1: the shared expert's); EMPTY
    // before (router.cu)
    float* h;  // [r, picks, width] f32
    int* ids;  // [r, top_k] i32 or null: who was picked, best first
    float* weights;  // [r, top_k] f32 or null: their weights
    const float* add;  // [r, k] f32 or null: residual; may be y
    float* y;  // [r, k] f32
    // of which the first 16 * later_w16 bytes will be read next: they are asked for once
    // hidden values are there
    const unsigned char* later_w;  // [tbytes] u8 or null
    const unsigned char* later_s;  // [tscales] u8 or null: likewise
    float eps;  // of the norm
    float limit;  // of the activation (lib/act.cuh)
    float scaling;  // of all weights
    int ld;  // numbers from one row of logits to the next
    int rows;  // at most ROWS
    // 1: the first only; 2: the second only; 3: both; all blocks must be running at once then
    int halves;
    int later_w16;  // sixteens of bytes of later_w
    int later_s16;  // of later_s
};

typedef UP<(HIDDEN + 31) / 32> U;
typedef DOWN<(INNER + 31) / 32> D;
constexpr int K = HIDDEN;
constexpr int I = INNER;
constexpr int E = EXPERTS;
constexpr int PICKS = TOP_K + SHARED;
constexpr int THREADS = 32 * WARPS;
// When is the next launch let in, which finds no room before anyway? When all weights have been
// asked for, or, of one row, at the end; else at once.
constexpr bool LATE = ROWS > 2, LAST = ROWS == 1 && !ROUNDS;
constexpr int N = (E + 31) / 32;
constexpr int WIDTH = (I + 3) / 4 * 4;
constexpr bool PAIR = ACT != ACT_RELU2;
// of an expert
constexpr int UROWS = ((PAIR ? 2 * I : I) + 3) / 4 * 4;
constexpr int STRIPS = (UROWS + 15) / 16;
// outputs of a strip; strips of a block
constexpr int OUT = PAIR ? 8 : 16, OWN = (SPAN + 15) / 16;
// Where a block's outputs would leave half of a strip empty, strips of the second half are two
// parts of eight rows, of one expert or of two.
constexpr bool MIXED = ROWS <= 4 && SPAN % 16 == 8 && K % 8 == 0 && D::CHUNKS;
constexpr int COLUMNS = MIXED ? 2 * ROWS : ROWS;  // of a product that somebody needs
// 80 or 96 registers, so that a block of the router finds some beside this one
#if __CUDA_ARCH__ == 900
constexpr bool SCALED = U::SCALED || D::SCALED;
constexpr bool INT4 = U::FOUR == 16 || D::FOUR == 16;
constexpr bool ROOMY = WARPS == 20 && !INT4 && ROWS <= (SCALED ? 1 : 2)
        && !(ROUNDS && ROOM > 150000);
constexpr bool FEWER = ROUNDS && WARPS == 16 && ROWS == 1 && U::CHUNKS && D::CHUNKS
        && !INT4;
constexpr int LIMIT = ROOMY ? 768 : FEWER ? 640 : THREADS;
#else
constexpr int LIMIT = THREADS;
#endif
typedef Shares<U, K, 4> UShares;
typedef Shares<D, I, 2> DShares;
constexpr int USPLIT = UShares::SPLIT, DSPLIT = DShares::SPLIT;
// Groups of the second half meet at barriers of their own, if they are not those of the first.
constexpr int AFTER = USPLIT == DSPLIT || USPLIT == 1 ? 0 : WARPS / USPLIT;
constexpr bool DISTINCT = DSPLIT == 1 || AFTER + WARPS / DSPLIT <= 15;
// Has each warp just one unit of the second half, and does it stage what it multiplies by itself?
constexpr bool ALONE = APART && ROWS == 1 && DISTINCT && OWN == 1 && !MIXED && D::UNITS == 2
        && DShares::N == DSPLIT && PICKS * DSPLIT <= WARPS;
// Quarters of that unit's blocks that a warp decodes before hidden values are there: registers have
// room for no more.
constexpr int MADE = ALONE && D::FOUR == 8 && !DShares::SHORT ? 4 : 0;
// the first so many warps stage x, while the others pick
constexpr int STAGE = ROWS > 1 && WARPS - ROWS >= 4 ? WARPS - ROWS : WARPS;
typedef StagedRows<U, K, ROWS> X;
typedef StagedRows<D, I, ROWS * PICKS> H;
constexpr int PARTS = X::PARTS, HPARTS = H::PARTS;  // pieces of 256 of a row
typedef Slots<E, TOP_K, SHARED, ROWS> Table;
// What strips of a half are multiplied by. Apart, warps go on to the second half alone.
template <bool> struct Inputs {
    union {
        X x;
        H h;
    };
};
template <> struct Inputs<true> {
    X x;
    H h;
};
// Which experts are needed and for whom, found by one warp: a lane has entries lane, lane + 32,
// and so on; `seen`: of each expert the first entry that picked it.
__device__ __forceinline__ void group_rows(Table& s, int* seen, int many, int lane) {
    constexpr int M = (ROWS * TOP_K + 31) / 32;
    int id[M], opener[M];
    unsigned opens[M];
    #pragma unroll
    for (int i = 0; i < M; i++) {
        id[i] = lane + i * 32 < many ? s.ids[lane + i * 32] : -1;
        if (id[i] >= 0)
            atomicMin(seen + id[i], lane + i * 32);
    }
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < M; i++) {
        opener[i] = id[i] >= 0 ? seen[id[i]] : -1;
        opens[i] = __ballot_sync(~0u, opener[i] == lane + i * 32);
    }
    #pragma unroll
    for (int i = 0; i < M; i++) {
        if (id[i] < 0)
            continue;
        int slot = s.FIRST;  // those that were opened before
        #pragma unroll
        for (int j = 0; j < M; j++) {
            const int before = opener[i] - 32 * j;
            const unsigned below = before >= 32 ? ~0u
                    : before > 0                ? (1u << before) - 1
                                                : 0u;
            slot += __popc(opens[j] & below);
        }
        const int entry = lane + i * 32;
        if (opener[i] == entry)
            s.expert[slot] = id[i];
        s.who[slot][entry / TOP_K] = entry / TOP_K * PICKS + entry % TOP_K;
    }
    int all = s.FIRST;
    #pragma unroll
    for (int j = 0; j < M; j++)
        all += __popc(opens[j]);
    if (!lane)
        s.number = all;
}

// Pieces of 256 values, MOST at most, dealt out to the first BY warps: a lane has eight, and up to
// so many pieces of a warp are on their way at once.
template <int MOST, int BY, int AT_ONCE, class Load, class Put>
__device__ __forceinline__ void stage(int pieces, Load load, Put put) {
    constexpr int TURNS = (MOST + BY - 1) / BY;
    constexpr int MANY = TURNS < AT_ONCE ? TURNS : AT_ONCE;
    const int warp = threadIdx.x / 32;
    #pragma unroll 1
    for (int from = BY == WARPS || warp < BY ? warp : pieces; from < pieces;
            from += MANY * BY) {
        float a[MANY][8];
        #pragma unroll
        for (int k = 0; k < MANY; k++)
            load(min(from + k * BY, pieces - 1), a[k]);
        #pragma unroll
        for (int k = 0; k < MANY; k++)
            if (from + k * BY < pieces)
                put(from + k * BY, a[k]);
    }
}

// One row's picks, by a warp; and what their results are to be multiplied by.
__device__ __forceinline__ void pick_row(
        Table& slots, int row, const float* logits, const float* __restrict__ correction,
        int lane) {
    float near[N];
    near_logits<E, N>(logits, lane, near);
    int* const to = slots.of(row);
    constexpr int AT_ONCE = ROWS == 1 && TOP_K == 8 ? 8 : 1;
    const int id = ranked<E, TOP_K, SCORE, CORRECTED, N, AT_ONCE>(
            near, correction, lane, to);
    if (lane < TOP_K)
        to[lane] = id;
}
__device__ __forceinline__ void weigh_row(
        Table& slots, int row, const float* logits, const float* per_expert, float scaling,
        int lane, float* share) {
    float near[N];  // once more: registers are few meanwhile
    near_logits<E, N>(logits, lane, near);
    const int id = slots.of(row)[lane < TOP_K ? lane : 0];
    const float own = __ldcg(logits + id);
    float v = pick_weight<E, TOP_K, SCORE, RENORM, N>(near, own, scaling, lane);
    if (per_expert)
        v = __fmul_rn(v, per_expert[id]);
    if (lane < TOP_K)
        share[lane] = v;
    if (SHARED && lane == TOP_K)
        share[TOP_K] = GATE ? logistic(__ldcg(logits + E)) : 1.f;
}

// Rows of x, times the norm's gain, and sums of squares of their pieces.
__device__ __forceinline__ void stage_x(
        X& in, float (*squares)[PARTS], const float* x, const float* __restrict__ gain,
        int rows) {
    const int lane = threadIdx.x % 32;
    stage<ROWS * PARTS, STAGE, 4>(
            rows * PARTS,
            [&](int i, float* a) {
                const int v = i % PARTS * 32 + lane;
                if (K % 256 == 0 || v * 8 < K)
                    load8(x + (size_t)(i / PARTS) * K + v * 8, a);
                else
                    for (int j = 0; j < 8; j++)
                        a[j] = 0.f;
            },
            [&](int i, float* a) {
                const int r = i / PARTS, v = i % PARTS * 32 + lane;
                float w[8] = {}, sum = 0.f;
                if (NORM && (K % 256 == 0 || v * 8 < K))
                    load8(gain + v * 8, w);
                #pragma unroll
                for (int j = 0; NORM && j < 8; j++) {
                    sum = fmaf(a[j], a[j], sum);
                    a[j] = __fmul_rn(a[j], w[j]);
                }
                in.put(r, v, a);
                if (NORM)
                    sum = warp_sum(sum);
                if (NORM && !lane)
                    squares[r][i % PARTS] = sum;
            });
}

// Hidden values, when they are there: a warp's pieces. Each warp that has one of its own does
// what comes `first` before it asks.
template <class First>
__device__ __forceinline__ void stage_h(
        H& in, const Table& slots, const float* h, int rows, First first) {
    const int lane = threadIdx.x % 32;
    auto entry = [&](int i) { return ALONE ? slots.who[i / HPARTS][0] : i / HPARTS; };
    auto ask = [&](int i, float* a) {  // true: they are there
        const int v = i % HPARTS * 32 + lane;
        const float* const from = h + (size_t)entry(i) * WIDTH + v * 8;
        bool all = true;
        #pragma unroll
        for (int j = 0; j < 8; j += 4)
            *(float4*)(a + j) = I % 256 == 0 || v * 8 + j < I
                    ? peek4(from + j)
                    : make_float4(0.f, 0.f, 0.f, 0.f);
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            if (I % 4)
                a[j] = v * 8 + j < I ? a[j] : 0.f;
            all = all && there(a[j]);
        }
        return all;
    };
    if constexpr (MADE > 0) {  // a warp has one piece, and is alone with it
        const int i = threadIdx.x / 32;
        if (i >= PICKS * HPARTS)
            return;
        first();
        float a[8];
        while (!ask(i, a))
            ;
        __syncwarp();
        in.put(entry(i), i % HPARTS * 32 + lane, a);
        return;
    }
    stage<ROWS * PICKS * HPARTS, WARPS, OWN == 1 ? 4 : 3>(
            rows * PICKS * HPARTS, ask, [&](int i, float* a) {
                bool all = true;
                #pragma unroll
                for (int j = 0; j < 8; j++)
                    all = all && there(a[j]);
                while (!all)
                    all = ask(i, a);
                __syncwarp();
                in.put(entry(i), i % HPARTS * 32 + lane, a);
            });
}

// What the block's outputs are when its strips are done, and who was picked.
template <class Shared>
__device__ __forceinline__ void put_sums(
        Shared* sm, int base, int span, int rows, float before, const float* add, float* y,
        int* ids, float* weights) {
    #pragma unroll 1
    for (int i = threadIdx.x; i < rows * SPAN; i += THREADS) {
        const int r = i / SPAN, c = i % SPAN;
        if (c >= span)
            continue;
        float v = 0.f;
        #pragma unroll
        for (int p = 0; p < PICKS; p++)
            v = fmaf(sm->share[r * PICKS + p], sm->done[r * PICKS + p][c], v);
        const float prior = i < THREADS ? before
                : add                   ? add[(size_t)r * K + base + c]
                                        : 0.f;
        y[(size_t)r * K + base + c] = prior + v;
    }
    if (!blockIdx.x && threadIdx.x < rows * TOP_K) {
        const int r = threadIdx.x / TOP_K, j = threadIdx.x % TOP_K;
        if (ids)
            ids[threadIdx.x] = sm->slots.of(r)[j];
        if (weights)
            weights[threadIdx.x] = sm->share[r * PICKS + j];
    }
}

// The rows' picks, and x beside them: a warp picks for one row, the others stage.
template <class Shared>
__device__ __forceinline__ void load(Shared* sm, const Params& p, int warp, int lane) {
    const int picker = WARPS - 1 - warp;  // whose row this warp picks for
    if (picker < p.rows)
        pick_row(sm->slots, picker, p.logits + (size_t)picker * p.ld, p.correction, lane);
    if (p.halves & 1)  // beside the warps that pick
        stage_x(sm->in.x, sm->squares, p.x, p.gain, p.rows);
    __syncthreads();
    if (ROWS > 1) {
        if (!warp)
            group_rows(sm->slots, sm->seen, p.rows * TOP_K, lane);
        __syncthreads();
    }
}

// What the warp multiplies its results by: 1 / root of each row's mean square.
template <class Shared>
__device__ __forceinline__ void norm(Shared* sm, float eps, int warp, int lane) {
    float sum = 0.f;
    #pragma unroll
    for (int i = 0; i < PARTS; i++)
        sum += sm->squares[lane % ROWS][i];
    sm->inverse[warp][lane % ROWS] = rsqrtf(fmaf(sum, 1.f / K, eps));
    __syncwarp();
}

// The weights of the picks, by the warps that picked.
template <class Shared>
__device__ __forceinline__ void weigh(Shared* sm, const Params& p, int warp, int lane) {
    const int picker = WARPS - 1 - warp;
    if (picker < p.rows) {
        const float* const its = p.logits + (size_t)picker * p.ld;
        weigh_row(
                sm->slots, picker, its, p.per_expert, p.scaling, lane,
                sm->share + picker * PICKS);
    }
}

// What will be read next is asked for: memory idles when a warp's values are there.
__device__ __forceinline__ void ask_later(const Params& p) {
    const int asks = blockIdx.x * THREADS + threadIdx.x;
    if (p.later_w)
        ahead(p.later_w, p.later_w16, asks, gridDim.x * THREADS);
    if (p.later_s)
        ahead(p.later_s, p.later_s16, asks, gridDim.x * THREADS);
}

#if ROUNDS
#include "lib/experts_long.cuh"
#else
struct Place {  // for a unit; with a strip's last one come scales and biases of its rows
    unsigned char weights[U::BYTES > D::BYTES ? U::BYTES : D::BYTES];
    float tail[32];
};
struct Shared {
    Place ring[WARPS][DEEP];
    Inputs<APART> in;
    float part[2][WARPS][16][COLUMNS];  // of one strip while those of the next are made
    // scales and biases of its rows, when its last place has been left
    float tail[WARPS][32];
    float inverse[WARPS][ROWS];  // of the root of a row's mean square
    float squares[ROWS][PARTS], share[ROWS * PICKS], done[ROWS * PICKS][OWN * 16];
    Table slots;
    int seen[ROWS > 1 ? E : 1];
};
static_assert(
        sizeof(Shared) <= ROOM && ROWS <= WARPS && WARPS % 4 == 0, "see the contract");

// What a warp fetches next of a bank: REST rows from `row` on (`rest` if it is 0), and which unit.
template <class F> struct Bank {
    Bytes w, s;  // where the lane's part of its warp's first unit is
    const float *scale, *bias;
    __device__ __forceinline__ Bank(
            Bytes w_, Bytes s_, const float* gs, const float* bias_, int share, int lane)
        : w(w_), s(s_), bias(bias_) {
        scale = RowScales<F>::IN_S ? (const float*)s_ : gs;
        F::first(w, s, 0, share, lane);
    }
};
struct Next {
    Bytes w, s;
    unsigned row;
    int rest, step;
    int skip;  // rows between the strip's two parts, if it has any
    template <class F>
    __device__ __forceinline__ void first(const Bank<F>& of, unsigned row_) {
        row = row_;
        w = of.w + (size_t)row * F::LINE;
        s = of.s + (size_t)(row / 4) * F::SLINE;
    }
    template <class F>
    __device__ __forceinline__ void two(
            const Bank<F>& of, unsigned row_, unsigned other, int lane) {
        first(of, row_);
        skip = (int)(other - row_) - 8;
        s += lane < 16 ? 0 : (long long)(skip / 4) * (int)F::SLINE;
    }
    // True: that was the strip's last unit.
    template <class F, class S, int REST, bool PARTED>
    __device__ __forceinline__ bool fetch(
            const Bank<F>& of, Place& p, int share, int lane) {
        const int rows = REST ? REST : rest;
        const long long jump = PARTED ? (long long)skip * (int)F::LINE : 0;
        F::fetch(p.weights, w, s, rows, step * S::SPLIT + share, lane, jump);
        w += S::SPLIT * F::LB;
        s += S::SPLIT * F::SB;
        if (++step < S::of(share))
            return false;
        const unsigned at = lane * 4;
        const bool on = lane * 4 < rows;
        const unsigned from = row + at + (PARTED && lane > 1 ? skip : 0);
        if (lane < 4) {
            if (of.scale)
                cp_async_or_zero<16>(p.tail + at, of.scale + from, on);
            if (of.bias)
                cp_async_or_zero<16>(p.tail + 16 + at, of.bias + from, on);
        }
        step = 0;
        return true;
    }
};

// The same number, of which the compiler knows nothing: what follows from it is found anew for each
// strip, and not kept in registers meanwhile.
__device__ __forceinline__ int anew(int v) {
#if defined(__CUDA_ARCH__)
    asm volatile("" : "+r"(v));
#endif
    return v;
}

// Hidden values of strip u, which the team's warps have multiplied: what they found is merged.
__device__ __forceinline__ void put_hidden(
        Shared* sm, const Params& p, unsigned u, int round, int warp, int ushare) {
    constexpr int TEAM = 32 * USPLIT;
    constexpr int ITEMS = (OUT * ROWS + TEAM - 1) / TEAM;
    const int mine = anew(threadIdx.x) % TEAM, r = mine % OUT;
    const int line = PAIR ? r / 2 * 4 + r % 2 : r;
    const unsigned slot = u / STRIPS, o = u % STRIPS * OUT + r;
    float scale[2], more[2];
    #pragma unroll
    for (int j = 0; j < 1 + PAIR; j++) {
        const float* tail = sm->tail[warp];
        scale[j] = U::row_scale((Bytes)tail, tail, line + 2 * j);
        more[j] = p.ubias ? tail[16 + line + 2 * j] : 0.f;
    }
    sync_warps<USPLIT>(warp / USPLIT);
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int c = (mine + i * TEAM) / OUT;
        const int entry = c < ROWS ? sm->slots.who[slot][c] : -1;
        if (entry < 0 || o >= I)
            continue;
        const float inv = NORM ? sm->inverse[warp][c] : 1.f;
        float v[2];
        #pragma unroll
        for (int j = 0; j < 1 + PAIR; j++) {
            v[j] = sum_parts<USPLIT>(sm->part[round] + warp - ushare, line + 2 * j, c);
            v[j] = fmaf(__fmul_rn(v[j], inv), scale[j], more[j]);
        }
        give(p.h + (size_t)entry * WIDTH + o, act_mul<ACT>(v[0], v[PAIR], p.limit));
    }
}

// The block's outputs of strip u: what the team's warps found is merged, for whom picked it.
template <class Parts, class Slot>
__device__ __forceinline__ void put_products(
        Shared* sm, const Params& p, unsigned u, int round, int warp, int dshare,
        unsigned own, Parts parts, Slot slot) {
    constexpr int TEAM = 32 * DSPLIT;
    constexpr int ITEMS = (16 * ROWS + TEAM - 1) / TEAM;
    const int mine = anew(threadIdx.x) % TEAM, line = mine % 16;
    const float* tail = sm->tail[warp];
    const float scale = D::row_scale((Bytes)tail, tail, line);
    const float more = p.dbias ? tail[16 + line] : 0.f;
    sync_warps<DSPLIT, ALONE ? AFTER : 0>(warp / DSPLIT);
    const unsigned part = 2 * u + line / 8;
    if (MIXED && part >= parts())
        return;
    const int o = MIXED ? part % own * 8 + line % 8 : u % OWN * 16 + line;
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int c = mine / 16 + i * (TEAM / 16);
        const int to = c < ROWS ? sm->slots.who[slot(line / 8)][c] : -1;
        if (to < 0)
            continue;
        const int column = MIXED ? line / 8 * ROWS + c : c;
        const float v = sum_parts<DSPLIT>(sm->part[round] + warp - dshare, line, column);
        sm->done[to][o] = fmaf(v, scale, more);
    }
}

#endif

extern "C" __global__ void __launch_bounds__(LIMIT, 1) experts(
        const unsigned char* __restrict__ uw, const unsigned char* __restrict__ dw,
        const unsigned char* __restrict__ us, const unsigned char* __restrict__ ds,
        const float* __restrict__ ugs, const float* __restrict__ dgs,
        const float* __restrict__ ubias, const float* __restrict__ dbias,
        const float* logits, const float* __restrict__ correction,
        const float* __restrict__ per_expert, const float* __restrict__ gain,
        const float* x, float* h, int* ids, float* weights, const float* add, float* y,
        const unsigned char* later_w, const unsigned char* later_s, float eps, float limit,
        float scaling, int ld, int rows, int halves, int later_w16, int later_s16) {
    const Params p = {uw, dw, us, ds, ugs, dgs, ubias, dbias, logits, correction,
            per_expert, gain, x, h, ids, weights, add, y, later_w, later_s, eps, limit,
            scaling, ld, rows, halves, later_w16, later_s16};
#if ROUNDS
    long_rows(p);
#else
    DYNAMIC_SHARED(Shared, sm);
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int g = lane / 4;
    const int t = lane % 4;
    const int ushare = warp % USPLIT, dshare = warp % DSPLIT;
    const unsigned first = blockIdx.x + gridDim.x * (warp / USPLIT);
    const unsigned stride = gridDim.x * (WARPS / USPLIT);
    // the block's outputs
    const int base = blockIdx.x * SPAN;
    const int span = min(SPAN, K - base);
    constexpr unsigned NONE = ~0u;
    unsigned unit = p.halves & 1 ? first : NONE;  // the strips that are fetched next
    unsigned down = p.halves & 2 && span > 0 ? warp / DSPLIT : NONE;
    auto slots = [&]() -> unsigned { return ROWS == 1 ? PICKS : sm->slots.number; };
    // of the second half, eights of its outputs for each expert, and strips
    const unsigned own = K % SPAN ? max(span, 0) / 8 : SPAN / 8;
    auto parts = [&] { return slots() * own; };
    auto strips = [&] { return MIXED ? (parts() + 1) / 2 : slots() * OWN; };
    auto row_of = [&](unsigned part) {
        return sm->slots.expert[part / own] * K + base + part % own * 8;
    };
    // of the unit that is multiplied next, which leaves it to another
    int place = 0, round = 0;
    const Bank<U> ubank(p.uw, p.us, p.ugs, p.ubias, ushare, lane);
    const Bank<D> dbank(p.dw, p.ds, p.dgs, p.dbias, dshare, lane);
    Next o;
    o.step = 0;
    auto next_up = [&] {
        if (o.step == 0) {
            const unsigned slot = unit / STRIPS, from = unit % STRIPS * 16;
            const unsigned e = SHARED && slot < sm->slots.FIRST ? E
                                                                : sm->slots.expert[slot];
            o.first(ubank, e * UROWS + from);
            o.rest = UROWS - from;
        }
        constexpr int REST = UROWS % 16 ? 0 : 16;
        if (o.fetch<U, UShares, REST, false>(ubank, sm->ring[warp][place], ushare, lane))
            unit += stride;
    };
    auto next_down = [&] {
        if (o.step == 0 && MIXED)
            o.two(dbank, row_of(2 * down), row_of(min(2 * down + 1, parts() - 1)), lane);
        else if (o.step == 0) {
            const unsigned from = down % OWN * 16;
            o.first(dbank, sm->slots.expert[down / OWN] * K + base + from);
            o.rest = span - from;
        }
        constexpr int REST = !MIXED && (SPAN % 16 || K % SPAN) ? 0 : 16;
        if (o.fetch<D, DShares, REST, MIXED>(dbank, sm->ring[warp][place], dshare, lane))
            down += WARPS / DSPLIT;
    };
    auto forth = [&] {
        cp_async_commit();
        place = place == DEEP - 1 ? 0 : place + 1;
    };
    sm->slots.clear(p.rows, THREADS);
    for (int i = threadIdx.x; ROWS > 1 && i < E; i += THREADS)
        sm->seen[i] = ROWS * TOP_K;
    int begun = 0;
    if (SHARED)  // needs no router
        #pragma unroll 1
        for (; begun < DEEP && unit < STRIPS; begun++) {
            next_up();
            forth();
        }
    if (!LATE && !LAST)
        pdl_trigger();
    pdl_wait();
    load(sm, p, warp, lane);
    auto next = [&] {
        if (unit < slots() * STRIPS)
            next_up();
        forth();
    };
    #pragma unroll 1
    for (; begun < DEEP; begun++)
        next();
    if (p.halves & 1) {
        if (NORM)
            norm(sm, p.eps, warp, lane);
        #pragma unroll 1
        for (unsigned u = first; u < slots() * STRIPS; u += stride, round ^= 1) {
            const int l = anew(lane);
            const uint4* at = sm->in.x.of(min(l / 4, ROWS - 1), ushare, l % 4);
            const float* e = sm->in.x.e[max(0, min(l % 4 * 2, ROWS - 2))]
                    + ushare * U::UNITS;
            float acc[4] = {};
            #pragma unroll 1
            for (int i = UShares::of(ushare); i; i--) {
                cp_async_wait<DEEP - 1>();
                __syncwarp();
                const Place& from = sm->ring[warp][place];
                const bool half = UShares::SHORT && i == 1 && ushare == UShares::LAST;
                multiply<U, X>(
                        from.weights, acc, at, e, e + (ROWS > 1 ? X::HELD : 0), g, t, half);
                at += 4 * U::UNITS * USPLIT;
                e += U::UNITS * USPLIT;
                if (i == 1)
                    sm->tail[warp][lane] = from.tail[lane];
                __syncwarp();
                next();
            }
            put_part(sm->part[round][warp], acc, g, t);
            put_hidden(sm, p, u, round, warp, ushare);
        }
    }
    if (!(p.halves & 2))
        return;
    #pragma unroll 1
    for (int i = 0; i < DEEP; i++) {  // not before: others still wait for the first half's
        if (down < strips())
            next_down();
        forth();
    }
    if (LATE)
        pdl_trigger();
    weigh(sm, p, warp, lane);
    if (!APART)
        __syncthreads();  // before what is staged takes the place of x
    float before = 0.f;
    auto prior = [&] {
        if (p.add && threadIdx.x < p.rows * SPAN && (int)threadIdx.x % SPAN < span)
            before = p.add[(size_t)(threadIdx.x / SPAN) * K + base + threadIdx.x % SPAN];
    };
    if (!MADE)
        prior();
    Made<D, MADE> only;  // unit of the warp
    auto decode = [&] {
        if constexpr (MADE > 0) {
            cp_async_wait<DEEP - 1>();
            __syncwarp();
            #pragma unroll
            for (int b = 0; b < D::UNITS; b++)
                only.blocks[b].read(sm->ring[warp][place].weights, b, g, t);
            only.decode();
        }
    };
    stage_h(sm->in.h, sm->slots, p.h, p.rows, decode);
    if (MADE)
        prior();
    ask_later(p);
    if (ALONE)
        __syncwarp();
    else
        __syncthreads();
    const unsigned begin = span > 0 ? warp / DSPLIT : NONE;
    // warps of a team may have had different numbers of strips
    if (USPLIT < DSPLIT)
        round = 0;
    #pragma unroll 1
    for (unsigned u = begin; u < strips();
            u = MADE ? NONE : u + WARPS / DSPLIT, round ^= 1) {
        auto slot = [&](unsigned part) {  // of that part of the strip
            return MIXED ? min(2 * u + part, parts() - 1) / own : u / OWN;
        };
        auto entry = [&](int c) {
            const int part = MIXED ? min(c / ROWS, 1) : 0;
            const int r = MIXED ? c % ROWS : min(c, ROWS - 1);
            return max(0, (int)sm->slots.who[slot(part)][r]);
        };
        const uint4* at = sm->in.h.of(entry(g), dshare, t);
        const float* e0 = sm->in.h.e[entry(2 * t)] + dshare * D::UNITS;
        const float* e1 = sm->in.h.e[entry(2 * t + 1)] + dshare * D::UNITS;
        float acc[4] = {};
        #pragma unroll 1
        for (int i = MADE ? 1 : DShares::of(dshare); i; i--) {
            if (!MADE) {
                cp_async_wait<DEEP - 1>();
                __syncwarp();
            }
            const Place& from = sm->ring[warp][place];
            const bool half = DShares::SHORT && i == 1 && dshare == DShares::LAST;
            if constexpr (MADE > 0)
                multiply_made<D, H>(only, acc, at, e0, e1);
            else
                multiply<D, H>(from.weights, acc, at, e0, e1, g, t, half);
            at += 4 * D::UNITS * DSPLIT;
            e0 += D::UNITS * DSPLIT;
            e1 += D::UNITS * DSPLIT;
            if (i == 1)
                sm->tail[warp][lane] = from.tail[lane];
            __syncwarp();
            if (MADE)
                continue;
            if (down < strips())
                next_down();
            forth();
        }
        put_part(sm->part[round][warp], acc, g, t);
        put_products(sm, p, u, round, warp, dshare, own, parts, slot);
    }
    if (LAST)
        pdl_trigger();
    __syncthreads();
    put_sums(sm, base, span, p.rows, before, p.add, p.y, p.ids, p.weights);
#endif
}
