#pragma once
// Who needs which expert, listed by a block out of all rows' picks: a slot is one expert and up to
// MOST entries (row * EACH_ROW + pick) of rows that picked it. The shared expert (number OF), which
// all rows need, comes first, the others by number; an expert's entries come in the order of rows.
//   clear(rows)      before anything; then a barrier of the block
//   note(p, e)       pick p (row * BEST + pick) is expert e; then a barrier
//   note_all(ids, rows)      all picks are in `ids`
//   count(rows)      by all threads: of each expert its first slot; and how many there are; then a
//                    barrier
//   each_pick(rows, put)     put(slot, place, entry) of picks of experts by number, by all threads
//   each_slot(rows, put)     put(slot, expert, entries) likewise
//   each_shared(rows, put_slot, put)   both of the shared expert
template <int OF, int BEST, int ALSO, int MOST, int BY> struct Listing {
    static constexpr int ROWS = 256;
    static constexpr int EACH_ROW = BEST + ALSO;
    static constexpr int GROUPS = (OF + 31) / 32;
    static constexpr int LANES = 32 * BY;
    // times 32 experts of a warp
    static constexpr int PER = (GROUPS + BY - 1) / BY;
    unsigned rows[ROWS / 32][OF];  // a bit for each row that picked the expert
    // of each expert its first slot; of 32 experts, how many
    int first[OF], slots[GROUPS];
    short picked[ROWS * BEST];  // by row and pick

    __device__ __forceinline__ void clear(int many) {
        #pragma unroll 1
        for (int i = threadIdx.x; i < (many + 31) / 32 * OF; i += LANES)
            (&rows[0][0])[i] = 0;
    }
    __device__ __forceinline__ void note(int p, int e) {
        const unsigned r = (unsigned)p / BEST;
        picked[p] = e;
        atomicOr(&rows[r / 32][e], 1u << r % 32);
    }
    // All picks out of memory.
    __device__ __forceinline__ void note_all(const int* ids, int many) {
        constexpr int PART = (ROWS * BEST + LANES - 1) / LANES;
        int e[PART];  // all asked for before the first is looked at
        #pragma unroll
        for (int i = 0; i < PART; i++) {
            const int p = i * LANES + threadIdx.x;
            e[i] = p < many * BEST ? __ldcg(ids + p) : -1;
        }
        #pragma unroll
        for (int i = 0; i < PART; i++)
            if (e[i] >= 0)
                note(i * LANES + threadIdx.x, e[i]);
    }
    // Sum of `v` <= `most` over the lanes before this one. A vote for each binary digit: none waits
    // for another, as additions from lane to lane would.
    static __device__ __forceinline__ int lanes_before(int v, int most) {
        const unsigned below = (1u << threadIdx.x % 32) - 1;
        int sum = 0;
        #pragma unroll 1
        for (int i = 0; most >> i; i++)
            sum += __popc(__ballot_sync(~0u, v >> i & 1) & below) << i;
        return sum;
    }
    static __device__ __forceinline__ int shared_slots(int many) {
        return ALSO ? (many + MOST - 1) / MOST : 0;
    }
    __device__ __forceinline__ int total(int many, int e) const {
        int n = 0;
        #pragma unroll 1
        for (int w = 0; w < (many + 31) / 32; w++)
            n += __popc(rows[w][e]);
        return n;
    }
    __device__ __forceinline__ int count(int many) {
        const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
        int at[PER];
        #pragma unroll
        for (int i = 0; i < PER; i++) {
            const int group = i * BY + warp, e = group * 32 + lane;
            if (group >= GROUPS)
                continue;
            const int mine = e < OF ? (total(many, e) + MOST - 1) / MOST : 0;
            at[i] = lanes_before(mine, (many + MOST - 1) / MOST);
            if (lane == 31)
                slots[group] = at[i] + mine;
        }
        __syncthreads();
        int end = shared_slots(many);
        #pragma unroll
        for (int g = 0; g < GROUPS; g++) {
            #pragma unroll
            for (int i = 0; i < PER; i++)
                if (g == i * BY + warp && g * 32 + lane < OF)
                    first[g * 32 + lane] = end + at[i];
            end += slots[g];
        }
        return end;
    }
    template <class Put>
    __device__ __forceinline__ void each_pick(int many, Put put) const {
        #pragma unroll 1
        for (int p = threadIdx.x; p < many * BEST; p += LANES) {
            const unsigned e = picked[p], r = (unsigned)p / BEST;
            unsigned place = __popc(rows[r / 32][e] & ((1u << r % 32) - 1));
            #pragma unroll 1
            for (int w = 0; w < r / 32; w++)
                place += __popc(rows[w][e]);
            put(first[e] + place / MOST, place % MOST, r * EACH_ROW + p % BEST);
        }
    }
    template <class Put>
    __device__ __forceinline__ void each_slot(int many, Put put) const {
        #pragma unroll 1
        for (int e = threadIdx.x; e < OF; e += LANES) {
            int slot = first[e];
            #pragma unroll 1
            for (int left = total(many, e); left > 0; left -= MOST, slot++)
                put(slot, e, min(left, MOST));
        }
    }
    template <class Slot, class Put>
    static __device__ __forceinline__ void each_shared(
            int many, Slot put_slot, Put put) {
        #pragma unroll 1
        for (int r = threadIdx.x; ALSO && r < many; r += LANES) {
            const int slot = r / MOST, place = r % MOST;
            if (!place)
                put_slot(slot, OF, min(many - r, MOST));
            put(slot, place, r * EACH_ROW + BEST);
        }
    }
};
