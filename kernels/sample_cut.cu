// Third of the launches that sample: the weights in the bins that hold a threshold are gathered, and the thresholds found among them.
// CHUNKS: of 1,024 tokens a block (lib/sample.cuh).
//   logits   : [rows, v]      f32
//   adjusted : [slots, v]     f32   read instead for rows whose line changes anything; or null
//   who      : [rows]         i32   line of the tables that a row belongs to, -1 for none; or null: its own number
//   how      : [slots, 16]    i32   struct How
//   work     : [slots, 8]     i64   struct Work of each row
//   bins     : [slots, 1536]  i64   from sample_bins; 0 after
//   list     : [slots, room]  u32   scratch. Rows where more weights are in doubt (as when all are equal) are read again instead: slow, and right
//   launch: <<<(ceil(v / (CHUNKS*1024)), rows), 256>>>
#include "lib/pdl.cuh"
#include "lib/bins.cuh"

#define CACHE 2048

struct Source { const unsigned *cache, *list; int n; const float* x; int v; float top, temperature; };  // the weights in doubt: in shared memory, in a list, or else the row itself

// f(w) for each of them, and f(0) until all threads have had as many.
template <class F> __device__ __forceinline__ void each(const Source& s, F f) {
    if (s.list) for (int i = threadIdx.x; i < s.n + (int)threadIdx.x; i += 256) f(i >= s.n ? 0u : s.n <= CACHE ? s.cache[i] : __ldcg(s.list + i));
    else for (int i = threadIdx.x * 4; i < s.v + (int)threadIdx.x * 4; i += 1024) {
        const float4 a = load4(s.x, i, s.v);
        for (int j = 0; j < 4; j++) f(weight((&a.x)[j], s.top, s.temperature));
    }
}

struct Count { unsigned n[512], low[512]; };
struct At { int i; u64 n, sum; };  // one of 512, and what lies before it: how many, and the sum of their mantissas

// The first of 512 classes with which the number of weights reaches `want`, or their sum, after `m`, does. Weights of class i have the mantissa
// first - (i << shift), and what `low` adds.
__device__ __forceinline__ At crossing(const Count& c, unsigned first, int shift, int e, bool by_sum, u64 m, u64 want, At from) {
    __shared__ At found;
    u64 n[2], sum[2], all_n, all_sum;
    for (int j = 0; j < 2; j++) {
        const int i = threadIdx.x * 2 + j;
        n[j] = c.n[i];
        sum[j] = (u64)c.n[i] * (first - ((unsigned)i << shift)) + c.low[i];
    }
    u64 bn = n[0] + n[1], bs = sum[0] + sum[1];
    sums_before(bn, bs, all_n, all_sum);
    bn += from.n; bs += from.sum;
    for (int j = 0; j < 2; j++) {
        const bool here = by_sum ? m + units(bs, e) < want && want <= m + units(bs + sum[j], e) : bn < want && want <= bn + n[j];
        if (here) found = At{(int)threadIdx.x * 2 + j, bn, bs};
        bn += n[j]; bs += sum[j];
    }
    __syncthreads();
    const At r = found;
    __syncthreads();
    return r;
}
struct Least { unsigned w; u64 sum; };  // a threshold, and the sum of all weights from it on

// The heaviest weight of bin `f` down to which there are `want` (or whose sum is `want`), all heavier ones included.
__device__ __forceinline__ Least threshold(const Source& s, const Found& f, bool by_sum, u64 want) {
    __shared__ Count c;
    const unsigned start = bin_start(f.bin);
    if (!f.bin) return Least{start, f.end};
    const int e = start >> 23;
    for (int i = threadIdx.x; i < 512; i += 256) c.n[i] = c.low[i] = 0;
    __syncthreads();
    each(s, [&](unsigned w) { tally(c.n, c.low, w >> LOW == start >> LOW ? 511 - (int)(w >> 9 & 511) : -1, w & 511); });
    __syncthreads();
    const unsigned first = mantissa(start) + (511u << 9);
    const At a = crossing(c, first, 9, e, by_sum, f.m, want, At{0, by_sum ? 0 : f.n, 0});
    const unsigned upper = start + ((511u - a.i) << 9);
    for (int i = threadIdx.x; i < 512; i += 256) c.n[i] = c.low[i] = 0;
    __syncthreads();
    each(s, [&](unsigned w) { tally(c.n, c.low, w >> 9 == upper >> 9 ? 511 - (int)(w & 511) : -1, 0); });
    __syncthreads();
    const At b = crossing(c, mantissa(upper) + 511, 0, e, by_sum, f.m, want, a);
    const unsigned w = upper + 511 - b.i;
    const Least r{w, f.m + units(b.sum + (u64)c.n[b.i] * mantissa(w), e)};
    __syncthreads();
    return r;
}

extern "C" __global__ void __launch_bounds__(256) sample_cut(const float* logits, const float* adjusted, const int* who, const int* how, long long* work, long long* bins,
        unsigned* list, int v, int room) {
    __shared__ Bins s;
    __shared__ unsigned base, cache[CACHE];
    const int row = blockIdx.y, slot = who ? who[row] : row;
    pdl_trigger();
    const How h = ((const How*)how)[max(slot, 0)];
    pdl_wait();  // all do, so that the end of this kernel is the end of those before it
    Work* w = (Work*)work + row;
    if (slot < 0 || !h.cut(v) || w->id < 0) return;
    const float* x = (h.adjusted() ? adjusted : logits) + (size_t)row * v;
    const float top = w->top;
    const int k_bin = w->k_bin, p_from = w->p_from, p_to = w->p_to;
    list += (size_t)row * room;
    unsigned found[4 * CHUNKS];
    int n = 0;
    for (int c = 0; c < CHUNKS; c++) {
        const float4 a = load4(x, blockIdx.x * SPAN + c * 1024 + threadIdx.x * 4, v);
        for (int j = 0; j < 4; j++) {
            const unsigned b = weight((&a.x)[j], top, h.temperature);
            const int bin = bin_of(b);
            const bool doubt = bin > 0 && (bin == k_bin || (bin >= p_from && bin <= p_to));
            found[c * 4 + j] = doubt ? b : 0;
            n += doubt;
        }
    }
    u64 all;
    unsigned at = (unsigned)sum_before(n, all);
    if (all) {
        if (!threadIdx.x) base = atomicAdd(&w->listed, (unsigned)all);
        __syncthreads();
        at += base;
        for (int i = 0; i < 4 * CHUNKS; i++) if (found[i]) { if (at < room) list[at] = found[i]; at++; }
    }
    if (!last_block(&w->arrived)) return;
    u64* mine = (u64*)bins + (size_t)row * BINS;
    const Before b = read_bins(s, mine);
    for (int i = threadIdx.x; i < BINS; i += 256) mine[i] = 0;
    const int listed = __ldcg(&w->listed);
    if (listed <= CACHE && listed <= room) for (int i = threadIdx.x; i < listed; i += 256) cache[i] = __ldcg(list + i);
    const Source from{cache, listed <= room ? list : 0, listed, x, v, top, h.temperature};
    unsigned least = 0;
    u64 sum = b.total;  // of the weights that stay
    #pragma unroll 1
    for (int by_sum = 0; by_sum < 2; by_sum++) {  // top-k, then top-p of what it keeps
        if (by_sum ? h.top_p >= 1. : k_bin < 0) continue;
        const u64 want = by_sum ? goal_of(h.top_p, sum) : h.top_k;
        const Least r = threshold(from, find_bin(s, b, by_sum, want), by_sum, want);
        least = max(least, r.w);
        sum = r.sum;
    }
    if (!threadIdx.x) { w->least = least; w->listed = 0; }
}
