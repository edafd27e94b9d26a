// A Mamba-2 layer's prefill, before the state: for each tile of 64 positions and each head, what
// mamba_many.cu needs of it (Dao & Gu 2024). The convolution over time, steps dt and decays, and p
// = L (C B') dt, with float32 accuracy (lib/limbs.cuh). A block serves `per` heads of one group.
//   x        : [r, width]             f32   z | x | B | C | dt, width = 2*nh*DV + 2*groups*DK + nh
//   conv_w   : [c, 4]                 f32   c = nh*DV + 2*groups*DK
//   conv_b   : [c]                    f32   or null
//   decay    : [nh]                   f32   A = -exp(A_log)
//   dt_bias  : [nh]                   f32
//   conv     : [states, 3, c]         f32   inputs before a sequence's first row, oldest first;
//                                           written at state_out
//   first    : [seqs1]                i32   a row in the first tile of each sequence
//   starts   : [seqs]                 i32   position of a sequence's first row
//   state_in : [seqs]                 i32   tail to begin from (unread at position 0)
//   state_out : [r]                   i32   tail after a row, or -1; looked at for the last row of
//                                           each tile
//   tile_seq, tile_lo, tile_hi : [tiles] i32   sequence of a tile (-1: none), its real rows
//                                              lo..hi-1
//   q, k     : [tiles, groups, qf]    u32   written, as are all below: fragments of C and of B
//                                           (lib/limbs.cuh), qf = 64*DK
//   u        : [tiles, nh, uf]        f32   x as sums, uf = 64*DV
//   p        : [tiles, nh, 4096]      u32
//   scal     : [tiles, nh, 128]       f32   decay from the tile's begin; to its end, times dt
//   -D DK= (state size: 16, 32, 64 or 128) DV= (head size, a multiple of 16)
//   launch: <<<(tiles, groups, nh/groups/per), 256, 64*(4*DK + 4*max(DK, DV) + 16) + 1280>>>
#include "lib/chunk.cuh"
#ifndef DK
#define DK 128
#endif
#ifndef DV
#define DV 64
#endif
constexpr int STRIDE = 4 * DK + 4 * (DK > DV ? DK : DV) + 16;
typedef Matrix<STRIDE> Mat;

// B, then C, of the group through the convolution, 16 rows a thread at a time, as limbs.
__device__ __forceinline__ void convolve_bc(
        const Rows& r, unsigned char* rows, const float* conv_w,
        const float* conv_b, int group, int groups, int inner, int tid) {
    for (int i = tid; i < 2 * DK * 4; i += 256) {
        const int e = i % (2 * DK);
        const int m = e / DK;
        const int ch = inner + (m * groups + group) * DK + e % DK;
        r.conv(ch, inner + ch, i / (2 * DK) * 16, conv_w, conv_b,
                [&](int j, float v) {
                    put_limbs(rows + j * STRIDE + m * 4 * DK, e % DK, DK, v);
                });
        if (i < 2 * DK && blockIdx.z == 0)
            r.keep_tail(ch, inner + ch);
    }
}

// A head's x through the convolution, 16 rows a thread at a time, into `rows` behind B.
__device__ __forceinline__ void convolve_x(
        const Rows& r, unsigned char* rows, const float* conv_w,
        const float* conv_b, int h, int inner, int tid) {
    for (int i = tid; i < DV * 4; i += 256) {
        const int e = i % DV, ch = h * DV + e;
        r.conv(ch, inner + ch, i / DV * 16, conv_w, conv_b, [&](int j, float v) {
            ((float*)(rows + j * STRIDE + 4 * DK))[e] = v;
        });
        if (i < DV)
            r.keep_tail(ch, inner + ch);
    }
}

// A head's x, which is in `rows`, as sums of 16 columns and 8 rows.
__device__ __forceinline__ void write_u(
        float4* u, size_t cell, const unsigned char* rows, int warp, int lane) {
    for (int i = warp; i < DV / 2; i += 8) {
        const int m = i / 8;
        const int row = i % 8 * 8 + lane % 4 * 2;
        const int col = m * 16 + lane / 4;
        const float* a = (const float*)(rows + row * STRIDE + 4 * DK);
        const float* b = (const float*)(rows + (row + 1) * STRIDE + 4 * DK);
        u[(cell * (DV / 2) + i) * 32 + lane] = make_float4(
                a[col], b[col], a[col + 8], b[col + 8]);
    }
}

extern "C" __global__ void __launch_bounds__(256, 2) mamba_prep(
        const float* __restrict__ x, const float* __restrict__ conv_w,
        const float* __restrict__ conv_b, const float* __restrict__ decay,
        const float* __restrict__ dt_bias, float* conv,
        const int* __restrict__ first, const int* __restrict__ starts,
        const int* __restrict__ state_in, const int* __restrict__ state_out,
        const int* __restrict__ tile_seq, const int* __restrict__ tile_lo,
        const int* __restrict__ tile_hi, unsigned* q, unsigned* k, float* u,
        unsigned* p, float* scal, int groups, int nh, int per, int c, int width) {
    DYNAMIC_SHARED(unsigned char, rows);
    float* hi = (float*)(rows + TILE * STRIDE);
    float* lo = hi + TILE;
    float* dt = lo + TILE;
    const int t = blockIdx.x;
    const int group = blockIdx.y;
    const int tid = threadIdx.x;
    const int lane = tid % 32;
    const int warp = tid / 32;
    const int inner = nh * DV;
    if (tile_seq[t] < 0)
        return;
    const Rows r = rows_of(
            t, x, width, c, conv, first, starts, state_in, state_out, tile_seq,
            tile_lo, tile_hi);
    convolve_bc(r, rows, conv_w, conv_b, group, groups, inner, tid);
    __syncthreads();
    const Mat K = {{rows, 2 * DK}}, Q = {{rows + 4 * DK, 2 * DK}};
    if (blockIdx.z == 0) {
        write_q<DK>((uint4*)q + ((size_t)t * groups + group) * DK * 16, Q);
        write_k<DK>((uint4*)k + ((size_t)t * groups + group) * DK * 16, K);
    }
    float qk[4][4] = {};
    products<DK>(qk, Q, K);
    const int h0 = group * (nh / groups) + blockIdx.z * per;
    #pragma unroll 1
    for (int h = h0; h < h0 + per; h++) {
        const size_t cell = (size_t)t * nh + h;
        if (warp == 0) {  // steps and decays of two rows a lane
            float g[2], d[2], G[2];
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                const int j = 2 * lane + i;
                d[i] = j >= r.lo && j < r.hi
                        ? softplus(
                                  r.x[(size_t)j * width + width - nh + h]
                                  + dt_bias[h])
                        : 0.f;
                g[i] = decay[h] * d[i];
                dt[j] = d[i];
            }
            decays(g, d, hi, lo, scal + cell * 128, G);
        }
        __syncthreads();  // also: nobody reads C or the last head's x any more
        convolve_x(r, rows, conv_w, conv_b, h, inner, tid);
        float d[4][4];
        each_sum([&](int n, int e, int i, int j) {
            d[n][e] = i >= j ? segment(hi, lo, i, j) * dt[j] * qk[n][e] : 0.f;
        });
        write_p((uint4*)p + cell * 1024, d);
        __syncthreads();
        write_u((float4*)u, cell, rows, warp, lane);
        __syncthreads();
    }
}
