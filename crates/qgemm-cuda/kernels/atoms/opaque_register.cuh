// Forces a value to stay in a register.
// Otherwise the compiler recomputes cheap values at every use,
// e.g. shared addresses or comparisons with the thread index.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE u32 opaque_register(u32 value) {
    asm volatile("" : "+r"(value));
    return value;
}

// The same, but calls with equal values may
// share a register.
QG_DEVICE u32 opaque_value(u32 value) {
    asm("" : "+r"(value));
    return value;
}
