// Rows of the embedding: x = scale * w[id]. An id outside the table gives zeros (the host refuses such ids; padding rows have -1).
//   ids : [rows]       i32
//   w   : [v, n]       bf16
//   x   : [rows, n]    f32
//   launch: <<<(ceil(n/1024), rows), 128>>>, 8 divides n
#include "lib/pdl.cuh"

extern "C" __global__ void __launch_bounds__(128) embed(const int* ids, const unsigned short* __restrict__ w, float* x, float scale, int n, int v) {
    const int i = (blockIdx.x * 128 + threadIdx.x) * 8, t = blockIdx.y;
    pdl_trigger();
    pdl_wait();
    if (i >= n) return;
    const int id = ids[t];
    const uint4 raw = id >= 0 && id < v ? *(const uint4*)(w + (size_t)id * n + i) : make_uint4(0, 0, 0, 0);
    #pragma unroll
    for (int j = 0; j < 4; j++) {
        const unsigned u = (&raw.x)[j];
        *(float2*)(x + (size_t)t * n + i + 2 * j) = make_float2(__uint_as_float(u << 16) * scale, __uint_as_float(u & 0xFFFF0000u) * scale);
    }
}
