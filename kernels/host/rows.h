// What is done to rows of float32 numbers between two products: norms,
// activations, rotation. Eight numbers at a time, and those at a row's end with
// zeros behind them, so that the place of a number in its row changes no bit.
#pragma once
#include <algorithm>
#include <cmath>
#include "vector.h"

// Up to eight numbers, zeros behind
INLINE f8 some(const float* p, long rest) {
    if (rest >= 8)
        return load<f8>(p);
    f8 v = {};
    memcpy(&v, p, rest * 4);
    return v;
}
INLINE void put(float* p, f8 v, long rest) {
    memcpy(p, &v, 4 * std::min(rest, 8L));
}

INLINE f8 larger(f8 a, f8 b) { return where(a > b, a, b); }

// e^x to the last bit or two: 2^n times a series in the rest. What would leave
// float32's range stops short of it; NaN stays
INLINE f8 exp8(f8 x) {
    x = where(x > all(88), all(88), x);
    x = where(x < all(-87), all(-87), x);
    // N in the last bits
    f8 shifted = fma(x, all(1.44269504f), all(12582912.f));
    f8 n = shifted - all(12582912.f);
    f8 r = fma(n, all(-.693359375f), x);
    r = fma(n, all(2.12194440e-4f), r);
    const float over[] = {
            1.f / 5040, 1.f / 720, 1.f / 120, 1.f / 24, 1.f / 6, .5f, 1, 1};
    f8 y = all(over[0]);
    #pragma GCC unroll 16
    for (int i = 1; i < 8; i++)
        y = fma(y, r, all(over[i]));
    return (f8)((i8)y + ((i8)shifted << 23));
}

INLINE f8 times_sigmoid(f8 x, f8 y) { return x / (all(1) + exp8(-y)); }

// 1 over the root of the mean square of n numbers, upside down
static float rms(const float* x, long n, float eps) {
    f8 s[2] = {};
    long i = 0;
    for (; i + 16 <= n; i += 16)
        #pragma GCC unroll 16
        for (int j = 0; j < 2; j++) {
            f8 v = load<f8>(x + i + 8 * j);
            s[j] = fma(v, v, s[j]);
        }
    for (; i < n; i += 8) {
        f8 v = some(x + i, n - i);
        s[0] = fma(v, v, s[0]);
    }
    return std::sqrt(sum(s[0] + s[1]) / n + eps);
}

// y may be x. `gain` null: 1
static void norm(const float* x, const float* gain, float eps, float* y, long n) {
    f8 r = all(rms(x, n, eps));
    for (long i = 0; i < n; i += 8) {
        f8 v = some(x + i, n - i) / r;
        put(y + i, gain ? v * some(gain + i, n - i) : v, n - i);
    }
}

// As `ACTS` of atlas.ops.linear has them
enum Act { NONE, SILU, GELU_TANH, SWIGLU_OAI, RELU2 };

INLINE f8 gelu(f8 x) {
    const float c = 1.5957691216f;  // 2 sqrt(2/pi)
    return times_sigmoid(x, x * (all(c) + all(c * .044715f) * x * x));
}

INLINE f8 act_mul(Act act, f8 g, f8 u, f8 limit) {
    if (act == SILU)
        return times_sigmoid(g, g) * u;
    if (act == GELU_TANH)
        return gelu(g) * u;
    if (act == SWIGLU_OAI) {
        g = where(g > limit, limit, g);
        u = where(u > limit, limit, u);
        u = where(u < -limit, -limit, u);
        return times_sigmoid(g, all(1.702f) * g) * (u + all(1));
    }
    g = where(g < all(0), all(0), g);
    return g * g;
}

// n gates and n factors; of RELU2 the gates alone
static void activate(Act act, float limit, const float* gate, float* y, long n) {
    const float* up = act == RELU2 ? gate : gate + n;
    for (long i = 0; i < n; i += 8) {
        f8 v = act_mul(
                act, some(gate + i, n - i), some(up + i, n - i), all(limit));
        put(y + i, v, n - i);
    }
}

static void add_to(float* y, const float* x, long n) {
    for (long i = 0; i < n; i += 8)
        put(y + i, some(y + i, n - i) + some(x + i, n - i), n - i);
}

// Pairs (x[i], x[i+half]) of a head, turned by their angles
static void rotate(float* x, const float* cos, const float* sin, long half) {
    for (long i = 0; i < half; i += 8) {
        long rest = half - i;
        f8 a = some(x + i, rest);
        f8 b = some(x + half + i, rest);
        f8 c = some(cos + i, rest);
        f8 s = some(sin + i, rest);
        put(x + i, a * c - b * s, rest);
        put(x + half + i, b * c + a * s, rest);
    }
}
