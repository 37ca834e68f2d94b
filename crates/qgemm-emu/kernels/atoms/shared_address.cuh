// Shared-memory offsets, as descriptors hold them.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE u32 shared_address(const void* generic) {
    return (u32)(static_cast<const u8*>(generic) - emu->place()->shared);
}

template <class T>
QG_DEVICE T* shared_pointer(u32 address) {
    return reinterpret_cast<T*>(emu->place()->shared + address);
}
