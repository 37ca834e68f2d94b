// Addresses in the form in which instructions on shared memory take them.
#pragma once
#include "atoms/types.cuh"

// cvta.to.shared: the offset in the shared window that a generic pointer into shared memory stands for.
QG_DEVICE u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}
