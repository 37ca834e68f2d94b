// Shared-memory atomics.
#pragma once
#include "atoms/shared_address.cuh"

// red.shared.add.u32, relaxed: no ordering, no result.
QG_DEVICE void reduce_add_shared(u32* address, u32 value) {
    asm volatile("red.shared.add.u32 [%0], %1;" ::"r"(shared_address(address)), "r"(value) : "memory");
}
// atom.shared.add.u32, relaxed: no ordering.
// Returns the old value.
QG_DEVICE u32 atomic_add_shared(u32* address, u32 value) {
    u32 old;
    asm volatile("atom.shared.add.u32 %0, [%1], %2;" : "=r"(old) : "r"(shared_address(address)), "r"(value) : "memory");
    return old;
}
