// Drafts from what a sequence has said before: of the earlier places that end with the tokens it
// ends with now, that with the longest match (at most `most`, at least `least` tokens), the latest
// among equals; what followed there is drafted. A block a sequence.
//   history : [lines, longest]  i32   tokens of each line; longest <= 2^26
//   line    : [seqs]            i32   line of a sequence; -1: it has none
//   end     : [seqs]            i32   position of its newest token
//   drafts  : [k, seqs]         i32   -1 beyond the newest token, and where nothing matches
//   launch: <<<seqs, 1024>>>, least >= 1, most <= 63
#include "lib/pdl.cuh"

extern "C" __global__ void __launch_bounds__(1024)
        ngram(const int* history, const int* line, const int* end, int* drafts,
                int longest, int seqs, int k, int least, int most) {
    __shared__ unsigned part[32];
    const int s = blockIdx.x;
    pdl_trigger();
    pdl_wait();
    const int of = line[s];
    const int last = min(end[s], longest - 1);
    const int* h = history + (size_t)max(of, 0) * longest;
    // places 0..n-1
    const int n = of < 0 ? 0 : max(last, 0);
    const int newest = n ? h[last] : 0;
    unsigned best = 0;  // tokens that match, then the place
    for (int base = threadIdx.x; base < n; base += 8192) {
        int a[8];
        #pragma unroll
        for (int i = 0; i < 8; i++)
            a[i] = base + i * 1024 < n ? h[base + i * 1024] : 0;
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            const int p = base + i * 1024;
            if (p >= n || a[i] != newest)
                continue;
            int g = 1;
            while (g < most && g <= p && h[p - g] == h[last - g])
                g++;
            if (g >= least)
                best = max(best, (unsigned)g << 26 | p);
        }
    }
    best = __reduce_max_sync(~0u, best);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = best;
    __syncthreads();
    if (threadIdx.x >= 32)
        return;
    best = __reduce_max_sync(~0u, part[threadIdx.x]);
    for (int j = threadIdx.x; j < k; j += 32) {
        const int p = (int)(best & 0x3FFFFFFu) + 1 + j;
        drafts[j * seqs + s] = best && p <= last ? h[p] : -1;
    }
}
