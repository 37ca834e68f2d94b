// Loads that bypass L1.
// The emulator has no cache.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE u32 ld_global_fresh_u32(const u8* address, QG_AT) { return emu_load_global<u32>(address, 0, file, line); }
