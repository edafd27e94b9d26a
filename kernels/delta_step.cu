// A gated delta net between its projections, for the rows of a decode step: causal convolution,
// silu, unit q and k, the delta rule, and the output gate. The norm over each head is left to
// whoever reads y: it gets the sums of squares (gemv.cu, IN 2). A block owns 32 columns of one
// head's state, in registers: a row costs one pass over them, because o = exp(g) q.S + (q.k) d with
// d = beta (v - exp(g) k.S) needs only products with the state before the row. All that does not
// depend on the state is done for several rows of a sequence at once, before the first of them.
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
// Of a step with one draft, slots get the state before it and its rows (`Late`); with more drafts
// that takes longer than states that have taken their rows up.
constexpr bool LEAVES = ROWS == 2 && PENDING > 1;
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

// What the kernel is given, in the order of its arguments.
struct Params {
    // q | k | v | z | b | a, width = 2*kh*dk + 2*vh*dv + 2*vh
    const float* x;  // [r, width] f32
    const float* conv_w;  // [c, 4] f32: c = 2*kh*dk + vh*dv
    const float* decay;  // [vh] f32: A = -exp(A_log)
    const float* dt_bias;  // [vh] f32
    const float* norm_w;  // [dv] f32
    // inputs of the three positions before, oldest first
    float* conv;  // [states, 3, c] f32
    // state n has tail n, and the rest in n/TAILS: a record of lib/late.cuh
    float* rec;  // [slots, vh, record] f32
    // rows of sequence s: first[s] .. first[s+1]-1; rows after the last sequence's get zeros
    const int* first;  // [seqs1] i32
    const int* starts;  // [seqs] i32: position of its first row
    // state to begin from (unread at position 0)
    const int* state_in;  // [seqs] i32
    // state after a row, or -1; never one that is read in this step, but its rest may be where the
    // sequence's own begins: nobody else reads it
    const int* state_out;  // [r] i32
    float* y;  // [r, vh, dv] f32
    // sums of squares of y before norm_w and gate, of each 32 columns
    float* parts;  // [r, vh, p] f32
    int rows;  // of the step, those after the last sequence's included
};

// Where a thread is: in a block that has a sequence, and 32 columns of a head.
struct Work {
    int id, lane, warp;
    int seq, r0, r1;  // rows of the sequence
    int start, from;  // position of the first of them, and the state before it
    int kh, key, vh, head, part;
    int c, width;  // channels; numbers of a row of x
    int own32;  // the first column, of all heads'
    __device__ __forceinline__ Work(const Params& p, int tid) {
        id = tid;
        lane = tid % 32;
        warp = __shfl_sync(~0u, tid / 32, 0);
        seq = blockIdx.z;
        r0 = p.first[seq];
        r1 = p.first[seq + 1];
        start = p.starts[seq];
        from = p.state_in[seq];
        kh = gridDim.y;
        key = blockIdx.y;
        vh = kh * (gridDim.x / PARTS);
        head = (key * gridDim.x + blockIdx.x) / PARTS;
        part = blockIdx.x % PARTS;
        c = 2 * kh * DK + vh * DV;
        width = c + vh * DV + 2 * vh;
        own32 = head * DV + part * 32;
    }
    // The head's record of state n.
    __device__ __forceinline__ Head* place(const Params& p, int n) const {
        const size_t slot = (unsigned)n / TAILS;
        return (Head*)p.rec + slot * vh + head;
    }
};

// What a thread does. Four warps have the state, and a number of q and one of k each thread; the
// fifth has v, the gate and the scalars, and in the end y.
struct Role {
    bool side, mine;  // is it of the fifth warp; has it a number of q?
    bool keeps;  // does it leave the last inputs of its channels?
};

// Two numbers of each row that are a thread's.
struct Numbers {
    int col[2];  // where they are in the row
    bool has[2];  // channels; the fifth warp's second number, z, is not convolved
};

// Four columns of rows row0 .. row0+N-1 of the state, which are a thread's.
struct Own {
    int row0, c4, at;
    __device__ __forceinline__ explicit Own(const Work& w) {
        row0 = w.id / 8 * N;
        c4 = w.lane % 8 * 4;
        at = row0 * DV + w.part * 32 + c4;
    }
};

// Channels of a thread. What changes stands first: in another order the compiler deals out other
// registers.
struct Channels {
    float seen[2][3];  // the last three inputs, oldest first
    float4 taps[2];  // of a channel, the last for the newest input
    // Their weights, and inputs before the first row.
    __device__ __forceinline__ void load(
            const Params& p, const Work& w, const Numbers& two) {
        #pragma unroll
        for (int k = 0; k < 2; k++)
            taps[k] = two.has[k] ? *(const float4*)(p.conv_w + two.col[k] * 4)
                                 : make_float4(0.f, 0.f, 0.f, 0.f);
        #pragma unroll
        for (int k = 0; k < 2; k++)
            #pragma unroll
            for (int t = 0; t < 3; t++)
                seen[k][t] = w.start && two.has[k]
                        ? p.conv[((size_t)w.from * 3 + t) * w.c + two.col[k]]
                        : 0.f;
    }
    // The last inputs, for whoever goes on from state `out`.
    __device__ __forceinline__ void leave(
            const Params& p, const Work& w, const Role& role, const Numbers& two,
            int out) const {
        if (out < 0 || !role.keeps)
            return;
        #pragma unroll
        for (int k = 0; k < 2; k++)
            if (two.has[k])
                #pragma unroll
                for (int t = 0; t < 3; t++)
                    p.conv[(size_t)out * 3 * w.c + t * w.c + two.col[k]] =
                            seen[k][t];
    }
    // A row's q and k, or v and gate: convolved, and its inputs have been seen.
    __device__ __forceinline__ void convolve(
            const Work& w, const Role& role, const float (&in)[2], float* now) {
        float v[2];
        #pragma unroll
        for (int k = 0; k < 2; k++) {
            const float4 tap = taps[k];
            const float older = fmaf(
                    seen[k][2], tap.z,
                    fmaf(seen[k][1], tap.y, __fmul_rn(seen[k][0], tap.x)));
            v[k] = k && role.side ? (SIGMOID ? sigmoid(in[1]) : silu(in[1]))
                                  : silu(fmaf(in[k], tap.w, older));
            seen[k][0] = seen[k][1];
            seen[k][1] = seen[k][2];
            seen[k][2] = in[k];
        }
        float* const to = now + (role.side ? 2 * DK + w.lane : w.id);
        if (role.side || role.mine) {
            to[0] = v[0];
            to[role.side ? 32 : DK] = v[1];
        }
    }
};

// The state that the sequence begins from.
__device__ __forceinline__ void load_state(
        const Params& p, const Work& w, const Role& role, const Own& own,
        Columns<N>& mem) {
    #pragma unroll
    for (int i = 0; i < N; i++)
        mem.S[i] = w.start && !role.side
                ? __ldcs((const float4*)(w.place(p, w.from)->S + own.at + i * DV))
                : make_float4(0.f, 0.f, 0.f, 0.f);
}

// Of the rows in hand, all but the state.
struct Inputs {
    float in[ROWS][2], ba = 0.f;
    int outs = -1;
    // Rows from `base` on.
    __device__ __forceinline__ void ask(
            const Params& p, const Work& w, const Role& role, const Numbers& two,
            int base) {
        #pragma unroll
        for (int i = 0; i < ROWS; i++)
            #pragma unroll
            for (int k = 0; k < 2; k++)
                in[i][k] = base + i < w.r1 && (role.side || role.mine)
                        ? p.x[(base + i) * w.width + two.col[k]]
                        : 0.f;
        const int row = base + w.lane / 2;
        if (role.side && w.lane / 2 < ROWS && row < w.r1)
            ba = p.x[(row + 1) * w.width - 2 * w.vh + w.head + w.lane % 2 * w.vh];
        if (ROWS == 1)
            outs = p.state_out[base];
        else if (!LEAVES)
            ask_outs(p, w, base);
    }
    // Of several rows, a lane has the state after one.
    __device__ __forceinline__ void ask_outs(
            const Params& p, const Work& w, int base) {
        outs = w.lane < ROWS && base + w.lane < w.r1 ? p.state_out[base + w.lane]
                                                     : -1;
    }
};

// What beta and decay are made of: odd lanes of the fifth warp have dt_bias, and A beside it.
struct Scalars {
    float bias, rate;
    __device__ __forceinline__ Scalars(
            const Params& p, const Work& w, const Role& role) {
        bias = role.side ? (w.lane % 2 ? p.dt_bias : p.decay)[w.head] : 0.f;
        rate = __shfl_xor_sync(~0u, bias, 1);
    }
    // Those of the n rows in hand.
    __device__ __forceinline__ void put(
            Rows& m, const Work& w, const Role& role, float ba, int n) const {
        if (role.side && w.lane / 2 < n)
            m.now[w.lane / 2][2 * DK + 64 + w.lane % 2] = w.lane % 2
                    ? expf(__fmul_rn(rate, softplus(ba + bias)))
                    : sigmoid(ba);
        if (role.side)
            __syncwarp();
    }
};

// A row in hand.
struct Row {
    const float* q;  // from the thread's first row of the state on
    const float* v;
    int out;  // the state after it, or -1
    Head* to;  // its record
    bool late;  // is the row left there, pending, instead of the state?
};

// The state's warps: q.k, q.q and k.k, and the row's products with the state.
__device__ __forceinline__ void multiply(
        Rows& m, const Work& w, const Columns<N>& mem, const float* q, int i) {
    const float* now = m.now[i];
    const float a = w.id < DK ? now[w.id] : 0.f;
    const float b = w.id < DK ? now[DK + w.id] : 0.f;
    const float dot = warp_sum4(
            __fmul_rn(a, b), __fmul_rn(a, a), __fmul_rn(b, b), 0.f);
    if (w.lane % 8 == 0)
        m.cross[i % 2][w.warp][w.lane / 8] = dot;
    mem.products(q, q + DK, w.lane, m.red[i % 2][w.warp]);
}

// The fifth warp, meanwhile: k joins the record where the row is left late, and what is pending
// there is said.
__device__ __forceinline__ void leave_key(
        const Rows& m, const Work& w, const Row& row, int pending, int i) {
    if (row.late)
        row.to->add_key(pending, m.now[i] + DK, row.v[65], w.part * 32, w.lane);
    if (row.out >= 0 && !w.lane)
        row.to->say(w.part * 32, row.late ? pending + 1 : 0);
}

// The fifth warp, behind the barrier: what is read from the state, times gain and gate, and its
// squares.
__device__ __forceinline__ void answer(
        const Params& p, const Rows& m, const Work& w, const Own& own,
        const Rule& rule, const float (&d)[4], const float* v, int row, int i) {
    // 1/sqrt(DK)
    constexpr float SCALE = DK == 128 ? 0.08838834764831845f
            : DK == 64                ? 0.125f
                                      : 0.17677669529663687f;
    const float4 read = sum_of_warps(m.red[i % 2], 32 + own.c4);
    const float4 gate = *(const float4*)(v + 32 + own.c4);
    float ss;
    const float4 o = rule.read(
            read, d, *(const float4*)(m.gain + own.c4), gate, SCALE, ss);
    const int here = row * w.vh * DV + w.own32;
    if (w.lane < 8)
        __stcg((float4*)(p.y + here + own.c4), o);
    if (!w.lane)
        p.parts[here / 32] = ss;
}

// The state's warps: their part of it goes to a record.
__device__ __forceinline__ void write_state(
        const Own& own, const Columns<N>& mem, Head* to) {
    #pragma unroll
    for (int m = 0; m < N; m++)
        __stcs((float4*)(to->S + own.at + m * DV), mem.S[m]);
}

// And behind the barrier: it takes the row up, and is written if it is to be kept.
__device__ __forceinline__ void take(
        const Own& own, Columns<N>& mem, const Row& row, const float (&d)[4],
        float eg) {
    mem.take(row.q + DK, d, eg);
    if (row.out >= 0)
        write_state(own, mem, row.to);
}

// Where rows are left in place of states. A sequence's first row joins those that are pending where
// it begins, if its state stays in this slot, and if it is alone or LEAVES. The second one's slot
// gets the state before the first row then, which is written while nobody waits for it, and both
// rows: whoever goes on from there lets them join.
struct Late {
    int pending;  // where the sequence begins
    // its slot; or ~0 at position 0, and, of a sequence that has just a row, where no other may be
    // pending
    unsigned stays;
    // Is row i of the first in hand left where the state after it, `out`, is to be found?
    __device__ __forceinline__ bool left(int i, int out) const {
        const bool here = (unsigned)out / TAILS == stays;
        if (!LEAVES)
            return out >= 0 && here;
        return out >= 0 && (i ? !here : here && pending < PENDING);
    }
    // And as which of those that are pending there?
    __device__ __forceinline__ int place(int i) const {
        return LEAVES && i ? i : pending;
    }
};
// The second row's slot, which gets the state before the first, and both rows: null if it does not.
__device__ __forceinline__ Head* behind(
        const Params& p, const Work& w, const Late& late, int outs) {
    const int out = __shfl_sync(~0u, outs, 1);
    return late.left(1, out) ? w.place(p, out) : nullptr;
}

// And gets it, before the wait.
__device__ __forceinline__ void write_behind(
        const Params& p, const Work& w, const Role& role, const Own& own,
        const Late& late, const Columns<N>& mem, Inputs& in) {
    in.ask_outs(p, w, w.r0);
    if (Head* const then = behind(p, w, late, in.outs))
        if (!role.side)
            write_state(own, mem, then);
}

// `n` rows are in hand: their channels, convolved, and the tails behind them.
__device__ __forceinline__ void convolve_rows(
        const Params& p, Rows& m, const Work& w, const Role& role,
        const Numbers& two, Channels& ch, const Inputs& in, int n) {
    #pragma unroll
    for (int i = 0; i < ROWS; i++) {
        if (i >= n)
            break;
        ch.convolve(w, role, in.in[i], m.now[i]);
        if (ROWS > 1)
            ch.leave(p, w, role, two, __shfl_sync(~0u, in.outs, i));
    }
}

// Row i of those in hand: its products with the state; then, behind the barrier, the state takes
// the row up, if anybody needs that.
__device__ __forceinline__ void step(
        const Params& p, Rows& m, const Work& w, const Role& role,
        const Numbers& two, const Channels& ch, const Own& own, const Late& late,
        Columns<N>& mem, int outs, int base, int i) {
    const bool begins = !LEAVES || base == w.r0;
    // the fifth warp leaves the first row there, too
    Head* const then = LEAVES && begins && i == 0 ? behind(p, w, late, outs)
                                                  : nullptr;
    Row row;
    row.q = m.now[i] + own.row0;
    row.v = m.now[i] + 2 * DK;
    row.out = ROWS == 1 ? outs : __shfl_sync(~0u, outs, i);
    row.to = w.place(p, max(row.out, 0));
    row.late = begins && late.left(i, row.out);
    if (!role.side) {
        multiply(m, w, mem, row.q, i);
    } else {
        if (ROWS == 1)
            ch.leave(p, w, role, two, row.out);
        leave_key(m, w, row, late.place(i), i);
        if (then)
            then->add_key(0, m.now[0] + DK, row.v[65], w.part * 32, w.lane);
    }
    __syncthreads();
    const Rule rule(sum_of_cross(m.cross[i % 2]), row.v[64], row.v[65]);
    float d[4];
    rule.change(
            sum_of_warps(m.red[i % 2], own.c4), *(const float4*)(row.v + own.c4),
            d);
    if (role.side) {
        answer(p, m, w, own, rule, d, row.v, base + i, i);
        if (row.late)
            row.to->add_change(late.place(i), d, w.part * 32, w.lane);
        if (then)
            then->add_change(0, d, w.part * 32, w.lane);
    } else {
        if (ROWS == 1)
            ch.leave(p, w, role, two, row.out);
        if (!row.late)
            take(own, mem, row, d, rule.eg);
        else if (LEAVES && base + i + 1 < w.r1)
            mem.take(row.q + DK, d, rule.eg);
    }
}

// Zeros for rows after the last sequence's.
__device__ __forceinline__ void put_zeros(const Params& p, const Work& w) {
    if (w.seq == gridDim.z - 1 && w.warp == 0)
        #pragma unroll 1
        for (int r = w.r1; r < p.rows; r++) {
            const size_t row = (size_t)r * w.vh;
            p.y[row * DV + w.own32 + w.lane] = 0.f;
            if (!w.lane)
                p.parts[(row + w.head) * PARTS + w.part] = 0.f;
        }
}

extern "C" __global__ void __launch_bounds__(160, RESIDENT) delta_step(
        const float* x, const float* conv_w, const float* __restrict__ decay,
        const float* __restrict__ dt_bias, const float* __restrict__ norm_w,
        float* conv, float* rec, const int* __restrict__ first,
        const int* __restrict__ starts, const int* __restrict__ state_in,
        const int* __restrict__ state_out, float* y, float* parts, int rows) {
    const Params p = {x, conv_w, decay, dt_bias, norm_w, conv, rec, first, starts,
            state_in, state_out, y, parts, rows};
    __shared__ __align__(16) Rows m;
    if (ROWS == 1 || (LEAVES && gridDim.z == 1))
        pdl_trigger();
    const Work w(p, threadIdx.x);
    const bool side = w.warp == 4;
    const bool mine = !side && w.id < DK;
    const Numbers two = {
            {side ? 2 * w.kh * DK + w.own32 + w.lane : w.key * DK + w.id,
                    side ? w.c + w.own32 + w.lane : (w.kh + w.key) * DK + w.id},
            {side || mine, mine}};
    const Role role = {side, mine, side || (mine && blockIdx.x == 0)};
    Channels ch;
    const Own own(w);
    const int pending = w.start ? w.place(p, w.from)->pending(w.part * 32) : 0;
    Columns<N> mem;
    load_state(p, w, role, own, mem);
    ch.load(p, w, two);
    if (role.side)
        m.gain[w.lane] = p.norm_w[w.part * 32 + w.lane];
    const Scalars scalars(p, w, role);
    if (!role.side)
        mem.take_pending(
                *w.place(p, w.from), pending, own.row0, w.part * 32 + own.c4);
    const unsigned here = w.start ? (unsigned)w.from / TAILS : ~0u;
    const unsigned stays = w.start && pending < PENDING && w.r1 - w.r0 == 1
            ? (unsigned)w.from / TAILS
            : ~0u;
    const Late late = {pending, LEAVES ? here : stays};
    Inputs in;
    if (LEAVES)
        write_behind(p, w, role, own, late, mem, in);
    pdl_wait();
    if (w.r0 < w.r1)
        in.ask(p, w, role, two, w.r0);
    // so that blocks of a later launch do not crowd a multiprocessor where rows follow each other
    if (ROWS > 1)
        pdl_trigger();
    #pragma unroll 1
    for (int base = w.r0; base < w.r1; base += ROWS) {
        const int n = ROWS == 1 ? 1 : min(ROWS, w.r1 - base);
        if (base > w.r0) {
            in.ask(p, w, role, two, base);
            if (LEAVES)
                in.ask_outs(p, w, base);
            __syncthreads();  // the rows before are done with
        }
        convolve_rows(p, m, w, role, two, ch, in, n);
        __syncthreads();
        scalars.put(
                m, w, role, in.ba,
                n);  // nobody needs them before the next barrier
        #pragma unroll 1
        for (int i = 0; i < n; i++)
            step(p, m, w, role, two, ch, own, late, mem, in.outs, base, i);
    }
    put_zeros(p, w);
}
