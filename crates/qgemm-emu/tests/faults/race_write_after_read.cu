// Rotates words in place. No barrier separates the
// reads from the writes.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    u32* shared = reinterpret_cast<u32*>(dynamic_shared());
    const u32 thread = thread_index();
    st_shared(shared + thread, ld_global_u32(p.in + thread * 4));
    cta_barrier();
    const u32 value = ld_shared(shared + (thread + 1) % cta_threads());
#if QG_FIXED
    cta_barrier();
#endif
    st_shared(shared + thread, value);  // FAULT
    cta_barrier();
    st_global_u32(p.out + thread * 4, ld_shared(shared + thread));
}
