#pragma once
// Matrix products of a warpgroup (four warps, the first a multiple of four) by Hopper's tensor
// cores: D[64,N] += A[64,16] B[16,N], fp16, float32 sums (PTX wgmma.mma_async), which run beside
// the threads. Warp w of the group has rows 16w to 16w+15 of A and D, each lane what it has of
// lib/mma.cuh's:
//   a[0]: A[g][2t..]  a[1]: A[g+8][2t..]  a[2]: A[g][2t+8..]  a[3]: A[g+8][2t+8..]
//   d[4j], d[4j+1]: D[g][8j+2t], D[g][8j+2t+1]      d[4j+2], d[4j+3]: D[g+8][8j+2t],
//        D[g+8][8j+2t+1]
// B, or A, in shared memory is named by a word of 64 bits:
//   wgmma_rows(p, far)          K lies together: row n of 64 fp16, 128 bytes; far: bytes from 8
//                               rows to the next 8. 16 further along K: + WGMMA_K
//   wgmma_columns(p, wide, far) the other way round, TRANS: row k has 64 fp16 of N that lie
//                               together; wide: bytes from those 64 of N to the next 64; far: from
//                               8 rows to the next 8. 16 further along K: + 2 * far / 16
//   wgmma_cores(p, far)         K lies together by eights: row n of 8 has 16 bytes, right after row
//                               n-1; the next 8 of K come 128 bytes on, the next 8 rows `far` bytes
// The first two with 16-byte piece i of row r at i ^ r % 8 (wgmma_piece), 8 rows at a multiple of
// 1,024 bytes. All threads of the group do the same in the same order:
//   wgmma_seen()                what this thread wrote to shared memory, tensor cores may see:
//                               before a barrier. After cp_async_wait, too
//   wgmma_fence()               registers written before are: before the first product of a group
//   wgmma<N, TRANS>(d, a, b, add)       A from registers; add: 0 sets d, 1 adds to it
//   wgmma_shared<N, TRANS, TRANS_A>(d, a, b, add)      A from shared memory
//   wgmma_commit()              products since the last one are a group
//   wgmma_wait<NEWEST>()        until at most so many of the newest groups run. Until then nobody
//                               may touch d, registers of a, or memory that they read
//   wgmma_registers_up<N>()     registers that each thread of the group may have from now on, taken
//   wgmma_registers_down<N>()   from those that others give away
//   wgmma_own(d)                after that: no compiler takes d to be older
// Only where the kernel is made for Hopper (sm_90a), and on the emulator.
#include <cuda_fp16.h>
#include "lib/encode.cuh"
typedef unsigned long long WgmmaMatrix;
#define WGMMA_K 2  // 32 bytes

__device__ __forceinline__ unsigned wgmma_address(const void* p) {
#if defined(ATLAS_EMULATE)  // as if shared memory began at a multiple of 1,024
    return (unsigned)((size_t)p - ((size_t)emu::dynamic & ~(size_t)1023));
#else
    return (unsigned)__cvta_generic_to_shared(p);
#endif
}
__device__ __forceinline__ WgmmaMatrix wgmma_columns(
        const void* p, unsigned wide, unsigned far) {
    const unsigned low = (wgmma_address(p) & 0x3FFFF) >> 4 | (wide >> 4) << 16;
    const unsigned high = far >> 4 | 1u << 30;  // 128 bytes that change places
    return (WgmmaMatrix)high << 32 | low;
}
__device__ __forceinline__ WgmmaMatrix wgmma_cores(const void* p, unsigned far) {
    const unsigned low = (wgmma_address(p) & 0x3FFFF) >> 4 | 128 >> 4 << 16;
#if defined( \
        __CUDA_ARCH__)  // known to be one for all lanes, it takes few instructions
    return (WgmmaMatrix)(far >> 4) << 32 | __shfl_sync(~0u, low, 0);
#endif
    return (WgmmaMatrix)(far >> 4) << 32 | low;
}
__device__ __forceinline__ WgmmaMatrix wgmma_rows(const void* p, unsigned far) {
    return wgmma_columns(p, 16, far);
}
// Bytes from the first of 8 rows to piece `piece` of row `row`, rows of 128 bytes.
__device__ __forceinline__ unsigned wgmma_piece(unsigned row, unsigned piece) {
    return row * 128 + (piece ^ row % 8) * 16;
}
// `p`, or the first byte after it that such rows may begin at.
__device__ __forceinline__ unsigned char* wgmma_aligned(unsigned char* p) {
    return p + (0u - wgmma_address(p)) % 1024;
}

// A word that the compiler does not find again wherever it is wanted.
__device__ __forceinline__ WgmmaMatrix wgmma_kept(WgmmaMatrix m) {
#if defined(__CUDA_ARCH__)
    asm volatile("" : "+l"(m));
#endif
    return m;
}

#if defined(ATLAS_EMULATE)
// A product reads memory, and changes D, as late as it may: when somebody waits for its group.
struct LateProduct {
    float *d, rows[2][32];  // of A: g and g+8
    WgmmaMatrix a, b;  // a: 0 if A came in registers
    int n, group;
    bool trans, trans_a, add, e4m3;
};
static LateProduct late_products[1024][64];
static int late_count[1024], late_group[1024];
__device__ inline const char* wgmma_memory() {
    return (const char*)((size_t)emu::dynamic & ~(size_t)1023);
}
__device__ inline float wgmma_e4m3_element(WgmmaMatrix m, int k, int n) {
    const unsigned far = (m >> 32 & 0x3FFF) << 4;
    unsigned at = ((m & 0x3FFF) << 4) + n / 8 * far + n % 8 * 128 + k;
    at ^= (at >> 7 & 7) << 4;
    return of_e4m3((unsigned char)wgmma_memory()[at]);
}
__device__ inline float wgmma_element(WgmmaMatrix m, bool trans, int k, int n) {
    const unsigned wide = (m >> 16 & 0x3FFF) << 4;
    const unsigned far = (m >> 32 & 0x3FFF) << 4;
    unsigned at = (m & 0x3FFF) << 4;
    const bool cores = !(m >> 62);
    if (cores)
        at += n / 8 * far + n % 8 * 16 + k / 8 * wide + k % 8 * 2;
    else if (trans)
        at += n / 64 * wide + n % 64 * 2 + k % 8 * 128 + k / 8 * far;
    else
        at += n / 8 * far + n % 8 * 128 + k * 2;
    if (!cores)
        at ^= (at >> 7 & 7) << 4;
    unsigned short v;
    memcpy(&v, wgmma_memory() + at, 2);
    return __half2float(__ushort_as_half(v));
}
__device__ inline void wgmma_do(LateProduct& p) {
    const int g = emu::lane() / 4;
    const int t = emu::lane() % 4;
    const int warp = emu::current / 32 % 4;
    for (int i = 0; p.a && i < 32; i++)
        p.rows[i / 16][i % 16] = wgmma_element(
                p.a, p.trans_a, i % 16, warp * 16 + g + i / 16 * 8);
    for (int v = 0; v < p.n / 2; v++) {
        const int column = v / 4 * 8 + 2 * t + v % 2;
        double s = 0;
        for (int k = 0; k < (p.e4m3 ? 32 : 16); k++) {
            const float b = p.e4m3 ? wgmma_e4m3_element(p.b, k, column)
                                   : wgmma_element(p.b, p.trans, k, column);
            s += (double)p.rows[v / 2 % 2][k] * b;
        }
        p.d[v] = (p.add ? p.d[v] : 0.f) + (float)s;
    }
}
__device__ inline void wgmma_finish(int newest) {
    const int me = emu::current, many = late_count[me];
    int done = 0;
    while (done < many
            && late_products[me][done].group <= late_group[me] - newest)
        wgmma_do(late_products[me][done++]);
    for (int i = done; i < many; i++)
        late_products[me][i - done] = late_products[me][i];
    late_count[me] -= done;
}
__device__ inline LateProduct& wgmma_later(
        int n, float* d, WgmmaMatrix b, bool trans, int add) {
    int& many = late_count[emu::current];
    if (many == 64)
        emu::trap();
    LateProduct& p = late_products[emu::current][many++];
    p = {d, {}, 0, b, n, late_group[emu::current] + 1, trans, false, add != 0,
            false};
    return p;
}
struct WgmmaLane {
    unsigned a[4];
};
__device__ inline void wgmma_registers(LateProduct& p, const unsigned* a) {
    WgmmaLane mine;
    for (int i = 0; i < 4; i++)
        mine.a[i] = a[i];
    const WgmmaLane* all = emu::gather(~0u, mine);
    for (int i = 0; i < 32; i++) {
        const int k = i % 16;
        const WgmmaLane l = emu::from(all, emu::lane() / 4 * 4 + k % 8 / 2);
        const unsigned pair = l.a[i / 16 + k / 8 * 2];
        const unsigned short v = k % 2 ? pair >> 16 : pair & 0xFFFF;
        p.rows[i / 16][k] = __half2float(__ushort_as_half(v));
    }
}
// Four e4m3 a register: a[0]: A[g][4t..], a[1]: A[g+8][4t..], a[2] and a[3]: 16 further
__device__ inline void wgmma_e4m3_registers(LateProduct& p, const unsigned* a) {
    WgmmaLane mine;
    for (int i = 0; i < 4; i++)
        mine.a[i] = a[i];
    const WgmmaLane* all = emu::gather(~0u, mine);
    for (int i = 0; i < 64; i++) {
        const int k = i % 32;
        const WgmmaLane l = emu::from(all, emu::lane() / 4 * 4 + k % 16 / 4);
        p.rows[i / 32][k] = of_e4m3(l.a[i / 32 + k / 16 * 2] >> k % 4 * 8 & 255);
    }
    p.e4m3 = true;
}
#endif

__device__ __forceinline__ void wgmma_seen() {
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_fence() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void wgmma_commit() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#elif defined(ATLAS_EMULATE)
    late_group[emu::current]++;
#endif
}
template <int NEWEST> __device__ __forceinline__ void wgmma_wait() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(NEWEST) : "memory");
#elif defined(ATLAS_EMULATE)
    wgmma_finish(NEWEST);
#endif
}
template <int N> __device__ __forceinline__ void wgmma_registers_up() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
template <int N> __device__ __forceinline__ void wgmma_registers_down() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
__device__ __forceinline__ void wgmma_own(float& d) {
#if defined(__CUDA_ARCH__)
    asm volatile("" : "+f"(d)::"memory");
#endif
}
template <int N> __device__ __forceinline__ void wgmma_own(float (&d)[N]) {
    #pragma unroll
    for (int i = 0; i < N; i++)
        wgmma_own(d[i]);
}

// What one instruction takes: eight columns are four registers of D.
#define WGMMA_4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define WGMMA_TO8 "%0,%1,%2,%3"
#define WGMMA_TO16 WGMMA_TO8 ",%4,%5,%6,%7"
#define WGMMA_TO24 WGMMA_TO16 ",%8,%9,%10,%11"
#define WGMMA_TO32 WGMMA_TO24 ",%12,%13,%14,%15"
#define WGMMA_TO40 WGMMA_TO32 ",%16,%17,%18,%19"
#define WGMMA_TO48 WGMMA_TO40 ",%20,%21,%22,%23"
#define WGMMA_TO56 WGMMA_TO48 ",%24,%25,%26,%27"
#define WGMMA_TO64 WGMMA_TO56 ",%28,%29,%30,%31"
#define WGMMA_TO72 WGMMA_TO64 ",%32,%33,%34,%35"
#define WGMMA_TO80 WGMMA_TO72 ",%36,%37,%38,%39"
#define WGMMA_TO88 WGMMA_TO80 ",%40,%41,%42,%43"
#define WGMMA_TO96 WGMMA_TO88 ",%44,%45,%46,%47"
#define WGMMA_TO104 WGMMA_TO96 ",%48,%49,%50,%51"
#define WGMMA_TO112 WGMMA_TO104 ",%52,%53,%54,%55"
#define WGMMA_TO120 WGMMA_TO112 ",%56,%57,%58,%59"
#define WGMMA_TO128 WGMMA_TO120 ",%60,%61,%62,%63"
#define WGMMA_TO136 WGMMA_TO128 ",%64,%65,%66,%67"
#define WGMMA_TO144 WGMMA_TO136 ",%68,%69,%70,%71"
#define WGMMA_TO152 WGMMA_TO144 ",%72,%73,%74,%75"
#define WGMMA_TO160 WGMMA_TO152 ",%76,%77,%78,%79"
#define WGMMA_TO168 WGMMA_TO160 ",%80,%81,%82,%83"
#define WGMMA_TO176 WGMMA_TO168 ",%84,%85,%86,%87"
#define WGMMA_TO184 WGMMA_TO176 ",%88,%89,%90,%91"
#define WGMMA_TO192 WGMMA_TO184 ",%92,%93,%94,%95"
#define WGMMA_TO200 WGMMA_TO192 ",%96,%97,%98,%99"
#define WGMMA_TO208 WGMMA_TO200 ",%100,%101,%102,%103"
#define WGMMA_TO216 WGMMA_TO208 ",%104,%105,%106,%107"
#define WGMMA_TO224 WGMMA_TO216 ",%108,%109,%110,%111"
#define WGMMA_TO232 WGMMA_TO224 ",%112,%113,%114,%115"
#define WGMMA_TO240 WGMMA_TO232 ",%116,%117,%118,%119"
#define WGMMA_TO248 WGMMA_TO240 ",%120,%121,%122,%123"
#define WGMMA_TO256 WGMMA_TO248 ",%124,%125,%126,%127"
#define WGMMA_OUT8 WGMMA_4(0)
#define WGMMA_OUT16 WGMMA_OUT8, WGMMA_4(4)
#define WGMMA_OUT24 WGMMA_OUT16, WGMMA_4(8)
#define WGMMA_OUT32 WGMMA_OUT24, WGMMA_4(12)
#define WGMMA_OUT40 WGMMA_OUT32, WGMMA_4(16)
#define WGMMA_OUT48 WGMMA_OUT40, WGMMA_4(20)
#define WGMMA_OUT56 WGMMA_OUT48, WGMMA_4(24)
#define WGMMA_OUT64 WGMMA_OUT56, WGMMA_4(28)
#define WGMMA_OUT72 WGMMA_OUT64, WGMMA_4(32)
#define WGMMA_OUT80 WGMMA_OUT72, WGMMA_4(36)
#define WGMMA_OUT88 WGMMA_OUT80, WGMMA_4(40)
#define WGMMA_OUT96 WGMMA_OUT88, WGMMA_4(44)
#define WGMMA_OUT104 WGMMA_OUT96, WGMMA_4(48)
#define WGMMA_OUT112 WGMMA_OUT104, WGMMA_4(52)
#define WGMMA_OUT120 WGMMA_OUT112, WGMMA_4(56)
#define WGMMA_OUT128 WGMMA_OUT120, WGMMA_4(60)
#define WGMMA_OUT136 WGMMA_OUT128, WGMMA_4(64)
#define WGMMA_OUT144 WGMMA_OUT136, WGMMA_4(68)
#define WGMMA_OUT152 WGMMA_OUT144, WGMMA_4(72)
#define WGMMA_OUT160 WGMMA_OUT152, WGMMA_4(76)
#define WGMMA_OUT168 WGMMA_OUT160, WGMMA_4(80)
#define WGMMA_OUT176 WGMMA_OUT168, WGMMA_4(84)
#define WGMMA_OUT184 WGMMA_OUT176, WGMMA_4(88)
#define WGMMA_OUT192 WGMMA_OUT184, WGMMA_4(92)
#define WGMMA_OUT200 WGMMA_OUT192, WGMMA_4(96)
#define WGMMA_OUT208 WGMMA_OUT200, WGMMA_4(100)
#define WGMMA_OUT216 WGMMA_OUT208, WGMMA_4(104)
#define WGMMA_OUT224 WGMMA_OUT216, WGMMA_4(108)
#define WGMMA_OUT232 WGMMA_OUT224, WGMMA_4(112)
#define WGMMA_OUT240 WGMMA_OUT232, WGMMA_4(116)
#define WGMMA_OUT248 WGMMA_OUT240, WGMMA_4(120)
#define WGMMA_OUT256 WGMMA_OUT248, WGMMA_4(124)
#define WGMMA_NAME(n) "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {"
#define WGMMA_ADD(p) "{.reg .pred p; setp.ne.s32 p, %" #p ", 0; "
// n columns; numbers of the operands after D
#define WGMMA_REGISTERS(n, p, q, r, s, t, u, v) \
    if constexpr (N == n) \
    asm volatile(WGMMA_ADD(u) WGMMA_NAME(n) WGMMA_TO##n \
            "}, " \
            "{%" #p ", %" #q ", %" #r ", %" #s "}, %" #t ", p, 1, 1, %" #v ";}" \
            : WGMMA_OUT##n \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add), \
            "n"((int)TRANS) \
            : "memory")
#define WGMMA_E4M3(n, p, q, r, s, t, u) \
    if constexpr (N == n) \
    asm volatile(WGMMA_ADD(u) "wgmma.mma_async.sync.aligned.m64n" #n \
                              "k32.f32.e4m3.e4m3 {" WGMMA_TO##n \
            "}, " \
            "{%" #p ", %" #q ", %" #r ", %" #s "}, %" #t ", p, 1, 1;}" \
            : WGMMA_OUT##n \
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add) \
            : "memory")
#define WGMMA_SHARED(n, p, q, r, s, t) \
    if constexpr (N == n) \
    asm volatile(WGMMA_ADD(r) WGMMA_NAME(n) WGMMA_TO##n \
            "}, " \
            "%" #p ", %" #q ", p, 1, 1, %" #s ", %" #t ";}" \
            : WGMMA_OUT##n \
            : "l"(a), "l"(b), "r"(add), "n"((int)TRANS_A), "n"((int)TRANS) \
            : "memory")

template <int N, bool TRANS>
__device__ __forceinline__ void wgmma(
        float* d, const unsigned* a, WgmmaMatrix b, int add) {
    static_assert(N % 8 == 0 && N <= 256, "columns come in eights");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    WGMMA_REGISTERS(8, 4, 5, 6, 7, 8, 9, 10);
    WGMMA_REGISTERS(16, 8, 9, 10, 11, 12, 13, 14);
    WGMMA_REGISTERS(24, 12, 13, 14, 15, 16, 17, 18);
    WGMMA_REGISTERS(32, 16, 17, 18, 19, 20, 21, 22);
    WGMMA_REGISTERS(40, 20, 21, 22, 23, 24, 25, 26);
    WGMMA_REGISTERS(48, 24, 25, 26, 27, 28, 29, 30);
    WGMMA_REGISTERS(56, 28, 29, 30, 31, 32, 33, 34);
    WGMMA_REGISTERS(64, 32, 33, 34, 35, 36, 37, 38);
    WGMMA_REGISTERS(72, 36, 37, 38, 39, 40, 41, 42);
    WGMMA_REGISTERS(80, 40, 41, 42, 43, 44, 45, 46);
    WGMMA_REGISTERS(88, 44, 45, 46, 47, 48, 49, 50);
    WGMMA_REGISTERS(96, 48, 49, 50, 51, 52, 53, 54);
    WGMMA_REGISTERS(104, 52, 53, 54, 55, 56, 57, 58);
    WGMMA_REGISTERS(112, 56, 57, 58, 59, 60, 61, 62);
    WGMMA_REGISTERS(120, 60, 61, 62, 63, 64, 65, 66);
    WGMMA_REGISTERS(128, 64, 65, 66, 67, 68, 69, 70);
    WGMMA_REGISTERS(136, 68, 69, 70, 71, 72, 73, 74);
    WGMMA_REGISTERS(144, 72, 73, 74, 75, 76, 77, 78);
    WGMMA_REGISTERS(152, 76, 77, 78, 79, 80, 81, 82);
    WGMMA_REGISTERS(160, 80, 81, 82, 83, 84, 85, 86);
    WGMMA_REGISTERS(168, 84, 85, 86, 87, 88, 89, 90);
    WGMMA_REGISTERS(176, 88, 89, 90, 91, 92, 93, 94);
    WGMMA_REGISTERS(184, 92, 93, 94, 95, 96, 97, 98);
    WGMMA_REGISTERS(192, 96, 97, 98, 99, 100, 101, 102);
    WGMMA_REGISTERS(200, 100, 101, 102, 103, 104, 105, 106);
    WGMMA_REGISTERS(208, 104, 105, 106, 107, 108, 109, 110);
    WGMMA_REGISTERS(216, 108, 109, 110, 111, 112, 113, 114);
    WGMMA_REGISTERS(224, 112, 113, 114, 115, 116, 117, 118);
    WGMMA_REGISTERS(232, 116, 117, 118, 119, 120, 121, 122);
    WGMMA_REGISTERS(240, 120, 121, 122, 123, 124, 125, 126);
    WGMMA_REGISTERS(248, 124, 125, 126, 127, 128, 129, 130);
    WGMMA_REGISTERS(256, 128, 129, 130, 131, 132, 133, 134);
#elif defined(ATLAS_EMULATE)
    wgmma_registers(wgmma_later(N, d, b, TRANS, add), a);
#endif
}
// D[64,N] += A[64,32] B[32,N] of e4m3: A as lib/mma_narrow.cuh has it, rows of B are 128 numbers
template <int N>
__device__ __forceinline__ void wgmma_e4m3(
        float* d, const unsigned* a, WgmmaMatrix b, int add) {
    static_assert(N % 8 == 0 && N <= 256, "columns come in eights");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    WGMMA_E4M3(8, 4, 5, 6, 7, 8, 9);
    WGMMA_E4M3(16, 8, 9, 10, 11, 12, 13);
    WGMMA_E4M3(24, 12, 13, 14, 15, 16, 17);
    WGMMA_E4M3(32, 16, 17, 18, 19, 20, 21);
    WGMMA_E4M3(40, 20, 21, 22, 23, 24, 25);
    WGMMA_E4M3(48, 24, 25, 26, 27, 28, 29);
    WGMMA_E4M3(56, 28, 29, 30, 31, 32, 33);
    WGMMA_E4M3(64, 32, 33, 34, 35, 36, 37);
    WGMMA_E4M3(72, 36, 37, 38, 39, 40, 41);
    WGMMA_E4M3(80, 40, 41, 42, 43, 44, 45);
    WGMMA_E4M3(88, 44, 45, 46, 47, 48, 49);
    WGMMA_E4M3(96, 48, 49, 50, 51, 52, 53);
    WGMMA_E4M3(104, 52, 53, 54, 55, 56, 57);
    WGMMA_E4M3(112, 56, 57, 58, 59, 60, 61);
    WGMMA_E4M3(120, 60, 61, 62, 63, 64, 65);
    WGMMA_E4M3(128, 64, 65, 66, 67, 68, 69);
    WGMMA_E4M3(136, 68, 69, 70, 71, 72, 73);
    WGMMA_E4M3(144, 72, 73, 74, 75, 76, 77);
    WGMMA_E4M3(152, 76, 77, 78, 79, 80, 81);
    WGMMA_E4M3(160, 80, 81, 82, 83, 84, 85);
    WGMMA_E4M3(168, 84, 85, 86, 87, 88, 89);
    WGMMA_E4M3(176, 88, 89, 90, 91, 92, 93);
    WGMMA_E4M3(184, 92, 93, 94, 95, 96, 97);
    WGMMA_E4M3(192, 96, 97, 98, 99, 100, 101);
    WGMMA_E4M3(200, 100, 101, 102, 103, 104, 105);
    WGMMA_E4M3(208, 104, 105, 106, 107, 108, 109);
    WGMMA_E4M3(216, 108, 109, 110, 111, 112, 113);
    WGMMA_E4M3(224, 112, 113, 114, 115, 116, 117);
    WGMMA_E4M3(232, 116, 117, 118, 119, 120, 121);
    WGMMA_E4M3(240, 120, 121, 122, 123, 124, 125);
    WGMMA_E4M3(248, 124, 125, 126, 127, 128, 129);
    WGMMA_E4M3(256, 128, 129, 130, 131, 132, 133);
#elif defined(ATLAS_EMULATE)
    wgmma_e4m3_registers(wgmma_later(N, d, b, false, add), a);
#endif
}
template <int N, bool TRANS, bool TRANS_A>
__device__ __forceinline__ void wgmma_shared(
        float* d, WgmmaMatrix a, WgmmaMatrix b, int add) {
    static_assert(N % 8 == 0 && N <= 256, "columns come in eights");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    WGMMA_SHARED(8, 4, 5, 6, 7, 8);
    WGMMA_SHARED(16, 8, 9, 10, 11, 12);
    WGMMA_SHARED(24, 12, 13, 14, 15, 16);
    WGMMA_SHARED(32, 16, 17, 18, 19, 20);
    WGMMA_SHARED(40, 20, 21, 22, 23, 24);
    WGMMA_SHARED(48, 24, 25, 26, 27, 28);
    WGMMA_SHARED(56, 28, 29, 30, 31, 32);
    WGMMA_SHARED(64, 32, 33, 34, 35, 36);
    WGMMA_SHARED(72, 36, 37, 38, 39, 40);
    WGMMA_SHARED(80, 40, 41, 42, 43, 44);
    WGMMA_SHARED(88, 44, 45, 46, 47, 48);
    WGMMA_SHARED(96, 48, 49, 50, 51, 52);
    WGMMA_SHARED(104, 52, 53, 54, 55, 56);
    WGMMA_SHARED(112, 56, 57, 58, 59, 60);
    WGMMA_SHARED(120, 60, 61, 62, 63, 64);
    WGMMA_SHARED(128, 64, 65, 66, 67, 68);
    WGMMA_SHARED(136, 68, 69, 70, 71, 72);
    WGMMA_SHARED(144, 72, 73, 74, 75, 76);
    WGMMA_SHARED(152, 76, 77, 78, 79, 80);
    WGMMA_SHARED(160, 80, 81, 82, 83, 84);
    WGMMA_SHARED(168, 84, 85, 86, 87, 88);
    WGMMA_SHARED(176, 88, 89, 90, 91, 92);
    WGMMA_SHARED(184, 92, 93, 94, 95, 96);
    WGMMA_SHARED(192, 96, 97, 98, 99, 100);
    WGMMA_SHARED(200, 100, 101, 102, 103, 104);
    WGMMA_SHARED(208, 104, 105, 106, 107, 108);
    WGMMA_SHARED(216, 108, 109, 110, 111, 112);
    WGMMA_SHARED(224, 112, 113, 114, 115, 116);
    WGMMA_SHARED(232, 116, 117, 118, 119, 120);
    WGMMA_SHARED(240, 120, 121, 122, 123, 124);
    WGMMA_SHARED(248, 124, 125, 126, 127, 128);
    WGMMA_SHARED(256, 128, 129, 130, 131, 132);
#elif defined(ATLAS_EMULATE)
    LateProduct& p = wgmma_later(N, d, b, TRANS, add);
    p.a = a;
    p.trans_a = TRANS_A;
#endif
}
