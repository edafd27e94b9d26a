// The rows of a prefill step on their way to attention: norms and rotation of queries and keys,
// norm of values, keys and values into the cache, queries to fp16.
//   qkv      : [r, width]             f32   gates (gate) | queries | keys | values (not keqv), all
//                                           heads of one, then of the next; qonly: no keys, no
//                                           values
//   q_norm   : [qn]                   f32   or null; [DIM], or [heads*DIM] where all heads are
//                                           normed together
//   k_norm   : [kn]                   f32   likewise, [DIM] or [kv*DIM]
//   cos, sin : [positions, half]      f32   or null: no rotation
//   pos      : [three, r]             i32   one rotary position a row, or three of which `axes`
//                                           picks; or null
//   axes     : [half]                 i32   or null: which of the positions each pair follows
//   slots    : [r]                    i64   where a row's key and value go, or -1
//   k, v     : [blocks, bs, kv, bytes] u8   written (lib/kvcache.cuh); or null
//   k_scale, v_scale : [blocks, bs, kv] f32 or null
//   k_sub, v_sub : [blocks, bs, kv, subs] u8 or null
//   q        : [r, heads, halves]     f16   queries, for rows lo..hi-1 of a tile; halves: DIM, or
//                                           2*DIM in planes as lib/kvcache.cuh has them in format 4
//   kf, vf   : [r, kv, halves]        f16   keys and values likewise, as the cache would give them;
//                                           or null
//   tile_lo, tile_hi : [tiles]        i32   real rows of a tile of 64
//   -DIM DIM= (head size, a multiple of 16) FORMAT= (lib/kvcache.cuh) KEQV= (values are the keys
//        before their norm) VNORM= (values are normed)
//   launch: <<<r, 256>>>
#include "lib/halves.cuh"
#include "lib/kvcache.cuh"
#include "lib/reduce.cuh"
#ifndef DIM
#define DIM 256
#endif
#ifndef FORMAT
#define FORMAT 0
#endif
#ifndef KEQV
#define KEQV 0
#endif
#ifndef VNORM
#define VNORM 0
#endif
constexpr int I = (DIM / 4 + 31) / 32;
constexpr int P = KV_PLANES<FORMAT>;
// blocks of a multiprocessor, at least; others come to more
constexpr int SIDE = DIM == 256 ? 4 : 1;

struct Turn;
// A head that a warp holds, a lane's elements as for KvRow.
struct Head {
    float4 v[I];
    static __device__ __forceinline__ int at(int i) {
        const int u = threadIdx.x % 32 + 32 * i;
        return u / 4 * 16 + u % 4 * 2;
    }
    static __device__ __forceinline__ bool on(int i) {
        return threadIdx.x % 32 + 32 * i < DIM / 4;
    }
    __device__ __forceinline__ void load(const float* p) {
        #pragma unroll
        for (int i = 0; i < I; i++) {
            const float2 a = on(i) ? *(const float2*)(p + at(i))
                                   : make_float2(0.f, 0.f);
            const float2 b = on(i) ? *(const float2*)(p + at(i) + 8)
                                   : make_float2(0.f, 0.f);
            v[i] = make_float4(a.x, a.y, b.x, b.y);
        }
    }
    __device__ __forceinline__ float squares() const {
        float s = 0.f;
        #pragma unroll
        for (int i = 0; i < I; i++)
            s += v[i].x * v[i].x + v[i].y * v[i].y + v[i].z * v[i].z
                    + v[i].w * v[i].w;
        return s;
    }
    __device__ __forceinline__ void times(float f, const float* __restrict__ g) {
        #pragma unroll
        for (int i = 0; i < I; i++)
            #pragma unroll
            for (int j = 0; j < 4; j++)
                (&v[i].x)[j] *= f
                        * (g && on(i) ? g[at(i) + j % 2 + j / 2 * 8] : 1.f);
    }
    __device__ __forceinline__ void turn(const Turn& t, int half, float* room);
};

// Where a lane's i-th quad begins in a row of halves, in words of two.
__device__ __forceinline__ int word(int i) {
    return P == 1 ? Head::at(i) / 2
                  : Head::at(i) / 16 * 16 + Head::at(i) % 16 / 2;
}

// The angles of a row, for a lane's elements: element e turns with e + half, or e - half, and those
// from 2*half on stay.
struct Turn {
    float cos[I][4], sin[I][4];
    // All angles are asked for at once: where nothing turns, for one that nobody looks at.
    __device__ __forceinline__ Turn(
            const float* __restrict__ c, const float* __restrict__ s,
            const int* __restrict__ pos, const int* __restrict__ axes, int half,
            int r, int row) {
        const int one = c && !axes ? pos[row] : 0;
        #pragma unroll
        for (int n = 0; n < 4 * I; n++) {
            const int e = Head::at(n / 4) + n % 2 + n % 4 / 2 * 8;
            const bool on = c && Head::on(n / 4) && e < 2 * half;
            const int h = !on ? 0 : e < half ? e : e - half;
            const int p = c && axes ? pos[axes[h] * r + row] : one;
            const size_t a = (size_t)p * half + h;
            const float x = c ? c[a] : 1.f;
            const float y = c ? s[a] : 0.f;
            cos[n / 4][n % 4] = on ? x : 1.f;
            sin[n / 4][n % 4] = !on ? 0.f : e < half ? -y : y;
        }
    }
};
// `room`: DIM floats of this warp
__device__ __forceinline__ void Head::turn(const Turn& t, int half, float* room) {
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < I; i++)
        #pragma unroll
        for (int j = 0; j < 4; j++)
            if (on(i))
                room[at(i) + j % 2 + j / 2 * 8] = (&v[i].x)[j];
    __syncwarp();
    #pragma unroll
    for (int i = 0; i < I; i++)
        #pragma unroll
        for (int j = 0; j < 4; j++) {
            const int e = at(i) + j % 2 + j / 2 * 8;
            const float other = on(i) && e < 2 * half
                    ? room[e < half ? e + half : e - half]
                    : 0.f;
            (&v[i].x)[j] = (&v[i].x)[j] * t.cos[i][j] + other * t.sin[i][j];
        }
}

// A query, in fp16.
__device__ __forceinline__ void put_query(unsigned* to, const Head& x) {
    #pragma unroll
    for (int i = 0; i < I; i++)
        if (Head::on(i)) {
            to[word(i)] = half_pair(x.v[i].x, x.v[i].y);
            to[word(i) + 4] = half_pair(x.v[i].z, x.v[i].w);
            if (P == 2) {
                to[word(i) + 8] = half2_rest(x.v[i].x, x.v[i].y);
                to[word(i) + 12] = half2_rest(x.v[i].z, x.v[i].w);
            }
        }
}

// A key or value in fp16, as the cache would give it.
__device__ __forceinline__ void put_kept(
        unsigned* to, const KvRow<FORMAT, DIM>& e) {
    #pragma unroll
    for (int i = 0; i < I; i++)
        if (Head::on(i)) {
            to[word(i)] = kv_halves<FORMAT>(e.a[i], e.scale * KV_UNIT<FORMAT>);
            to[word(i) + 4] = kv_halves<FORMAT>(
                    e.b[i], e.scale * KV_UNIT<FORMAT>);
            if (P == 2) {
                to[word(i) + 8] = e.ra[i % (P == 2 ? I : 1)];
                to[word(i) + 12] = e.rb[i % (P == 2 ? I : 1)];
            }
        }
}

// 1 / root of the mean square of all queries of a row together, and of all keys.
__device__ __forceinline__ void norm_all(
        float (&total)[2], const float* p, int heads, int keys, float eps) {
    #pragma unroll 1
    for (int m = 0; m < 2; m++) {
        const int n = (m ? keys : heads) * DIM;
        float s = 0.f;
        for (int i = threadIdx.x; i < n; i += 256) {
            const float x = p[m * heads * DIM + i];
            s += x * x;
        }
        s = block_sum(s);
        if (!threadIdx.x)
            total[m] = rsqrtf(s / max(n, 1) + eps);
    }
}

extern "C" __global__ void __launch_bounds__(256, SIDE) flash_prep(
        const float* __restrict__ qkv, const float* __restrict__ q_norm,
        const float* __restrict__ k_norm, const float* __restrict__ cos,
        const float* __restrict__ sin, const int* __restrict__ pos,
        const int* __restrict__ axes, const long long* __restrict__ slots,
        unsigned char* k, float* k_scale, unsigned char* k_sub, unsigned char* v,
        float* v_scale, unsigned char* v_sub, __half* q, __half* kf, __half* vf,
        const int* __restrict__ tile_lo, const int* __restrict__ tile_hi,
        float eps, int r, int width, int heads, int kv, int half, int gate,
        int qonly, int together) {
    __shared__ float room[8][DIM], total[2];
    const int row = blockIdx.x;
    const int warp = threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    const int lo = tile_lo[row / 64], hi = tile_hi[row / 64];
    if (row % 64 < lo || row % 64 >= hi)
        return;
    const float* p = qkv + (size_t)row * width + (gate ? heads * DIM : 0);
    const int keys = qonly || slots[row] < 0 ? 0 : kv;
    if (together) {
        norm_all(total, p, heads, keys, eps);
        __syncthreads();
    }
    const int last = heads + 2 * keys;
    auto source = [&](int h) {
        return p + (size_t)(KEQV && h >= heads + keys ? h - keys : h) * DIM;
    };
    Head next;
    if (warp < last)
        next.load(source(warp));
    const Turn turn(cos, sin, pos, axes, half, r, row);
    #pragma unroll 1
    for (int h = warp; h < last; h += 8) {
        const bool query = h < heads, value = h >= heads + keys;
        const float* norm = query ? q_norm : k_norm;
        Head x = next;
        if (h + 8 < last)
            next.load(source(h + 8));
        if (value) {
            if (VNORM)
                x.times(rsqrtf(warp_sum(x.squares()) / DIM + eps), nullptr);
        } else {
            if (norm) {
                const float f = together
                        ? total[!query]
                        : rsqrtf(warp_sum(x.squares()) / DIM + eps);
                x.times(f,
                        together ? norm + (query ? h : h - heads) * DIM : norm);
            }
            if (cos)
                x.turn(turn, half, room[warp]);
        }
        if (query) {
            put_query((unsigned*)(q + ((size_t)row * heads + h) * (DIM * P)), x);
        } else {
            KvRow<FORMAT, DIM> e;
            e.encode(x.v, lane);
            const int own = value ? h - heads - keys : h - heads;
            const size_t at = (size_t)slots[row] * kv + own;
            if (value)
                e.store(v, v_scale, v_sub, at, lane);
            else
                e.store(k, k_scale, k_sub, at, lane);
            if (!kf)
                continue;
            __half* const to = value ? vf : kf;
            put_kept((unsigned*)(to + ((size_t)row * kv + own) * (DIM * P)), e);
        }
    }
}
