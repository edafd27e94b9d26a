#pragma once
// Copies of boxes of a tensor of 16-bit numbers from global to shared memory (PTX
// cp.async.bulk.tensor), which one thread asks for; what is said of them in lib/bulk.cuh holds.
//   TensorMap        argument of a kernel, const __grid_constant__: what `tensor_map` of page
//                    card.card has made of an array, its axes, and the size of a box
//   box_copy<TEAM>(to, map, row, block, head, b)    of a tensor of four axes: 64 columns, rows,
//                    blocks of 64 columns, and heads; the box that begins there. Rows of 128 bytes,
//                    16-byte piece i of row r at i ^ r % 8, `to` at a multiple of 1,024 bytes. Rows
//                    before the first or after the last one there is are zeros. It comes to the
//                    same place of every block of the team, and to its barrier `b`
//   meet_arrive_of<TEAM>(b, m)      meet_arrive at the barrier of member m
// Only where the kernel is made for Hopper (sm_90a), and on the emulator.
#include "lib/bulk.cuh"

#if defined(ATLAS_EMULATE)
struct TensorMap {
    unsigned char bytes[128];
};
// What `bytes` are there: steps in bytes, of all axes but the first
struct EmulatedMap {
    unsigned long long base, size[4], step[3];
    unsigned box[4];
};
#define __grid_constant__
// Boxes of one thread, and what they would have been
inline void box_of(const TensorMap& map, const int* first, unsigned char* to) {
    EmulatedMap m;
    memcpy(&m, map.bytes, sizeof m);
    const unsigned rows = m.box[1] * m.box[2] * m.box[3];
    for (unsigned n = 0; n < rows; n++) {
        const long long at[] = {first[1] + n % m.box[1],
                first[2] + n / m.box[1] % m.box[2],
                first[3] + n / m.box[1] / m.box[2]};
        bool in = true;
        for (int a = 0; a < 3; a++)
            in &= at[a] >= 0 && at[a] < (long long)m.size[a + 1];
        const unsigned char* from = (const unsigned char*)m.base;
        for (int a = 0; a < 3; a++)
            from += at[a] * (long long)m.step[a];
        for (unsigned piece = 0; piece < 8; piece++) {
            unsigned char* const p = to + n * 128 + (piece ^ n % 8) * 16;
            if (in)
                memcpy(p, from + piece * 16, 16);
            else
                memset(p, 0, 16);
        }
    }
}
#else
struct __align__(64) TensorMap {
    unsigned char bytes[128];
};
#endif

template <int TEAM_OF_BLOCKS>
__device__ __forceinline__ void box_copy(
        void* to, const TensorMap& map, int row, int block, int head,
        Meeting* b) {
#if __CUDA_ARCH__ >= 900
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    const unsigned meet = (unsigned)__cvta_generic_to_shared(b);
#define BOX_COPY \
    "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx:" \
    ":" \
    "bytes"
    if (TEAM_OF_BLOCKS > 1)
        asm volatile(BOX_COPY
                ".multicast::cluster [%0], [%1, {%4, %2, %7, %3}], [%5], %6;" ::
                        "r"(at),
                "l"(&map), "r"(row), "r"(head), "r"(0), "r"(meet),
                "h"((short)((1 << TEAM_OF_BLOCKS) - 1)), "r"(block)
                : "memory");
    else
        asm volatile(BOX_COPY " [%0], [%1, {%4, %2, %6, %3}], [%5];" ::"r"(at),
                "l"(&map), "r"(row), "r"(head), "r"(0), "r"(meet), "r"(block)
                : "memory");
#elif defined(ATLAS_EMULATE)
    EmulatedMap m;
    memcpy(&m, map.bytes, sizeof m);
    if (late_many == 256 || (size_t)to % 16 || m.box[0] != 64)
        emu::trap();
    const unsigned bytes = 128 * m.box[1] * m.box[2] * m.box[3];
    void* const held = __builtin_malloc(bytes);
    const int first[] = {0, row, block, head};
    box_of(map, first, (unsigned char*)held);
    memset(to, 0xFF, bytes);
    late_copies[late_many++] = {to, held, bytes, b};
#endif
}
template <int TEAM_OF_BLOCKS>
__device__ __forceinline__ void meet_arrive_of(Meeting* b, int m) {
#if __CUDA_ARCH__ >= 900
    if (TEAM_OF_BLOCKS > 1) {
        const unsigned at = (unsigned)__cvta_generic_to_shared(b);
        asm volatile(
                "{\n .reg .b32 p;\n mapa.shared::cluster.u32 p, %0, %1;\n"
                " mbarrier.arrive.shared::cluster.b64 _, [p];\n}" ::"r"(at),
                "r"(m)
                : "memory");
        return;
    }
#endif
    meet_arrive(b);
}
