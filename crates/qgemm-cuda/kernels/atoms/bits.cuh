// Population count.
#pragma once
#include "atoms/types.cuh"

// popc.b32: the number of set bits.
QG_DEVICE u32 popc(u32 bits) {
    u32 d;
    asm("popc.b32 %0, %1;" : "=r"(d) : "r"(bits));
    return d;
}
