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
constexpr int ROWS = (2 * NEW * (KV_BYTES<FMT, D> + (FMT == 2 ? D / 16 : 0)) + 15) / 16
        * 16;
constexpr int SHARED = GROUPS * REGION + LEFT + QS + SCORES + ROWS
        + (2 * NEW + W * Spin::SCRATCH + 2 * GROUPS * 8 + 8 + 4 * AHEAD) * 4;
#ifdef BYTES
static_assert(
        SHARED == BYTES, "the launch gives other shared memory than the kernel wants");
#endif
static_assert(
        D % 16 == 0 && D <= 512 && HEADS % KV == 0 && SHARED <= 227 * 1024 && HALF * 2 <= D
                && BS % 16 == 0 && (NEW > 1 || SHARE == 1),
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
    const int* seq;  // [rows] i32: sequence of each row; -1: padding, which gets zeros
    const int* first;  // [seqs1] i32: first row of each sequence, and the end of the last
    const int* starts;  // [all] i32: position of each sequence's first row
    const long long* slots;  // [rows] i64: where the rows' keys and values go; -1: nowhere
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
    __device__ __forceinline__ void load(const int* table, int from, int mb, int lane) {
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
        const int block = FEW ? __shfl_sync(~0u, mine, (j / BS - first) & 31) : all[j / BS];
        return ((size_t)block * BS + j % BS) * KV + kv;
    }
};

// What a block has to do: rows t .. t+n-1 of a sequence, positions p0 .. end-1, look at pieces
// `piece` .. `last`, now at positions from .. hi-1. Below `to` these are read from the pool.
struct Work {
    int t, r0, n, nf, back, p0, start, end, low, newest, piece, last, from, hi, to, kv, hg,
            h0, gb, window, early;
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
    __device__ __forceinline__ Work(int window_, int many, int row, int shift, int early_)
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
        const int2 run = runs.pieces(gridDim.y - 1 - blockIdx.y);  // the largest come first
        piece = run.x;
        last = run.y;
        table.load(table.all, pieces.start(piece), mb, lane);
    }
    // Is there anything?
    __device__ __forceinline__ bool find(const int* tables, int s, int mb, int lane) {
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
__device__ __forceinline__ float rms_all(const float* x, int count, float eps, int lane) {
    float a = 0.f;
    for (int i = lane; i < count; i += 32)
        a = fmaf(x[i], x[i], a);
    return rsqrtf(fmaf(warp_sum(a), 1.f / count, eps));
}

// Weights of a slice's positions, in base 2, and what they make of `top` and `sum`: of head lane/4
// at positions 2*(lane%4) + {0, 1, 8, 9}. b: fragments of the weights. Returns what is to become of
// older sums.
__device__ __forceinline__ float weights(
        float4 c, float& top, float& sum, unsigned (&b)[4], const Part& ks, int lo, int low,
        int p, int lane) {
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
    sum = fmaf(sum, fade, __fadd_rn(__fadd_rn(x[0], x[1]), __fadd_rn(x[2], x[3])));
    top = now;
    #pragma unroll
    for (int i = 0; i < 4; i++)
        if (KV_CODED<FMT>)
            x[i] = on[i] ? __fmul_rn(x[i], ks.scale(lane % 4 * 2 + i % 2 + i / 2 * 8, true))
                         : 0.f;
    const Pair u = Part::weights_of(x[0], x[1]), v = Part::weights_of(x[2], x[3]);
    b[0] = u.hi;
    b[1] = v.hi;
    b[2] = u.lo;
    b[3] = v.lo;
    return fade;
}

__device__ __forceinline__ float4 gated4(float4 v, float4 g) {
    return make_float4(gated(v.x, g.x), gated(v.y, g.y), gated(v.z, g.z), gated(v.w, g.w));
}

// Pieces of a row are added up by their blocks together: this one is `rank` of `ranks`.
__device__ __forceinline__ void merge(
        const Params& p, const Work& w, const float* sink, int row, size_t own, int count,
        int rank, int ranks, int warp, int lane) {
    float* const at0 = p.words
            + (((size_t)row * p.cells) * HEADS + w.h0) * (D / 8) * RECORD;
    #pragma unroll 1
    for (int i0 = (rank * W + warp) * 32; i0 < w.gb * (D / 4); i0 += ranks * THREADS) {
        const int i = min(i0 + lane, w.gb * (D / 4) - 1);
        const float4 g = GATE
                ? *(const float4*)(p.qkv + (size_t)row * WIDTH + w.h0 * D + i * 4)
                : make_float4(0.f, 0.f, 0.f, 0.f);
        float4 v = merged(
                at0 + i / 2 * RECORD + i % 2 * 4, i % 2, (size_t)HEADS * (D / 8) * RECORD,
                count, sink[i / (D / 4)]);
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
            const float4 z = all[(k * SHARE + r) * 32];
            x[r].x = __fadd_rn(x[r].x, z.x);
            x[r].y = __fadd_rn(x[r].y, z.y);
            x[r].z = __fadd_rn(x[r].z, z.z);
            x[r].w = __fadd_rn(x[r].w, z.w);
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
                    __fadd_rn(c[r][0][i / 2][i % 2 + 2], c[r][1][i / 2][i % 2 + 2]));
}

// What a group has found of a row: its largest scores, and sums of weights and of values.
__device__ __forceinline__ void leave(
        const Room& m, const Part& vs, const float (&acc)[Part::TILES][4], float top,
        float l, float* mine, int group, int part, int own_lane) {
    if (!part && own_lane % 4 == 0) {
        m.tops[group * 8 + own_lane / 4] = top;
        m.sums[group * 8 + own_lane / 4] = l;
    }
    #pragma unroll
    for (int i = 0; i < Part::TILES; i++)
        #pragma unroll
        for (int e = 0; e < 4; e++) {
            const int d = vs.element(i, own_lane / 4, e / 2);
            if ((D % 32 == 0 && Part::EVEN) || d < D)
                mine[(own_lane % 4 * 2 + e % 2) * (D + 4) + d] = acc[i][e];
        }
}

// Queries are normed and turned, and become fragments.
__device__ __forceinline__ void put_queries(
        const Params& p, const Work& w, const Room& m, Vec (&q)[SHARE][QI],
        const Spin (&turn)[SHARE], const Vec& gq, int t, float factor, int warp, int lane) {
    #pragma unroll
    for (int r = 0; r < SHARE; r++) {
        const float all = NORM == 2
                ? rms_all(p.qkv + (size_t)(t + (r < w.n ? r : 0)) * WIDTH + Q0, HEADS * D,
                          p.eps, lane)
                : 0.f;
        #pragma unroll
        for (int i = 0; i < QI; i++) {
            const int g = warp + i * W;
            Vec& x = q[r][i];
            if (NORM == 1)
                x.times(x.rms(p.eps), gq);
            if (NORM == 2) {
                Vec gain;
                gain.load(p.q_all + (w.h0 + min(g, w.gb - 1)) * D, lane);
                x.times(all, gain);
            }
            turn[r](x, m.scratch + warp * Spin::SCRATCH, lane);
            if (g < w.gb && r < w.n)
                Part::put_query(m.qf + r * Part::STEPS * 32, x.v, g, factor, lane);
        }
    }
}

// This warp's heads of the rows' queries, as the product before left them.
__device__ __forceinline__ void load_queries(
        const Params& p, const Work& w, Vec (&q)[SHARE][QI], int t, int warp, int lane) {
    #pragma unroll
    for (int r = 0; r < SHARE; r++)
        #pragma unroll
        for (int i = 0; i < QI; i++)
            q[r][i].load(
                    p.qkv + (size_t)(t + (SHARE > 1 && r < w.n ? r : 0)) * WIDTH + Q0
                            + (w.h0 + min(warp + i * W, w.gb - 1)) * D,
                    lane);
}

// A key of this step is normed and turned; a value at most normed.
__device__ __forceinline__ void turn_fresh(
        const Params& p, const Work& w, const Room& m, Vec& x, const Spin& turn,
        const Vec& gk, bool is_v, int row, int warp, int lane) {
    const Vec raw = x;
    if (NORM == 1)
        x.times(x.rms(p.eps), gk);
    if constexpr (NORM == 2) {
        Vec gain;
        gain.load(p.k_all + w.kv * D, lane);
        x.times(rms_all(p.qkv + (size_t)row * WIDTH + K0, KV * D, p.eps, lane), gain);
    }
    turn(x, m.scratch + warp * Spin::SCRATCH, lane);
    if (is_v) {
        x = raw;
        if (VNORM)
            x.times(x.rms(p.eps));
    }
}

// Key or value i of this step stays with the block, and goes into the cache if it is of its rows.
__device__ __forceinline__ void keep_fresh(
        const Params& p, const Work& w, const Room& m, const Vec& x, bool is_v, int i,
        long long slot, int lane) {
    KvRow<FMT, D> e;
    e.encode((const float4*)x.v, lane);
    e.store(m.rows, m.row_scales, m.row_subs, 2 * i + is_v, lane);
    if (i < w.back || w.hg || slot < 0)
        return;
    if (is_v)
        e.store(p.v_pool, p.v_scales, p.v_subs, slot * KV + w.kv, lane);
    else
        e.store(p.k_pool, p.k_scales, p.k_subs, slot * KV + w.kv, lane);
}

// Rows of this step in the slice at lo, of keys (0) or of values (1).
__device__ __forceinline__ void patch_slice(
        const Room& m, const Work& w, bool has_fresh, int lo, const Part& to, int which) {
    if (!has_fresh || lo + 16 <= w.start)
        return;
    for (int j = max(lo, w.start); j < min(lo + 16, w.end); j++) {
        to.copy(m.rows, m.row_subs, 2 * (j - w.start) + which, j - lo);
        if (!which)
            to.copy_scales(m.row_scales + 2 * (j - w.start), j - lo);
    }
    __syncwarp();
}

// Weights of a slice for all rows, as fragments; older sums of a row fade where `fades`.
__device__ __forceinline__ void weigh(
        const Work& w, const float4 (&x)[SHARE], float (&top)[SHARE], float (&sum)[SHARE],
        unsigned (&b)[SHARE][4], const Part& ks, int lo, float (&fade)[SHARE],
        bool (&fades)[SHARE], int lane) {
    #pragma unroll
    for (int r = 0; r < SHARE; r++) {
        const float was = top[r];
        fade[r] = weights(
                x[r], top[r], sum[r], b[r], ks, lo, w.lowest(w.p0 + r), w.p0 + r, lane);
        // else times one, or nothing there yet
        fades[r] = __any_sync(~0u, fade[r] != 1.f && was != NONE);
    }
}

// Of head own_lane % 8: the largest score, factors of the groups, the sum of weights, and, where
// the row sees a `whole` piece and no other, what makes sums an answer.
__device__ __forceinline__ void merge_groups(
        const Room& m, int own_lane, bool whole, float& most, float& total,
        float (&part_of)[GROUPS], float& rate) {
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

// v += what the groups have of elements d .. d+3 of head g, times their factors.
__device__ __forceinline__ void add_groups(
        float4& v, const Room& m, const float (&part_of)[GROUPS], int g, int d) {
    #pragma unroll
    for (int k = 0; k < GROUPS; k++) {
        const float e = __shfl_sync(~0u, part_of[k], g);
        const float4 u = *(
                const float4*)((const float*)(m.left + k * m.STEP) + g * (D + 4) + d);
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
        unsigned char* v_subs, const int* __restrict__ tables, const int* __restrict__ seq,
        const int* __restrict__ first, const int* __restrict__ starts,
        const long long* __restrict__ slots, const float* __restrict__ sinks, float* o,
        float* ml, float* words, float* y, float eps, float scale, int window, int many,
        int mb, int seqs, int mergers, int cells, int shift, int* tickets, int early) {
    const Params p = {qkv, q_norm, k_norm, q_all, k_all, cos, sin, at, axes, k_pool, v_pool,
            k_scales, v_scales, k_subs, v_subs, tables, seq, first, starts, slots, sinks, o,
            ml, words, y, tickets, eps, scale, window, many, mb, seqs, mergers, cells,
            shift, early};
    DYNAMIC_SHARED(unsigned char, shared);
    const Room m(shared);
    const int lane = threadIdx.x % 32;
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int t = ONE ? 0 : blockIdx.z;
    const int rows = ONE ? 1 : gridDim.z;
    const int s = p.seq[t];
    const int guess = ONE ? 0 : min(t, p.seqs - 1);
    Spin turn[SHARE], fturn;
    #pragma unroll
    for (int r = 0; r < SHARE; r++)
        turn[r].ask(p.axes, lane);
    Work w(p.window, p.many, t, p.shift, p.early);
    // row t is often of sequence t, and what is asked for at once need not be waited for in turn
    w.ask(p.tables, p.first, p.starts, guess, p.mb, lane);
    Vec q[SHARE][QI];
    auto queries = [&] { load_queries(p, w, q, t, warp, lane); };
    #pragma unroll
    for (int r = 0; r < SHARE; r++)
        turn[r].find(p.at, min(t + r, rows - 1), rows, lane);
    pdl_trigger();
    // Then the row is there, or nearly so. Small heads have more blocks than that to hide a wait,
    // and ask for keys first.
    const bool late = D > 128 && ONE && w.late();
    if (late) {
        pdl_wait();
        queries();
    }
    if (s < 0) {  // padding
        pdl_wait();
        if (!blockIdx.y)
            for (int i = threadIdx.x; i < w.gb * D; i += THREADS)
                p.y[((size_t)t * HEADS + w.h0) * D + i] = 0.f;
        return;
    }
    if (!ONE && s != guess)
        w.ask(p.tables, p.first, p.starts, s, p.mb, lane);
    if (!w.find(p.tables, s, p.mb, lane))
        return;
    if (w.nf > NEW)
        __trap();
    if (QONLY)
        pdl_wait();
    // This warp's slices begin at lo, lo + SPAN, ...
    const int group = warp / SPLIT, part = warp % SPLIT;
    int lo = w.from + 16 * group;
    const Part ks(m.parts + group * REGION, part, lane),
            vs(m.parts + group * REGION + Part::SIZE, part, lane);
    auto keys = [&](int lo) {
        if (lo < w.hi)
            ks.template fetch<KV>(
                    p.k_pool, p.k_scales, p.v_scales, p.k_subs, w.table.row(lo, w.kv),
                    w.low - lo, w.to - lo);
        cp_async_commit();
    };
    auto values = [&](int lo) {
        if (lo < w.hi)
            vs.template fetch<KV>(
                    p.v_pool, nullptr, nullptr, p.v_subs, w.table.row(lo, w.kv), w.low - lo,
                    w.to - lo);
        cp_async_commit();
    };
    keys(lo);
    values(lo);
    // What is needed but the activations is fetched before the wait
    const bool has_fresh = w.fresh(), is_v = warp & 1;
    const int fw = NEW == 1 ? 0 : warp / 2;
    const int fr = w.r0 + min(fw, w.nf - 1);
    const int from_row = (is_v ? V0 : K0) + w.kv * D;
    Vec gq, gk, f;
    if (NORM == 1) {
        gq.load(p.q_norm, lane);
        if (!QONLY)
            gk.load(p.k_norm, lane);
    }
    #pragma unroll
    for (int r = 0; r < SHARE; r++)
        turn[r].load(p.cos, p.sin, lane);
    if (NEW > 1 && has_fresh) {
        fturn.ask(p.axes, lane);
        fturn.find(p.at, fr, rows, lane);
        fturn.load(p.cos, p.sin, lane);
    }
    if (threadIdx.x < 8)
        m.sink[threadIdx.x] = p.sinks
                ? __fmul_rn(p.sinks[w.h0 + min((int)threadIdx.x, w.gb - 1)], LOG2E)
                : NONE;
    const long long fslot = has_fresh ? p.slots[fr] : -1;
    if (!late) {
        if (!QONLY)
            pdl_wait();
        queries();
    }
    if (!QONLY && has_fresh)
        f.load(p.qkv + (size_t)fr * WIDTH + from_row, lane);
    // are there registers for gates that come early?
    constexpr bool soon = SHARE == 1 && !ONE;
    auto gate_of = [&](int r, int i) {
        const int own = min(i, w.gb * (D / 4) - 1) * 4;
        return *(const float4*)(p.qkv + (size_t)(t + r) * WIDTH + w.h0 * D + own);
    };
    float4 gate[QUADS];
    const float factor = __fmul_rn(p.scale, LOG2E);
    put_queries(p, w, m, q, turn, gq, t, factor, warp, lane);
    // Turn rows of this step: keys are for even warps, values for odd ones. Keep them, and put
    // those of this block's rows into the cache
    auto turned = [&](Vec& x, const Spin& turn, int row) {
        turn_fresh(p, w, m, x, turn, gk, is_v, row, warp, lane);
    };
    auto keep = [&](const Vec& x, int i, long long slot) {
        keep_fresh(p, w, m, x, is_v, i, slot, lane);
    };
    if constexpr (NEW == 1 && !QONLY) {
        if (has_fresh && warp < 2) {
            turned(f, turn[0], fr);
            keep(f, 0, fslot);
        }
    } else if (has_fresh) {
        #pragma unroll 1
        for (int i = fw; i < w.nf; i += W / 2) {
            const int j = w.start + i, row = w.r0 + i;
            if (j < w.from || j >= w.end || w.pieces.of(j) > w.last)
                continue;
            if (i != fw) {
                f.load(p.qkv + (size_t)row * WIDTH + from_row, lane);
                fturn.ask(p.axes, lane);
                fturn.find(p.at, row, rows, lane);
                fturn.load(p.cos, p.sin, lane);
            }
            turned(f, fturn, row);
            keep(f, i, i == fw ? fslot : p.slots[row]);
        }
    }
    if (GATE && soon && w.alone(w.p0))
        #pragma unroll
        for (int k = 0; k < QUADS; k++)
            gate[k] = gate_of(0, threadIdx.x + k * THREADS);
    const int more = AHEAD && ONE ? w.more() : 0;
    if (more && !threadIdx.x)
        *m.ticket = UNKNOWN;
    __syncthreads();

    // Rows of this step in the slice at lo
    auto patch = [&](const Part& to, int which) {
        patch_slice(m, w, has_fresh, lo, to, which);
    };
    for (;;) {
        float acc[SHARE][Part::TILES][4] = {};
        float top[SHARE];
        float sum[SHARE];
        #pragma unroll
        for (int r = 0; r < SHARE; r++) {
            top[r] = NONE;
            sum[r] = 0.f;
        }
        #pragma unroll 1
        for (; lo < w.hi; lo += SPAN) {
            const bool asks = more && !threadIdx.x && lo + SPAN >= w.hi;
            int ticket;
            if (asks)
                ticket = atomicAdd(p.tickets + blockIdx.x, 1) + 1;
            cp_async_wait<1>();
            __syncwarp();
            patch(ks, 0);
            float c[SHARE][2][2][4] = {};
            ks.template scores<SHARE>(c, m.qf);
            float4 x[SHARE];
            add_limbs(x, c);
            if constexpr (SPLIT > 1)
                exchange(x, m.scores, group, part, lane);
            float fade[SHARE];
            bool fades[SHARE];
            unsigned b[SHARE][4];
            weigh(w, x, top, sum, b, ks, lo, fade, fades, lane);
            __syncwarp();
            keys(lo + SPAN);
            cp_async_wait<1>();
            __syncwarp();
            patch(vs, 1);
            #pragma unroll
            for (int r = 0; r < SHARE; r++) {
                if (!fades[r])
                    continue;
                const float f[2] = {__shfl_sync(~0u, fade[r], lane % 4 * 8),
                        __shfl_sync(~0u, fade[r], lane % 4 * 8 + 4)};
                #pragma unroll
                for (int i = 0; i < Part::TILES; i++)
                    #pragma unroll
                    for (int e = 0; e < 4; e++)
                        acc[r][i][e] = __fmul_rn(acc[r][i][e], f[e % 2]);
            }
            vs.template values<SHARE>(acc, b);
            __syncwarp();
            values(lo + SPAN);
            if (asks)
                *m.ticket = ticket;
        }

        // What the groups have, one row after the other
        const int piece = w.piece++;
        bool ends = w.piece > w.last;
        if (more) {
            const int ticket = drawn(m);
            ends = ticket >= more;
            w.piece = w.last = w.drawn(ticket);
            // every block draws one that is too large; the last of all leaves what it found
            if (!threadIdx.x && ticket == more + (int)gridDim.y - 1)
                p.tickets[blockIdx.x] = -1;
        }
        auto go_on = [&] {
            w.begin();
            if (ONE)
                w.table.load(w.table.all, w.from, p.mb, lane);
            else
                w.table.go_on(w.from, w.hi, p.mb, lane);
            lo = w.from + 16 * group;
            keys(lo);
            values(lo);
        };
        if (AHEAD) {
            if (!ends)
                go_on();
        } else if (SPLIT > 1)
            sync_warps<SPLIT>(group);
        float* const mine = (float*)(m.left + group * m.STEP);
        #pragma unroll
        for (int r = 0; r < SHARE; r++) {
            int thread = threadIdx.x;
#if defined(__CUDA_ARCH__)
            // Places of results would else take registers that are wanted while slices are added up
            if (!soon)
                asm volatile("" : "+r"(thread));
#endif
            const int own_lane = soon ? lane : thread % 32;
            const int own_p = w.p0 + r;
            const int a = w.pieces.of(w.lowest(own_p));
            const int z = w.pieces.of(own_p);
            if (r >= w.n)
                break;
            if (piece < a || piece > z)
                continue;
            float l = __fadd_rn(sum[r], __shfl_xor_sync(~0u, sum[r], 1));
            l = __fadd_rn(l, __shfl_xor_sync(~0u, l, 2));
            if (r)
                __syncthreads();
            leave(m, vs, acc[r], top[r], l, mine, group, part, own_lane);
            __syncthreads();
            if (more && !threadIdx.x)
                *m.ticket = UNKNOWN;  // all have seen it
            float most = NONE, total = 0.f, part_of[GROUPS];
            float rate = 0.f;
            merge_groups(m, own_lane, soon || a == z, most, total, part_of, rate);
            const size_t cell = ((size_t)(t + r) * p.cells + piece - a) * HEADS + w.h0;
            const size_t own = ((size_t)(t + r) * HEADS + w.h0) * D;
            #pragma unroll
            for (int k = 0; k < QUADS; k++) {
                const int i = soon ? (int)(threadIdx.x + k * THREADS)
                                   : thread + k * THREADS;
                const int g = min(i / (D / 4), w.gb - 1);
                const int d = i % (D / 4) * 4;
                float4 v = make_float4(0.f, 0.f, 0.f, 0.f);
                add_groups(v, m, part_of, g, d);
                const float top = __shfl_sync(~0u, most, g);
                const float l = __shfl_sync(~0u, total, g);
                const float f = __shfl_sync(~0u, rate, g);
                if (i >= w.gb * (D / 4))
                    continue;
                if (a == z) {
                    v.x = __fmul_rn(v.x, f);
                    v.y = __fmul_rn(v.y, f);
                    v.z = __fmul_rn(v.z, f);
                    v.w = __fmul_rn(v.w, f);
                    *(float4*)(p.y + own + g * D + d) = GATE
                            ? gated4(v, soon ? gate[k] : gate_of(r, i))
                            : v;
                } else if (!ONE && p.words) {
                    float* const record = p.words + ((cell + g) * (D / 8) + d / 8) * RECORD;
                    give4(record + d % 8, v);
                    if (d % 8 == 0)
                        give2(record + 8, make_float2(top, l));
                } else {
                    if (!d)
                        *(float2*)(p.ml + (cell + g) * 2) = make_float2(top, l);
                    *(float4*)(p.o + (cell + g) * D + d) = v;
                }
            }
            // Pieces of a row are added up by their blocks together
            const int count = z - a + 1;
            const int rank = piece - a;
            const int ranks = min(p.mergers, count);
            if (ONE || count == 1 || !p.words || rank >= ranks)
                continue;
            merge(p, w, m.sink, t + r, own, count, rank, ranks, warp, lane);
        }
        if (ends)
            return;
        __syncthreads();
        if (!AHEAD)
            go_on();
    }
}
