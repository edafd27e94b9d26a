// A gated delta net's prefill, before the state: for each tile of 64 positions and each head, what
// delta_many.cu needs of it (Yang et al. 2024, 2025). The convolution over time of queries and
// keys, whose lengths become one; decays; then T = (I + A)^-1 with A = beta D k k' below the
// diagonal, and P = D q k'. A block serves the value heads of one key head, two at a time. All
// products have float32 accuracy (lib/limbs.cuh). The tails of the convolution that belong to q and
// k are kept here.
//   x        : [r, width]             f32   q | k | v | z | b | a, width = 2*kh*DK + 2*vh*DV + 2*vh
//   conv_w   : [c, 4]                 f32   c = 2*kh*DK + vh*DV
//   decay    : [vh]                   f32   A = -exp(A_log)
//   dt_bias  : [vh]                   f32
//   conv     : [states, 3, c]         f32   inputs before a sequence's first row, oldest first;
//                                           written at state_out
//   first    : [seqs1]                i32   a row in the first tile of each sequence
//   starts   : [seqs]                 i32   position of a sequence's first row
//   state_in : [seqs]                 i32   tail to begin from (unread at position 0)
//   state_out : [r]                   i32   tail after a row, or -1; looked at for the last row of
//                                           each tile
//   tile_seq, tile_lo, tile_hi : [tiles] i32   sequence of a tile (-1: none), its real rows
//                                              lo..hi-1
//   q, k     : [tiles, kh, qf]        u32   written, as are all below: limbs, as Mixed<DK> has them
//                                           (lib/chunk.cuh), qf = 64*DK
//   t, p     : [tiles, vh, 2560]      u32   fragments (lib/limbs.cuh) on and below the diagonal
//   scal     : [tiles, vh, 192]       f32   decay from the tile's begin, decay to its end, beta
//   -D DK=  32, 64 or 128
//   launch: <<<(tiles, kh), 256, max(512*DK, 36864) + 1536>>>
#include "lib/chunk.cuh"
#ifndef DK
#define DK 128
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ > 900
#define BLOCKS 1  // so much is 99 KB of shared memory
#else
#define BLOCKS 2
#endif
// floats of a row of A, so that fragments cost no bank conflicts
constexpr int AS = 72;
constexpr int HALF = 128;  // threads that invert a matrix
constexpr int ROOM = 512 * DK > 36864 ? 512 * DK : 36864;
typedef Operand<Mixed<DK>> Mat;
typedef float Square[TILE][AS];

// Keys and queries of a tile as they come in, a channel to a thread. They wait for the convolution
// where they lie: all 64 rows are on their way at once.
struct Inputs {
    unsigned char* rows;
    // channel of the first key; from a key's to its query's
    int first, apart;
    __device__ __forceinline__ int channel(int e) const {
        return first + (e < DK ? e : e - DK - apart);
    }
    __device__ __forceinline__ float* at(int e) const {
        return (float*)(rows + e / DK * 256 * DK) + e % DK;
    }
    template <int N> __device__ __forceinline__ void fetch(const Rows& r) const {
        constexpr int PER = 2 * DK * 4 / N;
        #pragma unroll 4
        for (int i = threadIdx.x; i < TILE * PER; i += 256) {
            const int j = i / PER, e = i % PER * (N / 4);
            const float* from = r.from(j, channel(e), channel(e));
            cp_async_or_zero<N>(
                    at(e) + j * DK, from ? from : r.x, from != nullptr);
        }
        cp_async_commit();
    }
    __device__ __forceinline__ void convolve(
            const Rows& r, const float* conv_w, int e, bool on) const {
        const int ch = channel(e);
        const float4 w = ((const float4*)conv_w)[ch];
        float* const own = at(e);
        float a = r.in(-3, ch, ch);
        float b = r.in(-2, ch, ch);
        float c = r.in(-1, ch, ch);
        cp_async_wait<0>();
        __syncthreads();
        if (!on)
            return;
        r.keep_tail(ch, ch);
        const bool all = r.inner();
        #pragma unroll 8
        for (int j = 0; j < TILE; j++) {
            const float d = own[j * DK];
            const float y = fmaf(d, w.w, fmaf(c, w.z, fmaf(b, w.y, a * w.x)));
            const float v = __fdividef(y, 1.f + __expf(-y));
            own[j * DK] = all || (j >= r.lo && j < r.hi) ? v : 0.f;
            a = b;
            b = c;
            c = d;
        }
    }
};

// Rows of f32 keys, and of queries behind them, to unit length, as limbs in the same place; a warp
// to eight rows.
__device__ __forceinline__ void unit_limbs(unsigned char* rows) {
    constexpr int N = DK > 64 ? 2 : 1;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    #pragma unroll 4
    for (int i = 0; i < 16; i++) {
        const int r = warp * 8 + i % 8;
        unsigned char* const m = rows + i / 8 * 256 * DK;
        float2 v[N];
        float sum = 0.f;
        #pragma unroll
        for (int j = 0; j < N; j++) {
            v[j] = make_float2(0.f, 0.f);
            if (lane + 32 * j < DK / 2)
                v[j] = ((const float2*)(m + r * 4 * DK))[lane + 32 * j];
            sum += v[j].x * v[j].x + v[j].y * v[j].y;
        }
        const float f = rsqrtf(warp_sum(sum) + 1e-6f)
                * (i < 8 ? 1.f : rsqrtf((float)DK));
        __syncwarp();
        #pragma unroll
        for (int j = 0; j < N; j++)
            if (lane + 32 * j < DK / 2) {
                const Pair p = limbs(v[j].x * f, v[j].y * f);
                const int at = Mat::place(r, 2 * (lane + 32 * j));
                *(unsigned*)(m + at) = p.hi;
                *(unsigned*)(m + (at ^ (2 * DK))) = p.lo;
            }
        __syncwarp();
    }
}

// Two neighbouring blocks of N of the diagonal, which are inverted, become one of 2N:
// [[T, 0], [-T2 A T, T2]]. Of HALF threads, `tid` is this one.
template <int N>
__device__ __forceinline__ void join(Square& A, int tid, bool on) {
    constexpr int PER = 32 * N / HALF;
    // of the lower left block; further elements below, or in the next pair
    const int c = tid % N;
    const int r0 = tid / N;
    #pragma unroll
    for (int pass = 0; pass < 2; pass++) {  // A T, then -T2 (A T)
        float v[PER] = {};
        #pragma unroll 2
        for (int j = 0; j < N; j += 4)
            #pragma unroll
            for (int e = 0; e < PER; e++) {
                const int r = r0 + e * (HALF / N);
                const int b = e * (HALF / N) / N * 2 * N;
                const int k = b + pass * N + j;
                const float4 l = *(const float4*)&A[b + N + r % N][k];
                #pragma unroll
                for (int i = 0; i < 4; i++)
                    v[e] = fmaf((&l.x)[i], A[k + i][b + c], v[e]);
            }
        __syncthreads();
        #pragma unroll
        for (int e = 0; e < PER; e++) {
            const int r = r0 + e * (HALF / N);
            const int b = e * (HALF / N) / N * 2 * N;
            if (on)
                A[b + N + r % N][b + c] = pass ? -v[e] : v[e];
        }
        __syncthreads();
    }
}
// Inverse of I + A in place, A strictly lower triangular with zeros above: blocks of 16 by
// substitution, then pairs of blocks. All threads of the block come here; those that are not `on`
// have nothing to invert.
__device__ __forceinline__ void invert(Square& A, int tid, bool on) {
    if (tid < TILE && on) {
        const int b = tid / 16 * 16, c = tid % 16;
        float t[16];
        #pragma unroll
        for (int i = 0; i < 16; i++) {
            float s = 0.f;
            #pragma unroll
            for (int j = 0; j < i; j++)
                s = fmaf(A[b + i][b + j], t[j], s);
            t[i] = i == c ? 1.f : i < c ? 0.f : -s;
        }
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < 16; i++)
            A[b + i][b + c] = t[i];
    }
    __syncthreads();
    join<16>(A, tid, on);
    join<32>(A, tid, on);
}
// T as fragments with k = columns, n = rows, by four warps
__device__ __forceinline__ void write_t(uint4* to, const Square& T, int tid) {
    const int lane = tid % 32;
    const int g = lane / 4;
    const int q = lane % 4 * 2;
    #pragma unroll 1
    for (int i = tid / 32; i < 20; i += 4) {
        const int s = i < 8 ? 0 : i < 14 ? 1 : i < 18 ? 2 : 3;
        const int n = i - triangle(s, 0);
        const float* row = &T[8 * n + g][16 * s + q];
        const float2 a = *(const float2*)row;
        const float2 b = *(const float2*)(row + 8);
        to[i * 32 + lane] = b_fragment(limbs(a.x, a.y), limbs(b.x, b.y));
    }
}

// What gates are made of: of two rows a lane
struct Raw {
    float beta[2], decay[2];
    __device__ __forceinline__ void load(const Rows& r, int h, int vh) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int j = 2 * (threadIdx.x % 32) + i;
            const float* row = r.x + (size_t)j * r.width + r.width - 2 * vh + h;
            const bool real = j >= r.lo && j < r.hi;
            beta[i] = real ? row[0] : 0.f;
            decay[i] = real ? row[vh] : 0.f;
        }
    }
};
// Decays and rates of a head, by one warp
struct Gates {
    float hi[TILE], lo[TILE], beta[TILE];
    __device__ __forceinline__ void find(
            const Rows& r, const Raw& raw, float rate, float bias, float* scal) {
        const int lane = threadIdx.x % 32;
        float g[2], G[2];
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int j = 2 * lane + i;
            const bool real = j >= r.lo && j < r.hi;
            g[i] = real ? rate * softplus(raw.decay[i] + bias) : 0.f;
            beta[j] = scal[2 * TILE + j] = real ? 1.f / (1.f + expf(-raw.beta[i]))
                                                : 0.f;
        }
        const float one[2] = {1.f, 1.f};
        decays(g, one, hi, lo, scal, G);
    }
};

// Limbs of a tile's keys, and of its queries behind them, to where delta_many.cu finds them.
__device__ __forceinline__ void write_limbs(
        uint4* q, uint4* k, const uint4* rows) {
    for (int i = threadIdx.x; i < DK * 16; i += 256) {
        k[i] = rows[i];
        q[i] = rows[DK * 16 + i];
    }
}

// Of a head: A = beta D k k' below the diagonal, and P = D q k' as fragments.
__device__ __forceinline__ void weigh(
        const Gates& g, const float (&kk)[4][4], const float (&qk)[4][4],
        Square& A, uint4* p) {
    float d[4][4];
    each_sum([&](int m, int e, int a, int b) {
        const float D = a >= b ? segment(g.hi, g.lo, a, b) : 0.f;
        d[m][e] = D * qk[m][e];
        A[a][b] = a > b ? g.beta[a] * D * kk[m][e] : 0.f;
    });
    write_triangle(p, d);
}

extern "C" __global__ void __launch_bounds__(256, BLOCKS) delta_prep(
        const float* __restrict__ x, const float* __restrict__ conv_w,
        const float* __restrict__ decay, const float* __restrict__ dt_bias,
        float* conv, const int* __restrict__ first,
        const int* __restrict__ starts, const int* __restrict__ state_in,
        const int* __restrict__ state_out, const int* __restrict__ tile_seq,
        const int* __restrict__ tile_lo, const int* __restrict__ tile_hi,
        unsigned* q, unsigned* k, unsigned* t, unsigned* p, float* scal, int kh,
        int vh, int c, int width) {
    DYNAMIC_SHARED(unsigned char, rows);
    Gates* gates = (Gates*)(rows + ROOM);
    Square* A = (Square*)rows;  // when nobody needs queries and keys any more
    const int tile = blockIdx.x;
    const int key = blockIdx.y;
    const int tid = threadIdx.x;
    const int warp = tid / 32;
    const int per = vh / kh;
    if (tile_seq[tile] < 0)
        return;
    const Rows r = rows_of(
            tile, x, width, c, conv, first, starts, state_in, state_out, tile_seq,
            tile_lo, tile_hi);
    const Inputs in = {rows, kh * DK + key * DK, kh * DK};
    if (width % 4 == 0)
        in.fetch<16>(r);
    else
        in.fetch<8>(r);
    const int half = tid / HALF, mine = tid % HALF;
    Raw raw = {};
    if (warp < min(2, per))
        raw.load(r, key * per + warp, vh);
    in.convolve(r, conv_w, tid % (2 * DK), tid < 2 * DK);
    __syncthreads();
    unit_limbs(rows);
    __syncthreads();
    const size_t own = ((size_t)tile * kh + key) * DK * 16;
    write_limbs((uint4*)q + own, (uint4*)k + own, (const uint4*)rows);
    const Mat K = {{rows}}, Q = {{rows + 256 * DK}};
    float kk[4][4] = {};
    float qk[4][4] = {};
    if (warp % 4 >= warp / 4 * 2) {  // all others are above the diagonal
        products<DK>(kk, K, K);
        products<DK>(qk, Q, K);
    }
    #pragma unroll 1
    for (int h = key * per; h < (key + 1) * per; h += 2) {
        const int n = min(2, (key + 1) * per - h);
        const size_t cell = (size_t)tile * vh + h;
        if (warp < n)
            gates[warp].find(
                    r, raw, decay[h + warp], dt_bias[h + warp],
                    scal + (cell + warp) * 192);
        if (h + 2 + warp < (key + 1) * per && warp < 2)
            raw.load(r, h + 2 + warp, vh);
        __syncthreads();  // also: nobody reads Q and K, or the last heads' T, any more
        #pragma unroll 1
        for (int i = 0; i < n; i++)
            weigh(gates[i], kk, qk, A[i], (uint4*)p + (cell + i) * 640);
        __syncthreads();
        invert(A[half], mine, half < n);
        if (half < n)
            write_t((uint4*)t + (cell + half) * 640, A[half], mine);
        __syncthreads();
    }
}
