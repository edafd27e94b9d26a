// Rows of the embedding: x = scale * w[id], for w of every format. An id outside the table gives
// zeros (the host refuses such ids; padding rows have -1).
//   ids : [rows]           i32
//   w   : [v4, w_bytes]    u8    Packed.raw; columns are padded to 32*chunks
//   s   : [s_rows, s_bytes] u8   or null
//   gs  : [v4]             f32   or null
//   x   : [rows, n]        f32
//   -D FORMAT=  a way to decode of lib/decode.cuh
//   launch: <<<(ceil(n/1024), rows), 128>>>
#include "lib/decode.cuh"
#include "lib/pdl.cuh"
#ifndef FORMAT
#define FORMAT decode_bf16
#endif

extern "C" __global__ void __launch_bounds__(128)
        embed(const int* ids, const unsigned char* __restrict__ w,
                const unsigned char* __restrict__ s, const float* __restrict__ gs,
                float* x, float scale, int n, int v) {
    const int i = blockIdx.x * 128 + threadIdx.x, t = blockIdx.y;
    pdl_trigger();
    pdl_wait();
    if (i * 8 >= n)
        return;
    const int id = ids[t];
    float a[8] = {};
    if (id >= 0 && id < v)
        FORMAT::get(w, s, gs, id, (n + 31) / 32, i, a);
    float* to = x + (size_t)t * n + i * 8;
    if (n % 4 == 0 && i * 8 + 8 <= n) {
        ((float4*)to)[0] = make_float4(
                a[0] * scale, a[1] * scale, a[2] * scale, a[3] * scale);
        ((float4*)to)[1] = make_float4(
                a[4] * scale, a[5] * scale, a[6] * scale, a[7] * scale);
    } else
        for (int j = 0; j < 8 && i * 8 + j < n; j++)
            to[j] = a[j] * scale;
}
