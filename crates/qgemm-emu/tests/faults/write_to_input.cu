// Computes in place, in an operand
// with read access.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    const u32 thread = thread_index();
    const u32 value = 2 * ld_global_u32(p.in + thread * 4);
#if QG_FIXED
    u8* to = p.out;
#else
    u8* to = const_cast<u8*>(p.in);
#endif
    st_global_u32(to + thread * 4, value);  // FAULT
}
