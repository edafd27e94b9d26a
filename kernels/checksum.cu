// The sum of mixed words of an array: what a packed file has beside it (page cuda.checksum). The order in which blocks add is of no account.
//   data : [n]   u8   begins at a multiple of 16
//   sum  : [one] i64  is added to
//   launch: <<<(blocks), 256>>>, any number of blocks; a block takes every blocks-th run of SUMMED words, which share a factor
#ifndef SUMMED
#define SUMMED 16384
#endif
typedef unsigned long long word;

__device__ __forceinline__ word fold(word x) { return x ^ x >> 32; }

__device__ __forceinline__ word factor(word run) {
    const word odd = 0xD6E8FEB86659FD93ull;
    return fold(fold((run + 1) * odd) * odd) | 1;
}

// words `at` of a run: two of them are in v
__device__ __forceinline__ word mixed(uint4 v, word step, word by) {
    const word a = (word)v.y << 32 | v.x, b = (word)v.w << 32 | v.z;
    return fold(fold(a + step) * by) + fold(fold(b + step + 0x9E3779B97F4A7C15ull) * by);
}

extern "C" __global__ void __launch_bounds__(256) checksum(const unsigned char* __restrict__ data, word* sum, long long n) {
    constexpr int PAIRS = SUMMED / 2, AHEAD = 8;
    const word step = 0x9E3779B97F4A7C15ull;
    __shared__ word parts[8];
    word part = 0;
    for (long long run = blockIdx.x; run * SUMMED * 8 < n; run += gridDim.x) {
        const unsigned char* p = data + run * SUMMED * 8;
        const long long left = n - run * SUMMED * 8;
        const int pairs = left / 16 < PAIRS ? (int)(left / 16) : PAIRS;
        const word by = factor(run);
        for (int at = threadIdx.x; at < pairs; at += 256 * AHEAD) {
            uint4 v[AHEAD];
            #pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (at + 256 * i < pairs) v[i] = ((const uint4*)p)[at + 256 * i];
            #pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (at + 256 * i < pairs) part += mixed(v[i], (word)(2 * (at + 256 * i)) * step, by);
        }
        if (pairs == PAIRS || threadIdx.x) continue;
        // the bytes that are left, zeros behind them; a word without any is none
        const int rest = (int)(left - pairs * 16);
        for (int w = 0; w * 8 < rest; w++) {
            word x = 0;
            for (int i = 0; i < 8 && w * 8 + i < rest; i++) x |= (word)p[pairs * 16 + w * 8 + i] << 8 * i;
            part += fold(fold(x + (word)(2 * pairs + w) * step) * by);
        }
    }
    #pragma unroll
    for (int d = 16; d; d /= 2) part += __shfl_xor_sync(~0u, part, d);
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = part;
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 1; i < 8; i++) part += parts[i];
    atomicAdd(sum, part);
}
