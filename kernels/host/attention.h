// Softmax attention of a step's rows over the paged cache, from projection to
// projection: norms of heads, rotation, the cache, scores, values, gate. A row
// sees keys in blocks of KEYS positions that begin at multiples of KEYS, and what
// it makes of one joins what it has, in order: its bits depend on its own
// sequence alone, not on the rows beside it, on tiles or on threads.
#pragma once
#include "pool.h"
#include "room.h"
#include "rows.h"

extern "C" {
// As `_Rows` of atlas.ops.host_attend has it: the rows of a step
struct Rows {
    const int64_t* slots;  // [rows]
    // [seqs, table], [seqs], [seqs]
    const int32_t *tables, *starts, *counts;
    const float *cos, *sin;  // [rows, half], or null
    long rows, seqs, table, half, tiled;
};

// As `_Layer` has it
struct Layer {
    float *k, *v;  // pools [blocks, block, kv, d]
    const float *q_norm, *k_norm, *sinks;  // or null
    // Spans: numbers that are normed together
    long block, heads, kv, d, q_span, k_span;
    long window, gate, k_eq_v, v_norm, q_only;  // window 0: none
    float eps, scale;
};
}

struct Attend : Rows, Layer {
    const float* qkv;  // [rows, width]: gate? | q | k | v
    float* out;  // [rows, heads*d]
    long width;
};

// The latter as of atlas.ops.linear
constexpr long KEYS = 64, TILE = 64;
// Rows that go over the same keys one after the other
constexpr long TOGETHER = 8;
// Products that are not worth a second thread
constexpr long LITTLE = 1 << 16;

// Rows of one sequence, from position `at` on
struct Group {
    long row, rows, seq, at;
};

struct Attending {
    const Attend* a;
    float* q;  // [rows, heads*d]: normed and rotated
    const Group* groups;
};

static void norm_spans(
        float* x, const float* gain, long span, float eps, long n) {
    for (long i = 0; i < n; i += span)
        norm(x + i, gain, eps, x + i, span);
}

static void turn_heads(const Attend& a, float* x, long row, long heads) {
    if (a.cos)
        for (long h = 0; h < heads; h++)
            rotate(x + h * a.d, a.cos + row * a.half, a.sin + row * a.half,
                    a.half);
}

// Keys and values of a row into the cache
static void remember(const Attend& a, const float* k, long row) {
    long n = a.kv * a.d;
    if (a.q_only || a.slots[row] < 0)
        return;
    float* key = a.k + a.slots[row] * n;
    float* value = a.v + a.slots[row] * n;
    memcpy(value, a.k_eq_v ? k : k + n, n * 4);
    if (a.v_norm)
        norm_spans(value, nullptr, a.d, a.eps, n);
    memcpy(key, k, n * 4);
    if (a.k_norm)
        norm_spans(key, a.k_norm, a.k_span, a.eps, n);
    turn_heads(a, key, row, a.kv);
}

static void prepare_row(const Attending& s, long row) {
    const Attend& a = *s.a;
    long n = a.heads * a.d;
    const float* from = a.qkv + row * a.width + a.gate * n;
    float* q = s.q + row * n;
    memcpy(q, from, n * 4);
    if (a.q_norm)
        norm_spans(q, a.q_norm, a.q_span, a.eps, n);
    turn_heads(a, q, row, a.heads);
    remember(a, from + n, row);
}

static void prepare_some(void* with, long i) {
    const Attending& s = *(const Attending*)with;
    long end = std::min((i + 1) * TOGETHER, s.a->rows);
    for (long r = i * TOGETHER; r < end; r++)
        prepare_row(s, r);
}

// Scores of H queries, n to the next, and the keys from..to of a block; others'
// are -inf
template <int H>
APART void scores(
        const float* q, const float* const* key, long d, float scale, long from,
        long to, float (*s)[KEYS]) {
    for (int h = 0; h < H; h++)
        std::fill_n(s[h], KEYS, -INFINITY);
    for (long j = from / 4 * 4; j < to; j += 4) {
        f8 acc[H][4] = {};
        for (long i = 0; i < d; i += 8) {
            f8 a[H];
            #pragma GCC unroll 16
            for (int h = 0; h < H; h++)
                keep(a[h] = load<f8>(q + h * d + i));
            #pragma GCC unroll 16
            for (int n = 0; n < 4; n++) {
                f8 b = load<f8>(key[j + n] + i);
                keep(b);
                #pragma GCC unroll 16
                for (int h = 0; h < H; h++)
                    acc[h][n] = fma(b, a[h], acc[h][n]);
            }
        }
        #pragma GCC unroll 16
        for (int h = 0; h < H; h++) {
            float y[4];
            sum4(acc[h], y);
            store(y, load<f4>(y) * scale);
            if (j >= from && j + 4 <= to)
                store(s[h] + j, load<f4>(y));
            else
                for (int n = 0; n < 4; n++)
                    if (j + n >= from && j + n < to)
                        s[h][j + n] = y[n];
        }
    }
}

// Of scores of a block what is left of them by the largest so far, and by how
// much that of earlier blocks shrinks
INLINE float soften(float* s, float& top, float& total) {
    f8 most = load<f8>(s);
    for (long j = 8; j < KEYS; j += 8)
        most = larger(load<f8>(s + j), most);
    float now = top;
    for (int i = 0; i < 8; i++)
        now = std::max(now, most[i]);
    float shrink = exp8(all(top - now))[0];
    f8 acc = {};
    for (long j = 0; j < KEYS; j += 8) {
        f8 e = exp8(load<f8>(s + j) - all(now));
        store(s + j, e);
        acc += e;
    }
    top = now;
    total = total * shrink + sum(acc);
    return shrink;
}

// o = o * shrink + s v, C times eight columns of H queries
template <int H, int C>
APART void values(
        const float (*s)[KEYS], const float* shrink, const float* const* value,
        long at, long from, long to, float* o, long d) {
    f8 acc[H][C];
    #pragma GCC unroll 16
    for (int h = 0; h < H; h++)
        #pragma GCC unroll 16
        for (int c = 0; c < C; c++)
            acc[h][c] = load<f8>(o + h * d + at + 8 * c) * all(shrink[h]);
    for (long j = from; j < to; j++) {
        f8 p[H];
        #pragma GCC unroll 16
        for (int h = 0; h < H; h++)
            keep(p[h] = all(s[h][j]));
        #pragma GCC unroll 16
        for (int c = 0; c < C; c++) {
            f8 v = load<f8>(value[j] + at + 8 * c);
            keep(v);
            #pragma GCC unroll 16
            for (int h = 0; h < H; h++)
                acc[h][c] = fma(v, p[h], acc[h][c]);
        }
    }
    #pragma GCC unroll 16
    for (int h = 0; h < H; h++)
        #pragma GCC unroll 16
        for (int c = 0; c < C; c++)
            store(o + h * d + at + 8 * c, acc[h][c]);
}

// What heads of one row have seen so far
struct Seen {
    float *o, *top, *total;
};

// A block's keys, of which a row sees those from..to
struct Block {
    const float* key[KEYS];
    const float* value[KEYS];
};

template <int H>
static void see(
        const Attend& a, const float* q, const Block& b, long from, long to,
        const Seen& y) {
    alignas(32) float s[H][KEYS];
    float shrink[H];
    scores<H>(q, b.key, a.d, a.scale, from, to, s);
    for (int h = 0; h < H; h++)
        shrink[h] = soften(s[h], y.top[h], y.total[h]);
    long c = 0;
    for (; c + 32 <= a.d; c += 32)
        values<H, 4>(s, shrink, b.value, c, from, to, y.o, a.d);
    for (; c < a.d; c += 8)
        values<H, 1>(s, shrink, b.value, c, from, to, y.o, a.d);
}

// All `heads` queries of a row that share a key
static void see_all(
        const Attend& a, const float* q, const Block& b, long from, long to,
        Seen y, long heads) {
    for (long h = 0; h < heads;) {
        long n = std::min(heads - h, 3L);
        Seen own = {y.o + h * a.d, y.top + h, y.total + h};
        if (n == 3)
            see<3>(a, q + h * a.d, b, from, to, own);
        else if (n == 2)
            see<2>(a, q + h * a.d, b, from, to, own);
        else
            see<1>(a, q + h * a.d, b, from, to, own);
        h += n;
    }
}

// Keys and values of key head h at positions from.. of a sequence; those from
// `end` on are not read
static void find(
        const Attend& a, long seq, long h, long from, long end, Block& b) {
    const int32_t* table = a.tables + seq * a.table;
    long block = from / a.block, in = from % a.block;
    for (long j = 0; j < KEYS; j++) {
        long at = ((table[block] * a.block + in) * a.kv + h) * a.d;
        b.key[j] = a.k + at;
        b.value[j] = a.v + at;
        if (from + j + 1 < end && ++in == a.block)
            block++, in = 0;
    }
}

// Before it has seen a key: nothing, or its sink
static void begin(const Attend& a, const Seen& y, long rows, long heads, long h) {
    std::fill_n(y.o, rows * heads * a.d, 0.f);
    for (long i = 0; i < rows * heads; i++) {
        y.top[i] = a.sinks ? a.sinks[h * heads + i % heads] : -INFINITY;
        y.total[i] = a.sinks ? 1 : 0;
    }
}

// A head's result
static void finish(
        const Attend& a, const float* o, float total, long row, long head) {
    float* to = a.out + (row * a.heads + head) * a.d;
    const float* gate = a.qkv + row * a.width + head * a.d;
    for (long i = 0; i < a.d; i += 8) {
        f8 v = load<f8>(o + i) / all(total);
        store(to + i, a.gate ? v * times_sigmoid(all(1), load<f8>(gate + i)) : v);
    }
}

static thread_local Room of_heads;

static void attend_group(void* with, long i) {
    const Attending& s = *(const Attending*)with;
    const Attend& a = *s.a;
    const Group& g = s.groups[i / a.kv];
    long h = i % a.kv, heads = a.heads / a.kv, own = heads * a.d,
         all = g.rows * heads;
    float* room = of_heads.of(all * (a.d + 2));
    Seen y = {room, room + all * a.d, room + all * (a.d + 1)};
    begin(a, y, g.rows, heads, h);
    long end = g.at + g.rows,
         first = a.window ? std::max(0L, g.at - a.window + 1) : 0;
    Block b;
    for (long at = first / KEYS * KEYS; at < end; at += KEYS) {
        find(a, g.seq, h, at, end, b);
        for (long r = 0; r < g.rows; r++) {
            long p = g.at + r,
                 least = a.window ? std::max(0L, p - a.window + 1) : 0;
            long from = std::max(least - at, 0L);
            long to = std::min(p + 1 - at, KEYS);
            const float* q = s.q + (g.row + r) * a.heads * a.d + h * own;
            Seen row = {y.o + r * own, y.top + r * heads, y.total + r * heads};
            if (from < to)
                see_all(a, q, b, from, to, row, heads);
        }
    }
    for (long k = 0; k < all; k++)
        finish(a, y.o + k * a.d, y.total[k], g.row + k / heads,
                h * heads + k % heads);
}

// The rows of all sequences, a few at a time; padding, which nobody reads,
// becomes zeros
static std::vector<Group> grouped(const Attend& a) {
    std::vector<Group> found;
    long row = 0;
    for (long s = 0; s < a.seqs; s++) {
        long lead = a.tiled ? a.starts[s] % TILE : 0, n = a.counts[s],
             most = a.tiled ? TOGETHER : 1;
        for (long i = 0; i < n; i += most)
            found.push_back(
                    {row + lead + i, std::min(most, n - i), s, a.starts[s] + i});
        row += a.tiled ? (lead + n + TILE - 1) / TILE * TILE : n;
    }
    return found;
}

static void clear_padding(const Attend& a, const std::vector<Group>& groups) {
    long row = 0, n = a.heads * a.d;
    for (const Group& g : groups) {
        std::fill(a.out + row * n, a.out + g.row * n, 0.f);
        row = g.row + g.rows;
    }
    std::fill(a.out + row * n, a.out + a.rows * n, 0.f);
}
