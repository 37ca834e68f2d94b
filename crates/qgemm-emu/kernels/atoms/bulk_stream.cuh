// Bulk copies with L2 evict-first.
// L2 policies are not emulated.
#pragma once
#include "atoms/tma_stream.cuh"

#if QG_VARIANT >= 90
QG_DEVICE void cp_async_bulk_stream(u8* shared, const u8* global, u32 bytes, u64* barrier, u64, QG_AT) {
    emu->bulk_copy(shared, global, bytes, barrier, file, line);
}
#endif
