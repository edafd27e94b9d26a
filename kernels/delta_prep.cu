// A gated delta net's prefill, before the state: for each tile of 64 positions and each head, what delta_many.cu needs of it (Yang et al. 2024, 2025). The
// convolution over time, unit q and k, decays; then T = (I + A)^-1 with A = beta D k k' below the diagonal, and the products w = T (beta G k),
// u = T (beta v), p = D q k'. A block serves the VPK value heads of one key head. All products have float32 accuracy (lib/limbs.cuh).
//   x        : [r, width]             f32   q | k | v | z | b | a, width = 2*kh*DK + 2*vh*DV + 2*vh
//   conv_w   : [c, 4]                 f32   c = 2*kh*DK + vh*DV
//   decay    : [vh]                   f32   A = -exp(A_log)
//   dt_bias  : [vh]                   f32
//   conv     : [states, 3, c]         f32   inputs before a sequence's first row, oldest first; written at state_out
//   first    : [seqs1]                i32   a row in the first tile of each sequence
//   starts   : [seqs]                 i32   position of a sequence's first row
//   state_in : [seqs]                 i32   tail to begin from (unread at position 0)
//   state_out : [r]                   i32   tail after a row, or -1; looked at for the last row of each tile
//   tile_seq, tile_lo, tile_hi : [tiles] i32   sequence of a tile (-1: none), its real rows lo..hi-1
//   q, k     : [tiles, kh, qf]        u32   written, as are all below: fragments (lib/limbs.cuh), qf = 64*DK
//   w        : [tiles, vh, qf]        u32
//   u        : [tiles, vh, uf]        f32   uf = 64*DV
//   p        : [tiles, vh, 4096]      u32
//   scal     : [tiles, vh, 128]       f32   decay from the tile's begin, and to its end
//   -D DK= DV= (multiples of 32, at most 128)
//   launch: <<<(tiles, kh), 256, 64*(4*DK + 4*max(DK, DV) + 16) + 64*72*4 + 1280>>>
#include "lib/chunk.cuh"
#ifndef DK
#define DK 128
#endif
#ifndef DV
#define DV 128
#endif
constexpr int STRIDE = 4 * DK + 4 * (DK > DV ? DK : DV) + 16, AS = 72;  // bytes of a row; floats of a row of A, so that fragments cost no bank conflicts
typedef Matrix<STRIDE> Mat;

// Rows of f32 q and k in `rows` (k first) to unit length, as limbs in the same place; a warp to eight rows.
__device__ __forceinline__ void unit_limbs(unsigned char* rows) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    #pragma unroll 2
    for (int r = warp * 8; r < warp * 8 + 8; r++) {
        float2 v[2][2] = {};
        float sum[2] = {};
        #pragma unroll
        for (int m = 0; m < 2; m++)
            #pragma unroll
            for (int i = 0; i < 2; i++)
                if (lane + 32 * i < DK / 2) {
                    v[m][i] = ((const float2*)(rows + r * STRIDE))[m * (DK / 2) + lane + 32 * i];
                    sum[m] += v[m][i].x * v[m][i].x + v[m][i].y * v[m][i].y;
                }
        __syncwarp();
        #pragma unroll
        for (int m = 0; m < 2; m++) {
            const float f = rsqrtf(warp_sum(sum[m]) + 1e-6f) * (m ? rsqrtf((float)DK) : 1.f);
            #pragma unroll
            for (int i = 0; i < 2; i++)
                if (lane + 32 * i < DK / 2) {
                    const Pair p = limbs(v[m][i].x * f, v[m][i].y * f);
                    unsigned* to = (unsigned*)(rows + r * STRIDE + m * 4 * DK) + lane + 32 * i;
                    to[0] = p.hi;
                    to[DK / 2] = p.lo;
                }
        }
    }
}

// Inverse of I + A in place, A strictly lower triangular with zeros above: blocks of 16 by substitution, then pairs of blocks, [[T, 0], [-T2 A T, T2]].
template <int N> __device__ __forceinline__ void join(float (*A)[AS]) {
    constexpr int PER = 32 * N / 256;
    const int c = threadIdx.x % N, r0 = threadIdx.x / N % N;  // of the lower left block; further elements 256/N rows below, or in the next pair
    #pragma unroll
    for (int pass = 0; pass < 2; pass++) {  // A T, then -T2 (A T)
        float v[PER] = {};
        #pragma unroll
        for (int j = 0; j < N; j += 4)
            #pragma unroll
            for (int e = 0; e < PER; e++) {
                const int r = r0 + e * (256 / N), b = r / N * 2 * N, k = b + pass * N + j;
                const float4 l = *(const float4*)&A[b + N + r % N][k];
                #pragma unroll
                for (int i = 0; i < 4; i++) v[e] = fmaf((&l.x)[i], A[k + i][b + c], v[e]);
            }
        __syncthreads();
        #pragma unroll
        for (int e = 0; e < PER; e++) { const int r = r0 + e * (256 / N), b = r / N * 2 * N; A[b + N + r % N][b + c] = pass ? -v[e] : v[e]; }
        __syncthreads();
    }
}
__device__ __forceinline__ void invert(float (*A)[AS]) {
    if (threadIdx.x < TILE) {
        const int b = threadIdx.x / 16 * 16, c = threadIdx.x % 16;
        float t[16];
        #pragma unroll
        for (int i = 0; i < 16; i++) {
            float s = 0.f;
            #pragma unroll
            for (int j = 0; j < i; j++) s = fmaf(A[b + i][b + j], t[j], s);
            t[i] = i == c ? 1.f : i < c ? 0.f : -s;
        }
        __syncwarp();
        #pragma unroll
        for (int i = 0; i < 16; i++) A[b + i][b + c] = t[i];
    }
    __syncthreads();
    join<16>(A);
    join<32>(A);
}

// w = T' k with T' = T beta G, as fragments [DK/16 steps][8 row tiles]; warp: 16 rows, half of the columns
__device__ __forceinline__ void write_w(uint4* w, const float (*T)[AS], const float* beta_g, const Mat& K) {
    constexpr int N = DK / 16;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, m = warp % 4, half = warp / 4, g = lane / 4, q = lane % 4 * 2;
    float c[N][4] = {};
    #pragma unroll 1
    for (int s = 0; s <= m; s++) {
        Limbs a;
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            const int col = 16 * s + q + i / 2 * 8;
            const float2 t = *(const float2*)&T[16 * m + g + i % 2 * 8][col];
            a.set(i, limbs(t.x * beta_g[col], t.y * beta_g[col + 1]));
        }
        uint4 b[N];
        #pragma unroll
        for (int n = 0; n < N; n += 2) K.b(b + n, 16 * s, (half * N + n) * 8);
        mma_limbs<N>(c, a, b);
    }
    #pragma unroll
    for (int n = 0; n < N; n += 2) {
        uint4* to = w + ((half * N + n) / 2 * 8 + 2 * m) * 32 + lane;
        to[0] = b_fragment(limbs(c[n][0], c[n][1]), limbs(c[n + 1][0], c[n + 1][1]));
        to[32] = b_fragment(limbs(c[n][2], c[n][3]), limbs(c[n + 1][2], c[n + 1][3]));
    }
}

// u' = v' (T beta)', sums of [16 columns][8 row tiles]
__device__ __forceinline__ void write_u(float4* u, const float (*T)[AS], const float* beta, const Mat& V) {
    const int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4 * 2;
    #pragma unroll 1
    for (int i = threadIdx.x / 32; i < DV / 4; i += 8) {
        const int m = i % (DV / 16), np = i / (DV / 16);
        float c[2][4] = {};
        #pragma unroll 1
        for (int s = 0; s <= np; s++) {
            Limbs a;
            uint4 b[2];
            V.a_turned(a, m * 16, s * 16);
            #pragma unroll
            for (int n = 0; n < 2; n++) {
                Pair p[2];
                #pragma unroll
                for (int j = 0; j < 2; j++) {
                    const int col = 16 * s + q + 8 * j;
                    const float2 t = *(const float2*)&T[16 * np + 8 * n + g][col];
                    p[j] = limbs(t.x * beta[col], t.y * beta[col + 1]);
                }
                b[n] = b_fragment(p[0], p[1]);
            }
            mma_limbs<2>(c, a, b);
        }
        float4* to = u + (m * 8 + 2 * np) * 32 + lane;
        to[0] = make_float4(c[0][0], c[0][1], c[0][2], c[0][3]);
        to[32] = make_float4(c[1][0], c[1][1], c[1][2], c[1][3]);
    }
}

extern "C" __global__ void __launch_bounds__(256, 2) delta_prep(const float* __restrict__ x, const float* __restrict__ conv_w, const float* __restrict__ decay,
        const float* __restrict__ dt_bias, float* conv, const int* __restrict__ first, const int* __restrict__ starts, const int* __restrict__ state_in,
        const int* __restrict__ state_out, const int* __restrict__ tile_seq, const int* __restrict__ tile_lo, const int* __restrict__ tile_hi,
        unsigned* q, unsigned* k, unsigned* w, float* u, unsigned* p, float* scal, int kh, int vh, int c, int width) {
    DYNAMIC_SHARED(unsigned char, rows);
    float (*A)[AS] = (float (*)[AS])(rows + TILE * STRIDE);
    float *hi = (float*)(A + TILE), *lo = hi + TILE, *beta = lo + TILE, *beta_g = beta + TILE;
    const int t = blockIdx.x, key = blockIdx.y, tid = threadIdx.x, lane = tid % 32, warp = tid / 32, per = vh / kh;
    if (tile_seq[t] < 0) return;
    const Rows r = rows_of(t, x, width, c, conv, first, starts, state_in, state_out, tile_seq, tile_lo, tile_hi);
    for (int i = tid; i < 2 * DK * 4; i += 256) {  // k, then q, of 16 rows
        const int e = i % (2 * DK), ch = (e < DK ? kh * DK : -DK) + key * DK + e;
        r.conv(ch, ch, i / (2 * DK) * 16, conv_w, nullptr, [&](int j, float v) { ((float*)(rows + j * STRIDE))[e] = v; });
        if (i < 2 * DK) r.keep_tail(ch, ch);
    }
    __syncthreads();
    unit_limbs(rows);
    __syncthreads();
    const Mat K = {rows, 2 * DK}, Q = {rows + 4 * DK, 2 * DK}, V = {rows + 4 * DK, 2 * DV};
    write_q<DK>((uint4*)q + ((size_t)t * kh + key) * DK * 16, Q);
    write_k<DK>((uint4*)k + ((size_t)t * kh + key) * DK * 16, K);
    float kk[4][4] = {}, qk[4][4] = {};
    products<DK>(kk, K, K);
    products<DK>(qk, Q, K);
    #pragma unroll 1
    for (int h = key * per; h < (key + 1) * per; h++) {
        const size_t cell = (size_t)t * vh + h;
        __syncthreads();  // nobody reads Q, or the last head's V and A, any more
        if (warp == 0) {
            float g[2], be[2];
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                const int j = 2 * lane + i;
                const bool real = j >= r.lo && j < r.hi;
                const float* row = r.x + (size_t)j * width + width - 2 * vh + h;
                g[i] = real ? decay[h] * softplus(row[vh] + dt_bias[h]) : 0.f;
                be[i] = real ? 1.f / (1.f + expf(-row[0])) : 0.f;
            }
            const float one[2] = {1.f, 1.f};
            float G[2];
            decays(g, one, hi, lo, scal + cell * 128, G);
            #pragma unroll
            for (int i = 0; i < 2; i++) { beta[2 * lane + i] = be[i]; beta_g[2 * lane + i] = be[i] * G[i]; }
        }
        for (int i = tid; i < DV * 4; i += 256) {
            const int e = i % DV, ch = 2 * kh * DK + h * DV + e;
            r.conv(ch, ch, i / DV * 16, conv_w, nullptr, [&](int j, float v) { put_limbs(rows + j * STRIDE + 4 * DK, e, DV, v); });
            if (i < DV) r.keep_tail(ch, ch);
        }
        __syncthreads();
        float d[4][4];
        each_sum([&](int n, int e, int i, int j) {
            const float D = i >= j ? segment(hi, lo, i, j) : 0.f;
            d[n][e] = D * qk[n][e];
            A[i][j] = i > j ? beta[i] * D * kk[n][e] : 0.f;
        });
        write_p((uint4*)p + cell * 1024, d);
        __syncthreads();
        invert(A);
        write_w((uint4*)w + cell * DK * 16, A, beta_g, K);
        write_u((float4*)u + cell * DV * 16, A, beta, V);
    }
}
