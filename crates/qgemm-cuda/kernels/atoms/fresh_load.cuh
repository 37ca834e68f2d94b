// Loads that bypass L1, whose lines may be stale:
// the data comes from a launch that this kernel
// has not waited for.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE u32 ld_global_fresh_u32(const u8* address) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
    return v;
}
