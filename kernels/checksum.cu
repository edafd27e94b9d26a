// The sum of mixed words of an array: what a packed file has beside it (page cuda.checksum). The
// order in which blocks add is of no account.
//   data : [n]   u8   begins at a multiple of 16
//   sum  : [one] i64  is added to
//   launch: <<<(blocks), 256>>>, any number of blocks; a block takes every blocks-th run of SUMMED
//        words, which share a factor
#ifndef SUMMED
#define SUMMED 16384
#endif
typedef unsigned long long word;

constexpr word STEP = 0x9E3779B97F4A7C15ull, ODD = 0xD6E8FEB86659FD93ull;

__device__ __forceinline__ word fold(word x) { return x ^ x >> 32; }

__device__ __forceinline__ word factor(word run) {
    return fold(fold((run + 1) * ODD) * ODD) | 1;
}

// two words of a run that are in v; `step` is that of the first
__device__ __forceinline__ word mixed(uint4 v, word step) {
    const word a = (word)v.y << 32 | (v.x ^ v.y),
               b = (word)v.w << 32 | (v.z ^ v.w);
    return a * (step | 1) + b * (step + STEP | 1);
}

// `n` bytes behind the last two words, zeros behind them; a word without any is none
__device__ word left_over(const unsigned char* p, int n, int at) {
    word sum = 0;
    for (int w = 0; w * 8 < n; w++) {
        word x = 0;
        for (int i = 0; i < 8 && w * 8 + i < n; i++)
            x |= (word)p[w * 8 + i] << 8 * i;
        sum += fold(x) * ((word)(at + w) * STEP | 1);
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(256)
        checksum(const unsigned char* __restrict__ data, word* sum, long long n) {
    constexpr int PAIRS = SUMMED / 2, AHEAD = 8;
    __shared__ word parts[8];
    // how many words there are
    word part = blockIdx.x || threadIdx.x ? 0 : (word)((n + 7) / 8) * ODD;
    for (long long run = blockIdx.x; run * SUMMED * 8 < n; run += gridDim.x) {
        const unsigned char* p = data + run * SUMMED * 8;
        const long long left = n - run * SUMMED * 8;
        const int pairs = left / 16 < PAIRS ? (int)(left / 16) : PAIRS;
        word mine = 0;  // before it is multiplied by the factor
        for (int at = threadIdx.x; at < pairs; at += 256 * AHEAD) {
            uint4 v[AHEAD];
            #pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (at + 256 * i < pairs)
                    v[i] = ((const uint4*)p)[at + 256 * i];
            #pragma unroll
            for (int i = 0; i < AHEAD; i++)
                if (at + 256 * i < pairs)
                    mine += mixed(v[i], (word)(2 * (at + 256 * i)) * STEP);
        }
        if (pairs < PAIRS && !threadIdx.x)
            mine += left_over(
                    p + pairs * 16, (int)(left - pairs * 16), 2 * pairs);
        part += mine * factor(run);
    }
    #pragma unroll
    for (int d = 16; d; d /= 2)
        part += __shfl_xor_sync(~0u, part, d);
    if (threadIdx.x % 32 == 0)
        parts[threadIdx.x / 32] = part;
    __syncthreads();
    if (threadIdx.x)
        return;
    for (int i = 1; i < 8; i++)
        part += parts[i];
    atomicAdd(sum, part);
}
