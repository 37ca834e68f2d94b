// A thread waits only for its own copies. Copies of other
// threads also need a barrier.
#include "atoms/cp_async.cuh"
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    u32* shared = reinterpret_cast<u32*>(dynamic_shared());
    const u32 thread = thread_index();
    cp_async_4(reinterpret_cast<u8*>(shared + thread), p.in + thread * 4, 4);
    cp_async_commit_group();
    cp_async_wait_group<0>();
#if QG_FIXED
    cta_barrier();
#endif
    const u32 neighbour = thread == 0 ? 0 : thread - 1;
    st_global_u32(p.out + thread * 4, ld_shared(shared + neighbour));  // FAULT
}
