// Some rows of an array, one below the other, and the same rows of another one. A number that is no
// row gives zeros.
//   rows : [picks]      i32
//   x    : [total, n]   f32
//   also : [total, m]   f32   or null
//   y    : [picks, n]   f32
//   z    : [picks, m]   f32   those of `also`; or null
//   launch: <<<(ceil(n/1024) + ceil(m/1024), picks), 256>>>
#include "lib/pdl.cuh"

extern "C" __global__ void __launch_bounds__(256)
        pick_rows(const int* rows, const float* x, const float* also, float* y,
                float* z, int all, int n, int m) {
    const int blocks = (n + 1023) / 1024;  // of x
    const bool second = (int)blockIdx.x >= blocks;
    const int size = second ? m : n;
    const int block = blockIdx.x - (second ? blocks : 0);
    const int i = (block * 256 + threadIdx.x) * 4;
    pdl_trigger();
    pdl_wait();
    if (i >= size)
        return;
    const int r = rows[blockIdx.y];
    const bool real = r >= 0 && r < all;
    const float* from = (second ? also : x) + (size_t)(real ? r : 0) * size + i;
    float* to = (second ? z : y) + (size_t)blockIdx.y * size + i;
    if (size % 4 == 0)
        *(float4*)to = real ? *(const float4*)from
                            : make_float4(0.f, 0.f, 0.f, 0.f);
    else
        for (int j = 0; j < 4 && i + j < size; j++)
            to[j] = real ? from[j] : 0.f;
}
