// Matrix rows with a stride of eight bytes. Each row
// must be 16-byte aligned.
#include "atoms/launch.cuh"
#include "atoms/ldmatrix.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"

extern "C" __global__ void planted(const __grid_constant__ Params p) {
    u8* shared = dynamic_shared();
    const u32 thread = thread_index();
    st_shared(reinterpret_cast<u32*>(shared + thread * 4), ld_global_u32(p.in + thread * 4));
    cta_barrier();
#if QG_FIXED
    const u8* row = shared + thread % 8 * 16;
#else
    const u8* row = shared + thread % 8 * 8;
#endif
    u32 d[1];
    ldmatrix_x1(d, row);  // FAULT
    st_global_u32(p.out + thread * 4, d[0]);
}
