// Last of the launches that sample: the token that the row's random number points at, among the
// weights that stay, in the order of ids. Then the sequence has one token more, and if asked, the
// row goes on to its next position as in greedy.cu. CHUNKS: of 1,024 tokens a block
// (lib/sample.cuh).
//   logits   : [rows, v]      f32
//   adjusted : [some_rows, v] f32   read instead for rows whose line changes anything; or null
//   who      : [rows]         i32   line of the tables that a row belongs to, -1 for none; or null:
//                                   its own number
//   how      : [lines, 16]    i32   struct How
//   position : [lines]        i64   row r is r % width beyond it; counted up if `counted`
//   counts   : [lines, v]     i32   of that token too, where the line asks for penalties; or null
//   work     : [some_rows, 8] i64   struct Work of each row
//   spans    : [some_rows, 128] i64   scratch
//   ids      : [rows]         i32   -1 where the row cannot be sampled; not written where it
//                                   belongs to no line
//   logprobs : [some_rows] f32   of the id, by row as `work` is; NaN where not asked for
//   top_ids   : [some_rows, 20] i32   from sample_scan
//   top_logprobs : [some_rows, 20] f32
//   seq       : [rows]        i32   this and what follows as in greedy.cu; or null: nothing moves
//                                   on
//   pos       : [rows]        i32   or null
//   pos3      : [3, rows]     i32   or null
//   slots     : [rows]        i64   or null
//   starts    : [seqs]        i32   or null
//   state_in  : [seqs]        i32   or null
//   state_out : [rows]        i32   or null
//   tables    : [seqs, most]  i32   or null
//   told      : [2, places, words] i32   id, log probability and alternatives for the host, as in
//                                        greedy.cu; or null
//   launch: <<<(ceil(v / (CHUNKS*1024)), rows), 256>>>, at most 128 blocks a row
#include "lib/advance.cuh"
#include "lib/pdl.cuh"
#include "lib/sample.cuh"

struct Kept {
    float top, temperature;
    unsigned least;
};
__device__ __forceinline__ u64 kept(unsigned w, const Kept& k) {
    return w >= k.least ? units(mantissa(w), w >> 23) : 0;
}
// The thread in whose share `at` falls, of shares that have `before` before them: its number, and
// how far into the share.
__device__ __forceinline__ int holder(u64 before, u64 share, u64& at) {
    __shared__ int found;
    __shared__ u64 rest;
    if (before <= at && at < before + share) {
        found = threadIdx.x;
        rest = at - before;
    }
    __syncthreads();
    at = rest;
    const int r = found;
    __syncthreads();
    return r;
}
__device__ __forceinline__ int draw(
        const float* x, const How& h, const Kept& k, u64 random, const u64* spans,
        int v) {
    __shared__ int id;
    u64 all;
    const u64 share = threadIdx.x < gridDim.x ? __ldcg(spans + threadIdx.x) : 0;
    const u64 before = sum_before(share, all);
    // below all: the first id with a running sum above it is the one
    u64 at = __umul64hi(random, all);
    const int lo = holder(before, share, at) * SPAN + threadIdx.x * 4 * CHUNKS;
    u64 mine[4 * CHUNKS], sum = 0;
    for (int c = 0; c < CHUNKS; c++) {
        const float4 a = load4(x, lo + c * 4, v);
        for (int j = 0; j < 4; j++)
            sum += mine[c * 4 + j] = kept(
                    weight((&a.x)[j], k.top, k.temperature), k);
    }
    const u64 earlier = sum_before(sum, all);
    if (holder(earlier, sum, at) == threadIdx.x) {
        bool open = true;
        for (int i = 0; i < 4 * CHUNKS; i++)
            if (open) {
                if (at < mine[i]) {
                    id = lo + i;
                    open = false;
                } else
                    at -= mine[i];
            }
    }
    __syncthreads();
    return id;
}

// A block's share of the sum of what is kept.
__device__ __forceinline__ u64 share_of(
        const float4 (&a)[CHUNKS], const Kept& k) {
    u64 sum = 0, all;
    unsigned b[CHUNKS * 4];
    weights(a, k.top, k.temperature, b);
    #pragma unroll
    for (int i = 0; i < CHUNKS * 4; i++)
        sum += kept(b[i], k);
    sum_before(sum, all);
    return all;
}

extern "C" __global__ void __launch_bounds__(256) sample_draw(
        const float* logits, const float* adjusted, const int* who,
        const int* how, long long* position, int* counts, const long long* work,
        long long* spans, int* ids, float* logprobs, const int* top_ids,
        const float* top_logprobs, const int* seq, int* pos, int* pos3,
        long long* slots, int* starts, int* state_in, int* state_out,
        const int* tables, int* told, int v, int most, int block_size, int places,
        int width, int counted) {
    const int row = blockIdx.y, slot = who ? who[row] : row;
    const Rows b = {seq, tables, pos, pos3, starts, state_in, state_out, slots,
            (int)gridDim.y, most, block_size};
    pdl_trigger();
    const How h = ((const How*)how)[max(slot, 0)];
    const long long at = position[max(slot, 0)];
    const u64 random = philox(h.seed, at + (width > 1 ? row % width : 0));
    if (told)
        told += ((size_t)(pos[row] & 1) * places + row) * TOLD;
    pdl_wait();
    if (slot < 0)
        return;
    Work* w = (Work*)work + row;
    const float* x = (h.adjusted() ? adjusted : logits) + (size_t)row * v;
    float4 a[CHUNKS];
    if (!h.cut(v))
        load_span(x, v, a);  // otherwise the row has its token already, mostly
    int id = w->id;
    const unsigned least = w->least;
    if (id < 0 || h.temperature == 0.f || least == ~0u) {
        if (blockIdx.x)
            return;
    } else {
        if (h.cut(v))
            load_span(x, v, a);
        const Kept k{w->top, h.temperature, max(least, __float_as_uint(h.min_p))};
        u64* mine = (u64*)spans + (size_t)row * MOST;
        const u64 all = share_of(a, k);
        if (!threadIdx.x)
            mine[blockIdx.x] = all;
        if (!last_block(&w->arrived))
            return;
        id = draw(x, h, k, random, mine, v);
    }
    __syncthreads();  // all know the row's position
    if (told && threadIdx.x < REPORT) {
        told[2 + threadIdx.x] = top_ids[row * REPORT + threadIdx.x];
        told[2 + REPORT + threadIdx.x] = __float_as_int(
                top_logprobs[row * REPORT + threadIdx.x]);
    }
    if (threadIdx.x)
        return;
    ids[row] = id;
    const float logprob = h.logprobs >= 0 && id >= 0
            ? (float)((double)logits[(size_t)row * v + id] - w->z)
            : __uint_as_float(0x7FC00000u);
    logprobs[row] = logprob;
    if (told) {
        told[0] = id;
        told[1] = __float_as_int(logprob);
    }
    go(b, row, look(b, row));
    if (id < 0 || !counted)
        return;  // whether a draft's answer counts is yet to be seen
    position[slot] = at + 1;
    if (h.flags & 1)
        counts[(size_t)slot * v + id]++;
}
