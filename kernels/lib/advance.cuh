#pragma once
// A row of a decode step goes on to its sequence's next position. What is read for that are step tables, so `look` may come before `pdl_wait`;
// `go` writes them, so every kernel of the step must have ended.
struct Rows {  // of kernels/advance_rows.cu; seq null: nothing moves
    const int *seq, *active, *limit, *tables;
    int *pos, *pos3, *starts, *state_in, *state_out;
    long long* slots;
    int rows, most, block_size;
};
struct Move { int seq, pos, start, in, out, axis[3]; long long slot; bool stay; };

__device__ __forceinline__ Move look(const Rows& b, int r) {
    Move m = {};
    m.seq = b.seq ? b.seq[r] : -1;
    if (m.seq < 0 || (b.active && !b.active[r])) { m.seq = -1; return m; }
    m.pos = b.pos[r] + 1;
    m.stay = m.pos >= min(b.limit ? b.limit[m.seq] : b.most * b.block_size, b.most * b.block_size);
    if (m.stay) return m;
    m.start = b.starts[m.seq] + 1;
    m.in = b.state_in[m.seq];
    m.out = b.state_out[r];
    if (b.pos3) for (int i = 0; i < 3; i++) m.axis[i] = b.pos3[i * b.rows + r] + 1;
    m.slot = (long long)b.tables[(size_t)m.seq * b.most + m.pos / b.block_size] * b.block_size + m.pos % b.block_size;
    return m;
}
__device__ __forceinline__ void go(const Rows& b, int r, const Move& m) {
    if (m.seq < 0) return;
    b.slots[r] = m.stay ? -1 : m.slot;
    if (m.stay) return;
    b.pos[r] = m.pos;
    b.starts[m.seq] = m.start;
    if (b.pos3) for (int i = 0; i < 3; i++) b.pos3[i * b.rows + r] = m.axis[i];
    if (m.out >= 0) { b.state_out[r] = m.in; b.state_in[m.seq] = m.out; }
}
