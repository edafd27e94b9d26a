// delta_step.cu for many sequences, and its bits. A block has a whole head, and sequences one after
// the other: their states are on the way to shared memory, DEPTH at a time, long before it is their
// turn (lib/bulk.cuh). In delta_step.cu every block waits for its own loads, and memory waits
// meanwhile for blocks to ask and to write. Warps of four have 32 columns, as there; a warp besides
// for each 32 has v, the gate, and in the end y.
//   launch: <<<(vh, any), 5*DV>>> and DEPTH*sizeof(Head) + sizeof(Room) bytes; a block has at most
//        MOST of `count`
//   sequences: blockIdx.y, + gridDim.y, ...   -D DK=, DV= 32, 64 or 128   -D SIGMOID= 1: of the
//        gate, else silu
//   -D DEPTH= states on their way, at least 2
//   -D TAILS= tails for each slot
//   -D RECORD= numbers of a head's record
//   -D COLUMNS= 0, or, to leave `halves`, vh*dv: of FORMAT= CORES= as for gemv_halves.cu; DV is
//               128, and vh a multiple of a unit's blocks
#include "lib/reduce.cuh"
#include "lib/bulk.cuh"
#include "lib/pdl.cuh"
#include "lib/conv.cuh"
#include "lib/delta.cuh"
#include "lib/late.cuh"
#include "lib/tiles.cuh"
#include "lib/warps.cuh"
#ifndef DK
#define DK 128
#endif
#ifndef DV
#define DV 128
#endif
#ifndef SIGMOID
#define SIGMOID 0
#endif
#ifndef DEPTH
#define DEPTH 2
#endif
#ifndef TAILS
#define TAILS 1
#endif
#ifndef COLUMNS
#define COLUMNS 0
#endif
#ifndef FORMAT
#define FORMAT fragment_nvfp4
#endif
#ifndef CORES
#define CORES 0
#endif
constexpr int N = DK / 16;
constexpr int PARTS = DV / 32;
constexpr int WARPS = 4 * PARTS;
constexpr int THREADS = 32 * (WARPS + PARTS);
// the warp that leaves halves: another than the one that asks for states
constexpr int LEAVES = WARPS + PARTS - 1;
constexpr int MOST = 256;  // sequences of a block
constexpr int OWN = 2 * DK + DV;  // channels of a head's q, k and v
// where things are in Room::now
constexpr int Q = 0;
constexpr int K = DK;
constexpr int V = 2 * DK;
constexpr int GATE = V + DV;
constexpr int BETA = GATE + DV;
static_assert(
        (DK == 32 || DK == 64 || DK == 128) && DV % 32 == 0 && DEPTH > 1,
        "a head's sizes");

typedef FORMAT<COLUMNS / 32> Main;
constexpr bool HALVES = COLUMNS > 0;
static_assert(
        !HALVES || (DV == 128 && COLUMNS % (DV * Main::UNITS) == 0),
        "see the contract");

typedef Record<DK, DV> Head;
#ifdef RECORD
static_assert(sizeof(Head) == 4 * RECORD, "records of another size");
#endif
struct Sequence {
    int r0, r1, from;  // its rows, and where its state is; -1: nowhere
    __device__ __forceinline__ bool empty() const { return r0 == r1; }
    // Which of those that are pending its only row becomes, if its state stays where it is; else -1
    __device__ __forceinline__ int late(int pending, int to) const {
        const bool stays = from >= 0 && to >= 0 && from / TAILS == to / TAILS;
        return stays && r1 - r0 == 1 && pending < PENDING ? pending : -1;
    }
};
struct Room {
    // a row, and the next one: q | k | v | gate | beta, exp(g)
    float now[2][BETA + 4];
    float red[PARTS][4][64], cross[4][4], gain[DV], own[4];  // A, dt_bias
    float tails[DEPTH][3][OWN];  // of convolutions, oldest input first
    float done[DV], squares[4];  // y and `parts` of the row, if `halves` get it
    // are states there? And tails, which are smaller
    Meeting full[DEPTH], ready[DEPTH];
    int asked, unused;  // states that have been asked for
    Sequence all[MOST];
};
#ifdef ROOM
static_assert(
        ROOM == DEPTH * sizeof(Head) + sizeof(Room),
        "the launch gives other shared memory than the kernel wants");
#endif

// A head's part of a row of y, normed as gemv_halves.cu does it, to its tile: by one warp.
__device__ __forceinline__ void leave(
        unsigned char* halves, int tiles, int row, int head, float* a,
        float squares, float eps) {
    typedef Tile<Main, CORES> T;
    const int lane = threadIdx.x % 32;
    const float z = rsqrtf(fmaf(squares, 1.f / DV, eps));
    #pragma unroll
    for (int j = 0; j < 8; j++)
        a[j] = __fmul_rn(a[j], z);
    const size_t tile = (size_t)(head / Main::UNITS) * tiles + row / 8;
    T::put(halves + tile * T::BYTES, row % 8, head % Main::UNITS, lane % 16, a,
            lane < 16);
}

// The same of a row that is in `m`.
__device__ __forceinline__ void leave_done(
        const Room& m, unsigned char* halves, int tiles, int row, int head,
        float eps) {
    float a[8], sum = m.squares[0];
    load8(m.done + threadIdx.x % 16 * 8, a);
    #pragma unroll
    for (int j = 1; j < PARTS; j++)
        sum += m.squares[j];
    leave(halves, tiles, row, head, a, sum, eps);
}

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
    float* y;  // [r, vh, dv] f32 or null
    // sums of squares of y before norm_w and gate, of each 32 columns
    float* parts;  // [r, vh, p] f32 or null
    // instead of both: y, normed, in tiles of rows (lib/tiles.cuh), line = tiles * bytes
    unsigned char* halves;  // [units, line] u8 or null
    float eps;  // of that norm
    int kh;  // heads of keys
    int seqs;  // sequences
    int rows;  // of the step, those after the last sequence's included
    int tiles;  // of halves
};

// What a block has: a head, and sequences z, z + step, ...
struct Work {
    int head, vh, key;
    int z, step;
    int c, width;  // channels; numbers of a row of x
    int mine;  // how many sequences
    __device__ __forceinline__ explicit Work(const Params& p) {
        head = blockIdx.x;
        vh = gridDim.x;
        key = head / (vh / p.kh);
        z = blockIdx.y;
        step = gridDim.y;
        c = 2 * p.kh * DK + vh * DV;
        width = c + vh * DV + 2 * vh;
        mine = p.seqs > z ? (p.seqs - z + step - 1) / step : 0;
    }
    // The head's record of state n.
    __device__ __forceinline__ Head* place(const Params& p, int n) const {
        const size_t slot = (unsigned)n / TAILS;
        return (Head*)p.rec + slot * vh + head;
    }
};

// What a thread has of the channels: q or v, and k or the gate, which is no channel.
struct Channels {
    unsigned col[2];
    bool has[2];
    float4 taps[2];  // the last for the newest input
    float seen[2][3], in[2];
    __device__ __forceinline__ void weights(const float* __restrict__ w) {
        #pragma unroll
        for (int k = 0; k < 2; k++)
            taps[k] = has[k] ? *(const float4*)(w + col[k] * 4)
                             : make_float4(0.f, 0.f, 0.f, 0.f);
    }
    // `at`: where the first one is in the head's part of a tail; `apart`: where the other is, from
    // there
    __device__ __forceinline__ void tail(
            const float (*tails)[OWN], int at, int apart, bool known) {
        #pragma unroll
        for (int k = 0; k < 2; k++)
            #pragma unroll
            for (int t = 0; t < 3; t++)
                seen[k][t] = known && has[k] ? tails[t][at + k * apart] : 0.f;
    }
    __device__ __forceinline__ void ask(const float* row, bool on) {
        #pragma unroll
        for (int k = 0; k < 2; k++)
            in[k] = on ? row[col[k]] : 0.f;
    }
    // Convolved, and the row's inputs have been seen.
    __device__ __forceinline__ float step(int k) {
        const float4 w = taps[k];
        const float older = fmaf(
                seen[k][2], w.z,
                fmaf(seen[k][1], w.y, __fmul_rn(seen[k][0], w.x)));
        seen[k][0] = seen[k][1];
        seen[k][1] = seen[k][2];
        seen[k][2] = in[k];
        return silu(fmaf(in[k], w.w, older));
    }
    // A row's q and k, or v and gate.
    __device__ __forceinline__ void put(
            float* now, bool side, bool keyed, int column, int tid) {
        now[side ? V + column : Q + tid] = step(0);
        if (keyed)
            now[K + tid] = step(1);
        else
            now[GATE + column] = SIGMOID ? sigmoid(in[1]) : silu(in[1]);
    }
    __device__ __forceinline__ void keep(float* conv, int out, int c) const {
        #pragma unroll
        for (int k = 0; k < 2; k++)
            if (has[k])
                #pragma unroll
                for (int t = 0; t < 3; t++)
                    conv[((size_t)out * 3 + t) * c + col[k]] = seen[k][t];
    }
};

// Who a thread is. q and k are a thread's of the first warps, v and the gate of those besides; the
// last of the others has the scalars. `side`: besides, where no state is.
struct Who {
    int tid, lane, warp;
    bool side, keyed, scalars, keeps;
    int part, column;  // 32 columns that four warps and one have; one of q or v
    // of the state: four columns of rows row0 .. row0+N-1, which lie `at`
    unsigned c4, row0, at;
    __device__ __forceinline__ Who(int thread, const Work& w, int kh)
        : tid(thread) {
        lane = tid % 32;
        warp = __shfl_sync(~0u, tid / 32, 0);
        side = warp >= WARPS;
        keyed = tid < DK;
        part = side ? warp - WARPS : warp / 4;
        column = side ? part * 32 + lane : tid;
        scalars = warp == WARPS - 1 && lane < 2;
        const bool first = w.head % (w.vh / kh) == 0;  // of a key's
        keeps = side || (keyed && first);
        row0 = tid % 128 / 8 * N;
        c4 = lane % 8 * 4;
        at = row0 * DV + part * 32 + c4;
    }
};

// Which channels a thread has.
__device__ __forceinline__ void find_channels(
        Channels& ch, const Params& p, const Work& w, const Who& who) {
    ch.has[0] = who.side || who.keyed;
    ch.has[1] = who.keyed;
    ch.col[0] = who.side ? 2 * p.kh * DK + w.head * DV + who.column
                         : w.key * DK + who.tid;
    ch.col[1] = who.side ? w.c + w.head * DV + who.column
                         : (p.kh + w.key) * DK + who.tid;
}

// A thread's part of the state goes to where it is kept.
__device__ __forceinline__ void write_state(
        float* const p, const Columns<N>& mem) {
    #pragma unroll
    for (int n = 0; n < N; n++)
        __stcs((float4*)(p + n * DV), mem.S[n]);
}

// A row of y, of which a lane has four columns from `four` on, and its squares; or, where the next
// product wants that, it is left as tiles.
__device__ __forceinline__ void put_row(
        const Params& p, const Work& w, Room& m, int row, const float4& o,
        const float& ss, unsigned four, int part, int lane, int warp) {
    const size_t cell = (size_t)row * w.vh + w.head;
    if (HALVES) {
        if (lane < 8)
            *(float4*)(m.done + four) = o;
        if (!lane)
            m.squares[part] = ss;
        // before the next barrier of all, behind which they are written anew
        sync_warps<PARTS>(0);
        if (warp == LEAVES)
            leave_done(m, p.halves, p.tiles, row, w.head, p.eps);
    } else {
        if (lane < 8)
            __stcg((float4*)(p.y + cell * DV + four), o);
        if (!lane)
            p.parts[cell * PARTS + part] = ss;
    }
}

// By one thread: barriers by which others wait for states, and for their tails.
__device__ __forceinline__ void begin_meetings(Room& m) {
    for (int i = 0; i < DEPTH; i++) {
        meet_init(m.full + i, 1);
        meet_init(m.ready + i, 1);
    }
    meet_ready();
}

// By one thread: a state and its tails are asked for.
__device__ __forceinline__ void ask_state(
        const Params& p, const Work& w, Room& m, Head* states, int i, int from) {
    Meeting *const b = m.full + i % DEPTH, *const near = m.ready + i % DEPTH;
    bulk_expect(near, from < 0 ? 0 : 4 * 3 * OWN);
    bulk_expect(b, from < 0 ? 0 : sizeof(Head));
    if (from < 0)
        return;
    #pragma unroll
    for (int t = 0; t < 3; t++) {
        const size_t line = (size_t)from * 3 + t;
        const float* const tail = p.conv + line * w.c;
        float* const to = m.tails[i % DEPTH][t];
        bulk_copy(to, tail + w.key * DK, 4 * DK, near);
        bulk_copy(to + DK, tail + (p.kh + w.key) * DK, 4 * DK, near);
        bulk_copy(to + 2 * DK, tail + 2 * p.kh * DK + w.head * DV, 4 * DV, near);
    }
    bulk_copy_once(states + i % DEPTH, w.place(p, from), sizeof(Head), b);
}

// What is read from four columns of the state, times gain and gate, and its squares.
__device__ __forceinline__ float4 answer(
        const Room& m, const float* now, const Rule& rule, const float (&d)[4],
        unsigned four, int part, unsigned c4, float scale, float& ss) {
    const float4 qS = sum_of_warps(m.red[part], 32 + c4);
    const float4 gate = *(const float4*)(now + GATE + four);
    return rule.read(qS, d, *(const float4*)(m.gain + four), gate, scale, ss);
}

// beta of a row, or exp(g).
__device__ __forceinline__ float scalar(const Room& m, int lane, float ba) {
    return lane ? expf(__fmul_rn(m.own[0], softplus(ba + m.own[1])))
                : sigmoid(ba);
}

// The i-th sequence of a block.
__device__ __forceinline__ Sequence sequence(
        const Params& p, const Work& w, int i) {
    const int s = w.z + i * w.step;
    const int r0 = p.first[s];
    const int r1 = p.first[s + 1];
    const int start = p.starts[s];
    const int from = p.state_in[s];
    return {r0, r1, r1 > r0 && start ? from : -1};
}

// A row that is `late` joins those that are pending in its state's record, which says how
// many these are.
__device__ __forceinline__ void leave_late(
        const Params& p, const Work& w, const float* now, int late, int to,
        const float (&d)[4], float eg, int part, int lane) {
    if (late >= 0)
        w.place(p, to)->add(late, now + K, d, eg, part * 32, lane);
    if (to >= 0 && !lane)
        w.place(p, to)->say(part * 32, late + 1);
}

// By one thread: the first states are asked for.
__device__ __forceinline__ void ask_first(
        const Params& p, const Work& w, Room& m, Head* states) {
    int from[DEPTH];
    #pragma unroll
    for (int i = 0; i < DEPTH; i++)
        from[i] = i < w.mine ? sequence(p, w, i).from : -1;
    begin_meetings(m);
    #pragma unroll
    for (int i = 0; i < DEPTH; i++)
        ask_state(p, w, m, states, i, from[i]);
    m.asked = DEPTH;
}

// What is the same for all rows: the block's sequences, the norm's gains and the head's scalars.
__device__ __forceinline__ void load(
        const Params& p, const Work& w, Room& m, const Who& who) {
    for (int i = who.tid; i < w.mine; i += THREADS)
        m.all[i] = sequence(p, w, i);
    if (who.tid < DV)
        m.gain[who.tid] = p.norm_w[who.tid];
    if (who.scalars) {
        const float* const from = who.lane ? p.dt_bias : p.decay;
        m.own[who.lane] = from[w.head];
    }
}

// The row that a thread asks for: row r, of the block's i-th sequence; where it is to leave its
// state, and, of scalars, their input.
struct Next {
    int i, r, out;
    float ba;
    __device__ __forceinline__ void begin(const Room& m, int mine) {
        i = 0;
        while (i < mine && m.all[i].empty())
            i++;
        r = i < mine ? m.all[i].r0 : 0;
        out = -1;
        ba = 0.f;
    }
    __device__ __forceinline__ void further(const Room& m, int mine) {
        if (++r != m.all[i].r1)
            return;
        do
            i++;
        while (i < mine && m.all[i].empty());
        if (i < mine)
            r = m.all[i].r0;
        else
            pdl_trigger();
    }
    __device__ __forceinline__ void ask(
            const Params& p, const Work& w, const Who& who, Channels& ch) {
        const float* const row = p.x + (size_t)r * w.width;
        ch.ask(row, ch.has[0]);
        if (who.scalars) {
            const int first = w.width - 2 * w.vh + w.head;
            ba = row[first + who.lane * w.vh];
        }
        out = p.state_out[r];
    }
};

// All of a row but what belongs to its state, whose tail goes to `to`.
__device__ __forceinline__ void put_inputs(
        const Params& p, const Work& w, const Room& m, const Who& who,
        Channels& ch, float* now, int to, float ba) {
    if (ch.has[0]) {
        ch.put(now, who.side, who.keyed, who.column, who.tid);
        if (to >= 0 && who.keeps)
            ch.keep(p.conv, to, w.c);
    }
    if (who.scalars)
        now[BETA + who.lane] = scalar(m, who.lane, ba);
}

// A state with all that is pending there, or, if it is not `known`, zeros.
__device__ __forceinline__ void take_state(
        Columns<N>& mem, const Head& h, const Who& who, int pending, bool known) {
    const float4* const s = (const float4*)(h.S + who.at);
    #pragma unroll
    for (int n = 0; n < N; n++)
        mem.S[n] = known ? s[n * DV / 4] : make_float4(0.f, 0.f, 0.f, 0.f);
    const unsigned column = who.part * 32 + who.c4;
    mem.take_pending(h, pending, who.row0, column);
}

// The tail of the own-th sequence, of whose rows the first is next.
__device__ __forceinline__ void begin_tail(
        Room& m, const Who& who, Channels& ch, int own) {
    meet_wait(m.ready + own % DEPTH, own / DEPTH % 2);
    const int at = who.side ? 2 * DK + who.column : who.tid;
    const bool known = m.all[own].from >= 0;
    ch.tail(m.tails[own % DEPTH], at, DK, known);
}

// And its state, the last of those that have been `read`. Returns as which of those that are
// pending there its row is left, if that is the only one; or -1.
__device__ __forceinline__ int begin_state(
        Room& m, const Head* states, const Who& who, Columns<N>& mem, int own,
        int to, int& read) {
    // some may have no rows
    #pragma unroll 1
    for (; read <= own; read++)
        meet_wait(m.full + read % DEPTH, read / DEPTH % 2);
    const Head& h = states[own % DEPTH];
    const bool known = m.all[own].from >= 0;
    const int pending = known ? h.pending(who.part * 32) : 0;
    const int late = m.all[own].late(pending, to);
    if (!who.side)
        take_state(mem, h, who, pending, known);
    return late;
}

// A row's products with the state, and, by four warps, of its q and k: q.k, q.q, k.k.
__device__ __forceinline__ void multiply(
        const Columns<N>& mem, Room& m, const float* now, const Who& who) {
    if (who.warp < 4) {
        const float a = who.keyed ? now[Q + who.tid] : 0.f;
        const float b = who.keyed ? now[K + who.tid] : 0.f;
        const float dot = warp_sum4(
                __fmul_rn(a, b), __fmul_rn(a, a), __fmul_rn(b, b), 0.f);
        if (who.lane % 8 == 0)
            m.cross[who.warp][who.lane / 8] = dot;
    }
    mem.products(
            now + Q + who.row0, now + K + who.row0, who.lane,
            m.red[who.part][who.warp % 4]);
}

// 1/sqrt(DK)
constexpr float SCALE = DK == 128 ? 0.08838834764831845f
        : DK == 64                ? 0.125f
                                  : 0.17677669529663687f;

// When all products are there: the state takes the row up, or the row is left beside it; and it
// is answered. `late`: as which of those that are pending it is left, or -1.
__device__ __forceinline__ void end_row(
        const Params& p, const Work& w, Room& m, const Who& who, Columns<N>& mem,
        const float* now, int row, int late, int to) {
    const Rule rule(sum_of_cross(m.cross), now[BETA], now[BETA + 1]);
    const unsigned four = who.part * 32 + who.c4;
    float d[4];
    rule.change(
            sum_of_warps(m.red[who.part], who.c4),
            *(const float4*)(now + V + four), d);
    if (who.side) {
        leave_late(p, w, now, late, to, d, rule.eg, who.part, who.lane);
        float ss;
        const float4 o = answer(
                m, now, rule, d, four, who.part, who.c4, SCALE, ss);
        put_row(p, w, m, row, o, ss, four, who.part, who.lane, who.warp);
    } else if (late < 0) {
        mem.take(now + K + who.row0, d, rule.eg);
        if (to >= 0)
            write_state(w.place(p, to)->S + who.at, mem);
    }
}

// Rows after the last sequence's get zeros.
__device__ __forceinline__ void clear_rows(
        const Params& p, const Work& w, const Who& who) {
    #pragma unroll 1
    for (int r = p.first[p.seqs]; r < p.rows; r++) {
        if (HALVES) {
            float zeros[8] = {};
            if (who.warp == LEAVES)
                leave(p.halves, p.tiles, r, w.head, zeros, 0.f, p.eps);
            continue;
        }
        const size_t cell = (size_t)r * w.vh + w.head;
        if (who.tid < DV)
            p.y[cell * DV + who.tid] = 0.f;
        if (who.tid < PARTS)
            p.parts[cell * PARTS + who.tid] = 0.f;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) delta_wide(
        const float* x, const float* __restrict__ conv_w,
        const float* __restrict__ decay, const float* __restrict__ dt_bias,
        const float* __restrict__ norm_w, float* conv, float* rec,
        const int* __restrict__ first, const int* __restrict__ starts,
        const int* __restrict__ state_in, const int* __restrict__ state_out,
        float* y, float* parts, unsigned char* halves, float eps, int kh,
        int seqs, int rows, int tiles) {
    const Params p = {x, conv_w, decay, dt_bias, norm_w, conv, rec, first, starts,
            state_in, state_out, y, parts, halves, eps, kh, seqs, rows, tiles};
    DYNAMIC_SHARED(Head, states);
    Room& m = *(Room*)(states + DEPTH);
    const Work w(p);
    const Who who(threadIdx.x, w, kh);
    // One thread asks for states. The first are asked for before anything else is known.
    const bool asks = who.tid == 32 * WARPS;
    if (asks)
        ask_first(p, w, m, states);
    if (w.mine > MOST)
        __trap();
    Channels ch;
    find_channels(ch, p, w, who);
    ch.weights(conv_w);
    load(p, w, m, who);
    Columns<N> mem;
    __syncthreads();
    Next next;
    next.begin(m, w.mine);
    pdl_wait();
    if (next.i < w.mine)
        next.ask(p, w, who, ch);
    int turn = 0;
    int read = 0;  // states that have been read
    int late = -1;  // where the row is left, instead of the state
    #pragma unroll 1
    while (next.i < w.mine) {
        float* const now = m.now[turn++ % 2];
        const int row = next.r;
        const int to = next.out;
        const int own = next.i;
        const bool begins = row == m.all[own].r0;
        if (begins)
            begin_tail(m, who, ch, own);
        put_inputs(p, w, m, who, ch, now, to, next.ba);
        // The next row's inputs are asked for while this one is worked on
        next.further(m, w.mine);
        if (next.i < w.mine)
            next.ask(p, w, who, ch);
        if (begins)
            late = begin_state(m, states, who, mem, own, to, read);
        __syncthreads();
        if (asks)
            #pragma unroll 1
            for (; m.asked < min(w.mine, read + DEPTH); m.asked++)
                ask_state(p, w, m, states, m.asked, m.all[m.asked].from);
        // Then, behind the barrier, the state takes it up.
        if (!who.side)
            multiply(mem, m, now, who);
        __syncthreads();
        end_row(p, w, m, who, mem, now, row, late, to);
    }
    if (w.z == 0)
        clear_rows(p, w, who);
}
