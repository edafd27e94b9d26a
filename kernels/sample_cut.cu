// Third of the launches that sample: the weights in the bins that hold a threshold are gathered,
// and the thresholds found among them. Where few weights are left in all, as top-k and top-p are
// mostly used, these are gathered instead, and the token drawn. CHUNKS: of 1,024 tokens a block
// (lib/sample.cuh).
//   logits   : [rows, v]      f32
//   adjusted : [some_rows, v]  f32   read instead for rows whose line changes anything; or null
//   who      : [rows]         i32   line of the tables that a row belongs to, -1 for none; or null:
//                                   its own number
//   how      : [slots, 16]    i32   struct How
//   position : [slots]        i64   tokens that the output has; row r is r % width beyond it
//   work     : [some_rows, 8]  i64   struct Work of each row
//   bins     : [some_rows, 1536]  i64   from sample_bins; 0 after
//   list     : [some_rows, room]  u32   scratch. Rows where more weights are in doubt (as when all
//                                    are equal) are read again instead: slow, and right
//   launch: <<<(ceil(v / (CHUNKS*1024)), rows), 256>>>
#include "lib/pdl.cuh"
#include "lib/bins.cuh"

#define CACHE 2048
#define FEW 256

// the weights in doubt: in shared memory, in a list, or else the row itself
struct Source {
    const unsigned *cache, *list;
    int n;
    const float* x;
    int v;
    float top, temperature;
};

// f(w) for each of them, and f(0) until all threads have had as many.
template <class F> __device__ __forceinline__ void each(const Source& s, F f) {
    if (s.list)
        #pragma unroll 1
        for (int i = threadIdx.x; i < s.n + (int)threadIdx.x; i += 256)
            f(i >= s.n ? 0u : s.n <= CACHE ? s.cache[i] : __ldcg(s.list + i));
    else
        #pragma unroll 1
        for (int i = threadIdx.x; i < s.v + (int)threadIdx.x; i += 256)
            f(i < s.v ? weight(s.x[i], s.top, s.temperature) : 0u);
}

struct Count {
    unsigned n[512], low[512];
};
// one of 512, and what lies before it: how many, and the sum of their mantissas
struct At {
    int i;
    u64 n, sum;
};

// The first of 512 classes with which the number of weights reaches `want`, or their sum, after
// `m`, does. Weights of class i have the mantissa first - (i << shift), and what `low` adds.
__device__ __forceinline__ At crossing(
        const Count& c, unsigned first, int shift, int e, bool by_sum, u64 m,
        u64 want, At from) {
    __shared__ At found;
    u64 n[2], sum[2], all_n, all_sum;
    for (int j = 0; j < 2; j++) {
        const int i = threadIdx.x * 2 + j;
        n[j] = c.n[i];
        sum[j] = (u64)c.n[i] * (first - ((unsigned)i << shift)) + c.low[i];
    }
    u64 bn = n[0] + n[1];
    u64 bs = sum[0] + sum[1];
    sums_before(bn, bs, all_n, all_sum);
    bn += from.n;
    bs += from.sum;
    for (int j = 0; j < 2; j++) {
        const bool here = by_sum
                ? m + units(bs, e) < want && want <= m + units(bs + sum[j], e)
                : bn < want && want <= bn + n[j];
        if (here)
            found = At{(int)threadIdx.x * 2 + j, bn, bs};
        bn += n[j];
        bs += sum[j];
    }
    __syncthreads();
    const At r = found;
    __syncthreads();
    return r;
}
// a threshold, and the sum of all weights from it on
struct Least {
    unsigned w;
    u64 sum;
};

// The heaviest weight of bin `f` down to which there are `want` (or whose sum is `want`), all
// heavier ones included.
__device__ __forceinline__ Least threshold(
        const Source& s, const Found& f, bool by_sum, u64 want) {
    __shared__ Count c;
    const unsigned start = bin_start(f.bin);
    if (!f.bin)
        return Least{start, f.end};
    const int e = start >> 23;
    for (int i = threadIdx.x; i < 512; i += 256)
        c.n[i] = c.low[i] = 0;
    __syncthreads();
    each(s, [&](unsigned w) {
        tally(c.n, c.low,
                w >> LOW == start >> LOW ? 511 - (int)(w >> 9 & 511) : -1,
                w & 511);
    });
    __syncthreads();
    const unsigned first = mantissa(start) + (511u << 9);
    const At a = crossing(
            c, first, 9, e, by_sum, f.m, want, At{0, by_sum ? 0 : f.n, 0});
    const unsigned upper = start + ((511u - a.i) << 9);
    for (int i = threadIdx.x; i < 512; i += 256)
        c.n[i] = c.low[i] = 0;
    __syncthreads();
    each(s, [&](unsigned w) {
        tally(c.n, c.low, w >> 9 == upper >> 9 ? 511 - (int)(w & 511) : -1, 0);
    });
    __syncthreads();
    const At b = crossing(c, mantissa(upper) + 511, 0, e, by_sum, f.m, want, a);
    const unsigned w = upper + 511 - b.i;
    const Least r{w, f.m + units(b.sum + (u64)c.n[b.i] * mantissa(w), e)};
    __syncthreads();
    return r;
}

// The choice among n weights, which with their ids are all down to the thresholds: every thread
// compares one with the others.
__device__ __forceinline__ void choose(
        const unsigned* list, int n, const How& h, Work* w, u64 random) {
    __shared__ unsigned weights[FEW], ids[FEW], k_least, p_least;
    __shared__ u64 share[FEW], kept;
    const int i = threadIdx.x;
    const bool top_k = w->k_bin >= 0;
    unsigned mine = 0, id = 0;
    if (i < n) {
        mine = weights[i] = __ldcg(list + 2 * i);
        id = ids[i] = __ldcg(list + 2 * i + 1);
        share[i] = units(mantissa(mine), mine >> 23);
    }
    if (!i) {
        kept = w->total;
        k_least = p_least = 0;
    }
    __syncthreads();
    int above = 0, with = 0;
    u64 sum = 0;
    #pragma unroll 4
    for (int j = 0; j < n; j++) {
        const unsigned o = weights[j];
        above += o > mine;
        with += o >= mine;
        if (o >= mine)
            sum += share[j];
    }
    if (top_k && i < n && above < h.top_k && h.top_k <= with) {
        k_least = mine;
        kept = sum;
    }
    __syncthreads();
    if (h.top_p < 1. && i < n && sum >= goal_of(h.top_p, kept))
        atomicMax(&p_least, mine);
    __syncthreads();
    const unsigned least = max(max(k_least, p_least), __float_as_uint(h.min_p));
    u64 before = 0, all = 0;
    #pragma unroll 4
    for (int j = 0; j < n; j++)
        if (weights[j] >= least) {
            all += share[j];
            if (ids[j] < id)
                before += share[j];
        }
    const u64 at = __umul64hi(random, all);
    if (i < n && mine >= least && before <= at && at < before + share[i]) {
        w->id = (int)id;
        w->least = ~0u;
    }
}

// Which of this thread's weights are wanted, a bit each: those that can be at a threshold; of a row
// with few weights down to the last bin in doubt all of these.
__device__ __forceinline__ unsigned wanted(
        const float4 (&a)[CHUNKS], float top, float temperature, bool few,
        int k_bin, int p_from, int p_to) {
    const int to = max(k_bin, p_to);
    unsigned b[CHUNKS * 4], mine = 0;
    weights(a, top, temperature, b);
    #pragma unroll
    for (int i = 0; i < CHUNKS * 4; i++) {
        const int bin = bin_of(b[i]);
        const bool in = few
                ? bin >= 0 && bin <= to
                : bin > 0 && (bin == k_bin || (bin >= p_from && bin <= p_to));
        mine |= (unsigned)in << i;
    }
    return mine;
}

// The smallest weight that stays: of top-k, then of top-p of what that keeps.
__device__ __forceinline__ unsigned least_of(
        const Source& from, Bins& s, const Before& b, const How& h, int k_bin) {
    unsigned least = 0;
    u64 sum = b.total;  // of the weights that stay
    #pragma unroll 1
    for (int by_sum = 0; by_sum < 2;
            by_sum++) {  // top-k, then top-p of what it keeps
        if (by_sum ? h.top_p >= 1. : k_bin < 0)
            continue;
        const u64 want = by_sum ? goal_of(h.top_p, sum) : h.top_k;
        const Least r = threshold(
                from, find_bin(s, b, by_sum, want), by_sum, want);
        least = max(least, r.w);
        sum = r.sum;
    }
    return least;
}

// The thread's wanted tokens go onto the list: with their ids where they are few.
__device__ __forceinline__ void put_listed(
        Work* w, unsigned* list, const float* x, unsigned mine, unsigned at,
        bool few, int room, float top, float temperature) {
    for (; mine; mine &= mine - 1) {
        const int i = __ffs(mine) - 1;
        const int id = blockIdx.x * SPAN + i / 4 * 1024 + threadIdx.x * 4 + i % 4;
        const unsigned b = weight(x[id], top, temperature);
        if (few) {
            at = atomicAdd(&w->listed, 1u);
            list[2 * at] = b;
            list[2 * at + 1] = id;
        } else {
            if (at < room)
                list[at] = b;
            at++;
        }
    }
}

extern "C" __global__ void __launch_bounds__(256) sample_cut(
        const float* logits, const float* adjusted, const int* who,
        const int* how, const long long* position, long long* work,
        long long* bins, unsigned* list, int v, int room, int width) {
    __shared__ Bins s;
    __shared__ unsigned base, cache[CACHE];
    const int row = blockIdx.y, slot = who ? who[row] : row;
    pdl_trigger();
    const How h = ((const How*)how)[max(slot, 0)];
    const float temperature = h.temperature;
    pdl_wait();  // all do, so that the end of this kernel is the end of those before it
    if (slot < 0 || !h.cut(v))
        return;
    Work* w = (Work*)work + row;
    const float* x = (h.adjusted() ? adjusted : logits) + (size_t)row * v;
    float4 a[CHUNKS];
    load_span(x, v, a);
    const float top = w->top;
    if (w->id < 0)
        return;
    const int k_bin = w->k_bin;
    const int p_from = w->p_from;
    const int p_to = w->p_to;
    const bool few = w->few <= FEW && 2 * w->few <= room;
    list += (size_t)row * room;
    unsigned mine = wanted(a, top, temperature, few, k_bin, p_from, p_to);
    u64 all = 0;
    unsigned at = 0;
    if (!few) {
        at = (unsigned)sum_before(__popc(mine), all);
        if (all) {
            if (!threadIdx.x)
                base = atomicAdd(&w->listed, (unsigned)all);
            __syncthreads();
            at += base;
        }
    }
    put_listed(w, list, x, mine, at, few, room, top, temperature);
    if (!last_block(&w->arrived))
        return;
    u64* counted = (u64*)bins + (size_t)row * BINS;
    const int listed = __ldcg(&w->listed);
    const long long at_token = position[slot] + row % width;
    if (few)
        choose(list, listed, h, w, philox(h.seed, at_token));
    else {
        const Before b = read_bins(s, counted);
        if (listed <= CACHE && listed <= room)
            for (int i = threadIdx.x; i < listed; i += 256)
                cache[i] = __ldcg(list + i);
        const Source from{
                cache, listed <= room ? list : 0, listed, x, v, top, temperature};
        const unsigned least = least_of(from, s, b, h, k_bin);
        if (!threadIdx.x)
            w->least = least;
    }
    for (int i = threadIdx.x; i < BINS; i += 256)
        counted[i] = 0;
    if (!threadIdx.x)
        w->listed = 0;
}
