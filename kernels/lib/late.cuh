#pragma once
// A head's record: its state of a gated delta net [DK, DV], and up to PENDING rows that have yet to
// join it. A step of one row adds its row to these, which is a hundredth of the state; whoever
// loads the state lets them join it in registers, in their order, by the operations that would have
// been done at once. When there is no room for another row, or the state goes to another slot, the
// state is written, and nothing is pending; but a step with one draft (delta_step.cu) leaves its
// two rows pending in another slot, beside the state before them. Counts are of 16 columns each, so
// that whoever has columns reads and writes counts that nobody else does.
#ifndef PENDING
#define PENDING 3
#endif
static_assert(PENDING > 0 && PENDING <= 8, "rows that a record has room for");

template <int H, int W> struct Record {
    struct Row {
        float k[H], d[W];
    };
    float S[H * W];
    Row rows[PENDING];
    float eg[8];      // S joined by a row is S*eg + k d
    int count[8];     // rows that are pending
    float unused[16];  // records begin at lines of the cache
    __device__ __forceinline__ int pending(unsigned col) const {
        return min((unsigned)count[col / 16], (unsigned)PENDING);
    }
    // By one thread that has columns col .. col+31: so many rows are pending
    __device__ __forceinline__ void say(unsigned col, int n) {
        *(int2*)(count + col / 16) = make_int2(n, n);
    }
    // By a warp: of row n its part in columns col .. col+31, of which a lane has four, and as large
    // a share of k
    __device__ __forceinline__ void add(
            unsigned n, const float* now, const float (&new_d)[4], float new_eg,
            unsigned col, unsigned lane) {
        add_key(n, now, new_eg, col, lane);
        add_change(n, new_d, col, lane);
    }
    __device__ __forceinline__ void add_key(
            unsigned n, const float* now, float new_eg, unsigned col,
            unsigned lane) {
        constexpr int OWN = H / (W / 32);
        #pragma unroll
        for (int i = 0; i < (OWN + 31) / 32; i++) {
            const unsigned at = col / 32 * OWN + i * 32 + lane;
            if (OWN % 32 == 0 || lane < OWN)
                rows[n].k[at] = now[at];
        }
        if (!lane)
            eg[n] = new_eg;  // the same from all
    }
    __device__ __forceinline__ void add_change(
            unsigned n, const float (&new_d)[4], unsigned col, unsigned lane) {
        if (lane < 8)
            *(float4*)(rows[n].d + col + lane * 4) = make_float4(
                    new_d[0], new_d[1], new_d[2], new_d[3]);
    }
};
