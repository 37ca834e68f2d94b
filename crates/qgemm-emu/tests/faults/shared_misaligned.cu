// A two-word access at an odd word.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    u32* shared = reinterpret_cast<u32*>(dynamic_shared());
    const u32 thread = thread_index();
    st_shared(shared + thread, ld_global_u32(p.in + thread * 4));
    cta_barrier();
    if (thread % 2 == 1) return;
#if QG_FIXED
    const u32* from = shared + thread;
#else
    const u32* from = shared + thread + 1;
#endif
    const u32x2 pair = ld_shared(reinterpret_cast<const u32x2*>(from));  // FAULT
    st_global_u32(p.out + thread * 2, pair.x + pair.y);
}
