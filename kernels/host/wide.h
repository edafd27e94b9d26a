// Eight numbers where a register has four: what vector.h does with the compiler's
// vectors of eight, which would stay in memory there. The one thing that has no
// name here is `a > b ? x : y`.
#pragma once

// Two registers
template <class V> struct Wide {
    V low, high;
    auto operator[](int i) const { return i < 4 ? low[i] : high[i - 4]; }
    template <class U> explicit operator Wide<U>() const {
        return {(U)low, (U)high};
    }
};
template <class V> Wide(V, V) -> Wide<V>;

#define EACH(op) \
    template <class V> INLINE auto operator op(Wide<V> a, Wide<V> b) { \
        return Wide{a.low op b.low, a.high op b.high}; \
    } \
    template <class V> INLINE auto operator op(Wide<V> a, int b) { \
        return Wide{a.low op b, a.high op b}; \
    }
EACH(+)
EACH(-)
EACH(*)
EACH(/)
EACH(&)
EACH(|)
EACH(<<)
EACH(>>)
EACH(<)
EACH(>)
EACH(==)
EACH(!=)

template <class V> INLINE Wide<V> operator-(Wide<V> a) {
    return {-a.low, -a.high};
}
template <class V> INLINE Wide<V>& operator+=(Wide<V>& a, Wide<V> b) {
    return a = a + b;
}
template <class V> INLINE Wide<V>& operator*=(Wide<V>& a, Wide<V> b) {
    return a = a * b;
}
template <class V> INLINE Wide<V>& operator|=(Wide<V>& a, Wide<V> b) {
    return a = a | b;
}
typedef Wide<f4> f8;
typedef Wide<int32_t __attribute__((vector_size(16)))> i8;
