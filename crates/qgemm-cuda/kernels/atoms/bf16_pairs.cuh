// bf16x2 arithmetic, one instruction each.
#pragma once
#include "atoms/types.cuh"

#if QG_VARIANT >= 90
// sub.bf16x2: rounded once.
QG_DEVICE u32 sub_bf16x2(u32 a, u32 b) {
    u32 d;
    asm("sub.bf16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
#endif
