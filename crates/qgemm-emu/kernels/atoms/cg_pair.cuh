// Two neighbouring numbers that other CTAs wrote, from L2.
#pragma once
#include "atoms/memory.cuh"

QG_DEVICE f32x2 ld_global_cg_f32x2(const f32x2* address, QG_AT) { return emu_load_global<f32x2>(address, 0, file, line); }
