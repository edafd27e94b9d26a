// The largest logit of each row and where it stands; the lowest id among equals. A row with a logit
// that is not finite has none.
//   logits : [rows, v]     f32
//   best   : [rows]        i64   as unsigned: scratch, 0 before the first call and after each
//   count  : [rows]        i32   scratch, 0 before the first call and after each
//   ids    : [rows]        i32   -1 where a logit is not finite
//   launch: <<<(64, rows), 256>>>
#include "lib/pdl.cuh"
#include "lib/sample.cuh"

extern "C" __global__ void __launch_bounds__(256)
        argmax(const float* logits, unsigned long long* best, int* count,
                int* ids, int v) {
    __shared__ u64 part[8];
    const int t = blockIdx.y;
    pdl_trigger();
    pdl_wait();
    const float* row = logits + (size_t)t * v;
    float top = __uint_as_float(0xFF800000u);
    int at = -1;
    bool bad = false;
    #pragma unroll 4
    for (int i = (blockIdx.x * 256 + threadIdx.x) * 4; i < v;
            i += gridDim.x * 1024) {
        const float4 a = load4(row, i, v);
        for (int j = 0; j < 4; j++) {
            const float x = (&a.x)[j];
            bad |= i + j < v && not_finite(x);
            if (x > top) {
                top = x;
                at = i + j;
            }
        }
    }
    u64 key = bad ? ~0ull : at < 0 ? 0ull : best_key(top, at);
    for (int m = 16; m; m >>= 1)
        key = max(key, __shfl_xor_sync(~0u, key, m));
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = key;
    __syncthreads();
    if (threadIdx.x)
        return;
    for (int i = 1; i < 8; i++)
        key = max(key, part[i]);
    atomicMax((u64*)best + t, key);
    __threadfence();
    if (atomicAdd(count + t, 1) != (int)gridDim.x - 1)
        return;
    // the last block speaks for all, and leaves things as it found them
    key = atomicExch((u64*)best + t, 0ull);
    count[t] = 0;
    ids[t] = key == ~0ull ? -1 : (int)~(unsigned)key;
}
