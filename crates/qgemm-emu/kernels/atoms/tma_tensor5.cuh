// 5D TMA.
#pragma once
#include "atoms/tma.cuh"

#if QG_VARIANT >= 90
QG_DEVICE void cp_async_bulk_tensor_5d(u8* shared, const void* map, const i32 (&at)[5], u64* barrier, QG_AT) {
    emu->tensor_copy(shared, map, at, 5, barrier, file, line);
}
#endif
