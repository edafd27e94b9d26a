#pragma once
// experts.cu for rows of at most two units a warp. A strip's sums meet while those of the next are
// made, and its last unit brings scales and biases of its rows along. What it needs is defined in
// experts.cu.
struct Place {  // for a unit; with a strip's last one come scales and biases of its rows
    unsigned char weights[U::BYTES > D::BYTES ? U::BYTES : D::BYTES];
    float tail[32];
};
struct Shared {
    Place ring[WARPS][DEEP];
    Inputs<APART> in;
    // of one strip while those of the next are made
    float part[2][WARPS][16][COLUMNS];
    // scales and biases of its rows, when its last place has been left
    float tail[WARPS][32];
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
    Bytes w, s;  // where the lane's part of its warp's first unit is
    const float *scale, *bias;
    __device__ __forceinline__ Bank(
            Bytes w_, Bytes s_, const float* gs, const float* bias_, int share,
            int lane)
        : w(w_), s(s_), bias(bias_) {
        scale = RowScales<F>::IN_S ? (const float*)s_ : gs;
        F::first(w, s, 0, share, lane);
    }
};
struct Next {
    Bytes w, s;
    unsigned row;
    int rest, step;
    int skip;  // rows between the strip's two parts, if it has any
    template <class F>
    __device__ __forceinline__ void first(const Bank<F>& of, unsigned row_) {
        row = row_;
        w = of.w + (size_t)row * F::LINE;
        s = of.s + (size_t)(row / 4) * F::SLINE;
    }
    template <class F>
    __device__ __forceinline__ void two(
            const Bank<F>& of, unsigned row_, unsigned other, int lane) {
        first(of, row_);
        skip = (int)(other - row_) - 8;
        s += lane < 16 ? 0 : (long long)(skip / 4) * (int)F::SLINE;
    }
    // True: that was the strip's last unit.
    template <class F, class S, int REST, bool PARTED>
    __device__ __forceinline__ bool fetch(
            const Bank<F>& of, Place& p, int share, int lane) {
        const int rows = REST ? REST : rest;
        const long long jump = PARTED ? (long long)skip * (int)F::LINE : 0;
        F::fetch(p.weights, w, s, rows, step * S::SPLIT + share, lane, jump);
        w += S::SPLIT * F::LB;
        s += S::SPLIT * F::SB;
        if (++step < S::of(share))
            return false;
        const unsigned at = lane * 4;
        const bool on = lane * 4 < rows;
        const unsigned from = row + at + (PARTED && lane > 1 ? skip : 0);
        if (lane < 4) {
            if (of.scale)
                cp_async_or_zero<16>(p.tail + at, of.scale + from, on);
            if (of.bias)
                cp_async_or_zero<16>(p.tail + 16 + at, of.bias + from, on);
        }
        step = 0;
        return true;
    }
};

// Hidden values of strip u, which the team's warps have multiplied: what they found is merged.
__device__ __forceinline__ void put_hidden(const Block<Shared>& b, unsigned u) {
    constexpr int TEAM = 32 * USPLIT;
    constexpr int ITEMS = (OUT * ROWS + TEAM - 1) / TEAM;
    const int mine = opaque(threadIdx.x) % TEAM, r = mine % OUT;
    const int line = PAIR ? r / 2 * 4 + r % 2 : r;
    const unsigned slot = u / STRIPS, o = u % STRIPS * OUT + r;
    const Line<U, 1 + PAIR> with(b.sm->tail[b.warp], line, b.p.ubias);
    sync_warps<USPLIT>(b.warp / USPLIT);
    #pragma unroll
    for (int i = 0; i < ITEMS; i++) {
        const int c = (mine + i * TEAM) / OUT;
        const int entry = c < ROWS ? b.sm->slots.who[slot][c] : -1;
        if (entry < 0 || o >= I)
            continue;
        const float inv = NORM ? b.sm->inverse[b.warp][c] : 1.f;
        give_hidden(
                b.p, b.sm->part[b.round] + b.warp - b.ushare, line, c, entry, o,
                inv, with);
    }
}

// The first half, as a warp goes through its team's strips of it.
struct Up {
    Block<Shared>& b;
    Next& o;
    const Bank<U> bank;
    unsigned unit;  // the strip that is fetched next
    __device__ __forceinline__ Up(Block<Shared>& b_, Next& o_)
        : b(b_),
          o(o_),
          bank(b.p.uw, b.p.us, b.p.ugs, b.p.ubias, b.ushare, b.lane),
          unit(b.p.halves & 1 ? b.first : NONE) {
        o.step = 0;
    }
    __device__ __forceinline__ void fetch() {
        if (o.step == 0) {
            const unsigned slot = unit / STRIPS, from = unit % STRIPS * 16;
            o.first(bank, b.expert_of(slot) * UROWS + from);
            o.rest = UROWS - from;
        }
        constexpr int REST = UROWS % 16 ? 0 : 16;
        Place& to = b.here();
        if (o.fetch<U, UShares, REST, false>(bank, to, b.ushare, b.lane))
            unit += b.stride;
    }
    __device__ __forceinline__ void next() {
        if (unit < b.slots() * STRIPS)
            fetch();
        b.forth();
    }
    // acc: this warp's part of a strip.
    __device__ __forceinline__ void multiply_strip(float* acc) {
        const int l = opaque(b.lane);
        const uint4* at = b.sm->in.x.of(min(l / 4, ROWS - 1), b.ushare, l % 4);
        const float* e = b.sm->in.x.e[max(0, min(l % 4 * 2, ROWS - 2))]
                + b.ushare * U::UNITS;
        #pragma unroll 1
        for (int i = UShares::of(b.ushare); i; i--) {
            cp_async_wait<DEEP - 1>();
            __syncwarp();
            const Place& from = b.here();
            const bool half = UShares::SHORT && i == 1
                    && b.ushare == UShares::LAST;
            const float* const e1 = e + (ROWS > 1 ? X::HELD : 0);
            multiply<U, X>(from.weights, acc, at, e, e1, b.g, b.t, half);
            at += 4 * U::UNITS * USPLIT;
            e += U::UNITS * USPLIT;
            if (i == 1)
                b.sm->tail[b.warp][b.lane] = from.tail[b.lane];
            __syncwarp();
            next();
        }
    }
    __device__ __forceinline__ void run() {
        #pragma unroll 1
        for (unsigned u = b.first; u < b.slots() * STRIPS;
                u += b.stride, b.round ^= 1) {
            float acc[4] = {};
            multiply_strip(acc);
            put_part(b.sm->part[b.round][b.warp], acc, b.g, b.t);
            put_hidden(b, u);
        }
    }
};

// The second half, as a warp goes through its team's strips of it; ALONE it has one unit.
struct Down {
    Block<Shared>& b;
    Next& o;
    const Bank<D> bank;
    unsigned strip;  // that is fetched next
    __device__ __forceinline__ Down(Block<Shared>& b_, Next& o_)
        : b(b_),
          o(o_),
          bank(b.p.dw, b.p.ds, b.p.dgs, b.p.dbias, b.dshare, b.lane),
          strip(b.span > 0 ? b.warp / DSPLIT : NONE) {}
    __device__ __forceinline__ void fetch() {
        if (o.step == 0 && MIXED) {
            const unsigned other = min(2 * strip + 1, b.parts() - 1);
            o.two(bank, b.row_of(2 * strip), b.row_of(other), b.lane);
        } else if (o.step == 0) {
            const unsigned from = strip % OWN * 16;
            o.first(bank, b.sm->slots.expert[strip / OWN] * K + b.base + from);
            o.rest = b.span - from;
        }
        constexpr int REST = !MIXED && (SPAN % 16 || K % SPAN) ? 0 : 16;
        Place& to = b.here();
        if (o.fetch<D, DShares, REST, MIXED>(bank, to, b.dshare, b.lane))
            strip += WARPS / DSPLIT;
    }
    __device__ __forceinline__ void next() {
        if (strip < b.strips())
            fetch();
        b.forth();
    }
    __device__ __forceinline__ void begin() {
        #pragma unroll 1
        for (int i = 0; i < DEEP; i++)
            next();
    }
    // The only unit becomes registers of a tensor core.
    __device__ __forceinline__ void decode(Made<D, MADE>& only) {
        if constexpr (MADE > 0) {
            cp_async_wait<DEEP - 1>();
            __syncwarp();
            #pragma unroll
            for (int i = 0; i < D::UNITS; i++)
                only.blocks[i].read(b.here().weights, i, b.g, b.t);
            only.decode();
        }
    }
    // acc: this warp's part of strip u.
    __device__ __forceinline__ void multiply_strip(
            unsigned u, float* acc, const Made<D, MADE>& only) {
        const uint4* at = b.sm->in.h.of(b.entry(u, b.g), b.dshare, b.t);
        const float* e0 = b.sm->in.h.e[b.entry(u, 2 * b.t)] + b.dshare * D::UNITS;
        const float* e1 = b.sm->in.h.e[b.entry(u, 2 * b.t + 1)]
                + b.dshare * D::UNITS;
        #pragma unroll 1
        for (int i = MADE ? 1 : DShares::of(b.dshare); i; i--) {
            if (!MADE) {
                cp_async_wait<DEEP - 1>();
                __syncwarp();
            }
            const Place& from = b.here();
            const bool half = DShares::SHORT && i == 1
                    && b.dshare == DShares::LAST;
            if constexpr (MADE > 0)
                multiply_made<D, H>(only, acc, at, e0, e1);
            else
                multiply<D, H>(from.weights, acc, at, e0, e1, b.g, b.t, half);
            at += 4 * D::UNITS * DSPLIT;
            e0 += D::UNITS * DSPLIT;
            e1 += D::UNITS * DSPLIT;
            if (i == 1)
                b.sm->tail[b.warp][b.lane] = from.tail[b.lane];
            __syncwarp();
            if (!MADE)
                next();
        }
    }
    __device__ __forceinline__ void run(const Made<D, MADE>& only) {
        const unsigned begin = b.span > 0 ? b.warp / DSPLIT : NONE;
        // warps of a team may have had different numbers of strips
        if (USPLIT < DSPLIT)
            b.round = 0;
        #pragma unroll 1
        for (unsigned u = begin; u < b.strips();
                u = MADE ? NONE : u + WARPS / DSPLIT, b.round ^= 1) {
            float acc[4] = {};
            multiply_strip(u, acc, only);
            put_part(b.sm->part[b.round][b.warp], acc, b.g, b.t);
            const int mine = opaque(threadIdx.x) % (32 * DSPLIT);
            const Line<D, 1> with(b.sm->tail[b.warp], mine % 16, b.p.dbias);
            sync_warps<DSPLIT, ALONE ? AFTER : 0>(b.warp / DSPLIT);
            put_products(
                    b, b.sm->part[b.round] + b.warp - b.dshare, u, mine, with);
        }
    }
};
