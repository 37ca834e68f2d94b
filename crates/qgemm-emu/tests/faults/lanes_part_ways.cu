// Lanes of a warp shuffle at two different instructions.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/warp.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    const u32 thread = thread_index();
    u32 value = ld_global_u32(p.in + thread * 4);
#if QG_FIXED
    value = shfl_xor_u32(value, 2);
#else
    if (thread % 2 == 0)
        value = shfl_xor_u32(value, 2);
    else
        value = shfl_xor_u32(value, 2);  // FAULT
#endif
    st_global_u32(p.out + thread * 4, value);
}
