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
        if (!(lane & 12)) {
            const int at = out + (first / 4 - lane / 4) * 2 + odd;
            *own = max(*own, keyed(key, at));
        }
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
    const unsigned char* const tile = x + j * Tile<F>::BYTES;
    const int own = 4 * b + threadIdx.x % 4;
    float2 f = make_float2(1.f, 1.f);
    if (!F::TWO)
        f = ((const float2*)(tile + Tile<F>::SCALES))[own];
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
        class F_, int SHARES_, int MANY_, int BESIDE_, int PER_, int PLACES_,
        int ROOM_, bool TOGETHER_>
struct Plan {
    typedef F_ F;
    static constexpr int SHARES = SHARES_, MANY = MANY_, BESIDE = BESIDE_;
    static constexpr int PER = PER_, PLACES = PLACES_, ROOM = ROOM_;
    static constexpr bool TOGETHER = TOGETHER_;
    static constexpr int N = (B + F::UNITS - 1) / F::UNITS;
    static constexpr int PASSES = SHARES / PER;
    static constexpr int QUADS = MANY * TILES;
    // Sums of many tiles have no registers to wait in until all shares are added up.
    static constexpr bool STASH = PER == 1 && TILES > 4;
    static constexpr int OWN = STASH ? 4 : (QUADS + PER - 1) / PER;
    static constexpr int TILE = Tile<F, TOGETHER>::BYTES;
    static constexpr int PIECE = TILES * TILE;
    static constexpr int UNIT = MANY * F::BYTES;
    static constexpr bool ALL = ROOM >= (N + PER - 1) / PER;
    // Have a lane's ends registers while all is added up? Then nobody waits for what they need.
    static constexpr bool EARLY = !TOGETHER
            && OWN <= (DOWN * ALONG > (PER > 1 ? 12 : 8) ? 1 : 2);
    // for what belongs to rows of W they have
    static constexpr bool HALF = PER == 1 && !EARLY && !TOGETHER;
    // Is a piece asked for only when the next one is multiplied? Nobody has to be waited for then.
    static constexpr bool LATE = ROOM > 2;
    // Are there registers to fill a unit's place again while its last block is multiplied?
    static constexpr bool SOON = TOGETHER && BESIDE * PER <= 12 && TILES <= 4;
    // blocks of a unit that are written out
    static constexpr int AT_A_TIME = !SOON && (QUADS > 2 || BESIDE * PER > 12)
            ? 1
            : F::UNITS;
    static constexpr bool WHOLE = BEST && STASH && TOGETHER;
    // warps that follow each other and have the same share
    static constexpr int NEAR = TOGETHER ? 4 : 1;
    static_assert(SHARES % PER == 0, "see the contract");
};

// Who a warp is, and where it keeps what.
template <class P> struct Warp {
    int lane, g, t;
    int warp, h, down;  // h: its share; down: which of those beside each other
    int n4, groups, strip;  // strip: the warp's first row of a group
    bool here, works;
    int rounds, mine;
    unsigned char *xs, *ring;
    float4 *part, *sums;
    Meeting *full, *empty;
    // TOGETHER: scales and biases of the warp's 16 rows of W, and the norms of the block's of x
    float* own;
    // BEST: the largest of each row of x, of what each warp has made
    u64 *bests, *best;
    __device__ __forceinline__ Warp(const Job& o, unsigned char* shared) {
        lane = threadIdx.x % 32;
        g = lane / 4;
        t = lane % 4;
        warp = threadIdx.x / 32;
        h = warp / P::NEAR % P::PER;
        down = warp / (P::NEAR * P::PER) * P::NEAR + warp % P::NEAR;
        n4 = (o.n + 3) / 4 * 4;
        groups = (n4 + o.span - 1) / o.span;
        strip = down * P::MANY * 16;
        const int near = down / P::NEAR * P::NEAR;
        here = down < P::BESIDE && near * P::MANY * 16 < o.span;
        works = here && h < P::N;
        rounds = (groups - o.group + o.step - 1) / o.step;
        mine = (P::N - h + P::PER - 1) / P::PER;
        xs = shared + h * P::ROOM * P::PIECE;
        ring = shared + P::PER * P::ROOM * P::PIECE
                + (down < P::BESIDE ? warp : 0) * P::PLACES * P::UNIT;
        part = (float4*)(shared + P::PER * P::ROOM * P::PIECE
                + P::BESIDE * P::PER * P::PLACES * P::UNIT);
        sums = part + (here ? warp : 0) * P::QUADS * 32 + lane;
        constexpr int SUMS = P::PER > 1 || P::STASH
                ? P::BESIDE * P::PER * P::QUADS * 32
                : 0;
        full = (Meeting*)(part + SUMS) + h * 2 * P::ROOM;
        empty = full + P::ROOM;
        float* const after = (float*)(full - h * 2 * P::ROOM
                + P::PER * 2 * P::ROOM);
        own = after + warp * (32 + 8 * TILES);
        constexpr int OWNS = P::BESIDE * P::PER * (32 + 8 * TILES);
        bests = (u64*)(after + (P::TOGETHER ? OWNS : 0));
        best = bests + warp * 8 * TILES;
    }
};

// What a warp fetches next: units of weights.
template <class P> struct Weights {
    typedef Walk<P::N, P::SHARES, P::PER> Units;
    typedef typename P::F F;
    Units next;
    int left, rest;
    // where the lane's part of unit 0 of those rows is
    const unsigned char *w, *s;
    __device__ __forceinline__ Weights(const Job& o, const Warp<P>& a)
        : next{a.h, 0} {
        left = a.works ? a.rounds * a.mine : 0;
        rest = a.n4 - o.group * o.span - a.strip;
        w = o.w;
        s = o.s;
        F::first(w, s, a.n4 - rest, 0, a.lane);
    }
    __device__ __forceinline__ void fetch(
            const Job& o, const Warp<P>& a, unsigned char* to) {
        const unsigned char* p = w + next.unit * F::LB;
        const unsigned char* q = s + next.unit * F::SB;
        const int rows = min(rest, o.span - a.strip);
        fetch_unit<F, P::MANY>(to, p, q, rows, next.unit, a.lane);
        left--;
        if (!next.next(a.h))
            return;
        const int rows_on = o.step * o.span;
        rest -= rows_on;
        w += (size_t)rows_on * F::LINE;
        s += (size_t)(rows_on / 4) * F::SLINE;
    }
};

// And, on behalf of all that have its share, pieces of x: one thread asks for them.
template <class P> struct Pieces {
    typedef Walk<P::N, P::SHARES, P::PER> Units;
    Units wanted;
    int more;  // to be asked for
    // which piece is multiplied next, and which is asked for
    int slot = 0, free = -1;
    unsigned phase = 0;
    __device__ __forceinline__ Pieces(const Warp<P>& a, bool asks)
        : wanted{a.h, 0} {
        more = asks ? P::ALL ? a.mine : a.rounds * a.mine : 0;
    }
    __device__ __forceinline__ void ask(
            const Job& o, const Warp<P>& a, int slot) {
        bulk_expect(a.full + slot, P::PIECE);
        const size_t tile = (size_t)wanted.unit * o.tiles + o.first;
        bulk_copy(
                a.xs + slot * P::PIECE, o.x + tile * P::TILE, P::PIECE,
                a.full + slot);
        wanted.next(a.h);
    }
    // The piece has been read: another one may be asked for.
    __device__ __forceinline__ void leave(const Job& o, const Warp<P>& a) {
        if (!P::ALL && !a.lane)
            meet_arrive(a.empty + slot);
        if (!P::LATE)
            free = slot;
        if (!P::ALL && more > 0 && free >= 0) {
            meet_wait(a.empty + free, free > slot ? phase ^ 1 : phase);
            ask(o, a, free);
            more--;
        }
        free = slot;
        __syncwarp();
        if (++slot == P::ROOM && !P::ALL) {
            slot = 0;
            phase ^= 1;
        }
    }
};

// acc += a unit of W times that of x. Its place gets another one when its last block is, or soon
// will be, multiplied.
template <class P>
__device__ __forceinline__ void take_unit(
        const Job& o, const Warp<P>& a, Weights<P>& weights, Pieces<P>& pieces,
        int& spot, float (*acc)[TILES][4]) {
    typedef typename P::F F;
    const unsigned char* const x = a.xs + pieces.slot * P::PIECE;
    WgmmaMatrix from = 0;
    if (P::SOON)
        from = wgmma_cores(x, P::TILE);
    cp_async_wait<P::PLACES - 1>();
    __syncwarp();
    meet_wait(a.full + pieces.slot, pieces.phase);
    int b = 0;
    auto refill = [&]() {
        if (b != F::UNITS - 1)
            return;
        __syncwarp();
        if (weights.left > 0)
            weights.fetch(o, a, a.ring + spot);
        cp_async_commit();
    };
    add_unit<F, P::MANY, P::TOGETHER, P::SOON, P::AT_A_TIME>(
            acc, a.ring + spot, x, from, b, refill);
    b = F::UNITS - 1;
    if (P::SOON)
        __syncwarp();  // all have read what belongs to the piece of x
    else
        refill();
    const int last = (P::PLACES - 1) * P::UNIT;
    spot = spot == last ? 0 : spot + P::UNIT;
    pieces.leave(o, a);
}

// A share's sums join those of the ones before it, in shared memory.
template <int QUADS>
__device__ __forceinline__ void stash_sums(
        const float (*acc)[TILES][4], float4* sums, bool here, bool first) {
    #pragma unroll
    for (int i = 0; i < QUADS; i++) {
        const float* v = acc[i / TILES][i % TILES];
        float4 z = make_float4(0.f, 0.f, 0.f, 0.f);
        if (!here)
            continue;
        if (!first)
            z = sums[i * 32];
        sums[i * 32] = make_float4(
                z.x + v[0], z.y + v[1], z.z + v[2], z.w + v[3]);
    }
}

// A pass's sums join `total`, or what is stashed.
template <class P>
__device__ __forceinline__ void join_sums(
        const Warp<P>& a, const float (*acc)[TILES][4], float (&total)[P::OWN][4],
        int pass, bool again) {
    if (P::STASH) {
        stash_sums<P::QUADS>(acc, a.sums, a.here, !pass);
        return;
    }
    if (P::PER == 1) {
        add_sums<P::OWN, P::QUADS>(total, acc);
        return;
    }
    if (pass || again)
        __syncthreads();  // all have read the last ones
    put_sums<P::QUADS>(acc, a.sums, a.here);
    __syncthreads();
    take_sums<P::OWN, P::PER, P::QUADS, P::NEAR * P::QUADS>(
            total, a.sums, a.here, a.h);
}

// All that quad q of a group needs, whose rows end at `to`. `known`: of rows of W it is there.
template <class P>
__device__ __forceinline__ void prepare(
        const Job& o, const Warp<P>& a, Finish& f, const Finish* strips,
        int group, int to, int q, bool known = false) {
    typedef typename P::F F;
    const int r = group * o.span + a.strip + q / TILES * 16 + 2 * a.g;
    if (P::TOGETHER)
        return f.from(o, a.own, r, q, to, a.g, a.t);
    #pragma unroll
    for (int i = 0; P::HALF && i < 2; i++) {
        const int last = P::MANY - 1;
        f.raw[i] = q < TILES ? strips[0].raw[i] : strips[last].raw[i];
        f.bias[i] = q < TILES ? strips[0].bias[i] : strips[last].bias[i];
    }
    if (!known && !P::HALF)
        f.template weights<F>(o, r, to);
    f.rows(o, r, (o.first + q % TILES) * 8 + 2 * a.t, to);
}

// Results of a group from what is stashed.
template <class P>
__device__ __forceinline__ void end_stashed(
        const Job& o, const Warp<P>& a, const Finish* strips, int group, int to) {
    typedef typename P::F F;
    if (P::WHOLE && a.here)
        Finish::join_whole<F>(
                o, group * o.span + a.strip, to, a.sums - a.lane, a.own,
                a.own + 32, a.best);
    #pragma unroll 1
    for (int first = 0; P::STASH && !P::WHOLE && a.here && first < P::QUADS;
            first += P::OWN) {
        Finish ends[P::OWN];  // what they need is asked for at once
        #pragma unroll
        for (int i = 0; i < P::OWN; i++)
            prepare(o, a, ends[i], strips, group, to,
                    min(first + i, P::QUADS - 1));
        #pragma unroll
        for (int i = 0; i < P::OWN; i++) {
            if (first + i >= P::QUADS)
                continue;
            const float4 v = a.sums[(first + i) * 32];
            const float all[4] = {v.x, v.y, v.z, v.w};
            ends[i].template end<F>(o, to, all, a.best);
        }
    }
}

// And from sums in registers.
template <class P>
__device__ __forceinline__ void end_sums(
        const Job& o, const Warp<P>& a, Finish* finish, const Finish* strips,
        const float (&total)[P::OWN][4], int group, int to) {
    #pragma unroll
    for (int i = 0; i < P::OWN && !P::STASH; i++) {
        const int q = i * P::PER + a.h;
        if (!a.here || q >= P::QUADS)
            continue;
        if (!P::EARLY)
            prepare(o, a, finish[0], strips, group, to, q);
        finish[P::EARLY ? i : 0].template end<typename P::F>(
                o, to, total[i], a.best);
    }
}

// One group of rows: passes over the columns, then results.
template <class P>
__device__ __forceinline__ void take_group(
        const Job& o, const Warp<P>& a, Weights<P>& weights, Pieces<P>& pieces,
        int& spot, Finish* finish, int group) {
    typedef typename P::F F;
    const int to = min(group * o.span + o.span, a.n4);
    float total[P::OWN][4] = {};
    Finish strips[P::HALF ? P::MANY : 1];
    #pragma unroll
    for (int i = 0; P::HALF && i < P::MANY; i++)
        strips[i].template weights<F>(
                o, group * o.span + a.strip + 16 * i + 2 * a.g, a.here ? to : 0);
    float later = 0.f;  // what the lane has for `own`: not waited for yet
    if (P::TOGETHER && a.here)
        later = of_rows<F>(o, group * o.span + a.strip, to, a.lane);
    #pragma unroll
    for (int i = 0; P::EARLY && i < P::OWN; i++)
        if (a.here && i * P::PER + a.h < P::QUADS)
            prepare(o, a, finish[i], strips, group, to, i * P::PER + a.h,
                    group == o.group);
    if (P::ALL)
        pieces.slot = 0;
    #pragma unroll 1
    for (int pass = 0; pass < P::PASSES; pass++) {
        float acc[P::MANY][TILES][4] = {};
        #pragma unroll 1
        for (int unit = a.works ? a.h + pass * P::PER : P::N; unit < P::N;
                unit += P::SHARES)
            take_unit(o, a, weights, pieces, spot, acc);
        join_sums(a, acc, total, pass, group != o.group);
    }
    if (P::TOGETHER) {
        __syncwarp();
        a.own[a.lane] = later;
        __syncwarp();
    }
    end_stashed(o, a, strips, group, to);
    end_sums(o, a, finish, strips, total, group, to);
}

// All of a block's groups of rows of one matrix.
template <class P>
__device__ __forceinline__ void matrix(const Job& o, unsigned char* shared) {
    typedef typename P::F F;
    const Warp<P> a(o, shared);
    for (int i = a.lane; BEST && i < 8 * TILES; i += 32)
        a.best[i] = 0;
    Weights<P> weights(o, a);
    #pragma unroll 1
    for (int i = 0; i < P::PLACES; i++) {
        if (weights.left > 0)
            weights.fetch(o, a, a.ring + i * P::UNIT);
        cp_async_commit();
    }
    const bool asks = a.works && !a.down && !a.lane;
    if (asks)
        init_meetings<P::ROOM, P::BESIDE, 16 * P::MANY * P::NEAR, P::NEAR>(
                a.full, a.empty, o.span);
    Pieces<P> pieces(a, asks);
    Finish finish[P::EARLY ? P::OWN : 1];
    // of the first group: nobody writes them meanwhile
    ask_weights<F, P::EARLY ? P::OWN : 0, P::PER, P::QUADS>(
            finish, o, a.here, a.strip, a.n4, a.h, a.g);
    pdl_wait();
    #pragma unroll 1
    for (int i = 0; i < P::ROOM && pieces.more > 0; i++, pieces.more--)
        pieces.ask(o, a, i);
    if (P::TOGETHER)
        put_norms(o, a.own, a.lane);
    __syncthreads();  // the barriers are there
    int spot = 0;  // of the unit that is multiplied next, in the ring
    #pragma unroll 1
    for (int group = o.group; group < a.groups; group += o.step)
        take_group(o, a, weights, pieces, spot, finish, group);
    if (!BEST)
        return;
    __syncthreads();
    put_best<P::BESIDE * P::PER>(o, a.bests);
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
        matrix<Plan<EXTRA<C>, ESPLIT, 1, EDOWN, EALONG, EDEEP, EHELD, false>>(
                o, shared);
        return;
    }
#endif
    matrix<Plan<FORMAT<C>, SPLIT, STRIPS, DOWN, ALONG, DEEP, HELD, CORES>>(
            o, shared);
}
