#pragma once
// Copies of many bytes from global to shared memory that one thread asks for (PTX cp.async.bulk),
// and barriers in shared memory by which others see that they are there, or that nobody reads what
// was (PTX mbarrier). A barrier has phases: it is in phase 0 at first, and in the next one whenever
// as many have arrived as `meet_init` said and all bytes announced have come.
//   meet_init(b, n)            by one thread, for n arrivals a phase
//   meet_ready()               by that thread then; after a barrier of the block others may use
//                              them
//   meet_arrive(b)             what this thread has read before is read
//   meet_arrive_copied(b)      arrive when all copies of lib/async.cuh that this thread asked for
//                              have
//   bulk_expect(b, bytes)      arrive, and announce bytes
//   bulk_copy(to, from, bytes, b)      multiples of 16, addresses too; bulk_copy_once: likewise
//   meet_over(b, parity)       is the phase of that parity (0 for the first) over?
//   meet_wait(b, parity)       until it is
//   RingPlace<N>               where one is who goes through N stages with a barrier each, and its
//                              parity
typedef unsigned long long Meeting;

#if defined(ATLAS_EMULATE)
// A copy reads when it is asked for, spoils what was there at once, and arrives when somebody
// waits.
struct LateCopy {
    void *to, *held;
    unsigned bytes;
    Meeting* b;
};
static LateCopy late_copies[256];
static int late_many;
struct EmulatedMeeting {
    unsigned bytes;
    unsigned short left;
    unsigned char count, phase;
};
static_assert(sizeof(EmulatedMeeting) == sizeof(Meeting), "a barrier is 64 bits");
__device__ inline void meet_change(Meeting* b, int arrivals, int bytes) {
    EmulatedMeeting m;
    memcpy(&m, b, sizeof m);
    m.left -= arrivals;
    m.bytes += bytes;
    if (!m.left && !m.bytes) {
        m.phase ^= 1;
        m.left = m.count;
    }
    memcpy(b, &m, sizeof m);
    emu::progress++;
}
__device__ inline void late_arrive(Meeting* b) {
    for (int i = 0; i < late_many; i++) {
        const LateCopy c = late_copies[i];
        if (c.b != b)
            continue;
        memcpy(c.to, c.held, c.bytes);
        __builtin_free(c.held);
        late_copies[i--] = late_copies[--late_many];
        meet_change(b, 0, -(int)c.bytes);
    }
}
#endif

__device__ __forceinline__ void meet_init(Meeting* b, int n) {
#if defined(__CUDA_ARCH__)
    const unsigned at = (unsigned)__cvta_generic_to_shared(b);
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(at), "r"(n)
            : "memory");
#elif defined(ATLAS_EMULATE)
    const EmulatedMeeting m = {0, (unsigned short)n, (unsigned char)n, 0};
    memcpy(b, &m, sizeof m);
#endif
}
__device__ __forceinline__ void meet_ready() {
#if __CUDA_ARCH__ >= 900
    asm volatile(
            "fence.mbarrier_init.release.cluster;\n "
            "fence.proxy.async.shared::cta;" ::
                    : "memory");
#endif
}
__device__ __forceinline__ void meet_arrive(Meeting* b) {
#if defined(__CUDA_ARCH__)
    const unsigned at = (unsigned)__cvta_generic_to_shared(b);
    asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(at) : "memory");
#elif defined(ATLAS_EMULATE)
    meet_change(b, 1, 0);
#endif
}
__device__ __forceinline__ void meet_arrive_copied(Meeting* b) {
#if defined(__CUDA_ARCH__)
    const unsigned at = (unsigned)__cvta_generic_to_shared(b);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(at)
            : "memory");
#elif defined(ATLAS_EMULATE)
    emu::commit();
    emu::wait(0);
    meet_change(b, 1, 0);
#endif
}
__device__ __forceinline__ void bulk_expect(Meeting* b, unsigned bytes) {
#if __CUDA_ARCH__ >= 900
    const unsigned at = (unsigned)__cvta_generic_to_shared(b);
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(at),
            "r"(bytes)
            : "memory");
#elif defined(ATLAS_EMULATE)
    meet_change(b, 1, bytes);
#endif
}
__device__ __forceinline__ void bulk_copy(
        void* to, const void* from, unsigned bytes, Meeting* b) {
#if __CUDA_ARCH__ >= 900
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    const unsigned meet = (unsigned)__cvta_generic_to_shared(b);
    asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
            "[%0], [%1], "
            "%2, [%3];" ::"r"(at),
            "l"(from), "r"(bytes), "r"(meet)
            : "memory");
#elif defined(__CUDA_ARCH__)  // no such copies: by this thread, who then arrives
    for (unsigned i = 0; i < bytes / 16; i++)
        ((uint4*)to)[i] = ((const uint4*)from)[i];
    meet_arrive(b);
#elif defined(ATLAS_EMULATE)
    if ((size_t)to % 16 || (size_t)from % 16 || bytes % 16)
        emu::trap();
    if (late_many == 256)
        emu::trap();
    void* const held = __builtin_malloc(bytes);
    memcpy(held, from, bytes);
    memset(to, 0xFF, bytes);
    late_copies[late_many++] = {to, held, bytes, b};
#endif
}
__device__ __forceinline__ bool meet_over(Meeting* b, unsigned parity) {
#if defined(__CUDA_ARCH__)
    const unsigned at = (unsigned)__cvta_generic_to_shared(b);
    unsigned over;
    asm volatile(
            "{\n .reg .pred p;\n mbarrier.test_wait.parity.shared.b64 p, [%1], "
            "%2;\n"
            " selp.u32 %0, 1, 0, p;\n}"
            : "=r"(over)
            : "r"(at), "r"(parity)
            : "memory");
    return over;
#elif defined(ATLAS_EMULATE)
    EmulatedMeeting m;
    memcpy(&m, b, sizeof m);
    return m.phase != parity;
#endif
}
// The same for what nobody will read again: it leaves the L2 cache first.
__device__ __forceinline__ void bulk_copy_once(
        void* to, const void* from, unsigned bytes, Meeting* b) {
#if __CUDA_ARCH__ >= 900
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    const unsigned meet = (unsigned)__cvta_generic_to_shared(b);
    asm volatile(
            "{\n .reg .b64 p;\n createpolicy.fractional.L2::evict_first.b64 p, "
            "1.0;\n"
            " cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes."
            "L2:"
            ":cache_"
            "hint"
            " [%0], [%1], %2, [%3], p;\n}" ::"r"(at),
            "l"(from), "r"(bytes), "r"(meet)
            : "memory");
#else
    bulk_copy(to, from, bytes, b);
#endif
}
// The same, for what will be read `again`, or not.
__device__ __forceinline__ void bulk_copy_kept(
        void* to, const void* from, unsigned bytes, Meeting* b, bool again) {
#if __CUDA_ARCH__ >= 900
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    const unsigned meet = (unsigned)__cvta_generic_to_shared(b);
    // policies as createpolicy makes them: evict_normal, evict_first
    const unsigned long long policy = again ? 0x1000000000000000ull
                                            : 0x12F0000000000000ull;
    asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes."
            "L2::"
            "cache_"
            "hint"
            " [%0], [%1], %2, [%3], %4;" ::"r"(at),
            "l"(from), "r"(bytes), "r"(meet), "l"(policy)
            : "memory");
#else
    bulk_copy(to, from, bytes, b);
#endif
}
__device__ __forceinline__ void meet_wait(Meeting* b, unsigned parity) {
#if defined(__CUDA_ARCH__)
    const unsigned at = (unsigned)__cvta_generic_to_shared(b);
    unsigned over;
#if __CUDA_ARCH__ >= 900
#define MEET_ASK "try_wait"  // which sleeps a little
#else
#define MEET_ASK "test_wait"
#endif
    do
        asm volatile("{\n .reg .pred p;\n mbarrier." MEET_ASK
                     ".parity.shared.b64 p, [%1], %2;\n"
                     " selp.u32 %0, 1, 0, p;\n}"
                : "=r"(over)
                : "r"(at), "r"(parity)
                : "memory");
    while (!over);
#elif defined(ATLAS_EMULATE)
    EmulatedMeeting m;
    // some warps are later than others, so that nobody can rely on their pace
    for (int i = 0; i < emu::current / 32 % 4 * 2; i++) {
        emu::progress++;
        emu::yield();
    }
    while (late_arrive(b), memcpy(&m, b, sizeof m), m.phase == parity)
        emu::yield();
#endif
}

// A place in a ring of N stages, and the parity of the phase that is awaited there.
template <int N> struct RingPlace {
    int stage = 0;
    unsigned parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage < N)
            return;
        stage = 0;
        parity ^= 1;
    }
};
