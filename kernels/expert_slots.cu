// Which experts the rows of a wide decode step need, and for whom. A warp picks for a row
// (lib/picks.cuh); the block that ends last then lists the slots: one expert, and up to ENTRIES
// entries (row * PICKS + pick) of rows that picked it. The shared expert (number EXPERTS) comes
// first, the others by number; an expert's entries come in the order of rows. As many rows
// as a block has warps wait for nobody.
//   logits     : [r, ld]             f32   of the router; with GATE the one after the experts'
//                                          is the shared expert's gate
//   correction : [experts]           f32   added to the scores for picking only (CORRECTED 1);
//                                          or null
//   per_expert : [experts]           f32   a factor on the weight of each expert; or null
//   ids        : [r, top_k]          i32   who was picked, best first
//   weights    : [r, top_k]          f32   their weights; or null
//   share      : [r, picks]          f32   the same, and the shared expert's
//   which      : [most]              i32   expert of each slot; -1 where no slot is
//   slots      : [most, record]      i32   how many entries a slot has, and these; record =
//                                          ENTRIES + 1
//   number     : [1]                 i32   slots in use
//   met        : [1]                 i32   0, before and after (router.cu begins with 0)
//   -D EXPERTS=  TOP_K=  SHARED= GATE= (of the shared expert: 0 or 1)  ENTRIES=
//   -D SCORE= (of lib/picks.cuh)  RENORM= CORRECTED= (0 or 1)  WARPS=
//   launch: <<<ceil(r/WARPS), 32*WARPS>>>, up to 256 rows
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
#define WARPS 16
#endif
constexpr int E = EXPERTS, PICKS = TOP_K + SHARED, N = (E + 31) / 32, RECORD = ENTRIES + 1;
constexpr int THREADS = 32 * WARPS, MANY = 256 * TOP_K;  // picks of most rows
constexpr int PER = (E + THREADS - 1) / THREADS;  // experts of a thread

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

// A warp has a stretch of all picks to itself: where each stands among those of its expert there,
// and how many there are of each.
template <class Id> __device__ __forceinline__ void count(Id id, int from, int to,
        unsigned short* found, unsigned short* rank) {
    const int lane = threadIdx.x % 32;
    #pragma unroll 1
    for (int p = from + lane; p - lane < to; p += 32) {
        const int e = p < to ? id(p) : -1;
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

// The list of slots, of `rows` rows whose picks id(row * TOP_K + pick) tells.
template <class Id> __device__ __forceinline__ void list(Id id, int rows, int* which, int* slots,
        int* number, int most) {
    __shared__ int first[E], parts[WARPS];
    __shared__ unsigned short found[WARPS][E], rank[MANY];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int many = rows * TOP_K, stretch = (many + WARPS - 1) / WARPS;
    const int from = min(warp * stretch, many), to = min(from + stretch, many);
    #pragma unroll 1
    for (int i = lane; i < E; i += 32) found[warp][i] = 0;
    __syncwarp();
    count(id, from, to, found[warp], rank);
    __syncthreads();
    int total[PER], mine = 0, all;
    #pragma unroll
    for (int i = 0; i < PER; i++) {
        const int e = threadIdx.x * PER + i;
        total[i] = 0;
        if (e < E)
            #pragma unroll
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
        #pragma unroll 1
        for (int left = total[i]; left > 0; left -= ENTRIES, at++) {
            which[at] = e;
            slots[at * RECORD] = min(left, ENTRIES);
        }
    }
    __syncthreads();
    if (!threadIdx.x) *number = ahead + all;
    #pragma unroll 1
    for (int i = ahead + all + threadIdx.x; i < most; i += THREADS) which[i] = -1;
    #pragma unroll 1
    for (int p = from + lane; p < to; p += 32) {
        const int e = id(p), place = found[warp][e] + rank[p];
        int* const slot = slots + (first[e] + place / ENTRIES) * RECORD;
        slot[1 + place % ENTRIES] = p / TOP_K * PICKS + p % TOP_K;
    }
    #pragma unroll 1
    for (int i = threadIdx.x; SHARED && i < rows; i += THREADS) {
        int* const slot = slots + i / ENTRIES * RECORD;
        slot[1 + i % ENTRIES] = i * PICKS + TOP_K;
        if (i % ENTRIES == 0) {
            which[i / ENTRIES] = E;
            slot[0] = min(rows - i, ENTRIES);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) expert_slots(const float* logits,
        const float* __restrict__ correction, const float* __restrict__ per_expert, int* ids,
        float* weights, float* share, int* which, int* slots, int* number, unsigned* met,
        float scaling, int ld, int rows, int most) {
    __shared__ int picked[WARPS][TOP_K];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = blockIdx.x * WARPS + warp;
    const float* const p = logits + (size_t)r * ld;
    pdl_trigger();
    pdl_wait();
    float near[N], logit = 0.f, gate = 0.f;
    int id = 0;
    if (r < rows) {
        near_logits<E, N>(p, lane, near);
        if (SHARED && GATE) gate = __ldcg(p + E);
        pick<E, TOP_K, SCORE, CORRECTED, N>(near, correction, lane, picked[warp]);
        __syncwarp();
        id = picked[warp][lane < TOP_K ? lane : 0];
        if (lane < TOP_K) ids[r * TOP_K + lane] = id;
        logit = __ldcg(p + id);  // what follows does not wait for it
    }
    const bool alone = gridDim.x == 1;
    if (arrived_last(met, gridDim.x)) {
        const int* const own = picked[0];
        auto of = [&](int i) { return alone ? own[i] : __ldcg(ids + i); };
        list(of, rows, which, slots, number, most);
    }
    if (r >= rows) return;
    float v = pick_weight<E, TOP_K, SCORE, RENORM, N>(near, logit, scaling, lane);
    if (per_expert) v = __fmul_rn(v, per_expert[id]);
    if (lane < TOP_K) {
        if (weights) weights[r * TOP_K + lane] = v;
        share[r * PICKS + lane] = v;
    }
    if (SHARED && lane == TOP_K) share[r * PICKS + TOP_K] = GATE ? logistic(gate) : 1.f;
}
