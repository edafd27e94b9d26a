// y[r,n] = sum over k of W[n,k] x[r,k]: rows of stored weights (formats.h),
// float32 activations, on the processor. An element is made of sums over a part
// of the columns (`part_of`), each of eight sums of every eighth product, added
// up one after the other, whatever the number of rows and of threads: its bits
// depend on its own rows of x and W alone. Few rows are multiplied as the weights
// are widened. For more, a panel of rows of W is widened to float32 once and
// stays in the second cache beside a block of rows of x; of the panel, a group of
// rows stays in the first cache while the rows of the block pass by, and a tile
// of sums in registers.
#include <type_traits>
#include "attention.h"
#include "formats.h"

// What is asked for. Few rows: `step` numbers from one to the next; more: packed,
// part by part
struct Work {
    const Matrix* w;
    const float* x;
    float* y;
    long rows, step, y_step;
};

// Rows of x that are multiplied as weights are widened
constexpr int FEW = 4;
// Of a tile of sums that stay in registers
constexpr int ROWS = 3, COLUMNS = 4;
// Columns that are summed before they are added to the rest
constexpr long WIDEST = 640;
constexpr long GROUP = 4;  // rows of a panel in the first cache
// Bytes of a panel, and of a block of rows of x
constexpr long CACHE = 160 << 10;
// Bytes of weights that one thread takes at a time: a stream
constexpr long GRAIN = 256 << 10;
// Bytes between what is multiplied and what is fetched: of rows that are
// multiplied together, and of one in a stream
constexpr long AHEAD = 4 << 10, NEAR = 2 << 10;
// Rows of x that a thread prepares at a time: whole tiles
constexpr long STRIP = 24;
// Numbers that are not worth a second thread
constexpr long SMALL = 1 << 15;

// Columns that are summed at a time: parts of k that are even, but for whole 32
static long part_of(long k) {
    long parts = (k + WIDEST - 1) / WIDEST;
    return (k + parts * 32 - 1) / (parts * 32) * 32;
}
static long whole32(long k) { return (k + 31) / 32 * 32; }

// 32 weights, of which `rest` are there: zeros behind
template <class F> INLINE void widen(const Row& r, long rest, f8* w) {
    if (!F::ENDS || rest >= 32)
        return F::widen(r, w);
    uint8_t data[F::BYTES] = {}, scale[4] = {};
    memcpy(data, r.data, rest * F::BYTES / 32);
    if (r.scale)
        memcpy(scale, r.scale, std::is_same<F, NVFP4>::value ? 1 : 4);
    F::widen({data, scale, r.zero, r.factor}, w);
}

// Those of a row from the c-th 32 on. `first`: of those that are asked for one
// after the other
template <class F>
INLINE void widen(
        const Row& row, long c, bool first, long rest, typename F::Held& held,
        f8* w) {
    Row r = F::at(row, c);
    if constexpr (F::HELD > 1) {
        if (first || c % F::HELD == 0)
            F::hold(r, held);
        return F::widen(r, held, w);
    } else
        widen<F>(r, rest, w);
}

// Reading takes longer than widening: each of several shares of the rows is read
// from end to end, and the memory sees as many streams. Else rows that lie side
// by side are multiplied together
template <class F> static constexpr bool wide = F::BYTES >= 64;

// Fetch what is multiplied after next
INLINE void fetch(const Matrix& w, long n, long rows) {
    const uint8_t* p = w.data + (n + rows) * w.data_row;
    long bytes = rows * w.data_row;
    long ahead = std::max(AHEAD - bytes, 0L);
    for (long i = 0; i < bytes; i += 64)
        __builtin_prefetch(p + ahead + i);
}

// R rows of x times N rows of W, `apart` from one to the next
template <class F, int R, int N>
static void direct(const Work& v, long n, long apart = 1) {
    if (!wide<F>)
        fetch(*v.w, n, N);
    Row row[N];
    #pragma GCC unroll 16
    for (int i = 0; i < N; i++)
        row[i] = F::row(*v.w, n + i * apart);
    float y[R][N] = {};
    long part = part_of(v.w->k);
    for (long k = 0; k < v.w->k; k += part) {
        f8 acc[R][N] = {};
        typename F::Held held[N];
        long end = std::min(k + part, v.w->k);
        for (long c = k / 32; c * 32 < end; c++) {
            #pragma GCC unroll 16
            for (int i = 0; i < N; i++) {
                f8 w[4];
                for (int b = 0; wide<F> && b < F::BYTES; b += 64)
                    __builtin_prefetch(row[i].data + c * F::BYTES + NEAR + b);
                widen<F>(row[i], c, 32 * c == k, end - 32 * c, held[i], w);
                #pragma GCC unroll 16
                for (int r = 0; r < R; r++) {
                    const float* x = v.x + r * v.step + 32 * c;
                    #pragma GCC unroll 16
                    for (int j = 0; j < 4; j++)
                        acc[r][i] = fma(w[j], load<f8>(x + 8 * j), acc[r][i]);
                }
            }
        }
        #pragma GCC unroll 16
        for (int r = 0; r < R; r++)
            #pragma GCC unroll 16
            for (int i = 0; i < N; i++)
                y[r][i] += sum(acc[r][i]);
    }
    #pragma GCC unroll 16
    for (int r = 0; r < R; r++)
        #pragma GCC unroll 16
        for (int i = 0; i < N; i++)
            v.y[r * v.y_step + n + i * apart] = y[r][i];
}

template <class F, int R> static void few(const Work& v, long n, long end) {
    // As many sums as there are registers
    constexpr int N = R > 3 ? 2 : 4;
    if constexpr (wide<F>) {
        long share = (end - n) / N;
        for (long i = 0; i < share; i++)
            direct<F, R, N>(v, n + i, share);
        n += N * share;
    } else
        for (; n + N <= end; n += N)
            direct<F, R, N>(v, n);
    for (; n < end; n++)
        direct<F, R, 1>(v, n);
}

// Where results of a product go: the first part of the columns finds nothing
// there to add to
struct Sums {
    float* y;
    long step;
    bool first;
    Sums at(long r, long n) const { return {y + r * step + n, step, first}; }
};

// R rows of x times N widened rows of W, k columns of both, packed (`packed`)
template <int R, int N>
APART void tile(const float* x, const float* w, long k, const Sums& to) {
    f8 acc[R][N] = {};
    for (long i = 0; i < k; i += 8, x += 8 * R, w += 8 * N) {
        f8 a[R];
        #pragma GCC unroll 16
        for (int r = 0; r < R; r++)
            keep(a[r] = load<f8>(x + 8 * r));
        #pragma GCC unroll 16
        for (int n = 0; n < N; n++) {
            f8 b = load<f8>(w + 8 * n);
            keep(b);
            #pragma GCC unroll 16
            for (int r = 0; r < R; r++)
                acc[r][n] = fma(b, a[r], acc[r][n]);
        }
    }
    #pragma GCC unroll 16
    for (int r = 0; r < R; r++) {
        float* y = to.y + r * to.step;
        if constexpr (N == 4) {
            float s[4];
            sum4(acc[r], s);
            store(y, (to.first ? f4{} : load<f4>(y)) + load<f4>(s));
        } else
            #pragma GCC unroll 16
            for (int n = 0; n < N; n++)
                y[n] = (to.first ? 0 : y[n]) + sum(acc[r][n]);
    }
}

// R rows of x times n widened rows of W
template <int R>
static void strip(
        const float* x, const float* w, long k, const Sums& to, long n) {
    long i = 0;
    for (; i + COLUMNS <= n; i += COLUMNS)
        tile<R, COLUMNS>(x, w + i * k, k, to.at(0, i));
    for (; i < n; i++)
        tile<R, 1>(x, w + i * k, k, to.at(0, i));
}

// Where eight numbers, from column c on, of row i of n stand: `most` rows lie
// side by side, eight numbers of each in turn, and where fewer are left each lies
// by itself
INLINE float* packed(float* to, long i, long n, long most, long width, long c) {
    long first = i / most * most;
    if (first + most <= n)
        return to + first * width + c * most + (i - first) * 8;
    return to + i * width + c;
}

static thread_local Room of_panel;

// Columns k.. of rows n.. of W as float32, `width` of them, a multiple of 32:
// packed
template <class F>
static void widen_panel(
        const Matrix& w, long n, long rows, long k, long width, float* panel) {
    for (long i = 0; i < rows; i++) {
        fetch(w, n + i, 1);
        Row row = F::row(w, n + i);
        typename F::Held held;
        for (long c = 0; c < width; c += 32) {
            f8 v[4];
            widen<F>(row, (k + c) / 32, !c, w.k - k - c, held, v);
            #pragma GCC unroll 16
            for (int j = 0; j < 4; j++)
                store(packed(panel, i, rows, COLUMNS, width, c + 8 * j), v[j]);
        }
    }
}

// So many rows of x times a panel of n rows of W, `width` columns of both, packed
static void visit(
        const float* x, long rows, const float* panel, long n, long width,
        const Sums& to) {
    long fit = CACHE / (4 * width) / ROWS;
    long most = std::max(fit, 1L) * ROWS;
    for (long begin = 0; begin < rows; begin += most)
        for (long i = 0; i < n; i += GROUP) {
            long end = std::min(begin + most, rows),
                 size = std::min(GROUP, n - i), r = begin;
            const float* w = panel + i * width;
            for (; r + ROWS <= end; r += ROWS)
                strip<ROWS>(x + r * width, w, width, to.at(r, i), size);
            for (; r < end; r++)
                strip<1>(x + r * width, w, width, to.at(r, i), size);
        }
}

template <class F> static void many(const Work& v, long begin, long end) {
    long n = end - begin;
    long part = part_of(v.w->k);
    long step = whole32(v.w->k);
    float* panel = of_panel.of(n * part);
    for (long k = 0; k < v.w->k; k += part) {
        long width = std::min(step - k, part);
        widen_panel<F>(*v.w, begin, n, k, width, panel);
        visit(v.x + k * v.rows, v.rows, panel, n, width,
                {v.y + begin, v.y_step, !k});
    }
}

// How rows begin..end of a format are multiplied: one row of x, two, … four, more
typedef void (*Kernel)(const Work&, long begin, long end);
template <class F> struct Kernels {
    static constexpr Kernel of[] = {
            few<F, 1>, few<F, 2>, few<F, 3>, few<F, 4>, many<F>};
    static constexpr long BYTES = F::BYTES;
};
struct Entry {
    const Kernel* of;
    long bytes;
};
template <class F> static constexpr Entry entry = {Kernels<F>::of, F::BYTES};

// In the order of `STORED` of atlas.ops.host
static const Entry formats[] = {entry<F32>, entry<F16>, entry<BF16>, entry<FP8>,
        entry<FP8>, entry<FP8_CHANNEL>, entry<FP8_BLOCK>, entry<NVFP4>,
        entry<MXFP4>, entry<INT4>, entry<Q45<false, false>>,
        entry<Q45<true, false>>, entry<Q45<false, true>>, entry<Q45<true, true>>,
        entry<Q8_0>, entry<Q45_K<false>>, entry<Q45_K<true>>, entry<Q6_K>};

// A matrix times rows, in pieces of `size` rows of the matrix, the first of which
// is number `first`
struct Job {
    Work v;
    Kernel kernel;
    long size, first, pieces;
};

static Job job_of(const Work& v, long threads, long first) {
    const Entry& e = formats[v.w->format];
    bool panels = v.rows > FEW;
    long bytes = panels ? 4 * part_of(v.w->k) : e.bytes * v.w->k / 32;
    long most = std::max((panels ? CACHE : GRAIN) / std::max(bytes, 1L), 1L);
    long share = (v.w->n + threads - 1) / threads,
         size = std::max(std::min(most, share), 1L);
    if (size > GROUP)
        size -= size % GROUP;
    return {v, e.of[panels ? FEW : v.rows - 1], size, first,
            (v.w->n + size - 1) / size};
}

static void piece(void* with, long i) {
    const Job* j = (const Job*)with;
    while (i >= j->first + j->pieces)
        j++;
    long begin = (i - j->first) * j->size;
    long end = std::min(begin + j->size, j->v.w->n);
    j->kernel(j->v, begin, end);
}

// Matrices that write side by side into y
static void multiply(const Matrix* w, long count, Work v, long threads) {
    static thread_local std::vector<Job> jobs;
    jobs.clear();
    long pieces = 0;
    for (long i = 0; i < count; i++) {
        v.w = w + i;
        if (v.w->n > 0)
            jobs.push_back(job_of(v, threads, pieces));
        if (v.w->n > 0)
            pieces += jobs.back().pieces;
        v.y += v.w->n;
    }
    pool.run(pieces, threads, piece, jobs.data());
}

// Rows of x on their way to a product: normed, and as it wants them
struct Entering {
    const float *x, *gain;
    float eps, *to;
    long rows, k, x_step;
};

// A row with zeros behind it up to whole 32
static void enter_row(const Entering& e, long r, float* to) {
    const float* x = e.x + r * e.x_step;
    if (e.gain)
        norm(x, e.gain, e.eps, to, e.k);
    else
        memcpy(to, x, e.k * 4);
    std::fill(to + e.k, to + whole32(e.k), 0.f);
}

static thread_local Room of_row;

static void enter_packed(void* with, long i) {
    const Entering& e = *(const Entering*)with;
    long step = whole32(e.k), part = part_of(e.k),
         end = std::min((i + 1) * STRIP, e.rows);
    float* row = of_row.of(step);
    for (long r = i * STRIP; r < end; r++) {
        enter_row(e, r, row);
        for (long k = 0; k < step; k += part) {
            long width = std::min(step - k, part);
            for (long c = 0; c < width; c += 8)
                store(packed(e.to + k * e.rows, r, e.rows, ROWS, width, c),
                        load<f8>(row + k + c));
        }
    }
}

static thread_local Room of_rows, of_result;

static const float* entered(Entering e, long threads) {
    e.to = of_rows.of(e.rows * whole32(e.k));
    if (e.rows > FEW)
        pool.run((e.rows + STRIP - 1) / STRIP, threads, enter_packed, &e);
    else
        for (long r = 0; r < e.rows; r++)
            enter_row(e, r, e.to + r * whole32(e.k));
    return e.to;
}

extern "C" {
// As `_Product` of atlas.ops.host has it: act(norm(x) W^T + bias) + add
struct Product {
    const Matrix* parts;
    const int32_t* order;  // of the columns of the result, or null
    const float *gain, *bias;  // or null
    long count, n, act;
    float eps, limit;
};
}

// Rows on their way out
struct Leaving {
    const Product* p;
    const float* add;
    float *z, *y;
    long rows;
};

static void leave_row(const Leaving& v, long r) {
    const Product& p = *v.p;
    long n = p.act && p.act != RELU2 ? p.n / 2 : p.n;
    float* z = v.z + r * p.n;
    float* y = v.y + r * n;
    if (p.order) {
        float* row = of_row.of(p.n);
        for (long i = 0; i < p.n; i++)
            row[i] = z[p.order[i]];
        z = row;
    }
    if (p.bias)
        add_to(z, p.bias, p.n);
    if (p.act)
        activate((Act)p.act, p.limit, z, y, n);
    else if (y != z)
        memcpy(y, z, n * 4);
    if (v.add)
        add_to(y, v.add + r * n, n);
}

static void leave_some(void* with, long i) {
    const Leaving& v = *(const Leaving*)with;
    long end = std::min((i + 1) * STRIP, v.rows);
    for (long r = i * STRIP; r < end; r++)
        leave_row(v, r);
}

#define ENTRANCE extern "C" __attribute__((visibility("default"))) void

// Rows of x [rows, k], x_step apart; y [rows, n], or half of it after an
// activation of pairs
ENTRANCE product(
        const Product* p, const float* x, const float* add, float* y, long rows,
        long x_step, long threads) {
    if (rows < 1 || p->n < 1)
        return;
    long k = p->parts->k;
    if (rows * p->n * k < LITTLE)
        threads = 1;
    bool through = p->order || (p->act && p->act != RELU2);
    float* z = through ? of_result.of(rows * p->n) : y;
    const float* in = entered(
            {x, p->gain, p->eps, nullptr, rows, k, x_step}, threads);
    multiply(
            p->parts, p->count, {nullptr, in, z, rows, whole32(k), p->n},
            threads);
    if (!through && !p->bias && !p->act && !add)
        return;
    Leaving v = {p, add, z, y, rows};
    pool.run(
            (rows + STRIP - 1) / STRIP, rows * p->n < SMALL ? 1 : threads,
            leave_some, &v);
}

ENTRANCE attend(
        const Rows* rows, const Layer* layer, const float* qkv, float* out,
        long width, long threads) {
    if (rows->rows < 1)
        return;
    Attend a = {*rows, *layer, qkv, out, width};
    std::vector<Group> groups = grouped(a);
    Attending s = {&a, of_result.of(a.rows * a.heads * a.d), groups.data()};
    long work = 0;
    for (const Group& g : groups)
        work += g.rows * (g.at + g.rows) * a.heads * a.d;
    if (work < LITTLE)
        threads = 1;
    pool.run((a.rows + TOGETHER - 1) / TOGETHER, threads, prepare_some, &s);
    pool.run(groups.size() * a.kv, threads, attend_group, &s);
    if (a.tiled)
        clear_padding(a, groups);
}

// As `_Call` of atlas.ops.replay has it: a product, or attention of `rows`
extern "C" struct Call {
    const void *what, *rows;  // Product and null, or Layer and Rows
    const float *x, *add;  // add: or null
    float* y;
    long count, step;  // rows of x, and numbers from one to the next
};

// What a step asks for, one after the other: threads have no time to fall asleep
// in between
ENTRANCE replay(const Call* calls, long n, long threads) {
    for (const Call* c = calls; c < calls + n; c++) {
        if (c->rows)
            attend((const Rows*)c->rows, (const Layer*)c->what, c->x, c->y,
                    c->step, threads);
        else
            product((const Product*)c->what, c->x, c->add, c->y, c->count,
                    c->step, threads);
    }
}
