// Rows of two arrays side by side, each normed where it has a gain: what a head that drafts is
// given. A block a row of an array; its norm has the bits of norm_rows, and after another one, too,
// where 4 divides n and m.
//   a  : [rows, n]      f32
//   b  : [rows, m]      f32
//   wa : [n]            f32   gain of the norm of a; or null: a as it is
//   wb : [m]            f32   likewise of b; or null
//   first : [m]         f32   gain of a norm of b before that; or null
//   y  : [rows, width]  f32   n + m columns
//   launch: <<<(2, rows), 256>>>; where 4 divides n and m a thread moves 16 bytes at a time
#include "lib/ahead.cuh"
#include "lib/pdl.cuh"
#include "lib/rms.cuh"

// as norm_rows, the sign of a zero included
__device__ __forceinline__ float normed(float x, float inv, float w) {
    return fmaf(__fmul_rn(x, inv), w, 0.f);
}

extern "C" __global__ void __launch_bounds__(256)
        beside(const float* a, const float* b, const float* __restrict__ wa,
                const float* __restrict__ wb, const float* __restrict__ first,
                float* y, float ea, float eb, float ef, int n, int m) {
    const bool second = blockIdx.x;
    const int size = second ? m : n;
    const float* x = (second ? b : a) + (size_t)blockIdx.y * size;
    const float* w = second ? wb : wa;
    const float* const before = second ? first : nullptr;
    y += (size_t)blockIdx.y * (n + m) + (second ? n : 0);
    // the same for all threads of a block
    const bool gains = ((size_t)w | (size_t)before) % 16 == 0;
    bool wide = size % 4 == 0 && gains && (size_t)x % 16 == 0;
    // 16 bytes can be written at a time, too
    const bool whole = wide && (size_t)y % 16 == 0;
    const int n4 = whole ? size / 4 : 0;
    if (w)
        ahead((const unsigned char*)w, size / 4, threadIdx.x, 256);
    if (before)
        ahead((const unsigned char*)before, size / 4, threadIdx.x, 256);
    pdl_trigger();
    pdl_wait();
    if (!w) {
        for (int i = threadIdx.x; i < n4; i += 256)
            ((float4*)y)[i] = ((const float4*)x)[i];
        for (int i = n4 * 4 + threadIdx.x; i < size; i += 256)
            y[i] = x[i];
        return;
    }
    // a thread finds what it has written the first time itself
    #pragma unroll 1
    for (int turn = before ? 0 : 1; turn < 2; turn++) {
        const float* const gain = turn ? w : before;
        NormRow row;
        const float inv = row.inverse(
                x, size, wide, !turn ? ef : second ? eb : ea);
        if (whole)
            row.each([&](int i, float4 v) {
                const float4 g = ((const float4*)gain)[i];
                ((float4*)y)[i] = make_float4(
                        normed(v.x, inv, g.x), normed(v.y, inv, g.y),
                        normed(v.z, inv, g.z), normed(v.w, inv, g.w));
            });
        for (int i = n4 * 4 + threadIdx.x; i < size; i += 256)
            y[i] = normed(x[i], inv, gain[i]);
        x = y;
        wide = whole;
    }
}
