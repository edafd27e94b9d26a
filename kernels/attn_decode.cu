// Attention of a decode step: norms and rotation of queries and keys, the new keys and values into
// the cache, and softmax(q k) v, a piece of the sequence (lib/pieces.cuh) at a time. A block serves
// up to eight heads of one key head for up to SHARE rows of a sequence, so that what it fetches
// serves them all. Groups of warps read slices of 16 positions in turn, a warp its own part of the
// elements: what they wait for between two slices is only each other's scores. A row that sees one
// piece is finished here. Pieces of the others are added by their blocks together, if all are there
// at once, or else by attn_merge.cu: with the same bits.
//   -D D= (16 divides it, at most 512) HEADS= KV= HALF= (0: no positions) BS= (16 divides it)
//         GATE= VNORM= KEQV= QONLY= (0 or 1)  NORM= 0: none, 1: head, 2: all heads
//   -D FMT= of the pools
//   -D SHARE= rows of a sequence that a block takes: 1, 2 or 4; a row has the same bits for each
//   -D NEW= rows that a sequence has at most: 1, 6 or 8
//   -D LEAN= 1: 112 registers, so that a block finds room beside one of the product before it; 0 by
//            default
//   launch: <<<(kv * ceil(heads/kv/8), runs, rows), D > 128 ? 256 : 128>>> and SHARED bytes
//   -D ONE=1: there is one row, of sequence 0, shift is 0, and words are null. A block takes a
//        piece, and then another as long as there are more, by tickets: from the newest, which are
//        the largest, to the oldest. Blocks with y < `early` may come before the row.
//   -D AHEAD=1: a piece's sums have shared memory of their own, and the next piece's keys and
//        values are on their way meanwhile; with tickets it must be 1
#include "lib/async.cuh"
#include "lib/heads.cuh"
#include "lib/kvcache.cuh"
#include "lib/limbs.cuh"
#include "lib/pdl.cuh"
#include "lib/pieces.cuh"
#include "lib/records.cuh"
#include "lib/reduce.cuh"
#include "lib/slices.cuh"
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
#ifndef BS
#define BS 16
#endif
#ifndef GATE
#define GATE 1
#endif
#ifndef NORM
#define NORM 1
#endif
#ifndef VNORM
#define VNORM 0
#endif
#ifndef KEQV
#define KEQV 0
#endif
#ifndef QONLY
#define QONLY 0
#endif
#ifndef FMT
#define FMT 0
#endif
#ifndef SHARE
#define SHARE 1
#endif
#ifndef NEW
#define NEW (SHARE > 1 ? 8 : 1)
#endif
#ifndef MINB
#define MINB (D > 128 ? 1 : SHARE * D > 128 ? 2 : 3)
#endif
#ifndef LEAN
#define LEAN 0
#endif
#ifndef ONE
#define ONE 0
#endif
#ifndef AHEAD
#define AHEAD 0
#endif
#ifndef SPLIT
#define SPLIT (D > 256 ? 4 : D > 128 ? 2 : 1)
#endif
// warps, and positions that they have at once
constexpr int GROUPS = D > 256 ? 2 : 4;
constexpr int W = SPLIT * GROUPS;
constexpr int THREADS = 32 * W;
constexpr int SPAN = 16 * GROUPS;
// heads of a key head, blocks for them, heads a block, and a warp
constexpr int G = HEADS / KV;
constexpr int HG = (G + 7) / 8;
constexpr int GB = (G + HG - 1) / HG;
constexpr int QI = (GB + W - 1) / W;
constexpr int WIDTH = ((1 + GATE) * HEADS + (QONLY ? 0 : KEQV ? 1 : 2) * KV) * D;
// where queries, keys and values begin in a row
constexpr int Q0 = GATE * HEADS * D;
constexpr int K0 = Q0 + HEADS * D;
constexpr int V0 = KEQV ? K0 : K0 + KV * D;
// of the eight heads' elements, a thread's
constexpr int QUADS = (8 * D / 4 + THREADS - 1) / THREADS;
typedef Head<D> Vec;
typedef Turn<D, HALF> Spin;
typedef Slice<FMT, D, SPLIT> Part;
// Shared memory: a group's two slices, where its sums lie in the end unless they are apart;
// fragments of queries; scores; rows of this step; scratch of rotations; words.
constexpr int SUMS = 8 * (D + 4) * 4;
constexpr int REGION = AHEAD || 2 * Part::SIZE > SUMS ? 2 * Part::SIZE : SUMS;
constexpr int LEFT = AHEAD ? GROUPS * SUMS : 0;
constexpr int QS = SHARE * Part::STEPS * 512;
constexpr int SCORES = SPLIT > 1 ? SHARE * W * 512 : 0;
constexpr int ROWS = (2 * NEW * (KV_BYTES<FMT, D> + (FMT == 2 ? D / 16 : 0)) + 15)
        / 16 * 16;
constexpr int SHARED = GROUPS * REGION + LEFT + QS + SCORES + ROWS
        + (2 * NEW + W * Spin::SCRATCH + 2 * GROUPS * 8 + 8 + 4 * AHEAD) * 4;
#ifdef BYTES
static_assert(
        SHARED == BYTES,
        "the launch gives other shared memory than the kernel wants");
#endif
static_assert(
        D % 16 == 0 && D <= 512 && HEADS % KV == 0 && SHARED <= 227 * 1024
                && HALF * 2 <= D && BS % 16 == 0 && (NEW > 1 || SHARE == 1),
        "see the contract");

// What the kernel is given.
struct Params {
    // gates (GATE) | queries | keys (unless QONLY) | values (unless QONLY or KEQV)
    const float* qkv;  // [rows, width] f32
    // NORM 1: of a head. q_all, k_all have them for NORM 2
    const float *q_norm, *k_norm;  // [gains] f32 or null
    const float* q_all;  // [q_gains] f32 or null: of all heads
    const float* k_all;  // [k_gains] f32 or null
    const float *cos, *sin;  // [positions, half] f32 or null: half = HALF
    // rotary positions of the rows, one or three of each
    const int* at;  // [many, rows] i32 or null
    // which of three positions a pair turns by; null: the first
    const int* axes;  // [half] i32
    // as lib/kvcache.cuh says, written at `slots`
    unsigned char *k_pool, *v_pool;  // [blocks, bs, kv, kb] u8
    float *k_scales, *v_scales;  // [blocks, bs, kv] f32 or null
    unsigned char *k_subs, *v_subs;  // [blocks, bs, kv, ds] u8 or null
    const int* tables;  // [seqs, mb] i32: block tables
    // sequence of each row; -1: padding, which gets zeros
    const int* seq;  // [rows] i32
    // first row of each sequence, and the end of the last
    const int* first;  // [seqs1] i32
    const int* starts;  // [all] i32: position of each sequence's first row
    // where the rows' keys and values go; -1: nowhere
    const long long* slots;  // [rows] i64
    const float* sinks;  // [heads] f32 or null: one more logit for each head
    // values weighted within a piece, of rows that see several; null if there are none
    float* o;  // [rows, pieces, heads, d] f32
    // largest score of the piece (of base 2), and the sum of 2^(score - largest); likewise
    float* ml;  // [rows, pieces, heads, 2] f32
    // EMPTY, and left so: RECORD * d/8 (lib/records.cuh) for each row, piece and head; null:
    // attn_merge.cu is wanted
    float* words;  // [given] f32 or null
    float* y;  // [rows, heads, d] f32
    // of blocks with the same x: all bits set, and left so
    int* tickets;  // [given] i32 or null
    float eps;  // of the norms
    float scale;  // of scores
    int window;  // positions that a row sees; 0: all
    int many;  // as in lib/pieces.cuh
    int mb;  // blocks in a row of tables
    int seqs;  // sequences
    // of a row's pieces, so many add them up, the first ones: all, where all blocks are
    // there at once, or one, where the last block comes after the others; at most 8
    int mergers;
    int cells;  // places of a row for pieces, in o, ml and words
    // a block takes a run of pieces (lib/pieces.cuh) of 64 << shift positions at least;
    // with words or a window a piece
    int shift;
    int early;  // ONE: blocks with y below that may come before the row
};

constexpr int UNKNOWN = -1;
struct Room {
    unsigned char* parts;  // [GROUPS][keys, values] slices
    unsigned char* left;  // [GROUPS] sums, every `STEP` bytes
    static constexpr int STEP = AHEAD ? SUMS : REGION;
    uint4* qf;  // [SHARE][STEPS][32]
    float4* scores;  // [GROUPS][SPLIT][SHARE][32]
    unsigned char *rows, *row_subs;  // [NEW][keys, values]
    // [NEW][2], [W][Spin::SCRATCH], [GROUPS][8] twice, [8]
    float *row_scales, *scratch, *tops, *sums, *sink;
    volatile int* ticket;  // or UNKNOWN
    __device__ __forceinline__ Room(unsigned char* p) {
        parts = p;
        left = AHEAD ? p + GROUPS * REGION : p;
        p += GROUPS * REGION + LEFT;
        qf = (uint4*)p;
        scores = (float4*)(p + QS);
        rows = p + QS + SCORES;
        row_subs = rows + 2 * NEW * KV_BYTES<FMT, D>;
        row_scales = (float*)(rows + ROWS);
        scratch = row_scales + 2 * NEW;
        tops = scratch + W * Spin::SCRATCH;
        sums = tops + GROUPS * 8;
        sink = sums + GROUPS * 8;
        ticket = (volatile int*)(sink + 8);
    }
};

// The blocks that hold the positions of a piece, one to a lane, so that no later address waits for
// the table.
struct Table {
    static constexpr bool FEW = 4 * PIECE / BS <= 32;
    const int* all;
    int first, mine;
    __device__ __forceinline__ void load(
            const int* table, int from, int mb, int lane) {
        all = table;
        first = from / BS;
        mine = FEW && first + lane < mb ? table[first + lane] : 0;
    }
    // The same where the blocks up to `end` are not there yet
    __device__ __forceinline__ void go_on(int from, int end, int mb, int lane) {
        if (FEW && (end - 1) / BS - first >= 32)
            load(all, from, mb, lane);
    }
    __device__ __forceinline__ size_t row(int j, int kv) const {
        // of position j, in the pool
        const int block = FEW ? __shfl_sync(~0u, mine, (j / BS - first) & 31)
                              : all[j / BS];
        return ((size_t)block * BS + j % BS) * KV + kv;
    }
};

// What a block has to do: rows t .. t+n-1 of a sequence, positions p0 .. end-1, look at pieces
// `piece` .. `last`, now at positions from .. hi-1. Below `to` these are read from the pool.
struct Work {
    int t, r0, n, nf, back, p0, start, end, low, newest, piece, last, from, hi,
            to, kv, hg, h0, gb, window, early;
    Pieces pieces;
    Runs runs;
    Table table;
    __device__ __forceinline__ int lowest(int p) const {
        return window ? max(0, p - window + 1) : 0;
    }
    __device__ __forceinline__ bool alone(int p) const {
        return pieces.of(lowest(p)) == pieces.of(p);
    }
    // are there rows of this step among them?
    __device__ __forceinline__ bool fresh() const {
        return !QONLY && min(pieces.start(last + 1), end) > start;
    }
    __device__ __forceinline__ Work(
            int window_, int many, int row, int shift, int early_)
        : window(window_), early(early_), pieces{many}, runs{many, shift} {
        t = ONE ? 0 : row;
        kv = blockIdx.x / HG;
        hg = blockIdx.x % HG;
        h0 = kv * G + hg * GB;
        gb = min(GB, G - hg * GB);
    }
    // Sequence s of the row; without a window most pieces do not depend on where it stands
    __device__ __forceinline__ void ask(
            const int* tables, const int* first, const int* starts, int s, int mb,
            int lane) {
        start = starts[s];
        r0 = ONE ? 0 : first[s];
        nf = ONE ? 1 : first[s + 1];
        table.all = tables + (size_t)s * mb;
        if (ONE)
            return;  // its pieces depend on where the row stands
        // the largest come first
        const int2 run = runs.pieces(gridDim.y - 1 - blockIdx.y);
        piece = run.x;
        last = run.y;
        table.load(table.all, pieces.start(piece), mb, lane);
    }
    // Is there anything?
    __device__ __forceinline__ bool find(
            const int* tables, int s, int mb, int lane) {
        back = t - r0;
        nf -= r0;
        n = min(SHARE, nf - back);
        p0 = start + back;
        end = p0 + n;
        low = lowest(p0);
        newest = pieces.of(end - 1);
        // does the piece depend on where the row stands?
        const bool now = window || ONE;
        if (now)
            piece = last = newest - (int)blockIdx.y;
        last = min(last, newest);
        to = QONLY ? end : start;
        // fewer pieces than blocks
        if (ONE && !window && (int)blockIdx.y > newest)
            return false;
        // an earlier row's block has this one, or nobody looks there
        if (back % SHARE || piece < pieces.of(low) || piece > last)
            return false;
        begin();
        if (now)
            table.load(table.all, from, mb, lane);
        return true;
    }
    // Does it come when a multiprocessor's first block is there?
    __device__ __forceinline__ bool late() const {
        return !window && (int)blockIdx.y >= early;
    }
    // Pieces that no block has begun with: so many, and which one a ticket is for
    __device__ __forceinline__ int more() const {
        return ONE && !window ? max(newest + 1 - (int)gridDim.y, 0) : 0;
    }
    __device__ __forceinline__ int drawn(int ticket) const {
        return newest - (int)gridDim.y - ticket;
    }
    __device__ __forceinline__ void begin() {
        from = max(pieces.start(piece), low / PIECE * PIECE);
        hi = min(pieces.start(piece + 1), end);
    }
};

// 1 / root mean square of `count` numbers, by a warp
__device__ __forceinline__ float rms_all(
        const float* x, int count, float eps, int lane) {
    float a = 0.f;
    for (int i = lane; i < count; i += 32)
        a = fmaf(x[i], x[i], a);
    return rsqrtf(fmaf(warp_sum(a), 1.f / count, eps));
}

// Weights of a slice's positions, in base 2, and what they make of `top` and `sum`: of head lane/4
// at positions 2*(lane%4) + {0, 1, 8, 9}. b: fragments of the weights. Returns what is to become of
// older sums.
__device__ __forceinline__ float weights(
        float4 c, float& top, float& sum, unsigned (&b)[4], const Part& ks,
        int lo, int low, int p, int lane) {
    float x[4], most = NONE;
    bool on[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const int n = i / 2;
        const int e = i % 2;
        const int at = lane % 4 * 2 + e + n * 8;
        const int j = lo + at;
        on[i] = j <= p && j >= low;
        x[i] = (&c.x)[i];
        if (KV_CODED<FMT>)
            x[i] = __fmul_rn(x[i], ks.scale(at, false));
        most = fmaxf(most, on[i] ? x[i] : NONE);
    }
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const float now = fmaxf(top, most);
    const float base = now == NONE ? 0.f : now;
    const float fade = exp2f(__fsub_rn(top, base));
    #pragma unroll
    for (int i = 0; i < 4; i++)
        x[i] = on[i] ? exp2f(__fsub_rn(x[i], base)) : 0.f;
    sum = fmaf(
            sum, fade, __fadd_rn(__fadd_rn(x[0], x[1]), __fadd_rn(x[2], x[3])));
    top = now;
    #pragma unroll
    for (int i = 0; i < 4; i++)
        if (KV_CODED<FMT>)
            x[i] = on[i]
                    ? __fmul_rn(
                              x[i],
                              ks.scale(lane % 4 * 2 + i % 2 + i / 2 * 8, true))
                    : 0.f;
    const Pair u = Part::weights_of(x[0], x[1]);
    const Pair v = Part::weights_of(x[2], x[3]);
    b[0] = u.hi;
    b[1] = v.hi;
    b[2] = u.lo;
    b[3] = v.lo;
    return fade;
}

// Of four numbers at a time: v + u, v * f, and v times the gates.
__device__ __forceinline__ float4 sum4(float4 v, float4 u) {
    v.x = __fadd_rn(v.x, u.x);
    v.y = __fadd_rn(v.y, u.y);
    v.z = __fadd_rn(v.z, u.z);
    v.w = __fadd_rn(v.w, u.w);
    return v;
}
__device__ __forceinline__ float4 times4(float4 v, float f) {
    v.x = __fmul_rn(v.x, f);
    v.y = __fmul_rn(v.y, f);
    v.z = __fmul_rn(v.z, f);
    v.w = __fmul_rn(v.w, f);
    return v;
}
__device__ __forceinline__ float4 gated4(float4 v, float4 g) {
    return make_float4(
            gated(v.x, g.x), gated(v.y, g.y), gated(v.z, g.z), gated(v.w, g.w));
}

// Pieces of a row are added up by their blocks together: this one is `rank` of `ranks`.
__device__ __forceinline__ void merge(
        const Params& p, const Work& w, const float* sink, int row, size_t own,
        int count, int rank, int ranks, int warp, int lane) {
    float* const at0 = p.words
            + (((size_t)row * p.cells) * HEADS + w.h0) * (D / 8) * RECORD;
    #pragma unroll 1
    for (int i0 = (rank * W + warp) * 32; i0 < w.gb * (D / 4);
            i0 += ranks * THREADS) {
        const int i = min(i0 + lane, w.gb * (D / 4) - 1);
        const float4 g = GATE
                ? *(const float4*)(p.qkv + (size_t)row * WIDTH + w.h0 * D + i * 4)
                : make_float4(0.f, 0.f, 0.f, 0.f);
        float4 v = merged(
                at0 + i / 2 * RECORD + i % 2 * 4, i % 2,
                (size_t)HEADS * (D / 8) * RECORD, count, sink[i / (D / 4)]);
        if (GATE)
            v = gated4(v, g);
        if (i0 + lane == i)
            *(float4*)(p.y + own + i * 4) = v;
    }
}

// The sums of the scores that a group's warps have, each of its part of the elements.
__device__ __forceinline__ void exchange(
        float4 (&x)[SHARE], float4* scores, int group, int part, int lane) {
    float4* const all = scores + group * SPLIT * SHARE * 32 + lane;
    #pragma unroll
    for (int r = 0; r < SHARE; r++)
        all[(part * SHARE + r) * 32] = x[r];
    sync_warps<SPLIT>(group);
    #pragma unroll
    for (int r = 0; r < SHARE; r++) {
        x[r] = all[r * 32];
        #pragma unroll
        for (int k = 1; k < SPLIT; k++) {
            x[r] = sum4(x[r], all[(k * SHARE + r) * 32]);
        }
    }
    sync_warps<SPLIT>(group);
}

// Scores of a slice, of what limbs and steps of queries made of it.
__device__ __forceinline__ void add_limbs(
        float4 (&x)[SHARE], const float (&c)[SHARE][2][2][4]) {
    #pragma unroll
    for (int r = 0; r < SHARE; r++)
        #pragma unroll
        for (int i = 0; i < 4; i++)
            (&x[r].x)[i] = __fadd_rn(
                    __fadd_rn(c[r][0][i / 2][i % 2], c[r][1][i / 2][i % 2]),
                    __fadd_rn(
                            c[r][0][i / 2][i % 2 + 2],
                            c[r][1][i / 2][i % 2 + 2]));
}

// Who a thread is.
struct Thread {
    unsigned id;
    int lane, warp;
    __device__ __forceinline__ Thread(unsigned id_) : id(id_) {
        lane = id % 32;
        warp = __shfl_sync(~0u, id / 32, 0);
    }
};

// The queries of the block's rows: a warp has those of every W-th head, and where they turn to.
struct Queries {
    Vec q[SHARE][QI];
    Spin turn[SHARE];
    Vec gain;
    __device__ __forceinline__ void ask(const Params& p, const Thread& me) {
        #pragma unroll
        for (int r = 0; r < SHARE; r++)
            turn[r].ask(p.axes, me.lane);
    }
    __device__ __forceinline__ void find(
            const Params& p, const Work& w, int rows, const Thread& me) {
        #pragma unroll
        for (int r = 0; r < SHARE; r++)
            turn[r].find(p.at, min(w.t + r, rows - 1), rows, me.lane);
    }
    __device__ __forceinline__ void load_turns(
            const Params& p, const Thread& me) {
        #pragma unroll
        for (int r = 0; r < SHARE; r++)
            turn[r].load(p.cos, p.sin, me.lane);
    }
    // As the product before left them.
    __device__ __forceinline__ void load(
            const Params& p, const Work& w, const Thread& me) {
        #pragma unroll
        for (int r = 0; r < SHARE; r++)
            #pragma unroll
            for (int i = 0; i < QI; i++)
                q[r][i].load(
                        p.qkv
                                + (size_t)(w.t + (SHARE > 1 && r < w.n ? r : 0))
                                        * WIDTH
                                + Q0
                                + (w.h0 + min(me.warp + i * W, w.gb - 1)) * D,
                        me.lane);
    }
    // They are normed and turned, and become fragments.
    __device__ __forceinline__ void put(
            const Params& p, const Work& w, const Room& m, float factor,
            const Thread& me) {
        #pragma unroll
        for (int r = 0; r < SHARE; r++) {
            const float all = NORM == 2
                    ? rms_all(p.qkv + (size_t)(w.t + (r < w.n ? r : 0)) * WIDTH
                                      + Q0,
                              HEADS * D, p.eps, me.lane)
                    : 0.f;
            #pragma unroll
            for (int i = 0; i < QI; i++) {
                const int g = me.warp + i * W;
                Vec& x = q[r][i];
                if (NORM == 1)
                    x.times(x.rms(p.eps), gain);
                if (NORM == 2) {
                    Vec its;
                    its.load(p.q_all + (w.h0 + min(g, w.gb - 1)) * D, me.lane);
                    x.times(all, its);
                }
                turn[r](x, m.scratch + me.warp * Spin::SCRATCH, me.lane);
                if (g < w.gb && r < w.n)
                    Part::put_query(
                            m.qf + r * Part::STEPS * 32, x.v, g, factor, me.lane);
            }
        }
    }
};

// Keys and values of this step: keys are for even warps, values for odd ones. Row `first` of the
// sequence's, which is row `row` of all, has been asked for; its key or value goes to `slot`.
struct Fresh {
    bool any, is_v;
    int first, row, column;
    Vec x, gain;
    Spin turn;
    long long slot;
    __device__ __forceinline__ Fresh(const Work& w, const Thread& me) {
        any = w.fresh();
        is_v = me.warp & 1;
        first = NEW == 1 ? 0 : me.warp / 2;
        row = w.r0 + min(first, w.nf - 1);
        column = (is_v ? V0 : K0) + w.kv * D;
    }
    __device__ __forceinline__ void load_turn(
            const Params& p, int row, int rows, const Thread& me) {
        turn.ask(p.axes, me.lane);
        turn.find(p.at, row, rows, me.lane);
        turn.load(p.cos, p.sin, me.lane);
    }
    __device__ __forceinline__ void load(
            const Params& p, int row, const Thread& me) {
        x.load(p.qkv + (size_t)row * WIDTH + column, me.lane);
    }
    // A key is normed and turned; a value at most normed.
    __device__ __forceinline__ void turned(
            const Params& p, const Work& w, const Room& m, const Spin& turn,
            int row, const Thread& me) {
        const Vec raw = x;
        if (NORM == 1)
            x.times(x.rms(p.eps), gain);
        if constexpr (NORM == 2) {
            Vec its;
            its.load(p.k_all + w.kv * D, me.lane);
            const float* const all = p.qkv + (size_t)row * WIDTH + K0;
            x.times(rms_all(all, KV * D, p.eps, me.lane), its);
        }
        turn(x, m.scratch + me.warp * Spin::SCRATCH, me.lane);
        if (is_v) {
            x = raw;
            if (VNORM)
                x.times(x.rms(p.eps));
        }
    }
    // That of row i stays with the block, and goes into the cache if it is of the block's rows.
    __device__ __forceinline__ void keep(
            const Params& p, const Work& w, const Room& m, int i, long long slot,
            const Thread& me) const {
        KvRow<FMT, D> e;
        e.encode((const float4*)x.v, me.lane);
        e.store(m.rows, m.row_scales, m.row_subs, 2 * i + is_v, me.lane);
        if (i < w.back || w.hg || slot < 0)
            return;
        if (is_v)
            e.store(p.v_pool, p.v_scales, p.v_subs, slot * KV + w.kv, me.lane);
        else
            e.store(p.k_pool, p.k_scales, p.k_subs, slot * KV + w.kv, me.lane);
    }
    // All of this warp's; where a sequence has one row, it turns as its query does.
    __device__ __forceinline__ void put(
            const Params& p, const Work& w, const Room& m, const Spin& as_query,
            int rows, const Thread& me) {
        if constexpr (NEW == 1 && !QONLY) {
            if (any && me.warp < 2) {
                turned(p, w, m, as_query, row, me);
                keep(p, w, m, 0, slot, me);
            }
        } else if (any) {
            #pragma unroll 1
            for (int i = first; i < w.nf; i += W / 2) {
                const int j = w.start + i;
                const int its = w.r0 + i;
                if (j < w.from || j >= w.end || w.pieces.of(j) > w.last)
                    continue;
                if (i != first) {
                    load(p, its, me);
                    load_turn(p, its, rows, me);
                }
                turned(p, w, m, turn, its, me);
                keep(p, w, m, i, i == first ? slot : p.slots[its], me);
            }
        }
    }
};

// What a warp reads of a piece: its part of the elements of its group's slices of keys and values,
// which are those at lo, lo + SPAN, ...
struct Reader {
    int group, part, lo;
    Part ks, vs;
    __device__ __forceinline__ Reader(
            const Room& m, const Work& w, const Thread& me)
        : group(me.warp / SPLIT),
          part(me.warp % SPLIT),
          lo(w.from + 16 * group),
          ks(m.parts + group * REGION, part, me.lane),
          vs(m.parts + group * REGION + Part::SIZE, part, me.lane) {}
    __device__ __forceinline__ void keys(
            const Params& p, const Work& w, int lo) const {
        if (lo < w.hi)
            ks.template fetch<KV>(
                    p.k_pool, p.k_scales, p.v_scales, p.k_subs,
                    w.table.row(lo, w.kv), w.low - lo, w.to - lo);
        cp_async_commit();
    }
    __device__ __forceinline__ void values(
            const Params& p, const Work& w, int lo) const {
        if (lo < w.hi)
            vs.template fetch<KV>(
                    p.v_pool, nullptr, nullptr, p.v_subs, w.table.row(lo, w.kv),
                    w.low - lo, w.to - lo);
        cp_async_commit();
    }
    // The piece that the block has gone on to.
    __device__ __forceinline__ void begin(
            const Params& p, Work& w, const Thread& me) {
        w.begin();
        if (ONE)
            w.table.load(w.table.all, w.from, p.mb, me.lane);
        else
            w.table.go_on(w.from, w.hi, p.mb, me.lane);
        lo = w.from + 16 * group;
        keys(p, w, lo);
        values(p, w, lo);
    }
    // Rows of this step among the slice's keys (0) or values (1).
    __device__ __forceinline__ void patch(
            const Room& m, const Work& w, bool has_fresh, const Part& to,
            int which) const {
        if (!has_fresh || lo + 16 <= w.start)
            return;
        for (int j = max(lo, w.start); j < min(lo + 16, w.end); j++) {
            to.copy(m.rows, m.row_subs, 2 * (j - w.start) + which, j - lo);
            if (!which)
                to.copy_scales(m.row_scales + 2 * (j - w.start), j - lo);
        }
        __syncwarp();
    }
};

// What a warp has found in a piece: of each row its part of the weighted values, the largest score
// and the sum of weights.
struct Sums {
    float acc[SHARE][Part::TILES][4] = {};
    float sum[SHARE], top[SHARE];
    __device__ __forceinline__ Sums() {
        #pragma unroll
        for (int r = 0; r < SHARE; r++) {
            top[r] = NONE;
            sum[r] = 0.f;
        }
    }
    // Values of row r count less where a larger score has come.
    __device__ __forceinline__ void fade(int r, float by, int lane) {
        const float f[2] = {__shfl_sync(~0u, by, lane % 4 * 8),
                __shfl_sync(~0u, by, lane % 4 * 8 + 4)};
        #pragma unroll
        for (int i = 0; i < Part::TILES; i++)
            #pragma unroll
            for (int e = 0; e < 4; e++)
                acc[r][i][e] = __fmul_rn(acc[r][i][e], f[e % 2]);
    }
};

// Scores of the slice at lo, for all rows: the group's warps add what they found.
__device__ __forceinline__ void score(
        const Room& m, const Reader& of, float4 (&x)[SHARE], int lane) {
    float c[SHARE][2][2][4] = {};
    of.ks.template scores<SHARE>(c, m.qf);
    add_limbs(x, c);
    if constexpr (SPLIT > 1)
        exchange(x, m.scores, of.group, of.part, lane);
}

// Weights of a slice for all rows, as fragments; older sums of a row fade where `fades`.
__device__ __forceinline__ void weigh(
        const Work& w, const float4 (&x)[SHARE], Sums& sums,
        unsigned (&b)[SHARE][4], const Reader& of, float (&fade)[SHARE],
        bool (&fades)[SHARE], int lane) {
    #pragma unroll
    for (int r = 0; r < SHARE; r++) {
        const float was = sums.top[r];
        const int low = w.lowest(w.p0 + r);
        fade[r] = weights(
                x[r], sums.top[r], sums.sum[r], b[r], of.ks, of.lo, low, w.p0 + r,
                lane);
        // else times one, or nothing there yet
        fades[r] = __any_sync(~0u, fade[r] != 1.f && was != NONE);
    }
}

// One slice: its keys are scored and its values weighed, and the next one is asked for.
__device__ __forceinline__ void read_slice(
        const Params& p, const Work& w, const Room& m, const Reader& of,
        Sums& sums, bool has_fresh, const Thread& me) {
    cp_async_wait<1>();
    __syncwarp();
    of.patch(m, w, has_fresh, of.ks, 0);
    float4 x[SHARE];
    score(m, of, x, me.lane);
    float fade[SHARE];
    bool fades[SHARE];
    unsigned b[SHARE][4];
    weigh(w, x, sums, b, of, fade, fades, me.lane);
    __syncwarp();
    of.keys(p, w, of.lo + SPAN);
    cp_async_wait<1>();
    __syncwarp();
    of.patch(m, w, has_fresh, of.vs, 1);
    #pragma unroll
    for (int r = 0; r < SHARE; r++)
        if (fades[r])
            sums.fade(r, fade[r], me.lane);
    of.vs.template values<SHARE>(sums.acc, b);
    __syncwarp();
    of.values(p, w, of.lo + SPAN);
}

// What a group has found of row r is left for all: its largest scores, and sums of weights and of
// values.
__device__ __forceinline__ void leave(
        const Room& m, const Reader& of, const Sums& sums, int r, int own_lane) {
    float* const mine = (float*)(m.left + of.group * m.STEP);
    float l = __fadd_rn(sums.sum[r], __shfl_xor_sync(~0u, sums.sum[r], 1));
    l = __fadd_rn(l, __shfl_xor_sync(~0u, l, 2));
    if (r)
        __syncthreads();  // all have seen the row before
    if (!of.part && own_lane % 4 == 0) {
        m.tops[of.group * 8 + own_lane / 4] = sums.top[r];
        m.sums[of.group * 8 + own_lane / 4] = l;
    }
    #pragma unroll
    for (int i = 0; i < Part::TILES; i++)
        #pragma unroll
        for (int e = 0; e < 4; e++) {
            const int d = of.vs.element(i, own_lane / 4, e / 2);
            if ((D % 32 == 0 && Part::EVEN) || d < D)
                mine[(own_lane % 4 * 2 + e % 2) * (D + 4) + d] =
                        sums.acc[r][i][e];
        }
    __syncthreads();
}

// Of head own_lane % 8: the largest score, factors of the groups, the sum of weights, and, where
// the row sees a `whole` piece and no other, what makes sums an answer.
struct Total {
    float most = NONE, total = 0.f, part_of[GROUPS];
    float rate = 0.f;
    __device__ __forceinline__ Total(const Room& m, int own_lane, bool whole) {
        #pragma unroll
        for (int k = 0; k < GROUPS; k++)
            most = fmaxf(most, m.tops[k * 8 + own_lane % 8]);
        const float base = most == NONE ? 0.f : most;  // NONE: nothing but NaN
        const float sink = m.sink[own_lane % 8];
        #pragma unroll
        for (int k = 0; k < GROUPS; k++) {
            part_of[k] = exp2f(__fsub_rn(m.tops[k * 8 + own_lane % 8], base));
            total = fmaf(part_of[k], m.sums[k * 8 + own_lane % 8], total);
        }
        if (whole) {
            const float high = fmaxf(most, sink);
            const float fall = exp2f(__fsub_rn(base, high));
            rate = fall / fmaf(total, fall, exp2f(__fsub_rn(sink, high)));
        }
    }
};

// v += what the groups have of elements d .. d+3 of head g, times their factors.
__device__ __forceinline__ void add_groups(
        float4& v, const Room& m, const float (&part_of)[GROUPS], int g, int d) {
    #pragma unroll
    for (int k = 0; k < GROUPS; k++) {
        const float e = __shfl_sync(~0u, part_of[k], g);
        const float4 u = *(const float4*)((const float*)(m.left + k * m.STEP)
                + g * (D + 4) + d);
        v.x = fmaf(e, u.x, v.x);
        v.y = fmaf(e, u.y, v.y);
        v.z = fmaf(e, u.z, v.z);
        v.w = fmaf(e, u.w, v.w);
    }
}

// The block's ticket, when its first thread has it.
__device__ __forceinline__ int drawn(const Room& m) {
    int ticket;
    while ((ticket = *m.ticket) == UNKNOWN) {
#if !defined(__CUDA_ARCH__)
        __nanosleep(0);  // let others write it
#endif
    }
    return ticket;
}

// The block goes on to its next piece. True: there is none.
__device__ __forceinline__ bool go_on(
        const Params& p, Work& w, const Room& m, int more, const Thread& me) {
    w.piece++;
    bool ends = w.piece > w.last;
    if (more) {
        const int ticket = drawn(m);
        ends = ticket >= more;
        w.piece = w.last = w.drawn(ticket);
        // every block draws one that is too large; the last of all leaves what it found
        if (!me.id && ticket == more + (int)gridDim.y - 1)
            p.tickets[blockIdx.x] = -1;
    }
    return ends;
}

// Are there registers for gates that come early?
constexpr bool SOON = SHARE == 1 && !ONE;

// Four gates of the block's row r, of its elements 4i .. 4i+3.
__device__ __forceinline__ float4 gate_of(
        const Params& p, const Work& w, int r, int i) {
    const int own = min(i, w.gb * (D / 4) - 1) * 4;
    return *(const float4*)(p.qkv + (size_t)(w.t + r) * WIDTH + w.h0 * D + own);
}

// Those of the only row, if they come early.
__device__ __forceinline__ void load_gates(
        const Params& p, const Work& w, float4 (&gate)[QUADS], const Thread& me) {
    if (GATE && SOON && w.alone(w.p0))
        #pragma unroll
        for (int k = 0; k < QUADS; k++)
            gate[k] = gate_of(p, w, 0, me.id + k * THREADS);
}

// Where results of a row go: elements of y from `own` on, or those of a piece from `cell` on.
struct Target {
    int a, z;  // pieces that the row sees
    size_t cell, own;
};

// Results of a row, when the groups' are there.
__device__ __forceinline__ void put_results(
        const Params& p, const Work& w, const Room& m, const Target& to,
        const Total& all, int r, int thread, const float4 (&gate)[QUADS],
        const Thread& me) {
    #pragma unroll
    for (int k = 0; k < QUADS; k++) {
        const int i = SOON ? (int)(me.id + k * THREADS) : thread + k * THREADS;
        const int g = min(i / (D / 4), w.gb - 1);
        const int d = i % (D / 4) * 4;
        float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
        add_groups(v, m, all.part_of, g, d);
        const float top = __shfl_sync(~0u, all.most, g);
        const float l = __shfl_sync(~0u, all.total, g);
        const float f = __shfl_sync(~0u, all.rate, g);
        if (i >= w.gb * (D / 4))
            continue;
        if (to.a == to.z) {
            v = times4(v, f);
            *(float4*)(p.y + to.own + g * D + d) = GATE
                    ? gated4(v, SOON ? gate[k] : gate_of(p, w, r, i))
                    : v;
        } else if (!ONE && p.words) {
            float* const record = p.words
                    + ((to.cell + g) * (D / 8) + d / 8) * RECORD;
            give4(record + d % 8, v);
            if (d % 8 == 0)
                give2(record + 8, make_float2(top, l));
        } else {
            if (!d)
                *(float2*)(p.ml + (to.cell + g) * 2) = make_float2(top, l);
            *(float4*)(p.o + (to.cell + g) * D + d) = v;
        }
    }
}

// Row r of the block gets what the groups have found in `piece`.
__device__ __forceinline__ void put_row(
        const Params& p, const Work& w, const Room& m, const Reader& of,
        const Sums& sums, int r, int piece, int more, const float4 (&gate)[QUADS],
        const Thread& me) {
    int thread = me.id;
#if defined(__CUDA_ARCH__)
    // Places of results would else take registers that are wanted while slices are added up
    if (!SOON)
        asm volatile("" : "+r"(thread));
#endif
    const int own_lane = SOON ? me.lane : thread % 32;
    Target to;
    to.a = w.pieces.of(w.lowest(w.p0 + r));
    to.z = w.pieces.of(w.p0 + r);
    if (piece < to.a || piece > to.z)
        return;
    leave(m, of, sums, r, own_lane);
    if (more && !me.id)
        *m.ticket = UNKNOWN;  // all have seen it
    const Total all(m, own_lane, SOON || to.a == to.z);
    to.cell = ((size_t)(w.t + r) * p.cells + piece - to.a) * HEADS + w.h0;
    to.own = ((size_t)(w.t + r) * HEADS + w.h0) * D;
    put_results(p, w, m, to, all, r, thread, gate, me);
    // Pieces of a row are added up by their blocks together
    const int count = to.z - to.a + 1;
    const int rank = piece - to.a;
    const int ranks = min(p.mergers, count);
    if (ONE || count == 1 || !p.words || rank >= ranks)
        return;
    merge(p, w, m.sink, w.t + r, to.own, count, rank, ranks, me.warp, me.lane);
}

// Zeros for a row that is padding.
__device__ __forceinline__ void put_zeros(
        const Params& p, const Work& w, const Thread& me) {
    if (!blockIdx.y)
        for (int i = me.id; i < w.gb * D; i += THREADS)
            p.y[((size_t)w.t * HEADS + w.h0) * D + i] = 0.f;
}

// The heads' one more logit, in base 2.
__device__ __forceinline__ void load_sinks(
        const Params& p, const Work& w, const Room& m, const Thread& me) {
    if (me.id < 8)
        m.sink[me.id] = p.sinks
                ? __fmul_rn(p.sinks[w.h0 + min((int)me.id, w.gb - 1)], LOG2E)
                : NONE;
}

// What is needed but activations, and is there before them.
__device__ __forceinline__ void load_rest(
        const Params& p, const Work& w, const Room& m, Queries& q, Fresh& fresh,
        int rows, const Thread& me) {
    if (NORM == 1) {
        q.gain.load(p.q_norm, me.lane);
        if (!QONLY)
            fresh.gain.load(p.k_norm, me.lane);
    }
    q.load_turns(p, me);
    if (NEW > 1 && fresh.any)
        fresh.load_turn(p, fresh.row, rows, me);
    load_sinks(p, w, m, me);
    fresh.slot = fresh.any ? p.slots[fresh.row] : -1;
}

// All pieces of the block, one after the other; of each what the groups have, row after row. With a
// piece's last slice a ticket is drawn, where there are `more` pieces.
__device__ __forceinline__ void read_all(
        const Params& p, Work& w, const Room& m, Reader& of, bool has_fresh,
        int more, const float4 (&gate)[QUADS], const Thread& me) {
    for (;;) {
        Sums sums;
        // As a function of its own this loop takes registers that cost a long row 4 us a layer
        #pragma unroll 1
        for (; of.lo < w.hi; of.lo += SPAN) {
            const bool asks = more && !me.id && of.lo + SPAN >= w.hi;
            int ticket;
            if (asks)
                ticket = atomicAdd(p.tickets + blockIdx.x, 1) + 1;
            read_slice(p, w, m, of, sums, has_fresh, me);
            if (asks)
                *m.ticket = ticket;
        }
        const int piece = w.piece;
        const bool ends = go_on(p, w, m, more, me);
        if (AHEAD) {
            if (!ends)
                of.begin(p, w, me);
        } else if (SPLIT > 1)
            sync_warps<SPLIT>(of.group);
        #pragma unroll
        for (int r = 0; r < SHARE; r++) {
            if (r >= w.n)
                break;
            put_row(p, w, m, of, sums, r, piece, more, gate, me);
        }
        if (ends)
            return;
        __syncthreads();
        if (!AHEAD)
            of.begin(p, w, me);
    }
}

#if LEAN
#define BOUNDS __maxnreg__(112)
#else
#define BOUNDS __launch_bounds__(THREADS, MINB)
#endif
extern "C" __global__ void BOUNDS attn_decode(
        const float* qkv, const float* __restrict__ q_norm,
        const float* __restrict__ k_norm, const float* __restrict__ q_all,
        const float* __restrict__ k_all, const float* __restrict__ cos,
        const float* __restrict__ sin, const int* __restrict__ at,
        const int* __restrict__ axes, unsigned char* k_pool, float* k_scales,
        unsigned char* k_subs, unsigned char* v_pool, float* v_scales,
        unsigned char* v_subs, const int* __restrict__ tables,
        const int* __restrict__ seq, const int* __restrict__ first,
        const int* __restrict__ starts, const long long* __restrict__ slots,
        const float* __restrict__ sinks, float* o, float* ml, float* words,
        float* y, float eps, float scale, int window, int many, int mb, int seqs,
        int mergers, int cells, int shift, int* tickets, int early) {
    const Params p = {qkv, q_norm, k_norm, q_all, k_all, cos, sin, at, axes,
            k_pool, v_pool, k_scales, v_scales, k_subs, v_subs, tables, seq,
            first, starts, slots, sinks, o, ml, words, y, tickets, eps, scale,
            window, many, mb, seqs, mergers, cells, shift, early};
    DYNAMIC_SHARED(unsigned char, shared);
    const Room m(shared);
    const Thread me(threadIdx.x);
    const int t = ONE ? 0 : blockIdx.z;
    const int rows = ONE ? 1 : gridDim.z;
    const int s = p.seq[t];
    const int guess = ONE ? 0 : min(t, p.seqs - 1);
    Queries q;
    q.ask(p, me);
    Work w(p.window, p.many, t, p.shift, p.early);
    // row t is often of sequence t, and what is asked for at once need not be waited for in turn
    w.ask(p.tables, p.first, p.starts, guess, p.mb, me.lane);
    q.find(p, w, rows, me);
    pdl_trigger();
    // Then the row is there, or nearly so. Small heads have more blocks than that to hide a wait,
    // and ask for keys first.
    const bool late = D > 128 && ONE && w.late();
    if (late) {
        pdl_wait();
        q.load(p, w, me);
    }
    if (s < 0) {  // padding
        pdl_wait();
        return put_zeros(p, w, me);
    }
    if (!ONE && s != guess)
        w.ask(p.tables, p.first, p.starts, s, p.mb, me.lane);
    if (!w.find(p.tables, s, p.mb, me.lane))
        return;
    if (w.nf > NEW)
        __trap();
    if (QONLY)
        pdl_wait();
    Reader of(m, w, me);
    of.keys(p, w, of.lo);
    of.values(p, w, of.lo);
    Fresh fresh(w, me);
    load_rest(p, w, m, q, fresh, rows, me);
    if (!late) {
        if (!QONLY)
            pdl_wait();
        q.load(p, w, me);
    }
    if (!QONLY && fresh.any)
        fresh.load(p, fresh.row, me);
    q.put(p, w, m, __fmul_rn(p.scale, LOG2E), me);
    fresh.put(p, w, m, q.turn[0], rows, me);
    float4 gate[QUADS];
    load_gates(p, w, gate, me);
    const int more = AHEAD && ONE ? w.more() : 0;
    if (more && !me.id)
        *m.ticket = UNKNOWN;
    __syncthreads();
    read_all(p, w, m, of, fresh.any, more, gate, me);
}
