// y[r,n] = sum over k of W[n,k] x[r,k]: rows of stored weights (formats.h), float32 activations,
// on the processor. An element is made of sums over BLOCK columns, each of eight sums of every eighth
// product, added up one after the other, whatever the number of rows and of threads: its bits
// depend on its own rows of x and W alone. Few rows are multiplied as the weights are widened; for more, a panel of rows of
// W is widened to float32 once, small enough for the second cache, and all rows of x visit it.
#include <algorithm>
#include <cstdlib>
#include <type_traits>
#include "formats.h"
#include "pool.h"

// What is asked for: rows of k numbers, `step` and `y_step` from one to the next
struct Work {
    const Matrix* w;
    const float* x;
    float* y;
    long rows, step, y_step;
};

constexpr int FEW = 3;                // rows of x that are multiplied as weights are widened
constexpr int ROWS = 3, COLUMNS = 4;  // of a tile of sums that stay in registers
constexpr long BLOCK = 1024;          // columns that are summed before they are added to the rest
constexpr long CACHE = 192 << 10;     // bytes of a panel
constexpr long GRAIN = 32 << 10;      // bytes of weights that one thread takes at a time
// Never destroyed: when a process ends, threads still sleep in it.
static Pool& pool = *new Pool;

struct Piece {
    const Work* v;
    long size;  // rows of W in it
};

// 32 weights of a row from the c-th 32 on, of which `rest` are there: zeros behind
template <class F>
INLINE void widen(const Row& row, long c, long rest, f8* w) {
    Row r = F::at(row, c);
    if (!F::ENDS || rest >= 32) return F::widen(r, w);
    uint8_t data[F::BYTES] = {}, scale[4] = {};
    memcpy(data, r.data, rest * F::BYTES / 32);
    if (r.scale) memcpy(scale, r.scale, std::is_same<F, NVFP4>::value ? 1 : 4);
    F::widen({data, scale, r.zero, r.factor}, w);
}

// R rows of x times N rows of W
template <class F, int R, int N>
static void direct(const Work& v, long n) {
    Row row[N];
    UNROLL for (int i = 0; i < N; i++) row[i] = F::row(*v.w, n + i);
    float y[R][N] = {};
    for (long k = 0; k < v.w->k; k += BLOCK) {
        f8 acc[R][N] = {};
        long end = std::min(k + BLOCK, v.w->k);
        for (long c = k / 32; c * 32 < end; c++) {
            UNROLL for (int i = 0; i < N; i++) {
                f8 w[4];
                widen<F>(row[i], c, end - 32 * c, w);
                UNROLL for (int r = 0; r < R; r++) {
                    const float* x = v.x + r * v.step + 32 * c;
                    UNROLL for (int j = 0; j < 4; j++)
                        acc[r][i] = fma(w[j], load<f8>(x + 8 * j), acc[r][i]);
                }
            }
        }
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int i = 0; i < N; i++) y[r][i] += sum(acc[r][i]);
    }
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int i = 0; i < N; i++) v.y[r * v.y_step + n + i] = y[r][i];
}

template <class F, int R>
static void few(void* with, long i) {
    const Piece& p = *(const Piece*)with;
    long n = i * p.size, end = std::min(n + p.size, p.v->w->n);
    for (; n + 4 <= end; n += 4) direct<F, R, 4>(*p.v, n);
    for (; n < end; n++) direct<F, R, 1>(*p.v, n);
}

// R rows of x times N widened rows of W, k columns of both: added to y
template <int R, int N>
static void tile(const float* x, long step, const float* w, long k, float* y, long y_step) {
    f8 acc[R][N] = {};
    for (long i = 0; i < k; i += 8) {
        f8 a[R];
        UNROLL for (int r = 0; r < R; r++) keep(a[r] = load<f8>(x + r * step + i));
        UNROLL for (int n = 0; n < N; n++) {
            f8 b = load<f8>(w + n * k + i);
            keep(b);
            UNROLL for (int r = 0; r < R; r++) acc[r][n] = fma(b, a[r], acc[r][n]);
        }
    }
    UNROLL for (int r = 0; r < R; r++) {
        float s[N];
        if constexpr (N == 4) sum4(acc[r], s);
        else UNROLL for (int n = 0; n < N; n++) s[n] = sum(acc[r][n]);
        UNROLL for (int n = 0; n < N; n++) y[r * y_step + n] += s[n];
    }
}

// R rows of x times n widened rows of W
template <int R>
static void strip(const float* x, long step, const float* w, long k, float* y, long y_step, long n) {
    long i = 0;
    for (; i + COLUMNS <= n; i += COLUMNS)
        tile<R, COLUMNS>(x, step, w + i * k, k, y + i, y_step);
    for (; i < n; i++) tile<R, 1>(x, step, w + i * k, k, y + i, y_step);
}

// Numbers that a thread has to itself, at whole lines of the cache
struct Room {
    float* held = nullptr;
    long size = 0;
    float* of(long n) {
        if (size >= n) return held;
        free(held);
        size = (n + 15) / 16 * 16;
        return held = (float*)aligned_alloc(64, size * 4);
    }
    ~Room() { free(held); }
};
static thread_local Room of_panel, of_rows;

// Columns k.. of rows n.. of W as float32, `width` of them, a multiple of 32
template <class F>
static void widen_panel(const Matrix& w, long n, long rows, long k, long width, float* panel) {
    for (long i = 0; i < rows; i++) {
        Row row = F::row(w, n + i);
        for (long c = 0; c < width; c += 32, panel += 32) {
            f8 v[4];
            widen<F>(row, (k + c) / 32, w.k - k - c, v);
            memcpy(panel, v, 128);
        }
    }
}

template <class F>
static void many(void* with, long i) {
    const Piece& p = *(const Piece*)with;
    const Work& v = *p.v;
    long begin = i * p.size, n = std::min(p.size, v.w->n - begin);
    float* panel = of_panel.of(n * BLOCK);
    for (long r = 0; r < v.rows; r++) std::fill_n(v.y + r * v.y_step + begin, n, 0.f);
    for (long k = 0; k < v.w->k; k += BLOCK) {
        long width = std::min(v.step - k, BLOCK);
        widen_panel<F>(*v.w, begin, n, k, width, panel);
        const float* x = v.x + k;
        float* y = v.y + begin;
        long r = 0;
        for (; r + ROWS <= v.rows; r += ROWS)
            strip<ROWS>(x + r * v.step, v.step, panel, width, y + r * v.y_step, v.y_step, n);
        for (; r < v.rows; r++)
            strip<1>(x + r * v.step, v.step, panel, width, y + r * v.y_step, v.y_step, n);
    }
}

template <class F>
static void multiply(const Work& v, long threads) {
    static void (*const direct[])(void*, long) = {few<F, 1>, few<F, 2>, few<F, 3>};
    bool panels = v.rows > FEW;
    long bytes = panels ? 4 * std::min(v.w->k, BLOCK) : F::BYTES * v.w->k / 32;
    long most = std::max((panels ? CACHE : GRAIN) / bytes, 1L);
    long share = (v.w->n + threads - 1) / threads;
    Piece p = {&v, std::max(std::min(most, share), 1L)};
    if (p.size > 12) p.size -= p.size % 12;
    long pieces = (v.w->n + p.size - 1) / p.size;
    pool.run(pieces, threads, panels ? many<F> : direct[v.rows - 1], &p);
}

// In the order of `FORMATS` of atlas.ops.host
static void (*const formats[])(const Work&, long) = {multiply<F32>, multiply<F16>,
        multiply<BF16>, multiply<FP8>, multiply<FP8>, multiply<FP8_CHANNEL>,
        multiply<FP8_BLOCK>, multiply<NVFP4>, multiply<MXFP4>, multiply<INT4>,
        multiply<Q45<false, false>>, multiply<Q45<true, false>>, multiply<Q45<false, true>>,
        multiply<Q45<true, true>>, multiply<Q8_0>, multiply<Q45_K<false>>,
        multiply<Q45_K<true>>, multiply<Q6_K>};

// The rows of x at whole lines, with zeros behind them up to whole 32
static const float* aligned(const Work& v, long step) {
    if (v.step == step && (uintptr_t)v.x % 32 == 0) return v.x;
    float* x = of_rows.of(v.rows * step);
    for (long r = 0; r < v.rows; r++) {
        float* to = x + r * step;
        memcpy(to, v.x + r * v.step, v.w->k * 4);
        std::fill(to + v.w->k, to + step, 0.f);
    }
    return x;
}

extern "C" __attribute__((visibility("default")))
void linear(const Matrix* w, const float* x, float* y, long rows, long step, long y_step,
        long threads) {
    Work v = {w, x, y, rows, step, y_step};
    if (rows < 1 || w->n < 1) return;
    v.step = (w->k + 31) / 32 * 32;
    v.x = aligned({w, x, y, rows, step, y_step}, v.step);
    formats[w->format](v, threads);
}
