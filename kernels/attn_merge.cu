// The pieces of attn_decode.cu made one, for rows that see several: y = gate * sum_i e_i o_i /
// (sum_i e_i l_i + e_sink), e_i = 2^(m_i - largest m). A block takes 32 values of a head, one to a
// lane; its warp w adds pieces w, w+W, ..., then what the warps have is added in order. What a
// row's sum looks like depends on its position alone. A piece's weight is known to one lane, and
// the others ask it.
//   o      : [rows, pieces, heads, d]  f32
//   ml     : [rows, pieces, heads, 2]  f32
//   qkv    : [rows, width]             f32   begins with the gates, one for each element, if GATE
//   seq    : [rows]                    i32   sequence of each row; -1: padding
//   first  : [seqs1]                   i32   first row of each sequence
//   starts : [all]                     i32   position of each sequence's first row
//   sinks  : [heads]                   f32   one more logit for each head, or null
//   y      : [rows, heads, d]          f32
//   -D D=  -D GATE=  -D W= warps
//   -D ALONE= registers, so few that a block finds room beside one of attn_decode; by default as
//             many as two blocks have. With 72 no two come to a multiprocessor, with fewer if
//             shared memory says so
//   launch: <<<(ceil(D/32), heads, any), 32*W>>>, any shared memory; window, many as for
//        attn_decode
// Blocks along z share the rows. A thread looks at one: few may have anything to add, and a block
// for each would cost its launch for nothing.
#include "lib/pdl.cuh"
#include "lib/pieces.cuh"
#ifndef D
#define D 256
#endif
#ifndef GATE
#define GATE 1
#endif
#ifndef W
#define W 16
#endif
#ifndef ALONE
#define ALONE 0
#endif
#if ALONE
#define BOUNDS __maxnreg__(ALONE)
#else
#define BOUNDS __launch_bounds__(32 * W, 2)
#endif

constexpr int LOOKS = 32 * W;  // rows that a block looks at in one go

// A row's pieces: those that a warp of this block adds, and what comes of all.
struct Merge {
    const float *o, *ml;  // of this head: the first piece's
    int count, heads;  // pieces; o and ml of the next one are `heads` further
    bool mine;  // is there an element for this lane?
    // Pieces warp, warp+W, ...: their sum of weights and of weighted values, against `top`, N of
    // them at a time
    template <int N>
    __device__ __forceinline__ void add(
            int warp, int lane, float& top, float& sum, float& v) const {
        top = NONE;
        sum = 0.f;
        v = 0.f;
        #pragma unroll 1
        for (int i = warp; i < count; i += W * N) {
            float2 w = make_float2(NONE, 0.f);
            float x[N];
            const int own = i + W * lane;  // the piece whose weight this lane has
            if (lane < N && own < count)
                w = *(const float2*)(ml + (size_t)own * heads * 2);
            #pragma unroll
            for (int k = 0; k < N; k++) {
                const bool on = i + W * k < count && mine;
                x[k] = on ? o[(size_t)(i + W * k) * heads * D] : 0.f;
            }
            const float most = fmaxf(top, warp_max(w.x));
            const float base = most == NONE ? 0.f : most;
            const float fade = exp2f(__fsub_rn(top, base));
            const float weight = exp2f(__fsub_rn(w.x, base));
            sum = __fmul_rn(sum, fade);
            v = __fmul_rn(v, fade);
            top = most;
            #pragma unroll
            for (int k = 0; k < N; k++) {
                const float e = __shfl_sync(~0u, weight, k);
                sum = fmaf(e, __shfl_sync(~0u, w.y, k), sum);
                v = fmaf(e, x[k], v);
            }
        }
    }
    // What is asked for at once depends on how many there are, and so on the row's position alone.
    __device__ __forceinline__ void add(
            int warp, int lane, float& top, float& sum, float& v) const {
        if (count <= 5 * W)
            add<5>(warp, lane, top, sum, v);
        else
            add<14>(warp, lane, top, sum, v);
    }
};

// What the warps of a block have found of a row.
struct Found {
    float part[W][32], tops[W], sums[W];
    __device__ __forceinline__ float all(float sink, int lane) const {
        float base = sink, r = 0.f;
        #pragma unroll
        for (int i = 0; i < W; i++)
            base = fmaxf(base, tops[i]);
        if (base == NONE)
            base = 0.f;  // nothing but NaN
        float all = exp2f(__fsub_rn(sink, base));
        #pragma unroll
        for (int i = 0; i < W; i++) {
            const float e = exp2f(__fsub_rn(tops[i], base));
            all = fmaf(e, sums[i], all);
            r = fmaf(e, part[i][lane], r);
        }
        return r / all;
    }
    // What a warp has found of its pieces.
    __device__ __forceinline__ void put(
            int warp, int lane, float m, float l, float v) {
        part[warp][lane] = v;
        if (!lane) {
            tops[warp] = m;
            sums[warp] = l;
        }
    }
};

extern "C" __global__ void BOUNDS attn_merge(
        const float* o, const float* ml, const float* qkv,
        const int* __restrict__ seq, const int* __restrict__ first,
        const int* __restrict__ starts, const float* __restrict__ sinks, float* y,
        int window, int many, int max_pieces, int width, int rows) {
    __shared__ Found found[2];
    __shared__ int sees[LOOKS];  // pieces of a row
    __shared__ unsigned waiting[W];  // rows of several
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    const int h = blockIdx.y;
    const int heads = gridDim.y;
    const int d = blockIdx.x * 32 + lane, step = gridDim.z;
    const Pieces pieces{many};
    const bool mine = D % 32 == 0 || d < D;
    const float sink = sinks ? __fmul_rn(sinks[h], LOG2E) : NONE;
    pdl_trigger();
    int turn = 0;  // rows done
    #pragma unroll 1
    for (int t0 = blockIdx.z; t0 < rows; t0 += LOOKS * step) {
        // A thread looks at a row
        const int own = t0 + threadIdx.x * step;
        const int s = own < rows ? seq[own] : -1;
        const int p = s < 0 ? 0 : starts[s] + own - first[s];
        const int a = pieces.of(window ? max(0, p - window + 1) : 0);
        const int count = pieces.of(p) - a + 1;
        const unsigned several = __ballot_sync(~0u, count > 1);
        if (t0 != blockIdx.z)
            __syncthreads();
        sees[threadIdx.x] = count;
        if (!lane)
            waiting[warp] = several;
        __syncthreads();
        if (t0 == blockIdx.z)
            pdl_wait();
        #pragma unroll 1
        for (int w = 0; w < W && t0 + w * 32 * step < rows; w++)
            #pragma unroll 1
            for (unsigned todo = waiting[w]; todo; todo &= todo - 1, turn++) {
                const int which = w * 32 + __ffs(todo) - 1;
                const int t = t0 + which * step;
                const size_t from = (size_t)t * max_pieces * heads + h;
                const Merge m{o + from * D + d, ml + from * 2, sees[which], heads,
                        mine};
                // the others go on to the next row
                const bool ends = warp == turn % W;
                const size_t at = (size_t)t * width + h * D + d;
                const float gate = GATE && ends && mine ? qkv[at] : 0.f;
                Found& f = found[turn % 2];
                float top, sum, v;
                m.add(warp, lane, top, sum, v);
                f.put(warp, lane, top, sum, v);
                __syncthreads();
                if (!ends)
                    continue;
                float r = f.all(sink, lane);
                if (GATE)
                    r = gated(r, gate);
                if (mine)
                    y[((size_t)t * heads + h) * D + d] = r;
            }
    }
}
