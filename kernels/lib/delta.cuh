#pragma once
// The gated delta rule (delta_step.cu, delta_wide.cu): o = exp(g) q.S + (q.k) d and S' = exp(g) S +
// k d with d = beta (v - exp(g) k.S). Four warps have 32 columns of a head's state, a thread four
// columns of N rows. Lengths of q and k are not in them yet. Orders of sums are written out here,
// once for all kernels.
__device__ __forceinline__ float4 add4(float4 a, float4 b) {
    return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
}
// M (2, or a multiple of 4) neighbouring floats of shared memory.
template <int M> __device__ __forceinline__ void load(const float* p, float* v) {
    if (M % 4)
        #pragma unroll
        for (int i = 0; i < M / 2; i++)
            *(float2*)(v + 2 * i) = *(const float2*)(p + 2 * i);
    else
        #pragma unroll
        for (int i = 0; i < M / 4; i++)
            *(float4*)(v + 4 * i) = *(const float4*)(p + 4 * i);
}

template <int N> struct Columns {
    static constexpr int H = N < 4 ? N : 4;
    float4 S[N];
    // Products with q and k from this thread's first row on. Lanes 8 apart have other rows of the
    // same columns: each keeps half of what it has and sends the rest. In the end a warp's sums are
    // in `sums`: k.S of 32 columns, q.S.
    __device__ __forceinline__ void products(
            const float* q, const float* k, int lane, float* sums) const {
        float4 kS = make_float4(0, 0, 0, 0), qS = kS;
        #pragma unroll
        for (int h = 0; h < N; h += H) {
            float qh[H], kh[H];
            load<H>(q + h, qh);
            load<H>(k + h, kh);
            #pragma unroll
            for (int m = 0; m < H; m++)
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float s = (&S[h + m].x)[i];
                    (&kS.x)[i] = fmaf(kh[m], s, (&kS.x)[i]);
                    (&qS.x)[i] = fmaf(qh[m], s, (&qS.x)[i]);
                }
        }
        const bool hi = lane & 16, odd = lane & 8;
        float t[4], s[2];
        #pragma unroll
        for (int m = 0; m < 4; m++)
            t[m] = (hi ? (&qS.x)[m] : (&kS.x)[m])
                    + __shfl_xor_sync(~0u, hi ? (&kS.x)[m] : (&qS.x)[m], 16);
        #pragma unroll
        for (int m = 0; m < 2; m++)
            s[m] = (odd ? t[2 + m] : t[m])
                    + __shfl_xor_sync(~0u, odd ? t[m] : t[2 + m], 8);
        *(float2*)(sums + hi * 32 + lane % 8 * 4 + odd * 2) = make_float2(
                s[0], s[1]);
    }
    __device__ __forceinline__ void take(
            const float* k, const float (&d)[4], float eg) {
        #pragma unroll
        for (int h = 0; h < N; h += H) {
            float kh[H];
            load<H>(k + h, kh);
            #pragma unroll
            for (int m = 0; m < H; m++)
                #pragma unroll
                for (int i = 0; i < 4; i++) {
                    float& s = (&S[h + m].x)[i];
                    s = fmaf(kh[m], d[i], __fmul_rn(s, eg));
                }
        }
    }
    // Rows that are pending in the record (lib/late.cuh); this thread has four columns from `col`
    // on
    template <class R>
    __device__ __forceinline__ void take_pending(
            const R& record, int n, int row0, int col) {
        #pragma unroll 1
        for (int i = 0; i < n; i++) {
            float d[4];
            load<4>(record.rows[i].d + col, d);
            take(record.rows[i].k + row0, d, record.eg[i]);
        }
    }
};

// Of four columns: what four warps have.
__device__ __forceinline__ float4 sum_of_warps(const float (*a)[64], int at) {
    const float4 first = add4(
            *(const float4*)&a[0][at], *(const float4*)&a[1][at]);
    return add4(
            first, add4(*(const float4*)&a[2][at], *(const float4*)&a[3][at]));
}
// q.k, q.q and k.k from the sums of four warps.
__device__ __forceinline__ float4 sum_of_cross(const float (*a)[4]) {
    const float4 first = add4(*(const float4*)a[0], *(const float4*)a[1]);
    return add4(first, add4(*(const float4*)a[2], *(const float4*)a[3]));
}

// A row's scalars.
struct Rule {
    float4 dot;  // q.k, q.q, k.k
    float eg, old, rate;
    __device__ __forceinline__ Rule(float4 dot_, float beta, float eg_)
        : dot(dot_), eg(eg_) {
        const float nk = rsqrtf(dot.z + 1e-6f);
        old = __fmul_rn(eg, nk);
        rate = __fmul_rn(beta, nk);
    }
    // What joins four columns, of their k.S
    __device__ __forceinline__ void change(
            float4 kS, float4 v, float (&d)[4]) const {
        #pragma unroll
        for (int m = 0; m < 4; m++)
            d[m] = __fmul_rn(fmaf(-old, (&kS.x)[m], (&v.x)[m]), rate);
    }
    // What is read from them, times gain and gate; `ss`: its squares before that, over eight lanes
    __device__ __forceinline__ float4 read(
            float4 qS, const float (&d)[4], float4 gain, float4 gate, float scale,
            float& ss) const {
        const float nq = rsqrtf(dot.y + 1e-6f) * scale;
        float o[4];
        ss = 0.f;
        #pragma unroll
        for (int m = 0; m < 4; m++) {
            const float e = __fmul_rn(
                    nq, fmaf(dot.x, d[m], __fmul_rn(eg, (&qS.x)[m])));
            ss = fmaf(e, e, ss);
            o[m] = __fmul_rn(__fmul_rn(e, (&gain.x)[m]), (&gate.x)[m]);
        }
        #pragma unroll
        for (int m = 4; m; m /= 2)
            ss += __shfl_xor_sync(~0u, ss, m);
        return make_float4(o[0], o[1], o[2], o[3]);
    }
};
