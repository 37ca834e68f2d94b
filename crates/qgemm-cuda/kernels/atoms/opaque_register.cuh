// Values that stay in a register. Compilers otherwise find what is cheap to find, an address in shared memory, a comparison with
// the thread's number, anew wherever it is used.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE u32 opaque_register(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}
