// Which experts the rows of a wide decode step need, and for whom. A warp picks for a row
// (lib/ranked.cuh); the block that ends last then lists the slots: one expert, and up to ENTRIES
// entries (row * PICKS + pick) of rows that picked it, out of a bit for each row and expert. The
// shared expert (number EXPERTS) comes first, the others by number; an expert's entries come in the
// order of rows. As many rows as a block has warps wait for nobody.
//   logits     : [r, ld]             f32   of the router; with GATE the one after the experts' is
//                                          the shared expert's gate
//   correction : [experts]           f32   added to the scores for picking only (CORRECTED 1); or
//                                          null
//   per_expert : [experts]           f32   a factor on the weight of each expert; or null
//   ids        : [r, top_k]          i32   who was picked, best first
//   weights    : [r, top_k]          f32   their weights; or null
//   share      : [r, picks]          f32   the same, and the shared expert's
//   which      : [most]              i32   expert of each slot; -1 where no slot is
//   slots      : [most, record]      i32   how many entries a slot has, and these; record = ENTRIES
//                                          + 1
//   number     : [1]                 i32   slots in use
//   met        : [1]                 i32   0, before and after (router.cu begins with 0)
//   -D EXPERTS=  TOP_K=  SHARED= GATE= (of the shared expert: 0 or 1)  ENTRIES=
//   -D SCORE= (of lib/picks.cuh)  RENORM= CORRECTED= (0 or 1)  WARPS=
//   launch: <<<ceil(r/WARPS), 32*WARPS>>>, up to 256 rows
#include "lib/arrived.cuh"
#include "lib/listing.cuh"
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
constexpr int E = EXPERTS;
constexpr int PICKS = TOP_K + SHARED;
constexpr int N = (E + 31) / 32;
constexpr int RECORD = ENTRIES + 1;
constexpr int THREADS = 32 * WARPS;
typedef Listing<E, TOP_K, SHARED, ENTRIES, WARPS> List;

extern "C" __global__ void __launch_bounds__(THREADS, 1) expert_slots(
        const float* logits, const float* __restrict__ correction,
        const float* __restrict__ per_expert, int* ids, float* weights,
        float* share, int* which, int* slots, int* number, unsigned* met,
        float scaling, int ld, int rows, int most) {
    __shared__ List list;
    __shared__ int room[WARPS][TOP_K];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int r = blockIdx.x * WARPS + warp;
    const float* const p = logits + (size_t)r * ld;
    const bool alone = gridDim.x == 1;
    pdl_trigger();
    list.clear(rows);
    __syncthreads();
    pdl_wait();
    float near[N], logit = 0.f, gate = 0.f;
    int id = 0;
    if (r < rows) {
        near_logits<E, N>(p, lane, near);
        if (SHARED && GATE)
            gate = __ldcg(p + E);
    }
    auto slot = [&](int i, int expert, int entries) {
        which[i] = expert;
        slots[i * RECORD] = entries;
    };
    auto entry = [&](int i, int place, int value) {
        slots[i * RECORD + 1 + place] = value;
    };
    if (!blockIdx.x)
        list.each_shared(rows, slot, entry);  // while logits come
    if (r < rows) {
        id = ranked<E, TOP_K, SCORE, CORRECTED, N>(
                near, correction, lane, room[warp]);
        if (lane < TOP_K) {
            ids[r * TOP_K + lane] = id;
            if (alone)
                list.note(r * TOP_K + lane, id);
        }
        logit = __ldcg(p + id);  // what follows does not wait for it
    }
    if (arrived_last(met, gridDim.x)) {
        if (!alone) {
            list.note_all(ids, rows);
            __syncthreads();
        }
        const int end = list.count(rows);
        __syncthreads();
        list.each_slot(rows, slot);
        if (threadIdx.x == THREADS - 1)
            *number = end;
        #pragma unroll 1
        for (int i = end + THREADS - 1 - threadIdx.x; i < most; i += THREADS)
            which[i] = -1;
        list.each_pick(rows, entry);
    }
    if (r >= rows)
        return;
    give_weights<E, TOP_K, SCORE, RENORM, SHARED, N>(
            near, id, logit, GATE ? &gate : nullptr, per_expert, scaling, lane,
            weights ? weights + r * TOP_K : nullptr, share + r * PICKS);
}
