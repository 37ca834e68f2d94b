// The first warp arrives before it
// writes its numbers.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    u32* shared = reinterpret_cast<u32*>(dynamic_shared());
    const u32 thread = thread_index();
    if (thread < 32) {
        const u32 value = ld_global_u32(p.in + thread * 4);
#if QG_FIXED
        st_shared(shared + thread, value);
        barrier_arrive(1, 64);
#else
        barrier_arrive(1, 64);
        st_shared(shared + thread, value);
#endif
    } else {
        barrier_sync(1, 64);
        st_global_u32(p.out + thread % 32 * 4, ld_shared(shared + thread % 32));  // FAULT
    }
}
