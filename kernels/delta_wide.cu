// delta_step.cu for many sequences, and its bits. A block has a whole head of a sequence, and others after it:
// their states are on the way to shared memory, DEPTH at a time, long before it is their turn (lib/bulk.cuh).
// After the first of them a block takes what nobody has taken yet: some are farther from memory than others.
// In delta_step.cu every block waits for its own loads, and memory waits meanwhile for blocks to ask and to write.
// Four warps have 32 columns, as there. All threads share the channels of q, k, v and the gate: one each where DK
// is DV, for registers that do not suffice are written to memory, which is busy enough.
//   x      : [r, width]            f32   q | k | v | z | b | a, width = 2*kh*dk + 2*vh*dv + 2*vh
//   conv_w : [c, 4]                f32   c = 2*kh*dk + vh*dv
//   decay  : [vh]                  f32   A = -exp(A_log)
//   dt_bias: [vh]                  f32
//   norm_w : [dv]                  f32
//   conv   : [slots, 3, c]         f32   inputs of the three positions before, oldest first
//   rec    : [slots, vh, dk, dv]   f32
//   first  : [seqs1]               i32   rows of sequence s: first[s] .. first[s+1]-1; rows after the last
//                                        sequence's get zeros
//   starts : [seqs]                i32   position of its first row
//   state_in : [seqs]              i32   slot to begin from (unread at position 0)
//   state_out : [r]                i32   slot for the state after a row, or -1; never one that is read in this step
//   y      : [r, vh, dv]           f32
//   parts  : [r, vh, p]            f32   sums of squares of y before norm_w and gate, of each 32 columns
//   halves : [units, line]         u8    y, normed, as gemv_halves.cu leaves it for the next product; or null
//   queue  : [one]                 i32   0 before and after: how many heads have been taken; null: those of
//                                        block b are b, b + blocks, ... from the first one on
//   launch: <<<any, 4*DV>>> and 4*DK*DV*DEPTH + sizeof(Room) bytes; at most MOST sequences
//   -D DK=, DV= 32, 64 or 128   -D SIGMOID= 1: of the gate, else silu
//   -D DEPTH= states on their way, at least 2    -D ONCE= 1: they leave the L2 cache before others
//   -D FORMAT= CORES=  of that product (gemv_wide.cu), where DV is 128 and x has one plane; eps, of the norm,
//   and tiles, of the rows, are for it alone
#include "lib/reduce.cuh"
#include "lib/bulk.cuh"
#include "lib/pdl.cuh"
#include "lib/conv.cuh"
#include "lib/delta.cuh"
#ifdef FORMAT
#include "lib/tiles.cuh"
#define HALVED 1
#else
#define HALVED 0
#endif
#ifndef CORES
#define CORES 0
#endif
#ifndef DK
#define DK 128
#endif
#ifndef DV
#define DV 128
#endif
#ifndef SIGMOID
#define SIGMOID 0
#endif
#ifndef ONCE
#define ONCE 1
#endif
#ifndef DEPTH
#define DEPTH 3
#endif
constexpr int N = DK / 16, PARTS = DV / 32, WARPS = 4 * PARTS, THREADS = 32 * WARPS;
constexpr int STATE = DK * DV, MOST = 256, KNOWN = 4;  // numbers of a state; sequences; heads of a block at once
constexpr int Q = 0, K = DK, V = 2 * DK, GATE = V + DV, BETA = GATE + DV;  // where things are in Room::now
constexpr int SLOTS = (BETA + THREADS - 1) / THREADS;  // channels of a thread
static_assert(DEPTH < KNOWN, "what is asked for is known");
static_assert((DK == 32 || DK == 64 || DK == 128) && DV % 32 == 0 && DEPTH > 1, "a head's sizes");

struct Sequence { int r0, r1, from; };  // its rows, and where its state is; -1: nowhere
struct Room {
    float now[2][BETA + 4];              // a row, and the next one: q | k | v | gate | beta, exp(g)
    float red[PARTS][4][64], cross[4][4], gain[DV];
    Meeting full[DEPTH], ended;          // the second: warps have left what is in `ends`
    int taken[KNOWN];                    // the block's i-th head: sequence, key head and head, 8 bits each; -1: there is none
    float2 ends[PARTS];                  // of 32 columns of y: sum of squares, largest magnitude
    Sequence all[MOST];
};
#ifdef ROOM
static_assert(ROOM == 4 * STATE * DEPTH + sizeof(Room), "the launch gives other shared memory than the kernel wants");
#endif

#if HALVED
// Four columns o of y, of which the warp `part` of the head has 32, as the next product wants them. All such warps
// are here, for the n-th time.
struct Halves {
    typedef FORMAT<1024> F;  // rows of any length
    typedef Tile<F, CORES> T;
    unsigned char* to;
    int tiles, head;
    static_assert(DV == 128, "a head is a block");
    __device__ __forceinline__ void put(int row, int e, const float* a, float top) const {
        const size_t tile = (size_t)(head / F::UNITS) * tiles + row / 8;
        T::put_below(to + tile * T::BYTES, row % 8, head % F::UNITS, e, a, top);
    }
    __device__ __forceinline__ void put(Room& m, int row, int part, float4 o, float ss, float eps, int n) const {
        const int lane = threadIdx.x % 32;
        float top = fmaxf(fmaxf(fabsf(o.x), fabsf(o.y)), fmaxf(fabsf(o.z), fabsf(o.w)));
        #pragma unroll
        for (int i = 4; i; i /= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, i));
        if (!lane) { m.ends[part] = make_float2(ss, top); meet_arrive(&m.ended); }
        meet_wait(&m.ended, n % 2);
        float z = m.ends[0].x;
        #pragma unroll
        for (int i = 1; i < PARTS; i++) z += m.ends[i].x;
        #pragma unroll
        for (int i = 0; i < PARTS; i++) top = fmaxf(top, m.ends[i].y);
        z = rsqrtf(fmaf(z, 1.f / DV, eps));
        float a[8];
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            a[i] = __fmul_rn((&o.x)[i], z);
            a[4 + i] = __shfl_xor_sync(~0u, a[i], 1);
        }
        if (lane < 8 && lane % 2 == 0) put(row, part * 4 + lane / 2, a, __fmul_rn(top, z));
    }
};
#endif

// A thread's channels of a row: the n-th of q | k | v | gate, of which the last is no channel.
struct Channels {
    float4 taps[SLOTS];  // the last for the newest input
    float seen[SLOTS][3], in[SLOTS];
    static __device__ __forceinline__ int number(int j) { return threadIdx.x + j * THREADS; }
    static __device__ __forceinline__ bool convolved(int j) { return number(j) < GATE; }
    // where it stands in the row, for a key head and a head
    static __device__ __forceinline__ int column(int j, int kh, int c, int key, int head) {
        const int n = number(j);
        if (n < K) return key * DK + n;
        if (n < V) return (kh + key) * DK + n - K;
        return (n < GATE ? 2 * kh * DK + n - V : c + n - GATE) + head * DV;
    }
    __device__ __forceinline__ void begin(const float* __restrict__ w, const float* conv, int from, int kh, int c,
            int key, int head) {
        #pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            const int at = column(j, kh, c, key, head);
            const bool on = convolved(j);
            taps[j] = on ? *(const float4*)(w + at * 4) : make_float4(0.f, 0.f, 0.f, 0.f);
            #pragma unroll
            for (int t = 0; t < 3; t++)
                seen[j][t] = from >= 0 && on ? conv[((size_t)from * 3 + t) * c + at] : 0.f;
        }
    }
    __device__ __forceinline__ void ask(const float* row, int kh, int c, int key, int head) {
        #pragma unroll
        for (int j = 0; j < SLOTS; j++)
            in[j] = number(j) < BETA ? row[column(j, kh, c, key, head)] : 0.f;
    }
    // To `now`: convolved, and the row's inputs have been seen.
    __device__ __forceinline__ void step(float* now) {
        #pragma unroll
        for (int j = 0; j < SLOTS; j++) {
            const float4 w = taps[j];
            const float older = fmaf(seen[j][2], w.z, fmaf(seen[j][1], w.y, __fmul_rn(seen[j][0], w.x)));
            seen[j][0] = seen[j][1]; seen[j][1] = seen[j][2]; seen[j][2] = in[j];
            const float v = convolved(j) ? fmaf(in[j], w.w, older) : in[j];
            if (number(j) < BETA) now[number(j)] = SIGMOID && !convolved(j) ? sigmoid(v) : silu(v);
        }
    }
    __device__ __forceinline__ void keep(float* conv, int out, int kh, int c, int key, int head, bool first) const {
        #pragma unroll
        for (int j = 0; j < SLOTS; j++)
            if (convolved(j) && (first || number(j) >= V))
                #pragma unroll
                for (int t = 0; t < 3; t++)
                    conv[((size_t)out * 3 + t) * c + column(j, kh, c, key, head)] = seen[j][t];
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) delta_wide(const float* x,
        const float* __restrict__ conv_w, const float* __restrict__ decay, const float* __restrict__ dt_bias,
        const float* __restrict__ norm_w, float* conv, float* rec, const int* __restrict__ first,
        const int* __restrict__ starts, const int* __restrict__ state_in, const int* __restrict__ state_out,
        float* y, float* parts, unsigned char* halves, int* queue, float eps, int kh, int vh, int seqs, int rows,
        int tiles) {
    constexpr float SCALE = DK == 128 ? 0.08838834764831845f : DK == 64 ? 0.125f : 0.17677669529663687f;  // 1/sqrt(DK)
    DYNAMIC_SHARED(float, states);
    Room& m = *(Room*)(states + STATE * DEPTH);
    const int tid = threadIdx.x, lane = tid % 32, warp = __shfl_sync(~0u, tid / 32, 0);
    const int blocks = gridDim.x, all = seqs * vh, early = min(all, DEPTH * blocks);  // not in the queue
    const int c = 2 * kh * DK + vh * DV, width = c + vh * DV + 2 * vh;
    const bool asks = tid == THREADS - 32;
    const size_t pool = (size_t)vh * STATE;
    const auto begin = [&](int s) -> Sequence {
        const int r0 = first[s], r1 = first[s + 1], start = starts[s], from = state_in[s];
        return {r0, r1, r1 > r0 && start ? from : -1};
    };
    // One thread takes heads, and asks for their states. The first are asked for before anything else is known.
    int coming = blockIdx.x + (DEPTH - 1) * blocks;  // what the block takes next
    const auto take = [&]() {
        // From the queue as often as there are heads in it, and once more by each block: then it is 0 again
        if (!queue) coming += blocks;
        else if (early == all) coming = all;
        else coming = early + (int)atomicInc((unsigned*)queue, (unsigned)(all - early + blocks - 1));
    };
    const auto fetch = [&](int i, int which, int from) {
        Meeting* const b = m.full + i % DEPTH;
        const int head = which % vh;
        m.taken[i % KNOWN] = which < all ? which / vh << 16 | head / (vh / kh) << 8 | head : -1;
        bulk_expect(b, from < 0 ? 0 : 4 * STATE);
        float* const to = states + i % DEPTH * STATE, *const at = rec + from * pool + head * STATE;
        if (from >= 0 && ONCE) bulk_copy_once(to, at, 4 * STATE, b);
        if (from >= 0 && !ONCE) bulk_copy(to, at, 4 * STATE, b);
    };
    if (asks) {
        int from[DEPTH];
        #pragma unroll
        for (int i = 0; i < DEPTH; i++) {
            const int which = blockIdx.x + i * blocks;
            from[i] = which < all ? begin(which / vh).from : -1;
        }
        for (int i = 0; i < DEPTH; i++) meet_init(m.full + i, 1);
        if (HALVED) meet_init(&m.ended, PARTS);
        meet_ready();
        #pragma unroll
        for (int i = 0; i < DEPTH; i++) fetch(i, blockIdx.x + i * blocks, from[i]);
    }
    if (seqs > MOST || vh > 256) __trap();
    for (int i = tid; i < seqs; i += THREADS) m.all[i] = begin(i);
    if (tid < DV) m.gain[tid] = norm_w[tid];
    const bool scalars = warp == WARPS - 1;  // lanes 0 to 3: b, a, A, dt_bias
    // Four columns of rows row0 .. row0+N-1 of the state.
    const int part = warp / 4, row0 = tid % 128 / 8 * N, c4 = lane % 8 * 4, at = row0 * DV + part * 32 + c4;
    Columns<N> mem;
    Channels ch;
    __syncthreads();
    int i = 0, mine = 0, r = 0, end = 0, out = -1, turn = 0;  // which of the block's, and what that is; its next row
    bool begins = true, known = false;
    float scalar = 0.f;
    const auto open = [&]() {  // the i-th head of the block: false if there is none
        mine = m.taken[i % KNOWN];
        if (mine < 0) return false;
        const Sequence s = m.all[mine >> 16];
        r = s.r0; end = s.r1; known = s.from >= 0; begins = true;
        ch.begin(conv_w, conv, s.from, kh, c, mine >> 8 & 255, mine & 255);
        if (scalars && (lane & 30) == 2) scalar = (lane == 2 ? decay : dt_bias)[mine & 255];
        return true;
    };
    const auto ask = [&]() {
        const float* const row = x + (size_t)r * width;
        ch.ask(row, kh, c, mine >> 8 & 255, mine & 255);
        if (scalars && lane < 2) scalar = row[width - 2 * vh + (mine & 255) + lane * vh];
        out = state_out[r];
    };
    bool more = open();
    pdl_wait();
    if (asks) take();
    if (more && r < end) ask();
    #pragma unroll 1
    while (more) {
        float* const now = m.now[turn % 2];
        const int own = i, key = mine >> 8 & 255, head = mine & 255, row = r, to = out;
        const bool first_row = begins, held = known, idle = r == end;
        // All but the state
        if (!idle) {
            ch.step(now);
            if (to >= 0) ch.keep(conv, to, kh, c, key, head, head % (vh / kh) == 0);
        }
        if (scalars) {
            const float A = __shfl_sync(~0u, scalar, 2), bias = __shfl_sync(~0u, scalar, 3);
            if (lane < 2 && !idle)
                now[BETA + lane] = lane ? expf(__fmul_rn(A, softplus(scalar + bias))) : sigmoid(scalar);
        }
        // The next row's inputs are asked for while this one is worked on
        begins = false;
        if (idle || ++r == end) {
            i++;
            more = open();
            if (!more) pdl_trigger();
        }
        if (more && r < end) ask();
        if (first_row) {
            meet_wait(m.full + own % DEPTH, own / DEPTH % 2);
            const float4* const s = (const float4*)(states + own % DEPTH * STATE + at);
            #pragma unroll
            for (int n = 0; n < N; n++) mem.S[n] = held ? s[n * DV / 4] : make_float4(0.f, 0.f, 0.f, 0.f);
        }
        __syncthreads();
        if (asks && first_row) {
            fetch(own + DEPTH, coming, coming < all ? m.all[coming / vh].from : -1);
            if (coming < all) take();
        }
        if (idle) continue;
        turn++;
        // The row's products with the state; then, behind the barrier, the state takes it up.
        if (warp < 4) {
            const float a = tid < DK ? now[Q + tid] : 0.f, b = tid < DK ? now[K + tid] : 0.f;
            const float dot = warp_sum4(__fmul_rn(a, b), __fmul_rn(a, a), __fmul_rn(b, b), 0.f);  // q.k, q.q, k.k
            if (lane % 8 == 0) m.cross[warp][lane / 8] = dot;
        }
        mem.products(now + Q + row0, now + K + row0, lane, m.red[part][warp % 4]);
        __syncthreads();
        const Rule rule(sum_of_cross(m.cross), now[BETA], now[BETA + 1]);
        const int four = part * 32 + c4;
        float d[4];
        rule.change(sum_of_warps(m.red[part], c4), *(const float4*)(now + V + four), d);
        mem.take(now + K + row0, d, rule.eg);
        if (to >= 0) {
            float* const p = rec + to * pool + head * STATE + at;
            #pragma unroll
            for (int n = 0; n < N; n++) __stcs((float4*)(p + n * DV), mem.S[n]);
        }
        if (warp % 4 == 3) {
            const float4 qS = sum_of_warps(m.red[part], 32 + c4), gate = *(const float4*)(now + GATE + four);
            float ss;
            const float4 o = rule.read(qS, d, *(const float4*)(m.gain + four), gate, SCALE, ss);
            const size_t place = (size_t)row * vh + head;
            if (lane < 8) __stcg((float4*)(y + place * DV + four), o);
            if (!lane) parts[place * PARTS + part] = ss;
#if HALVED
            const Halves ends = {halves, tiles, head};
            ends.put(m, row, part, o, ss, eps, turn - 1);
#endif
        }
    }
    #pragma unroll 1
    for (int i = blockIdx.x; i < (rows - first[seqs]) * vh; i += blocks) {
        const int r = first[seqs] + i / vh, head = i % vh;
        const size_t place = (size_t)r * vh + head;
        if (tid < DV) y[place * DV + tid] = 0.f;
        if (tid < PARTS) parts[place * PARTS + tid] = 0.f;
#if HALVED
        const float none[8] = {};
        const Halves ends = {halves, tiles, head};
        if (tid < 16) ends.put(r, tid, none, 0.f);
#endif
    }
}
