#pragma once
// A row's weights in bins, heaviest first: which bin holds the k-th weight, and in which one does
// the running sum reach a goal?
#include "lib/sample.cuh"

// A bin: how many weights in the upper 24 bits, the sum of their LOW bits in the lower 40.
__device__ __forceinline__ u64 bin_units(u64 b, int bin) {
    const unsigned w = bin_start(bin);
    return units(
            (u64)(unsigned)(b >> 40) * mantissa(w) + (b & 0xFFFFFFFFFFull),
            w >> 23);
}
// BINS / 256 neighbouring ones a thread, and what lies in bins heavier than this thread's
struct Bins {
    unsigned count[BINS];
    u64 units[BINS];
};
struct Before {
    u64 n, m, all_n, total;
};
__device__ __forceinline__ Before read_bins(Bins& s, const u64* bins) {
    #pragma unroll
    for (int i = 0; i < BINS / 256; i++) {
        const int bin = i * 256 + threadIdx.x;
        const u64 v = __ldcg(bins + bin);
        s.count[bin] = (unsigned)(v >> 40);
        s.units[bin] = bin_units(v, bin);
    }
    __syncthreads();
    Before r{0, 0, 0, 0};
    #pragma unroll
    for (int i = 0; i < BINS / 256; i++) {
        r.n += s.count[threadIdx.x * (BINS / 256) + i];
        r.m += s.units[threadIdx.x * (BINS / 256) + i];
    }
    sums_before(r.n, r.m, r.all_n, r.total);
    return r;
}
// a bin, what lies in heavier ones (how many, their sum), and the same with its own
struct Found {
    int bin;
    u64 n, m, end_n, end;
};

// The heaviest bin with which the number (or the sum) reaches `want`, from 1 to what there is.
__device__ __forceinline__ Found find_bin(
        const Bins& s, const Before& b, bool by_sum, u64 want) {
    __shared__ Found f;
    u64 n = b.n, m = b.m;
    #pragma unroll
    for (int i = 0; i < BINS / 256; i++) {
        const int bin = threadIdx.x * (BINS / 256) + i;
        const u64 cn = n + s.count[bin];
        const u64 end = m + s.units[bin];
        if (by_sum ? m < want && want <= end : n < want && want <= cn)
            f = Found{bin, n, m, cn, end};
        n = cn;
        m = end;
    }
    __syncthreads();
    const Found r = f;
    __syncthreads();
    return r;
}
// The part p of a sum, from 1 to all of it.
__device__ __forceinline__ u64 goal_of(double p, u64 all) {
    const u64 g = (u64)ceil(p * (double)all);
    return g < 1 ? 1 : g > all ? (all ? all : 1) : g;
}
