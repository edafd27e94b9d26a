// y = act(W f(x) + bias) * sigmoid(gate) + add: the linear layer of a decode step, for W of every
// format (lib/fragment.cuh), with the norm before it, the bias, the activation and the residual
// after it folded in. W is read and decoded once for all rows. A warp takes 16 rows of W and every
// SPLIT-th unit of their columns; DEEP such units are on their way to shared memory before it waits
// for the kernel that makes x, the next ones while it works. Where x is long, the warps of a row
// are in TEAM blocks (lib/team.cuh), each of which stages what its own warps multiply, and adds up
// a part of the results. A row's bits do not depend on how many rows there are.
//   -D FORMAT= fragment of W
//   -D EXTRA= fragment of the extra rows, if any
//   -D K= columns
//   -D ROWS= 1, 2, 4 or 8: `rows` is at most that
//   -D NORM=   0: f(x) = x;  1: f(x) = rmsnorm(x, gain);  2: f(x) = x / rms of its group, of GROUP=
//              values in PARTS=
//   -D ACT=    of lib/act.cuh
//   -D CAP=  1: results are cap * tanh(result / cap)
//   -D W= SPLIT=  warps of a block, and those that share a row of W
//   -D STAGED= DEEP=  128s of x held at a time, and places of a warp for units on their way;
//              ESTAGED= EDEEP= for the extra rows, 16 a block
//   -D BEHIND= so many of these places are asked for behind x, not before the wait; 0 by default,
//              and only where a block stages all of x at once
//   -D EARLY=  of a unit so many quarters of its blocks are decoded before x is there. Where it is
//              not 0, a block has one group of rows at most, and a warp one unit of four-bit
//              weights, and x is not staged in pieces
//   -D LATE=   1: the next launch is let in behind the wait, as it is where EARLY is not 0; of one
//              row, 0 by default
//   -D PIPE=   1: x is staged in pieces, each while the one before it is multiplied; for several
//              rows where that pays, 0 by default
//   -D BEST=   1: keys are left, of whoever has neither extra rows, an activation nor a residual; 0
//              by default
//   -D TEAM=   blocks of a team, 1 by default: of 4 bits, with no extra rows and no NORM 1; all
//              sizes above are those of one block, `main` counts teams
//   launch: <<<main*TEAM + ceil(m/16), 32*W, shared bytes: see atlas.cuda.gemv>>>, `main` <=
//        ceil(n/span) blocks for W, which take `span` rows at a time, a multiple of 4 up to
//        16*W/SPLIT
#ifndef TEAM
#define TEAM 1
#endif
#ifndef BEST
#define BEST 0
#endif
#ifndef PIPE
#define PIPE 0
#endif
#include "lib/fragment.cuh"
#include "lib/act.cuh"
#include "lib/ahead.cuh"
#include "lib/async.cuh"
#include "lib/keys.cuh"
#include "lib/pdl.cuh"
#include "lib/reduce.cuh"
#include "lib/team.cuh"
#ifndef FORMAT
#define FORMAT fragment_nvfp4
#endif
#ifndef K
#define K 2048
#endif
#ifndef ROWS
#define ROWS 1
#endif
#ifndef NORM
#define NORM 1
#endif
#ifndef GROUP
#define GROUP 128
#endif
#ifndef PARTS
#define PARTS 4
#endif
#ifndef ACT
#define ACT 0
#endif
#ifndef CAP
#define CAP 0
#endif
#ifndef W
#define W 12
#endif
#ifndef SPLIT
#define SPLIT 4
#endif
#ifndef STAGED
#define STAGED 16
#endif
#ifndef ESTAGED
#define ESTAGED STAGED
#endif
#ifndef DEEP
#define DEEP 8
#endif
#ifndef BEHIND
#define BEHIND 0
#endif
#ifndef LATE
#define LATE 0
#endif
#ifndef EARLY
#define EARLY 0
#endif
#ifndef EDEEP
#define EDEEP 2
#endif
#define THREADS (32 * W)
#if (ROWS == 1 || (ROWS <= 4 && EARLY)) && __CUDA_ARCH__ == 900 && W == 16 \
        && SPLIT == 16
#define LIMITS 768, 1  // 80 registers: it finds room beside a block of delta_step
#elif ROWS == 1 && __CUDA_ARCH__ == 900 && W == 12
#define LIMITS 608, 1  // 96, so that one of those does beside it
#elif ROWS > 2
#define LIMITS 32 * W
// without the 1 the compiler holds registers down so that a second block would fit, which nobody
// wants
#else
#define LIMITS 32 * W, 1
#endif
constexpr int C = (K + 31) / 32;  // chunks of 32
constexpr int B = (C + 3) / 4;  // blocks of 128
constexpr int SEGMENTS = (K + 255) / 256;  // of 256, which a warp stages together
// warps that stage one row together
constexpr int SLOTS = SEGMENTS < W ? SEGMENTS : W;
constexpr bool LET_LATE = LATE || EARLY;
constexpr bool PAIR = ACT != ACT_NONE && ACT != ACT_RELU2;
static_assert(
        SPLIT % TEAM == 0 && W % (SPLIT / TEAM) == 0 && (TEAM == 1 || NORM != 1)
                && STAGED % 2 == 0 && ESTAGED % 2 == 0,
        "see the contract");

// What the kernel is given, in the order of its arguments.
struct Params {
    // rows padded to a multiple of 4 (Packed.raw)
    const unsigned char* w;  // [n4, w_bytes] u8
    const unsigned char* s;  // [s_rows, s_bytes] u8 or null: their scales
    const float* gs;  // [n4] f32 or null: nvfp4, int4: scale of each row
    // further rows in the format EXTRA, after the others in y
    const unsigned char* extra;  // [m4, extra_bytes] u8 or null
    const float* x;  // [r, k] f32
    const float* gain;  // [k] f32 or null: NORM 1
    // NORM 2: sums of squares of each GROUP values of x, in PARTS parts
    const float* parts;  // [r, heads, p] f32 or null
    // of rows as they are stored, the extra ones too
    const float* bias;  // [biases] f32 or null
    // results are multiplied by the sigmoid of its column `column`
    const float* gate;  // [r, ld] f32 or null
    const float* add;  // [r, width] f32 or null: then added, may be y
    // width = n + m, of gate and up rows n/2; null if there are keys
    float* y;  // [r, width] f32 or null
    // BEST: of each block the key of the largest result (lib/keys.cuh), and no results
    long long* keys;  // [r, blocks] i64 or null
    float eps;  // of the norm
    float limit;  // of the activation (lib/act.cuh)
    float cap;  // of CAP
    int rows;  // of x, at most ROWS
    int n;  // rows of W, without padding
    int m;  // further rows; 0 if there are none
    int ld;  // numbers from one row of `gate` to the next
    int column;  // of `gate`, for all results
    int width;  // numbers from one row of y to the next
    int main;  // blocks, or teams of blocks, for W; the others have the further rows
    int span;  // rows of W that such a block takes at a time
};

// One of the two matrices, and which of its rows are this block's: it has every `step`-th group of
// `span` rows from `group` on, as the team's `member`. Results begin at column `at` of y.
struct Job : Params {
    int at, group, step, member;
};

__device__ __forceinline__ void load_x(const float* p, int v, bool in, float* a) {
    // eights of a row where `in`, zeros beyond its end
    if (K % 8 == 0) {
        if (in && v < K / 8)
            load8(p + v * 8, a);
        else
            for (int i = 0; i < 8; i++)
                a[i] = 0.f;
    } else
        for (int i = 0; i < 8; i++)
            a[i] = in && v * 8 + i < K ? p[v * 8 + i] : 0.f;
}

// Sums of squares of a group, in parts
struct Parts {
    float q[PARTS];
    __device__ __forceinline__ void load(const float* p) {
        if (PARTS == 4 && GROUP % 4 == 0)
            *(float4*)q = *(const float4*)p;
        else
            #pragma unroll
            for (int j = 0; j < PARTS; j++)
                q[j] = p[j];
    }
    __device__ __forceinline__ float sum() const {
        float z = q[0];
        #pragma unroll
        for (int j = 1; j < PARTS; j++)
            z += q[j];
        return z;
    }
};

// sums of squares of x, and of the warps; those of one group while those of the next are made
__shared__ float squares[ROWS][W], part[2][W][16][ROWS];

// Columns 8v to 8v + 7 of row t, which are of block `local` of those held: sixteen lanes that
// follow each other have a block.
template <class F, int HELD>
__device__ __forceinline__ void put8(
        const float* a, bool in, int t, int local, int v, uint4* xs, float* es) {
    using S = Staged<F, 4 * HELD>;
    uint4* to = xs + t * S::LDR + v % 4 * S::LD + 4 * local
            + threadIdx.x % 16 / 4;
    if (F::TWO) {
        if (in)
            split8(a, to[0], to[ROWS * S::LDR]);
    } else {
        float top = top8(a);
        #pragma unroll
        for (int m = 1; m < 16; m *= 2)
            top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
        const float2 f = chunk_scale(top);
        if (in)
            *to = F::CROSSED ? to_half8_crossed(a, f.x) : to_half8(a, f.x);
        if (in && threadIdx.x % 16 == 0)
            es[local * ROWS + t] = f.y;
    }
}

// Which eight of a row of x is a thread's of block b of those that this member of a team has.
template <int PART, int MEMBERS>
__device__ __forceinline__ int eight_of(const Job& o, int b) {
    const int block = MEMBERS == 1
            ? b
            : (b / PART * MEMBERS + o.member) * PART + b % PART;
    return block * 16 + threadIdx.x % 16;
}

// How x of 128s [first, first + HELD) gets into shared memory, for fragment F: two of them a warp
// at a time. OWN: a warp takes those that it will multiply, else they lie together, and teams of
// SLOTS warps have a row each.
template <class F, int HELD, bool OWN, int HERE, int MEMBERS> struct Stage {
    static constexpr int TEAMS = OWN ? 1 : W / SLOTS;
    static constexpr int MINE = (ROWS + TEAMS - 1) / TEAMS;  // rows of a team
    static constexpr int STRIDE = OWN ? 2 * W : 2 * SLOTS;
    int slot, team;
    __device__ __forceinline__ Stage() {
        const int warp = threadIdx.x / 32;
        slot = OWN ? warp : warp % SLOTS;
        team = OWN ? 0 : warp / SLOTS;
    }
    // Of what this thread stages first.
    __device__ __forceinline__ void first_gain(const Job& o, float* gain) const {
        const int lane = threadIdx.x % 32;
        const int b = OWN && F::UNITS == 1 ? slot + lane / 16 * W
                                           : slot * 2 + lane / 16;
        load_x(o.gain, b * 16 + lane % 16, b < HELD, gain);
    }
    // The first block of a thread: the same warp has a column however much is held.
    __device__ __forceinline__ int begin(int first) const {
        const int half = threadIdx.x % 32 / 16;
        if (!OWN)
            return 2 * ((slot + SLOTS - first / 2 % SLOTS) % SLOTS) + half;
        return F::UNITS == 1 ? slot + (half + first / W) % 2 * W
                             : 2 * slot + half;
    }
    // All of it. `gain`: of what is staged first; `sums`: of squares of what this thread stages,
    // for NORM 1. `behind`: each warp calls it once, when its first values have been asked for.
    template <class Behind>
    __device__ __forceinline__ void run(
            const Job& o, int first, bool fresh, const float* gain, float* sums,
            uint4* xs, float* es, Behind behind) const {
        if (team >= TEAMS)
            return behind();
        const int begins = begin(first);
        #pragma unroll
        for (int u = 0; u < (HELD + STRIDE - 1) / STRIDE; u++) {
            const int local = begins + u * STRIDE;
            const int v = eight_of<HERE * F::UNITS, MEMBERS>(o, first + local);
            const bool in = local < HELD;
            if (!OWN && HELD % STRIDE && !in) {  // all lanes or none
                if (u == 0)
                    behind();
                continue;
            }
            float g[8];
            if (NORM == 1) {
                if (u == 0 && first == 0)
                    for (int i = 0; i < 8; i++)
                        g[i] = gain[i];
                else
                    load_x(o.gain, v, in, g);
            }
            #pragma unroll
            for (int i = 0; i < MINE; i++)
                put_row(o, i, v, local, g, sums[i], xs, es, [&] {
                    if (u == 0 && i == 0)
                        behind();
                });
        }
        if (NORM == 1 && fresh && first + HELD >= B)
            put_squares(sums);
    }
    // Eight values of the team's row i, normed.
    template <class Behind>
    __device__ __forceinline__ void put_row(
            const Job& o, int i, int v, int local, const float* g, float& sum,
            uint4* xs, float* es, Behind behind) const {
        // rows that are not there: the last one again
        const int t = team + i * TEAMS;
        const int r = ROWS == 1 ? 0 : min(t, o.rows - 1);
        const bool in = local < HELD;
        const bool parted = NORM == 2 && in && v * 8 < K;
        const float* const its = o.parts
                + ((size_t)r * (K / GROUP) + v * 8 / GROUP) * PARTS;
        float a[8];
        Parts p;
        // before `behind`: one row waits for them
        if (parted && ROWS == 1)
            p.load(its);
        load_x(o.x + (size_t)r * K, v, in, a);
        behind();
        if (NORM == 1) {
            #pragma unroll
            for (int j = 0; j < 8; j++) {
                sum = fmaf(a[j], a[j], sum);
                a[j] = __fmul_rn(a[j], g[j]);
            }
        }
        if (parted) {
            if (ROWS > 1)
                p.load(its);
            const float z = rsqrtf(fmaf(p.sum(), 1.f / GROUP, o.eps));
            #pragma unroll
            for (int j = 0; j < 8; j++)
                a[j] = __fmul_rn(a[j], z);
        }
        if (t < ROWS)
            put8<F, HELD>(a, in, t, local, v, xs, es);
    }
    __device__ __forceinline__ void put_squares(const float* sums) const {
        #pragma unroll
        for (int i = 0; i < MINE; i++) {
            const float z = warp_sum(sums[i]);
            if (threadIdx.x % 32 == 0 && team + i * TEAMS < ROWS)
                squares[team + i * TEAMS][slot] = z;
        }
    }
};

// The same in pieces, of which a thread holds one in registers from `load` to `put`: time for what
// lies between them.
template <class F, int HELD, int HERE, int MEMBERS> struct Ahead {
    static constexpr int STRIDE = 2 * SLOTS;
    static constexpr int PIECES = (HELD + STRIDE - 1) / STRIDE;
    static constexpr int PART = HERE * F::UNITS;
    static constexpr bool FITS = HERE * MEMBERS != W && SLOTS == W
            && STRIDE % PART == 0 && PIECES > 1;
    float a[ROWS][8];
    float g[8];
    float sums[ROWS] = {};

    static __device__ __forceinline__ int local(int piece) {
        return 2 * (threadIdx.x / 32) + threadIdx.x % 32 / 16 + piece * STRIDE;
    }
    static __device__ __forceinline__ int eight(const Job& o, int b) {
        return eight_of<PART, MEMBERS>(o, b);
    }
    __device__ __forceinline__ void load_gain(const Job& o, int piece) {
        if (NORM == 1)
            load_x(o.gain, eight(o, local(piece)), local(piece) < HELD, g);
    }
    __device__ __forceinline__ void load(const Job& o, int piece) {
        #pragma unroll
        for (int r = 0; r < ROWS; r++)
            load_x(o.x + (size_t)min(r, o.rows - 1) * K, eight(o, local(piece)),
                    local(piece) < HELD, a[r]);
    }
    __device__ __forceinline__ void put(
            const Job& o, int piece, uint4* xs, float* es) {
        const int at = local(piece);
        if (HELD % STRIDE == 0 || at / 2 * 2 < HELD)  // all lanes or none
            #pragma unroll
            for (int r = 0; r < ROWS; r++) {
                #pragma unroll
                for (int j = 0; NORM == 1 && j < 8; j++) {
                    sums[r] = fmaf(a[r][j], a[r][j], sums[r]);
                    a[r][j] = __fmul_rn(a[r][j], g[j]);
                }
                put8<F, HELD>(a[r], at < HELD, r, at, eight(o, at), xs, es);
            }
        if (NORM == 1 && piece == PIECES - 1)
            put_squares();
    }
    __device__ __forceinline__ void put_squares() {
        #pragma unroll
        for (int r = 0; r < ROWS; r++) {
            const float z = warp_sum(sums[r]);
            if (threadIdx.x % 32 == 0)
                squares[r][threadIdx.x / 32] = z;
        }
    }
};

// What the results of a thread's places in a group are made of besides the products: scales and
// biases of their rows, what is added to them, and the gate's logit of their row.
template <int ITEMS> struct Wanted {
    float raw[ITEMS][2];
    float bias[ITEMS][2];
    float prior[ITEMS];
    float open[ITEMS];
};

// How a block shares out one matrix: a group of rows is PER tiles of 16, each of HERE warps, which
// have PLACES places each for weights on their way; HELD blocks of x are staged at a time.
template <class F, int PER, int HERE, int HELD, int PLACES, int MEMBERS>
struct Tiling {
    using S = Staged<F, 4 * HELD>;
    using Pieces = Ahead<F, HELD, HERE, MEMBERS>;
    static constexpr bool OWN = HERE == W && MEMBERS == 1;
    using Staging = Stage<F, HELD, OWN, HERE, MEMBERS>;
    // units; those of a warp; outputs of a tile
    static constexpr int N = (B + F::UNITS - 1) / F::UNITS;
    static constexpr int ALONG = HERE * MEMBERS;
    static constexpr int STEPS = (N + ALONG - 1) / ALONG;
    static constexpr int OUT = PAIR ? 8 : 16;
    static constexpr int PLANE = ROWS * S::LDR;
    // blocks of 128 of x that this block of the team needs
    static constexpr int MINE = MEMBERS == 1 ? B : STEPS * HERE * F::UNITS;
    static constexpr bool ALL = HELD >= MINE;
    // of a group, of a block, of a thread
    static constexpr int RESULTS = PER * OUT * ROWS;
    static constexpr int MANY = (RESULTS + MEMBERS - 1) / MEMBERS;
    static constexpr int ITEMS = (MANY + THREADS - 1) / THREADS;
    static constexpr int MADE = EARLY < 4 * F::UNITS ? EARLY : 4 * F::UNITS;
    // A multiprocessor's requests go one after the other: x waits for all that was asked for
    // before.
    static constexpr bool PARTED = ALL && !OWN && MEMBERS == 1 && BEHIND < PLACES;
    static constexpr int BEFORE = PARTED ? PLACES - BEHIND : PLACES;
    // What the results will need is asked for behind x, and not waited for yet: of one row while x
    // is on its way.
    static constexpr bool SHADOW = ALL && ROWS == 1;
    static constexpr bool PIPED = PIPE && !MADE && BEFORE == PLACES && ROWS > 1
            && ALL && !OWN && NORM != 2 && Pieces::FITS;
    static_assert(
            !MADE
                    || (STEPS == 1 && PLACES == 1 && ALL && MEMBERS == 1
                            && F::FOUR_BITS),
            "see the contract");
    static_assert(
            PER * HERE <= W && (ALL || HELD % (HERE * F::UNITS) == 0),
            "x is staged for whole steps");
    static_assert(!BEST || (MEMBERS == 1 && ACT == ACT_NONE), "see the contract");

    // Whoever multiplies what the others stage is there: a warp that stages its own waits alone.
    static __device__ __forceinline__ void meet() {
        if (OWN)
            __syncwarp();
        else
            __syncthreads();
    }
    // All warps of a row of W are there.
    static __device__ __forceinline__ void meet_all() {
        if (MEMBERS == 1)
            __syncthreads();
        else
            team_sync();
    }
    // A warp's share of the work, and what is to be fetched next for it: weights and scales of step
    // `step` of a tile, from whose first row on there are `rest` rows.
    struct Feed {
        const Job& o;
        unsigned char* ring;  // PLACES units
        const unsigned char* w;
        const unsigned char* s;
        int lane, tile, share;
        int n4, groups, mine;  // rows, padded; groups; steps of a tile
        int rest, step, left, skip;
        bool works;
        unsigned spot;  // where in the ring is what is multiplied next
        __device__ __forceinline__ Feed(
                const Job& o_, unsigned char* ring_, int warp)
            : o(o_), ring(ring_) {
            lane = threadIdx.x % 32;
            tile = warp / HERE;
            share = o.member * HERE + warp % HERE;
            n4 = (o.n + 3) / 4 * 4;
            groups = (n4 + o.span - 1) / o.span;
            mine = N % ALONG == 0 || share < N % ALONG ? STEPS : STEPS - 1;
            works = tile < PER && tile * 16 < o.span;
            w = o.w;
            s = o.s;
            rest = n4 - (o.group * o.span + tile * 16);
            step = 0;
            left = works ? (groups - o.group + o.step - 1) / o.step * mine : 0;
            skip = o.step * o.span;  // rows to its next group
            F::first(w, s, n4 - rest, share, lane);
            spot = 0;
        }
        __device__ __forceinline__ void fetch(unsigned char* to) {
            left--;
            F::fetch(
                    to, w, s, min(rest, o.span - tile * 16), step * ALONG + share,
                    lane);
            w += ALONG * F::LB;
            s += ALONG * F::SB;
            if (++step == mine) {
                w += (size_t)skip * F::LINE - mine * ALONG * F::LB;
                s += (size_t)(skip / 4) * F::SLINE - mine * ALONG * F::SB;
                step = 0;
                rest -= skip;
            }
        }
        __device__ __forceinline__ void fill(int from, int to) {
            #pragma unroll 1
            for (int i = from; i < to; i++) {
                if (left > 0)
                    fetch(ring + i * F::BYTES);
                cp_async_commit();
            }
        }
        // The place that was multiplied is filled again, and the next one's turn comes.
        __device__ __forceinline__ void refill(unsigned char* place) {
            if (left > 0) {
                __syncwarp();
                fetch(place);
            }
            cp_async_commit();
            spot = spot == (PLACES - 1) * F::BYTES ? 0 : spot + F::BYTES;
        }
    };
    // The warp's only unit, of which MADE quarters become registers of a tensor core early.
    struct Early {
        F blocks[F::UNITS];
        unsigned made[MADE ? MADE : 1][8];
        __device__ __forceinline__ void decode(
                const unsigned char* place, int g, int t) {
            cp_async_wait<0>();
            __syncwarp();
            #pragma unroll
            for (int b = 0; b < F::UNITS; b++) {
                typename F::Aids f;
                blocks[b].read(place, b, g, t);
                blocks[b].aids(f);
                #pragma unroll
                for (int i = 4 * b; i < min(4 * b + 4, MADE); i++)
                    blocks[b].piece(f, i % 4, made[i]);
            }
        }
    };
    // Where a warp finds what it multiplies: x, and powers of two of its blocks.
    struct Columns {
        const uint4* x;
        const float* e;
        __device__ __forceinline__ Columns(
                const uint4* xs, const float* es, int warp, int g, int t) {
            x = xs + min(g, ROWS - 1) * S::LDR + 4 * F::UNITS * (warp % HERE)
                    + F::template own<S::LD>(t);
            e = es + warp % HERE * F::UNITS * ROWS;
        }
        // The next unit's.
        __device__ __forceinline__ void forth() {
            x += 4 * HERE * F::UNITS;
            e += HERE * F::UNITS * ROWS;
        }
    };
    // acc += `steps` units of W, or the one that is made, times x from `at` on.
    static __device__ __forceinline__ void multiply(
            Feed& feed, const Early& early, Columns& at, int steps, float* acc,
            int g, int t) {
        #pragma unroll
        for (int b = 0; MADE && steps && b < F::UNITS; b++)
            add_made<F, ROWS, S::LD>(
                    early.blocks[b], MADE - 4 * b, early.made + 4 * b, acc,
                    at.x + 4 * b, at.e + b * ROWS, t);
        #pragma unroll 1
        for (int i = 0; !MADE && i < steps; i++) {
            cp_async_wait<PLACES - 1>();
            unsigned char* const place = feed.ring + feed.spot;
            __syncwarp();
            #pragma unroll
            for (int b = 0; b < F::UNITS; b++) {
                F q;
                q.read(place, b, g, t);
                add<F, ROWS, S::LD, PLANE>(
                        q, acc, at.x + 4 * b, at.e + b * ROWS, t);
            }
            at.forth();
            feed.refill(place);
        }
    }
    // What the results of rows [base, to) need besides the products is asked for.
    static __device__ __forceinline__ void ask(
            const Job& o, int warp, int base, int to, Wanted<ITEMS>& its) {
        #pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            // all lanes or none
            if (SHADOW && i * THREADS + warp * 32 >= MANY)
                continue;
            const int item = o.member * MANY + i * THREADS + threadIdx.x;
            const int r = item % (PER * OUT);
            const int row = item / (PER * OUT);
            const int at = base + (PAIR ? r / 2 * 4 + r % 2 : r);
            const int out = (PAIR ? base / 2 : base) + r;
            #pragma unroll
            for (int j = 0; j < 1 + PAIR; j++) {
                const bool on = item < RESULTS && at + 2 * j < to;
                its.raw[i][j] = on ? F::row_raw(o.s, o.gs, at + 2 * j) : 0.f;
                const bool biased = on && o.bias && (PAIR || at < o.n);
                its.bias[i][j] = biased ? o.bias[at + 2 * j] : 0.f;
            }
            const bool on = row < o.rows && out < (PAIR ? o.n / 2 : o.n);
            const size_t place = (size_t)row * o.width + o.at + out;
            its.prior[i] = o.add && on ? o.add[place] : 0.f;
            const bool gated = o.gate && row < o.rows;
            its.open[i] = gated ? o.gate[(size_t)row * o.ld] : 0.f;
        }
    }
    // All `rest` steps of a group: x is staged in pieces, each while the one before is multiplied.
    template <class Ask, class Multiply>
    static __device__ __forceinline__ void in_pieces(
            const Job& o, bool begin, int rest, Pieces& pieces, uint4* xs,
            float* es, Ask ask, Multiply multiply) {
        #pragma unroll 1
        for (int piece = 0; begin ? piece < Pieces::PIECES : !piece; piece++) {
            if (begin) {
                if (!piece)
                    pieces.load(o, 0);
                pieces.put(o, piece, xs, es);
                if (piece + 1 < Pieces::PIECES) {
                    pieces.load_gain(o, piece + 1);
                    pieces.load(o, piece + 1);
                }
                __syncthreads();
            }
            if (!piece)
                ask();
            const int steps = begin ? min(Pieces::STRIDE / Pieces::PART, rest)
                                    : rest;
            multiply(steps);
            rest -= steps;
        }
    }
    // Line `line` of the tile of which `at` is the first warp: what all its warps found for a row.
    static __device__ __forceinline__ float merge(
            int round, int at, int line, int row) {
        float v = 0.f;
        #pragma unroll
        for (int m = 0; m < ALONG; m++)
            v += MEMBERS == 1
                    ? part[round][at + m][line][row]
                    : of_member(&part[round][at + m % HERE][line][row], m / HERE);
        return v;
    }
    // 1 / root of a row's mean square, of the sums of all warps that staged it
    static __device__ __forceinline__ float inverse(float eps, int row) {
        float z = 0.f;
        #pragma unroll
        for (int j = 0; j < (OWN ? W : SLOTS); j++)
            z += squares[row][j];
        return rsqrtf(fmaf(z, 1.f / K, eps));
    }
    // The thread's results of rows [base, to): what warps found is merged and weighed.
    static __device__ __forceinline__ void weigh(
            const Job& o, int round, int base, int to, Wanted<ITEMS>& its,
            u64* top) {
        #pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const int item = o.member * MANY + i * THREADS + threadIdx.x;
            const int r = item % (PER * OUT);
            const int row = item / (PER * OUT);
            const int out = (PAIR ? base / 2 : base) + r;
            if (MEMBERS > 1 && i * THREADS + threadIdx.x >= MANY)
                continue;
            if (row >= o.rows || out >= (PAIR ? min(o.n, to) / 2 : min(o.n, to)))
                continue;
            float inv = 1.f, v[2];
            if (NORM == 1)
                inv = inverse(o.eps, row);
            #pragma unroll
            for (int j = 0; j < 1 + PAIR; j++) {
                const int at = r / OUT * HERE;
                const int line = PAIR ? r % 8 / 2 * 4 + r % 2 + 2 * j : r % 16;
                v[j] = merge(round, at, line, row);
                const float unit = F::row_scale(
                        (Bytes)(its.raw[i] + j), its.raw[i] + j, 0);
                v[j] = fmaf(__fmul_rn(v[j], inv), unit, its.bias[i][j]);
            }
            if (CAP)
                v[0] = __fmul_rn(o.cap, tanhf(v[0] / o.cap));
            if (ACT)
                v[0] = act_mul<ACT>(v[0], v[PAIR], o.limit);
            if (BEST) {
                top[i] = max(top[i], keyed(logit_key(v[0]), out));
                continue;
            }
            const float gate = o.gate ? times_sigmoid(1.f, its.open[i]) : 1.f;
            o.y[(size_t)row * o.width + o.at + out] = fmaf(
                    v[0], gate, its.prior[i]);
        }
    }
    // The key of each row's largest result in this block.
    static __device__ __forceinline__ void put_best(
            const Job& o, const u64* top) {
        __shared__ u64 tops[ROWS][PER];  // of the sixteens of places
        #pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const int item = i * THREADS + threadIdx.x;
            u64 key = top[BEST ? i : 0];
            #pragma unroll
            for (int m = 8; m; m /= 2)
                key = max(key, __shfl_xor_sync(~0u, key, m));
            if (item < RESULTS && item % 16 == 0)
                tops[item / 16 / PER][item / 16 % PER] = key;
        }
        __syncthreads();
        if ((int)threadIdx.x < o.rows) {
            u64 key = 0;
            #pragma unroll
            for (int i = 0; i < PER; i++)
                key = max(key, tops[threadIdx.x][i]);
            ((u64*)o.keys)[(size_t)threadIdx.x * o.step + o.group] = key;
        }
    }
    // The same where x is staged HELD blocks at a time, or once for all groups.
    template <class Ask, class Multiply>
    static __device__ __forceinline__ void in_turns(
            const Job& o, bool begin, Feed& feed, const float* gain, float* sums,
            uint4* xs, float* es, Ask ask, Multiply multiply) {
        #pragma unroll 1
        for (int first = 0; first < MINE; first += HELD) {
            if (!ALL || begin) {
                if (first || !begin)
                    meet();
                auto behind = [&] {
                    feed.fill(BEFORE, PLACES);
                    if (SHADOW)
                        ask();
                };
                Staging().run(o, first, begin, gain, sums, xs, es, behind);
                meet();
            }
            if (!first && !(SHADOW && begin))
                ask();
            constexpr int STEP = HERE * F::UNITS;
            const int steps = ALL ? feed.mine
                                  : min(HELD / STEP, feed.mine - first / STEP);
            multiply(feed.works ? steps : 0);
        }
    }
    // Before the first group: what needs no x is done, and x is there.
    static __device__ __forceinline__ void wait(
            const Job& o, int base, const Feed& feed, Early& early, int g,
            int t) {
        if (o.gs && threadIdx.x <= o.span / 32)
            ahead(o.gs + min(base + 32 * (int)threadIdx.x, feed.n4 - 1));
        if (MADE && feed.works)
            early.decode(feed.ring, g, t);
        pdl_wait();
        if (LET_LATE)
            pdl_trigger();
    }
    // What a warp found of a group.
    static __device__ __forceinline__ void put(
            int round, int warp, const float* acc, int g, int t) {
        #pragma unroll
        for (int j = 0; j < 4; j++)
            if (2 * t + j % 2 < ROWS)
                part[round][warp][2 * g + j / 2][2 * t + j % 2] = acc[j];
    }
};

// The block's groups of rows of one matrix, one at a time.
template <class F, int PER, int HERE, int HELD, int PLACES, int MEMBERS>
__device__ __forceinline__ void matrix(const Job& o, uint4* xs) {
    using T = Tiling<F, PER, HERE, HELD, PLACES, MEMBERS>;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int g = lane / 4;
    const int t = lane % 4;
    float* const es = (float*)(xs + T::PLANE * T::S::PLANES);
    unsigned char* const ring = (unsigned char*)(es + (HELD * ROWS + 3) / 4 * 4)
            + min(warp, PER * HERE - 1) * PLACES * F::BYTES;
    typename T::Feed feed(o, ring, warp);
    feed.fill(0, T::BEFORE);
    typename T::Early early;
    const typename T::Columns own(xs, es, warp, g, t);
    float gain[8], sums[ROWS] = {};
    if (NORM == 1)
        typename T::Staging().first_gain(o, gain);
    // the largest results of this thread's places in a group
    u64 top[BEST ? T::ITEMS : 1] = {};
    typename T::Pieces pieces;
    if (T::PIPED)
        pieces.load_gain(o, 0);
    for (int group = o.group, round = 0; group < feed.groups;
            group = T::MADE ? feed.groups : group + o.step, round ^= 1) {
        const bool begin = T::MADE || group == o.group;
        const int base = group * o.span;
        const int to = min(base + o.span, feed.n4);
        Wanted<T::ITEMS> its;
        float acc[4] = {};
        if (begin)
            T::wait(o, base, feed, early, g, t);
        auto ask = [&] { T::ask(o, warp, base, to, its); };
        if constexpr (T::PIPED) {
            typename T::Columns at = own;
            auto multiply = [&](int steps) {
                T::multiply(feed, early, at, steps, acc, g, t);
            };
            const int steps = feed.works ? feed.mine : 0;
            T::in_pieces(o, begin, steps, pieces, xs, es, ask, multiply);
        } else
            T::in_turns(o, begin, feed, gain, sums, xs, es, ask, [&](int steps) {
                typename T::Columns at = own;
                T::multiply(feed, early, at, steps, acc, g, t);
            });
        if (feed.works)
            T::put(round, warp, acc, g, t);
        T::meet_all();
        T::weigh(o, round, base, to, its, top);
    }
    if (BEST)
        T::put_best(o, top);
    if (MEMBERS > 1)
        team_sync();  // nobody leaves while others read what it found
}

extern "C" TEAM_OF(TEAM) __global__ void __launch_bounds__(LIMITS) gemv(
        const unsigned char* __restrict__ w, const unsigned char* __restrict__ s,
        const float* __restrict__ gs, const unsigned char* __restrict__ extra,
        const float* x, const float* __restrict__ gain, const float* parts,
        const float* __restrict__ bias, const float* gate, const float* add,
        float* y, long long* keys, float eps, float limit, float cap, int rows,
        int n, int m, int ld, int column, int width, int main, int span) {
    DYNAMIC_SHARED(uint4, xs);
    // Who decodes early has come early, while blocks before it ask for what they need; and a launch
    // after it would not have to come sooner than this one's work begins.
    if (EARLY)
        rest(300);
    if (!LET_LATE)
        pdl_trigger();
    // of `gate` always the same column
    Job o = {{w, s, gs, extra, x, gain, parts, bias,
                     gate ? gate + column : nullptr, add, y, keys, eps, limit,
                     cap, rows, n, m, ld, column, width, main, span},
            0, (int)blockIdx.x / TEAM, main, (int)blockIdx.x % TEAM};
#ifdef EXTRA
    if ((int)blockIdx.x >= main) {
        o.w = extra;
        o.s = nullptr;
        o.n = m;
        o.at = n;
        o.span = 16;
        o.group = blockIdx.x - main;
        o.step = gridDim.x - main;
        if (bias)
            o.bias = bias + n;
        matrix<EXTRA<C>, 1, W, ESTAGED, EDEEP, 1>(o, xs);
        return;
    }
#endif
    matrix<FORMAT<C>, W / (SPLIT / TEAM), SPLIT / TEAM, STAGED, DEEP, TEAM>(
            o, xs);
}
