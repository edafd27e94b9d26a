// Rows of float32 activations to fp16, each times the power of two that brings its largest
// magnitude into [2^14, 2^15): the input of a matrix product by tensor cores (gemm.cu). With a
// gain, of rmsnorm(x, gain): what is rounded is x*gain, and 1/rms goes into the row's scale.
//   x     : [rows, k]         f32
//   gain  : [k]               f32   of the norm; or null
//   y     : [rows, ld]        f16   ld = parts * kp; kp: k rounded up to what the product takes at
//                                   a time, zeros there. Part 0: rounded; part 1: what that left,
//                                   rounded
//   scale : [rows]            f32   of a row: x = y * scale
// Columns are in the order of lib/halves_out.cuh.
//   -D PARTS=  1 or 2
//   -D WARPS=  1, 2, 4 or 8: that share a row        32 must divide kp
//   launch: <<<ceil(rows*WARPS/8), 256>>>
#include "lib/halves_out.cuh"
#include "lib/reduce.cuh"
#ifndef PARTS
#define PARTS 1
#endif
#ifndef WARPS
#define WARPS 8
#endif
constexpr int STEP = 128 * WARPS;  // numbers that a row's threads take at once
// times that they stay in registers; later ones are read again
constexpr int HELD = 4;

// q gets its gain; the sum of squares is without.
__device__ __forceinline__ void weigh(
        float4& q, float4 f, float& sum, float& top) {
    sum += fmaf(q.x, q.x, fmaf(q.y, q.y, fmaf(q.z, q.z, q.w * q.w)));
    q = make_float4(q.x * f.x, q.y * f.y, q.z * f.z, q.w * f.w);
    top = fmaxf(
            fmaxf(top, fmaxf(fabsf(q.x), fabsf(q.y))),
            fmaxf(fabsf(q.z), fabsf(q.w)));
}

// Numbers i to i + 3 of a row, and their gains; beyond its end zeros.
struct Source {
    const float* row;
    const float* gain;
    int n;
    bool wide;
    __device__ __forceinline__ void fetch(int i, float4& q, float4& f) const {
        q = make_float4(0.f, 0.f, 0.f, 0.f);
        f = make_float4(1.f, 1.f, 1.f, 1.f);
        if (wide) {
            if (i < n)
                q = *(const float4*)(row + i);
            if (gain && i < n)
                f = *(const float4*)(gain + i);
        } else
            for (int j = 0; j < 4; j++)
                if (i + j < n) {
                    (&q.x)[j] = row[i + j];
                    if (gain)
                        (&f.x)[j] = gain[i + j];
                }
    }
};

// Of all threads of a row: the sum, and the largest.
__device__ __forceinline__ void of_the_row(
        unsigned thread, float& sum, float& top) {
    sum = warp_sum(sum);
    for (int m = 16; m; m >>= 1)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
    if (WARPS > 1) {
        __shared__ float sums[8], tops[8];
        const int warp = thread / 32, w0 = warp / WARPS * WARPS;
        if (thread % 32 == 0) {
            sums[warp] = sum;
            tops[warp] = top;
        }
        __syncthreads();
        sum = top = 0.f;
        #pragma unroll
        for (int i = 0; i < WARPS; i++) {
            sum += sums[w0 + i];
            top = fmaxf(top, tops[w0 + i]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(256, 4)
        halve(const float* __restrict__ x, const float* __restrict__ gain,
                float eps, __half* y, float* scale, int rows, int n, int kp) {
    const int rows_here = 8 / WARPS;
    const int r = blockIdx.x * rows_here + threadIdx.x / (32 * WARPS);
    const int first = threadIdx.x % (32 * WARPS) * 4;
    const bool real = r < rows;
    const Source source{x + (size_t)(real ? r : 0) * n, gain, n, n % 4 == 0};
    float sum = 0.f, top = 0.f;
    float4 v[HELD], g[HELD], late, late_gain;
    #pragma unroll
    for (int j = 0; j < HELD; j++)
        source.fetch(first + j * STEP, v[j], g[j]);
    #pragma unroll
    for (int j = 0; j < HELD; j++)
        weigh(v[j], g[j], sum, top);
    for (int i = first + HELD * STEP; i < n; i += STEP) {
        source.fetch(i, late, late_gain);
        weigh(late, late_gain, sum, top);
    }
    of_the_row(threadIdx.x, sum, top);
    if (!real)
        return;
    const float2 f = chunk_scale(top);
    if (first == 0)
        scale[r] = gain ? f.y * rsqrtf(sum / n + eps) : f.y;
    const auto put = [&](int i, float4 v) {
        if (i < kp)
            put_halves<PARTS>(y + (size_t)r * PARTS * kp, kp, i, v, f.x);
    };
    #pragma unroll
    for (int j = 0; j < HELD; j++)
        put(first + j * STEP, v[j]);
    for (int i = first + HELD * STEP; i < kp; i += STEP) {
        source.fetch(i, late, late_gain);
        weigh(late, late_gain, sum, top);
        put(i, late);
    }
}
