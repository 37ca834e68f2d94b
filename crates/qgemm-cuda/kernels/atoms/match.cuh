// Which lanes of a warp have the same value. All 32 lanes take part.
#pragma once
#include "atoms/types.cuh"

// match.any.sync: the lanes that have this one's value, as bits.
QG_DEVICE u32 match_any(u32 value) {
    u32 d;
    asm volatile("match.any.sync.b32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(value));
    return d;
}
