// Shared-memory atomics.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE u32 atomic_add_shared(u32* address, u32 value, QG_AT) {
    return emu->atomic_add_shared(address, value, file, line);
}
QG_DEVICE void reduce_add_shared(u32* address, u32 value, QG_AT) {
    emu->atomic_add_shared(address, value, file, line);
}
