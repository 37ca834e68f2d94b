// TMA of tiles in a batch of matrices.
#pragma once
#include "atoms/tma.cuh"

#if QG_VARIANT >= 90
QG_DEVICE void cp_async_bulk_tensor_3d(u8* shared, const void* map, i32 x, i32 y, i32 matrix, u64* barrier, QG_AT) {
    const i32 at[3] = {x, y, matrix};
    emu->tensor_copy(shared, map, at, 3, barrier, file, line);
}
#endif
