// f32x2 access through L2, to exchange partial
// sums between CTAs.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE f32x2 ld_global_cg_f32x2(const f32x2* address) {
    f32x2 v;
    asm volatile("ld.global.cg.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(address) : "memory");
    return v;
}
QG_DEVICE void st_global_f32x2(f32x2* address, f32x2 value) {
    asm volatile("st.global.v2.f32 [%0], {%1, %2};" ::"l"(address), "f"(value.x), "f"(value.y) : "memory");
}
