// Columns that a thread loads and stores at once.
#pragma once
#include "atoms/types.cuh"

constexpr u32 GROUP = 8;
