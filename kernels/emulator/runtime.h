#pragma once
// What runs a block on the emulator: fibers that take turns, and copies that arrive
// late. Compiled once; each kernel's library has it, and variables of its own.
#include "emulate.h"
#include <stdlib.h>
#include <vector>
#include <sys/mman.h>
#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace emu {
constexpr int MOST = 1024,
              STACK = 192 << 10;  // threads a block, bytes of a stack
struct Warp {
    uint64_t shown[32][WORDS];  // by each lane
    uint64_t seen[8][32][WORDS];  // what was shown in the last exchanges
    unsigned took[8];  // part in each of them
    int next, words;
    unsigned arrived, alive;
    int given[32];  // the exchange that a lane came from
    unsigned long long turn[32];
};
struct Fiber {
    void* sp;
    bool done;
};
Fiber fibers[MOST];
Warp warps[MOST / 32];
char* stacks;
void* home;
int current;
static int threads, live, waiting;
unsigned long long progress;
static unsigned long long generation, passes;
uint3 thread, block;
dim3 size, grid;
alignas(128) unsigned char dynamic[232 << 10];
void (*body)(void*);
void* argument;
const char* fault;

// From one fiber to another: what a call has to keep, on the stack. FRAME: words of
// that, of which RETURN is where it goes on.
#if defined(__x86_64__)
#define EMU_SWITCH
constexpr int FRAME = 8,
              RETURN = 6;  // one more, so that the stack is as after a call
asm(R"(
.text
.weak emu_switch
.hidden emu_switch
emu_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
)");
#elif defined(__aarch64__)
#define EMU_SWITCH
constexpr int FRAME = 20, RETURN = 11;
asm(R"(
.text
.weak emu_switch
.hidden emu_switch
emu_switch:
    sub sp, sp, #160
    stp x19, x20, [sp]
    stp x21, x22, [sp, #16]
    stp x23, x24, [sp, #32]
    stp x25, x26, [sp, #48]
    stp x27, x28, [sp, #64]
    stp x29, x30, [sp, #80]
    stp d8, d9, [sp, #96]
    stp d10, d11, [sp, #112]
    stp d12, d13, [sp, #128]
    stp d14, d15, [sp, #144]
    mov x9, sp
    str x9, [x0]
    mov sp, x1
    ldp x19, x20, [sp]
    ldp x21, x22, [sp, #16]
    ldp x23, x24, [sp, #32]
    ldp x25, x26, [sp, #48]
    ldp x27, x28, [sp, #64]
    ldp x29, x30, [sp, #80]
    ldp d8, d9, [sp, #96]
    ldp d10, d11, [sp, #112]
    ldp d12, d13, [sp, #128]
    ldp d14, d15, [sp, #144]
    add sp, sp, #160
    ret
)");
#endif
#if defined(EMU_SWITCH)
extern "C" void emu_switch(void** from, void* to);
#else
ucontext_t contexts[MOST], main_context;
#endif

Warp& warp() { return warps[current / 32]; }
void yield() {
#if defined(EMU_SWITCH)
    emu_switch(&fibers[current].sp, home);
#else
    swapcontext(&contexts[current], &main_context);
#endif
}
void release() {
    if (live && waiting == live) {
        waiting = 0;
        generation++;
        progress++;
    }
}
void entry() {
    body(argument);
    fibers[current].done = true;
    warp().alive &= ~(1u << lane());
    live--;
    progress++;
    release();
    yield();
}
void barrier() {
    const unsigned long long g = generation;
    waiting++;
    progress++;
    release();
    while (generation == g)
        yield();
}
int came[16], size_of[16], turn[16];
void barrier(int id, int count) {
    const int now = turn[id];
    if (came[id] && size_of[id] != count)
        fault = "groups of two sizes meet at one barrier";
    size_of[id] = count;
    progress++;
    if (++came[id] == count) {
        came[id] = 0;
        turn[id]++;
    }
    while (turn[id] == now)
        yield();
}
bool complete(unsigned mask) {  // a lane that has ended is no longer waited for
    Warp& w = warp();
    const unsigned need = mask & w.alive;
    if ((w.arrived & need) != need)
        return false;
    w.next = (w.next + 1) % 8;
    w.took[w.next] = need;
    for (int i = 0; i < 32; i++)
        if (need >> i & 1) {
            memcpy(w.seen[w.next][i], w.shown[i], w.words * 8);
            w.given[i] = w.next;
            w.turn[i]++;
        }
    w.arrived &= ~need;
    progress++;
    return true;
}
const void* exchange(unsigned mask, const void* v, unsigned bytes) {
    Warp& w = warp();
    const int l = lane(), words = (bytes + 7) / 8;
    memcpy(w.shown[l], v, bytes);
    w.words = w.words > words ? w.words
                              : words;  // as many as anybody has shown so far
    w.arrived |= 1u << l;
    progress++;
    const unsigned long long turn = w.turn[l];
    while (w.turn[l] == turn && !complete(mask))
        yield();
    return w.seen[w.given[l]][0];
}
unsigned alive() { return warp().alive; }
unsigned took() { return warp().took[warp().given[lane()]]; }

// Copies that run beside the threads arrive as late as they may: when somebody waits
// for their group.
struct Copy {
    void* to;
    const void* from;
    int bytes;
    bool on;
};
std::vector<Copy> copies[MOST];
std::vector<size_t> groups[MOST];  // where each committed group of a thread ends
void copy(void* to, const void* from, int bytes, bool on) {
    if ((size_t)to % bytes || (on && (size_t)from % bytes)) {
        fprintf(stderr,
                "a copy of %d bytes from %p to %p, which are no multiples\n",
                bytes, from, to);
        abort();
    }
    memset(to, 0xFF, bytes);  // nobody may read what was there
    copies[current].push_back({to, from, bytes, on});
}
void commit() { groups[current].push_back(copies[current].size()); }
void wait(int newest) {
    auto& c = copies[current];
    auto& g = groups[current];
    if ((int)g.size() <= newest)
        return;
    const size_t keep = g.size() - newest;
    const size_t n = g[keep - 1];
    for (size_t i = 0; i < n; i++)
        if (c[i].on)
            memcpy(c[i].to, c[i].from, c[i].bytes);
        else
            memset(c[i].to, 0, c[i].bytes);
    c.erase(c.begin(), c.begin() + n);
    g.erase(g.begin(), g.begin() + keep);
    for (auto& e : g)
        e -= n;
}

bool run_threads() {
    live = threads;
    waiting = 0;
    generation = 0;
    memset(came, 0, sizeof came);
    for (int i = 0; i < (threads + 31) / 32; i++) {
        memset(&warps[i], 0, sizeof(Warp));
        const int n = threads - i * 32;
        warps[i].alive = n >= 32 ? ~0u : (1u << n) - 1;
    }
    for (int i = 0; i < threads; i++) {
        fibers[i].done = false;
        copies[i].clear();
        groups[i].clear();
#if defined(EMU_SWITCH)
        void** sp = (void**)(stacks + (size_t)(i + 1) * STACK - 64) - FRAME;
        memset(sp, 0, FRAME * sizeof *sp);
        sp[RETURN] = (void*)entry;
        fibers[i].sp = sp;
#else
        getcontext(&contexts[i]);
        contexts[i].uc_stack.ss_sp = stacks + (size_t)i * STACK;
        contexts[i].uc_stack.ss_size = STACK;
        contexts[i].uc_link = &main_context;
        makecontext(&contexts[i], (void (*)())entry, 0);
#endif
    }
    while (live) {
        const unsigned long long before = progress;
        const bool down = ++passes
                % 2;  // who goes first changes, so that nobody can rely on it
        for (int i = 0; i < threads; i++) {
            current = down ? threads - 1 - i : i;
            if (fibers[current].done)
                continue;
            thread = {(unsigned)current % size.x,
                    (unsigned)current / size.x % size.y,
                    (unsigned)current / (size.x * size.y)};
#if defined(EMU_SWITCH)
            emu_switch(&home, fibers[current].sp);
#else
            swapcontext(&main_context, &contexts[current]);
#endif
        }
        if (fault)
            return false;
        if (progress == before) {
            fault = "threads wait for each other at a barrier or a warp "
                    "primitive";
            return false;
        }
    }
    return true;
}
// Kernels that start before those before them have written anything, where somebody
// calls `watch` before a launch (tests/test_races.py): what may not have been written
// yet reads as 0xFF until a block has waited, copies that began before the wait
// included.
struct Region {
    unsigned char* at;
    const unsigned char* mask;
    size_t n;
};
const Region* regions;
int many;
bool watched, waited, triggered, early;
std::vector<std::vector<unsigned char>> truth, kept;
void hide() {
    truth.resize(many);
    kept.clear();
    kept.reserve(1 << 18);
    for (int i = 0; i < many; i++) {
        truth[i].assign(regions[i].at, regions[i].at + regions[i].n);
        for (size_t k = 0; k < regions[i].n; k++)
            regions[i].at[k] |= regions[i].mask[k];
    }
    waited = false;
}
void show() {
    if (waited)
        return;
    waited = true;
    for (int i = many; i--;)
        memcpy(regions[i].at, truth[i].data(), regions[i].n);
}
void pdl_wait() {
    if (!watched)
        return;
    for (auto& c : copies[current])
        if (c.on) {
            kept.emplace_back(
                    (unsigned char*)c.from, (unsigned char*)c.from + c.bytes);
            c.from = kept.back().data();
        }
    barrier();
    show();
}
void pdl_trigger() {
    triggered = true;
    if (!waited)
        early = true;
}
bool run_block() {
    if (!watched)
        return run_threads();
    hide();
    const bool r = run_threads();
    show();
    return r;
}

// Every kernel has its own, and keeps them. Only what is touched counts as memory:
// some hundred kernels' worth of address space would else be more than a fork may
// copy.
char* new_stacks() {
    void* p = mmap(
            nullptr, (size_t)MOST * STACK, PROT_READ | PROT_WRITE,
            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : (char*)p;
}
const char* start(
        void (*f)(void*), void* a, const unsigned* g, const unsigned* b,
        unsigned shared) {
    grid = {g[0], g[1], g[2]};
    size = {b[0], b[1], b[2]};
    threads = b[0] * b[1] * b[2];
    fault = nullptr;
    triggered = early = false;
    if (threads > MOST || shared > sizeof(dynamic))
        return "the block is too large";
    if (!stacks && !(stacks = new_stacks()))
        return "there is no memory for the stacks";
    body = f;
    argument = a;
    for (unsigned z = 0; z < g[2] && !fault; z++)
        for (unsigned y = 0; y < g[1] && !fault; y++)
            for (unsigned x = 0; x < g[0] && !fault; x++) {
                block = {x, y, z};
                memset(dynamic, 0xFF, shared);
                run_block();
            }
    watched = false;
    return fault;
}
void trap() {
    fprintf(stderr, "__trap\n");
    abort();
}
}  // namespace emu
extern "C" __attribute__((visibility("default"))) void watch(
        const void* regions, int many) {
    emu::regions = (const emu::Region*)regions;
    emu::many = many;
    emu::watched = true;
}
extern "C" __attribute__((visibility("default"))) int said() {
    return emu::triggered | emu::early << 1;
}
