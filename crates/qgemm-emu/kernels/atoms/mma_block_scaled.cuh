// Block-scaled mma.sync with E2M1 or E4M3 operands.
#pragma once
#include "atoms/types.cuh"

#if QG_VARIANT >= 120
struct ScaleSelector {
    u32 byte, thread;
};

// The model takes the selectors as a third scale word.
QG_DEVICE void emu_mma_block_scaled(u32 op, float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, ScaleSelector at_a,
                                    u32 scale_b, ScaleSelector at_b, const char* file, u32 line) {
    u32 in[13] = {a[0], a[1], a[2], a[3], b[0], b[1]}, out[4];
    __builtin_memcpy(in + 6, d, sizeof d);
    in[10] = scale_a, in[11] = scale_b;
    in[12] = at_a.byte | at_a.thread << 8 | at_b.byte << 16 | at_b.thread << 24;
    emu->collective(op, in, 13, out, 4, file, line);
    __builtin_memcpy(d, out, sizeof d);
}

QG_DEVICE void mma_m16n8k64_mxf4(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, ScaleSelector at_a, u32 scale_b,
                                 ScaleSelector at_b, QG_AT) {
    emu_mma_block_scaled(EMU_mma_m16n8k64_mxf4, d, a, b, scale_a, at_a, scale_b, at_b, file, line);
}
QG_DEVICE void mma_m16n8k64_nvf4(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, ScaleSelector at_a, u32 scale_b,
                                 ScaleSelector at_b, QG_AT) {
    emu_mma_block_scaled(EMU_mma_m16n8k64_nvf4, d, a, b, scale_a, at_a, scale_b, at_b, file, line);
}
template <bool B_E2M1>
QG_DEVICE void mma_m16n8k32_mxf8(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, ScaleSelector at_a, u32 scale_b,
                                 ScaleSelector at_b, QG_AT) {
    emu_mma_block_scaled(B_E2M1 ? EMU_mma_m16n8k32_mxf8_e2m1 : EMU_mma_m16n8k32_mxf8, d, a, b, scale_a, at_a, scale_b, at_b,
                         file, line);
}
#endif
