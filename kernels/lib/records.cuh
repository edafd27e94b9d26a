#pragma once
// What the blocks of a row's pieces give one another while all are running (lib/given.cuh): a
// record of twelve words for eight elements of a head: the weighted values, the piece's largest
// score and its sum of weights. Whoever takes waits, so all blocks must run at the same time, and
// empties what it has taken.
#include "lib/given.cuh"
#include "lib/pieces.cuh"
constexpr int RECORD = 12;

// Four elements of a row from the records of its pieces, at most eight, added as attn_merge.cu does
// it, bit for bit. `p`: where the four are in the first piece's record, `odd`: are they the later
// half of its eight? Pieces are `step` words apart. Waits until the records are there, and empties
// them.
__device__ __forceinline__ float4 merged(
        float* p, int odd, size_t step, int count, float sink) {
    float2 w[8];
    float4 x[8], v = make_float4(0.f, 0.f, 0.f, 0.f);
    bool ready;
    do {
        ready = true;
        #pragma unroll
        for (int i = 0; i < 8; i++) {
            w[i] = i < count ? peek2(p + i * step + 8 - 4 * odd)
                             : make_float2(NONE, 0.f);
            x[i] = i < count ? peek4(p + i * step) : v;
        }
        #pragma unroll
        for (int i = 0; i < 8; i++)
            ready = ready && there(w[i].x) && there(w[i].y) && there(x[i].x)
                    && there(x[i].y) && there(x[i].z) && there(x[i].w);
#if !defined(__CUDA_ARCH__)
        if (!ready)
            __nanosleep(0);
#endif
    } while (!ready);
    float base = sink;
    #pragma unroll
    for (int i = 0; i < 8; i++)
        base = fmaxf(base, w[i].x);
    if (base == NONE)
        base = 0.f;  // nothing but NaN
    float all = exp2f(__fsub_rn(sink, base));
    #pragma unroll
    for (int i = 0; i < 8; i++) {
        const float e = exp2f(__fsub_rn(w[i].x, base));
        all = fmaf(e, w[i].y, all);
        v.x = fmaf(e, x[i].x, v.x);
        v.y = fmaf(e, x[i].y, v.y);
        v.z = fmaf(e, x[i].z, v.z);
        v.w = fmaf(e, x[i].w, v.w);
    }
    __syncwarp();  // two lanes read a piece's words
    #pragma unroll
    for (int i = 0; i < 8; i++)
        if (i < count) {
            emptied(p + i * step, 4);
            if (!odd)
                emptied(p + i * step + 8, 2);
        }
    return make_float4(
            (v.x + 0.f) / all, (v.y + 0.f) / all, (v.z + 0.f) / all,
            (v.w + 0.f) / all);
}
