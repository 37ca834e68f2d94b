// Fix-up of a split tile with a relaxed
// counter, without a fence before the reads of
// partial accumulators.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    u32* shared = reinterpret_cast<u32*>(dynamic_shared());
    const u32 thread = thread_index();
    const u32 ctas = grid_ctas().x, cta = cta_index().x;
    st_global_u32(p.partials + (cta * 32 + thread) * 4, ld_global_u32(p.in + thread * 4) + cta);
    cta_barrier();
    if (thread == 0) {
        fence_gpu();
        const u32 before = atomic_add_relaxed(p.counter, 1);
#if QG_FIXED
        fence_gpu();
#endif
        st_shared(shared, (u32)(before == ctas - 1));
    }
    cta_barrier();
    if (ld_shared(shared)) {
        u32 sum = 0;
        for (u32 c = 0; c < ctas; c++) sum += ld_global_u32(p.partials + (c * 32 + thread) * 4);  // FAULT
        st_global_u32(p.out + thread * 4, sum);
    }
}
