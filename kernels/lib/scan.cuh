#pragma once
// Mamba's prefill: the state's way from tile to tile (64 positions) of a sequence. A warp owns 16
// columns of a head's state and keeps them, transposed (16 x KD), in the registers that a product
// leaves its sums in, which are also the registers that the next product takes its left operand
// from. So warps never talk to each other; what they read (prepared by mamba_prep) comes through a
// ring in shared memory.
//   O = G (Q S) + P U,   S = G[63] S + K' (E U)
// Fragments (lib/limbs.cuh) of a tile: q [KD/16][8]: column tiles of 8 rows of the tile; p [4][8];
// k [4][KD/8]: column tiles of 8 of KD. u: [16 columns][8], sums.
#include "lib/limbs.cuh"
#include "lib/async.cuh"

// stages of the ring; 16 fragments a stage, in units of 16 bytes
constexpr int TILE = 64;
constexpr int RING = 11;
constexpr int STAGE = 16 * 32;

template <int KD, int NW> struct Scan {
    static constexpr int KS = KD / 16;
    static constexpr int NT = KD / 8;
    static constexpr int THREADS = 32 * NW;
    static constexpr int SA = (KS + 1) / 2;
    static constexpr int SU = (NW * 8 + 15) / 16;
    static constexpr int SP = 2;
    static constexpr int SK = (4 * NT + 15) / 16;
    static constexpr int STAGES = SA + SU + SP + SK;
    static_assert(
            SU == 1 && (KD & (KD - 1)) == 0 && KD >= 16,
            "one or two warps, and stages that divide evenly");
    // of this head (or its key head) in tile 0 of the step
    const uint4 *q, *u, *p, *k;
    const float* scal;  // G[64] | E[64]
    // from a tile to the next: heads, key heads in a tile, and u's fragments
    int step, key_step, u_step;
    uint4 *ring, *slot;  // of the ring: its begin, and what is read next
    float (*factors)[2 * TILE];  // of four tiles
    int end;  // tiles

    template <int N>
    __device__ __forceinline__ void copy(uint4* to, const uint4* from) {
        #pragma unroll
        for (int i = 0; i < N; i += THREADS)
            cp_async16(to + threadIdx.x + i, from + threadIdx.x + i);
    }
    // Stage `s` of tile `t`; where `s` is known to the compiler, little remains of this
    __device__ __forceinline__ void fetch(uint4* to, int t, int s) {
        if (t < end) {
            // fragments of a step are counted in 32 bits
            const unsigned mine = t * step;
            const unsigned key = t * key_step;
            if (s == 0 && threadIdx.x < 32)
                cp_async16(
                        factors[t % 4] + threadIdx.x * 4,
                        scal + mine * 2 * TILE + threadIdx.x * 4);
            if (s < SA) {
                if (2 * s + 1 < KS)
                    copy<512>(to, q + (key * KS + 2 * s) * 256);
                else
                    copy<256>(to, q + (key * KS + 2 * s) * 256);
            } else if (s < SA + SU)
                copy<NW * 256>(to, u + (unsigned)(t * u_step) * 256);
            else if (s < SA + SU + SP)
                copy<STAGE>(to, p + mine * 1024 + (s - SA - SU) * STAGE);
            else
                copy < NT<4 ? 4 * NT * 32 : STAGE>(
                        to, k + key * 4 * NT * 32 + (s - SA - SU - SP) * STAGE);
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void start(int first, int last) {
        end = last;
        slot = ring;
        #pragma unroll 1
        for (int i = 0; i < RING - 1; i++)
            fetch(ring + i * STAGE, first + i / STAGES, i % STAGES);
    }
    // Stage `s` of tile `t`, which is the next; what was read before may be overwritten from now
    // on.
    __device__ __forceinline__ const uint4* next(int t, int s) {
        cp_async_wait<RING - 2>();
        __syncthreads();
        const uint4* r = slot;
        fetch(slot == ring ? ring + (RING - 1) * STAGE : slot - STAGE,
                t + (s + RING - 1) / STAGES, (s + RING - 1) % STAGES);
        slot = slot == ring + (RING - 1) * STAGE ? ring : slot + STAGE;
        return r;
    }
    // Products of eight column tiles with the fragments at b
    static __device__ __forceinline__ void eight(
            float (*c)[4], const Limbs& a, const uint4* b, int from = 0) {
        uint4 f[8];
        #pragma unroll
        for (int n = 0; n < 8; n++)
            if (n >= from)
                f[n] = b[n * 32];
        mma_limbs<8>(c, a, f, from);
    }
    // o: what the states answer to the tile's queries, [16 columns][64 rows]
    __device__ __forceinline__ void ask(
            int t, int lane, float (*S)[4], float (*o)[4]) {
        const uint4* st;
        #pragma unroll
        for (int i = 0; i < 8; i++)
            o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0.f;
        #pragma unroll
        for (int s = 0; s < KS; s++) {
            Limbs a;
            a.of_sums(S[2 * s], S[2 * s + 1]);
            if (s % 2 == 0)
                st = next(t, s / 2);
            eight(o, a, st + (s % 2 ? 256 : 0) + lane);
        }
    }
    // What the tile's rows leave the states, n, joins them
    __device__ __forceinline__ void learn(
            int t, int lane, float (*n)[4], float (*S)[4]) {
        const uint4* st;
        #pragma unroll
        for (int s = 0; s < 4; s++) {
            Limbs a;
            a.of_sums(n[2 * s], n[2 * s + 1]);
            #pragma unroll
            for (int b = 0; b < NT; b += NT < 8 ? NT : 8) {
                const int f = s * NT + b;
                if (f % 16 == 0)
                    st = next(t, SA + SU + SP + f / 16);
                if constexpr (NT < 8) {
                    uint4 r[NT];
                    #pragma unroll
                    for (int i = 0; i < NT; i++)
                        r[i] = st[(f % 16 + i) * 32 + lane];
                    mma_limbs<NT>(S, a, r);
                } else
                    eight(S + b, a, st + f % 16 * 32 + lane);
            }
        }
    }
    // S through tile `t`; o gets what it answered, [16 columns][64 rows], and `skip` times u is
    // added to it
    __device__ __forceinline__ void tile_step(
            int t, float (*S)[4], float (*o)[4], float skip) {
        const int lane = threadIdx.x % 32;
        const int warp = threadIdx.x / 32;
        const int c2 = lane % 4 * 2;
        float n[8][4];
        const uint4* st;
        ask(t, lane, S, o);
        st = next(t, SA);
        const float *G = factors[t % 4], *E = G + TILE;
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            const float4 u = *(const float4*)(st + (warp * 8 + i) * 32 + lane);
            const float g0 = G[8 * i + c2];
            const float g1 = G[8 * i + c2 + 1];
            #pragma unroll
            for (int j = 0; j < 4; j++) {
                const float v = (&u.x)[j];
                n[i][j] = v;
                o[i][j] = o[i][j] * (j % 2 ? g1 : g0) + skip * v;
            }
        }
        #pragma unroll
        for (int s = 0; s < 4;
                s++) {  // rows 16s.. are seen by themselves and later ones
            Limbs a;
            a.of_sums(n[2 * s], n[2 * s + 1]);
            if (s % 2 == 0)
                st = next(t, SA + SU + s / 2);
            eight(o, a, st + s % 2 * 256 + lane, 2 * s);
        }
        const float last = G[TILE - 1];
        #pragma unroll
        for (int i = 0; i < NT; i++)
            #pragma unroll
            for (int j = 0; j < 4; j++)
                S[i][j] *= last;
        #pragma unroll
        for (int i = 0; i < 8; i++)
            #pragma unroll
            for (int j = 0; j < 4; j++)
                n[i][j] *= E[8 * i + c2 + j % 2];
        learn(t, lane, n, S);
    }
};

// What a tile's real rows were answered.
template <int NV>
__device__ __forceinline__ void answered(
        float* y, float (*o)[4], int t, int lo, int hi, int heads, int head,
        int col, int lane) {
    #pragma unroll
    for (int i = 0; i < 8; i++)
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            const int row = 8 * i + lane % 4 * 2 + j % 2;
            if (row >= lo && row < hi)
                y[((size_t)t * TILE + row) * heads * NV + head * NV + col
                        + lane / 4 + j / 2 * 8] = o[i][j];
        }
}

// The states' way of all of a step's sequences, a block to NW*16 columns of a head of one of them.
// States are [NV][KD], PER numbers each; `skip` times u is added to what they answer. Arrays as
// mamba_many.cu has them; a step has `tiles`, a tile `keys` of q and k and `heads` of the others.
template <int KD, int NV, int NW, int PER>
__device__ __forceinline__ void scan_states(
        uint4* room, const unsigned* q, const unsigned* k, const float* u,
        const unsigned* p, const float* scal, const float* skip, float* rec,
        const int* first, const int* starts, const int* state_in,
        const int* state_out, const int* tile_seq, const int* tile_lo,
        const int* tile_hi, float* y, int tiles, int keys, int heads) {
    constexpr int PARTS = NV / 16 / NW, NT = KD / 8;
    const int lane = threadIdx.x % 32;
    const int head = blockIdx.x / PARTS;
    const int s = blockIdx.y;
    const int part = blockIdx.x % PARTS * NW;
    const int col = (part + threadIdx.x / 32) * 16;
    const int key = head / (heads / keys);
    const int f = first[s] / TILE;
    int end = f;
    while (end < tiles && tile_seq[end] == s)
        end++;
    Scan<KD, NW> scan;
    scan.q = (const uint4*)q + (size_t)key * KD * 16;
    scan.k = (const uint4*)k + (size_t)key * KD * 16;
    scan.u = (const uint4*)u + ((size_t)head * (NV / 16) + part) * 256;
    scan.p = (const uint4*)p + (size_t)head * 1024;
    scan.scal = scal + (size_t)head * 2 * TILE;
    scan.step = heads;
    scan.key_step = keys;
    scan.u_step = heads * (NV / 16);
    scan.ring = room;
    scan.factors = (float (*)[2 * TILE])(room + RING * STAGE);
    scan.start(f, end);
    const auto state = [&](int n) {  // this warp's columns of state n
        return rec + ((size_t)(n / PER) * heads + head) * KD * NV + col * KD;
    };
    const auto at = [&](int i, int j) {  // sum j of product i in them
        const int c = lane / 4 + j / 2 * 8;
        const int r = i * 8 + lane % 4 * 2 + j % 2;
        return (size_t)c * KD + r;
    };
    float S[NT][4] = {};
    const float D = skip[head];
    if (starts[s]) {
        const float* from = state(state_in[s]);
        #pragma unroll
        for (int i = 0; i < NT; i++)
            #pragma unroll
            for (int j = 0; j < 4; j++)
                S[i][j] = from[at(i, j)];
    }
    #pragma unroll 1
    for (int t = f; t < end; t++) {
        float o[8][4];
        scan.tile_step(t, S, o, D);
        const int lo = tile_lo[t];
        const int hi = tile_hi[t];
        const int keep = state_out[t * TILE + hi - 1];
        answered<NV>(y, o, t, lo, hi, heads, head, col, lane);
        if (keep >= 0) {
            float* to = state(keep);
            #pragma unroll
            for (int i = 0; i < NT; i++)
                #pragma unroll
                for (int j = 0; j < 4; j++)
                    to[at(i, j)] = S[i][j];
        }
    }
}
