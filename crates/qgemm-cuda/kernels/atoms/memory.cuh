// Loads and stores of global and shared memory.
// Every access goes through these functions, so the emulator
// can check each one.
#pragma once
#include "atoms/types.cuh"

// ld.global.nc without L1 allocation, for weights:
// one warp reads them once, and no kernel writes them.
QG_DEVICE u32x4 ld_global_stream_v4(const u8* address) {
    u32x4 v;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
        : "l"(address));
    return v;
}
QG_DEVICE u32x2 ld_global_stream_v2(const u8* address) {
    u32x2 v;
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(address));
    return v;
}
QG_DEVICE u32 ld_global_stream_u32(const u8* address) {
    u32 v;
    asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(address));
    return v;
}
QG_DEVICE u32 ld_global_u16(const u8* address) {
    u16 v;
    asm("ld.global.nc.u16 %0, [%1];" : "=h"(v) : "l"(address));
    return v;
}
QG_DEVICE u32 ld_global_u8(const u8* address) {
    u32 v;
    asm("ld.global.nc.u8 %0, [%1];" : "=r"(v) : "l"(address));
    return v;
}
// ld.global: cached, because many CTAs read X
// and small operands.
QG_DEVICE u32x4 ld_global_v4(const u8* address) {
    u32x4 v;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}
// ld.global without L1 allocation, for data that one thread
// reads once and an earlier kernel may have written.
QG_DEVICE u32x4 ld_global_once_v4(const u8* address) {
    u32x4 v;
    asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}
QG_DEVICE u32 ld_global_u32(const u8* address) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(address));
    return v;
}
// ld.global.cg: reads other CTAs' partial sums from L2, never
// from a stale L1 line.
QG_DEVICE float ld_global_cg_f32(const float* address) {
    float v;
    asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(v) : "l"(address) : "memory");
    return v;
}
QG_DEVICE f32x4 ld_global_cg_f32x4(const f32x4* address) {
    f32x4 v;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(address)
                 : "memory");
    return v;
}
QG_DEVICE void st_global_f32(float* address, float value) {
    asm volatile("st.global.f32 [%0], %1;" ::"l"(address), "f"(value) : "memory");
}
QG_DEVICE void st_global_f32x4(f32x4* address, f32x4 value) {
    asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(address), "f"(value.x), "f"(value.y), "f"(value.z),
                 "f"(value.w)
                 : "memory");
}
QG_DEVICE u32 ld_global_cached_u16(const u8* address) {
    u16 v;
    asm volatile("ld.global.u16 %0, [%1];" : "=h"(v) : "l"(address));
    return v;
}
QG_DEVICE u32 ld_global_cached_u8(const u8* address) {
    u32 v;
    asm volatile("ld.global.u8 %0, [%1];" : "=r"(v) : "l"(address));
    return v;
}
QG_DEVICE void st_global_v4(u8* address, u32x4 value) {
    asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(value.x), "r"(value.y), "r"(value.z),
                 "r"(value.w)
                 : "memory");
}
QG_DEVICE void st_global_u32(u8* address, u32 value) {
    asm volatile("st.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}
QG_DEVICE void st_global_u16(u8* address, u32 value) {
    asm volatile("st.global.u16 [%0], %1;" ::"l"(address), "h"((u16)value) : "memory");
}

template <class T>
QG_DEVICE T ld_shared(const T* address) {
    return *address;
}
template <class T>
QG_DEVICE void st_shared(T* address, T value) {
    *address = value;
}
