// A value that the compiler keeps in a register. The emulator has nothing to do for it.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE u32 opaque_register(u32 value) { return value; }
