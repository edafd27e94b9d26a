#pragma once
// What a recurrent layer's prefill ends with: its result, four numbers at a time, and the gates.
// KIND: 1: silu, 2: sigmoid, after the norm; 3: silu, before the norm
template <int KIND> __device__ __forceinline__ float4 gates(float4 g) {
    #pragma unroll
    for (int j = 0; j < 4; j++) {
        const float x = (&g.x)[j];
        const float s = 1.f / (1.f + expf(-x));
        (&g.x)[j] = KIND == 2 ? s : x * s;
    }
    return g;
}
__device__ __forceinline__ float4 times(float4 a, float4 b) {
    return make_float4(a.x * b.x, a.y * b.y, a.z * b.z, a.w * b.w);
}
__device__ __forceinline__ float square(float4 a) {
    return a.x * a.x + a.y * a.y + a.z * a.z + a.w * a.w;
}
// Four gates of a row, which need not lie at multiples of 16 bytes
__device__ __forceinline__ float4 four_of(const float* z, bool wide) {
    return wide ? *(const float4*)z : make_float4(z[0], z[1], z[2], z[3]);
}
