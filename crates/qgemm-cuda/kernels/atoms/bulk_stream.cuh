// Bulk copies with L2 evict-first, for memory that is read once.
// The policy comes from `l2_evict_first`
// (`atoms/tma_stream.cuh`).
#pragma once
#include "atoms/tma_stream.cuh"

#if QG_VARIANT >= 90
// cp.async.bulk: as `cp_async_bulk`.
QG_DEVICE void cp_async_bulk_stream(u8* shared, const u8* global, u32 bytes, u64* barrier, u64 policy) {
    asm volatile("cp.async.bulk" QG_OWN_SHARED ".global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
                 : "memory");
}
#endif
