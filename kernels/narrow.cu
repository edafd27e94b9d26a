// Rows of float32 activations in fewer bits, the input of gemm_scaled.cu: NVFP4, or FP8. With a
// gain, of rmsnorm(x, gain): what is rounded is x*gain, and 1/rms goes into the row's scale. A
// power of two brings a row's largest magnitude into [2^14, 2^15) (NVFP4) or [2^7, 2^8) (FP8).
//   x     : [rows, k]         f32
//   gain  : [k]               f32   of the norm; or null
//   y     : [rows, bytes]     u8    codes: bytes = kp/2 (NVFP4) or kp (FP8); zeros beyond k
//   s     : [rows, sixteens]  u8    NVFP4: e4m3 scales of kp/16 blocks of 16 columns; or null
//   scale : [rows]            f32   of a row; NaN for one that has a number that is none
// Codes lie as tensor cores want them beside weights of which a lane has eight that follow each
// other. NVFP4: byte i of word j has column 8j+i in its lower half and 8j+4+i in its upper one, as
// the words of lib/formats.cuh once their signs are where magnitudes are. FP8: of 32 columns,
// 8t + 4h + i is byte 16h + 4t + i.
//   -D FP8=  1: FP8, 0: NVFP4     -D WARPS=  1, 2, 4 or 8: that share a row     128 must divide kp
//   launch: <<<ceil(rows*WARPS/8), 256>>>
#include "lib/encode.cuh"
#include "lib/held.cuh"
#include "lib/stage.cuh"
#ifndef FP8
#define FP8 0
#endif
#ifndef WARPS
#define WARPS 8
#endif

// Four numbers of FP8, times f.
__device__ __forceinline__ unsigned four_e4m3(float4 v, float f) {
    unsigned h = 0;
    #pragma unroll
    for (int j = 0; j < 4; j++)
        h |= to_e4m3((&v.x)[j] * f) << (8 * j);
    return h;
}
// The e4m3 scale of a block whose largest magnitude is `top`, a sixteenth of what codes are
// multiplied by: at least the smallest one there is.
__device__ __forceinline__ unsigned block_scale(float top) {
    return max(to_e4m3(__fdiv_rn(top, 96.f)), 1u);
}

extern "C" __global__ void __launch_bounds__(256, 4)
        narrow(const float* __restrict__ x, const float* __restrict__ gain,
                unsigned char* y, unsigned char* s, float* scale, float eps,
                int rows, int n, int kp) {
    const int r = blockIdx.x * (8 / WARPS) + threadIdx.x / (32 * WARPS);
    const int lane = threadIdx.x % 32;
    const bool real = r < rows;
    HeldRow<WARPS> row;
    row.read(x + (size_t)(real ? r : 0) * n, gain, n);
    if (!real)
        return;
    const float2 f = chunk_scale(__uint_as_float(row.top));
    if (row.first == 0) {
        const float whole = FP8 ? f.y * 128.f : f.y * 16.f;
        const float by = row.top < 0x7F800000u ? whole
                                               : __uint_as_float(0x7FC00000u);
        scale[r] = gain ? by * rsqrtf(row.sum / n + eps) : by;
    }
    row.each(kp, [&](int i, float4 v) {
        if (FP8) {
            const unsigned h = four_e4m3(v, f.x * .0078125f);
            const int at = i / 32 * 32 + i / 4 % 2 * 16 + i % 32 / 8 * 4;
            if (i < kp)
                *(unsigned*)(y + (size_t)r * kp + at) = h;
            return;
        }
        float top = 0.f;
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            float& q = (&v.x)[j];
            q *= f.x;
            top = fmaxf(top, fabsf(q));
        }
        for (int m = 2; m; m >>= 1)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
        const unsigned e = block_scale(top);
        const float by = __fdiv_rn(.0625f, of_e4m3(e));
        unsigned h = 0;
        #pragma unroll
        for (int j = 0; j < 4; j++)
            h |= to_e2m1((&v.x)[j] * by) << (8 * j);
        h <<= lane % 2 * 4;
        h |= __shfl_xor_sync(~0u, h, 1);
        if (i >= kp)
            return;
        if (lane % 2 == 0)
            *(unsigned*)(y + (size_t)r * (kp / 2) + i / 2) = h;
        if (lane % 4 == 0)
            s[(size_t)r * (kp / 16) + i / 16] = e;
    });
}
