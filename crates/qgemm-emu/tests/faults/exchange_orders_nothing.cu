// Fix-up of a split tile by one warp.
// A shuffle tells the lanes of the last arrival,
// but orders no memory.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    const u32 thread = thread_index();
    const u32 ctas = grid_ctas().x, cta = cta_index().x;
    st_global_u32(p.partials + (cta * 32 + thread) * 4, ld_global_u32(p.in + thread * 4) + cta);
    warp_barrier();
    u32 last = 0;
    if (thread == 0) last = atomic_add_acq_rel(p.counter, 1) == ctas - 1;
    last = shfl_idx_u32(last, 0);
#if QG_FIXED
    warp_barrier();
#endif
    if (last) {
        u32 sum = 0;
        for (u32 c = 0; c < ctas; c++) sum += ld_global_u32(p.partials + (c * 32 + thread) * 4);  // FAULT
        st_global_u32(p.out + thread * 4, sum);
    }
}
