#pragma once
// A row as experts_wide.cu multiplies it, left for all of its blocks by router.cu: fp16 in four
// parts (eights v, v + 4, ... of its columns lie together), then of each 128 columns the power of
// two by which they are to be multiplied, and of each 256 the sum of squares.
template <int K> struct ReadyRow {
    // of a row, and of a quarter
    static constexpr int SIXTEENS = K / 8, PART = K / 32;
    static constexpr int POWERS = 2 * K;
    static constexpr int SQUARES = POWERS + K / 32;
    static constexpr int BYTES = SQUARES + K / 64;
    static_assert(K % 1024 == 0, "rows begin where 16 bytes do");
};
