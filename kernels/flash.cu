// Attention of a prefill step over the paged cache: tiles of 64 positions against all keys up to
// their own, without the scores ever leaving the registers (Dao 2023). A block serves a tile's rows
// for HB query heads of one key head, a warp 16 rows of one head and DB columns of its values; keys
// come in pieces at fixed positions, so that a row's bits depend on its own position only. fp16
// products, float32 sums. With WGMMA, for Hopper, a group of four warps has all 64 rows of a head,
// and one more fetches (lib/flash_groups.cuh).
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

// What the kernel is given, in the order of its arguments.
struct Params {
    // turned by flash_prep.cu; halves: DIM, or 2*DIM in format 4: what one half leaves is in
    // another
    const __half* q;  // [r, heads, halves] f16
    // keys and values of this step's rows, as the cache would give them
    const __half* kf;  // [r, kv, halves] f16 or null
    const __half* vf;  // [r, kv, halves] f16 or null
    // gates in the first columns, or null: no gate
    const float* qkv;  // [r, width] f32 or null
    // the cache: lib/kvcache.cuh
    const unsigned char* k;  // [blocks, bs, kv, bytes] u8
    const float* k_scale;  // [blocks, bs, kv] f32 or null
    const unsigned char* k_sub;  // [blocks, bs, kv, subs] u8 or null
    const unsigned char* v;  // [blocks, bs, kv, bytes] u8
    const float* v_scale;  // [blocks, bs, kv] f32 or null
    const unsigned char* v_sub;  // [blocks, bs, kv, subs] u8 or null
    const int* tables;  // [seqs, mb] i32: block tables
    // position of a sequence's first row: earlier ones come from the cache
    const int* starts;  // [seqs] i32
    const int* tile_seq;  // [tiles] i32: sequence of a tile (-1: none)
    const int* tile_start;  // [tiles] i32: position of its row 0
    const int* tile_lo;  // [tiles] i32: its real rows are lo..hi-1
    const int* tile_hi;  // [tiles] i32
    // one more logit for each head, without a value
    const float* sinks;  // [heads] f32 or null
    float* out;  // [r, qd] f32: qd = heads*DIM; zeros in rows that are not real
    // WGMMA and FORMAT 3: of k and v, boxes of 8 rows of a head (lib/boxes.cuh); bs a multiple of
    // 8, and kf, vf are not read
    const TensorMap& k_map;
    const TensorMap& v_map;
    float scale;  // of products of queries and keys
    int window;  // keys that a row sees, itself included; 0: all
    int heads;  // of queries
    int kv;  // of keys
    int width;  // numbers of a row of qkv
    int bs;  // positions of a block of the cache
    int mb;  // blocks of a table
};

// What a block has: the longest tiles first, and HB heads from h0 on.
struct Work {
    int t, h0, head;  // head: of keys
    int seq, start, lo, hi;
    __device__ __forceinline__ explicit Work(const Params& p) {
        t = gridDim.y - 1 - blockIdx.y;
        h0 = blockIdx.x * HB;
        head = h0 / (p.heads / p.kv);
        seq = p.tile_seq[t];
        start = p.tile_start[t];
        lo = seq < 0 ? 0 : p.tile_lo[t];
        hi = seq < 0 ? 0 : p.tile_hi[t];
    }
    // Position of the first row whose keys do not come from the cache.
    __device__ __forceinline__ int fresh(const Params& p) const {
        return p.kf && hi ? p.starts[seq] : 1 << 30;
    }
};

// What a lane has of a head's results: rows row0 and row0 + 8, and pairs of columns from
// from + c2 on, eight apart.
struct Lane {
    int h, row0, from, c2;
};

// The lane of a warp whose columns begin at `from`.
__device__ __forceinline__ Lane lane_of(
        const Work& w, int warp, int lane, int from) {
    const int h = w.h0 + warp / 4 % HB;
    const int row0 = warp % 4 * 16 + lane / 4;
    return {h, row0, from, lane % 4 * 2};
}

// A row's results, which its weights were not yet divided for, times its gate. `l`: the sum of its
// weights, `top`: the largest score; of a row that is not real zeros.
__device__ __forceinline__ void put_row(
        const Params& p, const Work& w, const Lane& at, const float* o, float l,
        float top, float unit, int r) {
    const int row = at.row0 + r * 8;
    float f = 1.f;
    l += __shfl_xor_sync(~0u, l, 1);
    l += __shfl_xor_sync(~0u, l, 2);
    if (p.sinks) {
        const float sink = p.sinks[at.h] * 1.4426950408889634f;
        const float both = fmaxf(top * unit, sink);
        f = power2(top * unit - both);
        l = l * f + power2(sink - both);
    }
    f = f / l;
    const bool real = row >= w.lo && row < w.hi;
    const size_t line = (size_t)w.t * TILE + row;
    const float* gate = p.qkv
            ? p.qkv + line * p.width + at.h * DIM + at.from + at.c2
            : nullptr;
    float* to = p.out + (line * p.heads + at.h) * DIM + at.from + at.c2;
    #pragma unroll
    for (int n = 0; n < DB / 8; n++) {
        float2 y = make_float2(o[4 * n + 2 * r] * f, o[4 * n + 2 * r + 1] * f);
        if (gate && real) {
            const float2 g = *(const float2*)(gate + n * 8);
            y.x = __fdividef(y.x, 1.f + power2(-1.4426950408889634f * g.x));
            y.y = __fdividef(y.y, 1.f + power2(-1.4426950408889634f * g.y));
        }
        *(float2*)(to + n * 8) = real ? y : make_float2(0.f, 0.f);
    }
}

// And of both rows of a lane.
__device__ __forceinline__ void put_rows(
        const Params& p, const Work& w, const Lane& at, const float* o,
        const float* sum, const float* top, float unit) {
    #pragma unroll
    for (int r = 0; r < 2; r++)
        put_row(p, w, at, o, sum[r], top[r], unit, r);
}

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

// A piece that not all rows see whole: what this thread's rows, `row0` and eight further, do not
// see gets no weight. c2: the first column of this thread.
__device__ __forceinline__ void mask(
        float (&s)[KEYS / 8][4], int start, int row0, int first, int c2,
        int window) {
    if (first + KEYS <= start + 1 && !(window && start + TILE > first + window))
        return;
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

// Which keys the rows of a tile see: pieces of KEYS from `begin` on. Those from `fresh` on are rows
// of this step.
struct Seen {
    int length, seen, begin, pieces, fresh;
    __device__ __forceinline__ Seen(const Params& p, const Work& w) {
        length = w.start + w.hi;
        seen = p.window ? max(0, w.start - p.window + 1) : 0;
        begin = seen / TILE * TILE;
        pieces = w.hi ? (length - begin + KEYS - 1) / KEYS : 0;
        fresh = w.fresh(p);
    }
};

// Where all lies in shared memory: queries, a piece of keys and of values, and, of this piece and
// the next, slots and their scales, of keys and of values.
struct Room {
    unsigned char *q, *k, *v;
    int (*slots)[KEYS];
    float (*scales)[2][KEYS];
    __device__ __forceinline__ explicit Room(unsigned char* at) {
        q = at;
        k = q + TILE * HB * STEP;
        v = k + KEYS * STEP;
        slots = (int (*)[KEYS])(v + KEYS * STEP);
        scales = (float (*)[2][KEYS])(slots + 2);
    }
};

// Slots of piece i, and their scales.
__device__ __forceinline__ void locate(
        const Params& p, const Work& w, const Seen& keys, const Room& room, int i,
        int tid) {
    if (tid >= KEYS)
        return;
    const int at = keys.begin + i * KEYS + tid;
    const int* const table = p.tables + (size_t)w.seq * p.mb;
    int s = -1;
    if (at >= keys.seen && at < keys.length)
        s = at >= keys.fresh ? -2 - (w.t * TILE + at - w.start)
                             : table[at / p.bs] * p.bs + at % p.bs;
    room.slots[i % 2][tid] = s;
    if (KV_CODED<FORMAT> && s >= 0) {
        const size_t cell = (size_t)s * p.kv + w.head;
        float (*const scales)[KEYS] = room.scales[i % 2];
        scales[0][tid] = kv_scale<FORMAT>(p.k_scale, cell);
        scales[1][tid] = kv_scale<FORMAT>(p.v_scale, cell);
    }
}

// Queries of a tile's rows are asked for.
__device__ __forceinline__ void ask_queries(
        const Params& p, const Work& w, unsigned char* to, int tid) {
    for (int i = tid; i < TILE * HB * (WIDE / 8); i += THREADS) {
        const int r = i / (WIDE / 8);
        const int c = i % (WIDE / 8);
        const size_t row = (size_t)w.t * TILE + r % TILE;
        const size_t cell = row * p.heads + w.h0 + r / TILE;
        const __half* const from = p.q + cell * WIDE + c * 8;
        cp_async16(to + r * STEP + c * 16, from);
    }
}

// s += sixteen rows of queries times a piece of keys.
__device__ __forceinline__ void score(
        float (&s)[KEYS / 8][4], const unsigned char* queries,
        const unsigned char* keys, int lane) {
    #pragma unroll
    for (int e = 0; e < DIM / 16; e++) {
        unsigned a[P][4];
        #pragma unroll
        for (int x = 0; x < P; x++)
            ldmatrix_x4(a[x], queries + (e * P + x) * 32);
        #pragma unroll
        for (int n = 0; n < KEYS / 8; n += 2)
            #pragma unroll
            for (int y = 0; y < P; y++) {
                unsigned b[4];
                const int row = n * 8 + lane % 8 + lane / 16 * 8;
                const int column = (e * P + y) * 16 + lane / 8 % 2 * 8;
                ldmatrix_x4(b, keys + row * STEP + column * 2);
                #pragma unroll
                for (int x = 0; x < P - y;
                        x++) {  // what two rests make is nothing
                    mma_f16(s[n], a[x], b);
                    mma_f16(s[n + 1], a[x], b + 2);
                }
            }
    }
}

// o += weights times DB columns, from `from` on, of a piece of values.
__device__ __forceinline__ void gather(
        float (&o)[DB / 2], const unsigned (&p)[P][KEYS / 16][4],
        const unsigned char* values, int from, int lane) {
    #pragma unroll
    for (int e = 0; e < KEYS / 16; e++)
        #pragma unroll
        for (int n = 0; n < DB / 8; n += 2)
            #pragma unroll
            for (int y = 0; y < P; y++) {
                unsigned b[4];
                const int row = e * 16 + lane % 16;
                const int column = (from + n * 8) * P + y * 16 + lane / 16 * 8;
                ldmatrix_x4_trans(b, values + row * STEP + column * 2);
                #pragma unroll
                for (int x = 0; x < P - y; x++) {
                    mma_f16(o + 4 * n, p[x][e], b);
                    mma_f16(o + 4 * n + 4, p[x][e], b + 2);
                }
            }
}
#endif

#if WGMMA
// By a group of four warps: all pieces of keys and values.
__device__ __forceinline__ void fetch_all(
        const Params& p, const Work& w, const Job& job, int warp, int lane) {
    const int* const table = p.tables + (size_t)w.seq * p.mb;
    if constexpr (BOXED) {
        Boxes f{job, table, p.bs, lane, (int)blockIdx.x % TEAM};
        if (warp == 4 * GROUPS)
            f.all(p.k_map, p.v_map);
    } else {
        Fetcher f{job, table, p.bs, p.kv, w.fresh(p), w.t * TILE, warp % 4, lane,
                p.k_scale, p.v_scale};
        const Origin k = {p.k, p.k_sub, p.kf};
        const Origin v = {p.v, p.v_sub, p.vf};
        f.all(k, v);
    }
}

// A block of warpgroups: one fetches, each of the others multiplies for a head, or for some of its
// columns.
__device__ __forceinline__ void attend(
        const Params& p, unsigned char* memory, int tid) {
    const int warp = tid / 32;
    const int lane = tid % 32;
    const Work w(p);
    const Job job(memory, w.start, w.hi, p.window, w.head);
    const bool fetches = warp >= 4 * GROUPS;
    share_out(fetches);
    if (fetches) {
        fetch_all(p, w, job, warp, lane);
        if (TEAM > 1)
            team_sync();
        return;
    }
    Softmax soft;
    soft.unit = p.scale * 1.4426950408889634f;
    Multiplier m{job, warp / 4 % HB, warp / 4 / HB};
    if (job.pieces) {
        const size_t row = (size_t)w.t * TILE;
        const size_t first = row * p.heads + w.h0 + m.rank;
        const size_t step = (size_t)p.heads * DIM;
        m.ask(p.q + first * DIM, step);
        m.all(soft, p.window);
    }
    if (TEAM > 1)
        team_sync();
    const Lane at = lane_of(w, warp, lane, m.part * DB);
    put_rows(p, w, at, m.o, soft.sum, soft.top, 1.f);
}
#else
// A block of warps, which fetch for all and multiply each for itself: the next piece of keys comes
// while values are weighed, that of values while keys are scored.
__device__ __forceinline__ void attend(
        const Params& p, unsigned char* memory, int tid) {
    const Room room(memory);
    const int lane = tid % 32;
    const int warp = tid / 32;
    const Work w(p);
    const Seen keys(p, w);
    const auto fetch_keys = [&](int i) {
        fetch(room.k, p.k, p.kf, room.slots[i % 2], p.kv, w.head);
    };
    const auto fetch_values = [&](int i) {
        fetch(room.v, p.v, p.vf, room.slots[i % 2], p.kv, w.head);
    };
    if (keys.pieces) {
        locate(p, w, keys, room, 0, tid);
        ask_queries(p, w, room.q, tid);
        __syncthreads();
        fetch_keys(0);
        cp_async_commit();
        fetch_values(0);
        cp_async_commit();
    }
    float o[DB / 2] = {};
    float top[2] = {NONE, NONE};
    float sum[2] = {};
    const Lane at = lane_of(w, warp, lane, warp / (4 * HB) * DB);
    const float unit = p.scale * 1.4426950408889634f;
    const int row = warp % (4 * HB) * 16 + lane % 16;
    const unsigned char* mine = room.q + row * STEP + lane / 16 * 16;
    #pragma unroll 1
    for (int i = 0; i < keys.pieces; i++) {
        const bool more = i + 1 < keys.pieces;
        const int first = keys.begin + i * KEYS;
        const int* const slots = room.slots[i % 2];
        const float (*const scales)[KEYS] = room.scales[i % 2];
        cp_async_wait<1>();
        if (first < keys.fresh)
            finish(room.k, p.k, p.k_sub, slots, scales[0], p.kv, w.head);
        if (more)
            locate(p, w, keys, room, i + 1, tid);
        __syncthreads();
        float s[KEYS / 8][4] = {};
        score(s, mine, room.k, lane);
        __syncthreads();
        if (more)
            fetch_keys(i + 1);
        cp_async_commit();
        mask(s, w.start, at.row0, first, at.c2, p.window);
        unsigned weights[P][KEYS / 16][4];
        weigh(s, weights, top, sum, o, unit);
        cp_async_wait<1>();
        if (first < keys.fresh)
            finish(room.v, p.v, p.v_sub, slots, scales[1], p.kv, w.head);
        __syncthreads();
        gather(o, weights, room.v, at.from, lane);
        __syncthreads();
        if (more)
            fetch_values(i + 1);
        cp_async_commit();
    }
    put_rows(p, w, at, o, sum, top, unit);
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
    const Params p = {q, kf, vf, qkv, k, k_scale, k_sub, v, v_scale, v_sub,
            tables, starts, tile_seq, tile_start, tile_lo, tile_hi, sinks, out,
            k_map, v_map, scale, window, heads, kv, width, bs, mb};
    DYNAMIC_SHARED(unsigned char, memory);
    attend(p, memory, threadIdx.x);
}
