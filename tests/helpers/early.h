// Kernels that start before those before them have written anything, on the emulator (tests/test_races.py puts this into emulate.h): what may not have been
// written yet reads as 0xFF until a block has waited, copies that began before the wait included.
struct Region { unsigned char* at; const unsigned char* mask; size_t n; };
inline const Region* regions;
inline int many;
inline bool watched, waited, triggered, early;
inline std::vector<std::vector<unsigned char>> truth, kept;
inline void hide() {
    truth.resize(many); kept.clear(); kept.reserve(1 << 18);
    for (int i = 0; i < many; i++) {
        truth[i].assign(regions[i].at, regions[i].at + regions[i].n);
        for (size_t k = 0; k < regions[i].n; k++) regions[i].at[k] |= regions[i].mask[k];
    }
    waited = false;
}
inline void show() {
    if (waited) return;
    waited = true;
    for (int i = many; i--;) std::memcpy(regions[i].at, truth[i].data(), regions[i].n);
}
inline void pdl_wait() {
    if (!watched) return;
    for (auto& c : copies[current]) if (c.on) { kept.emplace_back((unsigned char*)c.from, (unsigned char*)c.from + c.bytes); c.from = kept.back().data(); }
    barrier();
    show();
}
inline void pdl_trigger() { triggered = true; if (!waited) early = true; }
inline bool run_block() {
    if (!watched) return run_threads();
    hide();
    const bool r = run_threads();
    show();
    return r;
}
