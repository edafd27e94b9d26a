// What the rows of a matrix are to be multiplied by after a product in which the largest of a row
// was brought near the top of fp16 (lib/unpack.cuh). Run once, when weights are loaded.
//   w    : [rows, bytes]   u8    a row's weights as packed
//   s    : [scales]        u8    all scales as packed; or null
//   unit : [rows]          f32   bf16, f32: a power of two that brings the largest into [1, 2)
//                                times 2^-14; mxfp4: its largest scale; fp8_block: the power of two
//                                below it
//   -D FMT=  bf16, f32, mxfp4 or fp8_block
//   launch: <<<rows, 128>>>
#include "lib/unpack.cuh"
#ifndef FMT
#define FMT bf16
#endif

extern "C" __global__ void __launch_bounds__(128)
        units(const unsigned char* __restrict__ w,
                const unsigned char* __restrict__ s, float* unit, int bytes) {
    __shared__ float part[4];
    const int r = blockIdx.x;
    float top = 0.f;
    for (int i = threadIdx.x;; i += 128) {
        const unsigned char* mine = w + (size_t)r * bytes;
        const float v = weights::FMT::piece(mine, s, r, bytes, i);
        if (v == -1.f)
            break;
        top = fmaxf(top, v);
    }
    for (int m = 16; m; m >>= 1)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = top;
    __syncthreads();
    if (threadIdx.x)
        return;
    top = fmaxf(fmaxf(part[0], part[1]), fmaxf(part[2], part[3]));
    unit[r] = weights::FMT::unit_of(top);
}
