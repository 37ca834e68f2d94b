// TMA: asynchronous bulk copies of whole tiles from global to shared memory, issued by one thread.
#pragma once
#include "atoms/shared_address.cuh"

#if QG_VARIANT >= 90
// The destination is the CTA's own shared memory. On Hopper it is named as part of the cluster's, which every compiler
// for Hopper takes. On consumer Blackwell ptxas adds a call for other CTAs' memory then, and drops `setmaxnreg`
// (C7506). The name of the CTA's own memory needs PTX ISA 8.6.
#if QG_VARIANT >= 120
#define QG_OWN_SHARED ".shared::cta"
#else
#define QG_OWN_SHARED ".shared::cluster"
#endif

// cp.async.bulk.tensor: copies the tile of tensor map `map` whose first element has coordinates (x, y), x along the
// contiguous dimension. Elements outside the tensor become zero, and their bytes count among those that complete on
// `barrier`. `map` is the 128 bytes that cuTensorMapEncodeTiled writes, box size and swizzle among them, at a multiple
// of 64 in global, constant or parameter memory. `shared` is at a multiple of 128, or of the period of the swizzle
// (1024 bytes for the 128-byte swizzle).
QG_DEVICE void cp_async_bulk_tensor_2d(u8* shared, const void* map, i32 x, i32 y, u64* barrier) {
    asm volatile("cp.async.bulk.tensor.2d" QG_OWN_SHARED ".global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(shared)),
                 "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier))
                 : "memory");
}
// cp.async.bulk: copies `bytes` neighbouring bytes, which complete on `barrier`. Both addresses and the size are
// multiples of 16.
QG_DEVICE void cp_async_bulk(u8* shared, const u8* global, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk" QG_OWN_SHARED ".global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
// fence.proxy.async: orders this thread's earlier accesses to shared memory before later ones of TMA and the tensor
// cores.
QG_DEVICE void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#endif
