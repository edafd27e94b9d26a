// The state of a gated delta net from tile to tile (64 positions) of each sequence of a prefill
// step, and what every row reads from it, before norm and gate (gated_norm.cu). Its operands are
// prepared by delta_prep.cu; values go through the convolution here, and the tails that belong to
// them are kept.
//   N = T beta (V - G K S),   O = G Q S + P N,   S = G[63] S + K' E N
// Parallel over sequences, heads and 16*GROUPS columns. Two warps share 16 columns of a state: each
// keeps half of the rows, transposed (16 x DK/2), in the registers that a product leaves its sums
// in, which are also the registers that the next product takes its left operand from. Of K S and Q
// S each has a part of the sum, and each finishes 32 of the 64 rows; of each two row tiles, one.
// What they tell each other goes through shared memory. As many warps help them: they ask for
// operands, bring values, and take answers away.
//   -D DK= DV= (32, 64 or 128) GROUPS= (1 or 2) BUFFERS= (1 or 2: tiles in shared memory)
//   TAILS= (tails for each slot)   RECORD= (numbers of a head's record)
//   launch: <<<(vh*DV/16/GROUPS, seqs), 128*GROUPS, BUFFERS*(512*DK + 22272 + 4096*GROUPS) +
//        8192*GROUPS + 64>>>
#include "lib/bulk.cuh"
#include "lib/chunk.cuh"
#include "lib/late.cuh"
#include "lib/warps.cuh"
#ifndef DK
#define DK 128
#endif
#ifndef DV
#define DV 128
#endif
#ifndef GROUPS
#define GROUPS 2
#endif
#ifndef BUFFERS
#define BUFFERS 2
#endif
#ifndef TAILS
#define TAILS 1
#endif
// that carry states, and as many that help
constexpr int WARPS = 2 * GROUPS, COLUMNS = 16 * GROUPS;
// floats of a row of values: no bank conflicts in a warp
constexpr int LINE = COLUMNS + 4;
constexpr int STEPS = DK / 32;  // products along half of the state's rows
constexpr int NT = DK / 16;  // column tiles of that half
// of q, k and of a triangle, in units of 16 bytes
constexpr int LIMBS = 16 * DK, PART = 640;
typedef Operand<Mixed<DK>> Mat;

typedef Record<DK, DV> Head;
#ifdef RECORD
static_assert(sizeof(Head) == 4 * RECORD, "records of another size");
#endif

// What the kernel is given, in the order of its arguments.
struct Params {
    // limbs of delta_prep.cu, qf = 64*DK
    const unsigned* q;  // [tiles, kh, qf] u32
    const unsigned* k;  // [tiles, kh, qf] u32
    // fragments of triangles
    const unsigned* t;  // [tiles, vh, 2560] u32
    const unsigned* p;  // [tiles, vh, 2560] u32
    // decay from the tile's begin, decay to its end, beta
    const float* scal;  // [tiles, vh, 192] f32
    // q | k | v | z | b | a, width = 2*kh*DK + 2*vh*DV + 2*vh
    const float* x;  // [r, width] f32
    const float* conv_w;  // [c, 4] f32: c = 2*kh*DK + vh*DV
    // inputs before a sequence's first row, oldest first; written at state_out
    float* conv;  // [states, 3, c] f32
    // states: n is in n/TAILS, read at state_in, written at state_out, by heads, in records of
    // lib/late.cuh
    float* rec;  // [slots, vh, record] f32
    const int* first;  // [seqs1] i32: a row in the first tile of each sequence
    const int* starts;  // [seqs] i32: position of a sequence's first row
    // state to begin from (unread at position 0)
    const int* state_in;  // [seqs] i32
    // state after a row, or -1; looked at for the last row of each tile. It may lie where the
    // sequence's own begins: nobody else reads that
    const int* state_out;  // [r] i32
    const int* tile_seq;  // [tiles] i32: sequence of a tile (-1: none)
    const int* tile_lo;  // [tiles] i32: its real rows are lo..hi-1
    const int* tile_hi;  // [tiles] i32
    float* y;  // [r, vhd] f32: real rows are written, vhd = vh*DV
    int tiles;
    int kh;  // heads of keys
    int vh;  // and of values
    int c;  // channels
    int width;  // numbers of a row of x
};

struct Held {  // of a tile
    uint4 k[LIMBS], q[LIMBS], t[PART], p[PART];
    float scal[192], v[TILE][LINE];  // values, and in their place what was read
};
struct Room {
    Held held[BUFFERS];
    // what a warp tells the other one, and hears from it
    float4 told[WARPS][8][32];
    Meeting full[BUFFERS], done[BUFFERS];
};

// Where operands of a head come from
struct From {
    const uint4 *q, *k, *t, *p;
    const float* scal;
    int kh, vh, head;
    // By one thread, which arrives
    __device__ __forceinline__ void fetch(
            Held& h, Meeting* full, int tile) const {
        const size_t own = ((size_t)tile * kh + head / (vh / kh)) * LIMBS;
        const size_t cell = (size_t)tile * vh + head;
        bulk_expect(
                full,
                sizeof(h.k) + sizeof(h.q) + sizeof(h.t) + sizeof(h.p)
                        + sizeof(h.scal));
        bulk_copy(h.k, k + own, sizeof(h.k), full);
        bulk_copy(h.q, q + own, sizeof(h.q), full);
        bulk_copy(h.scal, scal + cell * 192, sizeof(h.scal), full);
        bulk_copy(h.t, t + cell * PART, sizeof(h.t), full);
        bulk_copy(h.p, p + cell * PART, sizeof(h.p), full);
    }
};

__device__ __forceinline__ float4 four(const float* v) {
    return make_float4(v[0], v[1], v[2], v[3]);
}

// Two warps that share 16 columns; `half` is which of them this one is
struct Pass {
    int lane, half, c2;  // c2: this lane's first row of a row tile
    float S[NT][4];
    // 2j: of this warp's row tile in pair j, 2j+1: of the other warp's
    float kS[8][4], qS[8][4];
    float N[4][4];

    __device__ __forceinline__ int flip(int j) const { return half ^ (j & 1); }
    __device__ __forceinline__ int tile_of(int j) const {
        return 2 * j + flip(j);
    }
    __device__ __forceinline__ int row(int j) const {
        return 8 * tile_of(j) + c2;
    }

    // Products of the state with 64 rows
    __device__ __forceinline__ void rows_of(uint4* b, const Mat& M, int s) const {
        #pragma unroll
        for (int j = 0; j < 4; j++)
            M.b_turned(b + 2 * j, 16 * j, half * (DK / 2) + 16 * s, flip(j));
    }
    __device__ __forceinline__ void read(const Held& h) {
        const Mat K = {{(const unsigned char*)h.k}},
                  Q = {{(const unsigned char*)h.q}};
        #pragma unroll
        for (int i = 0; i < 8; i++)
            #pragma unroll
            for (int e = 0; e < 4; e++)
                kS[i][e] = qS[i][e] = 0.f;
        #pragma unroll
        for (int s = 0; s < STEPS; s++) {
            Limbs a;
            uint4 b[8], c[8];
            rows_of(b, K, s);
            rows_of(c, Q, s);
            a.of_sums(S[2 * s], S[2 * s + 1]);
            mma_limbs<8>(kS, a, b);
            mma_limbs<8>(qS, a, c);
        }
    }
    // The left operand of rows 16s.., of what this warp and the other one have of it
    __device__ __forceinline__ Limbs both(int s, uint4 mine, uint4 others) const {
        const uint4 a = flip(s) ? others : mine;
        const uint4 b = flip(s) ? mine : others;
        return {{a.x, a.y, b.x, b.y}, {a.z, a.w, b.z, b.w}};
    }
    static __device__ __forceinline__ uint4 limbs_of(
            const float* n, float a = 1.f, float b = 1.f) {
        const Pair p = limbs(n[0] * a, n[1] * b);
        const Pair q = limbs(n[2] * a, n[3] * b);
        return make_uint4(p.hi, q.hi, p.lo, q.lo);
    }
    // Fragments of step s of a triangle, for this warp's row tiles
    __device__ __forceinline__ void below(
            uint4* b, const uint4* part, int s) const {
        #pragma unroll
        for (int j = 0; j < 4; j++)
            if (j >= s)
                b[j] = part[triangle(s, tile_of(j)) * 32 + lane];
    }
    // The other warp's row tiles: this one's part of their sums
    __device__ __forceinline__ void tell_sums(float4 (*told)[32]) const {
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            told[j][lane] = four(kS[2 * j + 1]);
            told[4 + j][lane] = four(qS[2 * j + 1]);
        }
    }
    // What is new in each row, as limbs: beta (V - G K S)
    __device__ __forceinline__ void news(
            uint4* r, const Held& h, int col, const float4 (*heard)[32]) {
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            const float4 k = heard[j][lane];
            const float4 q = heard[4 + j][lane];
            const float2 G = *(const float2*)(h.scal + row(j));
            const float2 beta = *(const float2*)(h.scal + 128 + row(j));
            float n[4];
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                const float s = kS[2 * j][e] + (&k.x)[e];
                const float v = h.v[row(j) + e % 2][col + e / 2 * 8];
                n[e] = (e % 2 ? beta.y : beta.x)
                        * fmaf(-(e % 2 ? G.y : G.x), s, v);
                qS[2 * j][e] = (qS[2 * j][e] + (&q.x)[e]) * (e % 2 ? G.y : G.x);
            }
            r[j] = limbs_of(n);
        }
    }
    // The other warp gets them
    __device__ __forceinline__ void tell_news(
            float4 (*its)[32], const uint4* r) const {
        #pragma unroll
        for (int j = 0; j < 4; j++)
            ((uint4*)its[j])[lane] = r[j];
    }
    // N = T R. The three products of limbs are summed by themselves: a third as many that wait for
    // each other.
    __device__ __forceinline__ void solve(
            const Held& h, const uint4* r, const float4 (*heard)[32]) {
        float more[4][4], less[4][4];
        #pragma unroll
        for (int j = 0; j < 4; j++)
            #pragma unroll
            for (int e = 0; e < 4; e++)
                N[j][e] = more[j][e] = less[j][e] = 0.f;
        #pragma unroll
        for (int s = 0; s < 4; s++) {
            uint4 b[4];
            below(b, h.t, s);
            const Limbs a = both(s, r[s], ((const uint4*)heard[s])[lane]);
            #pragma unroll
            for (int j = s; j < 4; j++) {
                mma_bf16(less[j], a.lo, &b[j].x);
                mma_bf16(more[j], a.hi, &b[j].z);
                mma_bf16(N[j], a.hi, &b[j].x);
            }
        }
        #pragma unroll
        for (int j = 0; j < 4; j++)
            #pragma unroll
            for (int e = 0; e < 4; e++)
                N[j][e] += more[j][e] + less[j][e];
    }
    // The other warp gets this one's row tiles of N
    __device__ __forceinline__ void tell_solved(float4 (*its)[32]) const {
        #pragma unroll
        for (int j = 0; j < 4; j++)
            its[4 + j][lane] = four(N[j]);
    }
    // The state after the tile, and in qS what it answered
    __device__ __forceinline__ void go_on(
            const Held& h, const float4 (*heard)[32]) {
        const Mat K = {{(const unsigned char*)h.k}};
        const float last = h.scal[TILE - 1];
        float o[4][4];
        float4 others[4];
        #pragma unroll
        for (int s = 0; s < 4; s++)
            others[s] = heard[4 + s][lane];
        #pragma unroll
        for (int j = 0; j < 4; j++)
            #pragma unroll
            for (int e = 0; e < 4; e++)
                o[j][e] = qS[2 * j][e];
        #pragma unroll
        for (int i = 0; i < NT; i++)
            #pragma unroll
            for (int e = 0; e < 4; e++)
                S[i][e] *= last;
        #pragma unroll
        for (int s = 0; s < 4; s++) {
            const float* E = h.scal + TILE + c2;
            const float2 mine = *(const float2*)(E + 8 * tile_of(s));
            const float2 its = *(const float2*)(E + 8 * (tile_of(s) ^ 1));
            uint4 b[NT], c[4];
            #pragma unroll
            for (int i = 0; i < NT; i += 2)
                K.b(b + i, 16 * s, half * (DK / 2) + 8 * i);
            below(c, h.p, s);
            mma_limbs<NT>(
                    S,
                    both(s, limbs_of(N[s], mine.x, mine.y),
                            limbs_of(&others[s].x, its.x, its.y)),
                    b);
            mma_limbs<4>(
                    o, both(s, limbs_of(N[s]), limbs_of(&others[s].x)), c, s);
        }
        #pragma unroll
        for (int j = 0; j < 4; j++)
            #pragma unroll
            for (int e = 0; e < 4; e++)
                qS[2 * j][e] = o[j][e];
    }
    // What the rows read, in place of their values
    __device__ __forceinline__ void answer(Held& h, int col) const {
        #pragma unroll
        for (int j = 0; j < 4; j++)
            #pragma unroll
            for (int e = 0; e < 4; e++)
                h.v[row(j) + e % 2][col + e / 2 * 8] = qS[2 * j][e];
    }
    // f(sum, row, column) of this warp's part of the state
    template <class F> __device__ __forceinline__ void each(F f) {
        #pragma unroll
        for (int i = 0; i < NT; i++)
            #pragma unroll
            for (int e = 0; e < 4; e++)
                f(S[i][e], half * (DK / 2) + 8 * i + c2 + e % 2,
                        lane / 4 + e / 2 * 8);
    }
};

// By the warps that help: values of rows of a tile through the convolution, and answers to where
// they belong. A warp has rows of its own.
struct Help {
    int tid, col, channel, stride;  // col: first column in y
    __device__ __forceinline__ void values(
            Held& h, const Rows& r, const float* taps) const {
        const int c = tid % COLUMNS;
        r.conv(channel + c, channel + c, tid / COLUMNS * 16, taps, nullptr,
                [&](int j, float v) { h.v[j][c] = v; });
        if (tid < COLUMNS)
            r.keep_tail(channel + c, channel + c);
    }
    __device__ __forceinline__ void store(
            const Held& h, float* y, int tile, int lo, int hi) const {
        constexpr int PER = TILE / WARPS, FOURS = COLUMNS / 4;
        #pragma unroll
        for (int i = tid % 32; i < PER * FOURS; i += 32) {
            const int row = tid / 32 * PER + i / FOURS;
            const int c = i % FOURS * 4;
            if (row < lo || row >= hi)
                continue;
            *(float4*)(y + ((size_t)tile * TILE + row) * stride + col + c) = *(
                    const float4*)&h.v[row][c];
        }
    }
};

// By one thread: whom the others wait for.
__device__ __forceinline__ void begin_meetings(Room* room) {
    for (int i = 0; i < BUFFERS; i++) {
        meet_init(room->full + i, 1 + WARPS);
        meet_init(room->done + i, WARPS);
    }
    meet_ready();
}

// The state goes to a record, where nothing is pending then.
__device__ __forceinline__ void write_state(
        Pass& w, Head* const to, int col, int own, int lane) {
    w.each([&](float& v, int r, int c) { to->S[r * DV + col + own + c] = v; });
    if (!w.half && !lane)
        to->count[(col + own) / 16] = 0;
}

// What a block has: some columns of a head's state, and a sequence's tiles.
struct Work {
    int seq, head, col;  // col: the first of the columns
    int begin, end;  // tiles
};

// Tiles of a sequence, which follow each other.
__device__ __forceinline__ Work work_of(const Params& p) {
    constexpr int PARTS = DV / COLUMNS;
    const int seq = blockIdx.y;
    const int begin = p.first[seq] / TILE;
    int end = begin;
    while (end < p.tiles && p.tile_seq[end] == seq)
        end++;
    const int head = blockIdx.x / PARTS;
    const int col = blockIdx.x % PARTS * COLUMNS;
    return {seq, head, col, begin, end};
}

// All that warps that help do: of each tile they ask for operands and bring values, once answers
// of the one that was in its place are taken away. `tid`: of those warps' threads.
__device__ __forceinline__ void help_all(
        Room* room, const Params& p, const Work& w, int tid, int lane) {
    const From f = {(const uint4*)p.q, (const uint4*)p.k, (const uint4*)p.t,
            (const uint4*)p.p, p.scal, p.kh, p.vh, w.head};
    const int value = w.head * DV + w.col;
    const int channel = 2 * p.kh * DK + value;
    const Help help = {tid, value, channel, p.vh * DV};
    #pragma unroll 1
    for (int tile = w.begin; tile < w.end + BUFFERS; tile++) {
        const int i = tile - w.begin;
        const int at = i % BUFFERS;
        const int before = tile - BUFFERS;
        Held& h = room->held[at];
        if (before >= w.begin && before < w.end) {
            meet_wait(room->done + at, (i / BUFFERS + 1) % 2);
            const int lo = p.tile_lo[before];
            const int hi = p.tile_hi[before];
            help.store(h, p.y, before, lo, hi);
            __syncwarp();
        }
        if (tile >= w.end)
            continue;
        if (tid == 0)
            f.fetch(h, room->full + at, tile);
        const Rows r = ::rows_of(
                tile, p.x, p.width, p.c, p.conv, p.first, p.starts, p.state_in,
                p.state_out, p.tile_seq, p.tile_lo, p.tile_hi);
        help.values(h, r, p.conv_w);
        __syncwarp();
        if (lane == 0)
            meet_arrive(room->full + at);
    }
}

// A head's record of state n.
__device__ __forceinline__ Head* state_of(const Params& p, int head, int n) {
    const size_t slot = n / TAILS;
    return (Head*)p.rec + slot * p.vh + head;
}

// The state that a sequence begins from, with all that is pending there; or none. `col`: the
// warp's first column.
__device__ __forceinline__ void begin_state(
        Pass& w, const Params& p, int seq, int head, int col) {
    if (!p.starts[seq]) {
        w.each([&](float& v, int, int) { v = 0.f; });
        return;
    }
    const Head* const from = state_of(p, head, p.state_in[seq]);
    const int pending = from->pending(col);
    w.each([&](float& v, int r, int c) { v = from->S[r * DV + col + c]; });
    #pragma unroll 1
    for (int i = 0; i < pending; i++) {
        const Head::Row& late = from->rows[i];
        const float eg = from->eg[i];
        w.each([&](float& v, int r, int c) {
            v = fmaf(late.k[r], late.d[col + c], __fmul_rn(v, eg));
        });
    }
}

// One tile: the state takes it up, and in place of its values is what its rows read. `told` is what
// the warp tells the one that it shares columns with, `its` what that tells it; `col`: the lane's
// first column of the block's, `pair`: which two warps these are.
__device__ __forceinline__ void take_tile(
        Pass& w, Held& h, float4 (*told)[32], float4 (*its)[32], int col,
        int pair) {
    w.read(h);
    w.tell_sums(told);
    sync_warps<2>(pair);
    uint4 r[4];
    w.news(r, h, col, its);
    w.tell_news(its, r);
    sync_warps<2>(pair);
    w.solve(h, r, told);
    w.tell_solved(its);
    sync_warps<2>(pair);
    w.go_on(h, told);
    w.answer(h, col);
}

extern "C" __global__ void __launch_bounds__(64 * WARPS) delta_many(
        const unsigned* __restrict__ q, const unsigned* __restrict__ k,
        const unsigned* __restrict__ t, const unsigned* __restrict__ p,
        const float* __restrict__ scal, const float* __restrict__ x,
        const float* __restrict__ conv_w, float* conv, float* rec,
        const int* __restrict__ first, const int* __restrict__ starts,
        const int* __restrict__ state_in, const int* __restrict__ state_out,
        const int* __restrict__ tile_seq, const int* __restrict__ tile_lo,
        const int* __restrict__ tile_hi, float* y, int tiles, int kh, int vh,
        int c, int width) {
    const Params args = {q, k, t, p, scal, x, conv_w, conv, rec, first, starts,
            state_in, state_out, tile_seq, tile_lo, tile_hi, y, tiles, kh, vh, c,
            width};
    DYNAMIC_SHARED(Room, room);
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const Work work = work_of(args);
    if (threadIdx.x == 0)
        begin_meetings(room);
    __syncthreads();
    if (warp >= WARPS) {
        help_all(room, args, work, threadIdx.x - 32 * WARPS, lane);
        return;
    }
    Pass w;
    w.lane = lane;
    w.half = warp % 2;
    w.c2 = lane % 4 * 2;
    const int own = warp / 2 * 16;
    const int col = own + lane / 4;  // of the lane
    begin_state(w, args, work.seq, work.head, work.col + own);
    float4(*const told)[32] = room->told[warp];
    float4(*const its)[32] = room->told[warp ^ 1];
    #pragma unroll 1
    for (int tile = work.begin; tile < work.end; tile++) {
        const int i = tile - work.begin;
        const int at = i % BUFFERS;
        const int keep = state_out[tile * TILE + tile_hi[tile] - 1];
        meet_wait(room->full + at, i / BUFFERS % 2);
        take_tile(w, room->held[at], told, its, col, warp / 2);
        __syncwarp();
        if (lane == 0)
            meet_arrive(room->done + at);
        if (keep >= 0) {
            Head* const to = state_of(args, work.head, keep);
            write_state(w, to, work.col, own, lane);
        }
    }
}
