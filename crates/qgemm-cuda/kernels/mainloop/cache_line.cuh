// Cache line size.
// A bulk copy is fastest if its shared and global addresses
// are equal modulo the line size.
#pragma once
#include "atoms/types.cuh"

constexpr u32 LINE_BYTES = 128;
