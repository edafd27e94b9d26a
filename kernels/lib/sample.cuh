#pragma once
// What the kernels of a sampled row share. A row's logits become weights w = exp((x - top) /
// temperature), none above 1; a cut is a least weight. Sums of weights are integers, so that no
// order of additions can change a choice: a weight counts in units of 2^-44, a row of 2^18 stays
// below 2^63.
#include "lib/keys.cuh"

#ifndef CHUNKS
// a block of 256 threads has CHUNKS * 1024 neighbouring tokens; at most 8
#define CHUNKS 2
#endif
#define SPAN (CHUNKS * 1024)
#define REPORT 20             // alternatives that a row can ask for
// words of what the host is told of a row: its id, log probability, ids and log probabilities of
// alternatives
#define TOLD (2 + 2 * REPORT)
#define MOST 128  // blocks a row, at most
// bins of weights, the heaviest first: 5 bits of mantissa below the exponent, down to 2^-44
#define BINS 1536
#define LOW 18  // bits of a weight that tell the members of a bin apart

struct How {  // what a sequence asked for: a line of `how`
    float temperature;  // 0: greedy
    int top_k;  // 0: all
    float min_p, repetition, frequency, presence;
    double top_p;
    u64 seed;
    // logprobs: -1 for none. flags: 1 penalties, 2 mask
    int min_tokens, biases, ends, logprobs, flags, spare;
    __device__ bool adjusted() const { return biases || min_tokens || flags; }
    __device__ bool cut(int v) const {
        return temperature > 0.f && ((top_k > 0 && top_k < v) || top_p < 1.);
    }
};
// what the launches of a step tell each other about a row; best, arrived and listed are 0 before
// and after
struct Work {
    // key of the largest adjusted logit, all ones if a logit is not finite
    u64 best;
    // blocks that are done; weights that stand in doubt
    unsigned arrived, listed;
    // the largest adjusted logit and where it stands, -1 where the row cannot be sampled
    float top;
    int id;
    // bits of the least weight that stays, all ones if `id` is drawn already; the bin of the k-th
    // weight, -1 without top-k
    unsigned least;
    int k_bin;
    int p_from, p_to;  // bins where the top-p threshold may be
    double z;  // logsumexp of the raw logits
    u64 total;  // of all weights
    // how many weights there are in bins down to the last in doubt; all ones where none is
    unsigned few, spare;
};

// Four neighbours of a row of v, minus infinity beyond its end.
__device__ __forceinline__ float4 load4(const float* row, int i, int v) {
    if (!(v & 3) && i < v)
        return *(const float4*)(row + i);
    const float none = __uint_as_float(0xFF800000u);
    return make_float4(
            i < v ? row[i] : none, i + 1 < v ? row[i + 1] : none,
            i + 2 < v ? row[i + 2] : none, i + 3 < v ? row[i + 3] : none);
}
__device__ __forceinline__ unsigned weight(
        float x, float top, float temperature) {
    // its bits
    float d = x - top;
    if (temperature != 1.f)
        d = d / temperature;
    return __float_as_uint(fminf(expf(d), 1.f));
}
// Those of this thread's tokens in its block's span, all at once: a division and an exponential of
// one do not wait for those of another.
__device__ __forceinline__ void weights(
        const float4 (&a)[CHUNKS], float top, float temperature,
        unsigned (&w)[CHUNKS * 4]) {
    #pragma unroll
    for (int i = 0; i < CHUNKS * 4; i++)
        w[i] = weight((&a[i / 4].x)[i % 4], top, temperature);
}
__device__ __forceinline__ void load_span(
        const float* row, int v, float4 (&a)[CHUNKS]) {
    #pragma unroll
    for (int c = 0; c < CHUNKS; c++)
        a[c] = load4(row, blockIdx.x * SPAN + c * 1024 + threadIdx.x * 4, v);
}
// `sum`: of 24-bit mantissas of weights whose exponent field is `e`. What it is in units of 2^-44.
__device__ __forceinline__ u64 units(u64 sum, int e) {
    const int s = (e ? e : 1) - 106;
    return s >= 0 ? sum << s : s > -64 ? sum >> -s : 0;
}
__device__ __forceinline__ unsigned mantissa(unsigned w) {
    return (w & 0x7FFFFFu) | (w >> 23 ? 0x800000u : 0u);
}
// The bin of a weight; -1 for what is too light to be ever drawn. Bin 0 holds the weight 1 alone.
__device__ __forceinline__ int bin_of(unsigned w) {
    return w < 0x29800000u ? -1 : (0x3F800000 >> LOW) - (int)(w >> LOW);
}
__device__ __forceinline__ unsigned bin_start(int bin) {
    return (unsigned)((0x3F800000 >> LOW) - bin) << LOW;
}

// Sums of `v` and `w` over the threads before this one, of 256, in their place; and over every
// thread.
__device__ __forceinline__ void sums_before(
        u64& v, u64& w, u64& all_v, u64& all_w) {
    __shared__ u64 part[2][8];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    u64 s = v, t = w;
    #pragma unroll
    for (int m = 1; m < 32; m *= 2) {
        const u64 o = __shfl_up_sync(~0u, s, m);
        const u64 p = __shfl_up_sync(~0u, t, m);
        if (lane >= m) {
            s += o;
            t += p;
        }
    }
    if (lane == 31) {
        part[0][warp] = s;
        part[1][warp] = t;
    }
    __syncthreads();
    v = s - v;
    w = t - w;
    all_v = all_w = 0;
    #pragma unroll
    for (int i = 0; i < 8; i++) {
        if (i < warp) {
            v += part[0][i];
            w += part[1][i];
        }
        all_v += part[0][i];
        all_w += part[1][i];
    }
    __syncthreads();
}
__device__ __forceinline__ u64 sum_before(u64 v, u64& all) {
    u64 w = 0, none;
    sums_before(v, w, all, none);
    return v;
}
// Counts the weight bits `v` in class `i` (-1: in none). All lanes of a warp come; where they bring
// the same class, one adds for all.
__device__ __forceinline__ void tally(
        unsigned* n, unsigned* low, int i, unsigned v) {
    const int first = __shfl_sync(~0u, i, 0);
    if (__all_sync(~0u, i == first)) {
        if (first < 0)
            return;
        const unsigned sum = __reduce_add_sync(~0u, v);
        if (threadIdx.x % 32)
            return;
        atomicAdd(n + first, 32u);
        atomicAdd(low + first, sum);
    } else if (i >= 0) {
        atomicAdd(n + i, 1u);
        atomicAdd(low + i, v);
    }
}
__device__ __forceinline__ u64 block_max(u64 v) {
    __shared__ u64 part[8];
    for (int m = 16; m; m >>= 1)
        v = max(v, __shfl_xor_sync(~0u, v, m));
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = v;
    __syncthreads();
    v = part[0];
    for (int i = 1; i < 8; i++)
        v = max(v, part[i]);
    __syncthreads();
    return v;
}
// Is this the last block of its row to get here? It then sees what the others wrote, and the
// counter is 0 again.
__device__ __forceinline__ bool last_block(unsigned* arrived) {
    __shared__ int last;
    __syncthreads();
    if (!threadIdx.x) {
        __threadfence();
        last = atomicAdd(arrived, 1u) == gridDim.x - 1;
        __threadfence();
        if (last)
            *arrived = 0;
    }
    __syncthreads();
    return last;
}
// The first 64 bits of Philox4x32-10 (Salmon et al. 2011); the upper 53 of them are what
// atlas.ops.sample.uniform takes.
__device__ __forceinline__ u64 philox(u64 key, u64 counter) {
    unsigned a = (unsigned)counter;
    unsigned b = (unsigned)(counter >> 32);
    unsigned c = 0;
    unsigned d = 0;
    unsigned k = (unsigned)key;
    unsigned l = (unsigned)(key >> 32);
    #pragma unroll
    for (int i = 0; i < 10; i++) {
        const u64 p = 0xD2511F53ull * a, q = 0xCD9E8D57ull * c;
        a = (unsigned)(q >> 32) ^ b ^ k;
        b = (unsigned)q;
        c = (unsigned)(p >> 32) ^ d ^ l;
        d = (unsigned)p;
        k += 0x9E3779B9u;
        l += 0xBB67AE85u;
    }
    return ((u64)a << 32 | b) >> 11 << 11;
}
