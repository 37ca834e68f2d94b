// TMA of tiles in a batch of matrices: 3D tensor maps.
#pragma once
#include "atoms/tma.cuh"

#if QG_VARIANT >= 90
// cp.async.bulk.tensor: `cp_async_bulk_tensor_2d` for matrix
// `matrix` of the map.
QG_DEVICE void cp_async_bulk_tensor_3d(u8* shared, const void* map, i32 x, i32 y, i32 matrix, u64* barrier) {
    asm volatile("cp.async.bulk.tensor.3d" QG_OWN_SHARED ".global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(shared)),
                 "l"(map), "r"(x), "r"(y), "r"(matrix), "r"(shared_address(barrier))
                 : "memory");
}
#endif
