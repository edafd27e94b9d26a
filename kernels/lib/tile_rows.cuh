#pragma once
// Whose rows a tile of gemm.cu or gemm_scaled.cu has: over the constants of these files.

// Of each row of the tile, places r0 to end - 1: `from`, its row of x, and `to`, its row of y, or
// -1: nobody wants it. GROUPED, `order` has the pick at each place, and a row of x `top` picks.
__device__ __forceinline__ void name_rows(
        int* from, int* to, const int* order, int r0, int end, int top) {
    for (int i = threadIdx.x; i < BM; i += THREADS) {
        const int r = min(r0 + i, end - 1);
        const int named = GROUPED ? order[r] : r;
        from[i] = GROUPED == 1 ? named / top : r;
        to[i] = r0 + i >= end ? -1 : GROUPED == 2 ? named : r;
    }
}

// What results are multiplied by: of each row its factor `by` and its gate, and of each of the
// tile's rows of W, from `n0` of the expert's `n4`, its aid (lib/unpack.cuh).
__device__ __forceinline__ void learn_factors(
        float* by, float* gated, float* aids, const int* from, const int* to,
        const float* __restrict__ scale, const float* __restrict__ gate,
        const float* __restrict__ unit, int gs, int column, int e, int n0,
        int n4) {
    for (int i = threadIdx.x; i < BM; i += THREADS) {
        by[i] = scale[from[i]];
        const float g = gate && to[i] >= 0 ? gate[(size_t)to[i] * gs + column]
                                           : 0.f;
        gated[i] = gate ? 1.f / (1.f + expf(-g)) : 1.f;
    }
    for (int i = threadIdx.x; i < BN; i += THREADS)
        aids[i] = W::aid(unit ? unit[(size_t)e * n4 + min(n0 + i, n4 - 1)] : 1.f);
}

// A tile that is not full is cut to as many STEPs of rows as it has.
#define CUT4(m) CUT(m) CUT(m + 1) CUT(m + 2) CUT(m + 3)
#define CUTS CUT4(1) CUT4(5) CUT4(9) CUT4(13) CUT4(17) CUT4(21)
