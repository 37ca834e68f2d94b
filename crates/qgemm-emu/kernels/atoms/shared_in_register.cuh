// An object in shared memory whose address the compiler keeps in a register. The emulator has nothing to do for it.
#pragma once
#include "atoms/types.cuh"

template <class T>
QG_DEVICE T& shared_in_register(T& object) {
    return object;
}
