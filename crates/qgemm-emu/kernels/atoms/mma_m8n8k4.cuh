// Volta's m8n8k4 with row- or column-major operands.
// Lane layouts: src/model.
#pragma once
#include "atoms/mma.cuh"

QG_DEVICE void mma_m8n8k4_row_row_f16(float (&d)[8], const u32 (&a)[2], const u32 (&b)[2], QG_AT) {
    emu_mma(EMU_mma_m8n8k4_row_row_f16, d, a, b, file, line);
}
QG_DEVICE void mma_m8n8k4_col_col_f16(float (&d)[8], const u32 (&a)[2], const u32 (&b)[2], QG_AT) {
    emu_mma(EMU_mma_m8n8k4_col_col_f16, d, a, b, file, line);
}
QG_DEVICE void mma_m8n8k4_col_row_f16(float (&d)[8], const u32 (&a)[2], const u32 (&b)[2], QG_AT) {
    emu_mma(EMU_mma_m8n8k4_col_row_f16, d, a, b, file, line);
}
