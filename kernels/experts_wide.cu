// Both halves of the MLPs of a mixture of experts, for many rows of a decode step, in one launch:
// y of an entry (row * PICKS + pick) = D act(U f(x)). Each block picks for all rows, or of many for
// some and hears of the others, and lists by itself who needs whom (lib/listing.cuh): a slot is one
// expert and up to eight entries. Rows of x come as router.cu has left them (lib/ready.cuh).
// Matrices are read in stages, 16 rows of U or 64 of D, whole, which lie together in memory. Stages
// of all slots are one line for each half, of which a block has a piece; its teams of four warps
// take these in turn. Of a stage of U each warp of a team has a share of the columns, and shares
// meet in shared memory, four stages at a time; of a stage of D each has 16 rows. So a warp keeps
// its columns of a slot's rows, as tensor cores want them, in registers. The last warp asks for
// stages, DEEP ahead of those that are left, D's after U's; three others fetch the next slot's rows
// once all teams have taken what they need of this one's. Hidden values say for themselves whether
// they are there (lib/given.cuh). The order of sums is that of lib/strips.cuh. An entry's bits
// depend on nothing but its row and its expert.
//   -D UP= DOWN= (of lib/fragment.cuh, four bits)  HIDDEN= (k: 1024 or 2048)  INNER= (256 or 512)
//   -D EXPERTS=  TOP_K=  SHARED= GATE= (of the shared expert: 0 or 1)
//   -D SCORE= (of lib/picks.cuh)  RENORM= CORRECTED= (0 or 1)
//   -D BIASED= are there biases? (0 or 1)  ACT= of lib/act.cuh  -D NORM= (0 or 1)
//   -D TEAMS=  RING= places, a multiple of TEAMS  DEEP= of them in use, at most
//   -D ROOM= bytes of shared memory but for slots
//   launch: <<<any number, 32*(4*TEAMS + 4), shared bytes: see atlas.cuda.experts_wide>>>
#include "lib/act.cuh"
#include "lib/ahead.cuh"
#include "lib/async.cuh"
#include "lib/bulk.cuh"
#include "lib/fragment.cuh"
#include "lib/given.cuh"
#include "lib/listing.cuh"
#include "lib/pdl.cuh"
#include "lib/ranked.cuh"
#include "lib/ready.cuh"
#include "lib/warps.cuh"
#ifndef UP
#define UP fragment_nvfp4
#define DOWN fragment_nvfp4
#define HIDDEN 2048
#define INNER 512
#define EXPERTS 256
#define TOP_K 8
#define SHARED 1
#define GATE 1
#define SCORE SCORE_SOFTMAX
#define RENORM 1
#define CORRECTED 0
#define BIASED 0
#define ACT ACT_SILU
#define NORM 1
#define TEAMS 3
#define RING 6
#define DEEP 4
#define ROOM 173808
#endif
// What the kernel is given. Of matrices, those with u are the first half's, with d the second's.
struct Params {
    // bank of matrices [UROWS, HIDDEN] in UP, the shared expert's last
    const unsigned char* uw;  // [ubytes] u8
    const unsigned char* dw;  // [dbytes] u8: the same of [HIDDEN, INNER] in DOWN
    const unsigned char* us;  // [uscales] u8: scales
    const unsigned char* ds;  // [dscales] u8: likewise
    const float* ugs;  // [urows] f32 or null: nvfp4, int4: scale of each row
    const float* dgs;  // [drows] f32 or null
    const float* ubias;  // [urows] f32 or null: of rows as they are stored
    const float* dbias;  // [drows] f32 or null
    // of the router; with GATE the one after the experts' is the shared expert's gate
    const float* logits;  // [r, ld] f32
    // added to the scores for picking only (CORRECTED 1)
    const float* correction;  // [experts] f32 or null
    // a factor on the weight of each expert
    const float* per_expert;  // [experts] f32 or null
    int* ids;  // [r, top_k] i32 or null: who is picked, best first
    float* weights;  // [r, top_k] f32 or null: their weights
    float* share;  // [r, picks] f32: the same, and the shared expert's
    // who is picked, for other blocks; EMPTY before (router.cu)
    int* picked;  // [r, top_k] i32
    // x times the gain of the norm (lib/ready.cuh)
    const unsigned char* ready;  // [r, line] u8
    float* h;  // [yrows, inner] f32: of each entry; EMPTY before (router.cu)
    float* y;  // [yrows, k] f32
    float eps;  // of the norm
    float limit;  // of the activation (lib/act.cuh)
    float scaling;  // of all weights
    int ld;  // numbers from one row of logits to the next
    int rows;
    // 1: the first only; 2: the second only; 3: both, and all blocks must be running at once
    int halves;
};

constexpr int TEAM = 4, WARPS = TEAM * TEAMS;  // that multiply
constexpr int STAGERS = 3, ALL = WARPS + STAGERS + 1, THREADS = 32 * ALL;
constexpr int ENTRIES = 8, RECORD = ENTRIES + 1;
constexpr int E = EXPERTS;
constexpr int N = (E + 31) / 32;
constexpr int PICKS = TOP_K + SHARED;
typedef Listing<E, TOP_K, SHARED, ENTRIES, ALL> List;
constexpr bool PAIR = ACT != ACT_RELU2;

// A half: [STORED, COLS] in F, MANY times 16 rows a stage, in shared memory as two parts. Lane l
// has rows 2m and 2m + 1 of part g % 2, with g = l/4 and m = g/2: parts are shifted against each
// other so that reads have no bank conflicts.
template <class F_, int COLS_, int STORED_, int MANY_, int SPLIT_> struct Half {
    typedef F_ F;
    static constexpr int COLS = COLS_;
    static constexpr int STORED = STORED_;
    static constexpr int MANY = MANY_;
    static constexpr int SPLIT = SPLIT_;
    static constexpr int UNITS = COLS / 256;
    static constexpr int ROWS = 16 * MANY;
    static constexpr int PART = ROWS / 2;
    static constexpr unsigned STAGES = STORED / ROWS;  // of a matrix
    static constexpr int W = PART * F::LINE;
    static constexpr int S = PART / 4 * F::SLINE;
    static constexpr int W1 = W + 64;
    static constexpr int S0 = W1 + W;
    static constexpr int S1 = S0 + S + 64;
    static constexpr int BYTES = S1 + S + 64;
    // units of a warp
    static constexpr int MINE = MANY == 1 ? UNITS / TEAM : UNITS;
    // 128s and 256s of a row
    static constexpr int HELD = 2 * UNITS, PARTS = UNITS;
    typedef Staged<F, 4 * HELD> X;
    static_assert(
            COLS % 256 == 0 && STORED % ROWS == 0 && !F::TWO, "see the contract");
};
typedef Half<UP<HIDDEN / 32>, HIDDEN, (PAIR ? 2 : 1) * INNER, 1, 4> U;
typedef Half<DOWN<INNER / 32>, INNER, HIDDEN, 4, INNER / 256> D;
constexpr int BOTH = U::BYTES > D::BYTES ? U::BYTES : D::BYTES;
// scales, biases of rows
constexpr int TAIL = BOTH / 16 * 16;
constexpr int STAGE = TAIL + 256 * (1 + BIASED);
constexpr int HELD = U::HELD > D::HELD ? U::HELD : D::HELD;
constexpr int LINE = U::X::LDR > D::X::LDR ? U::X::LDR : D::X::LDR;

struct Shared {  // and then the experts of the block's slots, and their entries
    unsigned char ring[RING][STAGE];
    uint4 x[ENTRIES * LINE];
    float4 part[TEAMS][TEAM][TEAM][32];  // of stages and shares
    float e[2][HELD][ENTRIES], squares[2][ENTRIES][U::PARTS];
    Meeting full[RING], empty[RING], staged, left;
};
static_assert(sizeof(Shared) == ROOM, "see the contract");
static_assert(
        sizeof(List) <= sizeof(Shared::x),
        "slots are listed where rows are staged later");
static_assert(
        RING % TEAMS == 0,
        "nobody may wait for a phase after the next: it looks like the last");

// Where piece i of n equal ones of a line begins: all * i / n, without the 64 bits that it needs.
__device__ __forceinline__ unsigned piece_of(
        unsigned all, unsigned i, unsigned n) {
    return all / n * i + all % n * i / n;
}
// The stage whose rows begin at `row` of a bank into its place. All but the shared expert's are
// read once.
template <class H>
__device__ __forceinline__ void ask_for(
        Shared* sm, unsigned place, unsigned row, bool again, Bytes w, Bytes s,
        const float* gs, const float* bias) {
    typedef typename H::F F;
    unsigned char* const to = sm->ring[place];
    Meeting* const b = sm->full + place;
    constexpr int ROWS = 4 * H::ROWS;  // bytes of their scales
    bulk_expect(b, 2 * (H::W + H::S) + (gs ? ROWS : 0) + (BIASED ? ROWS : 0));
    w += (size_t)row * F::LINE;
    s += (size_t)(row / 4) * F::SLINE;
    bulk_copy_kept(to, w, H::W, b, again);
    bulk_copy_kept(to + H::W1, w + H::W, H::W, b, again);
    bulk_copy_kept(to + H::S0, s, H::S, b, again);
    bulk_copy_kept(to + H::S1, s + H::S, H::S, b, again);
    if (gs)
        bulk_copy(to + TAIL, gs + row, ROWS, b);
    if (BIASED)
        bulk_copy(to + TAIL + 256, bias + row, ROWS, b);
}
// Where a lane's rows of a warp's strip are, and their scales.
template <class H>
__device__ __forceinline__ const unsigned char* weights_of(
        const Shared* sm, unsigned place, int strip) {
    const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
    return sm->ring[place] + g % 2 * H::W1 + (8 * strip + g / 2 * 2) * H::F::LINE
            + t * 16;
}
template <class H>
__device__ __forceinline__ const unsigned char* scales_of(
        const Shared* sm, unsigned place, int strip) {
    const int g = threadIdx.x % 32 / 4;
    const int t = threadIdx.x % 4;
    const int m = g / 2;
    return sm->ring[place] + (g % 2 ? H::S1 : H::S0)
            + (2 * strip + m / 2) * H::F::SLINE + t * H::F::FOUR
            + m % 2 * (H::F::FOUR / 2);
}

// And scales and biases of these rows.
template <class H>
__device__ __forceinline__ void tail_of(
        const Shared* sm, unsigned place, int strip, float* raw, float* more) {
    const int g = threadIdx.x % 32 / 4;
    const float* const at = (const float*)(sm->ring[place] + TAIL)
            + g % 2 * H::PART + 8 * strip + g / 2 * 2;
    *(float2*)raw = *(const float2*)at;
    *(float2*)more = BIASED ? *(const float2*)(at + 64) : make_float2(0.f, 0.f);
}

struct Piece {  // of a line of stages
    unsigned begin, end, slot0, own;
    __device__ __forceinline__ Piece(unsigned slots, unsigned stages) {
        begin = piece_of(slots * stages, blockIdx.x, gridDim.x);
        end = piece_of(slots * stages, blockIdx.x + 1, gridDim.x);
        slot0 = begin / stages;
        own = begin < end ? (end - 1) / stages - slot0 + 1 : 0;
    }
    // The block has nothing of it.
    __device__ __forceinline__ void drop() {
        own = 0;
        end = begin;
    }
};

// All rows of a slot of U, by BY warps of which this is one.
template <int BY>
__device__ __forceinline__ void take_rows(
        Shared* sm, int warp, int buffer, const int* record,
        const unsigned char* ready) {
    typedef ReadyRow<HIDDEN> Row;
    const int count = record[0];
    const int first = warp * 32 + threadIdx.x % 32;
    #pragma unroll 4
    for (int i = first; i < count * Row::SIXTEENS; i += 32 * BY) {
        const int r = i / Row::SIXTEENS, v = i % Row::SIXTEENS;
        const unsigned char* const row = ready
                + (size_t)(record[1 + r] / PICKS) * Row::BYTES;
        cp_async16(
                sm->x + r * U::X::LDR + v / Row::PART * U::X::LD + v % Row::PART,
                row + v * 16);
    }
    constexpr int MORE = U::HELD + U::PARTS;
    for (int i = first; i < count * MORE; i += 32 * BY) {
        const int r = i / MORE, v = i % MORE;
        const unsigned char* const row = ready
                + (size_t)(record[1 + r] / PICKS) * Row::BYTES;
        float* const to = v < U::HELD ? &sm->e[buffer][v][r]
                                      : &sm->squares[buffer][r][v - U::HELD];
        cp_async_or_zero<4>(to, row + Row::POWERS + v * 4, true);
    }
    cp_async_commit();
    cp_async_wait<0>();
}

// Columns 8v to 8v + 7 of row r of a slot of D.
__device__ __forceinline__ void put_row(
        Shared* sm, int buffer, int r, int v, const float* a) {
    float top = top8(a);
    #pragma unroll
    for (int m = 1; m < 16; m *= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
    const float2 f = chunk_scale(top);
    uint4* const to = sm->x + r * D::X::LDR + v % 4 * D::X::LD + v / 4;
    *to = D::F::CROSSED ? to_half8_crossed(a, f.x) : to_half8(a, f.x);
    if (threadIdx.x % 16 == 0)
        sm->e[buffer][v / 16][r] = f.y;
}

__device__ __forceinline__ void ask_hidden(
        const float* h, int entry, int column, float* a) {
    const float* const at = h + (size_t)entry * INNER + column;
    *(float4*)a = peek4(at);
    *(float4*)(a + 4) = peek4(at + 4);
}
__device__ __forceinline__ bool all_there(const float* a) {
    bool all = true;
    #pragma unroll
    for (int j = 0; j < 8; j++)
        all = all && there(a[j]);
    return all;
}

// All rows of a slot of D: pieces of 256 columns are dealt out to BY warps, of which this is one,
// COUNT of each on their way.
template <int BY, int COUNT>
__device__ __forceinline__ void stage(
        Shared* sm, int warp, int buffer, const int* record, const float* h) {
    const int pieces = record[0] * D::PARTS;
    const int lane = threadIdx.x % 32;
    #pragma unroll 1
    for (int from = warp; from < pieces; from += COUNT * BY) {
        float a[COUNT][8];
        #pragma unroll
        for (int k = 0; k < COUNT; k++) {
            const int i = from + k * BY;
            const int v = i % D::PARTS * 32 + lane;
            if (i < pieces)
                ask_hidden(h, record[1 + i / D::PARTS], v * 8, a[k]);
        }
        #pragma unroll
        for (int k = 0; k < COUNT; k++) {
            const int i = from + k * BY;
            const int v = i % D::PARTS * 32 + lane;
            if (i >= pieces)
                break;
            while (!all_there(a[k]))
                ask_hidden(h, record[1 + i / D::PARTS], v * 8, a[k]);
            __syncwarp();
            put_row(sm, buffer, i / D::PARTS, v, a[k]);
        }
    }
}

// What a lane keeps of a slot: its part of a warp's columns of eight rows.
template <class H> struct Columns {
    uint4 x[2 * H::MINE][4];
    const float* e;
    __device__ __forceinline__ void load(
            const Shared* sm, int buffer, int count, int unit0) {
        const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
        const uint4* const at = sm->x + min(g, count - 1) * H::X::LDR
                + H::F::template own<H::X::LD>(t);
        #pragma unroll
        for (int b = 0; b < 2 * H::MINE; b++)
            #pragma unroll
            for (int j = 0; j < 4; j++)
                x[b][j] = at[j * H::X::LD + 4 * block(b, unit0)];
        e = sm->e[buffer][2 * unit0] + 2 * t;
    }
    static __device__ __forceinline__ int block(int b, int unit0) {  // of the row
        return 2 * (unit0 + b / 2 * (H::MANY == 1 ? TEAM : 1)) + b % 2;
    }
    // z += all units of the warp's in a stage times the columns, unit after unit
    __device__ __forceinline__ void add_units(
            const unsigned char* w, const unsigned char* s, float* z) const {
        #pragma unroll
        for (int u = 0; u < H::MINE; u++) {
            float acc[4] = {};
            multiply(w, s, u, acc);
            #pragma unroll
            for (int j = 0; j < 4; j++)
                z[j] += acc[j];
        }
    }
    // acc += unit i of the warp's in a stage times the columns
    __device__ __forceinline__ void multiply(
            const unsigned char* w, const unsigned char* s, int i,
            float* acc) const {
        typedef typename H::F F;
        // chunks from unit to unit
        constexpr int STEP = 8 * (H::MANY == 1 ? TEAM : 1);
        F q[2];
        #pragma unroll
        for (int b = 0; b < 2; b++)
            q[b].read_lines(
                    w + (i * STEP + 4 * b) * 16,
                    s + (i * STEP + 4 * b) * F::FOUR);
        #pragma unroll
        for (int b = 0; b < 2; b++) {
            float d[2][4] = {};
            typename F::Aids f;
            q[b].aids(f);
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                unsigned a[F::LENGTH];
                q[b].piece(f, j, a);
                F::times(d, a, x[2 * i + b][j], x[2 * i + b][j]);
            }
            const int at = 2 * i * (H::MANY == 1 ? TEAM : 1) + b;
            fold(q[b], acc, d, *(const float2*)(e + at * ENTRIES));
        }
    }
};

// What the results of row r of a slot are to be multiplied by.
__device__ __forceinline__ float length(
        const Shared* sm, int buffer, int r, float eps) {
    if (!NORM)
        return 1.f;
    float sum = 0.f;
    #pragma unroll
    for (int i = 0; i < U::PARTS; i++)
        sum += sm->squares[buffer][r][i];
    return rsqrtf(fmaf(sum, 1.f / HIDDEN, eps));
}

// Barriers of the ring's places, and of rows that are staged and left.
__device__ __forceinline__ void init_meetings(Shared* sm) {
    for (int i = 0; i < RING; i++) {
        meet_init(sm->full + i, 1);
        meet_init(sm->empty + i, TEAM);
    }
    meet_init(&sm->staged, STAGERS);
    meet_init(&sm->left, WARPS);
    meet_ready();
}

// The shared expert's U, which all rows need, comes to the L2 cache.
__device__ __forceinline__ void ask_shared(Bytes w, Bytes s, int thread) {
    const int threads = gridDim.x * THREADS;
    ahead(w + (size_t)E * U::STORED * U::F::LINE, U::STORED * (U::F::LINE / 16),
            thread, threads);
    ahead(s + (size_t)E * U::STORED / 4 * U::F::SLINE,
            U::STORED / 4 * (U::F::SLINE / 16), thread, threads);
}

// Row r's picks and their weights, for other blocks and kernels; a lane has pick `id`.
__device__ __forceinline__ void give_picks(
        const Params& p, const float* near, const float* logits, int r, int id,
        int lane) {
    if (lane < TOP_K)
        give((float*)p.picked + r * TOP_K + lane, __int_as_float(id));
    if (p.ids && lane < TOP_K)
        p.ids[r * TOP_K + lane] = id;
    const float gate = SHARED && GATE ? __ldcg(logits + E) : 0.f;
    give_weights<E, TOP_K, SCORE, RENORM, SHARED, N>(
            near, id, __ldcg(logits + id), GATE ? &gate : nullptr, p.per_expert,
            p.scaling, lane, p.weights ? p.weights + r * TOP_K : nullptr,
            p.share + r * PICKS);
}

// Rows of all slots but the first, one after the other, by STAGERS warps: each once all have taken
// what they need of the one before.
__device__ __forceinline__ void stage_slots(
        Shared* sm, int warp, int lane, unsigned visits, unsigned ups,
        const int* records, const unsigned char* ready, const float* h) {
    #pragma unroll 1
    for (unsigned n = 1; n < visits; n++) {
        meet_wait(&sm->left, (n + 1) % 2);
        const int* const record = records + n * RECORD;
        if (n < ups)
            take_rows<STAGERS>(sm, warp, n % 2, record, ready);
        else
            stage<STAGERS, 4>(sm, warp, n % 2, record, h);
        __syncwarp();
        if (!lane)
            meet_arrive(&sm->staged);
    }
}

// z += what the warps of a team have made of a stage.
__device__ __forceinline__ void add_shares(
        const float4 (*part)[32], float* z, int lane) {
    #pragma unroll
    for (int j = 0; j < TEAM; j++) {
        const float4 v = part[j][lane];
        z[0] += v.x;
        z[1] += v.y;
        z[2] += v.z;
        z[3] += v.w;
    }
}

constexpr unsigned NOWHERE = ~0u;

// Hidden values of a lane's sums of a stage go to `at`, from `h` on; `odd`: its neighbour has the
// gates.
__device__ __forceinline__ void give_hidden(
        float* h, const float* z, const unsigned* at, bool odd, float limit) {
    float2 v[2] = {{z[0], z[2]}, {z[1], z[3]}};
    if (PAIR) {
        const float2 give = {odd ? z[0] : z[1], odd ? z[2] : z[3]};
        const float a = __shfl_xor_sync(~0u, give.x, 8);
        const float b = __shfl_xor_sync(~0u, give.y, 8);
        v[0].x = act_mul<ACT>(odd ? a : z[0], odd ? z[1] : a, limit);
        v[0].y = act_mul<ACT>(odd ? b : z[2], odd ? z[3] : b, limit);
    } else
        #pragma unroll
        for (int j = 0; j < 2; j++) {
            v[j].x = act_mul<ACT>(v[j].x, 0.f, limit);
            v[j].y = act_mul<ACT>(v[j].y, 0.f, limit);
        }
    #pragma unroll
    for (int j = 0; j < (PAIR ? 1 : 2); j++)
        if (at[j] != NOWHERE)
            give2(h + at[j], v[j]);
}

// A lane's outputs of a stage of D, whose rows begin at `from`.
__device__ __forceinline__ void put_outputs(
        float* const* at, unsigned from, float* z, const float* raw,
        const float* more) {
    #pragma unroll
    for (int j = 0; j < 4; j++)
        z[j] = fmaf(z[j], D::F::row_scale((Bytes)raw, raw, j / 2), more[j / 2]);
    #pragma unroll
    for (int j = 0; j < 2; j++)
        if (at[j])
            *(float2*)(at[j] + from) = make_float2(z[j], z[2 + j]);
}

// What results of a lane's two columns are to be multiplied by.
__device__ __forceinline__ void lengths(
        const Shared* sm, int buffer, int t, int count, float eps,
        float* inverse) {
    #pragma unroll
    for (int j = 0; j < 2; j++)
        inverse[j] = length(sm, buffer, min(2 * t + j, count - 1), eps);
}

// A pick, when another block has given it.
__device__ __forceinline__ int heard(const int* picked) {
    float id;
    do
        id = peek((const float*)picked);
    while (!there(id));
    return __float_as_int(id);
}

// Who is picked for rows: every ALL-th from the warp's first on, or, where others are heard of,
// the block's own. The logits of the next row are on their way meanwhile.
__device__ __forceinline__ void pick(
        Shared* sm, List* list, const Params& p, bool hears, int warp, int lane) {
    const int first = hears ? blockIdx.x + warp * gridDim.x : warp;
    const int step = hears ? ALL * gridDim.x : ALL;
    float next[N];  // logits of the row after this one
    if (first < p.rows)
        near_logits<E, N>(p.logits + (size_t)first * p.ld, lane, next);
    #pragma unroll 1
    for (int r = first; r < p.rows; r += step) {
        const float* const at = p.logits + (size_t)r * p.ld;
        float near[N];
        #pragma unroll
        for (int i = 0; i < N; i++)
            near[i] = next[i];
        if (r + step < p.rows)
            near_logits<E, N>(at + (size_t)step * p.ld, lane, next);
        int* const room = (int*)sm->part + warp * TOP_K;
        const int id = ranked<E, TOP_K, SCORE, CORRECTED, N>(
                near, p.correction, lane, room);
        if (lane < TOP_K && !hears)
            list->note(r * TOP_K + lane, id);
        if (r % gridDim.x != blockIdx.x || !(p.halves & 1))
            continue;
        give_picks(p, near, at, r, id, lane);
    }
}

// Everybody's picks are noted. Of many rows each block ranks its own, and hears of the others. Two
// of a warp are ranked in less time than that takes.
__device__ __forceinline__ void pick_all(
        Shared* sm, List* list, const Params& p, int warp, int lane) {
    const bool hears = p.rows > 2 * ALL && p.halves == 3;
    pick(sm, list, p, hears, warp, lane);
    #pragma unroll 1
    for (int i = threadIdx.x; hears && i < p.rows * TOP_K; i += THREADS)
        list->note(i, heard(p.picked + i));
}

// A warp has read a stage, whose place another may take.
__device__ __forceinline__ void leave(Shared* sm, unsigned place, int lane) {
    __syncwarp();
    if (!lane)
        meet_arrive(sm->empty + place);
}

// A warp's 16 rows of a stage of D times a slot's columns.
__device__ __forceinline__ void make_stage(
        Shared* sm, const Columns<D>& columns, unsigned place, unsigned from,
        int own, int lane, float* const* at) {
    const unsigned char* const w = weights_of<D>(sm, place, own);
    const unsigned char* const s = scales_of<D>(sm, place, own);
    float z[4] = {};
    columns.add_units(w, s, z);
    __align__(8) float raw[2], more[2];
    tail_of<D>(sm, place, own, raw, more);
    leave(sm, place, lane);
    put_outputs(at, from, z, raw, more);
}

// acc += a warp's share of a stage of U times a slot's columns.
__device__ __forceinline__ void make_share(
        const Shared* sm, const Columns<U>& columns, unsigned place, int own,
        float* acc) {
    const unsigned char* const w = weights_of<U>(sm, place, 0) + own * 128;
    const unsigned char* const s = scales_of<U>(sm, place, 0)
            + own * 8 * U::F::FOUR;
    #pragma unroll
    for (int u = 0; u < U::MINE; u++)
        columns.multiply(w, s, u, acc);
}

// Hidden values of the stage that a warp completes: shares of the team's warps are added up.
__device__ __forceinline__ void end_stage(
        const float4 (*part)[32], float* h, const float* inverse,
        const float* raw, const float* more, const unsigned* at, bool odd,
        float limit, int lane) {
    float z[4] = {};
    add_shares(part, z, lane);
    #pragma unroll
    for (int j = 0; j < 4; j++) {
        const float unit = U::F::row_scale((Bytes)raw, raw, j / 2);
        z[j] = fmaf(__fmul_rn(z[j], inverse[j % 2]), unit, more[j / 2]);
    }
    give_hidden(h, z, at, odd, limit);
}

// What a block has of both lines, and of their slots: that of D is number i + later.
struct Work {
    Piece up, down;
    unsigned visits, later;
    unsigned first_down, many;  // stages: where D's begin, and all
    int *experts, *records;
    __device__ __forceinline__ Work(Shared* sm, unsigned slots, int halves)
        : up(slots, U::STAGES), down(slots, D::STAGES) {
        if (!(halves & 1))
            up.drop();
        if (!(halves & 2))
            down.drop();
        visits = up.own + down.own;
        later = up.own - down.slot0;
        first_down = up.end - up.begin;
        many = first_down + down.end - down.begin;
        experts = (int*)(sm + 1);
        records = experts + visits;
    }
    // A slot is the block's once for each half that needs it: its expert and how many entries it
    // has.
    __device__ __forceinline__ void put_slot(
            unsigned i, int expert, int entries) const {
        if (i - up.slot0 < up.own)
            records[(i - up.slot0) * RECORD] = entries;
        if (i - up.slot0 < up.own)
            experts[i - up.slot0] = expert;
        if (i - down.slot0 < down.own)
            records[(i + later) * RECORD] = entries;
        if (i - down.slot0 < down.own)
            experts[i + later] = expert;
    }
    // And each of its entries.
    __device__ __forceinline__ void put_entry(
            unsigned i, int place, int value) const {
        if (i - up.slot0 < up.own)
            records[(i - up.slot0) * RECORD + 1 + place] = value;
        if (i - down.slot0 < down.own)
            records[(i + later) * RECORD + 1 + place] = value;
    }
    // All that are the block's are put.
    __device__ __forceinline__ void fill(List* list, int rows) const {
        const auto slot = [&](unsigned i, int expert, int entries) {
            put_slot(i, expert, entries);
        };
        const auto entry = [&](unsigned i, int place, int value) {
            put_entry(i, place, value);
        };
        list->each_slot(rows, slot);
        list->each_shared(rows, slot, entry);
        list->each_pick(rows, entry);
    }
};

// Stage n of the block's line is asked for, whose place is free.
__device__ __forceinline__ void ask_next(
        Shared* sm, const Params& p, const Work& l, unsigned n) {
    const unsigned place = n % RING;
    if (n < l.first_down) {
        const unsigned k = l.up.begin + n;
        const int expert = l.experts[k / U::STAGES - l.up.slot0];
        const unsigned row = expert * U::STORED + k % U::STAGES * U::ROWS;
        ask_for<U>(sm, place, row, expert == E, p.uw, p.us, p.ugs, p.ubias);
    } else {
        const unsigned k = l.down.begin + n - l.first_down;
        const int expert = l.experts[k / D::STAGES + l.later];
        const unsigned row = expert * D::STORED + k % D::STAGES * D::ROWS;
        ask_for<D>(sm, place, row, expert == E, p.dw, p.ds, p.dgs, p.dbias);
    }
}

// By one thread: all stages of the block are asked for, DEEP ahead of those that are left.
__device__ __forceinline__ void ask_all(
        Shared* sm, const Params& p, const Work& l, int lane) {
    unsigned asked = 0;
    #pragma unroll 1
    while (!lane && asked < l.many) {
        const unsigned before = asked - DEEP;
        if (asked >= DEEP)
            meet_wait(sm->empty + before % RING, before / RING % 2);
        ask_next(sm, p, l, asked);
        asked++;
    }
}

// The first slot's rows, by all warps but the one that asks.
__device__ __forceinline__ void stage_first(
        Shared* sm, const Params& p, const Work& l, int warp) {
    constexpr int FIRST = ALL - 1;
    if (l.up.own)
        take_rows<FIRST>(sm, warp, 0, l.records, p.ready);
    else if (l.visits)
        stage<FIRST, 1>(sm, warp, 0, l.records, p.h);
    sync_warps<FIRST, TEAMS>(0);
}

// A warp has what it needs of a slot's rows, whose place others may have.
__device__ __forceinline__ void leave_rows(Shared* sm, int lane) {
    __syncwarp();
    if (!lane)
        meet_arrive(&sm->left);
}

// Who multiplies: warp `own` of a team, whose share is the own-th, and a lane of it, which has rows
// 2m and 2m + 1 of part g % 2, and columns 2t and 2t + 1.
struct Who {
    int team, own, lane, g, t, m;
};

// Where hidden values of a lane's columns of a slot go: of gates and ups, which neighbours have,
// each lane gets those of one column.
__device__ __forceinline__ void find_hidden(
        const int* record, int count, const Who& w, unsigned* at) {
    #pragma unroll
    for (int j = 0; j < (PAIR ? 1 : 2); j++) {
        const int c = 2 * w.t + (PAIR ? w.m % 2 : j);
        const int part = w.g % 2;
        const int o = PAIR ? 4 * part + w.m / 2 * 2 : 8 * part + 2 * w.m;
        at[j] = c < count ? record[1 + c] * INNER + o : NOWHERE;
    }
}

// A team's stages of a slot from q on, one for each of its warps at most, below `to`: shares of all
// of them meet. Returns how many there were; `raw`, `more`: scales and biases of the own-th.
__device__ __forceinline__ int share_stages(
        Shared* sm, const Columns<U>& columns, const Who& w, unsigned to,
        unsigned& q, float* raw, float* more) {
    int i = 0;
    #pragma unroll 1
    for (; i < TEAM && q < to; i++, q += TEAMS) {
        const unsigned place = q % RING;
        meet_wait(sm->full + place, q / RING % 2);
        float acc[4] = {};
        make_share(sm, columns, place, w.own, acc);
        if (i == w.own)
            tail_of<U>(sm, place, 0, raw, more);
        leave(sm, place, w.lane);
        if (!i)
            sync_warps<TEAM>(w.team);  // what was there before is read
        sm->part[w.team][i][w.own][w.lane] = make_float4(
                acc[0], acc[1], acc[2], acc[3]);
    }
    sync_warps<TEAM>(w.team);
    return i;
}

// Hidden values of the block's n-th slot: a team's stages of U, from q on.
__device__ __forceinline__ void make_hidden(
        Shared* sm, const Params& p, const Work& l, const Who& w, unsigned n,
        unsigned& q) {
    const int* const record = l.records + n * RECORD;
    const int count = record[0];
    Columns<U> columns;
    columns.load(sm, n % 2, count, w.own);
    float inverse[2];
    lengths(sm, n % 2, w.t, count, p.eps, inverse);
    unsigned at[PAIR ? 1 : 2];
    find_hidden(record, count, w, at);
    leave_rows(sm, w.lane);
    const unsigned before = (l.up.slot0 + n) * U::STAGES;
    const unsigned to = min(before + U::STAGES, l.up.end) - l.up.begin;
    #pragma unroll 1
    while (q < to) {
        // the stage that this warp completes
        const unsigned done = q + w.own * TEAMS;
        const unsigned strip = l.up.begin + done - before;
        __align__(8) float raw[2], more[2];
        const int shared = share_stages(sm, columns, w, to, q, raw, more);
        if (w.own < shared)
            end_stage(
                    sm->part[w.team][w.own], p.h + strip * (PAIR ? 8 : 16),
                    inverse, raw, more, at, w.m % 2, p.limit, w.lane);
    }
}

// Outputs of the block's n-th slot: a team's stages of D, from q on.
__device__ __forceinline__ void make_outputs(
        Shared* sm, const Params& p, const Work& l, const Who& w, unsigned n,
        unsigned& q) {
    const int* const record = l.records + n * RECORD;
    const int count = record[0];
    Columns<D> columns;
    columns.load(sm, n % 2, count, 0);
    float* at[2];
    #pragma unroll
    for (int j = 0; j < 2; j++) {
        const int c = 2 * w.t + j;
        const int row = 8 * w.own + D::PART * (w.g % 2) + 2 * w.m;
        at[j] = c < count ? p.y + (size_t)record[1 + c] * HIDDEN + row : nullptr;
    }
    leave_rows(sm, w.lane);
    const unsigned before = (l.down.slot0 + n - l.up.own) * D::STAGES;
    const unsigned to = l.first_down + min(before + D::STAGES, l.down.end)
            - l.down.begin;
    #pragma unroll 1
    for (; q < to; q += TEAMS) {
        const unsigned from = (l.down.begin + q - l.first_down - before)
                * D::ROWS;
        const unsigned place = q % RING;
        meet_wait(sm->full + place, q / RING % 2);
        make_stage(sm, columns, place, from, w.own, w.lane, at);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) experts_wide(
        const unsigned char* __restrict__ uw,
        const unsigned char* __restrict__ dw,
        const unsigned char* __restrict__ us,
        const unsigned char* __restrict__ ds, const float* __restrict__ ugs,
        const float* __restrict__ dgs, const float* __restrict__ ubias,
        const float* __restrict__ dbias, const float* logits,
        const float* __restrict__ correction,
        const float* __restrict__ per_expert, int* ids, float* weights,
        float* share, int* picked, const unsigned char* ready, float* h, float* y,
        float eps, float limit, float scaling, int ld, int rows, int halves) {
    const Params p = {uw, dw, us, ds, ugs, dgs, ubias, dbias, logits, correction,
            per_expert, ids, weights, share, picked, ready, h, y, eps, limit,
            scaling, ld, rows, halves};
    DYNAMIC_SHARED(Shared, sm);
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    // the compiler learns: one for all
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    if (!threadIdx.x)
        init_meetings(sm);
    List* const list = (List*)sm->x;
    list->clear(rows);
    if (SHARED && halves & 1)  // memory idles
        ask_shared(uw, us, blockIdx.x * THREADS + threadIdx.x);
    pdl_wait();
    pdl_trigger();
    __syncthreads();
    pick_all(sm, list, p, warp, lane);
    __syncthreads();
    const Work work(sm, list->count(rows), halves);
    __syncthreads();
    work.fill(list, rows);
    __syncthreads();
    if (warp == ALL - 1) {
        ask_all(sm, p, work, lane);
        return;
    }
    stage_first(sm, p, work, warp);
    if (warp >= WARPS) {
        stage_slots(
                sm, warp - WARPS, lane, work.visits, work.up.own, work.records,
                ready, h);
        return;
    }
    const int t = lane % 4;
    const Who w = {warp / TEAM, warp % TEAM, lane, g, t, g / 2};
    unsigned q = w.team;  // the stage that the team has next
    #pragma unroll 1
    for (unsigned n = 0; n < work.up.own; n++) {
        if (n)
            meet_wait(&sm->staged, (n + 1) % 2);
        make_hidden(sm, p, work, w, n, q);
    }
    #pragma unroll 1
    for (unsigned n = work.up.own; n < work.visits; n++) {
        if (n)
            meet_wait(&sm->staged, (n + 1) % 2);
        make_outputs(sm, p, work, w, n, q);
    }
}
