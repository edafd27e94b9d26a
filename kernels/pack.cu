// Bytes as a file has them to where kernels read them (atlas.cuda.pack): parts of any number of
// tensors in one launch, each a job.
//   src  : [src_bytes]  u8   what was read
//   jobs : [count, 16]  i64  the fields of Job
//   bad  : [1]          i32  lowered to the `name` of a tensor that holds what is no finite number
//   launch: <<<blocks, 128>>>; jobs have blocks one after the other, `chunk` bytes of src each
//
// Row r of matrix e of a tensor becomes row map[above + r] (without a map: above + r) of the e-th
// n4 rows from `to` on; what no job writes is to be zero before. -1 in a map: nowhere.
// KIND     0: bytes as they are
//          1: e2m1 codes, two a byte, into the words of lib/formats.cuh
//          2: float32 to fp16    3: float32 to bf16
//          4: scales of 16    5: scales of 32    6: of 32 with their zero points; those of four
//          rows side by side
//          7: int4 codes, two a byte, into their words
//          8: factors of `per` rows, to float32
// 1, 2, 3, 7 and 8 take whole words or numbers, at multiples of their size from the tensor's start.
#include <cuda_fp16.h>
#include <cuda_bf16.h>

struct Job {
    long long block;  // the first of its blocks
    long long kind;
    long long from;  // where in src its part of the tensor begins
    long long at;  // which byte of the tensor that is
    long long bytes;  // of the part
    long long chunk;
    // bytes of a row of the tensor; of factors, numbers that rows have side by side
    long long line;
    long long rows;  // of a matrix of the tensor
    long long to;  // address
    // bytes of a row there; of scales, chunks; of factors, numbers
    long long wide;
    long long n4;  // rows of a matrix there
    long long above;  // rows of the matrix before those of the tensor
    long long map;  // address of int32s, or 0
    // CHECK of numbers; of factors, plus 16 times their type and 256 to divide by them
    long long check;
    long long name;
    long long per;
};

enum {
    NO_CHECK,
    IN_BF16,
    IN_F16,
    IN_E4M3,
    SCALE_E4M3,
    SCALE_E8M0,
    FACTOR,
    ABOVE_ZERO
};

// nibbles 0-3 and 4-7 of v: byte i has nibble i with its sign on top, nibble 4+i in what is left
__device__ __forceinline__ unsigned e2m1_word(unsigned v) {
    unsigned w = 0;
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned a = v >> (4 * i) & 15u;
        const unsigned b = v >> (16 + 4 * i) & 15u;
        w |= ((a >> 3) << 7 | (a & 7u) << 1 | b >> 3 | (b & 7u) << 4) << (8 * i);
    }
    return w;
}

// the even nibbles of v below the odd ones
__device__ __forceinline__ unsigned int4_word(unsigned v) {
    unsigned w = 0;
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        w |= (v >> (8 * i) & 15u) << (4 * i)
                | (v >> (8 * i + 4) & 15u) << (16 + 4 * i);
    }
    return w;
}

// Is a number among these four bytes not finite?
__device__ __forceinline__ bool broken(unsigned v, int check) {
    if (check == IN_BF16)
        return (v & 0x7F80u) == 0x7F80u || (v & 0x7F800000u) == 0x7F800000u;
    if (check == IN_F16)
        return (v & 0x7C00u) == 0x7C00u || (v & 0x7C000000u) == 0x7C000000u;
    bool b = false;
    #pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned c = v >> (8 * i) & 255u;
        b |= check == IN_E4M3         ? (c & 127u) == 127u
                : check == SCALE_E4M3 ? c >= 127u
                                      : check == SCALE_E8M0 && c == 255u;
    }
    return b;
}

__device__ __forceinline__ float number(const unsigned char* p, int type) {
    if (type == 0)
        return *(const float*)p;
    if (type == 1)
        return __uint_as_float((unsigned)*(const unsigned short*)p << 16);
    if (type == 2)
        return __half2float(*(const __half*)p);
    return __uint_as_float(*p ? (unsigned)*p << 23 : 0x400000u);
}

// Where row `row` of the tensor goes, counted over all matrices; below zero: nowhere
__device__ __forceinline__ long long place(const Job& j, unsigned row) {
    const unsigned e = row / (unsigned)j.rows;
    const unsigned r = row % (unsigned)j.rows + (unsigned)j.above;
    const int p = j.map ? ((const int*)j.map)[r] : (int)r;
    return p < 0 ? -1 : e * j.n4 + p;
}

__device__ void factors(
        const Job& j, const unsigned char* p, long long y, int n, int* bad) {
    const int type = j.check >> 4 & 15;
    const int size = type == 0 ? 4 : type == 3 ? 1 : 2;
    const int T = j.line;
    const int across = T > 1 ? 1 : j.wide;
    const int each = j.per * across;
    const int many = n / size;
    const int groups = (j.rows + j.per - 1) / j.per;  // of a matrix
    for (long long t = threadIdx.x; t < (long long)many * each; t += 128) {
        const long long i = y / size + t / each, g = i / T;
        const int in = t % each;
        const int r = g % groups * j.per + in / across;
        if (r >= j.rows)
            continue;
        float v = number(p + t / each * size, type);
        const bool zero = (j.check & 15) == ABOVE_ZERO && v == 0.f;
        if (j.check & 256)
            v = __fdiv_rn(1.f, v);
        if (!in && (!(v >= 0.f && v < __uint_as_float(0x7F800000u)) || zero))
            atomicMin(bad, (int)j.name);
        const long long to = place(j, g / groups * j.rows + r);
        if (to >= 0)
            ((float*)j.to)[to * j.wide + (T > 1 ? i % T : in % across)] = v;
    }
}

__device__ __forceinline__ void scale_bytes(
        const Job& j, const unsigned char* p, int n, unsigned row0,
        unsigned col) {
    const int size = j.kind == 4 ? 2 : j.kind == 5 ? 1 : 4;
    for (int i = 0; i < n; i++) {
        const unsigned x = col + i, c = x % (unsigned)j.line;
        const long long to = place(j, row0 + x / (unsigned)j.line);
        if (to < 0)
            continue;
        ((unsigned char*)j.to)
                [((to / 4 * j.wide + c / size) * 4 + to % 4) * size + c % size] =
                        p[i];
    }
}

// The last job that begins no later than this block.
__device__ __forceinline__ const Job& job_of(const Job* jobs, int count) {
    int lo = 0, hi = count - 1;
    while (lo < hi) {
        const int mid = (lo + hi + 1) / 2;
        if (jobs[mid].block <= blockIdx.x)
            lo = mid;
        else
            hi = mid - 1;
    }
    return jobs[lo];
}

extern "C" __global__ void __launch_bounds__(128) pack(
        const unsigned char* __restrict__ src, const long long* __restrict__ jobs,
        int* __restrict__ bad, int count) {
    const Job& j = job_of((const Job*)jobs, count);
    const long long first = (blockIdx.x - j.block) * j.chunk;
    const long long y = j.at + first;
    const int n = j.bytes - first < j.chunk ? j.bytes - first : j.chunk;
    const int check = j.check & 15;
    const unsigned char* from = src + j.from + first;
    if (j.kind == 8)
        return factors(j, from, y, n, bad);
    const unsigned row0 = y / j.line;
    const unsigned col0 = y % j.line;
    const unsigned line = j.line;
    const bool whole = ((size_t)from & 3) == 0;
    const bool words = line % 4 == 0 && col0 % 4 == 0;
    for (int u = threadIdx.x * 4; u < n; u += 512) {
        const unsigned char* p = from + u;
        const int have = n - u < 4 ? n - u : 4;
        unsigned v = 0;
        if (whole && have == 4)
            v = *(const unsigned*)p;
        else
            for (int i = 0; i < have; i++)
                v |= (unsigned)p[i] << (8 * i);
        if (broken(v, check))
            atomicMin(bad, (int)j.name);
        if (j.kind >= 4 && j.kind <= 6) {
            scale_bytes(j, p, have, row0, col0 + u);
            continue;
        }
        const unsigned x = col0 + u, col = x % line;
        const long long row = place(j, row0 + x / line);
        if (j.kind == 0 && !(words && have == 4)) {  // bytes of two rows, perhaps
            for (int i = 0; i < have; i++) {
                const long long to = place(j, row0 + (x + i) / line);
                if (to >= 0)
                    ((unsigned char*)j.to)[to * j.wide + (x + i) % line] = v
                            >> (8 * i);
            }
            continue;
        }
        if (row < 0)
            continue;
        unsigned char* to = (unsigned char*)j.to + row * j.wide;
        if (j.kind == 2)
            *(__half*)(to + col / 2) = __float2half_rn(__uint_as_float(v));
        else if (j.kind == 3)
            *(__nv_bfloat16*)(to + col / 2) = __float2bfloat16_rn(
                    __uint_as_float(v));
        else
            *(unsigned*)(to + col) = j.kind == 1 ? e2m1_word(v)
                    : j.kind == 7                ? int4_word(v)
                                                 : v;
    }
}
