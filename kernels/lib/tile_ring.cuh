#pragma once
// Products of gemm.cu by blocks that stay: a block goes from tile to tile, and while it writes the
// results of one, columns of the next are on their way. A warp fetches rows of x, 64 columns after 64,
// into a ring of stages; blocks of a team have the same rows and other rows of W, and share what is
// fetched (lib/boxes.cuh). A group of four warps has 64 rows of W, which it fetches for itself
// (lib/feed.cuh), so groups wait for each other only where the ring ends.
#include "lib/boxes.cuh"
#include "lib/team.cuh"
#include "lib/tile_groups.cuh"
#if RING
static_assert(PARTS == 1 && FRAGMENTS == 1 && BK == 64 && !GROUPED, "see the contract");
constexpr int OWN_ROWS = BM / TEAM, XSTAGE = BM * 128;

__device__ __forceinline__ void group_sync() {
#if defined(__CUDA_ARCH__)
    asm volatile("bar.sync %0, 128;" :: "r"(1 + threadIdx.x / 128) : "memory");
#else
    emu::barrier(1 + threadIdx.x / 128, 128);
#endif
}
// A stage of the ring, and the parity of the phase that is awaited there.
struct Place {
    int stage = 0;
    unsigned parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage < RING) return;
        stage = 0;
        parity ^= 1;
    }
};
// The tiles of a block: all rows of W after each other, then the next rows of x.
struct Tiles {
    int at, across, many;  // across: teams' tiles side by side
    __device__ __forceinline__ Tiles(int n, int rows) {
        across = (n + BN * TEAM - 1) / (BN * TEAM);
        many = across * ((rows + BM - 1) / BM);
        at = blockIdx.x / TEAM;
    }
    __device__ __forceinline__ bool over() const { return at >= many; }
    __device__ __forceinline__ void next() { at += gridDim.x / TEAM; }
    __device__ __forceinline__ int row() const { return at / across * BM; }
    __device__ __forceinline__ int n0() const {
        return (at % across * TEAM + blockIdx.x % TEAM) * BN;
    }
};
// What all of a block know.
struct Shared {
    unsigned char* ring;
    Meeting *full, *empty;
};

__device__ __forceinline__ void fetch_rows(
        const Shared& all, Tiles t, int steps, const TensorMap& map) {
    const int member = blockIdx.x % TEAM;
    Place at;
    for (; !t.over(); t.next())
        for (int i = 0; i < steps; i++) {
            meet_wait(all.empty + at.stage, at.parity ^ 1);
            bulk_expect(all.full + at.stage, XSTAGE);
            unsigned char* const to = all.ring + at.stage * XSTAGE + member * (OWN_ROWS * 128);
            box_copy<TEAM>(to, map, t.row() + member * OWN_ROWS, i, 0, all.full + at.stage);
            at.next();
        }
}
// What a group needs of W, step after step and tile after tile.
struct RingFeed {
    const Job& j;
    Tiles t;
    WeightFeed<128, BS> weights;
    int step = 0;
    __device__ __forceinline__ RingFeed(const Job& job, const Tiles& tiles)
            : j(job), t(tiles), weights(job, threadIdx.x % 128) {
        begin();
    }
    __device__ __forceinline__ void begin() { weights.begin(t.n0() + threadIdx.x / 128 * 64); }
    __device__ __forceinline__ void operator()(unsigned char* stage) {
        weights(stage, !t.over());
        cp_async_commit();
        if (++step < j.steps) return;
        step = 0;
        t.next();
        begin();
    }
};

// What a group must know to write the results of a tile; of the next one as well.
struct About {
    int* to;
    float *by, *gated, *aids;
    static constexpr int BYTES = (3 * BM + 64) * 4;
    __device__ __forceinline__ About(unsigned char* at) {
        to = (int*)at;
        by = (float*)(to + BM);
        gated = by + BM;
        aids = gated + BM;
    }
};

// A group's part of all tiles. `learn(about, row, first row of W)` finds what results need, and `put(about,
// first row of W, this warp's, 64 x BM results)` writes them.
template <class F, class G> __device__ __forceinline__ void multiply_all(
        const Shared& all, Tiles t, const Job& j, unsigned char* stages, unsigned char* abouts,
        F learn, G put) {
    constexpr int V = BM / 2, LAST = (STAGES - 1) * STAGE;
    const int own = threadIdx.x / 32 % 4 * 16, group = threadIdx.x / 128;
    RingFeed feed(j, t);
    #pragma unroll
    for (int i = 0; i < STAGES - 1; i++) feed(stages + i * STAGE);
    learn(About(abouts), t.row(), t.n0() + group * 64);
    cp_async_wait<STAGES - 2>();
    group_sync();
    unsigned a[2][1][UNIT][PRODUCTS][4];
    Weights w(own);
    w.fetch(stages, 0);
    w.decode(About(abouts).aids + own, a[0]);
    w.fetch(stages, 1);
    const WgmmaMatrix first = wgmma_kept(wgmma_rows(all.ring, 1024));
    int stage = 0, done = LAST;  // where stages begin: that of this step, and of the one before
    int mine = 0;                // where what is known of this tile lies
    Place at;
    const auto release = [&](int x) {
        if (threadIdx.x % 32 < TEAM) meet_arrive_of<TEAM>(all.empty + x, threadIdx.x % 32);
    };
    #pragma unroll 1
    while (!t.over()) {
        Tiles after = t;
        after.next();
        float d[1][V];
        #pragma unroll
        for (int v = 0; v < V; v++) d[0][v] = 0.f;
        int held = -1;  // stage of x that the step before has read
        #pragma unroll 1
        for (int i = 0; i < j.steps; i++) {
            const int ahead = stage == LAST ? 0 : stage + STAGE;
            const bool last = i == j.steps - 1;
            meet_wait(all.full + at.stage, at.parity);
            const WgmmaMatrix x = first + (unsigned)(at.stage * (XSTAGE / 16));
            #pragma unroll
            for (int u = 0; u < UNITS; u++) {
                multiply<BM>(d, a[u % 2], x, u);
                wgmma_wait<1>();
                if (u == 0) {
                    if (held >= 0) release(held);
                    cp_async_wait<STAGES - 3>();
                    group_sync();
                    feed(stages + done);
                    // the results of the tile before are written, and soon all of the group meet again
                    if (i == 1 && !after.over())
                        learn(About(abouts + (mine ^ About::BYTES)), after.row(), after.n0() + group * 64);
                }
                const About about(abouts + (last && u == UNITS - 1 ? mine ^ About::BYTES : mine));
                w.decode(about.aids + own, a[(u + 1) % 2]);
                w.fetch(stages + (u >= UNITS - 2 ? ahead : stage), (u + 2) % UNITS);
            }
            held = at.stage;
            at.next();
            done = stage;
            stage = ahead;
        }
        wgmma_wait<0>();
        wgmma_own(d[0]);
        release(held);
        put(About(abouts + mine), t.n0() + group * 64, own, d[0]);
        mine ^= About::BYTES;
        t = after;
    }
}
#endif
