// Shared-memory addresses for PTX instructions.
#pragma once
#include "atoms/types.cuh"

// cvta.to.shared: generic pointer → offset in the shared window.
QG_DEVICE u32 shared_address(const void* pointer) {
    return (u32)__cvta_generic_to_shared(pointer);
}

// cvta.shared: offset in the shared window → generic pointer.
template <class T>
QG_DEVICE T* shared_pointer(u32 address) {
    return reinterpret_cast<T*>(__cvta_shared_to_generic(address));
}
