// Lines of the cache. What a bulk copy brings is to lie as far behind one in shared memory as it does in memory. Where it does not, the copy takes
// longer (one token of FP8, k-tiles of 2064 bytes, 128256x4096, on an H200: 145 us, and 118 where pieces happened to lie so).
#pragma once
#include "atoms/types.cuh"

constexpr u32 LINE_BYTES = 128;
