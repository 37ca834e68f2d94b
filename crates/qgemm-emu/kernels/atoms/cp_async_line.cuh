// cp.async with an L2 prefetch, which is not emulated.
#pragma once
#include "atoms/cp_async.cuh"

#if QG_VARIANT >= 80
QG_DEVICE void cp_async_4_line(u8* shared, const u8* global, u32 source_bytes, QG_AT) {
    emu->cp_async(shared, global, 4, source_bytes, file, line);
}
QG_DEVICE void cp_async_8_line(u8* shared, const u8* global, u32 source_bytes, QG_AT) {
    emu->cp_async(shared, global, 8, source_bytes, file, line);
}
QG_DEVICE void cp_async_16_or_zeros_line(bool wanted, u32 shared, const u8* global, QG_AT) {
    emu->cp_async(emu->place()->shared + shared, global, 16, wanted ? 16 : 0, file, line);
}
#endif
