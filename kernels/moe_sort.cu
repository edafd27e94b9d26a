// Picks of experts, sorted by expert, and the tiles of rows that a grouped product is made of. A block is an expert: it counts all picks, so it knows where
// its own begin, and writes these in their order. Nobody waits for anybody, and the result is the same every time.
//   ids   : [rows, top]   i32   experts of each row
//   seq   : [rows]        i32   negative: the row is padding, and picks nothing; or null
//   order : [picks]       i32   picks = rows * top: number of the pick (row * top + j) at each place; what is left over at the end is not written
//   tiles : [slots, 3]    i32   expert, first place, end of the places of a tile; expert -1 in those left over. slots >= experts + picks / BM
//   -D E=   experts, up to 1024      -D BM=  places of a tile
//   launch: <<<E, 256>>>
#ifndef E
#define E 256
#endif
#ifndef BM
#define BM 64
#endif
constexpr int PER = (E + 255) / 256;

// Sum of `v` over the threads before this one, of 256; `all`: over all of them.
__device__ __forceinline__ int before(int v, int* parts, int& all) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    int sum = v;
    #pragma unroll
    for (int m = 1; m < 32; m *= 2) { const int o = __shfl_up_sync(~0u, sum, m); if (lane >= m) sum += o; }
    __syncthreads();
    if (lane == 31) parts[warp] = sum;
    __syncthreads();
    int base = 0;
    all = 0;
    #pragma unroll
    for (int i = 0; i < 8; i++) { base += i < warp ? parts[i] : 0; all += parts[i]; }
    return base + sum - v;
}

extern "C" __global__ void __launch_bounds__(256) moe_sort(const int* __restrict__ ids, const int* __restrict__ seq, int* order, int* tiles,
        int picks, int top, int slots) {
    __shared__ int counts[E], parts[8], mine[2];  // mine: first place and first tile of this block's expert
    const int tid = threadIdx.x, me = blockIdx.x;
    for (int e = tid; e < E; e += 256) counts[e] = 0;
    __syncthreads();
    // A warp has a stretch of the picks to itself, 32 at a time.
    const int lane = tid % 32, per = (picks + 255) / 256 * 32, lo = min(tid / 32 * per, picks), hi = min(lo + per, picks);
    int found = 0;
    #pragma unroll 4
    for (int p = lo + lane; p < hi; p += 32)
        if (!seq || seq[p / top] >= 0) {
            const int e = ids[p];
            atomicAdd(&counts[e], 1);
            found += e == me;
        }
    __syncthreads();
    int places = 0, squares = 0, all;
    #pragma unroll
    for (int i = 0; i < PER; i++) { const int e = tid * PER + i; if (e < E) { places += counts[e]; squares += (counts[e] + BM - 1) / BM; } }
    int place = before(places, parts, all), square = before(squares, parts, all);
    #pragma unroll
    for (int i = 0; i < PER; i++) {
        const int e = tid * PER + i;
        if (e == me) { mine[0] = place; mine[1] = square; }
        if (e < E) { place += counts[e]; square += (counts[e] + BM - 1) / BM; }
    }
    __syncthreads();
    const int first = mine[0], n = counts[me];
    for (int i = tid; i < (n + BM - 1) / BM; i += 256) {
        int* o = tiles + (mine[1] + i) * 3;
        o[0] = me; o[1] = first + i * BM; o[2] = min(first + n, first + (i + 1) * BM);
    }
    if (me == E - 1) for (int i = all + tid; i < slots; i += 256) tiles[i * 3] = -1;  // `all` tiles are in use
    int at = before(found, parts, all);
    at = first + __shfl_sync(~0u, at, 0);  // where those of this warp begin
    if (!__any_sync(~0u, found)) return;
    #pragma unroll 4
    for (int p0 = lo; p0 < hi; p0 += 32) {
        const int p = p0 + lane, hit = p < hi && ids[p] == me && (!seq || seq[p / top] >= 0);
        const unsigned hits = __ballot_sync(~0u, hit);
        if (hit) order[at + __popc(hits & ((1u << lane) - 1))] = p;
        at += __popc(hits);
    }
    __syncwarp();
}
