// CTAs draw tickets, but read the counter
// without an atomic.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
#if QG_FIXED
    const u32 ticket = atomic_add_relaxed(p.counter, 1);
#else
    const u32 ticket = ld_global_u32(reinterpret_cast<const u8*>(p.counter));  // FAULT
    atomic_add_relaxed(p.counter, 1);
#endif
    st_global_u32(p.out + ticket * 4, ld_global_u32(p.in + ticket * 4));
}
