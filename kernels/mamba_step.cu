// A Mamba-2 mixer between its projections, for the rows of a decode step: causal convolution, silu,
// the state's decay and its new term, what is read from it, the skip D and the gate z. The norm
// over each group is left to whoever reads y: it gets the sums of squares (gemv.cu, IN 2). A block
// owns PR rows of one head's state, in registers. A row of a state is decayed, added to and read by
// the lanes of one warp.
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

// numbers of B, and of C, that a thread has; channels of a thread, the last of which is one of x
constexpr int K = (NS + 127) / 128;
constexpr int SLOTS = 2 * K + 1;
// from one row of a thread to its next
constexpr int STEP = 32 / LANES;
static_assert(
        HD % PR == 0 && NS % 16 == 0 && (PR == 16 || PR == 32)
                && (PASS >= PR || PR % PASS == 0) && WIDE * MINE <= 8,
        "a head's sizes");

// What the kernel is given, in the order of its arguments.
struct Params {
    // z | x | B | C | dt, width = 2*nh*hd + 2*groups*ns + nh
    const float* x;  // [r, width] f32
    const float* conv_w;  // [c, 4] f32: c = nh*hd + 2*groups*ns
    const float* conv_b;  // [c] f32 or null
    const float* decay;  // [nh] f32: A = -exp(A_log)
    const float* skip;  // [nh] f32: D
    const float* dt_bias;  // [nh] f32
    const float* norm_w;  // [i] f32: i = nh*hd
    // inputs of the three positions before, oldest first
    float* conv;  // [states, 3, c] f32
    // state n has tail n, and the rest in n/TAILS
    float* rec;  // [slots, nh, hd, ns] f32
    // rows of sequence s: first[s] .. first[s+1]-1; rows after the last sequence's get zeros
    const int* first;  // [seqs1] i32
    const int* starts;  // [seqs] i32: position of its first row
    // state to begin from (unread at position 0)
    const int* state_in;  // [seqs] i32
    // state after a row, or -1; never one that is read in this step, but its rest may be where the
    // sequence's own begins: nobody else reads it
    const int* state_out;  // [r] i32
    float* y;  // [r, i] f32
    // sums of squares of y before norm_w, of each PR columns: p = nh/groups*hd/PR
    float* parts;  // [r, groups, p] f32
    int rows;  // of the step, those after the last sequence's included
};

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

// What a block's threads share: each an array of its own, which the compiler tells apart.
struct Room {
    Conv<SLOTS>& past;
    float (&now)[4][2 * NS + 2 * PR + 4];  // B | C | x | gate | step, exp(A*step)
    float (&bias)[SLOTS][128], (&gain)[32], (&own)[4], (&sum)[2][PR];
};

// Where a thread is: in a block that has a sequence, and PR rows of a head's state.
struct Work {
    int id, lane, warp;
    int seq, r0, r1;  // rows of the sequence
    int start, from;  // position of the first of them, and the state before it
    unsigned n;  // how many rows
    int groups, group;
    int at0, head;  // the block's first row, of all heads'
    int inner, c, width;  // numbers of x; channels; numbers of a row
    __device__ __forceinline__ Work(const Params& p, int tid) {
        id = tid;
        lane = tid % 32;
        warp = __shfl_sync(~0u, tid / 32, 0);
        seq = blockIdx.z;
        r0 = p.first[seq];
        r1 = p.first[seq + 1];
        start = p.starts[seq];
        from = p.state_in[seq];
        n = r1 - r0;
        groups = gridDim.y;
        group = blockIdx.y;
        at0 = (group * gridDim.x + blockIdx.x) * PR;
        head = at0 / HD;
        inner = groups * gridDim.x * PR;
        c = inner + 2 * groups * NS;
        width = inner + c + inner / HD;
    }
};

// A thread's numbers of xBC: of B, of C, and by warps of x, of z, or dt. (Where a function
// takes a copy of `w`, a reference would make other code of it.)
__device__ __forceinline__ void find_channels(
        const Work w, int (&col)[SLOTS], bool (&has)[SLOTS]) {
    #pragma unroll
    for (int k = 0; k < K; k++) {
        col[k] = w.inner + w.group * NS + w.id + 128 * k;
        col[K + k] = col[k] + w.groups * NS;
        has[k] = has[K + k] = w.id + 128 * k < NS;
    }
    col[2 * K] = w.warp == 2 ? w.c + w.head
                             : (w.warp == 0 ? 0 : -w.inner) + w.at0 + w.lane % PR;
    has[2 * K] = w.warp == 0 && w.lane < PR;
}

// Weights and biases of the channels, the norm's gains, and the head's scalars: A, dt_bias, D.
__device__ __forceinline__ void fetch_weights(
        const Params& p, const Work w, const Room& m, const int (&col)[SLOTS],
        const bool (&has)[SLOTS]) {
    m.past.fetch_taps(p.conv_w, col, has);
    #pragma unroll
    for (int j = 0; j < SLOTS; j++)
        if (has[j]) {
            if (p.conv_b)
                cp_async4(&m.bias[j][w.id], p.conv_b + col[j]);
            else
                m.bias[j][w.id] = 0.f;
        }
    if (w.warp == 3 && w.lane < PR)
        cp_async4(m.gain + w.lane, p.norm_w + w.at0 + w.lane);
    if (w.warp == 3 && w.lane == 0)
        cp_async4(m.own + 2, p.skip + w.head);
    if (w.warp == 2 && w.lane < 2)
        cp_async4(m.own + w.lane, (w.lane ? p.dt_bias : p.decay) + w.head);
}

// What a thread has of the state: numbers n4 .. n4+3 (and 128 further) of the block's rows at,
// at + STEP, ..: a warp's rows lie side by side.
struct Own {
    int at, n4;
    bool on;  // has the block so many rows?
    size_t pool;  // numbers of a slot
    float* state;  // where the thread's first number is in slot 0
    __device__ __forceinline__ Own(const Params& p, const Work& w) {
        at = w.warp * STEP * MINE + w.lane / LANES;
        n4 = w.lane % LANES * 4;
        on = PASS <= PR || at < PR;
        pool = (size_t)w.inner * NS;
        state = p.rec + (size_t)(w.at0 + at) * NS + n4;
    }
    // Of the thread's row r, what B is multiplied by.
    __device__ __forceinline__ float input(
            const float* in, float d, int r) const {
        return on ? __fmul_rn(d, in[at + r * STEP]) : 0.f;
    }
    // Where the k-th four numbers of that row are in state n.
    __device__ __forceinline__ float4* place(int n, int r, int k) const {
        return (float4*)(state + (unsigned)n / TAILS * pool + r * STEP * NS
                + k * 128);
    }
};

// What was asked for is there, and then what the launch before this one makes.
__device__ __forceinline__ void wait() {
    pdl_trigger();
    cp_async_wait<0>();
    __syncwarp();
    pdl_wait();
}

// Inputs of row i are asked for.
__device__ __forceinline__ void fetch(
        const Params& p, const Work& w, const Room& m, unsigned i) {
    const float* const row = p.x + (size_t)(w.r0 + i) * w.width + w.inner;
    #pragma unroll
    for (int j = 0; j < 2 * K; j++)
        if (w.id + 128 * (j % K) < NS)
            m.past.fetch(i, j, row);
    if (w.warp < 3)
        m.past.fetch(i, 2 * K, row);
    cp_async_commit();
}

// All of row i but the state: B, C and x convolved, the gate, and the step.
__device__ __forceinline__ void convolve(
        const Work& w, const Room& m, unsigned i) {
    float* const to = m.now[i % 4];
    cp_async_wait<0>();
    const float in = m.past.input(i, 2 * K);
    #pragma unroll
    for (int j = 0; j < 2 * K; j++)
        if (w.id + 128 * (j % K) < NS)
            to[j / K * NS + w.id + 128 * (j % K)] = m.past.step(
                    i, j, m.bias[j][w.id]);
    if (w.warp == 0 && w.lane < PR)
        to[2 * NS + w.lane] = m.past.step(i, 2 * K, m.bias[2 * K][w.id]);
    if (w.warp == 1 && w.lane < PR)
        to[2 * NS + PR + w.lane] = silu(in);
    if (w.warp == 2 && w.lane < 2) {
        const float d = softplus(in + m.own[1]);
        to[2 * NS + 2 * PR + w.lane] = w.lane ? expf(__fmul_rn(m.own[0], d)) : d;
    }
}

// A number of the state decays, takes up u B, and is read with C. (Of four numbers, or of all that
// a thread has, it would be other code.)
__device__ __forceinline__ void join(
        float& s, float& v, float u, float B, float C, float eg) {
    s = fmaf(u, B, __fmul_rn(s, eg));
    v = fmaf(s, C, v);
}

// The state is left for whoever goes on from state `out`.
__device__ __forceinline__ void write_state(
        const Own& own, const float4 (&S)[MINE][WIDE], int out) {
    if (out >= 0 && own.on)
        #pragma unroll
        for (int r = 0; r < MINE; r++)
            #pragma unroll
            for (int k = 0; k < WIDE; k++)
                __stcs(own.place(out, r, k), S[r][k]);
}

// What row i of the step reads from the block's rows of the state: sums over their lanes.
__device__ __forceinline__ void put_sums(
        const Room& m, const Own& own, float (&v)[MINE], unsigned i) {
    int which;
    const float s = row_sums(v, which);
    // all lanes that hold it write the same
    if (own.on)
        m.sum[i % 2][own.at + which * STEP] = s;
}

// What row i reads becomes y, by the last warp, lane = row of the block: with the skip, the gate
// and the norm's gain; and the sum of squares.
__device__ __forceinline__ void answer(
        const Params& p, const Work& w, const Room& m, const float* in,
        unsigned i) {
    const bool it = w.lane < PR;
    const float o = it ? __fmul_rn(
                                 fmaf(m.own[2], in[w.lane], m.sum[i % 2][w.lane]),
                                 in[PR + w.lane])
                       : 0.f;
    const float ss = warp_sum(__fmul_rn(o, o));
    if (it)
        p.y[(size_t)(w.r0 + i) * w.inner + w.at0 + w.lane] = __fmul_rn(
                o, m.gain[w.lane]);
    if (!w.lane)
        p.parts[(size_t)(w.r0 + i) * (w.inner / PR) + w.at0 / PR] = ss;
}

// Row i is finished, and its last inputs are left for whoever goes on from state `out`.
__device__ __forceinline__ void finish(
        const Params& p, const Work w, const Room& m, const float* in, unsigned i,
        int out) {
    if (out >= 0)
        m.past.keep(
                i, p.conv + (size_t)out * 3 * w.c, w.c,
                blockIdx.x == 0 && w.id < NS, w.warp == 0 && w.lane < PR);
    if (w.warp == 3)
        answer(p, w, m, in, i);
}

// Zeros for rows after the last sequence's.
__device__ __forceinline__ void put_zeros(const Params& p, const Work& w) {
    if (w.seq == gridDim.z - 1 && w.warp == 0)
        #pragma unroll 1
        for (int r = w.r1; r < p.rows; r++) {
            const size_t row = r;
            if (w.lane < PR)
                p.y[row * w.inner + w.at0 + w.lane] = 0.f;
            if (!w.lane)
                p.parts[row * (w.inner / PR) + w.at0 / PR] = 0.f;
        }
}

extern "C" __global__ void __launch_bounds__(128, RESIDENT) mamba_step(
        const float* x, const float* __restrict__ conv_w,
        const float* __restrict__ conv_b, const float* __restrict__ decay,
        const float* __restrict__ skip, const float* __restrict__ dt_bias,
        const float* __restrict__ norm_w, float* conv, float* rec,
        const int* __restrict__ first, const int* __restrict__ starts,
        const int* __restrict__ state_in, const int* __restrict__ state_out,
        float* y, float* parts, int rows) {
    const Params p = {x, conv_w, conv_b, decay, skip, dt_bias, norm_w, conv, rec,
            first, starts, state_in, state_out, y, parts, rows};
    __shared__ Conv<SLOTS> past;
    __shared__ __align__(16) float now[4][2 * NS + 2 * PR + 4];
    __shared__ float bias[SLOTS][128], gain[32], own[4], sum[2][PR];
    const Room m = {past, now, bias, gain, own, sum};
    const Work w(p, threadIdx.x);
    int col[SLOTS];
    bool has[SLOTS];
    find_channels(w, col, has);
    fetch_weights(p, w, m, col, has);
    const Own mine(p, w);
    float4 S[MINE][WIDE];
    #pragma unroll
    for (int r = 0; r < MINE; r++)
        #pragma unroll
        for (int k = 0; k < WIDE; k++)
            S[r][k] = w.start && mine.on ? __ldcs(mine.place(w.from, r, k))
                                         : make_float4(0, 0, 0, 0);
    past.fetch_tail(
            w.start ? p.conv + (size_t)w.from * 3 * w.c : nullptr, w.c, col, has);
    wait();
    if (w.n)
        fetch(p, w, m, 0);
    // Round j convolves row j beside what the row before it does to the state, and reads from it;
    // behind the barrier, that row is finished.
    #pragma unroll 1
    for (unsigned j = 0; j <= w.n; j++) {
        const unsigned i = j - 1;
        const float* b = now[i % 4];
        const float* in = b + 2 * NS;
        const int out = j ? p.state_out[w.r0 + i] : -1;
        if (j) {
            const float d = in[2 * PR];
            const float eg = in[2 * PR + 1];
            float v[MINE] = {};
            #pragma unroll
            for (int k = 0; k < WIDE; k++) {
                const float4 B = *(const float4*)(b + mine.n4 + k * 128);
                const float4 C = *(const float4*)(b + NS + mine.n4 + k * 128);
                #pragma unroll
                for (int r = 0; r < MINE; r++) {
                    const float u = mine.input(in, d, r);
                    #pragma unroll
                    for (int l = 0; l < 4; l++)
                        join((&S[r][k].x)[l], v[r], u, (&B.x)[l], (&C.x)[l], eg);
                }
            }
            write_state(mine, S, out);
            put_sums(m, mine, v, i);
        }
        if (j < w.n)
            convolve(w, m, j);
        __syncthreads();
        if (j)
            finish(p, w, m, in, i, out);
        if (j + 1 < w.n)
            fetch(p, w, m, j + 1);
    }
    put_zeros(p, w);
}
