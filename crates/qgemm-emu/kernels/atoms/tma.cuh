// TMA. Tiles arrive only once every thread waits.
#pragma once
#include "atoms/types.cuh"

#if QG_VARIANT >= 90
QG_DEVICE void cp_async_bulk_tensor_2d(u8* shared, const void* map, i32 x, i32 y, u64* barrier, QG_AT) {
    const i32 at[2] = {x, y};
    emu->tensor_copy(shared, map, at, 2, barrier, file, line);
}
QG_DEVICE void cp_async_bulk(u8* shared, const u8* global, u32 bytes, u64* barrier, QG_AT) {
    emu->bulk_copy(shared, global, bytes, barrier, file, line);
}
QG_DEVICE void fence_proxy_async() { emu->proxy_fence(); }
#endif
