// Values that stay in a register: here nothing to see to.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE u32 opaque_register(u32 value) { return value; }
