// Lanes vote until they agree, on a value
// that never changes.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/warp.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    const u32 thread = thread_index();
    const u32 value = ld_global_u32(p.in + thread * 4);
    u32 odd = 0;
    do {
        odd = ballot(value % 2 == 1);  // FAULT
    } while (!QG_FIXED && odd != 0xffffffffu);
    st_global_u32(p.out + thread * 4, odd);
}
