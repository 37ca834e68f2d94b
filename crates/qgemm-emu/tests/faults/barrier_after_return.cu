// One warp returns early, and the
// other waits for it.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    u32* shared = reinterpret_cast<u32*>(dynamic_shared());
    const u32 thread = thread_index();
    const u32 value = ld_global_u32(p.in + thread * 4);
    if (thread >= 32 && !QG_FIXED) return;
    st_shared(shared + thread, value);
    cta_barrier();  // FAULT
    st_global_u32(p.out + thread * 4, ld_shared(shared + (thread ^ 1)));
}
