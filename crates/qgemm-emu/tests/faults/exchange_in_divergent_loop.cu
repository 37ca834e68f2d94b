// Lane reduction in a loop that lanes leave
// one after another.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/warp.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    const u32 thread = thread_index();
    const u32 value = ld_global_u32(p.in + thread * 4);
#if QG_FIXED
    const u32 rounds = 32;
#else
    const u32 rounds = thread;
#endif
    u32 sum = 0;
    for (u32 lane = 0; lane < rounds; lane++) sum += shfl_idx_u32(value, lane);  // FAULT
    st_global_u32(p.out + thread * 4, sum);
}
