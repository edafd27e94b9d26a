#pragma once
// Weights of every format on their way to a tensor core: eight of a row become four pairs of fp16
// (lib/formats.cuh).
//   BYTES  of eight weights       SCALE  bytes of the scales of a row and chunk of 32; 0: none, -1:
//          a float32 for 128 weights
#include "lib/formats.cuh"

template <class F> struct Unpack : F {
    static constexpr int BYTES = F::CHUNK / 4;
    static constexpr int SCALE = F::TILE ? -1 : F::SCALE;
};
namespace weights {
#define NAMED(f) typedef Unpack<formats::f> f;
EACH_FORMAT(NAMED)
#undef NAMED
typedef fp8_tiled fp8_block;
}  // namespace weights
