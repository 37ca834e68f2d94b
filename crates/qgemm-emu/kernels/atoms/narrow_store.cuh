// Stores to global memory of fewer bytes than a vector has, every one checked.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE void st_global_v2(u8* address, u32x2 value, QG_AT) { emu->store_global(address, 8, &value, file, line); }
