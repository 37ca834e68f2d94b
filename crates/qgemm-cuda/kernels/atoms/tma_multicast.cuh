// TMA multicast: a tile for several CTAs of a cluster.
// The tile has the same shared offset in each CTA. Its bytes
// complete on each CTA's barrier at the offset of `barrier`.
// Bit r of `ctas` selects the CTA of rank r.
#pragma once
#include "atoms/tma.cuh"

#if QG_VARIANT == 90
// cp.async.bulk.tensor…multicast::cluster, otherwise as
// `cp_async_bulk_tensor_5d`.
QG_DEVICE void cp_async_bulk_tensor_5d_multicast(u8* shared, const void* map, const i32 (&at)[5], u64* barrier, u32 ctas) {
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
                 "[%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(shared_address(shared)),
                 "l"(map), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]), "r"(shared_address(barrier)),
                 "h"((unsigned short)ctas)
                 : "memory");
}
#endif
