// TMA multicast. Here each CTA copies for itself (`copy_share`).
#pragma once
#include "atoms/tma.cuh"

#if QG_VARIANT == 90
QG_DEVICE void cp_async_bulk_tensor_5d_multicast(u8* shared, const void* map, const i32 (&at)[5], u64* barrier, u32, QG_AT) {
    emu->tensor_copy(shared, map, at, 5, barrier, file, line);
}
#endif
