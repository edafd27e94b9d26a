// A Mamba-2 mixer between its projections, for the rows of a decode step: causal convolution, silu,
// the state's decay and its new term, what is read from it, the skip D and the gate z. The norm
// over each group is left to whoever reads y: it gets the sums of squares (gemv.cu, IN 2). A block
// owns PR rows of one head's state, in registers. A row of a state is decayed, added to and read by
// the lanes of one warp.
//   x      : [r, width]            f32   z | x | B | C | dt, width = 2*nh*hd + 2*groups*ns + nh
//   conv_w : [c, 4]                f32   c = nh*hd + 2*groups*ns
//   conv_b : [c]                   f32   or null
//   decay  : [nh]                  f32   A = -exp(A_log)
//   skip   : [nh]                  f32   D
//   dt_bias: [nh]                  f32
//   norm_w : [i]                   f32   i = nh*hd
//   conv   : [states, 3, c]        f32   inputs of the three positions before, oldest first
//   rec    : [slots, nh, hd, ns]    f32  state n has tail n, and the rest in n/TAILS
//   first  : [seqs1]               i32   rows of sequence s: first[s] .. first[s+1]-1; rows after
//                                        the last sequence's get zeros
//   starts : [seqs]                i32   position of its first row
//   state_in : [seqs]              i32   state to begin from (unread at position 0)
//   state_out : [r]                i32   state after a row, or -1; never one that is read in this
//                                        step, but its rest may be where the sequence's own begins:
//                                        nobody else reads it
//   y      : [r, i]                f32
//   parts  : [r, groups, p]        f32   sums of squares of y before norm_w, of each PR columns: p
//                                        = nh/groups*hd/PR
//   launch: <<<(nh/groups*hd/PR, groups, seqs), 128>>>; -D HD: a multiple of 16, NS: 16, 32, ..
//        256, PR: 32 where 32 | hd and NS < 256, else 16
//   -D TAILS= tails for each slot
#include "lib/reduce.cuh"
#include "lib/pdl.cuh"
#include "lib/conv.cuh"
#ifndef HD
#define HD 64
#endif
#ifndef NS
#define NS 128
#endif
#ifndef PR
#define PR 32
#endif
#ifndef TAILS
#define TAILS 1
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 1000
#define RESIDENT 8  // blocks of a multiprocessor
#else
#define RESIDENT 4
#endif

// that have a row of the state between them
constexpr int LANES = NS < 128 ? NS / 4 : 32;
// float4s of a row that a lane has
constexpr int WIDE = NS / 4 / LANES;
// rows that the block's warps have at once
constexpr int PASS = 128 / LANES;
// rows that a thread has a part of
constexpr int MINE = PR < PASS ? 1 : PR / PASS;

// Sums of MINE values over the lanes of a row. A lane keeps half of its values and sends the rest,
// as long as it has several: it ends with the one called `which`.
__device__ __forceinline__ float row_sums(float (&v)[MINE], int& which) {
    int m = LANES / 2;
    which = 0;
    #pragma unroll
    for (int k = MINE / 2; k; k /= 2, m /= 2) {
        const bool hi = threadIdx.x & m;
        #pragma unroll
        for (int i = 0; i < k; i++)
            v[i] = (hi ? v[k + i] : v[i])
                    + __shfl_xor_sync(~0u, hi ? v[i] : v[k + i], m);
        which += hi * k;
    }
    #pragma unroll
    for (; m; m /= 2)
        v[0] += __shfl_xor_sync(~0u, v[0], m);
    return v[0];
}

extern "C" __global__ void __launch_bounds__(128, RESIDENT) mamba_step(
        const float* x, const float* __restrict__ conv_w,
        const float* __restrict__ conv_b, const float* __restrict__ decay,
        const float* __restrict__ skip, const float* __restrict__ dt_bias,
        const float* __restrict__ norm_w, float* conv, float* rec,
        const int* __restrict__ first, const int* __restrict__ starts,
        const int* __restrict__ state_in, const int* __restrict__ state_out,
        float* y, float* parts, int rows) {
    constexpr int K = (NS + 127) / 128;
    constexpr int SLOTS = 2 * K + 1;
    constexpr int STEP = 32 / LANES;
    static_assert(
            HD % PR == 0 && NS % 16 == 0 && (PR == 16 || PR == 32)
                    && (PASS >= PR || PR % PASS == 0) && WIDE * MINE <= 8,
            "a head's sizes");
    __shared__ Conv<SLOTS> past;
    // B | C | x | gate | step, exp(A*step)
    __shared__ __align__(16) float now[4][2 * NS + 2 * PR + 4];
    __shared__ float bias[SLOTS][128], gain[32], own[4], sum[2][PR];
    const int tid = threadIdx.x;
    const int lane = tid % 32;
    const int warp = __shfl_sync(~0u, tid / 32, 0);
    const int seq = blockIdx.z;
    const int r0 = first[seq];
    const int r1 = first[seq + 1];
    const int start = starts[seq];
    const int from = state_in[seq];
    const unsigned n = r1 - r0;
    // this block's rows of all heads': at0 ..
    const int groups = gridDim.y;
    const int group = blockIdx.y;
    const int at0 = (group * gridDim.x + blockIdx.x) * PR;
    const int head = at0 / HD;
    const int inner = groups * gridDim.x * PR;
    const int c = inner + 2 * groups * NS;
    const int width = inner + c + inner / HD;
    // A thread's numbers of xBC: of B, of C, and by warps of x, of z, or dt.
    int col[SLOTS];
    bool has[SLOTS];
    #pragma unroll
    for (int k = 0; k < K; k++) {
        col[k] = inner + group * NS + tid + 128 * k;
        col[K + k] = col[k] + groups * NS;
        has[k] = has[K + k] = tid + 128 * k < NS;
    }
    col[2 * K] = warp == 2 ? c + head
                           : (warp == 0 ? 0 : -inner) + at0 + lane % PR;
    has[2 * K] = warp == 0 && lane < PR;
    past.fetch_taps(conv_w, col, has);
    #pragma unroll
    for (int j = 0; j < SLOTS; j++)
        if (has[j]) {
            if (conv_b)
                cp_async4(&bias[j][tid], conv_b + col[j]);
            else
                bias[j][tid] = 0.f;
        }
    if (warp == 3 && lane < PR)
        cp_async4(gain + lane, norm_w + at0 + lane);
    if (warp == 3 && lane == 0)
        cp_async4(own + 2, skip + head);
    if (warp == 2 && lane < 2)
        cp_async4(own + lane, (lane ? dt_bias : decay) + head);
    // Numbers n4 .. n4+3 (and 128 further) of the block's rows at, at + STEP, ..: a warp's rows lie
    // side by side.
    const int at = warp * STEP * MINE + lane / LANES;
    const int n4 = lane % LANES * 4;
    const bool on = PASS <= PR || at < PR;
    const size_t pool = (size_t)inner * NS;
    float* const state = rec + (size_t)(at0 + at) * NS + n4;
    float4 S[MINE][WIDE];
    #pragma unroll
    for (int m = 0; m < MINE; m++)
        #pragma unroll
        for (int k = 0; k < WIDE; k++)
            S[m][k] = start && on
                    ? __ldcs((const float4*)(state + (unsigned)from / TAILS * pool
                              + m * STEP * NS + k * 128))
                    : make_float4(0, 0, 0, 0);
    past.fetch_tail(start ? conv + (size_t)from * 3 * c : nullptr, c, col, has);
    pdl_trigger();
    cp_async_wait<0>();
    __syncwarp();
    pdl_wait();
    const auto fetch = [&](unsigned i) {
        const float* const row = x + (size_t)(r0 + i) * width + inner;
        #pragma unroll
        for (int j = 0; j < 2 * K; j++)
            if (tid + 128 * (j % K) < NS)
                past.fetch(i, j, row);
        if (warp < 3)
            past.fetch(i, 2 * K, row);
        cp_async_commit();
    };
    const auto convolve = [&](unsigned i) {
        float* const to = now[i % 4];
        cp_async_wait<0>();
        const float in = past.input(i, 2 * K);
        #pragma unroll
        for (int j = 0; j < 2 * K; j++)
            if (tid + 128 * (j % K) < NS)
                to[j / K * NS + tid + 128 * (j % K)] = past.step(
                        i, j, bias[j][tid]);
        if (warp == 0 && lane < PR)
            to[2 * NS + lane] = past.step(i, 2 * K, bias[2 * K][tid]);
        if (warp == 1 && lane < PR)
            to[2 * NS + PR + lane] = silu(in);
        if (warp == 2 && lane < 2) {
            const float d = softplus(in + own[1]);
            to[2 * NS + 2 * PR + lane] = lane ? expf(__fmul_rn(own[0], d)) : d;
        }
    };
    if (n)
        fetch(0);
    // Round j convolves row j beside what the row before it does to the state, and reads from it;
    // behind the barrier, that row is finished.
    #pragma unroll 1
    for (unsigned j = 0; j <= n; j++) {
        const unsigned i = j - 1;
        const float* b = now[i % 4];
        const float* in = b + 2 * NS;
        const int out = j ? state_out[r0 + i] : -1;
        if (j) {
            const float d = in[2 * PR];
            const float eg = in[2 * PR + 1];
            float v[MINE];
            #pragma unroll
            for (int m = 0; m < MINE; m++)
                v[m] = 0.f;
            #pragma unroll
            for (int k = 0; k < WIDE; k++) {
                const float4 B = *(const float4*)(b + n4 + k * 128);
                const float4 C = *(const float4*)(b + NS + n4 + k * 128);
                #pragma unroll
                for (int m = 0; m < MINE; m++) {
                    const float u = on ? __fmul_rn(d, in[at + m * STEP]) : 0.f;
                    #pragma unroll
                    for (int l = 0; l < 4; l++) {
                        float& s = (&S[m][k].x)[l];
                        s = fmaf(u, (&B.x)[l], __fmul_rn(s, eg));
                        v[m] = fmaf(s, (&C.x)[l], v[m]);
                    }
                }
            }
            if (out >= 0 && on)
                #pragma unroll
                for (int m = 0; m < MINE; m++)
                    #pragma unroll
                    for (int k = 0; k < WIDE; k++)
                        __stcs((float4*)(state + (unsigned)out / TAILS * pool
                                       + m * STEP * NS + k * 128),
                                S[m][k]);
            int which;
            const float s = row_sums(v, which);
            // all lanes that hold it write the same
            if (on)
                sum[i % 2][at + which * STEP] = s;
        }
        if (j < n)
            convolve(j);
        __syncthreads();
        if (j) {
            if (out >= 0)
                past.keep(
                        i, conv + (size_t)out * 3 * c, c,
                        blockIdx.x == 0 && tid < NS, warp == 0 && lane < PR);
            if (warp == 3) {  // lane = row of the block
                const bool it = lane < PR;
                const float o = it
                        ? __fmul_rn(
                                  fmaf(own[2], in[lane], sum[i % 2][lane]),
                                  in[PR + lane])
                        : 0.f;
                const float ss = warp_sum(__fmul_rn(o, o));
                if (it)
                    y[(size_t)(r0 + i) * inner + at0 + lane] = __fmul_rn(
                            o, gain[lane]);
                if (!lane)
                    parts[(size_t)(r0 + i) * (inner / PR) + at0 / PR] = ss;
            }
        }
        if (j + 1 < n)
            fetch(j + 1);
    }
    if (seq == gridDim.z - 1 && warp == 0)
        #pragma unroll 1
        for (int r = r1; r < rows; r++) {
            if (lane < PR)
                y[(size_t)r * inner + at0 + lane] = 0.f;
            if (!lane)
                parts[(size_t)r * (inner / PR) + at0 / PR] = 0.f;
        }
}
