// An object in shared memory whose address the compiler keeps in a register. Otherwise it asks for the CTA's rank in its cluster, which
// addresses begin with, wherever it computes one.
#pragma once
#include "atoms/opaque_register.cuh"
#include "atoms/shared_address.cuh"

template <class T>
QG_DEVICE T& shared_in_register(T& object) {
    return *reinterpret_cast<T*>(__cvta_shared_to_generic(opaque_register(shared_address(&object))));
}
