// Reads its own results by `ld.global.nc`, which
// does not see writes.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    const u32 thread = thread_index();
    st_global_u32(p.out + thread * 4, ld_global_u32(p.in + thread * 4) + 1);
#if QG_FIXED
    const u32 value = ld_global_u32(p.out + thread * 4);
#else
    const u32 value = ld_global_stream_u32(p.out + thread * 4);  // FAULT
#endif
    st_global_u32(p.out + thread * 4, value * 2);
}
