// The end of a step with drafts: the rows of the next one. Row 0 of a sequence gets its newest
// token, the rows after it its drafts; positions, slots and state slots move on by what was
// accepted. A sequence of which nothing was accepted stays as it is. Layout as in accept.cu.
// What it writes are step tables: the next launch must be a plain one (lib/pdl.cuh).
//   drafts    : [k, seqs]       i32  below 0: there is none, and none after it; or null
//   accepted  : [seqs]          i32  this and the next two from accept
//   last      : [seqs]          i32
//   newest    : [seqs]          i32
//   line      : [seqs]          i32  line of the sampler's table; -1 for padding
//   kmax      : [seqs]          i32  drafts that a sequence may have
//   limit     : [seqs]          i32  positions that it may have: no row stands at one from there on
//   tables    : [seqs, most]    i32  blocks of a sequence
//   ids       : [rows]          i32
//   pos       : [rows]          i32  masked: none beyond the limit
//   pos3      : [3, rows]       i32  as far from `pos` as row 0's are now; or null
//   slots     : [rows]          i64  -1 where masked
//   seq       : [rows]          i32  -1 where masked
//   lanes     : [rows]          i32  the sequence's line, -1 where masked
//   starts    : [seqs]          i32  position of row 0
//   live      : [seqs]          i32  rows that are not masked
//   state_in  : [seqs]          i32  changes places with
//   state_out : [rows]          i32  that of the last accepted row; -1 for none. That of row 0 is
//                                    the other of the two that share a slot with what it reads: 2n
//                                    and 2n+1
//   tick      : [1]             i32  counted up
//   told_seq  : [2, seqs, ahead] i32 memory of the host: after the first word the drafts that the
//                                    next step looks at, -1 for none, or -2 where the drafter had
//                                    no numbers for it
//   launch: <<<1, 256>>>, at most 256 sequences
#include "lib/pdl.cuh"

// of a sequence: its newest token's position and id, rows accepted and real ones
struct Next {
    int p, n, live, newest, line;
    // the last position it may have; rotary positions less positions
    int top, shift[3];
};

// How many of a sequence's drafts are some.
__device__ __forceinline__ int leading(
        const int* drafts, int k, int s, int seqs) {
    int j = 0;
    while (j < k && drafts[j * seqs + s] >= 0)
        j++;
    return j;
}

// Where sequence i stands, and how many rows of its next step there is room for.
__device__ __forceinline__ Next read(
        const int* line, const int* accepted, const int* newest, const int* pos,
        const int* pos3, const int* limit, const int* kmax, int i, int rows,
        int width, int axes, int room) {
    Next a = {};
    a.line = line[i];
    a.n = a.line < 0 ? 0 : accepted[i];
    a.newest = newest[i];
    const int was = pos[i * width];
    const int end = min(limit[i], room);
    const int own = min(max(kmax[i], 0), width - 1);
    a.p = was + a.n;
    a.top = max(end - 1, 0);
    a.live = max(0, min(1 + own, end - a.p));
    for (int x = 0; x < axes; x++)
        a.shift[x] = pos3[x * rows + i * width] - was;
    return a;
}

extern "C" __global__ void __launch_bounds__(256) next_rows(
        const int* drafts, const int* accepted, const int* last,
        const int* newest, const int* line, const int* kmax, const int* limit,
        const int* tables, int* ids, int* pos, int* pos3, long long* slots,
        int* seq, int* lanes, int* starts, int* live, int* state_in,
        int* state_out, int* tick, int* told_seq, int seqs, int width, int k,
        int most, int block_size, int ahead) {
    __shared__ Next all[256];
    const int i = threadIdx.x;
    const int rows = seqs * width;
    const int axes = pos3 ? 3 : 0;
    pdl_trigger();
    const int half = tick[0] & 1;
    if (i < seqs)  // all that is moved is read before any of it is written
        all[i] = read(
                line, accepted, newest, pos, pos3, limit, kmax, i, rows, width,
                axes, most * block_size);
    pdl_wait();
    if (i < seqs) {
        Next& a = all[i];
        const int given = drafts ? leading(drafts, k, i, seqs) : 0;
        a.live = min(a.live, 1 + given);
        if (a.n) {
            live[i] = a.live;
            starts[i] = min(a.p, a.top);
            const int from = last[i], out = state_out[from];
            if (out >= 0) {
                state_out[from] = state_in[i];
                state_in[i] = out;
                state_out[i * width] = out ^ 1;
            }
        }
    }
    __syncthreads();
    #pragma unroll 1
    for (int r = i; r < rows; r += 256) {
        const int s = r / width, j = r % width;
        const Next& a = all[s];
        const bool real = a.n && j < a.live;
        const int to = min(a.p + j, a.top);
        int id = a.newest;
        if (j) {
            id = drafts && j <= k ? drafts[(j - 1) * seqs + s] : -1;
            told_seq[(half * seqs + s) * ahead + j] = real ? id
                    : a.n                                  ? min(id, -1)
                                                           : -1;
        }
        if (!a.n)
            continue;
        const int* blocks = tables + (size_t)s * most;
        const long long block = real ? blocks[to / block_size] : 0;
        ids[r] = id;
        pos[r] = to;
        slots[r] = real ? block * block_size + to % block_size : -1;
        seq[r] = real ? s : -1;
        lanes[r] = real ? a.line : -1;
        for (int x = 0; x < axes; x++)
            pos3[x * rows + r] = to + a.shift[x];
    }
    if (!i)
        tick[0]++;
}
