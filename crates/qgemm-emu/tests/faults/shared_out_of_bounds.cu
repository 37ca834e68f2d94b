// One word of padding too many.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    u32* shared = reinterpret_cast<u32*>(dynamic_shared());
    const u32 thread = thread_index();
#if QG_FIXED
    const u32 place = thread;
#else
    const u32 place = thread + thread / 32;
#endif
    st_shared(shared + place, ld_global_u32(p.in + thread * 4));  // FAULT
    cta_barrier();
    st_global_u32(p.out + thread * 4, ld_shared(shared + place));
}
