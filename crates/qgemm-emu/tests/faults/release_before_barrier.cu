// Fix-up of a split sum: the first thread says that all partial sums are there, and knows only of its own.
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    u32* shared = reinterpret_cast<u32*>(dynamic_shared());
    const u32 thread = thread_index();
    const u32 blocks = grid_blocks().x, block = block_index().x;
    st_global_u32(p.partials + (block * 32 + thread) * 4, ld_global_u32(p.in + thread * 4) + block);
#if QG_FIXED
    block_barrier();
#endif
    if (thread == 0) st_shared(shared, (u32)(atomic_add_acq_rel(p.counter, 1) == blocks - 1));
    block_barrier();
    if (ld_shared(shared)) {
        u32 sum = 0;
        for (u32 b = 0; b < blocks; b++) sum += ld_global_u32(p.partials + (b * 32 + thread) * 4);  // FAULT
        st_global_u32(p.out + thread * 4, sum);
    }
}
