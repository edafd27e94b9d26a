// The state of a gated delta net from tile to tile (64 positions) of each sequence of a prefill step, and
// what every row reads from it, before norm and gate (gated_norm.cu). Its operands are prepared by
// delta_prep.cu; values go through the convolution here, and the tails that belong to them are kept.
//   N = T beta (V - G K S),   O = G Q S + P N,   S = G[63] S + K' E N
// Parallel over sequences, heads and 16*GROUPS columns. Two warps share 16 columns of a state: each keeps half
// of the rows, transposed (16 x DK/2), in the registers that a product leaves its sums in, which are also the
// registers that the next product takes its left operand from. Of K S and Q S each has a part of the sum, and
// each finishes 32 of the 64 rows; of each two row tiles, one. What they tell each other goes through shared memory.
//   q, k     : [tiles, kh, qf]        u32   limbs of delta_prep.cu, qf = 64*DK
//   t, p     : [tiles, vh, 2560]      u32   fragments of triangles
//   scal     : [tiles, vh, 192]       f32   decay from the tile's begin, decay to its end, beta
//   x        : [r, width]             f32   q | k | v | z | b | a, width = 2*kh*DK + 2*vh*DV + 2*vh
//   conv_w   : [c, 4]                 f32   c = 2*kh*DK + vh*DV
//   conv     : [slots, 3, c]          f32   inputs before a sequence's first row, oldest first; written at state_out
//   rec      : [slots, vh, dk, dv]    f32   states, read at state_in, written at state_out
//   first    : [seqs1]                i32   a row in the first tile of each sequence
//   starts   : [seqs]                 i32   position of a sequence's first row
//   state_in : [seqs]                 i32   slot to begin from (unread at position 0)
//   state_out : [r]                   i32   slot for the state after a row, or -1; looked at for the last row of each tile
//   tile_seq, tile_lo, tile_hi : [tiles] i32   sequence of a tile (-1: none), its real rows lo..hi-1
//   y        : [r, vhd]               f32   real rows are written, vhd = vh*DV
//   -D DK= DV= (32, 64 or 128) GROUPS= (1 or 2) BUFFERS= (1 or 2: tiles in shared memory)
//   launch: <<<(vh*DV/16/GROUPS, seqs), 64*GROUPS, BUFFERS*(512*DK + 21504 + 5120*GROUPS) + 8192*GROUPS + 64>>>
#include "lib/bulk.cuh"
#include "lib/chunk.cuh"
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
constexpr int THREADS = 64 * GROUPS, COLUMNS = 16 * GROUPS;
constexpr int LINE = COLUMNS + 4;       // floats of a row of values: no bank conflicts in a warp
constexpr int STEPS = DK / 32;          // products along half of the state's rows
constexpr int NT = DK / 16;             // column tiles of that half
constexpr int LIMBS = 16 * DK, PART = 640;  // of q, k and of a triangle, in units of 16 bytes
typedef Operand<Mixed<DK>> Mat;

struct Held {  // of a tile
    uint4 k[LIMBS], q[LIMBS], t[PART], p[PART];
    float scal[192], v[67 * LINE];  // three rows before the tile's
    float pad[(256 - (192 + 67 * LINE) % 256 + 256) % 256];
};
struct Room {
    Held held[BUFFERS];
    float4 told[2 * GROUPS][8][32];     // what a warp tells the other one, and hears from it
    Meeting rest[BUFFERS], queries[BUFFERS];
};

// Where operands and values of a head come from
struct From {
    const uint4 *q, *k, *t, *p;
    const float *scal, *x, *conv, *taps;
    int kh, vh, key, head, col, width, c, channel;  // col: first column of the block; channel: of it in the convolution
    __device__ __forceinline__ size_t key_of(int tile) const { return ((size_t)tile * kh + key) * LIMBS; }
    __device__ __forceinline__ size_t head_of(int tile) const { return (size_t)tile * vh + head; }
};
// A sequence's tiles
struct Span { int first, end, start; const float* tail; };

// By one thread
__device__ __forceinline__ void fetch_queries(Held& h, Meeting* m, const From& f, int tile) {
    bulk_expect(m, LIMBS * 16);
    bulk_copy(h.q, f.q + f.key_of(tile), LIMBS * 16, m);
}
__device__ __forceinline__ void fetch_rest(Held& h, Meeting* m, const From& f, int tile) {
    const size_t head = f.head_of(tile);
    bulk_expect(m, LIMBS * 16 + 2 * PART * 16 + 192 * 4);
    bulk_copy(h.k, f.k + f.key_of(tile), LIMBS * 16, m);
    bulk_copy(h.t, f.t + head * PART, PART * 16, m);
    bulk_copy(h.p, f.p + head * PART, PART * 16, m);
    bulk_copy(h.scal, f.scal + head * 192, 192 * 4, m);
}
// By all: inputs of the convolution, rows -3..63
template <int N> __device__ __forceinline__ void fetch_inputs(Held& h, const From& f, const Span& s, int tile, int hi) {
    constexpr int PER = COLUMNS * 4 / N;
    const int rel = (tile - s.first) * TILE - s.start % TILE;  // row 0 of the tile, counted from the sequence's first row here
    for (int i = threadIdx.x; i < 67 * PER; i += THREADS) {
        const int j = i / PER - 3, at = i % PER * (N / 4);
        const float* from = f.x + ((long long)tile * TILE + j) * f.width + f.channel + at;
        bool is = j < hi;
        if (rel + j < 0) {
            is = s.tail && rel + j >= -3;
            from = s.tail + (is ? (3 + rel + j) * f.c : 0) + f.channel + at;
        }
        cp_async_or_zero<N>(h.v + (j + 3) * LINE + at, is ? from : f.x, is);
    }
}
__device__ __forceinline__ void fetch_values(Held& h, const From& f, const Span& s, int tile, int hi) {
    if (f.width % 4 == 0) fetch_inputs<16>(h, f, s, tile, hi);
    else fetch_inputs<8>(h, f, s, tile, hi);
    cp_async_commit();
}

__device__ __forceinline__ float4 four(const float* v) { return make_float4(v[0], v[1], v[2], v[3]); }

// Two warps that share 16 columns; `half` is which of them this one is
struct Pass {
    int lane, half, c2;     // c2: this lane's first row of a row tile
    float S[NT][4];
    float kS[8][4], qS[8][4];  // 2j: of this warp's row tile in pair j, 2j+1: of the other warp's
    float v[4][4], N[4][4];

    __device__ __forceinline__ int flip(int j) const { return half ^ (j & 1); }
    __device__ __forceinline__ int tile_of(int j) const { return 2 * j + flip(j); }
    __device__ __forceinline__ int row(int j) const { return 8 * tile_of(j) + c2; }

    // Products of the state with 64 rows
    __device__ __forceinline__ void rows_of(uint4* b, const Mat& M, int s) const {
        #pragma unroll
        for (int j = 0; j < 4; j++) M.b_turned(b + 2 * j, 16 * j, half * (DK / 2) + 16 * s, flip(j));
    }
    __device__ __forceinline__ void read(const Held& h, Meeting* queries, unsigned parity) {
        const Mat K = {{(const unsigned char*)h.k}}, Q = {{(const unsigned char*)h.q}};
        #pragma unroll
        for (int i = 0; i < 8; i++)
            #pragma unroll
            for (int e = 0; e < 4; e++) kS[i][e] = qS[i][e] = 0.f;
        #pragma unroll
        for (int s = 0; s < STEPS; s++) {
            Limbs a;
            uint4 b[8];
            a.of_sums(S[2 * s], S[2 * s + 1]);
            rows_of(b, K, s);
            mma_limbs<8>(kS, a, b);
            if (s == 0) meet_wait(queries, parity);
            rows_of(b, Q, s);
            mma_limbs<8>(qS, a, b);
        }
    }
    // Values of this warp's rows, as they leave the convolution; lane/4 is the column. Those that are not real are zero.
    __device__ __forceinline__ void values(const Held& h, const float* taps, int col, int lo, int hi) {
        #pragma unroll
        for (int m = 0; m < 2; m++) {
            const int c = col + lane / 4 + 8 * m;
            const float4 w = ((const float4*)taps)[c];
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                float in[5];
                #pragma unroll
                for (int i = 0; i < 5; i++) in[i] = h.v[(row(j) + i) * LINE + c];
                #pragma unroll
                for (int e = 0; e < 2; e++) {
                    const float y = fmaf(in[e + 3], w.w, fmaf(in[e + 2], w.z, fmaf(in[e + 1], w.y, in[e] * w.x)));
                    const bool real = row(j) + e >= lo && row(j) + e < hi;
                    v[j][2 * m + e] = real ? __fdividef(y, 1.f + __expf(-y)) : 0.f;
                }
            }
        }
    }
    // The left operand of rows 16s.., of what this warp and the other one have of it
    __device__ __forceinline__ Limbs both(int s, uint4 mine, uint4 others) const {
        const uint4 a = flip(s) ? others : mine, b = flip(s) ? mine : others;
        return {{a.x, a.y, b.x, b.y}, {a.z, a.w, b.z, b.w}};
    }
    static __device__ __forceinline__ uint4 limbs_of(const float* n, float a = 1.f, float b = 1.f) {
        const Pair p = limbs(n[0] * a, n[1] * b), q = limbs(n[2] * a, n[3] * b);
        return make_uint4(p.hi, q.hi, p.lo, q.lo);
    }
    // c += A B' below the diagonal, for this warp's row tiles
    __device__ __forceinline__ void below(float (*c)[4], const Limbs& a, const uint4* triangles, int s) const {
        uint4 b[4];
        #pragma unroll
        for (int j = 0; j < 4; j++)
            if (j >= s) b[j] = triangles[triangle(s, tile_of(j)) * 32 + lane];
        mma_limbs<4>(c, a, b, s);
    }
    // What is new in each row, as limbs: beta (V - G K S)
    __device__ __forceinline__ void news(uint4* r, const float* scal, const float4 (*heard)[32]) {
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            const float4 k = heard[j][lane], q = heard[4 + j][lane];
            const float2 G = *(const float2*)(scal + row(j)), beta = *(const float2*)(scal + 128 + row(j));
            float n[4];
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                const float s = kS[2 * j][e] + (&k.x)[e];
                n[e] = (e % 2 ? beta.y : beta.x) * fmaf(-(e % 2 ? G.y : G.x), s, v[j][e]);
                qS[2 * j][e] = (qS[2 * j][e] + (&q.x)[e]) * (e % 2 ? G.y : G.x);
            }
            r[j] = limbs_of(n);
        }
    }
    __device__ __forceinline__ void solve(const Held& h, const uint4* r, const float4 (*heard)[32]) {
        #pragma unroll
        for (int j = 0; j < 4; j++) N[j][0] = N[j][1] = N[j][2] = N[j][3] = 0.f;
        #pragma unroll
        for (int s = 0; s < 4; s++) below(N, both(s, r[s], ((const uint4*)heard[s])[lane]), h.t, s);
    }
    // The state after the tile, and o, what it answered
    __device__ __forceinline__ void go_on(const Held& h, float (*o)[4], const float4 (*heard)[32]) {
        const Mat K = {{(const unsigned char*)h.k}};
        const float last = h.scal[TILE - 1];
        float4 others[4];
        #pragma unroll
        for (int s = 0; s < 4; s++) others[s] = heard[4 + s][lane];
        #pragma unroll
        for (int i = 0; i < NT; i++)
            #pragma unroll
            for (int e = 0; e < 4; e++) S[i][e] *= last;
        #pragma unroll
        for (int s = 0; s < 4; s++) {
            const float* E = h.scal + TILE + c2;
            const float2 mine = *(const float2*)(E + 8 * tile_of(s));
            const float2 its = *(const float2*)(E + 8 * (tile_of(s) ^ 1));
            const Limbs a = both(s, limbs_of(N[s], mine.x, mine.y), limbs_of(&others[s].x, its.x, its.y));
            uint4 b[NT];
            #pragma unroll
            for (int i = 0; i < NT; i += 2) K.b(b + i, 16 * s, half * (DK / 2) + 8 * i);
            mma_limbs<NT>(S, a, b);
        }
        #pragma unroll
        for (int j = 0; j < 4; j++)
            #pragma unroll
            for (int e = 0; e < 4; e++) o[j][e] = qS[2 * j][e];
        #pragma unroll
        for (int s = 0; s < 4; s++) below(o, both(s, limbs_of(N[s]), limbs_of(&others[s].x)), h.p, s);
    }
    // f(sum, row, column) of this warp's part of the state
    template <class F> __device__ __forceinline__ void each(F f) {
        #pragma unroll
        for (int i = 0; i < NT; i++)
            #pragma unroll
            for (int e = 0; e < 4; e++) f(S[i][e], half * (DK / 2) + 8 * i + c2 + e % 2, lane / 4 + e / 2 * 8);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS) delta_many(const unsigned* __restrict__ q,
        const unsigned* __restrict__ k, const unsigned* __restrict__ t, const unsigned* __restrict__ p,
        const float* __restrict__ scal, const float* __restrict__ x, const float* __restrict__ conv_w, float* conv,
        float* rec, const int* __restrict__ first, const int* __restrict__ starts, const int* __restrict__ state_in,
        const int* __restrict__ state_out, const int* __restrict__ tile_seq, const int* __restrict__ tile_lo,
        const int* __restrict__ tile_hi, float* y, int tiles, int kh, int vh, int c, int width) {
    DYNAMIC_SHARED(Room, room);
    constexpr int PARTS = DV / COLUMNS;
    const int tid = threadIdx.x, warp = tid / 32, seq = blockIdx.y, head = blockIdx.x / PARTS;
    const int col = blockIdx.x % PARTS * COLUMNS, own = warp / 2 * 16;  // of the block, and of the warp in it
    const int channel = 2 * kh * DK + head * DV + col;
    const From f = {(const uint4*)q, (const uint4*)k, (const uint4*)t, (const uint4*)p, scal, x, conv, conv_w,
        kh, vh, head / (vh / kh), head, col, width, c, channel};
    Span s = {first[seq] / TILE, 0, starts[seq], nullptr};
    for (s.end = s.first; s.end < tiles && tile_seq[s.end] == seq;) s.end++;
    if (s.end == s.first) return;
    if (s.start) s.tail = conv + (size_t)state_in[seq] * 3 * c;
    if (tid == 0) {
        for (int i = 0; i < BUFFERS; i++) {
            meet_init(room->rest + i, 1);
            meet_init(room->queries + i, 1);
        }
        meet_ready();
        fetch_rest(room->held[0], room->rest, f, s.first);
        for (int i = 0; i < BUFFERS && s.first + i < s.end; i++)
            fetch_queries(room->held[i], room->queries + i, f, s.first + i);
    }
    int lo = tile_lo[s.first], hi = tile_hi[s.first];
    fetch_values(room->held[0], f, s, s.first, hi);
    Pass w;
    w.lane = tid % 32; w.half = warp % 2; w.c2 = w.lane % 4 * 2;
    const auto state = [&](int slot) { return rec + ((size_t)slot * vh + head) * DK * DV + col + own; };
    if (s.start) {
        const float* from = state(state_in[seq]);
        w.each([&](float& v, int r, int c) { v = from[r * DV + c]; });
    } else w.each([&](float& v, int, int) { v = 0.f; });
    float4 (*told)[32] = room->told[warp], (*its)[32] = room->told[warp ^ 1];
    cp_async_wait<0>();
    __syncthreads();
    #pragma unroll 1
    for (int tile = s.first; tile < s.end; tile++) {
        const int i = tile - s.first, at = i % BUFFERS, next = (i + 1) % BUFFERS;
        const unsigned parity = i / BUFFERS % 2;
        const bool more = tile + 1 < s.end;
        const int next_lo = more ? tile_lo[tile + 1] : 0, next_hi = more ? tile_hi[tile + 1] : 0;
        const int keep = state_out[tile * TILE + hi - 1];
        Held& h = room->held[at];
        meet_wait(room->rest + at, parity);
        w.read(h, room->queries + at, parity);
        w.values(h, conv_w + channel * 4, own, lo, hi);
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            told[j][w.lane] = four(w.kS[2 * j + 1]);
            told[4 + j][w.lane] = four(w.qS[2 * j + 1]);
        }
        __syncthreads();  // nobody needs the last tile any more, nor this one's queries
        if (tid == 0) {
            if (tile + BUFFERS < s.end) fetch_queries(h, room->queries + at, f, tile + BUFFERS);
            if (BUFFERS > 1 && more) fetch_rest(room->held[next], room->rest + next, f, tile + 1);
        }
        if (BUFFERS > 1 && more) fetch_values(room->held[next], f, s, tile + 1, next_hi);
        uint4 r[4];
        w.news(r, h.scal, its);
        #pragma unroll
        for (int j = 0; j < 4; j++) ((uint4*)its[j])[w.lane] = r[j];
        __syncthreads();
        w.solve(h, r, told);
        #pragma unroll
        for (int j = 0; j < 4; j++) its[4 + j][w.lane] = four(w.N[j]);
        if (BUFFERS > 1) cp_async_wait<0>();
        __syncthreads();
        float o[4][4];
        w.go_on(h, o, told);
        #pragma unroll
        for (int j = 0; j < 4; j++)
            #pragma unroll
            for (int e = 0; e < 4; e++) {
                const int row = w.row(j) + e % 2;
                const size_t to = ((size_t)tile * TILE + row) * vh * DV + head * DV + col + own + w.lane / 4 + e / 2 * 8;
                if (row >= lo && row < hi) y[to] = o[j][e];
            }
        if (keep >= 0) {
            float *to = state(keep), *tail = conv + (size_t)keep * 3 * c + channel;
            w.each([&](float& v, int r, int c) { to[r * DV + c] = v; });
            for (int j = tid; j < 3 * COLUMNS; j += THREADS)
                tail[j / COLUMNS * c + j % COLUMNS] = h.v[(hi + j / COLUMNS) * LINE + j % COLUMNS];
        }
        if (BUFFERS == 1 && more) {
            __syncthreads();
            if (tid == 0) fetch_rest(h, room->rest, f, tile + 1);
            fetch_values(h, f, s, tile + 1, next_hi);
            cp_async_wait<0>();
            __syncthreads();
        }
        lo = next_lo;
        hi = next_hi;
    }
}
