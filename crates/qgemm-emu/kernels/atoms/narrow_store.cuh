// Checked global stores narrower than 16 bytes.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE void st_global_u8(u8* address, u32 value, QG_AT) {
    const u8 byte = (u8)value;
    emu->store_global(address, 1, &byte, file, line);
}
QG_DEVICE void st_global_v2(u8* address, u32x2 value, QG_AT) { emu->store_global(address, 8, &value, file, line); }
