// The largest logit of each row and where it stands; the lowest id among equals. What is not a number never wins.
//   logits : [rows, v]     f32
//   best   : [rows]        i64   as unsigned: scratch, 0 before the first call and after each
//   count  : [rows]        i32   scratch, 0 before the first call and after each
//   ids    : [rows]        i32   -1 where nothing was found
//   launch: <<<(64, rows), 256>>>, 4 divides v
#include "lib/pdl.cuh"
#define NONE __int_as_float(0xFF800000)  // minus infinity; NVRTC knows no INFINITY

extern "C" __global__ void __launch_bounds__(256) argmax(const float* logits, unsigned long long* best, int* count, int* ids, int v) {
    __shared__ unsigned long long part[8];
    const int t = blockIdx.y;
    pdl_trigger();
    pdl_wait();
    const float4* row = (const float4*)(logits + (size_t)t * v);
    float top = NONE;
    int at = -1;
    #pragma unroll 4
    for (int i = blockIdx.x * 256 + threadIdx.x; i < v / 4; i += gridDim.x * 256) {
        const float4 a = row[i];
        if (a.x > top) { top = a.x; at = 4 * i; }
        if (a.y > top) { top = a.y; at = 4 * i + 1; }
        if (a.z > top) { top = a.z; at = 4 * i + 2; }
        if (a.w > top) { top = a.w; at = 4 * i + 3; }
    }
    // A key that is larger for a larger float and, among equals, for a lower id.
    const unsigned u = __float_as_uint(top + 0.f);  // -0 is 0
    unsigned long long key = at < 0 ? 0ull : (unsigned long long)(u & 0x80000000u ? ~u : u | 0x80000000u) << 32 | (unsigned)~at;
    for (int m = 16; m; m >>= 1) key = max(key, __shfl_xor_sync(~0u, key, m));
    if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = key;
    __syncthreads();
    if (threadIdx.x) return;
    for (int i = 1; i < 8; i++) key = max(key, part[i]);
    atomicMax(best + t, key);
    __threadfence();
    if (atomicAdd(count + t, 1) != (int)gridDim.x - 1) return;
    key = atomicExch(best + t, 0ull);  // the last block speaks for all, and leaves things as it found them
    count[t] = 0;
    ids[t] = key ? (int)~(unsigned)key : -1;
}
