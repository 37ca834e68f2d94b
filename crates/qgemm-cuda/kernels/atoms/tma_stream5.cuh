// 5D TMA with L2 evict-first (`tma_stream.cuh`).
#pragma once
#include "atoms/tma_stream.cuh"

#if QG_VARIANT >= 90
// cp.async.bulk.tensor: as `cp_async_bulk_tensor_5d`.
QG_DEVICE void cp_async_bulk_tensor_5d_stream(u8* shared, const void* map, const i32 (&at)[5], u64* barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.5d" QG_OWN_SHARED ".global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(shared_address(shared)),
                 "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]), "r"(shared_address(barrier)), "l"(policy)
                 : "memory");
}
#endif
