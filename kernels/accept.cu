// After a step with drafts was sampled: how many rows of each sequence are accepted, what the host
// is told of them, and the rows that a drafter runs one after the other. Row j of sequence s is row
// s*W + j; row 0 holds its newest token, the others drafts. A row's answer is accepted where it is
// a token and so are all answers before it, each equal to the draft that the next row was fed.
// What it writes are step tables: the next launch must be a plain one (lib/pdl.cuh).
//   ids       : [rows]          i32  tokens that the rows were fed with; a draft below 0 is none
//   said      : [rows]          i32  what the rows answer; below 0: no token
//   live      : [seqs]          i32  rows that are real, the others are masked
//   line      : [seqs]          i32  line of the sampler's table; -1 for padding
//   pos       : [rows]          i32
//   pos3      : [3, rows]       i32  rotary positions, where they differ; or null
//   state_out : [rows]          i32  slot of recurrent state after the row, -1 for none
//   limit     : [seqs]          i32  positions that a sequence may have
//   tables    : [seqs, most]    i32  blocks of a sequence
//   how       : [lines, 16]     i32  struct How
//   position  : [lines]         i64  counted up by what was accepted
//   counts    : [lines, v]      i32  of those tokens too, where a line asks for penalties; or null
//   chances   : [drafts]        f32  draft j+1 is accepted with chances[j], whatever it is; or null
//   history   : [lines, longest] i32 tokens by position: what was accepted is added; or null
//   accepted  : [seqs]          i32  rows accepted
//   last      : [seqs]          i32  the last of them; row 0 where there is none
//   newest    : [seqs]          i32  its answer; 0 where there is none
//   seen      : [seqs]          i32  position of the last token before the newest
//   c_pos     : [steps, seqs]   i32  the chain: step i is at the position of the newest token + i,
//                                    or masked at the last one of the limit
//   c_pos3    : [steps, 3, seqs] i32 as far from c_pos as pos3 is from pos; or null
//   c_starts  : [steps, seqs]   i32
//   c_seq     : [steps, seqs]   i32  -1: nothing accepted, or beyond the limit
//   c_in      : [steps, seqs]   i32  state after the last accepted row, then of the step before
//   c_out     : [steps, seqs]   i32  scratch + 2*s + i%2; -1 where scratch is
//   c_slots   : [steps, seqs]   i64
//   tick      : [1]             i32  steps so far: its parity is the half of what the host is told
//   logprobs  : [some_rows]     f32  from sample_draw; or null: only ids are told
//   top_ids   : [some_rows, 20] i32  or null
//   top_logprobs : [some_rows, 20] f32 or null
//   told      : [2, places, words] i32   memory of the host: of each row its id, -1 if not accepted
//   told_seq  : [2, seqs, ahead] i32 memory of the host: rows accepted of each sequence
//   launch: <<<seqs, 128>>>, W at most 32
#include "lib/pdl.cuh"
#include "lib/sample.cuh"

#define OTHER 0x9E3779B97F4A7C15ull  // makes of a request's seed one for chances

struct Chances {
    const float* of;
    u64 seed;
    long long position;
};

// Is the answer of row `j` one that may follow those before it?
__device__ __forceinline__ bool follows(
        const int* ids, const int* said, int j, const Chances& c) {
    if (said[j] < 0)
        return false;
    if (j == 0)
        return true;
    if (ids[j] < 0)
        return false;
    if (!c.of)
        return ids[j] == said[j - 1];
    const u64 bits = philox(c.seed ^ OTHER, c.position + j - 1);
    return (double)(bits >> 11) * 0x1p-53 < (double)c.of[j - 1];
}

// The first of a sequence's rows that does not follow, by its first warp; 32 if all do.
__device__ __forceinline__ void first_bad(
        int& found, const int* ids, const int* said, int rows, int i,
        const Chances& c) {
    const bool good = i < rows && follows(ids, said, i, c);
    const unsigned bad = ~__ballot_sync(~0u, good);
    if (!i)
        found = bad ? __ffs(bad) - 1 : 32;
}

// An accepted token joins what a sequence has said, where that is kept.
__device__ __forceinline__ void keep(
        int* counts, int* history, int own, int id, long long place, int v,
        int longest, bool counted) {
    if (counted && id < v)
        atomicAdd(counts + (size_t)own * v + id, 1);
    if (history && place < longest)
        history[own * (size_t)longest + place] = id;
}

extern "C" __global__ void __launch_bounds__(128) accept(
        const int* ids, const int* said, const int* live, const int* line,
        const int* pos, const int* pos3, const int* state_out, const int* limit,
        const int* tables, const int* how, long long* position, int* counts,
        const float* chances, int* history, int* accepted, int* last, int* newest,
        int* seen, int* c_pos, int* c_pos3, int* c_starts, int* c_seq, int* c_in,
        int* c_out, long long* c_slots, const int* tick, const float* logprobs,
        const int* top_ids, const float* top_logprobs, int* told, int* told_seq,
        int width, int v, int most, int block_size, int longest, int steps,
        int scratch, int places, int ahead) {
    __shared__ int found;
    const int s = blockIdx.x, seqs = gridDim.x, i = threadIdx.x;
    const int r0 = s * width;
    pdl_trigger();
    const int own = line[s], p = pos[r0];
    const int rows = own < 0 ? 0 : min(live[s], width);
    const int end = min(limit[s], most * block_size);
    const int half = tick[0] & 1;
    const How* h = (const How*)how + max(own, 0);
    const bool counted = counts && h->flags & 1;
    const long long at = position[max(own, 0)];
    const Chances c{chances, h->seed, at};
    pdl_wait();
    if (i < 32)
        first_bad(found, ids + r0, said + r0, rows, i, c);
    __syncthreads();
    const int n = found, end_row = r0 + max(n, 1) - 1;
    if (!i) {
        accepted[s] = n;
        last[s] = end_row;
        newest[s] = n ? said[end_row] : 0;
        seen[s] = p + max(n, 1) - 1;
        told_seq[(half * seqs + s) * ahead] = n;
        if (n)
            position[own] = at + n;
    }
    if (i < n)
        keep(counts, history, own, said[r0 + i], (long long)p + 1 + i, v, longest,
                counted);
    #pragma unroll 1
    for (int k = i; k < steps; k += 128) {
        const int to = min(p + n + k, max(end - 1, 0));
        const bool in = n && p + n + k < end;
        const int* blocks = tables + (size_t)s * most;
        const long long block = in ? blocks[to / block_size] : 0;
        const int c = k * seqs + s, own_slots = scratch + 2 * s;
        c_pos[c] = c_starts[c] = to;
        for (int x = 0; c_pos3 && x < 3; x++)
            c_pos3[(k * 3 + x) * seqs + s] = to + pos3[x * seqs * width + r0] - p;
        c_seq[c] = in ? s : -1;
        c_slots[c] = in ? block * block_size + to % block_size : -1;
        c_out[c] = scratch < 0 ? -1 : own_slots + (k & 1);
        c_in[c] = scratch < 0 ? -1 : own_slots + (k & 1 ^ 1);
        if (!k)
            c_in[c] = state_out[end_row];
    }
    told += ((size_t)half * places + r0) * TOLD;
    if (i < width)
        told[i * TOLD] = i < n ? said[r0 + i] : -1;
    if (!logprobs)
        return;
    #pragma unroll 1
    for (int k = i; k < n * REPORT; k += 128) {
        int* to = told + k / REPORT * TOLD + 2 + k % REPORT;
        const size_t from = (size_t)r0 * REPORT + k;
        to[0] = top_ids[from];
        to[REPORT] = __float_as_int(top_logprobs[from]);
    }
    if (i < n)
        told[i * TOLD + 1] = __float_as_int(logprobs[r0 + i]);
}
