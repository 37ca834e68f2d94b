// f32x2 access through L2, to exchange partial
// sums between CTAs.
#pragma once
#include "atoms/memory.cuh"

QG_DEVICE f32x2 ld_global_cg_f32x2(const f32x2* address, QG_AT) { return emu_load_global<f32x2>(address, 0, file, line); }
QG_DEVICE void st_global_f32x2(f32x2* address, f32x2 value, QG_AT) { emu->store_global(address, 8, &value, file, line); }
