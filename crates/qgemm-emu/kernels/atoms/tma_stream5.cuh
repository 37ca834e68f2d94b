// 5D TMA with L2 evict-first.
// L2 policies are not emulated.
#pragma once
#include "atoms/tma_stream.cuh"

#if QG_VARIANT >= 90
QG_DEVICE void cp_async_bulk_tensor_5d_stream(u8* shared, const void* map, const i32 (&at)[5], u64* barrier, u64, QG_AT) {
    emu->tensor_copy(shared, map, at, 5, barrier, file, line);
}
#endif
