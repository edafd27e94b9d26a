// Picks of experts, sorted by expert, and the tiles of rows that grouped products are made of. A
// block has a stretch of 1,024 picks. What moe_count.cu found in all stretches says where its own
// picks of each expert begin; it writes them in their order. Nobody waits for anybody, and the
// result is the same every time.
//   ids    : [rows, top]       i32   experts of each row
//   seq    : [rows]            i32   negative: the row is padding, and picks nothing; or null
//   counts : [stretches, e]    i32   of each expert in each stretch; stretches = ceil(rows * top /
//                                    1024). Or null: each block counts all picks by itself
//   order  : [picks]           i32   picks = rows * top: number of the pick (row * top + j) at each
//                                    place; what is left over at the end is not written
//   tiles  : [slots, 3]        i32   expert, first place, end of the places of a tile; expert -1 in
//                                    those left over. slots >= min(experts, picks) + picks / BM
//   others : [more, 3]         i32   the same for tiles of OTHER places; or null
//   -D E=   experts, up to 1024
//   -D BM=  places of a tile
//   -D OTHER=  of one of `others`
//   launch: <<<stretches, 256>>>
#include "lib/stretch.cuh"
#ifndef E
#define E 256
#endif
#ifndef BM
#define BM 64
#endif
#ifndef OTHER
#define OTHER BM
#endif
// experts of a thread; picks of a warp
constexpr int PER = (E + 255) / 256;
constexpr int WARPS = 8;
constexpr int OWN = STRETCH / WARPS;

// Sum of `v` over the threads before this one, of 256; `all`: over all of them.
__device__ __forceinline__ int before(int v, int* parts, int& all) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = v;
    #pragma unroll
    for (int m = 1; m < 32; m *= 2) {
        const int o = __shfl_up_sync(~0u, sum, m);
        if (lane >= m)
            sum += o;
    }
    __syncthreads();
    if (lane == 31)
        parts[warp] = sum;
    __syncthreads();
    int base = 0;
    all = 0;
    #pragma unroll
    for (int i = 0; i < WARPS; i++) {
        base += i < warp ? parts[i] : 0;
        all += parts[i];
    }
    return base + sum - v;
}

// Places of each tile of an expert with n: as few tiles as there may be, and these as even as
// sixteens allow.
template <int SIZE> __device__ __forceinline__ int even(int n) {
    const int many = max((n + SIZE - 1) / SIZE, 1);
    return max((n + many - 1) / many + 15, 16) / 16 * 16;
}

// The list of tiles of up to SIZE places: a thread lists those of its own experts.
template <int SIZE>
__device__ __forceinline__ void list(
        const int* total, int* tiles, int slots, int* parts) {
    int mine = 0;
    int place = 0;
    int all;
    int used;
    #pragma unroll
    for (int i = 0; i < PER; i++) {
        mine += (total[i] + SIZE - 1) / SIZE;
        place += total[i];
    }
    int slot = before(mine, parts, used);
    place = before(place, parts, all);
    #pragma unroll 1
    for (int i = 0; i < PER; i++) {
        const int end = place + total[i];
        const int size = even<SIZE>(total[i]);
        for (; place < end; place += size, slot++) {
            tiles[slot * 3] = threadIdx.x * PER + i;
            tiles[slot * 3 + 1] = place;
            tiles[slot * 3 + 2] = min(place + size, end);
        }
        place = end;
    }
    for (int i = used + threadIdx.x; i < slots; i += 256)
        tiles[i * 3] = -1;
}

// Picks of each expert: all, and those before this block's.
__device__ __forceinline__ void count_all(
        const int* ids, const int* seq, int picks, int top, int* all,
        int* earlier) {
    for (int p = threadIdx.x; p < picks; p += 256) {
        const int e = expert_of(ids, seq, p, picks, top);
        if (e < 0)
            continue;
        atomicAdd(all + e, 1);
        if (p < blockIdx.x * STRETCH)
            atomicAdd(earlier + e, 1);
    }
    __syncthreads();
}

// A warp puts its picks where they go, in order.
__device__ __forceinline__ void put_picks(
        const int* ids, const int* seq, int* order, int* next, int lo, int lane,
        int picks, int top) {
    #pragma unroll 1
    for (int i = 0; i < OWN; i += 32) {
        const int p = lo + i + lane;
        const int e = expert_of(ids, seq, p, picks, top);
        const unsigned same = __match_any_sync(~0u, e);
        const unsigned below = same & ((1u << lane) - 1);
        const int at = e < 0 ? 0 : next[e];
        if (e >= 0)
            order[at + __popc(below)] = p;
        __syncwarp();
        if (e >= 0 && !below)
            next[e] = at + __popc(same);
        __syncwarp();
    }
}

extern "C" __global__ void __launch_bounds__(256) moe_sort(
        const int* __restrict__ ids, const int* __restrict__ seq,
        const int* __restrict__ counts, int* order, int* tiles, int* others,
        int picks, int top, int slots, int more) {
    // where a warp's next pick of an expert goes
    __shared__ int next[WARPS][E], parts[WARPS];
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int lo = blockIdx.x * STRETCH + warp * OWN;
    for (int i = threadIdx.x; i < WARPS * E; i += 256)
        next[i / E][i % E] = 0;
    __syncthreads();
    // picks of this thread's experts: all, and in stretches before
    int total[PER], earlier[PER];
    if (!counts)
        count_all(ids, seq, picks, top, next[0], next[1]);
    #pragma unroll
    for (int i = 0; i < PER; i++) {
        const int e = threadIdx.x * PER + i;
        total[i] = counts || e >= E ? 0 : next[0][e];
        earlier[i] = counts || e >= E ? 0 : next[1][e];
        #pragma unroll 4
        for (int j = 0; counts && e < E && j < gridDim.x; j++) {
            const int n = counts[j * E + e];
            earlier[i] += j < blockIdx.x ? n : 0;
            total[i] += n;
        }
        for (int w = 0; !counts && e < E && w < 2; w++)
            next[w][e] = 0;
    }
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < OWN; i += 32) {
        const int e = expert_of(ids, seq, lo + i + lane, picks, top);
        if (e >= 0)
            atomicAdd(&next[warp][e], 1);
    }
    int mine = 0, all;
    #pragma unroll
    for (int i = 0; i < PER; i++)
        mine += total[i];
    // its barriers are those that the counts need
    int place = before(mine, parts, all);
    #pragma unroll
    for (int i = 0; i < PER; i++) {
        const int e = threadIdx.x * PER + i;
        int at = place + earlier[i];
        #pragma unroll
        for (int w = 0; e < E && w < WARPS; w++) {
            const int n = next[w][e];
            next[w][e] = at;
            at += n;
        }
        place += total[i];
    }
    __syncthreads();
    put_picks(ids, seq, order, next[warp], lo, lane, picks, top);
    if (blockIdx.x)
        return;
    list<BM>(total, tiles, slots, parts);
    if (others)
        list<OTHER>(total, others, more, parts);
}
