// Shared-memory addresses for PTX instructions.
#pragma once
#include "atoms/types.cuh"

// cvta.to.shared: generic pointer → offset in the shared window.
QG_DEVICE u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}
