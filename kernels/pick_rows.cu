// Some rows of an array, one below the other. A number that is no row gives zeros.
//   rows : [picks]      i32
//   x    : [total, n]   f32
//   y    : [picks, n]   f32
//   launch: <<<(ceil(n/1024), picks), 256>>>
#include "lib/pdl.cuh"

extern "C" __global__ void __launch_bounds__(256)
        pick_rows(const int* rows, const float* x, float* y, int all, int n) {
    const int i = (blockIdx.x * 256 + threadIdx.x) * 4;
    pdl_trigger();
    pdl_wait();
    if (i >= n)
        return;
    const int r = rows[blockIdx.y];
    const bool real = r >= 0 && r < all;
    const float* from = x + (size_t)(real ? r : 0) * n + i;
    float* to = y + (size_t)blockIdx.y * n + i;
    if (n % 4 == 0)
        *(float4*)to = real ? *(const float4*)from
                            : make_float4(0.f, 0.f, 0.f, 0.f);
    else
        for (int j = 0; j < 4 && i + j < n; j++)
            to[j] = real ? from[j] : 0.f;
}
