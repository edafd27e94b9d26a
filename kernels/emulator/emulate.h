#pragma once
// CUDA C++ on a CPU, for tests: the threads of a block are fibers of one thread of
// the host, which take turns at barriers and warp primitives. Slow and exact about
// who waits for whom; blocks run one after the other, so no block may wait for
// another one.
// This is what a kernel is compiled with, and so as little as it needs: what the
// fibers do is in runtime.h, compiled once for all kernels. The C functions alone: a
// third of a kernel's compilation would go into the C++ overloads of <cmath>, which
// device code does not use.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <type_traits>
#include <utility>

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __shared__ static
#define __forceinline__ inline
#define __noinline__
#define __restrict__
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
#define DYNAMIC_SHARED(type, name) type* name = (type*)emu::dynamic

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
};
// clang-format off: it takes uses of a macro for one declaration
#define EMU_VEC2(T, V, A) \
    struct alignas(A) V { \
        T x, y; \
    }; \
    inline V make_##V(T x, T y) { return {x, y}; }
#define EMU_VEC4(T, V, A) \
    struct alignas(A) V { \
        T x, y, z, w; \
    }; \
    inline V make_##V(T x, T y, T z, T w) { return {x, y, z, w}; }
EMU_VEC2(float, float2, 8)
EMU_VEC4(float, float4, 16)
EMU_VEC2(unsigned, uint2, 8)
EMU_VEC4(unsigned, uint4, 16)
EMU_VEC2(int, int2, 8)
EMU_VEC4(int, int4, 16)
EMU_VEC2(unsigned short, ushort2, 4)
EMU_VEC4(unsigned short, ushort4, 8)
EMU_VEC2(unsigned char, uchar2, 2)
EMU_VEC4(unsigned char, uchar4, 4)
EMU_VEC2(double, double2, 16)
EMU_VEC2(unsigned long long, ulonglong2, 16)
EMU_VEC2(long long, longlong2, 16)
EMU_VEC2(short, short2, 4)
EMU_VEC4(signed char, char4, 4)
// clang-format on
struct float3 {
    float x, y, z;
};
inline float3 make_float3(float x, float y, float z) { return {x, y, z}; }

// The fibers of a block: see runtime.h.
#pragma GCC visibility push(hidden)
namespace emu {
constexpr int WORDS = 8;  // 64-bit words that a lane shows its warp at once
extern int current;       // number of the thread that runs
extern uint3 thread, block;
extern dim3 size, grid;
extern unsigned long long progress;
alignas(128) extern unsigned char dynamic[232 << 10];
inline int lane() { return current % 32; }
void yield();
void barrier();
void barrier(int id, int count);  // of `count` threads
unsigned alive();  // lanes of this warp that have not ended
unsigned took();  // lanes of the exchange that this lane came from
// Every lane of `mask` shows `v`; returns what all have shown
const void* exchange(unsigned mask, const void* v, unsigned bytes);
template <class T> inline const T* gather(unsigned mask, const T& v) {
    static_assert(sizeof(T) <= WORDS * 8, "too much for one exchange");
    return (const T*)exchange(mask, &v, sizeof(T));
}
template <class T> inline T from(const T* all, int l) {
    const char* const there = (const char*)all + (size_t)l * WORDS * 8;
    T r;
    memcpy(&r, there, sizeof(T));
    return r;
}
void copy(void* to, const void* from, int bytes, bool on);  // beside the threads
void commit();
void wait(int newest);
void pdl_wait();
void pdl_trigger();
[[noreturn]] void trap();
const char* start(
        void (*body)(void*), void* argument, const unsigned* g, const unsigned* b,
        unsigned shared);

template <class... A, size_t... I>
inline void apply(void (*f)(A...), void** a, std::index_sequence<I...>) {
    f(*(std::remove_const_t<A>*)a[I]...);
}
template <class... A> struct Call {
    void (*f)(A...);
    void** a;
    static void go(void* self) {
        Call* c = (Call*)self;
        apply(c->f, c->a, std::index_sequence_for<A...>{});
    }
};
template <class... A>
inline const char* launch(
        void (*f)(A...), const unsigned* g, const unsigned* b, unsigned shared,
        void** args) {
    Call<A...> call{f, args};
    return start(Call<A...>::go, &call, g, b, shared);
}
}  // namespace emu
#pragma GCC visibility pop

#define threadIdx (emu::thread)
#define blockIdx (emu::block)
#define blockDim (emu::size)
#define gridDim (emu::grid)
#define warpSize 32

// Barriers, warp primitives, atomics.
inline void __syncthreads() { emu::barrier(); }
inline int __syncthreads_or(int p);
inline void __syncwarp(unsigned mask = ~0u) { emu::gather(mask, 0); }
template <class T>
inline T __shfl_sync(unsigned m, T v, int src, int width = 32) {
    auto* a = emu::gather(m, v);
    const int l = emu::lane(), own = width - 1;
    return emu::from(a, (l & ~own) + (src & own));
}
template <class T>
inline T __shfl_xor_sync(unsigned m, T v, int x, int width = 32) {
    auto* a = emu::gather(m, v);
    return emu::from(a, emu::lane() ^ x);
}
template <class T>
inline T __shfl_down_sync(unsigned m, T v, unsigned d, int width = 32) {
    auto* a = emu::gather(m, v);
    const int l = emu::lane();
    const bool here = l % width + (int)d < width;
    return emu::from(a, here ? l + d : l);
}
template <class T>
inline T __shfl_up_sync(unsigned m, T v, unsigned d, int width = 32) {
    auto* a = emu::gather(m, v);
    const int l = emu::lane();
    const bool here = l % width >= (int)d;
    return emu::from(a, here ? l - d : l);
}
inline unsigned __ballot_sync(unsigned m, int p) {
    auto* a = emu::gather(m, (int)(p != 0));
    unsigned r = 0;
    const unsigned t = emu::took();
    for (int i = 0; i < 32; i++)
        if (t >> i & 1 && emu::from(a, i))
            r |= 1u << i;
    return r;
}
inline int __any_sync(unsigned m, int p) { return __ballot_sync(m, p) != 0; }
inline int __all_sync(unsigned m, int p) { return __ballot_sync(m, !p) == 0; }
inline unsigned __activemask() { return emu::alive(); }
template <class T, class F> inline T emu_reduce(unsigned m, T v, F f) {
    auto* a = emu::gather(m, v);
    T r = v;
    const unsigned t = emu::took();
    for (int i = 0; i < 32; i++)
        if (t >> i & 1 && i != emu::lane())
            r = f(r, emu::from(a, i));
    return r;
}
template <class T> inline T __reduce_max_sync(unsigned m, T v) {
    return emu_reduce(m, v, [](T a, T b) { return a > b ? a : b; });
}
template <class T> inline T __reduce_min_sync(unsigned m, T v) {
    return emu_reduce(m, v, [](T a, T b) { return a < b ? a : b; });
}
template <class T> inline T __reduce_add_sync(unsigned m, T v) {
    return emu_reduce(m, v, [](T a, T b) { return (T)(a + b); });
}
template <class T> inline T __reduce_or_sync(unsigned m, T v) {
    return emu_reduce(m, v, [](T a, T b) { return (T)(a | b); });
}
template <class T> inline T __reduce_and_sync(unsigned m, T v) {
    return emu_reduce(m, v, [](T a, T b) { return (T)(a & b); });
}
template <class T> inline unsigned __match_any_sync(unsigned m, T v) {
    auto* a = emu::gather(m, v);
    unsigned r = 0;
    const unsigned t = emu::took();
    for (int i = 0; i < 32; i++)
        if (t >> i & 1 && emu::from(a, i) == v)
            r |= 1u << i;
    return r;
}
inline int emu_votes;
inline int __syncthreads_or(int p) {
    static int votes;
    if (p)
        votes = 1;
    emu::barrier();
    const int r = votes;
    emu::barrier();
    votes = 0;
    emu::barrier();
    return r;
}
inline int __syncthreads_and(int p) { return !__syncthreads_or(!p); }
inline int __syncthreads_count(int p) {
    static int n;
    if (p)
        n++;
    emu::barrier();
    const int r = n;
    emu::barrier();
    n = 0;
    emu::barrier();
    return r;
}
template <class T, class U> inline T atomicAdd(T* p, U v) {
    T o = *p;
    *p = (T)(o + v);
    return o;
}
template <class T, class U> inline T atomicSub(T* p, U v) {
    T o = *p;
    *p = (T)(o - v);
    return o;
}
template <class T, class U> inline T atomicMax(T* p, U v) {
    T o = *p;
    if ((T)v > o)
        *p = (T)v;
    return o;
}
template <class T, class U> inline T atomicMin(T* p, U v) {
    T o = *p;
    if ((T)v < o)
        *p = (T)v;
    return o;
}
template <class T, class U> inline T atomicOr(T* p, U v) {
    T o = *p;
    *p = o | (T)v;
    return o;
}
template <class T, class U> inline T atomicAnd(T* p, U v) {
    T o = *p;
    *p = o & (T)v;
    return o;
}
template <class T, class U> inline T atomicExch(T* p, U v) {
    T o = *p;
    *p = (T)v;
    return o;
}
template <class T, class U, class V> inline T atomicCAS(T* p, U c, V v) {
    T o = *p;
    if (o == (T)c)
        *p = (T)v;
    return o;
}
template <class T> inline T atomicInc(T* p, T v) {
    T o = *p;
    *p = o >= v ? 0 : o + 1;
    return o;
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) { emu::yield(); }
inline void __trap() { emu::trap(); }

// Memory and bits.
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcs(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline T __ldca(const T* p) { return *p; }
template <class T> inline T __ldlu(const T* p) { return *p; }
template <class T> inline void __stcs(T* p, T v) { *p = v; }
template <class T> inline void __stcg(T* p, T v) { *p = v; }
template <class T> inline void __stwt(T* p, T v) { *p = v; }
template <class To, class From> inline To emu_bits(From v) {
    static_assert(sizeof(To) == sizeof(From), "");
    To r;
    memcpy(&r, &v, sizeof(r));
    return r;
}
inline float __uint_as_float(unsigned v) { return emu_bits<float>(v); }
inline float __int_as_float(int v) { return emu_bits<float>(v); }
inline unsigned __float_as_uint(float v) { return emu_bits<unsigned>(v); }
inline int __float_as_int(float v) { return emu_bits<int>(v); }
inline double __longlong_as_double(long long v) { return emu_bits<double>(v); }
inline long long __double_as_longlong(double v) { return emu_bits<long long>(v); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned s) {
    const uint64_t all = (uint64_t)b << 32 | a;
    unsigned r = 0;
    for (int i = 0; i < 4; i++) {
        const unsigned k = s >> (4 * i) & 0xF;
        unsigned v = all >> (8 * (k & 7)) & 0xFF;
        if (k & 8)
            v = v & 0x80 ? 0xFF : 0;
        r |= v << (8 * i);
    }
    return r;
}
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __ffsll(long long v) { return __builtin_ffsll(v); }
inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
inline int __clzll(long long v) { return v ? __builtin_clzll(v) : 64; }
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
inline unsigned __brev(unsigned v) {
    unsigned r = 0;
    for (int i = 0; i < 32; i++)
        r |= (v >> i & 1) << (31 - i);
    return r;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return (uint64_t)a * b >> 32; }
inline int __mulhi(int a, int b) { return (int64_t)a * b >> 32; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned __int128)a * b >> 64;
}
inline unsigned __funnelshift_l(unsigned lo, unsigned hi, unsigned s) {
    s &= 31;
    return s ? hi << s | lo >> (32 - s) : hi;
}
inline unsigned __funnelshift_r(unsigned lo, unsigned hi, unsigned s) {
    s &= 31;
    return s ? lo >> s | hi << (32 - s) : lo;
}
inline size_t __cvta_generic_to_shared(const void* p) { return (size_t)p; }

// Arithmetic: every operation rounded by itself (the library is built with
// -ffp-contract=off).
template <class A, class B> inline std::common_type_t<A, B> max(A a, B b) {
    using C = std::common_type_t<A, B>;
    return (C)a > (C)b ? (C)a : (C)b;
}
template <class A, class B> inline std::common_type_t<A, B> min(A a, B b) {
    using C = std::common_type_t<A, B>;
    return (C)a < (C)b ? (C)a : (C)b;
}
inline float rsqrtf(float x) { return (float)(1. / sqrt((double)x)); }
inline double rsqrt(double x) { return 1. / sqrt(x); }
inline float __frsqrt_rn(float x) { return rsqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __exp10f(float x) { return (float)pow(10., x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fsqrt_rn(float a) { return sqrtf(a); }
inline float __frcp_rn(float a) { return 1 / a; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __fma_rn(double a, double b, double c) { return fma(a, b, c); }
inline float __saturatef(float x) { return x < 0 ? 0 : x > 1 ? 1 : x; }
inline float exp2f_(float x) { return exp2f(x); }
inline int __float2int_rn(float x) { return (int)nearbyintf(x); }
inline int __float2int_rd(float x) { return (int)floorf(x); }
inline int __float2int_rz(float x) { return (int)x; }
inline unsigned __float2uint_rn(float x) { return (unsigned)nearbyintf(x); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; i++)
        c += (int)(signed char)(a >> 8 * i) * (signed char)(b >> 8 * i);
    return c;
}
#include "cuda_fp16.h"
#include "cuda_bf16.h"
