// First of the launches that sample: what a row's sequence changes in its logits, the largest one,
// and what is to be told of the raw ones. A row with a logit that is not finite gets id -1 in
// `work`. CHUNKS: of 1,024 tokens a block (lib/sample.cuh).
//   logits      : [rows, v]          f32
//   who         : [rows]             i32   line of the tables that a row belongs to, -1 for none;
//                                          or null: its own number
//   how         : [slots, 16]        i32   struct How
//   position    : [slots]            i64   tokens that the output has
//   counts      : [slots, v]         i32   how often it has each; or null, where no line asks for
//                                          penalties
//   prompt      : [slots, words]     u32   a bit a token: is it in the prompt? Or null
//   mask        : [masked, words]    u32   `masks` a line, a bit a token: may it be chosen? Or null
//   bias_ids    : [slots, most_bias] i32   or null
//   bias        : [slots, most_bias] f32   or null
//   ends        : [slots, most_ends] i32   barred until min_tokens; or null
//   adjusted    : [some_rows, v]     f32   written for rows whose line changes anything; or null
//   work        : [some_rows, 8]     i64   struct Work of each row
//   sums        : [some_rows, 128, 2] f64  scratch
//   bests       : [some_rows, 128, 20] i64 scratch
//   top_ids     : [some_rows, 20]    i32   the likeliest, as many as asked for, then -1
//   top_logprobs : [some_rows, 20]   f32
//   given       : [rows]             i32   tokens that rows were fed with; null where `width` is 1
// Row r is row j = r % width of its sequence, whose output has j drafts more: given[r-j+1..r].
//   launch: <<<(ceil(v / (CHUNKS*1024)), rows), 256>>>, at most 128 blocks a row
#include "lib/pdl.cuh"
#include "lib/sample.cuh"

// The REPORT largest of N different keys a thread (0: none), largest first; 0 where there are
// fewer. A key below the best ones of REPORT groups of four threads cannot be among them, so at
// most REPORT * 4 N are looked at twice.
template <int N>
__device__ __forceinline__ void largest(const u64 (&key)[N], u64* out) {
    __shared__ u64 best[64], found[REPORT * 4 * N];
    __shared__ u64 least;
    __shared__ unsigned n;
    u64 mine = 0;
    for (int i = 0; i < N; i++)
        mine = max(mine, key[i]);
    mine = max(mine, __shfl_xor_sync(~0u, mine, 1));
    mine = max(mine, __shfl_xor_sync(~0u, mine, 2));
    if (threadIdx.x % 4 == 0)
        best[threadIdx.x / 4] = mine;
    if (!threadIdx.x) {
        least = 1;
        n = 0;
    }
    if (threadIdx.x < REPORT)
        out[threadIdx.x] = 0;
    __syncthreads();
    if (threadIdx.x < 64) {
        int above = 0;
        mine = best[threadIdx.x];
        #pragma unroll 8
        for (int i = 0; i < 64; i++)
            above += best[i] > mine;
        if (mine && above == REPORT - 1)
            least = mine;
    }
    __syncthreads();
    for (int i = 0; i < N; i++)
        if (key[i] >= least)
            found[atomicAdd(&n, 1u)] = key[i];
    __syncthreads();
    for (int i = threadIdx.x; i < n; i += 256) {
        int rank = 0;
        for (int j = 0; j < n; j++)
            rank += found[j] > found[i];
        if (rank < REPORT)
            out[rank] = found[i];
    }
    __syncthreads();
}

// Largest raw logit of a block and the sum of exp(x - it).
__device__ __forceinline__ void sum_exp(
        const float (&x)[CHUNKS][4], double* out) {
    float top = x[0][0];
    for (int i = 0; i < 4 * CHUNKS; i++)
        top = fmaxf(top, x[i / 4][i % 4]);
    top = key_float((unsigned)block_max(float_key(top)));
    u64 s = 0, all;
    for (int i = 0; i < 4 * CHUNKS; i++) {
        const unsigned w = weight(x[i / 4][i % 4], top, 1.f);
        s += units(mantissa(w), w >> 23);
    }
    sum_before(s, all);
    if (!threadIdx.x) {
        out[0] = top;
        out[1] = (double)all;
    }
}
// What the blocks of a row found, as one logsumexp.
__device__ __forceinline__ double total_exp(const double* sums) {
    const bool has = threadIdx.x < gridDim.x;
    const double top = has ? __ldcg(sums + 2 * threadIdx.x) : 0.,
                 sum = has ? __ldcg(sums + 2 * threadIdx.x + 1) : 0.;
    const float most = key_float(
            (unsigned)block_max(has ? float_key((float)top) : 0u));
    u64 all;
    sum_before(has ? (u64)(sum * exp(top - (double)most)) : 0ull, all);
    return (double)most + log((double)all * 0x1p-44);
}

struct Lists {  // those of one line, and the drafts before a row
    const int *counts, *bias_ids, *ends;
    const unsigned *prompt, *mask;
    const float* bias;
    const int* given;
    int drafts;
};

// Bias and barred tokens, of the span that begins at `lo`: through shared memory, since they are
// lists.
__device__ __forceinline__ void apply_lists(
        float (&x)[CHUNKS][4], const How& h, const Lists& l, int lo,
        bool barred) {
    __shared__ __align__(16) float span[SPAN];
    for (int c = 0; c < CHUNKS; c++)
        *(float4*)(span + c * 1024 + threadIdx.x * 4) = make_float4(
                x[c][0], x[c][1], x[c][2], x[c][3]);
    __syncthreads();
    for (int i = threadIdx.x; i < h.biases; i += 256) {
        const unsigned at = l.bias_ids[i] - lo;
        if (at < SPAN)
            span[at] += l.bias[i];
    }
    __syncthreads();
    if (barred)
        for (int i = threadIdx.x; i < h.ends; i += 256) {
            const unsigned at = l.ends[i] - lo;
            if (at < SPAN)
                span[at] = __uint_as_float(0xFF800000u);
        }
    __syncthreads();
    for (int c = 0; c < CHUNKS; c++)
        for (int j = 0; j < 4; j++)
            x[c][j] = span[c * 1024 + threadIdx.x * 4 + j];
}
__device__ __forceinline__ float penalise(
        float x, const How& h, bool prompted, int count) {
    if (h.repetition != 1.f && (prompted || count > 0))
        x = x > 0.f ? x / h.repetition : x * h.repetition;
    return count ? (float)((double)x
                           - fma((double)h.frequency, (double)count,
                                   (double)h.presence))
                 : x;
}
// How often the drafts before a row have a token.
__device__ __forceinline__ int drafted(const Lists& l, int id) {
    int n = 0;
    #pragma unroll 1
    for (int k = 0; k < l.drafts; k++)
        n += l.given[k] == id;
    return n;
}
__device__ __forceinline__ void adjust(
        float (&x)[CHUNKS][4], const How& h, const Lists& l, int lo, int v,
        bool barred, float* out) {
    if (h.biases || (barred && h.ends))
        apply_lists(x, h, l, lo, barred);
    const bool penal = h.flags & 1, masked = h.flags & 2;
    #pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        const int i = lo + c * 1024 + threadIdx.x * 4;
        if (i >= v)
            continue;
        const unsigned prompt = penal && l.prompt ? l.prompt[i / 32] >> i % 32
                                                  : 0;
        const unsigned may = masked ? l.mask[i / 32] >> i % 32 : ~0u;
        __align__(16) int n[4] = {0, 0, 0, 0};
        if (penal && !(v & 3))
            *(int4*)n = *(const int4*)(l.counts + i);
        else if (penal)
            for (int j = 0; j < 4 && i + j < v; j++)
                n[j] = l.counts[i + j];
        for (int j = 0; j < 4; j++) {
            const int had = penal ? n[j] + drafted(l, i + j) : 0;
            if (penal)
                x[c][j] = penalise(x[c][j], h, prompt >> j & 1, had);
            if (!(may >> j & 1))
                x[c][j] = __uint_as_float(0xFF800000u);
        }
        if (!(v & 3))
            *(float4*)(out + i) = make_float4(x[c][0], x[c][1], x[c][2], x[c][3]);
        else
            for (int j = 0; j < 4 && i + j < v; j++)
                out[i + j] = x[c][j];
    }
}

// What is reported of a row: the last block's work.
__device__ __forceinline__ void report(
        int wanted, Work* w, const double* sums, const u64* bests, int* ids,
        float* logprobs) {
    __shared__ u64 out[REPORT];
    double z = 0.;
    if (wanted >= 0) {
        z = total_exp(sums);
        if (!threadIdx.x)
            w->z = z;
    }
    if (wanted > 0) {
        u64 key[MOST * REPORT / 256];
        for (int i = 0; i < MOST * REPORT / 256; i++) {
            const int at = i * 256 + threadIdx.x;
            key[i] = at < gridDim.x * REPORT ? __ldcg(bests + at) : 0;
        }
        largest(key, out);
    }
    __syncthreads();
    const int i = threadIdx.x;
    if (i >= REPORT)
        return;
    const bool there = i < wanted && out[i];
    ids[i] = there ? (int)~(unsigned)out[i] : -1;
    logprobs[i] = there ? (float)((double)key_float((unsigned)(out[i] >> 32)) - z)
                        : __uint_as_float(0x7FC00000u);
}

// This thread's logits of a row; is one of them not finite?
__device__ __forceinline__ bool read_logits(
        const float* logits, int lo, int v, float (&x)[CHUNKS][4]) {
    bool bad = false;
    for (int c = 0; c < CHUNKS; c++) {
        const int i = lo + c * 1024 + threadIdx.x * 4;
        const float4 a = load4(logits, i, v);
        x[c][0] = a.x;
        x[c][1] = a.y;
        x[c][2] = a.z;
        x[c][3] = a.w;
        for (int j = 0; j < 4; j++)
            bad |= i + j < v && not_finite(x[c][j]);
    }
    return bad;
}

// The best of a thread's own logits.
__device__ __forceinline__ u64 best_of(
        const float (&x)[CHUNKS][4], int lo, int v, unsigned thread) {
    u64 key = 0;
    for (int i = 0; i < 4 * CHUNKS; i++) {
        const int id = lo + i / 4 * 1024 + thread * 4 + i % 4;
        const float value = x[i / 4][i % 4];
        if (id < v)
            key = max(key, best_key(value, id));
    }
    return key;
}

extern "C" __global__ void __launch_bounds__(256) sample_scan(
        const float* logits, const int* who, const int* how,
        const long long* position, const int* counts, const unsigned* prompt,
        const unsigned* mask, const int* bias_ids, const float* bias,
        const int* ends, float* adjusted, long long* work, double* sums,
        long long* bests, int* top_ids, float* top_logprobs, const int* given,
        int v, int words, int most_bias, int most_ends, int width, int masks) {
    __shared__ u64 out[REPORT];
    __shared__ int wanted;
    const int row = blockIdx.y;
    const int lo = blockIdx.x * SPAN;
    const int slot = who ? who[row] : row;
    pdl_trigger();
    const How h = ((const How*)how)[max(slot, 0)];
    pdl_wait();
    if (slot < 0)
        return;
    Work* w = (Work*)work + row;
    const size_t line = slot;
    const int j = width > 1 ? row % width : 0;
    float x[CHUNKS][4];
    const bool bad = read_logits(logits + (size_t)row * v, lo, v, x);
    if (h.logprobs >= 0)
        sum_exp(x, sums + ((size_t)row * MOST + blockIdx.x) * 2);
    if (h.logprobs > 0) {
        u64 key[4 * CHUNKS];
        for (int i = 0; i < 4 * CHUNKS; i++) {
            const int id = lo + i / 4 * 1024 + threadIdx.x * 4 + i % 4;
            const float value = x[i / 4][i % 4];
            key[i] = id < v ? best_key(value, id) : 0;
        }
        largest(key, out);
        if (threadIdx.x < REPORT)
            bests[((size_t)row * MOST + blockIdx.x) * REPORT + threadIdx.x] =
                    out[threadIdx.x];
    }
    if (h.adjusted()) {
        const Lists l{counts + (counts ? line * v : 0),
                bias_ids + (bias_ids ? line * most_bias : 0),
                ends + (ends ? line * most_ends : 0),
                prompt ? prompt + line * words : 0,
                mask + (mask ? (line * masks + j) * words : 0),
                bias + (bias ? line * most_bias : 0),
                given + (j ? row - j + 1 : 0), j};
        const bool barred = position[slot] + j < h.min_tokens;
        adjust(x, h, l, lo, v, barred, adjusted + (size_t)row * v);
    }
    u64 key = best_of(x, lo, v, threadIdx.x);
    key = block_max(bad ? ~0ull : key);
    if (!threadIdx.x)
        atomicMax(&w->best, key);
    if (!last_block(&w->arrived))
        return;
    if (!threadIdx.x) {
        key = atomicExch(&w->best, 0ull);
        const float top = key_float((unsigned)(key >> 32));
        const int id = key == ~0ull || not_finite(top) ? -1 : (int)~(unsigned)key;
        w->top = top;
        w->id = id;
        w->least = 0;
        wanted = id < 0 ? -1 : h.logprobs;
    }
    __syncthreads();
    report(wanted, w, sums + (size_t)row * MOST * 2,
            (const u64*)bests + (size_t)row * MOST * REPORT,
            top_ids + row * REPORT, top_logprobs + row * REPORT);
}
