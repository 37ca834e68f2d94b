// Only the first CTA fills shared memory. The second
// reads what is left of it.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    u32* shared = reinterpret_cast<u32*>(dynamic_shared());
    const u32 thread = thread_index();
    const u32 cta = cta_index().x;
    if (cta == 0 || QG_FIXED) st_shared(shared + thread, ld_global_u32(p.in + thread * 4));
    cta_barrier();
    const u32 value = ld_shared(shared + (thread ^ 1));  // FAULT
    if (cta == 1) st_global_u32(p.out + thread * 4, value);
}
