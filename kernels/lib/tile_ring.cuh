#pragma once
// Products of gemm.cu by blocks that stay: a block goes from tile to tile, and while it writes the
// results of one, columns of the next are on their way. One thread fetches rows of x, 64 columns of
// them at a time, into a ring of stages (lib/boxes.cuh). A group of four warps has rows of W, which
// it fetches for itself (lib/feed.cuh), so groups wait for each other only where the ring ends.
#include "lib/boxes.cuh"
#include "lib/tile_groups.cuh"
#if RING
static_assert(
        PARTS == 1 && FRAGMENTS == 1 && BK == 64 && !GROUPED, "see the contract");
constexpr int XSTAGE = BM * 128;  // bytes of 64 columns of rows of x

__device__ __forceinline__ void group_sync() {
#if defined(__CUDA_ARCH__)
    asm volatile("bar.sync %0, 128;" ::"r"(1 + threadIdx.x / 128) : "memory");
#else
    emu::barrier(1 + threadIdx.x / 128, 128);
#endif
}
using Place = RingPlace<RING>;
// The tiles of a block: of rows of x all rows of W after each other, then the next rows.
struct Tiles {
    int at, across, many;
    __device__ __forceinline__ Tiles(int n, int rows) : at(blockIdx.x) {
        across = (n + BN - 1) / BN;
        many = across * ((rows + BM - 1) / BM);
    }
    __device__ __forceinline__ bool over() const { return at >= many; }
    __device__ __forceinline__ void next() { at += gridDim.x; }
    __device__ __forceinline__ int row() const { return at / across * BM; }
    __device__ __forceinline__ int n0() const {  // of the group
        return at % across * BN + threadIdx.x / 128 * BS;
    }
};
// What all of a block know.
struct Shared {
    unsigned char* ring;
    Meeting *full, *empty;
};

// Rows of x into the ring, by one thread.
__device__ __forceinline__ void fetch_rows(
        const Shared& all, Tiles t, int steps, const TensorMap& map) {
    Place at;
    for (; !t.over(); t.next())
        for (int i = 0; i < steps; i++) {
            meet_wait(all.empty + at.stage, at.parity ^ 1);
            bulk_expect(all.full + at.stage, XSTAGE);
            box_copy<1>(
                    all.ring + at.stage * XSTAGE, map, t.row(), i, 0,
                    all.full + at.stage);
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
        weights.begin(t.n0());
    }
    __device__ __forceinline__ void operator()(unsigned char* stage) {
        weights(stage, !t.over());
        cp_async_commit();
        if (++step < j.steps)
            return;
        step = 0;
        t.next();
        weights.begin(t.n0());
    }
};

// What a group must know to write the results of a tile; of the next one as well.
struct About {
    int* to;
    float *by, *gated, *aids;
    static constexpr int BYTES = (3 * BM + BS) * 4;
    __device__ __forceinline__ About(unsigned char* at) {
        to = (int*)at;
        by = (float*)(to + BM);
        gated = by + BM;
        aids = gated + BM;
    }
};

// A group's part of a block. `learn(about, tile)` finds what results need, `put(about, tile, a
// warp's first row, results)` writes them.
template <class F, class G> struct Group {
    const Shared& all;
    const F& learn;
    const G& put;
    Tiles t;
    RingFeed feed;
    unsigned char *stages, *abouts;
    int own;                               // a warp's first row
    unsigned a[2][1][PRODUCTS][4];
    Weights w;
    WgmmaMatrix first;
    static constexpr int LAST = (STAGES - 1) * STAGE;
    // where stages begin: that of this step, and of the one before
    int stage = 0, done = LAST;
    int mine = 0;                          // what is known of this tile
    Place at;

    __device__ __forceinline__ Group(
            const Shared& all, const Tiles& tiles, const Job& j,
            unsigned char* stages, unsigned char* abouts, const F& learn,
            const G& put)
        : all(all),
          learn(learn),
          put(put),
          t(tiles),
          feed(j, tiles),
          stages(stages),
          abouts(abouts),
          own(threadIdx.x / 32 % 4 * 16),
          w(own) {
        #pragma unroll
        for (int i = 0; i < STAGES - 1; i++)
            feed(stages + i * STAGE);
        if (!t.over())
            learn(About(abouts), t);
        cp_async_wait<STAGES - 2>();
        group_sync();
        w.fetch(stages, 0);
        w.decode(About(abouts).aids + own, a[0]);
        w.fetch(stages, 1);
        first = wgmma_kept(wgmma_rows(all.ring, 1024));
    }
    __device__ __forceinline__ void release(int x) {
        if (threadIdx.x % 32 == 0)
            meet_arrive(all.empty + x);
    }
    __device__ __forceinline__ void tile(const Tiles& after) {
        constexpr int V = BM / 2;
        float d[1][V];
        #pragma unroll
        for (int v = 0; v < V; v++)
            d[0][v] = 0.f;
        int held = -1;  // stage of x that the step before has read
        #pragma unroll 1
        for (int i = 0; i < feed.j.steps; i++) {
            const int ahead = stage == LAST ? 0 : stage + STAGE;
            const bool last = i == feed.j.steps - 1;
            meet_wait(all.full + at.stage, at.parity);
            const WgmmaMatrix x = first + (unsigned)(at.stage * (XSTAGE / 16));
            #pragma unroll
            for (int c = 0; c < CH; c++) {
                multiply<BM>(d, a[c % 2], x, c);
                wgmma_wait<1>();
                if (c == 0) {
                    if (held >= 0)
                        release(held);
                    cp_async_wait<STAGES - 3>();
                    group_sync();
                    feed(stages + done);
                    // the results of the tile before are written, and soon all of the group meet
                    // again
                    if (i == 1 && !after.over())
                        learn(About(abouts + (mine ^ About::BYTES)), after);
                }
                const About about(
                        abouts
                        + (last && c == CH - 1 ? mine ^ About::BYTES : mine));
                w.decode(about.aids + own, a[(c + 1) % 2]);
                w.fetch(stages + (c >= CH - 2 ? ahead : stage), (c + 2) % CH);
            }
            held = at.stage;
            at.next();
            done = stage;
            stage = ahead;
        }
        wgmma_wait<0>();
        wgmma_own(d[0]);
        release(held);
        put(About(abouts + mine), t, own, d[0]);
        mine ^= About::BYTES;
        t = after;
    }
};
#endif
