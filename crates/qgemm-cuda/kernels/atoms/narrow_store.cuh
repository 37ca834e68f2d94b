// Stores to global memory of fewer bytes than a vector has. They have a file of their own so that memory.cuh is the same text for
// kernels that store none.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE void st_global_u8(u8* address, u32 value) {
    asm volatile("st.global.u8 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
QG_DEVICE void st_global_v2(u8* address, u32x2 value) {
    asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(value.x), "r"(value.y) : "memory");
}
