// How far bytes are apart.
#pragma once
#include "atoms/types.cuh"

// vabsdiff4.u32: the differences of the four bytes of a and b, without their signs.
QG_DEVICE u32 byte_differences(u32 a, u32 b) {
    u32 d;
    asm("vabsdiff4.u32.u32.u32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(0));
    return d;
}
