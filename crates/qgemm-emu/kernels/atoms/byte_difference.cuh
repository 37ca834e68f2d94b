// Absolute differences of bytes.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE u32 byte_differences(u32 a, u32 b) {
    u32 d = 0;
    for (u32 shift = 0; shift < 32; shift += 8) {
        const u32 x = a >> shift & 0xffu, y = b >> shift & 0xffu;
        d |= (x > y ? x - y : y - x) << shift;
    }
    return d;
}
