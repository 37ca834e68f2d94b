// Addresses in the form in which instructions on shared memory take them.
#pragma once
#include "atoms/types.cuh"

// cvta.to.shared: the offset in the shared window that a generic pointer into shared memory stands for.
QG_DEVICE u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

// The same in a register that stays: compilers otherwise find such addresses anew wherever one is used.
QG_DEVICE u32 kept_shared_address(const void* pointer) {
    u32 address = shared_address(pointer);
    asm volatile("" : "+r"(address));
    return address;
}
