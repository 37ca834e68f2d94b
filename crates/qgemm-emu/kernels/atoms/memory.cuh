// Checked loads and stores of global and shared memory.
#pragma once
#include "atoms/types.cuh"

template <class T>
QG_DEVICE T emu_load_global(const void* address, u32 read_only, const char* file, u32 line) {
    T v;
    emu->load_global(address, sizeof(T), &v, read_only, file, line);
    return v;
}

QG_DEVICE u32x4 ld_global_stream_v4(const u8* address, QG_AT) { return emu_load_global<u32x4>(address, 1, file, line); }
QG_DEVICE u32x2 ld_global_stream_v2(const u8* address, QG_AT) { return emu_load_global<u32x2>(address, 1, file, line); }
QG_DEVICE u32 ld_global_stream_u32(const u8* address, QG_AT) { return emu_load_global<u32>(address, 1, file, line); }
QG_DEVICE u32 ld_global_u16(const u8* address, QG_AT) { return emu_load_global<u16>(address, 1, file, line); }
QG_DEVICE u32 ld_global_u8(const u8* address, QG_AT) { return emu_load_global<u8>(address, 1, file, line); }
QG_DEVICE u32x4 ld_global_v4(const u8* address, QG_AT) { return emu_load_global<u32x4>(address, 0, file, line); }
QG_DEVICE u32x4 ld_global_once_v4(const u8* address, QG_AT) { return emu_load_global<u32x4>(address, 0, file, line); }
QG_DEVICE u32 ld_global_u32(const u8* address, QG_AT) { return emu_load_global<u32>(address, 0, file, line); }
QG_DEVICE float ld_global_cg_f32(const float* address, QG_AT) { return emu_load_global<float>(address, 0, file, line); }
QG_DEVICE f32x4 ld_global_cg_f32x4(const f32x4* address, QG_AT) {
    return emu_load_global<f32x4>(address, 0, file, line);
}
QG_DEVICE u32 ld_global_cached_u16(const u8* address, QG_AT) { return emu_load_global<u16>(address, 0, file, line); }
QG_DEVICE u32 ld_global_cached_u8(const u8* address, QG_AT) { return emu_load_global<u8>(address, 0, file, line); }

QG_DEVICE void st_global_f32(float* address, float value, QG_AT) { emu->store_global(address, 4, &value, file, line); }
QG_DEVICE void st_global_f32x4(f32x4* address, f32x4 value, QG_AT) {
    emu->store_global(address, 16, &value, file, line);
}
QG_DEVICE void st_global_v4(u8* address, u32x4 value, QG_AT) { emu->store_global(address, 16, &value, file, line); }
QG_DEVICE void st_global_u32(u8* address, u32 value, QG_AT) { emu->store_global(address, 4, &value, file, line); }
QG_DEVICE void st_global_u16(u8* address, u32 value, QG_AT) {
    const u16 half = (u16)value;
    emu->store_global(address, 2, &half, file, line);
}

template <class T>
QG_DEVICE T ld_shared(const T* address, QG_AT) {
    T v;
    emu->load_shared(address, sizeof(T), &v, file, line);
    return v;
}
template <class T>
QG_DEVICE void st_shared(T* address, T value, QG_AT) {
    emu->store_shared(address, sizeof(T), &value, file, line);
}
