// y = act(W f(x) + bias) * sigmoid(gate) + add: the linear layer of a decode step, for W of every format (lib/fragment.cuh), with the norm before it, the bias, the activation and
// the residual after it folded in. W is read and decoded once for all rows. A warp takes 16 rows of W and every SPLIT-th 128 of their columns; DEEP such
// pieces are on their way to shared memory before it waits for the kernel that makes x, the next ones while it works. A row's bits do not depend on how many rows there are.
//   w     : [n4, w_bytes]          u8    rows padded to a multiple of 4 (Packed.raw)
//   s     : [s_rows, s_bytes]      u8    their scales; or null
//   gs    : [n4]                   f32   nvfp4: scale of each row; or null
//   extra : [m4, extra_bytes]      u8    further rows in the format EXTRA, after the others in y; or null
//   x     : [r, k]                 f32
//   gain  : [k]                    f32   NORM 1; or null
//   parts : [r, heads, p]   f32   NORM 2: sums of squares of each GROUP values of x, in PARTS parts; or null
//   bias  : [biases]               f32   of rows as they are stored, the extra ones too; or null
//   gate  : [r, ld]                f32   the result is multiplied by the sigmoid of its column `column`; or null
//   add   : [r, width]             f32   then added, may be y; or null
//   y     : [r, width]             f32   width = n + m, of gate and up rows n/2
//   -D FORMAT= fragment of W    -D EXTRA= fragment of the extra rows, if any    -D K= columns    -D ROWS= 1, 2, 4 or 8: `rows` is at most that
//   -D NORM=   0: f(x) = x;  1: f(x) = rmsnorm(x, gain);  2: f(x) = x / rms of its group, of GROUP= values in PARTS=
//   -D ACT=    of lib/act.cuh    -D CAP=  1: results are cap * tanh(result / cap)    -D W= SPLIT=  warps of a block, and those that share a row of W
//   -D STAGED= DEEP=  128s of x held at a time, and places of a warp for weights on their way; ESTAGED= EDEEP= ESPLIT= for the extra rows, 16 a block
//   launch: <<<main + ceil(m/16), 32*W, shared bytes: see atlas.cuda.gemv>>>, `main` blocks for W, any number from 1 to ceil(n/(16*W/SPLIT))
#include "lib/fragment.cuh"
#include "lib/act.cuh"
#include "lib/async.cuh"
#include "lib/pdl.cuh"
#include "lib/reduce.cuh"
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
#ifndef ESPLIT
#define ESPLIT W
#endif
#ifndef EDEEP
#define EDEEP 2
#endif
#define THREADS (32 * W)
#ifndef BLOCKS
#define BLOCKS 1
#endif
#define LIMITS 32 * W, BLOCKS
constexpr int C = (K + 31) / 32, B = (C + 3) / 4, SEGMENTS = (K + 255) / 256;  // chunks of 32; blocks of 128; of 256, which a warp stages together
constexpr int SLOTS = SEGMENTS < W ? SEGMENTS : W, TEAMS = W / SLOTS, MINE = (ROWS + TEAMS - 1) / TEAMS;  // warps that stage one row; rows staged at a time; one after another
constexpr bool PAIR = ACT != ACT_NONE && ACT != ACT_RELU2;
static_assert(W % SPLIT == 0 && STAGED % 2 == 0 && ESTAGED % 2 == 0, "see the contract");

struct Job {  // one matrix
    const unsigned char *w, *s;
    const float *gs, *x, *gain, *parts, *bias, *gate, *add;
    float* y;
    float eps, limit, cap;
    int rows, n, ld, at, width, group, step;  // `at`: where its outputs begin; `group`, `step`: which tiles this block computes
};

__device__ __forceinline__ void load_x(const float* p, int v, float* a) {  // eights of a row, zeros beyond its end
    if (K % 8 == 0) {
        if (v < K / 8) load8(p + v * 8, a);
        else for (int i = 0; i < 8; i++) a[i] = 0.f;
    } else
        for (int i = 0; i < 8; i++) a[i] = v * 8 + i < K ? p[v * 8 + i] : 0.f;
}

// x of 128s [first, first + HELD) into shared memory, for fragment F.
template <class F, int HELD> __device__ __forceinline__ void stage(const Job& o, int first, const float* g0, float* sums, uint4* xs, float* es) {
    using S = Staged<F, 4 * HELD>;
    const int lane = threadIdx.x % 32, slot = threadIdx.x / 32 % SLOTS, team = threadIdx.x / 32 / SLOTS, low = first / 2, high = min(SEGMENTS, low + HELD / 2);
    if (team >= TEAMS) return;
    for (int seg = low <= slot ? slot : slot + (low - slot + SLOTS - 1) / SLOTS * SLOTS; seg < high; seg += SLOTS) {
        const int v = seg * 32 + lane, c = v / 4 - 4 * first;
        float g[8];
        if (NORM == 1) {
            if (seg == slot) for (int i = 0; i < 8; i++) g[i] = g0[i];
            else load_x(o.gain, v, g);
        }
        #pragma unroll
        for (int i = 0; i < MINE; i++) {
            const int t = team + i * TEAMS, r = min(t, o.rows - 1);  // rows that are not there: the last one again
            float a[8];
            load_x(o.x + (size_t)r * K, v, a);
            if (NORM == 1) {
                #pragma unroll
                for (int j = 0; j < 8; j++) { sums[i] = fmaf(a[j], a[j], sums[i]); a[j] = __fmul_rn(a[j], g[j]); }
            }
            if (NORM == 2 && v * 8 < K) {
                const float* q = o.parts + ((size_t)r * (K / GROUP) + v * 8 / GROUP) * PARTS;
                float z = q[0];
                #pragma unroll
                for (int j = 1; j < PARTS; j++) z += q[j];
                z = rsqrtf(fmaf(z, 1.f / GROUP, o.eps));
                #pragma unroll
                for (int j = 0; j < 8; j++) a[j] = __fmul_rn(a[j], z);
            }
            if (t >= ROWS) continue;
            uint4* to = xs + t * S::LDR + v % 4 * S::LD + c;
            if (F::TWO) split8(a, to[0], to[ROWS * S::LDR]);
            else {
                float top = top8(a);
                #pragma unroll
                for (int m = 1; m < 16; m *= 2) top = fmaxf(top, __shfl_xor_sync(~0u, top, m));
                const float2 f = chunk_scale(top);
                *to = to_half8(a, f.x);
                if (lane % 16 == 0) es[c / 4 * ROWS + t] = f.y;
            }
        }
    }
}

// All tiles of one matrix that this block has: PER of 16 rows at a time, each by HERE warps. `ring`: this warp's PLACES places.
template <class F, int PER, int HERE, int HELD, int PLACES> __device__ __forceinline__ void matrix(const Job& o, uint4* xs) {
    using S = Staged<F, 4 * HELD>;
    constexpr int STEPS = (B + HERE - 1) / HERE, OUT = PAIR ? 8 : 16;  // 128s of a warp; outputs of a tile
    constexpr bool ALL = HELD >= B;
    static_assert(PER * HERE <= W && (ALL || HELD % HERE == 0), "x is staged for whole steps");
    constexpr int PLANE = ROWS * S::LDR, ITEMS = (PER * OUT * ROWS + THREADS - 1) / THREADS;
    __shared__ float part[2][PER * HERE][16][ROWS], squares[ROWS][SLOTS];
    float* es = (float*)(xs + PLANE * S::PLANES);
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4, tile = warp / HERE, share = warp % HERE, n4 = (o.n + 3) / 4 * 4;
    const int groups = (n4 + 16 * PER - 1) / (16 * PER);
    const bool works = PER * HERE == W || tile < PER;
    unsigned char* const ring = (unsigned char*)(es + (HELD * ROWS + 3) / 4 * 4) + (works ? warp : 0) * PLACES * F::At::BYTES;
    const unsigned char *w = o.w, *s = o.s;  // what is to be fetched next: weights and scales of step `step` of group `next`
    int next = o.group, step = 0;
    F::first(w, s, (next * PER + tile) * 16 + 2 * g, share, t);
    bool on = works && next < groups && (next * PER + tile) * 16 + 2 * g < n4;
    const size_t skip = (size_t)o.step * PER * 4;  // fours of rows to the next group
    auto fetch = [&](unsigned char* at) {
        F::fetch(at, w, s, step * HERE + share, t, on && (B % HERE == 0 || step * HERE + share < B));
        cp_async_commit();
        w += HERE * F::BLOCK; s += HERE * F::SBLOCK;
        if (++step == STEPS) {
            step = 0; next += o.step;
            w += skip * 4 * F::LINE - STEPS * HERE * F::BLOCK; s += skip * F::SLINE - STEPS * HERE * F::SBLOCK;
            on = works && next < groups && (next * PER + tile) * 16 + 2 * g < n4;
        }
    };
    #pragma unroll 1
    for (int i = 0; i < PLACES; i++) if (works) fetch(ring + i * F::At::BYTES);
    unsigned char* place = ring;
    float g0[8], sums[MINE] = {};
    if (NORM == 1) load_x(o.gain, (warp % SLOTS) * 32 + lane, g0);
    for (int group = o.group, round = 0; group < groups; group += o.step, round ^= 1) {
        float unit[ITEMS][2], bias[ITEMS][2], prior[ITEMS], open[ITEMS], acc[4] = {};
        #pragma unroll
        for (int i = 0; i < ITEMS; i++) {  // what the results will need
            const int item = i * THREADS + threadIdx.x, r = item % (PER * OUT), row = PAIR ? group * PER * 16 + r / 2 * 4 + r % 2 : group * PER * 16 + r;
            #pragma unroll
            for (int j = 0; j < 1 + PAIR; j++) {
                const bool on = item < PER * OUT * ROWS && row + 2 * j < n4;
                unit[i][j] = on ? F::row_scale(o.s, o.gs, row + 2 * j) : 0.f;
                bias[i][j] = on && o.bias && (PAIR || row < o.n) ? o.bias[row + 2 * j] : 0.f;
            }
        }
        if (group == o.group) { pdl_trigger(); pdl_wait(); }
        #pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const int item = i * THREADS + threadIdx.x, r = group * PER * OUT + item % (PER * OUT), row = item / (PER * OUT);
            prior[i] = o.add && row < o.rows && r < (PAIR ? o.n / 2 : o.n) ? o.add[(size_t)row * o.width + o.at + r] : 0.f;
            open[i] = o.gate && row < o.rows ? times_sigmoid(1.f, o.gate[(size_t)row * o.ld]) : 1.f;
        }
        #pragma unroll 1
        for (int i = 0; i < STEPS; i++) {
            const int first = ALL ? 0 : i * HERE / HELD * HELD, b = i * HERE + share;
            if (ALL ? group == o.group && i == 0 : i * HERE % HELD == 0) {
                if (!ALL) __syncthreads();
                stage<F, HELD>(o, first, g0, sums, xs, es);
                if (NORM == 1 && group == o.group && first + HELD >= B) {
                    #pragma unroll
                    for (int i = 0; i < MINE; i++) {
                        const float z = warp_sum(sums[i]);
                        if (!lane && warp / SLOTS < TEAMS && warp / SLOTS + i * TEAMS < ROWS) squares[warp / SLOTS + i * TEAMS][warp % SLOTS] = z;
                    }
                }
                __syncthreads();
            }
            F q;
            cp_async_wait<PLACES - 1>();
            q.read(place);
            if (works && (B % HERE == 0 || b < B)) {
                float d[4] = {};
                q.template dot<S::LD, PLANE>(d, xs + min(g, ROWS - 1) * S::LDR + 4 * (b - first), t);
                #pragma unroll
                for (int j = 0; j < 2; j++) {
                    const float e = F::TWO ? 1.f : es[(b - first) * ROWS + min(2 * t + j, ROWS - 1)];
                    acc[j] = fmaf(d[j], F::SCALED ? __fmul_rn(e, q.scale(0)) : e, acc[j]);
                    acc[2 + j] = fmaf(d[2 + j], F::SCALED ? __fmul_rn(e, q.scale(1)) : e, acc[2 + j]);
                }
            }
            if (works) fetch(place);
            place = place == ring + (PLACES - 1) * F::At::BYTES ? ring : place + F::At::BYTES;
        }
        #pragma unroll
        for (int j = 0; j < 4; j++)
            if (works && 2 * t + j % 2 < ROWS) part[round][warp][2 * g + j / 2][2 * t + j % 2] = acc[j];
        __syncthreads();
        #pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            const int item = i * THREADS + threadIdx.x, r = item % (PER * OUT), row = item / (PER * OUT), out = group * PER * OUT + r;
            if (row >= o.rows || out >= (PAIR ? o.n / 2 : o.n)) continue;
            float inv = 1.f, v[2];
            if (NORM == 1) {
                float z = 0.f;
                #pragma unroll
                for (int j = 0; j < SLOTS; j++) z += squares[row][j];
                inv = rsqrtf(fmaf(z, 1.f / K, o.eps));
            }
            #pragma unroll
            for (int j = 0; j < 1 + PAIR; j++) {
                const int at = r / OUT * HERE, line = PAIR ? r % 8 / 2 * 4 + r % 2 + 2 * j : r % 16;
                v[j] = 0.f;
                #pragma unroll
                for (int m = 0; m < HERE; m++) v[j] += part[round][at + m][line][row];
                v[j] = fmaf(__fmul_rn(v[j], inv), unit[i][j], bias[i][j]);
            }
            if (CAP) v[0] = __fmul_rn(o.cap, tanhf(v[0] / o.cap));
            if (ACT) v[0] = act_mul<ACT>(v[0], v[PAIR], o.limit);
            o.y[(size_t)row * o.width + o.at + out] = fmaf(v[0], open[i], prior[i]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(LIMITS) gemv(const unsigned char* __restrict__ w, const unsigned char* __restrict__ s,
        const float* __restrict__ gs, const unsigned char* __restrict__ extra, const float* x, const float* __restrict__ gain, const float* parts,
        const float* __restrict__ bias, const float* gate, const float* add, float* y, float eps, float limit, float cap, int rows, int n, int m, int ld,
        int column, int width, int main) {
    DYNAMIC_SHARED(uint4, xs);
    Job o = {w, s, gs, x, gain, parts, bias, gate ? gate + column : nullptr, add, y, eps, limit, cap, rows, n, ld, 0, width, (int)blockIdx.x, main};
#ifdef EXTRA
    if ((int)blockIdx.x >= main) {
        o.w = extra; o.s = nullptr; o.n = m; o.at = n; o.group = blockIdx.x - main; o.step = gridDim.x - main;
        if (bias) o.bias = bias + n;
        matrix<EXTRA<C>, 1, ESPLIT, ESTAGED, EDEEP>(o, xs);
        return;
    }
#endif
    matrix<FORMAT<C>, W / SPLIT, SPLIT, STAGED, DEEP>(o, xs);
}
