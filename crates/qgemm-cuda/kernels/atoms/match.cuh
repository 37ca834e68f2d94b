// Lanes of a warp with equal values.
// All 32 lanes take part.
#pragma once
#include "atoms/types.cuh"

// match.any.sync: mask of lanes with an equal value.
QG_DEVICE u32 match_any(u32 value) {
    u32 d;
    asm volatile("match.any.sync.b32 %0, %1, 0xffffffff;" : "=r"(d) : "r"(value));
    return d;
}
