// Attention of a prefill step over the paged cache: tiles of 64 positions against all keys up to
// their own, without the scores ever leaving the registers (Dao 2023). A block serves a tile's rows
// for HB query heads of one key head, a warp 16 rows of one head and DB columns of its values; keys
// come in pieces at fixed positions, so that a row's bits depend on its own position only. fp16
// products, float32 sums. With WGMMA, for Hopper, a group of four warps has all 64 rows of a head,
// and one more fetches (lib/flash_groups.cuh).
//   q        : [r, heads, halves]     f16   turned by flash_prep.cu; halves: DIM, or 2*DIM in
//                                           format 4: what one half leaves is in another
//   kf, vf   : [r, kv, halves]        f16   or null: keys and values of this step's rows, as the
//                                           cache would give them
//   qkv      : [r, width]             f32   gates in the first columns, or null: no gate
//   k, v     : [blocks, bs, kv, bytes] u8   lib/kvcache.cuh
//   k_scale, v_scale : [blocks, bs, kv] f32 or null
//   k_sub, v_sub : [blocks, bs, kv, subs] u8 or null
//   tables   : [seqs, mb]             i32   block tables
//   starts   : [seqs]                 i32   position of a sequence's first row: earlier ones come
//                                           from the cache
//   tile_seq, tile_start, tile_lo, tile_hi : [tiles] i32   sequence (-1: none), position of row 0,
//        real rows lo..hi-1
//   sinks    : [heads]                f32   or null: one more logit for each head, without a value
//   out      : [r, qd]                f32   qd = heads*DIM; zeros in rows that are not real
//   k_map, v_map                          WGMMA and FORMAT 3: of k and v, boxes of 8 rows of a head
//                                         (lib/boxes.cuh); bs a multiple of 8, and kf, vf are not
//                                         read
//   window 0: none
//   -D DIM= (head size, a multiple of 16) DB= (columns of a warp: DIM, or a part of it) HB= (heads
//           of a block) KEYS= (of a piece) FORMAT= WGMMA= (1: by warpgroups) STAGES= (pieces in
//           shared memory) SIDE= (blocks of a multiprocessor) TEAM= (with FORMAT 3: blocks that
//           follow each other, of one key head, and share what is fetched)
//   launch: <<<(heads/HB, tiles), 128*HB*DIM/DB, 64*HB*(2*halves+16) + KEYS*(4*halves+32) +
//        24*KEYS>>>
//   or, WGMMA: <<<(heads/HB, tiles), 128*(HB*DIM/DB + 1), 1024 + 128*HB*DIM + STAGES*(2*KEYS*DIM +
//        16)>>>
#include "lib/async.cuh"
#include "lib/boxes.cuh"
#include "lib/halves.cuh"
#include "lib/kvcache.cuh"
#include "lib/mma.cuh"
#include "lib/team.cuh"
#ifndef DIM
#define DIM 256
#endif
#ifndef DB
#define DB DIM
#endif
#ifndef HB
#define HB 1
#endif
#ifndef KEYS
#define KEYS 64
#endif
#ifndef FORMAT
#define FORMAT 0
#endif
#ifndef WGMMA
#define WGMMA 0
#endif
#ifndef STAGES
#define STAGES 4
#endif
#ifndef SIDE
#define SIDE 1
#endif
#ifndef TEAM
#define TEAM 1
#endif
constexpr int TILE = 64;
constexpr int PARTS = DIM / DB;
constexpr int GROUPS = HB * PARTS;
constexpr int THREADS = 128 * (GROUPS + WGMMA);
// halves of a number, and of a row
constexpr int P = KV_PLANES<FORMAT>, WIDE = DIM * P;
// bytes of a row: sixteen more than needed, against bank conflicts
constexpr int STEP = 2 * WIDE + 16;
// minus infinity; NVRTC knows no INFINITY
#define NONE __int_as_float(0xFF800000)

#if WGMMA
#include "lib/flash_groups.cuh"
#else
// A piece of keys or values on its way to shared memory, as fp16 rows. A slot of the cache, or -1:
// nobody looks, zeros, or -2-r: row r of this step. A thread converts what it has fetched itself,
// so nobody need wait in between.
__device__ __forceinline__ void fetch(
        unsigned char* to, const unsigned char* pool, const __half* own,
        const int* slots, int kv, int head) {
    for (int i = threadIdx.x; i < KEYS * (WIDE / 8); i += THREADS) {
        const int r = i / (WIDE / 8);
        const int c = i % (WIDE / 8);
        const int s = slots[r];
        if (KV_CODED<FORMAT> && s >= 0)
            continue;
        const void* from = pool;
        if (s != -1)
            from = s < 0
                    ? (const void*)(own + ((size_t)(-2 - s) * kv + head) * WIDE
                              + c * 8)
                    : (const void*)(pool
                              + (((size_t)s * kv + head) * WIDE + c * 8) * 2);
        cp_async16_or_zero(to + r * STEP + c * 16, from, s != -1);
    }
}
__device__ __forceinline__ void finish(
        unsigned char* to, const unsigned char* pool, const unsigned char* sub,
        const int* slots, const float* scales, int kv, int head) {
    if (FORMAT >= 3)
        return;  // are halves already
    for (int i = threadIdx.x; i < KEYS * (DIM / (FORMAT ? 16 : 8));
            i += THREADS) {
        if (!FORMAT) {
            uint4* at = (uint4*)(to + i / (DIM / 8) * STEP + i % (DIM / 8) * 16);
            if (slots[i / (DIM / 8)] >= 0)
                *at = kv_halves<0>(*at, 1.f);
        } else if constexpr (KV_CODED<FORMAT>) {
            const int r = i / (DIM / 16);
            const int c = i % (DIM / 16);
            const int s = slots[r];
            if (s < 0)
                continue;
            KvUnit<FORMAT> u;
            uint4 a;
            uint4 b;
            uint4* at = (uint4*)(to + r * STEP + c * 32);
            u.template load<DIM>(pool, sub, (size_t)s * kv + head, c);
            u.bf16(a, b);
            at[0] = kv_halves<FORMAT>(a, scales[r]);
            at[1] = kv_halves<FORMAT>(b, scales[r]);
        }
    }
}
#endif

#if !WGMMA
// A piece that not all rows see whole: what this thread's rows, `row0` and eight further, do not
// see gets no weight. c2: the first column of this thread.
__device__ __forceinline__ void mask(
        float (&s)[KEYS / 8][4], int start, int row0, int first, int c2,
        int window) {
    #pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            const int gap = start + row0 + j / 2 * 8
                    - (first + n * 8 + c2 + j % 2);
            if (gap < 0 || (window && gap >= window))
                s[n][j] = NONE;
        }
}

// Scores become weights, pairs of fp16; what was gathered so far shrinks where a larger score came.
__device__ __forceinline__ void weigh(
        const float (&s)[KEYS / 8][4], unsigned (&p)[P][KEYS / 16][4],
        float (&top)[2], float (&sum)[2], float* o, float unit) {
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        float best = NONE;
        #pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
            best = fmaxf(best, fmaxf(s[n][2 * r], s[n][2 * r + 1]));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
        best = fmaxf(fmaxf(best, __shfl_xor_sync(~0u, best, 2)), top[r]);
        // NONE: nothing seen so far
        const float zero = best == NONE ? 0.f : best;
        const float shrink = power2((top[r] - zero) * unit);
        top[r] = best;
        sum[r] *= shrink;
        #pragma unroll
        for (int n = 0; n < KEYS / 8; n++) {
            const float x = power2((s[n][2 * r] - zero) * unit);
            const float y = power2((s[n][2 * r + 1] - zero) * unit);
            const __half2 h = __floats2half2_rn(x, y);
            sum[r] += x + y;
            p[0][n / 2][n % 2 * 2 + r] = *reinterpret_cast<const unsigned*>(&h);
            if (P == 2)
                p[P - 1][n / 2][n % 2 * 2 + r] = half2_rest(x, y);
        }
        #pragma unroll
        for (int n = 0; n < DB / 8; n++) {
            o[4 * n + 2 * r] *= shrink;
            o[4 * n + 2 * r + 1] *= shrink;
        }
    }
}

#endif

extern "C" TEAM_OF(TEAM) __global__ void __launch_bounds__(THREADS, SIDE) flash(
        const __half* __restrict__ q, const __half* __restrict__ kf,
        const __half* __restrict__ vf, const float* __restrict__ qkv,
        const unsigned char* __restrict__ k, const float* __restrict__ k_scale,
        const unsigned char* __restrict__ k_sub,
        const unsigned char* __restrict__ v, const float* __restrict__ v_scale,
        const unsigned char* __restrict__ v_sub, const int* __restrict__ tables,
        const int* __restrict__ starts, const int* __restrict__ tile_seq,
        const int* __restrict__ tile_start, const int* __restrict__ tile_lo,
        const int* __restrict__ tile_hi, const float* __restrict__ sinks,
        float* out, const __grid_constant__ TensorMap k_map,
        const __grid_constant__ TensorMap v_map, float scale, int window,
        int heads, int kv, int width, int bs, int mb) {
#if WGMMA
    DYNAMIC_SHARED(unsigned char, room);
    const int tid = threadIdx.x;
    const int warp = tid / 32;
    const int lane = tid % 32;
    const int t = gridDim.y - 1 - blockIdx.y;
    const int h0 = blockIdx.x * HB;
    const int seq = tile_seq[t];
    const int start = tile_start[t];
    const int lo = seq < 0 ? 0 : tile_lo[t];
    const int hi = seq < 0 ? 0 : tile_hi[t];
    const Job job(room, start, hi, window, h0 / (heads / kv));
    if (warp >= 4 * GROUPS) {
        share_out(true);
        const int* const table = tables + (size_t)seq * mb;
        if constexpr (BOXED) {
            Boxes f{job, table, bs, lane, (int)blockIdx.x % TEAM};
            if (warp == 4 * GROUPS)
                f.all(k_map, v_map);
        } else {
            const int fresh = kf && hi ? starts[seq] : 1 << 30;
            Fetcher f{job, table, bs, kv, fresh, t * TILE, warp % 4, lane,
                    k_scale, v_scale};
            f.all({k, k_sub, kf}, {v, v_sub, vf});
        }
        if (TEAM > 1)
            team_sync();
        return;
    }
    share_out(false);
    Softmax soft;
    soft.unit = scale * 1.4426950408889634f;
    Multiplier m{job, warp / 4 % HB, warp / 4 / HB};
    if (job.pieces) {
        m.ask(q + ((size_t)t * TILE * heads + h0 + m.rank) * DIM,
                (size_t)heads * DIM);
        m.all(soft, window);
    }
    if (TEAM > 1)
        team_sync();
    auto& o = m.o;
    const float *sum = soft.sum, *top = soft.top, unit = 1.f;
    const int row0 = warp % 4 * 16 + lane / 4;
    const int c2 = lane % 4 * 2;
    const int from = m.part * DB;
#else
    DYNAMIC_SHARED(unsigned char, room);
    unsigned char* Q = room;
    unsigned char* K = Q + TILE * HB * STEP;
    unsigned char* V = K + KEYS * STEP;
    int (*slots)[KEYS] = (int (*)[KEYS])(V + KEYS * STEP);
    float (*scales)[2][KEYS] = (float (*)[2][KEYS])(slots + 2);
    // the longest first
    const int tid = threadIdx.x;
    const int lane = tid % 32;
    const int warp = tid / 32;
    const int t = gridDim.y - 1 - blockIdx.y;
    const int h0 = blockIdx.x * HB;
    const int head = h0 / (heads / kv);
    const int seq = tile_seq[t];
    const int start = tile_start[t];
    const int lo = seq < 0 ? 0 : tile_lo[t];
    const int hi = seq < 0 ? 0 : tile_hi[t];
    const int length = start + hi;
    const int seen = window ? max(0, start - window + 1) : 0;
    const int begin = seen / TILE * TILE;
    const int pieces = hi ? (length - begin + KEYS - 1) / KEYS : 0;
    const int fresh = kf && hi ? starts[seq] : 1 << 30;
    // Slots of piece i, and their scales
    auto locate = [&](int i) {
        if (tid >= KEYS)
            return;
        const int p = begin + i * KEYS + tid;
        int s = -1;
        if (p >= seen && p < length)
            s = p >= fresh ? -2 - (t * TILE + p - start)
                           : tables[(size_t)seq * mb + p / bs] * bs + p % bs;
        slots[i % 2][tid] = s;
        if (KV_CODED<FORMAT> && s >= 0) {
            scales[i % 2][0][tid] = kv_scale<FORMAT>(
                    k_scale, (size_t)s * kv + head);
            scales[i % 2][1][tid] = kv_scale<FORMAT>(
                    v_scale, (size_t)s * kv + head);
        }
    };
    if (pieces) {
        locate(0);
        for (int i = tid; i < TILE * HB * (WIDE / 8); i += THREADS) {
            const int r = i / (WIDE / 8);
            const int c = i % (WIDE / 8);
            cp_async16(
                    Q + r * STEP + c * 16,
                    q
                            + (((size_t)t * TILE + r % TILE) * heads + h0
                                      + r / TILE)
                                    * WIDE
                            + c * 8);
        }
        __syncthreads();
        fetch(K, k, kf, slots[0], kv, head);
        cp_async_commit();
        fetch(V, v, vf, slots[0], kv, head);
        cp_async_commit();
    }
    float o[DB / 2] = {};
    float top[2] = {NONE, NONE};
    float sum[2] = {};
    const int row0 = warp % 4 * 16 + lane / 4;
    const int c2 = lane % 4 * 2;
    const int from = warp / (4 * HB) * DB;
    const float unit = scale * 1.4426950408889634f;
    const unsigned char* mine = Q + (warp % (4 * HB) * 16 + lane % 16) * STEP
            + lane / 16 * 16;
    #pragma unroll 1
    for (int i = 0; i < pieces; i++) {
        const int first = begin + i * KEYS;
        cp_async_wait<1>();
        if (first < fresh)
            finish(K, k, k_sub, slots[i % 2], scales[i % 2][0], kv, head);
        if (i + 1 < pieces)
            locate(i + 1);
        __syncthreads();
        // scores of this warp's sixteen rows of queries and the piece's keys
        float s[KEYS / 8][4] = {};
        #pragma unroll
        for (int e = 0; e < DIM / 16; e++) {
            unsigned a[P][4];
            #pragma unroll
            for (int x = 0; x < P; x++)
                ldmatrix_x4(a[x], mine + (e * P + x) * 32);
            #pragma unroll
            for (int n = 0; n < KEYS / 8; n += 2)
                #pragma unroll
                for (int y = 0; y < P; y++) {
                    unsigned b[4];
                    ldmatrix_x4(
                            b,
                            K + (n * 8 + lane % 8 + lane / 16 * 8) * STEP
                                    + ((e * P + y) * 16 + lane / 8 % 2 * 8) * 2);
                    #pragma unroll
                    for (int x = 0; x < P - y;
                            x++) {  // what two rests make is nothing
                        mma_f16(s[n], a[x], b);
                        mma_f16(s[n + 1], a[x], b + 2);
                    }
                }
        }
        __syncthreads();
        if (i + 1 < pieces)
            fetch(K, k, kf, slots[(i + 1) % 2], kv, head);
        cp_async_commit();
        if (first + KEYS > start + 1 || (window && start + TILE > first + window))
            mask(s, start, row0, first, c2, window);
        unsigned p[P][KEYS / 16][4];
        weigh(s, p, top, sum, o, unit);
        cp_async_wait<1>();
        if (first < fresh)
            finish(V, v, v_sub, slots[i % 2], scales[i % 2][1], kv, head);
        __syncthreads();
        // weighted values join the sums
        #pragma unroll
        for (int e = 0; e < KEYS / 16; e++)
            #pragma unroll
            for (int n = 0; n < DB / 8; n += 2)
                #pragma unroll
                for (int y = 0; y < P; y++) {
                    unsigned b[4];
                    ldmatrix_x4_trans(
                            b,
                            V + (e * 16 + lane % 16) * STEP
                                    + ((from + n * 8) * P + y * 16
                                              + lane / 16 * 8)
                                            * 2);
                    #pragma unroll
                    for (int x = 0; x < P - y; x++) {
                        mma_f16(o + 4 * n, p[x][e], b);
                        mma_f16(o + 4 * n + 4, p[x][e], b + 2);
                    }
                }
        __syncthreads();
        if (i + 1 < pieces)
            fetch(V, v, vf, slots[(i + 1) % 2], kv, head);
        cp_async_commit();
    }
#endif
    const int h = h0 + warp / 4 % HB;
    #pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = row0 + r * 8;
        float l = sum[r], f = 1.f;
        l += __shfl_xor_sync(~0u, l, 1);
        l += __shfl_xor_sync(~0u, l, 2);
        if (sinks) {
            const float sink = sinks[h] * 1.4426950408889634f;
            const float both = fmaxf(top[r] * unit, sink);
            f = power2(top[r] * unit - both);
            l = l * f + power2(sink - both);
        }
        f = f / l;
        const bool real = row >= lo && row < hi;
        const size_t at = (size_t)t * TILE + row;
        const float* gate = qkv ? qkv + at * width + h * DIM + from + c2
                                : nullptr;
        float* to = out + (at * heads + h) * DIM + from + c2;
        #pragma unroll
        for (int n = 0; n < DB / 8; n++) {
            float2 y = make_float2(
                    o[4 * n + 2 * r] * f, o[4 * n + 2 * r + 1] * f);
            if (gate && real) {
                const float2 g = *(const float2*)(gate + n * 8);
                y.x = __fdividef(y.x, 1.f + power2(-1.4426950408889634f * g.x));
                y.y = __fdividef(y.y, 1.f + power2(-1.4426950408889634f * g.y));
            }
            *(float2*)(to + n * 8) = real ? y : make_float2(0.f, 0.f);
        }
    }
}
