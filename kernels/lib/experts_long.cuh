#pragma once
// experts.cu for rows so long that a warp has more than two units of each strip, and counts what
// every unit costs. Addresses that depend on a lane alone are found once (Copies, Spots); sums of
// some strips meet at once; scales and biases of a strip's rows go to a place of their team. For
// one row, units of the second half are dealt out to all warps: teams would leave some without
// work. The order of sums is that of lib/strips.cuh. What it needs is defined in experts.cu.
constexpr int KEEP = ROWS == 1 && WARPS <= 16 ? 2 : 1;  // for Copies and Spots
// Of several rows, where rows are whole lines, registers do not suffice for it.
constexpr bool RUNS = ROWS == 1 || (U::LINE % 128 && D::LINE % 128);
// Are units of all strips of the second half dealt out to all warps, each a piece of the line? What
// they find is added up when all have done. Teams would leave warps without work.
constexpr bool SPREAD = MIXED && ROWS == 1 && SPAN <= 24;
constexpr int DSTRIPS = (PICKS * (SPAN / 8) + 1) / 2;
constexpr int BLOCKS = (I + 127) / 128;
template <bool> struct Fetched {
    typedef DShares S;
};
template <> struct Fetched<true> {
    typedef Whole<DShares> S;
};
typedef Fetched<SPREAD>::S DFetched;
// Strips of the first half whose sums a team adds up at once: as many as need no more room; ONCE:
// all. Sums of a batch are kept while those of the next are made.
constexpr int FIT = ROWS == 1 ? 4 : MIXED ? 2 : 1;
constexpr int MEET = ROUNDS < FIT ? ROUNDS : FIT;
constexpr bool ONCE = ROUNDS <= MEET;
constexpr int USUMS = WARPS * 16 * MEET * ROWS;
constexpr int DSUMS = SPREAD ? 0 : WARPS * 16 * COLUMNS;
// warps that are ALONE
constexpr int UALL = USUMS * (ONCE ? 1 : 2) + (ROWS == 1 ? DSUMS : 0);
constexpr int SUMS = UALL > 2 * DSUMS ? UALL : 2 * DSUMS;
// Scales and biases of so many strips' rows: of those that are added up, those that are made
// meanwhile, and those on their way.
constexpr int UKEEP = ONCE ? MEET : 2 * MEET + DEEP / UShares::MOST_OF;
constexpr int DKEEP = SPREAD ? 1 : 2 + DEEP / DShares::MOST_OF;
constexpr int DTEAMS = SPREAD ? DSTRIPS : WARPS / DSPLIT;
constexpr int PLACE = U::BYTES > D::BYTES ? U::BYTES : D::BYTES;
// Of strips, each 128 columns and two rows: sums, and what they are to be multiplied by.
template <bool> struct Found {
    float4 sums[DSTRIPS][DShares::N * D::UNITS][8];
    __device__ __forceinline__ float4 (*found(int strip))[8] {
        return sums[strip];
    }
};
template <> struct Found<false> {
    __device__ __forceinline__ float4 (*found(int))[8] { return nullptr; }
};
struct Shared : Found<SPREAD> {
    unsigned char ring[WARPS][DEEP][PLACE];
    Inputs<APART> in;
    float part[SUMS];  // each warp's
    float utail[WARPS / USPLIT][UKEEP][32], dtail[DTEAMS][DKEEP][32];
    float inverse[WARPS][ROWS];  // of the root of a row's mean square
    float squares[ROWS][PARTS], share[ROWS * PICKS], done[ROWS * PICKS][OWN * 16];
    Table slots;
    int seen[ROWS > 1 ? E : 1];
};
static_assert(
        sizeof(Shared) <= ROOM && ROWS <= WARPS && WARPS % 4 == 0,
        "see the contract");

// What a warp fetches next of a bank: REST rows from `row` on (`rest` if it is 0), and which unit.
template <class F> struct Bank {
    Bytes w, s;
    const float *scale, *bias;
    __device__ __forceinline__ Bank(
            Bytes w_, Bytes s_, const float* gs, const float* bias_)
        : w(w_), s(s_), bias(bias_) {
        scale = RowScales<F>::IN_S ? (const float*)s_ : gs;
    }
};
struct Next {
    Bytes w, s;
    unsigned row;
    int rest, step;
    int skip;  // rows between the strip's two parts, if it has any
    int tail;  // place of the next strip's scales and biases
    template <class F, class S>
    __device__ __forceinline__ void first(
            const Bank<F>& of, const Copies<F, S, KEEP, RUNS>& copies,
            unsigned row_, int share, int lane) {
        row = row_;
        w = of.w;
        s = of.s;
        copies.first(w, s, row, share, lane);
    }
    template <class F, class S>
    __device__ __forceinline__ void two(
            const Bank<F>& of, const Copies<F, S, KEEP, RUNS>& copies,
            unsigned row_, unsigned other, int share, int lane) {
        first(of, copies, row_, share, lane);
        skip = (int)(other - row_) - 8;
        if (lane < 16)
            return;  // whose rows are the first eight
        if (RUNS)
            w += (long long)skip * (int)F::LINE;
        s += (long long)(skip / 4) * (int)F::SLINE;
    }
    // True: that was the strip's last unit.
    template <class F, class S, int REST, bool PARTED>
    __device__ __forceinline__ bool fetch(
            const Copies<F, S, KEEP, RUNS>& copies, unsigned char* place,
            int share, int lane) {
        const long long jump = PARTED && !RUNS ? (long long)skip * (int)F::LINE
                                               : 0;
        copies.fetch(place, w, s, REST ? REST : rest, step, share, lane, jump);
        w += S::SPLIT * F::LB;
        s += S::SPLIT * F::SB;
        if (++step < S::of(share))
            return false;
        step = 0;
        return true;
    }
    // Scales and biases of the strip's rows, for one of KEEP places
    template <class F, int REST, bool PARTED, int KEEP>
    __device__ __forceinline__ void fetch_tail(
            const Bank<F>& of, float (*tails)[32], int lane) {
        if (lane < 4) {
            float* const to = tails[tail] + lane * 4;
            const bool on = lane * 4 < (REST ? REST : rest);
            const unsigned from = row + lane * 4
                    + (PARTED && lane > 1 ? skip : 0);
            if (of.scale)
                cp_async_or_zero<16>(to, of.scale + from, on);
            if (of.bias)
                cp_async_or_zero<16>(to + 16, of.bias + from, on);
        }
        tail = tail == KEEP - 1 ? 0 : tail + 1;
    }
};

// Where piece i of n equal ones of a line begins: all * i / n, without the 64 bits that it needs.
__device__ __forceinline__ unsigned piece_of(
        unsigned all, unsigned i, unsigned n) {
    return all / n * i + all % n * i / n;
}

// What a warp finds of a strip of the first half, and of the second.
typedef float USums[16][ROWS];
typedef float DSums[16][COLUMNS];

// Hidden values of `many` strips, the first of which is `from`: what the team's warps found is
// merged. `tail`: place of the first one's scales and biases.
__device__ __forceinline__ void put_hidden(
        const Block<Shared>& b, const USums* part, unsigned from, int many,
        int tail) {
    constexpr int TEAM = 32 * USPLIT, EACH = OUT * ROWS;
    constexpr int ITEMS = (MEET * EACH + TEAM - 1) / TEAM;
    const int mine = opaque(threadIdx.x) % TEAM;
    sync_warps<USPLIT>(b.warp / USPLIT);
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int item = mine + i * TEAM, m = item / EACH;
        const int c = item / OUT % ROWS, r = item % OUT;
        if (m >= many)
            break;
        const unsigned strip = from + m * b.stride;
        const unsigned slot = strip / STRIPS, o = strip % STRIPS * OUT + r;
        const int entry = b.sm->slots.who[slot][c];
        if (entry < 0 || o >= I)
            continue;
        const int line = PAIR ? r / 2 * 4 + r % 2 : r;
        const int kept = tail + m < UKEEP ? tail + m : tail + m - UKEEP;
        const float inv = NORM ? b.sm->inverse[b.warp][c] : 1.f;
        const Line<U, 1 + PAIR> with(
                b.sm->utail[b.warp / USPLIT][kept], line, b.p.ubias);
        give_hidden(
                b.p, part + m * WARPS + b.warp - b.ushare, line, c, entry, o, inv,
                with);
    }
}

// The block's outputs, of what all warps found of its strips: shares are added in order.
__device__ __forceinline__ void merge_spread(const Block<Shared>& b) {
    #pragma unroll 1
    for (unsigned i = threadIdx.x; i < b.strips() * 16 * DSPLIT; i += THREADS) {
        const unsigned strip = i / (16 * DSPLIT);
        const unsigned line = i / DSPLIT % 16;
        const unsigned share = i % DSPLIT;
        float acc = 0.f;
        #pragma unroll
        for (int k = 0; k < DShares::MOST_OF * D::UNITS; k++) {
            const unsigned block = (k / D::UNITS * DSPLIT + share) * D::UNITS
                    + k % D::UNITS;
            if (block >= BLOCKS)
                break;
            const float2 v = ((const float2*)b.sm->found(strip)[block])[line];
            acc = fmaf(v.x, v.y, acc);
        }
        float v = 0.f + acc;
        if (DSPLIT > 1)
            v += __shfl_xor_sync(~0u, acc, 1);
        const unsigned part = 2 * strip + line / 8;
        if (share || part >= b.parts())
            continue;
        const Line<D, 1> with(b.sm->dtail[strip][0], line, b.p.dbias);
        const int to = b.sm->slots.who[part / b.own][0];
        b.sm->done[to][part % b.own * 8 + line % 8] = fmaf(
                v, with.scale[0], with.more[0]);
    }
}

// The first half, as a warp goes through its team's strips of it.
struct Up {
    Block<Shared>& b;
    Next& o;
    unsigned unit;  // the strip that is fetched next
    const Bank<U> bank;
    const Copies<U, UShares, KEEP, RUNS> copies;
    const Spots<U, KEEP> spots;
    __device__ __forceinline__ Up(Block<Shared>& b_, Next& o_)
        : b(b_),
          o(o_),
          unit(b.p.halves & 1 ? b.first : NONE),
          bank(b.p.uw, b.p.us, b.p.ugs, b.p.ubias),
          copies(b.ushare, b.lane),
          spots(b.g, b.t) {
        o.step = o.tail = 0;
    }
    __device__ __forceinline__ void fetch() {
        if (o.step == 0) {
            const unsigned slot = unit / STRIPS, from = unit % STRIPS * 16;
            o.first(bank, copies, b.expert_of(slot) * UROWS + from, b.ushare,
                    b.lane);
            o.rest = UROWS - from;
        }
        constexpr int REST = UROWS % 16 ? 0 : 16;
        unsigned char* const to = b.here();
        if (o.fetch<U, UShares, REST, false>(copies, to, b.ushare, b.lane)) {
            float (*const tails)[32] = b.sm->utail[b.warp / USPLIT];
            if (!b.ushare)
                o.fetch_tail<U, REST, false, UKEEP>(bank, tails, b.lane);
            unit += b.stride;
        }
    }
    __device__ __forceinline__ void next() {
        if (unit < b.slots() * STRIPS)
            fetch();
        b.forth();
    }
    // acc: this warp's part of a strip.
    __device__ __forceinline__ void multiply_strip(float* acc, int short_at) {
        const int l = opaque(b.lane);
        const uint4* at = b.sm->in.x.of(min(l / 4, ROWS - 1), b.ushare, l % 4);
        const float* e = b.sm->in.x.e[max(0, min(l % 4 * 2, ROWS - 2))]
                + b.ushare * U::UNITS;
        #pragma unroll 1
        for (int i = UShares::of(b.ushare); i; i--) {
            cp_async_wait<DEEP - 1>();
            __syncwarp();
            const unsigned char* const from = b.here();
            const float* const e1 = e + (ROWS > 1 ? X::HELD : 0);
            multiply<U, X, ROWS == 1>(from, acc, at, e, e1, spots, i == short_at);
            at += 4 * U::UNITS * USPLIT;
            e += U::UNITS * USPLIT;
            __syncwarp();
            next();
        }
    }
    __device__ __forceinline__ void run() {
        const bool last = b.ushare == UShares::LAST;
        const int short_at = KEEP < 2 && UShares::SHORT && last ? 1 : 0;
        int tail = 0;  // of the first of the strips that are added up
        #pragma unroll 1
        for (unsigned u = b.first; u < b.slots() * STRIPS; b.round ^= !ONCE) {
            USums* const part = (USums*)(b.sm->part + b.round * USUMS);
            const unsigned from = u;
            int many = 0;
            #pragma unroll 1
            for (; many < MEET && u < b.slots() * STRIPS; many++, u += b.stride) {
                float acc[4] = {};
                multiply_strip(acc, short_at);
                put_part(part[many * WARPS + b.warp], acc, b.g, b.t);
            }
            put_hidden(b, part, from, many, tail);
            tail = tail + many < UKEEP ? tail + many : tail + many - UKEEP;
        }
    }
};

// The second half: a warp goes through its team's strips, or, where these are SPREAD, through its
// piece of the line of all units.
struct Down {
    Block<Shared>& b;
    Next& o;
    const Bank<D> bank;
    const Copies<D, DFetched, KEEP, RUNS> copies;
    const Spots<D, KEEP> spots;
    unsigned line_begin, line_end, first;
    unsigned down;  // the strip, or unit, that is fetched next
    __device__ __forceinline__ Down(Block<Shared>& b_, Next& o_)
        : b(b_),
          o(o_),
          bank(b.p.dw, b.p.ds, b.p.dgs, b.p.dbias),
          copies(SPREAD ? 0 : b.dshare, b.lane),
          spots(b.g, b.t) {
        // quarters of a multiprocessor alike
        const unsigned piece = b.warp / 4 + b.warp % 4 * (WARPS / 4);
        const unsigned line = b.strips() * DShares::N;
        line_end = b.span > 0 ? piece_of(line, piece + 1, WARPS) : 0;
        line_begin = b.span > 0 ? piece_of(line, piece, WARPS) : 0;
        first = b.span > 0 ? b.warp / DSPLIT : NONE;
        down = SPREAD ? line_begin : first;
        o.step = SPREAD ? line_begin % DShares::N : 0;
        o.tail = 0;
    }
    __device__ __forceinline__ void open_two(Next& n, unsigned strip) const {
        const unsigned other = min(2 * strip + 1, b.parts() - 1);
        const int share = SPREAD ? 0 : b.dshare;
        n.two(bank, copies, b.row_of(2 * strip), b.row_of(other), share, b.lane);
    }
    // The strip of which a unit is fetched next.
    __device__ __forceinline__ void open() {
        if (SPREAD && (o.step == 0 || down == line_begin)) {
            open_two(o, down / DShares::N);
            o.w += o.step * D::LB;
            o.s += o.step * D::SB;
        } else if (o.step == 0 && MIXED)
            open_two(o, down);
        else if (o.step == 0) {
            const unsigned from = down % OWN * 16;
            const unsigned row = b.sm->slots.expert[down / OWN] * K + b.base
                    + from;
            o.first(bank, copies, row, b.dshare, b.lane);
            o.rest = b.span - from;
        }
    }
    __device__ __forceinline__ void fetch() {
        open();
        constexpr int REST = !MIXED && (SPAN % 16 || K % SPAN) ? 0 : 16;
        unsigned char* const to = b.here();
        const bool last = o.fetch<D, DFetched, REST, MIXED>(
                copies, to, SPREAD ? 0 : b.dshare, b.lane);
        if (SPREAD)
            down++;
        else if (last) {
            float (*const tails)[32] = b.sm->dtail[b.warp / DSPLIT];
            if (!b.dshare)
                o.fetch_tail<D, REST, MIXED, DKEEP>(bank, tails, b.lane);
            down += WARPS / DSPLIT;
        }
    }
    __device__ __forceinline__ void next() {
        if (down < (SPREAD ? line_end : b.strips()))
            fetch();
        b.forth();
    }
    __device__ __forceinline__ void begin() {
        #pragma unroll 1
        for (int i = 0; i < DEEP; i++)
            next();
        #pragma unroll 1
        for (unsigned i = b.warp; SPREAD && b.span > 0 && i < b.strips();
                i += WARPS) {
            Next n;
            n.tail = 0;
            open_two(n, i);
            n.fetch_tail<D, 16, true, 1>(bank, b.sm->dtail[i], b.lane);
        }
    }
    __device__ __forceinline__ void decode(Made<D, MADE>&) {}
    // Whose hidden values an eight of rows is multiplied with.
    __device__ __forceinline__ int entry_of(unsigned part) const {
        return max(0, (int)b.sm->slots.who[min(part, b.parts() - 1) / b.own][0]);
    }
    // All units of the warp's piece of the line.
    __device__ __forceinline__ void run_line() {
        #pragma unroll 1
        for (unsigned i = line_begin; SPREAD && i < line_end;) {
            const unsigned strip = i / DShares::N;
            const unsigned to = min(line_end, (strip + 1) * DShares::N);
            unsigned u = i % DShares::N;
            const bool second = b.g >= 4;  // rows of the strip's other part
            const uint4* at = b.sm->in.h.of(
                    entry_of(2 * strip + (b.g > 0)), u, b.t);
            const float* e = b.sm->in.h.e[entry_of(2 * strip + second)]
                    + u * D::UNITS;
            #pragma unroll 1
            for (; i < to; i++, u++) {
                cp_async_wait<DEEP - 1>();
                __syncwarp();
                const unsigned char* const from = b.here();
                float4(*const found)[8] = b.sm->found(strip) + u * D::UNITS;
                multiply_apart<D, H>(from, found, at, e, spots, second, b.g, b.t);
                at += 4 * D::UNITS;
                e += D::UNITS;
                __syncwarp();
                next();
            }
        }
        cp_async_commit();  // scales and biases, of a warp that had no units
        cp_async_wait<0>();
        __syncthreads();
        if (b.span > 0)
            merge_spread(b);
    }
    // acc: this warp's part of strip u.
    __device__ __forceinline__ void multiply_strip(
            unsigned u, float* acc, int short_at) {
        const uint4* at = b.sm->in.h.of(b.entry(u, b.g), b.dshare, b.t);
        const float* e0 = b.sm->in.h.e[b.entry(u, 2 * b.t)] + b.dshare * D::UNITS;
        const float* e1 = b.sm->in.h.e[b.entry(u, 2 * b.t + 1)]
                + b.dshare * D::UNITS;
        #pragma unroll 1
        for (int i = DShares::of(b.dshare); i; i--) {
            cp_async_wait<DEEP - 1>();
            __syncwarp();
            const unsigned char* const from = b.here();
            multiply<D, H, COLUMNS == 1>(
                    from, acc, at, e0, e1, spots, i == short_at);
            at += 4 * D::UNITS * DSPLIT;
            e0 += D::UNITS * DSPLIT;
            e1 += D::UNITS * DSPLIT;
            __syncwarp();
            next();
        }
    }
    __device__ __forceinline__ void run(const Made<D, MADE>&) {
        if (SPREAD)
            return run_line();
        int tail = 0;
        const bool last = b.dshare == DShares::LAST;
        const int short_at = KEEP < 2 && DShares::SHORT && last ? 1 : 0;
        b.round = 0;  // warps of a team may have had different numbers of strips
        #pragma unroll 1
        for (unsigned u = first; u < b.strips();
                u += WARPS / DSPLIT, b.round ^= 1) {
            float* const sums = b.sm->part
                    + (ALONE ? SUMS - DSUMS : b.round * DSUMS);
            DSums* const part = (DSums*)sums;
            float acc[4] = {};
            multiply_strip(u, acc, short_at);
            put_part(part[b.warp], acc, b.g, b.t);
            const int mine = opaque(threadIdx.x) % (32 * DSPLIT);
            sync_warps<DSPLIT, ALONE ? AFTER : 0>(b.warp / DSPLIT);
            const Line<D, 1> with(
                    b.sm->dtail[b.warp / DSPLIT][tail], mine % 16, b.p.dbias);
            put_products(b, part + b.warp - b.dshare, u, mine, with);
            tail = tail == DKEEP - 1 ? 0 : tail + 1;
        }
    }
};
