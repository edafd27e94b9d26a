#pragma once
// Attention of a tile by warpgroups (Hopper): a group of four warps fetches pieces of keys and
// values into a ring of stages, and a group for each head of the block multiplies them. The product
// with the next keys is under way before the weights of these are made, and the one with values
// while they are. Order of pieces in the ring: K0 K1 V0 K2 V1 ... Vn. A piece lies as wgmma wants
// it: eight rows of 64 columns (128 bytes each, swizzled), then the same rows' next 64; after all
// columns the next eight rows. From a cache in fp16 a lane asks for eight rows at once, for all
// blocks of a team (lib/boxes.cuh).
#include "lib/async.cuh"
#include "lib/boxes.cuh"
#include "lib/bulk.cuh"
#include "lib/halves.cuh"
#include "lib/team.cuh"
#include "lib/wgmma.cuh"

constexpr bool BOXED = FORMAT == 3;
#ifndef FEWER
#define FEWER (BOXED ? 24 : GROUPS > 2 ? 32 : GROUPS > 1 ? 72 : 56)
#endif
#ifndef MORE
#define MORE (GROUPS > 2 ? 112 : GROUPS > 1 ? (BOXED ? 240 : 216) : 200)
#endif
// Registers: as many a thread as fit at first, then FEWER for those who fetch and MORE for those
// who multiply. A block of two groups that has its multiprocessor alone need not share them out.
constexpr bool SHARED_OUT = GROUPS > 1 || SIDE > 1;
constexpr int FIRST = 65536 / (THREADS * SIDE) / 8 * 8;
static_assert(
        !SHARED_OUT || FEWER + GROUPS * MORE <= FIRST * (GROUPS + 1),
        "too many registers");
__device__ __forceinline__ void share_out(bool fetches) {
    if (!SHARED_OUT)
        return;
    if (fetches)
        wgmma_registers_down<FEWER>();
    else
        wgmma_registers_up<MORE>();
}
// bytes of a piece, of a head's rows
constexpr int PIECE = KEYS * DIM * 2, ASKED = TILE * DIM * 2;
constexpr int CHUNKS = DIM / 8;  // of 16 bytes in a row
// bytes of eight rows; such eights of a piece
constexpr int EIGHT = 8 * DIM * 2, BOXES = KEYS / 8;
static_assert(KEYS <= 128, "a lane looks up a row of a quarter");
static_assert(
        DIM % 64 == 0 && (CHUNKS % 32 == 0 || 32 % CHUNKS == 0),
        "columns come in 64, a row "
        "is a warp's, or warps'");
static_assert(DB <= 256, "columns of one product");

// Where chunk c of row r lies.
__device__ __forceinline__ int chunk_at(int r, int c) {
    return r / 8 * EIGHT + c / 8 * 1024 + wgmma_piece(r % 8, c % 8);
}

// What a block does, and where it keeps it.
struct Job {
    unsigned char *asked, *ring;
    Meeting *full, *empty;
    int start, hi, seen, begin, pieces, head;
    __device__ __forceinline__ Job(
            unsigned char* room, int start, int hi, int window, int head)
        : start(start), hi(hi), head(head) {
        seen = window ? max(0, start - window + 1) : 0;
        begin = seen / TILE * TILE;
        pieces = hi ? (start + hi - begin + KEYS - 1) / KEYS : 0;
        asked = wgmma_aligned(room);
        ring = asked + HB * ASKED;
        full = (Meeting*)(ring + STAGES * PIECE);
        empty = full + STAGES;
        if (threadIdx.x < STAGES) {
            meet_init(full + threadIdx.x, BOXED ? 1 : 128);
            meet_init(empty + threadIdx.x, 4 * GROUPS * TEAM);
            meet_ready();
        }
        __syncthreads();
        if (TEAM > 1)
            team_sync();
    }
};

using Place = RingPlace<STAGES>;

// What fetches from a cache in fp16: one warp, a lane for eight rows. Of a team each block asks for
// its share of a piece, which comes to all of them; so all must have read what lay there.
struct Boxes {
    const Job& job;
    const int *table, bs, lane, member;
    Place at;
    // The first of the lane's rows of piece i in the pool; eight that nobody sees are zeros, which
    // is what lies before the first row.
    __device__ __forceinline__ int box() const { return lane * TEAM + member; }
    __device__ __forceinline__ int locate(int i) const {
        const int p = job.begin + i * KEYS + box() * 8;
        const bool on = box() < BOXES && p + 8 > job.seen
                && p < job.start + job.hi;
        return on ? table[p / bs] * bs + p % bs : -8;
    }
    __device__ __forceinline__ void fetch(int row, const TensorMap& from) {
        meet_wait(job.empty + at.stage, at.parity ^ 1);
        if (!lane)
            bulk_expect(job.full + at.stage, PIECE);
        __syncwarp();
        unsigned char* const to = job.ring + at.stage * PIECE + box() * EIGHT;
        if (box() < BOXES)
            box_copy<TEAM>(to, from, row, 0, job.head, job.full + at.stage);
        at.next();
    }
    __device__ __forceinline__ void all(const TensorMap& k, const TensorMap& v) {
        if (!job.pieces)
            return;
        int now = locate(0);
        fetch(now, k);
        #pragma unroll 1
        for (int i = 1; i < job.pieces; i++) {
            const int next = locate(i);
            fetch(next, k);
            fetch(now, v);
            now = next;
        }
        fetch(now, v);
        __syncwarp();
    }
};

// A row that a lane of those who fetch has looked up: in the cache, or of this step's own. Nobody
// looks where not `on`; both as bits, a lane each.
struct Row {
    int at;
    bool mine;
    unsigned own, on;
    float key, value;  // what its elements are to be multiplied by
};
// Where keys, or values, come from: the cache, its scales of sixteen, and rows of this step.
struct Origin {
    const unsigned char *pool, *sub;
    const __half* own;
};

// What fetches from a cache in another format: a warp has a quarter of the rows of every piece, a
// lane looks up one of them. What it has lies where it will be as halves until it has arrived: then
// he who asked for it turns it into them, while the next piece is on its way.
struct Fetcher {
    static constexpr int ROWS = KEYS / 4;
    // of sixteen elements; rows a turn
    static constexpr int UNITS = DIM / 16, STEP = 32 / UNITS;
    const Job& job;
    // fresh: position of the step's first row, its row0
    const int *table, bs, kv, fresh, row0;
    const int warp, lane;
    const float *k_scale, *v_scale;
    Place at;
    // of the cache, not halves yet
    struct {
        unsigned rows;
        float scale;
        int stage = -1;
    } asked;
    __device__ __forceinline__ Row locate(int i) const {
        const int p = job.begin + i * KEYS + warp * ROWS + lane;
        const bool on = lane < ROWS && p >= job.seen && p < job.start + job.hi;
        Row row = {0, p >= fresh, 0, __ballot_sync(~0u, on), 1.f, 1.f};
        row.own = __ballot_sync(~0u, row.mine);
        if (!on)
            return row;
        row.at = row.mine ? row0 + p - job.start : table[p / bs] * bs + p % bs;
        row.at = row.at * kv + job.head;
        if (KV_CODED<FORMAT> && !row.mine) {
            row.key = kv_scale<FORMAT>(k_scale, row.at);
            row.value = kv_scale<FORMAT>(v_scale, row.at);
        }
        return row;
    }
    // Where chunk c of row r of this warp goes
    __device__ __forceinline__ unsigned char* place(
            int stage, int r, int c) const {
        return job.ring + stage * PIECE + chunk_at(warp * ROWS + r, c);
    }
    // Unit u of the row `n` of the cache, as it is there
    __device__ __forceinline__ void ask_unit(
            const Origin& from, int r, size_t n, int u) const {
        unsigned char* const to = place(at.stage, r, 2 * u + 1);
        const unsigned char* p = from.pool + n * KV_BYTES<FORMAT, DIM>
                + u * KV_BYTES<FORMAT, 16>;
        if (FORMAT == 0)
            cp_async16(place(at.stage, r, 2 * u), p);
        if (FORMAT == 0)
            cp_async16(to, p + 16);
        if (FORMAT == 1)
            cp_async16(to, p);
        if (FORMAT == 2)
            cp_async_or_zero<8>(to, p, true);
        if (FORMAT == 2)
            cp_async_or_zero<4>(to + 8, from.sub + n * UNITS + u / 4 * 4, true);
    }
    __device__ __forceinline__ void ask(
            const Row& row, const Origin& from) const {
        const int u = lane % UNITS;
        meet_wait(job.empty + at.stage, at.parity ^ 1);
        #pragma unroll 2
        for (int j = 0; j < ROWS; j += STEP) {
            const int r = j + lane / UNITS;
            const int n = __shfl_sync(~0u, row.at, r);
            const bool on = row.on >> r & 1;
            if (on && !(row.own >> r & 1))
                ask_unit(from, r, n, u);
            else
                for (int c = 2 * u; c < 2 * u + 2; c++) {
                    const __half* p = from.own + (size_t)n * DIM + c * 8;
                    cp_async16_or_zero(
                            place(at.stage, r, c), on ? p : from.own, on);
                }
        }
        cp_async_commit();
    }
    // The same unit, arrived
    __device__ __forceinline__ void take_unit(
            KvUnit<FORMAT>& unit, int stage, int r, int u) const {
        const uint4 last = *(const uint4*)place(stage, r, 2 * u + 1);
        unit.raw[0] = FORMAT == 0 ? *(const uint4*)place(stage, r, 2 * u) : last;
        if (FORMAT == 0)
            unit.raw[FORMAT == 0] = last;
        unit.sub = last.z >> u % 4 * 8;
    }
    __device__ __forceinline__ void widen() const {
        const int u = lane % UNITS, stage = asked.stage;
        #pragma unroll 2
        for (int j = 0; j < ROWS; j += STEP) {
            const int r = j + lane / UNITS;
            const float f = __shfl_sync(~0u, asked.scale, r);
            if (!(asked.rows >> r & 1))
                continue;
            KvUnit<FORMAT> unit;
            uint4 a, b;
            take_unit(unit, stage, r, u);
            unit.bf16(a, b);
            *(uint4*)place(stage, r, 2 * u) = kv_halves<FORMAT>(a, f);
            *(uint4*)place(stage, r, 2 * u + 1) = kv_halves<FORMAT>(b, f);
        }
        wgmma_seen();
        meet_arrive(job.full + stage);
    }
    __device__ __forceinline__ void fetch(
            const Row& row, float scale, const Origin& from) {
        ask(row, from);
        cp_async_wait<1>();
        if (asked.stage >= 0)
            widen();
        asked = {row.on & ~row.own, scale, at.stage};
        at.next();
    }
    __device__ __forceinline__ void all(const Origin& k, const Origin& v) {
        if (!job.pieces)
            return;
        Row now = locate(0);
        fetch(now, now.key, k);
        #pragma unroll 1
        for (int i = 1; i < job.pieces; i++) {
            const Row next = locate(i);
            fetch(next, next.key, k);
            fetch(now, now.value, v);
            now = next;
        }
        fetch(now, now.value, v);
        cp_async_wait<0>();
        widen();
    }
};

// Weights of a piece from its scores, for the two rows of a thread.
struct Softmax {
    float top[2] = {NONE, NONE};
    float sum[2] = {};
    float shrink[2];
    float unit;
    __device__ __forceinline__ float row(float* s, int r) {
        float best = NONE;
        #pragma unroll
        for (int n = 0; n < KEYS / 8; n++)
            best = fmaxf(best, fmaxf(s[4 * n + 2 * r], s[4 * n + 2 * r + 1]));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 1));
        best = fmaxf(best, __shfl_xor_sync(~0u, best, 2));
        best = fmaxf(best * unit, top[r]);
        // NONE: nothing seen so far
        const float zero = best == NONE ? 0.f : best;
        shrink[r] = power2(top[r] - zero);
        top[r] = best;
        return zero;
    }
    __device__ __forceinline__ void weigh(float* s) {
        #pragma unroll
        for (int r = 0; r < 2; r++) {
            const float zero = row(s, r);
            sum[r] *= shrink[r];
            #pragma unroll
            for (int n = 0; n < KEYS / 8; n++)
                #pragma unroll
                for (int j = 2 * r; j < 2 * r + 2; j++) {
                    s[4 * n + j] = power2(fmaf(s[4 * n + j], unit, -zero));
                    sum[r] += s[4 * n + j];
                }
        }
    }
};

// What multiplies: the rows of one head, and all their columns of values, or the part'th DB of
// them.
struct Multiplier {
    const Job& job;
    const int rank, part;  // rank: of the head in the block
    Place at;
    float o[DB / 2] = {}, s[KEYS / 2];
    unsigned p[KEYS / 16][4];
    // Rows of a head to shared memory, by who multiplies them.
    __device__ __forceinline__ void ask(const __half* q, size_t step) {
        unsigned char* const to = job.asked + rank * ASKED;
        for (int i = part * 128 + threadIdx.x % 128; i < TILE * CHUNKS;
                i += 128 * PARTS) {
            const int r = i / CHUNKS, c = i % CHUNKS;
            cp_async16(to + chunk_at(r, c), q + r * step + c * 8);
        }
        cp_async_commit();
        cp_async_wait<0>();
        wgmma_seen();
        head_sync();
    }
    __device__ __forceinline__ void head_sync() {
#if defined(__CUDA_ARCH__)
        asm volatile("bar.sync %0, %1;" ::"r"(1 + rank), "n"(128 * PARTS)
                : "memory");
#else
        emu::barrier(1 + rank, 128 * PARTS);
#endif
    }
    __device__ __forceinline__ const unsigned char* arrived() {
        meet_wait(job.full + at.stage, at.parity);
        if (!BOXED)
            wgmma_seen();
        return job.ring + at.stage * PIECE;
    }
    __device__ __forceinline__ void release(int stage) {
        if (threadIdx.x % 32 < TEAM)
            meet_arrive_of<TEAM>(job.empty + stage, threadIdx.x % 32);
    }
    // s = rows times keys; begun only
    __device__ __forceinline__ void scores() {
        const unsigned char* const keys = arrived();
        WgmmaMatrix a = wgmma_rows(job.asked + rank * ASKED, EIGHT);
        if (PARTS > 1)
            a = wgmma_kept(a);  // or the 32 words after it take registers
        const WgmmaMatrix b = wgmma_rows(keys, EIGHT);
        wgmma_own(s);
        wgmma_fence();
        #pragma unroll
        for (int e = 0; e < DIM / 16; e++) {
            const int in = e / 4 * 64 + e % 4 * WGMMA_K;
            wgmma_shared<KEYS, false, false>(s, a + in, b + in, e > 0);
        }
        wgmma_commit();
    }
    // o += weights times values; begun only
    __device__ __forceinline__ void values(int i) {
        const unsigned char* const mine = arrived() + part * (DB / 64) * 1024;
        if (BOXED)
            blank(i);
        const WgmmaMatrix b = wgmma_columns(mine, 1024, EIGHT);
        wgmma_own(o);
        wgmma_fence();
        #pragma unroll
        for (int e = 0; e < KEYS / 16; e++)
            wgmma<DB, true>(o, p[e], b + e * 2 * (EIGHT / 16), 1);
        wgmma_commit();
    }
    // Values of rows that nobody sees may be anything, and no weight makes a NaN nothing: zeros.
    __device__ __forceinline__ void blank(int i) {
        const int first = job.begin + i * KEYS;
        const int end = job.start + job.hi;
        if (first >= job.seen && first + KEYS <= end)
            return;
        unsigned char* const to = job.ring + at.stage * PIECE;
        for (int n = threadIdx.x % 128; n < KEYS * CHUNKS; n += 128) {
            const int p = first + n / CHUNKS;
            if (p >= job.seen && p < end)
                continue;
            *(uint4*)(to + chunk_at(n / CHUNKS, n % CHUNKS)) = make_uint4(
                    0, 0, 0, 0);
        }
        wgmma_seen();
        head_sync();
    }
    __device__ __forceinline__ void mask(int i, int window) {
        const int first = job.begin + i * KEYS;
        if (first + KEYS <= job.start + 1
                && !(window && job.start + TILE > first + window))
            return;
        const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
        #pragma unroll
        for (int n = 0; n < KEYS / 2; n++) {
            const int column = n / 4 * 8 + threadIdx.x % 4 * 2 + n % 2;
            const int gap = job.start + row + n % 4 / 2 * 8 - first - column;
            if (gap < 0 || (window && gap >= window))
                s[n] = NONE;
        }
    }
    __device__ __forceinline__ void shrink(const float* f) {
        if (__all_sync(~0u, f[0] == 1.f && f[1] == 1.f))
            return;
        #pragma unroll
        for (int n = 0; n < DB / 2; n++)
            o[n] *= f[n / 2 % 2];
    }
    __device__ __forceinline__ void pack() {
        #pragma unroll
        for (int n = 0; n < KEYS / 4; n++) {
            const __half2 h = __floats2half2_rn(s[2 * n], s[2 * n + 1]);
            p[n / 4][n % 4] = *reinterpret_cast<const unsigned*>(&h);
        }
    }
    __device__ __forceinline__ void all(Softmax& soft, int window) {
        scores();
        int keys = at.stage;
        at.next();
        wgmma_wait<0>();
        wgmma_own(s);
        release(keys);
        mask(0, window);
        soft.weigh(s);
        pack();
        #pragma unroll 1
        for (int i = 1; i < job.pieces; i++) {
            scores();
            keys = at.stage;
            at.next();
            values(i - 1);
            const int last = at.stage;
            at.next();
            wgmma_wait<1>();
            wgmma_own(s);
            release(keys);
            mask(i, window);
            soft.weigh(s);
            wgmma_wait<0>();
            wgmma_own(o);
            release(last);
            shrink(soft.shrink);
            pack();
        }
        values(job.pieces - 1);
        wgmma_wait<0>();
        wgmma_own(o);
    }
};
