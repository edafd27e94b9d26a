// Half of the MLPs of a mixture of experts, for many rows of a decode step (expert_slots.cu has
// listed who needs whom): y of an entry = act(W f(x) + bias), W the entry's expert. A warp takes 16
// rows of an expert's matrix at a time (a strip) times all entries of a slot by tensor cores
// (lib/fragment.cuh), alone from the first column to the last: it adds up shares of the columns one
// after the other, as many warps do elsewhere, and meets nobody. Strips of all slots are one line,
// of which a block has a piece; DEEP units of a warp are on their way to shared memory, those of
// the next strip or slot after this one's. Rows of BUFFERS slots are staged at a time, by all
// warps: those of the next slot while this one's strips are computed, once all warps have left the
// slot that was there before. So no warp waits for others unless they are far behind.
// An entry's bits depend on nothing but its row and its expert.
//   -D FORMAT= fragment of W  -D K= columns  -D STORED= rows of a matrix as stored, a multiple of 4
//   -D OUTPUTS= of a matrix  -D PICKS= entries of a row  -D ENTRIES= of a slot: 1, 2, 4, 8 or 16
//   -D SPLIT= shares of the columns  -D ACT= of lib/act.cuh  -D NORM= (0 or 1)
//   -D UP= 1: slots are what the kernel before this one wrote; 0: what the one before that did
//   -D WARPS=  DEEP=  BUFFERS=  ROOM= bytes of shared memory but for slots
//   -D ASIDE= 1: copies bring 256 bytes to the L2 cache, which are lines of two units; 0: 128
//   launch: <<<any number, 32*WARPS, shared bytes: see atlas.cuda.experts_wide>>>
#if ASIDE
#define ASKS_L2 ".L2::256B"
#endif
#include "lib/act.cuh"
#include "lib/ahead.cuh"
#include "lib/bulk.cuh"
#include "lib/fragment.cuh"
#include "lib/pdl.cuh"
#include "lib/reduce.cuh"
#ifndef FORMAT
#define FORMAT fragment_nvfp4
#define K 2048
#define STORED 1024
#define OUTPUTS 512
#define PICKS 9
#define ENTRIES 8
#define SPLIT 4
#define ACT ACT_SILU
#define NORM 1
#define UP 1
#define WARPS 16
#define DEEP 4
#define BUFFERS 2
#define ASIDE 0
#define ROOM 219680
#endif
// What the kernel is given, in the order of its arguments.
struct Params {
    // bank of matrices [n4, k] in FORMAT, the shared expert's last
    const unsigned char* w;  // [bytes] u8
    const unsigned char* s;  // [scales] u8 or null: their scales
    const float* gs;  // [wrows] f32 or null: nvfp4, int4: scale of each row
    const float* bias;  // [wrows] f32 or null: of rows as they are stored
    // expert of each slot, as expert_slots.cu has listed them
    const int* which;  // [most] i32
    const int* slots;  // [most, record] i32: their entries; record = ENTRIES + 1
    const int* number;  // [1] i32: slots in use
    // width >= K, a multiple of 4; UP 1: of each row, UP 0: each entry
    const float* x;  // [xrows, width] f32
    const float* gain;  // [k] f32 or null: of the norm (NORM 1)
    float* y;  // [yrows, outs] f32: outs >= outputs, a multiple of 4
    float eps;  // of the norm
    float limit;  // of the activation (lib/act.cuh)
    // the matrix that all rows need, asked for before anybody knows the slots; or -1
    int shared;
    int width;  // numbers of a row of x
    int outs;  // of y
};

constexpr bool PAIR = ACT == ACT_SILU || ACT == ACT_GELU || ACT == ACT_OAI;
// chunks of 32 columns; blocks of 128; pieces of 256
constexpr int C = (K + 31) / 32;
constexpr int HELD = (K + 255) / 256 * 2;
constexpr int PARTS = HELD / 2;
constexpr int THREADS = 32 * WARPS, RECORD = ENTRIES + 1;
constexpr int TILES = (ENTRIES + 7) / 8, COLUMNS = 8 * TILES;  // of a product
constexpr unsigned STRIPS = (STORED + 15) / 16;
typedef FORMAT<C> F;
typedef Staged<F, 4 * HELD> S;
constexpr unsigned UNITS = ((C + 3) / 4 + F::UNITS - 1) / F::UNITS;
constexpr unsigned PLANE = ENTRIES * S::LDR;
constexpr int UNROLLED = UNITS == SPLIT ? SPLIT : 1;  // shares of one unit
// strips whose last units are on their way, or just read
constexpr int TAILS = 1 + DEEP / UNITS;
static_assert(SPLIT <= UNITS && STORED % 4 == 0, "see the contract");

struct Rows {  // of a slot
    uint4 x[S::PLANES * PLANE];
    float e[HELD][COLUMNS], squares[ENTRIES][PARTS];
};
struct Shared {  // and then the experts of the block's slots, and their entries
    Rows rows[BUFFERS];
    unsigned char ring[WARPS][DEEP][F::BYTES];
    float tail[WARPS][TAILS][32];  // scales of a strip's rows, then biases
    Meeting staged[2], left[2];  // of each buffer: by all warps
};
static_assert(sizeof(Shared) == ROOM, "see the contract");

// Columns 8v to 8v + 7 of row r of a slot, normed but for its length, into shared memory.
__device__ __forceinline__ void put_row(
        Rows* rows, int r, int v, float* a, const float* __restrict__ gain) {
    const int lane = threadIdx.x % 32;
    float g[8], sum = 0.f;
    if (NORM && v * 8 < K)
        load8(gain + v * 8, g);
    #pragma unroll
    for (int j = 0; j < 8; j++) {
        if (K % 4)
            a[j] = v * 8 + j < K ? a[j] : 0.f;
        if (NORM) {
            sum = fmaf(a[j], a[j], sum);
            a[j] = v * 8 < K ? __fmul_rn(a[j], g[j]) : 0.f;
        }
    }
    if (NORM)
        sum = warp_sum(sum);
    if (NORM && !lane)
        rows->squares[r][v / 32] = sum;
    uint4* const to = rows->x + r * S::LDR + v % 4 * S::LD + v / 4;
    if (F::TWO)
        split8(a, to[0], to[F::TWO ? PLANE : 0]);
    else {
        float top = top8(a);
        #pragma unroll
        for (int m = 1; m < 16; m *= 2)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
        const float2 f = chunk_scale(top);
        *to = F::CROSSED ? to_half8_crossed(a, f.x) : to_half8(a, f.x);
        if (lane % 16 == 0)
            rows->e[v / 16][r] = f.y;
    }
}

// All rows of a slot: pieces of 256 columns are dealt out to warps, MANY of each on their way.
__device__ __forceinline__ void stage(
        Rows* rows, const int* record, const float* x,
        const float* __restrict__ gain, int width) {
    constexpr int ROUNDS = (ENTRIES * PARTS + WARPS - 1) / WARPS;
    constexpr int MANY = ROUNDS < 4 ? ROUNDS : 4;
    const int pieces = record[0] * PARTS;
    #pragma unroll 1
    for (int from = threadIdx.x / 32; from < pieces; from += MANY * WARPS) {
        float a[MANY][8] = {};
        #pragma unroll
        for (int k = 0; k < MANY; k++) {
            const int i = from + k * WARPS;
            const int v = i % PARTS * 32 + threadIdx.x % 32;
            if (i >= pieces)
                break;
            const int entry = record[1 + i / PARTS];
            const int row = UP ? entry / PICKS : entry;
            const float* const at = x + (size_t)row * width + v * 8;
            #pragma unroll
            for (int j = 0; j < 8; j += 4)
                if (v * 8 + j < K)
                    *(float4*)(a[k] + j) = __ldcg((const float4*)(at + j));
        }
        #pragma unroll
        for (int k = 0; k < MANY; k++) {
            const int i = from + k * WARPS;
            if (i < pieces)
                put_row(rows, i / PARTS, i % PARTS * 32 + threadIdx.x % 32, a[k],
                        gain);
        }
    }
}

// What the results of row r of a slot are to be multiplied by.
__device__ __forceinline__ float length(const Rows* rows, int r, float eps) {
    if (!NORM)
        return 1.f;
    float sum = 0.f;
    #pragma unroll
    for (int i = 0; i < PARTS; i++)
        sum += rows->squares[r][i];
    return rsqrtf(fmaf(sum, 1.f / K, eps));
}

// Where a lane's results of a tile of eight columns go, from `y` on: of gates and ups, which
// neighbours have, each lane gets those of one column.
struct To {
    static constexpr int MANY = PAIR ? 1 : 2;
    static constexpr unsigned NOWHERE = ~0u;
    unsigned at[MANY];
    __device__ __forceinline__ void find(
            const int* record, int column, int outs) {
        const int g = threadIdx.x % 32 / 4;
        #pragma unroll
        for (int j = 0; j < MANY; j++) {
            const int c = column + (PAIR ? g % 2 : j);
            const int o = PAIR ? g / 2 * 2 : 2 * g;
            at[j] = c < record[0] ? record[1 + c] * outs + o : NOWHERE;
        }
    }
    // z: rows 2g and 2g+1 of strip `strip` times the two columns.
    __device__ __forceinline__ void put(
            const float* z, int strip, float* y, float limit) const {
        const int g = threadIdx.x % 32 / 4;
        const int first = strip * (PAIR ? 8 : 16);
        const bool in = OUTPUTS % 8 == 0
                || first + (PAIR ? g / 2 * 2 : 2 * g) < OUTPUTS;
        float2 v[2] = {{z[0], z[2]}, {z[1], z[3]}};
        if (PAIR) {
            const bool odd = g % 2;
            const float a = __shfl_xor_sync(~0u, odd ? z[0] : z[1], 4);
            const float b = __shfl_xor_sync(~0u, odd ? z[2] : z[3], 4);
            v[0].x = act_mul<ACT>(odd ? a : z[0], odd ? z[1] : a, limit);
            v[0].y = act_mul<ACT>(odd ? b : z[2], odd ? z[3] : b, limit);
        } else if (ACT)
            #pragma unroll
            for (int j = 0; j < 2; j++) {
                v[j].x = act_mul<ACT>(v[j].x, 0.f, limit);
                v[j].y = act_mul<ACT>(v[j].y, 0.f, limit);
            }
        #pragma unroll
        for (int j = 0; j < MANY; j++)
            if (in && at[j] != NOWHERE)
                *(float2*)(y + first + at[j]) = v[j];
    }
};

// Where piece i of n equal ones of a line begins: all * i / n, without the 64 bits that it needs.
__device__ __forceinline__ unsigned piece_of(
        unsigned all, unsigned i, unsigned n) {
    return all / n * i + all % n * i / n;
}

// What a warp fetches next: unit `unit` of strip `strip` of the line. Scales and biases of the
// strip's rows come with its last unit.
struct Next {
    Bytes w, s;
    unsigned strip, unit, tail;
    unsigned row;  // of the bank: the strip's first
    int rest;  // rows of the matrix from there on
    __device__ __forceinline__ void begin(
            Bytes bank, Bytes scales, int expert, int lane) {
        const unsigned from = strip % STRIPS * 16;
        w = bank;
        s = scales;
        row = expert * STORED + from;
        F::first(w, s, row, 0, lane);
        rest = STORED - from;
    }
    __device__ __forceinline__ void further() {
        strip += WARPS;
        unit = 0;
        row += 16 * WARPS;
        rest -= 16 * WARPS;
        w += (size_t)16 * WARPS * F::LINE;
        s += (size_t)4 * WARPS * F::SLINE;
    }
    // Share by share. True: that was the last unit of the strip.
    __device__ __forceinline__ bool fetch(unsigned char* to, int lane) {
        const int rows = STORED % 16 ? rest : 16;
        F::fetch(to, w + unit * F::LB, s + unit * F::SB, rows, unit, lane);
        unit += SPLIT;
        if (unit < UNITS)
            return false;
        unit = unit % SPLIT + 1;
        return unit == SPLIT;
    }
    __device__ __forceinline__ void fetch_tail(
            float (*tails)[32], const float* scale, const float* bias, int lane) {
        if (lane < 4) {
            float* const to = tails[TAILS > 1 ? tail : 0] + lane * 4;
            const bool on = STORED % 16 == 0 || lane * 4 < rest;
            const unsigned at = row + lane * 4;
            if (scale)
                cp_async_or_zero<16>(to, scale + at, on);
            if (bias)
                cp_async_or_zero<16>(to + 16, bias + at, on);
        }
        tail = tail == TAILS - 1 ? 0 : tail + 1;
    }
};

// Barriers of the buffers: rows are staged in each, and left, by all warps.
__device__ __forceinline__ void init_meetings(Shared* sm) {
    for (int i = 0; i < BUFFERS; i++) {
        meet_init(sm->staged + i, WARPS);
        meet_init(sm->left + i, WARPS);
    }
    meet_ready();
}

// The matrix that all rows need comes to the L2 cache.
__device__ __forceinline__ void ask_shared(
        Bytes w, Bytes s, int shared, int thread) {
    const int threads = gridDim.x * THREADS;
    const size_t row = (size_t)shared * STORED;
    ahead(w + row * F::LINE, STORED * (F::LINE / 16), thread, threads);
    if (s)
        ahead(s + row / 4 * F::SLINE, STORED / 4 * F::SLINE / 16, thread,
                threads);
}

// What a block has of the line: strips begin..end-1, and `own` slots from slot0 on.
struct Piece {
    unsigned begin, end, slot0, own;
    __device__ __forceinline__ explicit Piece(const int* number) {
        const unsigned all = __ldcg(number) * STRIPS;
        begin = piece_of(all, blockIdx.x, gridDim.x);
        end = piece_of(all, blockIdx.x + 1, gridDim.x);
        slot0 = begin / STRIPS;
        own = begin < end ? (end - 1) / STRIPS - slot0 + 1 : 0;
    }
};

// Slots are there when this returns. Meanwhile the matrix that all rows need is asked for.
__device__ __forceinline__ void await_slots(const Params& p, unsigned thread) {
    if (!UP)
        pdl_trigger();
    if (UP && p.shared >= 0)  // memory idles
    {
        const int at = blockIdx.x * THREADS + thread;
        ask_shared(p.w, p.s, p.shared, at);
    }
    if (UP)
        pdl_wait();
    if (UP)
        pdl_trigger();  // the next kernel reads slots before it waits
}

// The block's slots, which all its warps know when this returns: the expert of each, and its
// entries; and barriers of their rows.
__device__ __forceinline__ void load_slots(
        Shared* sm, const Params& p, const Piece& piece, int* experts,
        int* records, unsigned thread) {
    #pragma unroll 1
    for (unsigned i = thread; i < piece.own * RECORD; i += THREADS) {
        if (i < piece.own)
            experts[i] = __ldcg(p.which + piece.slot0 + i);
        records[i] = __ldcg(p.slots + piece.slot0 * RECORD + i);
    }
    if (!thread)
        init_meetings(sm);
    __syncthreads();
}

// The strip that a warp fetches next, if the block has it.
__device__ __forceinline__ void open_strip(
        const Params& p, const Piece& piece, const int* experts, Next& next,
        int lane) {
    if (next.strip >= piece.end)
        return;
    const unsigned slot = next.strip / STRIPS - piece.slot0;
    next.begin(p.w, p.s, experts[slot], lane);
}

// The unit that a warp needs next is asked for; with the last one of a strip, what belongs to its
// rows.
__device__ __forceinline__ void fetch_unit(
        const Params& p, const Piece& piece, const int* experts, Next& next,
        float (*tails)[32], unsigned char* to, int lane) {
    if (next.strip < piece.end && next.fetch(to, lane)) {
        const float* const scales = RowScales<F>::IN_S ? (const float*)p.s : p.gs;
        next.fetch_tail(tails, scales, p.bias, lane);
        const unsigned slot = next.strip / STRIPS;
        next.further();
        if (next.strip / STRIPS != slot)
            open_strip(p, piece, experts, next, lane);
    }
    cp_async_commit();
}

// acc += unit u of a strip times the slot's columns, as many tiles of them as have entries.
__device__ __forceinline__ void add_unit(
        const F* q, float (*acc)[4], const uint4* const* x_of, const Rows* rows,
        unsigned u, int count, int t) {
    #pragma unroll
    for (int b = 0; b < F::UNITS; b++)
        #pragma unroll
        for (int i = 0; i < TILES; i++) {
            if (i && count <= 8 * i)
                break;
            const int block = u * F::UNITS + b;
            add<F, 8, S::LD, PLANE>(
                    q[b], acc[i], x_of[i] + 4 * block, rows->e[block] + 8 * i, t);
        }
}

// v += what a share of the columns has made.
__device__ __forceinline__ void add_share(float (*v)[4], const float (*acc)[4]) {
    #pragma unroll
    for (int i = 0; i < TILES; i++)
        #pragma unroll
        for (int j = 0; j < 4; j++)
            v[i][j] += acc[i][j];
}

// Scales and biases of a lane's two rows of a strip.
__device__ __forceinline__ void read_tail(
        const float* with, bool biased, int g, float* unit, float* more) {
    #pragma unroll
    for (int i = 0; i < 2; i++) {
        unit[i] = F::row_scale((Bytes)with, with, 2 * g + i);
        more[i] = biased ? with[16 + 2 * g + i] : 0.f;
    }
}

// Where a lane finds its columns of a slot, tile after tile, and what becomes of their results.
__device__ __forceinline__ void open_slot(
        const Rows* rows, const int* record, int count, int outs, float eps,
        int g, int t, To* where, float (*inverse)[2], const uint4** x_of) {
    #pragma unroll
    for (int i = 0; i < TILES; i++) {
        const int c = 8 * i + 2 * t;
        where[i].find(record, c, outs);
        inverse[i][0] = length(rows, min(c, count - 1), eps);
        inverse[i][1] = length(rows, min(c + 1, count - 1), eps);
        x_of[i] = rows->x + min(8 * i + g, count - 1) * S::LDR
                + F::template own<S::LD>(t);
    }
}

// A warp's part of a slot's rows.
__device__ __forceinline__ void put_slot(
        Shared* sm, int buffer, const int* record, const float* x,
        const float* gain, int width, int lane) {
    stage(sm->rows + buffer, record, x, gain, width);
    __syncwarp();
    if (!lane)
        meet_arrive(sm->staged + buffer);
}

// Where warps say that they have left slot n.
__device__ __forceinline__ Meeting* left(Shared* sm, unsigned n) {
    return sm->left + n % BUFFERS;
}

// A warp's parts of slots from `put` on: of slot n, which is due, and of those behind it that find
// room. Returns the first that did not.
__device__ __forceinline__ unsigned put_slots(
        Shared* sm, const Params& p, const int* records, unsigned put, unsigned n,
        unsigned own, int lane) {
    #pragma unroll 1
    for (; put < min(n + BUFFERS, own); put++) {
        const unsigned parity = (put / BUFFERS + 1) % 2;
        const bool room = put < BUFFERS || meet_over(left(sm, put), parity);
        if (!__all_sync(~0u, room)) {
            if (put > n)
                break;
            meet_wait(left(sm, put), parity);
        }
        put_slot(
                sm, put % BUFFERS, records + put * RECORD, p.x, p.gain, p.width,
                lane);
    }
    return put;
}

// v += a strip times a slot's columns: one share of these after the other, of each its units, which
// lie in the ring from `place` on. Where a unit has been `fetch` puts another.
template <class Fetch>
__device__ __forceinline__ void multiply_strip(
        float (*v)[4], unsigned char* ring, unsigned& place,
        const uint4* const* x_of, const Rows* rows, int count, int g, int t,
        Fetch fetch) {
    #pragma unroll UNROLLED
    for (unsigned share = 0; share < SPLIT; share++) {
        float acc[TILES][4] = {};
        #pragma unroll 1
        for (unsigned u = share; u < (UNITS == SPLIT ? share + 1 : UNITS);
                u += SPLIT) {
            F q[F::UNITS];
            cp_async_wait<DEEP - 1>();
            __syncwarp();
            #pragma unroll
            for (int b = 0; b < F::UNITS; b++)
                q[b].read(ring + place, b, g, t);
            __syncwarp();
            fetch(ring + place);
            place = place == (DEEP - 1) * F::BYTES ? 0 : place + F::BYTES;
            add_unit(q, acc, x_of, rows, u, count, t);
        }
        add_share(v, acc);
    }
}

// What a strip has made, times what belongs to its columns and its rows, goes to y. `tail`: where
// the latter is, and then that of the next strip.
__device__ __forceinline__ void put_strip(
        const Params& p, const float (*v)[4], const float (*tails)[32], int& tail,
        const float (*inverse)[2], const To* where, int count, int strip, int g) {
    float unit[2], more[2];
    const float* const with = tails[TAILS > 1 ? tail : 0];
    read_tail(with, p.bias, g, unit, more);
    tail = tail == TAILS - 1 ? 0 : tail + 1;
    #pragma unroll
    for (int i = 0; i < TILES; i++) {
        if (i && count <= 8 * i)
            break;
        float z[4];
        #pragma unroll
        for (int j = 0; j < 4; j++)
            z[j] = fmaf(
                    __fmul_rn(v[i][j], inverse[i][j % 2]), unit[j / 2],
                    more[j / 2]);
        where[i].put(z, strip, p.y, p.limit);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) expert_strips(
        const unsigned char* __restrict__ w, const unsigned char* __restrict__ s,
        const float* __restrict__ gs, const float* __restrict__ bias,
        const int* which, const int* slots, const int* number, const float* x,
        const float* __restrict__ gain, float* y, float eps, float limit,
        int shared, int width, int outs) {
    const Params p = {w, s, gs, bias, which, slots, number, x, gain, y, eps,
            limit, shared, width, outs};
    DYNAMIC_SHARED(Shared, sm);
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int t = lane % 4;
    // the compiler learns: one for all
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    await_slots(p, threadIdx.x);
    const Piece piece(number);
    // of the block's slots
    int* const experts = (int*)(sm + 1);
    int* const records = experts + piece.own;
    load_slots(sm, p, piece, experts, records, threadIdx.x);
    unsigned char* const ring = sm->ring[warp][0];
    float (*const tails)[32] = sm->tail[warp];
    Next next = {};
    next.strip = piece.begin + warp;
    const auto fetch = [&](unsigned char* to) {
        fetch_unit(p, piece, experts, next, tails, to, lane);
    };
    open_strip(p, piece, experts, next, lane);
    #pragma unroll 1
    for (int i = 0; i < DEEP; i++)
        fetch(ring + i * F::BYTES);
    if (!UP)
        pdl_wait();
    // slots of whose rows this warp has put its part
    unsigned strip = piece.begin + warp, put = 0;
    unsigned place = 0;  // of the unit that is multiplied next, in the ring
    int tail = 0;
    #pragma unroll 1
    for (unsigned n = 0; n < piece.own; n++) {
        const int* const record = records + n * RECORD;
        const int count = record[0];
        Rows* const rows = sm->rows + n % BUFFERS;
        const unsigned to = min((piece.slot0 + n + 1) * STRIPS, piece.end);
        float inverse[TILES][2];
        To where[TILES];
        const uint4* x_of[TILES];
        #pragma unroll 1
        for (bool fresh = true;; fresh = false, strip += WARPS) {
            put = put_slots(sm, p, records, put, n, piece.own, lane);
            if (fresh) {
                meet_wait(sm->staged + n % BUFFERS, n / BUFFERS % 2);
                open_slot(
                        rows, record, count, outs, eps, g, t, where, inverse,
                        x_of);
            }
            if (strip >= to)
                break;
            float v[TILES][4] = {};
            multiply_strip(v, ring, place, x_of, rows, count, g, t, fetch);
            put_strip(
                    p, v, tails, tail, inverse, where, count, strip % STRIPS, g);
        }
        __syncwarp();
        if (!lane)
            meet_arrive(left(sm, n));
    }
}
