// Compiler hint; a no-op in the emulator.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE u32 opaque_register(u32 value) { return value; }
QG_DEVICE u32 opaque_value(u32 value) { return value; }
