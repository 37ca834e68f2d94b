// mma.sync with FP8 operands and f32 accumulators.
#pragma once
#include "atoms/mma.cuh"

#if QG_VARIANT >= 89
QG_DEVICE void mma_m16n8k32_e4m3(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], QG_AT) {
    emu_mma(EMU_mma_m16n8k32_e4m3, d, a, b, file, line);
}
QG_DEVICE void mma_m16n8k32_e5m2(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], QG_AT) {
    emu_mma(EMU_mma_m16n8k32_e5m2, d, a, b, file, line);
}
QG_DEVICE void mma_m16n8k32_e4m3_e5m2(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], QG_AT) {
    emu_mma(EMU_mma_m16n8k32_e4m3_e5m2, d, a, b, file, line);
}
#endif
