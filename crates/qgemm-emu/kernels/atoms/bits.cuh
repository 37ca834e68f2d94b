// Population count.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE u32 popc(u32 bits) { return (u32)__builtin_popcount(bits); }
