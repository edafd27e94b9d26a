#pragma once
// The middle of an MLP, float32: act(gate) * up, as atlas.ops.linear.ACTS. Products are written
// out, so that no compiler fuses them differently from variant to variant.
#define ACT_NONE 0
#define ACT_SILU 1
#define ACT_GELU 2    // by tanh
#define ACT_OAI 3  // clipped at `limit`, gate * sigmoid(1.702 gate) * (up + 1)
#define ACT_RELU2 4  // of one number

// QUICK: by what the card has for it, right to some 2^-20: for results of products of fp16, which
// are many, and known to 2^-11.
template <bool QUICK = false>
__device__ __forceinline__ float times_sigmoid(float x, float y) {
    return QUICK ? __fdividef(x, 1.f + __expf(-y)) : x / (1.f + expf(-y));
}

template <int KIND, bool QUICK = false>
__device__ __forceinline__ float act_mul(float g, float u, float limit) {
    if (KIND == ACT_SILU)
        return __fmul_rn(times_sigmoid<QUICK>(g, g), u);
    if (KIND == ACT_GELU)
        return __fmul_rn(
                times_sigmoid<QUICK>(
                        g,
                        __fmul_rn(
                                g,
                                fmaf(__fmul_rn(0.0713548163f, g), g,
                                        1.59576912f))),
                u);
    if (KIND == ACT_OAI) {
        g = g > limit ? limit : g;  // asked so that a NaN stays one
        u = u > limit ? limit : u < -limit ? -limit : u;
        return __fmul_rn(times_sigmoid<QUICK>(g, __fmul_rn(1.702f, g)), u + 1.f);
    }
    g = g < 0.f ? 0.f : g;
    return __fmul_rn(g, g);
}
