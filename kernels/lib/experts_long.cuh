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
    __device__ __forceinline__ float4 (*found(int strip))[8] { return sums[strip]; }
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
        sizeof(Shared) <= ROOM && ROWS <= WARPS && WARPS % 4 == 0, "see the contract");

// What a warp fetches next of a bank: REST rows from `row` on (`rest` if it is 0), and which unit.
template <class F> struct Bank {
    Bytes w, s;
    const float *scale, *bias;
    __device__ __forceinline__ Bank(Bytes w_, Bytes s_, const float* gs, const float* bias_)
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
            const Bank<F>& of, const Copies<F, S, KEEP, RUNS>& copies, unsigned row_,
            int share, int lane) {
        row = row_;
        w = of.w;
        s = of.s;
        copies.first(w, s, row, share, lane);
    }
    template <class F, class S>
    __device__ __forceinline__ void two(
            const Bank<F>& of, const Copies<F, S, KEEP, RUNS>& copies, unsigned row_,
            unsigned other, int share, int lane) {
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
            const Copies<F, S, KEEP, RUNS>& copies, unsigned char* place, int share,
            int lane) {
        const long long jump = PARTED && !RUNS ? (long long)skip * (int)F::LINE : 0;
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
            const unsigned from = row + lane * 4 + (PARTED && lane > 1 ? skip : 0);
            if (of.scale)
                cp_async_or_zero<16>(to, of.scale + from, on);
            if (of.bias)
                cp_async_or_zero<16>(to + 16, of.bias + from, on);
        }
        tail = tail == KEEP - 1 ? 0 : tail + 1;
    }
};

// Where piece i of n equal ones of a line begins: all * i / n, without the 64 bits that it needs.
__device__ __forceinline__ unsigned piece_of(unsigned all, unsigned i, unsigned n) {
    return all / n * i + all % n * i / n;
}

// What a warp finds of a strip of the first half.
typedef float USums[16][ROWS];

// Hidden values of `many` strips, the first of which is `from`: what the team's warps found is
// merged. `tail`: place of the first one's scales and biases.
__device__ __forceinline__ void put_hidden(
        Shared* sm, const Params& p, const USums* part, unsigned from, unsigned stride,
        int many, int tail, int warp) {
    constexpr int TEAM = 32 * USPLIT, EACH = OUT * ROWS;
    constexpr int ITEMS = (MEET * EACH + TEAM - 1) / TEAM;
    const int ushare = warp % USPLIT;
    const int mine = opaque(threadIdx.x) % TEAM;
    sync_warps<USPLIT>(warp / USPLIT);
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int item = mine + i * TEAM, m = item / EACH;
        const int c = item / OUT % ROWS, r = item % OUT;
        if (m >= many)
            break;
        const unsigned strip = from + m * stride;
        const unsigned slot = strip / STRIPS, o = strip % STRIPS * OUT + r;
        const int entry = sm->slots.who[slot][c];
        if (entry < 0 || o >= I)
            continue;
        const int line = PAIR ? r / 2 * 4 + r % 2 : r;
        const int kept = tail + m < UKEEP ? tail + m : tail + m - UKEEP;
        const float* with = sm->utail[warp / USPLIT][kept];
        const float inv = NORM ? sm->inverse[warp][c] : 1.f;
        float v[2];
        #pragma unroll
        for (int j = 0; j < 1 + PAIR; j++) {
            const float scale = U::row_scale((Bytes)with, with, line + 2 * j);
            const float more = p.ubias ? with[16 + line + 2 * j] : 0.f;
            v[j] = sum_parts<USPLIT>(part + m * WARPS + warp - ushare, line + 2 * j, c);
            v[j] = fmaf(__fmul_rn(v[j], inv), scale, more);
        }
        give(p.h + (size_t)entry * WIDTH + o, act_mul<ACT>(v[0], v[PAIR], p.limit));
    }
}

// What a warp finds of a strip of the second half.
typedef float DSums[16][COLUMNS];

// The block's outputs of strip u: what the team's warps found is merged, for whom picked it.
template <class Parts, class Slot>
__device__ __forceinline__ void put_products(
        Shared* sm, const Params& p, const DSums* part, unsigned u, int tail, int warp,
        unsigned own, Parts parts, Slot slot) {
    constexpr int TEAM = 32 * DSPLIT;
    constexpr int ITEMS = (16 * ROWS + TEAM - 1) / TEAM;
    const int dshare = warp % DSPLIT;
    const int mine = opaque(threadIdx.x) % TEAM, line = mine % 16;
    sync_warps<DSPLIT, ALONE ? AFTER : 0>(warp / DSPLIT);
    const float* with = sm->dtail[warp / DSPLIT][tail];
    const float scale = D::row_scale((Bytes)with, with, line);
    const float more = p.dbias ? with[16 + line] : 0.f;
    const unsigned eight = 2 * u + line / 8;
    if (MIXED && eight >= parts())
        return;
    const int o = MIXED ? eight % own * 8 + line % 8 : u % OWN * 16 + line;
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int c = mine / 16 + i * (TEAM / 16);
        const int to = c < ROWS ? sm->slots.who[slot(line / 8)][c] : -1;
        if (to < 0)
            continue;
        const int column = MIXED ? line / 8 * ROWS + c : c;
        const float v = sum_parts<DSPLIT>(part + warp - dshare, line, column);
        sm->done[to][o] = fmaf(v, scale, more);
    }
}

// The block's outputs, of what all warps found of its `strips` strips: shares are added in order.
__device__ __forceinline__ void merge_spread(
        Shared* sm, const Params& p, unsigned own, unsigned parts, unsigned strips) {
    #pragma unroll 1
    for (unsigned i = threadIdx.x; i < strips * 16 * DSPLIT; i += THREADS) {
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
            const float2 v = ((const float2*)sm->found(strip)[block])[line];
            acc = fmaf(v.x, v.y, acc);
        }
        float v = 0.f + acc;
        if (DSPLIT > 1)
            v += __shfl_xor_sync(~0u, acc, 1);
        const unsigned part = 2 * strip + line / 8;
        if (share || part >= parts)
            continue;
        const float* with = sm->dtail[strip][0];
        const float more = p.dbias ? with[16 + line] : 0.f;
        const int to = sm->slots.who[part / own][0];
        sm->done[to][part % own * 8 + line % 8] = fmaf(
                v, D::row_scale((Bytes)with, with, line), more);
    }
}

__device__ __forceinline__ void long_rows(const Params& p) {
    DYNAMIC_SHARED(Shared, sm);
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int t = lane % 4;
    // the compiler learns: one for all
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    const int ushare = warp % USPLIT, dshare = warp % DSPLIT;
    const unsigned first = blockIdx.x + gridDim.x * (warp / USPLIT);
    const unsigned stride = gridDim.x * (WARPS / USPLIT);
    // the block's outputs
    const int base = blockIdx.x * SPAN;
    const int span = min(SPAN, K - base);
    constexpr unsigned NONE = ~0u;
    unsigned unit = p.halves & 1 ? first : NONE;  // the strip that is fetched next
    auto slots = [&]() -> unsigned { return ROWS == 1 ? PICKS : sm->slots.number; };
    // of the unit that is multiplied next, which leaves it to another
    int place = 0, round = 0;
    const Bank<U> ubank(p.uw, p.us, p.ugs, p.ubias);
    const Copies<U, UShares, KEEP, RUNS> ucopies(ushare, lane);
    const Spots<U, KEEP> uspots(g, t);
    Next o;
    o.step = o.tail = 0;
    auto next_up = [&] {
        if (o.step == 0) {
            const unsigned slot = unit / STRIPS, from = unit % STRIPS * 16;
            const unsigned e = SHARED && slot < sm->slots.FIRST ? E
                                                                : sm->slots.expert[slot];
            o.first(ubank, ucopies, e * UROWS + from, ushare, lane);
            o.rest = UROWS - from;
        }
        constexpr int REST = UROWS % 16 ? 0 : 16;
        if (o.fetch<U, UShares, REST, false>(
                    ucopies, sm->ring[warp][place], ushare, lane)) {
            float (*const tails)[32] = sm->utail[warp / USPLIT];
            if (!ushare)
                o.fetch_tail<U, REST, false, UKEEP>(ubank, tails, lane);
            unit += stride;
        }
    };
    auto forth = [&] {
        cp_async_commit();
        place = DEEP == 2 ? 1 - place : place == DEEP - 1 ? 0 : place + 1;
    };
    sm->slots.clear(p.rows, THREADS);
    for (int i = threadIdx.x; ROWS > 1 && i < E; i += THREADS)
        sm->seen[i] = ROWS * TOP_K;
    int begun = 0;
    if (SHARED)  // needs no router
        #pragma unroll 1
        for (; begun < DEEP && unit < STRIPS; begun++) {
            next_up();
            forth();
        }
    if (!LATE)
        pdl_trigger();
    pdl_wait();
    load(sm, p, warp, lane);
    auto next = [&] {
        if (unit < slots() * STRIPS)
            next_up();
        forth();
    };
    #pragma unroll 1
    for (; begun < DEEP; begun++)
        next();
    if (p.halves & 1) {
        if (NORM)
            norm(sm, p.eps, warp, lane);
        const int short_at = KEEP < 2 && UShares::SHORT && ushare == UShares::LAST ? 1 : 0;
        int tail = 0;  // of the first of the strips that are added up
        #pragma unroll 1
        for (unsigned u = first; u < slots() * STRIPS; round ^= !ONCE) {
            USums* const part = (USums*)(sm->part + round * USUMS);
            const unsigned from = u;
            int many = 0;
            #pragma unroll 1
            for (; many < MEET && u < slots() * STRIPS; many++, u += stride) {
                const int l = opaque(lane);
                const uint4* at = sm->in.x.of(min(l / 4, ROWS - 1), ushare, l % 4);
                const float* e = sm->in.x.e[max(0, min(l % 4 * 2, ROWS - 2))]
                        + ushare * U::UNITS;
                float acc[4] = {};
                #pragma unroll 1
                for (int i = UShares::of(ushare); i; i--) {
                    cp_async_wait<DEEP - 1>();
                    __syncwarp();
                    const unsigned char* const from = sm->ring[warp][place];
                    const float* const e1 = e + (ROWS > 1 ? X::HELD : 0);
                    multiply<U, X, ROWS == 1>(from, acc, at, e, e1, uspots, i == short_at);
                    at += 4 * U::UNITS * USPLIT;
                    e += U::UNITS * USPLIT;
                    __syncwarp();
                    next();
                }
                put_part(part[many * WARPS + warp], acc, g, t);
            }
            put_hidden(sm, p, part, from, stride, many, tail, warp);
            tail = tail + many < UKEEP ? tail + many : tail + many - UKEEP;
        }
    }
    if (!(p.halves & 2))
        return;
    // of the second half, eights of its outputs for each expert, and strips
    const unsigned own = K % SPAN ? max(span, 0) / 8 : SPAN / 8;
    auto parts = [&] { return slots() * own; };
    auto strips = [&] { return MIXED ? (parts() + 1) / 2 : slots() * OWN; };
    auto row_of = [&](unsigned part) {
        return sm->slots.expert[part / own] * K + base + part % own * 8;
    };
    const Bank<D> dbank(p.dw, p.ds, p.dgs, p.dbias);
    const Copies<D, DFetched, KEEP, RUNS> dcopies(SPREAD ? 0 : dshare, lane);
    const Spots<D, KEEP> dspots(g, t);
    // quarters of a multiprocessor alike
    const unsigned piece = warp / 4 + warp % 4 * (WARPS / 4);
    const unsigned line_end = span > 0 ? piece_of(strips() * DShares::N, piece + 1, WARPS)
                                       : 0;
    const unsigned line_begin = span > 0 ? piece_of(strips() * DShares::N, piece, WARPS)
                                         : 0;
    const unsigned own_first = span > 0 ? warp / DSPLIT : NONE;
    // the strip, or unit, that is fetched next
    unsigned down = SPREAD ? line_begin : own_first;
    o.step = SPREAD ? line_begin % DShares::N : 0;
    o.tail = 0;
    auto open_two = [&](Next& n, unsigned strip) {
        const unsigned other = min(2 * strip + 1, parts() - 1);
        n.two(dbank, dcopies, row_of(2 * strip), row_of(other), SPREAD ? 0 : dshare, lane);
    };
    auto next_down = [&] {
        if (SPREAD && (o.step == 0 || down == line_begin)) {
            open_two(o, down / DShares::N);
            o.w += o.step * D::LB;
            o.s += o.step * D::SB;
        } else if (o.step == 0 && MIXED)
            open_two(o, down);
        else if (o.step == 0) {
            const unsigned from = down % OWN * 16;
            const unsigned row = sm->slots.expert[down / OWN] * K + base + from;
            o.first(dbank, dcopies, row, dshare, lane);
            o.rest = span - from;
        }
        constexpr int REST = !MIXED && (SPAN % 16 || K % SPAN) ? 0 : 16;
        unsigned char* const to = sm->ring[warp][place];
        const bool last = o.fetch<D, DFetched, REST, MIXED>(
                dcopies, to, SPREAD ? 0 : dshare, lane);
        if (SPREAD)
            down++;
        else if (last) {
            float (*const tails)[32] = sm->dtail[warp / DSPLIT];
            if (!dshare)
                o.fetch_tail<D, REST, MIXED, DKEEP>(dbank, tails, lane);
            down += WARPS / DSPLIT;
        }
    };
    auto more_down = [&] { return down < (SPREAD ? line_end : strips()); };
    #pragma unroll 1
    for (int i = 0; i < DEEP; i++) {  // not before: others still wait for the first half's
        if (more_down())
            next_down();
        forth();
    }
    #pragma unroll 1
    for (unsigned i = warp; SPREAD && span > 0 && i < strips(); i += WARPS) {
        Next n;
        n.tail = 0;
        open_two(n, i);
        n.fetch_tail<D, 16, true, 1>(dbank, sm->dtail[i], lane);
    }
    if (LATE)
        pdl_trigger();
    weigh(sm, p, warp, lane);
    if (!APART)
        __syncthreads();  // before what is staged takes the place of x
    float before = 0.f;
    if (threadIdx.x < p.rows * SPAN && p.add && (int)threadIdx.x % SPAN < span)
        before = p.add[(size_t)(threadIdx.x / SPAN) * K + base + threadIdx.x % SPAN];
    stage_h(sm->in.h, sm->slots, p.h, p.rows, [] {});
    ask_later(p);
    if (ALONE)
        __syncwarp();
    else
        __syncthreads();
    #pragma unroll 1
    for (unsigned i = line_begin; SPREAD && i < line_end;) {
        const unsigned strip = i / DShares::N;
        const unsigned to = min(line_end, (strip + 1) * DShares::N);
        unsigned u = i % DShares::N;
        auto entry = [&](unsigned part) {
            return max(0, (int)sm->slots.who[min(part, parts() - 1) / own][0]);
        };
        const bool second = g >= 4;  // rows of the strip's other part
        const uint4* at = sm->in.h.of(entry(2 * strip + (g > 0)), u, t);
        const float* e = sm->in.h.e[entry(2 * strip + second)] + u * D::UNITS;
        #pragma unroll 1
        for (; i < to; i++, u++) {
            cp_async_wait<DEEP - 1>();
            __syncwarp();
            const unsigned char* const from = sm->ring[warp][place];
            multiply_apart<D, H>(
                    from, sm->found(strip) + u * D::UNITS, at, e, dspots, second, g, t);
            at += 4 * D::UNITS;
            e += D::UNITS;
            __syncwarp();
            if (more_down())
                next_down();
            forth();
        }
    }
    if (SPREAD) {
        cp_async_commit();  // scales and biases, of a warp that had no units
        cp_async_wait<0>();
        __syncthreads();
    }
    if (SPREAD && span > 0)
        merge_spread(sm, p, own, parts(), strips());
    int tail = 0;
    const int short_at = KEEP < 2 && DShares::SHORT && dshare == DShares::LAST ? 1 : 0;
    round = 0;  // warps of a team may have had different numbers of strips
    #pragma unroll 1
    for (unsigned u = SPREAD ? NONE : own_first; u < strips();
            u += WARPS / DSPLIT, round ^= 1) {
        DSums* const part = (DSums*)(sm->part + (ALONE ? SUMS - DSUMS : round * DSUMS));
        auto slot = [&](unsigned part) {  // of that part of the strip
            return MIXED ? min(2 * u + part, parts() - 1) / own : u / OWN;
        };
        auto entry = [&](int c) {
            const int part = MIXED ? min(c / ROWS, 1) : 0;
            const int r = MIXED ? c % ROWS : min(c, ROWS - 1);
            return max(0, (int)sm->slots.who[slot(part)][r]);
        };
        const uint4* at = sm->in.h.of(entry(g), dshare, t);
        const float* e0 = sm->in.h.e[entry(2 * t)] + dshare * D::UNITS;
        const float* e1 = sm->in.h.e[entry(2 * t + 1)] + dshare * D::UNITS;
        float acc[4] = {};
        #pragma unroll 1
        for (int i = DShares::of(dshare); i; i--) {
            cp_async_wait<DEEP - 1>();
            __syncwarp();
            const unsigned char* const from = sm->ring[warp][place];
            multiply<D, H, COLUMNS == 1>(from, acc, at, e0, e1, dspots, i == short_at);
            at += 4 * D::UNITS * DSPLIT;
            e0 += D::UNITS * DSPLIT;
            e1 += D::UNITS * DSPLIT;
            __syncwarp();
            if (more_down())
                next_down();
            forth();
        }
        put_part(part[warp], acc, g, t);
        put_products(sm, p, part, u, tail, warp, own, parts, slot);
        tail = tail == DKEEP - 1 ? 0 : tail + 1;
    }
    __syncthreads();
    put_sums(sm, base, span, p.rows, before, p.add, p.y, p.ids, p.weights);
}
