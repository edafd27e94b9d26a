// Which experts the rows of a wide decode step need, and for whom. A warp picks for a row
// (lib/picks.cuh); the block that ends last then lists the slots: one expert, and up to ENTRIES
// entries (row * PICKS + pick) of rows that picked it. The shared expert (number EXPERTS) comes
// first, the others by number; an expert's entries come in the order of rows. Sixteen rows are
// one block, which waits for nobody.
//   logits     : [r, ld]             f32   of the router; with GATE the one after the experts'
//                                          is the shared expert's gate
//   correction : [experts]           f32   added to the scores for picking only (CORRECTED 1); or null
//   per_expert : [experts]           f32   a factor on the weight of each expert; or null
//   ids        : [r, top_k]          i32   who was picked, best first
//   weights    : [r, top_k]          f32   their weights; or null
//   share      : [r, picks]          f32   the same, and the shared expert's
//   slots      : [most, record]      i32   expert, how many entries, and these; record = ENTRIES + 2
//   number     : [1]                 i32   slots in use
//   met        : [1]                 i32   0, before and after (router.cu begins with 0)
//   -D EXPERTS=  TOP_K=  SHARED= GATE= (of the shared expert: 0 or 1)  ENTRIES=
//   -D SCORE= (of lib/picks.cuh)  RENORM= CORRECTED= (0 or 1)
//   launch: <<<ceil(r/16), 512>>>, up to 256 rows
#include "lib/arrived.cuh"
#include "lib/pdl.cuh"
#include "lib/picks.cuh"
#ifndef EXPERTS
#define EXPERTS 256
#define TOP_K 8
#define SHARED 1
#define GATE 1
#define ENTRIES 8
#define SCORE SCORE_SOFTMAX
#define RENORM 1
#define CORRECTED 0
#endif
constexpr int E = EXPERTS, PICKS = TOP_K + SHARED, N = (E + 31) / 32, RECORD = ENTRIES + 2;
constexpr int WARPS = 16, THREADS = 32 * WARPS, MANY = 256 * TOP_K, PER = (E + THREADS - 1) / THREADS;

// Sum of `v` over the threads before this one; `all`: over all of them.
__device__ __forceinline__ int before(int v, int* parts, int& all) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = v, base = 0;
    for (int m = 1; m < 32; m *= 2) {
        const int o = __shfl_up_sync(~0u, sum, m);
        if (lane >= m) sum += o;
    }
    if (lane == 31) parts[warp] = sum;
    __syncthreads();
    all = 0;
    for (int i = 0; i < WARPS; i++) { base += i < warp ? parts[i] : 0; all += parts[i]; }
    return base + sum - v;
}

__device__ __forceinline__ void pick_row(int r, const float* logits, const float* correction,
        const float* per_expert, int* ids, float* weights, float* share, float scaling, int* mine) {
    const int lane = threadIdx.x % 32;
    float near[N];
    near_logits<E, N>(logits, lane, near);
    pick<E, TOP_K, SCORE, CORRECTED, N>(near, correction, lane, mine);
    __syncwarp();
    const int id = mine[lane < TOP_K ? lane : 0];
    float v = pick_weight<E, TOP_K, SCORE, RENORM, N>(near, __ldcg(logits + id), scaling, lane);
    if (per_expert) v = __fmul_rn(v, per_expert[id]);
    if (lane < TOP_K) {
        ids[r * TOP_K + lane] = id;
        if (weights) weights[r * TOP_K + lane] = v;
        share[r * PICKS + lane] = v;
    }
    if (SHARED && lane == TOP_K)
        share[r * PICKS + TOP_K] = GATE ? logistic(__ldcg(logits + E)) : 1.f;
}

// A warp has a stretch of all picks to itself: where each stands among those of its expert there,
// and how many there are of each.
__device__ __forceinline__ void count(const int* ids, int from, int to, unsigned short* found,
        unsigned short* rank) {
    const int lane = threadIdx.x % 32;
    #pragma unroll 1
    for (int p = from + lane; p - lane < to; p += 32) {
        const int e = p < to ? __ldcg(ids + p) : -1;
        const unsigned same = __match_any_sync(~0u, e), below = same & ((1u << lane) - 1);
        const int place = e < 0 ? 0 : found[e] + __popc(below);
        __syncwarp();
        if (e >= 0) {
            rank[p] = place;
            if (same >> lane == 1) found[e] = place + 1;  // the last of them
        }
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) expert_slots(const float* logits,
        const float* __restrict__ correction, const float* __restrict__ per_expert, int* ids,
        float* weights, float* share, int* slots, int* number, unsigned* met, float scaling, int ld,
        int rows) {
    __shared__ int picked[WARPS][TOP_K], first[E], parts[WARPS];
    __shared__ unsigned short found[WARPS][E], rank[MANY];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = blockIdx.x * WARPS + warp;
    for (int i = threadIdx.x; i < WARPS * E; i += THREADS) found[i / E][i % E] = 0;
    pdl_trigger();
    pdl_wait();
    if (r < rows)
        pick_row(r, logits + (size_t)r * ld, correction, per_expert, ids, weights, share, scaling,
            picked[warp]);
    if (!arrived_last(met, gridDim.x)) return;
    const int many = rows * TOP_K, stretch = (many + WARPS - 1) / WARPS;
    const int from = min(warp * stretch, many), to = min(from + stretch, many);
    count(ids, from, to, found[warp], rank);
    __syncthreads();
    int total[PER], mine = 0, all;
    #pragma unroll
    for (int i = 0; i < PER; i++) {
        const int e = threadIdx.x * PER + i;
        total[i] = 0;
        if (e < E)
            for (int w = 0; w < WARPS; w++) {
                const int n = found[w][e];
                found[w][e] = total[i];
                total[i] += n;
            }
        mine += (total[i] + ENTRIES - 1) / ENTRIES;
    }
    const int ahead = SHARED ? (rows + ENTRIES - 1) / ENTRIES : 0;
    int at = ahead + before(mine, parts, all);
    #pragma unroll
    for (int i = 0; i < PER; i++) {
        const int e = threadIdx.x * PER + i;
        if (e < E) first[e] = at;
        for (int left = total[i]; left > 0; left -= ENTRIES, at++) {
            slots[at * RECORD] = e;
            slots[at * RECORD + 1] = min(left, ENTRIES);
        }
    }
    __syncthreads();
    if (!threadIdx.x) *number = ahead + all;
    #pragma unroll 1
    for (int p = from + lane; p < to; p += 32) {
        const int e = __ldcg(ids + p), place = found[warp][e] + rank[p];
        slots[(first[e] + place / ENTRIES) * RECORD + 2 + place % ENTRIES] = p / TOP_K * PICKS + p % TOP_K;
    }
    #pragma unroll 1
    for (int i = threadIdx.x; SHARED && i < rows; i += THREADS) {
        int* const slot = slots + i / ENTRIES * RECORD;
        slot[2 + i % ENTRIES] = i * PICKS + TOP_K;
        if (i % ENTRIES == 0) { slot[0] = E; slot[1] = min(rows - i, ENTRIES); }
    }
}
