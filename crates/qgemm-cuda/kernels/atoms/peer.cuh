// Memory that other GPUs and the host write meanwhile:
// system-scope loads and stores, and a clock.
#pragma once
#include "atoms/types.cuh"

// Two pairs of words. Nobody sees half of a pair
// (PTX ISA, "memory consistency model": each element of
// a vector access is one memory operation).
struct u32pairs {
    u32x2 low, high;
};

QG_DEVICE u32pairs ld_sys_pairs(u64 address) {
    u64 low, high;
    asm volatile("ld.relaxed.sys.global.v2.u64 {%0, %1}, [%2];" : "=l"(low), "=l"(high) : "l"(address) : "memory");
    return {{(u32)low, (u32)(low >> 32)}, {(u32)high, (u32)(high >> 32)}};
}
QG_DEVICE void st_sys_pairs(u64 address, u32pairs v) {
    const u64 low = v.low.x | (u64)v.low.y << 32, high = v.high.x | (u64)v.high.y << 32;
    asm volatile("st.relaxed.sys.global.v2.u64 [%0], {%1, %2};" ::"l"(address), "l"(low), "l"(high) : "memory");
}
QG_DEVICE u32 ld_sys_u32(u64 address) {
    u32 v;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(address) : "memory");
    return v;
}
QG_DEVICE void st_sys_u32(u64 address, u32 value) {
    asm volatile("st.relaxed.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Nanoseconds of a clock that never stops.
QG_DEVICE u64 global_nanoseconds() {
    u64 v;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(v)::"memory");
    return v;
}
