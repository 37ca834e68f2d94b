// Every thread reads its right neighbour's number. The last
// thread has no neighbour.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    const u32 thread = thread_index();
#if QG_FIXED
    const u32 next = (thread + 1) % cta_threads();
#else
    const u32 next = thread + 1;
#endif
    st_global_u32(p.out + thread * 4, ld_global_u32(p.in + next * 4));  // FAULT
}
