// Matrix instructions of one warp with block-scaled E2M1 or E4M3 operands and f32 accumulators: D += (A · scale) · (B · scale).
#pragma once
#include "atoms/mma.cuh"

#if QG_VARIANT >= 120
QG_DEVICE void mma_m16n8k64_mxf4(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, u32 scale_b,
                                 QG_AT) {
    const u32 scales[2] = {scale_a, scale_b};
    emu_mma(EMU_mma_m16n8k64_mxf4, d, a, b, file, line, scales, 2);
}
QG_DEVICE void mma_m16n8k64_nvf4(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, u32 scale_b,
                                 QG_AT) {
    const u32 scales[2] = {scale_a, scale_b};
    emu_mma(EMU_mma_m16n8k64_nvf4, d, a, b, file, line, scales, 2);
}
template <bool A_E2M1, u32 BYTE>
QG_DEVICE void mma_m16n8k32_mxf8(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, u32 scale_b, QG_AT) {
    const u32 scales[2] = {scale_a >> (8 * BYTE), scale_b >> (8 * BYTE)};
    emu_mma(A_E2M1 ? EMU_mma_m16n8k32_mxf8_e2m1 : EMU_mma_m16n8k32_mxf8, d, a, b, file, line, scales, 2);
}
#endif
