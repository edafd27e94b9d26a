#pragma once
// Logits as integers that say which is larger, and where it stands: a maximum needs no more.
typedef unsigned long long u64;

// An integer that is larger for a larger float. -0 is 0.
__device__ __forceinline__ unsigned float_key(float x) {
    const unsigned u = __float_as_uint(x + 0.f);
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
__device__ __forceinline__ float key_float(unsigned k) {
    return __uint_as_float(k & 0x80000000u ? k & 0x7FFFFFFFu : ~k);
}
__device__ __forceinline__ bool not_finite(float x) {
    return (__float_as_uint(x) & 0x7F800000u) == 0x7F800000u;
}
// What a row is known by whose logits are not all finite: larger than the key of any that is.
__device__ __forceinline__ unsigned logit_key(float x) {
    return not_finite(x) ? ~0u : float_key(x);
}
// Among equal floats the lower id has the larger key.
__device__ __forceinline__ u64 keyed(unsigned key, unsigned id) {
    return (u64)key << 32 | (unsigned)~id;
}
__device__ __forceinline__ u64 best_key(float x, int id) {
    return keyed(float_key(x), id);
}
