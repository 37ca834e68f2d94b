// TMA of packed weight tiles: 5D tensor maps.
#pragma once
#include "atoms/tma.cuh"

#if QG_VARIANT >= 90
// cp.async.bulk.tensor: as `cp_async_bulk_tensor_2d` in
// five dimensions.
// `at` is the first element, the contiguous dimension first.
QG_DEVICE void cp_async_bulk_tensor_5d(u8* shared, const void* map, const i32 (&at)[5], u64* barrier) {
    asm volatile("cp.async.bulk.tensor.5d" QG_OWN_SHARED ".global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(shared_address(shared)),
                 "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]), "r"(shared_address(barrier))
                 : "memory");
}
#endif
