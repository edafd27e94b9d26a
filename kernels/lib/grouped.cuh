#pragma once
#include "lib/picks.cuh"

// Which experts are needed and for whom, found by one warp: a lane has entries lane, lane + 32,
// and so on; `seen`: of each expert the first entry that picked it.
template <int BEST, int FEW, class Table> __device__ __forceinline__ void group_rows(Table& s,
        int* seen, int many, int lane) {
    constexpr int M = (FEW * BEST + 31) / 32;
    int id[M], opener[M];
    unsigned opens[M];
    #pragma unroll
    for (int i = 0; i < M; i++) {
        id[i] = lane + i * 32 < many ? s.ids[lane + i * 32] : -1;
        if (id[i] >= 0) atomicMin(seen + id[i], lane + i * 32);
    }
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < M; i++) {
        opener[i] = id[i] >= 0 ? seen[id[i]] : -1;
        opens[i] = __ballot_sync(~0u, opener[i] == lane + i * 32);
    }
    #pragma unroll
    for (int i = 0; i < M; i++) {
        if (id[i] < 0) continue;
        int slot = s.FIRST;  // those that were opened before
        #pragma unroll
        for (int j = 0; j < M; j++) {
            const int before = opener[i] - 32 * j;
            const unsigned below = before >= 32 ? ~0u : before > 0 ? (1u << before) - 1 : 0u;
            slot += __popc(opens[j] & below);
        }
        const int entry = lane + i * 32;
        if (opener[i] == entry) s.expert[slot] = id[i];
        s.who[slot][entry / BEST] = entry / BEST * s.PICKS + entry % BEST;
    }
    int all = s.FIRST;
    #pragma unroll
    for (int j = 0; j < M; j++) all += __popc(opens[j]);
    if (!lane) s.number = all;
}
