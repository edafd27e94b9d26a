// Which experts the rows of a wide decode step need, and for whom. A warp picks for a row
// (lib/ranked.cuh); the block that ends last then lists the slots: one expert, and up to ENTRIES
// entries (row * PICKS + pick) of rows that picked it, out of a bit for each row and expert. The shared expert (number EXPERTS) comes
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
#include "lib/ranked.cuh"
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
constexpr int THREADS = 32 * WARPS, ROWS = 256;  // most of a launch
constexpr int PER = (N + WARPS - 1) / WARPS;  // times 32 experts of a warp
constexpr int EACH = (ROWS * TOP_K + THREADS - 1) / THREADS;  // picks of a thread

struct Listing {
    unsigned rows[ROWS / 32][E];  // a bit for each row that picked the expert
    int first[E], slots[N];  // of each expert its first slot; of 32 experts, how many
    short picked[ROWS * TOP_K];  // by row and pick
};

__device__ __forceinline__ void note(Listing* l, int p, int e) {
    const unsigned r = (unsigned)p / TOP_K;
    l->picked[p] = e;
    atomicOr(&l->rows[r / 32][e], 1u << r % 32);
}

// The shared expert's slots, which all rows are in.
__device__ __forceinline__ void list_shared(int rows, int* which, int* slots) {
    #pragma unroll 1
    for (int i = threadIdx.x; i < rows; i += THREADS) {
        int* const slot = slots + i / ENTRIES * RECORD;
        slot[1 + i % ENTRIES] = i * PICKS + TOP_K;
        if (i % ENTRIES == 0) {
            which[i / ENTRIES] = E;
            slot[0] = min(rows - i, ENTRIES);
        }
    }
}

// Sum of `v` <= `most` over the lanes before this one. A vote for each binary digit: none waits for
// another, as additions from lane to lane would.
__device__ __forceinline__ int lanes_before(int v, int most) {
    const unsigned below = (1u << threadIdx.x % 32) - 1;
    int sum = 0;
    #pragma unroll 1
    for (int i = 0; most >> i; i++) sum += __popc(__ballot_sync(~0u, v >> i & 1) & below) << i;
    return sum;
}

// The slots of experts that `rows` rows picked.
__device__ __forceinline__ void list(Listing* l, int rows, int* which, int* slots, int* number,
        int most) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, words = (rows + 31) / 32;
    const int ahead = (rows + ENTRIES - 1) / ENTRIES;  // slots of an expert that all rows picked
    int total[PER], at[PER];
    #pragma unroll
    for (int i = 0; i < PER; i++) {
        const int group = i * WARPS + warp, e = group * 32 + lane;
        total[i] = 0;
        if (group >= N) continue;
        #pragma unroll 1
        for (int w = 0; w < words && e < E; w++) total[i] += __popc(l->rows[w][e]);
        const int mine = (total[i] + ENTRIES - 1) / ENTRIES;
        at[i] = lanes_before(mine, ahead);
        if (lane == 31) l->slots[group] = at[i] + mine;
    }
    __syncthreads();
    int end = SHARED ? ahead : 0;
    #pragma unroll
    for (int g = 0; g < N; g++) {
        const int many = l->slots[g];
        end += many;
        #pragma unroll
        for (int i = 0; i < PER; i++) at[i] += g < i * WARPS + warp ? many : 0;
    }
    #pragma unroll
    for (int i = 0; i < PER; i++) {
        const int e = (i * WARPS + warp) * 32 + lane;
        if (e >= E) continue;
        int slot = (SHARED ? ahead : 0) + at[i];
        l->first[e] = slot;
        #pragma unroll 1
        for (int left = total[i]; left > 0; left -= ENTRIES, slot++) {
            which[slot] = e;
            slots[slot * RECORD] = min(left, ENTRIES);
        }
    }
    if (threadIdx.x == THREADS - 1) *number = end;
    #pragma unroll 1
    for (int i = end + THREADS - 1 - threadIdx.x; i < most; i += THREADS) which[i] = -1;
    __syncthreads();
    #pragma unroll 1
    for (int p = threadIdx.x; p < rows * TOP_K; p += THREADS) {
        const unsigned e = l->picked[p], r = (unsigned)p / TOP_K;
        unsigned place = __popc(l->rows[r / 32][e] & ((1u << r % 32) - 1));
        #pragma unroll 1
        for (int w = 0; w < r / 32; w++) place += __popc(l->rows[w][e]);
        int* const slot = slots + (l->first[e] + place / ENTRIES) * RECORD;
        slot[1 + place % ENTRIES] = r * PICKS + p % TOP_K;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) expert_slots(
        const float* logits, const float* __restrict__ correction,
        const float* __restrict__ per_expert, int* ids, float* weights, float* share, int* which,
        int* slots, int* number, unsigned* met, float scaling, int ld, int rows, int most) {
    __shared__ Listing listing;
    __shared__ int room[WARPS][TOP_K];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = blockIdx.x * WARPS + warp;
    const float* const p = logits + (size_t)r * ld;
    const bool alone = gridDim.x == 1;
    pdl_trigger();
    #pragma unroll 1
    for (int i = threadIdx.x; i < (rows + 31) / 32 * E; i += THREADS) (&listing.rows[0][0])[i] = 0;
    __syncthreads();
    pdl_wait();
    float near[N], logit = 0.f, gate = 0.f;
    int id = 0;
    if (r < rows) {
        near_logits<E, N>(p, lane, near);
        if (SHARED && GATE) gate = __ldcg(p + E);
    }
    if (SHARED && !blockIdx.x) list_shared(rows, which, slots);  // while logits come
    if (r < rows) {
        id = ranked<E, TOP_K, SCORE, CORRECTED, N>(near, correction, lane, room[warp]);
        if (lane < TOP_K) {
            ids[r * TOP_K + lane] = id;
            if (alone) note(&listing, r * TOP_K + lane, id);
        }
        logit = __ldcg(p + id);  // what follows does not wait for it
    }
    if (arrived_last(met, gridDim.x)) {
        if (!alone) {
            int e[EACH];  // all asked for before the first is looked at
            #pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int p = i * THREADS + threadIdx.x;
                e[i] = p < rows * TOP_K ? __ldcg(ids + p) : -1;
            }
            #pragma unroll
            for (int i = 0; i < EACH; i++)
                if (e[i] >= 0) note(&listing, i * THREADS + threadIdx.x, e[i]);
            __syncthreads();
        }
        list(&listing, rows, which, slots, number, most);
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
