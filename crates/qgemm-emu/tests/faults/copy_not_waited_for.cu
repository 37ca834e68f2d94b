// Reads the destination of an unfinished asynchronous copy.
#include "atoms/cp_async.cuh"
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    u8* mine = dynamic_shared() + thread_index() * 16;
    cp_async_16(mine, p.in + thread_index() * 16, 16);
    cp_async_commit_group();
#if QG_FIXED
    cp_async_wait_group<0>();
#else
    cp_async_wait_group<1>();
#endif
    const u32x4 v = ld_shared(reinterpret_cast<const u32x4*>(mine));  // FAULT
    st_global_u32(p.out + thread_index() * 4, v.x ^ v.w);
}
