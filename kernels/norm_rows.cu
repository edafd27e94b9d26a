// y = (x / sqrt(mean(x*x) + eps) * w + add) * scale, the mean over a whole row or over each of some
// groups of it: a decode step's norm that no projection follows. A block a row and group.
//   x     : [rows, n]   f32
//   w     : [n]         f32   or null: ones
//   add   : [rows, n]   f32   or null; may be y
//   scale : [one]       f32   or null
//   y     : [rows, n]   f32   may be x
//   launch: <<<(groups, rows), 256>>>, groups divides n; where 4 divides what is left a thread
//        moves 16 bytes at a time
#include "lib/ahead.cuh"
#include "lib/pdl.cuh"
#include "lib/rms.cuh"

__device__ __forceinline__ float normed(
        float x, float inv, float w, float add, float scale) {
    return __fmul_rn(fmaf(__fmul_rn(x, inv), w, add), scale);
}

extern "C" __global__ void __launch_bounds__(256) norm_rows(
        const float* x, const float* __restrict__ w, const float* add,
        const float* __restrict__ scale, float* y, float eps, int n) {
    const int size = n / gridDim.x;
    const size_t at = (size_t)blockIdx.y * n + (size_t)blockIdx.x * size;
    if (w)
        w += (size_t)blockIdx.x * size;
    x += at;
    y += at;
    if (add)
        add += at;
    // the same for all threads of a block
    const bool wide = size % 4 == 0
            && ((size_t)x | (size_t)y | (size_t)w | (size_t)add) % 16 == 0;
    const float by = scale ? scale[0] : 1.f;
    if (w)
        ahead((const unsigned char*)w, size / 4, threadIdx.x, 256);
    pdl_trigger();
    pdl_wait();
    NormRow row;
    const float inv = row.inverse(x, size, wide, eps);
    const float4 one = make_float4(1.f, 1.f, 1.f, 1.f);
    const float4 zero = make_float4(0.f, 0.f, 0.f, 0.f);
    row.each([&](int i, float4 v) {
        const float4 g = w ? ((const float4*)w)[i] : one;
        const float4 a = add ? ((const float4*)add)[i] : zero;
        ((float4*)y)[i] = make_float4(
                normed(v.x, inv, g.x, a.x, by), normed(v.y, inv, g.y, a.y, by),
                normed(v.z, inv, g.z, a.z, by), normed(v.w, inv, g.w, a.w, by));
    });
    for (int i = row.n4 * 4 + threadIdx.x; i < size; i += 256)
        y[i] = normed(x[i], inv, w ? w[i] : 1.f, add ? add[i] : 0.f, by);
}
