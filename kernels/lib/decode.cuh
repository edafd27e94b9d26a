#pragma once
// Eight weights of one row as float32: columns 8v to 8v+7 of row `row` of a Packed matrix with C
// chunks a row. For tables and conversions; what multiplies has its own ways (lib/fragment.cuh).
#include "lib/formats.cuh"

template <class F> struct Decode {
    static __device__ __forceinline__ void get(
            Bytes w, Bytes s, const float* gs, size_t row, int C, int v,
            float* a) {
        F::floats(w, s, gs, row, C, v, a);
    }
};
#define NAMED(f) typedef Decode<formats::f> decode_##f;
EACH_FORMAT(NAMED)
#undef NAMED
