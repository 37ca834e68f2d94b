// Half of the warp does not reach a
// matrix instruction.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/mma.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    const u32 thread = thread_index();
    const u32 ones[4] = {0x3c003c00u, 0x3c003c00u, 0x3c003c00u, 0x3c003c00u};
    float d[4] = {(float)thread, 0, 0, 0};
#if QG_FIXED
    const u32 lanes = 32;
#else
    const u32 lanes = 16;
#endif
    if (thread < lanes) mma_m16n8k16_f16(d, ones, {ones[0], ones[1]});  // FAULT
    st_global_u32(p.out + thread * 4, (u32)d[0]);
}
