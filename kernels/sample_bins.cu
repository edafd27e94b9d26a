// Second of the launches that sample: the weights of a row with top-k or top-p in bins, and which
// bins hold the thresholds, as far as bins can tell. CHUNKS: of 1,024 tokens a block
// (lib/sample.cuh).
//   logits   : [rows, v]      f32
//   adjusted : [some_rows, v]  f32   read instead for rows whose line changes anything; or null
//   who      : [rows]         i32   line of the tables that a row belongs to, -1 for none; or null:
//                                   its own number
//   how      : [slots, 16]    i32   struct How
//   work     : [some_rows, 8]  i64   struct Work of each row
//   bins     : [some_rows, 1536]  i64   0 before; sample_cut leaves it so
//   launch: <<<(ceil(v / (CHUNKS*1024)), rows), 256>>>
#include "lib/pdl.cuh"
#include "lib/bins.cuh"

extern "C" __global__ void __launch_bounds__(256) sample_bins(
        const float* logits, const float* adjusted, const int* who,
        const int* how, long long* work, long long* bins, int v) {
    __shared__ Bins s;
    const int row = blockIdx.y, slot = who ? who[row] : row;
    unsigned *n = s.count, *low = (unsigned*)s.units;
    pdl_trigger();
    const How h = ((const How*)how)[max(slot, 0)];
    for (int i = threadIdx.x; i < BINS; i += 256)
        n[i] = low[i] = 0;
    pdl_wait();  // all do, so that the end of this kernel is the end of those before it
    if (slot < 0 || !h.cut(v))
        return;
    Work* w = (Work*)work + row;
    float4 a[CHUNKS];
    load_span((h.adjusted() ? adjusted : logits) + (size_t)row * v, v, a);
    const float top = w->top;
    if (w->id < 0)
        return;
    u64* mine = (u64*)bins + (size_t)row * BINS;
    unsigned each[CHUNKS * 4], most = 0;
    weights(a, top, h.temperature, each);
    for (int i = 0; i < CHUNKS * 4; i++)
        most = max(most, each[i]);
    __syncthreads();
    if (__any_sync(~0u, bin_of(most) >= 0))
        // beyond the end of a row are weights of 0
        for (int i = 0; i < CHUNKS * 4; i++)
            tally(n, low, bin_of(each[i]), each[i] & ((1u << LOW) - 1));
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += 256)
        if (n[i])
            atomicAdd(mine + i, (u64)n[i] << 40 | low[i]);
    if (!last_block(&w->arrived))
        return;
    const Before b = read_bins(s, mine);
    // the sum of what top-k keeps is between the first two; 0: there is no threshold
    u64 from = b.total;
    u64 to = b.total;
    u64 few = 0;
    int k_bin = -1;
    if (h.top_k > 0 && h.top_k <= b.all_n) {  // more than there are: all stay
        const Found f = find_bin(s, b, false, h.top_k);
        k_bin = f.bin;
        from = f.m;
        to = f.end;
        few = f.end_n;
    }
    int p_from = 1, p_to = 0;
    if (h.top_p < 1.) {
        const Found f = find_bin(s, b, true, goal_of(h.top_p, to));
        p_to = f.bin;
        few = max(few, f.end_n);
        p_from = from == to ? p_to
                            : find_bin(s, b, true, goal_of(h.top_p, from)).bin;
    }
    if (!threadIdx.x) {
        w->k_bin = k_bin;
        w->p_from = p_from;
        w->p_to = p_to;
        w->few = few ? (unsigned)few : ~0u;
        w->total = b.total;
    }
}
