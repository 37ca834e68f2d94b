// Shared object whose address stays in a register.
// Otherwise the compiler reads the CTA's cluster rank, a part
// of each such address, at every use.
#pragma once
#include "atoms/opaque_register.cuh"
#include "atoms/shared_address.cuh"

template <class T>
QG_DEVICE T& shared_in_register(T& object) {
    return *shared_pointer<T>(opaque_register(shared_address(&object)));
}
