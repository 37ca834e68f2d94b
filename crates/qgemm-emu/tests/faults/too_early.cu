// An early-started kernel reads results that the previous
// kernel may not have written.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    const u32 thread = thread_index();
    griddepcontrol_launch_dependents();
#if QG_FIXED
    griddepcontrol_wait();
#endif
    const u32 value = ld_global_u32(p.in + thread * 4);  // FAULT
    griddepcontrol_wait();
    st_global_u32(p.out + thread * 4, value);
}
