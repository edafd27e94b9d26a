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
// When is the next launch let in, which finds no room before anyway? Of several rows when all
// weights have been asked for; of one short row at the end, of a long one at once.
constexpr bool LATE = ROWS > 1, LAST = ROWS == 1 && !ROUNDS;
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
// of a product that somebody needs
constexpr int COLUMNS = MIXED ? 2 * ROWS : ROWS;
// 80 or 96 registers, so that a block of the router finds some beside this one
#if __CUDA_ARCH__ == 900
constexpr bool SCALED = U::SCALED || D::SCALED;
constexpr bool INT4 = U::FOUR == 16 || D::FOUR == 16;
constexpr bool ROOMY = WARPS == 20 && !INT4 && ROWS <= (SCALED ? 1 : 2)
        && !(ROUNDS && ROOM > 150000);
constexpr bool FEWER = ROUNDS && WARPS == 16 && ROWS == 1 && U::CHUNKS
        && D::CHUNKS && !INT4;
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
constexpr bool ALONE = APART && ROWS == 1 && DISTINCT && OWN == 1 && !MIXED
        && D::UNITS == 2 && DShares::N == DSPLIT && PICKS * DSPLIT <= WARPS;
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
__device__ __forceinline__ void group_rows(
        Table& s, int* seen, int many, int lane) {
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
        Table& slots, int row, const float* logits,
        const float* __restrict__ correction, int lane) {
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
        Table& slots, int row, const float* logits, const float* per_expert,
        float scaling, int lane, float* share) {
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
        X& in, float (*squares)[PARTS], const float* x,
        const float* __restrict__ gain, int rows) {
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
    auto entry = [&](int i) {
        return ALONE ? slots.who[i / HPARTS][0] : i / HPARTS;
    };
    auto ask = [&](int i, float* a) {  // true: they are there
        const int c = i % HPARTS * 256 + lane * 4;
        const float* const from = h + (size_t)entry(i) * WIDTH + c;
        bool all = true;
        #pragma unroll
        for (int j = 0; j < 2; j++)
            *(float4*)(a + 4 * j) = I % 256 == 0 || c + 128 * j < I
                    ? peek4(from + 128 * j)
                    : make_float4(0.f, 0.f, 0.f, 0.f);
        #pragma unroll
        for (int j = 0; j < 8; j++) {
            if (I % 4)
                a[j] = c + j / 4 * 128 + j % 4 < I ? a[j] : 0.f;
            all = all && there(a[j]);
        }
        return all;
    };
    auto put = [&](int i, float* a) {
        __syncwarp();
        const int v = eight_of(a, lane);
        in.template put<2>(entry(i), i % HPARTS * 32 + v, a);
    };
    if constexpr (MADE > 0) {  // a warp has one piece, and is alone with it
        const int i = threadIdx.x / 32;
        if (i >= PICKS * HPARTS)
            return;
        first();
        float a[8];
        while (!ask(i, a))
            ;
        return put(i, a);
    }
    stage<ROWS * PICKS * HPARTS, WARPS, OWN == 1 ? 4 : 3>(
            rows * PICKS * HPARTS, ask, [&](int i, float* a) {
                bool all = true;
                #pragma unroll
                for (int j = 0; j < 8; j++)
                    all = all && there(a[j]);
                while (!all)
                    all = ask(i, a);
                put(i, a);
            });
}

// What the block's outputs are when its strips are done, and who was picked.
template <class Shared>
__device__ __forceinline__ void put_sums(
        Shared* sm, int base, int span, int rows, float before, const float* add,
        float* y, int* ids, float* weights) {
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
__device__ __forceinline__ void load(
        Shared* sm, const Params& p, int warp, int lane) {
    const int picker = WARPS - 1 - warp;  // whose row this warp picks for
    if (picker < p.rows)
        pick_row(
                sm->slots, picker, p.logits + (size_t)picker * p.ld, p.correction,
                lane);
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
__device__ __forceinline__ void weigh(
        Shared* sm, const Params& p, int warp, int lane) {
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

constexpr unsigned NONE = ~0u;

// Who a thread is, which strips of the first half its team has, and the block's outputs.
template <class Shared> struct Block {
    Shared* const sm;
    const Params& p;
    int lane, warp, g, t;
    int ushare, dshare;  // which share of the columns of a strip its warp has
    unsigned first, stride;
    int base, span;
    // of the second half, eights of its outputs for each expert
    unsigned own;
    // where in the ring the unit is that is multiplied next, which leaves it to another
    int place = 0, round = 0;
    __device__ __forceinline__ Block(
            Shared* sm_, const Params& p_, unsigned thread)
        : sm(sm_), p(p_) {
        lane = thread % 32;
        g = lane / 4;
        t = lane % 4;
        // of long rows the compiler learns: one for all
        warp = ROUNDS ? __shfl_sync(~0u, thread / 32, 0) : thread / 32;
        ushare = warp % USPLIT;
        dshare = warp % DSPLIT;
        first = blockIdx.x + gridDim.x * (warp / USPLIT);
        stride = gridDim.x * (WARPS / USPLIT);
        base = blockIdx.x * SPAN;
        span = min(SPAN, K - base);
        own = K % SPAN ? max(span, 0) / 8 : SPAN / 8;
    }
    __device__ __forceinline__ unsigned slots() const {
        return ROWS == 1 ? PICKS : sm->slots.number;
    }
    __device__ __forceinline__ unsigned expert_of(unsigned slot) const {
        return SHARED && slot < sm->slots.FIRST ? E : sm->slots.expert[slot];
    }
    // Of the second half: eights of rows, strips, and where an eight begins.
    __device__ __forceinline__ unsigned parts() const { return slots() * own; }
    __device__ __forceinline__ unsigned strips() const {
        return MIXED ? (parts() + 1) / 2 : slots() * OWN;
    }
    __device__ __forceinline__ unsigned row_of(unsigned part) const {
        return sm->slots.expert[part / own] * K + base + part % own * 8;
    }
    // Whose the strip u is, or part 0 or 1 of it, and the hidden values for a product's column c.
    __device__ __forceinline__ unsigned slot(unsigned u, unsigned part) const {
        return MIXED ? min(2 * u + part, parts() - 1) / own : u / OWN;
    }
    __device__ __forceinline__ int entry(unsigned u, int c) const {
        const int part = MIXED ? min(c / ROWS, 1) : 0;
        const int r = MIXED ? c % ROWS : min(c, ROWS - 1);
        return max(0, (int)sm->slots.who[slot(u, part)][r]);
    }
    // That unit, and on to the next.
    __device__ __forceinline__ auto& here() const {
        return sm->ring[warp][place];
    }
    __device__ __forceinline__ void forth() {
        cp_async_commit();
        place = place == DEEP - 1 ? 0 : place + 1;
    }
    // A residual that the thread adds at the end.
    __device__ __forceinline__ float prior() const {
        const int r = threadIdx.x / SPAN, c = threadIdx.x % SPAN;
        return p.add && r < p.rows && c < span ? p.add[(size_t)r * K + base + c]
                                               : 0.f;
    }
    __device__ __forceinline__ void clear() {
        sm->slots.clear(p.rows, THREADS);
        for (int i = threadIdx.x; ROWS > 1 && i < E; i += THREADS)
            sm->seen[i] = ROWS * TOP_K;
    }
};

// Scale and bias of a row of W, or of the gate's and of the other's, of the sixteen `of` a strip.
template <class F, int N> struct Line {
    float scale[N], more[N];
    __device__ __forceinline__ Line(
            const float* of, int line, const float* bias) {
        #pragma unroll
        for (int j = 0; j < N; j++) {
            scale[j] = F::row_scale((Bytes)of, of, line + 2 * j);
            more[j] = bias ? of[16 + line + 2 * j] : 0.f;
        }
    }
};

// Hidden value o of an entry: what a team's warps found of a strip's line, for x's row c.
template <int R>
__device__ __forceinline__ void give_hidden(
        const Params& p, const float (*part)[16][R], int line, int c, int entry,
        unsigned o, float inv, const Line<U, 1 + PAIR>& with) {
    float v[2];
    #pragma unroll
    for (int j = 0; j < 1 + PAIR; j++) {
        v[j] = sum_parts<USPLIT>(part, line + 2 * j, c);
        v[j] = fmaf(__fmul_rn(v[j], inv), with.scale[j], with.more[j]);
    }
    give(p.h + (size_t)entry * WIDTH + o, act_mul<ACT>(v[0], v[PAIR], p.limit));
}

// The block's outputs of strip u: what the team's warps found is merged, for whom picked it.
// `mine`: the thread's number in its team.
template <class Shared>
__device__ __forceinline__ void put_products(
        const Block<Shared>& b, const float (*part)[16][COLUMNS], unsigned u,
        int mine, const Line<D, 1>& with) {
    constexpr int TEAM = 32 * DSPLIT;
    constexpr int ITEMS = (16 * ROWS + TEAM - 1) / TEAM;
    const int line = mine % 16;
    const unsigned eight = 2 * u + line / 8;
    if (MIXED && eight >= b.parts())
        return;
    const int o = MIXED ? eight % b.own * 8 + line % 8 : u % OWN * 16 + line;
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int c = mine / 16 + i * (TEAM / 16);
        const int to = c < ROWS ? b.sm->slots.who[b.slot(u, line / 8)][c] : -1;
        if (to < 0)
            continue;
        const int column = MIXED ? line / 8 * ROWS + c : c;
        const float v = sum_parts<DSPLIT>(part, line, column);
        b.sm->done[to][o] = fmaf(v, with.scale[0], with.more[0]);
    }
}

#if ROUNDS
#include "lib/experts_long.cuh"
#else
#include "lib/experts_short.cuh"
#endif

extern "C" __global__ void __launch_bounds__(LIMIT, 1) experts(
        const unsigned char* __restrict__ uw,
        const unsigned char* __restrict__ dw,
        const unsigned char* __restrict__ us,
        const unsigned char* __restrict__ ds, const float* __restrict__ ugs,
        const float* __restrict__ dgs, const float* __restrict__ ubias,
        const float* __restrict__ dbias, const float* logits,
        const float* __restrict__ correction,
        const float* __restrict__ per_expert, const float* __restrict__ gain,
        const float* x, float* h, int* ids, float* weights, const float* add,
        float* y, const unsigned char* later_w, const unsigned char* later_s,
        float eps, float limit, float scaling, int ld, int rows, int halves,
        int later_w16, int later_s16) {
    const Params p = {uw, dw, us, ds, ugs, dgs, ubias, dbias, logits, correction,
            per_expert, gain, x, h, ids, weights, add, y, later_w, later_s, eps,
            limit, scaling, ld, rows, halves, later_w16, later_s16};
    DYNAMIC_SHARED(Shared, sm);
    Block<Shared> b(sm, p, threadIdx.x);
    Next o;  // what is fetched next
    Up up(b, o);
    b.clear();
    int begun = 0;
    if (SHARED)  // needs no router
        #pragma unroll 1
        for (; begun < DEEP && up.unit < STRIPS; begun++) {
            up.fetch();
            b.forth();
        }
    if (!LATE && !LAST)
        pdl_trigger();
    pdl_wait();
    load(sm, p, b.warp, b.lane);
    #pragma unroll 1
    for (; begun < DEEP; begun++)
        up.next();
    if (p.halves & 1) {
        if (NORM)
            norm(sm, p.eps, b.warp, b.lane);
        up.run();
    }
    if (!(p.halves & 2))
        return;
    Down down(b, o);
    down.begin();  // not before: others still wait for the first half's
    if (LATE)
        pdl_trigger();
    weigh(sm, p, b.warp, b.lane);
    if (!APART)
        __syncthreads();  // before what is staged takes the place of x
    float before = 0.f;
    if (!MADE)
        before = b.prior();
    Made<D, MADE> only;
    stage_h(sm->in.h, sm->slots, p.h, p.rows, [&] { down.decode(only); });
    if (MADE)
        before = b.prior();
    ask_later(p);
    if (ALONE)
        __syncwarp();
    else
        __syncthreads();
    down.run(only);
    if (LAST)
        pdl_trigger();
    __syncthreads();
    put_sums(sm, b.base, b.span, p.rows, before, p.add, p.y, p.ids, p.weights);
}
