#pragma once
// At the end of a decode step with one row a sequence: each row goes on to its sequence's next
// position, where sampling has put its token already. What is read for that are step tables, so
// `look` may come before `pdl_wait`; `go` writes them, so every kernel of the step must have ended.
// Kernels after it read them before they wait: the next launch must be a plain one (lib/pdl.cuh).
struct Rows {
    // [rows]        sequence of a row; -1: padding, which stays as it is.
    const int* seq;
    //               Null: nothing moves, and the rest may be null too
    const int* tables;       // [seqs, most]  blocks of a sequence
    // [rows]        a row that would leave its table stays, with slot -1
    int* pos;
    // [3, rows]     rotary positions, where they are not `pos`; or null
    int* pos3;
    int* starts;  // [seqs]        position of a sequence's first row
    int* state_in;  // [seqs]        recurrent state to read: what this step wrote
    int* state_out;  // [rows]        and to write: what this step read; -1 for none
    // [rows]        place in the cache of the row's key and value
    long long* slots;
    int rows, most, block_size;
};
struct Move {
    int seq, pos, start, in, out, axis[3];
    long long slot;
    bool stay;
};

__device__ __forceinline__ Move look(const Rows& b, int r) {
    Move m = {};
    m.seq = b.seq ? b.seq[r] : -1;
    if (m.seq < 0)
        return m;
    m.pos = b.pos[r] + 1;
    m.stay = m.pos >= b.most * b.block_size;
    if (m.stay)
        return m;
    m.start = b.starts[m.seq] + 1;
    m.in = b.state_in[m.seq];
    m.out = b.state_out[r];
    if (b.pos3)
        for (int i = 0; i < 3; i++)
            m.axis[i] = b.pos3[i * b.rows + r] + 1;
    const int* blocks = b.tables + (size_t)m.seq * b.most;
    const long long block = blocks[m.pos / b.block_size];
    m.slot = block * b.block_size + m.pos % b.block_size;
    return m;
}
__device__ __forceinline__ void go(const Rows& b, int r, const Move& m) {
    if (m.seq < 0)
        return;
    b.slots[r] = m.stay ? -1 : m.slot;
    if (m.stay)
        return;
    b.pos[r] = m.pos;
    b.starts[m.seq] = m.start;
    if (b.pos3)
        for (int i = 0; i < 3; i++)
            b.pos3[i * b.rows + r] = m.axis[i];
    if (m.out >= 0) {
        b.state_out[r] = m.in;
        b.state_in[m.seq] = m.out;
    }
}
