// y = act(W f(x) + bias) * sigmoid(gate) + add for any number of rows: gemv.cu's product, and its
// bits, with x as gemv_halves.cu leaves it. A block has some rows of W and 8*TILES rows of x; a
// warp STRIPS times 16 rows of W, of whose columns ALONG warps have shares. gemv.cu's SPLIT shares
// of a row are added up here one after the other, too: a warp takes every ALONG-th of them. Weights
// are decoded once for all of a block's rows of x, which come a piece at a time (lib/bulk.cuh).
//   w       : [n4, w_bytes]          u8   as for gemv.cu
//   s       : [s_rows, s_bytes]      u8   or null
//   gs      : [n4]                   f32  or null
//   extra   : [m4, extra_bytes]      u8   or null
//   halves  : [units, line]          u8   x (gemv_halves.cu), line = tiles * bytes
//   more    : [parcels, pitch]       u8   x for EXTRA; or null
//   inverse : [both, rows]           f32  NORM 1: 1/rms of each row, then that for EXTRA; or null
//   bias    : [biases]               f32  or null
//   gate    : [rows, ld]             f32  or null
//   add     : [rows, width]          f32  may be y; or null
//   y       : [rows, width]          f32  or null
//   best    : [rows, main]           i64  BEST, in place of y: of what each block would have
//                                         written of a row, the key of the largest (lib/keys.cuh);
//                                         or null
//   -D FORMAT= EXTRA= K= ACT= CAP= SPLIT=      as for gemv.cu
//   -D NORM=   1: results are multiplied by `inverse`
//   -D TILES= eights of rows of x
//   -D STRIPS= DOWN= ALONG=   warps: DOWN beside each other times ALONG that share columns
//   -D DEEP= HELD=   places of a warp for units of weights on their way; pieces of x for its share
//   -D CORES=  1, on Hopper: four warps beside each other multiply together (lib/wgmma.cuh), STRIPS
//              is 1
//   -D PLAIN=  1: no gate and no add; 2: no gate
//   -D BEST=   1: for whoever wants the largest of each row alone; PLAIN 1, no ACT and no EXTRA
//   -D ESPLIT= EDOWN= EALONG= EDEEP= EHELD=   the same for the extra rows, 16*EDOWN a block at a
//              time
//   launch: <<<(main + ceil(m/(16*EDOWN)) or less, ceil(rows/(8*TILES))), 32*DOWN*ALONG, shared
//        bytes: see atlas.cuda.gemv_wide>>>, `main` blocks have groups of `span` <= 16*STRIPS*DOWN
//        rows of W, and `tiles` is a multiple of TILES
#include "lib/tiles.cuh"
#include "lib/act.cuh"
#include "lib/bulk.cuh"
#include "lib/keys.cuh"
#include "lib/pdl.cuh"
#include "lib/wgmma.cuh"
#ifndef FORMAT
#define FORMAT fragment_nvfp4
#endif
#ifndef K
#define K 2048
#endif
#ifndef NORM
#define NORM 1
#endif
#ifndef ACT
#define ACT 0
#endif
#ifndef CAP
#define CAP 0
#endif
#ifndef SPLIT
#define SPLIT 4
#endif
#ifndef TILES
#define TILES 2
#endif
#ifndef STRIPS
#define STRIPS 1
#endif
#ifndef DOWN
#define DOWN 4
#endif
#ifndef ALONG
#define ALONG 2
#endif
#ifndef DEEP
#define DEEP 2
#endif
#ifndef HELD
#define HELD 4
#endif
#ifndef CORES
#define CORES 0
#endif
#ifndef PLAIN
#define PLAIN 0
#endif
#ifndef BEST
#define BEST 0
#endif
// chunks of 32, blocks of 128
constexpr int C = (K + 31) / 32;
constexpr int B = (C + 3) / 4;
// tiles of more than four whose sums of a block have registers
constexpr int AT_ONCE = 2;
constexpr bool PAIR = ACT != ACT_NONE && ACT != ACT_RELU2;
#ifdef EXTRA
static_assert(!BEST, "a row has one best");
#endif
static_assert(!BEST || PLAIN == 1 && ACT == ACT_NONE, "see the contract");

struct Job {  // one matrix
    const unsigned char *w, *s, *x;
    const float *gs, *inverse, *bias, *gate, *add;
    float* y;
    long long* best;
    float limit, cap;
    // `at`: where its outputs begin; its rows come in groups of `span`, and this block has every
    // `step`-th from `group` on; of x it has tiles from `first` on
    int rows, n, ld, at, width, span, group, step, tiles, first;
};

// Units of columns that warp `h` of those that share them has: share after share.
template <int N, int SHARES, int PER> struct Walk {
    int unit, pass;
    // true at the end, where it begins anew
    __device__ __forceinline__ bool next(int h) {
        unit += SHARES;
        if (unit >= N)
            unit = h + ++pass * PER;
        const bool end = pass >= SHARES / PER || unit >= N;
        if (end) {
            unit = h;
            pass = 0;
        }
        return end;
    }
};

// What becomes of sums of a warp's quad: rows r, r+1 of W by columns c, c+1 of x.
struct Finish {
    float raw[2], bias[2], prior[PAIR ? 2 : 4], open[2], inverse[2];
    int out, column;
    // PAIR: rows of up
    static __device__ __forceinline__ bool odd() { return threadIdx.x & 4; }
    template <class F>
    __device__ __forceinline__ void weights(const Job& o, int r, int to) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const int at = r + i;
            // not waited for yet
            raw[i] = at < to ? F::row_raw(o.s, o.gs, at) : 0.f;
            bias[i] = biased(o, at, to) ? o.bias[at] : 0.f;
        }
    }
    static __device__ __forceinline__ bool biased(const Job& o, int at, int to) {
        return at < to && o.bias && (PAIR || at < o.n);
    }
    // the same, where a warp has them in shared memory: the g-th and the next of its 16 rows
    __device__ __forceinline__ void kept(const float* own, int g) {
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            raw[i] = own[g + i];
            bias[i] = own[16 + g + i];
        }
    }
    // where a lane's results go: all four, or of a pair's two lanes a column each
    __device__ __forceinline__ bool there(
            const Job& o, int to, int i, int j) const {
        return column + j < o.rows
                && out + i < (PAIR ? min(o.n, to) / 2 : min(o.n, to));
    }
    // `norms`: of columns c and c+1, if they are in shared memory
    __device__ __forceinline__ void rows(
            const Job& o, int r, int c, int to, const float* norms = nullptr) {
        out = PAIR ? r / 4 * 2 : r;
        column = PAIR ? c + odd() : c;
        #pragma unroll
        for (int j = 0; j < 2; j++) {
            const bool on = c + j < o.rows;
            if (norms)
                inverse[j] = norms[j];
            else
                inverse[j] = NORM == 1 && on ? o.inverse[c + j] : 1.f;
            const bool opens = !PLAIN && o.gate && column + j < o.rows;
            open[j] = opens
                    ? times_sigmoid(1.f, o.gate[(size_t)(column + j) * o.ld])
                    : 1.f;
            if (PLAIN == 1 || PAIR && j)
                continue;
            const bool one = o.add && there(o, to, 0, j);
            const bool both = o.add && there(o, to, 1, j);
            const float* const p = o.add + place(o, j);
            float2 two = make_float2(0.f, 0.f);
            if (both && (size_t)p % 8 == 0)
                two = *(const float2*)p;
            else {
                if (one)
                    two.x = p[0];
                if (both)
                    two.y = p[1];
            }
            prior[2 * j] = two.x;
            prior[2 * j + 1] = two.y;
        }
    }
    // all that a quad needs, where rows of W have theirs in shared memory
    __device__ __forceinline__ void from(
            const Job& o, const float* own, int r, int q, int to, int g, int t) {
        kept(own, 2 * g);
        rows(o, r, (o.first + q) * 8 + 2 * t, to, own + 32 + q * 8 + 2 * t);
    }
    __device__ __forceinline__ size_t place(const Job& o, int j) const {
        // of the first of two
        return (size_t)(column + j) * o.width + o.at + out;
    }
    __device__ __forceinline__ float made(
            const Job& o, int i, int j, float v, float up) const {
        if (CAP)
            v = __fmul_rn(o.cap, tanhf(v / o.cap));
        if (ACT)
            v = act_mul<ACT>(v, up, o.limit);
        // -0 becomes 0 any way
        if (PLAIN)
            return v + (PLAIN == 1 ? 0.f : prior[2 * j + i]);
        return fmaf(v, open[j], prior[2 * j + i]);
    }
    __device__ __forceinline__ void put(
            const Job& o, int to, int j, float2 v) const {
        float* const p = o.y + place(o, j);
        const bool both = there(o, to, 1, j);
        if (both && (size_t)p % 8 == 0) {
            *(float2*)p = v;
            return;
        }
        if (there(o, to, 0, j))
            p[0] = v.x;
        if (both)
            p[1] = v.y;
    }
    // The largest of a quad's 16 rows joins that of each of its columns, which are the warp's own:
    // lanes 0 to 3 have the first of their two, lanes 16 to 19 the second.
    __device__ __forceinline__ void join(
            const Job& o, int to, const float2* v, u64* best) const {
        const float none = -3.4028235e38f;
        const int lane = threadIdx.x % 32;
        const int rows = min(o.n, to);
        float top[2];
        // lanes with what is not finite, a larger second, the largest
        unsigned spoilt[2], upper[2], who[2];
        #pragma unroll
        for (int j = 0; j < 2; j++) {
            const float a = out < rows ? v[j].x : none;
            const float b = out + 1 < rows ? v[j].y : none;
            const float mine = fmaxf(a, b);
            top[j] = mine;
            #pragma unroll
            for (int m = 4; m < 32; m *= 2)
                top[j] = fmaxf(top[j], __shfl_xor_sync(~0u, top[j], m));
            spoilt[j] = __ballot_sync(~0u, !(fmaf(a, 0.f, b * 0.f) == 0.f));
            upper[j] = __ballot_sync(~0u, b > a);
            who[j] = __ballot_sync(~0u, mine == top[j]);
        }
        const bool second = lane & 16;
        const unsigned column_lanes = 0x11111111u << lane % 4;
        const unsigned bad = (second ? spoilt[1] : spoilt[0]) & column_lanes;
        const int first = max(
                __ffs((second ? who[1] : who[0]) & column_lanes) - 1, 0);
        const int odd = (second ? upper[1] : upper[0]) >> first & 1;
        const unsigned key = bad ? ~0u : float_key(second ? top[1] : top[0]);
        u64* const own = best + column - o.first * 8 + second;
        if (!(lane & 12))
            *own = max(*own, keyed(key, out + (first / 4 - lane / 4) * 2 + odd));
    }
    // The same of a warp's 16 rows, r and more, whose sums lie where lanes have left them: a lane
    // looks at two columns from top to bottom. `norms`, `best`: of the block's rows of x.
    template <class F>
    static __device__ __forceinline__ void join_whole(
            const Job& o, int r, int to, const float4* sums, const float* own,
            const float* norms, u64* best) {
        const int lane = threadIdx.x % 32;
        const int rows = min(o.n, to) - r;
        if (lane >= 4 * TILES)
            return;
        const float2 norm = ((const float2*)norms)[lane];
        float top[2] = {-3.4028235e38f, -3.4028235e38f};
        float spoilt[2] = {};
        int at[2] = {};
        #pragma unroll
        for (int g = 0; g < 8; g++) {
            const float4 v = sums[lane / 4 * 32 + 4 * g + lane % 4];
            const float2 raw = ((const float2*)own)[g];
            const float2 bias = ((const float2*)(own + 16))[g];
            #pragma unroll
            for (int i = 0; i < 2; i++) {
                if (2 * g + i >= rows)
                    continue;
                const float unit = F::row_scale(
                        (Bytes)(&raw.x + i), &raw.x + i, 0);
                #pragma unroll
                for (int j = 0; j < 2; j++) {
                    const float sum = (&v.x)[2 * i + j];
                    float z = fmaf(
                            __fmul_rn(sum, (&norm.x)[j]), unit, (&bias.x)[i]);
                    if (CAP)
                        z = __fmul_rn(o.cap, tanhf(z / o.cap));
                    spoilt[j] = fmaf(z, 0.f, spoilt[j]);
                    if (z > top[j])
                        at[j] = 2 * g + i;
                    top[j] = fmaxf(top[j], z);
                }
            }
        }
        #pragma unroll
        for (int j = 0; j < 2; j++) {
            const unsigned key = spoilt[j] == 0.f ? float_key(top[j]) : ~0u;
            u64* const own_best = best + 2 * lane + j;
            *own_best = max(*own_best, keyed(key, r + at[j]));
        }
    }
    // `best`: the warp's, of each row of x that the block has
    template <class F>
    __device__ __forceinline__ void end(
            const Job& o, int to, const float* sums, u64* best) {
        float2 all[2];
        #pragma unroll
        for (int i = 0; i < 2; i++) {
            const float unit = F::row_scale((Bytes)(raw + i), raw + i, 0);
            float v[2];
            #pragma unroll
            for (int j = 0; j < 2; j++)
                v[j] = fmaf(
                        __fmul_rn(sums[2 * i + j], inverse[j]), unit, bias[i]);
            if (PAIR) {
                const float got = __shfl_xor_sync(~0u, odd() ? v[0] : v[1], 4);
                (&all[0].x)[i] = made(
                        o, i, 0, odd() ? got : v[0], odd() ? v[1] : got);
            } else
                #pragma unroll
                for (int j = 0; j < 2; j++)
                    (&all[j].x)[i] = made(o, i, j, v[j], v[j]);
        }
        if (BEST)
            join(o, to, all, best);
        #pragma unroll
        for (int j = 0; j < (PAIR ? 1 : 2) && !BEST; j++)
            put(o, to, j, all[j]);
    }
};

// d[..][j] += the i-th quarter of a block of W times that of a tile of x.
template <class F, int MANY, int N>
__device__ __forceinline__ void multiply(
        float (*d)[N][2][4], int j, const unsigned (*a)[F::LENGTH],
        const unsigned char* x, int b, int i) {
    const uint4* const from = (const uint4*)(x + b * Tile<F>::BLOCK)
            + threadIdx.x % 32;
    const uint4 v = from[32 * i];
    const uint4 low = F::TWO ? from[128 + 32 * i] : v;
    #pragma unroll
    for (int s = 0; s < MANY; s++)
        F::times(d[s][j], a[s], v, low);
}
// acc[..][j] += d[..][at], times what tile j of x is to be multiplied by.
template <class F, int MANY, int N>
__device__ __forceinline__ void fold_tile(
        const F* q, float (*acc)[TILES][4], float (*d)[N][2][4], int j, int at,
        const unsigned char* x, int b) {
    const unsigned char* const scales = x + j * Tile<F>::BYTES + Tile<F>::SCALES;
    float2 f = make_float2(1.f, 1.f);
    if (!F::TWO)
        f = *((const float2*)scales + 4 * b + threadIdx.x % 4);
    #pragma unroll
    for (int s = 0; s < MANY; s++)
        fold(q[s], acc[s][j], d[s][at], f);
}

// acc += 128 columns of STRIPS times 16 rows of W, times those of eights of rows of x.
template <class F, int MANY>
__device__ __forceinline__ void add(
        float (*acc)[TILES][4], const unsigned char* at, const unsigned char* x,
        int b) {
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int t = lane % 4;
    F q[MANY];
    typename F::Aids aids[MANY];
    #pragma unroll
    for (int s = 0; s < MANY; s++) {
        q[s].read(at + s * F::BYTES, b, g, t);
        q[s].aids(aids[s]);
    }
    if constexpr (TILES > 4) {
        // Only a few tiles at a time have room for their sums: what is decoded is kept for all of
        // them, unless it is little more than what was read.
        constexpr bool KEPT = !F::TWO;
        unsigned a[KEPT ? 4 : 1][MANY][F::LENGTH];
        auto decode = [&](int i) {
            #pragma unroll
            for (int s = 0; s < MANY; s++)
                q[s].piece(aids[s], i, a[KEPT ? i : 0][s]);
        };
        #pragma unroll
        for (int i = 0; i < 4 && KEPT; i++)
            decode(i);
        #pragma unroll
        for (int first = 0; first < TILES; first += AT_ONCE) {
            float d[MANY][AT_ONCE][2][4] = {};
            #pragma unroll
            for (int i = 0; i < 4; i++) {
                if (!KEPT)
                    decode(i);
                #pragma unroll
                for (int j = first; j < first + AT_ONCE && j < TILES; j++)
                    multiply<F, MANY>(
                            d, j - first, a[KEPT ? i : 0], x + j * Tile<F>::BYTES,
                            b, i);
            }
            #pragma unroll
            for (int j = first; j < first + AT_ONCE && j < TILES; j++)
                fold_tile<F, MANY>(q, acc, d, j, j - first, x, b);
        }
        return;
    } else {
        float d[MANY][TILES][2][4] = {};
        #pragma unroll
        for (int i = 0; i < 4; i++) {
            unsigned a[MANY][F::LENGTH];
            #pragma unroll
            for (int s = 0; s < MANY; s++)
                q[s].piece(aids[s], i, a[s]);
            #pragma unroll
            for (int j = 0; j < TILES; j++)
                multiply<F, MANY>(d, j, a, x + j * Tile<F>::BYTES, b, i);
        }
        #pragma unroll
        for (int j = 0; j < TILES; j++)
            fold_tile<F, MANY>(q, acc, d, j, j, x, b);
    }
}

// The same of sixteen rows in each of four warps, whose products are asked for together. While they
// run, there is time for what `meanwhile` does.
template <class F, bool SOON, class M>
__device__ __forceinline__ void add_together(
        float (*acc)[4], const unsigned char* at, const unsigned char* x,
        WgmmaMatrix from, int b, M& meanwhile) {
    typedef Tile<F, true> T;
    const int lane = threadIdx.x % 32;
    F q;
    typename F::Aids aids;
    q.read(at, b, lane / 4, lane % 4);
    q.aids(aids);
    unsigned a[4][F::LENGTH];
    float d[2][4 * TILES];
    if (SOON)
        from += b * (T::BLOCK / 16);
    else
        from = wgmma_cores(x + b * T::BLOCK, T::BYTES);
    #pragma unroll
    for (int i = 0; i < 4; i++)
        q.piece(aids, i, a[i]);
    wgmma_fence();
    #pragma unroll
    for (int i = 0; i < 8; i++)
        wgmma<8 * TILES, false>(
                d[i % 2], a[i / 2] + i % 2 * 4, from + 16 * i, i > 1);
    wgmma_commit();
    if (SOON)
        meanwhile();
    wgmma_wait<0>();
    wgmma_own(d[0]);
    wgmma_own(d[1]);
    #pragma unroll
    for (int j = 0; j < TILES; j++) {
        const float *const p = d[0] + 4 * j, *const r = d[1] + 4 * j;
        const float pair[2][4] = {
                {p[0], p[1], p[2], p[3]}, {r[0], r[1], r[2], r[3]}};
        const unsigned char* const scales = x + j * T::BYTES + T::SCALES;
        fold(q, acc[j], pair, *((const float2*)scales + 4 * b + lane % 4));
    }
}

// What results of the block's rows of x are to be multiplied by, into shared memory.
__device__ __forceinline__ void put_norms(const Job& o, float* own, int lane) {
    for (int i = lane; i < 8 * TILES; i += 32) {
        const int c = o.first * 8 + i;
        own[32 + i] = NORM == 1 && c < o.rows ? o.inverse[c] : 1.f;
    }
}

// What belongs to 16 rows of W from r on, if they are below `to`: half of the lanes have their
// scales, the others their biases.
template <class F>
__device__ __forceinline__ float of_rows(const Job& o, int r, int to, int lane) {
    const int at = r + lane % 16;
    if (lane < 16)
        return at < to ? F::row_raw(o.s, o.gs, at) : 0.f;
    return Finish::biased(o, at, to) ? o.bias[at] : 0.f;
}

// A warp's sums of its share, for those that have other shares of the same rows.
template <int QUADS>
__device__ __forceinline__ void put_sums(
        const float (*acc)[TILES][4], float4* sums, bool here) {
    #pragma unroll
    for (int i = 0; i < QUADS; i++) {
        const float* v = acc[i / TILES][i % TILES];
        if (here)
            sums[i * 32] = make_float4(v[0], v[1], v[2], v[3]);
    }
}

// Sums of PER shares, which lie FAR apart, join `total`: a warp has every PER-th of its QUADS.
template <int OWN, int PER, int QUADS, int FAR>
__device__ __forceinline__ void take_sums(
        float (*total)[4], const float4* sums, bool here, int h) {
    #pragma unroll
    for (int i = 0; i < OWN; i++)
        #pragma unroll
        for (int j = 0; j < PER; j++) {
            if (!here || i * PER + h >= QUADS)
                continue;
            const float4 v = sums[((j - h) * FAR + i * PER + h) * 32];
            total[i][0] += v.x;
            total[i][1] += v.y;
            total[i][2] += v.z;
            total[i][3] += v.w;
        }
}

// Of each row of x the key of the largest that WARPS warps have made.
template <int WARPS>
__device__ __forceinline__ void put_best(const Job& o, const u64* bests) {
    for (int i = threadIdx.x; i < 8 * TILES; i += 32 * WARPS) {
        u64 key = 0;
        #pragma unroll 4
        for (int w = 0; w < WARPS; w++)
            key = max(key, bests[w * 8 * TILES + i]);
        const int row = o.first * 8 + i;
        if (row < o.rows)
            o.best[(size_t)row * o.step + o.group] = key;
    }
}

// Scales and biases of rows of W of the first group are asked for, for the quads that a warp ends.
template <class F, int OWN, int PER, int QUADS>
__device__ __forceinline__ void ask_weights(
        Finish* finish, const Job& o, bool here, int strip, int n4, int h,
        int g) {
    #pragma unroll
    for (int i = 0; i < OWN; i++) {
        const int from = o.group * o.span, q = i * PER + h;
        if (here && q < QUADS)
            finish[i].template weights<F>(
                    o, from + strip + q / TILES * 16 + 2 * g,
                    min(from + o.span, n4));
    }
}

// The sums of a share join those of the ones before it, in registers.
template <int OWN, int QUADS>
__device__ __forceinline__ void add_sums(
        float (*total)[4], const float (*acc)[TILES][4]) {
    #pragma unroll
    for (int i = 0; i < 4 * QUADS; i++)
        total[i / 4 % OWN][i % 4] += acc[i / 4 / TILES][i / 4 % TILES][i % 4];
}

// acc += a unit of W times that of x, block after block.
template <class F, int MANY, bool TOGETHER, bool SOON, int AT_A_TIME, class M>
__device__ __forceinline__ void add_unit(
        float (*acc)[TILES][4], const unsigned char* at, const unsigned char* x,
        WgmmaMatrix from, int& b, M& meanwhile) {
    #pragma unroll AT_A_TIME
    for (b = 0; b < F::UNITS; b++)
        if constexpr (TOGETHER)
            add_together<F, SOON>(acc[0], at, x, from, b, meanwhile);
        else
            add<F, MANY>(acc, at, x, b);
}

// Unit `unit` of MANY times 16 rows of W, of which `rows` are there, is asked for.
template <class F, int MANY>
__device__ __forceinline__ void fetch_unit(
        unsigned char* to, const unsigned char* w, const unsigned char* s,
        int rows, int unit, int lane) {
    #pragma unroll
    for (int i = 0; i < MANY; i++)
        F::fetch(
                to + i * F::BYTES, w + (size_t)(16 * i) * F::LINE,
                s + (size_t)(4 * i) * F::SLINE, rows - 16 * i, unit, lane);
}

// Barriers of ROOM pieces of x: one for each that is there, and one for each that is read, by the
// warps that have some of the `span` rows of a group, NEAR of which have ROWS together.
template <int ROOM, int BESIDE, int ROWS, int NEAR>
__device__ __forceinline__ void init_meetings(
        Meeting* full, Meeting* empty, int span) {
    for (int i = 0; i < ROOM; i++) {
        meet_init(full + i, 1);
        meet_init(empty + i, min(BESIDE, (span + ROWS - 1) / ROWS * NEAR));
    }
    meet_ready();
}

// The block's groups of rows of one matrix: MANY times 16 rows a warp, BESIDE warps, PER of them
// to each; ROOM pieces of x for each share, and PLACES places of a warp for weights on their way.
template <
        class F, int SHARES, int MANY, int BESIDE, int PER, int PLACES, int ROOM,
        bool TOGETHER>
__device__ __forceinline__ void matrix(const Job& o, unsigned char* shared) {
    constexpr int N = (B + F::UNITS - 1) / F::UNITS;
    constexpr int PASSES = SHARES / PER;
    constexpr int QUADS = MANY * TILES;
    // Sums of many tiles have no registers to wait in until all shares are added up.
    constexpr bool STASH = PER == 1 && TILES > 4;
    constexpr int OWN = STASH ? 4 : (QUADS + PER - 1) / PER;
    constexpr int TILE = Tile<F, TOGETHER>::BYTES, PIECE = TILES * TILE;
    constexpr int UNIT = MANY * F::BYTES;
    constexpr bool ALL = ROOM >= (N + PER - 1) / PER;
    // Have a lane's ends registers while all is added up? Then nobody waits for what they need.
    constexpr bool EARLY = !TOGETHER
            && OWN <= (DOWN * ALONG > (PER > 1 ? 12 : 8) ? 1 : 2);
    // for what belongs to rows of W they have
    constexpr bool HALF = PER == 1 && !EARLY && !TOGETHER;
    // Is a piece asked for only when the next one is multiplied? Nobody has to be waited for then.
    constexpr bool LATE = ROOM > 2;
    static_assert(SHARES % PER == 0, "see the contract");
    const int lane = threadIdx.x % 32;
    const int g = lane / 4;
    const int t = lane % 4;
    // warps that follow each other and have the same share
    constexpr int NEAR = TOGETHER ? 4 : 1;
    const int warp = threadIdx.x / 32, h = warp / NEAR % PER;
    const int down = warp / (NEAR * PER) * NEAR + warp % NEAR;
    const int n4 = (o.n + 3) / 4 * 4;
    const int groups = (n4 + o.span - 1) / o.span;
    const int strip = down * MANY * 16;  // the warp's first row of a group
    const bool here = down < BESIDE && down / NEAR * NEAR * MANY * 16 < o.span;
    const bool works = here && h < N;
    const int rounds = (groups - o.group + o.step - 1) / o.step;
    const int mine = (N - h + PER - 1) / PER;
    unsigned char* const xs = shared + h * ROOM * PIECE;
    unsigned char* const ring = shared + PER * ROOM * PIECE
            + (down < BESIDE ? warp : 0) * PLACES * UNIT;
    float4* const part = (float4*)(shared + PER * ROOM * PIECE
            + BESIDE * PER * PLACES * UNIT);
    float4* const sums = part + (here ? warp : 0) * QUADS * 32 + lane;
    Meeting* const full =
            (Meeting*)(part + (PER > 1 || STASH ? BESIDE * PER * QUADS * 32 : 0))
            + h * 2 * ROOM;
    Meeting* const empty = full + ROOM;
    // TOGETHER: scales and biases of the warp's 16 rows of W, and the norms of the block's of x
    float* const own = (float*)(full - h * 2 * ROOM + PER * 2 * ROOM)
            + warp * (32 + 8 * TILES);
    // BEST: the largest of each row of x, of what each warp has made
    u64* const bests = (u64*)((float*)(full - h * 2 * ROOM + PER * 2 * ROOM)
            + (TOGETHER ? BESIDE * PER * (32 + 8 * TILES) : 0));
    u64* const best = bests + warp * 8 * TILES;
    for (int i = lane; BEST && i < 8 * TILES; i += 32)
        best[i] = 0;
    typedef Walk<N, SHARES, PER> Units;
    Units next = {h, 0}, wanted = {h, 0};  // weights, and x, to be fetched next
    int left = works ? rounds * mine : 0;
    int rest = n4 - o.group * o.span - strip;
    // where the lane's part of unit 0 of those rows is
    const unsigned char *w = o.w, *s = o.s;
    F::first(w, s, n4 - rest, 0, lane);
    auto fetch = [&](unsigned char* to) {
        const unsigned char* p = w + next.unit * F::LB;
        const unsigned char* q = s + next.unit * F::SB;
        const int rows = min(rest, o.span - strip);
        fetch_unit<F, MANY>(to, p, q, rows, next.unit, lane);
        left--;
        if (!next.next(h))
            return;
        rest -= o.step * o.span;
        w += (size_t)(o.step * o.span) * F::LINE;
        s += (size_t)(o.step * o.span / 4) * F::SLINE;
    };
    #pragma unroll 1
    for (int i = 0; i < PLACES; i++) {
        if (left > 0)
            fetch(ring + i * UNIT);
        cp_async_commit();
    }
    // for x, on behalf of all that have its share
    const bool asks = works && !down && !lane;
    if (asks)
        init_meetings<ROOM, BESIDE, 16 * MANY * NEAR, NEAR>(full, empty, o.span);
    auto ask = [&](int slot) {
        bulk_expect(full + slot, PIECE);
        const size_t tile = (size_t)wanted.unit * o.tiles + o.first;
        bulk_copy(xs + slot * PIECE, o.x + tile * TILE, PIECE, full + slot);
        wanted.next(h);
    };
    int more = asks ? ALL ? mine : rounds * mine : 0;  // pieces to be asked for
    Finish finish[EARLY ? OWN : 1];
    // of the first group: nobody writes them meanwhile
    ask_weights<F, EARLY ? OWN : 0, PER, QUADS>(finish, o, here, strip, n4, h, g);
    pdl_wait();
    #pragma unroll 1
    for (int i = 0; i < ROOM && more > 0; i++, more--)
        ask(i);
    if (TOGETHER)
        put_norms(o, own, lane);
    __syncthreads();  // the barriers are there

    // which piece is to be asked for next, and where
    int spot = 0, slot = 0, free = -1;
    unsigned phase = 0;
    #pragma unroll 1
    for (int group = o.group; group < groups; group += o.step) {
        const int to = min(group * o.span + o.span, n4);
        float total[OWN][4] = {};
        Finish strips[HALF ? MANY : 1];
        #pragma unroll
        for (int i = 0; HALF && i < MANY; i++)
            strips[i].template weights<F>(
                    o, group * o.span + strip + 16 * i + 2 * g, here ? to : 0);
        float later = 0.f;  // what the lane has for `own`: not waited for yet
        if (TOGETHER && here)
            later = of_rows<F>(o, group * o.span + strip, to, lane);
        auto prepare = [&](Finish& f, int q, bool known = false) {
            const int r = group * o.span + strip + q / TILES * 16 + 2 * g;
            if (TOGETHER)
                return f.from(o, own, r, q, to, g, t);
            #pragma unroll
            for (int i = 0; HALF && i < 2; i++) {
                f.raw[i] = q < TILES ? strips[0].raw[i] : strips[MANY - 1].raw[i];
                f.bias[i] = q < TILES ? strips[0].bias[i]
                                      : strips[MANY - 1].bias[i];
            }
            if (!known && !HALF)
                f.template weights<F>(o, r, to);
            f.rows(o, r, (o.first + q % TILES) * 8 + 2 * t, to);
        };
        #pragma unroll
        for (int i = 0; EARLY && i < OWN; i++)
            if (here && i * PER + h < QUADS)
                prepare(finish[i], i * PER + h, group == o.group);
        if (ALL)
            slot = 0;
        #pragma unroll 1
        for (int pass = 0; pass < PASSES; pass++) {
            float acc[MANY][TILES][4] = {};
            #pragma unroll 1
            for (int unit = works ? h + pass * PER : N; unit < N;
                    unit += SHARES) {
                const unsigned char* const x = xs + slot * PIECE;
                // Are there registers to fill a unit's place again while its last block is
                // multiplied?
                constexpr bool SOON = TOGETHER && BESIDE * PER <= 12
                        && TILES <= 4;
                WgmmaMatrix from = 0;
                if (SOON)
                    from = wgmma_cores(x, TILE);
                cp_async_wait<PLACES - 1>();
                __syncwarp();
                meet_wait(full + slot, phase);
                int b = 0;
                auto refill = [&]() {
                    if (b != F::UNITS - 1)
                        return;
                    __syncwarp();
                    if (left > 0)
                        fetch(ring + spot);
                    cp_async_commit();
                };
                constexpr int AT_A_TIME =
                        !SOON && (QUADS > 2 || BESIDE * PER > 12) ? 1 : F::UNITS;
                add_unit<F, MANY, TOGETHER, SOON, AT_A_TIME>(
                        acc, ring + spot, x, from, b, refill);
                b = F::UNITS - 1;
                if (SOON)
                    __syncwarp();  // all have read what belongs to the piece of x
                else
                    refill();
                spot = spot == (PLACES - 1) * UNIT ? 0 : spot + UNIT;
                if (!ALL && !lane)
                    meet_arrive(empty + slot);
                if (!LATE)
                    free = slot;
                if (!ALL && more > 0 && free >= 0) {
                    meet_wait(empty + free, free > slot ? phase ^ 1 : phase);
                    ask(free);
                    more--;
                }
                free = slot;
                __syncwarp();
                if (++slot == ROOM && !ALL) {
                    slot = 0;
                    phase ^= 1;
                }
            }
            if (STASH) {
                #pragma unroll
                for (int i = 0; i < QUADS; i++) {
                    const float* v = acc[i / TILES][i % TILES];
                    float4 z = make_float4(0.f, 0.f, 0.f, 0.f);
                    if (!here)
                        continue;
                    if (pass)
                        z = sums[i * 32];
                    sums[i * 32] = make_float4(
                            z.x + v[0], z.y + v[1], z.z + v[2], z.w + v[3]);
                }
                continue;
            }
            if (PER == 1) {
                add_sums<OWN, QUADS>(total, acc);
                continue;
            }
            if (pass || group != o.group)
                __syncthreads();  // all have read the last ones
            put_sums<QUADS>(acc, sums, here);
            __syncthreads();
            take_sums<OWN, PER, QUADS, NEAR * QUADS>(total, sums, here, h);
        }
        if (TOGETHER) {
            __syncwarp();
            own[lane] = later;
            __syncwarp();
        }
        constexpr bool WHOLE = BEST && STASH && TOGETHER;
        if (WHOLE && here)
            Finish::join_whole<F>(
                    o, group * o.span + strip, to, sums - lane, own, own + 32,
                    best);
        #pragma unroll 1
        for (int first = 0; STASH && !WHOLE && here && first < QUADS;
                first += OWN) {
            Finish ends[OWN];  // what they need is asked for at once
            #pragma unroll
            for (int i = 0; i < OWN; i++)
                prepare(ends[i], min(first + i, QUADS - 1));
            #pragma unroll
            for (int i = 0; i < OWN; i++) {
                if (first + i >= QUADS)
                    continue;
                const float4 v = sums[(first + i) * 32];
                const float all[4] = {v.x, v.y, v.z, v.w};
                ends[i].template end<F>(o, to, all, best);
            }
        }
        #pragma unroll
        for (int i = 0; i < OWN && !STASH; i++) {
            const int q = i * PER + h;
            if (!here || q >= QUADS)
                continue;
            if (!EARLY)
                prepare(finish[0], q);
            finish[EARLY ? i : 0].template end<F>(o, to, total[i], best);
        }
    }
    if (!BEST)
        return;
    __syncthreads();
    put_best<BESIDE * PER>(o, bests);
}

extern "C" __global__ void __launch_bounds__(32 * DOWN * ALONG, 1) gemv_wide(
        const unsigned char* __restrict__ w, const unsigned char* __restrict__ s,
        const float* __restrict__ gs, const unsigned char* __restrict__ extra,
        const unsigned char* halves, const unsigned char* more,
        const float* inverse, const float* __restrict__ bias, const float* gate,
        const float* add, float* y, long long* best, float limit, float cap,
        int rows, int n, int m, int ld, int column, int width, int main, int span,
        int tiles) {
    DYNAMIC_SHARED(unsigned char, shared);
    pdl_trigger();
    Job o = {w, s, halves, gs, inverse, bias, gate ? gate + column : nullptr, add,
            y, best, limit, cap, rows, n, ld, 0, width, span, (int)blockIdx.x,
            main, tiles, (int)blockIdx.y * TILES};
#ifdef EXTRA
    if ((int)blockIdx.x >= main) {
        o.w = extra;
        o.s = nullptr;
        o.x = more;
        o.n = m;
        o.at = n;
        o.span = 16 * EDOWN;
        o.group = blockIdx.x - main;
        o.step = gridDim.x - main;
        if (bias)
            o.bias = bias + n;
        if (NORM == 1)
            o.inverse = inverse + rows;
        matrix<EXTRA<C>, ESPLIT, 1, EDOWN, EALONG, EDEEP, EHELD, false>(
                o, shared);
        return;
    }
#endif
    matrix<FORMAT<C>, SPLIT, STRIPS, DOWN, ALONG, DEEP, HELD, CORES>(o, shared);
}
