// Consumers request more registers than producers
// release. The SM has enough, but 640 threads are
// launched with fewer.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/registers.cuh"

extern "C" __global__ void __launch_bounds__(640, 1) planted(const __grid_constant__ Params p) {
    const u32 thread = thread_index();
    if (thread < 512) {
        setmaxnreg_inc<QG_FIXED ? 112 : 120>();  // FAULT
        if (thread < 64) st_global_u32(p.out + thread * 4, ld_global_u32(p.in + thread * 4));
    } else {
        setmaxnreg_dec<32>();
    }
}
