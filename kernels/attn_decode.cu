// Attention of a decode step: norms and rotation of queries and keys, the new keys and values into the cache, and softmax(q k) v, a piece of the sequence
// (lib/pieces.cuh) at a time. A block serves up to eight heads of one key head for up to SHARE rows of a sequence, so that what it fetches serves them all.
// A row that sees one piece is finished here; attn_merge.cu adds the pieces of the others.
//   qkv      : [rows, width]             f32   gates (GATE) | queries | keys (unless QONLY) | values (unless QONLY or KEQV)
//   q_norm, k_norm : [gains]             f32   or null; NORM 1: of a head. q_all, k_all have them for NORM 2
//   q_all    : [q_gains]                f32   of all heads; or null
//   k_all    : [k_gains]                f32   or null
//   cos, sin : [positions, half]         f32   half = HALF; or null
//   at       : [many, rows]              i32   rotary positions of the rows, one or three of each; or null
//   axes     : [half]                    i32   which of three positions a pair turns by; null: the first
//   k_pool, v_pool     : [blocks, bs, kv, kb] u8   as lib/kvcache.cuh says, written at `slots`
//   k_scales, v_scales : [blocks, bs, kv]     f32  or null
//   k_subs, v_subs     : [blocks, bs, kv, ds] u8   or null
//   tables   : [seqs, mb]                i32   block tables
//   seq      : [rows]                    i32   sequence of each row; -1: padding, which gets zeros
//   first    : [seqs1]                   i32   first row of each sequence, and the end of the last
//   starts   : [all]                     i32   position of each sequence's first row
//   slots    : [rows]                    i64   where the rows' keys and values go; -1: nowhere
//   sinks    : [heads]                   f32   one more logit for each head; or null
//   o        : [rows, pieces, heads, d]  f32   values weighted within a piece, of rows that see several; null if there are none
//   ml       : [rows, pieces, heads, 2]  f32   largest score of the piece (of base 2), and the sum of 2^(score - largest); likewise
//   y        : [rows, heads, d]          f32
//   -D D= (16 divides it, at most 512) HEADS= KV= HALF= (0: no positions) BS=  GATE= VNORM= KEQV= QONLY= (0 or 1)  NORM= 0: none, 1: head, 2: all heads
//   -D FMT= of the pools   -D SHARE= rows of a sequence that a block takes: 1, 2 or 4; a row has the same bits for each
//   launch: <<<(kv * ceil(heads/kv/8), pieces, rows), D > 128 ? 256 : 128>>> and SHARED bytes; window 0: none. `many` as in lib/pieces.cuh
#include "lib/async.cuh"
#include "lib/heads.cuh"
#include "lib/kvcache.cuh"
#include "lib/limbs.cuh"
#include "lib/pdl.cuh"
#include "lib/pieces.cuh"
#include "lib/reduce.cuh"
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
#ifndef STAGES
#define STAGES 1
#endif
#ifndef MINB
#define MINB (D > 256 || (D > 128 && FMT) ? 1 : D > 128 || FMT ? 2 : 3)
#endif
constexpr int T = D > 256 ? 32 : 64, W = D > 128 ? 8 : 4, THREADS = 32 * W;  // positions at a time, warps
constexpr int KS = D / 16, MT = T / 16, SPLIT = W / MT, KP = (KS + SPLIT - 1) / SPLIT, VT = (KS + W - 1) / W;  // steps of 16: of a head, of positions; and a warp's
constexpr int G = HEADS / KV, HG = (G + 7) / 8, GB = (G + HG - 1) / HG, QI = (GB + W - 1) / W;  // heads of a key head, blocks for them, heads a block, and a warp
constexpr int LD = D / 8 + 1;                                                    // 16 bytes from row to row of a tile: no bank conflicts
constexpr int WIDTH = ((1 + GATE) * HEADS + (QONLY ? 0 : KEQV ? 1 : 2) * KV) * D;
constexpr int Q0 = GATE * HEADS * D, K0 = Q0 + HEADS * D, V0 = KEQV ? K0 : K0 + KV * D;  // where queries, keys and values begin in a row
typedef Head<D> Vec;
typedef Turn<D, HALF> Spin;
typedef uint4 Row[LD];
constexpr int SHARED = (STAGES * 2 * T * LD + SHARE * (KS + MT) * 32) * 16 + (SHARE * SPLIT * 8 * (T + 4) + SHARE * 24 + 2 * T + W * Spin::SCRATCH) * 4;
#ifdef BYTES
static_assert(SHARED == BYTES, "the launch gives other shared memory than the kernel wants");
#endif
static_assert(D % 16 == 0 && D <= 512 && HEADS % KV == 0 && SHARED <= 99 * 1024 && HALF * 2 <= D, "see the contract");

// The block's shared memory.
struct Room {
    Row* tiles;                       // [STAGES][keys, values][T]
    uint4 *qf, *pf;                   // fragments of queries [SHARE][KS][32] and of weights [SHARE][MT][32]
    float (*sc)[T + 4];               // [SHARE*SPLIT*8] scores
    float *top, *sum, *fade;          // [SHARE*8] largest score so far, sum of weights, what the last tile made of older sums
    float *ksc, *vsc, *scratch;       // [T] scales of keys and values, [W][Spin::SCRATCH]
    __device__ __forceinline__ Room(unsigned char* p) {
        tiles = (Row*)p;
        qf = (uint4*)(tiles + STAGES * 2 * T); pf = qf + SHARE * KS * 32;
        sc = (float (*)[T + 4])(pf + SHARE * MT * 32);
        top = (float*)(sc + SHARE * SPLIT * 8); sum = top + SHARE * 8; fade = sum + SHARE * 8; ksc = fade + SHARE * 8; vsc = ksc + T; scratch = vsc + T;
    }
};

// The blocks that hold the positions of a piece, one to a lane, so that no later address waits for the table.
struct Table {
    static constexpr bool FEW = 4 * PIECE / BS + 1 <= 32;
    const int* all;
    int first, mine;
    __device__ __forceinline__ void load(const int* __restrict__ table, int from, int mb, int lane) {
        all = table; first = from / BS; mine = FEW && first + lane < mb ? table[first + lane] : 0;
    }
    __device__ __forceinline__ size_t row(int j, int kv) const {  // in the pool
        const int block = FEW ? __shfl_sync(~0u, mine, (j / BS - first) & 31) : all[j / BS];
        return ((size_t)block * BS + j % BS) * KV + kv;
    }
};

// What a block has to do: rows t .. t+n-1 of a sequence, positions p0 .. end-1, look at positions from .. hi-1. Below `to` these are read from the pool.
struct Work {
    int t, r0, n, nf, back, p0, start, end, low, piece, from, hi, to, kv, hg, h0, gb, window;
    Pieces pieces;
    Table table;
    __device__ __forceinline__ int  lowest(int p) const { return window ? max(0, p - window + 1) : 0; }
    __device__ __forceinline__ bool alone(int p) const { return pieces.of(lowest(p)) == pieces.of(p); }
    __device__ __forceinline__ bool fresh() const { return !QONLY && hi > start && from < end; }  // are there rows of this step among them?
    __device__ __forceinline__ Work(int window_, int many, int row) : window(window_), pieces{many} {
        t = row; kv = blockIdx.x / HG; hg = blockIdx.x % HG; h0 = kv * G + hg * GB; gb = min(GB, G - hg * GB);
    }
    // Sequence s of the row; without a window the piece does not depend on where it stands
    __device__ __forceinline__ void ask(const int* __restrict__ tables, const int* __restrict__ first, const int* __restrict__ starts, int s, int mb, int lane) {
        r0 = first[s]; nf = first[s + 1]; start = starts[s];
        piece = gridDim.y - 1 - blockIdx.y;
        if (!window) table.load(tables + (size_t)s * mb, pieces.start(piece), mb, lane);
    }
    // Is there anything?
    __device__ __forceinline__ bool find(const int* __restrict__ tables, int s, int mb, int lane) {
        back = t - r0; nf -= r0; n = min(SHARE, nf - back); p0 = start + back; end = p0 + n; low = lowest(p0);
        if (window) piece = pieces.of(end - 1) - (int)blockIdx.y;
        if (back % SHARE || piece < pieces.of(low) || piece > pieces.of(end - 1)) return false;  // an earlier row's block has this one, or nobody looks there
        from = max(pieces.start(piece), low / T * T); hi = min(pieces.start(piece + 1), end); to = QONLY ? end : start;
        if (window) table.load(tables + (size_t)s * mb, from, mb, lane);
        return true;
    }
};

// Keys or values of T positions on their way to shared memory: straight there, or through registers where they have to be decoded.
struct Tile {
    static constexpr int J = FMT ? (T * KS + THREADS - 1) / THREADS : 1;
    KvUnit<FMT> unit[J];
    float scale;
    // Positions from lo on. Nobody reads keys that no row sees; values are multiplied by 0, and so must be numbers
    __device__ __forceinline__ void fetch(Row* tile, const unsigned char* pool, const float* scales, const unsigned char* subs, const Work& w, int lo, bool values) {
        auto row = [&](int j) { return w.table.row(min(max(j, w.low), w.to - 1), w.kv); };
        if (FMT == 0) {
            #pragma unroll
            for (int k = 0; k < T * (D / 8) / THREADS; k++) {
                const int i = k * THREADS + threadIdx.x, r = i / (D / 8), j = lo + r, c = i % (D / 8);
                const unsigned char* at = pool + row(j) * (2 * D) + c * 16;
                if (j >= w.low && j < w.to) cp_async16(&tile[r][c], at);
                else if (values && (j < w.low || j >= w.end)) tile[r][c] = make_uint4(0, 0, 0, 0);
            }
        } else {
            #pragma unroll
            for (int k = 0; k < J; k++) {
                const int i = k * THREADS + threadIdx.x, j = lo + i / KS;
                const size_t at = row(j);
                unit[k].zero();
                if (i < T * KS && j >= w.low && j < w.to) unit[k].template load<D>(pool, subs, at, i % KS);
            }
            const int j = lo + threadIdx.x;
            const size_t at = row(j);
            scale = threadIdx.x < T && j >= w.low && j < w.to ? kv_scale<FMT>(scales, at) : 0.f;
        }
        cp_async_commit();
    }
    // After cp_async_wait. Positions of this step, from `to` on, are somebody else's
    __device__ __forceinline__ void land(Row* tile, const Work& w, int lo) {
        if (FMT == 0) return;
        #pragma unroll
        for (int k = 0; k < J; k++) {
            const int i = k * THREADS + threadIdx.x, r = i / KS, j = lo + r;
            if (i < T * KS && (j < w.to || j >= w.end)) unit[k].bf16(tile[r][i % KS * 2], tile[r][i % KS * 2 + 1]);
        }
    }
    __device__ __forceinline__ void land_scale(float* scales, const Work& w, int lo) {
        const int j = lo + threadIdx.x;
        if (FMT && threadIdx.x < T && (j < w.to || j >= w.end)) scales[threadIdx.x] = scale;
    }
};

// 1 / root mean square of the `count` numbers of all heads of a row, by the whole block
__device__ __forceinline__ float rms_all(const float* x, int count, float eps) {
    float a = 0.f;
    for (int i = threadIdx.x; i < count; i += THREADS) a = fmaf(x[i], x[i], a);
    return rsqrtf(fmaf(block_sum(a), 1.f / count, eps));
}

// A query head's fragments, in base 2.
__device__ __forceinline__ void put_query(uint4* qf, const Vec& x, int g, float factor, int lane) {
    #pragma unroll
    for (int k = 0; k < Vec::I; k++) {
        const int u = lane + 32 * k;
        const float* v = x.v[k];
        if (u < D / 4) qf[u / 4 * 32 + g * 4 + u % 4] = b_fragment(limbs(__fmul_rn(v[0], factor), __fmul_rn(v[1], factor)), limbs(__fmul_rn(v[2], factor), __fmul_rn(v[3], factor)));
    }
}

// Scores of a tile's positions: a warp takes 16 of them and a part of the head.
__device__ __forceinline__ void scores(const Room& m, const Work& w, const Row* ks, int lo, int warp, int lane) {
    const int tile = warp % MT, part = warp / MT;
    if (lo + tile * 16 >= w.hi) return;
    float c[SHARE][4][4] = {};
    #pragma unroll
    for (int k = 0; k < KP; k++) {
        const int kk = part * KP + k;
        if (KS % SPLIT && kk >= KS) break;
        unsigned a[4];
        ldmatrix_x4(a, &ks[tile * 16 + lane % 16][kk * 2 + lane / 16]);
        #pragma unroll
        for (int r = 0; r < SHARE; r++) {
            if (r >= w.n) break;
            uint4 b = make_uint4(0, 0, 0, 0);
            if (lane / 4 < w.gb) b = m.qf[(r * KS + kk) * 32 + lane];
            mma_bf16(c[r][k % 2 * 2], a, &b.x);
            mma_bf16(c[r][k % 2 * 2 + 1], a, &b.z);
        }
    }
    #pragma unroll
    for (int r = 0; r < SHARE; r++)
        #pragma unroll
        for (int i = 0; i < 4; i++)
            if (r < w.n) m.sc[(r * SPLIT + part) * 8 + lane % 4 * 2 + i % 2][tile * 16 + lane / 4 + i / 2 * 8] =
                __fadd_rn(__fadd_rn(c[r][0][i], c[r][2][i]), __fadd_rn(c[r][1][i], c[r][3][i]));
}

// Weights of a tile's positions for head g of row r, by one warp, a lane two positions; and what they make of `top`, `sum` and `fade`.
__device__ __forceinline__ void weights(const Room& m, const Work& w, int lo, int r, int g, int lane) {
    const int  j = lo + 2 * lane, at = r * 8 + g, p = w.p0 + r, l = w.lowest(p);
    const bool on = 2 * lane < T, u = on && j <= p && j >= l, v = on && j + 1 <= p && j + 1 >= l;
    float2 x = make_float2(NONE, NONE), f = make_float2(1.f, 1.f);
    if (on) {
        x = *(const float2*)&m.sc[r * SPLIT * 8 + g][2 * lane];
        #pragma unroll
        for (int k = 1; k < SPLIT; k++) { const float2 z = *(const float2*)&m.sc[(r * SPLIT + k) * 8 + g][2 * lane]; x.x = __fadd_rn(x.x, z.x); x.y = __fadd_rn(x.y, z.y); }
        if (FMT) { f = *(const float2*)&m.ksc[2 * lane]; x.x = __fmul_rn(x.x, f.x); x.y = __fmul_rn(x.y, f.y); f = *(const float2*)&m.vsc[2 * lane]; }
    }
    const float old = m.top[at], top = fmaxf(old, warp_max(fmaxf(u ? x.x : NONE, v ? x.y : NONE))), base = top == NONE ? 0.f : top;
    const float a = u ? exp2f(__fsub_rn(x.x, base)) : 0.f, b = v ? exp2f(__fsub_rn(x.y, base)) : 0.f, d = exp2f(__fsub_rn(old, base)), all = warp_sum(__fadd_rn(a, b));
    __syncwarp();
    if (!lane) { m.top[at] = top; m.sum[at] = fmaf(m.sum[at], d, all); m.fade[at] = d; }
    const Pair e = limbs(u ? __fmul_rn(a, f.x) : 0.f, v ? __fmul_rn(b, f.y) : 0.f);
    if (on) {
        unsigned* to = (unsigned*)&m.pf[(r * MT + lane / 8) * 32 + g * 4 + lane % 4] + lane % 8 / 4;
        to[0] = e.hi; to[2] = e.lo;
    }
}

// Weighted values of a tile, added to what was: a warp takes 16 elements of the head at a time.
__device__ __forceinline__ void values(float (*acc)[VT][4], const Room& m, const Work& w, const Row* vs, int lo, int warp, int lane) {
    float c[SHARE][VT][2][4] = {};
    #pragma unroll
    for (int k = 0; k < MT; k++) {
        if (lo + k * 16 >= w.hi) break;
        uint4 b[SHARE];
        #pragma unroll
        for (int r = 0; r < SHARE; r++) { b[r] = make_uint4(0, 0, 0, 0); if (r < w.n && lane / 4 < w.gb) b[r] = m.pf[(r * MT + k) * 32 + lane]; }
        #pragma unroll
        for (int i = 0; i < VT; i++) {
            const int d = warp + i * W;
            if (KS % W && d >= KS) break;
            unsigned a[4];
            ldmatrix_x4_trans(a, &vs[k * 16 + lane % 8 + lane / 16 * 8][d * 2 + lane / 8 % 2]);
            #pragma unroll
            for (int r = 0; r < SHARE; r++) { if (r >= w.n) break; mma_bf16(c[r][i][0], a, &b[r].x); mma_bf16(c[r][i][1], a, &b[r].z); }
        }
    }
    #pragma unroll
    for (int r = 0; r < SHARE; r++) {
        if (r >= w.n) break;
        const float2 f = *(const float2*)&m.fade[r * 8 + lane % 4 * 2];
        #pragma unroll
        for (int i = 0; i < VT; i++)
            #pragma unroll
            for (int k = 0; k < 4; k++) acc[r][i][k] = fmaf(acc[r][i][k], k % 2 ? f.y : f.x, __fadd_rn(c[r][i][0][k], c[r][i][1][k]));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, MINB) attn_decode(const float* qkv, const float* __restrict__ q_norm, const float* __restrict__ k_norm,
        const float* __restrict__ q_all, const float* __restrict__ k_all, const float* __restrict__ cos, const float* __restrict__ sin, const int* __restrict__ at,
        const int* __restrict__ axes, unsigned char* k_pool, float* k_scales, unsigned char* k_subs, unsigned char* v_pool, float* v_scales, unsigned char* v_subs,
        const int* __restrict__ tables, const int* __restrict__ seq, const int* __restrict__ first, const int* __restrict__ starts, const long long* __restrict__ slots,
        const float* __restrict__ sinks, float* o, float* ml, float* y, float eps, float scale, int window, int many, int mb, int seqs) {
    DYNAMIC_SHARED(unsigned char, shared);
    const Room m(shared);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, t = blockIdx.z, rows = gridDim.z, s = seq[t], guess = min(t, seqs - 1);
    Work w(window, many, t);
    w.ask(tables, first, starts, guess, mb, lane);  // row t is often of sequence t, and what is asked for at once need not be waited for in turn
    pdl_trigger();
    if (s < 0) {  // padding
        pdl_wait();
        if (!blockIdx.y) for (int i = threadIdx.x; i < w.gb * D; i += THREADS) y[((size_t)t * HEADS + w.h0) * D + i] = 0.f;
        return;
    }
    if (s != guess) w.ask(tables, first, starts, s, mb, lane);
    if (!w.find(tables, s, mb, lane)) return;
    if (QONLY) pdl_wait();
    Tile kt, vt;
    #pragma unroll
    for (int i = 0; i < STAGES; i++) {
        const int lo = w.from + i * T;
        if (lo < w.hi) kt.fetch(m.tiles + i * 2 * T, k_pool, k_scales, k_subs, w, lo, false);
        else cp_async_commit();
        if (lo < w.hi) vt.fetch(m.tiles + (i * 2 + 1) * T, v_pool, v_scales, v_subs, w, lo, true);
        else cp_async_commit();
    }
    // Of this step's rows, keys are for odd warps from the last on, values for even ones. What is needed but the activations is fetched before the wait
    const int  fw = (W - 1 - warp) / 2, fr = w.r0 + min(fw, w.nf - 1), from_row = ((W - 1 - warp) & 1 ? V0 : K0) + w.kv * D;
    const bool is_v = (W - 1 - warp) & 1, has_fresh = w.fresh();
    Vec  gq, gk, q[SHARE][QI], f;
    Spin turn[SHARE], fturn;
    if (NORM == 1) { gq.load(q_norm, lane); if (!QONLY) gk.load(k_norm, lane); }
    #pragma unroll
    for (int r = 0; r < SHARE; r++) turn[r].load(cos, sin, at, axes, min(t + r, rows - 1), rows, lane);
    if (has_fresh && !is_v) fturn.load(cos, sin, at, axes, fr, rows, lane);
    float sink[2];
    #pragma unroll
    for (int k = 0; k < 2; k++) sink[k] = sinks ? __fmul_rn(sinks[w.h0 + min(lane % 4 * 2 + k, w.gb - 1)], LOG2E) : NONE;
    const long long fslot = has_fresh ? slots[fr] : -1;
    if (!QONLY) pdl_wait();
    #pragma unroll
    for (int r = 0; r < SHARE; r++)
        #pragma unroll
        for (int i = 0; i < QI; i++) q[r][i].load(qkv + (size_t)(t + (r < w.n ? r : 0)) * WIDTH + Q0 + (w.h0 + min(warp + i * W, w.gb - 1)) * D, lane);
    if (has_fresh) f.load(qkv + (size_t)fr * WIDTH + from_row, lane);
    float gate[SHARE][VT][4];  // of the elements that this thread finishes
    if constexpr (GATE) {
        #pragma unroll
        for (int r = 0; r < SHARE; r++)
            #pragma unroll
            for (int i = 0; i < VT; i++)
                #pragma unroll
                for (int e = 0; e < 4; e++) {
                    const int g = lane % 4 * 2 + e % 2, d = (warp + i * W) * 16 + lane / 4 + e / 2 * 8;
                    gate[r][i][e] = r < w.n && w.alone(w.p0 + r) && g < w.gb && d < D ? qkv[(size_t)(t + r) * WIDTH + (w.h0 + g) * D + d] : 0.f;
                }
    }
    const float factor = __fmul_rn(scale, LOG2E);
    #pragma unroll
    for (int r = 0; r < SHARE; r++) {
        if (r >= w.n) break;
        const float all = NORM == 2 ? rms_all(qkv + (size_t)(t + r) * WIDTH + Q0, HEADS * D, eps) : 0.f;
        #pragma unroll
        for (int i = 0; i < QI; i++) {
            const int g = warp + i * W;
            if (g >= w.gb) break;
            Vec& x = q[r][i];
            if (NORM == 1) x.times(x.rms(eps), gq);
            if (NORM == 2) { Vec gain; gain.load(q_all + (w.h0 + g) * D, lane); x.times(all, gain); }
            turn[r](x, m.scratch + warp * Spin::SCRATCH, lane);
            put_query(m.qf + r * KS * 32, x, g, factor, lane);
        }
    }
    if (threadIdx.x < SHARE * 8) { m.top[threadIdx.x] = NONE; m.sum[threadIdx.x] = 0.f; }

    // Turn those of this step's rows that lie in the tile at lo, keep them in `tile`, and put those of this block's rows into the cache
    auto fresh = [&](int lo, Row* tile) {
        #pragma unroll 1
        for (int i = fw; i < w.nf; i += W / 2) {
            const int j = w.start + i, row = w.r0 + i;
            if (j < lo || j >= lo + T || j >= w.end) continue;
            Vec x = f;
            if (i != fw) { x.load(qkv + (size_t)row * WIDTH + from_row, lane); if (!is_v) fturn.load(cos, sin, at, axes, row, rows, lane); }
            if (is_v) { if (VNORM) x.times(x.rms(eps)); }
            else {
                if (NORM == 1) x.times(x.rms(eps), gk);
                if constexpr (NORM == 2) {  // a warp for itself: there are few key heads
                    float a = 0.f;
                    for (int k = lane; k < KV * D; k += 32) { const float z = qkv[(size_t)row * WIDTH + K0 + k]; a = fmaf(z, z, a); }
                    Vec gain;
                    gain.load(k_all + w.kv * D, lane);
                    x.times(rsqrtf(fmaf(warp_sum(a), 1.f / (KV * D), eps)), gain);
                }
                fturn(x, m.scratch + warp * Spin::SCRATCH, lane);
            }
            KvRow<FMT, D> e;
            e.encode((const float4*)x.v, lane);
            e.stage(tile[(is_v ? T : 0) + j - lo], lane);
            if (FMT && !lane) (is_v ? m.vsc : m.ksc)[j - lo] = __fmul_rn(e.scale, KV_UNIT<FMT>);
            const long long slot = i == fw ? fslot : slots[row];
            if (i < w.back || w.hg || slot < 0) continue;
            if (is_v) e.store(v_pool, v_scales, v_subs, slot * KV + w.kv, lane);
            else      e.store(k_pool, k_scales, k_subs, slot * KV + w.kv, lane);
        }
    };

    float acc[SHARE][VT][4] = {};
    #pragma unroll 1
    for (int lo = w.from, stage = 0; lo < w.hi; lo += T, stage = stage + 1 < STAGES ? stage + 1 : 0) {
        Row *ks = m.tiles + stage * 2 * T, *vs = ks + T;
        const int  next = lo + STAGES * T;
        cp_async_wait<2 * STAGES - 1>();
        kt.land(ks, w, lo);
        kt.land_scale(m.ksc, w, lo);
        vt.land_scale(m.vsc, w, lo);
        if (has_fresh && lo + T > w.start) fresh(lo, ks);
        __syncthreads();
        scores(m, w, ks, lo, warp, lane);
        __syncthreads();
        if (next < w.hi) kt.fetch(ks, k_pool, k_scales, k_subs, w, next, false);
        else cp_async_commit();
        vt.land(vs, w, lo);
        #pragma unroll
        for (int r = 0; r < SHARE; r++)
            #pragma unroll
            for (int i = 0; i < QI; i++) if (r < w.n && warp + i * W < w.gb) weights(m, w, lo, r, warp + i * W, lane);
        cp_async_wait<2 * STAGES - 1>();
        __syncthreads();
        values(acc, m, w, vs, lo, warp, lane);
        if (lo + T < w.hi) __syncthreads();
        if (next < w.hi) vt.fetch(vs, v_pool, v_scales, v_subs, w, next, true);
        else cp_async_commit();
    }
    #pragma unroll
    for (int r = 0; r < SHARE; r++) {
        const int p = w.p0 + r, a = w.pieces.of(w.lowest(p)), z = w.pieces.of(p);
        if (r >= w.n || w.piece < a || w.piece > z) continue;
        const size_t cell = ((size_t)(t + r) * gridDim.y + w.piece - a) * HEADS + w.h0, mine = (size_t)(t + r) * HEADS + w.h0;
        if (a != z && threadIdx.x < w.gb) *(float2*)(ml + (cell + threadIdx.x) * 2) = make_float2(m.top[r * 8 + threadIdx.x], m.sum[r * 8 + threadIdx.x]);
        #pragma unroll
        for (int k = 0; k < 2; k++) {
            const int g = lane % 4 * 2 + k;
            if (g >= w.gb) continue;
            const float top = m.top[r * 8 + g], base = fmaxf(top, sink[k]), fall = exp2f(__fsub_rn(top, base)), rate = fall / fmaf(m.sum[r * 8 + g], fall, exp2f(__fsub_rn(sink[k], base)));
            #pragma unroll
            for (int i = 0; i < VT; i++)
                #pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int   d = (warp + i * W) * 16 + lane / 4 + e * 8;
                    const float v = acc[r][i][e * 2 + k], u = __fmul_rn(v, rate);
                    if (KS % W && d >= D) continue;
                    if (a != z) o[(cell + g) * D + d] = v;
                    else y[(mine + g) * D + d] = GATE ? gated(u, gate[r][i][e * 2 + k]) : u;
                }
        }
    }
}
