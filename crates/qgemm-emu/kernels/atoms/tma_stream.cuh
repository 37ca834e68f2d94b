// TMA with L2 evict-first.
// L2 policies are not emulated.
#pragma once
#include "atoms/tma.cuh"

#if QG_VARIANT >= 90
QG_DEVICE u64 l2_evict_first() { return 0; }
QG_DEVICE void cp_async_bulk_tensor_3d_stream(u8* shared, const void* map, i32 x, i32 y, i32 matrix, u64* barrier, u64, QG_AT) {
    const i32 at[3] = {x, y, matrix};
    emu->tensor_copy(shared, map, at, 3, barrier, file, line);
}
#endif
