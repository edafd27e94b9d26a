// The state of a Mamba-2 layer from tile to tile (64 positions) of each sequence of a prefill step,
// and what every row reads from it, before gate and norm (gated_norm.cu). Parallel over sequences,
// heads and 16 elements of a head a warp; its operands are prepared by mamba_prep.cu. See
// lib/scan.cuh.
//   q        : [tiles, groups, qf]    u32   fragments of C (lib/limbs.cuh), qf = 64*DK
//   k        : [tiles, groups, qf]    u32   of B
//   u        : [tiles, nh, uf]        f32   x as sums, uf = 64*DV
//   p        : [tiles, nh, 4096]      u32   of the decayed C B' dt
//   scal     : [tiles, nh, 128]       f32   decay from the tile's begin; to its end, times dt
//   skip     : [nh]                   f32   D
//   rec      : [slots, nh, dv, dk]    f32   states: n is in n/TAILS, read at state_in, written at
//                                           state_out
//   first    : [seqs1]                i32   a row in the first tile of each sequence
//   starts   : [seqs]                 i32   position of a sequence's first row
//   state_in : [seqs]                 i32   state to begin from (unread at position 0)
//   state_out : [r]                   i32   state after a row, or -1; looked at for the last row of
//                                           each tile. It may lie where the sequence's own begins:
//                                           nobody else reads that
//   tile_seq, tile_lo, tile_hi : [tiles] i32   sequence of a tile (-1: none), its real rows
//                                              lo..hi-1
//   y        : [r, inner]             f32   real rows are written, inner = nh*DV
//   -D DK= (state size: 16, 32, 64 or 128) DV= (head size, a multiple of 16) WARPS= (1 or 2:
//          elements/16 of a block) TAILS= (tails for each slot)
//   launch: <<<(nh*DV/16/WARPS, seqs), 32*WARPS, RING*8192 + 2048>>>
#include "lib/scan.cuh"
#ifndef DK
#define DK 128
#endif
#ifndef DV
#define DV 64
#endif
#ifndef WARPS
#define WARPS 2
#endif
#ifndef TAILS
#define TAILS 1
#endif

extern "C" __global__ void __launch_bounds__(32 * WARPS) mamba_many(
        const unsigned* __restrict__ q, const unsigned* __restrict__ k,
        const float* __restrict__ u, const unsigned* __restrict__ p,
        const float* __restrict__ scal, const float* __restrict__ skip,
        float* rec, const int* __restrict__ first, const int* __restrict__ starts,
        const int* __restrict__ state_in, const int* __restrict__ state_out,
        const int* __restrict__ tile_seq, const int* __restrict__ tile_lo,
        const int* __restrict__ tile_hi, float* y, int tiles, int groups,
        int nh) {
    DYNAMIC_SHARED(uint4, room);
    scan_states<DK, DV, WARPS, TAILS>(
            room, q, k, u, p, scal, skip, rec, first, starts, state_in, state_out,
            tile_seq, tile_lo, tile_hi, y, tiles, groups, nh);
}
