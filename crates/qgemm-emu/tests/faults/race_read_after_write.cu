// The first thread writes what all read.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    u32* shared = reinterpret_cast<u32*>(dynamic_shared());
    const u32 thread = thread_index();
    if (thread == 0) st_shared(shared, ld_global_u32(p.in));
#if QG_FIXED
    cta_barrier();
#endif
    st_global_u32(p.out + thread * 4, ld_shared(shared) + thread);  // FAULT
}
