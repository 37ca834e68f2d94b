// A value that the compiler keeps in a register. Otherwise it computes cheap values, such as an address in shared
// memory or a comparison with the thread's number, again at every use.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE u32 opaque_register(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}
