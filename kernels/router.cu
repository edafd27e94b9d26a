// Router logits of a decode step, the norm before it folded in, and the shared expert's gate as one more row; all in float32. A block computes EACH rows for a few rows of x;
// its warps share their columns, each with its weights in registers before x is there. Who is picked is decided by the kernels that use it (lib/picks.cuh).
//   w      : [rbytes]    u8     FORMAT (bf16 or f32) [n, k]: router rows, then the shared expert's gate if there is one
//   bias   : [experts]   f32    of the experts; or null
//   gain   : [k]         f32    of the norm (NORM 1); or null
//   x      : [r, k]   f32
//   logits : [r, ld]  f32
//   met    : [1]      i32    gets the 0 that those who pick count from; or null
//   empty  : [r, picks, width]  f32  4 * fours words, left EMPTY (lib/given.cuh) for
//                            experts_fused.cu; or null
//   -D HIDDEN= (k, a multiple of 32)  EXPERTS=  FORMAT=  NORM= (0 or 1)  ROWS= (1 or 2: of x at a time)  WARPS=  EACH=
//   launch: <<<(ceil(n/EACH), any), 32*WARPS, any>>>, `rows` dealt out to blockIdx.y; at most 8 for each
#include "lib/given.cuh"
#include "lib/pdl.cuh"
#include "lib/reduce.cuh"
#include "lib/stage.cuh"
#ifndef HIDDEN
#define HIDDEN 2048
#define EXPERTS 256
#define FORMAT bf16
#define NORM 1
#define ROWS 1
#define WARPS 8
#define EACH 2
#endif
constexpr int K = HIDDEN, PIECES = (K + 255) / 256, MINE = (PIECES + WARPS - 1) / WARPS;  // of 256 columns; of a warp

namespace formats {  // eight weights
struct bf16 {
    static __device__ __forceinline__ void load(const unsigned char* __restrict__ w, size_t at, float* v) {
        const uint4 u = __ldcs((const uint4*)(w + 2 * at));
        #pragma unroll
        for (int i = 0; i < 4; i++) { v[2 * i] = __uint_as_float((&u.x)[i] << 16); v[2 * i + 1] = __uint_as_float((&u.x)[i] & 0xFFFF0000u); }
    }
};
struct f32 { static __device__ __forceinline__ void load(const unsigned char* __restrict__ w, size_t at, float* v) { load8((const float*)w + at, v); } };
}  // namespace formats

// Sums of sixteen values over the lanes of a warp, each pair of lanes' in v[0]: whose, it returns.
// The same additions as if all lanes exchanged all values, in a third of the instructions.
__device__ __forceinline__ int sums_of_sixteen(float* v, int lane) {
    int mine = 0;
    #pragma unroll
    for (int n = 8; n; n >>= 1) {
        const bool high = lane & 2 * n;
        #pragma unroll
        for (int i = 0; i < 8; i++)
            if (i < n) {
                const float other = __shfl_xor_sync(~0u, high ? v[i] : v[i + n], 2 * n);
                v[i] = (high ? v[i + n] : v[i]) + other;
            }
        mine += high ? n : 0;
    }
    v[0] += __shfl_xor_sync(~0u, v[0], 1);
    return mine;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) router(const unsigned char* __restrict__ w, const float* __restrict__ bias,
        const float* __restrict__ gain, const float* x, float* logits, int* met, float* empty,
        float eps, int n, int ld, int rows, int fours) {
    __shared__ float part[8][EACH + 1][WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r0 = blockIdx.x * EACH;
    float v[MINE][EACH][8];
    #pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int at = (i * WARPS + warp) * 256 + lane * 8;
        #pragma unroll
        for (int r = 0; r < EACH; r++) {
            if (at < K) formats::FORMAT::load(w, (size_t)min(r0 + r, n - 1) * K + at, v[i][r]);
            #pragma unroll
            for (int j = 0; j < 8; j++) v[i][r][j] = at < K ? NORM ? v[i][r][j] * gain[at + j] : v[i][r][j] : 0.f;
        }
    }
    const int mine = threadIdx.x % EACH;
    const float more = bias && r0 + mine < EXPERTS ? bias[r0 + mine] : 0.f;
    pdl_trigger();
    pdl_wait();
    if (met && !blockIdx.x && !blockIdx.y && !threadIdx.x) *met = 0;
    const int threads = gridDim.x * gridDim.y * 32 * WARPS;
    #pragma unroll 1
    for (int i = (blockIdx.y * gridDim.x + blockIdx.x) * 32 * WARPS + threadIdx.x; i < fours;
            i += threads)
        emptied(empty + 4 * (size_t)i, 4);
    int used = 0;
    #pragma unroll 1
    for (int t = blockIdx.y * ROWS; t < rows; t += gridDim.y * ROWS) {
        float a[ROWS][MINE][8] = {}, dot[ROWS][EACH] = {}, sum[ROWS] = {};
        #pragma unroll
        for (int k = 0; k < ROWS; k++)
            #pragma unroll
            for (int i = 0; i < MINE; i++)
                if ((i * WARPS + warp) * 256 + lane * 8 < K) load8(x + (size_t)min(t + k, rows - 1) * K + (i * WARPS + warp) * 256 + lane * 8, a[k][i]);
        #pragma unroll
        for (int k = 0; k < ROWS; k++)
            #pragma unroll
            for (int i = 0; i < MINE; i++)
                #pragma unroll
                for (int j = 0; j < 8; j++) {
                    if (NORM) sum[k] = fmaf(a[k][i][j], a[k][i][j], sum[k]);
                    #pragma unroll
                    for (int r = 0; r < EACH; r++) dot[k][r] = fmaf(a[k][i][j], v[i][r][j], dot[k][r]);
                }
        constexpr bool MANY = ROWS * EACH == 16;
        #pragma unroll
        for (int m = 16; m; m >>= 1)
            #pragma unroll
            for (int k = 0; k < ROWS; k++) {
                if (NORM) sum[k] += __shfl_xor_sync(~0u, sum[k], m);
                #pragma unroll
                for (int r = 0; r < EACH && !MANY; r++) dot[k][r] += __shfl_xor_sync(~0u, dot[k][r], m);
            }
        if (MANY) {
            const int mine = sums_of_sixteen(dot[0], lane);
            if (lane % 2 == 0) part[used + mine / EACH][mine % EACH][warp] = dot[0][0];
        }
        #pragma unroll
        for (int k = 0; k < ROWS; k++, used++)
            if (!lane) {
                part[used][EACH][warp] = sum[k];
                #pragma unroll
                for (int r = 0; r < EACH && !MANY; r++) part[used][r][warp] = dot[k][r];
            }
    }
    __syncthreads();
    const int i = threadIdx.x / EACH, t = (blockIdx.y + i / ROWS * gridDim.y) * ROWS + i % ROWS;
    if (i >= used || t >= rows || r0 + mine >= n) return;
    float s = 0.f, z = 0.f;
    #pragma unroll
    for (int m = 0; m < WARPS; m++) { s += part[i][mine][m]; z += part[i][EACH][m]; }
    if (NORM) s = __fmul_rn(s, rsqrtf(fmaf(z, 1.f / K, eps)));
    logits[(size_t)t * ld + r0 + mine] = s + more;
}
