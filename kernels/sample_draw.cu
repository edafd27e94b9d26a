// Last of the launches that sample: the token that the row's random number points at, among the weights that stay, in the order of ids.
// Then the sequence has one token more. CHUNKS: of 1,024 tokens a block (lib/sample.cuh).
//   logits   : [rows, v]      f32
//   adjusted : [slots, v]     f32   read instead for rows whose line changes anything; or null
//   who      : [rows]         i32   line of the tables that a row belongs to, -1 for none; or null: its own number
//   how      : [slots, 16]    i32   struct How
//   position : [slots]        i64   counted up where a token was chosen
//   counts   : [slots, v]     i32   of that token too, where the line asks for penalties; or null
//   work     : [slots, 8]     i64   struct Work of each row
//   spans    : [slots, 64]    i64   scratch
//   ids      : [rows]         i32   -1 where the row cannot be sampled; not written where it belongs to no line
//   logprobs : [slots]        f32   of the id, by row as `work` is; NaN where not asked for
//   launch: <<<(ceil(v / (CHUNKS*1024)), rows), 256>>>, at most 64 blocks a row
#include "lib/pdl.cuh"
#include "lib/sample.cuh"

struct Kept { float top, temperature; unsigned least; };
__device__ __forceinline__ u64 kept(float x, const Kept& k) {
    const unsigned w = weight(x, k.top, k.temperature);
    return w >= k.least ? units(mantissa(w), w >> 23) : 0;
}
// The thread in whose share `at` falls, of shares that have `before` before them: its number, and how far into the share.
__device__ __forceinline__ int holder(u64 before, u64 share, u64& at) {
    __shared__ int found;
    __shared__ u64 rest;
    if (before <= at && at < before + share) { found = threadIdx.x; rest = at - before; }
    __syncthreads();
    at = rest;
    const int r = found;
    __syncthreads();
    return r;
}
__device__ __forceinline__ int draw(const float* x, const How& h, const Kept& k, u64 random, const u64* spans, int v) {
    __shared__ int id;
    u64 all;
    const u64 share = threadIdx.x < gridDim.x ? __ldcg(spans + threadIdx.x) : 0;
    const u64 before = sum_before(share, all);
    u64 at = __umul64hi(random, all);  // below all: the first id with a running sum above it is the one
    const int lo = holder(before, share, at) * SPAN + threadIdx.x * 4 * CHUNKS;
    u64 mine[4 * CHUNKS], sum = 0;
    for (int c = 0; c < CHUNKS; c++) {
        const float4 a = load4(x, lo + c * 4, v);
        for (int j = 0; j < 4; j++) sum += mine[c * 4 + j] = kept((&a.x)[j], k);
    }
    const u64 earlier = sum_before(sum, all);
    if (holder(earlier, sum, at) == threadIdx.x) {
        bool open = true;
        for (int i = 0; i < 4 * CHUNKS; i++) if (open) { if (at < mine[i]) { id = lo + i; open = false; } else at -= mine[i]; }
    }
    __syncthreads();
    return id;
}

extern "C" __global__ void __launch_bounds__(256) sample_draw(const float* logits, const float* adjusted, const int* who, const int* how, long long* position, int* counts,
        const long long* work, long long* spans, int* ids, float* logprobs, int v) {
    const int row = blockIdx.y, slot = who ? who[row] : row;
    pdl_trigger();
    const How& h = ((const How*)how)[max(slot, 0)];
    pdl_wait();
    if (slot < 0) return;
    Work* w = (Work*)work + row;
    int id = w->id;
    if (id < 0 || h.temperature == 0.f || w->least == ~0u) { if (blockIdx.x) return; }
    else {
        const float* x = (h.adjusted() ? adjusted : logits) + (size_t)row * v;
        const Kept k{w->top, h.temperature, max(w->least, __float_as_uint(h.min_p))};
        u64* mine = (u64*)spans + (size_t)row * MOST;
        u64 sum = 0, all;
        for (int c = 0; c < CHUNKS; c++) {
            const float4 a = load4(x, blockIdx.x * SPAN + c * 1024 + threadIdx.x * 4, v);
            sum += kept(a.x, k) + kept(a.y, k) + kept(a.z, k) + kept(a.w, k);
        }
        sum_before(sum, all);
        if (!threadIdx.x) mine[blockIdx.x] = all;
        if (!last_block(&w->arrived)) return;
        id = draw(x, h, k, philox(h.seed, position[slot]), mine, v);
    }
    if (threadIdx.x) return;
    ids[row] = id;
    logprobs[row] = h.logprobs >= 0 && id >= 0 ? (float)((double)logits[(size_t)row * v + id] - w->z) : __uint_as_float(0x7FC00000u);
    if (id < 0) return;
    position[slot]++;
    if (h.flags & 1) counts[(size_t)slot * v + id]++;
}
