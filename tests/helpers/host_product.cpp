// The processor's products for one that no Python runs on here: matrices, gains of a norm and rows
// of x from standard input, rows of y to standard output (tests/test_host_kernel.py)
#include "linear.cpp"
#include <cstdio>

struct Asked {
    long bytes[3], rows, threads, act;  // bytes: of codes, scales and zero points
    Matrix m;
};

template <class T> static std::vector<T> taken(long n) {
    std::vector<T> v(n);
    if (n && fread(v.data(), sizeof(T), n, stdin) != (size_t)n)
        exit(1);
    return v;
}

int main() {
    Asked a;
    while (fread(&a, sizeof a, 1, stdin)) {
        auto data = taken<uint8_t>(a.bytes[0]);
        auto scale = taken<uint8_t>(a.bytes[1]),
             zero = taken<uint8_t>(a.bytes[2]);
        auto gain = taken<float>(a.m.k), x = taken<float>(a.rows * a.m.k);
        std::vector<float> y(a.rows * (a.act ? a.m.n / 2 : a.m.n));
        a.m.data = data.data(), a.m.scale = scale.data(), a.m.zero = zero.data();
        Product p = {&a.m, nullptr, a.act ? gain.data() : nullptr, nullptr, 1,
                a.m.n, a.act, 1e-6f, 7};
        product(&p, x.data(), nullptr, y.data(), a.rows, a.m.k, a.threads);
        fwrite(y.data(), 4, y.size(), stdout);
    }
}
