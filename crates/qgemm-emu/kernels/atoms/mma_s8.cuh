// mma.sync with s8 operands and wrapping s32 accumulators.
#pragma once
#include "atoms/mma.cuh"

#if QG_VARIANT >= 75
QG_DEVICE void mma_m8n8k16_s8(i32 (&d)[2], u32 a, u32 b, QG_AT) {
    const u32 a_words[1] = {a}, b_words[1] = {b};
    emu_mma(EMU_mma_m8n8k16_s8, d, a_words, b_words, file, line);
}
#endif

#if QG_VARIANT >= 80
QG_DEVICE void mma_m16n8k16_s8(i32 (&d)[4], const u32 (&a)[2], u32 b, QG_AT) {
    const u32 b_words[1] = {b};
    emu_mma(EMU_mma_m16n8k16_s8, d, a, b_words, file, line);
}
QG_DEVICE void mma_m16n8k32_s8(i32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2], QG_AT) {
    emu_mma(EMU_mma_m16n8k32_s8, d, a, b, file, line);
}
#endif
