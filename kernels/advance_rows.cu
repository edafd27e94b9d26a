// Between decode steps: each row goes on to its sequence's next position, where sampling has put its token already. One row a sequence.
// What it writes are step tables to the kernels after it, which read them before they wait: the next launch must be a plain one (lib/pdl.cuh).
//   seq       : [rows]        i32   sequence of a row; -1: padding, stays as it is
//   active    : [rows]        i32   0: stays as it is; or null: all go on
//   limit     : [seqs]        i32   positions that a sequence has blocks for: a row that would leave them stays, with slot -1; or null: what `tables` can hold
//   pos       : [rows]        i32
//   pos3      : [3, rows]     i32   rotary positions, where they are not `pos`; or null
//   slots     : [rows]        i64   place in the cache of the row's key and value
//   starts    : [seqs]        i32   position of a sequence's first row
//   state_in  : [seqs]        i32   slot of recurrent state to read: what this step wrote
//   state_out : [rows]        i32   and to write: what this step read. -1 for none
//   tables    : [seqs, most]  i32   blocks of a sequence
//   launch: <<<ceil(rows / 64), 64>>>
#include "lib/advance.cuh"
#include "lib/pdl.cuh"

extern "C" __global__ void __launch_bounds__(64) advance_rows(const int* seq, const int* active, const int* limit, int* pos, int* pos3, long long* slots, int* starts,
        int* state_in, int* state_out, const int* tables, int rows, int most, int block_size) {
    pdl_wait();
    const int r = blockIdx.x * 64 + threadIdx.x;
    if (r >= rows) return;
    const Rows b = {seq, active, limit, tables, pos, pos3, starts, state_in, state_out, slots, rows, most, block_size};
    go(b, r, look(b, r));
}
