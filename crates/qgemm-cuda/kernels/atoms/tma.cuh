// TMA: bulk copies of tiles from global to shared memory.
// One thread issues them.
#pragma once
#include "atoms/shared_address.cuh"

#if QG_VARIANT >= 90
// State space of the destination: this CTA's shared memory.
// Every compiler for Hopper accepts `shared::cluster`.
// On consumer Blackwell ptxas then adds a call for remote CTAs
// and drops `setmaxnreg` (C7506).
// `shared::cta` needs PTX ISA 8.6.
#if QG_VARIANT >= 120
#define QG_OWN_SHARED ".shared::cta"
#else
#define QG_OWN_SHARED ".shared::cluster"
#endif

// cp.async.bulk.tensor: copies the tile of tensor map
// `map` at (x, y).
// x runs along the contiguous dimension.
// Elements outside the tensor become zero; their bytes count
// among the completed bytes on `barrier`.
// `map` is 128 bytes from cuTensorMapEncodeTiled, 64-byte
// aligned, in global, constant or parameter memory.
// It holds the box size and the swizzle.
// `shared` is aligned to 128 bytes or to the period of the
// swizzle (1024 bytes for the 128-byte swizzle).
QG_DEVICE void cp_async_bulk_tensor_2d(u8* shared, const void* map, i32 x, i32 y, u64* barrier) {
    asm volatile("cp.async.bulk.tensor.2d" QG_OWN_SHARED ".global.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(shared)),
                 "l"(map), "r"(x), "r"(y), "r"(shared_address(barrier))
                 : "memory");
}
// cp.async.bulk: copies `bytes` contiguous bytes, which
// complete on `barrier`.
// Both addresses and the size are multiples of 16.
QG_DEVICE void cp_async_bulk(u8* shared, const u8* global, u32 bytes, u64* barrier) {
    asm volatile("cp.async.bulk" QG_OWN_SHARED ".global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(shared)),
                 "l"(global), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
}
// fence.proxy.async: orders this thread's earlier accesses to
// shared memory before later ones of TMA and the tensor cores.
QG_DEVICE void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
#endif
