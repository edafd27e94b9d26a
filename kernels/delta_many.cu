// The state of a gated delta net from tile to tile (64 positions) of each sequence of a prefill step, and
// what every row reads from it, before norm and gate (gated_norm.cu). Its operands are prepared by
// delta_prep.cu; values go through the convolution here, and the tails that belong to them are kept.
//   N = T beta (V - G K S),   O = G Q S + P N,   S = G[63] S + K' E N
// Parallel over sequences, heads and 16*GROUPS columns. Two warps share 16 columns of a state: each keeps half
// of the rows, transposed (16 x DK/2), in the registers that a product leaves its sums in, which are also the
// registers that the next product takes its left operand from. Of K S each has a part of the sum, and finishes
// 32 of the 64 rows; of each two row tiles, one. What they tell each other goes through shared memory, and so
// does the state itself, to two warps that answer: they make O, which nobody waits for. A third pair asks for
// operands, brings values, and takes answers away.
//   q, k     : [tiles, kh, qf]        u32   limbs of delta_prep.cu, qf = 64*DK
//   t, p     : [tiles, vh, 2560]      u32   fragments of triangles
//   scal     : [tiles, vh, 192]       f32   decay from the tile's begin, decay to its end, beta
//   x        : [r, width]             f32   q | k | v | z | b | a, width = 2*kh*DK + 2*vh*DV + 2*vh
//   conv_w   : [c, 4]                 f32   c = 2*kh*DK + vh*DV
//   conv     : [states, 3, c]         f32   inputs before a sequence's first row, oldest first; written at state_out
//   rec      : [slots, vh, dk, dv]    f32   states: n is in n/TAILS, read at state_in, written at state_out
//   first    : [seqs1]                i32   a row in the first tile of each sequence
//   starts   : [seqs]                 i32   position of a sequence's first row
//   state_in : [seqs]                 i32   state to begin from (unread at position 0)
//   state_out : [r]                   i32   state after a row, or -1; looked at for the last row of each tile. It may lie
//                                           where the sequence's own begins: nobody else reads that
//   tile_seq, tile_lo, tile_hi : [tiles] i32   sequence of a tile (-1: none), its real rows lo..hi-1
//   y        : [r, vhd]               f32   real rows are written, vhd = vh*DV
//   -D DK= DV= (32, 64 or 128) GROUPS= (1 or 2) BUFFERS= (1 or 2: tiles in shared memory)
//   TAILS= (tails for each slot)
//   launch: <<<(vh*DV/16/GROUPS, seqs), 192*GROUPS, BUFFERS*(512*DK + 1792 + 4096*GROUPS)
//      + (BUFFERS > 1)*40960 + (8192 + 64*DK)*GROUPS + 128>>>
#include "lib/bulk.cuh"
#include "lib/chunk.cuh"
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
constexpr int WARPS = 2 * GROUPS, COLUMNS = 16 * GROUPS;  // of each of three kinds of warps
constexpr int LINE = COLUMNS + 4;       // floats of a row of values: no bank conflicts in a warp
constexpr int STEPS = DK / 32;          // products along half of the state's rows
constexpr int NT = DK / 16;             // column tiles of that half
constexpr int LIMBS = 16 * DK, PART = 640;  // of q, k and of a triangle, in units of 16 bytes
constexpr bool STAGED = BUFFERS > 1;    // triangles, too? Else they are read where they are
typedef Operand<Mixed<DK>> Mat;

struct Held {  // of a tile
    uint4 k[LIMBS], q[LIMBS];
    float scal[192], v[TILE][LINE];   // values, and in their place what was read
};
struct Parts { uint4 t[STAGED ? PART : 1], p[STAGED ? PART : 1]; };
struct Pair16 {                         // what warps of 16 columns share
    float4 told[2][8][32];              // what a warp that carries the state tells the other one, and hears from it
    uint4 state[2 * STEPS][2][32];      // limbs, as left operands
};
struct Room {
    Held held[BUFFERS];
    Parts parts[BUFFERS];
    Pair16 pairs[GROUPS];
    Meeting full[BUFFERS], done[BUFFERS];
    Meeting given[GROUPS], taken[GROUPS], found[GROUPS], heard[GROUPS];  // states, and what is new
};

// Where operands of a head come from
struct From {
    const uint4 *q, *k, *t, *p;
    const float* scal;
    int kh, vh, head;
    __device__ __forceinline__ size_t cell(int tile) const { return (size_t)tile * vh + head; }
    // By one thread, which arrives
    __device__ __forceinline__ void fetch(Room* room, int at, int tile) const {
        Held& h = room->held[at];
        Meeting* const full = room->full + at;
        const size_t own = ((size_t)tile * kh + head / (vh / kh)) * LIMBS;
        bulk_expect(full, sizeof(h.k) + sizeof(h.q) + sizeof(h.scal) + (STAGED ? sizeof(Parts) : 0));
        bulk_copy(h.k, k + own, sizeof(h.k), full);
        bulk_copy(h.q, q + own, sizeof(h.q), full);
        bulk_copy(h.scal, scal + cell(tile) * 192, sizeof(h.scal), full);
        if (!STAGED) return;
        bulk_copy(room->parts[at].t, t + cell(tile) * PART, PART * 16, full);
        bulk_copy(room->parts[at].p, p + cell(tile) * PART, PART * 16, full);
    }
};

__device__ __forceinline__ float4 four(const float* v) { return make_float4(v[0], v[1], v[2], v[3]); }
// Parity of phase n of a barrier; of the one before
__device__ __forceinline__ unsigned parity(int n) { return n & 1; }

// One of two warps that share 16 columns and 64 rows: of each pair of row tiles it has one
struct Half {
    int lane, half, c2;     // c2: this lane's first row of a row tile
    __device__ __forceinline__ Half(int warp) : lane(threadIdx.x % 32), half(warp % 2), c2(threadIdx.x % 4 * 2) {}
    __device__ __forceinline__ int flip(int j) const { return half ^ (j & 1); }
    __device__ __forceinline__ int tile_of(int j) const { return 2 * j + flip(j); }
    __device__ __forceinline__ int row(int j) const { return 8 * tile_of(j) + c2; }
    // The left operand of rows 16s.., of what this warp and the other one have of it
    __device__ __forceinline__ Limbs both(int s, uint4 mine, uint4 others) const {
        const uint4 a = flip(s) ? others : mine, b = flip(s) ? mine : others;
        return {{a.x, a.y, b.x, b.y}, {a.z, a.w, b.z, b.w}};
    }
    static __device__ __forceinline__ uint4 limbs_of(const float* n, float a = 1.f, float b = 1.f) {
        const Pair p = limbs(n[0] * a, n[1] * b), q = limbs(n[2] * a, n[3] * b);
        return make_uint4(p.hi, q.hi, p.lo, q.lo);
    }
    // Fragments of step s of a triangle, for this warp's row tiles
    __device__ __forceinline__ void below(uint4* b, const uint4* part, int s) const {
        #pragma unroll
        for (int j = 0; j < 4; j++)
            if (j >= s) b[j] = part[triangle(s, tile_of(j)) * 32 + lane];
    }
};

// Carries half of the rows of 16 columns of a state
struct Carry : Half {
    float S[NT][4];
    float kS[8][4];         // 2j: of this warp's row tile in pair j, 2j+1: of the other warp's
    float N[4][4];
    __device__ __forceinline__ Carry(int warp) : Half(warp) {}

    __device__ __forceinline__ void read(const Held& h, uint4 (*state)[2][32], Meeting* given) {
        const Mat K = {{(const unsigned char*)h.k}};
        Limbs a[STEPS];
        #pragma unroll
        for (int s = 0; s < STEPS; s++) {
            a[s].of_sums(S[2 * s], S[2 * s + 1]);
            const unsigned *hi = a[s].hi, *lo = a[s].lo;
            state[half * STEPS + s][0][lane] = make_uint4(hi[0], hi[1], hi[2], hi[3]);
            state[half * STEPS + s][1][lane] = make_uint4(lo[0], lo[1], lo[2], lo[3]);
        }
        __syncwarp();
        if (lane == 0) meet_arrive(given);
        #pragma unroll
        for (int i = 0; i < 8; i++)
            #pragma unroll
            for (int e = 0; e < 4; e++) kS[i][e] = 0.f;
        #pragma unroll
        for (int s = 0; s < STEPS; s++) {
            uint4 b[8];
            #pragma unroll
            for (int j = 0; j < 4; j++) K.b_turned(b + 2 * j, 16 * j, half * (DK / 2) + 16 * s, flip(j));
            mma_limbs<8>(kS, a[s], b);
        }
    }
    // What is new in each row, as limbs: beta (V - G K S)
    __device__ __forceinline__ void news(uint4* r, const Held& h, int col, const float4 (*heard)[32]) {
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            const float4 k = heard[j][lane];
            const float2 G = *(const float2*)(h.scal + row(j)), beta = *(const float2*)(h.scal + 128 + row(j));
            float n[4];
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                const float s = kS[2 * j][e] + (&k.x)[e], v = h.v[row(j) + e % 2][col + e / 2 * 8];
                n[e] = (e % 2 ? beta.y : beta.x) * fmaf(-(e % 2 ? G.y : G.x), s, v);
            }
            r[j] = limbs_of(n);
        }
    }
    // N = T R. The three products of limbs are summed by themselves: a third as many that wait for each other.
    __device__ __forceinline__ void solve(const uint4* T, const uint4* r, const float4 (*heard)[32]) {
        float more[4][4], less[4][4];
        #pragma unroll
        for (int j = 0; j < 4; j++)
            #pragma unroll
            for (int e = 0; e < 4; e++) N[j][e] = more[j][e] = less[j][e] = 0.f;
        #pragma unroll
        for (int s = 0; s < 4; s++) {
            uint4 b[4];
            below(b, T, s);
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
            for (int e = 0; e < 4; e++) N[j][e] += more[j][e] + less[j][e];
    }
    // The state after the tile
    __device__ __forceinline__ void go_on(const Held& h, const float4 (*heard)[32]) {
        const Mat K = {{(const unsigned char*)h.k}};
        const float last = h.scal[TILE - 1];
        #pragma unroll
        for (int i = 0; i < NT; i++)
            #pragma unroll
            for (int e = 0; e < 4; e++) S[i][e] *= last;
        #pragma unroll
        for (int s = 0; s < 4; s++) {
            const float* E = h.scal + TILE + c2;
            const float2 mine = *(const float2*)(E + 8 * tile_of(s));
            const float2 its = *(const float2*)(E + 8 * (tile_of(s) ^ 1));
            const float4 others = heard[4 + s][lane];
            uint4 b[NT];
            #pragma unroll
            for (int i = 0; i < NT; i += 2) K.b(b + i, 16 * s, half * (DK / 2) + 8 * i);
            mma_limbs<NT>(S, both(s, limbs_of(N[s], mine.x, mine.y), limbs_of(&others.x, its.x, its.y)), b);
        }
    }
    // f(sum, row, column) of this warp's part of the state
    template <class F> __device__ __forceinline__ void each(F f) {
        #pragma unroll
        for (int i = 0; i < NT; i++)
            #pragma unroll
            for (int e = 0; e < 4; e++) f(S[i][e], half * (DK / 2) + 8 * i + c2 + e % 2, lane / 4 + e / 2 * 8);
    }
    // A tile's share of the work
    __device__ __forceinline__ void step(const Held& h, const uint4* T, Pair16& p, Room* room, int g, int i) {
        float4 (*told)[32] = p.told[half], (*its)[32] = p.told[half ^ 1];
        if (i) meet_wait(room->taken + g, parity(i - 1));
        read(h, p.state, room->given + g);
        #pragma unroll
        for (int j = 0; j < 4; j++) told[j][lane] = four(kS[2 * j + 1]);
        sync_warps<2>(g);
        uint4 r[4];
        news(r, h, 16 * g + lane / 4, its);
        #pragma unroll
        for (int j = 0; j < 4; j++) ((uint4*)its[j])[lane] = r[j];
        sync_warps<2>(g);
        solve(T, r, told);
        if (i) meet_wait(room->heard + g, parity(i - 1));
        #pragma unroll
        for (int j = 0; j < 4; j++) its[4 + j][lane] = four(N[j]);
        sync_warps<2>(g);
        if (lane == 0) meet_arrive(room->found + g);
        go_on(h, told);
    }
};

// Makes what the rows read
struct Answer : Half {
    float o[4][4];
    __device__ __forceinline__ Answer(int warp) : Half(warp) {}
    // G Q S of this warp's rows
    __device__ __forceinline__ void read(const Held& h, const uint4 (*state)[2][32]) {
        const Mat Q = {{(const unsigned char*)h.q}};
        float c[2][4][4];
        #pragma unroll
        for (int j = 0; j < 4; j++)
            #pragma unroll
            for (int e = 0; e < 4; e++) c[0][j][e] = c[1][j][e] = 0.f;
        #pragma unroll
        for (int s = 0; s < 2 * STEPS; s += 2) {
            uint4 b[2][4];
            #pragma unroll
            for (int j = 0; j < 4; j++) Q.b_beside(b[0][j], b[1][j], 8 * tile_of(j), 16 * s);
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                const uint4 hi = state[s + i][0][lane], lo = state[s + i][1][lane];
                const Limbs a = {{hi.x, hi.y, hi.z, hi.w}, {lo.x, lo.y, lo.z, lo.w}};
                mma_limbs<4>(c[i], a, b[i]);
            }
        }
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 G = *(const float2*)(h.scal + row(j));
            #pragma unroll
            for (int e = 0; e < 4; e++) o[j][e] = (c[0][j][e] + c[1][j][e]) * (e % 2 ? G.y : G.x);
        }
    }
    __device__ __forceinline__ void step(Held& h, const uint4* P, Pair16& p, Room* room, int g, int i) {
        meet_wait(room->given + g, parity(i));
        read(h, p.state);
        __syncwarp();
        if (lane == 0) meet_arrive(room->taken + g);
        meet_wait(room->found + g, parity(i));
        float4 mine[4], its[4];
        #pragma unroll
        for (int s = 0; s < 4; s++) {
            mine[s] = p.told[half ^ 1][4 + s][lane];
            its[s] = p.told[half][4 + s][lane];
        }
        __syncwarp();
        if (lane == 0) meet_arrive(room->heard + g);
        #pragma unroll
        for (int s = 0; s < 4; s++) {
            uint4 b[4];
            below(b, P, s);
            mma_limbs<4>(o, both(s, limbs_of(&mine[s].x), limbs_of(&its[s].x)), b, s);
        }
        #pragma unroll
        for (int j = 0; j < 4; j++)
            #pragma unroll
            for (int e = 0; e < 4; e++) h.v[row(j) + e % 2][16 * g + lane / 4 + e / 2 * 8] = o[j][e];
    }
};

// By the warps that help: values of rows of a tile through the convolution, and answers to where they belong.
// A warp has rows of its own.
struct Help {
    int tid, col, channel, stride;  // col: first column in y
    __device__ __forceinline__ void store(const Held& h, float* y, int tile, int lo, int hi) const {
        constexpr int PER = TILE / WARPS, FOURS = COLUMNS / 4;
        #pragma unroll
        for (int i = tid % 32; i < PER * FOURS; i += 32) {
            const int row = tid / 32 * PER + i / FOURS, c = i % FOURS * 4;
            if (row < lo || row >= hi) continue;
            *(float4*)(y + ((size_t)tile * TILE + row) * stride + col + c) = *(const float4*)&h.v[row][c];
        }
    }
};

extern "C" __global__ void __launch_bounds__(96 * WARPS) delta_many(const unsigned* __restrict__ q,
        const unsigned* __restrict__ k, const unsigned* __restrict__ t, const unsigned* __restrict__ p,
        const float* __restrict__ scal, const float* __restrict__ x, const float* __restrict__ conv_w, float* conv,
        float* rec, const int* __restrict__ first, const int* __restrict__ starts, const int* __restrict__ state_in,
        const int* __restrict__ state_out, const int* __restrict__ tile_seq, const int* __restrict__ tile_lo,
        const int* __restrict__ tile_hi, float* y, int tiles, int kh, int vh, int c, int width) {
    DYNAMIC_SHARED(Room, room);
    constexpr int PARTS = DV / COLUMNS;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, seq = blockIdx.y, head = blockIdx.x / PARTS;
    const int col = blockIdx.x % PARTS * COLUMNS, begin = first[seq] / TILE;
    const From f = {(const uint4*)q, (const uint4*)k, (const uint4*)t, (const uint4*)p, scal, kh, vh, head};
    int end = begin;
    while (end < tiles && tile_seq[end] == seq) end++;
    if (threadIdx.x == 0) {
        for (int i = 0; i < BUFFERS; i++) {
            meet_init(room->full + i, 1 + WARPS);
            meet_init(room->done + i, 2 * WARPS);
        }
        for (int i = 0; i < GROUPS; i++) {
            meet_init(room->given + i, 2);
            meet_init(room->taken + i, 2);
            meet_init(room->found + i, 2);
            meet_init(room->heard + i, 2);
        }
        meet_ready();
    }
    __syncthreads();
    const int g = warp % WARPS / 2;
    if (warp >= 2 * WARPS) {
        const int tid = threadIdx.x - 64 * WARPS, row = tid / COLUMNS * 16, own = tid % COLUMNS;
        const int ch = 2 * kh * DK + head * DV + col + own;
        const Help help = {tid, head * DV + col, ch, vh * DV};
        const float4 taps = ((const float4*)conv_w)[ch];
        #pragma unroll 1
        for (int tile = begin; tile < end + BUFFERS; tile++) {
            const int i = tile - begin, at = i % BUFFERS, before = tile - BUFFERS;
            const bool more = tile < end;
            Held& h = room->held[at];
            Rows r;
            float in[19];
            if (more) {
                r = ::rows_of(tile, x, width, c, conv, first, starts, state_in, state_out, tile_seq, tile_lo, tile_hi);
                r.inputs(ch, ch, row, in);
                if (tid < COLUMNS) r.keep_tail(ch, ch);
            }
            if (before >= begin && before < end) {
                const int lo = tile_lo[before], hi = tile_hi[before];
                meet_wait(room->done + at, parity(i / BUFFERS - 1));
                if (tid == 0 && more) f.fetch(room, at, tile);
                help.store(h, y, before, lo, hi);
                __syncwarp();
            } else if (tid == 0 && more) f.fetch(room, at, tile);
            if (!more) continue;
            r.convolved(in, taps, 0.f, row, [&](int j, float v) { h.v[j][own] = v; });
            __syncwarp();
            if (lane == 0) meet_arrive(room->full + at);
        }
        return;
    }
    Pair16& pair = room->pairs[g];
    if (warp >= WARPS) {
        Answer w(warp);
        #pragma unroll 1
        for (int tile = begin; tile < end; tile++) {
            const int i = tile - begin, at = i % BUFFERS;
            meet_wait(room->full + at, parity(i / BUFFERS));
            w.step(room->held[at], STAGED ? room->parts[at].p : f.p + f.cell(tile) * PART, pair, room, g, i);
            __syncwarp();
            if (lane == 0) meet_arrive(room->done + at);
        }
        return;
    }
    Carry w(warp);
    const auto state = [&](int n) { return rec + ((size_t)(n / TAILS) * vh + head) * DK * DV + col + 16 * g; };
    if (starts[seq]) {
        const float* from = state(state_in[seq]);
        w.each([&](float& v, int r, int c) { v = from[r * DV + c]; });
    } else w.each([&](float& v, int, int) { v = 0.f; });
    #pragma unroll 1
    for (int tile = begin; tile < end; tile++) {
        const int i = tile - begin, at = i % BUFFERS, keep = state_out[tile * TILE + tile_hi[tile] - 1];
        meet_wait(room->full + at, parity(i / BUFFERS));
        w.step(room->held[at], STAGED ? room->parts[at].t : f.t + f.cell(tile) * PART, pair, room, g, i);
        __syncwarp();
        if (lane == 0) meet_arrive(room->done + at);
        if (keep < 0) continue;
        float* const to = state(keep);
        w.each([&](float& v, int r, int c) { to[r * DV + c] = v; });
    }
}
