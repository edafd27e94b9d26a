// Numbers that a thread has to itself, at whole lines of the cache.
#pragma once
#include <cstdlib>

struct Room {
    float* held = nullptr;
    long size = 0;
    float* of(long n) {
        if (size >= n)
            return held;
        free(held);
        size = (n + 15) / 16 * 16;
        return held = (float*)aligned_alloc(64, size * 4);
    }
    ~Room() { free(held); }
};
