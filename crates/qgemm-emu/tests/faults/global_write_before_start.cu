// Every thread writes its left neighbour's element. The first
// thread has no neighbour.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    const u32 thread = thread_index();
    const u32 value = ld_global_u32(p.in + thread * 4);
#if QG_FIXED
    if (thread == 0) return;
#endif
    st_global_u32(p.out + thread * 4 - 4, value);  // FAULT
}
