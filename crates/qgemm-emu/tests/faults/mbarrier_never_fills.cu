// An mbarrier that expects one arrival
// more than threads.
#include "atoms/launch.cuh"
#include "atoms/mbarrier.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    u64* filled = reinterpret_cast<u64*>(dynamic_shared());
    u32* shared = reinterpret_cast<u32*>(dynamic_shared() + 8);
    const u32 thread = thread_index();
    if (thread == 0) mbarrier_init(filled, QG_FIXED ? 32 : 33);
    cta_barrier();
    st_shared(shared + thread, ld_global_u32(p.in + thread * 4));
    mbarrier_arrive(filled);
    mbarrier_wait(filled, 0);  // FAULT
    st_global_u32(p.out + thread * 4, ld_shared(shared + (thread ^ 1)));
}
