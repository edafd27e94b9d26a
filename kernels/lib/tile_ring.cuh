#pragma once
// Products of gemm.cu by blocks that stay: a block goes from tile to tile, and while it writes the
// results of one, columns of the next are on their way. Four warps fetch rows of x, 64 columns after
// 64, into a ring of stages: rows that lie together as one box (lib/boxes.cuh), others piece by
// piece. A group of four warps has rows of W, which it fetches for itself (lib/feed.cuh), so
// groups wait for each other only where the ring ends.
#include "lib/boxes.cuh"
#include "lib/tile_groups.cuh"
#if RING
static_assert(PARTS == 1 && BK == 64, "see the contract");
constexpr int XSTAGE = BM * 128;  // bytes of 64 columns of rows of x
constexpr int HANDS = 128;        // threads that fetch

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
// The tiles of a block: of rows of x all rows of W after each other, then the next rows.
struct Tiles {
    const int* list;  // GROUPED: expert, first place, end
    int many, across, n4, at, expert, row, end;
    __device__ __forceinline__ Tiles(const int* list, int slots, int n, int rows)
            : list(list), n4((n + 3) / 4 * 4), expert(0), end(rows) {
        across = (n + BN - 1) / BN;
        many = across * (GROUPED ? slots : (rows + BM - 1) / BM);
        at = (int)blockIdx.x - (int)gridDim.x;
        next();
    }
    __device__ __forceinline__ bool over() const { return at >= many; }
    __device__ __forceinline__ void next() {
        do {
            at += gridDim.x;
            if (over()) return;
            row = at / across * BM;
            if (!GROUPED) return;
            // an expert that all share is last, and long
            const int* const slot = list + ((many - 1 - at) / across) * 3;
            expert = slot[0];
            row = slot[1];
            end = slot[2];
        } while (expert < 0);
    }
    __device__ __forceinline__ int n0() const {  // of the group
        const int turn = GROUPED ? (many - 1 - at) % across : at % across;
        return turn * BN + threadIdx.x / 128 * BS;
    }
    __device__ __forceinline__ int height() const { return min((end - row + 7) / 8, BM / 8); }
};
// What all of a block know.
struct Shared {
    unsigned char* ring;
    Meeting *full, *empty;
};

// Rows of x into the ring, by those who fetch; `source` of a row of the tile is its row of x.
template <class F> __device__ __forceinline__ void fetch_rows(
        const Shared& all, Tiles t, const Job& j, const TensorMap& map, F source) {
    Place at;
    const unsigned row = threadIdx.x % HANDS / 8, piece = threadIdx.x % 8;
    const unsigned to = wgmma_piece(row, piece);
    for (; !t.over(); t.next()) {
        unsigned from[BM / 16];
        #pragma unroll
        for (int r = 0; r < (GROUPED ? BM / 16 : 0); r++)
            from[r] = (unsigned)source(t, row + r * 16) * j.line + piece;
        const unsigned char* x = j.x;
        for (int i = 0; i < j.steps; i++) {
            unsigned char* const stage = all.ring + at.stage * XSTAGE;
            meet_wait(all.empty + at.stage, at.parity ^ 1);
            if (!GROUPED && threadIdx.x % HANDS == 0) {
                bulk_expect(all.full + at.stage, XSTAGE);
                box_copy<1>(stage, map, t.row, i, 0, all.full + at.stage);
            }
            #pragma unroll
            for (int r = 0; r < (GROUPED ? BM / 16 : 0); r++)
                cp_async_if<16>(stage + to + r * 2048, x + (size_t)from[r] * 16,
                    (int)row + r * 16 < 8 * t.height());
            if (GROUPED) meet_arrive_copied(all.full + at.stage);
            x += 128;
            at.next();
        }
    }
}
// What a group needs of W, step after step and tile after tile.
struct RingFeed {
    Job& j;
    Tiles t;
    WeightFeed<128, BS> weights;
    int step = 0;
    __device__ __forceinline__ RingFeed(Job& job, const Tiles& tiles)
            : j(job), t(tiles), weights(job, threadIdx.x % 128) {
        begin();
    }
    __device__ __forceinline__ void begin() {
        if (t.over()) return;
        j.last = (unsigned)(t.expert * t.n4 + t.n4 - 1);
        weights.begin(t.expert * t.n4 + t.n0());
    }
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
    static constexpr int BYTES = (3 * BM + BS) * 4;
    __device__ __forceinline__ About(unsigned char* at) {
        to = (int*)at;
        by = (float*)(to + BM);
        gated = by + BM;
        aids = gated + BM;
    }
};

// A group's part of a block. `learn(about, tile)` finds what results need, `put(about, tile, a warp's first
// row, results)` writes them.
template <class F, class G> struct Group {
    const Shared& all;
    const F& learn;
    const G& put;
    Tiles t;
    RingFeed feed;
    unsigned char *stages, *abouts;
    int own;                               // a warp's first row
    unsigned a[2][FRAGMENTS][PRODUCTS][4];
    Weights w;
    WgmmaMatrix first;
    static constexpr int LAST = (STAGES - 1) * STAGE;
    int stage = 0, done = LAST;            // where stages begin: that of this step, and of the one before
    int mine = 0;                          // what is known of this tile
    Place at;

    __device__ __forceinline__ Group(const Shared& all, const Tiles& tiles, Job& j,
            unsigned char* stages, unsigned char* abouts, const F& learn, const G& put)
            : all(all), learn(learn), put(put), t(tiles), feed(j, tiles), stages(stages), abouts(abouts),
              own(threadIdx.x / 32 % 4 * 16), w(own) {
        #pragma unroll
        for (int i = 0; i < STAGES - 1; i++) feed(stages + i * STAGE);
        if (!t.over()) learn(About(abouts), t);
        cp_async_wait<STAGES - 2>();
        group_sync();
        w.fetch(stages, 0);
        w.decode(About(abouts).aids + own, a[0]);
        w.fetch(stages, 1);
        first = wgmma_kept(wgmma_rows(all.ring, 1024));
    }
    __device__ __forceinline__ void release(int x) {
        if (threadIdx.x % 32 == 0) meet_arrive(all.empty + x);
    }
    template <int M> __device__ __forceinline__ void tile(const Tiles& after) {
        constexpr int N = 8 * M, V = N / 2;
        float d[FRAGMENTS][V];
        #pragma unroll
        for (int v = 0; v < FRAGMENTS * V; v++) d[v / V][v % V] = 0.f;
        int held = -1;  // stage of x that the step before has read
        #pragma unroll 1
        for (int i = 0; i < feed.j.steps; i++) {
            const int ahead = stage == LAST ? 0 : stage + STAGE;
            const bool last = i == feed.j.steps - 1;
            meet_wait(all.full + at.stage, at.parity);
            if (GROUPED) wgmma_seen();
            const WgmmaMatrix x = first + (unsigned)(at.stage * (XSTAGE / 16));
            #pragma unroll
            for (int c = 0; c < CH; c++) {
                multiply<N>(d, a[c % 2], x, c);
                wgmma_wait<1>();
                if (c == 0) {
                    if (held >= 0) release(held);
                    cp_async_wait<STAGES - 3>();
                    group_sync();
                    feed(stages + done);
                    // the results of the tile before are written, and soon all of the group meet again
                    if (i == 1 && !after.over()) learn(About(abouts + (mine ^ About::BYTES)), after);
                }
                const About about(abouts + (last && c == CH - 1 ? mine ^ About::BYTES : mine));
                w.decode(about.aids + own, a[(c + 1) % 2]);
                w.fetch(stages + (c >= CH - 2 ? ahead : stage), (c + 2) % CH);
            }
            held = at.stage;
            at.next();
            done = stage;
            stage = ahead;
        }
        wgmma_wait<0>();
        #pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) wgmma_own(d[f]);
        release(held);
        #pragma unroll
        for (int f = 0; f < FRAGMENTS; f++) put(About(abouts + mine), t, f * 64 + own, d[f]);
        mine ^= About::BYTES;
    }
};
#endif
