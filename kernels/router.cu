// Router logits of a decode step, the norm before it folded in, and the shared expert's gate as one
// more row; all in float32. A block computes EACH rows for a few rows of x; its warps share their
// columns, each with its weights in registers before x is there. Who is picked is decided by the
// kernels that use it (lib/picks.cuh).
//   w      : [rbytes]    u8     FORMAT (bf16 or f32) [n, k]: router rows, then the shared expert's
//                               gate if there is one
//   bias   : [experts]   f32    of the experts; or null
//   gain   : [k]         f32    of the norm (NORM 1); or null
//   x      : [r, k]   f32
//   logits : [r, ld]  f32
//   met    : [1]      i32    gets the 0 that expert_slots.cu counts from; or null
//   empty  : [words]     f32    4 * fours words, left EMPTY (lib/given.cuh) for the launch after
//                            this one; or null
//   ready_gain : [k]     f32    of the norm before the experts, for `ready`; or null
//   ready  : [r, line]   u8     x as experts_wide.cu multiplies it (lib/ready.cuh); or null
//   -D HIDDEN= (k, a multiple of 32)  EXPERTS=  FORMAT=  NORM= (0 or 1)  ROWS= (1 or 2: of x at a
//              time)  WARPS=  EACH=
//   -D READY=  0; 1: leave `ready`; 2: in crossed order
//   launch: <<<(ceil(n/EACH), any), 32*WARPS, any>>>, `rows` dealt out to blockIdx.y; at most 32
//        for each
#include "lib/given.cuh"
#include "lib/pdl.cuh"
#include "lib/ready.cuh"
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
#ifndef READY
#define READY 0
#endif
// of 256 columns; of a warp
constexpr int K = HIDDEN;
constexpr int PIECES = (K + 255) / 256;
constexpr int MINE = (PIECES + WARPS - 1) / WARPS;

namespace formats {  // eight weights
struct bf16 {
    static __device__ __forceinline__ void load(
            const unsigned char* __restrict__ w, size_t at, float* v) {
        const uint4 u = __ldcs((const uint4*)(w + 2 * at));
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            v[2 * i] = __uint_as_float((&u.x)[i] << 16);
            v[2 * i + 1] = __uint_as_float((&u.x)[i] & 0xFFFF0000u);
        }
    }
};
struct f32 {
    static __device__ __forceinline__ void load(
            const unsigned char* __restrict__ w, size_t at, float* v) {
        load8((const float*)w + at, v);
    }
};
}  // namespace formats

// What the launch after this one waits for, by all blocks.
__device__ __forceinline__ void empty_all(float* empty, int fours) {
    const int threads = gridDim.x * gridDim.y * 32 * WARPS;
    const int block = blockIdx.y * gridDim.x + blockIdx.x;
    #pragma unroll 1
    for (int i = block * 32 * WARPS + threadIdx.x; i < fours; i += threads)
        emptied(empty + 4 * (size_t)i, 4);
}

// A block keeps its weights for all of its rows, at most HELD of them.
//
// A sum over lanes takes the same additions from fewer exchanges if lanes have different values to
// begin with: of VALUES sums, a lane has the one numbered i ^ own at place i, so that what it gives
// away always lies in the upper half, and nothing is chosen. At the end number `own` is in v[0], in
// all lanes that differ in lower bits than those exchanged here.
constexpr int HELD = 32, VALUES = ROWS * EACH, LANES = 32 / VALUES;
constexpr bool FULL = K == 256 * WARPS * MINE;  // all lanes have columns
static_assert(
        32 * WARPS % EACH == 0 && (VALUES & (VALUES - 1)) == 0 && VALUES <= 32,
        "sums of lanes are halved");

template <int N> __device__ __forceinline__ float fold(float* v) {
    #pragma unroll
    for (int l = 0; l < 5; l++)
        #pragma unroll
        for (int i = 0; i < (N > 1 ? N / 2 : 1); i++)
            if (i < max(N >> (l + 1), 1))
                v[i] += __shfl_xor_sync(~0u, v[i + (N >> (l + 1))], 16 >> l);
    return v[0];
}

struct Rows {  // a lane's columns of ROWS rows of x
    float a[ROWS][MINE][8];
    __device__ __forceinline__ void load(
            const float* x, int t, int own, int first, int rows) {
        #pragma unroll
        for (int k = 0; k < ROWS; k++)
            #pragma unroll
            for (int i = 0; i < MINE; i++) {
                const int at = i * WARPS * 256 + first;
                if (FULL || at < K)
                    load8(x + (size_t)min(t + (k ^ own), rows - 1) * K + at,
                            a[k][i]);
            }
    }
};

#if READY
// Columns 8v to 8v + 7 of a row.
__device__ __forceinline__ void leave(
        unsigned char* row, int v, const float* a,
        const float* __restrict__ gain) {
    typedef ReadyRow<K> Row;
    const int lane = threadIdx.x % 32;
    float b[8], g[8], sum = 0.f;
    if (gain)
        load8(gain + v * 8, g);
    #pragma unroll
    for (int j = 0; j < 8; j++) {
        sum = fmaf(a[j], a[j], sum);
        b[j] = gain ? __fmul_rn(a[j], g[j]) : a[j];
    }
    sum = warp_sum(sum);
    if (!lane)
        ((float*)(row + Row::SQUARES))[v / 32] = sum;
    float top = top8(b);
    #pragma unroll
    for (int m = 1; m < 16; m *= 2)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
    const float2 f = chunk_scale(top);
    uint4* const to = (uint4*)row + v % 4 * Row::PART + v / 4;
    *to = READY > 1 ? to_half8_crossed(b, f.x) : to_half8(b, f.x);
    if (lane % 16 == 0)
        ((float*)(row + Row::POWERS))[v / 16] = f.y;
}
#endif

// A lane's weights of the block's rows, in the order of its sums.
__device__ __forceinline__ void load_weights(
        float (&v)[MINE][EACH][8], const unsigned char* __restrict__ w, int r0,
        int own, int first, int n) {
    #pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int at = i * WARPS * 256 + first;
        #pragma unroll
        for (int r = 0; r < EACH; r++) {
            const int row = min(r0 + (r ^ own % EACH), n - 1);
            if (FULL || at < K)
                formats::FORMAT::load(w, (size_t)row * K + at, v[i][r]);
        }
    }
}

// They get the gains of the norm, now, and not when x is there.
__device__ __forceinline__ void take_gains(
        float (&v)[MINE][EACH][8], const float* __restrict__ gain, int first) {
    #pragma unroll
    for (int i = 0; i < MINE; i++) {
        const int at = i * WARPS * 256 + first;
        float g[8] = {};
        if (NORM && (FULL || at < K))
            load8(gain + at, g);
        #pragma unroll
        for (int r = 0; r < EACH; r++)
            #pragma unroll
            for (int j = 0; j < 8; j++)
                v[i][r][j] = FULL || at < K
                        ? NORM ? v[i][r][j] * g[j] : v[i][r][j]
                        : 0.f;
#if defined(__CUDA_ARCH__)
        #pragma unroll
        for (int r = 0; r < 8 * EACH; r++)
            asm volatile("" : "+f"(v[i][r / 8][r % 8]));
#endif
    }
}

// A lane's share of products, and of squares.
__device__ __forceinline__ void multiply(
        const Rows& now, const float (&v)[MINE][EACH][8], float (&dot)[VALUES],
        float (&sum)[ROWS]) {
    #pragma unroll
    for (int i = 0; i < MINE; i++)
        #pragma unroll
        for (int j = 0; j < 8; j++)
            #pragma unroll
            for (int k = 0; k < ROWS; k++) {
                const float a = now.a[k][i][j];
                if (NORM)
                    sum[k] = fmaf(a, a, sum[k]);
                #pragma unroll
                for (int r = 0; r < EACH; r++)
                    dot[k * EACH + r] = fmaf(a, v[i][r][j], dot[k * EACH + r]);
            }
}

// Sums over warps become logits of `used` rows.
__device__ __forceinline__ void write(
        const float (&part)[HELD][EACH + 1][WARPS], float* logits, int used,
        int r0, int n, int ld, int rows, float eps, float more, unsigned thread) {
    #pragma unroll 1
    for (int p = thread; p < used * EACH; p += 32 * WARPS) {
        const int i = p / EACH, r = r0 + p % EACH;
        const int t = (blockIdx.y + i / ROWS * gridDim.y) * ROWS + i % ROWS;
        if (t >= rows || r >= n)
            continue;
        float s = 0.f, z = 0.f;
        #pragma unroll
        for (int m = 0; m < WARPS; m++) {
            s += part[i][p % EACH][m];
            z += part[i][EACH][m];
        }
        if (NORM)
            s = __fmul_rn(s, rsqrtf(fmaf(z, 1.f / K, eps)));
        logits[(size_t)t * ld + r] = s + more;
    }
}

// Of few rows, a launch that has a shared expert to ask for comes when the router has what it
// needs.
__device__ __forceinline__ bool comes_late(int n) {
    return !READY && n > EXPERTS;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) router(
        const unsigned char* __restrict__ w, const float* __restrict__ bias,
        const float* __restrict__ gain, const float* x, float* logits, int* met,
        float* empty, const float* __restrict__ ready_gain, unsigned char* ready,
        float eps, int n, int ld, int rows, int fours) {
    __shared__ float part[HELD][EACH + 1][WARPS];
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int r0 = blockIdx.x * EACH;
    const int own = lane / LANES, first = warp * 256 + lane * 8;
    const bool late = comes_late(n);
    if (!late)
        pdl_trigger();
    float v[MINE][EACH][8];
    load_weights(v, w, r0, own, first, n);
    take_gains(v, gain, first);
    const bool biased = bias && r0 + threadIdx.x % EACH < EXPERTS;
    const float more = biased ? bias[r0 + threadIdx.x % EACH] : 0.f;
    const int step = gridDim.y * ROWS;
    Rows now = {}, next = {};
    pdl_wait();
    now.load(x, blockIdx.y * ROWS, own / EACH, first, rows);
    if (met && !blockIdx.x && !blockIdx.y && !threadIdx.x)
        *met = 0;
    empty_all(empty, fours);
    if (late)
        pdl_trigger();
    int used = 0;
    #pragma unroll 2
    for (int t = blockIdx.y * ROWS; t < rows; t += step, used += ROWS) {
        if (t + step < rows)
            next.load(x, t + step, own / EACH, first, rows);
        float dot[VALUES] = {}, sum[ROWS] = {};
        multiply(now, v, dot, sum);
        const float z = NORM ? fold<ROWS>(sum) : 0.f;
        const float s = fold<VALUES>(dot);
        const int k = used + own / EACH;
        if (lane % LANES == 0)
            part[k][own % EACH][warp] = s;
        if (lane % (32 / ROWS) == 0)
            part[k][EACH][warp] = z;
#if READY
        static_assert(FULL, "see the contract");
        // whose turn it is among those with these rows
        if (used / ROWS % gridDim.x == blockIdx.x)
            #pragma unroll
            for (int j = 0; j < ROWS; j++) {
                if (t + j >= rows)
                    continue;
                #pragma unroll
                for (int i = 0; i < MINE; i++) {
                    float a[8];
                    #pragma unroll
                    for (int c = 0; c < 8; c++)
                        a[c] = ROWS > 1 && own / EACH ? now.a[ROWS - 1 - j][i][c]
                                                      : now.a[j][i][c];
                    leave(ready + (size_t)(t + j) * ReadyRow<K>::BYTES,
                            (first + i * WARPS * 256) / 8, a, ready_gain);
                }
            }
#endif
        now = next;
    }
    __syncthreads();
    write(part, logits, used, r0, n, ld, rows, eps, more, threadIdx.x);
}
