// TMA with L2 evict-first, for memory that is read once.
// L2 then keeps recent writes and shared operands instead.
#pragma once
#include "atoms/tma.cuh"

#if QG_VARIANT >= 90
// createpolicy: the evict-first policy for L2 cache hints.
QG_DEVICE u64 l2_evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// cp.async.bulk.tensor: as `cp_async_bulk_tensor_3d`.
QG_DEVICE void cp_async_bulk_tensor_3d_stream(u8* shared, const void* map, i32 x, i32 y, i32 matrix, u64* barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.3d" QG_OWN_SHARED ".global.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3, %4}], [%5], %6;" ::"r"(shared_address(shared)),
                 "l"(map), "r"(x), "r"(y), "r"(matrix), "r"(shared_address(barrier)), "l"(policy)
                 : "memory");
}
#endif
