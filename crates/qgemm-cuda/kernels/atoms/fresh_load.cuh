// Loads of what an earlier launch has written whose end was not waited for: past L1, which may keep what was there before.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE u32 ld_global_fresh_u32(const u8* address) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
    return v;
}
