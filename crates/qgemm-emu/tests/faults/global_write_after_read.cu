// All threads read one word. The last overwrites it
// without waiting for them.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    const u32 thread = thread_index();
    u8* word = reinterpret_cast<u8*>(p.counter);
    const u32 value = ld_global_u32(word);
#if QG_FIXED
    cta_barrier();
#endif
    if (thread == cta_threads() - 1) st_global_u32(word, ld_global_u32(p.in));  // FAULT
    st_global_u32(p.out + thread * 4, value);
}
