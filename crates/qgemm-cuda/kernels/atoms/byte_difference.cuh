// Absolute differences of bytes.
#pragma once
#include "atoms/types.cuh"

// vabsdiff4.u32: |a − b| of each of the four bytes.
QG_DEVICE u32 byte_differences(u32 a, u32 b) {
    u32 d;
    asm("vabsdiff4.u32.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0));
    return d;
}
