// Addresses within shared memory, as descriptors hold them: here the offset from its first byte.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE u32 shared_address(const void* generic) {
    return (u32)(static_cast<const u8*>(generic) - emu->place()->shared);
}
