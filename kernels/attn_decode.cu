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
//   starts   : [starts]                  i32   position of each sequence's first row
//   slots    : [rows]                    i64   where the rows' keys and values go; -1: nowhere
//   sinks    : [heads]                   f32   one more logit for each head; or null
//   o        : [rows, pieces, heads, d]  f32   values weighted within a piece, of rows that see several; null if there are none
//   ml       : [rows, pieces, heads, 2]  f32   largest score of the piece (of base 2), and the sum of 2^(score - largest); likewise
//   y        : [rows, heads, d]          f32
//   -D D= (16 divides it, at most 512) HEADS= KV= HALF= (0: no positions) BS=  GATE= VNORM= KEQV= QONLY= (0 or 1)  NORM= 0: none, 1: head, 2: all heads
//   -D FMT= of the pools   -D SHARE= rows of a sequence that a block takes: 1, 2 or 4; a row has the same bits for each
//   launch: <<<(pieces, kv * ceil(heads/kv/8), rows), D > 128 ? 256 : 128>>> and SHARED bytes; window 0: none. `many` as in lib/pieces.cuh
#include "lib/async.cuh"
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
constexpr int T = D > 256 ? 32 : 64, W = D > 128 ? 8 : 4, THREADS = 32 * W;  // positions at a time, warps
constexpr int KS = D / 16, MT = T / 16, SPLIT = W / MT, KP = (KS + SPLIT - 1) / SPLIT, VT = (KS + W - 1) / W;
constexpr int G = HEADS / KV, HG = (G + 7) / 8, GB = (G + HG - 1) / HG, QI = (GB + W - 1) / W;  // heads of a key head, blocks for them, heads a block, and a warp
constexpr int LD = D / 8 + 1, I = (D / 4 + 31) / 32;    // 16 bytes from row to row of a tile: no bank conflicts; quads a lane
constexpr bool SWAP = HALF >= 16 && (HALF & (HALF - 1)) == 0;  // the partner of an element is a lane or a register away
constexpr int WIDTH = ((1 + GATE) * HEADS + (QONLY ? 0 : KEQV ? 1 : 2) * KV) * D;
constexpr int SHARED = (2 * T * LD + SHARE * (KS + MT) * 32) * 16 + (SHARE * SPLIT * 8 * (T + 4) + SHARE * 24 + 2 * T + (SWAP || !HALF ? 0 : W * D)) * 4;
#ifdef BYTES
static_assert(SHARED == BYTES, "the launch gives other shared memory than the kernel wants");
#endif
static_assert(D % 16 == 0 && D <= 512 && HEADS % KV == 0 && SHARED <= 99 * 1024 && HALF * 2 <= D, "see the contract");

// Elements 16*(u/4) + 2*(u%4) + {0, 1, 8, 9} of a head: quad u, as a fragment wants them.
__device__ __forceinline__ int element(int u, int k) { return u / 4 * 16 + u % 4 * 2 + (k & 1) + (k >> 1) * 8; }
struct Head { float v[I][4]; };
__device__ __forceinline__ Head quads(const float* p, int lane) {
    Head h;
    #pragma unroll
    for (int i = 0; i < I; i++) {
        const int u = lane + 32 * i;
        float2 a = make_float2(0.f, 0.f), b = a;
        if (u < D / 4) { a = *(const float2*)(p + element(u, 0)); b = *(const float2*)(p + element(u, 2)); }
        h.v[i][0] = a.x; h.v[i][1] = a.y; h.v[i][2] = b.x; h.v[i][3] = b.y;
    }
    return h;
}
__device__ __forceinline__ float rms(const Head& h, float eps) {
    float m = 0.f;
    #pragma unroll
    for (int i = 0; i < I; i++)
        #pragma unroll
        for (int k = 0; k < 4; k++) m = fmaf(h.v[i][k], h.v[i][k], m);
    return rsqrtf(fmaf(warp_sum(m), 1.f / D, eps));
}
__device__ __forceinline__ void times(Head& h, float m, const Head& gain) {
    #pragma unroll
    for (int i = 0; i < I; i++)
        #pragma unroll
        for (int k = 0; k < 4; k++) h.v[i][k] = __fmul_rn(__fmul_rn(h.v[i][k], m), gain.v[i][k]);
}

// The rotation of one row.
struct Turn {
    Head c, s;
    __device__ __forceinline__ void load(const float* __restrict__ cos, const float* __restrict__ sin, const int* __restrict__ at, const int* __restrict__ axes, int row, int rows, int lane) {
        if (!HALF) return;
        const int p = axes ? 0 : at[row];
        #pragma unroll
        for (int i = 0; i < I; i++)
            #pragma unroll
            for (int k = 0; k < 4; k++) {
                const int  e = element(lane + 32 * i, k), h = e < HALF ? e : e - HALF;
                const bool on = e < 2 * HALF;
                const size_t a = on ? (size_t)(axes ? at[axes[h] * rows + row] : p) * HALF + h : 0;
                c.v[i][k] = on ? cos[a] : 1.f;
                s.v[i][k] = on ? (e < HALF ? -sin[a] : sin[a]) : 0.f;
            }
    }
    __device__ __forceinline__ void operator()(Head& x, float* scratch, int lane) const {
        if (!HALF) return;
        Head other;
        if constexpr (SWAP) {
            #pragma unroll
            for (int i = 0; i < I; i++)
                #pragma unroll
                for (int k = 0; k < 4; k++) other.v[i][k] = HALF >= 128 ? x.v[i ^ (HALF / 128) & (I - 1)][k] : __shfl_xor_sync(~0u, x.v[i][k], HALF / 4 % 32);
        } else {
            #pragma unroll
            for (int i = 0; i < I; i++)
                #pragma unroll
                for (int k = 0; k < 4; k++) if (lane + 32 * i < D / 4) scratch[element(lane + 32 * i, k)] = x.v[i][k];
            __syncwarp();
            #pragma unroll
            for (int i = 0; i < I; i++)
                #pragma unroll
                for (int k = 0; k < 4; k++) { const int e = element(lane + 32 * i, k); other.v[i][k] = e < 2 * HALF ? scratch[e < HALF ? e + HALF : e - HALF] : 0.f; }
            __syncwarp();
        }
        #pragma unroll
        for (int i = 0; i < I; i++)
            #pragma unroll
            for (int k = 0; k < 4; k++) x.v[i][k] = fmaf(x.v[i][k], c.v[i][k], __fmul_rn(other.v[i][k], s.v[i][k]));
    }
};

// Keys or values of T positions on their way to shared memory.
struct Tile {
    static constexpr int J = (T * KS + THREADS - 1) / THREADS;
    KvUnit<FMT> unit[FMT ? J : 1];
    float scale;
    // Positions of lo.. that lie in from..to-1; those from `end` on become zeros if `fill`
    __device__ __forceinline__ void fetch(uint4 (*tile)[LD], const unsigned char* pool, const float* scales, const unsigned char* subs, const int* table, int kv, int lo, int from, int to, int end, bool fill) {
        auto row = [&](int j) { return ((size_t)table[j / BS] * BS + j % BS) * KV + kv; };
        if (FMT == 0) {
            #pragma unroll
            for (int k = 0; k < (T * (D / 8) + THREADS - 1) / THREADS; k++) {
                const int i = k * THREADS + threadIdx.x, r = i / (D / 8), j = lo + r, c = i % (D / 8);
                if (T * (D / 8) % THREADS && i >= T * (D / 8)) break;
                if (j >= from && j < to) cp_async16(&tile[r][c], pool + row(j) * (2 * D) + c * 16);
                else if (fill && (j < from || j >= end)) tile[r][c] = make_uint4(0, 0, 0, 0);
            }
        } else {
            #pragma unroll
            for (int k = 0; k < J; k++) {
                const int i = k * THREADS + threadIdx.x, j = lo + i / KS;
                unit[FMT ? k : 0].zero();
                if (i < T * KS && j >= from && j < to) unit[FMT ? k : 0].template load<D>(pool, subs, row(j), i % KS);
            }
            const int j = lo + threadIdx.x;
            scale = threadIdx.x < T && j >= from && j < to ? kv_scale<FMT>(scales, row(j)) : 0.f;
        }
        cp_async_commit();
    }
    // After cp_async_wait. Fresh positions, from `to` to `end`, are somebody else's
    __device__ __forceinline__ void land(uint4 (*tile)[LD], float* scales, int lo, int to, int end) {
        if (FMT == 0) return;
        #pragma unroll
        for (int k = 0; k < J; k++) {
            const int i = k * THREADS + threadIdx.x, r = i / KS, j = lo + r;
            if (i < T * KS && (j < to || j >= end)) unit[FMT ? k : 0].bf16(tile[r][i % KS * 2], tile[r][i % KS * 2 + 1]);
        }
        const int j = lo + threadIdx.x;
        if (threadIdx.x < T && (j < to || j >= end)) scales[threadIdx.x] = scale;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) attn_decode(const float* qkv, const float* __restrict__ q_norm, const float* __restrict__ k_norm,
        const float* __restrict__ q_all, const float* __restrict__ k_all, const float* __restrict__ cos, const float* __restrict__ sin, const int* __restrict__ at,
        const int* __restrict__ axes, unsigned char* k_pool, float* k_scales, unsigned char* k_subs, unsigned char* v_pool, float* v_scales, unsigned char* v_subs,
        const int* __restrict__ tables, const int* __restrict__ seq, const int* __restrict__ first, const int* __restrict__ starts, const long long* __restrict__ slots,
        const float* __restrict__ sinks, float* o, float* ml, float* y, float eps, float scale, int window, int many, int mb) {
    DYNAMIC_SHARED(unsigned char, shared);
    uint4 (*ks)[LD] = (uint4 (*)[LD])shared, (*vs)[LD] = ks + T;
    uint4 *qf = (uint4*)(vs + T), *pf = qf + SHARE * KS * 32;             // [SHARE][KS][32], [SHARE][MT][32]: fragments of queries and of weights
    float (*sc)[T + 4] = (float (*)[T + 4])(pf + SHARE * MT * 32);        // [SHARE*SPLIT*8]: scores
    float *top = (float*)(sc + SHARE * SPLIT * 8), *sum = top + SHARE * 8, *fade = sum + SHARE * 8, *ksc = fade + SHARE * 8, *vsc = ksc + T, *scratch = vsc + T;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, kv = blockIdx.y / HG, hg = blockIdx.y % HG, t = blockIdx.z, rows = gridDim.z;
    const int h0 = kv * G + hg * GB, gb = min(GB, G - hg * GB), s = seq[t];
    const Pieces pieces{many};
    pdl_trigger();
    if (s < 0) {  // padding
        pdl_wait();
        if (!blockIdx.x) for (int i = threadIdx.x; i < gb * D; i += THREADS) y[((size_t)t * HEADS + h0) * D + i] = 0.f;
        return;
    }
    const int r0 = first[s], back = t - r0, nf = first[s + 1] - r0, start = starts[s];
    if (back % SHARE) return;  // an earlier row's block has this one
    const int n = min(SHARE, nf - back), p0 = start + back, end = p0 + n;  // rows p0 .. end-1
    auto lowest = [&](int p) { return window ? max(0, p - window + 1) : 0; };
    const int piece = pieces.of(end - 1) - (int)blockIdx.x, low = lowest(p0);
    if (piece < pieces.of(low)) return;
    const int from = max(pieces.start(piece), low / T * T), hi = min(pieces.start(piece + 1), end), to = QONLY ? end : start;
    const int* table = tables + (size_t)s * mb;
    if (QONLY) pdl_wait();
    Tile kt, vt;
    kt.fetch(ks, k_pool, k_scales, k_subs, table, kv, from, low, to, end, false);
    vt.fetch(vs, v_pool, v_scales, v_subs, table, kv, from, low, to, end, true);
    // Of fresh rows, keys are for odd warps from the last on, values for even ones
    const int  fw = (W - 1 - warp) / 2;
    const bool is_v = (W - 1 - warp) & 1, has_fresh = !QONLY && end > start && hi > start && from < end;
    Head gq, gk;
    Turn turn[SHARE], fturn;
    if (NORM == 1) { gq = quads(q_norm, lane); if (!QONLY) gk = quads(k_norm, lane); }
    #pragma unroll
    for (int r = 0; r < SHARE; r++) turn[r].load(cos, sin, at, axes, min(t + r, rows - 1), rows, lane);
    if (has_fresh && !is_v) fturn.load(cos, sin, at, axes, r0 + min(fw, nf - 1), rows, lane);
    const long long fslot = has_fresh ? slots[r0 + min(fw, nf - 1)] : -1;
    if (!QONLY) pdl_wait();

    constexpr int KQ = (GATE + 1) * HEADS * D, VQ = KEQV ? KQ : KQ + KV * D;  // where keys and values begin in a row
    Head q[SHARE][QI], fr;
    #pragma unroll
    for (int r = 0; r < SHARE; r++)
        #pragma unroll
        for (int i = 0; i < QI; i++) q[r][i] = quads(qkv + (size_t)(t + (r < n ? r : 0)) * WIDTH + (GATE * HEADS + h0 + min(warp + i * W, gb - 1)) * D, lane);
    if (has_fresh) fr = quads(qkv + (size_t)(r0 + min(fw, nf - 1)) * WIDTH + (is_v ? VQ : KQ) + kv * D, lane);
    float inv[SHARE];
    if constexpr (NORM == 2) {  // over all heads of a row
        #pragma unroll 1
        for (int r = 0; r < n; r++) {
            float a = 0.f;
            const float* x = qkv + (size_t)(t + r) * WIDTH + GATE * HEADS * D;
            for (int i = threadIdx.x; i < HEADS * D; i += THREADS) a = fmaf(x[i], x[i], a);
            a = rsqrtf(fmaf(block_sum(a), 1.f / (HEADS * D), eps));
            #pragma unroll
            for (int k = 0; k < SHARE; k++) if (k == r) inv[k] = a;
        }
    }
    const float factor = __fmul_rn(scale, LOG2E);
    #pragma unroll
    for (int r = 0; r < SHARE; r++)
        #pragma unroll
        for (int i = 0; i < QI; i++) {
            const int g = warp + i * W;
            if (r >= n || g >= gb) continue;
            Head& x = q[r][i];
            if (NORM == 1) times(x, rms(x, eps), gq);
            if (NORM == 2) times(x, inv[r], quads(q_all + (h0 + g) * D, lane));
            turn[r](x, scratch + warp * D, lane);
            #pragma unroll
            for (int k = 0; k < I; k++) {
                const int u = lane + 32 * k;
                if (u < D / 4) qf[(r * KS + u / 4) * 32 + g * 4 + u % 4] =
                    b_fragment(limbs(__fmul_rn(x.v[k][0], factor), __fmul_rn(x.v[k][1], factor)), limbs(__fmul_rn(x.v[k][2], factor), __fmul_rn(x.v[k][3], factor)));
            }
        }
    if (threadIdx.x < SHARE * 8) { top[threadIdx.x] = NONE; sum[threadIdx.x] = 0.f; }

    // Turn the fresh rows that lie in this tile, keep them here, and put those of this block's rows into the cache
    auto fresh = [&](int lo) {
        #pragma unroll 1
        for (int f = fw; f < nf; f += W / 2) {
            const int j = start + f;
            if (j < lo || j >= lo + T || j >= end) continue;
            Head x = f == fw ? fr : quads(qkv + (size_t)(r0 + f) * WIDTH + (is_v ? VQ : KQ) + kv * D, lane);
            Head one;
            #pragma unroll
            for (int i = 0; i < I; i++) for (int k = 0; k < 4; k++) one.v[i][k] = 1.f;
            if (is_v) { if (VNORM) times(x, rms(x, eps), one); }
            else {
                if (NORM == 1) times(x, rms(x, eps), gk);
                if constexpr (NORM == 2) {  // a warp for itself: there are few key heads
                    const float* all = qkv + (size_t)(r0 + f) * WIDTH + KQ;
                    float a = 0.f;
                    for (int i = lane; i < KV * D; i += 32) a = fmaf(all[i], all[i], a);
                    times(x, rsqrtf(fmaf(warp_sum(a), 1.f / (KV * D), eps)), quads(k_all + kv * D, lane));
                }
                if (f != fw) fturn.load(cos, sin, at, axes, r0 + f, rows, lane);
                fturn(x, scratch + warp * D, lane);
            }
            KvRow<FMT, D> row;
            row.encode((const float4*)x.v, lane);
            row.stage(is_v ? vs[j - lo] : ks[j - lo], lane);
            if (FMT && !lane) (is_v ? vsc : ksc)[j - lo] = __fmul_rn(row.scale, KV_UNIT<FMT>);
            if (f >= back && hg == 0) {
                const long long slot = f == fw ? fslot : slots[r0 + f];
                if (slot >= 0) { if (is_v) row.store(v_pool, v_scales, v_subs, slot * KV + kv, lane); else row.store(k_pool, k_scales, k_subs, slot * KV + kv, lane); }
            }
        }
    };

    float acc[SHARE][VT][4] = {};
    #pragma unroll 1
    for (int lo = from; lo < hi; lo += T) {
        cp_async_wait<1>();
        kt.land(ks, ksc, lo, to, end);
        if (FMT) vt.land(vs, vsc, lo, to, end);
        if (has_fresh && lo + T > start) fresh(lo);
        __syncthreads();
        {   // scores: a warp takes 16 positions and a part of the head
            const int m = warp % MT, part = warp / MT;
            if (lo + m * 16 < hi) {
                float c[SHARE][4][4] = {};
                #pragma unroll
                for (int k = 0; k < KP; k++) {
                    const int kk = part * KP + k;
                    if (KS % SPLIT && kk >= KS) break;
                    unsigned a[4];
                    ldmatrix_x4(a, &ks[m * 16 + lane % 16][kk * 2 + lane / 16]);
                    #pragma unroll
                    for (int r = 0; r < SHARE; r++) {
                        if (r >= n) break;
                        uint4 b = make_uint4(0, 0, 0, 0);
                        if (lane / 4 < gb) b = qf[(r * KS + kk) * 32 + lane];
                        mma_bf16(c[r][k % 2 * 2], a, &b.x);
                        mma_bf16(c[r][k % 2 * 2 + 1], a, &b.z);
                    }
                }
                #pragma unroll
                for (int r = 0; r < SHARE; r++)
                    #pragma unroll
                    for (int i = 0; i < 4; i++)
                        if (r < n) sc[(r * SPLIT + part) * 8 + lane % 4 * 2 + i % 2][m * 16 + lane / 4 + i / 2 * 8] =
                            __fadd_rn(__fadd_rn(c[r][0][i], c[r][2][i]), __fadd_rn(c[r][1][i], c[r][3][i]));
            }
        }
        __syncthreads();
        const bool more = lo + T < hi;
        if (more) kt.fetch(ks, k_pool, k_scales, k_subs, table, kv, lo + T, low, to, end, false);
        else cp_async_commit();
        #pragma unroll
        for (int r = 0; r < SHARE; r++)
            #pragma unroll
            for (int i = 0; i < QI; i++) {  // weights: a warp takes a head, a lane two positions
                const int g = warp + i * W, j = lo + 2 * lane, at8 = r * 8 + g;
                if (r >= n || g >= gb) continue;
                float2 x = make_float2(NONE, NONE), w = make_float2(1.f, 1.f);
                if (2 * lane < T) {
                    x = *(const float2*)&sc[r * SPLIT * 8 + g][2 * lane];
                    #pragma unroll
                    for (int k = 1; k < SPLIT; k++) { const float2 z = *(const float2*)&sc[(r * SPLIT + k) * 8 + g][2 * lane]; x.x = __fadd_rn(x.x, z.x); x.y = __fadd_rn(x.y, z.y); }
                    if (FMT) { w = *(const float2*)&ksc[2 * lane]; x.x = __fmul_rn(x.x, w.x); x.y = __fmul_rn(x.y, w.y); w = *(const float2*)&vsc[2 * lane]; }
                }
                const int  p = p0 + r, l = lowest(p);
                const bool u = 2 * lane < T && j <= p && j >= l, v = 2 * lane < T && j + 1 <= p && j + 1 >= l;
                const float old = top[at8], m = fmaxf(old, warp_max(fmaxf(u ? x.x : NONE, v ? x.y : NONE))), base = m == NONE ? 0.f : m;
                const float e = u ? exp2f(__fsub_rn(x.x, base)) : 0.f, f = v ? exp2f(__fsub_rn(x.y, base)) : 0.f, d = exp2f(__fsub_rn(old, base));
                const float all = warp_sum(__fadd_rn(e, f));
                __syncwarp();
                if (!lane) { top[at8] = m; sum[at8] = fmaf(sum[at8], d, all); fade[at8] = d; }
                const Pair b = limbs(u ? __fmul_rn(e, w.x) : 0.f, v ? __fmul_rn(f, w.y) : 0.f);
                if (2 * lane < T) {
                    unsigned* to = (unsigned*)&pf[(r * MT + lane / 8) * 32 + g * 4 + lane % 4] + lane % 8 / 4;
                    to[0] = b.hi; to[2] = b.lo;
                }
            }
        cp_async_wait<1>();
        __syncthreads();
        {   // values: a warp takes 16 elements of the head at a time
            float c[SHARE][VT][2][4] = {};
            #pragma unroll
            for (int k = 0; k < MT; k++) {
                if (lo + k * 16 >= hi) break;
                uint4 b[SHARE];
                #pragma unroll
                for (int r = 0; r < SHARE; r++) { b[r] = make_uint4(0, 0, 0, 0); if (r < n && lane / 4 < gb) b[r] = pf[(r * MT + k) * 32 + lane]; }
                #pragma unroll
                for (int i = 0; i < VT; i++) {
                    const int d = warp + i * W;
                    if (KS % W && d >= KS) break;
                    unsigned a[4];
                    ldmatrix_x4_trans(a, &vs[k * 16 + lane % 8 + lane / 16 * 8][d * 2 + lane / 8 % 2]);
                    #pragma unroll
                    for (int r = 0; r < SHARE; r++) { if (r >= n) break; mma_bf16(c[r][i][0], a, &b[r].x); mma_bf16(c[r][i][1], a, &b[r].z); }
                }
            }
            #pragma unroll
            for (int r = 0; r < SHARE; r++) {
                if (r >= n) break;
                const float2 f = *(const float2*)&fade[r * 8 + lane % 4 * 2];
                #pragma unroll
                for (int i = 0; i < VT; i++)
                    #pragma unroll
                    for (int k = 0; k < 4; k++) acc[r][i][k] = SHARE == 1 ? fmaf(acc[r][i][k], k % 2 ? f.y : f.x, __fadd_rn(c[r][i][0][k], c[r][i][1][k])) : acc[r][i][k] * (k % 2 ? f.y : f.x) + c[r][i][0][k] + c[r][i][1][k];
            }
        }
        if (more) {
            __syncthreads();
            vt.fetch(vs, v_pool, v_scales, v_subs, table, kv, lo + T, low, to, end, true);
        }
    }
    #pragma unroll
    for (int r = 0; r < SHARE; r++) {
        const int p = p0 + r, a = pieces.of(lowest(p)), z = pieces.of(p);
        if (r >= n || piece < a || piece > z) continue;
        const size_t cell = ((size_t)(t + r) * gridDim.x + piece - a) * HEADS + h0;
        if (a != z && threadIdx.x < gb) *(float2*)(ml + (cell + threadIdx.x) * 2) = make_float2(top[r * 8 + threadIdx.x], sum[r * 8 + threadIdx.x]);
        #pragma unroll
        for (int k = 0; k < 2; k++) {
            const int g = lane % 4 * 2 + k;
            if (g >= gb) continue;
            float f = 1.f, l = 1.f;
            if (a == z) {
                const float m = top[r * 8 + g], sink = sinks ? __fmul_rn(sinks[h0 + g], LOG2E) : NONE, base = fmaxf(m, sink);
                f = exp2f(__fsub_rn(m, base)); l = fmaf(sum[r * 8 + g], f, exp2f(__fsub_rn(sink, base)));
            }
            #pragma unroll
            for (int i = 0; i < VT; i++)
                #pragma unroll
                for (int e = 0; e < 2; e++) {
                    const int d = (warp + i * W) * 16 + lane / 4 + e * 8;
                    if (KS % W && d >= D) continue;
                    float v = acc[r][i][e * 2 + k];
                    if (a != z) o[(cell + g) * D + d] = v;
                    else {
                        v = __fmul_rn(v, f) / l;
                        if (GATE) v = gated(v, qkv[(size_t)(t + r) * WIDTH + (h0 + g) * D + d]);
                        y[((size_t)(t + r) * HEADS + h0 + g) * D + d] = v;
                    }
                }
        }
    }
}
