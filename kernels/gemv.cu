// y = act(W f(x) + bias) * sigmoid(gate) + add: the linear layer of a decode step, for W of every
// format (lib/fragment.cuh), with the norm before it, the bias, the activation and the residual
// after it folded in. W is read and decoded once for all rows. A warp takes 16 rows of W and every
// SPLIT-th unit of their columns; DEEP such units are on their way to shared memory before it waits
// for the kernel that makes x, the next ones while it works. Where x is long, the warps of a row
// are in TEAM blocks (lib/team.cuh), each of which stages what its own warps multiply, and adds up
// a part of the results. A row's bits do not depend on how many rows there are.
//   w     : [n4, w_bytes]          u8    rows padded to a multiple of 4 (Packed.raw)
//   s     : [s_rows, s_bytes]      u8    their scales; or null
//   gs    : [n4]                   f32   nvfp4, int4: scale of each row; or null
//   extra : [m4, extra_bytes]      u8    further rows in the format EXTRA, after the others in y;
//                                        or null
//   x     : [r, k]                 f32
//   gain  : [k]                    f32   NORM 1; or null
//   parts : [r, heads, p]   f32   NORM 2: sums of squares of each GROUP values of x, in PARTS
//                                 parts; or null
//   bias  : [biases]               f32   of rows as they are stored, the extra ones too; or null
//   gate  : [r, ld]                f32   the result is multiplied by the sigmoid of its column
//                                        `column`; or null
//   add   : [r, width]             f32   then added, may be y; or null
//   y     : [r, width]             f32   width = n + m, of gate and up rows n/2; or null if there
//                                        are keys
//   keys  : [r, blocks]            i64   BEST: of each block the key of the largest result
//                                        (lib/keys.cuh), and no results; or null
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
//              weights
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
#if ROWS == 1 && __CUDA_ARCH__ == 900 && W == 16 && SPLIT == 16
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
constexpr int SLOTS = SEGMENTS < W ? SEGMENTS : W;  // warps that stage one row together
constexpr bool LET_LATE = LATE || EARLY;
constexpr bool PAIR = ACT != ACT_NONE && ACT != ACT_RELU2;
static_assert(
        SPLIT % TEAM == 0 && W % (SPLIT / TEAM) == 0 && (TEAM == 1 || NORM != 1)
                && STAGED % 2 == 0 && ESTAGED % 2 == 0,
        "see the contract");

struct Job {  // one matrix
    const unsigned char *w, *s;
    const float *gs, *x, *gain, *parts, *bias, *gate, *add;
    float* y;
    u64* keys;
    float eps, limit, cap;
    // `member` of its team; `at`: where its outputs begin; rows come in groups of `span`, and this
    // block has every `step`-th from `group` on
    int rows, n, ld, at, width, span, group, step, member;
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
    uint4* to = xs + t * S::LDR + v % 4 * S::LD + 4 * local + threadIdx.x % 16 / 4;
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

// x of 128s [first, first + HELD) into shared memory, for fragment F: two of them a warp at a time.
// OWN: a warp takes those that it will multiply, else they lie together. `behind`: each warp calls
// it once, when its first values have been asked for.
template <class F, int HELD, bool OWN, int HERE, int MEMBERS, class Behind>
__device__ __forceinline__ void stage(
        const Job& o, int first, bool fresh, const float* g0, float* sums, uint4* xs,
        float* es, Behind behind) {
    using S = Staged<F, 4 * HELD>;
    constexpr int TEAMS = OWN ? 1 : W / SLOTS;
    constexpr int MINE = (ROWS + TEAMS - 1) / TEAMS;
    constexpr int STRIDE = OWN ? 2 * W : 2 * SLOTS;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int slot = OWN ? warp : warp % SLOTS;
    const int team = OWN ? 0 : warp / SLOTS;
    // the same warp has a column however much is held
    const int begin = OWN
            ? F::UNITS == 1 ? slot + (lane / 16 + first / W) % 2 * W : 2 * slot + lane / 16
            : 2 * ((slot + SLOTS - first / 2 % SLOTS) % SLOTS) + lane / 16;
    if (team >= TEAMS)
        return behind();
    #pragma unroll
    for (int u = 0; u < (HELD + STRIDE - 1) / STRIDE; u++) {
        // blocks of 128 of a step that this member of the team has
        constexpr int PART = HERE * F::UNITS;
        const int local = begin + u * STRIDE, b = first + local;
        const int v = (MEMBERS == 1 ? b : (b / PART * MEMBERS + o.member) * PART + b % PART)
                        * 16
                + lane % 16;
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
                    g[i] = g0[i];
            else
                load_x(o.gain, v, in, g);
        }
        #pragma unroll
        for (int i = 0; i < MINE; i++) {
            // rows that are not there: the last one again
            const int t = team + i * TEAMS;
            const int r = ROWS == 1 ? 0 : min(t, o.rows - 1);
            float a[8];
            Parts p;
            auto load_parts = [&] {
                p.load(o.parts + ((size_t)r * (K / GROUP) + v * 8 / GROUP) * PARTS);
            };
            // before `behind`: one row waits for them
            if (NORM == 2 && ROWS == 1 && in && v * 8 < K)
                load_parts();
            load_x(o.x + (size_t)r * K, v, in, a);
            if (u == 0 && i == 0)
                behind();
            if (NORM == 1) {
                #pragma unroll
                for (int j = 0; j < 8; j++) {
                    sums[i] = fmaf(a[j], a[j], sums[i]);
                    a[j] = __fmul_rn(a[j], g[j]);
                }
            }
            if (NORM == 2 && in && v * 8 < K) {
                if (ROWS > 1)
                    load_parts();
                const float z = rsqrtf(fmaf(p.sum(), 1.f / GROUP, o.eps));
                #pragma unroll
                for (int j = 0; j < 8; j++)
                    a[j] = __fmul_rn(a[j], z);
            }
            if (t < ROWS)
                put8<F, HELD>(a, in, t, local, v, xs, es);
        }
    }
    if (NORM == 1 && fresh && first + HELD >= B) {
        #pragma unroll
        for (int i = 0; i < MINE; i++) {
            const float z = warp_sum(sums[i]);
            if (!lane && team + i * TEAMS < ROWS)
                squares[team + i * TEAMS][slot] = z;
        }
    }
}

// The same in pieces, of which a thread holds one in registers from `load` to `put`: time for what
// lies between them.
template <class F, int HELD, int HERE, int MEMBERS> struct Ahead {
    static constexpr int STRIDE = 2 * SLOTS;
    static constexpr int PIECES = (HELD + STRIDE - 1) / STRIDE;
    static constexpr int PART = HERE * F::UNITS;
    static constexpr bool FITS = HERE * MEMBERS != W && SLOTS == W && STRIDE % PART == 0
            && PIECES > 1;
    float a[ROWS][8];
    float g[8];
    float sums[ROWS] = {};

    static __device__ __forceinline__ int local(int piece) {
        return 2 * (threadIdx.x / 32) + threadIdx.x % 32 / 16 + piece * STRIDE;
    }
    static __device__ __forceinline__ int eight(const Job& o, int b) {
        return (MEMBERS == 1 ? b : (b / PART * MEMBERS + o.member) * PART + b % PART) * 16
                + threadIdx.x % 16;
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
    __device__ __forceinline__ void put(const Job& o, int piece, uint4* xs, float* es) {
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

// The block's groups of rows of one matrix, one at a time: PER tiles of 16, each by HERE warps,
// which have PLACES places each for weights on their way.
template <class F, int PER, int HERE, int HELD, int PLACES, int MEMBERS>
__device__ __forceinline__ void matrix(const Job& o, uint4* xs) {
    using S = Staged<F, 4 * HELD>;
    // units; those of a warp; outputs of a tile
    constexpr int N = (B + F::UNITS - 1) / F::UNITS;
    constexpr int ALONG = HERE * MEMBERS;
    constexpr int STEPS = (N + ALONG - 1) / ALONG;
    constexpr int OUT = PAIR ? 8 : 16;
    constexpr int PLANE = ROWS * S::LDR;
    // blocks of 128 of x that this block of the team needs
    constexpr int MINE = MEMBERS == 1 ? B : STEPS * HERE * F::UNITS;
    constexpr bool ALL = HELD >= MINE, OWN = HERE == W && MEMBERS == 1;
    // of a group, of a block, of a thread
    constexpr int RESULTS = PER * OUT * ROWS;
    constexpr int MANY = (RESULTS + MEMBERS - 1) / MEMBERS;
    constexpr int ITEMS = (MANY + THREADS - 1) / THREADS;
    constexpr int MADE = EARLY < 4 * F::UNITS ? EARLY : 4 * F::UNITS;
    static_assert(
            !MADE || (STEPS == 1 && PLACES == 1 && ALL && MEMBERS == 1 && F::FOUR_BITS),
            "see the contract");
    static_assert(
            PER * HERE <= W && (ALL || HELD % (HERE * F::UNITS) == 0),
            "x is staged for whole steps");
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int g = lane / 4;
    const int t = lane % 4;
    const int tile = warp / HERE;
    const int share = o.member * HERE + warp % HERE;
    const int n4 = (o.n + 3) / 4 * 4;
    const int groups = (n4 + o.span - 1) / o.span;
    const int mine = N % ALONG == 0 || share < N % ALONG ? STEPS : STEPS - 1;
    float* const es = (float*)(xs + PLANE * S::PLANES);
    unsigned char* const ring = (unsigned char*)(es + (HELD * ROWS + 3) / 4 * 4)
            + min(warp, PER * HERE - 1) * PLACES * F::BYTES;
    const bool works = tile < PER && tile * 16 < o.span;
    // what is to be fetched next: weights and scales of step `step` of a tile, from whose first row
    // on there are `rest` rows
    const unsigned char* w = o.w;
    const unsigned char* s = o.s;
    int rest = n4 - (o.group * o.span + tile * 16);
    int step = 0;
    int left = works ? (groups - o.group + o.step - 1) / o.step * mine : 0;
    const int skip = o.step * o.span;  // rows to its next group
    F::first(w, s, n4 - rest, share, lane);
    auto fetch = [&](unsigned char* to) {
        left--;
        F::fetch(to, w, s, min(rest, o.span - tile * 16), step * ALONG + share, lane);
        w += ALONG * F::LB;
        s += ALONG * F::SB;
        if (++step == mine) {
            w += (size_t)skip * F::LINE - mine * ALONG * F::LB;
            s += (size_t)(skip / 4) * F::SLINE - mine * ALONG * F::SB;
            step = 0;
            rest -= skip;
        }
    };
    // A multiprocessor's requests go one after the other: x waits for all that was asked for
    // before.
    constexpr bool PARTED = ALL && !OWN && MEMBERS == 1 && BEHIND < PLACES;
    constexpr int BEFORE = PARTED ? PLACES - BEHIND : PLACES;
    auto fill = [&](int from, int to) {
        #pragma unroll 1
        for (int i = from; i < to; i++) {
            if (left > 0)
                fetch(ring + i * F::BYTES);
            cp_async_commit();
        }
    };
    fill(0, BEFORE);
    F blocks[F::UNITS];  // of its only unit, and as registers of a tensor core
    unsigned made[MADE ? MADE : 1][8];
    auto decode = [&] {
        cp_async_wait<0>();
        __syncwarp();
        #pragma unroll
        for (int b = 0; b < F::UNITS; b++) {
            typename F::Aids f;
            blocks[b].read(ring, b, g, t);
            blocks[b].aids(f);
            #pragma unroll
            for (int i = 4 * b; i < min(4 * b + 4, MADE); i++)
                blocks[b].piece(f, i % 4, made[i]);
        }
    };
    unsigned spot = 0;  // where in the ring is what is multiplied next
    const uint4* const own_x = xs + min(g, ROWS - 1) * S::LDR + 4 * F::UNITS * (warp % HERE)
            + F::template own<S::LD>(t);
    float g0[8], sums[ROWS] = {};
    if (NORM == 1) {
        const int b = OWN && F::UNITS == 1 ? warp + lane / 16 * W
                                           : warp % (OWN ? W : SLOTS) * 2 + lane / 16;
        load_x(o.gain, b * 16 + lane % 16, b < HELD, g0);
    }
    // the largest results of this thread's places in a group
    u64 top[BEST ? ITEMS : 1] = {};
    static_assert(!BEST || (MEMBERS == 1 && ACT == ACT_NONE), "see the contract");
    typedef Ahead<F, HELD, HERE, MEMBERS> Pieces;
    constexpr bool PIPED = PIPE && BEFORE == PLACES && ROWS > 1 && ALL && !OWN && NORM != 2
            && Pieces::FITS;
    Pieces pieces;
    if (PIPED)
        pieces.load_gain(o, 0);
    for (int group = o.group, round = 0; group < groups;
            group = MADE ? groups : group + o.step, round ^= 1) {
        const bool begin = MADE || group == o.group;
        const int to = min(group * o.span + o.span, n4);
        const int base = group * o.span;
        float raw[ITEMS][2];
        float bias[ITEMS][2];
        float prior[ITEMS];
        float open[ITEMS];
        float acc[4] = {};
        // What the results will need is asked for behind x, and not waited for yet: of one row
        // while x is on its way.
        constexpr bool SHADOW = ALL && ROWS == 1;
        auto ask = [&] {
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
                    raw[i][j] = on ? F::row_raw(o.s, o.gs, at + 2 * j) : 0.f;
                    const bool biased = on && o.bias && (PAIR || at < o.n);
                    bias[i][j] = biased ? o.bias[at + 2 * j] : 0.f;
                }
                const bool on = row < o.rows && out < (PAIR ? o.n / 2 : o.n);
                const size_t place = (size_t)row * o.width + o.at + out;
                prior[i] = o.add && on ? o.add[place] : 0.f;
                const bool gated = o.gate && row < o.rows;
                open[i] = gated ? o.gate[(size_t)row * o.ld] : 0.f;
            }
        };
        if (begin) {
            if (o.gs && threadIdx.x <= o.span / 32)
                ahead(o.gs + min(base + 32 * (int)threadIdx.x, n4 - 1));
            if (MADE && works)
                decode();
            pdl_wait();
            if (LET_LATE)
                pdl_trigger();
        }
        const uint4* x;
        const float* e;
        auto from_start = [&] {
            x = own_x;
            e = es + warp % HERE * F::UNITS * ROWS;
        };
        auto multiply = [&](int steps) {
            #pragma unroll
            for (int b = 0; MADE && steps && b < F::UNITS; b++)
                add_made<F, ROWS, S::LD>(
                        blocks[b], MADE - 4 * b, made + 4 * b, acc, x + 4 * b, e + b * ROWS,
                        t);
            #pragma unroll 1
            for (int i = 0; !MADE && i < steps; i++) {
                cp_async_wait<PLACES - 1>();
                unsigned char* const place = ring + spot;
                __syncwarp();
                #pragma unroll
                for (int b = 0; b < F::UNITS; b++) {
                    F q;
                    q.read(place, b, g, t);
                    add<F, ROWS, S::LD, PLANE>(q, acc, x + 4 * b, e + b * ROWS, t);
                }
                x += 4 * HERE * F::UNITS;
                e += HERE * F::UNITS * ROWS;
                if (left > 0) {
                    __syncwarp();
                    fetch(place);
                }
                cp_async_commit();
                spot = spot == (PLACES - 1) * F::BYTES ? 0 : spot + F::BYTES;
            }
        };
        if constexpr (PIPED) {
            from_start();
            #pragma unroll 1
            for (int piece = 0, rest = works ? mine : 0;
                    begin ? piece < Pieces::PIECES : !piece; piece++) {
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
                const int steps = begin ? min(Pieces::STRIDE / Pieces::PART, rest) : rest;
                multiply(steps);
                rest -= steps;
            }
        } else {
            #pragma unroll 1
            for (int first = 0; first < MINE; first += HELD) {
                if (!ALL || begin) {
                    if (first || !begin) {
                        if (OWN)
                            __syncwarp();
                        else
                            __syncthreads();
                    }
                    auto behind = [&] {
                        fill(BEFORE, PLACES);
                        if (SHADOW)
                            ask();
                    };
                    stage<F, HELD, OWN, HERE, MEMBERS>(
                            o, first, begin, g0, sums, xs, es, behind);
                    if (OWN)
                        __syncwarp();
                    else
                        __syncthreads();
                }
                if (!first && !(SHADOW && begin))
                    ask();
                from_start();
                multiply(
                        works ? ALL ? mine
                                    : min(HELD / (HERE * F::UNITS),
                                              mine - first / (HERE * F::UNITS))
                              : 0);
            }
        }
        #pragma unroll
        for (int j = 0; j < 4; j++)
            if (works && 2 * t + j % 2 < ROWS)
                part[round][warp][2 * g + j / 2][2 * t + j % 2] = acc[j];
        if (MEMBERS == 1)
            __syncthreads();
        else
            team_sync();
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
            if (NORM == 1) {
                float z = 0.f;
                #pragma unroll
                for (int j = 0; j < (OWN ? W : SLOTS); j++)
                    z += squares[row][j];
                inv = rsqrtf(fmaf(z, 1.f / K, o.eps));
            }
            #pragma unroll
            for (int j = 0; j < 1 + PAIR; j++) {
                const int at = r / OUT * HERE;
                const int line = PAIR ? r % 8 / 2 * 4 + r % 2 + 2 * j : r % 16;
                v[j] = 0.f;
                #pragma unroll
                for (int m = 0; m < ALONG; m++)
                    v[j] += MEMBERS == 1
                            ? part[round][at + m][line][row]
                            : of_member(&part[round][at + m % HERE][line][row], m / HERE);
                const float unit = F::row_scale((Bytes)(raw[i] + j), raw[i] + j, 0);
                v[j] = fmaf(__fmul_rn(v[j], inv), unit, bias[i][j]);
            }
            if (CAP)
                v[0] = __fmul_rn(o.cap, tanhf(v[0] / o.cap));
            if (ACT)
                v[0] = act_mul<ACT>(v[0], v[PAIR], o.limit);
            if (BEST) {
                top[i] = max(top[i], keyed(logit_key(v[0]), out));
                continue;
            }
            const float gate = o.gate ? times_sigmoid(1.f, open[i]) : 1.f;
            o.y[(size_t)row * o.width + o.at + out] = fmaf(v[0], gate, prior[i]);
        }
    }
    if (BEST) {
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
            o.keys[(size_t)threadIdx.x * o.step + o.group] = key;
        }
    }
    if (MEMBERS > 1)
        team_sync();  // nobody leaves while others read what it found
}

extern "C" TEAM_OF(TEAM) __global__ void __launch_bounds__(LIMITS)
        gemv(const unsigned char* __restrict__ w, const unsigned char* __restrict__ s,
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
    Job o = {w, s, gs, x, gain, parts, bias, gate ? gate + column : nullptr, add, y,
            (u64*)keys, eps, limit, cap, rows, n, ld, 0, width, span,
            (int)blockIdx.x / TEAM, main, (int)blockIdx.x % TEAM};
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
    matrix<FORMAT<C>, W / (SPLIT / TEAM), SPLIT / TEAM, STAGED, DEEP, TEAM>(o, xs);
}
