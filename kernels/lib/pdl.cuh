#pragma once
// Programmatic dependent launch: a kernel may start while the one before it is still running, load
// what nobody in the step writes (weights, states of earlier steps), and only then wait. Whoever
// takes part keeps three rules:
//   1. every block that reads or writes an activation calls `pdl_wait` first, so the end of a
//        kernel implies the end of all before it; 2. before `pdl_wait` only weights, step tables
//        and what earlier steps left behind are read; 3. a kernel that lets its successor read the
//        result of its *predecessor* before waiting calls `pdl_trigger` after its own wait.
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#elif defined(ATLAS_EMULATE)
    emu::pdl_trigger();
#endif
}
// Sleep for some `ns`, on Hopper: who comes long before there is anything to do should not stand in
// front of others.
__device__ __forceinline__ void rest(unsigned ns) {
#if __CUDA_ARCH__ == 900
    __nanosleep(ns);
#endif
}
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#elif defined(ATLAS_EMULATE)
    emu::pdl_wait();
#endif
}
