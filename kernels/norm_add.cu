// What comes back from a layer joins the stream: y = (norm(z) * w + add) * scale, norm(x) = x /
// sqrt(mean(x*x) + eps), where z is a, or of two layers side by side norm(a) * wa + norm(b) * wb. A
// block a row, which it holds in registers; gains are there before it waits.
//   a         : [rows, n]   f32
//   b         : [rows, n]   f32   BOTH 1; or null
//   wa, wb    : [n]         f32   BOTH 1; or null
//   w         : [n]         f32
//   add       : [rows, n]   f32
//   scale     : [one]       f32   or null
//   y         : [rows, n]   f32   may be any of the others
//   -D BOTH= 0 or 1
//   -D THREADS= PER=   of lib/row.cuh
//   launch: <<<rows, THREADS>>>
#include "lib/pdl.cuh"
#include "lib/row.cuh"
#ifndef BOTH
#define BOTH 1
#endif

extern "C" __global__ void __launch_bounds__(THREADS) norm_add(
        const float* a, const float* b, const float* __restrict__ wa,
        const float* __restrict__ wb, const float* __restrict__ w,
        const float* add, const float* __restrict__ scale, float* y, float eps,
        int n) {
    __shared__ __align__(16) float part[3][32];
    const size_t at = (size_t)blockIdx.x * n;
    const float share = 1.f / n, by = scale ? scale[0] : 1.f;
    Row x, z, r, g, ga, gb;
    g.load(w, n);
    if (BOTH) {
        ga.load(wa, n);
        gb.load(wb, n);
    }
    pdl_trigger();
    pdl_wait();

    x.load(a + at, n);
    if (BOTH)
        z.load(b + at, n);
    r.load(add + at, n);
    if (BOTH) {
        float s[2] = {x.squares(), z.squares()};
        row_sums(s, part);
        const float ia = rsqrtf(fmaf(s[0], share, eps));
        const float ib = rsqrtf(fmaf(s[1], share, eps));
        #pragma unroll
        for (int i = 0; i < 4 * PER; i++)
            x.at(i) = fmaf(
                    __fmul_rn(x.at(i), ia), ga.at(i),
                    __fmul_rn(__fmul_rn(z.at(i), ib), gb.at(i)));
    }
    float s[1] = {x.squares()};
    row_sums(s, part + 2);
    const float inv = rsqrtf(fmaf(s[0], share, eps));
    #pragma unroll
    for (int i = 0; i < 4 * PER; i++)
        x.at(i) = __fmul_rn(fmaf(__fmul_rn(x.at(i), inv), g.at(i), r.at(i)), by);
    x.store(y + at, n);
}
