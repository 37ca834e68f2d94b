// Every CTA waits for all others. Some CTAs may start only
// when others have ended.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    const u32 cta = cta_index().x;
    atomic_add_acq_rel(p.counter, 1);
#if !QG_FIXED
    while (atomic_add_acq_rel(p.counter, 0) < grid_ctas().x) {}  // FAULT
#endif
    st_global_u32(p.out + cta * 4, ld_global_u32(p.in + cta * 4));
}
