// Packed rows in fewer bits, by the rules of atlas.ground.formats: NVFP4 with a global scale for
// each row, or FP8 with a scale for each row.
//   w   : [n4, w_bytes]       u8    Packed.raw
//   s   : [s_rows, s_bytes]   u8    or null
//   to  : [n4, to_bytes]      u8    codes
//   ts  : [t_rows, t_bytes]   u8    their scales: nvfp4 [n4/4, 8*chunks], fp8 [n4, 4]
//   tgs : [n4]                f32   nvfp4: global scales; or null
//   -D FROM=  a way to decode of lib/decode.cuh    -D FP8=  1: to fp8, 0: to nvfp4
//   launch: <<<n4, 256>>>
#include "lib/decode.cuh"
#include "lib/encode.cuh"
#ifndef FROM
#define FROM decode_bf16
#endif
#ifndef FP8
#define FP8 0
#endif

extern "C" __global__ void __launch_bounds__(256) quantize(
        const unsigned char* __restrict__ w, const unsigned char* __restrict__ s,
        unsigned char* __restrict__ to, unsigned char* __restrict__ ts,
        float* __restrict__ tgs, int chunks) {
    __shared__ float tops[8];
    const size_t row = blockIdx.x;
    float top = 0.f;
    for (int v = threadIdx.x; v < chunks * 4; v += 256) {
        float a[8];
        FROM::get(w, s, nullptr, row, chunks, v, a);
        top = fmaxf(top, top8(a));
    }
    for (int m = 16; m; m >>= 1)
        top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
    if (threadIdx.x % 32 == 0)
        tops[threadIdx.x / 32] = top;
    __syncthreads();
    for (int i = 0; i < 8; i++)
        top = fmaxf(top, tops[i]);
    float unit = FP8 ? top / 448.f : top / 2688.f;
    if (!(unit > 0.f))
        unit = 1.f;
    if (!threadIdx.x) {
        if (FP8)
            ((float*)ts)[row] = unit;
        else
            tgs[row] = unit;
    }
    for (int v = threadIdx.x; v < chunks * 2; v += 256) {  // sixteen weights
        float a[16], most = 0.f;
        FROM::get(w, s, nullptr, row, chunks, 2 * v, a);
        FROM::get(w, s, nullptr, row, chunks, 2 * v + 1, a + 8);
        if (FP8) {
            unsigned h[4] = {};
            for (int i = 0; i < 16; i++)
                h[i / 4] |= to_e4m3(a[i] / unit) << (8 * (i % 4));
            ((uint4*)to)[row * chunks * 2 + v] = make_uint4(
                    h[0], h[1], h[2], h[3]);
            continue;
        }
        for (int i = 0; i < 16; i++)
            most = fmaxf(most, fabsf(a[i]));
        float f = most / 6.f / unit;
        if (f == 0.f)
            f = 1.f;
        const unsigned e = to_e4m3(fminf(fmaxf(f, .001953125f), 448.f));
        const float by = of_e4m3(e) * unit;
        ts[((row / 4 * chunks + v / 2) * 4 + row % 4) * 2 + v % 2] = e;
        unsigned h[2] = {};
        for (int i = 0; i < 16; i++) {
            const unsigned c = to_e2m1(a[i] / by), j = i % 4;
            h[i / 8] |= (i % 8 < 4 ? (c >> 3) << 7 | (c & 7u) << 1
                                   : c >> 3 | (c & 7u) << 4)
                    << (8 * j);
        }
        ((uint2*)to)[row * chunks * 2 + v] = make_uint2(h[0], h[1]);
    }
}
