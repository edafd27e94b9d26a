// A gated delta net between its projections, for the rows of a decode step: causal convolution,
// silu, unit q and k, the delta rule, and the output gate. The norm over each head is left to
// whoever reads y: it gets the sums of squares (gemv.cu, IN 2). A block owns 32 columns of one
// head's state, in registers: a row costs one pass over them, because o = exp(g) q.S + (q.k) d with
// d = beta (v - exp(g) k.S) needs only products with the state before the row. All that does not
// depend on the state is done for several rows of a sequence at once, before the first of them.
//   x      : [r, width]            f32   q | k | v | z | b | a, width = 2*kh*dk + 2*vh*dv + 2*vh
//   conv_w : [c, 4]                f32   c = 2*kh*dk + vh*dv
//   decay  : [vh]                  f32   A = -exp(A_log)
//   dt_bias: [vh]                  f32
//   norm_w : [dv]                  f32
//   conv   : [states, 3, c]        f32   inputs of the three positions before, oldest first
//   rec    : [slots, vh, record]   f32   state n has tail n, and the rest in n/TAILS: a record of
//                                        lib/late.cuh
//   first  : [seqs1]               i32   rows of sequence s: first[s] .. first[s+1]-1; rows after
//                                        the last sequence's get zeros
//   starts : [seqs]                i32   position of its first row
//   state_in : [seqs]              i32   state to begin from (unread at position 0)
//   state_out : [r]                i32   state after a row, or -1; never one that is read in this
//                                        step, but its rest may be where the sequence's own begins:
//                                        nobody else reads it
//   y      : [r, vh, dv]           f32
//   parts  : [r, vh, p]            f32   sums of squares of y before norm_w and gate, of each 32
//                                        columns
//   launch: <<<(vh/kh*dv/32, kh, seqs), 160>>>; -D DK=, DV= 32, 64 or 128   -D SIGMOID= 1: of the
//        gate, else silu   -D ROWS= in hand at once
//   -D RESIDENT= blocks of a multiprocessor
//   -D TAILS= tails for each slot
//   -D RECORD= numbers of a head's record
#include "lib/reduce.cuh"
#include "lib/pdl.cuh"
#include "lib/conv.cuh"
#include "lib/delta.cuh"
#include "lib/late.cuh"
#ifndef DK
#define DK 128
#endif
#ifndef DV
#define DV 128
#endif
#ifndef SIGMOID
#define SIGMOID 0
#endif
#ifndef ROWS
#define ROWS 1
#endif
#ifndef RESIDENT
#define RESIDENT 4
#endif
#ifndef TAILS
#define TAILS 1
#endif
// rows of the state that a thread has a part of
constexpr int N = DK / 16, PARTS = DV / 32;
static_assert(
        (DK == 32 || DK == 64 || DK == 128) && DV % 32 == 0, "a head's sizes");

typedef Record<DK, DV> Head;
#ifdef RECORD
static_assert(sizeof(Head) == 4 * RECORD, "records of another size");
#endif
// The rows of one sequence that are in hand: what they are made of, and what the state's warps add
// up.
struct Rows {
    float now[ROWS][2 * DK + 68];  // q | k | v | gate | beta, exp(g)
    float red[2][4][64], cross[2][4][4], gain[32];
};

extern "C" __global__ void __launch_bounds__(160, RESIDENT) delta_step(
        const float* x, const float* conv_w, const float* __restrict__ decay,
        const float* __restrict__ dt_bias, const float* __restrict__ norm_w,
        float* conv, float* rec, const int* __restrict__ first,
        const int* __restrict__ starts, const int* __restrict__ state_in,
        const int* __restrict__ state_out, float* y, float* parts, int rows) {
    // 1/sqrt(DK)
    constexpr float SCALE = DK == 128 ? 0.08838834764831845f
            : DK == 64                ? 0.125f
                                      : 0.17677669529663687f;
    __shared__ __align__(16) Rows m;
    if (ROWS == 1)
        pdl_trigger();
    const int tid = threadIdx.x;
    const int lane = tid % 32;
    const int warp = __shfl_sync(~0u, tid / 32, 0);
    const int seq = blockIdx.z;
    const int r0 = first[seq];
    const int r1 = first[seq + 1];
    const int start = starts[seq];
    const int from = state_in[seq];
    const int kh = gridDim.y;
    const int key = blockIdx.y;
    const int vh = kh * (gridDim.x / PARTS);
    const int head = (key * gridDim.x + blockIdx.x) / PARTS;
    const int part = blockIdx.x % PARTS;
    const int c = 2 * kh * DK + vh * DV;
    const int width = c + vh * DV + 2 * vh;
    const int own32 = head * DV + part * 32;
    // Four warps have the state, and a number of q and one of k each thread; the fifth has v, the
    // gate and the scalars, and in the end y.
    const bool side = warp == 4, mine = !side && tid < DK;
    const int col[2] = {side ? 2 * kh * DK + own32 + lane : key * DK + tid,
            side ? c + own32 + lane : (kh + key) * DK + tid};
    // channels; the fifth warp's second number, z, is not convolved
    const bool has[2] = {side || mine, mine};
    // who leaves their last inputs
    const bool keeps = side || (mine && blockIdx.x == 0);
    // Four columns of rows row0 .. row0+N-1 of the state.
    const int row0 = tid / 8 * N, c4 = lane % 8 * 4;
    const auto place = [&](int n) {
        return (Head*)rec + (size_t)((unsigned)n / TAILS) * vh + head;
    };
    const int at = row0 * DV + part * 32 + c4;
    const int pending = start ? place(from)->pending(part * 32) : 0;
    Columns<N> mem;
    #pragma unroll
    for (int i = 0; i < N; i++)
        mem.S[i] = start && !side
                ? __ldcs((const float4*)(place(from)->S + at + i * DV))
                : make_float4(0.f, 0.f, 0.f, 0.f);
    float4 taps[2];  // of a channel, the last for the newest input
    float seen[2][3];
    #pragma unroll
    for (int k = 0; k < 2; k++)
        taps[k] = has[k] ? *(const float4*)(conv_w + col[k] * 4)
                         : make_float4(0.f, 0.f, 0.f, 0.f);
    #pragma unroll
    for (int k = 0; k < 2; k++)
        #pragma unroll
        for (int t = 0; t < 3; t++)
            seen[k][t] = start && has[k]
                    ? conv[((size_t)from * 3 + t) * c + col[k]]
                    : 0.f;
    if (side)
        m.gain[lane] = norm_w[part * 32 + lane];
    // odd lanes: dt_bias, and A beside it
    const float own = side ? (lane % 2 ? dt_bias : decay)[head] : 0.f;
    const float other = __shfl_xor_sync(~0u, own, 1);
    if (!side)
        mem.take_pending(*place(from), pending, row0, part * 32 + c4);
    // A sequence's only row, whose state stays in this slot, is left there with what is pending.
    const unsigned stays = start && pending < PENDING && r1 - r0 == 1
            ? (unsigned)from / TAILS
            : ~0u;
    // The last inputs of this thread's channels, for whoever goes on from state `out`
    const auto leave = [&](int out) {
        if (out < 0 || !keeps)
            return;
        #pragma unroll
        for (int k = 0; k < 2; k++)
            if (has[k])
                #pragma unroll
                for (int t = 0; t < 3; t++)
                    conv[(size_t)out * 3 * c + t * c + col[k]] = seen[k][t];
    };
    float in[ROWS][2], ba = 0.f;
    int outs = -1;
    // Of the rows from `base` on, all but the state
    const auto ask = [&](int base) {
        #pragma unroll
        for (int i = 0; i < ROWS; i++)
            #pragma unroll
            for (int k = 0; k < 2; k++)
                in[i][k] = base + i < r1 && (side || mine)
                        ? x[(base + i) * width + col[k]]
                        : 0.f;
        const int row = base + lane / 2;
        if (side && lane / 2 < ROWS && row < r1)
            ba = x[(row + 1) * width - 2 * vh + head + lane % 2 * vh];
        outs = ROWS == 1                          ? state_out[base]
                : lane < ROWS && base + lane < r1 ? state_out[base + lane]
                                                  : -1;
    };
    pdl_wait();
    if (r0 < r1)
        ask(r0);
    // so that blocks of a later launch do not crowd a multiprocessor where rows follow each other
    if (ROWS > 1)
        pdl_trigger();
    #pragma unroll 1
    for (int base = r0; base < r1; base += ROWS) {
        const int n = ROWS == 1 ? 1 : min(ROWS, r1 - base);
        if (base > r0) {
            ask(base);
            __syncthreads();  // the rows before are done with
        }
        #pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (i >= n)
                break;
            float v[2];
            #pragma unroll
            for (int k = 0; k < 2; k++) {
                const float4 w = taps[k];
                const float older = fmaf(
                        seen[k][2], w.z,
                        fmaf(seen[k][1], w.y, __fmul_rn(seen[k][0], w.x)));
                v[k] = k && side ? (SIGMOID ? sigmoid(in[i][1]) : silu(in[i][1]))
                                 : silu(fmaf(in[i][k], w.w, older));
                seen[k][0] = seen[k][1];
                seen[k][1] = seen[k][2];
                seen[k][2] = in[i][k];
            }
            float* const to = m.now[i] + (side ? 2 * DK + lane : tid);
            if (side || mine) {
                to[0] = v[0];
                to[side ? 32 : DK] = v[1];
            }
            if (ROWS > 1)
                leave(__shfl_sync(~0u, outs, i));
        }
        __syncthreads();
        // Nobody needs these before the next barrier
        if (side && lane / 2 < n)
            m.now[lane / 2][2 * DK + 64 + lane % 2] = lane % 2
                    ? expf(__fmul_rn(other, softplus(ba + own)))
                    : sigmoid(ba);
        if (side)
            __syncwarp();
        // A row's products with the state; then, behind the barrier, the state takes the row up.
        #pragma unroll 1
        for (int i = 0; i < n; i++) {
            const float* q = m.now[i] + row0;
            const float* v = m.now[i] + 2 * DK;
            const int out = ROWS == 1 ? outs : __shfl_sync(~0u, outs, i);
            Head* const to = place(max(out, 0));
            const bool late = out >= 0 && (unsigned)out / TAILS == stays;
            if (!side) {
                const float a = tid < DK ? m.now[i][tid] : 0.f;
                const float b = tid < DK ? m.now[i][DK + tid] : 0.f;
                // q.k, q.q, k.k
                const float dot = warp_sum4(
                        __fmul_rn(a, b), __fmul_rn(a, a), __fmul_rn(b, b), 0.f);
                if (lane % 8 == 0)
                    m.cross[i % 2][warp][lane / 8] = dot;
                mem.products(q, q + DK, lane, m.red[i % 2][warp]);
            } else {
                if (ROWS == 1)
                    leave(out);
                if (late)
                    to->add_key(pending, m.now[i] + DK, v[65], part * 32, lane);
                if (out >= 0 && !lane)
                    to->say(part * 32, late ? pending + 1 : 0);
            }
            __syncthreads();
            const Rule rule(sum_of_cross(m.cross[i % 2]), v[64], v[65]);
            float d[4];
            rule.change(
                    sum_of_warps(m.red[i % 2], c4), *(const float4*)(v + c4), d);
            if (side) {
                const float4 read = sum_of_warps(m.red[i % 2], 32 + c4);
                const float4 gate = *(const float4*)(v + 32 + c4);
                float ss;
                const float4 o = rule.read(
                        read, d, *(const float4*)(m.gain + c4), gate, SCALE, ss);
                const int here = (base + i) * vh * DV + own32;
                if (lane < 8)
                    __stcg((float4*)(y + here + c4), o);
                if (!lane)
                    parts[here / 32] = ss;
                if (late)
                    to->add_change(pending, d, part * 32, lane);
            } else {
                if (ROWS == 1)
                    leave(out);
                if (late)
                    continue;
                mem.take(q + DK, d, rule.eg);
                if (out >= 0) {
                    #pragma unroll
                    for (int m = 0; m < N; m++)
                        __stcs((float4*)(to->S + at + m * DV), mem.S[m]);
                }
            }
        }
    }
    if (seq == gridDim.z - 1 && warp == 0)
        #pragma unroll 1
        for (int r = r1; r < rows; r++) {
            y[(size_t)r * vh * DV + own32 + lane] = 0.f;
            if (!lane)
                parts[((size_t)r * vh + head) * PARTS + part] = 0.f;
        }
}
