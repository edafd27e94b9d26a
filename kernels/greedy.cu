// The largest logit of each row and where it stands; the lowest id among equals. A row with a logit
// that is not finite has none. Then, if asked, the row goes on to its next position
// (lib/advance.cuh): all kernels of the step have ended, and nobody after this one reads its tables
// early.
//   logits    : [rows, v]      f32   or null
//   keys      : [rows, parts]  i64   KEYS: of each part of a row the key of its largest logit
//                                    (lib/keys.cuh); or null
//   best      : [lines, 128]   i64   scratch, 0 before the first call and after each
//   ids       : [rows]         i32   -1 where a logit is not finite
//   seq       : [rows]         i32   this and what follows as in lib/advance.cuh; or null: nothing
//                                    moves on
//   pos       : [rows]         i32   or null
//   pos3      : [3, rows]      i32   or null
//   slots     : [rows]         i64   or null
//   starts    : [seqs]         i32   or null
//   state_in  : [seqs]         i32   or null
//   state_out : [rows]         i32   or null
//   tables    : [seqs, most]   i32   or null
//   told      : [2, places, words] i32   memory of the host: the id goes there too, into the half
//                                        that the parity of the row's position says; or null
//   -D KEYS=   1: `keys` are there, and no logits; a row has one block
//   launch: <<<(blocks, rows), 256>>>, at most 128 blocks a row
#include "lib/advance.cuh"
#include "lib/pdl.cuh"
#include "lib/sample.cuh"
#ifndef KEYS
#define KEYS 0
#endif

// logits at a time
constexpr int THREADS = 256, WARPS = THREADS / 32, UNIT = 4 * THREADS;
constexpr int MANY = 8;  // units of a block on their way

// The largest key of a block; for thread 0.
__device__ __forceinline__ u64 largest(u64 key, u64* part) {
    const unsigned high = key >> 32, top = __reduce_max_sync(~0u, high);
    const unsigned low = __reduce_max_sync(~0u, high == top ? (unsigned)key : 0u);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = (u64)top << 32 | low;
    __syncthreads();
    u64 k = part[0];
    #pragma unroll
    for (int i = 1; i < WARPS; i++)
        k = max(k, part[i]);
    return k;
}
// The key of the largest of a thread's logits of a row.
__device__ __forceinline__ u64 best_of(const float* row, int v) {
    unsigned top = 0, at = 0;
    // From the end on, which the head has written last and which caches may still have.
    int unit = (v + UNIT - 1) / UNIT - 1 - blockIdx.x;
    #pragma unroll 1
    for (; unit >= 0; unit -= MANY * gridDim.x) {
        float4 a[MANY];
        int first[MANY];
        #pragma unroll
        for (int i = 0; i < MANY; i++) {
            first[i] = (unit - i * (int)gridDim.x) * UNIT + threadIdx.x * 4;
            if (first[i] >= 0)
                a[i] = load4(row, first[i], v);
        }
        #pragma unroll
        for (int i = 0; i < MANY; i++)
            #pragma unroll
            for (int j = 3; j >= 0; j--) {
                const unsigned id = first[i] + j;
                const unsigned k = id >= (unsigned)v ? 0u
                                                     : logit_key((&a[i].x)[j]);
                if (k >= top) {
                    top = k;
                    at = id;
                }
            }
    }
    return keyed(top, at);
}

// Four blocks a multiprocessor: small enough to be there before a head of few rows has ended.
extern "C" __global__ void __launch_bounds__(THREADS, 4) greedy(
        const float* logits, const long long* keys, long long* best, int* ids,
        const int* seq, int* pos, int* pos3, long long* slots, int* starts,
        int* state_in, int* state_out, const int* tables, int* told, int v,
        int parts, int most, int block_size, int places) {
    __shared__ u64 part[2][WARPS];
    __shared__ Move next;
    const int t = blockIdx.y, last = gridDim.x - 1;
    const Rows b = {seq, tables, pos, pos3, starts, state_in, state_out, slots,
            (int)gridDim.y, most, block_size};
    pdl_trigger();
    if ((int)blockIdx.x == last && threadIdx.x == THREADS - 1)
        next = look(b, t);
    pdl_wait();
    u64 key = 0;
    if (KEYS) {
        const u64* const row = (const u64*)keys + (size_t)t * parts;
        for (int i = threadIdx.x; i < parts; i += THREADS)
            key = max(key, row[i]);
    } else
        key = best_of(logits + (size_t)t * v, v);
    key = largest(key, part[0]);
    u64* mine = (u64*)best + t * 128;
    if ((int)blockIdx.x != last) {  // what a block has found is never 0
        if (!threadIdx.x)
            *(volatile u64*)(mine + blockIdx.x) = key;
        return;
    }
    // This block was the last to start, so the others run or have ended: it waits for what they
    // found, and leaves things as they were.
    if ((int)threadIdx.x < last) {
        while (!(key = *(volatile u64*)(mine + threadIdx.x)))
            ;
        mine[threadIdx.x] = 0;
    }
    key = largest(key, part[1]);
    if (threadIdx.x)
        return;
    const int id = (unsigned)(key >> 32) == ~0u ? -1 : (int)~(unsigned)key;
    ids[t] = id;
    if (told && next.seq >= 0)
        told[((size_t)(next.pos - 1 & 1) * places + t) * TOLD] = id;
    go(b, t, next);
}
