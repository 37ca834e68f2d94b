// Compiler hint; a no-op in the emulator.
#pragma once
#include "atoms/types.cuh"

template <class T>
QG_DEVICE T& shared_in_register(T& object) {
    return object;
}
