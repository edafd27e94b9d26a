// Logits of a router for many rows, as exact as float32: x in two parts of fp16 (halve.cu), weights that fp16
// holds. A block has 64 rows, 512 columns of x, its share of each sum, and up to 64*TILES logits: so much of x
// and of W goes to each multiprocessor once, and all have work. Who reads the logits adds the shares up.
//   x     : [rows, ld]           f16   ld = 2*kp, and 64 divides kp; columns in the order of lib/halves_out.cuh
//   scale : [rows]               f32   of the rows of x
//   w     : [wrows, bytes]       u8    wrows: n rounded up to a multiple of 4
//   unit  : [wrows]              f32   of the rows of W; or null for ones
//   y     : [sums, n]            f32   sums = ceil(kp/512)*rows: all rows' first shares, then their second, ...
//   -D FMT=    bf16 or f16       -D TILES=  of 8 logits that a warp has, 1 to 5
//   launch: <<<(ceil(rows/64), shares, ceil(n/(64*TILES))), 256, 73728>>>
#include "lib/async.cuh"
#include "lib/mma.cuh"
#include "lib/unpack.cuh"
#ifndef FMT
#define FMT bf16
#endif
#ifndef TILES
#define TILES 5
#endif
using W = weights::FMT;
constexpr int ROWS = 64, COLS = 512, STEP = 64, STAGES = 4;
constexpr int LINE = STEP + 8;             // halves of a row in a stage: no bank conflicts
constexpr int PART = ROWS * LINE;          // of one part
static_assert(W::BYTES == 16, "sixteen bits");

// Columns of x that a block takes, step by step
struct Feed {
    const __half* x;                       // of its first row and column
    int rows, ld, kp, steps;
    __half* ring;
    __device__ __forceinline__ void fetch(int s) const {
        __half* const stage = ring + s % STAGES * 2 * PART;
        #pragma unroll
        for (int i = threadIdx.x; i < 2 * ROWS * STEP / 8; i += 256) {
            const int part = i / (ROWS * STEP / 8), r = i / (STEP / 8) % ROWS, c = i % (STEP / 8) * 8;
            const bool on = s < steps && r < rows;
            const __half* from = on ? x + (size_t)r * ld + part * kp + s * STEP + c : x;
            cp_async16_or_zero(stage + part * PART + r * LINE + c, from, on);
        }
        cp_async_commit();
    }
    __device__ __forceinline__ const __half* at(int s) const { return ring + s % STAGES * 2 * PART; }
};

// Eight weights of each of a warp's tiles: of a row, those that this lane multiplies
struct Weights {
    const unsigned char* from[TILES];
    float up[TILES];
    uint4 next[TILES];
    __device__ __forceinline__ void ask(int chunk, int chunks) {
        #pragma unroll
        for (int t = 0; t < TILES; t++)
            if (chunk < chunks) next[t] = *(const uint4*)(from[t] + (size_t)chunk * 64);
    }
    __device__ __forceinline__ void take(unsigned (*h)[4]) const {
        #pragma unroll
        for (int t = 0; t < TILES; t++) W::halves((const unsigned char*)&next[t], nullptr, 0, up[t], false, h[t]);
    }
};

extern "C" __global__ void __launch_bounds__(256) logits_many(const __half* __restrict__ x,
        const float* __restrict__ scale, const unsigned char* __restrict__ w, const float* __restrict__ unit,
        float* y, int rows, int ld, int kp, int bytes, int n) {
    DYNAMIC_SHARED(__half, ring);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t2 = lane % 4 * 2;
    const int r0 = blockIdx.x * ROWS, c0 = blockIdx.y * COLS, n4 = (n + 3) / 4 * 4;
    const int steps = min(COLS, kp - c0) / STEP, chunks = min(steps * 2, (bytes / 2 - c0) / 32);
    const int tile0 = blockIdx.z * 8 * TILES + warp;  // a warp has each eighth tile from here on
    const Feed feed = {x + (size_t)r0 * ld + c0, rows - r0, ld, kp, steps, ring};
    Weights own;
    #pragma unroll
    for (int t = 0; t < TILES; t++) {
        const int row = min((tile0 + 8 * t) * 8 + g, n4 - 1);
        own.from[t] = w + (size_t)row * bytes + c0 * 2 + lane % 4 * 16;
        own.up[t] = W::aid(unit ? unit[row] : 1.f);
        own.next[t] = make_uint4(0, 0, 0, 0);
    }
    for (int s = 0; s < STAGES - 1; s++) feed.fetch(s);
    own.ask(0, chunks);
    float c[4][TILES][4] = {};
    #pragma unroll 1
    for (int s = 0; s < steps; s++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();
        feed.fetch(s + STAGES - 1);
        #pragma unroll
        for (int half = 0; half < 2; half++) {
            const int chunk = 2 * s + half;
            unsigned b[TILES][4];
            own.take(b);
            if (chunk >= chunks) continue;  // there are no more weights, and x is zero
            own.ask(chunk + 1, chunks);
            #pragma unroll
            for (int m = 0; m < 4; m++)
                #pragma unroll
                for (int i = 0; i < 4; i++) {  // parts, and halves of the chunk
                    unsigned a[4];
                    const int row = m * 16 + lane % 16, col = half * 32 + i % 2 * 16 + lane / 16 * 8;
                    ldmatrix_x4(a, feed.at(s) + i / 2 * PART + row * LINE + col);
                    #pragma unroll
                    for (int t = 0; t < TILES; t++) mma_f16(c[m][t], a, b[t] + i % 2 * 2);
                }
        }
    }
    #pragma unroll
    for (int m = 0; m < 4; m++)
        #pragma unroll
        for (int e = 0; e < 4; e++) {
            const int r = r0 + m * 16 + g + e / 2 * 8;
            if (r >= rows) continue;
            float* const to = y + ((size_t)blockIdx.y * rows + r) * n;
            #pragma unroll
            for (int t = 0; t < TILES; t++) {
                const int at = (tile0 + 8 * t) * 8 + t2 + e % 2;
                const float by = at < n && unit ? unit[at] * W::UNITY : W::UNITY;
                if (at < n) to[at] = __fmul_rn(__fmul_rn(c[m][t][e], scale[r]), by);
            }
        }
}
