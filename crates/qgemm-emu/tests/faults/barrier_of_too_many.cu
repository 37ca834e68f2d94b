// One warp waits at a named barrier that
// expects two warps.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    u32* shared = reinterpret_cast<u32*>(dynamic_shared());
    const u32 thread = thread_index();
    if (thread >= 32) return;
#if QG_FIXED
    const u32 threads = 32;
#else
    const u32 threads = 64;
#endif
    st_shared(shared + thread, ld_global_u32(p.in + thread * 4));
    barrier_sync(1, threads);  // FAULT
    st_global_u32(p.out + thread * 4, ld_shared(shared + (thread ^ 1)));
}
