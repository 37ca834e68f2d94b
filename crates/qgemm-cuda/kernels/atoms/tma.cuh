// The copy engine (TMA): whole tiles between global and shared memory, issued by one thread.
#pragma once
#include "atoms/shared_address.cuh"

#if QG_VARIANT >= 90
// The block's own shared memory as the destination. On Hopper it is named as part of the cluster's, which every compiler for it takes; on
// consumer Blackwell ptxas adds a call for other blocks' memory then, for which it drops `setmaxnreg` (C7506). The name of the own
// memory is of PTX ISA 8.6.
#if QG_VARIANT >= 120
#define QG_OWN_SHARED ".shared::cta"
#else
#define QG_OWN_SHARED ".shared::cluster"
#endif

// cp.async.bulk.tensor: the tile of the tensor map `map` whose first element has coordinates (x, y), x along the
// contiguous dimension. What lies outside the tensor becomes zero, and counts in the bytes that complete on `barrier`.
// `map` is the 128 bytes that cuTensorMapEncodeTiled writes, at a multiple of 64, in global, constant or parameter
// memory; box size and swizzle are written there. `shared` is at a multiple of 128, with swizzles of that of their
// pattern (1024 bytes for the 128-byte swizzle).
QG_DEVICE void cp_async_bulk_tensor_2d(u8* shared, const void* map, i32 x, i32 y, u64* barrier) {
    asm volatile("cp.async.bulk.tensor.2d" QG_OWN_SHARED ".global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(shared)),
                 "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier))
                 : "memory");
}
// cp.async.bulk: `bytes` neighbouring bytes, which complete on `barrier`. Both addresses and the size are multiples of 16.
QG_DEVICE void cp_async_bulk(u8* shared, const u8* global, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk" QG_OWN_SHARED ".global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
// fence.proxy.async: orders this thread's own accesses to shared memory before what the copy engine and the matrix
// units do there afterwards.
QG_DEVICE void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#endif
