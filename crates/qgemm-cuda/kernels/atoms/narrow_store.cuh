// Global stores narrower than 16 bytes.
// A separate file keeps memory.cuh unchanged for other kernels.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE void st_global_u8(u8* address, u32 value) {
    asm volatile("st.global.u8 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
QG_DEVICE void st_global_v2(u8* address, u32x2 value) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(value.x), "r"(value.y) : "memory");
}
